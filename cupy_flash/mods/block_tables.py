"""mask_mods with a table of the classes of their blocks, and the conversion of torch's BlockMask to such a mask_mod.

The table is a captured array of the mask_mod, so that interval arithmetic finds the classes of tiles in it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from typing import TypeGuard

    import torch
    from torch.nn.attention.flex_attention import BlockMask

    from .masks import MaskMod
NONE, PARTIAL, ALL = 0, 1, 2  # classes of a block: none, some or all of its pairs are visible


def is_block_mask(x: object) -> TypeGuard[BlockMask]:
    """Return whether x is torch's BlockMask, without importing torch."""
    return type(x).__name__ == "BlockMask" and type(x).__module__.startswith("torch.nn.attention")


def converted(mask: BlockMask) -> MaskMod:
    """Return a mask_mod for a BlockMask: its own mask_mod in partial blocks, True in full blocks, False in others."""
    return _converted(mask, _classes(mask))


def lists_of(mask: BlockMask) -> tuple[torch.Tensor, MaskMod]:
    """Return the key blocks that a BlockMask lists, int32 (B, H, query blocks, n), -1 last, and its mask_mod."""
    import torch

    table = _classes(mask)
    is_listed = table != NONE
    n = int(is_listed.sum(-1).amax()) if table.numel() else 0
    places = (~is_listed).to(torch.uint8).argsort(dim=-1, stable=True)[..., :n]
    lists = torch.where(is_listed.gather(-1, places), places, -1).to(torch.int32)
    return lists, _converted(mask, table)


def _classes(mask: BlockMask) -> torch.Tensor:
    """Return the classes of the blocks of a BlockMask, uint8 (B, H, query blocks, key blocks)."""
    import torch

    columns = -(-mask.seq_lengths[1] // mask.BLOCK_SIZE[1])
    table = _listed(mask.kv_num_blocks, mask.kv_indices, columns).to(torch.uint8) * PARTIAL
    if mask.full_kv_num_blocks is not None:
        table[_listed(mask.full_kv_num_blocks, mask.full_kv_indices, columns)] = ALL
    return table


def _converted(mask: BlockMask, table: torch.Tensor) -> MaskMod:
    import torch

    (q_len, kv_len), (block_q, block_kv) = mask.seq_lengths, mask.BLOCK_SIZE
    device = table.device
    queries, keys = (
        torch.arange(length, dtype=torch.int32, device=device) // size
        for length, size in ((q_len, block_q), (kv_len, block_kv))
    )
    return masked_by(mask.mask_mod, table, queries, keys)


def _listed(counts: torch.Tensor, indices: torch.Tensor, columns: int) -> torch.Tensor:
    """Return bool (B, H, query blocks, key blocks), True for the first `counts` listed key blocks of a query block."""
    import torch

    is_listed = torch.arange(indices.shape[-1], device=indices.device) < counts[..., None]
    places = torch.where(is_listed, indices, columns).long()
    table = torch.zeros(*indices.shape[:-1], columns + 1, dtype=torch.bool, device=indices.device)
    return table.scatter_(-1, places, True)[..., :columns].contiguous()


def masked_by(mask_mod: MaskMod, table: Any, rows: Any, columns: Any) -> MaskMod:
    """Return the mask_mod with a table (B, H, query blocks, key blocks) of classes.

    `rows` and `columns` map positions to blocks. They are arrays, so that a call with more positions is refused.
    """
    by_sequence, by_head = (size > 1 for size in table.shape[:2])

    def in_blocks(b: object, h: object, q_idx: object, kv_idx: object) -> object:
        found = table[b if by_sequence else 0, h if by_head else 0, rows[q_idx], columns[kv_idx]]
        return (found == ALL) | ((found == PARTIAL) & mask_mod(b, h, q_idx, kv_idx))

    return in_blocks
