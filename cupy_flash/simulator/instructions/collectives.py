"""Warp-synchronous instructions: shfl, vote, match, redux, elect and bar.warp.sync."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ..errors import BarrierMisuse, Unsupported
from ..machine.context import Context, Group, Mask, Step
from ..machine.program import is_warp_barrier
from ..machine.ptx import Instruction, Pair
from ..memory.checks import Checks
from .closures import Compiler, unsupported

_LANES = np.arange(32)
_WEIGHTS = np.uint32(1) << np.arange(32, dtype=np.uint32)


def member_operand(instruction: Instruction) -> Any:
    """Return the membermask operand, or None if the instruction needs all lanes of the warp."""
    if is_warp_barrier(instruction):
        return instruction.operands[0]
    if instruction.opcode in ("shfl", "vote", "match", "redux", "elect"):
        return instruction.operands[-1]
    return None


def members(instruction: Instruction, context: Context) -> Callable[[Group], Mask]:
    """Return a function from a group to its member lanes (rows, 32), given by each warp's first active lane."""
    operand = member_operand(instruction)
    if operand is None:
        return lambda group: context.live[group.rows]
    if instruction.opcode in ("shfl", "vote") and instruction.modifiers[0] != "sync":
        raise Unsupported(f"{instruction.opcode} without .sync is for GPUs before sm_70: {instruction.where}")
    source = context.source(operand, "u32", instruction)

    def named(group: Group) -> Mask:
        mask = np.broadcast_to(group.read(source), (len(group.rows), 32))
        lanes = group.lanes()
        if not ((mask >> _LANES.astype(np.uint32)) & 1)[lanes].all():
            row, lane = np.argwhere(lanes & (((mask >> _LANES.astype(np.uint32)) & 1) == 0))[0]
            raise BarrierMisuse(
                f"{context.thread_name(int(group.rows[row]), int(lane))} is not in its own membermask: "
                f"{instruction.where}"
            )
        first = np.take_along_axis(mask, lanes.argmax(1)[:, None], 1)
        return ((first >> _LANES.astype(np.uint32)) & 1).astype(bool) & context.live[group.rows]

    return named


def _shuffle(instruction: Instruction, context: Context) -> Step:
    """Compile shfl.sync. PTX ISA: bits 8-12 of c are the segment mask, bits 0-4 the clamp."""
    mode = instruction.modifiers[1]
    target = instruction.operands[0]
    value_to, inside_to = (target.first, target.second) if isinstance(target, Pair) else (target, None)
    result = context.destination(value_to, "b32", instruction)
    predicate = context.destination(inside_to, "pred", instruction)
    value, lane_operand, clamp = (context.source(o, "b32", instruction) for o in instruction.operands[1:4])
    checks = context.find(Checks)

    def step(group: Group) -> None:
        shape = (len(group.rows), 32)
        values = np.broadcast_to(group.read(value), shape)
        b = (np.broadcast_to(group.read(lane_operand), shape) & np.uint32(31)).astype(np.int64)
        c = np.broadcast_to(group.read(clamp), shape).astype(np.int64)
        segment, limit = (c >> 8) & 31, c & 31
        last = (_LANES & segment) | (limit & ~segment)
        first = _LANES & segment
        if mode == "up":
            source = _LANES - b
            inside = source >= last
        else:
            source = {"down": _LANES + b, "bfly": _LANES ^ b, "idx": first | (b & ~segment)}[mode]
            inside = source <= last
        source = np.where(inside, source, _LANES)
        if group.mask is not None and checks is not None:
            absent = group.mask & ~np.take_along_axis(group.mask, source, 1)
            if absent.any():
                row, lane = np.argwhere(absent)[0]
                raise BarrierMisuse(
                    f"{context.thread_name(int(group.rows[row]), int(lane))} reads from lane "
                    f"{int(source[row, lane])}, which does not execute the shuffle: {instruction.where}"
                )
        group.write(result, np.take_along_axis(values, source, 1))
        group.write(predicate, inside)

    return step


def _row_mask(group: Group, flags: Any) -> Any:
    """Return the bit mask of the active lanes with a set flag, (rows, 1)."""
    flags = np.broadcast_to(flags, (len(group.rows), 32))
    if group.mask is not None:
        flags = flags & group.mask
    return (flags * _WEIGHTS).sum(1, dtype=np.uint32)[:, None]


def _vote(instruction: Instruction, context: Context) -> Step:
    mode = instruction.modifiers[1]
    result = context.destination(instruction.operands[0], "b32" if mode == "ballot" else "pred", instruction)
    condition = context.predicate(instruction.operands[1], instruction)

    def step(group: Group) -> None:
        true_lanes = _row_mask(group, condition(group))
        all_lanes = _row_mask(group, True)
        if mode == "ballot":
            group.write(result, true_lanes)
        elif mode == "any":
            group.write(result, true_lanes != 0)
        elif mode == "all":
            group.write(result, true_lanes == all_lanes)
        else:
            group.write(result, (true_lanes == 0) | (true_lanes == all_lanes))

    return step


def _match(instruction: Instruction, context: Context) -> Step:
    mode, type_ = instruction.modifiers[0], instruction.modifiers[-1]
    target = instruction.operands[0]
    value_to, all_to = (target.first, target.second) if isinstance(target, Pair) else (target, None)
    result = context.destination(value_to, "b32", instruction)
    predicate = context.destination(all_to, "pred", instruction)
    value = context.source(instruction.operands[1], type_, instruction)

    def step(group: Group) -> None:
        values = np.broadcast_to(group.read(value), (len(group.rows), 32))
        active = group.lanes()
        equal = (values[:, :, None] == values[:, None, :]) & active[:, None, :]
        if mode == "any":
            group.write(result, (equal * _WEIGHTS).sum(2, dtype=np.uint32))
            return
        same = (equal | ~active[:, None, :]).all(2)
        group.write(result, np.where(same, _row_mask(group, True), np.uint32(0)))
        group.write(predicate, same)

    return step


def _reduce(instruction: Instruction, context: Context) -> Step:
    operation, type_ = instruction.modifiers[1], instruction.modifiers[-1]
    if type_ == "f32":
        raise unsupported(instruction)
    result = context.destination(instruction.operands[0], type_, instruction)
    value = context.source(instruction.operands[1], type_, instruction)
    limits = np.iinfo(result.dtype)
    function: np.ufunc
    function, neutral = {
        "add": (np.add, 0),
        "min": (np.minimum, limits.max),
        "max": (np.maximum, limits.min),
        "and": (np.bitwise_and, limits.max),
        "or": (np.bitwise_or, 0),
        "xor": (np.bitwise_xor, 0),
    }[operation]

    def step(group: Group) -> None:
        values = np.where(group.lanes(), group.read(value), result.dtype.type(neutral))
        group.write(result, function.reduce(values, axis=1, dtype=result.dtype)[:, None])

    return step


def _elect(instruction: Instruction, context: Context) -> Step:
    """Compile elect.sync d|p. It elects the same lane every time: the first member from Context.first_elected on."""
    target = instruction.operands[0]
    if not isinstance(target, Pair):
        raise unsupported(instruction)
    result = context.destination(target.first, "b32", instruction)
    predicate = context.destination(target.second, "pred", instruction)

    def step(group: Group) -> None:
        first = context.first_elected
        leader = ((np.roll(group.lanes(), -first, axis=1).argmax(1) + first) % 32)[:, None]
        group.write(result, leader.astype(np.uint32))
        group.write(predicate, leader == _LANES)

    return step


def _warp_barrier(instruction: Instruction, context: Context) -> Step:
    checks = context.find(Checks)

    def step(group: Group) -> None:
        if checks is not None:
            checks.converge(group.rows)

    return step


COMPILERS: dict[str, Compiler] = {
    "shfl": _shuffle,
    "vote": _vote,
    "match": _match,
    "redux": _reduce,
    "elect": _elect,
    "bar.warp": _warp_barrier,
}
