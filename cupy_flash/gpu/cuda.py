"""The CUDA backend: cubins loaded with CuPy and launched on the caller's stream and device."""

from __future__ import annotations

import operator
import os
import threading
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING

from ..arrays import LEGACY_DEFAULT_STREAM, AnyArray, Array, current_stream, made_on, stream_of
from ..engines.launch import Launch
from ..plan.plan import Plan
from ..problem.records import Gradients, Operands, Problem, Statistics
from . import indexer as gpu_indexer
from . import run_plan
from . import weights as gpu_weights
from .kept_launches import KeptLaunches
from .run_plan import compile_launch
from .tensor_map import encode_for_gpu

if TYPE_CHECKING:
    from typing import Protocol

    from ..device import Device
    from ..problem.indexer import Indexer, IndexerOperands
    from ..problem.weights import Asked, WeightsGradients

    class Kernel(Protocol):
        """The signature of a loaded kernel, a function of a CuPy module; `stream` is anything with a `ptr`."""

        def __call__(
            self,
            grid: tuple[int, int, int],
            block: tuple[int, int, int],
            args: tuple[object, ...],
            /,
            *,
            shared_mem: int,
            stream: SimpleNamespace,
        ) -> None:
            """Launch it."""


def forward(plan: Plan, operands: Operands) -> tuple[Array, ...]:
    """Launch the forward on the current stream; returns (out, lse), followed by the statistics of the problem."""
    with _explained():
        return run_plan.forward(plan, operands, _start)


def jvp(plan: Plan, operands: Operands) -> tuple[Array, Array, Array, Array]:
    """Launch the JVP on the current stream; returns (out, lse, tout, tlse)."""
    with _explained():
        return run_plan.jvp(plan, operands, _start)


def append(plan: Plan, operands: Operands) -> None:
    """Launch the append to a KV cache on the current stream."""
    with _explained():
        run_plan.append(plan, operands, _start)


def backward(plan: Plan, operands: Operands) -> Gradients:
    """Launch the backward on the current stream; returns the gradients."""
    with _explained():
        return run_plan.backward(plan, operands, _start)


def double_backward(plan: Plan, operands: Operands) -> Gradients:
    """Launch the double backward on the current stream; returns the second gradients."""
    with _explained():
        return run_plan.backward(plan, operands, _start)


def weights(plan: Plan, operands: Operands, asked: Asked) -> tuple[Array, ...]:
    """Launch a call that returns probabilities on the current stream; returns its results."""
    with _explained():
        return gpu_weights.forward(plan, operands, asked, _start)


def weights_backward(plan: Plan, operands: Operands, asked: Asked) -> WeightsGradients:
    """Launch the backward of a call that returns probabilities on the current stream; returns the gradients."""
    with _explained():
        return gpu_weights.backward(plan, operands, asked, _start)


def indexer(function: str, call: Indexer, operands: IndexerOperands, device: Device) -> object:
    """Launch a function of the lightning indexer on the current stream; returns its results."""
    with _explained():
        return getattr(gpu_indexer, function)(call, operands, device, _start)


def block_classes(problem: Problem, operands: Operands, block: int, arch: str) -> Array:
    """Launch the classification of a mask_mod's blocks on the current stream; returns their classes."""
    with _explained():
        return run_plan.block_classes(problem, operands, block, arch, _start)


def merge(
    parts: tuple[Array, Array, Array, Array],
    layout: str,
    arch: str,
    statistics: tuple[Statistics[Array], Statistics[Array]],
    key_offset_b: int,
) -> tuple[Array, ...]:
    """Launch the merge of parts = (out_a, lse_a, out_b, lse_b) on the current stream; returns out, lse, statistics."""
    with _explained():
        return run_plan.merge(parts, layout, arch, _start, statistics, key_offset_b)


CAPTURE_UNSUPPORTED = 900  # cudaErrorStreamCaptureUnsupported


@contextmanager
def _explained() -> Iterator[None]:
    """Raise an error with advice if CuPy's allocator calls cudaMalloc during a capture that forbids it."""
    try:
        yield
    except RuntimeError as error:
        _advise(error)
        raise


def _advise(error: RuntimeError) -> None:
    """Raise the error with advice if it is of an allocation in a capture; CuPy's CUDARuntimeError has a status."""
    if getattr(error, "status", None) == CAPTURE_UNSUPPORTED:
        raise RuntimeError(
            "results and workspaces would have to be allocated during a CUDA graph capture that forbids cudaMalloc: "
            "capture in the relaxed mode, CuPy's default, or call the function once before the capture, so that the "
            "memory pool has blocks of these sizes"
        ) from error


def _start(work: run_plan.Work) -> None:
    """Launch the kernels of `work` in order, loading them if necessary."""
    import cupy

    like = next(iter(work.inputs.values()))
    index = int(like.device.removeprefix("cuda:"))
    # CuPy reads only `ptr` of a stream.
    stream = SimpleNamespace(ptr=stream_of(like))
    address = operator.attrgetter("pointer")
    params = work.params(address)
    # CuPy asks NumPy to describe an argument's dtype, which takes 100 times longer for a struct than for raw bytes.
    params = params.view(f"V{params.nbytes}")
    with cupy.cuda.Device(index) as card:
        card.use()  # cuTensorMapEncodeTiled needs a current context, which a new thread lacks
        _wait(stream, {made_on(array) for array in work.inputs.values()})
        for launch in work.launches:
            function = _ready(launch, index, work.arch, stream.ptr)
            block = (launch.threads, 1, 1)
            # CuPy passes a NumPy array of one element by value.
            arguments = work.arguments(launch, params, address, encode_for_gpu)
            function(launch.grid, block, arguments, shared_mem=launch.shared_bytes, stream=stream)


def repeat(kept: KeptLaunches, inputs: Sequence[AnyArray], addresses: list[int]) -> list[AnyArray] | None:
    """Launch on the current stream what an earlier call has launched, on other arrays; returns the outputs."""
    import cupy

    index = int(kept.device[5:])  # of "cuda:<index>"
    try:
        with cupy.cuda.Device(index) as card:
            card.use()  # as in `_start`
            allocated = kept.allocate(inputs[0])
            if allocated is None:
                return None
            outputs, starts = allocated
            stream = SimpleNamespace(ptr=current_stream(kept.framework, kept.device))
            if kept.loaded[0] is not _loaded:
                kept.loaded = _loaded, [_ready(step.launch, index, kept.arch, stream.ptr) for step in kept.steps]
            arguments = kept.arguments(addresses + starts, encode_for_gpu)
            for function, (launch, of_launch) in zip(kept.loaded[1], arguments, strict=True):
                block = (launch.threads, 1, 1)
                function(launch.grid, block, of_launch, shared_mem=launch.shared_bytes, stream=stream)
            return outputs
    except RuntimeError as error:
        _advise(error)
        raise


def _ready(launch: Launch, index: int, arch: str, stream: int) -> Kernel:
    """Return the kernel of a launch, loaded if necessary."""
    function = _loaded.get((launch.text_key, index))
    if function is None:
        _require_no_capture(launch, stream)
        function = load(launch, arch)
    return function


def _wait(stream: SimpleNamespace, others: set[int | None]) -> None:
    """Make `stream` wait for the work already enqueued on the other streams."""
    import cupy

    for other in others - {None, stream.ptr or LEGACY_DEFAULT_STREAM}:
        event = cupy.cuda.Event(disable_timing=True)
        event.record(SimpleNamespace(ptr=other))
        cupy.cuda.runtime.streamWaitEvent(stream.ptr, event.ptr)


_loaded: dict[tuple[Hashable, int], Kernel] = {}  # (text_key, device) -> loaded kernel
_loading = threading.Lock()


def _renew_lock() -> None:
    """Replace the lock in a forked child, where the thread that may have held it does not exist."""
    global _loading
    _loading = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_lock)


def _require_no_capture(launch: Launch, stream: int) -> None:
    import cupy

    if cupy.cuda.runtime.streamIsCapturing(stream):
        raise RuntimeError(
            f"{launch.kernel} would have to be compiled and loaded during a CUDA graph capture: call "
            "cupy_flash.compile(...) with this problem's options, or the function itself, once before the capture"
        )


def load(launch: Launch, arch: str) -> Kernel:
    """Return the kernel of a launch, loaded on the current device, and compiled if no cache has it.

    Threads load one at a time, so that each kernel is compiled once.
    """
    import cupy

    key = launch.text_key, cupy.cuda.runtime.getDevice()
    with _loading:
        if key not in _loaded:
            _loaded[key] = _function(launch, arch)
        return _loaded[key]


def _function(launch: Launch, arch: str) -> Kernel:
    import cupy

    result = compile_launch(launch, arch)
    if result.path is not None:
        function = cupy.RawModule(path=str(result.path)).get_function(launch.function)
        function.max_dynamic_shared_size_bytes = launch.shared_bytes
    else:
        module = cupy.cuda.Module()
        module.load(result.code)
        function = module.get_function(launch.function)
        driver = cupy.cuda.driver
        attribute = driver.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        driver.funcSetAttribute(function.ptr, attribute, launch.shared_bytes)
    return function
