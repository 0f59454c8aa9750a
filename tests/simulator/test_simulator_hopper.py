"""A complete warp-specialised Hopper kernel from CUDA source: attention with a producer warp and two consumer
warpgroups, TMA, wgmma and mbarriers.

It matches fp64 in every order of completion, and each planted bug is reported in every order.
"""

import functools
import struct
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from cupy_flash.gpu.tensor_map import DATA_TYPES, TensorMap, encode_for_simulator
from cupy_flash.jit import nvrtc
from cupy_flash.simulator import Memory, errors, launch

D, BLOCK_Q, BLOCK_KV, STAGES = 64, 128, 64, 2

KERNEL = (Path(__file__).parents[1] / "conformance" / "attention.cu").read_text()
DEFINITIONS = {
    "D": D,
    "BLOCK_Q": BLOCK_Q,
    "BLOCK_KV": BLOCK_KV,
    "STAGES": STAGES,
    "ACCUMULATORS": '"' + ", ".join(f"%{i}" for i in range(32)) + '"',
    "CONSTRAINTS": ", ".join(f'"+f"(d[{i}])' for i in range(32)),
}
SHARED_BYTES = 2 * D * (BLOCK_Q + 2 * STAGES * BLOCK_KV) + 16 + 16 * STAGES
HEADS, Q_LEN, KV_LEN = 2, 200, 150


@functools.lru_cache(maxsize=64)
def compiled(text):
    definitions = "".join(f"#define {name} {value}\n" for name, value in DEFINITIONS.items())
    return nvrtc.compile(definitions + text, "tests/forward", "compute_90a").ptx


@functools.lru_cache(maxsize=1)
def problem():
    """Return (q, k, v), each (heads, length, D), and (out, lse) in fp64."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((HEADS, length, D)).astype(ml_dtypes.bfloat16) for length in (Q_LEN, KV_LEN, KV_LEN))
    Q, K, V = (x.astype(np.float64) for x in (q, k, v))
    S = Q @ K.swapaxes(1, 2) / np.sqrt(D)
    lse = np.log(np.exp(S).sum(-1))
    return (q, k, v), (np.exp(S - lse[..., None]) @ V, lse)


def forward(text=KERNEL, *, blocks=3, **options):
    """Return (out, lse) by a persistent grid with fewer blocks than tiles."""
    (q, k, v), _ = problem()
    out, lse = np.zeros_like(q), np.zeros((HEADS, Q_LEN), np.float32)
    memory = Memory()

    def tensor(array, name, rows, **how):
        shape = (D, array.shape[1], HEADS)
        address = memory.add(array, name, **how)
        return TensorMap(DATA_TYPES["bf16"], address, shape, (2 * D, 2 * D * shape[1]), (D, rows, 1), 128)

    inputs = [tensor(x, name, rows, writable=False) for x, name, rows in
              ((q, "q", BLOCK_Q), (k, "k", BLOCK_KV), (v, "v", BLOCK_KV))]  # fmt: skip
    maps = [*inputs, tensor(out, "out", 64, initialised=False)]
    tiles = -(-Q_LEN // BLOCK_Q)
    log2 = float(np.log2(np.e)) / np.sqrt(D)
    params = struct.pack("Qiiiif", memory.add(lse, "lse", initialised=False), Q_LEN, KV_LEN, tiles, HEADS * tiles, log2)
    parameters = b"".join(map(encode_for_simulator, maps)) + params.ljust(32, b"\0")
    counters = launch(
        compiled(text), "forward", (blocks, 1, 1), (384, 1, 1), parameters, memory=memory, dynamic_shared=SHARED_BYTES,
        **options,
    )  # fmt: skip
    return out.astype(np.float64), lse, counters


@pytest.mark.parametrize("blocks", [1, 3])
def test_every_order_matches_fp64(blocks):
    _, (expected, lse) = problem()
    results = [forward(blocks=blocks, order=order)[:2] for order in ("early", "late")]
    results += [forward(blocks=blocks, order="random", seed=seed)[:2] for seed in range(4)]
    # P and the result are rounded to bf16, with a unit roundoff of 2**-8.
    assert np.abs(results[0][0] - expected).max() < 2.0**-8 * np.abs(expected).max()
    assert np.abs(results[0][1] - lse).max() < 1e-5
    for result in results[1:]:
        assert np.array_equal(result[0], results[0][0]) and np.array_equal(result[1], results[0][1])


def test_bytes_and_conflicts():
    _, _, counters = forward()
    tiles = -(-Q_LEN // BLOCK_Q)
    q_and_out, kv = HEADS * Q_LEN * D * 2, HEADS * tiles * 2 * KV_LEN * D * 2
    assert counters.global_bytes_read == q_and_out + kv
    assert counters.global_bytes_written == q_and_out + 4 * HEADS * Q_LEN
    assert counters.bank_conflicts == 0
    assert counters.by_class()["mma"] > 0


# name -> (original text, planted text, errors; None if only the result shows the bug)
PLANTED = {
    "wait for Q": ("wait(bars, q_parity);", "", errors.PendingCopy),
    "wait for K and V": ("wait(full, parity);", "", errors.PendingCopy),
    "wait for an empty stage": (
        "wait(full + 8 * STAGES, parity);",
        "",
        (errors.BarrierMisuse, errors.PendingCopy, errors.Race),
    ),
    "release before the wait": (
        "wgmma_wait<0>();\n      keep(O_rmem);\n      if (first) arrive(full + 8 * STAGES);",
        "if (first) arrive(full + 8 * STAGES);\n      wgmma_wait<0>();\n      keep(O_rmem);",
        errors.PendingCopy,
    ),
    "wait for S": (
        "wgmma_wait<0>();\n      keep(S_rmem);",
        "wgmma_wait<1>();\n      keep(S_rmem);",
        errors.PendingRegister,
    ),
    "fence before S": ("keep(S_rmem);\n      wgmma_fence();", "keep(S_rmem);", errors.MissingFence),
    "commit of O": (
        "wgmma_commit();\n      wgmma_wait<0>();\n      keep(O_rmem);",
        "wgmma_wait<0>();\n      keep(O_rmem);",
        (errors.PendingRegister, errors.PendingCopy),
    ),
    "proxy fence before the store": ("    fence();\n", "", errors.MissingFence),
    "barrier before the store": ("sync(1 + group, 128);", "", errors.Race),
    "wait before Q is overwritten": (
        'asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");',
        "",
        errors.PendingCopy,
    ),
    "Q released before the store": (
        "    const int head = tile / p.q_tiles, row0",
        "    if (warp == 0 && elected()) arrive(bars + 8);\n    const int head = tile / p.q_tiles, row0",
        (errors.BarrierMisuse, errors.PendingCopy, errors.Race),
    ),
    "bytes of V": (
        "expect(full, 2 * KV_BYTES);",
        "expect(full, KV_BYTES);",
        (errors.BarrierMisuse, errors.PendingCopy),
    ),
    "bytes of Q": ("expect(bars, Q_BYTES);", "expect(bars, 2 * Q_BYTES);", errors.Deadlock),
    "parity": ("int stage = 0, parity = 0,", "int stage = 0, parity = 1,", (errors.PendingCopy, errors.Deadlock)),
    "fence of the mbarriers": (
        'asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");',
        "",
        errors.MissingFence,
    ),
    "barrier after the mbarriers": ("__syncthreads();", "", (errors.Race, errors.Uninitialised)),
    "arrivals": ("mbarrier_init(bars + 8, 2);", "mbarrier_init(bars + 8, 3);", errors.Deadlock),
    "map that the compiler copies": (
        "const __grid_constant__ TensorMap k",
        "const TensorMap k",
        errors.NoTensorMap,
    ),
    "past the keys": ("key < p.kv_len ? S_rmem[j] : -1e30f", "S_rmem[j]", None),
}


@pytest.mark.parametrize("bug", PLANTED)
def test_planted_bug_is_found(bug):
    good, bad, error = PLANTED[bug]
    assert KERNEL.count(good) == 1
    text = KERNEL.replace(good, bad)
    if error is None:  # no check finds this bug, but the result is wrong
        assert np.abs(forward(text)[1] - problem()[1][1]).max() > 1e-3
        return
    for order in ("early", "late", "random"):
        with pytest.raises(error):
            forward(text, order=order)
