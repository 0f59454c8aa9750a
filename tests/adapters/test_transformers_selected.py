"""attn_implementation="cupy_fa" in the models of transformers that pass lists of keys, or of blocks of keys."""

import functools
import tracemalloc
from types import SimpleNamespace

import pytest
import torch
from tiers import exhaustive
from tiny_models import BATCH, LENGTH, SIZES, formula, token_mask, tokens
from tolerance import assert_matches_reference
from torch_orders import furthest, in_several_orders
from transformers import AutoConfig, AutoModel

import cupy_flash
from cupy_flash.adapters import transformers as adapter

LATENT = SIZES | dict(
    num_hidden_layers=1, num_key_value_heads=4, q_lora_rank=16, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=8,
    v_head_dim=8, index_topk=3, index_n_heads=2, index_head_dim=16, n_routed_experts=2, num_experts_per_tok=1,
    n_group=1, topk_group=1, moe_intermediate_size=16, first_k_dense_replace=1,
)  # fmt: skip
MODELS = {
    "axk2": LATENT,
    "deepseek_v32": LATENT,
    "dots3_note_text": LATENT
    | dict(
        head_dim=16, layer_types=["full_attention"], mlp_layer_types=["sparse"], shared_experts_intermediate_size=16
    ),
    "glm_moe_dsa": LATENT,
    "hy_v4": LATENT,
    "mistral_large4_text": LATENT | dict(head_dim=8),
    "minimax_m3_vl_text": SIZES
    | dict(
        num_hidden_layers=1, num_key_value_heads=2, head_dim=8, rotary_dim=8, index_n_heads=2, index_head_dim=8,
        index_block_size=8, index_topk_blocks=1, index_local_blocks=0, layer_types=["minimax_m3_sparse"],
        mlp_layer_types=["dense"], dense_intermediate_size=16, shared_intermediate_size=16, num_local_experts=2,
    ),
}  # fmt: skip


# Models that make a mask of their lists themselves.
WITH_MASKS = {
    "glm5_next_text": LATENT
    | dict(
        qk_rope_head_dim=0, head_dim=0, hc_mult=2, index_kpool=2, index_topk=4, linear_head_dim=8, linear_num_heads=4,
        layer_types=["full_attention"],
    ),
    "qwen4_exp_text": SIZES
    | dict(
        num_hidden_layers=1, num_key_value_heads=2, head_dim=8, linear_key_head_dim=8, linear_value_head_dim=8,
        linear_num_key_heads=2, linear_num_value_heads=4, moe_intermediate_size=16, shared_expert_intermediate_size=16,
        num_experts_per_tok=1, num_experts=2, hc_count=2, hc_lowrank=8, ngram_vocab_size_base=64, split_ngram_parts=1,
        make_ngram_vocab_size_divisible_by=1, indexer_n_heads=2, indexer_kv_heads=1, indexer_head_dim=8,
        indexer_budget=4, indexer_compress_ratio=2, layer_types=["full_attention"],
    ),
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def registered():
    adapter.register()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("padding", [exhaustive("none"), exhaustive("left"), "right"])
@pytest.mark.parametrize("name", [*MODELS, *WITH_MASKS])
def test_models_equal_their_eager_attention(name, padding, monkeypatch):
    torch.manual_seed(0)
    config = AutoConfig.for_model(name, **(MODELS | WITH_MASKS)[name])
    model = AutoModel.from_config(config, experts_implementation="eager").eval()
    assert any("indexer" in module for module, _ in model.named_modules())
    selected, attend = [], adapter.attention
    monkeypatch.setattr(adapter, "attention", lambda *x, **o: selected.append("selected" in o) or attend(*x, **o))
    valid = token_mask(padding)
    where = torch.ones(BATCH, LENGTH, dtype=torch.bool) if valid is None else valid.bool()
    states = []
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape), alpha=0.1)
        for implementation in ("cupy_fa", "eager"):
            model.set_attn_implementation(implementation)
            states.append(model(input_ids=tokens(), attention_mask=valid)[0][where])
    torch.testing.assert_close(*states, rtol=1e-4, atol=1e-4)
    assert selected == [name in MODELS]


def drawn(*shapes):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator) for shape in shapes]


def lists_of(heads, blocks, n, length=LENGTH, batch=BATCH):
    generator = torch.Generator().manual_seed(1)
    lists = torch.rand(batch, heads, length, blocks, generator=generator).topk(n).indices
    lists[..., -1] = -1
    return lists


SPARSE = torch.nn.Module()
SPARSE.indexer = SimpleNamespace(block_size=8)
GIVEN = {
    "none": None,
    "boolean": torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril().expand(BATCH, 1, LENGTH, LENGTH),
    "additive": torch.full((LENGTH, LENGTH), -torch.inf).triu(1).expand(BATCH, 1, LENGTH, LENGTH),
}


@pytest.mark.parametrize("weights", [False, True])
@pytest.mark.parametrize("given", GIVEN)
def test_blocks_of_keys(given, weights):
    q, k, v = drawn((BATCH, 4, LENGTH, 8), (BATCH, 2, LENGTH, 8), (BATCH, 2, LENGTH, 8))
    lists = lists_of(2, 2, 2)
    named = (lists[..., None] == torch.arange(LENGTH) // 8).any(3).repeat_interleave(2, 1)
    seen = named & GIVEN["boolean"]
    out, found = adapter.attention_forward(
        SPARSE, q, k, v, GIVEN[given], block_indices=lists, output_attentions=weights
    )
    exact, probabilities = formula(None, q.double(), k.double(), v.double(), seen)
    low = furthest(exact, *in_several_orders(lambda: formula(None, q, k, v, seen)[0]))
    assert_matches_reference(out, exact, low, "float32", "out")
    if weights:
        torch.testing.assert_close(found.double(), probabilities, rtol=1e-4, atol=1e-5)


def test_blocks_of_unknown_size_are_refused():
    q = torch.zeros(1, 2, 3, 8)
    with pytest.raises(cupy_flash.UnsupportedError, match="Module passes block_indices, and has no indexer.block_size"):
        adapter.attention_forward(torch.nn.Module(), q, q, q, None, block_indices=torch.zeros(1, 1, 3, 1))


@pytest.mark.parametrize("grad", [False, True])
def test_a_static_cache(grad):
    lengths = torch.tensor([7, 11], dtype=torch.int32)
    keys = adapter.StaticKeys(lengths, None, None)
    mask = adapter.LazyMask.of((2, 1, 2, 20), "cpu", None, True, None, None, static_keys=keys)
    q, k, v = drawn((2, 2, 2, 8), (2, 2, 20, 8), (2, 2, 20, 8))
    indices = lists_of(1, 20, 9, 2, 2)[:, 0]
    places = lengths[:, None] - 2 + torch.arange(2)
    seen = ((indices[..., None] == torch.arange(20)).any(2) & (torch.arange(20) <= places[..., None]))[:, None]
    out, _ = adapter.attention_forward(SPARSE, q.requires_grad_(grad), k, v, mask, indices=indices)
    torch.testing.assert_close(out, formula(None, q, k, v, seen)[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("right", [False, True])
@pytest.mark.parametrize("block", [1, 8])
def test_lists_take_no_memory_of_all_pairs(block, right):
    """No allocation of torch or NumPy within the call has an element for each pair of a query and a key."""
    length = 1024
    q, k, v = drawn(*[(1, 1, length, 8)] * 3)
    lists = lists_of(1, length // block, 4, length, 1)
    words = dict(indices=lists[:, 0]) if block == 1 else dict(block_indices=lists)
    padding = adapter.Padding(torch.arange(length)[None] < 1000) if right else None
    shape = (1, 1, length, length)
    elements = functools.partial(torch.ones, shape, dtype=torch.bool)
    mask = adapter.LazyMask.of(shape, "cpu", elements, True, None, padding)
    adapter.attention_forward(SPARSE, q, k, v, mask, **words)  # the first call imports modules
    tracemalloc.start()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        adapter.attention_forward(SPARSE, q, k, v, mask, **words)
    of_numpy = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    of_torch = max(event.self_cpu_memory_usage for event in profile.events())
    assert max(of_torch, of_numpy) < length * length  # bytes: a boolean for each pair
