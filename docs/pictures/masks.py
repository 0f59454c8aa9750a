"""The masks of the guide to mods, in the classes that the package computes for their tiles."""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from cupy_flash.mods.plot import HIDDEN, SEEN, UNMASKED, picture
from place import ROOT
from svg import Picture

BLOCK = 8  # queries and keys of a tile; real ones have 64 or 128
COLORS = {HIDDEN: "hidden", SEEN: "seen", UNMASKED: "full"}
PIXELS = 2.5  # of a score


def masks() -> tuple[int, dict[str, Any]]:
    """The tokens and the mask_mods that the second block of the guide defines."""
    text = (ROOT / "docs" / "mods.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    names: dict[str, Any] = {}
    exec(next(block for block in blocks if "MASK_MODS" in block), names)
    built_in = {
        "causal": lambda b, h, q, kv: q >= kv,
        "causal, window 20": lambda b, h, q, kv: (q >= kv) & (q - kv <= 20),
    }
    return names["S"], {**built_in, **names["MASK_MODS"]}


def runs(chosen: np.ndarray) -> list[tuple[int, int, int]]:
    """The (row, first, end) of the runs of True in the rows."""
    edges = np.diff(np.pad(chosen.astype(np.int8), ((0, 0), (1, 1))), axis=1)
    starts, ends = np.argwhere(edges == 1), np.argwhere(edges == -1)
    return [(int(row), int(first), int(end)) for (row, first), (_, end) in zip(starts, ends, strict=True)]


def draw() -> dict[str, Picture]:
    tokens, mods = masks()
    side, columns = tokens * PIXELS, 4
    rows = -(-len(mods) // columns)
    cell = side + 13
    drawn = Picture(720, 44 + rows * (cell + 24), "Masks over 64 tokens, in tiles of 8 x 8")
    legend = {"tile skipped": "skipped", "tile seen in full: no mask": "full", "seen": "seen"}
    drawn.legend(20, 24, {**legend, "hidden, in a cut tile": "hidden"})
    scale = side / tokens
    for n, (name, mod) in enumerate(mods.items()):
        x, y = 20 + n % columns * cell, 62 + n // columns * (cell + 24)
        drawn.text(x, y - 7, name, "ink", 12.5, "start", bold=True)
        drawn.rect(x, y, side, side, "skipped", "line", rx=0)
        classes = picture(mod, tokens, tokens, block_q=BLOCK, block_kv=BLOCK)
        for of, color in COLORS.items():
            drawn.pixels(x, y, side / tokens, color, runs(classes == of))
        for at in range(0, tokens + 1, BLOCK):
            drawn.path([(x + at * scale, y), (x + at * scale, y + side)], "line", 0.5)
            drawn.path([(x, y + at * scale), (x + side, y + at * scale)], "line", 0.5)
    return {"masks": drawn}
