"""mbarrier objects in shared memory: init, inval, arrive, expect_tx, test_wait and try_wait.

A wait suspends its lanes until the phase completes. It returns false, as the PTX ISA allows, if nothing else can run
or, in random order, at random times.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import BarrierMisuse, MissingFence, Race, Uninitialised
from ..instructions.access import addresses
from ..instructions.closures import Compiler, unsupported
from ..machine.context import Context, Group, Mask, Step, Unit
from ..machine.ptx import Immediate, Instruction
from ..memory.checks import Checks
from ..memory.shared_addresses import SharedAddresses, shared_addresses
from .exits import Exits, Use

Indices = npt.NDArray[np.int64]

_MORE = 16
_TIMED_OUT = 0.1  # probability that a wait returns false at each check, if order="random"


class Mbarriers(Unit):
    """The mbarrier objects of one set of resident blocks: arrays (objects, blocks), one object per offset in use."""

    def __init__(self, context: Context):
        super().__init__(context)
        self.checks, self.exits = context.find(Checks), context.unit(Exits)
        self.number: dict[int, int] = {}  # offset in shared memory -> index
        shape = (_MORE, context.blocks)
        # Expected arrivals per phase; 0: not initialised, -1: invalidated.
        self.expected = np.zeros(shape, np.int64)
        self.pending = np.zeros(shape, np.int64)  # pending arrivals of the current phase
        self.tx_count = np.zeros(shape, np.int64)  # pending bytes
        self.phase = np.zeros(shape, np.int64)  # number of completed phases
        self._initialised_by = np.zeros(shape, np.int64)  # the initialising thread: 32 * row + lane
        self._initialised_at = np.zeros(shape, np.uint64)  # clock of its warp
        self._fenced = np.zeros(shape, bool)
        self._copies = np.zeros(shape, np.int64)  # bulk copies in flight that signal this mbarrier
        self._copied = np.zeros(shape, np.int64)  # completed phases once its last bulk copy is complete
        # The last tcgen05.commit that signals it: the agent of its mma, and their clock once they are complete.
        self._committed_by, self._committed = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
        self._used_at = np.zeros((*shape, context.warps_per_block * context.cluster), np.uint64)  # clock, by warp
        self._arrived: dict[
            int, npt.NDArray[np.bool_]
        ] = {}  # offset -> (block, warp, lane): arrivals of the current phase
        self.time_out = False  # the next waits return false, because nothing else can run
        self.waits: dict[int, Callable[[Group], Any]] = {}  # instruction number -> its `_waited` function

    def lookup(self, targets: SharedAddresses, instruction: Instruction) -> Indices:
        """Return the index of each lane's mbarrier; raises unless the initialisation happens before this use."""
        context = self.context
        first = int(targets.offsets[0])
        if (targets.offsets == first).all():
            index = np.full(len(targets.offsets), self.number.get(first, -1))
        else:
            index = np.array([self.number.get(int(offset), -1) for offset in targets.offsets])
        expected = np.where(index < 0, 0, self.expected[index, targets.blocks])
        if (expected <= 0).any():
            i = int(np.flatnonzero(expected <= 0)[0])
            since = " since its mbarrier.inval" if expected[i] else ""
            raise Uninitialised(
                f"no mbarrier.init of {self._name(targets, i)}{since}\n  "
                f"{self._thread(targets, i)}: {instruction.where}"
            )
        if self.checks is not None:
            thread, at = self._initialised_by[index, targets.blocks], self._initialised_at[index, targets.blocks]
            warp = context.warp_in_cluster[thread >> 5]
            clocks = self.checks.clocks
            late = at > clocks.known_of(targets.rows, targets.lanes, warp[:, None])[:, 0]
            if late.any() and context.program.relaxed:
                agents = np.array(
                    [clocks.agent(("init", int(w), int(t) & 31)) for w, t in zip(warp, thread, strict=True)]
                )
                late &= at > clocks.known_of(targets.rows, targets.lanes, agents[:, None])[:, 0]
            if late.any():
                i = int(np.flatnonzero(late)[0])
                context.report(
                    "race",
                    Race,
                    f"the mbarrier at {self._name(targets, i)} is used without a barrier after its mbarrier.init\n"
                    f"  {self._thread(targets, i)}: {instruction.where}",
                )
        return index

    def _thread(self, targets: SharedAddresses, i: int) -> str:
        return self.context.thread_name(int(targets.rows[i]), int(targets.lanes[i]))

    def _name(self, targets: SharedAddresses, i: int) -> str:
        index = int(targets.blocks[i]) * self.context.shared_stride + int(targets.offsets[i])
        return f"shared byte {self.context.shared_byte_name(index)}"

    # ---- operations

    def initialise(self, group: Group, targets: SharedAddresses, counts: Indices, instruction: Instruction) -> None:
        """Execute mbarrier.init."""
        context = self.context
        for offset in np.unique(targets.offsets):
            self.number.setdefault(int(offset), len(self.number))
        while len(self.number) > len(self.expected):  # grow every array
            for name, array in vars(self).items():
                if isinstance(array, np.ndarray):
                    setattr(self, name, np.concatenate([array, np.zeros((_MORE, *array.shape[1:]), array.dtype)]))
        at = np.array([self.number[int(offset)] for offset in targets.offsets]), targets.blocks
        if not ((counts > 0) & (counts < 1 << 20)).all():
            i = int(np.flatnonzero((counts <= 0) | (counts >= 1 << 20))[0])
            raise BarrierMisuse(
                f"mbarrier.init with a count of {int(counts[i])}, outside 1..{(1 << 20) - 1}\n  "
                f"{self._thread(targets, i)}: {instruction.where}"
            )
        index = targets.blocks * context.shared_stride + targets.offsets
        self._overwrite(group, at, targets, instruction)
        context.shared.scatter(index, 8, np.zeros(len(index), np.uint64))  # opaque value
        self.expected[at] = self.pending[at] = counts
        self.tx_count[at] = self._copies[at] = 0
        # An even number, so that the parity starts at 0; never a smaller one, because it is the clock of the copies.
        self.phase[at] += self.phase[at] & 1
        self._fenced[at] = False

    def invalidate(self, group: Group, targets: SharedAddresses, instruction: Instruction) -> None:
        """Execute mbarrier.inval, after which the object's bytes are uninitialised memory."""
        at = self.lookup(targets, instruction), targets.blocks
        self._overwrite(group, at, targets, instruction)
        self.context.shared.forget(targets.blocks * self.context.shared_stride + targets.offsets, 8)
        self.expected[at] = -1
        for offset in np.unique(targets.offsets[np.isin(targets.offsets, list(self._arrived))]):
            self._arrived[int(offset)][targets.blocks[targets.offsets == offset]] = False

    def _overwrite(
        self, group: Group, at: tuple[Indices, Indices], targets: SharedAddresses, instruction: Instruction
    ) -> None:
        """Check and record the write of mbarrier.init or .inval, which must follow all uses of an earlier object."""
        context = self.context
        if self.checks is None:
            return
        clocks = self.checks.clocks
        agents = np.array(
            [clocks.agent(("mbarrier", int(o), int(b) % context.cluster)) if copied else 0
             for o, b, copied in zip(targets.offsets, targets.blocks, self._copied[at], strict=True)]
        )  # fmt: skip
        known = clocks.known_by(targets.rows, targets.lanes)
        used = (self._used_at[at] > known[:, : clocks.warps]).any(1)
        for last, by in ((self._copied[at], agents), (self._committed[at], self._committed_by[at])):
            used |= last > known[np.arange(len(by)), by].astype(np.int64)
        if used.any():
            i = int(np.flatnonzero(used)[0])
            context.report(
                "race",
                Race,
                f"the mbarrier at {self._name(targets, i)} is overwritten without a barrier after its last use, or a "
                f"wait for a bulk copy that signals it\n  {self._thread(targets, i)}: {instruction.where}",
            )
        index = targets.blocks * context.shared_stride + targets.offsets
        self.checks.shared_write(group, index, 8, context.number_of[id(instruction)])
        self._initialised_by[at] = 32 * targets.rows + targets.lanes
        self._initialised_at[at] = clocks.own(targets.rows)
        self._used_at[at] = self._copied[at] = self._committed[at] = 0

    def use(self, at: tuple[Indices, Indices], targets: SharedAddresses) -> None:
        """Record when each warp last used its mbarriers."""
        if self.checks is not None:
            self._used_at[(*at, self.context.warp_in_cluster[targets.rows])] = self.checks.clocks.own(targets.rows)

    def fence_init(self, group: Group) -> None:
        """Execute fence.mbarrier_init.

        Bulk copies may signal the mbarriers that these threads have initialised, and a relaxed arrival of theirs at the
        cluster barrier publishes these initialisations, but no other write (PTX ISA, fence: .op_restrict).
        """
        context = self.context
        threads = (32 * group.rows[:, None] + np.arange(32))[group.lanes()]
        initialised = (self.expected > 0) & np.isin(self._initialised_by, threads)
        self._fenced |= initialised
        if self.checks is None or not context.program.relaxed:
            return
        clocks = self.checks.clocks
        for row, lane in {divmod(int(thread), 32) for thread in self._initialised_by[initialised]}:
            agent = clocks.agent(("init", int(context.warp_in_cluster[row]), lane))
            clock = clocks.own(np.array([row]))
            clocks.publish_agent(("fence", int(context.warp_of_row[row])), agent, context.block_of_row[[row]], clock)
        clocks.tick(group.rows)

    def fence_proxy(self, group: Group) -> None:
        """Execute fence.proxy.async, after which bulk copies may signal the mbarriers of these warps."""
        self._fenced |= (self.expected > 0) & np.isin(self._initialised_by >> 5, group.rows)

    def arrive(
        self, targets: SharedAddresses, instruction: Instruction, counts: Any, amounts: Any, *, release: bool = True
    ) -> Indices:
        """Execute mbarrier.arrive with `counts`, after expect_tx of `amounts` bytes; return the phases before."""
        context = self.context
        at = self.lookup(targets, instruction), targets.blocks
        before = self.phase[at]
        self.use(at, targets)
        self.exits.record(targets, instruction, Use.ARRIVAL, before)
        if release and self.checks is not None:
            for offset in np.unique(targets.offsets):
                mine = targets.offsets == offset
                arrived = self._arrived.setdefault(
                    int(offset), np.zeros((context.blocks, self.checks.clocks.warps, 32), bool)
                )
                arrived[targets.blocks[mine], context.warp_in_cluster[targets.rows[mine]], targets.lanes[mine]] = True
                rows, blocks = np.unique(np.stack([targets.rows[mine], targets.blocks[mine]]), axis=1)
                lanes = arrived[blocks, context.warp_in_cluster[rows]]
                known = self.checks.publishable(rows, lanes)
                self.checks.clocks.publish(("arrivals", int(offset)), rows, blocks, lanes, known)
        np.add.at(self.tx_count, at, amounts)
        self._count_arrivals(at, targets, instruction, counts)
        self._complete(at, targets, instruction)
        return before

    def _count_arrivals(
        self, at: tuple[Indices, Indices], targets: SharedAddresses, instruction: Instruction, counts: Any
    ) -> None:
        np.subtract.at(self.pending, at, counts)
        if (self.pending[at] < 0).any():
            i = int(np.flatnonzero(self.pending[at] < 0)[0])
            raise BarrierMisuse(
                f"more than the {int(self.expected[at][i])} arrivals per phase that the mbarrier at "
                f"{self._name(targets, i)} expects\n  {self._thread(targets, i)}: {instruction.where}"
            )

    def begin_copy(self, targets: SharedAddresses, instruction: Instruction) -> Indices:
        """Record the issue of bulk copies that signal these mbarriers; return their phases."""
        at = self._begin(targets, instruction, "a bulk copy")
        np.add.at(self._copies, at, 1)
        self._copied[at] = self.phase[at] + 1
        return self.phase[at]

    def begin_commit(
        self, targets: SharedAddresses, instruction: Instruction, agents: Indices, clocks: Indices
    ) -> None:
        """Record that tcgen05.commit of these lanes will arrive, once the mma of `agents` up to `clocks` complete."""
        at = self._begin(targets, instruction, "a tcgen05.commit")
        self._committed_by[at], self._committed[at] = agents, clocks
        self.exits.record_commit(targets, instruction)

    def _begin(self, targets: SharedAddresses, instruction: Instruction, signal: str) -> tuple[Indices, Indices]:
        at = self.lookup(targets, instruction), targets.blocks
        if self.checks is not None and not self._fenced[at].all():
            i = int(np.flatnonzero(~self._fenced[at])[0])
            self.context.report(
                "mbarrier-init-fence",
                MissingFence,
                f"no fence.mbarrier_init or fence.proxy.async between the mbarrier.init of {self._name(targets, i)} "
                f"and {signal} that signals it\n  {self._thread(targets, i)}: {instruction.where}",
            )
        self.use(at, targets)
        return at

    def arrive_of_commit(self, targets: SharedAddresses, instruction: Instruction) -> None:
        """Arrive once at each mbarrier, for a tcgen05.commit whose mma are complete."""
        at = self.lookup(targets, instruction), targets.blocks
        self.exits.commit_arrives(targets, self.phase[at])
        self._count_arrivals(at, targets, instruction, 1)
        self._complete(at, targets, instruction)

    def complete_tx(self, targets: SharedAddresses, amount: int, instruction: Instruction) -> None:
        """Record the completion of bulk copies of `amount` bytes each."""
        at = self.lookup(targets, instruction), targets.blocks
        np.subtract.at(self.tx_count, at, amount)
        np.subtract.at(self._copies, at, 1)
        self._complete(at, targets, instruction)

    def _complete(self, at: tuple[Indices, Indices], targets: SharedAddresses, instruction: Instruction) -> None:
        done = (self.pending[at] == 0) & (self.tx_count[at] == 0)
        if not done.any():
            return
        early = done & (self._copies[at] > 0)
        if early.any():
            i = int(np.flatnonzero(early)[0])
            raise BarrierMisuse(
                f"phase {int(self.phase[at][i])} of the mbarrier at {self._name(targets, i)} completes before all of "
                f"its bulk copies: expect_tx announced too few bytes\n  {self._thread(targets, i)}: {instruction.where}"
            )
        self.context.events += 1
        for k in np.unique(at[0][done]):
            blocks = np.unique(at[1][done & (at[0] == k)])
            self.phase[k, blocks] += 1
            self.pending[k, blocks] = self.expected[k, blocks]
            if self.checks is not None:
                offset = int(targets.offsets[np.flatnonzero(at[0] == k)[0]])
                self.checks.clocks.transfer(("arrivals", offset), ("phase", offset), blocks)
                if offset in self._arrived:
                    self._arrived[offset][blocks] = False

    def acquire(self, targets: SharedAddresses, phases: Indices) -> None:
        """Join the clocks of the completed phases' arrivals and copies into those of the lanes that have waited."""
        context = self.context
        if self.checks is None or not len(targets.rows):
            return
        clocks = self.checks.clocks
        rank = targets.blocks % context.cluster
        for offset, r in {(int(o), int(r)) for o, r in zip(targets.offsets, rank, strict=True)}:
            mine = np.flatnonzero((targets.offsets == offset) & (rank == r))
            rows, first, which = np.unique(targets.rows[mine], return_index=True, return_inverse=True)
            lanes = np.zeros((len(rows), 32), bool)
            lanes[which, targets.lanes[mine]] = True
            clocks.acquire(("phase", offset), rows, targets.blocks[mine][first], lanes)
            clocks.acquire_agent(clocks.agent(("mbarrier", offset, r)), rows, phases[mine][first], lanes)

    def explain(self, group: Group, instruction: Instruction) -> Iterator[str]:
        """Yield a line per mbarrier and phase for which lanes of a waiting group wait."""
        context = self.context
        targets, wanted, kind = self.waits[context.number_of[id(instruction)]](group)
        at = self.lookup(targets, instruction), targets.blocks
        waits = np.stack([*at, context.block_of_row[targets.rows], wanted], axis=1)
        for k, b, block, value in np.unique(waits, axis=0):
            same = (waits == (k, b, block, value)).all(1)
            warps = [int(warp) for warp in np.unique(context.warp_of_row[targets.rows[same]])]
            count = int(self.tx_count[k, b])
            tx = f", {count} bytes pending" if count > 0 else f", {-count} bytes too many" if count else ""
            yield (
                f"block {int(context.block_ids[block])}: warps {warps} wait for {kind} {value} of the mbarrier at "
                f"{self._name(targets, int(np.flatnonzero(same)[0]))} (in phase {int(self.phase[k, b])}: "
                f"{int(self.pending[k, b])} of {int(self.expected[k, b])} arrivals pending{tx}): {instruction.where}"
            )


# ---- instructions


def _mbarrier(instruction: Instruction, context: Context) -> Step:
    """Compile mbarrier.init, .inval, .arrive, .expect_tx, .test_wait and .try_wait."""
    modifiers = instruction.modifiers
    if not any(m.split("::")[0] == "shared" for m in modifiers) or modifiers[-1] != "b64":
        raise unsupported(instruction)
    if modifiers[0] in ("try_wait", "test_wait"):
        return _wait(instruction, context)
    if modifiers[0] == "init":
        return _init(instruction, context)
    if modifiers[0] == "inval":
        return _inval(instruction, context)
    if modifiers[0] not in ("arrive", "expect_tx") or "noComplete" in modifiers:
        raise unsupported(instruction)
    return _arrive(instruction, context)


def _lane_values(group: Group, source: Any) -> Indices:
    return group.active(np.broadcast_to(np.asarray(group.read(source), np.int64), (len(group.rows), 32)))


def _init(instruction: Instruction, context: Context) -> Step:
    address_of = addresses(instruction.operands[0], context, instruction)
    count = context.source(instruction.operands[1], "u32", instruction)
    mbarriers = context.unit(Mbarriers)

    def step(group: Group) -> None:
        targets = shared_addresses(instruction, context, group, address_of(group), 8)
        mbarriers.initialise(group, targets, _lane_values(group, count), instruction)

    return step


def _inval(instruction: Instruction, context: Context) -> Step:
    address_of = addresses(instruction.operands[0], context, instruction)
    mbarriers = context.unit(Mbarriers)

    def step(group: Group) -> None:
        targets = shared_addresses(instruction, context, group, address_of(group), 8)
        mbarriers.invalidate(group, targets, instruction)

    return step


def _arrive(instruction: Instruction, context: Context) -> Step:
    """Compile mbarrier.arrive{.expect_tx} state, [address]{, count | bytes}; mbarrier.expect_tx [address], bytes."""
    modifiers, operands = instruction.modifiers, list(instruction.operands)
    arrives = modifiers[0] == "arrive"
    state = context.destination(operands.pop(0), "b64", instruction) if arrives else None
    address_of = addresses(operands[0], context, instruction)
    number = operands[1] if len(operands) > 1 else Immediate(1, "int")
    value = context.source(number, "u32", instruction)
    mbarriers = context.unit(Mbarriers)
    expects_tx, release = "expect_tx" in modifiers, arrives and "relaxed" not in modifiers

    def step(group: Group) -> None:
        targets = shared_addresses(instruction, context, group, address_of(group), 8)
        values = _lane_values(group, value)
        counts, amounts = (int(arrives), values) if expects_tx else (values, 0)
        before = mbarriers.arrive(targets, instruction, counts, amounts, release=release)
        if state is not None:
            spread = np.zeros((len(group.rows), 32), np.uint64)
            spread[group.lanes()] = before
            group.write(state, spread)

    return step


def _waited(instruction: Instruction, context: Context) -> Callable[[Group], Any]:
    """Return a function from a group to (mbarriers, values waited for, "parity" or "phase")."""
    address_of = addresses(instruction.operands[1], context, instruction)
    by_parity = "parity" in instruction.modifiers
    wanted = context.source(instruction.operands[2], "u32" if by_parity else "u64", instruction)
    kind = "parity" if by_parity else "phase"

    def read(group: Group) -> tuple[SharedAddresses, Indices, str]:
        targets = shared_addresses(instruction, context, group, address_of(group), 8)
        return targets, _lane_values(group, wanted), kind

    return read


def _passed(phase: Indices, wanted: Indices, kind: str) -> Any:
    """Return whether the phase is complete, (n,); by parity, whether the last completed phase has this parity."""
    return (phase & 1) != (wanted & 1) if kind == "parity" else phase > wanted


def ready(instruction: Instruction, context: Context) -> Callable[[Group], Mask]:
    """Return a function from a group to its lanes (rows, 32) whose phase is complete or whose wait has timed out."""
    read = _waited(instruction, context)
    mbarriers = context.unit(Mbarriers)
    mbarriers.waits[context.number_of[id(instruction)]] = read

    def lanes(group: Group) -> Mask:
        mask = group.lanes().copy()
        if not mbarriers.time_out:
            targets, wanted, kind = read(group)
            mask[mask] = _passed(mbarriers.phase[mbarriers.lookup(targets, instruction), targets.blocks], wanted, kind)
            if context.random is not None:
                mask |= group.lanes() & (context.random.random(len(group.rows)) < _TIMED_OUT)[:, None]
        return mask

    return lanes


def _wait(instruction: Instruction, context: Context) -> Step:
    result = context.destination(instruction.operands[0], "pred", instruction)
    read = _waited(instruction, context)
    acquire = "relaxed" not in instruction.modifiers
    mbarriers = context.unit(Mbarriers)

    def step(group: Group) -> None:
        targets, wanted, kind = read(group)
        at = mbarriers.lookup(targets, instruction), targets.blocks
        mbarriers.use(at, targets)
        phases = mbarriers.phase[at]
        passed = _passed(phases, wanted, kind)
        if acquire:
            mbarriers.acquire(SharedAddresses(*(part[passed] for part in targets)), phases[passed])
        spread = np.zeros((len(group.rows), 32), bool)
        spread[group.lanes()] = passed
        group.write(result, spread)

    return step


COMPILERS: dict[str, Compiler] = {"mbarrier": _mbarrier}
