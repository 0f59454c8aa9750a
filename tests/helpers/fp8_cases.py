"""Calls in fp8 (e4m3): fields of Case, calls with quantised operands, and their references."""

import ml_dtypes
import numpy as np
from cases import Result

from cupy_flash import reference

FP8 = np.dtype(ml_dtypes.float8_e4m3fn)
# Several tiles of keys, and for some rows several of queries, the last one partial. dtype is that of out, bias and
# sink.
LONG = dict(q_len=100, kv_len=150, batch=1, heads=2, kv_heads=1, head_dim=64, head_dim_v=64, dtype="bfloat16")
OPTIONS = {
    "plain": {},
    "sink-causal-more-queries": dict(sink=True, causal=True, q_len=150, kv_len=100),
    "window": dict(window=(40, 20), q_len=140),
    "window-empty-tiles": dict(window=(3, 3), q_len=200, kv_len=40),
    "scale-negative": dict(scale=-0.3),
    "softcap": dict(softcap=1.5, scale=1.0),
    "alibi": dict(alibi="h", causal=True),
    "bias": dict(bias="1hqk", bias_hides=True, bias_dtype="float32", sink=True),
    "mask": dict(mask="1hqk"),
    "dropout": dict(dropout=0.5, causal=True),
    "all": dict(
        causal=True, window=(100, None), softcap=5.0, alibi="bh", bias="qk", mask="1hqk", sink=True, dropout=0.2,
        q_lengths=(130,), kv_lengths=(140,), q_len=140,
    ),
    "lengths-zero": dict(batch=3, q_len=140, q_lengths=(0, 140, 20), kv_lengths=(70, 0, 64), sink=True),
    "packed": dict(batch=3, q_len=140, q_lengths=(40, 0, 130), kv_lengths=(100, 30, 150), packed=True),
    "packed-causal": dict(batch=2, q_len=140, q_lengths=(31, 140), kv_lengths=(64, 150), packed=True, causal=True),
    "bhsd-grouped": dict(layout="bhsd", batch=2, heads=4, kv_heads=2, causal=True),
    "rising": dict(scores="rising", kv_len=140),
    "falling": dict(scores="falling", kv_len=140),
    "one-query": dict(q_len=1, kv_len=130, causal=True),
    "narrow": dict(head_dim=48, head_dim_v=16),
    "wide-values": dict(head_dim=32, head_dim_v=128),
}  # fmt: skip


def quantised(case, descales=True):
    """Return the call of a case with q, k and v quantised to e4m3 and random descales; rows past a length are NaN."""
    call = case.call()
    options = dict(call.options)
    if descales:
        rng = np.random.default_rng(case.seed)
        batch = case.batch if call.packed is None else len(call.packed.cu_seqlens_q) - 1
        for name in ("q_descale", "k_descale", "v_descale"):
            options[name] = rng.uniform(0.5, 2, (batch, case.kv_heads)).astype(np.float32)
    return call._replace(q=call.q.astype(FP8), k=call.k.astype(FP8), v=call.v.astype(FP8), options=options)


def references(call):
    """Return results of the formula in fp64, and of its low-precision run in fp8."""
    results = []
    for dtype in (None, FP8):
        with np.errstate(invalid="ignore", over="ignore"):
            if call.packed is None:
                result = reference.attention(*call[:3], dtype=dtype, **call.options)
            else:
                result = reference.attention_varlen(*call[:3], *call.packed[:2], dtype=dtype, **call.options)
        results.append(Result(*result, *[None] * 5))
    return results
