"""adapters.jax.dot_product_attention replaces jax.nn's by changing one import."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiers import in_tiers

from cupy_flash.adapters.jax import dot_product_attention

B, T, S, N, K, D = 2, 9, 13, 4, 2, 8


def normal(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


Q, KEY, V = normal(0, B, T, N, D), normal(1, B, S, K, D), normal(2, B, S, K, D)
# every query sees a key: for a query without one, jax averages all values
MASK = (normal(3, B, 1, T, S) > -0.5).at[..., 0].set(True)
CASES = {
    "plain": (Q, {}),
    "causal": (Q, dict(is_causal=True)),
    "bias-mask": (Q, dict(bias=normal(4, 1, N, T, S), mask=MASK, scale=0.3)),
    "window": (Q, dict(local_window_size=(3, 2))),
    "one-window": (Q, dict(local_window_size=2, is_causal=True)),
    "window-mask": (Q, dict(local_window_size=(20, 4), mask=MASK)),
    "lengths": (
        Q,
        dict(
            query_seq_lengths=jnp.array([9, 4], jnp.int32), key_value_seq_lengths=jnp.array([50, 3], jnp.int32),
        ),
    ),
    "padded-window": (
        Q, dict(local_window_size=(12, 1), key_value_seq_lengths=jnp.array([13, 9], jnp.int32)),
    ),
    "sequence": (Q[0], dict(is_causal=True, bias=normal(4, N, T, S))),
    "1-dimensional-mask": (Q, dict(mask=jnp.arange(S) <= S // 2)),
}  # fmt: skip


def test_signatures_are_equal():
    ours, expected = (
        inspect.signature(f).parameters.values() for f in (dot_product_attention, jax.nn.dot_product_attention)
    )
    assert [(p.name, p.kind, p.default) for p in ours] == [(p.name, p.kind, p.default) for p in expected]


@pytest.mark.parametrize("case", in_tiers({name: name for name in CASES}, ("window", "lengths")))
def test_output_lse_and_gradients_equal_jax(case):
    q, options = CASES[case]
    k, v = (KEY[0], V[0]) if q.ndim == 3 else (KEY, V)
    floating = {name: x for name, x in options.items() if name == "bias"}

    @functools.partial(jax.jit, static_argnums=0)
    def step(function, q, k, v, floating):
        def loss(q, k, v, floating):
            out, residual = function(q, k, v, **options | floating, return_residual=True)
            valid = jnp.ones(out.shape[:-1], bool)
            if "query_seq_lengths" in options:  # do not compare padded rows, whose lse jax computes from masked keys
                valid = jnp.arange(T)[:, None] < options["query_seq_lengths"][:, None, None]
            residual = jnp.where(valid, residual, 0)
            return jnp.sin(out).sum() + jnp.sin(residual).sum(), (out, residual)

        return jax.value_and_grad(loss, (0, 1, 2, 3), has_aux=True)(q, k, v, floating)

    results = [step(f, q, k, v, floating) for f in (dot_product_attention, jax.nn.dot_product_attention)]
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=2e-5, atol=2e-5), *results)


def test_a_query_without_keys_gives_zero():
    mask = jnp.zeros((T, S), bool).at[1].set(True)
    out, residual = dot_product_attention(Q, KEY, V, mask=mask, return_residual=True)
    assert not out[:, 0].any() and out[:, 1].all()
    assert jnp.isneginf(residual[:, 0]).all() and jnp.isfinite(residual[:, 1]).all()


def test_an_unknown_implementation_is_refused():
    with pytest.raises(ValueError, match="implementation must be one of"):
        dot_product_attention(Q, KEY, V, implementation="flash")


@pytest.mark.parametrize("queries", [T, S], ids=["rectangle", "square"])
@pytest.mark.parametrize("causal", [False, True], ids=["plain", "causal"])
@pytest.mark.parametrize("window", [(-1, 2), (3, -1), -1], ids=str)
def test_a_negative_side_of_a_window_equals_jax(window, causal, queries):
    q = normal(5, B, queries, N, D)
    left, right = window if isinstance(window, tuple) else (window, window)
    distance = jnp.arange(S) - jnp.arange(queries)[:, None]
    seen = (distance >= -left) & (distance <= (min(right, 0) if causal else right))
    options = dict(is_causal=causal, local_window_size=window)
    expected = jax.nn.dot_product_attention(q, KEY, V, **options)
    expected = jnp.where(seen.any(1)[:, None, None], expected, 0)
    np.testing.assert_allclose(dot_product_attention(q, KEY, V, **options), expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("window", [(None, 3), (1, 2, 3), 2.5], ids=str)
@pytest.mark.parametrize("queries", [T, S], ids=["rectangle", "square"])
def test_a_window_that_is_not_of_whole_numbers_is_refused(window, queries):
    with pytest.raises(TypeError, match="local_window_size must be None, a whole number or"):
        dot_product_attention(normal(5, B, queries, N, D), KEY, V, local_window_size=window)


def test_a_bias_of_integers_equals_jax():
    bias = jnp.arange(T * S).reshape(T, S) % 3
    results = [f(Q, KEY, V, bias=bias[None, None]) for f in (dot_product_attention, jax.nn.dot_product_attention)]
    np.testing.assert_allclose(*results, rtol=2e-5, atol=2e-5)


def test_errors_name_the_arguments_of_jax():
    with pytest.raises(ValueError, match="dot_product_attention: .*\n.*query and key must have one head dimension"):
        dot_product_attention(Q, KEY[..., :3], V)
