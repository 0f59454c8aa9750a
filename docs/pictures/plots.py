"""Plots of the runs that bench/results stores; each says on which machine, by which commit."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterable
from typing import Any

import chart
from bench.implementations import OURS
from bench.kernel_development.marks import MARKS
from bench.memory import NOISE
from bench.report import step_seconds
from chart import Frame
from place import ROOT
from svg import Picture

WIDTH, HEIGHT = 720, 350
LEFT, RIGHT = Frame(62, 92, 280, 190), Frame(422, 92, 280, 190)
COLORS = {
    OURS: "q",
    "standard": "alarm",
    "SDPA flash": "v",
    "SDPA math": "muted",
    "FlexAttention": "s",
}


def stored(name: str) -> dict[str, Any]:
    path = ROOT / "bench" / "results" / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8"))


def source(result: dict[str, Any], with_torch: bool = True) -> str:
    """The machine, the versions and the commit of a run."""
    device, versions, git = result["device"], result["versions"], result["git"]
    torch = f"torch {versions['torch']}, " if with_torch else ""
    threads = f"{device['threads']} thread{'s' * (device['threads'] != 1)}"
    changed = " with changes" if git["dirty"] else ""
    return f"{device['cpu']}, {threads}; {torch}commit {git['commit'][:10]}{changed}"


def ordered(names: Iterable[str]) -> dict[str, str]:
    present = set(names)
    return {name: color for name, color in COLORS.items() if name in present}


def sizes(case: dict[str, Any]) -> str:
    return f"B {case['batch']}, {case['heads']} heads, D {case['head_dim']}, {case['dtype']}"


def ends(cases: list[dict[str, Any]], names: Iterable[str]) -> dict[str, list[str]]:
    """Return why a series ends early: the reason of the first length that the bench left out."""
    first: dict[str, str] = {}
    for case in cases:
        for name in (name for name in names if name in case["left_out"]):
            words = f"at {chart.plain(case['seqlen'])} {case['left_out'][name]}"
            if name not in first and words not in first.values():
                first[name] = words
    return {name: textwrap.wrap(words, 13) for name, words in first.items()}


def framed(title: str, colors: dict[str, str], words: str, height: int = HEIGHT) -> Picture:
    picture = Picture(WIDTH, height, title)
    picture.legend(20, 28, colors)
    picture.text(20, height - 12, words, "muted", 11, "start")
    return picture


def speed(section: str, stages: tuple[str, ...], title: str) -> Picture:
    """GFLOP/s over the length, full and causal, under the speed of a matrix product."""
    result = stored("cpu")
    cases = result[section]["cases"]
    colors = ordered(name for case in cases for name in case["seconds"])
    product = result["ceilings"]["flops_per_second"] / 1e9
    picture = framed(
        title,
        {**colors, "matrix product": "line"},
        f"{sizes(cases[0])}; {source(result)}",
    )
    for frame, causal in ((LEFT, False), (RIGHT, True)):
        group = [case for case in cases if case["causal"] == causal]
        series = {
            name: [
                (case["seqlen"], case["flops"] / step_seconds(case, name, stages) / 1e9)
                for case in group
                if name in case["seconds"]
            ]
            for name in colors
        }
        ceiling = [(case["seqlen"], product) for case in group]
        chart.lines(
            picture,
            frame,
            f"{title}, {'causal' if causal else 'full'}",
            "GFLOP/s over the length S (higher is better)",
            {**series, "matrix product": ceiling},
            {**colors, "matrix product": "line"},
            logarithmic=False,
            ends=ends(group, colors),
        )
    return picture


def peaks(stage: str) -> dict[str, list[tuple[float, float]]]:
    cases = stored("cpu")["memory"]["cases"]
    return {
        name: [
            (case["seqlen"], max(case["peaks"][name][stage]["bytes"], NOISE) / 2**20)
            for case in cases
            if name in case["peaks"]
        ]
        for name in ordered(name for case in cases for name in case["peaks"])
    }


def memory() -> Picture:
    result = stored("cpu")
    case = result["memory"]["cases"][0]
    colors = ordered(peaks("forward"))
    picture = framed("Peak memory", colors, f"{sizes(case)}; {source(result)}")
    for frame, stage in ((LEFT, "forward"), (RIGHT, "forward + backward")):
        unit = "MiB beyond inputs and outputs, at least 1"
        chart.lines(
            picture,
            frame,
            f"Peak memory, {stage}",
            unit,
            peaks(stage),
            colors,
            ends=ends(result["memory"]["cases"], colors),
        )
    return picture


def summary() -> Picture:
    """Plot peak memory and time of a causal training step over the sequence length."""
    result = stored("cpu")
    cases = [case for case in result["backward"]["cases"] if case["causal"]]
    names = [name for name in peaks("forward") if name in COLORS]
    colors = {name: COLORS[name] for name in names}
    picture = framed("Memory and time", colors, f"{sizes(cases[0])}; {source(result)}")
    unit = "MiB beyond inputs and outputs (lower is better)"
    chart.lines(
        picture,
        LEFT,
        "Memory, forward + backward",
        unit,
        peaks("forward + backward"),
        colors,
        ends=ends(result["memory"]["cases"], colors),
    )
    times = {
        name: [
            (case["seqlen"], step_seconds(case, name, ("forward", "backward")) * 1e3)
            for case in cases
            if name in case["seconds"]
        ]
        for name in names
    }
    unit = "milliseconds, over the length S (lower is better)"
    chart.lines(
        picture,
        RIGHT,
        "Time, forward + backward, causal",
        unit,
        times,
        colors,
        ends=ends(cases, names),
    )
    return picture


def decode() -> Picture:
    result = stored("decode")
    shown = {"contiguous": "q", "pages of 16": "o", "SDPA, enable_gqa": "v"}
    rows = []
    for case in result["decode"]:
        least = case["seconds"]["SDPA, packed queries"]
        times = [(case["seconds"][name] / least, color) for name, color in shown.items()]
        rows.append((case["step"], [(value, color, f"{value:.2f}") for value, color in times]))
    legend = {
        f"{OURS}, contiguous": "q",
        f"{OURS}, pages of 16": "o",
        "SDPA, enable_gqa": "v",
    }
    picture = framed("One step of a decode", legend, source(result), 526)
    words = "One query on a KV cache: time over SDPA on packed queries (lower is better; dashed: 1)"
    picture.text(20, 58, words, "ink", 13, "start", bold=True)
    chart.bars(picture, Frame(20, 68, 690, 432), rows, mark=1)
    return picture


def hopper() -> Picture:
    """The predicted speed of our machine code for Hopper beside FlashAttention-3's figures."""
    from bench.kernel_development.predict import ERROR, MATMUL_TFLOPS, SPEED_OF_OVERLAP
    from bench.kernel_development.published import flash_attention_3_mainloop

    result = stored("predict")
    regimes = {regime.name: regime for regime in MARKS}
    rows = []
    for each in result["predict"]:
        other = flash_attention_3_mainloop(regimes[each["regime"]])
        if other is None or other.published is None:
            continue
        ours = SPEED_OF_OVERLAP * each["r_mm"][1] * MATMUL_TFLOPS
        name = each["regime"].replace("bfloat16", "bf16").replace("float8_e4m3fn", "fp8")
        bars = [
            (ours, "q", f"{ours:.0f}"),
            (other.published, "k", f"{other.published}"),
        ]
        rows.append((name.removesuffix(", 16384"), bars))
    legend = {f"{OURS}, predicted": "q", "FlashAttention-3, published": "k"}
    height = 136 + 58 * len(rows)
    picture = framed("Hopper", legend, source(result, with_torch=False), height)
    words = "TFLOP/s on an H100, 16384 tokens: a model of clocks that no GPU has confirmed"
    picture.text(20, 58, words, "ink", 13, "start", bold=True)
    factor = f"{SPEED_OF_OVERLAP:.2f}"
    words = f"Predicted: {factor} times the speed that the model finds for our machine code."
    picture.text(20, 77, words, "muted", 12, "start")
    words = f"FlashAttention-3's published speeds are {factor} ± {ERROR:.2f} times what it finds for theirs."
    picture.text(20, 93, words, "muted", 12, "start")
    chart.bars(picture, Frame(20, 102, 690, 58 * len(rows)), rows)
    return picture


def draw() -> dict[str, Picture]:
    return {
        "memory-and-time": summary(),
        "forward": speed("forward", ("forward",), "Forward"),
        "backward": speed("backward", ("forward", "backward"), "Forward + backward"),
        "memory": memory(),
        "decode": decode(),
        "hopper": hopper(),
    }
