"""Line charts and bars of stored results, in the look of the pictures."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from svg import Picture

COLORS = ("q", "k", "s", "v", "alarm", "o")  # of the series, ours first

BAR = 15  # thickness of a bar, with the space below it
SMALL, LINE = 10.5, 13  # sizes of the words at the end of a series, and of their line


class Frame(NamedTuple):
    """The area of a chart inside a picture."""

    x: float
    y: float
    width: float
    height: float


def lines(
    picture: Picture,
    frame: Frame,
    title: str,
    unit: str,
    series: Mapping[str, Sequence[tuple[float, float]]],
    colors: Mapping[str, str],
    logarithmic: bool = True,
    ends: Mapping[str, Sequence[str]] | None = None,
) -> None:
    """Series of (length, value) over the logarithm of the length.

    `ends` has the lines of words that say why a series ends before the others, for the
    first series that ends so.
    """
    x, y, width, height = frame
    points = [point for of in series.values() for point in of]
    lengths = sorted({length for length, _ in points})
    low, high = min(value for _, value in points), max(value for _, value in points)
    if logarithmic:
        low, high = 10 ** math.floor(math.log10(low)), 10 ** math.ceil(math.log10(high))
        ticks = [10.0**n for n in range(round(math.log10(low)), round(math.log10(high)) + 1)]
    else:
        step = nice(high / 4)
        low, high = 0.0, step * math.ceil(high / step)
        ticks = [step * n for n in range(round(high / step) + 1)]

    def across(length: float) -> float:
        share = math.log(length / lengths[0]) / math.log(lengths[-1] / lengths[0])
        return x + 12 + share * (width - 24)

    def up(value: float) -> float:
        share = math.log(value / low) / math.log(high / low) if logarithmic else value / high
        return y + height - share * height

    picture.text(x, y - 24, title, "ink", 14, "start", bold=True)
    picture.text(x, y - 8, unit, "muted", 11, "start")
    for tick in ticks:
        picture.path([(x, up(tick)), (x + width, up(tick))], "line", 0.7)
        picture.text(x - 6, up(tick) + 4, plain(tick), "muted", 11, "end")
    for length in lengths:
        picture.text(across(length), y + height + 17, plain(length), "muted", 11)
    for name, of in reversed(series.items()):  # the first series is drawn last
        first = name == next(iter(series))
        path = [(across(length), up(value)) for length, value in of]
        picture.path(path, colors[name], 2.6 if first else 1.6)
        for at in path:
            picture.dot(*at, 3.4 if first else 2.6, colors[name])
    paths = [[(across(length), up(value)) for length, value in of] for of in series.values()]
    for name, words in (ends or {}).items():
        at = paths[list(series).index(name)][-1]
        left, base = place(at, words, paths)
        for n, line in enumerate(words):
            picture.text(left, base + LINE * n, line, colors[name], SMALL, "start")


def place(
    at: tuple[float, float], words: Sequence[str], paths: Sequence[Sequence[tuple[float, float]]]
) -> tuple[float, float]:
    """Where words at a point start: to its right, or above it if a series runs there."""
    x, y = at
    width, height = 0.53 * SMALL * max(map(len, words)), LINE * len(words)
    right = x + 8, y + 1
    crossed = any(
        right[0] <= a + n / 32 * (c - a) <= right[0] + width and abs(b + n / 32 * (d - b) - y) <= height
        for path in paths
        for (a, b), (c, d) in itertools.pairwise(path)
        for n in range(33)
    )
    return (x - width / 2, y - height + 4) if crossed else right


def bars(
    picture: Picture,
    frame: Frame,
    rows: Sequence[tuple[str, Sequence[tuple[float, str, str]]]],
    mark: float | None = None,
) -> None:
    """A name and bars below it for each row: (value, colour, words behind it); a line at the mark.

    Names stand above their bars, so that a phone shows both at once.
    """
    x, y, width, height = frame
    top = max(value for _, bars_of in rows for value, _, _ in bars_of)
    row = height / len(rows)
    line = (mark or 0) / top * (width - 70)
    for n, (name, bars_of) in enumerate(rows):
        picture.text(x, y + n * row + 13, name, "ink", 12, "start")
        first = y + n * row + 19
        for m, (value, color, words) in enumerate(bars_of):
            long = value / top * (width - 70)
            picture.rect(x, first + m * BAR, max(long, 1), BAR - 2, color, rx=2)
            at = (x + max(long, line) + 6, first + (m + 1) * BAR - 4.5)
            picture.text(*at, words, "muted", 11, "start")
        if mark is not None:
            bottom = first + BAR * len(bars_of)
            picture.path([(x + line, first - 2), (x + line, bottom)], "ink", 1, dashed=True)


def nice(step: float) -> float:
    """The next step of 1, 2, 2.5 or 5 times a power of ten."""
    power = 10 ** math.floor(math.log10(step))
    return next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= step)


def plain(value: float) -> str:
    if value >= 1024 and value % 1024 == 0:
        return f"{value / 1024:.0f}K"
    return f"{value:,.0f}" if value >= 1 else f"{value:g}"
