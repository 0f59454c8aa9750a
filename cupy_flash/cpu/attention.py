"""Exact attention on the CPU: the FlashAttention algorithm of the GPU kernels, tile by tile in NumPy and BLAS.

The forward runs an online softmax over the key tiles that each query tile sees. The backward loops over key tiles and,
for each, over the query tiles that see it; it recomputes P from (q, k, lse). Both hold one tile of scores per thread,
so memory is linear in the sequence length.

A thread runs whole tasks (a head, some query tiles of one, or in a backward with few heads some key tiles) and calls
single-threaded BLAS. Neither the tiles nor the order of any sum depends on the number of threads, so the result is
bitwise independent of it.

NaN and infinities in q, k, v or dO reach only the rows that see them, although 0 * NaN is NaN in a matrix product:
masked scores are overwritten with -inf, and `product` skips values of weight 0.

Names are the paper's; capitals are tiles in the accumulation dtype. S scores, P probabilities, O = P V, m row max,
l row sum, delta = rowsum(dO * O) - dlse.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from functools import cache, lru_cache, partial
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np

from ..arrays import Array, empty
from ..device import Device
from ..dropout import keep_mask, keep_mask_at, keep_scale
from ..engines import cpu as engine
from ..mods.ir import order, parse
from ..mods.tiles import FULL, TileClasses, TileCounts
from ..plan.plan import Plan
from ..problem.mask import Band, Mask
from ..problem.records import Gradients, Operands, Problem
from .blas import Products, Scratch, products_of, shaped, square_sum
from .score import MaskMod, Positions, ScoreTile, four_dimensional, steps
from .softmax import BOUND, Softmax
from .statistics import RowStatistics, StatisticsGradients, empty_statistics
from .thread_pool import OrderedSum, Stop, run_tasks
from .visited_tiles import Visit, VisitEstimate, Visits, classes_of, count_tiles, in_band

MAGNITUDES = (2.0**-96, 2.0**50)  # of the values of a query tile within BOUND
MOST_COUNTED = 2**18  # maximum tiles that tile_counts classifies, which takes about 0.1 s

Place = tuple[int, int, Band, Positions]  # batch index, head, band and positions of a sequence's head in the whole call


def forward(plan: Plan, operands: Operands) -> tuple[Array, ...]:
    """Compute attention: out, of q's shape with last dimension Dv, and lse (B, Hq, Sq), or (Hq, Tq) if packed.

    lse is the natural logarithm, in the accumulation dtype. The statistics that the problem asks for follow, shaped as
    lse.
    """
    problem, q = plan.problem, operands.q
    out = empty((*q.shape[:-1], problem.head_dim_v), problem.dtype, q)
    lse = empty(problem.lse_shape(q), problem.accumulation, q)
    statistics = empty_statistics(problem, q)
    call = Call(plan, operands)
    plan, products = call.plan, call.products
    if problem.has_lengths:  # no task writes the rows outside the sequences
        out.numpy()[...] = 0
        lse.numpy()[...] = -np.inf
    out_rows, lse_rows = call.heads_first(out), call.rows_of(lse)
    statistics_rows = dict(zip(problem.statistics, map(call.rows_of, statistics), strict=True))

    def attend(sequence: Sequence, heads: slice, q_tiles: range) -> None:
        kv_heads = call.kv_heads_of(heads)
        K = load_rows(call.k[sequence.row, kv_heads, sequence.keys], problem.accumulation)
        V = load_rows(call.v[sequence.row, kv_heads, sequence.keys], problem.accumulation)
        scratch = Scratch(
            problem.accumulation,
            *(len(K) * plan.block_q * n for n in (plan.block_kv, problem.head_dim, problem.head_dim_v)),
        )
        buffer, Q_buffer, O_buffer = scratch.arrays
        # The bound costs a pass over K and one over V, which is not worth it for a single query. Statistics need m.
        worthwhile = sequence.q_len > 1 and not call.additive and not problem.statistics
        V_finite, boundable = _magnitudes(V, products, O_buffer) if worthwhile else (False, False)
        K_norm = _largest_norm(K) if boundable else np.inf
        q_rows = call.q[sequence.row, heads, sequence.queries]
        O_rows = out_rows[sequence.row, heads, sequence.queries]
        L_rows = lse_rows[sequence.row, heads, sequence.queries]
        for q_start in q_tiles:
            queries = slice(q_start, min(q_start + plan.block_q, sequence.q_len))
            Q = load_rows(q_rows[:, queries], problem.accumulation)
            Q = products.scale(Q, call.q_scale, out=shaped(Q_buffer, *Q.shape))
            O = shaped(O_buffer, *Q.shape[:-1], problem.head_dim_v)
            O[...] = 0
            bounded = boundable and _largest_norm(Q) * K_norm * abs(call.product_scale) <= BOUND
            softmax = Softmax(Q.shape[:-1], problem.accumulation, call.sinks_of(heads), bounded, products)
            if problem.statistics:
                softmax.statistics = RowStatistics(Q.shape[:-1], problem.accumulation)
            for kv_start, kv_stop, cut in call.kv_tiles(sequence, heads.start, queries.start, queries.stop):
                call.stop.poll()
                tile = ScoreTile(
                    sequence.batch, heads.start, queries.start, queries.stop, kv_start, kv_stop, sequence.positions, cut
                )
                S = products.matmul(Q, K[:, kv_start:kv_stop].swapaxes(1, 2), out=shaped(buffer, len(Q), *tile.shape))
                call.scale(S)
                for step in call.score_steps:
                    step.apply(S[0], tile, save=False)
                softmax.update(S, O, partial(call.hide, S, sequence.band, tile), kv_start)
                if problem.dropout:
                    S *= call.keep(tile)
                products.add_product(O, S, V[:, kv_start:kv_stop], V_finite)
            softmax.finish(O, O_rows[:, queries], L_rows[:, queries])
            for name, rows in statistics_rows.items():
                rows[sequence.row, heads, sequence.queries][:, queries] = getattr(softmax.statistics, name)

    run_query_tiles(plan, call, attend)
    return out, lse, *statistics


def run_query_tiles(plan: Plan, call: Call, attend: Callable[[Sequence, slice, range], None]) -> None:
    """For all query tiles, run attend(sequence, heads, starts of some tiles) on the plan's threads."""
    pairs = [
        (sequence, heads)
        for sequence in call.sequences
        if sequence.q_len
        for kv_heads in call.kv_head_batches()
        for heads in call.heads_of(kv_heads)
    ]
    # Split heads so that each thread gets two tasks, unless each thread gets the same number of whole heads; query
    # tiles are assigned round-robin to balance a causal triangle.
    pieces = 1 if len(pairs) % plan.threads == 0 else -(-2 * plan.threads // len(pairs))
    run_tasks(
        plan.threads,
        [
            partial(attend, sequence, heads, range(piece * plan.block_q, sequence.q_len, pieces * plan.block_q))
            for sequence, heads in pairs
            for piece in range(pieces)
        ],
        call.stop,
        call.products.region,
    )


def backward(plan: Plan, operands: Operands) -> Gradients:
    """Compute the gradients from the forward's (out, lse) and from (dout, dlse); dbias and dsink only on request.

    Each gradient has the shape and dtype of its input; sums run in the accumulation dtype and are rounded once.
    """
    problem, q = plan.problem, operands.q
    gradients = empty_gradients(problem, operands)
    call = Call(plan, operands)
    plan, products = call.plan, call.products
    dq_rows, dk_rows, dv_rows = (None if x is None else call.heads_first(x) for x in gradients)
    assert dq_rows is not None and dk_rows is not None
    dsink = np.zeros((problem.batch, problem.heads), problem.accumulation)

    pieces = engine.pieces(problem, plan.block_kv)
    dQ_sums = {
        (sequence.batch, head): OrderedSum(_pieces_of(sequence, plan, pieces))
        for sequence in call.sequences
        for head in range(problem.heads)
    }

    def differentiate(sequence: Sequence, kv_heads: slice, piece: int) -> None:
        """Compute dK and dV of every `pieces`-th key tile, and this piece's part of dQ."""
        K = call.k[sequence.row, kv_heads, sequence.keys]
        V = call.v[sequence.row, kv_heads, sequence.keys]
        tiles = [
            slice(start, min(start + plan.block_kv, sequence.kv_len))
            for start in range(piece * plan.block_kv, sequence.kv_len, pieces * plan.block_kv)
        ]
        dK, dV = ([np.zeros(x[:, keys].shape, problem.accumulation) for keys in tiles] for x in (K, V))
        K_norm = _largest_norm(load_rows(K, problem.accumulation))
        K_finite = products.is_finite(load_rows(K, problem.accumulation))
        for heads in call.heads_of(kv_heads):
            rows = _QueryRows(plan, call, sequence, heads, K_norm)
            dQ = np.zeros((len(K), sequence.q_len, problem.head_dim), problem.accumulation)
            for keys, dK_tile, dV_tile in zip(tiles, dK, dV, strict=True):
                K_tile, V_tile = (_with_column(x[:, keys], problem.accumulation, 1) for x in (K, V))
                for q_start, q_stop, cut in call.q_tiles(sequence, heads.start, keys.start, keys.stop):
                    call.stop.poll()
                    tile = ScoreTile(
                        sequence.batch, heads.start, q_start, q_stop, keys.start, keys.stop, sequence.positions, cut
                    )
                    P, dS = rows.recompute(tile, K_tile, V_tile)
                    Q, dO = (x[:, q_start:q_stop, :-1] for x in (rows.Q, rows.dO))
                    products.add_product(dV_tile, P.swapaxes(1, 2), dO, rows.finite)
                    products.add_product(dK_tile, dS.swapaxes(1, 2), Q, rows.finite)
                    products.add_product(dQ[:, q_start:q_stop], dS, K_tile[:, :, :-1], K_finite)
            total = dQ_sums[sequence.batch, heads.start].add(piece, dQ)
            if total is not None:
                total *= problem.accumulation.type(problem.scale)
                dq_rows[sequence.row, heads, sequence.queries] = total
            if call.sink is not None and piece == 0:
                dsink[sequence.batch, heads] = rows.dsink(call.sink[heads])
        dk, dv = (None if x is None else x[sequence.row, kv_heads, sequence.keys] for x in (dk_rows, dv_rows))
        for keys, dK_tile, dV_tile in zip(tiles, dK, dV, strict=True):
            call.store_dK_dV((dK_tile, dV_tile), (dk, dv), (slice(None), keys))

    run_tasks(plan.threads, _gradient_tasks(plan, call, pieces, differentiate), call.stop, products.region)
    sums = {name: total for step in call.score_steps for name, total in step.gradients().items()}
    if operands.sink is not None:
        sums["sink"] = dsink.sum(axis=0)
    others = {f"d{name}": rounded(total, getattr(operands, name), q) for name, total in sums.items()}
    return Gradients(*gradients, **others)


def empty_gradients(problem: Problem, operands: Operands) -> tuple[Array, Array, Array | None]:
    """Return arrays for dq, dk and dv; dv is None if the values are inside the keys.

    Rows that belong to no sequence are 0.
    """
    q, inputs = operands.q, (operands.q, operands.k, None if problem.shared_kv else operands.v)
    dq, dk, dv = (None if x is None else empty(x.shape, problem.dtype, q) for x in inputs)
    assert dq is not None and dk is not None
    if problem.has_lengths:
        for gradient in filter(None, (dq, dk, dv)):
            gradient.numpy()[...] = 0
    return dq, dk, dv


def _gradient_tasks(
    plan: Plan, call: Call, pieces: int, differentiate: Callable[..., None]
) -> list[Callable[[], None]]:
    """Return tasks that call differentiate(sequence, kv_heads, piece) for all sequences, heads and pieces."""
    if pieces == 1:
        return call.gradient_tasks(partial(differentiate, piece=0))
    return [
        partial(differentiate, sequence, kv_heads, piece)
        for sequence in call.sequences
        for kv_heads in call.kv_head_batches()
        for piece in range(_pieces_of(sequence, plan, pieces))
    ]


def _pieces_of(sequence: Sequence, plan: Plan, pieces: int) -> int:
    """Return the number of pieces that get a key tile of the sequence, but at least 1."""
    return max(1, min(pieces, -(-sequence.kv_len // plan.block_kv)))


def rounded(total: Any, operand: Array | tuple[Array, ...], like: Array) -> Any:
    """Return the gradient of an operand: the sum `total` in the operand's shape and dtype; None without a sum."""
    if isinstance(operand, tuple):
        return tuple(rounded(one, array, like) for one, array in zip(total, operand, strict=True))
    if total is None:
        return None
    gradient = empty(operand.shape, operand.dtype, like)
    gradient.numpy()[...] = total.reshape(operand.shape)
    return gradient


def fitted(plan: Plan, operands: Operands) -> Plan:
    """Return the plan with the best tile for the pairs that mask_mod leaves in the longest sequence, head 0."""
    problem = plan.problem
    sequence = max(sequences_of(problem, operands), key=lambda sequence: sequence.q_len * sequence.kv_len, default=None)
    if sequence is None:
        return plan
    place = problem.first_batch + sequence.batch, problem.first_head, sequence.band, sequence.positions
    classes = MaskMod(problem, operands).classes()
    if classes.extremes:
        tile, cost = _best_tile(problem, plan.device, classes, place)
    else:
        tile, cost = _best_positional_tile(problem, plan.device, operands.numbers, place)
    threads = engine.threads(plan.device, tile, cost)
    return plan._replace(block_q=tile.block_q, block_kv=tile.block_kv, threads=threads, tile=tile, cost=cost)


@lru_cache(maxsize=256)
def _best_positional_tile(
    problem: Problem, device: Device, numbers: tuple[int | float, ...], place: Place
) -> tuple[engine.Tile, float]:
    """Return _best_tile for a mask_mod without arrays, cached because it is the same in every call."""
    mask = parse(problem.mods).mask
    assert mask is not None
    return _best_tile(problem, device, TileClasses(mask, (), numbers), place)


def _best_tile(problem: Problem, device: Device, classes: TileClasses, place: Place) -> tuple[engine.Tile, float]:
    """Return the tile with the lowest predicted cost under the mask_mod, and that cost in core seconds."""
    estimate = VisitEstimate(classes, *place)
    unbounded = problem._replace(mask=Mask())  # the estimate has applied the positional mask already
    of_pairs = [node for node in order((classes.mask,)) if "kv" in node.inputs and node.inputs & {"q", "h"}]
    masking = (len(of_pairs) + 1) / 2 * engine.EDGE
    by_query, heads = not problem.backward, problem.batch * problem.heads

    def cost(tile: engine.Tile) -> float:
        visits, pairs, masked, cut = estimate.count(*tile, by_query)
        # A visit covers only the part of a tile that the mask_mod leaves, so predict with the mean size of visits.
        if by_query:
            tiles = -(-problem.q_len // tile.block_q)
            visited = tile._replace(block_kv=max(pairs // max(visits * tile.block_q, 1), 1))
        else:
            tiles = -(-problem.kv_len // tile.block_kv)
            visited = tile._replace(block_q=max(pairs // max(visits * tile.block_kv, 1), 1))
        beside = heads * (tiles * engine.ROWS + masked * engine.MASKED + cut * masking) * 1e-9
        return engine.seconds(unbounded, pairs, device, visited) + beside

    return min(((tile, cost(tile)) for tile in engine.tiles(problem, device)), key=itemgetter(1))


def tile_classes(plan: Plan, operands: Operands) -> np.ndarray:
    """Return the classes of a plan's tiles in the first sequence and head, (query tiles, key tiles)."""
    problem, sequence = plan.problem, sequences_of(plan.problem, operands)[0]
    band, blocks = sequence.band, (plan.block_q, plan.block_kv)
    if problem.mask_mod:
        first = (problem.first_batch, problem.first_head)
        found = classes_of(MaskMod(problem, operands).classes(), *first, band, sequence.positions, *blocks)
    else:
        found = np.full((-(-band.q_len // plan.block_q), -(-band.kv_len // plan.block_kv)), FULL)
    return in_band(found, band, *blocks)


def tile_counts(plan: Plan, operands: Operands) -> TileCounts | None:
    """Count the classes of a plan's tiles under its mask_mod, over all heads and sequences; None if they are too many.

    The arrays that the mask reads and the lengths must be in host memory.
    """
    problem, classes = plan.problem, MaskMod(plan.problem, operands).classes()
    sequences = sequences_of(problem, operands)
    read = classes.mask.inputs
    tiles = sum(-(-each.q_len // plan.block_q) * -(-each.kv_len // plan.block_kv) for each in sequences)
    if tiles * (problem.heads if "h" in read else 1) > MOST_COUNTED:
        return None
    count = cache(partial(count_tiles, classes, block_q=plan.block_q, block_kv=plan.block_kv))
    total = np.zeros(len(TileCounts._fields), np.int64)
    for sequence in sequences:
        for head in range(problem.heads):
            batch, head = (n if name in read else 0 for name, n in (("b", sequence.batch), ("h", head)))
            total += count(problem.first_batch + batch, problem.first_head + head, sequence.band, sequence.positions)
    return TileCounts(*total.tolist())


class Sequence(NamedTuple):
    """One sequence of the batch: its slices of the arrays and its positional mask."""

    batch: int  # sequence index b, which dropout and ALiBi use
    row: int  # batch index into the arrays: b, or 0 for a packed batch
    queries: slice
    keys: slice
    band: Band
    positions: Positions

    @property
    def q_len(self) -> int:
        """Queries of the sequence."""
        return self.band.q_len

    @property
    def kv_len(self) -> int:
        """Keys of the sequence."""
        return self.band.kv_len


class Call:
    """The operands of one call as NumPy views (B, H, S, D); for a packed batch, (1, H, T, D)."""

    def __init__(self, plan: Plan, operands: Operands) -> None:
        problem = plan.problem
        self.problem, self.stop = problem, Stop()
        self.q, self.k, self.v = (self.heads_first(array) for array in (operands.q, operands.k, operands.v))
        saved = (operands.dout, operands.out)
        self.dout, self.out = (None if array is None else self.heads_first(array) for array in saved)
        self.lse, self.dlse = (
            None if array is None else self.rows_of(array) for array in (operands.lse, operands.dlse)
        )
        self.statistics = [
            None if array is None else self.rows_of(array)
            for array in (operands.dmax, operands.argmax, operands.dentropy, operands.entropy)
        ]
        self.mask = None if operands.mask is None else four_dimensional(operands.mask.numpy())
        self.bias = None if operands.bias is None else four_dimensional(operands.bias.numpy())
        self.sink = None if operands.sink is None else operands.sink.numpy().astype(problem.accumulation)
        seed = operands.seed.numpy().item() if isinstance(operands.seed, Array) else operands.seed
        self.seed = 0 if seed is None else seed % 2**64  # int64 seeds are reinterpreted as uint64
        self.sequences = sequences_of(problem, operands)
        # Scaling Q costs less than scaling the scores, but a scale above 1 could make Q overflow where scores do not.
        scale, one = problem.accumulation.type(problem.scale), problem.accumulation.type(1)
        self.q_scale, self.product_scale = (scale, one) if abs(scale) <= 1 else (one, scale)
        self.score_steps = steps(problem, operands)
        self.products = products_of(problem, operands)
        self.plan = plan = self.products.planned(plan)
        self.block_q, self.block_kv = plan.block_q, plan.block_kv
        self.mask_mod, self.visits = None, None
        if problem.mask_mod:
            self.mask_mod = MaskMod(problem, operands)
            self.visits = Visits(self.mask_mod.classes(), plan.block_q, plan.block_kv)

    def scale(self, product: np.ndarray) -> None:
        """Multiply scores by the part of the scale that is not folded into Q."""
        if self.product_scale != 1:
            product *= self.product_scale

    def store_dK_dV(
        self,
        sums: tuple[np.ndarray, np.ndarray],
        rows: tuple[np.ndarray | None, np.ndarray | None],
        place: tuple[int | slice, ...],
    ) -> None:
        """Scale dK and write (dK, dV) to a place of `rows` (dk, dv); dK takes dV if dv is None: values are in keys."""
        (dK, dV), (dk, dv) = sums, rows
        assert dk is not None
        self.scale(dK)
        if dv is None:
            dK[..., : dV.shape[-1]] += dV
        else:
            dv[place] = dV
        dk[place] = dK

    @property
    def additive(self) -> bool:
        """Whether an option adds to the scores, so that |q| |k| does not bound them."""
        return not all(step.bounded for step in self.score_steps)

    def heads_first(self, array: Array) -> np.ndarray:
        """View an array of the call's layout as (B, H, S, D)."""
        view = array.numpy()
        if self.problem.layout == "thd":
            return view.transpose(1, 0, 2)[None]
        return view.transpose(0, 2, 1, 3) if self.problem.layout == "bshd" else view

    def rows_of(self, array: Array) -> np.ndarray:
        """View an lse-like array as (B, H, S)."""
        return array.numpy()[None] if self.problem.layout == "thd" else array.numpy()

    def sinks_of(self, heads: slice) -> np.ndarray | None:
        """Return the sinks of some heads (heads, 1), or None."""
        return None if self.sink is None else self.sink[heads, None]

    def kv_head_batches(self) -> list[slice]:
        """Return the key/value heads in ranges that one task computes together."""
        heads, batch = self.problem.kv_heads, self.products.heads_at_once
        return [slice(start, min(start + batch, heads)) for start in range(0, heads, batch)]

    def heads_of(self, kv_heads: slice) -> list[slice]:
        """Return slices of query heads, one per head of a GQA group; each has one query head per key/value head."""
        group = self.problem.group
        return [slice(kv_heads.start * group + i, kv_heads.stop * group, group) for i in range(group)]

    def kv_heads_of(self, heads: slice) -> slice:
        """Return the key/value heads of a slice that `heads_of` returned."""
        group = self.problem.group
        return slice(heads.start // group, -(-heads.stop // group))

    def kv_tiles(self, sequence: Sequence, head: int, q_start: int, q_stop: int) -> list[Visit]:
        """Return the key tiles that a query tile visits, last first."""
        if self.visits is None:
            return [Visit(*tile, None) for tile in sequence.band.kv_tiles(q_start, q_stop, self.block_kv)]
        place = self._place(sequence, head)
        return self.visits.kv_tiles(*place, q_start)

    def _place(self, sequence: Sequence, head: int) -> Place:
        """Return the Place of a head of a sequence; if this call is a part of a larger one, the place in that one."""
        problem = self.problem
        return problem.first_batch + sequence.batch, problem.first_head + head, sequence.band, sequence.positions

    def q_tiles(self, sequence: Sequence, head: int, kv_start: int, kv_stop: int) -> list[Visit]:
        """Return the query tiles that visit a key tile, first to last."""
        if self.visits is None:
            return [Visit(*tile, None) for tile in sequence.band.q_tiles(kv_start, kv_stop, self.block_q)]
        place = self._place(sequence, head)
        return self.visits.q_tiles(*place, kv_start)

    def hide(self, S: np.ndarray, band: Band, tile: ScoreTile, value: float) -> None:
        """Set masked scores of S to `value`: by position, by the dense mask, or by mask_mod."""
        if not band.sees_all(*tile.queries, *tile.keys):
            self.products.hide(S, band, tile.queries, tile.keys, value)
        if self.mask is not None:
            np.copyto(S, value, where=~tile.cut(self.mask))
        if self.mask_mod is not None:
            self.mask_mod.hide(S, tile, value)

    def may_hide(self, band: Band, tile: ScoreTile) -> bool:
        """Whether any score of the tile may be masked."""
        given = self.mask is not None or self.bias is not None
        return given or tile.masked is not None or not band.sees_all(*tile.queries, *tile.keys)

    def keep(self, tile: ScoreTile) -> np.ndarray:
        """Return the dropout factors (rows, columns) of the tile: 0 where dropped, else keep_scale."""
        problem, (q_first, kv_first, _, step) = self.problem, tile.positions
        head_index = (problem.first_batch + tile.batch) * problem.whole_heads + problem.first_head + tile.head
        if step == 1:
            kept = keep_mask(
                self.seed, head_index, q_first + tile.q_start, q_first + tile.q_stop,
                kv_first + tile.kv_start, kv_first + tile.kv_stop, problem.dropout,
            )  # fmt: skip
        else:
            i, j = q_first + step * np.arange(*tile.queries), kv_first + step * np.arange(*tile.keys)
            kept = keep_mask_at(self.seed, head_index, i[:, None], j, problem.dropout)
        return kept * problem.accumulation.type(keep_scale(problem.dropout))

    def gradient_tasks(self, differentiate: Callable[[Sequence, slice], None]) -> list[Callable[[], None]]:
        """Return one task per sequence and batch of key/value heads, which calls differentiate(sequence, kv_heads).

        Heads that add to the same elements of a gradient, of the bias or of an array that score_mod captures, run one
        after another in one task, which fixes the summation order.
        """
        slices: dict[object, list[Callable[[], None]]] = defaultdict(list)
        by_sequence, by_head = (
            all(getattr(step, name) for step in self.score_steps) for name in ("by_sequence", "by_head")
        )
        for sequence in self.sequences:
            for kv_heads in self.kv_head_batches():
                target = (sequence.batch if by_sequence else 0, kv_heads.start if by_head else 0)
                slices[target].append(partial(differentiate, sequence, kv_heads))
        return [partial(_in_turn, tasks) for tasks in slices.values()]


class _QueryRows:
    """Query-side operands of the backward for some heads: Q (scaled), dO, lse, delta, and buffers for S and dP.

    Q and dO have an extra column, -lse and -delta, and K and V a column of ones: the matmul then returns S - lse and
    dP - delta without another pass over the tile. If a softcap, ALiBi, a bias or dropout comes between the product and
    the subtraction, the column is 0 and the subtraction is a separate pass. The same is done for scores beyond BOUND:
    S rounded exactly as in the forward has the rounding error that lse contains, and the two cancel.
    """

    def __init__(self, plan: Plan, call: Call, sequence: Sequence, heads: slice, K_norm: float) -> None:
        problem, self.call, self.band = plan.problem, call, sequence.band
        rows = (sequence.row, heads, sequence.queries)
        assert call.dout is not None and call.out is not None and call.lse is not None
        # A row that sees no key has lse -inf; replacing that by inf makes its P = exp(S - lse) = 0.
        empty = call.lse[rows] == -np.inf
        self.lse = np.where(empty, np.inf, call.lse[rows])
        self.undefined = bool(np.isnan(self.lse).any())
        self.Q = _with_column(call.q[rows], problem.accumulation, 0)
        self.Q *= call.q_scale
        self.dO = _with_column(call.dout[rows], problem.accumulation, 0)
        self.dO[empty] = 0  # dO of an empty row may be NaN, and 0 * NaN is NaN
        self.delta = np.vecdot(self.dO[..., :-1], load_rows(call.out[rows], problem.accumulation))
        if call.dlse is not None:
            self.delta -= np.where(empty, 0, call.dlse[rows])
        given = [None if x is None else x[rows] for x in call.statistics]
        self.statistics = StatisticsGradients(empty, *given) if problem.statistics else None
        self.finite = all(call.products.is_finite(x[..., :-1]) for x in (self.Q, self.dO))
        unmodified = not call.score_steps and call.product_scale == 1
        self.folded = unmodified and _largest_norm(self.Q) * K_norm <= BOUND
        if self.folded:
            self.Q[..., -1] = -self.lse
        if not problem.dropout:
            self.dO[..., -1] = -self.delta
        scores = len(self.Q) * plan.block_q * plan.block_kv
        self.scratch = Scratch(problem.accumulation, scores, scores)

    def recompute(self, tile: ScoreTile, K: np.ndarray, V: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Recompute P (after dropout) and dS (before the scale) of a tile; K and V carry a column of ones."""
        problem, products, rows = self.call.problem, self.call.products, slice(*tile.queries)
        S, dP = (shaped(buffer, len(K), *tile.shape) for buffer in self.scratch.arrays)
        products.matmul(self.Q[:, rows], K.swapaxes(1, 2), out=S)
        self.call.scale(S)
        saved = [step.apply(S[0], tile, save=True) for step in self.call.score_steps]
        if not self.folded:
            hidden = np.isneginf(S) if self.undefined else False  # by a bias or score_mod; -inf - NaN is NaN
            products.subtract(S, self.lse[:, rows])
            np.copyto(S, -np.inf, where=hidden)
        of_entropy = "entropy" in problem.statistics
        log_P = S.copy() if of_entropy else S
        products.exp(S, self.folded)
        P = S
        self.call.hide(P, self.band, tile, 0)
        products.matmul(self.dO[:, rows], V.swapaxes(1, 2), out=dP)
        if problem.dropout:
            keep = self.call.keep(tile)
            dP *= keep
            dP -= self.delta[:, rows, None]
        if self.statistics is not None and of_entropy:
            dP += self.statistics.of_entropy(log_P, P, rows)
        products.multiply(dP, P)
        dS = dP
        may_hide = self.call.may_hide(self.band, tile)
        if may_hide:
            hide_gradient(dS, P)
        if self.statistics is not None:
            self.statistics.add_of_max(dS, rows, tile.kv_start)
        for step, value in zip(self.call.score_steps[::-1], saved[::-1], strict=True):
            step.gradient(dS[0], tile, value)
        if may_hide and saved:
            hide_gradient(dS, P)  # softcap's derivative is NaN at a masked NaN
        if problem.dropout:
            P *= keep
        return P, dS

    def dsink(self, sinks: np.ndarray) -> np.ndarray:
        """Return the gradients of the sinks, -sum(exp(sink - lse) * delta) over their rows; delta includes -dlse."""
        log_P = sinks[:, None] - self.lse
        gradients: np.ndarray = -np.vecdot(np.exp(log_P), self.delta)
        if self.statistics is not None and self.statistics.dH is not None:
            gradients += self.statistics.of_sinks(log_P).sum(axis=-1)
        return gradients


def sequences_of(problem: Problem, operands: Operands) -> list[Sequence]:
    """Return the sequences of the batch, slices by q_lengths and kv_lengths, or by cu_seqlens of a packed batch."""
    if operands.cu_seqlens_q is not None and operands.cu_seqlens_k is not None:
        q_bounds, k_bounds = operands.cu_seqlens_q.numpy().tolist(), operands.cu_seqlens_k.numpy().tolist()
        q_starts, q_stops, k_starts, k_stops = q_bounds[:-1], q_bounds[1:], k_bounds[:-1], k_bounds[1:]
        row_of = [0] * problem.batch
    else:
        q_starts = k_starts = [0] * problem.batch
        q_stops, k_stops = (
            [longest] * problem.batch if lengths is None else lengths.numpy().tolist()
            for lengths, longest in ((operands.q_lengths, problem.q_len), (operands.kv_lengths, problem.kv_len))
        )
        row_of = list(range(problem.batch))
    starts = None if operands.starts is None else operands.starts.numpy().tolist()
    sequences = []
    for batch, (row, *bounds) in enumerate(zip(row_of, q_starts, q_stops, k_starts, k_stops, strict=True)):
        queries, keys = slice(*bounds[:2]), slice(*bounds[2:])
        lengths = (queries.stop - queries.start, keys.stop - keys.start)
        positions = Positions(0, 0, problem.mask.offset(*lengths), 1)
        if starts is not None:
            q_first, kv_first, offset = starts[batch]
            positions = Positions(q_first, kv_first, offset, problem.step)
        band = problem.mask.band(*lengths, positions.offset, positions.step)
        sequences.append(Sequence(batch, row, queries, keys, band, positions))
    return sequences


def load_rows(rows: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Convert rows (..., S, D) to the accumulation dtype and strides that BLAS accepts; a view if they already fit."""
    blas_takes_it = rows.strides[-1] == rows.itemsize and rows.strides[-2] >= rows.itemsize * rows.shape[-1]
    return rows.astype(dtype, order="K" if blas_takes_it else "C", copy=False)


def _with_column(rows: np.ndarray, dtype: np.dtype, value: float) -> np.ndarray:
    """Copy rows (..., S, D) to (..., S, D + 1) in the accumulation dtype; the last column is `value`."""
    wide = np.empty((*rows.shape[:-1], rows.shape[-1] + 1), dtype)
    wide[..., :-1] = load_rows(rows, dtype)
    wide[..., -1] = value
    return wide


def _largest_norm(rows: np.ndarray) -> float:
    """Return the largest Euclidean norm of a row, ignoring NaN rows, whose scores are NaN with any m."""
    return float(np.sqrt(np.fmax.reduce(np.vecdot(rows, rows), axis=None, initial=0)))


def _magnitudes(rows: np.ndarray, products: Products, buffer: np.ndarray) -> tuple[bool, bool]:
    """Return whether all numbers are finite, and whether the magnitudes of all but zeros and NaN are in MAGNITUDES."""
    heads, count, dim = rows.shape
    block = max(1, len(buffer) // max(1, heads * dim))
    pairs = [products.extremes(rows[:, i : i + block], buffer) for i in range(0, count, block)]
    lowest, highest = MAGNITUDES
    finite = all(math.isfinite(largest) for _, largest in pairs)
    if all(smallest >= lowest and largest <= highest for smallest, largest in pairs):
        return True, True
    magnitudes = np.abs(rows)
    magnitudes[magnitudes == 0] = lowest
    in_range = np.fmin.reduce(magnitudes, axis=None, initial=lowest) == lowest
    return finite, bool(in_range and np.fmax.reduce(magnitudes, axis=None, initial=0) <= highest)


def hide_gradient(dS: np.ndarray, P: np.ndarray) -> None:
    """Set dS to 0 where P is 0, where 0 * NaN or 0 * inf would have made it NaN."""
    if not np.isfinite(square_sum(dS)):
        np.copyto(dS, 0, where=P == 0)


def _in_turn(tasks: list[Callable[[], None]]) -> None:
    for task in tasks:
        task()
