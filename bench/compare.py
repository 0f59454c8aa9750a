"""Compare a run with an earlier one and list the regressions.

Speeds are relative to the matmul that the same process measured, so that a different clock, card or machine load does
not look like a regression. Other implementations are shown too: if their relative speed changed, the machine or their
version did.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

from .gpu import fastest, tflops_of_others
from .implementations import OURS
from .report import NOTHING, Table, step_seconds
from .results import ROOT

SLOWER = 0.05  # relative loss of speed that counts as a regression: twice the noise between runs of one binary


class Speed(NamedTuple):
    """The speed of one implementation in one case."""

    relative: float  # TFLOP/s divided by those of the matmul
    tile: str  # our fastest tile; empty for other implementations and on the CPU


def before(new: Path) -> dict[str, Any]:
    """Return the earlier result: the file named like `new` in bench/results; for that file, its version in HEAD."""
    stored = ROOT / "bench" / "results" / new.name
    if new.resolve() != stored.resolve():
        if not stored.is_file():
            raise SystemExit(f"there is no {new.name} in bench/results to compare with: pass --against OLD.json")
        return _loaded(stored.read_text(encoding="utf-8"))
    committed = f"HEAD:bench/results/{new.name}"
    git_show = subprocess.run(["git", "show", committed], cwd=ROOT, capture_output=True, text=True)
    if git_show.returncode:
        raise SystemExit(f"git has no {committed}: {git_show.stderr.strip()}")
    return _loaded(git_show.stdout)


def speeds(result: dict[str, Any]) -> dict[tuple[str, str], Speed]:
    """Return speeds by (case, implementation); for a sweep, cupy_flash's speed is that of its fastest tile."""
    speed_of = {}
    for case in result.get("cases", ()):
        for name, speed in tflops_of_others(case).items():
            speed_of[case["regime"], name] = Speed(speed / case["matmul_tflops"], "")
        if (best := fastest(case)) is not None:
            speed_of[case["regime"], OURS] = Speed(case["tflops"][best] / case["matmul_tflops"], best)
    for section, stages in (("forward", ("forward",)), ("backward", ("forward", "backward"))):
        for case in result.get(section, {}).get("cases", ()):
            mask = "causal" if case["causal"] else "full"
            label = f"{section} {case['dtype']}, D {case['head_dim']}, {mask}, {case['seqlen']} on the CPU"
            for name in case["seconds"]:
                speed = case["flops"] / step_seconds(case, name, stages)
                speed_of[label, name] = Speed(speed / result["ceilings"]["flops_per_second"], "")
    return speed_of


def compare(old: dict[str, Any], new: dict[str, Any], slower: float) -> tuple[Table, list[str]]:
    """Return the table of the speeds that both runs measured, and one line per regression.

    A regression is a case in which ours is slower by more than `slower`, or is no longer measured. Cases that the new
    run did not reach are skipped.
    """
    old_speeds, new_speeds = speeds(old), speeds(new)
    if not old_speeds:
        raise SystemExit("the old file has no speeds: it must be a result of --sweep, --gpu, forward or backward")
    reached = {case for case, _ in new_speeds} | {case["regime"] for case in new.get("cases", ())}
    rows, regressions = [], []
    for (case, name), old_speed in old_speeds.items():
        if case not in reached:
            continue
        new_speed = new_speeds.get((case, name))
        ratio = new_speed.relative / old_speed.relative if new_speed else None
        verdict = ""
        if name == OURS and (ratio is None or ratio < 1 - slower):
            verdict = "slower" if ratio else "gone"
            tiles = f", {old_speed.tile} -> {new_speed.tile}" if new_speed and new_speed.tile else ""
            change = f"{ratio:.2f} of the old speed" if ratio else "no longer measured"
            regressions.append(f"{case}: {change}{tiles}")
        cells = [f"{speed.relative:.3f}" if speed else NOTHING for speed in (old_speed, new_speed)]
        rows.append([case, name, *cells, f"{ratio:.2f}" if ratio else NOTHING, verdict])
    return Table(
        "Speed relative to the matmul of the same process", ["case", "name", "old", "new", "new / old", ""], rows
    ), regressions


def _loaded(text: str) -> dict[str, Any]:
    result: dict[str, Any] = json.loads(text)
    return result
