"""CONTRIBUTING's recipe of an option, followed in a copy of the package with a toy: it is refused until an engine
names it, and then served by that engine, or by all if its row is common. `temperature` divides the scores.
"""

import pytest
from recipes import Copy, files_of

RECIPE = "Adding a score feature"

# (file, text, what replaces it)
DECLARED = (
    (
        "cupy_flash/problem/records.py",
        '    causal: "Causal" = common(',
        '    temperature: float | None = option(NUMBER, range=CAP, constant="TEMPERATURE", changes_score=True)\n'
        '    causal: "Causal" = common(',
    ),
    ("cupy_flash/problem/records.py", "    dropout: float\n", "    temperature: float | None\n    dropout: float\n"),
    ("cupy_flash/api.py", "    causal: Causal = False,", "    temperature=None,\n    causal=False,"),
    ("cupy_flash/api.py", "        causal, window, scale,", "        temperature, causal, window, scale,"),
)
IMPLEMENTED = (
    (
        "cupy_flash/cpu/score.py",
        "    if operands.alibi_slopes is not None:",
        "    if problem.temperature is not None:\n        applied.append(Temperature(problem.temperature))\n"
        "    if operands.alibi_slopes is not None:",
    ),
    (
        "cupy_flash/cpu/score.py",
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
NAMED = (
    (
        "cupy_flash/engines/cpu.py",
        "= ATTENTION_OPTIONS | SELECTION",
        '= ATTENTION_OPTIONS | SELECTION | {"temperature"}',
    ),
)
COMMON = (("cupy_flash/problem/records.py", "= option(NUMBER, range=CAP,", "= common(NUMBER, range=CAP,"),)

CALLS = """
import numpy as np
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
SERVED_BY_ALL = """
q, k, v = (x.astype("float16") for x in (q, k, v))
for backend in ("cpu", "simulator", "simulator:sm_90a"):
    lines = cupy_flash.explain(q, k, v, temperature=2.0, backend=backend).splitlines()
    assert not [line for line in lines if "it takes no" in line and not line.startswith("not aten")]  # torch's own
"""


@pytest.fixture
def copy(tmp_path):
    copy = Copy(tmp_path, RECIPE)
    copy.edit(DECLARED)
    return copy


def test_an_option_that_no_engine_names_is_refused(copy):
    """The option is refused even if the code of an engine implements it: its row or OPTIONS say what is served."""
    copy.run(CALLS + REFUSED)
    copy.edit(IMPLEMENTED)
    copy.run(CALLS + REFUSED)


def test_the_engine_that_names_an_option_serves_it(copy):
    copy.edit((*IMPLEMENTED, *NAMED))
    copy.run(CALLS + SERVED)


def test_all_engines_serve_an_option_whose_row_is_common(copy):
    copy.edit(COMMON)
    copy.run(CALLS + SERVED_BY_ALL)


def test_an_option_takes_few_files():
    assert len(files_of(RECIPE)) <= 9
