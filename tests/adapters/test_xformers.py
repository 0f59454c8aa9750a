"""xFormers' functions on every class of mask, against the formula on all scores of each sequence.

xFormers is not installed here: its classes are recognised by their names, and objects with these names and attributes
stand for them.
"""

import inspect
from itertools import accumulate, pairwise
from types import SimpleNamespace

import pytest
import torch

import cupy_flash
from cupy_flash.adapters import xformers
from cupy_flash.adapters.xformers import CAUSAL, memory_efficient_attention

H, K, KV = 4, 8, 6
Q_LENGTHS, KV_LENGTHS, PADDING, PAGE = [3, 1, 6], [5, 7, 6], 8, 5
LEFT, RIGHT, WINDOW = 2, 1, 3


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def made(name, **attributes):
    """An object of a class with a name of xFormers."""
    return type(name, (), attributes)()


def int32(numbers):
    return torch.tensor(numbers, dtype=torch.int32)


def sequences(starts, lengths, **more):
    known = dict(seqstart=int32(starts), seqstart_py=starts, max_seqlen=max(lengths), min_seqlen=min(lengths))
    return SimpleNamespace(**known, **more)


def packed(lengths):
    return sequences([0, *accumulate(lengths)], lengths)


def with_lengths(starts, lengths, ends, **more):
    return sequences(starts, lengths, seqlen=int32(ends), seqlen_py=ends, **more)


TABLE = [[5, 2], [0, 3], [1, 4]]  # of pages
OFFSETS = [2, 0, 1]  # the first key of each sequence in its pages, if keys have gaps


def keys_of(name):
    """(attributes of a mask, the rows of key of each sequence, the number of rows of key)."""
    lengths = KV_LENGTHS
    if name.startswith("Paged"):
        capacity = len(TABLE[0]) * PAGE
        rows = [[page * PAGE + j for page in pages for j in range(PAGE)] for pages in TABLE]
        attributes = dict(block_tables=int32(TABLE), page_size=PAGE)
        starts = OFFSETS if "Gappy" in name else [0, 0, 0]
        if "Gappy" in name:
            ends = [start + n for start, n in zip(starts, lengths, strict=True)]
            attributes["k_seqinfo"] = with_lengths([*starts, -1], lengths, ends)
        else:
            bounds = list(range(0, 3 * capacity + 1, capacity))
            attributes["k_seqinfo"] = with_lengths(bounds, lengths, lengths, padding=capacity)
        return attributes, [r[i : i + n] for r, i, n in zip(rows, starts, lengths, strict=True)], 3 * capacity
    if "Padded" in name or "Gappy" in name:
        starts = [0, PADDING, 2 * PADDING]
        if "Gappy" in name:
            starts = [start + offset for start, offset in zip(starts, OFFSETS, strict=True)]
            info = with_lengths([*starts, 3 * PADDING], lengths, lengths)
        else:
            info = with_lengths([*starts, 3 * PADDING], lengths, lengths, padding=PADDING)
        rows = [list(range(start, start + n)) for start, n in zip(starts, lengths, strict=True)]
        return dict(k_seqinfo=info), rows, 3 * PADDING
    bounds = [0, *accumulate(lengths)]
    return dict(k_seqinfo=packed(lengths)), [list(range(*pair)) for pair in pairwise(bounds)], bounds[-1]


def window_of(name):
    """The attributes of a mask with a window."""
    if "Local" not in name:
        return {}
    return (
        dict(_window_size=WINDOW)
        if "Causal" in name or "Triangular" in name
        else dict(window_left=LEFT, window_right=RIGHT)
    )


def visible(name, q_len, kv_len):
    """The mask of one sequence, from xFormers' description of the class."""
    i, j = torch.arange(q_len)[:, None], torch.arange(kv_len)
    from_top_left = name in (
        "LowerTriangularMask", "LowerTriangularMaskWithTensorBias", "BlockDiagonalCausalMask",
        "BlockDiagonalCausalLocalAttentionMask",
    )  # fmt: skip
    diagonal = i if from_top_left else i + kv_len - q_len
    seen = torch.ones(q_len, kv_len, dtype=torch.bool)
    if "Causal" in name or "Triangular" in name:
        seen = j <= diagonal
        if "Local" in name:
            seen &= j > diagonal - WINDOW
    elif "Local" in name:
        seen = (diagonal - LEFT <= j) & (j <= diagonal + RIGHT)
    return seen


def formula(q, k, v, seen, scale=None, bias=0):
    """(out, lse) of (B, M, H, K) tensors; q has a multiple of the heads of k."""
    k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], 2) for x in (k, v))
    score = torch.einsum("bihd,bjhd->bhij", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale) + bias
    score = score.masked_fill(~seen, -torch.inf)
    lse = score.logsumexp(-1)
    p = (score - torch.where(lse == -torch.inf, 0.0, lse)[..., None]).exp()
    return torch.einsum("bhij,bjhd->bihd", p, v), lse


def by_sequence(name, q, k, v, rows, **options):
    """`formula` of each sequence, concatenated."""
    bounds = [0, *accumulate(Q_LENGTHS)]
    parts = [
        formula(q[:, start:end], k[:, index], v[:, index], visible(name, end - start, len(index)), **options)
        for (start, end), index in zip(pairwise(bounds), rows, strict=True)
    ]
    return tuple(torch.cat(results, dim) for results, dim in zip(zip(*parts, strict=True), (1, 2), strict=True))


def assert_close(actual, expected):
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-11)


def gradients(out, sources):
    return torch.autograd.grad((out * normal(*out.shape, seed=9)).sum(), sources, retain_graph=True)


DENSE = [name for name in CAUSAL if "Block" not in name]
PACKED = [name for name in CAUSAL if "Block" in name]
CACHED = [name for name in PACKED if "Padded" in name or "Paged" in name]
PARAMETERS = "query, key, value, attn_bias=None, p=0.0, scale=None, *, op=None"


@pytest.mark.parametrize(
    ("name", "parameters"),
    {
        "memory_efficient_attention": f"{PARAMETERS}, output_dtype=None",
        "memory_efficient_attention_forward": f"{PARAMETERS}, output_dtype=None",
        "memory_efficient_attention_forward_requires_grad": f"{PARAMETERS}, output_dtype=None",
        "memory_efficient_attention_partial": f"{PARAMETERS}, output_dtype=None",
        "memory_efficient_attention_backward": f"grad, output, lse, {PARAMETERS}",
        "merge_attentions": "attn_split, lse_split, write_lse=True, output_dtype=None",
    }.items(),
)
def test_signatures(name, parameters):
    """xFormers 0.0.35 has these; today they are those of mslk.attention.fmha."""
    given = inspect.signature(getattr(xformers, name)).parameters.values()
    bare = [parameter.replace(annotation=inspect.Parameter.empty) for parameter in given]
    assert str(inspect.Signature(bare)) == f"({parameters})"


@pytest.mark.parametrize("name", DENSE)
@pytest.mark.parametrize("lengths", [(7, 7), (5, 8), (8, 5)], ids=str)
def test_masks_of_padded_batches(name, lengths):
    q, k, v = normal(2, lengths[0], H, K), normal(2, lengths[1], H, K, seed=1), normal(2, lengths[1], H, KV, seed=2)
    sources = [x.requires_grad_() for x in (q, k, v)]
    attributes, bias = window_of(name), 0
    if name == "LowerTriangularMaskWithTensorBias":
        bias = normal(2, H, *lengths, seed=3).requires_grad_()
        attributes["_bias"] = bias
        sources.append(bias)
    attn_bias = made(name, **attributes)
    out = memory_efficient_attention(q, k, v, attn_bias, scale=0.4)
    expected, expected_lse = formula(q, k, v, visible(name, *lengths), 0.4, bias)
    assert_close([out], [expected])
    assert_close(gradients(out, sources), gradients(expected, sources))
    results = xformers.memory_efficient_attention_forward_requires_grad(q, k, v, attn_bias, scale=0.4)
    assert_close(results, (expected, expected_lse))


@pytest.mark.parametrize("grouped", [False, True], ids=["heads", "groups"])
@pytest.mark.parametrize("name", PACKED)
def test_masks_of_sequences(name, grouped):
    attributes, rows, keys = keys_of(name)
    attn_bias = made(name, q_seqinfo=packed(Q_LENGTHS), **attributes, **window_of(name))
    shape = (2, 2) if grouped else (H,)
    q = normal(1, sum(Q_LENGTHS), *shape, K)
    k, v = (normal(1, keys, shape[0], K, seed=seed) for seed in (1, 2))
    sources = [x.requires_grad_(name not in CACHED) for x in (q, k, v)]
    given_k, given_v = (x[:, :, :, None].expand(-1, -1, -1, 2, -1) if grouped else x for x in (k, v))
    out, lse = xformers.memory_efficient_attention_partial(q, given_k, given_v, attn_bias, scale=0.3)
    expected, expected_lse = by_sequence(name, q.reshape(1, -1, H, K), k, v, rows, scale=0.3)
    assert_close([out, lse], [expected.reshape(out.shape), expected_lse.reshape(lse.shape)])
    assert lse.shape == (1, *shape, sum(Q_LENGTHS))
    if name not in CACHED:
        assert_close(gradients(out, sources), gradients(expected.reshape(out.shape), sources))


@pytest.mark.parametrize("name", [None, *DENSE, *(x for x in PACKED if "Keys" not in x)])
@pytest.mark.parametrize("padding", [0, 5], ids=["exact-lse", "padded-lse"])
def test_backward(name, padding):
    is_packed = name in PACKED
    attributes, _, keys = keys_of(name) if is_packed else ({}, None, 7)
    if is_packed:
        attributes["q_seqinfo"] = packed(Q_LENGTHS)
    batch, queries = (1, sum(Q_LENGTHS)) if is_packed else (2, 6)
    if name == "LowerTriangularMaskWithTensorBias":
        attributes["_bias"] = normal(batch, H, queries, keys, seed=3)
    attn_bias = name and made(name, **attributes, **window_of(name))
    q, k, v = normal(batch, queries, H, K), normal(batch, keys, H, K, seed=1), normal(batch, keys, H, KV, seed=2)
    out, lse = xformers.memory_efficient_attention_forward_requires_grad(q, k, v, attn_bias, scale=0.3)
    if padding and is_packed:  # a row of its own for each sequence
        bounds = [0, *accumulate(Q_LENGTHS)]
        longest = max(Q_LENGTHS) + padding
        each = [lse[0, :, start:end] for start, end in pairwise(bounds)]
        lse = torch.stack([torch.nn.functional.pad(x, (0, longest - x.shape[1]), value=torch.inf) for x in each])
    elif padding:
        lse = torch.nn.functional.pad(lse, (0, padding), value=torch.inf)
    grad = normal(*out.shape, seed=9)
    actual = xformers.memory_efficient_attention_backward(grad, out, lse, q, k, v, attn_bias, scale=0.3)
    sources = [x.requires_grad_() for x in (q, k, v)]
    assert_close(actual, gradients(memory_efficient_attention(q, k, v, attn_bias, scale=0.3), sources))


def test_three_and_five_dimensions():
    q, k, v = normal(2, 5, H, K), normal(2, 7, H, K, seed=1), normal(2, 7, H, KV, seed=2)
    bias = normal(2, H, 5, 7, seed=3)
    expected = memory_efficient_attention(q, k, v, bias)
    assert_close([expected], [formula(q, k, v, torch.ones(5, 7, dtype=torch.bool), bias=bias)[0]])
    one = memory_efficient_attention(q[:, :, 1], k[:, :, 1], v[:, :, 1], bias[:, 1])
    assert_close([one], [expected[:, :, 1]])
    five = (x.unflatten(2, (2, 2)) for x in (q, k, v))
    grouped = xformers.memory_efficient_attention_forward(*five, bias.unflatten(1, (2, 2)))
    assert_close([grouped], [expected.unflatten(2, (2, 2))])


def test_gradients_of_heads_that_are_expanded():
    """A gradient reaches each expanded head where it is a leaf, and one backward has it for every head."""
    q = normal(2, 5, 2, 3, K)
    k, v = (normal(2, 7, 2, 1, K, seed=seed).expand(-1, -1, -1, 3, -1) for seed in (1, 2))
    alone = [x.contiguous().requires_grad_() for x in (q, k, v)]
    expected = gradients(memory_efficient_attention(*alone), alone)
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    assert leaves[1].stride(3) == 0
    assert_close(gradients(memory_efficient_attention(*leaves), leaves), expected)
    out, lse = xformers.memory_efficient_attention_forward_requires_grad(q, k, v)
    grad = normal(*out.shape, seed=9)
    assert_close(xformers.memory_efficient_attention_backward(grad, out, lse, q, k, v), expected)


def test_parts_merge():
    q, k, v = normal(2, 5, H, K), normal(2, 9, H, K, seed=1), normal(2, 9, H, KV, seed=2)
    sources = [x.requires_grad_() for x in (q, k, v)]
    hidden = torch.zeros(2, H, 5, 9, dtype=torch.float64)
    hidden[:, :, 1, :4] = hidden[:, :, 2] = -torch.inf  # one part of a row, and all parts of another
    parts = [
        xformers.memory_efficient_attention_partial(q, k[:, part], v[:, part], hidden[..., part])
        for part in (slice(0, 4), slice(4, 6), slice(6, 9))
    ]
    outs, lses = zip(*parts, strict=True)
    expected = xformers.memory_efficient_attention_partial(q, k, v, hidden)
    for given in ((outs, lses), (torch.stack(outs), torch.stack(lses))):
        merged = xformers.merge_attentions(*given)
        assert_close(merged, expected)
        assert_close(gradients(merged[0], sources), gradients(expected[0], sources))
    groups = [out.unflatten(2, (2, 2)) for out in outs], [lse.unflatten(1, (2, 2)) for lse in lses]
    out, lse = xformers.merge_attentions(*groups, write_lse=False, output_dtype=torch.float32)
    assert lse is None and out.dtype == torch.float32
    torch.testing.assert_close(out, expected[0].unflatten(2, (2, 2)).float())
    with pytest.raises(ValueError, match="3 outs and 2 lses"):
        xformers.merge_attentions(outs, lses[:2])
    with pytest.raises(ValueError, match=r"all outs must be \(B, M, H, K\)"):
        xformers.merge_attentions(outs, [lse[..., 1:] for lse in lses])


def test_dropout_scale_and_dtype():
    q, k, v = (normal(1, 6, H, K, seed=seed).float() for seed in range(3))
    torch.manual_seed(0)
    out = memory_efficient_attention(q, k, v, p=0.5, scale=0.2, op=object(), output_dtype=torch.float64)
    torch.manual_seed(0)
    expected = cupy_flash.attention(q, k, v, dropout=0.5, scale=0.2)
    assert out.dtype == torch.float64 and torch.equal(out.float(), expected)


def test_what_is_refused():
    q = normal(1, sum(Q_LENGTHS), H, K)
    with pytest.raises(
        cupy_flash.UnsupportedError, match=r"attn_bias is a SomeMask; those served .* BlockDiagonalMask"
    ):
        memory_efficient_attention(q, q, q, made("SomeMask"))
    for function in (
        xformers.memory_efficient_attention_partial, xformers.memory_efficient_attention_forward_requires_grad
    ):  # fmt: skip
        with pytest.raises(cupy_flash.UnsupportedError, match=f"{function.__name__}: dropout needs autograd"):
            function(q, q, q, p=0.1)
    name = "BlockDiagonalPaddedKeysMask"
    attributes, _, keys = keys_of(name)
    mask, k = made(name, q_seqinfo=packed(Q_LENGTHS), **attributes), normal(1, keys, H, K)
    with pytest.raises(cupy_flash.UnsupportedError, match=f"dropout with {name}, which reads a KV cache"):
        memory_efficient_attention(q, k, k, mask, p=0.1)
    with pytest.raises(ValueError, match="q require grad, and a KV cache records no gradients"):
        memory_efficient_attention(q.clone().requires_grad_(), k, k, mask)
    with pytest.raises(cupy_flash.UnsupportedError, match=f"{name} has no backward"):
        xformers.memory_efficient_attention_backward(q, q, q[..., 0], q, k, k, mask)


def test_one_error_has_all_reasons():
    q = normal(2, 5, H, K)
    with pytest.raises(ValueError, match=r"must all be .*not of \[4, 3, 4\] dimensions"):
        memory_efficient_attention(q, q[0], q)
    with pytest.raises(TypeError, match="query, key and value must be torch tensors"):
        memory_efficient_attention(q, q.numpy(), q)
    five = q.unflatten(2, (2, 2))
    with pytest.raises(ValueError, match="3 requirements are not met") as error:
        memory_efficient_attention(five, five[:, :, :1], five, scale=torch.inf)
    assert "the 2 groups of 2 heads of query" in str(error.value) and "scale must" in str(error.value)
    attributes, _, keys = keys_of("BlockDiagonalMask")
    mask = made("BlockDiagonalMask", q_seqinfo=packed(Q_LENGTHS), **attributes)
    with pytest.raises(ValueError, match="3 requirements are not met") as error:
        memory_efficient_attention(q, q, q, mask)
    reasons = (f"has {sum(Q_LENGTHS)} rows of query, which has 5", f"has {keys} rows of key", "needs a batch of 1")
    assert all(reason in str(error.value) for reason in reasons)
    out, lse = xformers.memory_efficient_attention_forward_requires_grad(q, q, q)
    with pytest.raises(ValueError, match="grad, output and lse must be for query"):
        xformers.memory_efficient_attention_backward(out[:1], out, lse, q, q, q)
