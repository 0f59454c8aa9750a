"""Offsets of 64 bits on the simulator: arrays, results and workspaces whose elements are more than 2**31 apart."""

from dataclasses import replace

import far
import numpy as np
import pytest
from cases import Case, assert_bitwise_equal, run_kernels
from tiles import SMALL_FRAGMENTS, fragments, small_tile

from cupy_flash.gpu.params import dtypes
from cupy_flash.jit import nvrtc
from cupy_flash.jit.source import assemble
from cupy_flash.simulator import launch
from cupy_flash.simulator.named_checks import CHECKS

CASE = Case(
    batch=2, q_len=4, kv_len=4, heads=2, kv_heads=2, dtype="float16", alibi="bh", bias="bhqk", mask="bhqk", sink=True
)
PACKED = replace(CASE, alibi=None, bias=None, mask=None, q_lengths=(3, 2), kv_lengths=(2, 4), packed=True)
ADDED = fragments(SMALL_FRAGMENTS, "added")
ENGINES = {
    "simt": dict(engine="simt", tile=small_tile),
    "mma": dict(engine="mma", tile=ADDED),
    "wgmma": dict(engine="wgmma", arch="sm_90a"),
}


# Clears the last 16 rows of dQ, adds to their right 8 columns, and signals the semaphore.
LAST_ROWS = """
#include "dq_sums.cuh"
extern "C" __global__ void last_rows(const __grid_constant__ Params p) {
  int head = p.heads - 1;
  Sequence sequence(p, p.batch - 1);
  DqSums sums(p, sequence, head);
  int row = sequence.q_rows - 16;
  for (int i = row; i < row + 16; ++i) sums.clear(i);
  __syncwarp();
  sums.add(row, 0, 1, {1, 2, 3, 4});
  if (threadIdx.x == 0) DqSemaphore(p, sequence, head).signal(row, 6);
}
"""
ROWS, COLUMNS, HEADS = 2**27 + 16, 16, 2


def far_call(case):
    """Return the call of a case with far rows, and a bias, a mask and dlse that are far in all axes."""
    call = case.call()
    options = dict(call.options)
    for name in options.keys() & {"bias", "mask"}:
        options[name] = far.spread(options[name], range(4))
    if "alibi_slopes" in options:
        options["alibi_slopes"] = far.spread_rows(options["alibi_slopes"])
    rows = {name: far.spread_rows(getattr(call, name)) for name in ("q", "k", "v", "dout")}
    return call._replace(**rows, options=options, dlse=far.spread(call.dlse, range(call.dlse.ndim)))


def assert_far_is_near(case, how):
    expected = run_kernels(case, **how)
    with pytest.MonkeyPatch.context() as patch:
        far.spread_results(patch)
        actual = run_kernels(case, call=far_call(case), **how)
    assert_bitwise_equal(actual, expected, case)


@pytest.mark.parametrize(
    ("case", "engine"), [(CASE, "simt"), (CASE, "mma"), (CASE, "wgmma"), (PACKED, "mma")],
    ids=["simt", "mma", "wgmma", "packed"],
)  # fmt: skip
def test_arrays_results_and_workspaces_of_an_engine(case, engine):
    assert_far_is_near(case, ENGINES[engine])


@pytest.mark.parametrize("is_packed", [False, True])
def test_workspaces_of_dq(is_packed):
    """The kernel adds to the last rows of the last head of the second sequence, whose addresses are far from the first.

    A packed sequence starts a new block of 16 rows.
    """
    bounds = np.array([0, ROWS - 16, ROWS], np.int32)
    squares = ROWS // 16 + is_packed
    head, batch = 16 * COLUMNS * squares, 0 if is_packed else 16 * COLUMNS * squares * HEADS
    sums = far.empty((HEADS * head if is_packed else 2 * batch,), np.float32, ())
    sums[-256:] = np.nan
    counters = far.empty((2, HEADS, squares), np.int32, (0, 1))
    memory, params = far.FarMemory(), np.zeros((), dtypes()["Params"])
    params["batch"], params["heads"], params["group"], params["q_len"], params["kv_len"] = 2, HEADS, 1, ROWS, ROWS
    params["cu_seqlens_q"] = params["cu_seqlens_k"] = memory.add(bounds, "bounds", writable=False)
    params["dq_sums"] = memory.add(sums, "dq_sums"), batch, head, COLUMNS, 8
    params["dq_semaphore"] = memory.add(counters, "dq_semaphore"), *(x // 4 for x in counters.strides), 1
    text = assemble("last_rows", dict(HEAD_DIM=COLUMNS, PACKED=is_packed), {"last_rows.cu": LAST_ROWS})
    ptx = nvrtc.compile(text, "last_rows", "compute_80").ptx
    # All named checks are off: those of release order would need as much memory as the workspaces.
    launch(ptx, "last_rows", (1, 1, 1), (32, 1, 1), params.tobytes(), memory=memory, unchecked=CHECKS)
    np.testing.assert_array_equal(sums[-256:], np.repeat([0, 0, 0, 0, 1, 2, 3, 4], 32))
    assert counters[0 if is_packed else 1, -1, -1] == 7
