"""The table of `python -m cupy_flash ptx --evidence`: the named kernels have the instructions that they confirm."""

import pytest

from cupy_flash.measure.checks.evidence import forms, other_kernels

from .cases import CASES, DEFAULT
from .instruction_forms import table
from .launching import compiled_kernel


def confirmed(name):
    return {form for form, case in other_kernels().items() if case == name}


NAMED = sorted(set(other_kernels().values()))


def test_named_cases_exist():
    assert set(NAMED) <= set(CASES) and set(NAMED) & DEFAULT


@pytest.mark.parametrize("name", [name for name in NAMED if name in DEFAULT])
def test_a_case_has_the_instructions_that_it_confirms(name):
    assert confirmed(name) <= forms(compiled_kernel(CASES[name]()).ptx)


@pytest.mark.exhaustive
def test_the_whole_table():
    assert table(CASES, DEFAULT) == other_kernels(), "python -m other_kernels.instruction_forms writes the table"
