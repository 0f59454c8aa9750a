"""Run every example: doctests of all modules, and the Python blocks of the README."""

import doctest
import importlib
import pkgutil
import re
from pathlib import Path

import pytest

import cupy_flash

README = Path(__file__).resolve().parents[2] / "README.md"
MODULES = sorted(
    module.name for module in pkgutil.walk_packages(cupy_flash.__path__, "cupy_flash.") if "__main__" not in module.name
)


def python_blocks(text):
    """(line number, code) of each ```python block."""
    return [
        (text[: found.start(1)].count("\n") + 1, found[1])
        for found in re.finditer(r"^```python\n(.*?)^```$", text, re.M | re.S)
    ]


# Blocks on CuPy arrays need a GPU: tests/gpu runs them.
BLOCKS = [(line, code) for line, code in python_blocks(README.read_text()) if not re.search(r"\bimport cupy\b", code)]


@pytest.mark.parametrize("name", ["cupy_flash", *MODULES])
def test_docstrings(name):
    assert doctest.testmod(importlib.import_module(name)).failed == 0


def test_there_are_docstring_examples():
    attempted = {
        name: doctest.testmod(importlib.import_module(name)).attempted
        for name in ("cupy_flash.api", "cupy_flash.reference")
    }
    assert min(attempted.values()) > 0, attempted


@pytest.mark.parametrize(("line", "code"), BLOCKS, ids=[f"line-{line}" for line, _ in BLOCKS])
def test_readme(line, code, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exec(compile("\n" * (line - 1) + code, str(README), "exec"), {"__name__": "readme"})


def test_there_are_readme_examples():
    assert len(BLOCKS) >= 5
    assert python_blocks("a\n```python\nx\n```\n\n```\ny\n```\n```python\nz\n```\n") == [(3, "x\n"), (10, "z\n")]
