"""Drop-in functions on torch tensors with the signatures of cupy_flash, torch's SDPA and flash-attn 2."""

from __future__ import annotations

import functools
import math
import types
from collections.abc import Callable
from contextlib import AbstractContextManager
from itertools import permutations
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, TypeVar, overload

import torch
import torch.nn.functional as F
from torch._ops import HigherOrderOperator
from torch.nested._internal.nested_tensor import nested_view_from_values_offsets
from torch.nn.attention.bias import CausalBias, CausalVariant
from torch.overrides import _get_current_function_mode_stack
from torch.utils import checkpoint

from ...problem.features import Options
from ...problem.records import Packed, UnsupportedError
from .kv_cache_drop_in import attend_to_pages
from .op import as_int32, is_zero
from .transforms import forward

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ...problem.argument_types import PackedOptions, PackedOptionsWithoutLse, PaddedOptions, PaddedOptionsWithoutLse

P = ParamSpec("P")
R = TypeVar("R")


@overload
def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *,
    fp8: bool = False, return_lse: Literal[False] = False, **options: Unpack[PaddedOptionsWithoutLse[torch.Tensor]],
) -> torch.Tensor: ...  # fmt: skip


@overload
def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *,
    fp8: bool = False, return_lse: Literal[True], **options: Unpack[PaddedOptionsWithoutLse[torch.Tensor]],
) -> tuple[torch.Tensor, torch.Tensor]: ...  # fmt: skip


@overload
def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *,
    fp8: bool = False, return_lse: bool, **options: Unpack[PaddedOptionsWithoutLse[torch.Tensor]],
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]: ...  # fmt: skip


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
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
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
    cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor, max_seqlen_q: int, max_seqlen_k: int, *,
    fp8: bool = False, return_lse: Literal[False] = False, **options: Unpack[PackedOptionsWithoutLse[torch.Tensor]],
) -> torch.Tensor: ...  # fmt: skip


@overload
def attention_varlen(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
    cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor, max_seqlen_q: int, max_seqlen_k: int, *,
    fp8: bool = False, return_lse: Literal[True], **options: Unpack[PackedOptionsWithoutLse[torch.Tensor]],
) -> tuple[torch.Tensor, torch.Tensor]: ...  # fmt: skip


@overload
def attention_varlen(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
    cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor, max_seqlen_q: int, max_seqlen_k: int, *,
    fp8: bool = False, return_lse: bool, **options: Unpack[PackedOptionsWithoutLse[torch.Tensor]],
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]: ...  # fmt: skip


def attention_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
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


class SdpaValueError(ValueError, RuntimeError):
    """An invalid call of `scaled_dot_product_attention`; a RuntimeError too, as torch's raises."""


class SdpaTypeError(TypeError, SdpaValueError):
    """A call of `scaled_dot_product_attention` with an argument of the wrong type."""


class SdpaUnsupportedError(UnsupportedError, SdpaValueError):
    """A legal call of `scaled_dot_product_attention` that no engine of this version serves."""


def _raising_as_torch(function: Callable[P, R]) -> Callable[P, R]:
    """Decorator: errors of `function` are raised as subclasses that are also RuntimeErrors."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except (TypeError, ValueError) as error:
            kinds = {TypeError: SdpaTypeError, UnsupportedError: SdpaUnsupportedError, ValueError: SdpaValueError}
            kind = next(ours for theirs, ours in kinds.items() if isinstance(error, theirs))
            raise kind(str(error)).with_traceback(error.__traceback__) from None

    return call


@_raising_as_torch
def scaled_dot_product_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Compute torch.nn.functional.scaled_dot_product_attention with cupy_flash.

    Jagged nested tensors (B, H, S, E), ragged in S, run as packed sequences (`attention_varlen`), without attn_mask.

    Args:
        query: (..., Hq, L, E). Dimensions before L and S broadcast; with enable_gqa, those before the heads do. Two
            dimensions (L, E) are one head.
        key: (..., H, S, E).
        value: (..., H, S, Ev).
        attn_mask: broadcastable to (..., Hq, L, S); boolean, True = attend, or floating, added to the scores, with a
            gradient; or a torch.nn.attention.bias.CausalBias.
        dropout_p: in [0, 1]; applied in eval mode too, as in torch. With 1 the result is 0.
        is_causal: top-left causal mask, intersected with attn_mask.
        scale: default 1 / sqrt(E).
        enable_gqa: query head h reads key/value head h // (Hq // H). key and value may have different numbers of heads;
            they are then repeated to their least common multiple. Without it, all three need the same number.

    Returns:
        (..., Hq, L, Ev) in the dtype of query, with query's order of dimensions in memory. A row that sees no key is 0,
        and so is the result for 0 heads. With E = 0 all scores are 0.

    Raises:
        TypeError: as `cupy_flash.attention`. This and the errors below are each also a ValueError and a RuntimeError,
            except where code that torch.compile has compiled raises them.
        ValueError: likewise.
        UnsupportedError: likewise.
    """
    for name, flag in (("is_causal", is_causal), ("enable_gqa", enable_gqa)):
        if not isinstance(flag, bool):
            raise TypeError(f"scaled_dot_product_attention: {name} must be True or False, not {flag!r}")
    if any(isinstance(x, torch.Tensor) and x.is_nested for x in (query, key, value)):
        if attn_mask is not None:
            raise UnsupportedError("scaled_dot_product_attention: attn_mask is not supported with nested tensors")
        return _nested(query, key, value, dropout_p, is_causal, scale, enable_gqa)
    trailing = 3 if enable_gqa else 2
    _require_dimensions((query, key, value), trailing)
    if 0 in (*query.shape[-3:-2], *key.shape[-3:-2], *value.shape[-3:-2], value.shape[-1]):
        return _zeros(query, key, value)
    given_shape = query.shape
    query, key, value, attn_mask = _broadcast((query, key, value), attn_mask, trailing)
    drops_all = _drops_all(dropout_p)
    options = Options(causal="top_left" if is_causal else False, scale=scale)
    options.dropout = 0.0 if drops_all else dropout_p
    if isinstance(attn_mask, CausalBias):
        options.causal = _causal_of(attn_mask, query, key, is_causal)
    elif isinstance(attn_mask, torch.Tensor) and attn_mask.dtype == torch.bool:
        options.mask = attn_mask
    else:
        options.bias = attn_mask
    q, k, v = (_four_dimensional(x) for x in (query, key, value))
    if k.shape[1] != v.shape[1]:
        k, v = _with_equal_heads(q, k, v)
    if q.shape[-1] == k.shape[-1] == 0:
        q, k = F.pad(q, (0, 1)), F.pad(k, (0, 1))  # E = 1 of zeros: all scores are 0, as with E = 0
    # torch's result is contiguous if it broadcasts query itself.
    out = _attend(q, k, v, options, _order_in_memory(q) if query.shape == given_shape else (0, 1, 2))
    if drops_all:
        out = _zeroed(out)
    return out.reshape(*query.shape[:-1], value.shape[-1])


def _drops_all(dropout_p: Any) -> bool:
    """Return whether dropout_p is 1, which the kernels refuse because they scale kept elements by 1 / (1 - dropout)."""
    return isinstance(dropout_p, (int, float)) and dropout_p == 1


def _zeroed(out: Any) -> Any:
    """Return zeros with the shape of out, connected to it in the graph so that gradients are 0."""
    return out.masked_fill(out.new_ones((), dtype=torch.bool), 0)


def _attend(q: Any, k: Any, v: Any, options: Options, order: tuple[int, ...]) -> Any:
    """Return attention of q, k, v (B, H, S, D), out (B, H, S, Dv) with dimensions in `order` in memory, Dv innermost.

    Callers rely on q's order: if q is a view of (B, S, H, D), they call out.transpose(1, 2).view(B, S, -1). The
    kernels write (B, S, H, D) and (B, H, S, D); any other order costs a copy.
    """
    if order.index(1) < order.index(2):
        options.layout = "bhsd"
        out = forward("attention", (q, k, v), options)
    else:
        out = forward("attention", (q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)), options).transpose(1, 2)
    return out if order[0] == 0 else out.permute(*order, 3).contiguous().permute(*map(order.index, range(3)), 3)


@torch.compiler.allow_in_graph  # torch.compile cannot trace into the parts of a nested tensor
def _nested(query: Any, key: Any, value: Any, dropout_p: Any, is_causal: Any, scale: Any, enable_gqa: Any) -> Any:
    """Return `scaled_dot_product_attention` of jagged nested tensors.

    They are ragged in S (packed sequences), or ragged in dimension 1 with dense sequences.
    """
    tensors = (query, key, value)
    if any(not isinstance(x, torch.Tensor) or x.layout != torch.jagged or x.lengths() is not None for x in tensors):
        raise TypeError(
            "scaled_dot_product_attention: if any of query, key, value is nested, all must be jagged and without holes"
        )
    if all(x._ragged_idx == 1 and x.dim() > 3 for x in tensors):
        q, k, v = (x.values() for x in tensors)
        out = scaled_dot_product_attention(q, k, v, None, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
        return _jagged_like(query, out)
    if any(x._ragged_idx != 2 or x.dim() != 4 for x in tensors):
        raise TypeError("scaled_dot_product_attention: jagged query, key and value must be (B, H, S, E), ragged in S")
    heads = [x.shape[1] for x in tensors]
    if not enable_gqa and len(set(heads)) > 1:
        raise ValueError(
            f"scaled_dot_product_attention: {heads} heads of query, key and value; fewer key/value heads than query "
            "heads need enable_gqa=True"
        )
    q, k, v = (x.transpose(1, 2) for x in tensors)  # their values are (T, H, E)
    if k.is_cpu and not torch.compiler.is_compiling() and not torch.equal(k.offsets(), v.offsets()):
        raise ValueError("scaled_dot_product_attention: jagged key and value must have the same lengths")
    options = Options(causal="top_left" if is_causal else False, scale=scale)
    options.dropout = 0.0 if _drops_all(dropout_p) else dropout_p
    packed = Packed(q.offsets().to(torch.int32), k.offsets().to(torch.int32), _max_seqlen(q), _max_seqlen(k))
    out = forward("attention_varlen", (q.values(), k.values(), v.values()), options, packed)
    return _jagged_like(q, _zeroed(out) if _drops_all(dropout_p) else out).transpose(1, 2)


def _max_seqlen(x: Any) -> Any:
    """Return the longest sequence length; if unknown while tracing, the upper bound T, as offsets cannot be read."""
    if x._maybe_max_seqlen is None and torch.compiler.is_compiling():
        return x.values().shape[0]
    return x._get_max_seqlen()


def _jagged_like(x: Any, values: Any) -> Any:
    """Return values (T, ...) nested with the offsets of x; nested_tensor_from_jagged fails under torch.compile."""
    return nested_view_from_values_offsets(
        values, x.offsets(), min_seqlen=x._maybe_min_seqlen, max_seqlen=x._maybe_max_seqlen
    )


def _order_in_memory(query: Any) -> tuple[int, ...]:
    """Order of the first three dimensions of query in memory, outermost first."""
    strides = query.stride()
    if 0 in strides[:3]:
        # The stride 0 of an expanded dimension does not show its order. torch's result is an empty_like(query).
        strides = torch.empty_like(query, device="meta").stride()
    # Comparisons only: torch.compile cannot sort symbolic strides.
    return next(
        order for order in permutations(range(3)) if strides[order[0]] >= strides[order[1]] >= strides[order[2]]
    )


def _require_dimensions(tensors: tuple[Any, Any, Any], trailing: int) -> None:
    if any(not isinstance(x, torch.Tensor) or x.dim() < trailing for x in tensors):
        given = ", ".join(str(tuple(x.shape)) if isinstance(x, torch.Tensor) else str(type(x)) for x in tensors)
        raise TypeError(
            f"scaled_dot_product_attention: query, key, value must be tensors of at least {trailing} "
            f"dimensions, not {given}"
        )


def _zeros(query: Any, key: Any, value: Any) -> Any:
    """Return a result (..., Hq, L, Ev) without elements, connected to the inputs so that their gradients are 0."""
    zeros = query.new_zeros((*query.shape[:-1], value.shape[-1]))
    return zeros + sum(x[..., :0].sum() for x in (query, key, value))


def _broadcast(tensors: tuple[Any, Any, Any], attn_mask: Any, trailing: int) -> tuple[Any, Any, Any, Any]:
    """Expand query, key, value (views) and attn_mask to equal leading dimensions, all but the last `trailing`."""
    try:
        query, key, value = tensors
        if not query.shape[:-trailing] == key.shape[:-trailing] == value.shape[:-trailing]:
            leading = torch.broadcast_shapes(*(x.shape[:-trailing] for x in tensors))
            query, key, value = (x.expand(*leading, *x.shape[-trailing:]) for x in tensors)
        if isinstance(attn_mask, torch.Tensor) and query.dim() > 4 and attn_mask.dim() > 3:
            attn_mask = attn_mask.expand(*query.shape[:-3], *attn_mask.shape[-3:]).flatten(0, -4)
    except RuntimeError as error:
        shapes = ", ".join(str(tuple(x.shape)) for x in (*tensors, attn_mask) if x is not None)
        hint = "" if trailing == 3 else "; fewer key/value heads than query heads need enable_gqa=True"
        raise ValueError(
            f"scaled_dot_product_attention: the leading dimensions of {shapes} do not broadcast{hint}"
        ) from error
    return query, key, value, attn_mask


def _with_equal_heads(q: Any, k: Any, v: Any) -> tuple[Any, Any]:
    """Repeat k and v to lcm(Hk, Hv) heads, so that each query head reads the same heads of both as before."""
    heads, k_heads, v_heads = (x.shape[1] for x in (q, k, v))
    if heads % k_heads or heads % v_heads:
        raise ValueError(
            f"scaled_dot_product_attention: the {heads} heads of query must be a multiple of the {k_heads} of key "
            f"and of the {v_heads} of value"
        )
    equal = math.lcm(k_heads, v_heads)
    return k.repeat_interleave(equal // k_heads, 1), v.repeat_interleave(equal // v_heads, 1)


def _causal_of(bias: Any, query: Any, key: Any, is_causal: bool) -> Any:
    """Return `causal` for a CausalBias; with is_causal, the alignment of the diagonal that masks more."""
    lengths = (bias.seq_len_q, bias.seq_len_kv)
    if lengths != (query.shape[-2], key.shape[-2]):
        raise ValueError(
            f"scaled_dot_product_attention: attn_mask is causal for {lengths[0]} queries and {lengths[1]} keys, "
            f"and there are {query.shape[-2]} and {key.shape[-2]}"
        )
    hides_more = is_causal and query.shape[-2] <= key.shape[-2]
    return "top_left" if bias.variant == CausalVariant.UPPER_LEFT or hides_more else True


def _four_dimensional(x: Any) -> Any:
    """Return (..., H, L, E) as (B, H, L, E)."""
    if x.dim() == 4:
        return x
    return x.flatten(0, -4) if x.dim() > 4 else x[(None,) * (4 - x.dim())]


class _Sdpa(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.compiler.is_dynamo_compiling() and isinstance(func, HigherOrderOperator):
            # torch.compile traces the functions passed to checkpoint, cond etc. with this mode off, and lets them enter
            # one of their own only if one has been entered outside before.
            with _Sdpa():
                args = tuple(_inside_sdpa(x) if callable(x) else x for x in args)
        return _routed(func)(*args, **(kwargs or {}))


def _routed(func: Any) -> Any:
    """Return the replacement of a torch function inside `sdpa`, by default the function itself.

    torch disables the mode while F.multi_head_attention_forward runs, so its inner SDPA call would be torch's. It is
    replaced by a copy whose globals refer to ours.
    """
    if func is F.scaled_dot_product_attention:
        return scaled_dot_product_attention
    return _multi_head_attention_forward if func is F.multi_head_attention_forward else func


# The copy's globals contain the copy, because it passes itself by name to other modes (torch.set_default_device). They
# lack __name__, by which torch.compile would look up globals in torch's module instead.
_globals = {name: value for name, value in vars(F).items() if name != "__name__"}
_multi_head_attention_forward = types.FunctionType(
    F.multi_head_attention_forward.__code__, _globals, argdefs=F.multi_head_attention_forward.__defaults__
)
_globals["scaled_dot_product_attention"] = scaled_dot_product_attention
_globals["multi_head_attention_forward"] = _multi_head_attention_forward


def _inside_sdpa(function: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        with _Sdpa():
            return function(*args, **kwargs)

    return run


def _recomputing_as_recorded(record: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a method of torch.utils.checkpoint that records a function.

    A function recorded inside `sdpa` is then recomputed inside it: in the backward the forward's modes are off, and it
    may run in another thread; torch restores only its device mode.
    """

    @functools.wraps(record)
    def record_with_mode(self: Any, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        is_routed = any(isinstance(mode, _Sdpa) for mode in _get_current_function_mode_stack())
        return record(self, _inside_sdpa(function) if is_routed else function, *args, **kwargs)

    return record_with_mode


# Every checkpoint, however imported, creates one of these: the first if non-reentrant, the second if reentrant.
checkpoint._CheckpointFrame.__init__ = _recomputing_as_recorded(checkpoint._CheckpointFrame.__init__)
checkpoint.CheckpointFunction.forward = staticmethod(_recomputing_as_recorded(checkpoint.CheckpointFunction.forward))


def sdpa() -> AbstractContextManager[Any]:
    """Context manager that replaces F.scaled_dot_product_attention by `scaled_dot_product_attention`.

    Works in eager mode and under torch.compile, also inside nn.MultiheadAttention. A call that cupy_flash cannot serve
    raises; it never falls back to torch's.

        with cupy_flash.adapters.torch.sdpa():
            loss = model(tokens)
        loss.backward()

    Applies to the thread that enters it; other threads (torch.nn.DataParallel starts some) use torch's attention.
    Functions that torch.utils.checkpoint records inside, reentrant or not, are recomputed inside, in any thread; other
    implementations of activation checkpointing recompute with torch's attention. For both cases use
    torch.nn.attention.activate_flash_attention_impl("cupy_flash"), which applies to all threads and to the backward,
    wherever torch chooses flash attention.

    torch.nn.TransformerEncoder has an inference fast path, a fused kernel without an attention call, which torch skips
    while a function mode is active, as it does in training and under torch.compile. With src_key_padding_mask the
    padded rows of the result are then meaningless numbers instead of the fast path's zeros. The other rows agree.
    """
    return _Sdpa()


def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """Compute flash_attn_func of flash-attn 2, with a bottom-right causal diagonal.

    Args:
        q: (B, Sq, Hq, D).
        k: (B, Sk, Hk, D).
        v: (B, Sk, Hk, D).
        dropout_p: dropout probability.
        softmax_scale: default 1 / sqrt(D).
        causal: hide the keys after a query; the last query sees all keys.
        window_size: (left, right), -1 unbounded, as `window` of `cupy_flash.attention`.
        softcap: 0.0 means no softcap.
        alibi_slopes: float32 (Hq,) or (B, Hq).
        deterministic: gradients bitwise equal from run to run.
        return_attn_probs: also return softmax_lse and None.

    Returns:
        out (B, Sq, Hq, D), or with return_attn_probs (out, softmax_lse, None): softmax_lse (B, Hq, Sq) is `lse` of
        `cupy_flash.attention`; flash-attn's third result, the probabilities, is never computed.
    """
    options = _flash_attn_options(dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic)
    return _flash_attn((q, k, v), options, return_attn_probs)


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: torch.Tensor | None = None,
    *,
    seqused_k: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    return_softmax_lse: bool = False,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    num_splits: int = 0,
    s_aux: torch.Tensor | None = None,
    scheduler_metadata: object = None,
    fa_version: int | None = None,
) -> Any:
    """Compute flash_attn_varlen_func of flash-attn 2, as `flash_attn_func`; keyword-only arguments are vLLM's.

    With block_table, k and v are the pages of a KV cache, and no gradients are recorded: the call is
    `cupy_flash.attention_with_kv_cache` on packed queries, with nothing to append.

    Args:
        q: (Tq, Hq, D).
        k: (Tk, Hk, D), or pages (pages, P, Hk, D) with block_table.
        v: (Tk, Hk, D), or pages likewise.
        cu_seqlens_q: int32 (B + 1,), here and in the varlen functions below; int64 in host memory is cast.
        cu_seqlens_k: likewise for the keys; with block_table, it or seqused_k gives the number of keys of each
        sequence.
        max_seqlen_q: at least the longest sequence of queries.
        max_seqlen_k: at least the longest sequence of keys; not read with block_table, whose columns are the capacity.
        dropout_p: as in `flash_attn_func`.
        softmax_scale: as in `flash_attn_func`.
        causal: as in `flash_attn_func`.
        window_size: as in `flash_attn_func`.
        softcap: as in `flash_attn_func`.
        alibi_slopes: as in `flash_attn_func`.
        deterministic: as in `flash_attn_func`.
        return_attn_probs: as in `flash_attn_func`.
        block_table: int32 (B, columns): key j of sequence b is row j % P of page block_table[b, j // P].
        seqused_k: int32 (B,), with block_table: the keys of each sequence.
        out: with block_table: an array for the result.
        return_softmax_lse: with block_table: return (out, softmax_lse).
        q_descale: UnsupportedError unless None: q has 16 bit beside pages of float8_e4m3fn.
        k_descale: float32 (B, Hk), with block_table and pages of float8_e4m3fn.
        v_descale: likewise.
        num_splits: with block_table, as in `flash_attn_with_kvcache`.
        s_aux: floating (Hq,), `sink` of `cupy_flash.attention`.
        scheduler_metadata: ignored, as is fa_version: they choose among flash-attn's kernels.
        fa_version: ignored.

    Returns:
        out (Tq, Hq, D), or (out, softmax_lse, None) with softmax_lse (Hq, Tq).

    Raises:
        UnsupportedError: dropout with block_table, or an argument for pages without it.
    """
    if block_table is not None:
        name = "flash_attn_varlen_func"
        if q_descale is not None:
            raise UnsupportedError(f"{name}: q_descale: beside pages of float8_e4m3fn q has 16 bit")
        result = attend_to_pages(
            name, q, k, v, block_table, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, seqused_k, dropout_p=dropout_p,
            softmax_scale=softmax_scale, causal=causal, window_size=window_size, softcap=softcap,
            alibi_slopes=alibi_slopes, sink=s_aux, k_descale=k_descale, v_descale=v_descale, num_splits=num_splits,
            out=out, return_softmax_lse=bool(return_softmax_lse or return_attn_probs),
        )  # fmt: skip
        return (*result, None) if return_attn_probs else result
    refuse_without_pages(
        "flash_attn_varlen_func", seqused_k=seqused_k, out=out, return_softmax_lse=return_softmax_lse or None,
        q_descale=q_descale, k_descale=k_descale, v_descale=v_descale, num_splits=num_splits or None,
    )  # fmt: skip
    options = _flash_attn_options(dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic)
    options.sink = s_aux
    packed = Packed(as_int32(cu_seqlens_q), as_int32(cu_seqlens_k), max_seqlen_q, max_seqlen_k)
    return _flash_attn((q, k, v), options, return_attn_probs, packed)


def flash_attn_kvpacked_func(
    q: torch.Tensor,
    kv: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """Compute flash_attn_kvpacked_func of flash-attn 2, as `flash_attn_func`.

    Args:
        q: (B, Sq, Hq, D).
        kv: (B, Sk, 2, Hk, D).
        dropout_p: as in `flash_attn_func`.
        softmax_scale: as in `flash_attn_func`.
        causal: as in `flash_attn_func`.
        window_size: as in `flash_attn_func`.
        softcap: as in `flash_attn_func`.
        alibi_slopes: as in `flash_attn_func`.
        deterministic: as in `flash_attn_func`.
        return_attn_probs: as in `flash_attn_func`.

    Returns:
        As `flash_attn_func`.
    """
    k, v = _unpacked("flash_attn_kvpacked_func", "kv", kv, "(B, Sk, 2, Hk, D)")
    return flash_attn_func(
        q, k, v,
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs,
    )  # fmt: skip


def flash_attn_varlen_kvpacked_func(
    q: torch.Tensor,
    kv: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """Compute flash_attn_varlen_kvpacked_func of flash-attn 2, as `flash_attn_varlen_func`.

    Args:
        q: (Tq, Hq, D).
        kv: (Tk, 2, Hk, D).
        cu_seqlens_q: as in `flash_attn_varlen_func`.
        cu_seqlens_k: as in `flash_attn_varlen_func`.
        max_seqlen_q: as in `flash_attn_varlen_func`.
        max_seqlen_k: as in `flash_attn_varlen_func`.
        dropout_p: as in `flash_attn_func`.
        softmax_scale: as in `flash_attn_func`.
        causal: as in `flash_attn_func`.
        window_size: as in `flash_attn_func`.
        softcap: as in `flash_attn_func`.
        alibi_slopes: as in `flash_attn_func`.
        deterministic: as in `flash_attn_func`.
        return_attn_probs: as in `flash_attn_func`.

    Returns:
        As `flash_attn_varlen_func`.
    """
    k, v = _unpacked("flash_attn_varlen_kvpacked_func", "kv", kv, "(Tk, 2, Hk, D)")
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs,
    )  # fmt: skip


def flash_attn_qkvpacked_func(
    qkv: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """Compute flash_attn_qkvpacked_func of flash-attn 2, as `flash_attn_func`.

    Args:
        qkv: (B, S, 3, H, D).
        dropout_p: as in `flash_attn_func`.
        softmax_scale: as in `flash_attn_func`.
        causal: as in `flash_attn_func`.
        window_size: as in `flash_attn_func`.
        softcap: as in `flash_attn_func`.
        alibi_slopes: as in `flash_attn_func`.
        deterministic: as in `flash_attn_func`.
        return_attn_probs: as in `flash_attn_func`.

    Returns:
        As `flash_attn_func`.
    """
    q, k, v = _unpacked("flash_attn_qkvpacked_func", "qkv", qkv, "(B, S, 3, H, D)")
    return flash_attn_func(
        q, k, v,
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs,
    )  # fmt: skip


def flash_attn_varlen_qkvpacked_func(
    qkv: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """Compute flash_attn_varlen_qkvpacked_func of flash-attn 2, as `flash_attn_varlen_func`.

    Args:
        qkv: (T, 3, H, D).
        cu_seqlens: (B + 1,), of queries and keys.
        max_seqlen: at least the longest sequence.
        dropout_p: as in `flash_attn_func`.
        softmax_scale: as in `flash_attn_func`.
        causal: as in `flash_attn_func`.
        window_size: as in `flash_attn_func`.
        softcap: as in `flash_attn_func`.
        alibi_slopes: as in `flash_attn_func`.
        deterministic: as in `flash_attn_func`.
        return_attn_probs: as in `flash_attn_func`.

    Returns:
        As `flash_attn_varlen_func`.
    """
    q, k, v = _unpacked("flash_attn_varlen_qkvpacked_func", "qkv", qkv, "(T, 3, H, D)")
    cu_seqlens = as_int32(cu_seqlens)
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen,
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs,
    )  # fmt: skip


def _unpacked(function: str, name: str, packed: Any, shape: str) -> Any:
    """Unbind a packed tensor along dimension -3 (views); TypeError or ValueError unless it has `shape`."""
    if not isinstance(packed, torch.Tensor):
        raise TypeError(f"{function}: {name} must be a torch tensor, not {type(packed)}")
    sizes = shape.split(", ")
    if packed.dim() != len(sizes) or packed.shape[-3] != int(sizes[-3]):
        raise ValueError(f"{function}: {name} must be {shape}, not {tuple(packed.shape)}")
    return packed.unbind(dim=-3)


def _flash_attn_options(
    dropout: Any, scale: Any, causal: Any, window: Any, softcap: Any, alibi_slopes: Any, deterministic: Any
) -> Options:
    return Options(
        causal=causal,
        window=window,
        scale=scale,
        softcap=None if is_zero(softcap) else softcap,
        alibi_slopes=alibi_slopes,
        dropout=dropout,
        deterministic=deterministic,
    )


def refuse_without_pages(function: str, **arguments: Any) -> None:
    """Raise UnsupportedError if an argument that applies only to pages is given without block_table."""
    names = [name for name, value in arguments.items() if value is not None]
    if names:
        raise UnsupportedError(f"{function}: {', '.join(names)}: served with block_table alone")


def _flash_attn(
    arrays: tuple[Any, Any, Any], options: Options, return_attn_probs: Any, packed: Packed | None = None
) -> Any:
    options.return_lse = return_attn_probs
    result = forward("attention" if packed is None else "attention_varlen", arrays, options, packed)
    return (*result, None) if return_attn_probs else result
