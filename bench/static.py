"""Static gate: check every kernel that a plan may choose with compiler, disassembler and simulator, without a GPU.

Every tile that plans choose at any length (`plan.launches_at_any_length`) is compiled for a representative set of
problems: small and large head dimensions, both accumulation dtypes, no option and all options at once. The gate passes
if no kernel spills registers and the compiler prints no warning.
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
from cupy_flash.engines import mma_decode
from cupy_flash.engines.wgmma import hopper
from cupy_flash.launch import Launch
from cupy_flash.plan import Plan, plan
from cupy_flash.pose import pose
from cupy_flash.problem import DOUBLE_BACKWARD, FP8, JVP, Operands, Options, Problem, Saved
from cupy_flash.source import assemble

from . import sass, static_mods
from .report import NOTHING, Table
from .run import Progress

ARCHS = ("sm_75", "sm_80", "sm_90a")
STEP_ARCHS = ("sm_80", hopper.ARCH)  # tile steps are counted here; on the second those of the engine wgmma
EVERY_ARCH = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_90a", "sm_100", "sm_120")
EVERY_OPTION: dict[str, Any] = dict(
    causal=True, window=(48, 48), softcap=30.0, alibi_slopes=True, bias=True, mask=True, sink=True,
    q_lengths=True, kv_lengths=True, dropout=0.1, return_lse=True,
)  # fmt: skip
CACHE_OPTIONS = {name: EVERY_OPTION[name] for name in ("window", "softcap", "alibi_slopes", "mask", "sink")}
QKV = ("q", "k", "v")
PROBLEMS: dict[str, dict[str, Any]] = {
    "fp32 D 64": dict(dtype="float32", head_dim=64),
    "fp32 D 128": dict(dtype="float32", head_dim=128),
    "fp32 D 256": dict(dtype="float32", head_dim=256),
    "fp64 D 64": dict(dtype="float64", head_dim=64),
    "bf16 D 64": dict(dtype="bfloat16", head_dim=64, engine="simt"),
    "bf16 D 64 all options": dict(dtype="bfloat16", head_dim=64, engine="simt") | EVERY_OPTION,
    "fp64 D 64 all options": dict(dtype="float64", head_dim=64) | EVERY_OPTION,
    # Derivatives in a direction of q, k and v.
    "fp32 D 64 derivatives": dict(dtype="float32", head_dim=64, tangents=QKV),
    "fp32 D 128 derivatives": dict(dtype="float32", head_dim=128, tangents=QKV),
    "fp64 D 64 derivatives": dict(dtype="float64", head_dim=64, tangents=QKV),
    "bf16 D 64 derivatives, all options": dict(dtype="bfloat16", head_dim=64, tangents=QKV) | EVERY_OPTION,
    "bf16 D 64 derivatives": dict(dtype="bfloat16", head_dim=64, tangents=QKV),
    "bf16 D 128 derivatives": dict(dtype="bfloat16", head_dim=128, tangents=QKV),
    "fp16 D 64 derivatives": dict(dtype="float16", head_dim=64, tangents=QKV),
    "fp16 D 64 derivatives, all options": dict(dtype="float16", head_dim=64, tangents=QKV) | EVERY_OPTION,
    "fp16 D 128 derivatives": dict(dtype="float16", head_dim=128, tangents=QKV),
    # Tensor cores. bf16 differs in two instructions only, and sm_75 does not have it.
    "fp16 D 64": dict(dtype="float16", head_dim=64, engine="mma"),
    "fp16 D 96": dict(dtype="float16", head_dim=96, engine="mma"),
    "fp16 D 128": dict(dtype="float16", head_dim=128, engine="mma"),
    "fp16 D 192/128": dict(dtype="float16", head_dim=192, head_dim_v=128, engine="mma"),
    "fp16 D 256": dict(dtype="float16", head_dim=256, engine="mma"),
    "fp16 D 64 all options": dict(dtype="float16", head_dim=64, engine="mma") | EVERY_OPTION,
    "fp16 D 128 all options": dict(dtype="float16", head_dim=128, engine="mma") | EVERY_OPTION,
    # Decodes on KV caches, contiguous and paged, with every number of rows of a tile.
    "KV cache fp16 D 64": dict(dtype="float16", head_dim=64, cache=True),
    "KV cache fp16 D 128": dict(dtype="float16", head_dim=128, cache=True),
    "KV cache fp16 D 192": dict(dtype="float16", head_dim=192, cache=True),
    "KV cache fp16 D 64 all options": dict(dtype="float16", head_dim=64, cache=True) | CACHE_OPTIONS,
    "KV cache fp16 D 128 all options": dict(dtype="float16", head_dim=128, cache=True) | CACHE_OPTIONS,
    "KV cache fp16 D 64 e4m3": dict(dtype="float16", head_dim=64, cache=True, kv_dtype=FP8),
    "KV cache fp16 D 128 e4m3": dict(dtype="float16", head_dim=128, cache=True, kv_dtype=FP8),
    "KV cache bf16 D 128 e4m3": dict(dtype="bfloat16", head_dim=128, cache=True, kv_dtype=FP8),
    "KV cache fp16 D 128 e4m3 all options": dict(dtype="float16", head_dim=128, cache=True, kv_dtype=FP8)
    | CACHE_OPTIONS,
    # wgmma and TMA, on Hopper only.
    **{
        f"Hopper {name}": config | dict(engine="wgmma")
        for name, config in {
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
# The problems with the highest register pressure: --all compiles only these, for every architecture and compiler.
SCARCE = (
    "fp32 D 64", "fp32 D 128", "fp64 D 64", "bf16 D 64 all options", "fp16 D 96", "fp16 D 128", "fp16 D 64 all options",
    "KV cache fp16 D 128 all options", "Hopper fp16 D 64", "Hopper bf16 D 128", "Hopper fp16 D 256",
    "Hopper fp16 D 128 all options",
)  # fmt: skip
STEP_LENGTH, STEP_HEADS = 4096, 64  # the problem whose tile steps are counted
NOT_OPTIONS = ("dtype", "head_dim", "head_dim_v", "backward")  # keys of PROBLEMS that are no options of attention()
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
LIMIT = 1.10  # upper limit for bytes moved over the minimum that the tiles need


@dataclass(frozen=True)
class Kernel:
    """One kernel compiled for one GPU by one compiler."""

    problem: str
    kernel: str
    tile: tuple[int, int, int] | None  # BLOCK_Q, BLOCK_KV, threads per block
    arch: str
    compiler: str
    registers: int
    spills: int  # bytes stored and loaded
    shared_bytes: int
    cubin_bytes: int
    seconds: float
    warnings: tuple[str, ...]


@dataclass(frozen=True)
class Sass:
    """The machine code of one mainloop iteration."""

    per_score: dict[str, float]  # thread instructions of the steady path per score, by class
    longest: float  # all those of the longest path
    waits: list[sass.Wait]  # waits of the steady path, each with the exponentials that overlap the tensor cores


@dataclass(frozen=True)
class Step:
    """Simulator counters of one kernel and tile: of one mainloop iteration, and of a whole small launch."""

    problem: str
    kernel: str
    tile: tuple[int, int, int]
    per_score: dict[str, float]  # thread instructions per score, by class
    bank_conflicts: int  # excess shared-memory wavefronts of the launch
    bytes_over_least: float | None  # global bytes of the launch over their minimum; None if options read arrays
    sass: Sass | None  # None for simt


def compile_all(
    problems: Iterable[str], archs: Iterable[str], libraries: Sequence[str | None], jobs: int, progress: Progress
) -> list[Kernel]:
    """Compile every kernel of the problems for every architecture with every libnvrtc (path, or None: the default)."""
    tasks = [(name, arch) for name in problems for arch in archs if is_served(name, arch)]
    compiled: list[Kernel] = []
    context = multiprocessing.get_context("spawn")
    for library in libraries:
        # A process cannot unload its libnvrtc: one pool per compiler.
        with ProcessPoolExecutor(jobs, mp_context=context, initializer=_use, initargs=(library,)) as pool:
            for (name, arch), kernels_of_task in zip(tasks, pool.map(_compile, *zip(*tasks, strict=True)), strict=True):
                progress(f"{name}, {arch}")
                compiled += kernels_of_task
    return compiled


def step_arch(name: str) -> str:
    """Return the architecture for which the tile steps of a problem are counted."""
    return STEP_ARCHS[PROBLEMS[name].get("engine") == "wgmma"]


def is_served(name: str, arch: str) -> bool:
    """Return whether the engine of a problem runs on an architecture."""
    return step_arch(name) != hopper.ARCH or arch == hopper.ARCH


def _use(library: str | None) -> None:
    """Make this process compile with the libnvrtc at a path."""
    if library is not None:
        nvrtc.library = lru_cache(lambda: ctypes.CDLL(library))


def _compile(name: str, arch: str) -> list[Kernel]:
    gpu = device.named(arch, "cuda")
    problems = _problems(**PROBLEMS[name])
    launches = (*ahead.launches_of(problems, gpu), *_of_a_tune(problems, gpu))
    return [_compile_launch(name, launch, arch) for launch in launches]


def _of_a_tune(problems: Iterable[Problem], gpu: device.Device) -> tuple[Launch, ...]:
    """Return the decodes on KV caches that only a tune may choose: with a producer warp, and in clusters."""
    launches = {}
    for problem in problems:
        if problem.cache is None:
            continue
        pages = None if problem.cache.page is None else 16
        problem = problem._replace(cache=problem.cache._replace(page=pages))
        # More slots and blocks of a cluster change no register: of each number of rows the tile with the most.
        deepest = {(tile.rows, tile.tma): tile for tile in mma_decode.choices(problem, gpu) if tile.form}
        for tile in deepest.values():
            launch = next(x for x in mma_decode.launches(problem, gpu, tile) if x.function == "decode")
            launches[launch.text_key] = launch
    return tuple(launches.values())


def _problems(tangents: tuple[str, ...] = (), **config: Any) -> list[Problem]:
    """Return the problems of calls with these arguments of compile(), or their derivatives in a direction."""
    problems = ahead.problems(**config)
    if not tangents:
        return problems
    return [
        problem._replace(derivative=DOUBLE_BACKWARD if problem.backward else JVP, tangents=tangents)
        for problem in problems
        if not problem.dlse
    ]


def _compile_launch(name: str, launch: Launch, arch: str) -> Kernel:
    text = assemble(launch.kernel, dict(launch.constants), dict(launch.headers))
    begin = time.perf_counter()
    result = nvrtc.compile(text, launch.kernel, arch)
    seconds = time.perf_counter() - begin
    resources = result.resources[launch.function]
    spills = resources.spill_stores + resources.spill_loads
    return Kernel(
        name, launch.kernel, launch.tile, arch, _release(), resources.registers, spills,
        resources.smem + launch.shared_bytes, len(result.code), round(seconds, 3), result.warnings,
    )  # fmt: skip


def _release() -> str:
    """Return the compiler's release, for example 13.5.37."""
    release = re.search(r"V([\d.]+)", nvrtc.identity())
    return release[1] if release else ".".join(map(str, nvrtc.version()))


def count_steps(problems: Iterable[str], arch: str, progress: Progress) -> list[Step]:
    """Count the tile steps of the kernels that plans choose on `arch` for long problems, on the simulator."""
    steps = []
    for name in problems:
        # tests/serving counts the bytes that a decode reads, tests/kernels the instructions of derivatives.
        if step_arch(name) != arch or PROBLEMS[name].keys() & {"cache", "tangents"}:
            continue
        progress(name)
        counted = set()  # a deterministic backward adds kernels only if dQ has one of its own
        for backward, deterministic in ((False, False), (True, False), (True, True)):
            if backward and not PROBLEMS[name].get("backward", True):
                continue
            for launch in _chosen(PROBLEMS[name], backward, arch, deterministic):
                key = _label(launch), launch.tile
                if launch.function in ("forward", "backward", "backward_q", "backward_kv") and key not in counted:
                    counted.add(key)
                    steps.append(_count(name, launch, backward, arch))
    return steps


def _label(launch: Launch) -> str:
    """Return the name of a kernel, and whether one for dK and dV also adds dQ."""
    return launch.kernel + " + dQ" * (launch.function == "backward_kv" and _adds_dq(launch))


def _adds_dq(launch: Launch) -> bool:
    """Return whether blocks add to dQ in global memory, as those of wgmma's backward always do."""
    return launch.function == "backward" or bool(dict(launch.constants).get("ADD_DQ"))


def _chosen(config: dict[str, Any], backward: bool, arch: str, deterministic: bool = False) -> tuple[Launch, ...]:
    """Return the launches of the plan for a long problem."""
    (problem,) = {
        problem._replace(
            q_len=STEP_LENGTH, kv_len=STEP_LENGTH, heads=STEP_HEADS, kv_heads=STEP_HEADS, deterministic=deterministic
        )
        for problem in _problems(**config)
        if problem.backward == backward and not problem.dlse
    }
    return plan(problem, device.named(arch, "cuda")).launches


def _count(name: str, launch: Launch, backward: bool, arch: str) -> Step:
    """Simulate a launch of 2 x 2 tiles, and one with a third tile along the mainloop; the difference is one step.

    The mainloop visits key tiles, or, in a backward whose blocks own keys, query tiles.
    """
    config, tile = PROBLEMS[name], launch.tile
    assert tile is not None
    block_q, block_kv, threads = tile
    by_key = launch.function in ("backward_kv", "backward")
    base, longer = (
        _run(config, launch, backward, arch, ((2 + more * by_key) * block_q, (2 + more * (not by_key)) * block_kv))
        for more in (0, 1)
    )
    added = {key: longer.by_class()[key] - base.by_class().get(key, 0) for key in longer.by_class()}
    scores = 2 * block_q * block_kv
    per_score = {key: 32 * count / scores for key, count in added.items()}
    # An access counts its sectors or its bytes, whichever is less: lanes that read one address count once, and several
    # instructions that share a sector count a part each. TMA boxes share no sectors.
    bytes_moved = sum(min(32 * access.sectors, access.bytes) for access in base.global_.values())
    if launch.boxes:
        bytes_moved = base.global_bytes_read + base.global_bytes_written
    least = None if "mask" in config else _least_bytes(launch, config)
    over = None if least is None else bytes_moved / least
    return Step(name, _label(launch), tile, per_score, base.bank_conflicts, over, _sass(launch, arch))


def _sass(launch: Launch, arch: str) -> Sass | None:
    tile = launch.tile
    if tile is None or not launch.kernel.startswith(("mma/", "wgmma/")):
        return None
    text = assemble(launch.kernel, dict(launch.constants), dict(launch.headers))
    block_q, block_kv, threads = tile
    if launch.kernel.startswith("wgmma/"):
        threads -= 128  # the producer warpgroup has no mainloop math
    mainloop = sass.mainloop(nvrtc.compile(text, launch.kernel, arch).code)
    of_score = threads / (block_q * block_kv)
    per_score = {name: count * of_score for name, count in mainloop.counts().items()}
    return Sass(per_score, len(mainloop.longest) * of_score, mainloop.waits())


def _least_bytes(launch: Launch, config: dict[str, Any]) -> int:
    """Return the minimum traffic of a launch of 2 x 2 tiles: resident tiles move once, visited tiles once per block."""
    assert launch.tile is not None
    block_q, block_kv, _ = launch.tile
    dtype = np.dtype("uint16" if config["dtype"] == "bfloat16" else config["dtype"])
    k, v = (dtype.itemsize * config.get(name, config["head_dim"]) for name in ("head_dim", "head_dim_v"))
    row_stat = max(dtype.itemsize, 4)  # bytes of one lse or delta
    queries, keys = 2 * block_q, 2 * block_kv
    if launch.function == "forward":  # Q, O, lse; K and V
        return queries * (k + v + row_stat) + 2 * keys * (k + v)
    query_bytes = queries * (k + v + 2 * row_stat)  # Q, dO, lse, delta
    if launch.function == "backward_q":
        return query_bytes + queries * k + 2 * keys * (k + v)
    if _adds_dq(launch):  # every block also adds to dQ in fp32
        query_bytes += queries * 4 * -(-config["head_dim"] // 16) * 16
    return 2 * keys * (k + v) + 2 * query_bytes  # K, V, dK, dV


def _run(config: dict[str, Any], launch: Launch, backward: bool, arch: str, lengths: tuple[int, int]) -> Counters:
    """Simulate a kernel on (queries, keys) of one head and return its counters."""
    options = {key: value for key, value in config.items() if key not in NOT_OPTIONS}
    (q_len, kv_len), dim = lengths, config["head_dim"]
    rng = np.random.default_rng(0)
    element = ahead.element_dtype(config["dtype"])

    def array(rows: int, dim: int) -> Any:
        return rng.standard_normal((1, rows, 1, dim)).astype(element)

    dim_v = config.get("head_dim_v", dim)
    arrays = array(q_len, dim), array(kv_len, dim), array(kv_len, dim_v)
    if "mask" in options:  # all options, as arrays; causal and window are off, so that no tile is skipped
        options |= dict(
            alibi_slopes=np.ones(1, np.float32), bias=np.zeros((q_len, kv_len), element),
            mask=np.ones((q_len, kv_len), bool), sink=np.zeros(1, element), seed=1,
            q_lengths=np.array([q_len], np.int32), kv_lengths=np.array([kv_len], np.int32),
            causal=False, window=None,
        )  # fmt: skip
    counters: dict[str, Counters] = {}

    def counting(work: kernels.Work) -> None:
        counters.update(zip((each.kernel for each in work.launches), start(work), strict=True))

    def planned(saved: Saved | None) -> tuple[Plan, Operands]:
        problem, operands = pose("static", arrays, Options(**options, backend="simulator"), None, saved)
        chosen = plan(problem, device.named(arch))
        # Keep the small problem's constants, but use the tile that is to be counted.
        launches = tuple(_with_tile(each, launch) if each.kernel == launch.kernel else each for each in chosen.launches)
        return chosen._replace(launches=launches), operands

    chosen, operands = planned(None)
    out, lse = kernels.forward(chosen, operands, counting)
    if backward:
        saved = Saved(array(q_len, dim_v), out.owner, lse.owner, lse.owner if "mask" in options else None)
        kernels.backward(*planned(saved), counting)
    return counters[launch.kernel]


def _with_tile(launch: Launch, other: Launch) -> Launch:
    """Return `launch` with the tile of `other`, a launch of the same kernel, and a grid of 3 blocks."""
    tile = {name: value for name, value in other.constants if name in TILE_CONSTANTS}
    constants = tuple((name, tile.get(name, value)) for name, value in launch.constants)
    return other._replace(constants=constants, grid=(3, *launch.grid[1:]))


def complaints(compiled: Iterable[Kernel], steps: Iterable[Step]) -> list[str]:
    """Return the reasons why the gate fails; empty if it passes."""
    reasons = []
    for kernel in compiled:
        name = f"{kernel.kernel}, {kernel.problem}, tile {_size(kernel.tile)}, {kernel.arch}, NVRTC {kernel.compiler}"
        reasons += [f"{name}: spills {kernel.spills} bytes"] if kernel.spills else []
        reasons += [f"{name}: {warning}" for warning in kernel.warnings]
    for step in steps:
        name = f"{step.kernel}, {step.problem}, tile {_size(step.tile)}"
        reasons += [f"{name}: {step.bank_conflicts} bank conflicts"] if step.bank_conflicts else []
        if step.bytes_over_least is not None and step.bytes_over_least > LIMIT:
            reasons.append(f"{name}: moves {step.bytes_over_least:.2f} times the minimum bytes")
    return reasons


def record(compiled: Sequence[Kernel], steps: Iterable[Step]) -> dict[str, Any]:
    """Return the section of a result; each of the thousands of kernels is one JSON string, to keep the file short."""
    names = [field.name for field in fields(Kernel)]
    lines = [json.dumps([getattr(kernel, name) for name in names]) for kernel in compiled]
    return {"columns": names, "kernels": lines, "steps": [asdict(step) for step in steps]}


def tables(section: dict[str, Any]) -> list[Table]:
    """Return the table of kernels, each the maximum over tiles and compilers, and the tables of tile steps."""
    compiled = [dict(zip(section["columns"], json.loads(line), strict=True)) for line in section["kernels"]]
    groups: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for record in compiled:
        groups[record["problem"], record["kernel"]].append(record)
    archs = list(dict.fromkeys(record["arch"] for record in compiled))
    rows = []
    for (problem, kernel), group in groups.items():
        registers = [
            max((record["registers"] for record in group if record["arch"] == arch), default=0) for arch in archs
        ]
        rows.append(
            [
                problem,
                kernel,
                str(len({tuple(record["tile"] or ()) for record in group})),
                *map(str, registers),
                str(sum(record["spills"] for record in group)),
                f"{max(record['shared_bytes'] for record in group) / 1024:.0f}",
                f"{max(record['cubin_bytes'] for record in group) / 1024:.0f}",
                f"{max(record['seconds'] for record in group):.1f}",
            ]
        )
    compilers = ", ".join(dict.fromkeys(record["compiler"] for record in compiled))
    heading = f"Registers by architecture, the most of all tiles that a plan may choose (NVRTC {compilers})"
    columns = ["problem", "kernel", "tiles", *archs, "spilled bytes", "shared KiB", "cubin KiB", "compile s"]
    return [
        Table(heading, columns, rows),
        *_step_tables(section["steps"]),
        *static_mods.tables(section.get("mods", [])),
    ]


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
    step_tables = [Table("One tile step on the simulator, PTX instructions of a thread for one score", columns, rows)]
    tensor_core_steps = [step for step in steps if step["sass"] is not None]
    if tensor_core_steps:
        classes = list(tensor_core_steps[0]["sass"]["per_score"])
        rows = []
        for step in tensor_core_steps:
            per_score, waits = step["sass"]["per_score"], map(sass.Wait._make, step["sass"]["waits"])
            rows.append(
                [
                    *_named(step),
                    *(f"{per_score[key]:.2f}" for key in classes),
                    f"{sum(count for key, count in per_score.items() if key != 'products'):.2f}",
                    f"{step['sass']['longest']:.2f}",
                    " ".join(f"{wait.products}/{wait.exps}" for wait in waits) or NOTHING,
                ]
            )
        columns = [
            "problem", "kernel", "tile", *classes, "all but products", "longest path", "products/exps before each wait"
        ]  # fmt: skip
        step_tables.append(
            Table(
                "The steady loop as sm_80 (Hopper: sm_90a) executes it, SASS of a thread for one score", columns, rows
            )
        )
    return step_tables


def _named(step: dict[str, Any]) -> list[str]:
    return [step["problem"], step["kernel"], _size(step["tile"])]


def _size(tile: Sequence[int] | None) -> str:
    return NOTHING if tile is None else f"{tile[0]}x{tile[1]}/{tile[2]}"
