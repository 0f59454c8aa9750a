"""attention_weights, top_weights and key_importance against the dense formula, with every option.

With the unit vectors as values attention returns its own probabilities. The reference's gradients of that call are
those of the weights, through the scores and through lse.
"""

import tracemalloc

import numpy as np
import pytest
from cases import DTYPES, FEATURES, Case, compute_references, furthest
from tolerance import assert_matches_reference
from weights_cases import CACHES, CASES, GRADIENTS, INTEGERS, ORDERS, SMALL, dense, heads_first, lse_of

import cupy_flash
from cupy_flash import UnsupportedError, dispatch, reference
from cupy_flash.cpu import weights as cpu
from cupy_flash.problem.records import Options
from cupy_flash.problem.weights import MEAN, TOP, WEIGHTS, Wish, pose_weights

pytestmark = pytest.mark.usefixtures("poisoned_memory")


def with_unit_values(case, call):
    """Return the call with the unit vectors as values, so that its result is P and dP is dout, without dropout."""
    units = np.eye(case.kv_len, dtype=call.q.dtype)
    values = np.broadcast_to(units[:, None], (case.batch, case.kv_len, case.kv_heads, case.kv_len))
    values = values.swapaxes(1, 2) if case.layout == "bhsd" else values
    options = {name: x for name, x in call.options.items() if name not in ("dropout", "seed")}
    return call._replace(v=values, options=options)


@pytest.mark.parametrize("name", CASES)
def test_weights_are_the_probabilities(name):
    case = CASES[name]
    call = case.call()
    lse = lse_of(call)
    P, low = dense(case, call)
    weights = cupy_flash.attention_weights(call.q, call.k, lse, **call.options)
    assert weights.dtype == call.q.dtype and weights.flags.c_contiguous
    assert_matches_reference(weights, P, low, call.q.dtype, f"P of {case}")
    mean = cupy_flash.attention_weights(call.q, call.k, lse, heads="mean", **call.options)
    assert_matches_reference(mean, P.mean(axis=1), low.mean(axis=1), call.q.dtype, f"mean of {case}")


@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients_count_lse_as_an_input(name):
    """They are dS = P dP and dlse = -delta. The reference has dS = P (dP - delta + dlse) for any dlse, so also this."""
    case = GRADIENTS[name]
    call = case.call()
    lse, dense_call = lse_of(call), with_unit_values(case, call)
    P, low_P = dense(case, call)
    dweights = np.random.default_rng(3).normal(size=P.shape).astype(call.q.dtype)
    delta, low_delta = ((dweights * x).sum(axis=-1) for x in (P, low_P))
    exact, low = compute_references(case, dense_call._replace(dout=heads_first(case, dweights), dlse=delta))
    gradients = cupy_flash.attention_weights_vjp(call.q, call.k, lse, **call.options)[1](dweights)
    assert_matches_reference(gradients.dlse, -delta, -low_delta, case.accumulation, f"dlse of {case}")
    for name in ("dq", "dk", "dbias"):
        actual, expected = getattr(gradients, name), getattr(exact, name)
        assert (actual is None) == (expected is None)
        if actual is not None:
            assert_matches_reference(actual, expected, getattr(low, name), actual.dtype, f"{name} of {case}")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_gradients_are_rounded_once(dtype):
    """Those of 16-bit arrays are those of the same numbers in float64, rounded."""
    call = Case(dtype=dtype, bias="1hqk", causal=True, **SMALL).call()
    lse = lse_of(call)
    wide = call._replace(q=call.q.astype(float), k=call.k.astype(float))
    options = call.options | dict(bias=call.options["bias"].astype(float))
    dweights = np.random.default_rng(3).normal(size=(2, 3, 13, 17)).astype(call.q.dtype)
    asked = dict(heads=[1, 3, 1])
    gradients = cupy_flash.attention_weights_vjp(call.q, call.k, lse, **asked, **call.options)[1](dweights)
    exact = cupy_flash.attention_weights_vjp(wide.q, wide.k, lse.astype(float), **asked, **options)[1](
        dweights.astype(float)
    )
    for name in ("dq", "dk", "dbias"):
        actual, expected = getattr(gradients, name), getattr(exact, name)
        assert_matches_reference(actual, expected, expected.astype(call.q.dtype), call.q.dtype, name)


@pytest.mark.parametrize(
    "rows",
    [[12, 0, 5], [3, 3], slice(None, None, -2), slice(-4, None), slice(20, 30), [], np.array([4, 5, 6], np.uint8)],
    ids=str,
)
@pytest.mark.parametrize("heads", ["each", "mean", [3, 1, 3], ()], ids=str)
def test_rows_and_heads_select(rows, heads):
    call = INTEGERS.call()
    lse = lse_of(call)
    whole = cupy_flash.attention_weights(call.q, call.k, lse, **call.options)
    whole = {
        "each": whole,
        "mean": cupy_flash.attention_weights(call.q, call.k, lse, heads="mean", **call.options),
    }.get(heads if isinstance(heads, str) else "", whole[:, list(heads)] if not isinstance(heads, str) else None)
    some = cupy_flash.attention_weights(call.q, call.k, lse, rows=rows, heads=heads, **call.options)
    chosen = rows if isinstance(rows, slice) else np.asarray(rows, np.int64)
    np.testing.assert_array_equal(some, whole[..., chosen, :])


def test_gradients_of_chosen_rows_and_heads_add_up():
    """A row or head that is asked for twice has the sum of both gradients; one that is not asked for has none."""
    call = Case(dtype="float64", causal=True, **SMALL).call()
    lse = lse_of(call)
    rows, heads = [4, 5, 11, 4], [2, 0, 2]
    dsome = np.random.default_rng(0).normal(size=(2, 3, 4, 17))
    dwhole = np.zeros((2, 4, 13, 17))
    np.add.at(dwhole, (slice(None), np.array(heads)[:, None], np.array(rows)), dsome)
    some = cupy_flash.attention_weights_vjp(call.q, call.k, lse, rows=rows, heads=heads, **call.options)[1](dsome)
    whole = cupy_flash.attention_weights_vjp(call.q, call.k, lse, **call.options)[1](dwhole)
    for name in ("dq", "dk", "dlse"):
        expected = getattr(whole, name)
        low = expected.astype(np.longdouble) * (1 + np.finfo(float).eps)
        assert_matches_reference(getattr(some, name), expected, low, np.float64, name)
    assert not whole.dlse[:, 1].any() and not whole.dlse[:, :, 6:11].any()


@pytest.mark.parametrize("n", [1, 4, 40])
@pytest.mark.parametrize("scores", ["integers", "huge", "constant", "rising"])
@pytest.mark.parametrize("causal", [False, True])
def test_top_weights_are_sorted_scores(n, scores, causal):
    """Keys with equal scores come in their order, and keys whose probability underflows to 0 come too."""
    case = Case(q_len=29, kv_len=300, batch=1, heads=2, scores=scores, causal=causal)
    call = case.call()
    lse = lse_of(call)
    s = np.einsum("bihd,bjhd->bhij", call.q.astype(float), call.k.repeat(1, axis=2).astype(float)) / 4
    if causal:
        s = np.where(np.arange(300) <= np.arange(29)[:, None] + 271 - 280, s, -np.inf)
        call.options["mask"] = np.arange(300) <= np.arange(29)[:, None] - 9
        lse = lse_of(call)
    values, keys = cupy_flash.top_weights(call.q, call.k, lse, n, **call.options)
    order = np.argsort(-s, axis=-1, kind="stable")[..., :n]
    hidden = np.isneginf(np.take_along_axis(s, order, axis=-1))
    np.testing.assert_array_equal(keys, np.where(hidden, -1, order))
    assert keys.dtype == np.int32 and hidden.any() == causal
    weights = cupy_flash.attention_weights(call.q, call.k, lse, **call.options)
    np.testing.assert_array_equal(values, np.where(hidden, 0, np.take_along_axis(weights, order, axis=-1)))


def test_top_weights_beyond_all_keys_are_absent():
    call = INTEGERS.call()
    values, keys = cupy_flash.top_weights(call.q, call.k, lse_of(call), 30, **call.options)
    assert values.shape == (2, 4, 13, 30)
    assert not values[..., 17:].any() and (keys[..., 17:] == -1).all()
    np.testing.assert_array_equal(np.sort(keys[:, :, -1, :17]), np.broadcast_to(np.arange(17), (2, 4, 17)))


@pytest.mark.parametrize("shape", [None, (2, 4, 13), (4, 1), (2, 1, 13), (13,), ()], ids=str)
@pytest.mark.parametrize("name", ["causal", "bfloat16", "kv-lengths", "bhsd", "float64"])
def test_importance_is_a_sum_over_rows(name, shape):
    case = Case(**SMALL | FEATURES[name])
    call = case.call()
    lse = lse_of(call)
    w = None if shape is None else np.random.default_rng(5).uniform(size=shape).astype(np.float32)
    P, low = dense(case, call)
    rows = np.ones(lse.shape) if w is None else np.broadcast_to(w, lse.shape)
    c = cupy_flash.key_importance(call.q, call.k, lse, row_weights=w, **call.options)
    assert c.dtype == case.accumulation
    expected, approximate = (np.einsum("bhi,bhij->bhj", rows, x) for x in (P, low.astype(float)))
    assert_matches_reference(c, expected, approximate, case.accumulation, f"importance of {case}")


def test_a_row_of_weight_zero_adds_nothing():
    call = Case(causal=True, **SMALL).call()
    lse = lse_of(call)
    w = np.ones(13, np.float32)
    w[:4] = 0
    before = cupy_flash.key_importance(call.q, call.k, lse, row_weights=w, **call.options)
    call.q[:, :4] = np.nan
    after = cupy_flash.key_importance(call.q, call.k, lse_of(call), row_weights=w, **call.options)
    np.testing.assert_array_equal(after, before)


def test_nan_reaches_only_what_sees_it():
    """A query or a key with NaN changes the weights of the rows and the gradients of the keys that it sees."""
    call = Case(causal=True, **SMALL).call()
    dweights = np.ones((2, 4, 13, 17), np.float32)
    before, _ = cupy_flash.attention_weights_vjp(call.q, call.k, lse_of(call), **call.options)
    call.q[:, 3], call.k[:, 14] = np.nan, np.nan  # query i sees the keys up to i + 4
    weights, vjp = cupy_flash.attention_weights_vjp(call.q, call.k, lse_of(call), **call.options)
    clean = [0, 1, 2, 4, 5, 6, 7, 8, 9]
    np.testing.assert_array_equal(weights[:, :, clean], before[:, :, clean])
    assert np.isnan(weights[:, :, 3, :8]).all() and not weights[:, :, 3, 8:].any()
    gradients = vjp(dweights)
    assert np.isnan(gradients.dk[:, :8]).all() and np.isfinite(gradients.dq[:, clean]).all()
    values, keys = cupy_flash.top_weights(call.q, call.k, lse_of(call), 3, **call.options)
    assert keys[0, 0, 3].tolist() == [0, 1, 2] and keys[0, 0, 12, 0] == 14 and np.isnan(values[0, 0, 12]).all()


@pytest.mark.parametrize("shape", [None, (2, 4, 13), (4, 1), ()], ids=str)
def test_gradients_of_importance_are_those_of_weights(shape):
    """They are those of the weights for the gradient w_i dc_j, and that of the row weights sums P dc."""
    call = Case(dtype="float64", causal=True, softcap=1.5, bias="1hqk", **SMALL).call()
    lse = lse_of(call)
    rng = np.random.default_rng(5)
    w, dc = None if shape is None else rng.normal(size=shape), rng.normal(size=(2, 4, 17))
    rows = np.ones(lse.shape) if w is None else np.broadcast_to(w, lse.shape)
    given = cupy_flash.key_importance_vjp(call.q, call.k, lse, row_weights=w, **call.options)[1](dc)
    P, vjp = cupy_flash.attention_weights_vjp(call.q, call.k, lse, **call.options)
    expected = vjp(rows[..., None] * dc[:, :, None])
    for name in ("dq", "dk", "dlse", "dbias"):
        x = getattr(expected, name)
        low = x.astype(np.longdouble) * (1 + np.finfo(float).eps)
        assert_matches_reference(getattr(given, name), x, low, np.float64, name)
    if w is None:
        assert given.drow_weights is None
        return
    of_rows = np.einsum("bhij,bhj->bhi", P, dc)
    padded = (1,) * (3 - w.ndim) + w.shape
    of_rows = of_rows.sum(axis=tuple(n for n in range(3) if padded[n] == 1), keepdims=True).reshape(w.shape)
    low = of_rows.astype(np.longdouble) * (1 + np.finfo(float).eps)
    assert_matches_reference(given.drow_weights, of_rows, low, np.float64, "drow_weights")


@pytest.mark.parametrize("mask", [dict(causal=True), dict(mask_mod="gaps"), dict(window=(20, 7))], ids=str)
@pytest.mark.parametrize(
    "wish", [Wish(WEIGHTS), Wish(WEIGHTS, slice(7, 140), MEAN), Wish(TOP, n=5)], ids=lambda x: x.kind
)
def test_tiles_change_nothing(wish, mask):
    """Runs of rows end at query tiles, whose keys a mask_mod determines."""
    call = Case(q_len=150, kv_len=300, heads=2, batch=1, scores="integers", **mask).call()
    problem, operands, asked = pose_weights("case", (call.q, call.k, lse_of(call)), Options(**call.options), wish)
    plan = dispatch.plan_for(problem)
    small = cpu.forward(plan._replace(block_q=64, block_kv=64, threads=2), operands, asked)
    large = cpu.forward(plan._replace(block_q=256, block_kv=512), operands, asked)
    for one, other in zip(small, large, strict=True):
        np.testing.assert_array_equal(one.numpy(), other.numpy())


def unpacked(case, call):
    """Return the slices of q and k of each sequence of a packed call."""
    bounds = [x.tolist() for x in call.packed[:2]]
    return list(zip(*(map(slice, x[:-1], x[1:]) for x in bounds), strict=True))


@pytest.mark.parametrize("options", [{}, dict(causal=True, sink=True), dict(alibi="h", window=(4, 2))], ids=str)
def test_packed_sequences(options):
    """Each sequence has the result of its own call, in columns from 0 on; the rows after the last one are 0."""
    case = Case(
        packed=True, batch=3, q_lengths=(5, 0, 13), kv_lengths=(17, 9, 4), scores="integers", **SMALL, **options
    )
    call = case.call()
    _, lse = cupy_flash.attention_varlen(call.q, call.k, call.v, *call.packed, return_lse=True, **call.options)
    arguments = (call.q, call.k, lse, *call.packed)
    weights = cupy_flash.attention_weights_varlen(*arguments, **call.options)
    values, keys = cupy_flash.top_weights_varlen(*arguments, 3, **call.options)
    w = np.linspace(1, 2, lse.size, dtype=np.float32).reshape(lse.shape)
    importance = cupy_flash.key_importance_varlen(*arguments, row_weights=w, **call.options)
    mean = cupy_flash.attention_weights_varlen(*arguments, rows=[7, 2], heads="mean", **call.options)
    expected = [np.zeros(x.shape, x.dtype) for x in (weights, values, keys, importance)]
    expected[2][...] = -1
    for b, (queries, rows) in enumerate(unpacked(case, call)):
        one = (call.q[None, queries], call.k[None, rows], lse[None, :, queries])
        count = rows.stop - rows.start
        expected[0][:, queries, :count] = cupy_flash.attention_weights(*one, **call.options)[0]
        top = cupy_flash.top_weights(*one, 3, **call.options)
        expected[1][:, queries], expected[2][:, queries] = top[0][0], top[1][0]
        of_rows = dict(row_weights=w[None, :, queries])
        expected[3][b, :, :count] = cupy_flash.key_importance(*one, **of_rows, **call.options)[0]
    for actual, other in zip((weights, values, keys, importance), expected, strict=True):
        np.testing.assert_array_equal(actual, other)
    whole = cupy_flash.attention_weights_varlen(*arguments, heads="mean", **call.options)
    np.testing.assert_array_equal(mean, whole[[7, 2]])


def unit_values(case, call):
    """Return v_cache with the unit vector of each key's number, in place of the values."""
    shape = (*call.v_cache.shape[:-1], case.capacity)
    units = np.zeros(shape, np.float32)
    view = units if case.layout == "bshd" else units.swapaxes(1, 2)
    total = [n + rows for n, rows in zip(case.lengths, case.rows, strict=True)]
    for b, length in enumerate(total):
        for j in range(length):
            if case.page:
                view[call.options["block_table"][b, j // case.page], j % case.page, :, j] = 1
            else:
                view[(case.batch_idx or range(len(total)))[b], j, :, j] = 1
    return units


@pytest.mark.parametrize("name", CACHES)
def test_caches(name):
    case = CACHES[name]
    call = case.call().copied()
    _, lse = cupy_flash.attention_with_kv_cache(*call[:3], **call.options, return_lse=True)
    options = {name: x for name, x in call.options.items() if name not in ("k", "v", "slots")}
    if case.appended is not None:
        options["cache_seqlens"] = np.add(case.lengths, case.rows).astype(np.int32)
    skipped = ("split_size", "max_seqlen_q", "v_descale")
    defined = {name: x for name, x in options.items() if name not in skipped}
    units = unit_values(case, call)
    dtype = DTYPES[case.dtype]
    with np.errstate(invalid="ignore", over="ignore"):
        exact, low, *others = (
            reference.attention_with_kv_cache(call.q, call.k_cache, units, dtype=kind, order=order, **defined)[0]
            for kind, order in ((None, 0), *((dtype, n) for n in range(ORDERS)))
        )
    for run in others:
        low = furthest(exact, low, run)
    if not case.packed and case.layout == "bshd":
        exact, low = exact.swapaxes(1, 2), low.swapaxes(1, 2)
    elif case.packed:
        exact, low = exact.swapaxes(0, 1), low.swapaxes(0, 1)
    arguments = (call.q, call.k_cache, lse)
    P = cupy_flash.attention_weights_with_kv_cache(*arguments, **options)
    assert P.dtype == dtype
    assert_matches_reference(P, exact, low, dtype, f"P of {case}")
    last, axis = P.shape[-2] - 1, 0 if case.packed else 1
    mean = cupy_flash.attention_weights_with_kv_cache(*arguments, rows=[last], heads="mean", **options)
    exact_mean, low_mean = (x[..., last:, :].mean(axis) for x in (exact, low))
    assert_matches_reference(mean, exact_mean, low_mean, dtype, f"mean of {case}")
    sums = cupy_flash.key_importance_with_kv_cache(*arguments, **options)
    if not case.packed:
        approximate = low.astype(float).sum(axis=2)
        assert_matches_reference(sums, exact.sum(axis=2), approximate, sums.dtype, f"importance of {case}")
    values, keys = cupy_flash.top_weights_with_kv_cache(*arguments, 2, **options)
    found = np.where(keys < 0, 0, np.take_along_axis(P, np.maximum(keys, 0), axis=-1))
    np.testing.assert_array_equal(values, found)
    np.testing.assert_array_equal(values, -np.sort(-P, axis=-1)[..., :2])


def zeros(*shape, dtype=np.float32):
    return np.zeros(shape, dtype)


def test_one_error_has_every_reason():
    with pytest.raises(TypeError) as error:
        cupy_flash.attention_weights(zeros(2, 3, 4, 8), zeros(2, 5, 3, 8), zeros(2, 4, 3), rows="all", scale=np.nan)
    text = str(error.value)
    assert "the 4 heads of q must be a multiple of the 3 heads of k\n" in text
    assert "rows must be None, a slice or" in text and "scale must be finite" in text
    with pytest.raises(TypeError) as error:
        cupy_flash.attention_weights(
            zeros(2, 3, 4, 8), zeros(2, 5, 2, 8), zeros(2, 3, 4), rows="all", heads="some", limit="none"
        )
    text = str(error.value)
    for reason in ("lse must be (2, 4, 3), not (2, 3, 4)", "rows must be None, a slice or", 'heads must be "each"',
                   "limit must be a number of bytes"):  # fmt: skip
        assert reason in text
    assert "  v " not in text and "q, k and v" not in text


@pytest.mark.parametrize(
    ("function", "options", "reason"),
    [
        ("attention_weights", dict(rows=[0, 3]), r"rows must be in \[0, 3\), not 0 to 3"),
        ("attention_weights", dict(rows=[-1]), r"rows must be in \[0, 3\), not -1 to -1"),
        ("attention_weights", dict(rows=[0.5]), "rows must be None, a slice or a vector of whole numbers"),
        ("attention_weights", dict(rows=[[0]]), "rows must be None, a slice or a vector of whole numbers"),
        ("attention_weights", dict(heads=[4]), r"heads must be in \[0, 4\), not 4 to 4"),
        ("attention_weights", dict(limit=100), "the weights would take 480 bytes, more than limit = 100"),
        ("top_weights", dict(n=0), r"n must be in \[1, 2147483647\], not 0"),
        ("top_weights", dict(n=1.5), "n must be a whole number, not 1.5"),
        ("key_importance", dict(row_weights=zeros(5)), r"row_weights must broadcast to \(2, 4, 3\), not be \(5,\)"),
        ("key_importance", dict(row_weights=zeros(3, dtype=np.int64)), "row_weights must be .*, not int64"),
        (
            "key_importance",
            dict(backend="simulator", engine="mma"),
            "mma: it computes no key_importance in this version",
        ),
    ],
)
def test_errors(function, options, reason):
    with pytest.raises((TypeError, ValueError), match=reason):
        getattr(cupy_flash, function)(zeros(2, 3, 4, 8), zeros(2, 5, 2, 8), zeros(2, 4, 3), **options)


def test_a_backward_checks_its_gradient():
    arguments = (zeros(2, 3, 4, 8), zeros(2, 5, 2, 8), zeros(2, 4, 3))
    with pytest.raises(TypeError, match=r"dweights must be \(2, 4, 3, 5\), not \(2, 4, 3\)\n(.*\n)*.*not float64"):
        cupy_flash.attention_weights_vjp(*arguments)[1](zeros(2, 4, 3, dtype=np.float64))
    with pytest.raises(ValueError, match=r"dimportance must be \(2, 4, 5\)"):
        cupy_flash.key_importance_vjp(*arguments)[1](zeros(2, 4, 3))


def test_tensor_cores_refuse_gradients_by_name():
    arguments = *(zeros(1, n, 4, 16, dtype=np.float16) for n in (3, 5)), zeros(1, 4, 3)
    _, vjp = cupy_flash.attention_weights_vjp(*arguments, backend="simulator", engine="mma")
    with pytest.raises(UnsupportedError, match="mma: it computes no gradients of attention_weights in this version"):
        vjp(zeros(1, 4, 3, 5, dtype=np.float16))


def test_the_limit_is_checked_before_anything_is_allocated():
    q, lse = np.broadcast_to(np.float32(0), (1, 2**20, 1, 8)), np.broadcast_to(np.float32(0), (1, 1, 2**20))
    with pytest.raises(ValueError, match="would take 4,398,046,511,104 bytes, more than limit = 2,147,483,648"):
        cupy_flash.attention_weights(q, q, lse)


def test_memory_is_linear():
    """Neither the largest weights nor the importance of 3,000 keys needs an array with an element for each pair."""
    rng = np.random.default_rng(0)
    q, k = rng.normal(size=(2, 1, 3000, 1, 8)).astype(np.float32)
    _, lse = cupy_flash.attention(q, k, k, return_lse=True)
    for function, options in (
        (cupy_flash.top_weights, dict(n=4)),
        (cupy_flash.key_importance, {}),
        (cupy_flash.attention_weights, dict(rows=[5, 2000], heads="mean")),
    ):
        function(q, k, lse, engine="cpu", **options)
        tracemalloc.start()
        function(q, k, lse, engine="cpu", **options)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 3000 * 3000 * 4 / 3
