"""as_array and empty for every framework: they copy nothing, import no framework, and refuse with a reason."""

import ctypes
import importlib.util
import os
import subprocess
import sys
import weakref
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch
from producers import MAKERS, NamespaceProducer, OldProducer, Producer, to_torch
from torch._subclasses import FakeTensorMode

import cupy_flash
from cupy_flash import arrays
from cupy_flash.arrays import as_array, contiguous, empty, made_on, stream_of

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
FLOAT8 = [np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(ml_dtypes.float8_e5m2)]
STORED = [np.dtype(name) for name in ("float16", "float32", "float64", "int32", "int64", "bool")] + [BFLOAT16, *FLOAT8]
REPOSITORY = Path(__file__).resolve().parents[2]


class ConsumedProducer(Producer):
    """Exports a capsule that another consumer has already taken."""

    def __dlpack__(self, **_):
        capsule = self.array.__dlpack__()
        np.from_dlpack(SimpleNamespace(__dlpack__=lambda **_: capsule, __dlpack_device__=lambda: (1, 0)))
        return capsule


class CudaArrayInterface:
    def __init__(self, **changes):
        self.__cuda_array_interface__ = {
            "version": 3,
            "shape": (2, 3),
            "typestr": "<f2",
            "data": (4096, False),
            "strides": None,
            "stream": None,
        } | changes


def in_subprocess(code, **environment):
    """Run code in a fresh process, in which no module is imported yet and which may abort."""
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=REPOSITORY,
        env=os.environ | environment,
        capture_output=True,
        text=True,
    )


def values(dtype, shape=(2, 3)):
    return np.arange(1, 1 + np.prod(shape)).reshape(shape).astype(dtype)


def makes(framework, dtype):
    return framework != "jax" or dtype.name not in ("float64", "int64")  # 64-bit dtypes in jax need a global switch


SERVED = [
    pytest.param(framework, dtype, id=f"{framework}-{dtype.name}")
    for framework in MAKERS
    for dtype in STORED
    if makes(framework, dtype)
]


# Inputs


@pytest.mark.parametrize(("framework", "dtype"), SERVED)
def test_describes_and_views(framework, dtype):
    expected = values(dtype)
    array = as_array(MAKERS[framework](expected), "q")
    assert (array.shape, array.strides, array.dtype, array.device) == ((2, 3), (3, 1), dtype, "cpu")
    assert array.framework == (framework if framework in ("numpy", "torch", "jax") else "dlpack")
    view = array.numpy()
    assert view.dtype == dtype
    assert view.ctypes.data == array.pointer
    assert (view == expected).all()


@pytest.mark.parametrize("dtype", STORED, ids=str)
def test_torch_view_is_the_tensors_memory(dtype):
    x = to_torch(values(dtype))
    view = as_array(x, "q").numpy()
    assert view.ctypes.data == x.data_ptr()
    assert view.tobytes() == x.view(torch.uint8).numpy().tobytes()
    view[...] = 0
    assert not x.to(torch.float64).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(
    "restride",
    [
        lambda x: x.transpose(1, 2),
        lambda x: x[:, ::2, 1:],
        lambda x: x[:, :1].expand(2, 7, 5),
        lambda x: x[0, 0, 0].expand(3, 4),
        lambda x: x[1, 2, 3],
    ],
    ids=["transposed", "sliced", "stride_0", "all_stride_0", "no_dimensions"],
)
@pytest.mark.parametrize("wrap", [lambda x: x, Producer, OldProducer], ids=["torch", "dlpack", "old_dlpack"])
def test_strides(dtype, restride, wrap):
    x = restride(torch.arange(2 * 4 * 5).reshape(2, 4, 5).to(dtype))
    array = as_array(wrap(x), "q")
    assert array.strides == x.stride()
    assert array.numpy().tolist() == x.tolist()


def test_negative_strides_do_not_abort():
    """torch.from_dlpack aborts the process (SIGABRT) on negative strides."""
    ran = in_subprocess(
        "import sys; sys.path.insert(0, 'tests/helpers')\n"
        "import numpy as np\n"
        "from producers import OldProducer, Producer\n"
        "from cupy_flash.arrays import as_array\n"
        "x = np.arange(6.0).reshape(2, 3)[::-1, ::-1]\n"
        "for x in (x, Producer(x), OldProducer(x)):\n"
        "    array = as_array(x, 'q')\n"
        "    print(array.strides, array.numpy().tolist())\n"
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == 3 * "(-3, -1) [[5.0, 4.0, 3.0], [2.0, 1.0, 0.0]]\n"


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128], ids=["complex64", "complex128"])
def test_lazy_negation_and_conjugation_are_resolved(dtype):
    z = torch.tensor([1 + 2j, 3 + 4j], dtype=dtype)
    assert z.conj().imag.is_neg()
    assert as_array(z.conj().imag, "q").numpy().tolist() == [-2.0, -4.0]
    assert z.conj().is_conj()
    assert as_array(z.conj(), "q").numpy().tolist() == [1 - 2j, 3 - 4j]
    assert z.tolist() == [1 + 2j, 3 + 4j]


def test_lazy_negation_of_a_tensor_with_gradient():
    z = torch.tensor([1 + 2j, 3 + 4j], requires_grad=True)
    array = as_array(z.conj().imag, "q")
    assert array.numpy().tolist() == [-2.0, -4.0]
    assert not array.owner.requires_grad


class PlainSubclass(torch.Tensor):
    """A tensor subclass with its own storage, as many libraries define one."""


@pytest.mark.parametrize(
    "make",
    [
        lambda x: x.requires_grad_(),
        lambda x: x.requires_grad_() * 1,
        torch.nn.Parameter,
        torch.nn.Buffer,
        lambda x: x.as_subclass(PlainSubclass),
    ],
    ids=["leaf", "with_history", "parameter", "buffer", "subclass"],
)
def test_torch_tensors_of_modules_and_graphs(make):
    x = make(torch.tensor([1.0, 2.0]))
    array = as_array(x, "q")
    assert array.pointer == x.data_ptr()
    assert array.numpy().tolist() == [1.0, 2.0]


def test_readonly_numpy_stays_readonly():
    x = np.arange(3.0)
    x.flags.writeable = False
    array = as_array(x, "q")
    assert array.readonly
    with pytest.raises(ValueError, match="read-only"):
        array.numpy()[0] = 7


def test_readonly_dlpack_stays_readonly():
    x = np.arange(3.0)
    x.flags.writeable = False
    assert not as_array(Producer(x), "q").numpy().flags.writeable
    with pytest.raises(TypeError, match="q .*readonly array"):
        as_array(OldProducer(x), "q")  # an unversioned capsule has no read-only flag


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float8_e4m3fn], ids=["float32", "bfloat16", "fp8"])
def test_jax_is_viewed_readonly(dtype):
    x = jnp.arange(6, dtype=dtype).reshape(2, 3)
    array = as_array(x, "q")
    assert array.pointer == x.unsafe_buffer_pointer()
    assert not array.numpy().flags.writeable


def test_jax_result_still_being_computed():
    x = jax.jit(lambda x: (x @ x) @ x)(jnp.ones((1000, 1000)))
    assert (as_array(x, "q").numpy() == 1e6).all()


@pytest.mark.parametrize("framework", MAKERS)
@pytest.mark.parametrize("shape", [(0,), (2, 0, 3), (0, 4)], ids=str)
def test_zero_size(framework, shape):
    array = as_array(MAKERS[framework](np.empty(shape, BFLOAT16)), "q")
    assert (array.shape, array.numpy().shape, array.dtype) == (shape, shape, BFLOAT16)
    output = empty(shape, BFLOAT16, array)
    assert output.numpy().shape == shape
    assert tuple(as_array(output.result(), "out").shape) == shape


@pytest.mark.parametrize("dtype", ["complex64", "O", "U3", "S2", "S0", "V0", "M8[s]", "i4,f8"])
def test_dtypes_that_attention_refuses_pass_here(dtype):
    x = np.empty((2, 3), np.dtype(dtype))
    array = as_array(x, "q")
    assert (array.dtype, array.shape) == (x.dtype, (2, 3))


def test_memmap_and_plain_subclasses(tmp_path):
    mapped = np.memmap(tmp_path / "x", np.float32, "w+", shape=(2, 3))
    mapped[...] = 5
    array = as_array(mapped, "q")
    assert type(array.numpy()) is np.ndarray
    assert array.pointer == mapped.ctypes.data
    array = as_array(np.memmap(tmp_path / "x", np.float32, "r", shape=(2, 3)), "q")
    assert array.readonly
    assert (array.numpy() == 5).all()


class Measured(np.ndarray):
    """A subclass of ndarray, as libraries of units and labels define one."""


def test_results_of_a_subclass_of_ndarray_are_of_the_base_class():
    q, k, v = values(np.float32, (3, 1, 8, 2, 4))
    expected, vjp = cupy_flash.attention_vjp(q, k, v, sink=q[0, 0, :, 0])
    measured = [x.view(Measured) for x in (q, k, v)]
    out, measured_vjp = cupy_flash.attention_vjp(*measured, sink=measured[0][0, 0, :, 0])
    for actual, plain in ((out, expected), *zip(measured_vjp(out), vjp(expected), strict=True)):
        assert type(actual) is type(plain)
        np.testing.assert_array_equal(actual, plain)
    cached = cupy_flash.attention_with_kv_cache(*measured, causal=False, out=np.empty_like(measured[0]))
    assert type(out) is type(cached) is np.ndarray


@pytest.mark.parametrize("framework", MAKERS)
def test_the_view_keeps_the_memory_alive(framework):
    expected = values(np.float32, (100, 100))
    view = as_array(MAKERS[framework](expected.copy()), "q").numpy()
    for _ in range(20):
        MAKERS[framework](np.zeros_like(expected))  # would reuse the memory of the view if it were free
    assert (view == expected).all()


# Refusals


class Wrapper(torch.Tensor):
    """A wrapper subclass without storage, like DTensor and quantised weights."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        raise NotImplementedError


def fake_tensor():
    with FakeTensorMode():
        return torch.empty(2, 3)


def freed_tensor():
    x = torch.ones(3)
    x.untyped_storage().resize_(0)
    return x


def deleted_jax():
    x = jnp.ones(3)
    x.delete()
    return x


def packed_field():
    return np.zeros(4, np.dtype([("tag", "u1"), ("value", "f4")]))["value"]


REFUSED = {
    "float": (lambda: 1.0, TypeError, "not a NumPy, CuPy, torch or jax array"),
    "list": (lambda: [1.0, 2.0], TypeError, "not a NumPy, CuPy, torch or jax array"),
    "none": (lambda: None, TypeError, "not a NumPy, CuPy, torch or jax array"),
    "numpy_scalar": (lambda: np.float32(1), TypeError, "not a NumPy, CuPy, torch or jax array"),
    "class": (lambda: np.ndarray, TypeError, "not a NumPy, CuPy, torch or jax array"),
    "masked": (lambda: np.ma.ones(3), TypeError, "mask would be dropped"),
    "byte_order": (lambda: np.ones(3, ">f4"), ValueError, r"pass x\.astype\(x\.dtype\.newbyteorder\('='\)\)"),
    "packed_field": (packed_field, ValueError, "not multiples of the 4-byte elements"),
    "fake": (fake_tensor, TypeError, "no memory of its own"),
    "wrapper": (lambda: Wrapper(torch.ones(3)), TypeError, "no memory of its own"),
    "meta": (lambda: torch.empty(3, device="meta"), TypeError, "device meta is neither"),
    "sparse": (lambda: torch.eye(3).to_sparse(), TypeError, "of layout torch.sparse_coo, not dense"),
    "mkldnn": (lambda: torch.ones(2, 2).to_mkldnn(), TypeError, "of layout torch._mkldnn, not dense"),
    "freed": (freed_tensor, ValueError, "has been freed"),
    "deleted_jax": (deleted_jax, ValueError, "deleted or donated"),
    "jax_key": (lambda: jax.random.key(0), TypeError, "dtype key<fry> is not supported"),
    "jax_int4": (lambda: jnp.ones(3, "int4"), TypeError, "its producer does not export it"),
    "dlpack_grad": (lambda: Producer(torch.ones(3, requires_grad=True)), TypeError, "its producer does not export it"),
    "dlpack_device": (lambda: Producer(np.ones(3), device=(8, 0)), TypeError, "device type 8 is neither"),
    "dlpack_gone": (lambda: ConsumedProducer(np.ones(3)), TypeError, "no fresh DLPack capsule"),
    "interface_mask": (lambda: CudaArrayInterface(mask=object()), TypeError, "mask would be dropped"),
    "interface_byte_order": (lambda: CudaArrayInterface(typestr=">f4"), ValueError, "byte order of >f4"),
    "interface_freed": (lambda: CudaArrayInterface(data=(0, False)), ValueError, "has been freed"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals_name_the_argument_and_the_reason(case):
    make, error, reason = REFUSED[case]
    x = make()
    with pytest.raises(error, match=reason) as raised:
        as_array(x, "k")
    assert type(raised.value) is error
    assert str(raised.value).startswith(f"k ({type(x).__module__}.{type(x).__qualname__}): ")
    assert "\n" not in str(raised.value)


@pytest.mark.filterwarnings("ignore")  # NumPy and torch warn when such arrays are created
@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: np.matrix([[1.0]]), "np.matrix is always 2-dimensional"),
        (lambda: torch.nested.nested_tensor([torch.ones(2, 2)]), "nested, not dense"),
        (lambda: torch.nested.nested_tensor([torch.ones(2, 2)], layout=torch.jagged), "no memory of its own"),
        (lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8), "quantized, not dense"),
        (lambda: torch.empty(3, dtype=torch.complex32), "dtype torch.complex32 is not supported"),
    ],
    ids=["matrix", "nested", "jagged", "quantized", "complex32"],
)
def test_refusals_of_discouraged_kinds(make, reason):
    with pytest.raises(TypeError, match=f"v .*{reason}"):
        as_array(make(), "v")


@pytest.mark.parametrize("transform", [torch.vmap, torch.func.grad], ids=["vmap", "grad"])
def test_tensors_inside_torch_func_are_refused(transform):
    with pytest.raises(TypeError, match="torch.func transform"):
        transform(lambda x: as_array(x, "q"))(torch.ones(3))


@pytest.mark.parametrize("transform", [jax.jit, jax.vmap, jax.grad], ids=["jit", "vmap", "grad"])
def test_jax_tracers_are_refused(transform):
    with pytest.raises(TypeError, match="q .*a jax tracer has no memory"):
        transform(lambda x: as_array(x, "q"))(jnp.ones(3) if transform is jax.vmap else 1.0)


def test_jax_on_several_devices():
    """as_array refuses a sharded array; `empty` allocates on the device of its argument."""
    ran = in_subprocess(
        "import jax, numpy as np\n"
        "from cupy_flash.arrays import as_array, empty\n"
        "mesh = jax.sharding.Mesh(jax.devices(), 'x')\n"
        "sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec('x'))\n"
        "try:\n"
        "    as_array(jax.device_put(np.ones(4, np.float32), sharding), 'q')\n"
        "except TypeError as error:\n"
        "    print(error)\n"
        "q = as_array(jax.device_put(np.ones(4, np.float32), jax.devices()[1]), 'q')\n"
        "output = empty((4,), q.dtype, q)\n"
        "output.numpy()[...] = 2\n"
        "print(output.result().devices() == {jax.devices()[1]}, output.result().tolist())\n",
        XLA_FLAGS="--xla_force_host_platform_device_count=2",
        JAX_PLATFORMS="cpu",
    )
    assert ran.returncode == 0, ran.stderr
    refusal, result = ran.stdout.splitlines()
    assert refusal.startswith("q (")
    advice = "call cupy_flash.adapters.jax.attention, or pass the shards one by one"
    assert refusal.endswith(f"sharded over 2 devices: {advice}")
    assert result == "True [2.0, 2.0, 2.0, 2.0]"


# The DLPack reader


def test_requests_version_1_and_no_stream_on_the_cpu():
    producer = Producer(np.ones(3))
    as_array(producer, "q")
    assert producer.requested == {"stream": None, "max_version": (1, 0)}


def set_fields(**fields):
    def patch(tensor):
        for name, value in fields.items():
            setattr(tensor, name, value)

    return patch


@pytest.mark.parametrize("make", [Producer, OldProducer], ids=["dlpack", "old_dlpack"])
def test_byte_offset_and_absent_strides(make):
    x = np.arange(6.0)
    absent = ctypes.POINTER(ctypes.c_int64)()
    array = as_array(make(x.reshape(2, 3), patch=set_fields(strides=absent)), "q")
    assert array.strides == (3, 1)
    assert (array.numpy() == x.reshape(2, 3)).all()
    array = as_array(make(x[:4], patch=set_fields(byte_offset=16)), "q")
    assert array.pointer == x.ctypes.data + 16
    assert array.numpy().tolist() == [2.0, 3.0, 4.0, 5.0]


@pytest.mark.parametrize(
    "fields",
    [{"dtype_code": 17, "dtype_bits": 4}, {"dtype_lanes": 2}, {"dtype_bits": 128}, {"dtype_code": 3}],
    ids=["fp4", "lanes", "float128", "opaque"],
)
def test_unknown_dlpack_dtypes_are_refused(fields):
    with pytest.raises(TypeError, match="q .*DLPack dtype .* is not supported"):
        as_array(Producer(np.ones(3), patch=set_fields(**fields)), "q")


def test_dlpack_2_is_refused():
    capsule = np.ones(3).__dlpack__(max_version=(1, 0))
    managed = arrays._capsule_pointer(capsule, b"dltensor_versioned")
    ctypes.c_uint32.from_address(managed).value = 2
    with pytest.raises(TypeError, match="DLPack 2.0 is not 1.x"):
        arrays._read_capsule(capsule)


@pytest.mark.parametrize("make", [Producer, OldProducer], ids=["dlpack", "old_dlpack"])
def test_the_producers_memory_is_returned_exactly_once(make):
    x = np.ones(3)
    before = sys.getrefcount(x)
    producer = make(x)
    view = as_array(producer, "q").numpy()
    producer.array = None  # the capsule holds the last reference to x
    assert sys.getrefcount(x) == before + 1
    assert view.tolist() == [1.0, 1.0, 1.0]
    del view
    assert sys.getrefcount(x) == before


def test_memory_is_freed_with_its_last_view():
    memory = np.ones(3)
    x, alive = torch.from_numpy(memory), weakref.ref(memory)
    view = as_array(x, "q").numpy()
    del memory, x
    assert alive() is not None
    del view
    assert alive() is None


# CUDA arrays, described without a GPU


@pytest.mark.parametrize("device_type", [2, 13], ids=["cuda", "managed"])
def test_dlpack_on_cuda(device_type):
    x = np.ones((2, 3), np.float16)
    producer = Producer(x, device=(device_type, 1))
    array = as_array(producer, "q")
    assert (array.pointer, array.device, array.framework) == (x.ctypes.data, "cuda:1", "dlpack")
    assert (
        producer.requested["stream"] == made_on(array) == 1
    )  # stream 1 is the legacy default stream; DLPack forbids 0
    with pytest.raises(TypeError, match="cuda:1 has no view in host memory"):
        array.numpy()


def test_pinned_host_memory_is_cpu_memory():
    assert as_array(Producer(np.ones(3), device=(3, 0)), "q").numpy().tolist() == [1.0, 1.0, 1.0]


def test_cuda_array_interface():
    array = as_array(CudaArrayInterface(), "q")
    assert (array.pointer, array.shape, array.strides, array.dtype) == (4096, (2, 3), (3, 1), np.float16)
    assert (array.device, array.framework, array.readonly) == ("cuda:0", "cuda_array_interface", False)
    array = as_array(CudaArrayInterface(strides=(2, -4), data=(4096, True), stream=77), "q")
    assert (array.strides, array.readonly, made_on(array)) == ((1, -2), True, 77)
    assert made_on(as_array(CudaArrayInterface(), "q")) is None
    assert as_array(CudaArrayInterface(shape=(0, 3), data=(0, False)), "q").shape == (0, 3)
    with pytest.raises(TypeError, match="no view in host memory"):
        array.numpy()
    assert as_array(CudaArrayInterface(strides=[2, -4]), "q").strides == array.strides  # lists are accepted as well


class FakeCupyArray:
    """The attributes of cupy.ndarray that as_array reads; CuPy itself cannot create an array without a GPU."""

    data = SimpleNamespace(ptr=4096)
    shape, strides, dtype = (2, 3), (2, -4), np.dtype(np.float16)
    device = SimpleNamespace(id=1)


def test_cupy(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(ndarray=FakeCupyArray))
    x = FakeCupyArray()
    array = as_array(x, "q")
    assert (array.pointer, array.shape, array.strides, array.dtype) == (4096, (2, 3), (1, -2), np.float16)
    assert (array.device, array.framework) == ("cuda:1", "cupy")
    assert array.owner is array.result() is x
    with pytest.raises(TypeError, match="no view in host memory"):
        array.numpy()


if importlib.util.find_spec("cupy"):  # CuPy has no wheels for macOS

    def test_the_fake_cupy_array_is_like_the_real_one():
        import cupy

        for name in ("data", "shape", "strides", "dtype", "device"):
            assert hasattr(cupy.ndarray, name)
        assert hasattr(cupy.cuda.MemoryPointer, "ptr")
        assert hasattr(cupy.cuda.Device, "id")


# Outputs


@pytest.mark.parametrize(("framework", "dtype"), SERVED)
def test_outputs_are_of_the_callers_kind(framework, dtype):
    x = MAKERS[framework](values(dtype))
    output = empty((3, 2), dtype, as_array(x, "q"))
    assert (output.shape, output.strides, output.dtype, output.device) == ((3, 2), (2, 1), dtype, "cpu")
    output.numpy()[...] = values(dtype, (3, 2))
    result = output.result()
    kind = np.ndarray if framework in ("dlpack", "old_dlpack") else type(x)  # the stand-ins have no from_dlpack
    assert type(result) is kind
    assert result.tolist() == values(dtype, (3, 2)).tolist()
    assert as_array(result, "out").dtype == dtype
    assert as_array(result, "out").pointer == output.pointer


@pytest.mark.parametrize("make", [np.array, torch.tensor], ids=["numpy", "torch"])
def test_a_copy_of_a_contiguous_view_is_aligned(make):
    """A contiguous view may start at an address that is not aligned for TMA; its copy is aligned."""
    x = as_array(make([0.0, 1.0, 2.0, 3.0, 4.0])[1:], "dout")
    copy = contiguous(x)
    assert x.pointer % 16 != 0 and copy.pointer % 16 == 0
    np.testing.assert_array_equal(copy.numpy(), x.numpy())


def test_outputs_of_another_dtype():
    for framework, make in MAKERS.items():
        output = empty((2,), np.dtype(np.float32), as_array(make(values(BFLOAT16)), "q"))
        output.numpy()[...] = 0.1
        assert output.result().tolist() == [np.float32(0.1)] * 2, framework


def test_outputs_for_a_parameter_are_plain_tensors():
    output = empty((2,), np.dtype(np.float32), as_array(torch.nn.Parameter(torch.ones(3)), "q"))
    assert type(output.result()) is torch.Tensor
    assert not output.result().requires_grad


class NarrowingProducer(NamespaceProducer):
    """An array of a library without float64, which it imports as float32."""

    def __array_namespace__(self):
        return SimpleNamespace(from_dlpack=lambda x: NamespaceProducer(torch.from_dlpack(x).float()))


def test_outputs_whose_dtype_the_library_changes_are_refused():
    output = empty((3,), np.dtype(np.float64), as_array(NarrowingProducer(torch.ones(3)), "q"))
    with pytest.raises(TypeError, match="a result is float64, but producers.NamespaceProducer imports it as float32"):
        output.result()


class PlainProducer(Producer):
    """An array with a namespace but without a device; its library imports no bfloat16."""

    def __array_namespace__(self):
        return SimpleNamespace(from_dlpack=lambda x: PlainProducer(np.from_dlpack(x)))


def test_outputs_of_a_library_without_devices():
    like = as_array(PlainProducer(torch.ones(3)), "q")
    assert type(empty((3,), np.dtype(np.float32), like).result()) is PlainProducer
    with pytest.raises(TypeError, match="a result is bfloat16, which its library does not import: "):
        empty((3,), BFLOAT16, like).result()


def immutable(cls):
    """Return a subclass of `cls` in a module of TensorFlow, whose arrays are immutable."""
    return type("Tensor", (cls,), {"__module__": "tensorflow.python.framework.ops"})


def test_arrays_of_immutable_libraries_are_readonly_and_outputs_are_not():
    array = as_array(immutable(Producer)(torch.ones(3)), "q")
    assert (array.readonly, array.immutable, array.framework) == (True, "tensorflow", "tensorflow")
    assert not array.numpy().flags.writeable
    assert empty((3,), array.dtype, array).numpy().flags.writeable
    on_gpu = as_array(immutable(CudaArrayInterface)(), "q")
    assert (on_gpu.readonly, on_gpu.immutable) == (True, "tensorflow")


def test_stream_of_cpu_arrays():
    for make in MAKERS.values():
        array = as_array(make(values(np.float32)), "q")
        assert (stream_of(array), made_on(array)) == (0, None)


# Imports


def test_detection_imports_no_library():
    ran = in_subprocess(
        "import sys\n"
        "import numpy as np\n"
        "from cupy_flash.arrays import as_array, empty, made_on, stream_of\n"
        "class Producer:\n"
        "    __dlpack_device__ = lambda self: (1, 0)\n"
        "    __dlpack__ = lambda self, **_: np.ones(3).__dlpack__()\n"
        "class Interface:\n"
        "    __cuda_array_interface__ = {'shape': (3,), 'typestr': '<f4', 'data': (4096, False), 'version': 2}\n"
        "for x in (np.ones(3), Producer()):\n"
        "    array = as_array(x, 'q')\n"
        "    empty((3,), array.dtype, array).result(), stream_of(array), array.numpy()\n"
        "made_on(as_array(Interface(), 'q'))\n"
        "try:\n"
        "    as_array([1.0], 'q')\n"
        "except TypeError:\n"
        "    print([name for name in ('torch', 'jax', 'cupy', 'ml_dtypes') if name in sys.modules])\n"
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == "[]\n"


def test_a_cupy_that_cannot_be_imported_does_not_matter(tmp_path):
    (tmp_path / "file").touch()
    ran = in_subprocess(
        "import numpy as np\n"
        "from cupy_flash.arrays import as_array\n"
        "try:\n"
        "    import cupy\n"
        "except Exception:\n"
        "    print(as_array(np.ones(2), 'q').numpy().tolist())\n",
        CUPY_CACHE_DIR=str(tmp_path / "file" / "cache"),
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == "[1.0, 1.0]\n"
