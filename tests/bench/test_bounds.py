"""Bottlenecks of kernels from Nsight Compute's output: a hand-written raw page, and a fake ncu."""

import json
import math
import os
import sys

import pytest
from patience import FOREVER
from sweeps import case, regime, result

from bench.__main__ import main
from bench.kernel_development import bounds

WORDS = ["ID", "Kernel Name", "Grid Size", "CC"]
STALLED = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"
COUNTERS = {
    "gpu__time_duration.sum": "4,250,000.00",
    "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active": "81.5",
    "sm__inst_executed_pipe_xu.avg.pct_of_peak_sustained_active": "62.25",
    "smsp__issue_active.avg.pct_of_peak_sustained_active": "33",
    "lts__t_sectors.avg.pct_of_peak_sustained_elapsed": "12",
    "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_ld.sum": "1,024",
    "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_st.sum": "8",
    "dram__throughput.avg.pct_of_peak_sustained_elapsed": "n/a",
    STALLED.format("gmma"): "3.5",
    STALLED.format("barrier"): "0.75",
    STALLED.format("selected"): "9",
    STALLED.format("membar"): "0",
}


def page(*launches):
    """Return a raw page as ncu prints it for several launches: a row of names, a row of units, rows of values."""
    names = [*WORDS, *COUNTERS]
    rows = [[str(i), name, "(128, 16, 1)", "9.0", *values.values()] for i, (name, values) in enumerate(launches)]
    units = ["", "", "", "", *["%"] * len(COUNTERS)]
    lines = [",".join(f'"{cell}"' for cell in row) for row in (names, units, *rows)]
    return "\n".join(["==PROF== Connected to process 7", *lines, "==PROF== Disconnected from process 7"]) + "\n"


def test_the_busiest_resource_bounds():
    (kernel,) = bounds.parsed(page(("forward", COUNTERS)))
    assert kernel["kernel"] == "forward" and kernel["milliseconds"] == 4.25
    assert kernel["busy"] == {"tensor pipe": 81.5, "MUFU": 62.25, "issue": 33, "L2": 12}
    assert kernel["bound"] == "tensor pipe" and kernel["bank_conflicts"] == 1032
    assert kernel["stalls"] == {"gmma": 3.5, "barrier": 0.75}


def test_without_a_busy_resource_warps_wait():
    idle = COUNTERS | {name: "40" for name in COUNTERS if ".pct_of_peak" in name}
    first, second = bounds.parsed(page(("backward_kv", COUNTERS), ("backward_q", idle)))
    assert (first["bound"], second["bound"]) == ("tensor pipe", "waiting: gmma")
    assert bounds.parsed("==ERROR== nothing was profiled\n") == []


NCU = """#!{python}
import sys
words = sys.argv[1:]
assert words[words.index("--clock-control") + 1] == "none"
said = {said!r}
print("the program's own line")
if said == "hang":
    import time
    time.sleep({forever})
if said.startswith("==ERROR"):
    print(said)
    sys.exit(1)
open(words[words.index("--log-file") + 1], "w").write(said)
assert words[-3] == "bench.kernel_development.bounds" and words[-1] == "wgmma 1"
"""


@pytest.fixture
def ncu(tmp_path, monkeypatch):
    """Return a function that installs a fake ncu."""
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)

    def install(said):
        tool = tmp_path / "ncu"
        tool.write_text(NCU.format(python=sys.executable, said=said, forever=FOREVER))
        tool.chmod(0o755)

    return install


@pytest.mark.parametrize(
    "said, status, told",
    [
        (page(("forward", COUNTERS)), 0, None),
        ("==ERROR== ERR_NVGPUCTRPERM", 1, "==ERROR== ERR_NVGPUCTRPERM"),
        ("hang", 1, "timed out after 0 s"),
        ("", 1, "ncu profiled no kernel, exit status 0"),
    ],
    ids=["counted", "not-permitted", "hangs", "nothing"],
)
def test_command(said, status, told, ncu, tmp_path, monkeypatch):
    monkeypatch.setattr(bounds, "SECONDS_OF_ONE", 0 if said == "hang" else FOREVER)
    ncu(said)
    stored = result(case(regime(96), {"wgmma 1": 1.0}), case(regime(), {"wgmma 1": 700.0, "mma 1": 300.0}))
    path = tmp_path / "sweep-forward.json"
    path.write_text(json.dumps(stored))
    assert main(["bounds", str(path), "--seconds", str(2 * FOREVER), "--out", str(tmp_path)]) == status
    (record,) = json.loads((tmp_path / "bounds.json").read_text())["bounds"]  # the regime with D 96 has no mark
    assert (record["regime"], record["tile"], record["left_out"]) == (regime().name, "wgmma 1", told)
    (row,) = bounds.table([record]).rows
    assert row[2] == (told or "tensor pipe")


def test_missing_time_and_missing_tools(monkeypatch):
    cases = [case(regime(), {"wgmma 1": 700.0}), case(regime(causal=True), {"wgmma 1": None})]
    monkeypatch.setattr(bounds.shutil, "which", lambda name: None)
    assert [record["left_out"] for record in bounds.run(cases, math.inf)] == ["ncu is not installed"]
    assert [record["left_out"] for record in bounds.run(cases, 10)] == ["out of time"]
