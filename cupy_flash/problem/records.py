"""The options of `attention` and of calls on a KV cache, and the records of a call: Problem, Operands, Gradients.

An option is declared once, as a typed field of Options, in the order of the signature, which holds its row of the
table (features.py). Other code derives its lists of options from these rows: the checks (checks.py, build.py),
constants and members of the kernels (engines, params.py), operators of torch, operands of jax, attention over several
ranks, and compile() with its command. Only the signature and docstring of `attention`, the types of options
(argument_types.py), the fields of the records below and the math of each feature (score.py, score.cuh, reference.py)
are written by hand; tests/library/test_features.py compares them with the table.

A Problem has shapes, dtypes and features, but no arrays and no decisions of a plan; `build.pose` builds it.
"""

# No `from __future__ import annotations`: NamedTuple compiles annotations that are strings, which would take a tenth of
# the time of importing this package.
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Generic, NamedTuple

import numpy as np

from ..arrays import AnyArray, Array, named_dtype
from .features import (
    ARRAY,
    BESIDE_SCALES,
    CAP,
    CAUSAL,
    CHOICE,
    FINITE,
    FLAG,
    FLOATING,
    INT32,
    INT64,
    INTEGER,
    LENGTHS,
    MOD,
    NUMBER,
    OF_SEQUENCES,
    PER_KEY,
    PREFIX,
    PROBABILITY,
    ROTARY_TABLE,
    SEED,
    STATISTICS,
    WINDOW,
    Conflict,
    Feature,
    common,
    known,
    option,
    table_of,
)
from .gradients import AnyGradient as AnyGradient
from .gradients import Gradients as Gradients
from .gradients import GradientT
from .gradients import SecondGradients as SecondGradients
from .gradients import applied as applied
from .mask import Mask, Selection

if TYPE_CHECKING:
    from .argument_types import Causal, Layout, MaskMod, Names, ScoreMod, Window

DTYPES = FLOATING
FP8 = "float8_e4m3fn"  # a dtype of q, k and v in a forward, which then returns bfloat16
LAYOUTS = ("bshd", "bhsd")
BACKENDS = ("cpu", "cuda", "simulator")
ENGINES = ("cpu", "cpu_decode", "aten", "simt", "mma", "mma_decode", "wgmma", "tcgen05")  # the names in engines.MODULES
FORWARD, BACKWARD = "forward", "backward"
JVP, DOUBLE_BACKWARD = "JVP", "double backward"
CACHES = ("k_cache", "v_cache")
PREFIXES = ("prefix_table", "prefix_lengths", "prefix_group")
SCALES = ("k_scale", "v_scale", "k_zero", "v_zero")  # of a quantised cache, one number per key and head
# {dtype of a quantised cache: its largest code}; a byte of uint8 has two codes of 4 bits
CODES = {"int8": 127.0, FP8: 448.0, "float8_e5m2": 57344.0, "uint8": 15.0}
LONGEST = 2**31 - 1  # positions are int32
SINGLE, DOUBLE = np.dtype(np.float32), np.dtype(np.float64)


class UnsupportedError(ValueError):
    """The error for a legal problem that no engine of this version serves; the message has each engine's reasons."""


@dataclass(slots=True)
class Options:
    """The options of a call as the caller passed them, which `cupy_flash.attention` describes.

    `checks.py` has not checked them yet, so they may have any type.
    """

    causal: "Causal" = common(CAUSAL, False)
    window: "Window" = common(WINDOW)
    scale: float | None = common(NUMBER, range=FINITE, member="scale")
    softcap: float | None = common(
        NUMBER, range=CAP, example=15.0, constant="SOFTCAP", member="softcap", changes_score=True, keeps_score=True
    )
    alibi_slopes: AnyArray | None = common(
        ARRAY,
        axes=("h", "bh"),
        dtypes=("float32",),
        ranks=True,
        fact="alibi",
        constant="ALIBI",
        leading_stride="alibi_batch",
        changes_score=True,
    )
    bias: AnyArray | None = common(
        ARRAY,
        axes=("bhij",),
        broadcast=True,
        dtypes=FLOATING,
        dtype_text="floating",
        shape_text="{given} must broadcast to {axes} = {shape}",
        hint=(("bool",), "; a boolean mask is given as mask="),
        gradient=True,
        optional_gradient=True,
        constant="BIAS",
        element="bias_element",
        changes_score=True,
    )
    mask: AnyArray | None = common(
        ARRAY,
        axes=("bhij",),
        broadcast=True,
        dtypes=("bool",),
        dtype_text="bool, True = attend",
        shape_text="{given} must broadcast to {axes} = {shape}",
        hint=(FLOATING, "; an additive mask is given as bias="),
        padded=True,
        fact="dense_mask",
        constant="DENSE_MASK",
    )
    sink: AnyArray | None = common(
        ARRAY,
        axes=("h",),
        dtypes=FLOATING,
        dtype_text="floating",
        gradient=True,
        ranks=True,
        once=True,
        constant="SINK",
        element="sink_element",
    )
    q_lengths: AnyArray | None = common(
        ARRAY, axes=("b",), dtypes=("int32",), longest="q_len", padded=True, constant="Q_LENGTHS"
    )
    kv_lengths: AnyArray | None = common(
        ARRAY, axes=("b",), dtypes=("int32",), longest="kv_len", padded=True, constant="KV_LENGTHS"
    )
    score_mod: "ScoreMod" = common(MOD, ranks=True, constant="SCORE_MOD", changes_score=True)
    mask_mod: "MaskMod" = common(MOD, ranks=True, constant="MASK_MOD")
    selected: AnyArray | None = option(
        ARRAY,
        axes=("Bxlw", "xuw"),
        dtypes=("int32",),
        shape_text="must be (B or 1, Hs, ceil(Sq / selected_rows), n), or packed (Hs, Tq // selected_rows + B, n), "
        "with Hs 1, Hk or Hq, not {given}",
        host=True,
    )
    selected_block: int = option(INTEGER, 1, multiple=8, host=True)
    selected_rows: int = option(INTEGER, 1, multiple=1, host=True)
    check_selected: bool = option(FLAG, False, definition=False, host=True)
    dropout: float = common(NUMBER, 0.0, range=PROBABILITY, example=0.25, constant="DROPOUT")
    seed: int | AnyArray | None = common(SEED)
    q_descale: AnyArray | None = option(ARRAY, axes=("bg",), dtypes=("float32",), not_negative=True, fp8=True)
    k_descale: AnyArray | None = option(ARRAY, axes=("bg",), dtypes=("float32",), not_negative=True, fp8=True)
    v_descale: AnyArray | None = option(ARRAY, axes=("bg",), dtypes=("float32",), not_negative=True, fp8=True)
    head_dim_v: int | None = common(INTEGER, fact="shared_kv")
    layout: "Layout" = common(CHOICE, "bshd")
    return_lse: bool = option(FLAG, False, definition=False, result=True)
    statistics: "Names" = option(STATISTICS, definition=False, result=True)
    deterministic: bool = option(FLAG, False, definition=False)
    backend: str | None = option(CHOICE, definition=False)
    engine: str | None = option(CHOICE, definition=False)

    @classmethod
    def of(cls, function: str, options: Mapping[str, Any]) -> "Options":
        """Make the options from keyword arguments; TypeError for an unknown name."""
        return cls(**known(function, options, FEATURES))


FEATURES = table_of(Options)

NAMES = tuple(feature.name for feature in FEATURES)
ARRAYS = tuple(feature for feature in FEATURES if feature.kind == ARRAY)
NUMBERS = tuple(feature for feature in FEATURES if feature.kind == NUMBER)
FLAGS = tuple(feature for feature in FEATURES if feature.kind == FLAG)
MODS = tuple(feature for feature in FEATURES if feature.kind == MOD)
CHANGES_SCORE = tuple(feature for feature in FEATURES if feature.changes_score)
WITH_GRADIENT = tuple(feature for feature in FEATURES if feature.gradient)
DIFFERENTIATED = ("q", "k", "v", *(feature.name for feature in WITH_GRADIENT))  # in the order of Gradients
ROWS = {row.name: row for row in fields(Options)}


def _shared(name: str, **changes: Any) -> Any:
    """Return the field of an option of `attention` for another class of options, with some columns changed."""
    row = ROWS[name]
    return field(default=row.default, metadata={**row.metadata, **changes})


SPLIT_UNIT = 64  # split_size must be a multiple of this


@dataclass(slots=True)
class CacheOptions:
    """The options of a call on a KV cache, which `cupy_flash.attention_with_kv_cache` describes.

    Further axes of its arrays are "m", all rows of k; "c", B + 1; "p", the columns of a block table; "r" and "f", the
    sizes of a rotary table; "s", the keys of a mask; "P" and "R", the blocks of a cache and their rows; "y" and "z",
    the sizes of a table of prefixes. Axes "B" and "H" are "b" and "h", or 1.
    """

    k: AnyArray | None = common(ARRAY, axes=("bngd",), rows=True, dtypes=FLOATING, member="k_new", fact="appended")
    v: AnyArray | None = common(ARRAY, axes=("bnge",), rows=True, dtypes=FLOATING, member="v_new")
    cache_seqlens: int | AnyArray | None = common(
        LENGTHS, axes=("b",), dtypes=INT32, shape_text=OF_SEQUENCES, appends=True
    )
    cache_batch_idx: AnyArray | None = common(
        ARRAY, axes=("b",), dtypes=INT32, shape_text=OF_SEQUENCES, addresses="keys", appends=True
    )
    cache_leftpad: AnyArray | None = common(ARRAY, axes=("b",), dtypes=INT32, shape_text=OF_SEQUENCES)
    block_table: AnyArray | None = common(
        ARRAY,
        axes=("bp",),
        dtypes=INT32,
        shape_text="must be ({b}, pages), not {given}",
        fact="page",
        constant="PAGED",
        leading_stride="table_row",
        addresses="keys",
        appends=True,
        conflicts=(
            Conflict("slots", "slots say where the rows go: block_table says nothing beside them", append=True),
            Conflict("cache_batch_idx", "cache_batch_idx is for contiguous caches, without block_table"),
            Conflict("cache_leftpad", "cache_leftpad with block_table; FlashAttention 3 serves it", supported=False),
        ),
    )
    slots: AnyArray | None = common(
        ARRAY,
        axes=("m",),
        dtypes=INT64,
        shape_text=OF_SEQUENCES,
        addresses="rows",
        appends=True,
        conflicts=(Conflict("cache_batch_idx", "slots and cache_batch_idx do not go together"),),
    )
    positions: AnyArray | None = common(
        ARRAY, axes=("bi", "t"), dtypes=INT32, shape_text=OF_SEQUENCES, leading_stride="positions_row", appends=True
    )
    cu_seqlens_q: AnyArray | None = common(ARRAY, axes=("c",), dtypes=INT32, shape_text="must be (B + 1,), not {given}")
    max_seqlen_q: int | None = common(INTEGER)
    rotary_cos: AnyArray | None = common(ARRAY, fact="rotary", leading_stride="cos_row", **ROTARY_TABLE)
    rotary_sin: AnyArray | None = common(ARRAY, leading_stride="sin_row", **ROTARY_TABLE)
    rotary_interleaved: bool = common(FLAG, True, appends=True)
    causal: bool = common(FLAG, True)
    window: "Window" = _shared("window")
    scale: float | None = _shared("scale")
    softcap: float | None = _shared("softcap")
    alibi_slopes: AnyArray | None = _shared("alibi_slopes")
    sink: AnyArray | None = _shared("sink")
    mask: AnyArray | None = _shared(
        "mask",
        axes=("BHis",),
        broadcast=False,
        shape_text="must be (B or 1, Hq or 1, Sq, s), B, Hq, Sq = ({b}, {h}, {i}), s up to the capacity {j}, "
        "not {given}",
        hint=((), ""),
    )
    score_mod: "ScoreMod" = _shared("score_mod")
    mask_mod: "MaskMod" = _shared("mask_mod")
    selected: AnyArray | None = _shared("selected")
    selected_block: int = _shared("selected_block")
    selected_rows: int = _shared("selected_rows")
    check_selected: bool = _shared("check_selected")
    k_descale: AnyArray | None = _shared("k_descale", fp8=False, appends=True)
    v_descale: AnyArray | None = _shared("v_descale", fp8=False, appends=True)
    k_scale: AnyArray | None = option(ARRAY, fact="scale_dtype", conflicts=BESIDE_SCALES, **PER_KEY)
    v_scale: AnyArray | None = option(ARRAY, **PER_KEY)
    k_zero: AnyArray | None = option(ARRAY, **PER_KEY)
    v_zero: AnyArray | None = option(ARRAY, **PER_KEY)
    prefix_table: AnyArray | None = option(ARRAY, axes=("yz",), leading_stride="prefix_table_row", **PREFIX)
    prefix_lengths: AnyArray | None = option(ARRAY, axes=("y",), **PREFIX)
    prefix_group: AnyArray | None = option(ARRAY, axes=("b",), **PREFIX)
    split_size: int | None = option(INTEGER, multiple=SPLIT_UNIT)
    head_dim_v: int | None = _shared("head_dim_v")
    layout: "Layout" = _shared("layout", appends=True)
    out: AnyArray | None = common(ARRAY, axes=("bihe",), rows=True, dtypes=FLOATING, shape_text=OF_SEQUENCES)
    return_lse: bool = _shared("return_lse")
    statistics: "Names" = _shared("statistics")
    backend: str | None = _shared("backend")
    engine: str | None = _shared("engine")

    @classmethod
    def of(cls, function: str, options: Mapping[str, Any]) -> "CacheOptions":
        """Make the options from keyword arguments; TypeError for an unknown name."""
        return cls(**known(function, options, CACHE_FEATURES))

    @classmethod
    def of_reading(cls, function: str, options: Mapping[str, object]) -> "CacheOptions":
        """Make the options of a function of weights, which takes no array that a call writes or appends."""
        others = ("k", "v", "slots", "out", "statistics", "head_dim_v", *PREFIXES)
        return cls(**known(function, options, tuple(x for x in CACHE_FEATURES if x.name not in others)))


CACHE_FEATURES = table_of(CacheOptions)
INDICES = frozenset(x.name for x in CACHE_FEATURES if x.dtypes in (INT32, INT64))


class Packed(NamedTuple):
    """The boundaries of a packed (varlen) batch, as the caller passed them."""

    cu_seqlens_q: AnyArray
    cu_seqlens_k: AnyArray
    max_seqlen_q: int | None
    max_seqlen_k: int | None


class _Statistics(NamedTuple):
    """The fields of Statistics, in a base class as those of Gradients."""

    max: AnyGradient | None = None
    argmax: AnyGradient | None = None
    entropy: AnyGradient | None = None


class Statistics(_Statistics, Generic[GradientT]):
    """Statistics of the rows of a call, each in the shape of lse; those that `statistics=` does not name are None.

    `max` is the largest score that the softmax sees, `argmax` its key, int32, and `entropy` that of the probabilities,
    with the sink's. max and entropy have the dtype of lse.
    """

    __slots__ = ()

    max: GradientT | None
    argmax: GradientT | None
    entropy: GradientT | None


class Saved(NamedTuple):
    """The inputs of a backward besides q, k and v: the results of the forward and their gradients."""

    dout: AnyArray
    out: AnyArray
    lse: AnyArray
    dlse: AnyArray | None = None
    bias_gradient: bool = True
    captured_gradient: tuple[bool, ...] | None = None  # which captured arrays get one; None: all floating ones
    statistics: _Statistics | None = None  # of the forward; dmax needs its argmax, dentropy its entropy
    dmax: AnyArray | None = None
    dentropy: AnyArray | None = None


class SavedWeights(NamedTuple):
    """The inputs of a backward of attention_weights and its like, besides those of the forward."""

    gradient: AnyArray  # of the result
    keys: AnyArray | None = None  # the second result of top_weights
    bias_gradient: bool = True
    captured_gradient: tuple[bool, ...] | None = None  # as in Saved


class Tangents(NamedTuple):
    """The tangents of a JVP, or the cotangents of a double backward: an array like its input, or None for 0.

    `tcaptured` is None, or a sequence with one entry for each array that score_mod and mask_mod capture.
    """

    tq: AnyArray | None = None
    tk: AnyArray | None = None
    tv: AnyArray | None = None
    tbias: AnyArray | None = None
    tsink: AnyArray | None = None
    tcaptured: Sequence[AnyArray | None] | None = None


class Shard(NamedTuple):
    """The place of a call in a larger one; causal, window, ALiBi and dropout use positions in the whole sequence.

    `starts`, int32 (B, 3), has for every sequence the position of its first query, the position of its first key, and
    their difference plus the diagonal offset o of the whole sequence. It is None if sequences are whole.
    """

    starts: AnyArray | None = None
    step: int = 1  # distance of neighbouring rows in positions
    first_head: int = 0
    heads: int | None = None  # query heads of the larger call; None if this call has all
    first_batch: int = 0
    lengths: tuple[int, int] | None = None  # (queries, keys) of the longest whole sequence, with `starts`


WHOLE = Shard()


class Cache(NamedTuple):
    """The facts of a KV cache that are not in its Problem, whose kv_len is the capacity.

    The lengths of its sequences are no facts, because they change at every step.
    """

    layout: str  # "bshd" or "bhsd", of the caches, and of q unless it is packed
    dtype: np.dtype  # dtype of the caches: that of q, or of CODES
    blocks: int  # pages, or rows of a contiguous cache
    page: int | None  # keys per page; None: contiguous
    appended: int | None  # rows of k per sequence, tokens of a packed batch; None: nothing is appended
    slots: bool
    rotary: tuple[int, bool] | None  # rotated dimensions, and whether pairs are interleaved
    split_size: int | None
    rotary_dtypes: tuple[str, str] | None = None  # dtypes of the tables, cos and sin
    scale_dtype: str | None = None  # dtype of the scales of each key, and of the zeros of codes of 4 bits
    prefix_table: tuple[int, int] | None = None  # its shape: prefixes, and the pages of each

    @property
    def prefix(self) -> int:
        """Keys of the capacity that are of shared prefixes."""
        return 0 if self.prefix_table is None or self.page is None else self.prefix_table[1] * self.page

    @property
    def codes(self) -> int:
        """Numbers in an element of the caches: 2 if they have 4 bits."""
        return 1 + (self.dtype.name == "uint8")

    def __str__(self) -> str:
        texts = ["contiguous cache" if self.page is None else f"cache of {self.blocks} pages of {self.page}"]
        if self.dtype.itemsize == 1:
            texts.append(f"{'4-bit' if self.codes == 2 else self.dtype.name} keys")
        texts += [f"shared prefixes of up to {self.prefix} keys"] * (self.prefix > 0)
        if self.scale_dtype is not None:
            texts.append(f"{self.scale_dtype} scales per key")
        if self.appended is not None:
            texts.append("append by slots" if self.slots else "append")
        if self.rotary is not None:
            texts.append(f"rotary of {self.rotary[0]} dimensions")
        if self.split_size is not None:
            texts.append(f"pieces of {self.split_size} keys")
        return ", ".join(texts)


class Problem(NamedTuple):
    """A hashable description of a call without its arrays: shapes, dtype, device and features.

    The second part has the facts of each row of Options: a number, the shape of an array that broadcasts, or whether an
    array is given; and, if they vary, the dtype and whether a gradient is requested.
    """

    backward: bool
    derivative: str  # JVP, or DOUBLE_BACKWARD, for which `backward` is also True; "" without tangents
    weights: str  # the function that returns probabilities, such as "top_weights"; "" for attention
    tangents: tuple[str, ...]  # the inputs with a tangent; "array0", ... for captured arrays
    dtype: np.dtype
    device: str
    framework: str
    layout: str  # "bshd", "bhsd"; "thd" for a packed batch
    batch: int
    q_len: int  # of the longest sequence for a packed batch
    kv_len: int
    heads: int
    kv_heads: int
    head_dim: int
    head_dim_v: int
    shared_kv: bool  # v is the first head_dim_v numbers of k, whose gradient has that of v
    mask: Mask  # causal and window
    mods: str  # text of the traced score_mod and mask_mod (mods/ir.py), or ""
    captured_gradient: tuple[bool, ...]  # whether a backward computes the gradient of each captured array
    dlse: bool
    statistics: tuple[str, ...]  # those that a forward returns, or whose gradients a backward has; in field order
    aligned: bool  # TMA can load q, k and v (arrays.has_boxes)
    empty: bool  # q, k or v has no elements, which max_seqlen of a packed batch does not show
    equal_lengths: bool  # as many keys as queries, as far as shapes show; buckets of lengths do not
    shard: bool  # the call has `starts`: sequences are shards
    step: int
    first_head: int
    whole_heads: int
    first_batch: int
    deterministic: bool
    backend: str | None  # as requested; None: the backend of the arrays
    engine: str | None
    cache: Cache | None  # only in attention_with_kv_cache and append_to_kv_cache

    # The features: a test compares these fields with the table.
    scale: float
    softcap: float | None
    dropout: float
    alibi: bool
    bias: tuple[int, ...] | None
    bias_dtype: str  # the dtype of out if there is no bias
    bias_gradient: bool  # whether a backward computes it
    dense_mask: tuple[int, ...] | None
    sink: bool
    sink_dtype: str  # the dtype of out if there is no sink
    q_lengths: bool
    kv_lengths: bool
    selected: Selection | None
    q_descale: bool
    k_descale: bool
    v_descale: bool
    score_mod: bool
    mask_mod: bool

    @property
    def group(self) -> int:
        """Query heads per key/value head."""
        return self.heads // self.kv_heads

    @property
    def is_modified(self) -> bool:
        """Whether anything but a scale is applied between q.k and the softmax."""
        return any(is_given(self, feature) for feature in CHANGES_SCORE)

    @property
    def moves_probabilities(self) -> bool:
        """Whether any input but v has a tangent, so that the probabilities have one."""
        return not {"v"}.issuperset(self.tangents)

    @property
    def has_lengths(self) -> bool:
        """Whether sequences may have different lengths."""
        return self.layout == "thd" or self.q_lengths or self.kv_lengths

    @property
    def out_dtype(self) -> np.dtype:
        """The dtype of out: that of q, or bfloat16 for fp8."""
        return out_dtype(self.dtype)

    @property
    def accumulation(self) -> np.dtype:
        """The dtype of scores, sums and lse: fp32, or fp64 for fp64."""
        return DOUBLE if self.dtype == DOUBLE else SINGLE

    @property
    def differentiated(self) -> tuple[str, ...]:
        """The inputs whose gradients a backward returns."""
        return (*("q", "k", "v")[: 3 - self.shared_kv], *(x.name for x in WITH_GRADIENT if self._is_differentiated(x)))

    def _is_differentiated(self, feature: Feature) -> bool:
        requested: bool = not feature.optional_gradient or getattr(self, f"{feature.field}_gradient")
        return requested and is_given(self, feature)

    def lse_shape(self, q: Array) -> tuple[int, ...]:
        """Return the shape of lse, (B, Hq, Sq), or (Hq, Tq) of a packed batch."""
        return q.shape[1::-1] if self.layout == "thd" else (self.batch, self.heads, self.q_len)

    def __str__(self) -> str:
        heads = f"{self.heads} heads" if self.group == 1 else f"{self.heads} query and {self.kv_heads} key/value heads"
        dim = f"D {self.head_dim}" if self.head_dim == self.head_dim_v else f"D {self.head_dim}, Dv {self.head_dim_v}"
        features = [str(self.mask), *(self._describe(feature) for feature in FEATURES if self._is_described(feature))]
        features += [name for name in ("shared_kv", "deterministic", "shard") if getattr(self, name)]
        features += [f"{'gradients of ' * self.backward}{' and '.join(self.statistics)}"] if self.statistics else []
        features += [] if self.cache is None else [str(self.cache)]
        step = self.derivative or (BACKWARD if self.backward else FORWARD)
        step += f" of {self.weights}" if self.weights else ""
        if self.derivative:
            step += f" of {', '.join(self.tangents) or 'nothing'}"
        packed = "packed, up to " if self.layout == "thd" else ""
        to = "" if self.dtype == self.out_dtype else f" to {self.out_dtype.name}"
        return (
            f"{step}, {self.dtype.name}{to} {self.layout} ({self.framework} on {self.device}): batch {self.batch}, "
            f"{packed}{self.q_len} queries x {self.kv_len} keys, {heads}, {dim}; {', '.join(features)}"
        )

    def _is_described(self, feature: Feature) -> bool:
        return (feature.kind in (ARRAY, MOD) or feature.constant != "") and is_given(self, feature)

    def _describe(self, feature: Feature) -> str:
        fact = getattr(self, feature.field)
        if feature.kind == NUMBER:
            return f"{feature.name} {fact:g}"
        return feature.field if fact is True else f"{feature.name} {fact}"


class CacheOperands(NamedTuple):
    """The arrays of a call on a KV cache other than the caches, which are k and v of Operands; None if absent.

    They have the names of their members of Params. cache_seqlens may be an int, the length of all sequences; the result
    is written to `out`.
    """

    k_new: Array | None = None
    v_new: Array | None = None
    cache_seqlens: Array | int | None = None
    cache_batch_idx: Array | None = None
    cache_leftpad: Array | None = None
    block_table: Array | None = None
    slots: Array | None = None
    positions: Array | None = None
    rotary_cos: Array | None = None
    rotary_sin: Array | None = None
    k_scale: Array | None = None
    v_scale: Array | None = None
    k_zero: Array | None = None
    v_zero: Array | None = None
    prefix_table: Array | None = None
    prefix_lengths: Array | None = None
    prefix_group: Array | None = None
    out: Array | None = None

    def arrays(self) -> dict[str, Array]:
        """Return the arrays that a call reads, by name."""
        return {name: x for name, x in zip(self._fields[:-1], self, strict=False) if type(x) is Array}


# {array among the options: field of CacheOperands}
FIELDS = {x.name: x.member or x.name for x in CACHE_FEATURES if (x.member or x.name) in CacheOperands._fields}


class Operands(NamedTuple):
    """The arrays of one call, or None, and the seed, an int or an int64 array of one element."""

    q: Array
    k: Array
    v: Array
    alibi_slopes: Array | None = None
    bias: Array | None = None
    mask: Array | None = None
    sink: Array | None = None
    q_lengths: Array | None = None
    kv_lengths: Array | None = None
    selected: Array | None = None
    q_descale: Array | None = None
    k_descale: Array | None = None
    v_descale: Array | None = None
    cu_seqlens_q: Array | None = None
    cu_seqlens_k: Array | None = None
    starts: Array | None = None
    seed: Array | int | None = None
    captured: tuple[Array, ...] = ()  # arrays that the mods capture, by slot
    numbers: tuple[int | float, ...] = ()  # run-time arguments of the mods
    dout: Array | None = None
    out: Array | None = None
    lse: Array | None = None
    dlse: Array | None = None
    argmax: Array | None = None  # statistics of the forward, and gradients of statistics
    entropy: Array | None = None
    dmax: Array | None = None
    dentropy: Array | None = None
    tq: Array | None = None
    tk: Array | None = None
    tv: Array | None = None
    tbias: Array | None = None
    tsink: Array | None = None
    tcaptured: tuple[Array | None, ...] | None = None  # in the order of captured
    tout: Array | None = None  # in a double backward: the tangent of out, from a JVP with the same tangents
    tlse: Array | None = None
    cache: CacheOperands | None = None

    def arrays(self) -> dict[str, Array]:
        """Return {member of Params: array}, without the arrays of mods and the `out` of a KV cache call."""
        arrays = {name: array for name, array in zip(self._fields, self, strict=True) if type(array) is Array}
        return arrays if self.cache is None else arrays | self.cache.arrays()

    def with_arrays(self, arrays: dict[str, Any]) -> "Operands":
        """Return the operands with these arrays, {name: array}, in place of those of the same names."""
        if self.cache is None:
            return self._replace(**arrays)
        of_cache = {name: array for name, array in arrays.items() if name in self.cache._fields}
        others = {name: array for name, array in arrays.items() if name not in of_cache}
        return self._replace(cache=self.cache._replace(**of_cache), **others)


@lru_cache(maxsize=16)
def out_dtype(dtype: np.dtype) -> np.dtype:
    """Return the dtype of out for q, k and v of `dtype`: the same, or bfloat16 for fp8."""
    return named_dtype("bfloat16") if dtype.name == FP8 else dtype


def is_given(facts: Problem | Cache, feature: Feature) -> bool:
    """Return whether a Problem, or its cache, has a feature."""
    fact = getattr(facts, feature.field)
    return fact is not None and fact is not False and fact != 0.0
