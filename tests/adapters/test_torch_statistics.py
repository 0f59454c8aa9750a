"""statistics= of attention on tensors: gradients, torch.compile, and what is refused."""

import pytest
import torch
import torch.utils.checkpoint
from torch.autograd import gradcheck

import cupy_flash
from cupy_flash import UnsupportedError
from cupy_flash.adapters.torch import flex_attention

ALL = ("max", "argmax", "entropy")


def tensors(*shapes):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in shapes]


def test_max_and_entropy_are_differentiable():
    q, k, v, sink, bias = tensors((2, 5, 4, 3), (2, 6, 2, 3), (2, 6, 2, 2), (4,), (4, 5, 6))

    def attend(q, k, v, sink, bias):
        options = dict(causal=True, softcap=3.0, sink=sink, bias=bias, score_mod=lambda s, b, h, i, j: s + s * sink[h])
        out, lse, found = cupy_flash.attention(q, k, v, return_lse=True, statistics=("entropy", "max"), **options)
        assert found.argmax is None
        return out, lse, found.max, found.entropy

    assert gradcheck(attend, (q, k, v, sink, bias), fast_mode=True)


def test_a_packed_batch_is_differentiable():
    q, k, v = tensors((10, 4, 3), (12, 2, 3), (12, 2, 2))
    bounds = [torch.tensor(x, dtype=torch.int32) for x in ([0, 3, 3, 9], [0, 5, 8, 11])]

    def attend(q, k, v):
        options = dict(return_lse=True, statistics=ALL)
        _, _, found = cupy_flash.attention_varlen(q, k, v, *bounds, 6, 5, causal=True, **options)
        return found.max.masked_fill(found.argmax < 0, 0), found.entropy

    assert gradcheck(attend, (q, k, v), fast_mode=True)


def test_argmax_has_no_gradient_and_the_others_one_derivative():
    q, k, v = tensors((1, 3, 2, 4), (1, 5, 2, 4), (1, 5, 2, 4))
    found = cupy_flash.attention(q, k, v, return_lse=True, statistics=ALL)[2]
    assert found.argmax.dtype == torch.int32 and not found.argmax.requires_grad and found.max.requires_grad
    (dq,) = torch.autograd.grad(found.entropy.sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative of attention with statistics"):
        dq.sum().backward()
    none = cupy_flash.attention(q, k, v, return_lse=True, statistics=())[2]
    assert none == (None, None, None)


def test_gradients_inside_a_checkpoint():
    arrays = tensors((1, 3, 2, 4), (1, 5, 2, 4), (1, 5, 2, 4))

    def loss(*arrays):
        out, lse, found = cupy_flash.attention(*arrays, return_lse=True, statistics=ALL)
        return out.sum() + lse.sum() + found.max.sum() + found.entropy.sum()

    expected = torch.autograd.grad(loss(*arrays), arrays)
    saved = torch.autograd.grad(torch.utils.checkpoint.checkpoint(loss, *arrays, use_reentrant=False), arrays)
    torch.testing.assert_close(saved, expected)


# torch's forward mode uses torch.jit.script, which torch itself has deprecated.
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
def test_forward_mode_is_refused():
    q, k, v = tensors((1, 3, 2, 4), (1, 5, 2, 4), (1, 5, 2, 4))
    with pytest.raises(RuntimeError, match="no forward-mode derivative of attention with statistics"):
        torch.func.jvp(lambda k: cupy_flash.attention(q, k, v, return_lse=True, statistics=ALL)[2].max, (k,), (k,))


def test_a_graph_of_torch_compile_has_the_call():
    q, k, v = tensors((1, 3, 2, 4), (1, 5, 2, 4), (1, 5, 2, 4))

    def attend(q, k, v):
        return cupy_flash.attention(q, k, v, causal=True, return_lse=True, statistics=("argmax", "entropy"))[2]

    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
    for one, other in zip(compiled(q, k, v), attend(q, k, v), strict=True):
        assert one is other is None or torch.equal(one, other)
    grads = [torch.autograd.grad(function(q, k, v).entropy.sum(), (q, k)) for function in (compiled, attend)]
    assert all(map(torch.equal, *grads))


def test_wrong_names_raise_the_errors_of_all_requirements():
    q, k, v = tensors((1, 3, 2, 4), (1, 5, 2, 4), (1, 5, 2, 4))
    for options, error, reason in (
        (dict(statistics=("max",)), ValueError, "statistics need return_lse=True"),
        (dict(statistics=("mean",), return_lse=True), ValueError, "statistics must be some of max, argmax, entropy"),
        (dict(statistics="max", return_lse=True), TypeError, "statistics must be a tuple"),
    ):
        with pytest.raises(error, match=reason):
            cupy_flash.attention(q, k, v, **options)
    with pytest.raises(UnsupportedError, match="aten"):
        cupy_flash.attention(q, k, v, return_lse=True, statistics=("max",), engine="aten")


def test_a_cache_of_tensors_returns_statistics():
    q, k, v = (x.detach() for x in tensors((1, 3, 2, 4), (1, 5, 2, 4), (1, 5, 2, 4)))
    out, lse, found = cupy_flash.attention_with_kv_cache(q, k, v, return_lse=True, statistics=("argmax", "max"))
    expected = cupy_flash.attention(q, k, v, causal=True, return_lse=True, statistics=("argmax", "max"))
    torch.testing.assert_close((out, lse, found.max), (expected[0], expected[1], expected[2].max))
    assert torch.equal(found.argmax, expected[2].argmax) and found.entropy is None


def test_flex_attention_returns_max_scores():
    from torch.nn.attention.flex_attention import AuxRequest

    q, k, v = tensors((1, 2, 5, 4), (1, 2, 6, 4), (1, 2, 6, 4))
    for lse in (False, True):
        _, aux = flex_attention(q, k, v, return_aux=AuxRequest(lse=lse, max_scores=True))
        torch.testing.assert_close(aux.max_scores, (q @ k.mT / 2).amax(-1))
        assert (aux.lse is not None) == lse


@pytest.mark.parametrize("bounds", [None, (0, 5, 12)], ids=["padded", "packed"])
def test_a_training_step_with_qk_clip_equals_eager(bounds):
    """The step of docs/weights.md: the projections of heads whose largest score exceeds a threshold shrink."""
    x, target, *weights = tensors((12, 8), (12, 8), *[(8, 8)] * 3)
    sequences = torch.tensor([0] * 5 + [bounds is not None] * 7)
    hidden = torch.ones(12, 12, dtype=torch.bool).triu(1) | (sequences[:, None] != sequences)

    def by_statistics(q, k, v):
        options = dict(causal=True, return_lse=True, statistics=("max",))
        if bounds is None:
            out, _, found = cupy_flash.attention(q[None], k[None], v[None], **options)
            return out[0], found.max[0].amax(dim=1)
        lengths = torch.tensor(bounds, dtype=torch.int32)
        out, _, found = cupy_flash.attention_varlen(q, k, v, lengths, lengths, 7, 7, **options)
        return out, found.max.amax(dim=1)

    def eager(q, k, v):
        scores = torch.einsum("ihd,jhd->hij", q, k).mul(4**-0.5).masked_fill(hidden, -torch.inf)
        return torch.einsum("hij,jhd->ihd", scores.softmax(-1), v), scores.amax(dim=(1, 2))

    def step(attend):
        trained = [w.detach().clone().requires_grad_() for w in weights]
        out, largest = attend(*[(x @ w.T).view(12, 2, 4) for w in trained])
        gradients = torch.autograd.grad((out.flatten(1) - target).square().sum(), trained)
        shrink = (1 / largest.detach().clamp(min=1)).sqrt()
        stepped = [w.detach() - 0.01 * dw for w, dw in zip(trained, gradients, strict=True)]
        for w in stepped[:2]:
            w.view(2, 4, 8).mul_(shrink[:, None, None])
        assert (largest > 1).any()
        return stepped

    torch.testing.assert_close(step(by_statistics), step(eager))
