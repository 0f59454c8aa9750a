"""Attention for mlx, with gradients by mx.grad, mx.value_and_grad and mx.vjp, and tangents by mx.jvp.

mlx computes lazily, but arrays are evaluated here, which mx.compile and mx.vmap do not allow inside a function.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

import mlx.core as mx

from ..problem.records import Saved
from .tape_call import TapeCall

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ..problem.argument_types import PaddedOptionsWithoutLse

__all__ = ["attention"]


def attention(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    *,
    return_lse: bool = False,
    **options: Unpack[PaddedOptionsWithoutLse[Any]],
) -> mx.array | tuple[mx.array, mx.array]:
    """Compute `cupy_flash.attention` of mlx arrays, which mlx's transforms differentiate once.

    Args:
        q: as in `cupy_flash.attention`.
        k: as in `cupy_flash.attention`.
        v: as in `cupy_flash.attention`.
        return_lse: also return lse, which is differentiated, too.
        **options: those of `cupy_flash.attention`. The bias, the sink and floating arrays that score_mod captures are
            differentiated.

    Returns:
        out, or (out, lse).

    Raises:
        NotImplementedError: in a second derivative; see `cupy_flash.attention_double_backward`.
        TypeError: as `cupy_flash.attention`; inside mx.compile and mx.vmap, too.
        ValueError: as `cupy_flash.attention`.
        UnsupportedError: as `cupy_flash.attention`.
    """
    if not isinstance(q, mx.array):
        raise TypeError(f"attention: q must be an mlx array, not {type(q).__qualname__}: call cupy_flash.attention")
    call = TapeCall("attention", dict(options), lambda x: isinstance(x, mx.array))

    @mx.custom_function
    def forward(*inputs: mx.array) -> Any:
        return call.forward(*inputs)

    @forward.vjp
    def of_cotangents(inputs: Any, cotangents: Any, results: Any) -> Any:
        return backward(*cotangents, *results, *inputs)

    @mx.custom_function
    def backward(dout: mx.array, dlse: mx.array, out: mx.array, lse: mx.array, *inputs: mx.array) -> Any:
        gradients = call.backward(Saved(dout, out, lse, dlse), *inputs)
        return tuple(mx.zeros_like(x) if d is None else d for x, d in zip(inputs, gradients, strict=True))

    backward.vjp(_refuse)
    backward.jvp(_refuse)

    @forward.jvp
    def of_tangents(inputs: Any, tangents: Any) -> Any:
        return call.jvp(tangents, *inputs)

    out, lse = forward(q, k, v, *call.inputs.values())
    return (out, lse) if return_lse else out


def _refuse(*_: Any) -> NoReturn:
    raise NotImplementedError(
        "cupy_flash.adapters.mlx.attention is differentiated once: call cupy_flash.attention_double_backward"
    )
