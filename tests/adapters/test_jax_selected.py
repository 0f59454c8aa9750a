"""attention to selected keys on jax arrays: gradients, jit, vmap and sharded batches."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from cupy_flash.adapters.jax import attention, attention_with_kv_cache

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
