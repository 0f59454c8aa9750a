"""cupy_flash as an attention backend of diffusers, by the name `cupy_flash`.

After `register()`, `model.set_attention_backend("cupy_flash")` and diffusers' `attention_backend("cupy_flash")` choose
it for models that call diffusers' dispatcher, such as Flux and Wan. UNets and SD3 call torch's SDPA, which
`cupy_flash.adapters.torch.sdpa` serves.
"""

from __future__ import annotations

from typing import Any

import diffusers
from diffusers.models import attention_dispatch

from ..problem.records import UnsupportedError
from .torch import scaled_dot_product_attention

NAME, MEMBER = "cupy_flash", "CUPY_FLASH"
TESTED = "0.42."  # diffusers has no public way to add a backend, so other versions may differ in what is extended here


def register() -> None:
    """Add the backend `cupy_flash` to diffusers; nothing happens if it is there.

    Raises:
        UnsupportedError: this version of diffusers is not the one whose dispatcher is known.
    """
    if not diffusers.__version__.startswith(TESTED):
        raise UnsupportedError(f"diffusers {diffusers.__version__}: its dispatcher is known for {TESTED}x alone")
    names = attention_dispatch.AttentionBackendName
    if MEMBER in names.__members__:
        return
    # An Enum is closed: its members are made by its class body alone.
    member = str.__new__(names, NAME)
    member._name_, member._value_ = MEMBER, NAME
    names._member_map_[MEMBER] = names._value2member_map_[NAME] = member
    names._member_names_.append(MEMBER)
    attention_dispatch._AttentionBackendRegistry.register(member)(_attend)


def unregister() -> None:
    """Undo `register`; where `cupy_flash` is the active backend, diffusers' default "native" replaces it.

    Call `model.reset_attention_backend()` on the models that have chosen it first.
    """
    names, registry = attention_dispatch.AttentionBackendName, attention_dispatch._AttentionBackendRegistry
    member = names._member_map_.pop(MEMBER, None)
    if member is None:
        return
    del names._value2member_map_[NAME]
    names._member_names_.remove(MEMBER)
    for table in (registry._backends, registry._constraints, registry._supported_arg_names):
        del table[member]
    if registry._active_backend is member:
        registry.set_active_backend(names.NATIVE)


def _attend(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    _parallel_config: Any = None,
) -> Any:
    """Return attention of tensors (B, S, H, D); a mask (B, Sk) is one of keys, as in diffusers' backend "native"."""
    if return_lse or _parallel_config is not None:
        asked = "return_lse" if return_lse else "context parallelism"
        raise UnsupportedError(f"diffusers' backend {NAME}: {asked} is not supported")
    if attn_mask is not None and attn_mask.shape == (query.shape[0], key.shape[1]):
        attn_mask = attn_mask[:, None, None]
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    out = scaled_dot_product_attention(
        q, k, v, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )  # fmt: skip
    return out.transpose(1, 2)
