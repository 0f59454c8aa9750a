"""The engine on tensor cores through mma.sync: fp16 from Turing (sm_75), bf16 from Ampere (sm_80)."""

from __future__ import annotations

from typing import NamedTuple

from ..device import Device
from ..launch import Constant, Launch
from ..params import Workspace
from ..problem import Problem
from .fragments import backward_workspaces, fragment_backward, fragment_constants, fragment_refusals, is_modified
from .shared import grid_refusals, known_constants, nonempty, sequences

BACKENDS: tuple[str, ...] = ("cuda", "simulator")
MEASURED: str | None = None

LARGEST = 512  # head dimension
# Numbers of one thread that live through a step, sums and fragments: the rest of 255 registers holds operands and
# addresses. Up to here the static gate finds no spill (bench/results/static.json).
LIVE = {"forward": 164, "backward_q": 168, "backward_kv": 168, "backward_bias": 112}
LIVE_IN_OPTIONS = 20  # fewer where scores take a pass of their own or dropout draws bits
LIVE_ON_TURING = 20  # and where products are of half the depth
# Where a block can add four numbers to global memory at once, dQ may be added up by the blocks of dK and dV.
VECTOR_ADDITION = ("sm_90", "sm_90a", "sm_100", "sm_120", "sm_121")

# What the cost is made of, of one multiprocessor and clock. Nothing here was measured on a GPU by this project yet.
MULTIPLY_ADDS = {"sm_75": 512, "sm_86": 512, "sm_87": 512, "sm_89": 512, "sm_120": 512, "sm_121": 512}  # mma.sync
MULTIPLY_ADDS_OF_SERVERS = 1024  # sm_80; sm_90 and sm_100 reach half of their peak or less through mma.sync
SHARED_BYTES = 128
CACHE_BYTES = 32  # from the second-level cache
ADDED_BYTES = 16  # to global memory
INSTRUCTIONS = 4  # of 32 lanes
# Instructions beside products and their loads, as the disassembler counts them (python -m bench static): of a thread
# for a score, and of a warp for a step.
INSTRUCTIONS_OF_SCORE = {"forward": 4.6, "backward_q": 4.5, "backward_kv": 5}
INSTRUCTIONS_OF_STEP = {"forward": 80, "backward_q": 120, "backward_kv": 200}
LATENCY = 600  # clocks until what is loaded is there
CLOCK = 1.5e9
REGISTERS = 65536
RESERVED = 1024  # bytes of shared memory of every block that are CUDA's


class Tile(NamedTuple):
    """Of one kernel: `rows` of its own axis in a block, `step` of the other at a time. Warps stand in rows; in a row
    they split the columns of what they accumulate, and each computes the scores for itself."""

    rows: int
    step: int
    threads: int
    column_warps: int
    stages: int
    q_in_registers: bool = False
    add_dq: bool = False


class Tiles(NamedTuple):
    """Of the kernel over tiles of queries: a forward's, or a backward's for dQ; and of that over tiles of keys, for dK
    and dV. There is no kernel for dQ where that for dK and dV adds it up."""

    block_q: int
    block_kv: int
    of_q: Tile | None
    of_kv: Tile | None


def refusals(problem: Problem, device: Device) -> list[str]:
    reasons = grid_refusals(problem) + fragment_refusals(problem)
    dtype = problem.dtype.name
    if dtype not in ("float16", "bfloat16"):
        reasons.append(f"{dtype} is not float16 or bfloat16, which tensor cores multiply exactly")
    elif dtype == "bfloat16" and device.arch == "sm_75":
        reasons.append("the tensor cores of sm_75 multiply float16, not bfloat16")
    largest = max(problem.head_dim, problem.head_dim_v)
    if largest > LARGEST:
        reasons.append(f"head dimension {largest} is larger than {LARGEST}")
    elif device.backend in BACKENDS and not tiles(problem, device):
        reasons.append(f"no tile of head dimension {largest} fits the {device.shared_bytes} bytes of shared memory")
    return reasons


def tiles(problem: Problem, device: Device) -> list[Tiles]:
    """Tiles whose kernels fit into shared memory and registers."""
    if not problem.backward:
        return [Tiles(tile.rows, tile.step, tile, None) for tile in legal_tiles("forward", problem, device)]
    if problem.bias is not None and not legal_tiles("backward_bias", problem, device):
        return []
    found = [
        Tiles(q.rows, kv.rows, q, kv)
        for q in legal_tiles("backward_q", problem, device)
        for kv in legal_tiles("backward_kv", problem, device)
    ]
    if device.arch in VECTOR_ADDITION and not problem.deterministic:
        found += [Tiles(kv.step, kv.rows, None, kv) for kv in legal_tiles("backward_kv", problem, device, add_dq=True)]
    return found


def alike(tile: Tiles) -> object:
    return tile


def seconds(problem: Problem, pairs: int, device: Device, tile: Tiles) -> float:
    """Waves of blocks by the time of one, for each kernel of tiles."""
    heads, kv_heads = problem.batch * problem.heads, problem.batch * problem.kv_heads
    total = 0.0
    if tile.of_q is not None:
        kernel = "backward_q" if problem.backward else "forward"
        total += _seconds(kernel, problem, device, tile.of_q, heads, problem.q_len, pairs)
    if tile.of_kv is not None:
        group_pairs = pairs * (problem.heads // problem.kv_heads)
        total += _seconds("backward_kv", problem, device, tile.of_kv, kv_heads, problem.kv_len, group_pairs)
    return total


def threads(device: Device, tile: Tiles, cost: float) -> int:
    its = tile.of_q or tile.of_kv
    assert its is not None
    return its.threads


def workspaces(problem: Problem, tile: Tiles, q_rows: int, kv_rows: int) -> tuple[Workspace, ...]:
    return backward_workspaces(problem, q_rows, add_dq=tile.of_q is None) if problem.backward else ()


def launches(problem: Problem, device: Device, tile: Tiles) -> tuple[Launch, ...]:
    def q_grid(its: Tile) -> tuple[int, int, int]:
        return max(-(-problem.q_len // its.rows), 1), problem.heads, sequences(problem)

    of_q, of_kv = tile.of_q, tile.of_kv
    if of_kv is None:
        assert of_q is not None
        return nonempty([_launch("mma/forward", problem, of_q, q_grid(of_q))])
    kv_grid = max(-(-problem.kv_len // of_kv.rows), 1), problem.kv_heads, sequences(problem)
    backward = [_launch("mma/backward_kv", problem, of_kv, kv_grid)]
    if of_q is not None:
        backward.append(_launch("mma/backward_q", problem, of_q, q_grid(of_q)))
    return fragment_backward(problem, backward + bias_launches(problem, device), add_dq=of_kv.add_dq)


def bias_launches(problem: Problem, device: Device) -> list[Launch]:
    """The kernel of the bias's gradient, for every engine that keeps scores in fragments."""
    if problem.bias is None or not problem.bias_gradient or 0 in problem.bias:
        return []
    batch, heads, rows, columns = (1,) * (4 - len(problem.bias)) + problem.bias
    its = legal_tiles("backward_bias", problem, device)[0]
    of_rows_and_columns = -(-rows // its.rows) * -(-columns // its.step)
    return [_launch("mma/backward_bias", problem, its, (of_rows_and_columns, heads, batch))]


def _launch(kernel: str, problem: Problem, tile: Tile, grid: tuple[int, int, int]) -> Launch:
    by_key = kernel == "mma/backward_kv"
    constants: dict[str, Constant] = fragment_constants(problem) | {
        "THREADS": tile.threads,
        "BLOCK_Q": tile.step if by_key else tile.rows,
        "BLOCK_KV": tile.rows if by_key else tile.step,
        "COLUMN_WARPS": tile.column_warps,
        "STAGES": tile.stages,
        "Q_IN_REGISTERS": tile.q_in_registers,
        "LSE2": True,
        "ADD_DQ": tile.add_dq,
    }
    name = kernel.removeprefix("mma/")
    shared = _shared_bytes(name, problem, tile) if name in LIVE else 0
    return Launch(kernel, known_constants(kernel, constants), grid, tile.threads, shared)


def legal_tiles(kernel: str, problem: Problem, device: Device, *, add_dq: bool = False) -> list[Tile]:
    """Every legal tile of a kernel. What costs more than it gives is a candidate only where nothing else is legal:
    warps that compute the same scores, blocks of few warps, steps of 16."""
    for column_warps in (1, 2, 4):
        for shapes in (((4, 1), (4, 2), (8, 1)), ((2, 1),), ((1, 1),)):  # rows of warps, rows of fragments of each
            for steps in ((32, 64, 128), (16,)):
                found = [
                    tile
                    for row_warps, m in shapes
                    if row_warps * column_warps <= 8
                    for step in steps
                    for shape in (Tile(16 * m * row_warps, step, 32 * row_warps * column_warps, column_warps, 1),)
                    if (tile := _legal(kernel, problem, device, shape._replace(add_dq=add_dq)))
                ]
                if found:
                    return found
    return []


def _legal(kernel: str, problem: Problem, device: Device, shape: Tile) -> Tile | None:
    """With Q in registers if it fits, and the longest pipeline that leaves as many blocks side by side."""
    limit = LIVE[kernel]
    limit -= LIVE_IN_OPTIONS if is_modified(problem) or problem.dropout else 0
    limit -= LIVE_ON_TURING if device.arch == "sm_75" else 0
    if kernel == "forward" and _live(kernel, problem, shape._replace(q_in_registers=True)) <= limit:
        shape = shape._replace(q_in_registers=True)
    if _live(kernel, problem, shape) > limit:
        return None
    # Turing's copies wait for themselves: a pipeline only spares it a barrier.
    single = device.arch == "sm_75" or kernel == "backward_bias"
    lengths = (1,) if single else (1, 2, 3) if kernel == "forward" else (1, 2)
    legal = [
        tile
        for stages in lengths
        for tile in (shape._replace(stages=stages),)
        if _shared_bytes(kernel, problem, tile) <= device.shared_bytes
    ]

    def preferred(tile: Tile) -> tuple[bool, int, int]:
        return tile.stages > 1, _resident(kernel, problem, device, tile), tile.stages

    return max(legal, key=preferred, default=None)


def _padded(problem: Problem, column_warps: int) -> tuple[int, int]:
    """Head dimensions in tiles: whole fragments for every warp. tile.cuh's `padded`."""
    k, v = (-(-dim // (16 * column_warps)) * 16 * column_warps for dim in (problem.head_dim, problem.head_dim_v))
    return k, v


def _live(kernel: str, problem: Problem, tile: Tile) -> int:
    """Registers of one thread that hold scores, their gradients, sums and Q."""
    m = tile.rows * 32 * tile.column_warps // (16 * tile.threads)
    k, v = _padded(problem, tile.column_warps)
    scores = m * tile.step // 2
    # Of S alone; of S and dP, rounded as they leave; and of the sums of dS.
    copies = {"forward": 1, "backward_q": 2.25, "backward_kv": 2.25, "backward_bias": 3.25}[kernel]
    columns = {"forward": v, "backward_q": k, "backward_kv": k + v, "backward_bias": 0}[kernel]
    q = m * (k // 4 if tile.q_in_registers else 4)
    return int(copies * scores) + m * columns // (2 * tile.column_warps) + q


def _shared_bytes(kernel: str, problem: Problem, tile: Tile) -> int:
    """Bytes of dynamic shared memory: the arrays at the head of each kernel."""
    k, v = _padded(problem, tile.column_warps)
    stage = 2 * tile.step * (k + v)
    if kernel == "forward":
        q = 2 * tile.rows * k
        return max(tile.stages * stage + (0 if tile.q_in_registers else q), q, 2 * tile.rows * v)
    operands = 2 * tile.rows * (k + v)
    if kernel == "backward_kv":
        dS = 2 * tile.rows * -(-tile.step // (16 * tile.column_warps)) * 16 * tile.column_warps
        return operands + tile.stages * (stage + 8 * tile.step) + (dS if tile.add_dq else 0)
    operands += 8 * tile.rows
    if kernel == "backward_bias":
        return max(operands + stage, 4 * tile.rows * (tile.step + 8))
    return operands + tile.stages * stage


def _resident(kernel: str, problem: Problem, device: Device, tile: Tile) -> int:
    """Blocks of one multiprocessor at a time."""
    shared = _shared_bytes(kernel, problem, tile)
    registers = min(255, _live(kernel, problem, tile) + 90)
    return max(1, min((device.shared_bytes + RESERVED) // (shared + RESERVED), REGISTERS // (registers * tile.threads)))


def _seconds(kernel: str, problem: Problem, device: Device, tile: Tile, heads: int, length: int, pairs: int) -> float:
    """Blocks side by side share what a multiprocessor has; a warp alone does one thing after the other."""
    k, v = _padded(problem, tile.column_warps)
    scores, sums = {"forward": (k, v), "backward_q": (k + v, k), "backward_kv": (k + v, k + v)}[kernel]
    row_warps = tile.threads // 32 // tile.column_warps
    loaded = 2 * tile.step * (k + v)
    read = 2 * tile.step * row_warps * (scores * tile.column_warps + sums) + (
        0 if tile.q_in_registers else 2 * tile.rows * scores * tile.column_warps
    )
    elements = tile.rows * tile.step
    if tile.add_dq:  # dS once more through shared memory, K beside it
        sums += k
        read += 2 * elements + 2 * elements * k // 32 * 2
    dims = scores * tile.column_warps + sums  # of the products of one score, in all warps of a row
    issued = elements * tile.column_warps / 32 * INSTRUCTIONS_OF_SCORE[kernel] + elements * dims / 2048 + read / 512
    issued += tile.threads / 32 * INSTRUCTIONS_OF_STEP[kernel]
    clocks = (  # of one step of one block, on each of what it uses
        elements * dims / MULTIPLY_ADDS.get(device.arch, MULTIPLY_ADDS_OF_SERVERS),
        (read + loaded) / SHARED_BYTES,
        issued / INSTRUCTIONS,
        loaded / CACHE_BYTES + (4 * tile.step * k / ADDED_BYTES if tile.add_dq else 0),
    )
    blocks = max(heads * -(-length // tile.rows), 1)
    resident = min(_resident(kernel, problem, device, tile), -(-blocks // device.units))
    together = max(resident * max(clocks), sum(clocks) * 128 / tile.threads)
    together += LATENCY if tile.stages == 1 else max(0, LATENCY - (tile.stages - 1) * together)
    visited = problem.mask.visited(pairs / max(length, 1), tile.rows, tile.step)
    waves = -(-blocks // (device.units * resident))
    return waves * -(-visited // tile.step) * together / CLOCK
