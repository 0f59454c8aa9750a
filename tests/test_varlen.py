"""Packed sequences: the formula one by one, zero-length ones anywhere, tokens past the last, dropout's bits."""

from dataclasses import replace

import numpy as np
import pytest
from cases import Case, Result, assert_bitwise_equal, check, run, run_planned

import cupy_flash

pytestmark = pytest.mark.usefixtures("poisoned_memory")

PACKED = Case(batch=4, q_lengths=(7, 19, 1, 12), kv_lengths=(9, 5, 23, 12), packed=True)
CASES = {
    "plain": PACKED,
    "causal": replace(PACKED, causal=True),
    "top-left": replace(PACKED, causal="top_left"),
    "window": replace(PACKED, window=(3, 2)),
    "window-causal": replace(PACKED, window=(4, None), causal=True),
    "scale-softcap": replace(PACKED, scale=-2.0, softcap=1.5),
    "alibi": replace(PACKED, alibi="h"),
    "alibi-per-sequence": replace(PACKED, alibi="bh", causal=True),
    "sink": replace(PACKED, sink=True, causal=True),
    "dropout": replace(PACKED, dropout=0.3),
    "grouped-wide-values": replace(PACKED, heads=6, kv_heads=3, head_dim_v=40),
    "bfloat16": replace(PACKED, dtype="bfloat16", causal=True, sink=True),
    "float64": replace(PACKED, dtype="float64", dropout=0.2),
    "no-dlse": replace(PACKED, dlse=False),
    "zero-length-queries-first": replace(PACKED, q_lengths=(0, 19, 1, 12)),
    "zero-length-keys-first": replace(PACKED, kv_lengths=(0, 5, 23, 12), sink=True),
    "zero-length-in-the-middle": replace(PACKED, q_lengths=(7, 0, 0, 12), kv_lengths=(9, 5, 0, 12), causal=True),
    "zero-length-last": replace(PACKED, q_lengths=(7, 19, 1, 0), kv_lengths=(9, 5, 23, 0)),
    "zero-length-all": replace(PACKED, q_lengths=(0,) * 4, kv_lengths=(0,) * 4, sink=True),
    "one-sequence": replace(PACKED, batch=1, q_lengths=(19,), kv_lengths=(23,), causal=True),
    "no-sequence": replace(PACKED, batch=0, q_lengths=(), kv_lengths=(), sink=True),
}


@pytest.mark.parametrize("case", [pytest.param(case, id=name) for name, case in CASES.items()])
def test_packed(case, backend):
    check(case, backend=backend)


@pytest.mark.parametrize("case", [pytest.param(case, id=name) for name, case in CASES.items()])
def test_any_tiles_and_threads(case):
    one = run_planned(case, block_q=4, block_kv=8, threads=1)
    check(case, one)
    assert_bitwise_equal(run_planned(case, block_q=4, block_kv=8, threads=3), one, case)


@pytest.mark.parametrize(
    "name", ["causal", "window", "alibi-per-sequence", "sink", "dropout", "zero-length-in-the-middle"]
)
def test_packed_equals_padded(name, backend):
    """The same sequences as a padded batch: the same bits everywhere, dropout's included."""
    case = CASES[name]
    packed, padded = run(case, backend), run(replace(case, packed=False), backend)

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


def test_longer_maxima_change_nothing(backend):
    """max_seqlen is an upper bound: it sizes the plan, not the result."""
    case = replace(PACKED, causal=True)
    call = case.call()
    longer = call._replace(packed=call.packed._replace(max_seqlen_q=1000, max_seqlen_k=np.int64(5000)))
    check(case, run(case, backend, longer))


def test_the_longest_maxima():
    """Planning takes no time or memory that grows with them."""
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
