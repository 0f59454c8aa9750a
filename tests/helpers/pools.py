"""The bytes that CuPy's and torch's allocators hold, now and at most."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import cupy
from on_gpu import torch_has_gpu


class CupyMemory(cupy.cuda.MemoryHook):
    """Bytes of CuPy's pool, and the size of every allocation while the hook is active."""

    most = 0

    def __init__(self) -> None:
        self.allocated: list[int] = []

    def held(self) -> int:
        gc.collect()
        return int(cupy.get_default_memory_pool().used_bytes())

    def malloc_postprocess(self, *, size: int, **_: Any) -> None:
        self.allocated.append(size)
        self.most = max(self.most, cupy.get_default_memory_pool().used_bytes())

    def peak(self, work: Callable[[], object]) -> int:
        before = self.most = self.held()
        self.allocated.clear()
        with self:
            work()
        return self.most - before


class TorchMemory:
    """Requested bytes of torch's allocator: its allocated bytes include the rounding of large blocks."""

    def held(self) -> int:
        import torch

        gc.collect()
        return torch.cuda.memory_stats()["requested_bytes.all.current"]

    def peak(self, work: Callable[[], object]) -> int:
        import torch

        torch.cuda.reset_peak_memory_stats()
        before = self.held()
        work()
        return torch.cuda.memory_stats()["requested_bytes.all.peak"] - before


MEMORY: dict[str, Any] = {"cupy": CupyMemory()}
if torch_has_gpu():
    MEMORY["torch"] = TorchMemory()


def nbytes(*arrays: Any) -> int:
    """The bytes of all these arrays."""
    return sum(x.nbytes for x in arrays)
