"""One decode step on torch tensors by every other implementation that is installed and runs on the GPU.

q is (B, Sq, Hq, D), the caches are (B, capacity, Hk, D), and `lengths` (B,) has the number of keys of each sequence,
whose queries are at the positions of its last Sq keys. Block masks and plans depend on lengths alone and are made
before the call.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from cupy_flash.measure.worker_process import one_line

from .implementations import FLEX_ATTENTION

Call = Callable[[], Any]
PAGE = 16  # keys of a page for flashinfer, which takes only paged caches
WORKSPACE_BYTES = 2**27  # workspace of flashinfer
WARM_UP = 3  # calls before a measurement


def working(
    arrays: tuple[Any, Any, Any], lengths: np.ndarray[Any, Any], in_graph: bool
) -> tuple[dict[str, Call], dict[str, str]]:
    """Return ({library: call on CuPy arrays (q, k, v), as a CUDA graph if in_graph}, {library: why it cannot run})."""
    try:
        import torch

        if not torch.cuda.is_available():
            raise RuntimeError("torch has no CUDA device")
        tensors = [torch.as_tensor(x, device="cuda") for x in arrays]
    except (ImportError, RuntimeError) as error:
        return {}, {"torch": one_line(error)}
    calls: dict[str, Call] = {}
    left_out: dict[str, str] = {}
    for name, prepare in LIBRARIES.items():
        try:
            call = prepare(*tensors, lengths)
            for _ in range(WARM_UP):
                call()
            calls[name] = _captured(call) if in_graph else call
        except Exception as error:  # a library that is not installed, or does not support the step, may raise anything
            left_out[name] = one_line(error)
    return calls, left_out


def _captured(call: Call) -> Call:
    """Capture the call in a CUDA graph; return a function that replays it and returns the output."""
    import torch

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = call()

    def replay() -> Any:
        graph.replay()
        return kept  # the output, to whose memory the graph writes

    return replay


def _sdpa(q: Any, k: Any, v: Any, lengths: np.ndarray[Any, Any]) -> Call:
    """Return torch's SDPA: on queries packed by group where sequences are equally long, else with a boolean mask."""
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    batch, q_len, heads, dim = q.shape
    longest, kv_heads = int(lengths.max()), k.shape[2]
    keys, values = (x[:, :longest].transpose(1, 2) for x in (k, v))
    if q_len == 1 and (lengths == longest).all():
        packed = q.reshape(batch, kv_heads, heads // kv_heads, dim)
        return lambda: scaled_dot_product_attention(packed, keys, values).reshape(q.shape)
    last = torch.as_tensor(lengths[:, None] - q_len + np.arange(q_len), device=q.device)
    mask = (torch.arange(longest, device=q.device) <= last[..., None])[:, None]
    return lambda: scaled_dot_product_attention(
        q.transpose(1, 2), keys, values, attn_mask=mask, enable_gqa=True
    ).transpose(1, 2)


def _flex_attention(q: Any, k: Any, v: Any, lengths: np.ndarray[Any, Any]) -> Call:
    """Return torch's FlexAttention, compiled for these sizes."""
    import torch
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    torch.compiler.reset()  # above dynamo's recompile limit, FlexAttention would silently run uncompiled
    first = torch.as_tensor(lengths - q.shape[1], device=q.device)
    sizes = q.shape[0], None, q.shape[1], k.shape[1]
    mask = create_block_mask(lambda b, h, i, j: j <= first[b] + i, *sizes, q.device)
    queries, keys, values = (x.transpose(1, 2) for x in (q, k, v))
    compiled = torch.compile(flex_attention, dynamic=False)
    return lambda: compiled(queries, keys, values, block_mask=mask, enable_gqa=True).transpose(1, 2)


def _flash_attn(module: str, q: Any, k: Any, v: Any, lengths: np.ndarray[Any, Any]) -> Call:
    """Return flash_attn_with_kvcache of a version of flash-attn."""
    import torch

    function = importlib.import_module(module).flash_attn_with_kvcache
    return partial(function, q, k, v, cache_seqlens=torch.as_tensor(lengths, device=q.device), causal=True)


def _flashinfer(q: Any, k: Any, v: Any, lengths: np.ndarray[Any, Any]) -> Call:
    """Return flashinfer's kernel for paged caches; the contiguous caches are viewed as pages, in order."""
    import torch

    flashinfer = importlib.import_module("flashinfer")
    batch, q_len, heads, dim = q.shape
    capacity, kv_heads = k.shape[1:3]
    pools = tuple(x.view(-1, PAGE, kv_heads, dim) for x in (k, v))
    counts = -(-lengths // PAGE)
    pages = [b * capacity // PAGE + np.arange(count) for b, count in enumerate(counts.tolist())]
    tables = np.append(0, np.cumsum(counts)), np.concatenate(pages), (lengths - 1) % PAGE + 1
    indptr, indices, last = (torch.as_tensor(x.astype(np.int32), device=q.device) for x in tables)
    workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=q.device)
    sizes = heads, kv_heads, dim, PAGE
    if q_len == 1:
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True)
        wrapper.plan(indptr, indices, last, *sizes, q_data_type=q.dtype, kv_data_type=k.dtype)
    else:
        bounds = torch.arange(batch + 1, dtype=torch.int32, device=q.device) * q_len
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")
        wrapper.plan(bounds, indptr, indices, last, *sizes, causal=True, q_data_type=q.dtype, kv_data_type=k.dtype)
    rows = q.view(-1, heads, dim)
    return lambda: wrapper.run(rows, pools).view(q.shape)


LIBRARIES: dict[str, Callable[..., Call]] = {
    "SDPA": _sdpa,
    FLEX_ATTENTION: _flex_attention,
    "flash-attn": partial(_flash_attn, "flash_attn"),
    "flash-attn 3": partial(_flash_attn, "flash_attn_interface"),
    "flashinfer": _flashinfer,
}
