"""JVPs and double backwards with mods against autograd on all scores, gradients of captured arrays included."""

import functools
from dataclasses import replace

import numpy as np
import pytest
import torch
from cases import Case
from derivatives import check, run_kernels
from mods import SCORE_MODS, arrays_of, mods_of
from planting import change, planted
from tiers import in_tiers
from tiles import SMALL_FRAGMENTS, fragments
from tolerance import assert_matches_reference
from torch_orders import in_several_orders

import cupy_flash

# torch's forward mode uses torch.jit.script, which torch itself has deprecated.
pytestmark = [
    pytest.mark.usefixtures("poisoned_memory"),
    pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning"),
]

CASES = {name: Case(score_mod=name, mask_mod="document", softcap=3.0) for name in SCORE_MODS}
del CASES["choice"]  # torch's second derivative of a branch that is not taken is NaN; the formula gives the right one
DEFAULT = ["learned-twice", "hides-by-sum", "row-bias"]


def inputs_of(case):
    """Return (call, {name: array}, names of captured arrays, tangents of the floating ones, tangents of q, k, v)."""
    call, arrays = case.call(), arrays_of(case)
    captured = cupy_flash.Mod(**mods_of(case, arrays=arrays)).arrays
    names = [next(name for name, x in arrays.items() if x is array) for array in captured]
    rng = np.random.default_rng(7)
    tangents = {name: rng.normal(size=x.shape).astype(np.float32) for name, x in arrays.items() if x.dtype.kind == "f"}
    return call, arrays, names, tangents, [rng.normal(size=x.shape).astype(np.float32) for x in call[:3]]


def by_autograd(case, dtype):
    """Return {name: result} of dense attention: (out, lse), their tangents, and the results of a double backward."""
    call, arrays, names, tangents, moved = inputs_of(case)
    floating = [name for name in dict.fromkeys(names) if name in tangents]
    variables = [torch.tensor(x).to(dtype) for x in (*call[:3], *(arrays[name] for name in floating))]
    directions = tuple(torch.tensor(x).to(dtype) for x in (*moved, *(tangents[name] for name in floating)))
    dout, dlse = torch.tensor(call.dout).to(dtype), torch.tensor(call.dlse).to(dtype)

    def dense(q, k, v, *captured):
        held = {name: torch.tensor(x) for name, x in arrays.items()} | dict(zip(floating, captured, strict=True))
        mods = mods_of(case, torch, held)
        k, v = (x.repeat_interleave(case.heads // case.kv_heads, dim=2) for x in (k, v))
        s = torch.einsum("bihd,bjhd->bhij", q, k) / case.head_dim**0.5
        s = case.softcap * torch.tanh(s / case.softcap)
        b, h = torch.arange(case.batch)[:, None, None, None], torch.arange(case.heads)[:, None, None]
        i, j = torch.arange(case.q_len)[:, None], torch.arange(case.kv_len)
        s = mods["score_mod"](s, b, h, i, j)
        hidden = ~mods["mask_mod"](b, h, i, j).broadcast_to(s.shape) | torch.isneginf(s.detach())
        seen = ~hidden.all(-1, keepdim=True)
        s = torch.where(hidden, -1e9, s)
        p = torch.where(hidden | ~seen, 0.0, torch.softmax(s, -1))
        lse = torch.where(seen[..., 0], torch.logsumexp(s, -1), 0.0)
        return torch.einsum("bhij,bjhd->bihd", p, v), lse

    (out, lse), (tout, tlse) = torch.func.jvp(dense, tuple(variables), directions)

    def backward(dout, dlse, *variables):
        _, vjp = torch.func.vjp(dense, *variables)
        return vjp((dout, dlse))

    _, second = torch.func.vjp(backward, dout, dlse, *variables)
    ddout, ddlse, dq, dk, dv, *dcaptured = second(directions)
    results = dict(out=out, tout=tout, tlse=tlse, dq=dq, dk=dk, dv=dv, ddout=ddout, ddlse=ddlse)
    return {name: x.numpy() for name, x in (results | dict(zip(floating, dcaptured, strict=True))).items()}


@functools.cache
def autograd_references(case):
    """Return results in float64, and the least accurate ones of several runs in float32, chosen per element."""
    exact = by_autograd(case, torch.float64)
    runs = list(in_several_orders(lambda: by_autograd(case, torch.float32), orders=8))
    return exact, {name: furthest(x, [run[name] for run in runs]) for name, x in exact.items()}


def furthest(exact, runs):
    """Return for each element the result of the run that is furthest from the exact value."""
    return functools.reduce(lambda a, b: np.where(np.abs(b - exact) > np.abs(a - exact), b, a), runs)


CASES_OF_THE_FORMULA = {
    "choice": Case(score_mod="choice", mask_mod="rows"),
    "choice-beside-others": Case(score_mod="choice", sink=True, dropout=0.2, bias="1hqk", alibi="h"),
    "hides-packed": Case(score_mod="hides", packed=True, q_lengths=(7, 19), kv_lengths=(23, 5)),
    "hides-by-score": Case(score_mod="hides-by-score", sink=True),
    "mask-alone": Case(mask_mod="sliding"),
    "softcap-bfloat16": Case(score_mod="softcap", mask_mod="causal", dtype="bfloat16"),
}


@pytest.mark.parametrize("case", CASES_OF_THE_FORMULA.values(), ids=CASES_OF_THE_FORMULA)
def test_with_other_options(case):
    check(case)


def check_against_autograd(case, backend, **more):
    call, arrays, names, tangents, moved = inputs_of(case)
    tcaptured = [tangents.get(name) for name in names]
    options = call.options | mods_of(case, arrays=arrays) | dict(tcaptured=tcaptured, backend=backend) | more
    out, tout, lse, tlse = cupy_flash.attention_jvp(*call[:3], *moved, return_lse=True, **options)
    second = cupy_flash.attention_double_backward(*moved, call.dout, *call[:3], out, lse, dlse=call.dlse, **options)
    actual = dict(out=out, tout=tout, tlse=tlse, dq=second.dq, dk=second.dk, dv=second.dv)
    actual |= dict(ddout=second.ddout, ddlse=second.ddlse)
    for name, gradient in zip(names, second.dcaptured, strict=True):
        if gradient is not None:
            actual[name] = gradient
    exact, low = autograd_references(case)
    assert actual.keys() == exact.keys()
    for name, x in actual.items():
        assert_matches_reference(x, exact[name], low[name], np.dtype(np.float32), f"{name} of {case}")


@pytest.mark.parametrize("case", in_tiers(CASES, DEFAULT))
def test_every_mod(case):
    check_against_autograd(case, "cpu")


@pytest.mark.parametrize("deterministic", [False, True], ids=["any-order", "deterministic"])
@pytest.mark.parametrize("case", in_tiers(CASES, []))
def test_every_mod_in_kernels(case, deterministic):
    check_against_autograd(case, "simulator", deterministic=deterministic)


@pytest.mark.parametrize("engine", in_tiers({"simt": "simt", "mma": "mma"}, ["simt"]))
def test_a_mask_alone_in_kernels(engine):
    """Without a score_mod the kernels still pass the tangents of scores through the generated struct."""
    case = replace(CASES_OF_THE_FORMULA["mask-alone"], dtype={"simt": "float32", "mma": "bfloat16"}[engine])
    check(case, run_kernels(case, engine=engine))


# Between the first tile and those on the diagonal, the mask hides tiles of queries and of keys.
BORDERS = Case(q_len=150, kv_len=150, batch=1, heads=1, kv_heads=1, mask_mod="borders", dtype="bfloat16")


def borders(**how):
    return run_kernels(BORDERS, engine="mma", tile=fragments(SMALL_FRAGMENTS), **how)


@pytest.mark.exhaustive
def test_addresses_advance_over_hidden_tiles():
    check(BORDERS, borders())


STEPS = {
    "queries": change("advance-Q", "MASK_MOD ? q_start - Q.first : BLOCK_Q", "BLOCK_Q"),
    "keys": change("advance-keys", "MASK_MOD ? tiles.start - first : Tiles::STEP", "Tiles::STEP"),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
def test_a_step_of_one_tile_over_hidden_tiles_is_found(step, monkeypatch):
    with planted(monkeypatch, step), pytest.raises(AssertionError, match="error"):
        check(BORDERS, borders())


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", [*CASES.values(), *CASES_OF_THE_FORMULA.values()], ids=[*CASES, *CASES_OF_THE_FORMULA])
def test_every_mod_on_tensor_cores(case):
    case = replace(case, dtype="bfloat16")
    check(case, run_kernels(case, engine="mma"))
