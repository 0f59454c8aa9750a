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
from ...mods.trace import decoded
from ...problem.build import pose
from ...problem.records import DIFFERENTIATED, Options, Packed, Saved
from .keyed_plan import TORCH, allocator, is_changed, read
from .op import (
    TENSORS,
    Call,
    arguments_of,
    attention_backward,
    mod_of_options,
    modified_attention_backward,
    on_device_of,
)

BACKWARDS = 16  # maximum backwards that are kept with a forward
COUNT = len(TENSORS)  # the place of the first array that mods captured, behind those of TENSORS
PLACES = tuple(TENSORS.index(name) for name in DIFFERENTIATED)
PLACE_OF_OUTPUT = {f"d{name}": place for name, place in zip(DIFFERENTIATED, PLACES, strict=True)}
BIAS = TENSORS.index("bias")
# The places of values inside keys, for which a call has its keys twice: {place: that of the tensor at it}
VIEWS = {TENSORS.index(view): TENSORS.index(of) for of, view in (("k", "v"), ("k_descale", "v_descale"))}
BACKEND = Call._fields.index("backend") - COUNT  # that of the arguments that are not tensors


def run_recorded(call: keyed_plan.Call) -> Any:
    """Return (out, lse) of a call, recorded for autograd; None if it has no entry that can be."""
    entry = keyed_plan.entry_of(call)
    if entry is None or entry.others is None or torch._C._autograd._top_saved_tensors_default_hooks(False) is not None:
        return None
    outputs = entry.run(call)
    return None if outputs is None else _APPLY[entry.mods != ""](*call[1], outputs[:2], entry)


def keep_recorded(
    call: keyed_plan.Call, function: str, arrays: tuple[Any, Any, Any], options: Options, packed: Packed | None
) -> None:
    """Leave the entry of a call that the operator has run, with what its backward needs."""
    if not keyed_plan.is_known(call):
        keyed_plan.keep(call, *pose(function, arrays, options, packed), allocator)
    entry = keyed_plan.entry_of(call)
    if entry is not None and entry.others is None:
        arguments, mod = arguments_of(arrays, options, packed, False), mod_of_options(options)
        given = {n: n for n in range(COUNT) if arguments[n] is not None}
        if arrays[2] is None:
            given |= {place: of for place, of in VIEWS.items() if of in given}
        places = [given[n] for n in sorted(given)]
        if mod is not None:
            places += range(COUNT, COUNT + len(mod.arrays))
            entry.mods = mod.encoded
        entry.places, entry.others = tuple(places), arguments[COUNT:]


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
    by_captured = tuple([asked for place, asked in zip(places, needed, strict=False) if place >= COUNT])
    gradients = _gradients(ctx.entry, tensors, (dout, out, lse, dlse, by_bias), by_captured)
    return (  # of two places of one tensor, the first has its gradient
        *[gradients.pop(place, None) if asked else None for place, asked in zip(places, needed, strict=False)],
        None,
        None,
    )


def _apply_of(name: str) -> Any:
    """Return `apply` of a node without what torch.autograd.Function adds for torch.func, whose tensors have no key."""
    methods = {"forward": staticmethod(_forward), "backward": staticmethod(_backward)}
    return super(torch.autograd.Function, type(name, (torch.autograd.Function,), methods)).apply


# Without and with mods, by the names that the operators' nodes have.
_APPLY: tuple[Any, ...] = tuple(
    _apply_of(name)
    for name in (
        "cupy_flash_attention_forward",
        "GeneratedBackwardFor_cupy_flash_modified_attention_forward_default",
    )
)


def _gradients(
    entry: keyed_plan.Entry, tensors: list[Any], saved: tuple[Any, Any, Any, Any, bool], by_captured: tuple[bool, ...]
) -> dict[int, Any]:
    """Return the gradients by the place of their tensor; those of bias and captured arrays only if they are wanted.

    `saved` has dout, out, lse, dlse and whether the gradient of bias is wanted.
    """
    call, others = None, entry.others or ()
    if not (torch.compiler.is_compiling() or torch.is_grad_enabled() or is_changed()):
        plain = len(tensors) - len(by_captured)
        results = saved[:4] if saved[3] is not None else saved[:3]
        inputs = [*tensors[:plain], *results, *tensors[plain:]]  # in the order of those of the launches
        described = read(inputs) if TORCH.types.issuperset(map(type, inputs)) else None
        if described is not None:
            facts, addresses = described
            of_process = keyed_plan.facts_of_process(others[BACKEND])
            call = (*of_process, len(results), saved[4], by_captured, *facts), inputs, addresses
    if call is not None and (kept := entry.backwards.get(call[0])) is not None:
        outputs = kept.run(call)
        if outputs is not None:
            return dict(zip(kept.places, outputs, strict=False))  # workspaces follow
    given = dict(zip(entry.places, tensors, strict=True))
    arguments = (*[given.get(place) for place in range(COUNT)], *others)
    captured = [x for place, x in given.items() if place >= COUNT]
    if entry.mods:
        *returned, dcaptured = modified_attention_backward(*arguments, captured, entry.mods, *saved, by_captured)
        # An array that only mask_mod reads has no gradient.
        by_slot = zip(dcaptured, captured, by_captured, strict=True)
        gradients = {COUNT + n: dx for n, (dx, x, asked) in enumerate(by_slot) if asked and dx.shape == x.shape}
    else:
        returned, gradients = attention_backward(*arguments, *saved), {}
    gradients |= zip(PLACES, returned, strict=True)
    if call is not None and call[0] not in entry.backwards:
        if len(entry.backwards) >= BACKWARDS:
            entry.backwards.clear()
        with on_device_of(tensors[0]):
            mod = decoded(entry.mods, captured) if entry.mods else None
            problem, operands = Call(*arguments).pose(Saved(*saved, by_captured if entry.mods else None), mod)
        entry.backwards[call[0]] = new = keyed_plan.backward_entry(problem, operands, allocator)
        if new is not None:
            of_captured = {f"gradient{slot}": COUNT + slot for slot in range(len(captured))}
            by_output = PLACE_OF_OUTPUT | of_captured
            new.places = tuple([by_output[name] for name in new.outputs if name in by_output])  # workspaces follow
    return gradients
