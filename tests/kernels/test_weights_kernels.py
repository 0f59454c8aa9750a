"""The kernels of attention_weights, top_weights and key_importance on the simulator: options, tiles, planted bugs."""

from dataclasses import replace

import numpy as np
import pytest
from cases import DTYPES, PACKED_OPTIONS, Case
from planting import always, change, planted, skip
from tiers import in_tiers
from tiles import SMALL_TILE
from tolerance import assert_matches_reference
from weights_cases import CACHES, CASES, INTEGERS, SMALL, dense, lse_of

import cupy_flash
from cupy_flash import device, dispatch
from cupy_flash.cpu import weights as cpu
from cupy_flash.engines import simt
from cupy_flash.gpu import run_plan
from cupy_flash.gpu import weights as gpu_weights
from cupy_flash.plan.plan import plan
from cupy_flash.problem.build import pose
from cupy_flash.problem.records import CacheOptions, Options, Packed, SavedWeights
from cupy_flash.problem.weights import (
    IMPORTANCE,
    MEAN,
    TOP,
    WEIGHTS,
    Wish,
    pose_weights,
    pose_weights_with_cache,
)
from cupy_flash.simulator.run import start

pytestmark = pytest.mark.usefixtures("poisoned_memory")


def simulated(posed, tile=SMALL_TILE, arch="sm_80", start=start, engine="simt"):
    """Return the results of a posed call on the simulator; mma in the tile of its plan."""
    problem, operands, asked = posed
    chosen = plan(problem._replace(engine=engine), device.named(arch), tile if engine == "simt" else None)
    return [x.numpy() for x in gpu_weights.forward(chosen, operands, asked, start)]


def run(call, lse, wish, **how):
    """Return the results of a call on padded arrays."""
    return simulated(pose_weights(wish.kind, (call.q, call.k, lse), Options(**call.options), wish), **how)


def lse_of_kernel(call, tile=SMALL_TILE, arch="sm_80", engine="simt"):
    """Return lse of the forward kernel, which sums the scores in the order of the kernels of this file."""
    problem, operands = pose("case", (call.q, call.k, call.v), Options(**call.options))
    chosen = plan(problem._replace(engine=engine), device.named(arch), tile if engine == "simt" else None)
    return run_plan.forward(chosen, operands, start)[1].numpy()


def check(case, **how):
    """Compare the results of all three functions with those of the dense formula."""
    call = case.call()
    lse = lse_of_kernel(call, **how)
    P, low = dense(case, call)
    dtype = call.q.dtype
    (weights,) = run(call, lse, Wish(WEIGHTS), **how)
    assert_matches_reference(weights, P, low, dtype, f"P of {case}")
    rows = [row for row in (case.q_len - 1, 0, 2) if 0 <= row < case.q_len]
    (mean,) = run(call, lse, Wish(WEIGHTS, rows, MEAN), **how)
    exact, approximate = (x.mean(axis=1)[:, rows] for x in (P, low))
    assert_matches_reference(mean, exact, approximate, dtype, f"mean of {case}")
    values, keys = run(call, lse, Wish(TOP, n=3), **how)
    found = np.take_along_axis(weights, np.maximum(keys, 0), axis=-1) if case.kv_len else 0
    np.testing.assert_array_equal(values, np.where(keys < 0, 0, found).astype(dtype))
    largest = -np.sort(-weights.astype(float), axis=-1)[..., :3]
    np.testing.assert_array_equal(values[..., : largest.shape[-1]], largest)
    w = np.random.default_rng(5).uniform(size=(case.heads, case.q_len)).astype(dtype)
    (importance,) = run(call, lse, Wish(IMPORTANCE, row_weights=w), **how)
    exact, approximate = (np.einsum("hi,bhij->bhj", w.astype(float), x.astype(float)) for x in (P, low))
    assert_matches_reference(importance, exact, approximate, case.accumulation, f"importance of {case}")


SIMULATED = {
    name: case for name, case in CASES.items() if max(case.q_len, case.kv_len) < 100 and case.head_dim <= 128
} | {
    "everything": Case(
        batch=2, q_len=13, kv_len=37, heads=4, kv_heads=2, head_dim=8, causal=True, window=(20, 5), softcap=1.5,
        alibi="bh", bias="1hqk", bias_hides=True, mask="b1qk", sink=True, q_lengths=(13, 4), kv_lengths=(9, 37),
    ),
    "bfloat16-mods": Case(dtype="bfloat16", layout="bhsd", score_mod="learned-twice", mask_mod="sliding", **SMALL),
    "gaps": Case(mask_mod="gaps", q_len=40, kv_len=70, heads=2, batch=1),
}  # fmt: skip


@pytest.mark.parametrize("case", in_tiers(SIMULATED, ["everything", "bfloat16-mods"]))
def test_every_option(case):
    check(case)


TENSOR_CORES = {
    "everything": replace(SIMULATED["everything"], dtype="bfloat16"),
    "mods": SIMULATED["bfloat16-mods"],
    "float16": Case(dtype="float16", q_len=70, kv_len=150, heads=2, kv_heads=1, batch=1, causal=True, head_dim=40),
    "negative-scale": Case(dtype="bfloat16", scale=-0.7, window=(9, 3), q_len=70, kv_len=61, heads=2, batch=1),
    "wide": Case(dtype="bfloat16", q_len=20, kv_len=70, heads=2, kv_heads=1, batch=1, head_dim=256),
    "empty-rows": Case(dtype="bfloat16", causal=True, q_len=29, kv_len=17),
}


@pytest.mark.parametrize("case", in_tiers(TENSOR_CORES, ["everything"]))
def test_tensor_cores(case):
    check(case, engine="mma")


@pytest.mark.exhaustive
@pytest.mark.parametrize("arch", ["sm_75", "sm_90", "sm_120"])
def test_tensor_cores_of_any_gpu(arch):
    check(TENSOR_CORES["float16"], engine="mma", arch=arch)


TILES = {"64x16": simt.Tile(64, 16, 128), "16x64": simt.Tile(16, 64, 64), "32x32": simt.Tile(32, 32, 64)}


@pytest.mark.exhaustive
@pytest.mark.parametrize("arch", ["sm_75", "sm_90", "sm_120"])
@pytest.mark.parametrize("tile", TILES.values(), ids=TILES)
def test_any_tile_and_gpu(tile, arch):
    check(SIMULATED["everything"], tile=tile, arch=arch)


WISHES = {
    "rows": Wish(WEIGHTS, [12, 3, 4, 12, 0]),
    "heads": Wish(WEIGHTS, slice(None, None, -3), [3, 1, 3]),
    "mean": Wish(WEIGHTS, [7, 2, 3], MEAN),
    "none": Wish(WEIGHTS, []),
    "top": Wish(TOP, n=2),
    "top-of-all": Wish(TOP, n=30),
}


@pytest.mark.parametrize("wish", in_tiers(WISHES, ["top"]))
def test_chosen_rows_and_heads_and_ties(wish):
    """The scores are integers, with ties. Only exp differs from that of the CPU, so keys are the same."""
    call = INTEGERS.call()
    lse = lse_of(call)
    actual = run(call, lse, wish)
    problem, *arrays = pose_weights(wish.kind, (call.q, call.k, lse), Options(**call.options), wish)
    expected = cpu.forward(plan(problem, device.cpu()), *arrays)
    np.testing.assert_allclose(actual[0], expected[0].numpy(), rtol=1e-6, atol=0)
    for one, other in zip(actual[1:], expected[1:], strict=True):
        np.testing.assert_array_equal(one, other.numpy())


def in_two_precisions(pose, arrays):
    """Return the results of the CPU for arrays in float64, and in their own dtype."""
    wide = [x.astype(float) if x.dtype in DTYPES.values() else x for x in arrays]
    return [[x.numpy() for x in dispatch.weights(*pose(*each))] for each in (wide, arrays)]


def check_against_cpu(pose, arrays, dtype, is_close=False, **how):
    """Compare the results of a call, which `pose` poses, with those of the CPU in float64.

    is_close: scores are so close that their order is a matter of rounding, and with it the keys of the largest.
    """
    actual = simulated(pose(*arrays), **how)
    exact, low = in_two_precisions(pose, arrays)
    assert_matches_reference(actual[0], exact[0], low[0], dtype, "result")
    for one, other in zip(actual[1:], exact[1:], strict=True):
        np.testing.assert_array_equal(one < 0, other < 0)
        np.testing.assert_array_equal(one, one if is_close else other)


ALL = (Wish(WEIGHTS), Wish(WEIGHTS, [4, 1, 2], MEAN), Wish(TOP, n=2), Wish(IMPORTANCE))


@pytest.mark.parametrize(
    "case", in_tiers({name: x for name, x in PACKED_OPTIONS.items() if x.dtype == "float32"}, ["window-causal"])
)
def test_packed_sequences(case):
    check_packed(case)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["window-causal", "sink", "alibi", "zero-length-in-the-middle"])
def test_packed_sequences_on_tensor_cores(name):
    check_packed(replace(PACKED_OPTIONS[name], dtype="bfloat16"), engine="mma")


def check_packed(case, **how):
    """Compare all functions on packed sequences with the CPU."""
    call = case.call()
    _, lse = cupy_flash.attention_varlen(call.q, call.k, call.v, *call.packed, return_lse=True, **call.options)
    for wish in ALL if len(lse[0]) > 4 else ALL[::2]:

        def pose(q, k, lse, wish=wish):
            return pose_weights(f"{wish.kind}_varlen", (q, k, lse), Options(**call.options), wish, Packed(*call.packed))

        check_against_cpu(pose, (call.q, call.k, lse), call.q.dtype, is_close=case.softcap is not None, **how)


SERVED = {name: case for name, case in CACHES.items() if name not in ("fp8", "float16", "long")}


@pytest.mark.parametrize("name", in_tiers({name: name for name in SERVED}, ["tree"]))
def test_caches(name):
    check_cache(SERVED[name])


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["paged", "leftpad", "packed", "rotary", "tree", "empty"])
def test_caches_on_tensor_cores(name):
    check_cache(replace(SERVED[name], dtype="float16"), engine="mma")


def check_cache(case, **how):
    """Compare all functions on a cache with the CPU."""
    call = case.call().copied()
    _, lse = cupy_flash.attention_with_kv_cache(*call[:3], **call.options, return_lse=True)
    options = {key: x for key, x in call.options.items() if key not in ("k", "v", "slots", "return_lse")}
    if case.appended is not None:
        options["cache_seqlens"] = np.add(case.lengths, case.rows).astype(np.int32)
    for wish in (Wish(WEIGHTS), Wish(WEIGHTS, [1, 0], MEAN), Wish(TOP, n=2), Wish(IMPORTANCE)):

        def pose(q, k_cache, lse, wish=wish):
            function = f"{wish.kind}_with_kv_cache"
            return pose_weights_with_cache(
                function, (q, k_cache, lse), CacheOptions.of_reading(function, options), wish
            )

        check_against_cpu(pose, (call.q, call.k_cache, lse), call.q.dtype, is_close=case.softcap is not None, **how)


DIFFERENTIATED = {
    "repeated-rows-and-heads": (WEIGHTS, dict(rows=[4, 1, 12, 4], heads=[3, 1, 3])),
    "slice": (WEIGHTS, dict(rows=slice(1, None, 3))),
    "mean": (WEIGHTS, dict(rows=[7, 2, 3], heads=MEAN)),
    "no-rows": (WEIGHTS, dict(rows=[])),
    "top": (TOP, dict(n=3)),
    "importance": (IMPORTANCE, {}),
    "row-weights": (IMPORTANCE, dict(row_weights=np.linspace(-1, 1, 13, dtype=np.float32))),
    "weights-of-heads": (IMPORTANCE, dict(row_weights=np.linspace(0.5, 2, 4, dtype=np.float32)[:, None])),
}
OF_CASES = {
    "everything": replace(SIMULATED["everything"], q_lengths=None),
    "lengths": SIMULATED["everything"],
    "packed": replace(PACKED_OPTIONS["sink"], q_lengths=(4, 9), kv_lengths=(9, 5), batch=2, heads=4, kv_heads=2),
    "relative": Case(score_mod="relative", mask_mod="document", **SMALL),
    "bfloat16": Case(dtype="bfloat16", causal=True, **SMALL),
    "two-tiles": Case(**SMALL | dict(q_len=13, kv_len=70), bias="1hqk"),
}


def gradients_of(case, kind, wanted, backend):
    """Return a function of a dtype that returns the gradients of a call in it, on the simulator or the CPU."""
    call = case.call()
    packed = None if call.packed is None else Packed(*call.packed)
    forward = cupy_flash.attention if packed is None else cupy_flash.attention_varlen
    _, lse = forward(call.q, call.k, call.v, *(call.packed or ()), return_lse=True, **call.options)

    def run(dtype):
        accumulation = np.float64 if dtype == np.float64 else np.float32
        arrays = (call.q.astype(dtype), call.k.astype(dtype), lse.astype(accumulation))
        options, wish = Options(**call.options, backend=backend), Wish(kind, **wanted)
        function = kind if packed is None else f"{kind}_varlen"
        posed = pose_weights(function, arrays, replace(options, backend="cpu"), wish, packed)
        results = [x.numpy() for x in dispatch.weights(*posed)]
        gradient = np.random.default_rng(1).normal(size=results[0].shape).astype(results[0].dtype)
        saved = SavedWeights(gradient, *results[1:])
        return dispatch.weights_backward(*pose_weights("vjp", arrays, options, wish, packed, saved=saved)).results()

    return run


def check_gradients(case, kind, wanted):
    """Compare the gradients of the kernels with those of the CPU in float64."""
    dtype = DTYPES[case.dtype]
    found = gradients_of(case, kind, wanted, "simulator")(dtype)
    exact, low = (gradients_of(case, kind, wanted, "cpu")(each) for each in (np.dtype(float), dtype))
    for name in ("dq", "dk", "dlse", "dbias", "drow_weights"):
        actual, one, other = (getattr(x, name) for x in (found, exact, low))
        assert (actual is None) == (one is None), name
        if actual is not None:
            assert actual.dtype == other.dtype and actual.shape == other.shape
            assert_matches_reference(actual, one, other, actual.dtype, f"{name} of {kind} of {case}")
    for actual, one, other in zip(found.dcaptured or (), exact.dcaptured or (), low.dcaptured or (), strict=True):
        if one is not None:
            assert_matches_reference(actual, one, other, actual.dtype, f"captured array of {kind} of {case}")


@pytest.mark.parametrize("name", in_tiers({x: x for x in DIFFERENTIATED}, ["repeated-rows-and-heads", "row-weights"]))
def test_gradients_are_those_of_the_cpu(name):
    check_gradients(Case(causal=True, **SMALL), *DIFFERENTIATED[name])


@pytest.mark.exhaustive
@pytest.mark.parametrize("wanted", ["slice", "mean", "top", "weights-of-heads"])
@pytest.mark.parametrize("name", OF_CASES)
def test_gradients_with_every_option(name, wanted):
    check_gradients(OF_CASES[name], *DIFFERENTIATED[wanted])


GRADIENT_BUGS = {
    "place": change("weights.place", "place * step == distance", "true"),
    "dlse": skip("weights.dlse"),
    "weight": skip("weights.weight-of-gradient"),
    "sum": change("weights.sum", "other_h * from.head", "h * from.head"),
    "keys": change("weights.key-of-place", "== j", "== j + 1"),
    "mean": change("weights.mean-gradient", " / (real)p.heads", ""),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("bug", GRADIENT_BUGS)
def test_bugs_planted_in_gradients_are_found(bug, monkeypatch):
    with planted(monkeypatch, GRADIENT_BUGS[bug]), pytest.raises(AssertionError):
        for wanted in ("slice", "mean", "row-weights", "top"):
            test_gradients_are_those_of_the_cpu(wanted)


def check_nan():
    """A query with NaN reaches its own weights, no hidden key, and with a weight of 0 no sum."""
    call = Case(causal=True, **SMALL).call()
    before = run(call, lse_of(call), Wish(IMPORTANCE, row_weights=(np.arange(13) != 3).astype(np.float32)))[0]
    call.q[:, 3] = np.nan  # query i sees the keys up to i + 4
    lse = lse_of(call)
    (weights,) = run(call, lse, Wish(WEIGHTS, [3]))
    assert np.isnan(weights[..., :8]).all() and not weights[..., 8:].any()
    after = run(call, lse, Wish(IMPORTANCE, row_weights=(np.arange(13) != 3).astype(np.float32)))[0]
    np.testing.assert_array_equal(after, before)
    values, keys = run(call, lse, Wish(TOP, n=3))
    assert keys[0, 0, 3].tolist() == [0, 1, 2] and np.isnan(values[0, 0, 3]).all()


def test_nan_reaches_only_what_sees_it():
    check_nan()


def test_memory_is_linear():
    """top_weights and key_importance write no array with an element for each pair of a query and a key."""
    call = Case(q_len=40, kv_len=60, batch=1, heads=1, kv_heads=1, head_dim=4).call()
    sizes = []

    def watched(work):
        sizes.extend(np.prod(x.shape) for x in (*work.inputs.values(), *work.results.values()))
        start(work)

    for wish in (Wish(TOP, n=3), Wish(IMPORTANCE)):
        run(call, lse_of(call), wish, start=watched)
    assert max(sizes) < 40 * 60 / 2


BUGS = {
    "a hidden key in a row with NaN": change("weights.probability", "s == -infinity()", "false"),
    "no mean": change("weights.mean", "/ (real)p.heads", ""),
    "ties in the list": change("weights.ties", "scores[place - 1] < s", "scores[place - 1] <= s"),
    "ties at its end": change("weights.enters-list", "s > last", "s >= last"),
    "no row weights": change("weights.weight-of-row", "weight * probability", "probability"),
    "a row of weight 0": always("weights.weight-of-row"),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("bug", BUGS)
def test_planted_bugs_are_found(bug, monkeypatch):
    with planted(monkeypatch, BUGS[bug]), pytest.raises(AssertionError):
        check_nan()
        test_chosen_rows_and_heads_and_ties(WISHES["top"])
        check(SIMULATED["everything"])
