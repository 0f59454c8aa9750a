"""Plot a sweep with matplotlib, if installed."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from statistics import median
from typing import Any

from .. import plots
from ..gpu import Regime, fastest, tflops_of_others
from ..implementations import OURS
from .published import flash_attention_3


def plot(result: dict[str, Any], path: Path) -> bool:
    """Plot TFLOP/s over the sequence length for our fastest tile, all other implementations and published figures.

    One panel per dtype, head dimension and mask with at least two lengths. Returns False if there is none or matplotlib
    is not installed.
    """
    panels: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    order = ("dtype", "head_dim", "causal", "seqlen")
    for case in sorted(result["cases"], key=lambda case: [case[name] for name in order]):
        if case["tflops"] and not case["deterministic"]:
            panels.setdefault((case["dtype"], case["head_dim"], case["head_dim_v"], case["causal"]), []).append(case)
    panels = {panel: cases for panel, cases in panels.items() if len(cases) > 1}
    if not panels or importlib.util.find_spec("matplotlib") is None:
        return False
    rows = -(-len(panels) // 2)
    figure = plots.empty_figure(13, 4 * rows)
    direction = "backward alone" if result["cases"][0]["backward"] else "forward"
    figure.suptitle(f"{direction}, 16384 tokens, hidden size 2048, on {result['device']['gpu']}")
    for index, ((dtype, head_dim, head_dim_v, causal), cases) in enumerate(panels.items()):
        axes = figure.add_subplot(rows, 2, index + 1)
        for name, points in _lines(cases).items():
            axes.plot(*zip(*points, strict=True), marker="o", label=name, linewidth=2.5 if name == OURS else 1.2)
        axes.axhline(
            median(case["matmul_tflops"] for case in cases), color="grey", linestyle=":", label="torch.matmul bf16"
        )
        values = f", Dv {head_dim_v}" if head_dim_v else ""
        axes.set(ylabel="TFLOP/s")
        axes.set_ylim(0)
        plots.label_panel(axes, f"{dtype}, D {head_dim}{values}, {'causal' if causal else 'full'}", cases)
    figure.savefig(path, dpi=100)
    return True


def _lines(cases: list[dict[str, Any]]) -> dict[str, list[tuple[int, float]]]:
    """Return (length, TFLOP/s) points by implementation, ours first."""
    lines: dict[str, list[tuple[int, float]]] = {OURS: []}
    for case in cases:
        if (best := fastest(case)) is not None:
            lines[OURS].append((case["seqlen"], case["tflops"][best]))
        for name, speed in tflops_of_others(case).items():
            lines.setdefault(name, []).append((case["seqlen"], speed))
        if published := flash_attention_3(Regime.of(case)):
            lines.setdefault("FA3 (published, H100)", []).append((case["seqlen"], published))
    return {name: points for name, points in lines.items() if points}
