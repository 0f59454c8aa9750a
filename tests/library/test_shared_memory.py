"""shared_bytes: what it computes from a layout in a kernel's source, what it refuses, and the compiler's sizes."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cupy_flash import device
from cupy_flash.engines import mma, mma_decode, simt, wgmma
from cupy_flash.engines.launch import Launch
from cupy_flash.gpu import ahead
from cupy_flash.jit import nvrtc, shared_memory
from cupy_flash.jit.shared_memory import kernel_constant, shared_bytes
from cupy_flash.jit.source import assemble, kernel_folder
from cupy_flash.problem.records import DOUBLE_BACKWARD, FP8, JVP

CONFIG = """// Defaults.
#pragma once
constexpr int ROWS = 64;  // rows
constexpr bool BUFFERED = false;
using element = float;
#define CLUSTERS 0
"""
SIZES = {"ROWS": 48, "BUFFERED": True, "element": "half16", "CLUSTERS": False}


@pytest.fixture
def kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Return a function that writes a kernel folder from {path: text}, with CONFIG as its config.cuh."""
    monkeypatch.setattr(shared_memory, "kernel_folder", lambda: tmp_path)
    shared_memory._layout.cache_clear()

    def make(**files: str) -> None:
        for path, text in {"config.cuh": CONFIG, **files}.items():
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / path).write_text(text)

    yield make
    shared_memory._layout.cache_clear()


def layout(*members: str, before: str = "") -> str:
    """Return the text of a kernel with these members of its SharedMemory."""
    body = "".join(f"  static constexpr int {member};\n" for member in members)
    return f'#include "../config.cuh"\n{before}struct SharedMemory {{\n{body}}};\n'


EXPRESSIONS = {
    "an offset": ("A = 0", "B = A + 2 * ROWS", "BYTES = B + 16", 112),
    "several members of a line": ("A = 8, B = A * 2,\n      BYTES = A + B", 24),
    "division": ("BYTES = (ROWS + 9) / 10 % 3 * 16", 32),
    "precedence": ("BYTES = (ROWS / 4 | 1) + 2 * (3 + 4) - 1", 26),
    "a choice": ("BYTES = BUFFERED ? ROWS : 0", 48),
    "a chain of choices": ("BYTES = ROWS <= 32 ? 1 : ROWS <= 48 ? 2 : 3", 2),
    "a choice inside": ("BYTES = 2 * (CLUSTERS ? ROWS : 3) + 1", 7),
    "conditions": ("BYTES = BUFFERED && ROWS > 4 || CLUSTERS ? 5 : 6", 5),
    "a switch as a number": ("BYTES = ROWS * (1 + BUFFERED) + CLUSTERS", 96),
    "the size of a configured type": ("BYTES = sizeof(element) * ROWS", 96),
    "the size of a type": ("BYTES = ROWS * sizeof(double)", 384),
    "an overlay": ("A = ROWS, B = 2 * A", "BYTES = larger(A, larger(B, 3))", 96),
    "a default argument": ("BYTES = padded(ROWS + 1) + padded(9, 8)", 80),
    "a member of another struct": ("BYTES = 2 * Slot::BYTES + TOP", 200),
}
FUNCTIONS = """
#include "functions.cuh"
constexpr bool FLAG = true, UNUSED = f<3>(!FLAG);  // not translated
constexpr int TOP = 4, LEFT =
    8;
struct Slot {
  static constexpr int K = 0;
  static constexpr int V = K + ROWS;  // comment;
  static constexpr int BYTES = V + 50;
};
"""


@pytest.mark.parametrize("name", EXPRESSIONS)
def test_translates(kernels: Callable[..., None], name: str) -> None:
    *members, expected = EXPRESSIONS[name]
    functions = (
        "__device__ constexpr int larger(int a, int b) {\n  return a > b ? a : b;\n}\n"
        "__device__ constexpr int padded(int n, int to = 16) {\n  return (n + to - 1) / to * to;\n}\n"
    )
    kernels(**{"toy/kernel.cu": layout(*map(str, members), before=FUNCTIONS), "functions.cuh": functions})
    assert shared_bytes("toy/kernel", SIZES) == expected


def test_any_constant_of_a_kernel(kernels: Callable[..., None]) -> None:
    flag = "constexpr bool OVERLAID = ROWS > 40 && 2 * TOP == 8;\n"
    kernels(**{"toy/kernel.cu": layout("BYTES = 0", before=FUNCTIONS + flag), "functions.cuh": ""})
    assert kernel_constant("toy/kernel", "Slot::V", SIZES) == 48
    assert [kernel_constant("toy/kernel", "OVERLAID", {"ROWS": rows}) for rows in (40, 41)] == [0, 1]


REFUSALS = {
    "nothing": ("", "SharedMemory::BYTES"),
    "an unknown name": (layout("BYTES = 2 * STAGES"), "STAGES"),
    "two definitions": (layout("BYTES = A", before="constexpr int A = 1;\nconstexpr int A = 2;\n"), "A"),
    "a template": (layout("BYTES = f<2>(ROWS)", before="template <int N>\n__device__ constexpr int f(int x);\n"), "f"),
    "an operator that Python has not": (layout("BYTES = !BUFFERED"), "!"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refuses(kernels: Callable[..., None], name: str) -> None:
    text, culprit = REFUSALS[name]
    kernels(**{"toy/kernel.cu": text})
    with pytest.raises(ValueError, match=rf"(depends on|has) {culprit}"):
        shared_bytes("toy/kernel", SIZES)


def test_constants_have_the_defaults_of_the_kernel(kernels: Callable[..., None]) -> None:
    kernels(**{"toy/kernel.cu": layout("BYTES = (1 + BUFFERED + CLUSTERS) * ROWS * sizeof(element)")})
    assert shared_bytes("toy/kernel", {}) == 64 * 4
    assert shared_bytes("toy/kernel", {"BUFFERED": True, "element": "double"}) == 2 * 64 * 8


CALLS = {
    "fp32": ("sm_80", dict(dtype="float32", head_dim=40, head_dim_v=72)),
    "fp64, derivatives": ("sm_80", dict(dtype="float64", head_dim=64, tangents=("q", "v"))),
    "fp16": ("sm_80", dict(dtype="float16", head_dim=64, bias=True)),
    "fp16, D 512": ("sm_80", dict(dtype="float16", head_dim=512, head_dim_v=24)),
    "fp16, derivatives": ("sm_80", dict(dtype="float16", head_dim=72, bias=True, tangents=("k",))),
    "a KV cache": ("sm_90a", dict(dtype="float16", head_dim=96, cache=True)),
    "a KV cache of e4m3": ("sm_90a", dict(dtype="bfloat16", head_dim=80, cache=True, kv_dtype=FP8)),
    "Hopper": ("sm_90a", dict(dtype="bfloat16", head_dim=192, head_dim_v=128)),
    "Hopper, D 64": ("sm_90a", dict(dtype="bfloat16", head_dim=64)),
    "Hopper, e4m3": ("sm_90a", dict(dtype=FP8, head_dim=128, backward=False)),
}


def launches_of(arch: str, tangents: tuple[str, ...] = (), **config: object) -> dict[tuple[str, int], Launch]:
    """Return launches with dynamic shared memory that engines offer for a call: some tiles of each kernel."""
    gpu = device.named(arch, "cuda")
    found: dict[tuple[str, int], Launch] = {}
    for problem in ahead.problems(**config):
        if tangents:
            problem = problem._replace(derivative=DOUBLE_BACKWARD if problem.backward else JVP, tangents=tangents)
        for engine in (simt, mma, wgmma if problem.cache is None else mma_decode):
            if engine.refusals(problem, gpu):
                continue
            tiles = mma_decode.choices(problem, gpu) if engine is mma_decode else engine.tiles(problem, gpu)
            for n, tile in enumerate((tiles[0], tiles[-1])):
                for launch in engine.launches(problem, gpu, tile):
                    if launch.shared_bytes:
                        found.setdefault((launch.kernel, n), launch)
    return found


@pytest.mark.parametrize("name", CALLS)
def test_plans_have_the_size_that_the_compiler_computes(name: str) -> None:
    arch, config = CALLS[name]
    for launch in launches_of(arch, **config).values():
        declarations, _ = assemble(launch.kernel, dict(launch.constants), dict(launch.headers)).split('extern "C"', 1)
        equal = f'static_assert(SharedMemory::BYTES == {launch.shared_bytes}, "");\n'
        nvrtc.compile(declarations + equal, launch.kernel, arch.replace("sm_", "compute_"))


def test_every_kernel_with_dynamic_shared_memory_states_its_layout() -> None:
    for path in kernel_folder().rglob("*.cu"):
        if "extern __shared__" in path.read_text():
            assert shared_bytes(path.relative_to(kernel_folder()).with_suffix("").as_posix(), {}) > 0
