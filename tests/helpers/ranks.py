"""Checks that several processes make together: each runs all of them in turn, in one process group, and writes what it
found. Starting a process costs seconds, so there is one group per size and one test per check."""

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

# Less than pytest gives a test, so that it says which check hung: of a group, and of all processes.
TIMEOUT = timedelta(seconds=1200)
JOIN_SECONDS = 1500


@dataclass(frozen=True)
class World:
    """What a check is called with: where this process stands."""

    rank: int
    size: int
    folder: Path


def run(checks: dict[str, Any], size: int, folder: Path) -> dict[str, dict[int, str]]:
    """For each check the complaints by rank. A check that ends its process leaves the complaint of that rank out."""
    context = torch.multiprocessing.get_context("spawn")
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
    with (world.folder / f"{world.rank}.jsonl").open("w", buffering=1) as found:
        for name, check in checks.items():
            try:
                check(world)
                complaint = ""
            except (Exception, pytest.fail.Exception):  # a check may fail in any way, and the others are still to run
                complaint = traceback.format_exc()
            found.write(json.dumps([name, complaint]) + "\n")
    distributed.destroy_process_group()
