"""Draw docs/masks.png, the masks of docs/mods.md with the classes of their tiles."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from cupy_flash.mods.plot import plot

HERE = Path(__file__).parent
BLOCK = 8  # queries and keys of a tile; real ones have 64 or 128


def figure() -> Figure:
    """The mask_mods of the guide, over its 64 tokens."""
    blocks = re.findall(
        r"```python\n(.*?)```",
        (HERE / "mods.md").read_text(encoding="utf-8"),
        re.DOTALL,
    )
    names: dict[str, Any] = {}
    exec(next(block for block in blocks if "MASK_MODS" in block), names)
    drawn = Figure(figsize=(9, 6.4), layout="constrained")
    for axes, (name, mask_mod) in zip(
        drawn.subplots(2, 3).flat, names["MASK_MODS"].items(), strict=True
    ):
        plot(mask_mod, names["S"], names["S"], block_q=BLOCK, block_kv=BLOCK, axes=axes)
        axes.set_title(name)
        legend = axes.get_legend()
        handles, labels = (
            legend.legend_handles,
            [text.get_text() for text in legend.get_texts()],
        )
        legend.remove()
    drawn.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False)
    return drawn


if __name__ == "__main__":
    figure().savefig(HERE / "masks.png", dpi=80, pil_kwargs={"optimize": True})
