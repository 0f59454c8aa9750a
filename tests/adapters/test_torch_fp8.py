"""fp8=True of the torch adapter, on the simulator: quantisation, a backward on the unrounded arrays, and no fp8 tensor
that outlives the forward.
"""

from functools import partial

import numpy as np
import pytest
import torch
from leaks import Kept, SavedTensors
from tolerance import assert_matches_reference
from torch.utils.checkpoint import checkpoint

import cupy_flash
from cupy_flash import reference
from cupy_flash.adapters import torch as adapter
from cupy_flash.memory import find_retained
from cupy_flash.problem.records import UnsupportedError

BATCH, LENGTH, HEADS, KV_HEADS, HEAD_DIM = 2, 20, 4, 2, 32
SIMULATOR = dict(backend="simulator:sm_90a")
FP8 = torch.float8_e4m3fn


def inputs(dtype=torch.bfloat16):
    """Return q, k and v with a different magnitude for each sequence and key/value head."""
    generator = torch.Generator().manual_seed(0)
    arrays = []
    for heads in (HEADS, KV_HEADS, KV_HEADS):
        sizes = torch.tensor([[1.0, 30.0], [1e-3, 1.0]]).repeat_interleave(heads // KV_HEADS, 1)
        x = torch.randn(BATCH, LENGTH, heads, HEAD_DIM, generator=generator) * sizes[:, None, :, None]
        arrays.append(x.to(dtype).requires_grad_())
    return arrays


def rounded(x, lengths=None):
    """Return (x rounded to e4m3, as fp64, and its descale), computed with NumPy for each sequence and head."""
    x = x.detach().float().numpy().astype(np.float64)
    result, descale = np.zeros_like(x), np.zeros((len(x), KV_HEADS))
    group = x.shape[2] // KV_HEADS
    for b, length in enumerate(lengths or [x.shape[1]] * len(x)):
        for h in range(KV_HEADS):
            block = np.s_[b, :length, h * group : (h + 1) * group]
            descale[b, h] = np.float32(np.abs(x[block]).max() / 448)
            result[block] = (x[block] / descale[b, h]).astype("float8_e4m3fn").astype(np.float64)
    return result, descale


def check(arrays, out, lse, lengths=None, **options):
    """Compare with the formula on q, k and v quantised with NumPy."""
    (q, q_descale), (k, k_descale), (v, v_descale) = (rounded(x, lengths) for x in arrays)
    options |= dict(q_descale=q_descale, k_descale=k_descale, v_descale=v_descale)
    exact, low = (
        reference.attention(*(x.astype("float8_e4m3fn") for x in (q, k, v)), dtype=dtype, **options)
        for dtype in (None, "float8_e4m3fn")
    )
    actual = (out.detach().float().numpy(), lse.detach().numpy())
    for name, computed, expected, other, dtype in zip(
        ("out", "lse"), actual, exact, low, ("bfloat16", "float32"), strict=True
    ):
        assert_matches_reference(computed, expected, other, np.dtype(dtype), name)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])
def test_forward(dtype):
    arrays = inputs(dtype)
    out, lse = adapter.attention(*arrays, causal=True, return_lse=True, fp8=True, **SIMULATOR)
    assert (out.dtype, lse.dtype) == (dtype, torch.float32)
    check(arrays, out, lse, causal=True)


def test_backward_uses_the_unrounded_arrays():
    arrays = inputs()
    options = dict(causal=True)
    out, lse = adapter.attention(*arrays, return_lse=True, fp8=True, **options, **SIMULATOR)
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out.dtype)
    computed = torch.autograd.grad(out, arrays, dout)
    arrays = [x.detach() for x in arrays]
    expected = cupy_flash.attention_backward(dout, *arrays, out.detach(), lse.detach(), **options, **SIMULATOR)
    for gradient, wanted in zip(computed, expected, strict=False):
        assert torch.equal(gradient, wanted)


def test_padding_does_not_change_the_descales():
    """Rows past a length may be NaN or larger than all others without changing the descales."""
    lengths = (20, 7)
    arrays = [x.detach() for x in inputs()]
    for x in arrays:
        x[1, 7:] = 1e4
        x[1, 9:] = torch.nan
    lengths_of = dict.fromkeys(("q_lengths", "kv_lengths"), torch.tensor(lengths, dtype=torch.int32))
    out, lse = adapter.attention(*arrays, return_lse=True, fp8=True, **lengths_of, **SIMULATOR)
    check(arrays, out, lse, lengths, **{name: x.numpy() for name, x in lengths_of.items()})


def test_layouts_and_packed_sequences_give_the_same_bits():
    arrays = [x.detach() for x in inputs()]
    out, lse = adapter.attention(*arrays, return_lse=True, fp8=True, **SIMULATOR)
    swapped = [x.transpose(1, 2) for x in arrays]
    other, _ = adapter.attention(*swapped, layout="bhsd", return_lse=True, fp8=True, **SIMULATOR)
    assert torch.equal(other.transpose(1, 2), out)
    bounds = torch.tensor([0, LENGTH, LENGTH, 2 * LENGTH], dtype=torch.int32)
    past = torch.full((3, 1, HEAD_DIM), torch.nan, dtype=torch.bfloat16)
    packed = [torch.cat([x.flatten(0, 1), past.expand(-1, x.shape[2], -1)]) for x in arrays]
    other, other_lse = adapter.attention_varlen(
        *packed, bounds, bounds, LENGTH, LENGTH, return_lse=True, fp8=True, **SIMULATOR
    )
    assert torch.equal(other[:-3].unflatten(0, (2, -1)), out) and not other[-3:].any()
    assert torch.equal(other_lse[:, :-3].unflatten(1, (2, -1)).transpose(0, 1), lse)


def test_zeros():
    arrays = [torch.zeros_like(x) for x in inputs()]
    out, lse = adapter.attention(*arrays, return_lse=True, fp8=True, **SIMULATOR)
    assert not out.any() and torch.allclose(lse, torch.tensor(float(LENGTH)).log())


def test_no_fp8_tensor_is_saved():
    """q, k, v, out and lse are saved; no fp8 tensor is saved or held by Python or the graph, before or after the
    backward.
    """
    arrays = inputs()
    with Kept() as kept:
        with SavedTensors() as saved:
            out, lse = adapter.attention(*arrays, causal=True, return_lse=True, fp8=True, **SIMULATOR)
        own = {tensor.untyped_storage().data_ptr() for tensor in (*arrays, out, lse)}
        assert set(saved.storages) == own
        assert not kept.beyond(*arrays, out, lse)
        loss = out.float().sum()
        loss.backward()
        assert saved.alive == 0 and not find_retained(loss)
        assert not kept.beyond(*arrays, out, lse, loss, *(x.grad for x in arrays))


def test_checkpointed():
    arrays = inputs()
    options = dict(causal=True, fp8=True, **SIMULATOR)
    expected = torch.autograd.grad(adapter.attention(*arrays, **options).float().sum(), arrays)
    with Kept() as kept:
        loss = checkpoint(partial(adapter.attention, **options), *arrays, use_reentrant=False).float().sum()
        computed = torch.autograd.grad(loss, arrays)
        assert all(map(torch.equal, computed, expected))
        assert not find_retained(loss) and not kept.beyond(loss, *arrays, *computed, *expected)


def test_detector_catches_a_tensor_in_fp8(monkeypatch):
    kept_by = []
    pose = adapter.op.Call.pose
    monkeypatch.setattr(
        adapter.op.Call, "pose", lambda call, *how, **mods: kept_by.append(call.q) or pose(call, *how, **mods)
    )
    with Kept() as kept:
        arrays = inputs()
        out = adapter.attention(*arrays, fp8=True, **SIMULATOR)
        assert {x.dtype for x in kept.beyond(*arrays, out)} >= {FP8}


def test_compiled_and_autocast():
    arrays = [x.detach() for x in inputs()]
    expected = adapter.attention(*arrays, fp8=True, **SIMULATOR)
    compiled = torch.compile(
        lambda *xs: adapter.attention(*xs, fp8=True, **SIMULATOR), backend="aot_eager", fullgraph=True
    )
    assert torch.equal(compiled(*arrays), expected)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(adapter.attention(*(x.float() for x in arrays), fp8=True, **SIMULATOR), expected)


def test_tensors_in_fp8():
    """Tensors that are fp8 already, with descales, eager and compiled; there is no backward."""
    q, k, v = (x.detach().to(FP8) for x in inputs())
    options = dict(k_descale=torch.tensor([[0.5, 2.0], [1.0, 3.0]]), return_lse=True, **SIMULATOR)
    out, lse = cupy_flash.attention(q, k, v, **options)
    assert (out.dtype, lse.dtype) == (torch.bfloat16, torch.float32)
    compiled = torch.compile(lambda *xs: cupy_flash.attention(*xs, **options), backend="aot_eager", fullgraph=True)
    assert all(map(torch.equal, compiled(q, k, v), (out, lse)))
    with pytest.raises(UnsupportedError, match="fp8 has no gradients"):
        cupy_flash.attention_backward(out, q, k, v, out, lse, **SIMULATOR)


@pytest.mark.parametrize(
    ("dtype", "options", "error", "words"),
    [
        pytest.param(torch.bfloat16, {}, UnsupportedError, "wgmma: the call goes to backend cpu", id="cpu"),
        pytest.param(
            torch.float32,
            SIMULATOR,
            TypeError,
            "rounds q, k and v of float16 or bfloat16, not torch.float32",
            id="float32",
        ),
        pytest.param(
            torch.bfloat16,
            dict(v_descale=torch.ones(2, 2)),
            TypeError,
            "v_descale is for float8_e4m3fn, and q, k and v are bfloat16",
            id="descale",
        ),
        pytest.param(torch.bfloat16, dict(fp8=1), TypeError, "fp8 must be True or False, not 1", id="word"),
    ],
)
def test_refused(dtype, options, error, words):
    with pytest.raises(error, match=words):
        adapter.attention(*inputs(dtype), **dict(fp8=True) | options)
