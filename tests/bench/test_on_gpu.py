"""Tests without a GPU of everything that runs unattended on a GPU."""

import ast
import importlib
import importlib.util
import json
import os
import re
import subprocess
import sys
from functools import reduce
from types import SimpleNamespace

import derivatives
import fp8_cases
import numpy as np
import on_gpu as gpu_backend
import pytest
import sanitize
import shared_prefixes
import torch
from cache_cases import posed
from cases import Case, planned, run_public
from mods import mods_of
from patience import FOREVER, give_workers_time, patiently

from bench import gpu
from bench.kernel_development import sweep
from bench.results import ROOT
from cupy_flash import device, dispatch
from cupy_flash.engines.indexer import requested
from cupy_flash.measure.worker_process import Lost
from cupy_flash.plan.plan import plan
from cupy_flash.problem.build import pose
from cupy_flash.problem.indexer import Rule, pose_indexer
from cupy_flash.problem.records import Options, Saved, Tangents
from cupy_flash.problem.weights import IMPORTANCE, TOP, WEIGHTS, Wish, pose_weights

TOOL = """#!/usr/bin/env bash
echo "$(basename "$0") $*" >>"$CALLS"
case "$*" in *{failing}*) exit 7 ;; esac
"""


@pytest.fixture
def machine(tmp_path):
    """Return a function that runs bench/on_gpu.sh with fakes of python and GPU tools, which record their arguments."""
    calls, tools = tmp_path / "calls", tmp_path / "tools"
    tools.mkdir()

    def run(part, *, failing="nothing", names=("nvidia-smi", "python", "compute-sanitizer")):
        calls.write_text("")
        for name in ("nvidia-smi", "python", "compute-sanitizer"):
            (tools / name).unlink(missing_ok=True)
        for name in names:
            (tools / name).write_text(TOOL.format(failing=failing))
            (tools / name).chmod(0o755)
        out = tmp_path / "out"
        (out / "conformance").mkdir(parents=True, exist_ok=True)
        environment = dict(PATH=f"{tools}:{os.environ['PATH']}", CALLS=str(calls), PYTHON="python", RESULTS=str(out))
        environment["CONFORMANCE"] = str(tmp_path / "conformance")
        done = subprocess.run(
            ["bash", str(ROOT / "bench" / "on_gpu.sh"), part],
            env=os.environ | environment,
            capture_output=True,
            text=True,
        )
        steps = out / "steps.jsonl"
        return (
            done,
            calls.read_text().splitlines(),
            [json.loads(x) for x in steps.read_text().splitlines()] if steps.is_file() else [],
        )

    return run


def test_every_part_runs_once(machine):
    done, calls, steps = machine("all")
    assert done.returncode == 0, done.stderr
    names = [step["step"] for step in steps]
    assert names == [
        "gpu-tests",
        "half",
        "behaviour",
        "adapters",
        "check",
        "tune",
        "tune-decode",
        "report",
        "mods",
        "sweep-forward",
        "sweep-backward",
        "conformance",
        "simulator",
        "bounds",
        "costs-forward",
        "costs-backward",
        "calls",
        *(
            f"{tool}-{engine}"
            for engine in ("simt", "mma", "wgmma", "fp8", "cache", "derivatives")
            for tool in ("memcheck", "synccheck")
        ),
        "racecheck-simt",
        "racecheck-mma",
        "racecheck-cache",
        "racecheck-derivatives",
        "simt-forward-float32",
        "simt-forward-float64",
        "simt-backward-float32",
        "simt-backward-float64",
        "overhead",
        "decode",
        "first",
    ]
    assert {step["status"] for step in steps} == {0}
    assert any("bench forward --sweep" in call for call in calls) and any("--tool synccheck" in call for call in calls)
    # Four processes of pytest share compiled kernels, and jax must not preallocate GPU memory in any of them.
    tests = [call for call in calls if "timeout_method=thread" in call]
    assert len(tests) == 4 and all(f"-n {os.sysconf('SC_NPROCESSORS_ONLN')}" in call for call in tests)
    again, calls, steps = machine("all")
    assert again.returncode == 0 and len(steps) == len(names)
    assert not [call for call in calls if not call.startswith(("nvidia-smi", "python -c import xdist"))]


def test_a_failed_step_is_reported_and_run_again(machine):
    done, _, steps = machine("1", failing="overhead")
    assert done.returncode == 1 and [step["status"] for step in steps] == [7, 0, 0]
    done, calls, steps = machine("1")
    assert done.returncode == 0 and [step["status"] for step in steps] == [7, 0, 0, 0]
    assert "bench overhead" in "\n".join(calls) and "bench first" not in "\n".join(calls)


def test_without_a_gpu_it_says_so(machine):
    done, calls, steps = machine("1", failing="-L")
    assert done.returncode == 2 and "found no GPU" in done.stderr and not steps
    assert [call for call in calls if "bench" in call] == []


def test_bench_says_that_torch_finds_no_gpu(tmp_path):
    command = [sys.executable, "-m", "bench", "forward", "--gpu", "--out", str(tmp_path)]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr.strip()) == (2, "bench: torch finds no GPU here")


@pytest.mark.parametrize(
    "regime, flops, name",
    [
        pytest.param(
            gpu.Regime("bfloat16", 128, 8192, False),
            4 * 2 * 16 * 8192**2 * 128,
            "forward bfloat16, D 128, full, 8192",
            id="full",
        ),
        pytest.param(
            gpu.Regime("bfloat16", 64, 4096, True, True),
            2.5 * 2 * 4 * 32 * 4096**2 * 64,
            "backward bfloat16, D 64, causal, 4096",
            id="causal-backward",
        ),
        pytest.param(
            gpu.Regime("bfloat16", 192, 8192, True, False, 128),
            2 * 10 * 8192**2 * 320,
            "forward bfloat16, D 192, Dv 128, causal, 8192",
            id="wide-keys",
        ),
    ],
)
def test_regimes_by_hand(regime, flops, name):
    assert (regime.flops, regime.name) == (flops, name)


class WorkerInThisProcess:
    """Stand in for the worker process: do its work in this process.

    Tests choose the calls that fail as if the worker process were lost.
    """

    def __init__(self, work):
        self.work = work

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def __call__(self, *arguments, until):
        return self.work(*arguments, lambda step, seconds: None)


@pytest.fixture
def clock(monkeypatch):
    """Return a fake clock on a machine that seems to have a GPU; the worker is in this process."""
    now = [0.0]
    card = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    monkeypatch.setattr("bench.results.gpu_name", lambda: "a large GPU")
    monkeypatch.setattr(gpu, "Worker", WorkerInThisProcess)
    monkeypatch.setattr(gpu, "matmul", lambda: dict(tflops=700.0))
    monkeypatch.setattr(gpu.time, "monotonic", lambda: now[0])
    return now


def record(regime, tflops, **left_out):
    milliseconds = dict.fromkeys(tflops, [1.0])
    return dict(regime=regime.name, tflops=tflops, milliseconds=milliseconds, left_out=left_out)


def test_a_run_out_of_time_is_continued(tmp_path, clock, capsys):
    """A regime that is expected to exceed the time limit is not started; a later run continues with it."""
    measured = []

    def measure(regime, lost, announce):
        measured.append(regime.seqlen)
        clock[0] += 10 * len(measured)
        return record(regime, {"slow": 1.0, "fast": 2.0}, other="not installed")

    regimes = [gpu.Regime("bfloat16", 64, seqlen, True) for seqlen in (1, 2, 3, 4)]
    words = (regimes, measure, 44, tmp_path / "x.json", ["python -m bench", "forward", "--gpu"])
    assert gpu.run(*words) == 3 and measured == [1, 2]  # 14 of 44 s are left, and the next regime may take 15 s
    told, complaint = capsys.readouterr()
    assert complaint == "out of time: 2 regimes are left, run again to resume\n"
    assert told.index("2.0 TFLOP/s, 1.000 ms: fast") < told.index("1.0 TFLOP/s, 1.000 ms: slow")
    assert "left out other: not installed" in told and "3 regimes are left, about 30 s" in told
    assert gpu.run(*words[:2], 1000, *words[3:]) == 0 and measured == [1, 2, 3, 4]
    stored = json.loads((tmp_path / "x.json").read_text())
    assert stored["command"] == "python -m bench forward --gpu"
    # the worker that measured a case has also measured the matmul
    assert [case["matmul_tflops"] for case in stored["cases"]] == [700] * 4
    assert stored["device"]["multiprocessors"] == 132


def test_a_kind_that_crashes_its_process_is_skipped(tmp_path, clock):
    """A kernel that crashes its process is skipped for the regime, and after two regimes for the whole run.

    A resumed run skips it too. A process that is lost before any call skips only the regime.
    """
    tried = []

    def measure(regime, lost, announce):
        if regime.seqlen == 7:
            raise Lost("inputs", "RuntimeError: no memory")
        tflops, left_out = {"tile 64 True": 1.0}, {}
        for name in ("tile 128 False", "tile 64 False"):
            if gpu.kind(name) in lost:
                left_out[name] = lost[gpu.kind(name)]
                continue
            tried.append((regime.seqlen, name))
            raise Lost(name, "timed out after 20 s")
        return record(regime, tflops, **left_out)

    regimes = [gpu.Regime("bfloat16", 64, seqlen, True) for seqlen in (1, 7, 2, 3, 4)]
    words = (measure, 1000, tmp_path / "x.json", ["python -m bench"])
    assert gpu.run(regimes[:3], *words) == 0 and tried == [(1, "tile 128 False"), (2, "tile 128 False")]
    assert gpu.run(regimes, *words) == 0 and len(tried) == 2
    stored = json.loads((tmp_path / "x.json").read_text())
    first, none, *others = stored["cases"]
    told = "tile 128 False timed out after 20 s (forward bfloat16, D 64, causal, 1)"
    assert first["left_out"] == {"tile 128 False": told, "tile 64 False": told} and first["tflops"]
    assert none["tflops"] == {} and none["left_out"]["inputs"] == "RuntimeError: no memory"
    assert [len(case["tflops"]) for case in others] == [1, 1, 1]
    assert [loss["name"] for loss in stored["losses"]] == ["tile 128 False", "inputs", "tile 128 False"]


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("dtype, other", [("bfloat16", "SDPA flash"), ("float32", "SDPA math")])
def test_others_compute_the_same(dtype, other, backward, monkeypatch):
    """Other implementations compute the same attention on the same inputs in every call; here they run on a CPU."""
    monkeypatch.setattr(gpu, "DEVICE", "cpu")
    regime = gpu.Regime(dtype, 64, 48, True, backward, tokens=96)
    given = gpu.inputs(regime)
    others, ours = gpu.others(regime, given), gpu.ours(regime, given)
    assert other in others and "FlexAttention" in others
    for _ in range(2):
        expected, actual = others[other](), ours["cupy_flash"]()
        pairs = zip(expected, actual, strict=True) if backward else [(expected, actual)]
        for a, b in pairs:
            torch.testing.assert_close(a, b, atol=0.03, rtol=0.03)
    for words in (dict(dtype="float8_e4m3fn"), dict(deterministic=True)):
        assert gpu.others(regime._replace(**words), given) == {}


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_flex_attention_computes_the_same(causal, monkeypatch):
    """FlexAttention computes the same attention; here it runs without its compiler."""
    compile = torch.compile
    monkeypatch.setattr(
        torch, "compile", lambda function, **options: compile(function, **options | {"backend": "eager"})
    )
    monkeypatch.setattr(gpu, "DEVICE", "cpu")
    regime = gpu.Regime("float32", 64, 48, causal, tokens=96)
    calls = gpu.others(regime, gpu.inputs(regime))
    for _ in range(2):
        torch.testing.assert_close(calls["FlexAttention"](), calls["SDPA math"](), atol=1e-4, rtol=1e-4)


def measure_patiently(measure_one, regime, lost, announce):
    """Call gpu.measure_with_matmul without time limits."""
    return gpu.measure_with_matmul(measure_one, regime, lost, patiently(announce))


def test_a_sweep_survives_a_process_without_a_gpu(tmp_path, monkeypatch):
    """A sweep goes on if its worker process finds no GPU."""
    give_workers_time(monkeypatch)
    monkeypatch.setattr(gpu, "measure_with_matmul", measure_patiently)
    card = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    monkeypatch.setattr("bench.results.gpu_name", lambda: "a large GPU")
    regimes = [gpu.Regime("bfloat16", 64, 1024, True)]
    assert gpu.run(regimes, sweep.measure_tiles, FOREVER, tmp_path / "x.json", ["python -m bench"]) == 0
    (case,) = json.loads((tmp_path / "x.json").read_text())["cases"]
    assert case["tflops"] == {} and list(case["left_out"]) == ["torch.matmul"]
    assert re.match(r"AssertionError|RuntimeError", case["left_out"]["torch.matmul"])
    (table,) = sweep.tables([case])
    assert set(table.rows[0][3:]) == {"-", "265"}  # the published value


def test_a_lost_gpu_is_distinguished_from_a_refusal(monkeypatch):
    """After a refusal the process measures the other calls. A fault, which every later CUDA call would raise again,
    ends the measurement, and the last announced step names the faulty call.
    """
    faulty, steps = [False], []

    def refuse():
        raise RuntimeError("not for these heads")

    def fault():
        faulty[0] = True

    def synchronize():
        if faulty[0]:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    monkeypatch.setattr(gpu, "time_interleaved", lambda calls, announce: {name: [1.0] for name in calls})
    regime, announce = gpu.Regime("bfloat16", 64, 16, True, tokens=16), lambda step, seconds: steps.append(step)
    calls = {"refuses": refuse, "serves": lambda: None}
    case = gpu.measure(regime, calls, {}, announce)
    assert case["left_out"] == {"refuses": "RuntimeError: not for these heads"} and list(case["tflops"]) == ["serves"]
    with pytest.raises(RuntimeError, match="illegal memory access"):
        gpu.measure(regime, {"faults 1": fault} | calls, {}, announce)
    assert steps[-1] == "faults 1"
    faulty[0] = False
    case = gpu.measure(regime, {"faults 2": fault} | calls, {"faults ": "as before"}, announce)
    assert case["left_out"]["faults 2"] == "as before" and list(case["tflops"]) == ["serves"]


def test_clock_and_power_of_the_samples():
    state = gpu.summary(
        ["1980, 612.25\n", "1755, 698.50\n", "1800, [N/A]\n", "1830, 650.00\n", "18", "Unknown, Error\n"]
    )
    assert state["samples"] == 3
    assert state["sm_clock_mhz"] == {"median": 1830, "least": 1755, "most": 1980}
    assert state["power_w"]["median"] == 650
    assert gpu.summary([]) == {"samples": 0}


def kernels_of_derivatives(case, call=None):
    """Return the kernels of a JVP and of a double backward with the same tangents."""
    kernels, call = set(), call or case.call()
    out, lse = np.zeros((*call.q.shape[:-1], call.v.shape[-1]), call.q.dtype), np.zeros_like(call.dlse)
    options = Options(**call.options | mods_of(case), backend="simulator")
    for saved in (None, Saved(call.dout, out, lse, call.dlse)):
        tangents = Tangents(*derivatives.direction_of(case, call))
        problem, _ = pose("case", call[:3], options, call.packed, saved, tangents=tangents)
        kernels |= {launch.kernel for launch in plan(problem, device.named("sm_90a")).launches}
    return kernels


def kernels_of_weights(case):
    """Return the kernels of attention_weights, top_weights and key_importance."""
    call = case.call()
    lse, options = np.zeros_like(call.dlse), Options(**call.options, backend="simulator")
    posed = (pose_weights(kind, (call.q, call.k, lse), options, Wish(kind, n=3)) for kind in (WEIGHTS, TOP, IMPORTANCE))
    return {launch.kernel for problem, *_ in posed for launch in plan(problem, device.named("sm_90a")).launches}


def kernels_of_indexer(arrays, options, lists):
    """Return the kernels of select_keys, or of selection_loss and its gradients if there are no lists."""
    names = ("q", "weights", "k", *(() if lists is not None else ("selected", "target", "row_weights")))
    given = dict(zip(names, arrays, strict=True))
    given |= {name: x for name, x in options.items() if isinstance(x, np.ndarray)}
    rule = None if lists is None else Rule(options["n"], block=options.get("block", 1))
    function = "gradients" if lists is None else "select"
    posed = pose_indexer(function, given, rule)
    return {launch.kernel for launch in requested(function, *posed, device.named("sm_90a"))[0]}


def test_sanitized_calls_start_every_kernel():
    """The calls also cover every kind of wgmma tile.

    Calls in fp8 are rows of the fp8 tests, and `sanitize._block_mask` runs the kernel block_classes.
    """
    kernels, constants = set(), set()
    every_call = [
        (case, case.call(), dict(engine=engine, **words), tile)
        for engine in sanitize.DTYPES
        for _, case, words, tile in sanitize.calls(engine)
    ]
    every_call += [(case, call, words, None) for _, case, call, words in sanitize.selected_calls()]
    for case, call, words, tile in every_call:
        arch = "sm_100a" if words["engine"] == "tcgen05" else "sm_90a"
        out, lse = np.zeros((*call.q.shape[:-1], call.v.shape[-1]), call.q.dtype), np.zeros_like(call.dlse)
        for saved in (None, Saved(call.dout, out, lse, call.dlse)):
            chosen, _ = planned(case, saved, arch, tile, call, **words)
            kernels |= {launch.kernel for launch in chosen.launches}
            constants |= {pair for launch in chosen.launches for pair in launch.constants}
    folder = ROOT / "kernels_cu"
    every = {str(path.relative_to(folder).with_suffix("")) for path in folder.rglob("*.cu")}
    of_caches = {
        launch.kernel
        for case in sanitize.CACHES.values()
        for launch in dispatch.plan_for(posed(case.call(), backend="simulator")[0]).launches
    }
    of_caches |= {
        launch.kernel
        for case in sanitize.CACHES.values()
        for _, chosen, _ in sanitize.forms_of(case, case.call(), backend="simulator:sm_90a")
        for launch in chosen.launches
    }
    shared, _ = shared_prefixes.calls(*sanitize.PREFIXES, dtype="float16", backend="simulator")
    of_caches |= {launch.kernel for launch in dispatch.plan_for(posed(shared)[0]).launches}
    assert of_caches == {
        "rotary_append", "prefix_rows", "mma/decode", "wgmma/latent_decode", "merge", "mma/latent_forward"
    }  # fmt: skip
    of_derivatives = set().union(
        *map(kernels_of_derivatives, sanitize.DERIVATIVES.values()),
        *(kernels_of_derivatives(*sanitize.selected_cases.call_of(name)) for name in sanitize.SELECTED),
    )
    assert {"simt/jvp", "mma/jvp", "simt/second_captured", "mma/second_kv"} <= of_derivatives
    assert {"simt/selected_jvp", "simt/selected_second_q", "simt/selected_second_kv"} <= of_derivatives
    others = {"partials", "block_classes", "wgmma/forward_fp8", "wgmma/vt"}
    # drow_weights follows the launches of a plan if there are row weights, which a plan does not know.
    of_rows = set().union({"drow_weights"}, *map(kernels_of_weights, sanitize.ROWS.values()))
    of_indexer = set().union(*(kernels_of_indexer(*call) for _, *call in sanitize.indexer_calls()))
    assert {"simt/select_keys", "mma/select_keys", "indexer/merge_parts", "indexer/loss_k"} <= of_indexer
    assert kernels == every - of_caches - (of_derivatives - kernels) - of_rows - (of_indexer - kernels) - others
    assert {
        (name, True) for name in ("PERSISTENT", "PINGPONG", "KV_MULTICAST", "DQ_IN_BULK", "DQ_IN_ORDER")
    } <= constants
    assert set(sanitize.FP8) <= set(fp8_cases.OPTIONS)


def test_a_sanitized_call_runs_on_the_engine_that_it_names():
    call = Case().call()
    call.options.update(engine="none")
    with pytest.raises(ValueError, match="engine must be"):
        run_public(Case(), "simulator", call)


# Files with lines that only run on a GPU.
ONLY_ON_A_GPU = [
    *(ROOT / "tests" / "gpu").glob("*.py"),
    *(ROOT / "tests" / "helpers" / name for name in ("on_gpu.py", "fp8_on_gpu.py", "sanitize.py")),
    ROOT / "tests" / "conformance" / "on_gpu.py",
    *(ROOT / "cupy_flash" / name for name in ("arrays.py", "device.py", "gpu/ahead.py", "gpu/cuda.py")),
]


def names_of(library, text):
    """Yield each dotted name of a library in Python source: cuda.Stream for torch.cuda.Stream().cuda_stream."""
    for node in ast.walk(ast.parse(text)):
        words = []
        while isinstance(node, ast.Attribute):
            words.append(node.attr)
            node = node.value
        if words and isinstance(node, ast.Name) and node.id == library:
            yield ".".join(reversed(words))


@pytest.mark.parametrize("library", ["torch", *(["cupy"] if importlib.util.find_spec("cupy") else [])])
def test_names_used_only_on_a_gpu_exist(library):
    module = importlib.import_module(library)
    names = {name for path in ONLY_ON_A_GPU for name in names_of(library, path.read_text())}
    assert {"torch": "cuda.CUDAGraph", "cupy": "cuda.MemoryPool"}[library] in names
    for name in sorted(names):
        reduce(getattr, name.split("."), module)


def test_a_process_that_lost_its_gpu_ends(monkeypatch):
    class CUDARuntimeError(RuntimeError):
        pass

    def synchronize():
        raise CUDARuntimeError("an illegal memory access was encountered")

    runtime = SimpleNamespace(CUDARuntimeError=CUDARuntimeError, deviceSynchronize=synchronize)
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=SimpleNamespace(runtime=runtime)))
    left = []
    monkeypatch.setattr(os, "_exit", left.append)
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    with pytest.raises(CUDARuntimeError):  # outside a process of xdist the error is raised
        gpu_backend.leave_a_lost_gpu()
    monkeypatch.setenv("PYTEST_XDIST_WORKER", "gw3")
    with pytest.raises(CUDARuntimeError):
        gpu_backend.leave_a_lost_gpu()
    assert left == [1]
