"""CPU time of one decode step, compared with torch's SDPA in the same process, on one core.

The baseline is SDPA on queries packed as (B, Hk, group, D), which reads every key once per group and is torch's fastest
form. Times are CPU times of the process, on which other processes have less effect; each is the smallest of ROUNDS.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import cupy_flash

from .implementations import limit_threads
from .report import Table

ROUNDS = 15
PAGE = 16
BASELINE = "SDPA, packed queries"


class Step(NamedTuple):
    """A decode step: one query for each of `batch` sequences, which have `keys` cached keys each."""

    batch: int
    heads: int
    kv_heads: int
    keys: int
    dim: int
    dtype: str = "float32"

    def __str__(self) -> str:
        return f"B {self.batch}, {self.heads}/{self.kv_heads} heads, {self.keys} keys, D {self.dim}, {self.dtype}"


STEPS = (
    Step(1, 32, 8, 4096, 128),
    Step(1, 8, 8, 4096, 64),
    Step(1, 8, 8, 8192, 64),
    Step(4, 64, 8, 2048, 128),
    Step(1, 32, 8, 4096, 128, "bfloat16"),
    Step(1, 32, 8, 4096, 128, "float16"),
    Step(1, 8, 8, 128, 64),
)


def measure(steps: tuple[Step, ...] = STEPS, rounds: int = ROUNDS) -> list[dict[str, Any]]:
    """Return a record per step: its name, and {way to compute it: seconds}."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with limit_threads(1), torch.no_grad():
            return [{"step": str(step), "seconds": _smallest(_ways(step), rounds)} for step in steps]
    finally:
        torch.set_num_threads(threads)


def table(section: list[dict[str, Any]]) -> Table:
    """Return a table with the milliseconds of the baseline, and the other times as multiples of it."""
    names = list(section[0]["seconds"])
    others = [name for name in names if name != BASELINE]
    rows = [
        [row["step"], f"{1e3 * row['seconds'][BASELINE]:.3g} ms"]
        + [f"{row['seconds'][name] / row['seconds'][BASELINE]:.2f}" for name in others]
        for row in section
    ]
    return Table("One step of a decode on a CPU, time over that of SDPA", ["step", BASELINE, *others], rows)


def _ways(step: Step) -> dict[str, Callable[[], Any]]:
    import torch
    from torch.nn import functional

    from cupy_flash.adapters.torch import sdpa

    batch, heads, kv_heads, keys, dim, dtype = step
    torch.manual_seed(0)
    q, k, v = (
        torch.randn(batch, rows, of, dim).to(getattr(torch, dtype))
        for rows, of in ((1, heads), (keys, kv_heads), (keys, kv_heads))
    )
    pool = torch.stack([x.reshape(-1, PAGE, kv_heads, dim) for x in (k, v)], dim=1)
    lengths = torch.full((batch,), keys, dtype=torch.int32)
    table = torch.randperm(batch * keys // PAGE).to(torch.int32)
    pool[table.long()] = pool.clone()
    table = table.reshape(batch, -1)
    packed = q.view(batch, kv_heads, heads // kv_heads, dim)
    qh, kh, vh = (x.transpose(1, 2) for x in (q, k, v))
    cached = cupy_flash.attention_with_kv_cache

    def replaced() -> Any:
        with sdpa():
            return functional.scaled_dot_product_attention(qh, kh, vh, enable_gqa=True)

    return {
        BASELINE: lambda: functional.scaled_dot_product_attention(packed, kh, vh),
        "SDPA, enable_gqa": lambda: functional.scaled_dot_product_attention(qh, kh, vh, enable_gqa=True),
        "SDPA in sdpa()": replaced,
        "contiguous": lambda: cached(q, k, v, cache_seqlens=lengths),
        f"pages of {PAGE}": lambda: cached(q, pool[:, 0], pool[:, 1], cache_seqlens=lengths, block_table=table),
        "split_size 512": lambda: cached(q, k, v, cache_seqlens=lengths, split_size=512),
        "attention": lambda: cupy_flash.attention(q, k, v),
        'attention, engine="cpu"': lambda: cupy_flash.attention(q, k, v, engine="cpu"),
    }


def _smallest(ways: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Return the smallest CPU time of each way to compute a step; samples of the ways are interleaved."""
    best = dict.fromkeys(ways, float("inf"))
    for _ in range(rounds):
        for name, way in ways.items():
            begin = time.process_time()
            way()
            best[name] = min(best[name], time.process_time() - begin)
    return best
