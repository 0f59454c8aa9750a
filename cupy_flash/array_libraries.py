"""Export, import and gradient tapes of array libraries that need more than DLPack.

Only an array of such a library leads here, so that the caller has imported the library.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any, Protocol


class Exported(Protocol):
    """A buffer that exports its memory by DLPack."""

    dtype: str

    def __dlpack__(self, **options: object) -> object: ...

    def __dlpack_device__(self) -> tuple[int, int]: ...


def exporter(library: str, x: Any) -> Any:
    """Return what exports the memory of `x` by DLPack; TypeError if nothing does."""
    if library == "paddle":
        return x.detach()  # a tensor with gradient is not exported
    if hasattr(x, "__dlpack__"):
        name = getattr(getattr(x, "dtype", None), "name", "")
        if name in ("string", "resource", "variant"):
            raise TypeError(f"dtype {name} is not supported")  # its export would end the process
        return x
    import tensorflow

    if not tensorflow.executing_eagerly():
        raise TypeError(
            "a symbolic tensor has no memory: inside a tf.function call cupy_flash.adapters.tensorflow.attention"
        )
    if not isinstance(x, tensorflow.Variable):
        raise TypeError("neither a dense tf.Tensor nor a tf.Variable")
    return x.value()


def importer(library: str, x: Any) -> Callable[[Exported], Any] | None:
    """Return the function that makes an array of the library of `x`, on its device; None if the library has none."""
    if library in IMPORTERS:
        return IMPORTERS[library]
    namespace = x.__array_namespace__() if hasattr(x, "__array_namespace__") else None
    return functools.partial(_array_api, x) if hasattr(namespace, "from_dlpack") else None


def _array_api(x: Any, output: Exported) -> Any:
    """Import by the array API, which has devices that DLPack does not know."""
    result = x.__array_namespace__().from_dlpack(output)
    device = getattr(x, "device", None)
    return result if device is None or result.device == device else result.to_device(device)


def _mlx(output: Exported) -> Any:
    import mlx.core as mx

    # mx.from_dlpack makes float64 float32; mx.array does not take bf16.
    return mx.array(output, dtype=mx.float64) if output.dtype == "float64" else mx.from_dlpack(output)


def _warp(output: Exported) -> Any:
    import warp

    return warp.from_dlpack(output)


def _paddle(output: Exported) -> Any:
    import paddle

    return paddle.from_dlpack(output)


def _tensorflow(output: Exported) -> Any:
    import tensorflow

    return tensorflow.experimental.dlpack.from_dlpack(output.__dlpack__())


IMPORTERS = {"mlx": _mlx, "paddle": _paddle, "tensorflow": _tensorflow, "warp": _warp}


def unrecorded(arrays: dict[str, tuple[str, Any]]) -> Iterator[str]:
    """Yield the reasons why gradients of these arrays, given as (library, array), would be lost without an error.

    A library records only calls of its own functions. mlx does not tell whether it differentiates an array. A class
    that is named as one of a library that is not imported has no tape.
    """
    for library, (is_recorded, reason) in TAPES.items():
        given = arrays.items() if library in sys.modules else ()
        names = [name for name, (of, x) in given if of == library and is_recorded(x)]
        if names:
            yield reason.format(names=" and ".join(names))


def _is_differentiated(x: Any) -> bool:
    import paddle

    return paddle.is_grad_enabled() and not x.stop_gradient


def _is_watched(x: Any) -> bool:
    from tensorflow.python.eager import forwardprop_util, record

    watched = [getattr(x, "handle", x)]  # a variable is watched by its handle
    return bool(record.should_record_backprop(watched) or forwardprop_util.pack_tangents(watched).tangents)


def _is_on_tape(x: Any) -> bool:
    import warp

    return x.requires_grad and warp._src.context.runtime.tape is not None


HOW = "attention_vjp, attention_varlen_backward, attention_weights_vjp or key_importance_vjp"
# {library: (whether its tape records operations on an array, the reason for an error)}
TAPES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "paddle": (
        _is_differentiated,
        "paddle would record a gradient of {names}, but not of this call: take it from "
        f"{HOW} in a paddle.autograd.PyLayer, or call this function under paddle.no_grad()",
    ),
    "tensorflow": (
        _is_watched,
        "a tf.GradientTape or ForwardAccumulator watches {names}, but records no gradient of this call: call "
        f"cupy_flash.adapters.tensorflow.attention, or take it from {HOW} in a tf.custom_gradient, or call this "
        "function under tape.stop_recording()",
    ),
    "warp": (
        _is_on_tape,
        f"an active wp.Tape records no gradient of this call for {{names}}: take it from {HOW}, and add it by "
        "tape.record_func",
    ),
}
