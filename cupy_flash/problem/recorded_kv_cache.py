"""The KV cache of a recorded call, and the arrays with which `tune` repeats the call."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..arrays import named_dtype
from .kv_cache_records import Cache
from .records import FP8

if TYPE_CHECKING:
    from .recorded_call import Trial

Array = np.ndarray[Any, Any]
SEED = 20


def check_fields(name: str, kind: Any, record: Any) -> None:
    """Check that a JSON record is a mapping whose keys are fields of a dataclass; `name` is the record's in errors."""
    if not isinstance(record, Mapping):
        raise TypeError(f"{name} must be a mapping of names to values, not {record!r}")
    names = [field.name for field in fields(kind)]
    unknown = [key for key in record if key not in names]
    if unknown:
        raise ValueError(f"{name} has no field {', '.join(map(repr, unknown))}; the fields are {', '.join(names)}")


@dataclass(frozen=True)
class CacheTrial:
    """The facts of a KV cache, without lengths: the caches are as full as their capacity and their pages permit."""

    page: int | None = None  # keys per page; None for a contiguous cache
    blocks: int | None = None  # pages of the pool; None for as many as full sequences need
    appended: int | None = None  # rows of k per sequence; with packed queries any number means one per query
    slots: bool = False
    rotary: int = 0  # rotated dimensions
    rotary_interleaved: bool = True
    fp8: bool = False  # caches of float8_e4m3fn

    def __post_init__(self) -> None:
        wrong = []
        for name, least in (("page", 1), ("blocks", 1), ("appended", 0), ("rotary", 0)):
            size = getattr(self, name)
            optional = size is None and name != "rotary"
            if not optional and (type(size) is not int or not least <= size < 2**31):
                wrong.append(f"{name} of the cache must be a whole number of at least {least}, not {size!r}")
        for name in ("slots", "rotary_interleaved", "fp8"):
            if not isinstance(getattr(self, name), bool):
                wrong.append(f"{name} of the cache must be True or False, not {getattr(self, name)!r}")
        if not wrong and self.page is not None and self.page & (self.page - 1):
            wrong.append(f"page of the cache must be a power of two, not {self.page}")
        if not wrong and self.slots and self.appended is None:
            wrong.append("slots of the cache are for appended rows")
        if wrong:
            raise ValueError("; ".join(wrong))

    @classmethod
    def of(cls, record: Any) -> CacheTrial:
        """Make the CacheTrial of a JSON record; ValueError or TypeError for an invalid record."""
        check_fields("cache", cls, record)
        return cls(**record)

    @classmethod
    def of_cache(cls, cache: Cache, packed: bool) -> CacheTrial:
        """Make the CacheTrial of a call's Cache."""
        blocks = None if cache.page is None else cache.blocks
        appended = cache.appended if cache.appended is None or not packed else 1
        rotary, interleaved = cache.rotary or (0, True)
        return cls(cache.page, blocks, appended, cache.slots, rotary, interleaved, cache.dtype.name == FP8)

    def __str__(self) -> str:
        words = ["a contiguous cache" if self.page is None else f"a cache of pages of {self.page}"]
        words += [f"{FP8} keys"] if self.fp8 else []
        words += [] if self.appended is None else ["append by slots" if self.slots else "append"]
        words += [f"rotary of {self.rotary} dimensions"] if self.rotary else []
        return ", ".join(words)


class CacheCall(NamedTuple):
    """The arrays of a call on a KV cache and the options of `attention_with_kv_cache`."""

    q: Any
    k_cache: Any
    v_cache: Any
    options: dict[str, Any]


def cache_call(trial: Trial, cache: CacheTrial) -> CacheCall:
    """Return the call with random normal NumPy arrays, on caches that are as full as possible."""
    rng = np.random.default_rng(SEED)
    dtype = named_dtype(trial.dtype)
    dims = trial.head_dim, trial.head_dim_v or trial.head_dim

    def normal(*shape: int) -> Array:
        return rng.standard_normal(shape, np.float32).astype(dtype)

    page = cache.page or trial.kv_len
    columns = -(-trial.kv_len // page)
    blocks = cache.blocks or trial.batch * columns
    k_cache, v_cache = (normal(blocks, page, trial.kv_heads, dim) for dim in dims)
    if cache.fp8:
        k_cache, v_cache = (x.astype(named_dtype(FP8)) for x in (k_cache, v_cache))
    rows = falling(trial.q_len, trial.batch) if trial.packed else np.full(trial.batch, trial.q_len)
    lengths = np.full(trial.batch, min(columns * page, blocks * page // trial.batch))
    heads = replace(trial, kv_len=min(trial.q_len, trial.kv_len))  # a mask covers the last keys (drafted tokens)
    options: dict[str, Any] = {name: heads.option(name, rng, dtype) for name in trial.options}
    options |= dict(causal=bool(trial.causal), window=trial.window)
    # The order of pages does not matter; with a small pool, sequences share pages.
    table = rng.permutation(blocks)[np.arange(trial.batch * columns) % blocks].reshape(trial.batch, columns)
    if cache.page is not None:
        options["block_table"] = table.astype(np.int32)
    q = normal(trial.batch, trial.q_len, trial.heads, dims[0])
    if cache.appended is not None:
        appended = rows if trial.packed else np.full(trial.batch, cache.appended)
        new = [normal(trial.batch, int(appended.max()), trial.kv_heads, dim) for dim in dims]
        options |= {name: pack(x, appended) if trial.packed else x for name, x in zip("kv", new, strict=True)}
        if cache.slots:
            places = [np.arange(end - count, end) for end, count in zip(lengths, appended, strict=True)]
            slots = [table[b, j // page] * page + j % page for b, j in enumerate(places)]
            options["slots"] = np.concatenate(slots).astype(np.int64)
        else:
            lengths = lengths - appended
    options["cache_seqlens"] = lengths.astype(np.int32)
    if cache.rotary:
        angles = np.arange(columns * page)[:, None] * np.logspace(0, -4, cache.rotary // 2, dtype=np.float32)
        options |= dict(rotary_cos=np.cos(angles).astype(np.float32), rotary_sin=np.sin(angles).astype(np.float32))
        options["rotary_interleaved"] = cache.rotary_interleaved
    if trial.packed:
        q = pack(q, rows)
        options |= dict(cu_seqlens_q=np.cumsum([0, *rows], dtype=np.int32), max_seqlen_q=trial.q_len)
    options["layout"] = trial.layout
    if trial.layout == "bhsd":
        k_cache, v_cache = (np.ascontiguousarray(x.swapaxes(1, 2)) for x in (k_cache, v_cache))
        for name in () if trial.packed or cache.appended is None else ("k", "v"):
            options[name] = np.ascontiguousarray(options[name].swapaxes(1, 2))
        q = q if trial.packed else np.ascontiguousarray(q.swapaxes(1, 2))
    return CacheCall(q, k_cache, v_cache, options)


def falling(length: int, batch: int) -> Array:
    """Return the lengths of the sequences of a packed batch, decreasing from `length` to about half of it."""
    lengths: Array = np.maximum(length - np.arange(batch) * (length // (2 * batch)), 1)
    return lengths


def pack(x: Array, lengths: Array) -> Array:
    """Pack padded (B, S, ...) into (T, ...)."""
    return np.concatenate([row[:length] for row, length in zip(x, lengths, strict=True)])
