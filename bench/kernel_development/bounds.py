"""python -m bench bounds: find the bottleneck of the fastest tile of a regime with Nsight Compute, on a GPU.

ncu collects whole sections rather than metrics by name: it fails for an unknown metric, while a section contains only
the counters that the GPU has. The utilization of a resource is the first of its counters in BUSY that was collected.
"""

from __future__ import annotations

import csv
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..gpu import Regime, fastest, inputs
from ..report import NOTHING, Table

SECTIONS = (
    "SpeedOfLight", "ComputeWorkloadAnalysis", "MemoryWorkloadAnalysis", "MemoryWorkloadAnalysis_Tables",
    "SchedulerStats", "WarpStateStats",
)  # fmt: skip
# {unit: counters of its utilization}; the first counter that the GPU has is used. A suffix of SHARES completes a name.
BUSY = {
    "tensor pipe": ("sm__pipe_tensor_cycles_active", "sm__pipe_tensor_op_hmma_cycles_active"),
    "MUFU": ("sm__inst_executed_pipe_xu",),
    "FMA": ("sm__pipe_fma_cycles_active", "sm__inst_executed_pipe_fma"),
    "ALU": ("sm__pipe_alu_cycles_active", "sm__inst_executed_pipe_alu"),
    "issue": ("smsp__issue_active", "sm__inst_issued", "sm__issue_active", "smsp__inst_issued"),
    "L1 and shared": (
        "l1tex__data_pipe_lsu_wavefronts_mem_shared",
        "l1tex__data_pipe_lsu_wavefronts",
        "l1tex__throughput",
    ),
    "L2": ("lts__t_sectors", "lts__throughput"),
    "DRAM": ("dram__throughput", "gpu__dram_throughput"),
}
SHARES = (".avg.pct_of_peak_sustained_active", ".avg.pct_of_peak_sustained_elapsed")
STALL = re.compile(r"smsp__average_warps_issue_stalled_(\w+)_per_issue_active\.ratio")
NO_STALLS = ("selected", "not_selected")  # not stalls: the warp issued, or was eligible but another was selected
CONFLICTS = re.compile(r"l1tex__data_bank_conflicts_pipe_lsu_mem_shared(_op_\w+)?\.sum")
DURATION = "gpu__time_duration.sum"
BOUND = 60.0  # percent: a resource at or above it is the bottleneck; below, the kernel is latency-bound
SECONDS_OF_ONE = 90.0


def run(cases: Sequence[dict[str, Any]], seconds: float) -> list[dict[str, Any]]:
    """Return one record per case that has a fastest tile: its kernels' counters, or why there are none (left_out)."""
    begin = time.monotonic()
    records = []
    for case in cases:
        tile = fastest(case)
        remaining = seconds - (time.monotonic() - begin)
        if tile is None:
            continue
        record: dict[str, Any] = {"regime": case["regime"], "tile": tile, "kernels": [], "left_out": None}
        if remaining < SECONDS_OF_ONE:
            record["left_out"] = "out of time"
        else:
            try:
                record["kernels"] = _profiled(case, tile)
            except (OSError, RuntimeError) as error:
                record["left_out"] = str(error)
        print(
            f"{record['regime']}: {record['left_out'] or [kernel['bound'] for kernel in record['kernels']]}", flush=True
        )
        records.append(record)
    return records


def _profiled(case: dict[str, Any], tile: str) -> list[dict[str, Any]]:
    """Return the counters of each kernel of one call, profiled in a separate process."""
    if shutil.which("ncu") is None:
        raise RuntimeError("ncu is not installed")
    arguments = [repr(Regime.of(case)._asdict()), tile]
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "ncu.csv"
        # Measure at the same clocks as all other commands, because ncu by default locks them at the lower base clock.
        command = ["ncu", "--clock-control", "none", "--csv", "--page", "raw", "--print-units", "base"]
        command += [
            "--log-file",
            str(log),
            "--kernel-name",
            "regex:^(forward|forward_fp8|backward|backward_q|backward_kv)$",
        ]
        command += [argument for section in SECTIONS for argument in ("--section", section)]
        command += ["--profile-from-start", "off", sys.executable, "-m", "bench.kernel_development.bounds", *arguments]
        process = subprocess.Popen(
            command, start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        try:
            output, _ = process.communicate(timeout=SECONDS_OF_ONE)
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"timed out after {SECONDS_OF_ONE:.0f} s") from None
        finally:  # kill ncu and the profiled process
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
        text = log.read_text(encoding="utf-8") if log.is_file() else ""
    kernels = parsed(text)
    if process.returncode or not kernels:
        errors = [line for line in (text + output).splitlines() if "error" in line.lower()]
        raise RuntimeError("; ".join(errors)[:300] or f"ncu profiled no kernel, exit status {process.returncode}")
    return kernels


def parsed(text: str) -> list[dict[str, Any]]:
    """Parse ncu's raw CSV page: a line of metric names, a line of units, then one line per launch."""
    lines = [line for line in text.splitlines() if line.startswith('"')]
    names, *rows = csv.reader(lines) if lines else [[]]
    return [_launch(dict(zip(names, row, strict=True))) for row in rows[1:]]


def _launch(counters: dict[str, str]) -> dict[str, Any]:
    numbers = {}
    for name, cell in counters.items():
        try:
            numbers[name] = float(cell.replace(",", ""))
        except ValueError:  # text, or a counter that this GPU does not have
            continue
    busy = {resource: share for resource, names in BUSY.items() if (share := _share(names, numbers)) is not None}
    stalls = {match[1]: numbers[name] for name in numbers if (match := STALL.fullmatch(name))}
    waiting = {reason: clocks for reason, clocks in stalls.items() if reason not in NO_STALLS and clocks > 0}
    longest = sorted(waiting.items(), key=lambda pair: -pair[1])[:4]
    busiest = max(busy, key=busy.__getitem__, default=None)
    if busiest is not None and busy[busiest] >= BOUND:
        bound = busiest
    else:
        bound = f"waiting: {longest[0][0]}" if longest else NOTHING
    return {
        "kernel": counters.get("Kernel Name", NOTHING),
        "milliseconds": numbers[DURATION] / 1e6 if DURATION in numbers else None,
        "bound": bound,
        "busy": busy,
        "stalls": dict(longest),
        "bank_conflicts": sum(value for name, value in numbers.items() if CONFLICTS.fullmatch(name)),
    }


def _share(names: Iterable[str], numbers: dict[str, float]) -> float | None:
    return next((numbers[name + share] for name in names for share in SHARES if name + share in numbers), None)


def table(records: Iterable[dict[str, Any]]) -> Table:
    """Return a table with a row per kernel: its bottleneck, the utilization of units, and the stalls of its warps."""
    rows = []
    for record in records:
        for kernel in record["kernels"]:
            shares = (f"{kernel['busy'][name]:.0f}" if name in kernel["busy"] else NOTHING for name in BUSY)
            stalls = ", ".join(f"{reason} {clocks:.1f}" for reason, clocks in kernel["stalls"].items())
            rows.append([record["regime"], kernel["kernel"], kernel["bound"], *shares, stalls])
        if record["left_out"]:
            rows.append([record["regime"], NOTHING, record["left_out"], *[NOTHING] * (len(BUSY) + 1)])
    columns = [
        "regime",
        "kernel",
        "bound by",
        *(f"{name}, %" for name in BUSY),
        "stall cycles per issued instruction",
    ]
    return Table("Bottleneck of the fastest tile", columns, rows)


def main(arguments: Sequence[str]) -> None:
    """Run one call of a tile between cudaProfilerStart and cudaProfilerStop; ncu executes this module."""
    import ast

    import torch

    from cupy_flash import dispatch
    from cupy_flash.plan.plan import candidates

    from .sweep import posed

    regime, name = Regime(**ast.literal_eval(arguments[0])), arguments[1]
    for engine, problem, operands in posed(regime, inputs(regime)):
        if name.partition(" ")[0] == engine:
            plans = candidates(dispatch.plan_for(problem), engine)
            tile_plan = next(tile_plan for tile, tile_plan in plans if f"{engine} {tile}" == name)
            run = dispatch.run_backward if regime.backward else dispatch.run_forward
            run(tile_plan, operands)
            torch.cuda.synchronize()
            torch.cuda.cudart().cudaProfilerStart()
            run(tile_plan, operands)
            torch.cuda.synchronize()
            torch.cuda.cudart().cudaProfilerStop()


if __name__ == "__main__":
    main(sys.argv[1:])
