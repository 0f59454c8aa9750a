"""CUDA tensors of torch: used in place, memory of calls and of training, CUDA graphs."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from engines import BATCH, ENGINES, HEAD_DIM, HEADS, assert_right, assign, bits, empty, inputs, on_every_engine, step
from pools import MEMORY, nbytes

import cupy_flash
from cupy_flash.arrays import as_array
from cupy_flash.gpu import cuda

LENGTH = 512  # array sizes are multiples of 512 bytes, to which allocators round up


def test_torch_tensor_is_described_in_place() -> None:
    x = torch.zeros(2, 3, device="cuda", dtype=torch.bfloat16)
    array = as_array(x, "x")
    assert (array.pointer, array.dtype.name, array.device) == (x.data_ptr(), "bfloat16", str(x.device))


@on_every_engine
def test_torch_holds_results_alone(engine: str) -> None:
    """A call holds its results, and lse, which autograd saves for the backward."""
    arrays, memory = empty("torch", engine, LENGTH), MEMORY["torch"]
    step(arrays, engine)
    *inputs, dout = arrays
    leaves = [x.requires_grad_() for x in inputs]
    before = memory.held()
    out = cupy_flash.attention(*leaves, causal=True, engine=engine)
    assert memory.held() - before == nbytes(out) + 4 * BATCH * HEADS * LENGTH
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


@pytest.fixture
def compiled(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Load only the kernels that `cupy_flash.compile` builds."""
    monkeypatch.setattr(cuda, "_loaded", {})
    cupy_flash.compile(dtype=ENGINES[engine], head_dim=HEAD_DIM, causal=True, engine=engine)


@on_every_engine
def test_graph_of_torch(engine: str, compiled: None) -> None:
    arrays, graph = inputs("torch", engine), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step(arrays, engine)
    for seed in (1, 2):
        assign(arrays, inputs("torch", engine, seed))
        graph.replay()
        assert_right(results, engine, seed)


@on_every_engine
def test_a_replay_draws_another_dropout(engine: str) -> None:
    arrays, graph = inputs("torch", engine), torch.cuda.CUDAGraph()
    step(arrays, engine, dropout=0.5)
    with torch.cuda.graph(graph):
        out, *_ = step(arrays, engine, dropout=0.5)
    drawn = []
    for _ in range(2):
        graph.replay()
        drawn.append(out.clone())
    assert bool((bits(drawn[0]) != bits(drawn[1])).any())


FIRST_BACKWARD = """
import torch
import cupy_flash

torch.ones(3, device="cuda", requires_grad=True).sum().backward()  # torch has made its thread
cupy_flash.compile(dtype="{dtype}", head_dim=64, causal=True, engine="{engine}")
q = torch.randn(2, 100, 4, 64, device="cuda", dtype=torch.{dtype}).requires_grad_()
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    out = cupy_flash.attention(q, q, q, causal=True, engine="{engine}")
    (gradient,) = torch.autograd.grad(out, q, torch.ones_like(out))
graph.replay()
expected = cupy_flash.attention(q, q, q, causal=True, engine="{engine}")
assert torch.equal(out, expected) and bool(gradient.isfinite().all()) and float(gradient.abs().max()) > 0
"""


@on_every_engine
def test_the_first_backward_of_a_process_may_be_captured(engine: str) -> None:
    """torch runs the backward in a thread of its own, in which CuPy has no context yet."""
    command = [sys.executable, "-c", FIRST_BACKWARD.format(dtype=ENGINES[engine], engine=engine)]
    ran = subprocess.run(command, env=os.environ, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
