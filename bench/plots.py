"""Plot results with matplotlib, if installed: one PNG per section or sweep."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from statistics import median
from typing import Any

from .gpu import Regime, fastest, peer_tflops
from .memory import NOISE, growth_exponent
from .peers import OURS
from .published import flash_attention_3
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
    figure = _figure(5.5 * len(panels) + 1, 4.5)
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
        _label(axes, title, group)
    figure.savefig(path, dpi=120)
    return True


def plot_sweep(result: dict[str, Any], path: Path) -> bool:
    """Plot TFLOP/s over the sequence length for our fastest tile, all peers and published figures.

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
    figure = _figure(13, 4 * rows)
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
        _label(axes, f"{dtype}, D {head_dim}{values}, {'causal' if causal else 'full'}", cases)
    figure.savefig(path, dpi=100)
    return True


def _figure(width: float, height: float) -> Any:
    """Return an empty figure with the Agg canvas, which needs no display."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _label(axes: Any, title: str, cases: list[dict[str, Any]]) -> None:
    """Set title, x axis, grid and legend of a panel."""
    lengths = [case["seqlen"] for case in cases]
    axes.set(title=title, xlabel="sequence length S", xscale="log")
    axes.set_xticks(lengths, [str(length) for length in lengths])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")


def _lines(cases: list[dict[str, Any]]) -> dict[str, list[tuple[int, float]]]:
    """Return (length, TFLOP/s) points by implementation, ours first."""
    lines: dict[str, list[tuple[int, float]]] = {OURS: []}
    for case in cases:
        if (best := fastest(case)) is not None:
            lines[OURS].append((case["seqlen"], case["tflops"][best]))
        for name, speed in peer_tflops(case).items():
            lines.setdefault(name, []).append((case["seqlen"], speed))
        if published := flash_attention_3(Regime.of(case)):
            lines.setdefault("FA3 (published, H100)", []).append((case["seqlen"], published))
    return {name: points for name, points in lines.items() if points}


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
