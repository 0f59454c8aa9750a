"""cupy_flash as torch's flash attention implementation: torch's own operators run it, forward and backward."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from tolerance import assert_matches_reference
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import (
    SDPBackend,
    activate_flash_attention_impl,
    current_flash_attention_impl,
    list_flash_attention_impls,
    restore_flash_attention_impl,
    sdpa_kernel,
)
from torch.nn.attention.varlen import varlen_attn
from torch_orders import furthest, in_several_orders

import cupy_flash
from cupy_flash.adapters import torch as adapter
from cupy_flash.adapters.torch.registry import Activation

aten = torch.ops.aten


@pytest.fixture
def active():
    activate_flash_attention_impl("cupy_flash")
    yield
    restore_flash_attention_impl()


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def results(function, shapes, dtype=torch.float32):
    """Return out and the gradients of query, key and value."""
    arrays = [normal(*shape, seed=seed).to(dtype).requires_grad_() for seed, shape in enumerate(shapes)]
    out = function(*arrays)
    return [out.detach(), *torch.autograd.grad(out, arrays, normal(*out.shape, seed=9).to(dtype))]


def assert_all_match(actual, exact, independent):
    for name, *three in zip(("out", "dq", "dk", "dv"), actual, exact, independent, strict=True):
        assert_matches_reference(*three, "float32", name)


L, S, E = 5, 7, 8
SQUARE = [(2, 4, L, E)] * 3
MASK = normal(2, 1, L, S) > -0.5
CALLS = {
    "plain": ([(2, 4, L, E), (2, 4, S, E), (2, 4, S, E)], {}),
    "causal": (SQUARE, dict(is_causal=True)),
    "causal-more-keys": ([(2, 4, L, E), (2, 4, S, E), (2, 4, S, E)], dict(is_causal=True)),
    "scale": (SQUARE, dict(scale=0.7)),
    "boolean-mask": ([(2, 4, L, E), (2, 4, S, E), (2, 4, S, E)], dict(attn_mask=MASK)),
    "float-mask": ([(2, 4, L, E), (2, 4, S, E), (2, 4, S, E)], dict(attn_mask=normal(L, S))),
}


@pytest.mark.parametrize("case", CALLS)
def test_sdpa(case, active, steps):
    shapes, options = CALLS[case]

    def function(q, k, v):
        mask = options.get("attn_mask")
        mask = mask.to(q.dtype) if mask is not None and mask.is_floating_point() else mask
        return F.scaled_dot_product_attention(q, k, v, **options | dict(attn_mask=mask))

    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        actual = results(function, shapes)
    assert steps == ["forward", "backward"]
    with sdpa_kernel(SDPBackend.MATH):
        exact, runs = (
            results(function, shapes, torch.float64),
            list(in_several_orders(lambda: results(function, shapes))),
        )
    assert_all_match(actual, exact, map(furthest, exact, *runs))


def test_active_until_restored(steps):
    x = normal(2, 4, L, E)
    before = F.scaled_dot_product_attention(x, x, x)
    assert "cupy_flash" in list_flash_attention_impls() and not steps
    activate_flash_attention_impl("cupy_flash")
    assert current_flash_attention_impl() == "cupy_flash"
    F.scaled_dot_product_attention(x, x, x)
    activate_flash_attention_impl("cupy_flash")
    F.scaled_dot_product_attention(x, x, x)
    assert steps == ["forward"] * 2
    restore_flash_attention_impl()
    assert torch.equal(F.scaled_dot_product_attention(x, x, x), before) and len(steps) == 2
    with pytest.raises(NotImplementedError):
        aten._scaled_dot_product_flash_attention(x, x, x)


def test_active_in_every_thread_and_recomputation(active, steps):
    """Unlike `sdpa`, the activation holds in every thread, as the documentation of `sdpa` says."""
    arrays = [normal(2, 4, L, E, seed=seed).requires_grad_() for seed in range(3)]

    def recompute(grad_out):
        with torch.enable_grad():
            torch.autograd.backward(F.scaled_dot_product_attention(*arrays), grad_out)

    with ThreadPoolExecutor(1) as threads:
        for inside in (nullcontext(), adapter.sdpa()):
            with inside:
                out = threads.submit(F.scaled_dot_product_attention, *arrays).result()
            out.register_hook(recompute)
            out.sum().backward()
    assert steps == ["forward", "forward", "backward", "backward"] * 2


def test_remove_works_if_the_handle_is_kept():
    handle = Activation()
    handle.remove()
    with pytest.raises(NotImplementedError):
        aten._scaled_dot_product_flash_attention(*[normal(2, 4, L, E)] * 3)


def test_other_implementations_are_not_replaced(active, steps):
    x = normal(2, 4, L, E)
    with sdpa_kernel(SDPBackend.MATH):
        F.scaled_dot_product_attention(x, x, x)
    F.scaled_dot_product_attention(x, x, x, dropout_p=0.5)  # torch has no flash attention with dropout on a CPU
    assert not steps


# Operators that torch has only for GPUs, dispatched on a CPU to the same functions.


@pytest.mark.parametrize("is_causal", [False, True], ids=["all", "causal"])
def test_flash_operator_of_gpus(is_causal, active):
    """The causal mask of these operators is aligned bottom-right."""
    shapes = [(2, 4, L, E), (2, 2, S, E), (2, 2, S, E)]

    def ours(q, k, v):
        return aten._scaled_dot_product_flash_attention(q, k, v, 0.0, is_causal, scale=0.5)[0]

    def formula(q, k, v):
        hidden = torch.ones(L, S, dtype=torch.bool).triu(1 + S - L) if is_causal else torch.zeros(L, S).bool()
        k, v = (x.repeat_interleave(2, 1) for x in (k, v))
        return (0.5 * q @ k.transpose(-1, -2)).masked_fill(hidden, -torch.inf).softmax(-1) @ v

    assert_all_match(results(ours, shapes), results(formula, shapes, torch.float64), results(formula, shapes))


def test_backward_uses_the_dropout_mask_of_the_forward(active):
    q, k, v = (normal(2, 4, L, E, seed=seed).requires_grad_() for seed in range(3))
    out, _, _, _, _, _, rng_state, *_ = aten._scaled_dot_product_flash_attention(q, k, v, 0.4, True)
    seed = rng_state[:1].view(torch.int64)
    expected = adapter.attention(q, k, v, causal=True, dropout=0.4, seed=seed, layout="bhsd")
    assert torch.equal(out, expected)
    pairs = (torch.autograd.grad(x.square().sum(), (q, k, v)) for x in (out, expected))
    assert all(torch.equal(*pair) for pair in zip(*pairs, strict=True))
    assert not torch.equal(out, aten._scaled_dot_product_flash_attention(q, k, v, 0.4, True)[0])


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (2, 1)], ids=["all", "causal", "window"])
def test_varlen(window, active, steps):
    bounds = torch.tensor([0, 3, 3, 10], dtype=torch.int32)
    shapes = [(10, 4, E)] * 3

    def torch_varlen(q, k, v):
        return varlen_attn(q, k, v, bounds, bounds, 7, 7, window_size=window)

    def ours(q, k, v):
        return adapter.attention_varlen(q, k, v, bounds, bounds, 7, 7, window=window)

    actual = results(torch_varlen, shapes)
    assert steps == ["forward", "backward"]
    for a, b in zip(actual, results(ours, shapes), strict=True):
        assert torch.equal(a, b)


def test_varlen_on_pages(active):
    """torch's varlen_attn with a block table equals attention on a paged KV cache."""
    q, pages = normal(4, 4, E), normal(5, 2, 2, 2, E, seed=1)  # 5 pages of 2 keys
    bounds, used = torch.tensor([0, 1, 4], dtype=torch.int32), torch.tensor([3, 5], dtype=torch.int32)
    table = torch.tensor([[4, 1, -1], [3, 0, 2]], dtype=torch.int32)
    out = varlen_attn(
        q, *pages.unbind(1), bounds, None, 3, 6, window_size=(-1, 0), enable_gqa=True, seqused_k=used,
        block_table=table, num_splits=1,
    )  # fmt: skip
    expected = cupy_flash.attention_with_kv_cache(
        q, *pages.unbind(1), cache_seqlens=used, block_table=table, cu_seqlens_q=bounds, max_seqlen_q=3, split_size=64
    )
    assert torch.equal(out, expected)
    with pytest.raises(ValueError, match="needs seqused_k or cu_seqlens_k"):
        aten._flash_attention_forward(q, *pages.unbind(1), bounds, None, 3, 6, 0.0, True, False, block_table=table)


def test_dense_flash_operator(active):
    q, k = normal(2, L, 4, E), normal(2, S, 2, E, seed=1)
    used, slopes = torch.tensor([S, 3], dtype=torch.int32), torch.rand(4)
    out, lse, *_ = aten._flash_attention_forward(
        q, k, k, None, None, L, S, 0.0, False, False, scale=0.3, seqused_k=used, alibi_slopes=slopes
    )
    expected = adapter.attention(q, k, k, scale=0.3, kv_lengths=used, alibi_slopes=slopes, return_lse=True)
    assert torch.equal(out, expected[0]) and torch.equal(lse, expected[1])


@pytest.mark.parametrize(
    "options, reason",
    [
        pytest.param(dict(return_debug_mask=True), "return_debug_mask", id="probabilities"),
        pytest.param(dict(block_table=torch.zeros(2, 1, dtype=torch.int32)), "cum_seq_q", id="paged and padded"),
        pytest.param(dict(num_splits=2), "num_splits", id="splits"),
    ],
)
def test_an_unsupported_problem_is_refused(options, reason, active):
    q = normal(2, L, 4, E)
    arguments = dict(max_q=L, max_k=L, dropout_p=0.0, is_causal=False, return_debug_mask=False) | options
    with pytest.raises(cupy_flash.UnsupportedError, match=reason):
        aten._flash_attention_forward(q, q, q, None, None, **arguments)


def laid_out(layout):
    """Return query, key and value (2, 4, L, E): contiguous, views of (2, L, 4, E), or slices of one projection."""
    if layout == "bhsd":
        return [normal(2, 4, L, E, seed=seed) for seed in range(3)]
    if layout == "bshd":
        return [normal(2, L, 4, E, seed=seed).transpose(1, 2) for seed in range(3)]
    return list(normal(2, L, 3, 4, E).permute(2, 0, 3, 1, 4))


@pytest.mark.parametrize("layout", ["bhsd", "bshd", "qkv"])
@pytest.mark.parametrize("name", ["cpu", "gpu"])
def test_results_have_the_strides_of_fake_kernels(name, layout, active):
    """torch.compile plans memory by the strides that fake kernels return, so the real strides must equal them."""

    def forward(q, k, v):
        if name == "cpu":
            return aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True)
        return aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True)

    def backward(q, k, v, out, lse, *rest):
        if name == "cpu":
            return aten._scaled_dot_product_flash_attention_for_cpu_backward(out, q, k, v, out, lse, 0.0, True)
        *lengths, seed, offset, _ = rest
        return aten._scaled_dot_product_flash_attention_backward(
            out, q, k, v, out, lse, *lengths, 0.0, True, seed, offset
        )

    arrays = laid_out(layout)
    results = forward(*arrays)
    gradients = backward(*arrays, *results)
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(x) for x in arrays]
        promised = forward(*fakes)
        promised_gradients = backward(*fakes, *promised)
    for one, other in zip((*results, *gradients), (*promised, *promised_gradients), strict=True):
        if isinstance(one, torch.Tensor):
            assert (one.shape, one.stride(), one.dtype) == (other.shape, other.stride(), other.dtype)
        else:
            assert one == other


def test_compiled(active, steps):
    arrays = [normal(2, 4, L, E, seed=seed).requires_grad_() for seed in range(3)]
    compiled = torch.compile(
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v) * 1, fullgraph=True, backend="aot_eager"
    )
    out = compiled(*arrays)
    gradients = torch.autograd.grad(out.square().sum(), arrays)
    torch.compiler.reset()
    assert steps == ["forward", "backward"]
    expected = adapter.scaled_dot_product_attention(*arrays)
    assert torch.equal(out, expected)
    for pair in zip(gradients, torch.autograd.grad(expected.square().sum(), arrays), strict=True):
        assert torch.equal(*pair)
