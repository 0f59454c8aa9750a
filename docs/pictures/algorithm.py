"""The algorithm on one screen: the forward by tiles, and what the backward recomputes."""

from __future__ import annotations

from svg import Picture


def draw() -> dict[str, Picture]:
    picture = Picture(720, 500, "Attention by tiles: forward with online softmax, backward with recomputed scores")
    forward(picture)
    backward(picture)
    return {"algorithm": picture}


def tiles(picture: Picture, x: float, y: float, rows: int, name: str, color: str, current: int, across: bool) -> None:
    """A column or a row of tiles of an array in global memory, one of which is on chip."""
    for n in range(rows):
        at = (x + n * 46, y, 42, 34) if across else (x, y + n * 40, 46, 36)
        if n == current:
            picture.box(*at, f"{name}{'ij'[across]}", color, size=13, bold=True)
        else:
            picture.rect(*at, "panel", color)


def forward(picture: Picture) -> None:
    picture.text(20, 30, "Forward", "ink", 16, "start", bold=True)
    picture.text(100, 30, "a block has one tile of Q and loops over the tiles of K and V", "muted", 12.5, "start")
    tiles(picture, 24, 112, 4, "Q", "q", 1, across=False)
    picture.text(47, 290, "Q", "q", 13, bold=True)
    tiles(picture, 128, 52, 4, "K", "k", 2, across=True)
    picture.text(330, 74, "K", "k", 13, bold=True)
    tiles(picture, 128, 246, 4, "V", "v", 2, across=True)
    picture.text(330, 268, "V", "v", 13, bold=True)
    # On chip
    picture.rect(110, 104, 590, 124, "panel", "line", rx=6)
    picture.text(690, 120, "registers and shared memory", "muted", 11, "end")
    picture.box(128, 138, 108, 52, "S = Qi Kj\u1d40\n+ mask, mods", "s", size=12.5)
    picture.box(272, 138, 108, 52, "m = max(m, S)\nP = exp(S - m)", "s", size=12.5)
    picture.box(416, 138, 118, 52, "l = l c + sum P\nO = O c + P Vj", "o", size=12.5)
    picture.box(570, 138, 112, 52, "O / l\nlse = m + log l", "o", size=12.5)
    for x in (236, 380):
        picture.arrow([(x, 164), (x + 36, 164)])
    picture.arrow([(534, 164), (570, 164)], "o")
    picture.text(552, 157, "end", "muted", 10.5)
    picture.text(462, 211, "c = exp(old m - new m)", "muted", 11.5, "start")
    picture.arrow([(70, 170), (128, 170)], "q")
    picture.arrow([(241, 86), (241, 120), (182, 120), (182, 138)], "k")
    picture.arrow([(241, 246), (241, 207), (446, 207), (446, 190)], "v")
    picture.arrow([(626, 190), (626, 246)], "o")
    picture.box(560, 246, 132, 34, "Oi, lse to memory", "paper", "o", stroke="o", size=12.5)
    words = "The S x S scores are never in memory: what grows with the length is O and lse."
    picture.text(20, 314, words, "ink", 13, "start")
    picture.path([(20, 332), (700, 332)], "line", 1)


def backward(picture: Picture) -> None:
    picture.text(20, 360, "Backward", "ink", 16, "start", bold=True)
    picture.text(112, 360, "recomputes the scores, tile by tile, from q, k and lse", "muted", 12.5, "start")
    boxes = (
        ("S = Qi Kj\u1d40", "s", True),
        ("P = exp(S - lse)", "s", True),
        ("dP = dOi Vj\u1d40", "o", False),
        ("dS = P (dP - delta)", "s", False),
    )
    x = 20.0
    for n, (words, color, again) in enumerate(boxes):
        width = 28 + 7.1 * len(words)
        fill, ink = ("paper", color) if again else (color, "")
        picture.box(x, 384, width, 36, words, fill, ink, stroke=color, size=13, dashed=again)
        if n < len(boxes) - 1:
            picture.arrow([(x + width, 402), (x + width + 22, 402)])
        x += width + 22
    picture.text(20, 438, "dashed: recomputed", "muted", 11.5, "start")
    results = (("dV += P\u1d40 dO", "v"), ("dK += dS\u1d40 Q", "k"), ("dQ += dS K", "q"))
    for n, (words, color) in enumerate(results):
        picture.box(20 + n * 136, 452, 124, 34, words, color, size=13)
    picture.text(438, 474, "delta = sum of dO O over a row", "muted", 12, "start")
