"""Statistics of rows from the forwards of simt, mma, wgmma and tcgen05 in the simulator."""

from dataclasses import replace

import numpy as np
import pytest
from cache_cases import CacheCase
from cache_cases import run_kernels as run_cache_kernels
from cases import Case, planned
from planting import after, change, planted, skip
from row_statistics import ALL, assert_are_of_the_scores, assert_are_the_gradients, drawn, statistics_of
from selected_cases import call_of as selected_call
from tiers import exhaustive, in_tiers
from tiles import small_tile
from tolerance import assert_matches_reference

import cupy_flash
from cupy_flash import Statistics
from cupy_flash.arrays import Array
from cupy_flash.gpu import run_plan
from cupy_flash.problem.records import Saved
from cupy_flash.simulator.run import start

ENGINES = {
    "simt": ("sm_80", dict(dtype="float32")),
    "mma": ("sm_80", dict(dtype="bfloat16")),
    "wgmma": ("sm_90a", dict(dtype="bfloat16", head_dim=64, head_dim_v=64)),
    "tcgen05": ("sm_100a", dict(dtype="bfloat16", head_dim=64, head_dim_v=64, kv_len=150)),  # two tiles of keys
}
WITH_BACKWARD = [name for name in ENGINES if name != "tcgen05"]
SMALL_TILES = ("simt", "mma")  # the others have few tiles
SMALL = dict(q_len=19, kv_len=70, batch=1, heads=2, kv_heads=1)
FEATURES = {
    "sink-causal": dict(sink=True, causal=True),
    "more-queries": dict(q_len=70, kv_len=19, causal=True),
    "softcap-bias": dict(softcap=2.0, bias="hqk", sink=True),
    "hidden": dict(bias="qk", bias_hides=True, mask="qk"),
    "lengths": dict(batch=2, q_lengths=(19, 3), kv_lengths=(50, 70)),
    "falling": dict(scores="falling"),
    "scale": dict(scale=-0.7, sink=True),
}
CASES = {f"{engine}-{name}": (engine, feature) for engine in ENGINES for name, feature in FEATURES.items()}


def case_of(engine, **feature):
    """Return a case for an engine, whose head dimensions it may fix."""
    return Case(**SMALL | ENGINES[engine][1] | feature)


def run(engine, case, call, names=ALL):
    """Return the Statistics of a call in the simulator, in small tiles."""
    arch = ENGINES[engine][0]
    tile = small_tile if engine in SMALL_TILES else None
    chosen, operands = planned(case, None, arch, tile, call, statistics=names, engine=engine)
    _, _, *found = (x.numpy() for x in run_plan.forward(chosen, operands, start))
    assert chosen.engine == engine
    return dict(zip(names, found, strict=True))


@pytest.mark.parametrize(
    "row", in_tiers(CASES, ["simt-sink-causal", "mma-hidden", "wgmma-lengths", "tcgen05-sink-causal"])
)
def test_statistics_are_those_of_the_scores(row):
    engine, feature = row
    case = case_of(engine, **feature)
    call = case.call()
    assert_are_of_the_scores(case, call, Statistics(**run(engine, case, call)))


# Lists in any order, with a sink, lists of blocks, lengths; hidden and unused entries.
SELECTED = {
    f"{engine}-{name}": (engine, name)
    for engine in SMALL_TILES
    for name in ("keys-causal-heads", "rows-sink", "lengths-alibi", "bfloat16")
}


@pytest.mark.parametrize("row", in_tiers(SELECTED, ["simt-rows-sink", "mma-keys-causal-heads"]))
def test_statistics_of_selected_keys(row):
    engine, name = row
    case, call = selected_call(name, **dict(dtype="float16") if engine == "mma" and name != "bfloat16" else {})
    assert_are_of_the_scores(case, call, Statistics(**run(engine, case, call)))


OTHER_ENTRY = {
    "simt": change("listed-key-of-lane", "key[lane_x() + c * LANES]", "key[(lane_x() + c * LANES) ^ 1]"),
    "mma": change("listed-key-of-fragment", "key[column_of(n, e)]", "key[column_of(n, e) ^ 1]"),
}


@pytest.mark.parametrize("engine", [exhaustive(name) for name in OTHER_ENTRY])
def test_a_key_of_another_entry_is_found(engine, monkeypatch):
    case, call = selected_call("keys-causal-heads", **dict(dtype="float16") if engine == "mma" else {})
    with planted(monkeypatch, OTHER_ENTRY[engine]):
        found = Statistics(**run(engine, case, call))
    with pytest.raises((AssertionError, IndexError)):  # some places of a tile have a key past the last one
        assert_are_of_the_scores(case, call, found)


GRADIENTS = {
    **{name: feature for name, feature in FEATURES.items() if name not in ("hidden", "falling")},
    "hidden": dict(bias="1hqk", bias_hides=True, mask="qk"),
    "lengths": dict(batch=2, q_lengths=(19, 3), kv_lengths=(25, 40)),
    "dropout": dict(dropout=0.3, bias="k"),
    "mask-mod": dict(mask_mod="sliding", sink=True),
    "packed": dict(batch=2, packed=True, q_lengths=(19, 3), kv_lengths=(20, 40), causal=True),
    "no-dlse": dict(dlse=False),
}
GRADIENT_CASES = {
    f"{engine}-{name}": (engine, feature) for engine in WITH_BACKWARD for name, feature in GRADIENTS.items()
}


def gradients(engine, case, call, names=("max", "entropy"), **how):
    """Return the gradients of a call, with dmax and dentropy of these statistics, and dmax and dentropy."""
    given = dict(call.options, return_lse=True, statistics=ALL)
    if call.packed is None:
        out, lse, found = cupy_flash.attention(call.q, call.k, call.v, **given)
    else:
        out, lse, found = cupy_flash.attention_varlen(call.q, call.k, call.v, *call.packed, **given)
    of_names = dict(zip(("max", "entropy"), drawn(lse), strict=True))
    dmax, dentropy = (of_names[name] if name in names else None for name in of_names)
    saved = Saved(call.dout, out, lse, call.dlse, statistics=found, dmax=dmax, dentropy=dentropy)
    tile = small_tile if engine in SMALL_TILES else None
    chosen, operands = planned(case, saved, ENGINES[engine][0], tile, call, engine=engine, **how)
    assert chosen.engine == engine
    return run_plan.backward(chosen, operands, start).map(Array.numpy), dmax, dentropy


@pytest.mark.parametrize("row", in_tiers(GRADIENT_CASES, ["simt-sink-causal", "mma-softcap-bias"]))
def test_gradients_are_those_of_the_formula(row):
    engine, feature = row
    case = case_of(engine, **dict(kv_len=40) | feature)
    call = case.call()
    assert_are_the_gradients(case, call, *gradients(engine, case, call))


@pytest.mark.parametrize("engine", [exhaustive(name) for name in WITH_BACKWARD])
@pytest.mark.parametrize("name", ["max", "entropy"])
def test_gradients_of_one_statistic_are_those_of_the_formula(engine, name):
    case = case_of(engine, kv_len=40, sink=True)
    call = case.call()
    assert_are_the_gradients(case, call, *gradients(engine, case, call, (name,), deterministic=name == "max"))


@pytest.mark.exhaustive
@pytest.mark.parametrize("engine", WITH_BACKWARD)
@pytest.mark.parametrize("score_mod", ["relative", "learned-twice"])
def test_gradients_by_captured_arrays_are_those_of_the_cpu(engine, score_mod):
    case = case_of(engine, kv_len=40, score_mod=score_mod, causal=True)
    call = case.call()
    found, dmax, dentropy = gradients(engine, case, call)

    def on_cpu(dtype):
        q, k, v, dout = (x.astype(dtype) for x in (call.q, call.k, call.v, call.dout))
        out, lse, statistics = cupy_flash.attention(q, k, v, return_lse=True, statistics=ALL, **call.options)
        given = (x.astype(lse.dtype) for x in (call.dlse, dmax, dentropy))
        rest = dict(zip(("dlse", "dmax", "dentropy"), given, strict=True), statistics=statistics)
        return cupy_flash.attention_backward(dout, q, k, v, out, lse, **rest, **call.options)

    low, exact = on_cpu(call.q.dtype), on_cpu(float)
    for one, other, least in zip(found.dcaptured, exact.dcaptured, low.dcaptured, strict=True):
        if one is None:  # an array of indices
            continue
        assert_matches_reference(one, other, least, one.dtype, f"captured array of {case}")


@pytest.mark.parametrize("engine", [exhaustive("simt"), "mma", exhaustive("wgmma"), exhaustive("tcgen05")])
def test_of_equal_scores_the_lowest_key_is_the_argmax_and_of_nans_the_first(engine):
    case = case_of(engine, scores="signs", batch=2, sink=True)
    call = case.call()
    call.k[1, [61, 33]] = np.nan
    found, expected = run(engine, case, call), statistics_of(call)
    np.testing.assert_array_equal(found["argmax"], expected.argmax)
    np.testing.assert_array_equal(found["max"], expected.max)
    assert np.isnan(found["entropy"][1]).all() and (found["argmax"][1] == 33).all()
    np.testing.assert_allclose(found["entropy"][0], expected.entropy[0], rtol=1e-5)


def shifted(call, shift):
    """Return a call whose scores are multiples of 1/64 plus a number that is exact in float16."""
    rng = np.random.default_rng(0)
    for x in (call.q, call.k):
        x[...] = rng.integers(-8, 9, x.shape) / 8
    call.q[..., 0], call.k[..., 0] = 1, shift
    return call


def check_shift(engine):
    """Compare the statistics of scores with those of the same scores plus 1e4."""
    dtype = "float32" if engine == "simt" else "float16"
    case = case_of(engine, dtype=dtype, scale=1.0, sink=(3.0, -np.inf))
    found = []
    for shift in (0, 1e4):
        sinks = np.array(case.sink, np.float32) + np.float32(shift)
        call = shifted(case.call(), shift)
        call = call._replace(options=call.options | dict(sink=sinks))
        found.append(run(engine, case, call))
    near, far = found
    np.testing.assert_array_equal(near["max"] + np.float32(1e4), far["max"])
    np.testing.assert_array_equal(near["argmax"], far["argmax"])
    # The lse of tensor cores, which the sink joins, is rounded.
    rounding = 0 if engine == "simt" else np.spacing(np.float32(1e4))
    np.testing.assert_allclose(far["entropy"], near["entropy"], rtol=2e-6, atol=rounding)


@pytest.mark.parametrize("engine", ["simt", *(exhaustive(name) for name in ("mma", "wgmma", "tcgen05"))])
def test_a_constant_added_to_all_scores_does_not_change_the_entropy(engine):
    check_shift(engine)


APPENDED = CacheCase(q_len=2, page=8, appended=2, sink=True, rotary=(8, True), dtype="float16")
SPLIT = CacheCase(
    lengths=(5, 150), capacity=160, q_len=2, heads=2, kv_heads=1, sink=True, split_size=64, dtype="float16"
)
LONG = CacheCase(lengths=(700,), capacity=720, heads=2, kv_heads=1, scale=2.0, sink=True, dtype="float16")
PACKED = CacheCase(packed=(3, 1), page=8, dtype="float16")
LEFTPAD = CacheCase(q_len=2, leftpad=(2, 9), dtype="float16")
CACHES = {
    "mma-paged-append": (APPENDED, dict(engine="mma")),
    "mma-packed": (PACKED, dict(engine="mma")),
    "simt-leftpad": (LEFTPAD, dict(engine="simt")),
    "decode-paged-append": (APPENDED, {}),
    "decode-packed": (PACKED, {}),
    "decode-leftpad": (LEFTPAD, {}),
    "decode-pieces": (SPLIT, {}),
    "decode-runs": (LONG, dict(blocks=2)),
    "decode-producer": (LONG, dict(blocks=2, arch="sm_90a", tma=True)),
    "decode-clusters": (LONG, dict(arch="sm_90", cluster=4)),
    "decode-fp8": (CacheCase(q_len=2, page=8, dtype="float16", cache_dtype="float8_e4m3fn"), {}),
    "decode-latent": (replace(SPLIT, kv_heads=1, shared=True, softcap=2.0), dict(rows=64)),
    "decode-window": (CacheCase(lengths=(150, 20), capacity=160, window=(30, None), dtype="bfloat16", scale=-0.5), {}),
}


def of_cache(call, **how):
    """Return the Statistics of a call on a cache in the simulator."""
    call = call._replace(options=dict(call.options, return_lse=True, statistics=ALL))
    return Statistics(*run_cache_kernels(call, **how)[4:])


def assert_are_those_of_the_cpu(call, found):
    """Compare the Statistics of a call on a cache with those of the CPU."""
    in_float64 = call.map(lambda x: x.astype(float) if x.dtype in (call.q.dtype, call.k_cache.dtype) else x)
    asked = dict(return_lse=True, statistics=ALL)
    exact, low = (
        cupy_flash.attention_with_kv_cache(*each[:3], **each.options, **asked)[2]
        for each in (in_float64, call.copied())
    )
    np.testing.assert_array_equal(found.argmax, exact.argmax)
    for name in ("max", "entropy"):
        one, other, least = (getattr(x, name) for x in (found, exact, low))
        assert_matches_reference(one, other, least, one.dtype, name)


@pytest.mark.parametrize("name", in_tiers({x: x for x in CACHES}, ["mma-paged-append"]))
def test_statistics_on_a_cache_are_those_of_the_cpu(name):
    case, how = CACHES[name]
    call = case.call()
    assert_are_those_of_the_cpu(call, of_cache(call, **how))


def with_equal_scores(case):
    """Return the call of a case whose keys repeat after 20, so that parts have equal maxima."""
    call = case.call()
    call.k_cache[:, 20:] = call.k_cache[:, np.arange(20, call.k_cache.shape[1]) % 20]
    return call


@pytest.mark.parametrize("name", in_tiers({x: x for x in ("decode-pieces", "decode-clusters")}, ["decode-pieces"]))
def test_of_equal_scores_in_several_parts_the_lowest_key_is_the_argmax(name):
    case, how = CACHES[name]
    call = with_equal_scores(replace(case, lengths=(160,) * len(case.lengths)))
    found = of_cache(call, **how)
    assert (found.argmax < 20).all()
    assert_are_those_of_the_cpu(call, found)


CACHE_BUGS = {
    "w-of-row-not-rescaled": ("decode-runs", skip("rescale-w-of-row")),
    "w-of-warp-not-rescaled": ("decode-runs", skip("rescale-w-of-warp")),
    "one-part-left-out": ("decode-runs", change("merge-statistics", "c < count", "c < count - 1")),
    "shares-left-out": ("decode-runs", change("merge-entropy", "part.entropy - log_share", "part.entropy")),
}


@pytest.mark.parametrize("name", in_tiers({x: x for x in CACHE_BUGS}, []))
def test_bugs_planted_in_a_decode_are_found(name, monkeypatch):
    (case, how), bug = CACHES[CACHE_BUGS[name][0]], CACHE_BUGS[name][1]
    call = case.call()
    with planted(monkeypatch, bug):
        found = of_cache(call, **how)
    with pytest.raises(AssertionError):
        assert_are_those_of_the_cpu(call, found)


@pytest.mark.parametrize(
    ("engine", "names"),
    [
        ("mma", ("max",)),
        *(exhaustive("mma", (name,)) for name in ("argmax", "entropy")),
        *(exhaustive("tcgen05", (name,)) for name in ALL),
    ],
)
def test_a_kernel_computes_only_what_is_asked_for(engine, names):
    case = case_of(engine, causal=True)
    call = case.call()
    found, every = run(engine, case, call, names), statistics_of(call)
    assert tuple(found) == names
    np.testing.assert_allclose(found[names[0]], getattr(every, names[0]), rtol=1e-5, atol=1e-6)


def instructions(engine, dtype, head_dim, keys, names):
    """Return the warp instructions of a forward of 128 queries in the tile of its plan."""
    counters = []
    case = Case(128, keys, 1, 1, 1, head_dim, head_dim, dtype=dtype)
    call = case.call()
    chosen, operands = planned(case, None, ENGINES[engine][0], None, call, statistics=names, engine=engine)
    run_plan.forward(chosen, operands, lambda work: counters.extend(start(work)))
    return counters[-1].warp_instructions.sum()


@pytest.mark.parametrize(
    ("engine", "shape", "names", "most"),
    [
        exhaustive("simt", ("float32", 64, 256), ALL, 1.12),
        exhaustive("mma", ("bfloat16", 128, 1024), ("max",), 1.06),
        exhaustive("mma", ("bfloat16", 128, 4096), ALL, 1.15),
        exhaustive("wgmma", ("bfloat16", 128, 1024), ("max",), 1.06),
        exhaustive("wgmma", ("bfloat16", 128, 4096), ALL, 1.27),
    ],
)
def test_statistics_add_few_instructions_to_a_forward(engine, shape, names, most):
    assert instructions(engine, *shape, names) <= most * instructions(engine, *shape, ())


FIRST_COLUMN = ("S[m][n][e] == x", "S[m][n][e] == x && column == 0")
LARGER = ("!(largest[n / 2][n % 2] <", "(largest[n / 2][n % 2] >")
FIRST_OF_ROW = ("S[n] == largest", "S[n] == largest && column == 0")
FIRST_PART_OF_ROW = (") == largest", ") == largest && column == 0")
FIRST_PART = ("[c] == x", "[c] == x && column == 0")
GRADIENT_BUGS = {
    "entropy-without-delta": ("simt", skip("entropy-in-delta")),
    "entropy-without-log": ("mma", skip("gradient-of-entropy")),
    "max-of-next-key": ("wgmma", change("gradient-of-max", "argmax[row] == j", "argmax[row] == j + 1")),
    "entropy-without-sink": ("mma", skip("entropy-of-sink")),
}


@pytest.mark.parametrize("name", in_tiers({x: x for x in GRADIENT_BUGS}, []))
def test_bugs_planted_in_gradients_are_found(name, monkeypatch):
    engine, bug = GRADIENT_BUGS[name]
    case = case_of(engine, kv_len=40, sink=True)
    call = case.call()
    with planted(monkeypatch, bug):
        found = gradients(engine, case, call)
    with pytest.raises(AssertionError):
        assert_are_the_gradients(case, call, *found)


BUGS = {
    "w-not-rescaled": ("mma", skip("rescale-w"), "entropy"),
    "w-not-shifted": ("simt", change("rescale-w", "(m - previous_m) * l", "0"), "entropy"),
    "w-without-shift": ("simt", change("shift-of-term", "- softmax.m", "- 0"), "entropy"),
    "tie-order-of-columns": ("mma", change("lowest-column", *FIRST_COLUMN), "argmax"),
    "tie-order-of-parts": ("wgmma", change("lowest-part", *FIRST_PART), "argmax"),
    "ties-with-later-tiles": ("mma", change("grows", *LARGER), "argmax"),
    "tie-order-of-lanes": ("mma", change("ties", "s == top && lower", "s == top && !lower"), "argmax"),
    "tie-order-of-tiles": ("simt", change("ties-descending", "s >= top", "s > top"), "argmax"),
    "sink-left-out": ("mma", skip("join-sink"), "entropy"),
    "sink-in-max": ("mma", after("join-sink", "row.take(to_real(((const sink_element*)p.sink)[head]), 0);"), "max"),
    "hidden-terms": ("mma", change("hidden-term", "max(exponent, (real)-1e30f)", "exponent"), "entropy"),
    "w-of-thread-not-rescaled": ("tcgen05", skip("rescale-w"), "entropy"),
    "tie-order-of-row": ("tcgen05", change("lowest-column-of-row", *FIRST_OF_ROW), "argmax"),
    "tie-order-of-parts-of-row": ("tcgen05", change("lowest-part-of-row", *FIRST_PART_OF_ROW), "argmax"),
    "hidden-terms-of-row": ("tcgen05", skip("hidden-term-of-row"), "entropy"),
}


@pytest.mark.parametrize("name", in_tiers({x: x for x in BUGS}, ["w-not-shifted"]))
def test_planted_bugs_are_found(name, monkeypatch):
    engine, bug, statistic = BUGS[name]
    scores = "falling" if name.startswith("w-") else "signs"
    sink = (30.0, -30.0) if name == "sink-in-max" else True
    case = case_of(engine, scores=scores, sink=sink, causal=name.startswith("hidden-terms"))
    call = case.call()
    expected = getattr(statistics_of(call), statistic)
    np.testing.assert_allclose(run(engine, case, call)[statistic], expected, rtol=1e-4, atol=1e-5)
    with planted(monkeypatch, bug):
        wrong = run(engine, case, call)[statistic]
    assert not np.allclose(wrong, expected, rtol=1e-3, atol=1e-4)
