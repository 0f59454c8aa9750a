"""varlen_attn has the signature of torch's, and the results of the formula on each sequence."""

import inspect

import pytest
import torch
from torch.nn.attention import varlen

import cupy_flash
from cupy_flash.adapters.torch import varlen_attn
from cupy_flash.problem.records import UnsupportedError

H, HK, D, DV = 4, 2, 8, 6
CU_Q, CU_K = (torch.tensor(ends, dtype=torch.int32) for ends in ([0, 3, 3, 10], [0, 5, 9, 14]))
LSE = varlen.AuxRequest(lse=True)


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def inputs(heads=HK):
    q, k, v = normal(10, H, D), normal(14, heads, D, seed=1), normal(14, heads, DV, seed=2)
    return tuple(x.requires_grad_() for x in (q, k, v))


def formula(q, k, v, window, used=None):
    """Return (out, lse) of all scores of each sequence; `used` is the number of keys of each."""
    outs, logs = [], []
    for n, ends in enumerate(zip(CU_Q[:-1], CU_Q[1:], CU_K[:-1], CU_K[1:], strict=True)):
        start, stop, first, last = map(int, ends)
        last = last if used is None else first + int(used[n])
        Q, K, V = q[start:stop], *(x[first:last].repeat_interleave(H // x.shape[1], 1) for x in (k, v))
        distances = torch.arange(len(K)) - torch.arange(len(K) - len(Q), len(K))[:, None]
        left, right = (float("inf") if side < 0 else side for side in window)
        s = torch.einsum("ihd,jhd->hij", Q, K) / D**0.5
        s = s.masked_fill((distances < -left) | (distances > right), -torch.inf)
        lse = s.logsumexp(-1)
        outs.append(torch.einsum("hij,jhd->ihd", (s - lse.nan_to_num(neginf=0)[..., None]).exp(), V))
        logs.append(lse)
    return torch.cat(outs), torch.cat(logs, 1)


def test_the_signature_is_that_of_torch():
    ours, theirs = (inspect.signature(x).parameters.values() for x in (varlen_attn, varlen.varlen_attn))
    assert [(x.name, x.default, x.kind) for x in ours] == [(x.name, x.default, x.kind) for x in theirs]


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (2, 0), (2, 1)], ids=str)
def test_results_and_gradients(window):
    arrays = inputs()
    results = varlen_attn(*arrays, CU_Q, CU_K, 7, 5, return_aux=LSE, window_size=window, enable_gqa=True)
    expected = formula(*arrays, window)
    finite = [[y.where(y.isfinite(), 0).square().sum() for y in each] for each in (results, expected)]
    torch.testing.assert_close(results, expected)
    gradients = [torch.autograd.grad(sum(each), arrays) for each in finite]
    torch.testing.assert_close(*gradients)


def test_keys_in_use():
    """They are read where they are, without a copy of those in use, and a NaN among the others is not."""
    arrays, used = inputs(), torch.tensor([4, 0, 2], dtype=torch.int32)
    arrays = [x.detach() for x in arrays]
    for x in arrays[1:]:
        x[[4, 5, 6, 7, 8, 11, 12, 13]] = torch.nan
    results = varlen_attn(
        *arrays, CU_Q, CU_K, 7, 5, return_aux=LSE, window_size=(-1, 0), enable_gqa=True, seqused_k=used
    )
    torch.testing.assert_close(results, formula(*arrays, (-1, 0), used))


def test_pages():
    q, pages = normal(4, H, D), normal(5, 2, 2, HK, D, seed=1)  # 5 pages of 2 keys
    bounds, used = torch.tensor([0, 1, 4], dtype=torch.int32), torch.tensor([3, 5], dtype=torch.int32)
    table = torch.tensor([[4, 1, -1], [3, 0, 2]], dtype=torch.int32)
    given = dict(window_size=(-1, 0), enable_gqa=True, seqused_k=used, block_table=table, num_splits=1)
    out = varlen_attn(q, *pages.unbind(1), bounds, None, 3, 6, **given)
    expected = cupy_flash.attention_with_kv_cache(
        q, *pages.unbind(1), cache_seqlens=used, block_table=table, cu_seqlens_q=bounds, max_seqlen_q=3, split_size=64
    )
    assert torch.equal(out, expected)


def test_a_compiled_call_is_one_graph():
    arrays = inputs(H)

    def call(*arrays):
        return varlen_attn(*arrays, CU_Q, CU_K, 7, 5, window_size=(-1, 0), scale=0.3)

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    pairs = [torch.autograd.grad(f(*arrays).square().sum(), arrays) for f in (call, compiled)]
    torch.testing.assert_close(*pairs)


REFUSED = {
    "heads": (dict(), ValueError, "4 heads of query, 2 of key and 2 of value need enable_gqa=True"),
    "heads of pages": (
        dict(block_table=torch.zeros(3, 1, dtype=torch.int32)),
        ValueError,
        "varlen_attn: 4 heads of query, 2 of key and 2 of value need enable_gqa=True",
    ),
    "aux": (dict(enable_gqa=True, return_aux=3), ValueError, "return_aux must be torch's AuxRequest, not int"),
    "splits": (dict(enable_gqa=True, num_splits=3), UnsupportedError, "num_splits=3 of packed keys"),
    "several reasons": (dict(scale=float("nan")), ValueError, "(?s)need enable_gqa=True.*scale must be finite"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refuses(case):
    options, error, message = REFUSED[case]
    with pytest.raises(error, match=message):
        varlen_attn(*(x.detach() for x in inputs()), CU_Q, CU_K, 7, 5, **options)
