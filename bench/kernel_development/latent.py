"""Decodes of values inside keys (multi-head latent attention): bytes by the simulator, and speed by a model of SASS.

Marks: a tile of rows reads each key once, at most 1.10 times its 1152 bytes (D 576, 16 bit), for both products; .6 of
the peak of mma.sync, and of wgmma, at 128 heads, and .85 of the bandwidth of memory at 16 heads.

The model executes the kernel's mainloop (`cycles.py`) for the warps of an SM sub-partition: one of each group of a
block, which take turns, or one of each resident block. Unlike the model of wgmma it has HMMA, one after another; and
accesses to shared memory, which enter a queue of the SM's 128 bytes a clock. The form with a producer warp is wgmma's:
its two warpgroups take turns as in a ping-pong, and shared memory, which also takes the loads, may bind.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from cupy_flash.device import named
from cupy_flash.engines import mma_decode
from cupy_flash.engines.latent import MULTIPLY_ADDS_OF_WGMMA
from cupy_flash.engines.mma import MULTIPLY_ADDS, MULTIPLY_ADDS_OF_SERVERS
from cupy_flash.engines.mma_decode import MEMORY_BYTES, MEMORY_BYTES_OF_OTHERS
from cupy_flash.gpu import run_plan
from cupy_flash.jit import nvrtc
from cupy_flash.jit.source import assemble
from cupy_flash.plan.plan import plan
from cupy_flash.problem.build import pose_with_cache
from cupy_flash.problem.records import CacheOptions
from cupy_flash.simulator.counters import Counters
from cupy_flash.simulator.run import start

from ..report import Table
from . import cycles, sass
from .predict import step

D, DV, PAGE = 576, 512, 16
LENGTHS = 64, 128  # keys of the two calls whose difference is counted
CAPACITY = 65536
MARK, TENSOR_MARK, BANDWIDTH_MARK = 1.10, 0.6, 0.85
BYTES = {"LDS": 4, "STS": 4, "SHFL": 8, "LDSM": 16, "LDGSTS": 16}  # clocks of shared memory of the four sub-partitions
QUEUE = 48  # clocks of accesses that may wait for shared memory
LATENCY = {"HMMA": 33, "LSU": 20}


class Case(NamedTuple):
    """A decode step of one query with `heads` query heads of one key/value head, on an architecture."""

    arch: str
    heads: int
    form: str = ""  # of the kernel, which only a tune chooses


OF_WGMMA = "producer warp"
CASES = (
    *(Case(arch, heads) for arch in ("sm_80", "sm_90a", "sm_89") for heads in (16, 128)),
    Case("sm_90a", 128, OF_WGMMA),
)


class Count(NamedTuple):
    """The counts of a case, and what the model predicts."""

    case: Case
    tile: tuple[int, int, int]  # rows, keys, threads
    blocks: int  # resident on an SM
    bytes: float  # that a tile of rows reads for a key
    clocks: float  # of a tile of keys
    tensor: float  # share of the peak of mma.sync, or of wgmma
    bandwidth: float  # share of the bandwidth of memory


def count(case: Case) -> Count:
    """Simulate and compile the decode of a case."""
    gpu = named(case.arch)
    problem, _ = _posed(case.heads, LENGTHS[0])
    tile = next(x for x in (*mma_decode.tiles(problem, gpu), *mma_decode.choices(problem, gpu)) if x.form == case.form)
    read = [_bytes_read(case.arch, length, tile) for length in LENGTHS]
    launch = next(x for x in mma_decode.launches(problem, gpu, tile) if x.function.endswith("decode"))
    text = assemble(launch.kernel, dict(launch.constants), dict(launch.headers))
    loop = sass.mainloop(nvrtc.compile(text, launch.kernel, case.arch).code).steady
    blocks = tile.blocks // gpu.units
    if case.form == OF_WGMMA:
        peak, clocks = MULTIPLY_ADDS_OF_WGMMA, clocks_of_warpgroups(loop, tile.block_kv * 2 * D)
    else:
        peak = MULTIPLY_ADDS.get(case.arch, MULTIPLY_ADDS_OF_SERVERS)
        clocks = clocks_of_tile(loop, tile.threads // 128, blocks, 4 * 2048 // peak)
    tensor = tile.rows * tile.block_kv * (D + DV) / peak
    memory = tile.block_kv * 2 * D / MEMORY_BYTES.get(case.arch, MEMORY_BYTES_OF_OTHERS)
    tiles_of_rows = -(-case.heads // tile.rows)  # all but the first read the keys from L2
    return Count(
        case,
        (tile.rows, tile.block_kv, tile.threads),
        blocks,
        round((read[1] - read[0]) / (LENGTHS[1] - LENGTHS[0]), 1),
        round(clocks, 1),
        round(tensor / clocks, 3),
        round(memory / max(memory, tiles_of_rows * clocks), 3),
    )


def _posed(heads: int, length: int) -> Any:
    rng = np.random.default_rng(0)
    pages = LENGTHS[-1] // PAGE
    q = rng.standard_normal((1, 1, heads, D)).astype(np.float16)
    pool = rng.standard_normal((pages, PAGE, 1, D)).astype(np.float16)
    table = np.arange(pages, dtype=np.int32)[None]
    return pose_with_cache(
        q, pool, None,
        CacheOptions(cache_seqlens=np.array([length], np.int32), block_table=table, head_dim_v=DV, backend="simulator"),
    )  # fmt: skip


def _bytes_read(arch: str, length: int, tile: mma_decode.Tile) -> int:
    """Return the bytes of global memory that a block reads for one tile of rows and `length` keys."""
    problem, operands = _posed(tile.rows, length)
    counters: list[Counters] = []
    chosen = plan(problem, named(arch), tile._replace(blocks=1))
    run_plan.forward(chosen, operands, lambda work: counters.extend(start(work)))
    return counters[0].global_bytes_read


def clocks_of_tile(loop: Sequence[str], groups: int, blocks: int, product: int, iterations: int = 12) -> float:
    """Return the clocks of an SM for a tile of keys of one block; an HMMA takes `product` clocks."""
    code = [_decode(text, product) for text in loop]
    partition = _Groups(code, groups, blocks)
    clock = 0
    while min(warp.iterations for warp in partition.warps) < iterations - 1:
        partition.issue(clock, iterations)
        clock += 1
    first = iterations // 3
    each = ((warp.starts[-1] - warp.starts[first]) / (len(warp.starts) - 1 - first) for warp in partition.warps)
    return max(each) / blocks


def clocks_of_warpgroups(loop: Sequence[str], loaded_bytes: int) -> float:
    """Return the clocks of an SM for a tile, of `loaded_bytes`; each of two warpgroups takes turns at every other."""
    turn = step([*loop], 2, 2 * loaded_bytes)  # two tiles
    return max(turn.overlapping, *turn.resources.values()) / 2


class _Groups(cycles._SubPartition):
    """A sub-partition with a warp of each group of each resident block."""

    def __init__(self, code: list[cycles.Instruction], groups: int, blocks: int):
        super().__init__(code, groups * blocks, 0)
        if groups == 1:  # no other warp of this sub-partition waits at its barriers
            self.codes = [[each._replace(opcode="NOP") if each.opcode == "BAR" else each for each in code]] * blocks
            return
        # Group 0 loads the tiles; group 1 begins at the barrier between the turns.
        other = [each for each in code if each.opcode != "LDGSTS"]
        self.codes = [code, other] * blocks
        turn = [n for n, each in enumerate(other) if each.opcode == "BAR"][1]
        for warp in self.warps[1::2]:
            warp.position = turn

    def _starts(self, number: int, instruction: cycles.Instruction, clock: int) -> bool:
        if instruction.unit not in LATENCY:
            return super()._starts(number, instruction, clock)
        free = max(self.free.get(instruction.unit, 0), clock)
        if free - clock > (QUEUE if instruction.unit == "LSU" else 0):
            return False
        self.free[instruction.unit] = free + instruction.interval
        readable = free + LATENCY[instruction.unit] + (instruction.interval if instruction.unit == "LSU" else 0)
        self.warps[number].readable.update(dict.fromkeys(instruction.writes, readable))
        return True


def _decode(text: str, product: int) -> cycles.Instruction:
    """Decode an instruction, with all registers of wide operands."""
    each = cycles.decode(text)
    if each.opcode == "HMMA":
        d, a, b, c = (cycles.REGISTER.findall(x) for x in text.split("HMMA", 1)[1].split(",")[:4])
        reads = (*_registers(a, 4), *_registers(b, 2), *_registers(c, 4))
        return each._replace(unit="HMMA", interval=product, writes=_registers(d, 4), reads=reads)
    if each.opcode in BYTES:
        width = 4 if each.opcode == "LDSM" or ".128" in text else 1
        stores = 4 if each.opcode == "STS" and width == 4 else 1
        clocks = BYTES[each.opcode] * stores
        return each._replace(unit="LSU", interval=clocks, writes=_registers(each.writes, width))
    if each.opcode == "BAR" and not re.search(r" 0x0$", text.strip()):  # of the warps of a group
        return each._replace(opcode="NOP")
    return each


def _registers(first: Sequence[str], count: int) -> tuple[str, ...]:
    return tuple(f"R{int(name[1:]) + n}" if name.startswith("R") else name for name in first[:1] for n in range(count))


def record(counted: Count) -> dict[str, Any]:
    """Return the counts of a case as a row of a JSON file."""
    counts = counted._asdict()
    return counts.pop("case")._asdict() | counts


def table(rows: Sequence[dict[str, Any]]) -> Table:
    """Return the rows of a JSON file as a table."""
    return Table(
        f"Values inside keys, D {D}, Dv {DV}: bytes a key (of {2 * D}; mark {MARK}), and the model's shares of the "
        f"peak of the instruction (mark {TENSOR_MARK} at 128 heads) and of the bandwidth (mark {BANDWIDTH_MARK} at 16)",
        ["GPU", "heads", "instruction", "tile", "blocks", "bytes a key", "clocks a tile", "tensor cores", "bandwidth"],
        [
            [
                row["arch"],
                str(row["heads"]),
                "wgmma" if row["form"] else "mma.sync",
                " x ".join(map(str, row["tile"])),
                str(row["blocks"]),
                f"{row['bytes']:.0f}",
                f"{row['clocks']:.0f}",
                f"{row['tensor']:.2f}",
                f"{row['bandwidth']:.2f}",
            ]
            for row in rows
        ],
    )
