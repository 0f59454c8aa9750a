"""The fp8 forward on a real GPU with torch tensors, because CuPy has no fp8 dtype."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from cases import DTYPES, Call, Result

import cupy_flash


def on_gpu(x: Any) -> Any:
    """Copy a NumPy array to a tensor on the GPU; return anything else unchanged."""
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
