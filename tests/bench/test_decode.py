"""The bench of a decode step: all implementations compute the same, and the table shows ratios to the baseline."""

import json
import re

import pytest
import torch

from bench import decode, decode_gpu
from bench.results import ROOT

SMALL = decode.Step(2, 4, 2, 64, 16)


def test_all_implementations_compute_the_same():
    results = {name: way() for name, way in decode._ways(SMALL).items()}
    heads_first = {name for name in results if name.startswith("SDPA")}
    expected = results["contiguous"]
    for name, result in results.items():
        same = result.reshape(expected.shape) if name in heads_first else result
        torch.testing.assert_close(same, expected, msg=name)


def test_table():
    section = decode.measure((SMALL,), rounds=1)
    table = decode.table(section)
    assert table.columns[:2] == ["step", decode.BASELINE] and table.rows[0][0] == str(SMALL)
    section[0]["seconds"] = dict.fromkeys(section[0]["seconds"], 0.002) | {"contiguous": 0.003}
    row = dict(zip(table.columns, decode.table(section).rows[0], strict=True))
    assert row[decode.BASELINE] == "2 ms" and row["contiguous"] == "1.50" and row["attention"] == "1.00"


def test_the_page_says_which_targets_the_stored_run_meets():
    stored = json.loads((ROOT / "bench" / "results" / "decode.json").read_text(encoding="utf-8"))["decode"]
    cases = {case["step"]: case["seconds"] for case in stored}
    floats = {step: cases[str(step)] for step in decode.STEPS if step.dtype == "float32"}
    long = {step: of for step, of in floats.items() if step.keys >= 2048}
    packed = sorted(of["contiguous"] / of[decode.BASELINE] for of in long.values())
    grouped = [of["contiguous"] / of["SDPA, enable_gqa"] for step, of in long.items() if step.heads > step.kv_heads]
    (short,) = (of["SDPA in sdpa()"] for step, of in floats.items() if step.keys == 128)
    page = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    runs = re.findall(r"^\| at most [^|]*\|[^|]*\| (.*) \|$", page, re.MULTILINE)
    assert [run.partition(":")[0] for run in runs] == [
        f"{packed[0]:.2f} to {packed[-1]:.2f}",
        " and ".join(f"{ratio:.2f}" for ratio in sorted(grouped)),
        f"{short * 1e3:.2f} ms",
    ]
    assert packed[-2] < 1 < packed[-1] < 1.5 and max(grouped) < 0.6 and short < 0.2e-3


@pytest.mark.parametrize("step", decode.STEPS, ids=str)
def test_pages_divide_the_keys(step):
    assert step.keys % decode.PAGE == 0 and step.heads % step.kv_heads == 0


def test_regimes_of_a_gpu():
    names = [regime.name for regime in decode_gpu.REGIMES]
    assert len(set(names)) == len(names)
    for regime in decode_gpu.REGIMES:
        assert (regime.first > regime.goal) == regime.latency
        assert abs(regime.lengths.mean() / regime.keys - 1) < 0.01


def test_table_of_a_gpu():
    """The table has fractions of the bandwidth of reading the keys alone, or microseconds, next to the marks."""
    share, latency = (x for x in (decode_gpu.REGIMES[0], decode_gpu.REGIMES[-1]))
    seconds = {decode_gpu.READ: 8.2e-6, decode_gpu.CONTIGUOUS: 1e-5, "pages of 16": 2e-5}
    section = [x._asdict() | {"regime": x.name, "bytes": 10**7, "seconds": seconds} for x in (share, latency)]
    rows = [dict(zip(decode_gpu.table(section).columns, row, strict=True)) for row in decode_gpu.table(section).rows]
    assert [row["reached"] for row in rows] == ["first", "first"]
    assert rows[0]["TB/s"] == "1.00" and rows[0]["share of reading alone"] == "0.82"
    assert rows[0]["pages of 16, speed over contiguous"] == "0.50" and rows[1]["first mark, goal"] == "10 us, 6 us"
