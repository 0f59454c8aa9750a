"""The warp scheduler. It runs the group of lanes at the lowest basic block; branches split groups, which then merge."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from ..asynchrony import clusters, mbarriers, registers
from ..asynchrony.barriers import Barriers
from ..asynchrony.bulk import BulkCopies
from ..asynchrony.clusters import ClusterBarrier
from ..asynchrony.exits import Exits
from ..asynchrony.mbarriers import Mbarriers
from ..asynchrony.registers import Registers
from ..asynchrony.tcgen05 import Tcgen05Queue
from ..asynchrony.tensor_memory import TensorMemory
from ..asynchrony.wgmma import WgmmaQueue
from ..errors import BarrierMisuse, Deadlock, Trap, Unsupported
from ..instructions import collectives
from .context import Context, Group, Mask, Step
from .program import (
    WARPGROUP,
    ends_block,
    is_block_barrier,
    is_collective,
    is_wait,
)
from .ptx import Instruction, Symbol
from .steps import compile_step

# A group may spin on a value that another ready group, or a bulk load in flight, will write. If groups jump backwards
# this often while one of those is passed over, the running group yields, and from then on all turns are short.
_PATIENCE, _SHORT_TURN = 1024, 16
_LOADS = -1  # the key of the bulk loads in flight in `_passed_over`
_INTERRUPTED = 0.1  # probability that a basic block ends a turn, if order="random"
_LANDING = 0.1  # probability that a bulk load completes after a turn, if order="random"
# Number of successive time-outs of mbarrier waits, with nothing else able to run, that count as a deadlock.
_MAX_TIME_OUTS = 3
# A run counts as a deadlock after this many basic blocks. One costs at least ten microseconds, so a kernel that never
# ends is reported after minutes.
MOST_BASIC_BLOCKS = 20_000_000


class _CompiledBlock:
    """A compiled basic block: steps, conditions of entry, terminator (`finish`), and counts of warps and threads."""

    __slots__ = ("start", "stop", "steps", "members", "ready", "finish", "warps", "threads")

    def __init__(self, start: int, stop: int):
        self.start, self.stop = start, stop
        self.steps: list[Step] = []
        self.members: Callable[[Group], Mask] | None = None
        self.ready: Callable[[Group], Mask] | None = None
        self.finish: Callable[[Group], Group | None]
        self.warps = self.threads = 0  # each execution counts


class Scheduler:
    """Runs one set of resident blocks until all lanes have exited, but at most `most_basic_blocks` basic blocks."""

    def __init__(self, context: Context, most_basic_blocks: int):
        self.most_basic_blocks = most_basic_blocks
        self.context, self.program = context, context.program
        self.code = context.program.function.instructions
        self.barriers, self.mbarriers = context.unit(Barriers), context.unit(Mbarriers)
        self.bulk, self.wgmma, self.exits = context.unit(BulkCopies), context.unit(WgmmaQueue), context.unit(Exits)
        self.tcgen05, self.tensor_memory = context.unit(Tcgen05Queue), context.unit(TensorMemory)
        self.ready: dict[int, list[Group]] = {}
        self.parked: dict[int, Group] = {}  # lanes at a collective, waiting for other lanes of their warps
        self.waiting: dict[int, Group] = {}  # lanes waiting at an mbarrier, a cluster barrier or setmaxnreg.inc
        self._waits: dict[str, Mbarriers | ClusterBarrier | Registers] = {
            "mbarrier": self.mbarriers,
            "barrier": context.unit(ClusterBarrier),
            "setmaxnreg": context.unit(Registers),
        }
        self._events = 0
        self._after_barrier: dict[int, Callable[[Group, npt.NDArray[np.int64]], None]] = {}
        self.blocks = [self._compile(block.start, block.stop) for block in self.program.blocks]
        self.executed = 0
        self._patience = _PATIENCE
        self._jumps = 0  # backward jumps so far
        # {place of a ready group, or _LOADS: `_jumps` when it was first passed over}
        self._passed_over: dict[int, int] = {}
        self._time_outs = 0
        self._aligned = WARPGROUP - ({"setmaxnreg"} if "setmaxnreg-aligned" in context.unchecked else set())

    # ---- compilation

    def _compile(self, start: int, stop: int) -> _CompiledBlock:
        block = _CompiledBlock(start, stop)
        if is_collective(self.code[start]):
            block.members = collectives.members(self.code[start], self.context)
        if is_wait(self.code[start]):
            ready = {"mbarrier": mbarriers.ready, "barrier": clusters.ready, "setmaxnreg": registers.ready}
            block.ready = self._guarded_wait(self.code[start], ready[self.code[start].opcode])
        for instruction in self.code[start:stop]:
            if not ends_block(instruction):
                block.steps.append(self._step(instruction))
        last = self.code[stop - 1]
        following = self.program.block_at[stop]
        if not ends_block(last):
            block.finish = self._jump_to(following)
        else:
            block.finish = self._terminator(last, stop - 1, following)
        return block

    def _guarded_wait(
        self, instruction: Instruction, compiler: Callable[[Instruction, Context], Callable[[Group], Mask]]
    ) -> Callable[[Group], Mask]:
        """Return a function from a group to the lanes that need not wait, or whose predicate is false."""
        ready = compiler(instruction, self.context)
        if instruction.guard is None:
            return ready
        condition = self.context.predicate(instruction.guard, instruction)

        def lanes(group: Group) -> Mask:
            mine = group.lanes() & condition(group)
            return ready(group.narrowed(mine)) | ~mine & group.lanes() if mine.any() else group.lanes()

        return lanes

    def _step(self, instruction: Instruction) -> Step:
        step = compile_step(instruction, self.context)
        if id(instruction) in self.program.watched:
            step = self.wgmma.watched(step, instruction)
        if instruction.guard is None:
            return step
        return _guarded(step, self.context.predicate(instruction.guard, instruction))

    def _jump_to(self, target: int) -> Callable[[Group], Group | None]:
        def go(group: Group) -> Group | None:
            group.block = target
            return group

        return go

    def _target(self, name: str, instruction: Instruction) -> int:
        labels = self.program.function.labels
        if name not in labels:
            raise Unsupported(f"unknown label {name!r}: {instruction.where}")
        return self.program.block_at[labels[name]]

    def _terminator(self, instruction: Instruction, number: int, following: int) -> Callable[[Group], Group | None]:
        if instruction.opcode == "bra":
            label = instruction.operands[0]
            assert isinstance(label, Symbol)
            taken = self._jump_to(self._target(label.name, instruction))
        elif instruction.opcode == "brx":
            taken = self._indexed_branch(instruction)
        elif instruction.opcode in ("exit", "ret"):
            taken = self._exit
        elif instruction.opcode == "trap":
            taken = self._trap(instruction)
        else:
            taken = self._block_barrier(instruction, number, following)
        if instruction.guard is None:
            return taken
        condition = self.context.predicate(instruction.guard, instruction)

        def branch(group: Group) -> Group | None:
            flags = group.spread(condition(group))
            mask = flags if group.mask is None else flags & group.mask
            count = np.count_nonzero(mask)
            if not count:
                group.block = following
                return group
            if count == group.count():
                return taken(group)
            self._enqueue(following, group.rows, group.lanes() & ~mask)
            rows = mask.any(1)
            return self._requeue(taken(self._group(group.block, group.rows[rows], mask[rows])))

        return branch

    def _requeue(self, group: Group | None) -> Group | None:
        """Requeue the group: after a split the lowest block runs first."""
        if group is not None:
            self._enqueue(group.block, group.rows, group.mask)
        return None

    def _indexed_branch(self, instruction: Instruction) -> Callable[[Group], Group | None]:
        index = self.context.source(instruction.operands[0], "u32", instruction)
        table = instruction.operands[1]
        assert isinstance(table, Symbol)
        targets = [self._target(name, instruction) for name in self.program.function.tables[table.name]]

        def branch(group: Group) -> Group | None:
            chosen = np.broadcast_to(group.read(index), (len(group.rows), 32))
            for i in np.unique(group.active(chosen)):
                self._enqueue(targets[int(i)], group.rows, group.lanes() & (chosen == i))
            return None

        return branch

    def _exit(self, group: Group) -> None:
        self.context.live[group.rows] &= ~group.lanes()
        self.exits.check_exited()
        self.context.events += 1
        # Collectives no longer wait for these lanes.
        for block, parked in self.parked.items():
            self.ready.setdefault(block, []).append(parked)
        self.parked.clear()
        self._release()

    def _trap(self, instruction: Instruction) -> Callable[[Group], None]:
        def trap(group: Group) -> None:
            row, lane = np.argwhere(group.lanes())[0]
            name = self.context.thread_name(int(group.rows[row]), int(lane))
            raise Trap(f"{name} executed trap: {instruction.where}")

        return trap

    def _block_barrier(self, instruction: Instruction, number: int, following: int) -> Callable[[Group], Group | None]:
        """Compile bar{rier}{.cta}.sync, .arrive and .red."""
        context, modifiers = self.context, instruction.modifiers
        kind = next((m for m in modifiers if m in ("sync", "arrive", "red")), None)
        if kind is None:
            raise Unsupported(f"unknown form of {instruction.opcode}: {instruction.where}")
        operands = list(instruction.operands)
        vote: Callable[[Group], Any] | None = None
        result = None
        if kind == "red":
            vote = context.predicate(operands.pop(), instruction)
            result = context.destination(operands.pop(0), modifiers[-1], instruction)
        barrier = context.source(operands[0], "u32", instruction)
        count = context.source(operands[1], "u32", instruction) if len(operands) > 1 else np.int64(-1)
        operation = modifiers[-2] if kind == "red" else ""

        def arrive(group: Group) -> Group | None:
            if group.mask is not None and not self._whole_warps(group, number, instruction):
                return None
            for part, b, n in self._by_barrier(group, barrier, count):
                votes = None if vote is None else np.broadcast_to(vote(part), (len(part.rows), 32))
                self.barriers.arrive(part, number, b, n, instruction, waits=kind != "arrive", votes=votes)
            if kind == "arrive":
                self._enqueue(following, group.rows, group.mask)
            self._release()
            return None

        def finish(group: Group, votes: npt.NDArray[np.int64]) -> None:
            if result is not None:
                live = context.live[group.rows[0] % context.blocks :: context.blocks].sum()
                value = votes if operation == "popc" else votes > 0 if operation == "or" else votes == live
                group.write(result, value[:, None])
            group.block = following

        self._after_barrier[number] = finish
        return arrive

    def _by_barrier(self, group: Group, barrier: Any, count: Any) -> Iterator[tuple[Group, int, int]]:
        """Yield (warps, barrier, thread count) for each barrier that the group's warps name."""
        if isinstance(barrier, np.generic) and isinstance(count, np.generic):
            yield group, int(barrier), int(count)
            return
        shape = (len(group.rows), 32)
        which = np.broadcast_to(group.read(barrier), shape).astype(np.int64)
        many = np.broadcast_to(group.read(count), shape).astype(np.int64)
        for b, n in np.unique(np.stack([group.active(which), group.active(many)], axis=1), axis=0):
            rows = (group.lanes() & (which == b) & (many == n)).any(1)
            mask = None if group.mask is None else group.mask[rows]
            yield self._group(group.block, group.rows[rows], mask), int(b), int(n)

    def _release(self) -> None:
        for number, rows, votes in self.barriers.release():
            self.context.events += 1
            live = self.context.live[rows]
            group = self._group(0, rows, None if live.all() else live)
            self._after_barrier[number](group, votes)
            self.ready.setdefault(group.block, []).append(group)

    def _whole_warps(self, group: Group, number: int, instruction: Instruction) -> bool:
        """Return whether the group contains all live lanes of its warps; if not, park it until they arrive."""
        missing = (self.context.live[group.rows] & ~group.lanes()).any(1)
        if not missing.any():
            return True
        place = self.program.block_at[number]
        if place in self.parked:  # the parked group may have the missing lanes
            group = self._merged(place, [self.parked.pop(place), group])
            missing = (self.context.live[group.rows] & ~group.lanes()).any(1)
        self._park(place, group, missing)
        self._enqueue(place, group.rows[~missing], group.lanes()[~missing])
        return False

    # ---- groups

    def _group(self, block: int, rows: npt.NDArray[np.int64], mask: Mask | None) -> Group:
        return Group(block, rows, mask, self.context.warps)

    def _enqueue(self, block: int, rows: npt.NDArray[np.int64], mask: Mask | None) -> None:
        """Make lanes ready at a block; rows without an active lane are dropped."""
        if mask is not None:
            some = mask.any(1)
            rows, mask = rows[some], mask[some]
            mask = None if mask.all() else mask
        if len(rows):
            self.ready.setdefault(block, []).append(self._group(block, rows, mask))

    def _merged(self, block: int, groups: list[Group]) -> Group:
        if len(groups) == 1:
            groups[0].block = block
            return groups[0]
        together = np.zeros((self.context.warps, 32), bool)
        for group in groups:
            together[group.rows] |= group.lanes()
        rows = np.flatnonzero(together.any(1))
        mask = together[rows]
        return self._group(block, rows, None if mask.all() else mask)

    def _park(self, block: int, group: Group, missing: Any) -> None:
        """Park the rows with missing lanes."""
        if missing.any():
            waiting = self._group(block, group.rows[missing], group.lanes()[missing])
            if block in self.parked:
                waiting = self._merged(block, [self.parked[block], waiting])
            self.parked[block] = waiting

    # ---- running

    def run(self) -> None:
        """Run until every lane has exited. Raises Deadlock if no lane can make progress."""
        context = self.context
        live = context.live
        rows = np.flatnonzero(live.any(1))
        self._enqueue(0, rows, live[rows].copy())
        turn = 0
        with np.errstate(all="ignore"):
            while True:
                while self.ready:
                    turn += 1
                    self._advance(self._pick(turn))
                    if context.random is not None and context.random.random() < _LANDING:
                        self._land(None)
                    elif self._patience < _PATIENCE and turn % _SHORT_TURN == 0:
                        # A spinning group may depend on a warp that waits for a bulk load.
                        self._land(self._awaited_mbarriers())
                    self._wake()
                if not self._land(self._awaited_mbarriers()) and not self._time_out_waits():
                    break
                self._wake()
            if self.parked or self.waiting or self.barriers.waiting.any():
                self._raise_deadlock()
            self.bulk.finish()
            self.wgmma.finish()
            self.tcgen05.finish()
            self.tensor_memory.finish()
        for block in self.blocks:
            context.counters.count_block(block.start, block.stop, block.warps, block.threads)

    def forget_instructions(self) -> None:
        """Drop the compiled instructions, because they and their scheduler refer to each other."""
        self.blocks.clear()
        self._after_barrier.clear()

    def _land(self, wanted: set[tuple[int, int]] | None) -> bool:
        self._passed_over.pop(_LOADS, None)
        random = self.context.random
        if random is not None and wanted is None and random.random() < 0.5 and self.tcgen05.land():
            return True
        return self.bulk.land(wanted) or self.tcgen05.land()

    @property
    def _in_flight(self) -> bool:
        """Whether anything is in flight that a wait may be for."""
        return bool(self.bulk.loads or self.tcgen05.in_flight)

    def _wake(self) -> None:
        """Make waiting lanes ready, to check again, if any event has happened."""
        if self._events != self.context.events:
            self._events = self.context.events
            for block, group in self.waiting.items():
                self.ready.setdefault(block, []).append(group)
            self.waiting.clear()
            self._time_outs = 0

    def _awaited_mbarriers(self) -> set[tuple[int, int]]:
        """Return (offset in shared memory, block) of the mbarriers that lanes wait for."""
        awaited: set[tuple[int, int]] = set()
        for block, group in self.waiting.items():
            mbarriers_of = self.mbarriers.waits.get(self.blocks[block].start)
            if mbarriers_of is not None:
                targets = mbarriers_of(group)[0]
                awaited |= {(int(o), int(b)) for o, b in zip(targets.offsets, targets.blocks, strict=True)}
        return awaited

    def _time_out_waits(self) -> bool:
        """Let mbarrier waits return false when nothing else can run: a kernel may do other work in between."""
        self._time_outs += 1
        waiting = [block for block in self.waiting if self.code[self.blocks[block].start].opcode == "mbarrier"]
        if self._time_outs > _MAX_TIME_OUTS or not waiting:
            return False
        for block in waiting:
            self.mbarriers.time_out = True
            self._advance(self.waiting.pop(block))
        return True

    def _pick(self, turn: int) -> Group:
        """Take a ready group to execute: that of the lowest block.

        In short turns or random order it is sometimes another, so that a spinning group does not starve the rest.
        """
        places = sorted(self.ready)
        if self.context.random is not None:
            place = places[int(self.context.random.integers(len(places)))]
        else:
            place = places[turn // 2 % len(places)] if turn % 2 and self._patience < _PATIENCE else places[0]
        others = [other for other in places if other != place] + [_LOADS] * self._in_flight
        self._passed_over = {other: self._passed_over.get(other, self._jumps) for other in others}
        return self._merged(place, self.ready.pop(place))

    def _advance(self, group: Group | None) -> None:
        blocks = self.blocks
        # Turns end at barriers: a loop that contains one spins in many turns.
        since = min(self._passed_over.values(), default=self._jumps) if self._patience == _PATIENCE else self._jumps
        while group is not None:
            if group.block == len(blocks):
                raise Unsupported(f"{self.program.function.name} runs past its last instruction")
            block = blocks[group.block]
            if block.members is not None:
                group = self._converged(block, group)
                if group is None:
                    return
            if block.ready is not None:
                group = self._split_ready(block.ready, group)
                if group is None:
                    return
            block.warps += len(group.rows)
            block.threads += group.count()
            self.executed += 1
            if self.executed > self.most_basic_blocks:
                raise Deadlock(
                    f"no end after {self.most_basic_blocks} basic blocks; the next is at {self.code[block.start].where}"
                )
            for step in block.steps:
                step(group)
            place = group.block
            group = block.finish(group)
            if group is None:
                return
            self._jumps += group.block <= place
            spins = self._jumps - since > self._patience and bool(self.ready or self._in_flight)
            if spins:
                self._patience = _SHORT_TURN
            elif self.ready:
                random = self.context.random
                interrupted = random is not None and random.random() < _INTERRUPTED
                spins = interrupted or group.block >= min(self.ready)
            if spins:
                self._enqueue(group.block, group.rows, group.mask)
                return

    def _converged(self, block: _CompiledBlock, group: Group) -> Group | None:
        """Return the rows whose member lanes have all arrived at the collective, or None, and park the others."""
        if group.block in self.parked:
            group = self._merged(group.block, [self.parked.pop(group.block), group])
        opcode = self.code[block.start].opcode
        if group.mask is None and opcode not in ("shfl", "vote", "match", "redux", "elect", *WARPGROUP):
            return group
        assert block.members is not None
        members, lanes = block.members(group), group.lanes()
        missing = (members & ~lanes).any(1)
        if opcode in self._aligned:
            warpgroup = self.context.warpgroup_of_row[group.rows]
            missing |= np.bincount(warpgroup[~missing], minlength=self.context.warps)[warpgroup] < 4
        if missing.any():
            self._park(group.block, group, missing)
            if missing.all():
                return None
            # Run the complete rows now: from the queue they would be merged with the parked rows again.
            members, lanes = members[~missing], lanes[~missing]
            group = self._group(group.block, group.rows[~missing], None if lanes.all() else lanes)
        others = lanes & ~members
        if others.any():
            self._enqueue(group.block, group.rows, others)
            return self._group(group.block, group.rows, lanes & members)
        return group

    def _split_ready(self, ready: Callable[[Group], Mask], group: Group) -> Group | None:
        """Return the lanes whose wait is over, or None; the others are put into `waiting`."""
        mask, lanes = ready(group), group.lanes()
        self.mbarriers.time_out = False
        staying = lanes & ~mask
        if not staying.any():
            return group
        rows = staying.any(1)
        waiting = self._group(group.block, group.rows[rows], staying[rows])
        if group.block in self.waiting:
            waiting = self._merged(group.block, [self.waiting[group.block], waiting])
        self.waiting[group.block] = waiting
        rows = mask.any(1)
        return self._group(group.block, group.rows[rows], mask[rows]) if rows.any() else None

    def _raise_deadlock(self) -> None:
        """Raise Deadlock, or BarrierMisuse if part of a warp is at a block barrier, with a line per waiting group."""
        self._require_aligned_setmaxnreg()
        lines = self.barriers.explain()
        for block, group in self.waiting.items():
            instruction = self.code[self.blocks[block].start]
            lines += self._waits[instruction.opcode].explain(group, instruction)
        partial = False
        for block, group in self.parked.items():
            instruction = self.code[
                self.blocks[block].stop - 1 if self._is_barrier(block) else self.blocks[block].start
            ]
            partial = partial or self._is_barrier(block)
            row = int(group.rows[0])
            lanes = [int(lane) for lane in np.flatnonzero(group.lanes()[0])]
            missing = [int(lane) for lane in np.flatnonzero(self.context.live[row] & ~group.lanes()[0])]
            others = f"lanes {missing}" if missing else "the other warps of its warpgroup"
            lines.append(
                f"block {int(self.context.block_ids[self.context.block_of_row[row]])}, warp "
                f"{int(self.context.warp_of_row[row])}: lanes {lanes} wait for {others} at {instruction.where}"
            )
        if partial:
            raise BarrierMisuse("only part of a warp reaches a barrier\n  " + "\n  ".join(lines))
        raise Deadlock("no warp can make progress\n  " + "\n  ".join(lines))

    def _require_aligned_setmaxnreg(self) -> None:
        """Report warps that wait for the rest of their warpgroup, which has exited or is at another setmaxnreg."""
        context = self.context
        parked = [(block, group) for block, group in self.parked.items() if self._opcode(block) == "setmaxnreg"]
        there = ~context.live
        for _, group in parked:
            there[group.rows] |= group.lanes()
        complete = np.bincount(context.warpgroup_of_row[there.all(1)], minlength=context.warps) == 4
        for block, group in parked:
            alone = complete[context.warpgroup_of_row[group.rows]]
            if alone.any():
                row = int(group.rows[np.flatnonzero(alone)[0]])
                context.report(
                    "setmaxnreg-aligned",
                    Deadlock,
                    f"{context.thread_name(row, 0)} waits for the other warps of its warpgroup, which have exited "
                    f"or are at another setmaxnreg: {self.code[self.blocks[block].start].where}",
                )

    def _opcode(self, block: int) -> str:
        return self.code[self.blocks[block].start].opcode

    def _is_barrier(self, block: int) -> bool:
        return is_block_barrier(self.code[self.blocks[block].stop - 1])


def _guarded(step: Step, condition: Callable[[Group], Any]) -> Step:
    """Return the step, executed by the lanes whose guard predicate is true."""

    def guarded(group: Group) -> None:
        flags = group.spread(condition(group))
        mask = flags if group.mask is None else flags & group.mask
        count = np.count_nonzero(mask)
        if not count:
            return
        if count == group.count():
            step(group)
        else:
            step(group.narrowed(mask))

    return guarded
