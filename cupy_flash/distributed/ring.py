"""Ring attention: the K and V shards of a sequence circulate among the ranks.

At step s a rank holds the K and V shards of rank - s, computes attention of its queries over them and merges the
partial result, while it receives the next shards. In the backward dK and dV circulate with K and V, in float32
(float64 for float64), and each rank adds its part. Liu, Zaharia and Abbeel, Ring Attention with Blockwise Transformers
(2023).
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias, overload

import torch

from .. import dispatch
from ..api import merge
from ..arrays import Array
from ..mods.trace import Mod, decoded, mod_of
from ..problem.build import pose
from ..problem.features import SEED
from ..problem.records import (
    ARRAYS,
    FEATURES,
    MODS,
    Gradients,
    Operands,
    Options,
    Packed,
    Problem,
    Saved,
    Shard,
    Statistics,
)
from ..problem.statistics import selected
from .channel import Arrival, Channel, Request
from .shards import Chunk, Pair, Schedule, chunks, ring_schedule

if TYPE_CHECKING:
    from torch.autograd.function import FunctionCtx
    from typing_extensions import Unpack

    from ..problem.argument_types import (
        Boundaries,
        Group,
        Layout,
        Lengths,
        PackedRanksOptions,
        PackedRanksOptionsWithoutLse,
        RanksOptions,
        RanksOptionsWithoutLse,
        Sharding,
    )

    Tensors: TypeAlias = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # q, k and v
    Results: TypeAlias = tuple[torch.Tensor, torch.Tensor]  # out and lse
    InputGradients: TypeAlias = tuple[torch.Tensor | None, ...]

# Options not supported over several ranks.
UNSERVED = (*(feature.name for feature in (*ARRAYS, *MODS) if not feature.ranks), "head_dim_v")
SERVED = tuple(feature for feature in ARRAYS if feature.ranks)
TENSORS = (*(feature.name for feature in SERVED), "seed")  # options that may be tensors
ALIKE = tuple(feature.name for feature in FEATURES if feature.kind != SEED and not feature.result)


@overload
def ring_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *,
    group: Group = None, sharding: Sharding = "zigzag", seqlen: Lengths = None, check_ranks: bool = True,
    return_lse: Literal[False] = False, **options: Unpack[RanksOptionsWithoutLse[torch.Tensor]],
) -> torch.Tensor: ...  # fmt: skip


@overload
def ring_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *,
    group: Group = None, sharding: Sharding = "zigzag", seqlen: Lengths = None, check_ranks: bool = True,
    return_lse: Literal[True], **options: Unpack[RanksOptionsWithoutLse[torch.Tensor]],
) -> tuple[torch.Tensor, torch.Tensor]: ...  # fmt: skip


@overload
def ring_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *,
    group: Group = None, sharding: Sharding = "zigzag", seqlen: Lengths = None, check_ranks: bool = True,
    return_lse: bool, **options: Unpack[RanksOptionsWithoutLse[torch.Tensor]],
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]: ...  # fmt: skip


def ring_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    group: Group = None,
    sharding: Sharding = "zigzag",
    seqlen: Lengths = None,
    check_ranks: bool = True,
    **options: Unpack[RanksOptions[torch.Tensor]],
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Compute `cupy_flash.attention` of a sequence that is sharded over the ranks of a group.

    Every rank calls it with its own shards and the same options. Autograd saves the shards of q, k, v, out and lse.

    Args:
        q: (B, Sq_r, Hq, D), rows `positions(Sq, rank, ranks, sharding)` of the whole q.
        k: (B, Sk_r, Hk, D), likewise.
        v: (B, Sk_r, Hk, Dv), likewise.
        group: a ProcessGroup, a DeviceMesh of one dimension, or None for all processes.
        sharding: "zigzag", "contiguous" or "striped"; see `cupy_flash.distributed.positions`.
        seqlen: length of the whole sequence, or (Sq, Sk); None if all shards are equally long.
        check_ranks: verify at every call that all ranks make the same call, and all or none of them record a gradient,
            by an all-gather of 8 bytes per rank. It synchronises the host, with NCCL also with the stream's earlier
            work, and cannot be captured in a CUDA graph. If False (on all ranks), a mismatch runs into the group's
            timeout or goes unnoticed.
        **options: those of `attention` except bias, mask, q_lengths, kv_lengths and the descales. Positions, the
            diagonal offset and dropout refer to the whole sequence; dropout needs a seed, the same on every rank. What
            score_mod and mask_mod capture is for the whole sequence, the same on every rank.

    Returns:
        out (B, Sq_r, Hq, Dv), or (out, lse) with lse (B, Hq, Sq_r), the rank's rows of the whole result.
        The sink's gradient is the contribution of the rank's queries: as for any replicated parameter, sum it over the
        ranks. Gradients of what score_mod captures are those of the whole already, on every rank.

    Raises:
        TypeError: the call is invalid on this rank.
        ValueError: the call is invalid on this rank; or, on every rank, before any data is sent, the ranks' calls
            differ or another rank's call is invalid.
        RuntimeError: from torch.distributed, if a rank is gone or the group's timeout expires.
    """
    function = "ring_attention"
    channel = Channel.of(function, group)
    with channel.agreement(function, check_ranks) as request:
        settings = read_options(function, (q, k, v), options)
        problem, _ = pose(function, (q, k, v), settings)
        lengths = whole_lengths(function, seqlen, (problem.q_len, problem.kv_len), channel.ranks)
        schedule = ring_schedule((lengths[0],), (lengths[1],), problem.mask, channel.rank, channel.ranks, sharding)
        call = _Call(function, channel, schedule, problem.layout, problem.batch, lengths, WithoutTensors.of(settings))
        request |= call.request((q, k, v), settings, lengths, sharding)
    return _attend((q, k, v), settings, call)


@overload
def ring_attention_varlen(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
    cu_seqlens_q: Boundaries, cu_seqlens_k: Boundaries, *,
    group: Group = None, sharding: Sharding = "zigzag", check_ranks: bool = True,
    return_lse: Literal[False] = False, **options: Unpack[PackedRanksOptionsWithoutLse[torch.Tensor]],
) -> torch.Tensor: ...  # fmt: skip


@overload
def ring_attention_varlen(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
    cu_seqlens_q: Boundaries, cu_seqlens_k: Boundaries, *,
    group: Group = None, sharding: Sharding = "zigzag", check_ranks: bool = True,
    return_lse: Literal[True], **options: Unpack[PackedRanksOptionsWithoutLse[torch.Tensor]],
) -> tuple[torch.Tensor, torch.Tensor]: ...  # fmt: skip


@overload
def ring_attention_varlen(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
    cu_seqlens_q: Boundaries, cu_seqlens_k: Boundaries, *,
    group: Group = None, sharding: Sharding = "zigzag", check_ranks: bool = True,
    return_lse: bool, **options: Unpack[PackedRanksOptionsWithoutLse[torch.Tensor]],
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]: ...  # fmt: skip


def ring_attention_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: Boundaries,
    cu_seqlens_k: Boundaries,
    *,
    group: Group = None,
    sharding: Sharding = "zigzag",
    check_ranks: bool = True,
    **options: Unpack[PackedRanksOptions[torch.Tensor]],
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Compute `ring_attention` of a packed batch, each sequence of which is sharded over the ranks.

    Args:
        q: (Tq_r, Hq, D), rows `packed_rows(cu_seqlens_q, rank, ranks, sharding)` of the whole packed q.
        k: (Tk_r, Hk, D), likewise.
        v: (Tk_r, Hk, Dv), likewise.
        cu_seqlens_q: (B + 1,) integers in host memory, of the whole batch: every rank computes all shards from them.
        cu_seqlens_k: likewise for the keys.
        group: as in `ring_attention`.
        sharding: as in `ring_attention`.
        check_ranks: as in `ring_attention`.
        **options: as in `ring_attention`, without layout.

    Returns:
        out (Tq_r, Hq, Dv), or (out, lse) with lse (Hq, Tq_r).
    """
    function = "ring_attention_varlen"
    channel = Channel.of(function, group)
    with channel.agreement(function, check_ranks) as request:
        settings = read_options(function, (q, k, v), options)
        bounds = (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k))
        lengths = [_host_lengths(function, name, given) for name, given in bounds]
        local = [chunks(lengths_of_batch, channel.rank, channel.ranks, sharding) for lengths_of_batch in lengths]
        # Checking the call on its first chunk is enough, because an invalid option fails on every chunk.
        problem, _ = pose(function, (q, k, v), settings, _packed(local[0][0], local[1][0], q.device))
        longest = (max(lengths[0], default=0), max(lengths[1], default=0))
        schedule = ring_schedule(*lengths, problem.mask, channel.rank, channel.ranks, sharding)
        call = _Call(function, channel, schedule, problem.layout, 1, longest, WithoutTensors.of(settings))
        request |= call.request((q, k, v), settings, tuple(lengths), sharding)
    return _attend((q, k, v), settings, call)


def read_options(
    function: str, arrays: Tensors, options: Mapping[str, object], unserved: tuple[str, ...] = UNSERVED
) -> Options:
    """Return the options of a call over several ranks; TypeError or ValueError lists unsupported ones."""
    settings = Options.of(function, options)
    for x in arrays[:2] if arrays[2] is None and settings.head_dim_v is not None else arrays:
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{function}: q, k and v must be torch tensors, not {type(x)}")
    unmet = [f"{name} is not served over several ranks" for name in unserved if getattr(settings, name) is not None]
    if arrays[0].dtype == torch.float8_e4m3fn:
        unmet.append("fp8 is not served over several ranks")
    if settings.dropout and settings.seed is None:
        unmet.append("dropout needs a seed here, the same on every rank: the ranks share the bits of one sequence")
    if unmet:
        raise ValueError("\n  - ".join([f"{function}: a requirement is not met", *unmet]))
    if settings.score_mod is not None or settings.mask_mod is not None:
        settings.score_mod, settings.mask_mod = mod_of(settings.score_mod, settings.mask_mod), None
    settings.deterministic = settings.deterministic or torch.are_deterministic_algorithms_enabled()
    return settings


def describe(arrays: Tensors, settings: Options, axis: int) -> Request:
    """Return the entries of a request: dtypes, shapes without the sharded dimension `axis`, requires_grad, options."""
    request: Request = {"requires_grad": _requires_grad(arrays, settings)}
    for name, x in zip("qkv", arrays, strict=True):
        sizes = ", ".join("*" if dimension == axis else str(size) for dimension, size in enumerate(x.shape))
        request[name] = f"{x.dtype} ({sizes})"
    for name in ALIKE:
        value = getattr(settings, name)
        if isinstance(value, Mod):
            request |= {"mods": value.encoded, "captured": [_described(x) for x in value.arrays]}
            continue
        request[name] = f"{tuple(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)
    request["seed"] = settings.seed if settings.dropout else None
    return request


def _described(captured: torch.Tensor) -> str:
    return f"{captured.dtype} {tuple(captured.shape)}{' requires_grad' * bool(captured.requires_grad)}"


def _requires_grad(arrays: Tensors, settings: Options) -> bool:
    """Return whether autograd records the call; all ranks or none must, because the backward communicates."""
    inputs = (*arrays, *tensors_of(settings), *captured_of(settings))
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)


def whole_lengths(function: str, seqlen: Lengths, local: tuple[int, int], ranks: int) -> tuple[int, int]:
    """Return (Sq, Sk) of the whole sequence; without seqlen, `ranks` times the local lengths."""
    if seqlen is None:
        return local[0] * ranks, local[1] * ranks
    try:
        q_length, kv_length = seqlen if isinstance(seqlen, (tuple, list)) else (seqlen, seqlen)
        return operator.index(q_length), operator.index(kv_length)
    except (TypeError, ValueError):
        raise TypeError(f"{function}: seqlen must be None, a whole number or (Sq, Sk), not {seqlen!r}") from None


def _host_lengths(function: str, name: str, given: Boundaries) -> tuple[int, ...]:
    """Return the sequence lengths from cumulative lengths in host memory."""
    if isinstance(given, torch.Tensor) and given.device.type != "cpu":
        raise TypeError(
            f"{function}: {name} must be in host memory, not on {given.device}: the host computes the shards from it"
        )
    try:
        bounds = [operator.index(bound) for bound in (given.tolist() if hasattr(given, "tolist") else given)]
    except TypeError:
        raise TypeError(f"{function}: {name} must be (B + 1,) whole numbers, not {given!r}") from None
    lengths = tuple(stop - start for start, stop in zip(bounds, bounds[1:], strict=False))
    if bounds[:1] != [0] or min(lengths, default=0) < 0:
        raise ValueError(f"{function}: {name} must start at 0 and not decrease, not {bounds}")
    return lengths


def require_rows(
    function: str, channel: Channel, actual: tuple[int, int], expected: tuple[int, int], sharding: str
) -> None:
    """Raise ValueError if this rank has other numbers of (queries, keys) than the sharding gives it."""
    if actual != expected:
        raise ValueError(
            f"{function}: rank {channel.rank} of {channel.ranks} has {actual[0]} queries and {actual[1]} keys, not the "
            f"{expected[0]} and {expected[1]} of {sharding} shards; if shards are unequal, pass seqlen="
        )


def tensors_of(settings: Options) -> list[torch.Tensor | None]:
    """Return the options in TENSORS for autograd to save; None for those that are not tensors."""
    values = (getattr(settings, name) for name in TENSORS)
    return [value if isinstance(value, torch.Tensor) else None for value in values]


def captured_of(settings: Options) -> tuple[torch.Tensor, ...]:
    """Return the tensors that the mods capture."""
    return settings.score_mod.arrays if isinstance(settings.score_mod, Mod) else ()


class WithoutTensors(NamedTuple):
    """The options of a call without their tensors, and the text of its Mod; autograd's ctx must not hold tensors."""

    options: Options
    mods: str  # "" without mods

    @classmethod
    def of(cls, settings: Options) -> WithoutTensors:
        """Replace tensors by None, and the Mod by its text."""
        absent: dict[str, Any] = {name: None for name in TENSORS if isinstance(getattr(settings, name), torch.Tensor)}
        mods = settings.score_mod.encoded if isinstance(settings.score_mod, Mod) else ""
        return cls(replace(settings, **absent, score_mod=None), mods)

    def with_mods(self, captured: tuple[torch.Tensor, ...]) -> Options:
        """Return the options, with the Mod rebuilt from its text and its captured tensors."""
        return replace(self.options, score_mod=decoded(self.mods, captured)) if self.mods else self.options


class CapturedGradients:
    """The gradients of captured tensors, summed over the calls of a rank and then over the ranks."""

    def __init__(self, captured: tuple[torch.Tensor, ...], wanted: tuple[bool, ...], dtype: torch.dtype) -> None:
        pairs = zip(captured, wanted, strict=True)
        self.captured = captured
        self.totals = [
            torch.zeros_like(x, dtype=dtype) if asked and x.is_floating_point() else None for x, asked in pairs
        ]

    def add(self, gradients: Gradients[Array]) -> None:
        """Add the gradients of one backward."""
        for total, part in zip(self.totals, gradients.dcaptured or (None,) * len(self.totals), strict=True):
            if total is not None and part is not None:
                total += part.result()

    def of_all_ranks(self, channel: Channel) -> list[torch.Tensor | None]:
        """Sum each gradient over the ranks by a collective, and return them in the dtypes of the tensors."""
        totals = zip(self.totals, self.captured, strict=True)
        return [None if total is None else channel.sum(total).to(x.dtype) for total, x in totals]


def refuse_second_derivative() -> None:
    """Raise RuntimeError in a backward under create_graph=True, whose result autograd would treat as constant."""
    if torch.is_grad_enabled():
        raise RuntimeError("cupy_flash has no second derivative of attention over several ranks (create_graph=True)")


def _attend(arrays: Tensors, settings: Options, call: _Call) -> torch.Tensor | Results:
    out, lse, *found = _Ring.apply(*arrays, *tensors_of(settings), *captured_of(settings), call)
    asked = [x for name, x in zip(call.statistics, found, strict=True) if name in (settings.statistics or ())]
    results: torch.Tensor | Results = selected((out, lse, *asked), settings)
    return results


class _Call(NamedTuple):
    """One rank's call without its tensors."""

    function: str
    channel: Channel
    schedule: Schedule
    layout: str  # "thd" for a packed batch
    batch: int  # batch entries with the same positions; 1 for a packed batch
    lengths: tuple[int, int]  # (queries, keys) of the longest whole sequence
    settings: WithoutTensors

    @property
    def axis(self) -> int:
        """The sharded dimension of q, k, v and out; lse is sharded along its last dimension."""
        return {"bshd": 1, "bhsd": 2, "thd": 0}[self.layout]

    @property
    def statistics(self) -> tuple[str, ...]:
        """The statistics that the ranks compute, in the order of the fields; max and argmax are merged together."""
        asked = set(self.settings.options.statistics or ())
        asked |= {"max", "argmax"} if asked & {"max", "argmax"} else set()
        return tuple(name for name in Statistics._fields if name in asked)

    def request(self, arrays: Tensors, settings: Options, lengths: tuple[object, ...], sharding: str) -> Request:
        """Return the arguments that must be equal on all ranks; ValueError if this rank's shards have wrong lengths."""
        rows = (arrays[0].shape[self.axis], arrays[1].shape[self.axis])
        q_rows, kv_rows = (
            sum(chunk.rows for chunk in shard) for shard in (self.schedule.queries, self.schedule.keys[0])
        )
        require_rows(self.function, self.channel, rows, (q_rows, kv_rows), sharding)
        return describe(arrays, settings, self.axis) | {"lengths": lengths, "sharding": sharding}

    def rows(self, x: torch.Tensor, chunk: Chunk) -> torch.Tensor:
        """Return a view of a chunk's rows in x, a shard of q, k, v or out."""
        return x.narrow(self.axis, chunk.first_row, chunk.rows)

    def with_rows(self, x: torch.Tensor, shard: tuple[Chunk, ...]) -> tuple[int, ...]:
        """Return the shape of x for a shard of these chunks."""
        shape = list(x.shape)
        shape[self.axis] = sum(chunk.rows for chunk in shard)
        return tuple(shape)

    def pose(
        self, pair: Pair, arrays: Tensors, tensors: tuple[torch.Tensor | None, ...], saved: Saved | None = None
    ) -> tuple[Problem, Operands]:
        """Return (problem, operands) of a pair of chunks; only the local pair gets the sink, which must count once.

        `tensors` are the options in TENSORS, then the captured tensors.
        """
        q, k, v = arrays
        (*features, seed), captured = tensors[: len(TENSORS)], tensors[len(TENSORS) :]
        given: dict[str, Any] = {
            feature.name: x if pair.local or not feature.once else None
            for feature, x in zip(SERVED, features, strict=True)
        }
        options = self.settings.with_mods(captured)
        asked = None if saved is not None or not self.statistics else self.statistics
        options = replace(options, seed=options.seed if seed is None else seed, statistics=asked, **given)
        options.return_lse = True
        packed = _packed(pair.queries, pair.keys, q.device) if self.layout == "thd" else None
        starts = _on_device(pair.starts * self.batch, q.device)
        shard = Shard(starts, self.schedule.stride, lengths=self.lengths)
        arrays = (self.rows(q, pair.queries), self.rows(k, pair.keys), self.rows(v, pair.keys))
        return pose(self.function, arrays, options, packed, saved, shard)

    def saved(self, pair: Pair, dout: torch.Tensor, out: torch.Tensor, *of_rows: torch.Tensor | None) -> Saved:
        """Return the rows of dout and out that the backward of a pair needs, and of arrays with the axes of lse.

        These are lse, argmax, entropy, dlse, dmax and dentropy.
        """
        queries = pair.queries
        lse, argmax, entropy, dlse, dmax, dentropy = (
            None if x is None else x.narrow(-1, queries.first_row, queries.rows) for x in of_rows
        )
        assert lse is not None
        argmax = None if argmax is None else self.keys_of_chunk(pair, argmax)
        statistics = Statistics(argmax=argmax, entropy=entropy)
        rows = (self.rows(dout, queries), self.rows(out, queries), lse, dlse)
        return Saved(*rows, statistics=statistics, dmax=dmax, dentropy=dentropy)

    def _first_keys(self, pair: Pair, device: torch.device) -> torch.Tensor:
        """Return the positions of the first keys of a pair's chunk, for all its rows, or for each of a packed batch."""
        first = _on_device(tuple(start[1] for start in pair.starts), device)
        if self.layout != "thd":
            return first
        return first.repeat_interleave(_on_device(pair.queries.lengths, device))

    def keys_of_whole(self, pair: Pair, keys: torch.Tensor) -> torch.Tensor:
        """Return the numbers in the whole sequence of keys that are given by their numbers in a chunk; -1 stays."""
        whole = keys * self.schedule.stride + self._first_keys(pair, keys.device)
        return torch.where(keys < 0, keys, whole)

    def keys_of_chunk(self, pair: Pair, keys: torch.Tensor) -> torch.Tensor:
        """Return the inverse of `keys_of_whole`, -1 for keys that are not in the chunk."""
        distance, stride = keys - self._first_keys(pair, keys.device), self.schedule.stride
        own = (keys >= 0) & (distance >= 0) & (distance % stride == 0)
        own &= distance // stride < max(pair.keys.lengths, default=0)
        return torch.where(own, distance // stride, -1).to(keys.dtype)

    def next_keys(self, step: int, kv: list[torch.Tensor]) -> Arrival | None:
        """Start sending [K, V] on and receiving those of the next step; None at the last step, which does neither."""
        if step + 1 == len(self.schedule.keys):
            return None
        return self.channel.exchange(kv, 1, [self.with_rows(x, self.schedule.keys[step + 1]) for x in kv])

    def pass_gradients(self, step: int, dkv: list[torch.Tensor]) -> Arrival:
        """Start sending [dK, dV] to where their keys go next, or after the last step back to the owner of the keys."""
        last = step + 1 == len(self.schedule.keys)
        if last and step == 0:  # no rank needs another rank's keys
            return Arrival(dkv, [])
        shift, shard = (-step, self.schedule.keys[0]) if last else (1, self.schedule.keys[step + 1])
        return self.channel.exchange(dkv, shift, [self.with_rows(x, shard) for x in dkv])


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: Any
    ) -> tuple[torch.Tensor, ...]:
        *tensors, call = rest
        parts: dict[Chunk, tuple[torch.Tensor, torch.Tensor, Statistics[torch.Tensor]]] = {}
        kv = [k.contiguous(), v.contiguous()]
        for step, pairs in enumerate(call.schedule.pairs):
            arrival = call.next_keys(step, kv)
            for pair in pairs:
                posed = call.pose(pair, (q, *kv), tuple(tensors))
                out, lse, *found = (x.result() for x in dispatch.forward(*posed))
                statistics: Statistics[torch.Tensor] = Statistics(**dict(zip(call.statistics, found, strict=True)))
                if statistics.argmax is not None:
                    statistics = statistics._replace(argmax=call.keys_of_whole(pair, statistics.argmax))
                if pair.queries in parts:
                    layout: Layout = "bhsd" if call.layout == "bhsd" else "bshd"
                    out_a, lse_a, of_part = parts[pair.queries]
                    parts[pair.queries] = merge(
                        out_a, lse_a, out, lse, layout=layout, statistics_a=of_part, statistics_b=statistics
                    )
                else:  # merge in lse's dtype, round once at the end
                    parts[pair.queries] = out.to(lse.dtype), lse, statistics
            if arrival is not None:
                kv = arrival.wait()
        outs, lses, of_chunks = zip(*(parts[chunk] for chunk in call.schedule.queries), strict=True)
        out, lse = torch.cat(outs, call.axis).to(q.dtype), torch.cat(lses, -1)
        whole = {name: torch.cat([getattr(x, name) for x in of_chunks], -1) for name in call.statistics}
        ctx.set_materialize_grads(False)
        argmax, entropy = whole.get("argmax"), whole.get("entropy")
        if argmax is not None:
            ctx.mark_non_differentiable(argmax)
        ctx.save_for_backward(q, k, v, out, lse, argmax, entropy, *tensors)
        ctx.call = call
        return out, lse, *whole.values()

    @staticmethod
    def backward(
        ctx: FunctionCtx, dout: torch.Tensor | None, dlse: torch.Tensor | None, *of_statistics: torch.Tensor | None
    ) -> InputGradients:
        refuse_second_derivative()
        wanted = ctx.needs_input_grad[3 + len(TENSORS) : -1]
        given = dict(zip(ctx.call.statistics, of_statistics, strict=True))
        of_rows = (dlse, given.get("max"), given.get("entropy"))
        return *_gradients(ctx.call, wanted, dout, of_rows, *ctx.saved_tensors), None


def _gradients(
    call: _Call,
    wanted: tuple[bool, ...],
    dout: torch.Tensor | None,
    of_rows: tuple[torch.Tensor | None, ...],
    *saved: torch.Tensor,
) -> InputGradients:
    """Return (dq, dk, dv) of this rank's shards, and the gradients of TENSORS and of captured tensors.

    `of_rows` are dlse, dmax and dentropy.
    """
    q, k, v, out, lse, argmax, entropy, *rest = saved
    tensors, captured = rest[: len(TENSORS)], tuple(rest[len(TENSORS) :])
    of_captured = CapturedGradients(captured, wanted, lse.dtype)
    dout = torch.zeros_like(out) if dout is None else dout  # None: only lse was used
    dq = torch.zeros_like(q, dtype=lse.dtype)
    totals = [
        torch.zeros_like(x, dtype=lse.dtype) if feature.gradient and x is not None else None
        for feature, x in zip(SERVED, tensors[:-1], strict=True)
    ]
    named = {f"d{feature.name}": total for feature, total in zip(SERVED, totals, strict=True)}
    kv = [k.contiguous(), v.contiguous()]
    partial_dkv: Arrival | None = None  # sums over the ranks that had these keys before
    for step, pairs in enumerate(call.schedule.pairs):
        arrival = call.next_keys(step, kv)
        dkv = [torch.zeros_like(x, dtype=lse.dtype) for x in kv]
        for pair in pairs:
            rows = call.saved(pair, dout, out, lse, argmax, entropy, *of_rows)._replace(captured_gradient=wanted)
            gradients = dispatch.backward(*call.pose(pair, (q, *kv), (*tensors, *captured), rows))
            of_captured.add(gradients)
            dk, dv = (call.rows(x, pair.keys) for x in dkv)
            for name, total in {"dq": call.rows(dq, pair.queries), "dk": dk, "dv": dv, **named}.items():
                part = getattr(gradients, name, None)  # alibi_slopes have no gradient
                if total is not None and part is not None:
                    total += part.result()
        if partial_dkv is not None:
            for total, part in zip(dkv, partial_dkv.wait(), strict=True):
                total += part
        partial_dkv = call.pass_gradients(step, dkv)
        if arrival is not None:
            kv = arrival.wait()
    assert partial_dkv is not None  # a schedule has at least one step
    dk, dv = partial_dkv.wait()
    others = [None if total is None else total.to(x.dtype) for total, x in zip([*totals, None], tensors, strict=True)]
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), *others, *of_captured.of_all_ranks(call.channel)


def _packed(queries: Chunk, keys: Chunk, device: torch.device) -> Packed:
    bounds = (_on_device(chunk.cu_seqlens, device) for chunk in (queries, keys))
    return Packed(*bounds, *(max(chunk.lengths, default=0) for chunk in (queries, keys)))


@lru_cache(maxsize=1024)
def _on_device(numbers: tuple[int | tuple[int, ...], ...], device: torch.device) -> torch.Tensor:
    """Return an int32 tensor of the numbers, cached because every layer needs the same ones at each ring step."""
    return torch.tensor(numbers, dtype=torch.int32, device=device)
