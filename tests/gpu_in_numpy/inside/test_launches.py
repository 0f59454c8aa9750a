"""The checks of a launch: what a driver refuses is refused here, and wrong launches of cupy_flash are found."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import cupy
import gpu_in_numpy
import numpy as np
import pytest
from engines import inputs, step
from gpu_in_numpy.modules import MAGIC

import cupy_flash
from cupy_flash.engines.launch import Launch
from cupy_flash.gpu import cuda, run_plan, tensor_map
from cupy_flash.jit import kernel_cache, nvrtc

machine = gpu_in_numpy.machine()
Refused = cupy.cuda.driver.CUDADriverError

FILL = cupy.RawKernel(
    """
extern "C" __global__ void fill(float* x) { x[threadIdx.x] = 1; }
extern "C" __global__ __launch_bounds__(64) void bounded(float* x) { x[threadIdx.x] = 1; }
extern "C" __global__ void with_shared(float* x) {
    __shared__ float y[1024];
    extern __shared__ float z[];
    y[threadIdx.x] = z[threadIdx.x] = 1;
    __syncthreads();
    x[threadIdx.x] = y[0] + z[0];
}
""",
    "fill",
)


def kernel(name: str) -> Any:
    return cupy.RawModule(code=FILL.code).get_function(name)


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "grid-x": ("fill", dict(grid=(2**31,)), "a grid of"),
    "grid-y": ("fill", dict(grid=(1, 65536)), "a grid of"),
    "block-x": ("fill", dict(block=(1025,)), "a block of"),
    "block-z": ("fill", dict(block=(1, 1, 65)), "a block of"),
    "block-threads": ("fill", dict(block=(64, 32)), "2048 threads"),
    "launch-bounds": ("bounded", dict(block=(65,)), "65 threads; a block has at most 64"),
    "shared": ("fill", dict(shared_mem=49153), "49153 bytes of shared memory, 49152 are allowed"),
    "shared-and-static": ("with_shared", dict(shared_mem=45057), "45057 bytes of shared memory, 45056 are allowed"),
}


@pytest.mark.parametrize("row", REFUSED)
def test_a_launch_that_a_driver_refuses(row: str) -> None:
    name, changes, why = REFUSED[row]
    x = cupy.zeros(64, np.float32)
    with pytest.raises(Refused):
        kernel(name)(**dict(grid=(1,), block=(64,), args=(x,)) | changes)
    assert why in machine.refusals[-1]
    kernel(name)((1,), (64,), (x,), shared_mem=256)
    assert x.get().sum() in (64, 128)


def test_shared_memory_beyond_the_device() -> None:
    function = kernel("with_shared")
    most = machine.devices.cards[0].shared_bytes
    function.max_dynamic_shared_size_bytes = most - 4096
    function((1,), (64,), (cupy.zeros(64, np.float32),), shared_mem=most - 4096)
    with pytest.raises(Refused):
        function.max_dynamic_shared_size_bytes = most - 4095


@pytest.mark.parametrize(("size", "fits"), [(32764, True), (32768, False)])
def test_parameters_of_more_bytes_than_a_launch_has(size: int, fits: bool) -> None:
    head = f".version 8.1\n.target {machine.devices.cards[0].arch}\n.address_size 64\n"
    text = head + f".visible .entry large(.param .b8 x[{size}])\n{{\n ret;\n}}\n"
    module = cupy.cuda.Module()
    module.load(text.encode())
    launch, values = module.get_function("large"), np.zeros((), f"V{size}")
    if fits:
        launch((1,), (1,), (values,))
        assert len(machine.modules.launches[-1].parameters) == size
    else:
        with pytest.raises(Refused):
            launch((1,), (1,), (values,))
        assert "32768 bytes of parameters, above 32764" in machine.refusals[-1]


def test_a_cubin_of_another_architecture_and_a_real_one() -> None:
    module = cupy.cuda.Module()
    for image in (MAGIC + b"sm_86\n", b"\x7fELF\x02\x01\x01"):
        with pytest.raises(Refused, match="NO_BINARY_FOR_GPU"):
            module.load(image)
    with pytest.raises(Refused, match="INVALID_PTX"):
        module.load(b"no PTX")


def test_code_of_other_passes_is_another_cache_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    """With and without --exhaustive, tests compile PTX with different flags and may share a cache, so a cubin of one
    must not serve the other.
    """
    arch, flags = machine.devices.cards[0].arch, nvrtc.flags

    def with_another(target: str) -> tuple[str, ...]:
        return (*flags(target), *(["--another"] if target.startswith("compute_") else []))

    before = nvrtc.flags(arch)
    monkeypatch.setattr(nvrtc, "flags", with_another)
    assert nvrtc.flags(arch) == (*before, "--another")


def test_a_tensor_map_needs_its_alignment() -> None:
    buffer = ctypes.create_string_buffer(256)
    start = -ctypes.addressof(buffer) % 64
    x = cupy.zeros((64, 64), np.float16)

    def encode(offset: int, address: int) -> int:
        shape, strides = (ctypes.c_uint64 * 2)(64, 64), (ctypes.c_uint64 * 2)(128, 0)
        box, ones = (ctypes.c_uint32 * 2)(64, 8), (ctypes.c_uint32 * 2)(1, 1)
        at = ctypes.c_void_p(ctypes.addressof(buffer) + start + offset)
        return tensor_map.driver().cuTensorMapEncodeTiled(at, 6, 2, address, shape, strides, box, ones, 0, 3, 3, 0)

    assert [encode(0, x.data.ptr), encode(32, x.data.ptr), encode(0, x.data.ptr + 8)] == [0, 1, 1]


def test_calls_without_an_answer() -> None:
    assert tensor_map.driver().cuMemAdvise_v2() == 801
    assert machine.errors == ["the stand-in has no cuMemAdvise"]
    machine.errors.clear()


# Wrong launches of cupy_flash


def changed(**fields: Callable[[Any], Any]) -> Callable[[Launch], Launch]:
    return lambda launch: launch._replace(**{name: change(getattr(launch, name)) for name, change in fields.items()})


WRONG = {
    "more-threads-than-bounds": (changed(threads=lambda n: 2 * n), "threads; a block has at most"),
    "grid-of-heads-in-y": (changed(grid=lambda grid: (1, 1 << 16, 1)), "a grid of"),
}


@pytest.mark.parametrize("bug", WRONG)
def test_a_wrong_launch_is_found(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    change, why = WRONG[bug]
    arrays = inputs("cupy", "simt")
    start = cuda._start
    monkeypatch.setattr(cuda, "_start", lambda work: start(work._replace(launches=tuple(map(change, work.launches)))))
    with pytest.raises(Refused):
        step(arrays, "simt")
    assert why in machine.refusals[-1]


def test_shared_memory_that_was_not_allowed_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the attribute of the function, a launch has at most 48 KiB."""
    monkeypatch.setattr(cuda, "_loaded", {})
    monkeypatch.setattr(cuda, "_function", planted_function)
    arrays = inputs("cupy", "simt")
    start = cuda._start
    more = changed(shared_bytes=lambda n: 50 << 10)
    monkeypatch.setattr(cuda, "_start", lambda work: start(work._replace(launches=tuple(map(more, work.launches)))))
    with pytest.raises(Refused):
        step(arrays, "simt")
    assert "51200 bytes of shared memory, 49152 are allowed" in machine.refusals[-1]


def planted_function(launch: Launch, arch: str) -> Any:
    """Return the function of cuda._function, without setting its attribute of dynamic shared memory."""
    result = run_plan.compile_launch(launch, arch)
    return cupy.RawModule(path=str(result.path)).get_function(launch.function)


# Arguments that cupy_flash passes to the driver


def test_forward_launches_one_kernel_on_the_callers_stream() -> None:
    q, k, v, _ = inputs("cupy", "simt")
    stream = cupy.cuda.Stream(non_blocking=True)
    machine.modules.launches.clear()
    with stream:
        out, lse = cupy_flash.attention(q, k, v, causal=True, return_lse=True, engine="simt")
    (launch,) = machine.modules.launches
    assert (launch.name, launch.stream, launch.card.index) == ("forward", stream.ptr, 0)
    assert launch.shared > 0 and launch.block[1:] == (1, 1)
    for array in (q, k, v, out, lse):
        assert array.data.ptr.to_bytes(8, "little") in launch.parameters


def test_backward_launches_its_kernels_in_order() -> None:
    arrays = inputs("cupy", "simt")
    machine.modules.launches.clear()
    step(arrays, "simt")
    assert [launch.name for launch in machine.modules.launches] == ["forward", "delta", "backward_kv", "backward_q"]


def test_a_kernel_is_loaded_once_for_all_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "_loaded", {})
    q, k, v, _ = inputs("cupy", "simt")
    for length in (4, 4, 5):
        cupy_flash.attention(q[:, :length], k[:, :length], v[:, :length], engine="simt")
    assert len(cuda._loaded) == 1


def test_without_a_folder_the_bytes_are_loaded(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    closed = tmp_path / "file"
    closed.write_text("no folder")
    monkeypatch.setenv("CUPY_FLASH_CACHE_DIR", str(closed))
    monkeypatch.setattr(cuda, "_loaded", {})
    monkeypatch.setattr(kernel_cache, "failures", iter(range(1, 9)))  # no warning here: test_cache.py tests it
    kernel_cache.compiled.cache_clear()
    q, k, v, _ = inputs("cupy", "simt")
    machine.modules.loads.clear()
    out = cupy_flash.attention(q, k, v, engine="simt")
    assert len(machine.modules.loads) == 1 and bool(cupy.isfinite(out).all())
    (function,) = cuda._loaded.values()
    assert isinstance(function, cupy.cuda.Function)  # a function loaded from memory; a RawKernel is loaded from a path
    kernel_cache.compiled.cache_clear()


def test_no_launch_without_blocks() -> None:
    """An empty batch, or a batch without sequences, gives empty results without a launch."""
    machine.modules.launches.clear()
    empty = cupy.empty((0, 4, 2, 8), np.float32)
    assert cupy_flash.attention(empty, empty, empty).shape == empty.shape
    assert not machine.modules.launches


def test_lists_of_selected_keys_are_checked_on_request() -> None:
    """With and without the check the results are those of the CPU; a kept call checks too."""
    rng = np.random.default_rng(0)
    q, k, v = rng.standard_normal((3, 1, 12, 2, 16), np.float32)
    lists = np.sort(rng.permuted(np.tile(np.arange(12, dtype=np.int32), (1, 1, 12, 1)), axis=-1)[..., :5])
    expected = cupy_flash.attention(q, k, v, selected=lists)
    on_gpu = [cupy.asarray(x) for x in (q, k, v)]
    for options in ({}, {}, {"check_selected": True}):
        out = cupy_flash.attention(*on_gpu, selected=cupy.asarray(lists), **options)
        np.testing.assert_allclose(cupy.asnumpy(out), expected, rtol=1e-4, atol=1e-5)
    lists[0, 0, 7, :2] = 3
    cupy_flash.attention(*on_gpu, selected=cupy.asarray(lists))
    with pytest.raises(ValueError, match=r"selected\[0, 0, 7\] names key 3 twice"):
        cupy_flash.attention(*on_gpu, selected=cupy.asarray(lists), check_selected=True)
