"""CUDA graphs of a forward and its backward on every engine, replayed with other values."""

from __future__ import annotations

import os
import subprocess
import sys

import cupy
import pytest
import torch
from engines import ENGINES, HEAD_DIM, assert_right, assign, bits, inputs, new_stream, on_every_engine, step

import cupy_flash
from cupy_flash.backends import cuda


@pytest.fixture
def compiled(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Load only the kernels of `cupy_flash.compile`."""
    monkeypatch.setattr(cuda, "_loaded", {})
    cupy_flash.compile(dtype=ENGINES[engine], head_dim=HEAD_DIM, causal=True, engine=engine)


@on_every_engine
def test_graph_of_cupy(engine: str, compiled: None) -> None:
    """The graph has its own memory pool: every replay writes to memory that was freed during the capture."""
    arrays, stream = inputs("cupy", engine), new_stream()
    pool = cupy.cuda.MemoryPool()
    cupy.cuda.Device().synchronize()
    with stream, cupy.cuda.using_allocator(pool.malloc):
        stream.begin_capture()
        results = step(arrays, engine)
        graph = stream.end_capture()
    for seed in (1, 2):
        with stream:
            assign(arrays, inputs("cupy", engine, seed))
            graph.launch()
            stream.synchronize()
        assert_right(results, engine, seed)


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
    """Torch runs the backward in a thread in which CuPy has no context yet."""
    command = [sys.executable, "-c", FIRST_BACKWARD.format(dtype=ENGINES[engine], engine=engine)]
    ran = subprocess.run(command, env=os.environ, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
