"""Calls with lists of selected keys."""

import numpy as np
from cases import Case

B, SQ, SK, HQ, HK, D, DV = 2, 19, 43, 4, 2, 16, 8


def lists_of(rng, heads=1, block=1, rows=1, n=7, batch=B, q_len=SQ, kv_len=SK):
    """Return random lists; a fifth of the entries names no key, and the first list is empty."""
    blocks, n = -(-kv_len // block), min(n, -(-kv_len // block))
    shape = (batch, heads, -(-q_len // rows))
    lists = np.argsort(rng.random((*shape, blocks)), axis=-1)[..., :n].astype(np.int32)
    lists[rng.random(lists.shape) < 0.2] = -1
    lists[0, 0, 0] = -1
    return lists


CASES = {
    "keys": dict(),
    "keys-causal-heads": dict(heads=HK, case=dict(causal=True)),
    "query-heads-bias": dict(heads=HQ, case=dict(bias="1hqk", bias_hides=True)),
    "blocks-window": dict(block=8, case=dict(window=(20, 3))),
    "rows-sink": dict(block=8, rows=4, heads=HK, case=dict(sink=True)),
    "last-list-and-block-are-cut": dict(block=16, rows=8, heads=HQ, case=dict(softcap=2.0)),
    "dropout-mask": dict(rows=3, case=dict(dropout=0.3, mask="b1qk")),
    "lengths-alibi": dict(block=8, case=dict(q_lengths=(19, 8), kv_lengths=(30, 43), alibi="bh")),
    "bhsd": dict(heads=HK, case=dict(layout="bhsd", causal="top_left")),
    "one-sequence-of-lists": dict(batch=1, n=43),
    "bfloat16": dict(n=30, case=dict(dtype="bfloat16")),
}


def call_of(name, **options):
    """Return the case of a name, with more options of a Case, and its call with lists."""
    made = dict(CASES[name])
    options = dict(batch=B) | made.pop("case", {}) | options
    made["batch"] = min(made.get("batch", B), options["batch"])
    case = Case(q_len=SQ, kv_len=SK, heads=HQ, kv_heads=HK, head_dim=D, head_dim_v=DV, **options)
    call = case.call()
    selected = dict(selected=lists_of(np.random.default_rng(1), **made))
    selected |= dict(selected_block=made.get("block", 1), selected_rows=made.get("rows", 1))
    return case, call._replace(options=call.options | selected)


def normal(seed, *shapes):
    """Return an array of normal numbers of each shape."""
    rng = np.random.default_rng(seed)
    return [rng.normal(size=shape) for shape in shapes]
