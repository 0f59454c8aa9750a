"""GPU sweep: time every legal tile of every engine, next to its time by the cost model, and every other implementation.

A plan chooses the tile with the smallest predicted time. The tables show whether it is the fastest; the ratio of
measured to predicted time shows how the cost model's constants have to change.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, wait
from functools import lru_cache, partial
from typing import Any

from cupy_flash import dispatch
from cupy_flash.engines.launch import Launch
from cupy_flash.gpu.run_plan import compile_launch
from cupy_flash.measure.worker_process import Announce
from cupy_flash.plan.plan import candidates
from cupy_flash.problem.build import pose
from cupy_flash.problem.records import FP8, Operands, Options, Problem, Saved, UnsupportedError

from ..gpu import (
    SECONDS_OF_COMPILING,
    SECONDS_OF_INPUTS,
    SECONDS_OF_STEP,
    Call,
    Inputs,
    Regime,
    fastest,
    inputs,
    measure,
    others,
    tflops_of_others,
)
from ..implementations import FLEX_ATTENTION
from ..report import NOTHING, Table
from .marks import MARKS
from .published import flash_attention_3

# Regimes without a mark, the most important first. With head dimension 192 the head dimension of V is 128.
SEQLENS = (16384, 4096, 1024, 512)
HEAD_DIMS = (128, 64, 256, 192, 96)
HEAD_DIMS_V = {192: 128}
APART = 2.0**-5  # tolerance relative to the largest magnitude: results that differ by more are wrong
COMPILERS = 16  # maximum number of compiling processes, because each takes memory


def regimes(
    backward: bool,
    dtype: str | None = None,
    head_dims: Sequence[int] | None = None,
    seqlens: Sequence[int] | None = None,
    causal: bool | None = None,
) -> list[Regime]:
    """Return the matching regimes: first those with a mark, then all combinations of head dimension, mask and length.

    If no dtype is given, they are those of bfloat16, and those of fp8 that have a mark.
    """
    marked = [
        regime
        for regime in MARKS
        if regime.backward == backward
        and regime.dtype in ((dtype,) if dtype else ("bfloat16", FP8))
        and (causal is None or regime.causal == causal)
        and (head_dims is None or regime.head_dim in head_dims)
        and (seqlens is None or regime.seqlen in seqlens)
    ]
    remaining = [
        Regime(dtype or "bfloat16", head_dim, seqlen, masked, backward, HEAD_DIMS_V.get(head_dim))
        for seqlen in seqlens or SEQLENS
        for head_dim in head_dims or HEAD_DIMS
        for masked in ((False, True) if causal is None else (causal,))
    ]
    return list(dict.fromkeys(marked + remaining))


def engines(dtype: str) -> tuple[str, ...]:
    """Return the engines worth measuring: only those with tensor cores if the dtype can use them."""
    if dtype == FP8:
        return ("wgmma",)
    return ("mma", "wgmma") if dtype in ("float16", "bfloat16") else ("simt",)


def measure_tiles(regime: Regime, lost: Mapping[str, str], announce: Announce) -> dict[str, Any]:
    """Return the record of a regime; `tiles` lists ours by engine, the smallest predicted time first."""
    announce("inputs", SECONDS_OF_INPUTS)
    tensors = inputs(regime)
    calls: dict[str, Call] = others(regime, tensors)
    refused: dict[str, str] = {}
    if regime not in MARKS and FLEX_ATTENTION in calls:
        del calls[FLEX_ATTENTION]
        refused[FLEX_ATTENTION] = "takes seconds to compile: measured only in regimes with a mark"
    run = dispatch.run_backward if regime.backward else dispatch.run_forward
    tiles: list[dict[str, Any]] = []
    launches: dict[Any, tuple[Launch, str]] = {}
    for engine, problem, operands in posed(regime, tensors):
        try:
            chosen = dispatch.plan_for(problem)
        except UnsupportedError as error:
            refused[engine] = _reasons(engine, error)
            continue
        for tile, tile_plan in candidates(chosen, engine):
            name, size = f"{engine} {tile}", f"{tile_plan.block_q}x{tile_plan.block_kv}/{tile_plan.threads}"
            calls[name] = partial(run, tile_plan, operands)
            tiles.append({"name": name, "engine": engine, "size": size, "predicted_ms": tile_plan.cost * 1e3})
            launches |= {
                (launch.kernel, launch.constants): (launch, tile_plan.device.arch) for launch in tile_plan.launches
            }
    announce("compile", SECONDS_OF_COMPILING)
    # Fill the cache on disk in parallel. Compile errors are ignored here: `measure` reports them by tile.
    wait(compilers().submit(compile_launch, *each) for each in launches.values())
    case = measure(regime, calls, lost, announce)
    case["left_out"] |= refused
    # The reference is the first entry that ran: another implementation if there is one.
    reference = next(iter(case["tflops"]), "")
    for name in (tile["name"] for tile in tiles if tile["name"] in case["tflops"]):
        announce(name, SECONDS_OF_STEP)
        if not _alike(calls[name](), calls[reference]()):
            case["left_out"][name] = f"result differs from {reference}"
            del case["tflops"][name]
    return case | {"tiles": tiles}


@lru_cache(maxsize=1)
def compilers() -> ProcessPoolExecutor:
    """Return a pool of processes: within one process NVRTC serializes compilations."""
    return ProcessPoolExecutor(min(os.cpu_count() or 1, COMPILERS), multiprocessing.get_context("spawn"))


def posed(regime: Regime, tensors: Inputs) -> Iterable[tuple[str, Problem, Operands]]:
    """Yield (engine, problem, operands) of a regime, with each engine requested explicitly."""
    q, k, v, dout = (x.detach() for x in tensors)
    options: dict[str, Any] = dict(causal=regime.causal, layout="bhsd")
    saved = None
    if regime.backward:
        out, lse = dispatch.forward(*pose("sweep", (q, k, v), Options(**options), None, None))
        saved = Saved(dout, out.owner, lse.owner, None)
    for engine in engines(regime.dtype):
        engine_options = Options(engine=engine, deterministic=regime.deterministic, **options)
        yield engine, *pose("sweep", (q, k, v), engine_options, None, saved)


def _reasons(engine: str, error: UnsupportedError) -> str:
    """Return the reasons of one engine from an error that lists the reasons of all engines."""
    prefix = f"  - {engine}: "
    return "; ".join(line.removeprefix(prefix) for line in str(error).splitlines() if line.startswith(prefix))


def _alike(result: Any, other: Any) -> bool:
    """Return whether two results agree within APART; False for NaN. lse is not compared: others return none."""
    pairs = zip(_numbers(result), _numbers(other), strict=False)
    return all(bool((a - b).abs().max() <= APART * b.abs().max()) for a, b in pairs)


def _numbers(result: Any) -> list[Any]:
    """Return out or the gradients as fp32 tensors, from Arrays or tensors."""
    arrays: tuple[Any, ...] = result if isinstance(result, tuple) else (result,)
    owners: list[Any] = [getattr(array, "owner", array) for array in arrays if array is not None]
    return [tensor.float() for tensor in owners]


def tables(cases: Iterable[dict[str, Any]]) -> list[Table]:
    """Return one table per direction and dtype: TFLOP/s by head dimension, mask and length."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for case in sorted(cases, key=lambda case: (case["head_dim"], case["causal"], case["seqlen"])):
        direction = "Backward alone" if case["backward"] else "Forward"
        direction += ", deterministic" * case["deterministic"]
        groups.setdefault(f"{direction}, {case['dtype']}, TFLOP/s (median)", []).append(case)
    return [_table(title, group) for title, group in groups.items()]


def _table(title: str, cases: list[dict[str, Any]]) -> Table:
    engine_names = list(dict.fromkeys(tile["engine"] for case in cases for tile in case["tiles"]))
    names_of_others = list(dict.fromkeys(name for case in cases for name in tflops_of_others(case)))
    rows = []
    for case in cases:
        regime, speeds_of_others = Regime.of(case), tflops_of_others(case)
        best = case["tflops"].get(fastest(case))
        rows.append(
            [
                f"{regime.head_dim}/{regime.head_dim_v}" if regime.head_dim_v else str(regime.head_dim),
                "causal" if regime.causal else "full",
                str(regime.seqlen),
                *(cell for engine in engine_names for cell in _engine_cells(engine, case)),
                *(_speed(speeds_of_others.get(name)) for name in names_of_others),
                _speed(flash_attention_3(regime)),
                f"{best / max(speeds_of_others.values()):.2f}" if best and speeds_of_others else NOTHING,
                f"{best / case['matmul_tflops']:.2f}" if best else NOTHING,
            ]
        )
    columns = [f"{engine}, {which}" for engine in engine_names for which in ("best tile", "the plan's")]
    return Table(title, ["D", "mask", "S", *columns, *names_of_others, "FA3 (published, H100)", "R_best", "R_mm"], rows)


def _engine_cells(engine: str, case: dict[str, Any]) -> list[str]:
    """Return the cells of an engine's fastest tile and of its plan's tile, each with its rank by predicted time."""
    tiles = [tile for tile in case["tiles"] if tile["engine"] == engine]
    ranks = {tile["name"]: f"({tile['size']}, {rank} of {len(tiles)})" for rank, tile in enumerate(tiles, 1)}
    best = max((name for name in ranks if name in case["tflops"]), key=case["tflops"].get, default=None)
    chosen = tiles[0]["name"] if tiles else None
    return [f"{_speed(case['tflops'].get(name))} {ranks[name]}" if name else NOTHING for name in (best, chosen)]


def _speed(tflops: float | None) -> str:
    return NOTHING if tflops is None else f"{tflops:.0f}"
