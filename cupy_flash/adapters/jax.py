"""Attention on jax arrays with gradients, eager and under jax's transformations.

Forward and backward are one jax.custom_vjp. Where the arrays have contents they run as everything else, problem ->
plan -> backend, on the arrays' own memory (DLPack), on a CPU or a GPU. Where jax traces they are a jax.pure_callback:
the host's work, and so only in programs for a CPU.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, overload

import jax
import jax.numpy as jnp
import numpy as np

from .. import backends, features
from ..pose import pose
from ..problem import Gradients, Operands, Options, Problem, Saved

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ..arguments import PaddedOptions, PaddedOptionsWithoutLse

ARRAYS = tuple(feature.name for feature in features.ARRAYS)
JaxArray: TypeAlias = jax.Array | np.ndarray


_Words: Any = features.record(*(feature.name for feature in features.FEATURES if feature.kind != features.ARRAY))


class Words(_Words):
    """The options that are not arrays, part of what jax compiles for; the seed is one where it is an int."""

    __slots__ = ()


@overload
def attention(
    q: JaxArray, k: JaxArray, v: JaxArray, *,
    return_lse: Literal[False] = False, **options: Unpack[PaddedOptionsWithoutLse[JaxArray]],
) -> jax.Array: ...  # fmt: skip


@overload
def attention(
    q: JaxArray, k: JaxArray, v: JaxArray, *,
    return_lse: Literal[True], **options: Unpack[PaddedOptionsWithoutLse[JaxArray]],
) -> tuple[jax.Array, jax.Array]: ...  # fmt: skip


@overload
def attention(
    q: JaxArray, k: JaxArray, v: JaxArray, *,
    return_lse: bool, **options: Unpack[PaddedOptionsWithoutLse[JaxArray]],
) -> jax.Array | tuple[jax.Array, jax.Array]: ...  # fmt: skip


def attention(
    q: JaxArray, k: JaxArray, v: JaxArray, **options: Unpack[PaddedOptions[JaxArray]]
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """`cupy_flash.attention` on jax arrays, with the same arguments and results; see there.

    Differentiable once, in reverse mode, with respect to q, k, v, bias and sink, through out and lse. Works under grad,
    jit, vmap, scan and jax.checkpoint; what jit compiles may run on a CPU alone, and for a GPU does not compile.

    Args:
        q, k, v and the arrays among the options: of jax; NumPy's become jax's.
        seed: of dropout: an int, under jit the same in every call, or an array of one integer of any width, whose value
            is brought to the host.
        options: the others have values while jax traces: a scale, say, is no result of a jitted computation.

    Raises:
        As `cupy_flash.attention`; under jit while jax traces.
    """
    asked = Options.of("attention", options)
    operands = {"q": q, "k": k, "v": v}
    operands |= {name: getattr(asked, name) for name in ARRAYS if getattr(asked, name) is not None}
    if isinstance(asked.seed, (jax.Array, np.ndarray)):
        if not jnp.issubdtype(asked.seed.dtype, jnp.integer) or asked.seed.size != 1:
            raise TypeError(
                f"attention: a seed array must be one integer, not {asked.seed.dtype} {tuple(asked.seed.shape)}"
            )
        operands["seed"], asked.seed = asked.seed, None
    words = Words(*(getattr(asked, name) for name in Words._fields))
    if _is_traced(words):
        traced = (name for name, word in words._asdict().items() if _is_traced(word))
        raise TypeError(
            f"attention: {', '.join(traced)} must have a value while jax traces, not be computed or differentiated in "
            "what it traces: make it a static argument of jax.jit"
        )
    out, lse = _attention(words, _of_jax(operands))
    return (out, lse) if asked.return_lse else out


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(words: Words, operands: dict[str, Any]) -> tuple[Any, Any]:
    """(out, lse)."""
    if not _is_traced(operands):
        return _forward(words, operands)
    problem, stand_ins = _pose(words, {name: _stand_in(x) for name, x in operands.items()})
    if problem.dropout and words.seed is None and "seed" not in operands:
        raise ValueError("attention: dropout needs a seed here: jax has no generator to draw one from")
    backends.plan_for(problem)
    out = jax.ShapeDtypeStruct((*operands["q"].shape[:-1], problem.head_dim_v), problem.out_dtype)
    lse = jax.ShapeDtypeStruct(problem.lse_shape(stand_ins.q), problem.accumulation)
    return _on_host(functools.partial(_forward, words), (out, lse), operands)


def _save(words: Words, operands: dict[str, Any]) -> tuple[Any, Any]:
    out, lse = _attention(words, operands)
    return (out, lse), (operands, out, lse)


def _differentiate(words: Words, saved: Any, cotangents: tuple[Any, Any]) -> tuple[dict[str, Any]]:
    operands, out, lse = saved
    dout, dlse = _of_jax(cotangents)
    arguments = (operands, dout, out, lse, dlse)
    if _is_traced(arguments):
        like = {name: operands[name] for name in features.DIFFERENTIATED if name in operands}
        shapes = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in like.items()}
        gradients = _on_host(functools.partial(_backward, words), shapes, *arguments)
    else:
        gradients = _backward(words, *arguments)
    return (dict.fromkeys(operands) | gradients,)  # None: no gradient


_attention.defvjp(_save, _differentiate)


def _of_jax(tree: Any) -> Any:
    return jax.tree.map(lambda x: jnp.asarray(x) if isinstance(x, np.ndarray) else x, tree)


def _is_traced(tree: Any) -> bool:
    return any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(tree))


def _stand_in(x: Any) -> Any:
    """A NumPy array of the shape and dtype of a tracer, with which a problem can be stated; of one element."""
    return np.broadcast_to(np.zeros((), x.dtype), x.shape) if hasattr(x, "shape") else x


def _on_host(function: Any, results: Any, *arguments: Any) -> Any:
    """`function` of NumPy arrays as a step of a program for a CPU."""

    def callback(*arguments: Any) -> Any:
        return function(*jax.tree.map(np.asarray, arguments))

    def step(*arguments: Any) -> Any:
        return jax.pure_callback(callback, results, *arguments, vmap_method="sequential")

    return jax.lax.platform_dependent(*arguments, cpu=step)


def _pose(words: Words, operands: dict[str, Any], saved: Saved | None = None) -> tuple[Problem, Operands]:
    asked = Options(**words._asdict() | {name: operands.get(name) for name in ARRAYS})
    if "seed" in operands:
        asked.seed = int(np.asarray(operands["seed"]).item()) % 2**64
    return pose("attention", (operands["q"], operands["k"], operands["v"]), asked, saved=saved)


def _forward(words: Words, operands: dict[str, Any]) -> tuple[Any, Any]:
    out, lse = backends.forward(*_pose(words, operands))
    return out.result(), lse.result()


def _backward(words: Words, operands: dict[str, Any], dout: Any, out: Any, lse: Any, dlse: Any) -> dict[str, Any]:
    gradients: Gradients = backends.backward(*_pose(words, operands, Saved(dout, out, lse, dlse)))
    named = zip(features.DIFFERENTIATED, gradients, strict=True)
    return {name: gradient.result() for name, gradient in named if gradient is not None}
