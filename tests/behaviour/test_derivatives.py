"""JVPs and double backwards of the CPU engine: every option against the formula, tiles, directions, planted bugs,
errors.
"""

import json
import runpy
import tracemalloc
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from cases import OPTIONS, PACKED_OPTIONS, PAIRS, TILED, Case
from derivatives import ALL, check, direction_of, run, run_planned
from tiers import in_tiers

import cupy_flash
from bench.memory import growth_exponent
from bench.results import ROOT
from cupy_flash.cpu import derivatives, score
from cupy_flash.problem.records import UnsupportedError

pytestmark = pytest.mark.usefixtures("poisoned_memory")

DEFAULT = [
    "plain", "causal-more-queries", "top-left", "window", "scale-large", "softcap", "alibi-per-batch", "mask", "sink",
    "sink-causal-empty-rows", "lengths-zero", "lengths-bias", "dropout", "grouped", "layout-bhsd", "wide-values",
    "no-dlse", "no-batch", "no-queries", "no-keys-sink", "bias-bhqk", "bias-1h11", "bias-hides-softcap-dropout",
    "dtype-float16", "dtype-bfloat16", "dtype-float64-dropout", "scores-huge",
]  # fmt: skip
PACKED = {f"packed-{name}": case for name, case in PACKED_OPTIONS.items()}


@pytest.mark.parametrize("case", in_tiers(OPTIONS, DEFAULT))
def test_every_option(case):
    check(case)


@pytest.mark.parametrize("case", in_tiers(PACKED, ["packed-causal", "packed-dropout", "packed-zero-length-last"]))
def test_packed(case):
    check(case)


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", PAIRS.values(), ids=PAIRS)
def test_all_pairs_of_options(case):
    check(case)


TILES = {f"{q}x{kv}": (q, kv) for q, kv in ((16, 16), (7, 5), (8, 64), (64, 32))}
DEFAULT_TILED = ("plain", "softcap", "sink", "dropout", "lengths-causal", "mask")


@pytest.mark.parametrize("size", in_tiers(TILES, ["7x5"]))
@pytest.mark.parametrize("case", in_tiers(TILED, DEFAULT_TILED))
def test_any_tiles(case, size):
    """Other tiles than the planned one change results only by rounding."""
    check(case, run_planned(case, block_q=size[0], block_kv=size[1]))


EVERYTHING = Case(q_len=41, kv_len=37, causal=True, softcap=2.0, bias="1hqk", sink=True, dropout=0.3)


@pytest.mark.parametrize("moving", [(), *[(name,) for name in ALL], ("tq", "tk"), ("tk", "tv", "tsink")], ids=str)
def test_any_direction(moving):
    """A tangent of None gives the same results as a tangent of zeros."""
    check(EVERYTHING, moving=moving)


def test_absent_tangents_take_no_products(monkeypatch):
    """Matrix products per tile: 6 with all tangents, 5 without tk, 3 with tv only, 2 without any."""
    counts = []
    call = Case(q_len=8, kv_len=8, batch=1, heads=1, kv_heads=1).call()

    class Counted(np.ndarray):
        def __matmul__(self, other):
            counts.append(1)
            return np.asarray(self) @ np.asarray(other)

    monkeypatch.setattr(derivatives, "load_rows", lambda x, dtype: np.asarray(x, dtype).view(Counted))
    monkeypatch.setattr(derivatives, "product", lambda W, X: counts.append(1) or np.asarray(W) @ np.asarray(X))
    for moving, products in ((ALL, 6), (("tq", "tv"), 5), (("tq",), 4), (("tv",), 3), ((), 2)):
        counts.clear()
        direction = direction_of(Case(), call, moving)
        cupy_flash.attention_jvp(call.q, call.k, call.v, *direction[:3])
        assert len(counts) == products, moving


def test_bitwise_equal_for_any_number_of_threads():
    one, three = (run_planned(EVERYTHING, threads=threads, block_q=16, block_kv=16) for threads in (1, 3))
    for name, a, b in zip(one._fields, one, three, strict=True):
        assert a.tobytes() == b.tobytes(), name


# (function that processes a tile, original text, planted text)
BUGS = {
    "lse-tangent-not-subtracted": ("_follow_mean", "tS -= moved.astype(tS.dtype)[:, None]", "pass"),
    "T-does-not-follow-lse-tangent": ("_follow_mean", "T -= (moved - mean).astype(T.dtype)[:, None] * O", "pass"),
    "T-not-rescaled": ("jvp", "softmax.update(P, sums,", "softmax.update(P, O,"),
    "dropout-in-lse-tangent": (
        "jvp",
        "_follow_mean(lse_tangent, P, tS",
        "_follow_mean(lse_tangent, P * call.keep(tile), tS",
    ),
    "no-dropout-in-T": ("jvp", "tS *= keep", "pass"),
    "delta-for-its-tangent": ("Direction", "(h * keep - delta_tangent)", "(h * keep - delta)"),
    "lse-tangent-not-subtracted-in-c": ("Direction", "        c = tS - lse_tangent\n", "        c = tS.copy()\n"),
    "curve-of-the-softcap": ("Softcap", "dS += _times(dtS, change)", "pass"),
    "tbias": ("Bias", "tS += tile.cut(self.tbias)", "pass"),
}


@pytest.mark.parametrize("bug", BUGS)
def test_planted_bugs_are_found(bug, monkeypatch):
    name, right, wrong = BUGS[bug]
    module = score if name in ("Softcap", "Bias") else derivatives
    text = Path(module.__file__).read_text(encoding="utf-8")
    assert text.count(right) == 1, right
    planted = {"__name__": module.__name__, "__package__": module.__package__, "__file__": module.__file__}
    exec(compile(text.replace(right, wrong), module.__file__, "exec"), planted)
    monkeypatch.setattr(module, name, planted[name])
    if name == "Direction":  # Direction is a class: replace the function that creates it
        monkeypatch.setattr(module, "jvp", planted["jvp"])
        monkeypatch.setattr(module, "double_backward", planted["double_backward"])
    with pytest.raises(AssertionError):
        check(EVERYTHING, run_planned(EVERYTHING, block_q=16, block_kv=16))


def test_memory_is_linear_in_the_length():
    """Twice the length takes about twice the memory, whereas a score matrix would take four times as much."""

    def peak(length):
        case = Case(q_len=length, kv_len=length, batch=1, heads=1, kv_heads=1, head_dim=4, head_dim_v=4)
        call = case.call()
        tracemalloc.start()
        run_planned(case, call=call, block_q=64, block_kv=64, threads=1)
        size = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return size

    short, long = peak(768), peak(1536)
    assert long < 2.5 * short
    assert long < 1536**2 * 4 / 4


@pytest.mark.exhaustive
def test_the_picture_of_the_guide_is_of_linear_memory():
    script = runpy.run_path(str(ROOT / "docs" / "derivatives.py"))
    lengths, names = (2048, 8192), ["attention_jvp", "attention_double_backward"]
    peaks = {name: {n: script["peak"](script["CALLS"][name][0], n) for n in lengths} for name in names}
    for by_length in peaks.values():
        assert growth_exponent(lengths, list(by_length.values())) <= 1.1
    stored = json.loads((ROOT / "docs" / "derivatives.json").read_text(encoding="utf-8"))["peaks"]
    assert list(stored) == list(script["CALLS"])
    for name in names:
        assert growth_exponent(lengths, [stored[name][str(n)] for n in lengths]) <= 1.1


def test_varlen_equals_the_sequences_alone():
    case = replace(PACKED_OPTIONS["causal"], sink=True)
    check(case, run(case))


def test_arrays_of_jax():
    jnp = pytest.importorskip("jax.numpy")
    case = Case(causal=True, sink=True)
    call = case.call()
    options = {name: jnp.asarray(x) if isinstance(x, np.ndarray) else x for name, x in call.options.items()}
    arrays = (jnp.asarray(x) for x in (call.q, call.k, call.v, call.dout, call.dlse))
    call = call._replace(**dict(zip(("q", "k", "v", "dout", "dlse"), arrays, strict=True)), options=options)
    direction = direction_of(case, case.call())
    inputs = [jnp.asarray(x) for x in direction[:3]]
    out, tout, lse, tlse = cupy_flash.attention_jvp(*call[:3], *inputs, return_lse=True, **options)
    second = cupy_flash.attention_double_backward(*inputs, call.dout, *call[:3], out, lse, dlse=call.dlse, **options)
    assert {type(x) for x in (out, tout, lse, tlse, second.dq, second.ddout)} == {type(call.q)}
    expected = run(case, moving=("tq", "tk", "tv"))
    for name, x in zip(
        ("out", "tout", "lse", "tlse", "dq", "ddout"), (out, tout, lse, tlse, second.dq, second.ddout), strict=True
    ):
        assert np.asarray(x).tobytes() == getattr(expected, name).tobytes(), name


# --------------------------------------------------------------------------------------------------------------- errors


def arrays(**changes):
    call = Case(q_len=4, kv_len=4, batch=1, heads=2, kv_heads=2, head_dim=8, head_dim_v=8).call()
    return dict(q=call.q, k=call.k, v=call.v) | changes


def test_one_error_lists_every_reason():
    given = arrays()
    with pytest.raises(TypeError) as error:
        cupy_flash.attention_jvp(
            **given, tq=given["q"][:, :2], tk=given["k"].astype(np.float64), tbias=given["q"], tsink=None, softcap=-1
        )
    for reason in (
        "attention_jvp: 4 requirements are not met",
        "tq must have the shape of q, (1, 4, 2, 8), not (1, 2, 2, 8)",
        "tk must have the dtype of k, float32, not float64",
        "tbias is the tangent of bias, which is not given",
        "softcap must be positive",
    ):
        assert reason in str(error.value)


def test_tangents_of_captured_arrays_are_checked():
    given, slopes, ids = arrays(), np.ones(2, np.float32), np.arange(4)

    def mod(s, b, h, q, kv):
        return s + slopes[h] * ids[q]

    with pytest.raises(TypeError, match="tcaptured must be a sequence with a tangent or None for each of the 2"):
        cupy_flash.attention_jvp(**given, score_mod=mod, tcaptured=(slopes,))
    with pytest.raises(TypeError, match="array1 is not floating and has no tangent"):
        cupy_flash.attention_jvp(**given, score_mod=mod, tcaptured=(slopes, ids))


def test_engines_without_derivatives_refuse_with_a_reason():
    given = arrays()
    with pytest.raises(UnsupportedError) as error:
        cupy_flash.attention_jvp(**given, tq=given["q"], backend="simulator:sm_90a", engine="wgmma")
    assert "wgmma: it computes no JVP in this version" in str(error.value)
    assert "JVP of q, float32" in str(error.value)


def test_a_double_backward_draws_no_seed():
    given = arrays()
    out, _ = cupy_flash.attention_jvp(**given, tq=given["q"], dropout=0.5)
    with pytest.raises(ValueError, match="dropout needs a seed"):
        cupy_flash.attention_double_backward(
            None, None, None, out, *given.values(), out, np.zeros((1, 2, 4), np.float32), dropout=0.5
        )
