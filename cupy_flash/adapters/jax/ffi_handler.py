"""The FFI handler that a compiled program calls for attention: a ctypes callback, so no C++ is compiled for it.

The handler wraps the buffers of the call frame as arrays, poses the problem and runs it as an eager call does: on
XLA's thread on a CPU, by launches on XLA's stream on a GPU. Results and workspaces are buffers of the frame. An
exception becomes an XLA error with the same text, which the caller gets as JaxRuntimeError; KeyboardInterrupt is raised
again after XLA has returned.

Kernels are loaded in the initialize stage, so that XLA can capture the launches in a CUDA graph.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import jax
import numpy as np

from ... import dispatch
from ...arrays import Array, as_array, contiguous_strides
from ...problem.records import DOUBLE_BACKWARD, UnsupportedError
from . import ffi_structs as ffi
from . import shutdown
from .static_call import OF_INDEXER, parse

TARGET = "cupy_flash"
PLATFORMS = {"cpu": "cpu", "cuda": "CUDA"}  # {jax's platform name: name of XLA's target}
CALL, OUTPUTS = b"call", b"outputs"  # names of the attributes: the call as text, the indices of its results


class Memory:
    """The owner of one call frame's operands: asked for a new array, it hands out a result buffer of the frame."""

    __slots__ = ("device", "results", "stream", "unused")

    def __init__(self, device: str, stream: int) -> None:
        self.device, self.stream = device, stream
        self.results: list[Array] = []
        self.unused: list[Array] = []

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """Return the first unused result of this shape and dtype; without one, a new array in host memory.

        The results are in the order of the allocations, which `primitive.allocations` has recorded.
        """
        for index, result in enumerate(self.unused):
            if result.shape == shape and result.dtype == dtype:
                return self.unused.pop(index)
        if self.device != "cpu":
            raise RuntimeError(f"no workspace {dtype} {shape} is among the results of the compiled call")
        return as_array(np.empty(shape, dtype), "workspace")

    def settle(self, computed: list[Array], results: list[Array]) -> None:
        """Copy each result that was computed elsewhere into its buffer."""
        moved = [(to, of) for to, of in zip(results, computed, strict=True) if to.pointer != of.pointer]
        for to, values in [(to, of.numpy().copy()) for to, of in moved]:
            to.numpy()[...] = values


def handle(frame: ffi.CallFrame, platform: str) -> None:
    """Run one stage of a call on the platform "cpu" or "cuda"; raises the errors of `attention`."""
    if frame.stage not in (ffi.INITIALIZE, ffi.EXECUTE):
        return
    attributes = _attributes(frame.attrs)
    call = parse(attributes[CALL])
    if getattr(call.static, "places", None) is not None:
        call = call.on_device(f"{jax.process_index()}:{_device(frame)}")
    simulated = (call.static.backend or "").startswith("simulator")  # the simulator works in host memory
    memory = Memory("cpu", 0)
    if platform == "cuda" and not simulated:
        memory = Memory(f"cuda:{_device(frame)}", _stream(frame) if frame.stage == ffi.EXECUTE else 0)
    operands = dict(zip(call.names, _arrays(frame.args.args, frame.args.size, memory, True), strict=True))
    for place in call.aliases:
        operands[call.names[place]].readonly = False
    if frame.stage == ffi.INITIALIZE:
        if memory.device != "cpu":
            _load(call, operands)
        return
    memory.results = _arrays(frame.rets.rets, frame.rets.size, memory, False)
    memory.unused = list(memory.results)
    outputs = [memory.results[index] for index in _indices(attributes[OUTPUTS])]
    memory.settle(list(call.run(operands, outputs).values()), outputs)


def _load(call: Any, operands: dict[str, Array]) -> None:
    """Load the kernels of a call; its operands have no contents in the initialize stage."""
    import cupy

    problem, posed = call.pose(operands)
    with cupy.cuda.Device(int(problem.device.removeprefix("cuda:"))):
        if call.step in OF_INDEXER:
            dispatch.load_indexer(OF_INDEXER[call.step], problem, posed)
            return
        problems = [problem]
        if call.step == DOUBLE_BACKWARD:
            problems.append(dispatch.along_cotangents(problem))
        for plan in map(dispatch.plan_for, problems):
            dispatch.load(plan.launches, plan.device)


@functools.lru_cache(maxsize=64)
def _indices(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split()))


def _arrays(buffers: Any, count: int, memory: Memory, readonly: bool) -> list[Array]:
    """Return the buffers of a frame as arrays, which are row-major because the lowering asks for it."""
    arrays = []
    for address in buffers[:count]:
        buffer = ffi.Buffer.from_address(address)
        shape = tuple(buffer.dims[: buffer.rank])
        dtype = ffi.dtype_of(buffer.dtype)
        strides = contiguous_strides(shape)
        arrays.append(Array(buffer.data or 0, shape, strides, dtype, memory.device, "xla", memory, readonly))
    return arrays


def _attributes(attrs: Any) -> dict[bytes, str]:
    """Return the attributes of a frame, all of which are strings."""
    named = {}
    for index in range(attrs.size):
        name, value = attrs.names[index][0], ffi.ByteSpan.from_address(attrs.attrs[index])
        named[ctypes.string_at(name.ptr, name.len)] = ctypes.string_at(value.ptr, value.len).decode()
    return named


def _stream(frame: Any) -> int:
    argument = ffi.StreamGetArgs(ctx=frame.ctx)
    ffi.call_api(frame.api[0], "Stream_Get", argument)
    return argument.stream or 0


def _device(frame: Any) -> int:
    argument = ffi.DeviceOrdinalGetArgs(ctx=frame.ctx)
    ffi.call_api(frame.api[0], "DeviceOrdinal_Get", argument)
    return int(argument.device_ordinal)


def _describe(frame: Any, platform: str) -> bool:
    """Fill in the handler's metadata and return True if the frame asks for them, else return False."""
    address = frame.extension_start
    while address:
        extension = ffi.Extension.from_address(address)
        if extension.type == ffi.METADATA:
            metadata = ffi.MetadataExtension.from_address(address).metadata[0]
            version = frame.api[0].api_version
            metadata.api_version.major_version = version.major_version
            metadata.api_version.minor_version = version.minor_version
            metadata.traits = ffi.COMMAND_BUFFER_COMPATIBLE if platform == "cuda" else 0
            return True
        address = extension.next
    return False


def _error(frame: Any, error: BaseException) -> int | None:
    """Return the address of an XLA error with the text of an exception."""
    code = ffi.INTERNAL
    if isinstance(error, (TypeError, ValueError)):
        code = ffi.UNIMPLEMENTED if isinstance(error, UnsupportedError) else ffi.INVALID_ARGUMENT
    text = str(error) if code != ffi.INTERNAL else f"{type(error).__name__}: {error}"
    argument = ffi.ErrorCreateArgs(message=text.encode(), errc=code)
    return ffi.call_api(frame.api[0], "Error_Create", argument)


def _handler(platform: str) -> Any:
    """Return the C callback for a platform."""

    @ffi.Function
    def handler(address: int) -> int | None:
        error, interrupted = _served(ffi.CallFrame.from_address(address), platform)
        # The destructor of this capsule sends SIGINT to the process once this frame has been freed. A statement that
        # sends it would raise KeyboardInterrupt inside the callback, where ctypes drops exceptions.
        signal = _new_capsule(_INTERRUPT, None, _INTERRUPT) if interrupted else None  # noqa: F841  # kept alive until the return
        return error

    return handler


def _served(frame: Any, platform: str) -> tuple[int | None, bool]:
    """Run a call; return the address of its error or None, and whether it was interrupted from the keyboard."""
    try:
        if _describe(frame, platform):
            shutdown.expect_programs()
        else:
            call = shutdown.begin()  # noqa: F841  # kept until the return
            handle(frame, platform)
    except BaseException as error:  # an exception must not unwind through XLA's C++ frames
        return _error(frame, error), isinstance(error, KeyboardInterrupt)
    return None, False


_INTERRUPT = ctypes.cast(ctypes.pythonapi.PyErr_SetInterrupt, ctypes.c_void_p)
HANDLERS = {platform: _handler(platform) for platform in PLATFORMS}  # referenced for as long as XLA may call them


_new_capsule = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)(
    ("PyCapsule_New", ctypes.pythonapi)
)


def register() -> None:
    """Register the handlers with XLA."""
    for platform, name in PLATFORMS.items():
        function = _new_capsule(ctypes.cast(HANDLERS[platform], ctypes.c_void_p), None, None)
        stages = {"execute": function} if platform == "cpu" else {"initialize": function, "execute": function}
        jax.ffi.register_ffi_target(TARGET, stages, platform=name)
