"""`forward`: attention on torch tensors for autograd and the transforms of torch.func.

Outside of transforms it calls the operators (op.py, derivatives.py), which autograd differentiates twice and which
compile, export and checkpointing support. torch.func and dual tensors do not support operators with a backward of their
own, so under them it applies autograd Functions with `jvp` and `vmap`. `Backward` and `Jvp` differentiate `Attention`,
and `DoubleBackward` differentiates both and has no derivative. Dynamo does not support a Function with a jvp, so while
compiling the operators are always called; where the graph runs under a transform, they apply the Functions.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.autograd import forward_ad

from ... import dispatch, keyed_plan
from ...mods.trace import Mod
from ...problem.build import pose
from ...problem.records import DIFFERENTIATED, Options, Packed
from . import statistics
from .autograd_kernel import are_plain, is_transformed
from .derivatives import attention_double_backward, attention_jvp, refuse_third_derivative
from .keyed_autograd import keep_recorded, run_recorded
from .keyed_plan import allocator, call_on_tensors
from .op import (
    ARRAY_NAMES,
    TENSORS,
    arguments_of,
    attend,
    attention_backward,
    attention_forward,
    is_dtensor,
    library,
    mod_of_options,
    modified_attention_backward,
    modified_attention_forward,
    on_device_of,
)


def forward(
    function: str, arrays: tuple[Any, Any, Any], options: Options, packed: Packed | None = None, fp8: bool = False
) -> Any:
    """Return the result of `cupy_flash.<function>`, recorded for autograd and for the transforms of torch.func.

    `pose` checks the call, in the operator if there is one; `_recorded` only checks what a schema cannot express.
    """
    if options.statistics is not None:
        return statistics.attend(function, arrays, options, packed, fp8)
    if torch.compiler.is_compiling():
        record = _recorded
        if forward_ad._current_level >= 0:
            record = _recorded_in_forward_mode
        elif not all(mod is None or isinstance(mod, Mod) for mod in (options.score_mod, options.mask_mod)):
            record = _recorded_outside_of_graph
        return record(function, arrays, options, packed, fp8)
    if fp8 is not False:
        return _recorded(function, arrays, options, packed, fp8)
    call = call_on_tensors(arrays, options, packed)
    has_gradient = call is not None and torch.is_grad_enabled() and torch._C._any_requires_grad(*call[1])
    if call is not None:
        outputs = run_recorded(call) if has_gradient else keyed_plan.run(call)
        if outputs is not None:
            return (outputs[0], outputs[1]) if options.return_lse else outputs[0]
    if _is_unobserved(arrays, options, packed):
        with on_device_of(arrays[0]):
            problem, operands = pose(function, arrays, options, packed)
            out, lse = dispatch.forward(problem, operands)
        if call is not None:
            keyed_plan.keep(call, problem, operands, allocator)
        return (out.result(), lse.result()) if options.return_lse else out.result()
    results = _recorded(function, arrays, options, packed, fp8)
    if call is not None:
        keep_recorded(call, function, arrays, options, packed)
    return results


_arrays_of = operator.attrgetter(*ARRAY_NAMES)


def _is_unobserved(arrays: tuple[Any, Any, Any], options: Options, packed: Packed | None) -> bool:
    """Return whether no part of torch changes, records or observes a call, so that it needs no operator.

    A call with mods or dropout counts as observed, because captured arrays and the seed may have to be saved.
    """
    tensors = [x for x in (*arrays, *_arrays_of(options)) if x is not None]
    if packed is not None:
        tensors += packed[:2]
    return not (
        (torch.is_grad_enabled() and torch._C._any_requires_grad(*tensors))
        or options.score_mod is not None
        or options.mask_mod is not None
        or type(options.dropout) is not float
        or options.dropout != 0
        or not are_plain(tensors)
        or torch.is_autocast_enabled("cuda" if arrays[0].is_cuda else "cpu")
        or torch.are_deterministic_algorithms_enabled()
    )


def _recorded(function: str, arrays: tuple[Any, Any, Any], options: Options, packed: Packed | None, fp8: bool) -> Any:
    try:
        arguments = arguments_of(arrays, options, packed, fp8)
        mod = mod_of_options(options)
    except (TypeError, ValueError):
        # torch.compile cannot trace what pose does with memory, and a DTensor has no memory of its own.
        if not torch.compiler.is_compiling() and not is_dtensor(arrays[0]):
            pose(function, arrays, options, packed)  # raises an error with the same reason and all others
        raise
    captured = [] if mod is None else list(mod.arrays)
    if not torch.compiler.is_compiling() and is_transformed():
        settings = Settings(arguments[len(TENSORS) :], "" if mod is None else mod.encoded)
        out, lse = Attention.apply(settings, *arguments[: len(TENSORS)], *captured)
    elif mod is None:
        out, lse = attend(*arguments)
    else:
        out, lse = modified_attention_forward(*arguments, captured, mod.encoded)
    return (out, lse) if options.return_lse else out


# torch.compile cannot trace through the tracing of a mod, so its graph breaks at this call.
_recorded_outside_of_graph = torch.compiler.disable(
    _recorded, reason="score_mod and mask_mod are traced in every call: pass a cupy_flash.Mod, which is traced already"
)

_recorded_in_forward_mode = torch.compiler.disable(
    _recorded, reason="the operators take no dual tensors: use torch.func.jvp, which stays in the graph"
)


class Settings:
    """The arguments of a call that are not tensors; a class, because torch.func would search a tuple for tensors."""

    def __init__(self, others: tuple[Any, ...], mods: str) -> None:
        self.others, self.mods = others, mods

    def operator_arguments(self, tensors: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the leading arguments of an operator with mods; `tensors` are those of TENSORS, then captured ones."""
        return (*tensors[: len(TENSORS)], *self.others, list(tensors[len(TENSORS) :]), self.mods)


# Indices in TENSORS of the tensors that have derivatives.
PLACES = tuple(TENSORS.index(name) for name in DIFFERENTIATED)
COUNT = len(TENSORS)


def _moving(tensors: tuple[Any, ...], tangents: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the tangents of DIFFERENTIATED, then of the captured arrays, from those of all tensors of a call."""
    moved = [None if t is None or t._is_zerotensor() else t for t in tangents]
    names = {n: name for n, name in enumerate(TENSORS) if n not in PLACES}
    fixed = [name for n, name in names.items() if moved[n] is not None and tensors[n].is_floating_point()]
    if fixed:
        raise RuntimeError(f"cupy_flash differentiates attention by no {', '.join(fixed)}, which has a tangent")
    return (*(moved[n] for n in PLACES), *moved[COUNT:])


def _by_tensor(tensors: tuple[Any, ...], gradients: tuple[Any, ...]) -> list[Any]:
    """Return gradients of DIFFERENTIATED and captured arrays at the indices of their tensors, None elsewhere."""
    placed: list[Any] = [None] * len(tensors)
    for n, gradient in zip((*PLACES, *range(COUNT, len(tensors))), gradients, strict=True):
        placed[n] = gradient
    return placed


def _save(ctx: Any, *tensors: Any) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors)
    ctx.save_for_forward(*tensors)


class _Function(torch.autograd.Function):
    """A Function whose `vmap` folds the vmapped dimension into the batch, or loops over it if it cannot."""

    arity = 0  # number of arguments between the settings and the tensors of the call

    @classmethod
    def vmap(cls, info: Any, in_dims: Any, settings: Any, *tensors: Any) -> Any:
        """Return the results with the vmapped dimension first."""
        size, dims = info.batch_size, in_dims[1:]
        rows = [x if x is None or d is None else x.movedim(d, 0) for x, d in zip(tensors, dims, strict=True)]
        if size == 0:  # one instance shows the shapes of the results
            one = cls.apply(
                settings, *(x if d is None else x.new_zeros(x.shape[1:]) for x, d in zip(rows, dims, strict=True))
            )
            results = [None if x is None else x.new_empty((0, *x.shape)) for x in one]
        elif cls._folds(tensors):
            folded = [
                None if x is None else (x.expand(size, *x.shape) if d is None else x).flatten(0, 1)
                for x, d in zip(rows, dims, strict=True)
            ]
            results = [None if x is None else x.unflatten(0, (size, -1)) for x in cls.apply(settings, *folded)]
        else:
            each = [
                cls.apply(settings, *(x if d is None else x[n] for x, d in zip(rows, dims, strict=True)))
                for n in range(size)
            ]
            results = [None if one[0] is None else torch.stack(one) for one in zip(*each, strict=True)]
        return tuple(results), tuple(None if x is None else 0 for x in results)

    @classmethod
    def _folds(cls, tensors: tuple[Any, ...]) -> bool:
        """Return whether every tensor of the call has the batch as its first axis, and none contains batch indices."""
        call = tensors[cls.arity :]
        return call[0].numel() > 0 and all(x is None for x in call[3:])


class Attention(_Function):
    """(settings, *tensors) -> (out, lse)."""

    @staticmethod
    def forward(settings: Settings, *tensors: Any) -> Any:
        """Call the operator."""
        if settings.mods:
            return modified_attention_forward(*settings.operator_arguments(tensors))
        return attention_forward(*tensors, *settings.others)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Save all inputs and outputs, because each may be differentiated."""
        ctx.settings, *tensors = inputs
        _save(ctx, *tensors, *output)

    @staticmethod
    def backward(ctx: Any, dout: Any, dlse: Any) -> Any:
        """Apply Backward."""
        *tensors, out, lse = ctx.saved_tensors
        if dout is None:  # only lse was used
            dout = torch.zeros_like(out)
        gradients = Backward.apply(ctx.settings, dout, out, lse, dlse, *tensors)
        placed = _by_tensor(tuple(tensors), gradients)
        return (None, *(x if needed else None for x, needed in zip(placed, ctx.needs_input_grad[1:], strict=True)))

    @staticmethod
    def jvp(ctx: Any, _: Any, *tangents: Any) -> Any:
        """Apply Jvp."""
        *tensors, out, lse = ctx.saved_tensors
        return Jvp.apply(ctx.settings, out, lse, *_moving(tuple(tensors), tangents), *tensors)


class Backward(_Function):
    """(settings, dout, out, lse, dlse, *tensors) -> the gradients of DIFFERENTIATED, then of the captured arrays."""

    arity = 4

    @staticmethod
    def forward(settings: Settings, dout: Any, out: Any, lse: Any, dlse: Any, *tensors: Any) -> Any:
        """Call the operator."""
        saved = (dout, out, lse, dlse, True)
        if not settings.mods:
            return _elements(attention_backward(*tensors, *settings.others, *saved))
        wanted = [x.is_floating_point() for x in tensors[COUNT:]]
        arguments = settings.operator_arguments(tensors)
        *gradients, dcaptured = modified_attention_backward(*arguments, *saved, wanted)
        return _elements((*gradients, *dcaptured))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Save the inputs."""
        ctx.settings, *tensors = inputs
        _save(ctx, *tensors)

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:
        """Apply DoubleBackward; the inputs' gradients include the part through out and lse."""
        dout, out, lse, dlse, *tensors = ctx.saved_tensors
        ddout, ddlse, *gradients = DoubleBackward.apply(ctx.settings, dout, out, lse, dlse, *cotangents, *tensors)
        placed = _by_tensor(tuple(tensors), tuple(gradients))
        return (None, ddout, None, None, None if dlse is None else ddlse, *placed)

    @staticmethod
    def jvp(ctx: Any, _: Any, tdout: Any, tout: Any, tlse: Any, tdlse: Any, *tangents: Any) -> Any:
        """Return the gradients' tangents: DoubleBackward (the Hessian is symmetric) + Backward of (tdout, tdlse)."""
        dout, out, lse, dlse, *tensors = ctx.saved_tensors
        direction = _moving(tuple(tensors), tangents)
        terms = []
        if any(t is not None for t in direction):
            second = DoubleBackward.apply(ctx.settings, dout, out, lse, dlse, *direction, *tensors)
            terms.append(second[2:])
        tdout, tdlse = (None if t is None or t._is_zerotensor() else t for t in (tdout, tdlse))
        if tdout is not None or tdlse is not None:
            tdout = torch.zeros_like(dout) if tdout is None else tdout
            terms.append(Backward.apply(ctx.settings, tdout, out, lse, tdlse, *tensors))
        return tuple(_sum(parts) for parts in zip(*terms, strict=True))


class Jvp(_Function):
    """(settings, out, lse, *direction, *tensors) -> (tout, tlse)."""

    @staticmethod
    def forward(settings: Settings, out: Any, lse: Any, *others: Any) -> Any:
        """Call the operator."""
        direction, tensors = _halves(others)
        arguments = settings.operator_arguments(tensors)
        places = len(DIFFERENTIATED)
        _, _, tout, tlse = attention_jvp(*arguments, *direction[:places], list(direction[places:]))
        return tout, tlse

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Save the inputs."""
        ctx.settings, *tensors = inputs
        _save(ctx, *tensors)

    @staticmethod
    def backward(ctx: Any, dtout: Any, dtlse: Any) -> Any:
        """Apply DoubleBackward for the gradients of the inputs, and Backward for those of the tangents.

        <dtout, tout> is the JVP of <dtout, out>: it is linear in the tangents, with the gradients of a backward as
        coefficients.
        """
        out, lse, *others = ctx.saved_tensors
        direction, tensors = _halves(tuple(others))
        dtout = torch.zeros_like(out) if dtout is None else dtout
        _, _, *gradients = DoubleBackward.apply(ctx.settings, dtout, out, lse, dtlse, *direction, *tensors)
        by_direction = Backward.apply(ctx.settings, dtout, out, lse, dtlse, *tensors)
        of_direction = [None if t is None else x for t, x in zip(direction, by_direction, strict=True)]
        return (None, None, None, *of_direction, *_by_tensor(tensors, tuple(gradients)))

    jvp = staticmethod(refuse_third_derivative)

    @classmethod
    def _folds(cls, tensors: tuple[Any, ...]) -> bool:
        direction, call = _halves(tensors[2:])
        return call[0].numel() > 0 and all(x is None for x in (*direction[3:], *call[3:]))


class DoubleBackward(_Function):
    """(settings, dout, out, lse, dlse, *direction, *tensors) -> (ddout, ddlse, *gradients as of Backward)."""

    @staticmethod
    def forward(settings: Settings, dout: Any, out: Any, lse: Any, dlse: Any, *others: Any) -> Any:
        """Call the operator."""
        direction, tensors = _halves(others)
        wanted = [x.is_floating_point() for x in tensors[COUNT:]] if settings.mods else []
        places = len(DIFFERENTIATED)
        *gradients, dcaptured, ddout, ddlse = attention_double_backward(
            *settings.operator_arguments(tensors), dout, out, lse, dlse, True, wanted,
            *direction[:places], list(direction[places:]),
        )  # fmt: skip
        return (ddout, ddlse, *_elements((*gradients, *dcaptured)))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Save nothing, because there is no third derivative."""

    backward = staticmethod(refuse_third_derivative)
    jvp = staticmethod(refuse_third_derivative)

    @classmethod
    def _folds(cls, tensors: tuple[Any, ...]) -> bool:
        direction, call = _halves(tensors[4:])
        return call[0].numel() > 0 and all(x is None for x in (*direction[3:], *call[3:]))


def _elements(gradients: Any) -> tuple[Any, ...]:
    """Return the gradients, with None for the empty tensors that an operator returns for absent ones."""
    return tuple(None if x.dim() == 1 and x.numel() == 0 else x for x in gradients)


def _halves(others: tuple[Any, ...]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Split `others` into (direction, tensors), each of which ends with one entry per captured array."""
    captured = (len(others) - len(DIFFERENTIATED) - COUNT) // 2
    return others[: len(DIFFERENTIATED) + captured], others[len(DIFFERENTIATED) + captured :]


def _sum(parts: tuple[Any, ...]) -> Any:
    """Return the sum of the parts that are not None; None if all are."""
    present = [x for x in parts if x is not None]
    return sum(present[1:], present[0]) if present else None


def _apply_attention(*arguments: Any) -> Any:
    return Attention.apply(Settings(arguments[len(TENSORS) :], ""), *arguments[: len(TENSORS)])


def _apply_modified_attention(*arguments: Any) -> Any:
    *plain, captured, mods = arguments
    return Attention.apply(Settings(tuple(plain[len(TENSORS) :]), mods), *plain[: len(TENSORS)], *captured)


# A graph of torch.compile may call the operators inside a transform of torch.func. These kernels precede torch.func's
# own, which would take the results for constants in forward mode.
library.impl("attention_forward", _apply_attention, "FuncTorchDynamicLayerFrontMode")
library.impl("modified_attention_forward", _apply_modified_attention, "FuncTorchDynamicLayerFrontMode")
