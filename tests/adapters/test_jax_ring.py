"""Ring attention for jax on four host devices equals attention on one."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec
from tiers import in_tiers

from cupy_flash.adapters.jax import attention, ring_attention, ring_positions

DEVICES, B, S, H, HK, D = 4, 2, 32, 4, 2, 8


@pytest.fixture(autouse=True)
def _fp64():
    with jax.enable_x64(True):
        yield


def normal(seed, *shape, dtype="float64"):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def mesh_of():
    return jax.make_mesh((DEVICES,), ("ring",), axis_types=(AxisType.Auto,))


# (sharding, options)
CASES = {
    "causal-zigzag": ("zigzag", dict(causal=True)),
    "causal-contiguous": ("contiguous", dict(causal=True)),
    "causal-striped": ("striped", dict(causal=True)),
    "full": ("zigzag", {}),
    "window": ("contiguous", dict(causal=True, window=(5, 0))),
    "window-zigzag": ("zigzag", dict(window=(9, 3))),
    "dropout": ("zigzag", dict(causal=True, dropout=0.3, seed=7)),
    "softcap-alibi": (
        "zigzag",
        dict(causal=True, softcap=2.0, alibi_slopes=jnp.asarray(np.linspace(0.1, 1, H), jnp.float32)),
    ),
    "sink": ("zigzag", dict(causal=True, sink="sink")),
    "seed-array": ("striped", dict(dropout=0.3, seed=np.array([9]))),
    "bhsd": ("zigzag", dict(causal=True, layout="bhsd")),
}


@pytest.mark.parametrize("case", in_tiers({name: name for name in CASES}, ("causal-zigzag", "window")))
@pytest.mark.parametrize("lengths", in_tiers({"equal": (S, S), "more-keys": (S, 2 * S)}, ("equal",)))
def test_results_and_gradients_equal_one_device(case, lengths):
    sharding, options = CASES[case]
    q, k, v = (
        normal(n, B, length, heads, D) for n, (length, heads) in enumerate(((lengths[0], H), *[(lengths[1], HK)] * 2))
    )
    axis = 1
    if options.get("layout") == "bhsd":
        q, k, v, axis = *(x.swapaxes(1, 2) for x in (q, k, v)), 2
    operands = dict(q=q, k=k, v=v) | ({"sink": normal(5, H)} if "sink" in options else {})
    options = {name: value for name, value in options.items() if name != "sink"}

    def loss(function, operands):
        out, lse = function(**operands)
        return jnp.sin(out).sum() + jnp.where(jnp.isfinite(lse), lse**2, 0).sum(), (out, lse)

    whole = functools.partial(attention, return_lse=True, **options)
    (_, (out, lse)), gradients = jax.value_and_grad(functools.partial(loss, whole), has_aux=True)(operands)

    spec, lse_spec = PartitionSpec(*[None] * axis, "ring"), PartitionSpec(None, None, "ring")
    specs = {name: PartitionSpec() if name == "sink" else spec for name in operands}

    def ring(operands):
        return ring_attention(**operands, axis_name="ring", sharding=sharding, return_lse=True, **options)

    mapped = jax.shard_map(ring, mesh=mesh_of(), in_specs=(specs,), out_specs=(spec, lse_spec))
    orders = {name: ring_positions(x.shape[axis], DEVICES, sharding) for name, x in operands.items() if name != "sink"}

    def on_ring(**operands):
        permuted = {name: x.take(orders[name], axis) if name in orders else x for name, x in operands.items()}
        out, lse = mapped(permuted)
        back = np.argsort(orders["q"])
        return out.take(back, axis), lse.take(back, 2)

    step = jax.jit(jax.value_and_grad(functools.partial(loss, on_ring), has_aux=True))
    (_, (actual, actual_lse)), actual_gradients = step(operands)
    np.testing.assert_allclose(actual, out, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(actual_lse, lse, rtol=1e-12, atol=1e-12)
    for name, gradient in gradients.items():
        np.testing.assert_allclose(actual_gradients[name], gradient, rtol=1e-12, atol=1e-12, err_msg=name)


def test_a_window_ends_the_ring_early():
    q = normal(0, B, S, H, D)
    spec = PartitionSpec(None, "ring")
    ring = functools.partial(ring_attention, axis_name="ring", sharding="contiguous", causal=True)

    def moves(**options):
        mapped = jax.shard_map(functools.partial(ring, **options), mesh=mesh_of(), in_specs=(spec,) * 3, out_specs=spec)
        return str(jax.make_jaxpr(mapped)(q, q, q)).count("ppermute[")

    assert moves() == 2 * (DEVICES - 1) and moves(window=(3, 0)) == 2


@pytest.mark.parametrize("sharding", ["zigzag", "contiguous", "striped"])
def test_positions(sharding):
    owners = np.empty(16, int)
    for device, shard in enumerate(ring_positions(16, 4, sharding).reshape(4, -1)):
        owners[shard] = device
    expected = {"zigzag": "0011223333221100", "contiguous": "0000111122223333", "striped": "0123" * 4}[sharding]
    assert "".join(map(str, owners)) == expected


WRONG = {
    "uneven": (dict(), S + 4, "zigzag shards of 4 devices need a multiple of 8, not 36"),
    "sharding": (dict(sharding="odd"), S, "sharding must be one of"),
    "mask": (dict(mask=jnp.ones((1, 1, 1, 1), bool)), S, "mask is not served over several devices"),
    "seed": (dict(dropout=0.5), S, "dropout needs a seed here"),
}


@pytest.mark.parametrize("case", WRONG)
def test_refused(case):
    options, length, message = WRONG[case]
    q, spec = normal(0, B, length, H, D), PartitionSpec(None, "ring")
    ring = functools.partial(ring_attention, axis_name="ring", **options)
    with pytest.raises(ValueError, match=message):
        jax.shard_map(ring, mesh=mesh_of(), in_specs=(spec,) * 3, out_specs=spec)(q, q, q)
