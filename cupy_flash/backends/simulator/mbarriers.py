"""mbarrier objects in shared memory: arrivals and bytes still to come, the phase, who waits for which.

A wait suspends its lanes until the phase has passed, as hardware may; where nothing else can run, and at random times
where those are random, it returns false, as hardware may too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from .access import addresses
from .closures import Compiler, unsupported
from .errors import BarrierMisuse, Misaligned, MissingFence, OutOfBounds, Race, Uninitialised
from .lanes import Context, Group, Mask, Step
from .memory import SHARED_START
from .ptx import Immediate, Instruction

Indices = npt.NDArray[np.int64]

# An address of shared::cluster is that of the block's own window, and above it the block's rank plus one; 0: its own.
RANK_BITS = 24
_MORE = 16
_TIMED_OUT = 0.1  # how often a look at an mbarrier ends a wait in vain when that is random


class Lanes(NamedTuple):
    """The active lanes of a group at places in shared memory: row, lane, block and byte offset in it of each."""

    rows: Indices
    lanes: Indices
    blocks: Indices
    offsets: Indices


def shared_places(instruction: Instruction, context: Context, group: Group, address: Indices, size: int) -> Lanes:
    """Where lanes point to in the shared memory of their cluster: inside it, and aligned to `size`."""
    flat = group.active(address)
    rows = group.active(np.broadcast_to(group.rows[:, None], (len(group.rows), 32)))
    lanes = group.active(np.broadcast_to(np.arange(32), (len(group.rows), 32)))
    rank, offsets = flat >> RANK_BITS, (flat & ((1 << RANK_BITS) - 1)) - SHARED_START
    own = context.block_of_row[rows]
    blocks = np.where(rank == 0, own, own - context.rank_of_row[rows] + rank - 1)
    for wrong, error, what in (
        ((offsets < 0) | (offsets + size > context.shared_bytes), OutOfBounds, "lies outside the shared memory"),
        ((rank < 0) | (rank > context.cluster), OutOfBounds, "names no block of the cluster"),
        (offsets % size != 0, Misaligned, f"is no multiple of {size}"),
    ):
        if wrong.any():
            i = int(np.flatnonzero(wrong)[0])
            raise error(
                f"shared address {int(flat[i]):#x} {what}\n  {context.thread_name(int(rows[i]), int(lanes[i]))}: "
                f"{instruction.where}"
            )
    return Lanes(rows, lanes, blocks, offsets)


class Mbarriers:
    """The objects of one set of resident blocks: arrays (objects, blocks), an object for each offset ever used."""

    def __init__(self, context: Context):
        self.context = context
        self.number: dict[int, int] = {}  # offset in shared memory -> index
        shape = (_MORE, context.blocks)
        self.expected = np.zeros(shape, np.int64)  # arrivals of a phase; 0: not initialised
        self.missing = np.zeros(shape, np.int64)  # arrivals to come
        self.bytes = np.zeros(shape, np.int64)  # to come
        self.phase = np.zeros(shape, np.int64)  # completed ones
        self._initialised_by = np.zeros(shape, np.int64)  # row
        self._initialised_at = np.zeros(shape, np.uint64)  # clock of that warp
        self._fenced = np.zeros(shape, bool)
        self._flying = np.zeros(shape, np.int64)  # copies that are to report
        self._arrived: dict[int, npt.NDArray[np.bool_]] = {}  # by offset: (block, warp, lane) in the current phase
        self.gave_up = False  # waits return false: nothing else can run
        self.wanted: dict[int, Callable[[Group], Any]] = {}  # instruction number -> reader of what its lanes wait for

    def of(self, places: Lanes, instruction: Instruction) -> Indices:
        """The index of each lane's object, which is initialised and known to the lane to be so."""
        context = self.context
        first = int(places.offsets[0])
        if (places.offsets == first).all():
            found = np.full(len(places.offsets), self.number.get(first, -1))
        else:
            found = np.array([self.number.get(int(offset), -1) for offset in places.offsets])
        wrong = (found < 0) | (self.expected[found, places.blocks] == 0)
        if wrong.any():
            i = int(np.flatnonzero(wrong)[0])
            raise Uninitialised(f"no mbarrier at {self._name(places, i)}: {instruction.where}")
        if context.checks is not None:
            warp = context.warp_in_cluster[self._initialised_by[found, places.blocks]]
            known = context.checks.clocks.known_of(places.rows, places.lanes, warp[:, None])[:, 0]
            late = self._initialised_at[found, places.blocks] > known
            if late.any():
                i = int(np.flatnonzero(late)[0])
                raise Race(
                    f"the mbarrier at {self._name(places, i)} is used without a barrier after its initialisation\n"
                    f"  {self._thread(places, i)}: {instruction.where}"
                )
        return found

    def _thread(self, places: Lanes, i: int) -> str:
        return self.context.thread_name(int(places.rows[i]), int(places.lanes[i]))

    def _name(self, places: Lanes, i: int) -> str:
        index = int(places.blocks[i]) * self.context.shared_stride + int(places.offsets[i])
        return f"shared byte {self.context.name_shared(index)}"

    # ---- what instructions do

    def initialise(self, group: Group, places: Lanes, counts: Indices, instruction: Instruction) -> None:
        """mbarrier.init"""
        context = self.context
        for offset in np.unique(places.offsets):
            self.number.setdefault(int(offset), len(self.number))
        while len(self.number) > len(self.expected):  # every array of the objects gets more rows
            for name, array in vars(self).items():
                if isinstance(array, np.ndarray):
                    setattr(self, name, np.concatenate([array, np.zeros((_MORE, context.blocks), array.dtype)]))
        at = np.array([self.number[int(offset)] for offset in places.offsets]), places.blocks
        if not ((counts > 0) & (counts < 1 << 20)).all():
            raise BarrierMisuse(f"an mbarrier of {int(counts.min())} arrivals: {instruction.where}")
        index = places.blocks * context.shared_stride + places.offsets
        if context.checks is not None:
            context.checks.shared_write(group, index, 8, context.number_of[id(instruction)])
            self._initialised_by[at] = places.rows
            self._initialised_at[at] = context.checks.clocks.own(places.rows)
        context.shared.scatter(index, 8, np.zeros(len(index), np.uint64))  # opaque
        self.expected[at] = self.missing[at] = counts
        self.bytes[at] = self.phase[at] = self._flying[at] = 0
        self._fenced[at] = False

    def fence(self, group: Group) -> None:
        """fence.mbarrier_init or fence.proxy.async: copies may use what these warps have initialised."""
        self._fenced |= (self.expected > 0) & np.isin(self._initialised_by, group.rows)

    def arrive(
        self, places: Lanes, instruction: Instruction, counts: Any, amounts: Any, *, release: bool = True
    ) -> Indices:
        """Lanes arrive `counts` times and announce `amounts` bytes; the phases before."""
        context = self.context
        at = self.of(places, instruction), places.blocks
        before = self.phase[at]
        context.exits.use(places, before, instruction, arrives=True)
        if release and context.checks is not None:
            for offset in np.unique(places.offsets):
                mine = places.offsets == offset
                arrived = self._arrived.setdefault(
                    int(offset), np.zeros((context.blocks, context.checks.clocks.warps, 32), bool)
                )
                arrived[places.blocks[mine], context.warp_in_cluster[places.rows[mine]], places.lanes[mine]] = True
                rows, blocks = np.unique(np.stack([places.rows[mine], places.blocks[mine]]), axis=1)
                lanes = arrived[blocks, context.warp_in_cluster[rows]]
                known = context.checks.ordered(rows, lanes)
                context.checks.clocks.publish(("arrivals", int(offset)), rows, blocks, lanes, known)
        np.add.at(self.bytes, at, amounts)
        np.subtract.at(self.missing, at, counts)
        if (self.missing[at] < 0).any():
            i = int(np.flatnonzero(self.missing[at] < 0)[0])
            raise BarrierMisuse(
                f"more than the {int(self.expected[at][i])} arrivals that the mbarrier at {self._name(places, i)} "
                f"expects in a phase\n  {self._thread(places, i)}: {instruction.where}"
            )
        self._complete(at, places, instruction)
        return before

    def expect_copy(self, places: Lanes, instruction: Instruction) -> Indices:
        """Copies are issued that will report here; the phases that they belong to."""
        at = self.of(places, instruction), places.blocks
        if self.context.checks is not None and not self._fenced[at].all():
            i = int(np.flatnonzero(~self._fenced[at])[0])
            raise MissingFence(
                f"no fence.mbarrier_init or fence.proxy.async after the initialisation of the mbarrier at "
                f"{self._name(places, i)}, on which a copy is to report\n  {self._thread(places, i)}: "
                f"{instruction.where}"
            )
        np.add.at(self._flying, at, 1)
        return self.phase[at]

    def copied(self, places: Lanes, amount: int, instruction: Instruction) -> None:
        """Copies have landed: complete_tx."""
        at = self.of(places, instruction), places.blocks
        np.subtract.at(self.bytes, at, amount)
        np.subtract.at(self._flying, at, 1)
        self._complete(at, places, instruction)

    def _complete(self, at: tuple[Indices, Indices], places: Lanes, instruction: Instruction) -> None:
        done = (self.missing[at] == 0) & (self.bytes[at] == 0)
        if not done.any():
            return
        early = done & (self._flying[at] > 0)
        if early.any():
            i = int(np.flatnonzero(early)[0])
            raise BarrierMisuse(
                f"phase {int(self.phase[at][i])} of the mbarrier at {self._name(places, i)} completes before "
                f"all of its copies have landed: expect_tx announced too few bytes\n  {self._thread(places, i)}: "
                f"{instruction.where}"
            )
        self.context.events += 1
        for k in np.unique(at[0][done]):
            blocks = np.unique(at[1][done & (at[0] == k)])
            self.phase[k, blocks] += 1
            self.missing[k, blocks] = self.expected[k, blocks]
            if self.context.checks is not None:
                offset = int(places.offsets[np.flatnonzero(at[0] == k)[0]])
                self.context.checks.clocks.hand_on(("arrivals", offset), ("phase", offset), blocks)
                if offset in self._arrived:
                    self._arrived[offset][blocks] = False

    def learn(self, places: Lanes, instruction: Instruction) -> None:
        """Lanes that have seen a phase complete know what its arrivals knew, and its copies."""
        context = self.context
        if context.checks is None or not len(places.rows):
            return
        clocks, phases = context.checks.clocks, self.phase[self.of(places, instruction), places.blocks]
        rank = places.blocks % context.cluster
        for offset, r in {(int(o), int(r)) for o, r in zip(places.offsets, rank, strict=True)}:
            mine = np.flatnonzero((places.offsets == offset) & (rank == r))
            rows, first, which = np.unique(places.rows[mine], return_index=True, return_inverse=True)
            lanes = np.zeros((len(rows), 32), bool)
            lanes[which, places.lanes[mine]] = True
            clocks.learn(("phase", offset), rows, places.blocks[mine][first], lanes)
            clocks.learn_clock(clocks.agent(("mbarrier", offset, r)), rows, phases[mine][first], lanes)

    def explain(self, group: Group, instruction: Instruction) -> Iterator[str]:
        """What the lanes of a waiting group wait for."""
        context = self.context
        places, wanted, word = self.wanted[context.number_of[id(instruction)]](group)
        at = self.of(places, instruction), places.blocks
        waits = np.stack([*at, context.block_of_row[places.rows], wanted], axis=1)
        for k, b, block, value in np.unique(waits, axis=0):
            same = (waits == (k, b, block, value)).all(1)
            warps = [int(warp) for warp in np.unique(context.warp_of_row[places.rows[same]])]
            amount = int(self.bytes[k, b])
            more = f", {amount} bytes to come" if amount > 0 else f", {-amount} bytes too many" if amount else ""
            yield (
                f"block {int(context.block_ids[block])}: warps {warps} wait for {word} {value} of the mbarrier at "
                f"{self._name(places, int(np.flatnonzero(same)[0]))} (in phase {int(self.phase[k, b])}: "
                f"{int(self.missing[k, b])} of {int(self.expected[k, b])} arrivals to come{more}): {instruction.where}"
            )


# ---- instructions


def _mbarrier(instruction: Instruction, context: Context) -> Step:
    modifiers = instruction.modifiers
    if not any(m.split("::")[0] == "shared" for m in modifiers) or modifiers[-1] != "b64":
        raise unsupported(instruction)
    if modifiers[0] in ("try_wait", "test_wait"):
        return _wait(instruction, context)
    if modifiers[0] == "init":
        return _initialise(instruction, context)
    if modifiers[0] not in ("arrive", "expect_tx") or "noComplete" in modifiers:
        raise unsupported(instruction)
    return _arrive(instruction, context)


def _lane_values(group: Group, source: Any) -> Indices:
    return group.active(np.broadcast_to(np.asarray(group.read(source), np.int64), (len(group.rows), 32)))


def _initialise(instruction: Instruction, context: Context) -> Step:
    address_of = addresses(instruction.operands[0], context, instruction)
    count = context.source(instruction.operands[1], "u32", instruction)

    def step(group: Group) -> None:
        places = shared_places(instruction, context, group, address_of(group), 8)
        context.mbarriers.initialise(group, places, _lane_values(group, count), instruction)

    return step


def _arrive(instruction: Instruction, context: Context) -> Step:
    """mbarrier.arrive{.expect_tx} state, [address]{, count | bytes}; mbarrier.expect_tx [address], bytes"""
    modifiers, operands = instruction.modifiers, list(instruction.operands)
    arrives = modifiers[0] == "arrive"
    state = context.destination(operands.pop(0), "b64", instruction) if arrives else None
    address_of = addresses(operands[0], context, instruction)
    number = operands[1] if len(operands) > 1 else Immediate(1, "int")
    value = context.source(number, "u32", instruction)
    announces, release = "expect_tx" in modifiers, arrives and "relaxed" not in modifiers

    def step(group: Group) -> None:
        places = shared_places(instruction, context, group, address_of(group), 8)
        values = _lane_values(group, value)
        counts, amounts = (int(arrives), values) if announces else (values, 0)
        before = context.mbarriers.arrive(places, instruction, counts, amounts, release=release)
        if state is not None:
            spread = np.zeros((len(group.rows), 32), np.uint64)
            spread[group.lanes()] = before
            group.write(state, spread)

    return step


def _waited(instruction: Instruction, context: Context) -> Callable[[Group], Any]:
    """A reader of (places, what is waited for, its name): a parity, or the phase in a state."""
    address_of = addresses(instruction.operands[1], context, instruction)
    by_parity = "parity" in instruction.modifiers
    wanted = context.source(instruction.operands[2], "u32" if by_parity else "u64", instruction)
    word = "parity" if by_parity else "phase"

    def read(group: Group) -> tuple[Lanes, Indices, str]:
        places = shared_places(instruction, context, group, address_of(group), 8)
        return places, _lane_values(group, wanted), word

    return read


def _passed(places: Lanes, wanted: Indices, word: str, context: Context, instruction: Instruction) -> Any:
    """Parity p: the phase before the current one is done, and is of parity p."""
    mbarriers = context.mbarriers
    phase = mbarriers.phase[mbarriers.of(places, instruction), places.blocks]
    return (phase & 1) != (wanted & 1) if word == "parity" else phase > wanted


def ready(instruction: Instruction, context: Context) -> Callable[[Group], Mask]:
    """A reader of the lanes (rows, 32) whose wait ends now, the phase being complete or its time up."""
    read = _waited(instruction, context)
    context.mbarriers.wanted[context.number_of[id(instruction)]] = read

    def lanes(group: Group) -> Mask:
        mask = group.lanes().copy()
        if not context.mbarriers.gave_up:
            places, wanted, word = read(group)
            mask[mask] = _passed(places, wanted, word, context, instruction)
            if context.random is not None:
                mask |= group.lanes() & (context.random.random(len(group.rows)) < _TIMED_OUT)[:, None]
        return mask

    return lanes


def _wait(instruction: Instruction, context: Context) -> Step:
    result = context.destination(instruction.operands[0], "pred", instruction)
    read = _waited(instruction, context)
    acquire = "relaxed" not in instruction.modifiers

    def step(group: Group) -> None:
        places, wanted, word = read(group)
        passed = _passed(places, wanted, word, context, instruction)
        if acquire:
            context.mbarriers.learn(Lanes(*(part[passed] for part in places)), instruction)
        spread = np.zeros((len(group.rows), 32), bool)
        spread[group.lanes()] = passed
        group.write(result, spread)

    return step


COMPILERS: dict[str, Compiler] = {"mbarrier": _mbarrier}
