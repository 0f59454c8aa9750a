"""Fields of Case for tests of the wgmma engine: one shape, and one set of options per row."""

# Several tiles of queries and of keys; the last tile of each is partial.
LONG = dict(q_len=150, kv_len=210, batch=1, heads=2, kv_heads=1, head_dim=64, head_dim_v=64, dtype="float16")
OPTIONS = {
    "plain": {},
    "causal": dict(causal=True),
    "causal-more-queries": dict(causal=True, q_len=210, kv_len=150),
    "top-left": dict(causal="top_left"),
    "window": dict(window=(40, 20)),
    "window-left": dict(window=(30, None), causal=True),
    "window-empty-tiles": dict(window=(3, 3), q_len=300, kv_len=40),
    "scale-negative": dict(scale=-0.3),
    "scale-zero": dict(scale=0.0),
    "softcap": dict(softcap=1.5, scale=1.0),
    "alibi": dict(alibi="h", causal=True),
    "bias": dict(bias="1hqk"),
    "bias-hides": dict(bias="1hqk", bias_hides=True, bias_dtype="float32", sink=True),
    "mask": dict(mask="1hqk"),
    "sink": dict(sink=True, causal=True, q_len=210, kv_len=150),
    "dropout": dict(dropout=0.3, causal=True),
    "all": dict(
        causal=True, window=(100, None), softcap=5.0, alibi="bh", bias="qk", mask="1hqk", sink=True, dropout=0.2,
        q_lengths=(140,), kv_lengths=(190,),
    ),
    "lengths": dict(batch=2, q_lengths=(150, 61), kv_lengths=(100, 210)),
    "lengths-zero": dict(batch=3, q_lengths=(0, 150, 20), kv_lengths=(70, 0, 64), sink=True),
    "lengths-causal": dict(batch=2, q_lengths=(150, 61), kv_lengths=(100, 210), causal=True),
    "packed": dict(batch=3, q_lengths=(150, 0, 61), kv_lengths=(100, 30, 190), packed=True),
    "packed-causal": dict(batch=3, q_lengths=(31, 150, 0), kv_lengths=(100, 210, 7), packed=True, causal=True),
    "packed-bias": dict(batch=3, q_lengths=(31, 150, 0), kv_lengths=(100, 210, 7), packed=True, bias="bhqk"),
    "bhsd": dict(layout="bhsd", batch=2, causal=True),
    "grouped": dict(heads=6, kv_heads=2, batch=2),
    "bfloat16": dict(dtype="bfloat16", causal=True),
    "rising": dict(scores="rising"),
    "falling": dict(scores="falling"),
    "huge": dict(scores="huge"),
    "one-query": dict(q_len=1, kv_len=200, causal=True),
    "one-key": dict(kv_len=1, scores="integers"),
    "narrow": dict(head_dim=40, head_dim_v=24),
    "wide-values": dict(head_dim=32, head_dim_v=96),
}  # fmt: skip
# Options that the row "all" has too, or a row of the kind that runs by default: what differs is read only in headers
# shared with simt and mma (mask.cuh, score.cuh, sequence.cuh), whose tests run by default.
READ_IN_SHARED_HEADERS = {
    "top-left", "window", "window-left", "alibi", "bias", "lengths-causal", "packed-bias", "bfloat16",
}  # fmt: skip
BY_DEFAULT = OPTIONS.keys() - READ_IN_SHARED_HEADERS
