"""A Triton kernel with a race, of which the simulator names both accesses.

Every block stores its part of a sum and increments a counter; the last one adds the
parts. With sem="relaxed" nothing orders the stores of the other blocks before the loads
of the last. On a GPU the sum is nearly always right, so a test does not find the race.
"""

import argparse

import numpy as np
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from cupy_flash.simulator import UNENFORCED, Memory, SimulationError, launch, pack

BLOCKS, SIZE = 4, 256


@triton.jit
def total(
    x, parts, count, out, BLOCKS: tl.constexpr, SIZE: tl.constexpr, ORDER: tl.constexpr
):
    """Sum x: (BLOCKS, SIZE) into out: (1,)."""
    block = tl.program_id(0)
    tl.store(parts + block, tl.sum(tl.load(x + block * SIZE + tl.arange(0, SIZE))))
    tl.debug_barrier()
    if tl.atomic_add(count, 1, sem=ORDER, scope="gpu") == BLOCKS - 1:
        tl.store(out, tl.sum(tl.load(parts + tl.arange(0, BLOCKS))))


def run(order: str, seed: int = 0) -> np.float32:
    """Return the kernel's sum of 1024 numbers in the simulator of an sm_80 GPU."""
    constants = {"BLOCKS": BLOCKS, "SIZE": SIZE, "ORDER": order}
    signature = {
        "x": "*fp32",
        "parts": "*fp32",
        "count": "*i32",
        "out": "*fp32",
    } | dict.fromkeys(constants, "constexpr")
    source, target = ASTSource(total, signature, constants), GPUTarget("cuda", 80, 32)
    kernel = triton.compile(source, target=target, options={"enable_fp_fusion": True})
    ptx, name, threads = (
        kernel.asm["ptx"],
        kernel.metadata.name,
        32 * kernel.metadata.num_warps,
    )
    x = np.arange(BLOCKS * SIZE, dtype=np.float32)
    parts, count, out = (
        np.empty(BLOCKS, np.float32),
        np.zeros(1, np.int32),
        np.empty(1, np.float32),
    )
    memory = Memory()
    addresses = (
        memory.add(x, "x", writable=False),
        memory.add(parts, "parts", initialised=False),
    )
    addresses += memory.add(count, "count"), memory.add(out, "out", initialised=False)
    parameters = pack(
        ptx, name, *addresses, 0, 0
    )  # Triton adds two pointers to scratch memory, which is unused here
    launch(
        ptx, name, (BLOCKS, 1, 1), (threads, 1, 1), parameters, memory=memory,
        dynamic_shared=kernel.metadata.shared,
        unchecked=UNENFORCED, order="random", seed=seed,
    )  # fmt: skip
    return out[0]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--order",
        choices=("relaxed", "acq_rel"),
        default="relaxed",
        help="the counter's memory order",
    )
    try:
        print(
            f"sum: {run(parser.parse_args().order)}, expected "
            f"{sum(range(BLOCKS * SIZE))}"
        )
    except SimulationError as error:
        print(f"{type(error).__name__}: {error}")
