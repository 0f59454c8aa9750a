"""Attention probabilities of queries on a KV cache, added to the results of cpu/weights.py.

A task is a run of rows of one sequence, or for sums over the rows a whole sequence; it reads every key once for all
heads.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from ...arrays import Array
from ...plan.plan import Plan
from ...problem.kv_cache_contents import read_spans
from ...problem.records import Operands
from ...problem.weights import IMPORTANCE, Asked
from ..thread_pool import run_tasks
from ..weights import Run, filled, result_of, runs_of
from . import Call, scale_products
from .sequences import RowScores, RowTile, Sequence, sequences_of_cache


def forward(plan: Plan, operands: Operands, asked: Asked) -> tuple[Array, ...]:
    """Compute the weights or the importance, or the values and keys of the largest weights."""
    problem = plan.problem
    call, result = Call(problem, operands), result_of(problem, operands, asked)
    assert operands.lse is not None
    heads = range(problem.heads)

    def compute(sequence: Sequence, runs: list[Run]) -> None:
        for run in runs:
            count = run.length
            position = sequence.position + run.rows.start
            tile = RowTile(sequence, run.rows, position, count, count * problem.group)
            Q, scores, lse = call.load(tile), RowScores(problem, tile), filled(sequence.lse[:, run.rows])
            state = result.begin(run, heads)
            first, last = call.visible(tile)
            for start in range(first // plan.block_kv * plan.block_kv, last, plan.block_kv):
                call.stop.poll()
                start, stop = max(start, first), min(start + plan.block_kv, last)
                K, _ = sequence.keys.load(start, stop)
                S, scales = np.matmul(Q, K.swapaxes(1, 2)), sequence.keys.scales(start, stop)
                if scales is not None:
                    scale_products(S, Q, scales)
                call.modify(S, scores.at(start, stop), tile.is_partly_hidden(problem.mask, start, stop))
                of_heads = S.reshape(problem.kv_heads, count, problem.group, stop - start).swapaxes(1, 2)
                of_heads = of_heads.reshape(problem.heads, count, stop - start)
                result.add(state, run, heads, slice(start, stop), of_heads, lse)
            result.end(state, run, heads)

    tasks: list[Callable[[], None]] = []
    with np.errstate(all="ignore"):
        spans = read_spans(problem, operands)
        # Nothing is written to the rows of `out`, for which q stands.
        sequences = sequences_of_cache(problem, operands, spans, operands.q.numpy(), operands.lse.numpy())
    starts = spans.q_starts.tolist()
    for b, sequence in enumerate(sequences):
        packed = problem.layout == "thd"
        start, row = (starts[b], 0) if packed else (0, b)
        queries = slice(start, start + len(sequence.q))
        runs = runs_of(result.rows, b, row, queries, sequence.keys.stop, plan.block_q)
        alone = [runs] if asked.kind == IMPORTANCE else [[run] for run in runs]
        tasks += [partial(compute, sequence, some) for some in alone]
    run_tasks(plan.threads, tasks, call.stop)
    return result.results
