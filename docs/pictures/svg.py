"""SVG in one look, light and dark: shapes, text and arrows of one palette.

A picture is small text that the same numbers give on every machine, so that a test can
compare it. It has its own background, as a page may be dark where the system is light.
"""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

FONT = '"Inter","Segoe UI","Helvetica Neue","DejaVu Sans",Arial,sans-serif'
# name: (light, dark)
PALETTE = {
    "paper": ("#ffffff", "#1b222c"),
    "panel": ("#f3f6f9", "#242d39"),
    "line": ("#c4ced8", "#465364"),
    "ink": ("#1b2733", "#e3e9f0"),
    "muted": ("#5b6978", "#9aa8b8"),
    "q": ("#2e6da4", "#5b9fd8"),
    "k": ("#c9712b", "#e59a5c"),
    "v": ("#3c8a5f", "#63b88a"),
    "s": ("#7558a6", "#a78bd6"),
    "o": ("#1f8a94", "#4fbac4"),
    "alarm": ("#b83a4b", "#e8707f"),
    "full": ("#2e6da4", "#5b9fd8"),  # classes of tiles: seen in full,
    "seen": ("#c9712b", "#e59a5c"),  # seen and
    "hidden": ("#f3dcc8", "#54402f"),  # hidden in a cut tile,
    "skipped": ("#ffffff", "#1b222c"),  # skipped
    "heat1": ("#dbe9f5", "#24384b"),  # levels of a heat map
    "heat2": ("#b3d0e8", "#2d5273"),
    "heat3": ("#7fb0d8", "#38729f"),
    "heat4": ("#4a8bc2", "#4f97d0"),
    "heat5": ("#1d5688", "#9cccf4"),
}
INVERSE = "paper"  # text on a coloured tile


def number(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


class Picture:
    """A picture that grows by what is drawn, in pixels from the top left corner."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self.width, self.height, self.title = width, height, title
        self.parts: list[str] = []

    def rect(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        fill: str = "panel",
        stroke: str = "",
        rx: float = 4,
        dashed: bool = False,
    ) -> None:
        sizes = (x, y, width, height)
        names = zip(("x", "y", "width", "height"), sizes, strict=True)
        shape = " ".join(f'{name}="{number(size)}"' for name, size in names)
        look = f"{fill} {'l-' + stroke if stroke else ''}{' dash' if dashed else ''}"
        self.parts.append(f'<rect {shape} rx="{number(rx)}" class="{look.strip()}"/>')

    def text(
        self,
        x: float,
        y: float,
        words: str,
        color: str = "ink",
        size: float = 13,
        anchor: str = "middle",
        bold: bool = False,
        turned: bool = False,
    ) -> None:
        """Write words whose baseline is at y; `turned` reads from bottom to top."""
        look = f'class="{color}" font-size="{number(size)}" text-anchor="{anchor}"'
        look += ' font-weight="600"' if bold else ""
        at = f'x="{number(x)}" y="{number(y)}"'
        if turned:
            look += f' transform="rotate(-90 {number(x)} {number(y)})"'
        self.parts.append(f"<text {at} {look}>{escape(words, quote=False)}</text>")

    def box(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        words: str,
        fill: str = "panel",
        color: str = "",
        size: float = 13,
        stroke: str = "",
        bold: bool = False,
        dashed: bool = False,
    ) -> None:
        """A rectangle with words in its middle, in lines that "\\n" ends."""
        plain = fill in ("panel", "paper", "hidden", "skipped")
        self.rect(
            x,
            y,
            width,
            height,
            fill,
            stroke or ("line" if plain else ""),
            dashed=dashed,
        )
        color = color or ("ink" if plain else INVERSE)
        lines = words.split("\n")
        step = size * 1.3
        top = y + height / 2 + size * 0.36 - step * (len(lines) - 1) / 2
        for n, line in enumerate(lines):
            self.text(x + width / 2, top + n * step, line, color, size, bold=bold)

    def path(
        self,
        points: list[tuple[float, float]],
        color: str,
        width: float = 1.5,
        dashed: bool = False,
    ) -> None:
        path = " ".join(f"{number(x)},{number(y)}" for x, y in points)
        dash = " dash" if dashed else ""
        self.parts.append(
            f'<polyline points="{path}" class="l-{color}{dash}" fill="none" stroke-width="{number(width)}"/>'
        )

    def arrow(
        self,
        points: list[tuple[float, float]],
        color: str = "muted",
        width: float = 1.5,
    ) -> None:
        """A line through points, with a head at the last one."""
        (x0, y0), (x1, y1) = points[-2:]
        length = ((x1 - x0) ** 2 + (y1 - y0) ** 2) ** 0.5
        ux, uy = (x1 - x0) / length, (y1 - y0) / length
        back = (x1 - 7 * ux, y1 - 7 * uy)
        self.path([*points[:-1], back], color, width)
        head = [
            (x1, y1),
            (back[0] - 4 * uy, back[1] + 4 * ux),
            (back[0] + 4 * uy, back[1] - 4 * ux),
        ]
        corners = " ".join(f"{number(x)},{number(y)}" for x, y in head)
        self.parts.append(f'<polygon points="{corners}" class="{color}"/>')

    def pixels(self, x: float, y: float, scale: float, color: str, runs: Iterable[tuple[int, int, int]]) -> None:
        """Rows of squares of a size, each from its first to its last column: (row, first, end)."""
        path = "".join(f"M{first} {row}h{end - first}v1h{first - end}z" for row, first, end in runs)
        at = f"translate({number(x)} {number(y)}) scale({number(scale)})"
        self.parts.append(f'<path d="{path}" class="{color}" transform="{at}" shape-rendering="crispEdges"/>')

    def dot(self, x: float, y: float, radius: float, color: str) -> None:
        self.parts.append(f'<circle cx="{number(x)}" cy="{number(y)}" r="{number(radius)}" class="{color}"/>')

    def legend(self, x: float, y: float, entries: dict[str, str], size: float = 12) -> None:
        """A row of colours with their words, from x to the right."""
        for words, color in entries.items():
            stroke = "line" if color in ("skipped", "hidden", "panel") else ""
            self.rect(x, y - 9, 11, 11, color, stroke, rx=2)
            self.text(x + 16, y + 1, words, "ink", size, "start")
            x += 16 + 0.58 * size * len(words) + 18

    def svg(self) -> str:
        used = [name for name in PALETTE if any(name in part for part in self.parts)]

        def rules(scheme: int) -> str:
            colors = {name: PALETTE[name][scheme] for name in {*used, "paper"}}
            fills = "".join(f".{name}{{fill:{colors[name]}}}" for name in PALETTE if name in colors)
            lines = "".join(f".l-{name}{{stroke:{colors[name]}}}" for name in PALETTE if name in colors)
            return fills + lines

        size = f'width="{self.width}" height="{self.height}"'
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" {size} viewBox="0 0 {self.width} {self.height}" '
                f"font-family='{FONT}' role=\"img\">",
                f"<title>{escape(self.title, quote=False)}</title>",
                f"<style>{rules(0)}.dash{{stroke-dasharray:4 3}}",
                f"@media (prefers-color-scheme:dark){{{rules(1)}}}</style>",
                f'<rect width="{self.width}" height="{self.height}" rx="8" class="paper"/>',
                *self.parts,
                "</svg>",
                "",
            ]
        )
