"""attention and attention_varlen of cupy_flash on torch tensors, with autograd, torch.compile and torch.func."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, overload

import torch

from ...problem.records import Options, Packed
from .transforms import forward

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ...problem.argument_types import PackedOptions, PackedOptionsWithoutLse, PaddedOptions, PaddedOptionsWithoutLse


@overload
def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor | None, *,
    fp8: bool = False, return_lse: Literal[False] = False, **options: Unpack[PaddedOptionsWithoutLse[torch.Tensor]],
) -> torch.Tensor: ...  # fmt: skip


@overload
def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor | None, *,
    fp8: bool = False, return_lse: Literal[True], **options: Unpack[PaddedOptionsWithoutLse[torch.Tensor]],
) -> tuple[torch.Tensor, torch.Tensor]: ...  # fmt: skip


@overload
def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor | None, *,
    fp8: bool = False, return_lse: bool, **options: Unpack[PaddedOptionsWithoutLse[torch.Tensor]],
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]: ...  # fmt: skip


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor | None,
    *,
    fp8: bool = False,
    **options: Unpack[PaddedOptions[torch.Tensor]],
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Compute `cupy_flash.attention` on torch tensors, with the same arguments, results and errors.

    out and lse are differentiable, twice and in forward mode, with respect to q, k, v, bias, sink and the tensors that
    score_mod captures. Autograd saves q, k, v, out, lse, the seed and the caller's tensors among the options. Works
    under torch.compile, torch.export, torch.func, checkpointing and FSDP2. Autocast casts q, k and v;
    torch.use_deterministic_algorithms sets `deterministic`.

    Args:
        q: as in `cupy_flash.attention`.
        k: as in `cupy_flash.attention`.
        v: as in `cupy_flash.attention`.
        fp8: the forward rounds q, k and v (float16 or bfloat16) to float8_e4m3fn, with one scale, largest magnitude /
            448, per sequence and key/value head; Hopper only. The backward uses the unrounded q, k and v, and only
            those are saved.
        **options: those of `cupy_flash.attention`.

    Returns:
        out, or (out, lse).
    """
    return forward("attention", (q, k, v), Options.of("attention", options), fp8=fp8)


@overload
def attention_varlen(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor | None,
    cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor, max_seqlen_q: int, max_seqlen_k: int, *,
    fp8: bool = False, return_lse: Literal[False] = False, **options: Unpack[PackedOptionsWithoutLse[torch.Tensor]],
) -> torch.Tensor: ...  # fmt: skip


@overload
def attention_varlen(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor | None,
    cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor, max_seqlen_q: int, max_seqlen_k: int, *,
    fp8: bool = False, return_lse: Literal[True], **options: Unpack[PackedOptionsWithoutLse[torch.Tensor]],
) -> tuple[torch.Tensor, torch.Tensor]: ...  # fmt: skip


@overload
def attention_varlen(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor | None,
    cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor, max_seqlen_q: int, max_seqlen_k: int, *,
    fp8: bool = False, return_lse: bool, **options: Unpack[PackedOptionsWithoutLse[torch.Tensor]],
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]: ...  # fmt: skip


def attention_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor | None,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    fp8: bool = False,
    **options: Unpack[PackedOptions[torch.Tensor]],
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Compute `cupy_flash.attention_varlen` on torch tensors; autograd works as for `attention`.

    Args:
        q: as in `cupy_flash.attention_varlen`.
        k: as in `cupy_flash.attention_varlen`.
        v: as in `cupy_flash.attention_varlen`.
        cu_seqlens_q: as in `cupy_flash.attention_varlen`.
        cu_seqlens_k: as in `cupy_flash.attention_varlen`.
        max_seqlen_q: as in `cupy_flash.attention_varlen`.
        max_seqlen_k: as in `cupy_flash.attention_varlen`.
        fp8: as in `attention`.
        **options: those of `cupy_flash.attention_varlen`.

    Returns:
        out, or (out, lse).
    """
    packed = Packed(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    return forward("attention_varlen", (q, k, v), Options.of("attention_varlen", options), packed, fp8)
