"""The decode with a producer warp, which loads K and V with TMA, on a simulated Hopper.

It has the tiles, the order and the arithmetic of the decode that copies with cp.async, so its results must be bitwise
equal.
"""

import functools
from dataclasses import replace

import pytest
from cache_cases import CacheCase, check, in_a_wider_array, posed, run_kernels
from planting import change, never, planted, skip
from test_decode_kernels import EVERYTHING, LONG, PACKED, WRONG, assert_other_sequences_keep_their_bits
from test_invariance import assert_bits, at
from tiers import in_tiers

from cupy_flash import device
from cupy_flash.engines import mma_decode
from cupy_flash.plan.plan import plan
from cupy_flash.simulator.errors import SimulationError
from cupy_flash.simulator.run import start

pytestmark = pytest.mark.usefixtures("poisoned_memory")

HOPPER = device.named("sm_90a")
FP8 = dict(cache_dtype="float8_e4m3fn", descales=True)
WIDE = dict(head_dim=64, head_dim_v=64)
CASES = {
    "everything": replace(EVERYTHING, **WIDE),
    "everything-fp8": replace(EVERYTHING, **WIDE, **FP8),
    "packed-everything": replace(PACKED, head_dim=128, head_dim_v=64),
    "window-full": CacheCase(lengths=(90, 192), capacity=192, page=16, window=(70, 0), dtype="float16", **WIDE),
    "batch-idx": CacheCase(lengths=(20, 3), batch_idx=(2, 0), appended=2, dtype="float16", **WIDE),
    "leftpad": CacheCase(lengths=(70, 80), leftpad=(3, 66), capacity=80, dtype="float16", **WIDE),
    "bhsd-interleaved": CacheCase(layout="bhsd", pool="interleaved", page=8, dtype="bfloat16", **WIDE),
    "narrow": CacheCase(page=8, dtype="float16", appended=1),
    "columns-past-the-rows": CacheCase(page=8, dtype="float16", head_dim=56, head_dim_v=120),
    "widest": CacheCase(lengths=(70, 3), capacity=80, dtype="float16", head_dim=256, head_dim_v=256, q_len=2),
    "widest-fp8": CacheCase(lengths=(70, 3), capacity=80, dtype="float16", head_dim=256, head_dim_v=128, **FP8),
}  # fmt: skip


def on_hopper(call, **options):
    return run_kernels(call, arch="sm_90a", **options)


def assert_same_bits(call, **options):
    """Return the results, after a comparison with those of the same blocks without a producer warp."""
    results = on_hopper(call, tma=True, **options)
    for a, b in zip(results, on_hopper(call, **options), strict=True):
        assert a.tobytes() == b.tobytes()
    return results


@pytest.mark.parametrize("case", in_tiers(CASES, ("everything-fp8", "window-full", "leftpad")))
def test_the_formula_and_the_bits_of_copies(case):
    check(case, assert_same_bits(case.call(), blocks=3))


def test_caches_of_any_strides():
    """A box per page or row of the cache lies in an array that is wider in each dimension."""
    case = CASES["leftpad"]
    call = case.call()
    wider = [in_a_wider_array(cache, padding) for cache, padding in ((call.k_cache, 8), (call.v_cache, 16))]
    check(case, on_hopper(call._replace(k_cache=wider[0], v_cache=wider[1]), tma=True), call=call)


@pytest.mark.exhaustive
@pytest.mark.parametrize("page", [8, 16, 64, 256])
@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("split_size", [None, 128])
def test_every_page_size(page, fp8, split_size):
    """Lengths around the ends of pages, with an append across them, and holes in the table."""
    lengths = tuple({0, 1, page - 1, page, page + 1, 298})
    case = CacheCase(lengths=lengths, page=page, capacity=-(-300 // page) * page, appended=2, q_len=2, heads=2,
                     split_size=split_size, kv_heads=1, dtype="float16", **WIDE, **(FP8 if fp8 else {}))  # fmt: skip
    check(case, assert_same_bits(case.call()))


@pytest.mark.exhaustive
@pytest.mark.parametrize("blocks", [1, 3, 7, 40])
@pytest.mark.parametrize("order", [None, 0, 1])
def test_any_number_of_blocks_in_any_order(blocks, order):
    """The producer runs ahead into the next part, whatever the order of warps."""
    case = CacheCase(lengths=(300, 0, 64, 1, 700), capacity=700, q_len=5, heads=8, kv_heads=2, dtype="float16",
                     sink=True, **WIDE)  # fmt: skip
    options = {} if order is None else dict(start=functools.partial(start, order="random", seed=order))
    check(case, on_hopper(case.call(), tma=True, blocks=blocks, **options))


@pytest.mark.exhaustive
@pytest.mark.parametrize("fp8", [False, True])
def test_the_batch_changes_no_bit_of_pieces(fp8):
    case = CacheCase(lengths=(200, 330, 7, 300), capacity=384, q_len=2, appended=2, split_size=64, dtype="float16",
                     **WIDE, **(FP8 if fp8 else {}))  # fmt: skip
    call = case.call()
    whole = on_hopper(call, tma=True)
    for rows, blocks in (([1], None), ([3, 1, 0, 2], 5), ([0, 0, 3], None)):
        assert_bits(on_hopper(at(call, rows), tma=True, blocks=blocks), whole, rows)


@pytest.mark.parametrize("name", in_tiers({name: name for name in WRONG}, ("pages",)))
def test_wrong_contents_spoil_their_own_sequence_alone(name):
    assert_other_sequences_keep_their_bits(name, functools.partial(on_hopper, tma=True), **WIDE)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("page", "dim", "fp8"), [(16, 64, False), (None, 128, False), (64, 128, True), (8, 64, True)])
def test_no_bank_conflicts(page, dim, fp8, watch):
    case = CacheCase(lengths=(1024, 800), capacity=1024, page=page, heads=8, kv_heads=1, head_dim=dim, head_dim_v=dim,
                     dtype="float16", **(FP8 if fp8 else {}))  # fmt: skip
    on_hopper(case.call(), tma=True, blocks=3, start=watch.start)
    for counters in watch.counters.values():
        assert not counters.conflicting()


# Plans


UNSERVED = {
    "another-gpu": ({}, "sm_80"),
    "small-pages": (dict(page=4), "sm_90a"),
    "unaligned-rows": (dict(head_dim=60), "sm_90a"),
    "panels-of-parts-of-rows": (dict(head_dim=96), "sm_90a"),
    "empty-cache": (dict(lengths=(0,), capacity=0), "sm_90a"),
}


@pytest.mark.parametrize(("options", "arch"), UNSERVED.values(), ids=UNSERVED)
def test_what_tma_cannot_load_is_no_choice(options, arch):
    problem, _ = posed(CacheCase(**dict(dtype="float16", **WIDE) | options).call(), backend=f"simulator:{arch}")
    assert not any(tile.tma for tile in mma_decode.choices(problem, device.named(arch)))


def test_a_tune_chooses_the_producer_warp():
    """A tile with a producer warp is a candidate with a predicted time, but no plan uses it before it is measured."""
    problem, _ = posed(CacheCase(dtype="float16", capacity=4096, **WIDE).call(), backend="simulator:sm_90a")
    assert not plan(problem, HOPPER).tile.tma
    tile = max((x for x in mma_decode.choices(problem, HOPPER) if x.tma), key=lambda x: x.stages)
    chosen = plan(problem, HOPPER, tile)
    decode = next(x for x in chosen.launches if x.function == "decode")
    assert decode.threads == tile.threads + 32 and [box.operand for box in decode.boxes] == ["k", "v"]
    assert "KiB of shared memory, TMA boxes of k, v" in chosen.explain()


# Planted bugs


PAGED = replace(LONG, heads=8)
BUGS = {
    "nan-past-the-length": never("clear-hidden-keys"),
    "zeros-are-not-fenced": skip("fence-zeros"),
    "nan-before-the-padding-ends": change("clear-hidden-keys", "start < keys.begin ||", ""),
    "entry-past-the-last-key": change("look-up-page", "key < keys.end", "key <= keys.end"),
    "page-of-the-next-tile": change("load-V-page", "current", "block"),
    "rows-of-another-page": change("row-in-page-of-box", "start + row", "row"),
    "no-wait-for-an-empty-slot": skip("acquire-KV-slot"),
    "no-wait-for-a-full-slot": skip("wait-KV-slot"),
    "panels-of-other-rows": change("panel-address", "ROWS * ROW", "ROW"),
}
WIDER = replace(PAGED, head_dim=128, head_dim_v=128, q_len=2)
BIG_PAGES = replace(PAGED, page=256, capacity=1024)


@pytest.mark.parametrize("name", in_tiers({name: name for name in BUGS}, ()))
def test_planted_bugs_are_found(name, monkeypatch):
    case = {
        "panels-of-other-rows": WIDER,
        "rows-of-another-page": BIG_PAGES,
        "nan-before-the-padding-ends": CASES["leftpad"],
        "entry-past-the-last-key": CASES["window-full"],
    }.get(name, PAGED)
    with planted(monkeypatch, BUGS[name]), pytest.raises((AssertionError, SimulationError)):
        check(case, on_hopper(case.call(), tma=True, blocks=3))
