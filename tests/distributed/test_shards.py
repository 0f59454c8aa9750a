"""Shards: each position belongs to one rank, all ranks agree, and each visible pair is computed once."""

from itertools import product

import numpy as np
import pytest
import torch
from visibility import sees

from cupy_flash.distributed import packed_rows, positions, shards
from cupy_flash.problem.mask import Mask

LENGTHS = (0, 1, 2, 3, 7, 16, 37)
RANKS = (1, 2, 3, 4, 8)


@pytest.mark.parametrize("sharding", shards.SHARDINGS)
def test_every_position_belongs_to_one_rank(sharding):
    for length, ranks in product(LENGTHS, RANKS):
        held = [positions(length, rank, ranks, sharding) for rank in range(ranks)]
        assert sorted(np.concatenate(held).tolist()) == list(range(length))
        assert all(x.dtype == np.int64 for x in held)


def test_the_drawing():
    """The drawing in the docstring of shards.py shows the positions that `positions` returns."""
    drawn = {line.split()[0]: line.split()[1:5] for line in shards.__doc__.splitlines() if line.startswith("    ")}
    assert set(drawn) == set(shards.SHARDINGS)
    for sharding, groups in drawn.items():
        holder = np.zeros(16, int)
        for rank in range(4):
            holder[positions(16, rank, 4, sharding)] = rank
        assert "".join(map(str, holder)) == "".join(groups)


def test_contiguous_is_torch_chunk():
    for length, ranks in product(LENGTHS, RANKS):
        pieces = [x.tolist() for x in torch.arange(length).chunk(ranks)] if length else []
        held = [positions(length, rank, ranks, "contiguous").tolist() for rank in range(ranks)]
        assert [x for x in held if x] == pieces


@pytest.mark.parametrize("sharding", shards.SHARDINGS)
def test_packed_rows_are_the_positions_of_every_sequence(sharding):
    bounds = [0, 13, 13, 14, 51]
    for ranks in RANKS:
        held = [packed_rows(bounds, rank, ranks, sharding) for rank in range(ranks)]
        assert sorted(np.concatenate(held).tolist()) == list(range(51))
        for rank, rows in enumerate(held):
            for start, stop in zip(bounds, bounds[1:], strict=False):
                sequence_rows = rows[(rows >= start) & (rows < stop)] - start
                assert sequence_rows.tolist() == positions(stop - start, rank, ranks, sharding).tolist()


MASKS = {
    "full": Mask(),
    "causal": Mask(None, 0),
    "top-left": Mask(None, 0, top_left=True),
    "window": Mask(3, 2),
    "narrow": Mask(0, 0),
    "right": Mask(None, 4),
}


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("sharding", shards.SHARDINGS)
def test_every_visible_pair_is_computed_once(mask, sharding):
    for q_lengths, kv_lengths in [((12,), (12,)), ((9,), (14,)), ((14,), (5,)), ((2, 0, 11), (3, 4, 11))]:
        for ranks in (1, 2, 4):
            schedules = [
                shards.ring_schedule(q_lengths, kv_lengths, mask, rank, ranks, sharding) for rank in range(ranks)
            ]
            computed = [np.zeros((q, kv), int) for q, kv in zip(q_lengths, kv_lengths, strict=True)]
            for schedule in schedules:
                owned = [pair.queries for pair in schedule.pairs[0] if pair.local]
                assert owned == list(schedule.queries)
                for pair in (pair for pairs in schedule.pairs for pair in pairs):
                    add_pair(computed, pair, mask, schedule.stride)
            for seen, count in zip(map(sees, [mask] * 3, q_lengths, kv_lengths), computed, strict=False):
                np.testing.assert_array_equal(count, seen)
            # In every step at least one rank computes.
            assert {len(schedule.pairs) for schedule in schedules} == {len(schedules[0].pairs)}
            assert len(schedules[0].pairs) == 1 or any(schedule.pairs[-1] for schedule in schedules)


def add_pair(computed, pair, mask, stride):
    """Add the visible pairs of a band to a (queries, keys) count, at the positions of its rows."""
    places = zip(pair.starts, pair.queries.lengths, pair.keys.lengths, strict=True)
    for count, ((q_first, kv_first, offset), q_len, kv_len) in zip(computed, places, strict=True):
        visible = mask.band(q_len, kv_len, offset, stride).visible(0, q_len, 0, kv_len)
        rows, columns = q_first + stride * np.arange(q_len), kv_first + stride * np.arange(kv_len)
        count[np.ix_(rows, columns)] += visible


def test_work_under_a_causal_mask():
    """Work of the busiest rank relative to the mean: contiguous shards are unbalanced, zigzag and striped ones are
    not.
    """
    busiest = {}
    for sharding in shards.SHARDINGS:
        pairs = [0] * 8
        for rank in range(8):
            schedule = shards.ring_schedule((4096,), (4096,), Mask(None, 0), rank, 8, sharding)
            for pair in (pair for step in schedule.pairs for pair in step):
                band = Mask(None, 0).band(pair.queries.rows, pair.keys.rows, pair.starts[0][2], schedule.stride)
                pairs[rank] += band.pairs
        assert sum(pairs) == 4096 * 4097 // 2
        busiest[sharding] = max(pairs) / np.mean(pairs)
    assert busiest["contiguous"] > 1.8
    assert busiest["zigzag"] < 1.001 and busiest["striped"] < 1.01


def test_a_window_shortens_the_schedule():
    steps = [
        len(shards.ring_schedule((80,), (80,), Mask(w, 0), 0, 8, "contiguous").pairs) for w in (0, 1, 10, 11, 70, 100)
    ]
    assert steps == [1, 2, 2, 3, 8, 8]
