"""What a call runs on: asked of the machine once, and frozen."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from functools import lru_cache
from typing import Any


@dataclass(frozen=True, slots=True)
class Device:
    """A processor as the plan sees it."""

    name: str  # "cpu", "cuda:0", as arrays name it
    arch: str  # "x86_64", "arm64"
    units: int  # threads that BLAS would use: what the user set with OMP_NUM_THREADS, threadpoolctl, ... holds here too

    def __str__(self) -> str:
        return f"{self.name} ({self.arch}, {self.units} thread{'s' * (self.units != 1)})"


def cpu() -> Device:
    """This machine's processor, with the number of threads that NumPy's BLAS may use at this moment."""
    return Device("cpu", platform.machine(), blas_threads())


@lru_cache(maxsize=1)
def blas_controller() -> Any:
    """threadpoolctl's handle on NumPy's BLAS. Finding the libraries takes milliseconds, so it is done once."""
    from threadpoolctl import ThreadpoolController

    return ThreadpoolController().select(user_api="blas")


def blas_threads() -> int:
    """Threads that BLAS may use now; 1 where it cannot be asked (a BLAS that threadpoolctl does not know)."""
    return max((library.num_threads for library in blas_controller().lib_controllers), default=1)
