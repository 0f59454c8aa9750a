"""Poses a call on a KV cache: `pose_with_cache` and `pose_append` check it and make its Problem and Operands.

The Problem has the capacity of the cache, not the lengths. The contents of lengths, tables and positions are not facts:
they are checked at every call if they are in host memory, and never read from a GPU.
"""

from __future__ import annotations

import math
import operator
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from .. import environment
from ..arrays import CACHED, Array, empty, has_boxes
from .build import array_facts, cached_if_plain, captured_names, traced_mod
from .checks import Requirements, Sizes, check_features, check_options, check_places, is_one_of, read, require_int32
from .features import ARRAY, FEATURES, FLOATING, LENGTHS, MOD, WINDOW
from .kv_cache_contents import CACHES, check_contents, check_overlap
from .kv_cache_records import CACHE_FEATURES, Cache, CacheOperands, CacheOptions
from .records import FP8, LAYOUTS, LONGEST, Operands, Problem, UnsupportedError

if TYPE_CHECKING:
    from ..mods.trace import Mod

BY_NAME = {feature.name: feature for feature in CACHE_FEATURES}
ARRAY_NAMES = tuple(feature.name for feature in CACHE_FEATURES if feature.kind == ARRAY)
PLAIN_OPTIONS = tuple(feature.name for feature in CACHE_FEATURES if feature.kind not in (ARRAY, WINDOW, LENGTHS, MOD))
SHARED = ("window", "scale", "softcap", "layout", "return_lse", "backend", "engine")  # checked as attention() does
SPLIT_UNIT = 64  # split_size must be a multiple
FIELDS = {x.name: x.member or x.name for x in CACHE_FEATURES if (x.member or x.name) in CacheOperands._fields}
# Arrays that are options of attention() too.
OF_BOTH = frozenset(Operands._fields) - FIELDS.keys() - {"q", "cu_seqlens_q"}


def pose_with_cache(
    q: Any, k_cache: Any, v_cache: Any, options: CacheOptions, reasons: tuple[str, ...] = ()
) -> tuple[Problem, Operands]:
    """Pose `attention_with_kv_cache`; `reasons` are requirements that an adapter has found unmet."""
    given = {"q": q, "k_cache": k_cache, "v_cache": v_cache, **_given(options, ARRAY_NAMES)}
    return _pose("attention_with_kv_cache", given, options, "cu_seqlens_q", reasons)


def pose_append(
    k: Any, v: Any, k_cache: Any, v_cache: Any, cu_seqlens: Any, options: CacheOptions, reasons: tuple[str, ...] = ()
) -> tuple[Problem, Operands]:
    """Pose `append_to_kv_cache`, a problem without queries; the operands have an empty q."""
    given = {"k": k, "v": v, "k_cache": k_cache, "v_cache": v_cache, **_given(options, ARRAY_NAMES)}
    if cu_seqlens is not None:
        given["cu_seqlens"] = cu_seqlens
    return _pose("append_to_kv_cache", given, options, "cu_seqlens", reasons)


def _given(options: CacheOptions, names: tuple[str, ...]) -> dict[str, Any]:
    return {name: value for name in names if (value := getattr(options, name)) is not None}


def _pose(
    function: str, given: dict[str, Any], options: CacheOptions, bounds: str, reasons: tuple[str, ...]
) -> tuple[Problem, Operands]:
    requirements = Requirements(function)
    requirements.unmet += reasons
    length = _whole_length(requirements, options.cache_seqlens)
    if length is None and options.cache_seqlens is not None:
        given["cache_seqlens"] = options.cache_seqlens
    mod = traced_mod(requirements, options)
    given |= zip(captured_names(mod), () if mod is None else mod.arrays, strict=True)
    call = read(requirements, given)
    facts = _facts(function, call, options, length is not None, mod)
    stated: Stated = cached_if_plain(_state, facts.types)(facts)
    requirements.unmet += stated.unmet
    requirements.about_type |= stated.about_type
    operands = _operands(call, length, bounds, mod)
    check_overlap(requirements, call)
    if stated.readable and stated.problem is not None:
        check_contents(requirements, stated.problem, operands, bounds)
    requirements.raise_if_unmet(call)
    if stated.unsupported:
        raise UnsupportedError("\n".join([f"{function}: not supported", *(f"  - {x}" for x in stated.unsupported)]))
    assert stated.problem is not None
    return stated.problem, operands


def _whole_length(requirements: Requirements, given: Any) -> int | None:
    """Return cache_seqlens if it is one number for all sequences, else None; 0 for one that is no int32."""
    if given is None or isinstance(given, np.ndarray) or hasattr(given, "__dlpack__"):
        return None
    if not isinstance(given, (int, np.integer)) or isinstance(given, (bool, np.timedelta64)):
        return None
    length = int(given)
    return length if requirements.require(abs(length) <= LONGEST, f"cache_seqlens must be int32, not {length}") else 0


def _operands(call: dict[str, Array], length: int | None, bounds: str, mod: Mod | None) -> Operands:
    """Return the operands of a call, for the arrays that could be read; an append has an empty q."""
    nested: dict[str, Any] = {FIELDS[name]: x for name, x in call.items() if name in FIELDS}
    if length is not None:
        nested["cache_seqlens"] = length
    rows: dict[str, Any] = {"q": call.get("q"), "k": call.get("k_cache"), "v": call.get("v_cache")}
    if rows["q"] is None and "k" in call:
        k = call["k"]
        rows["q"] = empty((0,) * len(k.shape), k.dtype, k)
    named: dict[str, Any] = {name: x for name, x in call.items() if name in OF_BOTH}
    if mod is not None:
        named |= {"captured": tuple(call[x] for x in captured_names(mod) if x in call), "numbers": mod.numbers}
    return Operands(
        **rows,
        cu_seqlens_q=call.get(bounds), cache=CacheOperands(**nested), **named,
    )  # fmt: skip


# Facts


class CacheArrayFacts(NamedTuple):
    """The properties of an Array that the checks of a call on a KV cache need."""

    shape: tuple[int, ...]
    dtype: np.dtype
    device: str
    framework: str
    readonly: bool
    immutable: str  # as in Array
    has_rows: bool  # the last dimension is contiguous
    repeats: bool  # a stride is 0, so several elements share an address
    has_boxes: bool  # a cache that TMA can load


class Facts(NamedTuple):
    """Everything on which a Problem and the checks depend, except the contents of arrays and a common length."""

    function: str
    options: tuple[Any, ...]  # in the order of PLAIN_OPTIONS
    window: Any
    backend: Any
    one_length: bool
    mods: str  # the text; "" without
    types: tuple[type, ...]
    arrays: tuple[tuple[str, CacheArrayFacts], ...]


class Stated(NamedTuple):
    """The result of all checks of facts."""

    problem: Problem | None  # None if the arrays do not agree on the sizes
    readable: bool  # the arrays of indices have the right shapes and dtypes
    unmet: tuple[str, ...]
    about_type: bool
    unsupported: tuple[str, ...]


_plain_of = operator.attrgetter(*PLAIN_OPTIONS)


def _facts(function: str, call: dict[str, Array], options: CacheOptions, one_length: bool, mod: Mod | None) -> Facts:
    plain, window, backend = _plain_of(options), options.window, options.backend
    if backend is None:
        backend = environment.backend()
    sides = window if type(window) is tuple else (window,)
    arrays = []
    for name, x in call.items():
        layout = *_rows_and_repeats(x.shape, x.strides), name in CACHES and has_boxes(x)
        written = x.readonly, x.immutable
        arrays.append((name, CacheArrayFacts(x.shape, x.dtype, x.device, x.framework, *written, *layout)))
    types = tuple(map(type, (*plain, backend, *sides)))
    text = "" if mod is None else mod.text
    return Facts(function, plain, window, backend, one_length, text, types, tuple(arrays))


@lru_cache(maxsize=CACHED)
def _rows_and_repeats(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[bool, bool]:
    """Return whether the last dimension of an array is contiguous, and whether several elements share an address."""
    has_rows = 0 in shape or shape[-1:] == (1,) or strides[-1:] == (1,)
    overlaps = any(stride == 0 and size > 1 for stride, size in zip(strides, shape, strict=True))
    return has_rows, overlaps and 0 not in shape


@lru_cache(maxsize=CACHED)
def _state(facts: Facts) -> Stated:
    requirements = Requirements("")
    arrays, options = dict(facts.arrays), dict(zip(PLAIN_OPTIONS, facts.options, strict=True))
    options["window"] = facts.window
    check_places(requirements, arrays)  # type: ignore[arg-type]  # it reads the fields of ArrayFacts
    layout = options["layout"] if is_one_of(options["layout"], LAYOUTS) else "bshd"
    sizes = _check_caches(requirements, arrays, layout)
    attends = facts.function == "attention_with_kv_cache"
    if sizes is not None:
        check = _check_queries if attends else _check_rows
        sizes = check(requirements, arrays, layout, sizes)
    if attends:
        sizes = _check_longest(requirements, options["max_seqlen_q"], "cu_seqlens_q" in arrays, sizes)
    if sizes is not None and attends and {"k", "v"} & arrays.keys():
        sizes = _check_rows_beside_queries(requirements, arrays, layout, sizes)
    unsupported = _check_what_goes_together(requirements, facts, arrays, attends)
    mods = _check_mods(requirements, facts, arrays, sizes)
    agreed = not requirements.unmet
    readable = sizes is not None and _check_indices(requirements, arrays, sizes) and agreed
    split_size = _check_numbers(requirements, options)
    if sizes is None:
        return Stated(None, False, tuple(requirements.unmet), requirements.about_type, ())
    unsupported += _check_pages(arrays, sizes)
    unsupported += _check_dtypes(requirements, arrays, attends)
    _check_others(requirements, arrays, layout, sizes)
    if "out" in arrays and (arrays["out"].device != "cpu" or facts.backend not in (None, "cpu")):
        requirements.require(arrays["out"].has_rows, "the last dimension of out must be contiguous on a GPU")
    return _with_problem(
        requirements, facts, options, arrays, sizes, layout, readable, tuple(unsupported), mods, split_size
    )


class CacheSizes(NamedTuple):
    """The sizes of a call, on which its arrays agree."""

    blocks: int  # number of pages, or of rows of a contiguous cache
    rows: int  # keys per block
    kv_heads: int
    head_dim: int
    head_dim_v: int
    capacity: int  # maximum keys of a sequence
    batch: int = 0
    q_len: int = 0
    heads: int = 1
    tokens: int = 0  # rows of k, v and slots
    appended: int | None = None
    packed: bool = False


def _axes(shape: tuple[int, ...], layout: str) -> tuple[int, int, int, int]:
    """Return (batch, length, heads, dim) of a shape in a layout."""
    batch, first, second, dim = shape
    return (batch, second, first, dim) if layout == "bhsd" else (batch, first, second, dim)


def _check_caches(requirements: Requirements, arrays: dict[str, Any], layout: str) -> CacheSizes | None:
    if not {"k_cache", "v_cache"} <= arrays.keys():
        return None
    require = requirements.require
    k, v = arrays["k_cache"], arrays["v_cache"]
    axes = "(B, S, Hk, D) or pages (pages, P, Hk, D)" if layout == "bshd" else "(B, Hk, S, D) or (pages, Hk, P, D)"
    requirements.require_type(k.dtype == v.dtype, "k_cache and v_cache must have one dtype")
    for name, cache in (("k_cache", k), ("v_cache", v)):
        # Rows appended to a copy would be lost, and copying a whole cache is too slow anyway.
        require(cache.has_rows, f"the last dimension of {name} must be contiguous: caches are never copied")
    ranked = [require(len(x.shape) == 4, f"{name} must be {axes}") for name, x in (("k_cache", k), ("v_cache", v))]
    if not all(ranked):
        return None
    blocks, rows, kv_heads, head_dim = _axes(k.shape, layout)
    *others, head_dim_v = _axes(v.shape, layout)
    agreed = require([blocks, rows, kv_heads] == others, "k_cache and v_cache must agree in all but the last dimension")
    sized = require(min(kv_heads, head_dim, head_dim_v) > 0, "heads and head dimensions must be at least 1")
    if not (agreed and sized):
        return None
    capacity = rows
    if "block_table" in arrays and len(arrays["block_table"].shape) == 2:
        capacity = rows * arrays["block_table"].shape[1]
    if not require(capacity <= LONGEST, f"a sequence must have at most {LONGEST} keys, and {capacity} fit"):
        return None
    return CacheSizes(blocks, rows, kv_heads, head_dim, head_dim_v, capacity)


def _check_queries(
    requirements: Requirements, arrays: dict[str, Any], layout: str, sizes: CacheSizes
) -> CacheSizes | None:
    if "q" not in arrays:
        return None
    require, q = requirements.require, arrays["q"].shape
    packed = "cu_seqlens_q" in arrays
    axes = "(T, Hq, D)" if packed else {"bshd": "(B, Sq, Hq, D)", "bhsd": "(B, Hq, Sq, D)"}[layout]
    if not require(len(q) == (3 if packed else 4), f"q must be {axes}, not {q}"):
        return None
    batch, q_len, heads, head_dim = (1, *q) if packed else _axes(q, layout)
    if packed:
        batch = max(arrays["cu_seqlens_q"].shape[0] - 1, 0) if arrays["cu_seqlens_q"].shape else 0
    agreed = [
        require(
            head_dim == sizes.head_dim, f"q and k_cache must have one head dimension, not {head_dim}, {sizes.head_dim}"
        ),
        require(
            heads > 0 and heads % sizes.kv_heads == 0,
            f"the {heads} heads of q must be a multiple of the {sizes.kv_heads} heads of the caches",
        ),
        require(q_len <= LONGEST, f"q must have at most {LONGEST} rows, not {q_len}"),
    ]
    if not all(agreed):
        return None
    return sizes._replace(batch=batch, q_len=q_len, heads=heads, packed=packed)


def _check_longest(
    requirements: Requirements, longest: Any, packed: bool, sizes: CacheSizes | None
) -> CacheSizes | None:
    """Return the sizes with max_seqlen_q, which packed queries require and others refuse."""
    if not packed:
        requirements.require(longest is None, "max_seqlen_q is for packed queries, with cu_seqlens_q")
        return sizes
    try:
        length = operator.index(longest)
    except Exception:  # a foreign object may raise anything
        requirements.require_type(False, f"max_seqlen_q must be a whole number with cu_seqlens_q, not {longest!r}")
        return None
    if not requirements.require(0 <= length <= LONGEST, f"max_seqlen_q must be in [0, {LONGEST}], not {length}"):
        return None
    return None if sizes is None else sizes._replace(q_len=length)


def _check_rows(
    requirements: Requirements, arrays: dict[str, Any], layout: str, sizes: CacheSizes
) -> CacheSizes | None:
    """Return the sizes of `append_to_kv_cache` from k and v: a batch, packed tokens, or with slots one sequence."""
    if not {"k", "v"} <= arrays.keys():
        return None
    k, v = arrays["k"].shape, arrays["v"].shape
    packed = "cu_seqlens" in arrays or ("slots" in arrays and len(k) == 3)
    axes = "(T, Hk, D)" if packed else {"bshd": "(B, S, Hk, D)", "bhsd": "(B, Hk, S, D)"}[layout]
    if not requirements.require(len(k) == len(v) == (3 if packed else 4), f"k and v must be {axes}, not {k} and {v}"):
        return None
    batch, rows, *k_rest = (1, *k) if packed else _axes(k, layout)
    *v_first, v_heads, v_dim = (1, *v) if packed else _axes(v, layout)
    expected = ([sizes.kv_heads, sizes.head_dim], [batch, rows, sizes.kv_heads, sizes.head_dim_v])
    reason = f"k and v must agree with each other and in heads and head dimensions with the caches, not {k} and {v}"
    if not requirements.require((k_rest, [*v_first, v_heads, v_dim]) == expected, reason):
        return None
    if "cu_seqlens" in arrays:
        bounds = arrays["cu_seqlens"].shape
        batch = max(bounds[0] - 1, 0) if bounds else 0
    tokens = rows if packed else batch * rows
    return sizes._replace(batch=batch, heads=sizes.kv_heads, tokens=tokens, appended=rows, packed=packed)


def _check_rows_beside_queries(
    requirements: Requirements, arrays: dict[str, Any], layout: str, sizes: CacheSizes
) -> CacheSizes | None:
    """Return the sizes with the rows of k and v, packed if q is; unchanged if k and v do not agree."""
    together = "k" in arrays and "v" in arrays
    if not requirements.require(together, "k and v are appended together: give both or neither"):
        return sizes
    k, v = arrays["k"].shape, arrays["v"].shape
    shapes: tuple[tuple[int, ...], tuple[int, ...]]
    if sizes.packed:
        rows = arrays["q"].shape[0]
        shapes = ((rows, sizes.kv_heads, sizes.head_dim), (rows, sizes.kv_heads, sizes.head_dim_v))
        axes, tokens = "(T, Hk, D)", rows
    else:
        ranked = len(k) == 4
        rows = _axes(k, layout)[1] if ranked else 0
        axes = {"bshd": "(B, S, Hk, D)", "bhsd": "(B, Hk, S, D)"}[layout]
        order = (lambda dim: (sizes.batch, rows, sizes.kv_heads, dim)) if layout == "bshd" else (
            lambda dim: (sizes.batch, sizes.kv_heads, rows, dim)
        )  # fmt: skip
        shapes, tokens = (order(sizes.head_dim), order(sizes.head_dim_v)), sizes.batch * rows
    agreed = [
        requirements.require(shape == expected, f"{name} must be {axes} = {expected}, not {shape}")
        for name, shape, expected in (("k", k, shapes[0]), ("v", v, shapes[1]))
    ]
    return sizes._replace(appended=rows, tokens=tokens) if all(agreed) else sizes


def _check_what_goes_together(
    requirements: Requirements, facts: Facts, arrays: dict[str, Any], attends: bool
) -> list[str]:
    """Check which arguments are given together; return the combinations that are legal but not supported."""
    require = requirements.require
    has_lengths = facts.one_length or "cache_seqlens" in arrays
    appends, by_slots = "k" in arrays and "v" in arrays, "slots" in arrays
    rotates = "rotary_cos" in arrays
    if not attends:
        needs = rotates and "positions" not in arrays
        require(has_lengths or by_slots, "cache_seqlens or slots must say where the rows go")
        if by_slots:
            require(has_lengths == needs, "beside slots, cache_seqlens is for rotary without positions, which needs it")
            require("block_table" not in arrays, "slots say where the rows go: block_table says nothing beside them")
    elif appends:
        require(has_lengths or by_slots, "with k and v, cache_seqlens or slots must say where they go")
    else:
        require(not by_slots, "slots say where k and v go, which are not given")
    require(not (by_slots and "cache_batch_idx" in arrays), "slots and cache_batch_idx do not go together")
    paged, has_rows = "block_table" in arrays, "cache_batch_idx" in arrays
    require(not (paged and has_rows), "cache_batch_idx is for contiguous caches, without block_table")
    require(rotates == ("rotary_sin" in arrays), "rotary_cos and rotary_sin are given together or not at all")
    unsupported = []
    if paged and "cache_leftpad" in arrays:
        unsupported.append("cache_leftpad with block_table; FlashAttention 3 serves it")
    return unsupported + _check_written(requirements, arrays, appends)


def _check_written(requirements: Requirements, arrays: dict[str, Any], appends: bool) -> list[str]:
    """Check the arrays to which a call writes; return the refusals of those whose library has immutable arrays."""
    refusals = []
    for name in (*CACHES, "out") if appends else ("out",):
        if name not in arrays:
            continue
        array, loss = arrays[name], "" if name == "out" else ": rows cannot be appended"
        requirements.require(not array.repeats, f"{name} repeats its elements (a stride of 0){loss}")
        if not array.immutable:
            requirements.require(not array.readonly, f"{name} is read-only{loss}")
        elif name == "out":
            refusals.append(f"{array.immutable} arrays are immutable, and out cannot be written in place")
        else:
            instead = "keep the caches in arrays of another library, such as NumPy or torch"
            if array.immutable == "jax":
                instead = "cupy_flash.adapters.jax.append_to_kv_cache returns new caches"
            refusals.append(
                f"{array.immutable} arrays are immutable, and nothing can be appended to them in place: {instead}"
            )
    return list(dict.fromkeys(refusals))  # one for both caches


def _check_mods(
    requirements: Requirements, facts: Facts, arrays: dict[str, Any], sizes: CacheSizes | None
) -> dict[str, Any]:
    """Return the fields of a Problem for its mods; captured arrays must be as long as the capacity."""
    if not facts.mods:
        return dict(mods="", score_mod=False, mask_mod=False, captured_gradient=())
    from ..mods.ir import parse
    from .mod_checks import check_captured

    program = parse(facts.mods)
    if sizes is not None:
        check_captured(requirements, arrays, program, (sizes.batch, sizes.heads, sizes.capacity, sizes.capacity))
    return dict(
        mods=facts.mods,
        score_mod=program.score is not None,
        mask_mod=program.mask is not None,
        captured_gradient=(False,) * len(program.arrays),
    )


def _check_pages(arrays: dict[str, Any], sizes: CacheSizes) -> list[str]:
    is_power = sizes.rows > 0 and sizes.rows & (sizes.rows - 1) == 0
    if "block_table" not in arrays or is_power:
        return []
    return [f"pages of {sizes.rows} keys, which is no power of two; FlashAttention 3 serves any page size"]


def _check_indices(requirements: Requirements, arrays: dict[str, Any], sizes: CacheSizes) -> bool:
    """Check dtypes and shapes of the arrays of indices; return whether their contents can be checked."""
    before = len(requirements.unmet)
    extents = {"b": sizes.batch, "i": sizes.q_len, "n": sizes.tokens, "t": sizes.tokens}
    for name in ("cu_seqlens_q", "cu_seqlens", "cache_seqlens", "cache_batch_idx", "cache_leftpad", "block_table",
                 "slots", "positions"):  # fmt: skip
        if name not in arrays:
            continue
        array, feature = arrays[name], BY_NAME.get(name, BY_NAME["cu_seqlens_q"])
        if feature.dtypes == ("int32",):
            require_int32(requirements, name, array)
        else:
            requirements.require_type(array.dtype == np.int64, f"{name} must be int64, not {array.dtype.name}")
        if feature.name == "cu_seqlens_q":
            requirements.require(
                len(array.shape) == 1 and array.shape[0] >= 1, f"{name} must be (B + 1,), not {array.shape}"
            )
            continue
        if name == "positions":
            rows = arrays["q"].shape[0] if sizes.packed and "q" in arrays else sizes.tokens
            per_sequence = sizes.q_len if "q" in arrays else sizes.appended
            expected: tuple[int | None, ...] = (rows,) if sizes.packed else (sizes.batch, per_sequence)
            if sizes.appended is not None and not sizes.packed:
                requirements.require(
                    sizes.appended == per_sequence, "with positions, q and k must have one number of rows"
                )
        else:
            expected = tuple(extents.get(axis) for axis in feature.axes[0])
        legal = len(array.shape) == len(expected) and all(
            size is None or size == given for size, given in zip(expected, array.shape, strict=True)
        )
        text = ", ".join("pages" if size is None else str(size) for size in expected) + "," * (len(expected) == 1)
        requirements.require(legal, f"{name} must be ({text}), not {array.shape}")
    if (
        "block_table" not in arrays
        and "cache_batch_idx" not in arrays
        and not ("slots" in arrays and "q" not in arrays)
    ):
        enough = sizes.blocks >= sizes.batch
        requirements.require(enough, f"the caches have {sizes.blocks} rows, and the batch has {sizes.batch} sequences")
    return len(requirements.unmet) == before


def _check_numbers(requirements: Requirements, options: dict[str, Any]) -> int | None:
    """Check rotary_interleaved, causal and split_size, which is returned; check_options checks the others."""
    for name in ("rotary_interleaved", "causal"):
        is_flag = isinstance(options[name], (bool, np.bool_))
        requirements.require_type(is_flag, f"{name} must be True or False, not {options[name]!r}")
    split = options["split_size"]
    if split is None:
        return None
    try:
        size = operator.index(split)
    except Exception:  # a foreign object may raise anything
        requirements.require_type(False, f"split_size must be None or a whole number, not {split!r}")
        return None
    legal = size > 0 and size % SPLIT_UNIT == 0 and not isinstance(split, bool)
    requirements.require(legal, f"split_size must be a positive multiple of {SPLIT_UNIT}, not {split!r}")
    requirements.require(size <= LONGEST, f"split_size must be at most {LONGEST}, not {split!r}")
    return size


def _check_dtypes(requirements: Requirements, arrays: dict[str, Any], attends: bool) -> list[str]:
    """Check the dtypes of rows and caches; return the reason if they are legal but not supported."""
    require_type = requirements.require_type
    name = "q" if attends else "k"
    dtype, cache = arrays[name].dtype, arrays["k_cache"].dtype
    if dtype.name == FP8:
        return [f"{name} of {FP8} with a KV cache; caches of {FP8} are served beside 16-bit {name}"]
    require_type(dtype.name in FLOATING, f"{name} must be {', '.join(FLOATING)}, not {dtype.name}")
    for other in ("k", "v"):
        if other in arrays and other != name:
            given = arrays[other].dtype
            require_type(given == dtype, f"{other} must have the dtype of {name}, {dtype.name}, not {given.name}")
    legal = cache == dtype or (cache.name == FP8 and dtype.itemsize == 2)
    require_type(legal, f"the caches must be {dtype.name}, or {FP8} beside 16-bit {name}, not {cache.name}")
    for descale in ("k_descale", "v_descale"):
        if descale in arrays:
            require_type(cache.name == FP8, f"{descale} is for caches of {FP8}, and these are {cache.name}")
    return []


def _check_others(requirements: Requirements, arrays: dict[str, Any], layout: str, sizes: CacheSizes) -> None:
    """Check rotary tables, mask, descales, out, and the arrays that are options of attention() too."""
    require, require_type = requirements.require, requirements.require_type
    for name in ("rotary_cos", "rotary_sin"):
        if name in arrays:
            table = arrays[name]
            require_type(table.dtype.name in FLOATING, f"{name} must be floating, not {table.dtype.name}")
            legal = len(table.shape) == 2 and 1 <= table.shape[1] <= sizes.head_dim // 2
            require(legal, f"{name} must be (R, rd / 2) with rd up to D = {sizes.head_dim}, not {table.shape}")
    if {"rotary_cos", "rotary_sin"} <= arrays.keys():
        shapes = (arrays["rotary_cos"].shape, arrays["rotary_sin"].shape)
        require(shapes[0] == shapes[1], f"rotary_cos and rotary_sin must have one shape, not {shapes[0]}, {shapes[1]}")
    if "mask" in arrays:
        mask = arrays["mask"]
        require_type(mask.dtype == np.bool_, f"mask must be bool, True = attend, not {mask.dtype.name}")
        require(not sizes.packed, "mask is for padded queries, and these are packed")
        rows = (sizes.batch, sizes.heads, sizes.q_len)
        fits = len(mask.shape) == 4 and mask.shape[2] == sizes.q_len and mask.shape[0] in (1, sizes.batch)
        fits = fits and mask.shape[1] in (1, sizes.heads) and mask.shape[3] <= sizes.capacity
        text = f"(B or 1, Hq or 1, Sq, s), B, Hq, Sq = {rows}, s up to the capacity {sizes.capacity}"
        require(sizes.packed or fits, f"mask must be {text}, not {mask.shape}")
    for name in ("k_descale", "v_descale"):
        if name in arrays:
            descale, shape = arrays[name], (sizes.batch, sizes.kv_heads)
            require_type(descale.dtype == np.float32, f"{name} must be float32, not {descale.dtype.name}")
            require(descale.shape == shape, f"{name} must be (B, Hk) = {shape}, not {descale.shape}")
    if "out" in arrays:
        out, expected = arrays["out"], (*arrays["q"].shape[:-1], sizes.head_dim_v)
        require(out.shape == expected, f"out must be {expected}, not {out.shape}")
        dtype = arrays["q"].dtype
        require_type(out.dtype == dtype, f"out must have the dtype of q, {dtype.name}, not {out.dtype.name}")
    if "q" in arrays:
        names = ("q", "alibi_slopes", "sink")
        known = Sizes(True, sizes.batch, sizes.q_len, sizes.capacity, sizes.heads, sizes.kv_heads, sizes.head_dim)
        check_features(requirements, {name: arrays[name] for name in names if name in arrays}, known)


def _with_problem(
    requirements: Requirements,
    facts: Facts,
    options: dict[str, Any],
    arrays: dict[str, Any],
    sizes: CacheSizes,
    layout: str,
    readable: bool,
    unsupported: tuple[str, ...],
    mods: dict[str, Any],
    split_size: int | None,
) -> Stated:
    """Return the result with its Problem, in which options that are wrong have neutral values."""
    like = arrays["q" if "q" in arrays else "k"]
    named = dict(arrays) | {"q": like}
    shared = {feature.name: feature.default for feature in FEATURES}
    shared |= {name: options[name] for name in SHARED}
    shared["causal"] = bool(options["causal"]) if isinstance(options["causal"], (bool, np.bool_)) else True
    accumulation = np.float64 if like.dtype == np.float64 else np.float32
    settings = check_options(requirements, shared, facts.backend, False, accumulation)
    numbers: dict[str, Any] = dict(settings.numbers)
    if numbers["scale"] is None:
        numbers["scale"] = 1 / math.sqrt(sizes.head_dim)
    rotary = rotary_dtypes = None
    if {"rotary_cos", "rotary_sin"} <= arrays.keys() and len(arrays["rotary_cos"].shape) == 2:
        interleaved = options["rotary_interleaved"]
        rotary = (2 * arrays["rotary_cos"].shape[1], isinstance(interleaved, (bool, np.bool_)) and bool(interleaved))
        rotary_dtypes = (arrays["rotary_cos"].dtype.name, arrays["rotary_sin"].dtype.name)
    cache = Cache(
        layout=layout,
        dtype=arrays["k_cache"].dtype,
        blocks=sizes.blocks,
        page=sizes.rows if "block_table" in arrays else None,
        appended=sizes.appended,
        slots="slots" in arrays,
        rotary=rotary,
        split_size=split_size,
        rotary_dtypes=rotary_dtypes,
    )
    problem = Problem(
        backward=False,
        derivative="",
        tangents=(),
        dtype=like.dtype,
        device=like.device,
        framework=like.framework,
        layout="thd" if sizes.packed else layout,
        batch=sizes.batch,
        q_len=sizes.q_len,
        kv_len=sizes.capacity,
        heads=sizes.heads,
        kv_heads=sizes.kv_heads,
        head_dim=sizes.head_dim,
        head_dim_v=sizes.head_dim_v,
        mask=settings.mask,
        dlse=False,
        aligned=all(arrays[name].has_boxes for name in CACHES if name in arrays),
        empty=0 in like.shape,
        shard=False,
        step=1,
        first_head=0,
        whole_heads=sizes.heads,
        first_batch=0,
        deterministic=False,
        backend=facts.backend,
        engine=options["engine"],
        cache=cache,
        bias_gradient=False,
        **mods,
        **numbers,
        **array_facts(named),
    )
    return Stated(problem, readable, tuple(requirements.unmet), requirements.about_type, unsupported)


# Contents
