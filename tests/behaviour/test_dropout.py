"""Dropout masks: published Philox vectors, the documented counters element by element, independence of tiles."""

import numpy as np
import pytest

from cupy_flash import dropout

MASK32 = 2**32 - 1


def scalar_philox(counter, seed):
    """Return four random words by Philox 4x32-10, written with Python integers from the algorithm's definition."""
    c0, c1, c2, c3 = counter
    k0, k1 = seed & MASK32, seed >> 32
    for round_index in range(10):
        if round_index > 0:
            k0, k1 = (k0 + 0x9E3779B9) & MASK32, (k1 + 0xBB67AE85) & MASK32
        high0, low0 = divmod(0xD2511F53 * c0, 2**32)
        high1, low1 = divmod(0xCD9E8D57 * c2, 2**32)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
    return c0, c1, c2, c3


def scalar_half(seed, head_index, i, j):
    """Return the 16 random bits of one element by the definition in the docstring of dropout.py."""
    words = scalar_philox((i // 16, j // 16, head_index, 4 * (i % 8) + (j % 8) // 2), seed)
    halves = [half for word in words for half in (word & 0xFFFF, word >> 16)]
    return halves[4 * ((i // 8) % 2) + 2 * ((j // 8) % 2) + j % 2]


@pytest.mark.parametrize(
    "counter, seed, expected",
    [
        pytest.param((0, 0, 0, 0), 0, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8), id="zeros"),
        pytest.param((MASK32,) * 4, 2**64 - 1, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD), id="ones"),
        pytest.param(
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            0xA4093822 | 0x299F31D0 << 32,
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
            id="pi",
        ),
    ],
)
def test_published_vectors(counter, seed, expected):
    assert tuple(int(word) for word in dropout.philox(*counter, seed)) == expected
    assert scalar_philox(counter, seed) == expected


def test_philox_broadcasts():
    words = dropout.philox(np.arange(3)[:, None], 7, np.arange(5), 9, 2**40 + 1)
    assert all(word.shape == (3, 5) and word.dtype == np.uint32 for word in words)
    assert tuple(int(word[2, 4]) for word in words) == scalar_philox((2, 7, 4, 9), 2**40 + 1)


@pytest.mark.parametrize(
    "seed, head_index, q_range, kv_range, p",
    [
        pytest.param(0, 0, (0, 16), (0, 16), 0.5, id="one-block"),
        pytest.param(1, 2, (3, 40), (5, 38), 0.1, id="odd-range"),
        pytest.param(2**32 + 5, 1, (17, 30), (31, 34), 0.3, id="seed-above-32-bits"),
        pytest.param(2**64 - 1, 2**31 + 3, (7, 9), (15, 17), 0.5, id="largest-seed-big-head"),
        pytest.param(-2, 1, (0, 5), (0, 9), 0.5, id="negative-seed-is-twos-complement"),
        pytest.param(9, 3, (2**20 - 5, 2**20 + 6), (2**20 - 13, 2**20 + 3), 0.5, id="big-positions"),
        pytest.param(4, 0, (1, 2), (6, 7), 0.5, id="one-element"),
    ],
)
def test_elements_follow_the_definition(seed, head_index, q_range, kv_range, p):
    keep = dropout.keep_mask(seed, head_index, *q_range, *kv_range, p)
    halves = [[scalar_half(seed % 2**64, head_index, i, j) for j in range(*kv_range)] for i in range(*q_range)]
    assert keep.dtype == np.bool_
    np.testing.assert_array_equal(keep, np.array(halves) >= round(65536 * p))


def test_a_half_equal_to_the_threshold_is_kept():
    half = scalar_half(3, 1, 20, 30)
    assert dropout.keep_mask(3, 1, 20, 21, 30, 31, half / 65536)
    assert not dropout.keep_mask(3, 1, 20, 21, 30, 31, (half + 1) / 65536)


def test_any_split_gives_the_same_bits():
    whole = dropout.keep_mask(11, 3, 5, 100, 9, 120, 0.4)
    for q_cuts, kv_cuts in [((5, 6, 100), (9, 120)), ((5, 32, 48, 100), (9, 16, 17, 120)), ((5, 100), (9, 73, 120))]:
        parts = [
            [dropout.keep_mask(11, 3, *q_range, *kv_range, 0.4) for kv_range in zip(kv_cuts, kv_cuts[1:], strict=False)]
            for q_range in zip(q_cuts, q_cuts[1:], strict=False)
        ]
        np.testing.assert_array_equal(np.block(parts), whole)


def test_any_positions_give_the_same_bits():
    whole = dropout.keep_mask(2**40 + 11, 3, 0, 100, 0, 120, 0.4)
    rows, columns = np.arange(5, 100, 3), np.array([7, 2, 119, 64])
    np.testing.assert_array_equal(
        dropout.keep_mask_at(2**40 + 11, 3, rows[:, None], columns, 0.4), whole[np.ix_(rows, columns)]
    )


@pytest.mark.parametrize("q_range, kv_range", [((4, 4), (0, 9)), ((0, 9), (16, 16))], ids=["no-queries", "no-keys"])
def test_empty_ranges(q_range, kv_range):
    keep = dropout.keep_mask(0, 0, *q_range, *kv_range, 0.5)
    assert keep.shape == (q_range[1] - q_range[0], kv_range[1] - kv_range[0])


@pytest.mark.parametrize("p", [0.01, 0.1, 0.5, 0.9])
def test_kept_fraction_within_five_sigma(p):
    keep = dropout.keep_mask(42, 5, 0, 512, 0, 512, p)
    probability = 1 / dropout.keep_scale(p)
    assert abs(keep.mean() - probability) < 5 * np.sqrt(probability * (1 - probability) / keep.size)


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(dict(seed=42, head_index=6, q=0, kv=0), id="next-head"),
        pytest.param(dict(seed=43, head_index=5, q=0, kv=0), id="next-seed"),
        pytest.param(dict(seed=42 + 2**32, head_index=5, q=0, kv=0), id="next-high-seed-word"),
        pytest.param(dict(seed=42, head_index=5, q=1, kv=0), id="next-row"),
        pytest.param(dict(seed=42, head_index=5, q=8, kv=0), id="other-half-of-the-block"),
        pytest.param(dict(seed=42, head_index=5, q=0, kv=1), id="next-column"),
        pytest.param(dict(seed=42, head_index=5, q=0, kv=8), id="other-column-half"),
    ],
)
def test_neighbours_are_independent(other):
    """Two independent fair coins agree with probability 1/2."""
    first = dropout.keep_mask(42, 5, 0, 512, 0, 512, 0.5)
    q, kv = other["q"], other["kv"]
    second = dropout.keep_mask(other["seed"], other["head_index"], q, q + 512, kv, kv + 512, 0.5)
    assert abs((first == second).mean() - 0.5) < 5 * 0.5 / np.sqrt(first.size)


def test_threshold_and_scale():
    assert [dropout.threshold(p) for p in (0.0, 0.5, 1.0)] == [0, 32768, 65536]
    assert dropout.threshold(0.1) == 6554
    assert dropout.keep_scale(0.0) == 1.0
    assert dropout.keep_scale(0.1) == 65536 / 58982
    assert dropout.keep_mask(1, 2, 0, 33, 0, 47, 0.0).all()
    assert not dropout.keep_mask(1, 2, 0, 33, 0, 47, 1.0).any()
