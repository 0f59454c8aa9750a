"""Triton's and Gluon's kernels give right results in the simulator, in every order of asynchronous instructions."""

import pytest
from tiers import in_tiers

from .cases import CASES, DEFAULT
from .launching import ORDERS, run


@pytest.mark.parametrize("case", in_tiers(CASES, DEFAULT))
def test_result(case):
    case = case()
    for order in ORDERS.values():
        run(case, **order)
