"""The instructions that convert codes of quantised caches: those of today, those of the plans' model, and the marks."""

import json

import pytest

from bench.kernel_development import conversions
from bench.results import ROOT
from cupy_flash.engines.mma import INSTRUCTIONS_OF_PAIR

STORED = json.loads((ROOT / "bench" / "results" / "conversions.json").read_text(encoding="utf-8"))
NAMES = {"int8": "int8", "e4m3": "float8_e4m3fn", "e5m2": "float8_e5m2", "nibbles": "uint8"}
DTYPES = {"half16": "float16", "bfloat16": "bfloat16"}
# Beyond the mark: bench/NOTES.md says why.
ABOVE = {
    ("sm_80", "half16", "int8"): 2.5, ("sm_80", "bfloat16", "int8"): 4.0, ("sm_80", "half16", "e4m3"): 7.0,
    ("sm_80", "bfloat16", "e4m3"): 7.0, ("sm_80", "bfloat16", "e5m2"): 4.0, ("sm_80", "bfloat16", "nibbles"): 2.75,
    ("sm_90a", "half16", "int8"): 2.5, ("sm_90a", "bfloat16", "int8"): 4.0, ("sm_90a", "bfloat16", "e4m3"): 4.5,
    ("sm_90a", "bfloat16", "e5m2"): 4.0, ("sm_90a", "bfloat16", "nibbles"): 2.75,
}  # fmt: skip


def most(rows):
    """Return the instructions a pair of K or V, whichever has more, by (arch, element, codes)."""
    counts = {}
    for row in rows:
        key = row["arch"], row["element"], row["codes"]
        counts[key] = max(counts.get(key, 0), sum(row["instructions"].values()))
    return counts


def test_stored_counts_meet_the_mark_but_for_the_named_ones():
    rows = STORED["conversions"]
    assert [tuple(row[name] for name in conversions.Case._fields) for row in rows] == list(conversions.CASES)
    assert {key: number for key, number in most(rows).items() if number > conversions.MARK} == ABOVE


def test_plans_use_the_counts():
    """Those of sm_80, where e4m3 has no instruction of its own."""
    counts = {key[1:]: number for key, number in most(STORED["conversions"]).items() if key[0] == "sm_80"}
    assert counts == {
        (element, codes): INSTRUCTIONS_OF_PAIR[DTYPES[element]][NAMES[codes]] for element, codes in counts
    }


@pytest.mark.parametrize("n", range(0, len(conversions.CASES), 5))
def test_stored_counts_are_those_of_today(n):
    assert conversions.count(conversions.CASES[n]) == STORED["conversions"][n]["instructions"]


def test_predicted_times_follow_the_bytes():
    """With eight sequences; with one, a launch and a merge take longer than the bytes of 4 bits allow."""
    assert conversions.predictions() == STORED["predicted"]
    ratios = {batch: [row["of_bytes"] for row in STORED["predicted"] if row["batch"] == batch] for batch in (1, 8)}
    assert max(ratios[8]) <= conversions.TIME_MARK < max(ratios[1])
