"""Classification of tiles under a mask: no class is wrong, and nearly all empty and full tiles are found."""

import numpy as np
import pytest
from helpers.masks import LENGTH, MASKS, random_mask
from helpers.tiers import in_tiers

from cupy_flash.mods import tiles
from cupy_flash.mods.tiles import EMPTY, FULL, TileClasses
from cupy_flash.mods.trace import Mod


def true_classes(mask, length, block, head=1):
    """Return (tile is empty, tile is full) for each tile, from the mask's elements."""
    i = np.arange(length, dtype=np.int32)
    with np.errstate(all="ignore"):
        seen = mask(np.zeros((1, 1), np.int32), np.full((1, 1), head, np.int32), i[:, None], i[None])
    shape = (length // block, block, length // block, block)
    seen = np.broadcast_to(seen, (length, length)).reshape(shape)
    return ~seen.any((1, 3)), seen.all((1, 3))


def proved_classes(mask, length, block, head=1):
    """Return (EMPTY, FULL) for each tile, by interval arithmetic."""
    mod = Mod(mask_mod=mask)
    starts = np.arange(0, length, block)
    queries, keys = starts[:, None], starts[None]
    classes = TileClasses(mod.program.mask, mod.arrays, mod.numbers).of(
        0, head, (queries, queries + block - 1), (keys, keys + block - 1)
    )
    return classes == EMPTY, classes == FULL


@pytest.mark.parametrize("row", in_tiers(MASKS, set(MASKS) - {"natten", "sliding tiles 2d", "dilated 4"}))
def test_classes_of_known_masks(row):
    mask, least_empty, least_full = row
    empty, full = true_classes(mask, LENGTH, 128)
    proved_empty, proved_full = proved_classes(mask, LENGTH, 128)
    assert not (proved_empty & ~empty).any()
    assert not (proved_full & ~full).any()
    assert proved_empty.sum() >= least_empty * empty.sum(), f"{proved_empty.sum()} of {empty.sum()} empty tiles"
    assert proved_full.sum() >= least_full * full.sum(), f"{proved_full.sum()} of {full.sum()} full tiles"


def wrong_classes(seeds):
    """Return numbers of (wrong classes, classified tiles, tiles that are empty or full) over random masks."""
    wrong = proved = exist = 0
    for seed in seeds:
        mask = random_mask(seed, 1 + seed % 4)
        empty, full = true_classes(mask, 320, 32)
        if Mod(mask_mod=mask).program.mask is None:  # the mask is simplified to True
            assert full.all()
            continue
        proved_empty, proved_full = proved_classes(mask, 320, 32)
        wrong += int((proved_empty & ~empty).sum() + (proved_full & ~full).sum())
        proved += int(proved_empty.sum() + proved_full.sum())
        exist += int(empty.sum() + full.sum())
    return wrong, proved, exist


@pytest.mark.parametrize("seeds", in_tiers({"few": range(500), "many": range(500, 1500)}, ["few"]))
def test_no_class_of_a_random_mask_is_wrong(seeds):
    wrong, proved, exist = wrong_classes(seeds)
    assert wrong == 0
    assert proved >= 0.7 * exist


def test_a_wrong_comparison_is_found(monkeypatch):
    """The planted bug evaluates `<` as `<=`, which differs for equal operands."""
    monkeypatch.setitem(tiles.FUNCTIONS, "less", lambda x, y: tiles.Truth(x.lo <= y.hi, x.hi > y.lo))
    assert wrong_classes(range(100))[0] > 0


def test_a_table_of_extremes_that_is_off_by_one_is_found(monkeypatch):
    chunks = tiles.Extremes.chunks

    def shifted(self):
        return tiles.Interval(*(np.roll(bound, 1, axis=1) for bound in chunks.fget(self)))

    monkeypatch.setattr(tiles.Extremes, "chunks", property(shifted))
    assert wrong_classes(range(100))[0] > 0
