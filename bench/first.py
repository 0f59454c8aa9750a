"""Time the first call of a process with a cold and with a warm kernel cache.

On a GPU the call itself is timed, after CuPy's import and CUDA initialization. Without a GPU, everything before the
kernel is loaded and launched is timed, for ARCH.
"""

from __future__ import annotations

import importlib
import os
import tempfile
import time
from statistics import median
from typing import Any

import cupy_flash
from cupy_flash.measure.worker_process import Announce, Lost, OutOfTime, Worker

from .report import NOTHING, Table

ARCH = "sm_90a"  # the architecture to compile for if there is no GPU
CALLS: dict[str, dict[str, Any]] = {
    "wgmma forward, bf16 D 128": dict(dtype="bfloat16", head_dim=128, engine="wgmma"),
    "wgmma backward, bf16 D 128": dict(dtype="bfloat16", head_dim=128, engine="wgmma", backward=True),
    "mma forward, bf16 D 128": dict(dtype="bfloat16", head_dim=128, engine="mma"),
    "simt forward, fp32 D 64": dict(dtype="float32", head_dim=64, engine="simt"),
}
WARM_PROCESSES = 2
SECONDS = 60.0
# Targets, as upper limits for one kernel in seconds: (first mark, goal).
MARKS = {"cold": (2.0, 1.0), "warm": (0.050, 0.010)}


def measure(on_gpu: bool) -> dict[str, dict[str, Any]]:
    """Return a record per call of CALLS: cold and warm seconds and number of kernels, or why it failed (left_out)."""
    section = {}
    for name, config in CALLS.items():
        try:
            section[name] = _states(config, on_gpu)
        except (Lost, OutOfTime) as error:
            section[name] = {"left_out": str(error) or "out of time"}
    return section


def _states(config: dict[str, Any], on_gpu: bool) -> dict[str, Any]:
    """Time the first call in several fresh processes that share one cache folder: the first finds it empty."""
    with tempfile.TemporaryDirectory() as folder:
        seconds = []
        for _ in range(1 + WARM_PROCESSES):
            with Worker(first_call) as worker:
                seconds.append(worker(on_gpu, folder, config, until=time.monotonic() + SECONDS))
        kernels = sum(entry.is_dir() for entry in os.scandir(folder))
    return {"cold": seconds[0], "warm": median(seconds[1:]), "kernels": kernels}


def first_call(on_gpu: bool, folder: str, config: dict[str, Any], announce: Announce) -> float:
    """Return the seconds of the first call of this process; `folder` is its kernel cache."""
    os.environ["CUPY_FLASH_CACHE_DIR"] = folder
    announce("the first call", SECONDS)
    return call_seconds(config) if on_gpu else prepare_seconds(config)


def prepare_seconds(config: dict[str, Any]) -> float:
    """Return the seconds to plan a call and compile its kernels for ARCH."""
    from cupy_flash import device
    from cupy_flash.gpu import ahead
    from cupy_flash.gpu.run_plan import compile_launch
    from cupy_flash.plan import plan

    options = dict(config)
    backward = options.pop("backward", False)
    begin = time.perf_counter()
    problem = ahead.problems(**options, backward=backward)[-1]
    for launch in plan.plan(problem, device.named(ARCH, "cuda")).launches:
        compile_launch(launch, ARCH)
    return time.perf_counter() - begin


def call_seconds(config: dict[str, Any]) -> float:
    """Return the seconds of the call on the GPU, including synchronization."""
    import torch

    importlib.import_module("cupy")  # its import time is not part of the call
    dtype = getattr(torch, config["dtype"])
    q, k, v = (torch.randn(1, 1024, 8, config["head_dim"], device="cuda").to(dtype) for _ in range(3))
    options = dict(engine=config["engine"], return_lse=True)
    saved = cupy_flash.attention(q, k, v, **options) if config.get("backward") else ()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    if saved:
        cupy_flash.attention_backward(q, q, k, v, *saved, engine=config["engine"])
    else:
        cupy_flash.attention(q, k, v, **options)
    torch.cuda.synchronize()
    return time.perf_counter() - begin


def table(section: dict[str, dict[str, Any]]) -> Table:
    """Return a table with the milliseconds of every first call."""
    rows = [
        [name, NOTHING, states["left_out"], NOTHING]
        if "left_out" in states
        else [name, str(states["kernels"]), *(f"{1e3 * states[state]:.0f}" for state in MARKS)]
        for name, states in section.items()
    ]
    cold, warm = (f"{state} {1e3 * first:.0f}, goal {1e3 * goal:.0f}" for state, (first, goal) in MARKS.items())
    title = f"The first call of a process, milliseconds (marks of one kernel: {cold}; {warm})"
    return Table(title, ["call", "kernels", *MARKS], rows)
