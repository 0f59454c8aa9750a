"""The decode kernels on the simulator: the formula, split-KV, pages, invalid contents of arrays, and bitwise
equality.
"""

import functools
from dataclasses import replace
from itertools import product

import far
import numpy as np
import pytest
from cache_cases import (
    CacheCall,
    CacheCase,
    assert_append_writes_the_bits_of_the_cpu,
    check,
    in_a_wider_array,
    posed,
    run_kernels,
)
from planting import change, planted, skip
from test_invariance import assert_bits, at
from test_kv_cache import CASES
from tiers import exhaustive, in_tiers

import cupy_flash
from cupy_flash import UnsupportedError, device, dispatch
from cupy_flash.engines import mma_decode
from cupy_flash.gpu import ahead
from cupy_flash.jit.source import assemble, kernel_folder
from cupy_flash.plan.plan import plan
from cupy_flash.problem.build import pose_with_cache
from cupy_flash.problem.records import CacheOptions
from cupy_flash.simulator.errors import SimulationError
from cupy_flash.simulator.run import start

pytestmark = pytest.mark.usefixtures("poisoned_memory")

EVERYTHING = CacheCase(
    lengths=(5, 130, 0), page=128, capacity=256, appended=2, q_len=3, rotary=(8, False), window=(100, None),
    softcap=1.5, alibi="bh", sink=True, mask="bhqs", scale=0.5, dtype="float16",
)  # fmt: skip
PACKED = CacheCase(
    lengths=(4, 90, 11), packed=(0, 5, 1), appended=0, page=8, capacity=100, slots=True, rotary=(16, True), sink=True,
    dtype="bfloat16",
)  # fmt: skip
HALF = {
    name: replace(case, dtype="bfloat16" if case.dtype == "bfloat16" else "float16") for name, case in CASES.items()
}
ENGINES = ["mma_decode", exhaustive("mma"), exhaustive("simt")]
ROWS = {"everything": EVERYTHING, "packed-everything": PACKED, **HALF}
DEFAULT = ("everything", "packed-everything", "batch-idx", "leftpad", "odd-dims", "no-queries", "no-batch")


@pytest.mark.parametrize("case", in_tiers(ROWS, DEFAULT))
def test_the_formula(case):
    check(case, backend="simulator")


@pytest.mark.parametrize("case", in_tiers(ROWS, ("everything",)))
def test_split_size(case):
    check(replace(case, split_size=64), backend="simulator")


@pytest.mark.parametrize(
    ("arch", "dim", "dim_v"),
    [
        ("sm_75", 64, 64), exhaustive("sm_90", 128, 128), exhaustive("sm_75", 128, 64), exhaustive("sm_80", 40, 80),
        exhaustive("sm_80", 96, 96), exhaustive("sm_80", 192, 128), exhaustive("sm_80", 256, 256),
        exhaustive("sm_90a", 64, 64), exhaustive("sm_120", 256, 256),
    ],
)  # fmt: skip
def test_any_gpu_and_head_dimension(arch, dim, dim_v):
    case = replace(EVERYTHING, head_dim=dim, head_dim_v=dim_v, q_len=5)
    check(case, run_kernels(case.call(), arch=arch))


@pytest.mark.parametrize("page", [16, *map(exhaustive, (1, 2, 8, 64, 256))])
@pytest.mark.parametrize("split_size", [None, exhaustive(128)])
def test_every_page_size(page, split_size):
    """Lengths are just below, at and above the ends of pages, and the appended rows cross them."""
    lengths = tuple({0, 1, page - 1, page, page + 1, 300 - 2})
    case = CacheCase(lengths=lengths, page=page, capacity=-(-300 // page) * page, appended=2, q_len=2,
                     split_size=split_size, heads=2, kv_heads=1, dtype="float16")  # fmt: skip
    check(case, backend="simulator")


# Distribution of the work over blocks


@pytest.mark.parametrize("blocks", [3, *map(exhaustive, (1, 7, 40))])
@pytest.mark.parametrize("rows", [16, exhaustive(32), exhaustive(64)])
def test_any_number_of_blocks(blocks, rows):
    """A block may begin and end anywhere in a sequence: results match the formula, and each row is written once."""
    case = CacheCase(
        lengths=(300, 0, 64, 1, 700), capacity=700, q_len=5, heads=8, kv_heads=2, dtype="float16", sink=True
    )
    check(case, run_kernels(case.call(), blocks=blocks, rows=rows))


def test_more_sequences_than_a_warp_has_lanes():
    lengths = tuple(np.random.default_rng(0).integers(0, 130, 40).tolist())
    case = CacheCase(lengths=lengths, capacity=130, heads=1, kv_heads=1, dtype="float16")
    check(case, run_kernels(case.call(), blocks=4))


@pytest.mark.parametrize("rows", [32, exhaustive(64)])
def test_rows_of_a_tile_change_no_bit(rows):
    case = CacheCase(
        lengths=(300, 20), capacity=300, q_len=9, split_size=64, dtype="float16", alibi="h", window=(200, 0)
    )
    expected = run_kernels(case.call(), rows=16)
    for a, b in zip(run_kernels(case.call(), rows=rows), expected, strict=True):
        assert a.tobytes() == b.tobytes()


def test_bitwise_equal_in_any_order():
    """No sum depends on the order of warps and blocks."""
    case = replace(EVERYTHING, lengths=(600, 130, 0), capacity=640)
    expected = run_kernels(case.call(), blocks=3)
    for seed in range(2):
        in_order = functools.partial(start, order="random", seed=seed)
        for a, b in zip(run_kernels(case.call(), blocks=3, start=in_order), expected, strict=True):
            assert a.tobytes() == b.tobytes()


def test_the_capacity_changes_no_bit_of_pieces():
    case = CacheCase(lengths=(300, 20), capacity=300, split_size=64, dtype="float16")
    one, longer = (run_kernels(x.call()) for x in (case, replace(case, capacity=900)))
    for a, b in zip(one[:2], longer[:2], strict=True):
        assert a.tobytes() == b.tobytes()


# With split_size, results are bitwise equal in every batch: at least three pieces per sequence


PIECES = {
    "plain": {},
    "bfloat16": dict(dtype="bfloat16"),
    "group-of-3": dict(heads=6),
    "window-alibi-sink": dict(window=(200, None), alibi="h", sink=True),
    "wide": dict(head_dim=128, head_dim_v=128),
    "float8": dict(cache_dtype="float8_e4m3fn", descales=True, head_dim=40, head_dim_v=80),
}


def pieces(options, **changes):
    sizes = dict(lengths=(200, 330, 7, 300), capacity=384, q_len=2, appended=2, split_size=64, dtype="float16")
    return CacheCase(**sizes | options | changes)


@pytest.mark.parametrize("options", in_tiers(PIECES, ("window-alibi-sink",)))
def test_the_batch_changes_no_bit(options):
    """A sequence gives the same bits alone, permuted, with other sequences, and with another number of blocks."""
    call = pieces(options).call()
    whole = run_kernels(call)
    for rows, blocks in (([1], None), ([3, 1, 0, 2], 5), ([0, 0, 3], None)):
        assert_bits(run_kernels(at(call, rows), blocks=blocks), whole, rows)


@pytest.mark.parametrize("options", in_tiers(PIECES, ("plain",)))
def test_pages_change_no_bit(options):
    """Page numbers and padding of the block table change no bit."""
    one = pieces(options, page=16).call()
    expected = run_kernels(one)
    order = np.random.default_rng(3).permutation(len(one.k_cache))
    table = one.options["block_table"]
    table = np.where(table < 0, -1, np.argsort(order)[table]).astype(np.int32)
    table = np.pad(table, ((0, 0), (0, 7)), constant_values=-1)
    other = CacheCall(one.q, one.k_cache[order], one.v_cache[order], one.options | {"block_table": table})
    assert_bits(run_kernels(other), expected, slice(None))


@pytest.mark.parametrize("options", in_tiers(PIECES, ("plain",)))
@pytest.mark.parametrize("steps", [(60, 100, 40), exhaustive((200,)), exhaustive((1, 5, 190, 3, 1))], ids=str)
def test_chunks_of_a_prefill_change_no_bit(options, steps):
    """A query gives the bits that it has in a call of its own, however many queries are in its chunk."""
    sample = pieces(options, lengths=(0,), q_len=200, appended=200, capacity=256).call()
    call, outs, done = sample.copied(), [], 0
    rest = {name: x for name, x in call.options.items() if name not in ("k", "v")}
    for step in steps:
        here = slice(done, done + step)
        new = {name: call.options[name][:, here] for name in ("k", "v")}
        chunk = CacheCall(call.q[:, here], *call[1:3], rest | new | {"cache_seqlens": done})
        *results, k_cache, v_cache = run_kernels(chunk)
        call = call._replace(k_cache=k_cache, v_cache=v_cache)
        outs.append(results)
        done += step
    for i in (0, 63, 64, 150, 199):  # a decode step of one query
        alone = CacheCall(call.q[:, i : i + 1], *call[1:3], rest | {"cache_seqlens": i + 1})
        out, lse = run_kernels(alone)[:2]
        assert np.concatenate([x[0] for x in outs], axis=1)[:, i].tobytes() == out[:, 0].tobytes()
        assert np.concatenate([x[1] for x in outs], axis=2)[:, :, i].tobytes() == lse[:, :, 0].tobytes()


# Contents of arrays, which the host never reads on a GPU


# name: (fields of the case, name of an array, index, wrong contents or a function from the call to them)
WRONG = {
    "length-negative": (dict(), "cache_seqlens", 0, -5),
    "length-past-the-capacity": (dict(), "cache_seqlens", 0, 10**6),
    "longest-length": (dict(), "cache_seqlens", 0, 2**31 - 1),
    "length-past-the-table": (dict(page=8), "cache_seqlens", 0, 10**6),
    "pages": (dict(page=8), "block_table", (0, [0, 2, 3]), lambda call: (-7, 2**31 - 1, len(call.k_cache))),
    "row-of-the-cache": (dict(batch_idx=(1, 0)), "cache_batch_idx", 0, 2**30),
    "leftpad": (dict(leftpad=(2, 3)), "cache_leftpad", 0, 2**31 - 1),
    "slots": (
        dict(slots=True, page=8), "slots", slice(2),
        lambda call: (2**62, call.k_cache.shape[0] * call.k_cache.shape[1]),
    ),
    "positions": (
        dict(rotary=(8, True), positions=True), "positions", 0,
        lambda call: (-(2**31), len(call.options["rotary_cos"])),
    ),
    "bounds": (dict(packed=(2, 2), appended=0), "cu_seqlens_q", 1, 2**31 - 1),
    "bounds-negative": (dict(packed=(2, 2), appended=0), "cu_seqlens_q", 1, -9),
    "bounds-of-pieces": (  # these bounds need more partial results than max_seqlen_q allows
        dict(packed=(2, 2), appended=0, heads=16, kv_heads=1, lengths=(90, 99), capacity=128, split_size=64),
        "cu_seqlens_q", 1, 2**31 - 1,
    ),
}  # fmt: skip


def assert_other_sequences_keep_their_bits(name, kernels=run_kernels, **sizes):
    """Assert that wrong contents of an array cause no access out of bounds, and change neither the results nor the
    cache of the other sequence.
    """
    options, member, at, contents = WRONG[name]
    small = dict(lengths=(28, 33), capacity=40, q_len=2, appended=2, dtype="float16")
    case = CacheCase(**small | sizes | options)
    call = case.call()

    def spoil(operands):
        array = (operands.cu_seqlens_q if member == "cu_seqlens_q" else getattr(operands.cache, member)).numpy()
        array[at] = contents(call) if callable(contents) else contents

    expected, results = kernels(call), kernels(case.call(), spoil=spoil)
    if member == "cu_seqlens_q":  # wrong cu_seqlens_q moves the rows of both sequences
        return
    blocks = call.options["block_table"][0] if case.page else np.array((case.batch_idx or (0,))[:1])
    if member == "cache_batch_idx":  # keys of a row that does not exist read as zeros
        assert not results[0][0].any()
    for a, b in zip(results[:2], expected[:2], strict=True):
        assert a[1].tobytes() == b[1].tobytes()
    for a, b in zip(results[2:], expected[2:], strict=True):
        a, b = (np.delete(cache, blocks[blocks >= 0], axis=0) for cache in (a, b))
        assert a.tobytes() == b.tobytes()


# Invalid cu_seqlens make sequences share rows of out, which the simulator reports as a race of blocks of mma and simt.
WRONG_OF_ENGINES = {
    f"{engine}-{name}": (name, engine)
    for engine in ("mma_decode", "mma", "simt")
    for name in WRONG
    if engine == "mma_decode" or "bounds" not in name
}
DEFAULT_WRONG = ("length-past-the-capacity", "pages", "row-of-the-cache", "slots", "positions", "bounds-of-pieces")
DEFAULT_WRONG = (*(f"mma_decode-{name}" for name in DEFAULT_WRONG), "mma-pages", "simt-pages")


@pytest.mark.parametrize("row", in_tiers(WRONG_OF_ENGINES, DEFAULT_WRONG))
def test_invalid_contents_change_only_their_own_sequence(row):
    name, engine = row
    assert_other_sequences_keep_their_bits(name, functools.partial(run_kernels, engine=engine))


@pytest.mark.parametrize("engine", ENGINES)
def test_only_the_pages_of_the_table_are_read(engine):
    """Each page of the block table is an allocation of its own; other pages are not mapped."""
    case = CacheCase(lengths=(50, 70), page=16, capacity=80, dtype="float16", head_dim=64, head_dim_v=64)
    call = case.call()
    used = {
        int(page)
        for row, n in zip(call.options["block_table"], case.lengths, strict=True)
        for page in row[: -(-n // 16)]
    }

    class Pages(cupy_flash.simulator.Memory):
        def add(self, array, name, **options):
            address = super().add(array, name, **options)
            if name in ("k", "v"):
                whole = self.allocations.pop()
                self._starts.pop()
                for page in sorted(used):
                    part = self._part(array[page], name, address + page * array.strides[0])
                    self.allocations.append(part)
                    self._starts.append(part.start)
                del whole
            return address

        def _part(self, array, name, start):
            from cupy_flash.simulator.memory.store import Allocation

            return Allocation(name, start, array.reshape(-1).view(np.uint8), writable=False, initialised=True)

    expected = run_kernels(call, engine=engine)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("cupy_flash.simulator.run.Memory", Pages)
        actual = run_kernels(call, engine=engine)
    for a, b in zip(actual[:2], expected[:2], strict=True):
        assert a.tobytes() == b.tobytes()


@pytest.mark.parametrize("options", [dict(page=4), dict(batch_idx=(3, 1))], ids=["paged", "contiguous"])
@pytest.mark.parametrize("engine", ENGINES)
def test_offsets_of_64_bits(options, engine, monkeypatch):
    """Pages, rows and heads of the caches, of q and of the new rows are more than 2**31 elements apart, and so are
    those of the results.
    """
    case = CacheCase(lengths=(9, 3), capacity=16, dtype="float16", appended=2, q_len=2, mask="bhqs", **options)
    call = case.call()
    arrays = {name: far.spread_rows(call.options[name]) for name in ("k", "v")}
    arrays["mask"] = far.spread(call.options["mask"], range(4))
    options = CacheOptions(**call.options | arrays, backend="simulator", engine=engine)
    problem, operands = posed(call, backend="simulator", engine=engine)
    expected = [x.numpy() for x in dispatch.forward(problem, operands)]
    far.spread_results(monkeypatch)
    problem, far_operands = pose_with_cache(*map(far.spread_rows, call[:3]), options)
    actual = [x.numpy() for x in dispatch.forward(problem, far_operands)]
    for a, b in zip(actual, expected, strict=True):
        assert a.tobytes() == b.tobytes()
    np.testing.assert_array_equal(far_operands.k.numpy(), operands.k.numpy())


# Global traffic


@pytest.mark.parametrize(("page", "dim"), [(16, 64), *(exhaustive(*x) for x in ((None, 128), (1, 128), (16, 128)))])
def test_every_key_is_read_once(page, dim, watch):
    """The bytes read, tables included, exceed those of K and V by at most 2 %; there are no bank conflicts."""
    case = CacheCase(lengths=(1024, 800), capacity=1024, page=page, heads=8, kv_heads=1, head_dim=dim, head_dim_v=dim,
                     dtype="float16")  # fmt: skip
    run_kernels(case.call(), blocks=3, start=watch.start)
    keys = sum(case.lengths) * case.kv_heads * 2 * 2 * dim
    assert keys <= watch.counters["decode"].global_bytes_read <= 1.02 * keys
    for counters in watch.counters.values():
        assert not counters.conflicting()


def test_tiles_of_rows_read_only_keys_that_they_see(watch):
    """A causal prompt has two tiles of 64 rows, of which the first one sees half of the keys."""
    case = CacheCase(lengths=(128,), capacity=128, q_len=128, heads=1, kv_heads=1, dtype="float16", split_size=128)
    run_kernels(case.call(), start=watch.start)
    queries, keys = 128 * 2 * 16, (64 + 128) * 2 * (16 + 16)
    assert queries + keys <= watch.counters["decode"].global_bytes_read <= queries + 1.1 * keys


# Append without attention, refusals, and plans


@pytest.mark.parametrize("case", in_tiers(
    {"lengths": CacheCase(page=4, appended=3, rotary=(8, True)), "slots": CacheCase(slots=True, appended=2, page=8),
     "packed": CacheCase(packed=(3, 1), appended=0, layout="bhsd"), "idx": CacheCase(batch_idx=(3, 1), appended=2),
     "packed-slots": CacheCase(packed=(3, 1), appended=0, slots=True)},
    ("lengths", "packed", "packed-slots"),
))  # fmt: skip
def test_append_alone_writes_the_same_bits_as_the_cpu(case, monkeypatch):
    call = replace(case, dtype="float16").call()
    names = ("cache_seqlens", "slots", "cache_batch_idx", "block_table", "rotary_cos", "rotary_sin", "layout")
    options = {name: call.options[name] for name in names if name in call.options}
    if case.slots:
        options = {"slots": options["slots"]}
    if case.packed:
        options["cu_seqlens"] = call.options["cu_seqlens_q"]
    if case.packed and case.slots:
        options["slots"][-1] = case.capacity - 1  # the slot of a row past the last sequence
    assert_append_writes_the_bits_of_the_cpu(call, options, monkeypatch)


IN_PAGES = replace(EVERYTHING, lengths=(5, 19), page=8, capacity=24, heads=2, kv_heads=1)
IN_ROWS = replace(
    IN_PAGES, page=None, batch_idx=(2, 0), leftpad=(1, 7), appended=3, positions=True, mask=None, head_dim=20
)
DTYPE_OF = {"mma_decode": "float16", "mma": "float16", "simt": "float32", "cpu_decode": "float32"}
# name: (the engine, or None for the planned one, and the case)
IN_STRIDES = {
    "lengths": (None, replace(EVERYTHING, appended=3, positions=True, cache_dtype="float8_e4m3fn", descales=True)),
    "slots": (None, replace(EVERYTHING, appended=1, slots=True)),
    "packed": (None, PACKED),
    **{
        f"{engine}-{name}": (engine, replace(case, dtype=dtype))
        for engine, dtype in DTYPE_OF.items()
        for name, case in (("pages", IN_PAGES), ("rows", IN_ROWS))
        if name == "rows" or engine == "mma"
    },
}  # fmt: skip


@pytest.mark.parametrize(("engine", "case"), IN_STRIDES.values(), ids=IN_STRIDES)
def test_arrays_of_any_strides(engine, case):
    """Every array has strides of its own, and out is written in place."""
    call = case.call()
    ours = call.in_wider_arrays()
    out = in_a_wider_array(np.full((*call.q.shape[:-1], case.head_dim_v), np.nan, call.q.dtype), 8)
    result, lse = cupy_flash.attention_with_kv_cache(
        *ours[:3], **ours.options, out=out, return_lse=True, engine=engine,
        backend="cpu" if engine == "cpu_decode" else "simulator",
    )  # fmt: skip
    assert result is out
    check(case, (out, lse, ours.k_cache, ours.v_cache), call=call)


def test_out_needs_contiguous_rows():
    call = replace(EVERYTHING, page=None).call()
    out = np.zeros_like(call.q).swapaxes(1, 3).copy().swapaxes(1, 3)
    with pytest.raises(ValueError, match="the last dimension of out must be contiguous on a GPU"):
        cupy_flash.attention_with_kv_cache(*call[:3], **call.options, out=out, backend="simulator")


REFUSED = {
    "fp32": (dict(dtype="float32"), "sm_80", "float32 is not float16 or bfloat16"),
    "bf16": (dict(dtype="bfloat16"), "sm_75", "the tensor cores of sm_75 multiply float16"),
    "wide": (dict(dtype="float16", head_dim=320, head_dim_v=16), "sm_80", "head dimension 320 is larger than 256"),
}


@pytest.mark.parametrize(("options", "arch", "reason"), REFUSED.values(), ids=REFUSED)
def test_refusals(options, arch, reason):
    call = CacheCase(**options).call()
    with pytest.raises(UnsupportedError, match=reason):
        cupy_flash.attention_with_kv_cache(*call[:3], **call.options, backend=f"simulator:{arch}", engine="mma_decode")


@pytest.mark.parametrize(("arch", "keys"), [("sm_80", 64), ("sm_86", 32), ("sm_89", 32), ("sm_120", 32)])
def test_more_tiles_of_keys_than_an_int_holds_are_refused(arch, keys):
    """Tiles of 32 keys are counted on every GPU, because a tune may choose them; at D 256 some GPUs have no others."""
    on = device.named(arch)
    case = CacheCase(lengths=(9,), dtype="float16", head_dim=256, head_dim_v=256)
    problem = posed(case.call(), backend="simulator", engine="mma_decode")[0]
    problem = problem._replace(kv_len=2**20, heads=64, kv_heads=64)
    chosen = plan(problem._replace(batch=1023), on)
    assert chosen.block_kv == keys
    too_many = problem._replace(batch=1024)  # 2**31 tiles of 32 keys
    with pytest.raises(UnsupportedError, match="mma_decode: the tiles of keys .* exceed indices of 32 bits"):
        plan(too_many, on)
    with pytest.raises(UnsupportedError, match="Tile.*: the tiles of keys .* exceed indices of 32 bits"):
        mma_decode.launches(too_many, on, chosen.tile._replace(block_kv=32))
    if keys == 64:
        assert mma_decode.launches(too_many, on, chosen.tile)
    pieces = too_many.cache._replace(split_size=2**20)
    assert plan(too_many._replace(cache=pieces), on).launches


def test_the_tile_depends_on_the_group_and_the_queries_alone():
    on = device.named("sm_80")
    for group, q_len, rows in ((1, 1, 16), (8, 2, 16), (8, 3, 32), (16, 4, 64), (1, 64, 64)):
        chosen = set()
        for batch in (1, 3, 100):
            case = CacheCase(lengths=(9,) * batch, heads=2 * group, kv_heads=2, q_len=q_len, dtype="float16")
            chosen.add(dispatch.plan(posed(case.call(), backend="simulator")[0], on).tile.rows)
        assert chosen == {rows}


def test_launches_set_every_constant_that_their_kernels_use():
    import re

    names = set(re.findall(r"(\w+) = .*;", (kernel_folder() / "config.cuh").read_text()))
    problem, _ = posed(EVERYTHING.call(), backend="simulator")
    steps = dispatch.plan_for(problem._replace(kv_len=4096)).launches
    assert [step.function for step in steps] == ["rotary_append", "decode", "merge"]
    for step in steps:
        text = re.sub(r"//.*|(constexpr \w+|using) \w+ = [\w.]+;", "", assemble(step.kernel, dict(step.constants)))
        assert names & set(re.findall(r"\w+", text)) <= set(dict(step.constants)), step.kernel


# Planted bugs


LONG = CacheCase(
    lengths=(700, 0, 900),
    capacity=912,
    q_len=4,
    heads=8,
    head_dim=64,
    head_dim_v=64,
    dtype="float16",
    page=16,
    sink=True,
)
BUGS = {
    "page-of-another-key": (change("page-of-key", "table[key >> page_log2]", "table[0]"), EVERYTHING, AssertionError),
    "row-of-the-first-tile": (change("row-in-page", "first + row", "row"), EVERYTHING, AssertionError),
    "missing-page-is-read": (change("has-page", "(unsigned)block < (unsigned)count", "true"), "pages", SimulationError),
    "negative-page-is-read": (
        change("has-page", "(unsigned)block < (unsigned)count", "block < count"),
        "pages",
        SimulationError,
    ),
    "rotated-past-the-tables": (
        change("row-of-tables", "min(max(position, 0), p.rotary_rows - 1)", "max(position, 0)"),
        "positions",
        SimulationError,
    ),
    "slot-past-the-pool": (
        change("drop-slots", "|| slot >= (long long)p.cache_blocks * p.cache_rows", ""),
        "slots",
        SimulationError,
    ),
    "keys-past-the-length-are-read": (
        change("kv-end", "min(q_stop + high, kv_len)", "q_stop + high"),
        replace(EVERYTHING, causal=False, mask=None),
        AssertionError,
    ),
    "no-barrier-before-a-part": (skip("barrier-before-part"), LONG, SimulationError),
    "no-wait-for-q": (skip("wait-for-Q"), LONG, SimulationError),
    "no-wait-before-o": (skip("wait-part-loads") + skip("barrier-after-part"), LONG, SimulationError),
    "sink-of-every-part": (
        change("store-lse-of-part", "ending.lse", "with_sink(p, head, ending.lse).lse"),
        LONG,
        AssertionError,
    ),
    "one-result-for-both-parts": (
        change("result-of-part", "+ first_of_tile", ""),
        LONG,
        (AssertionError, SimulationError),
    ),
    "last-part-not-merged": (change("merge-parts", "last - first + 1", "last - first"), LONG, AssertionError),
    "weight-of-warps": (change("sum-O-of-warps", "O[0] += weight * o.x", "O[0] += o.x"), LONG, AssertionError),
    "head-of-another-row": (change("head-of-row", "+ (first_row + row) % p.group", ""), EVERYTHING, SimulationError),
    "last-keys-mask-not-shifted": (skip("shift-mask"), EVERYTHING, (AssertionError, SimulationError)),
    "rotated-by-the-length-before": (
        change("position-of-rotated-q", "sequence.q_len", "sequence.appended"),
        EVERYTHING,
        AssertionError,
    ),
    "appended-to-the-page-before": (change("appended-key", "+ i", "+ i - 1"), EVERYTHING, AssertionError),
    "lengths-not-clamped": (
        change("clamp-length", "min(max(before, 0), max(p.cache_capacity - added, 0))", "before"),
        "length-past-the-capacity",
        SimulationError,
    ),
}


@pytest.mark.parametrize("bug", in_tiers(BUGS, ("one-result-for-both-parts", "no-barrier-before-a-part")))
def test_planted_bugs_are_found(bug, monkeypatch):
    bug, case, error = bug
    with planted(monkeypatch, bug), pytest.raises(error):
        if isinstance(case, str):
            assert_other_sequences_keep_their_bits(case)
        else:
            check(case, run_kernels(case.call(), blocks=3))


def test_a_reference_of_the_warp_changes_bits(monkeypatch):
    """The reference of lazy rescaling is chosen per row: with a vote of the warp, other rows would change its bits."""
    rng = np.random.default_rng(0)
    q = 3 * rng.normal(size=(1, 1, 8, 64)).astype(np.float16)
    caches = rng.normal(size=(2, 1, 640, 1, 64)).astype(np.float16)

    def bits(scale):
        beside = q.copy()
        beside[:, :, 1:] *= scale
        call = CacheCall(beside, *caches, dict(cache_seqlens=640, split_size=640))
        return run_kernels(call)[0][:, :, 0].tobytes()

    assert bits(9) == bits(0.01)
    grown = "softmax[m][half].exceeds_reference(largest, scale_log2)"
    with planted(monkeypatch, change("if-maximum-grows", grown, f"__any_sync(0xFFFFFFFF, {grown})")):
        assert bits(9) != bits(0.01)


@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_90a"])
def test_compile_covers_calls_of_any_length(arch):
    """compile(cache=True) builds all kernels that a graph capture needs: contiguous or paged, any batch, lengths and
    queries.
    """
    on = device.named(arch, "cuda")
    built = {x.text_key for x in ahead.launches(on, dtype="float16", head_dim=64, group=4, cache=True, sink=True)}
    for page, q_len, batch, capacity in product((None, 16), (1, 4, 5, 9, 40, 600), (1, 70), (16, 300, 70_000)):
        case = CacheCase(lengths=(), capacity=capacity, page=page, q_len=q_len, appended=1, heads=8, sink=True,
                         head_dim=64, head_dim_v=64, dtype="float16")  # fmt: skip
        problem = posed(case.call())[0]._replace(batch=batch, device="cuda:0")
        assert {x.text_key for x in plan(problem, on).launches} <= built


@pytest.mark.parametrize("options", [dict(rotary=(32, False)), exhaustive(dict(rotary=(64, True), split_size=128))])
def test_compile_covers_rotary_tables_and_pieces(options):
    on, split_size = device.named("sm_80", "cuda"), options.get("split_size")
    dims, interleaved = options["rotary"]
    words = dict(rotary=True, rotary_dim=dims, rotary_interleaved=interleaved, split_size=split_size)
    built = {x.text_key for x in ahead.launches(on, dtype="float16", head_dim=64, group=4, cache=True, **words)}
    for page, q_len in product((None, 16), (1, 5, 600)):
        case = CacheCase(lengths=(), capacity=4096, page=page, q_len=q_len, appended=1, heads=8, head_dim=64,
                         head_dim_v=64, dtype="float16", **options)  # fmt: skip
        problem = posed(case.call())[0]._replace(batch=2, device="cuda:0")
        assert {x.text_key for x in plan(problem, on).launches} <= built
