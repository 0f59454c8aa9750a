"""GPU memory of calls: only their results stay allocated, and nothing grows as S^2."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import cupy
import pytest
import torch
from engines import ENGINES, HEAD_DIM, HEADS, empty, on_both_frameworks, on_every_engine, step

import cupy_flash

LENGTH = 512  # array sizes are multiples of 512 bytes, to which allocators round


class CupyMemory(cupy.cuda.MemoryHook):
    """Current and peak bytes of CuPy's pool."""

    most = 0

    def held(self) -> int:
        gc.collect()
        return int(cupy.get_default_memory_pool().used_bytes())

    def malloc_postprocess(self, **_: Any) -> None:
        self.most = max(self.most, cupy.get_default_memory_pool().used_bytes())

    def peak(self, work: Callable[[], object]) -> int:
        before = self.most = self.held()
        with self:
            work()
        return self.most - before


class TorchMemory:
    """Requested bytes of torch's allocator: its allocated bytes include the rounding of large blocks."""

    def held(self) -> int:
        gc.collect()
        return torch.cuda.memory_stats()["requested_bytes.all.current"]

    def peak(self, work: Callable[[], object]) -> int:
        torch.cuda.reset_peak_memory_stats()
        before = self.held()
        work()
        return torch.cuda.memory_stats()["requested_bytes.all.peak"] - before


MEMORY = {"cupy": CupyMemory(), "torch": TorchMemory()}


def nbytes(*arrays: Any) -> int:
    return sum(x.nbytes for x in arrays)


@on_every_engine
def test_cupy_holds_results_alone(engine: str) -> None:
    arrays, memory = empty("cupy", engine, LENGTH), MEMORY["cupy"]
    q, k, v, dout = arrays
    step(arrays, engine)  # warm-up: one-time allocations
    before = memory.held()
    out, lse = cupy_flash.attention(q, k, v, causal=True, engine=engine, return_lse=True)
    assert memory.held() - before == nbytes(out, lse) == nbytes(q) + 4 * 2 * HEADS * LENGTH
    gradients = cupy_flash.attention_backward(dout, q, k, v, out, lse, causal=True, engine=engine)[:3]
    assert memory.held() - before == nbytes(out, lse, *gradients) == nbytes(out, lse, q, k, v)
    del gradients
    assert memory.held() - before == nbytes(out, lse)
    del out, lse
    assert memory.held() == before


@on_every_engine
def test_torch_holds_results_alone(engine: str) -> None:
    """Results, and lse, which autograd saves until the backward."""
    arrays, memory = empty("torch", engine, LENGTH), MEMORY["torch"]
    step(arrays, engine)
    *inputs, dout = arrays
    leaves = [x.requires_grad_() for x in inputs]
    before = memory.held()
    out = cupy_flash.attention(*leaves, causal=True, engine=engine)
    assert memory.held() - before == nbytes(out) + 4 * 2 * HEADS * LENGTH
    gradients = torch.autograd.grad(out, leaves, dout)
    assert memory.held() - before == nbytes(out, *gradients) == nbytes(*arrays)
    del gradients
    assert memory.held() - before == nbytes(out)
    del out
    assert memory.held() == before


@on_every_engine
def test_twenty_steps_of_training_allocate_what_one_does(engine: str) -> None:
    memory = MEMORY["torch"]
    leaves = [x.requires_grad_() for x in empty("torch", engine, LENGTH)[:3]]
    optimizer = torch.optim.SGD(leaves, lr=1e-3)

    def train() -> None:
        optimizer.zero_grad()
        cupy_flash.attention(*leaves, causal=True, engine=engine).sum().backward()
        optimizer.step()

    train()
    seen = [(memory.peak(train), memory.held()) for _ in range(20)]
    assert len(set(seen)) == 1, seen


@on_both_frameworks
@pytest.mark.parametrize("deterministic", [False, True], ids=["any-order", "deterministic"])
@on_every_engine
def test_peak_is_linear_in_the_length(engine: str, framework: str, deterministic: bool) -> None:
    peaks = []
    for length in (2048, 4096):
        arrays = empty(framework, engine, length)
        options = dict(engine=engine, deterministic=deterministic)
        step(arrays, **options)
        peaks.append(MEMORY[framework].peak(lambda arrays=arrays, options=options: step(arrays, **options)))
    assert peaks[1] <= 2 * peaks[0]
    # Results and a few numbers per row; the scores would take ten times as much.
    rows = 2 * 4096 * HEADS
    assert peaks[1] <= rows * (4 * HEAD_DIM * (4 if ENGINES[engine] == "float32" else 2) + 4 * (HEAD_DIM + 16))
