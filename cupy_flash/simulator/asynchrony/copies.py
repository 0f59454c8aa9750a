"""cp.async: copies from global to shared memory of the issuing thread.

A copy reads its source and writes shared memory at issue (`early`), at the wait that covers it (`late`), or at either
(`random`). The checks report every use in between, in any order.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from ..instructions.access import Access, addresses, check, count_access, pieces
from ..instructions.closures import Compiler, unsupported
from ..machine.context import Context, Group, Mask, Step, Unit
from ..machine.ptx import TYPE_BYTES, Immediate, Instruction, Not, Operand, Register
from ..memory.checks import Checks

Indices = npt.NDArray[np.int64]
Order = Literal["early", "late", "random"]


@dataclass(slots=True)
class _Copy:
    """One cp.async of many lanes, as (rows, 32) arrays. `unwaited`: lanes whose copy no wait has covered yet."""

    access: Access
    rows: npt.NDArray[np.int64]
    source: Indices
    target: Indices
    sizes: Indices
    groups: Indices
    unwaited: Mask
    landed: bool


class Copies(Unit):
    """The cp.async in flight of one set of resident blocks. Each thread numbers its groups in commit order."""

    def __init__(self, context: Context, order: Order):
        super().__init__(context)
        self.order, self.checks = order, context.find(Checks)
        self.committed = np.zeros((context.warps, 32), np.int64)
        self.in_flight: list[_Copy] = []

    def issue(self, access: Access, group: Group, source: Indices, target: Indices, sizes: Indices) -> None:
        """Start a copy of `access.width` bytes per lane: `sizes` bytes from `source`, then zeros."""
        context = self.context
        count_access(replace(access, writes=True), "shared", context, group, target)
        for piece in pieces(replace(access, writes=True), "shared", context, group, target):
            if self.checks is not None:
                self.checks.shared_write(group, piece[1], access.width, access.number, record=False)
                self.checks.copy_issued(piece[1], access.width, access.number)
        copy = _Copy(
            access, group.rows, source, target, sizes, self.committed[group.rows].copy(), group.lanes().copy(), False
        )
        self.in_flight.append(copy)
        self._read(copy, group, count=True)
        random = context.random
        if self.order == "early" or (self.order == "random" and random is not None and random.random() < 0.5):
            self._move(copy, group)
            copy.landed = True

    def commit(self, group: Group) -> None:
        """Execute cp.async.commit_group."""
        self.committed[group.rows] += group.lanes()

    def wait(self, group: Group, pending: int | None) -> None:
        """Execute cp.async.wait_group: complete all but each thread's `pending` youngest groups; None is wait_all."""
        lanes = np.zeros((self.context.warps, 32), bool)
        lanes[group.rows] = group.lanes()
        for copy in self.in_flight:
            done = copy.unwaited & lanes[copy.rows]
            if pending is not None:
                done &= copy.groups < self.committed[copy.rows] - pending
            if done.any():
                self._land(copy, done)
        self.in_flight = [copy for copy in self.in_flight if copy.unwaited.any()]

    def _land(self, copy: _Copy, done: Mask) -> None:
        context = self.context
        some = done.any(1)
        part = Group(0, copy.rows, None if done.all() else done, context.warps)
        if not some.any():
            return
        if not copy.landed:
            self._move(copy, part)
        copy.unwaited &= ~done
        if self.checks is not None:
            index = part.active(copy.target + context.shared_base[copy.rows])
            self.checks.copy_landed(part, index, copy.access.width, copy.access.number)

    def _read(self, copy: _Copy, group: Group, *, count: bool) -> npt.NDArray[np.uint8]:
        """Return the bytes to write, (active lanes, width); with `count`, check source bytes and count the traffic."""
        context, width = self.context, copy.access.width
        active = group.active
        data = np.zeros((int(group.lanes().sum()), width), np.uint8)
        sizes, order = active(copy.sizes), np.arange(len(data))
        for size in np.unique(sizes):
            if size == 0:
                continue
            part = group.narrowed(group.lanes() & (copy.sizes == size))
            access = replace(copy.access, width=int(size), alignment=width, writes=False)
            if count:
                count_access(access, "global", context, part, copy.source)
            for piece in pieces(access, "global", context, part, copy.source):
                store, index, selection, name = piece
                if count and self.checks is not None and store.defined is not None:
                    for byte in range(int(size)):
                        one = (store, index + byte, selection, name)
                        check(replace(access, width=1), "global", context, part, one, strong=False, reads=True)
                lanes = order[sizes == size]
                lanes = lanes if selection is None else lanes[selection]
                data[lanes[:, None], np.arange(size)] = store.data[(index - store.origin)[:, None] + np.arange(size)]
        return data

    def _move(self, copy: _Copy, group: Group) -> None:
        """Copy from global to shared memory."""
        context, width = self.context, copy.access.width
        data = self._read(copy, group, count=False)
        index = group.active(copy.target + context.shared_base[copy.rows])
        raw = data.view(np.uint64) if width == 16 else data.view(f"u{width}")[:, 0]
        context.shared.scatter(index, width, raw)


def _copy(instruction: Instruction, context: Context) -> Step:
    modifiers = instruction.modifiers
    if modifiers[0] != "async" or "bulk" in modifiers or "mbarrier" in modifiers:
        raise unsupported(instruction)
    copies = context.unit(Copies)
    if modifiers[1] == "commit_group":
        return lambda group: copies.commit(group)
    if modifiers[1] == "wait_all":
        return lambda group: copies.wait(group, None)
    if modifiers[1] == "wait_group":
        (pending,) = instruction.operands
        assert isinstance(pending, Immediate)
        return lambda group: copies.wait(group, pending.bits)
    return _issue(instruction, context)


def _issue(instruction: Instruction, context: Context) -> Step:
    """Compile cp.async.{ca,cg}.shared.global [dst], [src], cp-size{, src-size}{, ignore-src}."""
    target, source, width, *options = instruction.operands
    if not isinstance(width, Immediate) or width.bits not in (4, 8, 16):
        raise unsupported(instruction)
    size = width.bits
    access = Access(instruction, context.number_of[id(instruction)], "shared", size, size, False)
    target_of, source_of = (addresses(operand, context, instruction) for operand in (target, source))
    sizes: Any = np.int64(size)
    ignore = None
    copies = context.unit(Copies)
    for option in options:
        if _is_predicate(option):
            ignore = context.predicate(option, instruction)
        elif not (isinstance(option, Register) and TYPE_BYTES[option.type] == 8):  # a cache policy has no effect here
            sizes = context.source(option, "u32", instruction)

    def step(group: Group) -> None:
        shape = (len(group.rows), 32)
        many = np.broadcast_to(np.asarray(group.read(sizes), np.int64), shape)
        if ignore is not None:
            many = np.where(ignore(group), 0, many)
        copies.issue(access, group, source_of(group), target_of(group), many)

    return step


def _is_predicate(operand: Operand) -> bool:
    register = operand.register if isinstance(operand, Not) else operand
    return isinstance(register, Register) and register.type == "pred"


COMPILERS: dict[str, Compiler] = {"cp": _copy}
