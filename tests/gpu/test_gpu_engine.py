"""Every engine on a real GPU: results, their type and device; a graph capture without compile()."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import cupy
import indexer_cases
import numpy as np
import pytest
from cases import DTYPES, Result, check
from engines import (
    HALF,
    HEADS,
    LENGTH,
    assert_right,
    case,
    inputs,
    library_of,
    new_stream,
    on_both_frameworks,
    on_device,
    on_every_engine,
    on_gpu,
    on_host,
    step,
)

import cupy_flash
from cupy_flash.gpu import cuda


@on_both_frameworks
@on_every_engine
def test_results_are_arrays_of_the_callers_library(engine: str, framework: str) -> None:
    arrays = inputs(framework, engine)
    results = step(arrays, engine)
    for result, array in zip(results, arrays, strict=True):
        assert (type(result), result.device, result.dtype) == (type(array), array.device, array.dtype)
    assert_right(results, engine)


@pytest.mark.parametrize("index", range(cupy.cuda.runtime.getDeviceCount()))
@on_both_frameworks
@on_every_engine
def test_runs_on_the_device_of_its_arrays(engine: str, framework: str, index: int) -> None:
    with on_device(index):
        arrays = inputs(framework, engine)
    results = step(arrays, engine)
    assert [x.device for x in results] == [arrays[0].device] * 4
    with cupy.cuda.Device(index):
        assert_right(results, engine)


def fused(library: Any, q: Any, k: Any, v: Any) -> Iterable[Any]:
    """Return q, k, v as slices of one array, the output of a fused projection."""
    together = library.stack([q, k, v], 2)
    return (together[:, :, index] for index in range(3))


def heads_first(library: Any, *arrays: Any) -> Iterable[Any]:
    return (library.stack([x[:, :, head] for head in range(HEADS)], 1).swapaxes(1, 2) for x in arrays)


def one_head(library: Any, *arrays: Any) -> Iterable[Any]:
    """Return the first head of each array, broadcast to all heads with a stride of 0."""
    return (library.broadcast_to(x[:, :, :1], x.shape) for x in arrays)


@pytest.mark.parametrize("view", [fused, heads_first, one_head])
@on_both_frameworks
@on_every_engine
def test_views(engine: str, framework: str, view: Callable[..., Iterable[Any]]) -> None:
    *arrays, dout = inputs(framework, engine)
    arrays = list(view(library_of(framework), *arrays))
    if engine == "wgmma" and view is one_head:  # TMA cannot load repeated heads
        with pytest.raises(cupy_flash.UnsupportedError, match="16 bytes"):
            step([*arrays, dout], engine)
        return
    out, dq, dk, dv = map(on_host, step([*arrays, dout], engine))
    q, k, v = map(on_host, arrays)
    result = Result(out, None, dq, dk, dv, None, None)
    call = case(engine).call()._replace(q=q, k=k, v=v)
    check(case(engine), result, only=("out", "dq", "dk", "dv"), call=call)


@on_both_frameworks
def test_merge(framework: str) -> None:
    whole = replace(case("simt"), causal=False)
    q, k, v, _ = inputs(framework, "simt")
    parts = [
        x
        for keys in (slice(LENGTH // 2), slice(LENGTH // 2, None))
        for x in cupy_flash.attention(q, k[:, keys], v[:, keys], return_lse=True)
    ]
    out, lse = map(on_host, cupy_flash.merge(*parts))
    check(whole, Result(out, lse, *[None] * 5), only=("out", "lse"))


@on_every_engine
def test_capture_without_compile_says_what_to_do(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "_loaded", {})  # unload all kernels
    q, k, v, _ = inputs("cupy", engine)
    cupy.cuda.Device().synchronize()
    stream = new_stream()
    with stream:
        stream.begin_capture()
        try:
            with pytest.raises(RuntimeError, match=r"call cupy_flash.compile\(...\)"):
                cupy_flash.attention(q, k, v, causal=True, engine=engine)
        finally:
            stream.end_capture()


@on_both_frameworks
@pytest.mark.parametrize("dtype", ["float32", HALF])
def test_an_indexer_and_its_loss(dtype: str, framework: str) -> None:
    arrays = indexer_cases.whole_numbers(0, 5, 20, DTYPES[dtype])
    on_card = [on_gpu(framework, x) for x in arrays]
    lists = cupy_flash.select_keys(*on_card, 4, block=2)
    assert (type(lists), lists.device) == (type(on_card[0]), on_card[0].device)
    np.testing.assert_array_equal(on_host(lists), cupy_flash.select_keys(*arrays, 4, block=2))
    arrays = indexer_cases.normal(dtype=DTYPES[dtype], q_len=5)
    loss, gradients = cupy_flash.selection_loss_vjp(*(on_gpu(framework, x) for x in arrays))
    indexer_cases.assert_loss_and_gradients((on_host(loss)[()], [*map(on_host, gradients)]), arrays)


@on_both_frameworks
@pytest.mark.parametrize("rows", [[2, 0, 7], slice(1, None, 2)], ids=str)
def test_weights_of_chosen_rows(rows: Any, framework: str) -> None:
    """Rows without equal steps are a list that is copied to the GPU of the arrays."""
    q, k, *_ = inputs(framework, "simt")
    _, lse = cupy_flash.attention(q, k, k, return_lse=True, causal=True, engine="simt")
    weights = cupy_flash.attention_weights(q, k, lse, rows=rows, heads="mean", causal=True)
    _, keys = cupy_flash.top_weights(q, k, lse, 3, causal=True)
    assert (type(weights), weights.device, keys.device) == (type(q), q.device, q.device)
    on_cpu = [on_host(x) for x in (q, k, lse)]
    expected = cupy_flash.attention_weights(*on_cpu, rows=rows, heads="mean", causal=True)
    np.testing.assert_allclose(on_host(weights), expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(on_host(keys), cupy_flash.top_weights(*on_cpu, 3, causal=True)[1])
    importance = cupy_flash.key_importance(q, k, lse, causal=True)
    np.testing.assert_allclose(on_host(importance), cupy_flash.key_importance(*on_cpu, causal=True), rtol=1e-5)
