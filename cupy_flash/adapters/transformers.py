"""attn_implementation="cupy_fa" for Hugging Face transformers: `register`, attention function, mask function.

transformers builds one boolean mask (B, 1, Sq, Sk) per attention pattern before the layers run, which is quadratic in
the sequence. `LazyMask` stores causal, window and padding instead, or the mask function as a `Mod` (chunks, prefixes,
several sequences in one row, ...), and materialises only for code that reads its elements. As with sdpa, the mask alone
determines which keys a query sees.
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
from transformers.utils.output_capturing import _active_collector

from ..mods.trace import Mod
from ..problem.records import CacheOptions, Options, UnsupportedError
from ..problem.weights import EACH, LIMIT
from .torch import attention, attention_varlen
from .torch.kv_cache import attend
from .torch.weights import attention_and_weights

NAME = "cupy_fa"  # without "flash", because transformers downloads a kernel for names that contain it


def register() -> None:
    """Register attn_implementation="cupy_fa" with transformers, for `from_pretrained` and `set_attn_implementation`.

    Results and gradients are those of attn_implementation="sdpa"; softcaps and sinks, which sdpa lacks, work too.
    Key/value heads are not repeated; masks take memory linear in the sequence.
    Padding rows may be 0, where sdpa computes arbitrary values. A model that does not use the attention interface
    raises UnsupportedError when built or loaded: see `check_model`.

        cupy_flash.adapters.transformers.register()
        model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="cupy_fa")
    """
    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, attention_mask)
    _hook_check()


@functools.cache  # once per process, however often `register` is called
def _hook_check() -> None:
    """Extend transformers' check of sdpa and flash attention support to cupy_fa.

    transformers runs the check for every model and submodel that is built, loaded or given another attention, but for a
    registered implementation it checks the name only.
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
    """Raise UnsupportedError for a model class that would not call cupy_fa.

    A model without `_supports_sdpa` and `_supports_attention_backend` has its own attention and would misread cupy_fa's
    mask as one in its own format, so that future tokens and padding would be seen. Other models look up the attention
    class by name in a table that has only transformers' own implementations.

    Args:
        model_class: a subclass of transformers.PreTrainedModel.
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
    """Return whether a value is a table of attention classes, such as {"eager": FalconAttention, "sdpa": ...}."""
    return isinstance(value, dict) and NAME not in value and isinstance(value.get("eager"), type)


class Packing(NamedTuple):
    """Indices that pack the tokens of a padded batch, and their sequence boundaries."""

    tokens: tuple[Any, Any]  # (batch, sequence) indices of the T tokens that are not padding
    cu_seqlens: Any  # int32 (B + 1,)
    longest: int

    def pack(self, x: Any) -> Any:
        """Pack x (B, S, H, D) into (T, H, D)."""
        return x[self.tokens]

    def unpack(self, packed: Any, batch: int, length: int) -> Any:
        """Unpack (T, H, D) into (B, S, H, D), with zeros as padding."""
        return packed.new_zeros(batch, length, *packed.shape[1:]).index_put(self.tokens, packed)


class Padding:
    """Padding of a batch: `valid` (B, Sk), True for tokens, and properties that select the cheapest kernel call."""

    def __init__(self, valid: Any) -> None:
        self.valid = valid
        self.lengths = valid.sum(-1, dtype=torch.int32)
        positions = torch.arange(valid.shape[-1], device=valid.device)
        statistics = (
            self.lengths.sum(),
            self.lengths.amax(),
            (valid == (positions < self.lengths[:, None])).all(),
            (valid == (positions >= positions.shape[0] - self.lengths[:, None])).all(),
        )
        tokens, self.longest, is_right, is_left = torch.stack(statistics).tolist()  # one host synchronisation per mask
        self.none = tokens == valid.numel()
        self.is_right = bool(is_right)
        # Packing copies q, k, v and out, and saves the work on padding: it breaks even at 10 to 20 % of padding (two
        # CPU cores, rows of 128 to 1024 tokens).
        self.is_worth_packing = bool(is_left) and 8 * tokens <= 7 * valid.numel()
        self._packing: Packing | None = None

    @property
    def packing(self) -> Packing:
        """The packing indices, computed by the first layer and shared by all."""
        if self._packing is None:
            cu_seqlens = F.pad(self.lengths.cumsum(0, dtype=torch.int32), (1, 0))
            self._packing = Packing(self.valid.nonzero(as_tuple=True), cu_seqlens, self.longest)
        return self._packing


class StaticKeys(NamedTuple):
    """The keys that exist in a cache of fixed size, as tensors on its device; the queries are at the last Sq of them.

    It is the attribute `static_keys` of a causal mask, which is a LazyMask, or a tensor under torch.compile. A tensor
    that a model computes from such a mask lacks the attribute.
    """

    lengths: Any  # int32 (B,)
    window: tuple[int, int] | None  # as in `cupy_flash.attention`
    valid: Any  # bool (B, 1, 1, Sk), False for padding; None without


class LazyMask(torch.Tensor):
    """A transformers mask, bool (B, 1, Sq, Sk), True = attend, that stores its pattern instead of its elements.

    Any torch operator receives the materialised mask, from `dense`.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # operators on it reach only __torch_dispatch__

    make_elements: Callable[[], Any]
    elements: Any  # the boolean tensor, once an operator has read it; else None
    mod: Mod | None  # the whole pattern; if given, causal, window and padding are ignored
    causal: bool  # bottom-right
    window: tuple[int, int] | None  # as in `cupy_flash.attention`
    padding: Padding | None
    static_keys: StaticKeys | None  # of a static cache; if given, mod, causal, window and padding are ignored

    @staticmethod
    def of(
        shape: tuple[int, ...],
        device: Any,
        dense: Callable[[], Any],
        causal: bool,
        window: tuple[int, int] | None,
        padding: Padding | None,
        mod: Mod | None = None,
        static_keys: StaticKeys | None = None,
    ) -> LazyMask:
        """Return a mask with this shape and pattern; `dense` computes its elements for operators that read them."""
        mask: LazyMask = torch.Tensor._make_wrapper_subclass(LazyMask, shape, dtype=torch.bool, device=device)
        mask.make_elements, mask.elements = dense, None
        mask.causal, mask.window, mask.padding, mask.mod = causal, window, padding, mod
        mask.static_keys = static_keys
        return mask

    @property
    def is_pattern(self) -> bool:
        """False once a model that asked for elements has read them, because it may have changed them in place."""
        gives_elements = self.mod is not None or self.static_keys is not None
        return not gives_elements or self.elements is None

    def dense(self) -> Any:
        """Return the mask's elements, which are made once."""
        if self.elements is None:
            self.elements = self.make_elements()
        return self.elements

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map_only(cls, lambda mask: mask.dense(), (args, kwargs or {}))
        return func(*args, **kwargs)


# Model types that get an additive mask, because they append a bias for additional keys to it: in a boolean mask the
# -inf of that bias would become True.
ADDITIVE = frozenset({"deepseek_v4"})


def attention_mask(
    batch_size: int, q_length: int, kv_length: int, q_offset: Any = 0, kv_offset: int = 0, **arguments: Any
) -> Any:
    """Return the mask of a model: None if module.is_causal suffices, a LazyMask if the pattern fits, else a tensor.

    sdpa_mask builds the tensor for one query, under torch.compile, and for mask functions that cannot be traced to a
    Mod; attention on a static cache does not read it. Models in `ADDITIVE` get an additive mask.
    """
    sizes = dict(
        batch_size=batch_size, q_length=q_length, kv_length=kv_length, q_offset=q_offset, kv_offset=kv_offset
    )  # fmt: skip
    config = arguments.get("config")
    if getattr(config, "model_type", None) in ADDITIVE:
        return eager_mask(**sizes, **arguments)
    is_tensor_offset = isinstance(q_offset, torch.Tensor)  # of a cache of fixed size
    pattern = _pattern(**arguments)
    if is_tensor_offset and q_length == 1 and _is_causal(**arguments):
        pattern = True, None  # a static cache: transformers builds this mask at every step, and never reads it
    tokens = arguments.get("attention_mask")
    device = arguments.get("device", "cpu")
    is_padding = tokens is None or (tokens.dim() == 2 and tokens.dtype == torch.bool)
    # While tracing, tensors cannot be read.
    is_known = isinstance(q_offset, int) and is_padding and not is_tracing(tokens)
    # Layers that share keys and values (Gemma 4) may get only the last queries, and slice the mask for them. A mask of
    # None cannot be sliced: these queries would then be taken for the first ones.
    is_sliced = bool(getattr(config, "num_kv_shared_layers", 0))
    if is_sliced:
        arguments["allow_is_causal_skip"] = False
    causal, window = pattern or (False, None)
    has_room = kv_offset == 0 and (is_tensor_offset or q_offset + q_length < kv_length)
    if causal and has_room and is_padding and not is_sliced:
        return _mask_of_static_cache(sizes, arguments, window)
    if not is_known:
        return sdpa_mask(**sizes, **arguments)
    is_aligned = q_offset + q_length == kv_offset + kv_length  # the last query is at the last key
    if pattern is None or ((causal or window) and not is_aligned):
        return _mask_by_function(sizes, arguments)
    if window and max(window) + 1 >= kv_length:
        window = None
    padding = None
    if tokens is not None:
        padding = _padding_of(_valid_keys(tokens, kv_offset + kv_length, device)[:, kv_offset : kv_offset + kv_length])
    if padding is None and window is None and (not causal or (q_length in (1, kv_length) and not is_sliced)):
        return None
    return LazyMask.of(
        shape=(batch_size, 1, q_length, kv_length),
        device=device,
        dense=functools.partial(sdpa_mask, **sizes, **arguments),
        causal=causal,
        window=window,
        padding=padding,
    )


def _mask_of_static_cache(sizes: dict[str, Any], arguments: dict[str, Any], window: tuple[int, int] | None) -> Any:
    """Return the mask of a cache of fixed size with its `static_keys`: a LazyMask, or a tensor under torch.compile."""
    batch_size, q_length, kv_length, q_offset, _ = sizes.values()
    tokens, device = arguments.get("attention_mask"), arguments.get("device", "cpu")
    valid = None
    if tokens is not None:
        # Padding is among the keys that exist; the lengths hide those that do not exist yet.
        valid = F.pad(tokens.to(device), (0, kv_length - tokens.shape[1]), value=True)[:, None, None, :]
    elements = functools.partial(sdpa_mask, **sizes, **arguments | dict(allow_is_causal_skip=False))
    lengths = torch.zeros(batch_size, dtype=torch.int32, device=device) + (q_offset + q_length)
    static_keys = StaticKeys(lengths.to(torch.int32), window, valid)
    if is_tracing(lengths):
        mask = elements()
        mask.static_keys = static_keys
        return mask
    if valid is not None and bool(valid.all()):
        static_keys = static_keys._replace(valid=None)
    return LazyMask.of(
        shape=(batch_size, 1, q_length, kv_length),
        device=device,
        dense=elements,
        causal=True,
        window=None,
        padding=None,
        static_keys=static_keys,
    )


def _padding_of(valid: Any) -> Padding | None:
    """Return the Padding of a mask, bool (B, keys); None if it hides no key."""
    padding = Padding(valid)
    return None if padding.none else padding


def _valid_keys(tokens: Any, length: int, device: Any) -> Any:
    """Return the padding mask on a device, bool (B, at least `length`), extended by False."""
    return F.pad(tokens.to(device), (0, max(0, length - tokens.shape[1])))


def _mask_by_function(sizes: dict[str, Any], arguments: dict[str, Any]) -> Any:
    """Return a LazyMask if the mask function can be traced to a Mod, else its tensor; for one query always a tensor."""
    batch_size, q_length, kv_length, q_offset, kv_offset = sizes.values()
    function, tokens = arguments.get("mask_function", causal_mask_function), arguments.get("attention_mask")
    device = arguments.get("device", "cpu")
    valid = None if tokens is None else _valid_keys(tokens, kv_offset + kv_length, device)

    def mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        q_idx, kv_idx = q_idx + q_offset, kv_idx + kv_offset
        seen = function(b, 0, q_idx, kv_idx)  # transformers' masks have no head axis
        return seen if valid is None else seen & valid[b, kv_idx]

    try:
        mod = Mod(mask_mod=mask_mod) if q_length > 1 else None
    except Exception:  # sdpa_mask below calls the function again and raises its error
        mod = None
    if mod is None:
        return sdpa_mask(**sizes, **arguments)
    # use_vmap=False: `dense` runs in __torch_dispatch__, where vmap fails. A function that can be traced needs no vmap.
    arguments |= dict(allow_is_causal_skip=False, allow_is_bidirectional_skip=False, use_vmap=False)
    return LazyMask.of(
        shape=(batch_size, 1, q_length, kv_length),
        device=device,
        dense=functools.partial(sdpa_mask, **sizes, **arguments),
        causal=False,
        window=None,
        padding=None,
        mod=mod,
    )


def _is_causal(mask_function: Any = causal_mask_function, **_: Any) -> bool:
    """Return whether a mask is only causal, apart from padding."""
    return mask_function is causal_mask_function


def _pattern(
    mask_function: Any = causal_mask_function,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    local_size: int | None = None,
    config: Any = None,
    **_: Any,
) -> tuple[bool, tuple[int, int] | None] | None:
    """Return (causal, window) of a mask; None for any other pattern, or if the caller needs a materialised mask."""
    if not allow_is_causal_skip and not allow_is_bidirectional_skip:
        return None
    if _is_causal(mask_function) or mask_function is bidirectional_mask_function:
        return _is_causal(mask_function), None
    # Other mask functions are opaque, but a skip flag implies that the mask is the model's plain window or chunks.
    window, chunk = (getattr(config, name, None) for name in ("sliding_window", "attention_chunk_size"))
    if local_size is None or local_size != window or local_size == chunk:
        return None
    return (True, (window - 1, window - 1)) if allow_is_causal_skip else (False, (window, window))


# Keyword arguments that do not change the result here: the mask contains them, or they concern other functions.
IGNORED = frozenset(
    {
        "sliding_window", "position_ids", "cache_position", "past_key_values", "use_cache", "output_hidden_states",
        "output_router_logits", "num_items_in_batch", "seq_idx", "cu_seq_lens_k", "max_length_q", "max_length_k",
        "logits_to_keep", "return_dict",
    }
)  # fmt: skip
# Keyword arguments of continuous batching with a paged cache.
OF_PAGES = frozenset({"cache", "read_index", "write_index", "block_table"})


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
    block_indices: Any = None,
    deterministic: bool | None = None,
    **kwargs: Any,
) -> tuple[Any, Any]:
    """Return (attention (B, Sq, Hq, D), weights) of query (B, Hq, Sq, D), key and value (B, Hk, Sk, D), as eager does.

    The weights (B, Hq, Sq, Sk) are None unless the model was called with output_attentions=True. They are those before
    dropout, and 0 in rows that see no key. More than 2 GiB of them are a ValueError.

    attention_mask: a LazyMask; a boolean or additive tensor broadcastable to (B, Hq, Sq, Sk); or None, and then
    `is_causal`, by default module.is_causal, determines the mask. s_aux: (Hq,), the sinks. position_bias: added to the
    scores, with a gradient. indices: integers (B, Sq, n), the only keys that a query may see, and block_indices:
    (B, Hs, Sq, n), the only blocks of module.indexer.block_size keys, for models with sparse attention; they take no
    memory of Sq x Sk. Raises UnsupportedError for other arguments that would change the result: see `_check_arguments`.
    """
    _check_arguments(module, attention_mask, kwargs)
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    options = dict(
        scale=scaling, dropout=dropout, softcap=softcap, sink=s_aux, bias=position_bias,
        deterministic=bool(deterministic),
    )  # fmt: skip
    wants_weights = _wants_weights(kwargs)
    if kwargs.get("cache") is not None:
        if wants_weights:
            raise UnsupportedError("cupy_fa: output_attentions on the pages of continuous batching")
        return _attend_on_pages(module, query, key, value, options, kwargs), None
    if k.shape[2] != v.shape[2]:  # in Nemotron 3, one of them already has Hq heads
        k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], dim=2) for x in (k, v))
    lists = _lists(module, indices, block_indices)
    if lists is not None and wants_weights:
        named = _keys_named_by(lists, q.shape[2], k.shape[1])
        if attention_mask is None:
            options["mask"] = named
        elif attention_mask.dtype == torch.bool:
            attention_mask = attention_mask & named
        else:
            attention_mask = attention_mask.masked_fill(~named, -torch.inf)
    elif lists is not None:
        options |= lists._asdict()
    if isinstance(attention_mask, LazyMask) and not attention_mask.is_pattern:
        attention_mask = attention_mask.dense()
    static_keys = getattr(attention_mask, "static_keys", None)
    if static_keys is not None:
        return _attend_on_static_cache(static_keys, q, k, v, options, wants_weights)
    if isinstance(attention_mask, LazyMask):
        return _attend(attention_mask, q, k, v, options, wants_weights)
    if attention_mask is None:
        is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        # A single query is the newest token and sees all keys; several queries are the first tokens, also with a static
        # cache whose later slots are empty.
        options["causal"] = "top_left" if is_causal and q.shape[1] > 1 else False
    elif attention_mask.dtype == torch.bool:
        options["mask"] = attention_mask
    else:
        options["bias"] = attention_mask if position_bias is None else attention_mask + position_bias
    return _attention(q, k, v, options, wants_weights)


class Lists(NamedTuple):
    """The options of `attention` for keys that a model has selected."""

    selected: Any  # int32 (B, Hs, Sq, n)
    selected_block: int


def _lists(module: Any, indices: Any, block_indices: Any) -> Lists | None:
    """Return the lists that a model passes, None if it passes none."""
    if indices is not None:
        return Lists(indices[:, None].to(torch.int32), 1)
    if block_indices is None:
        return None
    block = getattr(getattr(module, "indexer", None), "block_size", None)
    if block is None:
        name = type(module).__name__
        raise UnsupportedError(f"cupy_fa: {name} passes block_indices, and has no indexer.block_size")
    return Lists(block_indices.to(torch.int32), block)


def _keys_named_by(lists: Lists, heads: int, length: int) -> Any:
    """Return which keys the lists name, bool (B, 1 or Hq, Sq, Sk), for weights of all keys."""
    selected, block = lists
    blocks = -(-length // block)
    named = torch.zeros(*selected.shape[:3], blocks + 1, dtype=torch.bool, device=selected.device)
    named.scatter_(-1, torch.where(selected < 0, blocks, selected).long(), True)
    named = named[..., :blocks].repeat_interleave(block, dim=-1)[..., :length]
    return named if named.shape[1] == 1 else named.repeat_interleave(heads // named.shape[1], dim=1)


def _wants_weights(kwargs: dict[str, Any]) -> bool:
    """Return whether the caller of the model has set output_attentions, which some models do not pass on."""
    if kwargs.get("output_attentions"):
        return True
    if torch.compiler.is_compiling() and not _active_collector.compiling:
        return False  # torch.compile cannot read the ContextVar of a model that is not compiled itself
    return any(name.endswith("attentions") for name in _active_collector.get() or ())


def _attention(q: Any, k: Any, v: Any, options: dict[str, Any], wants_weights: bool) -> tuple[Any, Any]:
    if not wants_weights:
        return attention(q, k, v, **options), None
    return attention_and_weights(q, k, v, Options(**options), EACH, LIMIT)


def _check_arguments(module: Any, attention_mask: Any, kwargs: dict[str, Any]) -> None:
    """Raise UnsupportedError for keyword arguments that would change the result.

    A model also passes on arguments of its caller that are meant for other parts of the model. An argument that the
    model's own eager_attention_forward lacks cannot change the result.
    """
    # If position_ids restart in each sequence, transformers has made a mask that separates the sequences.
    is_separated = attention_mask is not None and getattr(attention_mask, "mod", True) is not None
    sequences = kwargs.get("cu_seq_lens_q")
    is_separated |= kwargs.get("cache") is not None
    if sequences is not None and sequences.shape[0] > 2 and not is_separated:
        raise UnsupportedError(
            "cupy_fa: several sequences in one row by cu_seq_lens_q need position_ids that restart in each of them"
        )
    known = IGNORED | {"output_attentions", "cu_seq_lens_q"} | (OF_PAGES if kwargs.get("cache") is not None else set())
    unknown = [name for name, value in kwargs.items() if value is not None and name not in known]
    refused = [name for name in unknown if _is_argument_of_eager(type(module), name)]
    if refused:
        raise UnsupportedError(f"cupy_fa: {type(module).__name__} passes {', '.join(refused)}, which is not supported")


def _is_argument_of_eager(module_class: type, name: str) -> bool:
    """Return whether the model's eager_attention_forward has an argument `name`; True if there is no such function."""
    for base in module_class.__mro__:
        eager = getattr(sys.modules.get(base.__module__), "eager_attention_forward", None)
        if eager is not None:
            return name in inspect.signature(eager).parameters
    return True


def _attend(mask: LazyMask, q: Any, k: Any, v: Any, options: dict[str, Any], wants_weights: bool) -> tuple[Any, Any]:
    def attend_with(**settings: Any) -> tuple[Any, Any]:
        return _attention(q, k, v, options | settings, wants_weights)

    if mask.mod is not None:
        return attend_with(mask_mod=mask.mod)
    options |= dict(causal=mask.causal, window=mask.window)
    padding = mask.padding
    if padding is None:
        return attend_with()
    is_relative = mask.causal or mask.window is not None
    # Equal lengths alone do not prove self-attention, because they can be equal by chance in cross-attention, which is
    # neither causal nor windowed.
    is_self_attention = is_relative and q.shape[1] == k.shape[1]
    if padding.is_right and is_self_attention:
        return attend_with(q_lengths=padding.lengths, kv_lengths=padding.lengths)
    if padding.is_right and not is_relative:
        return attend_with(kv_lengths=padding.lengths)
    is_packable = is_self_attention and options["bias"] is None and not wants_weights and "selected" not in options
    if padding.is_worth_packing and is_packable:
        packing = padding.packing
        del options["bias"]
        packed = attention_varlen(
            packing.pack(q), packing.pack(k), packing.pack(v), packing.cu_seqlens, packing.cu_seqlens,
            packing.longest, packing.longest, **options,
        )  # fmt: skip
        return packing.unpack(packed, q.shape[0], q.shape[1]), None
    return attend_with(mask=padding.valid[:, None, None, :])


def _attend_on_static_cache(
    keys: StaticKeys, q: Any, k: Any, v: Any, options: dict[str, Any], wants_weights: bool
) -> tuple[Any, Any]:
    """Return attention on the existing keys of a static cache, by `attend` if options, gradients and weights allow."""
    options |= dict(causal=True, window=keys.window)
    records = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
    has_options = keys.valid is not None or options["dropout"] or options["bias"] is not None
    if records or has_options or wants_weights:
        options |= dict(mask=keys.valid, kv_lengths=keys.lengths)
        return _attention(q, k, v, options, wants_weights)
    names = ("scale", "softcap", "sink", "causal", "window", *Lists._fields)
    settings = CacheOptions(cache_seqlens=keys.lengths, **{name: options[name] for name in names if name in options})
    return attend(q, k, v, settings), None


def _attend_on_pages(module: Any, query: Any, key: Any, value: Any, options: dict[str, Any], words: Any) -> Any:
    """Return attention (1, T, Hq, D) of packed tokens (1, H, T, D) on the paged cache of continuous batching.

    The cache either stores the new keys and returns those of all sequences concatenated, or passes a block table, and
    then the call stores the new keys. cu_seqlens replace a mask.
    """
    words = dict(words)
    key, value = words["cache"].update(key_states=key, value_states=value, layer_idx=module.layer_idx, kwargs=words)
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    options = {name: option for name, option in options.items() if option is not None}
    window = words.get("sliding_window")
    options |= dict(causal=True, window=None if window is None else (window - 1, 0))
    q_bounds, k_bounds = (words[f"cu_seq_lens_{side}"].to(torch.int32) for side in "qk")
    longest = int(words["max_length_q"])
    if words.get("block_table") is None:
        out = attention_varlen(q, k, v, q_bounds, k_bounds, longest, int(words["max_length_k"]), **options)
        return out[None]
    if options.pop("dropout") or "bias" in options:
        raise UnsupportedError("cupy_fa: dropout or a position_bias on the pages of continuous batching")
    del options["deterministic"]
    settings = CacheOptions(
        k=k, v=v, cache_seqlens=k_bounds.diff() - q_bounds.diff(), block_table=words["block_table"],
        cu_seqlens_q=q_bounds, max_seqlen_q=longest, **options,
    )  # fmt: skip
    return attend(q, words["k_cache"], words["v_cache"], settings)[None]
