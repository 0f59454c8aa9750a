"""Attention over several ranks: peak memory and time of each rank, and what a million tokens would take.

A rank is a process of this machine, with a GPU of its own (NCCL) where there are enough, else on the CPU (gloo).
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, replace
from math import prod
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any

from .memory import peak_resident
from .model import ITEMSIZE, Case, forward_bytes
from .peers import limit_threads
from .report import NOTHING, Table

SEQLENS = (4096, 8192, 16384)
RANKS = (1, 2, 4)
REPEATS = 3  # at most
WARM_UP = 64  # positions per rank

# The attention of a model of 8 billion parameters with grouped heads, over 2^20 tokens.
MILLION = Case(batch=1, heads=32, kv_heads=8, head_dim=128, seqlen=2**20, dtype="bfloat16", causal=True)
MILLION_LAYERS, MILLION_RANKS = 32, (8, 16, 32, 64)

Record = dict[str, Any]


def ring_cases(
    cases: Sequence[Case], ranks: Sequence[int], repeats: int, threads: int, step: Callable[[str], None]
) -> Record:
    """Every case on every number of ranks: bytes of the rank that held most, seconds of the one that took longest."""
    records = []
    for case in cases:
        for count in ranks:
            step(f"S {case.seqlen} on {count}")
            found = measure(case, count, repeats, max(1, threads // count))
            records.append(asdict(case) | {"ranks": count, "held": sum(held(case, count).values())} | found)
    return {"cases": records}


def measure(case: Case, ranks: int, repeats: int, threads: int) -> Record:
    """One case on one number of ranks, each in a fresh process."""
    with tempfile.TemporaryDirectory() as folder, _freed_memory_returned():
        rendezvous = f"file://{Path(folder, 'rendezvous')}"
        # A rank waits for the others, so that each is taken by a process of its own.
        with ProcessPoolExecutor(ranks, mp_context=get_context("spawn")) as pool:
            waiting = [pool.submit(_rank, rank, ranks, case, repeats, threads, rendezvous) for rank in range(ranks)]
            results = [future.result() for future in waiting]
    peaks, seconds = zip(*results, strict=True)
    known = [peak for peak in peaks if peak is not None]
    return {"peak": max(known, default=None), "seconds": [max(sample) for sample in zip(*seconds, strict=True)]}


@contextmanager
def _freed_memory_returned() -> Iterator[None]:
    """For processes started meanwhile: glibc gives back what is freed, so that the peak is of what is held at once."""
    name = "MALLOC_MMAP_THRESHOLD_"
    before = os.environ.get(name)
    os.environ[name] = str(2**16)
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def held(case: Case, ranks: int) -> dict[str, int]:
    """Bytes that a rank holds at the most, in its backward, by what they are; what the engine works with aside."""
    part = replace(case, seqlen=-(-case.seqlen // ranks))
    element = ITEMSIZE[case.dtype]
    real = 8 if case.dtype == "float64" else 4
    q, kv = prod(part.q_shape), 2 * prod(part.kv_shape)
    several = ranks > 1
    return {
        "kept": forward_bytes(part),  # q, k, v, out, lse
        "dout": element * q,
        "dq": real * q,  # summed up over the ring
        "keys": 2 * several * element * kv,  # present and arriving
        "gradients": (3 if several else 1) * real * kv,  # this rank's, those behind them, those that leave
        "parts": element * (q + kv) // 2,  # of one pair of chunks, which are half a shard
    }


def time_table(section: Record) -> Table:
    return _table("Forward + backward, seconds (median)", section, lambda record: f"{median(record['seconds']):.3g}")


def memory_table(section: Record) -> Table:
    """Measured, and in parentheses what `held` adds up."""

    def cell(record: Record) -> str:
        measured = NOTHING if record["peak"] is None else f"{record['peak'] / 2**20:.0f}"
        return f"{measured} ({record['held'] / 2**20:.0f})"

    title = "Peak memory of a rank, forward + backward, all its tensors, MiB (in parentheses: what they add up to)"
    return _table(title, section, cell)


def _table(title: str, section: Record, cell: Callable[[Record], str]) -> Table:
    """A row for every length, a column for every number of ranks."""
    at = {(record["seqlen"], record["ranks"]): cell(record) for record in section["cases"]}
    lengths, ranks = ([*dict.fromkeys(key[place] for key in at)] for place in (0, 1))
    columns = ["S", *(f"{number} rank{'s' * (number > 1)}" for number in ranks)]
    return Table(title, columns, [[str(length), *(at[length, number] for number in ranks)] for length in lengths])


def plan_table() -> Table:
    """A million tokens: what the attention of a model holds per rank."""
    rows = []
    hidden = MILLION.heads * MILLION.head_dim * ITEMSIZE[MILLION.dtype]
    for ranks in MILLION_RANKS:
        bytes_of = held(MILLION, ranks)
        inputs = MILLION_LAYERS * MILLION.seqlen // ranks * hidden
        passing = sum(bytes_of.values()) - bytes_of["kept"]
        cells = (
            bytes_of["kept"],
            passing,
            MILLION_LAYERS * bytes_of["kept"] + passing,
            inputs + sum(bytes_of.values()),
        )
        rows.append([str(ranks), f"{MILLION.seqlen // ranks:,}", *(f"{cell / 2**30:.2f}" for cell in cells)])
    title = (
        f"Attention of {MILLION.seqlen:,} tokens, {MILLION_LAYERS} layers of {MILLION.heads} heads "
        f"({MILLION.kv_heads} key/value heads), D {MILLION.head_dim}, {MILLION.dtype}, GiB per rank"
    )
    columns = ["ranks", "tokens per rank", "a layer keeps", "its backward adds", "all layers", "all, checkpointed"]
    return Table(title, columns, rows)


def provenance(result: Record) -> str:
    device, case = result["device"], result["ring"]["cases"][0]
    kind = f"H {case['heads']} (key/value heads: {case['kv_heads']}), D {case['head_dim']}, {case['dtype']}"
    return (
        f"`{result['command']}` on {device['cpu']}, {device['cores']} cores for all ranks; torch "
        f"{result['versions']['torch']}, cupy_flash {result['versions']['cupy_flash']}.\n"
        f"B {case['batch']}, {kind}, {'causal' if case['causal'] else 'full'}, zigzag shards."
    )


def _rank(
    rank: int, ranks: int, case: Case, repeats: int, threads: int, rendezvous: str
) -> tuple[int | None, list[float]]:
    """(bytes by which the process grew, seconds of each repeat) of one rank."""
    import torch
    from torch import distributed

    from cupy_flash.distributed import ring_attention

    on_gpus = torch.cuda.device_count() >= ranks
    device = torch.device("cuda", rank) if on_gpus else torch.device("cpu")
    if on_gpus:
        torch.cuda.set_device(device)
    distributed.init_process_group("nccl" if on_gpus else "gloo", init_method=rendezvous, rank=rank, world_size=ranks)

    def inputs(rows: int) -> list[Any]:
        part = replace(case, seqlen=rows)
        shapes = (part.q_shape, part.kv_shape, part.kv_shape, part.q_shape)
        return [torch.randn(shape, dtype=getattr(torch, case.dtype), device=device) for shape in shapes]

    def run(q: Any, k: Any, v: Any, dout: Any) -> float:
        leaves = [x.requires_grad_() for x in (q, k, v)]
        distributed.barrier()
        began = time.perf_counter()
        out = ring_attention(*leaves, causal=case.causal, layout="bhsd")
        gradients = torch.autograd.grad(out, leaves, dout)
        if on_gpus:
            torch.cuda.synchronize()
        del gradients
        return time.perf_counter() - began

    with limit_threads(threads):
        run(*inputs(WARM_UP))
        before = torch.cuda.memory_allocated() if on_gpus else peak_resident()
        arrays = inputs(case.seqlen // ranks)
        seconds = [run(*arrays) for _ in range(repeats)]
        after = torch.cuda.max_memory_allocated() if on_gpus else peak_resident()
    distributed.destroy_process_group()
    return None if before is None or after is None else after - before, seconds
