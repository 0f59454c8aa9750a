"""Pages fit on a screen: code of 88 columns, tables whose columns fit, links that read as words.

The first five minutes print what the page shows.
"""

import contextlib
import io
import re

import pytest
from pages import ROOT, STORY

CODE_COLUMNS = 88
TABLE_COLUMNS = 110  # characters of a table's font in the column of a page at 1280 pixels
LONG_WORD = 30  # longer words break
FOLDERS = ("docs", "examples", "bench", "kernels_cu", "tests")
TEXTS = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md")),
    *(path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.md"))),
]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
IDS = {"ids": lambda path: path.relative_to(ROOT).as_posix()}
CELL = re.compile(r"(?<!\\)\|")
UNBREAKABLE = re.compile(r"\s|(?<=[-/,.(])|`|\[|\]\([^)]*\)")


def code_of(text):
    """(line number, line) of the code of a page: fenced, also inside tabs, or indented by four spaces."""
    fence = None
    for number, line in enumerate(text.splitlines(), 1):
        opened = re.match(r"( *)```", line)
        if opened and fence is None:
            fence = len(opened[1])
        elif opened and len(opened[1]) == fence:
            fence = None
        elif fence is not None:
            yield number, line[fence:]
        elif line.startswith("    "):
            yield number, line[4:]


def tables_of(text):
    """(line number, rows of cells) of the tables of a page."""
    lines = text.splitlines()
    first = 0
    while first < len(lines):
        last = first
        while last < len(lines) and lines[last].startswith("|"):
            last += 1
        if last > first:
            rows = [[cell.strip() for cell in CELL.split(line.strip("|"))] for line in lines[first:last]]
            yield first + 1, rows
        first = last + 1


def width_of(rows):
    """The least width of a table: the longest word of each column, and two characters between columns."""
    words = [[min(max(map(len, UNBREAKABLE.split(cell))), LONG_WORD) for cell in row] for row in rows]
    return sum(max(column) + 2 for column in zip(*words, strict=True))


@pytest.mark.parametrize("page", TEXTS, **IDS)
def test_code_fits_the_column(page):
    lines = code_of(page.read_text(encoding="utf-8"))
    assert [(number, line) for number, line in lines if len(line) > CODE_COLUMNS] == []


@pytest.mark.parametrize("example", EXAMPLES, **IDS)
def test_examples_fit_the_column(example):
    lines = enumerate(example.read_text(encoding="utf-8").splitlines(), 1)
    assert [(number, line) for number, line in lines if len(line) > CODE_COLUMNS] == []


@pytest.mark.parametrize("page", TEXTS, **IDS)
def test_tables_fit_the_column(page):
    tables = tables_of(page.read_text(encoding="utf-8"))
    assert [(number, width) for number, rows in tables if (width := width_of(rows)) > TABLE_COLUMNS] == []


@pytest.mark.parametrize("page", TEXTS, **IDS)
def test_links_read_as_words(page):
    texts = re.findall(r"(?<!!)\[([^]\n]*)\]\([^)]*\)", page.read_text(encoding="utf-8"))
    assert [text for text in texts if re.search(r"/|\.(md|py|json|cu|cuh|toml)\b", text)] == []


def test_wide_code_and_tables_are_found():
    wide = "x" * 89
    page = f'{wide}\n\n```\n{wide}\n```\n\n=== "Tab"\n\n    ```python\n    {wide}\n    ```\n\n    {wide}\n'
    assert [number for number, line in code_of(page) if len(line) > CODE_COLUMNS] == [4, 10, 13]
    ((line, rows),) = tables_of("text\n| a | b |\n| --: | --: |\n| one two | three |\n")
    assert line == 2 and rows[2] == ["one two", "three"] and width_of(rows) == 3 + 2 + 5 + 2


def test_the_first_five_minutes_print_what_the_page_shows(monkeypatch, tmp_path):
    monkeypatch.setenv("CUPY_FLASH_CACHE_DIR", str(tmp_path))  # without evidence, which explain() would name
    pytest.importorskip("torch")
    blocks = re.findall(r"```python\n(.*?)```(?:\n\n```text\n(.*?)```)?", STORY.read_text(encoding="utf-8"), re.DOTALL)
    names = {}
    for code, shown in blocks:
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(compile(code, str(STORY), "exec"), names)
        assert printed.getvalue() == shown
    assert len(blocks) >= 5 and len(shown) > 0
