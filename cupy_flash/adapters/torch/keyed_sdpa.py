"""Keyed plans of `scaled_dot_product_attention`: a repeated call goes from its arguments to the entry of its attention.

What the function makes of its arguments, their checks, an order of dimensions and the options of `attention`, depends
on what a key has of them. So a call without attn_mask and dropout, of three tensors (B, H, S, E) that `attention` takes
as they are or with S before H, finds the entry of that call of `attention` under a key of its own.
"""

from __future__ import annotations

from itertools import product
from types import NoneType
from typing import Any

import torch

from ... import environment, keyed_plan
from ...plan import measurements
from ...problem.records import Options
from .autograd_kernel import PLAIN
from .keyed_autograd import run_recorded
from .keyed_plan import ALIGNMENT, call_on_tensors, is_changed

# The types of the arguments that a call with a key has, in their order.
TYPES = frozenset(product(PLAIN, PLAIN, PLAIN, (NoneType,), (float,), (bool,), (NoneType, float), (bool,)))


def call_of(
    query: Any, key: Any, value: Any, attn_mask: Any, dropout_p: Any, is_causal: Any, scale: Any, enable_gqa: Any
) -> keyed_plan.Call | None:
    """Return a call of `scaled_dot_product_attention` if it has a key, else None."""
    types = (
        type(query), type(key), type(value), type(attn_mask), type(dropout_p), type(is_causal), type(scale),
        type(enable_gqa),
    )  # fmt: skip
    try:
        if types not in TYPES or dropout_p or is_changed():
            return None
        at_query, at_key, at_value = addresses = [query.data_ptr(), key.data_ptr(), value.data_ptr()]
        if not (at_query and at_key and at_value) or query.is_neg() or key.is_neg() or value.is_neg():
            return None
        of_call = (
            "sdpa", is_causal, scale, enable_gqa, environment.backend(), measurements.generation,
            query.shape, query.stride(), query.dtype, query.device, at_query % ALIGNMENT,
            key.shape, key.stride(), key.dtype, key.device, at_key % ALIGNMENT,
            value.shape, value.stride(), value.dtype, value.device, at_value % ALIGNMENT,
        )  # fmt: skip
    except (TypeError, RuntimeError):  # a class that is not hashable, or a tensor without strides or an address
        return None
    return of_call, (query, key, value), addresses


def run(call: keyed_plan.Call) -> Any:
    """Return the result of a call, recorded for autograd; None if it has no entry."""
    entry = keyed_plan.entry_of(call)
    if entry is None:
        return None
    swaps = entry.layout == "bshd"
    if swaps:
        call = call[0], [x.transpose(1, 2) for x in call[1]], call[2]
    if torch.is_grad_enabled() and torch._C._any_requires_grad(*call[1]):
        outputs = run_recorded(call)
    else:
        outputs = entry.run(call)
    if outputs is None:
        return None
    return outputs[0].transpose(1, 2) if swaps else outputs[0]


def keep(call: keyed_plan.Call, tensors: tuple[Any, Any, Any], options: Options) -> None:
    """Serve later calls from the entry of `attention` on these tensors, if they are those of the call."""
    if keyed_plan.is_known(call):
        return
    swaps = options.layout == "bshd"
    of_attention = call_on_tensors([x.transpose(1, 2) for x in tensors] if swaps else tensors, options)
    if of_attention is not None:
        keyed_plan.share(call, of_attention)
