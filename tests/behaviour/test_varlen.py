"""Packed sequences: the formula per sequence, zero-length sequences, tokens after the last sequence, dropout masks."""

from dataclasses import replace

import numpy as np
import pytest
from cases import PACKED, PACKED_OPTIONS, Result, assert_bitwise_equal, by_backend, check, outcome, run, run_planned

import cupy_flash

pytestmark = pytest.mark.usefixtures("poisoned_memory")


@pytest.mark.parametrize("case", [pytest.param(case, id=name) for name, case in PACKED_OPTIONS.items()])
def test_packed(case, backend):
    check(case, outcome(case, backend))


@pytest.mark.parametrize("case", [pytest.param(case, id=name) for name, case in PACKED_OPTIONS.items()])
def test_any_tiles_and_threads(case):
    one = run_planned(case, block_q=4, block_kv=8, threads=1)
    check(case, one)
    assert_bitwise_equal(run_planned(case, block_q=4, block_kv=8, threads=3), one, case)


NAMES = ("causal", "window", "alibi-per-sequence", "sink", "dropout", "zero-length-in-the-middle", "bias")
IN_BOTH_FORMS = {name: name for name in NAMES}


@by_backend("name", exhaustive=["window", "sink"], cpu=IN_BOTH_FORMS, simulator=IN_BOTH_FORMS)
def test_packed_equals_padded(name, backend):
    """The same sequences in a padded batch give bitwise equal results, also with dropout."""
    case = PACKED_OPTIONS[name]
    packed, padded = outcome(case, backend), outcome(replace(case, packed=False), backend)

    def packed_rows(x, lengths):
        return np.concatenate([row[:length] for row, length in zip(x, lengths, strict=True)])

    for field, lengths in (
        ("out", case.q_lengths),
        ("dq", case.q_lengths),
        ("dk", case.kv_lengths),
        ("dv", case.kv_lengths),
    ):
        actual = getattr(packed, field)
        np.testing.assert_array_equal(actual[:-3], packed_rows(getattr(padded, field), lengths), field)
        assert (actual[-3:] == 0).all()
    np.testing.assert_array_equal(packed.lse[:, :-3], packed_rows(padded.lse.swapaxes(1, 2), case.q_lengths).T)
    assert np.isneginf(packed.lse[:, -3:]).all()
    if case.bias:
        np.testing.assert_array_equal(packed.dbias, padded.dbias)


def test_a_larger_max_seqlen_changes_nothing(backend):
    """max_seqlen is an upper bound, from which the plan derives its grid but not the results."""
    case = replace(PACKED, causal=True)
    call = case.call()
    longer = call._replace(packed=call.packed._replace(max_seqlen_q=100, max_seqlen_k=np.int64(200)))
    check(case, run(case, backend, longer))


def test_planning_does_not_grow_with_max_seqlen():
    """The time and memory that planning takes do not grow with max_seqlen."""
    call = replace(PACKED, causal=True, window=(5, 0)).call()
    longest = call._replace(packed=call.packed._replace(max_seqlen_q=2**31 - 1, max_seqlen_k=2**31 - 1))
    check(replace(PACKED, causal=True, window=(5, 0)), run(PACKED, "cpu", longest))


def test_no_tokens(backend):
    q, k, v = (np.zeros((0, heads, 8), np.float32) for heads in (4, 2, 2))
    bounds = np.zeros(3, np.int32)
    out, lse = cupy_flash.attention_varlen(q, k, v, bounds, bounds, 0, 0, return_lse=True, backend=backend)
    assert (out.shape, lse.shape) == ((0, 4, 8), (4, 0))
    gradients = cupy_flash.attention_varlen_backward(out, q, k, v, out, lse, bounds, bounds, 0, 0, backend=backend)
    assert [x.shape for x in gradients[:3]] == [q.shape, k.shape, v.shape]


def test_results(backend):
    case = replace(PACKED, dtype="bfloat16", sink=True)
    result = run(case, backend)
    q, k, v, *_ = case.call()
    shapes = Result(q.shape, (4, len(q)), q.shape, k.shape, v.shape, None, (4,))
    for field, shape in zip(Result._fields, shapes, strict=True):
        array = getattr(result, field)
        assert (None if array is None else array.shape) == shape
        assert array is None or (type(array) is np.ndarray and array.flags.c_contiguous)
