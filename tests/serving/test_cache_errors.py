"""Invalid calls on a KV cache raise one error with every reason; array contents are checked in host memory only."""

import re

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from cache_cases import CacheCase
from producers import Producer

import cupy_flash
from cupy_flash import UnsupportedError, array_libraries
from cupy_flash.problem.build import pose_with_cache
from cupy_flash.problem.records import CacheOptions

PAGED, PLAIN = dict(page=8, appended=2, q_len=2), dict(appended=2, q_len=2)


def failure(error, call, **options):
    arguments = {**call.options, **options}
    arrays = [arguments.pop(name, x) for name, x in zip(("q", "k_cache", "v_cache"), call[:3], strict=True)]
    with pytest.raises(error) as raised:
        cupy_flash.attention_with_kv_cache(*arrays, **arguments)
    assert type(raised.value) is error
    return str(raised.value)


def changed(array, at, value):
    other = array.copy()
    other[at] = value
    return other


# (fields of the case, function from the call to its changes, error, part of the message)
WRONG = {
    "k-alone": (PLAIN, lambda c: dict(v=None), ValueError, "k and v are appended together"),
    "v-alone": (PLAIN, lambda c: dict(k=None), ValueError, "k and v are appended together"),
    "no-lengths": (PLAIN, lambda c: dict(cache_seqlens=None), ValueError, "cache_seqlens or slots must say where"),
    "slots-without-k": ({}, lambda c: dict(slots=np.zeros(2, np.int64)), ValueError, "k and v go, which are not given"),
    "dtype-k": (PLAIN, lambda c: dict(k=c.options["k"].astype("f8")), TypeError, "k must have the dtype of q, float32"),
    "dtype-cache": (PLAIN, lambda c: dict(k_cache=c.k_cache.astype("f2"), v_cache=c.v_cache.astype("f2")), TypeError,
                    "the caches must be float32, or float8_e4m3fn beside 16-bit q, not float16"),
    "dtype-caches": (PLAIN, lambda c: dict(k_cache=c.k_cache.astype("f2")), TypeError, "must have one dtype"),
    "dtype-q": ({}, lambda c: dict(q=c.q.astype("i4")), TypeError, "q must be float16, bfloat16, float32, float64"),
    "fp8-q32": ({}, lambda c: {n: getattr(c, n).astype(ml_dtypes.float8_e4m3fn) for n in ("k_cache", "v_cache")},
                TypeError, "beside 16-bit q"),
    "descales": (PLAIN, lambda c: dict(k_descale=np.ones((2, 2), "f4")), TypeError, "is for caches of float8"),
    "read-only": (PLAIN, lambda c: dict(k_cache=np.broadcast_to(c.k_cache, c.k_cache.shape)), ValueError,
                  "k_cache is read-only"),
    "repeated-rows": (PLAIN, lambda c: dict(v_cache=np.lib.stride_tricks.as_strided(
        c.v_cache, strides=(0, *c.v_cache.strides[1:]))), ValueError, "v_cache repeats its elements"),
    "repeated-out": ({}, lambda c: dict(out=np.lib.stride_tricks.as_strided(
        np.zeros_like(c.q), strides=(0, *c.q.strides[1:]))), ValueError, "out repeats its elements"),
    "not-contiguous": ({}, lambda c: dict(v_cache=np.repeat(c.v_cache, 2, axis=3)[..., ::2]), ValueError,
                       "the last dimension of v_cache must be contiguous"),
    "heads": ({}, lambda c: dict(q=c.q[:, :, :3]), ValueError, "the 3 heads of q must be a multiple of the 2 heads"),
    "head-dim": ({}, lambda c: dict(q=c.q[..., :8]), ValueError, "one head dimension, not 8, 16"),
    "caches": ({}, lambda c: dict(v_cache=c.v_cache[:, :-1]), ValueError, "must agree in all but the last dimension"),
    "rank-q": ({}, lambda c: dict(q=c.q[0]), ValueError, r"q must be \(B, Sq, Hq, D\), not \(1, 4, 16\)"),
    "rank-cache": ({}, lambda c: dict(k_cache=c.k_cache[0]), ValueError, r"k_cache must be \(B, S, Hk, D\)"),
    "batch": ({}, lambda c: dict(k_cache=c.k_cache[:1], v_cache=c.v_cache[:1]), ValueError, "the caches have 1 rows"),
    "table-rows": (PAGED, lambda c: dict(block_table=c.options["block_table"][:1]), ValueError,
                   r"block_table must be \(2, pages\), not \(1, 5\)"),
    "lengths": ({}, lambda c: dict(cache_seqlens=np.zeros(3, "i4")), ValueError, r"cache_seqlens must be \(2,\)"),
    "rows-of-v": (PLAIN, lambda c: dict(v=c.options["v"][:, :1]), ValueError, r"v must be .* = \(2, 2, 2, 16\)"),
    "mask-rows": ({}, lambda c: dict(mask=np.ones((2, 1, 3, 4), "?")), ValueError, "mask must be .* capacity"),
    "mask-dtype": ({}, lambda c: dict(mask=np.ones((2, 1, 1, 4), "i1")), TypeError, "mask must be bool, True = attend"),
    "mask-long": ({}, lambda c: dict(mask=np.ones((2, 1, 1, 41), "?")), ValueError, "up to the capacity 40"),
    "positions": (PLAIN | dict(rotary=(8, True)), lambda c: dict(positions=np.zeros((2, 3), "i4")), ValueError,
                  r"positions must be \(2, 2\)"),
    "positions-alone": ({}, lambda c: dict(positions=np.zeros((2, 3), "i4")), ValueError,
                        r"positions must be \(2, 1\), not \(2, 3\)"),
    "cos-alone": ({}, lambda c: dict(rotary_cos=np.ones((50, 4), "f4")), ValueError, "given together or not at all"),
    "cos-wide": ({}, lambda c: dict.fromkeys(("rotary_cos", "rotary_sin"), np.ones((50, 9), "f4")), ValueError,
                 "with rd up to D = 16"),
    "int64-lengths": ({}, lambda c: dict(cache_seqlens=np.zeros(2, "i8")), TypeError, r'pass .*.astype\("int32"\)'),
    "int64-table": (PAGED, lambda c: dict(block_table=c.options["block_table"].astype("i8")), TypeError, "int32"),
    "int32-slots": (PLAIN, lambda c: dict(slots=np.zeros(4, "i4"), cache_seqlens=None), TypeError, "must be int64"),
    "lengths-float": ({}, lambda c: dict(cache_seqlens=3.0), TypeError, "cache_seqlens"),
    "lengths-time": ({}, lambda c: dict(cache_seqlens=np.timedelta64(3)), TypeError, "cache_seqlens"),
    "lengths-bool": ({}, lambda c: dict(cache_seqlens=True), TypeError, "cache_seqlens"),
    "batch-idx-paged": (PAGED, lambda c: dict(cache_batch_idx=np.zeros(2, "i4")), ValueError, "without block_table"),
    "slots-batch-idx": (PLAIN, lambda c: dict(slots=np.arange(4), cache_batch_idx=np.array([0, 1], "i4")), ValueError,
                        "slots and cache_batch_idx do not go together"),
    "split-size": ({}, lambda c: dict(split_size=100), ValueError, "a positive multiple of 64, not 100"),
    "split-size-0": ({}, lambda c: dict(split_size=0), ValueError, "a positive multiple of 64, not 0"),
    "split-size-large": ({}, lambda c: dict(split_size=2**31), ValueError, "at most 2147483647, not 2147483648"),
    "split-size-float": ({}, lambda c: dict(split_size=64.0), TypeError, "split_size must be None or a whole number"),
    "length-past-int64": (PLAIN, lambda c: dict(cache_seqlens=10**30), ValueError, "cache_seqlens must be int32"),
    "interleaved": (PLAIN | dict(rotary=(8, True)), lambda c: dict(rotary_interleaved=np.zeros(2)), TypeError,
                    "rotary_interleaved must be True or False"),
    "descale-of-text": ({}, lambda c: dict(k_descale=np.full((2, 2), "a")), TypeError, "k_descale must be float32"),
    "top-left": ({}, lambda c: dict(causal="top_left"), TypeError, "causal must be True or False"),
    "longest": ({}, lambda c: dict(max_seqlen_q=3), ValueError, "max_seqlen_q is for packed queries"),
    "no-longest": (dict(packed=(1, 2)), lambda c: dict(max_seqlen_q=None), TypeError, "max_seqlen_q must be a whole"),
    "out-shape": ({}, lambda c: dict(out=np.empty((2, 1, 4, 8), "f4")), ValueError, r"out must be \(2, 1, 4, 16\)"),
    "out-dtype": ({}, lambda c: dict(out=np.empty((2, 1, 4, 16), "f8")), TypeError, "out must have the dtype of q"),
    "window": ({}, lambda c: dict(window=3), TypeError, "window must be None or"),
    "scale": ({}, lambda c: dict(scale=np.inf), ValueError, "scale must be finite"),
    "sink": ({}, lambda c: dict(sink=np.zeros(3, "f4")), ValueError, "sink must be"),
    "layout": ({}, lambda c: dict(layout="sbhd"), ValueError, "layout must be"),
    # Contents
    "too-many": (PLAIN, lambda c: dict(cache_seqlens=np.array([5, 39], "i4")), ValueError,
                 r"cache_seqlens\[1\] is 39 before 2 appended rows, and the capacity is 40"),
    "negative": ({}, lambda c: dict(cache_seqlens=np.array([-1, 3], "i4")), ValueError, r"cache_seqlens\[0\] is -1"),
    "one-too-many": ({}, lambda c: dict(cache_seqlens=41), ValueError, r"\[0\] is 41, and the capacity is 40"),
    "hole": (PAGED, lambda c: dict(block_table=changed(c.options["block_table"], (1, 2), -1)), ValueError,
             r"block_table\[1, 2\] is -1, and the pool has 8 pages"),
    "page": (PAGED, lambda c: dict(block_table=changed(c.options["block_table"], (1, 3), 8)), ValueError,
             r"block_table\[1, 3\] is 8"),
    "batch-idx": (dict(batch_idx=(0, 1)), lambda c: dict(cache_batch_idx=np.array([0, 2], "i4")), ValueError,
                  r"cache_batch_idx\[1\] is 2 and must be in \[0, 1\]"),
    "leftpad": ({}, lambda c: dict(cache_leftpad=np.array([0, -1], "i4")), ValueError, r"cache_leftpad\[1\] is -1"),
    "rotary-rows": (PLAIN | dict(rotary=(8, True)),
                    lambda c: {n: c.options[n][:24] for n in ("rotary_cos", "rotary_sin")}, ValueError,
                    "rotary_cos has 24 rows, and position 24 is rotated"),
    "position": (PLAIN | dict(rotary=(8, True), positions=True),
                 lambda c: dict(positions=changed(c.options["positions"], (1, 1), 48)), ValueError,
                 r"positions\[3\] is 48"),
    "one-place": (PLAIN | dict(batch_idx=(1, 1), lengths=(5, 5)), lambda c: {}, ValueError,
                  "2 rows are appended to row 5 of block 1"),
    "one-slot": (PLAIN | dict(slots=True), lambda c: dict(slots=np.array([3, 90, 3, -1])), ValueError, r"\[1\] is 90"),
    "bounds": (dict(packed=(1, 2)), lambda c: dict(cu_seqlens_q=np.array([0, 3, 2], "i4")), ValueError, "not decrease"),
    "bounds-end": (dict(packed=(1, 2)), lambda c: dict(cu_seqlens_q=np.array([0, 3, 9], "i4")), ValueError, "end"),
    "bounds-longest": (dict(packed=(1, 2)), lambda c: dict(max_seqlen_q=1), ValueError, "a sequence has 2 tokens"),
}  # fmt: skip


@pytest.mark.parametrize("sizes, change, error, text", WRONG.values(), ids=WRONG)
def test_a_wrong_call(sizes, change, error, text):
    call = CacheCase(**sizes).call()
    message = failure(error, call, **change(call))
    assert re.search(text, message), message
    assert re.match(r"attention_with_kv_cache: .* not met\n", message) and "\ngiven\n" in message


def test_every_reason_at_once():
    call = CacheCase(**PLAIN).call()
    message = failure(
        TypeError, call, k_cache=call.k_cache.astype("f2"), split_size=3, cache_seqlens=np.zeros(3, "i8"),
        mask=np.ones((2, 1, 9, 4), "i1"), v=call.options["v"][:, :1], scale="x", sink=np.zeros(3, "f4"),
        out=np.empty(3), alibi_slopes=np.zeros(4),
    )  # fmt: skip
    assert message.startswith("attention_with_kv_cache: 13 requirements are not met"), message
    for text in (
        "one dtype", "split_size", "must be int32", "(2,), not (3,)", "v must be", "scale must be", "sink must be",
        "out must be", "out must have", "alibi_slopes must be", "mask must be", "mask must be bool", "the caches",
    ):  # fmt: skip
        assert text in message, message


def test_an_invalid_call_writes_nothing():
    call = CacheCase(**PLAIN).call()
    before = call.copied()
    failure(ValueError, call, split_size=1)
    failure(ValueError, call, cache_seqlens=np.array([5, 39], np.int32))
    for array, same in zip(call[1:3], before[1:3], strict=True):
        np.testing.assert_array_equal(array, same)


@pytest.mark.parametrize(
    "sizes, options, text",
    [
        (dict(page=6), {}, "pages of 6 keys, which is no power of two; FlashAttention 3"),
        (dict(page=8), dict(cache_leftpad=np.zeros(2, np.int32)), "cache_leftpad with block_table; FlashAttention 3"),
        ({}, dict(backend="simulator", split_size=64), "simt: it does not compute the keys in pieces of split_size"),
        ({}, dict(engine="mma"), 'cpu_decode: engine="mma" was asked for'),
        ({}, dict(engine="cpu"), "cpu: it reads no KV cache in this version"),
    ],
    ids=["page-size", "leftpad-paged", "simulator", "mma", "cpu"],
)
def test_unsupported_calls(sizes, options, text):
    assert text in failure(UnsupportedError, CacheCase(**sizes).call(), **options)


def test_explain():
    call = CacheCase(page=8, split_size=64, lengths=(5, 9)).call()
    text = cupy_flash.explain_with_kv_cache(*call[:3], **call.options)
    assert "engine     cpu_decode on cpu" in text and "pieces of 64 keys" in text and "cache of 6 pages of 8" in text
    assert "tiles      8 queries x 64 keys" in text and "by split_size; " in text
    assert "not wgmma  it reads no KV cache in this version" in text
    with pytest.raises(TypeError, match="explain_with_kv_cache: unknown option 'dropout'"):
        cupy_flash.explain_with_kv_cache(*call[:3], dropout=0.5)


def test_compile_refuses_a_cache_with_reasons():
    with pytest.raises(UnsupportedError, match="simt: head dimension 640 is larger than 576"):
        cupy_flash.compile(dtype="float32", head_dim=640, arch="sm_80", cache=True)
    with pytest.raises(TypeError, match="compile: cache must be True or False"):
        cupy_flash.compile(dtype="float16", head_dim=64, arch="sm_80", cache=1)


class OnGpu:
    """An array of a GPU library that has only `__cuda_array_interface__`; reading its memory would crash."""

    def __init__(self, array):
        address = (2**40 + array.ctypes.data, False)
        self.__cuda_array_interface__ = dict(array.__array_interface__, data=address, strides=array.strides)


def test_on_a_gpu_the_host_reads_nothing():
    """The problem equals that of arrays in host memory, whatever the indices contain."""
    case = CacheCase(page=8, appended=2, q_len=2, rotary=(8, True))
    call = case.call()
    q, k_cache, v_cache = map(OnGpu, call[:3])
    options = {n: OnGpu(x) if isinstance(x, np.ndarray) else x for n, x in call.options.items()}
    problem, operands = pose_with_cache(q, k_cache, v_cache, CacheOptions(**options))
    host, _ = pose_with_cache(*call[:3], CacheOptions(**call.options))
    assert problem == host._replace(device="cuda:0", framework="cuda_array_interface")
    assert operands.cache.block_table.pointer == 2**40 + call.options["block_table"].ctypes.data
    longer = options | {"cache_seqlens": OnGpu(np.full(2, 10**9, np.int32))}
    assert pose_with_cache(q, k_cache, v_cache, CacheOptions(**longer))[0] is problem
    with pytest.raises(UnsupportedError, match="arrays are on cuda:0"):
        cupy_flash.attention_with_kv_cache(q, k_cache, v_cache, **options)


def test_lengths_are_not_part_of_the_problem():
    """Lengths are not part of the problem: another int or another array makes no new problem, and so no new plan."""
    call = CacheCase().call()
    problems = {
        id(pose_with_cache(*call[:3], CacheOptions(**call.options | {"cache_seqlens": length}))[0])
        for length in (1, 2, np.int64(3))
    }
    assert len(problems) == 1


class Tensor(Producer):
    """A stand-in for TensorFlow's eager tensors: immutable, although the capsules that they export are writable."""

    __module__ = "tensorflow.python.framework.ops"


class OwnTensor(Tensor):
    """A subclass of a tensor class that is defined in a user's module."""

    __module__ = "model"


class MlxArray(Producer):
    __module__ = "mlx.core"


IMMUTABLE = {
    "jax": (jnp.asarray, "jax", "cupy_flash.adapters.jax.append_to_kv_cache returns new caches"),
    "tensorflow": (Tensor, "tensorflow", "keep the caches in arrays of another library, such as NumPy or torch"),
    "subclass": (OwnTensor, "tensorflow", "keep the caches in arrays of another library"),
    "mlx": (MlxArray, "mlx", "keep the caches in arrays of another library"),
}


@pytest.mark.parametrize("make, library, advice", IMMUTABLE.values(), ids=IMMUTABLE)
def test_arrays_of_immutable_libraries_are_read_and_not_written(make, library, advice, monkeypatch):
    monkeypatch.setitem(array_libraries.IMPORTERS, "tensorflow", np.from_dlpack)  # the arrays are stand-ins
    call = CacheCase(appended=1).call()
    given = dict(zip(("q", "k_cache", "v_cache"), call[:3], strict=True)) | call.options
    immutable = {n: make(x) if isinstance(x, np.ndarray) else x for n, x in given.items()}
    before = {n: x.copy() for n, x in given.items() if isinstance(x, np.ndarray)}
    refusal = rf"{library} arrays are immutable, and nothing can be appended to them in place: {re.escape(advice)}"
    with pytest.raises(UnsupportedError, match=refusal):
        cupy_flash.attention_with_kv_cache(**immutable)
    caches = {n: immutable[n] for n in ("k", "v", "k_cache", "v_cache", "cache_seqlens")}
    with pytest.raises(UnsupportedError, match=refusal):
        cupy_flash.append_to_kv_cache(**caches)
    reads = {n: x for n, x in immutable.items() if n not in ("k", "v")}
    result = np.zeros_like(given["q"])
    with pytest.raises(UnsupportedError, match=f"{library} arrays are immutable, and out cannot be written in place"):
        cupy_flash.attention_with_kv_cache(**reads, out=make(result))
    assert not result.any()
    for name, x in before.items():
        np.testing.assert_array_equal(given[name], x)
    expected = cupy_flash.attention_with_kv_cache(**{n: given[n] for n in reads})
    np.testing.assert_array_equal(np.asarray(cupy_flash.attention_with_kv_cache(**reads)), expected)


# append_to_kv_cache


@pytest.mark.parametrize(
    "options, error, text",
    [
        (dict(), ValueError, "cache_seqlens or slots must say where the rows go"),
        (dict(cache_seqlens=3, slots=np.arange(4)), ValueError, "beside slots, cache_seqlens is for rotary"),
        (dict(cache_seqlens=39), ValueError, r"cache_seqlens\[0\] is 39 before 2 appended rows"),
        (dict(cache_seqlens=3, cu_seqlens=np.array([0, 2], np.int32)), ValueError, r"k and v must be \(T, Hk, D\)"),
        (dict(slots=np.array([1, 1, 2, 3])), ValueError, "2 rows are appended to row 1 of block 0"),
        (dict(cache_seqlens=3, layout=3), ValueError, "layout must be"),
    ],
    ids=["nowhere", "slots-and-lengths", "too-long", "rank", "duplicates", "layout"],
)
def test_a_wrong_append(options, error, text):
    call = CacheCase(**PLAIN).call()
    with pytest.raises(error, match=text):
        cupy_flash.append_to_kv_cache(call.options["k"], call.options["v"], *call[1:3], **options)


def test_arrays_that_overlap_one_that_is_written_are_refused():
    call = CacheCase(appended=1, heads=2).call()
    q, k_cache, v_cache, options = call
    inside = dict(k=v_cache[:, 3:4], v=k_cache[:, 30:31])
    text = failure(ValueError, call, **inside)
    assert "k overlaps v_cache in memory" in text and "v overlaps k_cache in memory" in text
    reads = {name: value for name, value in options.items() if name not in ("k", "v")}
    text = failure(ValueError, call._replace(options=reads), out=k_cache[:, 5:6])
    assert "out overlaps k_cache in memory" in text
    assert "out overlaps q in memory" in failure(ValueError, call._replace(options=reads), out=q)
    text = failure(ValueError, call, out=options["v"].reshape(q.shape[0], 1, -1, q.shape[-1]))
    assert "out overlaps v in memory" in text
    one = k_cache.copy()
    text = failure(ValueError, call._replace(k_cache=one, v_cache=one[..., :16]))
    assert "k_cache and v_cache start at one address: rows of k and v would overwrite each other" in text
    with pytest.raises(ValueError, match="start at one address"):
        cupy_flash.append_to_kv_cache(options["k"], options["v"], one, one, cache_seqlens=options["cache_seqlens"])
    cupy_flash.attention_with_kv_cache(q, one, one[..., :8], **reads)  # latent attention reads V from the rows of K
    both = np.zeros((2, 40, 3, 2, 16), np.float32)  # K, V and new rows interleaved in one array share no element
    k_cache, v_cache = both[:, :, 0], both[:, :, 1]
    cupy_flash.attention_with_kv_cache(q, k_cache, v_cache, **options | dict(k=both[:, 7:8, 2], v=both[:, 9:10, 2]))


@pytest.mark.parametrize("value", [np.nan, np.inf, -1.0])
def test_descales_are_finite_and_not_negative(value):
    call = CacheCase(dtype="float16", cache_dtype="float8_e4m3fn", descales=True).call()
    call.options["k_descale"][1, 0] = value
    assert "k_descale must be finite and not negative" in failure(ValueError, call)


COMPILED = [
    (dict(split_size=64), "split_size, rotary and rotary_dim are for a KV cache"),
    (dict(cache=True, split_size=65), "split_size must be a positive multiple of 64, not 65"),
    (dict(cache=True, rotary=True, rotary_dim=7), "rotary_dim must be even and in"),
    (dict(cache=True, rotary_dim=8), "rotary_dim is that of tables"),
]


@pytest.mark.parametrize(("options", "reason"), COMPILED)
def test_compile_refuses_wrong_options_of_a_cache(options, reason):
    with pytest.raises(ValueError, match=reason):
        cupy_flash.compile(dtype="float16", head_dim=64, arch="sm_80", **options)
