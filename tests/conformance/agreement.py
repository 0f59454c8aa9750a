"""Compares stored results of a GPU with the simulator's."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from cupy_flash.measure.checks.micro_kernels import difference, every_kernel, simulate


def disagreements(path: Path) -> list[str]:
    """Return the names of the kernels whose stored results differ from the simulator's."""
    with np.load(path) as stored:
        return [
            kernel.name
            for kernel in every_kernel()
            if kernel.key in stored and difference(stored[kernel.key], simulate(kernel), kernel.relative)
        ]
