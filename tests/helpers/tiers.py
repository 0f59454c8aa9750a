"""Which rows of a table run by default, and which with --exhaustive alone."""

import pytest


def in_tiers(rows, default):
    """The rows {id: value} for parametrize; those whose id is not in `default` are marked exhaustive."""
    assert set(default) <= set(rows), set(default) - set(rows)
    return [
        pytest.param(value, id=name, marks=[] if name in default else pytest.mark.exhaustive)
        for name, value in rows.items()
    ]


def exhaustive(*values):
    """One row for parametrize that runs with --exhaustive alone."""
    return pytest.param(*values, marks=pytest.mark.exhaustive)
