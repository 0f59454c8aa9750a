"""Which module compiles each instruction that is not a jump or a block barrier into a step."""

from __future__ import annotations

from ..asynchrony import bulk, cluster_loads, clusters, copies, fences, mbarriers, registers, tcgen05, wgmma
from ..errors import PtxError, Unsupported
from ..instructions import access, collectives, floating, integer, matrix, moves, selection
from ..instructions.closures import Compiler
from .context import Context, Step
from .program import JUMPS, is_cluster_barrier, is_cluster_load, is_warp_barrier
from .ptx import Instruction

COMPILERS: dict[str, Compiler] = {
    **integer.COMPILERS,
    **floating.COMPILERS,
    **selection.COMPILERS,
    **moves.COMPILERS,
    **access.COMPILERS,
    **collectives.COMPILERS,
    **matrix.COMPILERS,
    **copies.COMPILERS,
    **fences.COMPILERS,
    **mbarriers.COMPILERS,
    **clusters.COMPILERS,
    **cluster_loads.COMPILERS,
    **registers.COMPILERS,
    **bulk.COMPILERS,
    **wgmma.COMPILERS,
    **tcgen05.COMPILERS,
}
# Every opcode that the simulator executes, in at least one form.
OPCODES = frozenset(key.split(".")[0] for key in COMPILERS) | JUMPS | {"bar", "barrier", "call"}
# Numbers of operands of arithmetic instructions, with the result.
_OPERANDS: dict[str, tuple[int, ...]] = {
    **dict.fromkeys(("abs", "neg", "not", "cnot", "sqrt", "rcp", "rsqrt", "ex2", "lg2", "tanh", "sin", "cos"), (2,)),
    **dict.fromkeys(("popc", "clz", "brev", "bfind", "mov", "testp"), (2,)),
    **dict.fromkeys(("add", "sub", "mul", "mul24", "div", "rem", "and", "or", "xor", "shl", "shr", "copysign"), (3,)),
    **dict.fromkeys(("addc", "subc"), (3,)),
    **dict.fromkeys(("min", "max"), (3, 4)),
    **dict.fromkeys(("mad", "mad24", "madc", "fma", "sad", "bfe", "selp", "slct", "shf", "dp4a", "prmt"), (4,)),
    **dict.fromkeys(("lop3", "bfi"), (5,)),
}


def compile_step(instruction: Instruction, context: Context) -> Step:
    """Return the step of an instruction, for lanes whose guard predicate is true."""
    key = _key(instruction)
    if key not in COMPILERS:
        raise Unsupported(f"unknown opcode {instruction.opcode!r}: {instruction.where}")
    expected = _OPERANDS.get(instruction.opcode, ())
    if expected and len(instruction.operands) not in expected:
        raise PtxError(
            f"{instruction.opcode} takes {' or '.join(map(str, expected))} operands, "
            f"{len(instruction.operands)} were given: {instruction.where}"
        )
    return COMPILERS[key](instruction, context)


def _key(instruction: Instruction) -> str:
    """Dispatch key into COMPILERS: the opcode, refined if one opcode has several unrelated forms."""
    if instruction.opcode not in ("bar", "barrier", "ld", "cp"):
        return instruction.opcode
    if is_warp_barrier(instruction):
        return "bar.warp"
    if is_cluster_barrier(instruction):
        return "barrier.cluster"
    if is_cluster_load(instruction):
        return "ld.shared::cluster"
    return "cp.bulk" if instruction.opcode == "cp" and "bulk" in instruction.modifiers else instruction.opcode
