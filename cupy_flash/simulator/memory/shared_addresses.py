"""Addresses in the shared memory of a cluster (shared::cluster), checked for bounds and alignment."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ..errors import Misaligned, OutOfBounds
from ..machine.context import Context, Group
from ..machine.ptx import Instruction
from .store import SHARED_START

Indices = npt.NDArray[np.int64]

# A shared::cluster address is a shared::cta address plus, from this bit on, the block's rank + 1 (0: the own block).
RANK_BITS = 24


class SharedAddresses(NamedTuple):
    """Shared-memory addresses of a group's active lanes, each (n,): the lane's row and lane, and block and offset."""

    rows: Indices
    lanes: Indices
    blocks: Indices
    offsets: Indices


def shared_addresses(
    instruction: Instruction, context: Context, group: Group, address: Indices, size: int
) -> SharedAddresses:
    """Return the shared-memory addresses of lanes within their cluster, checked for bounds and alignment to `size`."""
    flat = group.active(address)
    rows = group.active_rows()
    lanes = group.active_lanes()
    rank, offsets = flat >> RANK_BITS, (flat & ((1 << RANK_BITS) - 1)) - SHARED_START
    own = context.block_of_row[rows]
    blocks = np.where(rank == 0, own, own - context.rank_of_row[rows] + rank - 1)
    for wrong, error, what in (
        ((offsets < 0) | (offsets + size > context.shared_bytes), OutOfBounds, "is outside the block's shared memory"),
        ((rank < 0) | (rank > context.cluster), OutOfBounds, "names no block of the cluster"),
        (offsets % size != 0, Misaligned, f"is not aligned to {size} bytes"),
    ):
        if wrong.any():
            i = int(np.flatnonzero(wrong)[0])
            raise error(
                f"shared address {int(flat[i]):#x} {what}\n  {context.thread_name(int(rows[i]), int(lanes[i]))}: "
                f"{instruction.where}"
            )
    return SharedAddresses(rows, lanes, blocks, offsets)
