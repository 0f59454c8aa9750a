"""Calls on shards of queries, keys and heads, combined, give the result of the whole call."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from cases import Case, Result, by_backend, check, run
from tiles import in_small_tiles

import cupy_flash
from cupy_flash import dispatch
from cupy_flash.problem.build import pose
from cupy_flash.problem.records import WHOLE, Options, Packed, Saved, Shard

pytestmark = pytest.mark.usefixtures("poisoned_memory")

# Positions of a sequence by shard: contiguous shards of odd lengths, one of them empty; or every third position.
PARTS = {
    "runs": (1, lambda length: [range(0, 7), range(7, 7), range(7, 18), range(18, length)]),
    "stripes": (3, lambda length: [range(start, length, 3) for start in range(3)]),
}
CASES = {
    "plain": Case(dtype="float64"),
    "causal": Case(causal=True),
    "causal-float64": Case(causal=True, dtype="float64"),
    "top-left-more-queries": Case(causal="top_left", q_len=29),
    "window": Case(window=(4, 3)),
    "window-causal-empty-rows": Case(window=(5, None), causal=True, q_len=29),
    "window-narrow": Case(window=(1, 0)),
    "window-beyond-int32": Case(window=(2**40, 2**40)),
    "alibi": Case(alibi="bh"),
    "alibi-causal-dropout": Case(alibi="h", causal=True, dropout=0.3),
    "dropout": Case(dropout=0.4),
    "dropout-float64": Case(dropout=0.2, dtype="float64", causal=True),
    "grouped-bhsd": Case(heads=6, kv_heads=2, layout="bhsd", causal=True, dropout=0.3),
    "packed": Case(packed=True, batch=3, q_lengths=(19, 0, 18), kv_lengths=(20, 21, 23), causal=True),
    "packed-dropout": Case(
        packed=True, batch=2, q_lengths=(18, 19), kv_lengths=(23, 18), window=(6, 2), alibi="bh", dropout=0.3
    ),
    "mods": Case(score_mod="row-bias", mask_mod="document"),
    "mods-packed": Case(
        packed=True, batch=2, q_lengths=(18, 19), kv_lengths=(23, 18), score_mod="alibi", mask_mod="sliding"
    ),
}
ROWS = {f"{name}-{parts}": (case, PARTS[parts]) for name, case in CASES.items() for parts in PARTS}
# Every pair of shards is a forward and a backward, so the simulator has fewer shards of either kind.
SIMULATED_PARTS = {
    "runs": (1, lambda length: [range(0, 7), range(7, 7), range(7, length)]),
    "stripes": (2, lambda length: [range(start, length, 2) for start in range(2)]),
}
SIMULATED = {
    f"{name}-{parts}": (replace(CASES[name], heads=2, kv_heads=1, head_dim=4, head_dim_v=4), SIMULATED_PARTS[parts])
    for parts, names in {
        "runs": ("window-causal-empty-rows", "grouped-bhsd", "packed-dropout", "mods-packed"),
        "stripes": ("window-narrow", "alibi-causal-dropout", "packed-dropout", "mods"),
    }.items()
    for name in names
}


def rows_of_shard(case, call, parts, index, lengths):
    """Return (indices of a shard's rows in the whole arrays, its lengths per sequence, positions of its first rows)."""
    runs = [parts(length)[index] for length in lengths]
    runs = [range(run.start, min(run.stop, length), run.step) for run, length in zip(runs, lengths, strict=True)]
    if not case.packed:
        return np.array(runs[0], int), [len(run) for run in runs], [run.start for run in runs]
    begins = np.cumsum([0, *lengths])[:-1]
    rows = [begin + np.array(run, int) for begin, run in zip(begins, runs, strict=True)]
    return np.concatenate(rows), [len(run) for run in runs], [run.start for run in runs]


def run_parts(case, backend, step, parts):
    """Run every shard of the queries with every shard of the keys; merge the results and add the gradients."""
    q, k, v, options, dout, dlse, packed = case.call()
    axis = {True: 0, False: 2 if case.layout == "bhsd" else 1}[case.packed]
    q_lengths, kv_lengths = case.q_lengths, case.kv_lengths
    if packed is None:
        q_lengths, kv_lengths = [case.q_len] * case.batch, [case.kv_len] * case.batch
    offsets = [0 if case.causal == "top_left" else kv - q for q, kv in zip(q_lengths, kv_lengths, strict=True)]
    count = len(parts(100))

    def call(i, j, saved=None):
        q_rows, q_sizes, q_first = rows_of_shard(case, q, parts, i, q_lengths)
        kv_rows, kv_sizes, kv_first = rows_of_shard(case, k, parts, j, kv_lengths)
        starts = [(a, b, a + o - b) for a, b, o in zip(q_first, kv_first, offsets, strict=True)]
        bounds = [np.cumsum([0, *sizes], dtype=np.int32) for sizes in (q_sizes, kv_sizes)]
        some = None if packed is None else Packed(*bounds, max(q_sizes), max(kv_sizes))
        if saved is not None:
            given = [x.take(q_rows, axis) for x in saved[:2]] + [x.take(q_rows, -1) for x in saved[2:]]
            saved = Saved(*given)
        arrays = (q.take(q_rows, axis), k.take(kv_rows, axis), v.take(kv_rows, axis))
        where = Shard(np.array(starts, np.int32), step)
        posed = pose("shard", arrays, Options(**options, backend=backend), some, saved, where)
        return q_rows, kv_rows, *posed

    out, lse = np.zeros_like(dout), np.full(dlse.shape, -np.inf, dlse.dtype)
    layout = {} if case.packed else {"layout": case.layout}
    for i in range(count):
        merged = None
        for j in range(count):
            q_rows, _, problem, operands = call(i, j)
            part = [array.numpy() for array in dispatch.run_forward(in_small_tiles(problem), operands)]
            merged = part if merged is None else cupy_flash.merge(*merged, *part, **layout)
        put(out, q_rows, axis, merged[0])
        put(lse, q_rows, lse.ndim - 1, merged[1])

    dq, dk, dv = (np.zeros_like(np.nan_to_num(x)) for x in (q, k, v))
    dcaptured = []
    for i, j in product(range(count), repeat=2):
        q_rows, kv_rows, problem, operands = call(i, j, (dout, out, lse, dlse))
        results = dispatch.run_backward(in_small_tiles(problem), operands).map(lambda array: array.numpy())
        gradients = results[:3]
        dcaptured.append(results.dcaptured)
        for whole, rows, part in zip((dq, dk, dv), (q_rows, kv_rows, kv_rows), gradients, strict=True):
            put(whole, rows, axis, whole.take(rows, axis) + part)
    by_array = zip(*(parts or () for parts in dcaptured), strict=True)
    totals = [None if parts[0] is None else sum(parts) for parts in by_array]
    return Result(out, lse, dq, dk, dv, None, None, totals)


def put(whole, rows, axis, part):
    np.moveaxis(whole, axis, 0)[rows] = np.moveaxis(part, axis, 0)


@by_backend("case,parts", cpu=ROWS, simulator=SIMULATED)
def test_shards_give_the_result_of_the_whole(backend, case, parts):
    result = run_parts(case, backend, *parts)
    check(case, result)
    for part, whole in zip(result.dcaptured or (), run(case).dcaptured or (), strict=True):
        assert (part is None) == (whole is None)
        if whole is not None:
            np.testing.assert_allclose(part, whole, rtol=1e-4, atol=1e-4)


def test_heads_in_parts_draw_the_bits_of_the_whole(backend):
    """Results of a shard of the heads are bitwise those of the whole, dropout included."""
    case = Case(heads=4, kv_heads=2, dropout=0.5, head_dim=4, head_dim_v=4)
    q, k, v, options, *_ = case.call()

    def attend(*arrays, shard=WHOLE):
        problem, operands = pose("shard", arrays, Options(**options, backend=backend), shard=shard)
        return dispatch.run_forward(in_small_tiles(problem), operands)[0].numpy()

    whole = attend(q, k, v)
    for half in (slice(0, 2), slice(2, 4)):
        kv_half = slice(half.start // 2, half.stop // 2)
        part = attend(q[:, :, half], k[:, :, kv_half], v[:, :, kv_half], shard=Shard(first_head=half.start, heads=4))
        np.testing.assert_array_equal(part, whole[:, :, half])


def test_mods_count_sequences_and_heads_of_the_whole(backend):
    case = Case(heads=4, kv_heads=2, head_dim=4, head_dim_v=4, score_mod="alibi", mask_mod="document")
    q, k, v, options, dout, dlse, _ = case.call()
    whole = run(case)
    part, kv_part = (np.s_[1:, :, heads] for heads in (slice(2, 4), slice(1, 2)))
    arrays, shard = (q[part], k[kv_part], v[kv_part]), Shard(first_head=2, heads=4, first_batch=1)
    problem, operands = pose("shard", arrays, Options(**options, backend=backend), shard=shard)
    out = dispatch.run_forward(in_small_tiles(problem), operands)[0].numpy()
    np.testing.assert_allclose(out, whole.out[part], rtol=1e-5, atol=1e-6)
    saved = Saved(dout[part], whole.out[part], whole.lse[1:, 2:], dlse[1:, 2:])
    problem, operands = pose("shard", arrays, Options(**options, backend=backend), None, saved, shard)
    gradients = dispatch.run_backward(in_small_tiles(problem), operands)
    np.testing.assert_allclose(gradients.dq.numpy(), whole.dq[part], rtol=1e-4, atol=1e-5)
    (slopes,) = (x.numpy() for x in gradients.dcaptured if x is not None)
    assert slopes.shape == (4,) and (slopes[:2] == 0).all() and (slopes[2:] != 0).all()


def test_bad_starts_are_refused():
    q, k, v, *_ = Case().call()
    with pytest.raises(ValueError, match=r"starts must be int32 \(B, 3\) = \(2, 3\), not int32 \(3, 3\)"):
        pose("shard", (q, k, v), Options(), shard=Shard(np.zeros((3, 3), np.int32)))
