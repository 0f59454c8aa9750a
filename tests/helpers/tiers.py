"""Marks rows of a table as run by default or only with --exhaustive."""

import pytest


def in_tiers(rows, default):
    """Return the rows {id: value} for parametrize; ids missing from `default` are marked exhaustive."""
    assert set(default) <= set(rows), set(default) - set(rows)
    return [
        pytest.param(value, id=name, marks=[] if name in default else pytest.mark.exhaustive)
        for name, value in rows.items()
    ]


def exhaustive(*values):
    """Return a row for parametrize that runs only with --exhaustive."""
    return pytest.param(*values, marks=pytest.mark.exhaustive)
