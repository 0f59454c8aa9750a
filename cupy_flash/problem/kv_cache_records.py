"""The options and the records of a call on a KV cache."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..arrays import Array
from .features import ARRAY, FLAG, FLOATING, LENGTHS, WHOLE, Options, common, known, option, table_of

if TYPE_CHECKING:
    from ..arrays import AnyArray
    from .argument_types import Layout, MaskMod, ScoreMod, Window


class Cache(NamedTuple):
    """The facts of a KV cache that are not in its Problem, whose kv_len is the capacity.

    The lengths of its sequences are no facts, because they change at every step.
    """

    layout: str  # "bshd" or "bhsd", of the caches, and of q unless it is packed
    dtype: np.dtype  # dtype of the caches: that of q, or float8_e4m3fn
    blocks: int  # pages, or rows of a contiguous cache
    page: int | None  # keys per page; None: contiguous
    appended: int | None  # rows of k per sequence, tokens of a packed batch; None: nothing is appended
    slots: bool
    rotary: tuple[int, bool] | None  # rotated dimensions, and whether pairs are interleaved
    split_size: int | None
    rotary_dtypes: tuple[str, str] | None = None  # dtypes of the tables, cos and sin

    def __str__(self) -> str:
        texts = ["contiguous cache" if self.page is None else f"cache of {self.blocks} pages of {self.page}"]
        if self.dtype.itemsize == 1:
            texts.append(f"{self.dtype.name} keys")
        if self.appended is not None:
            texts.append("append by slots" if self.slots else "append")
        if self.rotary is not None:
            texts.append(f"rotary of {self.rotary[0]} dimensions")
        if self.split_size is not None:
            texts.append(f"pieces of {self.split_size} keys")
        return ", ".join(texts)


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
    out: Array | None = None

    def arrays(self) -> dict[str, Array]:
        """Return the arrays that a call reads, by name."""
        return {name: x for name, x in zip(self._fields[:-1], self, strict=False) if type(x) is Array}


class Conflict(NamedTuple):
    """Another option with which an option cannot be combined, and the reason."""

    other: str
    reason: str
    supported: bool = True  # False: legal, but not supported by this version
    append: bool = False  # only in append_to_kv_cache


def _shared(name: str, **changes: Any) -> Any:
    """Return the field of an option of `attention` for another class of options, with some columns changed."""
    row = next(row for row in fields(Options) if row.name == name)
    return field(default=row.default, metadata={**row.metadata, **changes})


SPLIT_UNIT = 64  # split_size must be a multiple of this
INT32, INT64 = ("int32",), ("int64",)
OF_SEQUENCES = "must be {shape}, not {given}"
ROTARY_TABLE: dict[str, Any] = dict(
    axes=("rf",),
    dtypes=FLOATING,
    dtype_text="floating",
    shape_text="must be (R, rd / 2) with rd up to D = {d}, not {given}",
    appends=True,
)


@dataclass(slots=True)
class CacheOptions:
    """The options of a call on a KV cache, which `cupy_flash.attention_with_kv_cache` describes.

    Further axes of its arrays are "m", all rows of k; "c", B + 1; "p", the columns of a block table; "r" and "f", the
    sizes of a rotary table; "s", the keys of a mask. Axes "B" and "H" are "b" and "h", or 1.
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
    max_seqlen_q: int | None = common(WHOLE)
    rotary_cos: AnyArray | None = common(ARRAY, fact="rotary", leading_stride="cos_row", **ROTARY_TABLE)
    rotary_sin: AnyArray | None = common(ARRAY, leading_stride="sin_row", **ROTARY_TABLE)
    rotary_interleaved: bool = common(FLAG, True, appends=True)
    causal: bool = common(FLAG, True)
    window: Window = _shared("window")
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
    score_mod: ScoreMod = _shared("score_mod")
    mask_mod: MaskMod = _shared("mask_mod")
    k_descale: AnyArray | None = _shared("k_descale", fp8=False, appends=True)
    v_descale: AnyArray | None = _shared("v_descale", fp8=False, appends=True)
    split_size: int | None = option(WHOLE, multiple=SPLIT_UNIT)
    layout: Layout = _shared("layout", appends=True)
    out: AnyArray | None = common(ARRAY, axes=("bihe",), rows=True, dtypes=FLOATING, shape_text=OF_SEQUENCES)
    return_lse: bool = _shared("return_lse")
    backend: str | None = _shared("backend")
    engine: str | None = _shared("engine")

    @classmethod
    def of(cls, function: str, options: Mapping[str, Any]) -> CacheOptions:
        """Make the options from keyword arguments; TypeError for an unknown name."""
        return cls(**known(function, options, CACHE_FEATURES))


CACHE_FEATURES = table_of(CacheOptions)
WRITTEN = ("k", "v", "slots", "out")  # the options with which a call writes to arrays
READ_FEATURES = tuple(x for x in CACHE_FEATURES if x.name not in WRITTEN)  # of a call that only reads a cache
# {array among the options: field of CacheOperands}
FIELDS = {x.name: x.member or x.name for x in CACHE_FEATURES if (x.member or x.name) in CacheOperands._fields}
INDICES = frozenset(x.name for x in CACHE_FEATURES if x.dtypes in (INT32, INT64))


def reading(function: str, options: Mapping[str, object]) -> CacheOptions:
    """Make the options of a call that only reads a cache; TypeError for another name."""
    return CacheOptions(**known(function, options, READ_FEATURES))
