"""JVPs and double backwards on the simulator: every option, tiles, directions, orders of blocks, work, planted bugs."""

import functools
import inspect
from dataclasses import replace

import cases
import pytest
from cases import OPTIONS, PACKED_OPTIONS, PAIRS, SIMULATED_PAIRS, Case
from derivatives import ALL, Derivatives, check, check_jvp_first, run_kernels
from planting import always, before, change, never, planted, skip
from tiers import exhaustive, in_tiers
from tiles import SMALL_TILE

from cupy_flash.engines import mma, simt
from cupy_flash.jit import nvrtc
from cupy_flash.simulator.errors import OutOfBounds
from cupy_flash.simulator.run import start

pytestmark = pytest.mark.usefixtures("poisoned_memory")

EVERYTHING = Case(
    q_len=20, kv_len=40, batch=1, heads=2, kv_heads=1, causal=True, softcap=2.0, bias="1hqk", sink=True, dropout=0.3
)
EVERY = OPTIONS | {f"packed-{name}": case for name, case in PACKED_OPTIONS.items()}
SERVED = {name: case for name, case in EVERY.items() if max(case.head_dim, case.head_dim_v) <= 256}


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", SERVED.values(), ids=SERVED)
def test_every_option(case):
    check(case, run_kernels(case, tile=SMALL_TILE))


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", PAIRS.values(), ids=PAIRS)
def test_all_pairs_of_options(case):
    check(case, run_kernels(case, tile=SMALL_TILE))


@pytest.mark.exhaustive
@pytest.mark.parametrize("arch", ["sm_75", "sm_90", "sm_120"])
@pytest.mark.parametrize("case", SIMULATED_PAIRS.values(), ids=SIMULATED_PAIRS)
def test_all_pairs_of_options_on_other_gpus(case, arch):
    check(case, run_kernels(case, arch=arch, tile=SMALL_TILE))


TILES = {
    "8x16x64": SMALL_TILE,
    "8x8x64": simt.Tile(8, 8, 64),
    "64x16x128": simt.Tile(64, 16, 128),
    "16x64x64": simt.Tile(16, 64, 64),
    "32x32x64": simt.Tile(32, 32, 64),
}


@pytest.mark.parametrize("tile", in_tiers(TILES, ["8x16x64"]))
def test_all_options_in_any_tiles(tile):
    """Other tiles than the planned one change results only by rounding."""
    check(EVERYTHING, run_kernels(EVERYTHING, tile=tile))


DIRECTIONS = {
    "none": (),
    **{name: (name,) for name in ALL},
    "tq-tk": ("tq", "tk"),
    "tk-tv-tsink": ("tk", "tv", "tsink"),
}


@pytest.mark.parametrize("moving", in_tiers(DIRECTIONS, ["tv"]))
def test_any_direction(moving):
    """A tangent of None gives the same results as a tangent of zeros."""
    check(EVERYTHING, run_kernels(EVERYTHING, moving, tile=SMALL_TILE), moving=moving)


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
@pytest.mark.parametrize("arch", ["sm_75", "sm_90", "sm_120"])
def test_any_gpu_and_dtype(arch, dtype):
    if (arch, dtype) == ("sm_75", "bfloat16"):
        dtype = "float32"
    case = replace(EVERYTHING, dtype=dtype)
    check(case, run_kernels(case, arch=arch, tile=SMALL_TILE))


@pytest.mark.exhaustive
def test_bitwise_equal_in_any_order_of_blocks():
    one, *others = (
        run_kernels(EVERYTHING, tile=SMALL_TILE, start=functools.partial(start, order="random", seed=seed))
        for seed in range(3)
    )
    for other in others:
        for name, a, b in zip(one._fields, one, other, strict=True):
            assert a.tobytes() == b.tobytes(), name


BUGS = {
    "lse-tangent-not-subtracted": change("simt.weigh-tangent", "(tS[r][c] - mean[r].lse_tangent)", "tS[r][c]"),
    "T-does-not-follow-lse-tangent": change("simt.rescale-T", "- change * O[r][n]", ""),
    "T-not-rescaled": change("simt.rescale-T", "* rescale", ""),
    "sum-of-mean-not-rescaled": change("simt.update-lse-tangent", "rescale", "1"),
    "dropout-in-lse-tangent": change("simt.sum-tangent", "S[r][c]", "S[r][c] * (c % 2 ? 0 : 2)"),
    "no-dropout-in-T": change("simt.drop-tangent", ", tS[r][c] *= factor", ""),
    "delta-for-its-tangent": change("second-gradients", "delta_tangent", "delta"),
    "delta-tangent-of-out": change(
        "delta-tangent-of-row", "sequence.queries<element>(p.tout, head) + i * p.tout.row", "O + i * p.out.row"
    ),
    "lse-tangent-not-subtracted-in-c": change("moving-tangent", "tangent - lse_tangent", "tangent"),
    "no-dropout-in-dV": change("second-gradients", "probability * factor * moving", "probability * moving"),
    "dtS-without-tK": never("dtP-of-tK"),
    "dtS-without-tQ": never("dtP-of-tQ"),
    "curve-of-the-softcap": change("softcap-curve", "-2 / (real)p.softcap * t * slope * x.tangent", "0"),
    "tangent-of-the-softcap": skip("softcap-tangent"),
    "tbias": never("add-tbias"),
    "dsink-without-lse-tangent": change(
        "lse-tangent-of-dsink", "sequence.queries<real>(p.tlse, head)[i * p.tlse.row]", "0"
    ),
}


@pytest.mark.parametrize("bug", in_tiers(BUGS, ["lse-tangent-not-subtracted"]))
def test_planted_bugs_are_found(bug, monkeypatch):
    with planted(monkeypatch, bug), pytest.raises(AssertionError, match="error"):
        check_jvp_first(EVERYTHING, tile=SMALL_TILE)


@pytest.mark.parametrize(
    ("dtype", "tile"),
    [exhaustive("float32", SMALL_TILE), exhaustive("float64", simt.Tile(32, 16, 128))],
    ids=str,
)
def test_shared_memory_is_what_the_kernels_use(tile, dtype):
    """In shared memory smaller by P's unused padding and one byte more, each kernel accesses memory out of bounds."""
    case = replace(EVERYTHING, dtype=dtype, head_dim_v=40)
    checked = []

    def start_with_less(work, **how):
        for number, step in enumerate(work.launches):
            if step.shared_bytes == 0:
                continue
            padding = 8 * case.accumulation.itemsize  # padding after the last row of P, the last array in shared memory
            less = step._replace(shared_bytes=step.shared_bytes - padding - 1)
            launches = (*work.launches[:number], less, *work.launches[number + 1 :])
            with pytest.raises(OutOfBounds, match="shared"):
                start(work._replace(launches=launches))
            checked.append(step.function)
        return start(work, **how)

    run_kernels(case, tile=tile, start=start_with_less)
    assert checked == ["jvp", "second_kv", "second_q", "second_bias"]


WORK = {("tq", "tk", "tv"): (3, 3.2), ("tq", "tv"): (2.5, 2.7), ("tq",): (2, 2.2)}


@pytest.mark.exhaustive
@pytest.mark.parametrize("moving", WORK)
def test_work_relative_to_the_forward_and_the_backward(moving, monkeypatch):
    """The numbers of FMAs and of all instructions are at most given multiples of those of the forward and the backward
    in the same tile.
    """
    # compile with the flags of a user's call, which unroll more than the tests' flags
    monkeypatch.setattr(nvrtc, "flags", inspect.unwrap(nvrtc.flags))
    case = Case(q_len=64, kv_len=192, head_dim=64, head_dim_v=64, batch=1, heads=1, kv_heads=1)
    counted = {}

    def counting(work, **how):
        counted.update(zip((step.function for step in work.launches), start(work, **how), strict=True))

    tile = simt.Tile(32, 32, 128)
    cases.run_kernels(case, engine="simt", tile=tile, start=counting)
    run_kernels(case, moving, tile=tile, start=counting)
    assert {name: count.bank_conflicts for name, count in counted.items() if count.bank_conflicts} == {}

    def fma(*names):
        return sum(counted[name].by_class()["fma"] for name in names)

    def instructions(*names):
        return sum(sum(counted[name].by_class().values()) for name in names)

    products, limit = WORK[moving]
    for count in (fma, instructions):
        backward = count("backward_kv", "backward_q")
        assert count("jvp") <= limit * count("forward")
        assert count("second_kv", "second_q") <= 2.3 * backward
        assert count("jvp", "second_kv", "second_q") <= 3.3 * backward
    assert 0.9 * products <= fma("jvp") / fma("forward") <= products


# Tensor cores


def run_mma(case, moving=ALL, which=0, **how):
    """Return the JVP by mma, in its best tile unless `which` selects another, and the double backward by mma."""

    def tile(chosen):
        return mma.tiles(chosen.problem, chosen.device)[which]

    return run_kernels(case, moving, engine="mma", tile=tile, **how)


# The few gradients of a bias that is broadcast over queries and keys are exactly 0. Their tolerance is the error of the
# low-precision run, which other seeds make too small by chance.
OF_SUMS = {name: replace(EVERY[name], seed=1) for name in ("bias-1h11", "bias-single")}
HALVES = ("bfloat16", "float16")
IN_HALF = {f"{name}-bfloat16": replace(case, dtype="bfloat16") for name, case in (EVERY | OF_SUMS).items()}
# Second derivatives with scores of 10^4 reach 10^8, which exceeds fp16 unless dout is small; those with a large scale
# exceed it too.
IN_HALF |= {
    f"{name}-float16": replace(case, dtype="float16", dout_size=2.0**-12 if "huge" in name else 1.0)
    for name, case in (EVERY | OF_SUMS).items()
    if name != "scale-large"
}

# Without "huge": scores of 10^4 times log2(e) have rounding errors of 10^-3, which affect tlse more than lse.
PAIRS_IN_HALF = cases.covering(6, without=("bfloat16", "float64", "float16", "huge"))
GPUS = [("sm_80", "bfloat16"), ("sm_90", "bfloat16"), ("sm_75", "float16"), ("sm_80", "float16")]


@pytest.mark.parametrize("case", in_tiers(IN_HALF, [f"causal-more-queries-{dtype}" for dtype in HALVES]))
def test_every_option_on_tensor_cores(case):
    check(case, run_mma(case))


@pytest.mark.exhaustive
@pytest.mark.parametrize(("arch", "dtype"), GPUS)
@pytest.mark.parametrize("case", PAIRS_IN_HALF.values(), ids=PAIRS_IN_HALF)
def test_all_pairs_of_options_on_tensor_cores(case, arch, dtype):
    case = replace(case, dtype=dtype)
    check(case, run_mma(case, arch=arch))


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("moving", DIRECTIONS.values(), ids=DIRECTIONS)
def test_any_direction_on_tensor_cores(moving, dtype):
    case = replace(EVERYTHING, dtype=dtype)
    check(case, run_mma(case, moving), moving=moving)


@pytest.mark.exhaustive
@pytest.mark.parametrize("head_dim", [64, 256])
@pytest.mark.parametrize(("arch", "dtype"), GPUS)
@pytest.mark.parametrize("which", [0, -1])
def test_all_options_in_any_tiles_on_tensor_cores(arch, dtype, which, head_dim):
    case = replace(EVERYTHING, dtype=dtype, head_dim=head_dim, head_dim_v=head_dim)
    check(case, run_mma(case, which=which, arch=arch))


BUGS_OF_MMA = {
    "lse-tangent-not-subtracted": change("weigh-tangent", "(tS[m][n][e] - mean[m][e / 2].center)", "tS[m][n][e]"),
    "T-does-not-follow-lse-tangent": before("add-tile-again", "change = 0,"),
    "sum-does-not-follow-center": change("move-center", ", sum -= change * l", ""),
    "T-not-rescaled": skip("rescale-T"),
    "dropout-in-lse-tangent": change("sum-tangent", "P[n][e]", "(n % 2 ? 0 : 2) * P[n][e]"),
    "no-dropout": never("drop-tangent"),
    "sink-does-not-move-lse-tangent": change("tlse-with-sink", "share * tlse +", "tlse + 0 *"),
    "tlse-of-the-sink-in-T": change("move-T-to-tlse", "tlse - mean[m][half].center", "0"),
    "delta-for-its-tangent": change("second-gradients", "delta_tangent", "delta"),
    "lse-tangent-not-subtracted-in-c": change("moving-tangent", "tangent - lse_tangent", "tangent"),
    "no-dropout-in-dV": change("second-gradients", "probability * factor * moving", "probability * moving"),
    "lse-tangent-of-no-row": change("numbers-of-row", "sequence.queries<real>(p.tlse, head)[i * p.tlse.row]", "0"),
    "no-dropout-in-dP": change("drop-dP", "< dropout.drop_below ? 0", "< dropout.drop_below ? 2"),
    "dtS-without-tK": never("dtP-of-tK"),
    "dtS-without-tQ": never("dtP-of-tQ"),
    "tS-without-tA": change("tS-of-tA", "MOVES_A && !B_FIRST", "false"),
    "tQ-does-not-advance": never("advance-tQ"),
    "tS-without-tB": never("tS-of-tB"),
    "curve-of-the-softcap": change("softcap-curve", "-2 / (real)p.softcap * t * slope * x.tangent", "0"),
}


@pytest.mark.parametrize("bug", in_tiers(BUGS_OF_MMA, ["delta-for-its-tangent"]))
def test_planted_bugs_are_found_on_tensor_cores(bug, monkeypatch):
    case = replace(EVERYTHING, dtype="bfloat16", q_len=40)
    with planted(monkeypatch, bug), pytest.raises(AssertionError, match="error"):
        check_jvp_first(case, run_mma)


MANY_TILES = Case(q_len=40, kv_len=160, head_dim=64, head_dim_v=64, batch=1, heads=1, kv_heads=1, dtype="bfloat16")


@pytest.mark.exhaustive
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("scores", cases.SCORES)
def test_means_of_many_tiles(scores, head_dim):
    """mu, the mean of tS over P, depends on the scores: it is constant, or changes little or much from tile to tile."""
    case = replace(MANY_TILES, scores=scores, head_dim=head_dim, head_dim_v=head_dim)
    check(case, run_mma(case))


BUGS_OF_MANY_TILES = {  # (scores, bug)
    "center-does-not-move": ("rising", always("center-stays")),
    "tile-not-added-again": ("falling", skip("add-tile-again")),
    "sum-of-mean-not-rescaled": ("one-hot", change("rescale-mean", ".rescale(rescaling[n / 2][n % 2])", "")),
    "keys-do-not-advance": ("normal", change("advance-K-V", "K += rows * p.k.row, V += rows * p.v.row", "rows")),
    "tK-does-not-advance": ("normal", never("advance-tK")),
    "tV-does-not-advance": ("normal", never("advance-tV")),
}


@pytest.mark.parametrize("bug", in_tiers(BUGS_OF_MANY_TILES, ["center-does-not-move"]))
def test_planted_bugs_of_many_tiles_are_found(bug, monkeypatch):
    scores, bug = bug
    case = replace(MANY_TILES, kv_len=2 * MANY_TILES.kv_len, scores=scores)
    with planted(monkeypatch, bug), pytest.raises(AssertionError, match="error"):
        check_jvp_first(case, run_mma)


@pytest.mark.exhaustive
@pytest.mark.parametrize("which", [0, -1])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_no_bank_conflicts_and_no_byte_twice_on_tensor_cores(head_dim, which):
    """In the first and in the last legal tile, shared memory has no bank conflicts, and a block reads its own tile and
    the tiles of its loop once from global memory.
    """
    rows = 256
    case = Case(
        q_len=rows, kv_len=rows, head_dim=head_dim, head_dim_v=head_dim, batch=1, heads=1, kv_heads=1, dtype="bfloat16"
    )
    counted, tiles = {}, {}

    def counting(work, **how):
        counted.update(zip((step.function for step in work.launches), start(work, **how), strict=True))
        tiles.update({step.function: step.tile for step in work.launches})

    run_mma(case, which=which, start=counting)
    assert counted.keys() == {"jvp", "delta", "second_kv", "second_q"}
    assert {name: count.bank_conflicts for name, count in counted.items() if count.bank_conflicts} == {}

    tensor, numbers = 2 * rows * head_dim, 4 * rows  # bytes of q, and of one number for each row
    queries, keys = 3 * tensor + 4 * numbers, 4 * tensor  # Q, tQ, dO, lse, delta and their tangents; K, tK, V, tV
    expected = {  # (bytes read, bytes written)
        "jvp": (2 * tensor + rows // tiles["jvp"][0] * keys, 2 * tensor + 2 * numbers),
        "second_kv": (keys + rows // tiles["second_kv"][1] * queries, 2 * tensor),
        "second_q": (queries + rows // tiles["second_q"][0] * keys, tensor),
    }
    for name, (read, written) in expected.items():
        assert counted[name].global_bytes_written == written, name
        assert read <= counted[name].global_bytes_read <= 1.1 * read, name


@pytest.mark.exhaustive
def test_bitwise_equal_in_any_order_of_blocks_on_tensor_cores():
    case = replace(EVERYTHING, dtype="bfloat16")
    one, *others = (run_mma(case, start=functools.partial(start, order="random", seed=seed)) for seed in range(3))
    for other in others:
        for name, a, b in zip(one._fields, one, other, strict=True):
            assert a.tobytes() == b.tobytes(), name


# Factors of fp16 products, such as P (tS - mu), are scaled by a power of two: without it they could be 0 or infinite.
IN_FP16 = replace(EVERYTHING, softcap=None, dtype="float16")
SIZES = {
    "small": replace(IN_FP16, tangent_size=2.0**-12),
    "large": replace(IN_FP16, tangent_size=2.0**10),
    "large-dout": replace(IN_FP16, dout_size=2.0**10),
    "largest": replace(IN_FP16, tangent_size=2.0**13, dout_size=2.0**-10),
}


@pytest.mark.parametrize("arch", in_tiers({"sm_80": "sm_80", "sm_75": "sm_75"}, ["sm_80"]))
@pytest.mark.parametrize("case", in_tiers(SIZES, ["small", "largest"]))
def test_tangents_of_any_size_in_fp16(case, arch):
    check(case, run_mma(case, arch=arch))


# OF_TINY omits dq and dk, because the row sums of dout * tout add the error of tout, a subnormal number, to them.
TINY, OF_TINY = replace(IN_FP16, tangent_size=2.0**-18, dout_size=2.0**5), ("tout", "tlse", "dv")


@pytest.mark.exhaustive
def test_tiny_tangents_keep_their_digits_in_fp16():
    check(TINY, run_mma(TINY), names=OF_TINY)


LARGEST, UNIT = SIZES["largest"], IN_FP16
ODD = replace(UNIT, q_len=1, kv_len=32, causal=False, seed=2)  # only the last 16 keys have infinite factors
RISING = replace(UNIT, q_len=150, scores="rising", seed=1)  # the power of two is lowered again after the first queries
# (case, bug)
BUGS_OF_FP16 = {
    "power-starts-at-1": (TINY, change("first-power", "15", "0")),
    "power-is-not-lowered": (LARGEST, change("lower-power", "max(0,", "0 * max(0,")),
    "infinities-are-not-found": (LARGEST, skip("find-infinities")),
    "infinities-of-odd-fragments": (ODD, change("any-infinity", "+ zeros[1][0] + zeros[1][2]", "")),
    "infinities-of-the-upper-rows": (
        LARGEST,
        change("any-infinity", "zeros[0][0] + zeros[0][2] + zeros[1][0] + zeros[1][2]", "zeros[0][0] + zeros[1][0]"),
    ),
    "sums-are-not-lowered": (UNIT, skip("lower-sums")),
    "factors-are-not-lowered": (UNIT, skip("lower-factors")),
    "factors-are-not-rounded-again": (UNIT, skip("round-lowered-factors")),
    "T-keeps-the-power": (UNIT, skip("scale-T-back")),
    "P-of-tV-without-power": (UNIT, change("scale-P-of-tV", "scale.times(P[e / 4][k][e % 4])", "P[e / 4][k][e % 4]")),
    "change-of-center-without-power": (UNIT, skip("scale-change-of-center")),
    "dV-is-not-lowered": (RISING, change("lower-dK-dV", ", multiply(dV, by)", "")),
    "dV-keeps-the-power": (UNIT, change("scale-dV-back", "scale.inverse()", "1.0f")),
}


@pytest.mark.parametrize("bug", in_tiers(BUGS_OF_FP16, ["power-is-not-lowered"]))
def test_planted_bugs_are_found_in_fp16(bug, monkeypatch):
    case, bug = bug
    names = OF_TINY if case is TINY else Derivatives._fields
    with planted(monkeypatch, bug), pytest.raises(AssertionError, match="error|other places"):
        check_jvp_first(case, run_mma, names)
