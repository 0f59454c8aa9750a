"""Invalid calls raise one error with every reason, all shapes and dtypes, before anything is computed or written."""

import sys
from types import SimpleNamespace

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch
from torch.nested import nested_tensor_from_jagged

import cupy_flash
from cupy_flash import UnsupportedError


def zeros(*shape, dtype=np.float32):
    return np.zeros(shape, dtype)


def int32(*values):
    return np.array(values, np.int32)


def good_arguments(function):
    """Return keyword arguments of a valid call of a public function."""
    dense = dict(q=zeros(2, 3, 4, 8), k=zeros(2, 5, 2, 8), v=zeros(2, 5, 2, 6))
    packed = dict(q=zeros(6, 4, 8), k=zeros(9, 2, 8), v=zeros(9, 2, 6))
    packed |= dict(cu_seqlens_q=int32(0, 4, 6), cu_seqlens_k=int32(0, 0, 9), max_seqlen_q=4, max_seqlen_k=9)
    return {
        "attention": dense,
        "attention_vjp": dense,
        "explain": dense,
        "attention_backward": dense | dict(dout=zeros(2, 3, 4, 6), out=zeros(2, 3, 4, 6), lse=zeros(2, 4, 3)),
        "attention_varlen": packed,
        "attention_varlen_backward": packed | dict(dout=zeros(6, 4, 6), out=zeros(6, 4, 6), lse=zeros(4, 6)),
        "merge": dict(out_a=zeros(2, 3, 4, 6), lse_a=zeros(2, 4, 3), out_b=zeros(2, 3, 4, 6), lse_b=zeros(2, 4, 3)),
    }[function]


class CudaArray:
    """An array that claims to be on a GPU; reading it on the host raises an error."""

    def __init__(self, shape, typestr="<f4"):
        self.__cuda_array_interface__ = {
            "version": 3, "shape": shape, "typestr": typestr, "data": (1 << 40, False), "strides": None, "stream": None,
        }  # fmt: skip

    def __array__(self, *_, **__):
        raise AssertionError("copied to the host")


INTERFACE = dict(shape=(2, 3, 4, 8), typestr="<f4", data=(1 << 40, False), version=3)


class Interface:
    """An array whose array interface has only these keys."""

    def __init__(self, **keys):
        self.__cuda_array_interface__ = keys


class Producer:
    """A faulty DLPack producer."""

    def __init__(self, *device):
        self.device = device

    def __dlpack_device__(self):
        if not self.device:
            raise KeyError("device")
        return self.device[0]

    def __dlpack__(self, **options):
        raise KeyError("data")


class Raising:
    """An object whose attributes and conversions raise KeyError."""

    def __float__(self):
        raise KeyError

    __index__ = __float__

    def __getattr__(self, name):
        raise KeyError(name)


@pytest.fixture(autouse=True)
def without_cupy(monkeypatch):
    """Hide CuPy: once imported, CuPy asks the driver about every pointer, and those of CudaArray are invalid."""
    monkeypatch.setitem(sys.modules, "cupy", None)


def bad(id_, function, error, *words, **changes):
    return pytest.param(function, error, words, changes, id=id_)


FORWARD, BACKWARD, VARLEN, MERGE = "attention", "attention_backward", "attention_varlen", "merge"

BAD_CALLS = [
    # q, k, v
    bad("q-of-rank-3", FORWARD, ValueError, "q must have 4 dimensions (B, S, H, D)", "(3, 4, 8)", q=zeros(3, 4, 8)),
    bad("k-of-rank-0", FORWARD, ValueError, "k must have 4 dimensions", k=zeros()),
    bad("packed-q-of-rank-4", VARLEN, ValueError, "q must have 3 dimensions (T, H, D)", q=zeros(1, 6, 4, 8)),
    bad("batch-sizes", FORWARD, ValueError, "one batch size, not 2, 3, 2", k=zeros(3, 5, 2, 8)),
    bad("batch-of-one-does-not-broadcast", FORWARD, ValueError, "one batch size, not 1, 2, 2", q=zeros(1, 3, 4, 8)),
    bad("lengths-of-k-and-v", FORWARD, ValueError, "k and v must have one length, not 5 and 4", v=zeros(2, 4, 2, 6)),
    bad("heads-of-k-and-v", FORWARD, ValueError, "same number of heads, not 2 and 1", v=zeros(2, 5, 1, 6)),
    bad(
        "heads-not-a-multiple", FORWARD, ValueError, "the 5 heads of q must be a multiple of the 2",
        q=zeros(2, 3, 5, 8),
    ),
    bad("fewer-heads-than-keys", FORWARD, ValueError, "the 1 heads of q must be a multiple", q=zeros(2, 3, 1, 8)),
    bad("head-dimensions", FORWARD, ValueError, "one head dimension, not 7 and 8", q=zeros(2, 3, 4, 7)),
    bad("no-heads", FORWARD, ValueError, "at least 1", q=zeros(2, 3, 0, 8), k=zeros(2, 5, 0, 8), v=zeros(2, 5, 0, 6)),
    bad("no-head-dimension", FORWARD, ValueError, "at least 1", q=zeros(2, 3, 4, 0), k=zeros(2, 5, 2, 0)),
    bad("no-value-dimension", FORWARD, ValueError, "at least 1", v=zeros(2, 5, 2, 0)),
    bad("dtypes-differ", FORWARD, TypeError, "one dtype", "float16", k=zeros(2, 5, 2, 8, dtype=np.float16)),
    bad(
        "integers", FORWARD, TypeError, "must be float16, bfloat16, float32, float64 or float8_e4m3fn, not int32",
        q=zeros(2, 3, 4, 8, dtype=np.int32),
    ),
    bad("complex", FORWARD, TypeError, "not complex64", v=zeros(2, 5, 2, 6, dtype=np.complex64)),
    bad("longdouble", FORWARD, TypeError, np.dtype(np.longdouble).name, v=zeros(2, 5, 2, 6, dtype=np.longdouble)),
    bad("e5m2", FORWARD, TypeError, "not float8_e5m2", q=zeros(2, 3, 4, 8, dtype=ml_dtypes.float8_e5m2)),
    bad("none", FORWARD, TypeError, "q (builtins.NoneType)", q=None),
    bad("list", FORWARD, TypeError, "v (builtins.list)", "not a NumPy, CuPy, torch or jax array", v=[[[[0.0]]]]),
    bad(
        "masked-array", FORWARD, TypeError, "k (numpy.ma.MaskedArray)", "filled",
        k=np.ma.masked_array(zeros(2, 5, 2, 8)),
    ),
    bad("matrix", FORWARD, TypeError, "bias (numpy.matrix)", "2-dimensional", bias=zeros(3, 5).view(np.matrix)),
    bad(
        "byte-order", FORWARD, ValueError, "byte order",
        q=zeros(2, 3, 4, 8, dtype=np.dtype(np.float32).newbyteorder()),
    ),
    bad("mixed-types", FORWARD, TypeError, "of one type, not jax and numpy", k=jnp.zeros((2, 5, 2, 8))),
    bad(
        "mixed-types-with-torch", BACKWARD, TypeError, "of one type, not numpy and torch",
        dout=torch.zeros(2, 3, 4, 6),
    ),
    bad(
        "rows-beyond-int32", FORWARD, ValueError, "at most 2147483647 rows, not 2147483648 and 5",
        q=CudaArray((2, 2**31, 4, 8)), k=CudaArray((2, 5, 2, 8)), v=CudaArray((2, 5, 2, 6)),
    ),
    bad("mixed-devices", FORWARD, ValueError, "on one device, not cpu and cuda:0", k=CudaArray((2, 5, 2, 8))),
    # options
    bad("causal-word", FORWARD, ValueError, "causal must be", "'bottom-right'", causal="bottom-right"),
    bad("causal-number", FORWARD, ValueError, "causal must be", "not 1", causal=1),
    bad("causal-array", FORWARD, ValueError, "causal must be", causal=np.array([True, False])),
    bad("window-below-minus-one", FORWARD, ValueError, "window", "not -2", window=(-2, 0)),
    bad("window-of-one-number", FORWARD, TypeError, "window must be None or (left, right)", "not 3", window=3),
    bad("window-of-three", FORWARD, TypeError, "window must be", window=(1, 2, 3)),
    bad("window-of-floats", FORWARD, TypeError, "window must be", window=(1.0, 2.0)),
    bad("scale-nan", FORWARD, ValueError, "scale must be finite, not nan", scale=float("nan")),
    bad("scale-infinite", FORWARD, ValueError, "scale must be finite, not inf", scale=float("inf")),
    bad("scale-beyond-floats", FORWARD, ValueError, "scale must be finite", scale=10**400),
    bad("scale-beyond-accumulation", FORWARD, ValueError, "scale must be finite in float32, not -1e+39", scale=-1e39),
    bad("scale-word", FORWARD, TypeError, "scale must be a number, not '0.5'", scale="0.5"),
    bad("scale-complex", FORWARD, TypeError, "scale must be a number", scale=1j),
    bad("scale-array", FORWARD, TypeError, "scale must be a number", scale=zeros(2)),
    bad("softcap-zero", FORWARD, ValueError, "softcap must be positive, not 0; None and infinity mean no", softcap=0),
    bad("scale-bytes", FORWARD, TypeError, "scale must be a number, not b'1'", scale=b"1"),
    bad("scale-bytearray", FORWARD, TypeError, "scale must be a number", scale=bytearray(b"1")),
    bad("scale-word-of-numpy", FORWARD, TypeError, "scale must be a number", scale=np.array("0.5")),
    bad("scale-complex-of-numpy", FORWARD, TypeError, "scale must be a number", scale=np.complex64(1j)),
    bad("scale-without-a-value", FORWARD, TypeError, "scale must be a number", scale=torch.empty((), device="meta")),
    bad("scale-that-raises", FORWARD, TypeError, "scale must be a number", scale=Raising()),
    bad("softcap-bytes", FORWARD, TypeError, "softcap must be a number", softcap=b"1"),
    bad("dropout-bytes", FORWARD, TypeError, "dropout must be a number", dropout=b"0"),
    bad("dropout-huge", FORWARD, ValueError, "dropout must be in [0, 1)", dropout=1e308),
    bad("window-of-64-bits", FORWARD, ValueError, "a side of window must be less than 2**63", window=(2**63, 0)),
    bad("window-of-bytes", FORWARD, TypeError, "window must be None or (left, right)", window=(b"1", 1)),
    bad("window-that-raises", FORWARD, TypeError, "window must be None or (left, right)", window=(Raising(), 1)),
    bad("backend-arch", FORWARD, ValueError, "as in simulator:sm_90a, of sm_75", backend="simulator:sm_9"),
    bad("backend-list", FORWARD, ValueError, "backend must be one of cpu, cuda, simulator, not []", backend=[]),
    bad("backend-array", FORWARD, ValueError, "backend must be one of cpu", backend=np.array([1, 2])),
    bad("engine-array", FORWARD, ValueError, "engine must be one of cpu", engine=np.array([1, 2])),
    bad("layout-array", FORWARD, ValueError, "layout must be", layout=np.array([1, 2])),
    bad("merge-layout-array", MERGE, ValueError, "layout must be", layout=np.array([1, 2])),
    bad("max-seqlen-of-64-bits", VARLEN, ValueError, "max_seqlen_k must be at most 2147483647", max_seqlen_k=2**63),
    bad("max-seqlen-that-raises", VARLEN, TypeError, "max_seqlen_q must be a whole number", max_seqlen_q=Raising()),
    # producers of arrays
    bad("interface-empty", FORWARD, TypeError, "has no shape, typestr, data", q=Interface()),
    bad("interface-without-data", FORWARD, TypeError, "k (", "has no data", k=Interface(shape=(1,), typestr="<f4")),
    bad("interface-of-wrong-data", FORWARD, TypeError, "is malformed", q=Interface(**INTERFACE | dict(data=None))),
    bad("interface-of-wrong-type", FORWARD, TypeError, "is malformed", q=Interface(**INTERFACE | dict(typestr="zz"))),
    bad("interface-of-no-type", FORWARD, TypeError, "is malformed", q=Interface(**INTERFACE | dict(typestr=None))),
    bad("interface-of-wrong-shape", FORWARD, TypeError, "is malformed", q=Interface(**INTERFACE | dict(shape=(-1,)))),
    bad("interface-of-wrong-strides", FORWARD, TypeError, "is malformed", q=Interface(**INTERFACE | dict(strides=()))),
    bad("producer-raises", FORWARD, TypeError, "v (", "does not export it: KeyError: 'device'", v=Producer()),
    bad("producer-raises-later", FORWARD, TypeError, "not export it: KeyError: 'data'", v=Producer((1, 0))),
    bad("producer-answers-none", FORWARD, TypeError, "bias (", "does not export it", bias=Producer(None)),
    bad("attribute-raises", FORWARD, TypeError, "does not export it: KeyError", q=Raising()),
    bad("softcap-negative", FORWARD, ValueError, "softcap must be positive", softcap=-1.0),
    bad("softcap-nan", FORWARD, ValueError, "softcap must be positive", softcap=float("nan")),
    bad("softcap-minus-infinity", FORWARD, ValueError, "softcap must be positive", softcap=float("-inf")),
    bad("softcap-vanishes", FORWARD, ValueError, "softcap must be positive in float32, not 1e-46", softcap=1e-46),
    bad("softcap-true", FORWARD, TypeError, "softcap must be a number, not True", softcap=True),
    bad("dropout-one", FORWARD, ValueError, "dropout must be in [0, 1)", "not 1.0", dropout=1.0),
    bad("dropout-that-rounds-to-one", FORWARD, ValueError, "in steps of 1/65536", dropout=1 - 2**-18),
    bad("dropout-negative", FORWARD, ValueError, "dropout must be in [0, 1)", dropout=-0.1),
    bad("dropout-nan", FORWARD, ValueError, "dropout must be in [0, 1)", dropout=float("nan")),
    bad("dropout-word", FORWARD, TypeError, "dropout must be a number", dropout="0.1"),
    bad("seed-negative", FORWARD, ValueError, "seed must be in [0, 2**64), not -1", dropout=0.1, seed=-1),
    bad("seed-of-65-bits", FORWARD, ValueError, "seed must be in [0, 2**64)", dropout=0.1, seed=2**64),
    bad("seed-float", FORWARD, TypeError, "seed must be None, an int or an int64 array", dropout=0.1, seed=1.0),
    bad(
        "seed-array-of-two", FORWARD, ValueError, "one int64, not int64 (2,)", dropout=0.1,
        seed=zeros(2, dtype=np.int64),
    ),
    bad("seed-array-of-floats", FORWARD, ValueError, "one int64, not float32", dropout=0.1, seed=zeros(1)),
    bad(
        "seed-elsewhere", FORWARD, ValueError, "on the device of q, cpu, not cuda:0", dropout=0.1,
        seed=CudaArray((1,), "<i8"),
    ),
    bad("seed-of-a-backward", BACKWARD, ValueError, "needs a seed", dropout=0.1),
    bad("seed-wrong-without-dropout", FORWARD, ValueError, "seed must be in [0, 2**64)", seed=-1),
    bad("layout", FORWARD, ValueError, 'layout must be "bshd" or "bhsd", not \'sbhd\'', layout="sbhd"),
    bad("layout-none", FORWARD, ValueError, "layout must be", layout=None),
    bad("packed-layout", VARLEN, ValueError, 'no layout "bhsd"', layout="bhsd"),
    bad("return-lse-word", FORWARD, TypeError, "return_lse must be True or False", return_lse="yes"),
    bad("deterministic-number", FORWARD, TypeError, "deterministic must be True or False", deterministic=1),
    bad("backend", FORWARD, ValueError, "backend must be one of cpu, cuda, simulator, not 'gpu'", backend="gpu"),
    bad("engine", FORWARD, ValueError, "simt, mma, mma_decode, wgmma, tcgen05, not 'fast'", engine="fast"),
    bad("unknown-option", BACKWARD, TypeError, "unknown option 'is_causal'", "the options are causal,", is_causal=True),
    bad("unknown-option-of-varlen", VARLEN, TypeError, "unknown option 'block_table'", block_table=None),
    bad("unknown-option-of-attention", FORWARD, TypeError, "is_causal", is_causal=True),
    # arrays of options
    bad("bias-bool", FORWARD, TypeError, "bias must be floating, not bool", "mask=", bias=zeros(3, 5, dtype=bool)),
    bad("bias-integer", FORWARD, TypeError, "bias must be floating, not int64", bias=zeros(3, 5, dtype=np.int64)),
    bad(
        "bias-shape", FORWARD, ValueError, "bias (5, 3) must broadcast to (B, Hq, Sq, Sk) = (2, 4, 3, 5)",
        bias=zeros(5, 3),
    ),
    bad("bias-of-rank-5", FORWARD, ValueError, "bias (1, 2, 4, 3, 5) must broadcast", bias=zeros(1, 2, 4, 3, 5)),
    bad("bias-per-key-head", FORWARD, ValueError, "bias (2, 3, 5) must broadcast", bias=zeros(2, 3, 5)),
    bad("mask-float", FORWARD, TypeError, "mask must be bool, True = attend, not float32", "bias=", mask=zeros(3, 5)),
    bad("mask-uint8", FORWARD, TypeError, "mask must be bool", mask=zeros(3, 5, dtype=np.uint8)),
    bad("mask-shape", FORWARD, ValueError, "mask (2, 5) must broadcast", mask=zeros(2, 5, dtype=bool)),
    bad(
        "alibi-float64", FORWARD, TypeError, "alibi_slopes must be float32, not float64",
        alibi_slopes=zeros(4, dtype=np.float64),
    ),
    bad("alibi-per-key-head", FORWARD, ValueError, "(Hq,) or (B, Hq) = (2, 4), not (2,)", alibi_slopes=zeros(2)),
    bad("sink-shape", FORWARD, ValueError, "sink must be (Hq,) = (4,), not (1, 4)", sink=zeros(1, 4)),
    bad("sink-integer", FORWARD, TypeError, "sink must be floating, not int32", sink=zeros(4, dtype=np.int32)),
    bad("sink-number", FORWARD, TypeError, "sink (builtins.float)", sink=0.5),
    bad(
        "lengths-int64", FORWARD, TypeError, 'kv_lengths must be int32, not int64: pass kv_lengths.astype("int32")',
        kv_lengths=np.array([1, 2]),
    ),
    bad("lengths-shape", FORWARD, ValueError, "q_lengths must be (B,) = (2,), not (3,)", q_lengths=int32(1, 2, 3)),
    bad("lengths-too-long", FORWARD, ValueError, "kv_lengths must be in [0, 5], not 1 to 6", kv_lengths=int32(1, 6)),
    bad("lengths-negative", FORWARD, ValueError, "q_lengths must be in [0, 3], not -1 to 3", q_lengths=int32(-1, 3)),
    bad("lengths-list", FORWARD, TypeError, "kv_lengths (builtins.list)", kv_lengths=[1, 2]),
    # packed batches
    bad("cu-seqlens-decrease", VARLEN, ValueError, "cu_seqlens_q must not decrease", cu_seqlens_q=int32(0, 4, 3)),
    bad("cu-seqlens-start", VARLEN, ValueError, "cu_seqlens_k must start at 0, not 1", cu_seqlens_k=int32(1, 1, 9)),
    bad(
        "cu-seqlens-past-the-tokens", VARLEN, ValueError, "cu_seqlens_k ends at 10, past the 9 tokens",
        "max_seqlen_k is 9", cu_seqlens_k=int32(0, 0, 10),
    ),
    bad(
        "cu-seqlens-int64", VARLEN, TypeError, "cu_seqlens_q must be int32, not int64",
        cu_seqlens_q=np.array([0, 4, 6]),
    ),
    bad(
        "cu-seqlens-rank", VARLEN, ValueError, "cu_seqlens_q must be (B + 1,), not (1, 3)",
        cu_seqlens_q=int32(0, 4, 6)[None],
    ),
    bad("cu-seqlens-empty", VARLEN, ValueError, "cu_seqlens_k must be (B + 1,), not (0,)", cu_seqlens_k=int32()),
    bad("cu-seqlens-of-different-batches", VARLEN, ValueError, "must have one length", cu_seqlens_k=int32(0, 9)),
    bad("cu-seqlens-none", VARLEN, TypeError, "cu_seqlens_q (builtins.NoneType)", cu_seqlens_q=None),
    bad(
        "max-seqlen-too-short", VARLEN, ValueError, "max_seqlen_q is 3, but the longest sequence has 4",
        max_seqlen_q=3,
    ),
    bad("max-seqlen-negative", VARLEN, ValueError, "max_seqlen_k must be at least 0, not -1", max_seqlen_k=-1),
    bad("max-seqlen-beyond-int32", VARLEN, ValueError, "max_seqlen_q must be at most 2147483647", max_seqlen_q=2**31),
    bad("max-seqlen-of-71-bits", VARLEN, ValueError, f"max_seqlen_k must be at most 2147483647, not {2**70}",
        max_seqlen_k=2**70),
    bad("max-seqlen-float", VARLEN, TypeError, "max_seqlen_k must be a whole number, not 9.0", max_seqlen_k=9.0),
    bad(
        "packed-bias", VARLEN, ValueError,
        "bias (6, 9) must broadcast to (B, Hq, max_seqlen_q, max_seqlen_k) = (2, 4, 4, 9)", bias=zeros(6, 9),
    ),
    bad("packed-bias-of-more-sequences", VARLEN, ValueError, "bias (3, 1, 1, 9) must", bias=zeros(3, 1, 1, 9)),
    bad(
        "packed-bias-and-no-length", VARLEN, TypeError, "2 requirements are not met", "max_seqlen_q must be a whole",
        "bias (3, 1, 7, 9) must broadcast", bias=zeros(3, 1, 7, 9), max_seqlen_q=None,
    ),
    bad(
        "packed-bias-of-any-length", VARLEN, TypeError, "a requirement is not met", "max_seqlen_q must be a whole",
        bias=zeros(2, 1, 7, 9), max_seqlen_q=None,
    ),
    bad("packed-mask", VARLEN, ValueError, "mask is for padded batches", mask=zeros(6, 9, dtype=bool)),
    bad("packed-lengths", "attention_varlen_backward", ValueError, "q_lengths is for padded", q_lengths=int32(1, 2)),
    # backward, vjp, explain
    bad(
        "dout-shape", BACKWARD, ValueError, "dout must have the shape of the output, (2, 3, 4, 6)",
        dout=zeros(2, 3, 4, 8),
    ),
    bad(
        "dout-dtype", BACKWARD, TypeError, "dout must have the dtype of q, float32, not float64",
        dout=zeros(2, 3, 4, 6, dtype=np.float64),
    ),
    bad("dout-none", BACKWARD, TypeError, "dout (builtins.NoneType)", dout=None),
    bad("out-shape", BACKWARD, ValueError, "out must have the shape", out=zeros(2, 4, 3, 6)),
    bad("lse-shape", BACKWARD, ValueError, "lse must be (2, 4, 3), not (2, 3, 4)", lse=zeros(2, 3, 4)),
    bad("lse-dtype", BACKWARD, TypeError, "lse must be float32, not float64", lse=zeros(2, 4, 3, dtype=np.float64)),
    bad("dlse-shape", BACKWARD, ValueError, "dlse must be (2, 4, 3), not (4, 3)", dlse=zeros(4, 3)),
    bad("packed-lse-shape", "attention_varlen_backward", ValueError, "lse must be (4, 6), not (6, 4)", lse=zeros(6, 4)),
    bad("vjp-options", "attention_vjp", ValueError, "attention_vjp: ", "softcap must be positive", softcap=-1),
    bad("vjp-unknown-option", "attention_vjp", TypeError, "unknown option 'dlse'", dlse=None),
    bad("explain-options", "explain", ValueError, "explain: ", "scale must be finite", scale=float("-inf")),
    # merge
    bad("merge-shapes", MERGE, ValueError, "out_a and out_b must have one shape", out_b=zeros(2, 3, 4, 8)),
    bad(
        "merge-rank", MERGE, ValueError, "(B, S, H, Dv) in the layout, or (T, H, Dv)", out_a=zeros(3, 6),
        out_b=zeros(3, 6),
    ),
    bad(
        "merge-lse", MERGE, ValueError, "lse_b must be (2, 4, 3) beside out (2, 3, 4, 6), not (2, 3, 4)",
        lse_b=zeros(2, 3, 4),
    ),
    bad(
        "merge-lse-dtype", MERGE, TypeError, "lse_a must be float32, not float16",
        lse_a=zeros(2, 4, 3, dtype=np.float16),
    ),
    bad("merge-dtype", MERGE, TypeError, "out_a must be", "not int64", out_a=zeros(2, 3, 4, 6, dtype=np.int64)),
    bad("merge-types", MERGE, TypeError, "of one type", out_b=torch.zeros(2, 3, 4, 6)),
    bad("merge-layout", MERGE, ValueError, "layout must be", layout="thd"),
    bad("merge-none", MERGE, TypeError, "lse_b (builtins.NoneType)", lse_b=None),
    # several reasons at once; the error is a TypeError if any reason concerns a type
    bad(
        "all-reasons", BACKWARD, ValueError, "6 requirements are not met", "window", "scale", "softcap", "dropout",
        "layout", "dout must have the shape", "given", "q     float32 (2, 3, 4, 8) (numpy on cpu)",
        window=(0, -5), scale=float("nan"), softcap=-1, dropout=2, seed=0, layout="x", dout=zeros(1),
    ),
    bad(
        "types-and-values", FORWARD, TypeError, "2 requirements", "mask must be bool", "(Hq,)", mask=zeros(3, 5),
        sink=zeros(3),
    ),
    bad(
        "every-array", FORWARD, TypeError, "3 requirements", "q (builtins.int)", "k (builtins.str)",
        "v (builtins.dict)", q=1, k="", v={},
    ),
]  # fmt: skip


@pytest.mark.parametrize(("function", "error", "words", "changes"), BAD_CALLS)
def test_bad_call(function, error, words, changes):
    arguments = good_arguments(function) | changes
    arrays = {name: value for name, value in arguments.items() if type(value) is np.ndarray}
    before = {name: (value.tobytes(), value.shape, value.flags.writeable) for name, value in arrays.items()}
    with pytest.raises(error) as caught:
        getattr(cupy_flash, function)(**arguments)
    assert type(caught.value) is error
    message = str(caught.value)
    missing = [word for word in words if word not in message]
    assert not missing, f"{missing} not in:\n{message}"
    assert before == {name: (value.tobytes(), value.shape, value.flags.writeable) for name, value in arrays.items()}


@pytest.mark.parametrize("function", sorted({row.values[0] for row in BAD_CALLS}))
def test_the_calls_are_good_without_the_change(function):
    getattr(cupy_flash, function)(**good_arguments(function))


@pytest.mark.parametrize(
    ("option", "value", "error", "message"),
    [
        ("backend", [], ValueError, "backend must be one of"),
        ("engine", {}, ValueError, "engine must be one of"),
        ("backend", torch.zeros(2), ValueError, "backend must be one of"),
        ("scale", 10**400, ValueError, "scale must be finite"),
        ("softcap", -(10**400), ValueError, "softcap must be positive"),
        ("dropout", 10**400, ValueError, r"dropout must be in \[0, 1\)"),
        ("scale", b"1", TypeError, "scale must be a number"),
        ("scale", torch.empty((), device="meta"), TypeError, "scale must be a number"),
        ("scale", Raising(), TypeError, "scale must be a number"),
        ("window", (2**63, 0), ValueError, "a side of window must be less than"),
        ("window", (0, -(2**70)), ValueError, "a side of window must be None or -1"),
        ("window", (Raising(), 0), TypeError, "window must be None or"),
        ("window", torch.ones(2).to_mkldnn(), TypeError, "window must be None or"),  # cannot be iterated over
        ("seed", np.timedelta64(3), TypeError, "seed must be None, an int or"),
        ("seed", nested_tensor_from_jagged(torch.ones(1), torch.tensor([0, 1])), TypeError, "no memory of its own"),
    ],
    # pytest's own ids read attributes of the value, which raises an error here
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_bad_options_of_a_call_of_torch(option, value, error, message):
    """Options that torch's operator cannot represent raise the same error as in other libraries."""
    q, k, v = (torch.from_numpy(x) for x in good_arguments("attention").values())
    with pytest.raises(error, match=rf"^attention: (.|\n)*{message}"):
        cupy_flash.attention(q, k, v, **{option: value})


def test_there_are_at_least_45_bad_calls():
    assert len(BAD_CALLS) >= 45
    assert len({row.id for row in BAD_CALLS}) == len(BAD_CALLS)


def test_the_message_counts_and_shows_what_was_given():
    with pytest.raises(ValueError, match=r"^attention: a requirement is not met\n") as caught:
        cupy_flash.attention(zeros(2, 3, 4, 7), zeros(2, 5, 2, 8), zeros(2, 5, 2, 8))
    assert str(caught.value).splitlines()[1:] == [
        "  - q and k must have one head dimension, not 7 and 8",
        "given",
        "    q  float32 (2, 3, 4, 7) (numpy on cpu)",
        "    k  float32 (2, 5, 2, 8) (numpy on cpu)",
        "    v  float32 (2, 5, 2, 8) (numpy on cpu)",
    ]


def test_jax_requires_a_seed():
    q, k, v = (jnp.asarray(x) for x in good_arguments("attention").values())
    with pytest.raises(ValueError, match="dropout needs a seed here: jax has no generator"):
        cupy_flash.attention(q, k, v, dropout=0.5)
    assert cupy_flash.attention(q, k, v, dropout=0.5, seed=1).shape == (2, 3, 4, 6)


# Valid problems that no engine supports


def fp8_arguments():
    return {name: x.astype(ml_dtypes.float8_e4m3fn) for name, x in good_arguments("attention").items()}


def cuda_arguments(function="attention"):
    return {name: CudaArray(x.shape) for name, x in good_arguments(function).items()}


@pytest.mark.parametrize("function", ["attention", "attention_vjp", "explain"])
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        pytest.param(fp8_arguments(), ["float8_e4m3fn is not one of float16"], id="fp8"),
        pytest.param(
            dict(backend="cuda"),
            ['cpu: backend="cuda" was asked for', "simt: the arrays are on cpu, and arrays never change device"],
            id="cuda",
        ),
        pytest.param(
            dict(backend="simulator", q=zeros(1, 1, 1, 577), k=zeros(1, 1, 1, 577), v=zeros(1, 1, 1, 8)),
            ["simt: head dimension 577 is larger than 576", "cpu: the call goes to backend simulator"],
            id="head-dimension-of-simt",
        ),
        pytest.param(
            dict(engine="simt"),
            ['cpu: engine="simt" was asked for', "simt: the call goes to backend cpu"],
            id="simt-on-cpu",
        ),
        pytest.param(
            dict(engine="mma"), ['cpu: engine="mma" was asked for', "mma: float32 is not float16 or bfloat16"], id="mma"
        ),
        pytest.param(
            cuda_arguments() | dict(backend="cpu"),
            ["cpu: the arrays are on cuda:0, and arrays never change device"],
            id="cuda-arrays-on-cpu",
        ),
        pytest.param(
            cuda_arguments() | dict(backend="simulator"),
            ["simt: the arrays are on cuda:0, and arrays never change device"],
            id="cuda-arrays-on-simulator",
        ),
    ],
)
def test_unsupported(function, arguments, words):
    with pytest.raises(UnsupportedError) as caught:
        getattr(cupy_flash, function)(**good_arguments(function) | arguments)
    message = str(caught.value)
    for word in (*words, "no engine of this version serves this problem", "cpu: ", "simt: ", "mma: ", "wgmma: "):
        assert word in message, f"{word!r} not in:\n{message}"


def cupy_without_gpu(ndarray):
    """Return a module that behaves like CuPy on a machine without a GPU."""

    def no_device(index):
        raise RuntimeError(f"cudaErrorInvalidDevice: {index}")

    cuda = SimpleNamespace(Device=no_device, is_available=lambda: False)
    return SimpleNamespace(ndarray=ndarray, cuda=cuda)


@pytest.mark.parametrize("function", ["attention", "attention_vjp", "explain"])
@pytest.mark.parametrize("backend", [None, "cuda"], ids=str)
def test_a_gpu_that_cupy_cannot_use(function, backend, monkeypatch):
    """Without CuPy, or without the requested GPU, the error states the reason and is not one of CuPy's."""
    arguments = good_arguments(function) | cuda_arguments() | dict(backend=backend)
    with pytest.raises(
        UnsupportedError,
        match=r"on cuda:0, and arrays never change device; CuPy(.|\n)*import of cupy.*cupy-flash\[cuda13\]",
    ):
        getattr(cupy_flash, function)(**arguments)

    monkeypatch.setitem(sys.modules, "cupy", cupy_without_gpu(tuple))
    with pytest.raises(UnsupportedError, match="cannot use it: cudaErrorInvalidDevice: 0"):
        getattr(cupy_flash, function)(**arguments)


def test_cuda_arrays_are_never_copied_to_the_host():
    """Array options are not copied either, nor the arrays of a backward, nor the cu_seqlens of a packed batch."""
    options = dict(
        bias=CudaArray((3, 5)), mask=CudaArray((3, 5), "|b1"), sink=CudaArray((4,)), alibi_slopes=CudaArray((4,))
    )
    options |= dict(q_lengths=CudaArray((2,), "<i4"), kv_lengths=CudaArray((2,), "<i4"))
    options |= dict(dropout=0.5, seed=CudaArray((1,), "<i8"))
    with pytest.raises(UnsupportedError, match="never change device"):
        cupy_flash.attention(**cuda_arguments(), **options)
    with pytest.raises(UnsupportedError, match="never change device"):
        cupy_flash.attention_backward(**cuda_arguments("attention_backward"), **options)
    packed = good_arguments("attention_varlen_backward")
    on_gpu = {name: CudaArray(x.shape, x.dtype.str) for name, x in packed.items() if isinstance(x, np.ndarray)}
    with pytest.raises(UnsupportedError, match="never change device"):
        cupy_flash.attention_varlen_backward(**packed | on_gpu)
    with pytest.raises(UnsupportedError, match="the arrays are on cuda:0, and arrays never change device"):
        cupy_flash.merge(**cuda_arguments("merge"))


def test_cupy_arrays_are_never_copied_to_the_host(monkeypatch):
    """A stand-in replaces CuPy arrays, because CuPy creates none without a GPU."""

    class NDArray(CudaArray):
        def __init__(self, x):
            super().__init__(x.shape, x.dtype.str)
            self.shape, self.strides, self.dtype = x.shape, x.strides, x.dtype
            self.data, self.device = SimpleNamespace(ptr=1 << 40, device_id=0), SimpleNamespace(id=0)

        def get(self, *_, **__):
            raise AssertionError("copied to the host")

    monkeypatch.setitem(sys.modules, "cupy", cupy_without_gpu(NDArray))
    arguments = {name: NDArray(x) for name, x in good_arguments("attention").items()}
    with pytest.raises(UnsupportedError, match=r"on cuda:0, and arrays never change device"):
        cupy_flash.attention(**arguments)
    with pytest.raises(UnsupportedError, match=r"cupy on cuda:0(.|\n)*arrays never change device"):
        cupy_flash.attention(**arguments, backend="cpu")
    with pytest.raises(TypeError, match="of one type, not cupy and numpy"):
        cupy_flash.attention(**arguments | dict(k=zeros(2, 5, 2, 8)))


def test_the_environment_names_a_backend(monkeypatch):
    arguments = good_arguments("attention")
    monkeypatch.setenv("CUPY_FLASH_BACKEND", "cuda")
    with pytest.raises(UnsupportedError, match='backend="cuda" was asked for'):
        cupy_flash.attention(**arguments)
    assert cupy_flash.attention(**arguments, backend="cpu").shape == (2, 3, 4, 6)
    monkeypatch.setenv("CUPY_FLASH_BACKEND", "tpu")
    with pytest.raises(ValueError, match="the environment's CUPY_FLASH_BACKEND must be one of"):
        cupy_flash.attention(**arguments)
    monkeypatch.setenv("CUPY_FLASH_BACKEND", "gerät")
    with pytest.raises(ValueError, match="must be one of .*gerät"):
        cupy_flash.attention(**arguments)
    monkeypatch.setenv("CUPY_FLASH_BACKEND", "")
    assert cupy_flash.attention(**arguments).shape == (2, 3, 4, 6)
    monkeypatch.setenv("CUPY_FLASH_BACKEND", "cuda")
    monkeypatch.delenv("CUPY_FLASH_BACKEND")
    assert cupy_flash.attention(**arguments).shape == (2, 3, 4, 6)


@pytest.mark.parametrize("value", [True, np.True_, np.bool_(False)], ids=["true", "numpy-true", "numpy-false"])
def test_numpy_scalars_are_accepted(value):
    """NumPy scalars are accepted wherever Python scalars are."""
    arguments = good_arguments("attention") | dict(causal=value, return_lse=value, deterministic=value)
    arguments |= dict(
        window=np.array([1, -1]),
        scale=np.float32(0.5),
        softcap=np.array(3.0),
        dropout=np.float64(0.5),
        seed=np.uint64(2**64 - 1),
    )
    out = cupy_flash.attention(**arguments)
    assert isinstance(out, tuple) == bool(value)


@pytest.mark.parametrize("make", [np.asarray, torch.from_numpy, jnp.asarray], ids=["numpy", "torch", "jax"])
def test_causal_bottom_right_equals_true(make):
    random = np.random.default_rng(0)
    q, k, v = (make(random.normal(size=x.shape).astype(x.dtype)) for x in good_arguments("attention").values())
    expected, top_left = (np.asarray(cupy_flash.attention(q, k, v, causal=word)) for word in (True, "top_left"))
    assert np.array_equal(cupy_flash.attention(q, k, v, causal="bottom_right"), expected)
    assert not np.array_equal(top_left, expected)
