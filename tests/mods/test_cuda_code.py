"""The CUDA struct of a mod, compiled and run on the simulator, gives the scores, slopes, masks and classes of NumPy."""

import inspect
import re
import struct

import numpy as np
import pytest
from helpers.masks import LENGTH, MASKS, SCORES, random_mask
from helpers.planting import change, planted
from helpers.tiers import in_tiers

from bench.kernel_development import sass
from cupy_flash.gpu.params import _struct
from cupy_flash.jit import nvrtc, source
from cupy_flash.jit.source import CONFIG, Text, configure
from cupy_flash.mods import cuda_code
from cupy_flash.mods.derive import derivative
from cupy_flash.mods.numpy_code import function_of
from cupy_flash.mods.tiles import EMPTY, FULL, Extremes, TileClasses
from cupy_flash.mods.trace import Mod
from cupy_flash.simulator import Memory, SimulationError, launch

PAIRS = """
extern "C" __global__ void pairs(const __grid_constant__ Params p, const int* heads, const int* queries,
                                 const int* keys, const real* products, real* scores, real* slopes,
                                 unsigned char* seen) {
  int n = blockIdx.x * 128 + threadIdx.x;
  Mod mod(p, Sequence(p, 0));
  Mod::Query q = mod.query(heads[n], queries[n]);
  Mod::Key k = mod.key(keys[n]);
  scores[n] = mod.score(products[n], q, k, slopes[n]);
  seen[n] = mod.sees(q, k);
}
"""
TILES = """
extern "C" __global__ void tiles(const __grid_constant__ Params p, const Interval<int>* heads,
                                 const Interval<int>* queries, const Interval<int>* keys, unsigned char* classes) {
  int n = blockIdx.x * 128 + threadIdx.x;
  Truth seen = Mod(p, Sequence(p, 0)).tile(heads[n], queries[n], keys[n]);
  classes[n] = !seen.may ? 0 : seen.may_not ? 1 : 2;
}
"""
WALK = """
struct Counted {
  const Mod& mod;
  Range queries;
  int rounds = 0;

  __device__ Truth operator()(Range keys) {
    ++rounds;
    return mod.tile(point(0), {queries.begin, queries.end - 1}, {keys.begin, keys.end - 1});
  }
};

extern "C" __global__ void walk(const __grid_constant__ Params p, const int* queries, int* visited, int* rounds) {
  int warp = blockIdx.x * 4 + threadIdx.x / 32, n = 0, q_start = queries[32 * warp];
  Mod mod(p, Sequence(p, 0));
  Walk<128, Order::ORDER, Counted> tiles({0, 0}, {0, 1 << 20}, {mod, {q_start, q_start + 128}});
  for (tiles.skip_hidden(); tiles.valid(); tiles.next(), ++n)
    if (threadIdx.x % 32 == 0) visited[warp * 128 + n] = tiles.start;
  if (threadIdx.x % 32 == 0)
    for (; n < 128; ++n) visited[warp * 128 + n] = -1;
  rounds[blockIdx.x * 128 + threadIdx.x] = tiles.classify.rounds;
}
"""
EXTREMES = (source.kernel_folder() / "captured_start.cu").read_text().partition('#include "mod.cuh"')[2]
HEAD = 1
MOST_INSTRUCTIONS = 500  # SASS instructions to classify a tile, counting the bodies of loops once


def kernel_text(mod, kernel, constants=(), header="mod.cuh", **options):
    """Return the text of a kernel that contains the struct of a mod."""
    program = mod.program
    by = None if program.score is None else derivative(program.score)
    headers = {
        "captured.cuh": cuda_code.captured_struct(program),
        "traced.cuh": cuda_code.mod_struct(program, by, **options),
    }
    folder = source.kernel_folder().resolve()
    text = Text(folder, *configure((folder / CONFIG).read_text(), {"MODS": True, **dict(constants)}), headers)
    text.inline(header, ())
    return "\n".join(text.lines) + kernel


def table_of(array):
    """Return the table of extremes of a captured array's chunks, (rows, chunks, 2)."""
    bounds = Extremes(array).chunks
    number = np.int64 if array.dtype in (np.int64, np.uint32) else np.int32
    return np.stack([bounds.lo, bounds.hi], axis=-1).astype(number)


def run(mod, kernel, inputs, outputs, constants=(), **options):
    """Run a kernel with one thread per element of `inputs` on the simulator; it fills `outputs`."""
    name = re.search(r"(\w+)\(const __grid_constant__", kernel)[1]
    text = kernel_text(mod, kernel, constants, **options)
    ptx = nvrtc.compile(text, name, "compute_80").ptx
    memory = Memory()
    arrays, chunks = [], {}
    for slot, array in enumerate(mod.arrays):
        strides = tuple(stride // array.itemsize for stride in array.strides)
        arrays.append((memory.add(array, f"array {slot}", writable=False), array.shape, strides))
    tables = {slot: table_of(mod.arrays[slot]) for slot in cuda_code.chunked(mod.program)}
    if kernel == EXTREMES:
        tables = outputs = {slot: np.empty_like(table) for slot, table in tables.items()}
    for slot, table in tables.items():
        chunks[f"chunks{slot}"] = memory.add(table, f"chunks {slot}", initialised=kernel != EXTREMES)
    captured = cuda_code.captured_numbers(mod.program, arrays, chunks, mod.numbers)
    members = {"captured": captured, "batch": (1,), "whole_heads": (1,)}
    parameters = _struct("Params", cuda_code.captured_struct(mod.program))
    packed = parameters.packed(parameters.numbers(members)).tobytes()
    if kernel == EXTREMES:
        launch(ptx, name, (3, 1, 1), (128, 1, 1), packed, memory=memory)
        return outputs
    pointers = [memory.add(array, f"input {n}", writable=False) for n, array in enumerate(inputs)]
    pointers += [memory.add(array, f"output {n}", initialised=False) for n, array in enumerate(outputs)]
    assert len(inputs[0]) % 128 == 0
    grid = (len(inputs[0]) // 128, 1, 1)
    launch(ptx, name, grid, (128, 1, 1), packed + struct.pack(f"{len(pointers)}Q", *pointers), memory=memory)
    return outputs


def pairs_of(mod, real, length=LENGTH, constants=(), **options):
    """Return ((scores, slopes, seen) of random pairs by the kernel, the same by NumPy)."""
    rng = np.random.default_rng(0)
    heads = rng.integers(0, 3, 512).astype(np.int32)
    q, kv = (rng.integers(0, length, 512).astype(np.int32) for _ in range(2))
    products = rng.normal(size=512).astype(real)
    outputs = np.empty(512, real), np.empty(512, real), np.empty(512, np.bool_)
    named = {"real": "double" if real == np.float64 else "float", **dict(constants)}
    run(mod, PAIRS, (heads, q, kv, products), outputs, named, **options)
    program = mod.program
    roots = [] if program.score is None else [program.score, derivative(program.score).slope]
    roots += [] if program.mask is None else [program.mask]
    with np.errstate(all="ignore"):
        expected = function_of(tuple(roots))(products, np.int32(0), heads, q, kv, mod.arrays, mod.numbers, real)
    expected = [np.broadcast_to(x, 512) for x in expected]
    if program.score is None:
        expected = [products, np.ones(512, real), *expected]
    if program.mask is None:
        expected.append(np.ones(512, np.bool_))
    return outputs, expected


def classes_of(mod, length, block, **options):
    """Return (EMPTY, CUT or FULL of each tile by the kernel, the same by NumPy)."""
    starts = np.arange(0, length, block)
    q, kv = (np.resize(x, -(-x.size // 128) * 128) for x in np.meshgrid(starts, starts, indexing="ij"))
    inputs = [np.stack([x, x + block - 1], axis=1).astype(np.int32) for x in (q, kv)]
    heads = np.full(inputs[0].shape, HEAD, np.int32)
    (actual,) = run(mod, TILES, (heads, *inputs), (np.empty(len(q), np.uint8),), **options)
    classes = TileClasses(mod.program.mask, mod.arrays, mod.numbers)
    tiles = len(starts) ** 2
    return actual[:tiles], classes.of(0, HEAD, *((x, x + block - 1) for x in (q[:tiles], kv[:tiles])))


@pytest.mark.parametrize("row", in_tiers(MASKS, ["sinks", "document window", "natten morton", "block map"]))
def test_mask_equals_numpy(row):
    mod = Mod(mask_mod=row[0])
    (_, _, seen), (_, _, expected) = pairs_of(mod, np.float32)
    assert np.array_equal(seen, expected)
    actual, expected = classes_of(mod, LENGTH, 128)
    assert np.array_equal(actual, expected)


@pytest.mark.parametrize("real", [np.float32, np.float64])
@pytest.mark.parametrize("score_mod", in_tiers(SCORES, ["alibi", "softcap", "relative", "everything"]))
def test_score_and_slope_equal_numpy(score_mod, real):
    (score, slope, _), (expected_score, expected_slope, _) = pairs_of(Mod(score_mod), real)
    tolerance = 64 * np.finfo(real).eps
    np.testing.assert_allclose(score, expected_score, tolerance, tolerance)
    np.testing.assert_allclose(slope, expected_slope, tolerance, tolerance)


@pytest.mark.parametrize("score_mod", in_tiers(SCORES, ["softcap"]))
def test_fast_functions_are_as_exact_as_16_bit_products_need(score_mod):
    (score, slope, _), (expected_score, expected_slope, _) = pairs_of(
        Mod(score_mod), np.float32, constants={"FAST_MATH": True}
    )
    np.testing.assert_allclose(score, expected_score, 2e-5, 2e-5)
    np.testing.assert_allclose(slope, expected_slope, 2e-5, 2e-5)


def test_tables_of_extremes_equal_numpy():
    rng = np.random.default_rng(1)
    ids, hidden = rng.integers(-(2**62), 2**62, (3, 2, 200)), rng.random(130) < 0.02
    places = rng.integers(0, 99, (5, 300)).astype(np.uint8)[::2, ::3]
    mod = Mod(mask_mod=lambda b, h, q, kv: (ids[h, b, q] < ids[h, b, kv]) & hidden[kv] & (places[h, q] < 9))
    tables = run(mod, EXTREMES, [], [])
    assert len(tables) == 3
    for slot, table in tables.items():
        assert np.array_equal(table, table_of(mod.arrays[slot])), slot


@pytest.mark.parametrize("seeds", in_tiers({"few": range(8), "many": range(8, 150)}, ["few"]))
def test_random_masks_equal_numpy(seeds):
    """Elements equal NumPy's. Tiles that the kernel finds empty or full, NumPy finds so too.

    NumPy may find more such tiles, because it knows the mod's run-time numbers.
    """
    for seed in seeds:
        mod = Mod(mask_mod=random_mask(seed, 2 + seed % 3))
        if mod.program.mask is None:  # the mask is simplified to True
            continue
        options = {"largest": cuda_code.LARGE} if seed % 2 else {}
        (_, _, seen), (_, _, expected) = pairs_of(mod, np.float32, 320, **options)
        assert np.array_equal(seen, expected), seed
        actual, expected = classes_of(mod, 320, 20, **options)
        assert np.array_equal(actual == EMPTY, (expected == EMPTY) & (actual == EMPTY)), seed
        assert np.array_equal(actual == FULL, (expected == FULL) & (actual == FULL)), seed


@pytest.mark.parametrize("target", in_tiers({arch: arch for arch in ("sm_75", "sm_80", "sm_90a")}, ["sm_80"]))
@pytest.mark.parametrize("row", in_tiers(MASKS, ["document causal logical long"]))
def test_struct_compiles_within_its_limits(row, target, monkeypatch):
    """The struct compiles without warnings and spills, with the flags of a user's call, in at most
    MOST_INSTRUCTIONS.
    """
    monkeypatch.setattr(nvrtc, "flags", inspect.unwrap(nvrtc.flags))
    compiled = nvrtc.compile(kernel_text(Mod(mask_mod=row[0]), TILES), "tiles", target)
    assert not compiled.warnings
    assert compiled.resources["tiles"].spill_stores == 0
    instructions, _ = sass.disassemble(compiled.code)
    assert sum(sass.opcode(each) != "NOP" for each in instructions) <= MOST_INSTRUCTIONS


PLACES = np.arange(320, dtype=np.int32)
# (bug of the interval arithmetic, mask of 320 tokens for which it classifies some 40 x 40 tiles wrongly)
PLANTS = {
    "less for less or equal": (
        change("interval-less-equal", "{x.lo <= y.hi, x.hi > y.lo}", "{x.lo < y.hi, x.hi >= y.lo}"),
        lambda b, h, q, kv: q // 40 <= kv // 40,
    ),
    "first chunk": (change("first-chunk", "first", "last"), lambda b, h, q, kv: kv <= PLACES[q] + 30),
    "last chunk": (change("next-chunk", "n <= last", "n < last"), lambda b, h, q, kv: kv <= PLACES[q] + 30),
    "few elements": (change("each-element", "n < count", "n + 1 < count"), lambda b, h, q, kv: PLACES[q // 8] != 4),
    "rest": (change("bounds-of-remainder", "y.hi - 1", "y.hi - 2"), lambda b, h, q, kv: kv % 21 != 20),
    "both": (
        change("interval-and", "x.may_not || y.may_not", "x.may_not && y.may_not"),
        lambda b, h, q, kv: (q >= kv) & (q - kv < 90),
    ),
}


@pytest.mark.parametrize("plant", in_tiers(PLANTS, ["last chunk", "less for less or equal"]))
def test_wrong_interval_arithmetic_is_found(plant, monkeypatch):
    bug, mask = plant
    mod = Mod(mask_mod=mask)
    i = np.arange(320, dtype=np.int32)
    seen = np.broadcast_to(mask(0, 0, i[:, None], i[None]), (320, 320)).reshape(8, 40, 8, 40)
    for changes in ((), bug):
        with planted(monkeypatch, changes):
            actual = classes_of(mod, 320, 40)[0].reshape(8, 8)
        wrong = (seen.any((1, 3)) & (actual == EMPTY)) | (~seen.all((1, 3)) & (actual == FULL))
        assert wrong.any() == (changes == bug)


def test_distances_beyond_float32_stay_integers():
    """float32 has no odd integers above 2**24, so for long sequences the text subtracts positions before converting
    them.
    """
    program = Mod(lambda s, b, h, q, kv: s - abs(q - kv) * 0.5).program
    short, long = (cuda_code.mod_struct(program, largest=largest) for largest in (cuda_code.SMALL, cuda_code.LARGE))
    assert "q.offset" in short and "q.offset" not in long
    assert "int v0 = q.position - k.position" in long


def test_a_missing_clamp_is_found(monkeypatch):
    table = np.arange(8, dtype=np.int32)
    mod = Mod(mask_mod=lambda b, h, q, kv: table[q - kv] < 4)
    bug = change("clamp-index", "min(max(i, (T)0), (T)(size - 1))", "i")
    with planted(monkeypatch, bug), pytest.raises(SimulationError, match="past the end|before"):
        pairs_of(mod, np.float32)


RELATIVE = np.random.default_rng(2).normal(size=(30, 3)).astype(np.float32).T  # the rows are not contiguous
LIMIT, HUGE = 12, 2**31 - 1  # LIMIT becomes a run-time number, HUGE a constant of the text


def folded_reads(s, b, h, q, kv):
    """Add elements at clamped distances; the sums inside the last two indices wrap."""
    near = RELATIVE[h, np.clip(q - kv, -LIMIT, LIMIT) + LIMIT] + RELATIVE[1, np.minimum(abs(q - kv), 40)]
    return s + near + RELATIVE[h, np.maximum(q - kv, 3) + HUGE] + RELATIVE[h, np.minimum(kv - q, 9) - HUGE - 9]


def test_folded_clamps_read_what_numpy_reads():
    (score, _, _), (expected, _, _) = pairs_of(Mod(folded_reads), np.float32)
    np.testing.assert_allclose(score, expected, 1e-5, 1e-5)
    text = cuda_code.mod_struct(Mod(folded_reads).program)
    assert text.count("clamped(") == 2  # the two reads whose sums wrap keep their clamps


def test_a_clamp_that_is_folded_away_is_found(monkeypatch):
    monkeypatch.setattr(cuda_code, "folded", lambda x, *_: (x, x.graph.const(-HUGE - 1), x.graph.const(HUGE)))
    with pytest.raises(SimulationError, match="past the end|before"):
        pairs_of(Mod(lambda s, b, h, q, kv: s + RELATIVE[h, np.maximum(q - kv, 3)]), np.float32)


# name -> (mask_mod, the largest allowed number of rounds in which a warp classifies the 8,192 tiles of 2^20 keys). A
# warp that classifies every tile, 32 in a round, takes 256 rounds.
NARROW = {
    "window": (lambda b, h, q, kv: (q - kv < 512) & (q >= kv), 14),
    "sinks": (lambda b, h, q, kv: (q >= kv) & ((q - kv < 512) | (kv < 4)), 18),
    "far apart": (lambda b, h, q, kv: (abs(kv - q) < 100) | (abs(abs(kv - q) - 137216) < 100), 20),
    "nothing": (lambda b, h, q, kv: kv < 0, 9),
}
LONG_QUERIES = np.repeat(np.array([0, 128 * 4000, 128 * 4095, 2**20 - 128], np.int32), 32)


def walk(name, order):
    """Compare the tiles that a warp visits with the classes of NumPy; return the largest number of rounds of a warp."""
    mod, outputs = Mod(mask_mod=NARROW[name][0]), (np.empty((4, 128), np.int32), np.empty(128, np.int32))
    kernel = WALK.replace("Order::ORDER", f"Order::{order}")
    visited, rounds = run(mod, kernel, (LONG_QUERIES,), outputs, {"MASK_MOD": True}, header="walk.cuh")
    keys = np.arange(0, 2**20, 128)[:: -1 if order == "LAST_TO_FIRST" else 1]
    classes = TileClasses(mod.program.mask, mod.arrays, mod.numbers)
    for row, first in zip(visited, LONG_QUERIES[::32], strict=True):
        expected = keys[classes.of(0, 0, (first, first + 127), (keys, keys + 127)) != EMPTY]
        np.testing.assert_array_equal(row[row >= 0], expected)
    return rounds.max()


@pytest.mark.exhaustive
@pytest.mark.parametrize("order", ["LAST_TO_FIRST", "FIRST_TO_LAST"])
@pytest.mark.parametrize("name", NARROW)
def test_a_walk_of_a_long_sequence_takes_few_rounds(name, order):
    assert walk(name, order) <= NARROW[name][1]


PLANTED_WALK = {
    "a lane classifies all but one of its tiles": change("last-tile-of-range", "tiles - 1", "tiles - 2"),
    "the first 32 tiles with a visible pair are passed": change(
        "pass-hidden-tiles", "may_see ? __ffs(may_see) - 1 : 32", "32"
    ),
    "the walk ends one group early": change("pass-hidden-tiles", ": 32", ": 33"),
    "every tile is classified": change("next-candidates", ", tiles = 32", ""),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("plant", PLANTED_WALK.values(), ids=PLANTED_WALK)
def test_planted_bug_of_the_walk_is_found(plant, monkeypatch):
    with planted(monkeypatch, plant), pytest.raises(AssertionError):
        for order in ("LAST_TO_FIRST", "FIRST_TO_LAST"):
            assert walk("far apart", order) <= NARROW["far apart"][1]
