"""CUDA graphs of CuPy: a forward and a backward of every engine, replayed with other values."""

from __future__ import annotations

import cupy
import pytest
from engines import ENGINES, HEAD_DIM, assert_right, assign, inputs, new_stream, on_every_engine, step

import cupy_flash
from cupy_flash.gpu import cuda

pytestmark = pytest.mark.orders


@pytest.fixture
def compiled(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Load only the kernels that `cupy_flash.compile` builds."""
    monkeypatch.setattr(cuda, "_loaded", {})
    cupy_flash.compile(dtype=ENGINES[engine], head_dim=HEAD_DIM, causal=True, engine=engine)


@on_every_engine
def test_graph_of_cupy(engine: str, compiled: None) -> None:
    """The graph has a memory pool of its own: every replay writes to memory that was freed during the capture."""
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
