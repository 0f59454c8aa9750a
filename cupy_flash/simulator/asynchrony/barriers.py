"""The sixteen named barriers of each resident block: bar.sync, bar.arrive and bar.red."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import BarrierMisuse
from ..machine.context import Context, Group, Unit
from ..machine.ptx import Instruction
from ..memory.checks import Checks

BARRIERS = 16


class Barriers(Unit):
    """Arrivals and waiting warps at the named barriers of one set of resident blocks."""

    def __init__(self, context: Context):
        super().__init__(context)
        self.checks = context.find(Checks)
        shape = (BARRIERS, context.blocks)
        self.arrived = np.zeros(shape, np.int64)  # threads; a warp counts as 32
        self.expected = np.zeros(shape, np.int64)  # threads; 0: no arrival yet, -1: all threads of the block
        self.votes = np.zeros(shape, np.int64)  # lanes whose bar.red predicate is true
        self.waiting = np.zeros((BARRIERS, context.warps), bool)
        self.arrived_only = np.zeros((BARRIERS, context.warps), bool)  # arrived by bar.arrive: does not wait
        self.waits_at = np.zeros(context.warps, np.int64)  # instruction number

    def arrive(
        self, group: Group, number: int, barrier: int, count: int, instruction: Instruction, *, waits: bool, votes: Any
    ) -> None:
        """Record the arrival of the group's warps.

        `count` is the number of expected threads, -1 for all of the block; `votes` are the lanes' predicates of
        bar.red.
        """
        context = self.context
        if not 0 <= barrier < BARRIERS:
            raise BarrierMisuse(f"barrier {barrier} is not in 0..{BARRIERS - 1}: {instruction.where}")
        if count != -1 and (count <= 0 or count % 32):
            raise BarrierMisuse(
                f"thread count {count} of barrier {barrier} is not a positive multiple of 32: {instruction.where}"
            )
        block = context.block_of_row[group.rows]
        expected = self.expected[barrier]
        all_threads = -(-context.threads // 32) * 32
        resolved = np.where(expected == -1, all_threads, expected)
        mismatch = (expected[block] != 0) & (resolved[block] != (all_threads if count == -1 else count))
        if mismatch.any():
            row = int(group.rows[np.flatnonzero(mismatch)[0]])
            other = int(expected[context.block_of_row[row]])
            raise BarrierMisuse(
                f"barrier {barrier} is used with {_thread_count(count)} by {context.thread_name(row, 0)} and with "
                f"{_thread_count(other)} by an earlier warp: {instruction.where}"
            )
        # bar.arrive followed by bar.sync counts as two arrivals of one warp; ping-pong schedules start this way.
        again = (self.waiting[barrier] | (self.arrived_only[barrier] & (not waits)))[group.rows]
        if again.any():
            row = int(group.rows[np.flatnonzero(again)[0]])
            raise BarrierMisuse(
                f"{context.thread_name(row, 0)} arrives twice at barrier {barrier} before it completes: "
                f"{instruction.where}"
            )
        expected[block] = count
        if self.checks is not None:
            self.checks.barrier_arrive(barrier, group.rows)
        np.add.at(self.arrived[barrier], block, 32)
        if votes is not None:
            np.add.at(self.votes[barrier], block, (votes & group.lanes()).sum(1))
        if waits:
            self.waiting[barrier, group.rows] = True
            self.waits_at[group.rows] = number
        else:
            self.arrived_only[barrier, group.rows] = True
        excess = (count > 0) & (self.arrived[barrier] > count)
        if excess.any():
            raise BarrierMisuse(
                f"{int(self.arrived[barrier].max())} threads arrive at barrier {barrier}, which expects {count}: "
                f"{instruction.where}"
            )

    def release(self) -> list[tuple[int, npt.NDArray[np.int64], npt.NDArray[np.int64]]]:
        """Complete every barrier that has all its arrivals.

        Returns (instruction number, released rows, votes of each row's block) per instruction that warps wait at.
        """
        context, released = self.context, []
        live_warps = np.zeros(context.blocks, np.int64)
        np.add.at(live_warps, context.block_of_row, context.live.any(1))
        for barrier in np.flatnonzero((self.expected != 0).any(1)):
            expected = np.where(self.expected[barrier] == -1, 32 * live_warps, self.expected[barrier])
            complete = (self.expected[barrier] != 0) & (self.arrived[barrier] >= expected)
            if not complete.any():
                continue
            completed_row = complete[context.block_of_row]
            waiting = self.waiting[barrier] & completed_row
            rows = np.flatnonzero(waiting)
            if self.checks is not None:
                self.checks.barrier_complete(int(barrier), rows, complete)
            votes = self.votes[barrier][context.block_of_row]
            for number in np.unique(self.waits_at[rows]):
                resumed = rows[self.waits_at[rows] == number]
                released.append((int(number), resumed, votes[resumed]))
            self.waiting[barrier] &= ~completed_row
            self.arrived_only[barrier] &= ~completed_row
            self.arrived[barrier][complete] = self.expected[barrier][complete] = self.votes[barrier][complete] = 0
        return released

    def explain(self) -> list[str]:
        """Return a line per barrier and instruction at which warps of the first deadlocked block wait."""
        context, lines = self.context, []
        code = context.program.function.instructions
        for barrier in np.flatnonzero(self.waiting.any(1)):
            rows = np.flatnonzero(self.waiting[barrier])
            block = context.block_of_row[rows[0]]
            rows = rows[context.block_of_row[rows] == block]
            for number in np.unique(self.waits_at[rows]):
                warps = [int(w) for w in context.warp_of_row[rows[self.waits_at[rows] == number]]]
                arrived, expected = int(self.arrived[barrier, block]), int(self.expected[barrier, block])
                lines.append(
                    f"block {int(context.block_ids[block])}: warps {warps} wait at barrier {barrier} "
                    f"({arrived} threads arrived, {_thread_count(expected)} expected): {code[int(number)].where}"
                )
        return lines


def _thread_count(count: int) -> str:
    return "all threads of the block" if count == -1 else f"{count} threads"
