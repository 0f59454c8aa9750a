"""Attention with mods: every mod with every option against the dense formula, and gradients against autograd."""

import re

import numpy as np
import pytest
from cases import Case, Result, assert_bitwise_equal, check, posed, run, run_planned
from mods import MASK_MODS, SCORE_MODS, arrays_of, mods_of

import cupy_flash
from cupy_flash.cpu import attention as cpu
from cupy_flash.problem.records import Saved

pytestmark = pytest.mark.usefixtures("poisoned_memory")

EACH = {
    **{name: Case(score_mod=name) for name in SCORE_MODS},
    **{f"mask-{name}": Case(mask_mod=name) for name in MASK_MODS},
}
BESIDE = {
    "causal": dict(causal=True),
    "top-left": dict(causal="top_left", q_len=29),
    "window": dict(window=(3, 2)),
    "scale": dict(scale=-1.5),
    "softcap": dict(softcap=4.0),
    "alibi": dict(alibi="h"),
    "bias": dict(bias="1hqk"),
    "bias-hides": dict(bias="bhqk", bias_hides=True),
    "mask": dict(mask="bhqk"),
    "sink": dict(sink=True),
    "lengths": dict(q_lengths=(7, 19), kv_lengths=(23, 5)),
    "packed": dict(packed=True, q_lengths=(7, 19), kv_lengths=(23, 5)),
    "dropout": dict(dropout=0.3),
    "one-group": dict(kv_heads=1),
    "bhsd": dict(layout="bhsd"),
    "float16": dict(dtype="float16"),
    "bfloat16": dict(dtype="bfloat16"),
    "float64": dict(dtype="float64"),
}


@pytest.mark.parametrize("case", EACH.values(), ids=EACH)
def test_every_mod(case):
    check(case)


@pytest.mark.parametrize("beside", BESIDE)
def test_mods_beside_every_option(beside):
    check(Case(score_mod="relative", mask_mod="document", **BESIDE[beside]))
    check(Case(score_mod="choice", mask_mod="rows", **BESIDE[beside]))


@pytest.mark.parametrize(("block_q", "block_kv"), [(16, 16), (7, 5), (8, 64), (70, 1)])
@pytest.mark.parametrize("name", ["learned-twice", "dense"])
def test_any_tiles(name, block_q, block_kv):
    case = Case(score_mod=name, mask_mod="sliding", causal=True, q_len=41, kv_len=37)
    check(case, run_planned(case, block_q=block_q, block_kv=block_kv))


@pytest.mark.parametrize(("block_q", "block_kv"), [(64, 256), (256, 64)])
def test_a_mask_is_computed_for_the_cut_part_of_a_tile(block_q, block_kv):
    """Only at one end, or only in its middle, a tile of several grains needs no mask."""
    banded = Case(window=(199, 149), q_len=300, kv_len=300, batch=1, heads=2, kv_heads=1)
    call = banded.call()
    options = call.options | dict(window=None, mask_mod=lambda b, h, q, kv: (q - kv < 200) & (kv - q < 150))
    check(banded, run_planned(banded, call._replace(options=options), block_q=block_q, block_kv=block_kv))


def test_masked_visits_that_cost_more_are_fewer(monkeypatch):
    case = Case(q_len=512, kv_len=512, batch=1)
    options = dict(mask_mod=lambda b, h, q, kv: (q >= kv) & (q - kv <= 256))

    def chosen(nanoseconds):
        monkeypatch.setattr(cpu.engine, "MASKED", nanoseconds)
        cpu._best_positional_tile.cache_clear()
        return cpu.fitted(*posed(case, call=case.call()._replace(options=options)))

    few, many = chosen(1e9), chosen(0)
    cpu._best_positional_tile.cache_clear()
    assert (few.block_q, few.block_kv) == (512, 512)
    assert many.block_q * many.block_kv < 512 * 512


# ---------------------------------------------------------------------------------------- gradients of captured arrays


def captured_gradients(case):
    """Return ({name: gradient} of the floating arrays that the mods of a case capture, all gradients)."""
    call, arrays = case.call(), arrays_of(case)
    mods = mods_of(case, arrays=arrays)
    options = call.options | mods
    if call.packed is None:
        (out, lse), _ = cupy_flash.attention_vjp(call.q, call.k, call.v, return_lse=True, **options)
        gradients = cupy_flash.attention_backward(
            call.dout, call.q, call.k, call.v, out, lse, dlse=call.dlse, **options
        )
    else:
        arguments = (call.q, call.k, call.v)
        out, lse = cupy_flash.attention_varlen(*arguments, *call.packed, return_lse=True, **options)
        gradients = cupy_flash.attention_varlen_backward(
            call.dout, *arguments, out, lse, *call.packed, dlse=call.dlse, **options
        )
    captured = cupy_flash.Mod(**mods).arrays
    names = [next(name for name, x in arrays.items() if x is array) for array in captured]
    named = dict(zip(names, gradients.dcaptured, strict=True))
    for name, gradient in named.items():
        assert (gradient is not None) == (arrays[name].dtype == np.float32), name
        assert gradient is None or (gradient.dtype, gradient.shape) == (np.float32, arrays[name].shape)
    return {name: gradient for name, gradient in named.items() if gradient is not None}, gradients


def by_autograd(case, dtype="float64"):
    """Return gradients of captured arrays by torch's autograd on all scores, in `dtype`."""
    torch = pytest.importorskip("torch")
    call, dtype = case.call(), getattr(torch, dtype)
    arrays = {name: torch.tensor(x) for name, x in arrays_of(case).items()}
    arrays = {name: x.to(dtype).requires_grad_() if x.is_floating_point() else x for name, x in arrays.items()}
    mods = mods_of(case, torch, arrays)
    q, k, v, dout = (torch.tensor(x).to(dtype) for x in (call.q, call.k, call.v, call.dout))
    group = case.heads // case.kv_heads
    k, v = (x.repeat_interleave(group, dim=2) for x in (k, v))
    s = torch.einsum("bihd,bjhd->bhij", q, k) / case.head_dim**0.5
    b, h = torch.arange(case.batch)[:, None, None, None], torch.arange(case.heads)[:, None, None]
    i, j = torch.arange(case.q_len)[:, None], torch.arange(case.kv_len)
    if "score_mod" in mods:
        s = mods["score_mod"](s, b, h, i, j)
    hidden = torch.zeros_like(s, dtype=torch.bool)
    if "mask_mod" in mods:
        hidden = ~mods["mask_mod"](b, h, i, j).broadcast_to(s.shape)
    if case.causal:
        hidden = hidden | (j > i + case.kv_len - case.q_len)
    s = s.masked_fill(hidden, -np.inf)
    seen = (s > -np.inf).any(-1, keepdim=True)
    s = torch.where(seen, s, 0.0)
    p = torch.where(seen, torch.softmax(s, -1), 0.0)
    lse = torch.where(seen[..., 0], torch.logsumexp(s, -1), 0.0)
    out = torch.einsum("bhij,bjhd->bihd", p, v)
    loss = (out * dout).sum() + (lse * torch.tensor(call.dlse).to(dtype)).sum()
    read = {name: x for name, x in arrays.items() if x.requires_grad}
    gradients = torch.autograd.grad(loss, list(read.values()), allow_unused=True)
    return {name: x.numpy() for name, x in zip(read, gradients, strict=True) if x is not None}


@pytest.mark.parametrize("mask", [None, "document", "rows"])
@pytest.mark.parametrize(
    "name", ["alibi", "relative", "dense", "row-bias", "learned-twice", "hides-by-sum", "hides-by-score"]
)
def test_gradients_of_captured_arrays(name, mask):
    case = Case(score_mod=name, mask_mod=mask, causal=mask is None)
    actual, _ = captured_gradients(case)
    expected = by_autograd(case)
    assert actual.keys() == expected.keys()
    for array, gradient in actual.items():
        scale = np.abs(expected[array]).max()
        np.testing.assert_allclose(gradient, expected[array], rtol=2e-4, atol=4e-6 * scale, err_msg=array)


def test_gradients_of_packed_sequences_are_summed():
    """The gradient of a packed batch equals the gradient of the same sequences, padded."""
    lengths = dict(q_lengths=(7, 19), kv_lengths=(23, 5))
    packed, _ = captured_gradients(Case(score_mod="learned-twice", mask_mod="sliding", packed=True, **lengths))
    padded, _ = captured_gradients(Case(score_mod="learned-twice", mask_mod="sliding", **lengths))
    for name, gradient in packed.items():
        np.testing.assert_allclose(gradient, padded[name], rtol=1e-5, atol=1e-6)


def test_gradients_do_not_depend_on_the_number_of_threads():
    for name in ("relative", "learned-twice", "dense"):
        case = Case(score_mod=name, mask_mod="document", batch=3, q_len=40, kv_len=40)
        one, many = (run_planned(case, threads=threads, block_q=16, block_kv=16) for threads in (1, 7))
        plain, captured = zip((one[:-1], one[-1]), (many[:-1], many[-1]), strict=True)
        assert_bitwise_equal(Result(*plain[0]), Result(*plain[1]), case)
        for a, b in zip(*captured, strict=True):
            assert (a is None and b is None) or a.tobytes() == b.tobytes()


@pytest.mark.parametrize(
    ("name", "tasks"), [("softcap", 4), ("dense", 4), ("relative", 2), ("row-bias", 1), ("learned-twice", 1)]
)
def test_heads_that_add_to_the_same_elements_are_one_task(name, tasks):
    """A call with 2 sequences and 2 key/value heads: `dense` has both as indices, `relative` only the head."""
    case = Case(score_mod=name)
    call, result = case.call(), run(case)
    plan, operands = posed(case, Saved(call.dout, result.out, result.lse))
    assert len(cpu.Call(plan, operands).gradient_tasks(lambda sequence, kv_head: None)) == tasks


def test_half_precision_tables_get_gradients_of_their_dtype():
    import ml_dtypes

    case = Case(dtype="bfloat16")
    call = case.call()
    table = np.ones((case.heads, 15), ml_dtypes.bfloat16)
    mod = SCORE_MODS["relative"](np, {"table": table})
    _, vjp = cupy_flash.attention_vjp(call.q, call.k, call.v, score_mod=mod)
    (gradient,) = vjp(call.dout).dcaptured
    assert gradient.dtype == table.dtype
    expected, _ = captured_gradients(Case(score_mod="relative", dlse=False))
    assert gradient.shape == expected["table"].shape


# ------------------------------------------------------------------------------------------------------- NaN and hiding


def test_nan_hidden_by_mask_mod_has_no_effect():
    """NaN in hidden keys, and a score_mod that is infinite for them, change nothing."""
    case = Case(q_len=16, kv_len=16, kv_heads=4)
    call = case.call()
    k, v = call.k.copy(), call.v.copy()
    k[:, 10:], v[:, 10:] = np.nan, np.inf

    def mask(b, h, q, kv):
        return kv < 10

    def bounded(s, b, h, q, kv):
        return s * 2.0 + 1 / (10.0 - kv) ** 2

    def run(k, v):
        out, vjp = cupy_flash.attention_vjp(call.q, k, v, score_mod=bounded, mask_mod=mask)
        return out, vjp(call.dout)

    (out, gradients), (clean, expected) = run(k, v), run(call.k, call.v)
    np.testing.assert_allclose(out, clean, rtol=1e-6)
    for name in ("dq", "dk", "dv"):
        np.testing.assert_allclose(getattr(gradients, name), getattr(expected, name), rtol=1e-5, atol=1e-6)
    assert not gradients.dk[:, 10:].any() and not gradients.dv[:, 10:].any()


def test_a_nan_of_score_mod_reaches_only_its_row():
    call = Case(q_len=8, kv_len=8).call()
    out = cupy_flash.attention(call.q, call.k, call.v, score_mod=lambda s, b, h, q, kv: np.where(q == 3, np.nan, s))
    assert np.isnan(out[:, 3]).all()
    assert np.isfinite(np.delete(out, 3, axis=1)).all()


def test_captured_gradients_are_finite_where_scores_are_hidden():
    call = Case(q_len=8, kv_len=8, kv_heads=4).call()
    weights = np.ones(8, np.float32)
    mod = lambda s, b, h, q, kv: s + weights[kv] / (q - kv) ** 2  # noqa: E731
    _, vjp = cupy_flash.attention_vjp(call.q, call.k, call.v, score_mod=mod, mask_mod=lambda b, h, q, kv: q != kv)
    gradients = vjp(call.dout)
    assert all(np.isfinite(x).all() for x in (*gradients[:3], *gradients.dcaptured))


# --------------------------------------------------------------------------------------------------- Mod, calls, errors


def test_a_mod_is_the_functions_that_it_was_made_of():
    case = Case(score_mod="relative", mask_mod="document")
    call = case.call()
    functions = {name: call.options.pop(name) for name in ("score_mod", "mask_mod")}
    mod = cupy_flash.Mod(**functions)
    expected = run(case)
    for options in (dict(score_mod=mod), dict(mask_mod=mod), dict(score_mod=mod, mask_mod=mod)):
        out = cupy_flash.attention(call.q, call.k, call.v, **call.options, **options)
        np.testing.assert_array_equal(out, expected.out)
    with pytest.raises(TypeError, match="a Mod holds both functions"):
        cupy_flash.attention(call.q, call.k, call.v, score_mod=mod, mask_mod=functions["mask_mod"])


def test_contents_of_captured_arrays_are_read_in_every_call():
    call = Case().call()
    table = np.zeros(23, np.float32)
    mod = lambda s, b, h, q, kv: s + table[kv]  # noqa: E731
    before = cupy_flash.attention(call.q, call.k, call.v, score_mod=mod)
    table[:] = np.arange(23)
    after = cupy_flash.attention(call.q, call.k, call.v, score_mod=mod)
    expected = cupy_flash.attention(call.q, call.k, call.v, bias=np.arange(23.0), engine="cpu")
    np.testing.assert_array_equal(after, expected)
    assert not np.array_equal(before, after)


def test_masks_combine():
    call = Case(q_len=12, kv_len=12).call()
    ids = np.arange(12) // 4

    def causal(b, h, q, kv):
        return q >= kv

    def document(b, h, q, kv):
        return ids[q] == ids[kv]

    i, j = np.arange(12)[:, None], np.arange(12)
    seen = {
        cupy_flash.and_masks(causal, document): (i >= j) & (ids[i] == ids[j]),
        cupy_flash.or_masks(causal, document): (i >= j) | (ids[i] == ids[j]),
        cupy_flash.and_masks(causal, cupy_flash.not_mask(document)): (i >= j) & (ids[i] != ids[j]),
        cupy_flash.noop_mask: np.ones((12, 12), bool),
        cupy_flash.and_masks(): np.ones((12, 12), bool),
        cupy_flash.or_masks(): np.zeros((12, 12), bool),
    }
    for mask_mod, mask in seen.items():
        actual = cupy_flash.attention(call.q, call.k, call.v, mask_mod=mask_mod, engine="cpu")
        expected = cupy_flash.attention(call.q, call.k, call.v, mask=mask, engine="cpu")
        np.testing.assert_array_equal(actual, expected)


def test_positions_have_no_diagonal_offset():
    call = Case(q_len=5, kv_len=9).call()
    causal = cupy_flash.attention(call.q, call.k, call.v, mask_mod=lambda b, h, q, kv: q >= kv)
    top_left = cupy_flash.attention(call.q, call.k, call.v, causal="top_left")
    np.testing.assert_allclose(causal, top_left, rtol=1e-5, atol=1e-6)


def test_jax_arrays_are_captured_and_returned():
    jax = pytest.importorskip("jax")
    case = Case(score_mod="relative", mask_mod="document", kv_lengths=None)
    call, expected = case.call(), run(case)
    q, k, v = map(jax.numpy.asarray, (call.q, call.k, call.v))
    mods = mods_of(case, jax.numpy, {name: jax.numpy.asarray(x) for name, x in arrays_of(case).items()})
    out, vjp = cupy_flash.attention_vjp(q, k, v, return_lse=False, **mods)
    np.testing.assert_array_equal(np.asarray(out), expected.out)
    (gradient,) = (x for x in vjp(jax.numpy.asarray(call.dout)).dcaptured if x is not None)
    assert isinstance(gradient, jax.Array) and gradient.shape == (4, 15)


SHORT = np.ones((4, 10), np.float32)
EMPTY = np.ones((0,), np.float32)
ERRORS = {
    "queries": (
        lambda s, b, h, q, kv: s + SHORT[h, q],
        r"array0 \(4, 10\) is indexed by q_idx in dimension 1, and there are 19 queries",
    ),
    "keys": (lambda s, b, h, q, kv: s + SHORT[h, kv], "indexed by kv_idx in dimension 1, and there are 23 keys"),
    "empty": (lambda s, b, h, q, kv: s + EMPTY[q % 3], r"array0 \(0,\) has no elements to read"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_short_arrays_are_refused(name):
    call = Case().call()
    mod, message = ERRORS[name]
    with pytest.raises(ValueError, match=message) as error:
        cupy_flash.attention(call.q, call.k, call.v, score_mod=mod)
    assert "array0  float32" in str(error.value)
    two_heads, one = np.ones(2, np.float32), np.ones(1)
    with pytest.raises(ValueError, match="indexed by h in dimension 0, and there are 4 query heads"):
        cupy_flash.attention(call.q, call.k, call.v, score_mod=lambda s, b, h, q, kv: s * two_heads[h])
    with pytest.raises(ValueError, match="indexed by b in dimension 0, and there are 2 sequences"):
        cupy_flash.attention(call.q, call.k, call.v, mask_mod=lambda b, h, q, kv: one[b] > 0)


def test_one_error_has_every_reason():
    call = Case().call()
    with pytest.raises(TypeError) as error:
        cupy_flash.attention(
            call.q, call.k, call.v[:, 1:], softcap=-1.0, score_mod=lambda s, b, h, q, kv: s if s > 0 else 0
        )
    for reason in ("softcap must be positive", "where(condition, a, b) instead of if", "k and v must have one length"):
        assert reason in str(error.value)
    tables = [np.ones(23) for _ in range(33)]
    with pytest.raises(ValueError, match="a mod reads at most 32 arrays") as error:
        cupy_flash.attention(call.q, call.k, call.v, score_mod=lambda s, b, h, q, kv: sum((t[kv] for t in tables), s))
    assert not isinstance(error.value, TypeError)
    jax = pytest.importorskip("jax")
    table = jax.numpy.ones(30)
    with pytest.raises(TypeError, match="all arrays must be of one type, not jax and numpy"):
        cupy_flash.attention(call.q, call.k, call.v, score_mod=lambda s, b, h, q, kv: s + table[q])


def test_explain_shows_the_mods():
    case = Case(score_mod="relative", mask_mod="document")
    call = case.call()
    text = cupy_flash.explain(call.q, call.k, call.v, **call.options)
    assert "score_mod  score + array0[h, (min(max((q - kv), n0), n1) + n1)]" in text
    assert "slope      1" in text
    assert "mask_mod   array1[b, q] == array1[b, kv]" in text
    assert "array0     float32 (4, 15), with a gradient" in text
    assert "array1     int64 (2, 23)" in text
    assert "n0 = -7, n1 = 7" in text


def test_explain_counts_the_tiles_of_each_class():
    """The counts include all heads and sequences, also shorter ones; the mask depends only on the sequence."""
    q = np.zeros((2, 300, 2, 16), np.float32)
    limits = np.array([300, 128])
    options = dict(mask_mod=lambda b, h, i, j: j < limits[b], q_lengths=np.array([300, 100], np.int32))
    text = cupy_flash.explain(q, q, q, **options, backend="simulator", engine="simt")
    chosen = text.splitlines()[-1]
    block_q, block_kv = map(int, re.search(r"tiles of (\d+) x (\d+)", chosen).groups())
    expected = np.zeros(3, int)
    for limit, length in zip(limits, (300, 100), strict=True):
        for j in range(0, 300, block_kv):
            column = 0 if j >= limit else 1 if min(j + block_kv, 300) <= limit else 2
            expected[column] += 2 * -(-length // block_q)
    assert [int(n) for n in re.findall(r"(\d+) (?:skipped|unmasked|masked)", chosen)] == expected.tolist(), chosen


def test_shards_count_positions_and_heads_of_the_whole():
    from cupy_flash import dispatch
    from cupy_flash.problem.build import pose
    from cupy_flash.problem.records import Options, Shard

    case = Case(q_len=24, kv_len=24, score_mod="relative", mask_mod="sliding", kv_heads=4)
    call, whole = case.call(), run(case)
    starts = np.full((2, 3), 8, np.int32)
    starts[:, 1:] = 0, 8
    heads = slice(1, 3)
    shard = Shard(starts, 1, 1, 4)
    arrays = (call.q[:, 8:16, heads], call.k[:, :, heads], call.v[:, :, heads])
    problem, operands = pose("shard", arrays, Options(**call.options), shard=shard)
    out, _ = dispatch.forward(problem, operands)
    np.testing.assert_allclose(out.numpy(), whole.out[:, 8:16, heads], rtol=1e-5, atol=1e-6)
