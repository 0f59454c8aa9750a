"""Weights, the largest of a row and the importance of keys on jax arrays: gradients, jit, vmap, sharding."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from cupy_flash.adapters.jax import (
    attention,
    attention_varlen,
    attention_weights,
    attention_weights_varlen,
    key_importance,
    top_weights,
)

B, SQ, SK, H, HK, D = 2, 11, 13, 4, 2, 8


def normal(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


ARRAYS = normal(0, B, SQ, H, D), normal(1, B, SK, HK, D), normal(2, H, SQ, SK), normal(3, H, 40)
FACTORS = normal(4, B, H, SQ, SK)


def options_of(bias, table):
    return dict(bias=bias, causal=True, softcap=2.0, score_mod=lambda s, b, h, i, j: s + table[h, i - j + 20])


def dense(q, k, bias, table):
    s = jnp.einsum("bihd,bjhd->bhij", q, jnp.repeat(k, H // HK, 2)) / D**0.5
    i, j = np.arange(SQ)[:, None], np.arange(SK)
    s = 2 * jnp.tanh(s / 2) + bias + table[:, i - j + 20]
    return jax.nn.softmax(jnp.where(j <= i + SK - SQ, s, -jnp.inf), -1)


def through(function):
    """Return the loss of a function of (q, k, lse) and options, with the lse of attention."""

    def loss(q, k, bias, table):
        options = options_of(bias, table)
        _, lse = attention(q, k, k, return_lse=True, **options)
        return function(q, k, lse, **options).sum()

    return loss


KINDS = {
    "each": (lambda *x, **o: attention_weights(*x, **o) * FACTORS, lambda P: P * FACTORS),
    "mean": (
        lambda *x, **o: attention_weights(*x, rows=slice(-3, None), heads="mean", **o) ** 2,
        lambda P: P.mean(1)[:, -3:] ** 2,
    ),
    "top": (lambda *x, **o: top_weights(*x, 3, **o)[0] ** 2, lambda P: jax.lax.top_k(P, 3)[0] ** 2),
    "importance": (
        lambda *x, **o: key_importance(*x, row_weights=FACTORS[:, :1, :, 0], **o) ** 2,
        lambda P: (P * FACTORS[:, :1, :, :1]).sum(2) ** 2,
    ),
}


@pytest.mark.parametrize(("kind", "jitted"), [("each", False), ("mean", True), ("top", False), ("importance", True)])
def test_gradients_of_a_dense_softmax(kind, jitted):
    ours, formula = KINDS[kind]
    value, gradients = (jax.jit if jitted else lambda f: f)(jax.value_and_grad(through(ours), (0, 1, 2, 3)))(*ARRAYS)
    expected, others = jax.jit(jax.value_and_grad(lambda *x: formula(dense(*x)).sum(), (0, 1, 2, 3)))(*ARRAYS)
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    for one, other in zip(gradients, others, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=2e-5)


def test_vmap_runs_each_instance():
    q, k, *_ = ARRAYS

    def one(q, k):
        _, lse = attention(q[None], k[None], k[None], return_lse=True)
        return top_weights(q[None], k[None], lse, 2)

    for mapped, alone in zip(jax.vmap(one)(q, k), map(jnp.stack, zip(*map(one, q, k), strict=True)), strict=True):
        np.testing.assert_array_equal(mapped, alone)


@pytest.mark.parametrize("heads", ["each", "mean"])
def test_sharded_over_batch_and_heads(heads):
    """The results and gradients are those of one device; a mean gathers the heads first."""
    mesh = jax.make_mesh((2, 2), ("data", "model"))
    spec = PartitionSpec("data", None, "model")

    def loss(q, k):
        _, lse = attention(q, k, k, return_lse=True)
        return (attention_weights(q, k, lse, heads=heads) ** 2).sum() + (key_importance(q, k, lse) ** 2).sum()

    step = jax.jit(jax.value_and_grad(loss, (0, 1)))
    alone = step(*ARRAYS[:2])
    shards = step(*(jax.device_put(x, NamedSharding(mesh, spec)) for x in ARRAYS[:2]))
    for one, other in zip(jax.tree.leaves(shards), jax.tree.leaves(alone), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("heads", ["each", "mean", [3, 0]])
def test_packed_sequences_under_jit(heads):
    q, k = normal(0, SQ, H, D), normal(1, SK, HK, D)
    bounds = jnp.asarray([0, 4, SQ], jnp.int32), jnp.asarray([0, 9, SK], jnp.int32)

    def loss(q, k, *bounds):
        _, lse = attention_varlen(q, k, k, *bounds, 7, 9, return_lse=True)
        return (attention_weights_varlen(q, k, lse, *bounds, 7, 9, rows=[0, 5], heads=heads) ** 2).sum()

    def formula(q, k):
        s = jnp.einsum("ihd,jhd->hij", q, jnp.repeat(k, H // HK, 1)) / D**0.5
        rows = jax.nn.softmax(s[:, 0, :9]), jax.nn.softmax(s[:, 5, 9:])
        return sum(
            ((P.mean(0) if heads == "mean" else P if heads == "each" else P[np.array(heads)]) ** 2).sum() for P in rows
        )

    for one, other in zip(
        jax.jit(jax.grad(loss, (0, 1)))(q, k, *bounds), jax.jit(jax.grad(formula, (0, 1)))(q, k), strict=True
    ):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


def test_errors_while_jax_traces():
    q, k, *_ = ARRAYS
    lse = jnp.zeros((B, H, SQ))
    with pytest.raises(ValueError, match="more than limit = 10"):
        jax.jit(lambda q: attention_weights(q, k, lse, limit=10))(q)
    with pytest.raises(TypeError, match="rows must have a value while jax traces"):
        jax.jit(lambda rows: attention_weights(q, k, lse, rows=rows))(jnp.arange(2))
    with pytest.raises(ValueError, match=r"n must be in \[1, 2147483647\], not 0"):
        top_weights(q, k, lse, 0)
