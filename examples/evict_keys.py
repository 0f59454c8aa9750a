"""Keep half of a KV cache by the importance of its keys: H2O and SnapKV.

    python examples/evict_keys.py  # a minute on two CPU cores
    python examples/evict_keys.py --keep 0.25

A small model learns to recall. Its prompt has pairs of a name and a value at random
places among other tokens, and it ends with questions, each a name. After the prompt the
cache of every layer and head is cut to a part of its keys, and the questions are asked
again: the model must find the values in what was kept. H2O (Zhang et al., 2023) keeps
the keys that all rows of the prompt saw most, SnapKV (Li et al., 2024) those that its
last rows saw most. Both need the sums of attention probabilities over rows, which a
fused kernel does not have: cupy_flash.key_importance recomputes them from q, k and lse,
in linear memory. Keeping the last keys, or any, costs the model most of its answers.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import cupy_flash

NAMES, VALUES, OTHERS = 32, 8, 8
PAIRS, QUESTIONS, LENGTH = 8, 8, 64  # tokens of a prompt: pairs, others, questions
DIM, HEADS, LAYERS = 48, 2, 2
VOCABULARY = NAMES * VALUES + OTHERS + NAMES  # a pair is one token
Cache = list[tuple[Tensor, Tensor]]  # k and v of every layer, (B, S, H, D)
Choose = Callable[[Tensor, Tensor, Tensor, int], Tensor]  # q, k, lse, n -> (B, H, n)


def prompts(batch: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return tokens (B, LENGTH), and the values that answer the last QUESTIONS ones."""

    def shuffled(n: int) -> Tensor:
        return torch.rand(batch, n, generator=generator).argsort(dim=1)

    names = shuffled(NAMES)[:, :PAIRS]
    values = torch.randint(VALUES, (batch, PAIRS), generator=generator)
    shape = (batch, LENGTH - QUESTIONS)
    tokens = NAMES * VALUES + torch.randint(OTHERS, shape, generator=generator)
    places = shuffled(LENGTH - QUESTIONS)[:, :PAIRS]
    tokens.scatter_(1, places, names * VALUES + values)
    asked = shuffled(PAIRS)[:, :QUESTIONS]
    questions = NAMES * VALUES + OTHERS + names.gather(1, asked)
    return torch.cat([tokens, questions], dim=1), values.gather(1, asked)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.second = nn.RMSNorm(DIM), nn.RMSNorm(DIM)
        self.qkv = nn.Linear(DIM, 3 * DIM, bias=False)
        self.proj = nn.Linear(DIM, DIM, bias=False)
        self.mlp = nn.Sequential(
            nn.Linear(DIM, 2 * DIM), nn.GELU(), nn.Linear(2 * DIM, DIM)
        )

    def heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return q, k and v, (B, S, H, D) each."""
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, HEADS, -1)).unbind(2)
        return q, k, v

    def add(self, x: Tensor, attended: Tensor) -> Tensor:
        x = x + self.proj(attended.flatten(-2))
        return x + self.mlp(self.second(x))


class Model(nn.Module):
    """A causal transformer without positions: it recalls by content."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, DIM)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.head = nn.Linear(DIM, VALUES)

    def forward(
        self, tokens: Tensor, choose: Choose | None = None, n: int = 0
    ) -> tuple[Tensor, Cache]:
        """Return logits of all tokens, and the cache, cut to n keys of each head."""
        x, cache = self.embedding(tokens), []
        for layer in self.layers:
            q, k, v = layer.heads(x)
            out, lse = cupy_flash.attention(q, k, v, causal=True, return_lse=True)
            if choose is not None:
                kept = choose(q, k, lse, n).transpose(1, 2)[..., None]  # (B, n, H, 1)
                k, v = (
                    y.gather(1, kept.expand(-1, -1, -1, y.shape[-1])) for y in (k, v)
                )
            cache.append((k, v))
            x = layer.add(x, out)
        return self.head(x), cache

    def step(self, token: Tensor, cache: Cache) -> Tensor:
        """Return the logits of a token (B, 1) that sees the cache and itself."""
        x = self.embedding(token)
        for layer, (k, v) in zip(self.layers, cache, strict=True):
            q, *new = layer.heads(x)
            k, v = (torch.cat(pair, dim=1) for pair in zip((k, v), new, strict=True))
            x = layer.add(x, cupy_flash.attention(q, k, v))
        return self.head(x)


def train(steps: int, batch: int = 32) -> Model:
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), 4e-3, weight_decay=0.01)
    for step in range(steps):
        rate = min(1, (step + 1) / 20) * (1 + math.cos(math.pi * step / steps)) / 2
        optimizer.param_groups[0]["lr"] = 4e-3 * rate
        tokens, answers = prompts(batch, generator)
        logits = model(tokens)[0][:, -QUESTIONS:]
        loss = F.cross_entropy(logits.flatten(0, 1), answers.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 100 == 0:
            print(f"step {step:4}  loss {loss.item():.3f}", flush=True)
    return model


# Eviction policies: each returns the n keys to keep, given q, k (B, S, H, D) and lse
# (B, H, S).


def with_recent(scores: Tensor, n: int) -> Tensor:
    """Return the keys of the n largest scores, in order; the last n / 8 stay anyway."""
    scores[..., -(n // 8) :] = torch.inf
    return scores.topk(n, dim=-1).indices.sort(dim=-1).values


def h2o(q: Tensor, k: Tensor, lse: Tensor, n: int) -> Tensor:
    return with_recent(cupy_flash.key_importance(q, k, lse, causal=True), n)


def snapkv(q: Tensor, k: Tensor, lse: Tensor, n: int) -> Tensor:
    last = torch.zeros(q.shape[1])
    last[-QUESTIONS:] = 1
    scores = cupy_flash.key_importance(q, k, lse, row_weights=last, causal=True)
    return with_recent(scores, n)


def recent(q: Tensor, k: Tensor, lse: Tensor, n: int) -> Tensor:
    return torch.arange(k.shape[1] - n, k.shape[1]).expand(*lse.shape[:2], n)


def at_random(q: Tensor, k: Tensor, lse: Tensor, n: int) -> Tensor:
    return with_recent(
        torch.rand(lse.shape, generator=torch.Generator().manual_seed(1)), n
    )


POLICIES: dict[str, Choose | None] = {
    "all keys": None,
    "H2O": h2o,
    "SnapKV": snapkv,
    "the last keys": recent,
    "any keys": at_random,
}


@torch.no_grad()
def accuracies(model: Model, keep: float, batch: int = 64) -> dict[str, float]:
    """Return the part of the questions that is answered with each kind of cache."""
    tokens, answers = prompts(batch, torch.Generator().manual_seed(12345))
    found = {}
    for name, choose in POLICIES.items():
        _, cache = model(tokens, choose, round(keep * LENGTH))
        again = tokens[:, -QUESTIONS:]
        said = [model.step(again[:, n : n + 1], cache) for n in range(QUESTIONS)]
        found[name] = (
            (torch.cat(said, dim=1).argmax(-1) == answers).float().mean().item()
        )
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--steps", type=int, default=600, help="of training [%(default)s]"
    )
    parser.add_argument(
        "--keep", type=float, default=0.5, help="part of the keys [%(default)s]"
    )
    arguments = parser.parse_args()
    model = train(arguments.steps)
    print(f"\nanswers with {arguments.keep:.0%} of the cache:")
    for name, accuracy in accuracies(model, arguments.keep).items():
        print(f"  {name:14} {accuracy:6.1%}")
