"""The tensor-core engine for KV caches: split-KV attention with mma.sync, fp16 from sm_75, bf16 from sm_80.

Rows of a tile are (query, head of the GQA group) pairs, so a key is read once for all heads that share it. The key
tiles of all sequences are divided equally among the blocks, by the lengths on the device (split_kv.cuh), and a second
launch merges the partial results. In the one-launch form, which only a tune chooses, the blocks of a cluster divide the
key tiles of one output tile, and merge its parts through distributed shared memory.
"""

# No `from __future__ import annotations`, as in records.py.
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from ..device import Device
from ..jit.shared_memory import shared_bytes
from ..problem.records import CODES, FORWARD, PREFIXES, SCALES, Problem, UnsupportedError
from . import latent
from .fragments import fragment_constants
from .kv_cache import ROW_THREADS, append_launches, rotated_rows, static_bytes
from .launch import Box, Constant, Launch, Workspace
from .mma import (
    CLOCK,
    INSTRUCTIONS,
    INSTRUCTIONS_OF_SCORE,
    LATENCY,
    MULTIPLY_ADDS,
    MULTIPLY_ADDS_OF_SERVERS,
    REGISTERS,
    RESERVED,
    SHARED_BYTES,
    conversions,
    multiply_refusals,
)
from .shared import (
    ELEMENTS,
    KV_CACHE_OPTIONS,
    divides,
    grid_refusals,
    has_options,
    has_prefixes,
    known_constants,
    nonempty,
    prefix_refusals,
    sequences,
    with_mods,
)

ROWS = 16, 32, 64  # rows of a tile

BACKENDS: tuple[str, ...] = ("cuda", "simulator")
ARCHES: tuple[str, ...] | None = None
DTYPES: tuple[str, ...] = ("float16", "bfloat16")
OPTIONS: frozenset[str] | None = None
CACHE_OPTIONS: frozenset[str] | None = KV_CACHE_OPTIONS | {"split_size", "k_descale", "v_descale", *SCALES, *PREFIXES}
CACHE_DTYPES: tuple[str, ...] = tuple(CODES)
DERIVATIVES: tuple[str, ...] = ()
STATISTICS: tuple[str, ...] = (FORWARD,)
WEIGHTS: str | None = None
ON_REQUEST = False
MEASURED: str | None = None
HEAD_DIMS: tuple[tuple[int, int], ...] = ((64, 64), (128, 128), (40, 96), (256, 256))
GROUP_ROWS: tuple[int, ...] = ROWS
MICRO_KERNELS: tuple[str, ...] = ("mma",)
KERNELS = "mma"

LARGEST = 256  # maximum head dimension
LARGEST_LATENT = 576  # the same of values inside keys, whose columns the warps divide (mma/latent.cuh)
KEYS = 64, 32  # keys of a tile, 16 per warp: the first that fits shared memory is chosen
ACCUMULATORS = 128  # maximum registers per thread for O
ACCUMULATORS_IN_OPTIONS = 140  # maximum registers per thread for O and S, if scores are modified or masked
ACCUMULATORS_IN_FP8 = 144  # maximum registers per thread for O and S with an fp8 cache, which is converted
ACCUMULATORS_WITH_SCALES = 136  # the same with a scale for each key
ACCUMULATORS_ON_TURING = 96  # ACCUMULATORS on sm_75, whose mma has K = 8 instead of 16
LIVE = 136  # Q stays in registers if O, S and Q need at most this many per thread
LIVE_WITH_MASK_MOD = 100  # the same with a mask_mod, whose walk over the tiles takes registers
OTHER_REGISTERS = 100  # registers per thread for everything but O, S and Q
SHORTEST_RUN = 4  # minimum iterations of a run, as in split_kv.cuh
WITH_TMA = ("sm_90a",)  # architectures for which a producer warp is a candidate
STAGES_OF_PRODUCER = 2, 3, 5  # candidates for the number of slots that a producer warp fills
WITH_CLUSTERS = ("sm_90", "sm_90a", "sm_100", "sm_100a", "sm_103a", "sm_120", "sm_121")  # they have clusters
CLUSTERS = 4, 8  # candidates for the number of blocks of a cluster; 8 is the portable maximum
PANEL_BYTES = 128  # maximum bytes of a row of a TMA box
WORD = 32  # columns whose codes of 4 bits a row of ldmatrix has
ROWS_OF_GROUPS = 256  # threads of the block that numbers the queries of groups
LEAST_PAGE = 8  # minimum keys of a page: smaller boxes would load less than a swizzle atom

# Cost model, per SM and clock, from data sheets: not measured on a GPU yet.
MEMORY_BYTES = {"sm_90": 24, "sm_90a": 24, "sm_100": 30, "sm_100a": 30, "sm_103a": 30}  # bandwidth of global memory
MEMORY_BYTES_OF_OTHERS = 12
PART_TILES = 2  # key tiles that take as long as the prologue and epilogue of a split
PART_TILES_OF_PRODUCER = 1  # the same with a producer warp, which loads the next split during the epilogue
LAUNCH = 3e-6  # seconds for a launch in a stream

TOO_MANY_ITERATIONS = "the tiles of keys of all sequences at the capacity of the cache exceed indices of 32 bits"


class Tile(NamedTuple):
    """The tile of a decode; tiles with the same block_kv round a row in the same way."""

    block_q: int  # queries, each with all heads of its GQA group
    block_kv: int
    threads: int
    rows: int  # (query, head) pairs
    stages: int
    q_in_registers: bool
    tma: bool  # a producer warp beside `threads` loads K and V with TMA
    blocks: int  # maximum blocks of the grid: as many as are resident on the device
    cluster: int  # blocks that divide the keys of an output tile and merge them in the same launch; 0: two launches
    of_prefix: "Tile | None" = None  # of the pass on shared prefixes, whose rows are those of all sequences of a group

    @property
    def form(self) -> str:
        """The name of the kernel's form; "" for the one that a prediction may choose."""
        return "producer warp" if self.tma else f"clusters of {self.cluster}" if self.cluster else ""


def refusals(problem: Problem, device: Device) -> list[str]:
    """Return reasons against dtypes other than fp16 and bf16, bf16 on sm_75, and D or Dv > LARGEST."""
    reasons = grid_refusals(problem) + multiply_refusals(problem, device) + prefix_refusals(problem)
    if problem.dtype.name not in ELEMENTS:
        return reasons  # no kernel has such a type, so there are no tiles
    largest, limit = max(problem.head_dim, problem.head_dim_v), LARGEST_LATENT if _is_latent(problem) else LARGEST
    if problem.cache is not None and problem.cache.codes == 2 and problem.head_dim % WORD:
        reasons.append(f"codes of 4 bits need head dimensions that are multiples of {WORD}, not {problem.head_dim}")
    elif largest > limit:
        reasons.append(f"head dimension {largest} is larger than {limit}")
    elif device.backend in BACKENDS and not tiles(problem, device):
        reasons.append(f"no tile of head dimension {largest} fits registers and shared memory")
    elif device.backend in BACKENDS and any(_overflows(problem, tile) for tile in choices(problem, device)):
        reasons.append(TOO_MANY_ITERATIONS)
    return reasons


def tiles(problem: Problem, device: Device) -> list[Tile]:
    """Return the one tile that predictions use: the smallest that holds all queries of a sequence, or the largest.

    It depends on the head dimension, the group and the queries of a sequence, and not on the batch.
    """
    legal = legal_tiles(problem, device)
    return [tile for tile in legal if tile.rows >= problem.q_len * problem.group][:1] or legal[-1:]


def legal_tiles(problem: Problem, device: Device) -> list[Tile]:
    """Return the tiles whose accumulators fit the registers: for each number of rows the best keys and stages."""
    by_rows = (_tiles_of_rows(problem, device, rows) for rows in ROWS)
    legal = [max(legal, key=lambda tile: _preference(tile, device)) for legal in by_rows if legal]
    if not has_prefixes(problem):
        return legal
    return [tile._replace(of_prefix=_tile_of_prefix(problem, tile, legal)) for tile in legal]


def _tile_of_prefix(problem: Problem, tile: Tile, legal: list[Tile]) -> Tile:
    """Return the smallest tile that holds the rows of all sequences, or the largest, which rounds as `tile` does."""
    alike = [x for x in legal if x.block_kv == tile.block_kv]
    return next((x for x in alike if x.rows >= problem.batch * problem.q_len * problem.group), alike[-1])


def choices(problem: Problem, device: Device) -> list[Tile]:
    """Return every legal tile, as candidates of a tune: on Hopper also those with a producer warp or in clusters.

    Neither changes how a range of keys is rounded, but for values inside keys, whose form with a producer warp is that
    of wgmma. Without split_size a producer warp may change the number of resident blocks, and thus where the keys of a
    sequence are split, and a cluster splits each output tile separately. With split_size there is no cluster form,
    because a tile may have more pieces than a cluster has blocks, and none of wgmma.
    """
    by_rows = [(rows, tma) for rows in ROWS for tma in (False, True) if not tma or _has_tma(problem, device)]
    every = [tile for rows, tma in by_rows for tile in _tiles_of_rows(problem, device, rows, tma=tma)]
    assert problem.cache is not None
    if has_prefixes(problem):
        return legal_tiles(problem, device)
    if device.arch in WITH_CLUSTERS and problem.cache.split_size is None and not _is_latent(problem):
        every += [tile._replace(cluster=blocks) for tile in legal_tiles(problem, device) for blocks in CLUSTERS]
    return every


def forms(problem: Problem, device: Device, tile: Tile) -> dict[str, Sequence[Tile]]:
    """Return {form: tiles with at least as many rows as `tile`}, for a producer warp and each size of a cluster."""
    others: dict[str, list[Tile]] = {}
    for each in choices(problem, device):
        if each.form and each.rows >= tile.rows:
            others.setdefault(each.form, []).append(each)
    return {form: tuple(tiles) for form, tiles in others.items()}


def advantage(problem: Problem) -> str:
    """Return the reason that one tile holds all queries of a sequence and so reads each key once; "" if none does."""
    rows = problem.q_len * problem.group
    return f"one tile of mma_decode has all {rows} rows of a group, and reads each key once" if rows <= ROWS[-1] else ""


def _has_tma(problem: Problem, device: Device) -> bool:
    """Return whether TMA can load the caches: pages are powers of two from 8 on, and rows are whole swizzled panels.

    The columns of panels past those of values inside keys are zeros.
    """
    cache = problem.cache
    assert cache is not None
    if cache.scale_dtype is not None:
        return False  # the producer warp loads no scales
    loads = device.arch in WITH_TMA and problem.aligned and 0 not in (cache.blocks, problem.kv_len)
    if _is_latent(problem):
        panels = latent.has_warpgroups(problem) and cache.split_size is None
    else:
        panels = all(row in (32, 64) or row % PANEL_BYTES == 0 for row in _row_bytes(problem))
    return loads and panels and not divides(cache.page) and (cache.page is None or cache.page >= LEAST_PAGE)


def _tiles_of_rows(problem: Problem, device: Device, rows: int, *, tma: bool = False) -> list[Tile]:
    accumulators, scores, q = _live(problem, rows, tma)
    if accumulators > (ACCUMULATORS_ON_TURING if device.arch == "sm_75" else ACCUMULATORS):
        return []
    if has_options(problem) and accumulators + scores > ACCUMULATORS_IN_OPTIONS:
        return []
    scaled = problem.cache is not None and problem.cache.scale_dtype is not None
    limit = ACCUMULATORS_WITH_SCALES if scaled else ACCUMULATORS_IN_FP8
    if not _is_16_bit(problem) and accumulators + scores > limit:
        return []
    shares_keys = _is_latent(problem)
    # Two warpgroups have one number of rows, and two groups of warps need two slots, which sm_75 lacks.
    if shares_keys and (rows != latent.ROWS_OF_WARPGROUPS if tma else device.arch == "sm_75" and rows > ROWS[0]):
        return []
    in_registers = accumulators + scores + q <= (LIVE_WITH_MASK_MOD if problem.mask_mod else LIVE)
    if shares_keys:
        in_registers = not tma and rows <= latent.MOST_ROWS_IN_REGISTERS
    return [
        tile._replace(blocks=device.units * _resident(problem, device, tile))
        for keys in (KEYS[:1] if tma else (latent.KEYS,) if shares_keys else KEYS)
        for threads in (latent.threads(rows, tma=tma) if shares_keys else 2 * keys,)
        for stages in (STAGES_OF_PRODUCER if tma else (1,) if device.arch == "sm_75" else (2, 3, 4))
        for tile in (Tile(max(rows // problem.group, 1), keys, threads, rows, stages, in_registers, tma, 0, 0),)
        if _shared_bytes(problem, tile) + static_bytes(problem, keys) <= device.shared_bytes
    ]


def _preference(tile: Tile, device: Device) -> tuple[int, int, int, int, int]:
    """Return a sort key: prefer more keys, then two resident blocks, which hide latency, then more keys in flight."""
    resident = tile.blocks // device.units
    in_flight = resident * (tile.stages - 1) * tile.block_kv
    return tile.block_kv, min(resident, 2), in_flight, resident, -tile.stages


def alike(tile: Tile) -> object:
    """Return the tile itself, because the cost ranking of any two depends on the length."""
    return tile


def seconds(problem: Problem, pairs: int, device: Device, tile: Tile) -> float:
    """Return predicted seconds of the block with the most steps, if every sequence is as long as the capacity.

    With shared prefixes it is that of both passes.
    """
    if has_prefixes(problem):
        return LAUNCH + sum(seconds(part, pairs, device, each) for part, each in _passes(problem, tile))
    k, v = _padded(problem)
    keys = tile.block_kv
    elements = tile.rows * keys
    of_keys, of_values = _row_bytes(problem)
    loaded = keys * (of_keys + of_values + _bytes_of_scales(problem))
    read = loaded + (0 if tile.q_in_registers else 4 * 2 * tile.rows * k)
    multiply_adds = MULTIPLY_ADDS.get(device.arch, MULTIPLY_ADDS_OF_SERVERS)
    if _is_latent(problem):
        loaded = keys * of_keys
        read = latent.read_bytes(tile.rows, (k, v), q_in_registers=tile.q_in_registers)
        if tile.tma:
            read, multiply_adds = latent.read_bytes_of_warpgroups((k, v)), latent.MULTIPLY_ADDS_OF_WGMMA
    clocks = max(
        loaded / MEMORY_BYTES.get(device.arch, MEMORY_BYTES_OF_OTHERS),
        elements * (k + v) / multiply_adds,
        (read + loaded) / SHARED_BYTES,
        (elements / 32 * INSTRUCTIONS_OF_SCORE["forward"] + conversions(problem, keys)) / INSTRUCTIONS,
    )
    latency = LATENCY if tile.stages == 1 else 0
    assert problem.cache is not None
    split, part = problem.cache.split_size, PART_TILES_OF_PRODUCER if tile.tma else PART_TILES
    iterations = most_iterations(problem, tile.rows, split or keys)
    resident = -(-min(tile.blocks, max(iterations, 1)) // device.units)
    if tile.cluster:
        waves = -(-_output_tiles(problem, tile) * problem.batch * tile.cluster // tile.blocks)
        steps = waves * (max(-(-_pieces(problem, keys) // tile.cluster), SHORTEST_RUN) + part)
    elif split is None:
        steps = max(-(-iterations // tile.blocks), min(iterations, SHORTEST_RUN)) + part
    else:
        steps = -(-iterations // tile.blocks) * (min(split, problem.kv_len) // keys + 1 + part)
    return (1 if tile.cluster else 2) * LAUNCH + steps * (resident * clocks + latency) / CLOCK


def threads(device: Device, tile: Tile, cost: float) -> int:
    """Return the threads per block of the decode kernel."""
    return tile.threads


def workspaces(problem: Problem, tile: Tile, q_rows: int, kv_rows: int) -> tuple[Workspace, ...]:
    """Return the workspaces of the partial results, unless a cluster merges them, and of the rotated rows of q."""
    if tile.cluster:
        return rotated_rows(problem, q_rows)
    if not has_prefixes(problem):
        return *_results(problem, "part", _partial_results(problem, tile), tile), *rotated_rows(problem, q_rows)
    cache = problem.cache
    assert cache is not None and cache.prefix_table is not None
    groups, queries = cache.prefix_table[0], q_rows if problem.layout == "thd" else problem.batch * q_rows
    numbers = (("prefix_rows", (queries,)), ("prefix_places", (problem.batch,)), ("prefix_starts", (groups + 1, 2)))
    (own, _), (on_prefix, of_prefix) = _passes(problem, tile)
    return (
        *_results(problem, "part", _results_of_pass(own, tile, queries, sequences(problem)), tile),
        *_results(problem, "prefix", _results_of_pass(on_prefix, of_prefix, queries, groups), of_prefix),
        *(Workspace(name, shape, np.dtype(np.int32), ()) for name, shape in numbers),
        *rotated_rows(problem, q_rows),
    )


def _passes(problem: Problem, tile: Tile) -> tuple[tuple[Problem, Tile], tuple[Problem, Tile]]:
    """Return the problem and tile of the pass on the own keys of sequences, and of that on shared prefixes."""
    assert problem.cache is not None and tile.of_prefix is not None
    cache = problem.cache._replace(prefix_table=None)
    own = problem._replace(kv_len=problem.kv_len - problem.cache.prefix, cache=cache)
    queries = problem.batch * problem.q_len
    return (own, tile), (own._replace(batch=1, q_len=queries, kv_len=problem.cache.prefix), tile.of_prefix)


def _results_of_pass(problem: Problem, tile: Tile, queries: int, sequences: int) -> int:
    """Return the number of partial results of a pass of a call with prefixes (result_of_part in prefixes.cuh)."""
    assert problem.cache is not None
    output_tiles = (queries * problem.group // tile.rows + sequences) * problem.kv_heads
    split = problem.cache.split_size
    return output_tiles + _grid(problem, tile) if split is None else output_tiles * _pieces(problem, split)


def _results(problem: Problem, name: str, results: int, tile: Tile) -> tuple[Workspace, ...]:
    """Return the workspaces of partial results of a pass."""
    rows, dtype = (results, tile.rows), np.dtype(np.float32)
    own = ("out", (*rows, _padded(problem)[1])), ("lse", rows), ("statistics", (*rows, 3))  # records of three numbers
    return tuple(Workspace(f"{name}_{x}", shape, dtype, ()) for x, shape in own[: 2 + bool(problem.statistics)])


def launches(problem: Problem, device: Device, tile: Tile) -> tuple[Launch, ...]:
    """Return the launches: append and rotation if there are any, decode, and without a cluster the merge."""
    cache = problem.cache
    assert cache is not None
    if _overflows(problem, tile):
        raise UnsupportedError(f"{tile}: {TOO_MANY_ITERATIONS}")
    constants = _constants(problem, tile)
    of_rows = constants | {"THREADS": ROW_THREADS}
    steps = append_launches(problem, of_rows)
    grid, output_tiles = _grid(problem, tile), _output_tiles(problem, tile)
    clusters = tile.cluster * max(output_tiles, problem.layout == "thd"), sequences(problem), 1
    if tile.of_prefix is not None:
        own, on_prefix = _passes(problem, tile)
        grid = _grid(*own)
        steps += _prefix_launches(problem, *on_prefix, constants)
        of_rows |= {"PREFIX_BLOCK_Q": tile.of_prefix.rows}
    steps.append(
        Launch(
            _kernel(problem, tile),
            known_constants(_kernel(problem, tile), constants),
            clusters if tile.cluster else (grid, 1, 1),
            tile.threads + _producers(problem, tile),
            _shared_bytes(problem, tile),
            _boxes(problem, tile) if tile.tma else (),
        )
    )
    merges = grid > 1 if cache.split_size is None else _pieces(problem, cache.split_size) > 1
    if (merges and not tile.cluster) or tile.of_prefix is not None:
        steps.append(Launch("merge", known_constants("merge", of_rows), (output_tiles, problem.batch, 1), ROW_THREADS))
    return nonempty(with_mods(problem, steps))


def _prefix_launches(
    problem: Problem, on_prefix: Problem, tile: Tile, constants: Mapping[str, Constant]
) -> list[Launch]:
    """Return the launches that number the queries of groups, and that compute them on the keys of prefixes."""
    of_rows = {**constants, "THREADS": ROWS_OF_GROUPS, "PREFIX_BLOCK_Q": tile.rows}
    own = _constants(problem, tile) | {"PREFIX_PASS": True, "PREFIX_BLOCK_Q": tile.rows}
    grid, shared = (_grid(on_prefix, tile), 1, 1), _shared_bytes(problem, tile)
    return [
        Launch("prefix_rows", known_constants("prefix_rows", of_rows), (1, 1, 1), ROWS_OF_GROUPS),
        Launch("mma/decode", known_constants("mma/decode", own), grid, tile.threads, shared),
    ]


def _kernel(problem: Problem, tile: Tile) -> str:
    """Return the decode kernel of a tile."""
    return latent.DECODE_OF_WARPGROUPS if tile.tma and _is_latent(problem) else "mma/decode"


def _producers(problem: Problem, tile: Tile) -> int:
    """Return the threads beside those that compute: a producer warp, or the warpgroup that gives them its registers."""
    return (128 if _is_latent(problem) else 32) * tile.tma


def _constants(problem: Problem, tile: Tile) -> dict[str, Constant]:
    """Return the constants of the decode kernel."""
    assert problem.cache is not None
    return fragment_constants(problem) | {
        "THREADS": tile.threads,
        "BLOCK_Q": tile.rows,
        "BLOCK_KV": tile.block_kv,
        "COLUMN_WARPS": 1,
        "STAGES": tile.stages,
        "Q_IN_REGISTERS": tile.q_in_registers,
        "SPLIT_SIZE": problem.cache.split_size or 0,
        "TMA_KV": tile.tma,
        "CLUSTER_MERGE": tile.cluster > 0,
        "CLUSTER": tile.cluster or 1,
        "LATENT": _is_latent(problem) and not tile.tma,
    }


def _boxes(problem: Problem, tile: Tile) -> tuple[Box, ...]:
    """Return the boxes of K and V: a panel of the keys of a tile that are on one page."""
    cache = problem.cache
    assert cache is not None
    keys = tile.block_kv if cache.page is None else min(cache.page, tile.block_kv)
    if _is_latent(problem):
        return (Box("k", keys, PANEL_BYTES // 2, cache.layout),)
    panels = (min(row, PANEL_BYTES) // cache.dtype.itemsize for row in _row_bytes(problem))
    return tuple(Box(name, keys, columns, cache.layout) for name, columns in zip("kv", panels, strict=True))


def most_iterations(problem: Problem, rows: int, keys: int) -> int:
    """Return the number of iterations (split_kv.cuh) of `keys` keys, if sequences are as long as the capacity."""
    return problem.batch * problem.kv_heads * _row_tiles(problem, rows) * _pieces(problem, keys)


def _overflows(problem: Problem, tile: Tile) -> bool:
    """Return whether all iterations, rounded up to equal runs, are more than an int of split_kv.cuh holds.

    A cluster divides the iterations of one output tile.
    """
    assert problem.cache is not None
    if tile.of_prefix is not None:
        return any(_overflows(part, each._replace(of_prefix=None)) for part, each in _passes(problem, tile))
    iterations = most_iterations(problem, tile.rows, problem.cache.split_size or tile.block_kv)
    return not tile.cluster and iterations + tile.blocks >= 2**31


def _output_tiles(problem: Problem, tile: Tile) -> int:
    """Return the output tiles (split_kv.cuh) of a sequence."""
    return _row_tiles(problem, tile.rows) * problem.kv_heads


def _row_tiles(problem: Problem, rows: int) -> int:
    return -(-problem.q_len * problem.group // rows)


def _pieces(problem: Problem, keys: int) -> int:
    return max(-(-problem.kv_len // keys), 1)


def _partial_results(problem: Problem, tile: Tile) -> int:
    """Return the number of partial results: two per block (first and last tile), with split_size one per piece."""
    assert problem.cache is not None
    split = problem.cache.split_size
    return 2 * _grid(problem, tile) if split is None else most_iterations(problem, tile.rows, split)


def _grid(problem: Problem, tile: Tile) -> int:
    """Return the blocks of the decode kernel, at most one per run (split_kv.cuh) at the capacity of the cache."""
    assert problem.cache is not None
    split = problem.cache.split_size
    runs = -(-most_iterations(problem, tile.rows, split or tile.block_kv) // (1 if split else SHORTEST_RUN))
    packed = problem.layout == "thd"  # one block must write the rows after the last sequence
    return min(tile.blocks, max(runs, packed))


def _padded(problem: Problem) -> tuple[int, int]:
    """Return (D, Dv) rounded up to whole fragments."""
    return -(-problem.head_dim // 16) * 16, -(-problem.head_dim_v // 16) * 16


def _is_16_bit(problem: Problem) -> bool:
    """Return whether the caches have the dtype of q; else they are codes of 8 or 4 bits."""
    return problem.cache is not None and problem.cache.dtype == problem.dtype


def _is_latent(problem: Problem) -> bool:
    """Return whether values are inside keys of 16 bits: then a tile of keys is loaded once for both products."""
    return problem.shared_kv and _is_16_bit(problem)


def _row_bytes(problem: Problem) -> tuple[int, int]:
    """Return the bytes of a row of a K tile and of a V tile: whole 16-bit fragments, or pairs of fragments of codes."""
    if _is_16_bit(problem):
        k, v = _padded(problem)
        return 2 * k, 2 * v
    assert problem.cache is not None
    codes = problem.cache.codes
    return -(-problem.head_dim // codes // 32) * 32, _columns(problem) // codes


def _columns(problem: Problem) -> int:
    """Return the columns of O in registers."""
    each = 16
    if problem.cache is not None and not _is_16_bit(problem):
        each = 32 * problem.cache.codes
    return -(-problem.head_dim_v // each) * each


def _live(problem: Problem, rows: int, tma: bool) -> tuple[int, int, int]:
    """Return the registers per thread for O, for S, and for all of Q."""
    k, v = _padded(problem)[0], _columns(problem)
    if _is_latent(problem):
        return latent.live_of_warpgroups(problem) if tma else latent.live(problem, rows)
    return rows // 16 * v // 2, rows // 16 * 8, rows // 16 * k // 4


def _bytes_of_scales(problem: Problem) -> int:
    """Return the bytes of the scales of a key and its value, and of their zeros; 0 without them."""
    cache = problem.cache
    return 2 * cache.codes * np.dtype(cache.scale_dtype).itemsize if cache and cache.scale_dtype else 0


@lru_cache(maxsize=1024)
def _shared_bytes(problem: Problem, tile: Tile) -> int:
    """Return the bytes of dynamic shared memory."""
    return shared_bytes(_kernel(problem, tile), _constants(problem, tile))


def _resident(problem: Problem, device: Device, tile: Tile) -> int:
    """Return the occupancy in resident blocks per SM."""
    accumulators, scores, q = _live(problem, tile.rows, tile.tma)
    registers = min(255, accumulators + scores + (q if tile.q_in_registers else 0) + OTHER_REGISTERS)
    shared = _shared_bytes(problem, tile) + static_bytes(problem, tile.block_kv)
    return max(1, min((device.shared_bytes + RESERVED) // (shared + RESERVED), REGISTERS // (registers * tile.threads)))
