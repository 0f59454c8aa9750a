"""FlashMLA's functions, and FlashAttention 3's qv, against the dense formula in float64."""

import numpy as np
import pytest
import torch

from cupy_flash import UnsupportedError
from cupy_flash.adapters.torch import (
    flash_attn_with_kvcache,
    flash_mla_sparse_fwd,
    flash_mla_with_kvcache,
    get_mla_metadata,
)

B, HQ, PAGE, PAGES, D, DV = 2, 4, 4, 6, 12, 8
LENGTHS = (9, 11)


def normal(seed, *shape):
    return torch.from_numpy(np.random.default_rng(seed).normal(size=shape))


def dense(q, rows, seen, scale=None, sink=None, columns=DV):
    """Return out (..., Hq, Dv), the largest score and lse (..., Hq) of queries (..., Hq, D) on rows (..., n, D)."""
    S = q @ rows.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    S = torch.where(seen[..., None, :], S, -torch.inf)
    top, lse = S.max(dim=-1).values, S.logsumexp(dim=-1)
    whole = lse if sink is None else torch.logaddexp(lse, sink)
    P = torch.exp(S - torch.where(whole == -torch.inf, torch.inf, whole)[..., None])
    # An unseen row may be NaN.
    out = P @ torch.where(seen[..., None], rows[..., :columns], 0)
    return out, top, torch.where(lse == -torch.inf, torch.inf, lse)


def paged(seed):
    """Return the pages of a cache with NaN past its lengths, a table with pages of no number after them, and rows."""
    rows = normal(seed, B, 3 * PAGE, D)
    table = torch.from_numpy(np.random.default_rng(1).permutation(PAGES)).to(torch.int32).view(B, 3)
    for b, length in enumerate(LENGTHS):
        rows[b, length:] = torch.nan
    pages = torch.empty(PAGES, PAGE, 1, D, dtype=rows.dtype)
    pages[table.flatten().long()] = rows.view(PAGES, PAGE, 1, D)
    return pages, table, rows


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("sink", [None, normal(5, HQ)], ids=["", "sink"])
def test_dense_rows_of_a_cache(causal, sink):
    pages, table, rows = paged(0)
    q, lengths = normal(1, B, 3, HQ, D), torch.tensor(LENGTHS, dtype=torch.int32)
    out, lse = flash_mla_with_kvcache(q, pages, table, lengths, DV, *get_mla_metadata(), causal=causal, attn_sink=sink)
    last = lengths[:, None] - (torch.tensor([2, 1, 0]) if causal else 0)
    seen = torch.arange(rows.shape[1]) < last.expand(B, 3)[..., None]
    keys = torch.where(rows.isnan(), 0, rows)[:, None].expand(B, 3, -1, D)
    expected, _, expected_lse = dense(q, keys, seen, sink=sink)
    torch.testing.assert_close(out, expected, rtol=1e-11, atol=1e-13)
    torch.testing.assert_close(lse, expected_lse.mT, rtol=1e-11, atol=1e-13)


def test_a_sequence_without_keys_has_lse_inf():
    pages, table, _ = paged(0)
    lengths = torch.tensor([0, 5], dtype=torch.int32)
    sink = torch.tensor([0.0, -torch.inf, torch.inf, 1.0])
    for given in (None, sink):
        out, lse = flash_mla_with_kvcache(normal(1, B, 1, HQ, D), pages, table, lengths, DV, None, attn_sink=given)
        assert not out[0].any() and (lse[0] == torch.inf).all() and lse[1].isfinite().all()
    assert not out[1, 0, 2].any() and out[1, 0, [0, 1, 3]].all()


def listed(seed, shape, rows, count=5):
    """Return lists of `count` of the rows, with entries of no row in some places."""
    lists = np.argsort(np.random.default_rng(seed).random((*shape, rows)), axis=-1)[..., :count].astype(np.int32)
    lists[..., 1] = np.where(lists[..., 1] % 2, -1, rows + 7)
    return torch.from_numpy(lists)


def rows_of(rows, lists, length=None):
    """Return the listed rows (..., n, D), and which of them the entries name."""
    seen = (lists >= 0) & (lists < len(rows))
    if length is not None:
        seen &= torch.arange(lists.shape[-1]) < length
    return rows[torch.where(seen, lists, 0).long()], seen


@pytest.mark.parametrize("options", ["", "sink", "length", "extra"])
def test_lists_of_places_in_a_cache(options):
    """The pages are a part of a larger array, which must not be copied whole."""
    pool = normal(0, PAGES, PAGE + 3, 1, D)
    pages, other, q = pool[:, :PAGE], normal(2, 3, 8, 1, D), normal(1, B, 3, HQ, D)
    lists, given, sink, length = listed(3, (B, 3), PAGES * PAGE), {}, None, None
    if options == "sink":
        given["attn_sink"] = sink = normal(5, HQ)
    if options == "length":
        given["topk_length"] = torch.tensor([0, 3], dtype=torch.int32)
        length = given["topk_length"][:, None, None]
    rows, seen = rows_of(pages.reshape(-1, D), lists, length)
    if options == "extra":
        extra = listed(4, (B, 3), 24, count=7)
        counts = torch.tensor([7, 2], dtype=torch.int32)
        given |= dict(extra_k_cache=other, extra_indices_in_kvcache=extra, extra_topk_length=counts)
        more = rows_of(other.reshape(-1, D), extra, counts[:, None, None])
        rows, seen = torch.cat((rows, more[0]), dim=2), torch.cat((seen, more[1]), dim=2)
    out, lse = flash_mla_with_kvcache(q, pages, None, None, DV, None, indices=lists, softmax_scale=0.4, **given)
    expected, _, expected_lse = dense(q, rows, seen, 0.4, sink)
    torch.testing.assert_close(out, expected, rtol=1e-11, atol=1e-13)
    torch.testing.assert_close(lse, expected_lse.mT, rtol=1e-11, atol=1e-13)


def float8_pages(seed, count, size):
    """Return pages in FlashMLA's float8 format, and the numbers they stand for."""
    rng = torch.Generator().manual_seed(seed)
    latent = torch.randn(count, size, 4, 128, generator=rng)
    rotary = torch.randn(count, size, 64, generator=rng).to(torch.bfloat16)
    scale = latent.abs().amax(dim=-1, keepdim=True) / 448
    codes = (latent / scale).to(torch.float8_e4m3fn)
    numbers = torch.cat(((codes.float() * scale).flatten(2), rotary.float()), dim=-1)
    parts = (
        codes.flatten(2).view(torch.uint8),
        scale.flatten(2).contiguous().view(torch.uint8),
        rotary.view(torch.uint8),
    )
    return torch.cat(parts, dim=-1)[:, :, None].view(torch.float8_e4m3fn), numbers


@pytest.mark.parametrize("dtype, error", [(torch.float32, 3e-6), (torch.bfloat16, 2e-2)])
def test_lists_of_rows_in_float8(dtype, error):
    pages, numbers = float8_pages(0, 3, 4)
    lists = listed(3, (B, 2), 12, count=6)
    q = normal(1, B, 2, HQ, 576).to(dtype)
    out, lse = flash_mla_with_kvcache(
        q, pages, None, None, 512, None, indices=lists, is_fp8_kvcache=True, softmax_scale=0.05
    )
    rows, seen = rows_of(numbers.view(-1, 576).double(), lists)
    expected, _, expected_lse = dense(q.double(), rows, seen, 0.05, columns=512)
    assert out.dtype == dtype and lse.dtype == torch.float32
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=error)
    torch.testing.assert_close(lse.double(), expected_lse.mT, rtol=0, atol=error)


@pytest.mark.parametrize("is_fp8", [False, True], ids=["", "float8"])
def test_lists_and_caches_may_be_empty(is_fp8):
    dim, columns = (576, 512) if is_fp8 else (D, DV)
    pages = float8_pages(0, 2, 3)[0] if is_fp8 else normal(0, 2, 3, 1, D)
    q, lists = normal(1, B, 1, HQ, dim), torch.zeros(B, 1, 2, dtype=torch.int32)
    for given in (dict(k_cache=pages, indices=lists[..., :0]), dict(k_cache=pages[:0], indices=lists)):
        out, lse = flash_mla_with_kvcache(
            q, block_table=None, cache_seqlens=None, head_dim_v=columns, tile_scheduler_metadata=None,
            is_fp8_kvcache=is_fp8, **given,
        )  # fmt: skip
        assert out.shape == (B, 1, HQ, columns) and not out.any() and (lse == torch.inf).all()


def test_a_second_cache_compiles_into_one_graph():
    pages, lists, q = normal(0, PAGES, PAGE, 1, D), listed(3, (B, 1), PAGES * PAGE), normal(1, B, 1, HQ, D)

    def step(q):
        given = dict(extra_k_cache=pages, extra_indices_in_kvcache=lists)
        return flash_mla_with_kvcache(q, pages, None, None, DV, None, indices=lists, **given)

    compiled = torch.compile(step, fullgraph=True, backend="eager")
    for x, y in zip(compiled(q), step(q), strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("heads", [1, 2])
def test_sparse_prefill(heads):
    q, kv = normal(1, 7, HQ, D), normal(0, 23, heads, D)
    lists, sink = listed(3, (7, heads), 23), normal(5, HQ)
    lengths = torch.tensor([0, 1, 2, 3, 4, 5, 5], dtype=torch.int32)
    result = flash_mla_sparse_fwd(q, kv, lists, 0.4, DV, sink, lengths)
    rows, seen = zip(*(rows_of(kv[:, head], lists[:, head], lengths[:, None]) for head in range(heads)), strict=True)
    of_heads = (q.view(7, heads, -1, D), torch.stack(rows, 1), torch.stack(seen, 1), 0.4, sink.view(heads, -1))
    for name, x, y in zip(("out", "max_logits", "lse"), result, dense(*of_heads), strict=True):
        torch.testing.assert_close(
            x, y.reshape(x.shape), rtol=1e-11, atol=1e-13, msg=lambda text, name=name: name + text
        )


def test_sparse_prefill_has_gradients():
    q, kv = normal(1, 7, HQ, D).requires_grad_(), normal(0, 23, 1, D).requires_grad_()
    lists = listed(3, (7, 1), 23)
    dout, sink = normal(4, 7, HQ, DV), normal(5, HQ)
    gradients = []
    for out in (
        flash_mla_sparse_fwd(q, kv, lists, 0.4, DV, sink)[0],
        dense(q, *rows_of(kv[:, 0], lists[:, 0]), 0.4, sink)[0],
    ):
        gradients.append(torch.autograd.grad(out, (q, kv), dout))
    for x, y in zip(*gradients, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-12)


REFUSED = {
    "needs block_table and cache_seqlens": dict(block_table=None),
    "is_fp8_kvcache without indices": dict(is_fp8_kvcache=True),
    "belong to calls with indices": dict(topk_length=torch.tensor(LENGTHS, dtype=torch.int32)),
    "causal=True with indices": dict(indices=listed(3, (B, 3), 24), causal=True),
    "must be given together": dict(indices=listed(3, (B, 3), 24), extra_k_cache=torch.zeros(1, 4, 1, D)),
    "extra_topk_length without extra_k_cache": dict(
        indices=listed(3, (B, 3), 24), extra_topk_length=torch.tensor(LENGTHS, dtype=torch.int32)
    ),
    "the format of DeepSeek V3.2": dict(indices=listed(3, (B, 3), 24), is_fp8_kvcache=True),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_flash_mla_refuses_is_refused_by_name(reason):
    pages, table, _ = paged(0)
    options = dict(block_table=table, cache_seqlens=torch.tensor(LENGTHS, dtype=torch.int32)) | REFUSED[reason]
    with pytest.raises((ValueError, UnsupportedError), match=reason):
        flash_mla_with_kvcache(normal(1, B, 3, HQ, D), pages, head_dim_v=DV, tile_scheduler_metadata=None, **options)


INT32, LISTS = dict(dtype=torch.int32), torch.zeros(B, 3, 5, dtype=torch.int32)
WRONG = {
    r"attn_sink must be \(Hq = 4\), not \(1,\)": (ValueError, dict(attn_sink=torch.zeros(1))),
    "attn_sink must be floating, not torch.int32": (TypeError, dict(attn_sink=torch.zeros(HQ, **INT32))),
    "attn_sink must be a tensor": (TypeError, dict(attn_sink=np.zeros(HQ))),
    r"indices must be \(B = 2, Sq = 3, topk\), not \(3, 2, 5\)": (ValueError, dict(indices=LISTS.transpose(0, 1))),
    "indices must be int32, not torch.int64": (TypeError, dict(indices=LISTS.long())),
    r"2 requirements(.|\n)*topk_length must be \(B = 2\), not \(1,\)(.|\n)*not torch.int64": (
        TypeError, dict(indices=LISTS, topk_length=torch.tensor([3])),
    ),
}  # fmt: skip


@pytest.mark.parametrize("reason", WRONG)
def test_arrays_beside_q_are_not_broadcast(reason):
    pages, table, _ = paged(0)
    error, given = WRONG[reason]
    options = dict(block_table=table, cache_seqlens=torch.tensor(LENGTHS, dtype=torch.int32)) | given
    with pytest.raises(error, match=reason):
        flash_mla_with_kvcache(normal(1, B, 3, HQ, D), pages, head_dim_v=DV, tile_scheduler_metadata=None, **options)


@pytest.mark.parametrize("appended", [0, 2])
def test_qv_is_a_part_of_q(appended):
    """FlashAttention 3's form of MLA: scores are q k + qv v, where v and k are columns of one row."""
    pages, table, rows = paged(0)
    q, new = normal(1, B, 3, HQ, D), normal(2, B, 3, 1, D)[:, :appended]
    length = torch.tensor([9, 6], dtype=torch.int32)
    given = dict(k=new[..., DV:], v=new[..., :DV]) if appended else {}
    before = pages.clone()
    out, lse = flash_attn_with_kvcache(
        q[..., DV:], pages[..., DV:], pages[..., :DV], qv=q[..., :DV], page_table=table, cache_seqlens=length,
        causal=True, return_softmax_lse=True, **given,
    )  # fmt: skip
    for b in range(B):
        rows[b, length[b] : length[b] + appended] = new[b, :, 0]
    last = length[:, None] + appended - torch.tensor([2, 1, 0])
    seen = torch.arange(rows.shape[1]) < last[..., None]
    keys = torch.where(rows.isnan(), 0, rows)[:, None].expand(B, 3, -1, D)
    expected, _, expected_lse = dense(q, keys, seen)
    torch.testing.assert_close(out, expected, rtol=1e-11, atol=1e-13)
    torch.testing.assert_close(lse, expected_lse.mT, rtol=1e-11, atol=1e-13)
    changed = (pages != before) & ~(pages.isnan() & before.isnan())
    assert changed.any(dim=-1).sum() == B * appended


@pytest.mark.parametrize("copied", ["q", "qv", "k_cache", "v_cache", "swapped"])
def test_qv_of_arrays_that_are_not_neighbours_is_refused(copied):
    pages, table, _ = paged(0)
    q = normal(1, B, 3, HQ, D)
    given = {"q": q[..., DV:], "qv": q[..., :DV], "k_cache": pages[..., DV:], "v_cache": pages[..., :DV]}
    if copied == "swapped":
        given |= {"q": q[..., :DV], "qv": q[..., DV:]}
    else:
        given[copied] = given[copied].clone()
    with pytest.raises(UnsupportedError, match="neighbouring columns of one array"):
        flash_attn_with_kvcache(**given, page_table=table, cache_seqlens=torch.tensor(LENGTHS, dtype=torch.int32))


ROWS = torch.zeros(B, 1, 1, D, dtype=torch.float64)
WRONG_ROWS = {
    "k and v are appended together": (ValueError, dict(k=ROWS[..., DV:])),
    "the last axes of k must be": (ValueError, dict(k=ROWS[..., :DV], v=ROWS[..., DV:])),
    "k and v must agree": (ValueError, dict(k=ROWS[..., DV:], v=ROWS[:1, ..., :DV])),
    "v must have the dtype of v_cache": (TypeError, dict(k=ROWS[..., DV:], v=ROWS[..., :DV].half())),
    "k must be a tensor": (TypeError, dict(k=ROWS[..., DV:].numpy(), v=ROWS[..., :DV])),
}


@pytest.mark.parametrize("reason", WRONG_ROWS)
def test_rows_that_are_no_columns_of_the_caches_change_nothing(reason):
    pages, q, (error, rows) = normal(0, B, 8, 1, D), normal(1, B, 1, HQ, D), WRONG_ROWS[reason]
    before = pages.clone()
    with pytest.raises(error, match=reason):
        flash_attn_with_kvcache(q[..., DV:], pages[..., DV:], pages[..., :DV], qv=q[..., :DV], cache_seqlens=2, **rows)
    assert torch.equal(pages, before)


@pytest.mark.parametrize("name", ["rotary_cos", "k_descale", "v_descale"])
def test_options_that_do_not_go_with_qv_are_refused_by_name(name):
    pages, table, _ = paged(0)
    q = normal(1, B, 3, HQ, D)
    with pytest.raises(UnsupportedError, match="rotary, k_descale or v_descale with qv is not supported"):
        flash_attn_with_kvcache(
            q[..., DV:], pages[..., DV:], pages[..., :DV], qv=q[..., :DV], page_table=table,
            cache_seqlens=torch.tensor(LENGTHS, dtype=torch.int32), **{name: torch.zeros(1)},
        )  # fmt: skip
