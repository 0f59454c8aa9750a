"""The Python blocks of README.md and docs/ that use CuPy arrays."""

from __future__ import annotations

from pathlib import Path

import pages
import pytest


@pytest.mark.parametrize(("page", "line", "code"), pages.CUPY_BLOCKS)
def test_page(page: Path, line: int, code: str) -> None:
    pages.run_block(page, line, code)
