"""Train a tiny MeanFlow model, whose loss needs torch.func.jvp of attention.

    python -m pip install -e ".[torch]"
    python examples/meanflow.py
    python examples/meanflow.py --attention math

The model generates rings of points in one step. An example is a set of points on a ring
with a random center and radius; its tokens are the points. The transformer u(z, r, t)
learns the average velocity of the flow between the times r and t, by its derivative
along the flow (Geng et al., Mean Flows for One-step Generative Modeling, 2025):

    z = (1 - t) x + t e ;  v = e - x ;
    loss = |u - stop_gradient(v - (t - r) (v du/dz + du/dt))|^2

torch.func.jvp gives u and the derivative in one pass. Both attentions give the same
losses up to rounding.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

import cupy_flash

POINTS, WIDTH, HEADS, LAYERS, BATCH = 32, 32, 4, 2, 32


def math_attention(q: Any, k: Any, v: Any) -> Any:
    """Return softmax(q k^T / sqrt(D)) v, storing all scores; q, k, v: (B, S, H, D)."""
    scores = torch.einsum("bihd,bjhd->bhij", q, k) / math.sqrt(q.shape[-1])
    return torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), v)


ATTENTIONS: dict[str, Callable[..., Any]] = {
    "cupy_flash": cupy_flash.attention,
    "math": math_attention,
}


class Block(nn.Module):
    """Pre-norm transformer block with unmasked attention."""

    def __init__(self, attention: Callable[..., Any]) -> None:
        super().__init__()
        self.attention = attention
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.SiLU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: Any) -> Any:
        """Map x (B, S, WIDTH) to the same shape."""
        q, k, v = self.qkv(self.norm_1(x)).unflatten(-1, (3, HEADS, -1)).unbind(2)
        x = x + self.out(self.attention(q, k, v).flatten(2))
        return x + self.mlp(self.norm_2(x))


class AverageVelocity(nn.Module):
    """u(z, r, t): points (B, S, 2) and times (B, 1, 1) to velocities (B, S, 2)."""

    def __init__(self, attention: Callable[..., Any]) -> None:
        super().__init__()
        self.points, self.times = nn.Linear(2, WIDTH), nn.Linear(4, WIDTH)
        self.blocks = nn.Sequential(*(Block(attention) for _ in range(LAYERS)))
        self.velocity = nn.Linear(WIDTH, 2)

    def forward(self, z: Any, r: Any, t: Any) -> Any:
        """Return the average velocity of each point between the times r and t."""
        times = self.times(
            torch.cat([t, t - r, torch.cos(3 * t), torch.sin(3 * t)], dim=-1)
        )
        return self.velocity(self.blocks(self.points(z) + times))


def rings(generator: torch.Generator) -> Any:
    """Return sets of points on rings, (BATCH, POINTS, 2)."""
    angle = 2 * math.pi * torch.rand(BATCH, POINTS, generator=generator)
    center = torch.randn(BATCH, 1, 2, generator=generator) * 0.5
    radius = 0.5 + torch.rand(BATCH, 1, 1, generator=generator)
    return center + radius * torch.stack([angle.cos(), angle.sin()], dim=-1)


def meanflow_loss(model: nn.Module, generator: torch.Generator) -> Any:
    """Return the loss of one batch."""
    x = rings(generator)
    noise = torch.randn(x.shape, generator=generator)
    r, t = torch.rand(2, BATCH, 1, 1, generator=generator).sort(dim=0).values
    r = torch.where(
        torch.rand(BATCH, 1, 1, generator=generator) < 0.5, t, r
    )  # half of them: u(z, t, t) is v
    z, v = (1 - t) * x + t * noise, noise - x
    moving = (v, torch.zeros_like(r), torch.ones_like(t))
    u, derivative = torch.func.jvp(model, (z, r, t), moving)
    target = v - (t - r) * derivative
    return (u - target.detach()).square().mean()


def train(attention: str, steps: int, learning_rate: float) -> list[float]:
    """Return the losses of a run, the same for every attention up to rounding."""
    torch.manual_seed(0)
    model, generator = (
        AverageVelocity(ATTENTIONS[attention]),
        torch.Generator().manual_seed(1),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)
    losses = []
    for step in range(steps):
        loss = meanflow_loss(model, generator)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if step % max(steps // 10, 1) == 0:
            print(f"step {step:4}  loss {losses[-1]:.4f}")
    print(
        f"mean of the last tenth "
        f"{sum(losses[-max(steps // 10, 1) :]) / max(steps // 10, 1):.4f}"
    )
    return losses


def main(arguments: Sequence[str] | None = None) -> list[float]:
    """Parse the command line and train."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--attention", choices=ATTENTIONS, default="cupy_flash")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    options = parser.parse_args(arguments)
    return train(options.attention, options.steps, options.learning_rate)


if __name__ == "__main__":
    main()
