"""The mods of docs/mods.md give the results of the dense formula with NumPy, torch and jax, and on every engine."""

import numpy as np
import pytest
from cases import Case, check, run_kernels
from pages import ROOT, python_blocks

import cupy_flash
from cupy_flash import reference

TEN_MODS = python_blocks((ROOT / "docs" / "mods.md").read_text(encoding="utf-8"))[1][1]


def run(library, **changes):
    """Return the names that the block of ten mods defines with a library, after changes of its text."""
    if library == "jax.numpy":
        pytest.importorskip("jax")
    elif library == "torch":
        pytest.importorskip("torch")
    names = {}
    code = TEN_MODS.replace("import numpy as xp", f"import {library} as xp")
    for old, new in changes.items():
        assert old in code
        code = code.replace(old, new)
    exec(compile(code, "docs/mods.md", "exec"), names)
    return names


@pytest.mark.parametrize("library", ["torch", "jax.numpy"])
def test_libraries_agree(library):
    expected, actual = run("numpy")["results"], run(library)["results"]
    assert len(expected) == 10 and expected.keys() == actual.keys()
    for name, out in expected.items():
        np.testing.assert_allclose(np.asarray(actual[name]), out, rtol=2e-4, atol=2e-5, err_msg=name)


def test_results_equal_the_formula():
    names = run("numpy")
    for kind in ("score_mod", "mask_mod"):
        for name, mod in names[f"{kind.upper()}S"].items():
            expected, _ = reference.attention(*names["waves"], **{kind: mod})
            np.testing.assert_allclose(names["results"][name], expected, rtol=1e-4, atol=1e-5, err_msg=name)


NAMES = [(kind, name) for kind in ("score_mod", "mask_mod") for name in run("numpy")[f"{kind.upper()}S"]]
ENGINES = {"simt": ("float32", "sm_80"), "mma": ("float16", "sm_80"), "wgmma": ("float16", "sm_90a")}


@pytest.mark.exhaustive
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("kind,name", NAMES)
def test_every_engine_runs_the_mods(kind, name, engine):
    dtype, arch = ENGINES[engine]
    shape = dict(q_len=64, kv_len=64, batch=1, heads=4, kv_heads=4, head_dim=16, head_dim_v=16)
    case = Case(**shape, dtype=dtype)
    call = case.call()
    call = call._replace(options=call.options | {kind: run("numpy")[f"{kind.upper()}S"][name]})
    result = run_kernels(case, call=call, arch=arch, engine=engine)
    check(case, result, only=("out", "lse", "dq", "dk", "dv"), call=call)


LEARNED = {"ALiBi": "slopes", "relative bias": "table", "buckets of T5": "of_bucket"}


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind,name", NAMES)
def test_gradients_of_torch_are_central_differences(kind, name):
    torch = pytest.importorskip("torch")
    names = run("torch", **{"float32": "float64", "S, H = 64, 4": "S, H = 12, 2"})
    inputs = [wave[..., :4].clone().requires_grad_() for wave in names["waves"]]
    if name in LEARNED:
        inputs.append(names[LEARNED[name]].requires_grad_())
    mod = names[f"{kind.upper()}S"][name]
    assert torch.autograd.gradcheck(lambda q, k, v, *_: cupy_flash.attention(q, k, v, **{kind: mod}), inputs)
