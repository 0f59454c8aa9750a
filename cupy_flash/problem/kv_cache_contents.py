"""Reads and checks the index arrays of a KV cache call in host memory: rows, keys and positions of its sequences.

Sequence b has n_b keys before the call, appends s_b rows and then sees L_b = n_b + s_b keys. Query i of Sq has position
L_b - Sq + i, appended key i position n_b + i. With slots the rows may be stored anywhere: cache_seqlens then counts all
keys, s_b is 0, and the rows of k are the last keys of their sequence.
"""

from __future__ import annotations

import operator
from functools import lru_cache
from types import SimpleNamespace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ..arrays import CACHED, Array
from .records import CACHES, FIELDS, INDICES, LONGEST, SCALES, Cache, CacheOperands, Operands, Problem

if TYPE_CHECKING:
    from typing import TypeAlias

    import numpy.typing as npt  # its import takes milliseconds

    from .checks import Requirements

    Integers: TypeAlias = npt.NDArray[np.int64]

ROWS = ("q", "k", "v")
OVERLAP_WORK = 10_000  # maximum steps of NumPy's search for a common element of two arrays
SHOWN = 8  # maximum entries of an array that an error lists
indices_of = operator.attrgetter(*(field for name, field in FIELDS.items() if name in INDICES))  # of CacheOperands


class Spans(NamedTuple):
    """The lengths of each sequence, int64 (B,)."""

    q_rows: Integers
    k_rows: Integers  # rows of k
    before: Integers  # n_b: keys in the cache before the call
    appended: Integers  # s_b: keys that the call appends; 0 with slots
    prefix: Integers  # keys of the shared prefix, which come before

    @property
    def own_lengths(self) -> Integers:
        """The number of keys on each sequence's own pages after the append."""
        return self.before + self.appended

    @property
    def kv_lengths(self) -> Integers:
        """L_b, the number of keys of each sequence after the append, with its prefix."""
        return self.prefix + self.own_lengths

    @property
    def q_starts(self) -> Integers:
        """The index of each sequence's first row among all queries."""
        return np.cumsum(self.q_rows) - self.q_rows


def read_spans(problem: Problem, operands: Operands) -> Spans:
    """Return the lengths of the sequences of a call."""
    cache, given = problem.cache, operands.cache
    assert cache is not None and given is not None
    none = _equal(problem.batch, 0)
    if operands.cu_seqlens_q is not None:
        bounds = operands.cu_seqlens_q.numpy().astype(np.int64)
        q_rows = k_rows = bounds[1:] - bounds[:-1]
    else:
        q_rows, k_rows = _equal(problem.batch, problem.q_len), _equal(problem.batch, cache.appended or 0)
    if operands.q.shape[-1] == 0:  # an append has no queries
        q_rows = none
    if given.k_new is None:
        k_rows = none
    lengths = given.cache_seqlens
    if isinstance(lengths, Array):
        before = lengths.numpy().astype(np.int64)
    else:
        before = _equal(problem.batch, problem.kv_len - cache.prefix if lengths is None else lengths)
    return Spans(q_rows, k_rows, before, none if cache.slots else k_rows, _prefixes(given, none))


def _prefixes(given: CacheOperands, none: Integers) -> Integers:
    """Return the length of each sequence's prefix; 0 for a group that does not exist, which is an error."""
    if given.prefix_lengths is None or given.prefix_group is None:
        return none
    lengths, groups = given.prefix_lengths.numpy().astype(np.int64), given.prefix_group.numpy()
    exists = (groups >= 0) & (groups < len(lengths))
    return np.where(exists, np.append(lengths, 0)[np.where(exists, groups, -1)], 0)


@lru_cache(maxsize=16)
def _equal(batch: int, length: int) -> Integers:
    """Return the lengths of a batch whose sequences have one length, int64 (B,), read-only because it is shared."""
    lengths = np.full(batch, length, np.int64)
    lengths.flags.writeable = False
    return lengths


def positions_of_queries(problem: Problem, operands: Operands, spans: Spans) -> Integers:
    """Return the position by which each query is rotated, int64, for all sequences concatenated.

    A query before the first key of its sequence has position 0; if causal, it sees no key.
    """
    assert operands.cache is not None
    if operands.cache.positions is not None:
        return operands.cache.positions.numpy().ravel()[: spans.q_rows.sum()].astype(np.int64)
    return np.maximum(_ranges(spans.kv_lengths - spans.q_rows, spans.q_rows), 0)


def positions_of_keys(problem: Problem, operands: Operands, spans: Spans) -> Integers:
    """Return the position by which each appended key is rotated, int64, for all sequences concatenated."""
    assert operands.cache is not None
    if operands.cache.positions is not None:
        return operands.cache.positions.numpy().ravel()[: spans.k_rows.sum()].astype(np.int64)
    return np.maximum(_ranges(spans.kv_lengths - spans.k_rows, spans.k_rows), 0)


def appended_places(problem: Problem, operands: Operands, spans: Spans) -> tuple[Integers, Integers]:
    """Return (block, row in the block) of each appended row, int64, sequences concatenated; block -1 drops a row.

    A block is a page, or the cache of one sequence.
    """
    cache, given = problem.cache, operands.cache
    assert cache is not None and given is not None
    if given.slots is not None:
        slots = given.slots.numpy()
        rows = operands.k.shape[2 if cache.layout == "bhsd" else 1]
        return np.where(slots < 0, -1, slots // rows), slots % rows
    sequences = np.repeat(np.arange(problem.batch), spans.k_rows)
    keys = _ranges(spans.before, spans.k_rows)
    if given.block_table is not None and cache.page is not None:
        return given.block_table.numpy()[sequences, keys // cache.page].astype(np.int64), keys % cache.page
    if given.cache_batch_idx is not None:
        sequences = given.cache_batch_idx.numpy().astype(np.int64)[sequences]
    return sequences, keys


def places_of_sequences(problem: Problem, operands: Operands) -> list[np.ndarray | tuple[int, int]]:
    """Return for each sequence the (block, row) of its first key, or with pages the array of its blocks."""
    given = operands.cache
    assert given is not None
    if given.block_table is not None:
        return list(given.block_table.numpy())
    blocks = range(problem.batch) if given.cache_batch_idx is None else given.cache_batch_idx.numpy().tolist()
    return [(block, 0) for block in blocks]


def _ranges(starts: Integers, lengths: Integers) -> Integers:
    """Return the concatenated ranges start, start + 1, ... of these lengths."""
    before = np.cumsum(lengths) - lengths
    ranges: Integers = np.arange(lengths.sum()) + np.repeat(starts - before, lengths)
    return ranges


# Checks


def check_overlap(requirements: Requirements, call: dict[str, Array]) -> None:
    """Check that no array overlaps a cache that the append changes, and that `out` overlaps no array that is read.

    Scales may lie between the codes of their keys, but share no byte with them.
    For the two caches only the first elements are compared: one array as both caches is an error, but overlapping views
    that start at different addresses are not detected. jax arrays are not checked: XLA assigns their memory, and they
    have none while jax traces.
    """
    for name, other, low, high in distances(call):
        a, b = call[name], call[other]
        if not low < b.pointer - a.pointer < high:
            continue
        if (name, other) == CACHES:
            requirements.require(
                not _has_own_memory(a),
                "k_cache and v_cache start at one address: rows of k and v would overwrite each other",
            )
        elif _share_an_element(a, b):
            requirements.require(False, f"{name} overlaps {other} in memory")


def distances(call: dict[str, Array]) -> list[tuple[str, str, int, int]]:
    """Return (name, other, low, high) for each pair of arrays of which a call writes to one, or a cache and a scale.

    They may overlap only if low < address of `other` - address of `name` < high.
    """
    appends, scales = "k" in call, tuple([name for name in SCALES if name in call])
    if not appends and "out" not in call and not scales:
        return []
    names = (*CACHES, *ROWS, *scales, "out")
    extents = {name: _extent(call[name]) for name in names if name in call and 0 not in call[name].shape}
    pairs = []
    for name, (first, end) in extents.items():
        others: tuple[str, ...] = ()
        if name == "out":
            others = (*CACHES, *ROWS, *scales)
        elif name in scales:
            others = (*CACHES, *scales[: scales.index(name)]) if appends else CACHES
        elif appends and name in ROWS:
            others = (*CACHES, *scales)
        for other in others:
            if other in extents:
                other_first, other_end = extents[other]
                pairs.append((name, other, first - other_end, end - other_first))
    if appends and extents.keys() >= set(CACHES):
        pairs.append((*CACHES, -1, 1))
    return pairs


def _has_own_memory(array: Array) -> bool:
    return array.framework not in ("jax", "xla")


def _share_an_element(a: Array, b: Array) -> bool:
    """Return whether two arrays whose addresses overlap share an element; False if the search takes too long."""
    if a.device != b.device or not _has_own_memory(a):
        return False
    try:
        shared: bool = np.shares_memory(_addresses(a), _addresses(b), max_work=OVERLAP_WORK)  # type: ignore[arg-type]
    except np.exceptions.TooHardError:
        return False
    return shared


@lru_cache(maxsize=CACHED)
def _span(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, int]:
    """Return the offsets from element [0, 0, ...] of the lowest element in memory and of the end of the highest."""
    steps = [stride * (size - 1) for stride, size in zip(strides, shape, strict=True)]
    return sum(min(step, 0) for step in steps), sum(max(step, 0) for step in steps) + 1


def _extent(array: Array) -> tuple[int, int]:
    """Return the offsets in bytes, from the address of an array, of its first element and of the end of its last."""
    first, end = _span(array.shape, array.strides)
    return first * array.dtype.itemsize, end * array.dtype.itemsize


def _addresses(array: Array) -> np.ndarray:
    """Return a NumPy array at an array's addresses. They may belong to a GPU, so its elements must not be accessed."""
    size = array.dtype.itemsize
    holder = SimpleNamespace(
        __array_interface__={
            "version": 3,
            "typestr": f"|V{size}",
            "data": (array.pointer, True),
            "shape": array.shape,
            "strides": tuple(stride * size for stride in array.strides),
        }
    )
    return np.asarray(holder)


def check_contents(requirements: Requirements, problem: Problem, operands: Operands, bounds: str) -> None:
    """Check index arrays in host memory. Those on a GPU are not read here; kernels clamp their values."""
    cache, given = problem.cache, operands.cache
    assert cache is not None and given is not None
    indices = (operands.cu_seqlens_q, *indices_of(given))
    if operands.q.device != "cpu" or any(isinstance(x, Array) and x.device != "cpu" for x in indices):
        return
    require = requirements.require
    tokens = operands.q.shape[0] if given.k_new is None else given.k_new.shape[0]
    if operands.cu_seqlens_q is not None and not _check_bounds(requirements, operands.cu_seqlens_q, bounds, tokens):
        return
    spans = read_spans(problem, operands)
    if bounds == "cu_seqlens_q" and operands.cu_seqlens_q is not None and problem.batch:
        longest = int(spans.q_rows.max())
        require(longest <= problem.q_len, f"max_seqlen_q is {problem.q_len}, but a sequence has {longest} tokens")
    keys = problem.kv_len - cache.prefix
    capacity = str(keys)
    if given.block_table is not None and cache.page is not None:
        capacity += f", {given.block_table.shape[1]} columns of block_table with pages of {cache.page} keys"
    wrong = np.flatnonzero((spans.before < 0) | (spans.own_lengths > keys)).tolist()
    for b in wrong[:SHOWN]:
        before = f" before {spans.appended[b]} appended rows" if spans.appended[b] else ""
        require(False, f"cache_seqlens[{b}] is {spans.before[b]}{before}, and the capacity is {capacity}")
    if given.cache_batch_idx is not None:
        _check_range(requirements, "cache_batch_idx", given.cache_batch_idx.numpy(), 0, cache.blocks - 1)
    if given.cache_leftpad is not None:
        _check_range(requirements, "cache_leftpad", given.cache_leftpad.numpy(), 0, problem.kv_len)
    if given.slots is not None:
        rows = operands.k.shape[2 if cache.layout == "bhsd" else 1]
        _check_range(requirements, "slots", given.slots.numpy(), None, cache.blocks * rows - 1)
    if given.prefix_group is not None and given.prefix_lengths is not None:
        groups = given.prefix_lengths.shape[0]
        _check_range(requirements, "prefix_group", given.prefix_group.numpy(), -1, groups - 1)
        _check_range(requirements, "prefix_lengths", given.prefix_lengths.numpy(), 0, cache.prefix)
    if requirements.unmet:
        return
    if given.block_table is not None:
        _check_table(requirements, cache, "block_table", given.block_table, spans.own_lengths)
    if given.prefix_table is not None and given.prefix_lengths is not None:
        _check_table(requirements, cache, "prefix_table", given.prefix_table, given.prefix_lengths.numpy())
    if given.rotary_cos is not None and cache.rotary is not None:
        _check_positions(requirements, problem, operands, spans)
    elif given.positions is not None and problem.mods:
        _check_range(requirements, "positions", given.positions.numpy(), 0, problem.kv_len - 1)
    if given.k_new is not None and not requirements.unmet:
        block, row = appended_places(problem, operands, spans)
        rows = operands.k.shape[2 if cache.layout == "bhsd" else 1]
        flat = (block * rows + row)[block >= 0]
        places, counts = np.unique(flat, return_counts=True)
        several = counts > 1
        for place, count in zip(places[several][:SHOWN].tolist(), counts[several][:SHOWN].tolist(), strict=True):
            require(False, f"{count} rows are appended to row {place % rows} of block {place // rows}")


def longest_length(problem: Problem, operands: Operands) -> int | None:
    """Return the largest cache_seqlens for which `check_contents` finds nothing wrong, if it is a number, else None.

    Nothing else must be wrong, as an index in host memory may be.
    """
    cache, given = problem.cache, operands.cache
    assert cache is not None and given is not None
    if not isinstance(given.cache_seqlens, int):
        return None
    if operands.q.device != "cpu":
        return LONGEST
    rows = problem.kv_len if given.rotary_cos is None else min(problem.kv_len, given.rotary_cos.shape[0])
    return rows - (cache.appended or 0)


def _check_bounds(requirements: Requirements, array: Array, name: str, tokens: int) -> bool:
    values = array.numpy().astype(np.int64)
    starts = requirements.require(values[0] == 0, f"{name} must start at 0, not {values[0]}")
    rises = requirements.require(bool((np.diff(values) >= 0).all()), f"{name} must not decrease")
    fits = requirements.require(values[-1] <= tokens, f"{name} ends at {values[-1]}, past the {tokens} tokens given")
    return starts and rises and fits


def _check_range(requirements: Requirements, name: str, values: np.ndarray, low: int | None, high: int) -> None:
    wrong = values > high if low is None else (values < low) | (values > high)
    for b in np.flatnonzero(wrong.ravel())[:SHOWN].tolist():
        interval = f"at most {high}" if low is None else f"in [{low}, {high}]"
        requirements.require(False, f"{name}[{b}] is {values.ravel()[b]} and must be {interval}")


def _check_table(requirements: Requirements, cache: Cache, name: str, array: Array, lengths: np.ndarray) -> None:
    """Check the entries of a table that the keys of its rows use."""
    assert cache.page is not None
    table = array.numpy()
    used = np.arange(table.shape[1]) * cache.page < lengths[:, None]
    for b, column in np.argwhere(used & ((table < 0) | (table >= cache.blocks)))[:SHOWN].tolist():
        reason = f"{name}[{b}, {column}] is {table[b, column]}, and the pool has {cache.blocks} pages"
        requirements.require(False, reason)


def _check_positions(requirements: Requirements, problem: Problem, operands: Operands, spans: Spans) -> None:
    """Check that every position that is rotated has a row in the rotary tables."""
    given = operands.cache
    assert given is not None and given.rotary_cos is not None
    table = given.rotary_cos.shape[0]
    if given.positions is not None:
        last = table - 1 if not problem.mods else min(table, problem.kv_len) - 1
        _check_range(requirements, "positions", given.positions.numpy(), 0, last)
        return
    positions = [positions_of_queries(problem, operands, spans)]
    if given.k_new is not None:
        positions.append(positions_of_keys(problem, operands, spans))
    last = max((int(x.max()) for x in positions if x.size), default=-1)
    requirements.require(last < table, f"rotary_cos has {table} rows, and position {last} is rotated")
