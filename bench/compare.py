"""A run beside the one before it: what has become slower.

Speeds are over the matrix product that the same process measured, so that another clock, card or load of the machine
does not look like a change of ours. Peers are shown too: where they have moved, the machine has, in its own way.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

from .gpu import fastest, of_peers
from .peers import OURS
from .report import NOTHING, Table, step_seconds
from .results import ROOT

SLOWER = 0.05  # of its speed, and ours is slower: twice what two runs of one binary may differ by


class Speed(NamedTuple):
    relative: float  # over the matrix product
    tile: str  # which of ours it is


def before(new: Path) -> dict[str, Any]:
    """What bench/results has under the name of a new file; of the file there itself, its last committed version."""
    stored = ROOT / "bench" / "results" / new.name
    if new.resolve() != stored.resolve():
        if not stored.is_file():
            raise SystemExit(f"there is no {new.name} in bench/results to compare with: name one with --against")
        return _loaded(stored.read_text(encoding="utf-8"))
    committed = f"HEAD:bench/results/{new.name}"
    shown = subprocess.run(["git", "show", committed], cwd=ROOT, capture_output=True, text=True)
    if shown.returncode:
        raise SystemExit(f"git has no {committed}: {shown.stderr.strip()}")
    return _loaded(shown.stdout)


def speeds(result: dict[str, Any]) -> dict[tuple[str, str], Speed]:
    """By case and name: ours is the fastest of our tiles where there are tiles."""
    found = {}
    for case in result.get("cases", ()):
        for name, speed in of_peers(case).items():
            found[case["regime"], name] = Speed(speed / case["matmul_tflops"], "")
        if (best := fastest(case)) is not None:
            found[case["regime"], OURS] = Speed(case["tflops"][best] / case["matmul_tflops"], best)
    for section, stages in (("forward", ("forward",)), ("backward", ("forward", "backward"))):
        for case in result.get(section, {}).get("cases", ()):
            mask = "causal" if case["causal"] else "full"
            label = f"{section} {case['dtype']}, D {case['head_dim']}, {mask}, {case['seqlen']} on the CPU"
            for name in case["seconds"]:
                speed = case["flops"] / step_seconds(case, name, stages)
                found[label, name] = Speed(speed / result["ceilings"]["flops_per_second"], "")
    return found


def compare(old: dict[str, Any], new: dict[str, Any], slower: float) -> tuple[Table, list[str]]:
    """Every pair of the two runs, and in words each of ours that has become slower by more than `slower` of its speed,
    or is no longer measured. What the new run did not come to is no change."""
    was, now = speeds(old), speeds(new)
    if not was:
        raise SystemExit("the old file has no speeds: compare what --sweep, --gpu, forward or backward has written")
    reached = {case for case, _ in now} | {case["regime"] for case in new.get("cases", ())}
    rows, worse = [], []
    for (case, name), old_speed in was.items():
        if case not in reached:
            continue
        new_speed = now.get((case, name))
        ratio = new_speed.relative / old_speed.relative if new_speed else None
        verdict = ""
        if name == OURS and (ratio is None or ratio < 1 - slower):
            verdict = "slower" if ratio else "gone"
            tiles = f", {old_speed.tile} -> {new_speed.tile}" if new_speed and new_speed.tile else ""
            change = f"{ratio:.2f} of its speed" if ratio else "not measured any more"
            worse.append(f"{case}: {change}{tiles}")
        cells = [f"{speed.relative:.3f}" if speed else NOTHING for speed in (old_speed, new_speed)]
        rows.append([case, name, *cells, f"{ratio:.2f}" if ratio else NOTHING, verdict])
    return Table(
        "Speed over the matrix product of the same process", ["case", "name", "old", "new", "new / old", ""], rows
    ), worse


def _loaded(text: str) -> dict[str, Any]:
    result: dict[str, Any] = json.loads(text)
    return result
