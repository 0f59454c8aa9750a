"""The sixteen named barriers of each resident block: who arrived, who waits, who goes on."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from .errors import BarrierMisuse
from .lanes import Context, Group
from .ptx import Instruction

BARRIERS = 16


class Barriers:
    """State of bar.sync, bar.arrive and bar.red for one set of resident blocks."""

    def __init__(self, context: Context):
        self.context = context
        shape = (BARRIERS, context.blocks)
        self.arrived = np.zeros(shape, np.int64)  # threads, whole warps counted
        self.expected = np.zeros(shape, np.int64)  # 0: nobody has come yet; -1: all threads of the block
        self.true = np.zeros(shape, np.int64)
        self.waiting = np.zeros((BARRIERS, context.warps), bool)
        self.passed = np.zeros((BARRIERS, context.warps), bool)  # bar.arrive
        self.waits_at = np.zeros(context.warps, np.int64)  # instruction numbers

    def arrive(
        self, group: Group, number: int, barrier: int, count: int, instruction: Instruction, *, waits: bool, true: Any
    ) -> None:
        """The group's warps arrive; `count` -1 means all threads of the block; `true`: the lanes' votes (bar.red)."""
        context = self.context
        if not 0 <= barrier < BARRIERS:
            raise BarrierMisuse(f"barrier {barrier} does not exist: {instruction.where}")
        if count != -1 and (count <= 0 or count % 32):
            raise BarrierMisuse(f"a barrier of {count} threads: {instruction.where}")
        block = context.block_of_row[group.rows]
        expected = self.expected[barrier]
        everyone = -(-context.threads // 32) * 32
        resolved = np.where(expected == -1, everyone, expected)
        wrong = (expected[block] != 0) & (resolved[block] != (everyone if count == -1 else count))
        if wrong.any():
            row = int(group.rows[np.flatnonzero(wrong)[0]])
            other = int(expected[context.block_of_row[row]])
            raise BarrierMisuse(
                f"barrier {barrier} is used with {_words(count)} by {context.thread_name(row, 0)} and with "
                f"{_words(other)} by an earlier warp: {instruction.where}"
            )
        # To arrive and then to wait is two arrivals of one warp: who takes turns begins so.
        again = (self.waiting[barrier] | (self.passed[barrier] & (not waits)))[group.rows]
        if again.any():
            row = int(group.rows[np.flatnonzero(again)[0]])
            raise BarrierMisuse(
                f"{context.thread_name(row, 0)} arrives twice at barrier {barrier} before it completes: "
                f"{instruction.where}"
            )
        expected[block] = count
        if context.checks is not None:
            context.checks.arrives(barrier, group.rows)
        np.add.at(self.arrived[barrier], block, 32)
        if true is not None:
            np.add.at(self.true[barrier], block, (true & group.lanes()).sum(1))
        if waits:
            self.waiting[barrier, group.rows] = True
            self.waits_at[group.rows] = number
        else:
            self.passed[barrier, group.rows] = True
        over = (count > 0) & (self.arrived[barrier] > count)
        if over.any():
            raise BarrierMisuse(
                f"{int(self.arrived[barrier].max())} threads arrive at barrier {barrier}, which expects {count}: "
                f"{instruction.where}"
            )

    def release(self) -> list[tuple[int, npt.NDArray[np.int64], npt.NDArray[np.int64]]]:
        """Complete what is complete: (instruction number, rows that go on, true votes of each row's block) each."""
        context, found = self.context, []
        live_warps = np.zeros(context.blocks, np.int64)
        np.add.at(live_warps, context.block_of_row, context.live.any(1))
        for barrier in np.flatnonzero((self.expected != 0).any(1)):
            expected = np.where(self.expected[barrier] == -1, 32 * live_warps, self.expected[barrier])
            complete = (self.expected[barrier] != 0) & (self.arrived[barrier] >= expected)
            if not complete.any():
                continue
            of_row = complete[context.block_of_row]
            waiting = self.waiting[barrier] & of_row
            rows = np.flatnonzero(waiting)
            if context.checks is not None:
                context.checks.completes(int(barrier), rows, complete)
            votes = self.true[barrier][context.block_of_row]
            for number in np.unique(self.waits_at[rows]):
                these = rows[self.waits_at[rows] == number]
                found.append((int(number), these, votes[these]))
            self.waiting[barrier] &= ~of_row
            self.passed[barrier] &= ~of_row
            self.arrived[barrier][complete] = self.expected[barrier][complete] = self.true[barrier][complete] = 0
        return found

    def explain(self) -> list[str]:
        """One line for each barrier and place where warps of the first stuck block wait."""
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
                    f"({arrived} threads arrived, {_words(expected)} expected): {code[int(number)].where}"
                )
        return lines


def _words(count: int) -> str:
    return "all threads of the block" if count == -1 else f"{count} threads"
