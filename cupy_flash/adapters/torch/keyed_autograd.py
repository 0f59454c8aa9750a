"""Keyed plans under autograd: a node of calls that have an entry, which keeps with it the keyed plans of its backward.

The node saves the call's tensors, out and lse, as that of the operator does, and has its name. What its forward
launches is the entry that calls without gradients have. A backward that cannot be served calls the operator, which
records second derivatives. A call under hooks of saved tensors has no such node, because they may replace what is
saved.
"""

from __future__ import annotations

from typing import Any

import torch

from ... import keyed_plan
from ...problem.build import pose
from ...problem.records import DIFFERENTIATED, Options, Packed, Saved
from .keyed_plan import allocator, is_changed, read
from .op import TENSORS, Call, arguments_of, attention_backward, on_device_of

BACKWARDS = 16  # maximum backwards that are kept with a forward
PLACES = tuple(TENSORS.index(name) for name in DIFFERENTIATED)
BIAS = TENSORS.index("bias")
BACKEND = Call._fields.index("backend") - len(TENSORS)  # that of the arguments that are not tensors


def run_recorded(call: keyed_plan.Call) -> Any:
    """Return (out, lse) of a call, recorded for autograd; None if it has no entry that can be."""
    entry = keyed_plan.entry_of(call)
    if entry is None or entry.others is None or torch._C._autograd._top_saved_tensors_default_hooks(False) is not None:
        return None
    outputs = entry.run(call)
    return None if outputs is None else _Node.apply(*call[1], outputs[:2], entry)


def keep_recorded(
    call: keyed_plan.Call, function: str, arrays: tuple[Any, Any, Any], options: Options, packed: Packed | None
) -> None:
    """Leave the entry of a call that the operator has run, with what its backward needs."""
    if not keyed_plan.is_known(call):
        keyed_plan.keep(call, *pose(function, arrays, options, packed), allocator)
    entry = keyed_plan.entry_of(call)
    if entry is not None and entry.others is None:
        arguments = arguments_of(arrays, options, packed, False)
        entry.places = tuple([n for n in range(len(TENSORS)) if arguments[n] is not None])
        entry.others = arguments[len(TENSORS) :]


def _forward(ctx: Any, *arguments: Any) -> Any:
    *tensors, (out, lse), ctx.entry = arguments
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors, out, lse)
    return out, lse


def _backward(ctx: Any, dout: Any, dlse: Any) -> Any:
    *tensors, out, lse = ctx.saved_tensors
    if dout is None:  # only lse was used
        dout = out.new_zeros(()).expand(out.shape)
    needed, places = ctx.needs_input_grad, ctx.entry.places
    by_bias = BIAS in places and needed[places.index(BIAS)]
    gradients = _gradients(ctx.entry, tensors, (dout, out, lse, dlse), by_bias)
    return (
        *[gradients.get(place) if asked else None for place, asked in zip(places, needed, strict=False)],
        None,
        None,
    )


# The name of the operator's node.
_Node: Any = type(
    "cupy_flash_attention_forward",
    (torch.autograd.Function,),
    {"forward": staticmethod(_forward), "backward": staticmethod(_backward)},
)


def _gradients(
    entry: keyed_plan.Entry, tensors: list[Any], saved: tuple[Any, Any, Any, Any], bias_gradient: bool
) -> dict[int, Any]:
    """Return the gradients by the place of their tensor among TENSORS; that of bias only if it is wanted."""
    call, others = None, entry.others or ()
    if not (torch.compiler.is_compiling() or torch.is_grad_enabled() or is_changed()):
        described = read([*tensors, *saved])
        if described is not None:
            facts, inputs, addresses = described
            call = (*keyed_plan.facts_of_process(others[BACKEND]), bias_gradient, *facts), inputs, addresses
    if call is not None and (kept := entry.backwards.get(call[0])) is not None:
        outputs = kept.run(call)
        if outputs is not None:
            return dict(zip(kept.places, outputs, strict=False))  # workspaces follow
    given = dict(zip(entry.places, tensors, strict=True))
    arguments = (*[given.get(place) for place in range(len(TENSORS))], *others)
    gradients = dict(zip(PLACES, attention_backward(*arguments, *saved, bias_gradient), strict=True))
    if call is not None and call[0] not in entry.backwards:
        if len(entry.backwards) >= BACKWARDS:
            entry.backwards.clear()
        with on_device_of(tensors[0]):
            problem, operands = Call(*arguments).pose(Saved(*saved, bias_gradient))
        entry.backwards[call[0]] = new = keyed_plan.backward_entry(problem, operands, allocator)
        if new is not None:
            new.places = tuple([TENSORS.index(name) for name in problem.differentiated])
    return gradients
