"""Grouped heads, and a packed batch of sequences of different lengths."""

from __future__ import annotations

from svg import Picture

LENGTHS = (5, 2, 7)


def draw() -> dict[str, Picture]:
    picture = Picture(720, 300, "Grouped-query attention, and packed sequences")
    grouped(picture)
    packed(picture)
    return {"heads-and-packing": picture}


def grouped(picture: Picture) -> None:
    picture.text(20, 30, "Grouped heads", "ink", 15, "start", bold=True)
    picture.text(20, 50, "8 heads of q share 2 of k and v", "muted", 12, "start")
    for head in range(8):
        x = 20 + head * 38 + (head // 4) * 12
        picture.box(x, 66, 33, 40, f"q{head}", "q", size=12)
    for head in range(2):
        x = 20 + head * 164
        middle = x + 73
        for q in range(4):
            picture.arrow([(x + 16 + q * 38, 106), (middle, 150)], "muted", 1)
        picture.box(x + 20, 150, 52, 34, f"k{head}", "k", size=13)
        picture.box(x + 76, 150, 52, 34, f"v{head}", "v", size=13)
    picture.text(20, 214, "A tile of keys is loaded once for a group;", "ink", 12.5, "start")
    picture.text(20, 232, "nothing is repeated in memory.", "ink", 12.5, "start")
    picture.text(20, 258, "Hq = Hk: multi-head. Hk = 1: multi-query.", "muted", 12, "start")


def packed(picture: Picture) -> None:
    x, y, side = 400, 74, 14
    picture.text(x, 30, "Packed sequences", "ink", 15, "start", bold=True)
    picture.text(x, 50, "lengths 5, 2, 7: bounds 0, 5, 7, 14; no padding", "muted", 12, "start")
    total = sum(LENGTHS)
    picture.rect(x, y, total * side, total * side, "skipped", "line", rx=0)
    first = 0
    for n, length in enumerate(LENGTHS):
        for i in range(length):
            for j in range(i + 1):
                at = (x + (first + j) * side, y + (first + i) * side)
                picture.rect(*at, side - 1, side - 1, "qkv"[n], rx=1)
        picture.text(x + total * side + 12, y + (first + length / 2) * side + 4, f"sequence {n}", "qkv"[n], 12, "start")
        first += length
    picture.text(x + total * side / 2, y - 7, "keys", "muted", 11)
    picture.text(x - 8, y + total * side / 2, "queries", "muted", 11, turned=True)
    picture.text(x, y + total * side + 22, "Causal, each sequence for itself.", "muted", 12, "start")
