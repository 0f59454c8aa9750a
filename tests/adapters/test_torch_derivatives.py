"""Every derivative of torch: gradcheck and gradgradcheck for the options, torch.func against math attention."""

import numpy as np
import pytest
from tiers import in_tiers

import cupy_flash
from cupy_flash.problem.records import UnsupportedError

torch = pytest.importorskip("torch")

from torch.autograd import forward_ad  # noqa: E402
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap  # noqa: E402

from cupy_flash.adapters import torch as adapter  # noqa: E402

# torch's forward mode uses torch.jit.script, which torch itself has deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")


def normal(*shape, seed=0):
    return torch.tensor(np.random.default_rng([seed, *shape]).normal(size=shape))


Q, K, V = normal(1, 3, 2, 2), normal(1, 4, 1, 2, seed=1), normal(1, 4, 1, 3, seed=2)
TABLE = normal(2, 5, seed=3)
CU_SEQLENS = torch.tensor([0, 1, 3], dtype=torch.int32), torch.tensor([0, 3, 4], dtype=torch.int32)


def with_table(table):
    return lambda s, b, h, q, kv: s * table[h, kv] + torch.tanh(s) * table[h, 4]


# {name: (options, tensors that are differentiated besides q, k and v, by option)}
OPTIONS = {
    "plain": ({}, {}),
    "causal-softcap-alibi": (dict(causal=True, softcap=1.5, alibi_slopes=torch.tensor([0.5, 0.25])), {}),
    "bias": ({}, dict(bias=normal(2, 3, 4, seed=4))),
    "bias-of-keys": (dict(softcap=2.0), dict(bias=normal(1, 4, seed=5))),
    "mask": (dict(mask=torch.tensor(np.random.default_rng(1).random((3, 4)) < 0.6)), {}),
    "sink": (dict(window=(1, 0)), dict(sink=normal(2, seed=6))),
    "dropout": (dict(dropout=0.4, seed=3), {}),
    "lengths": (dict(q_lengths=torch.tensor([2]).int(), kv_lengths=torch.tensor([3]).int()), {}),
    "bhsd": (dict(layout="bhsd"), {}),
    "score-mod": ({}, dict(table=TABLE)),
    "mods-without-arrays": (dict(score_mod=lambda s, b, h, q, kv: s * s, mask_mod=lambda b, h, q, kv: q >= kv), {}),
    "score-mod-beside-others": (dict(dropout=0.2, seed=5, causal=True), dict(table=TABLE, sink=normal(2, seed=7))),
}


def call_of(name):
    """Return (function from tensors to out and lse, those tensors)."""
    options, moving = OPTIONS[name]
    arrays = [x.transpose(1, 2) if options.get("layout") == "bhsd" else x for x in (Q, K, V)]

    def call(q, k, v, *others):
        named = dict(zip(moving, others, strict=True))
        mods = {"score_mod": with_table(named.pop("table"))} if "table" in named else {}
        return cupy_flash.attention(q, k, v, return_lse=True, **options, **named, **mods)

    return call, [x.clone().requires_grad_() for x in (*arrays, *moving.values())]


@pytest.mark.parametrize("name", in_tiers({name: name for name in OPTIONS}, ["plain", "bias-of-keys", "score-mod"]))
def test_gradcheck(name):
    """Checks first derivatives, reverse mode and forward mode."""
    call, inputs = call_of(name)
    # lse of rows past the lengths is -inf
    finite = lambda *x: [torch.where(y.isinf(), 0, y) for y in call(*x)]  # noqa: E731
    assert torch.autograd.gradcheck(finite, inputs, check_forward_ad=True)


@pytest.mark.parametrize(
    "name", in_tiers({name: name for name in OPTIONS}, ["causal-softcap-alibi", "bias", "mods-without-arrays"])
)
def test_gradgradcheck(name):
    """Checks second derivatives, reverse over reverse and forward over reverse."""
    call, inputs = call_of(name)
    finite = lambda *x: [torch.where(y.isinf(), 0, y) for y in call(*x)]  # noqa: E731
    assert torch.autograd.gradgradcheck(finite, inputs, check_fwd_over_rev=True, fast_mode=True)


def test_gradgradcheck_of_packed_sequences():
    def call(q, k, v, bias):
        return cupy_flash.attention_varlen(q, k, v, *CU_SEQLENS, 2, 3, causal=True, bias=bias)

    inputs = [x.clone().requires_grad_() for x in (Q[0], K[0], V[0], normal(2, 1, 2, 3, seed=9))]
    assert torch.autograd.gradcheck(call, inputs, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(call, inputs, check_fwd_over_rev=True, fast_mode=True)


# ------------------------------------------------------------------------------------ torch.func, beside math attention

SHAPE = (2, 5, 2, 4)
X, MOVED = [normal(*SHAPE, seed=n) for n in range(3)], [normal(*SHAPE, seed=n) for n in range(3, 6)]


def dense(q, k, v):
    s = torch.einsum("bihd,bjhd->bhij", q, k) / 2
    s = s.masked_fill(torch.ones(5, 5, dtype=torch.bool).triu(1), -1e30)
    return torch.einsum("bhij,bjhd->bihd", s.softmax(-1), v)


def ours(q, k, v):
    return cupy_flash.attention(q, k, v, causal=True)


def drop_in(q, k, v):
    q, k, v = (x.transpose(-2, -3) for x in (q, k, v))
    return adapter.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(-2, -3)


def cubed(f):
    return lambda *x: (f(*x) ** 3).sum()


def first_sequence(f):
    return lambda x: cubed(f)(x[None], X[1][:1], X[2][:1])


def dual(f):
    with forward_ad.dual_level():
        return tuple(
            forward_ad.unpack_dual(f(forward_ad.make_dual(X[0], MOVED[0]), X[1], forward_ad.make_dual(X[2], MOVED[2])))
        )


def differentiated_twice(f):
    inputs = [x.clone().requires_grad_() for x in X]
    gradients = torch.autograd.grad(cubed(f)(*inputs), inputs, create_graph=True)
    return torch.autograd.grad(sum((g * t).sum() for g, t in zip(gradients, MOVED, strict=True)), inputs)


def reverse_over_forward(f):
    """Return the loss of the example mean_flow.py, without its stop-gradient."""
    inputs = [x.clone().requires_grad_() for x in (*X, *MOVED)]
    out, tout = jvp(f, tuple(inputs[:3]), tuple(inputs[3:]))
    return torch.autograd.grad((out + tout).square().sum(), inputs)


TRANSFORMS = {
    "jvp": lambda f: jvp(f, tuple(X), tuple(MOVED)),
    "jvp-of-k": lambda f: jvp(lambda k: f(X[0], k, X[2]), (X[1],), (MOVED[1],)),
    "grad": lambda f: grad(cubed(f), (0, 1, 2))(*X),
    "vjp": lambda f: vjp(f, *X)[1](MOVED[0]),
    "jacrev": lambda f: jacrev(lambda q: f(q, *X[1:]))(X[0]),
    "jacfwd": lambda f: jacfwd(lambda k: f(X[0], k, X[2]))(X[1]),
    "hessian": lambda f: hessian(first_sequence(f))(X[0][0]),
    "jacrev-of-jacrev": lambda f: jacrev(jacrev(first_sequence(f)))(X[0][0]),
    "jacrev-of-jacfwd": lambda f: jacrev(jacfwd(first_sequence(f)))(X[0][0]),
    "forward-over-reverse": lambda f: jvp(grad(cubed(f), (0, 1, 2)), tuple(X), tuple(MOVED)),
    "vmap": lambda f: vmap(f, in_dims=(1, None, 3))(
        torch.stack([X[0], MOVED[0]], 1), X[1], torch.stack([X[2], MOVED[2]], 3)
    ),
    "vmap-of-vmap": lambda f: vmap(vmap(f, (0, None, None)), (None, 0, None))(
        torch.stack([X[0], MOVED[0]]), torch.stack([X[1], MOVED[1]]), X[2]
    ),
    "vmap-of-jvp": lambda f: vmap(lambda t: jvp(lambda q: f(q, *X[1:]), (X[0],), (t,))[1])(torch.stack(MOVED)),
    "vmap-of-grad": lambda f: vmap(grad(cubed(f)), (0, None, None))(torch.stack([X[0], MOVED[0]]), *X[1:]),
    "dual-tensors": dual,
    "create-graph": differentiated_twice,
    "reverse-over-forward": reverse_over_forward,
}


def assert_equal(actual, expected, what):
    leaves = torch.utils._pytree.tree_leaves
    for x, y in zip(leaves(actual), leaves(expected), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-10, msg=lambda text, what=what: f"{what}: {text}")


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_transforms_of_attention(transform):
    assert_equal(TRANSFORMS[transform](ours), TRANSFORMS[transform](dense), transform)


@pytest.mark.parametrize("transform", ["jvp", "vmap", "hessian", "create-graph"])
def test_transforms_of_the_drop_in(transform):
    assert_equal(TRANSFORMS[transform](drop_in), TRANSFORMS[transform](dense), transform)


@pytest.mark.parametrize("name", ["bias", "dropout", "sink", "score-mod"])
def test_vmap_loops_where_it_cannot_fold(name):
    call, inputs = call_of(name)
    inputs = [x.detach() for x in inputs]
    several = [torch.stack([x, 2 * x]) for x in inputs]
    expected = [torch.stack(results) for results in zip(call(*inputs), call(*(2 * x for x in inputs)), strict=True)]
    assert_equal(vmap(call)(*several), expected, name)


def test_vmap_over_nothing():
    """Over an axis of size 0, results have the shapes of one instance, also where the adapter would loop over them."""
    with_sink, inputs = call_of("sink")
    for call, arrays in ((ours, X), (with_sink, [x.detach() for x in inputs])):
        batched = vmap(call, (0, *[None] * (len(arrays) - 1)))
        one, none = (batched(arrays[0][None][:rows], *arrays[1:]) for rows in (1, 0))
        assert_equal(none, torch.utils._pytree.tree_map(lambda x: x[:0], one), "no rows")


# {name: the transform of a function, in a graph of torch.compile}
COMPILED = {
    "jvp": lambda f, graph: graph(lambda *x: jvp(f, x, tuple(MOVED)))(*X),
    "grad": lambda f, graph: graph(grad(cubed(f), (0, 1, 2)))(*X),
    "forward-over-reverse": lambda f, graph: graph(lambda *x: jvp(grad(cubed(f)), x, tuple(MOVED)))(*X),
    "vmap-of-grad": lambda f, graph: graph(vmap(grad(cubed(f)), (0, None, None)))(torch.stack(MOVED), *X[1:]),
    "dual-tensors": lambda f, graph: graph(lambda: dual(f))(),
    "dual-tensors-of-a-compiled-function": lambda f, graph: (lambda g: [g(*X), *dual(g)])(graph(f)),
    "jvp-of-a-compiled-function": lambda f, graph: (lambda g: [g(*X), *jvp(g, tuple(X), tuple(MOVED))])(graph(f)),
}


@pytest.mark.parametrize("mods", in_tiers({"plain": False, "mods": True}, ["plain"]))
@pytest.mark.parametrize("name", in_tiers({name: name for name in COMPILED}, ["jvp", "dual-tensors"]))
def test_transforms_while_compiling(name, mods):
    """In a graph, operators replace autograd.Functions; forward mode must not treat their results as constants."""
    mod = cupy_flash.Mod(score_mod=with_table(TABLE)) if mods else None

    def call(q, k, v):
        return cupy_flash.attention(q, k, v, causal=True, score_mod=mod)

    torch.compiler.reset()
    graph = COMPILED[name](call, lambda f: torch.compile(f, backend="aot_eager"))
    assert_equal(graph, COMPILED[name](call, lambda f: f), name)


def test_vmap_folds_the_batch(monkeypatch):
    calls = []
    run = adapter.op.dispatch.forward
    monkeypatch.setattr(
        adapter.op.dispatch, "forward", lambda problem, x: calls.append(problem.batch) or run(problem, x)
    )
    vmap(ours, in_dims=(0, None, None))(torch.stack(X), *X[1:])
    assert calls == [6]


def test_third_derivatives_are_refused():
    with pytest.raises(RuntimeError, match="no third derivative of attention"):
        grad(lambda q: jvp(grad(lambda q: cubed(ours)(q, *X[1:])), (q,), (MOVED[0],))[1].sum())(X[0])
    q = X[0].clone().requires_grad_()
    (dq,) = torch.autograd.grad(cubed(ours)(q, *X[1:]), q, create_graph=True)
    (ddq,) = torch.autograd.grad(dq.square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="no third derivative of attention"):
        ddq.sum().backward()


def test_forward_over_forward_is_refused():
    with pytest.raises(RuntimeError, match="no second one in forward mode alone"):
        jvp(lambda q: jvp(lambda q: ours(q, *X[1:]), (q,), (MOVED[0],))[1], (X[0],), (MOVED[1],))


def test_tangents_of_inputs_without_gradient_are_refused():
    slopes = torch.tensor([0.5, 0.25])
    with pytest.raises(RuntimeError, match="by no alibi_slopes, which has a tangent"):
        jvp(lambda s: cupy_flash.attention(*X, alibi_slopes=s), (slopes,), (slopes,))


@pytest.mark.exhaustive
def test_engines_without_derivatives_refuse_with_a_reason():
    q, k, v = torch.zeros(3, 1, 5, 2, 8).half().unbind()
    with pytest.raises(UnsupportedError, match="it computes no JVP in this version"):
        jvp(lambda q: cupy_flash.attention(q, k, v, backend="simulator:sm_90a", engine="wgmma"), (q,), (q,))


@pytest.mark.exhaustive
def test_kernels():
    """Forward mode, create_graph and forward over reverse run the kernels of the simulator."""

    def on(backend):
        def call(q, k, v):
            return cupy_flash.attention(q, k, v, causal=True, backend=backend)

        x = tuple(tensor.detach().requires_grad_() for tensor in X)
        (dq,) = torch.autograd.grad(call(*x).square().sum(), x[0], create_graph=True)
        dq.square().sum().backward()
        _, hvp = jvp(grad(lambda q: call(q, *X[1:]).square().sum()), (X[0],), (X[0],))
        return [*jvp(call, tuple(X), tuple(X)), *(tensor.grad for tensor in x), hvp]

    for actual, expected in zip(on("simulator"), on("cpu"), strict=True):
        torch.testing.assert_close(actual, expected)


def test_fake_tensors_know_the_shapes_of_second_gradients():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        q, k, v = (torch.empty(2, 5, 2, 4, requires_grad=True) for _ in range(3))
        gradients = torch.autograd.grad(ours(q, k, v).sum(), (q, k, v), create_graph=True)
        second = torch.autograd.grad(sum(g.square().sum() for g in gradients), (q, k, v))
    assert [x.shape for x in second] == [(2, 5, 2, 4)] * 3


@pytest.mark.parametrize("mods", [False, True])
def test_operators_pass_opcheck(mods):
    from cupy_flash.adapters.torch import derivatives
    from cupy_flash.adapters.torch.op import TENSORS, arguments_of
    from cupy_flash.problem.records import Options

    q, k, v = (x.detach() for x in (Q, K, V))
    mod = cupy_flash.Mod(score_mod=with_table(TABLE))
    captured, text = ([TABLE], mod.encoded) if mods else ([], "")
    arguments = (*arguments_of((q, k, v), Options(), None, False), captured, text)
    assert len(TENSORS) < len(arguments)
    direction = (q, None, v, None, None, [TABLE] if mods else [])
    torch.library.opcheck(derivatives.attention_jvp, (*arguments, *direction))
    out, lse = cupy_flash.attention(q, k, v, return_lse=True, score_mod=mod if mods else None)
    saved = (torch.ones_like(out), out, lse, None, True, [True] if mods else [])
    torch.library.opcheck(derivatives.attention_double_backward, (*arguments, *saved, *direction))
