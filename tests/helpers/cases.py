"""A call of attention as a record. Its repr reproduces a failure: run `check(Case(...))` in a shell."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import asdict, dataclass, replace
from functools import cache
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest
from mods import mods_of
from on_gpu import has_gpu
from tiles import small_tile
from tolerance import assert_matches_reference

import cupy_flash
from cupy_flash import device, dispatch
from cupy_flash.arrays import Array
from cupy_flash.cpu import attention as cpu
from cupy_flash.gpu import run_plan
from cupy_flash.measure.checks import references as reference_runs
from cupy_flash.measure.checks.references import furthest as furthest
from cupy_flash.plan.plan import Plan, plan
from cupy_flash.problem.build import pose
from cupy_flash.problem.recorded_call import Call
from cupy_flash.problem.records import Operands, Options, Packed, Saved
from cupy_flash.simulator.run import start

DTYPES = {name: np.dtype(name) for name in ("float16", "float32", "float64")}
DTYPES["bfloat16"] = np.dtype(ml_dtypes.bfloat16)


class Result(NamedTuple):
    """The results of a forward and a backward; None where there is no such result."""

    out: np.ndarray
    lse: np.ndarray
    dq: np.ndarray
    dk: np.ndarray
    dv: np.ndarray | None
    dbias: np.ndarray | None
    dsink: np.ndarray | None
    dcaptured: tuple[np.ndarray | None, ...] | None = None


@dataclass(frozen=True)
class Case:
    """A problem and its options.

    Shapes of bias and mask are letters of bhqk, or 1: "h1k" is (Hq, 1, Sk), "" a scalar.
    """

    q_len: int = 19
    kv_len: int = 23
    batch: int = 2
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    head_dim_v: int = 16
    dtype: str = "float32"
    layout: str = "bshd"
    scores: str = "normal"  # a name in SCORES
    causal: bool | str = False
    window: tuple[int | None, int | None] | None = None
    scale: float | None = None
    softcap: float | None = None
    alibi: str | None = None  # axes: "h" or "bh"
    bias: str | None = None
    bias_dtype: str | None = None  # None: the dtype of q
    bias_size: float = 1.0
    bias_hides: bool = False  # some elements are -inf, and so is the last row if the shape has rows
    mask: str | None = None
    sink: bool | tuple[float, ...] = False  # True: random values
    q_lengths: tuple[int, ...] | None = None  # rows past the length are NaN
    kv_lengths: tuple[int, ...] | None = None
    score_mod: str | None = None  # a name in mods.SCORE_MODS
    mask_mod: str | None = None  # a name in mods.MASK_MODS
    packed: bool = False  # pack the sequences into one, followed by rows of NaN
    dropout: float = 0.0
    dlse: bool = True
    dout_size: float = 1.0  # factor of dout and dlse
    tangent_size: float = 1.0  # factor of the tangents in derivatives.py, a power of two
    shared: bool = False  # values inside keys: v is None
    seed: int = 0

    def call(self) -> Call:
        """Return the arrays of the case, drawn from a fixed seed."""
        rng = np.random.default_rng([self.seed, 1])
        dtype = DTYPES[self.dtype]
        q = rng.normal(size=(self.batch, self.q_len, self.heads, self.head_dim))
        k = rng.normal(size=(self.batch, self.kv_len, self.kv_heads, self.head_dim))
        v = rng.normal(size=(self.batch, self.kv_len, self.kv_heads, self.head_dim_v))
        dout = self.dout_size * rng.normal(size=(self.batch, self.q_len, self.heads, self.head_dim_v))
        dlse = self.dout_size * rng.normal(size=(self.batch, self.heads, self.q_len))
        SCORES[self.scores](q, k)
        options = {name: getattr(self, name) for name in ("causal", "window", "scale", "softcap")}
        options |= {} if self.packed else {"layout": self.layout}
        if self.alibi is not None:
            options["alibi_slopes"] = rng.uniform(0, 0.5, self._shape(self.alibi)).astype(np.float32)
        if self.bias is not None:
            bias = self.bias_size * rng.normal(size=self._shape(self.bias))
            if self.bias_hides:
                bias = np.where(rng.random(bias.shape) < 0.2, -np.inf, bias)
                if self.bias[-2:-1] == "q":
                    bias[..., -1:, :] = -np.inf
            if self.packed:
                bias = np.where(self._is_inside(bias.shape), bias, np.nan)
            options["bias"] = np.asarray(bias).astype(DTYPES[self.bias_dtype or self.dtype])
        if self.mask is not None:
            mask = np.asarray(rng.random(self._shape(self.mask)) < 0.7)
            if self.mask[-2:-1] == "q":
                mask[..., :2, :] = False  # these rows see no key
            options["mask"] = mask
        if self.sink:
            options["sink"] = np.array(rng.normal(size=self.heads) if self.sink is True else self.sink, dtype)
        for name, arrays in (("q_lengths", (q, dout, dlse.swapaxes(1, 2))), ("kv_lengths", (k, v))):
            if (lengths := getattr(self, name)) is not None:
                options[name] = np.array(lengths, np.int32)
                for array in arrays:
                    for entry, length in zip(array, lengths, strict=True):
                        entry[length:] = np.nan
        if self.dropout:
            options |= dict(dropout=self.dropout, seed=2**63 + 12345 + self.seed)
        options |= mods_of(self)
        packed = None
        if self.packed:
            q_lengths, kv_lengths = options.pop("q_lengths"), options.pop("kv_lengths")
            q, dout, dlse = (_pack(x, q_lengths) for x in (q, dout, dlse.swapaxes(1, 2)))
            k, v, dlse = _pack(k, kv_lengths), _pack(v, kv_lengths), dlse.T
            cu_seqlens = (np.cumsum([0, *lengths], dtype=np.int32) for lengths in (q_lengths, kv_lengths))
            packed = Packed(*cu_seqlens, self.q_len, self.kv_len)
        if self.layout == "bhsd":
            q, k, v, dout = (np.ascontiguousarray(x.swapaxes(1, 2)) for x in (q, k, v, dout))
        q, k, v, dout = (x.astype(dtype) for x in (q, k, v, dout))
        if self.shared:
            v, options["head_dim_v"] = None, self.head_dim_v
        return Call(q, k, v, options, dout, dlse.astype(self.accumulation) if self.dlse else None, packed)

    @property
    def accumulation(self) -> np.dtype:
        return np.dtype(np.float64 if self.dtype == "float64" else np.float32)

    def _is_inside(self, shape: tuple[int, ...]) -> np.ndarray:
        """Return which elements of an array, which broadcasts to (B, Hq, Sq, Sk), a packed sequence reads."""
        rows = np.arange(self.q_len) < np.array(self.q_lengths, int)[:, None]
        columns = np.arange(self.kv_len) < np.array(self.kv_lengths, int)[:, None]
        inside = rows[:, None, :, None] & columns[:, None, None, :]
        aligned = (1,) * (4 - len(shape)) + shape
        inside = inside.any(tuple(axis for axis in (0, 2, 3) if aligned[axis] == 1), keepdims=True)
        return np.broadcast_to(inside, aligned).reshape(shape)

    def _shape(self, letters: str) -> tuple[int, ...]:
        sizes = {"b": self.batch, "h": self.heads, "q": self.q_len, "k": self.kv_len, "1": 1}
        return tuple(sizes[letter] for letter in letters)

    def __repr__(self) -> str:
        default = asdict(Case())
        return (
            f"Case({', '.join(f'{name}={value!r}' for name, value in asdict(self).items() if value != default[name])})"
        )


def _pack(x: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Pack (B, S, ...) into (T + 3, ...); the last three rows are NaN."""
    return np.concatenate(
        [*(row[:length] for row, length in zip(x, lengths, strict=True)), np.full((3, *x.shape[2:]), np.nan)]
    )


def _stretch(q: np.ndarray, k: np.ndarray, keys: np.ndarray) -> None:
    """Set q and k so that the product of every query with key j is keys[j]."""
    q[...], k[...] = 0, 0
    q[..., 0] = 1
    k[..., 0] = keys[:, None]


def _integers(q: np.ndarray, k: np.ndarray, factor: float) -> None:
    """Round q and k so that every q.k is exact in any order of summation, which leaves only errors of the softmax."""
    q[...], k[...] = factor * np.rint(2 * q), np.rint(2 * k)


def _signs(q: np.ndarray, k: np.ndarray) -> None:
    """Set q and k so that every q.k is exactly 1 or -1."""
    for x in (q, k):
        x[..., 1:], x[..., 0] = 0, np.sign(x[..., 0])


SCORES = {
    "normal": lambda q, k: None,
    "signs": _signs,
    "integers": lambda q, k: _integers(q, k, 1.0),
    "tiny": lambda q, k: _integers(q, k, 2.0**-20),
    "huge": lambda q, k: _integers(q, k, 2.0**12),  # scores of some 1e4 with both signs and with ties
    "rising": lambda q, k: _stretch(q, k, np.arange(k.shape[1]) * 3.0),
    "falling": lambda q, k: _stretch(q, k, np.arange(k.shape[1]) * -3.0),
    "constant": lambda q, k: _stretch(q, k, np.full(k.shape[1], 100.0)),
    "one-hot": lambda q, k: _stretch(q, k, 1e4 * (np.arange(k.shape[1]) == k.shape[1] // 2)),
}


def run_public(case: Case, backend: str = "cpu", call: Call | None = None) -> Result:
    """Return results of the public functions on the arrays of the case, or on those of `call`, in its engine.

    On the CPU it is the engine cpu, whatever a process has imported; tests/cpu/test_aten.py runs the cases on aten.
    """
    q, k, v, options, dout, dlse, packed = call or case.call()
    options = options | dict(backend=backend) | (dict(engine="cpu") if backend == "cpu" else {})
    if packed is None:
        out, lse = cupy_flash.attention(q, k, v, return_lse=True, **options)
        return Result(out, lse, *cupy_flash.attention_backward(dout, q, k, v, out, lse, dlse=dlse, **options))
    out, lse = cupy_flash.attention_varlen(q, k, v, *packed, return_lse=True, **options)
    gradients = cupy_flash.attention_varlen_backward(dout, q, k, v, out, lse, *packed, dlse=dlse, **options)
    return Result(out, lse, *gradients)


def run(case: Case, backend: str = "cpu", call: Call | None = None) -> Result:
    """Return results of the public functions; backend="simulator" runs the kernels in small tiles."""
    if backend == "simulator":
        return run_kernels(case, tile=small_tile, call=call)
    return run_public(case, backend, call)


@cache
def outcome(case: Case, backend: str) -> Result:
    """Return results of `run`, cached because several tests check the same ones."""
    return run(case, backend)


def posed(case: Case, saved: Saved | None = None, call: Call | None = None, **changes) -> tuple[Plan, Operands]:
    """Return the plan of a case, with `changes` of its fields, and its operands; a backward if `saved` is given."""
    call = call or case.call()
    problem, operands = pose("case", (call.q, call.k, call.v), Options(**call.options), call.packed, saved)
    return dispatch.plan_for(problem)._replace(**changes), operands


def run_planned(case: Case, call: Call | None = None, **changes) -> Result:
    """Return results of the CPU engine with `changes` of the plan's fields, such as the tile or number of threads."""
    call = call or case.call()
    call = call._replace(options=call.options | dict(engine="cpu"))
    out, lse = (array.numpy() for array in cpu.forward(*posed(case, call=call, **changes)))
    gradients = cpu.backward(*posed(case, Saved(call.dout, out, lse, call.dlse), call, **changes))
    return Result(out, lse, *gradients.map(Array.numpy))


def planned(
    case: Case,
    saved: Saved | None = None,
    arch: str = "sm_80",
    tile: Any = None,
    call: Call | None = None,
    fewer_bytes: int = 0,
    **changes,
) -> tuple[Plan, Operands]:
    """Return the plan of a case on a simulated GPU, after `changes` of the problem's fields, and its operands.

    tile: replaces the best tile; a function receives the plan with the best tile and returns another tile.
    fewer_bytes: reduces the shared memory of every kernel by this number of bytes.
    """
    on_cpu, operands = posed(case, saved, call)
    problem, gpu = on_cpu.problem._replace(**changes), device.named(arch)
    tile = tile(plan(problem, gpu)) if callable(tile) else tile
    chosen = plan(problem, gpu, tile)
    less = tuple(step._replace(shared_bytes=max(step.shared_bytes - fewer_bytes, 0)) for step in chosen.launches)
    return chosen._replace(launches=less), operands


def run_kernels(case: Case, *, call: Call | None = None, start: run_plan.Start = start, **how) -> Result:
    """Return results of the simulator with the plan of `planned(case, call=call, **how)`; `start` runs the launches."""
    call = call or case.call()
    out, lse = (array.numpy() for array in run_plan.forward(*planned(case, call=call, **how), start))
    saved = Saved(call.dout, out, lse, call.dlse)
    gradients = run_plan.backward(*planned(case, saved, call=call, **how), start)
    return Result(out, lse, *gradients.map(Array.numpy))


def check_forward_first(case: Case, **how) -> None:
    """Check results as those of `run_kernels(case, **how)`; if the forward is wrong, the backward is not compiled."""
    call = case.call()
    out, lse = (array.numpy() for array in run_plan.forward(*planned(case, **how), start))
    check(case, Result(out, lse, *[None] * 5), only=("out", "lse"))
    gradients = run_plan.backward(*planned(case, Saved(call.dout, out, lse, call.dlse), **how), start)
    check(case, Result(out, lse, *gradients.map(Array.numpy)))


@cache
def references(case: Case, gradients: bool = True) -> tuple[Result, Result]:
    """Return results of compute_references for the case's own arrays, cached because several tests use them."""
    return compute_references(case, case.call(), gradients)


def compute_references(case: Case, call: Call, gradients: bool = True, orders: int = 8) -> tuple[Result, Result]:
    """Return results of the formula in fp64 (longdouble for fp64), and the least accurate of low-precision runs."""
    exact, low = reference_runs.references(call, DTYPES[case.dtype], gradients, orders)
    return Result(*exact), Result(*low)


def check(
    case: Case,
    result: Result | None = None,
    backend: str = "cpu",
    only: tuple[str, ...] = Result._fields,
    call: Call | None = None,
) -> None:
    """Compare results (by default those of the public functions) with the reference."""
    result = run(case, backend, call) if result is None else result
    gradients = not {"out", "lse"}.issuperset(only)
    compare(
        case,
        result,
        *(references(case, gradients) if call is None else compute_references(case, call, gradients)),
        only,
    )


def compare(case: Case, result: Result, exact: Result, low: Result, only: tuple[str, ...] = Result._fields) -> None:
    """Compare dtypes, shapes and contiguity exactly, and values by the rule of tolerance.py."""
    dtypes = dict.fromkeys(Result._fields, DTYPES[case.dtype])
    dtypes |= {"lse": case.accumulation, "dbias": DTYPES[case.bias_dtype or case.dtype]}
    for name in only:
        if name == "dcaptured":  # the reference has no mods: tests/mods compares with autograd
            continue
        actual, expected = getattr(result, name), getattr(exact, name)
        assert (actual is None) == (expected is None), f"{name} of {case}"
        if actual is not None:
            assert (actual.dtype, actual.flags.c_contiguous) == (dtypes[name], True), f"{name} of {case}"
            assert_matches_reference(actual, expected, getattr(low, name), dtypes[name], f"{name} of {case}")


def assert_bitwise_equal(actual: Result, expected: Result, what: object) -> None:
    """Assert that two results have the same bytes, NaN and signed zeros included."""
    for name, a, b in zip(Result._fields, actual, expected, strict=True):
        assert (a is None) == (b is None), f"{name} of {what}"
        if a is not None:
            assert a.dtype == b.dtype and a.shape == b.shape, f"{name} of {what}"
            assert a.tobytes() == b.tobytes(), f"{name} of {what}: bits differ"


# One case per option.
OPTIONS = {
    "plain": Case(),
    "causal": Case(causal=True),
    "causal-more-queries": Case(causal=True, q_len=29),
    "causal-square": Case(causal=True, q_len=23),
    "top-left": Case(causal="top_left"),
    "top-left-more-queries": Case(causal="top_left", q_len=29),
    "window": Case(window=(3, 2)),
    "window-left": Case(window=(4, None)),
    "window-right": Case(window=(-1, 3)),
    "window-unbounded": Case(window=(-1, None)),
    "window-of-one": Case(window=(0, 0), scores="integers"),
    "window-more-queries": Case(window=(3, 2), q_len=29),
    "window-causal": Case(window=(5, 5), causal=True),
    "window-top-left": Case(window=(2, 1), causal="top_left"),
    "window-beyond-int32": Case(window=(2**40, 2**40), causal=True),
    "scale": Case(scale=1.7),
    "scale-negative": Case(scale=-0.9),
    "scale-zero": Case(scale=0.0),
    "scale-large": Case(scale=2.0**12, scores="integers"),
    "softcap": Case(softcap=1.5, scale=2.0),
    "alibi": Case(alibi="h"),
    "alibi-per-batch": Case(alibi="bh"),
    "alibi-causal": Case(alibi="h", causal=True),
    "alibi-top-left": Case(alibi="h", causal="top_left"),
    "mask": Case(mask="bhqk"),
    "mask-per-key": Case(mask="b11k"),
    "mask-of-two-dimensions": Case(mask="qk"),
    "mask-single": Case(mask=""),
    "sink": Case(sink=True),
    "sink-causal-empty-rows": Case(sink=True, causal=True, q_len=29),
    "q-lengths": Case(q_lengths=(19, 7)),
    "kv-lengths": Case(kv_lengths=(5, 23)),
    "lengths-causal": Case(q_lengths=(11, 19), kv_lengths=(20, 6), causal=True),
    "lengths-zero": Case(batch=3, q_lengths=(0, 12, 19), kv_lengths=(10, 0, 23), sink=True),
    "lengths-top-left-window": Case(q_lengths=(11, 19), kv_lengths=(20, 6), causal="top_left", window=(3, 3)),
    "lengths-bias": Case(q_lengths=(11, 19), kv_lengths=(20, 6), bias="bhqk", mask="qk"),
    "dropout": Case(dropout=0.4),
    "dropout-bhsd": Case(dropout=0.1, layout="bhsd", causal=True),
    "grouped": Case(heads=6, kv_heads=2),
    "multi-query": Case(heads=4, kv_heads=1),
    "one-head": Case(heads=1, kv_heads=1),
    "layout-bhsd": Case(layout="bhsd", causal=True),
    "wide-values": Case(head_dim_v=40),
    "narrow-values": Case(head_dim_v=1),
    "no-dlse": Case(dlse=False, causal=True),
    "one-query": Case(q_len=1, causal=True),
    "one-key": Case(kv_len=1, scores="integers"),
    "all-sizes-equal": Case(4, 4, 4, 4, 4, 4, 4, causal=True, bias="bhqk", sink=True),
    "all-sizes-equal-bhsd": Case(4, 4, 4, 4, 4, 4, 4, layout="bhsd", causal=True, mask="1hqk", dropout=0.3),
    "no-batch": Case(batch=0, bias="b1qk", sink=True),
    "no-queries": Case(q_len=0, bias="1hqk", sink=True),
    "no-keys": Case(kv_len=0, bias="bhqk", mask="qk"),
    "no-keys-sink": Case(kv_len=0, sink=True, causal=True),
}
OPTIONS |= {f"bias-{shape or 'single'}": Case(bias=shape, causal=True) for shape in ("bhqk", "1hqk", "b1qk", "bh1k")}
OPTIONS |= {
    f"bias-{shape or 'single'}": Case(bias=shape) for shape in ("bhq1", "11qk", "1h11", "b11k", "hqk", "qk", "k", "")
}
OPTIONS |= {f"bias-{name}": Case(bias="1hqk", bias_dtype=name) for name in ("float16", "bfloat16", "float64")}
OPTIONS |= {f"head-dim-{dim}": Case(head_dim=dim, head_dim_v=dim) for dim in (1, 3, 40, 65, 128, 192, 320)}
OPTIONS |= {f"dtype-{name}": Case(dtype=name, causal=True, sink=True, bias="1hqk") for name in DTYPES}
OPTIONS |= {f"dtype-{name}-dropout": Case(dtype=name, dropout=0.3, softcap=2.0) for name in DTYPES}
OPTIONS |= {f"scores-{name}": Case(scores=name) for name in SCORES}
OPTIONS |= {f"scores-{name}-causal-sink": Case(scores=name, causal=True, q_len=29, sink=True) for name in SCORES}
OPTIONS |= {f"scores-{name}-bfloat16": Case(scores=name, dtype="bfloat16", dropout=0.2) for name in SCORES}
# By default each distribution of scores runs with one dtype and no option; these rows add others.
SCORES_AGAIN = [f"scores-{name}{rest}" for name in SCORES for rest in ("-causal-sink", "-bfloat16")]
OPTIONS |= {
    "bias-huge": Case(bias="1hqk", bias_size=1e4),
    "bias-huge-causal-sink": Case(bias="qk", bias_size=1e4, causal=True, q_len=29, sink=True),
    "bias-hides": Case(bias="bhqk", bias_hides=True),
    "bias-hides-sink": Case(bias="1hqk", bias_hides=True, sink=True, causal=True, q_len=29),
    "bias-hides-softcap-dropout": Case(bias="qk", bias_hides=True, softcap=1.0, dropout=0.3),
}

# One small change per feature. PAIRS combines them two by two.
FEATURES = {
    "causal": dict(causal=True),
    "top-left": dict(causal="top_left"),
    "window": dict(window=(4, 3)),
    "scale": dict(scale=-0.75),
    "softcap": dict(softcap=1.5),
    "alibi": dict(alibi="bh"),
    "bias": dict(bias="1hqk", bias_hides=True),
    "mask": dict(mask="b1qk"),
    "sink": dict(sink=True),
    "q-lengths": dict(q_lengths=(13, 4)),
    "kv-lengths": dict(kv_lengths=(9, 17)),
    "dropout": dict(dropout=0.3),
    "bhsd": dict(layout="bhsd"),
    "grouped": dict(heads=6, kv_heads=2),
    "wide-values": dict(head_dim_v=16),
    "more-queries": dict(q_len=19),
    "huge": dict(scores="huge"),
    "bfloat16": dict(dtype="bfloat16"),
    "float64": dict(dtype="float64"),
}
PAIRS = {
    f"{a}+{b}": Case(**dict(q_len=13, kv_len=17, heads=2, head_dim=4) | FEATURES[a] | FEATURES[b])
    for a in FEATURES
    for b in FEATURES
    if a < b and not FEATURES[a].keys() & FEATURES[b].keys()
}


def covering(size: int, without: tuple[str, ...] = ()) -> dict[str, Case]:
    """Return rows of up to `size` features that contain every pair of PAIRS, for backends too slow to run PAIRS."""
    pairs = (frozenset(name.split("+")) for name in PAIRS)
    left = dict.fromkeys(pair for pair in pairs if pair.isdisjoint(without))
    rows = []
    while left:
        row = sorted(next(iter(left)))
        while len(row) < size:
            # Add the feature that is compatible with the whole row and covers the most pairs which are still missing.
            gains = {
                name: sum(frozenset((name, other)) in left for other in row)
                for name in FEATURES
                if all("+".join(sorted((name, other))) in PAIRS for other in row)
            }
            best = max(gains, key=gains.__getitem__, default=None)
            if best is None or gains[best] == 0:
                break
            row.append(best)
        for pair in [pair for pair in left if pair <= set(row)]:
            del left[pair]
        rows.append(row)
    small = dict(q_len=13, kv_len=17, heads=2, head_dim=4)
    return {
        "+".join(row): Case(**small | {key: x for name in row for key, x in FEATURES[name].items()}) for row in rows
    }


# The simulator is several thousand times slower than the CPU. It runs every option once, with the largest head
# dimension of simt instead of 320, which only the CPU engine supports, and every pair of features in rows of six.
SIMULATED_OPTIONS = {name: case for name, case in OPTIONS.items() if name != "head-dim-320"}
SIMULATED_OPTIONS["head-dim-256"] = Case(head_dim=256, head_dim_v=256)
# A large head dimension only lengthens the loops inside a tile, so these rows have two tiles of queries and of keys in
# the fewest heads that share keys; batches, more heads and longer sequences are in all other rows.
SIMULATED_OPTIONS |= {
    name: replace(case, q_len=9, kv_len=17, batch=1, heads=2, kv_heads=1)
    for name, case in SIMULATED_OPTIONS.items()
    if case.head_dim >= 64
}
SIMULATED_PAIRS = covering(6)

# Cases with several tiles of queries and of keys, for tests that choose the plan's tile.
TILED = {
    name: replace(OPTIONS[name], q_len=min(OPTIONS[name].q_len + 45, 70), kv_len=61)
    for name in (
        "plain", "causal", "causal-more-queries", "top-left", "window", "window-more-queries", "window-of-one",
        "window-causal", "softcap", "alibi-per-batch", "bias-bhqk", "bias-1h11", "bias-bh1k", "bias-bhq1", "bias-hides",
        "bias-hides-sink", "mask", "mask-per-key", "sink", "dropout", "grouped", "layout-bhsd", "dtype-float16",
        "dtype-bfloat16", "dtype-float64", "scores-rising", "scores-falling", "scores-huge", "scores-one-hot",
    )
}  # fmt: skip
TILED |= {
    "tiles-that-see-nothing": Case(q_len=70, kv_len=23, causal="top_left", window=(3, 2), scores="integers", scale=8.0),
    "lengths": Case(q_len=70, kv_len=61, q_lengths=(70, 33), kv_lengths=(16, 50)),
    "lengths-causal": Case(q_len=70, kv_len=61, q_lengths=(9, 70), kv_lengths=(61, 30), causal=True, sink=True),
    "lengths-window": Case(q_len=70, kv_len=61, q_lengths=(70, 33), kv_lengths=(16, 50), window=(7, 9)),
}

PACKED = Case(batch=4, q_lengths=(7, 19, 1, 12), kv_lengths=(9, 5, 23, 12), packed=True)
PACKED_OPTIONS = {
    "plain": PACKED,
    "causal": replace(PACKED, causal=True),
    "top-left": replace(PACKED, causal="top_left"),
    "window": replace(PACKED, window=(3, 2)),
    "window-causal": replace(PACKED, window=(4, None), causal=True),
    "scale-softcap": replace(PACKED, scale=-2.0, softcap=1.5),
    "alibi": replace(PACKED, alibi="h"),
    "alibi-per-sequence": replace(PACKED, alibi="bh", causal=True),
    "sink": replace(PACKED, sink=True, causal=True),
    "dropout": replace(PACKED, dropout=0.3),
    "grouped-wide-values": replace(PACKED, heads=6, kv_heads=3, head_dim_v=40),
    "bfloat16": replace(PACKED, dtype="bfloat16", causal=True, sink=True),
    "float64": replace(PACKED, dtype="float64", dropout=0.2),
    "no-dlse": replace(PACKED, dlse=False),
    "zero-length-queries-first": replace(PACKED, q_lengths=(0, 19, 1, 12)),
    "zero-length-keys-first": replace(PACKED, kv_lengths=(0, 5, 23, 12), sink=True),
    "zero-length-in-the-middle": replace(PACKED, q_lengths=(7, 0, 0, 12), kv_lengths=(9, 5, 0, 12), causal=True),
    "zero-length-last": replace(PACKED, q_lengths=(7, 19, 1, 0), kv_lengths=(9, 5, 23, 0)),
    "zero-length-all": replace(PACKED, q_lengths=(0,) * 4, kv_lengths=(0,) * 4, sink=True),
    "bias": replace(PACKED, bias="bhqk", causal=True, sink=True),
    "bias-of-all-sequences": replace(PACKED, q_len=22, kv_len=40, bias="1hqk", bias_hides=True, softcap=1.5),
    "bias-per-query": replace(PACKED, q_len=22, bias="b1q1", bias_dtype="float64", dropout=0.3),
    "bias-per-key": replace(PACKED, q_lengths=(0, 19, 1, 12), kv_lengths=(9, 0, 23, 12), bias="1h1k", alibi="h"),
    "one-sequence": replace(PACKED, batch=1, q_lengths=(19,), kv_lengths=(23,), causal=True),
    "no-sequence": replace(PACKED, batch=0, q_lengths=(), kv_lengths=(), sink=True),
}


def by_backend(names: str = "case", exhaustive: Collection[str] = (), **rows: dict) -> pytest.MarkDecorator:
    """Parametrize over (backend, `names`), given a table of rows per backend: by_backend(cpu={id: row}, simulator=...).

    Ids in `exhaustive` run by default only on the CPU. A GPU runs the simulator's rows, because both run the same
    engines, unless `rows` has a table for it.
    """
    if has_gpu():
        rows.setdefault("cuda", rows["simulator"])
    several = "," in names
    parameters = [
        pytest.param(
            backend,
            *(row if several else (row,)),
            id=f"{backend}-{name}",
            marks=pytest.mark.exhaustive if backend != "cpu" and name in exhaustive else (),
        )
        for backend, table in rows.items()
        for name, row in table.items()
    ]
    return pytest.mark.parametrize(f"backend,{names}", parameters, indirect=["backend"])
