"""attention_weights, top_weights and key_importance on tensors, as one torch operator with a backward.

cupy_flash::attention_weights returns (result, keys), the keys of top_weights or a tensor without elements. lse is an
input of its own, so that autograd continues into the call of attention that returned it. Its options are those of
cupy_flash::attention_forward, in which k takes the place of v.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch

from ... import dispatch
from ...mods.derive import floating_reads
from ...mods.trace import Mod, decoded
from ...problem.records import CacheOptions, Options, Packed, SavedWeights
from ...problem.weights import (
    EACH,
    IMPORTANCE,
    MEAN,
    TOP,
    WEIGHTS,
    Wish,
    pose_weights,
    pose_weights_with_cache,
)
from .kv_cache import recorded
from .op import (
    MODS,
    SCHEMA,
    TENSORS,
    Call,
    absent,
    arguments_of,
    as_index,
    as_number,
    is_dtensor,
    mod_of_options,
    on_device_of,
    refuse_tangents,
    require_one_device,
    require_tensor,
)
from .transforms import forward

LISTED = "list"  # `heads` of a list of heads
WANTED = {
    "lse": "Tensor",
    "row_weights": "Tensor?",
    "kind": "str",
    "rows": "SymInt[]?",
    "heads": "str",
    "chosen": "SymInt[]",
    "limit": "float?",
    "n": "SymInt",
}
ARGUMENTS = f"{SCHEMA}, {MODS}, " + ", ".join(f"{kind} {name}" for name, kind in WANTED.items())
SAVED = "Tensor gradient, Tensor? keys, bool bias_gradient, bool[] captured_gradient"
library = torch.library.Library("cupy_flash", "FRAGMENT")
for schema in (
    f"attention_weights({ARGUMENTS}) -> (Tensor result, Tensor keys)",
    f"attention_weights_backward({ARGUMENTS}, {SAVED})"
    " -> (Tensor dq, Tensor dk, Tensor dlse, Tensor dbias, Tensor drow_weights, Tensor[] dcaptured)",
):
    library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
attention_weights = torch.ops.cupy_flash.attention_weights.default
attention_weights_backward = torch.ops.cupy_flash.attention_weights_backward.default
COUNT = len(Call._fields)


class Wanted(NamedTuple):
    """The operators' arguments that say what a call wants of the probabilities, in the order of WANTED."""

    lse: Any
    row_weights: Any
    kind: str
    rows: Any
    heads: str
    chosen: Any
    limit: float | None
    n: Any

    @property
    def wish(self) -> Wish:
        """The arguments rows, heads, limit, n and row_weights of the call."""
        heads = list(self.chosen) if self.heads == LISTED else self.heads
        n = self.n if self.kind == TOP else None
        return Wish(self.kind, self.rows, heads, self.limit, n, self.row_weights)


def attention_and_weights(q: Any, k: Any, v: Any, options: Options, heads: str, limit: float | None) -> tuple[Any, Any]:
    """Return out of attention, and the weights of all rows, before dropout; `heads` is "each" or "mean"."""
    out, lse = forward("attention", (q, k, v), replace(options, return_lse=True))
    return out, compute(WEIGHTS, (q, k, lse), options, Wish(WEIGHTS, heads=heads, limit=limit), None)[0]


def compute(
    function: str, arrays: tuple[Any, Any, Any], options: Options, wish: Wish, packed: Packed | None
) -> tuple[Any, ...]:
    """Return the results of `cupy_flash.<function>`, recorded for autograd."""
    mods = (options.score_mod, options.mask_mod)
    if torch.compiler.is_compiling() and not all(mod is None or isinstance(mod, Mod) for mod in mods):
        return _compute_outside_of_graph(function, arrays, options, wish, packed)
    return _compute(function, arrays, options, wish, packed)


def _compute(
    function: str, arrays: tuple[Any, Any, Any], options: Options, wish: Wish, packed: Packed | None
) -> tuple[Any, ...]:
    q, k, lse = arrays
    try:
        # Dropout has no effect: draw no seed.
        settings = replace(options, seed=0) if options.seed is None else options
        cast, keys, _, *others = arguments_of((q, k, k), settings, packed, fp8=False)
        mod = mod_of_options(options)
        wanted = _wanted(wish, lse, q, "thd" if packed is not None else options.layout)
    except (TypeError, ValueError):
        # torch.compile cannot trace what pose does with memory, and a DTensor has no memory of its own.
        if not torch.compiler.is_compiling() and not is_dtensor(q):
            pose_weights(function, arrays, options, wish, packed)  # raises an error with the same reason and all others
        raise
    captured, text = ([], "") if mod is None else (list(mod.arrays), mod.encoded)
    refuse_tangents(function, (cast, keys, *others, *captured, *wanted))
    result, found = attention_weights(cast, keys, keys, *others, captured, text, *wanted)
    return (result, found) if wish.kind == TOP else (result,)


_compute_outside_of_graph = torch.compiler.disable(
    _compute, reason="score_mod and mask_mod are traced in every call: pass a cupy_flash.Mod, which is traced already"
)


@torch.compiler.disable(reason="the functions of weights on a KV cache have no operator")
def compute_on_cache(function: str, arrays: tuple[Any, Any, Any], options: CacheOptions, wish: Wish) -> tuple[Any, ...]:
    """Return the results of `cupy_flash.<function>` on a KV cache, which records no gradients."""
    q, k_cache, lse = arrays
    given = {"q": q, "k_cache": k_cache, "lse": lse, "row_weights": wish.row_weights}
    with on_device_of(q):
        results = dispatch.weights(*pose_weights_with_cache(function, arrays, options, wish, recorded(given, options)))
    return tuple(x.result() for x in results)


def _wanted(wish: Wish, lse: Any, q: Any, layout: str) -> Wanted:
    """Return the operator's arguments; TypeError or ValueError for a value that its schema cannot express."""
    for tensor in (lse, *(() if wish.row_weights is None else (wish.row_weights,))):
        require_tensor(tensor)
    require_tensor(q)
    rows = wish.rows
    if isinstance(rows, slice):
        rows = range(*rows.indices(q.shape[{"thd": 0, "bshd": 1}.get(layout, 2)]))
    if rows is not None:
        rows = _whole(rows)
    heads, chosen = (wish.heads, []) if isinstance(wish.heads, str) else (LISTED, _whole(wish.heads))
    if heads not in (EACH, MEAN, LISTED) or wish.heads == LISTED:
        raise ValueError("heads must be each, mean or a list")
    n = 0 if wish.n is None else as_index(wish.n)
    return Wanted(lse, wish.row_weights, wish.kind, rows, heads, chosen, as_number(wish.limit, optional=True), n)


def _whole(values: Any) -> list[Any]:
    """Return whole numbers as a list; TypeError for something else."""
    if isinstance(values, (torch.Tensor, np.ndarray)):
        values = values.tolist()
    try:
        return [as_index(value) for value in values]
    except (TypeError, ValueError):
        raise
    except Exception as error:  # foreign objects may raise anything
        raise TypeError("rows and heads are lists of whole numbers") from error


def _split(arguments: tuple[Any, ...]) -> tuple[Call, list[Any], str, Wanted, tuple[Any, ...]]:
    """Split the arguments of an operator into (call, captured, mods, wanted, rest)."""
    captured, mods, *rest = arguments[COUNT:]
    count = len(Wanted._fields)
    return Call(*arguments[:COUNT]), captured, mods, Wanted(*rest[:count]), tuple(rest[count:])


def _pose(call: Call, captured: list[Any], mods: str, wanted: Wanted, saved: SavedWeights | None = None) -> Any:
    options = call.options(decoded(mods, captured) if mods else None)
    function = f"{wanted.kind}_varlen" if call.is_packed else wanted.kind
    return pose_weights(function, (call.q, call.k, wanted.lse), options, wanted.wish, call.packed, saved)


def _forward(*arguments: Any) -> tuple[Any, Any]:
    call, captured, mods, wanted, _ = _split(arguments)
    with on_device_of(call.q):
        result, *keys = dispatch.weights(*_pose(call, captured, mods, wanted))
    return result.result(), keys[0].result() if keys else call.q.new_empty((0,), dtype=torch.int32)


def _backward(*arguments: Any) -> tuple[Any, ...]:
    call, captured, mods, wanted, (gradient, keys, bias_gradient, captured_gradient) = _split(arguments)
    saved = SavedWeights(gradient, keys, bias_gradient, tuple(captured_gradient))
    with on_device_of(call.q):
        given = dispatch.weights_backward(*_pose(call, captured, mods, wanted, saved)).results()
    named = (given.dq, given.dk, given.dlse, given.dbias, given.drow_weights)
    of_captured = given.dcaptured or (None,) * len(captured)
    return (
        *(absent(call) if x is None else x for x in named),
        [absent(call) if x is None else x for x in of_captured],
    )


library.impl("attention_weights", _forward, "CompositeExplicitAutograd")
library.impl("attention_weights_backward", _backward, "CompositeExplicitAutograd")


@torch.library.register_fake("cupy_flash::attention_weights", lib=library)
def _fake_forward(*arguments: Any) -> tuple[Any, Any]:
    call, captured, _, wanted, _ = _split(arguments)
    tensors = {"lse": wanted.lse, "row_weights": wanted.row_weights}
    tensors |= {f"array{slot}": x for slot, x in enumerate(captured)}
    require_one_device(wanted.kind, call._asdict() | tensors)
    q, lse = call.q, call.lse_shape
    batch = call.cu_seqlens_q.shape[0] - 1 if call.is_packed else lse[0]
    width = call.max_seqlen_k if call.is_packed else call.k.shape[2 if call.layout == "bhsd" else 1]
    if call.selected is not None:
        width = call.selected.shape[-1] * (call.selected_block or 1)
    if wanted.kind == IMPORTANCE:
        accumulation = torch.float64 if q.dtype == torch.float64 else torch.float32
        return q.new_empty((batch, lse[-2], width), dtype=accumulation), q.new_empty((0,), dtype=torch.int32)
    if wanted.kind == TOP:
        shape = (*lse, wanted.n)
        return q.new_empty(shape), q.new_empty(shape, dtype=torch.int32)
    heads = {EACH: (lse[-2],), MEAN: (), LISTED: (len(wanted.chosen),)}[wanted.heads]
    rows = lse[-1] if wanted.rows is None else len(wanted.rows)
    return q.new_empty((*lse[:-2], *heads, rows, width)), q.new_empty((0,), dtype=torch.int32)


@torch.library.register_fake("cupy_flash::attention_weights_backward", lib=library)
def _fake_backward(*arguments: Any) -> tuple[Any, ...]:
    call, captured, mods, wanted, (_, _, bias_gradient, captured_gradient) = _split(arguments)
    bias = call.bias if bias_gradient else None
    named = (call.q, call.k, wanted.lse, bias, wanted.row_weights)
    floating = floating_reads(decoded(mods, captured).program) if mods else set()
    of_captured = [
        x.new_empty(x.shape) if asked and slot in floating else absent(call)
        for slot, (x, asked) in enumerate(zip(captured, captured_gradient, strict=True))
    ]
    return (*(absent(call) if x is None else x.new_empty(x.shape) for x in named), of_captured)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, Any]) -> None:
    """Save tensors only by save_for_backward: an attribute of ctx exists as long as anything refers to the graph."""
    call, captured, ctx.mods, wanted, _ = _split(inputs)
    keys = output[1] if wanted.kind == TOP else None
    ctx.save_for_backward(*call[: len(TENSORS)], wanted.lse, wanted.row_weights, keys, *captured)
    ctx.others, ctx.wanted = call[len(TENSORS) :], tuple(wanted)[2:]


def _differentiate(ctx: Any, gradient: Any, _: Any) -> tuple[Any, ...]:
    saved = ctx.saved_tensors  # read once: checkpointing frees them
    tensors, (lse, row_weights, keys, *captured) = saved[: len(TENSORS)], saved[len(TENSORS) :]
    needed = dict(zip(Call._fields, ctx.needs_input_grad, strict=False))
    wanted = list(ctx.needs_input_grad[COUNT])
    dq, dk, dlse, dbias, drow_weights, dcaptured = attention_weights_backward(
        *tensors, *ctx.others, captured, ctx.mods, lse, row_weights, *ctx.wanted,
        gradient, keys, needed["bias"], wanted,
    )  # fmt: skip
    by_input = {"q": dq, "k": dk, "bias": dbias}
    by_slot = zip(dcaptured, captured, wanted, strict=True)
    return (
        *(by_input.get(name) if needed[name] else None for name in Call._fields),
        [dx if asked and dx.shape == x.shape else None for dx, x, asked in by_slot],
        None,
        dlse if ctx.needs_input_grad[COUNT + 2] else None,
        drow_weights if ctx.needs_input_grad[COUNT + 3] else None,
        *([] if value == [] else None for value in ctx.wanted),  # torch takes an empty list for one of tensors
    )


def refuse_second_derivative(*_: Any) -> Any:
    """Raise RuntimeError: the gradients of weights cannot be differentiated again."""
    raise RuntimeError("cupy_flash has no second derivative of attention_weights, top_weights and key_importance")


torch.library.register_autograd("cupy_flash::attention_weights", _differentiate, setup_context=_save, lib=library)
torch.library.register_autograd("cupy_flash::attention_weights_backward", refuse_second_derivative, lib=library)
