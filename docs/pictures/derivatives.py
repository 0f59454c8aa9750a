"""Memory of forward mode and of the double backward, as docs/derivatives.py measured it."""

from __future__ import annotations

import json

import chart
from chart import Frame
from place import ROOT
from plots import framed, source
from svg import Picture

COLORS = {
    "attention_jvp": "q",
    "attention_double_backward": "o",
    "JVP with all scores in memory": "alarm",
}


def draw() -> dict[str, Picture]:
    result = json.loads((ROOT / "docs" / "derivatives.json").read_text(encoding="utf-8"))
    series = {name: [(int(length), size / 2**20) for length, size in result["peaks"][name].items()] for name in COLORS}
    *_, dense = series
    last = chart.plain(series[dense][-1][0])
    words = f"causal, 1 head, D 64, float32; {source(result, with_torch=False)}"
    picture = framed("Memory of derivatives", COLORS, words)
    chart.lines(
        picture,
        Frame(62, 92, 620, 190),
        "Peak memory of one call",
        "MiB, results included, over the length S (lower is better)",
        series,
        COLORS,
        ends={dense: ["not measured", f"beyond {last}"]},
    )
    return {"derivatives": picture}
