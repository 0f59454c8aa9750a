"""The backward on every backend: each option and all pairs of options against the formula, and invariants."""

from dataclasses import replace

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
    by_backend,
    check,
    outcome,
    posed,
    run,
    run_planned,
    run_public,
)
from producers import MAKERS

import cupy_flash
from cupy_flash.arrays import as_array
from cupy_flash.cpu import attention as cpu
from cupy_flash.problem.records import Gradients, Saved

pytestmark = pytest.mark.usefixtures("poisoned_memory")

GRADIENTS = Gradients._fields


@by_backend(exhaustive=SCORES_AGAIN, cpu=OPTIONS, simulator=SIMULATED_OPTIONS)
def test_every_option(case, backend):
    check(case, outcome(case, backend), only=GRADIENTS)


@by_backend(cpu=PAIRS, simulator=SIMULATED_PAIRS)
def test_all_pairs_of_options(case, backend):
    check(case, outcome(case, backend), only=GRADIENTS)


@pytest.mark.parametrize(("block_q", "block_kv"), [(16, 16), (7, 5), (8, 64), (70, 1), (64, 32)])
@pytest.mark.parametrize("case", [pytest.param(case, id=name) for name, case in TILED.items()])
def test_any_tiles(case, block_q, block_kv):
    """Other tiles than the planned one change results only by rounding."""
    check(case, run_planned(case, block_q=block_q, block_kv=block_kv), only=GRADIENTS)


@by_backend(
    "q_len, kv_len",
    cpu={"below": (511, 513), "above": (513, 513), "three-tiles": (1025, 513)},
    simulator={"below": (7, 15), "exact": (8, 32), "above": (9, 33), "many-tiles": (41, 81), "long": (513, 513)},
    exhaustive=["long"],
)
def test_lengths_around_the_plans_tiles(q_len, kv_len, backend):
    """Rounding errors do not accumulate over the tiles of a long sequence."""
    check(Case(q_len=q_len, kv_len=kv_len, batch=1, heads=2, causal=True), backend=backend, only=GRADIENTS)


def test_tiles_that_no_query_sees_are_not_computed(monkeypatch):
    """Each visited tile contains a visible pair, and each visible pair lies in exactly one visited tile."""
    visited = []
    recompute = cpu._QueryRows.recompute

    def recorded(rows, tile, K, V):
        visited.append((rows.band, tile))
        return recompute(rows, tile, K, V)

    monkeypatch.setattr(cpu._QueryRows, "recompute", recorded)
    case = Case(q_len=64, kv_len=64, window=(8, 4), q_lengths=(30, 64), kv_lengths=(64, 50))
    call, result = case.call(), run(case)
    visited.clear()
    saved = Saved(call.dout, result.out, result.lse, call.dlse)
    cpu.backward(*posed(case, saved, block_q=16, block_kv=16, threads=1))
    counts = {}
    for band, tile in visited:
        assert band.visible(*tile.queries, *tile.keys).any()
        count = counts.setdefault((tile.batch, tile.head), (band, np.zeros((band.q_len, band.kv_len), int)))[1]
        count[slice(*tile.queries), slice(*tile.keys)] += 1
    assert len(counts) == case.batch * case.heads
    for band, count in counts.values():
        assert (count[band.visible(0, band.q_len, 0, band.kv_len)] == 1).all()
        assert count.max() == 1
    assert len(visited) < 0.8 * case.batch * case.heads * 4 * 4


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(Case(causal=True, q_len=29), id="causal"),
        pytest.param(Case(causal=True, q_len=29, softcap=1.0), id="softcap"),
        pytest.param(Case(mask="bhqk", bias="bhqk", dropout=0.3), id="mask-bias-dropout"),
        pytest.param(Case(bias="11qk", bias_hides=True), id="bias-hides"),
        pytest.param(Case(kv_lengths=(0, 23), alibi="h"), id="zero-length"),
        pytest.param(Case(kv_len=0), id="no-keys"),
    ],
)
def test_rows_that_see_no_key_have_no_gradient(case, backend):
    """The gradients of such rows are 0 although dout and dlse are NaN there, as for a loss that contains lse = -inf."""
    call, result = case.call(), run(case, backend)
    dout, dlse = call.dout.copy(), call.dlse.copy()
    empty = np.isneginf(result.lse)
    assert empty.any()
    dout[empty.swapaxes(1, 2)] = np.nan
    dlse[empty] = np.nan
    poisoned = run(case, backend, call._replace(dout=dout, dlse=dlse))
    assert (poisoned.dq[empty.swapaxes(1, 2)] == 0).all()
    check(case, poisoned, only=GRADIENTS)


def test_keys_that_no_query_sees_have_no_gradient(backend):
    result = run(Case(q_len=20, kv_len=60, window=(3, 0), bias="bhqk"), backend)
    assert (result.dk[:, :37] == 0).all() and (result.dv[:, :37] == 0).all()
    assert (result.dk[:, 37:] != 0).all() and (result.dbias[..., :37] == 0).all()


def gradients(call, backend, dout=None, dlse=None):
    """Return gradients of a call with this dout and dlse."""
    out, lse = cupy_flash.attention(call.q, call.k, call.v, return_lse=True, backend=backend, **call.options)
    dout = np.zeros_like(out) if dout is None else dout
    return cupy_flash.attention_backward(
        dout, call.q, call.k, call.v, out, lse, dlse=dlse, backend=backend, **call.options
    )


def test_gradient_only_through_lse(backend):
    """The gradient of sum(lse) is P for the scores, 0 for v, and the sink's probability for the sink."""
    case = Case(sink=True, bias="bhqk", causal=True, q_len=29)
    call = case.call()
    zeros, ones = np.zeros_like(call.dout), np.ones_like(call.dlse)
    result = gradients(call, backend, zeros, ones)
    assert (result.dv == 0).all()
    out, lse = cupy_flash.attention(call.q, call.k, call.v, return_lse=True, backend=backend, **call.options)
    call = call._replace(dout=zeros, dlse=ones)
    check(case, Result(out, lse, *result), call=call)


def test_no_gradient_in_no_gradient_out(backend):
    """dlse=None is equivalent to zeros, and zero dout and dlse give zero gradients."""
    case = Case(sink=True, bias="1hqk")
    call = case.call()
    without, zero = gradients(call, backend), gradients(call, backend, dlse=np.zeros_like(call.dlse))
    # the last gradient, of captured arrays, is None without mods
    for a, b in zip(without[:-1], zero[:-1], strict=True):
        assert (a == 0).all() and (b == 0).all()


def test_gradients_are_linear_in_dout(backend):
    """Doubling dout and dlse doubles every gradient bitwise, because powers of two are exact."""
    call = Case(sink=True, bias="1hqk", causal=True, dropout=0.2).call()
    once = gradients(call, backend, call.dout, call.dlse)
    twice = gradients(call, backend, 2 * call.dout, 2 * call.dlse)
    for a, b in zip(once[:-1], twice[:-1], strict=True):  # the last gradient, of captured arrays, is None without mods
        np.testing.assert_array_equal(2 * a, b)


def test_stride_zero_dout(backend):
    """out.sum().backward() passes dout as a single element with strides of 0."""
    case = Case(causal=True, sink=True)
    call = case.call()
    one = np.ones((), np.float32)
    shared = call._replace(dout=np.broadcast_to(one, call.dout.shape), dlse=np.broadcast_to(one, call.dlse.shape))
    check(case, run(case, backend, shared), call=shared)


def test_results(backend):
    """Gradients are new contiguous arrays in the shape and dtype of the inputs, or None for absent inputs."""
    case = Case(dtype="bfloat16", bias="1hqk", bias_dtype="float32", sink=True, kv_lengths=(3, 20))
    call = case.call()
    read_only = Call(*(x.copy() if isinstance(x, np.ndarray) else x for x in call))
    for x in (*read_only, *read_only.options.values()):
        if isinstance(x, np.ndarray):
            x.flags.writeable = False
    result = run(case, backend, read_only)
    inputs = (call.q, call.k, call.v, call.options["bias"], call.options["sink"])
    for gradient, x in zip(result[2:-1], inputs, strict=True):
        assert type(gradient) is np.ndarray
        assert (gradient.shape, gradient.dtype) == (x.shape, x.dtype)
        assert gradient.flags.c_contiguous and gradient.flags.writeable
    for name in ("q", "k", "v", "dout", "dlse"):
        assert getattr(read_only, name).tobytes() == getattr(call, name).tobytes()
    plain = Case().call()
    result = gradients(plain, backend, plain.dout)
    assert isinstance(result, Gradients)
    assert result._fields == GRADIENTS
    assert result.dbias is None and result.dsink is None


def test_vjp(backend):
    """attention_vjp equals attention followed by attention_backward, also with a seed that it draws itself."""
    case = Case(causal=True, bias="1hqk", sink=True, dropout=0.3)
    q, k, v, options, dout, dlse, _ = case.call()
    expected = run_public(case, backend)
    (out, lse), vjp = cupy_flash.attention_vjp(q, k, v, return_lse=True, backend=backend, **options)
    for a, b in zip((out, lse, *vjp(dout, dlse)), expected, strict=True):
        np.testing.assert_array_equal(a, b)
    for a, b in zip(vjp(dout, dlse=dlse), expected[2:], strict=True):
        np.testing.assert_array_equal(a, b)
    out, vjp = cupy_flash.attention_vjp(q, k, v, backend=backend, **options)
    np.testing.assert_array_equal(out, expected.out)
    assert vjp(dout).dq.shape == q.shape
    with pytest.raises(ValueError, match="vjp: (.|\n)*dout must have the shape"):
        vjp(dout[:1])


@pytest.mark.parametrize("framework", ["numpy", "torch", "dlpack", "namespace", "jax"])
def test_vjp_keeps_references_or_copies(framework):
    """A change of any array before the call of vjp changes the gradients, except with copy=True."""
    case = Case(causal=True, bias="1hqk", sink=True, dropout=0.3, kv_lengths=(20, 9))
    q, k, v, options, dout, *_ = case.call()
    table = np.linspace(0.5, 1, q.shape[2], dtype=np.float32)
    given = {"q": q, "k": k, "v": v, **options, "seed": 5 if framework == "jax" else np.array([5])}
    make = MAKERS[framework]

    def gradients_after(change, copy):
        memory = {n: x.copy() if isinstance(x, np.ndarray) else x for n, x in given.items()} | {"table": table.copy()}
        arrays = {n: make(x) if isinstance(x, np.ndarray) else x for n, x in memory.items()}
        captured = arrays.pop("table")
        score_mod = cupy_flash.Mod(lambda s, b, h, i, j: s * table[h]).with_arrays((captured,))
        (out, lse), vjp = cupy_flash.attention_vjp(**arrays, score_mod=score_mod, return_lse=True, copy=copy)
        if change:
            for x in (*arrays.values(), captured, out, lse):
                if not isinstance(x, (int, float, bool, str)) and x is not None:
                    as_array(x, "x").numpy()[...] = 1
        gradients = vjp(make(dout))
        return [type(x) for x in gradients[:5]], [as_array(x, "x").numpy() for x in (*gradients[:5], *gradients[5])]

    kinds, expected = gradients_after(False, False)
    copied_kinds, copied = gradients_after(framework != "jax", True)
    assert copied_kinds == kinds
    for a, b in zip(copied, expected, strict=True):
        np.testing.assert_array_equal(a, b)
    if framework != "jax":
        assert not np.array_equal(gradients_after(True, False)[1][0], expected[0])


def test_vjp_keeps_the_seed_it_drew(backend):
    """If v is the identity, out and dv both show which probabilities were kept."""
    case = replace(Case(), q_len=16, kv_len=16, kv_heads=4, head_dim_v=16)
    q, k, v, *_ = case.call()
    v[...] = np.eye(16)[:, None]
    out, vjp = cupy_flash.attention_vjp(q, k, v, dropout=0.5, backend=backend)
    dv = vjp(np.broadcast_to(np.eye(16, dtype=np.float32)[:, None], out.shape)).dv  # dv[j, i] = P[i, j]
    np.testing.assert_array_equal(dv.swapaxes(1, 3) != 0, out != 0)
    assert 0.3 < (out == 0).mean() < 0.7
