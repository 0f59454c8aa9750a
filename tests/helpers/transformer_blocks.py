"""GPT and Llama blocks whose operators save the same tensors on a CPU as on a GPU."""

import torch
from torch import nn
from torch.nn import functional as F

from cupy_flash.adapters import torch as adapter
from cupy_flash.memory import Transformer, measure

SMALL_GPT = Transformer(2, 128, 4, 512, 64)
SMALL_LLAMA = Transformer(
    2, 128, 4, 512, 64, kv_heads=2, mlp_dim=344, activation="swiglu", layer_norm=False, bias=False,
    learned_positions=False, tied=False, dropout=False,
)  # fmt: skip


def dropout(x):
    # native_dropout saves a mask of bytes, as F.dropout does on a GPU; on a CPU F.dropout saves a mask in x's dtype.
    return torch.native_dropout(x, 0.1, True)[0]


def standard_attention(q, k, v, drop):
    """Compute softmax(q k^T) v with P in memory, without repeating k and v for the query heads of a GQA group."""
    (_, s, heads, _), kv_heads = q.shape, k.shape[2]
    # (b, kv_heads, group * s, D)
    q = q.unflatten(2, (kv_heads, -1)).permute(0, 2, 3, 1, 4).flatten(2, 3) * q.shape[-1] ** -0.5
    k, v = k.transpose(1, 2), v.transpose(1, 2)
    hidden = torch.full((s, s), -torch.inf, dtype=q.dtype).triu(1).repeat(heads // kv_heads, 1)
    probabilities = torch.softmax(q @ k.transpose(-1, -2) + hidden, -1)
    out = (dropout(probabilities) if drop else probabilities) @ v
    return out.unflatten(2, (-1, s)).permute(0, 3, 1, 2, 4).flatten(2, 3)


def flash_attention(q, k, v, drop):
    return adapter.attention(q, k, v, causal=True, dropout=0.1 if drop else 0.0)


ATTENTION = {"standard": standard_attention, "flash": flash_attention}


class GPTBlock(nn.Module):
    def __init__(self, sizes, attention):
        super().__init__()
        d, f = sizes.embed_dim, sizes.mlp_dim
        self.attention, self.heads = ATTENTION[attention], sizes.heads
        self.norm1, self.norm2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.out, self.mlp_in, self.mlp_out = (
            nn.Linear(*shape) for shape in ((d, 3 * d), (d, d), (d, f), (f, d))
        )

    def forward(self, x):
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).unbind(2)
        x = x + dropout(self.out(self.attention(q, k, v, True).flatten(-2)))
        return x + dropout(self.mlp_out(F.gelu(self.mlp_in(self.norm2(x)))))


class RMSNormFunction(torch.autograd.Function):
    """RMS norm as one operator, as on a GPU; torch's norm on a CPU is several operators and saves more."""

    @staticmethod
    def forward(ctx, x, weight):
        rstd = x.float().square().mean(-1, keepdim=True).add(1e-5).rsqrt()
        ctx.save_for_backward(x, weight, rstd)
        return (x * rstd).to(x.dtype) * weight

    @staticmethod
    def backward(ctx, dout):
        raise NotImplementedError


class RMSNorm(nn.RMSNorm):
    def forward(self, x):
        return RMSNormFunction.apply(x, self.weight)


class LlamaBlock(nn.Module):
    def __init__(self, sizes, attention):
        super().__init__()
        d, f, D = sizes.embed_dim, sizes.mlp_dim, sizes.head_dim
        self.attention, self.D = ATTENTION[attention], D
        self.norm1, self.norm2 = RMSNorm(d), RMSNorm(d)
        self.q, self.k, self.v, self.out, self.gate, self.up, self.down = (
            nn.Linear(*shape, bias=False)
            for shape in (
                (d, sizes.heads * D),
                *2 * ((d, sizes.kv_heads * D),),
                (sizes.heads * D, d),
                (d, f),
                (d, f),
                (f, d),
            )
        )
        angles = torch.arange(4096)[:, None, None] * 10000 ** (-torch.arange(D) % (D // 2) * 2 / D)
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def rotate(self, x):
        a, b = x.chunk(2, dim=-1)
        return x * self.cos[: x.shape[1]] + torch.cat((-b, a), dim=-1) * self.sin[: x.shape[1]]

    def forward(self, x):
        y = self.norm1(x)
        q, k, v = (projection(y).unflatten(-1, (-1, self.D)) for projection in (self.q, self.k, self.v))
        x = x + self.out(self.attention(self.rotate(q), self.rotate(k), v, False).flatten(-2))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


# README.md promises 2 % on a GPU. This is stricter, but allows for layer norm in bf16, which saves its statistics in
# fp32 on a GPU and in bf16 on a CPU: 0.2 % of the total.
WITHIN = 0.005
BLOCKS = {"gpt": (GPTBlock, SMALL_GPT), "llama": (LlamaBlock, SMALL_LLAMA)}
DTYPES = {"mixed": torch.bfloat16, "float32": torch.float32}


def measure_block(family, attention, precision, batch, seqlen):
    block, sizes = BLOCKS[family]
    x = torch.randn(batch, seqlen, sizes.embed_dim, dtype=DTYPES[precision], requires_grad=True)
    return sum(measure(block(sizes, attention).to(DTYPES[precision]), x).values())
