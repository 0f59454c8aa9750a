"""A slow definition of which keys each query sees, pair by pair."""

import numpy as np


def sees(mask, q_len, kv_len):
    """Return bool (q_len, kv_len), True where i + o - left <= j <= i + o + right, computed one pair at a time."""
    o = 0 if mask.top_left else kv_len - q_len
    return np.array(
        [
            [
                (mask.left is None or j >= i + o - mask.left) and (mask.right is None or j <= i + o + mask.right)
                for j in range(kv_len)
            ]
            for i in range(q_len)
        ],
        bool,
    ).reshape(q_len, kv_len)
