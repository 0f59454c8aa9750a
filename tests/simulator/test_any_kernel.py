"""The simulator runs kernels of any origin: parameter buffers, sums of counters, and errors that new users make."""

import struct

import numpy as np
import pytest

from cupy_flash.jit import nvrtc
from cupy_flash.simulator import Memory, SimulationError, errors, launch, pack

CUDA = """struct Pair { short a; double b; };
extern "C" __global__ void put(float* out, char c, Pair pair, float x, double y, int n) {
  if (threadIdx.x < n) out[threadIdx.x] = c + pair.a + pair.b + x + y;
}"""


@pytest.fixture(scope="module")
def ptx():
    return nvrtc.compile(CUDA, "put", "compute_80").ptx


def test_values_are_packed_as_the_driver_takes_them(ptx):
    out, memory = np.zeros(32, np.float32), Memory()
    pair = struct.pack("h6xd", -7, 0.5)
    parameters = pack(ptx, "put", memory.add(out, "out"), -1, pair, np.float32(0.25), 100.0, 3)
    assert len(parameters) == 52 and parameters[8:9] == b"\xff" and parameters[16:32] == pair
    counters = launch(ptx, "put", (1, 1, 1), (32, 1, 1), parameters, memory=memory)
    assert out.tolist() == [92.75] * 3 + [0] * 29
    assert str(counters).splitlines()[1:] == [
        "global memory: 0 bytes read, 12 written, 1 requests of 1 sectors",
        "shared memory: 0 wavefronts, 0 of them for bank conflicts",
    ]
    assert str(counters).startswith(f"put: {counters.warp_instructions.sum()} warp instructions (")
    assert "Instruction" not in repr(counters)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ((0,), r"put takes 6 parameters of \[8, 1, 16, 4, 8, 4\] bytes, 1 were given"),
        ((0, 0, b"12", 0.0, 0.0, 0), r"parameter 2 of put has 16 bytes, b'12' has 2"),
        ((0, 0, bytes(16), np.float64(0), 0.0, 0), r"parameter 3 of put has 4 bytes, .* has 8"),
        ((0, 0.5, bytes(16), 0.0, 0.0, 0), r"parameter 1 of put has 1 bytes, in which 0.5 does not fit"),
        ((0, 300, bytes(16), 0.0, 0.0, 0), r"parameter 1 of put has 1 bytes, in which 300 does not fit"),
    ],
)
def test_a_wrong_parameter_is_named(ptx, values, message):
    with pytest.raises(SimulationError, match=message):
        pack(ptx, "put", *values)


def test_a_kernel_that_is_not_there_is_named(ptx):
    for call in (pack, lambda ptx, name: launch(ptx, name, (1, 1, 1), (1, 1, 1), b"", memory=Memory())):
        with pytest.raises(SimulationError, match=r"no kernel 'get' in the PTX, which has \['put'\]"):
            call(ptx, "get")


def test_errors_of_a_first_use(ptx):
    with pytest.raises(errors.PtxError, match="is not PTX.*nvrtc.compile"):
        pack(CUDA, "put")
    with pytest.raises(TypeError, match=r"grid must be a tuple of three sizes \(x, y, z\), not 4"):
        launch(ptx, "put", 4, (32, 1, 1), b"", memory=Memory())
    with pytest.raises(TypeError, match=r"block must be .* not \(32,\)"):
        launch(ptx, "put", (1, 1, 1), (32,), b"", memory=Memory())
    with pytest.raises(TypeError, match="x must be a NumPy array of numbers, not list"):
        Memory().add([1.0], "x")


LAST_BLOCK = """extern "C" __global__ void last(int* parts, int* count, int* out) {
  parts[blockIdx.x] = 1;
  int before;
  asm volatile("atom.ORDER.gpu.global.add.s32 %0, [%1], 1;" : "=r"(before) : "l"(count) : "memory");
  if (before == 3) *out = parts[0] + parts[1] + parts[2] + parts[3];
}"""


@pytest.mark.parametrize("order", ["early", "late", "random"])
def test_a_relaxed_counter_of_blocks_orders_nothing(order):
    for sem in ("relaxed", "acq_rel"):
        parts, count, out, memory = np.zeros(4, np.int32), np.zeros(1, np.int32), np.zeros(1, np.int32), Memory()
        ptx = nvrtc.compile(LAST_BLOCK.replace("ORDER", sem), "last", "compute_80").ptx
        parameters = pack(ptx, "last", *(memory.add(x, "x") for x in (parts, count, out)))
        if sem == "relaxed":
            with pytest.raises(errors.Race, match="without a release and an acquire"):
                launch(ptx, "last", (4, 1, 1), (1, 1, 1), parameters, memory=memory, order=order)
        else:
            launch(ptx, "last", (4, 1, 1), (1, 1, 1), parameters, memory=memory, order=order)
            assert out[0] == 4
