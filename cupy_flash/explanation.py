"""The result of `explain`: text with a line per fact, an HTML table in a notebook, and a plot of the tiles."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.axes import Axes

    # The classes of the tiles of one sequence and head, (query tiles, key tiles); its lengths; the sizes of a tile.
    Tiles: TypeAlias = tuple[np.ndarray, int, int, int, int]

TERMINAL = 80  # columns


class Explanation(str):
    """Text with a line per fact, each a label and words.

    As a string it has one line per fact, for programs; `print` puts labels and words in two columns, 80 wide in all.
    """

    _tiles: Callable[[], Tiles] | None

    def __new__(cls, text: str, tiles: Callable[[], Tiles] | None = None) -> Explanation:
        """Return the text; `tiles` computes what `plot` draws."""
        explanation = super().__new__(cls, text)
        explanation._tiles = tiles
        return explanation

    def __str__(self) -> str:
        rows = [parts(line) for line in self.splitlines()]
        width = max(len(label) for label, _ in rows) + 2
        return "\n".join(wrapped(f"{label:<{width}}{words}", width) for label, words in rows)

    def _repr_html_(self) -> str:
        """Return a table, for notebooks."""
        from html import escape

        rows = "".join(
            f"<tr><td><b>{escape(label)}</b></td><td style='text-align:left'>{escape(words)}</td></tr>"
            for label, words in map(parts, self.splitlines())
        )
        return f"<table>{rows}</table>"

    def plot(self, axes: Axes | None = None) -> Axes:
        """Draw the tiles of the first sequence and head: skipped, masked, or computed without a mask.

        Args:
            axes: matplotlib axes to draw into; None makes a figure.

        Raises:
            ValueError: the call reads a KV cache, whose lengths are not known ahead.
            ImportError: matplotlib is missing.
        """
        if self._tiles is None:
            raise ValueError("explain_with_kv_cache has no tiles to plot: the lengths of its sequences may be on a GPU")
        from .mods.plot import plot_tiles

        return plot_tiles(*self._tiles(), axes=axes)


def wrapped(line: str, indent: int) -> str:
    """Return a line in lines of 80 columns, of which all but the first are indented; paths are not broken."""
    import textwrap  # which costs as much as a twentieth of the import of the package

    margin = " " * indent
    return textwrap.fill(line, TERMINAL, subsequent_indent=margin, break_long_words=False, break_on_hyphens=False)


def parts(line: str) -> tuple[str, str]:
    """Return the label and the words of a line; the label of a refusal has two words: "not" and the engine."""
    first, _, rest = line.partition(" ")
    if first != "not":
        return first, rest.strip()
    engine, _, rest = rest.partition(" ")
    return f"not {engine}", rest.strip()
