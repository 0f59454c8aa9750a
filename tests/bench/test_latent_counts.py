"""The counts of decodes of values inside keys: the stored ones meet their marks, and are those of today's kernels."""

import json

import pytest

from bench.kernel_development import latent
from bench.results import ROOT

STORED = json.loads((ROOT / "bench" / "results" / "latent.json").read_text(encoding="utf-8"))["latent"]


def test_the_stored_counts_meet_the_marks():
    assert [{name: row[name] for name in latent.Case._fields} for row in STORED] == [
        case._asdict() for case in latent.CASES
    ]
    assert max(row["bytes"] for row in STORED) <= latent.MARK * 2 * latent.D
    assert min(row["tensor"] for row in STORED if row["heads"] == 128) >= latent.TENSOR_MARK
    assert min(row["bandwidth"] for row in STORED if row["heads"] == 16) >= latent.BANDWIDTH_MARK


@pytest.mark.exhaustive
@pytest.mark.parametrize("n", range(len(latent.CASES)))
def test_the_stored_counts_are_those_of_today(n):
    assert json.loads(json.dumps(latent.record(latent.count(latent.CASES[n])))) == STORED[n]
