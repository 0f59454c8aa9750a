"""cupy_flash as an implementation in torch's flash attention registry, without changes to models.

torch.nn.attention.activate_flash_attention_impl("cupy_flash") overrides torch's flash attention operators, forward and
backward; restore_flash_attention_impl() undoes it. F.scaled_dot_product_attention then runs cupy_flash whenever torch
dispatches to flash attention, by torch's own rules (which `sdpa` bypasses); torch.nn.attention.varlen always does, on
the CPU too.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

import torch

from ...problem.records import UnsupportedError
from .kv_cache_drop_in import attend_to_pages
from .op import Call, attention_backward, attention_forward


class Activation:
    """The handle that torch's registry holds while cupy_flash is active."""

    def __init__(self) -> None:
        self.libraries: list[Any] = []
        with warnings.catch_warnings():
            # torch warns "Overriding a previously registered kernel", which is intended here.
            warnings.filterwarnings("ignore", category=UserWarning)
            for device, implementations in IMPLEMENTATIONS.items():
                library = torch.library.Library("aten", "IMPL", device)
                for name, implementation in implementations.items():
                    library.impl(name, implementation)
                self.libraries.append(library)

    def remove(self) -> None:
        """Restore torch's own operators."""
        self.libraries.clear()  # destroying a Library unregisters its kernels


def _call(arrays: Iterable[Any], dropout: float, scale: float | None, causal: str, **features: Any) -> Call:
    """Return a Call on (B, S, H, D) or packed tensors; options that torch's operators lack are None."""
    absent: dict[str, Any] = dict.fromkeys(Call._fields)
    q, k, v = arrays
    arguments = dict(
        q=q, k=k, v=v, dropout=dropout, scale=scale, causal=causal, layout="bshd", selected_block=1, selected_rows=1,
        check_selected=False, deterministic=torch.are_deterministic_algorithms_enabled(), fp8=False,
    )  # fmt: skip
    return Call(**absent | arguments | features)


def _swapped(*tensors: Any) -> tuple[Any, ...]:
    """Transpose (B, H, S, D) to (B, S, H, D), or back."""
    return tuple(tensor.transpose(1, 2) for tensor in tensors)


def _with_strides_of(tensor: Any, model: Any) -> Any:
    """Return `tensor` with the strides of empty_like(model), which torch.compile infers from torch's implementation."""
    expected = torch.empty_like(model)
    return tensor if tensor.stride() == expected.stride() else expected.copy_(tensor)


# torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: causal is top-left, there is no dropout, and attn_mask, if
# given, is floating and needs no gradient.


def _on_cpu(arrays: Iterable[Any], dropout: float, is_causal: bool, attn_mask: Any, scale: float | None) -> Call:
    return _call(arrays, dropout, scale, "top_left" if is_causal else "none", bias=attn_mask)


def _sdpa_on_cpu(
    query: Any,
    key: Any,
    value: Any,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: Any = None,
    scale: float | None = None,
) -> tuple[Any, Any]:
    call = _on_cpu(_swapped(query, key, value), dropout_p, is_causal, attn_mask, scale)
    out, lse = attention_forward(*call)
    return _with_strides_of(out.transpose(1, 2), query), lse.transpose(1, 2).contiguous().transpose(1, 2)


def _sdpa_on_cpu_backward(
    grad_out: Any,
    query: Any,
    key: Any,
    value: Any,
    out: Any,
    logsumexp: Any,
    dropout_p: float,
    is_causal: bool,
    *,
    attn_mask: Any = None,
    scale: float | None = None,
) -> tuple[Any, ...]:
    call = _on_cpu(_swapped(query, key, value), dropout_p, is_causal, attn_mask, scale)
    return _swapped(*attention_backward(*call, *_swapped(grad_out, out), logsumexp, None, False)[:3])


# torch.ops.aten._flash_attention_forward and related operators follow flash-attn 2: causal is bottom-right, and the
# forward passes its dropout seed to the backward in rng_state, two uint64 of which the first is our seed.


def _draw(dropout: float, like: Any) -> Any:
    """Return a new rng_state, uint64 (2,), which is random with dropout, else 0."""
    state = torch.zeros(2, dtype=torch.int64, device=like.device)
    return (state.random_(0, 2**63 - 1) if dropout else state).view(torch.uint64)


def _flash(
    arrays: Iterable[Any], dropout: float, is_causal: bool, rng_state: Any, scale: float | None, **features: Any
) -> Call:
    seed = rng_state[:1].view(torch.int64) if dropout else None
    return _call(arrays, dropout, scale, "bottom_right" if is_causal else "none", seed=seed, **features)


def _packed(cu_seqlens_q: Any, cu_seqlens_k: Any, max_seqlen_q: int, max_seqlen_k: int) -> dict[str, Any]:
    """Return the Call arguments of a packed batch; {} for a padded one."""
    if cu_seqlens_q is None:
        return {}
    return dict(
        cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k
    )


def _flash_forward(
    query: Any,
    key: Any,
    value: Any,
    cum_seq_q: Any,
    cum_seq_k: Any,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    seqused_k: Any = None,
    alibi_slopes: Any = None,
    block_table: Any = None,
    num_splits: int | None = None,
) -> tuple[Any, ...]:
    paged = block_table is not None
    unsupported = {
        "return_debug_mask": return_debug_mask,
        "num_splits without block_table": not paged and (num_splits or 1) > 1,
        "seqused_k of packed sequences without block_table": not paged and None not in (seqused_k, cum_seq_q),
        "block_table without cum_seq_q": paged and cum_seq_q is None,
    }
    if any(unsupported.values()):
        names = ", ".join(name for name, is_given in unsupported.items() if is_given)
        raise UnsupportedError(f"_flash_attention_forward: no engine of this version serves {names}")
    rng_state = _draw(dropout_p, query)
    if paged:
        out, lse = attend_to_pages(
            "_flash_attention_forward", query, key, value, block_table, cum_seq_q, cum_seq_k, max_q, seqused_k,
            dropout_p=dropout_p, softmax_scale=scale, causal=is_causal,
            window_size=(window_size_left, window_size_right), alibi_slopes=alibi_slopes, num_splits=num_splits or 0,
            return_softmax_lse=True,
        )  # fmt: skip
        return out, lse, rng_state, rng_state.new_zeros(()), query.new_empty(0)
    call = _flash(
        (query, key, value), dropout_p, is_causal, rng_state, scale, window_left=window_size_left,
        window_right=window_size_right, kv_lengths=seqused_k, alibi_slopes=alibi_slopes,
        **_packed(cum_seq_q, cum_seq_k, max_q, max_k),
    )  # fmt: skip
    out, lse = attention_forward(*call)
    return out, lse, rng_state, rng_state.new_zeros(()), query.new_empty(0)


def _flash_backward(
    grad_out: Any,
    query: Any,
    key: Any,
    value: Any,
    out: Any,
    logsumexp: Any,
    cum_seq_q: Any,
    cum_seq_k: Any,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    rng_state: Any,
    unused: Any,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
) -> tuple[Any, ...]:
    call = _flash(
        (query, key, value), dropout_p, is_causal, rng_state, scale, window_left=window_size_left,
        window_right=window_size_right, **_packed(cum_seq_q, cum_seq_k, max_q, max_k),
    )  # fmt: skip
    return attention_backward(*call, grad_out, out, logsumexp, None, False)[:3]


def _sdpa(
    query: Any,
    key: Any,
    value: Any,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    q, k, v = _swapped(query, key, value)
    max_q, max_k = query.shape[2], key.shape[2]
    out, lse, *rest = _flash_forward(
        q, k, v, None, None, max_q, max_k, dropout_p, is_causal, return_debug_mask, scale=scale
    )  # fmt: skip
    return _with_strides_of(out.transpose(1, 2), query), lse, None, None, max_q, max_k, *rest


def _sdpa_backward(
    grad_out: Any,
    query: Any,
    key: Any,
    value: Any,
    out: Any,
    logsumexp: Any,
    cum_seq_q: Any,
    cum_seq_k: Any,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    philox_seed: Any,
    philox_offset: Any,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    dout, q, k, v, o = _swapped(grad_out, query, key, value, out)
    gradients = _flash_backward(
        dout, q, k, v, o, logsumexp, None, None, max_q, max_k, dropout_p, is_causal, philox_seed, philox_offset,
        scale=scale,
    )  # fmt: skip
    return tuple(map(_with_strides_of, _swapped(*gradients), (query, key, value)))


FLASH = {
    "_flash_attention_forward": _flash_forward,
    "_flash_attention_backward": _flash_backward,
    "_scaled_dot_product_flash_attention": _sdpa,
    "_scaled_dot_product_flash_attention_backward": _sdpa_backward,
}
FLASH_FOR_CPU = {
    "_scaled_dot_product_flash_attention_for_cpu": _sdpa_on_cpu,
    "_scaled_dot_product_flash_attention_for_cpu_backward": _sdpa_on_cpu_backward,
}
# torch implements the operators of FLASH for CUDA only; ours run on both.
IMPLEMENTATIONS = {"CUDA": FLASH, "CPU": FLASH | FLASH_FOR_CPU}
