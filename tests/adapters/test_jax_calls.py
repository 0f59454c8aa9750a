"""The jax adapter under disable_jit, Ctrl-C and several devices, and with array-likes and unusual option values."""

from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cupy_flash.adapters.jax import append_to_kv_cache, attention, attention_with_kv_cache, ffi_execute
from cupy_flash.adapters.jax.static_call import Call

Q, K, V = jnp.asarray(np.random.default_rng(0).normal(size=(3, 1, 5, 2, 4)), jnp.float32)
gradient = jax.grad(lambda q: attention(q, K, V).sum())
TRANSFORMED = {
    "vmap": lambda: jax.vmap(lambda q: attention(q, K, V))(Q[None]),
    "vmap-grad": lambda: jax.vmap(gradient)(Q[None]),
    "checkpoint": lambda: jax.grad(jax.checkpoint(lambda q: attention(q, K, V).sum()))(Q),
    "append": lambda: append_to_kv_cache(K[:, :2], V[:, :2], K + 0, V + 0, cache_seqlens=1),
    "cache": lambda: attention_with_kv_cache(Q, K, V, cache_seqlens=4),
}


@pytest.mark.parametrize("case", TRANSFORMED)
def test_results_without_jit_are_the_same(case):
    expected = TRANSFORMED[case]()
    with jax.disable_jit():
        actual = TRANSFORMED[case]()
    jax.tree.map(np.testing.assert_array_equal, actual, expected)


@pytest.mark.parametrize("function", [lambda q: attention(q, K, V), gradient], ids=["forward", "grad"])
def test_ctrl_c_in_a_compiled_call_is_a_keyboard_interrupt(function, monkeypatch):
    def interrupted(*arguments):
        raise KeyboardInterrupt

    compiled = jax.jit(function).lower(Q).compile()
    with monkeypatch.context() as context:
        context.setattr(Call, "run", interrupted)
        with pytest.raises(KeyboardInterrupt):
            jax.block_until_ready(compiled(Q))
    np.testing.assert_allclose(compiled(Q), function(Q), rtol=1e-6)  # later calls still work


LIKE = {
    "mask": dict(mask=[[True] * 4 + [False]] * 5),
    "bias": dict(bias=1.0),
    "lengths": dict(q_lengths=[3]),
    "window-numpy": dict(window=np.array([2, 1])),
    "window-jax": dict(window=jnp.array([2, 1])),
    "fraction": dict(scale=Fraction(3, 10)),
}
PLAIN = {
    "mask": dict(mask=np.array([[True] * 4 + [False]] * 5)),
    "bias": dict(bias=np.ones((), np.float32)),
    "lengths": dict(q_lengths=np.array([3], np.int32)),
    "fraction": dict(scale=0.3),
}


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("case", LIKE)
def test_array_likes_are_accepted_as_options(case, transform):
    actual = transform(lambda q: attention(q, K, V, **LIKE[case]))(Q)
    np.testing.assert_array_equal(actual, attention(Q, K, V, **PLAIN.get(case, dict(window=(2, 1)))))


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_an_option_that_is_no_array_is_named(transform):
    with pytest.raises(TypeError, match=r"attention: bias \(str\) is no array"):
        transform(lambda q: attention(q, K, V, bias="x"))(Q)


def test_arrays_on_different_devices_are_refused():
    first, second = jax.devices()[:2]
    with pytest.raises(ValueError, match="all arrays must be on one device, not .*k, v on"):
        attention(jax.device_put(Q, first), *jax.device_put((K, V), second))
    q = jax.device_put(Q, second)
    np.testing.assert_array_equal(attention(q, np.asarray(K), np.asarray(V)), attention(Q, K, V))


def test_other_lengths_of_a_cache_compile_nothing():
    k, v = K[:, :1], V[:, :1]
    before = ffi_execute._program.cache_info().misses
    caches = K + 0, V + 0
    for position in range(4):
        caches = append_to_kv_cache(k, v, *caches, cache_seqlens=position)
    assert ffi_execute._program.cache_info().misses <= before + 1
    np.testing.assert_array_equal(caches[0][:, :4], jnp.broadcast_to(k, (1, 4, 2, 4)))
    np.testing.assert_array_equal(caches[0][:, 4:], K[:, 4:])


@pytest.mark.parametrize("function", [lambda q: attention(q, K, V), gradient], ids=["forward", "grad"])
def test_vmap_over_an_empty_axis(function):
    assert jax.vmap(function)(Q[None][:0]).shape == (0, *Q.shape)


@pytest.mark.parametrize("name", ["scale", "softcap"])
@pytest.mark.parametrize("value", [np.ones(2), 1j, True], ids=["vector", "complex", "bool"])
def test_traced_numbers_are_checked_while_jax_traces(name, value):
    with pytest.raises(TypeError, match=f"attention: {name} must be a number, not"):
        jax.eval_shape(lambda x: attention(Q, K, V, **{name: x}), jnp.asarray(value))


def test_a_key_as_seed_is_refused_with_advice():
    with pytest.raises(TypeError, match=r"one integer, not key<fry> \(\): of a key, pass jax.random.bits"):
        attention(Q, K, V, dropout=0.5, seed=jax.random.key(0))


def test_debug_nans_names_attention():
    q = Q.at[0, 0, 0, 0].set(jnp.nan)
    with jax.debug_nans(True), pytest.raises(FloatingPointError, match=r"attention: invalid value \(nan\) in out"):
        attention(q, K, V)
    with jax.debug_nans(True):
        assert attention(Q, K, V, kv_lengths=np.zeros(1, np.int32)).sum() == 0  # rows without keys have lse = -inf
