"""flash_attn_varlen_func with a block table, called as vLLM calls it, equals attention_with_kv_cache."""

import numpy as np
import pytest
import torch
from cache_cases import CacheCase

from cupy_flash import UnsupportedError, attention_with_kv_cache
from cupy_flash.adapters.torch import flash_attn_varlen_func

OURS = {"seqused_k": "cache_seqlens", "softmax_scale": "scale", "s_aux": "sink", "window_size": "window"}


def tensors(**changes):
    """Return (q, k pages, v pages), and the other arguments of a call on pages under vLLM's names."""
    call = CacheCase(**dict(packed=(2, 3), page=8) | changes).call()
    names = ("cache_seqlens", "block_table", "cu_seqlens_q", "max_seqlen_q", "alibi_slopes", "sink", "k_descale")
    names += ("v_descale",)
    options = {name: call.options[name] for name in names if call.options.get(name) is not None}
    vllm_names = {ours: name for name, ours in OURS.items()}
    given = {
        vllm_names.get(name, name): torch.from_numpy(x.copy()) if isinstance(x, np.ndarray) else x
        for name, x in options.items()
    }
    return [torch.from_numpy(x.copy()) for x in call[:3]], given


@pytest.mark.parametrize(
    "sizes, options",
    [
        ({}, {"causal": True}),
        ({}, {"causal": False, "softcap": 0.0}),
        ({}, {"causal": True, "softmax_scale": 0.3, "softcap": 2.0, "window_size": (5, 0)}),
        ({"alibi": "h", "sink": True}, {"causal": True}),
    ],
    ids=["causal", "full", "options", "alibi-sink"],
)
def test_equals_attention_with_kv_cache(sizes, options):
    arrays, given = tensors(**sizes)
    out = torch.full((*arrays[0].shape[:-1], arrays[2].shape[-1]), torch.nan)
    ignored = {"max_seqlen_k": 40, "fa_version": 3, "scheduler_metadata": torch.zeros(1)}
    result, lse = flash_attn_varlen_func(*arrays, **given, **options, **ignored, out=out, return_softmax_lse=True)
    core = {OURS.get(name, name): x for name, x in (given | options).items()}
    core["softcap"] = core.get("softcap") or None
    expected, expected_lse = attention_with_kv_cache(*arrays, **core, return_lse=True)
    assert result is out and torch.equal(out, expected) and torch.equal(lse, expected_lse)


def test_lengths_as_cu_seqlens_k():
    """flash-attn 2 has no seqused_k; cu_seqlens_k gives the number of keys of each sequence."""
    arrays, given = tensors()
    lengths = given.pop("seqused_k")
    bounds = torch.cat([torch.zeros(1), lengths.cumsum(0)]).int()
    by_lengths = flash_attn_varlen_func(*arrays, **given, seqused_k=lengths)
    out, lse, probabilities = flash_attn_varlen_func(*arrays, **given, cu_seqlens_k=bounds, return_attn_probs=True)
    assert torch.equal(out, by_lengths) and lse.shape == (arrays[0].shape[1], len(out)) and probabilities is None


def test_num_splits_is_a_split_size():
    arrays, given = tensors(lengths=(300, 700), capacity=1024, page=64)
    bits = {n: flash_attn_varlen_func(*arrays, **given, num_splits=n) for n in (1, 4)}
    core = {OURS.get(name, name): x for name, x in given.items()} | {"causal": False}
    for splits, size in ((1, 1024), (4, 256)):
        assert torch.equal(bits[splits], attention_with_kv_cache(*arrays, **core, split_size=size))


def test_refusals():
    arrays, given = tensors()
    with pytest.raises(UnsupportedError, match="dropout with block_table"):
        flash_attn_varlen_func(*arrays, **given, dropout_p=0.5)
    with pytest.raises(UnsupportedError, match="q_descale"):
        flash_attn_varlen_func(*arrays, **given, q_descale=torch.ones(2, 2))
    del given["seqused_k"]
    with pytest.raises(ValueError, match="block_table needs seqused_k or cu_seqlens_k"):
        flash_attn_varlen_func(*arrays, **given)
    arrays[0].requires_grad_()
    with pytest.raises(ValueError, match="a KV cache records no gradients"):
        flash_attn_varlen_func(*arrays, **given, seqused_k=torch.ones(2, dtype=torch.int32))
