"""On a GPU: every legal tile of an engine, beside what its cost predicts: python -m bench.sweep --out FILE.

What a plan chooses is the tile of the smallest prediction. The table says whether it is the fastest, and the ratios of
measured to predicted how the cost's constants have to change.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from cupy_flash import backends
from cupy_flash.plan import MODULES, Plan, candidates
from cupy_flash.problem import Operands, Options, Saved, pose

from .gpu import REGIMES, WARM_UP, Call, Regime, sampled_gpu, summary, time_interleaved
from .results import describe, write


def posed(regime: Regime) -> tuple[Plan, Operands]:
    """The plan and the operands of a regime, random normal tensors on the GPU."""
    import torch

    dtype = getattr(torch, regime.dtype)
    torch.manual_seed(0)

    def tensor(dim: int) -> Any:
        return torch.randn((regime.batch, regime.heads, regime.seqlen, dim), device="cuda", dtype=dtype)

    dim_v = regime.head_dim_v or regime.head_dim
    arrays = tensor(regime.head_dim), tensor(regime.head_dim), tensor(dim_v)
    options = Options(causal=regime.causal, layout="bhsd")
    problem, operands = pose("sweep", arrays, options, None, None)
    if regime.backward:
        out, lse = backends.forward(problem, operands)
        problem, operands = pose("sweep", arrays, options, None, Saved(tensor(dim_v), out.owner, lse.owner, None))
    return backends.plan_for(problem), operands


def measure(regime: Regime, engine: str) -> dict[str, Any]:
    """The record of a regime: for every tile what was predicted and the milliseconds of every sample."""
    import torch

    chosen, operands = posed(regime)
    run = backends.run_backward if regime.backward else backends.run_forward
    tiles = candidates(chosen, engine)
    calls: dict[str, Call] = {str(tile): partial(run, its, operands) for tile, its in tiles}
    for call in calls.values():
        for _ in range(WARM_UP):
            call()
    torch.cuda.synchronize()
    with sampled_gpu() as states:
        samples = time_interleaved(calls)
    rows = [
        {"tile": str(tile), "predicted_ms": its.cost * 1e3, "milliseconds": samples[str(tile)]} for tile, its in tiles
    ]
    return {"regime": regime.name, **regime._asdict(), "tiles": rows, "gpu": summary(states)}


def lines(case: dict[str, Any]) -> list[str]:
    """The fastest tiles of a record, and the one that a plan chooses."""
    rows = sorted(case["tiles"], key=lambda row: median(row["milliseconds"]))
    fastest = median(rows[0]["milliseconds"])
    found = [case["regime"]]
    for rank, row in enumerate(rows):
        chosen = row is case["tiles"][0]
        if rank < 3 or chosen:
            took = median(row["milliseconds"])
            mark = "  <- the plan's" if chosen else ""
            found.append(
                f"  {took:.3f} ms, {took / fastest:.2f}, predicted {row['predicted_ms']:.3f}: {row['tile']}{mark}"
            )
    return found


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.sweep", description="every legal tile of an engine on this GPU"
    )
    parser.add_argument("--engine", choices=[name for name in MODULES if name != "cpu"], default="mma")
    parser.add_argument("--out", type=Path, required=True, help="the JSON")
    arguments = list(sys.argv[1:] if argv is None else argv)
    asked = parser.parse_args(arguments)
    import torch

    if not torch.cuda.is_available():
        print("bench.sweep: torch finds no GPU here", file=sys.stderr)
        return 2
    result = describe(arguments, torch.get_num_threads())
    result["command"] = " ".join(["python -m bench.sweep", *arguments])
    result["cases"] = []
    for regime in REGIMES[f"sweep of {asked.engine}"]:
        case = measure(regime, asked.engine)
        result["cases"].append(case)
        write(result, asked.out)
        print("\n".join(lines(case)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
