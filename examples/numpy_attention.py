"""Attention in NumPy only: fit a curve by gradient descent on keys and values.

    python -m pip install -e .
    python examples/numpy_attention.py

Queries and keys encode positions on a line, and the output is a weighted average of the
values near the query: kernel regression. `attention_vjp` returns the output and the
function that computes the gradients; no framework is needed.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import numpy as np

import cupy_flash

POINTS, KEYS = 200, 24
SHARPNESS = 8.0


def fit(steps: int, learning_rate: float) -> tuple[np.ndarray, np.ndarray, list[float]]:
    """Return the curve, the fit, and the mean squared error before each step."""
    x, centers = np.linspace(-3.0, 3.0, POINTS), np.linspace(-3.0, 3.0, KEYS)
    curve = np.sin(2.0 * x) + 0.3 * x
    # (1, S, 1, 2): q.k = x * center - center^2 / 2 = -(x - center)^2 / 2 + x^2 / 2; the
    # softmax cancels the last term.
    q = np.stack([x, np.ones(POINTS)], axis=-1)[None, :, None, :].astype(np.float32)
    k = np.stack([centers, -(centers**2) / 2], axis=-1)[None, :, None, :].astype(
        np.float32
    )
    v = np.zeros((1, KEYS, 1, 1), np.float32)
    losses = []
    for _ in range(steps):
        out, vjp = cupy_flash.attention_vjp(q, k, v, scale=SHARPNESS)
        error = out - curve.astype(np.float32)[None, :, None, None]
        losses.append(float((error**2).mean()))
        gradients = vjp(2 * error / POINTS)
        k -= 0.01 * learning_rate * gradients.dk
        v -= learning_rate * gradients.dv
    return curve, cupy_flash.attention(q, k, v, scale=SHARPNESS)[0, :, 0, 0], losses


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description="fit a curve by gradient descent through attention, in NumPy"
    )
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--learning-rate", type=float, default=4.0)
    options = parser.parse_args(arguments)
    curve, fitted, losses = fit(options.steps, options.learning_rate)
    for i in range(0, options.steps, max(1, options.steps // 10)):
        print(f"step {i + 1:4d}  mean squared error {losses[i]:.5f}")
    error = fitted - curve
    print(
        f"final mean squared error {(error**2).mean():.5f}, largest error "
        f"{abs(error).max():.3f}"
    )


if __name__ == "__main__":
    main()
