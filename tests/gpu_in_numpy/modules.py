"""Modules and launches: PTX is the machine code of these devices, and the simulator executes it.

A cubin here is MAGIC, the architecture, and PTX for it. Launches are checked as by the driver.
"""

from __future__ import annotations

import ctypes
import functools
import math
from pathlib import Path
from typing import TYPE_CHECKING

from cupy_flash.gpu.tensor_map import ALIGNMENT, L2_PROMOTIONS, SWIZZLES, TensorMap, encode_for_simulator
from cupy_flash.simulator import CHECKS, launch, parse
from cupy_flash.simulator.errors import PtxError
from cupy_flash.simulator.machine.ptx import Function, Module

from .devices import BLOCK_LIMITS, GRID_LIMITS, SHARED_BYTES, THREADS_PER_BLOCK, Card
from .errors import (
    FILE_NOT_FOUND,
    INVALID_CLUSTER_SIZE,
    INVALID_CONTEXT,
    INVALID_HANDLE,
    INVALID_PTX,
    INVALID_VALUE,
    LAUNCH_OUT_OF_RESOURCES,
    NAMES,
    NO_BINARY_FOR_GPU,
    NOT_FOUND,
    CudaError,
)

if TYPE_CHECKING:
    from . import Machine

MAGIC = b"\x7fELF of a GPU in NumPy: "
PARAMETER_BYTES = 32764  # since CUDA 12.1, from sm_70 on
MAX_THREADS, STATIC_SHARED, MAX_DYNAMIC_SHARED = 0, 1, 8  # CUfunction_attribute
FUNCTION_ATTRIBUTES = 16  # smaller values are attributes


def cubin(arch: str, ptx: bytes) -> bytes:
    """Return a cubin of an architecture, from its PTX."""
    return MAGIC + arch.encode() + b"\n" + ptx


class Kernel:
    """A kernel that a module has loaded on a device; `dynamic_shared` is the largest request that a launch may make."""

    def __init__(self, card: Card, owner: int, module: Module, name: str) -> None:
        self.card, self.owner, self.module, self.name = card, owner, module, name
        self.function: Function = module.kernels[name]
        variables = (*self.function.variables.values(), *module.variables.values())
        self.static_shared = sum(variable.size for variable in variables if variable.space == "shared")
        self.dynamic_shared = SHARED_BYTES - self.static_shared


class Launched:
    """A launch that the driver has accepted, recorded for tests."""

    def __init__(self, kernel: Kernel, grid: tuple, block: tuple, shared: int, stream: int, parameters: bytes) -> None:
        self.name, self.card, self.grid, self.block = kernel.name, kernel.card, grid, block
        self.shared, self.stream, self.parameters = shared, stream, parameters


class Modules:
    """Calls of the driver on modules, kernels and tensor maps."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.launches: list[Launched] = []
        self.loads: list[bytes] = []  # images in the order of loading
        self._modules: dict[int, tuple[Card, Module]] = {}
        self._kernels: dict[int, Kernel] = {}

    def _load(self, image: bytes) -> int:
        self.machine.graphs.require_safe("cuModuleLoad")
        card = self._context()
        if image.startswith(MAGIC):
            arch, _, image = image.removeprefix(MAGIC).partition(b"\n")
            if arch.decode() != card.arch:
                raise CudaError(NO_BINARY_FOR_GPU, f"a cubin of {arch.decode()} on {card.arch}")
        elif image.startswith(b"\x7fELF"):
            raise CudaError(NO_BINARY_FOR_GPU, "a cubin of a real device")
        self.loads.append(image)
        try:
            module = parse(image.decode())
        except (PtxError, UnicodeDecodeError) as error:
            raise CudaError(INVALID_PTX, str(error)) from error
        handle = self.machine.handle()
        self._modules[handle] = card, module
        return handle

    def _context(self) -> Card:
        if not self.machine.devices.has_context:
            raise CudaError(INVALID_CONTEXT, "no context is current in this thread")
        return self.machine.devices.use()

    def _kernel(self, handle: int | None) -> Kernel:
        if handle not in self._kernels:
            raise CudaError(INVALID_HANDLE, f"{handle} is no kernel")
        return self._kernels[handle]

    def cuModuleLoad(self, module, path: bytes) -> None:
        file = Path(path.decode())
        if not file.is_file():
            raise CudaError(FILE_NOT_FOUND, str(file))
        module[0] = self._load(file.read_bytes())

    def cuModuleLoadData(self, module, image: int) -> None:
        module[0] = self._load(ctypes.string_at(image))

    def cuModuleUnload(self, module: int) -> None:
        if module not in self._modules:
            raise CudaError(INVALID_HANDLE, f"{module} is no module")
        del self._modules[module]
        self._kernels = {handle: kernel for handle, kernel in self._kernels.items() if kernel.owner != module}

    def cuModuleGetFunction(self, function, module: int, name: bytes) -> None:
        if module not in self._modules:
            raise CudaError(INVALID_HANDLE, f"{module} is no module")
        card, text = self._modules[module]
        if name.decode() not in text.kernels:
            raise CudaError(NOT_FOUND, f"{name.decode()} among {sorted(text.kernels)}")
        function[0] = self.machine.handle()
        self._kernels[function[0]] = Kernel(card, module, text, name.decode())

    def cuModuleGetGlobal(self, address, size, module: int, name: bytes) -> None:
        raise CudaError(NOT_FOUND, name.decode())

    def cuFuncGetAttribute(self, value, attribute: int, function: int) -> None:
        kernel = self._kernel(function)
        known = {
            MAX_THREADS: kernel.function.max_threads or THREADS_PER_BLOCK,
            STATIC_SHARED: kernel.static_shared,
            MAX_DYNAMIC_SHARED: kernel.dynamic_shared,
        }
        if not 0 <= attribute < FUNCTION_ATTRIBUTES:
            raise CudaError(INVALID_VALUE, f"{attribute} is no attribute of a function")
        value[0] = known.get(attribute, 0)

    def cuFuncSetAttribute(self, function: int, attribute: int, value: int) -> None:
        kernel = self._kernel(function)
        if attribute != MAX_DYNAMIC_SHARED:
            raise CudaError(INVALID_VALUE, f"attribute {attribute} is not in this stand-in")
        if value + kernel.static_shared > kernel.card.shared_bytes:
            raise CudaError(
                INVALID_VALUE,
                f"{value} + {kernel.static_shared} bytes of shared memory; {kernel.card.arch} has "
                f"{kernel.card.shared_bytes}",
            )
        kernel.dynamic_shared = value

    def cuLaunchKernel(
        self, function: int, gx: int, gy: int, gz: int, bx: int, by: int, bz: int,
        shared: int, stream: int | None, parameters, extra,
    ) -> None:  # fmt: skip
        kernel, grid, block = self._kernel(function), (gx, gy, gz), (bx, by, bz)
        self._check(kernel, grid, block, shared)
        stream = stream or 0
        card = self.machine.streams.at(stream).card
        if not self._context() is kernel.card is card:
            raise CudaError(INVALID_HANDLE, f"{kernel.name} of device {kernel.card.index} on a stream of {card.index}")
        values = _packed(kernel.function, parameters)
        self.launches.append(Launched(kernel, grid, block, shared, stream, values))

        def run() -> None:
            launch(
                kernel.module, kernel.name, grid, block, values,
                memory=kernel.card.memory, dynamic_shared=shared, unchecked=CHECKS,
            )  # fmt: skip

        self.machine.streams.enqueue(stream, kernel.name, run)

    def _check(self, kernel: Kernel, grid: tuple[int, ...], block: tuple[int, ...], shared: int) -> None:
        """Refuse a launch that the driver would refuse."""
        for sizes, limits, what in ((grid, GRID_LIMITS, "grid"), (block, BLOCK_LIMITS, "block")):
            if not all(1 <= size <= limit for size, limit in zip(sizes, limits, strict=True)):
                raise CudaError(INVALID_VALUE, f"{kernel.name}: a {what} of {sizes}; limits are {limits}")
        threads, function = math.prod(block), kernel.function
        if threads > THREADS_PER_BLOCK or threads > (function.max_threads or threads):
            limit = function.max_threads or THREADS_PER_BLOCK
            raise CudaError(LAUNCH_OUT_OF_RESOURCES, f"{kernel.name}: {threads} threads; a block has at most {limit}")
        if shared > kernel.dynamic_shared:
            raise CudaError(
                INVALID_VALUE, f"{kernel.name}: {shared} bytes of shared memory, {kernel.dynamic_shared} are allowed"
            )
        if any(size % cluster for size, cluster in zip(grid, function.cluster, strict=True)):
            raise CudaError(INVALID_CLUSTER_SIZE, f"{kernel.name}: clusters of {function.cluster} in a grid of {grid}")
        if math.prod(function.cluster) > 8:
            raise CudaError(INVALID_CLUSTER_SIZE, f"{kernel.name}: {function.cluster} is above the portable size of 8")
        _, size = function.parameter_layout()
        if size > PARAMETER_BYTES:
            raise CudaError(INVALID_VALUE, f"{kernel.name}: {size} bytes of parameters, above {PARAMETER_BYTES}")

    def cuTensorMapEncodeTiled(
        self, result: int, data_type: int, rank: int, address: int, shape, strides, box, steps, interleave: int,
        swizzle: int, promotion: int, fill: int,
    ) -> None:  # fmt: skip
        self._context()
        if result % ALIGNMENT:
            raise CudaError(INVALID_VALUE, f"a tensor map at {result:#x} is not aligned to {ALIGNMENT} bytes")
        try:
            tensor_map = TensorMap(
                data_type, address or 0, tuple(shape[:rank]), tuple(strides[: rank - 1]), tuple(box[:rank]),
                list(SWIZZLES)[swizzle], list(L2_PROMOTIONS)[promotion],
            )  # fmt: skip
        except ValueError as error:
            raise CudaError(INVALID_VALUE, str(error)) from error
        if (interleave, fill) != (0, 0) or list(steps[:rank]) != [1] * rank:
            raise CudaError(INVALID_VALUE, "interleave, fill and element strides are not in this stand-in")
        ctypes.memmove(result, encode_for_simulator(tensor_map), 128)

    def cuGetErrorName(self, status: int, text) -> None:
        text[0] = _kept(f"CUDA_ERROR_{NAMES.get(status, 'UNKNOWN')}")

    def cuGetErrorString(self, status: int, text) -> None:
        text[0] = _kept(NAMES.get(status, "unknown").replace("_", " ").lower())


@functools.cache
def _kept(text: str) -> bytes:
    """Return the bytes of a text, which are kept alive so that pointers to them stay valid."""
    return text.encode()


def _packed(function: Function, pointers) -> bytes:
    """Return the parameter buffer; each pointer leads to the bytes of one parameter."""
    offsets, size = function.parameter_layout()
    buffer = bytearray(size)
    for i, parameter in enumerate(function.parameters):
        start = offsets[parameter.name]
        buffer[start : start + parameter.size] = ctypes.string_at(pointers[i], parameter.size)
    return bytes(buffer)
