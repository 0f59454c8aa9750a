"""Static gate: check every kernel that a plan may choose with compiler, disassembler and simulator, without a GPU.

Every tile that plans choose at any length (`plan.launches_at_any_length`) is compiled for a representative set of
problems: small and large head dimensions, both accumulation dtypes, no option and all options at once. The gate passes
if no kernel spills registers and the compiler prints no warning.

Every row of a result has the fingerprint of its kernel, by which rows of kernels that have changed since are found.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import multiprocessing
import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import lru_cache, partial
from typing import Any, NamedTuple

import numpy as np

from cupy_flash import attention, device
from cupy_flash.engines import Tile, mma_decode, tcgen05
from cupy_flash.engines.launch import Launch
from cupy_flash.engines.wgmma.resources import ARCH as HOPPER
from cupy_flash.gpu import ahead, run_plan
from cupy_flash.jit import nvrtc
from cupy_flash.jit.source import assemble
from cupy_flash.plan.plan import Plan, plan
from cupy_flash.problem.build import pose
from cupy_flash.problem.records import DOUBLE_BACKWARD, FP8, JVP, Operands, Options, Problem, Saved
from cupy_flash.simulator.counters import Counters
from cupy_flash.simulator.run import start

from ..report import NOTHING
from ..run import Progress
from . import sass, static_mods
from .fingerprint import fingerprint

BLACKWELL = "sm_100a"
ARCHS = ("sm_75", "sm_80", HOPPER, BLACKWELL)
# The architectures whose tile steps are counted, for all engines but those of ARCH_OF_ENGINE, and for these.
ARCH_OF_ENGINE = {"wgmma": HOPPER, "tcgen05": BLACKWELL}
STEP_ARCHS = ("sm_80", *ARCH_OF_ENGINE.values())
EVERY_ARCH = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_90a", "sm_100", "sm_100a", "sm_103a", "sm_120")
FIRST_RELEASE = {"sm_103a": (12, 9)}  # of NVRTC for an architecture, if it is later than the first that is supported
EVERY_OPTION: dict[str, Any] = dict(
    causal=True, window=(48, 48), softcap=30.0, alibi_slopes=True, bias=True, mask=True, sink=True,
    q_lengths=True, kv_lengths=True, dropout=0.1, return_lse=True,
)  # fmt: skip
CACHE_OPTIONS = {name: EVERY_OPTION[name] for name in ("window", "softcap", "alibi_slopes", "mask", "sink")}
LATENT: dict[str, Any] = dict(
    dtype="float16", head_dim=576, head_dim_v=512, cache=True, shared_kv=True, backward=False
)  # fmt: skip
QKV = ("q", "k", "v")
PROBLEMS: dict[str, dict[str, Any]] = {
    "fp32 D 64": dict(dtype="float32", head_dim=64),
    "fp32 D 128": dict(dtype="float32", head_dim=128),
    "fp32 D 256": dict(dtype="float32", head_dim=256),
    "fp64 D 64": dict(dtype="float64", head_dim=64),
    "bf16 D 64": dict(dtype="bfloat16", head_dim=64, engine="simt"),
    "bf16 D 64 all options": dict(dtype="bfloat16", head_dim=64, engine="simt") | EVERY_OPTION,
    "fp64 D 64 all options": dict(dtype="float64", head_dim=64) | EVERY_OPTION,
    # JVP and double backward, with tangents of q, k and v.
    "fp32 D 64 derivatives": dict(dtype="float32", head_dim=64, tangents=QKV),
    "fp32 D 128 derivatives": dict(dtype="float32", head_dim=128, tangents=QKV),
    "fp64 D 64 derivatives": dict(dtype="float64", head_dim=64, tangents=QKV),
    "bf16 D 64 derivatives, all options": dict(dtype="bfloat16", head_dim=64, tangents=QKV) | EVERY_OPTION,
    "bf16 D 64 derivatives": dict(dtype="bfloat16", head_dim=64, tangents=QKV),
    "bf16 D 128 derivatives": dict(dtype="bfloat16", head_dim=128, tangents=QKV),
    "fp16 D 64 derivatives": dict(dtype="float16", head_dim=64, tangents=QKV),
    "fp16 D 64 derivatives, all options": dict(dtype="float16", head_dim=64, tangents=QKV) | EVERY_OPTION,
    "fp16 D 128 derivatives": dict(dtype="float16", head_dim=128, tangents=QKV),
    # Tensor cores, in fp16 only: bf16 kernels differ in two instructions, and sm_75 has no bf16.
    "fp16 D 64": dict(dtype="float16", head_dim=64, engine="mma"),
    "fp16 D 96": dict(dtype="float16", head_dim=96, engine="mma"),
    "fp16 D 128": dict(dtype="float16", head_dim=128, engine="mma"),
    "fp16 D 192/128": dict(dtype="float16", head_dim=192, head_dim_v=128, engine="mma"),
    "fp16 D 256": dict(dtype="float16", head_dim=256, engine="mma"),
    "fp16 D 64 all options": dict(dtype="float16", head_dim=64, engine="mma") | EVERY_OPTION,
    "fp16 D 128 all options": dict(dtype="float16", head_dim=128, engine="mma") | EVERY_OPTION,
    # Decodes on contiguous and paged KV caches, with tiles of 16, 32 and 64 rows.
    "KV cache fp16 D 64": dict(dtype="float16", head_dim=64, cache=True),
    "KV cache fp16 D 128": dict(dtype="float16", head_dim=128, cache=True),
    "KV cache fp16 D 192": dict(dtype="float16", head_dim=192, cache=True),
    "KV cache fp16 D 64 all options": dict(dtype="float16", head_dim=64, cache=True) | CACHE_OPTIONS,
    "KV cache fp16 D 128 all options": dict(dtype="float16", head_dim=128, cache=True) | CACHE_OPTIONS,
    "KV cache fp16 D 576/512 latent": LATENT,
    "KV cache fp16 D 576/512 latent all options": LATENT | CACHE_OPTIONS,
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
            "e4m3 D 64": dict(dtype=FP8, head_dim=64, backward=False),
            "e4m3 D 128": dict(dtype=FP8, head_dim=128, backward=False),
            "e4m3 D 256": dict(dtype=FP8, head_dim=256, backward=False),
        }.items()
    },
    # tcgen05 and tensor memory, on sm_100a and sm_103a only: plain, with one option each, and with all of them.
    **{
        f"Blackwell {name}": config | dict(engine="tcgen05")
        for name, config in {
            "bf16 D 64": dict(dtype="bfloat16", head_dim=64),
            "fp16 D 96": dict(dtype="float16", head_dim=96),
            "bf16 D 128": dict(dtype="bfloat16", head_dim=128),
            "bf16 D 192/128": dict(dtype="bfloat16", head_dim=192, head_dim_v=128, backward=False),
            "bf16 D 128 bias": dict(dtype="bfloat16", head_dim=128, bias=True),
            "bf16 D 128 mask": dict(dtype="bfloat16", head_dim=128, mask=True),
            "bf16 D 128 dropout": dict(dtype="bfloat16", head_dim=128, dropout=0.1),
            "bf16 D 128 table": dict(dtype="bfloat16", head_dim=128, **static_mods.MODS["table"]),
            "fp16 D 128 all options": dict(dtype="float16", head_dim=128) | EVERY_OPTION,
        }.items()
    },
}
# The problems with the highest register pressure: --all compiles only these, for every architecture and compiler. A
# strict order of mma changes one thread of tcgen05's kernels, so its tiles, which only a tune may choose, have no rows.
SCARCE = (
    "fp32 D 64", "fp32 D 128", "fp64 D 64", "bf16 D 64 all options", "fp16 D 96", "fp16 D 128", "fp16 D 64 all options",
    "KV cache fp16 D 64", "KV cache fp16 D 128 all options", "Hopper fp16 D 64", "Hopper bf16 D 128",
    "Hopper fp16 D 256", "Hopper fp16 D 128 all options", "Hopper e4m3 D 64", "Hopper e4m3 D 128", "Hopper e4m3 D 256",
    *(name for name in PROBLEMS if name.startswith("Blackwell") or "latent" in name),
)  # fmt: skip
MAINLOOPS = ("forward", "forward_fp8", "backward", "backward_q", "backward_kv")  # functions with counted steps
STEP_LENGTH, STEP_HEADS = 4096, 64  # sequence length and heads of the problem whose steps are counted
NOT_OPTIONS = ("dtype", "head_dim", "head_dim_v", "backward")  # keys of PROBLEMS that are no options of attention()
# Bytes that rows may spill, (name, NVRTC): never inside a steady loop. Here up to four numbers are stored in the
# prologue, and loaded again where the block takes its next work item, before the mainloop; in the Hopper backward and
# the forward of tcgen05, behind the mainloop.
MAY_SPILL = {
    ("mma/decode, KV cache fp16 D 64, tile 64x64/128, sm_100", "12.8.93"): 8,
    ("mma/decode, KV cache fp16 D 64, tile 64x64/128, sm_120", "12.8.93"): 8,
    ("mma/decode, KV cache fp16 D 64, tile 64x64/128, sm_120", "12.9.86"): 8,
    ("mma/decode, KV cache fp16 D 576/512 latent all options, tile 16x32/128, sm_75", "12.8.93"): 12,
    ("mma/decode, KV cache fp16 D 576/512 latent all options, tile 32x32/256, sm_120", "13.5.37"): 12,
    ("mma/backward, fp16 D 64, tile 128x128/256, sm_80", "13.5.37"): 36,
    ("mma/backward, fp16 D 128, tile 64x128/256, sm_80", "12.8.93"): 12,
    ("tcgen05/forward, Blackwell fp16 D 96, tile 256x128/512, sm_100a", "12.8.93"): 48,
    ("tcgen05/forward, Blackwell fp16 D 96, tile 256x128/512, sm_100a", "12.9.86"): 48,
    ("wgmma/backward, Hopper fp16 D 256, tile 64x64/384, sm_90a", "12.8.93"): 8,
}
LIMIT = 1.10  # upper limit of the bytes moved, relative to the minimum that the tiles need


@dataclass(frozen=True)
class Kernel:
    """One kernel compiled for one GPU by one compiler."""

    problem: str
    kernel: str
    tile: tuple[int, int, int] | None  # BLOCK_Q, BLOCK_KV, threads per block
    arch: str
    fingerprint: str
    shared_bytes: int
    compiler: str
    registers: int
    spills: int  # bytes stored and loaded
    cubin_bytes: int
    seconds: float
    warnings: tuple[str, ...]

    @property
    def name(self) -> str:
        """The name of this row in messages."""
        return f"{self.kernel}, {self.problem}, tile {size(self.tile)}, {self.arch}"


@dataclass(frozen=True)
class Sass:
    """The machine code of one mainloop iteration."""

    per_score: dict[str, float]  # thread instructions of the steady path per score, by class
    longest: float  # thread instructions of the longest path per score, of all classes
    waits: list[sass.Wait]  # waits of the steady path, each with the exponentials that overlap the tensor cores

    @classmethod
    def of(cls, record: dict[str, Any]) -> Sass:
        """Return the Sass of a stored record."""
        return cls(**record | {"waits": [sass.Wait(*wait) for wait in record["waits"]]})


@dataclass(frozen=True)
class Step:
    """Simulator counters of one kernel and tile: of one mainloop iteration, and of a whole small launch."""

    problem: str
    kernel: str
    tile: tuple[int, int, int]
    fingerprint: str
    per_score: dict[str, float]  # thread instructions per score, by class
    bank_conflicts: int  # excess shared-memory wavefronts of the launch
    bytes_over_least: float | None  # global bytes of the launch / their minimum; None if options read arrays
    sass: Sass | None  # None for simt

    @property
    def name(self) -> str:
        """The name of this row in messages."""
        return f"{self.kernel}, {self.problem}, tile {size(self.tile)}"


@dataclass
class Result:
    """The rows of a result of the gate."""

    kernels: list[Kernel]
    steps: list[Step]
    mods: list[static_mods.Added]

    @classmethod
    def of(cls, section: dict[str, Any]) -> Result:
        """Return the rows of a stored section."""
        compiled = []
        for line in section["kernels"]:
            row = dict(zip(section["columns"], json.loads(line), strict=True))
            of_kernel = {name: row.pop(name) for name in OF_KERNEL}
            of_kernel["tile"] = of_kernel["tile"] and tuple(of_kernel["tile"])
            for compiler, values in row.items():
                if values is not None:
                    *numbers, warnings = values
                    of_compiler = dict(zip(OF_COMPILER, (*numbers, tuple(warnings)), strict=True))
                    compiled.append(Kernel(**of_kernel, compiler=compiler, **of_compiler))
        steps = [
            Step(**step | {"tile": tuple(step["tile"]), "sass": step["sass"] and Sass.of(step["sass"])})
            for step in section["steps"]
        ]
        mods = [static_mods.Added(**row | {"tile": tuple(row["tile"])}) for row in section["mods"]]
        return cls(compiled, steps, mods)

    def record(self) -> dict[str, Any]:
        """Return the section: a kernel on each line, as a JSON string, with a column per compiler."""
        compilers = list(dict.fromkeys(kernel.compiler for kernel in self.kernels))
        rows: dict[tuple[Any, ...], dict[str, list[Any]]] = defaultdict(dict)
        for kernel in self.kernels:
            values = [getattr(kernel, name) for name in OF_COMPILER]
            rows[tuple(getattr(kernel, name) for name in OF_KERNEL)][kernel.compiler] = values
        return {
            "columns": [*OF_KERNEL, *compilers],
            "kernels": [json.dumps([*key, *map(row.get, compilers)]) for key, row in rows.items()],
            "steps": [asdict(step) for step in self.steps],
            "mods": [asdict(row) for row in self.mods],
        }

    def stale(self, problems: Sequence[str], archs: Sequence[str], mods: Sequence[str]) -> list[str]:
        """Compare with the kernels that plans of these problems and mods choose today, and name rows that differ.

        A result has one row per kernel and compiler.
        """
        return [
            *self._stale_kernels(problems, archs),
            *_differences(
                "tile step",
                {(each.problem, each.fingerprint): each.name for each in self.steps if each.problem in problems},
                {(each.problem, fingerprint(each.launch)): each.name for each in counted(problems)},
            ),
            *_differences(
                "mods",
                {(each.name, each.fingerprint): each.name for each in self.mods if each.mod in mods},
                {(each.name, each.fingerprint): each.name for each in static_mods.cases(mods)},
            ),
        ]

    def _stale_kernels(self, problems: Sequence[str], archs: Sequence[str]) -> Iterator[str]:
        stored: dict[tuple[str, str], dict[str, dict[str, Kernel]]] = defaultdict(lambda: defaultdict(dict))
        for kernel in self.kernels:
            stored[kernel.problem, kernel.arch][kernel.compiler][kernel.fingerprint] = kernel
        compilers = dict.fromkeys(kernel.compiler for kernel in self.kernels)
        for name, arch in tasks(problems, archs):
            today = {key: _name(name, launch, arch) for key, launch in _launches(name, arch).items()}
            for compiler in filter(partial(knows, arch), compilers):
                rows = {key: kernel.name for key, kernel in stored[name, arch][compiler].items()}
                yield from _differences(f"NVRTC {compiler}", rows, today)


# The columns of a stored kernel: OF_KERNEL do not depend on the compiler; OF_COMPILER are stored once per compiler.
OF_KERNEL = ("problem", "kernel", "tile", "arch", "fingerprint", "shared_bytes")
OF_COMPILER = ("registers", "spills", "cubin_bytes", "seconds", "warnings")


def _differences(kind: str, stored: Mapping[Any, str], today: Mapping[Any, str]) -> list[str]:
    """Return a "stale" line for each row that only `stored` or only `today` has, {key with fingerprint: name}."""
    names = [name for key, name in {**today, **stored}.items() if (key in today) != (key in stored)]
    return [f"stale, {kind}: {name}" for name in dict.fromkeys(names)]


def tasks(problems: Iterable[str], archs: Iterable[str]) -> list[tuple[str, str]]:
    """Return the pairs of a problem and an architecture that the problem's engine serves."""
    return [(name, arch) for name in problems for arch in archs if is_served(name, arch)]


def _name(problem: str, launch: Launch, arch: str) -> str:
    return f"{launch.kernel}, {problem}, tile {size(launch.tile)}, {arch}"


def compile_all(
    problems: Iterable[str],
    archs: Iterable[str],
    libraries: Sequence[str | None],
    jobs: int,
    progress: Progress,
    stored: Sequence[Kernel] = (),
    save: Callable[[list[Kernel]], object] = lambda _: None,
) -> list[Kernel]:
    """Compile every kernel of the problems for every architecture with every libnvrtc (path, or None: the default).

    Kernels of `stored` that are chosen today are not compiled again. `save` is called with all kernels after each
    problem and architecture.
    """
    rows: dict[tuple[str, str], list[Kernel]] = {task: [] for task in tasks(problems, archs)}
    todo = list(rows)
    for kernel in stored:
        rows.setdefault((kernel.problem, kernel.arch), []).append(kernel)
    context = multiprocessing.get_context("spawn")
    for library in libraries:
        # A process cannot unload its libnvrtc: one pool per compiler.
        with ProcessPoolExecutor(jobs, mp_context=context, initializer=_use, initargs=(library,)) as pool:
            try:
                made_of_tasks = pool.map(_compile, *zip(*todo, strict=True), [rows[task] for task in todo])
                for task, made in zip(todo, made_of_tasks, strict=True):
                    progress(", ".join(task))
                    if not made:  # the compiler does not know the architecture
                        continue
                    today = {kernel.fingerprint for kernel in made}
                    others = [each for each in rows[task] if each.compiler != made[0].compiler]
                    rows[task] = [each for each in others if each.fingerprint in today] + made
                    save([kernel for kernels_of_task in rows.values() for kernel in kernels_of_task])
            except BaseException:
                pool.shutdown(cancel_futures=True)  # an interrupt ends the run after the compilations in progress
                raise
    return [kernel for kernels_of_task in rows.values() for kernel in kernels_of_task]


def step_arch(name: str) -> str:
    """Return the architecture for which the tile steps of a problem are counted."""
    return ARCH_OF_ENGINE.get(PROBLEMS[name].get("engine", ""), STEP_ARCHS[0])


def is_served(name: str, arch: str) -> bool:
    """Return whether a problem is compiled for an architecture: its engine runs there, with instructions of its own."""
    of_tcgen05 = tcgen05.ARCHES or ()
    if step_arch(name) == BLACKWELL:
        return arch in of_tcgen05
    return arch == HOPPER if step_arch(name) == HOPPER else arch not in of_tcgen05


def knows(arch: str, release: str) -> bool:
    """Return whether a release of NVRTC compiles for an architecture."""
    return tuple(map(int, release.split(".")[:2])) >= FIRST_RELEASE.get(arch, ())


def _use(library: str | None) -> None:
    """Make this process compile with the libnvrtc at a path."""
    if library is not None:
        nvrtc.library = lru_cache(lambda: ctypes.CDLL(library))


def _compile(name: str, arch: str, stored: Sequence[Kernel]) -> list[Kernel]:
    """Return the rows of a problem: from `stored` if this compiler compiled the same text, otherwise compiled now."""
    if not knows(arch, _release()):
        return []
    known = {kernel.fingerprint: kernel for kernel in stored if kernel.compiler == _release()}
    return [
        known[key] if key in known else _compile_launch(name, launch, arch)
        for key, launch in _launches(name, arch).items()
    ]


def _launches(name: str, arch: str) -> dict[str, Launch]:
    """Return the launches that plans and tunes of a problem may choose at any length, by fingerprint."""
    gpu = device.named(arch, "cuda")
    problems = _problems(**PROBLEMS[name])
    problems += [each._replace(deterministic=True) for each in problems if each.backward and not each.derivative]
    launches = (*ahead.launches_of(problems, gpu), *_of_a_tune(problems, gpu))
    return {fingerprint(launch): launch for launch in launches}


def _of_a_tune(problems: Iterable[Problem], gpu: device.Device) -> tuple[Launch, ...]:
    """Return the decodes on KV caches that only a tune may choose: with a producer warp, and in clusters."""
    launches = {}
    for problem in problems:
        if problem.cache is None:
            continue
        pages = None if problem.cache.page is None else 16
        problem = problem._replace(cache=problem.cache._replace(page=pages))
        # The numbers of pipeline slots and of blocks in a cluster do not affect registers, so only their maxima are
        # compiled.
        deepest = {(tile.rows, tile.tma): tile for tile in mma_decode.choices(problem, gpu) if tile.form}
        for tile in deepest.values():
            launch = next(x for x in mma_decode.launches(problem, gpu, tile) if x.function.endswith("decode"))
            launches[launch.text_key] = launch
    return tuple(launches.values())


def _problems(tangents: tuple[str, ...] = (), **config: Any) -> list[Problem]:
    """Return the problems of calls with these arguments of compile() or, with `tangents`, of their derivatives."""
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
        name, launch.kernel, launch.tile, arch, fingerprint(launch), resources.smem + launch.shared_bytes, _release(),
        resources.registers, spills, len(result.code), round(seconds, 3), result.warnings,
    )  # fmt: skip


@lru_cache(maxsize=1)
def _release() -> str:
    """Return the compiler's release, for example 13.5.37."""
    release = re.search(r"V([\d.]+)", nvrtc.identity())
    return release[1] if release else ".".join(map(str, nvrtc.version()))


class Counted(NamedTuple):
    """A kernel whose tile step is counted."""

    problem: str
    launch: Launch
    arch: str
    backward: bool
    deterministic: bool
    plan_tile: Tile  # the tile of the whole plan, which has a part per kernel

    @property
    def label(self) -> str:
        """The name of the kernel, with " + dQ" if it adds to dQ, and ", in order" if it does so in a fixed order."""
        added = " + dQ" if self.launch.function == "backward_kv" and _adds_dq(self.launch) else ""
        return self.launch.kernel + added + ", in order" * _in_order(self.launch)

    @property
    def name(self) -> str:
        """The name of this kernel in messages."""
        return f"{self.label}, {self.problem}, tile {size(self.launch.tile)}"


def counted(problems: Iterable[str], archs: Iterable[str] = STEP_ARCHS) -> list[Counted]:
    """Return the kernels that plans choose for long problems and whose tile steps are counted."""
    found: dict[tuple[Any, ...], Counted] = {}
    for arch, name in itertools.product(archs, problems):
        # Not counted here: tests/serving counts the bytes that a decode reads, tests/kernels the instructions of
        # derivatives.
        if step_arch(name) != arch or PROBLEMS[name].keys() & {"cache", "tangents"}:
            continue
        # A deterministic backward differs only in dQ: a separate kernel computes it, or blocks add to it in a fixed
        # order.
        for backward, deterministic in ((False, False), (True, False), (True, True)):
            if backward and not PROBLEMS[name].get("backward", True):
                continue
            chosen = _chosen(PROBLEMS[name], backward, arch, deterministic)
            for launch in chosen.launches:
                each = Counted(name, launch, arch, backward, deterministic, chosen.tile)
                if launch.function in MAINLOOPS:
                    found.setdefault((name, each.label, launch.tile), each)
    return list(found.values())


def count_steps(
    problems: Iterable[str],
    progress: Progress,
    stored: Sequence[Step] = (),
    save: Callable[[list[Step]], object] = lambda _: None,
) -> list[Step]:
    """Return one Step per mainloop of the kernels that plans choose for long problems, counted on the simulator.

    Steps of `stored` whose kernels are chosen today are not counted again, and those of other problems are kept. `save`
    is called with all steps after each.
    """
    problems = list(problems)
    known = {(step.problem, step.fingerprint): step for step in stored}
    steps = {key: step for key, step in known.items() if step.problem not in problems}
    for each in counted(problems):
        progress(each.name)
        key = each.problem, fingerprint(each.launch)
        steps[key] = known.get(key) or _count(each)
        save(list((known | steps).values()))
    return list(steps.values())


def _in_order(launch: Launch) -> bool:
    """Return whether blocks add to dQ in a fixed order, as in a deterministic backward."""
    return bool(dict(launch.constants).get("DQ_IN_ORDER"))


def _adds_dq(launch: Launch) -> bool:
    """Return whether blocks add to dQ in global memory, as the blocks of wgmma's backward always do."""
    return launch.function == "backward" or bool(dict(launch.constants).get("ADD_DQ"))


def _chosen(config: dict[str, Any], backward: bool, arch: str, deterministic: bool = False) -> Plan:
    """Return the plan for a long problem."""
    (problem,) = {
        problem._replace(
            q_len=STEP_LENGTH, kv_len=STEP_LENGTH, heads=STEP_HEADS, kv_heads=STEP_HEADS, deterministic=deterministic
        )
        for problem in _problems(**config)
        if problem.backward == backward and not problem.dlse
    }
    return plan(problem, device.named(arch, "cuda"))


def _count(counted: Counted) -> Step:
    """Simulate a launch of 2 x 2 tiles, and one with a third tile along the mainloop; the difference is one step.

    The mainloop visits key tiles, or, in a backward whose blocks own keys, query tiles. A block that adds to dQ in
    order polls until it is its turn, and the polls would be counted, so such a launch has only one block.
    """
    name, launch, arch = counted[:3]
    config, tile = PROBLEMS[name], launch.tile
    assert tile is not None
    block_q, block_kv, threads = tile
    by_key, blocks = launch.function in ("backward_kv", "backward"), 1 if _in_order(launch) else 2
    base, longer = (
        _run(counted, (visited * block_q, blocks * block_kv) if by_key else (blocks * block_q, visited * block_kv))
        for visited in (2, 3)
    )
    added = {key: longer.by_class()[key] - base.by_class().get(key, 0) for key in longer.by_class()}
    scores = blocks * block_q * block_kv
    per_score = {key: 32 * count / scores for key, count in added.items()}
    # An access counts as its sectors or its bytes, whichever is less: lanes that read the same address then count once,
    # and instructions that share a sector each count the part that they use. TMA boxes share no sectors.
    bytes_moved = sum(min(32 * access.sectors, access.bytes) for access in base.global_.values())
    if launch.boxes:
        bytes_moved = base.global_bytes_read + base.global_bytes_written
    least = None if config.keys() & {"bias", "mask", "score_mod"} else _least_bytes(launch, config, blocks)
    over = None if least is None else bytes_moved / least
    return Step(
        name, counted.label, tile, fingerprint(launch), per_score, base.bank_conflicts, over, _sass(launch, arch)
    )


def _sass(launch: Launch, arch: str) -> Sass | None:
    tile = launch.tile
    if tile is None or not launch.kernel.startswith(("mma/", "wgmma/", "tcgen05/")):
        return None
    text = assemble(launch.kernel, dict(launch.constants), dict(launch.headers))
    code = nvrtc.compile(text, launch.kernel, arch).code
    block_q, block_kv, threads = tile
    if launch.kernel == "tcgen05/forward":  # a thread of the softmax has a row
        loops = [(sass.row_loop(code, block_kv), block_q)]
    elif launch.kernel == "tcgen05/backward":
        # A thread has half of the columns of S^T and of dP^T of a key; those of another role add a row of dQ each.
        loops = [(sass.row_loop(code, block_q), 2 * block_kv), (sass.reduction_loop(code), block_q)]
    else:
        threads -= 128 * launch.kernel.startswith("wgmma/")  # the producer warpgroup has no mainloop math
        loops = [(sass.mainloop(code), threads)]
    per_score: dict[str, float] = defaultdict(float)
    for loop, of_loop in loops:
        for name, count in loop.counts().items():
            per_score[name] += count * of_loop / (block_q * block_kv)
    longest = sum(len(loop.longest) * of_loop for loop, of_loop in loops) / (block_q * block_kv)
    return Sass(dict(per_score), longest, [wait for loop, _ in loops for wait in loop.waits()])


def _least_bytes(launch: Launch, config: dict[str, Any], blocks: int) -> int:
    """Return the minimum traffic of blocks that visit 2 tiles: own tiles move once, visited ones once per block."""
    assert launch.tile is not None
    block_q, block_kv, _ = launch.tile
    itemsize = ahead.element_dtype(config["dtype"]).itemsize
    k, v = (itemsize * config.get(name, config["head_dim"]) for name in ("head_dim", "head_dim_v"))
    row_stat = max(itemsize, 4)  # bytes of one lse or delta
    by_key = launch.function in ("backward_kv", "backward")
    queries, keys = (2 * block_q, blocks * block_kv) if by_key else (blocks * block_q, 2 * block_kv)
    if launch.function in ("forward", "forward_fp8"):  # Q, O (bfloat16 if Q is fp8) and lse, then K and V
        return queries * (k + v * (1 + (itemsize == 1)) + row_stat) + blocks * keys * (k + v)
    query_bytes = queries * (k + v + 2 * row_stat)  # Q, dO, lse, delta
    if launch.function == "backward_q":
        return query_bytes + queries * k + blocks * keys * (k + v)
    if _adds_dq(launch):  # every block also adds to dQ in fp32
        query_bytes += queries * 4 * -(-config["head_dim"] // 16) * 16
    return 2 * keys * (k + v) + blocks * query_bytes  # K, V, dK, dV


def _run(counted: Counted, lengths: tuple[int, int]) -> Counters:
    """Simulate a kernel on (queries, keys) of one head and return its counters."""
    kernel, backward = counted.launch.kernel, counted.backward
    config = PROBLEMS[counted.problem] | {"deterministic": counted.deterministic}
    options = {key: value for key, value in config.items() if key not in NOT_OPTIONS}
    (q_len, kv_len), dim = lengths, config["head_dim"]
    rng = np.random.default_rng(0)
    element = ahead.element_dtype(config["dtype"])

    def array(rows: int, dim: int) -> Any:
        return rng.standard_normal((1, rows, 1, dim)).astype(element)

    dim_v = config.get("head_dim_v", dim)
    arrays = array(q_len, dim), array(kv_len, dim), array(kv_len, dim_v)
    arguments = dict(  # causal and window are off, so that no tile is skipped
        alibi_slopes=np.ones(1, np.float32), bias=np.zeros((q_len, kv_len), element),
        mask=np.ones((q_len, kv_len), bool), sink=np.zeros(1, element),
        q_lengths=np.array([q_len], np.int32), kv_lengths=np.array([kv_len], np.int32),
        causal=False, window=None,
    )  # fmt: skip
    options |= {name: argument for name, argument in arguments.items() if name in options}
    if "dropout" in options:
        options["seed"] = 1
    counters: dict[str, Counters] = {}

    def counting(work: run_plan.Work) -> None:
        counters.update(zip((each.kernel for each in work.launches), start(work), strict=True))

    def planned(saved: Saved | None) -> tuple[Plan, Operands]:
        problem, operands = pose("static", arrays, Options(**options, backend="simulator"), None, saved)
        tile = counted.plan_tile if problem.backward == backward else None
        chosen = plan(problem, device.named(counted.arch), tile)
        # The counted kernel has 3 blocks in both runs, whatever their lengths, so that their difference is one step.
        launches = tuple(x._replace(grid=(3, *x.grid[1:])) if x.kernel == kernel else x for x in chosen.launches)
        return chosen._replace(launches=launches), operands

    if backward:
        on_cpu = options | dict(backend="cpu", engine="cpu", return_lse=True)
        out, lse = attention(*arrays, **on_cpu)
        saved = Saved(array(q_len, dim_v), out, lse, lse if "mask" in options else None)
        run_plan.backward(*planned(saved), counting)
    else:
        run_plan.forward(*planned(None), counting)
    return counters[kernel]


def complaints(compiled: Iterable[Kernel], steps: Iterable[Step]) -> list[str]:
    """Return the reasons why the gate fails; empty if it passes."""
    reasons = []
    for kernel in compiled:
        name = f"{kernel.name}, NVRTC {kernel.compiler}"
        allowed = MAY_SPILL.get((kernel.name, kernel.compiler), 0)
        reasons += [f"{name}: spills {kernel.spills} bytes"] if kernel.spills > allowed else []
        reasons += [f"{name}: {warning}" for warning in kernel.warnings]
    for step in steps:
        reasons += [f"{step.name}: {step.bank_conflicts} bank conflicts"] if step.bank_conflicts else []
        if step.bytes_over_least is not None and step.bytes_over_least > LIMIT:
            reasons.append(f"{step.name}: moves {step.bytes_over_least:.2f} times the minimum bytes")
    return reasons


def size(tile: Sequence[int] | None) -> str:
    """Return the text of a tile: BLOCK_Q x BLOCK_KV / threads."""
    return NOTHING if tile is None else f"{tile[0]}x{tile[1]}/{tile[2]}"
