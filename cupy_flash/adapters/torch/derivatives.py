"""Forward mode and second order as torch operators: cupy_flash::attention_jvp and ::attention_double_backward.

The second is the backward of cupy_flash::attention_backward, so that gradients with create_graph=True can be
differentiated again. Both have the arguments of a call with mods; `mods` is "" without mods.
"""

from __future__ import annotations

from typing import Any

import torch

from ... import dispatch
from ...mods.trace import Mod, decoded
from ...problem.records import DIFFERENTIATED, Tangents
from .autograd_kernel import register_autograd
from .op import (
    GRADIENTS,
    MODS,
    SAVED,
    SCHEMA,
    TENSORS,
    Call,
    attention_backward,
    fake_captured,
    fake_gradients,
    library,
    on_device_of,
    require_tensors_on_one_device,
    returned,
    run_backward,
    split_modified,
)

DIRECTION = ", ".join([*(f"Tensor? t{name}" for name in DIFFERENTIATED), "Tensor?[] tcaptured"])
BACKWARD = f"{SCHEMA}, {MODS}, {SAVED}, bool[] captured_gradient"
for schema in (
    f"attention_jvp({SCHEMA}, {MODS}, {DIRECTION}) -> (Tensor out, Tensor lse, Tensor tout, Tensor tlse)",
    f"attention_double_backward({BACKWARD}, {DIRECTION})"
    f" -> ({GRADIENTS}, Tensor[] dcaptured, Tensor ddout, Tensor ddlse)",
):
    library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
attention_jvp = torch.ops.cupy_flash.attention_jvp.default
attention_double_backward = torch.ops.cupy_flash.attention_double_backward.default

IN_DIRECTION = len(Tangents._fields)


def _mod(mods: str, captured: list[Any]) -> Mod | None:
    return decoded(mods, captured) if mods else None


def _split_jvp(arguments: tuple[Any, ...]) -> tuple[Call, list[Any], str, Tangents]:
    *plain, captured, mods = arguments[:-IN_DIRECTION]
    return Call(*plain), captured, mods, Tangents._make(arguments[-IN_DIRECTION:])


def _jvp(*arguments: Any) -> tuple[Any, ...]:
    call, captured, mods, tangents = _split_jvp(arguments)
    with on_device_of(call.q):
        return tuple(x.result() for x in dispatch.jvp(*call.pose(None, _mod(mods, captured), tangents)))


def _double_backward(*arguments: Any) -> tuple[Any, ...]:
    call, captured, mods, saved = split_modified(arguments[:-IN_DIRECTION])
    tangents = Tangents._make(arguments[-IN_DIRECTION:])
    with on_device_of(call.q):
        second = dispatch.double_backward(*call.pose(saved, _mod(mods, captured), tangents))
    gradients = returned(call, second[: len(DIFFERENTIATED)])
    dcaptured = list(returned(call, second.dcaptured or (None,) * len(captured)))
    return (*gradients, dcaptured, *returned(call, (second.ddout, second.ddlse)))


library.impl("attention_jvp", _jvp, "CompositeExplicitAutograd")
library.impl("attention_double_backward", _double_backward, "CompositeExplicitAutograd")


@torch.library.register_fake("cupy_flash::attention_jvp", lib=library)
def _fake_jvp(*arguments: Any) -> tuple[Any, ...]:
    call, captured, _, _ = _split_jvp(arguments)
    require_tensors_on_one_device(call, captured=captured)
    lse_dtype = torch.float64 if call.q.dtype == torch.float64 else torch.float32
    out, tout = (call.q.new_empty((*call.q.shape[:-1], call.columns_of_out)) for _ in range(2))
    lse, tlse = (call.q.new_empty(call.lse_shape, dtype=lse_dtype) for _ in range(2))
    return out, lse, tout, tlse


@torch.library.register_fake("cupy_flash::attention_double_backward", lib=library)
def _fake_double_backward(*arguments: Any) -> tuple[Any, ...]:
    call, captured, mods, saved = split_modified(arguments[:-IN_DIRECTION])
    require_tensors_on_one_device(call, saved, captured)
    dcaptured = fake_captured(call, captured, mods, saved) if mods else []
    tensors: tuple[Any, ...] = (saved.dout, saved.lse)
    ddout, ddlse = (x.new_empty(x.shape) for x in tensors)
    return (*fake_gradients(call, saved), dcaptured, ddout, ddlse)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.set_materialize_grads(False)
    count = len(Call._fields)
    if len(inputs) == count + len(SAVED.split(", ")):  # a call without mods
        inputs = (*inputs[:count], [], "", *inputs[count:], [])
    call, captured, ctx.mods, saved = split_modified(inputs)
    ctx.save_for_backward(*call[: len(TENSORS)], *captured, *saved[:4])
    ctx.others, ctx.bias_gradient = call[len(TENSORS) :], saved.bias_gradient


def _differentiate_backward(ctx: Any, *cotangents: Any) -> tuple[Any, ...]:
    """Return the gradients with respect to the arguments of attention_backward or modified_attention_backward."""
    *tensors, dout, out, lse, dlse = ctx.saved_tensors
    tensors, captured = tensors[: len(TENSORS)], tensors[len(TENSORS) :]
    has_mods = ctx.mods != ""
    of_inputs, of_captured = cotangents[: len(DIFFERENTIATED)], list(cotangents[-1] or ()) if has_mods else []
    needed = dict(zip(Call._fields, ctx.needs_input_grad, strict=False))
    wanted = list(ctx.needs_input_grad[len(Call._fields)]) if has_mods else []
    tcaptured = [
        t if t is not None and t.shape == x.shape else None for t, x in zip(of_captured, captured, strict=True)
    ]
    *gradients, dcaptured, ddout, ddlse = attention_double_backward(
        *tensors, *ctx.others, captured, ctx.mods, dout, out, lse, dlse, needed["bias"], wanted,
        *_present(of_inputs, tensors), tcaptured,
    )  # fmt: skip
    by_input = dict(zip(DIFFERENTIATED, gradients, strict=True))
    returned_gradients = [by_input.get(name) if needed[name] else None for name in Call._fields]
    # The saved out and lse get no gradients: those of the inputs include the parts through them.
    of_saved = [ddout, None, None, None if dlse is None else ddlse, None]
    if not has_mods:
        return (*returned_gradients, *of_saved)
    by_slot = zip(dcaptured, captured, wanted, strict=True)
    return (
        *returned_gradients,
        [dx if asked and dx.shape == x.shape else None for dx, x, asked in by_slot],
        None,
        *of_saved,
        None if wanted else [],  # torch takes an empty list of bools for one of tensors
    )


def _present(cotangents: Any, tensors: Any) -> list[Any]:
    """Return the cotangents of DIFFERENTIATED; None for a gradient that was not requested and so has no elements."""
    named = dict(zip(TENSORS, tensors, strict=True))
    pairs = zip(DIFFERENTIATED, cotangents, strict=True)
    return [
        t if t is not None and named[name] is not None and t.shape == named[name].shape else None for name, t in pairs
    ]


def refuse_third_derivative(*_: Any) -> Any:
    """Raise RuntimeError: there are no third derivatives."""
    raise RuntimeError(
        "cupy_flash has no third derivative of attention, and no second one in forward mode alone: what an "
        "attention_double_backward or a tangent of attention_jvp returned cannot be differentiated this way again"
    )


register_autograd(library, attention_backward, run_backward, _differentiate_backward, _save)
torch.library.register_autograd(
    "cupy_flash::modified_attention_backward", _differentiate_backward, setup_context=_save, lib=library
)
for name in ("attention_jvp", "attention_double_backward"):
    torch.library.register_autograd(f"cupy_flash::{name}", refuse_third_derivative, lib=library)
