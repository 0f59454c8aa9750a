"""The bench of a decode step: every way computes the same, and the table shows ratios to the baseline."""

import pytest
import torch

from bench import decode

SMALL = decode.Step(2, 4, 2, 64, 16)


def test_every_way_computes_the_same():
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


@pytest.mark.parametrize("step", decode.STEPS, ids=str)
def test_pages_divide_the_keys(step):
    assert step.keys % decode.PAGE == 0 and step.heads % step.kv_heads == 0
