"""Attention for mlx, with gradients by mx.grad, mx.value_and_grad and mx.vjp, and tangents by mx.jvp.

mlx computes lazily, but arrays are evaluated here, which mx.compile and mx.vmap do not allow inside a function.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

import mlx.core as mx

from ..api import attention as attention_of_arrays
from ..api import attention_backward, attention_jvp
from ..mods.trace import mod_of
from ..problem.build import drawn_seed

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
    call: dict[str, Any] = dict(options)
    names = [name for name in ("bias", "sink") if call.get(name) is not None]
    mods = call.pop("score_mod", None), call.pop("mask_mod", None)
    mod = None if mods == (None, None) else mod_of(*mods)
    captured = () if mod is None else mod.arrays
    places = [place for place, x in enumerate(captured) if isinstance(x, mx.array)]
    if call.get("dropout") and call.get("seed") is None:  # the backward needs the seed of the forward
        call["seed"] = drawn_seed()

    def options_of(rest: tuple[mx.array, ...]) -> dict[str, Any]:
        """Return the options with these arrays: those of `names`, then captured ones."""
        replaced = call | dict(zip(names, rest, strict=False))
        if mod is not None:
            replaced["score_mod"] = mod.with_array_at(dict(zip(places, rest[len(names) :], strict=True)))
        return replaced

    @mx.custom_function
    def forward(*inputs: mx.array) -> Any:
        return attention_of_arrays(*inputs[:3], return_lse=True, **options_of(inputs[3:]))

    @forward.vjp
    def of_cotangents(inputs: Any, cotangents: Any, results: Any) -> Any:
        return backward(*cotangents, *results, *inputs)

    @mx.custom_function
    def backward(dout: mx.array, dlse: mx.array, out: mx.array, lse: mx.array, *inputs: mx.array) -> Any:
        q, k, v, *rest = inputs
        found = attention_backward(dout, q, k, v, out, lse, dlse=dlse, **options_of(tuple(rest)))
        dcaptured = found.dcaptured or [None] * len(captured)  # None without a score_mod
        of_captured = [dcaptured[place] for place in places]
        gradients = (*found[:3], *[getattr(found, f"d{name}") for name in names], *of_captured)
        return tuple(mx.zeros_like(x) if d is None else d for x, d in zip(inputs, gradients, strict=True))

    backward.vjp(_refuse)
    backward.jvp(_refuse)

    @forward.jvp
    def of_tangents(inputs: Any, tangents: Any) -> Any:
        q, k, v, *rest = inputs
        tq, tk, tv, *others = tangents
        named = options_of(tuple(rest)) | {f"t{name}": t for name, t in zip(names, others, strict=False)}
        if captured:
            of_places = dict(zip(places, others[len(names) :], strict=True))
            named["tcaptured"] = [of_places.get(place) for place in range(len(captured))]
        _, tout, _, tlse = attention_jvp(q, k, v, tq, tk, tv, return_lse=True, **named)
        return tout, tlse

    rest = (*[call[name] for name in names], *[captured[place] for place in places])
    out, lse = forward(q, k, v, *rest)
    return (out, lse) if return_lse else out


def _refuse(*_: Any) -> NoReturn:
    raise NotImplementedError(
        "cupy_flash.adapters.mlx.attention is differentiated once: call cupy_flash.attention_double_backward"
    )
