"""The records of a call: its Problem, its Operands and the gradients that it returns; Options are in features.py.

tests/library/test_features.py compares their fields with the table of features. A Problem has shapes, dtypes and
features, but no arrays and no decisions of a plan; `build.pose` builds it.
"""

# No `from __future__ import annotations`: NamedTuple compiles annotations that are strings, which would take a tenth of
# the time of importing this package.
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

import numpy as np

from ..arrays import AnyArray, Array, named_dtype
from .features import ARRAY, CHANGES_SCORE, FEATURES, FLOATING, MOD, NUMBER, WITH_GRADIENT, Feature
from .mask import Mask

if TYPE_CHECKING:
    from .kv_cache_records import Cache, CacheOperands

DTYPES = FLOATING
FP8 = "float8_e4m3fn"  # a dtype of q, k and v in a forward, which then returns bfloat16
LAYOUTS = ("bshd", "bhsd")
BACKENDS = ("cpu", "cuda", "simulator")
ENGINES = ("cpu", "cpu_decode", "simt", "mma", "mma_decode", "wgmma")  # the names in engines.MODULES
JVP, DOUBLE_BACKWARD = "JVP", "double backward"
CACHES = ("k_cache", "v_cache")
LONGEST = 2**31 - 1  # positions are int32
SINGLE, DOUBLE = np.dtype(np.float32), np.dtype(np.float64)


class UnsupportedError(ValueError):
    """The error for a legal problem that no engine of this version serves; the message has each engine's reasons."""


class Packed(NamedTuple):
    """The boundaries of a packed (varlen) batch, as the caller passed them."""

    cu_seqlens_q: AnyArray
    cu_seqlens_k: AnyArray
    max_seqlen_q: int | None
    max_seqlen_k: int | None


class Saved(NamedTuple):
    """The inputs of a backward besides q, k and v: the results of the forward and their gradients."""

    dout: AnyArray
    out: AnyArray
    lse: AnyArray
    dlse: AnyArray | None = None
    bias_gradient: bool = True
    captured_gradient: tuple[bool, ...] | None = None  # which captured arrays get one; None: all floating ones


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


def applied(function: Callable[..., object], gradients: object) -> Any:
    """Return a nested tuple of arrays with the function applied to each array; None stays None."""
    if isinstance(gradients, tuple):
        return tuple(applied(function, gradient) for gradient in gradients)
    return None if gradients is None else function(gradients)


AnyGradient = AnyArray | Array  # a caller's array, or inside the package its Array
GradientT = TypeVar("GradientT", bound=AnyGradient)
ReplacedT = TypeVar("ReplacedT", bound=AnyGradient)


class _Gradients(NamedTuple):
    """The fields of Gradients, in a base class: only from Python 3.11 on can a NamedTuple itself be generic."""

    dq: AnyGradient
    dk: AnyGradient
    dv: AnyGradient
    dbias: AnyGradient | None = None
    dsink: AnyGradient | None = None
    dcaptured: tuple[AnyGradient | None, ...] | None = None


class Gradients(_Gradients, Generic[GradientT]):
    """The gradients of a call, each with its input's shape and dtype; None for an input not given or not requested.

    `dcaptured` has one for each array that score_mod and mask_mod capture, in the order of `Mod.arrays`.
    """

    __slots__ = ()

    dq: GradientT
    dk: GradientT
    dv: GradientT
    dbias: GradientT | None
    dsink: GradientT | None
    dcaptured: tuple[GradientT | None, ...] | None

    def map(self, function: Callable[[GradientT], ReplacedT]) -> "Gradients[ReplacedT]":
        """Return the record with a function applied to each of its arrays; None stays None.

        Args:
            function: returns the replacement of an array.
        """
        return Gradients(*applied(function, self))


class _SecondGradients(NamedTuple):
    """The fields of SecondGradients, in a base class as those of Gradients."""

    dq: AnyGradient | None = None
    dk: AnyGradient | None = None
    dv: AnyGradient | None = None
    dbias: AnyGradient | None = None
    dsink: AnyGradient | None = None
    dcaptured: tuple[AnyGradient | None, ...] | None = None
    ddout: AnyGradient | None = None
    ddlse: AnyGradient | None = None


class SecondGradients(_SecondGradients, Generic[GradientT]):
    """The gradients of sum(tq * dq) + sum(tk * dk) + ... with respect to the inputs of attention, dout and dlse.

    Each has its input's shape and dtype, ddlse those of lse; None for an input not given or not requested.
    """

    __slots__ = ()

    dq: GradientT | None
    dk: GradientT | None
    dv: GradientT | None
    dbias: GradientT | None
    dsink: GradientT | None
    dcaptured: tuple[GradientT | None, ...] | None
    ddout: GradientT | None
    ddlse: GradientT | None

    def map(self, function: Callable[[GradientT], ReplacedT]) -> "SecondGradients[ReplacedT]":
        """Return the record with a function applied to each of its arrays; None stays None.

        Args:
            function: returns the replacement of an array.
        """
        return SecondGradients(*applied(function, self))


class Problem(NamedTuple):
    """A hashable description of a call without its arrays: shapes, dtype, device and features.

    The second part has the facts of each feature (features.py): a number, the shape of an array that broadcasts, or
    whether an array is given; and, if they vary, the dtype and whether a gradient is requested.
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
    mask: Mask  # causal and window
    mods: str  # text of the traced score_mod and mask_mod (mods/ir.py), or ""
    captured_gradient: tuple[bool, ...]  # whether a backward computes the gradient of each captured array
    dlse: bool
    aligned: bool  # TMA can load q, k and v (arrays.has_boxes)
    empty: bool  # q, k or v has no elements, which max_seqlen of a packed batch does not show
    shard: bool  # the call has `starts`: sequences are shards
    step: int
    first_head: int
    whole_heads: int
    first_batch: int
    deterministic: bool
    backend: str | None  # as requested; None: the backend of the arrays
    engine: str | None
    cache: "Cache | None"  # only in attention_with_kv_cache and append_to_kv_cache

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
        return ("q", "k", "v", *(feature.name for feature in WITH_GRADIENT if self._is_differentiated(feature)))

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
        features += [name for name in ("deterministic", "shard") if getattr(self, name)]
        features += [] if self.cache is None else [str(self.cache)]
        step = self.derivative or ("backward" if self.backward else "forward")
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
        return f"{feature.name} {fact}" if feature.broadcast else feature.field


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
    tq: Array | None = None
    tk: Array | None = None
    tv: Array | None = None
    tbias: Array | None = None
    tsink: Array | None = None
    tcaptured: tuple[Array | None, ...] | None = None  # in the order of captured
    tout: Array | None = None  # in a double backward: the tangent of out, from a JVP with the same tangents
    tlse: Array | None = None
    cache: "CacheOperands | None" = None

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


def is_given(facts: "Problem | Cache", feature: Feature) -> bool:
    """Return whether a Problem, or its cache, has a feature."""
    fact = getattr(facts, feature.field)
    return fact is not None and fact is not False and fact != 0.0
