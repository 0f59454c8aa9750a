"""On a GPU: every legal tile of every engine, beside every peer and what its cost predicts.

What a plan chooses is the tile of the smallest prediction. The table says whether it is the fastest, and measured over
predicted how the cost's constants have to change.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, wait
from functools import lru_cache, partial
from typing import Any

from cupy_flash import backends
from cupy_flash.backends.kernels import compile_launch
from cupy_flash.launch import Launch
from cupy_flash.plan import candidates
from cupy_flash.pose import pose
from cupy_flash.problem import FP8, Operands, Options, Problem, Saved, UnsupportedError

from .gpu import (
    SECONDS_OF_COMPILING,
    SECONDS_OF_INPUTS,
    SECONDS_OF_STEP,
    Call,
    Inputs,
    Regime,
    fastest,
    inputs,
    measure,
    of_peers,
    peers,
)
from .isolated import Announce
from .marks import MARKS
from .peers import FLEX_ATTENTION
from .published import flash_attention_3
from .report import NOTHING, Table

# Beyond the regimes with a mark, the more important ones first. Keys of 192 go with values of 128.
SEQLENS = (16384, 4096, 1024, 512)
HEAD_DIMS = (128, 64, 256, 192, 96)
HEAD_DIMS_V = {192: 128}
APART = 2.0**-5  # of the largest number: results that differ by more are of another attention
COMPILERS = 16  # at most: each takes memory


def regimes(
    backward: bool,
    dtype: str | None = None,
    head_dims: Sequence[int] | None = None,
    seqlens: Sequence[int] | None = None,
    causal: bool | None = None,
) -> list[Regime]:
    """Of those words: what has a mark, then every head dimension, mask and length; where no dtype is named, those for
    tensor cores."""
    marked = [
        regime
        for regime in MARKS
        if regime.backward == backward
        and regime.dtype in ((dtype,) if dtype else ("bfloat16", FP8))
        and (causal is None or regime.causal == causal)
        and (head_dims is None or regime.head_dim in head_dims)
        and (seqlens is None or regime.seqlen in seqlens)
    ]
    every = [
        Regime(dtype or "bfloat16", head_dim, seqlen, masked, backward, HEAD_DIMS_V.get(head_dim))
        for seqlen in seqlens or SEQLENS
        for head_dim in head_dims or HEAD_DIMS
        for masked in ((False, True) if causal is None else (causal,))
    ]
    return list(dict.fromkeys(marked + every))


def engines(dtype: str) -> tuple[str, ...]:
    """Those that may be the fastest: no other is, where numbers are for tensor cores."""
    if dtype == FP8:
        return ("wgmma",)
    return ("mma", "wgmma") if dtype in ("float16", "bfloat16") else ("simt",)


def measure_tiles(regime: Regime, lost: Mapping[str, str], announce: Announce) -> dict[str, Any]:
    """The record of a regime, ours under the names of `tiles`: of every engine, the smallest prediction first."""
    announce("inputs", SECONDS_OF_INPUTS)
    given = inputs(regime)
    calls: dict[str, Call] = peers(regime, given)
    refused: dict[str, str] = {}
    if regime not in MARKS and FLEX_ATTENTION in calls:
        del calls[FLEX_ATTENTION]
        refused[FLEX_ATTENTION] = "takes seconds to compile, for which a regime needs a mark"
    run = backends.run_backward if regime.backward else backends.run_forward
    tiles: list[dict[str, Any]] = []
    launches: dict[Any, tuple[Launch, str]] = {}
    for engine, problem, operands in posed(regime, given):
        try:
            chosen = backends.plan_for(problem)
        except UnsupportedError as error:
            refused[engine] = _reasons(engine, error)
            continue
        for tile, its in candidates(chosen, engine):
            name, size = f"{engine} {tile}", f"{its.block_q}x{its.block_kv}/{its.threads}"
            calls[name] = partial(run, its, operands)
            tiles.append({"name": name, "engine": engine, "size": size, "predicted_ms": its.cost * 1e3})
            launches |= {(launch.kernel, launch.constants): (launch, its.device.arch) for launch in its.launches}
    announce("compile", SECONDS_OF_COMPILING)
    # This process finds them on disk. What cannot be compiled it finds out once more, and leaves out by name.
    wait(compilers().submit(compile_launch, *each) for each in launches.values())
    case = measure(regime, calls, lost, announce)
    case["left_out"] |= refused
    # Whoever is the first: a peer where there is one.
    reference = next(iter(case["tflops"]), "")
    for name in (tile["name"] for tile in tiles if tile["name"] in case["tflops"]):
        announce(name, SECONDS_OF_STEP)
        if not _alike(calls[name](), calls[reference]()):
            case["left_out"][name] = f"its result is not that of {reference}"
            del case["tflops"][name]
    return case | {"tiles": tiles}


@lru_cache(maxsize=1)
def compilers() -> ProcessPoolExecutor:
    """In each of which NVRTC compiles one text at a time, whatever its threads."""
    return ProcessPoolExecutor(min(os.cpu_count() or 1, COMPILERS), multiprocessing.get_context("spawn"))


def posed(regime: Regime, given: Inputs) -> Iterable[tuple[str, Problem, Operands]]:
    """The problem of a regime as each engine is asked for it, on its inputs."""
    q, k, v, dout = (x.detach() for x in given)
    options = dict(causal=regime.causal, layout="bhsd")
    saved = None
    if regime.backward:
        out, lse = backends.forward(*pose("sweep", (q, k, v), Options(**options), None, None))
        saved = Saved(dout, out.owner, lse.owner, None)
    for engine in engines(regime.dtype):
        asked = Options(engine=engine, deterministic=regime.deterministic, **options)
        yield engine, *pose("sweep", (q, k, v), asked, None, saved)


def _reasons(engine: str, error: UnsupportedError) -> str:
    """Why an engine does not serve, of the reasons of all."""
    start = f"  - {engine}: "
    return "; ".join(line.removeprefix(start) for line in str(error).splitlines() if line.startswith(start))


def _alike(result: Any, other: Any) -> bool:
    """Whether two results are those of the same attention; not where either has a NaN. Peers give no lse."""
    pairs = zip(_numbers(result), _numbers(other), strict=False)
    return all(bool((a - b).abs().max() <= APART * b.abs().max()) for a, b in pairs)


def _numbers(result: Any) -> list[Any]:
    """out, or gradients, as tensors: of Arrays or of tensors."""
    every: tuple[Any, ...] = result if isinstance(result, tuple) else (result,)
    owners: list[Any] = [getattr(array, "owner", array) for array in every if array is not None]
    return [tensor.float() for tensor in owners]


def tables(cases: Iterable[dict[str, Any]]) -> list[Table]:
    """One for each direction and dtype: TFLOP/s by head dimension, mask and length."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for case in sorted(cases, key=lambda case: (case["head_dim"], case["causal"], case["seqlen"])):
        direction = "Backward alone" if case["backward"] else "Forward"
        direction += ", deterministic" * case["deterministic"]
        groups.setdefault(f"{direction}, {case['dtype']}, TFLOP/s (median)", []).append(case)
    return [_table(title, group) for title, group in groups.items()]


def _table(title: str, cases: list[dict[str, Any]]) -> Table:
    of_engines = list(dict.fromkeys(tile["engine"] for case in cases for tile in case["tiles"]))
    others = list(dict.fromkeys(name for case in cases for name in of_peers(case)))
    rows = []
    for case in cases:
        regime, of_others = Regime.of(case), of_peers(case)
        best = case["tflops"].get(fastest(case))
        rows.append(
            [
                f"{regime.head_dim}/{regime.head_dim_v}" if regime.head_dim_v else str(regime.head_dim),
                "causal" if regime.causal else "full",
                str(regime.seqlen),
                *(cell for engine in of_engines for cell in _of_engine(engine, case)),
                *(_speed(of_others.get(name)) for name in others),
                _speed(flash_attention_3(regime)),
                f"{best / max(of_others.values()):.2f}" if best and of_others else NOTHING,
                f"{best / case['matmul_tflops']:.2f}" if best else NOTHING,
            ]
        )
    columns = [f"{engine}, {which}" for engine in of_engines for which in ("best tile", "the plan's")]
    return Table(title, ["D", "mask", "S", *columns, *others, "FA3 (published, H100)", "R_best", "R_mm"], rows)


def _of_engine(engine: str, case: dict[str, Any]) -> list[str]:
    """Its fastest tile, with its place in the order of predictions; and the first in that order."""
    tiles = [tile for tile in case["tiles"] if tile["engine"] == engine]
    places = {tile["name"]: f"({tile['size']}, {place} of {len(tiles)})" for place, tile in enumerate(tiles, 1)}
    best = max((name for name in places if name in case["tflops"]), key=case["tflops"].get, default=None)
    chosen = tiles[0]["name"] if tiles else None
    return [f"{_speed(case['tflops'].get(name))} {places[name]}" if name else NOTHING for name in (best, chosen)]


def _speed(tflops: float | None) -> str:
    return NOTHING if tflops is None else f"{tflops:.0f}"
