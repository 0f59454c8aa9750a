"""The examples on CuPy arrays in the README and docs/."""

from __future__ import annotations

from pathlib import Path

import pytest
import test_docstrings


@pytest.mark.parametrize(("page", "line", "code"), test_docstrings.CUPY_BLOCKS)
def test_page(page: Path, line: int, code: str) -> None:
    test_docstrings.run_block(page, line, code)
