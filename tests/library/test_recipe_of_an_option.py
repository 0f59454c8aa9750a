"""CONTRIBUTING's recipe of an option, followed in a copy of the package with a toy: it is refused until an engine
names it, and then served by that engine. `temperature` divides the scores.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# (file, text, what replaces it)
DECLARED = (
    (
        "problem/features.py",
        "    alibi_slopes: AnyArray | None = option(",
        '    temperature: float | None = option(NUMBER, range=CAP, constant="TEMPERATURE", changes_score=True)\n'
        "    alibi_slopes: AnyArray | None = option(",
    ),
    ("problem/records.py", "    dropout: float\n", "    temperature: float | None\n    dropout: float\n"),
    ("api.py", "    alibi_slopes: AnyArray | None = None,", "    temperature=None,\n    alibi_slopes=None,"),
    ("api.py", "softcap, alibi_slopes, bias, mask, sink,", "softcap, temperature, alibi_slopes, bias, mask, sink,"),
)
IMPLEMENTED = (
    (
        "cpu/score.py",
        "    if operands.alibi_slopes is not None:",
        "    if problem.temperature is not None:\n        applied.append(Temperature(problem.temperature))\n"
        "    if operands.alibi_slopes is not None:",
    ),
    (
        "cpu/score.py",
        "class Alibi:",
        "class Temperature:\n"
        "    bounded, by_sequence, by_head = False, True, True\n\n"
        "    def __init__(self, temperature):\n        self.temperature = temperature\n\n"
        "    def apply(self, S, tile, save):\n        S /= self.temperature\n\n"
        "    gradient = apply\n\n"
        "    def gradients(self):\n        return {}\n\n\n"
        "class Alibi:",
    ),
)
NAMED = (("engines/cpu.py", "= ATTENTION_OPTIONS\n", '= ATTENTION_OPTIONS | {"temperature"}\n'),)

CALLS = """
import numpy as np, cupy_flash, os
assert cupy_flash.__file__.startswith(os.getcwd())
q, k, v = np.random.default_rng(0).normal(size=(3, 1, 20, 2, 16))
def served(**options):
    try:
        return cupy_flash.attention(q, k, v, temperature=2.0, **options)
    except cupy_flash.UnsupportedError as error:
        return str(error)
"""
REFUSED = """
for options in ({}, dict(engine="cpu"), dict(backend="simulator"), dict(backend="simulator:sm_90a")):
    text = served(**options)
    for engine in ("cpu", "cpu_decode", "simt", "mma", "wgmma"):
        assert f"  - {engine}: it takes no temperature" in text, text
assert "it takes no temperature" not in cupy_flash.explain(q, k, v)
"""
SERVED = """
np.testing.assert_allclose(served(), cupy_flash.attention(q, k, v, scale=0.125), rtol=1e-12)
assert "not simt   it takes no temperature" in cupy_flash.explain(q, k, v, temperature=2.0)
assert "  - simt: it takes no temperature" in served(backend="simulator")
"""


@pytest.fixture
def copy(tmp_path):
    """Return a copy of the package and its kernels, in which the option is declared."""
    for folder in ("cupy_flash", "kernels_cu"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    edit(tmp_path, DECLARED)
    return tmp_path


def edit(copy, edits):
    for file, old, new in edits:
        path = copy / "cupy_flash" / file
        text = path.read_text("utf-8")
        assert text.count(old) == 1, f"{old!r} in {file}"
        path.write_text(text.replace(old, new), "utf-8")


def run(copy, code):
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-c", CALLS + code]
    result = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_an_option_that_no_engine_names_is_refused(copy):
    """The option is refused even if the code of an engine implements it: only OPTIONS says what an engine serves."""
    run(copy, REFUSED)
    edit(copy, IMPLEMENTED)
    run(copy, REFUSED)


def test_the_engine_that_names_an_option_serves_it(copy):
    edit(copy, (*IMPLEMENTED, *NAMED))
    run(copy, SERVED)
