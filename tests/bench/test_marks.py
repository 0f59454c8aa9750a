"""The marks that a sweep has reached: ratios by hand, the table, the plot, and the generated blocks of a page."""

import json

import pytest
from sweeps import case, regime, result

from bench.__main__ import main
from bench.kernel_development import marks, sweep_plot
from bench.kernel_development.tables import block, regenerate, without_block

FULL, CAUSAL = regime(), regime(causal=True)
BACKWARD, IN_ORDER = regime(backward=True), regime(backward=True, deterministic=True)
FP32, FP8 = regime(64, 1024, dtype="float32"), regime(dtype="float8_e4m3fn")


def reached(*cases):
    """Return the rows of the table, by regime."""
    return {row[0]: row[1:] for row in marks.table(result(*cases)).rows}


@pytest.mark.parametrize(
    "measured, ratios",
    [
        ([case(FULL, {"wgmma 1": 736.0, "mma 1": 300.0}, others={"SDPA cuDNN": 700.0})], dict(mm=0.92, best=736 / 700)),
        ([case(FP8, {"wgmma 1": 1200.0})], dict(mm=1.5)),
        ([case(FP32, {"simt 1": 28.7232}, others={"SDPA math": 14.3616})], dict(mm=0.035904, best=2.0, fma=0.5)),
        ([case(IN_ORDER, {"mma 1": 270.0}, matmul=900.0), case(BACKWARD, {"mma 1": 300.0})], dict(mm=0.3, own=0.8)),
        ([case(IN_ORDER, {"mma 1": 270.0}, matmul=900.0)], dict(mm=0.3)),
        ([case(FULL, {"wgmma 1": None}, others={"SDPA cuDNN": 700.0})], {}),
    ],
    ids=["others", "fp8", "fp32", "in-order", "in-order-alone", "none-of-ours"],
)
def test_ratios_by_hand(measured, ratios):
    cases = {each["regime"]: each for each in measured}
    where = next(candidate for candidate in (FULL, FP8, FP32, IN_ORDER) if candidate.name == measured[0]["regime"])
    assert marks.ratios(where, cases, result()["device"]) == pytest.approx(ratios)


def test_table_says_which_mark_is_reached():
    rows = reached(
        case(CAUSAL, {"wgmma 1": 640.0}, others={"SDPA cuDNN": 700.0, "SDPA flash": 300.0}),
        case(FULL, {"wgmma 1": 736.0}, others={"SDPA cuDNN": 700.0}),
        case(regime(seqlen=4096, causal=True), {"wgmma 1": 300.0}, others={"SDPA cuDNN": 700.0}),
        case(regime(96), {"wgmma 1": 300.0}),
    )
    # a regime without a mark has no row
    assert list(rows) == [FULL.name, CAUSAL.name, "forward bfloat16, D 128, causal, 4096"]
    full = [
        "736",
        "700 SDPA cuDNN",
        "1.05",
        "0.92",
        "-",
        "-",
        "R_best 0.9",
        "R_mm 0.92, R_best 1.03",
        "goal",
        "1700 / -",
    ]
    assert rows[FULL.name] == full
    assert rows[CAUSAL.name][1:4] == ["700 SDPA cuDNN", "0.91", "0.80"]
    assert [row[-2] for row in rows.values()] == ["goal", "first", "neither"]


def test_plot_has_a_panel_per_kind_with_two_lengths(tmp_path):
    others = {"SDPA cuDNN": 700.0}
    two = [case(regime(seqlen=seqlen), {"wgmma 1": 640.0}, others=others) for seqlen in (1024, 16384)]
    assert sweep_plot.plot(result(*two, case(CAUSAL, {"wgmma 1": None})), tmp_path / "sweep.png")
    assert (tmp_path / "sweep.png").read_bytes().startswith(b"\x89PNG")
    assert not sweep_plot.plot(result(two[0], case(CAUSAL, {"wgmma 1": 1.0})), tmp_path / "none.png")
    assert not (tmp_path / "none.png").exists()


def test_results_without_a_block_are_reported(tmp_path, capsys):
    readme = tmp_path / "README.md"
    stored = result(case(FULL, {"wgmma 1": 736.0}, others={"SDPA cuDNN": 700.0}))
    (tmp_path / "sweep-forward.json").write_text(json.dumps(stored))
    command = ["tables", "--page", str(readme), "--results", str(tmp_path)]
    readme.write_text("nothing\n")
    for check in ([], ["--check"]):
        assert main([*command, *check]) == 1
        assert "README.md has no table from sweep-forward.json" in capsys.readouterr().err
    other = "<!-- bench:sweep-forward-float32 -->\n<!-- /bench:sweep-forward-float32 -->\n"
    with pytest.raises(ValueError, match="has no sweep-forward-float32.json"):
        regenerate(other, tmp_path)
    assert without_block(other, tmp_path) == ["sweep-forward.json"]
    readme.write_text("<!-- bench:sweep-forward-marks -->\n<!-- /bench:sweep-forward-marks -->\n")
    assert main(command) == 0 and main([*command, "--check"]) == 0
    assert "| 736 | 700 SDPA cuDNN | 1.05 | 0.92 |" in readme.read_text()
    assert "`python -m bench` on a large GPU." in block("sweep-forward", tmp_path)
