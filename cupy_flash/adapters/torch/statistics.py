"""attention with statistics of its rows on tensors, as one torch operator with a backward.

cupy_flash::attention_with_statistics returns (out, lse, max, argmax, entropy); a statistic that the call does not ask
for is a tensor without elements. The gradient of max needs argmax, so a call that asks for max computes both.
"""

from __future__ import annotations

from typing import Any

import torch

from ... import dispatch
from ...mods.trace import Mod, decoded
from ...problem.build import pose
from ...problem.records import DIFFERENTIATED, Options, Packed, Saved, Statistics
from ...problem.statistics import selected
from .op import (
    GRADIENTS,
    MODS,
    SAVED,
    SCHEMA,
    TENSORS,
    Call,
    absent,
    arguments_of,
    fake_captured,
    fake_gradients,
    is_dtensor,
    mod_of_options,
    on_device_of,
    refuse_tangents,
    require_tensors_on_one_device,
    returned,
)

NAMES = Statistics._fields
ARGUMENTS = f"{SCHEMA}, {MODS}, bool[] wanted"  # wanted: whether each of NAMES is
OF_BACKWARD = f"{SAVED}, bool[] captured_gradient, Tensor? argmax, Tensor? entropy, Tensor? dmax, Tensor? dentropy"
library = torch.library.Library("cupy_flash", "FRAGMENT")
for schema in (
    f"attention_with_statistics({ARGUMENTS}) -> (Tensor out, Tensor lse, Tensor max, Tensor argmax, Tensor entropy)",
    f"attention_with_statistics_backward({SCHEMA}, {MODS}, {OF_BACKWARD}) -> ({GRADIENTS}, Tensor[] dcaptured)",
):
    library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
attention_with_statistics = torch.ops.cupy_flash.attention_with_statistics.default
attention_with_statistics_backward = torch.ops.cupy_flash.attention_with_statistics_backward.default
COUNT = len(Call._fields)


def attend(function: str, arrays: tuple[Any, Any, Any], options: Options, packed: Packed | None, fp8: bool) -> Any:
    """Return (out, lse, Statistics) of `cupy_flash.<function>`, recorded for autograd."""
    mods = (options.score_mod, options.mask_mod)
    if torch.compiler.is_compiling() and not all(mod is None or isinstance(mod, Mod) for mod in mods):
        return _attend_outside_of_graph(function, arrays, options, packed, fp8)
    return _attend(function, arrays, options, packed, fp8)


def _attend(function: str, arrays: tuple[Any, Any, Any], options: Options, packed: Packed | None, fp8: bool) -> Any:
    try:
        arguments = arguments_of(arrays, options, packed, fp8)
        mod = mod_of_options(options)
        wanted = _wanted(options, fp8)
    except (TypeError, ValueError):
        # torch.compile cannot trace what pose does with memory, and a DTensor has no memory of its own.
        if not torch.compiler.is_compiling() and not is_dtensor(arrays[0]):
            pose(function, arrays, options, packed)  # raises an error with the same reason and all others
        raise
    captured, text = ([], "") if mod is None else (list(mod.arrays), mod.encoded)
    refuse_tangents("attention with statistics", (*arguments, *captured))
    out, lse, *others = attention_with_statistics(*arguments, captured, text, wanted)
    asked = [x for name, x in zip(NAMES, others, strict=True) if name in (options.statistics or ())]
    return selected((out, lse, *asked), options)


_attend_outside_of_graph = torch.compiler.disable(
    _attend, reason="score_mod and mask_mod are traced in every call: pass a cupy_flash.Mod, which is traced already"
)


def _wanted(options: Options, fp8: bool) -> list[bool]:
    """Return whether each statistic is computed; TypeError or ValueError for what the schema cannot express."""
    asked = options.statistics
    if not isinstance(asked, (tuple, list)) or not all(isinstance(name, str) for name in asked):
        raise TypeError(f"statistics must be a tuple of {', '.join(NAMES)}, not {asked!r}")
    if not set(asked) <= set(NAMES) or len(set(asked)) < len(asked) or not options.return_lse:
        raise ValueError(f"statistics must be some of {', '.join(NAMES)}, each once, with return_lse=True")
    if fp8:
        raise ValueError("fp8=True has no statistics")
    return [name in asked or (name == "argmax" and "max" in asked) for name in NAMES]


def _forward(*arguments: Any) -> tuple[Any, ...]:
    *plain, captured, mods, wanted = arguments
    call = Call(*plain)
    names = tuple(name for name, asked in zip(NAMES, wanted, strict=True) if asked)
    with on_device_of(call.q):
        options = call.options(decoded(mods, captured) if mods else None)
        options.statistics, options.return_lse = names, True
        function = "attention_varlen" if call.is_packed else "attention"
        posed = pose(function, (call.q, call.k, call.v), options, call.packed)
        out, lse, *others = (x.result() for x in dispatch.forward(*posed))
    found = dict(zip(names, others, strict=True))
    return out, lse, *(found[name] if name in found else _unasked(call, name) for name in NAMES)


def _unasked(call: Call, name: str) -> Any:
    return call.q.new_empty((0,), dtype=_dtype(call, name))


def _dtype(call: Call, name: str) -> torch.dtype:
    if name == "argmax":
        return torch.int32
    return torch.float64 if call.q.dtype == torch.float64 else torch.float32


def _split(arguments: tuple[Any, ...]) -> tuple[Call, list[Any], str, Saved]:
    """Split the arguments of the backward into (call, captured, mods, saved)."""
    captured, mods, *saved, captured_gradient, argmax, entropy, dmax, dentropy = arguments[COUNT:]
    statistics: Statistics[Any] = Statistics(argmax=argmax, entropy=entropy)
    others = dict(captured_gradient=tuple(captured_gradient), statistics=statistics, dmax=dmax, dentropy=dentropy)
    return Call(*arguments[:COUNT]), captured, mods, Saved(*saved)._replace(**others)


def _backward(*arguments: Any) -> tuple[Any, ...]:
    call, captured, mods, saved = _split(arguments)
    with on_device_of(call.q):
        posed = call.pose(saved, decoded(mods, captured) if mods else None)
        *gradients, dcaptured = dispatch.backward(*posed)
    return (*returned(call, gradients), list(returned(call, dcaptured or (None,) * len(captured))))


library.impl("attention_with_statistics", _forward, "CompositeExplicitAutograd")
library.impl("attention_with_statistics_backward", _backward, "CompositeExplicitAutograd")


@torch.library.register_fake("cupy_flash::attention_with_statistics", lib=library)
def _fake_forward(*arguments: Any) -> tuple[Any, ...]:
    *plain, captured, _, wanted = arguments
    call = Call(*plain)
    require_tensors_on_one_device(call, captured=captured)
    q, shape = call.q, call.lse_shape
    out, lse = q.new_empty((*q.shape[:-1], call.columns_of_out)), q.new_empty(shape, dtype=_dtype(call, "lse"))
    sizes = zip(NAMES, [shape if asked else (0,) for asked in wanted], strict=True)
    return out, lse, *(q.new_empty(size, dtype=_dtype(call, name)) for name, size in sizes)


@torch.library.register_fake("cupy_flash::attention_with_statistics_backward", lib=library)
def _fake_backward(*arguments: Any) -> tuple[Any, ...]:
    call, captured, mods, saved = _split(arguments)
    require_tensors_on_one_device(call, saved, captured)
    dcaptured = fake_captured(call, captured, mods, saved) if mods else [absent(call) for _ in captured]
    return (*fake_gradients(call, saved), dcaptured)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
    """Save tensors only by save_for_backward: an attribute of ctx exists as long as anything refers to the graph."""
    ctx.set_materialize_grads(False)
    *arguments, captured, ctx.mods, wanted = inputs
    out, lse, _, argmax, entropy = output
    ctx.mark_non_differentiable(argmax)
    _, has_argmax, has_entropy = wanted
    saved = (out, lse, argmax if has_argmax else None, entropy if has_entropy else None)
    ctx.save_for_backward(*arguments[: len(TENSORS)], *saved, *captured)
    ctx.others = tuple(arguments[len(TENSORS) :])


def _differentiate(ctx: Any, dout: Any, dlse: Any, dmax: Any, _: Any, dentropy: Any) -> tuple[Any, ...]:
    saved = ctx.saved_tensors  # read once: checkpointing frees them
    tensors, (out, lse, argmax, entropy, *captured) = saved[: len(TENSORS)], saved[len(TENSORS) :]
    if dout is None:  # only lse or statistics were used
        dout = out.new_zeros(()).expand(out.shape)
    needed = dict(zip(Call._fields, ctx.needs_input_grad, strict=False))
    of_captured = list(ctx.needs_input_grad[COUNT])
    *gradients, dcaptured = attention_with_statistics_backward(
        *tensors, *ctx.others, captured, ctx.mods, dout, out, lse, dlse, needed["bias"], of_captured,
        argmax, entropy, dmax, dentropy,
    )  # fmt: skip
    by_input = dict(zip(DIFFERENTIATED, gradients, strict=True))
    by_slot = zip(dcaptured, captured, of_captured, strict=True)
    return (
        *(by_input.get(name) if needed[name] else None for name in Call._fields),
        [dx if asked and dx.shape == x.shape else None for dx, x, asked in by_slot],
        None,
        None,
    )


def refuse_second_derivative(*_: Any) -> Any:
    """Raise RuntimeError: the gradients of a call with statistics cannot be differentiated again."""
    raise RuntimeError("cupy_flash has no second derivative of attention with statistics")


torch.library.register_autograd(
    "cupy_flash::attention_with_statistics", _differentiate, setup_context=_save, lib=library
)
torch.library.register_autograd("cupy_flash::attention_with_statistics_backward", refuse_second_derivative, lib=library)
