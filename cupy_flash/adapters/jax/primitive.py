"""A traced call: a function that jax transforms, around the primitive that is lowered to the call of the handler.

vmap folds its axis into the batch or the heads (folding.py), and sharded arrays become a call per shard (sharding.py).
The primitive, the call of one device, is lowered to XLA's FFI (handler.py): on a CPU with the results alone, on a GPU
with the workspaces of the plan as further results, whose memory XLA owns. Where jaxlib has another major version of the
interface, a CPU falls back to jax.pure_callback.
"""

from __future__ import annotations

import functools
import warnings
from typing import Any

import jax
import numpy as np
from jax.custom_batching import custom_vmap
from jax.extend.core import Primitive
from jax.interpreters import mlir

from ... import backends
from ...arrays import Array, as_array, contiguous_strides
from ...backends import kernels
from . import folding, frame, handler, sharding
from .calls import BACKWARD, NUMBERS, Call, parse

local_p = Primitive("cupy_flash_attention")  # on one device


def bind(call: Call, operands: dict[str, Any]) -> dict[str, Any]:
    """The results of a call by name, computed by a compiled program."""
    arrays = [operands[name] for name in call.names]
    return dict(zip(call.result_names, attend(*arrays, call=call.text), strict=True))


def attend(*arrays: Any, call: str) -> Any:
    """The results of a call, traced into the caller's program; of arrays with contents by a program of its own."""
    if not any(isinstance(x, jax.core.Tracer) for x in arrays):
        return _program(call)(*arrays)
    return _traced(*arrays, call=call)


def _traced(*arrays: Any, call: str) -> Any:
    """The results of a call, sharded as their types say where axes of the mesh are explicit."""
    arrays = _varying_alike(arrays)
    types = [jax.typeof(x) for x in arrays]
    # A constant has an empty mesh, so the mesh is that of the first operand with explicit axes.
    mesh = next((x.sharding.mesh for x in types if x.sharding.mesh.explicit_axes), None)
    if mesh is None:
        return _transformable(call)(*arrays)
    out = sharding.types_of_results(parse(call), mesh, types)
    return jax.sharding.auto_axes(_transformable(call), out_sharding=out)(*arrays)


def typed_like(gradient: Any, operand: Any) -> Any:
    """A gradient that varies and is sharded as its operand: summed over the devices that share the operand."""
    shared = tuple(_varying(gradient) - _varying(operand))
    gradient = jax.lax.psum(gradient, shared) if shared else gradient
    given, expected = jax.typeof(gradient).sharding, jax.typeof(operand).sharding
    return jax.sharding.reshard(gradient, expected) if expected.mesh.explicit_axes and given != expected else gradient


def _varying(x: Any) -> frozenset[Any]:
    """The mesh axes of a shard_map over which an array varies: jax before 0.10 calls them vma."""
    aval = jax.typeof(x)
    axes: frozenset[Any] = aval.manual_axis_type.varying if hasattr(aval, "manual_axis_type") else aval.vma
    return axes


@functools.lru_cache(maxsize=1024)
def _program(call: str) -> Any:
    return jax.jit(functools.partial(_traced, call=call))


@functools.lru_cache(maxsize=1024)
def _transformable(call: str) -> Any:
    """A call that vmap folds and that keeps its shards."""

    @custom_vmap
    def function(*arrays: Any) -> Any:
        return sharding.sharded(local_p.bind, arrays, call)

    @function.def_vmap
    def _batched(size: int, mapped: list[bool], *arrays: Any) -> Any:
        results = folding.batched(functools.partial(attend, call=call), arrays, mapped, size, parse(call))
        return tuple(results), (True,) * len(results)

    return function


def check(call: Call, operands: dict[str, Any]) -> None:
    """Raise what the call would raise for its shapes, dtypes and options, or if no engine serves it."""
    problem, _ = call.pose({name: _stand_in(x) for name, x in operands.items() if name not in NUMBERS})
    backends.plan_for(problem)


def _stand_in(x: Any) -> Array:
    """An array of zeros of a tracer's shape and dtype, in the memory of one element."""
    array = as_array(np.broadcast_to(np.zeros((), x.dtype), x.shape), "operand")
    array.framework = "jax"
    return array


def _varying_alike(arrays: Any) -> Any:
    """Operands that vary over the same mesh axes of a shard_map: one that some devices share becomes each's own."""
    varying: list[frozenset[Any]] = [_varying(x) for x in arrays]
    union: frozenset[Any] = frozenset().union(*varying)
    return [
        jax.lax.pcast(x, tuple(union - own), to="varying") if own != union else x
        for x, own in zip(arrays, varying, strict=True)
    ]


def _abstract(*operands: Any, call: str) -> list[Any]:
    parsed = parse(call)
    like, avals = operands[0], []
    for shape, dtype in parsed.results(dict(zip(parsed.names, operands, strict=True))).values():
        spec = jax.sharding.PartitionSpec(*(None,) * len(shape))
        replicated = jax.sharding.NamedSharding(like.sharding.mesh, spec)
        avals.append(like.update(shape=shape, dtype=dtype, weak_type=False, sharding=replicated))
    return avals


def _on_cpu(context: Any, *operands: Any, call: str) -> Any:
    reason = frame.unserved()
    if reason is None:
        outputs = " ".join(map(str, range(len(context.avals_out))))
        rule = jax.ffi.ffi_lowering(handler.TARGET, operand_output_aliases=parse(call).aliases)
        return rule(context, *operands, call=call, outputs=outputs)
    warnings.warn(f"jitted attention falls back to jax.pure_callback: {reason}", RuntimeWarning, stacklevel=2)
    return mlir.lower_fun(functools.partial(_call_back, call=call), multiple_results=True)(context, *operands)


def _call_back(*arrays: Any, call: str) -> Any:
    parsed = parse(call)
    shapes = list(parsed.results(dict(zip(parsed.names, arrays, strict=True))).values())

    def run(*arrays: Any) -> Any:
        operands = {name: as_array(np.asarray(x), name) for name, x in zip(parsed.names, arrays, strict=True)}
        buffers = [as_array(np.empty(*shape), "result") for shape in shapes]
        return [result.numpy() for result in parsed.run(operands, buffers).values()]

    return jax.pure_callback(run, [jax.ShapeDtypeStruct(*shape) for shape in shapes], *arrays)


def _on_gpu(context: Any, *operands: Any, call: str) -> Any:
    reason = frame.unserved()
    if reason is not None:
        raise NotImplementedError(f"attention cannot be compiled for a GPU: {reason}")
    parsed = parse(call)
    unread = [name for name in parsed.names if name in (*NUMBERS, "first")]
    if unread:
        raise NotImplementedError(
            f"{parsed.static.function}: {', '.join(unread)} must have a value while jax compiles for a GPU, whose "
            "memory the host does not read"
        )
    recorder = Recorder("cuda:0")
    described = zip(parsed.names, context.avals_in, strict=True)
    operands_like = {name: recorder.array(x.shape, x.dtype) for name, x in described}
    written, outputs = allocations(parsed, recorder, operands_like)
    avals = [jax.core.ShapedArray(shape, dtype) for shape, dtype in written]
    rule = jax.ffi.ffi_lowering(handler.TARGET, operand_output_aliases=parsed.aliases)
    results = rule(context.replace(avals_out=avals), *operands, call=call, outputs=" ".join(map(str, outputs)))
    return [results[index] for index in outputs]


class Recorder:
    """An owner of arrays that lists what the kernels of a call would write, and has no memory for it."""

    stream = 0

    def __init__(self, device: str) -> None:
        self.device = device
        self.arrays: list[Array] = []

    def array(self, shape: tuple[int, ...], dtype: Any) -> Array:
        """An array that is never read, at an aligned address without memory."""
        return Array(256, tuple(shape), contiguous_strides(tuple(shape)), np.dtype(dtype), self.device, "xla", self)

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Array:
        """As Memory.empty of the handler."""
        self.arrays.append(self.array(shape, dtype))
        return self.arrays[-1]


def allocations(call: Call, recorder: Recorder, operands: dict[str, Array]) -> tuple[list[Any], list[int]]:
    """(shape, dtype) of all that the kernels of a call write, in the order of allocation; which of them are results."""
    problem, posed = call.pose(operands)
    if call.aliases:  # an append: the caches, and no workspaces
        backends.plan_for(problem)
        return list(call.results(operands).values()), list(range(len(call.aliases)))
    run = kernels.backward if call.step == BACKWARD else kernels.forward
    results = call.named(run(backends.plan_for(problem), posed, lambda work: None))
    places = {id(array): place for place, array in enumerate(recorder.arrays)}
    return [(x.shape, x.dtype) for x in recorder.arrays], [places[id(result)] for result in results.values()]


@functools.lru_cache(maxsize=1024)
def _compiled(call: str) -> Any:
    return jax.jit(functools.partial(local_p.bind, call=call))


def _evaluate(*arrays: Any, call: str) -> Any:
    """The results for arrays with contents; compiled under jax.disable_jit too, or the primitive would call itself."""
    with jax.disable_jit(False):
        return _compiled(call)(*arrays)


local_p.multiple_results = True
local_p.def_impl(_evaluate)
local_p.def_abstract_eval(_abstract)
mlir.register_lowering(local_p, _on_cpu, platform="cpu")
mlir.register_lowering(local_p, _on_gpu, platform="cuda")
if frame.unserved() is None:
    handler.register()  # at import, for programs that jax.export has stored
