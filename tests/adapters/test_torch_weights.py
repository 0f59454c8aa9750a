"""Weights, the largest of a row and the importance of keys on torch tensors: gradients, compilation, refusals."""

import pytest
import torch
import torch.utils.checkpoint

import cupy_flash
from cupy_flash.adapters.torch import op, weights
from cupy_flash.problem.records import Options

B, SQ, SK, H, HK, D = 2, 19, 23, 4, 2, 16
SHIFT = SK - SQ - 6  # some rows see no key


def normal(seed, *shape, dtype=torch.float64):
    return torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def inputs(dtype=torch.float64):
    """Return q, k, a bias and an array that a score_mod captures, all with gradients."""
    shapes = ((B, SQ, H, D), (B, SK, HK, D), (H, SQ, SK), (H,))
    return [normal(n, *shape, dtype=dtype).requires_grad_() for n, shape in enumerate(shapes)]


def options_of(bias, factors):
    mod = cupy_flash.Mod(lambda s, b, h, i, j: s * factors[h], lambda b, h, i, j: j <= i + SHIFT)
    return dict(score_mod=mod, softcap=2.0, bias=bias)


def dense(q, k, bias, factors, lse=None):
    """Return P of the formula; with an lse that is given, as a function of that too."""
    s = q.transpose(1, 2) @ k.transpose(1, 2).repeat_interleave(H // HK, 1).mT / D**0.5
    s = (2 * torch.tanh(s / 2) + bias) * factors[:, None, None]
    hidden = torch.arange(SK) > torch.arange(SQ)[:, None] + SHIFT
    s = s.masked_fill(hidden, -torch.inf)
    lse = s.logsumexp(-1) if lse is None else lse
    seen = torch.where(lse == -torch.inf, 0, lse)[..., None]
    return torch.where(hidden, 0, (torch.where(hidden, 0, s) - torch.where(hidden, 0, seen)).exp())


def lse_of(q, k, options):
    return cupy_flash.attention(q, k, k, return_lse=True, **options)[1]


FACTORS = normal(9, B, H, SQ, SK)
KINDS = {
    "each": (lambda *x, **o: cupy_flash.attention_weights(*x, **o) * FACTORS, lambda P: P * FACTORS),
    "rows": (
        lambda *x, **o: cupy_flash.attention_weights(*x, rows=[4, 18, 5], heads=[3, 1], **o) * FACTORS[:, :2, :3],
        lambda P: P[:, [3, 1]][:, :, [4, 18, 5]] * FACTORS[:, :2, :3],
    ),
    "mean": (
        lambda *x, **o: cupy_flash.attention_weights(*x, rows=slice(-4, None), heads="mean", **o).square(),
        lambda P: P.mean(1)[:, -4:].square(),
    ),
    "top": (
        lambda *x, **o: cupy_flash.top_weights(*x, 3, **o)[0] * FACTORS[..., :3],
        lambda P: P.topk(3, -1)[0] * FACTORS[..., :3],
    ),
    "importance": (
        lambda *x, **o: cupy_flash.key_importance(*x, row_weights=FACTORS[..., 0], **o).square(),
        lambda P: (P * FACTORS[..., :1]).sum(2).square(),
    ),
}


@pytest.mark.parametrize("detached", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_a_dense_softmax(kind, detached):
    """autograd continues through the lse of attention; a detached lse is a constant."""
    ours, formula = KINDS[kind]
    sources = inputs()
    options = options_of(*sources[2:])
    lse = lse_of(*sources[:2], options)
    lse = lse.detach() if detached else lse
    result, expected = ours(*sources[:2], lse, **options), formula(dense(*sources, lse if detached else None))
    torch.testing.assert_close(result, expected, rtol=1e-12, atol=1e-14)
    gradients = torch.autograd.grad(result.sum(), sources)
    for one, other in zip(gradients, torch.autograd.grad(expected.sum(), sources), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-13)


def test_gradient_of_row_weights():
    sources = inputs()
    options = options_of(*(x.detach() for x in sources[2:]))
    q, k = (x.detach() for x in sources[:2])
    w = normal(5, H, 1).requires_grad_()
    importance = cupy_flash.key_importance(q, k, lse_of(q, k, options), row_weights=w, **options)
    expected = (dense(*sources).detach() * w[..., None]).sum(2)
    torch.testing.assert_close(importance, expected)
    one, other = (torch.autograd.grad((x * FACTORS[:, :, 0]).sum(), w)[0] for x in (importance, expected))
    torch.testing.assert_close(one, other)


def test_compiled_in_one_graph():
    sources = inputs(torch.float32)
    options = options_of(*sources[2:])

    def loss(q, k):
        lse = lse_of(q, k, options)
        P = cupy_flash.attention_weights(q, k, lse, rows=slice(3, 9), heads="mean", **options)
        values, keys = cupy_flash.top_weights(q, k, lse, 2, **options)
        importance = cupy_flash.key_importance(q, k, lse, **options)
        return P.square().sum() + (values * keys).sum() + importance.square().sum()

    results = []
    for function in (loss, torch.compile(loss, backend="aot_eager", fullgraph=True)):
        value = function(*sources[:2])
        results.append((value, *torch.autograd.grad(value, sources)))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("kind", ["attention_weights", "top_weights", "key_importance"])
def test_the_operator_keeps_the_rules_of_torch(kind):
    q, k, bias, factors = inputs(torch.float32)
    lse = lse_of(q, k, dict(bias=bias)).detach().requires_grad_()
    settings = Options(bias=bias, score_mod=lambda s, b, h, i, j: s * factors[h])
    mod = op.mod_of_options(settings)
    arguments = op.arguments_of((q, k, k), settings, None, fp8=False)
    wanted = (lse, None, kind, [3, 5], "list", [1, 0], None, 2)
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(
        weights.attention_weights, (*arguments, list(mod.arrays), mod.encoded, *wanted), test_utils=checks
    )


def test_packed_sequences():
    bounds = torch.tensor([0, 5, 5, 19], dtype=torch.int32), torch.tensor([0, 9, 12, 23], dtype=torch.int32)
    q, k = normal(0, SQ, H, D).requires_grad_(), normal(1, SK, HK, D).requires_grad_()
    _, lse = cupy_flash.attention_varlen(q, k, k, *bounds, 14, 11, causal=True, return_lse=True)
    P = cupy_flash.attention_weights_varlen(q, k, lse, *bounds, 14, 11, causal=True)
    assert P.shape == (H, SQ, 11)
    gradients = torch.autograd.grad((P * FACTORS[0, :, :, :11]).sum(), (q, k))
    parts = []
    for b in (0, 2):
        rows, keys = (slice(*x[b : b + 2].tolist()) for x in bounds)
        one = q[None, rows], k[None, keys]
        lse = cupy_flash.attention(*one, one[1], causal=True, return_lse=True)[1]
        weights = cupy_flash.attention_weights(*one, lse, causal=True)
        parts.append((weights[0] * FACTORS[0, :, rows, : weights.shape[-1]]).sum())
    for one, other in zip(gradients, torch.autograd.grad(sum(parts), (q, k)), strict=True):
        torch.testing.assert_close(one, other)


def test_dtypes():
    """Weights and their gradients have the dtype of q, importance that of lse; autocast casts q and k."""
    q, k = normal(0, B, SQ, H, D, dtype=torch.float32).requires_grad_(), normal(1, B, SK, HK, D, dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        _, lse = cupy_flash.attention(q, k, k, return_lse=True)
        P = cupy_flash.attention_weights(q, k, lse)
        importance = cupy_flash.key_importance(q, k, lse)
    assert (P.dtype, importance.dtype) == (torch.bfloat16, torch.float32)
    assert torch.autograd.grad(P.float().square().sum(), q)[0].dtype == torch.float32


def test_dropout_has_no_effect_and_draws_no_seed():
    q, k, *_ = inputs()
    lse = lse_of(q, k, {})
    state = torch.get_rng_state()
    dropped = cupy_flash.attention_weights(q, k, lse, dropout=0.5)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(dropped, cupy_flash.attention_weights(q, k, lse))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (dict(rows=[19]), r"rows must be in \[0, 19\), not 19 to 19"),
        (dict(rows=[0.5]), "rows must be None, a slice or a vector of whole numbers"),
        (dict(heads="list"), 'heads must be "each", "mean" or a list of heads, not \'list\''),
        (dict(limit=10), "more than limit = 10"),
        (dict(lse=None), "lse"),
    ],
    ids=lambda x: str(x)[:20],
)
def test_errors(changes, reason):
    q, k, *_ = inputs()
    lse = lse_of(q, k, {}) if "lse" not in changes else changes.pop("lse")
    with pytest.raises((TypeError, ValueError), match=reason):
        cupy_flash.attention_weights(q, k, lse, **changes)


# torch's forward mode uses torch.jit.script, which torch itself has deprecated.
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
def test_second_and_forward_mode_derivatives_are_refused():
    q, k, *_ = inputs()
    with pytest.raises(RuntimeError, match="no forward-mode derivative of key_importance"):
        torch.func.jvp(lambda q: cupy_flash.key_importance(q, k, torch.zeros(B, H, SQ, dtype=q.dtype)), (q,), (q,))
    P = cupy_flash.attention_weights(q, k, lse_of(q, k, {}))
    (dq,) = torch.autograd.grad(P.square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative of attention_weights"):
        dq.sum().backward()


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_inside_a_checkpoint(kind):
    ours, _ = KINDS[kind]
    q, k, bias, factors = inputs()

    def loss(q, k, bias, factors):
        options = options_of(bias, factors)
        return ours(q, k, lse_of(q, k, options), **options).sum()

    arrays = q, k, bias, factors
    expected = torch.autograd.grad(loss(*arrays), arrays)
    saved = torch.autograd.grad(torch.utils.checkpoint.checkpoint(loss, *arrays, use_reentrant=False), arrays)
    torch.testing.assert_close(saved, expected)


def test_a_kv_cache_records_no_gradients():
    q, k, *_ = inputs()
    _, lse = cupy_flash.attention_with_kv_cache(q.detach(), k.detach(), k.detach(), return_lse=True)
    P = cupy_flash.attention_weights_with_kv_cache(q.detach(), k.detach(), lse)
    expected = cupy_flash.attention_weights(q, k, lse, causal=True)
    torch.testing.assert_close(P, expected.detach())
    with pytest.raises(ValueError, match="q require grad, and a KV cache records no gradients"):
        cupy_flash.attention_weights_with_kv_cache(q, k.detach(), lse)
