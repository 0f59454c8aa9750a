"""Compare the engines' cost models with a sweep: the plan's tile and the fastest one, and fitted constants.

A cost model errs in two ways. A factor that all tiles of an engine share, such as the clock, affects the choice between
engines; an error that differs between tiles affects the choice of the tile.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from statistics import median
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt

from cupy_flash import device
from cupy_flash.engines import mma, simt
from cupy_flash.engines.wgmma import backward, forward, forward_fp8
from cupy_flash.gpu import ahead
from cupy_flash.plan.plan import candidates, plan
from cupy_flash.problem.records import Problem

from ..gpu import Regime, fastest, kind, our_tflops
from ..report import NOTHING, Table

# {engine, for wgmma with the direction or "fp8": (module of the cost model `seconds`, those of its constants that a GPU
# measurement has to calibrate)}. CLOCK scales the time of all of them.
CONSTANTS: dict[str, tuple[ModuleType, tuple[str, ...]]] = {
    "mma": (mma, ("CLOCK", "MULTIPLY_ADDS_OF_SERVERS", "SHARED_BYTES", "CACHE_BYTES", "INSTRUCTIONS", "LATENCY")),
    "simt": (simt, ("FMA_PER_SECOND",)),
    "wgmma forward": (
        forward,
        ("CLOCK", "MULTIPLY_ADDS", "EXPONENTIALS", "SHARED_WEIGHT", "STEP", "TILE_STEPS", "BLOCK", "LOAD_Q", "CLEAR"),
    ),
    "wgmma fp8": (forward_fp8, ("CLOCK", "MULTIPLY_ADDS", "EXPONENTIALS", "STEP", "BLOCK")),
    "wgmma backward": (backward, ("CLOCK", "MULTIPLY_ADDS", "EXPONENTIALS", "INSTRUCTIONS", "STEP", "BLOCK")),
}
# The fields of Regime that ahead.problems takes as arguments.
PROBLEM_FIELDS = ("dtype", "head_dim", "head_dim_v", "causal", "backward", "deterministic")
ROUNDS, NUDGE = 60, 1e-3
LEAST_DAMPING = 1e-6  # keeps the normal equations regular if no observation depends on a constant
WITHIN = math.log(16)  # a fitted constant stays within a factor of 16 of its written value

Logs = npt.NDArray[np.float64]


def tables(result: dict[str, Any]) -> list[Table]:
    """Return the tables of the plan's choices, of predictions by kind of tile, and of fitted constants."""
    cases = [case for case in result["cases"] if fastest(case)]
    return [choices(cases), predictions(cases), constants(cases, result["device"])]


def choices(cases: Iterable[dict[str, Any]]) -> Table:
    """Return, per regime and engine, how much slower the plan's tile is than the fastest one."""
    rows = []
    for case in cases:
        tflops = our_tflops(case)
        for engine in dict.fromkeys(tile["engine"] for tile in case["tiles"]):
            tiles = [tile["name"] for tile in case["tiles"] if tile["engine"] == engine]
            measured = [name for name in tiles if name in tflops]
            if not measured:
                continue
            best = max(measured, key=tflops.__getitem__)
            loss = f"{1 - tflops[tiles[0]] / tflops[best]:.0%}" if tiles[0] in tflops else NOTHING
            rows.append([case["regime"], engine, tiles[0], best, str(tiles.index(best) + 1), loss])
    columns = ["regime", "engine", "the plan's", "the fastest", "its rank by cost", "loss"]
    return Table("The plan's tile (smallest predicted time) and the fastest", columns, rows)


def predictions(cases: Iterable[dict[str, Any]]) -> Table:
    """Return measured time / predicted time, grouped by kind of tile (its name without sizes) and by size."""
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
    return Table("Measured over predicted", ["direction", "tiles", "size", "regimes", "least", "median", "most"], rows)


def _ratios(case: dict[str, Any]) -> list[tuple[dict[str, Any], float]]:
    times = case["milliseconds"]
    return [
        (tile, median(times[tile["name"]]) / tile["predicted_ms"])
        for tile in case["tiles"]
        if tile["name"] in case["tflops"]
    ]


def constants(cases: Sequence[dict[str, Any]], card: dict[str, Any]) -> Table:
    """Return each cost model's constants as written and as fitted, with the RMS relative error of both."""
    rows = []
    for name, (module, names) in CONSTANTS.items():
        observations = [observation for case in cases for observation in _observations(name, case, card)]
        if not observations:
            continue
        written = {constant: float(getattr(module, constant)) for constant in names}
        best = fitted(module, written, observations)
        squares = [float(np.mean(_errors(module, values, observations) ** 2)) for values in (written, best)]
        errors = [math.exp(math.sqrt(square)) - 1 for square in squares]
        rms_error = f"{errors[0]:.0%} -> {errors[1]:.0%}"
        rows += [
            [name, constant, f"{written[constant]:.3g}", f"{best[constant]:.3g}", str(len(observations)), rms_error]
            for constant in names
        ]
    columns = ["cost model", "constant", "written", "fitted", "observations", "RMS error"]
    return Table("Constants of the cost models", columns, rows)


Observation = tuple[Any, int, Any, Any, float]  # problem, visible (query, key) pairs, device, tile, measured seconds


def _observations(cost: str, case: dict[str, Any], card: dict[str, Any]) -> list[Observation]:
    """Return the arguments of a cost model for every measured tile of a case, each with its measured time."""
    regime = Regime.of(case)
    engine = cost.partition(" ")[0]
    fp8 = regime.dtype.startswith("float8")
    if engine == "wgmma" and cost != ("wgmma fp8" if fp8 else "wgmma backward" if regime.backward else "wgmma forward"):
        return []
    measured = {tile["name"] for tile, _ in _ratios(case) if tile["engine"] == engine}
    if not measured:
        return []
    problem = problem_of(regime, engine)
    hopper = device.named("sm_90a", "cuda")
    gpu = hopper._replace(units=card.get("multiprocessors") or hopper.units)
    pairs = problem.mask.band(problem.q_len, problem.kv_len).pairs
    return [
        (problem, pairs, gpu, tile, median(case["milliseconds"][f"{engine} {tile}"]) * 1e-3)
        for tile, _ in candidates(plan(problem, gpu), engine)
        if f"{engine} {tile}" in measured
    ]


def problem_of(regime: Regime, engine: str) -> Problem:
    """Return the problem of a regime for one engine."""
    fields: dict[str, Any] = {name: getattr(regime, name) for name in PROBLEM_FIELDS}
    sizes: dict[str, Any] = dict(batch=regime.batch, heads=regime.heads, kv_heads=regime.heads)
    sizes |= dict(q_len=regime.seqlen, kv_len=regime.seqlen)
    return ahead.problems(**fields, engine=engine, layout="bhsd")[-1]._replace(**sizes)


def fitted(module: ModuleType, written: dict[str, float], observations: Sequence[Observation]) -> dict[str, float]:
    """Fit the constants by least squares in log space (Levenberg-Marquardt).

    A constant that affects no observation stays close to its written value.
    """
    start = np.log(list(written.values()))

    def values(logs: Logs) -> dict[str, float]:
        return dict(zip(written, np.exp(logs).tolist(), strict=True))

    def errors(logs: Logs) -> Logs:
        return _errors(module, values(logs), observations)

    best, damping = start, 1.0
    for _ in range(ROUNDS):
        residual = errors(best)
        jacobian = np.stack([(errors(best + nudge) - residual) / NUDGE for nudge in NUDGE * np.eye(len(start))], axis=1)
        damped = jacobian.T @ jacobian + damping * np.eye(len(start))
        trial = np.clip(best - np.linalg.solve(damped, jacobian.T @ residual), start - WITHIN, start + WITHIN)
        better = np.sum(errors(trial) ** 2) < np.sum(residual**2)
        best, damping = (trial, max(damping / 4, LEAST_DAMPING)) if better else (best, damping * 4)
    return values(best)


def _errors(module: ModuleType, values: dict[str, float], observations: Sequence[Observation]) -> Logs:
    """Return log(predicted / measured) of every observation with these constants."""
    written = {name: getattr(module, name) for name in values}
    try:
        for name, value in values.items():
            setattr(module, name, value)
        return np.log([module.seconds(*arguments) / seconds for *arguments, seconds in observations])
    finally:
        for name, value in written.items():
            setattr(module, name, value)
