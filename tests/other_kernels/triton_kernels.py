"""Kernels in Triton."""

import triton
import triton.language as tl


@triton.jit
def matmul(
    a, b, c, K, a_row, a_column, b_row, b_column, N,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """C = A B by pointers; the strides choose the transposes."""
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    depth = tl.arange(0, BLOCK_K)
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in range(0, K, BLOCK_K):
        left = tl.load(a + rows[:, None] * a_row + (k + depth)[None, :] * a_column)
        right = tl.load(b + (k + depth)[:, None] * b_row + columns[None, :] * b_column)
        total = tl.dot(left, right, total)
    tl.store(c + rows[:, None] * N + columns[None, :], total.to(c.dtype.element_ty))
