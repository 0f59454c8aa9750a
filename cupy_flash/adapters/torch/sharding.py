"""Sharding strategies of attention's operators for torch's DTensor: batch and heads stay sharded.

A sequence, and a key/value head with its group of query heads, are computed without the others, so each rank calls the
operators on its own. A gradient of an array that all ranks share (a sink, or a bias that is broadcast) is a sum over
the ranks, `Partial` in torch. A sharded sequence needs communication: see cupy_flash.distributed.ring_attention.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from functools import partial
from typing import Any

from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding

from ...problem.records import DIFFERENTIATED, UnsupportedError
from ..axes import axes_of
from .derivatives import attention_double_backward, attention_jvp
from .kv_cache import append_then_attend_kv_cache, append_to_kv_cache, attention_with_kv_cache
from .op import (
    TENSORS,
    Call,
    attention_backward,
    attention_forward,
    modified_attention_backward,
    modified_attention_forward,
    split,
)

SPLITS = ("b", "hg")  # the axes along which ranks may share a call: the sequences, or the heads
SAVED_TENSORS = ("dout", "out", "lse", "dlse")


class ShardingError(UnsupportedError, NotImplementedError):
    """A placement that is not served; torch wraps any other exception of a strategy in a RuntimeError."""


def _forward(*arguments: Any) -> Any:
    call = Call(*arguments)
    _refuse_unserved(call)
    shapes = {"out": call.q.shape, "lse": call.lse_shape}

    def of_result(name: str, axes: str) -> Any:
        return _placement(call, name, shapes[name], axes)

    return list(_strategies(call, call._asdict(), of_result, shapes))


def _backward(*arguments: Any) -> Any:
    call, saved = split(arguments)

    def of_gradient(name: str, axes: str) -> Any:
        x = getattr(call, name)
        if x is None or (name == "bias" and not saved.bias_gradient):
            return Replicate()  # the operator returns a tensor without elements
        placement = _placement(call, name, x.shape, axes)
        return Partial() if placement == Replicate() and axes else placement

    return list(_strategies(call, call._asdict() | saved._asdict(), of_gradient, DIFFERENTIATED))


def _strategies(call: Any, arguments: dict[str, Any], of_result: Any, results: Any) -> Iterator[tuple[Any, Any]]:
    """Yield (placements of the results, placements of the arguments) of each way to split a call over a mesh axis."""
    for axes in ("", *(axes for axes in SPLITS if _divides(call, axes))):
        yield (
            [of_result(name, axes) for name in results],
            [
                _placement(call, name, x.shape, axes) if name in (*TENSORS, *SAVED_TENSORS) and x is not None else None
                for name, x in arguments.items()
            ],
        )


def _placement(call: Any, name: str, shape: Any, axes: str) -> Any:
    """Return the placement if ranks share `axes`: sharded on such an axis, replicated if it lacks one larger than 1."""
    letters = axes_of(name, len(shape), _layout(call))
    return next((Shard(n) for n, x in enumerate(letters) if x in axes and shape[n] > 1), Replicate())


def _layout(call: Any) -> str:
    return "thd" if call.is_packed else call.layout


def _divides(call: Any, axes: str) -> bool:
    """Return whether ranks can share a call along `axes`: no rank gets query heads without their key/value head."""
    if call.dropout or _placement(call, "q", call.q.shape, axes) == Replicate():
        return False
    if axes == "b":
        return True
    sizes = {x: n for name in "qk" for x, n in zip(_letters(call, name), getattr(call, name).shape, strict=True)}
    heads = sizes["h"] if sizes["g"] == 1 else sizes["g"]
    mesh = call.q.mesh.shape
    counts = {math.prod(some) for n in range(1, len(mesh) + 1) for some in itertools.combinations(mesh, n)}
    return all(heads % count == 0 for count in counts if count <= heads)


def _letters(call: Any, name: str) -> str:
    return axes_of(name, len(getattr(call, name).shape), _layout(call))


def _refuse_unserved(call: Any) -> None:
    """Raise ShardingError if q, k or v is sharded along an axis that its ranks cannot share."""
    for name in "qk" if call.v is None else "qkv":
        letters, placements = _letters(call, name), getattr(call, name).placements
        sharded = {letters[x.dim] for x in placements if hasattr(x, "dim")}
        given = f"{'attention_varlen' if call.is_packed else 'attention'}: {name} is {placements}"
        if sharded & set("ij"):
            raise ShardingError(
                f"{given}, and the ranks of a sharded sequence must exchange keys: call "
                "cupy_flash.distributed.ring_attention or ulysses_attention on the local tensors"
            )
        if sharded & set("bhg") and call.dropout:
            raise ShardingError(f"{given}, and the dropout mask of a shard depends on its place in the whole batch")
        if sharded & set("hg") and not _divides(call, "hg"):
            shapes = f"q {tuple(call.q.shape)}, k {tuple(call.k.shape)}"
            raise ShardingError(
                f"{given}, and heads are sharded only if the mesh {tuple(call.q.mesh.shape)} divides the key/value "
                f"heads, or the query heads if they share one: {shapes}"
            )


def _refuse(operator: Any, *_: Any) -> Any:
    raise ShardingError(
        f"{operator}: DTensors are served by attention and its gradient alone, without score_mod and mask_mod: "
        "call to_local() first"
    )


register_sharding(attention_forward)(_forward)
register_sharding(attention_backward)(_backward)
for operator in (
    modified_attention_forward,
    modified_attention_backward,
    attention_jvp,
    attention_double_backward,
    attention_with_kv_cache,
    append_then_attend_kv_cache,
    append_to_kv_cache,
):
    register_sharding(operator)(partial(_refuse, operator))
