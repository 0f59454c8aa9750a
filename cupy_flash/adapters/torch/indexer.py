"""select_keys and selection_loss on tensors, as torch operators; the loss has a backward."""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from ... import dispatch
from ...problem.indexer import Rule, pose_indexer
from .op import (
    CAUSAL,
    as_index,
    as_number,
    causal_name,
    on_device_of,
    refuse_tangents,
    require_one_device,
    require_tensor,
)

LOSS = "Tensor q_idx, Tensor weights, Tensor k_idx, Tensor selected, Tensor target, Tensor? row_weights"
library = torch.library.Library("cupy_flash", "FRAGMENT")
for schema in (
    "select_keys(Tensor q_idx, Tensor weights, Tensor k_idx, Tensor? kv_lengths, Tensor? block_table, SymInt n, "
    "str causal, SymInt block, SymInt local, float scale) -> Tensor",
    f"selection_loss({LOSS}) -> Tensor",
    f"selection_loss_backward({LOSS}, Tensor dloss) -> (Tensor dq_idx, Tensor dweights, Tensor dk_idx)",
):
    library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
_select = torch.ops.cupy_flash.select_keys.default
_loss = torch.ops.cupy_flash.selection_loss.default
_loss_backward = torch.ops.cupy_flash.selection_loss_backward.default

OF_SELECT = ("q", "weights", "k", "kv_lengths", "block_table")
OF_LOSS = ("q", "weights", "k", "selected", "target", "row_weights")


def select_keys(given: dict[str, Any], rule: Rule) -> Any:
    """Return the lists of `cupy_flash.select_keys`."""
    try:
        tensors = _tensors(given)
        numbers = (
            as_index(rule.n),
            causal_name(rule.causal),
            as_index(rule.block),
            as_index(rule.local),
            as_number(rule.scale),
        )
    except (TypeError, ValueError):
        if not torch.compiler.is_compiling():
            pose_indexer("select_keys", given, rule)  # raises an error with the same reason and all others
        raise
    return _select(*(None if x is None else x.detach() for x in tensors), *numbers)


def selection_loss(given: dict[str, Any]) -> Any:
    """Return the loss of `cupy_flash.selection_loss`, recorded for autograd."""
    try:
        tensors = _tensors(given)
    except TypeError:
        if not torch.compiler.is_compiling():
            pose_indexer("selection_loss", given)
        raise
    refuse_tangents("selection_loss", tensors[:3])
    # The others are constants: the graph does not go on to what computed the target.
    return _loss(*tensors[:3], *(None if x is None else x.detach() for x in tensors[3:]))


def _tensors(given: dict[str, Any]) -> tuple[Any, ...]:
    for x in given.values():
        if x is not None:
            require_tensor(x)
    return tuple(given.values())


def _run_select(*arguments: Any) -> Any:
    *tensors, n, causal, block, local, scale = arguments
    with on_device_of(tensors[0]):
        given, rule = dict(zip(OF_SELECT, tensors, strict=True)), Rule(n, CAUSAL[causal], block, local, scale)
        return dispatch.select_keys(*pose_indexer("select_keys", given, rule)).result()


def _run_loss(*tensors: Any) -> Any:
    with on_device_of(tensors[0]):
        given = dict(zip(OF_LOSS, tensors, strict=True))
        return dispatch.selection_loss(*pose_indexer("selection_loss", given)).result()


def _run_loss_backward(*tensors: Any) -> tuple[Any, ...]:
    with on_device_of(tensors[0]):
        given = dict(zip((*OF_LOSS, "dloss"), tensors, strict=True))
        results = dispatch.selection_loss_gradients(*pose_indexer("selection_loss", given))
        return tuple(x.result() for x in results[1:])


library.impl("select_keys", _run_select, "CompositeExplicitAutograd")
library.impl("selection_loss", _run_loss, "CompositeExplicitAutograd")
library.impl("selection_loss_backward", _run_loss_backward, "CompositeExplicitAutograd")


@torch.library.register_fake("cupy_flash::select_keys", lib=library)
def _fake_select(*arguments: Any) -> Any:
    q, n = arguments[0], arguments[len(OF_SELECT)]
    require_one_device("select_keys", dict(zip(OF_SELECT, arguments, strict=False)))
    return q.new_empty((q.shape[0], 1, q.shape[1], n), dtype=torch.int32)


@torch.library.register_fake("cupy_flash::selection_loss", lib=library)
def _fake_loss(*tensors: Any) -> Any:
    require_one_device("selection_loss", dict(zip(OF_LOSS, tensors, strict=True)))
    q = tensors[0]
    return q.new_empty((), dtype=torch.float64 if q.dtype == torch.float64 else torch.float32)


@torch.library.register_fake("cupy_flash::selection_loss_backward", lib=library)
def _fake_loss_backward(*tensors: Any) -> tuple[Any, ...]:
    return tuple(x.new_empty(x.shape) for x in tensors[:3])


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(*inputs)


def _differentiate(ctx: Any, dloss: Any) -> tuple[Any, ...]:
    gradients = _loss_backward(*ctx.saved_tensors, dloss)
    needed = zip(gradients, ctx.needs_input_grad, strict=False)
    return (*(dx if is_needed else None for dx, is_needed in needed), None, None, None)


def _refuse_second_derivative(*_: Any) -> NoReturn:
    raise RuntimeError("cupy_flash has no second derivative of selection_loss")


torch.library.register_autograd("cupy_flash::selection_loss", _differentiate, setup_context=_save, lib=library)
torch.library.register_autograd("cupy_flash::selection_loss_backward", _refuse_second_derivative, lib=library)
