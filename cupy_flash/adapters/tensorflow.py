"""Attention for TensorFlow with gradients by tf.GradientTape: eager, in keras's fit, and inside a tf.function.

A graph calls Python by tf.py_function. So XLA does not compile it (jit_compile=True), and a SavedModel cannot hold it:
both fail with an error that names cupy_flash.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, NoReturn

import tensorflow as tf

from ..api import attention_vjp
from ..mods.trace import mod_of

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ..problem.argument_types import PaddedOptionsWithoutLse

__all__ = ["attention"]

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
            differentiated; captured tensors are eager, also inside a tf.function.

    Returns:
        out, or (out, lse).

    Raises:
        NotImplementedError: in a second derivative; see `cupy_flash.attention_double_backward`.
        TypeError: as `cupy_flash.attention`.
        ValueError: as `cupy_flash.attention`.
        UnsupportedError: as `cupy_flash.attention`.
    """
    call: dict[str, Any] = dict(options)
    names = [name for name, x in call.items() if isinstance(x, (tf.Tensor, tf.Variable))]
    mods = call.pop("score_mod", None), call.pop("mask_mod", None)
    mod = None if mods == (None, None) else mod_of(*mods)
    captured = () if mod is None else mod.arrays
    places = [place for place, x in enumerate(captured) if isinstance(x, tf.Tensor)]
    inputs = [tf.convert_to_tensor(x) for x in (q, k, v, *[call[name] for name in names])]
    inputs += [captured[place] for place in places]

    def options_of(rest: tuple[tf.Tensor, ...]) -> dict[str, Any]:
        """Return the options with these tensors: those of `names`, then captured ones."""
        replaced = call | dict(zip(names, rest, strict=False))
        if mod is not None:
            replaced["score_mod"] = mod.with_array_at(dict(zip(places, rest[len(names) :], strict=True)))
        return replaced

    @tf.custom_gradient
    def forward(*tensors: tf.Tensor) -> Any:
        results, vjp = attention_vjp(*tensors[:3], return_lse=True, **options_of(tensors[3:]))

        def gradient(*cotangents: tf.Tensor) -> Any:
            return _once(functools.partial(_gradients, vjp, names, places), *cotangents, *tensors)

        return results, gradient

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


# {dtype: a floating one of its size}
FLOATS = {tf.int32: tf.float32, tf.int64: tf.float64}


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


def _gradients(vjp: Any, names: list[str], places: list[int], dout: tf.Tensor, dlse: tf.Tensor) -> list[Any]:
    """Return the gradient of each tensor of a call, None if it has none."""
    found = vjp(dout, dlse)
    of_captured = [found.dcaptured[place] if found.dcaptured else None for place in places]
    return [*found[:3], *[getattr(found, f"d{name}", None) for name in names], *of_captured]


def _once(gradients: Any, dout: tf.Tensor, dlse: tf.Tensor, *inputs: tf.Tensor) -> list[Any]:
    """Return the gradients, which cannot be differentiated again."""
    found = gradients(dout, dlse)
    present = [place for place, d in enumerate(found) if d is not None]

    @tf.custom_gradient
    def fixed(*_: tf.Tensor) -> Any:
        return tuple(found[place] for place in present), _refuse

    results = fixed(dout, dlse, *inputs)
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
