"""The mods of docs/mods.md give the results of the dense formula with NumPy, torch and jax, and on every engine."""

import itertools

import numpy as np
import pytest
from cases import Case, check, run_kernels
from pages import ROOT, python_blocks

import cupy_flash
from cupy_flash import reference

PAGE = (ROOT / "docs" / "mods.md").read_text(encoding="utf-8")
TEN_MODS = python_blocks(PAGE)[1][1]
RECIPES = "".join(code for _, code in python_blocks(PAGE.partition("## Recipes")[2].partition("\n## ")[0]))


def run(library, code=TEN_MODS, **changes):
    """Return the names that the block of ten mods, or other code, defines with a library, after changes of its text."""
    if library == "jax.numpy":
        pytest.importorskip("jax")
    elif library == "torch":
        pytest.importorskip("torch")
    names = {}
    code = code.replace("import numpy as xp", f"import {library} as xp")
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


# The recipes, beside dense masks that are written without mods


def windows_of_natten(size, kernel, dilation, causal):
    """Return (size, size), which positions of one dimension see which: windows of lists, clipped at their ends."""
    seen = np.zeros((size, size), bool)
    for x in range(size):
        group = [y for y in range(size) if y % dilation == x % dilation]
        place = group.index(x)
        start = min(max(place - kernel // 2, 0), len(group) - kernel)
        seen[x, group[max(place - kernel + 1, 0) : place + 1] if causal else group[start : start + kernel]] = True
    return seen


def neighbours(shape, *words):
    """Return the mask of a grid: two points see each other if their coordinates do in every dimension."""
    points = np.array(list(itertools.product(*map(range, shape)))).T
    each = zip(points, map(windows_of_natten, shape, *words), strict=True)
    return np.all([windows[place[:, None], place] for place, windows in each], axis=0)


@pytest.mark.parametrize("library", ["numpy", "torch", "jax.numpy"])
def test_recipes(library):
    names = run(library, RECIPES)
    q, k, v, q_2, k_2 = (np.asarray(x) for x in names["waves"])
    rows, columns = np.indices((64, 64))
    first, last = (np.asarray(names[name])[0, :, None] for name in ("first", "last"))
    masks = {
        "near": neighbours((4, 4, 4), (3, 2, 3), (1, 1, 1), (False,) * 3),
        "dilated": neighbours((8, 8), (3, 2), (2, 3), (False, True)),
        "rows": (first <= columns) & (columns < last),
    }
    expected = {name: reference.attention(q, k, v, mask=mask)[0] for name, mask in masks.items()}
    one, two = (reference.attention(*x, v, causal=True)[0] for x in ((q, k), (q_2, k_2)))
    expected["difference"] = one - 0.3 * two
    ends = np.cumsum(names["lengths"])
    alone = [np.r_[0 : ends[0], start:stop] for start, stop in itertools.pairwise(ends)]
    items = [reference.attention(*(x[:, at] for x in (q, k, v)), causal=True)[0] for at in alone]
    expected["scored"] = np.concatenate([items[0], *(x[:, ends[0] :] for x in items[1:])], axis=1)
    assert [at.tolist() for at in map(np.array(names["positions"]).__getitem__, alone)] == [
        [*range(len(at))] for at in alone
    ]
    for name, out in expected.items():
        np.testing.assert_allclose(np.asarray(names[name]), out, rtol=2e-4, atol=2e-5, err_msg=name)


def test_the_recipe_of_a_grid_skips_as_many_tiles_as_the_page_says():
    names = run("numpy", RECIPES)
    q = np.zeros((1, 2048, 1, 16), np.float32)
    mask_mod = names["neighbourhood"]((8, 16, 16), (3, 3, 3))
    assert "1712 skipped (84%)" in " ".join(
        str(cupy_flash.explain(q, q, q, mask_mod=mask_mod, backend="simulator")).split()
    )
