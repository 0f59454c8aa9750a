"""Caches of transformers: a static cache takes work linear in the tokens, and pages of continuous batching are read."""

from types import SimpleNamespace

import pytest
import torch
from test_transformers import mask_arguments, registered  # noqa: F401 - the fixture `registered` is used by name
from tiny_models import VOCABULARY, model_of, tokens
from torch._dynamo.testing import CompileCounter
from torch._inductor.utils import run_and_get_code
from transformers import (
    AttentionInterface,
    ContinuousBatchingConfig,
    GenerationConfig,
    MistralConfig,
    StaticCache,
)
from transformers.masking_utils import sliding_window_causal_mask_function

import cupy_flash
from cupy_flash.adapters import transformers as adapter

HEADS, KV_HEADS, DIM = 4, 2, 16


def drawn(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def static_mask(rows, capacity, length, padding=None):
    """Return the mask of `rows` new tokens, the last of `length` keys, for the arguments that a static cache passes."""
    offset = torch.tensor(length - rows)
    return adapter.attention_mask(
        **mask_arguments(q_length=rows, kv_length=capacity, q_offset=offset, attention_mask=padding, batch_size=2)
    )


@pytest.mark.parametrize("padding", [False, True])
@pytest.mark.parametrize("rows", [1, 5, 12])
def test_a_static_cache_is_linear(rows, padding):
    """The mask stays lazy, and no product uses the cache's entries after the keys."""
    valid = None
    if padding:
        valid = torch.ones(2, 12, dtype=torch.bool)
        valid[1, :4] = False
    mask = static_mask(rows, 40, 12, valid)
    assert isinstance(mask, adapter.LazyMask) and mask.shape == (2, 1, rows, 40)
    q, k, v = drawn(2, HEADS, rows, DIM), drawn(2, KV_HEADS, 40, DIM), drawn(2, KV_HEADS, 40, DIM + 1)[..., :DIM]
    k[:, :, 12:] = v[:, :, 12:] = torch.nan
    with torch.no_grad():
        out, _ = adapter.attention_forward(torch.nn.Module(), q, k, v, mask)
    assert mask.elements is None
    seen = torch.arange(12) <= 12 - rows + torch.arange(rows)[:, None]
    seen = seen if valid is None else seen & valid[:, None, None, :]
    expected = torch.nn.functional.scaled_dot_product_attention(
        q, k[:, :, :12], v[:, :, :12], attn_mask=seen, enable_gqa=True
    )
    where = torch.ones(2, rows, dtype=torch.bool) if valid is None else valid[:, 12 - rows :]
    torch.testing.assert_close(out[where], expected.transpose(1, 2)[where], atol=2e-6, rtol=0)
    assert torch.equal(mask.dense()[..., :12], seen.expand(2, 1, rows, 12))


def test_gradients_through_a_static_cache():
    mask, q = static_mask(3, 20, 12), drawn(2, HEADS, 3, DIM).requires_grad_()
    k, v = drawn(2, KV_HEADS, 20, DIM), drawn(2, KV_HEADS, 20, DIM)
    out, _ = adapter.attention_forward(torch.nn.Module(), q, k, v, mask)
    out.sum().backward()
    other = q.detach().clone().requires_grad_()
    torch.nn.functional.scaled_dot_product_attention(
        other, k, v, attn_mask=mask.dense(), enable_gqa=True
    ).sum().backward()
    torch.testing.assert_close(q.grad, other.grad, atol=2e-6, rtol=0)


def test_elements_that_a_model_has_changed_are_the_mask():
    """A model that reads a mask may write to what it has read."""
    mask = static_mask(1, 20, 12)
    mask.elements = mask.dense() & (torch.arange(20) != 3)
    q, k, v = drawn(2, HEADS, 1, DIM), drawn(2, KV_HEADS, 20, DIM), drawn(2, KV_HEADS, 20, DIM + 1)[..., :DIM]
    out, _ = adapter.attention_forward(torch.nn.Module(), q, k, v, mask)
    seen = ((torch.arange(20) < 12) & (torch.arange(20) != 3)).expand(2, 1, 1, 20)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True)
    torch.testing.assert_close(out, expected.transpose(1, 2), atol=2e-6, rtol=0)


def test_the_mask_of_a_full_static_cache_with_a_window_is_a_tensor():
    """A full cache with a window moves its keys, so lengths do not describe the visible ones."""
    mask = adapter.attention_mask(
        **mask_arguments(q_length=1, kv_length=8, q_offset=torch.tensor(11), kv_offset=4, batch_size=2)
    )
    assert not isinstance(mask, adapter.LazyMask)


def test_a_window_of_a_static_cache_is_linear():
    """A prompt that is shorter than the window, and then one that is longer."""
    config = MistralConfig(sliding_window=16)
    window = dict(local_size=16, config=config, mask_function=sliding_window_causal_mask_function(16))
    for rows, keys in ((5, 16), (30, 30)):
        mask = adapter.attention_mask(**mask_arguments(q_length=rows, kv_length=keys, batch_size=2, **window))
        assert isinstance(mask, adapter.LazyMask) and mask.mod is None
        q, k, v = drawn(2, HEADS, rows, DIM), drawn(2, KV_HEADS, keys, DIM), drawn(2, KV_HEADS, keys, DIM)
        with torch.no_grad():
            out, _ = adapter.attention_forward(torch.nn.Module(), q, k, v, mask)
        assert mask.elements is None
        i, j = torch.arange(rows)[:, None], torch.arange(keys)
        expected = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=(j <= i) & (i - j < 16), enable_gqa=True
        )
        torch.testing.assert_close(out, expected.transpose(1, 2), atol=2e-6, rtol=0)
        assert torch.equal(mask.dense(), ((j <= i) & (i - j < 16)).expand(2, 1, rows, keys))


def attend(q, k, v, mask):
    return adapter.attention_forward(torch.nn.Module(), q, k, v, mask)[0]


@pytest.mark.parametrize("padding", [False, True])
def test_a_compiled_call_takes_a_mask_of_a_static_cache(padding):
    """As in `generate`, which makes masks outside of the graph; one graph serves every length."""
    valid = None
    if padding:
        valid = torch.ones(2, 12, dtype=torch.bool)
        valid[1, :4] = False
    q, k, v = drawn(2, HEADS, 1, DIM), drawn(2, KV_HEADS, 40, DIM), drawn(2, KV_HEADS, 40, DIM + 1)[..., :DIM]
    counter = CompileCounter()
    compiled = torch.compile(attend, backend=counter, fullgraph=True)
    with torch.no_grad():
        for length in (12, 13, 30):
            expected = attend(q, k, v, static_mask(1, 40, length, valid))
            torch.testing.assert_close(compiled(q, k, v, static_mask(1, 40, length, valid)), expected, atol=0, rtol=0)
    assert counter.frame_count == 1


@pytest.mark.exhaustive
@pytest.mark.parametrize("backend", ["eager", "inductor"])
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # Inductor's own
def test_a_compiled_step_of_a_static_cache(backend):
    """Under torch.compile, too, a step reads only keys that exist, and no cache is copied."""
    model, logits = model_of("llama"), []
    for implementation in ("cupy_fa", "sdpa"):
        model.set_attn_implementation(implementation)
        cache, programs = StaticCache(config=model.config, max_cache_len=20), []
        with torch.no_grad():
            model(tokens(), past_key_values=cache)
            for layer in cache.layers:  # slots of the cache that hold no key yet
                layer.keys[:, :, 12:] = layer.values[:, :, 12:] = torch.nan if implementation == "cupy_fa" else 0
            torch._dynamo.reset()
            step = torch.compile(model.forward, backend=backend, fullgraph=True)
            first, programs = run_and_get_code(step, tokens()[:, :1], past_key_values=cache)
            rest = [step(tokens()[:, i : i + 1], past_key_values=cache) for i in (1, 2)]
            logits.append([output.logits for output in (first, *rest)])
        for program in programs if implementation == "cupy_fa" else ():
            call = program.partition("def call")[2].partition("def get_args")[0]
            assert "attention_with_kv_cache" in call and "clone" not in call and "copy_(" not in call
    for ours, theirs in zip(*logits, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", ["llama", "mistral-window", "gemma2-softcap-window"])
def test_generation_with_a_static_cache(family):
    """Tokens equal those of eager attention, with left padding, and with a window of keys that fills up and moves."""
    model, results = model_of(family), []
    valid = torch.ones_like(tokens())
    valid[0, :3] = 0
    for implementation in ("cupy_fa", "eager"):
        model.set_attn_implementation(implementation)
        results.append(
            model.generate(
                tokens(), attention_mask=valid, max_new_tokens=8, do_sample=False, eos_token_id=-1, pad_token_id=0,
                cache_implementation="static",
            )
        )  # fmt: skip
    assert torch.equal(*results)


# Continuous batching


class Pages:
    """A paged cache of one layer with the interface of transformers' PagedAttentionCache."""

    def __init__(self, pages, size):
        self.k, self.v = (torch.full((pages, size, KV_HEADS, DIM), torch.nan) for _ in range(2))

    def update(self, key_states, value_states, layer_idx, kwargs):
        kwargs["cu_seq_lens_k"] = kwargs["cu_seq_lens_k"]["full_attention"]
        kwargs["max_length_k"] = kwargs["max_length_k"]["full_attention"]
        if kwargs["block_table"] is not None:
            kwargs |= dict(block_table=kwargs["block_table"][0], k_cache=self.k, v_cache=self.v)
            return key_states, value_states
        results = []
        for cache, new in ((self.k, key_states), (self.v, value_states)):
            flat = cache.view(-1, KV_HEADS, DIM)
            flat[kwargs["write_index"][0]] = new[0].transpose(0, 1)
            results.append(flat[kwargs["read_index"][0]].transpose(0, 1)[None])
        return tuple(results)


@pytest.mark.parametrize("by_table", [False, True], ids=["indices", "block-table"])
def test_the_pages_of_continuous_batching(by_table):
    """Sequences of 5 and 9 keys get 2 and 1 more; the result is that of attention on each sequence alone."""
    lengths, new, size = (5, 9), (2, 1), 4
    table = torch.tensor([[3, 1, -1], [0, 5, 2]], dtype=torch.int32)
    cache, whole = Pages(6, size), []
    places = [[int(row[j // size]) * size + j % size for j in range(n + s)]
              for row, n, s in zip(table, lengths, new, strict=True)]  # fmt: skip
    for b, (n, s) in enumerate(zip(lengths, new, strict=True)):
        k, v = drawn(n + s, KV_HEADS, DIM), drawn(n + s + 1, KV_HEADS, DIM)[1:]
        cache.k.view(-1, KV_HEADS, DIM)[places[b][:n]], cache.v.view(-1, KV_HEADS, DIM)[places[b][:n]] = k[:n], v[:n]
        whole.append((k, v))
    q = drawn(1, HEADS, 3, DIM)
    key, value = (
        torch.cat([x[side][n:] for x, n in zip(whole, lengths, strict=True)]).transpose(0, 1)[None] for side in (0, 1)
    )
    words = dict(
        cache=cache, cu_seq_lens_q=torch.tensor([0, 2, 3]), max_length_q=2, is_causal=True,
        cu_seq_lens_k={"full_attention": torch.tensor([0, 7, 17], dtype=torch.int32)},
        max_length_k={"full_attention": 10}, block_table=table[None] if by_table else None,
        read_index=[torch.tensor(places[0] + places[1])], write_index=[torch.tensor(places[0][5:] + places[1][9:])],
    )  # fmt: skip
    module = SimpleNamespace(layer_idx=0, is_causal=True)
    with torch.no_grad():
        out, _ = adapter.attention_forward(module, q, key, value, None, **words)
    assert out.shape == (1, 3, HEADS, DIM)
    first = 0
    for (k, v), s in zip(whole, new, strict=True):
        alone = cupy_flash.attention(q[:, :, first : first + s].transpose(1, 2), k[None], v[None], causal=True)
        torch.testing.assert_close(out[:, first : first + s], alone, atol=2e-6, rtol=0)
        first += s
    for b in (0, 1):
        assert torch.equal(cache.k.view(-1, KV_HEADS, DIM)[places[b]], whole[b][0])


@pytest.mark.exhaustive
def test_continuous_batching_generates_the_same_tokens(monkeypatch):
    """transformers' scheduler accepts only the name "sdpa", so cupy_flash is registered under that name."""
    model = model_of("llama")
    model.set_attn_implementation("sdpa")
    generator = torch.Generator().manual_seed(3)
    prompts = [torch.randint(2, VOCABULARY, (n,), generator=generator).tolist() for n in (3, 9, 5)]
    config = GenerationConfig(max_new_tokens=6, do_sample=False, eos_token_id=-1, pad_token_id=0)
    alone = [model.generate(torch.tensor([x]), generation_config=config)[0, len(x) :].tolist() for x in prompts]
    calls = []

    def attention(module, *arguments, **words):
        calls.append(words.get("cache"))
        return adapter.attention_forward(module, *arguments, **words)

    monkeypatch.setitem(AttentionInterface._global_mapping, "sdpa", attention)
    batching = ContinuousBatchingConfig(page_size=16, num_blocks=32, max_batch_tokens=64)
    results = model.generate_batch(
        prompts, generation_config=config, continuous_batching_config=batching, progress_bar=False
    )
    by_request = sorted(results.values(), key=lambda result: int(result.request_id.rpartition("_")[2]))
    assert [result.generated_tokens for result in by_request] == alone
    assert calls and None not in calls
