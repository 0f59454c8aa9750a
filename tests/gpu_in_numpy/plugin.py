"""The pytest plugin of a process with devices made of NumPy: orders of execution, poisoned pools, and unnoticed
errors.
"""

from __future__ import annotations

import gc
import zlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import TYPE_CHECKING

import cupy
import pytest

if TYPE_CHECKING:
    from . import Machine


class Poison(cupy.cuda.MemoryHook):
    """Hook that fills each block of CuPy's pools with NaN when it is allocated and when it is freed, in stream order.

    A kernel on another stream that is ordered neither after the allocation nor before the free computes NaN in some
    order.
    """

    name = "Poison"

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._streams: dict[int, int] = {}  # the stream on which each block was allocated

    def malloc_postprocess(self, *, device_id: int, size: int, mem_size: int, mem_ptr: int, pmem_id: int) -> None:
        if mem_ptr:
            device = self._machine.heap.card_of(mem_ptr).index  # device_id is 0 for all pools of CuPy 14.2
            self._streams[mem_ptr] = cupy.cuda.get_current_stream(device).ptr
            self._machine.heap.poison(mem_ptr, mem_size, self._streams[mem_ptr], is_new=True)

    def free_preprocess(self, *, device_id: int, mem_size: int, mem_ptr: int, pmem_id: int) -> None:
        stream = self._streams.pop(mem_ptr, None)
        if stream is not None:
            self._machine.heap.poison(mem_ptr, mem_size, stream, is_new=False)


def plan_in_small_tiles() -> None:
    """Make every plan of simt and mma in this process use the small tile, as the simulator's tests do."""
    from tiles import SMALL_FRAGMENTS, SMALL_TILE, fragments

    from cupy_flash.engines import mma, simt

    small = fragments(SMALL_FRAGMENTS)
    simt.tiles = lambda problem, device: [SMALL_TILE]
    mma.tiles = lambda problem, device: [small(SimpleNamespace(problem=problem, device=device))]


class Plugin:
    def __init__(self, machine: Machine, seeds: int) -> None:
        self.machine, self.seeds = machine, seeds

    def pytest_configure(self) -> None:
        plan_in_small_tiles()

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        if metafunc.definition.get_closest_marker("orders"):
            metafunc.fixturenames.append("order")
            metafunc.parametrize("order", range(self.seeds), ids=lambda seed: f"order{seed}")

    @pytest.fixture(autouse=True)
    def device_in_numpy(self, request: pytest.FixtureRequest) -> Iterator[Machine]:
        """Start each test with empty queues and an order of its own; fail it if a call has gone wrong without
        raising.
        """
        # Freeze parsed kernels, so that gc.collect() in tests of memory need not search them. Garbage in cycles would
        # stay alive once frozen, 13 MB per test, so collect it first.
        gc.collect()
        gc.freeze()
        self.machine.reset(zlib.crc32(request.node.nodeid.encode()))
        with Poison(self.machine):
            yield self.machine
        self.machine.streams.finish()
        errors = list(self.machine.errors)
        self.machine.reset(0)
        assert not errors, "\n".join(errors)
