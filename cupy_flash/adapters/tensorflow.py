"""Attention for TensorFlow with gradients by tf.GradientTape: eager, in keras's fit, and inside a tf.function.

A graph calls Python by tf.py_function. So XLA does not compile it (jit_compile=True), and a SavedModel cannot hold it:
both fail with an error that names cupy_flash.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, NoReturn

import tensorflow as tf

from ..problem.records import Saved
from .tape_call import TapeCall

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ..problem.argument_types import PaddedOptionsWithoutLse

__all__ = ["attention"]

FUNCTION = "adapters.tensorflow.attention"
NAME = "cupy_flash_adapters_tensorflow_attention"


@tf.autograph.experimental.do_not_convert
def attention(
    q: tf.Tensor,
    k: tf.Tensor,
    v: tf.Tensor,
    *,
    return_lse: bool = False,
    **options: Unpack[PaddedOptionsWithoutLse[Any]],
) -> tf.Tensor | tuple[tf.Tensor, tf.Tensor]:
    """Compute `cupy_flash.attention` of tensors or variables, which a tf.GradientTape differentiates once.

    Args:
        q: as in `cupy_flash.attention`.
        k: as in `cupy_flash.attention`.
        v: as in `cupy_flash.attention`.
        return_lse: also return lse, which is differentiated, too.
        **options: those of `cupy_flash.attention`. The bias, the sink and floating tensors that score_mod captures are
            differentiated.

    Returns:
        out, or (out, lse).

    Raises:
        NotImplementedError: in a second derivative; see `cupy_flash.attention_double_backward`.
        TypeError: as `cupy_flash.attention`.
        ValueError: as `cupy_flash.attention`.
        UnsupportedError: as `cupy_flash.attention`.
    """
    call = TapeCall(FUNCTION, dict(options), tf.is_tensor)
    inputs = _tensors({"q": q, "k": k, "v": v} | call.inputs)

    @tf.custom_gradient
    def forward(*tensors: tf.Tensor) -> Any:
        out, lse = call.forward(*tensors)

        def gradient(*cotangents: tf.Tensor | tf.IndexedSlices) -> Any:
            if not tf.executing_eagerly():
                raise NotImplementedError(
                    f"{FUNCTION} was called eagerly, and its gradient is taken in a graph: give tape.jacobian "
                    "experimental_use_pfor=False"
                )
            dout, dlse = map(tf.convert_to_tensor, cotangents)
            return _once(call.backward(Saved(dout, out, lse, dlse), *tensors), dout, dlse, *tensors)

        return (out, lse), gradient

    if tf.executing_eagerly():
        out, lse = forward(*inputs)
    else:
        wide = tf.float64 if inputs[0].dtype == tf.float64 else tf.float32
        dtypes = [x.dtype for x in inputs]

        def run(_: tf.Tensor, *tensors: tf.Tensor) -> Any:
            return forward(*map(_restored, tensors, dtypes))

        out, lse = tf.py_function(run, [_not_saved(), *map(_as_float, inputs)], [dtypes[0], wide], name=NAME)
        out.set_shape(inputs[0].shape[:-1].concatenate(inputs[2].shape[-1:]))
        lse.set_shape([None] * 3)
    return (out, lse) if return_lse else out


def _tensors(given: dict[str, Any]) -> list[tf.Tensor]:
    """Return tensors of what a caller gives by name, as variables; one TypeError for all that are not dense."""
    tensors, reasons = [], []
    for name, x in given.items():
        try:
            tensors.append(tf.convert_to_tensor(x))
        except (TypeError, ValueError):
            reasons.append(f"  - {name} ({type(x).__qualname__}) is no dense tensor")
    if reasons:
        raise TypeError("\n".join([f"{FUNCTION}: requirements are not met", *reasons]))
    return tensors


# {dtype: a floating one of its size}
FLOATS = {tf.int32: tf.float32, tf.uint32: tf.float32, tf.int64: tf.float64, tf.uint64: tf.float64}


def _as_float(x: tf.Tensor) -> tf.Tensor:
    """Return a tensor as a floating one: tf.py_function raises an error in the gradient of any other input."""
    if x.dtype.is_floating:
        return x
    return tf.bitcast(x, FLOATS[x.dtype]) if x.dtype in FLOATS else tf.cast(x, tf.float32)


def _restored(x: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    """Return the tensor from which `_as_float` has made x."""
    if dtype.is_floating:
        return x
    return tf.bitcast(x, dtype) if dtype in FLOATS else tf.cast(x, dtype)


def _once(found: list[Any], *inputs: tf.Tensor) -> list[Any]:
    """Return the gradients, which cannot be differentiated again with respect to the inputs."""
    present = [place for place, d in enumerate(found) if d is not None]

    @tf.custom_gradient
    def fixed(*_: tf.Tensor) -> Any:
        return tuple(found[place] for place in present), _refuse

    results = fixed(*inputs)
    for place, d in zip(present, results, strict=True):
        found[place] = d
    return found


def _refuse(*_: Any) -> NoReturn:
    raise NotImplementedError(
        "cupy_flash.adapters.tensorflow.attention is differentiated once: call cupy_flash.attention_double_backward"
    )


@functools.cache
def _not_saved() -> tf.Variable:
    """Return a variable that no model tracks, so that tf.saved_model.save refuses a graph with it, naming it."""
    with tf.init_scope():
        return tf.Variable(0.0, trainable=False, name=f"{NAME}_runs_in_python_and_cannot_be_saved")
