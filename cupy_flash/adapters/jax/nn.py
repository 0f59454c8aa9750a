"""A drop-in replacement for jax.nn.dot_product_attention."""

from __future__ import annotations

import operator
import re
from typing import Any, Literal

import jax
import jax.numpy as jnp

from ...problem.records import UnsupportedError
from .op import JaxArray, attend

IMPLEMENTATIONS = (None, "xla", "cudnn")  # the values that jax accepts
NAMES = {
    "q": "query", "k": "key", "v": "value", "q_lengths": "query_seq_lengths", "kv_lengths": "key_value_seq_lengths",
    "window": "local_window_size", "causal": "is_causal",
}  # fmt: skip


def dot_product_attention(
    query: JaxArray,
    key: JaxArray,
    value: JaxArray,
    bias: JaxArray | None = None,
    mask: JaxArray | None = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    query_seq_lengths: JaxArray | None = None,
    key_value_seq_lengths: JaxArray | None = None,
    local_window_size: int | tuple[int, int] | None = None,
    implementation: Literal["xla", "cudnn"] | None = None,
    return_residual: bool = False,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Compute `jax.nn.dot_product_attention` with `attention`.

    The result of a query that attends to no key is 0 with residual -inf; jax returns the mean of the masked values.
    float64 inputs accumulate in float64; the head dimension of value may differ from that of query and key.

    Args:
        query: (B, T, N, H) or (T, N, H).
        key: (B, S, K, H) or (S, K, H), N a multiple of K.
        value: (B, S, K, Hv) or (S, K, Hv).
        bias: floating, broadcastable to (B, N, T, S), added to the logits.
        mask: bool, broadcastable to (B, N, T, S), True = attend.
        scale: of the logits, default 1 / sqrt(H).
        is_causal: query i sees the keys 0 to i (top left), also if T and S differ.
        query_seq_lengths: int32 (B,): rows of query from this length on are 0 in the result.
        key_value_seq_lengths: int32 (B,): keys from this length on are not seen.
        local_window_size: (left, right) or one number for both: query i sees the keys i - left to i + right. Unlike in
            `attention`, -1 is not "no limit".
        implementation: None, "xla" or "cudnn", as in jax; it has no effect.
        return_residual: also return the log-sum-exp of each row, which has no gradient.

    Returns:
        The output, (B, T, N, Hv) or (T, N, Hv), or (output, residual), residual (B, T, N) or (T, N) in key's dtype.

    Raises:
        TypeError: as `attention`; for a local_window_size that is not of integers.
        ValueError: as `attention`; for an unknown implementation.
        UnsupportedError: as `attention`.
    """
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"implementation must be one of {IMPLEMENTATIONS}, not {implementation!r}")
    arrays = [jnp.asarray(x) for x in (query, key, value)]
    batched = arrays[0].ndim != 3
    q, k, v = (x if x.ndim != 3 else x[None] for x in arrays)
    options = _options(q, k, is_causal, local_window_size, query_seq_lengths, key_value_seq_lengths, mask)
    options |= {"bias": None if bias is None else _floating(bias), "scale": scale, "return_lse": True}
    try:
        out, lse = attend("dot_product_attention", {"q": q, "k": k, "v": v}, options)
    except (TypeError, ValueError) as error:
        if type(error) not in (TypeError, ValueError, UnsupportedError):
            raise  # an error that jax raises about the caller's program
        words = re.compile(rf"\b({'|'.join(NAMES)})\b")
        raise type(error)(words.sub(lambda word: NAMES[word[0]], str(error))) from error
    out = out if batched else out[0]
    if not return_residual:
        return out
    residual = jax.lax.stop_gradient(lse.swapaxes(1, 2).astype(k.dtype))
    return out, residual if batched else residual[0]


def _options(
    q: jax.Array, k: jax.Array, is_causal: bool, window: Any, q_lengths: Any, kv_lengths: Any, mask: Any
) -> dict[str, Any]:
    """Return masks and lengths as options of `attention`."""
    options: dict[str, Any] = {"causal": "top_left" if is_causal else False}
    for name, lengths, x in (("q_lengths", q_lengths, q), ("kv_lengths", kv_lengths, k)):
        if lengths is not None:
            options[name] = jnp.clip(jnp.asarray(lengths), 0, x.shape[1])  # jax accepts lengths above the maximum
    options["mask"] = None if mask is None else jnp.asarray(mask)
    if window is None:
        return options
    left, right = _sides(window)
    aligned = q.shape[1] == k.shape[1] and q_lengths is None and kv_lengths is None
    if min(left, right) >= 0 and (is_causal or aligned):
        return options | {"window": (left, right)}
    # A window of `attention` is aligned to the bottom right corner unless causal, and a negative side means no limit;
    # jax's is aligned to the top left, and its sides may be negative: pass it as a mask.
    distance = jnp.arange(k.shape[1]) - jnp.arange(q.shape[1])[:, None]
    seen = (distance >= -left) & (distance <= right)
    options["mask"] = seen if mask is None else options["mask"] & seen
    return options


def _sides(window: Any) -> tuple[int, int]:
    """Return the sides of a window (left, right) as ints."""
    try:
        left, right = window if isinstance(window, (tuple, list)) else (window, window)
        return operator.index(left), operator.index(right)
    except (TypeError, ValueError) as error:
        raise TypeError(
            "dot_product_attention: local_window_size must be None, a whole number or (left, right) of whole numbers, "
            f"not {window!r}"
        ) from error


def _floating(bias: Any) -> jax.Array:
    """Return a bias in a floating dtype; jax also accepts integers."""
    bias = jnp.asarray(bias)
    return bias.astype(jnp.float32) if jnp.issubdtype(bias.dtype, jnp.integer) else bias
