"""jax attention under transformations: vmap as one call, export, donation, and the debugging modes."""

import functools

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from tiers import in_tiers

from cupy_flash.adapters.jax import attention, attention_varlen, ffi_handler, static_call

N, B, S, H, HK, D = 3, 2, 9, 4, 2, 8


def normal(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


SHAPES = dict(q=(B, S, H, D), k=(B, S, HK, D), v=(B, S, HK, D), bias=(1, H, S, S), sink=(H,), alibi_slopes=(H,))
LENGTHS = jnp.asarray([[9, 4], [0, 1], [5, 5]], jnp.int32)

# (vmap axes of the operands, operands that all instances share, options, number of calls of the handler)
VMAPS = {
    "qkv": (dict(q=0, k=0, v=0), {}, dict(causal=True), 1),
    "other-axes": (dict(q=2, k=4, v=-1), {}, {}, 1),
    "keys-shared": (dict(q=1), dict(k=1, v=2), {}, 1),
    "bias-shared": (dict(q=0, k=0, v=0), dict(bias=3), {}, 1),
    "bias": (dict(q=0, k=0, v=0, bias=1), {}, {}, 1),
    "sink": (dict(q=0, k=0, v=0, sink=0), dict(bias=3), {}, 1),
    "sink-shared": (dict(q=0, k=0, v=0), dict(sink=3), dict(layout="bhsd"), 1),
    "alibi": (dict(q=0, k=0, v=0, alibi_slopes=0), {}, {}, 1),
    "dropout": (dict(q=0, k=0, v=0), {}, dict(dropout=0.4, seed=5), N),
    "sink-lengths": (dict(q=0, k=0, v=0, sink=0, kv_lengths=0), {}, {}, N),
    "lengths": (dict(q=0, k=0, v=0, kv_lengths=0), {}, {}, 1),
}


@pytest.mark.parametrize("case", in_tiers(VMAPS, ("other-axes", "keys-shared", "bias-shared", "sink")))
def test_vmap_is_one_call_and_equals_a_loop(case, monkeypatch):
    axes, shared, options, count = case
    layout = options.get("layout", "bshd")
    shapes = {name: (s[0], s[2], s[1], s[3]) if layout == "bhsd" and name in "qkv" else s for name, s in SHAPES.items()}
    per_instance = {
        name: LENGTHS if name == "kv_lengths" else normal(seed, N, *shapes[name]) for seed, name in enumerate(axes)
    }
    same = {name: normal(10 + seed, *shapes[name]) for seed, name in enumerate(shared)}
    given = {name: jnp.moveaxis(x, 0, axes[name]) for name, x in per_instance.items()}
    weights = normal(20, *shapes["q"])

    def step(operands):
        lengths = {name: x for name, x in operands.items() if name == "kv_lengths"}
        operands = {name: x for name, x in operands.items() if name not in lengths}

        def loss(operands):
            out, lse = attention(**operands, **lengths, **options, return_lse=True)
            return (out * weights).sum() + jnp.where(jnp.isfinite(lse), jnp.sin(lse), 0).sum(), out

        return jax.grad(loss, has_aux=True)(operands | same)

    expected = [step({name: x[n] for name, x in per_instance.items()}) for n in range(N)]
    expected = jax.tree.map(lambda *x: jnp.stack(x), *expected)
    steps = []
    run = static_call.Call.run
    monkeypatch.setattr(static_call.Call, "run", lambda call, *arrays: steps.append(call.step) or run(call, *arrays))
    actual = jax.block_until_ready(jax.jit(jax.vmap(step, in_axes=(axes,)))(given))
    assert sorted(steps) == ["backward"] * count + ["forward"] * count
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5), actual, expected)


def modified(sink, q, k, v, table, documents):
    """Return a loss through mods that read positions and two captured arrays."""
    out, lse = attention(
        q, k, v, sink=sink, return_lse=True,
        score_mod=lambda s, b, h, i, j: s * table[b, h] + 0.1 * b - 0.05 * h * (j - i),
        mask_mod=lambda b, h, i, j: (documents[b, i] == documents[b, j]) | (j == 0) | (b == 1),
    )  # fmt: skip
    return (out**3).sum() + jnp.where(jnp.isfinite(lse), jnp.sin(lse), 0).sum()


MODS = {
    "batch": (None, (0, 0, 0, 0, 0)),
    "heads": (normal(9, H), (0, 0, 0, 0, 0)),
    "arrays-shared": (None, (0, 0, 0, None, None)),
    "arrays-alone": (None, (None, None, None, 0, 0)),
}


@pytest.mark.parametrize("case", in_tiers({name: name for name in MODS}, ("batch",)))
def test_vmap_of_mods_is_one_call(case, monkeypatch):
    sink, axes = MODS[case]
    documents = np.random.default_rng(3).integers(0, 2, (N, B, S))
    arrays = (*(normal(n, N, B, S, H, D) for n in range(3)), normal(4, N, B, H), jnp.asarray(documents))
    arrays = [x[0] if axis is None else x for x, axis in zip(arrays, axes, strict=True)]
    gradient = jax.grad(functools.partial(modified, sink), (0, 1, 2, 3))
    expected = [gradient(*(x if a is None else x[n] for x, a in zip(arrays, axes, strict=True))) for n in range(N)]
    steps = []
    run = static_call.Call.run
    monkeypatch.setattr(static_call.Call, "run", lambda call, *arrays: steps.append(call.step) or run(call, *arrays))
    actual = jax.block_until_ready(jax.jit(jax.vmap(gradient, axes))(*arrays))
    assert sorted(steps) == ["backward", "forward"]
    expected = jax.tree.map(lambda *x: jnp.stack(x), *expected)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5), actual, expected)


def test_lengths_of_one_sequence_are_shared_by_instances():
    q, k, v = (normal(n, N, S, H, D) for n in range(3))

    def one(q, k, v):
        return attention(q[None], k[None], v[None], kv_lengths=jnp.asarray([4], jnp.int32))[0]

    expected = jnp.stack([one(*x) for x in zip(q, k, v, strict=True)])
    np.testing.assert_array_equal(jax.vmap(one)(q, k, v), expected)


def test_vmap_of_vmap_and_of_packed_sequences():
    q, k, v = (normal(n, N, B, S, H, D) for n in range(3))
    one = functools.partial(attention, causal=True)

    def per_sequence(q, k, v):
        return one(q[None], k[None], v[None])[0]

    expected = jnp.stack([one(*x) for x in zip(q, k, v, strict=True)])
    np.testing.assert_array_equal(jax.jit(jax.vmap(jax.vmap(per_sequence)))(q, k, v), expected)
    bounds = jnp.asarray([0, 4, 18], jnp.int32)
    packed = [x.reshape(N, B * S, H, D) for x in (q, k, v)]

    def varlen(q, k, v, bias=None):
        return attention_varlen(q, k, v, bounds, bounds, 14, 14, causal=True, bias=bias)

    for arrays in (packed, [*packed, normal(3, N, B, 1, 14, 14)]):
        expected = jnp.stack([varlen(*x) for x in zip(*arrays, strict=True)])
        np.testing.assert_array_equal(jax.jit(jax.vmap(varlen))(*arrays), expected)


def test_packed_sequences_with_traced_boundaries_and_gradients():
    q, k, v = (normal(n, 18, H, D) for n in range(3))
    bias = normal(3, 2, H, 14, 14)

    @jax.jit
    def step(q, k, v, bias, bounds):
        def loss(q, k, v, bias):
            out = attention_varlen(q, k, v, bounds, bounds, 14, 14, causal=True, bias=bias)
            return (out**2).sum(), out

        return jax.grad(loss, (0, 1, 2, 3), has_aux=True)(q, k, v, bias)

    def by_sequence(bias, parts):
        outs = []
        for one, part in zip(bias, parts, strict=True):
            n = part.stop - part.start
            outs.append(attention(*(x[None, part] for x in (q, k, v)), causal=True, bias=one[:, :n, :n])[0])
        return jnp.concatenate(outs)

    for split in (4, 9):
        gradients, out = step(q, k, v, bias, jnp.asarray([0, split, 18], jnp.int32))
        parts = [slice(0, split), slice(split, 18)]
        np.testing.assert_allclose(out, by_sequence(bias, parts), rtol=1e-6, atol=1e-6)
        assert all(np.isfinite(x).all() for x in gradients)
        dbias = jax.grad(lambda bias, parts=parts: (by_sequence(bias, parts) ** 2).sum())(bias)
        np.testing.assert_allclose(gradients[3], dbias, rtol=1e-5, atol=1e-5)
    with pytest.raises((jax.errors.JaxRuntimeError, ValueError), match="cu_seqlens_q must start at 0, not 1"):
        jax.block_until_ready(step(q, k, v, bias, jnp.asarray([1, 3, 18], jnp.int32)))


def test_numbers_may_be_traced():
    q = normal(0, B, S, H, D)

    @jax.jit
    def call(q, scale, cap, p):
        return attention(q, q, q, scale=2 * scale, softcap=cap, dropout=p, seed=3)

    for scale, cap, p in ((0.1, 2.0, 0.5), (0.3, 1.0, 0.0), (0.2, np.inf, 0.0)):
        expected = attention(q, q, q, scale=2 * np.float32(scale), softcap=cap, dropout=p, seed=3)
        np.testing.assert_array_equal(call(q, scale, cap, p), expected)


def test_an_exported_program_runs():
    q, k, v = (normal(n, B, S, H, D) for n in range(3))
    step = jax.jit(jax.grad(lambda q, k, v: (attention(q, k, v, causal=True, window=(3, None)) ** 2).sum(), (0, 1, 2)))
    allowed = [jax.export.DisabledSafetyCheck.custom_call(ffi_handler.TARGET)]
    exported = jax.export.export(step, disabled_checks=allowed)(q, k, v)
    assert ffi_handler.TARGET in exported.mlir_module()
    for one, other in zip(exported.call(q, k, v), step(q, k, v), strict=True):
        np.testing.assert_array_equal(one, other)


def test_donated_operands_and_debugging_modes():
    q, k, v = (normal(n, B, S, H, D) for n in range(3))
    expected = attention(q, k, v, causal=True)
    with jax.disable_jit():
        np.testing.assert_array_equal(jax.jit(functools.partial(attention, causal=True))(q, k, v), expected)
    with jax.debug_nans(True):
        np.testing.assert_array_equal(jax.jit(functools.partial(attention, causal=True))(q, k, v), expected)
        with pytest.raises(FloatingPointError):
            jax.jit(attention)(q * jnp.nan, k, v)
    donating = jax.jit(lambda q, k, v: attention(q, k, v, causal=True) + q, donate_argnums=0)
    given = q + 0
    np.testing.assert_allclose(donating(given, k, v), expected + q, rtol=1e-6)
    assert given.is_deleted()
