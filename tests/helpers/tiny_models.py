"""Tiny decoders of transformers, their inputs, and the formula as their attention."""

import copy
import functools

import torch
from torch_orders import furthest, in_several_orders
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    GPT2Config,
    GptOssConfig,
    Llama4TextConfig,
    LlamaConfig,
    MistralConfig,
)
from transformers.masking_utils import sdpa_mask

VOCABULARY = 64
SIZES = dict(
    vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=None,
)  # fmt: skip
GROUPED = SIZES | dict(num_key_value_heads=2)
DECODERS = {
    "llama": LlamaConfig(**GROUPED),
    "mistral-window": MistralConfig(**GROUPED, sliding_window=5),
    "gemma2-softcap-window": Gemma2Config(
        **GROUPED, head_dim=8, sliding_window=5, attn_logit_softcapping=0.5, query_pre_attn_scalar=8
    ),
    "gpt2": GPT2Config(
        vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=64, pad_token_id=0, bos_token_id=1,
        eos_token_id=None,
    ),
    "gpt-oss-sinks-window": GptOssConfig(
        **GROUPED, head_dim=8, sliding_window=5, num_local_experts=2, num_experts_per_tok=1
    ),
    "llama4-chunks": Llama4TextConfig(
        **GROUPED, head_dim=8, attention_chunk_size=5, num_local_experts=2, intermediate_size_mlp=48
    ),
}  # fmt: skip
REFUSED_BY_SDPA = ("gemma2-softcap-window", "gpt-oss-sinks-window")
BATCH, LENGTH = 3, 12


def formula(
    module, query, key, value, mask, dropout=0.0, scaling=None, softcap=None, s_aux=None, position_bias=None, **_
):
    """Return textbook attention and its probabilities in the dtype of query.

    In float64 it is the reference, which serves models that refuse sdpa too.
    """
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (key, value))
    scores = query @ key.transpose(-1, -2) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    scores = scores if position_bias is None else scores + position_bias
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    sink = torch.full((query.shape[1],), -torch.inf) if s_aux is None else s_aux
    scores = torch.cat([scores, sink.to(scores)[:, None, None].expand(*scores.shape[:3], 1)], dim=-1)
    probabilities = scores.softmax(-1)[..., :-1].nan_to_num()  # rows that see no key are 0
    return (probabilities @ value).transpose(1, 2), probabilities


def formula_mask(**arguments):
    return sdpa_mask(**arguments | dict(allow_is_causal_skip=False, allow_is_bidirectional_skip=False))


@functools.cache
def model_of(case):
    """Return a random model with large weights, because small initial weights make attention almost uniform."""
    torch.manual_seed(0)
    config = DECODERS[case]
    model = AutoModelForCausalLM.from_config(config, experts_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape), alpha=0.1)
    model.generation_config.eos_token_id = None
    return model


def tokens():
    return torch.randint(2, VOCABULARY, (BATCH, LENGTH), generator=torch.Generator().manual_seed(1))


def token_mask(padding):
    """Return an int64 mask (BATCH, LENGTH), 1 = token: the rows have 12, 7 and 1 tokens."""
    lengths = torch.tensor([[LENGTH], [7], [1]])
    places = torch.arange(LENGTH)
    if padding == "left":
        return (places >= LENGTH - lengths).long()
    if padding == "right":
        return (places < lengths).long()
    if padding == "holes":
        return (places % (1 + torch.tensor([[0], [2], [3]])) == 0).long()
    return None


def three_runs(model, case, get):
    """Return `get(model)` with cupy_fa, with the formula in float64, and the least accurate one of float32 runs.

    These runs use another implementation, and the formula in several orders of its sums.
    """
    runs = []
    for implementation in ("cupy_fa", "eager" if case in REFUSED_BY_SDPA else "sdpa"):
        model.set_attn_implementation(implementation)
        runs.append(get(model))
    actual, *others = runs
    model.set_attn_implementation("formula")
    others += in_several_orders(lambda: get(model))
    exact = get(copy.deepcopy(model).double())
    return actual, exact, furthest(exact, *others)
