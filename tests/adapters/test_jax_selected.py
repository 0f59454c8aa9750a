"""attention to selected keys on jax arrays: gradients, jit, vmap and sharded batches."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import cupy_flash
from cupy_flash.adapters.jax import (
    attention,
    attention_weights,
    attention_with_kv_cache,
    select_keys,
    selection_loss,
)

rng = np.random.default_rng(0)
Q, K, V = (rng.normal(size=(2, 9, heads, 8)).astype(np.float32) for heads in (4, 2, 2))
LISTS = np.argsort(rng.random((2, 2, 9, 9)))[..., :4].astype(np.int32)
NAMED = (LISTS[..., None] == np.arange(9)).any(axis=3).repeat(2, axis=1)


def loss(q, k, v, lists=LISTS):
    return (attention(q, k, v, selected=lists, causal=True) ** 2).sum()


def dense(q, k, v):
    return (attention(q, k, v, mask=NAMED, causal=True) ** 2).sum()


@pytest.mark.parametrize("jitted", [False, True])
def test_gradients_are_those_of_a_mask(jitted):
    wrap = jax.jit if jitted else lambda f: f
    found, expected = (wrap(jax.value_and_grad(f, (0, 1, 2)))(Q, K, V) for f in (loss, dense))
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-4, atol=1e-5)


def test_second_derivatives_and_forward_mode_are_those_of_a_mask():
    def results(f):
        gradient = jax.grad(f)
        moved = jax.jvp(lambda q: gradient(q, K, V), (Q,), (np.cos(Q),))[1]
        return jax.jvp(f, (Q, K, V), (Q, V, K))[1], moved, jax.grad(lambda k: (gradient(Q, k, V) ** 2).sum())(K)

    for x, y in zip(jax.jit(results, static_argnums=0)(loss), results(dense), strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-3, atol=1e-3)


def test_vmap_runs_instance_by_instance():
    found = jax.vmap(loss)(Q[None], K[None], V[None], LISTS[None])
    np.testing.assert_allclose(found[0], loss(Q, K, V), rtol=1e-6)


def test_lists_are_checked_unless_jax_has_compiled_the_call():
    twice = LISTS * 0
    with pytest.raises(ValueError, match="names key 0 twice"):
        attention(Q, K, V, selected=twice)
    assert jax.jit(loss)(Q, K, V, twice).shape == ()


def test_batch_and_heads_that_are_sharded():
    """Lists are sharded with the batch; with sharded heads, every device computes all of them."""
    mesh = Mesh(np.array(jax.devices()[:2]), ("x",))
    for spec in (PartitionSpec("x"), PartitionSpec(None, None, "x")):
        q, k, v = (jax.device_put(x, NamedSharding(mesh, spec)) for x in (Q, K, V))
        found = jax.jit(jax.grad(loss, (0, 1, 2)))(q, k, v, jnp.asarray(LISTS))
        for x, y in zip(found, jax.grad(loss, (0, 1, 2))(Q, K, V), strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-6)


def test_lists_of_keys_in_a_cache():
    out = attention_with_kv_cache(Q, K, V, selected=LISTS)
    np.testing.assert_allclose(out, attention(Q, K, V, selected=LISTS, causal=True), rtol=1e-4, atol=1e-5)


Q_IDX, WEIGHTS, K_IDX = (rng.normal(size=shape).astype(np.float32) for shape in ((2, 9, 3, 8), (2, 9, 3), (2, 11, 8)))
TARGET = rng.random((2, 9, 4)).astype(np.float32)


def indexer_loss(q, w, k, target=TARGET):
    return 2 * selection_loss(q, w, k, select_keys(q, w, k, 4), target)


@pytest.mark.parametrize("jitted", [False, True])
def test_an_indexer(jitted):
    wrap = jax.jit if jitted else lambda f: f
    lists = cupy_flash.select_keys(Q_IDX, WEIGHTS, K_IDX, 4)
    np.testing.assert_array_equal(wrap(lambda *x: select_keys(*x, 4))(Q_IDX, WEIGHTS, K_IDX), lists)
    loss, gradients = wrap(jax.value_and_grad(indexer_loss, (0, 1, 2)))(Q_IDX, WEIGHTS, K_IDX)
    expected, of_numpy = cupy_flash.selection_loss_vjp(Q_IDX, WEIGHTS, K_IDX, lists, TARGET)
    np.testing.assert_array_equal(loss, 2 * expected)
    for x, y in zip(gradients, of_numpy, strict=True):
        np.testing.assert_allclose(x, 2 * y, rtol=1e-5, atol=1e-6)


def test_an_indexer_under_vmap_and_with_a_sharded_batch():
    arrays = (Q_IDX, WEIGHTS, K_IDX, TARGET)
    expected = jax.value_and_grad(indexer_loss)(*arrays)
    instances = jax.vmap(indexer_loss)(*(x[:, None] for x in arrays))
    np.testing.assert_allclose(instances.sum(), expected[0], rtol=1e-6)
    mesh = Mesh(np.array(jax.devices()[:2]), ("x",))
    found = jax.jit(jax.value_and_grad(indexer_loss))(
        *(jax.device_put(x, NamedSharding(mesh, PartitionSpec("x"))) for x in arrays)
    )
    for x, y in zip(found, expected, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-6)


def test_wrong_arguments_of_an_indexer_are_refused():
    with pytest.raises(ValueError, match="must have one batch size"):
        jax.jit(lambda q, w, k: select_keys(q, w, k, 4))(Q_IDX, WEIGHTS, K_IDX[:1])
    with pytest.raises(ValueError, match="names key 0 twice"):
        selection_loss(Q_IDX, WEIGHTS, K_IDX, np.zeros((2, 1, 9, 4), np.int32), TARGET)


def test_weights_at_the_lists():
    _, lse = attention(Q, K, V, return_lse=True)
    expected = np.take_along_axis(np.asarray(attention_weights(Q, K, lse)), LISTS.repeat(2, axis=1), axis=3)
    found = jax.jit(lambda *x: attention_weights(*x, selected=LISTS))(Q, K, lse)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
