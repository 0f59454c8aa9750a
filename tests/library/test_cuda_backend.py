"""The backend on a GPU up to the launch, without one: a stand-in for CuPy whose every name the real CuPy has."""

import importlib.util
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import reduce
from types import SimpleNamespace

import numpy as np
import pytest
from producers import Producer

import cupy_flash
from cupy_flash import ahead, cache, device
from cupy_flash.backends import cuda
from cupy_flash.params import dtypes
from cupy_flash.tensor_map import decode, encode_for_simulator

STREAM = 0xABC0


class Array:
    """cupy.ndarray, in host memory."""

    def __init__(self, x):
        self.x, self.shape, self.strides, self.dtype = x, x.shape, x.strides, x.dtype
        self.data, self.device = SimpleNamespace(ptr=x.ctypes.data), SimpleNamespace(id=1)


class Card:
    """cupy.cuda.Device."""

    compute_capability = "90"
    attributes = {"MultiProcessorCount": 132, "MaxSharedMemoryPerBlockOptin": 232448}

    def __init__(self, index):
        self.index = index

    def __enter__(self):
        Card.entered.append(self.index)
        return self

    def use(self):
        assert Card.entered[-1] == self.index
        Card.used = True

    def __exit__(self, *_):
        Card.entered.pop()


@pytest.fixture
def cupy(monkeypatch, tmp_path):
    """The stand-in as `cupy`; what was loaded and launched is in `loaded` and `launches`."""
    launches, loaded, attributes, waits = [], [], [], []

    def function(name):
        def launch(grid, block, arguments, *, shared_mem, stream):
            params, *maps = arguments
            raised = getattr(launch, "max_dynamic_shared_size_bytes", None)
            assert shared_mem in (raised, *(value for _, _, value in attributes))
            assert Card.entered == [1] and params.size == 1
            for argument in arguments:
                assert argument.dtype.names is None and argument.__array_interface__["data"][0] == argument.ctypes.data
            params = params.view(dtypes()["Params"])
            launches.append(SimpleNamespace(name=name, grid=grid, block=block, shared=shared_mem, stream=stream.ptr,
                                            params=params.copy(), maps=maps))  # fmt: skip

        launch.ptr = name
        return launch

    class Module:
        def load(self, code):
            loaded.append(code)

        get_function = staticmethod(function)

    class Event:
        ptr = 0xE0

        def __init__(self, *, disable_timing):
            assert disable_timing and Card.entered

        def record(self, stream):
            Event.ptr += 1
            waits.append((stream.ptr, self.ptr))

    def wait(stream, event):
        waits.append((event, stream, len(launches)))

    def raw_module(*, path):
        loaded.append(path)
        return SimpleNamespace(get_function=function)

    fake = SimpleNamespace(
        ndarray=Array,
        empty=lambda shape, dtype: Array(np.full(shape, 7, dtype)),
        RawModule=raw_module,
        cuda=SimpleNamespace(
            Device=Card,
            Event=Event,
            Module=Module,
            get_current_stream=lambda index: SimpleNamespace(ptr=STREAM),
            is_available=lambda: True,
            runtime=SimpleNamespace(
                streamIsCapturing=lambda stream: fake.capturing,
                getDevice=lambda: 1,
                pointerGetAttributes=lambda pointer: SimpleNamespace(device=1),
                streamWaitEvent=wait,
            ),
            driver=SimpleNamespace(
                CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES=8, funcSetAttribute=lambda *set: attributes.append(set)
            ),
        ),
        capturing=False,
    )
    monkeypatch.setitem(sys.modules, "cupy", fake)
    monkeypatch.setattr(Card, "entered", [], raising=False)
    monkeypatch.setattr(Card, "used", False, raising=False)
    monkeypatch.setattr(cuda, "_loaded", {})
    monkeypatch.setenv("CUPY_FLASH_CACHE_DIR", str(tmp_path / "kernels"))
    cache.compiled.cache_clear()
    device.gpu.cache_clear()
    yield SimpleNamespace(fake=fake, launches=launches, loaded=loaded, attributes=attributes, waits=waits)
    device.gpu.cache_clear()
    cache.compiled.cache_clear()


# What the stand-in, and the code that calls it, take to be there.
CUPY_NAMES = [
    "ndarray", "empty", "asarray", "array", "from_dlpack", "RawModule",
    "RawKernel.max_dynamic_shared_size_bytes", "ndarray.device", "cuda.Event.record", "cuda.runtime.streamWaitEvent",
    "cuda.Device.compute_capability", "cuda.Device.attributes", "cuda.Device.__enter__", "cuda.Device.use",
    "cuda.Module.load",
    "cuda.Module.get_function", "cuda.get_current_stream", "cuda.driver.funcSetAttribute",
    "cuda.driver.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES", "cuda.runtime.getDevice",
    "cuda.runtime.streamIsCapturing", "cuda.runtime.pointerGetAttributes",
    # The keys of Device.attributes are these names without their prefix.
    "cuda.runtime.cudaDevAttrMultiProcessorCount", "cuda.runtime.cudaDevAttrMaxSharedMemoryPerBlockOptin",
]  # fmt: skip


if importlib.util.find_spec("cupy"):  # there is none for macOS

    @pytest.mark.parametrize("name", CUPY_NAMES)
    def test_cupy_has_the_name(name):
        import cupy

        reduce(getattr, name.split("."), cupy)


def problem():
    """What `call` asks for."""
    return ahead.problems(dtype="float32", head_dim=8, causal=True, backward=False)[0]


def call(length=40, **options):
    q = Array(np.ones((1, length, 2, 8), np.float32))
    out, lse = cupy_flash.attention(q, q, q, causal=True, return_lse=True, **options)
    return q, out, lse


def test_forward_launches_one_kernel_on_the_callers_stream_and_device(cupy):
    q, out, lse = call()
    (launch,) = cupy.launches
    assert (type(out), out.shape, lse.shape) == (Array, (1, 40, 2, 8), (1, 2, 40))
    assert (launch.name, launch.stream, launch.block[1:]) == ("forward", STREAM, (1, 1))
    assert launch.grid[1:] == (2, 1) and launch.shared > 0
    assert launch.params["q"]["data"] == q.data.ptr and launch.params["out"]["data"] == out.data.ptr
    assert (out.x == 7).all()  # nothing else wrote or copied
    (path,) = cupy.loaded
    assert "cubin" in path


def test_tensor_maps_are_the_second_argument(cupy, monkeypatch):
    """One array of 128 bytes for each box; what the driver encodes is kept, but a new address is a new map."""
    encoded = []

    def encode(tensor_map):
        assert Card.used  # or the driver finds no context in a new thread
        encoded.append(tensor_map)
        return encode_for_simulator(tensor_map)

    monkeypatch.setattr(cuda, "encode_for_gpu", encode)
    x = np.ones((1, 40, 2, 64), np.float16)
    q, k, v = (Array(x.copy()) for _ in range(3))
    other = Array(x)
    results = [cupy_flash.attention(q, k, each, engine="wgmma") for each in (v, v, other)]
    for launch, values, out in zip(cupy.launches, (v, v, other), results, strict=True):
        (maps,) = launch.maps
        assert (maps.shape, maps.nbytes) == ((), 4 * 128)
        addresses = [decode(maps.tobytes()[at : at + 128]).address for at in range(0, 4 * 128, 128)]
        assert addresses == [array.data.ptr for array in (q, k, values, out)]
    assert len(encoded) == 4 + len(results)


class Interface:
    """A CUDA array of an unknown library, ready on a stream of its own."""

    def __init__(self, x, stream):
        self.x, self.__cuda_array_interface__ = x, x.__array_interface__ | {"stream": stream}


def test_outputs_of_cupy_are_written_on_its_stream_after_the_producers(cupy):
    """CuPy hands out the memory of its outputs and workspaces by its own stream: on another kernels would write to
    memory that is in use. So that one waits, once for each stream on which an input is ready."""
    x = np.ones((1, 40, 2, 8), np.float32)
    arrays = [Interface(x.copy(), stream) for stream in (77, None, STREAM)]
    out, lse = cupy_flash.attention(*arrays, return_lse=True)
    (launch,) = cupy.launches
    assert (type(out), launch.stream, launch.params["q"]["data"]) == (Array, STREAM, arrays[0].x.ctypes.data)
    ((other, event), (waited, waits, launched)) = cupy.waits
    assert (other, event, waits, launched) == (77, waited, STREAM, 0)
    cupy.waits.clear()
    call()
    assert not cupy.waits  # what CuPy's own arrays wait for is their owner's


def test_a_copy_is_made_on_its_arrays_device(cupy):
    """Current may be another. The default stream is that of DLPack's hand-over, so it need not wait."""
    taken = []

    def from_dlpack(x):
        taken.append((Card.entered[-1], x))
        return Array(np.from_dlpack(x.array))

    cupy.fake.from_dlpack = from_dlpack
    cupy.fake.array = lambda x, order: Array(np.array(x.x, order=order))
    cupy.fake.cuda.get_current_stream = lambda index: SimpleNamespace(ptr=0)
    x = np.ones((1, 40, 2, 16), np.float32)
    q, k = Producer(x[..., ::2], device=(2, 1)), Producer(np.ones((1, 40, 2, 8), np.float32), device=(2, 1))
    cupy_flash.attention(q, k, k)
    assert taken == [(1, q)] and Card.entered == [] and not cupy.waits
    assert cupy.launches[0].stream == 0 and cupy.launches[0].params["k"]["data"] == k.array.ctypes.data


def test_backward_launches_its_kernels_in_order(cupy):
    q, out, lse = call()
    gradients = cupy_flash.attention_backward(q, q, q, q, out, lse, causal=True)
    assert [launch.name for launch in cupy.launches[1:]] == ["delta", "backward_kv", "backward_q"]
    assert [type(x) for x in gradients[:3]] == [Array] * 3 and len(cupy.loaded) == 4


def test_a_kernel_is_loaded_once_for_all_lengths(cupy):
    call(40), call(40), call(41)
    assert len(cupy.launches) == 3 and len(cupy.loaded) == 1


def test_threads_that_begin_together_load_a_kernel_once(cupy, monkeypatch):
    """A thread that waits for another's compilation takes its kernel; it does not compile the same."""
    together, compile_launch = threading.Barrier(4), cuda.compile_launch
    compiled = []

    def slow(launch, arch):
        compiled.append(launch.kernel)
        time.sleep(0.2)
        return compile_launch(launch, arch)

    def load(launch):
        together.wait()
        return cuda.load(launch, "sm_90a")

    monkeypatch.setattr(cuda, "compile_launch", slow)
    (launch,) = cupy_flash.backends.plan_for(problem()).launches
    with ThreadPoolExecutor(4) as threads:
        functions = set(threads.map(load, [launch] * 4))
    assert len(functions) == len(cupy.loaded) == len(compiled) == 1


def test_without_a_folder_the_bytes_are_loaded(cupy, monkeypatch, tmp_path):
    closed = tmp_path / "file"
    closed.write_text("no folder")
    monkeypatch.setenv("CUPY_FLASH_CACHE_DIR", str(closed))
    monkeypatch.setattr(cache, "failures", iter([1, 2, 3]))  # the warning is tested with the cache
    call()
    (code,), ((name, attribute, shared),) = cupy.loaded, cupy.attributes
    assert code[:4] == b"\x7fELF" and (name, attribute, shared) == ("forward", 8, cupy.launches[0].shared)


def test_inside_a_capture_only_what_is_loaded_runs(cupy):
    cupy.fake.capturing = True
    with pytest.raises(RuntimeError, match=r"simt/forward would have to be compiled .* call cupy_flash.compile\(...\)"):
        call()
    assert not cupy.loaded and not cupy.launches
    cupy_flash.compile(dtype="float32", head_dim=8, causal=True, backward=False)
    for length in (1, 40, 3000):
        call(length)
    assert len(cupy.launches) == 3
