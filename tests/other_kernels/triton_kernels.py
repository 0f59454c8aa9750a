"""Kernels in Triton, whose compiler chooses layouts, instructions, copies and barriers."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def matmul(
    a, b, c, K, a_row, a_column, b_row, b_column, N,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """C = A B, loaded through pointers; the strides choose the transposes."""
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    depth = tl.arange(0, BLOCK_K)
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in range(0, K, BLOCK_K):
        inside = k + depth < K
        left = tl.load(a + rows[:, None] * a_row + (k + depth)[None, :] * a_column, inside[None, :], 0.0)
        right = tl.load(b + (k + depth)[:, None] * b_row + columns[None, :] * b_column, inside[:, None], 0.0)
        total = tl.dot(left, right, total)
    tl.store(c + rows[:, None] * N + columns[None, :], total.to(c.dtype.element_ty))


@triton.jit
def matmul_tiles(
    a, b, c, K, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, A_TRANSPOSED: tl.constexpr,
    B_TRANSPOSED: tl.constexpr, C_TRANSPOSED: tl.constexpr, SPECIALISED: tl.constexpr,
):  # fmt: skip
    """C = A B, through tensor maps: elements of a tile beyond the arrays are read as 0 and not written."""
    m, n = tl.program_id(0) * BLOCK_M, tl.program_id(1) * BLOCK_N
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in tl.range(0, K, BLOCK_K, warp_specialize=SPECIALISED):
        left = a.load([k, m]).T if A_TRANSPOSED else a.load([m, k])
        right = b.load([n, k]).T if B_TRANSPOSED else b.load([k, n])
        total = tl.dot(left, right, total)
    if C_TRANSPOSED:
        c.store([n, m], total.to(c.dtype).T)
    else:
        c.store([m, n], total.to(c.dtype))


@triton.jit
def add_tiles(a, c, ROWS: tl.constexpr):
    """Add the tiles of all blocks into one tile, by TMA reductions."""
    c.atomic_add([0, 0], a.load([tl.program_id(0) * ROWS, 0]))


@triton.jit
def split_k(a, b, c, K, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, ORDER: tl.constexpr):
    """Split K: each block adds the product over its part of K to C."""
    rows, columns = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    depth = tl.program_id(0) * BLOCK_K + tl.arange(0, BLOCK_K)
    left = tl.load(a + rows[:, None] * K + depth[None, :])
    right = tl.load(b + depth[:, None] * N + columns[None, :])
    tl.atomic_add(c + rows[:, None] * N + columns[None, :], tl.dot(left, right).to(c.dtype.element_ty), sem=ORDER)


@triton.jit
def last_block_sums(x, parts, count, out, SIZE: tl.constexpr, BLOCKS: tl.constexpr):
    """Each block writes a partial sum; the block that the counter shows to be the last one adds them all."""
    block, at = tl.program_id(0), tl.arange(0, SIZE)
    tl.store(parts + block * SIZE + at, tl.load(x + block * SIZE + at) * 2)
    tl.debug_barrier()
    if tl.atomic_add(count, 1, sem="acq_rel", scope="gpu") == BLOCKS - 1:
        total = tl.zeros((SIZE,), tl.float32)
        for i in range(BLOCKS):
            total += tl.load(parts + i * SIZE + at, volatile=True)
        tl.store(out + at, total)


@triton.jit
def take_tickets(count, out):
    """Each block draws a place from the counter, and writes there."""
    ticket = tl.atomic_add(count, 1, sem="relaxed")
    tl.store(out + ticket, ticket + 10)


@triton.jit
def softmax(x, out, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    at = tl.arange(0, ROWS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    scores = tl.load(x + at)
    weights = tl.exp(scores - tl.max(scores, 1)[:, None])
    tl.store(out + at, weights / tl.sum(weights, 1)[:, None])


@triton.jit
def sort_rows(x, out, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    at = tl.arange(0, ROWS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    tl.store(out + at, tl.sort(tl.load(x + at), 1))


@triton.jit
def scan_rows(x, out, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    at = tl.arange(0, ROWS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    tl.store(out + at, tl.cumsum(tl.load(x + at), 1))


@triton.jit
def largest_of_rows(x, out, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    at = tl.arange(0, ROWS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    tl.store(out + tl.arange(0, ROWS), tl.max(tl.load(x + at), 1))


@triton.jit
def gather_rows(x, index, out, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    at = tl.arange(0, ROWS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    tl.store(out + at, tl.gather(tl.load(x + at), tl.load(index + at), 1))


@triton.jit
def histogram(x, out, SIZE: tl.constexpr, BINS: tl.constexpr):
    tl.store(out + tl.arange(0, BINS), tl.histogram(tl.load(x + tl.arange(0, SIZE)), BINS))


@triton.jit
def convert(x, out, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(out + at, tl.load(x + at).to(out.dtype.element_ty))


@triton.jit
def transpose(x, out, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    rows, columns = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    tile = tl.load(x + rows[:, None] * COLUMNS + columns[None, :])
    tl.store(out + columns[:, None] * ROWS + rows[None, :], tile.trans(1, 0))


@triton.jit
def dependent(x, out, SIZE: tl.constexpr):
    """A kernel for programmatic dependent launch: it waits for the previous grid, and lets the next grid start."""
    gdc_wait()
    at = tl.arange(0, SIZE)
    values = tl.load(x + at)
    gdc_launch_dependents()
    tl.store(out + at, values + 1)


@triton.jit
def attention(
    q, k, v, out, lse, LENGTH, scale, M: tl.constexpr, N: tl.constexpr, D: tl.constexpr, CAUSAL: tl.constexpr
):
    """Attention with the online softmax, for one head."""
    rows, at = tl.program_id(0) * M + tl.arange(0, M), tl.arange(0, D)
    queries = tl.load(q + rows[:, None] * D + at[None, :])
    total = tl.zeros((M, D), tl.float32)
    largest = tl.full((M,), float("-inf"), tl.float32)
    weight = tl.zeros((M,), tl.float32)
    for start in range(0, LENGTH, N):
        keys = start + tl.arange(0, N)
        scores = tl.dot(queries, tl.load(k + keys[:, None] * D + at[None, :]).T) * scale
        if CAUSAL:
            scores = tl.where(rows[:, None] >= keys[None, :], scores, float("-inf"))
        new = tl.maximum(largest, tl.max(scores, 1))
        p = tl.exp2((scores - new[:, None]) * 1.4426950408889634)
        factor = tl.exp2((largest - new) * 1.4426950408889634)
        weight = weight * factor + tl.sum(p, 1)
        values = tl.load(v + keys[:, None] * D + at[None, :])
        total = tl.dot(p.to(values.dtype), values, total * factor[:, None])
        largest = new
    tl.store(out + rows[:, None] * D + at[None, :], (total / weight[:, None]).to(out.dtype.element_ty))
    tl.store(lse + rows, largest + tl.log(weight))


@triton.jit
def attention_backward(
    q, k, v, do, lse, delta, dq, dk, dv, LENGTH, scale, M: tl.constexpr, N: tl.constexpr, D: tl.constexpr
):
    """Compute dK and dV of a block's keys, and add the block's contribution to dQ atomically."""
    keys, at = tl.program_id(0) * N + tl.arange(0, N), tl.arange(0, D)
    k_tile = tl.load(k + keys[:, None] * D + at[None, :])
    v_tile = tl.load(v + keys[:, None] * D + at[None, :])
    dk_total, dv_total = tl.zeros((N, D), tl.float32), tl.zeros((N, D), tl.float32)
    for start in range(0, LENGTH, M):
        rows = start + tl.arange(0, M)
        q_tile = tl.load(q + rows[:, None] * D + at[None, :])
        do_tile = tl.load(do + rows[:, None] * D + at[None, :])
        p = tl.exp(tl.dot(q_tile, k_tile.T) * scale - tl.load(lse + rows)[:, None])
        dv_total = tl.dot(p.to(do_tile.dtype).T, do_tile, dv_total)
        ds = p * (tl.dot(do_tile, v_tile.T) - tl.load(delta + rows)[:, None]) * scale
        ds = ds.to(q_tile.dtype)
        dk_total = tl.dot(ds.T, q_tile, dk_total)
        tl.atomic_add(dq + rows[:, None] * D + at[None, :], tl.dot(ds, k_tile), sem="relaxed")
    tl.store(dk + keys[:, None] * D + at[None, :], dk_total)
    tl.store(dv + keys[:, None] * D + at[None, :], dv_total)
