"""Gradients of captured arrays that kernels sum in blocks which own them: arrays indexed by b, h, q_idx and kv_idx."""

from dataclasses import replace

import numpy as np
import pytest
from cases import Case
from mods import arrays_of, mods_of
from tiers import in_tiers
from tolerance import assert_matches_reference

import cupy_flash
from cupy_flash.problem import UnsupportedError

pytestmark = pytest.mark.usefixtures("poisoned_memory")

ENGINES = {"simt": "float32", "mma": "float16"}
CASES = {
    "heads": Case(score_mod="alibi", causal=True),
    "dense": Case(score_mod="dense", mask_mod="document"),
    "number-and-rows": Case(score_mod="row-bias", mask_mod="rows"),
    "many-tiles": Case(score_mod="row-bias", q_len=70, kv_len=41, batch=1),
    "dropout-softcap-bias": Case(score_mod="row-bias", dropout=0.3, softcap=4.0, bias="bhqk", bias_hides=True),
    "infinite-factor": Case(score_mod="hides-by-sum", sink=True),
    "lengths": Case(score_mod="dense", q_lengths=(7, 19), kv_lengths=(23, 5)),
    "packed": Case(score_mod="row-bias", packed=True, q_lengths=(7, 19), kv_lengths=(23, 5)),
}


def gradients(case, how, cast=lambda x: x, moved=None):
    """The gradients of the arrays that the score_mod of the case captures; None for the others.

    `moved`: a seed; every element of q, k, v and dout is then another number, by up to one rounding.
    """
    call = case.call()
    if moved is not None:
        rng = np.random.default_rng(moved)
        eps = np.finfo(call.q.dtype).eps
        names = ("q", "k", "v", "dout")
        inputs = {name: getattr(call, name) for name in names}
        call = call._replace(
            **{name: x * (1 + eps * rng.uniform(-1, 1, x.shape)).astype(x.dtype) for name, x in inputs.items()}
        )
    mods = mods_of(case, arrays={name: x if x.dtype.kind != "f" else cast(x) for name, x in arrays_of(case).items()})
    options = call.options | mods | how
    if call.packed is None:
        out, lse = cupy_flash.attention(call.q, call.k, call.v, return_lse=True, **options)
        return cupy_flash.attention_backward(
            call.dout, call.q, call.k, call.v, out, lse, dlse=call.dlse, **options
        ).dcaptured
    arguments = (call.q, call.k, call.v)
    out, lse = cupy_flash.attention_varlen(*arguments, *call.packed, return_lse=True, **options)
    return cupy_flash.attention_varlen_backward(
        call.dout, *arguments, out, lse, *call.packed, dlse=call.dlse, **options
    ).dcaptured


ROWS = {f"{name}-{engine}": (case, engine) for name, case in CASES.items() for engine in ENGINES}


@pytest.mark.parametrize("row", in_tiers(ROWS, ["dropout-softcap-bias-simt", "packed-simt", "number-and-rows-mma"]))
def test_gradients_equal_the_cpu(row):
    """Against the CPU engine in fp64. A gradient may be one number: several runs in low precision set the tolerance."""
    case, engine = row
    case = replace(case, dtype=ENGINES[engine])
    actual = gradients(case, dict(backend="simulator", engine=engine))
    exact = gradients(replace(case, dtype="float64"), {}, lambda x: x.astype(np.float64))
    low = [gradients(case, {}, moved=seed) for seed in range(8)]
    assert any(x is not None for x in actual)
    for slot, (x, y, z) in enumerate(zip(actual, exact, zip(*low, strict=True), strict=True)):
        assert (x is None) == (y is None)
        if x is not None:
            assert (x.dtype, x.shape) == (z[0].dtype, z[0].shape)
            runs = len(z)
            assert_matches_reference([x] * runs, [y] * runs, z, x.dtype, f"gradient of array{slot} of {case}")


def test_computed_indices_are_refused():
    """No block owns an element that is read at a computed index; the error names the array."""
    case = Case(score_mod="relative", mask_mod="document")
    for engine, dtype in ENGINES.items():
        with pytest.raises(UnsupportedError, match="array0, which score_mod reads at computed or repeated indices"):
            gradients(replace(case, dtype=dtype), dict(backend="simulator", engine=engine, deterministic=True))
