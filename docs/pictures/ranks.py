"""Ring and Ulysses attention over four ranks."""

from __future__ import annotations

from svg import Picture

COLORS = ("q", "k", "v", "s")


def draw() -> dict[str, Picture]:
    picture = Picture(720, 400, "Ring and Ulysses attention over four ranks")
    ring(picture)
    ulysses(picture)
    return {"ranks": picture}


def zigzag(picture: Picture, x: float, y: float) -> None:
    """The sequence in eight chunks, two for each rank."""
    for chunk in range(8):
        rank = min(chunk, 7 - chunk)
        picture.box(x + chunk * 40, y, 38, 24, f"{rank}", COLORS[rank], size=12)


def ring(picture: Picture) -> None:
    picture.text(20, 30, "Ring", "ink", 15, "start", bold=True)
    picture.text(20, 50, "queries stay, keys and values go round", "muted", 12, "start")
    zigzag(picture, 20, 64)
    picture.text(20, 106, "zigzag: equal work under a causal mask", "muted", 11.5, "start")
    places = ((30, 130), (200, 130), (200, 270), (30, 270))
    for rank, (x, y) in enumerate(places):
        picture.rect(x, y, 130, 86, "panel", "line", rx=6)
        picture.text(x + 65, y + 17, f"rank {rank}", "ink", 12, bold=True)
        picture.box(x + 8, y + 26, 52, 50, f"Q{rank}\nO, lse", COLORS[rank], size=12)
        picture.box(x + 70, y + 26, 52, 50, f"K{rank}\nV{rank}", "paper", COLORS[rank], 12, stroke=COLORS[rank])
    picture.arrow([(162, 173), (198, 173)])
    picture.arrow([(265, 218), (265, 268)])
    picture.arrow([(198, 313), (162, 313)])
    picture.arrow([(95, 268), (95, 218)])
    picture.text(20, 384, "4 steps; partial results are merged by lse", "ink", 12.5, "start")


def grid(picture: Picture, x: float, y: float, by_rows: bool) -> None:
    """Rows of the sequence (down) and heads (across), coloured by rank."""
    for row in range(4):
        for head in range(4):
            rank = row if by_rows else head
            picture.rect(x + head * 30, y + row * 30, 28, 28, COLORS[rank], rx=2)
    picture.text(x + 60, y - 7, "heads", "muted", 11)
    if by_rows:
        picture.text(x - 7, y + 60, "sequence", "muted", 11, turned=True)


def ulysses(picture: Picture) -> None:
    x = 400
    picture.path([(372, 20), (372, 385)], "line", 1)
    picture.text(x, 30, "Ulysses", "ink", 15, "start", bold=True)
    picture.text(x, 50, "rows are exchanged for heads", "muted", 12, "start")
    grid(picture, x + 14, 96, True)
    grid(picture, x + 178, 96, False)
    picture.arrow([(x + 138, 148), (x + 162, 148)])
    picture.arrow([(x + 162, 172), (x + 138, 172)])
    picture.text(x + 74, 236, "each rank: its rows", "ink", 12)
    picture.text(x + 238, 236, "each rank: its heads", "ink", 12)
    picture.box(x + 2, 262, 138, 44, "q, k, v, out", "panel", size=13)
    picture.box(x + 166, 262, 134, 44, "attention of the\nwhole sequence", "panel", size=12.5)
    picture.arrow([(x + 140, 276), (x + 166, 276)])
    picture.arrow([(x + 166, 294), (x + 140, 294)])
    picture.text(x, 340, "two all-to-alls; heads of k and v", "ink", 12.5, "start")
    picture.text(x, 358, "are a multiple of the ranks", "ink", 12.5, "start")
    picture.legend(x, 386, {f"rank {n}": color for n, color in enumerate(COLORS)})
