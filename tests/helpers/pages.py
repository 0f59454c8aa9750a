"""The Python blocks of README.md and docs/."""

import re
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


STORY = ROOT / "docs" / "five_minutes.md"  # its blocks continue each other: test_pages.py of tests/library runs them


LIBRARIES = ROOT / "docs" / "libraries.md"  # its libraries are optional: tests/array_libraries runs its blocks


def python_blocks(text):
    """Return (line number, code) of each ```python block, also of those inside tabs."""
    return [
        (text[: match.start(2)].count("\n") + 1, textwrap.dedent(match[2]))
        for match in re.finditer(r"^( *)```python\n(.*?)^\1```$", text, re.M | re.S)
    ]


def whole_blocks(parts):
    """Return (line number, code) of blocks that run by themselves: one without an import continues the one before."""
    whole = []
    for line, code in parts:
        if whole and not re.search(r"^(import|from) ", code, re.M):
            first, before = whole[-1]
            code, line = before + "\n" * (line - first - before.count("\n")) + code, first
        whole.append((line, code))
    return whole


def blocks(cupy):
    """Return the Python blocks of all pages: those that import CuPy, or all others."""
    return [
        pytest.param(page, line, code, id=f"{page.stem}-{line}")
        for page in PAGES
        if page not in (STORY, LIBRARIES)
        for line, code in whole_blocks(python_blocks(page.read_text(encoding="utf-8")))
        if bool(re.search(r"\bimport cupy\b", code)) == cupy
    ]


BLOCKS, CUPY_BLOCKS = blocks(cupy=False), blocks(cupy=True)  # tests/gpu/test_gpu_docs.py runs CUPY_BLOCKS


def run_block(page, line, code):
    exec(compile("\n" * (line - 1) + code, str(page), "exec"), {"__name__": page.stem})
