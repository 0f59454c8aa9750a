"""Attention of queries on a KV cache to selected keys, in the tiles of cpu/selected.py."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from ...plan.plan import Plan
from ...problem.mask import Band
from ...problem.records import Operands
from ..score import Positions
from ..selected import (
    LISTS,
    Lists,
    ListTile,
    Scratch,
    Unit,
    averaged,
    either,
    outside,
    products_of_rows,
    softmax,
    statistics_of,
)
from ..thread_pool import run_tasks
from .sequences import Sequence

if TYPE_CHECKING:
    from . import Call


def attend(plan: Plan, operands: Operands, call: Call, sequences: list[Sequence]) -> None:
    """Write the results of all queries of the sequences, after the append."""
    problem, lists, scratch = plan.problem, Lists(plan.problem, operands), Scratch()
    mask, dtype = problem.mask, problem.accumulation
    sinks = None if call.sink is None else call.sink.ravel()

    def compute(sequence: Sequence, unit: Unit, start: int, stop: int) -> None:
        heads, keys, position = unit.heads, sequence.keys, sequence.position
        q, out = (x.swapaxes(0, 1)[heads] for x in (sequence.q, sequence.out))
        low = keys.start - unit.q_len if mask.left is None else position - mask.left
        high = keys.stop if mask.right is None else position + mask.right
        band = Band(low, high, unit.q_len, unit.kv_len)
        for tile in lists.tiles(unit, start, stop):
            call.stop.poll()
            Q = tile.rows_of(q, dtype)
            if call.k_descale is not None:
                Q *= call.k_descale[sequence.batch, unit.kv_head]
            Q *= call.q_scale
            j = tile.places[1][:, 0, 0]
            K, V = (keys.take(pool, unit.kv_head, j) for pool in keys.pools)
            S = products_of_rows(Q, K, scratch, "S")
            if call.product_scale != 1:
                S *= call.product_scale
            for step in call.steps:
                step.apply(S, tile, save=False)
            hidden = either(tile.hidden, outside(band, tile) | (tile.j < keys.start))
            if call.mask_mod is not None:
                hidden = hidden | ~call.mask_mod.visible(tile)
            if sequence.mask is not None:
                hidden = hidden | _unseen(sequence, tile)
            np.copyto(S, -np.inf, where=hidden)
            statistics = statistics_of(problem, S, tile)
            l, lse = softmax(S, None if sinks is None else sinks[heads], statistics)
            O = averaged(S, V, l)
            if call.v_descale is not None:
                O *= call.v_descale[sequence.batch, unit.kv_head]
            tile.store(O, out)
            tile.store(lse, sequence.lse[heads])
            for name, rows in zip(problem.statistics, sequence.statistics, strict=True):
                tile.store(getattr(statistics, name), rows[heads])

    tasks: list[Callable[[], None]] = [
        partial(compute, sequence, unit, start, min(start + LISTS, len(unit.lists)))
        for sequence in sequences
        for kv_head in range(problem.kv_heads)
        for unit in lists.units(
            sequence.batch,
            kv_head,
            (len(sequence.q), sequence.keys.stop),
            Positions(0, 0, sequence.position, 1),
            sequence.q_idx,
        )
        for start in range(0, len(unit.lists), LISTS)
    ]
    run_tasks(plan.threads, tasks, call.stop)


def _unseen(sequence: Sequence, tile: ListTile) -> np.ndarray:
    """Return which scores the mask of the last keys of the sequence hides."""
    assert sequence.mask is not None
    q, j = tile.places
    column = j - sequence.mask_start
    hidden: np.ndarray = (column >= 0) & ~sequence.mask[tile.head, q, np.maximum(column, 0)]
    return hidden
