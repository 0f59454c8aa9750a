"""attention_weights, top_weights and key_importance on jax arrays, with gradients in reverse mode.

Each is a step of its own (ffi_execute.py): eager, under jit, vmap and sharded over the batch and the heads. lse is an
input of its own, so that jax continues into the call of attention that returned it.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from ... import dispatch
from ...arrays import Array
from ...problem import features
from ...problem.records import SavedWeights
from ...problem.weights import (
    EACH,
    GRADIENT,
    IMPORTANCE,
    LIMIT,
    MEAN,
    TOP,
    WeightsGradients,
    Wish,
    pose_weights,
)
from ...problem.weights import WEIGHTS as OF_ROWS
from . import static_call
from .ffi_execute import bind
from .op import JaxArray, read
from .static_call import WEIGHTS, WEIGHTS_BACKWARD, Call, Static
from .statistics import of_operand

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ...problem.argument_types import PackedOptions, PaddedOptions
    from ...problem.weights import Heads, Rows

_Static: Any = features.record(*Static._fields, "kind", "rows", "heads", "limit", "n")


class WeightsStatic(_Static):
    """The options of a call that are not arrays, and what it wants of the probabilities."""

    __slots__ = ()

    layout_of_arrays = Static.layout_of_arrays


class WeightsCall(Call):
    """A call that returns probabilities, or its backward."""

    __slots__ = ()

    @property
    def differentiated(self) -> tuple[str, ...]:
        """The operands that the backward differentiates, in the order of its results."""
        others = (name for name in ("lse", "row_weights") if name in self.names)
        return (*(name for name in super().differentiated if name != "sink"), *others)

    @property
    def result_names(self) -> tuple[str, ...]:
        """The names of the results, in order."""
        if self.step == WEIGHTS_BACKWARD:
            return tuple(f"d{name}" for name in self.differentiated)
        return ("values", "keys") if self.static.kind == TOP else ("result",)

    def results(self, operands: dict[str, Any]) -> dict[str, tuple[tuple[int, ...], Any]]:
        """Return the shape and dtype of each result by name; operands need only a shape and a dtype."""
        if self.step == WEIGHTS_BACKWARD:
            return {name: (tuple(operands[name[1:]].shape), operands[name[1:]].dtype) for name in self.result_names}
        static, q, lse = self.static, operands["q"], tuple(operands["lse"].shape)
        packed = static.max_seqlen_q is not None
        width = static.max_seqlen_k if packed else operands["k"].shape[2 if static.layout == "bhsd" else 1]
        if "selected" in operands:
            width = operands["selected"].shape[-1] * (static.selected_block or 1)
        if static.kind == IMPORTANCE:
            batch = operands["cu_seqlens_q"].shape[0] - 1 if packed else lse[0]
            return {"result": ((batch, lse[-2], width), np.dtype(np.float64 if q.dtype == np.float64 else np.float32))}
        if static.kind == TOP:
            shape = (*lse, static.n)
            return {"values": (shape, q.dtype), "keys": (shape, np.dtype(np.int32))}
        heads = {EACH: (lse[-2],), MEAN: ()}[static.heads] if isinstance(static.heads, str) else (len(static.heads),)
        rows = lse[-1] if static.rows is None else len(static.rows)
        return {"result": ((*lse[:-2], *heads, rows, width), q.dtype)}

    def axes(self, name: str, rank: int) -> str:
        """Return the axes of an operand or a result; a mean or a list of heads needs all heads on one device."""
        name = "result" if name in ("values", "keys", *GRADIENT.values()) else name
        if name == "result":
            padded, packed = ("bh.", ".h.") if self.static.kind == IMPORTANCE else ("bh..", "h..")
            axes = padded if self.static.max_seqlen_q is None else packed
            if self.static.heads == MEAN:
                axes = axes.replace("h", "")
        elif name.removeprefix("d") == "row_weights":
            axes = super().axes("lse", rank)
            axes = axes[len(axes) - rank :]
        else:
            axes = super().axes(name, rank)
        if self.static.kind == OF_ROWS and self.static.heads != EACH:
            axes = axes.replace("h", ".").replace("g", ".")
        return axes

    def fold_axis(self, mapped: set[str]) -> str | None:
        """Return None: vmap runs the instances one by one."""
        return None

    def pose(self, operands: dict[str, Any]) -> Any:
        """Return the problem and its operands, or raise one error with every requirement that is not met."""
        return self._pose(operands)[:2]

    def _pose(self, operands: dict[str, Any]) -> Any:
        static = self.static
        wish = Wish(static.kind, static.rows, static.heads, static.limit, static.n, operands.get("row_weights"))
        saved = None
        if self.step == WEIGHTS_BACKWARD:
            saved = SavedWeights(operands[GRADIENT[static.kind]], operands.get("keys"))
        arrays = (operands["q"], operands["k"], operands["lse"])
        return pose_weights(
            static.function, arrays, self.options(operands), wish, self.packed(operands), saved, self.shard(operands)
        )

    def run(self, operands: dict[str, Any], results: list[Array]) -> dict[str, Array]:
        """Compute the results on the operands' device, in buffers that the owner of the operands allocates."""
        if self.step == WEIGHTS:
            return dict(zip(self.result_names, dispatch.weights(*self._pose(operands)), strict=True))
        gradients: WeightsGradients = dispatch.weights_backward(*self._pose(operands))
        named = gradients._asdict() | {f"darray{slot}": x for slot, x in enumerate(gradients.dcaptured or ())}
        return {name: named[name] for name in self.result_names}


static_call.STEPS |= dict.fromkeys((WEIGHTS, WEIGHTS_BACKWARD), (WeightsCall, WeightsStatic))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _weights(text: str, operands: dict[str, Any]) -> dict[str, Any]:
    """Return the results of the call with a text, by name."""
    return bind(static_call.parse(text), operands)


def _save(text: str, operands: dict[str, Any]) -> tuple[dict[str, Any], Any]:
    results = bind(static_call.parse(text), operands)
    return results, (operands, {name: x for name, x in results.items() if name == "keys"})


def _differentiate(text: str, saved: Any, cotangents: dict[str, Any]) -> tuple[dict[str, Any]]:
    operands, keys = saved
    call = static_call.parse(text)
    gradient = cotangents["values" if call.static.kind == TOP else "result"]
    given = operands | keys | {GRADIENT[call.static.kind]: gradient}
    gradients = bind(WeightsCall(WEIGHTS_BACKWARD, call.static, tuple(given)), given)
    return ({name: of_operand(gradients.get(f"d{name}"), x) for name, x in operands.items()},)


_weights.defvjp(_save, _differentiate)


def attention_weights(
    q: JaxArray,
    k: JaxArray,
    lse: JaxArray,
    *,
    rows: Rows = None,
    heads: Heads = EACH,
    limit: float | None = LIMIT,
    **options: Unpack[PaddedOptions[JaxArray]],
) -> jax.Array:
    """Compute `cupy_flash.attention_weights` on jax arrays, on a CPU.

    Differentiable once, in reverse mode, with respect to q, k, lse, bias and the floating arrays that score_mod
    captures. The call works under grad, jit, vmap (one instance after another) and for arrays sharded over the batch,
    and over the heads if heads is "each".

    Args:
        q: as in `cupy_flash.attention_weights`.
        k: likewise.
        lse: likewise.
        rows: likewise; not traced, as heads and limit.
        heads: likewise.
        limit: likewise.
        **options: likewise.

    Returns:
        P, as `cupy_flash.attention_weights`.
    """
    wish = Wish(OF_ROWS, rows, heads, limit)
    return _call("attention_weights", {"q": q, "k": k, "lse": lse}, options, wish)["result"]


def attention_weights_varlen(
    q: JaxArray,
    k: JaxArray,
    lse: JaxArray,
    cu_seqlens_q: JaxArray,
    cu_seqlens_k: JaxArray,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    rows: Rows = None,
    heads: Heads = EACH,
    limit: float | None = LIMIT,
    **options: Unpack[PackedOptions[JaxArray]],
) -> jax.Array:
    """Compute `cupy_flash.attention_weights_varlen` on jax arrays, as `attention_weights`.

    Args:
        q: as in `cupy_flash.attention_weights_varlen`.
        k: likewise.
        lse: likewise.
        cu_seqlens_q: likewise; it may be traced.
        cu_seqlens_k: likewise.
        max_seqlen_q: an int, not traced.
        max_seqlen_k: likewise.
        rows: likewise.
        heads: likewise.
        limit: likewise.
        **options: those of `cupy_flash.attention_varlen`.

    Returns:
        P, as `cupy_flash.attention_weights_varlen`.
    """
    given = {"q": q, "k": k, "lse": lse, "cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
    longest = dict(max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k)
    return _call("attention_weights_varlen", given, options, Wish(OF_ROWS, rows, heads, limit), **longest)["result"]


def top_weights(
    q: JaxArray, k: JaxArray, lse: JaxArray, n: int, **options: Unpack[PaddedOptions[JaxArray]]
) -> tuple[jax.Array, jax.Array]:
    """Compute `cupy_flash.top_weights` on jax arrays, as `attention_weights`.

    Args:
        q: as in `cupy_flash.top_weights`.
        k: likewise.
        lse: likewise.
        n: an int, not traced.
        **options: likewise.

    Returns:
        (values, keys); values are differentiable.
    """
    results = _call("top_weights", {"q": q, "k": k, "lse": lse}, options, Wish(TOP, n=n))
    return results["values"], results["keys"]


def top_weights_varlen(
    q: JaxArray,
    k: JaxArray,
    lse: JaxArray,
    cu_seqlens_q: JaxArray,
    cu_seqlens_k: JaxArray,
    max_seqlen_q: int,
    max_seqlen_k: int,
    n: int,
    **options: Unpack[PackedOptions[JaxArray]],
) -> tuple[jax.Array, jax.Array]:
    """Compute `cupy_flash.top_weights_varlen` on jax arrays, as `attention_weights_varlen`.

    Args:
        q: as in `attention_weights_varlen`.
        k: likewise.
        lse: likewise.
        cu_seqlens_q: likewise.
        cu_seqlens_k: likewise.
        max_seqlen_q: likewise.
        max_seqlen_k: likewise.
        n: an int, not traced.
        **options: likewise.

    Returns:
        (values, keys); values are differentiable.
    """
    given = {"q": q, "k": k, "lse": lse, "cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
    longest = dict(max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k)
    results = _call("top_weights_varlen", given, options, Wish(TOP, n=n), **longest)
    return results["values"], results["keys"]


def key_importance(
    q: JaxArray,
    k: JaxArray,
    lse: JaxArray,
    *,
    row_weights: JaxArray | None = None,
    **options: Unpack[PaddedOptions[JaxArray]],
) -> jax.Array:
    """Compute `cupy_flash.key_importance` on jax arrays, as `attention_weights`; row_weights has a gradient too.

    Args:
        q: as in `cupy_flash.key_importance`.
        k: likewise.
        lse: likewise.
        row_weights: likewise.
        **options: likewise.

    Returns:
        The importance of each key, as `cupy_flash.key_importance`.
    """
    given = {"q": q, "k": k, "lse": lse} | ({} if row_weights is None else {"row_weights": row_weights})
    return _call("key_importance", given, options, Wish(IMPORTANCE))["result"]


def key_importance_varlen(
    q: JaxArray,
    k: JaxArray,
    lse: JaxArray,
    cu_seqlens_q: JaxArray,
    cu_seqlens_k: JaxArray,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    row_weights: JaxArray | None = None,
    **options: Unpack[PackedOptions[JaxArray]],
) -> jax.Array:
    """Compute `cupy_flash.key_importance_varlen` on jax arrays, as `attention_weights_varlen`.

    Args:
        q: as in `attention_weights_varlen`.
        k: likewise.
        lse: likewise.
        cu_seqlens_q: likewise.
        cu_seqlens_k: likewise.
        max_seqlen_q: likewise.
        max_seqlen_k: likewise.
        row_weights: as in `cupy_flash.key_importance_varlen`.
        **options: likewise.

    Returns:
        The importance of each key, as `cupy_flash.key_importance_varlen`.
    """
    given = {"q": q, "k": k, "lse": lse, "cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
    given |= {} if row_weights is None else {"row_weights": row_weights}
    longest = dict(max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k)
    return _call("key_importance_varlen", given, options, Wish(IMPORTANCE), **longest)["result"]


def _call(function: str, given: dict[str, Any], options: Any, wish: Wish, **longest: int) -> dict[str, Any]:
    """Return the results of a call by name."""
    static, operands, _ = read(function, given, options, **longest)
    rows, heads = (_of_host(function, name, getattr(wish, name)) for name in ("rows", "heads"))
    if isinstance(rows, slice):
        rows = list(range(*rows.indices(operands["lse"].shape[-1])))
    wanted = dict(kind=wish.kind, rows=rows, heads=heads, limit=wish.limit, n=wish.n)
    return _weights(WeightsCall(WEIGHTS, WeightsStatic(*static, **wanted), tuple(operands)).text, operands)


def _of_host(function: str, name: str, value: Any) -> Any:
    """Return rows or heads as plain Python values; TypeError if they are traced."""
    if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(value)):
        raise TypeError(f"{function}: {name} must have a value while jax traces")
    return np.asarray(value).tolist() if isinstance(value, (jax.Array, np.ndarray)) else value
