"""Converts arrays of any library to `Array` (pointer, shape, strides, dtype, device), and allocates outputs.

It is the only core module that handles array libraries. It detects a library only if the caller has imported it, so
that torch, jax and CuPy are never imported for that. It does not read or write elements or copy between devices.
"""

from __future__ import annotations

import ctypes
import functools
import math
import operator
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import lru_cache
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np

if TYPE_CHECKING:
    from typing import TypeAlias

    import cupy
    import jax
    import torch

    # The array that an Array describes: the caller's, of the library that `framework` names, or buffers of an XLA call.
    Owner: TypeAlias = torch.Tensor | jax.Array | cupy.ndarray


class DLPackArray(Protocol):
    """An array that exports its memory by DLPack, as arrays of NumPy, CuPy, torch and jax do.

    `__dlpack_device__` is required too, but jax's stubs do not declare it.
    """

    def __dlpack__(self) -> object: ...


class CudaArray(Protocol):
    """An array on a GPU that exports its memory by `__cuda_array_interface__`, Numba's protocol."""

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]: ...


AnyArray = DLPackArray | CudaArray
# {top-level module of an array type: library}, of libraries that are known by more than DLPack (array_libraries.py)
LIBRARIES = {
    "jax": "jax", "jaxlib": "jax", "mlx": "mlx", "paddle": "paddle", "tensorflow": "tensorflow", "warp": "warp",
}  # fmt: skip
# Libraries with immutable arrays, whose DLPack capsules lack the read-only flag.
IMMUTABLE = ("jax", "mlx", "tensorflow")
BY_DLPACK = frozenset(("dlpack", *LIBRARIES.values()))  # the frameworks of arrays that are read by DLPack
T = TypeVar("T")
ArrayT = TypeVar("ArrayT", bound=AnyArray)  # the caller's type of array, which results have, too


@dataclass(slots=True, eq=False)
class Array:
    """One operand of a call. `owner` keeps the memory alive; `strides` count elements, not bytes."""

    pointer: int  # address of element 0
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: np.dtype  # bf16 and fp8 are ml_dtypes' dtypes
    device: str  # "cpu" or "cuda:<index>"
    # "numpy", "torch", "cupy", "xla", a library of LIBRARIES, else "dlpack" or "cuda_array_interface"
    framework: str
    owner: Owner = field(repr=False)
    readonly: bool = False
    capsule: object = field(default=None, repr=False)  # a DLPack capsule; its destructor returns the memory
    # Makes the caller's array from an output whose owner is a buffer of NumPy or CuPy; None if owner is that array
    hand_over: Callable[[Array], AnyArray] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if self.pointer == 0 and 0 not in self.shape:
            raise ValueError(f"the memory of this {self.shape} array has been freed or was never allocated")
        if self.device != "cpu" and self.pointer % self.dtype.alignment:
            raise ValueError(
                f"its memory starts at {self.pointer:#x}, not a multiple of the {self.dtype.alignment} bytes to which "
                f"{self.dtype} must be aligned on a GPU: copy the bytes to a new array"
            )

    @property
    def immutable(self) -> str:
        """The caller's library if all its arrays are immutable, else ""."""
        library = "" if self.framework in ("numpy", "torch", "cupy") else library_of(type(self.owner))
        return library if library in IMMUTABLE else ""

    def numpy(self) -> np.ndarray:
        """View the memory as a NumPy array, never a copy; read-only if the caller's array is.

        Raises TypeError for an array on a GPU.
        """
        if self.device != "cpu":
            raise TypeError(f"an array on {self.device} has no view in host memory")
        if isinstance(self.owner, np.ndarray):
            return self.owner
        if self.framework == "torch" and self.dtype.isbuiltin == 1 and _is_plain_tensor(self.owner):
            tensor = self.owner.detach() if self.owner.requires_grad else self.owner
            view: np.ndarray = tensor.numpy()  # a third faster than the general way below
            return view
        memory = SimpleNamespace(
            array=self,  # NumPy keeps `memory` as the base of the view
            __array_interface__={
                "version": 3,
                "data": (self.pointer, self.readonly),
                "shape": self.shape,
                "strides": tuple(stride * self.dtype.itemsize for stride in self.strides),
                "typestr": f"|V{self.dtype.itemsize}",
            },
        )
        return np.asarray(memory).view(self.dtype)  # via raw bytes, because bf16 and fp8 have no typestr

    def result(self) -> Owner:
        """Return the array in the caller's library; call it after all writes."""
        result: Owner = self.owner if self.hand_over is None else self.hand_over(self)
        return result


def as_array(x: object, name: str) -> Array:
    """Describe `x`, an array of any library, without a copy (except a lazily negated or conjugated torch tensor).

    Accepts, in this order: cupy.ndarray, torch.Tensor, numpy.ndarray, jax.Array, `__dlpack__`,
    `__cuda_array_interface__`; any shape, dtype and strides (negative and 0 too), on the CPU or a CUDA device,
    read-only or not, with or without gradient. Raises TypeError for anything else and ValueError for unusable memory;
    the messages start with `name`, the argument's name. A buffer that XLA handed over is an Array already.
    """
    if isinstance(x, Array):
        return x
    try:
        if _is_instance(x, "cupy", "ndarray"):
            return _from_cupy(x)
        if _is_instance(x, "torch", "Tensor"):
            return _from_torch(x)
        if isinstance(x, np.ndarray):
            return _from_numpy(x)
        if _is_instance(x, "jax", "Array"):
            return _from_jax(x)
        library = library_of(type(x))
        if library == "paddle" or (library == "tensorflow" and not hasattr(x, "__cuda_array_interface__")):
            from .array_libraries import exporter  # imported by the first call on such an array

            return _from_dlpack(exporter(library, x), library, x)
        if hasattr(type(x), "__dlpack__") and hasattr(type(x), "__dlpack_device__"):
            return _from_dlpack(x, library or "dlpack", x)
        if isinstance(interface := _call_producer(getattr, x, "__cuda_array_interface__", None), dict):
            return _from_cuda_array_interface(x, interface)
        raise TypeError("not a NumPy, CuPy, torch or jax array, and without __dlpack__ and __cuda_array_interface__")
    except (TypeError, ValueError) as error:
        kind = TypeError if isinstance(error, TypeError) else ValueError
        raise kind(f"{name} ({type(x).__module__}.{type(x).__qualname__}): {error}") from error


def empty(shape: tuple[int, ...], dtype: np.dtype, like: Array) -> Array:
    """Allocate an uninitialised, writable, C-contiguous output for the library of `like`, on its device.

    For torch it is a tensor, and a buffer of the call frame for XLA. For all others it is a buffer of NumPy, or of CuPy
    on a GPU, which `result` hands over to libraries that import arrays.
    """
    dtype = np.dtype(dtype)
    if like.framework == "xla":  # the results of an XLA call are buffers of its call frame
        output: Array = like.owner.empty(shape, dtype)
        return output
    if like.framework == "torch":
        import torch

        torch_dtype = like.owner.dtype if dtype == like.dtype else getattr(torch, dtype_name(dtype))
        tensor = torch.empty(shape, dtype=torch_dtype, device=like.owner.device)
        return Array(tensor.data_ptr(), shape, tensor.stride(), dtype, like.device, "torch", tensor)
    if like.device != "cpu":
        import cupy

        with cupy.cuda.Device(_device_index(like.device)):
            output = as_array(cupy.empty(shape, dtype), "output")
    else:
        is_handed_over = like.framework in BY_DLPACK
        output = as_array(_aligned_empty(shape, dtype) if is_handed_over else np.empty(shape, dtype), "output")
    return _for_library_of(like, output)


Allocate = Callable[[tuple[int, ...], np.dtype, Array], Array]  # the type of `empty`


def from_host(numbers: np.ndarray, like: Array) -> Array:
    """Return an array of the library of `like`, on its device, with numbers in host memory."""
    if like.device == "cpu":
        return as_array(numbers, "numbers")
    if like.framework == "torch":
        import torch

        return as_array(torch.from_numpy(numbers).to(like.owner.device), "numbers")
    import cupy

    with cupy.cuda.Device(_device_index(like.device)):
        return as_array(cupy.asarray(numbers), "numbers")


def to_host(array: Array) -> np.ndarray:
    """Return the numbers of an array in host memory, a copy if it is on a GPU, for which this waits."""
    if array.device == "cpu":
        return array.numpy()
    if array.framework == "torch":
        numbers: np.ndarray = array.owner.cpu().numpy()
        return numbers
    import cupy

    with cupy.cuda.Device(_device_index(array.device)):
        on_gpu = cupy.from_dlpack(array.owner) if array.framework in BY_DLPACK else cupy.asarray(array.owner)
        copy: np.ndarray = cupy.asnumpy(on_gpu)
        return copy


def contiguous(array: Array) -> Array:
    """Return a C-contiguous copy in the same framework, on the same device.

    The copy is made even if `array` is contiguous: a new allocation is aligned.
    """
    if array.framework == "torch":
        import torch

        return as_array(array.owner.clone(memory_format=torch.contiguous_format), "operand")
    if array.device == "cpu":
        return as_array(np.array(array.numpy(), order="C"), "operand")
    import cupy

    with cupy.cuda.Device(_device_index(array.device)):
        source = cupy.from_dlpack(array.owner) if array.framework in BY_DLPACK else cupy.asarray(array.owner)
        rows = source[..., : array.shape[-1]]  # the owner of a view of columns has all of them
        return as_array(cupy.array(rows, order="C"), "operand")


def columns(array: Array, stop: int) -> Array:
    """Return a view of the first `stop` numbers of the last dimension."""
    owner = array.owner[..., :stop] if array.framework in ("numpy", "torch", "cupy") else array.owner
    return replace(array, shape=(*array.shape[:-1], stop), owner=owner)


def copied(array: Array) -> Array:
    """Return a copy of the array, for results in the caller's library; the array itself if it is immutable."""
    return array if array.immutable else _for_library_of(array, contiguous(array))


def _for_library_of(like: Array, buffer: Array) -> Array:
    """Return a buffer of NumPy or CuPy as an array of the library of `like`, if that imports arrays."""
    if like.framework not in BY_DLPACK:
        return buffer
    if like.hand_over is not None:
        hand_over = like.hand_over
    elif like.framework == "jax":
        hand_over = functools.partial(_jax_array, like.owner.sharding)
    else:
        from .array_libraries import importer  # imported by the first call on such an array

        way_in = importer(like.framework, like.owner)
        if way_in is None:
            return buffer
        hand_over = functools.partial(_imported, way_in)
    buffer.framework, buffer.hand_over = like.framework, hand_over
    return buffer


def _imported(way_in: Callable[[Exported], AnyArray], output: Array) -> AnyArray:
    """Return an output as an array of another library; TypeError if that fails, or changes its dtype."""
    try:
        result = way_in(Exported(output))
    except Exception as error:
        name = dtype_name(output.dtype)
        raise TypeError(
            f"a result is {name}, which its library does not import: {type(error).__name__}: {error}"
        ) from error
    actual = as_array(result, "result").dtype
    if actual != output.dtype:
        kind = f"{type(result).__module__}.{type(result).__qualname__}"
        raise TypeError(f"a result is {dtype_name(output.dtype)}, but {kind} imports it as {dtype_name(actual)}")
    return result


def _jax_array(sharding: jax.sharding.Sharding, output: Array) -> jax.Array:
    """Return an output as a jax.Array, without a copy."""
    import jax

    if output.device == "cpu":
        return jax.device_put(output.owner, sharding, may_alias=True)
    with output.owner.device:  # CuPy makes jax's stream wait for its current stream on that device
        return jax.dlpack.from_dlpack(output.owner)


def is_torch(x: object) -> bool:
    """Return whether an array is torch's, without importing torch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(x, torch.Tensor)


class Exported:
    """Exports a buffer of NumPy or CuPy by DLPack, also in bf16 and fp8, which NumPy's own exporter refuses."""

    def __init__(self, output: Array) -> None:
        self.dtype = dtype_name(output.dtype)
        is_native = output.dtype.isbuiltin == 1
        self._buffer: Any = output.owner if is_native else output.owner.view(f"u{output.dtype.itemsize}")

    def __dlpack_device__(self) -> tuple[int, int]:
        device: tuple[int, int] = self._buffer.__dlpack_device__()
        return device

    def __dlpack__(self, **options: object) -> object:
        capsule: object = self._buffer.__dlpack__(**options)
        tensor, _ = _read_capsule(capsule)
        tensor.dtype_code = _DLPACK_CODES[self.dtype]
        return capsule


def stream_of(like: Array) -> int:
    """Return the CUDA stream handle for kernels on arrays like this one; 0 for CPU arrays.

    It is the stream of the call frame for XLA, the current stream of torch, or that of CuPy for all other libraries:
    their allocators reuse the memory of outputs and workspaces in that stream's order.
    """
    if like.device == "cpu":
        return 0
    if like.framework == "xla":
        return int(like.owner.stream)
    return current_stream(like.framework, like.device)


def current_stream(framework: str, device: str) -> int:
    """Return the handle of torch's current stream on a GPU, or of CuPy's for all other libraries."""
    if framework == "torch":
        import torch

        return int(torch.cuda.current_stream(device).cuda_stream)
    import cupy

    return int(cupy.cuda.get_current_stream(_device_index(device)).ptr)


def made_on(array: Array) -> int | None:
    """Return the stream that produces the array's contents, for which the stream of `stream_of` must wait.

    None if no wait is needed: torch and CuPy arrays are used on their library's current stream.
    """
    if array.framework == "cuda_array_interface":
        stream = array.owner.__cuda_array_interface__.get("stream")
        return None if stream is None else int(stream)
    return LEGACY_DEFAULT_STREAM if array.framework in BY_DLPACK and array.device != "cpu" else None


def _call_producer(function: Callable[..., T], *arguments: object) -> T:
    """Call a function of the array's library, and turn its exceptions into a TypeError that quotes them."""
    try:
        return function(*arguments)
    except Exception as error:
        raise TypeError(f"its producer does not export it: {type(error).__name__}: {error}") from error


def _is_instance(x: object, module: str, name: str) -> bool:
    cls = getattr(sys.modules.get(module), name, None)
    return cls is not None and isinstance(x, cls)


def library_of(cls: type) -> str:
    """Return the library in LIBRARIES to which an array type belongs; "" for other types."""
    for base in cls.__mro__:
        module = base.__module__.partition(".")[0]
        if module in LIBRARIES:
            return LIBRARIES[module]
    return ""


def _is_plain_tensor(x: torch.Tensor) -> bool:
    """Return whether a tensor's methods are torch's own, not those of a subclass."""
    import torch

    return type(x) in (torch.Tensor, torch.nn.Parameter)


def _device_index(device: str) -> int:
    return int(device.removeprefix("cuda:"))


def named_dtype(name: str) -> np.dtype:
    """Return the NumPy dtype with this name; ml_dtypes provides bfloat16 and float8_*."""
    if name.startswith(("bfloat", "float8")):
        import ml_dtypes

        return np.dtype(getattr(ml_dtypes, name))
    return np.dtype(name)


@functools.lru_cache
def dtype_name(dtype: np.dtype) -> str:
    """Return `dtype.name`, cached because NumPy takes microseconds to compute it."""
    return dtype.name


@functools.lru_cache
def _in_elements(byte_strides: tuple[int, ...], dtype: np.dtype) -> tuple[int, ...]:
    if not dtype.isnative:
        raise ValueError(f"byte order of {dtype.str} is not this machine's: pass x.astype(x.dtype.newbyteorder('='))")
    itemsize = dtype.itemsize or 1  # an empty string dtype has itemsize 0
    if any(stride % itemsize for stride in byte_strides):
        raise ValueError(f"byte strides {byte_strides} are not multiples of the {itemsize}-byte elements")
    return tuple(stride // itemsize for stride in byte_strides)


@functools.lru_cache(maxsize=1024)
def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides, in elements, of a C-contiguous array."""
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


def _aligned_empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Return np.empty aligned to 64 bytes, because XLA copies less aligned host buffers."""
    size = math.prod(shape) * dtype.itemsize
    buffer = np.empty(size + 64, np.uint8)
    start = -buffer.ctypes.data % 64
    return buffer[start : start + size].view(dtype).reshape(shape)


def _from_numpy(x: np.ndarray) -> Array:
    if type(x) is not np.ndarray:
        if isinstance(x, np.ma.MaskedArray):
            raise TypeError("its mask would be dropped: pass x.filled(...) or x.data")
        if isinstance(x, np.matrix):
            raise TypeError("np.matrix is always 2-dimensional: pass np.asarray(x)")
        x = x.view(np.ndarray)
    strides = _in_elements(x.strides, x.dtype)
    return Array(x.__array_interface__["data"][0], x.shape, strides, x.dtype, "cpu", "numpy", x, not x.flags.writeable)


def _from_cupy(x: cupy.ndarray) -> Array:
    return Array(x.data.ptr, x.shape, _in_elements(x.strides, x.dtype), x.dtype, f"cuda:{x.device.id}", "cupy", x)


@functools.cache
def _torch_dtype(dtype: torch.dtype) -> np.dtype:
    name = str(dtype).removeprefix("torch.")
    if name not in _DLPACK_DTYPES.values():
        raise TypeError(f"dtype {dtype} is not supported")
    return named_dtype(name)


@functools.cache
def _torch_device(device: torch.device) -> str:
    return str(device)


def _from_torch(x: torch.Tensor) -> Array:
    import torch

    if type(x).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        raise TypeError("a tensor subclass that wraps other tensors and has no memory of its own")
    if x.is_nested or x.is_quantized or x.layout is not torch.strided:
        kind = "nested" if x.is_nested else "quantized" if x.is_quantized else f"of layout {x.layout}"
        raise TypeError(f"the tensor is {kind}, not dense")
    device = _torch_device(x.device)
    if not device.startswith(("cpu", "cuda")):
        raise TypeError(f"device {device} is neither the CPU nor a CUDA device")
    is_lazy = x.is_neg() or x.is_conj()  # then memory holds other values: z.conj().imag is a view of z.imag
    if is_lazy:
        x = x.detach().resolve_neg().resolve_conj()  # read-only, because writes to a copy would be lost
    try:
        pointer = x.data_ptr()
    except RuntimeError as error:  # torch.func transforms pass wrappers of type torch.Tensor
        raise TypeError("a tensor inside a torch.func transform has no memory of its own") from error
    return Array(pointer, tuple(x.shape), x.stride(), _torch_dtype(x.dtype), device, "torch", x, is_lazy)


def _from_jax(x: jax.Array) -> Array:
    import jax

    if isinstance(x, jax.core.Tracer):
        raise TypeError("a jax tracer has no memory: under jit, grad and vmap call cupy_flash.adapters.jax.attention")
    if x.is_deleted():
        raise ValueError("the array has been deleted or donated")
    if jax.dtypes.issubdtype(x.dtype, jax.dtypes.extended):
        raise TypeError(f"dtype {x.dtype} is not supported")
    if len(x.devices()) != 1:
        raise TypeError(
            f"sharded over {len(x.devices())} devices: call cupy_flash.adapters.jax.attention, or pass the shards one "
            "by one"
        )
    return _from_dlpack(x, "jax", x)


def _from_cuda_array_interface(x: object, interface: dict[str, Any]) -> Array:
    """Describe an array of protocol version 2 or 3, which lack the device: CuPy finds it, else it is cuda:0."""
    if interface.get("mask") is not None:
        raise TypeError("its mask would be dropped")
    missing = [key for key in ("shape", "typestr", "data") if key not in interface]
    if missing:
        raise TypeError(f"its __cuda_array_interface__ has no {', '.join(missing)}")
    try:
        pointer, readonly = interface["data"]
        pointer, dtype = operator.index(pointer), np.dtype(interface["typestr"])
        shape, byte_strides = tuple(map(operator.index, interface["shape"])), interface.get("strides")
        if byte_strides is None:
            byte_strides = tuple(stride * dtype.itemsize for stride in contiguous_strides(shape))
        byte_strides = tuple(map(operator.index, byte_strides))
    except (TypeError, ValueError) as error:
        raise TypeError(f"its __cuda_array_interface__ is malformed: {error}") from error
    if interface["typestr"] is None or min(shape, default=0) < 0 or len(byte_strides) != len(shape) or pointer < 0:
        raise TypeError(f"its __cuda_array_interface__ is malformed: {interface}")
    strides = _in_elements(byte_strides, dtype)
    index = 0
    cupy = sys.modules.get("cupy")
    if cupy is not None and pointer != 0 and cupy.cuda.is_available():
        index = cupy.cuda.runtime.pointerGetAttributes(pointer).device
    readonly = bool(readonly or library_of(type(x)) in IMMUTABLE)
    return Array(pointer, shape, strides, dtype, f"cuda:{index}", "cuda_array_interface", x, readonly)


# DLPack through ctypes, because NumPy's importer supports neither bf16, fp8 nor CUDA. Structures of dlpack.h 1.x.


class _DLTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("dtype_code", ctypes.c_uint8),
        ("dtype_bits", ctypes.c_uint8),
        ("dtype_lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _DLManagedTensorVersioned(ctypes.Structure):
    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("manager_ctx", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("dl_tensor", _DLTensor),
    )


_FLAG_READ_ONLY = 1
LEGACY_DEFAULT_STREAM = 1  # cudaStreamLegacy, also DLPack's number for the default stream
_DLPACK_DEVICES = {1: "cpu", 3: "cpu", 2: "cuda:{}", 13: "cuda:{}"}  # CPU, pinned host, CUDA, CUDA managed
_DLPACK_DTYPES = {
    (code, bits): f"{kind}{bits}"
    for code, kind, widths in (
        (0, "int", (8, 16, 32, 64)),
        (1, "uint", (8, 16, 32, 64)),
        (2, "float", (16, 32, 64)),
        (4, "bfloat", (16,)),
        (5, "complex", (64, 128)),
    )
    for bits in widths
} | {(6, 8): "bool", (10, 8): "float8_e4m3fn", (12, 8): "float8_e5m2"}
_DLPACK_CODES = {name: code for (code, _), name in _DLPACK_DTYPES.items()}

_capsule_is_valid = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_IsValid", ctypes.pythonapi)
)
_capsule_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)


def _from_dlpack(x: Any, framework: str, owner: Any) -> Array:
    device_type, device_index = _call_producer(lambda: tuple(x.__dlpack_device__()))
    if device_type not in _DLPACK_DEVICES:
        raise TypeError(f"DLPack device type {device_type} is neither the CPU nor a CUDA device")
    device = _DLPACK_DEVICES[device_type].format(device_index)  # paddle's index of a CPU is None
    stream = {} if device == "cpu" else {"stream": LEGACY_DEFAULT_STREAM}

    def capsule_of() -> object:
        try:
            return x.__dlpack__(max_version=(1, 0), **stream)
        except TypeError:  # producers before DLPack 1.0 have no max_version
            return x.__dlpack__(**stream)

    capsule = _call_producer(capsule_of)
    tensor, readonly = _read_capsule(capsule)
    code, bits, lanes = tensor.dtype_code, tensor.dtype_bits, tensor.dtype_lanes
    if lanes != 1 or (code, bits) not in _DLPACK_DTYPES:
        raise TypeError(f"DLPack dtype (code {code}, bits {bits}, lanes {lanes}) is not supported")
    shape = tuple(tensor.shape[: tensor.ndim])
    strides = tuple(tensor.strides[: tensor.ndim]) if tensor.strides else contiguous_strides(shape)
    pointer = (tensor.data or 0) + tensor.byte_offset
    dtype = named_dtype(_DLPACK_DTYPES[code, bits])
    readonly = readonly or library_of(type(x)) in IMMUTABLE
    return Array(pointer, shape, strides, dtype, device, framework, owner, readonly, capsule)


def _read_capsule(capsule: object) -> tuple[_DLTensor, bool]:
    """Return (tensor in a DLPack capsule, read-only flag).

    The capsule keeps its name, instead of "used_dltensor", so that its destructor calls the deleter.
    """
    if _capsule_is_valid(capsule, b"dltensor_versioned"):
        managed = _DLManagedTensorVersioned.from_address(_capsule_pointer(capsule, b"dltensor_versioned"))
        if managed.major != 1:
            raise TypeError(f"DLPack {managed.major}.{managed.minor} is not 1.x")
        return managed.dl_tensor, bool(managed.flags & _FLAG_READ_ONLY)
    if _capsule_is_valid(capsule, b"dltensor"):
        return _DLTensor.from_address(_capsule_pointer(capsule, b"dltensor")), False
    raise TypeError(f"__dlpack__ gave {capsule!r}, no fresh DLPack capsule")


CACHED = 1024  # maximum entries of each cache


def has_boxes(array: Array) -> bool:
    """Return whether TMA can copy the array.

    Every row must start at a multiple of 16 bytes, and no stride may be 0 or negative. If rows are not contiguous, the
    condition is about the contiguous copy that is made of the array.
    """
    return _have_boxes(array.shape, array.strides, array.dtype.itemsize, array.pointer % 16)


@lru_cache(maxsize=CACHED)
def _have_boxes(shape: tuple[int, ...], strides: tuple[int, ...], size: int, start: int) -> bool:
    if strides[-1:] != (1,) and shape[-1:] > (1,):
        return shape[-1] * size % 16 == 0
    return start == 0 and all(
        extent < 2 or (stride > 0 and stride * size % 16 == 0)
        for extent, stride in zip(shape[:-1], strides[:-1], strict=True)
    )
