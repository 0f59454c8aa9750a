"""fp8 on a real GPU, as torch tensors (CuPy has no dtype for it): every option, and head dimensions as planned."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import test_fp8
import torch
from cases import DTYPES, Call, Case, Result, compare

import cupy_flash
from cupy_flash import UnsupportedError, device

ROWS = {name: Case(**test_fp8.LONG | options) for name, options in test_fp8.OPTIONS.items()}
ROWS |= {
    f"long-{dim}": Case(1000, 1300, 1, 4, 2, dim, dim, "bfloat16", causal=True, sink=True)
    for dim in (64, 96, 128, 192, 256)
}


def on_gpu(x: Any) -> Any:
    """A NumPy array as a tensor on the GPU; anything else as it is."""
    if not isinstance(x, np.ndarray):
        return x
    if x.dtype.name in ("bfloat16", "float8_e4m3fn"):
        bits = torch.from_numpy(np.ascontiguousarray(x).view(f"u{x.dtype.itemsize}")).cuda()
        return bits.view(getattr(torch, x.dtype.name))
    return torch.from_numpy(np.ascontiguousarray(x)).cuda()


def forward(call: Call) -> Result:
    arrays = [on_gpu(x) for x in (*call[:3], *(call.packed or ()))]
    options = {name: on_gpu(x) for name, x in call.options.items()}
    function = cupy_flash.attention if call.packed is None else cupy_flash.attention_varlen
    out, lse = function(*arrays, return_lse=True, **options)
    bits = out.view(torch.int16).cpu().numpy()
    return Result(bits.view(DTYPES["bfloat16"]), lse.cpu().numpy(), *[None] * 5)


@pytest.mark.parametrize("case", ROWS.values(), ids=ROWS)
def test_on_cuda(case: Case) -> None:
    call = test_fp8.quantised(case)
    if device.gpu(0).arch != "sm_90a":
        with pytest.raises(UnsupportedError, match="lacks the instructions of sm_90a"):
            forward(call)
        return
    compare(case, forward(call), *test_fp8.references(call), only=("out", "lse"))
