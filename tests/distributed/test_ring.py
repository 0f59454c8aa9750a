"""Ring and Ulysses attention on 2 and 4 ranks equal attention on one, forward and backward, to 1e-12 in fp64."""

import copy
import os
from dataclasses import dataclass, field, replace
from functools import cache, partial

import dtensor_checks
import numpy as np
import pytest
import ranks
import torch
from tolerance import assert_matches_reference
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

import cupy_flash
from cupy_flash import dispatch
from cupy_flash.distributed import (
    channel,
    packed_rows,
    positions,
    ring,
    ring_attention,
    ring_attention_varlen,
    ulysses_attention,
    ulysses_attention_varlen,
)


@dataclass(frozen=True)
class Case:
    """A call on a whole sequence, or on a packed batch if the lengths are tuples, and how its rows are sharded."""

    sharding: str = "zigzag"
    q_len: int | tuple[int, ...] = 37
    kv_len: int | tuple[int, ...] | None = None  # None: the same as q_len
    heads: int = 4
    kv_heads: int = 2
    dtype: str = "float64"
    sink: bool = False
    alibi: bool = False
    dlse: bool = True
    mods: bool = False  # a score_mod with gradients that reads positions and heads, and a mask_mod
    options: dict = field(default_factory=dict)

    @property
    def packed(self):
        return isinstance(self.q_len, tuple)

    @property
    def lengths(self):
        return self.q_len, self.q_len if self.kv_len is None else self.kv_len

    @property
    def row_axis(self):
        return 0 if self.packed else 2 if self.options.get("layout") == "bhsd" else 1

    def whole(self):
        """Return NumPy arrays q, k, v, dout, dlse of the whole sequence, and the options."""
        rng = np.random.default_rng(0)
        options = dict(self.options)
        if self.sink:
            options["sink"] = rng.normal(size=self.heads)
        if self.alibi:
            options["alibi_slopes"] = rng.uniform(0, 0.5, self.heads).astype(np.float32)
        if self.mods:
            longest = max(*self.lengths[0], *self.lengths[1]) if self.packed else max(self.lengths)
            table = rng.normal(size=(self.heads, longest)).astype(self.dtype)
            options["mods"] = (rng.normal(size=()).astype(self.dtype), table, np.arange(longest) // 7)
        q_rows, kv_rows = (sum(n) if self.packed else n for n in self.lengths)
        shapes = [
            (q_rows, self.heads, 8),
            (kv_rows, self.kv_heads, 8),
            (kv_rows, self.kv_heads, 6),
            (q_rows, self.heads, 6),
        ]
        arrays = [rng.normal(size=shape if self.packed else (2, *shape)) for shape in shapes]
        if self.row_axis == 2:
            arrays = [x.swapaxes(1, 2) for x in arrays]
        dlse = rng.normal(size=(self.heads, q_rows) if self.packed else (2, self.heads, q_rows))
        arrays = [np.ascontiguousarray(x).astype(self.dtype) for x in arrays]
        return *arrays, dlse.astype(np.float64 if self.dtype == "float64" else np.float32), options


def mods_over(factor, table, ids):
    """Return the score_mod and mask_mod of a case, which read NumPy or torch arrays."""
    return dict(
        score_mod=lambda s, b, h, q, kv: s * factor + table[h, abs(q - kv)],
        mask_mod=lambda b, h, q, kv: (ids[q] == ids[kv]) | (kv % 3 == h % 3) | (q - kv == 1),
    )


def boundaries(lengths):
    return np.cumsum([0, *lengths], dtype=np.int32)


def on_one(case, arrays):
    """Return (out, lse, dlse, gradients) of one process on the whole arrays."""
    q, k, v, dout, dlse, options = arrays
    options = dict(options)
    options |= mods_over(*options.pop("mods", ())) if case.mods else {}
    packed = [*map(boundaries, case.lengths), *map(max, case.lengths)] if case.packed else []
    forward, backward = (
        (cupy_flash.attention_varlen, cupy_flash.attention_varlen_backward)
        if case.packed
        else (cupy_flash.attention, cupy_flash.attention_backward)
    )
    out, lse = forward(q, k, v, *packed, return_lse=True, **options)
    # If lse is -inf, it has no gradient.
    dlse = np.where(np.isfinite(lse), dlse, 0).astype(dlse.dtype) if case.dlse else None
    return out, lse, dlse, backward(dout, q, k, v, out, lse, *packed, dlse=dlse, **options)


ON_ONE = {}  # results of `on_one` in this process, by the case without its sharding, which does not change them


def on_ranks(case, arrays, dlse, world, group=None, scheme="ring"):
    """Return (out, lse, dq, dk, dv, dsink) of this rank's shard, and the rows of its queries and keys."""
    q, k, v, dout, _, options = arrays
    options = {name: torch.from_numpy(x) if isinstance(x, np.ndarray) else x for name, x in options.items()}
    if case.packed and scheme == "ring":
        rows = [packed_rows(boundaries(n), world.rank, world.size, case.sharding) for n in case.lengths]
    else:
        counts = [sum(n) if case.packed else n for n in case.lengths]
        rows = [positions(n, world.rank, world.size, case.sharding) for n in counts]
        options["seqlen"] = tuple(counts)
    rows = [torch.from_numpy(x) for x in rows]
    leaves = [
        torch.from_numpy(x).index_select(case.row_axis, at).requires_grad_()
        for x, at in zip((q, k, v), (rows[0], rows[1], rows[1]), strict=True)
    ]
    if case.sink:
        leaves.append(options["sink"].requires_grad_())
    if case.mods:
        captured = [torch.from_numpy(x) for x in options.pop("mods")]
        leaves += [x.requires_grad_() for x in captured[:2]]
        options |= mods_over(*captured)
    cu_seqlens = [torch.from_numpy(boundaries(n)) for n in case.lengths] if case.packed else []
    if scheme == "ring":
        function = partial(ring_attention_varlen if case.packed else ring_attention, sharding=case.sharding)
    else:
        function = ulysses_attention_varlen if case.packed else ulysses_attention
        cu_seqlens += [*map(max, case.lengths)] if case.packed else []
    out, lse = function(*leaves[:3], *cu_seqlens, group=group, return_lse=True, **options)
    results, gradients = [out], [torch.from_numpy(dout).index_select(case.row_axis, rows[0])]
    if dlse is not None:
        results, gradients = [out, lse], [*gradients, torch.from_numpy(dlse).index_select(-1, rows[0])]
    return [out, lse, *torch.autograd.grad(results, leaves, gradients)], rows


def compare(case, world, group=None, scheme="ring"):
    """Compare this rank's rows of every result with those of one process; dsink is summed over the ranks."""
    arrays, whole_case = case.whole(), repr(replace(case, sharding="whole"))
    if whole_case not in ON_ONE:
        ON_ONE[whole_case] = on_one(case, arrays)
    out, lse, dlse, gradients = ON_ONE[whole_case]
    shard_results, (q_rows, kv_rows) = on_ranks(case, arrays, dlse, world, group, scheme)
    axis = case.row_axis
    wanted = [(out, q_rows, axis), (lse, q_rows, -1), (gradients.dq, q_rows, axis), (gradients.dk, kv_rows, axis)]
    wanted += [(gradients.dv, kv_rows, axis)]
    for name, x, (whole, rows, dimension) in zip(("out", "lse", "dq", "dk", "dv"), shard_results, wanted, strict=False):
        expected = whole.take(rows.numpy(), dimension)
        assert x.dtype == getattr(torch, str(whole.dtype)) and x.shape == expected.shape, name
        np.testing.assert_allclose(x.detach().numpy(), expected, rtol=0, atol=1e-12, err_msg=name)
    if case.sink:
        distributed.all_reduce(shard_results[5], group=group)
        np.testing.assert_allclose(shard_results[5].numpy(), gradients.dsink, rtol=0, atol=1e-12, err_msg="dsink")
    if case.mods:
        for x, expected in zip(shard_results[-2:], gradients.dcaptured, strict=False):
            np.testing.assert_allclose(x.numpy(), expected, rtol=0, atol=1e-12, err_msg="gradient of a captured array")


def statistics_over_ranks(case, world):
    """Statistics of a ring have the key numbers of the whole sequence, and gradients as on one process."""
    arrays = case.whole()
    q, k, v, dout, dlse, options = arrays
    packed = [torch.from_numpy(boundaries(n)) for n in case.lengths] if case.packed else []
    longest = [*map(max, case.lengths)] if case.packed else []
    whole = [torch.from_numpy(x).requires_grad_() for x in (q, k, v)]
    options = {name: torch.from_numpy(x) if isinstance(x, np.ndarray) else x for name, x in options.items()}
    asked = dict(return_lse=True, statistics=("entropy", "argmax", "max"))
    attend = cupy_flash.attention_varlen if case.packed else cupy_flash.attention
    expected = attend(*whole, *packed, *longest, **asked, **options)
    if case.packed:
        rows = [packed_rows(boundaries(n), world.rank, world.size, case.sharding) for n in case.lengths]
    else:
        rows = [positions(n, world.rank, world.size, case.sharding) for n in case.lengths]
        options["seqlen"] = case.lengths
    rows = [torch.from_numpy(x) for x in rows]
    leaves = [
        x.detach().index_select(case.row_axis, at).requires_grad_()
        for x, at in zip(whole, (rows[0], rows[1], rows[1]), strict=True)
    ]
    attend = ring_attention_varlen if case.packed else ring_attention
    found = attend(*leaves, *packed, sharding=case.sharding, **asked, **options)
    weights = [torch.from_numpy(x) for x in (dout, dlse, np.sin(dlse), np.cos(dlse))]

    def summed(results, weights):
        terms = zip((*results[:2], results[2].max, results[2].entropy), weights, strict=True)
        return sum((x.masked_fill(x.isinf(), 0) * weight).sum() for x, weight in terms)

    of_whole = torch.autograd.grad(summed(expected, weights), whole)
    own = [weights[0].index_select(case.row_axis, rows[0]), *(x.index_select(-1, rows[0]) for x in weights[1:])]
    of_shards = torch.autograd.grad(summed(found, own), leaves)
    for name, one, other in zip(found[2]._fields, found[2], expected[2], strict=True):
        np.testing.assert_allclose(
            one.detach().numpy(), other.detach().index_select(-1, rows[0]).numpy(), rtol=0, atol=1e-12, err_msg=name
        )
    for one, other, at in zip(of_shards, of_whole, (rows[0], rows[1], rows[1]), strict=True):
        expected = other.index_select(case.row_axis, at)
        np.testing.assert_allclose(one.numpy(), expected.numpy(), rtol=0, atol=1e-12)


CASES = {
    "full": Case(),
    "causal": Case(options=dict(causal=True)),
    "causal-even": Case(q_len=32, options=dict(causal=True)),
    "top-left-fewer-keys": Case(q_len=40, kv_len=21, options=dict(causal="top_left")),
    "bottom-right-more-queries": Case(q_len=33, kv_len=18, options=dict(causal=True), sink=True),
    "bottom-right-more-keys": Case(q_len=9, kv_len=50, options=dict(causal=True)),
    "window": Case(options=dict(window=(5, 3))),
    "window-narrow": Case(options=dict(window=(1, 0), softcap=2.0)),
    "window-left-causal": Case(options=dict(window=(6, None), causal=True)),
    "multi-query-bhsd": Case(kv_heads=1, options=dict(layout="bhsd", causal=True, scale=-0.7)),
    "alibi": Case(alibi=True),
    "dropout": Case(options=dict(dropout=0.4, seed=5)),
    "alibi-causal-dropout-sink": Case(alibi=True, sink=True, options=dict(causal=True, dropout=0.3, seed=2**63 + 1)),
    "mods": Case(mods=True, sink=True),
    "mods-causal-window": Case(mods=True, kv_len=50, options=dict(causal=True, window=(20, None))),
    "mods-packed": Case(mods=True, q_len=(13, 0, 1, 22), kv_len=(15, 3, 0, 30)),
    "no-dlse": Case(dlse=False, options=dict(causal=True)),
    "empty-shards": Case(q_len=3, options=dict(causal=True), sink=True),
    "no-positions": Case(q_len=0),
    "no-keys": Case(q_len=5, kv_len=0, sink=True),
    "packed": Case(q_len=(13, 0, 1, 22), options=dict(causal=True)),
    "packed-dropout": Case(
        q_len=(13, 5, 22), kv_len=(20, 0, 21), alibi=True, sink=True, options=dict(window=(7, 4), dropout=0.2, seed=1)
    ),
    "packed-of-none": Case(q_len=(0,)),
}
CHECKS = {
    f"{sharding}-{name}": partial(compare, replace(case, sharding=sharding))
    for sharding in ("contiguous", "zigzag", "striped")
    for name, case in CASES.items()
}
# There are enough heads for 4 ranks. Each rank holds one slice of the rows, which may cross sequences.
CHECKS |= {
    f"{sharding}-statistics-{name}": partial(statistics_over_ranks, replace(CASES[name], sharding=sharding))
    for sharding in ("contiguous", "zigzag", "striped")
    for name in ("bottom-right-more-queries", "packed", "multi-query-bhsd")
}
CHECKS |= {
    f"ulysses-{name}": partial(compare, replace(case, sharding="contiguous", heads=8, kv_heads=4), scheme="ulysses")
    for name, case in CASES.items()
    if name != "packed-of-none"
}


def check(function):
    CHECKS[function.__name__.replace("_", "-")] = function
    return function


@check
def low_precision(world):
    """Parts in bfloat16 are merged and added in float32, so errors are not larger than those of one process."""
    for dtype in ("bfloat16", "float32"):
        case = Case(q_len=64, dtype="float32", options=dict(causal=True), dlse=False)
        *arrays, dlse, options = case.whole()
        arrays = [torch.from_numpy(x).to(getattr(torch, dtype)) for x in arrays]
        rows = torch.from_numpy(positions(64, world.rank, world.size, "zigzag"))

        def results(attend, x):
            q, k, v = (y.requires_grad_() for y in x[:3])
            out = attend(q, k, v, causal=True)
            return [out.detach(), *torch.autograd.grad(out, (q, k, v), x[3])]

        exact = results(cupy_flash.attention, [x.double() for x in arrays])
        alone = results(cupy_flash.attention, [x.clone() for x in arrays])
        shard_results = results(ring_attention, [x[:, rows] for x in arrays])
        for name, x, whole, low in zip(("out", "dq", "dk", "dv"), shard_results, exact, alone, strict=True):
            assert x.dtype == arrays[0].dtype
            actual = low.index_copy(1, rows, x)
            assert_matches_reference(*(y.double() for y in (actual, whole, low)), dtype, f"{dtype} {name}")


@check
def transfers_of_keys_overlap_with_computation(world):
    events, (forward, backward) = [], (dispatch.forward, dispatch.backward)
    start, wait = distributed.batch_isend_irecv, channel.Arrival.wait

    def noted(name, function):
        def call(*arguments):
            events.append(name)
            return function(*arguments)

        return call

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(distributed, "batch_isend_irecv", noted("send", start))
        patch.setattr(channel.Arrival, "wait", noted("wait", wait))
        patch.setattr(dispatch, "forward", noted("compute", forward))
        patch.setattr(dispatch, "backward", noted("compute", backward))
        q, k, v = (torch.randn(1, 8, 2, 4, requires_grad=True) for _ in range(3))
        out = ring_attention(q, k, v, sharding="contiguous")
        hops = world.size - 1
        assert events == ["send", "compute", "wait"] * hops + ["compute"]
        events.clear()
        out.sum().backward()
    # Keys are sent before the step that computes with the previous keys, and arrive during it; gradients are sent after
    # a step, and arrive during the following one.
    first, middle, last = ["send", "compute", "send", "wait"], ["send", "compute", "wait", "send", "wait"], ["compute"]
    assert events == first + middle * (hops - 1) + last + ["wait", "send", "wait"]


@check
def gradients_of_keys_are_sent_in_float32(world):
    sent = []
    start = distributed.batch_isend_irecv
    q, k, v = (torch.randn(1, 4, 2, 4, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    out = ring_attention(q, k, v)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(distributed, "batch_isend_irecv", lambda o: sent.append({x.tensor.dtype for x in o}) or start(o))
        out.sum().backward()
    assert sent.count({torch.float32}) == world.size and sent.count({torch.bfloat16}) == world.size - 1
    assert len(sent) == 2 * world.size - 1


@check
def parts_are_merged_in_float32(world):
    merged = []
    q = torch.randn(1, 8, 2, 4, dtype=torch.bfloat16)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            ring, "merge", lambda *parts, **options: merged.append(parts) or cupy_flash.merge(*parts, **options)
        )
        out = ring_attention(q, q, q)
    assert len(merged) >= 2 * (world.size - 1)
    assert {parts[0].dtype for parts in merged} == {torch.float32} and out.dtype == torch.bfloat16


@check
def keys_outside_a_window_are_not_sent(world):
    sent = []
    start = distributed.batch_isend_irecv
    q, k, v = (torch.randn(1, 8, 2, 4, requires_grad=True) for _ in range(3))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(distributed, "batch_isend_irecv", lambda o: sent.append(o) or start(o))
        out = ring_attention(q, k, v, causal=True, window=(8, 0), sharding="contiguous")
        assert len(sent) == 1
        out.sum().backward()
        assert len(sent) == 1 + 3  # the backward sends keys, then gradients, and returns the gradients at the end


@check
def the_backward_saves_only_this_ranks_shards(world):
    kept = []
    q, k, v = (torch.randn(2, 8, heads, 4, requires_grad=True) for heads in (4, 2, 2))
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        out = ring_attention(q, k, v, causal=True)
    lse = 2 * 4 * 8 * 4
    own = sum(x.nbytes for x in (q, k, v, out)) + lse
    assert sum(x.nbytes for x in kept) == own
    kept.clear()
    q, k, v = (torch.randn(2, 8, 4, 4, requires_grad=True) for _ in range(3))
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        out = ulysses_attention(q, k, v, causal=True)
    assert sum(x.nbytes for x in kept) == sum(x.nbytes for x in (q, k, v, out)) + lse


@check
def different_calls_of_ranks_are_an_error_on_all(world):
    q = torch.randn(3, 8, 4, 4)  # no other check uses this shape, so its agreement is not cached
    odd = world.rank == world.size - 1
    with pytest.raises(ValueError, match="scale: None on rank 0.*0.5 on rank"):
        ring_attention(q, q, q, scale=0.5 if odd else None)
    with pytest.raises(ValueError, match=r"must make the same call, but differ\n  - lengths: \(.*\) on rank 0"):
        x = q[:, :6] if odd else q
        ring_attention(x, x, x)
    with pytest.raises(ValueError, match=r"  - k: torch.float32 \(3, \*, 4, 4\) on rank 0.*\(3, \*, 2, 4\) on rank"):
        ring_attention(q, *[q[:, :, :2] if odd else q] * 2)
    with pytest.raises(ValueError, match="  - causal: "):
        ulysses_attention(q, q, q, causal=odd)
    # The group still works after the errors.
    compare(Case(), world)


@check
def one_rank_that_changes_an_option_is_an_error_on_all(world):
    """One rank switches back to options that all ranks have used before, so agreement on them must not be cached."""
    q, odd = torch.randn(1, 8, 4, 4), world.rank == world.size - 1
    changes = {"causal": (False, True), "window": (None, (3, 0)), "sharding": ("zigzag", "contiguous"), "seed": (1, 2)}
    for attend, name in (*((ring_attention, name) for name in changes), (ulysses_attention, "causal")):
        for value in changes[name]:
            attend(q, q, q, **dict(dropout=0.5, seed=1) | {name: value})
        with pytest.raises(ValueError, match=rf"must make the same call, but differ\n  - {name}: .* on rank"):
            attend(q, q, q, **dict(dropout=0.5, seed=1) | {name: changes[name][odd]})
    # Seeds are compared by value, and may be on any device.
    ring_attention(q, q, q, dropout=0.5, seed=torch.tensor([-2]) if odd else 2**64 - 2)
    with pytest.raises(ValueError, match="  - seed: 3 on rank 0.* 18446744073709551615 on rank"):
        ring_attention(q, q, q, dropout=0.5, seed=torch.tensor([-1 if odd else 3]))
    # the bounds differ between ranks, but not the number of rows
    bounds = [0, 4 * world.size, 8 * world.size] if odd else [0, 8 * world.size]
    with pytest.raises(ValueError, match="  - lengths: "):
        ring_attention_varlen(q[0], q[0], q[0], bounds, bounds)


@check
def requires_grad_on_some_ranks_only_is_refused(world):
    """A rank that requires gradients would wait in its backward for the other ranks, which run none."""
    q, odd = torch.randn(1, 8, 4, 4), world.rank == world.size - 1
    sink = torch.zeros(4, requires_grad=odd)
    alone = q.clone().requires_grad_(odd)
    everywhere = q.clone().requires_grad_()
    differ = "must make the same call, but differ\n  - requires_grad: False on rank 0.* True on rank"
    for attend in (ring_attention, ulysses_attention):
        for arrays, options in (((alone, q, q), {}), ((q, q, alone), {}), ((q, q, q), dict(sink=sink))):
            with pytest.raises(ValueError, match=differ):
                attend(*arrays, **options)
        with torch.set_grad_enabled(odd), pytest.raises(ValueError, match=differ):
            attend(everywhere, q, q)
        # Ranks may require gradients of different inputs, because every backward communicates in the same way.
        attend(*((everywhere, q, q) if odd else (q, everywhere, q))).sum().backward()
        with torch.no_grad():
            attend(alone, q, q)
    bounds = torch.tensor([0, 8 * world.size], dtype=torch.int32)
    for attend, longest in ((ring_attention_varlen, ()), (ulysses_attention_varlen, (99, 99))):
        with pytest.raises(ValueError, match=differ):
            attend(alone[0], q[0], q[0], bounds, bounds, *longest)


@check
def reentrant_checkpoints_work(world):
    q, k, v = (torch.randn(1, 8, 4, 4, requires_grad=True) for _ in range(3))
    for attend in (ring_attention, ulysses_attention):
        expected = torch.autograd.grad(attend(q, k, v, causal=True).square().sum(), (q, k, v))
        for use_reentrant in (True, False):
            out = checkpoint(lambda *x, attend=attend: attend(*x, causal=True), q, k, v, use_reentrant=use_reentrant)
            out.square().sum().backward()
            assert all(map(torch.equal, (q.grad, k.grad, v.grad), expected))
            q.grad = k.grad = v.grad = None


@check
def an_invalid_call_of_one_rank_is_an_error_on_all(world):
    q, odd = torch.randn(1, 8, 4, 4), world.rank == 1
    bounds = torch.tensor([0, 8 * world.size], dtype=torch.int32)

    def refused(reason, error, attend, *arrays, **options):
        others = rf"(?s){attend.__name__}: some of the {world.size} ranks .* refused their call\n  - rank 1: .*{reason}"
        with pytest.raises(error if odd else ValueError, match=reason if odd else others):
            attend(*arrays, **options)

    for attend in (ring_attention, ulysses_attention):
        refused("k and v must have one length, not 8 and 7", ValueError, attend, q, q, q[:, :7] if odd else q)
        refused("check_ranks must be True or False", TypeError, attend, q, q, q, check_ranks="x" if odd else True)
        refused("unknown option 'casual'", TypeError, attend, q, q, q, **{"casual" if odd else "causal": True})
    refused("has 8 queries and 8 keys", ValueError, ring_attention, q, q, q, seqlen=1 if odd else None)
    refused("has 7 queries and 8 keys", ValueError, ring_attention_varlen, q[0, odd:], q[0], q[0], bounds, bounds)
    refused(
        "k and v must have one length, not 8 and 7", ValueError, ulysses_attention_varlen, q[0], q[0], q[0, odd:],
        bounds, bounds, 99, 99,
    )  # fmt: skip
    with pytest.raises(ValueError, match="  - max_seqlen_q: 99 on rank 0, 100 on rank 1"):
        ulysses_attention_varlen(q[0], q[0], q[0], bounds, bounds, 99 + odd, 99)
    compare(Case(), world)  # the group still works


@check
def agreement_sends_8_bytes_per_rank_or_nothing(world):
    gathered, q = [], torch.randn(1, 12, 4, 4)
    gather = distributed.all_gather

    def counted(everyone, digest, **options):
        gathered.append((digest.dtype, digest.numel()))
        return gather(everyone, digest, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(distributed, "all_gather", counted)
        patch.delattr(distributed, "all_gather_object")
        for attend in (ring_attention, ulysses_attention):
            out = attend(q, q, q)
            assert gathered == [(torch.int64, 1)]
            gathered.clear()
            with pytest.MonkeyPatch.context() as without:
                without.delattr(distributed, "all_gather")
                without.delattr(channel, "blake2b")  # with check_ranks=False no digest is computed either
                assert torch.equal(out, attend(q, q, q, check_ranks=False))
                with pytest.raises(ValueError, match="one length"):
                    attend(q, q, q[:, :7], check_ranks=False)


@check
def invalid_calls_are_refused_with_a_reason(world):
    q = torch.randn(1, 8, 4, 4)
    with pytest.raises(
        ValueError, match="bias is not served over several ranks\n  - mask is not served.*\n  - dropout needs"
    ):
        ring_attention(q, q, q, bias=q[0], mask=q[0] > 0, dropout=0.1)
    lists = torch.zeros(1, 1, 8, 1, dtype=torch.int32)
    for attend in (ring_attention, ulysses_attention):
        with pytest.raises(ValueError, match="selected is not served over several ranks"):
            attend(q, q, q, selected=lists)
    fp8 = q.to(torch.float8_e4m3fn)
    with pytest.raises(ValueError, match="v_descale is not served over several ranks\n  - fp8 is not served over"):
        ring_attention(fp8, fp8, fp8, v_descale=torch.ones(1, 4))
    with pytest.raises(TypeError, match="unknown option 'casual'"):
        ring_attention(q, q, q, casual=True)
    with pytest.raises(TypeError, match="q, k and v must be torch tensors, not <class 'numpy.ndarray'>"):
        ring_attention(q.numpy(), q.numpy(), q.numpy())
    with pytest.raises(ValueError, match="k and v must have one length, not 8 and 7"):
        ring_attention(q, q, q[:, :7])
    with pytest.raises(
        ValueError, match=rf"rank {world.rank} of {world.size} has 8 queries and 8 keys, not the .*seqlen="
    ):
        ring_attention(q, q, q, seqlen=1000)
    with pytest.raises(TypeError, match="seqlen must be None, a whole number or"):
        ring_attention(q, q, q, seqlen="long")
    with pytest.raises(ValueError, match="sharding must be one of contiguous, zigzag, striped, not 'round'"):
        ring_attention(q, q, q, sharding="round")
    with pytest.raises(ValueError, match="cu_seqlens_k must start at 0 and not decrease"):
        ring_attention_varlen(q[0], q[0], q[0], [0, 8], [0, 9, 8])
    with pytest.raises(TypeError, match=r"cu_seqlens_q must be \(B \+ 1,\) whole numbers"):
        ring_attention_varlen(q[0], q[0], q[0], 8, [0, 8])
    with pytest.raises(ValueError, match="the 3 heads of k and v and the 3 of q must be multiples of"):
        ulysses_attention(*[q[:, :, :3]] * 3)
    with pytest.raises(ValueError, match=r"q must have 3 dimensions \(T, H, D\)"):
        ulysses_attention_varlen(q, q, q, *[torch.tensor([0, 8], dtype=torch.int32)] * 2, 8, 8)
    with pytest.raises(TypeError, match="cu_seqlens_q must be int32, not int64"):
        ulysses_attention_varlen(q[0], q[0], q[0], torch.tensor([0, 8]), [0, 8], 8, 8)
    q.requires_grad_()
    for attend in (ring_attention, ulysses_attention):
        with pytest.raises(RuntimeError, match="no second derivative"):
            torch.autograd.grad(attend(q, q, q).sum(), q, create_graph=True)


class Layer(torch.nn.Module):
    """Attention with a residual connection, on a shard of the sequence."""

    def __init__(self, attend):
        super().__init__()
        self.qkv = torch.nn.Linear(8, 24, dtype=torch.float64)
        self.attend = attend

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 4)).unbind(2)
        return x + self.attend(q, k, v, causal=True).flatten(2)


@check
def inside_fsdp2_with_checkpointing(world):
    torch.manual_seed(0)
    alone = torch.nn.Sequential(*(Layer(cupy_flash.attention) for _ in range(2)))
    x = torch.randn(2, 16, 8, dtype=torch.float64)
    model = copy.deepcopy(alone)
    alone(x).square().sum().backward()
    for layer in model:
        layer.attend = ring_attention
        fully_shard(layer)
    fully_shard(model)
    y = x[:, torch.from_numpy(positions(16, world.rank, world.size))]
    for layer in model:
        y = checkpoint(layer, y, use_reentrant=False)
    y.square().sum().backward()
    for (name, parameter), (_, expected) in zip(model.named_parameters(), alone.named_parameters(), strict=True):
        summed = parameter.grad.full_tensor() * world.size  # FSDP2 averages over ranks
        torch.testing.assert_close(summed, expected.grad, rtol=0, atol=1e-11, msg=name)


ON_4 = {}


def on_4(function):
    ON_4[function.__name__.replace("_", "-")] = function
    return function


@on_4
def a_mesh_of_other_ranks_than_0_to_n(world):
    """Two rings run at once: ranks 0 and 2, and ranks 1 and 3."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("sequence", "data"))
    here = replace(world, rank=world.rank // 2, size=2)
    for sharding in ("zigzag", "contiguous"):
        compare(Case(sharding=sharding, options=dict(causal=True)), here, mesh["sequence"])
    compare(Case(sharding="contiguous"), here, mesh["sequence"], "ulysses")
    with pytest.raises(ValueError, match="a DeviceMesh must have one dimension, not 2"):
        compare(Case(), here, mesh)


@on_4
def a_group_in_another_order(world):
    order = [3, 1, 2]
    group = distributed.new_group(order, sort_ranks=False)
    if world.rank in order:
        here = replace(world, rank=order.index(world.rank), size=3)
        compare(Case(options=dict(causal=True)), here, group)
        compare(Case(sharding="striped", options=dict(dropout=0.5, seed=1)), here, group)
    else:
        with pytest.raises(ValueError, match="this process, rank 0, is not in the group"):
            compare(Case(), world, group)


@on_4
def a_rank_that_dies_is_an_error_for_the_others(world):
    """Rank 2 dies during a step. This check destroys the group, so it runs last."""
    q = torch.randn(1, 8, 4, 4)
    ring_attention(q, q, q)

    def die(problem, operands):
        os._exit(1)

    if world.rank == 2:
        dispatch.forward = die
    with pytest.raises(RuntimeError):  # torch reports that the connection is closed
        for _ in range(3):
            ring_attention(q, q, q)


DTENSORS = {f"dtensor-{name}": partial(dtensor_checks.on_2, case) for name, case in dtensor_checks.CASES.items()}
DTENSORS |= {
    "dtensor-refusals": dtensor_checks.refused_dtensors,
    "dtensor-sums": dtensor_checks.sums_with_dropout,
    "dtensor-sdpa": dtensor_checks.sdpa_of_dtensors,
    "ring-of-torch": dtensor_checks.ring_of_torch,
}
ON_4 = {"dtensor-mesh": dtensor_checks.a_mesh_of_two_axes} | ON_4
SIZES = {2: CHECKS | DTENSORS, 4: CHECKS | ON_4}


@pytest.fixture(scope="module")
def complaints(tmp_path_factory):
    """Return a function from the size of a group of processes to its errors by check and rank; a group runs once."""
    return cache(lambda size: ranks.run(SIZES[size], size, tmp_path_factory.mktemp("ranks")))


@pytest.mark.parametrize(
    "size, name", [pytest.param(size, name, id=f"{size}-{name}") for size, checks in SIZES.items() for name in checks]
)
def test_on_ranks(complaints, size, name):
    errors = complaints(size)[name]
    assert set(errors) == set(range(size)) - ({2} if "dies" in name else set()), "ranks that reported a result"
    assert not any(errors.values()), "\n".join(f"rank {rank}: {text}" for rank, text in errors.items() if text)


def test_needs_a_process_group():
    q = torch.randn(1, 8, 4, 4)
    with pytest.raises(RuntimeError, match="init_process_group has not been called"):
        ring_attention(q, q, q)


def test_check_ranks_is_a_flag_on_one_rank_too(tmp_path):
    q = torch.randn(1, 8, 4, 4)
    distributed.init_process_group("gloo", f"file://{tmp_path / 'rendezvous'}", world_size=1, rank=0)
    try:
        for attend in (ring_attention, ulysses_attention):
            for value in ("x", 1, None):
                with pytest.raises(TypeError, match=f"^{attend.__name__}: check_ranks must be True or False, not "):
                    attend(q, q, q, check_ranks=value)
    finally:
        distributed.destroy_process_group()
