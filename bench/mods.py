"""Times of score_mods and mask_mods, compared with built-in options and on a GPU with FlexAttention.

Samples alternate in one process, and a ratio is the median of the ratios within a round, so that a disturbance of the
machine affects both times.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

import cupy_flash

from .report import Table

BATCH, HEADS, HEAD_DIM = 1, 4, 64
LENGTH = {"cpu": 2048, "cuda": 8192}
WINDOW = 256
ROUNDS = 15
OURS, BUILT_IN, FLEX, FLEX_WITH_MASK = "mod", "built in", "FlexAttention", "FlexAttention with its block mask"

Seconds = dict[str, list[float]]


def mods_of(length: int, device: str) -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    """Return {mod: (options with the mod, built-in options for the same attention, {} if there are none)}."""
    import torch

    slopes = torch.tensor([2.0 ** -(2 * h) for h in range(1, HEADS + 1)], device=device)
    table = torch.linspace(-1, 1, HEADS * 257, device=device).reshape(HEADS, 257)
    ids = torch.arange(length, device=device) // (length // 8)

    def document(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return (ids[q] == ids[kv]) & (q >= kv)

    return {
        "causal": (dict(mask_mod=lambda b, h, q, kv: q >= kv), dict(causal=True)),
        "sliding window": (
            dict(mask_mod=lambda b, h, q, kv: (q >= kv) & (q - kv <= WINDOW)),
            dict(causal=True, window=(WINDOW, 0)),
        ),
        "document": (dict(mask_mod=document), {}),
        "ALiBi": (
            dict(score_mod=lambda s, b, h, q, kv: s - slopes[h] * abs(q - kv)),
            dict(alibi_slopes=slopes),
        ),
        "softcap": (dict(score_mod=lambda s, b, h, q, kv: 20 * torch.tanh(s / 20)), dict(softcap=20.0)),
        "relative table": (dict(score_mod=lambda s, b, h, q, kv: s + table[h, (q - kv).clamp(-128, 128) + 128]), {}),
    }


def measure(device: str, rounds: int = ROUNDS, length: int | None = None) -> dict[str, Any]:
    """Measure forwards on "cpu" (float32) or "cuda" (bfloat16); "seconds" is {mod: {call: seconds of each round}}."""
    import torch

    length = length or LENGTH[device]
    generator = torch.Generator().manual_seed(0)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    q, k, v = (
        torch.randn(BATCH, length, HEADS, HEAD_DIM, generator=generator).to(device, dtype) for _ in range(3)
    )  # fmt: skip
    results: dict[str, Any] = {}
    for name, (options, built_in) in mods_of(length, device).items():
        mod = cupy_flash.Mod(**options)
        calls: dict[str, Callable[[], Any]] = {OURS: _call(q, k, v, score_mod=mod)}
        if built_in:
            calls[BUILT_IN] = _call(q, k, v, **built_in)
        if device == "cuda":
            calls |= _flex_attention(q, k, v, **options)
        results[name] = _alternate(calls, rounds, device)
    return {"device": device, "length": length, "seconds": results}


def _call(q: Any, k: Any, v: Any, **options: Any) -> Callable[[], Any]:
    return lambda: cupy_flash.attention(q, k, v, **options)


def _flex_attention(
    q: Any, k: Any, v: Any, score_mod: Any = None, mask_mod: Any = None
) -> dict[str, Callable[[], Any]]:
    """Return calls of FlexAttention with a block mask made once, and for a mask_mod also with one made per call."""
    import torch
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    torch.compiler.reset()  # above dynamo's recompile limit, FlexAttention would silently run uncompiled
    compiled, length = torch.compile(flex_attention, dynamic=False), q.shape[1]
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    if mask_mod is None:
        return {FLEX: lambda: compiled(q, k, v, score_mod=score_mod)}
    create = torch.compile(create_block_mask)
    mask = create(mask_mod, None, None, length, length, q.device)
    return {
        FLEX: lambda: compiled(q, k, v, block_mask=mask),
        FLEX_WITH_MASK: lambda: compiled(q, k, v, block_mask=create(mask_mod, None, None, length, length, q.device)),
    }


def _alternate(calls: dict[str, Callable[[], Any]], rounds: int, device: str) -> Seconds:
    """Return the seconds of calls that alternate, without the first call of each, which compiles."""
    import torch

    samples: Seconds = {name: [] for name in calls}
    for turn in range(rounds + 1):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            if device == "cuda":
                torch.cuda.synchronize()
            if turn:
                samples[name].append(time.perf_counter() - start)
    return samples


def ratio(samples: Seconds, other: str) -> float | None:
    """Return the median over rounds of the mod's time / the time of the call `other`; None if `other` did not run."""
    return float(np.median(np.divide(samples[OURS], samples[other]))) if other in samples else None


def table(section: dict[str, Any]) -> Table:
    """Return a table with the milliseconds of a forward with each mod, and its ratios to the other calls."""
    others = (BUILT_IN, FLEX, FLEX_WITH_MASK)
    rows = []
    for name, samples in section["seconds"].items():
        ratios = [ratio(samples, other) for other in others]
        cells = ["" if each is None else f"{each:.2f}" for each in ratios]
        rows.append([name, f"{1e3 * float(np.median(samples[OURS])):.2f}", *cells])
    title = f"Forward with a mod, S {section['length']}, {section['device']}: milliseconds, and times that of others"
    return Table(title, ["mod", "ms", *others], rows)
