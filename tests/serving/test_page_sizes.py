"""Pages of any number of keys: kernels divide positions by one that is no power of two."""

from dataclasses import replace

import numpy as np
import pytest
from cache_cases import CacheCase, assert_append_writes_the_bits_of_the_cpu, check, run, run_kernels
from planting import change, planted
from tiers import exhaustive

from cupy_flash.engines.shared import divides
from cupy_flash.gpu.params import _page_number
from cupy_flash.simulator.errors import SimulationError

pytestmark = pytest.mark.usefixtures("poisoned_memory")

DECODE = CacheCase((0, 95, 130), 1, 1, 144, 48, 4, 2, 32, 32, "float16")
PREFILL = CacheCase((5, 61), 20, 20, 90, 3, 2, 1, 16, 24, "float16")


def test_the_division_is_exact():
    """By every page up to 3000 keys, and some large ones: of keys around its multiples, and of the largest keys."""
    largest = 2**31 - 1
    for page in [*range(3, 3000), 2**16 - 1, 2**20 + 1, 2**30 - 1, 2**30 + 1, largest]:
        if not divides(page):
            continue
        number, shift = _page_number(page), (page - 1).bit_length() - 1
        assert -(2**31) <= number < 0
        multiples = {page * n for n in (1, 2, 3, 7, largest // page)}
        for key in (0, largest, *(m + d for m in multiples for d in (-1, 0, 1) if m + d <= largest)):
            assert (key * (number + 2**32) >> 32) >> shift == key // page, (key, page)


@pytest.mark.parametrize("page", [48, exhaustive(5), exhaustive(80), exhaustive(1056)])
def test_a_decode(page):
    case = replace(DECODE, page=page, capacity=-(-144 // page) * page)
    check(case)
    check(case, run_kernels(case.call()))


TILES = [
    ("mma", "float16", 3),
    ("simt", "float32", 3),
    exhaustive("mma", "float16", 80),
    exhaustive("mma", "float16", 1),
]


@pytest.mark.parametrize(("engine", "dtype", "page"), TILES)
def test_tiles_straddle_pages(engine, dtype, page):
    case = replace(PREFILL, dtype=dtype, page=page, capacity=-(-90 // page) * page)
    check(case, backend="simulator", engine=engine)


PIECES = [(run, 48), (run, 80), (run, 1), (run_kernels, 48), exhaustive(run_kernels, 80), exhaustive(run_kernels, 1)]


@pytest.mark.parametrize(("on", "page"), PIECES)
def test_pieces_straddle_pages(on, page):
    """Under split_size a query has the bits that it has on a contiguous cache."""
    capacity = -(-144 // page) * page
    call = replace(DECODE, split_size=64, lengths=(95, 130), appended=None, page=page, capacity=capacity).call()
    options = dict(call.options)
    table = np.maximum(options.pop("block_table"), 0)
    whole = [x[table].reshape(len(table), -1, *x.shape[2:]) for x in (call.k_cache, call.v_cache)]
    paged, contiguous = on(call), on(call._replace(k_cache=whole[0], v_cache=whole[1], options=options))
    assert all(a.tobytes() == b.tobytes() for a, b in zip(paged[:2], contiguous[:2], strict=True))


def test_an_append_writes_the_bits_of_the_cpu(monkeypatch):
    case = replace(PREFILL, dtype="float32", rotary=(8, True))
    call = case.call()
    names = ("cache_seqlens", "block_table", "rotary_cos", "rotary_sin")
    assert_append_writes_the_bits_of_the_cpu(call, {name: call.options[name] for name in names}, monkeypatch)


def test_a_division_that_is_off_by_one_is_found(monkeypatch):
    bug = change("page-division", "__umulhi(key, page_log2)", "__umulhi(key + 1, page_log2)")
    with planted(monkeypatch, bug), pytest.raises((AssertionError, SimulationError)):
        check(replace(PREFILL, dtype="float32"), backend="simulator", engine="simt")
