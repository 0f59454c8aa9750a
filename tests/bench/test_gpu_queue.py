"""bench/gpu_queue.md: each row has a question, a command, and existing tests that must pass before it is run."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def rows(text):
    """Return the cells of each row of the table in gpu_queue.md."""
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[1:]]


def problems(text):
    """Return the errors of the table, one line each."""
    wrong = []
    for cells in rows(text):
        tests = re.findall(r"`(tests/[\w/.]+)(?:::(\w+))?`", cells[-1])
        if len(cells) != 3 or "?" not in cells[0] or not tests:
            wrong.append(f"not a question, a command and tests: {cells[0][:60]}")
        for file, name in tests:
            path = ROOT / file
            if not path.is_file() or (name and f"def {name}(" not in path.read_text(encoding="utf-8")):
                wrong.append(f"no such test: {file} {name}")
    return wrong


def test_every_question_names_the_tests_that_must_pass_first():
    text = (ROOT / "bench" / "gpu_queue.md").read_text(encoding="utf-8")
    assert len(rows(text)) > 20
    assert problems(text) == []


def test_wrong_rows_are_found():
    table = "| question | command | must pass first |\n|---|---|---|\n"
    row = "| Is it fast? | `bench` | `tests/bench/test_gpu_queue.py::test_wrong_rows_are_found` |\n"
    assert problems(table + row) == []
    for old, new in (("::test_wrong", "::test_no"), ("test_gpu_queue", "test_gone"), (" | `bench`", ""), ("?", ".")):
        assert len(problems(table + row.replace(old, new))) == 1, old
