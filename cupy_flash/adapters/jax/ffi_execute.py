"""The primitive for a step of attention: evaluated at once on concrete arrays, traced into a program otherwise.

vmap folds its axis into the batch or the heads (vmap.py); sharded arrays become one call per shard (sharding.py);
derivatives.py has the differentiation rules. It is a primitive because jax drops the rules of custom_jvp in a scan.
"""

from __future__ import annotations

import functools
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir
from jax.sharding import NamedSharding, PartitionSpec

from ... import dispatch
from ...arrays import Array, as_array
from ...problem.records import JVP
from . import sharding, vmap
from .primitive import local_p
from .static_call import FORWARD, NUMBERS, STATISTICS, WEIGHTS, Call, Static, parse

step_p = Primitive("cupy_flash_step")


def run(step: str, static: Static, operands: dict[str, Any]) -> dict[str, Any]:
    """Return the results of a step of attention by name."""
    return bind(Call(step, static, tuple(operands)), operands)


def bind(call: Any, operands: dict[str, Any]) -> dict[str, Any]:
    """Return the results of a call by name."""
    arrays = _varying_alike([operands[name] for name in call.names])
    return dict(zip(call.result_names, bind_primitive(step_p, *arrays, call=call.text), strict=True))


def bind_primitive(primitive: Primitive, *arrays: Any, call: str) -> Any:
    """Bind a primitive that a compiled program runs once per shard, and return its results."""
    return primitive.bind(*arrays, call=call, partitions=sharding.example())


def refuse_derivative(function: str) -> NoReturn:
    """Raise NotImplementedError for a derivative of higher order than `function` has."""
    raise NotImplementedError(f"{function}: there is no derivative of this order")


def typed_like(gradient: Any, operand: Any) -> Any:
    """Return a gradient with its operand's sharding, summed over the devices that share the operand."""
    shared = tuple(_varying(gradient) - _varying(operand))
    gradient = jax.lax.psum(gradient, shared) if shared else gradient
    given, expected = jax.typeof(gradient).sharding, jax.typeof(operand).sharding
    return jax.sharding.reshard(gradient, expected) if expected.mesh.explicit_axes and given != expected else gradient


def _varying(x: Any) -> frozenset[Any]:
    """Return the mesh axes of a shard_map over which an array varies; jax before 0.10 calls them vma."""
    aval = jax.typeof(x)
    axes: frozenset[Any] = aval.manual_axis_type.varying if hasattr(aval, "manual_axis_type") else aval.vma
    return axes


def _varying_alike(arrays: Any) -> Any:
    """Return the operands cast to vary over the same mesh axes of a shard_map."""
    varying: list[frozenset[Any]] = [_varying(x) for x in arrays]
    union: frozenset[Any] = frozenset().union(*varying)
    return [
        jax.lax.pcast(x, tuple(union - own), to="varying") if own != union else x
        for x, own in zip(arrays, varying, strict=True)
    ]


def _evaluate(*arrays: Any, call: str, **_: Any) -> Any:
    """Return the results for concrete arrays. Appends and calls on several devices run as a compiled program."""
    parsed = parse(call)
    operands = {
        name: jnp.asarray(x) if isinstance(x, np.ndarray) else x for name, x in zip(parsed.names, arrays, strict=True)
    }
    if parsed.aliases or any(len(x.devices()) > 1 for x in operands.values()):
        with jax.disable_jit(False):  # with jit disabled, the primitive would call itself
            return _program(call)(*operands.values())
    _require_one_device(parsed.static.function, operands)
    results = {name: result.result() for name, result in parsed.run(operands, []).items()}
    _require_numbers(parsed.static.function, results)
    return list(results.values())


@functools.lru_cache(maxsize=1024)
def _program(call: str) -> Any:
    """Return the compiled program of a call; it donates the caches of an append."""
    return jax.jit(functools.partial(bind_primitive, step_p, call=call), donate_argnums=tuple(parse(call).aliases))


def _require_one_device(function: str, operands: dict[str, Any]) -> None:
    """Raise ValueError for arrays on different devices. On a CPU a call would not fail: its devices share memory."""
    devices: dict[Any, list[str]] = {}
    for name, x in operands.items():
        if x.committed:
            devices.setdefault(x.device, []).append(name)
    if len(devices) > 1:
        where = "; ".join(f"{', '.join(names)} on {device}" for device, names in devices.items())
        raise ValueError(f"{function}: all arrays must be on one device, not {where}")


def _require_numbers(function: str, results: dict[str, Any]) -> None:
    """Raise FloatingPointError for a NaN under jax_debug_nans, which by itself checks only jax's own operations."""
    if jax.config.jax_debug_nans:
        invalid = [name for name, x in results.items() if jnp.isnan(x).any()]
        if invalid:
            raise FloatingPointError(f"{function}: invalid value (nan) in {', '.join(invalid)}")


def _abstract(*operands: Any, call: str, **_: Any) -> Any:
    """Return the types of the results; raises the errors of the call about shapes, dtypes and options."""
    parsed = parse(call)
    if parsed.step in (FORWARD, JVP, WEIGHTS, STATISTICS):
        _check(parsed, operands)
    return types(parsed, operands)


def types(call: Any, operands: Any) -> list[Any]:
    """Return the types of the results of a call, with shardings if the operands' mesh has explicit axes."""
    shapes = call.results(dict(zip(call.names, operands, strict=True))).values()
    mesh = sharding.explicit_mesh(operands)
    if mesh is None:
        mesh = operands[0].sharding.mesh
        shardings = tuple(NamedSharding(mesh, PartitionSpec(*(None,) * len(shape))) for shape, _ in shapes)
    else:
        shardings = sharding.types_of_results(call, mesh, operands)
    return [
        operands[0].update(shape=shape, dtype=dtype, weak_type=False, sharding=given)
        for (shape, dtype), given in zip(shapes, shardings, strict=True)
    ]


def _check(call: Call, operands: Any) -> None:
    """Raise the call's errors: about shapes, dtypes and options, or because no engine serves it."""
    named = zip(call.names, operands, strict=True)
    problem, _ = call.pose({name: _stand_in(x, name) for name, x in named if name not in NUMBERS})
    dispatch.plan_for(problem)


def _stand_in(x: Any, name: str) -> Array:
    """Return zeros with a tracer's shape and dtype, all of which share the memory of one element.

    Entries of `selected` name no key instead, as lists of zeros would name the first key several times.
    """
    value = np.asarray(-1 if name == "selected" else 0).astype(x.dtype)
    array = as_array(np.broadcast_to(value, x.shape), "operand")
    array.framework = "jax"
    return array


def _lowered(*arrays: Any, call: str, **_: Any) -> Any:
    """Return the results within a compiled program, with one call per shard."""
    parsed = parse(call)
    compute = functools.partial(sharding.sharded, local_p.bind, call=parsed)
    types = [jax.typeof(x) for x in arrays]
    mesh = sharding.explicit_mesh(types)
    if mesh is None:
        return compute(*arrays)
    return jax.sharding.auto_axes(compute, out_sharding=sharding.types_of_results(parsed, mesh, types))(*arrays)


def _batch(arrays: Any, places: Any, *, call: str, **_: Any) -> Any:
    results = vmap.batch(functools.partial(bind_primitive, step_p), arrays, places, parse(call))
    return results, (0,) * len(results)


step_p.multiple_results = True
step_p.def_impl(_evaluate)
step_p.def_abstract_eval(_abstract)
batching.primitive_batchers[step_p] = _batch
mlir.register_lowering(step_p, mlir.lower_fun(_lowered, multiple_results=True))
