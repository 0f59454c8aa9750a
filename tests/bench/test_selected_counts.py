"""The counts of kernels for selected keys: the stored ones meet their mark, and are those of today's kernels."""

import json

import pytest

from bench.kernel_development import selected
from bench.results import ROOT

STORED = json.loads((ROOT / "bench" / "results" / "selected.json").read_text(encoding="utf-8"))["selected"]


def test_the_stored_counts_meet_the_mark():
    assert [{name: row[name] for name in selected.Case._fields} for row in STORED] == [
        case._asdict() for case in selected.CASES
    ]
    assert max(row["moved"] for row in STORED) <= selected.MARK


@pytest.mark.exhaustive
@pytest.mark.parametrize("n", range(len(selected.CASES)))
def test_the_stored_counts_are_those_of_today(n):
    assert json.loads(json.dumps(selected.record(selected.count(selected.CASES[n])))) == STORED[n]
