"""Ulysses attention: an all-to-all turns sequence shards into head shards, so each rank has the whole sequence.

Each pass is an all-to-all, one call of the engine on Hq / ranks heads, and an all-to-all back. The number of ranks must
divide the number of key/value heads. Jacobs et al., DeepSpeed Ulysses (2023).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, overload

import torch

from .. import dispatch
from ..problem.build import pose
from ..problem.records import Operands, Packed, Problem, Saved, Shard
from .channel import Channel
from .ring import (
    SERVED,
    TENSORS,
    UNSERVED,
    CapturedGradients,
    WithoutTensors,
    captured_of,
    describe,
    read_options,
    refuse_second_derivative,
    require_rows,
    tensors_of,
    whole_lengths,
)
from .shards import runs

if TYPE_CHECKING:
    from torch.autograd.function import FunctionCtx
    from typing_extensions import Unpack

    from ..problem.argument_types import (
        Group,
        Lengths,
        PackedRanksOptions,
        PackedRanksOptionsWithoutLse,
        RanksOptions,
        RanksOptionsWithoutLse,
    )
    from .ring import InputGradients, Results, Tensors


@overload
def ulysses_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *,
    group: Group = None, seqlen: Lengths = None, check_ranks: bool = True,
    return_lse: Literal[False] = False, **options: Unpack[RanksOptionsWithoutLse[torch.Tensor]],
) -> torch.Tensor: ...  # fmt: skip


@overload
def ulysses_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *,
    group: Group = None, seqlen: Lengths = None, check_ranks: bool = True,
    return_lse: Literal[True], **options: Unpack[RanksOptionsWithoutLse[torch.Tensor]],
) -> tuple[torch.Tensor, torch.Tensor]: ...  # fmt: skip


@overload
def ulysses_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *,
    group: Group = None, seqlen: Lengths = None, check_ranks: bool = True,
    return_lse: bool, **options: Unpack[RanksOptionsWithoutLse[torch.Tensor]],
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]: ...  # fmt: skip


def ulysses_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    group: Group = None,
    seqlen: Lengths = None,
    check_ranks: bool = True,
    **options: Unpack[RanksOptions[torch.Tensor]],
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Compute `cupy_flash.attention` of a sequence that is sharded over the ranks of a group, by all-to-all.

    Args:
        q: (B, S_r, Hq, D), rows `positions(S, rank, ranks, "contiguous")` of the whole q.
        k: (B, S_r, Hk, D), likewise. Hk must be a multiple of the number of ranks.
        v: (B, S_r, Hk, Dv), likewise.
        group: as in `ring_attention`.
        seqlen: as in `ring_attention`.
        check_ranks: as in `ring_attention`.
        **options: as in `ring_attention`.

    Returns:
        As `ring_attention`. The sink's gradient is that of the rank's heads and 0 for the others: sum it over the
        ranks.

    Raises:
        TypeError: as `ring_attention`.
        ValueError: as `ring_attention`.
        RuntimeError: as `ring_attention`.
    """
    return _attend("ulysses_attention", (q, k, v), group, seqlen, check_ranks, options)


@overload
def ulysses_attention_varlen(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
    cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor, max_seqlen_q: int, max_seqlen_k: int, *,
    group: Group = None, seqlen: Lengths = None, check_ranks: bool = True,
    return_lse: Literal[False] = False, **options: Unpack[PackedRanksOptionsWithoutLse[torch.Tensor]],
) -> torch.Tensor: ...  # fmt: skip


@overload
def ulysses_attention_varlen(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
    cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor, max_seqlen_q: int, max_seqlen_k: int, *,
    group: Group = None, seqlen: Lengths = None, check_ranks: bool = True,
    return_lse: Literal[True], **options: Unpack[PackedRanksOptionsWithoutLse[torch.Tensor]],
) -> tuple[torch.Tensor, torch.Tensor]: ...  # fmt: skip


@overload
def ulysses_attention_varlen(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
    cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor, max_seqlen_q: int, max_seqlen_k: int, *,
    group: Group = None, seqlen: Lengths = None, check_ranks: bool = True,
    return_lse: bool, **options: Unpack[PackedRanksOptionsWithoutLse[torch.Tensor]],
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]: ...  # fmt: skip


def ulysses_attention_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    group: Group = None,
    seqlen: Lengths = None,
    check_ranks: bool = True,
    **options: Unpack[PackedRanksOptions[torch.Tensor]],
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Compute `ulysses_attention` of a packed batch.

    Unlike in `ring_attention_varlen`, the packed rows are sharded as a whole: rank r has rows
    `positions(T, r, ranks, "contiguous")` of q, k and v, regardless of sequence boundaries.

    Args:
        q: (Tq_r, Hq, D).
        k: (Tk_r, Hk, D).
        v: (Tk_r, Hk, Dv).
        cu_seqlens_q: int32 (B + 1,) of the whole batch, on the device of q, equal on all ranks.
        cu_seqlens_k: likewise for the keys.
        max_seqlen_q: of the whole batch, as in `attention_varlen`.
        max_seqlen_k: likewise for the keys.
        group: as in `ring_attention`.
        seqlen: T, or (Tq, Tk); None if all shards are equally long.
        check_ranks: as in `ring_attention`.
        **options: as in `ring_attention`, without layout.

    Returns:
        out (Tq_r, Hq, Dv), or (out, lse) with lse (Hq, Tq_r).
    """
    packed = Packed(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    return _attend("ulysses_attention_varlen", (q, k, v), group, seqlen, check_ranks, options, packed)


def _attend(
    function: str,
    arrays: Tensors,
    group: Group,
    seqlen: Lengths,
    check_ranks: bool,
    options: Mapping[str, object],
    packed: Packed | None = None,
) -> torch.Tensor | Results:
    channel = Channel.of(function, group)
    with channel.agreement(function, check_ranks) as request:
        settings = read_options(function, arrays, options, (*UNSERVED, "statistics"))
        # Check the call on the local shards. A packed batch's boundaries count the rows of all ranks, so its check uses
        # empty sequences instead.
        pose(function, arrays, settings, None if packed is None else _empty_sequences(packed))
        axes = Axes(1, 2) if settings.layout == "bshd" else Axes(2, 1)
        axes = axes if packed is None else Axes(0, 1)
        q, k, v = arrays
        heads = [x.shape[axes.heads] for x in arrays]
        if any(count % channel.ranks for count in heads):
            raise ValueError(
                f"{function}: the {heads[1]} heads of k and v and the {heads[0]} of q must be multiples of the "
                f"{channel.ranks} ranks; ring_attention takes any number"
            )
        rows = (q.shape[axes.rows], k.shape[axes.rows])
        lengths = whole_lengths(function, seqlen, rows, channel.ranks)
        sizes = [
            [len(run) for r in range(channel.ranks) for run in runs(n, r, channel.ranks, "contiguous")] for n in lengths
        ]
        require_rows(function, channel, rows, (sizes[0][channel.rank], sizes[1][channel.rank]), "contiguous")
        request |= describe(arrays, settings, axes.rows) | {"lengths": lengths}
        request |= {} if packed is None else _describe_sequences(packed)
    longest = None if packed is None else (packed.max_seqlen_q, packed.max_seqlen_k)
    call = _Call(function, channel, axes, sizes[0], sizes[1], longest, WithoutTensors.of(settings))
    cu_seqlens = (None, None) if packed is None else (packed.cu_seqlens_q, packed.cu_seqlens_k)
    out, lse = _Ulysses.apply(*arrays, *tensors_of(settings), *captured_of(settings), *cu_seqlens, call)
    return (out, lse) if settings.return_lse else out


def _empty_sequences(packed: Packed) -> Packed:
    """Return a packed batch with the same number of sequences, all of length 0."""
    names = ("cu_seqlens_q", "cu_seqlens_k")
    given = {name: bounds for name in names if isinstance(bounds := getattr(packed, name), torch.Tensor)}
    return packed._replace(**{name: torch.zeros_like(bounds) for name, bounds in given.items()})


def _describe_sequences(packed: Packed) -> dict[str, str]:
    """Return a packed batch's entries of the request; of boundaries on a GPU, which are not read, only the shape."""

    def described(x: object) -> str:
        if not isinstance(x, torch.Tensor):
            return repr(x)
        return repr(x.tolist() if x.device.type == "cpu" else tuple(x.shape))

    return {name: described(x) for name, x in packed._asdict().items()}


class Axes(NamedTuple):
    """The two dimensions that the all-to-all exchanges."""

    rows: int
    heads: int


LSE = Axes(-1, -2)


class _Call(NamedTuple):
    """One rank's call without its tensors."""

    function: str
    channel: Channel
    axes: Axes  # axes of q, k, v and out
    q_sizes: list[int]  # query rows of each rank
    kv_sizes: list[int]
    longest: tuple[int | None, int | None] | None  # (max_seqlen_q, max_seqlen_k) of a packed batch
    settings: WithoutTensors

    def to_heads(self, x: torch.Tensor, sizes: list[int], axes: Axes) -> torch.Tensor:
        """All-to-all: this rank's rows of all heads -> all rows of this rank's heads."""
        pieces = x.chunk(self.channel.ranks, axes.heads)
        shapes = []
        for size in sizes:
            shape = list(pieces[0].shape)
            shape[axes.rows] = size
            shapes.append(tuple(shape))
        return torch.cat(self.channel.all_to_all(pieces, shapes), axes.rows)

    def to_rows(self, x: torch.Tensor, sizes: list[int], axes: Axes) -> torch.Tensor:
        """All-to-all: all rows of this rank's heads -> this rank's rows of all heads."""
        pieces = x.split(sizes, axes.rows)
        shapes = [tuple(pieces[self.channel.rank].shape)] * self.channel.ranks
        return torch.cat(self.channel.all_to_all(pieces, shapes), axes.heads)

    def heads_of(self, x: torch.Tensor | None) -> torch.Tensor | None:
        """Return this rank's heads of a tensor (..., Hq); None for None."""
        return None if x is None else x.chunk(self.channel.ranks, -1)[self.channel.rank].contiguous()

    def pose(
        self,
        arrays: Tensors,
        tensors: tuple[torch.Tensor | None, ...],
        bounds: tuple[torch.Tensor, torch.Tensor],
        saved: Saved | None = None,
    ) -> tuple[Problem, Operands]:
        """Return (problem, operands) of the whole sequence and this rank's heads, with global head indices."""
        (*features, seed), captured = tensors[: len(TENSORS)], tensors[len(TENSORS) :]
        given: dict[str, Any] = {feature.name: self.heads_of(x) for feature, x in zip(SERVED, features, strict=True)}
        options = self.settings.with_mods(captured)
        options = replace(options, seed=options.seed if seed is None else seed, **given)
        packed = None if self.longest is None else Packed(*bounds, *self.longest)
        heads = arrays[0].shape[self.axes.heads]
        shard = Shard(first_head=self.channel.rank * heads, heads=self.channel.ranks * heads)
        return pose(self.function, arrays, options, packed, saved, shard)


class _Ulysses(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: Any) -> Results:
        *tensors, cu_seqlens_q, cu_seqlens_k, call = rest
        bounds = (cu_seqlens_q, cu_seqlens_k)
        q = call.to_heads(q, call.q_sizes, call.axes)
        k, v = (call.to_heads(x, call.kv_sizes, call.axes) for x in (k, v))
        out, lse = (x.result() for x in dispatch.forward(*call.pose((q, k, v), tuple(tensors), bounds)))
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(q, k, v, out, lse, *tensors, *bounds)
        ctx.call = call
        return call.to_rows(out, call.q_sizes, call.axes), call.to_rows(lse, call.q_sizes, LSE)

    @staticmethod
    def backward(ctx: FunctionCtx, dout: torch.Tensor | None, dlse: torch.Tensor | None) -> InputGradients:
        refuse_second_derivative()
        wanted = ctx.needs_input_grad[3 + len(TENSORS) : -3]
        return *_gradients(ctx.call, wanted, dout, dlse, *ctx.saved_tensors), None, None, None


def _gradients(
    call: _Call,
    wanted: tuple[bool, ...],
    dout: torch.Tensor | None,
    dlse: torch.Tensor | None,
    *saved: torch.Tensor,
) -> InputGradients:
    """Return (dq, dk, dv) of this rank's rows, the gradients of TENSORS, and those of captured tensors.

    The gradients of TENSORS are 0 except for this rank's heads; those of captured tensors are summed over the ranks.
    """
    q, k, v, out, lse, *rest, cu_seqlens_q, cu_seqlens_k = saved
    tensors, captured = rest[: len(TENSORS)], tuple(rest[len(TENSORS) :])
    of_captured = CapturedGradients(captured, wanted, lse.dtype)
    dout = torch.zeros_like(out) if dout is None else call.to_heads(dout, call.q_sizes, call.axes)
    dlse = None if dlse is None else call.to_heads(dlse, call.q_sizes, LSE)
    rows = Saved(dout, out, lse, dlse, captured_gradient=wanted)
    posed = call.pose((q, k, v), (*tensors, *captured), (cu_seqlens_q, cu_seqlens_k), rows)
    gradients = dispatch.backward(*posed)
    of_captured.add(gradients)
    dq, dk, dv = (x.result() for x in (gradients.dq, gradients.dk, gradients.dv))
    dq = call.to_rows(dq, call.q_sizes, call.axes)
    dk, dv = (call.to_rows(x, call.kv_sizes, call.axes) for x in (dk, dv))
    others: list[Any] = [None] * len(tensors)
    for i, (feature, x) in enumerate(zip(SERVED, tensors[:-1], strict=True)):
        if feature.gradient and x is not None:
            others[i] = torch.zeros_like(x)
            part = others[i].chunk(call.channel.ranks, -1)[call.channel.rank]
            part.copy_(getattr(gradients, f"d{feature.name}").result())
    return dq, dk, dv, *others, *of_captured.of_all_ranks(call.channel)
