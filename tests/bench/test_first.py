"""The bench of first calls, without a GPU: one process compiles, the next one finds the kernels on disk."""

import json
import os
import re

import pytest
from patience import FOREVER, give_workers_time, patiently

from bench import first
from bench.__main__ import main
from cupy_flash.jit import nvrtc


@pytest.fixture(autouse=True)
def workers_have_time(monkeypatch):
    give_workers_time(monkeypatch)
    monkeypatch.setattr(first, "SECONDS", FOREVER)
    monkeypatch.setattr(first, "first_call", called)


def called(*arguments):
    """Run first.first_call in a process of its own, without a time limit."""
    *arguments, announce = arguments
    return first.first_call(*arguments, patiently(announce))


def compiled(*arguments):
    """Run first.first_call like `called`, and return the number of kernels that the process compiled."""
    compile, names = nvrtc.compile, []

    def counting(text, name, target):
        names.append(name)
        return compile(text, name, target)

    nvrtc.compile = counting
    assert called(*arguments) > 0
    return names.count("simt/forward")


def test_the_second_process_finds_what_the_first_compiled(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(first, "first_call", compiled)
    monkeypatch.setenv("CUPY_FLASH_CACHE_DIR", str(tmp_path / "of the caller"))
    monkeypatch.setattr(first, "CALLS", {"a call": first.CALLS["simt forward, fp32 D 64"]})
    assert main(["first", "--out", str(tmp_path)]) == 0
    assert os.environ["CUPY_FLASH_CACHE_DIR"] == str(tmp_path / "of the caller")
    assert not (tmp_path / "of the caller").exists()
    stored = json.loads((tmp_path / "first.json").read_text())["first"]["a call"]
    assert stored == {"cold": 1, "warm": 0, "kernels": 1}
    assert "goal 10" in capsys.readouterr().out
    (row,) = first.table({"a call": dict(cold=1.25, warm=0.02, kernels=1)}).rows
    assert row == ["a call", "1", "1250", "20"]


def test_a_failing_call_does_not_affect_the_others(monkeypatch):
    """The call fails here, because there is no GPU."""
    monkeypatch.setattr(first, "CALLS", {"a call": first.CALLS["mma forward, bf16 D 128"]})
    section = first.measure(on_gpu=True)
    assert re.match(r"the first call: (AssertionError|RuntimeError): ", section["a call"]["left_out"])
    assert first.table(section).rows[0][2] == section["a call"]["left_out"]
