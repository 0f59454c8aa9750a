"""Result metadata (command, commit, device, versions) and the JSON file of a run."""

from __future__ import annotations

import datetime
import importlib.util
import json
import os
import platform
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

import cupy_flash
from cupy_flash.device import blas

ROOT = Path(__file__).resolve().parent.parent


def describe(arguments: list[str], threads: int) -> dict[str, Any]:
    """Return command, commit, device and versions; unknown values are None."""
    return {
        "command": " ".join(["python -m bench", *arguments]),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "git": git_state(),
        "device": {
            "cpu": cpu_name(),
            "architecture": platform.machine(),
            "cores": os.cpu_count(),
            "threads": threads,
            "load": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,  # 1-minute load average before the run
            "system": f"{platform.system()} {platform.release()}",
            "gpu": gpu_name(),
        },
        "versions": {
            "python": platform.python_version(),
            "numpy": np.__version__,
            "blas": blas(),
            "torch": version("torch") if importlib.util.find_spec("torch") else None,
            "cupy_flash": cupy_flash.__version__,
        },
    }


def write(result: dict[str, Any], path: Path) -> None:
    """Write a result as JSON, and create its folder if needed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def git_state() -> dict[str, Any]:
    """Return the HEAD commit and whether the work tree has changes."""
    commit, changes = (_git(*command) for command in (("rev-parse", "HEAD"), ("status", "--porcelain")))
    return {"commit": commit, "dirty": None if changes is None else changes != ""}


def cpu_name() -> str:
    """Return the CPU model name."""
    if sys.platform == "linux":
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    if sys.platform == "darwin":
        return subprocess.check_output(["sysctl", "-n", "machdep.cpu.brand_string"], text=True).strip()
    return platform.processor() or platform.machine()


def gpu_name() -> str | None:
    """Return the name of torch's current GPU; None without torch or a GPU."""
    if importlib.util.find_spec("torch") is None:
        return None
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


def _git(*command: str) -> str | None:
    try:
        process = subprocess.run(["git", *command], cwd=ROOT, capture_output=True, text=True)
    except FileNotFoundError:  # git is not installed
        return None
    return process.stdout.strip() if process.returncode == 0 else None
