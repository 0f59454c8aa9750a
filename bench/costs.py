"""Written costs beside a sweep: which tile the plan chose and which was the fastest, and the constants that fit best.

A cost has errors of two kinds. A factor that all tiles of an engine share, such as the clock, moves the choice between
engines; what differs from tile to tile moves the choice of a tile.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from statistics import median
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt

from cupy_flash import ahead, device
from cupy_flash.engines import mma, simt
from cupy_flash.engines.wgmma import backward, forward, forward_fp8
from cupy_flash.plan import candidates, plan

from .gpu import Regime, fastest, kind, of_ours
from .report import NOTHING, Table

# The modules that hold a written cost, by engine, direction and whether numbers are of fp8; and those of its constants
# that a GPU has to tell. CLOCK scales all of them.
CONSTANTS: dict[str, tuple[ModuleType, tuple[str, ...]]] = {
    "mma": (mma, ("CLOCK", "MULTIPLY_ADDS_OF_SERVERS", "SHARED_BYTES", "CACHE_BYTES", "INSTRUCTIONS", "LATENCY")),
    "simt": (simt, ("FMA_PER_SECOND",)),
    "wgmma forward": (forward, ("CLOCK", "MULTIPLY_ADDS", "EXPONENTIALS", "STEP", "BLOCK", "NEXT_TILE", "CLEAR")),
    "wgmma fp8": (forward_fp8, ("CLOCK", "MULTIPLY_ADDS", "EXPONENTIALS", "STEP", "BLOCK")),
    "wgmma backward": (backward, ("CLOCK", "MULTIPLY_ADDS", "EXPONENTIALS", "INSTRUCTIONS", "STEP", "BLOCK")),
}
NAMED = ("dtype", "head_dim", "head_dim_v", "causal", "backward", "deterministic")  # by regimes as by calls
ROUNDS, NUDGE = 60, 1e-3
LEAST_DAMPING = 1e-6  # or nothing would hold a constant on which nothing depends
WITHIN = math.log(16)  # of its written value: farther a constant does not go

Logs = npt.NDArray[np.float64]


def tables(result: dict[str, Any]) -> list[Table]:
    """The choices of the plan, predictions by kinds of tiles, and constants."""
    cases = [case for case in result["cases"] if fastest(case)]
    return [choices(cases), predictions(cases), constants(cases, result["device"])]


def choices(cases: Iterable[dict[str, Any]]) -> Table:
    """What the plan's order loses in each regime, by engine."""
    rows = []
    for case in cases:
        own = of_ours(case)
        for engine in dict.fromkeys(tile["engine"] for tile in case["tiles"]):
            tiles = [tile["name"] for tile in case["tiles"] if tile["engine"] == engine]
            measured = [name for name in tiles if name in own]
            if not measured:
                continue
            best = max(measured, key=own.__getitem__)
            loss = f"{1 - own[tiles[0]] / own[best]:.0%}" if tiles[0] in own else NOTHING
            rows.append([case["regime"], engine, tiles[0], best, str(tiles.index(best) + 1), loss])
    columns = ["regime", "engine", "the plan's", "the fastest", "its place", "loss"]
    return Table("Tiles of the smallest predictions and the fastest", columns, rows)


def predictions(cases: Iterable[dict[str, Any]]) -> Table:
    """Measured over predicted: by kinds of tiles, which differ in more than sizes, and by sizes."""
    groups: dict[tuple[str, str, str], list[float]] = {}
    for case in cases:
        direction = "backward" if case["backward"] else "forward"
        for tile, ratio in _ratios(case):
            kind_of_tile = kind(tile["name"])
            groups.setdefault((f"{direction} D {case['head_dim']}", kind_of_tile, tile["size"]), []).append(ratio)
    rows = [
        [*group, str(len(ratios)), *(f"{x:.2f}" for x in (min(ratios), median(ratios), max(ratios)))]
        for group, ratios in sorted(groups.items())
    ]
    return Table("Measured over predicted", ["of", "tiles", "size", "regimes", "least", "median", "most"], rows)


def _ratios(case: dict[str, Any]) -> list[tuple[dict[str, Any], float]]:
    times = case["milliseconds"]
    return [
        (tile, median(times[tile["name"]]) / tile["predicted_ms"])
        for tile in case["tiles"]
        if tile["name"] in case["tflops"]
    ]


def constants(cases: Sequence[dict[str, Any]], card: dict[str, Any]) -> Table:
    """Every cost's constants as written and as they fit best, with the typical error of both."""
    rows = []
    for name, (module, names) in CONSTANTS.items():
        observed = [pair for case in cases for pair in _observed(name, case, card)]
        if not observed:
            continue
        written = {constant: float(getattr(module, constant)) for constant in names}
        best = fitted(module, written, observed)
        squares = [float(np.mean(_errors(module, values, observed) ** 2)) for values in (written, best)]
        errors = [math.exp(math.sqrt(square)) - 1 for square in squares]
        typical = f"{errors[0]:.0%} -> {errors[1]:.0%}"
        rows += [
            [name, constant, f"{written[constant]:.3g}", f"{best[constant]:.3g}", str(len(observed)), typical]
            for constant in names
        ]
    columns = ["cost", "constant", "written", "fits best", "times", "typical error"]
    return Table("The constants of written costs", columns, rows)


Observed = tuple[Any, int, Any, Any, float]  # problem, pairs, device, tile, measured seconds


def _observed(cost: str, case: dict[str, Any], card: dict[str, Any]) -> list[Observed]:
    """What a cost predicts in a case, with the time that it took."""
    regime = Regime.of(case)
    engine = cost.partition(" ")[0]
    fp8 = regime.dtype.startswith("float8")
    if engine == "wgmma" and cost != ("wgmma fp8" if fp8 else "wgmma backward" if regime.backward else "wgmma forward"):
        return []
    measured = {tile["name"] for tile, _ in _ratios(case) if tile["engine"] == engine}
    if not measured:
        return []
    words: dict[str, Any] = {name: getattr(regime, name) for name in NAMED}
    sizes: dict[str, Any] = dict(batch=regime.batch, heads=regime.heads, kv_heads=regime.heads)
    sizes |= dict(q_len=regime.seqlen, kv_len=regime.seqlen)
    problem = ahead.problems(**words, engine=engine, layout="bhsd")[-1]._replace(**sizes)
    hopper = device.named("sm_90a", "cuda")
    on = hopper._replace(units=card.get("multiprocessors") or hopper.units)
    pairs = problem.mask.band(problem.q_len, problem.kv_len).pairs
    return [
        (problem, pairs, on, tile, median(case["milliseconds"][f"{engine} {tile}"]) * 1e-3)
        for tile, _ in candidates(plan(problem, on), engine)
        if f"{engine} {tile}" in measured
    ]


def fitted(module: ModuleType, written: dict[str, float], observed: Sequence[Observed]) -> dict[str, float]:
    """Constants of the smallest squared error in log space (Levenberg and Marquardt), near those written where nothing
    measured depends on them."""
    start = np.log(list(written.values()))

    def values(logs: Logs) -> dict[str, float]:
        return dict(zip(written, np.exp(logs).tolist(), strict=True))

    def errors(logs: Logs) -> Logs:
        return _errors(module, values(logs), observed)

    best, damping = start, 1.0
    for _ in range(ROUNDS):
        residual = errors(best)
        slopes = np.stack([(errors(best + nudge) - residual) / NUDGE for nudge in NUDGE * np.eye(len(start))], axis=1)
        bent = slopes.T @ slopes + damping * np.eye(len(start))
        tried = np.clip(best - np.linalg.solve(bent, slopes.T @ residual), start - WITHIN, start + WITHIN)
        better = np.sum(errors(tried) ** 2) < np.sum(residual**2)
        best, damping = (tried, max(damping / 4, LEAST_DAMPING)) if better else (best, damping * 4)
    return values(best)


def _errors(module: ModuleType, values: dict[str, float], observed: Sequence[Observed]) -> Logs:
    """log(predicted / measured) of each, with these constants."""
    kept = {name: getattr(module, name) for name in values}
    try:
        for name, value in values.items():
            setattr(module, name, value)
        return np.log([module.seconds(*asked) / seconds for *asked, seconds in observed])
    finally:
        for name, value in kept.items():
            setattr(module, name, value)
