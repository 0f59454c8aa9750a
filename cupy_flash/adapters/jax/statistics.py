"""attention with statistics of its rows on jax arrays, with gradients in reverse mode.

It is a step of its own (ffi_execute.py): eager, under jit, vmap and sharded over the batch and the heads. The gradient
of max needs argmax, so a call that asks for max computes both.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ... import dispatch
from ...arrays import Array
from ...problem.build import pose
from ...problem.checks import Requirements
from ...problem.records import DIFFERENTIATED, Saved, Statistics
from ...problem.statistics import check_statistics
from . import static_call
from .ffi_execute import bind, typed_like
from .static_call import STATISTICS, STATISTICS_BACKWARD, Call, Static

SHAPED_AS_LSE = ("max", "argmax", "entropy", "dmax", "dentropy")
OF_FORWARD = ("out", "lse", "argmax", "entropy")  # the results that a backward reads


class StatisticsCall(Call):
    """A call that returns statistics, or its backward."""

    __slots__ = ()

    @property
    def result_names(self) -> tuple[str, ...]:
        """The names of the results, in order."""
        if self.step == STATISTICS:
            return ("out", "lse", *self.static.statistics)
        return tuple(f"d{name}" for name in self.differentiated)

    def results(self, operands: dict[str, Any]) -> dict[str, tuple[tuple[int, ...], Any]]:
        """Return the shape and dtype of each result by name; operands need only a shape and a dtype."""
        if self.step == STATISTICS_BACKWARD:
            return {name: (tuple(operands[name[1:]].shape), operands[name[1:]].dtype) for name in self.result_names}
        known = Call(static_call.FORWARD, self.static, self.names).results(operands)
        shape, dtype = known["lse"]
        return known | {
            name: (shape, np.dtype(np.int32) if name == "argmax" else dtype) for name in self.static.statistics
        }

    def axes(self, name: str, rank: int) -> str:
        """Return the axes of an operand or a result; statistics and their gradients have those of lse."""
        return super().axes("lse" if name in SHAPED_AS_LSE else name, rank)

    def fold_axis(self, mapped: set[str]) -> str | None:
        """Return None: vmap runs the instances one by one."""
        return None

    def pose(self, operands: dict[str, Any]) -> Any:
        """Return the problem and its operands, or raise one error with every requirement that is not met."""
        options, saved = self.options(operands), None
        if self.step == STATISTICS_BACKWARD:
            options.statistics = None
            statistics = Statistics(argmax=operands.get("argmax"), entropy=operands.get("entropy"))
            gradients: Any = {name: operands.get(name) for name in ("dlse", "dmax", "dentropy")}
            saved = Saved(operands["dout"], operands["out"], operands["lse"], statistics=statistics, **gradients)
        arrays = (operands["q"], operands["k"], operands.get("v"))
        return pose(self.static.function, arrays, options, self.packed(operands), saved, self.shard(operands))

    def run(self, operands: dict[str, Any], results: list[Array]) -> dict[str, Array]:
        """Compute the results on the operands' device, in buffers that the owner of the operands allocates."""
        compute = dispatch.forward if self.step == STATISTICS else dispatch.backward
        return self.named(compute(*self.pose(operands)))

    def named(self, results: Any) -> dict[str, Array]:
        """Return the results of a backend by name, in the order of `result_names`."""
        if self.step == STATISTICS:
            return dict(zip(self.result_names, results, strict=True))
        named: dict[str, Any] = dict(zip((f"d{name}" for name in DIFFERENTIATED), results, strict=False))
        named |= {f"darray{slot}": x for slot, x in enumerate(results.dcaptured or ())}
        return {name: named[name] for name in self.result_names}


static_call.STEPS |= dict.fromkeys((STATISTICS, STATISTICS_BACKWARD), (StatisticsCall, Static))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(text: str, operands: dict[str, Any]) -> dict[str, Any]:
    """Return the results of the call with a text, by name."""
    return bind(static_call.parse(text), operands)


def _save(text: str, operands: dict[str, Any]) -> tuple[dict[str, Any], Any]:
    results = bind(static_call.parse(text), operands)
    return results, (operands, {name: x for name, x in results.items() if name in OF_FORWARD})


def _differentiate(text: str, saved: Any, cotangents: dict[str, Any]) -> tuple[dict[str, Any]]:
    operands, results = saved
    call = static_call.parse(text)
    of_results = {f"d{name}": x for name, x in cotangents.items() if name != "argmax"}
    given = operands | results | of_results
    gradients = bind(StatisticsCall(STATISTICS_BACKWARD, call.static, tuple(given)), given)
    return ({name: of_operand(gradients.get(f"d{name}"), x) for name, x in operands.items()},)


def of_operand(gradient: Any, operand: Any) -> Any:
    """Return the gradient of an operand, zeros without one; jax wants those of integers to have the dtype float0."""
    if gradient is not None:
        return typed_like(gradient, operand)
    if jnp.issubdtype(operand.dtype, jnp.floating):
        return jnp.zeros_like(operand)
    return np.zeros(operand.shape, jax.dtypes.float0)


_attend.defvjp(_save, _differentiate)


def attend(static: Static, operands: dict[str, Any]) -> tuple[Any, ...] | None:
    """Return (out, lse, Statistics) of a call; None if its `statistics` are wrong, which `pose` reports."""
    requirements = Requirements("")
    asked = check_statistics(requirements, static.statistics, static.return_lse)
    if requirements.unmet:
        return None
    computed = [name for name in Statistics._fields if name in asked or (name == "argmax" and "max" in asked)]
    call = StatisticsCall(STATISTICS, static._replace(statistics=tuple(computed)), tuple(operands))
    results = _attend(call.text, operands)
    return results["out"], results["lse"], Statistics(**{name: results[name] for name in asked})
