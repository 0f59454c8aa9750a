"""Attention over a sequence that no single device holds: keys and values travel round a ring of ranks.

Every rank keeps its queries. At step s it has the keys of the rank s places before it, attends to those that its
queries see, and merges the result into what it has; the next keys arrive meanwhile. In the backward the gradients of
the keys travel with them, in float32 (float64 for float64), and each rank adds its part. Liu, Zaharia and Abbeel, Ring
Attention with Blockwise Transformers (2023).
"""

from __future__ import annotations

import operator
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from .. import backends
from ..api import merge
from ..features import ARRAYS, FEATURES, SEED
from ..pose import pose
from ..problem import Options, Packed, Saved, Shard
from .channel import Arrival, Channel
from .shards import Chunk, Course, Pair, chunks, course

UNSERVED = tuple(feature.name for feature in ARRAYS if not feature.ranks)
SERVED = tuple(feature for feature in ARRAYS if feature.ranks)
TENSORS = (*(feature.name for feature in SERVED), "seed")  # options that may be tensors
ALIKE = tuple(feature.name for feature in FEATURES if feature.kind != SEED and not feature.result)


def ring_attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    group: Any = None,
    sharding: str = "zigzag",
    seqlen: Any = None,
    check_ranks: bool = True,
    **options: Any,
) -> Any:
    """`cupy_flash.attention` of a sequence whose queries and keys are spread over the ranks of a group.

    Every rank calls it with its own shards and the same options. Memory per rank is that of its shards: what autograd
    keeps is their q, k, v, out and lse.

    Args:
        q: (B, Sq_r, Hq, D), the rank's queries: rows `positions(Sq, rank, ranks, sharding)` of the whole.
        k, v: (B, Sk_r, Hk, D) and (B, Sk_r, Hk, Dv), likewise of the keys.
        group: a ProcessGroup, a DeviceMesh of one dimension, or None for all processes.
        sharding: "zigzag", "contiguous" or "striped"; see `cupy_flash.distributed.positions`.
        seqlen: the length of the whole sequence, or the pair (Sq, Sk); None where all shards are equally long.
        check_ranks: compare, at the beginning of every call, what the ranks ask for, by 8 bytes from each to all. The
            host waits for them: with NCCL until the work that its stream was given before is done, which no CUDA graph
            can capture. False, on all ranks, leaves it out; a rank that then asks for something else is found by the
            group's timeout, or not at all.
        options: those of `attention` but bias, mask, q_lengths and kv_lengths. Positions, the diagonal offset and
            dropout are those of the whole sequence; dropout needs a seed, the same on every rank.

    Returns:
        out (B, Sq_r, Hq, Dv), or (out, lse) with lse (B, Hq, Sq_r): the rank's rows of the whole result.
        The gradient of a sink is the part of the rank's queries: as of any shared parameter, the sum over the ranks
        is the gradient of the sum of their losses.

    Raises:
        TypeError, ValueError: what is wrong with the call on this rank. ValueError on every rank, before anything else
        is sent, where the ranks do not ask for the same, or the call of another rank is wrong. RuntimeError: of
        torch.distributed, where a rank is gone or the group's timeout is over.
    """
    function = "ring_attention"
    channel = Channel.of(function, group)
    with channel.agreement(function, check_ranks) as words:
        asked = read_options(function, (q, k, v), options)
        problem, _ = pose(function, (q, k, v), asked)
        lengths = whole_lengths(function, seqlen, (problem.q_len, problem.kv_len), channel.ranks)
        way = course((lengths[0],), (lengths[1],), problem.mask, channel.rank, channel.ranks, sharding)
        call = _Call(function, channel, way, problem.layout, problem.batch, without_tensors(asked))
        words |= call.words((q, k, v), asked, lengths, sharding)
    return _attend((q, k, v), asked, call)


def ring_attention_varlen(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    *,
    group: Any = None,
    sharding: str = "zigzag",
    check_ranks: bool = True,
    **options: Any,
) -> Any:
    """`ring_attention` of a packed batch, every sequence of it spread over the ranks.

    Args:
        q: (Tq_r, Hq, D), rows `packed_rows(cu_seqlens_q, rank, ranks, sharding)` of the whole packed batch.
        k, v: (Tk_r, Hk, D) and (Tk_r, Hk, Dv), likewise of the keys.
        cu_seqlens_q, cu_seqlens_k: (B + 1,) whole numbers in host memory, of the whole batch: every rank computes from
            them what the others hold.
        group, sharding, check_ranks, options: those of `ring_attention`, but layout.

    Returns:
        out (Tq_r, Hq, Dv), or (out, lse) with lse (Hq, Tq_r).
    """
    function = "ring_attention_varlen"
    channel = Channel.of(function, group)
    with channel.agreement(function, check_ranks) as words:
        asked = read_options(function, (q, k, v), options)
        bounds = (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k))
        lengths = [_host_lengths(function, name, given) for name, given in bounds]
        here = [chunks(every, channel.rank, channel.ranks, sharding) for every in lengths]
        # What is wrong with the call itself shows on any part of it.
        problem, _ = pose(function, (q, k, v), asked, _packed(here[0][0], here[1][0], q.device))
        way = course(*lengths, problem.mask, channel.rank, channel.ranks, sharding)
        call = _Call(function, channel, way, problem.layout, 1, without_tensors(asked))
        words |= call.words((q, k, v), asked, tuple(lengths), sharding)
    return _attend((q, k, v), asked, call)


def read_options(function: str, arrays: tuple[Any, ...], options: dict[str, Any]) -> Options:
    """The options of a call over several ranks, or an error with what such calls do not take."""
    asked = Options.of(function, options)
    for x in arrays:
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{function}: q, k and v must be torch tensors, not {type(x)}")
    unmet = [f"{name} is not served over several ranks" for name in UNSERVED if getattr(asked, name) is not None]
    if arrays[0].dtype == torch.float8_e4m3fn:
        unmet.append("fp8 is not served over several ranks")
    if asked.dropout and asked.seed is None:
        unmet.append("dropout needs a seed here, the same on every rank: their bits are those of one sequence")
    if unmet:
        raise ValueError("\n  - ".join([f"{function}: a requirement is not met", *unmet]))
    asked.deterministic = asked.deterministic or torch.are_deterministic_algorithms_enabled()
    return asked


def describe(arrays: tuple[Any, Any, Any], asked: Options, axis: int) -> dict[str, Any]:
    """What all ranks must ask for alike, the lengths of their shards (dimension `axis`) aside."""
    words: dict[str, Any] = {}
    for name, x in zip("qkv", arrays, strict=True):
        sizes = ", ".join("*" if dimension == axis else str(size) for dimension, size in enumerate(x.shape))
        words[name] = f"{x.dtype} ({sizes})"
    for name in ALIKE:
        value = getattr(asked, name)
        words[name] = f"{tuple(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)
    words["seed"] = asked.seed if asked.dropout else None
    return words


def whole_lengths(function: str, seqlen: Any, here: tuple[int, int], ranks: int) -> tuple[int, int]:
    """(Sq, Sk) of the whole sequence."""
    if seqlen is None:
        return here[0] * ranks, here[1] * ranks
    try:
        q_length, kv_length = seqlen if isinstance(seqlen, (tuple, list)) else (seqlen, seqlen)
        return operator.index(q_length), operator.index(kv_length)
    except (TypeError, ValueError):
        raise TypeError(f"{function}: seqlen must be None, a whole number or (Sq, Sk), not {seqlen!r}") from None


def _host_lengths(function: str, name: str, given: Any) -> tuple[int, ...]:
    """The lengths between boundaries that lie in host memory."""
    if isinstance(given, torch.Tensor) and given.device.type != "cpu":
        raise TypeError(
            f"{function}: {name} must be in host memory, not on {given.device}: what ranks hold is computed from it"
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
    function: str, channel: Channel, here: tuple[int, int], wanted: tuple[int, int], sharding: str
) -> None:
    """ValueError where this rank's (queries, keys) are not as many as those of the sharding."""
    if here != wanted:
        raise ValueError(
            f"{function}: rank {channel.rank} of {channel.ranks} has {here[0]} queries and {here[1]} keys, not the "
            f"{wanted[0]} and {wanted[1]} of {sharding} shards; seqlen= gives the whole length where these are unequal"
        )


def tensors_of(asked: Options) -> list[Any]:
    """The options that are tensors, for autograd to keep; None for the others."""
    values = (getattr(asked, name) for name in TENSORS)
    return [value if isinstance(value, torch.Tensor) else None for value in values]


def without_tensors(asked: Options) -> Options:
    given = {name for name in TENSORS if isinstance(getattr(asked, name), torch.Tensor)}
    return replace(asked, **dict.fromkeys(given))


def refuse_second_derivative() -> None:
    """Of a backward whose result is to be differentiated: it would count as constant, without a word."""
    if torch.is_grad_enabled():
        raise RuntimeError("cupy_flash has no second derivative of attention over several ranks (create_graph=True)")


def _attend(arrays: tuple[Any, Any, Any], asked: Options, call: _Call) -> Any:
    out, lse = _Ring.apply(*arrays, *tensors_of(asked), call)
    return (out, lse) if asked.return_lse else out


class _Call(NamedTuple):
    """A call on one rank: everything but its tensors."""

    function: str
    channel: Channel
    course: Course
    layout: str  # "thd" for a packed batch
    batch: int  # entries that share one sequence's positions; 1 of a packed batch
    options: Options

    @property
    def axis(self) -> int:
        """The dimension of q, k and v that is spread over the ranks; of lse it is the last."""
        return {"bshd": 1, "bhsd": 2, "thd": 0}[self.layout]

    def words(
        self, arrays: tuple[Any, Any, Any], asked: Options, lengths: tuple[Any, ...], sharding: str
    ) -> dict[str, Any]:
        """What all ranks must say alike; ValueError where this rank's shards are not those of the sharding."""
        here = (arrays[0].shape[self.axis], arrays[1].shape[self.axis])
        q_rows, kv_rows = (sum(chunk.rows for chunk in held) for held in (self.course.queries, self.course.keys[0]))
        require_rows(self.function, self.channel, here, (q_rows, kv_rows), sharding)
        return describe(arrays, asked, self.axis) | {"lengths": lengths, "sharding": sharding}

    def rows(self, x: Any, chunk: Chunk) -> Any:
        """A chunk's rows of a shard of queries or keys."""
        return x.narrow(self.axis, chunk.first_row, chunk.rows)

    def with_rows(self, x: Any, held: tuple[Chunk, ...]) -> tuple[int, ...]:
        """The shape of x for a shard that holds these chunks."""
        shape = list(x.shape)
        shape[self.axis] = sum(chunk.rows for chunk in held)
        return tuple(shape)

    def pose(
        self, pair: Pair, arrays: tuple[Any, Any, Any], tensors: tuple[Any, ...], saved: Saved | None = None
    ) -> Any:
        """(problem, operands) of a pair: a call on chunks that knows where they lie. A sink joins one part of a row."""
        q, k, v = arrays
        *features, seed = tensors
        given = {
            feature.name: x if pair.own or not feature.once else None
            for feature, x in zip(SERVED, features, strict=True)
        }
        options = replace(self.options, seed=self.options.seed if seed is None else seed, **given)
        packed = _packed(pair.queries, pair.keys, q.device) if self.layout == "thd" else None
        shard = Shard(_on_device(pair.starts * self.batch, q.device), self.course.apart)
        arrays = (self.rows(q, pair.queries), self.rows(k, pair.keys), self.rows(v, pair.keys))
        return pose(self.function, arrays, options, packed, saved, shard)

    def saved(self, queries: Chunk, dout: Any, out: Any, lse: Any, dlse: Any) -> Saved:
        """What the backward of a chunk of queries needs: parts of the whole rows' results and their gradients."""
        lse, dlse = (None if x is None else x.narrow(-1, queries.first_row, queries.rows) for x in (lse, dlse))
        return Saved(self.rows(dout, queries), self.rows(out, queries), lse, dlse)

    def next_keys(self, step: int, kv: list[Any]) -> Arrival | None:
        """The keys and values of the next step on their way, these on theirs; None where there is no next step."""
        if step + 1 == len(self.course.keys):
            return None
        return self.channel.exchange(kv, 1, [self.with_rows(x, self.course.keys[step + 1]) for x in kv])

    def gradients_onward(self, step: int, dkv: list[Any]) -> Arrival:
        """The sums of dK and dV on their way, to where their keys go; after the last step home."""
        last = step + 1 == len(self.course.keys)
        if last and step == 0:  # nobody sees the keys of another rank
            return Arrival(dkv, [])
        shift, held = (-step, self.course.keys[0]) if last else (1, self.course.keys[step + 1])
        return self.channel.exchange(dkv, shift, [self.with_rows(x, held) for x in dkv])


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Any, k: Any, v: Any, *rest: Any) -> tuple[Any, Any]:
        *tensors, call = rest
        parts: dict[Chunk, tuple[Any, Any]] = {}
        kv = [k.contiguous(), v.contiguous()]
        for step, pairs in enumerate(call.course.pairs):
            arrival = call.next_keys(step, kv)
            for pair in pairs:
                out, lse = (x.result() for x in backends.forward(*call.pose(pair, (q, *kv), tuple(tensors))))
                if pair.queries in parts:
                    layout = "bhsd" if call.layout == "bhsd" else "bshd"
                    parts[pair.queries] = merge(*parts[pair.queries], out, lse, layout=layout)
                else:
                    parts[pair.queries] = out.to(lse.dtype), lse  # rounded once, when all parts are in
            if arrival is not None:
                kv = arrival.wait()
        outs, lses = zip(*(parts[chunk] for chunk in call.course.queries), strict=True)
        out, lse = torch.cat(outs, call.axis).to(q.dtype), torch.cat(lses, -1)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(q, k, v, out, lse, *tensors)
        ctx.call = call
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Any, dlse: Any) -> tuple[Any, ...]:
        refuse_second_derivative()
        return *_gradients(ctx.call, dout, dlse, *ctx.saved_tensors), None


def _gradients(call: _Call, dout: Any, dlse: Any, *saved: Any) -> tuple[Any, ...]:
    """(dq, dk, dv) of this rank's shards, and the gradients of TENSORS."""
    q, k, v, out, lse, *tensors = saved
    dout = torch.zeros_like(out) if dout is None else dout  # None: only lse was used
    dq = torch.zeros_like(q, dtype=lse.dtype)
    totals = [
        torch.zeros_like(x, dtype=lse.dtype) if feature.gradient and x is not None else None
        for feature, x in zip(SERVED, tensors[:-1], strict=True)
    ]
    named = {f"d{feature.name}": total for feature, total in zip(SERVED, totals, strict=True)}
    kv = [k.contiguous(), v.contiguous()]
    behind: Arrival | None = None
    for step, pairs in enumerate(call.course.pairs):
        arrival = call.next_keys(step, kv)
        dkv = [torch.zeros_like(x, dtype=lse.dtype) for x in kv]
        for pair in pairs:
            posed = call.pose(pair, (q, *kv), tuple(tensors), call.saved(pair.queries, dout, out, lse, dlse))
            gradients = backends.backward(*posed)
            dk, dv = (call.rows(x, pair.keys) for x in dkv)
            for name, total in {"dq": call.rows(dq, pair.queries), "dk": dk, "dv": dv, **named}.items():
                part = getattr(gradients, name, None)  # alibi_slopes have none
                if total is not None and part is not None:
                    total += part.result()
        if behind is not None:
            for total, part in zip(dkv, behind.wait(), strict=True):
                total += part
        behind = call.gradients_onward(step, dkv)
        if arrival is not None:
            kv = arrival.wait()
    assert behind is not None  # a course has a step
    dk, dv = behind.wait()
    others = [None if total is None else total.to(x.dtype) for total, x in zip([*totals, None], tensors, strict=True)]
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), *others


def _packed(queries: Chunk, keys: Chunk, device: Any) -> Packed:
    bounds = (_on_device(chunk.cu_seqlens, device) for chunk in (queries, keys))
    return Packed(*bounds, *(max(chunk.lengths, default=0) for chunk in (queries, keys)))


@lru_cache(maxsize=1024)
def _on_device(numbers: tuple[Any, ...], device: Any) -> Any:
    """int32, kept: a step of a ring asks for the same few numbers in every layer."""
    return torch.tensor(numbers, dtype=torch.int32, device=device)
