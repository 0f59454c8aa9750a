"""Models of diffusers on cupy_flash equal the same models on torch, and every attention of theirs reaches cupy_flash.

diffusers is in the extra `array-libraries`; the models are tiny, with random weights.
"""

import diffusers
import pytest
import torch
from diffusers.models import attention_dispatch

from cupy_flash import dispatch
from cupy_flash.adapters import diffusers as adapter
from cupy_flash.adapters.torch import sdpa
from cupy_flash.problem.records import UnsupportedError


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def flux():
    """Two double and two single blocks."""
    model = diffusers.FluxTransformer2DModel(
        in_channels=4, num_layers=2, num_single_layers=2, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=32, pooled_projection_dim=32, axes_dims_rope=(4, 4, 8),
    )  # fmt: skip
    ids = torch.zeros(16, 3)
    ids[:, 1], ids[:, 2] = torch.arange(16) // 4, torch.arange(16) % 4
    inputs = dict(
        hidden_states=normal(1, 16, 4), encoder_hidden_states=normal(1, 7, 32, seed=1),
        pooled_projections=normal(1, 32, seed=2), timestep=torch.tensor([0.5]), img_ids=ids, txt_ids=torch.zeros(7, 3),
    )  # fmt: skip
    return model, inputs, 4


def wan():
    """Two blocks, of self-attention and cross-attention."""
    model = diffusers.WanTransformer3DModel(
        patch_size=(1, 2, 2), num_attention_heads=2, attention_head_dim=12, in_channels=4, out_channels=4, text_dim=16,
        freq_dim=32, ffn_dim=32, num_layers=2, cross_attn_norm=True, qk_norm="rms_norm_across_heads",
        rope_max_seq_len=32,
    )  # fmt: skip
    inputs = dict(
        hidden_states=normal(1, 4, 2, 8, 8), encoder_hidden_states=normal(1, 7, 16, seed=1),
        timestep=torch.tensor([500]),
    )  # fmt: skip
    return model, inputs, 4


def unet():
    """Two blocks down and up with attention, and one between, each of self-attention and cross-attention."""
    model = diffusers.UNet2DConditionModel(
        sample_size=8, in_channels=4, out_channels=4, block_out_channels=(8, 16), layers_per_block=1, norm_num_groups=4,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"), up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=16, attention_head_dim=2,
    )  # fmt: skip
    inputs = dict(sample=normal(1, 4, 8, 8), timestep=torch.tensor([3]), encoder_hidden_states=normal(1, 7, 16, seed=1))
    return model, inputs, 8


def sd3():
    """Two joint blocks."""
    model = diffusers.SD3Transformer2DModel(
        sample_size=8, patch_size=2, in_channels=4, num_layers=2, attention_head_dim=8, num_attention_heads=2,
        joint_attention_dim=16, caption_projection_dim=16, pooled_projection_dim=16, out_channels=4,
        pos_embed_max_size=8,
    )  # fmt: skip
    inputs = dict(
        hidden_states=normal(1, 4, 8, 8), encoder_hidden_states=normal(1, 7, 16, seed=1),
        pooled_projections=normal(1, 16, seed=2), timestep=torch.tensor([3]),
    )  # fmt: skip
    return model, inputs, 2


@pytest.fixture
def calls(monkeypatch):
    """The forwards that reached cupy_flash."""
    forward, calls = dispatch.forward, []
    monkeypatch.setattr(dispatch, "forward", lambda *call: calls.append(call) or forward(*call))
    return calls


@pytest.fixture
def backend():
    adapter.register()
    yield "cupy_flash"
    adapter.unregister()


def compared(model, inputs, run):
    """Compare outputs and gradients of a model with those of `run`, which calls it with cupy_flash."""
    torch.manual_seed(0)
    results = []
    for call in (lambda: model(**inputs, return_dict=False), lambda: run(model, inputs)):
        model.zero_grad()
        (out,) = call()
        out.square().mean().backward()
        results.append([out.detach(), *(x.grad.clone() for x in model.parameters() if x.grad is not None)])
    torch.testing.assert_close(*results, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("make", [flux, wan])
def test_a_model_chooses_the_backend(make, backend, calls):
    model, inputs, count = make()

    def run(model, inputs):
        model.set_attention_backend(backend)
        return model(**inputs, return_dict=False)

    compared(model, inputs, run)
    assert len(calls) == count
    model.reset_attention_backend()


@pytest.mark.parametrize("make", [unet, sd3])
def test_a_model_that_calls_sdpa(make, calls):
    model, inputs, count = make()

    def run(model, inputs):
        with sdpa():
            return model(**inputs, return_dict=False)

    compared(model, inputs, run)
    assert len(calls) == count


def test_a_context_chooses_the_backend(backend, calls):
    q, mask = normal(2, 9, 2, 8), normal(2, 9) > 0
    expected = attention_dispatch.dispatch_attention_fn(q, q, q, attn_mask=mask)
    with attention_dispatch.attention_backend(backend):
        out = attention_dispatch.dispatch_attention_fn(q, q, q, attn_mask=mask)
        with pytest.raises(UnsupportedError, match="return_lse is not supported"):
            attention_dispatch.dispatch_attention_fn(q, q, q, attention_kwargs={"return_lse": True})
        with pytest.raises(UnsupportedError, match="context parallelism is not supported"):
            attention_dispatch.dispatch_attention_fn(q, q, q, parallel_config=object())
    torch.testing.assert_close(out, expected)
    assert len(calls) == 1


def test_unregister_restores_diffusers():
    names, registry = attention_dispatch.AttentionBackendName, attention_dispatch._AttentionBackendRegistry
    before = list(names), dict(registry._backends), registry._active_backend
    for _ in range(2):
        adapter.register()
    assert names("cupy_flash") is names.__members__["CUPY_FLASH"] and list(names)[-1].value == "cupy_flash"
    registry.set_active_backend(names("cupy_flash"))
    for _ in range(2):
        adapter.unregister()
    assert (list(names), dict(registry._backends), registry._active_backend) == before
    with pytest.raises(ValueError, match="cupy_flash"):
        names("cupy_flash")


def test_another_version_is_refused(monkeypatch):
    monkeypatch.setattr(diffusers, "__version__", "0.41.0")
    with pytest.raises(UnsupportedError, match="diffusers 0.41.0: its dispatcher is known for 0.42.x alone"):
        adapter.register()
    assert "CUPY_FLASH" not in attention_dispatch.AttentionBackendName.__members__
