"""The worker processes of check and tune on a GPU made of NumPy, with the real CuPy."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from typing import Any

from patience import patiently

import gpu_in_numpy
from cupy_flash.measure import tuning
from cupy_flash.measure.checks import calls


@cache
def installed() -> gpu_in_numpy.Machine:
    """Install the devices of this process, and keep CuPy's kernels, which are PTX here, out of CuPy's usual cache."""
    os.environ["CUPY_CACHE_DIR"] = str(Path(os.environ["CUPY_FLASH_CACHE_DIR"]) / "cupy")
    return gpu_in_numpy.install(("sm_80",))


def check(task: calls.Task, announce: Any) -> Any:
    """Return the work of a check."""
    installed()
    return calls.work(task, patiently(announce))


def lose(task: calls.Task, announce: Any) -> Any:
    """Return the work of a check in which every kernel of simt makes an illegal access."""
    if task.engine == "simt":
        installed().fail("cuLaunchKernel", 700)
    return check(task, announce)


def tune(task: calls.Task, announce: Any) -> Any:
    """Answer a request of a tune; made-up numbers replace times, which mean nothing on a device made of NumPy."""
    installed()
    tuning.METERS["cuda"] = lambda plan, operands: float(len(plan.launches) * plan.block_q)
    return tuning.work(task, patiently(announce))
