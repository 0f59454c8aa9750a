"""Differentiation rules: first derivatives in both modes; second derivatives except forward over forward mode.

The derivative of a step is linear in the tangents. It is a primitive of its own, which forward mode evaluates and
reverse mode transposes, so that one rule per step serves both modes:

    derivative of    evaluated by                   transposed by
    attention        JVP                            backward
    the backward     double backward + backward     double backward
    the JVP          (refused)                      double backward

The second row is its own transpose because the Hessian is symmetric. A backward reads the saved out and lse, but its
derivative has no terms for them: they are functions of the operands, and the derivatives with respect to the operands
include the parts through them.
"""

from __future__ import annotations

import functools
from typing import Any

import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from ...problem.records import DOUBLE_BACKWARD, JVP
from . import static_call, vmap
from .ffi_execute import bind_primitive, refuse_derivative, run, step_p, typed_like, types
from .static_call import BACKWARD, FORWARD, Call, Static

OF_ATTENTION, OF_BACKWARD, OF_JVP = "derivative of attention", "derivative of the backward", "derivative of the JVP"
OF_STEP = (FORWARD, BACKWARD, JVP)  # the steps that can be differentiated
KNOWN = ("out", "lse")


def _differentiate_step(primals: Any, tangents: Any, *, call: str, **_: Any) -> Any:
    """The JVP rule of a step: return its results and their tangents; a tangent that is 0 is ad.Zero."""
    step, static, names = parsed = static_call.parse(call)
    operands, given = (dict(zip(names, arrays, strict=True)) for arrays in (primals, tangents))
    if step not in OF_STEP or "starts" in names:  # in a ring, the saved lse covers the keys of all shards
        refuse_derivative(static.function)
    results = dict(zip(parsed.result_names, bind_primitive(step_p, *primals, call=call), strict=True))
    direction, second = _direction(parsed, given), _second_tangents(given)
    if step == BACKWARD:
        of_results = _derivative(OF_BACKWARD, static, operands, direction)
        return list(results.values()), [of_results[f"d{name}"] for name in parsed.differentiated]
    known = operands | {name: results[name] for name in KNOWN}
    plain = {name: x for name, x in known.items() if not name.startswith("t")}
    of_results = _derivative(OF_ATTENTION, static, plain, direction)
    of_results = {"out": of_results["tout"], "lse": of_results["tlse"]}
    if step == JVP:
        of_results |= _derivative_of_derivative(static, known, direction, second)
    return list(results.values()), [of_results[name] for name in results]


def _direction(call: Any, tangents: dict[str, Any]) -> dict[str, Any]:
    """Return the nonzero tangents of differentiable operands and of dout and dlse, by the names tq, tk, ..., tdlse."""
    names = (*Call(BACKWARD, call.static, call.names).differentiated, "dout", "dlse")
    return {f"t{name}": tangents[name] for name in names if not _is_zero(tangents.get(name))}


def _second_tangents(tangents: dict[str, Any]) -> dict[str, Any]:
    """Return the nonzero tangents of those operands that are tangents themselves (tq, tk, ...), by operand name."""
    return {name: x for name, x in tangents.items() if name.startswith("t") and not _is_zero(x)}


def _is_zero(tangent: Any) -> bool:
    return tangent is None or isinstance(tangent, ad.Zero)


class Linear(Call):
    """The derivative of a step as a call of its own, which is linear in the operands that are tangents."""

    __slots__ = ()

    @property
    def tangents(self) -> tuple[str, ...]:
        """The operands in which the call is linear: tq, tk, ...; for a JVP, which has tq as an input, uq, uk, ...."""
        return tuple(name for name in self.names if name.startswith("u" if self.step == OF_JVP else "t"))

    @property
    def like(self) -> dict[str, str]:
        """{result: the operand with the same shape and dtype}."""
        if self.step != OF_BACKWARD:
            return {"tout": "out", "tlse": "lse"}
        return {f"d{name}": name for name in Call(BACKWARD, self.static, self.names).differentiated}

    @property
    def result_names(self) -> tuple[str, ...]:
        """The names of the results, in order."""
        return tuple(self.like)

    def results(self, operands: dict[str, Any]) -> dict[str, tuple[tuple[int, ...], Any]]:
        """Return the shape and dtype of each result by name; operands need only a shape and a dtype."""
        return {name: (tuple(operands[like].shape), operands[like].dtype) for name, like in self.like.items()}


static_call.STEPS |= dict.fromkeys((OF_ATTENTION, OF_BACKWARD, OF_JVP), (Linear, Static))
linear_p = Primitive("cupy_flash_derivative")


def _derivative(step: str, static: Static, operands: dict[str, Any], direction: dict[str, Any]) -> dict[str, Any]:
    """Bind the derivative of a step and return its results by name; without tangents they are zeros."""
    given = operands | direction
    linear = Linear(step, static, tuple(given))
    if not direction:
        return {name: jnp.zeros_like(operands[like]) for name, like in linear.like.items()}
    return dict(zip(linear.like, bind_primitive(linear_p, *given.values(), call=linear.text), strict=True))


def _derivative_of_derivative(
    static: Static, operands: dict[str, Any], direction: dict[str, Any], second: dict[str, Any]
) -> dict[str, Any]:
    """Return the tangents of tout and tlse, the results of a JVP.

    `direction` has the tangents of the JVP's operands, `second` those of its tangents; each contributes one term.
    """
    plain = {name: x for name, x in operands.items() if not name.startswith("t")}
    along = _derivative(OF_ATTENTION, static, plain, second)
    across = _derivative(OF_JVP, static, operands, {f"u{name[1:]}": x for name, x in direction.items()})
    return {name: along[name] + across[name] for name in along}


def _evaluate(*arrays: Any, call: str, **_: Any) -> Any:
    """Evaluate a derivative with the steps that the module's table has under "evaluated by"."""
    linear = static_call.parse(call)
    operands = dict(zip(linear.names, arrays, strict=True))
    if linear.step == OF_JVP:
        raise NotImplementedError(
            f"{linear.static.function}: there is no second derivative in forward mode alone; use jax.hessian, or "
            "jax.jvp of jax.grad"
        )
    known = {name: x for name, x in operands.items() if name not in linear.tangents}
    direction = {name: x for name, x in operands.items() if name in linear.tangents}
    if linear.step == OF_ATTENTION:
        plain = {name: x for name, x in known.items() if name not in KNOWN}
        results = run(JVP, linear.static, plain | direction)
        return [results[name] for name in linear.like]
    return list(_derivative_of_backward(linear.static, known, direction).values())


def _derivative_of_backward(static: Static, known: dict[str, Any], direction: dict[str, Any]) -> dict[str, Any]:
    """Return the tangents of the gradients: a backward of tdout and tdlse plus a double backward of the others."""
    of_backward, parts = Call(BACKWARD, static, tuple(known)), []
    of_inputs = {name: x for name, x in direction.items() if name not in ("tdout", "tdlse")}
    if of_inputs:
        parts.append(run(DOUBLE_BACKWARD, static, known | of_inputs))
    if len(of_inputs) < len(direction):
        dout = direction.get("tdout", jnp.zeros_like(known["dout"]))
        plain = {name: x for name, x in known.items() if name != "dlse"} | {"dout": dout}
        parts.append(run(BACKWARD, static, plain | ({"dlse": direction["tdlse"]} if "tdlse" in direction else {})))
    return {f"d{name}": sum(part[f"d{name}"] for part in parts) for name in of_backward.differentiated}


def _transpose(cotangents: Any, *arrays: Any, call: str, **_: Any) -> Any:
    """Transpose a derivative, for reverse mode: return the cotangents of its tangents."""
    linear = static_call.parse(call)
    known = {name: x for name, x in zip(linear.names, arrays, strict=True) if not ad.is_undefined_primal(x)}
    of_results = {name: x for name, x in zip(linear.like, cotangents, strict=True) if not _is_zero(x)}
    if linear.step == OF_BACKWARD:
        direction = {f"t{name[1:]}": x for name, x in of_results.items()}
        gradients = run(DOUBLE_BACKWARD, linear.static, known | direction)
    else:
        saved = {"dout": of_results.get("tout", jnp.zeros_like(known["out"]))}
        saved |= {"dlse": of_results["tlse"]} if "tlse" in of_results else {}
        step = BACKWARD if linear.step == OF_ATTENTION else DOUBLE_BACKWARD
        gradients = run(step, linear.static, known | saved)
    gradients = _typed(gradients, known)
    return [gradients[f"d{name[1:]}"] if name in linear.tangents else None for name in linear.names]


def _typed(gradients: dict[str, Any], operands: dict[str, Any]) -> dict[str, Any]:
    """Return the gradients, each sharded as its operand."""
    return {name: typed_like(x, operands[name[1:]]) for name, x in gradients.items() if name[1:] in operands}


def _differentiate(primals: Any, tangents: Any, *, call: str, **_: Any) -> Any:
    """The JVP rule of a derivative: return its results and their tangents."""
    linear = static_call.parse(call)
    if linear.step != OF_ATTENTION:
        refuse_derivative(linear.static.function)
    operands, given = (dict(zip(linear.names, arrays, strict=True)) for arrays in (primals, tangents))
    direction, second = _direction(linear, given), _second_tangents(given)
    of_tangents = _derivative_of_derivative(linear.static, operands, direction, second)
    return bind_primitive(linear_p, *primals, call=call), [of_tangents[name] for name in linear.like]


def _batch(arrays: Any, places: Any, *, call: str, **_: Any) -> Any:
    results = vmap.batch(functools.partial(bind_primitive, linear_p), arrays, places, static_call.parse(call))
    return results, (0,) * len(results)


def _abstract(*operands: Any, call: str, **_: Any) -> Any:
    """Return the types of the results: each tangent has the type of the step's result that it belongs to."""
    linear = static_call.parse(call)
    if linear.step != OF_BACKWARD:
        return [operands[linear.names.index(name)].update(weak_type=False) for name in KNOWN]
    known = {name: x for name, x in zip(linear.names, operands, strict=True) if name not in linear.tangents}
    return types(Call(BACKWARD, linear.static, tuple(known)), list(known.values()))


linear_p.multiple_results = True
linear_p.def_impl(_evaluate)
linear_p.def_abstract_eval(_abstract)
ad.primitive_jvps[step_p] = _differentiate_step
ad.primitive_jvps[linear_p] = _differentiate
ad.primitive_transposes[linear_p] = _transpose
batching.primitive_batchers[linear_p] = _batch
mlir.register_lowering(linear_p, mlir.lower_fun(_evaluate, multiple_results=True))
