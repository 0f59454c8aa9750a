"""Calls on pages with prefixes that sequences share, and the same calls without them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from cache_cases import CacheCall
from cases import DTYPES

PAGE, HEADS, KV_HEADS, DIM = 8, 4, 2, 16


def calls(
    prefixes: Sequence[int], own: Sequence[int], rows: int | Sequence[int], groups: Sequence[int], *,
    page: int = PAGE, dim: int = DIM, dtype: str = "float32", **options: Any,
) -> tuple[CacheCall, CacheCall]:  # fmt: skip
    """Return a call with prefixes that appends, and that on contiguous caches with a copy of the prefix each.

    `rows` is the number of new rows of every sequence, or that of each of a packed batch, which has one row more.
    With `head_dim_v` values are inside keys.
    """
    rng, packed = np.random.default_rng(6), not isinstance(rows, int)
    batch, longest = len(own), rows if isinstance(rows, int) else max(rows)
    columns, of_prefix = -(-(max(own) + longest) // page) + 1, -(-max(prefixes) // page) + 1
    pages = rng.permutation(len(prefixes) * of_prefix + batch * columns).astype(np.int32)
    table, own_table = (
        part.reshape(count, -1)
        for part, count in zip(np.split(pages, [len(prefixes) * of_prefix]), (len(prefixes), batch), strict=True)
    )
    pools = rng.normal(size=(2, len(pages), page, KV_HEADS, dim)).astype(DTYPES[dtype])
    whole = np.full((2, batch, (of_prefix + columns) * page, KV_HEADS, dim), np.nan, DTYPES[dtype])
    lengths = []
    for b, group in enumerate(groups):
        before = prefixes[group] if group >= 0 else 0
        whole[:, b, :before] = pools[:, table[group]].reshape(2, -1, KV_HEADS, dim)[:, :before]
        keys = pools[:, own_table[b]].reshape(2, -1, KV_HEADS, dim)[:, : own[b]]
        whole[:, b, before : before + own[b]] = keys
        lengths.append(before + own[b])
    tokens = (batch, rows) if isinstance(rows, int) else (sum(rows) + 1,)
    q, k, v = (rng.normal(size=(*tokens, h, dim)).astype(DTYPES[dtype]) for h in (HEADS, KV_HEADS, KV_HEADS))
    options |= {"k": k, "v": v}
    if packed:
        options |= {"cu_seqlens_q": np.cumsum([0, *rows]).astype(np.int32), "max_seqlen_q": longest}
    of_groups = {
        "block_table": own_table, "cache_seqlens": np.array(own, np.int32), "prefix_table": table,
        "prefix_lengths": np.array(prefixes, np.int32), "prefix_group": np.array(groups, np.int32),
    }  # fmt: skip
    unshared = {"cache_seqlens": np.array(lengths, np.int32)}
    if "head_dim_v" in options:
        del options["v"]
        return CacheCall(q, pools[0], None, options | of_groups), CacheCall(q, whole[0], None, options | unshared)
    return CacheCall(q, *pools, options | of_groups), CacheCall(q, *whole, options | unshared)


def pools_after(call: CacheCall) -> list[np.ndarray]:
    """Return copies of the caches of a call, with its rows, which are not rotated, on the pages of their sequences."""
    pools = [x.copy() for x in call[1:3] if x is not None]
    page, table = pools[0].shape[1], call.options["block_table"]
    for pool, name in zip(pools, "kv", strict=False):
        for b, length in enumerate(call.options["cache_seqlens"]):
            for i, row in enumerate(call.options[name][b]):
                pool[table[b, (length + i) // page], (length + i) % page] = row
    return pools


# {name: options of a call}; the rotary tables reach position 200
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": dict(window=(12, 0), softcap=3.0),
    "alibi-and-mask": dict(
        alibi_slopes=np.full(HEADS, 0.1, np.float32), mask=np.random.default_rng(1).random((3, 1, 2, 9)) < 0.7
    ),
    "rotary": dict(
        zip(("rotary_cos", "rotary_sin"), np.random.default_rng(2).normal(size=(2, 200, 4)).astype("f4"), strict=True)
    ),
    "mods": dict(score_mod=lambda s, b, h, i, j: s + 0.01 * (i - j) * (b + 1), mask_mod=lambda b, h, i, j: j % 3 != 1),
}
