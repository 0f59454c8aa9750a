"""The primitive for one device's call in a compiled program, lowered to XLA's FFI (ffi_handler.py).

On a GPU the workspaces of the plan are further results, so that XLA owns their memory. If jaxlib has another major
version of the FFI, the call runs by jax.pure_callback on a CPU.
"""

from __future__ import annotations

import functools
import warnings
from typing import Any

import jax
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import mlir

from ... import dispatch
from ...arrays import Array, as_array, contiguous_strides
from ...gpu import indexer as gpu_indexer
from ...gpu import run_plan
from ...problem.records import DOUBLE_BACKWARD, JVP, Operands, Problem, SecondGradients
from . import ffi_handler, ffi_structs
from .static_call import BACKWARD, NUMBERS, OF_INDEXER, STATISTICS_BACKWARD, Call, parse

local_p = Primitive("cupy_flash_attention")


def _abstract(*operands: Any, call: str) -> list[Any]:
    parsed = parse(call)
    like, avals = operands[0], []
    for shape, dtype in parsed.results(dict(zip(parsed.names, operands, strict=True))).values():
        spec = jax.sharding.PartitionSpec(*(None,) * len(shape))
        replicated = jax.sharding.NamedSharding(like.sharding.mesh, spec)
        avals.append(like.update(shape=shape, dtype=dtype, weak_type=False, sharding=replicated))
    return avals


def _on_cpu(context: Any, *operands: Any, call: str) -> Any:
    reason = ffi_structs.unserved()
    if reason is None:
        outputs = " ".join(map(str, range(len(context.avals_out))))
        rule = jax.ffi.ffi_lowering(ffi_handler.TARGET, operand_output_aliases=parse(call).aliases)
        return rule(context, *operands, call=call, outputs=outputs)
    warnings.warn(f"jitted attention falls back to jax.pure_callback: {reason}", RuntimeWarning, stacklevel=2)
    return mlir.lower_fun(functools.partial(_call_back, call=call), multiple_results=True)(context, *operands)


def _call_back(*arrays: Any, call: str) -> Any:
    parsed = parse(call)
    shapes = list(parsed.results(dict(zip(parsed.names, arrays, strict=True))).values())

    def run(*arrays: Any) -> Any:
        # Arrays of jax, so that the engine, and with it the bits, are those of a call without jit.
        operands = {name: as_array(x, name) for name, x in zip(parsed.names, arrays, strict=True)}
        buffers = [as_array(np.empty(*shape), "result") for shape in shapes]
        return [result.numpy() for result in parsed.run(operands, buffers).values()]

    return jax.pure_callback(run, [jax.ShapeDtypeStruct(*shape) for shape in shapes], *arrays)


def _on_gpu(context: Any, *operands: Any, call: str) -> Any:
    reason = ffi_structs.unserved()
    if reason is not None:
        raise NotImplementedError(f"attention cannot be compiled for a GPU: {reason}")
    parsed = parse(call)
    unread = [name for name in parsed.names if name in NUMBERS]
    if unread:
        raise NotImplementedError(
            f"{parsed.static.function}: {', '.join(unread)} must have a value while jax compiles for a GPU, whose "
            "memory the host does not read; in place of a traced scale, multiply q by it and pass scale=1.0"
        )
    written, outputs = _allocations_on_gpu(parsed, context.avals_in)
    avals = [jax.core.ShapedArray(shape, dtype) for shape, dtype in written]
    rule = jax.ffi.ffi_lowering(ffi_handler.TARGET, operand_output_aliases=parsed.aliases)
    results = rule(context.replace(avals_out=avals), *operands, call=call, outputs=" ".join(map(str, outputs)))
    return [results[index] for index in outputs]


def _allocations_on_gpu(call: Call, avals: Any) -> tuple[list[Any], list[int]]:
    """Return the `allocations` of a call, which must be the same on all GPUs that share it."""
    places = getattr(call.static, "places", None)
    shares = [call] if places is None else [call.on_device(device) for device in places]
    found = []
    for share in shares:
        recorder = Recorder("cuda:0")
        named = zip(share.names, avals, strict=True)
        found.append(allocations(share, recorder, {name: recorder.array(x.shape, x.dtype) for name, x in named}))
    if any(other != found[0] for other in found):
        raise NotImplementedError(f"{call.static.function}: the devices that share the call need different workspaces")
    return found[0]


class Recorder:
    """An owner of arrays without memory that records what the kernels of a call allocate."""

    stream = 0

    def __init__(self, device: str) -> None:
        self.device = device
        self.arrays: list[Array] = []

    def array(self, shape: tuple[int, ...], dtype: Any) -> Array:
        """Return an array at an aligned address without memory; it is never read."""
        return Array(256, tuple(shape), contiguous_strides(tuple(shape)), np.dtype(dtype), self.device, "xla", self)

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Array:
        """Record an allocation, as `ffi_handler.Memory.empty` serves it, and return its array."""
        self.arrays.append(self.array(shape, dtype))
        return self.arrays[-1]


def allocations(call: Call, recorder: Recorder, operands: dict[str, Array]) -> tuple[list[Any], list[int]]:
    """Return (shape, dtype) of each array that the kernels of a call allocate, in order, and the results' indices."""
    problem, posed = call.pose(operands)
    if call.aliases:  # an append writes to the caches and has no workspaces
        dispatch.plan_for(problem)
        return list(call.results(operands).values()), list(range(len(call.aliases)))
    results = call.named(_traced(call.step, problem, posed))
    places = {id(array): place for place, array in enumerate(recorder.arrays)}
    return [(x.shape, x.dtype) for x in recorder.arrays], [places[id(result)] for result in results.values()]


def _traced(step: str, problem: Problem, operands: Operands) -> Any:
    """Return the results of a step without a launch of its kernels."""
    if step in OF_INDEXER:
        run_indexer = getattr(gpu_indexer, OF_INDEXER[step])
        return run_indexer(problem, operands, dispatch.device_of(problem), lambda work: None)
    plan = dispatch.plan_for(problem)
    if step != DOUBLE_BACKWARD:
        if step == JVP:
            return run_plan.jvp(plan, operands, lambda work: None)
        run = run_plan.backward if step in (BACKWARD, STATISTICS_BACKWARD) else run_plan.forward
        return run(plan, operands, lambda work: None)
    along = dispatch.plan_for(dispatch.along_cotangents(problem))
    _, _, tout, tlse = run_plan.jvp(along, operands, lambda work: None)
    gradients = run_plan.backward(plan, operands._replace(tout=tout, tlse=tlse), lambda work: None)
    return SecondGradients(*gradients, ddout=tout, ddlse=tlse)


local_p.multiple_results = True
local_p.def_abstract_eval(_abstract)
mlir.register_lowering(local_p, _on_cpu, platform="cpu")
mlir.register_lowering(local_p, _on_gpu, platform="cuda")
if ffi_structs.unserved() is None:
    ffi_handler.register()  # at import, because programs loaded by jax.export call it by name
