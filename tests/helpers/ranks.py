"""Runs checks on several ranks, in processes of one process group that run all checks in turn and record the errors.

Starting a process takes seconds, so there is one group per size, and one test per check. The processes are forks of one
that has imported torch.
"""

import json
import time
import traceback
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed

# Both limits are below pytest's timeout, so that the report names the check that hung.
TIMEOUT = timedelta(seconds=1200)
JOIN_SECONDS = 1500


@dataclass(frozen=True)
class World:
    """Argument of a check: the rank, the number of ranks, and a folder shared by all ranks."""

    rank: int
    size: int
    folder: Path


def run(checks: dict[str, Any], size: int, folder: Path) -> dict[str, dict[int, str]]:
    """Return tracebacks by check and rank, "" for success; a rank whose process ended in a check has no entry."""
    context = torch.multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch.distributed.fsdp", "torch.distributed.tensor"])
    processes = [context.Process(target=_work, args=(checks, World(rank, size, folder))) for rank in range(size)]
    for process in processes:
        process.start()
    end = time.monotonic() + JOIN_SECONDS
    for process in processes:
        process.join(max(end - time.monotonic(), 0))
    late = [process for process in processes if process.is_alive()]
    for process in late:
        process.kill()
        process.join()
    complaints: dict[str, dict[int, str]] = {name: {} for name in checks}
    for rank in range(size):
        for line in (folder / f"{rank}.jsonl").read_text().splitlines():
            name, complaint = json.loads(line)
            complaints[name][rank] = complaint
    assert not late, f"{len(late)} of {size} processes did not end: {complaints}"
    return complaints


def _work(checks: dict[str, Any], world: World) -> None:
    torch.set_num_threads(1)
    rendezvous = f"file://{world.folder / 'rendezvous'}"
    distributed.init_process_group("gloo", rendezvous, TIMEOUT, world.size, world.rank)
    with (world.folder / f"{world.rank}.jsonl").open("w", buffering=1) as report:
        for name, check in checks.items():
            try:
                check(world)
                complaint = ""
            except (Exception, pytest.fail.Exception):  # any exception of a check is recorded, and the next check runs
                complaint = traceback.format_exc()
            report.write(json.dumps([name, complaint]) + "\n")
    distributed.destroy_process_group()
