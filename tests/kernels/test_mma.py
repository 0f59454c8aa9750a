"""The mma kernels on the simulator: every option, sizes and tiles, the threshold of lazy rescaling, dropout masks,
orders, addresses, global traffic, planted bugs.

test_kernels.py tests the headers that mma shares with simt.
"""

import functools
import math
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pytest
from cases import (
    OPTIONS,
    PACKED,
    PACKED_OPTIONS,
    SCORES,
    SCORES_AGAIN,
    Case,
    Result,
    assert_bitwise_equal,
    check,
    check_forward_first,
    covering,
    planned,
    run_kernels,
)
from planting import change, never, planted, skip
from tiers import exhaustive, in_tiers
from tiles import SMALL_FRAGMENTS, fragments, small_tile

from cupy_flash import dispatch
from cupy_flash.dropout import keep_mask
from cupy_flash.engines import mma
from cupy_flash.engines.fragments import RESCALE_ABOVE
from cupy_flash.problem.records import Saved
from cupy_flash.simulator.errors import (
    MemoryFault,
    Misaligned,
    OutOfBounds,
    PendingCopy,
    Race,
    SimulationError,
    Uninitialised,
)
from cupy_flash.simulator.run import start

pytestmark = pytest.mark.usefixtures("poisoned_memory")

BUILDS = {"sm_75": "float16", "sm_80": "bfloat16", "sm_90": "bfloat16"}  # the usual dtype of each architecture
# dQ is added as single numbers on sm_80 and as vectors of four on sm_90; test_every_option runs dQ's own kernel.
DQ = {"sm_80": "added", "sm_90": "added"}


def run_mma(case, arch="sm_80", **how):
    return run_kernels(case, arch=arch, engine="mma", **how)


# Every option and all pairs of options

# Half precision: leaves out the rows that test float32 or float64.
HALF_OPTIONS = {
    name: case
    for name, case in OPTIONS.items()
    if case.dtype in ("float16", "bfloat16") or (case.dtype == "float32" and not name.startswith("dtype-"))
} | {"bias-float32": Case(bias="1hqk", bias_dtype="float32")}


def half_rows(rows, *archs, default=None, **dtypes):
    """Parametrize over the distinct (case, arch), in the usual dtype of the architecture or the one in `dtypes`.

    `default` maps an architecture to the rows that run by default; architectures not in it run all rows.
    """
    parameters = {}
    for arch in archs:
        for name, case in rows.items():
            case = replace(case, dtype=dtypes.get(arch, BUILDS[arch]))
            if case.dtype == "float16":  # the gradients of the formula itself overflow
                if name == "scale-large":
                    continue
                if case.scores == "huge" and case.scale is not None:
                    case = replace(case, scores="integers")
            marks = pytest.mark.exhaustive if name not in (default or {}).get(arch, rows) else ()
            parameters.setdefault((case, arch), pytest.param(case, arch, id=f"{arch}-{name}", marks=marks))
    return pytest.mark.parametrize(("case", "arch"), parameters.values())


# The engine's own code branches on masked tiles, modified scores, a dense mask, dropout and a gradient of the bias. The
# values of these rows are read only in headers shared with simt, whose tests in behaviour/ run all of them: mask.cuh,
# score.cuh, sequence.cuh and dbias.cuh. What softmax2.cuh computes, scales, sinks and huge or hidden scores, runs here.
READ_IN_SHARED_HEADERS = {
    "causal-square", "top-left-more-queries", "window-left", "window-right", "window-unbounded", "window-causal",
    "window-top-left", "window-beyond-int32", "alibi", "alibi-per-batch", "alibi-top-left", "mask-per-key",
    "mask-of-two-dimensions", "mask-single", "q-lengths", "lengths-top-left-window", "lengths-bias",
    "dropout-bhsd", "multi-query", "one-head", "all-sizes-equal", "all-sizes-equal-bhsd", "bias-b1qk",
    "bias-bh1k", "bias-11qk", "bias-b11k", "bias-hqk", "bias-qk", "bias-single", "bias-float16", "bias-bfloat16",
    "bias-float64",
}  # fmt: skip
assert HALF_OPTIONS.keys() >= READ_IN_SHARED_HEADERS
# sm_75 has other mma instructions, copies and dtypes, but the same code for options.
TURING_OPTIONS = ("plain", "lengths-causal", "bias-bhqk", "dropout", "head-dim-65")


@half_rows(
    HALF_OPTIONS,
    "sm_75",
    "sm_80",
    default={"sm_75": TURING_OPTIONS, "sm_80": HALF_OPTIONS.keys() - set(SCORES_AGAIN) - READ_IN_SHARED_HEADERS},
)
def test_every_option(case, arch):
    check(case, run_mma(case, arch, tile=small_tile))


@half_rows(covering(6, without=("bfloat16", "float64")), "sm_80", "sm_90", default={"sm_80": ()}, sm_80="float16")
def test_all_pairs_of_options(case, arch):
    check(case, run_mma(case, arch, tile=fragments(SMALL_FRAGMENTS, DQ[arch])))


# A packed batch differs from a padded one only in addresses and lengths.
PACKING_OPTIONS = ("plain", "causal", "sink", "dropout", "grouped-wide-values", "zero-length-in-the-middle")
PACKING_OPTIONS += ("no-sequence", "bias", "bias-of-all-sequences")


@half_rows(PACKED_OPTIONS, "sm_90", default={"sm_90": PACKING_OPTIONS})
def test_packed(case, arch):
    check(case, run_mma(case, arch, tile=fragments(SMALL_FRAGMENTS, DQ[arch])))


# Sizes and tiles


@pytest.mark.parametrize("causal", in_tiers({"full": False, "causal": True}, default=["causal"]))
@pytest.mark.parametrize("arch", [exhaustive("sm_75"), "sm_80"])
@pytest.mark.parametrize(
    ("q_len", "kv_len"), [(1, 1), (15, 129), (129, 15), (17, 63), (63, 17), (65, 65), (129, 129), (1, 65), (63, 1)]
)
def test_odd_sizes_in_the_tiles_of_a_plan(q_len, kv_len, arch, causal):
    case = Case(
        q_len, kv_len, batch=1, heads=2, kv_heads=1, head_dim=64, head_dim_v=64, dtype=BUILDS[arch], causal=causal,
        scores="integers" if kv_len == 1 else "normal",
    )  # fmt: skip
    check(case, run_mma(case, arch))


EVERYTHING = Case(q_len=37, kv_len=41, bias="1hqk", sink=True, causal=True, dropout=0.2, dtype="bfloat16")
TILES = {
    "one-stage": mma.Tile(32, 16, 64, 1, 1),
    "two-stages": mma.Tile(32, 32, 64, 1, 2, q_in_registers=True),
    "three-stages": mma.Tile(64, 32, 128, 1, 3),
    "one-warp": mma.Tile(16, 32, 32, 1, 1),
    "eight-warps": mma.Tile(128, 16, 256, 1, 2, q_in_registers=True),
    "two-rows-of-fragments": mma.Tile(64, 16, 64, 1, 2, q_in_registers=True),
    "two-columns-of-warps": mma.Tile(32, 32, 128, 2, 2),
    "four-columns-of-warps": mma.Tile(32, 16, 256, 4, 3, q_in_registers=True),
    "columns-and-two-rows": mma.Tile(32, 64, 64, 2, 1),
}


@pytest.mark.parametrize(
    "tile", in_tiers(TILES, default=["three-stages", "eight-warps", "four-columns-of-warps", "columns-and-two-rows"])
)
def test_any_tiles(tile):
    """Other tiles, numbers of warps and numbers of stages change results only by rounding."""
    check(EVERYTHING, run_mma(EVERYTHING, tile=fragments(tile)))


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
@pytest.mark.parametrize("tile", in_tiers(TILES, default=["one-stage", "four-columns-of-warps"]))
def test_any_tiles_accumulate_dq(tile, arch):
    """GPUs without vector additions to global memory add single numbers."""
    case = replace(EVERYTHING, head_dim=40)
    check(case, run_mma(case, arch, tile=fragments(tile, dq="added")))


SHARED = mma.Tile(rows=32, step=32, threads=64, column_warps=2, stages=2)
LONG = Case(70, 70, batch=1, heads=2, kv_heads=1, dtype="bfloat16")
SHARED_CASES = {
    "one-stage-everything": (replace(EVERYTHING, head_dim=40), "sm_90", SHARED._replace(stages=1)),
    "packed": (replace(PACKED, dtype="bfloat16", causal=True), "sm_80", SHARED),
    "eight-warps": (replace(LONG, head_dim=64, head_dim_v=40), "sm_80", mma.Tile(128, 128, 256, 2, 1)),
    "four-rows-of-warps": (replace(EVERYTHING, q_len=70, softcap=1.5), "sm_90", mma.Tile(128, 64, 256, 2, 2)),
}


@pytest.mark.parametrize("shared", in_tiers(SHARED_CASES, default=["one-stage-everything", "packed"]))
def test_warps_share_scores(shared):
    case, arch, tile = shared
    check(case, run_mma(case, arch, tile=fragments(tile, "shared")))


@pytest.mark.parametrize(("left", "right"), [(46, 30), (47, 31), (30, 46), (31, 47)])
def test_tiles_on_the_edge_of_a_window(left, right):
    """The window covers a tile at either end exactly, or all but one key; only covered tiles skip the mask."""
    case = Case(96, 96, batch=1, heads=1, kv_heads=1, window=(left, right), dtype="bfloat16")
    check(case, run_mma(case, tile=small_tile))


@pytest.mark.parametrize(
    ("head_dim", "head_dim_v"),
    [
        *((96, 96), (256, 256), (65, 3)),
        *(exhaustive(*dims) for dims in ((40, 40), (80, 80), (112, 112), (192, 128), (512, 512), (3, 65))),
    ],
)
def test_head_dims_in_the_tiles_of_a_plan(head_dim, head_dim_v):
    case = Case(
        20, 37, batch=1, heads=1, kv_heads=1, head_dim=head_dim, head_dim_v=head_dim_v, dtype="bfloat16", causal=True
    )
    check(case, run_mma(case))


def test_shared_memory_is_what_the_kernels_use():
    """With one byte less than planned, each kernel accesses memory out of bounds, so no plan reserves too much."""
    checked = []
    case = replace(EVERYTHING, q_len=70, kv_len=70, head_dim_v=40, batch=1, heads=2, kv_heads=1)
    call = case.call()
    for dq in ("own", "added", "shared"):
        tile = fragments(SHARED if dq == "shared" else SMALL_FRAGMENTS._replace(q_in_registers=False), dq)
        how = dict(arch="sm_90", engine="mma", tile=tile)
        result = run_kernels(case, **how)
        for saved in (None, Saved(call.dout, result.out, result.lse, call.dlse)):
            chosen, operands = planned(case, saved, **how)
            run = dispatch.run_forward if saved is None else dispatch.run_backward
            for number, step in enumerate(chosen.launches):
                if step.shared_bytes:
                    launches = list(chosen.launches)
                    launches[number] = step._replace(shared_bytes=step.shared_bytes - 1)
                    with pytest.raises(OutOfBounds, match="shared"):
                        run(chosen._replace(launches=tuple(launches)), operands)
                    checked.append(step.function)
    assert checked == [
        "forward",
        "backward_kv",
        "backward_q",
        "backward_bias",
        "forward",
        "backward_kv",
        "backward_bias",
        "forward",
        "backward",
        "backward_bias",
    ]


# The threshold of lazy rescaling


def creeping(powers):
    """Return a function that sets q and k so that scores in log2 units grow by `powers` at each visited tile.

    A tile has 16 keys; the last one is visited first.
    """

    def scores(q, k):
        q[...], k[...] = 0, 0
        q[..., 0] = np.resize([1, 1, -1, 0.5], q.shape[1])[:, None]
        tile = np.arange(k.shape[1]) // 16
        k[..., 0] = (powers * (tile[-1] - tile))[:, None]

    return scores


CREEPING = {"just-under": 7.96875, "at": 8.0, "just-over": 8.0625, "half": 4.03125, "far-over": 100.0, "falling": -9.0}
STEEP = Case(96, 96, batch=1, heads=1, kv_heads=1, scale=math.log(2))


def forward(case, rescale_above=RESCALE_ABOVE):
    """Return (out, lse) of a case with the given threshold of lazy rescaling."""
    chosen, operands = planned(case, None, "sm_75" if case.dtype == "float16" else "sm_80", small_tile, engine="mma")
    (launch,) = chosen.launches
    constants = dict(launch.constants) | {"RESCALE_ABOVE": rescale_above}
    launches = (launch._replace(constants=tuple(constants.items())),)
    out, lse = (array.numpy() for array in dispatch.run_forward(chosen._replace(launches=launches), operands))
    return Result(out, lse, *[None] * 5)


def check_forward(case, *rescale_above):
    check(case, forward(case, *rescale_above), only=("out", "lse"))


@pytest.mark.parametrize("dtype", ["float16", exhaustive("bfloat16")])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "hidden-first"])
@pytest.mark.parametrize("name", CREEPING)
def test_the_threshold_at_its_extremes(name, causal, dtype, monkeypatch):
    """A row max that grows by less than the threshold does not rescale O; P, O and l must not overflow."""
    monkeypatch.setitem(SCORES, f"creeping-{name}", creeping(CREEPING[name]))
    case = replace(STEEP, scores=f"creeping-{name}", causal=causal, dtype=dtype)
    check(case, run_mma(case, "sm_75" if dtype == "float16" else "sm_80", tile=small_tile))


@pytest.mark.parametrize("rescale_above", [0.0, 15.0])
def test_any_threshold_that_fp16_holds(rescale_above, monkeypatch):
    for name in ("just-under", "half", "falling"):
        monkeypatch.setitem(SCORES, f"creeping-{name}", creeping(CREEPING[name]))
        case = replace(STEEP, scores=f"creeping-{name}", dtype="float16")
        check_forward(case, rescale_above)


def test_scores_that_grow_past_the_range_of_fp16(monkeypatch):
    """Growth by more than the threshold rescales O: without it, 2**16.5 would exceed the largest fp16."""
    monkeypatch.setitem(SCORES, "creeping-past", creeping(16.5))
    case = replace(STEEP, scores="creeping-past", dtype="float16")
    check_forward(case)
    with pytest.raises(AssertionError):
        check_forward(case, 17.0)


# Dropout masks


@pytest.mark.parametrize("dq", ["own", "added"])
def test_dropout_draws_the_bits_of_its_twin(dq):
    """The zeros and signs of out and of the gradients show which probabilities were kept.

    If v is the identity, out is P. If q, k and dout are the identity too and v is ones, dv is P, and dq and dk are dS,
    which is negative where a probability was dropped, because dP is 1 everywhere.
    """
    how = dict(arch="sm_90", engine="mma", tile=fragments(SMALL_FRAGMENTS, dq))
    case = Case(40, 48, heads=2, head_dim=48, head_dim_v=48, dropout=0.5, dtype="bfloat16", dlse=False)
    seed = case.call().options["seed"]
    kept = np.array([[keep_mask(seed, b * 2 + h, 0, 40, 0, 48, 0.5) for h in range(2)] for b in range(2)])

    chosen, operands = planned(case, **how)
    for name, x in (("q", np.eye(40, 48)), ("k", np.eye(48)), ("v", np.eye(48))):
        getattr(operands, name).numpy()[...] = x[:, None]
    out = dispatch.run_forward(chosen, operands)[0].numpy()
    np.testing.assert_array_equal(out.swapaxes(1, 2) != 0, kept)

    operands.v.numpy()[...] = 1
    out, lse = (array.numpy() for array in dispatch.run_forward(chosen, operands))
    dout = np.broadcast_to(np.eye(40, 48)[:, None], out.shape).astype(out.dtype)
    chosen, others = planned(case, Saved(dout, out, lse, None), **how)
    assert ("dq" in [launch.kernel for launch in chosen.launches]) == (dq == "added")
    gradients = dispatch.run_backward(chosen, others._replace(q=operands.q, k=operands.k, v=operands.v))
    dq_rows, dk, dv = (getattr(gradients, name).numpy().swapaxes(1, 2) for name in ("dq", "dk", "dv"))
    np.testing.assert_array_equal(dq_rows > 0, kept)
    np.testing.assert_array_equal(dq_rows < 0, ~kept)
    np.testing.assert_array_equal((dv[..., :40] != 0).swapaxes(-1, -2), kept)
    np.testing.assert_array_equal((dk[..., :40] > 0).swapaxes(-1, -2), kept)


# Orders of blocks, warps and copies


@pytest.mark.parametrize("orders", [6, exhaustive(30)])
def test_bitwise_equal_in_any_order(orders):
    """No bit depends on the order of warps and blocks, or on when copies complete."""
    case = replace(EVERYTHING, batch=1, heads=2, kv_heads=1, kv_len=37, dropout=0.0)
    how = dict(tile=fragments(SMALL_FRAGMENTS), deterministic=True)
    first = run_mma(case, "sm_90", **how)
    check(case, first)
    for seed in range(orders):
        in_order = functools.partial(start, order="random", seed=seed)
        assert_bitwise_equal(run_mma(case, "sm_90", start=in_order, **how), first, case)


def test_dq_is_added_in_any_order():
    """Only the rounding of dQ depends on the order of the blocks."""
    tile = fragments(SMALL_FRAGMENTS, "added")
    case = replace(EVERYTHING, batch=1, heads=2, kv_heads=1, kv_len=70, dropout=0.0)
    first = run_mma(case, "sm_90", tile=tile)
    for seed in range(4):
        other = run_mma(case, "sm_90", tile=tile, start=functools.partial(start, order="random", seed=seed))
        check(case, other)
        assert_bitwise_equal(other._replace(dq=first.dq), first, case)


# Addresses


def shifted(x, by, extra):
    """Return the same values in rows that are `extra` elements longer, starting at an offset of `by` elements."""
    wide = np.full((*x.shape[:-1], x.shape[-1] + extra), np.nan, x.dtype)
    wide[..., by : by + x.shape[-1]] = x
    return wide[..., by : by + x.shape[-1]]


def run_on(case, arch, **arrays):
    """Return results of a case with some of its arrays replaced."""
    return run_mma(case, arch, tile=small_tile, call=case.call()._replace(**arrays))


@pytest.mark.parametrize(("by", "extra"), [(1, 8), (0, 1), (4, 8), (0, 4)], ids=["pointer", "row", "by-8", "row-by-8"])
@pytest.mark.parametrize("arch", [exhaustive("sm_75"), "sm_80"])
def test_rows_that_are_not_aligned_change_no_bit(arch, by, extra):
    """Aligned rows are read with 16-byte loads, others with scalar loads; the results are bitwise equal."""
    case = Case(head_dim=24, head_dim_v=16, dtype=BUILDS[arch])
    call = case.call()
    arrays = {name: shifted(getattr(call, name), by, extra) for name in ("q", "k", "v", "dout")}
    assert_bitwise_equal(run_on(case, arch, **arrays), run_on(case, arch), case)


def test_layouts_and_steps_backwards():
    """Any strides give the same results, negative ones included."""
    case = Case(dtype="bfloat16", causal=True)
    call = case.call()
    arrays = {}
    for name in ("q", "k", "v", "dout"):
        x = getattr(call, name)
        arrays[name] = np.ascontiguousarray(x[:, ::-1].swapaxes(0, 2)).swapaxes(0, 2)[:, ::-1]
    assert_bitwise_equal(run_on(case, "sm_80", **arrays), run_on(case, "sm_80"), case)


# Hidden inputs and gradients that are exactly 0


@pytest.mark.parametrize("dq", ["own", exhaustive("added")])
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(Case(causal=True, q_len=50), id="causal"),
        pytest.param(Case(mask="bhqk", bias="bhqk"), id="mask-bias"),
        pytest.param(Case(bias="11qk", bias_hides=True), id="bias-hides"),
        pytest.param(Case(kv_lengths=(0, 23), dropout=0.3), id="zero-length"),
        pytest.param(Case(kv_len=0), id="no-keys"),
    ],
)
def test_rows_that_see_no_key_have_no_gradient(case, dq):
    """Gradients are finite although dout and dlse are NaN in such rows, as for a loss that contains lse = -inf."""
    case = replace(case, dtype="bfloat16")
    call, how = case.call(), dict(arch="sm_90", engine="mma", tile=fragments(SMALL_FRAGMENTS, dq))
    out, lse = (array.numpy() for array in dispatch.run_forward(*planned(case, **how)))
    empty = np.isneginf(lse)
    assert empty.any()
    dout, dlse = call.dout.copy(), call.dlse.copy()
    dout[empty.swapaxes(1, 2)] = np.nan
    dlse[empty] = np.nan
    gradients = dispatch.run_backward(*planned(case, Saved(dout, out, lse, dlse), **how))
    result = Result(out, lse, *(None if x is None else x.numpy() for x in gradients))
    assert (result.dq[empty.swapaxes(1, 2)] == 0).all()
    check(case, result)


def test_keys_outside_every_window_are_never_read():
    """The first 60 keys lie outside every query's window, which is aligned to the end: NaN in them changes nothing."""
    case = Case(q_len=20, kv_len=40, window=(19, 0), dtype="bfloat16")
    call = case.call()
    k, v = (np.pad(x, [(0, 0), (60, 0), (0, 0), (0, 0)], constant_values=np.nan) for x in (call.k, call.v))
    check(case, run_on(case, "sm_80", k=k, v=v), only=("out", "lse"))


# Global traffic


@pytest.mark.parametrize("arch", BUILDS)
@pytest.mark.parametrize("dim", [exhaustive(64), exhaustive(96), 128])
def test_no_bank_conflicts_and_no_byte_twice(dim, arch, watch):
    """A block reads its own tile once from global memory and the tiles of its loop once; there are no bank
    conflicts.
    """
    case = Case(128, 128, batch=1, heads=1, kv_heads=1, head_dim=dim, head_dim_v=dim, dtype=BUILDS[arch])
    call = case.call()
    run_mma(case, arch, start=watch.start)
    forward, backward = (
        {launch.function: launch for launch in planned(case, saved, arch, engine="mma")[0].launches}
        for saved in (None, Saved(call.dout, call.dout, np.zeros((1, 1, 128), np.float32), call.dlse))
    )
    tensor, numbers, sums = call.q.nbytes, 128 * 4, 2 * call.q.nbytes
    for launch in (*forward.values(), *backward.values()):
        counters, blocks = watch.counters[launch.function], launch.grid[0]
        conflicts = [(instruction.where, access) for instruction, access in counters.conflicting()]
        assert not conflicts, f"{launch.function}: {conflicts}"
        added = blocks * sums if "dq" in backward else 0
        expected = {
            "forward": ((1 + 2 * blocks) * tensor, tensor + numbers),
            "backward_kv": (2 * tensor + blocks * (2 * tensor + 2 * numbers), 2 * tensor + added),
            "backward": (2 * tensor + blocks * (2 * tensor + 2 * numbers), 2 * tensor + added),
            "backward_q": (2 * tensor + 2 * numbers + blocks * 2 * tensor, tensor),
            "dq": (sums, tensor),
        }
        # other kernels read one number with all lanes of a warp, which is counted per lane
        if launch.function in expected:
            read, written = expected[launch.function]
            assert counters.global_bytes_written == written, launch.function
            assert read <= counters.global_bytes_read <= 1.1 * read, launch.function
    assert {"forward", "delta", "backward_kv" if arch == "sm_75" else "backward"} <= watch.counters.keys()


def test_a_planted_error_of_the_swizzle_has_bank_conflicts(monkeypatch, watch):
    """Reads and writes use the same wrong swizzle, so results are right, but there are bank conflicts."""
    case = Case(32, 32, batch=1, heads=1, kv_heads=1, head_dim=64, head_dim_v=64, dtype="bfloat16")
    with planted(monkeypatch, change("swizzle-of-row", "% GROUP", "% 2")):
        check(case, run_mma(case, tile=small_tile, start=watch.start))
    assert watch.counters["forward"].bank_conflicts > 100


# Planted bugs: with one step of a kernel changed, a check of the simulator fails or a result is wrong.


class Bug(NamedTuple):
    change: tuple
    error: type[Exception] = AssertionError
    case: Case = EVERYTHING
    dq: str = "own"
    tile: mma.Tile = SMALL_FRAGMENTS
    arch: str = "sm_90"


ONE_STAGE = SMALL_FRAGMENTS._replace(stages=1)
DIAGONAL = replace(LONG, q_len=110, causal=True)  # the first rows, and so the first tile, see no key
DROPPED = replace(LONG, dropout=0.3)
BUGS = {
    # Barriers and copies
    "stage-reused-by-the-forward": Bug(skip("forward.barrier-before-load"), Race, LONG, tile=ONE_STAGE),
    "stage-reused-by-the-backward": Bug(skip("stream.barrier-before-load"), Race, LONG, tile=ONE_STAGE),
    "no-barrier-after-the-wait": Bug(skip("barrier-after-loads"), Race, LONG),
    "wait-one-too-lenient": Bug(change("wait-loads", "STAGES - 2", "STAGES - 1"), PendingCopy, LONG),
    "wait-one-too-lenient-of-three": Bug(
        change("wait-loads", "STAGES - 2", "STAGES - 1"), PendingCopy, LONG, tile=SMALL_FRAGMENTS._replace(stages=3)
    ),
    "no-barrier-before-o-leaves": Bug(skip("barrier-before-O"), Race, LONG),
    "o-written-over-q": Bug(
        skip("wait-Q-loaded"), PendingCopy, DIAGONAL, tile=SMALL_FRAGMENTS._replace(q_in_registers=False)
    ),
    "no-barrier-before-dq-is-added": Bug(skip("barrier-before-added-dQ"), Race, LONG, "added"),
    "scores-read-before-they-are-shared": Bug(skip("barrier-after-shared-scores"), Race, LONG, "shared", tile=SHARED),
    "no-barrier-before-dbias-is-summed": Bug(skip("barrier-before-dbias"), Race, replace(EVERYTHING, bias="1h1k")),
    "stage-loaded-over-q": Bug(skip("barrier-after-Q-fragments"), SimulationError, LONG),
    "sums-not-cleared": Bug(skip("clear-sums"), Uninitialised, LONG, "added"),
    # Addresses
    "twist-of-one-side": Bug(change("swizzled-address", "swizzle(row)", "swizzle(row + 1)"), case=LONG),
    "alignment-ignored": Bug(change("unaligned-rows", "COUNT", "1"), Misaligned, replace(LONG, head_dim=20)),
    "alignment-ignored-when-stored": Bug(
        change("aligned-store", "x.aligned == 8", "x.aligned"), MemoryFault, replace(LONG, head_dim_v=20)
    ),
    "columns-past-the-last": Bug(
        change("bytes-of-chunk", "min(max(ROW - 16 * chunk, 0), 16)", "16"), SimulationError, replace(LONG, head_dim=24)
    ),
    "elements-of-a-fragment-confused": Bug(
        change("fragment-of-sums", "from[0], from[32]", "from[32], from[0]"), case=LONG, dq="added", arch="sm_80"
    ),
    "idle-threads-load": Bug(skip("idle-threads"), SimulationError, replace(LONG, head_dim=40)),
    "squares-of-packed-sequences-shared": Bug(
        change("square-of-sequence", "+ sequence.batch", ""), case=replace(PACKED, dtype="bfloat16"), dq="added"
    ),
    # Masks
    "no-mask-at-the-end": Bug(
        change("keys-all-see", "min(q_start + high + 1, kv_len)", "q_start + high + 1"), case=LONG
    ),
    "no-mask-on-the-diagonal": Bug(change("forward.mask", "kv_tiles.masked()", "false"), case=DIAGONAL),
    "no-mask-in-dq": Bug(change("dQ.mask", "kv_tiles.masked()", "false"), case=DIAGONAL),
    "no-mask-in-dkv": Bug(change("dKV.mask", "q_tiles.masked()", "false"), case=DIAGONAL),
    "no-mask-in-shared-scores": Bug(
        change("shared-scores.mask", "q_tiles.masked()", "false"), case=DIAGONAL, dq="shared", tile=SHARED
    ),
    # The walk over tiles
    "tile-loaded-twice": Bug(skip("forward.next-load"), case=LONG),
    "tile-of-queries-loaded-twice": Bug(skip("dKV.next-load"), OutOfBounds, LONG),
    "addresses-of-another-head": Bug(change("head-changes", "new_head != head", "head < 0"), OutOfBounds, LONG),
    "first-tile-not-visited": Bug(change("inside-walk", "start >= first", "start > first"), case=LONG),
    "nothing-seen-passes-a-gradient": Bug(
        change("delta-of-no-key", "lse == -infinity()", "false"), case=Case(mask="bhqk", dtype="bfloat16")
    ),
    # The softmax
    "o-not-rescaled": Bug(skip("rescale-O"), case=replace(LONG, scores="falling")),
    "l-not-rescaled": Bug(skip("rescale-l"), case=replace(LONG, scores="falling")),
    "reference-not-moved": Bug(
        change("softmax-reference", "m * scale_log2 - LARGEST_LOG2", "first ? m * scale_log2 : reference"),
        case=replace(LONG, scores="falling", dtype="float16"),
    ),
    "maximum-of-one-lane": Bug(change("update-softmax", "row_max(largest[m][half])", "largest[m][half]"), case=LONG),
    "sum-of-one-lane": Bug(change("sum-l", "row_sum(softmax[m][half].l)", "softmax[m][half].l"), case=LONG),
    "no-sink": Bug(never("add-sink"), case=replace(LONG, sink=True)),
    # Gradients
    "dq-not-scaled": Bug(change("scale-dQ", "(float)p.scale", "1.0f"), case=LONG),
    "added-dq-not-scaled": Bug(change("scale-added-dQ", "* (float)p.scale", ""), case=LONG, dq="added"),
    "dk-not-scaled": Bug(change("scale-dK", "(float)p.scale", "1.0f"), case=LONG),
    "dbias-of-the-product": Bug(
        change("differentiate-by-bias", "false, false>", "false, true>"), case=replace(EVERYTHING, softcap=1.5)
    ),
    "one-head-of-the-group": Bug(change("heads-of-walk", "p.group", "1"), case=LONG),
    # Dropout
    "neighbour-takes-the-wrong-bits": Bug(change("dropout-word", "e % 2 == odd", "e % 2 != odd"), case=DROPPED),
    "neighbour-takes-the-wrong-half": Bug(change("dropout-word", "16 * odd", "16 * (1 - odd)"), case=DROPPED),
    "bits-of-the-other-columns": Bug(change("dropout-column", "8 * (n % 2) + e % 2", "e % 2"), case=DROPPED),
    "kept-not-scaled": Bug(change("keep-scale", "DROPOUT ? (float)dropout.keep_scale : 1.0f", "1.0f"), case=DROPPED),
    # Products
    "half-of-the-depth-twice": Bug(
        change("mma-of-right-half", "b1", "b0"), case=replace(LONG, dtype="float16"), arch="sm_75"
    ),
}


# One for each kind of error, and bugs for which the case is made. Each of the others also fails a test without plants
# that runs by default.
FOUND_BY_DEFAULT = (
    "stage-reused-by-the-backward", "o-written-over-q", "no-mask-at-the-end", "reference-not-moved",
    "no-barrier-after-the-wait", "wait-one-too-lenient", "sums-not-cleared", "alignment-ignored",
    "columns-past-the-last", "addresses-of-another-head", "scores-read-before-they-are-shared", "no-mask-in-dq",
    "kept-not-scaled", "half-of-the-depth-twice",
)  # fmt: skip


@pytest.mark.parametrize("bug", in_tiers(BUGS, FOUND_BY_DEFAULT))
def test_planted_bugs_are_found(bug, monkeypatch):
    how = dict(arch=bug.arch, engine="mma", tile=fragments(bug.tile, bug.dq))
    with planted(monkeypatch, bug.change), pytest.raises(bug.error):
        check_forward_first(bug.case, **how)
