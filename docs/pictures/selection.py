"""Selected keys: scores of an indexer, the list of each query, and what attention then sees."""

from __future__ import annotations

import numpy as np

import cupy_flash
from masks import runs
from svg import Picture

QUERIES, KEYS = 12, 4  # and entries of a list
LEVELS = {"heat1": 0.0, "heat2": 0.25, "heat3": 0.5, "heat4": 0.7, "heat5": 0.9}  # {colour: the smallest quantile}
PIXELS = 15.0  # of a score and of an entry
TOP = 178.0  # of the three panels


def indexer() -> tuple[np.ndarray, np.ndarray]:
    """Return the scores (Sq, Sk) of an indexer of two heads, and its lists (Sq, n)."""
    rng = np.random.default_rng(5)
    q, k = rng.normal(size=(1, QUERIES, 2, 4)), rng.normal(size=(1, QUERIES, 4))
    weights = rng.random((1, QUERIES, 2))
    lists = cupy_flash.select_keys(q, weights, k, KEYS)
    products = np.maximum(np.einsum("thd,sd->ths", q[0], k[0]), 0)
    return np.einsum("th,ths->ts", weights[0], products), lists[0, 0]


def draw() -> dict[str, Picture]:
    drawn = Picture(720, 392, "Selected keys: an indexer scores the keys, lists name the best, attention reads them")
    flow(drawn)
    scores, lists = indexer()
    causal = np.tri(QUERIES, dtype=bool)
    side = PIXELS * QUERIES
    names = {60.0: "scores of the indexer", 300.0: "lists (B, 1, Sq, n)", 460.0: "what each query sees"}
    for x, name in names.items():
        drawn.text(x, TOP - 9, name, "ink", 12.5, "start", bold=True)
    drawn.text(52, TOP + side / 2, "queries", "muted", 11.5, turned=True)

    ranks = np.where(causal, np.searchsorted(np.sort(scores[causal]), scores) / causal.sum(), -1)
    bounds = [*LEVELS.values(), 2.0]
    drawn.rect(60, TOP, side, side, "skipped", "line", rx=0)
    for n, color in enumerate(LEVELS):
        drawn.pixels(60, TOP, PIXELS, color, runs((ranks >= bounds[n]) & (ranks < bounds[n + 1])))

    for row, entries in enumerate(lists.tolist()):
        for column, entry in enumerate(entries):
            at = (300 + 26 * column, TOP + PIXELS * row)
            drawn.rect(*at, 26, PIXELS, "panel" if entry < 0 else "hidden", "line", rx=0)
            drawn.text(at[0] + 13, at[1] + 11.5, str(entry), "muted" if entry < 0 else "ink", 11)

    seen = (lists[:, :, None] == np.arange(QUERIES)).any(axis=1)
    drawn.rect(460, TOP, side, side, "skipped", "line", rx=0)
    drawn.pixels(460, TOP, PIXELS, "k", runs(seen))
    drawn.text(60 + side / 2, TOP + side + 17, "keys", "muted", 11.5)
    drawn.text(460 + side / 2, TOP + side + 17, "keys", "muted", 11.5)
    return {"selection": drawn}


def flow(drawn: Picture) -> None:
    """Draw the steps from the indexer to the attention, and from its probabilities back to the indexer."""
    y, height = 26.0, 40.0
    drawn.box(60, y, 140, height, "indexer\nq_idx, weights, k_idx", "panel", size=12)
    drawn.box(258, y, 104, height, "select_keys", "k", size=12.5)
    drawn.box(460, y, 130, height, "attention\nselected=lists", "q", size=12.5)
    middle = y + height / 2
    for first, last, words in ((200, 258, ""), (362, 460, "lists"), (590, 640, "")):
        drawn.arrow([(first, middle), (last, middle)])
        drawn.text((first + last) / 2, middle - 6, words, "muted", 11.5)
    drawn.text(646, middle + 4.5, "out, lse", "ink", 12.5, "start")
    below = 96.0
    drawn.box(460, below, 130, 34, "attention_weights", "panel", size=12)
    drawn.box(258, below, 104, 34, "selection_loss", "panel", size=12)
    drawn.arrow([(525, y + height), (525, below)])
    drawn.arrow([(460, below + 17), (362, below + 17)])
    drawn.text(411, below + 11, "target", "muted", 11.5)
    drawn.arrow([(258, below + 17), (130, below + 17), (130, y + height)])
    drawn.text(136, below + 11, "gradients", "muted", 11.5, "start")
