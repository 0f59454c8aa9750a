"""The forward on every backend: each option and all pairs of options against the formula, and invariants."""

import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
from cases import (
    OPTIONS,
    PAIRS,
    SCORES_AGAIN,
    SIMULATED_OPTIONS,
    SIMULATED_PAIRS,
    TILED,
    Call,
    Case,
    Result,
    assert_bitwise_equal,
    by_backend,
    check,
    outcome,
    posed,
    run,
    run_planned,
    run_public,
)
from producers import MAKERS
from threadpoolctl import threadpool_limits

import cupy_flash
from cupy_flash.cpu import attention as cpu
from cupy_flash.cpu import thread_pool
from cupy_flash.device import blas_controller
from cupy_flash.dropout import keep_mask
from cupy_flash.problem.mask import Band

pytestmark = pytest.mark.usefixtures("poisoned_memory")

FORWARD = ("out", "lse")


def normal(*shape, seed=0):
    return np.random.default_rng([seed, *shape]).normal(size=shape).astype(np.float32)


@by_backend(exhaustive=SCORES_AGAIN, cpu=OPTIONS, simulator=SIMULATED_OPTIONS)
def test_every_option(case, backend):
    check(case, outcome(case, backend), only=FORWARD)


@by_backend(cpu=PAIRS, simulator=SIMULATED_PAIRS)
def test_all_pairs_of_options(case, backend):
    check(case, outcome(case, backend), only=FORWARD)


# Tiles


@pytest.mark.parametrize(("block_q", "block_kv"), [(16, 16), (7, 5), (64, 8), (1, 61), (32, 64)])
@pytest.mark.parametrize("case", [pytest.param(case, id=name) for name, case in TILED.items()])
def test_any_tiles(case, block_q, block_kv):
    """Other tiles than the planned one change results only by rounding."""
    check(case, run_planned(case, block_q=block_q, block_kv=block_kv), only=FORWARD)


@by_backend(
    "q_len, kv_len",
    cpu={"below": (257, 1023), "above": (257, 1025), "three-tiles": (257, 2049)},
    simulator={"below": (7, 15), "exact": (8, 32), "above": (9, 33), "many-tiles": (41, 81)},
)
def test_lengths_around_the_plans_tiles(q_len, kv_len, backend):
    check(Case(q_len=q_len, kv_len=kv_len, batch=1, heads=2, causal=True), backend=backend, only=FORWARD)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(Case(q_len=48, kv_len=48, causal=True), id="causal"),
        pytest.param(Case(q_len=80, kv_len=48, causal=True), id="causal-more-queries"),
        pytest.param(Case(q_len=48, kv_len=80, causal="top_left"), id="top-left"),
        pytest.param(Case(q_len=64, kv_len=64, window=(8, 4)), id="window"),
        pytest.param(
            Case(q_len=64, kv_len=64, window=(40, None), q_lengths=(30, 64), kv_lengths=(64, 20)), id="lengths"
        ),
        pytest.param(Case(q_len=64, kv_len=64, causal=True, q_lengths=(30, 0), kv_lengths=(64, 20)), id="zero-length"),
    ],
)
def test_tiles_that_no_query_sees_are_not_computed(case, monkeypatch):
    """Each visited tile contains a visible pair, and each visible pair lies in exactly one visited tile."""
    visited = []
    monkeypatch.setattr(cpu.Call, "hide", lambda call, S, band, tile, value: visited.append((band, tile)))
    plan, operands = posed(case, block_q=16, block_kv=16, threads=1)
    cpu.forward(plan, operands)
    counts = {}
    for band, tile in visited:
        assert band.visible(*tile.queries, *tile.keys).any()
        count = counts.setdefault((tile.batch, tile.head), (band, np.zeros((band.q_len, band.kv_len), int)))[1]
        count[slice(*tile.queries), slice(*tile.keys)] += 1
    for band, count in counts.values():
        assert isinstance(band, Band)
        assert (count[band.visible(0, band.q_len, 0, band.kv_len)] == 1).all()
        assert count.max() == 1
    everything = case.batch * case.heads * -(-case.q_len // 16) * -(-case.kv_len // 16)
    assert len(visited) < 0.8 * everything


def test_keys_outside_every_window_are_never_read(backend):
    """The first 60 keys lie outside every query's window, which is aligned to the end: NaN in them changes nothing."""
    case = Case(q_len=20, kv_len=40, window=(19, 0))
    q, k, v, options, *_ = case.call()
    k, v = (np.pad(x, [(0, 0), (60, 0), (0, 0), (0, 0)], constant_values=np.nan) for x in (k, v))
    out, lse = cupy_flash.attention(q, k, v, return_lse=True, backend=backend, **options)
    check(case, Result(out, lse, *[None] * 5), only=FORWARD)


# Values


def test_rows_that_see_no_key_are_exact(backend):
    """out is +0; lse is -inf, or the sink if there is one."""
    q, k, v = normal(1, 9, 2, 8), normal(1, 4, 2, 8), normal(1, 4, 2, 8)
    out, lse = cupy_flash.attention(q, k, v, causal=True, return_lse=True, backend=backend)
    assert (out[:, :5] == 0).all() and np.isneginf(lse[..., :5]).all()
    assert np.isfinite(lse[..., 5:]).all() and (out[:, 5:] != 0).all()
    sink = np.array([30.0, -100.0], np.float32)
    out, lse = cupy_flash.attention(q, k, v, causal=True, sink=sink, return_lse=True, backend=backend)
    assert (out[:, :5] == 0).all() and (lse[0, :, :5] == sink[:, None]).all()


def test_a_sink_of_minus_infinity_is_no_sink(backend):
    case = Case(causal=True, q_len=29)
    result = run(replace(case, sink=(-np.inf,) * 4), backend)
    assert (result.dsink == 0).all()
    check(case, result._replace(dsink=None))


def test_nan_reaches_only_its_row_and_column(backend):
    """NaN in a query makes its row of out NaN, NaN in a value its column; other heads do not change."""
    q, k, v = normal(1, 6, 2, 8), normal(1, 7, 2, 8), normal(1, 7, 2, 8)
    q[0, 3, 1, 2] = np.nan
    v[0, 2, 0, 5] = np.nan
    out, lse = cupy_flash.attention(q, k, v, return_lse=True, backend=backend)
    expected = np.zeros(out.shape, bool)
    expected[0, 3, 1] = True
    expected[0, :, 0, 5] = True
    np.testing.assert_array_equal(np.isnan(out), expected)
    assert np.argwhere(np.isnan(lse)).tolist() == [[0, 1, 3]]


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_one_key_returns_its_value(layout, backend):
    q, v = normal(2, 5, 3, 8), normal(2, 1, 3, 4)
    if layout == "bhsd":
        q, v = q.swapaxes(1, 2), v.swapaxes(1, 2)
    k = q[:, :1] if layout == "bshd" else q[:, :, :1]
    out = cupy_flash.attention(q, k, v, layout=layout, scale=1e3, backend=backend)
    np.testing.assert_array_equal(out, np.broadcast_to(v, out.shape))


# The softmax of the CPU engine with a bound on the scores, compared with the online softmax

SINKS = (20.01, -20.01, 19.99, -19.99)


@pytest.mark.parametrize(
    "features", [{}, dict(causal=True), dict(sink=SINKS), dict(sink=SINKS, causal=True, q_len=29)], ids=str
)
@pytest.mark.parametrize("score", [0.0, 5.0, 19.99, 20.01, 25.0, 80.0])
def test_bounded_and_online_softmax(features, score, monkeypatch):
    """|q| |k| is just below or above BOUND, with scores and sinks of both signs; then the bounded path is disabled."""
    taken = set()

    class Recorded(cpu.Softmax):
        def __init__(self, shape, dtype, sink, bounded, products):
            super().__init__(shape, dtype, sink, bounded, products)
            taken.add((None if sink is None else sink.item(), self.bounded))

    monkeypatch.setattr(cpu, "Softmax", Recorded)
    case = Case(scores="signs", scale=score, **features)
    bounded = run(case)
    sinks = np.array(features.get("sink", []), np.float32).tolist() or [None]
    assert taken == {(sink, score <= 20 and (sink is None or abs(sink) <= 20)) for sink in sinks}
    taken.clear()
    monkeypatch.setattr(cpu, "BOUND", -1.0)
    online = run(case)
    assert taken == {(sink, False) for sink in sinks}
    check(case, bounded)
    check(case, online)


# Determinism


THREADED = {
    name: replace(OPTIONS[name], q_len=70, kv_len=61)
    for name in (
        "causal",
        "bias-bhqk",
        "bias-1hqk",
        "bias-b1qk",
        "bias-bh1k",
        "bias-single",
        "sink",
        "dropout",
        "grouped",
    )
}
THREADED |= {
    "one-head": Case(q_len=70, kv_len=61, batch=1, heads=1, kv_heads=1, causal=True),
    "bounded-or-not-by-tile": Case(q_len=70, kv_len=61, batch=1, scale=1.0, causal=True),
    "lengths": Case(q_len=70, kv_len=61, q_lengths=(70, 3), kv_lengths=(16, 50), bias="11qk"),
    "dtype-bfloat16": Case(q_len=70, kv_len=61, dtype="bfloat16", causal=True),
}


@pytest.mark.parametrize("case", [pytest.param(case, id=name) for name, case in THREADED.items()])
def test_bitwise_independent_of_threads(case):
    """Forward and backward; several threads add to the gradient of a bias that the batch and the heads share."""
    one = run_planned(case, block_q=16, block_kv=16, threads=1)
    for threads in (2, 3, 7):
        several = run_planned(case, block_q=16, block_kv=16, threads=threads)
        assert_bitwise_equal(several, one, f"{case} on {threads} threads")


@pytest.mark.parametrize("length", [300, 700])
def test_bitwise_independent_of_the_threads_of_blas(length):
    """BLAS uses all its threads, or one if another call runs at the same time: results are bitwise equal."""
    case = Case(q_len=length, kv_len=length, batch=1, heads=1, kv_heads=1, head_dim=64, head_dim_v=64)
    expected = run(case)
    for threads in (1, 2, 4, 16):
        with threadpool_limits(threads, user_api="blas"):
            assert_bitwise_equal(run(case), expected, f"{case} with {threads} threads of BLAS")
    with ThreadPoolExecutor(3) as pool:
        for result in pool.map(run, [case] * 6):
            assert_bitwise_equal(result, expected, f"{case} beside others")


def test_bitwise_equal_over_ten_runs():
    """The call runs on several CPU threads; test_kernels.py checks the kernels in any order of blocks and warps."""
    case = Case(q_len=300, kv_len=300, causal=True, bias="11qk", sink=True, dropout=0.1, head_dim=32)
    first = run(case)
    for _ in range(9):
        assert_bitwise_equal(run(case), first, case)


def test_tiles_and_threads_draw_the_same_dropout():
    """If v is the identity, out is P, which is 0 exactly where dropout.py drops a probability."""
    case = Case(q_len=40, kv_len=40, head_dim_v=40, kv_heads=4, dropout=0.5, batch=2)
    q, k, v, options, *_ = case.call()
    v[...] = np.eye(40)[:, None]
    expected = [
        [keep_mask(options["seed"], b * case.heads + h, 0, 40, 0, 40, 0.5) for h in range(case.heads)] for b in range(2)
    ]
    out = cupy_flash.attention(q, k, v, **options)
    np.testing.assert_array_equal(out.swapaxes(1, 2) != 0, expected)


def test_seeds(backend):
    """An int and an int64 array with the same bits are the same seed; None draws a seed from NumPy's global
    generator.
    """
    q, k, v, *_ = Case().call()

    def dropped(seed):
        return cupy_flash.attention(q, k, v, dropout=0.5, seed=seed, backend=backend)

    np.testing.assert_array_equal(dropped(2**64 - 7), dropped(np.array([-7])))
    np.testing.assert_array_equal(dropped(7), dropped(np.array(7)))
    np.testing.assert_array_equal(dropped(7), dropped(np.int32(7)))
    assert (dropped(7) != dropped(8)).any()
    assert (dropped(None) != dropped(None)).any()
    np.random.seed(3)  # noqa: NPY002 - the API promises to draw from NumPy's global generator
    first = dropped(None)
    np.random.seed(3)  # noqa: NPY002 - the same
    np.testing.assert_array_equal(dropped(None), first)


# Calls from several threads, limits on the threads of BLAS, errors in a task


def blas_limits():
    return [library["num_threads"] for library in blas_controller().info()]


def test_calls_from_many_threads():
    cases = [Case(q_len=90, kv_len=130, causal=True, seed=seed, bias="11qk", sink=True) for seed in range(8)]
    expected = [run_planned(case, threads=1) for case in cases]
    before = blas_limits()
    with ThreadPoolExecutor(8) as pool:
        for _ in range(3):
            for case, result, serial in zip(
                cases, pool.map(lambda case: run_planned(case, threads=2), cases), expected, strict=True
            ):
                assert_bitwise_equal(result, serial, case)
    assert blas_limits() == before


def test_blas_limit_nests_and_overlaps():
    """Two calls may enter and leave in any order: the limit is lifted when the last one leaves."""
    limit, before = thread_pool._single_threaded_blas, blas_limits()
    first, second = thread_pool._User(), thread_pool._User()
    limit.enter(first)
    limit.enter(second)
    assert set(blas_limits()) <= {1}
    limit.leave(second)
    assert set(blas_limits()) <= {1}
    limit.leave(first)
    assert blas_limits() == before
    with ThreadPoolExecutor(1) as one, ThreadPoolExecutor(1) as other:
        for enter, leave in ((one, other), (other, one)):  # the one that enters first leaves first
            enter.submit(limit.enter, first).result()
            leave.submit(limit.enter, second).result()
            enter.submit(limit.leave, first).result()
            assert set(blas_limits()) <= {1}
            leave.submit(limit.leave, second).result()
            assert blas_limits() == before
    # a limit set by the caller is restored, whichever thread leaves
    with threadpool_limits(3, user_api="blas"), ThreadPoolExecutor(1) as other:
        limit.enter(first)
        assert set(blas_limits()) <= {1}
        limit.leave(first)
        assert set(blas_limits()) <= {3}
        other.submit(limit.enter, first).result()
        assert set(blas_limits()) <= {1}
        other.submit(limit.leave, first).result()
        assert set(blas_limits()) <= {3}
    assert blas_limits() == before


@pytest.mark.parametrize("threads", [1, 2])
def test_an_error_in_a_task_reaches_the_caller(threads):
    before = blas_limits()
    done = []

    def fail():
        raise MemoryError("no more")

    with pytest.raises(MemoryError, match="no more"):
        thread_pool.run_tasks(threads, [lambda: done.append(1), fail])
    assert done == [1]
    assert blas_limits() == before
    check(Case())


# Memory


def peak_beyond_results(step, *arrays, **options):
    """Return the peak number of allocated bytes minus those of the results, the smallest of three calls.

    It counts what other threads of the process allocate meanwhile, as that of pytest-xdist does for its messages.
    """
    peaks = []
    for _ in range(3):
        tracemalloc.start()
        result = step(*arrays, **options)
        held, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert result is not None
        peaks.append(peak - held)
    return min(peaks)


def test_memory_is_linear():
    """Twice the length takes at most twice the memory, forward and backward, and always less than a score matrix."""
    peaks = {}
    for length in (4096, 8192):
        q, k, v, dout = (normal(1, length, 1, 8, seed=seed) for seed in range(4))
        out, lse = cupy_flash.attention(q, k, v, causal=True, return_lse=True)
        forward = peak_beyond_results(cupy_flash.attention, q, k, v, causal=True)
        backward = peak_beyond_results(cupy_flash.attention_backward, dout, q, k, v, out, lse, causal=True)
        peaks[length] = (forward, backward)
    for shorter, longer in zip(*peaks.values(), strict=True):
        assert longer <= 2.1 * shorter, peaks
        assert longer < 8192 * 8192 * 4 / 8, peaks


# Arrays


STRIDES = {
    "fortran": np.asfortranarray,
    "negative": lambda x: np.ascontiguousarray(x[:, ::-1])[:, ::-1],
    "negative-last": lambda x: np.ascontiguousarray(x[..., ::-1])[..., ::-1],
    "every-second": lambda x: np.repeat(x, 2, axis=3)[..., ::2],
    "slice": lambda x: np.pad(x, 3, constant_values=np.nan)[3:-3, 3:-3, 3:-3, 3:-3],
    "heads-first": lambda x: np.ascontiguousarray(x.swapaxes(1, 2)).swapaxes(1, 2),
    "read-only": lambda x: np.frombuffer(x.tobytes(), x.dtype).reshape(x.shape),
}


STRIDED = {
    f"{name}-{dtype}": (STRIDES[name], dtype) for name in STRIDES for dtype in ("float32", "bfloat16", "float16")
}


@by_backend("change, dtype", cpu=STRIDED, simulator={name: row for name, row in STRIDED.items() if row[1] != "float16"})
def test_strides(change, dtype, backend):
    """Results depend on values alone, not on strides or on a read-only flag."""
    case = Case(q_len=6, kv_len=7, causal=True, dtype=dtype, head_dim=6, head_dim_v=5)
    q, k, v, options, dout, dlse, _ = case.call()
    call = Call(change(q), change(k), change(v), options, change(dout), dlse)
    check(case, run(case, backend, call))


def test_stride_zero(backend):
    """Broadcast arrays, whose elements share memory, give the same results as their copies."""
    case = Case(q_len=6, kv_len=7, bias="bhqk", mask="bhqk", sink=True)
    q, k, v, options, dout, dlse, _ = case.call()

    def shared(x):
        return np.broadcast_to(x[:1, :1], x.shape)

    options |= {name: shared(options[name]) for name in ("bias", "mask")}
    options["sink"] = np.broadcast_to(options["sink"][:1], options["sink"].shape)
    call = Call(shared(q), shared(k), shared(v), options, shared(dout), shared(dlse))
    check(case, run(case, backend, call), call=call)


def test_layouts_agree(backend):
    for case in (Case(causal=True, sink=True), Case(dropout=0.3, mask="b1qk")):
        a, b = run(case, backend), run(replace(case, layout="bhsd"), backend)
        for name in ("out", "dq", "dk", "dv"):
            np.testing.assert_array_equal(getattr(a, name), getattr(b, name).swapaxes(1, 2))
        np.testing.assert_array_equal(a.lse, b.lse)


def test_results_are_new_arrays(backend):
    """Results are contiguous, writable, and share no memory with the inputs."""
    q, k, v, *_ = Case(kv_len=1).call()
    out, lse = cupy_flash.attention(q, k, v, return_lse=True, backend=backend)
    for result in (out, lse):
        assert type(result) is np.ndarray and result.flags.c_contiguous and result.flags.writeable
        assert not any(np.shares_memory(result, x) for x in (q, k, v))
    assert type(cupy_flash.attention(q, k, v, backend=backend)) is np.ndarray


# Frameworks


FRAMEWORKS = [
    (framework, name) for framework in ("jax", "dlpack", "old_dlpack", "namespace") for name in ("float32", "bfloat16")
]
FRAMEWORKS += [("jax", "float16")]


@by_backend(
    "framework, name",
    cpu={"-".join(row): row for row in FRAMEWORKS},
    simulator={"jax-float32": ("jax", "float32"), "dlpack-bfloat16": ("dlpack", "bfloat16")},
    cuda={},  # these stand-ins hold CPU arrays; tests/gpu tests arrays on a GPU
)
def test_frameworks(framework, name, backend):
    """Arrays of another library give the same results as NumPy arrays, returned as arrays of that library or of
    NumPy.
    """
    case = Case(q_len=6, kv_len=7, dtype=name, causal=True, bias="1hqk", sink=True, kv_lengths=(5, 7))
    expected = run_public(case, backend)
    q, k, v, options, dout, dlse, _ = case.call()
    make = MAKERS[framework]
    options = {key: make(x) if isinstance(x, np.ndarray) else x for key, x in options.items()}
    options["backend"] = backend
    q, k, v, dout, dlse = map(make, (q, k, v, dout, dlse))
    out, lse = cupy_flash.attention(q, k, v, return_lse=True, **options)
    gradients = cupy_flash.attention_backward(dout, q, k, v, out, lse, dlse=dlse, **options)
    kind = {"jax": jnp.ndarray, "namespace": type(q)}.get(framework, np.ndarray)
    for actual, array in zip((out, lse, *gradients[:-1]), expected[:-1], strict=True):
        assert isinstance(actual, kind)
        actual = np.asarray(actual.tolist() if framework == "namespace" else actual)
        np.testing.assert_array_equal(actual.astype(np.float64), array.astype(np.float64))
