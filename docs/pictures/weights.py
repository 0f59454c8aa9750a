"""A heat map of attention weights and of the importance of keys, as the package computes them from q, k and lse."""

from __future__ import annotations

import numpy as np

import cupy_flash
from masks import runs
from svg import Picture

WORDS = ["the", "cat", "saw", "the", "dog", "and", "the", "dog", "saw", "the", "cat", "run"]
SLOPES = (0.0, 0.7)  # the second head sees the words before alone: its q is 0, and ALiBi makes it prefer near ones
LEVELS = {"heat1": 0.02, "heat2": 0.08, "heat3": 0.2, "heat4": 0.4, "heat5": 0.7}  # {colour: the smallest weight}
PIXELS = 16.0  # of a weight
TALLEST = 40.0  # pixels of the bar of the most important key


def sentence() -> tuple[np.ndarray, np.ndarray, dict[str, object]]:
    """q and k (1, S, 2, D) of the words, and the options: equal words have equal rows of k."""
    names = sorted(set(WORDS))
    k = 3.0 * np.eye(len(names))[[names.index(word) for word in WORDS]]
    q = np.stack([k, 0 * k], axis=1)[None]
    return q, np.stack([k, k], axis=1)[None], dict(causal=True, scale=0.5, alibi_slopes=np.float32(SLOPES))


def heat(drawn: Picture, x: float, y: float, weights: np.ndarray) -> None:
    """Draw weights (rows, keys) in the colours of their levels."""
    bounds = [*LEVELS.values(), np.inf]
    for n, color in enumerate(LEVELS):
        drawn.pixels(x, y, PIXELS, color, runs((weights >= bounds[n]) & (weights < bounds[n + 1])))


def draw() -> dict[str, Picture]:
    q, k, options = sentence()
    _, lse = cupy_flash.attention(q, k, k, return_lse=True, **options)
    each = cupy_flash.attention_weights(q, k, lse, **options)[0]
    mean = cupy_flash.attention_weights(q, k, lse, heads="mean", **options)[0]
    importance = cupy_flash.key_importance(q, k, lse, **options)[0].sum(axis=0)
    side = PIXELS * len(WORDS)
    drawn = Picture(720, 352, "Attention weights of two heads, their mean, and the importance of each key")
    drawn.legend(60, 24, {f"from {100 * least:.0f} %": color for color, least in LEVELS.items()})
    panels = {"head 0: the same word": each[0], "head 1: the words before": each[1], 'heads="mean"': mean}
    for n, (name, weights) in enumerate(panels.items()):
        x, y = 60 + n * (side + 26), 66.0
        drawn.text(x, y - 9, name, "ink", 12.5, "start", bold=True)
        drawn.rect(x, y, side, side, "skipped", "line", rx=0)
        heat(drawn, x, y, weights)
    for row, word in enumerate(WORDS):
        drawn.text(52, 66 + PIXELS * (row + 0.75), word, "muted", 11.5, "end")
    x, y = 60 + 2 * (side + 26), 66 + side + 12 + TALLEST
    for column, (word, height) in enumerate(zip(WORDS, TALLEST * importance / importance.max(), strict=True)):
        drawn.rect(x + PIXELS * column + 2, y - height, PIXELS - 4, height, "k", rx=1)
        drawn.text(x + PIXELS * (column + 0.72), y + 18, word, "muted", 11.5, turned=True)
    drawn.text(x - 8, y - 4, "key_importance", "ink", 12.5, "end", bold=True)
    return {"weights": drawn}
