"""The fingerprint of a kernel: what leaves it unchanged, and what changes it."""

import pytest

from bench.kernel_development.fingerprint import fingerprint, normalised
from cupy_flash import device
from cupy_flash.gpu import ahead

TEXT = """#line 1 "kernel.cu"
// A kernel.
#line 1 "config.cuh"
constexpr int BLOCK_Q = 64;  // queries
constexpr bool BIAS = false;
#define PAGED 0
#line 3 "kernel.cu"
struct Partials {
  int rows;
};
template <int N>
__device__ int rows_of(const Partials& p) {
  return N * p.rows;
}
__device__ inline float limited(float x, float y) {
  float z = min(x, y) - threadIdx.x * BLOCK_Q;  // the smaller one
  asm volatile("ex2.approx.f32 %0, %0;" : "+f"(z));
  return x - y + 2.5f * z;
}
extern "C" __global__ void forward(float* out) {
  *out = limited(out[1], out[2]);
}
"""


@pytest.mark.parametrize(
    "old, new",
    [
        pytest.param("// A kernel.", "/* Another\n comment. */", id="comment"),
        pytest.param("  float z = min(x, y)", "\n\n  float z =\n      min( x,y )", id="white-space"),
        pytest.param("limited", "smaller", id="name-of-a-function"),
        pytest.param("z", "least", id="name-of-a-variable"),
        pytest.param("BLOCK_Q", "ROWS", id="name-of-a-constant"),
        pytest.param('"ex2.approx.f32 %0, %0;"', '"ex2.approx"\n    ".f32 %0, %0;"', id="divided-string"),
        pytest.param("BIAS = false", "BIAS = true", id="constant-that-is-not-read"),
        pytest.param("constexpr bool BIAS = false;\n", "", id="absent-constant-that-is-not-read"),
        pytest.param("  int rows;", "  int batch;\n  int rows;", id="type-that-is-not-used"),
        pytest.param("N * p.rows", "2 * N", id="function-that-is-not-used"),
        pytest.param("extern", "__device__ float3 g() { return {}; }\nextern", id="another-function-that-is-not-used"),
        pytest.param("#define PAGED 0", "#define PAGED 1", id="switch-that-is-not-read"),
    ],
)
def test_same(old, new):
    assert old in TEXT and normalised(TEXT.replace(old, new)) == normalised(TEXT)


@pytest.mark.parametrize(
    "old, new",
    [
        pytest.param("BLOCK_Q = 64", "BLOCK_Q = 128", id="constant"),
        pytest.param("2.5f", "2.25f", id="number"),
        pytest.param("x - y", "y - x", id="order-of-operands"),
        pytest.param("min(", "max(", id="function-of-the-compiler"),
        pytest.param("threadIdx", "blockIdx", id="variable-of-the-compiler"),
        pytest.param("float z", "double z", id="type"),
        pytest.param("ex2.approx", "lg2.approx", id="instruction"),
        pytest.param("ex2.approx.f32 %0", "ex2.approx.f32  %0", id="string"),
        pytest.param("volatile", "", id="qualifier"),
        pytest.param("*out = ", "*out = rows_of<2>({}) + ", id="use-of-a-function"),
    ],
)
def test_different(old, new):
    assert old in TEXT and normalised(TEXT.replace(old, new)) != normalised(TEXT)


def test_of_a_launch():
    """Constants, threads and shared memory change the fingerprint; the architecture and the grid do not."""
    on = {"sm_80": None, "sm_90": None}
    for arch in on:
        (on[arch],) = (
            x
            for x in ahead.launches(device.named(arch, "cuda"), dtype="float32", head_dim=8, backward=False)
            if x.function == "forward" and dict(x.constants)["BLOCK_Q"] == 64
        )
    launch = on["sm_80"]
    prints = [
        fingerprint(launch),
        fingerprint(launch._replace(constants=(*launch.constants, ("BLOCK_KV", 16)))),
        fingerprint(launch._replace(threads=launch.threads + 32)),
        fingerprint(launch._replace(shared_bytes=launch.shared_bytes + 16)),
        fingerprint(launch, launch),
    ]
    assert len(set(prints)) == len(prints)
    assert fingerprint(on["sm_90"]._replace(grid=(7, 7, 7))) == prints[0]
