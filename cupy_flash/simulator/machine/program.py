"""A kernel's basic blocks and register allocation. A Program does not depend on the launch, so it is cached."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import dataclass

from .ptx import TYPE_BYTES, Address, Function, Instruction, Not, Operand, Pair, Register, Symbol, TensorAddress, Vector

# Warp-synchronous instructions: all member lanes must arrive before it executes.
COLLECTIVES = {"shfl", "vote", "match", "redux", "mma", "ldmatrix", "stmatrix", "movmatrix", "elect"}
# Instructions that all lanes of the four warps of a warpgroup execute together.
WARPGROUP = {"wgmma", "setmaxnreg"}
_CONVERGENT = COLLECTIVES | WARPGROUP
JUMPS = {"bra", "brx", "exit", "ret", "trap"}
_WITHOUT_RESULT = JUMPS | {
    "st",
    "red",
    "stmatrix",
    "cp",
    "prefetch",
    "nanosleep",
    "pmevent",
    "membar",
    "fence",
    "bar",
    "barrier",
    "mbarrier",
    "wgmma",
    "setmaxnreg",
}


def is_collective(instruction: Instruction) -> bool:
    """Return whether the member lanes of a warp (or warpgroup) must execute this instruction together."""
    if instruction.opcode == "tcgen05":  # mma, commit and the fences are of single threads
        return "sync" in instruction.modifiers
    return instruction.opcode in _CONVERGENT or is_warp_barrier(instruction) or is_cluster_barrier(instruction)


def is_warp_barrier(instruction: Instruction) -> bool:
    """bar.warp.sync, the barrier inside one warp."""
    return instruction.opcode in ("bar", "barrier") and instruction.modifiers[:1] == ("warp",)


def is_cluster_load(instruction: Instruction) -> bool:
    """ld.shared::cluster."""
    return instruction.opcode == "ld" and "shared::cluster" in instruction.modifiers


def is_cluster_barrier(instruction: Instruction) -> bool:
    """barrier.cluster.arrive and .wait."""
    return instruction.opcode == "barrier" and instruction.modifiers[:1] == ("cluster",)


def is_block_barrier(instruction: Instruction) -> bool:
    """bar.* and barrier.* of a thread block (CTA)."""
    return instruction.opcode in ("bar", "barrier") and not (
        is_warp_barrier(instruction) or is_cluster_barrier(instruction)
    )


def is_wait(instruction: Instruction) -> bool:
    """Return whether lanes wait at this instruction for other lanes, without having to converge with them."""
    if instruction.opcode == "mbarrier":
        return instruction.modifiers[0] in ("try_wait", "test_wait")
    if instruction.opcode == "setmaxnreg":
        return instruction.modifiers[0] == "inc"
    return is_cluster_barrier(instruction) and instruction.modifiers[1] == "wait"


def ends_block(instruction: Instruction) -> bool:
    """Return whether the instruction ends a basic block: a jump or a block barrier."""
    return instruction.opcode in JUMPS or is_block_barrier(instruction)


def _synchronises(instruction: Instruction) -> bool:
    """Return whether blocks may synchronise through this instruction.

    It is an acquire, release or strong access of global memory, or a fence at gpu scope or wider. An atomic without a
    memory order (CUDA's atomicAdd) orders nothing. A relaxed integer one does neither, but a kernel that reads it, such
    as a counter of finished blocks, may rely on an order.
    """
    if instruction.opcode not in ("membar", "fence", "ld", "st", "atom", "red"):
        return False
    modifiers = set(instruction.modifiers)
    if instruction.opcode == "membar":
        return bool(modifiers & {"gl", "sys"})
    if instruction.opcode == "fence":
        kinds = {"sc", "acq_rel", "acquire", "release"}
        return instruction.modifiers[0] in kinds and bool(modifiers & {"gpu", "sys"})
    ordered = {"acquire", "release", "acq_rel"}
    if instruction.opcode in ("ld", "st"):
        ordered |= {"relaxed", "volatile", "mmio"}
    elif instruction.opcode == "atom" and instruction.modifiers[-1] in ("b32", "b64", "u32", "u64", "s32", "s64"):
        ordered |= {"relaxed"}
    spaces = {modifier.split("::")[0] for modifier in modifiers}
    return bool(modifiers & ordered) and not spaces & {"shared", "local", "param", "const"}


@dataclass(frozen=True, slots=True)
class Block:
    """Instructions [start, stop) that a group executes without a jump or a wait in between.

    A collective or a wait is always the first, a jump the last, and a block barrier is alone: waiting lanes re-enter
    the block, and must not repeat earlier instructions.
    """

    start: int
    stop: int


class Program:
    """The basic blocks of one kernel. `block_at[i]` is the index of the block that starts at instruction i."""

    def __init__(self, function: Function):
        self.function = function
        code = function.instructions
        targets = self._jump_targets()
        after_jump = {i + 1 for i, instruction in enumerate(code) if instruction.opcode in JUMPS}
        after_barrier = {i + 1 for i, instruction in enumerate(code) if is_block_barrier(instruction)}
        collectives = {i for i, instruction in enumerate(code) if is_collective(instruction) or is_wait(instruction)}
        barriers = {i - 1 for i in after_barrier}
        leaders = sorted({0} | targets | after_jump | barriers | after_barrier | collectives)
        leaders = [leader for leader in leaders if leader < len(code)]
        self.blocks = [Block(a, b) for a, b in zip(leaders, [*leaders[1:], len(code)], strict=True)]
        self.block_at = {block.start: i for i, block in enumerate(self.blocks)}
        self.block_at[len(code)] = len(self.blocks)
        self.slots = _share_slots(code, sorted({0} | targets | after_jump))
        # The registers of wgmma are kept in one array, because each wgmma accesses many of them at a time.
        matrix = [
            register.name
            for instruction in code
            if instruction.opcode == "wgmma"
            for operand in instruction.operands
            if isinstance(operand, Vector)
            for register in registers_of(operand)
        ]
        self.slots |= {name: ("matrix", i) for i, name in enumerate(dict.fromkeys(matrix))}
        self.slot_counts: Counter[str] = Counter()
        for kind, number in self.slots.values():
            self.slot_counts[kind] = max(self.slot_counts[kind], number + 1)
        in_flight = set(matrix)
        # The ids of the instructions that use a register of wgmma.
        self.watched = {
            id(instruction)
            for instruction in code
            if in_flight
            for operand in (*instruction.operands, instruction.guard)
            for register in registers_of(operand)
            if register.name in in_flight
        }
        self.synchronises = any(_synchronises(instruction) for instruction in code)
        self.asynchronous = any(
            instruction.opcode in ("wgmma", "tcgen05") or "bulk" in instruction.modifiers for instruction in code
        )
        self.tensor_memory = any(instruction.opcode == "tcgen05" for instruction in code)
        self.relaxed = any(is_cluster_barrier(one) and "relaxed" in one.modifiers for one in code)
        self.reads_cluster = any(is_cluster_load(instruction) for instruction in code)

    def _jump_targets(self) -> set[int]:
        function, targets = self.function, set()
        for instruction in function.instructions:
            if instruction.opcode in ("bra", "brx"):
                target = instruction.operands[-1]
                assert isinstance(target, Symbol)
                names = function.tables.get(target.name, (target.name,))
                targets |= {function.labels[name] for name in names if name in function.labels}
        return targets


def registers_of(operand: Operand) -> tuple[Register, ...]:
    """Return every register inside an operand."""
    match operand:
        case Register():
            return (operand,)
        case Address(base, _):
            return registers_of(base)
        case TensorAddress(map_, coordinates):
            return registers_of(map_) + registers_of(coordinates)
        case Vector(items):
            return tuple(register for item in items for register in registers_of(item))
        case Pair(first, second):
            return registers_of(first) + registers_of(second)
        case Not(register):
            return (register,)
        case _:
            return ()


def _share_slots(code: list[Instruction], regions: list[int]) -> dict[str, tuple[str, int]]:
    """Register allocation: register name -> (storage class, slot).

    NVRTC writes one virtual register per value, thousands in an unrolled kernel. A register whose live range lies
    between two jumps frees its slot afterwards, so that the live arrays fit the CPU cache.
    """
    region_of = [0] * len(code)
    for number, (start, stop) in enumerate(zip(regions, [*regions[1:], len(code)], strict=True)):
        region_of[start:stop] = [number] * max(stop - start, 0)
    first: dict[str, int] = {}
    last: dict[str, int] = {}
    shared: set[str] = set()
    types: dict[str, str] = {}
    for i, instruction in enumerate(code):
        used_here = [registers_of(operand) for operand in instruction.operands]
        has_result = bool(used_here) and instruction.opcode not in _WITHOUT_RESULT
        if instruction.opcode == "tcgen05":
            has_result = instruction.modifiers[0] == "ld"
        written: tuple[Register, ...] = ()
        if has_result and instruction.guard is None and not isinstance(instruction.operands[0], Address):
            written = used_here[0]
        read = {register.name for registers in used_here[has_result:] for register in registers}
        for register in (*itertools.chain(*used_here), *registers_of(instruction.guard)):
            name = register.name
            types[name] = register.type
            if name not in first:
                first[name] = i
                if register in written and name not in read:
                    shared.add(name)
            elif name in shared and region_of[first[name]] != region_of[i]:
                shared.discard(name)
            last[name] = i
    slots: dict[str, tuple[str, int]] = {}
    used: dict[str, int] = {}
    free: dict[str, list[int]] = {}
    ending: dict[int, list[str]] = {}
    starting: dict[int, list[str]] = {}
    for name in types:
        kind = storage_class(types[name])
        if name in shared:
            starting.setdefault(first[name], []).append(name)
            ending.setdefault(last[name], []).append(name)
        else:
            slots[name] = (kind, used.setdefault(kind, 0))
            used[kind] += 1
    for i in range(len(code)):
        for name in starting.get(i, ()):
            kind = storage_class(types[name])
            if free.setdefault(kind, []):
                slots[name] = (kind, free[kind].pop())
            else:
                slots[name] = (kind, used.setdefault(kind, 0))
                used[kind] += 1
        # Operands are freed after the instruction's results are placed, so that they never share storage.
        for name in ending.get(i, ()):
            free[slots[name][0]].append(slots[name][1])
    return slots


def storage_class(type_: str) -> str:
    """Return the storage class of a register type: pred, b8, b16, b32 or b64."""
    return "pred" if type_ == "pred" else f"b{8 * TYPE_BYTES[type_]}"
