"""score_mod and mask_mod with a KV cache in the kernels of mma_decode, mma and simt, on the simulator."""

import inspect
from dataclasses import replace

import numpy as np
import pytest
from cache_cases import CacheCase, check, posed, run_kernels
from planting import change, planted
from test_cache_mods import CASES, MODS, OFFSET, TABLE, strided, with_mods
from test_invariance import assert_bits, at
from tiers import exhaustive, in_tiers

import cupy_flash
from cupy_flash import device
from cupy_flash.engines import mma_decode
from cupy_flash.gpu import ahead
from cupy_flash.jit import nvrtc
from cupy_flash.jit.source import assemble
from cupy_flash.plan.plan import plan
from cupy_flash.simulator.errors import SimulationError

pytestmark = pytest.mark.usefixtures("poisoned_memory")

ENGINES = {"mma_decode": "float16", "mma": "bfloat16", "simt": "float32"}
ROWS = {
    f"{engine}-{name}": (engine, replace(case, dtype=dtype))
    for engine, dtype in ENGINES.items()
    for name, case in CASES.items()
    if engine == "mma_decode" or (case.cache_dtype is None and case.split_size is None)
}
DEFAULT = ("mma_decode-paged", "mma_decode-positions", "mma-paged")


@pytest.mark.parametrize("row", in_tiers(ROWS, DEFAULT))
def test_the_formula(row):
    engine, case = row
    call = with_mods(case)
    check(case, run_kernels(call, engine=engine), call=call)


# Documents and windows, which hide whole tiles of keys

CAPACITY = 512
DOCUMENTS = np.sort(np.random.default_rng(3).integers(0, 6, (4, CAPACITY)).astype(np.int32))


def documents(b, h, q_idx, kv_idx):
    """Let a query see the earlier keys of its document.

    The kernels classify tiles by the extremes of the captured array, in the rows that captured_start selects.
    """
    return (DOCUMENTS[b, q_idx] == DOCUMENTS[b, kv_idx]) & (q_idx >= kv_idx)


def windows(b, h, q_idx, kv_idx):
    """Let each head see a window of its own and the first keys, so that heads of a GQA group visit different tiles."""
    return ((q_idx - kv_idx <= 40 * (h + 1)) | (kv_idx < 4)) & (kv_idx <= q_idx)


LONG = CacheCase(
    lengths=(500, 300, 64, 0), q_len=9, capacity=CAPACITY, page=16, heads=4, kv_heads=2, causal=False, dtype="float16",
    appended=9,
)  # fmt: skip


@pytest.mark.exhaustive
@pytest.mark.parametrize("mask", [documents, windows])
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("positions", [False, True])
def test_masks_with_hidden_tiles(mask, engine, positions):
    case = replace(LONG, positions=positions, lengths=(490, 300, 64, 0))
    call = with_mods(case, mask_mod=mask)
    check(case, run_kernels(call, engine=engine), call=call)


def neighbours(b, h, q_idx, kv_idx):
    """Let a query see nearby keys of its document, before and after it.

    Heads of even index do not see the first 100 keys, and no query sees the third tile of a decode.
    """
    nearby = (DOCUMENTS[b, q_idx] == DOCUMENTS[b, kv_idx]) & (abs(q_idx - kv_idx) <= 40)
    return nearby & ((kv_idx >= 100) | (h % 2 == 1)) & (kv_idx // 64 != 2)


KERNELS = {**{engine: dict(engine=engine) for engine in ENGINES}, "producer-warp": dict(arch="sm_90a", tma=True)}


@pytest.mark.parametrize("kernels", KERNELS.values(), ids=KERNELS)
def test_a_tree_in_documents(kernels):
    """Random positions: neither the first head of a group nor the first and last query bound what a tile sees."""
    case = replace(LONG, lengths=(250, 130), q_len=5, appended=None, page=None, positions=True, capacity=256)
    call = with_mods(case, mask_mod=neighbours)
    check(case, run_kernels(call, **kernels), call=call)


@pytest.mark.exhaustive
@pytest.mark.parametrize("arch", ["sm_75", "sm_90a"])
@pytest.mark.parametrize("page", [None, 1, 256])
def test_any_gpu_and_page_size(arch, page):
    case = replace(LONG, page=page, lengths=(490, 300, 64, 0), head_dim=64, head_dim_v=64)
    call = with_mods(
        case, **MODS | dict(score_mod=lambda s, b, h, q_idx, kv_idx: s - 0.01 * (h + 1) * (q_idx - kv_idx))
    )
    check(case, run_kernels(call, arch=arch), call=call)


@pytest.mark.exhaustive
@pytest.mark.parametrize("mask", [documents, windows])
def test_a_producer_warp_skips_the_same_tiles(mask):
    case = replace(LONG, lengths=(490, 300, 64, 0), head_dim=64, head_dim_v=64)
    call = with_mods(case, mask_mod=mask)
    results = run_kernels(call, arch="sm_90a", tma=True)
    check(case, results, call=call)
    assert_bits(run_kernels(call, arch="sm_90a"), results, slice(None))


@pytest.mark.parametrize("engine", ["mma_decode", exhaustive("mma")])
def test_hidden_tiles_are_not_read(engine, watch):
    """With 1024 keys and a window of 64 as a mask_mod a decode reads at most 192 keys, once per key/value head.

    The forward kernel of mma reads them once per query head.
    """
    case = CacheCase(lengths=(1024,), capacity=1024, page=16, heads=2, kv_heads=1, dtype="float16", causal=False)
    call = with_mods(case, mask_mod=lambda b, h, q_idx, kv_idx: q_idx - kv_idx < 64)
    run_kernels(call, engine=engine, start=watch.start)
    kernel, heads = ("decode", 1) if engine == "mma_decode" else ("forward", 2)
    assert watch.counters[kernel].global_bytes_read <= heads * 192 * 2 * 2 * 16


# Bitwise equality


@pytest.mark.exhaustive
@pytest.mark.parametrize("rows", [32, 64])
def test_rows_of_a_tile_change_no_bit(rows):
    """Tiles with more rows skip fewer tiles of keys, but the bits of a row stay the same."""
    case = replace(LONG, lengths=(490, 20, 64, 0), split_size=64)
    call = with_mods(
        case, score_mod=lambda s, b, h, q_idx, kv_idx: s * 1.5 - 0.1 * abs(q_idx - kv_idx), mask_mod=windows
    )
    expected = run_kernels(call, rows=16)
    for a, b in zip(run_kernels(call, rows=rows), expected, strict=True):
        assert a.tobytes() == b.tobytes()


@pytest.mark.exhaustive
@pytest.mark.parametrize("mask", [strided, windows])
def test_the_batch_changes_no_bit(mask):
    table = np.random.default_rng(5).normal(size=(4, CAPACITY)).astype(np.float32)
    case = replace(LONG, page=None, lengths=(200, 330, 7, 300), split_size=64)
    call = with_mods(case, score_mod=lambda s, b, h, q_idx, kv_idx: s + table[h, kv_idx], mask_mod=mask)
    whole = run_kernels(call)
    for rows, blocks in (([1], None), ([3, 1, 0, 2], 5), ([0, 0, 3], None)):
        assert_bits(run_kernels(at(call, rows), blocks=blocks), whole, rows)


# Invalid contents of arrays, plans, planted bugs


@pytest.mark.parametrize("engine", ["mma_decode", exhaustive("mma"), exhaustive("simt")])
def test_invalid_positions_are_clamped(engine):
    """Invalid positions cause no read of a captured array out of bounds, nor change the other sequence's result."""
    case = CacheCase(lengths=(5, 9), q_len=2, positions=True, dtype="float16")

    def spoil(operands):
        operands.cache.positions.numpy()[0] = -(2**31), case.capacity

    expected = run_kernels(with_mods(case), engine=engine)
    out = run_kernels(with_mods(case), engine=engine, spoil=spoil)[0]
    assert out[1].tobytes() == expected[0][1].tobytes()


def test_explain_shows_the_mods():
    call = with_mods(CacheCase(dtype="float16", page=8))
    text = cupy_flash.explain_with_kv_cache(*call[:3], **call.options, backend="simulator")
    assert "engine     mma_decode" in text
    assert "mods       by_position and strided" in text
    assert "array0     float32 (4, 40)" in text
    assert "slope" not in text and "gradient" not in text


@pytest.mark.parametrize("arch", ["sm_80", exhaustive("sm_90a")])
def test_compile_covers_mods(arch):
    """compile(cache=True) with mods builds the kernels for any length, and for other captured arrays of the same
    ranks.
    """
    on = device.named(arch, "cuda")
    table = np.zeros((1, 1), np.float32)
    offset = np.zeros(1, np.float32)
    like = dict(score_mod=lambda score, b, h, q_idx, kv_idx: score + table[0, kv_idx] + offset[q_idx], mask_mod=strided)
    built = {x.text_key for x in ahead.launches(on, dtype="float16", head_dim=16, group=1, cache=True, **like)}
    given = dict(
        score_mod=lambda score, b, h, q_idx, kv_idx: score + TABLE[0, kv_idx] + OFFSET[q_idx], mask_mod=strided
    )
    for q_len in (1, 9, 40, 100):
        call = with_mods(CacheCase(q_len=q_len, kv_heads=4, appended=1, dtype="float16", page=8), **given)
        problem = posed(call)[0]._replace(device="cuda:0")
        assert {x.text_key for x in plan(problem, on).launches} <= built


@pytest.mark.exhaustive
@pytest.mark.parametrize(("arch", "dim"), [("sm_80", 256), ("sm_90a", 256), ("sm_120", 64), ("sm_120", 128)])
@pytest.mark.parametrize("page", [None, 16])
@pytest.mark.parametrize("mask_mod", [None, lambda b, h, q_idx, kv_idx: DOCUMENTS[b, q_idx] == DOCUMENTS[b, kv_idx]])
def test_every_tile_compiles_without_spills(arch, dim, page, mask_mod, monkeypatch):
    """Spills are likely, because the registers of the loop over a block's parts stay live in the mainloop."""
    monkeypatch.setattr(nvrtc, "flags", inspect.unwrap(nvrtc.flags))
    call = CacheCase(lengths=(500,), capacity=CAPACITY, heads=8, kv_heads=1, dtype="float16", head_dim=dim,
                     head_dim_v=dim, page=page).call()  # fmt: skip
    call = call._replace(options=call.options | dict(mask_mod=mask_mod))
    problem, _ = posed(call, backend=f"simulator:{arch}", engine="mma_decode")
    on = device.named(arch)
    for tile in mma_decode.legal_tiles(problem, on):
        (decode,) = (launch for launch in mma_decode.launches(problem, on, tile) if launch.function == "decode")
        text = assemble(decode.kernel, dict(decode.constants), dict(decode.headers))
        took = nvrtc.compile(text, decode.kernel, arch).resources["decode"]
        assert (took.spill_stores, took.spill_loads) == (0, 0), tile


EITHER = (AssertionError, SimulationError)
BUGS = {
    "query-counted-from-the-first": (change("query-position", "first + i", "i"), "mma_decode-paged"),
    "positions-ignored": (
        change("query-position", "given ? given[i] : first + i", "first + i"),
        "mma_decode-positions",
    ),
    "positions-of-sequence-0": (
        change("given-positions", "PACKED ? sequence.q_start : sequence.batch * p.positions_row", "0"),
        windows,
    ),
    "last-query-not-clamped": (change("clamp-query", "part.band.query(i)", "i"), "mma_decode-positions"),
    "last-key-not-clamped": (
        change("clamp-key", "MASKED && (MODS || BIAS) ? part.band.key(j) : j", "j"),
        "mma_decode-paged",
    ),
    "head-of-the-group": (change("mod-sees", "head", "part.kv_head"), windows),
    "tiles-of-one-head": (change("heads-of-tile", "(part.kv_head + 1) * p.group", "part.kv_head * p.group + 1"), None),
    "tiles-of-two-queries": (change("bounds-of-positions", "given && i <= queries.hi", "false"), None),
    "tiles-not-skipped-alike": (change("next-load-of-part", "next()", "advance(1)"), windows),
}


@pytest.mark.parametrize("bug", in_tiers(BUGS, ("query-counted-from-the-first",)))
def test_planted_bugs_are_found(bug, monkeypatch):
    bug, row = bug
    with planted(monkeypatch, bug), pytest.raises(EITHER):
        if row is None:
            test_a_tree_in_documents({})
        elif callable(row):
            for positions in (False, True):
                test_masks_with_hidden_tiles(row, "mma_decode", positions)
        else:
            test_the_formula(ROWS[row])
