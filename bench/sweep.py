"""On a GPU: every legal tile of every engine, beside every peer and what its cost predicts.

What a plan chooses is the tile of the smallest prediction. The table says whether it is the fastest, and measured over
predicted how the cost's constants have to change.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import lru_cache, partial
from itertools import repeat
from typing import Any

from cupy_flash import backends
from cupy_flash.ahead import compile_launch
from cupy_flash.plan import candidates
from cupy_flash.problem import Operands, Options, Problem, Saved, UnsupportedError, pose

from .gpu import Call, Regime, measure, peers
from .published import flash_attention_3
from .report import NOTHING, Table

# The regimes, the more important ones first. Keys of 192 go with values of 128.
SEQLENS = (16384, 4096, 1024, 512)
HEAD_DIMS = (128, 64, 256, 192, 96)
HEAD_DIMS_V = {192: 128}
APART = 2.0**-5  # of the largest number: results that differ by more are of another attention
DEVICE = "cuda"


def regimes(
    backward: bool, dtype: str, head_dims: Sequence[int], seqlens: Sequence[int], causal: bool | None
) -> list[Regime]:
    """Of those words, both maskings where `causal` is None."""
    return [
        Regime(dtype, head_dim, seqlen, masked, backward, HEAD_DIMS_V.get(head_dim))
        for seqlen in seqlens
        for head_dim in head_dims
        for masked in ((False, True) if causal is None else (causal,))
    ]


def engines(dtype: str) -> tuple[str, ...]:
    """Those that may be the fastest: no other is, where numbers are for tensor cores."""
    return ("mma", "wgmma") if dtype in ("float16", "bfloat16") else ("simt",)


def measure_tiles(regime: Regime) -> dict[str, Any]:
    """The record of a regime, ours under the names of `tiles`: of every engine, the smallest prediction first."""
    calls: dict[str, Call] = peers(regime, ours=False)
    run = backends.run_backward if regime.backward else backends.run_forward
    tiles: list[dict[str, Any]] = []
    refused: dict[str, str] = {}
    for engine, problem, operands in posed(regime):
        try:
            chosen = backends.plan_for(problem)
        except UnsupportedError as error:
            refused[engine] = _reasons(engine, error)
            continue
        plans = candidates(chosen, engine)
        launches = {launch for _, its in plans for launch in its.launches}
        list(compilers().map(compile_launch, launches, repeat(chosen.device.arch)))  # this process finds them on disk
        for tile, its in plans:
            name, size = f"{engine} {tile}", f"{its.block_q}x{its.block_kv}/{its.threads}"
            calls[name] = partial(run, its, operands)
            tiles.append({"name": name, "engine": engine, "size": size, "predicted_ms": its.cost * 1e3})
    case = measure(regime, calls)
    case["left_out"] |= refused
    measured = [tile["name"] for tile in tiles if tile["name"] in case["tflops"]]
    for name in measured[1:]:
        if not _alike(calls[name](), calls[measured[0]]()):
            case["left_out"][name] = f"its result is not that of {measured[0]}"
            del case["tflops"][name]
    return case | {"tiles": tiles}


@lru_cache(maxsize=1)
def compilers() -> ProcessPoolExecutor:
    """In each of which NVRTC compiles one text at a time, whatever its threads."""
    return ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn"))


def posed(regime: Regime) -> Iterable[tuple[str, Problem, Operands]]:
    """The problem of a regime as each engine is asked for it, on random normal tensors."""
    import torch

    dtype = getattr(torch, regime.dtype)
    torch.manual_seed(0)

    def tensor(dim: int) -> Any:
        return torch.randn((regime.batch, regime.heads, regime.seqlen, dim), device=DEVICE, dtype=dtype)

    dim_v = regime.head_dim_v or regime.head_dim
    arrays, options = (tensor(regime.head_dim), tensor(regime.head_dim), tensor(dim_v)), dict(layout="bhsd")
    saved = None
    if regime.backward:
        out, lse = backends.forward(*pose("sweep", arrays, Options(causal=regime.causal, **options), None, None))
        saved = Saved(tensor(dim_v), out.owner, lse.owner, None)
    for engine in engines(regime.dtype):
        asked = Options(causal=regime.causal, engine=engine, **options)
        yield engine, *pose("sweep", arrays, asked, None, saved)


def _reasons(engine: str, error: UnsupportedError) -> str:
    """Why an engine does not serve, of the reasons of all."""
    start = f"  - {engine}: "
    return "; ".join(line.removeprefix(start) for line in str(error).splitlines() if line.startswith(start))


def _alike(result: Sequence[Any], other: Sequence[Any]) -> bool:
    """Whether two results are those of the same attention; not where either has a NaN."""
    pairs = [(a.owner.float(), b.owner.float()) for a, b in zip(result, other, strict=True) if a is not None]
    return all(bool((a - b).abs().max() <= APART * b.abs().max()) for a, b in pairs)


def tables(cases: Iterable[dict[str, Any]]) -> list[Table]:
    """One for each direction and dtype: TFLOP/s by head dimension, mask and length."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for case in sorted(cases, key=lambda case: (case["head_dim"], case["causal"], case["seqlen"])):
        direction = "Backward alone" if case["backward"] else "Forward"
        groups.setdefault(f"{direction}, {case['dtype']}, TFLOP/s (median)", []).append(case)
    return [_table(title, group) for title, group in groups.items()]


def _table(title: str, cases: list[dict[str, Any]]) -> Table:
    of_engines = list(dict.fromkeys(tile["engine"] for case in cases for tile in case["tiles"]))
    others = list(dict.fromkeys(name for case in cases for name in _others(case)))
    rows = []
    for case in cases:
        regime, of_others = Regime(**{name: case[name] for name in Regime._fields}), _others(case)
        best = max((speed for name, speed in case["tflops"].items() if name not in of_others), default=None)
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


def _others(case: dict[str, Any]) -> dict[str, float]:
    """TFLOP/s of the peers."""
    ours = {tile["name"] for tile in case["tiles"]}
    return {name: speed for name, speed in case["tflops"].items() if name not in ours}


def _of_engine(engine: str, case: dict[str, Any]) -> list[str]:
    """Its fastest tile, with its place in the order of predictions; and the first in that order."""
    tiles = [tile for tile in case["tiles"] if tile["engine"] == engine]
    places = {tile["name"]: f"({tile['size']}, {place} of {len(tiles)})" for place, tile in enumerate(tiles, 1)}
    best = max((name for name in places if name in case["tflops"]), key=case["tflops"].get, default=None)
    chosen = tiles[0]["name"] if tiles else None
    return [f"{_speed(case['tflops'].get(name))} {places[name]}" if name else NOTHING for name in (best, chosen)]


def _speed(tflops: float | None) -> str:
    return NOTHING if tflops is None else f"{tflops:.0f}"
