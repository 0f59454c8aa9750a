"""The records of a call: Options as the caller gives them, the Problem that they state, and its Operands.

A Problem holds shapes, dtypes and features, no array, and nothing about how it will run. `pose.pose` builds it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from .arrays import Array, named_dtype
from .mask import Mask

DTYPES = ("float16", "bfloat16", "float32", "float64")
FP8 = "float8_e4m3fn"  # of q, k and v alone, and forward only: out is bfloat16
DESCALES = ("q_descale", "k_descale", "v_descale")
LAYOUTS = ("bshd", "bhsd")
BACKENDS = ("cpu", "cuda", "simulator")
LONGEST = 2**31 - 1  # positions are int32


class UnsupportedError(ValueError):
    """A legal problem that no engine of this version serves; the message holds each engine's reasons."""


@dataclass(slots=True)
class Options:
    """Everything a caller may say beyond q, k and v; the meaning of each is in `cupy_flash.attention`."""

    causal: Any = False
    window: Any = None
    scale: Any = None
    softcap: Any = None
    alibi_slopes: Any = None
    bias: Any = None
    mask: Any = None
    sink: Any = None
    q_lengths: Any = None
    kv_lengths: Any = None
    dropout: Any = 0.0
    seed: Any = None
    q_descale: Any = None
    k_descale: Any = None
    v_descale: Any = None
    layout: Any = "bshd"
    return_lse: Any = False
    deterministic: Any = False
    backend: Any = None
    engine: Any = None

    @classmethod
    def of(cls, function: str, options: dict[str, Any]) -> Options:
        """Options from keyword arguments; an unknown name is an error that lists the known ones."""
        known = cls.__slots__  # dataclasses.fields is opaque to torch.compile
        unknown = [name for name in options if name not in known]
        if unknown:
            raise TypeError(
                f"{function}: unknown option {', '.join(map(repr, unknown))}; the options are {', '.join(known)}"
            )
        return cls(**options)


class Packed(NamedTuple):
    """The sequences of a packed (varlen) batch, in the caller's words."""

    cu_seqlens_q: Any
    cu_seqlens_k: Any
    max_seqlen_q: Any
    max_seqlen_k: Any


class Saved(NamedTuple):
    """What a backward needs beyond q, k, v: the result of the forward and the gradients of it."""

    dout: Any
    out: Any
    lse: Any
    dlse: Any = None
    bias_gradient: bool = True


class Shard(NamedTuple):
    """Which part of a larger call a call is: causal, window, ALiBi and dropout count positions and heads of the whole.

    `starts`, int32 (B, 3), holds of every sequence the position of its first query, that of its first key, and the
    first plus the whole's diagonal offset o minus the second. None: the sequences are whole.
    """

    starts: Any = None
    step: int = 1  # positions between neighbouring rows
    first_head: int = 0
    heads: int | None = None  # query heads of the whole; None: all are here


WHOLE = Shard()


class Gradients(NamedTuple):
    """The gradients of a call, each of its input's shape and dtype; None for what was not given or not asked."""

    dq: Any
    dk: Any
    dv: Any
    dbias: Any = None
    dsink: Any = None


class Problem(NamedTuple):
    """What is asked, hashable: shapes, dtype, place and features; no array and nothing about how it will run."""

    backward: bool
    dtype: np.dtype
    device: str
    framework: str
    layout: str  # "bshd", "bhsd"; "thd" for a packed batch
    batch: int
    q_len: int  # of a packed batch: the longest sequence
    kv_len: int
    heads: int
    kv_heads: int
    head_dim: int
    head_dim_v: int
    scale: float
    mask: Mask
    softcap: float | None
    alibi: bool
    bias: tuple[int, ...] | None  # its shape
    bias_dtype: str  # where there is none: that of q
    bias_gradient: bool
    dense_mask: tuple[int, ...] | None  # its shape
    sink: bool
    sink_dtype: str
    dlse: bool
    q_lengths: bool
    kv_lengths: bool
    aligned: bool  # every row of q, k and v that is there starts at a multiple of 16 bytes
    empty: bool  # q, k or v has no element: of a packed batch the lengths above do not tell
    dropout: float
    descales: tuple[str, ...]  # those of fp8 that are given
    shard: bool  # positions are not those of whole sequences
    step: int
    first_head: int
    whole_heads: int
    deterministic: bool
    backend: str | None  # as asked for; None follows the arrays
    engine: str | None

    @property
    def group(self) -> int:
        """Query heads per key/value head."""
        return self.heads // self.kv_heads

    @property
    def has_lengths(self) -> bool:
        """Whether a sequence may be shorter than the longest."""
        return self.layout == "thd" or self.q_lengths or self.kv_lengths

    @property
    def out_dtype(self) -> np.dtype:
        """That of q; bfloat16 for fp8."""
        return out_dtype(self.dtype)

    @property
    def accumulation(self) -> np.dtype:
        """fp32, or fp64 for fp64: the dtype of scores, sums and lse."""
        return np.dtype(np.float64 if self.dtype == np.float64 else np.float32)

    def lse_shape(self, q: Array) -> tuple[int, ...]:
        """(B, Hq, Sq), or (Hq, Tq) of a packed batch."""
        return q.shape[1::-1] if self.layout == "thd" else (self.batch, self.heads, self.q_len)

    def __str__(self) -> str:
        heads = f"{self.heads} heads" if self.group == 1 else f"{self.heads} query and {self.kv_heads} key/value heads"
        dim = f"D {self.head_dim}" if self.head_dim == self.head_dim_v else f"D {self.head_dim}, Dv {self.head_dim_v}"
        features = [str(self.mask)]
        features += [f"softcap {self.softcap:g}"] if self.softcap is not None else []
        features += [f"dropout {self.dropout:g}"] if self.dropout else []
        named = ("alibi", "sink", "q_lengths", "kv_lengths", "deterministic")
        features += [name for name in named if getattr(self, name)]
        features += self.descales
        features += ["shard"] if self.shard else []
        features += [f"bias {self.bias}"] if self.bias is not None else []
        features += [f"mask {self.dense_mask}"] if self.dense_mask is not None else []
        step = "backward" if self.backward else "forward"
        packed = "packed, up to " if self.layout == "thd" else ""
        to = "" if self.dtype == self.out_dtype else f" to {self.out_dtype.name}"
        return (
            f"{step}, {self.dtype.name}{to} {self.layout} ({self.framework} on {self.device}): batch {self.batch}, "
            f"{packed}{self.q_len} queries x {self.kv_len} keys, {heads}, {dim}; {', '.join(features)}"
        )


class Operands(NamedTuple):
    """The arrays of one call, and the seed (an int, or an int64 array of one element)."""

    q: Array
    k: Array
    v: Array
    alibi_slopes: Array | None
    bias: Array | None
    mask: Array | None
    sink: Array | None
    q_lengths: Array | None
    kv_lengths: Array | None
    cu_seqlens_q: Array | None
    cu_seqlens_k: Array | None
    starts: Array | None
    q_descale: Array | None
    k_descale: Array | None
    v_descale: Array | None
    seed: Array | int | None
    dout: Array | None
    out: Array | None
    lse: Array | None
    dlse: Array | None


@lru_cache(maxsize=16)  # np.dtype.name costs microseconds
def out_dtype(dtype: np.dtype) -> np.dtype:
    """The dtype of out for q, k and v of `dtype`: the same, bfloat16 for fp8."""
    return named_dtype("bfloat16") if dtype.name == FP8 else dtype
