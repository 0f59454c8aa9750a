"""examples/latent_cache.py: models with latent rows generate the tokens that they generate when they expand them."""

import importlib.util
from pathlib import Path

import pytest
import torch
from test_transformers_selected import LATENT
from tiers import exhaustive
from transformers import AutoConfig, AutoModelForCausalLM

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "latent_cache.py"
MODELS = ("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "deepseek_v32", "glm_moe_dsa")


@pytest.mark.parametrize("name", [x if x in ("deepseek_v3", "glm_moe_dsa") else exhaustive(x) for x in MODELS])
def test_tokens_are_those_of_the_expanded_model(name):
    spec = importlib.util.spec_from_file_location("latent_cache", EXAMPLE)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    torch.manual_seed(0)
    config = AutoConfig.for_model(name, **LATENT | dict(num_hidden_layers=2, index_topk=6))
    model = AutoModelForCausalLM.from_config(config, experts_implementation="eager").double().eval()
    prompt = torch.randint(1, config.vocab_size, (2, 9))
    options = dict(max_new_tokens=6, do_sample=False, output_logits=True, return_dict_in_generate=True)
    options |= dict(attention_mask=torch.ones_like(prompt), eos_token_id=None, pad_token_id=0)
    expanded = model.generate(prompt, **options)
    example.absorb(model)
    attended, attend = [], example.cupy_flash.attention_with_kv_cache
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            example.cupy_flash,
            "attention_with_kv_cache",
            lambda *arrays, **given: attended.append(arrays[1].shape[1]) or attend(*arrays, **given),
        )
        absorbed = model.generate(prompt, past_key_values=example.latent_cache(), **options)
    assert attended == [length for length in range(9, 15) for _ in range(2)]
    assert torch.equal(absorbed.sequences, expanded.sequences)
    for one, other in zip(absorbed.logits, expanded.logits, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
