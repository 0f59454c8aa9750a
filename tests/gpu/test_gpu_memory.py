"""The memory model on a real GPU, with torch's own dropout, norms and attention."""

from __future__ import annotations

import pytest
import torch
import transformer_blocks
from torch.nn import functional as F

from cupy_flash import memory
from cupy_flash.adapters.torch import attention


def ours(q, k, v, drop):
    return attention(q, k, v, causal=True, dropout=0.1 if drop else 0.0)


def torch_flash(q, k, v, drop):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
        out = F.scaled_dot_product_attention(
            q, k, v, dropout_p=0.1 if drop else 0.0, is_causal=True, enable_gqa=q.shape[1] != k.shape[1]
        )
    return out.transpose(1, 2)


@pytest.mark.parametrize("function", [ours, torch_flash])
@pytest.mark.parametrize("family", transformer_blocks.BLOCKS)
def test_block_is_measured_as_modelled(family, function, monkeypatch) -> None:
    monkeypatch.setattr(transformer_blocks, "dropout", lambda x: F.dropout(x, 0.1))
    monkeypatch.setattr(transformer_blocks, "RMSNorm", torch.nn.RMSNorm)
    monkeypatch.setitem(transformer_blocks.ATTENTION, "flash", function)
    with torch.device("cuda"):
        measured = transformer_blocks.measure_block(family, "flash", "mixed", 2, 64)
    sizes = transformer_blocks.BLOCKS[family][1]
    modelled = sum(tensor.bytes for tensor in memory.saved_by_block(sizes, memory.Training(2, 64)))
    assert measured == pytest.approx(modelled, rel=transformer_blocks.WITHIN)
