"""The static gate: what compiler, disassembler and simulator say of every kernel a plan may choose. No GPU is needed.

Compiled is every tile that plans choose at some length (`plan.launches_at_any_length`), of problems that stand for
all: small and large head dimensions, both accumulations, no option and every option at once. The gate is open when no
kernel spills registers and the compiler warns of nothing.
"""

from __future__ import annotations

import ctypes
import json
import multiprocessing
import re
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, fields
from functools import lru_cache
from typing import Any

import numpy as np

from cupy_flash import ahead, device, nvrtc
from cupy_flash.backends import kernels
from cupy_flash.backends.simulator.counters import Counters
from cupy_flash.backends.simulator.run import start
from cupy_flash.engines.wgmma import hopper
from cupy_flash.launch import Launch
from cupy_flash.plan import Plan, plan
from cupy_flash.pose import pose
from cupy_flash.problem import Operands, Options, Saved
from cupy_flash.source import assemble

from . import sass
from .report import NOTHING, Table
from .run import Progress

ARCHS = ("sm_75", "sm_80", "sm_90a")
STEP_ARCHS = ("sm_80", hopper.ARCH)  # whose tile steps are counted; on the second those of its own instructions
EVERY_ARCH = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_90a", "sm_100", "sm_120")
EVERY_OPTION: dict[str, Any] = dict(
    causal=True, window=(48, 48), softcap=30.0, alibi_slopes=True, bias=True, mask=True, sink=True,
    q_lengths=True, kv_lengths=True, dropout=0.1, return_lse=True,
)  # fmt: skip
PROBLEMS: dict[str, dict[str, Any]] = {
    "fp32 D 64": dict(dtype="float32", head_dim=64),
    "fp32 D 128": dict(dtype="float32", head_dim=128),
    "fp32 D 256": dict(dtype="float32", head_dim=256),
    "fp64 D 64": dict(dtype="float64", head_dim=64),
    "bf16 D 64": dict(dtype="bfloat16", head_dim=64, engine="simt"),
    "bf16 D 64 all options": dict(dtype="bfloat16", head_dim=64, engine="simt") | EVERY_OPTION,
    "fp64 D 64 all options": dict(dtype="float64", head_dim=64) | EVERY_OPTION,
    # Tensor cores; bf16 differs in two instructions, which Turing does not have.
    "fp16 D 64": dict(dtype="float16", head_dim=64, engine="mma"),
    "fp16 D 96": dict(dtype="float16", head_dim=96, engine="mma"),
    "fp16 D 128": dict(dtype="float16", head_dim=128, engine="mma"),
    "fp16 D 192/128": dict(dtype="float16", head_dim=192, head_dim_v=128, engine="mma"),
    "fp16 D 256": dict(dtype="float16", head_dim=256, engine="mma"),
    "fp16 D 64 all options": dict(dtype="float16", head_dim=64, engine="mma") | EVERY_OPTION,
    "fp16 D 128 all options": dict(dtype="float16", head_dim=128, engine="mma") | EVERY_OPTION,
    # Hopper's own instructions.
    **{
        f"Hopper {name}": words | dict(engine="wgmma")
        for name, words in {
            "fp16 D 64": dict(dtype="float16", head_dim=64),
            "fp16 D 96": dict(dtype="float16", head_dim=96),
            "bf16 D 128": dict(dtype="bfloat16", head_dim=128),
            "fp16 D 192/128": dict(dtype="float16", head_dim=192, head_dim_v=128),
            "fp16 D 256": dict(dtype="float16", head_dim=256),
            "fp16 D 64 all options": dict(dtype="float16", head_dim=64) | EVERY_OPTION,
            "fp16 D 128 all options": dict(dtype="float16", head_dim=128) | EVERY_OPTION,
        }.items()
    },
}
# Where registers are scarcest: what --all compiles, which is for every architecture and more than one compiler.
SCARCE = (
    "fp32 D 64", "fp32 D 128", "fp64 D 64", "bf16 D 64 all options", "fp16 D 96", "fp16 D 128", "fp16 D 64 all options",
    "Hopper fp16 D 64", "Hopper bf16 D 128", "Hopper fp16 D 256", "Hopper fp16 D 128 all options",
)  # fmt: skip
STEP_LENGTH, STEP_HEADS = 4096, 64  # of the problem whose tiles are counted
NOT_OPTIONS = ("dtype", "head_dim", "head_dim_v", "backward")  # words of a problem that a call has not
TILE_CONSTANTS = (
    "THREADS",
    "BLOCK_Q",
    "BLOCK_KV",
    "COLUMN_WARPS",
    "STAGES",
    "Q_IN_REGISTERS",
    "ADD_DQ",
    "SHARES",
    "DQ_IN_BULK",
)
LIMIT = 1.10  # bytes moved over the least that the tiles need


@dataclass(frozen=True)
class Kernel:
    """One kernel compiled for one GPU by one compiler."""

    problem: str
    kernel: str
    tile: tuple[int, int, int] | None  # queries, keys, threads of a block
    arch: str
    compiler: str
    registers: int
    spills: int  # bytes stored and loaded
    shared_bytes: int
    cubin_bytes: int
    seconds: float
    warnings: tuple[str, ...]


@dataclass(frozen=True)
class Step:
    """What the simulator counts of one kernel and tile: a tile step, and a small launch as a whole."""

    problem: str
    kernel: str
    tile: tuple[int, int, int]
    per_score: dict[str, float]  # instructions of a thread by class, for one score
    bank_conflicts: int  # wavefronts beyond the least, of the launch
    bytes_over_least: float | None  # of the launch, global memory; None where options add arrays of their own
    sass: dict[str, float] | None  # instructions of the steady loop by class, for one score; None without products


def compile_all(
    problems: Iterable[str], archs: Iterable[str], libraries: Sequence[str | None], jobs: int, progress: Progress
) -> list[Kernel]:
    """Every kernel of the problems for every architecture by every compiler: paths of libnvrtc, None the one found."""
    tasks = [(name, arch) for name in problems for arch in archs if is_served(name, arch)]
    found: list[Kernel] = []
    context = multiprocessing.get_context("spawn")
    for library in libraries:
        # A process keeps the compiler that it has loaded.
        with ProcessPoolExecutor(jobs, mp_context=context, initializer=_use, initargs=(library,)) as pool:
            for (name, arch), kernels_of_task in zip(tasks, pool.map(_compile, *zip(*tasks, strict=True)), strict=True):
                progress(f"{name}, {arch}")
                found += kernels_of_task
    return found


def step_arch(name: str) -> str:
    """Where the tile steps of a problem are counted."""
    return STEP_ARCHS[PROBLEMS[name].get("engine") == "wgmma"]


def is_served(name: str, arch: str) -> bool:
    """Whether the engine that a problem asks for runs on an architecture."""
    return step_arch(name) != hopper.ARCH or arch == hopper.ARCH


def _use(library: str | None) -> None:
    """Makes this process compile with the libnvrtc of a path."""
    if library is not None:
        nvrtc.library = lru_cache(lambda: ctypes.CDLL(library))


def _compile(name: str, arch: str) -> list[Kernel]:
    on = device.named(arch, "cuda")
    return [_compile_launch(name, launch, arch) for launch in ahead.launches(on, **PROBLEMS[name])]


def _compile_launch(name: str, launch: Launch, arch: str) -> Kernel:
    text = assemble(launch.kernel, dict(launch.constants))
    begin = time.perf_counter()
    result = nvrtc.compile(text, launch.kernel, arch)
    seconds = time.perf_counter() - begin
    took = result.resources[launch.function]
    spills = took.spill_stores + took.spill_loads
    return Kernel(
        name, launch.kernel, launch.tile, arch, _release(), took.registers, spills,
        took.smem + launch.shared_bytes, len(result.code), round(seconds, 3), result.warnings,
    )  # fmt: skip


def _release() -> str:
    """13.5.37 of the text in which the compiler names itself."""
    found = re.search(r"V([\d.]+)", nvrtc.identity())
    return found[1] if found else ".".join(map(str, nvrtc.version()))


def count_steps(problems: Iterable[str], arch: str, progress: Progress) -> list[Step]:
    """The tile steps of the tiles that plans choose on `arch` for a long problem of each kind, on the simulator."""
    found = []
    for name in problems:
        if step_arch(name) != arch:
            continue
        progress(name)
        for backward in (False, True)[: 1 + PROBLEMS[name].get("backward", True)]:
            for launch in _chosen(PROBLEMS[name], backward, arch):
                if launch.function in ("forward", "backward", "backward_q", "backward_kv"):
                    found.append(_count(name, launch, backward, arch))
    return found


def _chosen(words: dict[str, Any], backward: bool, arch: str) -> tuple[Launch, ...]:
    """The launches of the plan of a long problem."""
    (problem,) = {
        problem._replace(q_len=STEP_LENGTH, kv_len=STEP_LENGTH, heads=STEP_HEADS, kv_heads=STEP_HEADS)
        for problem in ahead.problems(**words)
        if problem.backward == backward and not problem.dlse
    }
    return plan(problem, device.named(arch, "cuda")).launches


def _count(name: str, launch: Launch, backward: bool, arch: str) -> Step:
    """A launch of 2 x 2 tiles, and what one more tile adds: of keys, or for the kernel whose blocks are keys, of
    queries."""
    words, tile = PROBLEMS[name], launch.tile
    assert tile is not None
    block_q, block_kv, threads = tile
    by_key = launch.function in ("backward_kv", "backward")
    base, longer = (
        _run(words, launch, backward, arch, ((2 + more * by_key) * block_q, (2 + more * (not by_key)) * block_kv))
        for more in (0, 1)
    )
    added = {key: longer.by_class()[key] - base.by_class().get(key, 0) for key in longer.by_class()}
    scores = 2 * block_q * block_kv
    per_score = {key: 32 * count / scores for key, count in added.items()}
    # Lanes that read one address cost one; of a sector that several instructions share each counts its part. Boxes have
    # nothing in common.
    moved = sum(min(32 * access.sectors, access.bytes) for access in base.global_.values())
    if launch.boxes:
        moved = base.global_bytes_read + base.global_bytes_written
    least = None if "mask" in words else _least_bytes(launch.function, words, block_q, block_kv)
    over = None if least is None else moved / least
    return Step(name, launch.kernel, tile, per_score, base.bank_conflicts, over, _sass(launch, arch))


def _sass(launch: Launch, arch: str) -> dict[str, float] | None:
    tile = launch.tile
    if tile is None or not launch.kernel.startswith(("mma/", "wgmma/")):
        return None
    text = assemble(launch.kernel, dict(launch.constants))
    block_q, block_kv, threads = tile
    if launch.kernel.startswith("wgmma/"):
        threads -= 128  # of the warpgroup that computes nothing
    executed = sass.steady_loop(nvrtc.compile(text, launch.kernel, arch).code)
    return {name: count * threads / (block_q * block_kv) for name, count in executed.items()}


def _least_bytes(function: str, words: dict[str, Any], block_q: int, block_kv: int) -> int:
    """Of a launch of 2 x 2 tiles: what a block keeps once, what it visits once for every block."""
    dtype = np.dtype("uint16" if words["dtype"] == "bfloat16" else words["dtype"])
    k, v = (dtype.itemsize * words.get(name, words["head_dim"]) for name in ("head_dim", "head_dim_v"))
    number = max(dtype.itemsize, 4)  # of lse and delta
    queries, keys = 2 * block_q, 2 * block_kv
    if function == "forward":  # Q, O, lse; K and V
        return queries * (k + v + number) + 2 * keys * (k + v)
    of_queries = queries * (k + v + 2 * number)  # Q, dO, lse, delta
    if function == "backward_q":
        return of_queries + queries * k + 2 * keys * (k + v)
    if function == "backward":  # and every block adds to dQ
        of_queries += queries * 4 * -(-words["head_dim"] // 16) * 16
    return 2 * keys * (k + v) + 2 * of_queries  # K, V, dK, dV


def _run(words: dict[str, Any], launch: Launch, backward: bool, arch: str, lengths: tuple[int, int]) -> Counters:
    """The counters of a kernel on so many queries and keys, of one head."""
    options = {key: value for key, value in words.items() if key not in NOT_OPTIONS}
    (q_len, kv_len), dim = lengths, words["head_dim"]
    rng = np.random.default_rng(0)
    element = ahead.element_dtype(words["dtype"])

    def array(rows: int, dim: int) -> Any:
        return rng.standard_normal((1, rows, 1, dim)).astype(element)

    dim_v = words.get("head_dim_v", dim)
    arrays = array(q_len, dim), array(kv_len, dim), array(kv_len, dim_v)
    if "mask" in options:  # every option: as arrays, and nothing hidden but by the mask
        options |= dict(
            alibi_slopes=np.ones(1, np.float32), bias=np.zeros((q_len, kv_len), element),
            mask=np.ones((q_len, kv_len), bool), sink=np.zeros(1, element), seed=1,
            q_lengths=np.array([q_len], np.int32), kv_lengths=np.array([kv_len], np.int32),
            causal=False, window=None,
        )  # fmt: skip
    counted: dict[str, Counters] = {}

    def counting(work: kernels.Work) -> None:
        counted.update(zip((each.kernel for each in work.launches), start(work), strict=True))

    def planned(saved: Saved | None) -> tuple[Plan, Operands]:
        problem, operands = pose("static", arrays, Options(**options, backend="simulator"), None, saved)
        chosen = plan(problem, device.named(arch))
        # This kernel with the tile it is counted with, for the constants of the problem that is run.
        launches = tuple(_with_tile(each, launch) if each.kernel == launch.kernel else each for each in chosen.launches)
        return chosen._replace(launches=launches), operands

    chosen, operands = planned(None)
    out, lse = kernels.forward(chosen, operands, counting)
    if backward:
        saved = Saved(array(q_len, dim_v), out.owner, lse.owner, lse.owner if "mask" in options else None)
        kernels.backward(*planned(saved), counting)
    return counted[launch.kernel]


def _with_tile(launch: Launch, other: Launch) -> Launch:
    """A launch of up to 3 tiles in the tile of another of its kernel."""
    tile = {name: value for name, value in other.constants if name in TILE_CONSTANTS}
    constants = tuple((name, tile.get(name, value)) for name, value in launch.constants)
    return other._replace(constants=constants, grid=(3, *launch.grid[1:]))


def complaints(compiled: Iterable[Kernel], steps: Iterable[Step]) -> list[str]:
    """What keeps the gate shut."""
    found = []
    for it in compiled:
        where = f"{it.kernel}, {it.problem}, tile {_size(it.tile)}, {it.arch}, NVRTC {it.compiler}"
        found += [f"{where}: spills {it.spills} bytes"] if it.spills else []
        found += [f"{where}: {warning}" for warning in it.warnings]
    for step in steps:
        where = f"{step.kernel}, {step.problem}, tile {_size(step.tile)}"
        found += [f"{where}: {step.bank_conflicts} bank conflicts"] if step.bank_conflicts else []
        if step.bytes_over_least is not None and step.bytes_over_least > LIMIT:
            found.append(f"{where}: moves {step.bytes_over_least:.2f} times the least bytes")
    return found


def record(compiled: Sequence[Kernel], steps: Iterable[Step]) -> dict[str, Any]:
    """The section of a result. Of thousands of kernels each is one line of text."""
    names = [field.name for field in fields(Kernel)]
    lines = [json.dumps([getattr(it, name) for name in names]) for it in compiled]
    return {"columns": names, "kernels": lines, "steps": [asdict(step) for step in steps]}


def tables(section: dict[str, Any]) -> list[Table]:
    """The kernels, the worst of all tiles, compilers and architectures of each; and the tile steps."""
    compiled = [dict(zip(section["columns"], json.loads(line), strict=True)) for line in section["kernels"]]
    groups: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for it in compiled:
        groups[it["problem"], it["kernel"]].append(it)
    archs = list(dict.fromkeys(it["arch"] for it in compiled))
    rows = []
    for (problem, kernel), group in groups.items():
        registers = [max((it["registers"] for it in group if it["arch"] == arch), default=0) for arch in archs]
        rows.append(
            [
                problem,
                kernel,
                str(len({tuple(it["tile"] or ()) for it in group})),
                *map(str, registers),
                str(sum(it["spills"] for it in group)),
                f"{max(it['shared_bytes'] for it in group) / 1024:.0f}",
                f"{max(it['cubin_bytes'] for it in group) / 1024:.0f}",
                f"{max(it['seconds'] for it in group):.1f}",
            ]
        )
    compilers = ", ".join(dict.fromkeys(it["compiler"] for it in compiled))
    heading = f"Registers by architecture, the most of all tiles that a plan may choose (NVRTC {compilers})"
    columns = ["problem", "kernel", "tiles", *archs, "spilled bytes", "shared KiB", "cubin KiB", "compile s"]
    return [Table(heading, columns, rows), *_step_tables(section["steps"])]


def _step_tables(steps: list[dict[str, Any]]) -> list[Table]:
    if not steps:
        return []
    classes = list(dict.fromkeys(key for step in steps for key in step["per_score"]))
    rows = [
        [
            *_named(step),
            *(f"{step['per_score'].get(key, 0):.1f}" for key in classes),
            str(step["bank_conflicts"]),
            NOTHING if step["bytes_over_least"] is None else f"{step['bytes_over_least']:.3f}",
        ]
        for step in steps
    ]
    columns = ["problem", "kernel", "tile", *classes, "bank conflicts", "bytes over least"]
    found = [Table("One tile step on the simulator, PTX instructions of a thread for one score", columns, rows)]
    with_products = [step for step in steps if step["sass"] is not None]
    if with_products:
        classes = list(with_products[0]["sass"])
        rows = [
            [
                *_named(step),
                *(f"{step['sass'][key]:.2f}" for key in classes),
                f"{sum(count for key, count in step['sass'].items() if key != 'products'):.2f}",
            ]
            for step in with_products
        ]
        columns = ["problem", "kernel", "tile", *classes, "all but products"]
        found.append(
            Table(
                "The steady loop as sm_80 (Hopper: sm_90a) executes it, SASS of a thread for one score", columns, rows
            )
        )
    return found


def _named(step: dict[str, Any]) -> list[str]:
    return [step["problem"], step["kernel"], _size(step["tile"])]


def _size(tile: Sequence[int] | None) -> str:
    return NOTHING if tile is None else f"{tile[0]}x{tile[1]}/{tile[2]}"
