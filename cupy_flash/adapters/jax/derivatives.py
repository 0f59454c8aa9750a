"""Derivatives of attention: both modes of the first, and of the second all but forward mode over forward mode.

A derivative is a linear function of the tangents. It is a primitive here, which forward mode evaluates and reverse mode
transposes, so that one rule for each step serves both modes:

    derivative of    evaluated by                   transposed by
    attention        JVP                            backward
    the backward     double backward + backward     double backward
    the JVP          (refused)                      double backward

The second row is its own transpose because the Hessian is symmetric. out and lse are saved by the forward: what moves
them moves the operands too, and the derivatives by the operands contain it.
"""

from __future__ import annotations

import functools
from typing import Any

import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from ...problem import DOUBLE_BACKWARD, JVP
from . import calls, folding
from .calls import BACKWARD, FORWARD, Call, Static
from .step import bind_primitive, refuse_derivative, run, step_p, typed_like, types

OF_ATTENTION, OF_BACKWARD, OF_JVP = "derivative of attention", "derivative of the backward", "derivative of the JVP"
OF_STEP = (FORWARD, BACKWARD, JVP)  # the steps that have a derivative
KNOWN = ("out", "lse")


def _differentiate_step(primals: Any, tangents: Any, *, call: str, **_: Any) -> Any:
    """The results of a step and their tangents, of tangents that are ad.Zero where nothing moves."""
    step, static, names = parsed = calls.parse(call)
    operands, further = (dict(zip(names, arrays, strict=True)) for arrays in (primals, tangents))
    if step not in OF_STEP or "starts" in names:  # out and lse of a part are not those of its operands
        refuse_derivative(static.function)
    results = dict(zip(parsed.result_names, bind_primitive(step_p, *primals, call=call), strict=True))
    moved, turned = _moved(parsed, further), _turned(further)
    if step == BACKWARD:
        of_results = _derivative(OF_BACKWARD, static, operands, moved)
        return list(results.values()), [of_results[f"d{name}"] for name in parsed.differentiated]
    known = operands | {name: results[name] for name in KNOWN}
    plain = {name: x for name, x in known.items() if not name.startswith("t")}
    of_results = _derivative(OF_ATTENTION, static, plain, moved)
    of_results = {"out": of_results["tout"], "lse": of_results["tlse"]}
    if step == JVP:
        of_results |= _derivative_of_derivative(static, known, moved, turned)
    return list(results.values()), [of_results[name] for name in results]


def _moved(call: Any, tangents: dict[str, Any]) -> dict[str, Any]:
    """The tangents that are not 0, "tq" and so on, of the operands that have a gradient, and of dout and dlse."""
    names = (*Call(BACKWARD, call.static, call.names).differentiated, "dout", "dlse")
    return {f"t{name}": tangents[name] for name in names if not _is_zero(tangents.get(name))}


def _turned(tangents: dict[str, Any]) -> dict[str, Any]:
    """The tangents of tangents that are not 0, by the names of the tangents."""
    return {name: x for name, x in tangents.items() if name.startswith("t") and not _is_zero(x)}


def _is_zero(tangent: Any) -> bool:
    return tangent is None or isinstance(tangent, ad.Zero)


class Linear(Call):
    """A derivative of a step of attention: a call that is linear in the operands that are tangents."""

    __slots__ = ()

    @property
    def moved(self) -> tuple[str, ...]:
        """The operands in which it is linear: with "t" before the name of what moves; "u" beside tangents."""
        return tuple(name for name in self.names if name.startswith("u" if self.step == OF_JVP else "t"))

    @property
    def like(self) -> dict[str, str]:
        """For each result the operand of the same type."""
        if self.step != OF_BACKWARD:
            return {"tout": "out", "tlse": "lse"}
        return {f"d{name}": name for name in Call(BACKWARD, self.static, self.names).differentiated}

    @property
    def result_names(self) -> tuple[str, ...]:
        """The names of the results in their order."""
        return tuple(self.like)

    def results(self, operands: dict[str, Any]) -> dict[str, tuple[tuple[int, ...], Any]]:
        """Shape and dtype of each result, of operands that have a shape and a dtype."""
        return {name: (tuple(operands[like].shape), operands[like].dtype) for name, like in self.like.items()}


calls.STEPS |= dict.fromkeys((OF_ATTENTION, OF_BACKWARD, OF_JVP), (Linear, Static))
linear_p = Primitive("cupy_flash_derivative")


def _derivative(step: str, static: Static, operands: dict[str, Any], moved: dict[str, Any]) -> dict[str, Any]:
    """The results of a derivative by name, of tangents that need not be there."""
    given = operands | moved
    linear = Linear(step, static, tuple(given))
    if not moved:
        return {name: jnp.zeros_like(operands[like]) for name, like in linear.like.items()}
    return dict(zip(linear.like, bind_primitive(linear_p, *given.values(), call=linear.text), strict=True))


def _derivative_of_derivative(
    static: Static, operands: dict[str, Any], moved: dict[str, Any], turned: dict[str, Any]
) -> dict[str, Any]:
    """The tangents of tout and tlse, as the operands move and their tangents turn."""
    plain = {name: x for name, x in operands.items() if not name.startswith("t")}
    along = _derivative(OF_ATTENTION, static, plain, turned)
    across = _derivative(OF_JVP, static, operands, {f"u{name[1:]}": x for name, x in moved.items()})
    return {name: along[name] + across[name] for name in along}


def _evaluate(*arrays: Any, call: str, **_: Any) -> Any:
    """The results of a derivative: forward mode."""
    linear = calls.parse(call)
    operands = dict(zip(linear.names, arrays, strict=True))
    if linear.step == OF_JVP:
        raise NotImplementedError(
            f"{linear.static.function}: there is no second derivative in forward mode alone; use jax.hessian, or "
            "jax.jvp of jax.grad"
        )
    known = {name: x for name, x in operands.items() if name not in linear.moved}
    moved = {name: x for name, x in operands.items() if name in linear.moved}
    if linear.step == OF_ATTENTION:
        plain = {name: x for name, x in known.items() if name not in KNOWN}
        results = run(JVP, linear.static, plain | moved)
        return [results[name] for name in linear.like]
    return list(_derivative_of_backward(linear.static, known, moved).values())


def _derivative_of_backward(static: Static, known: dict[str, Any], moved: dict[str, Any]) -> dict[str, Any]:
    """The tangents of the gradients: those of dout and dlse enter linearly, the others by the double backward."""
    of_backward, parts = Call(BACKWARD, static, tuple(known)), []
    of_inputs = {name: x for name, x in moved.items() if name not in ("tdout", "tdlse")}
    if of_inputs:
        parts.append(run(DOUBLE_BACKWARD, static, known | of_inputs))
    if len(of_inputs) < len(moved):
        dout = moved.get("tdout", jnp.zeros_like(known["dout"]))
        plain = {name: x for name, x in known.items() if name != "dlse"} | {"dout": dout}
        parts.append(run(BACKWARD, static, plain | ({"dlse": moved["tdlse"]} if "tdlse" in moved else {})))
    return {f"d{name}": sum(part[f"d{name}"] for part in parts) for name in of_backward.differentiated}


def _transpose(cotangents: Any, *arrays: Any, call: str, **_: Any) -> Any:
    """The cotangents of the tangents: reverse mode."""
    linear = calls.parse(call)
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
    return [gradients[f"d{name[1:]}"] if name in linear.moved else None for name in linear.names]


def _typed(gradients: dict[str, Any], operands: dict[str, Any]) -> dict[str, Any]:
    """The gradients, each sharded as its operand."""
    return {name: typed_like(x, operands[name[1:]]) for name, x in gradients.items() if name[1:] in operands}


def _differentiate(primals: Any, tangents: Any, *, call: str, **_: Any) -> Any:
    """The results of a derivative and their own tangents."""
    linear = calls.parse(call)
    if linear.step != OF_ATTENTION:
        refuse_derivative(linear.static.function)
    operands, further = (dict(zip(linear.names, arrays, strict=True)) for arrays in (primals, tangents))
    moved, turned = _moved(linear, further), _turned(further)
    of_tangents = _derivative_of_derivative(linear.static, operands, moved, turned)
    return bind_primitive(linear_p, *primals, call=call), [of_tangents[name] for name in linear.like]


def _batch(arrays: Any, places: Any, *, call: str, **_: Any) -> Any:
    results = folding.batch(functools.partial(bind_primitive, linear_p), arrays, places, calls.parse(call))
    return results, (0,) * len(results)


def _abstract(*operands: Any, call: str, **_: Any) -> Any:
    """The types of the results: those of what the derivative is of."""
    linear = calls.parse(call)
    if linear.step != OF_BACKWARD:
        return [operands[linear.names.index(name)].update(weak_type=False) for name in KNOWN]
    known = {name: x for name, x in zip(linear.names, operands, strict=True) if name not in linear.moved}
    return types(Call(BACKWARD, linear.static, tuple(known)), list(known.values()))


linear_p.multiple_results = True
linear_p.def_impl(_evaluate)
linear_p.def_abstract_eval(_abstract)
ad.primitive_jvps[step_p] = _differentiate_step
ad.primitive_jvps[linear_p] = _differentiate
ad.primitive_transposes[linear_p] = _transpose
batching.primitive_batchers[linear_p] = _batch
mlir.register_lowering(linear_p, mlir.lower_fun(_evaluate, multiple_results=True))
