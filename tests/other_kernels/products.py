"""Products of matrices in float64, and in float32 with several orders of sums, from which tolerances are derived."""

import numpy as np

from .launching import Expected

TF32_BITS = np.uint32(0xFFFFE000)


def matrix(rng, shape, dtype):
    return rng.standard_normal(shape).astype(np.float32).astype(dtype)


def as_tf32(array):
    """Return the numbers that tensor cores read from float32: the low 13 bits are ignored."""
    return (array.view(np.uint32) & TF32_BITS).view(np.float32) if array.dtype == np.float32 else array


def product(a, b, dtype, *, bits=24):
    """Return a @ b as tensor cores compute it with accumulators of `bits` bits, rounded to `dtype`."""
    a, b = as_tf32(a), as_tf32(b)
    exact = a.astype(np.float64) @ b.astype(np.float64)
    return Expected(exact, farthest(exact, sums(a, b) if bits == 24 else truncated_sums(a, b, bits), dtype), dtype)


def sums(a, b):
    """Return a @ b in float32, summed forwards, backwards and in blocks of 16."""
    a, b = a.astype(np.float32), b.astype(np.float32)
    terms = [np.multiply.outer(a[:, k], b[k]) for k in range(a.shape[1])]
    forwards, backwards = np.zeros_like(terms[0]), np.zeros_like(terms[0])
    for k in range(len(terms)):
        forwards, backwards = forwards + terms[k], backwards + terms[-1 - k]
    blocks = sum(a[:, k : k + 16] @ b[k : k + 16] for k in range(0, len(terms), 16))
    return forwards, backwards, blocks


def truncated_sums(a, b, bits):
    """Yield a @ b, summed in blocks of 32 products, with the blocks forwards and then backwards.

    All terms of a block, the sum so far among them, are truncated to the last of the `bits` bits of the largest one.
    """
    a, b = a.astype(np.float64), b.astype(np.float64)
    blocks = [a[:, k : k + 32, None] * b[None, k : k + 32] for k in range(0, a.shape[1], 32)]
    for ordered in (blocks, blocks[::-1]):
        total = np.zeros((len(a), 1, b.shape[1]))
        for block in ordered:
            terms = np.concatenate([total, block], 1)
            unit = np.ldexp(1.0, np.frexp(np.abs(terms).max(1, keepdims=True))[1] - bits)
            total = (np.trunc(terms / unit) * unit).sum(1, keepdims=True)
        yield total[:, 0]


def farthest(exact, runs, dtype):
    """Return for each element, of the values of all runs rounded to `dtype`, the farthest from the exact one."""
    rounded = np.stack([np.asarray(run).astype(np.float32).astype(dtype).astype(np.float64) for run in runs])
    worst = np.abs(rounded - exact).argmax(0)
    return np.take_along_axis(rounded, worst[None], 0)[0]


def exactly(array, initial=None):
    """Return the Expected of an array that a kernel must write bit for bit."""
    return Expected(array, None, array.dtype, initial)
