"""Dropout as a pure function of (seed, batch, head, query, key): Philox 4x32-10 (Salmon et al., 2011) in NumPy.

The bits do not depend on engine, tile or shard: they are derived from positions in the whole sequence. One Philox call
serves the eight elements of a 16 x 16 tile that one thread holds in mma fragments:

    counter = (i // 16, j // 16, b * Hq + h, 4 * (i % 8) + (j % 8) // 2)        key = (seed % 2**32, seed // 2**32)
    n       = 4 * ((i // 8) % 2) + 2 * ((j // 8) % 2) + j % 2                   index of its 16-bit half, 0 to 7

Half n is the low (n even) or high (n odd) 16 bits of output word n // 2.
An element is kept if its half is at least t = round(65536 p), and then multiplied by 65536 / (65536 - t).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt  # its import takes milliseconds

    UInt32Array = npt.NDArray[np.uint32]

TILE = 16  # rows and columns of a block of the mask; the Philox counters of its elements have equal words 0 and 1
ROUNDS = 10
MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
KEY_INCREMENTS = (0x9E3779B9, 0xBB67AE85)
MASK32 = np.uint64(0xFFFFFFFF)
SHIFT32 = np.uint64(32)


def philox(
    counter0: npt.ArrayLike, counter1: npt.ArrayLike, counter2: npt.ArrayLike, counter3: npt.ArrayLike, seed: int
) -> tuple[UInt32Array, UInt32Array, UInt32Array, UInt32Array]:
    """Return Philox 4x32-10 of the broadcast counter words, each below 2**32; the key is `seed` modulo 2**64."""
    # uint64, so that one multiplication yields both halves of the 64-bit product.
    c0, c1, c2, c3 = (np.asarray(word, np.uint64) for word in (counter0, counter1, counter2, counter3))
    key0, key1 = seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF
    for _ in range(ROUNDS):
        product0, product1 = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        c0 = (product1 >> SHIFT32) ^ (c1 ^ np.uint64(key0))
        c2 = (product0 >> SHIFT32) ^ (c3 ^ np.uint64(key1))
        c1, c3 = product1 & MASK32, product0 & MASK32
        key0, key1 = (key0 + KEY_INCREMENTS[0]) & 0xFFFFFFFF, (key1 + KEY_INCREMENTS[1]) & 0xFFFFFFFF
    return c0.astype(np.uint32), c1.astype(np.uint32), c2.astype(np.uint32), c3.astype(np.uint32)


def threshold(p: float) -> int:
    """Return t = round(65536 p), p in [0, 1]; an element is dropped if its 16-bit value is below t."""
    return round(65536 * p)


def keep_scale(p: float) -> float:
    """Return 65536 / (65536 - t), the inverse of the keep probability; problem/checks.py checks that t < 65536."""
    return 65536 / (65536 - threshold(p))


def keep_mask(
    seed: int, head_index: int, q_start: int, q_stop: int, kv_start: int, kv_stop: int, p: float
) -> npt.NDArray[np.bool_]:
    """Return the keep mask of a tile, bool (q_stop - q_start, kv_stop - kv_start), True where P[i, j] is kept.

    i and j are positions in the whole sequence, so any tiling gives the same bits. `head_index` is b * Hq + h; `seed`
    is taken modulo 2**64.
    """
    q_block, kv_block = q_start // TILE, kv_start // TILE
    q_blocks, kv_blocks = -(-q_stop // TILE) - q_block, -(-kv_stop // TILE) - kv_block
    row = np.arange(8, dtype=np.uint64)[:, None, None]
    column_pair = np.arange(4, dtype=np.uint64)
    words = philox(
        np.arange(q_block, q_block + q_blocks, dtype=np.uint64)[:, None, None, None],
        np.arange(kv_block, kv_block + kv_blocks, dtype=np.uint64)[:, None],
        head_index,
        4 * row + column_pair,
        seed,
    )
    # In little-endian order the low half, which is the even column, comes first.
    block_words = np.empty((q_blocks, 2, 8, kv_blocks, 2, 4), "<u4")
    for n, word in enumerate(words):
        block_words[:, n // 2, :, :, n % 2] = word
    halves = block_words.view("<u2").reshape(q_blocks * TILE, kv_blocks * TILE)
    q_offset, kv_offset = q_start - q_block * TILE, kv_start - kv_block * TILE
    return halves[q_offset : q_offset + q_stop - q_start, kv_offset : kv_offset + kv_stop - kv_start] >= threshold(p)


def keep_mask_at(
    seed: int,
    head_index: int | npt.NDArray[np.integer],
    queries: npt.NDArray[np.integer],
    keys: npt.NDArray[np.integer],
    p: float,
) -> npt.NDArray[np.bool_]:
    """Return `keep_mask` at positions and heads that broadcast, by one Philox call per element."""
    i, j = queries, keys
    words = philox(i // TILE, j // TILE, head_index, 4 * (i % 8) + (j % 8) // 2, seed)
    word = np.choose(2 * (i // 8 % 2) + j // 8 % 2, words)
    return (word >> (16 * (j % 2)).astype(np.uint32) & np.uint32(0xFFFF)) >= threshold(p)
