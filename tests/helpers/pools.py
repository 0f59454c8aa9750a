"""Bytes held by the allocators of CuPy and torch, current and peak."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import cupy
from on_gpu import torch_has_gpu


class CupyMemory(cupy.cuda.MemoryHook):
    """Memory hook that records the bytes of CuPy's pool and the size of every allocation while it is active."""

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
    """Requested bytes of torch's allocator; unlike allocated bytes, they are not rounded for large blocks."""

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
    """Return the total size of the arrays in bytes."""
    return sum(x.nbytes for x in arrays)
