"""The simt kernels on the simulator: layouts, tiles, orders, global traffic, planted bugs.

The behaviour tests compare the headers with their Python twins: mask.cuh in the rows causal*, top-left*, window*,
lengths* and mask* of cases.OPTIONS, score.cuh in scale*, softcap, alibi* and bias*, softmax.cuh in sink*, scores* and
huge, sequence.cuh in lengths* and test_varlen.py.
"""

import functools
import re
from dataclasses import replace

import numpy as np
import pytest
from cases import (
    OPTIONS,
    Case,
    assert_bitwise_equal,
    check,
    check_forward_first,
    outcome,
    planned,
    posed,
    run,
    run_kernels,
)
from planting import change, planted, skip
from tiers import exhaustive
from tiles import small_tile

from cupy_flash import dispatch
from cupy_flash.dropout import keep_mask
from cupy_flash.engines import simt
from cupy_flash.engines.shared import PARAMS_SWITCHES
from cupy_flash.gpu import run_plan
from cupy_flash.gpu.params import dtypes
from cupy_flash.jit import nvrtc
from cupy_flash.jit.source import assemble, kernel_folder
from cupy_flash.problem.records import Saved
from cupy_flash.simulator.errors import OutOfBounds, Race
from cupy_flash.simulator.machine.steps import OPCODES
from cupy_flash.simulator.run import start

pytestmark = pytest.mark.usefixtures("poisoned_memory")


def test_the_simulator_knows_every_inline_instruction():
    """The test reads the mnemonic of each line of inline PTX in kernels_cu, also in kernels that no test compiles."""
    texts = [path.read_text() for path in sorted(kernel_folder().rglob("*.cu*"))]
    inline = [asm for text in texts for asm in re.findall(r'\basm\s*(?:volatile)?\s*\(((?:[\s\\]*"[^"]*")+)', text)]
    lines = [re.sub(r'[\s\\"{}]+', " ", line).strip() for asm in inline for line in asm.split(";")]
    # Remove labels and guards; a declaration has no opcode.
    words = [re.sub(r"^(\w+: )?(@!?\S+ )?", "", line).split(" ")[0] for line in lines]
    opcodes = {word.split(".")[0] for word in words if word and not word.startswith(".") and not word.endswith(":")}
    assert opcodes and opcodes <= OPCODES


# Struct layouts that C++ and Python share


def layout_assertions(structs):
    """Yield static_asserts that compare sizes of structs and offsets of fields with the NumPy dtypes."""
    for name, dtype in structs.items():
        yield f"static_assert(sizeof({name}) == {dtype.itemsize});"
        for member, (kind, offset, *_) in dtype.fields.items():
            yield f"static_assert(__builtin_offsetof({name}, {member}) == {offset});"
            yield f"static_assert(sizeof((({name}*)nullptr)->{member}) == {kind.itemsize});"


@pytest.mark.parametrize("switches", [(), *((switch,) for switch in PARAMS_SWITCHES)], ids="-".join)
def test_params_have_the_compilers_layout(switches):
    assert {"Operand", "Dense", "Params"} <= set(dtypes())
    text = (kernel_folder() / "params.cuh").read_text()
    defines = [f"#define {name} 1" for name in switches]
    nvrtc.compile("\n".join([*defines, text, *layout_assertions(dtypes("", switches))]), "params", "compute_80")


def test_a_wrong_layout_of_params_is_found():
    text = (kernel_folder() / "params.cuh").read_text()
    packed = np.dtype([(name, kind) for name, (kind, *_) in dtypes()["Operand"].fields.items()])  # without padding
    with pytest.raises(nvrtc.CompileError, match="static assertion failed"):
        nvrtc.compile("\n".join([text, *layout_assertions({"Operand": packed})]), "params", "compute_80")


def test_lanes():
    assert f"constexpr int LANES = {simt.LANES};" in (kernel_folder() / "simt" / "tile.cuh").read_text()


EVERYTHING = Case(q_len=20, kv_len=40, bias="1hqk", sink=True, causal=True, dropout=0.2)


@pytest.mark.parametrize(
    ("dtype", "tile"),
    [
        ("float32", simt.Tile(8, 16, 64)),
        ("float64", simt.Tile(32, 16, 128)),
        exhaustive("float32", simt.Tile(32, 16, 128)),
        exhaustive("float64", simt.Tile(8, 16, 64)),
    ],
    ids=str,
)
def test_shared_memory_is_what_the_kernels_use(tile, dtype):
    """In shared memory smaller by P's unused padding and one byte more, each kernel accesses memory out of bounds."""
    case = replace(EVERYTHING, dtype=dtype, head_dim_v=40, batch=1, heads=2, kv_heads=1)
    call, result = case.call(), run_kernels(case, tile=tile)
    padding = 8 * case.accumulation.itemsize  # padding after the last row of P, the last array in shared memory
    with pytest.raises(OutOfBounds, match="shared"):
        dispatch.run_forward(*planned(case, tile=tile, fewer_bytes=padding + 1))
    chosen, operands = planned(case, Saved(call.dout, result.out, result.lse, call.dlse), tile=tile)
    checked = []
    for number, step in enumerate(chosen.launches):
        if step.shared_bytes == 0:
            continue
        launches = list(chosen.launches)
        launches[number] = step._replace(shared_bytes=step.shared_bytes - padding - 1)
        with pytest.raises(OutOfBounds, match="shared"):
            dispatch.run_backward(chosen._replace(launches=tuple(launches)), operands)
        checked.append(step.function)
    assert checked == ["backward_kv", "backward_q", "backward_bias"]


@pytest.mark.parametrize(
    ("engine", "arch"), [("simt", "sm_80"), ("mma", "sm_80"), ("mma", "sm_90"), ("wgmma", "sm_90a")]
)
def test_launches_set_every_constant_that_their_kernels_use(engine, arch):
    """A plan may leave out only constants that a kernel does not use, because config.cuh has defaults for them."""
    case = replace(EVERYTHING, q_lengths=(9, 20), kv_lengths=(40, 11), dtype="float16")
    call = case.call()
    how = dict(engine=engine, arch=arch)
    names = set(re.findall(r"(\w+) = .*;", (kernel_folder() / "config.cuh").read_text()))
    saved = Saved(call.dout, call.dout, np.zeros((2, 4, 20), np.float32), call.dlse)
    for step in (*planned(case, **how)[0].launches, *planned(case, saved, **how)[0].launches):
        text = re.sub(r"//.*|(constexpr \w+|using) \w+ = [\w.]+;", "", assemble(step.kernel, dict(step.constants)))
        named = names & set(re.findall(r"\w+", text))
        assert named <= set(dict(step.constants)), step.kernel


# Tiles, GPUs and orders


TILES = [simt.Tile(8, 8, 64), simt.Tile(64, 16, 128), simt.Tile(16, 64, 64), simt.Tile(32, 32, 64)]
TILED = {
    name: replace(OPTIONS[name], q_len=37, kv_len=41, batch=1)
    for name in ("window-causal", "dropout", "bias-hides-sink", "grouped", "dtype-float64-dropout")
}


@pytest.mark.parametrize(
    ("case", "tile"),
    [
        # The default tier runs each case in at least one tile and each tile with at least one case.
        pytest.param(
            case,
            tile,
            marks=[] if (i - j) % 4 == 0 else pytest.mark.exhaustive,
            id=f"{name}-{'x'.join(map(str, tile))}",
        )
        for i, (name, case) in enumerate(TILED.items())
        for j, tile in enumerate(TILES)
    ],
)
def test_any_tiles(case, tile):
    """Other tiles than the planned one change results only by rounding."""
    check(case, run_kernels(case, tile=tile))


@pytest.mark.parametrize(
    ("dtype", "arch"),
    [
        *(("float32", "sm_80"), ("float64", "sm_75")),
        *(exhaustive("float32", "sm_75"), exhaustive("float64", "sm_80")),
        *(exhaustive("bfloat16", "sm_75"), exhaustive("bfloat16", "sm_80")),
    ],
)
def test_the_tiles_of_a_plan(dtype, arch):
    """Two whole tiles of queries and a partial one; of the tiles of keys, some are full, masked, hidden, or partial."""
    case = Case(
        q_len=35, kv_len=133, batch=1, heads=2, kv_heads=1, head_dim=64, head_dim_v=64, dtype=dtype, causal=True
    )
    check(case, run_kernels(case, arch=arch))


def test_bitwise_equal_in_any_order():
    """No sum depends on the order of warps or blocks."""
    case = replace(EVERYTHING, batch=2, dropout=0.0)
    first = run_kernels(case, tile=small_tile)
    for seed in range(3):
        in_order = functools.partial(start, order="random", seed=seed)
        assert_bitwise_equal(run_kernels(case, tile=small_tile, start=in_order), first, case)


@pytest.mark.parametrize("tile", [None, simt.Tile(8, 8, 64)], ids=["planned", "8x8x64"])
def test_dropout_draws_the_bits_of_its_twin(tile):
    """If v is the identity, out is P, which is 0 exactly where dropout.py drops a probability."""
    case = Case(q_len=40, kv_len=40, head_dim_v=40, heads=2, dropout=0.5)
    q, k, v, options, *_ = case.call()
    on_cpu, operands = posed(case)
    operands.v.numpy()[...] = np.eye(40)[:, None]
    chosen = planned(case, tile=tile)[0]
    out = dispatch.run_forward(chosen, operands)[0].numpy()
    expected = [[keep_mask(options["seed"], b * case.heads + h, 0, 40, 0, 40, 0.5) for h in range(2)] for b in range(2)]
    np.testing.assert_array_equal(out.swapaxes(1, 2) != 0, expected)


def test_a_seed_in_an_array_changes_no_bit():
    case = OPTIONS["dropout"]
    call = case.call()
    seed = np.array([call.options["seed"]], np.uint64).view(np.int64)  # all 64 bits
    in_an_array = call._replace(options=call.options | dict(seed=seed))
    assert_bitwise_equal(run(case, "simulator", in_an_array), outcome(case, "simulator"), case)


# Addresses


def test_rows_that_are_not_aligned_change_no_bit():
    """Aligned rows are read with vector loads, others with scalar loads; the results are bitwise equal."""
    case = Case(head_dim=20, head_dim_v=20)
    call = case.call()

    def shifted(x):
        wide = np.zeros((*x.shape[:-1], x.shape[-1] + 1), x.dtype)
        wide[..., 1:] = x
        return wide[..., 1:]

    other = call._replace(q=shifted(call.q), k=shifted(call.k), v=shifted(call.v), dout=shifted(call.dout))
    assert_bitwise_equal(run(case, "simulator", other), run(case, "simulator"), case)


# Global traffic


# test_static.py has the conflicts and the bytes of float32 with D 64.
@pytest.mark.parametrize(("dtype", "dim"), [exhaustive("float32", 64), ("float32", 128), ("float64", 64)])
def test_no_bank_conflicts_and_no_byte_twice(dtype, dim, watch):
    """Q, O and lse are accessed once in global memory, K and V once per query tile; there are no bank conflicts."""
    case = Case(q_len=64, kv_len=64, batch=1, heads=1, kv_heads=1, head_dim=dim, head_dim_v=dim, dtype=dtype)
    call = case.call()
    forward, _ = planned(case)
    tile = (forward.block_q, forward.block_kv, forward.threads)
    assert 64 % tile[0] == 64 % tile[1] == 0
    run_kernels(case, start=watch.start)
    for kernel in ("forward", "backward_kv", "backward_q"):
        conflicts = [(instruction.where, access) for instruction, access in watch.counters[kernel].conflicting()]
        assert not conflicts, f"{kernel}: {conflicts}"
    read, written = (getattr(watch.counters["forward"], f"global_bytes_{what}") for what in ("read", "written"))
    once = call.q.nbytes + 64 // forward.block_q * (call.k.nbytes + call.v.nbytes)
    assert once <= read <= 1.1 * once
    assert written == call.dout.nbytes + 64 * case.accumulation.itemsize


# Planted bugs: with one step of a kernel changed, a check of the simulator fails or a result is wrong.

BUGS = {
    "no-barrier-before-v": (skip("barrier-before-V"), EVERYTHING, Race),
    "no-barrier-before-accumulate": (skip("barrier-before-PV"), EVERYTHING, Race),
    "band-one-off": (change("band-high", "p.window_right", "p.window_right - 1"), OPTIONS["causal"], AssertionError),
    "cut-tile-not-masked": (
        change("tile-is-masked", "start + offset + count > unmasked.end", "false"),
        OPTIONS["causal"],
        AssertionError,
    ),
    "first-tile-not-visited": (change("inside-walk", "start >= first", "start > first"), EVERYTHING, AssertionError),
    "queries-of-the-first-head-only": (
        change("next-head", "++head", "head = head_end"),
        OPTIONS["grouped"],
        AssertionError,
    ),
    "bias-of-other-tiles": (
        change("clip-walk", "visible.end = min(visible.end, limits.end);", ""),
        EVERYTHING,
        AssertionError,
    ),
    "no-sink": (
        change("init-softmax", "softmax[r].init(sink)", "softmax[r].init(-infinity())"),
        OPTIONS["sink"],
        AssertionError,
    ),
    "no-slope-of-the-cap": (
        change("score-gradient", "SOFTCAP || SCORE_MOD ? times(ds, derivative) : ds", "ds"),
        OPTIONS["softcap"],
        AssertionError,
    ),
    "no-lse-guard": (
        change("lse-of-no-key", "x == -infinity() ? infinity() : x", "x"),
        OPTIONS["causal-more-queries"],
        AssertionError,
    ),
    "no-scale-on-dq": (change("simt.scale-dQ", "(real)p.scale", "(real)1"), OPTIONS["scale"], AssertionError),
    "rows-past-the-lengths-not-written": (
        change("rows-to-write", "q_rows", "q_len"),
        OPTIONS["q-lengths"],
        AssertionError,
    ),
    "slopes-past-the-batch": (
        change("alibi-slope", "&& batch < p.batch", ""),
        Case(batch=2, q_lengths=(7, 9), kv_lengths=(9, 5), packed=True, alibi="bh"),
        OutOfBounds,
    ),
}


@pytest.mark.parametrize(("bug", "case", "error"), BUGS.values(), ids=BUGS)
def test_planted_bugs_are_found(bug, case, error, monkeypatch):
    with planted(monkeypatch, bug), pytest.raises(error):
        check_forward_first(case, tile=small_tile)


@pytest.mark.parametrize("engine", ["simt", "mma"])
def test_keys_are_addressed_in_one_place(engine, monkeypatch):
    """CONTRIBUTING.md, "Adding a loader": keys that are stored in reverse need a change of Sequence::key_rows alone."""
    dtype = "float16" if engine == "mma" else "float32"
    case = Case(q_len=19, kv_len=23, batch=1, causal=True, dtype=dtype)
    call = case.call()
    expected = run_kernels(case, tile=small_tile, engine=engine)
    k, v = (np.ascontiguousarray(x[:, ::-1]) for x in (call.k, call.v))
    reverse = change("key-rows", "kv_head), x.row", "kv_head) + (kv_rows - 1) * x.row, -x.row")
    with planted(monkeypatch, reverse):
        actual = run_kernels(case, tile=small_tile, call=call._replace(k=k, v=v), engine=engine)
    assert_bitwise_equal(actual, expected, case)


def test_a_planted_stride_has_bank_conflicts(monkeypatch, watch):
    case = Case(q_len=16, kv_len=64, batch=1, heads=1, kv_heads=1, head_dim=64, head_dim_v=64)
    with planted(monkeypatch, change("row-stride", "| 1", "")):
        run_plan.forward(*planned(case), watch.start)
    assert watch.counters["forward"].bank_conflicts > 1000
