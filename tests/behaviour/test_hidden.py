"""NaN and infinity in keys that masks hide, on the GPU engines (docs/limits.md).

In K they reach no row. In V they reach rows only through the matrix products of tiles that a kernel visits.
"""

import ml_dtypes
import numpy as np
import pytest
from tiers import exhaustive
from tiles import in_small_tiles

from cupy_flash import dispatch
from cupy_flash.engines import tcgen05, wgmma
from cupy_flash.plan.plan import plan
from cupy_flash.problem.build import pose
from cupy_flash.problem.records import Options, Saved

FORWARD, BACKWARD, FP8, BLACKWELL = (
    wgmma.forward.Tile(128, 64, stages=2, persistent=False, takes_turns=False, paired=False),
    wgmma.backward.Tile(64, 128, stages=2, dq_in_bulk=False),
    wgmma.forward_fp8.Tile(128, 64, stages=2, sum_columns=64),
    tcgen05.Tile(128, 128, stages=2),
)
# Each head has one of these values in one array; the last head has none and is the reference.
POISONS = (("k", np.nan), ("k", np.inf), ("v", np.nan), ("q", np.nan), ("dout", np.nan))
HEADS, CLEAN = len(POISONS) + 1, -1


def visited(band, tile):
    """Return the mask (entry, 1, query, key) of all tiles that contain a visible pair of the band."""
    q_len, kv_len = band.shape[-2:]
    tiles = np.arange(q_len)[:, None] // tile[0] * kv_len + np.arange(kv_len) // tile[1]
    return np.stack([np.isin(tiles, tiles[entry]) for entry in band[:, 0]])[:, None]


def differs(x):
    """Return the mask of the elements that differ from those of the clean head, where NaN equals NaN."""
    return (x != x[:, CLEAN:]) & ~(np.isnan(x) & np.isnan(x[:, CLEAN:]))


@pytest.mark.parametrize(
    ("engine", "dtype", "arch", "q_len", "kv_len", "head_dim"),
    [
        ("simt", "float32", "sm_80", 20, 44, 8),
        ("mma", "bfloat16", "sm_80", 70, 70, 16),
        ("wgmma", "bfloat16", "sm_90a", 140, 140, 64),
        ("wgmma", "float8_e4m3fn", "sm_90a", 140, 140, 64),
        exhaustive("tcgen05", "bfloat16", "sm_100a", 140, 140, 64),
    ],
    ids=["simt", "mma", "wgmma", "fp8", "tcgen05"],
)
def test_values_of_hidden_keys_stay_in_their_tile(engine, dtype, arch, q_len, kv_len, head_dim, poisoned_memory):
    """A window and lengths hide keys; mask and bias also hide them from some rows of the second batch entry, and from
    all rows of the third. Heads differ only in the poisoned array.
    """
    forward_tile = BLACKWELL if engine == "tcgen05" else FP8 if dtype == "float8_e4m3fn" else FORWARD
    rng = np.random.default_rng(0)
    dtype = np.dtype(getattr(ml_dtypes, dtype, dtype))

    def same_in_all_heads(length):
        return rng.normal(size=(3, 1, length, head_dim)).astype(dtype).repeat(HEADS, axis=1)

    arrays = dict(zip(("q", "k", "v", "dout"), map(same_in_all_heads, (q_len, kv_len, kv_len, q_len)), strict=True))
    query, keys = q_len - 10, [kv_len - 12, kv_len - 9]
    poisoned_keys = np.zeros((HEADS, 1, kv_len), bool)
    for head, (name, value) in enumerate(POISONS):
        if dtype.itemsize > 1 or np.isnan(value):  # e4m3 has no infinity
            arrays[name][:, head, keys if name in "kv" else query, 3] = value
            poisoned_keys[head, :, keys] = name in "kv"

    q_lengths, kv_lengths = np.array([q_len - 3, q_len, q_len]), np.array([kv_len - 2, kv_len, kv_len])
    mask, unhidden = np.ones((2, 3, 1, q_len, kv_len), bool)
    mask[1], unhidden[1] = rng.random((2, 1, q_len, kv_len)) < 0.7
    mask[2, ..., keys[0]] = unhidden[2, ..., keys[1]] = False
    offset, left = (kv_lengths - q_lengths)[:, None, None, None], kv_len // 3
    i, j = np.arange(q_len)[:, None], np.arange(kv_len)
    band = (j <= i + offset) & (j >= i + offset - left) & (i < q_lengths[:, None, None, None])
    sees = band & mask & unhidden
    options = Options(
        window=(left, 0),
        softcap=5.0,
        mask=mask,
        bias=np.where(unhidden, 0, -np.inf).astype(np.float32).repeat(HEADS, axis=1),
        q_lengths=q_lengths.astype(np.int32),
        kv_lengths=kv_lengths.astype(np.int32),
        layout="bhsd",
        backend=f"simulator:{arch}",
        engine=engine,
    )

    def posed(saved=None):
        problem, operands = pose("hidden", tuple(arrays[name] for name in "qkv"), options, None, saved)
        if engine in ("wgmma", "tcgen05"):
            tile = forward_tile if saved is None else BACKWARD
            chosen = plan(problem, dispatch.device_of(problem), tile)
        else:
            chosen = in_small_tiles(problem)
        return chosen, operands, {step.function: visited(band, step.tile) for step in chosen.launches if step.tile}

    # (entry, head, query, column) and (entry, head, query)
    *chosen, tiles = posed()
    out, lse = (array.numpy() for array in dispatch.run_forward(*chosen))
    reached, lse_reached = differs(out.astype(np.float32)), differs(lse)
    seeing = sees[..., keys].any(-1)
    assert seeing[:2].any() and not seeing[:2].all() and not seeing[2].any()
    (in_tile,) = (tile[..., keys].any(-1) for tile in tiles.values())
    assert in_tile.any() and not in_tile.all()
    expected, expected_lse = np.zeros(reached.shape, bool), np.zeros(lse_reached.shape, bool)
    expected[:, 0], expected_lse[:, 0] = seeing[:, 0, :, None], seeing[:, 0]
    # the sign of q decides whether inf becomes NaN
    expected[:, 1], expected_lse[:, 1] = reached[:, 1] & seeing[:, 0, :, None], lse_reached[:, 1] & seeing[:, 0]
    expected[:, 2, :, 3] = in_tile[:, 0]
    expected[:, 3, query] = expected_lse[:, 3, query] = True
    np.testing.assert_array_equal(reached, expected)
    np.testing.assert_array_equal(lse_reached, expected_lse)
    if dtype.itemsize == 1 or engine == "tcgen05":  # fp8 has no backward; that of tcgen05 is not tested here
        return

    rows = reached.any(-1) | lse_reached
    rows[:, 4, query] = True
    *chosen, tiles = posed(Saved(arrays["dout"], out, lse, None))
    gradients = dispatch.run_backward(*chosen)
    dq, dk, dv = (differs(getattr(gradients, name).numpy().astype(np.float32)).any(-1) for name in ("dq", "dk", "dv"))
    kv_tiles = tiles["backward" if "backward" in tiles else "backward_kv"]
    q_tiles = tiles.get("backward_q", kv_tiles)  # without a dQ kernel, the key blocks add to dQ
    assert not (dq & ~rows & ~(q_tiles & poisoned_keys).any(-1)).any()
    reached_keys = (rows[..., None] & kv_tiles).any(2)
    assert not (dv & ~reached_keys).any()
    assert not (differs(gradients.dbias.numpy()) & ~(tiles["backward_bias"] & (rows[..., None] | poisoned_keys))).any()
    poisoned_keys[:2] = False  # in K of keys that no row sees, NaN and infinity must not reach dK
    assert not (dk & ~reached_keys & ~poisoned_keys[:, 0]).any()
