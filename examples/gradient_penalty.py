"""Train a critic whose loss contains a gradient of attention, differentiated again.

    python -m pip install -e ".[torch]"
    python examples/gradient_penalty.py
    python examples/gradient_penalty.py --attention math

The critic distinguishes sets of points on a ring from sets of random points, and a
penalty pulls the norm of its gradient with respect to the points to 1 (Gulrajani et
al., Improved Training of Wasserstein GANs, 2017). Both attentions have the same losses
up to rounding. `--memory` prints the peak of one step at growing lengths instead:
linear with cupy_flash, quadratic with math.
"""

from __future__ import annotations

import argparse
import math
import resource
import sys
from collections.abc import Callable, Sequence
from multiprocessing import get_context
from typing import Any

import torch
from torch import nn

import cupy_flash

POINTS, WIDTH, HEADS, BATCH = 32, 32, 4, 32


def math_attention(q: Any, k: Any, v: Any) -> Any:
    """Return softmax(q k^T / sqrt(D)) v, storing all scores; q, k, v: (B, S, H, D)."""
    scores = torch.einsum("bihd,bjhd->bhij", q, k) / math.sqrt(q.shape[-1])
    return torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), v)


ATTENTIONS: dict[str, Callable[..., Any]] = {
    "cupy_flash": cupy_flash.attention,
    "math": math_attention,
}


class Critic(nn.Module):
    """Maps every set of points to a number."""

    def __init__(self, attention: Callable[..., Any]) -> None:
        super().__init__()
        self.attention = attention
        self.points, self.qkv = nn.Linear(2, WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 2 * WIDTH), nn.SiLU(), nn.Linear(2 * WIDTH, 1)
        )

    def forward(self, x: Any) -> Any:
        """Map x (B, S, 2) to (B,)."""
        h = torch.tanh(self.points(x))
        q, k, v = self.qkv(h).unflatten(-1, (3, HEADS, -1)).unbind(2)
        return self.mlp(h + self.attention(q, k, v).flatten(2)).mean((1, 2))


def penalized_loss(critic: nn.Module, real: Any, fake: Any, mix: Any) -> Any:
    """Return critic(fake) - critic(real) + 10 (norm of the gradient at mix - 1)^2."""
    between = (mix * real + (1 - mix) * fake).requires_grad_()
    (gradient,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
    penalty = (gradient.flatten(1).norm(dim=1) - 1).square().mean()
    return (critic(fake) - critic(real)).mean() + 10 * penalty


def batch(points: int, size: int, generator: torch.Generator) -> tuple[Any, Any, Any]:
    """Return (real, fake, mix): rings of points, random points, mixing weights."""
    angle = 2 * math.pi * torch.rand(size, points, generator=generator)
    fake = torch.randn(size, points, 2, generator=generator)
    return (
        torch.stack([angle.cos(), angle.sin()], dim=-1),
        fake,
        torch.rand(size, 1, 1, generator=generator),
    )


def train(attention: str, steps: int, learning_rate: float) -> list[float]:
    """Return the losses of a run, the same for every attention up to rounding."""
    torch.manual_seed(0)
    critic, generator = Critic(ATTENTIONS[attention]), torch.Generator().manual_seed(1)
    optimizer = torch.optim.Adam(critic.parameters(), lr=learning_rate)
    losses = []
    for step in range(steps):
        loss = penalized_loss(critic, *batch(POINTS, BATCH, generator))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if step % max(steps // 10, 1) == 0:
            print(f"step {step:4}  loss {losses[-1]:.4f}")
    return losses


def peak_bytes(attention: str, points: int) -> int:
    """Return this process's peak memory after one step on `points` (0: 8) points."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    critic = Critic(ATTENTIONS[attention])
    penalized_loss(
        critic, *batch(points or 8, 1, torch.Generator().manual_seed(1))
    ).backward()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


def memory(attention: str, lengths: Sequence[int]) -> dict[int, int]:
    """Return {points: bytes beyond those of a minimal step}, each in a process."""
    used = {}
    for points in (0, *lengths):
        with get_context("spawn").Pool(1) as process:
            used[points] = process.apply(peak_bytes, (attention, points)) - used.get(
                0, 0
            )
            if points:
                print(f"{points:6} points  {used[points] / 2**20:8.1f} MiB")
    del used[0]
    return used


def main(arguments: Sequence[str] | None = None) -> object:
    """Parse the command line; train, or measure memory."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--attention", choices=ATTENTIONS, default="cupy_flash")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument(
        "--memory", type=int, nargs="*", metavar="POINTS", help="measure these lengths"
    )
    options = parser.parse_args(arguments)
    if options.memory is not None:
        return memory(options.attention, options.memory or (1024, 2048, 4096))
    return train(options.attention, options.steps, options.learning_rate)


if __name__ == "__main__":
    main()
