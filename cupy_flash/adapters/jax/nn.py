"""jax.nn.dot_product_attention with its signature: a user changes one import."""

from __future__ import annotations

import operator
import re
from typing import Any, Literal

import jax
import jax.numpy as jnp

from ...problem import UnsupportedError
from .op import JaxArray, attend

IMPLEMENTATIONS = (None, "xla", "cudnn")  # those of jax
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
    """`jax.nn.dot_product_attention`, computed here.

    It differs where no key is seen: such a row of the result is 0 and its residual -inf, while jax averages the values
    that it masks. Sums and residuals of float64 are in float64; value may have a head dimension of its own.

    Args:
        query: (B, T, N, H) or (T, N, H).
        key: (B, S, K, H) or (S, K, H), N a multiple of K.
        value: (B, S, K, Hv) or (S, K, Hv).
        bias: floating, broadcastable to (B, N, T, S), added to the logits.
        mask: bool, broadcastable to (B, N, T, S), True = attend.
        scale: of the logits, default 1 / sqrt(H).
        is_causal: hide the keys after a query; query 0 sees key 0 (top left), whatever T and S are.
        query_seq_lengths: int32 (B,): rows of query past them are not computed, and their result is 0.
        key_value_seq_lengths: int32 (B,): keys past them are not seen.
        local_window_size: (left, right) or one number for both: query i sees the keys i - left to i + right, also
            for a negative number, where -1 of `attention` would be no limit.
        implementation: None, "xla" or "cudnn", as jax takes it; it is the same for all of them.
        return_residual: also return the logarithm of every row's denominator, which has no gradient.

    Returns:
        The output, (B, T, N, Hv) or (T, N, Hv), or (output, residual), residual (B, T, N) or (T, N) in key's dtype.

    Raises:
        TypeError: as `attention`; for a local_window_size of other than whole numbers.
        ValueError: as `attention`; for another implementation.
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
            raise  # of jax, about the caller's program
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
    """Masks and lengths as options of `attention`."""
    options: dict[str, Any] = {"causal": "top_left" if is_causal else False}
    for name, lengths, x in (("q_lengths", q_lengths, q), ("kv_lengths", kv_lengths, k)):
        if lengths is not None:
            options[name] = jnp.clip(jnp.asarray(lengths), 0, x.shape[1])  # jax takes lengths that are too large
    options["mask"] = None if mask is None else jnp.asarray(mask)
    if window is None:
        return options
    left, right = _sides(window)
    aligned = q.shape[1] == k.shape[1] and q_lengths is None and kv_lengths is None
    if min(left, right) >= 0 and (is_causal or aligned):
        return options | {"window": (left, right)}
    # Without causal, the window of `attention` starts from the bottom right corner of what the lengths leave, and none
    # of its sides may be negative.
    distance = jnp.arange(k.shape[1]) - jnp.arange(q.shape[1])[:, None]
    seen = (distance >= -left) & (distance <= right)
    options["mask"] = seen if mask is None else options["mask"] & seen
    return options


def _sides(window: Any) -> tuple[int, int]:
    """The sides of a window, left and right, each a whole number."""
    try:
        left, right = window if isinstance(window, (tuple, list)) else (window, window)
        return operator.index(left), operator.index(right)
    except (TypeError, ValueError) as error:
        raise TypeError(
            "dot_product_attention: local_window_size must be None, a whole number or (left, right) of whole numbers, "
            f"not {window!r}"
        ) from error


def _floating(bias: Any) -> jax.Array:
    """A bias as `attention` takes it: jax adds one of integers, too."""
    bias = jnp.asarray(bias)
    return bias.astype(jnp.float32) if jnp.issubdtype(bias.dtype, jnp.integer) else bias
