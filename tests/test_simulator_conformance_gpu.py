"""The simulator against what GPUs gave: tests/conformance/gpu holds the result of every micro-kernel, a file a GPU.

conformance/on_gpu.py makes the files; where none is stored, there is nothing to hold the simulator to.
"""

import struct
from pathlib import Path

import numpy as np
from conformance import hopper, on_gpu
from conformance.kernels import BY_NAME, THREADS, WARP_CASES
from micro import run

from cupy_flash.backends.simulator import Memory, launch

STORED = sorted((Path(__file__).parent / "conformance" / "gpu").glob("*.npz"))
RELATIVE = {case.name: case.relative for case in (*BY_NAME.values(), *WARP_CASES) if case.relative is not None}
# PTX leaves the order and the rounding inside of mma open.
RELATIVE |= {f"mma.{form}": 2.0**-10 for form in on_gpu.MMA_FORMS}


def simulate(ptx, inputs, out, threads, counted):
    """What conformance.on_gpu.run does, on the simulator."""
    memory, result = Memory(), out.copy()
    pointers = [memory.add(x.copy(), f"input {i}", writable=False) for i, x in enumerate(inputs)]
    pointers.append(memory.add(result, "out", initialised=False))
    parameters = struct.pack(f"{len(pointers)}Q", *pointers) + (struct.pack("I", threads) if counted else b"")
    block = THREADS if counted else 32
    launch(ptx, "micro", (-(-threads // block), 1, 1), (block, 1, 1), parameters, memory=memory)
    return result


def simulate_hopper(case):
    """What conformance.on_gpu.run_hopper does, on the simulator."""
    out = case.out.copy()
    run(case.body, *case.inputs, out, threads=case.threads, blocks=case.blocks, maps=case.maps, **case.options)
    return out


def agree(actual, expected, relative=None):
    """Bitwise, NaN of any bits for NaN; with `relative` within that of the larger."""
    if actual.dtype.kind == "f":
        same = (actual == expected) & (np.signbit(actual) == np.signbit(expected)) | np.isnan(actual) & np.isnan(
            expected
        )
        if relative is not None:
            with np.errstate(all="ignore"):
                apart, scale = np.abs(actual - expected), np.maximum(np.abs(actual), np.abs(expected))
            same |= apart <= 2 * relative * np.maximum(scale, 1e-30)
        return bool(same.all())
    return bool((actual == expected).all())


def disagreements(path):
    """The micro-kernels of whose stored results the simulator gives others."""
    found = []
    with np.load(path) as stored:
        for name, _, ptx, inputs, out, threads in on_gpu.every_kernel():
            if on_gpu.key(name) in stored:
                actual = simulate(ptx, inputs, out, threads, not name.startswith("mma."))
                found += [] if agree(actual, stored[on_gpu.key(name)], RELATIVE.get(name)) else [name]
        for case in hopper.CASES:
            if on_gpu.key(case.name) in stored:
                same = np.array_equal(simulate_hopper(case), stored[on_gpu.key(case.name)])
                found += [] if same else [case.name]
    return found


def test_simulator_gives_what_gpus_gave():
    assert {path.stem: disagreements(path) for path in STORED} == {path.stem: [] for path in STORED}


def test_a_single_bit_is_seen(tmp_path):
    results = {}
    for name, _, ptx, inputs, out, threads in on_gpu.every_kernel():
        if name in ("add.f32", "add.u32", "ex2.approx.ftz.f32", "mma.m16n8k16-f16"):
            results[on_gpu.key(name)] = simulate(ptx, inputs, out, threads, not name.startswith("mma."))
    assert len(results) == 4
    results["wgmma_bf16-n8"] = simulate_hopper(hopper.BY_NAME["wgmma.bf16-n8"])
    np.savez(tmp_path / "same.npz", **results)
    assert disagreements(tmp_path / "same.npz") == []
    for wrong in results.values():
        wrong.view(np.uint32).flat[-1] ^= 1
    np.savez(tmp_path / "other.npz", **results)
    # One bit of an approximation is inside its promise.
    assert disagreements(tmp_path / "other.npz") == ["add.u32", "add.f32", "wgmma.bf16-n8"]


def test_the_runner_knows_every_kernel():
    names = [name for name, *_ in on_gpu.every_kernel()] + [case.name for case in hopper.CASES]
    assert set(BY_NAME) | {case.name for case in WARP_CASES} <= set(names)
    assert len(set(map(on_gpu.key, names))) == len(names)
