"""Checks the facts of a call on a KV cache, for build.py, by the columns of CACHE_FEATURES.

The Problem has the capacity of the cache, not the lengths. The contents of lengths, tables and positions are not facts:
they are checked at every call if they are in host memory, and never read from a GPU.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

from .checks import ArrayFacts, Length, Requirements, Settings, Sizes, check_dtype, check_features, check_shape
from .features import FLOATING
from .records import CACHE_FEATURES, CACHES, CODES, FP8, INDICES, LONGEST, PREFIXES, SCALES, Cache
from .selection import axes_of_lists

Arrays = dict[str, ArrayFacts]

BY_NAME = {feature.name: feature for feature in CACHE_FEATURES}
ROWS = (BY_NAME["k"], BY_NAME["v"])
# append_to_kv_cache takes the boundaries of packed rows as cu_seqlens.
PER_KEY = [feature for feature in CACHE_FEATURES if feature.per_key]
CHECKED = [feature for feature in CACHE_FEATURES if feature.axes and feature not in (*ROWS, *PER_KEY)]
CHECKED.append(BY_NAME["cu_seqlens_q"]._replace(name="cu_seqlens"))
OWN_AXES = frozenset("prfyz")  # sizes that only one option has


def own_axes(arrays: Arrays) -> dict[str, int]:
    """Return the sizes that one option alone determines: those of a block table and of the rotary tables."""
    pairs = (
        pair
        for feature in CHECKED
        if feature.name in arrays and len(arrays[feature.name].shape) == len(feature.axes[0])
        for pair in zip(feature.axes[0], arrays[feature.name].shape, strict=True)
    )
    return {axis: size for axis, size in pairs if axis in OWN_AXES}


def check_sizes(
    requirements: Requirements, arrays: Arrays, options: Mapping[str, Any], layout: str, on_cache: tuple[bool, bool]
) -> Sizes:
    """Check the caches, q, the appended rows and what is given together; return the sizes on which the arrays agree.

    `on_cache` is as in `build.Facts`.
    """
    attends, one_length = on_cache
    sizes = _check_caches(requirements, arrays, layout)
    if sizes is not None:
        sizes = (_check_queries if attends else _check_rows)(requirements, arrays, layout, sizes)
    if attends:
        sizes = _check_longest(requirements, options["max_seqlen_q"], "cu_seqlens_q" in arrays, sizes)
    if sizes is not None and attends and {"k", "v"} & arrays.keys():
        sizes = _check_rows_beside_queries(requirements, arrays, layout, sizes)
    _check_combination(requirements, arrays, attends, one_length)
    return sizes or Sizes()


def _axes(shape: tuple[int, ...], layout: str) -> tuple[int, int, int, int]:
    """Return (batch, length, heads, dim) of a shape in a layout."""
    batch, first, second, dim = shape
    return (batch, second, first, dim) if layout == "bhsd" else (batch, first, second, dim)


def _check_caches(requirements: Requirements, arrays: Arrays, layout: str) -> Sizes | None:
    if "k_cache" not in arrays:
        return None
    require = requirements.require
    k = arrays["k_cache"]
    v = arrays.get("v_cache", k)  # a call that returns weights has no v_cache
    axes = "(B, S, Hk, D) or pages (pages, P, Hk, D)" if layout == "bshd" else "(B, Hk, S, D) or (pages, Hk, P, D)"
    requirements.require_type(k.dtype == v.dtype, "k_cache and v_cache must have one dtype")
    given = [(name, arrays[name]) for name in CACHES if name in arrays]
    for name, cache in given:
        # Rows appended to a copy would be lost, and copying a whole cache is too slow anyway.
        require(cache.has_rows, f"the last dimension of {name} must be contiguous: caches are never copied")
    ranked = [require(len(x.shape) == 4, f"{name} must be {axes}") for name, x in given]
    if not all(ranked):
        return None
    blocks, rows, kv_heads, head_dim = _axes(k.shape, layout)
    *others, head_dim_v = _axes(v.shape, layout)
    if k.dtype.name == "uint8":  # two numbers of 4 bits
        head_dim, head_dim_v = 2 * head_dim, 2 * head_dim_v
    agreed = require([blocks, rows, kv_heads] == others, "k_cache and v_cache must agree in all but the last dimension")
    sized = require(min(kv_heads, head_dim, head_dim_v) > 0, "heads and head dimensions must be at least 1")
    if not (agreed and sized):
        return None
    own = own_axes(arrays)
    capacity = rows * (own.get("p", 1) + own.get("z", 0))
    if not require(capacity <= LONGEST, f"a sequence must have at most {LONGEST} keys, and {capacity} fit"):
        return None
    return Sizes(
        True, kv_len=capacity, kv_heads=kv_heads, head_dim=head_dim, head_dim_v=head_dim_v, blocks=blocks, rows=rows
    )


def _check_queries(requirements: Requirements, arrays: Arrays, layout: str, sizes: Sizes) -> Sizes | None:
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


def _check_longest(requirements: Requirements, longest: Any, packed: bool, sizes: Sizes | None) -> Sizes | None:
    """Return the sizes with max_seqlen_q, which is required for packed queries and refused for others."""
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


def _check_rows(requirements: Requirements, arrays: Arrays, layout: str, sizes: Sizes) -> Sizes | None:
    """Return the sizes of `append_to_kv_cache` from k and v: a batch, packed tokens, or with slots one sequence."""
    if "v_cache" in arrays and "k" in arrays:
        requirements.require("v" in arrays, "v is None, and v_cache is not: values are inside both keys and caches")
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


def _check_rows_beside_queries(requirements: Requirements, arrays: Arrays, layout: str, sizes: Sizes) -> Sizes:
    """Return the sizes with the rows of k and v, packed if q is; unchanged if k and v do not agree."""
    together = "k" in arrays and "v" in arrays
    if not requirements.require(together, "k and v are appended together: give both or neither"):
        return sizes
    k = arrays["k"].shape
    if sizes.packed:
        rows = tokens = arrays["q"].shape[0]
    else:
        rows = _axes(k, layout)[1] if len(k) == 4 else 0
        tokens = sizes.batch * rows
    layout = "thd" if sizes.packed else layout
    lengths = _lengths(sizes, arrays) | {"n": rows}
    agreed = [check_shape(requirements, feature, arrays[feature.name], lengths, layout) for feature in ROWS]
    return sizes._replace(appended=rows, tokens=tokens) if all(agreed) else sizes


def _lengths(sizes: Sizes, arrays: Arrays) -> dict[str, Length]:
    """Return the legal sizes of the axes in CACHE_FEATURES, by letter."""
    lengths = sizes.lengths | {
        "d": sizes.head_dim, "e": sizes.head_dim_v, "m": sizes.tokens, "c": range(1, LONGEST + 2),
        "p": range(LONGEST + 1), "r": range(2**63), "f": range(1, sizes.head_dim // 2 + 1),
        "s": range(sizes.kv_len + 1), "B": (1, sizes.batch), "H": (1, sizes.heads), "P": sizes.blocks, "R": sizes.rows,
        "y": own_axes(arrays).get("y", 0), "z": range(LONGEST + 1),
    }  # fmt: skip
    if sizes.packed:
        del lengths["i"]
        lengths["t"] = arrays["q"].shape[0] if "q" in arrays else sizes.tokens
    elif "q" not in arrays:
        lengths["i"] = sizes.appended or 0
    return lengths


def _check_combination(requirements: Requirements, arrays: Arrays, attends: bool, one_length: bool) -> None:
    """Check which arguments are given together."""
    require = requirements.require
    has_lengths = one_length or "cache_seqlens" in arrays
    by_slots, rotates = "slots" in arrays, "rotary_cos" in arrays
    if not attends:
        needs = rotates and "positions" not in arrays
        require(has_lengths or by_slots, "cache_seqlens or slots must say where the rows go")
        if by_slots:
            require(has_lengths == needs, "beside slots, cache_seqlens is for rotary without positions, which needs it")
    elif "k" in arrays and "v" in arrays:
        require(has_lengths or by_slots, "with k and v, cache_seqlens or slots must say where they go")
    else:
        require(not by_slots, "slots say where k and v go, which are not given")
    for feature in CACHE_FEATURES:
        for conflict in feature.conflicts:
            if not {feature.name, conflict.other} <= arrays.keys() or (conflict.append and attends):
                continue
            (requirements.unmet if conflict.supported else requirements.unsupported).append(conflict.reason)
    given = [name for name in PREFIXES if name in arrays]
    require(len(given) in (0, len(PREFIXES)), f"{', '.join(PREFIXES)} are given together or not at all")
    require(not given or "block_table" in arrays, f"{', '.join(given)}: prefixes are of pages, with block_table")
    require(rotates == ("rotary_sin" in arrays), "rotary_cos and rotary_sin are given together or not at all")
    _check_written(requirements, arrays)


def _check_written(requirements: Requirements, arrays: Arrays) -> None:
    """Check the arrays to which a call writes; those of a library with immutable arrays are not supported."""
    refusals, appends = requirements.unsupported, "k" in arrays and "v" in arrays
    for name in (*CACHES, *SCALES, "out") if appends else ("out",):
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


def check_arrays(
    requirements: Requirements, arrays: Arrays, settings: Settings, layout: str, sizes: Sizes, on_cpu: bool
) -> bool:
    """Check dtypes, and the shapes of all other arrays; return whether the arrays of indices can be read."""
    require, attends = requirements.require, "q" in arrays
    lengths = _lengths(sizes, arrays)
    if attends:
        tokens = arrays["q"].shape[0] if sizes.packed else None
        lengths |= axes_of_lists(settings, sizes, sizes.packed, tokens)
    wrong = check_features(requirements, CHECKED, arrays, lengths, "thd" if sizes.packed else layout)
    readable = not wrong & {*INDICES, "cu_seqlens"}
    check_features(requirements, PER_KEY, arrays, lengths, layout)
    if "positions" in arrays and not sizes.packed and sizes.appended is not None:
        alike = lengths["i"] == sizes.appended
        readable &= require(alike, "with positions, q and k must have one number of rows")
    addressed = {feature.addresses for feature in CHECKED if feature.name in arrays}
    if "keys" not in addressed and (attends or "rows" not in addressed):  # row b of a cache belongs to sequence b
        enough = sizes.blocks >= sizes.batch
        reason = f"the caches have {sizes.blocks} rows, and the batch has {sizes.batch} sequences"
        readable &= require(enough, reason)
    if {"rotary_cos", "rotary_sin"} <= arrays.keys():
        shapes = (arrays["rotary_cos"].shape, arrays["rotary_sin"].shape)
        require(shapes[0] == shapes[1], f"rotary_cos and rotary_sin must have one shape, not {shapes[0]}, {shapes[1]}")
    _check_dtypes(requirements, arrays, attends)
    if "out" in arrays and not on_cpu:
        require(arrays["out"].has_rows, "the last dimension of out must be contiguous on a GPU")
    return readable


def _check_dtypes(requirements: Requirements, arrays: Arrays, attends: bool) -> None:
    """Check the dtypes of rows and caches."""
    require_type = requirements.require_type
    name = "q" if attends else "k"
    dtype, cache = arrays[name].dtype, arrays["k_cache"].dtype
    if dtype.name == FP8:
        requirements.unsupported.append(
            f"{name} of {FP8} with a KV cache; caches of {FP8} are served beside 16-bit {name}"
        )
        return
    require_type(dtype.name in FLOATING, f"{name} must be {', '.join(FLOATING)}, not {dtype.name}")
    for feature in ROWS:
        if feature.name in arrays:
            check_dtype(requirements, feature, arrays[feature.name], arrays)
    scales = [x for x in SCALES if x in arrays]
    if scales or (cache.name in CODES and cache.name != FP8):
        _check_scales(requirements, arrays, scales)
    else:
        legal = cache == dtype or (cache.name == FP8 and dtype.itemsize == 2)
        require_type(legal, f"the caches must be {dtype.name}, or {FP8} beside 16-bit {name}, not {cache.name}")
    for descale in ("k_descale", "v_descale"):
        if descale in arrays:
            require_type(cache.name == FP8, f"{descale} is for caches of {FP8}, and these are {cache.name}")


def _check_scales(requirements: Requirements, arrays: Arrays, scales: list[str]) -> None:
    """Check which scales and zeros a quantised cache has, and their dtypes."""
    require_type, cache = requirements.require_type, arrays["k_cache"].dtype.name
    if not require_type(cache in CODES, f"{', '.join(scales)}: for caches of {', '.join(CODES)}, not {cache}"):
        return
    of_values = "v_cache" in arrays  # a call that returns weights has none
    needed = SCALES[: 1 + of_values] + SCALES[2 : 3 + of_values] * (cache == "uint8")
    missing = [name for name in needed if name not in arrays]
    requirements.require(not missing, f"caches of {cache} need {', '.join(missing)}")
    zeros = [name for name in scales if name in SCALES[2:] and cache != "uint8"]
    requirements.require(not zeros, f"{', '.join(zeros)}: for caches of uint8, which have two numbers of 4 bits a byte")
    one_dtype = len({arrays[name].dtype for name in scales}) <= 1
    require_type(one_dtype, f"{', '.join(scales)} must have one dtype")


def facts_of_cache(arrays: Arrays, settings: Settings, layout: str, sizes: Sizes) -> Cache:
    """Return the Cache of a call, in which options that are wrong have neutral values."""
    own, rotary = own_axes(arrays), None
    tables = [arrays[name] for name in ("rotary_cos", "rotary_sin") if name in arrays]
    if len(tables) == 2 and "f" in own:
        rotary = (2 * own["f"], bool(settings.others["rotary_interleaved"]))
    return Cache(
        layout=layout,
        dtype=arrays["k_cache"].dtype,
        blocks=sizes.blocks,
        page=sizes.rows if "p" in own else None,
        appended=sizes.appended,
        slots="slots" in arrays,
        rotary=rotary,
        split_size=settings.others["split_size"],
        rotary_dtypes=None if rotary is None else (tables[0].dtype.name, tables[1].dtype.name),
        scale_dtype=arrays["k_scale"].dtype.name if "k_scale" in arrays else None,
        prefix_table=(own["y"], own["z"]) if {"y", "z"} <= own.keys() else None,
    )
