"""jax attention on four host devices: jit keeps the shards of batch and heads, and results equal those of one
device.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from tiers import exhaustive, in_tiers

from cupy_flash.adapters.jax import attention, attention_varlen, sharding, static_call

B, S, H, HK, D = 4, 24, 4, 2, 8
WHOLE, BATCH, HEADS = PartitionSpec(), PartitionSpec("data"), PartitionSpec("data", None, "model")


def mesh_of(kind):
    return jax.make_mesh((2, 2), ("data", "model"), axis_types=(kind,) * 2)


def normal(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


QKV = dict(q=normal(0, B, S, H, D), k=normal(1, B, S, HK, D), v=normal(2, B, S, HK, D))
TABLE = normal(5, B, H)


def modified(score, b, h, i, j, table):
    return score * table[b, h] + 0.1 * b


def with_mod(q, k, v, table, **options):
    return attention(q, k, v, score_mod=lambda s, b, h, i, j: modified(s, b, h, i, j, table), **options)


# (function, further operands, options)
CASES = {
    "plain": (attention, {}, dict(causal=True)),
    "dropout": (attention, {}, dict(dropout=0.3, seed=3)),
    "sink-bias": (attention, dict(sink=normal(3, H), bias=normal(4, 1, H, S, S)), {}),
    "alibi-lengths": (
        attention,
        {},
        dict(alibi_slopes=normal(6, B, H), kv_lengths=jnp.asarray([24, 3, 0, 9], jnp.int32)),
    ),
    "mod-dropout": (with_mod, dict(table=TABLE), dict(dropout=0.2, seed=jnp.asarray([9]))),
}


def step_of(function, options):
    def loss(operands):
        out, lse = function(**operands, return_lse=True, **options)
        return (out**2).sum() + jnp.where(jnp.isfinite(lse), jnp.sin(lse), 0).sum(), out

    return jax.value_and_grad(loss, has_aux=True)


def sharded(mesh, operands, spec):
    return {
        name: jax.device_put(x, NamedSharding(mesh, spec if name in QKV else WHOLE)) for name, x in operands.items()
    }


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
@pytest.mark.parametrize("case", in_tiers({name: name for name in CASES}, ("sink-bias", "mod-dropout")))
def test_shards_are_kept_and_results_equal_one_device(case, kind):
    function, further, options = CASES[case]
    operands = QKV | further
    step = step_of(function, options)
    (_, out), gradients = step(operands)
    with jax.set_mesh(mesh := mesh_of(kind)):
        given = sharded(mesh, operands, HEADS)
        program = jax.jit(step).lower(given).compile()
        (_, actual), actual_gradients = program(given)
    text = program.as_text()
    # With explicit axes the gradient of a replicated sink or bias is replicated, which needs an all-gather.
    assert kind is AxisType.Explicit or ("all-gather" not in text and "all-to-all" not in text)
    assert actual.sharding.is_equivalent_to(NamedSharding(mesh, HEADS), 4)
    np.testing.assert_array_equal(actual, out)
    for name, gradient in gradients.items():
        if name in QKV:
            assert actual_gradients[name].sharding.is_equivalent_to(NamedSharding(mesh, HEADS), 4)
            np.testing.assert_array_equal(actual_gradients[name], gradient)
        else:  # these gradients are sums over devices, which round differently
            np.testing.assert_allclose(actual_gradients[name], gradient, rtol=1e-5, atol=1e-5)


@pytest.mark.exhaustive
def test_a_constant_query_takes_the_explicit_shards_of_the_keys():
    with jax.set_mesh(mesh := mesh_of(AxisType.Explicit)):
        given = sharded(mesh, QKV, HEADS)
        call = jax.jit(lambda k, v: attention(QKV["q"], k, v))
        assert jax.eval_shape(call, given["k"], given["v"]).sharding.spec[:3] == tuple(HEADS)
        out = call(given["k"], given["v"])
    assert out.sharding.is_equivalent_to(NamedSharding(mesh, HEADS), 4)
    np.testing.assert_array_equal(out, attention(**QKV))


@pytest.mark.parametrize("spec", [BATCH, PartitionSpec(("data", "model"))], ids=str)
def test_a_batch_over_one_or_all_axes(spec):
    options = dict(dropout=0.3, seed=3)
    mesh = mesh_of(AxisType.Auto)
    out = jax.jit(functools.partial(attention, **options))(**sharded(mesh, QKV, spec))
    assert out.sharding.is_equivalent_to(NamedSharding(mesh, spec), 4)
    np.testing.assert_array_equal(out, attention(**QKV, **options))


@pytest.mark.parametrize("kind", [AxisType.Auto, exhaustive(AxisType.Explicit)], ids=str)
def test_eager_call_and_gradient_of_sharded_arrays(kind):
    step = step_of(attention, dict(causal=True))
    (_, out), gradients = step(QKV)
    with jax.set_mesh(mesh := mesh_of(kind)):
        (_, actual), actual_gradients = step(sharded(mesh, QKV, HEADS))
    assert actual.sharding.is_equivalent_to(NamedSharding(mesh, HEADS), 4)
    np.testing.assert_array_equal(actual, out)
    for name, gradient in gradients.items():
        assert actual_gradients[name].sharding.is_equivalent_to(NamedSharding(mesh, HEADS), 4)
        np.testing.assert_array_equal(actual_gradients[name], gradient)


def test_more_devices_than_key_value_heads():
    """A device gets the keys of its query heads' GQA groups, however the key/value heads were sharded."""
    mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,))
    q = jax.device_put(QKV["q"], NamedSharding(mesh, PartitionSpec(None, None, "x")))
    k, v = (jax.device_put(QKV[name], NamedSharding(mesh, WHOLE)) for name in "kv")
    np.testing.assert_array_equal(jax.jit(attention)(q, k, v), attention(**QKV))


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def test_a_sharded_sequence_is_an_error_that_names_ring_attention(kind):
    with jax.set_mesh(mesh := mesh_of(kind)):
        operands = sharded(mesh, QKV, PartitionSpec(None, "data"))
        with pytest.raises(
            (ValueError, jax.errors.JaxRuntimeError), match="is sharded over data: use .*ring_attention"
        ):
            jax.jit(attention)(**operands)


def test_the_table_of_shards():
    """The table of shards that a GPU's handler reads, compared with shards of arrays that hold their own indices."""
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    operands = sharded(mesh, QKV, PartitionSpec("data", None, "model"))
    call = static_call.parse(
        static_call.Call(
            "forward", static_call.Static(**dict.fromkeys(static_call.Static._fields) | {"layout": "bshd"}), (*"qkv",)
        ).text
    )
    split = sharding._split(call, mesh, operands.values())
    numbers = jax.device_put(jnp.indices((B, S, H, D)), NamedSharding(mesh, PartitionSpec(None, *HEADS)))
    places = {
        f"0:{shard.device.local_hardware_id}": shard.data[(0, 2), 0, 0, 0, 0].tolist()
        for shard in numbers.addressable_shards
    }
    assert len(places) == 4 and split.places() == places


def test_packed_heads_are_sharded():
    mesh = mesh_of(AxisType.Auto)
    packed = {name: x.reshape(-1, *x.shape[2:]) for name, x in QKV.items()}
    bounds = jnp.asarray([0, 5, 40, B * S], jnp.int32)
    call = jax.jit(lambda q, k, v: attention_varlen(q, k, v, bounds, bounds, 56, 56, causal=True, dropout=0.2, seed=1))
    spec = PartitionSpec(None, "model")
    out = call(**sharded(mesh, packed, spec))
    assert out.sharding.is_equivalent_to(NamedSharding(mesh, spec), 3)
    np.testing.assert_array_equal(out, call(**packed))


@pytest.mark.parametrize("check_vma", [True, False])
def test_shard_map_with_gradients(check_vma):
    mesh, sink = mesh_of(AxisType.Auto), normal(3, H)
    specs = (HEADS, HEADS, HEADS, PartitionSpec("model"))

    def per_shard(q, k, v, sink):
        return attention(q, k, v, causal=True, sink=sink)

    mapped = jax.shard_map(per_shard, mesh=mesh, in_specs=specs, out_specs=HEADS, check_vma=check_vma)
    differentiate = [jax.grad(lambda *x, f=f: (f(*x) ** 2).sum(), (0, 1, 2, 3)) for f in (mapped, per_shard)]
    operands = (*QKV.values(), sink)
    np.testing.assert_array_equal(jax.jit(mapped)(*operands), per_shard(*operands))
    for one, other in zip(jax.jit(differentiate[0])(*operands), differentiate[1](*operands), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


def test_pmap_and_vmap_of_sharded_arrays():
    def per_sequence(q, k, v):
        return attention(q[None], k[None], v[None], causal=True)[0]

    expected = attention(**QKV, causal=True)
    np.testing.assert_array_equal(jax.pmap(per_sequence)(*QKV.values()), expected)
    mesh = mesh_of(AxisType.Auto)
    out = jax.jit(jax.vmap(per_sequence))(*sharded(mesh, QKV, HEADS).values())
    assert out.sharding.is_equivalent_to(NamedSharding(mesh, HEADS), 4)
    np.testing.assert_array_equal(out, expected)
