"""flash_attn_with_kvcache has flash-attn's names and rules, and computes attention_with_kv_cache."""

import numpy as np
import pytest
import torch
from cache_cases import CacheCase

from cupy_flash import UnsupportedError, attention_with_kv_cache, reference
from cupy_flash.adapters.torch import flash_attn_with_kvcache


def tensors(**changes):
    """(q, k_cache, v_cache) and the other arguments of a call as torch tensors, and the NumPy call."""
    call = CacheCase(**dict(appended=2, q_len=2) | changes).call()
    options = {n: torch.from_numpy(x.copy()) if isinstance(x, np.ndarray) else x for n, x in call.options.items()}
    return [torch.from_numpy(x.copy()) for x in call[:3]], options, call


OURS = {"softmax_scale": "scale", "window_size": "window", "sinks": "sink", "page_table": "block_table"}


@pytest.mark.parametrize(
    "sizes, flash_options",
    [
        ({}, dict(causal=True)),
        ({}, dict(causal=False)),
        ({}, dict(causal=True, softmax_scale=0.3, softcap=2.0, window_size=(torch.tensor(5), 0))),
        (dict(page=8), dict(causal=True)),
        (dict(alibi="h", sink=True), dict(causal=True)),
        (dict(packed=(2, 3)), dict(causal=True)),
        (dict(batch_idx=(2, 0)), dict(causal=True, softcap=0.0)),
        (dict(leftpad=(1, 4)), dict(causal=True)),
        (dict(rotary=(8, False)), dict(causal=True)),
    ],
    ids=["causal", "full", "options", "paged", "alibi-sink", "packed", "batch-idx", "leftpad", "rotary"],
)
def test_equals_attention_with_kv_cache(sizes, flash_options):
    arrays, options, _ = tensors(**sizes)
    same = [x.clone() for x in arrays]
    options = {
        name: x for name, x in options.items() if name not in ("causal", "window", "scale", "softcap", "split_size")
    }
    renamed = {"sink": "sinks", "block_table": "page_table"}
    given = {renamed.get(name, name): x for name, x in options.items()} | flash_options
    out, lse = flash_attn_with_kvcache(*arrays, **given, return_softmax_lse=True)
    core = {OURS.get(name, name): x for name, x in given.items()}
    core["softcap"] = core.get("softcap") or None
    expected, expected_lse = attention_with_kv_cache(*same, **core, return_lse=True)
    torch.testing.assert_close(out, expected, rtol=0, atol=0)
    torch.testing.assert_close(lse, expected_lse, rtol=0, atol=0)
    for cache, other in zip(arrays[1:], same[1:], strict=True):
        torch.testing.assert_close(cache, other, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("rows, appended", [(3, 3), (3, 1), (1, 4)])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window_size": (9, 9)}], ids=["full", "causal", "local"])
def test_queries_are_rotated_as_flash_attn_does(rows, appended, options):
    """flash-attn rotates query i of a causal or local call by n_b + i, and every query of other calls by n_b."""
    arrays, given, call = tensors(q_len=rows, appended=appended, rotary=(8, True))
    given = {name: given[name] for name in ("k", "v", "cache_seqlens", "rotary_cos", "rotary_sin")}
    before = given["cache_seqlens"].clone()
    out = flash_attn_with_kvcache(*arrays, **given, **options)
    advance = np.arange(rows) if options else np.zeros(rows, int)
    positions = before.numpy()[:, None] + advance
    q = call.q.astype(np.float64)
    cos, sin = (call.options[name].astype(np.float64)[positions][:, :, None] for name in ("rotary_cos", "rotary_sin"))
    x, y = q[..., 0:8:2].copy(), q[..., 1:8:2].copy()
    q[..., 0:8:2], q[..., 1:8:2] = x * cos - y * sin, x * sin + y * cos
    window = options.get("window_size")
    expected, *_ = reference.attention_with_kv_cache(
        q, *(x.numpy().astype(np.float64) for x in arrays[1:]), cache_seqlens=before.numpy() + appended,
        causal=options.get("causal", False), window=window,
    )  # fmt: skip
    np.testing.assert_allclose(out, expected.astype(np.float64), atol=2e-6)


def test_num_splits():
    """num_splits=1 is one piece; num_splits=n gives pieces of 1/n of the capacity, rounded up to 64 keys."""
    arrays, options, _ = tensors(lengths=(300, 900), capacity=1000, appended=None)
    given = dict(cache_seqlens=options["cache_seqlens"], causal=True)
    for splits, size in ((1, 1024), (3, 384), (100, 64)):
        out = flash_attn_with_kvcache(*arrays, **given, num_splits=splits)
        expected = attention_with_kv_cache(*arrays, **given, split_size=size)
        torch.testing.assert_close(out, expected, rtol=0, atol=0)
        alone = flash_attn_with_kvcache(*(x[1:] for x in arrays), cache_seqlens=given["cache_seqlens"][1:], causal=True,
                                        num_splits=splits)  # fmt: skip
        torch.testing.assert_close(alone, out[1:], rtol=0, atol=0)
    with pytest.raises(ValueError, match="num_splits and split_size"):
        flash_attn_with_kvcache(*arrays, **given, num_splits=2, split_size=64)


@pytest.mark.parametrize(
    "options, error, text",
    [
        (dict(qv=torch.zeros(1)), UnsupportedError, "qv is not supported"),
        (dict(attention_chunk=64), UnsupportedError, "attention_chunk is not supported"),
        (dict(k=None, v=None, rotary_cos=torch.ones(50, 4)), ValueError, "rotary_cos and rotary_sin need k and v"),
        (dict(cu_seqlens_k_new=torch.zeros(3)), UnsupportedError, "cu_seqlens_k_new must be cu_seqlens_q itself"),
        (dict(block_table=torch.zeros(1), page_table=torch.zeros(1)), ValueError, "names of one argument"),
        (dict(num_splits=-1), ValueError, "num_splits must be at least 0"),
    ],
    ids=["qv", "attention-chunk", "rotary-alone", "bounds", "tables", "num-splits"],
)
def test_refusals(options, error, text):
    arrays, given, _ = tensors()
    given = {name: given[name] for name in ("k", "v", "cache_seqlens")} | options
    with pytest.raises(error, match=text):
        flash_attn_with_kvcache(*arrays, **given)


def test_tuning_arguments_are_ignored():
    arrays, options, _ = tensors(appended=None)
    expected = flash_attn_with_kvcache(*arrays, cache_seqlens=options["cache_seqlens"])
    out = flash_attn_with_kvcache(
        *arrays, cache_seqlens=options["cache_seqlens"], scheduler_metadata=object(), pack_gqa=True, sm_margin=8,
        cu_seqlens_k_new=torch.zeros(3, dtype=torch.int32),
    )  # fmt: skip
    torch.testing.assert_close(out, expected, rtol=0, atol=0)
