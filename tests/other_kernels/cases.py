"""Launches of the kernels: small, one to four blocks each."""

import ml_dtypes
import numpy as np

from . import triton_kernels
from .launching import Case
from .products import matrix, product

E4M3, E5M2, BF16 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, ml_dtypes.bfloat16


def matmul(capability, dtype, transposes="nn", result=np.float32):
    """A product by pointers. transposes: "t" for an operand whose columns are contiguous."""
    rng = np.random.default_rng(0)
    m, n, k = 128, 64, 96
    a = matrix(rng, (m, k) if transposes[0] == "n" else (k, m), dtype)
    b = matrix(rng, (k, n) if transposes[1] == "n" else (n, k), dtype)
    return Case(
        triton_kernels.matmul,
        capability,
        (2, 1, 1),
        dict(
            a=a, b=b, K=k, N=n, BLOCK_M=64, BLOCK_N=64, BLOCK_K=32,
            **dict(zip(("a_row", "a_column"), (k, 1) if transposes[0] == "n" else (1, m), strict=True)),
            **dict(zip(("b_row", "b_column"), (n, 1) if transposes[1] == "n" else (1, k), strict=True)),
        ),
        {"c": product(a if transposes[0] == "n" else a.T, b if transposes[1] == "n" else b.T, result)},
    )  # fmt: skip


CASES = {
    "matmul-sm_80-f16": lambda: matmul(80, np.float16, "nn"),
}
DEFAULT = {"matmul-sm_80-f16"}
