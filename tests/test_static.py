"""The static gate: the kernels that plans choose neither spill nor warn, waste no bank and no byte."""

import json
from dataclasses import replace

import pytest

from bench import static
from bench.__main__ import main
from bench.results import ROOT
from bench.tables import block
from cupy_flash import ahead, device


def unseen(_):
    pass


@pytest.fixture(scope="module")
def compiled():
    """One problem where registers are scarce, on the three; python -m bench static has them all."""
    return static.compile_all(["fp64 D 64"], static.ARCHS, [None], 2, unseen)


@pytest.fixture(scope="module")
def steps():
    return static.count_steps(["fp32 D 64"], "sm_80", unseen)


def test_gate(compiled, steps):
    assert static.complaints(compiled, steps) == []
    assert {it.arch for it in compiled} == set(static.ARCHS)
    assert all(0 < it.registers <= 255 and it.cubin_bytes > 0 and it.seconds > 0 for it in compiled)


def test_every_kernel_that_a_plan_may_choose_is_compiled(compiled):
    for arch in static.ARCHS:
        launches = ahead.launches(device.named(arch, "cuda"), **static.PROBLEMS["fp64 D 64"])
        there = {(it.kernel, it.tile) for it in compiled if it.arch == arch}
        assert there == {(launch.kernel, launch.tile) for launch in launches}


def test_a_tile_step_is_its_products(steps):
    """D products and D for the values; the backward of keys has twice two, that of queries one less."""
    fma = {step.kernel: step.per_score["fma"] for step in steps}
    for kernel, products in {"simt/forward": 2, "simt/backward_kv": 4, "simt/backward_q": 3}.items():
        assert 64 * products <= fma[kernel] < 64 * products * 1.05


@pytest.mark.parametrize(
    "change, words",
    [
        pytest.param(dict(spills=4), "spills 4 bytes", id="spills"),
        pytest.param(dict(warnings=("warning: C7510",)), "warning: C7510", id="warnings"),
    ],
)
def test_gate_shuts_for_a_kernel(compiled, change, words):
    (complaint,) = static.complaints([replace(compiled[0], **change)], [])
    assert words in complaint and compiled[0].arch in complaint


@pytest.mark.parametrize(
    "change, words",
    [
        pytest.param(dict(bank_conflicts=1), "1 bank conflicts", id="conflicts"),
        pytest.param(dict(bytes_over_least=1.2), "1.20 times the least", id="bytes"),
    ],
)
def test_gate_shuts_for_a_step(steps, change, words):
    (complaint,) = static.complaints([], [replace(steps[0], **change)])
    assert words in complaint


def test_command(tmp_path, capsys, monkeypatch):
    """Its JSON has what the tables show; a complaint is its exit status."""
    monkeypatch.setattr(static, "PROBLEMS", {"tiny": dict(dtype="float32", head_dim=8, backward=False)})
    monkeypatch.setattr(static, "compile_all", lambda *_: [static._compile_launch("tiny", launch, "sm_75")])
    monkeypatch.setattr(static, "count_steps", lambda *_: [])
    launch = ahead.launches(device.named("sm_75", "cuda"), **static.PROBLEMS["tiny"])[0]
    assert main(["static", "--out", str(tmp_path)]) == 0
    section = json.loads((tmp_path / "static.json").read_text())["static"]
    (table,) = static.tables(section)
    assert (
        table.rows[0][:2] == ["tiny", "simt/forward"] and "1 kernels compiled, 0 complaints" in capsys.readouterr().out
    )
    assert table.markdown() in block("static", tmp_path)
    monkeypatch.setattr(static, "complaints", lambda *_: ["something spills"])
    assert main(["static", "--out", str(tmp_path)]) == 1
    assert "something spills" in capsys.readouterr().out


def test_stored_result_has_no_spill():
    """What bench/results holds of --all: every architecture, NVRTC 12 and 13, no spill, no warning."""
    section = json.loads((ROOT / "bench" / "results" / "static.json").read_text())["static"]
    compiled = [dict(zip(section["columns"], json.loads(line), strict=True)) for line in section["kernels"]]
    assert {it["arch"] for it in compiled} == set(static.EVERY_ARCH)
    assert {it["compiler"].split(".")[0] for it in compiled} == {"12", "13"}
    assert not [it for it in compiled if it["spills"] or it["warnings"]]
