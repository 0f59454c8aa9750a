"""The pytest plugin of a process with devices made of NumPy: seeds, poison in CuPy's pools, and no error unnoticed."""

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
    """Fills each block of a pool with NaN when it is allocated and when it is freed, in the order of its stream.

    A kernel that runs on another stream, without being ordered after the one or before the other, computes NaN in some
    order of execution."""

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
        """Each test begins with nothing queued and an order of its own, and fails if a call has gone wrong unseen."""
        # Tests of memory call gc.collect(), which need not search parsed kernels. Cycles that are garbage by now would
        # keep their arrays once they are frozen: 13 MB a test.
        gc.collect()
        gc.freeze()
        self.machine.reset(zlib.crc32(request.node.nodeid.encode()))
        with Poison(self.machine):
            yield self.machine
        self.machine.streams.finish()
        errors = list(self.machine.errors)
        self.machine.reset(0)
        assert not errors, "\n".join(errors)
