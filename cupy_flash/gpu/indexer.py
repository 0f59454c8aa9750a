"""Runs select_keys and selection_loss on a call's operands, for the backends cuda and simulator."""

from __future__ import annotations

from functools import partial

import numpy as np

from ..arrays import Array, contiguous, empty
from ..device import Device
from ..engines.indexer import parts_of, requested
from ..engines.launch import require_grids
from ..problem.indexer import Indexer, IndexerOperands
from .params import pack_indexer
from .run_plan import Start, Work, has_contiguous_row

# {field of IndexerOperands: member of Params}, where they differ
MEMBERS = {"weights": "head_weights", "kv_lengths": "cache_seqlens", "row_weights": "loss_weights"}

BY_ROWS = ("q", "k", "kv_lengths", "block_table")  # kernels take a stride of the last axis of all others


def select(indexer: Indexer, operands: IndexerOperands, device: Device, start: Start) -> Array:
    """Return the keys or blocks with the largest scores of each row, int32 (B, 1, Sq, n), ascending, -1 last."""
    lists = empty((indexer.batch, 1, indexer.q_len, indexer.rule.n), np.dtype(np.int32), operands.q)
    _run("select", indexer, operands, device, start, {"lists": lists})
    return lists


def loss(indexer: Indexer, operands: IndexerOperands, device: Device, start: Start) -> Array:
    """Return the loss, a number in the accumulation dtype."""
    result = empty((), indexer.accumulation, operands.q)
    _run("loss", indexer, operands, device, start, {"loss": result})
    return result


def gradients(
    indexer: Indexer, operands: IndexerOperands, device: Device, start: Start
) -> tuple[Array, Array, Array, Array]:
    """Return the loss and the gradients of q, weights and k, in their dtypes; all are the same in every run."""
    result = empty((), indexer.accumulation, operands.q)
    dq, dweights, dk = (empty(x.shape, x.dtype, operands.q) for x in (operands.q, operands.weights, operands.k))
    results = {"loss": result, "dq": dq, "dhead_weights": dweights, "dk": dk}
    _run("gradients", indexer, operands, device, start, results)
    return result, dq, dweights, dk


def _run(
    function: str,
    indexer: Indexer,
    operands: IndexerOperands,
    device: Device,
    start: Start,
    results: dict[str, Array],
) -> None:
    """Start the launches of a function with these results; arrays of BY_ROWS whose rows have gaps are copied."""
    launches, workspaces = requested(function, indexer, operands, device)
    if not launches:
        return
    given = {name: x for name, x in operands._asdict().items() if x is not None}
    given |= {name: contiguous(x) for name, x in given.items() if name in BY_ROWS and not has_contiguous_row(x)}
    inputs = {MEMBERS.get(name, name): x for name, x in given.items()}
    arrays = {**results, **{x.name: empty(x.shape, x.dtype, operands.q) for x in workspaces}}
    parts = parts_of(indexer, operands, device) if function == "select" else (1, 0)
    params = partial(pack_indexer, indexer, inputs | arrays, dict(launches[0].constants), parts)
    start(Work(require_grids(launches), device.arch, inputs, {**arrays}, "bshd", params))
