"""The cost model against a sweep: the loss by choosing tiles by prediction, and constants fitted to measurements."""

import json

import pytest
from sweeps import case, regime, result

from bench.__main__ import main
from bench.kernel_development import costs
from cupy_flash import device
from cupy_flash.engines.wgmma import forward
from cupy_flash.gpu import ahead
from cupy_flash.plan import plan

HOPPER = device.named("sm_90a", "cuda")


def predicted(measured):
    """Return a sweep in which every wgmma tile takes the time that the cost model predicts."""
    words = dict(
        dtype=measured.dtype, head_dim=measured.head_dim, causal=measured.causal, layout="bhsd", engine="wgmma"
    )
    sizes = dict(
        batch=measured.batch,
        heads=measured.heads,
        kv_heads=measured.heads,
        q_len=measured.seqlen,
        kv_len=measured.seqlen,
    )
    problem = ahead.problems(**words, backward=False)[-1]._replace(**sizes)
    plans = plan.candidates(plan.plan(problem, HOPPER), "wgmma")
    pairs = problem.mask.band(measured.seqlen, measured.seqlen).pairs
    seconds = {f"wgmma {tile}": forward.seconds(problem, pairs, HOPPER, tile) for tile, _ in plans}
    return case(measured, {name: measured.flops / time / 1e12 for name, time in seconds.items()})


@pytest.fixture
def planted(monkeypatch):
    """Return a sweep of a GPU on which a step of the mainloop waits three times as long as the cost model assumes."""
    sizes = [regime(dim, seqlen, causal) for dim in (64, 128) for seqlen in (1024, 16384) for causal in (False, True)]
    with monkeypatch.context() as patch:
        patch.setattr(forward, "STEP", 3.0 * forward.STEP)
        patch.setattr(forward, "CLOCK", 1.2 * forward.CLOCK)
        return result(*map(predicted, sizes))


def test_fit_recovers_the_constants_of_a_sweep(planted):
    written = {name: getattr(forward, name) for name in ("STEP", "CLOCK", "BLOCK")}
    rows = {row[1]: row for row in costs.constants(planted["cases"], planted["device"]).rows}
    assert {name: getattr(forward, name) for name in written} == written  # the fit restores the module's constants
    assert {row[0] for row in rows.values()} == {"wgmma forward"}
    step, clock, block = (float(rows[name][3]) for name in ("STEP", "CLOCK", "BLOCK"))
    assert step / clock == pytest.approx(3 / 1.2 * written["STEP"] / written["CLOCK"], rel=0.15)
    before, after = (float(word.rstrip("%")) for word in rows["STEP"][5].split(" -> "))
    assert after < before / 5
    assert block == pytest.approx(written["BLOCK"], rel=0.5)


def test_loss_by_choosing_the_predicted_tile():
    slow = {"wgmma 128x96 True": 600.0, "wgmma 128x128 False": 660.0, "wgmma 192x64 False": None, "mma 1": None}
    stored = result(case(regime(), slow, others={"SDPA cuDNN": 700.0}), case(regime(causal=True), {"mma 1": None}))
    choices, predictions, _ = costs.tables(result(stored["cases"][0]) | {"cases": [stored["cases"][0]]})
    assert choices.rows == [[regime().name, "wgmma", "wgmma 128x96 True", "wgmma 128x128 False", "2", "9%"]]
    milliseconds = regime().flops / 600e9
    by_kind = {row[1]: row for row in predictions.rows}
    assert by_kind["wgmma x True"][2:] == ["128x96", "1", *[f"{milliseconds:.2f}"] * 3]


def test_command(planted, tmp_path, capsys):
    path = tmp_path / "sweep-forward.json"
    path.write_text(json.dumps(planted))
    assert main(["costs", str(path)]) == 0
    output = capsys.readouterr().out
    assert "Measured over predicted" in output and "EXPONENTIALS" in output
