"""NVRTC: every target without a GPU, the compiler's log, and results that depend on the source text alone."""

import json
import os
import pickle
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from cuda import pathfinder

from cupy_flash.jit import nvrtc, source

ROOT = Path(__file__).resolve().parents[2]

# y[i] = 2 x[255 - i], with a header and shared memory.
REVERSE = """#line 1 "mask.cuh"
__device__ float twice(float x) { return 2.f * x; }
#line 2 "simt/reverse.cu"
extern "C" __global__ void __launch_bounds__(256) reverse(const float* x, float* y) {
    __shared__ float x_smem[256];
    x_smem[threadIdx.x] = x[threadIdx.x];
    __syncthreads();
    y[threadIdx.x] = twice(x_smem[255 - threadIdx.x]);
}
"""
# 64 live sums do not fit 32 registers.
SPILLING = """
__device__ __noinline__ float last(float* x, int n) { return x[n - 1]; }
extern "C" __global__ void __maxnreg__(32) spilling(float* x, int n) {
    float sums[64];
    for (int i = 0; i < 64; ++i) sums[i] = x[i * threadIdx.x];
    for (int j = 0; j < n; ++j)
        for (int i = 0; i < 64; ++i) sums[i] = sums[i] * sums[(i + 7) % 64] + x[j];
    for (int i = 0; i < 64; ++i) x[i] = sums[i];
    x[64] = last(x, n);
}
extern "C" __global__ void lean(float* x) { x[threadIdx.x] = 1; }
"""


def test_version_is_one_that_the_kernels_need() -> None:
    assert nvrtc.version() >= (12, 8)
    assert {75, 80, 90, 100, 120} <= set(nvrtc.architectures())
    assert re.search(rf"V{nvrtc.version()[0]}\.{nvrtc.version()[1]}\.\d+", nvrtc.identity())


@pytest.mark.parametrize("target", ["sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_90a", "sm_100", "sm_120"])
def test_cubin_of_every_architecture(target: str) -> None:
    compiled = nvrtc.compile(REVERSE, "simt/reverse", target)
    assert compiled.code.startswith(b"\x7fELF")
    assert b"reverse" in compiled.code
    assert compiled.resources["reverse"].smem >= 1024
    assert compiled.warnings == ()
    assert (compiled.name, compiled.target, compiled.path) == ("simt/reverse", target, None)
    with pytest.raises(ValueError, match=rf"simt/reverse was compiled for {target}: a cubin, not PTX"):
        _ = compiled.ptx


def test_repr_is_short() -> None:
    compiled = nvrtc.Compiled("simt/forward", "sm_80", bytes(5000), "log" * 1000)
    assert repr(compiled) == "<Compiled simt/forward for sm_80: 5000 bytes>"
    stored = replace(compiled, path=Path("folder/kernel.cubin"))
    assert repr((stored,)) == f"(<Compiled simt/forward for sm_80: 5000 bytes in {stored.path}>,)"


def test_ptx_names_lines_of_the_original_files() -> None:
    compiled = nvrtc.compile(REVERSE, "simt/reverse", "compute_80")
    assert ".target sm_80" in compiled.ptx
    assert ".visible .entry reverse(" in compiled.ptx
    assert "\0" not in compiled.ptx
    files = dict(re.findall(r'^\s*\.file\s+(\d+)\s+"(.*)"$', compiled.ptx, re.MULTILINE))
    assert sorted(files.values()) == ["mask.cuh", "simt/reverse.cu"]
    lines = {(files[file], line) for file, line in re.findall(r"\.loc\s+(\d+)\s+(\d+)", compiled.ptx)}
    assert {("mask.cuh", "1"), ("simt/reverse.cu", "6")} <= lines
    assert compiled.resources == {}


def test_file_names_are_kept_if_folders_have_similar_names() -> None:
    ptx = '.file\t1 "/home/simt/mask.cuh"\n\t.file 2 "C:\\\\work\\\\mask.cuh", 1, 2\n.file 3 "other.cuh"\n'
    text = '#line 1 "mask.cuh"\n#line 1 "simt/mask.cuh"\n'
    renamed = '.file\t1 "simt/mask.cuh"\n\t.file 2 "mask.cuh", 1, 2\n.file 3 "other.cuh"\n'
    assert nvrtc.with_names_of(text, ptx) == renamed


def test_resources_of_every_kernel() -> None:
    resources = nvrtc.compile(SPILLING, "spilling", "sm_80").resources
    assert sorted(resources) == ["lean", "spilling"]
    assert resources["spilling"].registers == 32
    assert min(resources["spilling"].spill_stores, resources["spilling"].spill_loads) > 0
    assert resources["lean"].registers < 32
    assert resources["lean"][1:] == (0, 0, 0, 0)


def test_resources_count_what_called_functions_spill() -> None:
    log = (
        "ptxas info    : Compiling entry function 'k' for 'sm_80'\n"
        "ptxas info    : Function properties for k\n"
        "ptxas         .     16 bytes stack frame, 4 bytes spill stores, 8 bytes spill loads\n"
        "ptxas info    : Used 40 registers, used 1 barriers, 16 bytes cumulative stack size, 512 bytes smem\n"
        "ptxas info    : Function properties for helper\n"
        "ptxas         .     32 bytes stack frame, 12 bytes spill stores, 24 bytes spill loads\n"
    )
    compiled = nvrtc.Compiled("k", "sm_80", b"", log)
    assert compiled.resources == {"k": nvrtc.Resources(40, 48, 16, 32, 512)}


def test_a_log_that_is_not_understood_is_an_error() -> None:
    compiled = nvrtc.Compiled("k", "sm_80", b"", "Compiling entry function 'k' for 'sm_80'\nregisters: 40\n")
    with pytest.raises(RuntimeError, match=r"of k cannot be parsed:\n(?s:.*)registers: 40"):
        _ = compiled.resources


def test_warnings_of_both_compilers() -> None:
    text = (
        '#line 7 "mask.cuh"\n'
        "__device__ int one() { int unused; return 1; }\n"
        'extern "C" __global__ void k(int* x) {\n'
        # ptxas ignores setmaxnreg and warns, because the kernel has no launch bounds
        '    asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");\n'
        "    x[0] = one();\n"
        "}\n"
    )
    unused, ignored = sorted(nvrtc.compile(text, "k", "sm_90a").warnings)
    assert re.match(r"mask\.cuh\(7\): warning #177-D: variable \"unused\"", unused)
    assert re.match(r"ptxas info .*\(C7508\).*'setmaxnreg' ignored", ignored)


def test_errors_name_the_original_file_and_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "simt").mkdir()
    (tmp_path / "config.cuh").write_text("constexpr int BLOCK_Q = 64;\n")
    (tmp_path / "mask.cuh").write_text("#pragma once\n\n\nint broken = ;\n")
    (tmp_path / "simt" / "f.cu").write_text('#include "../config.cuh"\n#include "../mask.cuh"\nint after = BLOCK_K;\n')
    monkeypatch.setattr(source, "kernel_folder", lambda: tmp_path)
    with pytest.raises(nvrtc.CompileError) as error:
        nvrtc.compile(source.assemble("simt/f", {"BLOCK_Q": 32}), "simt/f", "sm_80")
    assert re.match(rf"NVRTC {nvrtc.version()[0]}\.\d+ cannot compile simt/f for sm_80\.\n", str(error.value))
    assert "\nmask.cuh(4): error: " in str(error.value)
    assert '\nsimt/f.cu(3): error: identifier "BLOCK_K" is undefined' in str(error.value)
    assert error.value.source is None


def test_an_architecture_that_the_compiler_does_not_know_is_an_error() -> None:
    with pytest.raises(nvrtc.CompileError, match=r"REVERSE for sm_20\.\nnvrtc: error: invalid value for --gpu-arch"):
        nvrtc.compile(REVERSE, "REVERSE", "sm_20")


def test_errors_of_the_assembler_are_reported() -> None:
    text = 'extern "C" __global__ void k() { asm volatile("setmaxnreg.dec.sync.aligned.u32 24;"); }'
    with pytest.raises(nvrtc.CompileError, match=r"ptxas .*setmaxnreg.* not supported on \.target 'sm_90'"):
        nvrtc.compile(text, "k", "sm_90")


def test_compile_errors_can_be_pickled() -> None:
    error = nvrtc.CompileError("simt/f", "sm_80", "the log", Path("/cache/source.cu"))
    copy = pickle.loads(pickle.dumps(error))
    assert str(copy) == str(error)
    assert str(Path("/cache/source.cu")) in str(copy)


@pytest.mark.parametrize("target", ["", "90", "sm_90b", "sm_90 -I/", "sm-90", "lto_90", "compute_80\n", "SM_90"])
def test_targets_are_checked(target: str) -> None:
    with pytest.raises(ValueError, match=r'^target must be like "sm_90a"'):
        nvrtc.compile(REVERSE, "reverse", target)


def test_no_file_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # If NVRTC read a header of the working directory, it would be part of the kernel but not of the cache key.
    monkeypatch.chdir(tmp_path)
    for folder in (tmp_path, tmp_path / "simt"):
        folder.mkdir(exist_ok=True)
        (folder / "config.cuh").write_text("constexpr int ONE = 1;\n")
    with pytest.raises(nvrtc.CompileError, match=r'could not open source file "config\.cuh"'):
        nvrtc.compile('#include "config.cuh"\n', "simt/forward", "compute_80")


FRESH = """
import hashlib, json, os, sys
text = sys.stdin.read()
sys.path.insert(0, sys.argv[1])
from cupy_flash.jit import nvrtc
results = [nvrtc.compile(text, "simt/reverse", target).code for target in ("sm_80", "sm_90a", "compute_80")]
foreign = sorted({name.partition(".")[0] for name in sys.modules} & {"torch", "jax", "cupy", "cupy_backends"})
print(json.dumps([[hashlib.sha256(code).hexdigest() for code in results], foreign]))
"""


def test_equal_texts_give_equal_code_in_any_process_and_folder(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    outputs = []
    for folder in ("here", "a/longer/way"):
        (tmp_path / folder).mkdir(parents=True)
        command = [sys.executable, "-c", FRESH, str(ROOT)]
        result = subprocess.run(
            command, input=REVERSE, cwd=tmp_path / folder, env=environment, capture_output=True, text=True
        )
        assert result.returncode == 0, result.stderr
        outputs.append(json.loads(result.stdout))
    assert outputs[0] == outputs[1]
    assert outputs[0][1] == []


def test_a_missing_compiler_names_the_extras(monkeypatch: pytest.MonkeyPatch) -> None:
    def find(name: str) -> SimpleNamespace:
        raise pathfinder.DynamicLibNotFoundError(name)

    monkeypatch.setattr(pathfinder, "load_nvidia_dynamic_lib", find)
    with pytest.raises(ImportError, match=r"cupy-flash\[cuda13\].* cuda12.*cupy-cuda13x\[ctk\]"):
        nvrtc.library.__wrapped__()


def test_failures_of_the_library_itself_are_named() -> None:
    with pytest.raises(RuntimeError, match=r"nvrtcGetPTX failed: NVRTC_ERROR_INVALID_PROGRAM"):
        nvrtc.call("nvrtcGetPTX", None, None)
