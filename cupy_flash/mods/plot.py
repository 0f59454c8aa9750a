"""Plots a mask_mod with the classes of its tiles, or the tiles of a call; needs matplotlib."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ..arrays import as_array
from .numpy_code import mask_function
from .tiles import CUT, EMPTY, FULL, TileClasses
from .trace import Mod, mod_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from .masks import MaskMod
SKIPPED, HIDDEN, SEEN, UNMASKED = range(4)  # a pair in an empty tile; hidden or seen in a cut tile; in a full tile
COLORS = ("#ffffff", "#f3d9c9", "#c65f2e", "#2e5f8a")
LABELS = ("tile skipped", "hidden in a cut tile", "seen in a cut tile", "seen in a full tile")
OF_TILES = {EMPTY: (COLORS[SKIPPED], "skipped"), CUT: (COLORS[SEEN], "masked"), FULL: (COLORS[UNMASKED], "unmasked")}


def picture(
    mask_mod: MaskMod | Mod,
    q_len: int,
    kv_len: int,
    *,
    batch: int = 0,
    head: int = 0,
    block_q: int = 128,
    block_kv: int = 128,
) -> np.ndarray:
    """Return SKIPPED, HIDDEN, SEEN or UNMASKED for every pair, uint8 (q_len, kv_len)."""
    mod = mod_of(None, mask_mod)
    if mod.program.mask is None:  # the mask is simplified to True
        return np.full((q_len, kv_len), UNMASKED, np.uint8)
    arrays = [as_array(array, f"array{slot}").numpy() for slot, array in enumerate(mod.arrays)]
    i, j = np.arange(q_len, dtype=np.int32)[:, None], np.arange(kv_len, dtype=np.int32)[None, :]
    with np.errstate(all="ignore"):
        (seen,) = mask_function(mod.text)(
            None, np.int32(batch), np.int32(head), i, j, arrays, mod.numbers, np.float32
        )  # fmt: skip
    queries, keys = np.arange(0, q_len, block_q)[:, None], np.arange(0, kv_len, block_kv)[None, :]
    of_tiles = TileClasses(mod.program.mask, arrays, mod.numbers).of(
        batch,
        head,
        (queries, np.minimum(queries + block_q, q_len) - 1),
        (keys, np.minimum(keys + block_kv, kv_len) - 1),
    )
    classes = of_tiles[i // block_q, j // block_kv]
    return np.select([classes == EMPTY, classes == FULL], [SKIPPED, UNMASKED], np.where(seen, SEEN, HIDDEN)).astype(
        np.uint8
    )


def plot(
    mask_mod: MaskMod | Mod,
    q_len: int,
    kv_len: int,
    *,
    batch: int = 0,
    head: int = 0,
    block_q: int = 128,
    block_kv: int = 128,
    axes: Axes | None = None,
) -> Axes:
    """Draw which keys each query sees, and which tiles are skipped, masked, or computed without a mask.

    Args:
        mask_mod: a mask_mod or a Mod that has one.
        q_len: the number of queries, drawn downwards.
        kv_len: the number of keys, drawn to the right.
        batch: the sequence b.
        head: the query head h.
        block_q: queries of a tile.
        block_kv: keys of a tile.
        axes: matplotlib axes to draw into; None makes a figure.

    Returns:
        The axes.
    """
    from matplotlib.colors import ListedColormap
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    axes = Figure(figsize=(6, 6), layout="constrained").subplots() if axes is None else axes
    pairs = picture(mask_mod, q_len, kv_len, batch=batch, head=head, block_q=block_q, block_kv=block_kv)
    axes.imshow(pairs, cmap=ListedColormap(COLORS), vmin=0, vmax=len(COLORS) - 1, interpolation="nearest")
    axes.set_xticks(np.arange(0, kv_len, block_kv) - 0.5, minor=True)
    axes.set_yticks(np.arange(0, q_len, block_q) - 0.5, minor=True)
    axes.grid(which="minor", color="#bbbbbb", linewidth=0.5)
    axes.set(xlabel="kv_idx", ylabel="q_idx")
    patches = [
        Patch(facecolor=color, edgecolor="#888888", label=text) for color, text in zip(COLORS, LABELS, strict=True)
    ]
    axes.legend(handles=patches, loc="upper center", bbox_to_anchor=(0.5, -0.08), ncols=2, frameon=False)
    return axes


def plot_tiles(
    classes: np.ndarray, q_len: int, kv_len: int, block_q: int, block_kv: int, axes: Axes | None = None
) -> Axes:
    """Draw tiles in the colours of their classes, (query tiles, key tiles) of EMPTY, CUT or FULL."""
    from matplotlib.colors import ListedColormap
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    axes = Figure(figsize=(6, 6), layout="constrained").subplots() if axes is None else axes
    colors = ListedColormap([color for color, _ in OF_TILES.values()])
    edges_q = np.minimum(np.arange(classes.shape[0] + 1) * block_q, q_len)
    edges_kv = np.minimum(np.arange(classes.shape[1] + 1) * block_kv, kv_len)
    edges = "#bbbbbb" if classes.size <= 64**2 else "face"
    axes.pcolormesh(edges_kv, edges_q, classes, cmap=colors, vmin=EMPTY, vmax=FULL, edgecolors=edges, linewidth=0.5)
    axes.invert_yaxis()
    axes.set(xlabel="kv_idx", ylabel="q_idx", title=f"tiles of {block_q} queries x {block_kv} keys")
    patches = [
        Patch(facecolor=color, edgecolor="#888888", label=f"{np.count_nonzero(classes == of)} {words}")
        for of, (color, words) in OF_TILES.items()
    ]
    axes.legend(handles=patches, loc="upper center", bbox_to_anchor=(0.5, -0.1), ncols=3, frameon=False)
    return axes
