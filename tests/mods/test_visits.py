"""The tiles that the CPU engine visits under a mask_mod contain every visible pair, and few others."""

import numpy as np
import pytest
from helpers.masks import MASKS, random_mask
from helpers.tiers import in_tiers

from cupy_flash.cpu import visited_tiles as visits_module
from cupy_flash.cpu.score import KEYS, QUERIES, Positions
from cupy_flash.cpu.visited_tiles import GRAIN, VisitEstimate, Visits, count_tiles, rows_of, runs
from cupy_flash.mods import tiles
from cupy_flash.mods.tiles import CUT, EMPTY, FULL, TileClasses, TileCounts
from cupy_flash.mods.trace import Mod
from cupy_flash.problem.mask import Mask

WHOLE = Positions(0, 0, 0, 1)


def check_visits(mask_mod, mask, q_len, kv_len, block_q, block_kv, positions=WHOLE):
    """Compare both lists of visits with the mask; return the number of hidden pairs that are visited."""
    mod = Mod(mask_mod=mask_mod)
    if mod.program.mask is None:  # the mask is simplified to True
        return 0
    visits = Visits(TileClasses(mod.program.mask, mod.arrays, mod.numbers), block_q, block_kv)
    band = mask.band(q_len, kv_len, positions.offset, positions.step)
    i = (positions.q_first + positions.step * np.arange(q_len)).astype(np.int32)[:, None]
    j = (positions.kv_first + positions.step * np.arange(kv_len)).astype(np.int32)[None]
    with np.errstate(all="ignore"):
        seen = np.broadcast_to(mask_mod(np.zeros((1, 1), np.int32), np.ones((1, 1), np.int32), i, j), (q_len, kv_len))
    in_band = band.visible(0, q_len, 0, kv_len)
    for transposed in (False, True):
        visited, unmasked = np.zeros((q_len, kv_len), int), np.zeros((q_len, kv_len), bool)
        for start in range(0, kv_len if transposed else q_len, block_kv if transposed else block_q):
            find = visits.q_tiles if transposed else visits.kv_tiles
            for visit in find(0, 1, band, positions, start):
                rows = slice(start, start + (block_kv if transposed else block_q))
                tile = rows, slice(visit.start, visit.stop)
                visited[tile[::-1] if transposed else tile] += 1
                unmasked[tile[::-1] if transposed else tile] = True
                if visit.cut is not None:
                    assert visit.cut.axis == (QUERIES if transposed else KEYS)
                    assert visit.start <= visit.cut.start < visit.cut.stop <= visit.stop
                    cut = rows, slice(visit.cut.start, visit.cut.stop)
                    unmasked[cut[::-1] if transposed else cut] = False
        assert visited.max(initial=0) <= 1
        assert (visited[seen & in_band] == 1).all()
        assert seen[unmasked].all()
    return int(visited.sum() - (seen & in_band).sum())


BANDS = {"none": Mask(), "causal": Mask(right=0), "window": Mask(left=300, right=100)}


@pytest.mark.parametrize("band", BANDS.values(), ids=BANDS)
@pytest.mark.parametrize("row", in_tiers(MASKS, ["causal", "document window", "natten morton", "block map"]))
def test_visits_of_known_masks(row, band):
    check_visits(row[0], band, 1000, 1500, 128, 256)


@pytest.mark.parametrize("seeds", in_tiers({"few": range(30), "many": range(30, 300)}, ["few"]))
def test_visits_of_random_masks(seeds):
    for seed in seeds:
        mask_mod = random_mask(seed, 1 + seed % 4)
        check_visits(mask_mod, BANDS["causal"], 301, 320, 64, 128)
        check_visits(mask_mod, BANDS["none"], 150, 107, 50, 30, Positions(5, 90, 0, 2))


def use_small_super_tiles(monkeypatch):
    """Classify super-tiles of 3 x 3 tiles first, also for short sequences, and few tiles at a time."""
    for name, value in (("FEW", 0), ("SUPER", 3), ("AT_ONCE", 9)):
        monkeypatch.setattr(visits_module, name, value)


@pytest.mark.parametrize("seeds", in_tiers({"few": range(30), "many": range(30, 300)}, ["few"]))
def test_super_tiles_change_no_visit(monkeypatch, seeds):
    """Visits are the same, for known and random masks, with lengths that are not multiples of a super-tile."""
    cases = [(row[0], 1000, 1500, 192, 256, WHOLE) for row in MASKS.values()]
    for seed in seeds:
        cases.append((random_mask(seed, 1 + seed % 4), 301, 320, 64, 128, WHOLE))
        cases.append((random_mask(seed, 1 + seed % 4), 150, 107, 50, 30, Positions(5, 90, 0, 2)))

    def visits_of(case):
        mask_mod, *lengths, block_q, block_kv, positions = case
        mod = Mod(mask_mod=mask_mod)
        if mod.program.mask is None:
            return []
        classes = TileClasses(mod.program.mask, mod.arrays, mod.numbers)
        return [
            [[(*run[:2], *(run[2:] if run.cut_start < run.cut_stop else ())) for run in row] for row in rows]
            for rows in (rows_of(classes, 0, 1, *lengths, positions, block_q, block_kv, by) for by in (True, False))
        ]

    expected = [visits_of(case) for case in cases]
    use_small_super_tiles(monkeypatch)
    assert [visits_of(case) for case in cases] == expected


def test_a_super_tile_that_is_classified_by_its_first_tile_is_found(monkeypatch):
    use_small_super_tiles(monkeypatch)
    monkeypatch.setattr(visits_module, "_merged", lambda tiles: tuple(bounds[::3] for bounds in tiles))
    with pytest.raises(AssertionError):
        check_visits(MASKS["causal"][0], Mask(), 1000, 1000, 128, 256)


def test_a_window_in_a_long_sequence_classifies_few_tiles(monkeypatch):
    """Twice the length doubles the number of classified tiles; super-tiles, one per 1024 tiles, add little to it."""

    def classified(length):
        counts = []
        of = TileClasses.of

        def counted(self, *args):
            found = of(self, *args)
            counts.append(found.size)
            return found

        monkeypatch.setattr(TileClasses, "of", counted)
        mod = Mod(mask_mod=MASKS["sliding"][0])
        classes = TileClasses(mod.program.mask, mod.arrays, mod.numbers)
        rows_of(classes, 0, 0, length, length, WHOLE, 128, 256, True)
        monkeypatch.setattr(TileClasses, "of", of)
        return sum(counts)

    assert classified(2**17) <= 2.1 * classified(2**16)
    assert classified(2**16) < 2**16 // 128 * 4 * visits_module.SUPER


def test_visits_of_a_positional_mask_are_computed_once(monkeypatch):
    made = []
    monkeypatch.setattr(visits_module, "rows_of", lambda *args: made.append(args) or [[]])
    mod = Mod(mask_mod=lambda b, h, q, kv: (q - kv < 301) & (h < 2))
    band = Mask().band(90, 90)
    for numbers, head in ((mod.numbers, 0), (mod.numbers, 0), (mod.numbers, 1), ((7,), 0)):
        visits = Visits(TileClasses(mod.program.mask, (), numbers), 64, 128)
        visits.kv_tiles(0, head, band, WHOLE, 0)
    assert len(made) == 3


def test_a_sliding_mask_visits_few_hidden_pairs():
    """A tile of 128 rows under a window of 512 visits 640 keys, and at most one grain more."""
    hidden_pairs = check_visits(MASKS["sliding"][0], Mask(), 4096, 4096, 128, 128)
    assert hidden_pairs <= 4096 * (640 + GRAIN - 512)


def test_runs_are_split_at_blocks_and_at_empty_classes():
    classes = np.array([[FULL, FULL, CUT, FULL, FULL, EMPTY, FULL], [EMPTY] * 7], np.uint8)
    first, second = runs(classes, 10, 20)
    assert [run[:2] for run in first] == [(0, 20), (20, 40), (40, 50), (60, 70)]
    assert [run.cut_stop > run.cut_start for run in first] == [False, True, False, False]
    assert first[1][2:] == (20, 30)  # cut_start and cut_stop: the part of the run where the mask may hide a pair
    assert second == []
    (inner,), _ = runs(np.array([[FULL, CUT, FULL, CUT, FULL], [EMPTY] * 5], np.uint8), 10, 50)
    assert inner == (0, 50, 10, 40)


def test_a_cut_tile_that_counts_as_full_is_found(monkeypatch):
    monkeypatch.setitem(tiles.FUNCTIONS, "less_equal", lambda x, y: tiles.Truth(x.lo <= y.hi, x.lo > y.hi))
    with pytest.raises(AssertionError):
        check_visits(MASKS["causal"][0], Mask(), 1000, 1000, 128, 256)


def count_dense(seen, block_q, block_kv):
    """Return the number of tiles of each class, from a dense mask."""
    tiles = [
        seen[i : i + block_q, j : j + block_kv]
        for i in range(0, seen.shape[0], block_q)
        for j in range(0, seen.shape[1], block_kv)
    ]
    empty, full = sum(not tile.any() for tile in tiles), sum(bool(tile.all()) for tile in tiles)
    return TileCounts(empty, full, len(tiles) - empty - full)


@pytest.mark.parametrize("band", BANDS.values(), ids=BANDS)
@pytest.mark.parametrize("blocks", [(128, 256), (33, 70)])
def test_counts_of_classes_are_those_of_the_dense_mask(blocks, band):
    """For a mask whose classes are exact, the counts equal those of a dense mask, with every band."""
    mod = Mod(mask_mod=lambda b, h, q, kv: q - kv < 600)
    classes, visible_band = TileClasses(mod.program.mask, (), mod.numbers), band.band(1000, 1500)
    i, j = np.arange(1000)[:, None], np.arange(1500)
    seen = (i - j < 600) & visible_band.visible(0, 1000, 0, 1500)
    expected, counts = count_dense(seen, *blocks), count_tiles(classes, 0, 0, visible_band, WHOLE, *blocks)
    assert counts == expected


EXACT = {name: MASKS[name][0] for name in ("causal", "sliding", "natten morton")}
# This mask cuts tiles of several grains, but no tile of one grain.
EXACT["grains"] = lambda b, h, q, kv: q // GRAIN >= kv // GRAIN


@pytest.mark.parametrize("mask_mod", EXACT.values(), ids=EXACT)
@pytest.mark.parametrize("blocks", [(128, 256), (512, 128)], ids=str)
def test_the_estimate_of_visits_is_exact_for_whole_grains(mask_mod, blocks):
    """Without a band, and with exact classes of whole grains, the estimate of the cost model is exact."""
    mod, q_len, kv_len = Mod(mask_mod=mask_mod), 1024, 1536
    classes, band = TileClasses(mod.program.mask, mod.arrays, mod.numbers), Mask().band(q_len, kv_len)
    visits, estimate = Visits(classes, *blocks), VisitEstimate(classes, 0, 0, band, WHOLE)
    for by_query, find, rows, length in (
        (True, visits.kv_tiles, blocks[0], q_len),
        (False, visits.q_tiles, blocks[1], kv_len),
    ):
        listed = [visit for start in range(0, length, rows) for visit in find(0, 0, band, WHOLE, start)]
        pairs = rows * sum(visit.stop - visit.start for visit in listed)
        cuts = [visit.cut.stop - visit.cut.start for visit in listed if visit.cut is not None]
        assert estimate.count(*blocks, by_query) == (len(listed), pairs, len(cuts), rows * sum(cuts))
