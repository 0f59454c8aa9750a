"""Bandwidth of one decode step on a GPU, as a fraction of the bandwidth of a kernel that only reads the same bytes.

L2 is flushed before every sample, so that K and V come from memory. Samples of all ways and of the read-only kernel are
interleaved in one process. Times are medians of CUDA events; regimes with `latency` time a captured graph. Other
installed libraries (see decode_libraries.py) are timed beside them.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from typing import Any, NamedTuple

import numpy as np

import cupy_flash
from cupy_flash.dispatch import plan_for, run_forward
from cupy_flash.plan.plan import Plan, forms
from cupy_flash.problem.build import pose_with_cache
from cupy_flash.problem.records import CacheOptions

from . import decode_libraries
from .report import NOTHING, Table

SAMPLES, WARM_UP = 15, 3
FLUSHES = 8  # L2 flushes before a sample: one clears L2, eight keep the GPU busy until the host has launched the call
FLUSHED_BYTES = 2**28
PAGES = (16, 64, 1)
READ, CONTIGUOUS, SPLIT = "read alone", "contiguous", "split_size 512"

READ_KERNEL = """
extern "C" __global__ void read_all(const uint4* x, long long count, uint4* out) {
  uint4 sum = {0, 0, 0, 0};
  long long step = (long long)gridDim.x * blockDim.x;
  for (long long n = blockIdx.x * (long long)blockDim.x + threadIdx.x; n < count; n += step) {
    uint4 y = x[n];
    sum.x ^= y.x, sum.y ^= y.y, sum.z ^= y.z, sum.w ^= y.w;
  }
  if ((sum.x & sum.y & sum.z & sum.w) == 0x12345678) *out = sum;
}
"""


class Regime(NamedTuple):
    """A decode step in float16; `first` and `goal` are its targets: fractions of the bandwidth, or microseconds."""

    batch: int
    heads: int
    kv_heads: int
    keys: int
    first: float
    goal: float
    q_len: int = 1
    lognormal: bool = False  # lognormal lengths with mean `keys`
    latency: bool = False  # the targets are microseconds of a captured graph
    dim: int = 128

    @property
    def name(self) -> str:
        """A readable name, unique among the regimes."""
        lengths = ", lognormal lengths" if self.lognormal else ""
        queries = f", {self.q_len} queries" if self.q_len > 1 else ""
        return f"B {self.batch}, {self.heads}/{self.kv_heads} heads, {self.keys} keys{lengths}{queries}"

    @property
    def lengths(self) -> np.ndarray[Any, Any]:
        """The number of keys of each sequence, int32."""
        if not self.lognormal:
            return np.full(self.batch, self.keys, np.int32)
        drawn = np.random.default_rng(0).lognormal(0, 1.2, self.batch)
        return np.maximum(drawn * self.keys / drawn.mean(), 1).astype(np.int32)


# The most important regimes come first.
REGIMES = (
    Regime(32, 32, 8, 4096, 0.80, 0.95),
    Regime(32, 32, 8, 32768, 0.85, 0.94),
    Regime(17, 64, 8, 8192, 0.80, 0.92),
    Regime(64, 8, 1, 3072, 0.65, 0.80, lognormal=True),
    Regime(16, 32, 32, 4096, 0.80, 0.92),
    Regime(8, 32, 8, 8192, 0.70, 0.90, q_len=4),
    Regime(1, 64, 8, 4096, 15, 9, latency=True),
    Regime(1, 8, 1, 4096, 12, 7, latency=True),
    Regime(1, 8, 1, 1024, 10, 6, latency=True),
)


def measure(regimes: tuple[Regime, ...] = REGIMES, samples: int = SAMPLES) -> list[dict[str, Any]]:
    """Return a record per regime: name, bytes of K and V, targets, median seconds by call, libraries left out."""
    return [_measure(regime, samples) for regime in regimes]


def _measure(regime: Regime, samples: int) -> dict[str, Any]:
    arrays = inputs(regime)
    ways = calls(regime, arrays)
    if regime.latency:
        ways = {name: _captured(way) for name, way in ways.items()}
    others, left_out = decode_libraries.working(arrays, regime.lengths, regime.latency)
    ways |= others
    for way in ways.values():
        for _ in range(WARM_UP):
            way()
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(samples):
        for name, way in ways.items():
            seconds[name].append(_sample(way))
    return regime._asdict() | {
        "regime": regime.name, "bytes": _bytes(regime), "seconds": {name: median(x) for name, x in seconds.items()},
        "left_out": left_out,
    }  # fmt: skip


def _bytes(regime: Regime) -> int:
    return int(regime.lengths.sum()) * regime.kv_heads * regime.dim * 2 * 2


def inputs(regime: Regime) -> tuple[Any, Any, Any]:
    """Return random normal q (B, Sq, Hq, D) and caches k, v (B, capacity, Hk, D) as CuPy arrays."""
    import cupy

    rng = np.random.default_rng(0)
    capacity = -(-int(regime.lengths.max()) // max(PAGES)) * max(PAGES)

    def normal(*shape: int) -> Any:
        return cupy.asarray(rng.standard_normal(shape, np.float32).astype(np.float16))

    q = normal(regime.batch, regime.q_len, regime.heads, regime.dim)
    few = normal(2, 1, capacity, regime.kv_heads, regime.dim)
    # All sequences have the same values, but each has its own memory.
    return (q, *(cupy.repeat(x, regime.batch, axis=0) for x in few))


def calls(regime: Regime, arrays: tuple[Any, Any, Any]) -> dict[str, Callable[[], Any]]:
    """Return {name: call} on CuPy arrays.

    They are a kernel that reads as many bytes, calls on each form of cache, and, on a contiguous cache, the forms of
    the kernel that only a tune chooses.
    """
    import cupy

    (q, k, v), on_gpu, rng = arrays, cupy.asarray(regime.lengths), np.random.default_rng(0)

    def contiguous(**options: Any) -> Any:
        return cupy_flash.attention_with_kv_cache(q, k, v, cache_seqlens=on_gpu, **options)

    def paged(page: int) -> Callable[[], Any]:
        # View the contiguous caches as pages, in random order in the block table, so that each page is read once.
        pool_k, pool_v = (x.reshape(-1, page, regime.kv_heads, regime.dim) for x in (k, v))
        table = cupy.asarray(rng.permutation(len(pool_k)).reshape(regime.batch, -1).astype(np.int32))
        return lambda: cupy_flash.attention_with_kv_cache(q, pool_k, pool_v, cache_seqlens=on_gpu, block_table=table)

    problem, operands = pose_with_cache(q, k, v, CacheOptions(cache_seqlens=on_gpu, engine="mma_decode"))

    def in_form(chosen: Plan) -> Callable[[], Any]:
        return lambda: run_forward(chosen, operands)[0].result()

    bytes_read, kernel, sink = _bytes(regime), cupy.RawKernel(READ_KERNEL, "read_all"), cupy.zeros(4, np.uint32)
    both = cupy.concatenate([k.ravel(), v.ravel()])
    blocks = 8 * cupy.cuda.Device().attributes["MultiProcessorCount"]

    def read() -> None:
        kernel((blocks,), (256,), (both, np.int64(bytes_read // 16), sink))

    return {
        READ: read,
        CONTIGUOUS: contiguous,
        SPLIT: lambda: contiguous(split_size=512),
        **{f"pages of {page}": paged(page) for page in PAGES},
        **{name: in_form(chosen) for name, chosen in forms(plan_for(problem)).items()},
    }


def _captured(way: Callable[[], Any]) -> Callable[[], Any]:
    """Capture a call in a CUDA graph and return the function that launches it."""
    import cupy

    way()  # loads the kernels, which is illegal during a capture
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        stream.begin_capture()
        kept = way()
        graph = stream.end_capture()

    def launch() -> Any:
        graph.launch(cupy.cuda.get_current_stream())
        return kept  # the output, to whose memory the graph writes

    return launch


def _sample(way: Callable[[], Any]) -> float:
    """Return the seconds of a call after L2 has been flushed."""
    import cupy

    flushed = cupy.empty(FLUSHED_BYTES, np.uint8)
    begin, end = cupy.cuda.Event(), cupy.cuda.Event()
    for _ in range(FLUSHES):
        flushed.fill(0)
    begin.record()
    way()
    end.record()
    end.synchronize()
    return 1e-3 * float(cupy.cuda.get_elapsed_time(begin, end))


def table(section: list[dict[str, Any]]) -> Table:
    """Return a table with a regime's time, bandwidth, share of the read-only kernel's bandwidth, and targets."""
    names = dict.fromkeys(name for row in section for name in row["seconds"])  # a library may lack some steps
    others = [name for name in names if name not in (READ, CONTIGUOUS)]
    rows = []
    for row in section:
        seconds = row["seconds"]
        ours, share = seconds[CONTIGUOUS], seconds[READ] / seconds[CONTIGUOUS]
        value = 1e6 * ours if row["latency"] else share
        reached = [name for name in ("goal", "first") if (value <= row[name] if row["latency"] else value >= row[name])]
        marks = f"{row['first']:g} us, {row['goal']:g} us" if row["latency"] else f"{row['first']:g}, {row['goal']:g}"
        rows.append(
            [row["regime"], f"{1e6 * ours:.1f} us", f"{row['bytes'] / ours / 1e12:.2f}", f"{share:.2f}"]
            + [f"{ours / seconds[name]:.2f}" if name in seconds else NOTHING for name in others]
            + [marks, reached[0] if reached else "neither"]
        )
    columns = ["step", "time", "TB/s", "share of reading alone", *(f"{name}, speed over contiguous" for name in others)]
    return Table("One step of a decode on a GPU", [*columns, "first mark, goal", "reached"], rows)
