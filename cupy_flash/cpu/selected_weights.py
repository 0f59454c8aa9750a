"""Attention probabilities at the keys of lists on the CPU, in the order of the lists: no array has all keys."""

from __future__ import annotations

from functools import partial

import numpy as np

from ..arrays import Array
from ..plan.plan import Plan
from ..problem.records import Operands
from ..problem.weights import Asked
from .attention import Sequence
from .selected import TILE_BYTES, SelectedCall
from .thread_pool import run_tasks
from .weights import Run, filled, probabilities, runs_of, zeros


def forward(plan: Plan, operands: Operands, asked: Asked) -> tuple[Array, ...]:
    """Compute the weights of chosen rows and heads at the keys of their lists, 0 where an entry names no key."""
    problem, dtype, selection = plan.problem, plan.problem.accumulation, plan.problem.selected
    assert selection is not None
    call, result = SelectedCall(plan, operands), zeros(asked.shape, problem.dtype, operands.q)
    assert call.lse is not None
    lse = filled(call.lse)
    weights = result.numpy()[None] if problem.layout == "thd" else result.numpy()
    # Columns (.., entries, keys of a block), of which a sequence shorter than a block has fewer.
    weights = weights.reshape(*weights.shape[:-1], selection.entries, selection.block)

    def compute(sequence: Sequence, run: Run) -> None:
        here = (sequence.row, slice(None), sequence.queries)
        total: np.ndarray | None = None
        for kv_head in range(problem.kv_heads):
            k, _ = call.keys(sequence, kv_head)
            for unit in call.units(sequence, kv_head):
                call.stop.poll()
                tile = call.lists.listed(unit, np.arange(run.rows.start, run.rows.stop))
                Q = tile.rows_of(call.q[here][unit.heads], dtype)
                Q *= call.q_scale
                S, _, _ = call.scores(tile, sequence.band, Q, tile.gather(k, dtype, call.scratch, "keys"))
                P = probabilities(S, tile.rows_of(lse[here][unit.heads], dtype))
                P = P.reshape(run.length, -1, selection.entries, unit.block).swapaxes(0, 1)
                if asked.heads is None:
                    total = P.sum(axis=0) if total is None else total + P.sum(axis=0)
                    continue
                for place, head in enumerate(asked.heads):
                    if unit.heads.start <= head < unit.heads.stop:
                        weights[run.row, place, run.place, :, : unit.block] = P[head - unit.heads.start]
        if total is not None:
            weights[run.row, run.place, :, : total.shape[-1]] = total / problem.heads

    row = selection.entries * selection.block * (problem.head_dim + problem.group) * dtype.itemsize
    rows = max(TILE_BYTES // max(row, 1), 1)
    run_tasks(
        plan.threads,
        [
            partial(compute, sequence, run)
            for sequence in call.sequences
            if sequence.kv_len and selection.entries  # all weights of others are 0
            for run in runs_of(asked.rows, sequence.batch, sequence.row, sequence.queries, sequence.kv_len, rows)
        ],
        call.stop,
    )
    return (result,)
