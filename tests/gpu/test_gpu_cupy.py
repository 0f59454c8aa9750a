"""CuPy arrays: allocators, memory of other libraries, views, misaligned addresses, compile and explain."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cupy
import numpy as np
import pytest
from cases import Result, check, furthest
from engines import ENGINES, HEAD_DIM, LENGTH, assert_right, case, inputs, new_stream, on_every_engine, step
from tolerance import assert_matches_reference

import cupy_flash
from cupy_flash import device
from cupy_flash.gpu import cuda


def from_python(size: int, device_id: int) -> int:
    """Return an allocation by a Python function, such as the pool of another library uses."""
    return cupy.cuda.runtime.malloc(size)


def free(pointer: int, device_id: int) -> None:
    cupy.cuda.runtime.free(pointer)


ALLOCATORS: dict[str, Callable[[], Any]] = {
    "pool": lambda: cupy.cuda.MemoryPool().malloc,
    "async-pool": lambda: cupy.cuda.MemoryAsyncPool().malloc,
    "async": lambda: cupy.cuda.malloc_async,
    "no-pool": lambda: None,
    "python": lambda: cupy.cuda.PythonFunctionAllocator(from_python, free).malloc,
}


@pytest.mark.orders
@pytest.mark.parametrize("allocator", ALLOCATORS)
def test_allocators_of_cupy(allocator: str) -> None:
    with new_stream(), cupy.cuda.using_allocator(ALLOCATORS[allocator]()):
        assert_right(step(inputs("cupy", "simt"), "simt"), "simt")


@pytest.mark.parametrize("allocator", ALLOCATORS)
def test_allocators_of_cupy_on_the_default_stream(allocator: str) -> None:
    """On a single stream all work is ordered."""
    with cupy.cuda.using_allocator(ALLOCATORS[allocator]()):
        assert_right(step(inputs("cupy", "simt"), "simt"), "simt")


VIEWS: dict[str, Callable[[cupy.ndarray], cupy.ndarray]] = {
    "reversed": lambda x: x[:, ::-1, ::-1],
    "steps": lambda x: x.repeat(2, 1).repeat(3, 2)[:, ::2, ::3],
    "columns": lambda x: x.repeat(2, 3)[..., ::2],
    "fortran": lambda x: x.T.copy().T,
    "repeated": lambda x: cupy.broadcast_to(x[:, :1], x.shape),
    "read-over": lambda x: cupy.lib.stride_tricks.as_strided(x, x.shape, (0, *x.strides[1:])),
}


class Exporter:
    """Device memory of an unknown library, with __cuda_array_interface__; DlpackExporter has DLPack instead."""

    def __init__(self, array: cupy.ndarray, protocol: str) -> None:
        self.array = array
        if protocol == "interface":
            self.__cuda_array_interface__ = array.__cuda_array_interface__


class DlpackExporter(Exporter):
    def __dlpack_device__(self) -> tuple[int, int]:
        return self.array.__dlpack_device__()

    def __dlpack__(self, **keywords: Any) -> Any:
        return self.array.__dlpack__(**keywords)


EXPORTERS = {"interface": Exporter, "dlpack": DlpackExporter}


@pytest.mark.orders
@pytest.mark.parametrize("protocol", EXPORTERS)
def test_exporters_of_device_memory(protocol: str) -> None:
    """Views whose last dimension is not contiguous are copied. Results are CuPy arrays."""
    q, k, v, dout = inputs("cupy", "simt")
    q = VIEWS["fortran"](q)
    given = [EXPORTERS[protocol](x, protocol) for x in (q, k, v, dout)]
    out, vjp = cupy_flash.attention_vjp(*given[:3], causal=True)
    results = [out, *vjp(given[3])[:3]]
    assert {type(x) for x in results} == {cupy.ndarray}
    assert_right(results, "simt")


@pytest.mark.orders
@pytest.mark.parametrize("protocol", [*EXPORTERS, "cupy"])
def test_vjp_keeps_references_or_copies(protocol: str) -> None:
    """Arrays that change before the call of vjp give other gradients, except with copy=True."""
    for copy in (False, True):
        q, k, v, dout = inputs("cupy", "simt")
        given = (q, k, v) if protocol == "cupy" else [EXPORTERS[protocol](x, protocol) for x in (q, k, v)]
        out, vjp = cupy_flash.attention_vjp(*given, causal=True, copy=copy)
        results = [out.copy()]
        for x in (q, k, v, out):
            x *= 0
        results += vjp(dout)[:3]
        if copy:
            assert_right(results, "simt")
        else:
            assert not results[1].any()


@pytest.mark.parametrize("view", VIEWS)
@on_every_engine
def test_views_of_every_kind(engine: str, view: str) -> None:
    """wgmma refuses q, k and v with reversed or repeated rows, which TMA cannot load."""
    q, k, v, dout = (VIEWS[view](x) for x in inputs("cupy", engine))
    if engine == "wgmma" and view in ("reversed", "repeated"):
        with pytest.raises(cupy_flash.UnsupportedError, match="16 bytes"):
            step([q, k, v, dout], engine)
        return
    out, dq, dk, dv = map(cupy.asnumpy, step([q, k, v, dout], engine))
    q, k, v, dout = map(cupy.asnumpy, (q, k, v, dout))
    call = case(engine).call()._replace(q=q, k=k, v=v, dout=dout)
    check(case(engine), Result(out, None, dq, dk, dv, None, None), only=("out", "dq", "dk", "dv"), call=call)


def moved(x: cupy.ndarray, elements: int) -> cupy.ndarray:
    """Return a copy that starts this many elements after an address which is a multiple of 256 bytes."""
    memory = cupy.empty(x.size + elements, x.dtype)
    assert memory.data.ptr % 256 == 0
    copy = memory[elements:].reshape(x.shape)
    copy.view(cupy.uint8)[...] = x.view(cupy.uint8)
    return copy


@pytest.mark.parametrize("elements", [1, 2, 4])
@on_every_engine
def test_addresses_that_are_multiples_of_an_element_only(engine: str, elements: int) -> None:
    """Arrays start a few elements after an aligned address: wgmma refuses such a q, and copies such a dout."""
    arrays = inputs("cupy", engine)
    q, *others = arrays
    if engine == "wgmma":
        with pytest.raises(cupy_flash.UnsupportedError, match="16 bytes"):
            step([moved(q, elements), *others], engine)
        assert_right(step([*arrays[:3], moved(arrays[3], elements)], engine), engine)
    else:
        assert_right(step([moved(q, elements), *(moved(x, 1) for x in others)], engine), engine)


def test_an_address_inside_an_element_is_refused() -> None:
    """A kernel that read such an address would corrupt the CUDA context of the process."""
    bytes_ = cupy.zeros(1 + 4 * 64, cupy.uint8)
    inside = cupy.ndarray((1, 4, 1, 16), np.float32, bytes_.data + 1)
    aligned = cupy.zeros((1, 4, 1, 16), np.float32)
    with pytest.raises(ValueError, match=r"k \(cupy\.ndarray\): its memory starts at 0x\w+, .* 4 bytes"):
        cupy_flash.attention(aligned, inside, aligned)


def relative(table: Any, documents: Any) -> dict[str, Any]:
    """Return a score_mod with a bias by distance, and a mask_mod of documents; both capture arrays."""

    def score_mod(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return s + table[(q - k) % 16]

    def mask_mod(b: Any, h: Any, q: Any, k: Any) -> Any:
        return (q >= k) & (documents[q] == documents[k])

    return dict(score_mod=score_mod, mask_mod=mask_mod)


def per_head(table: Any, documents: Any) -> dict[str, Any]:
    return dict(score_mod=lambda s, b, h, q, k: s * table[h])


def mod_results(q: Any, k: Any, v: Any, dout: Any, **mods: Any) -> list[Any]:
    out, vjp = cupy_flash.attention_vjp(q, k, v, **mods)
    gradients = vjp(dout)
    return [out, *gradients[:3], *gradients.dcaptured]


def low_precision(arrays: tuple[np.ndarray, ...], exact: list[Any], **mods: Any) -> list[Any]:
    """Return mod_results in fp32: the least accurate of several orders of the head dimensions, as in
    cases.compute_references.
    """
    q, k, v, dout = arrays
    worst = exact
    for order in range(8):
        inner, outer = np.random.default_rng(order).permuted(np.tile(np.arange(HEAD_DIM), (2, 1)), axis=1)
        results = mod_results(q[..., inner], k[..., inner], v[..., outer], dout[..., outer], **mods)
        places = [np.argsort(x) for x in (outer, inner, inner, outer)]
        results[:4] = [x[..., place] for x, place in zip(results[:4], places, strict=True)]
        worst = [furthest(*three) for three in zip(exact, worst, results, strict=True)]
    return worst


def test_mods_with_captured_arrays_one_after_the_other() -> None:
    """The kernels of two mods have equal constants, and differ in the generated code."""
    call = case("simt").call()
    arrays = call.q, call.k, call.v, call.dout
    table, documents = np.linspace(-1, 1, 16, dtype=np.float32), np.arange(LENGTH, dtype=np.int32) // 3
    on_card = [cupy.asarray(x) for x in (*arrays, table, documents)]
    for mods in (relative, per_head, relative):
        actual = mod_results(*on_card[:4], **mods(*on_card[4:]))
        wide = (x.astype(np.float64) for x in (*arrays, table))
        *given, wide_table = wide
        exact = mod_results(*given, **mods(wide_table, documents))
        low = low_precision(arrays, exact, **mods(table, documents))
        for name, *three in zip(("out", "dq", "dk", "dv", "dtable", "ddocuments"), actual, exact, low, strict=False):
            if three[0] is not None:
                assert_matches_reference(cupy.asnumpy(three[0]), *three[1:], np.dtype(np.float32), name)


def test_a_block_mask_is_computed_where_its_arrays_are() -> None:
    q, k, v, _ = inputs("cupy", "simt")
    segments = cupy.asarray(np.arange(LENGTH) * 5 // LENGTH * 3 % 5 % 3)
    mask_mod = cupy_flash.block_mask(
        lambda b, h, q_idx, kv_idx: segments[q_idx] == segments[kv_idx], q_len=LENGTH, kv_len=LENGTH, block=16
    )
    assert all(isinstance(array, cupy.ndarray) for array in cupy_flash.Mod(mask_mod=mask_mod).arrays)
    expected = cupy_flash.attention(q, k, v, mask=segments[:, None] == segments)
    np.testing.assert_array_equal(
        cupy.asnumpy(cupy_flash.attention(q, k, v, mask_mod=mask_mod)), cupy.asnumpy(expected)
    )


def test_explain_names_the_card_and_runs_nothing() -> None:
    q, k, v, _ = inputs("cupy", "simt")
    text = cupy_flash.explain(q, k, v, causal=True)
    assert "cupy on cuda:0" in text and device.gpu(0).arch in text
    with pytest.raises(cupy_flash.UnsupportedError, match="arrays never change device"):
        cupy_flash.explain(q, k, v, backend="cpu")


@on_every_engine
def test_after_compile_no_kernel_is_loaded(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "_loaded", {})
    cupy_flash.compile(dtype=ENGINES[engine], head_dim=HEAD_DIM, causal=True, engine=engine)
    loaded = dict(cuda._loaded)
    step(inputs("cupy", engine), engine)
    q, k, v, _ = (x[:, : LENGTH // 2] for x in inputs("cupy", engine))
    cupy_flash.attention(q, k, v, causal=True, engine=engine)
    assert cuda._loaded == loaded
