"""Other installed implementations of attention, which `tune` measures only for comparison."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from ..problem.recorded_call import Trial

if TYPE_CHECKING:
    import torch

# Names in reports -> torch's SDPBackend.
SDPA = {"SDPA flash": "FLASH_ATTENTION", "SDPA cuDNN": "CUDNN_ATTENTION", "SDPA efficient": "EFFICIENT_ATTENTION"}
FLASH_ATTN = "flash-attn"
HALF = ("float16", "bfloat16")


def missing() -> str:
    """Return the reason why this process cannot measure other implementations; "" if it can."""
    if importlib.util.find_spec("torch") is None:
        return "torch is not installed"
    import torch

    return "" if torch.cuda.is_available() else "torch finds no GPU"


def names(trial: Trial) -> tuple[str, ...]:
    """Return the implementations that can compute a call: full or causal self-attention without other options."""
    others = trial.window, trial.options, trial.packed, trial.mods, trial.cache, trial.deterministic, trial.shared_kv
    # Peers may align the causal diagonal top left or bottom right, which is the same only for Sq = Sk.
    if any(others) or (trial.causal and trial.q_len != trial.kv_len) or trial.dtype not in (*HALF, "float32"):
        return ()
    if trial.dtype == "float32":
        return ("SDPA efficient",)
    return (*SDPA, FLASH_ATTN) if importlib.util.find_spec("flash_attn") else tuple(SDPA)


def peer(name: str, trial: Trial, device: str = "cuda") -> Callable[[], torch.Tensor | tuple[torch.Tensor, ...]]:
    """Return a function that runs a peer on random tensors: the forward, or for a backward the gradients.

    It raises an exception of the peer's own if the peer does not support the call.
    """
    import torch

    def tensor(length: int, heads: int, dim: int) -> torch.Tensor:
        x = torch.randn((trial.batch, heads, length, dim), device=device).to(getattr(torch, trial.dtype))
        return x.requires_grad_(trial.backward)

    dim_v = trial.head_dim_v or trial.head_dim
    q = tensor(trial.q_len, trial.heads, trial.head_dim)
    k, v = (tensor(trial.kv_len, trial.kv_heads, dim) for dim in (trial.head_dim, dim_v))
    forward = partial(_flash_attn if name == FLASH_ATTN else partial(_sdpa, SDPA[name]), q, k, v, bool(trial.causal))
    if not trial.backward:
        return forward
    out = forward()
    return partial(torch.autograd.grad, out, (q, k, v), torch.randn_like(out), retain_graph=True)


def _sdpa(backend: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    with sdpa_kernel(getattr(SDPBackend, backend)):
        return scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1])


def _flash_attn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
    flash_attn = importlib.import_module("flash_attn")
    return flash_attn.flash_attn_func(*(x.transpose(1, 2) for x in (q, k, v)), causal=causal).transpose(1, 2)
