"""The first call of a process: with nothing compiled yet, and with all of it on disk.

On a GPU the call itself, by then with CuPy imported and the GPU at work; elsewhere, for an architecture by name, all of
it but loading and launching.
"""

from __future__ import annotations

import importlib
import os
import tempfile
import time
from statistics import median
from typing import Any

import cupy_flash

from .isolated import Announce, Lost, OutOfTime, Worker
from .report import NOTHING, Table

ARCH = "sm_90a"  # where there is no GPU
CALLS: dict[str, dict[str, Any]] = {
    "wgmma forward, bf16 D 128": dict(dtype="bfloat16", head_dim=128, engine="wgmma"),
    "wgmma backward, bf16 D 128": dict(dtype="bfloat16", head_dim=128, engine="wgmma", backward=True),
    "mma forward, bf16 D 128": dict(dtype="bfloat16", head_dim=128, engine="mma"),
    "simt forward, fp32 D 64": dict(dtype="float32", head_dim=64, engine="simt"),
}
WARM_PROCESSES = 2
SECONDS = 60.0
# Of one kernel, at most: (first mark, goal), in seconds.
MARKS = {"cold": (2.0, 1.0), "warm": (0.050, 0.010)}


def measure(on_gpu: bool) -> dict[str, dict[str, Any]]:
    """Seconds of the first call of every kind, cold and warm, and the kernels that it needs; why, where it has none."""
    found = {}
    for name, words in CALLS.items():
        try:
            found[name] = _states(words, on_gpu)
        except (Lost, OutOfTime) as error:
            found[name] = {"left_out": str(error) or "out of time"}
    return found


def _states(words: dict[str, Any], on_gpu: bool) -> dict[str, Any]:
    """Each in a process of its own, all with the same folder, which the first fills."""
    with tempfile.TemporaryDirectory() as folder:
        seconds = []
        for _ in range(1 + WARM_PROCESSES):
            with Worker(first_call) as worker:
                seconds.append(worker(on_gpu, folder, words, until=time.monotonic() + SECONDS))
        kernels = sum(entry.is_dir() for entry in os.scandir(folder))
    return {"cold": seconds[0], "warm": median(seconds[1:]), "kernels": kernels}


def first_call(on_gpu: bool, folder: str, words: dict[str, Any], announce: Announce) -> float:
    """Seconds of that of this process, whose kernels are kept in a folder."""
    os.environ["CUPY_FLASH_CACHE_DIR"] = folder
    announce("the first call", SECONDS)
    return called_on_gpu(words) if on_gpu else prepared(words)


def prepared(words: dict[str, Any]) -> float:
    """Seconds until the kernels of a call are there, for an architecture by name."""
    from cupy_flash import ahead, device, plan
    from cupy_flash.backends.kernels import compile_launch

    asked = dict(words)
    backward = asked.pop("backward", False)
    begin = time.perf_counter()
    problem = ahead.problems(**asked, backward=backward)[-1]
    for launch in plan.plan(problem, device.named(ARCH, "cuda")).launches:
        compile_launch(launch, ARCH)
    return time.perf_counter() - begin


def called_on_gpu(words: dict[str, Any]) -> float:
    """Seconds of the call, until the GPU has done it."""
    import torch

    importlib.import_module("cupy")  # what its import takes is not ours
    dtype = getattr(torch, words["dtype"])
    q, k, v = (torch.randn(1, 1024, 8, words["head_dim"], device="cuda").to(dtype) for _ in range(3))
    options = dict(engine=words["engine"], return_lse=True)
    saved = cupy_flash.attention(q, k, v, **options) if words.get("backward") else ()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    if saved:
        cupy_flash.attention_backward(q, q, k, v, *saved, engine=words["engine"])
    else:
        cupy_flash.attention(q, k, v, **options)
    torch.cuda.synchronize()
    return time.perf_counter() - begin


def table(section: dict[str, dict[str, Any]]) -> Table:
    rows = [
        [name, NOTHING, states["left_out"], NOTHING]
        if "left_out" in states
        else [name, str(states["kernels"]), *(f"{1e3 * states[state]:.0f}" for state in MARKS)]
        for name, states in section.items()
    ]
    cold, warm = (f"{state} {1e3 * first:.0f}, goal {1e3 * goal:.0f}" for state, (first, goal) in MARKS.items())
    title = f"The first call of a process, milliseconds (marks of one kernel: {cold}; {warm})"
    return Table(title, ["call", "kernels", *MARKS], rows)
