"""torch's flex_attention by cupy_flash: its score_mods and BlockMasks as they are, with gradients on the CPU too."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.attention.flex_attention import AuxOutput, AuxRequest, BlockMask, FlexKernelOptions

from ...problem.build import pose
from ...problem.records import Options, UnsupportedError
from .sdpa_drop_in import attend_in_order, order_in_memory

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn.attention.flex_attention import _score_mod_signature

WHOLE = (1 << 30, 1 << 30)  # the block size of the BlockMask that torch makes for a call without one


def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: _score_mod_signature | None = None,
    block_mask: BlockMask | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: FlexKernelOptions | None = None,
    *,
    return_aux: AuxRequest | None = None,
) -> Tensor | tuple[Tensor, Tensor] | tuple[Tensor, AuxOutput]:
    """Compute torch.nn.attention.flex_attention.flex_attention with cupy_flash, fused with or without torch.compile.

    out and lse are differentiable with respect to query, key, value and the tensors that score_mod captures.

    Args:
        query: (B, Hq, L, E).
        key: (B, H, S, E); with a block_mask (1, H, S, E) serves all sequences, as a paged cache does.
        value: (B, H, S, Ev), likewise.
        score_mod: a function (score, b, h, q_idx, kv_idx), or a `cupy_flash.Mod`, as in `cupy_flash.attention`.
        block_mask: made by torch for L queries and S keys. A listed block is seen where its mask_mod is True, a listed
            full block is seen entirely, and no other block is read.
        scale: default 1 / sqrt(E).
        enable_gqa: query head h reads key/value head h // (Hq // H). Without it, Hq and H must be equal.
        return_lse: return (out, lse).
        kernel_options: those of FlexKernelOptions tune torch's kernels and are ignored; a BACKEND other than "AUTO",
            which cupy_flash is not, is refused.
        return_aux: return (out, AuxOutput); lse is served, max_scores is not.

    Returns:
        out (B, Hq, L, Ev) with query's order of dimensions in memory. lse (B, Hq, L) is `lse` of
        `cupy_flash.attention`. A row that sees no key is 0, and its lse is -inf.

    Raises:
        TypeError: as `cupy_flash.attention`.
        ValueError: likewise.
        UnsupportedError: likewise; for max_scores, and for a BACKEND of torch.
    """
    options = Options(scale=scale, score_mod=score_mod, mask_mod=block_mask, return_lse=return_lse)
    tensors = (query, key, value)
    reasons = _unmet(tensors, block_mask, enable_gqa, return_lse, kernel_options, return_aux)
    if reasons or not all(map(_is_padded, tensors)):
        _refuse(tensors, options, reasons)
    if return_aux is not None:
        if return_aux.max_scores:
            raise UnsupportedError("flex_attention: max_scores: statistics of the scores are not implemented yet")
        options.return_lse = return_aux.lse
    backend = (kernel_options or {}).get("BACKEND", "AUTO")
    if backend != "AUTO":
        raise UnsupportedError(f"flex_attention: kernel_options ask for torch's BACKEND {backend!r}")
    if block_mask is not None:
        if block_mask.BLOCK_SIZE == WHOLE:
            options.mask_mod = block_mask.mask_mod  # its only block holds calls of any lengths
        if key.shape[0] == value.shape[0] == 1:
            key, value = (x.expand(query.shape[0], -1, -1, -1) for x in (key, value))
    out, lse = attend_in_order(query, key, value, options, order_in_memory(query))
    if return_aux is not None:
        return out, AuxOutput(lse=lse)
    return (out, lse) if return_lse else out


def _is_padded(x: object) -> bool:
    """Return whether x is a tensor (B, H, S, D); sizes of a nested one cannot be compared."""
    return isinstance(x, torch.Tensor) and x.dim() == 4 and not x.is_nested


def _unmet(
    tensors: tuple[Any, ...], mask: Any, enable_gqa: Any, return_lse: Any, kernel_options: Any, return_aux: Any
) -> tuple[str, ...]:
    """Return the requirements of torch's signature that a call does not meet; `pose` checks all others."""
    reasons = []
    if not (return_aux is None or isinstance(return_aux, AuxRequest)):
        reasons.append(f"return_aux must be torch's AuxRequest, not {type(return_aux).__name__}")
    if return_lse and return_aux is not None:
        reasons.append("return_lse and return_aux cannot both be given")
    legal = FlexKernelOptions.__annotations__
    unknown = [name for name in kernel_options or () if name.removeprefix("fwd_").removeprefix("bwd_") not in legal]
    if unknown:
        reasons.append(f"kernel_options has no {', '.join(unknown)}; the options are {', '.join(legal)}")
    is_mask = isinstance(mask, BlockMask)
    if not (mask is None or is_mask):
        reasons.append(f"block_mask must be torch's BlockMask, not {type(mask).__name__}; score_mod may be a Mod")
    if not all(map(_is_padded, tensors)):
        return tuple(reasons)
    (batch, heads, q_len, _), (_, kv_heads, kv_len, _), (_, v_heads, _, _) = (x.shape for x in tensors)
    if not enable_gqa and not heads == kv_heads == v_heads:
        reasons.append(f"{heads} heads of query, {kv_heads} of key and {v_heads} of value need enable_gqa=True")
    if is_mask and mask.BLOCK_SIZE != WHOLE:
        shape = tuple(mask.shape)
        fits = len(shape) == 4 and shape[0] in (1, batch) and shape[1] in (1, heads) and shape[2:] == (q_len, kv_len)
        if not fits:
            reasons.append(f"block_mask must be made for {(batch, heads, q_len, kv_len)}, not for {shape}")
    return tuple(reasons)


@torch.compiler.disable  # torch.compile cannot trace what pose does with memory
def _refuse(tensors: tuple[Any, Any, Any], options: Options, reasons: tuple[str, ...]) -> None:
    """Raise the one error with `reasons` and all those of `pose`."""
    pose("flex_attention", tensors, replace(options, layout="bhsd"), reasons=reasons)
