"""Attention on jax arrays with gradients, eager and under jax's transformations.

A call binds a step primitive (ffi_execute.py) that has differentiation rules (derivatives.py). On concrete arrays
the step runs at once, problem -> plan -> dispatch, on the arrays' own memory (DLPack), on a CPU or a GPU. Under
tracing, and for arrays on several devices, it is lowered to a call of XLA's FFI in a compiled program (primitive.py).
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, overload

import jax
import jax.numpy as jnp
import numpy as np

from ...mods.trace import Mod, decoded, mod_of
from ...problem.records import JVP, Options
from . import (
    derivatives,  # noqa: F401  # the rules of differentiation
    statistics,
)
from .ffi_execute import run
from .static_call import ARRAYS, FORWARD, NUMBERS, Static

if TYPE_CHECKING:
    from collections.abc import Sequence

    from typing_extensions import Unpack

    from ...problem.argument_types import PackedOptions, PackedOptionsWithoutLse, PaddedOptions, PaddedOptionsWithoutLse

JaxArray: TypeAlias = jax.Array | np.ndarray


@overload
def attention(
    q: JaxArray, k: JaxArray, v: JaxArray | None, *,
    return_lse: Literal[False] = False, **options: Unpack[PaddedOptionsWithoutLse[JaxArray]],
) -> jax.Array: ...  # fmt: skip


@overload
def attention(
    q: JaxArray, k: JaxArray, v: JaxArray | None, *,
    return_lse: Literal[True], **options: Unpack[PaddedOptionsWithoutLse[JaxArray]],
) -> tuple[jax.Array, jax.Array]: ...  # fmt: skip


@overload
def attention(
    q: JaxArray, k: JaxArray, v: JaxArray | None, *,
    return_lse: bool, **options: Unpack[PaddedOptionsWithoutLse[JaxArray]],
) -> jax.Array | tuple[jax.Array, jax.Array]: ...  # fmt: skip


def attention(
    q: JaxArray, k: JaxArray, v: JaxArray | None, **options: Unpack[PaddedOptions[JaxArray]]
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Compute `cupy_flash.attention` on jax arrays, with the same arguments and results.

    out and lse are differentiable in both modes, and twice except forward over forward mode, with respect to q, k, v,
    bias, sink and the floating jax arrays that score_mod captures. The call works under grad, jvp, hessian, jit, vmap,
    scan, jax.checkpoint, shard_map, pmap and jax.export. Arrays sharded over batch or heads stay sharded; for a sharded
    sequence an error names `ring_attention`.

    Args:
        q: a jax or NumPy array, as in `cupy_flash.attention`; the same holds for arrays among the options.
        k: likewise.
        v: likewise.
        **options: those of `cupy_flash.attention`. Options that are not arrays must be concrete while jax traces; on a
            CPU scale, softcap and dropout may be traced, without a gradient. The seed of dropout is an int, the same in
            each call of a jitted function, or an array of one integer of any width; a negative seed counts modulo
            2**64.

    Returns:
        out, or (out, lse), as `cupy_flash.attention`.

    Raises:
        TypeError: as `cupy_flash.attention`; raised under jit while jax traces.
        ValueError: likewise. Contents of arrays and traced numbers are checked when the compiled program runs, and
            then XLA raises JaxRuntimeError (or ValueError) with the same text.
        UnsupportedError: as `cupy_flash.attention`.
    """
    return attend("attention", {"q": q, "k": k, "v": v}, options)


@overload
def attention_varlen(
    q: JaxArray, k: JaxArray, v: JaxArray | None,
    cu_seqlens_q: JaxArray, cu_seqlens_k: JaxArray, max_seqlen_q: int, max_seqlen_k: int, *,
    return_lse: Literal[False] = False, **options: Unpack[PackedOptionsWithoutLse[JaxArray]],
) -> jax.Array: ...  # fmt: skip


@overload
def attention_varlen(
    q: JaxArray, k: JaxArray, v: JaxArray | None,
    cu_seqlens_q: JaxArray, cu_seqlens_k: JaxArray, max_seqlen_q: int, max_seqlen_k: int, *,
    return_lse: Literal[True], **options: Unpack[PackedOptionsWithoutLse[JaxArray]],
) -> tuple[jax.Array, jax.Array]: ...  # fmt: skip


@overload
def attention_varlen(
    q: JaxArray, k: JaxArray, v: JaxArray | None,
    cu_seqlens_q: JaxArray, cu_seqlens_k: JaxArray, max_seqlen_q: int, max_seqlen_k: int, *,
    return_lse: bool, **options: Unpack[PackedOptionsWithoutLse[JaxArray]],
) -> jax.Array | tuple[jax.Array, jax.Array]: ...  # fmt: skip


def attention_varlen(
    q: JaxArray,
    k: JaxArray,
    v: JaxArray | None,
    cu_seqlens_q: JaxArray,
    cu_seqlens_k: JaxArray,
    max_seqlen_q: int,
    max_seqlen_k: int,
    **options: Unpack[PackedOptions[JaxArray]],
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Compute `cupy_flash.attention_varlen` on jax arrays, differentiable and transformable as `attention`.

    Args:
        q: (Tq, Hq, D).
        k: (Tk, Hk, D).
        v: (Tk, Hk, Dv).
        cu_seqlens_q: int32 (B + 1,), as in `cupy_flash.attention_varlen`; it may be traced.
        cu_seqlens_k: likewise.
        max_seqlen_q: an int, at least the longest sequence of queries; it is not traced.
        max_seqlen_k: likewise for keys.
        **options: those of `cupy_flash.attention_varlen`.

    Returns:
        out (Tq, Hq, Dv), or (out, lse) with lse (Hq, Tq).
    """
    operands = {"q": q, "k": k, "v": v, "cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
    return attend("attention_varlen", operands, options, max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k)


def attention_jvp(
    q: JaxArray,
    k: JaxArray,
    v: JaxArray | None,
    tq: JaxArray | None = None,
    tk: JaxArray | None = None,
    tv: JaxArray | None = None,
    *,
    tbias: JaxArray | None = None,
    tsink: JaxArray | None = None,
    tcaptured: Sequence[JaxArray | None] | None = None,
    **options: Unpack[PaddedOptions[JaxArray]],
) -> tuple[jax.Array, ...]:
    """Compute `cupy_flash.attention_jvp` on jax arrays: `attention` and its directional derivative in one pass.

    `jax.jvp` of `attention` returns the same after a forward and this pass. Differentiable once, in reverse mode.

    Args:
        q: as in `attention`.
        k: likewise.
        v: likewise.
        tq: the tangent of q, with its shape and dtype; None means 0 and skips its terms, here and below.
        tk: the tangent of k.
        tv: the tangent of v.
        tbias: the tangent of the option bias.
        tsink: the tangent of the option sink.
        tcaptured: the tangents of the arrays that score_mod captures, in the order of `Mod.arrays`, or None.
        **options: those of `attention`.

    Returns:
        (out, tout), or (out, tout, lse, tlse) with return_lse.

    Raises:
        TypeError: as `attention`.
        ValueError: likewise.
        UnsupportedError: no engine of the backend computes it.
    """
    function = "attention_jvp"
    static, operands, captured = read(function, {"q": q, "k": k, "v": v}, options)
    if tcaptured is not None and (not isinstance(tcaptured, (tuple, list)) or len(tcaptured) != len(captured)):
        raise TypeError(
            f"{function}: tcaptured must be a sequence with a tangent or None for each of the {len(captured)} captured "
            "arrays"
        )
    tangents = {"tq": tq, "tk": tk, "tv": tv, "tbias": tbias, "tsink": tsink}
    tangents |= {f"tarray{slot}": x for slot, x in enumerate(tcaptured or ())}
    moved = _operands(function, {name: x for name, x in tangents.items() if x is not None})
    results = run(JVP, static, operands | moved)
    names = ("out", "tout", "lse", "tlse") if static.return_lse else ("out", "tout")
    return tuple(results[name] for name in names)


def attend(function: str, operands: dict[str, Any], options: Any, **sizes: Any) -> Any:
    """Compute attention on the operands and the arrays among the options: out, (out, lse) or (out, lse, Statistics)."""
    static, operands, _ = read(function, operands, options, **sizes)
    if static.statistics is not None:
        with_statistics = statistics.attend(static, operands)
        if with_statistics is not None:
            return with_statistics
    results = run(FORWARD, static, operands)
    return (results["out"], results["lse"]) if static.return_lse else results["out"]


def read(
    function: str, operands: dict[str, Any], options: Any, **sizes: Any
) -> tuple[Static, dict[str, Any], tuple[Any, ...]]:
    """Return the static options, all operands by name, and the arrays that mods capture."""
    settings = Options.of(function, options)
    captured: tuple[Any, ...] = ()
    text: str | None = None  # the text of the mods
    if operands.get("v") is None and settings.head_dim_v is not None:
        operands = {name: x for name, x in operands.items() if name != "v"}
    operands |= {name: getattr(settings, name) for name in ARRAYS if getattr(settings, name) is not None}
    if isinstance(settings.seed, (jax.Array, np.ndarray)):
        operands["seed"], settings.seed = seed_words(function, settings.seed), None
    if settings.score_mod is not None or settings.mask_mod is not None:
        mod = _mod_of_jax(function, settings)
        captured = tuple(mod.arrays)
        operands |= {f"array{slot}": array for slot, array in enumerate(captured)}
        text, settings.mask_mod = mod.encoded, None
    for name, example in NUMBERS.items():
        if _is_traced(getattr(settings, name)):
            _require_number(function, name, getattr(settings, name))
            operands[name] = _without_gradient(function, name, getattr(settings, name))
            setattr(settings, name, example)
    given = {name: getattr(settings, name, None) for name in Static._fields}
    given |= {"function": function, "score_mod": text} | sizes
    traced = [name for name, value in given.items() if _is_traced(value)]
    if traced:
        raise TypeError(
            f"{function}: {', '.join(traced)} must have a value while jax traces, not be computed or differentiated in "
            "what it traces: make it a static argument of jax.jit"
        )
    static = Static(**jax.tree.map(_of_python, given))
    return static, _operands(function, operands), captured


def seed_words(function: str, seed: Any) -> Any:
    """Return a seed array as uint32 (2,), low word first: by default jax has no 64-bit integers."""
    if not jnp.issubdtype(seed.dtype, jnp.integer) or seed.size != 1:
        is_key = jnp.issubdtype(seed.dtype, jax.dtypes.prng_key)
        advice = ": of a key, pass jax.random.bits(key)" if is_key else ""
        raise TypeError(f"{function}: a seed array must be one integer, not {seed.dtype} {tuple(seed.shape)}{advice}")
    if not _is_traced(seed):
        value = int(np.asarray(seed).item()) % 2**64
        return jnp.asarray(np.array([value % 2**32, value >> 32], np.uint32))
    seed = seed.reshape(())
    if seed.dtype.itemsize == 8:
        high = jax.lax.shift_right_logical(seed, jnp.asarray(32, seed.dtype)).astype(jnp.uint32)
    else:
        high = jnp.where(seed < 0, jnp.uint32(2**32 - 1), jnp.uint32(0))
    return jnp.stack([seed.astype(jnp.uint32), high])


def _require_number(function: str, name: str, value: Any) -> None:
    """Raise TypeError unless a traced option is a single real number."""
    real = isinstance(value, jax.Array) and any(jnp.issubdtype(value.dtype, x) for x in (jnp.floating, jnp.integer))
    if not real or value.shape != ():
        what = f"{value.dtype} {tuple(value.shape)}" if isinstance(value, jax.Array) else repr(value)
        raise TypeError(f"{function}: {name} must be a number, not {what}")


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _without_gradient(function: str, name: str, value: Any) -> Any:
    """Return a traced number; raises TypeError when it is differentiated."""
    return value


@_without_gradient.defjvp
def _refuse_gradient(function: str, name: str, primals: Any, tangents: Any) -> Any:
    raise TypeError(f"{function}: {name} has no gradient: use jax.lax.stop_gradient, or multiply q by it")


# A Mod may be an argument of transformed functions: its arrays are pytree leaves, its text and numbers are static.
jax.tree_util.register_pytree_node(Mod, lambda mod: (mod.arrays, mod.encoded), decoded)


def _mod_of_jax(function: str, settings: Options) -> Mod:
    """Return the traced mods; their text is static, their captured arrays are operands."""
    mod = mod_of(settings.score_mod, settings.mask_mod)
    for array in mod.arrays:
        if not isinstance(array, jax.Array):
            raise TypeError(
                f"{function}: mods capture jax arrays here, not {type(array).__name__}: use jax.numpy.asarray"
            )
    return mod


def _operands(function: str, given: dict[str, Any]) -> dict[str, Any]:
    """Return the operands as jax arrays, converted from lists and numbers if need be."""
    operands = {}
    for name, x in given.items():
        try:
            operands[name] = x if isinstance(x, jax.Array) else jnp.asarray(x)
        except (TypeError, ValueError) as error:
            raise TypeError(f"{function}: {name} ({type(x).__name__}) is no array of jax: {error}") from error
    return operands


def _of_python(value: Any) -> Any:
    """Return an option of NumPy or jax as a Python value; jit would trace operations on a jax array."""
    return np.asarray(value).tolist() if isinstance(value, (jax.Array, np.ndarray, np.generic)) else value


def _is_traced(tree: Any) -> bool:
    return any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(tree))
