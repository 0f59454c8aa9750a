"""The command line: the output of explain, ptx, compile and info; every error is one line without a traceback."""

import argparse
import re
import subprocess
import sys

import numpy as np
import pytest

import cupy_flash
from cupy_flash import device
from cupy_flash.__main__ import main
from cupy_flash.commands import compile as compile_command
from cupy_flash.commands import info
from cupy_flash.commands.problem_arguments import add_problem, plans
from cupy_flash.engines import MODULES
from cupy_flash.gpu import ahead
from cupy_flash.plan.plan import plan
from cupy_flash.problem.features import ARRAY, MOD
from cupy_flash.problem.records import FEATURES

TINY = ["--arch", "sm_75", "--dtype", "float32", "--head-dim", "8"]


def run(capsys, *arguments):
    """Return the output of a command."""
    assert main(arguments) == 0
    return capsys.readouterr().out


def explained(capsys, *arguments):
    """Return the output of the command explain, a line per fact, with one space after its label."""
    return spaced(re.sub(r"\n +", " ", run(capsys, "explain", *arguments)))


def spaced(text):
    return re.sub(" +", " ", text)


def status_of(arguments):
    """Return the exit status of a command, also if its arguments cannot be parsed."""
    try:
        return main(arguments)
    except SystemExit as stop:
        return stop.code


def test_version(capsys):
    assert status_of(["--version"]) == 0
    assert capsys.readouterr().out == f"cupy_flash {cupy_flash.__version__}\n"


# Explain


def test_explain_prints_the_plan_of_an_absent_gpu(capsys):
    sizes = ["--head-dim", "128", "--seqlen", "4096", "--batch", "2", "--heads", "16", "--group", "4"]
    printed = explained(capsys, "--arch", "sm_90a", "--dtype", "bfloat16", *sizes, "--causal")
    forward, backward = printed.split("\n\n")
    assert "forward, bfloat16 bshd" in forward and "backward, bfloat16 bshd" in backward
    assert "batch 2, 4096 queries x 4096 keys, 16 query and 4 key/value heads, D 128; causal (bottom-right)" in forward
    assert "on cuda (sm_90a, 132 multiprocessors)" in forward and "grid 32 x 16 x 2" in forward
    assert all(f"not {engine} " in forward for engine in MODULES if f"engine {engine} " not in forward)
    problem = ahead.problems(dtype="bfloat16", head_dim=128, group=4, causal=True)[0]
    problem = problem._replace(batch=2, heads=16, whole_heads=16, kv_heads=4, q_len=4096, kv_len=4096)
    assert forward == spaced(plan(problem, device.named("sm_90a", "cuda")).explain())


def test_explain_uses_the_requested_engine(capsys):
    words = ["--arch", "sm_90a", "--head-dim", "128", "--engine", "wgmma", "--no-backward"]
    printed = explained(capsys, *words, "--seqlen", "100", "--seqlen-k", "3000")
    assert "engine wgmma on cuda (sm_90a" in printed and "100 queries x 3000 keys" in printed
    assert "backward" not in printed


def test_options_are_those_of_features():
    """The command line has every option for which kernels are compiled, with every kind of value."""
    parser = argparse.ArgumentParser()
    add_problem(parser)
    parsed = vars(parser.parse_args(["--head-dim", "8"]))
    # functions have no command-line form
    compiled = [feature for feature in FEATURES if feature.constant and feature.kind != MOD]
    assert {"causal", "window", "deterministic", "return_lse", "engine"} <= parsed.keys()
    assert {feature.name for feature in compiled} <= parsed.keys()
    assert all(parsed[feature.name] == feature.default for feature in compiled)
    for feature in compiled:
        flag = f"--{feature.name.replace('_', '-')}"
        given = vars(parser.parse_args(["--head-dim", "8", flag]))[feature.name]
        assert given is True if feature.kind == ARRAY else given == feature.example


@pytest.mark.parametrize(
    "words, text",
    [
        (["--causal", "top_left"], "causal (top-left)"),
        (["--window", "-1", "3"], "window"),
        (["--softcap", "30"], "softcap 30"),
        (["--dropout", "0.25"], "dropout 0.25"),
        (["--bias", "float32"], "bias (1,)"),
        (["--sink", "--kv-lengths"], "sink, kv_lengths"),
        (["--packed", "--deterministic"], "packed, up to 64 queries"),
    ],
)
def test_explain_takes_the_options(words, text, capsys):
    sizes = ["--arch", "sm_80", "--head-dim", "64", "--seqlen", "64"]
    assert text in explained(capsys, *sizes, *words)


def test_lengths_beyond_any_array_are_planned():
    (forward,) = plans("sm_80", 1, None, 2**30, None, dtype="float16", head_dim=64, group=8, backward=False)
    assert forward.problem.heads == 256 and forward.problem.q_len == forward.problem.kv_len == 2**30


# PTX


def test_ptx_is_printed_for_each_kernel_of_the_plan(capsys):
    printed = run(capsys, "ptx", *TINY, "--seqlen", "64", "--no-backward", "--causal")
    assert printed.startswith("// 1/1 simt/forward\n")
    assert ".target sm_75" in printed and ".visible .entry forward(" in printed


def test_ptx_is_written(tmp_path, capsys):
    folder = tmp_path / "new" / "folder"
    printed = run(capsys, "ptx", *TINY, "--seqlen", "64", "--out", str(folder)).splitlines()
    names = [path.name for path in sorted(folder.iterdir())]
    assert names == ["1.simt.forward.ptx", "2.delta.ptx", "3.simt.backward_kv.ptx", "4.simt.backward_q.ptx"]
    assert printed == [str(folder / name) for name in names]
    assert all(".entry" in (folder / name).read_text() for name in names)


@pytest.mark.usefixtures("flags_of_users")
def test_the_evidence_of_each_instruction_is_printed(capsys):
    printed = run(capsys, "ptx", *TINY, "--seqlen", "64", "--no-backward", "--evidence").splitlines()
    assert printed[0].split() == ["instruction", "other", "kernel", "micro-kernel"]
    assert printed[-1] == f"{len(printed) - 2} forms, 0 confirmed by nobody"
    rows = {row.split()[0]: row.split()[1:] for row in printed[1:-1]}
    assert rows["fma.rn.f32"][1] == "fma.rn.f32" and len(rows) == len(printed) - 2


def test_a_closed_pipe_is_no_error():
    command = [sys.executable, "-m", "cupy_flash", "ptx", *TINY, "--seqlen", "64", "--no-backward"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait() == 1


# Compile


def test_compile_for_an_engine(capsys):
    words = ["--arch", "sm_75", "--dtype", "float16", "--head-dim", "8", "--engine", "simt", "--no-backward"]
    lines = run(capsys, "compile", *words, "--jobs", "2").splitlines()
    assert lines[0].startswith(f"1/{len(lines) - 1} simt/forward") and "mma/" not in "".join(lines)


def test_compile_with_a_progress_bar(capsys, monkeypatch):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    with compile_command.progress(2) as report:
        report("1/2 [kernel]")
    assert "1/2 [kernel]" in capsys.readouterr().out


def test_compile_without_rich(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "rich.progress", None)
    with compile_command.progress(2) as report:
        report("1/2 kernel")
    assert capsys.readouterr().out == "1/2 kernel\n"


def test_compile_ends_at_the_first_error(capsys, monkeypatch):
    started = []

    def fail(launch, target):
        started.append(launch)
        raise RuntimeError("this kernel cannot be compiled")

    monkeypatch.setattr(compile_command, "_compile", fail)
    assert main(["compile", *TINY, "--jobs", "1"]) == 1
    assert capsys.readouterr().err == "this kernel cannot be compiled\n"
    assert len(started) < len(ahead.launches(device.named("sm_75", "cuda"), dtype="float32", head_dim=8))


# Info


@pytest.mark.parametrize("arch", [None, "sm_75", "sm_90a"])
def test_info_names_every_engine_with_its_reasons(arch, monkeypatch):
    def gpu(_):
        if arch is None:
            raise RuntimeError from ImportError("no CuPy")
        return device.named(arch, "cuda")

    monkeypatch.setattr(ahead, "device_for", gpu)
    texts = info.engines()
    assert list(texts) == list(MODULES)
    assert texts["cpu"].startswith("serves this machine")
    if arch is None:
        assert info.gpu() == "none that CuPy can use: no CuPy"
        assert texts["mma"] == 'no GPU; backend="simulator" runs it, slowly, anywhere'
        assert texts["mma_decode"] == texts["mma"]
        asked = 'no GPU; backend="simulator:sm_90a", engine="wgmma" runs it, slowly, anywhere'
        assert texts["wgmma"] == asked
    else:
        assert info.gpu().startswith(f"cuda ({arch}, ")
        assert texts["simt"].startswith(f"serves this machine: cuda ({arch}, ")
        assert ("lacks the instructions of sm_90a" in texts["wgmma"]) == (arch == "sm_75")
        assert 'only on request: engine="wgmma"' in texts["wgmma"]


# Errors


@pytest.mark.parametrize(
    "arguments, status, message",
    [
        ([], 2, "arguments are required: COMMAND"),
        (["explian"], 2, "invalid choice: 'explian'"),
        (["explain"], 2, "arguments are required: --head-dim"),
        (["explain", "--head-dim", "0"], 2, "must be a whole number, at least 1 and less than 2**31, not '0'"),
        (["explain", "--head-dim", "x"], 2, "not 'x'"),
        (["explain", "--head-dim", str(2**31)], 2, f"not '{2**31}'"),
        (["explain", "--head-dim", "64", "--arch", "sm_1"], 2, "invalid choice: 'sm_1'"),
        (["explain", "--head-dim", "64", "--engine", "cpu"], 2, "invalid choice: 'cpu'"),
        (["explain", *TINY, "--dropout", "1.5"], 1, "dropout must be in [0, 1)"),
        (["explain", *TINY, "--heads", "3", "--group", "2"], 1, "--heads 3 must be a multiple of --group 2"),
        (["explain", *TINY, "--window", "-2", "0"], 1, "a side of window must be"),
        (["ptx", *TINY, "--packed", "--mask"], 1, "mask is for padded batches"),
        (["ptx", *TINY, "--out", __file__], 1, "File exists"),
        (["compile", *TINY, "--jobs", "0"], 2, "--jobs: must be a whole number"),
        (["compile", *TINY, "--packed", "--mask"], 1, "mask is for padded batches"),
        (["cache"], 2, "arguments are required: ACTION"),
        (["info", "please"], 2, "unrecognized arguments: please"),
    ],
)
def test_an_error_is_a_line(arguments, status, message, capsys):
    assert status_of(arguments) == status
    output = capsys.readouterr()
    assert message in output.err and output.err.count("\n") == 1 and output.out == ""


def test_an_unsupported_problem_has_the_reasons_of_each_engine(capsys):
    assert main(["explain", "--arch", "sm_90a", "--dtype", "float8_e4m3fn", "--head-dim", "128"]) == 1
    error = capsys.readouterr().err
    assert "wgmma: fp8 has no gradients" in error and all(f"  - {engine}: " in error for engine in MODULES)


def test_without_a_gpu_the_error_asks_for_an_architecture(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    for command in ("explain", "ptx", "compile"):
        assert main([command, "--head-dim", "8"]) == 1
        assert re.fullmatch(r'there is no GPU .*; name one, as in arch="sm_90a" .*\n', capsys.readouterr().err)


def test_explain_plans_the_problem_of_a_call():
    """`explain` of the command line plans the same problem as a call with arrays of these sizes."""
    (forward,) = plans("sm_80", 2, 4, 48, 32, dtype="float32", head_dim=16, group=2, backward=False, softcap=3.0)
    q, kv = np.zeros((2, 48, 4, 16), np.float32), np.zeros((2, 32, 2, 16), np.float32)
    text = cupy_flash.explain(q, kv, kv, softcap=3.0)
    sizes = forward.problem._replace(framework="numpy", device="cpu")
    assert str(sizes) in text
