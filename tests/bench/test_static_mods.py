"""The static gate of mods: the counts of a kernel, complaints, and the table."""

import inspect
import json
from dataclasses import asdict, replace

import pytest

from bench.kernel_development import static, static_mods
from bench.kernel_development.static_mods import Added
from bench.results import ROOT
from cupy_flash.jit import nvrtc

ROW = Added("ALiBi", "wgmma/forward", (128, 96, 384), "1f", plain=6.0, added=4.5, longest=20.0, mark=5.0, spills=0)


def test_spills_are_complaints_and_missed_marks_are_not():
    assert static_mods.complaints([ROW, replace(ROW, added=5.5)]) == []
    assert static_mods.complaints([replace(ROW, spills=8)]) == ["wgmma/forward with the mod ALiBi: spills 8 bytes"]


@pytest.mark.parametrize("name", static_mods.MAY_SPILL)
def test_only_named_rows_may_spill_and_do(name):
    stored = json.loads((ROOT / "bench" / "results" / "static.json").read_text(encoding="utf-8"))["static"]
    (row,) = (row for row in static.Result.of(stored).mods if row.name == name)
    assert row.spills == static_mods.MAY_SPILL[name], "remove the row of MAY_SPILL, or lower its bytes"
    assert static_mods.complaints([row]) == []
    assert static_mods.complaints([replace(row, spills=row.spills + 1)]) == [f"{name}: spills {row.spills + 1} bytes"]


def test_table():
    (table,) = static_mods.tables([asdict(ROW)])
    assert table.rows == [["ALiBi", "wgmma/forward", "128x96/384", "6.00", "4.50", "5.00", "20.00", "0"]]
    assert static_mods.tables([]) == []


def test_a_full_tile_on_hopper(monkeypatch):
    """Compiled with a user's flags, a mask_mod adds at most one instruction per thread and score on a full tile."""
    monkeypatch.setattr(nvrtc, "flags", inspect.unwrap(nvrtc.flags))
    (case,) = static_mods.cases_of("wgmma", "sm_90a", "causal", False)
    row = static_mods.measure(case._replace(candidates=(case.launch,)))
    assert row.kernel == "wgmma/forward" and 0 < row.added < 1
    assert static_mods.complaints([row]) == []
