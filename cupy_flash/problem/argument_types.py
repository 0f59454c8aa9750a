"""Types of the arguments of public functions. Only type checkers import this module.

A class lists options as keyword arguments: `**options: Unpack[PaddedOptions[AnyArray]]`. Its parameter is the type of
the options that are arrays. `return_lse` has a class of its own because the type of the result depends on it: overloads
declare it and unpack a class without it. tests/library/test_features.py compares the classes with the signature of
`cupy_flash.attention` and against the table of features.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
from typing_extensions import TypedDict  # typing.TypedDict can be generic only from Python 3.11 on

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from ..mods.trace import Mod

Causal: TypeAlias = bool | Literal["bottom_right", "top_left"]
Window: TypeAlias = tuple[int | None, int | None] | None
ScoreMod: TypeAlias = "Callable[[Any, Any, Any, Any, Any], Any] | Mod | None"  # (score, b, h, q_idx, kv_idx)
MaskMod: TypeAlias = "Callable[[Any, Any, Any, Any], Any] | Mod | None"  # (b, h, q_idx, kv_idx)
Layout: TypeAlias = Literal["bshd", "bhsd"]
Statistic: TypeAlias = Literal["max", "argmax", "entropy"]
Names: TypeAlias = Sequence[str] | None  # of statistics
Sharding: TypeAlias = Literal["zigzag", "contiguous", "striped"]
Lengths: TypeAlias = int | tuple[int, int] | None  # lengths of a whole sharded sequence: S, or (Sq, Sk)
Boundaries: TypeAlias = "Sequence[int] | npt.NDArray[np.integer] | torch.Tensor"  # in host memory
Group: TypeAlias = "ProcessGroup | DeviceMesh | None"
DType: TypeAlias = "npt.DTypeLike | torch.dtype"
Presence: TypeAlias = "bool | npt.DTypeLike | torch.dtype"  # a placeholder for an array: True, or its dtype

T = TypeVar("T")


class Definition(TypedDict, Generic[T], total=False):
    """Options that define what attention computes, for padded and packed batches, on one device or several ranks."""

    causal: Causal
    window: Window
    scale: float | None
    softcap: float | None
    alibi_slopes: T | None
    sink: T | None
    dropout: float
    seed: int | T | None


class Values(TypedDict, total=False):
    """The option of values that are inside the keys."""

    head_dim_v: int | None


class Padding(TypedDict, Generic[T], total=False):
    """Options of padded batches."""

    mask: T | None
    q_lengths: T | None
    kv_lengths: T | None


class Mods(TypedDict, total=False):
    """Options that are Python functions."""

    score_mod: ScoreMod
    mask_mod: MaskMod


class Descales(TypedDict, Generic[T], total=False):
    """Options of fp8."""

    q_descale: T | None
    k_descale: T | None
    v_descale: T | None


class Ordering(TypedDict, total=False):
    """The option for the order of dimensions."""

    layout: Layout


class Lse(TypedDict, total=False):
    """The option that adds lse to the results."""

    return_lse: bool


class Result(Lse, total=False):
    """The options that select the results."""

    statistics: Names


class Execution(TypedDict, total=False):
    """Options that control how a call runs."""

    deterministic: bool
    backend: str | None
    engine: str | None


class SelectingKeys(TypedDict, Generic[T], total=False):
    """The options of lists of selected keys that define what attention computes."""

    selected: T | None
    selected_block: int
    selected_rows: int


class Selecting(SelectingKeys[T], total=False):
    """The options of lists of selected keys."""

    check_selected: bool


class OneDevice(TypedDict, Generic[T], total=False):
    """Options of padded and packed batches that several ranks do not support."""

    bias: T | None


class OptionsWithoutValues(Definition[T], OneDevice[T], Selecting[T], Mods, Descales[T], Execution, total=False):
    """Options of `attention_varlen` except head_dim_v, return_lse and statistics."""


class PackedOptionsWithoutLse(OptionsWithoutValues[T], Values, total=False):
    """Options of `attention_varlen` except return_lse and statistics."""


class PackedBackwardOptions(PackedOptionsWithoutLse[T], Lse, total=False):
    """Options of `attention_varlen_backward`."""


class PackedOptions(PackedOptionsWithoutLse[T], Result, total=False):
    """Options of `attention_varlen`."""


class PaddedOptionsWithoutLse(PackedOptionsWithoutLse[T], Padding[T], Ordering, total=False):
    """Options of `attention` except return_lse and statistics."""


class PaddedBackwardOptions(PaddedOptionsWithoutLse[T], Lse, total=False):
    """Options of `attention_backward`."""


class PaddedOptions(PaddedOptionsWithoutLse[T], Result, total=False):
    """Options of `attention`."""


class CompileOptions(OptionsWithoutValues[T], Padding[T], Ordering, Result, total=False):
    """Options of `compile`, which has a head_dim_v of its own."""


class PackedRanksOptionsWithoutLse(Definition[T], Mods, Execution, total=False):
    """Options of `ring_attention_varlen` and `ulysses_attention_varlen` except return_lse and statistics."""


class PackedRanksOptions(PackedRanksOptionsWithoutLse[T], Result, total=False):
    """Options of `ring_attention_varlen` and `ulysses_attention_varlen`."""


class RanksOptionsWithoutLse(PackedRanksOptionsWithoutLse[T], Ordering, total=False):
    """Options of `ring_attention` and `ulysses_attention` except return_lse and statistics."""


class RanksOptions(RanksOptionsWithoutLse[T], Result, total=False):
    """Options of `ring_attention` and `ulysses_attention`."""


class CacheReading(Ordering, Mods, Selecting[T], Generic[T], total=False):
    """Options of `attention_with_kv_cache` that do not write to arrays, except return_lse and statistics."""

    cache_seqlens: T | int | None
    cache_batch_idx: T | None
    cache_leftpad: T | None
    block_table: T | None
    positions: T | None
    cu_seqlens_q: T | None
    max_seqlen_q: int | None
    rotary_cos: T | None
    rotary_sin: T | None
    rotary_interleaved: bool
    causal: bool
    window: Window
    scale: float | None
    softcap: float | None
    alibi_slopes: T | None
    sink: T | None
    mask: T | None
    k_descale: T | None
    v_descale: T | None
    k_scale: T | None
    v_scale: T | None
    k_zero: T | None
    v_zero: T | None
    split_size: int | None
    backend: str | None
    engine: str | None


class CacheReadArguments(CacheReading[T], Lse, total=False):
    """Options of functions that only read a KV cache, such as `attention_weights_with_kv_cache`."""


class CacheArgumentsWithoutLse(CacheReading[T], total=False):
    """Options of `attention_with_kv_cache` except return_lse and statistics."""

    k: T | None
    v: T | None
    prefix_table: T | None
    prefix_lengths: T | None
    prefix_group: T | None
    slots: T | None
    head_dim_v: int | None
    out: T | None


class CacheArguments(CacheArgumentsWithoutLse[T], Result, total=False):
    """Options of `attention_with_kv_cache`."""


class ReferenceOptions(
    Definition[T], Values, OneDevice[T], SelectingKeys[T], Padding[T], Mods, Descales[T], Ordering, total=False
):
    """Options of `cupy_flash.reference`: those of `attention` that define it, the precision and the order of sums."""

    dtype: npt.DTypeLike | None
    order: int
