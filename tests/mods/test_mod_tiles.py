"""Classes of tiles under a mask: never a wrong one, and nearly all that exist are proved."""

import numpy as np
import pytest
from helpers.masks import LENGTH, MASKS, random_mask, traced
from helpers.tiers import in_tiers

from cupy_flash.mods import tiles
from cupy_flash.mods.tiles import EMPTY, FULL, TileClasses


def true_classes(mask, length, block, head=1):
    """(no pair is seen, all pairs are seen) of each tile, from the mask itself."""
    i = np.arange(length, dtype=np.int32)
    with np.errstate(all="ignore"):
        seen = mask(np.zeros((1, 1), np.int32), np.full((1, 1), head, np.int32), i[:, None], i[None])
    shape = (length // block, block, length // block, block)
    seen = np.broadcast_to(seen, (length, length)).reshape(shape)
    return ~seen.any((1, 3)), seen.all((1, 3))


def proved_classes(mask, length, block, head=1):
    """(EMPTY, FULL) of each tile, as proved."""
    program, arrays = traced(mask)
    starts = np.arange(0, length, block)
    queries, keys = starts[:, None], starts[None]
    classes = TileClasses(program.mask, arrays).of(0, head, (queries, queries + block - 1), (keys, keys + block - 1))
    return classes == EMPTY, classes == FULL


@pytest.mark.parametrize("mask, least_empty, least_full", in_tiers(MASKS, MASKS))
def test_classes_of_known_masks(mask, least_empty, least_full):
    empty, full = true_classes(mask, LENGTH, 128)
    proved_empty, proved_full = proved_classes(mask, LENGTH, 128)
    assert not (proved_empty & ~empty).any()
    assert not (proved_full & ~full).any()
    assert proved_empty.sum() >= least_empty * empty.sum(), f"{proved_empty.sum()} of {empty.sum()} empty tiles"
    assert proved_full.sum() >= least_full * full.sum(), f"{proved_full.sum()} of {full.sum()} full tiles"


def wrong_classes(seeds):
    """(wrong classes, proved classes, tiles that are empty or full) of random masks."""
    wrong = proved = exist = 0
    for seed in seeds:
        mask = random_mask(seed, 1 + seed % 4)
        empty, full = true_classes(mask, 320, 32)
        proved_empty, proved_full = proved_classes(mask, 320, 32)
        wrong += int((proved_empty & ~empty).sum() + (proved_full & ~full).sum())
        proved += int(proved_empty.sum() + proved_full.sum())
        exist += int(empty.sum() + full.sum())
    return wrong, proved, exist


@pytest.mark.parametrize("seeds", in_tiers({f"{n}": range(n, n + 100) for n in range(0, 1500, 100)}, ["0"]))
def test_no_class_of_a_random_mask_is_wrong(seeds):
    wrong, proved, exist = wrong_classes(seeds)
    assert wrong == 0
    assert proved >= 0.75 * exist
