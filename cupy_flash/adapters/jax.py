"""Attention on jax arrays with gradients, eager and under jax's transformations.

Forward and backward are one jax.custom_vjp. Arrays with contents are computed as in any other call, problem -> plan ->
backend, on their own memory (DLPack), on a CPU or a GPU. Under tracing the call becomes a jax.pure_callback, which runs
on the host, so that the traced program runs on a CPU only.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, overload

import jax
import jax.numpy as jnp
import numpy as np

from .. import backends, features
from ..mods.facts import floating_reads
from ..mods.trace import Mod, decoded, mod_of
from ..pose import pose
from ..problem import Gradients, Operands, Options, Problem, Saved

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ..arguments import PaddedOptions, PaddedOptionsWithoutLse

ARRAYS = tuple(feature.name for feature in features.ARRAYS)
JaxArray: TypeAlias = jax.Array | np.ndarray


_Static: Any = features.record(*(feature.name for feature in features.FEATURES if feature.kind != features.ARRAY))


class Static(_Static):
    """The options that are not arrays, for which jax compiles anew; a seed that is an int is one of them."""

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

    Differentiable once, in reverse mode, with respect to q, k, v, bias, sink and the floating arrays that score_mod
    captures, which must be of jax; through out and lse. Works under grad, jit, vmap, scan and jax.checkpoint; what jit
    compiles may run on a CPU alone, and for a GPU does not compile.

    Args:
        q: of jax, as are the arrays among the options; NumPy's become jax's.
        k: likewise.
        v: likewise.
        **options: those of `cupy_flash.attention`. Options that are no arrays must have values while jax traces: a
            scale, say, cannot be the result of a jitted computation. The seed of dropout is an int, under jit the same
            in every call, or an array of one integer of any width, whose value is brought to the host.

    Returns:
        out, or (out, lse), as `cupy_flash.attention`.

    Raises:
        TypeError: as `cupy_flash.attention`; under jit while jax traces.
        ValueError: likewise.
        UnsupportedError: likewise.
    """
    settings = Options.of("attention", options)
    operands = {"q": q, "k": k, "v": v}
    operands |= {name: getattr(settings, name) for name in ARRAYS if getattr(settings, name) is not None}
    if isinstance(settings.seed, (jax.Array, np.ndarray)):
        if not jnp.issubdtype(settings.seed.dtype, jnp.integer) or settings.seed.size != 1:
            raise TypeError(
                f"attention: a seed array must be one integer, not {settings.seed.dtype} {tuple(settings.seed.shape)}"
            )
        operands["seed"], settings.seed = settings.seed, None
    if settings.score_mod is not None or settings.mask_mod is not None:
        mod = _mod_of_jax(settings)
        operands |= {f"array{slot}": array for slot, array in enumerate(mod.arrays)}
        settings.score_mod, settings.mask_mod = mod.encoded, None
    static = Static(*(getattr(settings, name) for name in Static._fields))
    if _is_traced(static):
        traced = (name for name, value in static._asdict().items() if _is_traced(value))
        raise TypeError(
            f"attention: {', '.join(traced)} must have a value while jax traces, not be computed or differentiated in "
            "what it traces: make it a static argument of jax.jit"
        )
    out, lse = _attention(static, _of_jax(operands))
    return (out, lse) if settings.return_lse else out


# A Mod is an argument of transformed functions: its arrays are leaves, its text and numbers are static.
jax.tree_util.register_pytree_node(Mod, lambda mod: (mod.arrays, mod.encoded), decoded)


def _mod_of_jax(settings: Options) -> Mod:
    """The traced mods, whose text is static and whose captured arrays are operands."""
    mod = mod_of(settings.score_mod, settings.mask_mod)
    for array in mod.arrays:
        if not isinstance(array, jax.Array):
            raise TypeError(
                f"attention: mods capture jax arrays here, not {type(array).__name__}: use jax.numpy.asarray"
            )
    return mod


def _captured(static: Static, operands: dict[str, Any]) -> Mod | None:
    """The mods over the operands that they capture."""
    if static.score_mod is None:
        return None
    slots = range(sum(name.startswith("array") for name in operands))
    return decoded(static.score_mod, [operands[f"array{slot}"] for slot in slots])


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(static: Static, operands: dict[str, Any]) -> tuple[Any, Any]:
    """(out, lse)."""
    if not _is_traced(operands):
        return _forward(static, operands)
    problem, stand_ins = _pose(static, {name: _stand_in(x) for name, x in operands.items()})
    if problem.dropout and static.seed is None and "seed" not in operands:
        raise ValueError("attention: dropout needs a seed here: jax has no generator to draw one from")
    backends.plan_for(problem)
    out = jax.ShapeDtypeStruct((*operands["q"].shape[:-1], problem.head_dim_v), problem.out_dtype)
    lse = jax.ShapeDtypeStruct(problem.lse_shape(stand_ins.q), problem.accumulation)
    return _on_host(functools.partial(_forward, static), (out, lse), operands)


def _save(static: Static, operands: dict[str, Any]) -> tuple[Any, Any]:
    out, lse = _attention(static, operands)
    return (out, lse), (operands, out, lse)


def _differentiate(static: Static, saved: Any, cotangents: tuple[Any, Any]) -> tuple[dict[str, Any]]:
    operands, out, lse = saved
    dout, dlse = _of_jax(cotangents)
    arguments = (operands, dout, out, lse, dlse)
    if _is_traced(arguments):
        mod = _captured(static, operands)
        captured = () if mod is None else (f"array{slot}" for slot in floating_reads(mod.program))
        like = {name: operands[name] for name in (*features.DIFFERENTIATED, *captured) if name in operands}
        shapes = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in like.items()}
        gradients = _on_host(functools.partial(_backward, static), shapes, *arguments)
    else:
        gradients = _backward(static, *arguments)
    return (dict.fromkeys(operands) | gradients,)  # None: no gradient


_attention.defvjp(_save, _differentiate)


def _of_jax(tree: Any) -> Any:
    return jax.tree.map(lambda x: jnp.asarray(x) if isinstance(x, np.ndarray) else x, tree)


def _is_traced(tree: Any) -> bool:
    return any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(tree))


def _stand_in(x: Any) -> Any:
    """A NumPy array of a tracer's shape and dtype, to state the problem with; it takes the memory of one element."""
    return np.broadcast_to(np.zeros((), x.dtype), x.shape) if hasattr(x, "shape") else x


def _on_host(function: Any, results: Any, *arguments: Any) -> Any:
    """Call `function` with NumPy arrays from a traced program, which must run on a CPU."""

    def callback(*arguments: Any) -> Any:
        return function(*jax.tree.map(np.asarray, arguments))

    def step(*arguments: Any) -> Any:
        return jax.pure_callback(callback, results, *arguments, vmap_method="sequential")

    return jax.lax.platform_dependent(*arguments, cpu=step)


def _pose(static: Static, operands: dict[str, Any], saved: Saved | None = None) -> tuple[Problem, Operands]:
    settings = Options(**static._asdict() | {name: operands.get(name) for name in ARRAYS})
    settings.score_mod = _captured(static, operands)
    if "seed" in operands:
        settings.seed = int(np.asarray(operands["seed"]).item()) % 2**64
    return pose("attention", (operands["q"], operands["k"], operands["v"]), settings, saved=saved)


def _forward(static: Static, operands: dict[str, Any]) -> tuple[Any, Any]:
    out, lse = backends.forward(*_pose(static, operands))
    return out.result(), lse.result()


def _backward(static: Static, operands: dict[str, Any], dout: Any, out: Any, lse: Any, dlse: Any) -> dict[str, Any]:
    gradients: Gradients = backends.backward(*_pose(static, operands, Saved(dout, out, lse, dlse)))
    named = dict(zip(features.DIFFERENTIATED, gradients, strict=False))
    named |= {f"array{slot}": gradient for slot, gradient in enumerate(gradients.dcaptured or ())}
    return {name: gradient.result() for name, gradient in named.items() if gradient is not None}
