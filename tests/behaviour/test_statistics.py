"""statistics= of attention against the dense formula, with every option, and their gradients by differences."""

from dataclasses import replace

import numpy as np
import pytest
from cache_cases import CacheCase
from cases import FEATURES, OPTIONS, Case
from row_statistics import ALL, assert_are_of_the_scores, assert_are_the_gradients, dense, statistics_of

import cupy_flash
from cupy_flash import Statistics, UnsupportedError
from cupy_flash.cpu.softmax import Softmax
from cupy_flash.cpu.statistics import RowStatistics

pytestmark = pytest.mark.usefixtures("poisoned_memory")

SMALL = dict(q_len=13, kv_len=17, heads=4, kv_heads=2, head_dim=4)
CASES = {
    **{name: Case(**SMALL | feature) for name, feature in FEATURES.items() if not feature.keys() & {"q_len", "dtype"}},
    "mods": Case(score_mod="learned-twice", mask_mod="sliding", **SMALL),
    "float64": Case(dtype="float64", bias="1hqk", sink=True, softcap=1.5, **SMALL),
    "float16": Case(dtype="float16", causal=True, **SMALL),
    "bfloat16": Case(dtype="bfloat16", sink=True, **SMALL),
    "lengths-zero": OPTIONS["lengths-zero"],
    "empty-rows": Case(causal=True, q_len=29, kv_len=17),
    "large-sink": Case(sink=(30.0, -30.0, 0.0, 5.0), **SMALL),
    "tiles": Case(q_len=70, kv_len=300, causal=True, sink=True, heads=2),
    "few-queries": Case(q_len=3, kv_len=150, causal=True, sink=True),
    **{f"scores-{name}": Case(scores=name, causal=True, q_len=29, sink=True) for name in ("huge", "one-hot", "rising")},
}


@pytest.mark.parametrize("name", CASES)
def test_statistics_are_those_of_the_scores(name):
    case = CASES[name]
    call = case.call()
    assert_are_of_the_scores(case, call, statistics_of(call))


@pytest.mark.parametrize(
    "case",
    [
        Case(scores="integers", causal=True, q_len=70, kv_len=300, head_dim=4),
        Case(scores="signs", q_len=40, kv_len=600, heads=2),
        Case(scores="signs", q_len=2, kv_len=600, head_dim=4),
        Case(scores="constant", q_len=29, causal=True),
    ],
    ids=["integers", "signs", "few-queries", "constant"],
)
def test_of_equal_scores_the_lowest_key_is_the_argmax(case):
    call = case.call()
    scores, (top, _), _ = dense(case, call)
    found = statistics_of(call)
    assert ((scores == top[..., None]).sum(axis=-1) > 1).any()
    np.testing.assert_array_equal(found.argmax, np.where(np.isneginf(top), -1, scores.argmax(axis=-1)))


@pytest.mark.parametrize("q_len", [20, 2])
@pytest.mark.parametrize("sink", [False, True])
def test_a_constant_added_to_all_scores_does_not_change_the_entropy(q_len, sink):
    """float32 scores that are exact with and without 1e4; lse - sum P s would lose three digits.

    A few queries merge their keys with the sink by lse, which is rounded.
    """
    rng = np.random.default_rng(0)
    q, k = (rng.integers(-8, 9, (1, n, 2, 8)).astype(np.float32) / 8 for n in (q_len, 700))
    q[..., 0], found = 1, []
    for shift in (0, 1e4):
        k[..., 0] = shift
        sinks = np.full(2, shift + 3, np.float32) if sink else None
        found.append(cupy_flash.attention(q, k, k, scale=1.0, sink=sinks, return_lse=True, statistics=ALL)[2])
    rounding = np.spacing(np.float32(1e4)) / 64 if sink and q_len == 2 else 0
    np.testing.assert_allclose(found[0].entropy, found[1].entropy, rtol=0, atol=rounding)
    np.testing.assert_array_equal(found[0].argmax, found[1].argmax)
    np.testing.assert_array_equal(found[0].max + np.float32(1e4), found[1].max)


def test_a_row_of_one_key_has_entropy_0_and_a_row_of_equal_scores_that_of_their_number():
    q, k = np.zeros((1, 5, 1, 4), np.float32), np.full((1, 5, 1, 4), -0.0, np.float32)
    found = cupy_flash.attention(q, k, k, causal=True, return_lse=True, statistics=ALL)[2]
    assert found.entropy[0, 0, 0] == 0 and not np.signbit(found.entropy).any()
    np.testing.assert_allclose(found.entropy[0, 0], np.log(np.arange(1, 6)), rtol=1e-6)


@pytest.mark.parametrize(("q_len", "kv_len"), [(20, 300), (3, 700)])
def test_a_nan_is_the_max_and_the_first_one_the_argmax(q_len, kv_len):
    """A hidden NaN has no effect."""
    rng = np.random.default_rng(0)
    q, k = (rng.normal(size=(1, n, 1, 4)) for n in (q_len, kv_len))
    k[0, [kv_len - 1, 290, 7]] = np.nan
    found = cupy_flash.attention(q, k, k, causal=True, return_lse=True, statistics=ALL)[2]
    assert np.isnan(found.max).all() and np.isnan(found.entropy).all() and (found.argmax == 7).all()
    mask = np.arange(kv_len) % 290 != 7
    mask[[290, kv_len - 1]] = False
    hidden = cupy_flash.attention(q, k, k, mask=mask, return_lse=True, statistics=ALL)[2]
    clean = cupy_flash.attention(q, np.nan_to_num(k), k, mask=mask, return_lse=True, statistics=ALL)[2]
    for one, other in zip(hidden, clean, strict=True):
        np.testing.assert_array_equal(one, other)


def test_any_subset_in_any_order_has_the_bits_of_all():
    call = CASES["causal"].call()
    out, lse = cupy_flash.attention(call.q, call.k, call.v, return_lse=True, **call.options)
    every = statistics_of(call)
    for names in ((), ("entropy",), ["argmax"], ("entropy", "max"), ("argmax", "entropy", "max")):
        results = cupy_flash.attention(call.q, call.k, call.v, return_lse=True, statistics=names, **call.options)
        assert results[0].shape == out.shape and results[1].shape == lse.shape
        for name in ALL:
            one = getattr(results[2], name)
            assert (one is None) == (name not in names)
            if one is not None:
                np.testing.assert_array_equal(one, getattr(every, name))


def assert_agree_with_weights(found, P, keys, lse, width):
    """Compare statistics with the probabilities and the keys of the largest ones that the library returns."""
    P = P[..., :width]
    sink = np.maximum(1 - P.sum(axis=-1), 0) * np.isfinite(lse)
    entropy = -(P * np.log(np.where(P == 0, 1, P))).sum(axis=-1) - sink * np.log(np.where(sink < 1e-12, 1, sink))
    np.testing.assert_array_equal(found.argmax, keys[..., 0])
    np.testing.assert_allclose(found.entropy, entropy, rtol=0, atol=1e-9)
    of_key = np.take_along_axis(P, np.maximum(found.argmax, 0)[..., None], axis=-1)[..., 0]
    with np.errstate(divide="ignore"):
        top = np.where(found.argmax < 0, -np.inf, np.log(of_key) + lse)
    np.testing.assert_allclose(found.max, top, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["packed", "packed-causal", "packed-bias"])
def test_argmax_of_a_packed_batch_counts_the_keys_of_its_sequence(name):
    packed = dict(packed=True, q_lengths=(4, 0), kv_lengths=(20, 5), q_len=13, kv_len=23, dtype="float64")
    others = {"packed": {}, "packed-causal": dict(causal=True, sink=True), "packed-bias": dict(bias="bhqk")}
    call = Case(**packed, **others[name]).call()
    arrays = (call.q, call.k, call.v, *call.packed)
    _, lse, found = cupy_flash.attention_varlen(*arrays, return_lse=True, statistics=ALL, **call.options)
    arrays = (call.q, call.k, lse, *call.packed)
    P = cupy_flash.attention_weights_varlen(*arrays, **call.options)
    _, keys = cupy_flash.top_weights_varlen(*arrays, 1, **call.options)
    assert_agree_with_weights(found, P, keys, lse, call.packed.max_seqlen_k)


CACHES = {
    "append": CacheCase(q_len=3, appended=3, sink=True),
    "paged": CacheCase(page=8, q_len=4, alibi="bh"),
    "packed": CacheCase(packed=(3, 1), page=8, softcap=1.5, leftpad=None),
    "leftpad": CacheCase(leftpad=(2, 9), q_len=2),
    "empty": CacheCase(lengths=(0, 9), q_len=3),
    "parts": CacheCase(lengths=(700, 300), capacity=704, page=64, q_len=2, head_dim=8, split_size=64, sink=True),
    "pieces": CacheCase(lengths=(9000, 300), capacity=9001, q_len=2, head_dim=4, head_dim_v=4, heads=2, kv_heads=1),
}


@pytest.mark.parametrize("name", CACHES)
def test_argmax_on_a_cache_is_the_number_of_the_key_whatever_its_page(name):
    case = replace(CACHES[name], dtype="float64")
    call = case.call()
    arrays = (call.q, call.k_cache, call.v_cache)
    _, lse, found = cupy_flash.attention_with_kv_cache(*arrays, return_lse=True, statistics=ALL, **call.options)
    options = {name: x for name, x in call.options.items() if name not in ("k", "v")}
    if case.appended is not None:
        options["cache_seqlens"] = np.add(case.lengths, case.rows).astype(np.int32)
    arrays = (call.q, call.k_cache, lse)
    P = cupy_flash.attention_weights_with_kv_cache(*arrays, **options)
    _, keys = cupy_flash.top_weights_with_kv_cache(*arrays, 1, **options)
    assert_agree_with_weights(found, P, keys, lse, case.capacity)


GRADIENTS = {
    "plain": Case(**SMALL),
    "sink-causal-softcap": Case(sink=True, causal=True, softcap=1.5, **SMALL),
    "bias-mask": Case(bias="hqk", mask="1hqk", sink=True, **SMALL),
    "dropout": Case(dropout=0.4, **SMALL),
    "hidden": Case(bias="k", bias_hides=True, alibi="h", **SMALL),
    "score-mod": Case(score_mod="learned-twice", **SMALL),
    "scale-above-one": Case(scale=1.7, **SMALL),
    "lengths": Case(q_lengths=(13, 5), kv_lengths=(9, 17), **SMALL),
    "tiles": Case(q_len=70, kv_len=300, head_dim=4, heads=2, causal=True, sink=True),
}


@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients_are_those_by_differences(name):
    """Along a random direction of all inputs, of a random sum of out, lse, max and entropy, in float64."""
    case = replace(GRADIENTS[name], dtype="float64")
    call = case.call()
    rng = np.random.default_rng(5)
    inputs = {"q": call.q, "k": call.k, "v": call.v}
    inputs |= {name: call.options[name] for name in ("bias", "sink") if name in call.options}
    direction = {name: rng.normal(size=x.shape) for name, x in inputs.items()}

    def results(step):
        moved = {name: x + step * direction[name] for name, x in inputs.items()}
        q, k, v = (moved.pop(name) for name in "qkv")
        return cupy_flash.attention(q, k, v, return_lse=True, statistics=("entropy", "max"), **call.options | moved)

    def summed(step):
        out, lse, found = results(step)
        terms = zip((out, lse, found.max, found.entropy), weights, strict=True)
        return sum((x[finite] * weight[finite]).sum() for (x, weight), finite in zip(terms, where, strict=True))

    (out, lse, found), vjp = cupy_flash.attention_vjp(
        call.q, call.k, call.v, return_lse=True, statistics=("entropy", "max"), **call.options
    )
    assert found.argmax is None
    weights = [rng.normal(size=x.shape) for x in (out, lse, found.max, found.entropy)]
    where = [np.isfinite(x) for x in (out, lse, found.max, found.entropy)]
    gradients = vjp(*weights)
    step = 1e-6
    expected = (summed(step) - summed(-step)) / (2 * step)
    pairs = [(getattr(gradients, f"d{name}"), direction[name]) for name in inputs]
    total = sum((gradient * along)[np.isfinite(gradient)].sum() for gradient, along in pairs)
    magnitude = sum(abs(gradient * along)[np.isfinite(gradient)].sum() for gradient, along in pairs)
    assert abs(total - expected) < 1e-8 * magnitude

    statistics = statistics_of(call)
    of_function = cupy_flash.attention_backward(
        weights[0], call.q, call.k, call.v, out, lse, dlse=weights[1], statistics=statistics, dmax=weights[2],
        dentropy=weights[3], **call.options,
    )  # fmt: skip
    for one, other in zip(gradients[:5], of_function[:5], strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            np.testing.assert_array_equal(one, other)
    assert_are_the_gradients(case, call._replace(dout=weights[0], dlse=weights[1]), of_function, *weights[2:])


def test_statistics_of_two_parts_are_merged():
    """By lse, whichever part has the largest score, and with keys that are numbered in the whole."""
    call = Case(q_len=29, kv_len=31, causal=True, dtype="float64", heads=2).call()
    whole = cupy_flash.attention(call.q, call.k, call.v, causal="top_left", return_lse=True, statistics=ALL)
    for cut in (1, 13, 30):
        results = []
        for first, last in ((0, cut), (cut, 31)):
            mask = np.arange(29)[:, None] >= np.arange(first, last)
            keys = slice(first, last)
            arrays = (call.q, call.k[:, keys], call.v[:, keys])
            results.append(cupy_flash.attention(*arrays, mask=mask, return_lse=True, statistics=ALL))
        (out_a, lse_a, of_a), (out_b, lse_b, of_b) = results
        merged = cupy_flash.merge(out_a, lse_a, out_b, lse_b, statistics_a=of_a, statistics_b=of_b, key_offset_b=cut)
        for one, other in zip((*merged[:2], *merged[2]), (*whole[:2], *whole[2]), strict=True):
            np.testing.assert_allclose(one, other, rtol=0, atol=1e-12)
            assert one.dtype == other.dtype


def test_a_merge_of_statistics_is_checked():
    q = np.ones((1, 3, 2, 4), np.float32)
    out, lse, found = cupy_flash.attention(q, q, q, return_lse=True, statistics=ALL)
    with pytest.raises(ValueError, match="must have the same fields"):
        cupy_flash.merge(out, lse, out, lse, statistics_a=found)
    with pytest.raises(ValueError, match="the argmax of a part is merged by its max"):
        only = Statistics(argmax=found.argmax)
        cupy_flash.merge(out, lse, out, lse, statistics_a=only, statistics_b=only)
    with pytest.raises(TypeError, match=r"argmax_a must be int32, not float32"):
        wrong = found._replace(argmax=found.max)
        cupy_flash.merge(out, lse, out, lse, statistics_a=wrong, statistics_b=found)
    with pytest.raises(ValueError, match="key_offset_b must be in"):
        cupy_flash.merge(out, lse, out, lse, statistics_a=found, statistics_b=found, key_offset_b=-1)
    with pytest.raises(TypeError, match="statistics_a must be Statistics"):
        cupy_flash.merge(out, lse, out, lse, statistics_a=("max",), statistics_b=found)


@pytest.mark.parametrize(
    ("options", "error", "reason"),
    [
        (dict(statistics=("max",)), ValueError, "statistics need return_lse=True"),
        (dict(statistics=("maximum",), return_lse=True), ValueError, "statistics must be some of max, argmax, entropy"),
        (dict(statistics=("max", "max"), return_lse=True), ValueError, "each once"),
        (dict(statistics="max", return_lse=True), TypeError, "statistics must be a tuple of max, argmax, entropy"),
        (dict(statistics=3, return_lse=True), TypeError, "statistics must be a tuple"),
        (dict(statistics=("max",), return_lse=True, scale="x"), TypeError, "scale must be a number"),
    ],
)
def test_names_are_checked(options, error, reason):
    q = np.ones((1, 3, 2, 4), np.float32)
    with pytest.raises(error, match=reason):
        cupy_flash.attention(q, q, q, **options)
    with pytest.raises(error, match=reason):
        cupy_flash.attention_with_kv_cache(q, q, q, **options)


def test_what_has_no_statistics_refuses_them_by_name():
    q = np.ones((1, 3, 2, 4), np.float32)
    asked = dict(return_lse=True, statistics=("max", "entropy"))
    out, lse, found = cupy_flash.attention(q, q, q, **asked)
    for engine in ("aten", "cpu_decode"):
        with pytest.raises(UnsupportedError, match=engine):
            cupy_flash.attention(q, q, q, engine=engine, **asked)
    with pytest.raises(UnsupportedError, match="it takes no gradients of max and entropy of rows"):
        cupy_flash.attention_backward(
            out, q, q, q, out, lse, statistics=Statistics(found.max, np.zeros((1, 2, 3), np.int32), found.entropy),
            dmax=lse, dentropy=lse, engine="aten",
        )  # fmt: skip
    with pytest.raises(UnsupportedError, match="statistics have no tangents"):
        cupy_flash.attention_jvp(q, q, q, q, **asked)
    with pytest.raises(ValueError, match="attention_double_backward returns no statistics"):
        cupy_flash.attention_double_backward(q, None, None, out, q, q, q, out, lse, **asked)
    with pytest.raises(ValueError, match="attention_weights returns no statistics"):
        cupy_flash.attention_weights(q, q, lse, **asked)
    with pytest.raises(ValueError, match="dmax needs argmax of the forward's statistics"):
        cupy_flash.attention_backward(out, q, q, q, out, lse, statistics=found, dmax=lse)
    with pytest.raises(TypeError, match="statistics must be the Statistics of the forward"):
        cupy_flash.attention_backward(out, q, q, q, out, lse, statistics=("max",), dmax=lse)


def test_a_vjp_with_copies_does_not_see_later_changes():
    call = CASES["causal"].call()
    asked = dict(return_lse=True, statistics=("max", "entropy"), **call.options)
    (out, _, found), vjp = cupy_flash.attention_vjp(call.q, call.k, call.v, copy=True, **asked)
    weights = np.zeros_like(out), None, np.ones_like(found.max), np.ones_like(found.max)
    expected = vjp(*weights)
    for x in (call.q, call.k, found.entropy):
        x[...] = 7
    for one, other in zip(vjp(*weights)[:3], expected[:3], strict=True):
        np.testing.assert_array_equal(one, other)


def _without_rescale(self, growth, factor, l):
    pass


def _without_shift(self, growth, factor, l):
    self.w *= factor


def _any_tie(self, top, keys):
    larger = (top >= self.max) | np.isnan(top)
    for old, new in ((self.max, top), (self.argmax, keys)):
        np.copyto(old, new, where=larger)


@pytest.mark.parametrize(
    ("method", "bug", "check"),
    [
        ("rescale", _without_rescale, lambda: test_statistics_are_those_of_the_scores("tiles")),
        ("rescale", _without_shift, lambda: test_statistics_are_those_of_the_scores("tiles")),
        (
            "take",
            _any_tie,
            lambda: test_of_equal_scores_the_lowest_key_is_the_argmax(Case(scores="signs", q_len=2, kv_len=600)),
        ),
    ],
    ids=["w-not-rescaled", "w-not-shifted", "tie-order"],
)
def test_planted_bugs_are_found(monkeypatch, method, bug, check):
    check()
    monkeypatch.setattr(RowStatistics, method, bug)
    with pytest.raises(AssertionError):
        check()


def test_a_sink_in_the_max_is_found(monkeypatch):
    update = Softmax.update

    def with_sink(self, S, *rest):
        np.maximum(self.statistics.max, self.m, out=self.statistics.max)
        update(self, S, *rest)

    monkeypatch.setattr(Softmax, "update", with_sink)
    with pytest.raises(AssertionError):
        test_statistics_are_those_of_the_scores("large-sink")
