"""cupy_flash.adapters.jax against jax.nn.dot_product_attention, eager and under jax's transformations."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiers import in_tiers
from tolerance import assert_matches_reference

import cupy_flash
from cupy_flash import dispatch
from cupy_flash.adapters.jax import attention
from cupy_flash.measure.checks.references import references
from cupy_flash.problem.recorded_call import Call

B, SQ, SK, H, HK, D = 3, 33, 47, 4, 2, 16


def normal(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape)


Q, K, V = normal(0, B, SQ, H, D), normal(1, B, SK, HK, D), normal(2, B, SK, HK, D)
MASK, BIAS = normal(3, B, 1, SQ, SK) > -0.5, normal(4, 1, H, SQ, SK)
Q_LENGTHS = np.linspace(0, SQ, B).astype(np.int32)
KV_LENGTHS = np.linspace(SK, 13, B).astype(np.int32)
WEIGHTS = normal(5, B, SQ, H, D)

# (floating-point operands, further options of cupy_flash, options of jax.nn.dot_product_attention)
CALLS = {
    "plain": (dict(q=Q, k=K, v=V), {}, {}),
    "causal": (dict(q=Q, k=K, v=V), dict(causal="top_left"), dict(is_causal=True)),
    "window": (dict(q=Q, k=K[:, :SQ], v=V[:, :SQ]), dict(window=(12, 3)), dict(local_window_size=(12, 3))),
    "scale": (dict(q=Q, k=K, v=V), dict(scale=0.3), dict(scale=0.3)),
    "mask": (dict(q=Q, k=K, v=V), dict(mask=MASK), dict(mask=MASK)),
    "bias": (dict(q=Q, k=K, v=V, bias=BIAS), {}, {}),
    "lengths": (
        dict(q=Q, k=K, v=V),
        dict(q_lengths=Q_LENGTHS, kv_lengths=KV_LENGTHS),
        dict(query_seq_lengths=Q_LENGTHS, key_value_seq_lengths=KV_LENGTHS),
    ),
}


def arrays(operands, dtype=jnp.float32):
    return {name: jnp.asarray(x, dtype) for name, x in operands.items()}


def out_and_gradients(function, options, operands, weights):
    """Return out, and the gradients of all operands for a sum of out with fixed random weights."""

    def loss(operands):
        given = {name: x for name, x in operands.items() if name == "bias"}
        out = function(operands["q"], operands["k"], operands["v"], **given, **options)
        return (out * weights.astype(out.dtype)).sum(), out

    (_, out), gradients = jax.value_and_grad(loss, has_aux=True)(operands)
    return dict(out=out) | {f"d{name}": gradient for name, gradient in gradients.items()}


def eager(function):
    return function


@functools.cache
def run_of_jax(case, dtype):
    """Return jax's float64 results on inputs rounded to `dtype`, and the least accurate of several runs in `dtype`."""
    operands, options, options_of_jax = CALLS[case]
    rounded = {name: np.asarray(x) for name, x in arrays(operands, dtype).items()}
    with jax.enable_x64(True):
        wide = {name: jnp.asarray(x, jnp.float64) for name, x in rounded.items()}
        run = functools.partial(out_and_gradients, jax.nn.dot_product_attention, arrays_among(options_of_jax))
        exact = jax.jit(run)(wide, jnp.asarray(WEIGHTS))
    q, k, v, *bias = rounded.values()
    call = Call(q, k, v, options | dict(zip(["bias"], bias, strict=False)), WEIGHTS.astype(q.dtype), None, None)
    _, (out, _, *gradients) = references(call, q.dtype)
    low = dict(out=out) | {f"d{name}": gradient for name, gradient in zip(rounded, gradients, strict=False)}
    return {name: np.asarray(x) for name, x in exact.items()}, low


def arrays_among(options):
    return {name: jnp.asarray(x) if isinstance(x, np.ndarray) else x for name, x in options.items()}


ROWS = {
    f"{case}-{dtype}-{name}": (case, dtype, transform)
    for case, dtype in (*((case, "float32") for case in CALLS), ("causal", "bfloat16"))
    for name, transform in (("eager", eager), ("jit", jax.jit))
}
DEFAULT = ("plain-float32-eager", "causal-bfloat16-jit", "mask-float32-jit", "bias-float32-jit", "lengths-float32-jit")


@pytest.mark.parametrize("row", in_tiers(ROWS, DEFAULT))
def test_out_and_gradients_equal_jax(row):
    case, dtype, transform = row
    operands, options, _ = CALLS[case]
    function = transform(functools.partial(out_and_gradients, attention, options))
    actual = function(arrays(operands, dtype), jnp.asarray(WEIGHTS, jnp.float32))
    exact, low = run_of_jax(case, dtype)
    assert actual.keys() == exact.keys() == {"out", *(f"d{name}" for name in operands)}
    for name, x in actual.items():
        assert isinstance(x, jax.Array) and x.dtype == dtype
        assert_matches_reference(x, exact[name], low[name], dtype, name)


FEATURES = {
    "lse": dict(return_lse=True, causal=True),
    "sink": dict(sink=normal(6, H).astype(np.float32)),
    "softcap-alibi": dict(softcap=1.5, alibi_slopes=np.array([0.5, 0.25, 0.1, 0.0], np.float32)),
    "dropout": dict(dropout=0.3, seed=2**63 + 7),
    "bhsd": dict(layout="bhsd"),
}


@pytest.mark.parametrize("transform", [eager, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("case", FEATURES)
def test_options_that_jax_lacks_equal_numpy(case, transform):
    options = FEATURES[case]
    operands = {name: x.astype(np.float32) for name, x in dict(q=Q, k=K, v=V).items()}
    if case == "bhsd":
        operands = {name: np.ascontiguousarray(x.swapaxes(1, 2)) for name, x in operands.items()}
    if "sink" in options:
        operands["sink"] = options["sink"]
    # Torch's operators, which would compute the NumPy arrays, have other bits.
    expected, vjp_of_numpy = cupy_flash.attention_vjp(*(operands[name] for name in "qkv"), engine="cpu", **options)

    def function(operands):
        given = {name: x for name, x in operands.items() if name == "sink"}
        return attention(*(operands[name] for name in "qkv"), **options | given)

    actual, vjp = transform(lambda x: jax.vjp(function, x))(arrays(operands))
    cotangents = [normal(7 + i, *x.shape).astype(np.float32) for i, x in enumerate(jax.tree.leaves(actual))]
    (gradients,) = vjp(tuple(cotangents) if case == "lse" else cotangents[0])
    for one, other in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(one, other)
    named = vjp_of_numpy(*cotangents)._asdict()
    for name, gradient in gradients.items():
        np.testing.assert_array_equal(gradient, named[f"d{name}"])


def test_an_array_as_seed_may_change_per_call():
    q = jnp.asarray(Q, jnp.float32)
    out = jax.jit(lambda q, seed: attention(q, q, q, dropout=0.5, seed=seed))
    for seed in (3, 4):
        expected = attention(q, q, q, dropout=0.5, seed=seed)
        np.testing.assert_array_equal(out(q, jnp.asarray(seed)), expected)
        np.testing.assert_array_equal(attention(q, q, q, dropout=0.5, seed=jnp.asarray([seed], "uint8")), expected)
    minus_one = jnp.asarray(-1)  # int64 -1 has the same bits as uint64 2**64 - 1
    np.testing.assert_array_equal(out(q, minus_one), attention(q, q, q, dropout=0.5, seed=2**64 - 1))


@pytest.mark.parametrize("transform", [eager, jax.jit], ids=["eager", "jit"])
def test_vmap_scan_and_checkpoint(transform):
    q, k, v = (jnp.asarray(x, jnp.float32) for x in (Q, K, V))
    kwargs = dict(causal=True, window=(9, 0))

    def loss(q, k, v):
        return (attention(q, k, v, **kwargs) ** 2).sum()

    expected = jax.grad(loss)(q, k, v)

    def per_sequence(q, k, v):
        return jax.grad(loss)(q[None], k[None], v[None])[0]

    def with_scan(q, k, v):
        _, gradients = jax.lax.scan(lambda carry, x: (carry, per_sequence(*x)), None, (q, k, v))
        return gradients

    checkpointed = jax.grad(jax.checkpoint(loss))
    for function in (jax.vmap(per_sequence), with_scan, checkpointed):
        np.testing.assert_array_equal(transform(function)(q, k, v), expected)


def test_saved_for_the_backward():
    operands = tuple(jnp.asarray(x, jnp.float32) for x in (Q, K, V))
    out, vjp = jax.vjp(functools.partial(attention, causal=True, mask=jnp.asarray(MASK)), *operands)
    kept = {x.unsafe_buffer_pointer(): x.nbytes for x in jax.tree.leaves(vjp) if isinstance(x, jax.Array)}
    lse = 4 * B * H * SQ
    assert sum(kept.values()) == sum(x.nbytes for x in operands) + out.nbytes + lse + MASK.nbytes
    assert {x.unsafe_buffer_pointer() for x in (*operands, out)} < set(kept)


def test_eager_call_reads_and_writes_memory_of_jax(monkeypatch):
    seen = {}
    forward = dispatch.forward

    def record(problem, operands):
        results = forward(problem, operands)
        seen.update(q=operands.q.pointer, out=results[0].pointer)
        return results

    monkeypatch.setattr(dispatch, "forward", record)
    q, k, v = (jnp.asarray(x, jnp.float32) for x in (Q, K, V))
    out = attention(q, k, v)
    assert seen == dict(q=q.unsafe_buffer_pointer(), out=out.unsafe_buffer_pointer())


def test_large_arrays_pass_through_the_callback():
    # A callback that waits for jax while jax waits for it deadlocks if arrays are large, as these of 4 MB are.
    operands = [jnp.ones((1, 4096, 4, 64)) * factor * jnp.linspace(-1, 1, 64) for factor in (1.0, 0.5, 2.0)]
    differentiate = jax.grad(lambda q, k, v: (attention(q, k, v, window=(5, 0)) ** 2).sum(), (0, 1, 2))
    for one, other in zip(jax.jit(differentiate)(*operands), differentiate(*operands), strict=True):
        np.testing.assert_array_equal(one, other)


ZEROS = jnp.zeros((1, 4, 2, 8))
WRONG = {
    "shape": (lambda q: attention(q, q[:, :, :, :3], q), ValueError, "one head dimension"),
    "dtype": (lambda q: attention(q, q.astype("bfloat16"), q), TypeError, "one dtype"),
    "integers": (lambda q: attention(*[q.astype("int32")] * 3), TypeError, "q, k and v must be"),
    "option": (lambda q: attention(q, q, q, is_causal=True), TypeError, "unknown option 'is_causal'"),
    "causal": (lambda q: attention(q, q, q, causal="yes"), ValueError, "causal must be"),
    "no-seed": (lambda q: attention(q, q, q, dropout=0.5), ValueError, "needs a seed"),
    "seeds": (lambda q: attention(q, q, q, dropout=0.5, seed=jnp.arange(2)), TypeError, "one integer, not int32"),
    "seed-of-floats": (lambda q: attention(q, q, q, dropout=0.5, seed=q[0, 0, 0, 0]), TypeError, "one integer"),
    "mask": (lambda q: attention(q, q, q, mask=jnp.ones((3, 3), bool)), ValueError, "must broadcast"),
    "scale": (lambda q: attention(q, q, q, scale=q.sum() + jnp.inf), ValueError, "scale must be finite"),
    "return-lse": (lambda q: attention(q, q, q, return_lse="yes"), TypeError, "return_lse must be True or False"),
    "scale-of-grad": (
        lambda q: jax.grad(lambda scale: attention(q, q, q, scale=scale).sum())(0.5),
        TypeError,
        "attention: scale has no gradient",
    ),
    "backend": (lambda q: attention(q, q, q, backend="cuda"), cupy_flash.UnsupportedError, "cuda"),
}


@pytest.mark.parametrize("transform", [eager, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("case", WRONG)
def test_refused(case, transform):
    call, error, message = WRONG[case]
    if case == "scale" and transform is jax.jit:
        error, message = (
            jax.errors.JaxRuntimeError,
            "INVALID_ARGUMENT: attention: .*\n  - scale must be finite, not inf",
        )
    with pytest.raises(error, match=message) as caught:
        transform(call)(ZEROS)
    assert type(caught.value) is error  # the error of cupy_flash, not one that jax derives from it


def test_errors_name_every_traced_option():
    def function(q, causal, left, flag):
        return attention(q, q, q, causal=causal, window=(left, 0), return_lse=flag)

    with pytest.raises(TypeError, match="attention: causal, window, return_lse must have a value") as caught:
        jax.jit(function)(ZEROS, True, 3, True)
    assert type(caught.value) is TypeError


def test_jit_for_a_gpu_needs_the_gpu():
    traced = jax.jit(lambda q: attention(q, q, q)).trace(ZEROS)
    with pytest.raises(cupy_flash.UnsupportedError, match="the arrays are on cuda:0, .* cannot use it"):
        traced.lower(lowering_platforms=("cuda",))


# ---------------------------------------------------------------------------------------------------------------- mods

TABLE, IDS = jnp.asarray(normal(11, H, 9), jnp.float32), jnp.asarray(np.arange(64) // 3)


def modified(q, k, v, table):
    """Return attention inside documents with a learned bias of the distance."""

    def bias(score, b, h, i, j):
        return 2 * jnp.tanh(score) + table[h, jnp.clip(i - j, -4, 4) + 4]

    def same(b, h, i, j):
        return (IDS[i] == IDS[j]) | (j == 0)

    return attention(q, k, v, score_mod=bias, mask_mod=same)


def modified_in_jax(q, k, v, table):
    i, j = jnp.arange(q.shape[1])[:, None], jnp.arange(k.shape[1])
    h = jnp.arange(q.shape[2])[:, None, None]
    k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], 2) for x in (k, v))
    scores = jnp.einsum("bihd,bjhd->bhij", q, k) / q.shape[3] ** 0.5
    scores = 2 * jnp.tanh(scores) + table[h, jnp.clip(i - j, -4, 4) + 4]
    scores = jnp.where((IDS[i] == IDS[j]) | (j == 0), scores, -jnp.inf)
    return jnp.einsum("bhij,bjhd->bihd", jax.nn.softmax(scores, -1), v)


@pytest.mark.parametrize(
    "transform", [pytest.param(eager, marks=pytest.mark.exhaustive), jax.jit], ids=["eager", "jit"]
)
def test_mods_and_their_captured_gradients(transform):
    q, k, v = (jnp.asarray(normal(n, 2, 7, H, 8), jnp.float32) for n in (1, 2, 3))

    def loss(function):
        return jax.value_and_grad(lambda *arrays: (function(*arrays) ** 2).sum(), argnums=(0, 1, 2, 3))

    actual, expected = transform(loss(modified))(q, k, v, TABLE), loss(modified_in_jax)(q, k, v, TABLE)
    for one, other in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


def test_a_mod_is_an_argument_of_jit_and_grad():
    q = jnp.asarray(normal(1, 2, 7, H, 8), jnp.float32)
    mod = cupy_flash.Mod(lambda score, b, h, i, j: score * TABLE[h, 0] + 0.25 * j)

    def loss(q, mod):
        return (attention(q, q, q, score_mod=mod) ** 2).sum()

    gradient, mod_gradient = jax.jit(jax.grad(loss, argnums=(0, 1)))(q, mod)
    expected, expected_mod_gradient = jax.grad(loss, argnums=(0, 1))(q, mod)
    np.testing.assert_allclose(gradient, expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(mod_gradient.arrays[0], expected_mod_gradient.arrays[0], rtol=1e-5, atol=1e-6)
    assert (mod_gradient.arrays[0][:, 0] != 0).all() and not mod_gradient.arrays[0][:, 1:].any()


@pytest.mark.exhaustive
def test_a_mod_is_a_pytree_of_its_arrays():
    """A Mod works under checkpoint, and stacked under scan; integer arrays need allow_int and have no gradient."""
    q = jnp.asarray(normal(1, 2, 7, H, 8), jnp.float32)

    def loss(q, mod):
        return (attention(q, q, q, score_mod=mod) ** 2).sum()

    def mod_of(table):
        return cupy_flash.Mod(lambda s, b, h, i, j: s + table[h, i - j + 4], lambda b, h, i, j: IDS[i] == IDS[j])

    mods = [mod_of(TABLE), mod_of(-TABLE)]
    expected = [loss(q, mod) for mod in mods]
    assert abs(expected[0] - expected[1]) > 1e-3
    stacked = jax.tree.map(lambda *arrays: jnp.stack(arrays), *mods)
    _, losses = jax.lax.scan(lambda carry, mod: (carry, loss(q, mod)), 0.0, stacked)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    gradient = jax.grad(loss, argnums=1, allow_int=True)
    plain, again = gradient(q, mods[0]), jax.grad(jax.checkpoint(loss), argnums=1, allow_int=True)(q, mods[0])
    np.testing.assert_allclose(again.arrays[0], plain.arrays[0], rtol=1e-5, atol=1e-6)
    assert plain.arrays[0].any() and plain.arrays[1].dtype == jax.dtypes.float0


def test_mods_under_vmap():
    q, k, v = (jnp.asarray(normal(n, 3, 2, 7, H, 8), jnp.float32) for n in (1, 2, 3))
    tables = jnp.stack([TABLE, 2 * TABLE, -TABLE])
    actual = jax.vmap(modified)(q, k, v, tables)
    expected = jax.vmap(modified_in_jax)(q, k, v, tables)
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-5)


def test_mods_of_other_arrays_are_refused():
    q = jnp.ones((1, 5, H, 8))
    table = np.ones(5)
    with pytest.raises(TypeError, match="mods capture jax arrays here, not ndarray"):
        attention(q, q, q, score_mod=lambda s, b, h, i, j: s + table[j])
