"""The Hopper forward for fp16 and bf16: legal tiles, cost model and launch."""

# No `from __future__ import annotations`, as in records.py.
import math
from functools import lru_cache
from itertools import product
from typing import NamedTuple

import numpy as np

from ...device import Device
from ...jit.shared_memory import shared_bytes
from ...problem.records import Problem
from ..fragments import fragment_constants
from ..launch import Box, Constant, Launch, Workspace
from ..shared import key_bytes, known_constants, nonempty, sequences, with_mods
from .resources import (
    CACHE_BYTES,
    CLEAR,
    CLOCK,
    EXPONENTIALS,
    MULTIPLY_ADDS,
    PANEL,
    SHARED_BYTES,
    WARP_ROWS,
    WARPGROUP_ROWS,
    columns,
    live_in_loads,
    needs_registers,
)

# Maximum registers per thread for S, P and O, by the number of consumer warpgroups: (plain; persistent or ping-pong
# with a mask that has an edge; the same without an edge; with options, see needs_registers). bench/results/static.json
# shows no spills up to these limits.
LIVE = {2: (188, 188, 180, 180), 3: (112, 104, 104, 92)}
# Keys of a mainloop step. With options, tiles of more than 128 keys spill even within LIVE. By the bench's
# cycles.py, tiles of 176 keys would gain 0.2 % at D 128, but they spill 8 bytes with a sink or in a shard, and more at
# D 96 or if they are persistent.
KEYS = (144, 128, 112, 96, 80, 64)
MOST_KEYS_WITH_OPTIONS = 128
# Added to the registers with a mask_mod, because the producer keeps more and masking needs some: for up to FEW_KEYS
# keys, for more keys, and once more for a persistent or ping-pong tile.
FEW_KEYS = 96
LIVE_OF_FEW_KEYS, LIVE_OF_MANY_KEYS, LIVE_OF_TURNS = 4, 40, 8
# With more registers than this for S, P and O, the kernel reloads the sequence's record instead of holding it.
RELOAD_ABOVE = {2: 180, 3: 100}
# The exponentials of a tile run before the wait for PV of the previous one (wgmma/forward.cu). By the bench's cycles.py
# this shortens the step of one warpgroup by 2 to 16 %, but at D 64 it lengthens steps of up to 96 keys.
EXPONENTIALS_FIRST = True
# Cost model in addition to resources.py's. With STEP and SHARED_WEIGHT, the ratios of the costs of steps agree with
# those of the bench's cycles.py within 2 %, for 128 queries and 64 to 144 keys at D 128. Reads of shared memory cost
# time even where they are not the bottleneck.
STEP = 550  # clocks of waits and signals per mainloop step
SHARED_WEIGHT = 0.5  # share of the shared-memory clocks that adds to a step
TILE_STEPS = 1.5  # steps that take as long as a prologue and epilogue, fitted to FlashAttention-3's published speeds
# Further clocks: BLOCK for the start of a block; LOAD_Q, in a persistent grid, for the load of each Q, which waits for
# the store of O unless O has a buffer.
BLOCK, LOAD_Q = 2000, 1000


class Tile(NamedTuple):
    """Queries of a block, keys of a mainloop step, and the schedule of blocks and warpgroups."""

    block_q: int
    block_kv: int
    stages: int
    persistent: bool  # one block per SM, which loops over query tiles
    takes_turns: bool  # ping-pong: consumer warpgroups issue their wgmmas alternately
    paired: bool  # two blocks with neighbouring query tiles multicast K and V, if the lengths allow it
    o_buffer: bool = False  # O has a buffer of its own instead of Q's, so that the next Q loads earlier

    @property
    def warpgroups(self) -> int:
        """Number of consumer warpgroups; the block has a producer warpgroup as well."""
        return self.block_q // WARPGROUP_ROWS

    @property
    def threads(self) -> int:
        """Threads per block: the consumer and the producer warpgroups."""
        return 128 * (self.warpgroups + 1)


def tiles(problem: Problem, device: Device) -> list[Tile]:
    """Return the tiles whose S, P and O fit the registers, each with as many pipeline stages as fit shared memory.

    In a persistent grid a buffer for O is preferred to a third stage: it lets the next Q load during the epilogue.
    """
    legal = []
    options = needs_registers(problem)
    most_keys = MOST_KEYS_WITH_OPTIONS if options else max(KEYS)
    ways = product(LIVE.items(), KEYS, (False, True), (False, True), (False, True))
    for (warpgroups, limits), block_kv, persistent, takes_turns, paired in ways:
        block_q = WARPGROUP_ROWS * warpgroups
        if paired and (persistent or not _visit_alike(problem, block_q)):
            continue
        kind = 3 if options else 0 if not (persistent or takes_turns) else 1 if problem.mask.edges else 2
        live = _live(problem, block_kv) + live_in_loads(problem, block_kv)
        if problem.mask_mod:
            live += LIVE_OF_FEW_KEYS if block_kv <= FEW_KEYS else LIVE_OF_MANY_KEYS
            live += LIVE_OF_TURNS if persistent or takes_turns else 0
        if live > limits[kind] or block_kv > most_keys:
            continue
        shapes = (
            Tile(block_q, block_kv, stages, persistent, takes_turns, paired, o_buffer)
            for o_buffer in (True, False)[not persistent :]
            for stages in (4, 3, 2)
        )
        legal += [tile for tile in shapes if _shared_bytes(problem, tile) <= device.shared_bytes][:1]
    return legal


def seconds(problem: Problem, pairs: int, device: Device, tile: Tile) -> float:
    """Return predicted seconds: waves of blocks x time of one block.

    The times of wgmma and exponentials are added, because published kernels of this kind are close to the sum, plus a
    share of the shared-memory time. Ping-pong and multicast get no benefit, since they are not measured on a GPU yet.
    """
    dims = problem.head_dim + columns(problem.head_dim_v)
    elements = tile.block_q * tile.block_kv
    loaded = 2 * tile.block_kv * dims
    # Per step, the wgmma of each warpgroup read the K and V tiles and its rows of Q from shared memory.
    read = tile.warpgroups * loaded + 2 * tile.block_q * problem.head_dim
    shared = (loaded + read) / SHARED_BYTES
    clocks = max(elements * (dims / MULTIPLY_ADDS + 1 / EXPONENTIALS), shared, loaded / CACHE_BYTES)
    clocks += SHARED_WEIGHT * shared + STEP
    blocks = max(problem.batch * problem.heads * -(-problem.q_len // tile.block_q), 1)
    visited = problem.mask.visited(pairs / max(problem.q_len, 1), tile.block_q, tile.block_kv)
    # `visited` is this much too large on average: a mask edge cuts fewer steps if tile sizes have a common divisor.
    edge = problem.mask.edges * math.gcd(tile.block_q, tile.block_kv) / 2
    steps = (visited - edge) / tile.block_kv if problem.mask.edges else -(-visited // tile.block_kv)
    waves, clear = float(-(-blocks // device.units)), 0.0
    if tile.persistent:
        clear = CLEAR * _draws_tiles(problem, tile)
        # A dynamic tile scheduler with the longest tiles first leaves no partial last wave.
        waves = max(blocks / device.units, 1.0) if problem.mask.edges else waves
    block = 0 if tile.o_buffer else LOAD_Q if tile.persistent else BLOCK
    return waves * ((max(steps, 1) + TILE_STEPS) * clocks + block) / CLOCK + clear


def workspaces(problem: Problem, tile: Tile, q_rows: int, kv_rows: int) -> tuple[Workspace, ...]:
    """Return the counter of the dynamic tile scheduler, if tiles have unequal costs."""
    return (Workspace("tile_counter", (1,), np.dtype(np.int32), ()),) * _draws_tiles(problem, tile)


def launches(problem: Problem, device: Device, tile: Tile) -> tuple[Launch, ...]:
    """Return the launch of the forward, after one that clears the counter of a dynamic tile scheduler."""
    kernel, constants = "wgmma/forward", _tile_constants(problem, tile)
    constants |= {
        "DRAWS_TILES": _draws_tiles(problem, tile),
        "RELOAD_SEQUENCE": _reloads_sequence(problem, tile),
        "EXPONENTIALS_FIRST": EXPONENTIALS_FIRST
        and not needs_registers(problem)
        and (columns(problem.head_dim_v) > 64 or tile.block_kv > 96),
        "KV_MULTICAST": _multicasts(problem, tile),
        "TMA_STORE_O": _is_stored_in_boxes(problem),
    }
    keys = tile.block_kv // (1 + _multicasts(problem, tile))
    boxes = [Box("q", tile.block_q, PANEL), Box("k", keys, PANEL), Box("v", keys, PANEL)]
    if _is_stored_in_boxes(problem):
        boxes.append(Box("out", WARP_ROWS, PANEL))
    grid = max(-(-problem.q_len // tile.block_q), 1), problem.heads, sequences(problem)
    if tile.persistent:
        grid = min(math.prod(grid), device.units), 1, 1
    launch = Launch(
        kernel,
        known_constants(kernel, constants),
        grid,
        tile.threads,
        _shared_bytes(problem, tile),
        tuple(boxes),
    )
    clear = [Launch("wgmma/clear", (), (1, 1, 1), 1)] if _draws_tiles(problem, tile) else []
    return nonempty(with_mods(problem, [*clear, launch]))


def _draws_tiles(problem: Problem, tile: Tile) -> bool:
    """Return whether a persistent grid has a dynamic tile scheduler, because tiles differ in cost."""
    return tile.persistent and _is_positional(problem)


def _is_positional(problem: Problem) -> bool:
    """Return whether query tiles may visit different key tiles."""
    return bool(problem.mask.edges or problem.mask_mod or problem.has_lengths)


def _visit_alike(problem: Problem, block_q: int) -> bool:
    """Return whether each pair of neighbouring query tiles visits the same key tiles, as multicast requires."""
    return not _is_positional(problem) and -(-problem.q_len // block_q) % 2 == 0


def _multicasts(problem: Problem, tile: Tile) -> bool:
    """Return whether pairs of blocks multicast K and V.

    All lengths of a bucket share a tile, but some may have an odd number of query tiles, without a pair.
    """
    return tile.paired and _visit_alike(problem, tile.block_q)


def _live(problem: Problem, block_kv: int) -> int:
    """Return the registers per thread for S, P and O."""
    return block_kv * 3 // 4 + columns(problem.head_dim_v) // 2


def _reloads_sequence(problem: Problem, tile: Tile) -> bool:
    """Return whether the kernel reloads the sequence's record: registers are scarce, and all sequences share one."""
    same = not (problem.has_lengths or problem.shard)
    return same and _live(problem, tile.block_kv) > RELOAD_ABOVE[tile.warpgroups]


def _is_stored_in_boxes(problem: Problem) -> bool:
    """Return whether O is stored with TMA.

    It is not in packed batches, where a box would overwrite the next sequence, or if rows are not 16-byte aligned.
    """
    return problem.layout != "thd" and problem.head_dim_v % 8 == 0


def _tile_constants(problem: Problem, tile: Tile) -> dict[str, Constant]:
    """Return the constants that determine the kernel's shared memory; `launches` adds the others."""
    return fragment_constants(problem) | {
        "THREADS": tile.threads,
        "BLOCK_Q": tile.block_q,
        "BLOCK_KV": tile.block_kv,
        "STAGES": tile.stages,
        "KEY_BYTES": key_bytes(problem),
        "PERSISTENT": tile.persistent,
        "PINGPONG": tile.takes_turns,
        "O_BUFFER": tile.o_buffer,
    }


@lru_cache(maxsize=1024)
def _shared_bytes(problem: Problem, tile: Tile) -> int:
    """Return the bytes of dynamic shared memory."""
    return shared_bytes("wgmma/forward", _tile_constants(problem, tile))
