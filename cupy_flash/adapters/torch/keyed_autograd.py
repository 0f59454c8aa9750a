"""Keyed plans under autograd: a node of calls on q, k and v alone, which keeps with it the keyed plans of its backward.

The node saves q, k, v, out and lse, as that of the operator does, and has its name. What its forward launches is the
entry that calls without gradients have. A backward that cannot be served calls the operator, which records second
derivatives. A call under hooks of saved tensors has no such node, because they may replace what is saved.
"""

from __future__ import annotations

from typing import Any

import torch

from ... import keyed_plan
from ...problem.build import pose
from ...problem.records import Options, Packed, Saved
from .keyed_plan import allocator, is_changed, read
from .op import TENSORS, Call, arguments_of, attention_backward, on_device_of

BACKWARDS = 16  # maximum backwards that are kept with a forward
NO_OTHERS = (None,) * (len(TENSORS) - 3)
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
    if entry is not None and entry.others is None and packed is None and len(call[1]) == 3:
        entry.others = arguments_of(arrays, options, None, False)[len(TENSORS) :]


def _forward(ctx: Any, q: Any, k: Any, v: Any, results: list[Any], entry: keyed_plan.Entry) -> Any:
    out, lse = results
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, out, lse)
    ctx.entry = entry
    return out, lse


def _backward(ctx: Any, dout: Any, dlse: Any) -> Any:
    q, k, v, out, lse = ctx.saved_tensors
    if dout is None:  # only lse was used
        dout = out.new_zeros(()).expand(out.shape)
    gradients = _gradients(ctx.entry, q, k, v, dout, out, lse, dlse)
    needed = ctx.needs_input_grad
    return (*[gradients[n] if needed[n] else None for n in range(3)], None, None)


# The name of the operator's node.
_Node: Any = type(
    "cupy_flash_attention_forward",
    (torch.autograd.Function,),
    {"forward": staticmethod(_forward), "backward": staticmethod(_backward)},
)


def _gradients(entry: Any, q: Any, k: Any, v: Any, dout: Any, out: Any, lse: Any, dlse: Any) -> Any:
    """Return dq, dk and dv, first of the results."""
    call = None
    if not (torch.compiler.is_compiling() or torch.is_grad_enabled() or is_changed()):
        described = read([q, k, v, dout, out, lse, dlse])
        if described is not None:
            facts, inputs, addresses = described
            call = (*keyed_plan.facts_of_process(entry.others[BACKEND]), *facts), inputs, addresses
    kept = None if call is None else entry.backwards.get(call[0])
    outputs = None if kept is None else kept.run(call)
    if outputs is not None:
        return outputs
    arguments, saved = (q, k, v, *NO_OTHERS, *entry.others), Saved(dout, out, lse, dlse, False)
    gradients = attention_backward(*arguments, *saved[:5])
    if call is not None and call[0] not in entry.backwards:
        if len(entry.backwards) >= BACKWARDS:
            entry.backwards.clear()
        with on_device_of(q):
            problem, operands = Call(*arguments).pose(saved)
        entry.backwards[call[0]] = keyed_plan.backward_entry(problem, operands, allocator)
    return gradients
