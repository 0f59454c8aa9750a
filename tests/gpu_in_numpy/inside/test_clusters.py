"""Launches in clusters on Hopper: what a driver refuses is refused here."""

from __future__ import annotations

import cupy
import gpu_in_numpy
import numpy as np
import pytest
from gpu_in_numpy.errors import INVALID_CLUSTER_SIZE

machine = gpu_in_numpy.machine()


def kernel(blocks: int) -> cupy.RawKernel:
    """Return a kernel in clusters of `blocks` blocks; each block writes its rank."""
    code = """
extern "C" __global__ __cluster_dims__(BLOCKS, 1, 1) void rank(int* x) {
    unsigned rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    x[blockIdx.x] = rank;
}
"""
    return cupy.RawKernel(code.replace("BLOCKS", str(blocks)), "rank")


def test_a_grid_of_whole_clusters() -> None:
    x = cupy.zeros(6, np.int32)
    kernel(2)((6,), (1,), (x,))
    assert x.get().tolist() == [0, 1] * 3


@pytest.mark.parametrize(
    ("blocks", "grid", "why"),
    [(2, 3, "clusters of (2, 1, 1) in a grid of (3, 1, 1)"), (16, 16, "(16, 1, 1) is above the portable size of 8")],
    ids=["no-multiple", "too-large"],
)
def test_clusters_that_a_driver_refuses(blocks: int, grid: int, why: str) -> None:
    x = cupy.zeros(grid, np.int32)
    with pytest.raises(cupy.cuda.driver.CUDADriverError) as raised:
        kernel(blocks)((grid,), (1,), (x,))
    assert raised.value.status == INVALID_CLUSTER_SIZE and why in machine.refusals[-1]
    assert x.get().tolist() == [0] * grid
