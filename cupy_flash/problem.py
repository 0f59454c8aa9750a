"""What is asked: every requirement on a call, found in one place and reported all at once.

`pose` turns the caller's words (Options) and arrays into a `Problem`, which says what is asked and nothing about how,
and the `Operands` it is asked of. Whatever a caller may get wrong is found here, before anything is computed or
written.
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from . import environment
from .arrays import Array, as_array, named_dtype
from .mask import Mask

DTYPES = ("float16", "bfloat16", "float32", "float64")
FP8 = "float8_e4m3fn"  # of q, k and v alone, and forward only: out is bfloat16
DESCALES = ("q_descale", "k_descale", "v_descale")
LAYOUTS = ("bshd", "bhsd")
BACKENDS = ("cpu", "cuda", "simulator")
ENGINES = ("cpu", "simt", "mma", "wgmma")
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
        return _out_dtype(self.dtype)

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


def pose(
    function: str,
    arrays: tuple[Any, Any, Any],
    options: Options,
    packed: Packed | None = None,
    saved: Saved | None = None,
    shard: Shard = WHOLE,
) -> tuple[Problem, Operands]:
    """State the problem of one call of `function`, or raise one error with every requirement that is not met."""
    check = _Check(function)
    call = _read_arrays(check, arrays, options, packed, saved, shard)
    backend = options.backend if options.backend is not None else environment.backend()
    facts = None if check.unmet else _facts(call, options, backend, packed, saved, shard)
    known = _stated.get(facts)
    if known is None:
        _check_places(check, call)
        shape = _Shape()
        if "q" in call and "k" in call and "v" in call:
            shape = _check_shapes(check, call, options, packed)
        words = _check_options(check, options, backend, packed is not None, shape, call)
        if shape.known:
            _check_features(check, call, shape)
        dropout = words.dropout
    else:
        shape, problem = known
        dropout = problem.dropout
    # What stands in an array, and the seed, are another's at every call.
    seed = _check_seed(check, call, options.seed, bool(dropout), saved is not None)
    if packed is not None:
        _check_packed(check, call, packed)
    if shape.known:
        _check_lengths(check, call, shape)
    _check_descale_values(check, call, shape)
    check.raise_if_unmet(call)
    if known is None:
        problem = _state(call, options, packed, saved, shard, shape, words)
        if facts is not None:
            if len(_stated) >= STATED:
                _stated.clear()
            _stated[facts] = shape, problem
    if dropout and seed is None:
        # The global generator, because np.random.seed is how callers of NumPy make a run repeatable.
        seed = int(np.random.randint(0, 2**63 - 1, dtype=np.int64))  # noqa: NPY002
    given = {**call, "seed": seed if dropout else None}
    return problem, Operands._make(map(given.get, Operands._fields))


# The problems of legal calls by their facts: who calls again with the same need not be checked again.
_stated: dict[Any, tuple[_Shape, Problem]] = {}
STATED = 1024  # so many are kept

WORDS = ("causal", "scale", "softcap", "dropout", "layout", "return_lse", "deterministic", "engine")
_words_of = operator.attrgetter(*WORDS)
PLAIN = frozenset((bool, int, float, str, type(None)))  # types whose equal values are one, and stay what they are


def _facts(
    call: dict[str, Array],
    options: Options,
    backend: Any,
    packed: Packed | None,
    saved: Saved | None,
    shard: Shard,
) -> tuple[Any, ...] | None:
    """All that decides over a call and its Problem, but for the seed and what stands in arrays; None where a word is
    not plain. Types are among it: 1 == True == 1.0, and not all of them are legal. Whether the call is packed, and
    whether it is a backward, the names of its arrays say."""
    sides = options.window if type(options.window) is tuple else (options.window,)
    longest = () if packed is None else (packed.max_seqlen_q, packed.max_seqlen_k)
    bias_gradient = saved is not None and saved.bias_gradient
    words = (*_words_of(options), backend, bias_gradient, *longest, *shard[1:], *sides)
    kinds = tuple(map(type, words))
    if not PLAIN.issuperset(kinds):
        return None
    described = [(name, x.shape, x.dtype, x.device, x.framework) for name, x in call.items()]
    return (words, kinds, type(options.window), _are_aligned(call), *described)


def _are_aligned(call: dict[str, Array]) -> bool:
    """Whether q, k and v can be copied in boxes."""
    return all(has_boxes(call[name]) for name in ("q", "k", "v"))


def has_boxes(array: Array) -> bool:
    """Whether every row starts at a multiple of 16 bytes, and no stride repeats or reverses rows: what is asked of a
    tensor that is copied in boxes. Rows that are not contiguous are copied to such as are."""
    return _have_boxes(array.shape, array.strides, array.dtype.itemsize, array.pointer % 16)


@lru_cache(maxsize=STATED)
def _have_boxes(shape: tuple[int, ...], strides: tuple[int, ...], size: int, start: int) -> bool:
    if strides[-1:] != (1,) and shape[-1:] > (1,):
        return shape[-1] * size % 16 == 0
    return start == 0 and all(
        extent < 2 or (stride > 0 and stride * size % 16 == 0)
        for extent, stride in zip(shape[:-1], strides[:-1], strict=True)
    )


def _state(
    call: dict[str, Array],
    options: Options,
    packed: Packed | None,
    saved: Saved | None,
    shard: Shard,
    shape: _Shape,
    words: _Words,
) -> Problem:
    """The problem of a legal call."""
    q = call["q"]
    return Problem(
        backward=saved is not None,
        dtype=q.dtype,
        device=q.device,
        framework=q.framework,
        layout="thd" if packed is not None else options.layout,
        batch=shape.batch,
        q_len=shape.q_len if packed is None else operator.index(packed.max_seqlen_q),
        kv_len=shape.kv_len if packed is None else operator.index(packed.max_seqlen_k),
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        head_dim_v=shape.head_dim_v,
        scale=words.scale,
        mask=words.mask,
        softcap=words.softcap,
        alibi="alibi_slopes" in call,
        bias=call["bias"].shape if "bias" in call else None,
        bias_dtype=call["bias"].dtype.name if "bias" in call else _out_dtype(q.dtype).name,
        bias_gradient=saved is not None and saved.bias_gradient,
        dense_mask=call["mask"].shape if "mask" in call else None,
        sink="sink" in call,
        sink_dtype=call["sink"].dtype.name if "sink" in call else _out_dtype(q.dtype).name,
        dlse="dlse" in call,
        q_lengths="q_lengths" in call,
        kv_lengths="kv_lengths" in call,
        aligned=_are_aligned(call),
        empty=any(0 in call[name].shape for name in ("q", "k", "v")),
        dropout=words.dropout,
        descales=tuple(name for name in DESCALES if name in call),
        shard="starts" in call,
        step=shard.step,
        first_head=shard.first_head,
        whole_heads=shape.heads if shard.heads is None else shard.heads,
        deterministic=bool(options.deterministic),
        backend=words.backend,
        engine=options.engine,
    )


def pose_merge(parts: tuple[Any, Any, Any, Any], layout: Any) -> tuple[str, tuple[Array, Array, Array, Array]]:
    """(layout, "thd" for packed results; the four arrays) of a merge, or one error with all reasons."""
    check = _Check("merge")
    call = _describe(check, dict(zip(("out_a", "lse_a", "out_b", "lse_b"), parts, strict=True)))
    _check_places(check, call)
    check.require(_is_one_of(layout, LAYOUTS), f'layout must be "bshd" or "bhsd", not {layout!r}')
    if len(call) == 4 and isinstance(layout, str):
        out_a, lse_a, out_b, lse_b = call.values()
        layout = "thd" if len(out_a.shape) == 3 else layout
        check.require_type(_is_float(out_a.dtype), f"out_a must be {', '.join(DTYPES)}, not {out_a.dtype.name}")
        check.require_type(_is_float(out_b.dtype), f"out_b must be {', '.join(DTYPES)}, not {out_b.dtype.name}")
        check.require(out_a.shape == out_b.shape, "out_a and out_b must have one shape")
        if check.require(len(out_a.shape) in (3, 4), "out_a must be (B, S, H, Dv) in the layout, or (T, H, Dv)"):
            *leading, a, b, _ = out_a.shape
            rows = (*leading, a, b) if layout == "bhsd" else (*leading, b, a)
            accumulation = np.dtype(np.float64 if out_a.dtype == np.float64 else np.float32)
            for name, lse in (("lse_a", lse_a), ("lse_b", lse_b)):
                check.require(lse.shape == rows, f"{name} must be {rows} beside out {out_a.shape}, not {lse.shape}")
                right = lse.dtype == accumulation
                check.require_type(right, f"{name} must be {accumulation.name}, not {lse.dtype.name}")
    check.raise_if_unmet(call)
    return layout, (call["out_a"], call["lse_a"], call["out_b"], call["lse_b"])


class _Check:
    """Collects the requirements that a call does not meet."""

    def __init__(self, function: str) -> None:
        self.function = function
        self.unmet: list[str] = []
        self.about_type = False

    def require(self, met: bool, reason: str) -> bool:
        if not met:
            self.unmet.append(reason)
        return met

    def require_type(self, met: bool, reason: str) -> bool:
        self.about_type |= not met
        return self.require(met, reason)

    def raise_if_unmet(self, call: dict[str, Array]) -> None:
        if not self.unmet:
            return
        count = "a requirement is" if len(self.unmet) == 1 else f"{len(self.unmet)} requirements are"
        lines = [f"{self.function}: {count} not met"]
        lines += [f"  - {reason}" for reason in self.unmet]
        if call:
            lines.append("given")
        width = max(map(len, call), default=0)
        for name, array in call.items():
            lines.append(f"    {name:<{width}}  {array.dtype.name} {array.shape} ({array.framework} on {array.device})")
        raise (TypeError if self.about_type else ValueError)("\n".join(lines))


class _Shape(NamedTuple):
    """The sizes of a call; `known` is False where its arrays do not agree on them."""

    known: bool = False
    batch: int = 0
    q_len: int = 0
    kv_len: int = 0
    heads: int = 1
    kv_heads: int = 1
    head_dim: int = 1
    head_dim_v: int = 1
    out: tuple[int, ...] = ()
    lse: tuple[int, ...] = ()


class _Words(NamedTuple):
    """The options that are not arrays, checked and in one form."""

    mask: Mask
    scale: float
    softcap: float | None
    dropout: float
    backend: str | None


def _read_arrays(
    check: _Check,
    arrays: tuple[Any, Any, Any],
    options: Options,
    packed: Packed | None,
    saved: Saved | None,
    shard: Shard,
) -> dict[str, Array]:
    """Every array of the call by name, those that cannot be read reported."""
    given = dict(zip(("q", "k", "v"), arrays, strict=True))
    for name in ("alibi_slopes", "bias", "mask", "sink", "q_lengths", "kv_lengths", *DESCALES):
        given[name] = getattr(options, name)
    if packed is not None:
        given |= {"cu_seqlens_q": packed.cu_seqlens_q, "cu_seqlens_k": packed.cu_seqlens_k}
    if saved is not None:
        given |= {"dout": saved.dout, "out": saved.out, "lse": saved.lse, "dlse": saved.dlse}
    given["starts"] = shard.starts
    required = {"q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "dout", "out", "lse"}
    return _describe(check, {name: value for name, value in given.items() if value is not None or name in required})


def _describe(check: _Check, given: dict[str, Any]) -> dict[str, Array]:
    """The arrays by name, those that cannot be read reported and left out."""
    call = {}
    for name, value in given.items():
        try:
            call[name] = as_array(value, name)
        except TypeError as error:
            check.require_type(False, str(error))
        except ValueError as error:
            check.require(False, str(error))
    return call


def _check_places(check: _Check, call: dict[str, Array]) -> None:
    frameworks = {array.framework for array in call.values()}
    devices = {array.device for array in call.values()}
    # The results for a library that cannot allocate are NumPy's, or CuPy's on a GPU: a backward takes both.
    homes = frameworks - {"dlpack", "cuda_array_interface"}
    one_type = len(frameworks) <= 1 or (len(homes) == 1 and homes <= {"numpy", "cupy"})
    check.require_type(one_type, f"all arrays must be of one type, not {' and '.join(sorted(frameworks))}")
    check.require(len(devices) <= 1, f"all arrays must be on one device, not {' and '.join(sorted(devices))}")


def _check_shapes(check: _Check, call: dict[str, Array], options: Options, packed: Packed | None) -> _Shape:
    q, k, v = call["q"], call["k"], call["v"]
    dtypes = {array.dtype for array in (q, k, v)}
    check.require_type(len(dtypes) == 1, "q, k and v must have one dtype")
    for name in sorted(dtype.name for dtype in dtypes):
        check.require_type(name in (*DTYPES, FP8), f"q, k and v must be {', '.join(DTYPES)} or {FP8}, not {name}")
    rank = 4 if packed is None else 3
    layout = options.layout if isinstance(options.layout, str) else ""
    names = {"bshd": "(B, S, H, D)", "bhsd": "(B, H, S, D)"}.get(layout, "") if rank == 4 else "(T, H, D)"
    ranked = [
        check.require(len(call[name].shape) == rank, f"{name} must have {rank} dimensions {names}") for name in "qkv"
    ]
    if not all(ranked):
        return _Shape()

    def sizes(array: Array) -> tuple[int, int, int, int]:
        """(batch, length, heads, dim) of an array; a packed one is a batch of one row of tokens."""
        batch, first, second, dim = array.shape if packed is None else (1, *array.shape)
        return (batch, first, second, dim) if layout != "bhsd" else (batch, second, first, dim)

    batch, q_len, heads, head_dim = sizes(q)
    k_batch, kv_len, kv_heads, k_dim = sizes(k)
    v_batch, v_len, v_heads, head_dim_v = sizes(v)
    ok = check.require(
        batch == k_batch == v_batch, f"q, k and v must have one batch size, not {batch}, {k_batch}, {v_batch}"
    )
    ok &= check.require(kv_len == v_len, f"k and v must have one length, not {kv_len} and {v_len}")
    ok &= check.require(
        kv_heads == v_heads, f"k and v must have the same number of heads, not {kv_heads} and {v_heads}"
    )
    ok &= check.require(head_dim == k_dim, f"q and k must have one head dimension, not {head_dim} and {k_dim}")
    ok &= check.require(
        max(q_len, kv_len) <= LONGEST, f"q, k and v must have at most {LONGEST} rows, not {q_len} and {kv_len}"
    )
    positive = min(heads, kv_heads, v_heads, head_dim, k_dim, head_dim_v) > 0
    ok &= check.require(positive, "heads and head dimensions must be at least 1")
    if kv_heads > 0:
        divides = heads % kv_heads == 0
        ok &= check.require(divides, f"the {heads} heads of q must be a multiple of the {kv_heads} heads of k and v")
    if not ok:
        return _Shape()
    out = (*q.shape[:-1], head_dim_v)
    if packed is None:
        lse: tuple[int, ...] = (batch, heads, q_len)
    else:
        lse = (heads, q_len)
        batch = call["cu_seqlens_q"].shape[0] - 1 if "cu_seqlens_q" in call and call["cu_seqlens_q"].shape else 0
    return _Shape(True, batch, q_len, kv_len, heads, kv_heads, head_dim, head_dim_v, out, lse)


def _check_options(
    check: _Check, options: Options, backend: Any, packed: bool, shape: _Shape, call: dict[str, Array]
) -> _Words:
    """The options that are not arrays; where one is wrong a neutral value stands in until the error is raised."""
    causal = options.causal
    is_causal = check.require(
        isinstance(causal, (bool, np.bool_)) or (isinstance(causal, str) and causal in ("bottom_right", "top_left")),
        f'causal must be False, True or "bottom_right" (which are the same) or "top_left", not {causal!r}',
    ) and bool(causal)
    left, right = _check_window(check, options.window)
    mask = Mask(left, 0 if is_causal else right, top_left=isinstance(causal, str) and causal == "top_left")

    scale = 1 / math.sqrt(shape.head_dim) if options.scale is None else _number(check, "scale", options.scale)
    limits = np.finfo(np.float64 if "q" in call and call["q"].dtype == np.float64 else np.float32)  # of accumulation
    smallest, largest = float(limits.smallest_subnormal), float(limits.max)
    check.require(math.isfinite(scale), f"scale must be finite, not {options.scale!r}")
    in_dtype = not largest < abs(scale) < math.inf
    check.require(in_dtype, f"scale must be finite in {limits.dtype.name}, not {options.scale!r}")
    softcap = None if options.softcap is None else _number(check, "softcap", options.softcap, 1.0)
    if softcap is not None:
        in_range = 0 < softcap < math.inf
        check.require(in_range, f"softcap must be positive and finite, not {options.softcap!r}; None is no softcap")
        in_dtype = not 0 < softcap < smallest
        check.require(in_dtype, f"softcap must be positive in {limits.dtype.name}, not {options.softcap!r}")
        if softcap > largest:
            softcap = None  # infinite in the accumulation dtype, where it changes no score
    dropout = _number(check, "dropout", options.dropout)
    # 65536 p is rounded to a whole number of 65536ths; what rounds to all of them would keep nothing.
    in_range = 0 <= dropout < 1 and round(65536 * dropout) < 65536
    check.require(in_range, f"dropout must be in [0, 1), in steps of 1/65536, not {options.dropout!r}")

    for name in ("return_lse", "deterministic"):
        value = getattr(options, name)
        check.require_type(isinstance(value, (bool, np.bool_)), f"{name} must be True or False, not {value!r}")
    known_layout = _is_one_of(options.layout, LAYOUTS)
    check.require(known_layout, f'layout must be "bshd" or "bhsd", not {options.layout!r}')
    check.require(
        not (packed and known_layout and options.layout == "bhsd"),
        'a packed batch is (T, H, D) and has no layout "bhsd"',
    )
    source = "backend" if options.backend is not None else "the environment's CUPY_FLASH_BACKEND"
    check.require(
        backend is None or _is_one_of(backend, BACKENDS),
        f"{source} must be one of {', '.join(BACKENDS)}, not {backend!r}",
    )
    engine = options.engine
    known_engine = engine is None or _is_one_of(engine, ENGINES)
    check.require(known_engine, f"engine must be one of {', '.join(ENGINES)}, not {engine!r}")
    return _Words(mask, scale, softcap, dropout if in_range else 0.0, backend)


def _check_window(check: _Check, window: Any) -> tuple[int | None, int | None]:
    if window is None:
        return None, None
    try:
        left, right = (None if side is None else operator.index(side) for side in window)
    except Exception:  # objects of others raise what they like
        check.require_type(False, f"window must be None or (left, right) of whole numbers or None, not {window!r}")
        return None, None
    for side in (left, right):
        check.require(
            side is None or side >= -1, f"a side of window must be None or -1 (unbounded) or at least 0, not {side}"
        )
        check.require(side is None or side < 2**63, f"a side of window must be less than 2**63, not {side}")
    return None if left == -1 else left, None if right == -1 else right


def _is_one_of(value: Any, names: tuple[str, ...]) -> bool:
    """Whether a value is one of these words; `in` alone would ask objects that do not compare, such as arrays."""
    return isinstance(value, str) and value in names


def _number(check: _Check, name: str, value: Any, default: float = 0.0) -> float:
    try:
        # What float() takes all the same: text, truth values and complex numbers of NumPy.
        kind = np.asarray(value).dtype.kind if isinstance(value, (np.generic, np.ndarray)) else ""
        if isinstance(value, (bool, str, bytes, bytearray, memoryview)) or kind in tuple("bcmMOSTU"):
            raise TypeError
        return float(value)
    except OverflowError:  # an int beyond floats: every option refuses an infinite number
        return math.inf
    except Exception:  # objects of others raise what they like
        check.require_type(False, f"{name} must be a number, not {value!r}")
        return default


def _check_seed(check: _Check, call: dict[str, Array], seed: Any, dropout: bool, backward: bool) -> Array | int | None:
    framework = call["q"].framework if "q" in call else ""
    if seed is None:
        why = "attention_backward cannot draw one" if backward else "jax has no generator to draw one from"
        drawable = not dropout or not (backward or framework == "jax")
        check.require(drawable, f"dropout needs a seed here: {why}")
        return None
    if isinstance(seed, (bool, np.bool_, np.timedelta64, float, str)):
        check.require_type(False, f"seed must be None, an int or an int64 array of one element, not {seed!r}")
        return None
    if isinstance(seed, (int, np.integer)):
        check.require(0 <= int(seed) < 2**64, f"seed must be in [0, 2**64), not {seed}")
        return int(seed)
    try:
        array = as_array(seed, "seed")
    except (TypeError, ValueError) as error:
        check.require_type(False, str(error))
        return None
    check.require(
        array.dtype == np.int64 and math.prod(array.shape) == 1,
        f"a seed array must be one int64, not {array.dtype.name} {array.shape}",
    )
    on = call["q"].device if "q" in call else array.device
    check.require(array.device == on, f"a seed array must be on the device of q, {on}, not {array.device}")
    return array


def _check_packed(check: _Check, call: dict[str, Array], packed: Packed) -> None:
    for name in ("bias", "mask", "q_lengths", "kv_lengths"):
        check.require(name not in call, f"{name} is for padded batches; a packed batch has its lengths in cu_seqlens")
    batches = []
    for side, tokens in (("q", "q"), ("k", "k")):
        name = f"cu_seqlens_{side}"
        longest = getattr(packed, f"max_seqlen_{side}")
        try:
            longest = operator.index(longest)
            check.require(longest >= 0, f"max_seqlen_{side} must be at least 0, not {longest}")
            if not check.require(longest <= LONGEST, f"max_seqlen_{side} must be at most {LONGEST}, not {longest}"):
                longest = None
        except Exception:  # objects of others raise what they like
            check.require_type(False, f"max_seqlen_{side} must be a whole number, not {longest!r}")
            longest = None
        if name not in call:
            continue
        array = call[name]
        _require_int32(check, name, array)
        if not check.require(
            len(array.shape) == 1 and array.shape[0] >= 1, f"{name} must be (B + 1,), not {array.shape}"
        ):
            continue
        batches.append(array.shape[0] - 1)
        if array.device == "cpu" and array.dtype == np.int32:
            total = call[tokens].shape[0] if tokens in call and call[tokens].shape else None
            _check_boundaries(check, name, array.numpy().astype(np.int64), total, longest)
    check.require(len(set(batches)) <= 1, "cu_seqlens_q and cu_seqlens_k must have one length")


def _require_int32(check: _Check, name: str, array: Array) -> bool:
    """The message names the cast: lengths are computed as int64 by most libraries."""
    cast = "to(torch.int32)" if array.framework == "torch" else 'astype("int32")'
    return check.require_type(
        array.dtype == np.int32, f"{name} must be int32, not {array.dtype.name}: pass {name}.{cast}"
    )


def _check_boundaries(check: _Check, name: str, bounds: np.ndarray, total: int | None, longest: int | None) -> None:
    lengths = np.diff(bounds)
    check.require(bounds[0] == 0, f"{name} must start at 0, not {bounds[0]}")
    if not check.require(bool((lengths >= 0).all()), f"{name} must not decrease"):
        return
    if total is not None:
        check.require(bounds[-1] <= total, f"{name} ends at {bounds[-1]}, past the {total} tokens given")
    if longest is not None and lengths.size:
        side = name[-1]
        check.require(
            lengths.max() <= longest,
            f"max_seqlen_{side} is {longest}, but the longest sequence has {lengths.max()} tokens",
        )


def _check_features(check: _Check, call: dict[str, Array], shape: _Shape) -> None:
    """The arrays of options and of a backward, against the sizes of the call."""
    accumulation = np.float64 if call["q"].dtype == np.float64 else np.float32
    scores = (shape.batch, shape.heads, shape.q_len, shape.kv_len)
    if "bias" in call:
        bias = call["bias"]
        instead = "; a boolean mask is given as mask=" if bias.dtype == np.bool_ else ""
        check.require_type(_is_float(bias.dtype), f"bias must be floating, not {bias.dtype.name}{instead}")
        check.require(
            _broadcasts(bias.shape, scores), f"bias {bias.shape} must broadcast to (B, Hq, Sq, Sk) = {scores}"
        )
    if "mask" in call:
        mask = call["mask"]
        instead = "; an additive mask is given as bias=" if _is_float(mask.dtype) else ""
        check.require_type(mask.dtype == np.bool_, f"mask must be bool, True = attend, not {mask.dtype.name}{instead}")
        check.require(
            _broadcasts(mask.shape, scores), f"mask {mask.shape} must broadcast to (B, Hq, Sq, Sk) = {scores}"
        )
    if "alibi_slopes" in call:
        slopes = call["alibi_slopes"]
        legal = ((shape.heads,), (shape.batch, shape.heads))
        check.require_type(slopes.dtype == np.float32, f"alibi_slopes must be float32, not {slopes.dtype.name}")
        check.require(slopes.shape in legal, f"alibi_slopes must be (Hq,) or (B, Hq) = {legal[1]}, not {slopes.shape}")
    if "sink" in call:
        sink = call["sink"]
        check.require_type(_is_float(sink.dtype), f"sink must be floating, not {sink.dtype.name}")
        check.require(sink.shape == (shape.heads,), f"sink must be (Hq,) = ({shape.heads},), not {sink.shape}")
    for name in DESCALES:
        if name in call:
            descale, of_heads = call[name], (shape.batch, shape.kv_heads)
            of_fp8 = call["q"].dtype.name == FP8
            check.require_type(of_fp8, f"{name} is for {FP8}, and q, k and v are {call['q'].dtype.name}")
            check.require_type(descale.dtype == np.float32, f"{name} must be float32, not {descale.dtype.name}")
            check.require(descale.shape == of_heads, f"{name} must be (B, Hk) = {of_heads}, not {descale.shape}")
    if "starts" in call:
        starts, wanted = call["starts"], (shape.batch, 3)
        right = starts.dtype == np.int32 and starts.shape == wanted
        check.require(right, f"starts must be int32 (B, 3) = {wanted}, not {starts.dtype.name} {starts.shape}")
    for name in ("out", "dout"):
        if name in call:
            array = call[name]
            check.require(
                array.shape == shape.out, f"{name} must have the shape of the output, {shape.out}, not {array.shape}"
            )
            dtype = _out_dtype(call["q"].dtype)
            of = "the dtype of q" if dtype == call["q"].dtype else "the output's dtype"
            same = array.dtype == dtype
            check.require_type(same, f"{name} must have {of}, {dtype.name}, not {array.dtype.name}")
    for name in ("lse", "dlse"):
        if name in call:
            array = call[name]
            check.require(array.shape == shape.lse, f"{name} must be {shape.lse}, not {array.shape}")
            right = array.dtype == accumulation
            check.require_type(right, f"{name} must be {np.dtype(accumulation).name}, not {array.dtype.name}")


def _check_lengths(check: _Check, call: dict[str, Array], shape: _Shape) -> None:
    """Valid rows of a padded batch, and where the CPU has them their values."""
    for name, longest in (("q_lengths", shape.q_len), ("kv_lengths", shape.kv_len)):
        if name not in call:
            continue
        lengths = call[name]
        ok = _require_int32(check, name, lengths)
        ok &= check.require(
            lengths.shape == (shape.batch,), f"{name} must be (B,) = ({shape.batch},), not {lengths.shape}"
        )
        if ok and lengths.device == "cpu" and shape.batch:
            values = lengths.numpy()
            inside = values.min() >= 0 and values.max() <= longest
            check.require(bool(inside), f"{name} must be in [0, {longest}], not {values.min()} to {values.max()}")


def _check_descale_values(check: _Check, call: dict[str, Array], shape: _Shape) -> None:
    """Values of the descales in host memory. Those of a wrong shape, which may be huge, are refused unread."""
    for name in DESCALES:
        descale = call.get(name)
        if descale is None or descale.shape != (shape.batch, shape.kv_heads):
            continue
        if descale.device == "cpu" and descale.dtype == np.float32:
            values = descale.numpy()
            legal = bool((np.isfinite(values) & (values >= 0)).all())
            check.require(legal, f"{name} must be finite and not negative")


@lru_cache(maxsize=16)  # NumPy takes microseconds to name a dtype
def _out_dtype(dtype: np.dtype) -> np.dtype:
    """Of the result of attention on q, k and v of a dtype."""
    return named_dtype("bfloat16") if dtype.name == FP8 else dtype


def _is_float(dtype: np.dtype) -> bool:
    """Whether a dtype is one of the four that attention computes with; ml_dtypes' are not np.floating."""
    return dtype.name in DTYPES


def _broadcasts(shape: tuple[int, ...], to: tuple[int, ...]) -> bool:
    if len(shape) > len(to):
        return False
    return all(size in (1, full) for size, full in zip(shape[::-1], to[::-1], strict=False))
