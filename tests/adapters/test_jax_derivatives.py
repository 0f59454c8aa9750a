"""First and second derivatives of jax attention in float64, against those of attention written in jax."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from tiers import in_tiers

import cupy_flash
from cupy_flash.adapters.jax import attention, attention_jvp, ring_attention

B, S, H, HK, D = 2, 7, 4, 2, 3
SHAPES = dict(q=(B, S, H, D), k=(B, S, HK, D), v=(B, S, HK, D), bias=(1, H, S, S), sink=(H,))
CAP = 2.0


@pytest.fixture(autouse=True)
def double_precision():
    with jax.enable_x64(True):
        yield


def normal(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape)


def operands_of(seed, count=None):
    shapes = {name: shape if count is None else (count, *shape) for name, shape in SHAPES.items()}
    return {name: jnp.asarray(normal(seed + place, *shape)) for place, (name, shape) in enumerate(shapes.items())}


def ours(operands):
    return attention(**operands, causal=True, softcap=CAP, return_lse=True)


def in_jax(operands):
    q, k, v, bias, sink = map(operands.get, SHAPES)
    k, v = (jnp.repeat(x, H // HK, 2) for x in (k, v))
    scores = CAP * jnp.tanh(jnp.einsum("bihd,bjhd->bhij", q, k) / D**0.5 / CAP) + bias
    scores = jnp.where(jnp.tril(jnp.ones((S, S), bool)), scores, -jnp.inf)
    sinks = jnp.broadcast_to(sink[:, None, None], (B, H, S, 1))
    lse = jax.nn.logsumexp(jnp.concatenate([scores, sinks], -1), -1)
    return jnp.einsum("bhij,bjhd->bihd", jnp.exp(scores - lse[..., None]), v), lse


with jax.enable_x64(True):
    X, TANGENTS, INSTANCES = operands_of(0), operands_of(10), operands_of(20, 3)
    WEIGHTS = jnp.asarray(normal(30, B, S, H, D)), jnp.asarray(normal(31, B, H, S))


def loss(function, operands):
    out, lse = function(operands)
    return (jnp.sin(out) * WEIGHTS[0]).sum() + (jnp.cos(lse) * WEIGHTS[1]).sum()


def steps(function, operands):
    """Return the loss of a scan with three rematerialised steps."""

    @jax.checkpoint
    def step(total, factor):
        return total + loss(function, operands | {"q": operands["q"] * factor}), None

    return jax.lax.scan(step, 0.0, jnp.arange(3.0))[0]


def penalty(function, operands, loss=loss):
    """Return a weighted sum of sines of the gradients; its own gradient is a Hessian-vector product."""
    gradients = jax.grad(functools.partial(loss, function))(operands)
    return sum((jnp.sin(x) * TANGENTS[name]).sum() for name, x in gradients.items())


def mean_flow(function, operands):
    """Return the loss of a model trained through the tangent of its output, with stop_gradient around the tangent."""
    (out, _), (tout, _) = jax.jvp(function, (operands,), (TANGENTS,))
    return ((out + jax.lax.stop_gradient(tout)) ** 2).sum()


def mapped(function):
    """Return the function under a vmap over an axis that k and the sink lack."""
    axes = dict(q=0, k=None, v=0, bias=0, sink=None)
    return lambda operands: jax.vmap(function, (axes,))(operands | {"k": X["k"], "sink": X["sink"]})


DERIVATIVES = {
    "jvp": lambda f: jax.jvp(f, (X,), (TANGENTS,)),
    "linearize": lambda f: jax.linearize(f, X)[1](TANGENTS),
    "jacfwd": lambda f: jax.jacfwd(lambda q: f(X | {"q": q}))(X["q"]),
    "jacrev": lambda f: jax.jacrev(lambda q: f(X | {"q": q}))(X["q"]),
    "hessian": lambda f: jax.hessian(lambda q: loss(f, X | {"q": q}))(X["q"]),
    "grad-of-grad": lambda f: jax.grad(functools.partial(penalty, f))(X),
    "jvp-of-grad": lambda f: jax.jvp(jax.grad(functools.partial(loss, f)), (X,), (TANGENTS,)),
    "grad-of-jvp": lambda f: jax.grad(lambda x: jax.jvp(functools.partial(loss, f), (x,), (TANGENTS,))[1])(X),
    "mean-flow": lambda f: jax.grad(functools.partial(mean_flow, f))(X),
    "scan-jvp": lambda f: jax.jvp(functools.partial(steps, f), (X,), (TANGENTS,)),
    "scan-grad-of-grad": lambda f: jax.grad(functools.partial(penalty, f, loss=steps))(X),
    "vmap-jvp": lambda f: jax.vmap(lambda x: jax.jvp(f, (x,), (TANGENTS,)))(INSTANCES),
    "vmap-tangent": lambda f: jax.vmap(lambda b: jax.jvp(lambda b: f(X | {"bias": b}), (X["bias"],), (b,)))(
        INSTANCES["bias"]
    ),
    "vmap-hvp": lambda f: jax.vmap(lambda x: jax.jvp(jax.grad(functools.partial(loss, f)), (x,), (TANGENTS,)))(
        INSTANCES
    ),
    "grad-of-vmap": lambda f: jax.grad(lambda x: mapped(functools.partial(loss, f))(x).sum())(INSTANCES),
    "grad-of-vmap-of-grad": lambda f: jax.grad(lambda x: mapped(functools.partial(penalty, f))(x).sum())(INSTANCES),
    "jvp-of-vmap": lambda f: jax.jvp(mapped(f), (INSTANCES,), (INSTANCES,)),
}


TRANSFORMS = {"eager": lambda f: f, "jit": jax.jit}
CASES = {f"{case}-{transform}": (case, transform) for case in DERIVATIVES for transform in TRANSFORMS}


@pytest.mark.parametrize("case", in_tiers(CASES, ("jvp-eager", "scan-grad-of-grad-jit")))
def test_derivatives_equal_those_of_attention_in_jax(case):
    derivative, transform = DERIVATIVES[case[0]], TRANSFORMS[case[1]]
    actual, expected = transform(lambda: derivative(ours))(), derivative(in_jax)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-10, atol=1e-12), actual, expected)


@pytest.mark.exhaustive
def test_tangents_of_a_bias_without_sink_are_folded():
    """The adapter folds vmap's axis into the batch. A bias without that axis gets it if its tangent has it."""
    plain = {name: X[name] for name in "qkv"}

    def tangent(bias, direction):
        return jax.jvp(lambda bias: attention(**plain, bias=bias), (bias,), (direction,))

    for axes in ((None, 0), (0, None)):
        given = [INSTANCES["bias"] if axis == 0 else X["bias"] for axis in axes]
        actual = jax.vmap(tangent, axes)(*given)
        expected = [tangent(*(x[n] if axis == 0 else x for x, axis in zip(given, axes, strict=True))) for n in range(3)]
        expected = jax.tree.map(lambda *x: jnp.stack(jnp.broadcast_arrays(*x)), *expected)
        jax.tree.map(
            lambda x, y: np.testing.assert_allclose(jnp.broadcast_to(x, y.shape), y, rtol=1e-12, atol=1e-13),
            actual, expected,
        )  # fmt: skip


@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
def test_attention_jvp_equals_numpy(transform):
    table, ttable = jnp.asarray(normal(40, H, S)), jnp.asarray(normal(41, H, S))

    def score(s, b, h, i, j):
        return s * table[h, j]

    options = dict(causal=True, return_lse=True, dropout=0.25, seed=7)
    call = functools.partial(attention_jvp, score_mod=score, **options)
    arguments = [X[name] for name in "qkv"] + [TANGENTS["q"], None, TANGENTS["v"]]
    actual = transform(lambda *x: call(*x, tcaptured=[ttable]))(*arguments)
    table = np.asarray(table)
    arguments = [x if x is None else np.asarray(x) for x in arguments]
    expected = cupy_flash.attention_jvp(*arguments, score_mod=score, tcaptured=[np.asarray(ttable)], **options)
    jax.tree.map(np.testing.assert_array_equal, actual, expected)


@pytest.mark.exhaustive
def test_gradients_of_attention_jvp():
    weights = [jnp.asarray(normal(50 + n, B, S, H, D)) for n in range(2)]

    def by_function(x, t):
        return attention_jvp(
            x["q"], x["k"], x["v"], t["q"], t["k"], t["v"], causal=True, bias=x["bias"], tbias=t["bias"]
        )

    def by_jax(x, t):
        names = ("q", "k", "v", "bias")
        primal, tangent = ({name: x[name] for name in names} for x in (x, t))
        return jax.jvp(lambda x: attention(**x, causal=True), (primal,), (tangent,))

    def gradients(f):
        return jax.grad(lambda x, t: sum((y * w).sum() for y, w in zip(f(x, t), weights, strict=True)), (0, 1))

    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-10, atol=1e-12),
        jax.jit(gradients(by_function))(X, TANGENTS), gradients(by_jax)(X, TANGENTS),
    )  # fmt: skip


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize("case", in_tiers({name: name for name in ("jvp", "jvp-of-grad", "grad-of-grad")}, ()))
def test_derivatives_stay_sharded(case, kind):
    spec = PartitionSpec("data", None, "model")
    x = {name: X[name] for name in "qkv"}

    def f(q, sink):
        return (attention(**x | {"q": q}, sink=sink, causal=True) ** 2).sum()

    derivative = {
        "jvp": lambda q, sink: jax.jvp(lambda q: attention(**x | {"q": q}, sink=sink), (q,), (q,))[1],
        "jvp-of-grad": lambda q, sink: jax.jvp(lambda q: jax.grad(f, (0, 1))(q, sink), (q,), (q,))[1],
        "grad-of-grad": jax.grad(lambda q, sink: sum((x**2).sum() for x in jax.grad(f, (0, 1))(q, sink)), (0, 1)),
    }[case]
    expected = derivative(X["q"], X["sink"])
    with jax.set_mesh(mesh := jax.make_mesh((2, 2), ("data", "model"), axis_types=(kind,) * 2)):
        q = jax.device_put(X["q"], NamedSharding(mesh, spec))
        actual = jax.jit(derivative)(q, X["sink"])
    assert jax.tree.leaves(actual)[0].sharding.is_equivalent_to(NamedSharding(mesh, spec), 4)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-12, atol=1e-13), actual, expected)


@pytest.mark.exhaustive
def test_second_derivatives_under_shard_map():
    """The sink is replicated over the mesh axis `data`, so its gradient is the sum over that axis."""
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    heads = PartitionSpec("data", None, "model")
    specs = (heads, heads, heads, PartitionSpec("model"))

    def per_shard(q, k, v, sink):
        return attention(q, k, v, causal=True, sink=sink)

    sharded = jax.shard_map(per_shard, mesh=mesh, in_specs=specs, out_specs=heads)

    def second(f):
        def first(*x):
            return sum(jnp.sin(y).sum() for y in jax.grad(lambda *x: (f(*x) ** 2).sum(), (0, 1, 2, 3))(*x))

        return jax.jit(jax.grad(first, (0, 1, 2, 3)))

    x = [X[name] for name in ("q", "k", "v", "sink")]
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-10, atol=1e-12),
        second(sharded)(*x),
        second(per_shard)(*x),
    )


def test_refused():
    q = X["q"]

    def total(q):
        return (attention(q, q, q) ** 2).sum()

    with pytest.raises(NotImplementedError, match="attention: there is no derivative of this order"):
        jax.grad(lambda q: jax.grad(lambda q: jax.grad(total)(q).sum())(q).sum())(q)
    with pytest.raises(NotImplementedError, match="attention: there is no derivative of this order"):
        jax.grad(lambda q: jax.jvp(jax.grad(total), (q,), (q,))[1].sum())(q)
    with pytest.raises(NotImplementedError, match="attention: there is no second derivative in forward mode alone"):
        jax.jvp(lambda q: jax.jvp(total, (q,), (q,))[1], (q,), (q,))
    for tcaptured in ([q], 3):
        with pytest.raises(
            TypeError, match="attention_jvp: tcaptured must be a sequence with a tangent or None for ea"
        ):
            attention_jvp(q, q, q, tcaptured=tcaptured)
    with pytest.raises(ValueError, match="tq must have the shape of q"):
        attention_jvp(q, q, q, q[:, 1:])


@pytest.mark.exhaustive
def test_a_ring_has_first_derivatives_only():
    mesh = jax.make_mesh((2,), ("ring",), axis_types=(AxisType.Auto,))
    spec = PartitionSpec(None, "ring")
    ring = functools.partial(ring_attention, axis_name="ring", causal=True)
    mapped = jax.shard_map(lambda q: ring(q, q, q), mesh=mesh, in_specs=spec, out_specs=spec)
    q = jnp.asarray(normal(0, 1, 8, 2, 4))
    with pytest.raises(NotImplementedError, match="ring_attention: there is no derivative of this order"):
        jax.jit(jax.grad(lambda q: jax.grad(lambda q: (mapped(q) ** 2).sum())(q).sum()))(q)
