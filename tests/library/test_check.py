"""cupy_flash check: a wrong, hanging or crashing kernel is named and disqualifies its engine, but no other engine."""

import errno
import functools
import json
import os
import signal
from dataclasses import replace

import numpy as np
import pytest
from cuda import pathfinder
from forget import forget_plans
from patience import FOREVER, give_workers_time, patiently
from planting import before, change, planted
from tiers import exhaustive

import cupy_flash
from cupy_flash.__main__ import main
from cupy_flash.device import named
from cupy_flash.engines import MODULES
from cupy_flash.jit import kernel_cache, nvrtc
from cupy_flash.measure.checks import calls, verdicts
from cupy_flash.measure.checks.calls import trials
from cupy_flash.measure.checks.verdicts import run_check
from cupy_flash.plan import measurements
from cupy_flash.problem.recorded_call import Trial
from cupy_flash.problem.records import FEATURES, FP8, UnsupportedError

SMALL = Trial("float32", 16, q_len=8, kv_len=8, heads=1, backward=False)
HALF = Trial("float16", 16, q_len=8, kv_len=8, heads=1, backward=False)
DECODE = Trial("float16", 16, kv_len=48, heads=1, q_len=1, causal=True, backward=False)
CASES = {"simt": [SMALL], "mma": [HALF], "mma_decode": [], "wgmma": [], "tcgen05": []}
WITHOUT_CACHE = [engine for engine in CASES if MODULES[engine].OPTIONS is not None]
ARCHES = {"simt": "sm_90a", "mma": "sm_90a", "wgmma": "sm_90a", "tcgen05": "sm_100a"}


@pytest.fixture(autouse=True)
def small(tmp_path, monkeypatch):
    """Run one small call per engine, with a new evidence folder, the shared kernel cache, and workers without time
    limits.
    """
    kernel_folder = os.environ["CUPY_FLASH_CACHE_DIR"]
    monkeypatch.setattr(measurements, "FOLDER", os.path.relpath(tmp_path / "evidence", kernel_folder))
    monkeypatch.setattr(verdicts, "trials", lambda engine, *_: CASES[engine])
    give_workers_time(monkeypatch)
    forget_plans()
    yield
    monkeypatch.undo()
    forget_plans()


def work_with(bug, task, announce):
    """Do the work of a check in a worker process, with a bug in the kernels."""
    with planted(pytest.MonkeyPatch(), bug):
        return calls.work(task, announce)


def wrong(task, announce):
    return work_with(change("store-O-row", "softmax", "1.01f * softmax"), task, patiently(announce))


def wrong_decode(task, announce):
    return work_with(change("normalise-O", "ending.factor", "1.01f * ending.factor"), task, patiently(announce))


def wrong_in_clusters(task, announce):
    return work_with(change("part-of-rank", "c)}; }", "0)}; }"), task, patiently(announce))


def hangs(task, announce):
    """Do the work of a check in which the simt kernel loops for ever; only the step that runs it has a time limit."""

    def limited(step, seconds):
        announce(step, 1.0 if step == task.name and task.engine == "simt" else FOREVER)

    return work_with(before("store-O-row", 'while (true) asm volatile("");'), task, limited)


def crashes(task, announce):
    if task.engine == "simt":
        announce(task.name, FOREVER)
        os._exit(9)
    return calls.work(task, patiently(announce))


def rejected(task, announce):
    return work_with(before("store-O-row", "this is no C++;"), task, patiently(announce))


def obstructed(task, announce, obstruct):
    """Pass simt without running it, and call `obstruct` in the step that would run mma."""
    announce(task.name, FOREVER)
    if task.kind == "device":
        return calls.work(task, patiently(announce))
    return obstruct() if task.engine == "mma" else None


def without_nvrtc(task, announce):
    def find(name):
        raise pathfinder.DynamicLibNotFoundError(name)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pathfinder, "load_nvidia_dynamic_lib", find)
        return obstructed(task, announce, lambda: nvrtc.library.__wrapped__())


def with_an_old_nvrtc(task, announce):
    return obstructed(task, announce, lambda: kernel_cache.compiled("", "mma/forward", "sm_20"))


def without_memory(task, announce):
    return obstructed(task, announce, lambda: bytearray(1 << 62))


def on_a_full_disk(task, announce):
    def write():
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    return obstructed(task, announce, write)


def interrupted(task, announce):
    signal.signal(signal.SIGINT, signal.default_int_handler)
    return obstructed(task, announce, lambda: signal.raise_signal(signal.SIGINT))


def killed(task, announce):
    return obstructed(task, announce, lambda: os.kill(os.getpid(), signal.SIGKILL))


def explained(engine=None):
    x = np.zeros((1, 8, 1, 16), np.float32)
    return cupy_flash.explain(x, x, x, backend="simulator", engine=engine)


@pytest.mark.parametrize(
    ("work", "verdict", "words"),
    [
        pytest.param(wrong, "wrong", "out: error ", id="wrong"),
        pytest.param(hangs, "lost", "timed out after 1 s", id="hangs"),
        pytest.param(crashes, "lost", "process exited with status 9", id="crashes"),
        pytest.param(rejected, "lost", "CompileError: NVRTC ", id="rejected", marks=pytest.mark.exhaustive),
    ],
)
def test_a_kernel_that_fails_disqualifies_its_engine_alone(work, verdict, words):
    report = []
    result = run_check("simulator", None, False, report.append, work)
    assert {row.engine: row.verdict for row in result.rows} == {"simt": verdict, "mma": "passed"}
    assert not result.passed and result.engines["mma"] is None and words in result.engines["simt"]
    assert str(SMALL) in result.engines["simt"]  # the failed case is named
    assert set(result.refused) == {"wgmma", "tcgen05"}
    assert all("sm_80 lacks the instructions" in reason for reason in result.refused.values())
    assert f"simt              1      0  FAILED: {result.engines['simt']}" in str(result)
    assert report[0].startswith(f"1/2 simt: {SMALL}: {verdict}, ") and report[1].startswith("2/2 mma: ")

    stored = measurements.check_of("simt", named("sm_80"))
    assert not stored.passed and words in stored.reason and measurements.check_of("mma", named("sm_80")).passed
    (case,) = json.loads(stored.path.read_text())["cases"]
    assert Trial.of(case["trial"]) == SMALL  # the record reproduces the case
    with pytest.raises(UnsupportedError, match="simt: its check failed on simulator"):
        explained()
    assert "checked    simt failed" in explained("simt")  # an engine that is requested explicitly runs all the same


OBSTACLES = {
    "without-nvrtc": (without_nvrtc, 1, f"{HALF}: ImportError: {nvrtc.MISSING}"),
    "old-nvrtc": (with_an_old_nvrtc, 1, "nvrtc: error: invalid value for --gpu-architecture"),
    "no-memory": (without_memory, 1, f"{HALF}: MemoryError"),
    "full-disk": (on_a_full_disk, 1, f"{HALF}: OSError: [Errno {errno.ENOSPC}] {os.strerror(errno.ENOSPC)}"),
    "interrupt": (interrupted, 130, "interrupted"),
    "killed-twice": (killed, 1, f"{HALF}: process was killed twice, now by SIGKILL"),
}


def test_checks_of_tensor_memory_are_compiled_in_the_worker_process(monkeypatch):
    monkeypatch.setattr(nvrtc, "checks_tensor_memory", False)
    plain = nvrtc.flags("sm_100a")
    calls.work_with_tensor_memory_checks(calls.Task("device", "simulator:sm_100a"), lambda *_: None)
    assert nvrtc.flags("sm_100a") == (*plain, "--ptxas-options=--g-tensor-memory-access-check")
    assert "--ptxas-options=--g-tensor-memory-access-check" not in nvrtc.flags("sm_90a") + nvrtc.flags("compute_100a")


@pytest.mark.exhaustive
def test_a_check_of_tensor_memory_that_passes_is_no_evidence():
    assert main(["check", "--backend", "simulator:sm_80", "--engine", "simt", "--tensor-memory"]) == 0
    assert measurements.check_of("simt", named("sm_80")) is None


@pytest.mark.parametrize(("work", "status", "message"), OBSTACLES.values(), ids=OBSTACLES)
def test_what_is_not_the_engine_s_fault_stores_no_verdict(work, status, message, tmp_path, monkeypatch, capsys):
    """No verdict is stored even about simt, which passes before the obstacle occurs."""
    monkeypatch.setattr(calls, "work", work)
    assert main(["check", "--backend", "simulator:sm_80"]) == status
    printed = capsys.readouterr()
    assert message in printed.err and "no verdict is stored" in printed.err and printed.out == ""
    assert f"1/2 simt: {SMALL}: passed" in printed.err
    assert not list(tmp_path.rglob("*.json"))


@pytest.mark.parametrize(("fails_at", "cases"), [("space", 0), ("check.mma.json", 2)])
def test_a_full_disk_stores_no_verdict_at_all(fails_at, cases, tmp_path, monkeypatch, capsys):
    """A disk that is full before the check is found before the work."""
    write = kernel_cache.write

    def full(path, content, mode):
        if path.name == fails_at:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        write(path, content, mode)

    monkeypatch.setattr(kernel_cache, "write", full)
    monkeypatch.setattr(calls, "work", functools.partial(obstructed, obstruct=type(None)))
    assert main(["check", "--backend", "simulator:sm_80"]) == 1
    printed = capsys.readouterr()
    assert f"the results cannot be stored: [Errno {errno.ENOSPC}] {os.strerror(errno.ENOSPC)}" in printed.err
    assert printed.err.count(": passed") == cases and "no verdict is stored" in printed.err
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_a_passed_check_is_evidence_and_a_quick_one_is_not():
    result = run_check("simulator:sm_80", "simt", True, lambda line: None, calls.work)
    assert result.passed and measurements.check_of("simt", named("sm_80")) is None
    assert "checked    simt not yet on simulator" in explained()
    assert run_check("simulator:sm_80", "simt", False, lambda line: None, calls.work).passed
    assert measurements.check_of("simt", named("sm_80")).passed and "checked    simt passed" in explained()


@pytest.mark.exhaustive
def test_an_engine_of_kv_caches(monkeypatch):
    """A check of mma_decode covers contiguous and paged caches; the planted bug changes a factor of the softmax."""
    monkeypatch.setitem(CASES, "mma_decode", [DECODE])
    assert run_check("simulator", "mma_decode", False, lambda line: None, calls.work).passed
    assert measurements.check_of("mma_decode", named("sm_80")).passed
    result = run_check("simulator", "mma_decode", False, lambda line: None, wrong_decode)
    assert "contiguous cache, out: error" in result.engines["mma_decode"]


@pytest.mark.exhaustive
def test_forms_of_a_decode_that_only_a_tune_chooses(monkeypatch):
    """The planted bug is in the merge of a cluster, which other forms do not have."""
    monkeypatch.setitem(CASES, "mma_decode", [replace(DECODE, head_dim=64, kv_len=1100)])
    check = functools.partial(run_check, "simulator:sm_90a", "mma_decode", True, lambda line: None)
    assert check(calls.work).passed
    assert "contiguous cache, clusters of" in check(wrong_in_clusters).engines["mma_decode"]


@pytest.mark.parametrize(
    ("bug", "words"),
    [
        (change("load-panel", "current", "block"), "contiguous cache, producer warp, out: error"),
        exhaustive((), None),
    ],
    ids=["planted", "none"],
)
def test_values_inside_keys_on_two_warpgroups(bug, words, monkeypatch):
    """A check of few queries also runs the form for wgmma, whose tiles have more rows than the planned one."""
    latent = replace(DECODE, head_dim=160, head_dim_v=128, kv_len=144, shared_kv=True)
    task = calls.Task("KV cache", "simulator:sm_90a", "mma_decode", latent)
    with planted(monkeypatch, bug):
        wrong = calls.work(task, lambda step, seconds: None)
    assert wrong is None if words is None else wrong.startswith(words)


@pytest.mark.exhaustive
def test_an_engine_that_loses_two_workers_is_not_run_again(monkeypatch):
    many = [SMALL, *(Trial("float32", 16, q_len=n, kv_len=8, heads=1, backward=False) for n in (9, 10, 11))]
    monkeypatch.setattr(verdicts, "trials", lambda engine, *_: many)
    result = run_check("simulator", "simt", False, lambda line: None, crashes)
    assert [row.verdict for row in result.rows] == ["lost", "lost", "not run", "not run"]


def test_the_command(capsys):
    assert main(["check", "--backend", "simulator:sm_80", "--engine", "simt", "--quick"]) == 0
    printed = capsys.readouterr()
    assert "simt              1      1  passed" in printed.out and "1/1 simt: float32" in printed.err


def test_the_command_in_json(monkeypatch, capsys):
    monkeypatch.setattr(calls, "work", wrong)
    assert main(["check", "--backend", "simulator:sm_80", "--engine", "simt", "--quick", "--json"]) == 1
    result = json.loads(capsys.readouterr().out)
    assert result["passed"] is False and "out: error" in result["engines"]["simt"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--backend", "cpu"], 'backend must be "cuda" or "simulator:ARCH", not \'cpu\''),
        (["--backend", "simulator:sm_1"], "unknown GPU architecture 'sm_1'"),
    ],
)
def test_a_backend_without_kernels(arguments, message, capsys):
    assert main(["check", *arguments]) == 1
    assert message in capsys.readouterr().err


def test_an_engine_that_refuses_the_card_has_not_passed(capsys):
    assert main(["check", "--backend", "simulator:sm_80", "--engine", "wgmma", "--quick"]) == 1
    assert "wgmma             -      -  sm_80 lacks the instructions of sm_90a" in capsys.readouterr().out


def test_verdicts_that_cannot_be_stored_run_no_checks(tmp_path, monkeypatch):
    tmp_path.chmod(0o777)
    monkeypatch.setenv("CUPY_FLASH_CACHE_DIR", str(tmp_path))
    report = []
    with pytest.raises(OSError, match="the results cannot be stored: .* can be written by other users"):
        run_check("simulator", "simt", False, report.append, calls.work)
    assert report == []


@pytest.mark.parametrize("backend", [None, 5])
def test_a_backend_that_is_not_a_string(backend):
    with pytest.raises(TypeError, match=f'backend must be "cuda" or "simulator:ARCH", not {backend}'):
        cupy_flash.check(backend=backend)


def test_without_a_gpu_the_error_names_the_simulator(monkeypatch):
    def none(arch):
        raise RuntimeError('name one, as in arch="sm_90a"') from ImportError("No module named 'cupy'")

    monkeypatch.setattr(calls.ahead, "device_for", none)
    with pytest.raises(RuntimeError, match="there is no GPU that CuPy can use") as caught:
        calls.find_device(calls.Task("device", "cuda"), lambda step, seconds: None)
    assert "arch=" not in str(caught.value)


def test_an_unknown_engine():
    with pytest.raises(ValueError, match="engine must be one of simt, mma, mma_decode, wgmma, tcgen05, not 'cpu'"):
        cupy_flash.check(backend="simulator", engine="cpu")


# ---- the covering set


@pytest.mark.parametrize("engine", WITHOUT_CACHE)
def test_every_option_dtype_and_head_dimension_is_covered(engine):
    options = {feature.name for feature in FEATURES if feature.constant} - {"score_mod", "mask_mod"}
    for simulated in (False, True):
        covering, module = trials(engine, named(ARCHES[engine]), simulated, quick=False), MODULES[engine]
        assert {name for trial in covering for name in trial.options} >= options
        assert {trial.dtype for trial in covering} >= {x for x in module.DTYPES if simulated or x != FP8}
        assert {(trial.head_dim, trial.head_dim_v or trial.head_dim) for trial in covering} >= set(module.HEAD_DIMS)
        assert {True, "top_left", False} <= {trial.causal for trial in covering}
        assert any(trial.packed for trial in covering) and any(trial.deterministic for trial in covering)
        assert any(trial.shared_kv for trial in covering)
        assert len(trials(engine, named(ARCHES[engine]), simulated, quick=True)) == 1
    assert "bfloat16" not in {trial.dtype for trial in trials("mma", named("sm_75"), False, False)}
    decodes = trials("mma_decode", named("sm_75"), False, False)
    assert max(trial.head_dim for trial in decodes if not trial.shared_kv) == 128
    assert [(trial.head_dim, trial.head_dim_v) for trial in decodes if trial.shared_kv] == [(576, 512)]


@pytest.mark.parametrize("engine", WITHOUT_CACHE)
def test_no_case_of_the_covering_set_is_refused(engine):
    """On a real GPU a refusal would be reported as a failure. Plans show refusals without a GPU."""
    arch = ARCHES[engine] if MODULES[engine].ARCHES else "sm_80"
    for simulated in (False, True):
        for trial in trials(engine, named(arch), simulated, quick=False):
            task = calls.Task("call", f"simulator:{arch}", engine, trial)
            calls.chosen_plans(task, trial.call())


def test_trials_survive_json():
    for trial in trials("wgmma", named("sm_90a"), True, False):
        assert Trial.of(json.loads(json.dumps(trial.record))) == trial
    with pytest.raises(ValueError, match="heads 3 must be a multiple of kv_heads 2"):
        Trial.of(dict(heads=3, kv_heads=2))
    with pytest.raises(ValueError, match="dtype 'int8' is not one of.*; q_len must be a whole number.*'x'"):
        Trial.of(dict(dtype="int8", q_len="x"))
    wrong = dict(dtype="int8", shared_kv=True, head_dim_v=65, options=["v_descale"])
    reasons = "dtype 'int8' is not one of.*; with shared_kv, head_dim_v 65 must be at most head_dim 64; v_descale is"
    with pytest.raises(ValueError, match=reasons):
        Trial.of(wrong)
