"""statistics= of attention on jax arrays: gradients in reverse mode, jit, vmap, caches, and what is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

import cupy_flash
from cupy_flash import UnsupportedError
from cupy_flash.adapters.jax import attention, attention_jvp, attention_varlen, attention_with_kv_cache


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


def arrays(*shapes):
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.normal(size=shape)) for shape in shapes]


def test_max_and_entropy_are_differentiable_eager_and_under_jit():
    q, k, v, sink = arrays((2, 5, 4, 3), (2, 6, 2, 3), (2, 6, 2, 2), (4,))

    def attend(q, k, v, sink):
        asked = dict(return_lse=True, statistics=("max", "entropy"))
        out, lse, found = attention(q, k, v, causal=True, sink=sink, **asked)
        assert found.argmax is None
        return out, lse, found.max, found.entropy

    check_grads(attend, (q, k, v, sink), 1, modes=["rev"])
    for eager, jitted in zip(attend(q, k, v, sink), jax.jit(attend)(q, k, v, sink), strict=True):
        np.testing.assert_allclose(eager, jitted, rtol=0, atol=1e-12)
    eager, jitted = (jax.grad(lambda *x, of=f: of(*x)[3].sum())(q, k, v, sink) for f in (attend, jax.jit(attend)))
    np.testing.assert_allclose(eager, jitted, rtol=0, atol=1e-12)


def test_results_are_those_of_numpy():
    q, k, v = arrays((2, 5, 4, 3), (2, 6, 2, 3), (2, 6, 2, 2))
    asked = dict(return_lse=True, statistics=["argmax", "entropy"])
    expected = cupy_flash.attention(*map(np.asarray, (q, k, v)), **asked)[2]
    mapped = jax.vmap(lambda q: attention(q, k, v, **asked)[2].argmax)(q[None])
    found = attention(q, k, v, **asked)[2]
    assert found.argmax.dtype == np.int32 and found.max is None
    np.testing.assert_array_equal(found.argmax, expected.argmax)
    np.testing.assert_array_equal(mapped[0], expected.argmax)
    np.testing.assert_allclose(found.entropy, expected.entropy, rtol=0, atol=1e-12)
    bounds = jnp.asarray([0, 5], jnp.int32), jnp.asarray([0, 6], jnp.int32)
    packed = attention_varlen(q[0], k[0], v[0], *bounds, 5, 6, **asked)[2]
    np.testing.assert_array_equal(packed.argmax, expected.argmax[0])
    cached = attention_with_kv_cache(q, k, v, causal=False, **asked)[2]
    np.testing.assert_array_equal(cached.argmax, expected.argmax)


def test_what_is_wrong_or_missing_is_refused_by_name():
    q, k, v = arrays((1, 3, 2, 4), (1, 5, 2, 4), (1, 5, 2, 4))
    for options, error, reason in (
        (dict(statistics=("max",)), ValueError, "statistics need return_lse=True"),
        (dict(statistics=("mean",), return_lse=True), ValueError, "statistics must be some of max, argmax, entropy"),
        (dict(statistics=3, return_lse=True), TypeError, "statistics must be a tuple"),
    ):
        with pytest.raises(error, match=reason):
            attention(q, k, v, **options)
        with pytest.raises(error, match=reason):
            attention_with_kv_cache(q, k, v, **options)
    with pytest.raises(UnsupportedError, match="statistics have no tangents"):
        attention_jvp(q, k, v, q, return_lse=True, statistics=("max",))
