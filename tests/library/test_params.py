"""The parameters of kernels: pack equals filling the NumPy record field by field."""

from dataclasses import replace

import numpy as np
import pytest
from cache_cases import CacheCase
from cache_cases import posed as on_cache
from cases import OPTIONS, Case, posed
from hypothesis import given
from hypothesis import strategies as st

from cupy_flash import dropout
from cupy_flash.arrays import Array, as_array
from cupy_flash.engines.launch import Workspace
from cupy_flash.gpu import params
from cupy_flash.gpu.params import dtypes, pack, pack_partials
from cupy_flash.problem.records import NUMBERS, Saved


def address(array):
    return array.pointer


@pytest.mark.parametrize("name", ["Params", "Partials"])
@given(data=st.data())
def test_any_subset_of_members_is_packed(name, data):
    """Packing any subset of the members equals filling the record, with the compiler's padding."""
    dtype = dtypes()[name]
    members = {}
    for member in data.draw(st.sets(st.sampled_from(dtype.names))):
        kinds = [kind for kind, *_ in (dtype[member].fields or {member: (dtype[member],)}).values()]
        members[member] = tuple(
            data.draw(st.floats(allow_nan=False))
            if kind.kind == "f"
            else data.draw(st.integers(int(np.iinfo(kind).min), int(np.iinfo(kind).max)))
            for kind in kinds
        )
    expected = np.zeros((), dtype)
    for member, numbers in members.items():
        expected[member] = numbers if dtype[member].names else numbers[0]
    struct = params._struct(name)
    packed = struct.packed(struct.numbers(members))
    assert (packed.shape, packed.dtype, packed.nbytes) == ((), dtype, dtype.itemsize)
    assert packed.flags.writeable and packed.tobytes() == expected.tobytes()


def expected_params(problem, operands, results):
    """Return the record, filled field by field as the comments in params.cuh specify."""
    expected = np.zeros((), dtypes()["Params"])
    axes = {"bshd": (0, 2, 1), "bhsd": (0, 1, 2), "thd": (None, 1, 0)}[problem.layout]
    arrays = {name: getattr(operands, name) for name in operands._fields} | results
    for name, array in arrays.items():
        if not isinstance(array, Array):
            continue
        field = expected["seed_array" if name == "seed" else name]
        if field.dtype.names is None:
            expected["seed_array" if name == "seed" else name] = array.pointer
            continue
        field["data"] = array.pointer
        if "column" in field.dtype.names:
            full = np.broadcast_to(array.numpy(), (problem.batch, problem.heads, problem.q_len, problem.kv_len))
            for stride, member in zip(full.strides, ("batch", "head", "row", "column"), strict=True):
                field[member] = stride // array.dtype.itemsize
        elif name in ("lse", "dlse", "delta", "lse2"):
            field["batch"], field["head"], field["row"] = (0, *array.strides)[-3:]
            field["aligned"] = 1
        else:
            strides = [0 if axis is None else array.strides[axis] for axis in axes]
            field["batch"], field["head"], field["row"] = strides
            steps = [array.pointer, *(stride * array.dtype.itemsize for stride in strides)]
            field["aligned"] = next(
                n for n in (8, 4, 1) if n == 1 or not any(step % (n * array.dtype.itemsize) for step in steps)
            )
    if problem.alibi and len(operands.alibi_slopes.shape) == 2:
        expected["alibi_batch"] = operands.alibi_slopes.strides[0]
    expected["seed"] = operands.seed if isinstance(operands.seed, int) else 0
    for feature in NUMBERS:
        if feature.member:
            expected[feature.member] = getattr(problem, feature.field) or 0
    expected["keep_scale"] = dropout.keep_scale(problem.dropout)
    expected["drop_below"] = dropout.threshold(problem.dropout)
    expected["step"], expected["first_head"], expected["whole_heads"] = 1, 0, problem.heads
    expected["batch"], expected["heads"], expected["group"] = problem.batch, problem.heads, problem.group
    axis = {"bshd": 1, "bhsd": 2, "thd": 0}[problem.layout]
    expected["q_len"], expected["kv_len"] = operands.q.shape[axis], operands.k.shape[axis]
    for side in ("left", "right"):
        bound = getattr(problem.mask, side)
        expected[f"window_{side}"] = -1 if bound is None else min(bound, 2**31 - 1)
    return expected


CASES = OPTIONS | {"right-beyond-int32": Case(window=(2, 2**40))}


@pytest.mark.parametrize("case", [pytest.param(case, id=name) for name, case in CASES.items()])
def test_pack_fills_every_field(case):
    call = case.call()
    lse_shape = (case.heads, len(call.q)) if case.packed else (case.batch, case.heads, case.q_len)
    lse = np.zeros(lse_shape, case.accumulation)
    for saved in (None, Saved(call.dout, call.dout, lse, call.dlse)):
        plan, operands = posed(case, saved)
        results = {"dbias": None, "delta": as_array(lse, "delta"), "dq": as_array(call.q.copy(), "dq")}
        delta = Workspace("delta", lse.shape, lse.dtype, (*(0, *results["delta"].strides)[-3:], 1))
        packed = pack(plan.problem, operands, results, (delta,), address)
        expected = expected_params(plan.problem, operands, results)
        for name in expected.dtype.names:
            assert packed[name] == expected[name], name
        assert packed.tobytes() == expected.tobytes()


def test_cached_numbers_do_not_depend_on_earlier_calls():
    """Calls that differ from an earlier one in a single property pack the same bytes as with an empty cache."""
    plan, operands = posed(Case(dropout=0.5))
    q, strided = operands.q, operands.q.strides
    qs = [
        q,
        replace(q, pointer=q.pointer + 128),
        replace(q, pointer=q.pointer + q.dtype.itemsize),  # not aligned
        replace(q, strides=(strided[0], 2 * strided[1], *strided[2:])),
        replace(q, strides=(strided[0] + 1, *strided[1:])),
    ]
    calls = [(plan.problem, operands._replace(q=x), {}, ()) for x in qs]
    calls += [(plan.problem, operands._replace(seed=seed), {}, ()) for seed in (1, 2, as_array(np.array([7]), "seed"))]
    calls += [(plan.problem._replace(**{name: 0.75}), operands, {}, ()) for name in ("scale", "softcap", "dropout")]
    lse = as_array(np.zeros((2, 3, 4), np.float32), "lse")
    for row in (1, 2):
        calls.append((plan.problem, operands, {"delta": lse}, (Workspace("delta", (), lse.dtype, (12, 4, row, 1)),)))
    alone = []
    for call in calls:
        params._constant.cache_clear()
        alone.append(pack(*call, address).tobytes())
    assert len(set(alone)) == len(calls)
    for _ in range(2):
        assert [pack(*call, address).tobytes() for call in calls] == alone


def test_a_seed_is_a_number_or_an_array():
    plan, operands = posed(Case(dropout=0.5))
    operands = operands._replace(seed=2**64 - 1)
    packed = pack(plan.problem, operands, {}, (), address)
    assert (packed["seed"], packed["seed_array"]) == (2**64 - 1, 0)
    operands = operands._replace(seed=as_array(np.array([7]), "seed"))
    packed = pack(plan.problem, operands, {}, (), address)
    assert (packed["seed"], packed["seed_array"]) == (0, operands.seed.pointer)


def test_partials():
    out, lse = as_array(np.zeros((2, 3, 4, 8), np.float32), "out"), as_array(np.zeros((2, 4, 3), np.float32), "lse")
    arrays = dict.fromkeys(("out_a", "out_b", "out"), out) | dict.fromkeys(("lse_a", "lse_b", "lse"), lse)
    packed = pack_partials(arrays, "bshd", address)
    assert packed["out_b"].item()[:4] == (out.pointer, 96, 8, 32)
    assert packed["lse"].item()[:4] == (lse.pointer, 12, 3, 1)
    assert packed["rows"] == 3
    assert (packed["stacked"], packed["out_b_next"], packed["lse_b_next"]) == (1, 0, 0)


def test_partials_of_a_stack():
    stack = np.zeros((5, 2, 3, 4, 8), np.float32), np.zeros((5, 2, 4, 3), np.float32)
    out, lse, outs, lses = (as_array(x, "part") for x in (stack[0][0], stack[1][0], *stack))
    arrays = dict(out_a=out, out_b=outs, out=out, lse_a=lse, lse_b=lses, lse=lse)
    packed = pack_partials(arrays, "bshd", address)
    assert packed["out_b"].item()[:4] == (outs.pointer, 96, 8, 32)
    assert packed["lse_b"].item()[:4] == (lses.pointer, 12, 3, 1)
    assert (packed["stacked"], packed["out_b_next"], packed["lse_b_next"]) == (5, 192, 24)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize(
    ("elements", "strides", "aligned"),
    [
        pytest.param(0, (64, 32, 8), 8, id="eight"),
        pytest.param(8, (-64, 0, 16), 8, id="negative-and-broadcast"),
        pytest.param(4, (64, 32, 8), 4, id="start-four"),
        pytest.param(0, (64, 32, 12), 4, id="row-four"),
        pytest.param(0, (64, 20, 8), 4, id="head-four"),
        pytest.param(0, (-68, 32, 8), 4, id="batch-four"),
        pytest.param(2, (64, 32, 8), 1, id="start-two"),
        pytest.param(0, (64, 32, 10), 1, id="row-two"),
        pytest.param(0, (63, 32, 8), 1, id="batch-odd"),
    ],
)
def test_alignment_of_rows(dtype, elements, strides, aligned):
    """The alignment is the largest of 8, 4 and 1 elements that divides the start address and every stride."""
    batch, head, row = strides
    item = np.dtype(dtype)
    array = Array(4096, (2, 2, 2, 8), (batch, row, head, 1), item, "cpu", "numpy", None)
    assert params._tensor(array, "bshd", lambda _: 4096 + elements * item.itemsize)[-1] == aligned
    array = Array(4096, (2, 2, 8), (row, head, 1), item, "cpu", "numpy", None)
    expected = 8 if strides == (63, 32, 8) or strides[0] == -68 else aligned  # a packed batch has no batch stride
    assert params._tensor(array, "thd", lambda _: 4096 + elements * item.itemsize)[-1] == expected
    assert params._tensor(array, "thd", lambda _: 4097)[-1] == 1


def test_a_common_length_of_a_cache_is_not_part_of_the_cached_numbers():
    call = CacheCase(dtype="float16", page=8, appended=1, rotary=(8, True), lengths=(5, 5), one_length=True).call()
    packed, misses = [], []
    for length in (5, 6, 7):
        options = call.options | {"cache_seqlens": length}
        problem, operands = on_cache(call._replace(options=options), backend="simulator")
        packed.append(pack(problem, operands, {}, (), lambda array: 0))
        misses.append(params._constant.cache_info().misses)
    assert len(set(misses)) == 1 and [int(one["cache_length"]) for one in packed] == [5, 6, 7]
    for one in packed:
        one["cache_length"] = 0
    assert len({one.tobytes() for one in packed}) == 1
