"""python -m bench sass: counters of the cubins of a folder, which here are of our own kernels."""

import pytest

from bench.__main__ import main
from bench.gpu import Regime
from bench.kernel_development import marks, peers, sass

REGIME = Regime("bfloat16", 128, 16384, False, backward=True)


@pytest.fixture(scope="module")
def cubin():
    return peers.ours([REGIME])[REGIME.name]


def test_counters_are_per_score(cubin):
    """A thread of a tile of 64 x 128 scores and 256 threads has 32 exponentials."""
    loop = sass.mainloop(cubin).steady
    cells = dict(zip(peers.COLUMNS[1:], peers.counters(cubin), strict=True))
    assert cells["a score"] == f"{len(loop) / 32:.2f}"
    assert cells["exps before waits"].endswith(" of 32")
    assert cells["tensor clocks"] == "2560"
    assert int(cells["alone"]) > int(cells["overlap"]) >= 2560


def test_a_folder_of_cubins_is_a_table(cubin, tmp_path, monkeypatch, capsys):
    (tmp_path / "theirs.cubin").write_bytes(cubin)
    monkeypatch.setattr(marks, "MARKS", {})
    assert main(["sass", str(tmp_path)]) == 0
    assert "theirs" in capsys.readouterr().out


def test_a_folder_without_cubins_is_an_error(tmp_path, capsys):
    assert main(["sass", str(tmp_path)]) == 1
    assert "has no file *.cubin" in capsys.readouterr().err
