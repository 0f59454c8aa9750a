"""flex_attention has the signature and the results of torch's, and gradients, which torch lacks on a CPU."""

import inspect

import pytest
import torch
from torch.nn.attention import flex_attention as of_torch
from torch.nn.attention.experimental._paged_attention import PagedAttention
from torch.nn.attention.flex_attention import AuxOutput, AuxRequest, BlockMask, create_block_mask, create_mask

import cupy_flash
from cupy_flash.adapters.torch import flex_attention

B, HEADS, L, S, E = 2, 2, 130, 150, 8


@pytest.fixture(autouse=True)
def _torch_runs_its_formula(monkeypatch):
    """torch's flex_attention then runs as it is written, instead of being compiled."""
    monkeypatch.setattr(of_torch, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)


def normal(*shape, seed=0, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def inputs(kv_heads=HEADS, q_len=L, dim_v=E, kv_batch=B):
    return normal(B, HEADS, q_len, E), normal(kv_batch, kv_heads, S, E, seed=1), normal(kv_batch, kv_heads, S, dim_v)


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


IDS = torch.arange(B * S).reshape(B, S) // 37


def document(b, h, q_idx, kv_idx):
    return (IDS[b, q_idx] == IDS[b, kv_idx]) & (q_idx - kv_idx >= 10 * h)


def sees_nothing(b, h, q_idx, kv_idx):
    return q_idx < 0


def masked(mask_mod, *sizes, q_len=L, **options):
    return create_block_mask(mask_mod, *(sizes or (None, None)), q_len, S, device="cpu", **options)


def table_without_a_function():
    """Query block 0 sees key block 1 in part, which is all of it, and query block 1 sees key block 0 in full."""
    counts, indices = torch.tensor([[[1, 0]]], dtype=torch.int32), torch.tensor([[[[1, 0], [0, 1]]]], dtype=torch.int32)
    full = torch.tensor([[[0, 1]]], dtype=torch.int32), torch.tensor([[[[1, 0], [0, 1]]]], dtype=torch.int32)
    return BlockMask.from_kv_blocks(counts, indices, *full, seq_lengths=(L, S))


CASES = {  # (arguments of `inputs`, the BlockMask, options)
    "plain": ({}, None, {}),
    "scale": ({}, None, dict(scale=-0.3)),
    "other-value-dimension": (dict(dim_v=3), None, {}),
    "one-head-of-keys": (dict(kv_heads=1), None, dict(enable_gqa=True)),
    "grouped": (dict(kv_heads=1), lambda: masked(document, B, HEADS), dict(enable_gqa=True)),
    "causal": ({}, lambda: masked(causal), {}),
    "no-full-blocks": ({}, lambda: masked(causal, separate_full_blocks=False), {}),
    "small-blocks": ({}, lambda: masked(causal, 1, HEADS, BLOCK_SIZE=(32, 16)), {}),
    "document": ({}, lambda: masked(document, B, HEADS), {}),
    "rows-that-see-nothing": ({}, lambda: masked(sees_nothing), {}),
    "adjusted": ({}, lambda: create_block_mask(causal, None, None, 256, 256, device="cpu")._adjust(L, S), {}),
    "whole": ({}, lambda: of_torch._create_empty_block_mask(*inputs()[:2]), {}),
    "keys-shared-by-sequences": (dict(kv_batch=1), lambda: masked(document, B, HEADS), {}),
    "decode": (dict(q_len=1, kv_heads=1), lambda: masked(causal, q_len=1), dict(enable_gqa=True)),
}


def dense(query, key, value, visible, score_mod=None, scale=None, enable_gqa=False):
    """The formula on all scores: (out, lse); `visible` broadcasts to (B, HEADS, L, S)."""
    key, value = (x.repeat_interleave(HEADS // x.shape[1], 1) for x in (key, value))
    score = query @ key.mT * (E**-0.5 if scale is None else scale)
    if score_mod is not None:
        h, b = torch.arange(HEADS)[:, None, None], torch.arange(B)[:, None, None, None]
        score = score_mod(score, b, h, torch.arange(query.shape[2])[:, None], torch.arange(S))
    score = score.masked_fill(~visible, -torch.inf)
    lse = score.logsumexp(-1)
    exact = torch.where(lse == -torch.inf, 0.0, lse)
    return (score - exact[..., None]).exp() @ value, lse


def assert_close(actual, expected):
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-11)


def gradients(results, sources):
    """Gradients of a sum over out and over lse, of which rows without keys are infinite and have none."""
    out, lse = results
    terms = [(x * normal(*x.shape, seed=7)) for x in (out, torch.where(lse.isinf(), 0.0, lse))]
    return torch.autograd.grad(sum(x.sum() for x in terms), sources)


def test_signature():
    assert inspect.signature(flex_attention) == inspect.signature(of_torch.flex_attention)


@pytest.mark.parametrize("case", CASES)
def test_results_and_gradients(case):
    arguments, mask, options = CASES[case]
    tensors = inputs(**arguments)
    block_mask = mask and mask()
    expected, aux = of_torch.flex_attention(*tensors, block_mask=block_mask, return_aux=AuxRequest(lse=True), **options)
    results = flex_attention(*tensors, block_mask=block_mask, return_lse=True, **options)
    assert_close(results, (expected, aux.lse))

    sources = [x.requires_grad_() for x in tensors]
    visible = torch.ones((), dtype=torch.bool)
    if block_mask is not None:
        visible = create_mask(block_mask.mask_mod, B, HEADS, tensors[0].shape[2], S, device="cpu")
    formula = dense(*sources, visible, **options)
    assert_close(formula, results)
    results = flex_attention(*tensors, block_mask=block_mask, return_lse=True, **options)
    assert_close(gradients(results, sources), gradients(formula, sources))


def test_a_table_alone_is_a_mask():
    """torch's formula does not read the table of a BlockMask; its kernels do."""
    visible = torch.zeros(L, S, dtype=torch.bool)
    visible[:128, 128:] = visible[128:, :128] = True
    tensors = inputs()
    results = flex_attention(*tensors, block_mask=table_without_a_function(), return_lse=True)
    assert_close(results, dense(*tensors, visible))


class Bias(torch.nn.Module):
    """A learned score_mod that reads one tensor twice, which torch's kernels refuse to differentiate."""

    def __init__(self):
        super().__init__()
        self.table = torch.nn.Parameter(normal(HEADS, L + S))
        self.slope = torch.nn.Parameter(torch.tensor(0.7, dtype=torch.float64))
        self.register_buffer("of_key", normal(B, S))

    def forward(self, score, b, h, q_idx, kv_idx):
        near = self.table[h, q_idx - kv_idx + S] - 0.1 * self.table[h, kv_idx]
        return 5 * torch.tanh((score * self.slope + near) / 5) + self.of_key[b, kv_idx]


@pytest.mark.parametrize("mask", [None, document], ids=["all-keys", "document"])
def test_gradients_of_captured_tensors(mask):
    bias, tensors = Bias(), inputs()
    options = dict(block_mask=mask and masked(mask, B, HEADS), score_mod=bias)
    results = flex_attention(*tensors, return_lse=True, **options)
    with torch.no_grad():
        expected, aux = of_torch.flex_attention(*tensors, return_aux=AuxRequest(lse=True), **options)
    assert_close(results, (expected, aux.lse))
    sources = [*(x.requires_grad_() for x in tensors), *bias.parameters()]
    visible = torch.ones((), dtype=torch.bool)
    if mask is not None:
        visible = create_mask(mask, B, HEADS, L, S, device="cpu")
    actual = gradients(flex_attention(*tensors, return_lse=True, **options), sources)
    assert_close(actual, gradients(dense(*tensors, visible, bias), sources))


def test_auxiliary_results():
    tensors = inputs()
    out, lse = flex_attention(*tensors, return_lse=True)
    for request in (AuxRequest(), AuxRequest(lse=True)):
        again, aux = flex_attention(*tensors, return_aux=request)
        assert torch.equal(again, out) and type(aux) is AuxOutput
        assert aux.max_scores is None and (aux.lse is None) == (not request.lse)
    assert torch.equal(aux.lse, lse)
    assert torch.equal(flex_attention(*tensors), out)


@pytest.mark.parametrize("order", [(0, 1, 2), (0, 2, 1), (2, 1, 0)], ids=str)
def test_the_result_has_the_layout_of_query(order):
    query, key, value = inputs()
    query = query.permute(*order, 3).contiguous().permute(*map(order.index, range(3)), 3)
    assert flex_attention(query, key, value).stride() == of_torch.flex_attention(query, key, value).stride()


def test_paged_keys():
    """torch's PagedAttention makes the BlockMask and score_mod of pages that all sequences share."""
    page, pages = 16, 30
    generator = torch.Generator().manual_seed(0)
    paged = PagedAttention(pages, page, B, device="cpu")
    paged.physical_to_logical.fill_(-1)
    for length in (40, 90, S):  # the pages of the sequences alternate
        for b in range(B):
            paged.reserve(torch.tensor(b), torch.tensor(length))
    query, key, value = inputs()
    positions = torch.arange(S).expand(B, S)
    key_cache, value_cache = (torch.randn(1, HEADS, page * pages, E, generator=generator).double() for _ in range(2))
    paged.assign(torch.arange(B), positions, key, value, key_cache, value_cache)
    logical = masked(document, B, 1, BLOCK_SIZE=(64, page))
    score_mod = lambda score, b, h, q_idx, kv_idx: score - 0.125 * (h + 1) * (q_idx - kv_idx).abs()  # noqa: E731
    physical = paged.convert_logical_block_mask(logical)
    out = flex_attention(query, key_cache, value_cache, paged.get_score_mod(score_mod), physical)
    assert_close([out], [flex_attention(query, key, value, score_mod, logical)])
    with torch.no_grad():
        assert_close([out], [of_torch.flex_attention(query, key, value, score_mod, logical)])


def test_options_of_the_kernels_of_torch_are_ignored():
    tensors = inputs()
    options = {"BLOCK_M": 64, "fwd_BLOCK_N": 32, "bwd_BLOCK_M1": 16, "PRESCALE_QK": True, "BACKEND": "AUTO"}
    assert torch.equal(flex_attention(*tensors, kernel_options=options), flex_attention(*tensors))


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (dict(return_aux=AuxRequest(max_scores=True)), "max_scores: statistics of the scores are not implemented yet"),
        (dict(kernel_options={"BACKEND": "FLASH"}), "kernel_options ask for torch's BACKEND 'FLASH'"),
    ],
)
def test_what_is_not_supported(options, reason):
    with pytest.raises(cupy_flash.UnsupportedError, match=reason):
        flex_attention(*inputs(), **options)


def test_one_error_has_all_reasons():
    query, key, value = inputs(kv_heads=1)
    block_mask = create_block_mask(causal, 3, None, L, S + 1, device="cpu")
    options = dict(
        block_mask=block_mask, return_lse=True, return_aux=AuxRequest(), kernel_options={"BLOCKM": 64}, scale=torch.inf
    )
    with pytest.raises(ValueError, match="flex_attention: 6 requirements are not met") as error:
        flex_attention(query, key[..., :3], value, **options)
    for reason in (
        "return_lse and return_aux cannot both be given", "kernel_options has no BLOCKM",
        "2 heads of query, 1 of key and 1 of value need enable_gqa=True",
        f"block_mask must be made for (2, 2, {L}, {S}), not for (3, 1, {L}, {S + 1})",
        "q and k must have one head dimension, not 8 and 3", "scale must be",
    ):  # fmt: skip
        assert reason in str(error.value)
    with pytest.raises(TypeError, match="return_aux must be torch's AuxRequest, not dict") as error:
        flex_attention(query[0], key.tolist(), value, block_mask=causal, return_aux={})
    for reason in ("block_mask must be torch's BlockMask, not function", "k must be"):
        assert reason in str(error.value)


def test_nested_tensors_are_refused():
    nested = torch.nested.nested_tensor([normal(5, HEADS, E), normal(7, HEADS, E)], layout=torch.jagged).transpose(1, 2)
    with pytest.raises(TypeError, match="q .*NestedTensor.*wraps other tensors and has no memory"):
        flex_attention(nested, nested, nested)


def test_a_sliced_mask_is_refused_with_the_words_of_torch():
    with pytest.raises(RuntimeError, match="Cannot use mask_mod from a sliced BlockMask"):
        flex_attention(*inputs(), block_mask=masked(causal)[:, :])


# raised by Dynamo after a graph break
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_compiled():
    """torch.compile breaks the graph at functions, which are traced outside, and keeps a Mod in it."""
    tensors, bias = [x.requires_grad_() for x in inputs()], Bias()
    block_mask = masked(document, B, HEADS)
    expected = flex_attention(*tensors, bias, block_mask, return_lse=True)
    compiled = torch.compile(flex_attention, backend="aot_eager")
    results = compiled(*tensors, bias, block_mask, return_lse=True)
    sources = (*tensors, *bias.parameters())
    assert_close(results, expected)
    assert_close(gradients(results, sources), gradients(expected, sources))
    mod = cupy_flash.Mod(bias, block_mask)
    compiled = torch.compile(lambda *x: flex_attention(*x, mod), fullgraph=True, backend="aot_eager")
    assert_close([compiled(*tensors)], [expected[0]])
    torch.compiler.reset()
