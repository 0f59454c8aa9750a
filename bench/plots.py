"""Plot results with matplotlib, if installed: one PNG per section."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from .implementations import OURS
from .memory import NOISE, growth_exponent
from .report import count, names_in, step_seconds


def plot(section: str, result: dict[str, Any], path: Path) -> bool:
    """Plot one section; return False if matplotlib is not installed."""
    if importlib.util.find_spec("matplotlib") is None:
        return False
    records = result[section]["cases"]
    if section == "memory":
        panels = [("forward", records), ("forward + backward", records)]
    else:
        groups = {causal: [record for record in records if record["causal"] == causal] for causal in (False, True)}
        panels = [("causal" if causal else "full", group) for causal, group in groups.items() if group]
    figure = empty_figure(5.5 * len(panels) + 1, 4.5)
    case = records[0]
    figure.suptitle(
        f"{section}: B {case['batch']}, {case['heads']} heads, D {case['head_dim']}, {case['dtype']}; "
        f"{result['device']['cpu']}, {count(result['device']['threads'], 'thread')}"
    )
    for index, (title, group) in enumerate(panels):
        axes = figure.add_subplot(1, len(panels), index + 1)
        if section == "memory":
            _draw_memory(axes, group, title)
        else:
            _draw_speed(axes, group, ("forward",) if section == "forward" else ("forward", "backward"))
            axes.axhline(result["ceilings"]["flops_per_second"] / 1e9, color="grey", linestyle=":", label="matmul")
            axes.set_ylim(0)
        label_panel(axes, title, group)
    figure.savefig(path, dpi=120)
    return True


def empty_figure(width: float, height: float) -> Any:
    """Return an empty figure with the Agg canvas, which needs no display."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def label_panel(axes: Any, title: str, cases: list[dict[str, Any]]) -> None:
    """Set title, x axis, grid and legend of a panel."""
    lengths = [case["seqlen"] for case in cases]
    axes.set(title=title, xlabel="sequence length S", xscale="log")
    axes.set_xticks(lengths, [str(length) for length in lengths])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")


def _draw_speed(axes: Any, records: list[dict[str, Any]], stages: tuple[str, ...]) -> None:
    for name in names_in(records, "seconds"):
        points = [
            (record["seqlen"], record["flops"] / step_seconds(record, name, stages) / 1e9)
            for record in records
            if name in record["seconds"]
        ]
        axes.plot(*zip(*points, strict=True), marker="o", label=name, linewidth=2.5 if name == OURS else 1.2)
    axes.set(ylabel="GFLOP/s (higher is better)")


def _draw_memory(axes: Any, records: list[dict[str, Any]], stage: str) -> None:
    for name in names_in(records, "peaks"):
        points = [
            (record["seqlen"], record["peaks"][name][stage]["bytes"]) for record in records if name in record["peaks"]
        ]
        lengths, peaks = zip(*points, strict=True)
        label = f"{name}, S^{growth_exponent(lengths, peaks):.1f}" if len(points) > 1 else name
        axes.plot(
            lengths,
            [max(peak, NOISE) / 2**20 for peak in peaks],
            marker="o",
            label=label,
            linewidth=2.5 if name == OURS else 1.2,
        )
    axes.set(ylabel=f"MiB beyond inputs and outputs, at least {NOISE / 2**20:.0f}", yscale="log")
