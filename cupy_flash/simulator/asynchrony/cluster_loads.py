"""Loads from the shared memory of another block of the cluster: ld.shared::cluster."""

from __future__ import annotations

from ..instructions.access import addresses, components, count_access, describe, write_lanes
from ..instructions.closures import Compiler
from ..machine.context import DTYPES, Context, Group, Step
from ..machine.ptx import Instruction
from ..memory.checks import Checks
from ..memory.shared_addresses import shared_addresses
from .exits import Exits, Use


def _load(instruction: Instruction, context: Context) -> Step:
    """Compile ld.shared::cluster.

    It is checked for races like a load from the own block, and must precede the exit of the other block.
    """
    access = describe(instruction, context, writes=False)
    target, source = instruction.operands
    results = [context.destination(item, access.type, instruction) for item in components(target, access)]
    address_of = addresses(source, context, instruction)
    exits, checks = context.unit(Exits), context.find(Checks)

    def step(group: Group) -> None:
        address = address_of(group)
        count_access(access, "shared", context, group, address)
        targets = shared_addresses(instruction, context, group, address, access.width)
        exits.record(targets, instruction, Use.READ)
        index = targets.blocks * context.shared_stride + targets.offsets
        if checks is not None:
            checks.shared_read(group, index, access.width, access.number)
            checks.require_initialised(group, context.shared, index, access.width, "shared", instruction, None)
        values = context.shared.gather(index, access.width).view(DTYPES[access.type])
        write_lanes(group, results, values.reshape(-1, access.count))

    return step


COMPILERS: dict[str, Compiler] = {"ld.shared::cluster": _load}
