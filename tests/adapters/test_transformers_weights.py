"""`model(..., output_attentions=True)` of transformers with attn_implementation="cupy_fa": the weights of eager."""

import copy

import pytest
import torch
from tiny_models import (
    BATCH,
    DECODERS,
    LENGTH,
    SIZES,
    VOCABULARY,
    formula,
    formula_mask,
    model_of,
    token_mask,
    tokens,
)
from tolerance import assert_matches_reference
from torch_orders import furthest, in_several_orders
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoModel,
    BartConfig,
    BertConfig,
    DeepseekV3Config,
    GPTNeoXConfig,
    ModernBertConfig,
    OPTConfig,
    StaticCache,
    T5Config,
    ViTConfig,
    WhisperConfig,
)

from cupy_flash.adapters import transformers as adapter

ENCODER_DECODER = dict(
    vocab_size=VOCABULARY, d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4,
    decoder_attention_heads=4, encoder_ffn_dim=48, decoder_ffn_dim=48, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    decoder_start_token_id=1,
)  # fmt: skip
CONFIGS = {
    "bert": BertConfig(**SIZES),
    "modernbert-window": ModernBertConfig(
        **SIZES | dict(eos_token_id=2), cls_token_id=1, sep_token_id=2, local_attention=6, global_attn_every_n_layers=2
    ),
    "opt": OPTConfig(**SIZES, ffn_dim=48, word_embed_proj_dim=32),
    "gpt-neox": GPTNeoXConfig(**SIZES),
    "deepseek-v3-wider-keys": DeepseekV3Config(
        **SIZES, num_key_value_heads=4, q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8,
        v_head_dim=8, n_routed_experts=4, num_experts_per_tok=2, n_group=1, topk_group=1, moe_intermediate_size=16,
        first_k_dense_replace=2,
    ),
    "t5-position-bias": T5Config(
        vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, dropout_rate=0.0,
        decoder_start_token_id=0,
    ),
    "bart": BartConfig(**ENCODER_DECODER, max_position_embeddings=64),
    "whisper": WhisperConfig(**ENCODER_DECODER, max_source_positions=8, max_target_positions=64, num_mel_bins=8),
    "vit": ViTConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48, image_size=16, patch_size=4
    ),
}  # fmt: skip
CASES = (*DECODERS, *CONFIGS)


@pytest.fixture(scope="module", autouse=True)
def registered():
    adapter.register()
    AttentionInterface.register("formula", formula)
    AttentionMaskInterface.register("formula", formula_mask)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def build(case):
    if case in DECODERS:
        return model_of(case)
    torch.manual_seed(0)
    model = AutoModel.from_config(CONFIGS[case]).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape), alpha=0.1)
    return model


def inputs_of(case, padding):
    generator = torch.Generator().manual_seed(2)
    if case == "vit":
        return dict(pixel_values=torch.randn(2, 3, 16, 16, generator=generator))
    if case == "whisper":
        return dict(input_features=torch.randn(BATCH, 8, 16, generator=generator), decoder_input_ids=tokens())
    decoder = dict(decoder_input_ids=tokens().flip(1)) if case in ("t5-position-bias", "bart") else {}
    return dict(input_ids=tokens(), attention_mask=token_mask(padding)) | decoder


def weights_of(model, implementation, inputs):
    """Return {name: weights of the tokens' rows (n, Hq, Sk)} of every layer."""
    model.set_attn_implementation(implementation)
    parameters = {
        name: x.to(model.dtype) if x is not None and x.is_floating_point() else x for name, x in inputs.items()
    }
    output = model(**parameters, output_attentions=True)
    valid = inputs.get("attention_mask")
    found = {}
    for name in output:
        if name.endswith("attentions"):
            is_padded = valid is not None and not name.startswith(("decoder", "cross"))
            rows = valid.bool() if is_padded else ...
            found |= {f"{name} {n}": x.transpose(1, 2)[rows] for n, x in enumerate(output[name])}
    return found


@pytest.mark.parametrize(
    ("case", "padding"), [*((case, "left") for case in CASES), ("llama", "none"), ("llama", "right")]
)
def test_weights_of_eager(case, padding):
    inputs, model = inputs_of(case, padding), build(case)
    with torch.no_grad():
        actual, eager = (weights_of(model, name, inputs) for name in ("cupy_fa", "eager"))
        orders = list(in_several_orders(lambda: weights_of(model, "formula", inputs), 3))
        exact = weights_of(copy.deepcopy(model).double(), "formula", inputs)
    assert actual.keys() == eager.keys() == exact.keys()
    assert len(actual) > 0
    for name, weights in actual.items():
        low = furthest(exact[name], eager[name], *(order[name] for order in orders))
        assert_matches_reference(weights, exact[name], low, "float32", name)


def test_gradients_reach_the_weights_of_a_model():
    model = copy.deepcopy(model_of("llama")).double()
    gradients = []
    for implementation in ("cupy_fa", "formula"):
        weights = weights_of(model, implementation, inputs_of("llama", "left"))
        loss = sum((x * torch.arange(LENGTH)).square().sum() for x in weights.values())
        gradients.append(torch.autograd.grad(loss, model.model.layers[0].self_attn.q_proj.weight)[0])
    torch.testing.assert_close(*gradients)


def test_weights_on_a_static_cache():
    model, found = model_of("llama"), []
    for implementation in ("cupy_fa", "eager"):
        model.set_attn_implementation(implementation)
        cache = StaticCache(model.config, LENGTH + 4)
        steps = tokens()[:, :9], tokens()[:, 9:10]
        with torch.no_grad():
            found.append([model(step, past_key_values=cache, output_attentions=True).attentions for step in steps])
    ours, eager = ([x for step in runs for x in step] for runs in found)
    assert len(ours) == 4
    for one, other in zip(ours, eager, strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-5)


def test_transformers_refuses_the_attribute_of_the_configuration():
    model = model_of("llama")
    model.set_attn_implementation("cupy_fa")
    with pytest.raises(ValueError, match="output_attentions"):
        model.config.output_attentions = True
    assert model(tokens()).get("attentions") is None
