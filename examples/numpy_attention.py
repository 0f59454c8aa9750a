"""Attention with NumPy alone: a curve is fitted by gradient descent on the keys and values of one attention call.

    python -m pip install -e .
    python examples/numpy_attention.py

A query is a place on a line, a key another, and the output the average of the values near the query: what statistics
calls kernel regression. `attention_vjp` gives the output and the gradients; there is no framework.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import numpy as np

import cupy_flash

PLACES, KEYS = 200, 24
SHARPNESS = 8.0


def fit(steps: int, learning_rate: float) -> tuple[np.ndarray, np.ndarray, list[float]]:
    """The curve, the fitted curve, and the mean square between them before each step."""
    x, places = np.linspace(-3.0, 3.0, PLACES), np.linspace(-3.0, 3.0, KEYS)
    curve = np.sin(2.0 * x) + 0.3 * x
    # (1, S, 1, 2): with these q.k is -(x - place)^2 / 2, but for what is the same for every key and drops out.
    q = np.stack([x, np.ones(PLACES)], axis=-1)[None, :, None, :].astype(np.float32)
    k = np.stack([places, -(places**2) / 2], axis=-1)[None, :, None, :].astype(np.float32)
    v = np.zeros((1, KEYS, 1, 1), np.float32)
    losses = []
    for _ in range(steps):
        out, vjp = cupy_flash.attention_vjp(q, k, v, scale=SHARPNESS)
        error = out - curve.astype(np.float32)[None, :, None, None]
        losses.append(float((error**2).mean()))
        gradients = vjp(2 * error / PLACES)
        k -= 0.01 * learning_rate * gradients.dk
        v -= learning_rate * gradients.dv
    return curve, cupy_flash.attention(q, k, v, scale=SHARPNESS)[0, :, 0, 0], losses


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="a curve fitted by gradient descent through attention, in NumPy")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--learning-rate", type=float, default=4.0)
    asked = parser.parse_args(arguments)
    curve, fitted, losses = fit(asked.steps, asked.learning_rate)
    for i in range(0, asked.steps, max(1, asked.steps // 10)):
        print(f"step {i + 1:4d}  mean square {losses[i]:.5f}")
    error = fitted - curve
    print(f"at the end mean square {(error**2).mean():.5f}, {abs(error).max():.3f} off at the worst place")


if __name__ == "__main__":
    main()
