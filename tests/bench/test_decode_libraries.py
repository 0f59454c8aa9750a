"""Other libraries compute the same decode as ours; torch's functions run on a CPU, the rest are stand-ins."""

import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.nn.attention import flex_attention

import cupy_flash
from bench import decode_libraries
from cupy_flash.adapters.torch import flash_attn_with_kvcache

EQUAL, UNEQUAL = np.array([64, 64, 64], np.int32), np.array([64, 5, 33], np.int32)
CASES = pytest.mark.parametrize(("q_len", "lengths"), [(1, EQUAL), (1, UNEQUAL), (4, EQUAL), (4, UNEQUAL)])


class Wrapper:
    """Stands in for flashinfer's wrappers: makes a block table from the pages of each sequence, calls cupy_flash."""

    def __init__(self, workspace, layout, **options):
        assert workspace.dtype == torch.uint8 and layout == "NHD"

    def plan(self, *arguments, q_data_type, kv_data_type, causal=True):
        *bounds, indptr, indices, last, heads, kv_heads, dim, page = arguments
        assert (kv_heads, dim, page) == (2, 16, decode_libraries.PAGE) and q_data_type == kv_data_type == torch.float32
        assert all(x.dtype == torch.int32 for x in (*bounds, indptr, indices, last))
        self.rows = int(bounds[0][1]) if bounds else 1
        counts = indptr.diff()
        self.table = torch.full((len(counts), int(counts.max())), -1, dtype=torch.int32)
        for b, count in enumerate(counts.tolist()):
            self.table[b, :count] = indices[indptr[b] : indptr[b + 1]]
        self.lengths = (counts - 1) * page + last

    def run(self, q, pools):
        out = cupy_flash.attention_with_kv_cache(
            q.view(-1, self.rows, *q.shape[1:]), *pools, cache_seqlens=self.lengths, block_table=self.table
        )
        return out.view(q.shape)


MODULES = {
    "flash_attn": SimpleNamespace(flash_attn_with_kvcache=flash_attn_with_kvcache),
    "flash_attn_interface": SimpleNamespace(flash_attn_with_kvcache=flash_attn_with_kvcache),
    "flashinfer": SimpleNamespace(
        BatchDecodeWithPagedKVCacheWrapper=Wrapper, BatchPrefillWithPagedKVCacheWrapper=Wrapper
    ),
}


@CASES
@pytest.mark.parametrize("name", decode_libraries.LIBRARIES)
def test_others_compute_the_same(name, q_len, lengths, monkeypatch):
    for module, stand_in in MODULES.items():
        monkeypatch.setitem(sys.modules, module, stand_in)
    monkeypatch.setattr(torch, "compile", lambda function, dynamic: function)
    monkeypatch.setattr(flex_attention, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    torch.manual_seed(0)
    q, k, v = torch.randn(3, q_len, 4, 16), torch.randn(3, 64, 2, 16), torch.randn(3, 64, 2, 16)
    with torch.no_grad():
        out = decode_libraries.LIBRARIES[name](q, k, v, lengths)()
        expected = cupy_flash.attention_with_kv_cache(q, k, v, cache_seqlens=torch.from_numpy(lengths))
    torch.testing.assert_close(out, expected, atol=2e-6, rtol=0)


def test_without_cuda_all_are_left_out(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert decode_libraries.working((), EQUAL, False) == ({}, {"torch": "RuntimeError: torch has no CUDA device"})


def test_a_library_that_fails_is_left_out(monkeypatch):
    """The reason is kept, and the remaining libraries are called before they are timed."""
    calls = []

    def missing(*_):
        raise ModuleNotFoundError("No module named 'fast'")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch, "as_tensor", lambda x, device: x)
    monkeypatch.setattr(decode_libraries, "LIBRARIES", {"missing": missing, "here": lambda *_: lambda: calls.append(1)})
    working, left_out = decode_libraries.working((1, 2, 3), EQUAL, False)
    assert list(working) == ["here"] and len(calls) == decode_libraries.WARM_UP
    assert left_out == {"missing": "ModuleNotFoundError: No module named 'fast'"}
