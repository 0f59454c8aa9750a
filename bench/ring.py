"""Ring attention: measured peak memory and time per rank, and the estimated memory for 2^20 tokens.

All ranks are processes on this machine: on one GPU each (NCCL) if there are enough, else on the CPU (gloo).
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

from .implementations import limit_threads
from .memory import peak_resident
from .model import ITEMSIZE, Case, forward_bytes
from .report import NOTHING, Table

SEQLENS = (4096, 8192, 16384)
RANKS = (1, 2, 4)
REPEATS = 3  # upper limit
WARM_UP = 64  # tokens per rank

# The attention shapes of an 8B-parameter GQA model at 2^20 tokens.
MILLION = Case(batch=1, heads=32, kv_heads=8, head_dim=128, seqlen=2**20, dtype="bfloat16", causal=True)
MILLION_LAYERS, MILLION_RANKS = 32, (8, 16, 32, 64)

Record = dict[str, Any]


def ring_cases(
    cases: Sequence[Case], ranks: Sequence[int], repeats: int, threads: int, step: Callable[[str], None]
) -> Record:
    """Measure every case on every number of ranks: peak bytes and seconds, each the maximum over ranks."""
    records = []
    for case in cases:
        for count in ranks:
            step(f"S {case.seqlen} on {count}")
            measured = measure(case, count, repeats, max(1, threads // count))
            records.append(asdict(case) | {"ranks": count, "held": sum(held(case, count).values())} | measured)
    return {"cases": records}


def measure(case: Case, ranks: int, repeats: int, threads: int) -> Record:
    """Measure one case; each rank runs in a fresh process."""
    with tempfile.TemporaryDirectory() as folder, _freed_memory_returned():
        rendezvous = f"file://{Path(folder, 'rendezvous')}"
        # Every rank waits in the rendezvous until all have arrived, so each process of the pool runs exactly one rank.
        with ProcessPoolExecutor(ranks, mp_context=get_context("spawn")) as pool:
            futures = [pool.submit(_rank, rank, ranks, case, repeats, threads, rendezvous) for rank in range(ranks)]
            results = [future.result() for future in futures]
    peaks, seconds = zip(*results, strict=True)
    known = [peak for peak in peaks if peak is not None]
    return {"peak": max(known, default=None), "seconds": [max(sample) for sample in zip(*seconds, strict=True)]}


@contextmanager
def _freed_memory_returned() -> Iterator[None]:
    """Set glibc's mmap threshold to 64 KiB for processes started inside the context.

    Freed memory then returns to the system, so the peak counts live memory only.
    """
    name = "MALLOC_MMAP_THRESHOLD_"
    previous = os.environ.get(name)
    os.environ[name] = str(2**16)
    try:
        yield
    finally:
        if previous is None:
            del os.environ[name]
        else:
            os.environ[name] = previous


def held(case: Case, ranks: int) -> dict[str, int]:
    """Return {purpose: bytes} of a rank's tensors at the peak of memory, in its backward, without workspaces."""
    part = replace(case, seqlen=-(-case.seqlen // ranks))
    element = ITEMSIZE[case.dtype]
    accumulator = 8 if case.dtype == "float64" else 4
    q, kv = prod(part.q_shape), 2 * prod(part.kv_shape)
    several = ranks > 1
    return {
        "kept": forward_bytes(part),  # q, k, v, out, lse
        "dout": element * q,
        "dq": accumulator * q,  # accumulated over the ring steps
        "keys": 2 * several * element * kv,  # K and V of the current shard and of the shard being received
        "gradients": (3 if several else 1) * accumulator * kv,  # dK, dV being computed, received and sent
        "parts": element * (q + kv) // 2,  # dQ, dK, dV of one pair of chunks, half a shard each
    }


def time_table(section: Record) -> Table:
    """Return the median seconds of a forward and backward."""
    return _table("Forward + backward, seconds (median)", section, lambda record: f"{median(record['seconds']):.3g}")


def memory_table(section: Record) -> Table:
    """Return measured peaks, with the sum of `held` in parentheses."""

    def cell(record: Record) -> str:
        measured = NOTHING if record["peak"] is None else f"{record['peak'] / 2**20:.0f}"
        return f"{measured} ({record['held'] / 2**20:.0f})"

    title = "Peak memory of a rank, forward + backward, all its tensors, MiB (in parentheses: what they add up to)"
    return _table(title, section, cell)


def _table(title: str, section: Record, cell: Callable[[Record], str]) -> Table:
    """Return a table with a row per length and a column per number of ranks."""
    cells = {(record["seqlen"], record["ranks"]): cell(record) for record in section["cases"]}
    lengths, ranks = ([*dict.fromkeys(key[axis] for key in cells)] for axis in (0, 1))
    columns = ["S", *(f"{number} rank{'s' * (number > 1)}" for number in ranks)]
    return Table(title, columns, [[str(length), *(cells[length, number] for number in ranks)] for length in lengths])


def plan_table() -> Table:
    """Return the estimated memory per rank of MILLION's attention layers."""
    rows = []
    hidden = MILLION.heads * MILLION.head_dim * ITEMSIZE[MILLION.dtype]
    for ranks in MILLION_RANKS:
        parts = held(MILLION, ranks)
        inputs = MILLION_LAYERS * MILLION.seqlen // ranks * hidden
        transient = sum(parts.values()) - parts["kept"]
        cells = (
            parts["kept"],
            transient,
            MILLION_LAYERS * parts["kept"] + transient,
            inputs + sum(parts.values()),
        )
        rows.append([str(ranks), f"{MILLION.seqlen // ranks:,}", *(f"{cell / 2**30:.2f}" for cell in cells)])
    title = (
        f"Attention of {MILLION.seqlen:,} tokens, {MILLION_LAYERS} layers of {MILLION.heads} heads "
        f"({MILLION.kv_heads} key/value heads), D {MILLION.head_dim}, {MILLION.dtype}, GiB per rank"
    )
    columns = ["ranks", "tokens per rank", "a layer keeps", "its backward adds", "all layers", "all, checkpointed"]
    return Table(title, columns, rows)


def provenance(result: Record) -> str:
    """Return two lines of Markdown that say which command measured the tables on which machine."""
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
    """Run one rank; return (growth of its peak memory in bytes, seconds of each repeat)."""
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
        start = time.perf_counter()
        out = ring_attention(*leaves, causal=case.causal, layout="bhsd")
        gradients = torch.autograd.grad(out, leaves, dout)
        if on_gpus:
            torch.cuda.synchronize()
        del gradients
        return time.perf_counter() - start

    with limit_threads(threads):
        run(*inputs(WARM_UP))
        before = torch.cuda.memory_allocated() if on_gpus else peak_resident()
        arrays = inputs(case.seqlen // ranks)
        seconds = [run(*arrays) for _ in range(repeats)]
        after = torch.cuda.max_memory_allocated() if on_gpus else peak_resident()
    distributed.destroy_process_group()
    return None if before is None or after is None else after - before, seconds
