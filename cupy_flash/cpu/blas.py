"""The CPU engine's arithmetic on tiles (heads, rows, columns), in NumPy, or in torch for torch tensors.

Torch's OpenMP threads spin for a while after each operation of the caller and would compete with our own threads. Tasks
therefore run on torch's threads, in one parallel region per call. Inside a region torch and its BLAS use one thread per
operation; results do not depend on the number of threads.

Between operations threads wait for Python's global interpreter lock, up to 50 us each time. Tasks of torch
therefore compute several heads at once, in fewer and longer operations.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache

import numpy as np

from ..device import is_forked
from ..plan.plan import Plan
from ..problem.mask import Band
from ..problem.records import Operands, Problem
from .thread_pool import Region

LINE = 64  # bytes of a cache line, to which scratch arrays are aligned

# Torch's operations are faster than NumPy's if a head has at least 2^18 scores, and not few queries or few keys. The
# tiles (forward, backward) and the number of heads at once are the fastest ones for S 512 to 2048. TORCH_ROWS limits
# the memory of a task to that of a task in NumPy at S 16k.
TORCH_SCORES = 2**18
TORCH_QUERIES, TORCH_KEYS = 32, 128
TORCH_TILES = ((256, 512), (512, 256))
TORCH_HEADS = 4
TORCH_ROWS = 2**14


class Products:
    """Operations in NumPy and single-threaded BLAS, on one head at a time."""

    region: Region | None = None  # runs a function on torch's OpenMP threads; None: on threads of our own
    heads_at_once = 1
    line = ""  # printed by `explain`

    def planned(self, plan: Plan) -> Plan:
        """Return the plan with the tile for these operations."""
        return plan

    def matmul(self, A: np.ndarray, B: np.ndarray, out: np.ndarray) -> np.ndarray:
        """Write A @ B to `out`."""
        result: np.ndarray = np.matmul(A, B, out=out)
        return result

    def add_product(self, total: np.ndarray, W: np.ndarray, X: np.ndarray, finite: bool) -> None:
        """Add `product(W, X)` to `total`; `finite` promises that X is finite."""
        total += W @ X if finite else product(W, X)

    def is_finite(self, X: np.ndarray) -> bool:
        """Return whether all numbers are finite; False too if their sum overflows."""
        return bool(np.isfinite(np.add.reduce(X, axis=None)))

    def scale(self, X: np.ndarray, factor: np.floating, out: np.ndarray) -> np.ndarray:
        """Write X times a number to `out`."""
        result: np.ndarray = np.multiply(X, factor, out=out)
        return result

    def extremes(self, X: np.ndarray, buffer: np.ndarray) -> tuple[float, float]:
        """Return the smallest and the largest magnitude in X, NaN if it contains NaN."""
        magnitudes = np.abs(X, out=shaped(buffer, *X.shape))
        return float(magnitudes.min()), float(magnitudes.max())

    def divide(self, O: np.ndarray, rows: np.ndarray) -> None:
        """Divide each row of O by a number."""
        O /= rows[..., None]

    def exp(self, S: np.ndarray, moderate: bool) -> None:
        """Replace scores by their exponentials; `moderate` promises that none underflows."""
        np.exp(S, out=S)

    def row_max(self, S: np.ndarray) -> np.ndarray:
        """Return the maximum of each row, NaN if it contains NaN."""
        maximum: np.ndarray = S.max(axis=-1)
        return maximum

    def row_sum(self, S: np.ndarray) -> np.ndarray:
        """Return the sum of each row."""
        total: np.ndarray = S @ np.ones(S.shape[-1], S.dtype)
        return total

    def subtract(self, S: np.ndarray, rows: np.ndarray) -> None:
        """Subtract one number from each row of S."""
        S -= rows[..., None]

    def multiply(self, X: np.ndarray, Y: np.ndarray) -> None:
        """Multiply X by Y in place."""
        X *= Y

    def hide(self, S: np.ndarray, band: Band, queries: tuple[int, int], keys: tuple[int, int], value: float) -> None:
        """Set the scores of a tile that the band hides to `value`."""
        np.copyto(S, value, where=~band.visible(*queries, *keys))


class TorchProducts(Products):
    """The same operations in torch, on tensors that share the memory of the arrays, on several heads at a time."""

    def __init__(self, region: Region, heads_at_once: int) -> None:
        import torch

        self.torch, self.region, self.heads_at_once = torch, region, heads_at_once
        self.view = torch.from_numpy
        self.line = f"\nproducts   of torch, on its own threads, in tasks of up to {heads_at_once} heads"

    def planned(self, plan: Plan) -> Plan:
        """Return the plan with a tile of TORCH_TILES, on no more threads than torch may use."""
        block_q, block_kv = TORCH_TILES[plan.problem.backward]
        threads = min(plan.threads, self.torch.get_num_threads())
        return plan._replace(block_q=block_q, block_kv=block_kv, threads=threads)

    def matmul(self, A: np.ndarray, B: np.ndarray, out: np.ndarray) -> np.ndarray:
        """Write A @ B to `out`."""
        self.torch.bmm(self.view(A), self.view(B), out=self.view(out))
        return out

    def add_product(self, total: np.ndarray, W: np.ndarray, X: np.ndarray, finite: bool) -> None:
        """Add `product(W, X)` to `total`; `finite` promises that X is finite."""
        if finite:
            self.view(total).baddbmm_(self.view(W), self.view(X))
        else:
            total += product(W, X)

    def is_finite(self, X: np.ndarray) -> bool:
        """Return whether all numbers are finite; False too if their sum overflows."""
        return math.isfinite(self.view(X).sum().item())

    def scale(self, X: np.ndarray, factor: np.floating, out: np.ndarray) -> np.ndarray:
        """Write X times a number to `out`."""
        self.torch.mul(self.view(X), float(factor), out=self.view(out))
        return out

    def extremes(self, X: np.ndarray, buffer: np.ndarray) -> tuple[float, float]:
        """Return the smallest and the largest magnitude in X, NaN if it contains NaN."""
        magnitudes = self.view(shaped(buffer, *X.shape))
        smallest, largest = self.torch.abs(self.view(X), out=magnitudes).aminmax()
        return smallest.item(), largest.item()

    def divide(self, O: np.ndarray, rows: np.ndarray) -> None:
        """Divide each row of O by a number."""
        self.view(O).div_(self.view(rows[..., None]))

    def exp(self, S: np.ndarray, moderate: bool) -> None:
        """Replace scores by their exponentials; MKL's exp takes 50 times as long where it underflows, exp2 does not."""
        scores = self.view(S)
        if moderate:
            scores.exp_()
        else:
            scores.mul_(math.log2(math.e)).exp2_()

    def row_max(self, S: np.ndarray) -> np.ndarray:
        """Return the maximum of each row, NaN if it contains NaN."""
        maximum: np.ndarray = self.torch.amax(self.view(S), -1).numpy()
        return maximum

    def row_sum(self, S: np.ndarray) -> np.ndarray:
        """Return the sum of each row."""
        total: np.ndarray = self.torch.sum(self.view(S), -1).numpy()
        return total

    def subtract(self, S: np.ndarray, rows: np.ndarray) -> None:
        """Subtract one number from each row of S."""
        self.view(S).sub_(self.view(rows[..., None]))

    def multiply(self, X: np.ndarray, Y: np.ndarray) -> None:
        """Multiply X by Y in place."""
        self.view(X).mul_(self.view(Y))

    def hide(self, S: np.ndarray, band: Band, queries: tuple[int, int], keys: tuple[int, int], value: float) -> None:
        """Set the scores of a tile that the band hides to `value`; for 0, torch clears a triangle on each side."""
        if value == 0:
            diagonal = queries[0] - keys[0]
            self.view(S).tril_(diagonal + band.high).triu_(diagonal + band.low)
        else:
            super().hide(S, band, queries, keys, value)


def products_of(problem: Problem, operands: Operands) -> Products:
    """Return torch's operations for torch tensors, and NumPy's for other arrays, small calls and those with options.

    Score modifications, dropout and masks of pairs are computed by NumPy, one head at a time; windows and mask_mod need
    small tiles. In a forked child, which lacks the threads of torch's pool, a region would wait for them forever. If
    the caller lets torch round the factors of fp32 products, torch's products are not exact.
    """
    of_one_head = problem.is_modified or problem.dense_mask is not None or problem.mask_mod or problem.dropout
    if of_one_head or problem.derivative or problem.weights or problem.mask.left is not None:
        return Products()
    arrays = (operands.q, operands.k, operands.v)
    few = problem.q_len < TORCH_QUERIES or problem.kv_len < TORCH_KEYS
    small = few or problem.q_len * problem.kv_len < TORCH_SCORES
    if small or is_forked() or any(x.framework != "torch" for x in arrays):
        return Products()
    import torch

    region = _region()
    # torch.get_float32_matmul_precision() raises an error if only one of torch's backends rounds.
    if region is None or torch.backends.mkldnn.matmul.fp32_precision not in ("none", "ieee"):
        return Products()
    rows = max(problem.q_len, problem.kv_len)
    # Not plan.threads, which concurrent calls reduce: heads_at_once affects rounding, so it must not depend on them.
    heads_per_thread = problem.batch * problem.kv_heads // torch.get_num_threads()
    heads_at_once = min(TORCH_HEADS, heads_per_thread, TORCH_ROWS // rows)
    return TorchProducts(region, max(1, heads_at_once))


@cache
def _region() -> Region | None:
    """Return a function that opens a parallel region of torch's OpenMP library; None if that lacks GNU's ABI."""
    import ctypes

    import torch

    try:
        parallel = ctypes.CDLL(torch._C.__file__).GOMP_parallel  # also finds symbols of torch's dependencies
    except AttributeError:
        return None
    callback = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
    parallel.argtypes, parallel.restype = (callback, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint), None

    def region(threads: int, function: Callable[[], None]) -> None:
        parallel(callback(lambda _: function()), None, threads, 0)

    return region


_free: list[np.ndarray] = []


class Scratch:
    """Uninitialised arrays whose memory later objects reuse, because the first access to new memory is slow."""

    def __init__(self, dtype: np.dtype, *sizes: int) -> None:
        rounded = [-(-size * dtype.itemsize // LINE) * LINE for size in sizes]
        try:
            self.memory = _free.pop()
        except IndexError:
            self.memory = np.empty(0, np.uint8)
        if self.memory.nbytes < sum(rounded) + LINE:
            self.memory = np.empty(sum(rounded) + LINE, np.uint8)
        start = -self.memory.ctypes.data % LINE
        self.arrays = []
        for size, length in zip(sizes, rounded, strict=True):
            self.arrays.append(self.memory[start : start + size * dtype.itemsize].view(dtype))
            start += length

    def __del__(self) -> None:
        _free.append(self.memory)


def shaped(buffer: np.ndarray, *shape: int) -> np.ndarray:
    """View the start of a flat buffer in a shape."""
    return buffer[: math.prod(shape)].reshape(shape)


def product(W: np.ndarray, X: np.ndarray) -> np.ndarray:
    """Return W @ X with 0 * NaN = 0 * inf = 0, so that NaN and infinities of X reach only rows with a nonzero weight.

    W is (..., rows, n) and X (..., n, columns). No infinity has a negative weight: W is P, or dS, which is 0 or NaN for
    infinite K and Q.
    """
    result: np.ndarray = W @ X
    if math.isfinite(square_sum(result)):
        return result
    finite = np.isfinite(X)
    if finite.all():
        return result
    rows = np.flatnonzero(~finite.all(axis=-1).reshape(-1, X.shape[-2]).all(axis=0))
    weighted = (W[..., rows] != 0).astype(W.dtype)
    special = np.where(finite, 0, X)[..., rows, :]
    positive, negative, undefined = (
        weighted @ kind.astype(W.dtype) > 0 for kind in (special == np.inf, special == -np.inf, np.isnan(special))
    )
    result = W @ np.where(finite, X, 0)
    result += np.where(positive, np.inf, 0) - np.where(negative, np.inf, 0) + np.where(undefined, np.nan, 0)
    return result


def square_sum(tile: np.ndarray) -> float:
    """Return the sum of squares by one BLAS dot: the fastest test of whether all numbers are finite."""
    return float(np.vdot(tile, tile))
