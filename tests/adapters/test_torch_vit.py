"""A vision transformer written like timm's, with cupy_flash through `sdpa` and torch's registry, against torch's
attention.
"""

import contextlib

import pytest
import torch
import torch.nn.functional as F
from tolerance import assert_matches_reference
from torch import nn
from torch.nn.attention import activate_flash_attention_impl, restore_flash_attention_impl
from torch_orders import furthest, in_several_orders

from cupy_flash import dispatch
from cupy_flash.adapters.torch import sdpa
from cupy_flash.cpu import aten

DIM, HEADS, DEPTH = 32, 4, 2


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(DIM, 3 * DIM)
        self.q_norm, self.k_norm = nn.LayerNorm(DIM // HEADS), nn.LayerNorm(DIM // HEADS)
        self.proj = nn.Linear(DIM, DIM)

    def forward(self, x):
        qkv = self.qkv(x).reshape(*x.shape[:2], 3, HEADS, DIM // HEADS).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        out = F.scaled_dot_product_attention(self.q_norm(q), self.k_norm(k), v, dropout_p=0.0)
        return self.proj(out.transpose(1, 2).reshape(x.shape))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.attn = Attention()
        self.mlp = nn.Sequential(nn.Linear(DIM, 4 * DIM), nn.GELU(), nn.Linear(4 * DIM, DIM))

    def forward(self, x):
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class VisionTransformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.patch_embed = nn.Conv2d(3, DIM, kernel_size=4, stride=4)
        self.cls_token = nn.Parameter(torch.randn(1, 1, DIM))
        self.pos_embed = nn.Parameter(torch.randn(1, 17, DIM))
        self.blocks = nn.Sequential(*(Block() for _ in range(DEPTH)))
        self.head = nn.Linear(DIM, 10)

    def forward(self, images):
        patches = self.patch_embed(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls_token.expand(len(images), -1, -1), patches], dim=1) + self.pos_embed
        return self.head(self.blocks(x)[:, 0])


@contextlib.contextmanager
def registered():
    activate_flash_attention_impl("cupy_flash")
    try:
        yield
    finally:
        restore_flash_attention_impl()


def logits_and_gradients(model, images):
    logits = model(images)
    names, parameters = zip(*model.named_parameters(), strict=True)
    return {"logits": logits.detach()} | dict(
        zip(names, torch.autograd.grad(logits.square().sum(), parameters), strict=True)
    )


@pytest.mark.parametrize("routed", [sdpa, registered], ids=["sdpa", "registry"])
def test_vision_transformer(routed, monkeypatch):
    torch.manual_seed(0)
    model, images = VisionTransformer(), torch.randn(2, 3, 16, 16)
    steps = []

    def count(module, function, name):
        original = getattr(module, function)

        def counted(*call):
            result = original(*call)
            if result is not None:
                steps.append(name)
            return result

        monkeypatch.setattr(module, function, counted)

    count(dispatch, "forward", "forward")
    count(dispatch, "backward", "backward")
    count(aten, "repeat", "forward")  # a later block's forward may be a kept call
    with routed():
        actual = logits_and_gradients(model, images)
    assert steps == ["forward"] * DEPTH + ["backward"] * DEPTH
    runs = list(in_several_orders(lambda: logits_and_gradients(model, images)))
    exact = logits_and_gradients(model.double(), images.double())
    assert len(steps) == 2 * DEPTH
    for name in actual:
        low = furthest(exact[name], *(run[name] for run in runs))
        assert_matches_reference(actual[name], exact[name], low, "float32", name)
