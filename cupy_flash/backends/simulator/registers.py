"""setmaxnreg: warpgroups give registers back to their block and take more.

A block has as many as its warps had at entry; a warpgroup that asks for more waits until others have given them back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from .closures import Compiler, unsupported
from .errors import BarrierMisuse
from .lanes import Context, Group, Mask, Step
from .ptx import Immediate, Instruction

OF_A_PROCESSOR = 65536
_OF_A_THREAD = 256


class Registers:
    """How many registers each warp has per thread, and how many each block has to give."""

    def __init__(self, context: Context):
        self.context = context
        # ptxas gives a kernel with setmaxnreg what .maxnreg says, or a thread's share of the processor in blocks of
        # .maxntid threads, but no more than the largest setmaxnreg.inc asks for.
        function = context.program.function
        threads = function.max_threads or context.threads
        share = OF_A_PROCESSOR // (function.min_blocks * -(-threads // 32) * 32)
        increases = [_count(one) for one in function.instructions if one.opcode == "setmaxnreg" and _increases(one)]
        entry = function.max_registers or min(share // 8 * 8, max(increases, default=_OF_A_THREAD))
        self.held = np.full(context.warps, entry, np.int64)
        self.free = np.zeros(context.blocks, np.int64)  # per lane of a warp

    def enough(self, group: Group, count: int) -> Mask:
        """Which lanes get what they ask for: warpgroup after warpgroup, as far as it goes."""
        context, granted = self.context, np.zeros(len(group.rows), bool)
        left = self.free.copy()
        for warpgroup in np.unique(context.warpgroup_of_row[group.rows]):
            mine = context.warpgroup_of_row[group.rows] == warpgroup
            block = context.block_of_row[group.rows[mine][0]]
            need = int((count - self.held[group.rows[mine]]).sum())
            if need <= left[block]:
                left[block] -= need
                granted |= mine
        return group.lanes() & granted[:, None]

    def change(self, group: Group, count: int, instruction: Instruction, *, more: bool) -> None:
        """Take or give back."""
        held = self.held[group.rows]
        wrong = held > count if more else held < count
        if wrong.any():
            i = int(np.flatnonzero(wrong)[0])
            raise BarrierMisuse(
                f"{self.context.thread_name(int(group.rows[i]), 0)} has {int(held[i])} registers: {instruction.where}"
            )
        np.add.at(self.free, self.context.block_of_row[group.rows], held - count)
        self.held[group.rows] = count
        self.context.events += 1

    def explain(self, group: Group, instruction: Instruction) -> Iterator[str]:
        """Who waits, and how many there are."""
        context = self.context
        for block in np.unique(context.block_of_row[group.rows]):
            warps = [int(w) for w in context.warp_of_row[group.rows[context.block_of_row[group.rows] == block]]]
            yield (
                f"block {int(context.block_ids[block])}: warps {warps} wait for registers, "
                f"{32 * int(self.free[block])} are free: {instruction.where}"
            )


def _increases(instruction: Instruction) -> bool:
    return instruction.modifiers[0] == "inc"


def _count(instruction: Instruction) -> int:
    (count,) = instruction.operands
    if not isinstance(count, Immediate) or not 24 <= count.bits <= _OF_A_THREAD or count.bits % 8:
        raise unsupported(instruction)
    return count.bits


def ready(instruction: Instruction, context: Context) -> Callable[[Group], Mask]:
    """A reader of the lanes (rows, 32) that get their registers now."""
    count = _count(instruction)
    return lambda group: context.registers.enough(group, count)


def _set(instruction: Instruction, context: Context) -> Step:
    count, more = _count(instruction), _increases(instruction)
    return lambda group: context.registers.change(group, count, instruction, more=more)


COMPILERS: dict[str, Compiler] = {"setmaxnreg": _set}
