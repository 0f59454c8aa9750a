"""fp8 on a real GPU with torch tensors, because CuPy has no fp8 dtype: every option, and the tile of each head
dimension.
"""

from __future__ import annotations

import pytest
from cases import Case, compare
from fp8_cases import LONG, OPTIONS, quantised, references
from fp8_on_gpu import forward

from cupy_flash import UnsupportedError, device

ROWS = {name: Case(**LONG | options) for name, options in OPTIONS.items()}
ROWS |= {
    f"long-{dim}": Case(1000, 1300, 1, 4, 2, dim, dim, "bfloat16", causal=True, sink=True)
    for dim in (64, 96, 128, 192, 256)
}


@pytest.mark.parametrize("case", ROWS.values(), ids=ROWS)
def test_on_cuda(case: Case) -> None:
    call = quantised(case)
    if device.gpu(0).arch != "sm_90a":
        with pytest.raises(UnsupportedError, match="lacks the instructions of sm_90a"):
            forward(call)
        return
    compare(case, forward(call), *references(call), only=("out", "lse"))
