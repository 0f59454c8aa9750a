"""The tensor-core engine on mma.sync: fp16 from Turing (sm_75), bf16 from Ampere (sm_80)."""

# No `from __future__ import annotations`, as in records.py.
from functools import lru_cache
from typing import NamedTuple

from ..device import Device
from ..jit.shared_memory import shared_bytes
from ..problem.records import BACKWARD, CODES, DOUBLE_BACKWARD, FORWARD, FP8, JVP, SCALES, Problem
from . import latent
from .fragments import backward_workspaces, fragment_backward, fragment_constants, fragment_refusals
from .kv_cache import append_launches, rotated_rows, static_bytes
from .launch import Constant, Launch, Workspace
from .shared import (
    ATTENTION_OPTIONS,
    ELEMENTS,
    KV_CACHE_OPTIONS,
    SELECTION,
    captured_reads,
    grid_refusals,
    known_constants,
    nonempty,
    of_bias,
    owned_launches,
    reads_at_scores,
    sequences,
    weights_grid,
    with_mods,
)
from .shared import advantage as advantage
from .shared import forms as forms
from .simt import captured_launches

BACKENDS: tuple[str, ...] = ("cuda", "simulator")
ARCHES: tuple[str, ...] | None = None
DTYPES: tuple[str, ...] = ("float16", "bfloat16")
OPTIONS: frozenset[str] | None = ATTENTION_OPTIONS | SELECTION
CACHE_OPTIONS: frozenset[str] | None = KV_CACHE_OPTIONS | SELECTION | {*SCALES}
CACHE_DTYPES: tuple[str, ...] = tuple(CODES)
DERIVATIVES: tuple[str, ...] = (JVP, DOUBLE_BACKWARD)
STATISTICS: tuple[str, ...] = (FORWARD, BACKWARD)
WEIGHTS: str | None = "gpu.weights"
ON_REQUEST = False
MEASURED: str | None = None
HEAD_DIMS: tuple[tuple[int, int], ...] = ((64, 64), (128, 128), (40, 96), (256, 256))
GROUP_ROWS: tuple[int, ...] = ()
MICRO_KERNELS: tuple[str, ...] = ("mma",)
KERNELS = "mma"

LARGEST, LARGEST_ON_TURING = 576, 512  # maximum head dimension
# Maximum registers per thread for accumulators and fragments that are live across a mainloop step; the rest of the 255
# are for operands and addresses. bench/results/static.json shows no spills up to these limits.
LIVE = {
    "forward": 164, "jvp": 180, "backward": 200, "backward_q": 168, "backward_kv": 168, "backward_bias": 112,
    "second_q": 167, "second_kv": 168, "second_bias": 112, "attention_weights": 128, "top_weights": 128,
    "key_importance": 128,
}  # fmt: skip
LIVE_OF_LISTS = 30  # subtracted with selected keys, whose positions and heads are in shared memory
LIVE_IN_OPTIONS = 30  # subtracted with modified scores or dropout
LIVE_OF_MODS = 34  # subtracted instead in a forward with mods, which classifies the tiles of a mask_mod
LIVE_WITH_CACHE = 16  # subtracted with a KV cache, whose loads hold page numbers in registers
LIVE_WITH_SCALES = 30  # subtracted with scales per key, whose numbers of a tile are in registers
LIVE_OF_MODS_WITH_CACHE = 20  # subtracted as well with mods and a KV cache, for the positions of queries
FREE_READS = 32  # elements per thread that a score_mod reads at no cost; each further read subtracts 2 registers
LIVE_OF_JVP = 12  # subtracted in a JVP without tv or on BLACKWELL: the compiler takes more registers
BLACKWELL = "sm_100", "sm_100a", "sm_103a"
LIVE_ON_TURING = 20  # subtracted on sm_75, whose mma has K = 8 instead of 16
# Architectures with the 16-byte red.global.add.v4.f32. On others the dK/dV kernel adds single numbers to dQ.
VECTOR_ADDITION = ("sm_90", "sm_90a", "sm_100", "sm_100a", "sm_103a", "sm_120", "sm_121")

# Cost model, per SM and clock, from data sheets: not measured on a GPU yet.
MULTIPLY_ADDS = {"sm_75": 512, "sm_86": 512, "sm_87": 512, "sm_89": 512, "sm_120": 512, "sm_121": 512}  # of mma.sync
MULTIPLY_ADDS_OF_SERVERS = 1024  # sm_80; also sm_90 and sm_100, where mma.sync reaches at most half of the peak
SHARED_BYTES = 128  # shared-memory bandwidth
CACHE_BYTES = 32  # L2 bandwidth
# Bandwidth of red to global memory, of vectors and of single numbers. At its published speed on an A100,
# FlashAttention-2 adds 4 bytes per clock, so the bandwidth is at least that.
ADDED_BYTES, ADDED_BYTES_OF_SINGLES = 16, 8
INSTRUCTIONS = 4  # warp instructions issued
# Instructions beyond mma and its loads, counted in SASS (python -m bench static): per thread and score, and per warp
# and mainloop step.
INSTRUCTIONS_OF_SCORE = {
    "forward": 4.6, "jvp": 9, "backward": 6.5, "backward_q": 4.5, "backward_kv": 5, "second_q": 10, "second_kv": 12,
    "attention_weights": 12, "top_weights": 12, "key_importance": 12,
}  # fmt: skip
INSTRUCTIONS_OF_STEP = {
    "forward": 80, "jvp": 330, "backward": 260, "backward_q": 120, "backward_kv": 200, "second_q": 200,
    "second_kv": 230, "attention_weights": 80, "top_weights": 80, "key_importance": 80,
}  # fmt: skip
# Instructions per thread that convert a pair of codes to the dtype of q, by `python -m bench conversions`
INSTRUCTIONS_OF_PAIR = {
    "float16": {"int8": 2.5, FP8: 7, "float8_e5m2": 1, "uint8": 1.75},
    "bfloat16": {"int8": 4, FP8: 7, "float8_e5m2": 4, "uint8": 2.75},
}
LATENCY = 600  # clocks of a global load
CLOCK = 1.5e9
REGISTERS = 65536
RESERVED = 1024  # bytes of shared memory that CUDA reserves per block
# ((row warps, 16-row fragments per warp) and steps), in order of preference
SHAPES = tuple((shapes, ((32, 64, 128), (16,))) for shapes in (((4, 1), (4, 2), (8, 1)), ((2, 1),), ((1, 1),)))
# Few rows may share a list, so that small tiles compete with large ones.
SHAPES_OF_LISTS = ((((4, 1), (4, 2), (8, 1), (2, 1), (1, 1)), ((16, 32, 64, 128),)),)


class Tile(NamedTuple):
    """Tile of one kernel: a block owns `rows` rows along one axis and loops over the other in steps of `step` rows.

    Warps form a grid: row warps split the rows; `column_warps` split the columns of the accumulators, and each of
    these recomputes the scores of its rows or, with `shares_scores`, computes a part of them for all.
    """

    rows: int
    step: int
    threads: int
    column_warps: int
    stages: int
    q_in_registers: bool = False
    add_dq: bool = False
    shares_scores: bool = False

    @property
    def score_warps(self) -> int:
        """The number of warps that compute the same scores."""
        return 1 if self.shares_scores else self.column_warps


class Tiles(NamedTuple):
    """Tiles of a problem's kernels.

    `q_tile` is the tile of the forward or dQ kernel, None if the dK/dV kernel also accumulates dQ; `kv_tile` is that of
    the dK/dV kernel; `bias_tile` is that of the dbias kernel, None if neither a bias nor a captured array needs it.
    """

    block_q: int
    block_kv: int
    q_tile: Tile | None
    kv_tile: Tile | None
    bias_tile: Tile | None


def refusals(problem: Problem, device: Device) -> list[str]:
    """Return reasons against dtypes other than fp16 and bf16, bf16 on sm_75, and D or Dv > LARGEST."""
    reasons = grid_refusals(problem) + fragment_refusals(problem) + multiply_refusals(problem, device)
    reasons += _code_refusals(problem)
    if problem.selected is not None:
        from . import selected  # imported by the first call with selected keys

        reasons += selected.refusals(problem)
    if problem.weights and problem.backward:
        reasons.append(f"it computes no gradients of {problem.weights} in this version")
    if problem.dtype.name not in ELEMENTS:
        return reasons  # no kernel has such a type, so there are no tiles
    largest = max(problem.head_dim, problem.head_dim_v)
    of_turing = device.arch == "sm_75" and not latent.serves(problem)
    limit = LARGEST_ON_TURING if of_turing else LARGEST
    if largest > limit:
        reasons.append(f"head dimension {largest} is larger than {limit}")
    elif device.backend in BACKENDS and not tiles(problem, device):
        reasons.append(f"no tile of head dimension {largest} fits the {device.shared_bytes} bytes of shared memory")
    return reasons


def _code_refusals(problem: Problem) -> list[str]:
    """Return the reason against a cache of codes: only a forward on all keys converts them, and by scales per key."""
    cache = problem.cache
    if cache is None or cache.dtype == problem.dtype:
        return []
    if cache.scale_dtype is not None and not problem.weights and problem.selected is None:
        odd = cache.codes == 2 and problem.head_dim_v % 2
        return ["codes of 4 bits need an even number of columns"] if odd else []
    return [f"it reads no caches of {cache.dtype.name}, as mma_decode does"]


def multiply_refusals(problem: Problem, device: Device) -> list[str]:
    """Return the reason why mma.sync does not multiply a problem's dtype; [] if it does."""
    dtype = problem.dtype.name
    if dtype not in DTYPES:
        return [f"{dtype} is not {' or '.join(DTYPES)}, which tensor cores multiply exactly"]
    if dtype == "bfloat16" and device.arch == "sm_75":
        return ["the tensor cores of sm_75 multiply float16, not bfloat16"]
    return []


def tiles(problem: Problem, device: Device) -> list[Tiles]:
    """Return the tiles whose kernels fit shared memory and registers."""
    if not problem.backward:
        kernel = _row_kernel(problem)
        if kernel == latent.FORWARD:
            widest = _latent_tiles(problem, device)
            return [Tiles(max(x.rows // problem.group, 1), x.step, x, None, None) for x in widest]
        if _owns_keys(kernel):
            return [Tiles(x.step, x.rows, x, None, None) for x in _legal_tiles(kernel, problem, device)]
        return [Tiles(tile.rows, tile.step, tile, None, None) for tile in _legal_tiles(kernel, problem, device)]
    bias, step = bias_tile(problem, device), _backward(problem)
    by_key = _owner_of_keys(problem)
    if _needs_bias_tile(problem) and bias is None:
        return []
    legal = [
        Tiles(q.rows, kv.rows, q, kv, bias)
        for q in _legal_tiles(f"{step}_q", problem, device)
        for kv in _legal_tiles(by_key, problem, device)
    ]
    if not problem.deterministic and not problem.derivative and problem.selected is None:
        kv_tiles = _legal_tiles("backward_kv", problem, device, add_dq=True) + _sharing_tiles(problem, device)
        legal += [Tiles(kv.step, kv.rows, None, kv, bias) for kv in kv_tiles]
    return legal


def _row_kernel(problem: Problem) -> str:
    """Return the kernel whose blocks own query tiles, or that of probabilities."""
    if problem.backward:
        return f"{_backward(problem)}_q"
    if problem.weights:
        return problem.weights
    if problem.selected is not None:
        return "selected_forward"
    if latent.serves(problem):
        return latent.FORWARD
    return "jvp" if problem.derivative else "forward"


def _dense(kernel: str) -> str:
    """Return the kernel whose products a kernel of selected keys, or of values inside keys, has."""
    return kernel.removeprefix("selected_").removeprefix("latent_").replace("_add", "_kv")


def _owns_keys(kernel: str) -> bool:
    """Return whether the blocks of a kernel own tiles of keys."""
    return kernel.endswith("_kv") or kernel in ("backward", "key_importance", "selected_backward_add")


def _key_kernel(problem: Problem, tile: Tile) -> str:
    """Return the kernel whose blocks own key tiles."""
    return "backward" if tile.shares_scores else _owner_of_keys(problem)


def _owner_of_keys(problem: Problem) -> str:
    """Return the kernel of dK and dV whose warps do not share their scores."""
    if problem.selected is not None:
        from . import selected

        return "selected_backward_add" if selected.adds(problem) else "selected_backward_kv"
    return f"{_backward(problem)}_kv"


def _backward(problem: Problem) -> str:
    """Return the prefix of the tile kernels of a backward, or of a double backward."""
    if problem.selected is not None:
        return "selected_backward"
    return "second" if problem.derivative else "backward"


def bias_tile(problem: Problem, device: Device) -> Tile | None:
    """Return the tile of the dbias kernel; None if the problem does not need it or no tile is legal."""
    legal = _legal_tiles(f"{_backward(problem)}_bias", problem, device) if _needs_bias_tile(problem) else []
    return legal[0] if legal else None


def _needs_bias_tile(problem: Problem) -> bool:
    if problem.selected is not None:
        return False
    return problem.bias is not None or any(read.is_owned for read in captured_reads(problem))


def alike(tile: Tiles) -> object:
    """Return the tile itself, because the cost ranking of any two depends on the length."""
    return tile


def choices(problem: Problem, device: Device) -> list[Tiles]:
    """Return `tiles`: a tune measures the tiles among which a prediction chooses."""
    return tiles(problem, device)


def seconds(problem: Problem, pairs: int, device: Device, tile: Tiles) -> float:
    """Return predicted seconds: waves of blocks x time of one block, summed over the tile kernels."""
    heads, kv_heads = problem.batch * problem.heads, problem.batch * problem.kv_heads
    total = 0.0
    if problem.selected is not None:
        from . import selected

        if tile.q_tile is not None:
            visits = selected.row_visits(problem, pairs, tile.q_tile.rows)
            total += _seconds_of_visits(_row_kernel(problem), problem, device, tile.q_tile, visits)
        if tile.kv_tile is not None:
            visits = selected.key_visits(problem, pairs, tile.kv_tile.rows, tile.kv_tile.step)
            total += _seconds_of_visits(_owner_of_keys(problem), problem, device, tile.kv_tile, visits)
        return total
    if tile.q_tile is not None:
        kernel = _row_kernel(problem)
        length = problem.kv_len if _owns_keys(kernel) else problem.q_len
        if kernel == latent.FORWARD:  # rows are (query, head) pairs
            heads, length, pairs = kv_heads, length * problem.group, pairs * problem.group
        total += _seconds(kernel, problem, device, tile.q_tile, heads, length, pairs)
    if tile.kv_tile is not None:
        group_pairs = pairs * (problem.heads // problem.kv_heads)
        kernel = _key_kernel(problem, tile.kv_tile)
        total += _seconds(kernel, problem, device, tile.kv_tile, kv_heads, problem.kv_len, group_pairs)
    return total


def _seconds_of_visits(kernel: str, problem: Problem, device: Device, tile: Tile, visits: tuple[int, float]) -> float:
    """Return predicted seconds of a kernel with (blocks, rows or keys that each block visits in steps)."""
    blocks, visited = visits
    return _seconds(kernel, problem, device, tile, blocks, tile.rows, round(visited * tile.rows))


def threads(device: Device, tile: Tiles, cost: float) -> int:
    """Return the threads per block of the forward or dQ kernel, or of the dK/dV kernel if that accumulates dQ."""
    kernel_tile = tile.q_tile or tile.kv_tile
    assert kernel_tile is not None
    return kernel_tile.threads


def workspaces(problem: Problem, tile: Tiles, q_rows: int, kv_rows: int) -> tuple[Workspace, ...]:
    """Return `backward_workspaces` for a backward, and the rotated rows of q for a KV cache."""
    if not problem.backward:
        return rotated_rows(problem, q_rows)
    rows = backward_workspaces(problem, q_rows, add_dq=tile.q_tile is None)
    if problem.selected is None:
        return rows
    from . import selected

    return *rows, *selected.key_workspaces(problem, q_rows, kv_rows)


def launches(problem: Problem, device: Device, tile: Tiles) -> tuple[Launch, ...]:
    """Return the launch of the forward or JVP, or those of a backward: row kernels, dK/dV, dQ and dbias."""

    def q_grid(q_tile: Tile) -> tuple[int, int, int]:
        if problem.selected is not None:
            from . import selected

            return selected.list_grid(problem, q_tile.rows)
        if _row_kernel(problem) == latent.FORWARD:
            return latent.grid(problem, q_tile.rows)
        return max(-(-problem.q_len // q_tile.rows), 1), problem.heads, sequences(problem)

    q_tile, kv_tile = tile.q_tile, tile.kv_tile
    if kv_tile is None:
        assert q_tile is not None
        steps = append_launches(problem, fragment_constants(problem))
        grid = weights_grid(problem, tile.block_q, tile.block_kv) if problem.weights else q_grid(q_tile)
        steps.append(_launch(_row_kernel(problem), problem, q_tile, grid))
        return nonempty(with_mods(problem, steps))
    backward = []
    kv_grid = max(-(-problem.kv_len // kv_tile.rows), 1), problem.kv_heads, sequences(problem)
    if problem.selected is None:
        backward.append(_launch(_key_kernel(problem, kv_tile), problem, kv_tile, kv_grid))
    else:
        from . import selected

        backward += selected.key_launches(
            problem,
            fragment_constants(problem),
            (kv_tile.step, kv_tile.rows),
            lambda kernel, grid: _launch(kernel, problem, kv_tile, grid),
        )
    if q_tile is not None:
        backward.append(_launch(_row_kernel(problem), problem, q_tile, q_grid(q_tile)))
    backward += array_launches(problem, device, tile.bias_tile)
    return fragment_backward(problem, backward, add_dq=kv_tile.add_dq)


def array_launches(problem: Problem, device: Device, tile: Tile | None) -> list[Launch]:
    """Return the launches for the gradients of a bias and of captured arrays, which mma and wgmma share."""
    launches = _bias_launches(problem, tile) + captured_launches(problem, device)
    if not _needs_bias_tile(problem):
        return launches
    assert tile is not None
    shape, kernel = (tile.rows, tile.step), f"{_backward(problem)}_bias"
    return launches + owned_launches(problem, shape, lambda grid: _launch(kernel, problem, tile, grid))


def _bias_launches(problem: Problem, tile: Tile | None) -> list[Launch]:
    if problem.bias is None or not problem.bias_gradient or 0 in problem.bias:
        return []
    assert tile is not None
    batch, heads, rows, columns = (1,) * (4 - len(problem.bias)) + problem.bias
    blocks = -(-rows // tile.rows) * -(-columns // tile.step)
    return [of_bias(problem, _launch(f"{_backward(problem)}_bias", problem, tile, (blocks, heads, batch)))]


def _launch(kernel: str, problem: Problem, tile: Tile, grid: tuple[int, int, int]) -> Launch:
    constants = known_constants(f"mma/{kernel}", _constants(kernel, problem, tile))
    return Launch(f"mma/{kernel}", constants, grid, tile.threads, _shared_bytes(kernel, problem, tile))


def _constants(kernel: str, problem: Problem, tile: Tile) -> dict[str, Constant]:
    """Return the constants of a kernel."""
    by_key = _owns_keys(kernel)
    return fragment_constants(problem) | {
        "THREADS": tile.threads,
        "BLOCK_Q": tile.step if by_key else tile.rows,
        "BLOCK_KV": tile.rows if by_key else tile.step,
        "COLUMN_WARPS": tile.column_warps,
        "STAGES": tile.stages,
        "Q_IN_REGISTERS": tile.q_in_registers,
        "LSE2": True,
        "ADD_DQ": tile.add_dq,
        "LATENT": kernel == latent.FORWARD,
    }


def _legal_tiles(kernel: str, problem: Problem, device: Device, *, add_dq: bool = False) -> list[Tile]:
    """Return the legal tiles of a kernel.

    Inefficient shapes (column warps, which recompute scores; blocks of few warps; steps of 16) are candidates only if
    no other shape is legal.
    """
    for column_warps in (1, 2, 4):
        for shapes, all_steps in SHAPES if problem.selected is None else SHAPES_OF_LISTS:
            for steps in all_steps:
                legal = [
                    tile
                    for row_warps, m in shapes
                    if row_warps * column_warps <= 8
                    for step in steps
                    if problem.selected is None or step <= 32 * row_warps * column_warps
                    for shape in (Tile(16 * m * row_warps, step, 32 * row_warps * column_warps, column_warps, 1),)
                    if (tile := _legal(kernel, problem, device, shape._replace(add_dq=add_dq)))
                ]
                if legal:
                    return legal
    return []


def _latent_tiles(problem: Problem, device: Device) -> list[Tile]:
    """Return the legal tile of a forward of values inside keys that has the most rows, in a list."""
    stage_counts = (1,) if device.arch == "sm_75" else (2, 3, 4)
    for rows, threads, in_registers in latent.shapes(problem, device.arch):
        shape = Tile(rows, latent.KEYS, threads, 1, 1, in_registers)
        stages = [n for n in stage_counts if _fits(latent.FORWARD, problem, device, shape, n)]
        if stages:
            return [shape._replace(stages=stages[-1])]
    return []


def _sharing_tiles(problem: Problem, device: Device) -> list[Tile]:
    """Return the legal tiles of a backward whose warps share their scores, which reads less shared memory.

    Where mma.sync has half of the rate, tensor cores take longer than any reads of shared memory. The kernel does not
    add the gradient of values that are inside the keys.
    """
    if device.arch in MULTIPLY_ADDS or problem.shared_kv:
        return []
    shapes = (Tile(128, step, 256, 2, 1, add_dq=True, shares_scores=True) for step in (64, 128))
    return [tile for shape in shapes if (tile := _legal("backward", problem, device, shape))]


def _legal(kernel: str, problem: Problem, device: Device, shape: Tile) -> Tile | None:
    """Complete a shape: Q in registers if it fits, then the most stages that do not lower occupancy; None if illegal.

    Two or more stages are preferred to one even at lower occupancy.
    """
    limit = LIVE[_dense(kernel)]
    hides = problem.dense_mask is not None or problem.mask_mod
    if problem.mods and _dense(kernel) == "forward":
        limit -= LIVE_OF_MODS
    elif problem.is_modified or problem.dropout or kernel == "backward" and hides:
        limit -= LIVE_IN_OPTIONS
    limit -= LIVE_WITH_CACHE if problem.cache is not None else 0
    limit -= LIVE_OF_MODS_WITH_CACHE if problem.cache is not None and problem.mods else 0
    limit -= LIVE_OF_LISTS if problem.selected is not None else 0
    if problem.cache is not None and problem.cache.scale_dtype is not None:
        limit -= LIVE_WITH_SCALES
        if shape.threads < 2 * shape.step:
            return None  # each scale is loaded by a thread of its own
    if reads_at_scores(problem):
        limit -= 2 * max(_scores(shape) - FREE_READS, 0)
    if kernel == "jvp" and ("v" not in problem.tangents or device.arch in BLACKWELL):
        limit -= LIVE_OF_JVP
    limit -= LIVE_ON_TURING if device.arch == "sm_75" else 0
    if _dense(kernel) == "forward" and _live(kernel, problem, shape._replace(q_in_registers=True)) <= limit:
        shape = shape._replace(q_in_registers=True)
    if _live(kernel, problem, shape) > limit:
        return None
    # sm_75 has no cp.async. With synchronous loads more stages would only save a barrier.
    single = device.arch == "sm_75" or kernel.endswith("_bias") or problem.weights != ""
    single |= problem.selected is not None and problem.backward
    stage_counts = (1,) if single else (1, 2, 3) if _dense(kernel) == "forward" else (1, 2)
    legal = [shape._replace(stages=n) for n in stage_counts if _fits(kernel, problem, device, shape, n)]

    def preferred(tile: Tile) -> tuple[bool, int, int]:
        return tile.stages > 1, _resident(kernel, problem, device, tile), tile.stages

    return max(legal, key=preferred, default=None)


def _fits(kernel: str, problem: Problem, device: Device, shape: Tile, stages: int) -> bool:
    """Return whether a tile with a number of stages fits shared memory."""
    tile = shape._replace(stages=stages)
    return _shared_bytes(kernel, problem, tile) + _static_bytes(problem, tile) <= device.shared_bytes


def _padded(problem: Problem, column_warps: int) -> tuple[int, int]:
    """Return (D, Dv) rounded up to whole 16-column fragments per column warp, as `padded` in mma/tile.cuh."""
    k, v = (-(-dim // (16 * column_warps)) * 16 * column_warps for dim in (problem.head_dim, problem.head_dim_v))
    return k, v


def _fragment_rows(tile: Tile) -> int:
    """Return the number of 16-row fragments of a warp."""
    return tile.rows * 32 * tile.column_warps // (16 * tile.threads)


def _scores(tile: Tile) -> int:
    """Return the number of scores of a thread."""
    return _fragment_rows(tile) * tile.step // 2 * tile.score_warps // tile.column_warps


def _live(kernel: str, problem: Problem, tile: Tile) -> int:
    """Return the registers per thread that hold score tiles, accumulators and Q."""
    if kernel == latent.FORWARD:
        return sum(latent.live(problem, tile.rows)[: 2 + tile.q_in_registers])
    m = _fragment_rows(tile)
    k, v = _padded(problem, tile.column_warps)
    # fp32 score tiles live at once: S; S + dP + their packed halves, unless they share these in memory; plus the dbias
    # accumulator. JVP: S and tS, and their packed halves. Double backward: S, tS, dP and dtP.
    copies = {
        "forward": 1, "jvp": 3, "backward": 2, "backward_q": 2.25, "backward_kv": 2.25, "backward_bias": 3.25,
        "second_q": 4.25, "second_kv": 4.25, "second_bias": 5.25, "attention_weights": 2, "top_weights": 1,
        "key_importance": 1,
    }[_dense(kernel)]  # fmt: skip
    columns = {
        "forward": v, "jvp": 2 * v, "backward": k + v, "backward_q": k, "backward_kv": k + v, "second_q": k,
        "second_kv": k + v,
    }.get(_dense(kernel), 0)  # fmt: skip
    q = m * (k // 4 if tile.q_in_registers else 4)
    return int(copies * _scores(tile)) + m * columns // (2 * tile.column_warps) + q


@lru_cache(maxsize=1024)
def _shared_bytes(kernel: str, problem: Problem, tile: Tile) -> int:
    """Return the bytes of dynamic shared memory of a kernel."""
    return shared_bytes(f"mma/{kernel}", _constants(kernel, problem, tile))


def _static_bytes(problem: Problem, tile: Tile) -> int:
    """Return the bytes of static shared memory of a kernel whose blocks own `tile.rows` rows."""
    if problem.selected is not None:
        from . import selected

        return selected.list_bytes(problem, (max(tile.rows, tile.step),) * 2, tile.stages)
    return static_bytes(problem, tile.step)


def _resident(kernel: str, problem: Problem, device: Device, tile: Tile) -> int:
    """Return the occupancy in resident blocks per SM."""
    shared = _shared_bytes(kernel, problem, tile) + _static_bytes(problem, tile)
    registers = min(255, _live(kernel, problem, tile) + 90)
    return max(1, min((device.shared_bytes + RESERVED) // (shared + RESERVED), REGISTERS // (registers * tile.threads)))


def _with_conversion(problem: Problem, tile: Tile, clocks: tuple[float, ...]) -> tuple[float, ...]:
    """Return the clocks of a step of a forward on codes: fewer bytes are loaded, and converted in shared memory."""
    assert problem.cache is not None
    products, shared, issued, loaded = clocks
    numbers = tile.step * (problem.head_dim + problem.head_dim_v)
    codes = numbers * problem.cache.dtype.itemsize // problem.cache.codes
    shared += 2 * codes / SHARED_BYTES  # the codes are written and read instead of numbers, which are written too
    issued += conversions(problem, tile.step) / INSTRUCTIONS
    return products, shared, issued, codes / CACHE_BYTES


def conversions(problem: Problem, keys: int) -> float:
    """Return the instructions of a warp that convert a tile of codes with scales per key; 0 without them."""
    if problem.cache is None or problem.cache.scale_dtype is None:
        return 0.0
    pairs = keys * (problem.head_dim + problem.head_dim_v) / 2
    return pairs / 32 * INSTRUCTIONS_OF_PAIR[problem.dtype.name][problem.cache.dtype.name]


def _seconds(kernel: str, problem: Problem, device: Device, tile: Tile, heads: int, length: int, pairs: int) -> float:
    """Return predicted seconds of one kernel. Resident blocks share an SM; a warp uses one of its units at a time."""
    dense = _dense(kernel)
    k, v = _padded(problem, tile.column_warps)
    v = 0 if problem.weights else v
    scores, sums = {
        "forward": (k, v), "jvp": (3 * k, 3 * v), "backward": (k + v, k + v), "backward_q": (k + v, k),
        "backward_kv": (k + v, k + v), "second_q": (3 * k + 2 * v, 2 * k), "second_kv": (3 * k + 2 * v, 2 * k + v),
    }.get(dense, (k, 0))  # fmt: skip
    row_warps = tile.threads // 32 // tile.column_warps
    loaded = 2 * tile.step * (k + v) * (2 if problem.derivative else 1)
    read = 2 * tile.step * row_warps * (scores * tile.score_warps + sums) + (
        0 if tile.q_in_registers else 2 * tile.rows * scores * tile.column_warps
    )
    if kernel == latent.FORWARD:
        loaded, read = 2 * tile.step * k, latent.read_bytes(tile.rows, (k, v), q_in_registers=tile.q_in_registers)
    elements = tile.rows * tile.step
    vectors = device.arch in VECTOR_ADDITION
    added = 4 * tile.step * k if tile.add_dq else 0
    if kernel == "selected_backward_add":
        added, vectors = 4 * tile.rows * (k + v), False
    if tile.add_dq:  # dQ += dS K also loads dS and K from shared memory
        sums += k
        if tile.shares_scores:  # 32 queries a warp; P and dS are written once, and read by all column warps
            queries = tile.step // 32
            read += 2 * elements * (tile.threads // 32 // queries + 2 + 2 * tile.column_warps)
            read += 2 * tile.rows * k * queries
        else:
            read += 2 * elements + 2 * elements * k // 32 * 2
    dims = scores * tile.score_warps + sums  # multiply-adds per score, over all warps that compute it
    issued = elements * tile.score_warps / 32 * INSTRUCTIONS_OF_SCORE[dense] + elements * dims / 2048 + read / 512
    issued += tile.threads / 32 * INSTRUCTIONS_OF_STEP[dense] + added / (512 if vectors else 128)
    clocks: tuple[float, ...] = (  # clocks of one mainloop step of one block, for each resource
        elements * dims / MULTIPLY_ADDS.get(device.arch, MULTIPLY_ADDS_OF_SERVERS),
        (read + loaded) / SHARED_BYTES,
        issued / INSTRUCTIONS,
        loaded / CACHE_BYTES + added / (ADDED_BYTES if vectors else ADDED_BYTES_OF_SINGLES),
    )
    if problem.cache is not None and problem.cache.scale_dtype is not None:
        clocks = _with_conversion(problem, tile, clocks)
    blocks = max(heads * -(-length // tile.rows), 1)
    resident = min(_resident(kernel, problem, device, tile), -(-blocks // device.units))
    together = max(resident * max(clocks), sum(clocks) * 128 / tile.threads)
    together += LATENCY if tile.stages == 1 else max(0, LATENCY - (tile.stages - 1) * together)
    visited = problem.mask.visited(pairs / max(length, 1), tile.rows, tile.step)
    waves = -(-blocks // (device.units * resident))
    return waves * -(-visited // tile.step) * together / CLOCK
