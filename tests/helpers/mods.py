"""score_mods and mask_mods for the tests of attention, for NumPy and torch arrays."""

import numpy as np


def arrays_of(case):
    """Return the arrays that the mods of a case capture, by name."""
    rng = np.random.default_rng([case.seed, 2])
    rows, batch, heads = max(case.q_len, case.kv_len), case.batch, case.heads
    floating = {
        "slopes": rng.uniform(0, 0.5, heads),
        "table": rng.normal(size=(heads, 15)),
        "plane": rng.normal(size=(batch, heads, case.q_len, case.kv_len)),
        "row_bias": rng.normal(size=(batch, rows)),
        "values": rng.normal(size=(6, 6)),
        "number": rng.uniform(0.5, 1.5, ()),
        "key_bias": np.cos(np.arange(rows * heads)).reshape(rows, heads),
    }
    whole = {
        "ids": np.sort(rng.integers(0, 4, (batch, rows)), axis=1),
        "buckets": rng.integers(0, 6, rows).astype(np.int32),
        "blocks": rng.random((batch, *(2 * [max(8, -(-rows // 4))]))) < 0.6,
    }
    # The plane is the view of a transposed array, because callers pass such views.
    strided = {"plane": np.ascontiguousarray(floating["plane"].swapaxes(2, 3)).swapaxes(2, 3)}
    return (
        {name: np.asarray(x, np.float32) for name, x in floating.items()}
        | {name: x.astype(np.float32) for name, x in strided.items()}
        | whole
    )


def relative(xp, a):
    return lambda s, b, h, q, kv: s + a["table"][h, xp.clip(q - kv, -7, 7) + 7]


def learned_twice(xp, a):
    """Return a score_mod that reads one table twice, with indices from another table."""

    def mod(s, b, h, q, kv):
        first, second = a["buckets"][q], a["buckets"][kv]
        return s * a["values"][first, second] + xp.tanh(a["values"][second, first] * s) * a["number"]

    return mod


def hides_by_score(xp, a):
    """Return a score_mod that hides keys by position and by score; the scores of some rows hide all their keys."""

    def mod(s, b, h, q, kv):
        largest = xp.where(q % 5 == 2, -1000.0, 0.7)
        return xp.where(s <= largest, xp.where(q + 5 < kv, -np.inf, s * a["number"]), -np.inf)

    return mod


SCORE_MODS = {
    "alibi": lambda xp, a: lambda s, b, h, q, kv: s - a["slopes"][h] * abs(q - kv),
    "softcap": lambda xp, a: lambda s, b, h, q, kv: 3 * xp.tanh(s / 3),
    "relative": relative,
    "dense": lambda xp, a: lambda s, b, h, q, kv: s + a["plane"][b, h, q, kv],
    "row-bias": lambda xp, a: lambda s, b, h, q, kv: s * a["number"] + a["row_bias"][b, kv] - a["row_bias"][b, q],
    "key-bias": lambda xp, a: lambda s, b, h, q, kv: s + a["key_bias"][kv, h],
    "learned-twice": learned_twice,
    "choice": lambda xp, a: lambda s, b, h, q, kv: xp.where(s > 0, xp.sqrt(s), xp.exp(s) - 1),
    "hides": lambda xp, a: lambda s, b, h, q, kv: xp.where((q + kv) % 3 == 0, -np.inf, s * 1.5),
    "hides-by-sum": lambda xp, a: lambda s, b, h, q, kv: s * a["number"] + xp.where((q + kv) % 3 == 0, -np.inf, 0.0),
    "hides-by-score": hides_by_score,
}
MASK_MODS = {
    "causal": lambda xp, a: lambda b, h, q, kv: q >= kv,
    "sliding": lambda xp, a: lambda b, h, q, kv: (q - kv < 6) & (kv - q < 3),
    "borders": lambda xp, a: lambda b, h, q, kv: (q < 16) | (kv < 16) | ((q - kv < 6) & (kv - q < 3)),
    "document": lambda xp, a: lambda b, h, q, kv: a["ids"][b, q] == a["ids"][b, kv],
    # Hides whole tiles of up to 64 keys or queries between tiles that it cuts.
    "gaps": lambda xp, a: lambda b, h, q, kv: ((q % 128 < 40) & (kv % 128 < 50)) | ((q >= 140) & (kv >= 200)),
    "blocks": lambda xp, a: lambda b, h, q, kv: a["blocks"][b, q // 4, kv // 4],
    "rows": lambda xp, a: lambda b, h, q, kv: (q % 5 != 2) & (h != 1),  # some rows, and all rows of a head, see no key
    "nothing": lambda xp, a: lambda b, h, q, kv: q < 0,
}


def mods_of(case, xp=np, arrays=None):
    """Return the options score_mod and mask_mod of a case."""
    if case.score_mod is None and case.mask_mod is None:
        return {}
    arrays = arrays_of(case) if arrays is None else arrays
    given = {}
    if case.score_mod is not None:
        given["score_mod"] = SCORE_MODS[case.score_mod](xp, arrays)
    if case.mask_mod is not None:
        given["mask_mod"] = MASK_MODS[case.mask_mod](xp, arrays)
    return given
