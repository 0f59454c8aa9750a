"""cp.async: the copied bytes, when they may be read, and equal results of a correct kernel in all orders."""

import numpy as np
import pytest
from micro import run

from cupy_flash.measure.checks.hopper import BY_NAME
from cupy_flash.simulator import errors

WORDS = ".shared .align 16 .b8 words[2048];"
ORDERS = ["early", "late", "random"]


def copy(size=16, *, more="", wait="cp.async.wait_group 0;", barrier="bar.sync 0;"):
    """Return PTX in which each thread copies `size` bytes from %p0 to smem, and stores its neighbour's bytes to %p1."""
    load = {4: "b32 %r4", 8: "v2.b32 {%r4, %r5}", 16: "v4.b32 {%r4, %r5, %r6, %r7}"}[size]
    kind, registers = load.split(" ", 1)
    return f"""
        mov.u32 %r0, words;
        mad.lo.u32 %r1, %t, {size}, %r0;
        mad.wide.u32 %d0, %t, {size}, %p0;
        cp.async.{"cg" if size == 16 else "ca"}.shared.global [%r1], [%d0], {size}{more};
        cp.async.commit_group;
        {wait}
        {barrier}
        xor.b32 %r2, %t, 33;
        mad.lo.u32 %r2, %r2, {size}, %r0;
        ld.shared.{kind} {registers}, [%r2];
        mad.wide.u32 %d1, %t, {size}, %p1;
        st.global.{kind} [%d1], {registers};
    """


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("size", [4, 8, 16])
def test_copied_bytes_arrive(size, order):
    given = np.arange(64 * size, dtype=np.uint8).reshape(64, size)
    out = np.zeros_like(given)
    run(copy(size), given, out, shared=WORDS, threads=64, order=order)
    assert np.array_equal(out, given[np.arange(64) ^ 33])


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("amount", [0, 4, 12, 16])
def test_bytes_past_src_size_are_zero(amount, order):
    given = np.full((64, 16), 7, np.uint8)
    out = np.ones_like(given)
    run(copy(more=f", {amount}"), given, out, shared=WORDS, threads=64, order=order)
    assert (out[:, :amount] == 7).all() and (out[:, amount:] == 0).all()


def test_a_lane_that_copies_nothing_may_point_anywhere():
    given, out = np.full((63, 16), 7, np.uint8), np.ones((64, 16), np.uint8)
    nowhere = "setp.eq.u32 %q0, %t, 63; selp.u32 %r9, SIZE, 16, %q0; @%q0 mov.u64 %d0, 0; cp.async"
    body = copy(more=", %r9").replace("cp.async", nowhere, 1)
    run(body.replace("SIZE", "0"), given, out, shared=WORDS, threads=64)
    assert (out[63 ^ 33] == 0).all()
    with pytest.raises(errors.OutOfBounds, match="null"):
        run(body.replace("SIZE", "4"), given, out, shared=WORDS, threads=64)


def test_ignored_source_gives_zeros():
    given, out = np.full((64, 16), 7, np.uint8), np.ones((64, 16), np.uint8)
    body = "and.b32 %r9, %t, 1; setp.eq.u32 %q1, %r9, 1;" + copy(more=", %q1")
    run(body, given, out, shared=WORDS, threads=64)
    assert np.array_equal((out == 0).all(1), (np.arange(64) ^ 33) % 2 == 1)


@pytest.mark.parametrize("order", ORDERS)
def test_use_before_the_wait(order):
    given, out = np.zeros((64, 16), np.uint8), np.zeros((64, 16), np.uint8)
    with pytest.raises(errors.PendingCopy, match="before the wait for the cp.async") as caught:
        run(copy(wait=""), given, out, shared=WORDS, threads=64, order=order)
    assert "cp.async.cg" in str(caught.value) and "ld.shared.v4.b32" in str(caught.value)


def test_wait_for_too_few_groups():
    given, out = np.zeros((64, 16), np.uint8), np.zeros((64, 16), np.uint8)
    run(copy(wait="cp.async.commit_group; cp.async.wait_group 1;"), given, out, shared=WORDS, threads=64)
    with pytest.raises(errors.PendingCopy):
        run(copy(wait="cp.async.wait_group 1;"), given, out, shared=WORDS, threads=64)


def test_wait_all_needs_no_commit():
    given, out = np.full((64, 16), 3, np.uint8), np.zeros((64, 16), np.uint8)
    body = copy(wait="cp.async.wait_all;").replace("cp.async.commit_group;", "")
    run(body, given, out, shared=WORDS, threads=64)
    assert (out == 3).all()
    with pytest.raises(errors.PendingCopy):
        run(body.replace("wait_all", "wait_group 0"), given, out, shared=WORDS, threads=64)


def test_own_wait_does_not_make_the_copy_visible_to_others():
    given, out = np.zeros((64, 16), np.uint8), np.zeros((64, 16), np.uint8)
    # bar.sync 1 is a barrier of all threads that precedes the wait, which is too early.
    with pytest.raises(errors.Race, match="write, then read"):
        run(copy(wait="bar.sync 0; cp.async.wait_all; ", barrier=""), given, out, shared=WORDS, threads=32 * 2)


def test_copy_over_bytes_still_being_read():
    given, out = np.zeros((64, 16), np.uint8), np.zeros((64, 16), np.uint8)
    again = "{} cp.async.cg.shared.global [%r1], [%d0], 16; cp.async.wait_all;"
    run(copy() + again.format("bar.sync 0;"), given, out, shared=WORDS, threads=64)
    with pytest.raises(errors.Race, match="read, then write"):
        run(copy() + again.format(""), given, out, shared=WORDS, threads=64)


def test_late_copies_read_their_source_late():
    """The source may not change before the wait: order="late" reads the new value, order="early" the old one."""
    results = {}
    for order in ("early", "late"):
        given, out = np.full((64, 16), 1, np.uint8), np.zeros((64, 16), np.uint8)
        change = "mov.b64 %d5, 0x0202020202020202; st.global.v2.b64 [%d0], {%d5, %d5}; cp.async.wait_all;"
        run(copy(wait=change), given, out, shared=WORDS, threads=64, order=order)
        results[order] = int(out[0, 0])
    assert results == {"early": 1, "late": 2}


def test_misaligned_copy():
    given, out = np.zeros((65, 16), np.uint8), np.zeros((64, 16), np.uint8)
    with pytest.raises(errors.Misaligned):
        run("add.u64 %p0, %p0, 8;" + copy(), given, out, shared=WORDS, threads=64)


def test_uninitialised_source():
    given, out = np.zeros((64, 16), np.uint8), np.zeros((64, 16), np.uint8)
    with pytest.raises(errors.Uninitialised, match="array 0"):
        run(copy(), given, out, shared=WORDS, threads=64, outputs=(0,))


@pytest.mark.parametrize("order", ORDERS)
def test_src_size_below_cp_size(order):
    """cp.async copies src-size bytes and fills the rest of cp-size with zeros."""
    case = BY_NAME["cp.async"]
    out = case.out.copy()
    run(case.body, *case.inputs, out, threads=32, order=order, **case.options)
    given = case.inputs[0].view(np.uint8).reshape(32, 16).copy()
    fours = np.where(np.arange(32) % 2, case.inputs[0][::4], 0)
    for thread, row in enumerate(given):
        row[thread % 9 * 2 :] = 0
    assert np.array_equal(out[:128], given.view(np.uint32).reshape(-1))
    assert np.array_equal(out[128::4], fours) and not out[128:].reshape(32, 4)[:, 1:].any()
