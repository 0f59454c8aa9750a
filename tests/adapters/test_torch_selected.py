"""attention to selected keys on torch tensors: autograd, compile, transforms and what is refused."""

import pytest
import torch

import cupy_flash
from cupy_flash.adapters.torch import attention, attention_varlen

torch.manual_seed(0)
Q, K, V = (torch.randn(1, 9, heads, 8, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2))
LISTS = torch.stack([torch.randperm(9)[:4] for _ in range(9)]).int()[None, None]
LISTS[0, 0, 3] = -1


def attend(q, k, v):
    return attention(q, k, v, selected=LISTS, causal=True)


def dense(q, k, v):
    named = torch.zeros(9, 10, dtype=torch.bool).scatter(1, LISTS[0, 0].long() % 10, True)[:, :9]
    return attention(q, k, v, mask=named, causal=True)


def test_gradients_are_those_of_finite_differences():
    assert torch.autograd.gradcheck(attend, (Q, K, V), fast_mode=True)


def test_gradients_are_those_of_a_mask():
    found, expected = (torch.autograd.grad(f(Q, K, V).square().sum(), (Q, K, V)) for f in (attend, dense))
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y)


def test_compiled_and_vmapped_calls():
    expected = attend(Q, K, V)
    assert torch.equal(torch.compile(attend, backend="aot_eager", fullgraph=True)(Q, K, V), expected)
    torch.testing.assert_close(torch.func.vmap(attend)(Q[None], K[None], V[None])[0], expected)


def test_packed_blocks_of_keys():
    bounds = torch.tensor([0, 4, 9], dtype=torch.int32)
    lists = torch.tensor([[[0], [-1], [0], [-1]]], dtype=torch.int32)  # rows 0 to 3 of the first, 0 to 3 of the second
    out = attention_varlen(Q[0], K[0], V[0], bounds, bounds, 5, 5, selected=lists, selected_block=8, selected_rows=4)
    torch.testing.assert_close(out[:4], attention(Q[:, :4], K[:, :4], V[:, :4])[0])
    torch.testing.assert_close(out[4:8], attention(Q[:, 4:8], K[:, 4:], V[:, 4:])[0])
    assert not out[8].any()


# torch's forward mode uses torch.jit.script, which torch itself has deprecated.
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
def test_second_derivatives_and_forward_mode_are_those_of_a_mask():
    """Also those of an array that a score_mod captures."""
    table = torch.randn(9, dtype=torch.float64, requires_grad=True)
    named = torch.zeros(9, 10, dtype=torch.bool).scatter(1, LISTS[0, 0].long() % 10, True)[:, :9]

    def results(**lists):
        def attend(q, k, v, table):
            return attention(q, k, v, causal=True, score_mod=lambda s, b, h, i, j: s.sin() + s * table[j], **lists)

        inputs = (Q, K, V, table)
        gradients = torch.autograd.grad(attend(*inputs).square().sum(), inputs, create_graph=True)
        penalty = sum(x.square().sum() for x in gradients)
        _, moved = torch.func.jvp(attend, inputs, tuple(x.detach().cos() for x in inputs))
        return moved, *torch.autograd.grad(penalty, inputs)

    for x, y in zip(results(selected=LISTS), results(mask=named), strict=True):
        torch.testing.assert_close(x, y)


@pytest.mark.parametrize(
    "options, reason",
    [
        (dict(selected=LISTS.long()), "selected must be int32, not int64: pass selected.to"),
        (dict(selected=LISTS * 0), "names key 0 twice"),
        (dict(selected=LISTS, selected_rows=1.5), "selected_rows must be a whole number"),
    ],
    ids=["dtype", "twice", "rows"],
)
def test_wrong_lists_are_refused(options, reason):
    with pytest.raises((TypeError, ValueError), match=reason):
        attention(Q, K, V, **options)


def test_lists_of_keys_in_a_cache():
    with torch.no_grad():
        out = cupy_flash.attention_with_kv_cache(Q, K, V, selected=LISTS)
        torch.testing.assert_close(out, attend(Q, K, V))
        compiled = torch.compile(cupy_flash.attention_with_kv_cache, backend="aot_eager")
        assert torch.equal(compiled(Q, K, V, selected=LISTS), out)


Q_IDX, WEIGHTS, K_IDX = (
    torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in ((2, 9, 3, 8), (2, 9, 3), (2, 11, 8))
)
TARGET, ROWS = torch.rand(2, 9, 4, dtype=torch.float64), torch.rand(9, dtype=torch.float64)


# torch's forward mode uses torch.jit.script, which torch itself has deprecated.
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
def test_the_choice_and_the_gradients_of_an_indexer():
    lists = cupy_flash.select_keys(Q_IDX, WEIGHTS, K_IDX, 4)
    assert (lists.dtype, lists.requires_grad) == (torch.int32, False)
    arrays = [x.numpy(force=True) for x in (Q_IDX, WEIGHTS, K_IDX)]
    assert lists.tolist() == cupy_flash.select_keys(*arrays, 4).tolist()
    lists[0, 0, 3] = -1
    assert torch.autograd.gradcheck(
        lambda *x: cupy_flash.selection_loss(*x, lists, TARGET, ROWS), (Q_IDX, WEIGHTS, K_IDX), fast_mode=True
    )
    loss = cupy_flash.selection_loss(Q_IDX, WEIGHTS, K_IDX, lists, TARGET)
    (gradient,) = torch.autograd.grad(loss, Q_IDX, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative of selection_loss"):
        gradient.sum().backward()
    with pytest.raises(RuntimeError, match="no forward-mode derivative of selection_loss"):
        torch.func.jvp(lambda w: cupy_flash.selection_loss(Q_IDX, w, K_IDX, lists, TARGET), (WEIGHTS,), (WEIGHTS,))


def test_a_compiled_indexer():
    def train(q, w, k):
        lists = cupy_flash.select_keys(q, w, k, 4, causal="bottom_right", block=1, local=1)
        return cupy_flash.selection_loss(q, w, k, lists, TARGET)

    compiled = torch.compile(train, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(Q_IDX, WEIGHTS, K_IDX), train(Q_IDX, WEIGHTS, K_IDX))


@pytest.mark.parametrize(
    "call, kind, reason",
    [
        (lambda: cupy_flash.select_keys(Q_IDX, WEIGHTS, K_IDX, "4"), TypeError, "n must be a whole number"),
        (lambda: cupy_flash.select_keys(Q_IDX, WEIGHTS, K_IDX.tolist(), 4), TypeError, "k_idx"),
        (lambda: cupy_flash.selection_loss(Q_IDX, WEIGHTS, K_IDX, LISTS, None), TypeError, "target"),
        (lambda: cupy_flash.selection_loss(Q_IDX, WEIGHTS, K_IDX, LISTS * 0, TARGET), ValueError, "names key 0 twice"),
    ],
    ids=["number", "list", "none", "twice"],
)
def test_wrong_arguments_of_an_indexer_are_refused(call, kind, reason):
    with pytest.raises(kind, match=reason):
        call()


def test_weights_at_the_lists_as_the_target_of_a_loss():
    lse = attention(Q, K, V, causal=True, return_lse=True)[1].detach()

    def target_of(q, k, lse, lists):
        return cupy_flash.attention_weights(q, k, lse, heads="mean", causal=True, selected=lists)

    target = target_of(Q, K, lse, LISTS)
    dense = cupy_flash.attention_weights(Q, K, lse, heads="mean", causal=True)
    expected = torch.where(LISTS[:, 0] < 0, 0, dense.gather(-1, LISTS[:, 0].clamp(min=0).long()))
    torch.testing.assert_close(target, expected)
    assert torch.equal(torch.compile(target_of, backend="aot_eager", fullgraph=True)(Q, K, lse, LISTS), target)
    k_idx = K_IDX[:1, :9]
    loss = cupy_flash.selection_loss(Q_IDX[:1], WEIGHTS[:1], k_idx, LISTS, target)
    assert torch.autograd.grad(loss, (Q_IDX, Q), allow_unused=True)[1] is None
