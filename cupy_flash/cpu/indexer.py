"""The lightning indexer on the CPU: the keys with the largest scores of each row, and the loss that trains it.

The score of query t and key s is I_ts = sum_h w_th relu(scale q_th . k_s). To choose keys, tiles of rows walk over
chunks of keys: one product for all heads, their weighted sum, and a merge with the best keys so far; memory is that of
the lists and of a tile. The loss gathers the keys of each list. With p the normalised target, a = q . k and r the row
weights,

    L = sum_t r_t sum_s p_ts (log p_ts - log softmax(I)_ts)
    dI = r_t (softmax(I) - p) ;  dw_th = sum_s dI relu(a) ;  dq_th = sum_s dI w_th [a > 0] k_s ;  dk_s likewise

Tiles and the order of all sums depend on shapes alone, so that results have the same bits on any number of threads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import numpy as np

from ..arrays import Array, empty
from ..device import blas_threads
from ..engines.cpu import FLOP, SCORE, worth
from ..problem.indexer import Indexer, IndexerOperands
from ..problem.mask import Mask
from .attention import load_rows
from .thread_pool import OrderedSum, Stop, run_tasks
from .weights import largest, zeros

KEYS = (512, 4096)  # the smallest and the largest chunk of keys; between them as many as a list has, so that merges pay
SCORES = 2**20  # of all heads in a tile
PIECES = 4  # into which the gradients split the rows of a sequence, if there are few


class _Keys:
    """The indexer's keys of one sequence, in a contiguous array or in pages."""

    def __init__(self, indexer: Indexer, operands: IndexerOperands, batch: int) -> None:
        self.k, self.page, self.dtype = operands.k.numpy(), indexer.page, indexer.accumulation
        self.length = indexer.kv_len if operands.kv_lengths is None else int(operands.kv_lengths.numpy()[batch])
        self.batch, self.table = batch, None if operands.block_table is None else operands.block_table.numpy()[batch]

    def load(self, start: int, stop: int) -> np.ndarray:
        """Return the keys [start, stop), (keys, Di), in the accumulation dtype."""
        if self.table is None:
            return load_rows(self.k[self.batch, start:stop], self.dtype)
        first = start // self.page
        pages = self.k[self.table[first : -(-stop // self.page)]]
        return load_rows(pages.reshape(-1, pages.shape[-1])[start - first * self.page :][: stop - start], self.dtype)


def select(indexer: Indexer, operands: IndexerOperands) -> Array:
    """Return the keys or blocks with the largest scores of each row, int32 (B, 1, Sq, n), ascending, -1 last."""
    batch, q_len, rule, dtype = indexer.batch, indexer.q_len, indexer.rule, indexer.accumulation
    lists = zeros((batch, 1, q_len, rule.n), np.dtype(np.int32), operands.q, -1)
    q, weights = operands.q.numpy(), operands.weights.numpy()
    heads, dim = q.shape[2:]
    chunk = -(-min(max(KEYS[0], rule.n), KEYS[1]) // rule.block) * rule.block
    rows, stop = max(SCORES // (heads * chunk), 1), Stop()

    def choose(b: int, keys: _Keys, start: int) -> None:
        here = (b, slice(start, min(start + rows, q_len)))
        Q = load_rows(q[here], dtype) * dtype.type(rule.scale)
        chosen = _chosen(indexer, Q, load_rows(weights[here], dtype), keys, start, chunk, stop)
        lists.numpy()[here[0], 0, here[1], : chosen.shape[1]] = chosen

    sequences = [_Keys(indexer, operands, b) for b in range(batch)]
    pairs = q_len * sum(keys.length for keys in sequences) * heads
    threads = worth(pairs * (2 * dim * FLOP + SCORE[0]) * 1e-9, blas_threads())
    tasks: list[Callable[[], None]] = [
        partial(choose, b, keys, start) for b, keys in enumerate(sequences) for start in range(0, q_len, rows)
    ]
    run_tasks(threads, tasks, stop)
    return lists


def _chosen(
    indexer: Indexer, Q: np.ndarray, W: np.ndarray, keys: _Keys, start: int, chunk: int, stop: Stop
) -> np.ndarray:
    """Return the lists of the rows from `start` on, with at most as many entries as there are keys or blocks."""
    rule = indexer.rule
    blocks = -(-indexer.kv_len // rule.block)
    best = np.full((len(Q), min(rule.n, blocks)), -np.inf, Q.dtype)
    entries = np.full(best.shape, -1, np.int32)
    offset = Mask(top_left=rule.causal == "top_left").offset(indexer.q_len, keys.length)
    position = np.arange(start, start + len(Q))[:, None] + offset
    end = min(keys.length, max(int(position[-1, 0]) + 1, 0)) if rule.causal else keys.length
    for first in range(0, end, chunk):
        stop.poll()
        j = np.arange(first, min(first + chunk, end))
        I = _scores(Q, W, keys.load(first, first + len(j)))
        np.nan_to_num(I, copy=False, nan=np.finfo(I.dtype).max)  # finite, so that only hidden keys are -inf
        if rule.causal:
            np.copyto(I, -np.inf, where=j > position)
        if rule.block > 1:
            I = np.pad(I, ((0, 0), (0, -len(j) % rule.block)), constant_values=-np.inf)
            I = I.reshape(len(I), -1, rule.block).max(axis=2)
        if rule.local:
            behind = position // rule.block - np.arange(first // rule.block, first // rule.block + I.shape[1])
            np.copyto(I, np.inf, where=(behind >= 0) & (behind < rule.local) & ~np.isneginf(I))
        best, entries = largest(best, entries, I, first // rule.block)
    entries[np.isneginf(best)] = blocks  # behind all that name a key
    entries.sort(axis=1)
    return np.where(entries == blocks, -1, entries)


def _scores(Q: np.ndarray, W: np.ndarray, K: np.ndarray) -> np.ndarray:
    """Return I (rows, keys) of Q (rows, heads, Di), W (rows, heads) and K (keys, Di)."""
    A = np.matmul(Q.reshape(-1, Q.shape[-1]), K.T).reshape(*Q.shape[:2], -1)
    np.maximum(A, 0, out=A)
    I: np.ndarray = np.matmul(W[:, None], A)[:, 0]
    return I


class _Rows(NamedTuple):
    """A tile of rows of the loss, in the accumulation dtype."""

    Q: np.ndarray  # (rows, heads, Di)
    W: np.ndarray  # (rows, heads)
    K: np.ndarray  # (rows, n, Di): the keys of the lists, 0 where an entry names none
    j: np.ndarray  # (rows, n): the keys, their number where an entry names none
    relu: np.ndarray  # (rows, heads, n)
    log_P: np.ndarray  # (rows, n): the logarithm of the softmax of the scores, -inf where an entry names none
    target: np.ndarray  # (rows, n), of sum 1, or 0 where the target is 0
    factor: np.ndarray  # (rows,): the row weights

    @property
    def dI(self) -> np.ndarray:
        """The gradient of the scores."""
        P = np.exp(self.log_P) * (self.target != 0).any(axis=1, keepdims=True)
        return self.factor[:, None] * (P - self.target)


def loss(indexer: Indexer, operands: IndexerOperands) -> Array:
    """Return the loss, a number in the accumulation dtype."""
    lost = np.zeros((indexer.batch, indexer.q_len))
    return _rounded(_run(indexer, operands, lost, None), indexer, operands)


def gradients(indexer: Indexer, operands: IndexerOperands) -> tuple[Array, Array, Array, Array]:
    """Return the loss and the gradients of q, weights and k, in their dtypes; those of k are summed in order."""
    lost = np.zeros((indexer.batch, indexer.q_len))
    dq, dweights, dk = (empty(x.shape, x.dtype, operands.q) for x in (operands.q, operands.weights, operands.k))
    total = _run(indexer, operands, lost, (dq, dweights, dk))
    return _rounded(total, indexer, operands), dq, dweights, dk


def _rounded(total: np.floating, indexer: Indexer, operands: IndexerOperands) -> Array:
    result = empty((), indexer.accumulation, operands.q)
    result.numpy()[...] = total
    return result


def _run(
    indexer: Indexer, operands: IndexerOperands, lost: np.ndarray, results: tuple[Array, ...] | None
) -> np.floating:
    """Write the losses of rows, and the gradients; return the sum of the losses."""
    batch, q_len, kv_len, dtype = indexer.batch, indexer.q_len, indexer.kv_len, indexer.accumulation
    assert operands.selected is not None
    heads, dim = operands.q.shape[2:]
    entries = operands.selected.shape[3]
    rows = max(SCORES // max(entries * (dim + 2 * heads), 1), 1)
    pieces = 1 if results is None else max(1, min(PIECES, -(-2 * PIECES // max(batch, 1)), -(-q_len // rows)))
    sums, stop = [OrderedSum(pieces) for _ in range(batch)], Stop()

    def compute(b: int, piece: int) -> None:
        """Compute every `pieces`-th tile of rows of a sequence."""
        # One more row takes the gradients at entries that name no key, which are 0.
        total = None if results is None else np.zeros((kv_len + 1, dim), dtype)
        for here, tile in _tiles(indexer, operands, b, range(piece * rows, q_len, pieces * rows), rows):
            stop.poll()
            lost[b, here] = _lost(tile)
            if results is not None and total is not None:
                results[0].numpy()[b, here], results[1].numpy()[b, here] = _differentiate(tile, total)
        if results is not None and total is not None:
            whole = sums[b].add(piece, total)
            if whole is not None:
                results[2].numpy()[b] = whole[:-1]

    work = batch * q_len * entries * heads * (2 * dim * FLOP * (1 if results is None else 3) + SCORE[0])
    run_tasks(
        worth(work * 1e-9, blas_threads()),
        [partial(compute, b, piece) for b in range(batch) for piece in range(pieces)],
        stop,
    )
    total: np.floating = lost.sum()
    return total


def _tiles(
    indexer: Indexer, operands: IndexerOperands, b: int, starts: range, count: int
) -> Iterator[tuple[slice, _Rows]]:
    """Yield the rows of each tile and the tile."""
    dtype, kv_len = indexer.accumulation, indexer.kv_len
    assert operands.selected is not None and operands.target is not None
    lists = operands.selected.numpy()[b if operands.selected.shape[0] > 1 else 0, 0]
    q, weights, k, target = (x.numpy()[b] for x in (operands.q, operands.weights, operands.k, operands.target))
    factors = np.ones(()) if operands.row_weights is None else operands.row_weights.numpy()
    factors = np.broadcast_to(factors, (indexer.batch, indexer.q_len))[b]
    dloss = 1 if operands.dloss is None else operands.dloss.numpy().astype(dtype)
    for start in starts:
        here = slice(start, start + count)
        j = lists[here].astype(np.int64)
        hidden = (j < 0) | (j >= kv_len)
        j[hidden] = kv_len
        K = np.take(k, j, axis=0, mode="clip").astype(dtype) if kv_len else np.zeros((*j.shape, k.shape[1]), dtype)
        K[hidden] = 0
        Q, W = load_rows(q[here], dtype), load_rows(weights[here], dtype)
        relu = np.maximum(np.matmul(Q, K.swapaxes(1, 2)), 0)
        I = np.matmul(W[:, None], relu)[:, 0]
        I[hidden] = -np.inf
        m = I.max(axis=1, keepdims=True, initial=-np.inf)
        m[m == -np.inf] = 0
        l = np.exp(I - m).sum(axis=1, keepdims=True)
        I -= m + np.log(np.where(l == 0, 1, l))
        p = np.where(hidden, 0, target[here]).astype(dtype)
        whole = p.sum(axis=1, keepdims=True)
        p /= np.where(whole == 0, 1, whole)
        yield here, _Rows(Q, W, K, j, relu, I, p, factors[here].astype(dtype) * dloss)


def _lost(tile: _Rows) -> np.ndarray:
    """Return the loss of each row: 0 log 0 is 0."""
    terms = tile.target * (np.log(tile.target) - tile.log_P)
    terms[tile.target == 0] = 0
    lost: np.ndarray = tile.factor * terms.sum(axis=1)
    return lost


def _differentiate(tile: _Rows, total: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Add the gradients of keys to `total` (keys + 1, Di), and return those of the tile's queries and weights."""
    dI = tile.dI
    dA = dI[:, None] * tile.W[:, :, None] * (tile.relu > 0)
    for j, dK in zip(tile.j, np.matmul(dA.swapaxes(1, 2), tile.Q), strict=True):
        total[j] += dK  # a list names no key twice
    return np.matmul(dA, tile.K), np.matmul(tile.relu, dI[..., None])[..., 0]
