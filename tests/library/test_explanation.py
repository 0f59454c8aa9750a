"""explain() and info print 80 columns; notebooks show a table, and plot() draws the tiles of the call."""

import numpy as np
import pytest

import cupy_flash
from cupy_flash.__main__ import main
from cupy_flash.explanation import TERMINAL, Explanation, parts
from cupy_flash.mods.tiles import CUT, EMPTY, FULL

X = np.ones((1, 100, 2, 16), np.float32)
IDS = np.arange(100) // 40


def document(b, h, q_idx, kv_idx):
    return IDS[q_idx] == IDS[kv_idx]


def too_wide(text):
    """The lines of more than 80 columns that could be broken."""
    return [line for line in text.splitlines() if len(line) > TERMINAL and " " in line[25:].strip()]


@pytest.mark.parametrize(
    "options",
    [
        dict(causal=True),
        dict(causal=True, mask_mod=document, backend="simulator"),
        dict(window=(64, 0), softcap=30.0, dropout=0.1, backend="simulator:sm_90a"),
    ],
    ids=["cpu", "mod", "hopper"],
)
def test_explain_is_printed_in_80_columns_and_has_a_line_per_fact(options, capsys):
    explanation = cupy_flash.explain(X, X, X, **options)
    print(explanation)
    printed = capsys.readouterr().out.rstrip("\n")
    assert too_wide(printed) == [] and too_wide(explanation) != []
    assert " ".join(printed.split()) == " ".join(explanation.split())
    labels = [parts(line)[0] for line in explanation.splitlines()]
    margin = max(map(len, labels)) + 2
    starts = [line[:margin] for line in printed.splitlines()]
    assert [start.strip() for start in starts if start.strip()] == labels and all(x.endswith("  ") for x in starts)
    assert isinstance(explanation, str) and explanation.splitlines()[0].startswith("problem    forward, float32")


def test_the_commands_print_80_columns(capsys):
    for words in (["info"], ["explain", "--arch", "sm_90a", "--head-dim", "64", "--causal"]):
        assert main(words) == 0
        assert too_wide(capsys.readouterr().out) == []


def test_long_words_are_not_broken():
    path = "/" + 90 * "x"
    lines = str(Explanation(f"ignored    {path}: it is a link")).splitlines()
    assert [line.strip() for line in lines] == ["ignored", f"{path}:", "it is a link"]
    assert too_wide("label      " + 40 * "ab ") != []


def test_a_notebook_shows_a_table():
    table = cupy_flash.explain(X, X, X, causal=True)._repr_html_()
    assert table.startswith("<table><tr><td><b>problem</b></td>") and "<b>not simt</b>" in table
    assert "a &lt; b" in Explanation("mask_mod   a < b")._repr_html_()


@pytest.mark.parametrize(
    "options", [{}, dict(causal=True), dict(causal=True, mask_mod=document)], ids=["full", "causal", "mod"]
)
def test_plot_draws_the_tiles_of_the_call(options):
    pytest.importorskip("matplotlib")
    i, j = np.arange(100)[:, None], np.arange(100)
    seen = np.ones((100, 100), bool)
    if "causal" in options:
        seen &= i >= j
    if "mask_mod" in options:
        seen &= IDS[i] == IDS[j]
    explanation = cupy_flash.explain(X, X, X, backend="simulator", **options)
    classes, _, _, block_q, block_kv = explanation._tiles()
    expected = np.empty_like(classes)
    for n, m in np.ndindex(classes.shape):
        tile = seen[n * block_q : (n + 1) * block_q, m * block_kv : (m + 1) * block_kv]
        expected[n, m] = FULL if tile.all() else CUT if tile.any() else EMPTY
    np.testing.assert_array_equal(classes, expected)
    axes = explanation.plot()
    np.testing.assert_array_equal(np.asarray(axes.collections[0].get_array()).ravel(), expected.ravel())
    assert f"tiles of {block_q} queries x {block_kv} keys" == axes.get_title()
    assert sum(int(words.get_text().split()[0]) for words in axes.get_legend().get_texts()) == expected.size
    assert explanation.plot(axes) is axes


def test_a_call_on_a_kv_cache_has_no_tiles_to_plot():
    explanation = cupy_flash.explain_with_kv_cache(X[:, :1], X, X, cache_seqlens=np.array([50], np.int32))
    with pytest.raises(ValueError, match="no tiles to plot"):
        explanation.plot()
