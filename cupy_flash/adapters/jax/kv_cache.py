"""KV caches of jax arrays, eager and under jit: attention that reads them, and appends to donated buffers.

jax arrays are immutable, so an append returns new caches. Their buffers alias those of the operands: XLA copies a
cache only if the program uses the old one afterwards. The mma_decode kernel has run in the simulator only, not on a
GPU.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ... import dispatch
from ...arrays import Array, as_array
from ...problem import features
from ...problem.build import pose_append, pose_with_cache
from ...problem.features import in_layout
from ...problem.records import CACHE_FEATURES, CACHES, SCALES, CacheOptions, Statistics, UnsupportedError
from . import primitive, static_call
from .ffi_execute import bind
from .op import JaxArray
from .static_call import APPEND, CACHED

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ...problem.argument_types import CacheArgumentsWithoutLse, Names

ARRAY_NAMES = tuple(feature.name for feature in CACHE_FEATURES if feature.kind == features.ARRAY)
WRITTEN = ("k", "v", "slots", "out")  # the options of attention_with_kv_cache that write to arrays
OF_APPEND = tuple(feature.name for feature in CACHE_FEATURES if feature.appends)
BY_NAME = {feature.name: feature for feature in CACHE_FEATURES if feature.axes}
ADDRESSES = tuple(feature.name for feature in CACHE_FEATURES if feature.addresses)
SHARDED = "bhg"  # the axes along which a call is sharded or folded

_Static: Any = features.record(
    *(x.name for x in CACHE_FEATURES if x.name not in ARRAY_NAMES and x.kind != features.MOD), "function"
)


class CacheStatic(_Static):
    """The options of a call on a cache that are not arrays, and the name of the function for error messages."""

    __slots__ = ()


class CacheCall(NamedTuple):
    """A call on a cache, an append or attention, with the interface of `static_call.Call`."""

    step: str
    static: CacheStatic
    names: tuple[str, ...]

    @property
    def result_names(self) -> tuple[str, ...]:
        """The names of the results, in order."""
        if self.step == APPEND:
            return tuple(name for name in (*CACHES, *SCALES) if name in self.names)
        return ("out", "lse", *(self.static.statistics or ()))

    @property
    def aliases(self) -> dict[int, int]:
        """{operand: result} by index: the results of an append that reuse the buffer of an operand."""
        if self.step != APPEND:
            return {}
        return {self.names.index(name): place for place, name in enumerate(self.result_names)}

    @property
    def text(self) -> str:
        """The call serialised as the FFI attribute that `static_call.parse` reads."""
        return static_call.text_of(self)

    @property
    def reads_place(self) -> bool:
        """False: no option of a call on a cache depends on the index of its sequence or head in the unsharded call."""
        return False

    @property
    def _has_pool(self) -> bool:
        """Whether sequences choose their rows of a cache, such as pages, so that its first axis is not the batch."""
        packed = "cu_seqlens" in self.names or "cu_seqlens_q" in self.names
        return packed or any(name in self.names for name in ADDRESSES)

    def axes(self, name: str, rank: int) -> str:
        """Return the axes of an operand or a result as letters of axes.py; "." is an axis that is never sharded."""
        layout = "thd" if rank == 3 else self.static.layout
        if name == "q" or name in CACHES:
            axes = in_layout("bihd" if name == "q" else "bjgd", layout)
        elif name in SCALES:
            axes = in_layout("bjg", self.static.layout)
        elif name == "lse" or name in Statistics._fields:
            axes = "bhi" if rank == 3 else "ht"
        elif name not in BY_NAME:
            axes = "." * rank
        elif BY_NAME[name].rows:
            axes = in_layout(BY_NAME[name].axes[0], layout)
        else:
            axes = next((axes for axes in BY_NAME[name].axes if len(axes) == rank), "." * rank).lower()
        if self._has_pool and (name in (*CACHES, *SCALES) or self.step == APPEND):
            axes = axes.replace("b", ".")
        return "".join(axis if axis in SHARDED else "." for axis in axes)

    def sizes(self, shapes: dict[str, tuple[int, ...]]) -> dict[str, int]:
        """Return the size of each axis by its letter."""
        names = [name for name in ("q", "k", *CACHES) if name in shapes]
        pairs = (pair for name in names for pair in zip(self.axes(name, len(shapes[name])), shapes[name], strict=True))
        return {letter: size for letter, size in pairs if letter != "."}

    def fold_axis(self, mapped: set[str]) -> str | None:
        """Return "b" if every operand that vmap maps has a batch axis and the batch is not packed, else None."""
        ranks = {name: max(map(len, BY_NAME[name].axes)) if name in BY_NAME else 4 for name in mapped}
        batched = all("b" in self.axes(name, rank) for name, rank in ranks.items())
        return "b" if batched and not {"cu_seqlens", "cu_seqlens_q"} & {*self.names} else None

    def results(self, operands: dict[str, Any]) -> dict[str, tuple[tuple[int, ...], Any]]:
        """Return the shape and dtype of each result, by name."""
        if self.step == APPEND:
            return {name: (tuple(operands[name].shape), operands[name].dtype) for name in self.result_names}
        q, v_cache = operands["q"], operands.get("v_cache")
        axes = (1, 0) if q.ndim == 3 else (0, 1, 2) if self.static.layout == "bhsd" else (0, 2, 1)
        accumulation = np.dtype(np.float64 if q.dtype == np.float64 else np.float32)
        shape = tuple(q.shape[axis] for axis in axes)
        dtypes = {name: np.dtype(np.int32) if name == "argmax" else accumulation for name in self.result_names[1:]}
        columns = self.static.head_dim_v
        if v_cache is not None:
            columns = v_cache.shape[-1] * (1 + (v_cache.dtype == np.uint8))
        return {"out": ((*q.shape[:-1], columns), q.dtype)} | {name: (shape, dtype) for name, dtype in dtypes.items()}

    def pose(self, operands: dict[str, Any]) -> Any:
        """Return the problem and its operands, or raise one error with every requirement that is not met."""
        given = {name: value for name, value in self.static._asdict().items() if name != "function"}
        given |= {name: x for name, x in operands.items() if name in (*ARRAY_NAMES, "cache_seqlens")}
        given["slots"] = _as_int64(operands.get("slots"))
        if self.step == CACHED:
            caches = (operands["k_cache"], operands.get("v_cache"))
            return pose_with_cache(operands["q"], *caches, CacheOptions(**given))
        options = CacheOptions(**given | {"k": None, "v": None})
        arrays = (operands["k"], operands.get("v"), operands["k_cache"], operands.get("v_cache"))
        return pose_append(*arrays, operands.get("cu_seqlens"), options)

    def named(self, results: Any) -> dict[str, Array]:
        """Return the results of a backend by name."""
        return dict(zip(self.result_names, results, strict=True))

    def run(self, operands: dict[str, Any], results: list[Array]) -> dict[str, Array]:
        """Compute the results; an append writes to `results`, whose buffers alias the given caches."""
        if self.step == CACHED:
            return self.named(dispatch.forward(*self.pose(operands)))
        named = dict(zip(self.result_names, results, strict=True))
        for name, cache in named.items():
            if cache.pointer != operands[name].pointer:  # the pure_callback fallback aliases no buffers
                cache.numpy()[...] = operands[name].numpy()
        dispatch.append(*self.pose(operands | named))
        return named


static_call.STEPS |= dict.fromkeys((APPEND, CACHED), (CacheCall, CacheStatic))


def _as_int64(slots: Any) -> Any:
    """Return slots as int64, joining the halves into which `_words` has split them; other arrays stay unchanged."""
    if slots is None or slots.dtype != np.uint32:
        return slots
    if slots.device == "cpu":
        return replace(as_array(slots.numpy().view(np.int64)[:, 0], "slots"), framework=slots.framework)
    return replace(slots, shape=slots.shape[:1], strides=(1,), dtype=np.dtype(np.int64))


def _words(slots: Any) -> Any:
    """Return int32 slots as uint32 (n, 2), the halves of an int64: by default jax has no 64-bit integers."""
    return jnp.stack([slots, slots >> 31], -1).view(jnp.uint32) if slots.dtype == jnp.int32 else slots


def append_to_kv_cache(
    k: JaxArray,
    v: JaxArray | None,
    k_cache: JaxArray,
    v_cache: JaxArray | None,
    *,
    cu_seqlens: JaxArray | None = None,
    **options: JaxArray | int | str | None,
) -> tuple[jax.Array | None, ...]:
    """Return the caches with the rows of k and v appended, as `cupy_flash.append_to_kv_cache` writes them in place.

    An eager call donates both caches and their scales: the given arrays are deleted, and the results reuse their
    memory. Under jit, donate them to the jitted function, or XLA copies them.

    Args:
        k: (B, S, Hk, D), or packed (T, Hk, D).
        v: (B, S, Hk, Dv) or (T, Hk, Dv).
        k_cache: as in `cupy_flash.append_to_kv_cache`.
        v_cache: likewise.
        cu_seqlens: as in `cupy_flash.append_to_kv_cache`.
        **options: those of `cupy_flash.append_to_kv_cache`. cache_seqlens may be one traced number, slots int32.

    Returns:
        (k_cache, v_cache), v_cache None if values are inside keys; of a quantised cache followed by those of k_scale,
        v_scale, k_zero and v_zero that are given, in this order.

    Raises:
        TypeError: as `cupy_flash.append_to_kv_cache`.
        ValueError: likewise; about contents, XLA's JaxRuntimeError (or a ValueError) with the same text.
    """
    unknown = [name for name in options if name not in OF_APPEND]
    if unknown:
        raise TypeError(f"append_to_kv_cache: unknown option {', '.join(unknown)}; they are {', '.join(OF_APPEND)}")
    given = {"k": k, "v": v, "k_cache": k_cache, "v_cache": v_cache, "cu_seqlens": cu_seqlens}
    results = _call(APPEND, "append_to_kv_cache", given, options, k)
    return results["k_cache"], results.get("v_cache"), *(results[name] for name in SCALES if name in results)


def attention_with_kv_cache(
    q: JaxArray,
    k_cache: JaxArray,
    v_cache: JaxArray | None,
    *,
    return_lse: bool = False,
    statistics: Names = None,
    **options: Unpack[CacheArgumentsWithoutLse[JaxArray]],
) -> Any:
    """`cupy_flash.attention_with_kv_cache` on jax arrays, under jit too, without appending.

    Args:
        q: (B, Sq, Hq, D), or packed (T, Hq, D).
        k_cache: as in `cupy_flash.attention_with_kv_cache`.
        v_cache: likewise.
        return_lse: also return lse.
        statistics: as in `cupy_flash.attention_with_kv_cache`.
        **options: those of `cupy_flash.attention_with_kv_cache` except k, v, slots and out: append with
            `append_to_kv_cache` before. cache_seqlens may be one traced number.

    Returns:
        out, or (out, lse), or (out, lse, Statistics).

    Raises:
        TypeError: as `cupy_flash.attention_with_kv_cache`; for an option that appends.
        ValueError: likewise; about contents, XLA's JaxRuntimeError (or a ValueError) with the same text.
    """
    refused = [name for name in WRITTEN if options.get(name) is not None]
    if refused:
        raise TypeError(
            f"attention_with_kv_cache: {', '.join(refused)} would be written in place, and jax arrays are immutable: "
            "use append_to_kv_cache before the call"
        )
    given: Any = options
    if statistics is not None:
        given = options | {"return_lse": return_lse, "statistics": statistics}
    results = _call(CACHED, "attention_with_kv_cache", {"q": q, "k_cache": k_cache, "v_cache": v_cache}, given, q)
    if statistics is not None:
        return results["out"], results["lse"], Statistics(**{name: results[name] for name in statistics})
    return (results["out"], results["lse"]) if return_lse else results["out"]


def _call(step: str, function: str, given: dict[str, Any], options: Any, rows: Any) -> dict[str, Any]:
    """Check the options, bind the call and return its results by name; `rows` is q or k, which has the batch axis."""
    settings = CacheOptions.of(function, options)
    if settings.score_mod is not None or settings.mask_mod is not None:
        raise UnsupportedError(f"{function}: score_mod and mask_mod with a KV cache in jax")
    given = given | {name: getattr(settings, name) for name in ARRAY_NAMES if name not in given}
    lengths = settings.cache_seqlens
    bounds = given.get("cu_seqlens" if step == APPEND else "cu_seqlens_q")
    if isinstance(lengths, (jax.Array, np.ndarray)):
        given["cache_seqlens"] = jnp.broadcast_to(lengths, _batch(rows, bounds)) if lengths.ndim == 0 else lengths
        settings.cache_seqlens = None
    operands = {name: jnp.asarray(x) for name, x in given.items() if x is not None}
    if "slots" in operands:
        operands["slots"] = _words(operands["slots"])
    static = CacheStatic(
        **{name: getattr(settings, name, None) for name in CacheStatic._fields} | {"function": function}
    )
    call = CacheCall(step, static, tuple(operands))
    recorder = primitive.Recorder("traced")  # the handler checks the contents of arrays
    call.pose({name: recorder.array(x.shape, x.dtype) for name, x in operands.items()})
    if static.statistics is not None:  # in the order of the results
        static = static._replace(statistics=tuple(sorted(static.statistics, key=Statistics._fields.index)))
        call = CacheCall(step, static, tuple(operands))
    if static.cache_seqlens is not None:  # an operand, so that a new length does not recompile
        operands["cache_seqlens"] = jnp.full(_batch(rows, bounds), static.cache_seqlens, jnp.int32)
        call = CacheCall(step, static._replace(cache_seqlens=None), tuple(operands))
    return bind(call, operands)


def _batch(rows: Any, bounds: Any) -> tuple[int]:
    """Return the shape of cache_seqlens, which has one length per sequence."""
    return np.shape(rows)[:1] if bounds is None else (np.shape(bounds)[0] - 1,)
