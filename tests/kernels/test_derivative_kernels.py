"""JVPs and double backwards on the simulator: every option, tiles, directions, orders of blocks, work, planted bugs."""

import functools
import inspect
from dataclasses import replace

import cases
import pytest
from cases import OPTIONS, PACKED_OPTIONS, PAIRS, SIMULATED_PAIRS, Case
from derivatives import ALL, Derivatives, check, run_kernels
from planting import planted_in
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


# (file, original text, planted text)
BUGS = {
    "mu-not-subtracted": ("simt/jvp.cu", "S[r][c] * (tS[r][c] - mean[r].mu);", "S[r][c] * tS[r][c];"),
    "T-does-not-follow-mu": ("simt/jvp.cu", " - change * O[r][n];", ";"),
    "T-not-rescaled": ("simt/jvp.cu", "T[r][n] = T[r][n] * rescale", "T[r][n] = T[r][n]"),
    "sum-of-mu-not-rescaled": ("simt/jvp.cu", "mean[r].update(rescale,", "mean[r].update(1,"),
    "dropout-in-mu": ("simt/jvp.cu", "moving += S[r][c] *", "moving += S[r][c] * (c % 2 ? 0 : 2) *"),
    "no-dropout-in-T": ("simt/jvp.cu", "S[r][c] *= factor, tS[r][c] *= factor;", "S[r][c] *= factor;"),
    "delta-for-eps": ("second_gradients.cuh", "(dtP * factor - eps)", "(dtP * factor - delta)"),
    "eps-of-out": ("delta.cu", "sequence.queries<element>(p.tout, head) + i * p.tout.row", "O + i * p.out.row"),
    "mu-not-subtracted-in-c": ("second_gradients.cuh", "moving = tangent - mu,", "moving = tangent,"),
    "no-dropout-in-dV": ("second_gradients.cuh", "probability * factor * moving}", "probability * moving}"),
    "dtS-without-tK": ("simt/second_q.cu", "if constexpr (TK) add_product", "if constexpr (false) add_product"),
    "dtS-without-tQ": ("simt/second_kv.cu", "if constexpr (TQ) add_product", "if constexpr (false) add_product"),
    "curve-of-the-softcap": ("score.cuh", "x.curve = -2 / (real)p.softcap * t * slope * x.tangent;", "x.curve = 0;"),
    "tangent-of-the-softcap": ("score.cuh", "      x.tangent *= slope;\n", ""),
    "tbias": ("score.cuh", "if constexpr (TBIAS) x.tangent +=", "if constexpr (false) x.tangent +="),
    "dsink-without-mu": ("dsink.cu", "sequence.queries<real>(p.tlse, head)[i * p.tlse.row];", "0;"),
}


@pytest.mark.parametrize("bug", in_tiers(BUGS, ["mu-not-subtracted"]))
def test_planted_bugs_are_found(bug, monkeypatch):
    with planted_in(monkeypatch, *bug), pytest.raises(AssertionError, match="error"):
        check(EVERYTHING, run_kernels(EVERYTHING, tile=SMALL_TILE))


@pytest.mark.parametrize(
    ("dtype", "tile"),
    [exhaustive("float32", SMALL_TILE), exhaustive("float64", simt.Tile(32, 16, 128))],
    ids=str,
)
def test_shared_memory_is_what_the_kernels_use(tile, dtype):
    """With one byte less than planned, each kernel accesses memory out of bounds: no plan asks for too much memory."""
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
    """Products (FMA) and all instructions, relative to those of the forward and the backward in the same tile."""
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
    """The JVP by mma, in its best tile unless `which` selects another, followed by the double backward by mma."""

    def tile(chosen):
        return mma.tiles(chosen.problem, chosen.device)[which]

    return run_kernels(case, moving, engine="mma", tile=tile, **how)


# A bias that is broadcast over queries and keys has only a few gradients, whose exact value is 0. The low-precision run
# sets their tolerance by its error, which is near 0 by chance with other seeds.
OF_SUMS = {name: replace(EVERY[name], seed=1) for name in ("bias-1h11", "bias-single")}
HALVES = ("bfloat16", "float16")
IN_HALF = {f"{name}-bfloat16": replace(case, dtype="bfloat16") for name, case in (EVERY | OF_SUMS).items()}
# fp16 cannot hold second derivatives of scores of 10^4, up to 10^8, unless dout is small; nor those of a large scale.
IN_HALF |= {
    f"{name}-float16": replace(case, dtype="float16", dout_size=2.0**-12 if "huge" in name else 1.0)
    for name, case in (EVERY | OF_SUMS).items()
    if name != "scale-large"
}

# Without "huge": exponents in base 2 round scores of 10^4 to 10^-3, of which tlse has the error and lse has not.
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
    "mu-not-subtracted": ("mma/jvp.cu", "(tS[m][n][e] - mean[m][e / 2].mu) *", "tS[m][n][e] *"),
    "T-does-not-follow-mu": ("mma/jvp.cu", "mean[m][half].add(P[m]", "change = 0, mean[m][half].add(P[m]"),
    "sum-does-not-follow-mu": ("mma/jvp.cu", "mu = new_mu, sum -= change * l;", "mu = new_mu;"),
    "T-not-rescaled": ("mma/jvp.cu", "    rescale(T, rescaling);\n", ""),
    "dropout-in-mu": ("mma/jvp.cu", "float weight = P[n][e] *", "float weight = (n % 2 ? 0 : 2) * P[n][e] *"),
    "no-dropout": ("mma/jvp.cu", "if constexpr (DROPOUT) drop(", "if constexpr (false) drop("),
    "sink-does-not-move-mu": ("mma/jvp.cu", "tlse = share * tlse +", "tlse = tlse + 0 *"),
    "tlse-of-the-sink-in-T": ("mma/jvp.cu", "float change = tlse - mean[m][half].mu;", "float change = 0;"),
    "delta-for-eps": ("second_gradients.cuh", "(dtP * factor - eps)", "(dtP * factor - delta)"),
    "mu-not-subtracted-in-c": ("second_gradients.cuh", "moving = tangent - mu,", "moving = tangent,"),
    "no-dropout-in-dV": ("second_gradients.cuh", "probability * factor * moving}", "probability * moving}"),
    "mu-of-no-row": ("delta.cu", "sequence.queries<real>(p.tlse, head)[i * p.tlse.row], sum", "0, sum"),
    "no-dropout-in-dP": ("mma/second.cuh", "< dropout.drop_below ? 0 :", "< dropout.drop_below ? 2 :"),
    "dtS-without-tK": ("mma/second_q.cu", "if constexpr (TK) accumulate", "if constexpr (false) accumulate"),
    "dtS-without-tQ": ("mma/second_kv.cu", "if constexpr (TQ) accumulate", "if constexpr (false) accumulate"),
    "tS-without-tA": ("mma/direction.cuh", "if constexpr (MOVES_A && !B_FIRST) mma_", "if constexpr (false) mma_"),
    "tQ-does-not-advance": ("mma/second.cuh", "if constexpr (TQ) tQ.advance", "if constexpr (false) tQ.advance"),
    "tS-without-tB": ("mma/direction.cuh", "      if constexpr (MOVES_B) mma_", "      if constexpr (false) mma_"),
    "curve-of-the-softcap": ("score.cuh", "x.curve = -2 / (real)p.softcap * t * slope * x.tangent;", "x.curve = 0;"),
}


@pytest.mark.parametrize("bug", in_tiers(BUGS_OF_MMA, ["delta-for-eps"]))
def test_planted_bugs_are_found_on_tensor_cores(bug, monkeypatch):
    case = replace(EVERYTHING, dtype="bfloat16", q_len=40)
    with planted_in(monkeypatch, *bug), pytest.raises(AssertionError, match="error"):
        check(case, run_mma(case))


MANY_TILES = Case(q_len=40, kv_len=160, head_dim=64, head_dim_v=64, batch=1, heads=1, kv_heads=1, dtype="bfloat16")


@pytest.mark.exhaustive
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("scores", cases.SCORES)
def test_means_of_many_tiles(scores, head_dim):
    """mu stays, moves a little or jumps from tile to tile, with the scores and their tangents."""
    case = replace(MANY_TILES, scores=scores, head_dim=head_dim, head_dim_v=head_dim)
    check(case, run_mma(case))


BUGS_OF_MANY_TILES = {  # (scores, bug)
    "mu-does-not-move": ("rising", "mma/jvp.cu", "if (!__any_sync(0xFFFFFFFF, with_tile.departed())) {", "if (true) {"),
    "tile-not-added-again": ("falling", "mma/jvp.cu", "mean[m][half].add(P[m], tS[m], half);\n      change", "change"),
    "sum-of-mu-not-rescaled": ("falling", "mma/jvp.cu", ".rescale(rescaling[n / 2][n % 2]);", ";"),
    "keys-do-not-advance": ("normal", "mma/direction.cuh", "K += rows * p.k.row, V += rows * p.v.row;", "rows;"),
    "tK-does-not-advance": ("normal", "mma/direction.cuh", "if constexpr (TK) tK +=", "if constexpr (false) tK +="),
    "tV-does-not-advance": ("normal", "mma/direction.cuh", "if constexpr (TV) tV +=", "if constexpr (false) tV +="),
}


@pytest.mark.parametrize("bug", in_tiers(BUGS_OF_MANY_TILES, ["mu-does-not-move"]))
def test_planted_bugs_of_many_tiles_are_found(bug, monkeypatch):
    scores, *bug = bug
    case = replace(MANY_TILES, scores=scores)
    with planted_in(monkeypatch, *bug), pytest.raises(AssertionError, match="error"):
        check(case, run_mma(case))


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
    queries, keys = 3 * tensor + 4 * numbers, 4 * tensor  # Q, tQ, dO, lse, mu, delta, eps; K, tK, V, tV
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


# Factors of fp16 products, such as P (tS - mu), have a power of two, without which they could be 0 or infinite.
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


# dq and dk would also have the error of tout, a subnormal number, in the row sums of dout * tout.
TINY, OF_TINY = replace(IN_FP16, tangent_size=2.0**-18, dout_size=2.0**5), ("tout", "tlse", "dv")


@pytest.mark.exhaustive
def test_tiny_tangents_keep_their_digits_in_fp16():
    check(TINY, run_mma(TINY), names=OF_TINY)


LARGEST, UNIT = SIZES["largest"], IN_FP16
ODD = replace(UNIT, q_len=1, kv_len=32, causal=False, seed=2)  # only the last 16 keys have an infinite factor
RISING = replace(UNIT, q_len=150, scores="rising", seed=1)  # the power is lowered again after the first queries
# (case, file, original text, planted text)
BUGS_OF_FP16 = {
    "power-starts-at-1": (TINY, "mma/factor_scale.cuh", "FIRST = 15,", "FIRST = 0,"),
    "power-is-not-lowered": (LARGEST, "mma/factor_scale.cuh", "int down = max(0,", "int down = 0 * max(0,"),
    "infinities-are-not-found": (LARGEST, "mma/factor_scale.cuh", "(factors.add_zeros(zeros), ...);", ""),
    "infinities-of-odd-fragments": (ODD, "mma/factor_scale.cuh", " + zeros[1][0] + zeros[1][2]", ""),
    "infinities-of-the-upper-rows": (
        LARGEST, "mma/factor_scale.cuh", "zeros[0][0] + zeros[0][2] + zeros[1][0] + zeros[1][2]",
        "zeros[0][0] + zeros[1][0]",
    ),
    "sums-are-not-lowered": (UNIT, "mma/factor_scale.cuh", "      lower(by);\n", ""),
    "factors-are-not-lowered": (UNIT, "mma/factor_scale.cuh", "      (multiply(factors.exact, by), ...);\n", ""),
    "factors-are-not-rounded-again": (
        UNIT, "mma/factor_scale.cuh", "lower(by);\n      (factors.round(), ...);", "lower(by);",
    ),
    "T-keeps-the-power": (UNIT, "mma/jvp.cu", "multiply(T_rmem, scale.inverse());", ""),
    "P-of-tV-without-power": (UNIT, "mma/direction.cuh", "scale.times(P[e / 4][k][e % 4]);", "P[e / 4][k][e % 4];"),
    "change-of-mu-without-power": (UNIT, "mma/jvp.cu", "      change *= scale.power();\n", ""),
    "dV-is-not-lowered": (RISING, "mma/second_kv.cu", ", multiply(dV_rmem, by);", ";"),
    "dV-keeps-the-power": (UNIT, "mma/second_kv.cu", "return scale.inverse(); }", "return 1.0f; }"),
}  # fmt: skip


@pytest.mark.parametrize("bug", in_tiers(BUGS_OF_FP16, ["power-is-not-lowered"]))
def test_planted_bugs_are_found_in_fp16(bug, monkeypatch):
    case, *bug = bug
    names = OF_TINY if case is TINY else Derivatives._fields
    with planted_in(monkeypatch, *bug), pytest.raises(AssertionError, match="error|other places"):
        check(case, run_mma(case), names=names)
