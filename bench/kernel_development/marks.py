"""Performance targets by regime, and which of them a sweep reaches."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

from cupy_flash.problem.records import FP8

from ..gpu import Regime, fastest, tflops_of_others
from ..report import NOTHING, Table


class Mark(NamedTuple):
    """Targets of a regime, as ratios of our speed to another speed: `first` is to be reached first, `goal` later.

    "best" is the ratio to the fastest other implementation in the same process, "mm" to torch.matmul bf16, "own" to our
    own non-deterministic backward, "fma" to the card's peak fp32 FMA rate.
    """

    first: dict[str, float]
    goal: dict[str, float]


BF16 = partial(Regime, "bfloat16")
BACKWARD = partial(Regime, "bfloat16", backward=True)
# In order of importance: a sweep measures them in this order.
MARKS = {
    BF16(128, 16384, False): Mark({"best": 0.90}, {"mm": 0.92, "best": 1.03}),
    BF16(128, 16384, True): Mark({"best": 0.90}, {"mm": 0.90, "best": 1.05}),
    BF16(128, 4096, True): Mark({"best": 0.90}, {"mm": 0.89, "best": 1.18}),
    BF16(64, 16384, True): Mark({"best": 1.0}, {"mm": 0.64, "best": 1.2}),
    Regime(FP8, 128, 16384, False): Mark({"mm": 1.1}, {"mm": 1.42}),
    BF16(256, 16384, True): Mark({"best": 1.0}, {"mm": 0.87, "best": 1.2}),
    BF16(128, 1024, True): Mark({"best": 0.90}, {"mm": 0.68, "best": 1.2}),
    BF16(64, 16384, False): Mark({"best": 1.0}, {"mm": 0.68, "best": 1.2}),
    BF16(256, 16384, False): Mark({"best": 1.0}, {"mm": 0.97, "best": 1.2}),
    BF16(192, 8192, True, head_dim_v=128): Mark({"best": 0.90}, {"mm": 0.87, "best": 1.07}),
    BF16(128, 8192, False): Mark({"best": 0.90}, {"mm": 0.92, "best": 1.03}),
    Regime(FP8, 128, 16384, True): Mark({"mm": 1.1}, {"mm": 1.36}),
    BF16(128, 512, False): Mark({"best": 0.8}, {"best": 1.05}),
    BF16(64, 512, False): Mark({"best": 0.8}, {"best": 1.05}),
    BF16(256, 512, False): Mark({"best": 0.8}, {"best": 1.05}),
    Regime("float32", 64, 1024, False): Mark({"best": 1.0}, {"fma": 0.6}),
    BACKWARD(128, 16384, False): Mark({"best": 0.80}, {"mm": 0.80, "best": 1.03}),
    BACKWARD(128, 16384, True): Mark({"best": 0.80}, {"mm": 0.76, "best": 1.03}),
    BACKWARD(64, 16384, False): Mark({"best": 0.9}, {"mm": 0.66, "best": 1.15}),
    BACKWARD(256, 16384, False): Mark({"best": 0.9}, {"mm": 0.72, "best": 1.15}),
    BACKWARD(128, 16384, False, deterministic=True): Mark({"own": 0.85}, {"own": 0.93}),
    BACKWARD(128, 16384, True, deterministic=True): Mark({"own": 0.85}, {"own": 0.93}),
}
RATIOS = ("best", "mm", "own", "fma")
FMA_OF_CLOCK = 128  # FMAs per clock and SM


def table(result: dict[str, Any]) -> Table:
    """Return the table of the measured regimes that have a mark."""
    cases = {case["regime"]: case for case in result["cases"]}
    rows = []
    for regime, mark in MARKS.items():
        case = cases.get(regime.name)
        if case is None:
            continue
        measured, best, others = ratios(regime, cases, result["device"]), fastest(case), tflops_of_others(case)
        other = max(others, key=others.__getitem__, default=None)
        reached = [name for name in ("goal", "first") if _is_reached(getattr(mark, name), measured)]
        rows.append(
            [
                regime.name,
                f"{case['tflops'][best]:.0f}" if best else NOTHING,
                f"{others[other]:.0f} {other}" if other else NOTHING,
                *(f"{measured[ratio]:.2f}" if ratio in measured else NOTHING for ratio in RATIOS),
                _ratios_text(mark.first),
                _ratios_text(mark.goal),
                reached[0] if reached else "neither",
                " / ".join(_median(case["gpu"], name) for name in ("sm_clock_mhz", "power_w")),
            ]
        )
    columns = ["regime", "TFLOP/s", "fastest other", *(f"R_{ratio}" for ratio in RATIOS)]
    columns += ["first mark", "goal", "reached", "MHz / W"]
    return Table("The fastest tile of every regime with a mark (median)", columns, rows)


def ratios(regime: Regime, cases: dict[str, dict[str, Any]], device: dict[str, Any]) -> dict[str, float]:
    """Return the ratios of our fastest tile's speed (see `Mark`) for which the sweep has the data."""
    case = cases[regime.name]
    best = fastest(case)
    if best is None:
        return {}
    speed = case["tflops"][best]
    measured = {"mm": speed / case["matmul_tflops"]}
    if others := tflops_of_others(case):
        measured["best"] = speed / max(others.values())
    clock = case["gpu"].get("sm_clock_mhz")
    if regime.dtype == "float32" and clock and device.get("multiprocessors"):
        measured["fma"] = speed / (2 * FMA_OF_CLOCK * device["multiprocessors"] * clock["median"] * 1e-6)
    unordered = cases.get(regime._replace(deterministic=False).name)
    if regime.deterministic and unordered and (tile := fastest(unordered)):
        # Each speed is relative to the matmul of its own process, because the two processes may have run at different
        # clocks.
        measured["own"] = measured["mm"] / (unordered["tflops"][tile] / unordered["matmul_tflops"])
    return measured


def _median(state: dict[str, Any], name: str) -> str:
    return f"{state[name]['median']:.0f}" if name in state else NOTHING


def _is_reached(mark: dict[str, float], measured: dict[str, float]) -> bool:
    return all(measured.get(ratio, 0) >= least for ratio, least in mark.items())


def _ratios_text(mark: dict[str, float]) -> str:
    return ", ".join(f"R_{ratio} {least}" for ratio, least in mark.items())
