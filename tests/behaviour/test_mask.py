"""Mask and Band against the definition in the docstring of `attention`, for all short sequences, masks and tiles."""

from itertools import combinations, product

import numpy as np
import pytest
from visibility import sees

from cupy_flash.problem.mask import Band, Mask

LENGTHS = range(5)
SIDES = (None, 0, 1, 2, 7)


BANDS = [
    (mask.band(q_len, kv_len), sees(mask, q_len, kv_len))
    for mask in (Mask(*sides) for sides in product(SIDES, SIDES, (False, True)))
    for q_len, kv_len in product(LENGTHS, LENGTHS)
]


def ranges(length):
    """Return all non-empty half-open ranges within a sequence of this length."""
    return combinations(range(length + 1), 2)


def test_the_table_has_many_bands():
    assert len(BANDS) == 5 * 5 * 2 * 5 * 5
    assert len({band for band, _ in BANDS}) > 200


def test_offset():
    assert Mask().offset(3, 5) == 2 and Mask(1, 2).offset(5, 3) == -2
    assert Mask(top_left=True).offset(3, 5) == 0


def test_visible_and_sees_all():
    for band, seen in BANDS:
        for queries, keys in product(ranges(band.q_len), ranges(band.kv_len)):
            tile = seen[slice(*queries), slice(*keys)]
            visible = band.visible(*queries, *keys)
            assert visible.dtype == bool
            np.testing.assert_array_equal(visible, tile, err_msg=f"{band} {queries} {keys}")
            assert band.sees_all(*queries, *keys) == tile.all(), (band, queries, keys)


def test_pairs():
    for band, seen in BANDS:
        assert band.pairs == seen.sum(), band


def test_pairs_of_the_longest_sequences():
    """The counts were computed by hand, because counting per query would take gigabytes of memory."""
    n = 2**31 - 1
    assert Mask().band(n, n).pairs == n * n
    assert Mask(None, 0).band(n, n).pairs == n * (n + 1) // 2
    assert Mask(2, 0).band(n, n).pairs == 3 * n - 3
    assert Mask(2, 0).band(3, n).pairs == 9
    assert Mask(None, 0, top_left=True).band(n, 10).pairs == 55 + 10 * (n - 10)


def test_kv_range_and_q_range():
    """kv_range holds exactly the keys that some query sees, q_range exactly the queries that see some key."""
    for band, seen in BANDS:
        for queries in ranges(band.q_len):
            keys = np.flatnonzero(seen[slice(*queries)].any(axis=0))
            assert list(range(*band.kv_range(*queries))) == keys.tolist(), (band, queries)
        for keys in ranges(band.kv_len):
            queries = np.flatnonzero(seen[:, slice(*keys)].any(axis=1))
            assert list(range(*band.q_range(*keys))) == queries.tolist(), (band, keys)


def test_rows_of_a_shard_with_a_step():
    """The band of a shard equals the band of the whole sequence at the positions of the shard's rows."""
    for mask in (Mask(*sides) for sides in product(SIDES, SIDES, (False, True))):
        seen = sees(mask, 13, 11)
        for step, q_first, kv_first in product((1, 2, 3, 5), (0, 1, 4), (0, 2, 10)):
            part = seen[q_first::step, kv_first::step]
            band = mask.band(*part.shape, q_first + mask.offset(13, 11) - kv_first, step)
            np.testing.assert_array_equal(band.visible(0, part.shape[0], 0, part.shape[1]), part)


@pytest.mark.parametrize("block", [1, 2, 3, 8])
def test_tiles(block):
    """Tiles cover the range once, in order; none is empty, and inner boundaries are multiples of the block."""
    for band, _ in BANDS:
        for tiles_of, range_of, length, reverse in (
            (band.kv_tiles, band.kv_range, band.q_len, True),
            (band.q_tiles, band.q_range, band.kv_len, False),
        ):
            for across in ranges(length):
                tiles, (start, stop) = tiles_of(*across, block), range_of(*across)
                tiles = tiles[::-1] if reverse else tiles
                assert [x for tile in tiles for x in range(*tile)] == list(range(start, stop))
                for tile_start, tile_stop in tiles:
                    assert 0 < tile_stop - tile_start <= block
                    assert tile_start == start or tile_start % block == 0
                    assert tile_stop == stop or tile_stop % block == 0


def test_sides_beyond_every_position():
    """A window larger than the sequence causes neither overflow nor an empty band."""
    band = Mask(2**62, 2**62).band(3, 4)
    assert band.visible(0, 3, 0, 4).all() and band.sees_all(0, 3, 0, 4)
    long = Mask(10, 0).band(2**31 - 1, 2**31 - 1)
    assert long.kv_range(2**31 - 100, 2**31 - 50) == (2**31 - 110, 2**31 - 50)
    assert long.visible(2**31 - 3, 2**31 - 1, 2**31 - 4, 2**31 - 1).tolist() == [
        [True, True, False],
        [True, True, True],
    ]


@pytest.mark.parametrize(
    ("mask", "text"),
    [
        (Mask(), "full"),
        (Mask(None, 0), "causal (bottom-right)"),
        (Mask(None, 0, top_left=True), "causal (top-left)"),
        (Mask(3, None), "window (3, inf), bottom-right"),
        (Mask(3, 0, top_left=True), "window (3, 0), top-left"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_str(mask, text):
    assert str(mask) == text


def test_masks_and_bands_compare_by_value():
    assert Mask(1, 2) == Mask(1, 2, False) and hash(Mask(1, 2)) == hash(Mask(1, 2, False))
    assert Mask(1, 2).band(3, 4) == Band(0, 3, 3, 4)
