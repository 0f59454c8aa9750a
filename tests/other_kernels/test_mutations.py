"""docs/simulator_evidence.md is right: the kernels that it names notice if a belief of the simulator is broken."""

import re
from pathlib import Path

import pytest

from .cases import CASES, DEFAULT
from .mutations import ALL, changed_code, evidence, notices, table

PAGE = Path(__file__).resolve().parents[2] / "docs" / "simulator_evidence.md"


def rows():
    """Return {belief: the names in its row of the page}."""
    cells = re.findall(r"^\| (.+?) \| .+? \| (.+) \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    return {belief: re.findall("`([^`]+)`", names) for belief, names in cells if belief != "belief"}


ROWS = rows()
PROVEN = [mutation for mutation in ALL if ROWS.get(mutation.belief)]


def test_the_page_has_a_row_for_each_belief():
    assert list(ROWS) == [mutation.belief for mutation in ALL]
    assert all(set(names) <= DEFAULT for names in ROWS.values())


@pytest.mark.parametrize("mutation", PROVEN, ids=lambda mutation: mutation.belief)
def test_a_broken_belief_is_noticed(mutation):
    assert notices(CASES[ROWS[mutation.belief][0]](), mutation)


def test_a_stale_mutation_is_an_error():
    with pytest.raises(AssertionError, match="rows has 0 times 'no such text'"):
        changed_code(rows, "no such text", "")


@pytest.mark.exhaustive
def test_the_whole_page():
    assert table(evidence(DEFAULT)) in PAGE.read_text(encoding="utf-8"), "python -m other_kernels prints the tables"
