"""`bench overhead` measures whole calls on NumPy and torch arrays, with and without autograd, without launching
kernels.
"""

import pytest

from bench import overhead
from cupy_flash import dispatch


def test_calls_do_everything_but_launch(monkeypatch):
    """Every call encodes the tensor maps of its launches, and the backends are restored afterwards."""
    maps = []
    encode = overhead.tensor_map.encode_for_simulator
    monkeypatch.setattr(overhead.tensor_map, "encode_for_simulator", lambda box: maps.append(box) or encode(box))
    for constant in ("CALLS", "ROUNDS", "LENGTH_ROUNDS"):
        monkeypatch.setattr(overhead, constant, 2)
    monkeypatch.setattr(overhead, "_buffers", {})
    before = dict(dispatch.LAUNCHERS)
    section = overhead.measure(("numpy", "torch"))
    assert before == dispatch.LAUNCHERS
    rows = ["numpy", "numpy, score_mod", "torch", "torch, autograd", "torch, score_mod", "torch, decode step"]
    assert list(section["calls"]) == rows
    assert all(seconds > 0 for rows in section.values() for row in rows.values() for seconds in row.values())
    # at least 3 arrays (q, k, v) x 3 kinds of calls x 4 calls (CALLS * ROUNDS) with new addresses or lengths
    assert len({(box.address, box.shape) for box in maps}) >= 3 * 3 * 4
    calls, steps = overhead.tables(section)
    assert [row[0] for row in calls.rows] == list(section["calls"]) and len(steps.rows) == 2


def test_backends_are_restored_after_an_error():
    with pytest.raises(ValueError, match="stop"), overhead._without_launches():
        assert dispatch.LAUNCHERS["cuda"] == overhead.__name__
        raise ValueError("stop")
    assert dispatch.LAUNCHERS["cuda"] == ".gpu.cuda"
