"""attn_implementation="cupy_fa" for Hugging Face transformers: `register`, its attention function and its masks.

transformers describes what a query sees with one boolean mask per pattern of layers, (B, 1, Sq, Sk): quadratic in the
sequence, and made before any layer runs. Ours is a `LazyMask`, which says causal, window and padding instead, and is
written out only for code that looks at its elements. So one thing, the mask, says what is seen, as with sdpa.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.utils._pytree import tree_map_only
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function, eager_mask, sdpa_mask
from transformers.utils.import_utils import is_tracing

from ..problem import UnsupportedError
from .torch import attention, attention_varlen

NAME = "cupy_fa"  # transformers takes any name with "flash" in it for a kernel to download


def register() -> None:
    """Make attn_implementation="cupy_fa" known to transformers, for `from_pretrained` and `set_attn_implementation`.

    The results are those of attn_implementation="sdpa", gradients included; with it also what sdpa refuses: soft caps
    and sinks. Key/value heads are not repeated; causal masks, sliding windows and padding take memory linear in the
    sequence. Rows of padding, of which sdpa computes something, may be 0. A model which does not ask the attention
    interface is refused when it is built or loaded: see `check_model`.

        cupy_flash.adapters.transformers.register()
        model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="cupy_fa")
    """
    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, attention_mask)
    _hook_check()


@functools.cache  # once in a process, however often it is registered
def _hook_check() -> None:
    """Let the check by which transformers refuses sdpa and flash attention to a model refuse cupy_fa too.

    Every model passes it when it is built, loaded or given another attention, each of its submodels included; of an
    implementation that was registered it checks the name alone.
    """
    check_name = PreTrainedModel.get_correct_attn_implementation

    @functools.wraps(check_name)
    def check(self: Any, requested_attention: str | None, is_init_check: bool = False) -> str:
        implementation: str = check_name(self, requested_attention, is_init_check)
        if implementation == NAME:
            check_model(type(self))
        return implementation

    PreTrainedModel.get_correct_attn_implementation = check


def check_model(model_class: type) -> None:
    """Raise UnsupportedError for a model class of transformers that would compute something else than cupy_fa.

    Without `_supports_sdpa` and `_supports_attention_backend` a model has an attention of its own, and takes a mask of
    cupy_fa for one in its own format: future tokens and padding would be seen. Others choose a class of attention by
    the implementation's name, from a table that knows only those of transformers.
    """
    flags = {name: getattr(model_class, name) for name in ("_supports_sdpa", "_supports_attention_backend")}
    modules = {sys.modules.get(base.__module__) for base in model_class.__mro__ if issubclass(base, PreTrainedModel)}
    tables = {
        name for module in modules if module is not None
        for name, table in vars(module).items() if _is_table_of_attention(table)
    }  # fmt: skip
    if any(flags.values()) and not tables:
        return
    declared = ", ".join(f"{name}={value}" for name, value in flags.items())
    lack = f", and chooses its attention from {', '.join(sorted(tables))}, which lacks it" if tables else ""
    raise UnsupportedError(
        f'{model_class.__name__} does not support attn_implementation="{NAME}": it declares {declared}{lack}. '
        f'Use "eager"; parts of a model may differ: attn_implementation={{"text_config": "{NAME}", "": "eager"}}'
    )


def _is_table_of_attention(value: Any) -> bool:
    """Whether a global of a model's module is such as {"eager": FalconAttention, "sdpa": FalconAttention}."""
    return isinstance(value, dict) and NAME not in value and isinstance(value.get("eager"), type)


class Packing(NamedTuple):
    """Where the tokens that are not padding lie, and the lengths of their sequences."""

    tokens: tuple[Any, Any]  # their indices along batch and sequence
    cu_seqlens: Any  # int32 (B + 1,)
    longest: int

    def pack(self, x: Any) -> Any:
        """(B, S, H, D) -> (T, H, D)."""
        return x[self.tokens]

    def unpack(self, packed: Any, batch: int, length: int) -> Any:
        """(T, H, D) -> (B, S, H, D), padding 0."""
        return packed.new_zeros(batch, length, *packed.shape[1:]).index_put(self.tokens, packed)


class Padding:
    """Which keys of a padded batch are tokens, `valid` (B, Sk), and how attention is told so with the least work."""

    def __init__(self, valid: Any) -> None:
        self.valid = valid
        self.lengths = valid.sum(-1, dtype=torch.int32)
        places = torch.arange(valid.shape[-1], device=valid.device)
        facts = (
            self.lengths.sum(),
            self.lengths.amax(),
            (valid == (places < self.lengths[:, None])).all(),
            (valid == (places >= places.shape[0] - self.lengths[:, None])).all(),
        )
        tokens, self.longest, is_right, is_left = torch.stack(facts).tolist()  # the one wait for the device per mask
        self.none = tokens == valid.numel()
        self.is_right = bool(is_right)
        # Packing copies q, k, v and out and then spares padding its share of the work: on two CPU cores, 128 to 1024
        # tokens a row, both are equal between 1/10 and 1/5 of padding.
        self.is_worth_packing = bool(is_left) and 8 * tokens <= 7 * valid.numel()
        self._packing: Packing | None = None

    @property
    def packing(self) -> Packing:
        """Made by the first layer for all."""
        if self._packing is None:
            cu_seqlens = F.pad(self.lengths.cumsum(0, dtype=torch.int32), (1, 0))
            self._packing = Packing(self.valid.nonzero(as_tuple=True), cu_seqlens, self.longest)
        return self._packing


class LazyMask(torch.Tensor):
    """A mask of transformers, boolean (B, 1, Sq, Sk), True = attend, that knows its pattern instead of its elements.

    Any operator of torch that is called with it gets the mask itself, from `dense`.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # operators arrive in __torch_dispatch__ alone

    dense: Callable[[], Any]
    causal: bool  # bottom-right: the last query sees the last key
    window: tuple[int, int] | None  # as in `cupy_flash.attention`
    padding: Padding | None

    @staticmethod
    def of(
        shape: tuple[int, ...],
        device: Any,
        dense: Callable[[], Any],
        causal: bool,
        window: tuple[int, int] | None,
        padding: Padding | None,
    ) -> LazyMask:
        mask: LazyMask = torch.Tensor._make_wrapper_subclass(LazyMask, shape, dtype=torch.bool, device=device)
        mask.dense, mask.causal, mask.window, mask.padding = dense, causal, window, padding
        return mask

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map_only(cls, lambda mask: mask.dense(), (args, kwargs or {}))
        return func(*args, **kwargs)


# Models that append a bias, for keys which are not tokens, to their mask: in a boolean one its -inf would become True.
ADDITIVE = frozenset({"deepseek_v4"})


def attention_mask(
    batch_size: int, q_length: int, kv_length: int, q_offset: Any = 0, kv_offset: int = 0, **arguments: Any
) -> Any:
    """A mask function of transformers: None where queries see all keys, or all up to their own; else a mask.

    It is a LazyMask where a LazyMask can say it, and what sdpa_mask gives where not: patterns laid over one another,
    chunks, several sequences in one row, caches of fixed size, anything under torch.compile. Models in `ADDITIVE` get
    an additive mask.
    """
    sizes = dict(
        batch_size=batch_size, q_length=q_length, kv_length=kv_length, q_offset=q_offset, kv_offset=kv_offset
    )  # fmt: skip
    config = arguments.get("config")
    if getattr(config, "model_type", None) in ADDITIVE:
        return eager_mask(**sizes, **arguments)
    pattern = _pattern(**arguments)
    tokens = arguments.get("attention_mask")
    device = arguments.get("device", "cpu")
    is_padding = tokens is None or (tokens.dim() == 2 and tokens.dtype == torch.bool)
    # A static cache counts its tokens on the device; while tracing nothing on the device can be read.
    is_known = isinstance(q_offset, int) and is_padding and not is_tracing(tokens)
    # Layers that share keys and values (Gemma 4) may be given the last queries alone, and slice the mask of all: None
    # would put these queries first.
    is_sliced = bool(getattr(config, "num_kv_shared_layers", 0))
    if is_sliced:
        arguments["allow_is_causal_skip"] = False
    if pattern is None or not is_known:
        return sdpa_mask(**sizes, **arguments)
    causal, window = pattern
    if (causal or window) and q_offset + q_length != kv_offset + kv_length:  # attention counts from the last key
        return sdpa_mask(**sizes, **arguments)
    if window and max(window) + 1 >= kv_length:
        window = None
    padding = None
    if tokens is not None:
        valid = F.pad(tokens.to(device), (0, max(0, kv_offset + kv_length - tokens.shape[1])))
        padding = Padding(valid[:, kv_offset : kv_offset + kv_length])
        padding = None if padding.none else padding
    if padding is None and window is None and (not causal or (q_length in (1, kv_length) and not is_sliced)):
        return None  # what a module's is_causal says is enough
    return LazyMask.of(
        shape=(batch_size, 1, q_length, kv_length),
        device=device,
        dense=functools.cache(functools.partial(sdpa_mask, **sizes, **arguments)),
        causal=causal,
        window=window,
        padding=padding,
    )


def _pattern(
    mask_function: Any = causal_mask_function,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    local_size: int | None = None,
    config: Any = None,
    **_: Any,
) -> tuple[bool, tuple[int, int] | None] | None:
    """(causal, window) of a mask, or None: another pattern, or the caller wants the elements."""
    if not allow_is_causal_skip and not allow_is_bidirectional_skip:
        return None
    if mask_function is causal_mask_function or mask_function is bidirectional_mask_function:
        return mask_function is causal_mask_function, None
    # Any other function is opaque, but the flags say that nothing is laid over the model's window or chunks.
    window, chunk = (getattr(config, name, None) for name in ("sliding_window", "attention_chunk_size"))
    if local_size is None or local_size != window or local_size == chunk:
        return None
    return (True, (window - 1, window - 1)) if allow_is_causal_skip else (False, (window, window))


# Words that a model's own attention may take and that change nothing here: they are in the mask already, or concern
# another attention function.
IGNORED = frozenset(
    {
        "sliding_window", "position_ids", "cache_position", "past_key_values", "use_cache", "output_hidden_states",
        "output_router_logits", "num_items_in_batch", "seq_idx", "cu_seq_lens_k", "max_length_q", "max_length_k",
        "logits_to_keep", "return_dict",
    }
)  # fmt: skip
# Words for a kernel, which a model's own attention does not take: for that the model writes them into the mask.
OF_KERNELS = frozenset({"block_indices"})


def attention_forward(
    module: Any,
    query: Any,
    key: Any,
    value: Any,
    attention_mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: Any = None,
    position_bias: Any = None,
    indices: Any = None,
    deterministic: bool | None = None,
    **words: Any,
) -> tuple[Any, None]:
    """An attention function of transformers: query (B, Hq, Sq, D), key and value (B, Hk, Sk, D) -> (B, Sq, Hq, D).

    attention_mask: a LazyMask; a boolean or an additive tensor, as a caller may give a model, broadcastable to
    (B, Hq, Sq, Sk); or None: `is_causal`, else module.is_causal, says whether a query sees the keys after it.
    s_aux: (Hq,), the sinks. position_bias: added to the scores, with a gradient. indices: integers (B, Sq, n), the only
    keys that a query may see, of models with sparse attention. Of the other words those that would change the result
    are refused: see `_check_words`.
    """
    _check_words(module, attention_mask, words)
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    options = dict(
        scale=scaling, dropout=dropout, softcap=softcap, sink=s_aux, bias=position_bias,
        deterministic=bool(deterministic),
    )  # fmt: skip
    if k.shape[2] != v.shape[2]:  # one of them has a head for each of q, as in Nemotron 3
        k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], dim=2) for x in (k, v))
    if indices is not None:
        chosen = torch.zeros(*indices.shape[:2], k.shape[1], dtype=torch.bool, device=indices.device)
        chosen = chosen.scatter(-1, indices.long(), True)[:, None]
        if attention_mask is None:
            options["mask"] = chosen
        elif attention_mask.dtype == torch.bool:
            attention_mask = attention_mask & chosen
        else:
            attention_mask = attention_mask.masked_fill(~chosen, -torch.inf)
    if isinstance(attention_mask, LazyMask):
        return _attend(attention_mask, q, k, v, options), None
    if attention_mask is None:
        is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        # One query is the newest and sees all; more queries than one are the first, as in a cache of fixed size.
        options["causal"] = "top_left" if is_causal and q.shape[1] > 1 else False
    elif attention_mask.dtype == torch.bool:
        options["mask"] = attention_mask
    else:
        options["bias"] = attention_mask if position_bias is None else attention_mask + position_bias
    return attention(q, k, v, **options), None


def _check_words(module: Any, attention_mask: Any, words: dict[str, Any]) -> None:
    """Refuse words that would change the result.

    Beside those which a model names for its attention, it passes on whatever its caller gave: inputs of other parts of
    it, among them. What its own attention function, eager_attention_forward, does not take cannot change its result.
    """
    if words.get("cache") is not None:
        raise UnsupportedError("cupy_fa: no engine of this version reads the paged cache of continuous batching")
    if words.get("output_attentions"):
        raise UnsupportedError(
            'cupy_fa: probabilities are never stored; output_attentions needs attn_implementation="eager"'
        )
    # Of position_ids that start anew in each sequence transformers has made a mask, which is no LazyMask.
    is_apart = attention_mask is not None and not isinstance(attention_mask, LazyMask)
    sequences = words.get("cu_seq_lens_q")
    if sequences is not None and sequences.shape[0] > 2 and not is_apart:
        raise UnsupportedError(
            "cupy_fa: several sequences in one row by cu_seq_lens_q need position_ids that start anew in each of them"
        )
    known = IGNORED | {"cache", "output_attentions", "cu_seq_lens_q"}
    unknown = [word for word, value in words.items() if value is not None and word not in known]
    refused = [word for word in unknown if word in OF_KERNELS or _is_word_of_eager(type(module), word)]
    if refused:
        raise UnsupportedError(f"cupy_fa: {type(module).__name__} passes {', '.join(refused)}, which is not served")


def _is_word_of_eager(module_class: type, word: str) -> bool:
    """Whether the attention function of a model's own takes a word; True where it has none that would say so."""
    for base in module_class.__mro__:
        eager = getattr(sys.modules.get(base.__module__), "eager_attention_forward", None)
        if eager is not None:
            return word in inspect.signature(eager).parameters
    return True


def _attend(mask: LazyMask, q: Any, k: Any, v: Any, options: dict[str, Any]) -> Any:
    options |= dict(causal=mask.causal, window=mask.window)
    padding = mask.padding
    if padding is None:
        return attention(q, k, v, **options)
    is_relative = mask.causal or mask.window is not None
    # Only then are queries and keys the same tokens for certain: encoder states can be as many as decoder states.
    is_self_attention = is_relative and q.shape[1] == k.shape[1]
    if padding.is_right and is_self_attention:
        return attention(q, k, v, q_lengths=padding.lengths, kv_lengths=padding.lengths, **options)
    if padding.is_right and not is_relative:
        return attention(q, k, v, kv_lengths=padding.lengths, **options)
    if padding.is_worth_packing and is_self_attention and options["bias"] is None:
        packing = padding.packing
        del options["bias"]
        packed = attention_varlen(
            packing.pack(q), packing.pack(k), packing.pack(v), packing.cu_seqlens, packing.cu_seqlens,
            packing.longest, packing.longest, **options,
        )  # fmt: skip
        return packing.unpack(packed, q.shape[0], q.shape[1])
    return attention(q, k, v, mask=padding.valid[:, None, None, :], **options)
