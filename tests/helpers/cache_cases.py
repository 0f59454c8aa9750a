"""A call on a KV cache as a record, and its comparison with the formula. The record's repr reproduces a failure."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from cases import DTYPES
from tolerance import assert_matches_reference

import cupy_flash
from cupy_flash import device, reference
from cupy_flash.engines import mma_decode
from cupy_flash.gpu import run_plan
from cupy_flash.measure.checks.references import furthest
from cupy_flash.plan.plan import plan
from cupy_flash.problem.build import pose_with_cache
from cupy_flash.problem.records import CacheOptions, Operands, Problem
from cupy_flash.simulator.run import start

ORDERS = 8  # low-precision runs, which differ in the order of their sums
CACHE_DTYPES = {**DTYPES, "float8_e4m3fn": np.dtype(ml_dtypes.float8_e4m3fn)}


class CacheCall(NamedTuple):
    """Arguments of attention_with_kv_cache: q and the caches in the layout of the case, and the options."""

    q: np.ndarray
    k_cache: np.ndarray
    v_cache: np.ndarray | None
    options: dict[str, Any]

    def copied(self) -> CacheCall:
        """Return the same call with copies of the caches, which keep their strides."""
        return self._replace(k_cache=_copied(self.k_cache), v_cache=_copied(self.v_cache))

    def map(self, function: Callable[[np.ndarray], Any]) -> CacheCall:
        """Return the same call with `function` applied to every array."""
        options = {name: function(x) if isinstance(x, np.ndarray) else x for name, x in self.options.items()}
        return CacheCall(*(None if x is None else function(x) for x in self[:3]), options)

    def in_wider_arrays(self) -> CacheCall:
        """Return the same call with every array in a wider one, which gives it strides of its own."""
        paddings = itertools.count(8, 8)
        return self.map(lambda x: in_a_wider_array(x, next(paddings)))


def in_a_wider_array(x: np.ndarray, padding: int) -> np.ndarray:
    """Return a view, with the contents of x, of an array that is longer in each dimension.

    Elsewhere the array holds NaN, or numbers that are out of bounds as an index. A view of one dimension takes every
    second element.
    """
    filling = {"b": True, "i": 2**30}.get(x.dtype.kind, np.nan)
    step = 2 if x.ndim == 1 else 1
    view = np.full([step * n + padding for n in x.shape], filling, x.dtype)[
        tuple(slice(0, step * n, step) for n in x.shape)
    ]
    view[...] = x
    return view


def _copied(cache):
    if cache is None:
        return None
    base = cache if cache.base is None else cache.base
    same = base.copy(order="K")
    offset = cache.__array_interface__["data"][0] - base.__array_interface__["data"][0]
    return np.ndarray(cache.shape, cache.dtype, same, offset, cache.strides)


@dataclass(frozen=True)
class CacheCase:
    """A call on a cache that holds `lengths` keys. Cache slots that hold no key are NaN."""

    lengths: tuple[int, ...] = (5, 23)
    q_len: int = 1
    appended: int | None = None
    capacity: int = 40
    page: int | None = None
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    head_dim_v: int = 16
    dtype: str = "float32"
    cache_dtype: str | None = None  # None: the dtype of q
    layout: str = "bshd"
    packed: tuple[int, ...] | None = None  # rows per sequence, of q and of k
    slots: bool = False
    rotary: tuple[int, bool] | None = None  # (rotary dimensions, interleaved)
    positions: bool = False
    leftpad: tuple[int, ...] | None = None
    batch_idx: tuple[int, ...] | None = None
    hole: int = -1  # value of unused entries of the block table
    pool: str = "own"  # "interleaved": K and V are views of one array
    one_length: bool = False  # cache_seqlens is passed as an int
    causal: bool = True
    window: tuple[int | None, int | None] | None = None
    scale: float | None = None
    softcap: float | None = None
    alibi: str | None = None  # axes: "h" or "bh"
    sink: bool = False
    mask: str | None = None  # axes: letters of bhqs, or 1; s stands for the last 3 keys
    split_size: int | None = None
    descales: bool = False
    shared: bool = False  # values inside keys: v_cache and v are None
    seed: int = 0

    @property
    def rows(self) -> tuple[int, ...]:
        """Number of appended rows of each sequence."""
        if self.appended is None:
            return (0,) * len(self.lengths)
        return self.packed or (self.appended,) * len(self.lengths)

    def call(self) -> CacheCall:
        """Return the arrays of the case, drawn from a fixed seed."""
        rng = np.random.default_rng([self.seed, 7])
        batch = len(self.lengths)
        tokens = (sum(self.packed) + 2,) if self.packed else (batch, self.q_len)
        q = rng.normal(size=(*tokens, self.heads, self.head_dim))
        blocks, width, table = self._blocks(rng)
        caches = [np.full((blocks, width, self.kv_heads, dim), np.nan) for dim in (self.head_dim, self.head_dim_v)]
        for b, length in enumerate(self.lengths):
            for j in range(length):
                place = (table[b, j // width], j % width) if self.page else (self.batch_idx or range(batch))[b], j
                place = place if self.page is None else place[0]
                for cache in caches:
                    cache[place] = rng.normal(size=cache.shape[2:])
        options: dict[str, Any] = {"cache_seqlens": np.array(self.lengths, np.int32), "causal": self.causal}
        if self.one_length:
            options["cache_seqlens"] = self.lengths[0]
        if self.page:
            options["block_table"] = table
        for name in ("window", "scale", "softcap", "split_size"):
            options[name] = getattr(self, name)
        if self.batch_idx is not None:
            options["cache_batch_idx"] = np.array(self.batch_idx, np.int32)
        if self.leftpad is not None:
            options["cache_leftpad"] = np.array(self.leftpad, np.int32)
            for b, pad in enumerate(self.leftpad):
                for cache in caches:
                    cache[(self.batch_idx or range(batch))[b], :pad] = np.nan
        if self.packed:
            options["cu_seqlens_q"] = np.cumsum([0, *self.packed], dtype=np.int32)
            options["max_seqlen_q"] = max(self.packed)
        if self.appended is not None:
            new = tokens if self.packed else (batch, self.appended)
            options |= {
                name: rng.normal(size=(*new, self.kv_heads, dim))
                for name, dim in (("k", self.head_dim), ("v", self.head_dim_v))
            }
        if self.slots:
            options |= self._by_slots(table, width)
        if self.rotary is not None:
            angles = np.outer(np.arange(self.capacity + 8), 0.7 ** np.arange(self.rotary[0] // 2))
            options |= {"rotary_cos": np.cos(angles), "rotary_sin": np.sin(angles)}
            options["rotary_interleaved"] = self.rotary[1]
        if self.positions:
            options["positions"] = rng.integers(0, self.capacity, tokens).astype(np.int32)
        if self.alibi is not None:
            shape = {"h": (self.heads,), "bh": (batch, self.heads)}[self.alibi]
            options["alibi_slopes"] = rng.uniform(0, 0.5, shape).astype(np.float32)
        if self.sink:
            options["sink"] = rng.normal(size=self.heads)
        if self.mask is not None:
            sizes = {"b": batch, "h": self.heads, "q": self.q_len, "s": 3, "1": 1}
            options["mask"] = np.asarray(rng.random([sizes[axis] for axis in self.mask]) < 0.6)
        if self.descales:
            options |= {
                name: rng.uniform(0.5, 2, (batch, self.kv_heads)).astype(np.float32)
                for name in ("k_descale", "v_descale")
            }
        dtype, cache_dtype = DTYPES[self.dtype], CACHE_DTYPES[self.cache_dtype or self.dtype]
        options |= {
            name: options[name].astype(dtype)
            for name in ("k", "v", "rotary_cos", "rotary_sin", "sink")
            if name in options
        }
        k_cache, v_cache = (cache.astype(cache_dtype) for cache in caches)
        q = q.astype(dtype)
        if self.layout == "bhsd":
            options["layout"] = "bhsd"
            k_cache, v_cache = (np.ascontiguousarray(x.swapaxes(1, 2)) for x in (k_cache, v_cache))
            if not self.packed:
                q = np.ascontiguousarray(q.swapaxes(1, 2))
                options |= {n: np.ascontiguousarray(options[n].swapaxes(1, 2)) for n in ("k", "v") if n in options}
        if self.pool == "interleaved":  # FlashInfer's layout: one pool of shape (blocks, 2, ...)
            both = np.stack([k_cache, v_cache], axis=1)
            k_cache, v_cache = both[:, 0], both[:, 1]
        if self.shared:
            v_cache, options["head_dim_v"] = None, self.head_dim_v
            options.pop("v", None)
        return CacheCall(q, k_cache, v_cache, options)

    def _blocks(self, rng):
        """Return (number of blocks, keys per block, block table or None). Pages are shuffled, and some belong to no
        sequence.
        """
        batch = len(self.lengths)
        if self.page is None:
            return max(self.batch_idx or (batch - 1,)) + 1, self.capacity, None
        columns = -(-self.capacity // self.page)
        used = [-(-(length + rows) // self.page) for length, rows in zip(self.lengths, self.rows, strict=True)]
        pages = rng.permutation(sum(used) + 3)
        table = np.full((batch, columns), self.hole, np.int32)
        for b, count in enumerate(used):
            table[b, :count], pages = pages[:count], pages[count:]
        return sum(used) + 3, self.page, table

    def _by_slots(self, table, width):
        """Return the options slots and cache_seqlens.

        There is a slot per row of k, -1 for padding rows; cache_seqlens then includes the new keys.
        """
        slots = []
        for b, (length, rows) in enumerate(zip(self.lengths, self.rows, strict=True)):
            for j in range(length, length + rows):
                page = b if table is None else int(table[b, j // width])
                slots.append(page * width + j % width)
        if self.packed:
            slots += [-1] * 2
        totals = np.add(self.lengths, self.rows).astype(np.int32)
        return {"slots": np.array(slots, np.int64), "cache_seqlens": totals}


def references(call: CacheCall, dtype: np.dtype) -> list[tuple[np.ndarray, ...]]:
    """Return (out, lse, k_cache, v_cache) in fp64, and the least accurate of several runs of the formula in `dtype`."""
    skipped = ("split_size", "max_seqlen_q")
    options = {name: value for name, value in call.options.items() if name not in skipped}
    with np.errstate(invalid="ignore", over="ignore"):
        run = partial(reference.attention_with_kv_cache, *call[:3], **options)
        exact, worst = run(), run(dtype=dtype)
        for order in range(1, ORDERS):
            worst = tuple(map(furthest, exact, worst, run(dtype=dtype, order=order)))
    return [exact, worst]


def run(call: CacheCall, **options: Any) -> tuple[np.ndarray, ...]:
    """Return (out, lse, k_cache, v_cache) of attention_with_kv_cache."""
    ours = call.copied()
    out, lse = cupy_flash.attention_with_kv_cache(*ours[:3], **ours.options, return_lse=True, **options)
    return out, lse, ours.k_cache, ours.v_cache


def posed(call: CacheCall, **options: Any) -> tuple[Problem, Operands]:
    """Return the problem and operands of a call, with copies of the caches."""
    ours = call.copied()
    return pose_with_cache(*ours[:3], CacheOptions(**ours.options | options))


def run_kernels(
    call: CacheCall, *, arch: str = "sm_80", blocks: int | None = None, rows: int | None = None,
    engine: str = "mma_decode", tma: bool = False, cluster: int = 0, start: Any = start,
    spoil: Callable[[Operands], None] | None = None,
) -> tuple[np.ndarray, ...]:  # fmt: skip
    """Return (out, lse, k_cache, v_cache) of an engine's kernels on the simulator, and the statistics of the call.

    blocks, rows and cluster replace the fields of a decode's planned tile; `tma` adds a producer warp.
    `start` runs the launches, as in `gpu.run_plan`. `spoil` changes the operands after the host has checked them.
    """
    problem, operands = posed(call, backend=f"simulator:{arch}", engine=engine)
    if spoil is not None:
        spoil(operands)
    tile = plan(problem, device.named(arch)).tile
    if rows is not None:
        (tile,) = (x for x in mma_decode.legal_tiles(problem, device.named(arch)) if x.rows == rows)
    if tma:
        legal = mma_decode.choices(problem, device.named(arch))
        tile = next(x for x in legal if x.tma and x.rows == tile.rows)
    if blocks is not None:
        tile = tile._replace(blocks=blocks)
        if getattr(tile, "of_prefix", None) is not None:
            tile = tile._replace(of_prefix=tile.of_prefix._replace(blocks=blocks))
    if cluster:
        tile = tile._replace(cluster=cluster)
    out, lse, *statistics = run_plan.forward(plan(problem, device.named(arch), tile), operands, start)
    v_cache = None if call.v_cache is None else operands.v.numpy()
    return out.numpy(), lse.numpy(), operands.k.numpy(), v_cache, *(x.numpy() for x in statistics)


def check(
    case: CacheCase, results: tuple[np.ndarray, ...] | None = None, *, call: CacheCall | None = None, **options: Any
) -> None:
    """Compare `results` (those of `run` by default) with the formula, and count the cache elements that changed.

    `call` is that of the case, perhaps with other options.
    """
    call, dtype = call or case.call(), DTYPES[case.dtype]
    results, (exact, low) = results or run(call, **options), references(call, dtype)
    accumulation = np.float64 if case.dtype == "float64" else np.float32
    for name, actual, expected, approximate in zip(
        ("out", "lse", "k_cache", "v_cache"), results, exact, low, strict=True
    ):
        if actual is None:
            assert name == "v_cache" and case.shared
            continue
        of = accumulation if name == "lse" else actual.dtype
        assert_matches_reference(actual, expected, approximate, of, f"{name} of {case}")
    for actual, before in zip(results[2:], call[1:3], strict=True):
        if actual is None:
            continue
        rows = np.count_nonzero(call.options["slots"] >= 0) if case.slots else sum(case.rows)
        written = rows * case.kv_heads * before.shape[-1]
        assert np.count_nonzero(actual.view(f"u{actual.itemsize}") != before.view(f"u{actual.itemsize}")) <= written


def assert_append_writes_the_bits_of_the_cpu(call, options, monkeypatch):
    """Assert that the simulator and the CPU append the same bits, and that the append changes the caches."""
    results = []
    for backend in ("cpu", "simulator"):
        monkeypatch.setenv("CUPY_FLASH_BACKEND", backend)
        ours = call.copied()
        cupy_flash.append_to_kv_cache(call.options["k"], call.options.get("v"), *ours[1:3], **options)
        results.append(ours)
    caches = 2 if call.v_cache is None else 3
    for a, b, before in zip(results[0][1:caches], results[1][1:caches], call[1:caches], strict=True):
        assert a.tobytes() == b.tobytes() != before.tobytes()
