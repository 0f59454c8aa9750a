"""Mods in the kernels of simt and mma on the simulator: the dense formula; hidden tiles are not loaded."""

import functools

import numpy as np
import pytest
from cases import DTYPES, Case, check, furthest, run, run_kernels
from helpers.tiers import in_tiers
from mods import MASK_MODS, SCORE_MODS, arrays_of
from planting import change, planted, skip
from test_mod_attention import BESIDE, by_autograd
from tolerance import assert_matches_reference
from torch_orders import in_several_orders

import cupy_flash

pytestmark = pytest.mark.usefixtures("poisoned_memory")

SIMT, MMA = dict(dtype="float32"), dict(dtype="float16")
EACH = {
    f"{name}-{engine}": Case(**{kind: name}, **dtype)
    for engine, dtype in (("simt", SIMT), ("mma", MMA))
    for kind, names in (("score_mod", SCORE_MODS), ("mask_mod", MASK_MODS))
    for name in names
}
BOTH = {
    f"{name}-{engine}": Case(score_mod="relative", mask_mod="document", **(dtype | beside))
    for engine, dtype in (("simt", SIMT), ("mma", MMA))
    for name, beside in BESIDE.items()
    if "dtype" not in beside
}


def kernels_of(case, **how):
    return run_kernels(case, engine="simt" if case.dtype in ("float32", "float64") else "mma", **how)


def check_kernels(case):
    """Check results and gradients, including the gradients of captured arrays."""
    result = kernels_of(case)
    check(case, result)
    if case in EACH.values():
        check_captured(case, result)


def check_captured(case, result):
    """Check gradients of captured arrays, for cases with the options that `by_autograd` knows.

    A gradient may be a single number, so the least accurate of several low-precision runs sets the tolerance: the CPU
    engine, which rounds out to the dtype of the case, and autograd in several orders of its sums.
    """
    if not any(gradient is not None for gradient in result.dcaptured or ()):
        return
    expected = by_autograd(case)
    arrays = cupy_flash.Mod(**{k: v for k, v in case.call().options.items() if k in ("score_mod", "mask_mod")}).arrays
    names = [next(name for name, x in arrays_of(case).items() if np.array_equal(x, array)) for array in arrays]
    low = dict(zip(names, run(case).dcaptured, strict=True))
    runs = list(in_several_orders(lambda: by_autograd(case, "float32"), orders=8))
    for name, gradient in zip(names, result.dcaptured, strict=True):
        assert (gradient is None) == (name not in expected), name
        if gradient is not None:
            worst = functools.reduce(functools.partial(furthest, expected[name]), [x[name] for x in runs], low[name])
            assert_matches_reference(gradient, expected[name], worst, DTYPES[case.dtype], f"{name} of {case}")


@pytest.mark.parametrize(
    "case", in_tiers(EACH, ["learned-twice-simt", "sliding-simt", "document-mma", "hides-by-score-mma"])
)
def test_every_mod(case):
    check_kernels(case)


@pytest.mark.parametrize("case", in_tiers(BOTH, ["packed-mma", "bias-hides-simt"]))
def test_mods_with_every_option(case):
    check_kernels(case)


# The mask hides most pairs, over several tiles of every kernel.
LONG = {name: dict(q_len=260, kv_len=260, heads=2, kv_heads=1, batch=1, head_dim=16, **dtype)
        for name, dtype in (("simt", SIMT), ("mma", MMA))}  # fmt: skip


@pytest.mark.parametrize("engine", in_tiers({name: name for name in LONG}, ["mma"]))
def test_hidden_tiles_are_not_loaded(engine, watch):
    """A sliding mask_mod reads less than causal attention, most of whose pairs it hides.

    mma has a kernel for dQ if it is deterministic.
    """
    read = {}
    for name, option in (("sliding", dict(mask_mod="sliding")), ("causal", dict(causal=True))):
        case = Case(**LONG[engine], **option)
        check(case, kernels_of(case, start=watch.start, deterministic=True))
        read[name] = {kernel: counters.global_bytes_read for kernel, counters in watch.counters.items()}
    # backward_kv of mma has other tiles under the causal mask, so its bytes cannot be compared.
    for kernel in ("forward", "backward_q") + ("backward_kv",) * (engine == "simt"):
        assert read["sliding"][kernel] <= 0.75 * read["causal"][kernel], kernel


# Three tiles of queries and four of keys, in the planned tiles.
GAPS = {name: Case(**LONG[name] | dict(q_len=150, kv_len=210, heads=1), mask_mod="gaps") for name in LONG}


@pytest.mark.parametrize("engine", GAPS)
def test_hidden_tiles_between_visible_ones(engine):
    check(GAPS[engine], kernels_of(GAPS[engine], deterministic=True))


PLANTS = {
    "cut tiles count as full": change("tile-is-masked", "(may_hide & 1)", "false"),
    "a visible tile is skipped": change("first-visible-tile", "__ffs(may_see) - 1", "31 - __clz(may_see)"),
    "the slope is not multiplied": skip("mod-slope"),
}


@pytest.mark.parametrize("plant", in_tiers(PLANTS, ["cut tiles count as full"]))
def test_planted_bugs_are_found(plant, monkeypatch):
    case = Case(**LONG["simt"], score_mod="softcap", mask_mod="sliding")
    with planted(monkeypatch, plant):
        result = kernels_of(case)
    with pytest.raises(AssertionError):
        check(case, result)


@pytest.mark.exhaustive
def test_a_wrong_distance_is_found(monkeypatch):
    """In an unmasked tile q_idx - kv_idx is computed once, and each score adds its row and column."""
    case = Case(**LONG["mma"], score_mod="alibi")
    check(case, kernels_of(case))
    with planted(monkeypatch, change("query-key-distance", "base + offset", "base")), pytest.raises(AssertionError):
        check(case, kernels_of(case))
