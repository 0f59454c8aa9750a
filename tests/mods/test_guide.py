"""The mods of docs/mods.md give the results of the dense formula with NumPy, torch and jax."""

import numpy as np
import pytest
from pages import ROOT, python_blocks

from cupy_flash import reference

TEN_MODS = python_blocks((ROOT / "docs" / "mods.md").read_text(encoding="utf-8"))[1][1]


def run(library):
    if library == "jax.numpy":
        pytest.importorskip("jax")
    elif library == "torch":
        pytest.importorskip("torch")
    names = {}
    code = TEN_MODS.replace("import numpy as xp", f"import {library} as xp")
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
