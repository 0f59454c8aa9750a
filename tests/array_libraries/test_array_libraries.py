"""Arrays of every installed library give the bits of NumPy's, and results of the caller's type, dtype and values.

The report of pytest names the libraries that are not installed.
"""

import gc

import array_libraries
import numpy as np
import pytest

import cupy_flash
from cupy_flash.arrays import as_array, named_dtype

B, SQ, SK, HQ, HK, D = 2, 5, 7, 4, 2, 8


@pytest.fixture(params=array_libraries.INSTALLED)
def library(request):
    return array_libraries.LIBRARIES[request.param]


def by_dtype():
    return pytest.mark.parametrize(
        ("library", "dtype"),
        [
            pytest.param(array_libraries.LIBRARIES[name], dtype, id=f"{name}-{dtype}")
            for name in array_libraries.INSTALLED
            for dtype in array_libraries.LIBRARIES[name].dtypes
        ],
    )


def values(*shape, dtype="float32", seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(named_dtype(dtype))


def inputs(dtype="float32"):
    shapes = ((B, SQ, HQ, D), (B, SK, HK, D), (B, SK, HK, D))
    return [values(*shape, dtype=dtype, seed=seed) for seed, shape in enumerate(shapes)]


def numpy_of(x):
    return as_array(x, "x").numpy()


def assert_same(actual, expected, like):
    """Assert that `actual` has the library of `like`, and shape, dtype and bits of the NumPy array `expected`."""
    assert type(actual) is type(like)
    array = as_array(actual, "x")
    assert (array.shape, array.dtype) == (expected.shape, expected.dtype)
    np.testing.assert_array_equal(array.numpy(), expected)


@by_dtype()
def test_results_and_gradients(library, dtype):
    arrays = inputs(dtype)
    dout, dlse = values(B, SQ, HQ, D, dtype=dtype, seed=3), values(B, HQ, SQ, seed=4)
    dlse = dlse.astype("float64" if dtype == "float64" else "float32")
    bias, sink = values(HQ, SQ, SK, seed=5), values(HQ, seed=6)
    options = dict(causal=True, softcap=3.0, window=(4, 0), return_lse=True)
    (out, lse), vjp = cupy_flash.attention_vjp(*arrays, bias=bias, sink=sink, **options)
    expected = (out, lse, *vjp(dout, dlse)[:5])

    made = [library.make(x) for x in arrays]
    bias, sink, dout, dlse = map(library.make, (bias, sink, dout, dlse))
    (out, lse), vjp = cupy_flash.attention_vjp(*made, bias=bias, sink=sink, **options)
    for actual, array in zip((out, lse, *vjp(dout, dlse)[:5]), expected, strict=True):
        assert_same(actual, array, made[0])
    saved = cupy_flash.attention(*made, bias=bias, sink=sink, **options)
    gradients = cupy_flash.attention_backward(dout, *made, *saved, dlse=dlse, bias=bias, sink=sink, **options)
    for actual, array in zip((*saved, *gradients[:5]), expected, strict=True):
        assert_same(actual, array, made[0])
    for x, array in zip(made, arrays, strict=True):
        assert_same(x, array, made[0])  # inputs are not written


def test_strides(library):
    """Arrays that are views, with the strides of (B, H, S, D), are read as they are."""
    arrays = inputs()
    made = [library.transposed(library.make(np.ascontiguousarray(x.swapaxes(1, 2)))) for x in arrays]
    expected = cupy_flash.attention(*arrays, causal=True)
    assert_same(cupy_flash.attention(*made, causal=True), expected, made[0])
    in_bhsd = [library.transposed(x) for x in made]
    assert_same(cupy_flash.attention(*in_bhsd, causal=True, layout="bhsd"), expected.swapaxes(1, 2), made[0])


def test_results_keep_their_memory(library):
    expected = cupy_flash.attention(*inputs())
    out = cupy_flash.attention(*map(library.make, inputs()))
    gc.collect()
    for seed in range(20):  # would reuse the memory of the result if it were free
        cupy_flash.attention(*[library.make(values(*x.shape, seed=seed)) for x in inputs()])
    assert_same(out, expected, out)


def test_empty_results(library):
    q, k, v = inputs()
    out = cupy_flash.attention(*map(library.make, (q[:, :0], k, v)))
    assert_same(out, np.empty((B, 0, HQ, D), np.float32), library.make(q))


@pytest.mark.parametrize("bounds", ["library", "numpy"])
def test_varlen(library, bounds):
    q, k, v = (x.reshape(-1, *x.shape[2:]) for x in inputs())
    cu_q, cu_k = np.array([0, 3, 3, 10], np.int32), np.array([0, 6, 10, 14], np.int32)
    expected = cupy_flash.attention_varlen(q, k, v, cu_q, cu_k, 7, 6, causal=True, return_lse=True)
    made = [library.make(x) for x in (q, k, v)]
    lengths = [library.make(x) if bounds == "library" else x for x in (cu_q, cu_k)]
    results = cupy_flash.attention_varlen(*made, *lengths, 7, 6, causal=True, return_lse=True)
    for actual, array in zip(results, expected, strict=True):
        assert_same(actual, array, made[0])


def test_masks_and_lengths(library):
    arrays = inputs()
    options = dict(
        mask=np.random.default_rng(5).random((B, 1, SQ, SK)) < 0.7,
        kv_lengths=np.array([7, 3], np.int32),
        q_lengths=np.array([2, 5], np.int32),
        alibi_slopes=values(HQ),
    )
    expected = cupy_flash.attention(*arrays, **options)
    options = {name: library.make(x) for name, x in options.items()}
    made = [library.make(x) for x in arrays]
    assert_same(cupy_flash.attention(*made, **options), expected, made[0])


def test_captured_arrays_and_their_gradients(library):
    arrays, dout = inputs(), values(B, SQ, HQ, D, seed=3)
    table, document = values(HQ, SQ + SK), np.arange(SK, dtype=np.int32) // 3

    def mods(table, document):
        return dict(
            score_mod=lambda s, b, h, q_idx, kv_idx: s + table[h, q_idx - kv_idx + SK],
            mask_mod=lambda b, h, q_idx, kv_idx: document[q_idx] >= document[kv_idx],
        )

    out, vjp = cupy_flash.attention_vjp(*arrays, **mods(table, document))
    expected = out, vjp(dout).dcaptured[0]
    made = [library.make(x) for x in arrays]
    out, vjp = cupy_flash.attention_vjp(*made, **mods(library.make(table), library.make(document)))
    gradients = vjp(library.make(dout)).dcaptured
    assert_same(out, expected[0], made[0])
    assert_same(gradients[0], expected[1], made[0])
    assert gradients[1] is None


def test_a_captured_scalar_has_a_gradient(library):
    arrays, dout = inputs(), values(B, SQ, HQ, D, seed=3)
    factor = np.array([0.5], np.float32) if library.least_dimensions else np.array(0.5, np.float32)

    def score_mod(factor):
        return lambda s, b, h, i, j: s * (factor[0] if library.least_dimensions else factor)

    _, vjp = cupy_flash.attention_vjp(*arrays, score_mod=score_mod(factor))
    expected = vjp(dout).dcaptured[0]
    made = [library.make(x) for x in arrays]
    _, vjp = cupy_flash.attention_vjp(*made, score_mod=score_mod(library.make(factor)))
    assert_same(vjp(library.make(dout)).dcaptured[0], expected, made[0])


def test_copies_have_gradients_of_the_callers_type(library):
    arrays, dout = inputs(), values(B, SQ, HQ, D, seed=3)
    expected = cupy_flash.attention_vjp(*arrays)[1](dout)
    made = [library.make(x) for x in arrays]
    _, vjp = cupy_flash.attention_vjp(*made, copy=True)
    if not library.immutable:
        for x in made:
            numpy_of(x)[...] = 1
    for actual, array in zip(vjp(library.make(dout))[:3], expected[:3], strict=True):
        assert_same(actual, array, made[0])


def cache_arrays():
    q, k, v = values(B, 1, HQ, D), values(B, 1, HK, D, seed=1), values(B, 1, HK, D, seed=2)
    return q, k, v, values(B, 16, HK, D, seed=3), values(B, 16, HK, D, seed=4), np.array([5, 9], np.int32)


def test_a_cache_is_read(library):
    q, _, _, k_cache, v_cache, lengths = cache_arrays()
    expected = cupy_flash.attention_with_kv_cache(q, k_cache, v_cache, cache_seqlens=lengths)
    q, k_cache, v_cache, lengths = map(library.make, (q, k_cache, v_cache, lengths))
    for cache_seqlens in (lengths, numpy_of(lengths)):
        out = cupy_flash.attention_with_kv_cache(q, k_cache, v_cache, cache_seqlens=cache_seqlens)
        assert_same(out, expected, q)


def test_a_write_is_refused_or_made(library):
    _, k, v, k_cache, v_cache, lengths = cache_arrays()
    made = [library.make(x) for x in (k, v, k_cache, v_cache)]
    if library.immutable:
        refused = f"{library.package} arrays are immutable, and nothing can be appended to them in place"
        with pytest.raises(cupy_flash.UnsupportedError, match=refused):
            cupy_flash.append_to_kv_cache(*made, cache_seqlens=library.make(lengths))
    else:
        cupy_flash.append_to_kv_cache(*made, cache_seqlens=library.make(lengths))
        cupy_flash.append_to_kv_cache(k, v, k_cache, v_cache, cache_seqlens=lengths)
    for actual, array in zip(made, (k, v, k_cache, v_cache), strict=True):
        assert_same(actual, array, made[0])


def test_errors_name_the_library(library):
    q, k, v = map(library.make, inputs())
    name = library.package if library.package in ("mlx", "paddle", "tensorflow", "warp") else "dlpack"
    described = rf"q +float32 \(2, 5, 4, 4\) \({name} on cpu\)"
    with pytest.raises(ValueError, match=r"one head dimension(.|\n)*" + described):
        cupy_flash.attention(library.make(inputs()[0][..., :4].copy()), k, v)
    integers = library.make(np.ones((B, SQ, HQ, D), np.int32))
    with pytest.raises(TypeError, match="q, k and v must be float16, bfloat16, float32, float64 .*, not int32"):
        cupy_flash.attention(integers, k, v)
    with pytest.raises(TypeError, match=f"all arrays must be of one type, not .*{name}"):
        cupy_flash.attention(q, OfAnotherLibrary(inputs()[1]), v)


class OfAnotherLibrary:
    """An array whose type claims to be of a library that differs from all that are tested."""

    __module__ = "jaxlib"

    def __init__(self, x):
        self._x = x

    def __dlpack_device__(self):
        return (1, 0)

    def __dlpack__(self, **options):
        return self._x.__dlpack__(**options)


def test_mixed_with_numpy(library):
    """Arrays of NumPy may stand beside those of a library; results have the type of q."""
    q, k, v = inputs()
    expected = cupy_flash.attention(q, k, v)
    assert_same(cupy_flash.attention(library.make(q), k, v), expected, library.make(q))
    assert_same(cupy_flash.attention(q, library.make(k), v), expected, q)
