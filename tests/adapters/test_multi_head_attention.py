"""The output, weights and gradients of nn.MultiheadAttention inside `sdpa()`, against torch's own."""

import inspect

import pytest
import torch
import torch.nn.functional as F
from tiers import in_tiers
from torch._dynamo.backends.debugging import aot_eager

from cupy_flash.adapters import torch as adapter

L, S, N, E, H = 7, 9, 2, 32, 4


def normal(seed, *shape):
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def inputs(kdim=E, vdim=E):
    return normal(0, L, N, E), normal(1, S, N, kdim), normal(2, S, N, vdim)


def layer_of(**settings):
    torch.manual_seed(0)
    return torch.nn.MultiheadAttention(E, H, dtype=torch.float64, **settings)


LAYERS = {
    "packed": {},
    "separate": dict(kdim=24, vdim=40, bias=False),
    "bias_kv": dict(add_bias_kv=True),
    "zero": dict(add_zero_attn=True),
}
PADDED = torch.arange(S) >= torch.tensor([[S], [6]])
HIDDEN = torch.ones(L, S, dtype=torch.bool).triu(3)
MASKS = {
    "none": {},
    "padding": dict(key_padding_mask=PADDED),
    "both": dict(key_padding_mask=PADDED, attn_mask=HIDDEN),
    "hint": dict(attn_mask=torch.ones(L, S, dtype=torch.bool).triu(1), is_causal=True),
    "additive": dict(attn_mask=normal(3, N * H, L, S)),
}


EVERY = {
    f"{layer}-{mask}-{average}": (layer, mask, average)
    for layer in LAYERS for mask in MASKS for average in (True, False)
}  # fmt: skip
DEFAULT = [
    *(f"packed-{mask}-{n % 2 == 0}" for n, mask in enumerate(MASKS)), "separate-both-False", "bias_kv-hint-True",
    "zero-padding-False",
]  # fmt: skip


@pytest.mark.parametrize("case", in_tiers(EVERY, DEFAULT))
def test_output_weights_and_gradients_of_torch(case):
    settings, masks, average = case
    settings = LAYERS[settings]
    layer = layer_of(**settings)
    arrays = inputs(settings.get("kdim", E), settings.get("vdim", E))
    expected = layer(*arrays, average_attn_weights=average, **MASKS[masks])
    with adapter.sdpa():
        actual = layer(*arrays, average_attn_weights=average, **MASKS[masks])
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)
    parameters = list(layer.parameters())
    ours, theirs = (
        torch.autograd.grad(out.sin().sum() + (weights * normal(4, *weights.shape)).sum(), parameters)
        for out, weights in (actual, expected)
    )
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


def test_it_is_a_drop_in_of_torchs_function():
    ours, theirs = (
        inspect.signature(x) for x in (adapter.multi_head_attention_forward, F.multi_head_attention_forward)
    )
    assert [(x.name, x.default) for x in ours.parameters.values()] == [
        (x.name, x.default) for x in theirs.parameters.values()
    ]
    layer = layer_of()
    x = normal(0, L, E)
    words = (E, H, layer.in_proj_weight, layer.in_proj_bias, None, None, False, 0.0, layer.out_proj.weight, None)
    for need_weights in (True, False):
        pair = [
            function(x, x, x, *words, need_weights=need_weights, average_attn_weights=False)
            for function in (adapter.multi_head_attention_forward, F.multi_head_attention_forward)
        ]
        torch.testing.assert_close(*pair)
    with pytest.raises(RuntimeError, match="Need attn_mask"):
        adapter.multi_head_attention_forward(x, x, x, *words, is_causal=True)


def test_weights_are_those_before_dropout():
    layer = layer_of(dropout=0.5)
    expected = layer.eval()(*inputs())
    layer.train()
    with adapter.sdpa():
        out, weights = layer(*inputs())
    torch.testing.assert_close(weights, expected[1])
    assert not torch.allclose(out, expected[0])
    layer.dropout = 1.0
    with adapter.sdpa():
        out, _ = layer(*inputs())
    torch.testing.assert_close(out, layer.out_proj.bias.expand(L, N, E))


def test_a_row_that_sees_no_key_is_0():
    hidden = torch.zeros(L, S, dtype=torch.bool)
    hidden[2] = True
    layer = layer_of()
    with adapter.sdpa():
        out, weights = layer(*inputs(), attn_mask=hidden)
    assert torch.equal(weights[:, 2], torch.zeros(N, S, dtype=torch.float64))
    torch.testing.assert_close(out[2], layer.out_proj.bias.expand(N, E))


@pytest.mark.exhaustive
def test_compiled_in_one_graph():
    layer = layer_of()

    def attend(*arrays):
        with adapter.sdpa():
            return layer(*arrays)

    torch.testing.assert_close(torch.compile(attend, backend=aot_eager, fullgraph=True)(*inputs()), layer(*inputs()))
