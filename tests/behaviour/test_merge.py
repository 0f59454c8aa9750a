"""merge of results over parts of the keys gives the result over all keys, also for rows without keys in a part."""

import functools
from dataclasses import replace

import far
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from cases import DTYPES, Case, furthest, references
from planting import change, planted
from tiers import exhaustive
from tolerance import assert_matches_reference

import cupy_flash
from cupy_flash import Statistics, reference
from cupy_flash.arrays import as_array
from cupy_flash.cpu.partials import merge
from cupy_flash.engines.launch import require_grids
from cupy_flash.gpu import run_plan
from cupy_flash.problem.merge import pose_merge
from cupy_flash.simulator import run as simulator

FORWARD = ("out", "lse")

SPLIT = {
    "plain": Case(),
    "causal": Case(causal=True, q_len=29),
    "mask": Case(mask="b1qk"),
    "bias": Case(bias="1hqk", bias_hides=True),
    "sink": Case(sink=True),
    "sink-mask": Case(sink=True, mask="bhqk"),
    "bhsd": Case(layout="bhsd", mask="qk"),
    "huge": Case(scores="huge"),
    "rising": Case(scores="rising"),
    "constant": Case(scores="constant"),
    "float16": Case(dtype="float16"),
    "bfloat16": Case(dtype="bfloat16", mask="b1qk"),
    "float64": Case(dtype="float64", sink=True),
}


def parts(attention, case, cuts):
    """Yield (out, lse) over the keys between two cuts, masked by their positions in the whole; the first part has the
    sink.
    """
    q, k, v, options, *_ = case.call()
    mask = np.asarray(options.pop("mask", True))
    if options.pop("causal"):
        mask = mask & np.tri(case.q_len, case.kv_len, case.kv_len - case.q_len, dtype=bool)
    mask = np.broadcast_to(mask, (case.batch, case.heads, case.q_len, case.kv_len))
    bias, sink = options.pop("bias", None), options.pop("sink", None)
    for start, stop in zip(cuts, cuts[1:], strict=False):
        keys = [x.take(range(start, stop), axis=2 if case.layout == "bhsd" else 1) for x in (k, v)]
        cut = dict(mask=mask[..., start:stop], bias=None if bias is None else bias[..., start:stop])
        yield attention(q, *keys, **cut, sink=sink if start == 0 else None, **options)
        sink = None


def average(a, b, layout):
    """Return the reference of merge: the average with softmax weights of the two lse, computed in the dtype of lse."""
    (out_a, lse_a), (out_b, lse_b) = a, b
    largest = np.maximum(np.maximum(lse_a, lse_b), np.finfo(lse_a.dtype).min)
    weights = np.exp(np.stack([lse_a, lse_b]) - largest)
    total = weights.sum(axis=0)
    weights = (weights / np.where(total == 0, 1, total))[..., None]
    weights = weights if layout == "bhsd" else weights.swapaxes(2, 3)
    out = (weights * np.stack([out_a, out_b]).astype(lse_a.dtype)).sum(axis=0)
    with np.errstate(divide="ignore"):
        return out.astype(out_a.dtype), largest + np.log(total)


@pytest.mark.parametrize("cuts", [(0, 9, 23), (0, 1, 23), (0, 0, 23), (0, 5, 5, 16, 23)], ids=str)
@pytest.mark.parametrize("case", [pytest.param(case, id=name) for name, case in SPLIT.items()])
def test_merged_parts_are_the_whole(case, cuts):
    """The exact result is the formula over all keys; averaging low-precision parts of the formula sets the
    tolerance.
    """

    def whole(attention, merge):
        return functools.reduce(functools.partial(merge, layout=case.layout), parts(attention, case, cuts))

    actual = whole(
        functools.partial(cupy_flash.attention, return_lse=True),
        lambda a, b, layout: cupy_flash.merge(*a, *b, layout=layout),
    )
    exact = references(case)[0][:2]
    runs = (
        whole(functools.partial(reference.attention, dtype=DTYPES[case.dtype], order=order), average)
        for order in range(8)
    )
    low = functools.reduce(lambda a, b: tuple(map(furthest, exact, a, b)), runs)
    for name, x, y, z, dtype in zip(FORWARD, actual, exact, low, (DTYPES[case.dtype], case.accumulation), strict=False):
        assert_matches_reference(x, y, z, dtype, f"{name} of {case}")


def results(*shape, seed, dtype=np.float32):
    rng = np.random.default_rng(seed)
    *rows, heads, dim = shape
    return rng.normal(size=(*rows, heads, dim)).astype(dtype), rng.normal(size=(*rows[:-1], heads, rows[-1])).astype(
        np.float32
    )


def test_rows_without_keys():
    """A row without keys in one part is bitwise the other part's row; without keys in both, out is 0 and lse -inf."""
    out_a, lse_a = results(2, 4, 3, 5, seed=0)
    out_b, lse_b = results(2, 4, 3, 5, seed=1)
    for out, lse, row in ((out_a, lse_a, 0), (out_b, lse_b, 1), (out_a, lse_a, 2), (out_b, lse_b, 2)):
        out[:, row], lse[:, :, row] = 0, -np.inf
    out, lse = cupy_flash.merge(out_a, lse_a, out_b, lse_b)
    np.testing.assert_array_equal(out[:, 0], out_b[:, 0])
    np.testing.assert_array_equal(out[:, 1], out_a[:, 1])
    np.testing.assert_array_equal(lse[:, :, 0], lse_b[:, :, 0])
    np.testing.assert_array_equal(lse[:, :, 1], lse_a[:, :, 1])
    assert (out[:, 2] == 0).all() and np.isneginf(lse[:, :, 2]).all()
    assert np.isfinite(lse[:, :, 3]).all() and (out[:, 3] != 0).all()


def test_order_does_not_matter():
    a, b = results(2, 4, 3, 5, seed=0), results(2, 4, 3, 5, seed=1)
    for x, y in zip(cupy_flash.merge(*a, *b), cupy_flash.merge(*b, *a), strict=True):
        np.testing.assert_array_equal(x, y)


def test_parts_with_far_apart_lse():
    """If a weight underflows, the result is the other part; no weight overflows."""
    (out_a, lse_a), (out_b, lse_b) = results(1, 4, 2, 3, seed=0), results(1, 4, 2, 3, seed=1)
    for shift in (1e4, 1e30):
        out, lse = cupy_flash.merge(out_a, lse_a + np.float32(shift), out_b, lse_b - np.float32(shift))
        np.testing.assert_array_equal(out, out_a)
        np.testing.assert_array_equal(lse, lse_a + np.float32(shift))


def test_layouts_and_packed():
    """Layouts (B, S, H, Dv), (B, H, S, Dv) and (T, H, Dv) give the same bits."""
    a, b = results(2, 4, 3, 5, seed=0), results(2, 4, 3, 5, seed=1)
    out, lse = cupy_flash.merge(*a, *b)
    swapped = [x.swapaxes(1, 2) for x in (a[0], b[0])]
    heads_first = cupy_flash.merge(swapped[0], a[1], swapped[1], b[1], layout="bhsd")
    np.testing.assert_array_equal(heads_first[0], out.swapaxes(1, 2))
    np.testing.assert_array_equal(heads_first[1], lse)
    for layout in ("bshd", "bhsd"):  # a packed batch has only one layout
        packed = cupy_flash.merge(a[0][0], a[1][0], b[0][0], b[1][0], layout=layout)
        np.testing.assert_array_equal(packed[0], out[0])
        np.testing.assert_array_equal(packed[1], lse[0])


def test_dtypes_and_arrays():
    """out has the dtype of out_a and is rounded once, lse is float32; both are new arrays of the caller's framework."""
    case = replace(Case(), dtype="bfloat16")
    attention = functools.partial(cupy_flash.attention, return_lse=True)
    (out_a, lse_a), (out_b, lse_b) = parts(attention, case, (0, 9, 23))
    before = out_a.tobytes(), lse_a.tobytes()
    out, lse = cupy_flash.merge(out_a, lse_a, out_b, lse_b)
    assert (out.dtype, lse.dtype) == (out_a.dtype, np.float32)
    wide, _ = cupy_flash.merge(out_a.astype(np.float32), lse_a, out_b, lse_b)
    np.testing.assert_array_equal(out, wide.astype(out.dtype))
    assert before == (out_a.tobytes(), lse_a.tobytes())
    ours = cupy_flash.merge(*map(jnp.asarray, (out_a, lse_a, out_b, lse_b)))
    assert all(isinstance(x, jnp.ndarray) for x in ours)
    np.testing.assert_array_equal(np.asarray(ours[0]), out)


def test_strides():
    a, b = results(2, 4, 3, 5, seed=0), results(2, 4, 3, 5, seed=1)
    expected = cupy_flash.merge(*a, *b)
    reversed_ = [np.ascontiguousarray(x[::-1])[::-1] for x in (*a, *b)]
    for x, y in zip(cupy_flash.merge(*reversed_), expected, strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("shape", [(0, 4, 3, 5), (2, 0, 3, 5), (0, 3, 5)], ids=str)
def test_nothing_to_merge(shape):
    a = results(*shape, seed=0)
    out, lse = cupy_flash.merge(*a, *a)
    assert (out.shape, lse.shape) == (a[0].shape, a[1].shape)


def merge_kernel(out_a, lse_a, out_b, lse_b, *, layout="bshd"):
    """Run partials.cu on the simulator with the launch that a GPU would get."""
    layout, parts, _ = pose_merge((out_a, lse_a, out_b, lse_b), layout)
    return tuple(array.numpy() for array in run_plan.merge(parts, layout, "sm_80", simulator.start))


TWINS = {
    "bshd": dict(shape=(2, 9, 3, 40)),
    "bhsd": dict(shape=(2, 9, 3, 40), layout="bhsd"),
    "packed": dict(shape=(9, 3, 33)),
    "one-dimension": dict(shape=(1, 5, 2, 1)),
    "float64": dict(shape=(1, 5, 2, 8), dtype="float64"),
    "float16": dict(shape=(1, 5, 2, 8), dtype="float16"),
    "mixed": dict(shape=(1, 5, 2, 8), dtype="bfloat16", other="float32"),
    "no-rows": dict(shape=(1, 0, 2, 8)),
    "cut-grid": dict(shape=(3, 6, 5, 8), limits=(2**31 - 1, 2, 2)),  # each block merges several heads and sequences
    "far": dict(shape=(2, 5, 2, 8)),
}


@pytest.mark.parametrize("twin", TWINS.values(), ids=TWINS)
def test_kernel_is_the_twin_of_partials(twin, monkeypatch):
    """partials.cu equals partials.py up to the rounding of its exponential."""
    monkeypatch.setattr(run_plan, "GRID_LIMITS", twin.get("limits", run_plan.GRID_LIMITS))
    shape, layout, dtype = twin["shape"], twin.get("layout", "bshd"), DTYPES[twin.get("dtype", "float32")]
    rng = np.random.default_rng(3)
    *leading, a, b, _ = shape
    accumulation = np.float64 if dtype == np.float64 else np.float32
    lse = rng.normal(size=(2, *leading, *((a, b) if layout == "bhsd" else (b, a)))).astype(accumulation) * 5
    lse[0, ..., 1:2] = lse[1, ..., 2:3] = -np.inf  # these rows see no key in one part
    lse[:, ..., 3:4] = -np.inf  # these rows see no key in either part
    lse[0, ..., 4:5] += 1e4
    out_a = rng.normal(size=shape).astype(dtype)
    out_b = rng.normal(size=(*shape[:-1], shape[-1] + 1)).astype(DTYPES[twin["other"]] if "other" in twin else dtype)
    parts = (out_a, lse[0], out_b[..., 1:], lse[1])  # rows of b are not 16-byte aligned
    expected = cupy_flash.merge(*parts, layout=layout)
    if twin is TWINS["far"]:
        parts = tuple(map(far.spread_rows, parts))
        far.spread_results(monkeypatch)
    merged = merge_kernel(*parts, layout=layout)
    for actual, exact in zip(merged, expected, strict=True):
        assert actual.dtype == exact.dtype and actual.shape == exact.shape
        eps = float(ml_dtypes.finfo(actual.dtype).eps)  # rounding of the result, of the weights and of the exponential
        np.testing.assert_allclose(actual.astype(np.float64), exact.astype(np.float64), rtol=4 * eps, atol=4 * eps)


@pytest.mark.parametrize("layout", ["bshd", exhaustive("bhsd"), exhaustive("thd")])
def test_the_kernel_merges_statistics_as_partials(layout):
    """Rows with keys in both parts, in one, and in none, with equal maxima, and with NaN."""
    rng = np.random.default_rng(4)
    shape = {"bshd": (2, 7, 3, 8), "bhsd": (2, 3, 7, 8), "thd": (7, 3, 8)}[layout]
    rows = (3, 7) if layout == "thd" else (2, 3, 7)
    out = rng.normal(size=(2, *shape)).astype(np.float32)
    lse, top, entropy = rng.normal(size=(3, 2, *rows)).astype(np.float32)
    argmax = rng.integers(0, 9, (2, *rows)).astype(np.int32)
    lse[0, ..., 1], lse[1, ..., 2], lse[..., 3] = -np.inf, -np.inf, -np.inf
    dead = np.isneginf(lse)
    top[..., 4], top[1, ..., 5], top[..., 6] = 0.5, np.nan, np.nan
    entropy[1, ..., 5] = np.nan
    top[dead], argmax[dead], entropy[dead] = -np.inf, -1, 0
    entropy = abs(entropy)
    parts = (out[0], lse[0], out[1], lse[1])
    of_parts = tuple(Statistics(*x) for x in zip(top, argmax, entropy, strict=True))
    layout = layout.replace("thd", "bshd")
    given = dict(statistics_a=of_parts[0], statistics_b=of_parts[1], key_offset_b=9)
    expected = cupy_flash.merge(*parts, layout=layout, **given)
    layout, posed, statistics = pose_merge(parts, layout, of_parts)
    merged = run_plan.merge(posed, layout, "sm_80", simulator.start, statistics, 9)
    for actual, other in zip(merged, (*expected[:2], *expected[2]), strict=True):
        np.testing.assert_allclose(actual.numpy(), other, rtol=1e-6, atol=1e-6)


@pytest.mark.exhaustive
def test_a_kernel_that_adds_no_offset_is_found(monkeypatch):
    with planted(monkeypatch, change("key-offset", " + key_offset", "")), pytest.raises(AssertionError):
        test_the_kernel_merges_statistics_as_partials("bshd")


@pytest.mark.parametrize("shape", [(70000, 1, 2, 1), (1, 1, 70000, 1), (1, 70000, 1)], ids=str)
def test_a_grid_has_no_more_blocks_than_cuda_starts(shape):
    layout, parts, _ = pose_merge(results(*shape, seed=0) * 2, "bshd")
    works = []
    run_plan.merge(parts, layout, "sm_80", works.append)
    (launch,) = works[0].launches
    require_grids((launch,))
    params = works[0].params(lambda array: 0)
    assert (params["batch"], params["heads"], params["rows"]) == (1, *parts[1].shape)[-3:]


def formula(outs, lses, dtype):
    """Return the average of all parts with softmax weights, computed in `dtype`; layout "bshd"."""
    lses, outs = lses.astype(dtype), outs.astype(dtype)
    largest = np.maximum(lses.max(axis=0), np.finfo(dtype).min)
    weights = np.exp(lses - largest)
    total = weights.sum(axis=0)
    with np.errstate(divide="ignore"):
        lse = largest + np.log(total)
    weights = weights / np.where(total == 0, 1, total)
    return (weights.swapaxes(-1, -2)[..., None] * outs).sum(axis=0), lse


def stacked(backend, outs, lses, layout="bshd"):
    """Return the result of merge with the last part as the argument a and the others stacked in b."""
    parts = tuple(as_array(x, "part") for x in (outs[-1], lses[-1], outs[:-1], lses[:-1]))
    if backend == "simulator":
        return tuple(x.numpy() for x in run_plan.merge(parts, layout, "sm_80", simulator.start))
    return tuple(x.numpy() for x in merge(parts, layout))


@pytest.mark.parametrize("backend", ["cpu", "simulator"])
@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_any_number_of_parts(count, backend):
    """Each part has a row that sees none of its keys, one row sees no key in any part, and a part may have no keys."""
    rng = np.random.default_rng(count)
    outs = rng.normal(size=(count, 2, 9, 3, 40)).astype(np.float32)
    lses = (rng.normal(size=(count, 2, 3, 9)) * 5).astype(np.float32)
    for part in range(count):
        lses[part, ..., part] = -np.inf
    lses[:, ..., 8] = -np.inf
    lses[-1, ..., 7] += 1e4
    if count > 2:
        lses[1] = -np.inf
    outs[np.isneginf(lses).swapaxes(-1, -2)] = 0
    exact = formula(outs, lses, np.float64)
    orders = map(np.random.default_rng(0).permutation, [count] * 8)
    runs = (formula(outs[order], lses[order], np.float32) for order in orders)
    low = functools.reduce(lambda a, b: tuple(map(furthest, exact, a, b)), runs)
    actual = stacked(backend, outs, lses)
    for name, x, y, z in zip(FORWARD, actual, exact, low, strict=True):
        assert_matches_reference(x, y, z, np.dtype(np.float32), f"{name} of {count} parts")
    assert (actual[0][:, 8] == 0).all() and np.isneginf(actual[1][..., 8]).all()
    if count == 2:
        two = (outs[1], lses[1], outs[0], lses[0])
        for x, y in zip(actual, merge_kernel(*two) if backend == "simulator" else cupy_flash.merge(*two), strict=True):
            np.testing.assert_array_equal(x, y)
    heads_first = stacked(backend, outs.swapaxes(2, 3), lses, "bhsd")
    np.testing.assert_array_equal(heads_first[0], actual[0].swapaxes(1, 2))
    packed = stacked(backend, outs[:, 1], lses[:, 1], "thd")
    np.testing.assert_array_equal(packed[0], actual[0][1])
    np.testing.assert_array_equal(packed[1], actual[1][1])


def test_parts_are_added_in_their_order():
    """The sum runs over the stack in order, and the argument `a` is added last: in float32, 2**24 + 1 + 1 + 0 depends
    on the order.
    """
    outs = np.array([2**24, 1, 1, 0], np.float32).reshape(4, 1, 1, 1, 1)
    lses = np.zeros((4, 1, 1, 1), np.float32)
    for backend in ("cpu", "simulator"):
        for order, total in (((0, 1, 2, 3), 2**24), ((1, 2, 0, 3), 2**24 + 2), ((1, 2, 3, 0), 2**24 + 2)):
            assert stacked(backend, outs[list(order)], lses)[0] == total / 4, (backend, order)
