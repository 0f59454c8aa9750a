"""Keyed plans on CuPy's arrays: what a served call costs, and the parts of a key that need a GPU."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import cupy
import numpy as np
import pytest

import cupy_flash
from cupy_flash import keyed_plan

PACKAGE = str(Path(cupy_flash.__file__).parent)


@pytest.fixture(autouse=True)
def no_entries() -> None:
    keyed_plan.forget()


def arrays(seed: int, *shape: int) -> Any:
    return cupy.asarray(np.random.default_rng(seed).normal(size=(3, *(shape or (1, 20, 2, 16)))).astype(np.float32))


def attention(inputs: Any, **options: Any) -> Any:
    return cupy_flash.attention(*inputs, **{"engine": "simt"} | options)


def served() -> int:
    return sum(entry.served for entry in keyed_plan._entries.values() if entry is not None)


def test_a_served_call_makes_few_calls_in_python() -> None:
    """Calls of the package, and those that it makes of built-in functions."""
    inputs = arrays(0)
    for _ in range(2):
        attention(inputs, causal=True)
    calls: list[str] = []

    def count(frame: Any, event: str, argument: Any) -> None:
        if event in ("call", "c_call") and frame.f_code.co_filename.startswith(PACKAGE):
            calls.append(frame.f_code.co_qualname if event == "call" else argument.__qualname__)

    sys.setprofile(count)
    attention(inputs, causal=True)
    sys.setprofile(None)
    assert served() == 2 and 20 < len(calls) <= 60, calls


def test_steps_of_a_decode_are_served() -> None:
    """Each appends a row to a paged cache; lengths are on the GPU, or a number that is another at each step."""
    random = np.random.default_rng(0)
    pages = cupy.asarray(random.permutation(8).reshape(2, 4).astype(np.int32))
    for number in (False, True):
        caches = cupy.zeros((2, 8, 8, 2, 16), np.float32)
        on_host = caches.get()
        for step in range(4):
            q, k, v = (random.normal(size=(2, 1, heads, 16)).astype(np.float32) for heads in (4, 2, 2))
            lengths = np.full(2, 3 + step, np.int32)
            expected = cupy_flash.attention_with_kv_cache(
                q, *on_host, k=k, v=v, cache_seqlens=lengths, block_table=pages.get()
            )
            q, k, v = map(cupy.asarray, (q, k, v))
            seqlens: Any = 3 + step if number else cupy.asarray(lengths)
            out = cupy_flash.attention_with_kv_cache(q, *caches, k=k, v=v, cache_seqlens=seqlens, block_table=pages)
            np.testing.assert_allclose(out.get(), expected, atol=1e-5)
            np.testing.assert_array_equal(caches.get(), on_host)
    assert served() == 6


def test_appends_are_served() -> None:
    """Each writes a row to a cache; lengths are on the GPU, or a number that is another at each step."""
    for number in (False, True):
        caches = cupy.zeros((2, 2, 8, 2, 16), np.float32)
        on_host = caches.get()
        for step in range(3):
            k, v = np.random.default_rng(step).normal(size=(2, 2, 1, 2, 16)).astype(np.float32)
            on_host[:, :, 3 + step] = k[:, 0], v[:, 0]
            seqlens: Any = 3 + step if number else cupy.full(2, 3 + step, np.int32)
            cupy_flash.append_to_kv_cache(cupy.asarray(k), cupy.asarray(v), *caches, cache_seqlens=seqlens)
            np.testing.assert_array_equal(caches.get(), on_host)
    assert served() == 4


def test_a_changed_component_of_an_append_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever it is, the rows reach the caches; what is kept wrote to others."""
    rows, caches = np.random.default_rng(0).normal(size=(2, 2, 1, 2, 16)), np.zeros((2, 2, 9, 2, 16))

    def append(rows: Any, caches: Any, **options: Any) -> None:
        cupy_flash.append_to_kv_cache(*rows, *caches, **{"cache_seqlens": 3} | options)

    def on_gpu(x: Any) -> Any:
        return cupy.asarray(x.astype(np.float32))

    memory = cupy.zeros(caches.size + 1, np.float32)
    changed = {
        "shape": (on_gpu(rows), on_gpu(caches)[:, :, :8]),
        "strides": (on_gpu(rows), on_gpu(np.zeros((2, 2, 9, 2, 20)))[..., :16]),
        "alignment": (on_gpu(rows), memory[1:].reshape(caches.shape)),
    }
    append(on_gpu(rows), on_gpu(caches))
    for component, (x, y) in changed.items():
        before = served()
        append(x, y)
        assert served() == before, component
        np.testing.assert_array_equal(y[:, :, 3].get(), x[:, :, 0].get())
        assert int((y != 0).sum()) == x.size
    append(on_gpu(rows), on_gpu(caches))
    assert served() == 1
    with pytest.raises(TypeError, match="int32"):
        append(on_gpu(rows), on_gpu(caches).view(np.int32))
    monkeypatch.setenv("CUPY_FLASH_BACKEND", "simulator")
    with pytest.raises(cupy_flash.UnsupportedError):
        append(on_gpu(rows), on_gpu(caches))


def test_results_are_those_of_the_arrays_of_the_call() -> None:
    for seed in range(3):
        inputs = arrays(seed)
        expected = cupy_flash.attention(*inputs.get(), causal=True, engine="cpu")  # aten keeps plans of its own
        np.testing.assert_allclose(attention(inputs, causal=True).get(), expected, atol=1e-5)
        assert served() == seed


def test_results_are_those_of_the_arrays_that_a_mod_captures() -> None:
    """They are other arrays at each call; a number is another one at every second call."""
    inputs = arrays(0)
    for seed in range(4):
        table, factor = np.random.default_rng(seed).normal(size=(2, 40)).astype(np.float32), 0.3 * (seed // 2) + 0.1

        def mods(table: Any, factor: float = factor) -> dict[str, Any]:
            return {
                "score_mod": lambda score, b, h, i, j: score * factor + table[h, i - j + 20],
                "mask_mod": lambda b, h, i, j: table[h, i] < table[h, j] + 1,
            }

        expected = cupy_flash.attention(*inputs.get(), engine="cpu", **mods(table))
        out = attention(inputs, **mods(cupy.asarray(table)))
        np.testing.assert_allclose(out.get(), expected, atol=1e-5)
    assert served() >= 1  # the number is a constant in the first trace alone


def test_another_device_is_another_key() -> None:
    if cupy.cuda.runtime.getDeviceCount() > 1:
        attention(arrays(0))
        with cupy.cuda.Device(1):
            inputs = arrays(1)
        out = attention(inputs)
        assert out.device.id == 1 and served() == 0 and cupy.cuda.runtime.getDevice() == 0
        np.testing.assert_allclose(attention(inputs).get(), out.get())
        assert served() == 1


def test_the_environment_is_part_of_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(2):
        attention(arrays(0))
    monkeypatch.setenv("CUPY_FLASH_BACKEND", "simulator")
    with pytest.raises(cupy_flash.UnsupportedError):
        attention(arrays(0))
    monkeypatch.delenv("CUPY_FLASH_BACKEND")
    attention(arrays(0))
    assert served() == 2


def test_lengths_on_a_gpu_may_change() -> None:
    inputs, lengths = arrays(0), cupy.asarray([20], cupy.int32)
    for length in (20, 7, 12):
        lengths[0] = length
        expected = cupy_flash.attention(inputs[0].get(), *inputs[1:, :, :length].get())
        np.testing.assert_allclose(attention(inputs, kv_lengths=lengths).get(), expected, atol=1e-5)
    assert served() == 2


def test_max_seqlen_is_part_of_the_key() -> None:
    """Rows past the blocks of an older, smaller max_seqlen would not be written."""
    inputs = arrays(0, 100, 2, 16)
    for longest in (20, 100, 100):
        bounds = cupy.asarray([0, longest], cupy.int32)
        out = cupy_flash.attention_varlen(*inputs, bounds, bounds, longest, longest, engine="simt")
    expected = cupy_flash.attention(*inputs.get()[:, None])[0]
    np.testing.assert_allclose(out.get(), expected, atol=1e-5)
    assert served() == 1


def test_the_stream_is_that_of_the_call() -> None:
    inputs = arrays(0)
    for _ in range(2):
        attention(inputs)
    (entry,) = keyed_plan._entries.values()
    assert entry is not None
    table, (function,) = entry._kept.loaded
    streams: list[int] = []

    def launch(*arguments: Any, **options: Any) -> None:
        streams.append(options["stream"].ptr)
        function(*arguments, **options)

    entry._kept.loaded = table, [launch]
    attention(inputs)
    with cupy.cuda.Stream() as stream:
        attention(inputs)
        stream.synchronize()
    assert streams == [0, stream.ptr]


def test_kernels_that_were_unloaded_are_loaded_again(monkeypatch: pytest.MonkeyPatch) -> None:
    from cupy_flash.gpu import cuda

    inputs = arrays(0)
    for _ in range(2):
        out = attention(inputs)
    monkeypatch.setattr(cuda, "_loaded", {})
    np.testing.assert_array_equal(attention(inputs).get(), out.get())
    assert len(cuda._loaded) == 1 and served() == 2


def test_an_array_of_a_subclass_poses() -> None:
    class Mine(cupy.ndarray):
        """A subclass."""

    inputs = arrays(0)
    for _ in range(2):
        attention(inputs)
    attention([inputs[0], inputs[1].view(Mine), inputs[2]])
    assert served() == 1
