"""bench mods: every mod is measured next to its built-in option, and the ratio is the median over neighbouring
samples.
"""

import pytest

pytest.importorskip("torch")

from bench import mods


def test_every_mod_is_measured():
    section = mods.measure("cpu", rounds=1, length=512)
    table = mods.table(section)
    assert [row[0] for row in table.rows] == list(mods.mods_of(512, "cpu"))
    for (name, samples), row in zip(section["seconds"].items(), table.rows, strict=True):
        assert all(len(seconds) == 1 for seconds in samples.values())
        assert (row[2] != "") == (name not in ("document", "relative table"))


def test_ratios_are_of_neighbouring_samples():
    samples = {mods.OURS: [2.0, 20.0, 3.0], mods.BUILT_IN: [1.0, 10.0, 3.0]}
    assert mods.ratio(samples, mods.BUILT_IN) == 2.0
    assert mods.ratio(samples, mods.FLEX) is None
