"""Masks and score_mods of real models as functions (b, h, q_idx, kv_idx) of NumPy operators, and random masks."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

LENGTH = 4096  # number of tokens, for which the captured arrays are made


def causal(b, h, q, kv):
    return q >= kv


def sliding(window):
    return lambda b, h, q, kv: (q >= kv) & (q - kv < window)


def prefix(length):
    return lambda b, h, q, kv: (q >= kv) | (kv < length)


def sinks(count, window):
    return lambda b, h, q, kv: (q >= kv) & ((kv < count) | (q - kv < window))


def dilated(window, step):
    return lambda b, h, q, kv: (abs(q - kv) <= window) & ((q - kv) % step == 0)


def global_window(count, window):
    return lambda b, h, q, kv: (q < count) | (kv < count) | (abs(q - kv) <= window)


def batchify(length):
    """Return the mask of consecutive sequences of equal length, each of them causal."""
    return lambda b, h, q, kv: (q // length == kv // length) & (q % length >= kv % length)


def documents(count=9, seed=0):
    """Return (document of each token, first token of each document), int32."""
    cuts = np.random.default_rng(seed).choice(np.arange(1, LENGTH), count - 1, replace=False)
    starts = np.concatenate([[0], np.sort(cuts)]).astype(np.int32)
    return np.repeat(np.arange(count, dtype=np.int32), np.diff([*starts, LENGTH])), starts


def document(window=None, causal=False, logical=False, dtype=np.int32):
    ids, starts = (array.astype(dtype) for array in documents())

    def mask(b, h, q, kv):
        same = ids[q] == ids[kv]
        if logical:  # use positions relative to the start of the document
            i, j = q - starts[ids[q]], kv - starts[ids[kv]]
        else:
            i, j = q, kv
        if causal:
            same = same & (i >= j)
        return same if window is None else same & (abs(i - j) <= window)

    return mask


def shared_prefix(length):
    """Return the mask of causal documents after a prefix that every token sees."""
    ids, _ = documents(seed=1)
    return lambda b, h, q, kv: (kv < length) | ((ids[q] == ids[kv]) & (q >= kv))


def block_diffusion(block):
    """Return the mask of block diffusion: half the tokens are noisy, and the other half are the same tokens, clean.

    Noisy blocks see themselves and earlier clean blocks.
    """
    half = LENGTH // 2

    def mask(b, h, q, kv):
        q_clean, kv_clean = q >= half, kv >= half
        q_block, kv_block = np.where(q_clean, q - half, q) // block, np.where(kv_clean, kv - half, kv) // block
        own = (q_block == kv_block) & (q_clean == kv_clean)
        earlier = (q_block > kv_block) & kv_clean & ~q_clean
        return own | earlier | ((q_block >= kv_block) & kv_clean & q_clean)

    return mask


def row_major(width):
    return lambda i: (i // width, i % width)


def tiled(width, tile):
    def place(i):
        which, inside = i // (tile * tile), i % (tile * tile)
        across = width // tile
        return which // across * tile + inside // tile, which % across * tile + inside % tile

    return place


def morton(i):
    """Return the row and the column of a pixel in Morton order, from the interleaved bits of its index."""

    def even_bits(x):
        x = x & 0x55555555
        x = (x ^ (x >> 1)) & 0x33333333
        x = (x ^ (x >> 2)) & 0x0F0F0F0F
        x = (x ^ (x >> 4)) & 0x00FF00FF
        return (x ^ (x >> 8)) & 0x0000FFFF

    return even_bits(i >> 1), even_bits(i)


def natten(place, width, window):
    """Return the mask of neighborhood attention: a pixel sees a square around it, shifted inwards at the edges."""
    radius = window // 2

    def mask(b, h, q, kv):
        inside = True
        for x, y in zip(place(q), place(kv), strict=True):
            inside = (abs(np.clip(x, radius, width - 1 - radius) - y) <= radius) & inside
        return inside

    return mask


def sliding_tiles(canvas, tile, window):
    """Return the mask of sliding tile attention: blocks see the blocks around them, shifted inwards at the edges.

    All sizes are counts of blocks.
    """
    size = int(np.prod(tile))

    def place(i):
        rest, places = i // size, []
        for extent in canvas[::-1]:
            places.append(rest % extent)
            rest = rest // extent
        return places[::-1]

    def mask(b, h, q, kv):
        inside = True
        for x, y, extent, around in zip(place(q), place(kv), canvas, window, strict=True):
            center = np.clip(x, around // 2, extent - 1 - around // 2)
            inside = (abs(center - y) <= around // 2) & inside
        return inside

    return mask


def frames(size, reach, first):
    """Return a mask in which tokens see neighbouring frames; the first tokens see everything and are seen by all."""
    return lambda b, h, q, kv: (abs(q // size - kv // size) <= reach) | (kv < first) | (q < first)


def across_frames(size, reach):
    """Return a mask in which tokens see the tokens at nearby positions of all frames."""
    return lambda b, h, q, kv: abs(q % size - kv % size) <= reach


def block_map(size):
    chosen = np.random.default_rng(2).random((LENGTH // size, LENGTH // size)) < 0.2
    return lambda b, h, q, kv: chosen[q // size, kv // size]


def top_blocks(size, count):
    """Return a block-sparse mask: a table lists the key blocks that each query block sees."""
    rng = np.random.default_rng(3)
    chosen = np.stack([rng.choice(LENGTH // size, count, replace=False) for _ in range(LENGTH // size)])

    def mask(b, h, q, kv):
        hit = chosen[q // size, 0] == kv // size
        for n in range(1, count):
            hit = hit | (chosen[q // size, n] == kv // size)
        return hit

    return mask


def permuted():
    """Return the mask of documents with shuffled tokens, in which no tile is empty or full."""
    ids = np.random.default_rng(4).permutation(documents()[0])
    return lambda b, h, q, kv: ids[q] == ids[kv]


class Tokens(NamedTuple):
    """The values from which random expressions are made: positions, the head, and elements of captured arrays."""

    q: Any
    kv: Any
    h: Any
    ids: Any
    wide: Any
    rows: Any
    hidden: Any
    huge: Any


def random_mask(seed, depth):
    """Return a mask of 320 tokens made of random operators; every call gives the same mask, for NumPy arrays and for
    tracing.
    """
    rng = np.random.default_rng(seed)
    ids = np.sort(rng.integers(0, 9, 320)).astype(np.int32)
    wide = rng.integers(-40, 60, 320).cumsum()
    rows = np.sort(rng.integers(-3, 90, (3, 320)), axis=1).astype(np.int16)
    hidden = np.arange(320) % 150 > 100
    huge = np.sort(rng.integers(-(2**63), 2**63 - 1, 320))

    choices = f"{seed} {depth}"  # a string, because a trace would replace captured numbers by stand-ins

    def mask(b, h, q, kv):
        seed, depth = map(int, choices.split())
        return _truth(np.random.default_rng(seed), depth, Tokens(q, kv, h, ids, wide, rows, hidden, huge))

    return mask


def _read(array, *indices):
    """Read array[indices] with indices clamped to the array."""
    if all(isinstance(index, np.ndarray) for index in indices):
        indices = [np.clip(index, 0, size - 1) for index, size in zip(indices, array.shape, strict=True)]
    return array[tuple(indices)]


def _one_of(rng, *choices):
    return choices[rng.integers(len(choices))]()


def _truth(rng, depth, x):
    def truth():
        return _truth(rng, depth - 1, x)

    def whole():
        return _whole(rng, max(depth - 1, 0), x)

    if depth == 0:
        return _one_of(
            rng,
            lambda: x.q >= x.kv, lambda: x.q - x.kv < _small(rng, 1, 100), lambda: x.ids[x.q] == x.ids[x.kv],
            lambda: x.kv < _small(rng, 1, 320), lambda: x.hidden[x.kv], lambda: x.q * 0.5 > x.kv,
        )  # fmt: skip
    return _one_of(
        rng,
        lambda: truth() & truth(), lambda: truth() | truth(), lambda: truth() ^ truth(), lambda: ~truth(),
        lambda: whole() < whole(), lambda: whole() <= whole(), lambda: whole() == whole(), lambda: whole() != whole(),
        lambda: whole() >= whole(), lambda: whole() % 64 == whole() % 64, lambda: np.where(truth(), truth(), truth()),
    )  # fmt: skip


def _whole(rng, depth, x):
    def whole():
        return _whole(rng, depth - 1, x)

    if depth == 0:
        return _one_of(
            rng, lambda: x.q, lambda: x.kv, lambda: x.q, lambda: x.kv, lambda: x.h, lambda: x.kv * _small(rng, -3, 30)
        )
    return _one_of(
        rng,
        lambda: whole() + whole(), lambda: whole() - whole(), lambda: whole() * _small(rng, -3, 4),
        lambda: whole() // _small(rng, -2, 40), lambda: whole() % _small(rng, -2, 40), lambda: abs(whole()),
        lambda: np.minimum(whole(), whole()), lambda: np.maximum(whole(), whole()), lambda: np.sign(whole()),
        lambda: np.where(_truth(rng, depth - 1, x), whole(), whole()), lambda: ~whole(), lambda: -whole(),
        lambda: _read(x.ids, whole()), lambda: _read(x.wide, whole()), lambda: _read(x.rows, x.h, whole()),
        lambda: _read(x.rows, whole() % 3, whole()), lambda: _read(x.huge, whole()),
        lambda: whole() * whole(), lambda: whole() // whole(),
        lambda: whole() & _small(rng, 0, 256), lambda: whole() | _small(rng, 0, 64), lambda: whole() ^ whole(),
        lambda: whole() >> _small(rng, 0, 5), lambda: whole() << _small(rng, 0, 30), lambda: whole() & whole(),
        lambda: np.clip(whole(), _small(rng, -9, 9), _small(rng, 9, 300)), lambda: whole() + _small(rng, -99, 99),
    )  # fmt: skip


def _small(rng, low, high):
    return np.int32(rng.integers(low, high))


# name: (mask, smallest fraction of empty tiles that must be classified as empty, and of full tiles as full); a tile
# is 128 x 128.
MASKS = {
    "causal": (causal, 1, 1),
    "sliding": (sliding(512), 1, 1),
    "prefix": (prefix(700), 1, 1),
    "sinks": (sinks(4, 1024), 1, 1),
    "document": (document(), 1, 1),
    "document long": (document(dtype=np.int64), 1, 1),
    "document causal": (document(causal=True), 1, 1),
    "document causal logical": (document(causal=True, logical=True), 0.94, 1),
    "document causal logical long": (document(causal=True, logical=True, dtype=np.int64), 0.94, 1),
    "document window": (document(window=300, logical=True), 0.9, 0.98),
    "shared prefix": (shared_prefix(600), 0.98, 0.95),
    "dilated 4": (dilated(512, 4), 1, 1),
    "dilated 256": (dilated(512, 256), 1, 1),
    "global window": (global_window(128, 400), 1, 1),
    "batchify": (batchify(384), 1, 1),
    "block diffusion 32": (block_diffusion(32), 1, 1),
    "block diffusion 256": (block_diffusion(256), 1, 1),
    "natten": (natten(row_major(64), 64, 13), 1, 1),
    "natten tiled": (natten(tiled(64, 8), 64, 13), 1, 1),
    "natten morton": (natten(morton, 64, 13), 1, 1),
    "sliding tiles 2d": (sliding_tiles((8, 8), (8, 8), (3, 3)), 1, 1),
    "sliding tiles 3d": (sliding_tiles((4, 4, 4), (4, 4, 4), (3, 3, 3)), 1, 1),
    "frames": (frames(512, 1, 64), 1, 1),
    "across frames": (across_frames(1024, 40), 1, 1),
    "block map": (block_map(64), 1, 1),
    "top blocks": (top_blocks(128, 4), 1, 1),
    "permuted": (permuted(), 1, 1),
}

# ---- score_mods

SLOPES = 2.0 ** -np.arange(1, 5, dtype=np.float32)
TABLE = np.random.default_rng(8).normal(size=(4, 99)).astype(np.float32)
ROW_BIAS = np.random.default_rng(9).normal(size=LENGTH).astype(np.float64)


def alibi(score, b, h, q, kv):
    return score - SLOPES[h] * abs(q - kv)


def softcap(cap):
    return lambda score, b, h, q, kv: np.tanh(score / cap) * cap


def relative(score, b, h, q, kv):
    return score + TABLE[h, np.clip(q - kv, -49, 49) + 49]


def everything(score, b, h, q, kv):
    """Modify the score by every operator on reals."""
    x = np.where(score > 0, np.log(np.abs(score) + 0.5), score) + np.exp(-np.abs(score)) * np.sin(score)
    x = np.maximum(x, -1.5) + np.minimum(score, 1.0) * np.cos(x) + np.sqrt(1.0 + np.square(score))
    x = x + np.expm1(score * 0.1) + np.log1p(np.abs(x)) + np.exp2(x * 0.125) + np.log2(1.5 + np.abs(x))
    x = x + np.floor(score * 3) * 0.25 + np.ceil(score) + np.trunc(x) + np.rint(x * 2) + np.sign(score)
    x = x + np.power(np.abs(score) + 0.25, 1.5) + (q % 7) / (kv % 5 + 1) + score % 0.75 + x // 0.5
    return x + ROW_BIAS[kv] * 0.5 + np.where(q > kv, 1.0, -1.0) / (1.0 + np.exp(-x))


SCORES = {
    "alibi": alibi,
    "softcap": softcap(30.0),
    "relative": relative,
    "row bias": lambda score, b, h, q, kv: score + ROW_BIAS[kv],
    "head scale": lambda score, b, h, q, kv: score * SLOPES[h],
    "relu": lambda score, b, h, q, kv: np.maximum(score, 0.0),
    "distance": lambda score, b, h, q, kv: score / (1 + abs(q - kv)),
    "everything": everything,
}
