"""torch's scaled_dot_product_attention by cupy_flash, and the context manager `sdpa` that puts it in torch's place."""

from __future__ import annotations

import functools
import math
import threading
import types
from collections.abc import Callable
from contextlib import AbstractContextManager
from itertools import permutations
from typing import Any, ParamSpec, TypeVar

import torch
import torch.nn.functional as F
from torch._ops import HigherOrderOperator
from torch.nested._internal.nested_tensor import nested_view_from_values_offsets
from torch.nn.attention.bias import CausalBias, CausalVariant
from torch.overrides import _get_current_function_mode_stack
from torch.utils import checkpoint

from ...problem.records import Options, Packed, UnsupportedError
from ...problem.weights import EACH, MEAN
from . import keyed_sdpa
from .transforms import forward
from .weights import attention_and_weights

P = ParamSpec("P")
R = TypeVar("R")


class SdpaValueError(ValueError, RuntimeError):
    """An invalid call of `scaled_dot_product_attention`; also a RuntimeError, which torch's raises."""


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
    call = None
    if not torch.compiler.is_compiling():
        call = keyed_sdpa.call_of(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
        if call is not None and (out := keyed_sdpa.run(call)) is not None:
            return out
    return _posed(call, query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)


@_raising_as_torch
def _posed(
    call: Any, query: Any, key: Any, value: Any, attn_mask: Any, dropout_p: Any, is_causal: Any, scale: Any,
    enable_gqa: Any,
) -> Any:  # fmt: skip
    """Compute `scaled_dot_product_attention`, and keep the call if it has a key."""
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
        q, k = F.pad(q, (0, 1)), F.pad(k, (0, 1))  # zeros as one dimension: scores are 0, as with E = 0
    # torch's result is contiguous if query had to be broadcast.
    order = order_in_memory(q) if query.shape == given_shape else (0, 1, 2)
    out, *_ = attend_in_order(q, k, v, options, order)
    if call is not None and order[0] == 0 and all(x is y for x, y in zip((q, k, v), call[1], strict=True)):
        keyed_sdpa.keep(call, (q, k, v), options)
    if drops_all:
        out = _zeroed(out)
    return out.reshape(*query.shape[:-1], value.shape[-1])


def _drops_all(dropout_p: Any) -> bool:
    """Return whether dropout_p is 1, which the kernels refuse because they scale kept elements by 1 / (1 - dropout)."""
    return isinstance(dropout_p, (int, float)) and dropout_p == 1


def _zeroed(out: Any) -> Any:
    """Return zeros with the shape of out, connected to it in the graph so that gradients are 0."""
    return out.masked_fill(out.new_ones((), dtype=torch.bool), 0)


def attend_in_order(q: Any, k: Any, v: Any, options: Options, order: tuple[int, ...]) -> tuple[Any, Any, Any]:
    """Return attention (B, H, S, Dv) of q, k, v (B, H, S, D), in memory in `order` with Dv innermost.

    lse and the Statistics follow, or None for what the options do not ask for.

    Callers rely on q's order: if q is a view of (B, S, H, D), they call out.transpose(1, 2).view(B, S, -1). The
    kernels write (B, S, H, D) and (B, H, S, D); any other order costs a copy.
    """
    # With a single query or a single head, (B, S, H, D) and (B, H, S, D) have the same order in memory.
    heads_first = order.index(1) < order.index(2) or 1 in q.shape[1:3]
    options.layout = "bhsd" if heads_first else "bshd"
    arrays = (q, k, v) if heads_first else (q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
    result = forward("attention", arrays, options)
    out, lse, *found = result if options.return_lse else (result, None)
    out = out if heads_first else out.transpose(1, 2)
    if order[0] != 0:
        out = out.permute(*order, 3).contiguous().permute(*map(order.index, range(3)), 3)
    return out, lse, found[0] if found else None


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
    """Return the longest sequence length; under torch.compile, if it is not cached, the upper bound T."""
    if x._maybe_max_seqlen is None and torch.compiler.is_compiling():
        return x.values().shape[0]
    return x._get_max_seqlen()


def _jagged_like(x: Any, values: Any) -> Any:
    """Return values (T, ...) nested with the offsets of x; nested_tensor_from_jagged fails under torch.compile."""
    return nested_view_from_values_offsets(
        values, x.offsets(), min_seqlen=x._maybe_min_seqlen, max_seqlen=x._maybe_max_seqlen
    )


def order_in_memory(query: Any) -> tuple[int, ...]:
    """Order of the first three dimensions of query in memory, outermost first."""
    strides = query.stride()
    if 0 in strides[:3]:
        # An expanded dimension has stride 0, which does not show its order: torch's result is an empty_like(query).
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
    """Expand query, key, value (views) and attn_mask to equal dimensions, except for the last `trailing` ones."""
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
    """Return `causal` for a CausalBias; if is_causal is set too, the alignment of the diagonal that masks more."""
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
        # torch's context_parallel replaces F.scaled_dot_product_attention by a function that calls it, so it is
        # compared by its name in torch._C. It comes first, as it is what a decode step waits for.
        if func is torch._C._nn.scaled_dot_product_attention:
            return scaled_dot_product_attention(*args, **(kwargs or {}))
        if torch.compiler.is_dynamo_compiling() and isinstance(func, HigherOrderOperator):
            # torch.compile traces the functions passed to checkpoint, cond etc. with this mode off. They can enter a
            # mode of their own only if one was entered outside of them before.
            with _Sdpa():
                args = tuple(_inside_sdpa(x) if callable(x) else x for x in args)
        return _routed(func)(*args, **(kwargs or {}))


def _routed(func: Any) -> Any:
    """Return the replacement of a torch function inside `sdpa`, by default the function itself.

    torch disables the mode while F.multi_head_attention_forward runs, so that its inner call of SDPA would be torch's.
    torch's context_parallel replaces F.scaled_dot_product_attention by a function that calls it, so it is compared by
    its name in torch._C.
    """
    if func is torch._C._nn.scaled_dot_product_attention:
        return scaled_dot_product_attention
    return multi_head_attention_forward if func is F.multi_head_attention_forward else func


def multi_head_attention_forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    embed_dim_to_check: int,
    num_heads: int,
    in_proj_weight: torch.Tensor | None,
    in_proj_bias: torch.Tensor | None,
    bias_k: torch.Tensor | None,
    bias_v: torch.Tensor | None,
    add_zero_attn: bool,
    dropout_p: float,
    out_proj_weight: torch.Tensor,
    out_proj_bias: torch.Tensor | None,
    training: bool = True,
    key_padding_mask: torch.Tensor | None = None,
    need_weights: bool = True,
    attn_mask: torch.Tensor | None = None,
    use_separate_proj_weight: bool = False,
    q_proj_weight: torch.Tensor | None = None,
    k_proj_weight: torch.Tensor | None = None,
    v_proj_weight: torch.Tensor | None = None,
    static_k: torch.Tensor | None = None,
    static_v: torch.Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute torch.nn.functional.multi_head_attention_forward with cupy_flash; inside `sdpa` it takes its place.

    With need_weights torch's function computes attention without SDPA. This one computes the result by attention,
    which stores no probabilities, and then those that are returned; their average over heads takes the memory of one.

    Args:
        query: as in torch's function; and so are the others.
        key: likewise.
        value: likewise.
        embed_dim_to_check: likewise.
        num_heads: likewise.
        in_proj_weight: likewise.
        in_proj_bias: likewise.
        bias_k: likewise.
        bias_v: likewise.
        add_zero_attn: likewise.
        dropout_p: likewise.
        out_proj_weight: likewise.
        out_proj_bias: likewise.
        training: likewise.
        key_padding_mask: likewise.
        need_weights: likewise.
        attn_mask: likewise.
        use_separate_proj_weight: likewise.
        q_proj_weight: likewise.
        k_proj_weight: likewise.
        v_proj_weight: likewise.
        static_k: likewise.
        static_v: likewise.
        average_attn_weights: likewise.
        is_causal: likewise.

    Returns:
        The output, and the weights (N, L, S), or (N, num_heads, L, S) unless they are averaged, with gradients; None
        without need_weights. The weights are those before dropout, torch's those after it. A row that sees no key is 0.
    """
    others = (
        query, key, value, embed_dim_to_check, num_heads, in_proj_weight, in_proj_bias, bias_k, bias_v, add_zero_attn,
        dropout_p, out_proj_weight, out_proj_bias, training, key_padding_mask, False, attn_mask,
        use_separate_proj_weight, q_proj_weight, k_proj_weight, v_proj_weight, static_k, static_v,
    )  # fmt: skip
    if not need_weights:
        return _without_weights(*others, is_causal=is_causal)
    _beside.heads = MEAN if average_attn_weights else EACH
    # is_causal is a hint that attn_mask is causal, which torch ignores with need_weights; alone it is an error.
    out, _ = _with_weights(*others, is_causal=is_causal and attn_mask is None)
    weights, _beside.weights = _beside.weights, None
    return out, weights if query.dim() == 3 else weights.squeeze(0)


# Per thread: the heads that a call of torch's multi_head_attention_forward asks for, and the weights that it computes.
# Torch calls SDPA in it, whose arguments and results have no place for them.
_beside = threading.local()


def _attend_with_weights(q: Any, k: Any, v: Any, attn_mask: Any, dropout_p: Any, is_causal: bool) -> Any:
    """Return SDPA of (B, H, S, E), and keep its weights in `_beside`."""
    options = Options(causal="top_left" if is_causal else False, bias=attn_mask)
    options.dropout = 0.0 if _drops_all(dropout_p) else dropout_p
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out, _beside.weights = attention_and_weights(q, k, v, options, _beside.heads, None)
    return (_zeroed(out) if _drops_all(dropout_p) else out).transpose(1, 2)


def _copy_of_torchs(attend: Callable[..., Any]) -> Callable[..., Any]:
    """Return a copy of F.multi_head_attention_forward that calls `attend` in place of SDPA.

    The globals of the copy contain the copy, because it passes itself, looked up by name, to other modes, such as
    torch.set_default_device. They lack __name__, by which torch.compile would look up globals in torch's module.
    """
    names = {name: value for name, value in vars(F).items() if name != "__name__"}
    original = F.multi_head_attention_forward
    copy = types.FunctionType(original.__code__, names, argdefs=original.__defaults__)
    names |= {"scaled_dot_product_attention": attend, "multi_head_attention_forward": copy}
    return copy


_without_weights = _copy_of_torchs(scaled_dot_product_attention)
_with_weights = _copy_of_torchs(_attend_with_weights)


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

    Works in eager mode and under torch.compile, also inside nn.MultiheadAttention, whose weights are those before
    dropout: see `multi_head_attention_forward`. A call that cupy_flash cannot serve raises; it never falls back to
    torch's.

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
