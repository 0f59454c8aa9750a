"""Attention of few queries, or on a KV cache, on the CPU: every key is read once for all heads that attend to it.

A task is a tile of query rows of all heads, and a piece of the keys, which it processes in chunks: scores of all heads,
online softmax, O += P V. The pieces of a tile are merged in order. Tiles and pieces do not depend on the number of
threads.

With split_size, pieces end at its multiples, tiles have a fixed number of rows and start at fixed positions, and chunks
are padded with zeros, so that the arithmetic of a query depends only on its own sequence. A chunk without a key that a
row sees leaves the row's O unchanged (O * 1 + 0).

Names are the paper's; capitals are tiles in the accumulation dtype. S scores, P probabilities, O = P V, m row max, l
row sum.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from ...arrays import AnyArray, Array, empty
from ...device import cpu
from ...plan.plan import Plan
from ...problem.checks import Requirements
from ...problem.kv_cache_contents import check_contents, read_spans
from ...problem.records import CacheOperands, Operands, Problem
from ..blas import product, square_sum
from ..partials import merge_weights
from ..score import MaskMod, steps
from ..statistics import RowStatistics, empty_statistics, merged
from ..thread_pool import Stop, run_tasks
from . import append as appending
from .keys import Keys, Scales
from .sequences import RowScores, RowTile, row_tiles, sequences_of_batch, sequences_of_cache

# Without split_size, the keys are divided into about TASKS tasks in all, each of at least CHUNKS chunks or KEYS keys.
TASKS = 32
CHUNKS = 8
KEYS = 1024  # a multiple of a chunk


class Part(NamedTuple):
    """The result of a row tile over a piece of the keys: normalised O (Hk, rows, Dv), and lse (Hk, rows)."""

    O: np.ndarray
    lse: np.ndarray
    statistics: RowStatistics | None = None  # (Hk, rows), if the call asks for statistics


# {chunk of keys of a prefix: its K, V and scales}
Loaded: TypeAlias = "dict[tuple[int, int], tuple[np.ndarray, np.ndarray, Scales | None]]"


def append(plan: Plan, operands: Operands) -> None:
    """Append the rows of k and v of a call to its caches."""
    with np.errstate(all="ignore"):
        appending.append(plan.problem, operands, read_spans(plan.problem, operands))


def forward(plan: Plan, operands: Operands) -> tuple[Array, ...]:
    """Append to the cache if the call has new rows, compute attention, and return results as `cpu.forward`."""
    problem, q = plan.problem, operands.q
    given = operands.cache
    if given is None or given.out is None:
        out = empty((*q.shape[:-1], problem.head_dim_v), problem.dtype, q)
    else:
        out = given.out
    lse = empty(problem.lse_shape(q), problem.accumulation, q)
    statistics = empty_statistics(problem, q)
    rows = (out.numpy(), lse.numpy(), tuple([array.numpy() for array in statistics]))
    if problem.has_lengths:  # no tile writes the rows outside the sequences
        rows[0][...] = 0
        rows[1][...] = -np.inf
    with np.errstate(all="ignore"):
        if problem.cache is None:
            sequences = sequences_of_batch(problem, operands, *rows)
        else:
            spans = read_spans(problem, operands)
            appending.append(problem, operands, spans)
            sequences = sequences_of_cache(problem, operands, spans, *rows)
        call = Call(problem, operands)
        if problem.selected is not None:
            from . import selected  # imported by the first call with selected keys

            selected.attend(plan, operands, call, sequences)
            return out, lse, *statistics

        def chunks(first: int, last: int, start: int) -> list[tuple[int, int]]:
            """Return the chunks of a piece [first, last) from key `start` on; with split_size all have full size."""
            skipped = max(start - first, 0) // plan.block_kv * plan.block_kv
            grid = range(first + skipped, last, plan.block_kv)
            if call.padded:
                return [(chunk, min(chunk + plan.block_kv, first + piece)) for chunk in grid]
            return [(max(chunk, start), min(chunk + plan.block_kv, last)) for chunk in grid]

        tiles = [tile for sequence in sequences for tile in row_tiles(plan, sequence)]
        # Each tile twice if its sequence has a prefix: with the keys of the prefix, and with its own.
        both = [(*tile.on_prefix(), tile) for tile in tiles]
        ranges = {id(tile): call.visible(tile) for pair in both for tile in pair}
        piece = _piece(problem, sum(stop - start for start, stop in ranges.values()), plan.block_kv)
        parts: list[list[Part | None]] = []
        tasks: list[Callable[[], None]] = []
        shared: dict[tuple[int, int], list[Callable[[Loaded], None]]] = {}  # by the prefix and the piece
        for tile, pair in zip(tiles, both, strict=True):
            parts.append([])
            Q = call.load(tile)
            for each in pair:
                start, stop = ranges[id(each)]
                for first in range(start // piece * piece, stop, piece) if start < stop else ():
                    of_piece = chunks(first, min(first + piece, stop), start)
                    attend = partial(call.attend, parts[-1], len(parts[-1]), each, Q, of_piece)
                    parts[-1].append(None)
                    if each is tile:
                        tasks.append(attend)
                    else:
                        shared.setdefault((id(tile.sequence.prefix), first), []).append(attend)
        tasks += [partial(_together, of_prefix) for of_prefix in shared.values()]
        run_tasks(plan.threads, tasks, call.stop)
        for tile, of_tile in zip(tiles, parts, strict=True):
            done = call.finish(tile, of_tile)
            tile.store(done.O, done.lse, problem)
            for name, of_rows in zip(problem.statistics, tile.sequence.statistics, strict=True):
                tile.store_numbers(of_rows, getattr(done.statistics, name), problem)
    return out, lse, *statistics


# The arrays of a call that is kept: besides q, k and v those that say which keys of a cache a sequence has.
KEPT = ("q", "k", "v", "cache_seqlens", "cache_batch_idx", "cache_leftpad", "block_table")


class Kept(NamedTuple):
    """A kept call (keyed_plan.py), which has no arrays but those of KEPT."""

    plan: Plan
    names: tuple[str, ...]  # of the arrays behind q, k and v, in their order
    described: tuple[Callable[..., Array], ...]  # make an Array of the address and the owner of each
    has_length: bool  # whether the last of the addresses is cache_seqlens
    outputs: tuple[str, ...] = ("out", "lse")


def kept(plan: Plan, operands: Operands) -> Kept | None:
    """Return what `repeat` needs of a call, or None if it needs more than arrays of KEPT."""
    problem, cache, arrays = plan.problem, operands.cache, operands.arrays()
    names = tuple(arrays)
    if problem.shared_kv or problem.statistics or problem.mods or problem.layout == "thd" or not set(names) <= {*KEPT}:
        return None
    if cache is not None and cache.out is not None:
        return None
    described = tuple(
        [
            partial(Array, shape=x.shape, strides=x.strides, dtype=x.dtype, device=x.device, framework=x.framework)
            for x in arrays.values()
        ]
    )
    return Kept(plan, names[3:], described, cache is not None and isinstance(cache.cache_seqlens, int))


def repeat(kept: Kept, arrays: list[AnyArray], addresses: list[int]) -> list[AnyArray] | None:
    """Return (out, lse) of a kept call on other arrays.

    None on a device that has changed, for which it was planned, and for lengths or pages that are refused.
    """
    plan, names, described, has_length, _ = kept
    if cpu() != plan.device:
        return None
    q, k, v, *others = [of(pointer=at, owner=x) for of, at, x in zip(described, addresses, arrays, strict=False)]
    if plan.problem.cache is None:
        operands = Operands(q, k, v)
    else:
        named: dict[str, Any] = dict(zip(names, others, strict=True))
        if has_length:
            named["cache_seqlens"] = addresses[-1]
        operands = Operands(q, k, v, cache=CacheOperands(**named))
        if not _are_legal(plan.problem, operands, names):
            return None
    out, lse = forward(plan, operands)
    return [out.result(), lse.result()]


def _are_legal(problem: Problem, operands: Operands, names: tuple[str, ...]) -> bool:
    """Return whether `check_contents` finds nothing wrong. It is not called for lengths alone, to save its time.

    A length that is a number has been compared with the capacity before.
    """
    if names == ("cache_seqlens",):
        assert operands.cache is not None and isinstance(operands.cache.cache_seqlens, Array)
        return all(0 <= length <= problem.kv_len for length in operands.cache.cache_seqlens.numpy().tolist())
    requirements = Requirements("attention_with_kv_cache")
    if names:
        check_contents(requirements, problem, operands, "cu_seqlens_q")
    return not requirements.unmet


def _piece(problem: Problem, keys: int, chunk: int) -> int:
    """Return the number of keys per piece: split_size if that is given, else a multiple of `chunk`."""
    if problem.cache is not None and problem.cache.split_size is not None:
        return problem.cache.split_size
    return max(-(-keys // (TASKS * chunk)) * chunk, min(CHUNKS * chunk, KEYS))


def _together(tiles: list[Callable[[Loaded], None]]) -> None:
    """Compute the attention of tiles over the same piece of a prefix, each chunk of which is loaded once."""
    loaded: Loaded = {}
    for attend in tiles:
        attend(loaded)


def _load(keys: Keys, start: int, stop: int, loaded: Loaded | None) -> tuple[np.ndarray, np.ndarray, Scales | None]:
    """Return K, V and the scales of a chunk, from `loaded` if it is there."""
    chunk = None if loaded is None else loaded.get((start, stop))
    if chunk is None:
        chunk = (*keys.load(start, stop), keys.scales(start, stop))
        if loaded is not None:
            loaded[start, stop] = chunk
    return chunk


class Call:
    """The inputs and outputs that all tasks of a call share."""

    def __init__(self, problem: Problem, operands: Operands) -> None:
        self.problem, self.stop = problem, Stop()
        dtype = problem.accumulation
        self.padded = problem.cache is not None and problem.cache.split_size is not None
        # Scaling Q costs less than scaling the scores, but a scale above 1 could make Q overflow where scores do not.
        scale, one = dtype.type(problem.scale), dtype.type(1)
        self.q_scale, self.product_scale = (scale, one) if abs(scale) <= 1 else (one, scale)
        self.lowest = np.finfo(dtype).min
        self.steps, self.mask_mod = steps(problem, operands), MaskMod(problem, operands) if problem.mask_mod else None
        self.modifies = self.product_scale != 1 or self.steps or self.mask_mod or problem.dense_mask is not None
        sink = operands.sink
        self.sink = None if sink is None else sink.numpy().astype(dtype).reshape(problem.kv_heads, problem.group)
        self.k_descale, self.v_descale = (
            None if x is None else x.numpy().astype(dtype) for x in (operands.k_descale, operands.v_descale)
        )

    def visible(self, tile: RowTile) -> tuple[int, int]:
        """Return the range [start, stop) of the keys that causal and window leave visible to any query of the tile."""
        keys, mask = tile.sequence.keys, self.problem.mask
        first = tile.sequence.position + tile.queries.start
        last = tile.sequence.position + tile.queries.stop - 1
        start = keys.start if mask.left is None else max(keys.start, first - mask.left)
        stop = keys.stop if mask.right is None else min(keys.stop, last + mask.right + 1)
        return start, max(start, stop)

    def load(self, tile: RowTile) -> np.ndarray:
        """Return the scaled Q of the tile."""
        Q = tile.load(self.problem)
        if self.k_descale is not None:
            Q *= self.k_descale[tile.sequence.batch, :, None, None]
        Q *= self.q_scale
        return Q

    def attend(
        self,
        parts: list[Part | None],
        index: int,
        tile: RowTile,
        Q: np.ndarray,
        chunks: list[tuple[int, int]],
        loaded: Loaded | None = None,
    ) -> None:
        """Compute parts[index], the attention of the tile over the keys of these chunks.

        Chunks are kept in `loaded` for other tiles.
        """
        part = self._attend(tile, Q, chunks, np.matmul, loaded)
        if not math.isfinite(square_sum(part.O)):  # V has NaN or infinity, perhaps in a key that some rows do not see
            part = self._attend(tile, Q, chunks, product, loaded)
        parts[index] = part

    def _attend(
        self,
        tile: RowTile,
        Q: np.ndarray,
        chunks: list[tuple[int, int]],
        multiply: Callable[..., np.ndarray],
        loaded: Loaded | None,
    ) -> Part:
        shape, dtype, width, m = Q.shape[:2], Q.dtype, 0, None
        scores = RowScores(self.problem, tile)
        statistics = RowStatistics(shape, dtype) if self.problem.statistics else None
        O, l = np.zeros((*shape, self.problem.head_dim_v), dtype), np.zeros((*shape, 1), dtype)
        for start, stop in chunks:
            self.stop.poll()
            K, V, scales = _load(tile.sequence.keys, start, stop, loaded)
            if stop - start != width:
                width = stop - start
                S = np.empty((*shape, width), dtype)
            np.matmul(Q, K.swapaxes(1, 2), out=S)
            if scales is not None:
                scale_products(S, Q, scales)
            is_hidden = tile.is_partly_hidden(self.problem.mask, start, stop)
            if self.modifies or is_hidden:
                self.modify(S, scores.at(start, stop), is_hidden)
            if statistics is not None:
                statistics.see(S, start)
            # m is at least the lowest finite number, not -inf, so that a hidden score minus m is -inf, not NaN.
            top = np.maximum.reduce(S, axis=2, keepdims=True, initial=self.lowest)
            if m is None:
                m = top
            elif (top > m).any():  # otherwise the factor is 1
                reference = np.maximum(m, top)
                rescale = np.exp(m - reference)
                if statistics is not None:
                    statistics.rescale((reference - m)[..., 0], rescale[..., 0], l[..., 0])
                l *= rescale
                O *= rescale
                m = reference
            S -= m
            exponents = S if statistics is None else S.copy()
            np.exp(S, out=S)
            if statistics is not None:
                statistics.add(exponents, S)
            l += np.add.reduce(S, axis=2, keepdims=True)
            if scales is not None:
                O -= scale_values(S, scales, multiply)
            O += multiply(S, V)
        O /= np.maximum(l, 1)  # l >= exp(m - m) = 1 in a row that sees a key, else l = 0
        if statistics is not None:
            statistics.finish(l[..., 0])
        assert m is not None  # a piece has at least one chunk
        return Part(O, (m + np.log(l))[..., 0], statistics)

    def modify(self, S: np.ndarray, scores: RowScores, is_hidden: bool) -> None:
        """Turn the products q.k into scores, in place; hidden scores become -inf."""
        tile, start, stop = scores.tile, scores.start, scores.stop
        sequence, keys = tile.sequence, tile.sequence.keys
        if self.product_scale != 1:
            S *= self.product_scale
        for step in self.steps:
            step.apply(S, scores, save=False)
        if self.mask_mod is not None:
            np.copyto(S, -np.inf, where=~self.mask_mod.visible(scores))
        if is_hidden:
            offsets, mask = scores.offsets, self.problem.mask
            if mask.left is not None:
                np.copyto(S, -np.inf, where=offsets > mask.left)
            if mask.right is not None:
                np.copyto(S, -np.inf, where=offsets < -mask.right)
            S[..., : max(keys.start - start, 0)] = -np.inf
            S[..., max(keys.stop - start, 0) :] = -np.inf
        end = min(stop, keys.stop)  # a prefix may end before the keys of the mask
        if sequence.mask is not None and end > sequence.mask_start:
            first = max(start, sequence.mask_start)
            visible = scores.at(first, end).cut(sequence.mask)
            np.copyto(S[..., first - start : end - start], -np.inf, where=~visible)

    def finish(self, tile: RowTile, parts: list[Part | None]) -> Part:
        """Return the result of the tile, its parts and the sink merged in order."""
        shape = (self.problem.kv_heads, tile.rows)
        dtype = self.problem.accumulation
        complete = [part for part in parts if part is not None]
        none = RowStatistics(shape, dtype) if self.problem.statistics else None
        if self.sink is not None:
            group = np.arange(tile.rows) % self.problem.group
            complete.append(Part(np.zeros((*shape, self.problem.head_dim_v), dtype), self.sink[:, group], none))
        if not complete:
            return Part(np.zeros((*shape, self.problem.head_dim_v), dtype), np.full(shape, -np.inf, dtype), none)
        result = complete[0] if len(complete) == 1 else _merged(complete)
        if self.v_descale is not None:
            result.O[...] *= self.v_descale[tile.sequence.batch, :, None, None]
        return result


def scale_products(S: np.ndarray, Q: np.ndarray, scales: Scales) -> None:
    """Turn the products of Q and the codes of keys into those of Q and the keys, in place."""
    if scales.k_zero is not None:
        S -= np.add.reduce(Q, axis=2, keepdims=True) * scales.k_zero[:, None]
    S *= scales.k[:, None]


def scale_values(P: np.ndarray, scales: Scales, multiply: Callable[..., np.ndarray]) -> np.ndarray | float:
    """Multiply P by the scales of values, in place, where it is not 0; return its product with their zeros."""
    np.multiply(P, scales.v[:, None], out=P, where=P != 0)
    product: np.ndarray | float = 0.0 if scales.v_zero is None else multiply(P, scales.v_zero[..., None])
    return product


def _merged(parts: list[Part]) -> Part:
    """Return the average of the parts weighted by exp(lse), summed in order; a part without visible keys adds 0."""
    lse, weights = merge_weights([part.lse for part in parts])
    O = np.add.reduce(weights[..., None] * np.array([part.O for part in parts]))
    statistics = [part.statistics for part in parts if part.statistics is not None]
    return Part(O, lse, merged(statistics, weights) if statistics else None)
