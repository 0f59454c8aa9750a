"""`bench overhead`: whole calls on NumPy and torch arrays, with and without autograd, that launch nothing."""

import pytest

from bench import overhead
from cupy_flash import backends


def test_calls_end_before_their_launches(monkeypatch):
    """Every call reaches the tensor maps of its launches, and the backends are themselves again afterwards."""
    maps = []
    encode = overhead.tensor_map.encode_for_simulator
    monkeypatch.setattr(overhead.tensor_map, "encode_for_simulator", lambda box: maps.append(box) or encode(box))
    for constant in ("CALLS", "ROUNDS", "LENGTH_ROUNDS"):
        monkeypatch.setattr(overhead, constant, 2)
    monkeypatch.setattr(overhead, "_buffers", {})
    before = dict(backends.MODULES)
    section = overhead.measure(("numpy", "torch"))
    assert before == backends.MODULES
    assert list(section["calls"]) == ["numpy", "torch", "torch, autograd"]
    assert all(seconds > 0 for rows in section.values() for row in rows.values() for seconds in row.values())
    assert len({(box.address, box.shape) for box in maps}) >= 3 * 3 * 4  # q, k and v of new pointers, of three rows
    calls, steps = overhead.tables(section)
    assert [row[0] for row in calls.rows] == list(section["calls"]) and len(steps.rows) == 2


def test_backends_are_restored_after_an_error():
    with pytest.raises(ValueError, match="stop"), overhead._without_launches():
        assert backends.MODULES["cuda"] == overhead.__name__
        raise ValueError("stop")
    assert backends.MODULES["cuda"] == ".cuda"
