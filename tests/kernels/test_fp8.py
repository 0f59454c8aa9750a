"""The forward of fp8 (e4m3) on the simulator: every option, head dimensions, descales, orders of asynchronous work,
planted bugs, V^T, sums over long rows, refusals.
"""

import functools
import re

import ml_dtypes
import numpy as np
import pytest
from cases import Case, Result, compare
from fp8_cases import FP8, LONG, OPTIONS, quantised, references
from planting import after, change, planted, skip
from tiers import in_tiers

import cupy_flash
from cupy_flash import device, dispatch
from cupy_flash.engines import wgmma
from cupy_flash.gpu import ahead, run_plan
from cupy_flash.jit import nvrtc
from cupy_flash.jit.source import assemble, kernel_folder
from cupy_flash.plan.plan import plan
from cupy_flash.problem.build import pose
from cupy_flash.problem.records import Options, UnsupportedError
from cupy_flash.simulator import errors
from cupy_flash.simulator.run import start

pytestmark = pytest.mark.usefixtures("poisoned_memory")

HOPPER = dict(backend="simulator:sm_90a")
TILE = wgmma.forward_fp8.Tile(block_q=128, block_kv=64, stages=2, sum_columns=64)
LENGTHS = Case(**LONG | dict(q_len=140, q_lengths=(130,), kv_lengths=(140,), head_dim=160, head_dim_v=128))


def planned(call, tile=None):
    """Return the plan of a call in this tile (by default the best one), and its operands."""
    options = Options(**call.options | HOPPER)
    problem, operands = pose("case", call[:3], options, call.packed)
    return plan(problem, dispatch.device_of(problem), tile), operands


def forward(call, tile=None, blocks=None, start=start):
    """Return (out, lse) of a call with `blocks` blocks per head; None: one block per query tile."""
    chosen, operands = planned(call, tile)
    if blocks is not None:
        *others, last = chosen.launches
        chosen = chosen._replace(launches=(*others, last._replace(grid=(blocks, *last.grid[1:]))))
    out, lse = (array.numpy() for array in run_plan.forward(chosen, operands, start))
    return Result(out, lse, *[None] * 5)


def check(case, call=None, result=None, tile=None):
    call = quantised(case) if call is None else call
    compare(case, forward(call, tile) if result is None else result, *references(call), only=("out", "lse"))


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_option(options):
    check(Case(**LONG | options), tile=TILE)


@pytest.mark.parametrize("dims", [(64, 64), (96, 96), (128, 128), (192, 128), (256, 256)], ids=str)
def test_planned_tile(dims):
    """The planned tile of each head dimension; the last tile of queries and of keys is partial."""
    dim, dim_v = dims
    check(Case(**LONG | dict(heads=1, kv_len=210, head_dim=dim, head_dim_v=dim_v, causal=True)))


def test_descales():
    """None equals 1, a descale of 0 makes its operand 0, and other values equal a change of scale, with any strides."""
    case = Case(**LONG | dict(batch=2, kv_heads=2, head_dim=32, head_dim_v=32, q_len=20, kv_len=40))
    call = quantised(case, descales=False)
    unit_descales = {name: np.ones((2, 2), np.float32) for name in ("q_descale", "k_descale", "v_descale")}
    plain, ones = forward(call), forward(call._replace(options=call.options | unit_descales))
    assert plain.out.tobytes() == ones.out.tobytes() and plain.lse.tobytes() == ones.lse.tobytes()
    strided = np.asfortranarray(np.array([[0, 1e3], [3e-3, 0.5]], np.float32))
    for changed in (
        dict(q_descale=strided),
        dict(k_descale=strided, v_descale=strided[::-1]),
        dict(q_descale=strided, softcap=2.0),
        dict(v_descale=np.broadcast_to(np.float32(0), (2, 2))),
    ):
        check(case, call._replace(options=call.options | changed))


def test_every_order_gives_the_same_bits():
    """Copies and wgmmas complete early, late or at random; the grid has one block for all tiles or one per tile."""
    call, results = quantised(LENGTHS), []
    for order, seed, blocks in (("early", 0, None), ("late", 0, 1), ("random", 0, 1), ("random", 1, 2)):
        results.append(forward(call, TILE, blocks, functools.partial(start, order=order, seed=seed)))
    check(LENGTHS, call, results[0])
    for result in results[1:]:
        assert result.out.tobytes() == results[0].out.tobytes() and result.lse.tobytes() == results[0].lse.tobytes()


def test_bytes_and_conflicts(watch):
    """V is transposed once, each query tile reads its keys once, and there are no bank conflicts."""
    case = Case(**LONG | dict(q_len=256, kv_len=256, heads=1, head_dim=128, head_dim_v=128))
    forward(quantised(case, descales=False), TILE, start=watch.start)
    turn, count = watch.counters["vt"], watch.counters["forward_fp8"]
    row = case.head_dim
    assert turn.global_bytes_read == turn.global_bytes_written == case.kv_len * row
    assert count.global_bytes_read == case.q_len * row + 2 * 2 * case.kv_len * row
    assert count.global_bytes_written == case.q_len * (2 * row + 4)
    assert count.bank_conflicts == 0


# The transposed values, V^T


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
def test_transposed_values(packed):
    """Each group of 16 keys is in the order of P's fragments; columns past the last key are zero."""
    lengths = (150, 30, 0)
    case = Case(
        **LONG | dict(batch=3, kv_heads=2, head_dim_v=32, q_lengths=(9, 9, 9), kv_lengths=lengths, packed=packed)
    )
    call = quantised(case, descales=False)
    chosen, operands = planned(call, TILE)
    turning, _ = chosen.launches
    workspaces = []

    def keep(work):
        workspaces.append(work.results["vt"].numpy())
        return start(work._replace(launches=(turning,)))

    run_plan.forward(chosen, operands, keep)
    (vt,) = workspaces
    order = np.array([0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15])
    column = 0
    for b, length in enumerate(lengths):
        tiles = -(-length // TILE.block_kv) * TILE.block_kv
        first = int(call.packed.cu_seqlens_k[b]) if packed else 0
        V = np.zeros((tiles, 2, 32), np.uint8)
        V[:length] = (call.v if packed else call.v[b])[first : first + length].view(np.uint8)
        keys = (np.arange(0, tiles, 16)[:, None] + order).reshape(-1)
        column = (first // TILE.block_kv + b) * TILE.block_kv if packed else 0
        sequence_vt = vt[0 if packed else b, :, :, column : column + tiles]
        assert (sequence_vt == V[keys].transpose(1, 2, 0)).all()


# Sums over long rows


# This bug accumulates PV of all tiles in the tensor core. O has a single part here.
PLAIN_SUMS = (
    change("O-of-tile", "float sums[1][PART][4]", "float sums[1][PART][4] = {}")
    + change("PV-of-tile", "k > 0", "true")
    + change("add-O-of-tile", "+=", "=")
)


def test_long_rows(monkeypatch):
    """With 2048 keys and values of one sign, a separate accumulator per tile is right to 1 ulp of bfloat16.

    A running sum in the tensor core keeps 14 bits and loses every small product; so does the low-precision reference.
    """
    case = Case(**LONG | dict(q_len=64, kv_len=2048, heads=1))
    call = quantised(case, descales=False)
    call = call._replace(v=(1.5 + call.v.astype(np.float32) / 8).astype(FP8))
    exact, baseline = references(call)
    ours = forward(call)
    with planted(monkeypatch, PLAIN_SUMS):
        plain = forward(call)
    error, error_of_baseline, error_of_plain = (
        np.abs(x.out.astype(np.float64) - exact.out).max() for x in (ours, baseline, plain)
    )
    band = float(ml_dtypes.finfo(ml_dtypes.bfloat16).eps) * np.abs(exact.out).max()
    assert error < band and min(error_of_baseline, error_of_plain) > 6 * error


# name -> (bug, errors; AssertionError if only the result shows the bug)
PLANTED = {
    "no wait for V^T": (skip("wait-VT"), errors.PendingCopy),
    "no fence of scores": (skip("fence-S"), errors.MissingFence),
    "no fence of sums": (skip("fence-O-registers"), errors.MissingFence),
    "scores not waited for": (skip("wait-S-group"), (errors.PendingRegister, errors.PendingCopy)),
    "scores in flight beside the sums": (change("wait-S", "<1>", "<2>"), (errors.PendingRegister, errors.PendingCopy)),
    "V^T released too early": (after("wait-VT", "const_cast<VT_Ring&>(VT).release();"), errors.SimulationError),
    "sums not waited for": (skip("wait-O"), errors.PendingRegister),
    "sums not begun anew": (change("PV-of-tile", "k > 0", "true"), AssertionError),
    "order of keys": (change("key-order", "8 * (e / 2) + 2 * t + e % 2", "4 * t + e"), AssertionError),
    "keys past the last": (change("keys-of-VT", "j < sequence.kv_len", "true"), (AssertionError, errors.OutOfBounds)),
    "a part of V^T": (change("PV-part", "+ 8 * n * ROW", ""), AssertionError),
    "panels of Q": (change("S-panel", "a + k / 4 * (NEXT_OF_A >> 4)", "a"), AssertionError),
    "no descale of K": (change("descale-S", "* of(p, p.k_descale, b, kv_head)", ""), AssertionError),
    "no descale of V": (change("descale-O", "factors[0][0] *= read_again.v,", ""), AssertionError),
    "descale of another head": (change("descales-of-head", "head / p.group", "head"), errors.OutOfBounds),
    "descale of V of another head": (change("descales-of-epilogue", "/ p.group", ""), errors.OutOfBounds),
    "probabilities too large": (change("softmax-reference", "- LARGEST_LOG2", "- 2 * LARGEST_LOG2"), AssertionError),
    "lse of larger probabilities": (change("log2-sum", "l / (1 << LARGEST_LOG2)", "l"), AssertionError),
}


# One for each kind of error. Each of the others also fails test_every_order_gives_the_same_bits.
FOUND_BY_DEFAULT = (
    "no wait for V^T", "no fence of sums", "sums not waited for", "keys past the last", "a part of V^T",
    "descale of another head",
)  # fmt: skip


@pytest.mark.parametrize("bug", in_tiers(PLANTED, FOUND_BY_DEFAULT))
def test_planted_bug_is_found(bug, monkeypatch):
    """A single block computes all tiles, so that every slot is reused."""
    bug, error = bug
    call = quantised(LENGTHS)
    with planted(monkeypatch, bug), pytest.raises(error):
        check(LENGTHS, call, forward(call, TILE, 1))


def test_planted_bug_in_tiles_of_two_panels_is_found(monkeypatch):
    bug = change("PV-of-tile", "k / 2 * 8 * N", "k / 2 * 8 * (N - 1)")
    with planted(monkeypatch, bug), pytest.raises(AssertionError):
        check(Case(**LONG | dict(head_dim=128, head_dim_v=128)), tile=TILE._replace(block_kv=128))


def test_a_sequence_of_a_packed_batch_begins_with_a_tile(monkeypatch):
    case = Case(**LONG | OPTIONS["packed"])
    bug = change("tile-of-sequence", "+ sequence.batch", "")
    with planted(monkeypatch, bug), pytest.raises((AssertionError, errors.Race)):
        check(case, tile=TILE)


def test_launches_set_every_constant_that_their_kernels_use():
    case = Case(**LONG | OPTIONS["all"])
    chosen, _ = planned(quantised(case))
    names = set(re.findall(r"(\w+) = .*;", (kernel_folder() / "config.cuh").read_text()))
    for step in chosen.launches:
        text = re.sub(r"//.*|(constexpr \w+|using) \w+ = [\w.]+;", "", assemble(step.kernel, dict(step.constants)))
        assert names & set(re.findall(r"\w+", text)) <= set(dict(step.constants)), step.kernel


def test_every_tile_compiles_without_spills():
    """The compiler must not warn about spills, serialized wgmma or an ignored setmaxnreg."""
    for words in (
        dict(head_dim=128),
        dict(head_dim=128, causal=True, sink=True),
        dict(head_dim=256, softcap=1.0, bias=True, mask=True, sink=True, dropout=0.5, kv_lengths=True),
    ):
        words = dict(dtype="float8_e4m3fn", backward=False, q_descale=True) | words
        launches = ahead.launches(device.named("sm_90a", "cuda"), **words)
        assert len(launches) > 2 - (words["head_dim"] == 256)
        for step in launches:
            result = nvrtc.compile(assemble(step.kernel, dict(step.constants)), step.kernel, "sm_90a")
            took = result.resources[step.function]
            assert (took.spill_stores, took.spill_loads, result.warnings) == (0, 0, ()), step


# Refusals


def zeros(heads, dim):
    return np.zeros((2, 5, heads, dim), FP8)


def arguments(**changes):
    """Return the arguments of a small call in fp8."""
    return dict(q=zeros(4, 32), k=zeros(2, 32), v=zeros(2, 32)) | changes


def test_served_without_asking_for_the_engine():
    call = arguments(q_descale=np.ones((2, 2), np.float32), **HOPPER)
    text = cupy_flash.explain(**call)
    assert "forward, float8_e4m3fn to bfloat16 bshd" in text and "full, q_descale" in text
    assert "engine     wgmma" in text and "launch     wgmma/vt:" in text
    assert "not simt   float8_e4m3fn is not one of float16" in text
    out, lse = cupy_flash.attention(**call, return_lse=True)
    assert (out.dtype, lse.dtype) == (ml_dtypes.bfloat16, np.float32)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        pytest.param(
            dict(backend="cpu"),
            ["cpu: float8_e4m3fn is not one of float16", "wgmma: the call goes to backend cpu"],
            id="cpu",
        ),
        pytest.param(dict(q=zeros(2, 40), k=zeros(2, 40), v=zeros(2, 40)), ["multiples of 16, not 40"], id="head-dim"),
        pytest.param(dict(q=zeros(2, 272), k=zeros(2, 272)), ["272 is larger than 256"], id="large"),
        pytest.param(
            dict(q=zeros(4, 48)[..., 8:40]),
            ["not every row of q, k and v starts at a multiple of 16 bytes"],
            id="rows",
        ),
        pytest.param(dict(engine="mma"), ["mma: float8_e4m3fn is not float16 or bfloat16"], id="mma"),
        pytest.param(dict(k=zeros(2, 32)[:, :0], v=zeros(2, 32)[:, :0]), ["TMA cannot load"], id="empty"),
    ],
)
def test_unsupported(changes, words):
    with pytest.raises(UnsupportedError) as error:
        cupy_flash.attention(**arguments(**HOPPER | changes))
    assert all(word in str(error.value) for word in words), str(error.value)


def test_other_architectures():
    for arch in ("sm_80", "sm_89", "sm_100", "sm_120"):
        with pytest.raises(UnsupportedError, match=f"wgmma: {arch} lacks the instructions of sm_90a"):
            cupy_flash.attention(**arguments(backend=f"simulator:{arch}"))


def test_no_gradient():
    call = arguments(**HOPPER)
    out, vjp = cupy_flash.attention_vjp(**call)
    with pytest.raises(UnsupportedError, match="wgmma: fp8 has no gradients"):
        vjp(np.zeros_like(out))
    with pytest.raises(UnsupportedError, match="wgmma: fp8 has no gradients"):
        cupy_flash.compile(dtype="float8_e4m3fn", head_dim=64, arch="sm_90a")
    with pytest.raises(TypeError, match="out must have the output's dtype, bfloat16, not float8_e4m3fn"):
        arrays = [call[name] for name in "qkv"]
        cupy_flash.attention_backward(call["q"], *arrays, call["q"], np.zeros((2, 4, 5), np.float32))


def test_illegal_descales():
    """One error lists all illegal descales."""
    wrong = dict(
        q_descale=np.ones((2, 4), np.float32),
        k_descale=np.ones((2, 2)),
        v_descale=np.array([[1, 1], [1, -1]], np.float32),
    )
    with pytest.raises(TypeError) as error:
        cupy_flash.attention(**arguments(**wrong))
    for words in (
        "q_descale must be (B, Hk) = (2, 2), not (2, 4)",
        "k_descale must be float32, not float64",
        "v_descale must be finite and not negative",
        "3 requirements are not met",
    ):
        assert words in str(error.value), str(error.value)
    others = {name: x.astype(np.float32) for name, x in arguments().items()}
    with pytest.raises(TypeError, match="q_descale is for float8_e4m3fn, and q, k and v are float32"):
        cupy_flash.attention(**others, q_descale=np.ones((2, 2), np.float32))
    huge = np.broadcast_to(np.float32(1), (1, 1 << 40, 2, 8))  # reading it would take terabytes
    with pytest.raises(ValueError, match=r"q_descale must be \(B, Hk\) = \(2, 2\)"):
        cupy_flash.attention(**arguments(q_descale=huge))
    with pytest.raises(ValueError, match="k_descale must be finite"):
        cupy_flash.attention(**arguments(k_descale=np.full((2, 2), np.nan, np.float32)), **HOPPER)
    again = arguments(k_descale=np.ones((2, 2), np.float32), **HOPPER)
    cupy_flash.explain(**again)
    again["k_descale"][0, 1] = np.inf
    # the plan is cached, but the values are checked in every call
    with pytest.raises(ValueError, match="k_descale must be finite"):
        cupy_flash.explain(**again)
