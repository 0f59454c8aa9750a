"""The CPU engine for few queries and for KV caches, which reads every key once for all heads of a GQA group."""

from __future__ import annotations

from ..device import Device
from ..problem.features import FLOATING
from ..problem.records import CODES, FORWARD, PREFIXES, SCALES, Problem
from .cpu import FLOP, LOAD, SCORE, TILE, Tile, worth
from .cpu import alike as alike
from .cpu import launches as launches
from .cpu import workspaces as workspaces
from .shared import ATTENTION_OPTIONS, KV_CACHE_OPTIONS, SELECTION, dtype_refusals
from .shared import advantage as advantage
from .shared import forms as forms

BACKENDS: tuple[str, ...] = ("cpu",)
ARCHES: tuple[str, ...] | None = None
DTYPES: tuple[str, ...] = FLOATING
OPTIONS: frozenset[str] | None = ATTENTION_OPTIONS - {"dropout", "seed", "bias", "score_mod", "mask_mod"}
CACHE_OPTIONS: frozenset[str] | None = (
    KV_CACHE_OPTIONS | SELECTION | {"split_size", "k_descale", "v_descale", *SCALES, *PREFIXES}
)
CACHE_DTYPES: tuple[str, ...] = tuple(CODES)
DERIVATIVES: tuple[str, ...] = ()
STATISTICS: tuple[str, ...] = (FORWARD,)
WEIGHTS: str | None = "cpu.decode.weights"
ON_REQUEST = False
MEASURED: str | None = "bench/results/decode.json"
HEAD_DIMS: tuple[tuple[int, int], ...] = ()
GROUP_ROWS: tuple[int, ...] = ()
MICRO_KERNELS: tuple[str, ...] = ()
KERNELS = "cpu.decode"

# Bytes of K and V per chunk, all heads, in the accumulation dtype, so that they stay in the L2 cache between the two
# matmuls. With 4096 keys, 32/8 heads, D 128, float32 on one core, chunks of 64, 128, 256 and 512 keys take 5.9, 6.5,
# 6.7 and 8.6 ms.
CHUNK_BYTES = 2**19
# Minimum keys of a chunk if its K and V are views, for a single row of a key/value head and for up to FEW_ROWS rows.
# On AVX2 with 512 KiB of L2, chunks of 512 and 1024 keys take 1.22 and 1.12 of the time of SDPA with 4096 keys, 8/8
# heads, D 64; those of 256 and 512 keys 1.01 and .90 with 4096 keys, 32/8 heads, D 128. The times at CHUNK_BYTES are of
# AVX-512, and have not been measured again.
SINGLE_ROW, SEVERAL_ROWS, FEW_ROWS = 1024, 512, 16
ROWS = 128  # rows of a tile, which are (query, head of the GQA group) pairs
FIXED_ROWS = 16  # rows of a tile with split_size, fixed so that rounding does not depend on other queries
SHORTEST = 64  # minimum keys of a chunk
FEW = 8  # maximum queries per sequence without a cache; the engine cpu is faster for more


def refusals(problem: Problem, device: Device) -> list[str]:
    """Return the reasons why the engine cannot serve a problem; [] if it can."""
    reasons = dtype_refusals(problem)
    if problem.backward:
        reasons.append("it has no backward")
    if problem.selected is not None:
        absent = [problem.weights]
        if problem.cache is not None and problem.cache.split_size is not None:
            absent.append("pieces of split_size")
        if problem.cache is not None and problem.cache.scale_dtype is not None:
            absent.append("attention on caches with scales per key")
        if problem.cache is not None and problem.cache.prefix:
            absent.append("attention on shared prefixes")
        reasons += [f"it computes no {what} with selected keys in this version" for what in absent if what]
    if problem.cache is None:
        if problem.weights:
            reasons.append(f"it computes {problem.weights} on a KV cache alone")
        if problem.q_len > FEW:
            reasons.append(f"without a KV cache it takes at most {FEW} queries, not {problem.q_len}")
        if problem.kv_len < SHORTEST:
            reasons.append(
                f"without a KV cache it takes at least {SHORTEST} keys, which fill a chunk, not {problem.kv_len}"
            )
        if problem.shard:
            reasons.append("it takes no shard")
    return reasons


def tiles(problem: Problem, device: Device) -> list[Tile]:
    """Return the only tile; with split_size it depends on the group but not on batch or lengths."""
    split = None if problem.cache is None else problem.cache.split_size
    key = problem.kv_heads * (problem.head_dim + problem.head_dim_v) * problem.accumulation.itemsize
    chunk = SHORTEST
    while chunk < 512 and 2 * chunk * key <= CHUNK_BYTES:
        chunk *= 2
    if split is None:
        rows = problem.q_len * problem.group
        if rows <= FEW_ROWS and _are_views(problem):
            chunk = max(chunk, SINGLE_ROW if rows == 1 else SEVERAL_ROWS)
        return [Tile(max(ROWS // problem.group, 1), chunk)]
    return [Tile(max(FIXED_ROWS // problem.group, 1), min(chunk, split))]


def _are_views(problem: Problem) -> bool:
    """Return whether chunks of K and V are views, as their dtype and place say."""
    cache = problem.cache
    if cache is None:
        return problem.dtype == problem.accumulation
    return cache.dtype == problem.accumulation and cache.page is None


def choices(problem: Problem, device: Device) -> list[Tile]:
    """Return `tiles`: a tune measures the tiles among which a prediction chooses."""
    return tiles(problem, device)


def seconds(problem: Problem, pairs: int, device: Device, tile: Tile) -> float:
    """Return predicted core seconds: matmuls and passes over all scores, loads of K and V, and call overhead.

    With a KV cache every sequence is assumed to be as long as the capacity.
    """
    dims = problem.head_dim + problem.head_dim_v
    row_tiles = -(-problem.q_len // tile.block_q)
    rows = problem.q_len * problem.group
    if problem.cache is not None and problem.cache.split_size is not None:
        rows = row_tiles * -(-tile.block_q * problem.group // FIXED_ROWS) * FIXED_ROWS
    keys = pairs / max(problem.q_len, 1)
    score = 2 * dims * FLOP + SCORE[0]
    load = row_tiles * keys * dims * LOAD
    chunks = row_tiles * -(-keys // tile.block_kv)
    return problem.batch * (problem.kv_heads * (rows * keys * score + load) + chunks * TILE[0]) * 1e-9


def threads(device: Device, tile: Tile, cost: float) -> int:
    """Return as many threads as `cost` core seconds keep busy, at most one per core."""
    return worth(cost, device.units)
