"""setmaxnreg: warpgroups release registers to, and request them from, the pool of their block.

The pool is what the block's warps held at entry; setmaxnreg.inc waits until enough registers have been released.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from ..errors import BarrierMisuse
from ..instructions.closures import Compiler, unsupported
from ..machine.context import Context, Group, Mask, Step, Unit
from ..machine.ptx import Immediate, Instruction

REGISTERS_PER_SM = 65536
_MAX_REGISTERS = 256  # upper limit of the setmaxnreg operand


class Registers(Unit):
    """Registers per thread of each warp, and the free registers of each block's pool."""

    def __init__(self, context: Context):
        super().__init__(context)
        # ptxas gives each thread of a kernel with setmaxnreg .maxnreg registers, or else an equal share of the SM's
        # registers for .minnctapersm blocks of .maxntid threads, but at most the largest setmaxnreg.inc.
        function = context.program.function
        threads = function.max_threads or context.threads
        share = REGISTERS_PER_SM // (function.min_blocks * -(-threads // 32) * 32)
        increases = [_count(one) for one in function.instructions if one.opcode == "setmaxnreg" and _increases(one)]
        entry = function.max_registers or min(share // 8 * 8, max(increases, default=_MAX_REGISTERS))
        self.held = np.full(context.warps, entry, np.int64)
        self.free = np.zeros(context.blocks, np.int64)  # in units of one register of a whole warp

    def grantable(self, group: Group, count: int) -> Mask:
        """Return the lanes (rows, 32) whose request the pool can satisfy, one warpgroup after the other."""
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
        """Take registers from the pool (`more`), or release them to it."""
        held = self.held[group.rows]
        wrong = held > count if more else held < count
        if wrong.any():
            i = int(np.flatnonzero(wrong)[0])
            relation = "at most" if more else "at least"
            raise BarrierMisuse(
                f"{self.context.thread_name(int(group.rows[i]), 0)} has {int(held[i])} registers, but "
                f"setmaxnreg.{'inc' if more else 'dec'} needs {relation} {count}: {instruction.where}"
            )
        np.add.at(self.free, self.context.block_of_row[group.rows], held - count)
        self.held[group.rows] = count
        self.context.events += 1

    def explain(self, group: Group, instruction: Instruction) -> Iterator[str]:
        """Yield a line per block with the waiting warps and the free registers."""
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
    if not isinstance(count, Immediate) or not 24 <= count.bits <= _MAX_REGISTERS or count.bits % 8:
        raise unsupported(instruction)
    return count.bits


def ready(instruction: Instruction, context: Context) -> Callable[[Group], Mask]:
    """Return a function from a group to its lanes (rows, 32) whose request can be satisfied now."""
    count = _count(instruction)
    registers = context.unit(Registers)
    return lambda group: registers.grantable(group, count)


def _set(instruction: Instruction, context: Context) -> Step:
    count, more = _count(instruction), _increases(instruction)
    registers = context.unit(Registers)
    return lambda group: registers.change(group, count, instruction, more=more)


COMPILERS: dict[str, Compiler] = {"setmaxnreg": _set}
