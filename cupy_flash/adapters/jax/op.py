"""Attention on jax arrays with gradients, eager and under jax's transformations.

Forward and backward are one jax.custom_vjp. Arrays with contents are computed as in any other call, problem -> plan ->
backend, on their own memory (DLPack), on a CPU or a GPU. Under tracing, and for arrays that several devices share, the
call becomes a primitive (primitive.py), which a compiled program runs through XLA's FFI.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, overload

import jax
import jax.numpy as jnp
import numpy as np

from ...mods.trace import Mod, decoded, mod_of
from ...problem import Options
from . import primitive
from .calls import ARRAYS, BACKWARD, FORWARD, NUMBERS, Call, Static

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ...arguments import PackedOptions, PackedOptionsWithoutLse, PaddedOptions, PaddedOptionsWithoutLse

JaxArray: TypeAlias = jax.Array | np.ndarray


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
    captures, which must be of jax; through out and lse. Works under grad, jit, vmap, scan, jax.checkpoint, shard_map,
    pmap and jax.export. Arrays sharded over batch or heads stay sharded; a sharded sequence is an error that names
    `ring_attention`.

    Args:
        q: of jax, as are the arrays among the options; NumPy's become jax's.
        k: likewise.
        v: likewise.
        **options: those of `cupy_flash.attention`. Options that are no arrays must have values while jax traces, except
            on a CPU the numbers scale, softcap and dropout, which have no gradient. The seed of dropout is an int,
            under jit the same in every call, or an array of one integer of any width, to which 2**64 is added if it is
            negative.

    Returns:
        out, or (out, lse), as `cupy_flash.attention`.

    Raises:
        TypeError: as `cupy_flash.attention`; under jit while jax traces.
        ValueError: likewise; for contents of arrays and traced numbers, which only a compiled program has, XLA's
            JaxRuntimeError (or a ValueError) with the same text.
        UnsupportedError: as `cupy_flash.attention`.
    """
    return attend("attention", {"q": q, "k": k, "v": v}, options)


@overload
def attention_varlen(
    q: JaxArray, k: JaxArray, v: JaxArray,
    cu_seqlens_q: JaxArray, cu_seqlens_k: JaxArray, max_seqlen_q: int, max_seqlen_k: int, *,
    return_lse: Literal[False] = False, **options: Unpack[PackedOptionsWithoutLse[JaxArray]],
) -> jax.Array: ...  # fmt: skip


@overload
def attention_varlen(
    q: JaxArray, k: JaxArray, v: JaxArray,
    cu_seqlens_q: JaxArray, cu_seqlens_k: JaxArray, max_seqlen_q: int, max_seqlen_k: int, *,
    return_lse: Literal[True], **options: Unpack[PackedOptionsWithoutLse[JaxArray]],
) -> tuple[jax.Array, jax.Array]: ...  # fmt: skip


@overload
def attention_varlen(
    q: JaxArray, k: JaxArray, v: JaxArray,
    cu_seqlens_q: JaxArray, cu_seqlens_k: JaxArray, max_seqlen_q: int, max_seqlen_k: int, *,
    return_lse: bool, **options: Unpack[PackedOptionsWithoutLse[JaxArray]],
) -> jax.Array | tuple[jax.Array, jax.Array]: ...  # fmt: skip


def attention_varlen(
    q: JaxArray,
    k: JaxArray,
    v: JaxArray,
    cu_seqlens_q: JaxArray,
    cu_seqlens_k: JaxArray,
    max_seqlen_q: int,
    max_seqlen_k: int,
    **options: Unpack[PackedOptions[JaxArray]],
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """`cupy_flash.attention_varlen` on jax arrays, differentiable and transformable as `attention` here.

    Args:
        q: (Tq, Hq, D).
        k: (Tk, Hk, D).
        v: (Tk, Hk, Dv).
        cu_seqlens_q: int32 (B + 1,), as in `cupy_flash.attention_varlen`; traced or not.
        cu_seqlens_k: likewise.
        max_seqlen_q: at least the longest sequence of queries, a number that jax does not trace.
        max_seqlen_k: likewise for keys.
        **options: those of `cupy_flash.attention_varlen`.

    Returns:
        out (Tq, Hq, Dv), or (out, lse) with lse (Hq, Tq).
    """
    operands = {"q": q, "k": k, "v": v, "cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
    return attend("attention_varlen", operands, options, max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k)


def attend(function: str, operands: dict[str, Any], options: Any, **sizes: Any) -> Any:
    """out or (out, lse) of the operands, to which those among the options are added."""
    settings = Options.of(function, options)
    operands |= {name: getattr(settings, name) for name in ARRAYS if getattr(settings, name) is not None}
    if isinstance(settings.seed, (jax.Array, np.ndarray)):
        operands["seed"], settings.seed = seed_words(function, settings.seed), None
    if settings.score_mod is not None or settings.mask_mod is not None:
        mod = _mod_of_jax(function, settings)
        operands |= {f"array{slot}": array for slot, array in enumerate(mod.arrays)}
        settings.score_mod, settings.mask_mod = mod.encoded, None
    for name, example in NUMBERS.items():
        if _is_traced(getattr(settings, name)):
            _require_number(function, name, getattr(settings, name))
            operands[name] = _without_gradient(function, name, getattr(settings, name))
            setattr(settings, name, example)
    given = {name: getattr(settings, name, None) for name in Static._fields}
    given |= {"function": function} | sizes
    traced = [name for name, value in given.items() if _is_traced(value)]
    if traced:
        raise TypeError(
            f"{function}: {', '.join(traced)} must have a value while jax traces, not be computed or differentiated in "
            "what it traces: make it a static argument of jax.jit"
        )
    static = Static(**jax.tree.map(_of_python, given))
    out, lse = _attention(static, _operands(function, operands))
    return (out, lse) if settings.return_lse else out


def seed_words(function: str, seed: Any) -> Any:
    """A seed array as uint32 (2,), its low and its high word: jax has no 64-bit integers unless they are enabled."""
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
    """Raise for a traced option of which a compiled program could not read one real number."""
    real = isinstance(value, jax.Array) and any(jnp.issubdtype(value.dtype, x) for x in (jnp.floating, jnp.integer))
    if not real or value.shape != ():
        what = f"{value.dtype} {tuple(value.shape)}" if isinstance(value, jax.Array) else repr(value)
        raise TypeError(f"{function}: {name} must be a number, not {what}")


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _without_gradient(function: str, name: str, value: Any) -> Any:
    """A traced number, which may not be differentiated."""
    return value


@_without_gradient.defjvp
def _refuse_gradient(function: str, name: str, primals: Any, tangents: Any) -> Any:
    raise TypeError(f"{function}: {name} has no gradient: use jax.lax.stop_gradient, or multiply q by it")


# A Mod is an argument of transformed functions: its arrays are leaves, its text and numbers are static.
jax.tree_util.register_pytree_node(Mod, lambda mod: (mod.arrays, mod.encoded), decoded)


def _mod_of_jax(function: str, settings: Options) -> Mod:
    """The traced mods, whose text is static and whose captured arrays are operands."""
    mod = mod_of(settings.score_mod, settings.mask_mod)
    for array in mod.arrays:
        if not isinstance(array, jax.Array):
            raise TypeError(
                f"{function}: mods capture jax arrays here, not {type(array).__name__}: use jax.numpy.asarray"
            )
    return mod


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(static: Static, operands: dict[str, Any]) -> tuple[Any, Any]:
    """(out, lse)."""
    results = _run(FORWARD, static, operands)
    return results["out"], results["lse"]


def _save(static: Static, operands: dict[str, Any]) -> tuple[Any, Any]:
    out, lse = _attention(static, operands)
    return (out, lse), (operands, out, lse)


def _differentiate(static: Static, saved: Any, cotangents: tuple[Any, Any]) -> tuple[dict[str, Any]]:
    operands, out, lse = saved
    dout, dlse = _of_jax(cotangents)
    gradients = _run(BACKWARD, static, operands | {"dout": dout, "out": out, "lse": lse, "dlse": dlse})
    named = {
        name.removeprefix("d"): primitive.typed_like(gradient, operands[name.removeprefix("d")])
        for name, gradient in gradients.items()
    }
    return (dict.fromkeys(operands) | named,)  # None: no gradient


_attention.defvjp(_save, _differentiate)


def _run(step: str, static: Static, operands: dict[str, Any]) -> dict[str, Any]:
    """The results of a call by name, on the memory of its operands if they have one and it is that of one device."""
    call = Call(step, static, tuple(operands))
    if not any(_is_traced(x) or len(x.devices()) > 1 for x in operands.values()):
        _require_one_device(static.function, operands)
        results = {name: result.result() for name, result in call.run(operands, []).items()}
        _require_numbers(static.function, results)
        return results
    if step == FORWARD:
        primitive.check(call, operands)
    return _bind(call, operands)


def _require_one_device(function: str, operands: dict[str, Any]) -> None:
    """Raise if arrays are committed to different devices: those of jax on a CPU share their memory."""
    devices: dict[Any, list[str]] = {}
    for name, x in operands.items():
        if x.committed:
            devices.setdefault(x.device, []).append(name)
    if len(devices) > 1:
        where = "; ".join(f"{', '.join(names)} on {device}" for device, names in devices.items())
        raise ValueError(f"{function}: all arrays must be on one device, not {where}")


def _require_numbers(function: str, results: dict[str, Any]) -> None:
    """Raise what jax raises under jax_debug_nans, which sees only the operations of jax itself."""
    if jax.config.jax_debug_nans:
        invalid = [name for name, x in results.items() if jnp.isnan(x).any()]
        if invalid:
            raise FloatingPointError(f"{function}: invalid value (nan) in {', '.join(invalid)}")


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _bind(call: Call, operands: dict[str, Any]) -> dict[str, Any]:
    """The results of a traced call. Its derivative is `_differentiate`, and that has none."""
    return primitive.bind(call, operands)


@_bind.defjvp
def _refuse_second(call: Call, primals: Any, tangents: Any) -> Any:
    raise NotImplementedError(f"{call.static.function}: jax gets one derivative of it, in reverse mode")


def _operands(function: str, given: dict[str, Any]) -> dict[str, Any]:
    """Arrays and what jax makes arrays of, such as lists and numbers."""
    operands = {}
    for name, x in given.items():
        try:
            operands[name] = x if isinstance(x, jax.Array) else jnp.asarray(x)
        except (TypeError, ValueError) as error:
            raise TypeError(f"{function}: {name} ({type(x).__name__}) is no array of jax: {error}") from error
    return operands


def _of_python(value: Any) -> Any:
    """An option without its array: the same under jit, where jax would trace what is read from it."""
    return np.asarray(value).tolist() if isinstance(value, (jax.Array, np.ndarray, np.generic)) else value


def _of_jax(tree: Any) -> Any:
    return jax.tree.map(lambda x: jnp.asarray(x) if isinstance(x, np.ndarray) else x, tree)


def _is_traced(tree: Any) -> bool:
    return any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(tree))
