"""block_mask and selected_from_block_mask: the classes of a mask's blocks, and the lists of torch's BlockMask."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from .arrays import as_array, empty
from .mods.block_tables import ALL, NONE, PARTIAL, converted, is_block_mask, lists_of, masked_by
from .mods.numpy_code import mask_function
from .mods.tiles import CUT, FULL, TileClasses
from .mods.trace import Mod, traced
from .problem.records import Operands, Options, Problem

if TYPE_CHECKING:
    import cupy
    import torch
    from torch.nn.attention.flex_attention import BlockMask

    from .arrays import AnyArray
    from .mods.masks import MaskMod


def block_mask(
    mask_mod: MaskMod | object,
    B: int | None = None,
    H: int | None = None,
    q_len: int | None = None,
    kv_len: int | None = None,
    *,
    block: int = 128,
    like: object = None,
) -> MaskMod:
    """Return the mask_mod with a table that classifies its blocks as empty (skipped), full (unmasked) or cut.

    No mask needs the table, because attention skips the tiles that interval arithmetic proves to be hidden. It helps
    with masks for which that proves little, such as unsorted segments. To make the table, the mask is evaluated on the
    device of its arrays in all blocks for which nothing is proved, so reuse the result in many calls. The table has
    B H q_len kv_len / block^2 bytes.

    Args:
        mask_mod: a function (b, h, q_idx, kv_idx) -> bool, True = attend; or a BlockMask of torch, which is converted
            and takes no other argument.
        B: the number of sequences; None for one table for all sequences.
        H: the number of query heads; None for one table for all heads.
        q_len: the maximum number of queries of a call.
        kv_len: the maximum number of keys of a call.
        block: queries and keys of a block.
        like: an array of q's type and device, which the table gets; default: those of mask_mod's captured arrays, or
            else NumPy.

    Returns:
        A mask_mod, which may also be passed to `and_masks` and `Mod`.

    Raises:
        TypeError: mask_mod is not such a function, or cannot be traced; q_len or kv_len is missing.
        ValueError: B, H, q_len, kv_len or block is not positive; on a GPU an array is too short for them.
        UnsupportedError: the arrays are on a GPU that CuPy cannot use.

    >>> import numpy as np, cupy_flash
    >>> segments = np.random.default_rng(0).integers(0, 4, 512)
    >>> def same(b, h, q_idx, kv_idx):
    ...     return segments[q_idx] == segments[kv_idx]
    >>> mask_mod = cupy_flash.block_mask(same, q_len=512, kv_len=512)
    >>> q = k = v = np.ones((1, 512, 2, 8), np.float32)
    >>> cupy_flash.attention(q, k, v, mask_mod=mask_mod).shape
    (1, 512, 2, 8)
    """
    if is_block_mask(mask_mod):
        return converted(mask_mod)
    if q_len is None or kv_len is None:
        raise TypeError("block_mask: q_len and kv_len must be given")
    sizes = {"B": B, "H": H, "q_len": q_len, "kv_len": kv_len, "block": block}
    wrong = [f"{name} must be at least 1, not {size}" for name, size in sizes.items() if size is not None and size < 1]
    if wrong:
        raise ValueError(f"block_mask: {', '.join(wrong)}")
    if not callable(mask_mod):
        raise TypeError(f"block_mask: mask_mod must be a function (b, h, q_idx, kv_idx), not {type(mask_mod).__name__}")
    mod, heads, lengths = traced(None, mask_mod), (B or 1, H or 1), (q_len, kv_len)
    devices = {as_array(x, f"array{slot}").device for slot, x in enumerate(mod.arrays)}
    on_host = devices <= {"cpu"} or mod.program.mask is None
    table = host_classes(mod, heads, lengths, block) if on_host else gpu_classes(mod, heads, lengths, block)
    like = next(iter(mod.arrays), None) if like is None else like
    rows, columns = (np.arange(length, dtype=np.int32) // block for length in (q_len, kv_len))
    return masked_by(mask_mod, _like(table, like) if on_host else table, _like(rows, like), _like(columns, like))


def selected_from_block_mask(block_mask: BlockMask) -> tuple[torch.Tensor, int, int, MaskMod]:
    """Return torch's BlockMask as lists of key blocks for `selected`, and a mask_mod for those it masks in part.

    Only the listed blocks are read, in forward and backward. As in torch's kernels the table of a BlockMask counts,
    also where it has been edited: the mask_mod is True in its full blocks.

    Args:
        block_mask: made by torch for Sq queries and Sk keys; its BLOCK_SIZE must have kb 1 or a multiple of 8, and its
            heads must be 1, Hk or Hq. (1, 1, ..) serves all sequences and heads.

    Returns:
        (selected, kb, rows, mask_mod): int32 (B or 1, H, query blocks, n) on the device of the BlockMask, ascending
        with -1 last; the keys and the queries of a block; and the mask_mod. They are `selected`, `selected_block`,
        `selected_rows` and `mask_mod` of `attention`.

    Raises:
        TypeError: block_mask is not a BlockMask of torch.

    >>> import torch, cupy_flash
    >>> from torch.nn.attention.flex_attention import create_block_mask
    >>> mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, 256, 256, device="cpu", BLOCK_SIZE=64)
    >>> selected, kb, rows, mask_mod = cupy_flash.selected_from_block_mask(mask)
    >>> selected[0, 0, 1].tolist(), kb, rows
    ([0, 1, -1, -1], 64, 64)
    >>> q = k = v = torch.ones(1, 256, 2, 8)
    >>> lists = dict(selected=selected, selected_block=kb, selected_rows=rows)
    >>> cupy_flash.attention(q, k, v, mask_mod=mask_mod, **lists).shape
    torch.Size([1, 256, 2, 8])
    """
    if not is_block_mask(block_mask):
        kind = type(block_mask).__name__
        raise TypeError(f"selected_from_block_mask: block_mask must be a BlockMask of torch, not {kind}")
    selected, mask_mod = lists_of(block_mask)
    rows, kb = block_mask.BLOCK_SIZE
    return selected, kb, rows, mask_mod


def host_classes(mod: Mod, heads: tuple[int, int], lengths: tuple[int, int], block: int) -> np.ndarray:
    """Return the exact classes of blocks, uint8 (B, H, query blocks, key blocks)."""
    counts = tuple(-(-length // block) for length in lengths)
    if mod.program.mask is None:
        return np.full((*heads, *counts), ALL, np.uint8)
    arrays = [as_array(x, f"array{slot}").numpy() for slot, x in enumerate(mod.arrays)]
    function, of_tiles = mask_function(mod.text), TileClasses(mod.program.mask, arrays, mod.numbers)
    starts = [np.arange(0, length, block) for length in lengths]
    (queries, keys) = ((first, np.minimum(first + block, n) - 1) for first, n in zip(starts, lengths, strict=True))
    table = np.empty((*heads, *counts), np.uint8)
    for b, h in np.ndindex(heads):
        classes = of_tiles.of(b, h, (queries[0][:, None], queries[1][:, None]), keys)
        table[b, h] = np.where(classes == FULL, ALL, NONE)
        for row, column in np.argwhere(classes == CUT).tolist():
            i = np.arange(queries[0][row], queries[1][row] + 1, dtype=np.int32)[:, None]
            j = np.arange(keys[0][column], keys[1][column] + 1, dtype=np.int32)[None, :]
            with np.errstate(all="ignore"):
                (seen,) = function(None, np.int32(b), np.int32(h), i, j, arrays, mod.numbers, np.float32)
            table[b, h, row, column] = ALL if np.all(seen) else PARTIAL if np.any(seen) else NONE
    return table


def gpu_classes(mod: Mod, heads: tuple[int, int], lengths: tuple[int, int], block: int) -> cupy.ndarray:
    """Return the result of `host_classes`, computed by a kernel on the GPU that holds the captured arrays."""
    from .dispatch import block_classes

    problem, operands = posed(mod, heads, lengths)
    classes = block_classes(problem, operands, block)
    return classes.owner.swapaxes(1, 2)


def posed(
    mod: Mod, heads: tuple[int, int], lengths: tuple[int, int], backend: str | None = None
) -> tuple[Problem, Operands]:
    """Return (Problem, Operands) of a call with a mod; `heads` is (sequences, heads), `lengths` is (queries, keys).

    All elements of q, k and v share one place in memory (strides 0), because the kernel reads none of them.
    """
    from .problem.build import pose

    row = empty((8,), np.dtype(np.float16), as_array(mod.arrays[0], "array0"))
    q, k = (replace(row, shape=(heads[0], length, heads[1], 8), strides=(0, 0, 0, 1)) for length in lengths)
    return pose("block_mask", (q, k, k), Options(mask_mod=mod, backend=backend))


def _like(x: np.ndarray, like: Any) -> AnyArray:
    """Return x as an array with the type and device of `like`."""
    framework = "numpy" if like is None else as_array(like, "like").framework
    if framework == "torch":
        import torch

        return torch.from_numpy(x).to(like.device)
    if framework == "jax":
        import jax

        return jax.device_put(x, like.device)
    if framework == "cupy":
        import cupy

        with like.device:
            return cupy.asarray(x)
    return x
