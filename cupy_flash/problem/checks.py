"""Checks the requirements on a call; each check adds a reason to one error, which lists all of them.

Checks of facts (shapes, dtypes, devices, options) read `ArrayFacts` and plain options, never an array, so that
`build.pose` can cache their results. Checks of values read the contents of arrays in host memory, at every call.
"""

# No `from __future__ import annotations`: NamedTuple compiles annotations that are strings, which would take a tenth of
# the time of importing this package.
import contextlib
import math
import operator
from collections.abc import Callable, Container, Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..arrays import BY_DLPACK, Array, as_array, dtype_name
from ..device import GPUS
from .features import CAP, CAUSAL, FINITE, FLAG, INTEGER, NUMBER, PROBABILITY, SIZES, WINDOW, Feature, in_layout
from .mask import Mask
from .records import (
    ARRAYS,
    BACKENDS,
    DIFFERENTIATED,
    DTYPES,
    ENGINES,
    FP8,
    LAYOUTS,
    LONGEST,
    NUMBERS,
    UnsupportedError,
    out_dtype,
)

if TYPE_CHECKING:
    from ..arrays import AnyArray
    from .argument_types import Window

EXCHANGED = BY_DLPACK - {"jax"}
# The functions whose results a tape of the caller's library would have to record; of the others the caller takes
# gradients or tangents as results.
RECORDED = (
    "attention", "attention_varlen", "attention_with_kv_cache", "append_to_kv_cache",
    "attention_weights", "attention_weights_varlen", "attention_weights_with_kv_cache",
    "top_weights", "top_weights_varlen", "top_weights_with_kv_cache",
    "key_importance", "key_importance_varlen", "key_importance_with_kv_cache", "selection_loss",
)  # fmt: skip
WITH_VALUES = tuple(feature for feature in ARRAYS if feature.longest or feature.not_negative)


class Requirements:
    """Collects the requirements that a call of `function` does not meet, and what it asks for that is not supported."""

    def __init__(self, function: str) -> None:
        self.function = function
        self.unmet: list[str] = []
        self.about_type = False
        self.unsupported: list[str] = []

    def require(self, met: bool, reason: str) -> bool:
        """Record `reason` unless the requirement is met; return whether it is met."""
        if not met:
            self.unmet.append(reason)
        return met

    def require_type(self, met: bool, reason: str) -> bool:
        """Record `reason` as `require` does; the error then is a TypeError."""
        self.about_type |= not met
        return self.require(met, reason)

    def raise_if_unmet(self, arrays: dict[str, Array]) -> None:
        """Raise TypeError if any reason is about a type, else ValueError, with all reasons and the arrays of the call.

        If all requirements are met, raise UnsupportedError for what is not supported.
        """
        if not self.unmet:
            if self.unsupported:
                reasons = [f"  - {reason}" for reason in dict.fromkeys(self.unsupported)]
                raise UnsupportedError("\n".join([f"{self.function}: not supported", *reasons]))
            return
        count = "a requirement is" if len(self.unmet) == 1 else f"{len(self.unmet)} requirements are"
        lines = [f"{self.function}: {count} not met"]
        lines += [f"  - {reason}" for reason in self.unmet]
        if arrays:
            lines.append("given")
        width = max(map(len, arrays), default=0)
        for name, array in arrays.items():
            lines.append(f"    {name:<{width}}  {array.dtype.name} {array.shape} ({array.framework} on {array.device})")
        raise (TypeError if self.about_type else ValueError)("\n".join(lines))


class ArrayFacts(NamedTuple):
    """The properties of an Array on which a Problem depends."""

    shape: tuple[int, ...]
    dtype: np.dtype
    device: str
    framework: str

    # Only for a call on a KV cache, which writes to arrays and does not copy caches.
    readonly: bool = False
    immutable: str = ""  # as in Array
    has_rows: bool = True  # the last dimension is contiguous
    repeats: bool = False  # a stride is 0, so several elements share an address


Length = int | Container[int]  # the legal sizes of an axis


class Sizes(NamedTuple):
    """The sizes of a call; `known` is False if its arrays do not agree on them."""

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

    # For a KV cache only; its capacity is kv_len
    packed: bool = False
    blocks: int = 0  # number of pages, or of rows of a contiguous cache
    rows: int = 0  # keys per block
    tokens: int = 0  # rows of k, v and slots
    appended: int | None = None  # rows of k per sequence, tokens of a packed batch

    @property
    def lengths(self) -> dict[str, Length]:
        """The sizes of the axes, by letter."""
        return dict(b=self.batch, h=self.heads, g=self.kv_heads, i=self.q_len, j=self.kv_len)


class Settings(NamedTuple):
    """The options that are not arrays, checked and normalised."""

    mask: Mask
    numbers: dict[str, float | None]
    others: dict[str, int | None]  # flags and whole numbers


def read(requirements: Requirements, given: Mapping[str, object]) -> dict[str, Array]:
    """Return the arrays by name; those that cannot be read are unmet requirements and omitted."""
    arrays = {}
    for name, value in given.items():
        try:
            arrays[name] = as_array(value, name)
        except TypeError as error:
            requirements.require_type(False, str(error))
        except ValueError as error:
            requirements.require(False, str(error))
    _place_empty(arrays)
    if requirements.function in RECORDED and any(x.framework in EXCHANGED for x in arrays.values()):
        from ..array_libraries import unrecorded  # imported by the first call on such arrays

        for reason in unrecorded({name: (x.framework, x.owner) for name, x in arrays.items()}):
            requirements.require_type(False, reason)
    return arrays


def _place_empty(arrays: dict[str, Array]) -> None:
    """Set the device of empty arrays to that of the others: the CUDA array interface gives no device for them."""
    unplaced = [x for x in arrays.values() if x.framework == "cuda_array_interface" and x.pointer == 0]
    if unplaced:
        devices = {x.device for x in arrays.values() if x.device != "cpu" and x.pointer != 0}
        for array in unplaced:
            array.device = min(devices, default=array.device)


# Checks of facts


def check_places(requirements: Requirements, arrays: dict[str, ArrayFacts]) -> None:
    """Check that all arrays are of one library and on one device."""
    frameworks = {array.framework for array in arrays.values()}
    devices = {array.device for array in arrays.values()}
    # A library that imports no array gets results of NumPy, or CuPy on a GPU, so a backward accepts both; lengths of
    # NumPy may stand beside arrays of those that do.
    others = frameworks - {"numpy", "cupy"}
    mixed = others <= {"dlpack", "cuda_array_interface"} or (len(others) == 1 and others <= EXCHANGED)
    one_type = len(frameworks) <= 1 or (len(frameworks - others) == 1 and mixed)
    requirements.require_type(one_type, f"all arrays must be of one type, not {' and '.join(sorted(frameworks))}")
    requirements.require(len(devices) <= 1, f"all arrays must be on one device, not {' and '.join(sorted(devices))}")


def check_shapes(requirements: Requirements, arrays: dict[str, ArrayFacts], layout: object, packed: bool) -> Sizes:
    """Check q, k and v, and return the sizes on which they agree; without v, for weights, it counts as k."""
    require = requirements.require
    q, k, v = arrays["q"], arrays["k"], arrays.get("v", arrays["k"])
    given = [name for name in "qkv" if name in arrays]
    all_of, keys = ("q, k and v", "k and v") if "v" in arrays else ("q and k", "k")
    dtypes = {array.dtype for array in (q, k, v)}
    requirements.require_type(len(dtypes) == 1, f"{all_of} must have one dtype")
    for name in sorted(map(dtype_name, dtypes)):
        requirements.require_type(name in (*DTYPES, FP8), f"{all_of} must be {', '.join(DTYPES)} or {FP8}, not {name}")
    rank = 3 if packed else 4
    layout = layout if isinstance(layout, str) else ""
    axes = "(T, H, D)" if packed else {"bshd": "(B, S, H, D)", "bhsd": "(B, H, S, D)"}.get(layout, "")
    ranked = [require(len(arrays[name].shape) == rank, f"{name} must have {rank} dimensions {axes}") for name in given]
    if not all(ranked):
        return Sizes()

    def sizes(array: ArrayFacts) -> tuple[int, int, int, int]:
        """Return (batch, length, heads, dim) of an array; a packed array has batch 1."""
        batch, first, second, dim = (1, *array.shape) if packed else array.shape
        return (batch, first, second, dim) if layout != "bhsd" else (batch, second, first, dim)

    batch, q_len, heads, head_dim = sizes(q)
    k_batch, kv_len, kv_heads, k_dim = sizes(k)
    v_batch, v_len, v_heads, head_dim_v = sizes(v)
    agreed = [
        require(
            batch == k_batch == v_batch,
            f"{all_of} must have one batch size, not {batch}, {k_batch}{f', {v_batch}' if 'v' in arrays else ''}",
        ),
        require(kv_len == v_len, f"k and v must have one length, not {kv_len} and {v_len}"),
        require(kv_heads == v_heads, f"k and v must have the same number of heads, not {kv_heads} and {v_heads}"),
        require(head_dim == k_dim, f"q and k must have one head dimension, not {head_dim} and {k_dim}"),
        require(max(q_len, kv_len) <= LONGEST, f"{all_of} must have at most {LONGEST} rows, not {q_len} and {kv_len}"),
        require(
            min(heads, kv_heads, v_heads, head_dim, k_dim, head_dim_v) > 0,
            "heads and head dimensions must be at least 1",
        ),
        kv_heads == 0
        or require(
            heads % kv_heads == 0, f"the {heads} heads of q must be a multiple of the {kv_heads} heads of {keys}"
        ),
    ]
    if not all(agreed):
        return Sizes()
    out = (*q.shape[:-1], head_dim_v)
    lse: tuple[int, ...] = (batch, heads, q_len)
    if packed:
        lse = (heads, q_len)
        bounds = arrays["cu_seqlens_q"].shape if "cu_seqlens_q" in arrays else ()
        batch = bounds[0] - 1 if bounds else 0
    return Sizes(True, batch, q_len, kv_len, heads, kv_heads, head_dim, head_dim_v, out, lse)


def check_options(
    requirements: Requirements,
    table: tuple[Feature, ...],
    options: Mapping[str, Any],
    backend: str | None,
    packed: bool,
    accumulation: type[np.floating],
) -> Settings:
    """Check and return the options that are not arrays; a wrong one has a neutral value until the error is raised.

    `backend` is the option or the environment variable; numbers must be finite in the dtype `accumulation`.
    """
    require, limits = requirements.require, np.finfo(accumulation)
    values = {
        feature.name: KINDS[feature.kind](requirements, feature, options[feature.name], limits)
        for feature in table
        if feature.kind in KINDS
    }
    causal, (left, right) = values.pop("causal"), values.pop("window")
    mask = Mask(left, 0 if causal else right, top_left=causal == "top_left")
    numbers = {feature.name: values.pop(feature.name, feature.default) for feature in NUMBERS}
    layout = options["layout"]
    require(is_one_of(layout, LAYOUTS), f'layout must be "bshd" or "bhsd", not {layout!r}')
    is_bhsd = isinstance(layout, str) and layout == "bhsd"
    require(not (packed and is_bhsd), 'a packed batch is (T, H, D) and has no layout "bhsd"')
    source = "backend" if options["backend"] is not None else "the environment's CUPY_FLASH_BACKEND"
    require(
        backend is None or is_one_of(backend, (*BACKENDS, *(f"simulator:{arch}" for arch in GPUS))),
        f"{source} must be one of {', '.join(BACKENDS)}, not {backend!r}; the simulator takes an architecture, as in "
        f"simulator:sm_90a, of {', '.join(GPUS)}",
    )
    engine = options["engine"]
    require(engine is None or is_one_of(engine, ENGINES), f"engine must be one of {', '.join(ENGINES)}, not {engine!r}")
    return Settings(mask, numbers, values)


def _causal(
    requirements: Requirements, feature: Feature, given: bool | str, limits: np.finfo[np.floating]
) -> bool | str:
    legal = requirements.require(
        isinstance(given, (bool, np.bool_)) or is_one_of(given, ("bottom_right", "top_left")),
        f'causal must be False, True or "bottom_right" (which are the same) or "top_left", not {given!r}',
    )
    return "top_left" if is_one_of(given, ("top_left",)) else legal and bool(given)


def _flag(requirements: Requirements, feature: Feature, given: bool, limits: np.finfo[np.floating]) -> bool:
    is_flag = isinstance(given, (bool, np.bool_))
    requirements.require_type(is_flag, f"{feature.name} must be True or False, not {given!r}")
    return bool(given if is_flag else feature.default)


def _window(
    requirements: Requirements, feature: Feature, window: "Window", limits: np.finfo[np.floating]
) -> tuple[int | None, int | None]:
    if window is None:
        return None, None
    try:
        left, right = (None if side is None else operator.index(side) for side in window)
    except Exception:  # a foreign object may raise anything
        requirements.require_type(
            False, f"window must be None or (left, right) of whole numbers or None, not {window!r}"
        )
        return None, None
    for side in (left, right):
        requirements.require(
            side is None or side >= -1, f"a side of window must be None or -1 (unbounded) or at least 0, not {side}"
        )
        requirements.require(side is None or side < 2**63, f"a side of window must be less than 2**63, not {side}")
    return None if left == -1 else left, None if right == -1 else right


def _whole(
    requirements: Requirements, feature: Feature, given: int | None, limits: np.finfo[np.floating]
) -> int | None:
    """Return a whole number that is a multiple of `feature.multiple`, or the default, also in place of a wrong one.

    One without a `multiple` is checked elsewhere: None.
    """
    name, unit, number = feature.name, feature.multiple, None
    default = feature.default if isinstance(feature.default, int) else None
    if not unit or (given is None and default is None):
        return None
    with contextlib.suppress(Exception):  # a foreign object may raise anything
        number = None if given is None else operator.index(given)
    if number is None:
        requirements.require_type(False, f"{name} must be {'' if default else 'None or '}a whole number, not {given!r}")
        return default
    legal = number > 0 and (number % unit == 0 or number == default) and not isinstance(given, bool)
    what = "at least 1" if unit == 1 else f"{f'{default} or ' if default else ''}a positive multiple of {unit}"
    requirements.require(legal, f"{name} must be {what}, not {given!r}")
    requirements.require(number <= LONGEST, f"{name} must be at most {LONGEST}, not {given!r}")
    return number if legal else default


def is_one_of(value: object, names: tuple[str, ...]) -> bool:
    """Return whether a value is one of these strings; `in` alone fails for arrays, whose == is no bool."""
    return isinstance(value, str) and value in names


def _number(requirements: Requirements, name: str, value: Any, default: float = 0.0) -> float:
    try:
        # float() also accepts strings, booleans and complex numbers of NumPy.
        kind = np.asarray(value).dtype.kind if isinstance(value, (np.generic, np.ndarray)) else ""
        if isinstance(value, (bool, str, bytes, bytearray, memoryview)) or kind in tuple("bcmMOSTU"):
            raise TypeError
        return float(value)
    except OverflowError:  # an int too large for a float
        return -math.inf if isinstance(value, int) and value < 0 else math.inf
    except Exception:  # a foreign object may raise anything
        requirements.require_type(False, f"{name} must be a number, not {value!r}")
        return default


def _finite(requirements: Requirements, name: str, given: float | None, limits: np.finfo[np.floating]) -> float | None:
    if given is None:
        return None
    value = _number(requirements, name, given)
    requirements.require(math.isfinite(value), f"{name} must be finite, not {given!r}")
    in_dtype = not float(limits.max) < abs(value) < math.inf
    requirements.require(in_dtype, f"{name} must be finite in {limits.dtype.name}, not {given!r}")
    return value


def _cap(requirements: Requirements, name: str, given: float | None, limits: np.finfo[np.floating]) -> float | None:
    """Return a positive number, or None if it is infinite in the accumulation dtype and so has no effect."""
    if given is None:
        return None
    value = _number(requirements, name, given, 1.0)
    requirements.require(value > 0, f"{name} must be positive, not {given!r}; None and infinity mean no {name}")
    in_dtype = not 0 < value < float(limits.smallest_subnormal)
    requirements.require(in_dtype, f"{name} must be positive in {limits.dtype.name}, not {given!r}")
    return None if value > float(limits.max) else value


def _probability(requirements: Requirements, name: str, given: float, limits: np.finfo[np.floating]) -> float:
    value = _number(requirements, name, given)
    # p is rounded to a multiple of 1/65536; if that were 1, no element would be kept.
    in_range = 0 <= value < 1 and round(65536 * value) < 65536
    requirements.require(in_range, f"{name} must be in [0, 1), in steps of 1/65536, not {given!r}")
    return value if in_range else 0.0


RANGES = {FINITE: _finite, CAP: _cap, PROBABILITY: _probability}


def _in_range(
    requirements: Requirements, feature: Feature, given: Any, limits: "np.finfo[np.floating]"
) -> float | None:
    return RANGES[feature.range](requirements, feature.name, given, limits)


KINDS: "dict[str, Callable[[Requirements, Feature, Any, np.finfo[np.floating]], Any]]" = {
    CAUSAL: _causal, WINDOW: _window, NUMBER: _in_range, FLAG: _flag, INTEGER: _whole,
}  # fmt: skip


def check_packed(
    requirements: Requirements, arrays: dict[str, ArrayFacts], longest: tuple[Any, Any]
) -> tuple[int | None, int | None]:
    """Check the facts of a packed batch; return (max_seqlen_q, max_seqlen_k), with None for a wrong one."""
    require = requirements.require
    for feature in ARRAYS:
        legal = not feature.padded or feature.name not in arrays
        require(legal, f"{feature.name} is for padded batches; a packed batch has its lengths in cu_seqlens")
    batches, checked = [], []
    for side, given in zip("qk", longest, strict=True):
        length = None
        try:
            length = operator.index(given)
        except Exception:  # a foreign object may raise anything
            requirements.require_type(False, f"max_seqlen_{side} must be a whole number, not {given!r}")
        if length is not None:
            at_least = require(length >= 0, f"max_seqlen_{side} must be at least 0, not {length}")
            at_most = require(length <= LONGEST, f"max_seqlen_{side} must be at most {LONGEST}, not {length}")
            length = length if at_least and at_most else None
        checked.append(length)
        name = f"cu_seqlens_{side}"
        if name in arrays:
            bounds = arrays[name]
            require_int32(requirements, name, bounds)
            is_vector = len(bounds.shape) == 1 and bounds.shape[0] >= 1
            if require(is_vector, f"{name} must be (B + 1,), not {bounds.shape}"):
                batches.append(bounds.shape[0] - 1)
    require(len(set(batches)) <= 1, "cu_seqlens_q and cu_seqlens_k must have one length")
    return checked[0], checked[1]


def require_int32(requirements: Requirements, name: str, array: ArrayFacts) -> bool:
    """Require int32; the message has the cast, because most libraries compute lengths as int64."""
    cast = "to(torch.int32)" if array.framework == "torch" else 'astype("int32")'
    return requirements.require_type(
        array.dtype == np.int32, f"{name} must be int32, not {array.dtype.name}: pass {name}.{cast}"
    )


def check_features(
    requirements: Requirements,
    table: Iterable[Feature],
    arrays: dict[str, ArrayFacts],
    lengths: dict[str, Length],
    layout: str = "",
    names: Mapping[str, str] = SIZES,
) -> set[str]:
    """Check the arrays among the options against the sizes of the call, and return the names of the wrong ones.

    `lengths` and `names` have the size and the name of each axis, by letter.
    """
    wrong = set()
    for feature in table:
        if feature.name not in arrays:
            continue
        name, array = feature.name, arrays[feature.name]
        if feature.fp8:
            q = dtype_name(arrays["q"].dtype)
            requirements.require_type(q == FP8, f"{name} is for {FP8}, and q, k and v are {q}")
        right = check_dtype(requirements, feature, array, arrays)
        if not check_shape(requirements, feature, array, lengths, layout, names) or not right:
            wrong.add(name)
    return wrong


def check_shape(
    requirements: Requirements,
    feature: Feature,
    array: ArrayFacts,
    lengths: dict[str, Length],
    layout: str = "",
    names: Mapping[str, str] = SIZES,
) -> bool:
    """Check the shape of an array among the options, and return whether it is legal.

    `lengths` has the sizes of the axes, without that of padded queries (i) if the queries on a KV cache are packed.
    `layout` is the layout of options with `rows` or `per_key`.
    """
    legal_axes = [in_layout(axes, layout) for axes in feature.axes] if feature.rows or feature.per_key else feature.axes
    shapes = _shapes(legal_axes, lengths)
    if not shapes:
        return requirements.require(False, f"{feature.name} is for padded queries, and these are packed")
    legal = any(_fits(array.shape, shape) for shape in shapes)
    legal |= feature.broadcast and broadcasts(array.shape, shapes[-1])
    written = " or ".join(_axes_text(axes, names) for axes in legal_axes)
    text = {"axes": written, "shape": shapes[-1], "given": array.shape}
    return requirements.require(legal, f"{feature.name} {feature.shape_text.format(**lengths, **text)}")


def _shapes(legal_axes: Iterable[str], lengths: dict[str, Length]) -> list[tuple[Length, ...]]:
    """Return the legal shapes of an array among the options, or those to which it must broadcast."""
    return [tuple(lengths[axis] for axis in axes) for axes in legal_axes if lengths.keys() >= set(axes)]


def _fits(shape: tuple[int, ...], lengths: tuple[Length, ...]) -> bool:
    return shape == lengths or (len(shape) == len(lengths) and all(map(_is_size, shape, lengths)))


def _is_size(size: int, length: Length) -> bool:
    return size == length if isinstance(length, int) else size in length


def _axes_text(axes: str, names: Mapping[str, str]) -> str:
    return f"({', '.join(names.get(axis, axis) for axis in axes)}{',' * (len(axes) == 1)})"


def check_dtype(requirements: Requirements, feature: Feature, array: ArrayFacts, arrays: dict[str, ArrayFacts]) -> bool:
    """Check the dtype of an array option, and return whether it is legal.

    An option with `rows` (k, v and out on a KV cache) must have the dtype of q, or of k if there is no q.
    """
    if feature.dtypes == ("int32",):
        return require_int32(requirements, feature.name, array)
    dtype = dtype_name(array.dtype)
    if feature.rows:
        like = "q" if "q" in arrays else "k"
        expected = arrays[like].dtype
        return requirements.require_type(
            array.dtype == expected, f"{feature.name} must have the dtype of {like}, {expected.name}, not {dtype}"
        )
    legal, (wrong, text) = feature.dtype_text or feature.dtypes[0], feature.hint
    hint = text if dtype in wrong else ""
    return requirements.require_type(dtype in feature.dtypes, f"{feature.name} must be {legal}, not {dtype}{hint}")


def check_saved(requirements: Requirements, arrays: dict[str, ArrayFacts], sizes: Sizes) -> None:
    """Check the arrays of a shard and of a backward against the sizes of the call."""
    require, require_type = requirements.require, requirements.require_type
    q = arrays["q"].dtype
    if "starts" in arrays:
        starts, shape = arrays["starts"], (sizes.batch, 3)
        legal = starts.dtype == np.int32 and starts.shape == shape
        require(legal, f"starts must be int32 (B, 3) = {shape}, not {starts.dtype.name} {starts.shape}")
    for name in ("out", "dout"):
        if name in arrays:
            array, dtype = arrays[name], out_dtype(q)
            require(
                array.shape == sizes.out, f"{name} must have the shape of the output, {sizes.out}, not {array.shape}"
            )
            source = "the dtype of q" if dtype == q else "the output's dtype"
            require_type(array.dtype == dtype, f"{name} must have {source}, {dtype.name}, not {array.dtype.name}")
    if "argmax" in arrays:
        argmax = arrays["argmax"]
        require(argmax.shape == sizes.lse, f"argmax must be {sizes.lse}, not {argmax.shape}")
        require_type(argmax.dtype == np.int32, f"argmax must be int32, not {argmax.dtype.name}")
    for name in ("lse", "dlse", "dmax", "entropy", "dentropy"):
        if name in arrays:
            array, dtype = arrays[name], np.dtype(np.float64 if q == np.float64 else np.float32)
            require(array.shape == sizes.lse, f"{name} must be {sizes.lse}, not {array.shape}")
            require_type(array.dtype == dtype, f"{name} must be {dtype.name}, not {array.dtype.name}")


def check_tangents(requirements: Requirements, arrays: dict[str, ArrayFacts]) -> None:
    """Check each tangent against its input."""
    captured = [name for name in arrays if name.startswith("array")]
    for name in (*DIFFERENTIATED, *captured):
        if f"t{name}" not in arrays:
            continue
        tangent = arrays[f"t{name}"]
        if not requirements.require(name in arrays, f"t{name} is the tangent of {name}, which is not given"):
            continue
        array = arrays[name]
        requirements.require(
            tangent.shape == array.shape, f"t{name} must have the shape of {name}, {array.shape}, not {tangent.shape}"
        )
        requirements.require_type(
            tangent.dtype == array.dtype,
            f"t{name} must have the dtype of {name}, {array.dtype.name}, not {tangent.dtype.name}",
        )
        requirements.require_type(
            name not in captured or is_float(array.dtype), f"{name} is not floating and has no tangent"
        )


def is_float(dtype: np.dtype) -> bool:
    """Return whether a dtype is one of the four floating dtypes of attention; ml_dtypes' are not np.floating."""
    return dtype_name(dtype) in DTYPES


def broadcasts(shape: tuple[int, ...], to: tuple[Length, ...]) -> bool:
    """Return whether an array of a shape broadcasts to another shape without changing it."""
    if len(shape) > len(to):
        return False
    return all(size == 1 or _is_size(size, full) for size, full in zip(shape[::-1], to[::-1], strict=False))


# Checks of values


def check_seed(
    requirements: Requirements, arrays: dict[str, Array], seed: "int | AnyArray | None", dropout: bool, backward: bool
) -> Array | int | None:
    """Return the seed as an int or an Array; None if there is none or it is wrong.

    With dropout it may be None only in a forward, and not for jax, which has no generator to draw one from.
    """
    framework = arrays["q"].framework if "q" in arrays else ""
    if seed is None:
        why = "attention_backward cannot draw one" if backward else "jax has no generator to draw one from"
        drawable = not dropout or not (backward or framework in ("jax", "xla"))
        requirements.require(drawable, f"dropout needs a seed here: {why}")
        return None
    if isinstance(seed, (bool, np.bool_, np.timedelta64, float, str)):
        requirements.require_type(False, f"seed must be None, an int or an int64 array of one element, not {seed!r}")
        return None
    if isinstance(seed, (int, np.integer)):
        requirements.require(0 <= int(seed) < 2**64, f"seed must be in [0, 2**64), not {seed}")
        return int(seed)
    try:
        array = as_array(seed, "seed")
    except (TypeError, ValueError) as error:
        requirements.require_type(False, str(error))
        return None
    requirements.require(
        array.dtype == np.int64 and math.prod(array.shape) == 1,
        f"a seed array must be one int64, not {array.dtype.name} {array.shape}",
    )
    device = arrays["q"].device if "q" in arrays else array.device
    requirements.require(
        array.device == device, f"a seed array must be on the device of q, {device}, not {array.device}"
    )
    return array


def check_boundaries(
    requirements: Requirements, arrays: dict[str, Array], longest: tuple[int | None, int | None]
) -> None:
    """Check the values of cu_seqlens in host memory."""
    for side, length in zip("qk", longest, strict=True):
        name = f"cu_seqlens_{side}"
        if name not in arrays:
            continue
        array = arrays[name]
        if array.device != "cpu" or array.dtype != np.int32 or len(array.shape) != 1 or not array.shape[0]:
            continue
        bounds = array.numpy().astype(np.int64)
        lengths = np.diff(bounds)
        requirements.require(bounds[0] == 0, f"{name} must start at 0, not {bounds[0]}")
        if not requirements.require(bool((lengths >= 0).all()), f"{name} must not decrease"):
            continue
        total = arrays[side].shape[0] if side in arrays and arrays[side].shape else None
        if total is not None:
            requirements.require(bounds[-1] <= total, f"{name} ends at {bounds[-1]}, past the {total} tokens given")
        if length is not None and lengths.size:
            requirements.require(
                lengths.max() <= length,
                f"max_seqlen_{side} is {length}, but the longest sequence has {lengths.max()} tokens",
            )


def check_values(requirements: Requirements, arrays: dict[str, Array], sizes: Sizes) -> None:
    """Check the values of arrays among the options in host memory; those with a wrong shape may be huge: skip them."""
    for feature in WITH_VALUES:
        array = arrays.get(feature.name)
        if array is None or array.device != "cpu" or dtype_name(array.dtype) not in feature.dtypes:
            continue
        if array.shape not in _shapes(feature.axes, sizes.lengths):
            continue
        values = array.numpy()
        if feature.not_negative:
            legal = bool((np.isfinite(values) & (values >= 0)).all())
            requirements.require(legal, f"{feature.name} must be finite and not negative")
        elif sizes.batch:
            longest = getattr(sizes, feature.longest)
            requirements.require(
                bool(values.min() >= 0 and values.max() <= longest),
                f"{feature.name} must be in [0, {longest}], not {values.min()} to {values.max()}",
            )
