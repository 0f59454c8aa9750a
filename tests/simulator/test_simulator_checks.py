"""Every check finds its planted bug, names the thread and the line, and accepts the same kernel without the bug."""

import numpy as np
import pytest
from micro import run

from cupy_flash.simulator import CHECKS, errors

WORDS = ".shared .align 16 .b8 words[1024];"


def floats(n, value=1.0):
    return np.full(n, value, np.float32)


STORE_OWN = """
    mov.u32 %r0, words;
    mad.lo.u32 %r1, %t, 4, %r0;
    st.shared.b32 [%r1], %t;
"""
# Each thread reads the word of the neighbouring warp.
READ_NEXT_WARP = """
    xor.b32 %r2, %t, 32;
    mad.lo.u32 %r2, %r2, 4, %r0;
    ld.shared.b32 %r3, [%r2];
    mad.wide.u32 %d0, %t, 4, %p0;
    st.global.b32 [%d0], %r3;
"""


# ---- addresses


def test_global_read_past_the_end_names_array_thread_and_line():
    body = """
        .loc 1 7 3
        mad.wide.u32 %d0, %t, 4, %p0;
        .loc 1 8 3
        ld.global.f32 %f0, [%d0];
    """
    variables = '.file 1 "/some/where/kernel.cu"'
    run(body, floats(32), variables=variables)
    with pytest.raises(errors.OutOfBounds) as caught:
        run(body, floats(31), variables=variables)
    message = str(caught.value)
    assert "0 bytes past the end of 'array 0' (124 bytes)" in message
    assert "thread (31, 0, 0) [warp 0, lane 31] of block (0, 0, 0)" in message
    assert "ld.global.f32 %f0, [%d0];" in message and "kernel.cu:8" in message


def test_vector_that_begins_inside_and_ends_outside():
    body = "ld.global.v2.f32 {%f0, %f1}, [%p0+16];"
    run(body, floats(6), threads=1)
    with pytest.raises(errors.OutOfBounds, match="read of 8 bytes"):
        run(body, floats(5), threads=1)


def test_global_write_before_the_beginning():
    body = "sub.u32 %r0, %t, {}; mul.wide.s32 %d0, %r0, 4; add.u64 %d0, %p0, %d0; st.global.f32 [%d0], 0f00000000;"
    run(body.format(0), floats(32))
    with pytest.raises(errors.OutOfBounds, match="write of 4 bytes .* 8 bytes before 'array 0'"):
        run(body.format(2), floats(32))


def test_one_lane_in_another_array_is_found_where_it_ends():
    body = """
        setp.eq.u32 %q0, %t, 5;
        selp.b64 %d1, %p1, %p0, %q0;
        mad.wide.u32 %d0, %t, 4, %d1;
        ld.global.f32 %f0, [%d0];
    """
    run(body, floats(32), floats(6))
    with pytest.raises(errors.OutOfBounds, match="past the end of 'array 1'"):
        run(body, floats(32), floats(5))


def test_null_pointer():
    with pytest.raises(errors.OutOfBounds, match="null"):
        run("mov.u64 %d0, 0; ld.global.f32 %f0, [%d0];", floats(1))


def test_write_to_read_only_memory():
    body = "mad.wide.u32 %d0, %t, 4, %p0; st.global.b32 [%d0], 0;"
    run(body, floats(32))
    with pytest.raises(errors.ReadOnly, match="read-only 'array 0'"):
        run(body, floats(32), constant=(0,))


def test_shared_access_beyond_the_block():
    body = "mov.u32 %r0, words; mad.lo.u32 %r1, %t, 4, %r0; st.shared.b32 [%r1+{}], %t;"
    run(body.format(0), shared=".shared .align 4 .b8 words[128];")
    with pytest.raises(errors.OutOfBounds, match="at byte 128 of 128 bytes of shared memory"):
        run(body.format(4), shared=".shared .align 4 .b8 words[128];")


def test_dynamic_shared_memory_ends_where_the_launch_says():
    variables = ".extern .shared .align 16 .b8 dynamic[];"
    body = "mov.u32 %r0, dynamic; mad.lo.u32 %r1, %t, 4, %r0; st.shared.b32 [%r1], %t;"
    run(body, variables=variables, dynamic=128)
    with pytest.raises(errors.OutOfBounds, match="of 124 bytes of shared memory"):
        run(body, variables=variables, dynamic=124)


@pytest.mark.parametrize("space", ["global", "shared"])
def test_misaligned_vector(space):
    body = """
        cvta.to.global.u64 %d0, %p0;
        cvt.u64.u32 %d1, {};
        add.u64 %d0, %d0, %d1;
        mov.u32 %r0, words;
        add.u32 %r0, %r0, {};
        st.shared.v4.b32 [%r0], {{%t, %t, %t, %t}};
        ld.global.v2.f32 {{%f0, %f1}}, [%d0];
    """
    run(body.format(0, 0), floats(4), shared=WORDS, threads=1)
    offsets = (4, 0) if space == "global" else (0, 8)
    with pytest.raises(errors.Misaligned, match=f"{space} address"):
        run(body.format(*offsets), floats(4), shared=WORDS, threads=1)


def test_view_keeps_the_misalignment_of_its_array():
    body = "ld.global.v4.f32 {%f0, %f1, %f2, %f3}, [%p0];"
    array = floats(16)
    run(body, array[4:8], threads=1)
    with pytest.raises(errors.Misaligned):
        run(body, array[1:9], threads=1)


# ---- uninitialised memory


def test_uninitialised_shared_memory():
    read = "mov.u32 %r0, words; mad.lo.u32 %r1, %t, 4, %r0; ld.shared.b32 %r2, [%r1];"
    run(STORE_OWN + read, shared=WORDS)
    with pytest.raises(errors.Uninitialised, match=r"byte 0 of .*words"):
        run(read, shared=WORDS)


def test_shared_memory_is_uninitialised_in_every_block():
    only_first = "setp.ne.u32 %q0, %block, 0; mov.u32 %r0, words; @%q0 bra READ; st.shared.b32 [%r0], 1; READ:"
    with pytest.raises(errors.Uninitialised, match=r"block \(1, 0, 0\)"):
        run(only_first + "ld.shared.b32 %r1, [%r0];", shared=WORDS, threads=1, blocks=2)


def test_uninitialised_global_output():
    body = "mad.wide.u32 %d0, %t, 4, %p0; {} ld.global.f32 %f0, [%d0];"
    run(body.format("st.global.f32 [%d0], 0f3F800000;"), floats(32), outputs=(0,))
    with pytest.raises(errors.Uninitialised, match="byte 0 of 'array 0'"):
        run(body.format(""), floats(32), outputs=(0,))


def test_atomic_on_an_uninitialised_workspace():
    body = "red.global.add.f32 [%p0], 0f3F800000;"
    run(body, floats(1))
    with pytest.raises(errors.Uninitialised):
        run(body, floats(1), outputs=(0,))


def test_partly_written_vector_is_uninitialised():
    body = "st.global.v2.f32 [%p0], {%f0, %f0}; ld.global.v4.f32 {%f1, %f2, %f3, %f4}, [%p0];"
    with pytest.raises(errors.Uninitialised):
        run(body, floats(4), outputs=(0,), threads=1)


def test_unwritten_output_stays_poisoned():
    out = floats(32)
    run("mad.wide.u32 %d0, %t, 4, %p0; st.global.f32 [%d0], 0f3F800000;", out, threads=31, outputs=(0,))
    assert (out[:31] == 1).all() and np.isnan(out[31])


# ---- races


def test_read_of_another_warps_word_without_a_barrier():
    out = np.zeros(64, np.uint32)
    run(STORE_OWN + "bar.sync 0;" + READ_NEXT_WARP, out, shared=WORDS, threads=64)
    assert np.array_equal(out, np.arange(64) ^ 32)
    with pytest.raises(errors.Race) as caught:
        run(STORE_OWN + READ_NEXT_WARP, out, shared=WORDS, threads=64)
    message = str(caught.value)
    assert "write, then read" in message and "without a barrier" in message
    assert "st.shared.b32 [%r1], %t;" in message and "ld.shared.b32 %r3, [%r2];" in message


def test_write_after_anothers_read_without_a_barrier():
    again = READ_NEXT_WARP + "{} st.shared.b32 [%r1], 7;"
    out = np.zeros(64, np.uint32)
    run(STORE_OWN + "bar.sync 0;" + again.format("bar.sync 0;"), out, shared=WORDS, threads=64)
    with pytest.raises(errors.Race, match="read, then write"):
        run(STORE_OWN + "bar.sync 0;" + again.format(""), out, shared=WORDS, threads=64)


def test_write_over_anothers_write_without_a_barrier():
    body = STORE_OWN + "{} xor.b32 %r2, %t, 32; mad.lo.u32 %r2, %r2, 4, %r0; st.shared.b32 [%r2], 7;"
    run(body.format("bar.sync 0;"), shared=WORDS, threads=64)
    with pytest.raises(errors.Race, match="write, then write"):
        run(body.format(""), shared=WORDS, threads=64)


def test_race_between_iterations_of_a_loop():
    # There is no barrier between the reads of an iteration and the writes of the next one.
    body = f"""
        mov.u32 %r10, 0;
    LOOP:
        {STORE_OWN}
        bar.sync 0;
        {READ_NEXT_WARP}
        {{}}
        add.u32 %r10, %r10, 1;
        setp.lt.u32 %q0, %r10, 2;
        @%q0 bra LOOP;
    """
    out = np.zeros(64, np.uint32)
    run(body.format("bar.sync 0;"), out, shared=WORDS, threads=64)
    with pytest.raises(errors.Race, match="read, then write"):
        run(body.format(""), out, shared=WORDS, threads=64)


def test_barrier_orders_only_the_warps_that_use_it():
    # Warps 0 and 1 use barrier 1; warp 2 does not.
    body = (
        STORE_OWN
        + """
        setp.ge.u32 %q0, %t, 64;
        @%q0 bra THIRD;
        bar.sync 1, 64;
        xor.b32 %r2, %t, {};
        mad.lo.u32 %r2, %r2, 4, %r0;
        ld.shared.b32 %r3, [%r2];
    THIRD:
    """
    )
    run(body.format(32), shared=WORDS, threads=96)
    with pytest.raises(errors.Race, match="warp 2"):
        run(body.format(64), shared=WORDS, threads=96)


def test_arrive_publishes_but_does_not_wait():
    # The producer arrives and the consumer waits, which orders the producer's earlier writes, but no later ones.
    body = f"""
        {STORE_OWN}
        setp.ge.u32 %q0, %t, 32;
        @%q0 bra CONSUMER;
        bar.arrive 1, 64;
        {{}}
        exit;
    CONSUMER:
        bar.sync 1, 64;
        {READ_NEXT_WARP}
    """
    out = np.zeros(64, np.uint32)
    run(body.format(""), out, shared=WORDS, threads=64)
    assert np.array_equal(out[32:], np.arange(32))
    with pytest.raises(errors.Race):
        run(body.format("st.shared.b32 [%r1], 9;"), out, shared=WORDS, threads=64)


def test_lanes_of_a_warp_need_a_warp_barrier():
    body = STORE_OWN + "{} xor.b32 %r2, %t, 1; mad.lo.u32 %r2, %r2, 4, %r0; ld.shared.b32 %r3, [%r2];"
    run(body.format("bar.warp.sync -1;"), shared=WORDS)
    with pytest.raises(errors.Race, match="__syncwarp"):
        run(body.format(""), shared=WORDS)


@pytest.mark.parametrize("space", ["shared", "global"])
def test_two_lanes_write_different_values_to_one_word(space):
    body = "mov.u32 %r0, words; {}"
    same = {"shared": "st.shared.b32 [%r0], 5;", "global": "st.global.b32 [%p0], 5;"}[space]
    differing = same.replace("5", "%t")
    run(body.format(same), floats(1), shared=WORDS)
    with pytest.raises(errors.Race, match="different values"):
        run(body.format(differing), floats(1), shared=WORDS)


def test_halves_of_one_word_by_two_warps_do_not_race():
    body = """
        mov.u32 %r0, words;
        shr.u32 %r1, %t, 5;
        and.b32 %r2, %t, 31;
        mad.lo.u32 %r0, %r2, 4, %r0;
        mad.lo.u32 %r0, %r1, 2, %r0;
        cvt.u16.u32 %h0, %t;
        st.shared.u16 [%r0], %h0;
        ld.shared.u16 %h1, [%r0];
    """
    run(body, shared=WORDS, threads=64)


def test_atomics_race_with_plain_accesses_only():
    body = "mov.u32 %r0, words; {} bar.sync 0; red.shared.add.u32 [%r0], 1; {} ld.shared.b32 %r1, [%r0];"
    zero = "setp.ne.u32 %q0, %t, 0; @!%q0 st.shared.b32 [%r0], 0;"
    run(body.format(zero, "bar.sync 0;"), shared=WORDS, threads=64)
    with pytest.raises(errors.Race, match="atomic"):
        run(body.format(zero, ""), shared=WORDS, threads=64)


# ---- barriers


def test_barrier_reached_by_part_of_a_warp():
    body = "setp.lt.u32 %q0, %t, {}; @%q0 bra.uni MEET; bar.sync 1; MEET: bar.sync 0;"
    with pytest.raises(errors.BarrierMisuse, match="part of a warp"):
        run(body.format(7), threads=32)


def test_exited_lanes_do_not_hold_up_a_barrier():
    body = "setp.ge.u32 %q0, %t, {}; @%q0 exit; bar.sync 0;"
    run(body.format(40), threads=64)


def test_barrier_with_different_counts():
    body = "setp.lt.u32 %q0, %t, 32; @%q0 bra FIRST; bar.sync 1, {}; exit; FIRST: bar.sync 1, 64;"
    run(body.format(64), threads=64)
    with pytest.raises(errors.BarrierMisuse, match="96 threads"):
        run(body.format(96), threads=64)


def test_more_arrivals_than_a_barrier_expects():
    body = "bar.sync 1, {};"
    run(body.format(96), threads=96)
    with pytest.raises(errors.BarrierMisuse, match="96 threads arrive at barrier 1, which expects 64"):
        run(body.format(64), threads=96)


def test_warp_that_arrives_twice_before_a_barrier_completes():
    with pytest.raises(errors.BarrierMisuse, match="arrives twice"):
        run("bar.arrive 1, 128; bar.arrive 1, 128;", threads=64)


def test_two_warps_take_turns():
    """Ping-pong: each warp waits at its own barrier and signals the other's; at the start the first barrier is
    signalled once.
    """
    body = """
        mov.u32 %r0, words;
        shr.u32 %r1, %t, 5;
        add.u32 %r2, %r1, 1;
        sub.u32 %r3, 2, %r1;
        mov.u32 %r4, 0;
        setp.ne.u32 %q0, %r1, 0;
        @%q0 bra LOOP;
        st.shared.b32 [%r0], 0;
        bar.arrive 1, 64;
    LOOP:
        bar.sync %r2, 64;
        ld.shared.b32 %r5, [%r0];
        bar.warp.sync -1;
        add.u32 %r6, %r5, 1;
        st.shared.b32 [%r0], %r6;
        mad.lo.u32 %r7, %r5, 32, 0;
        and.b32 %r8, %t, 31;
        add.u32 %r7, %r7, %r8;
        mad.wide.u32 %d0, %r7, 4, %p0;
        st.global.b32 [%d0], %r1;
        bar.arrive %r3, 64;
        add.u32 %r4, %r4, 1;
        setp.lt.u32 %q1, %r4, 3;
        @%q1 bra LOOP;
    """
    for order in ("early", "late", "random"):
        out = np.zeros((6, 32), np.uint32)
        run(body, out, shared=WORDS, threads=64, order=order)
        assert np.array_equal(out, np.arange(6)[:, None] % 2 + np.zeros((1, 32)))


def test_deadlock_names_warps_and_instructions():
    body = """
        setp.lt.u32 %q0, %t, 32;
        @%q0 bra FIRST;
        bar.sync 2, 64;
        exit;
    FIRST:
        bar.sync 1, 64;
    """
    with pytest.raises(errors.Deadlock) as caught:
        run(body, threads=64)
    message = str(caught.value)
    assert "warps [0] wait at barrier 1 (32 threads arrived, 64 threads expected)" in message
    assert "warps [1] wait at barrier 2" in message and "bar.sync 2, 64;" in message


def test_shuffle_that_part_of_the_warp_never_reaches():
    body = "setp.lt.u32 %q0, %t, 16; @%q0 exit; {} shfl.sync.bfly.b32 %r0, %t, 1, 31, -1;"
    run(body.format(""))  # lanes that have exited do not take part
    spin = (
        "setp.lt.u32 %q0, %t, 20; @%q0 bra OTHER; shfl.sync.bfly.b32 %r0, %t, 1, 31, -1; exit; OTHER: bar.warp.sync -1;"
    )
    with pytest.raises(errors.Deadlock, match=r"lanes \[20, .* wait for lanes"):
        run(spin)


def test_lane_outside_its_own_member_mask():
    with pytest.raises(errors.BarrierMisuse, match="not in its own membermask"):
        run("vote.sync.ballot.b32 %r0, 1, 65535;")


def test_shuffle_from_a_lane_that_takes_no_part():
    body = "setp.ge.u32 %q0, %t, 16; @%q0 bra REST; shfl.sync.idx.b32 %r0, %t, {}, 31, 65535; REST:"
    run(body.format(3))
    with pytest.raises(errors.BarrierMisuse, match="reads from lane 20"):
        run(body.format(20))


def test_trap_names_the_thread():
    with pytest.raises(errors.Trap, match=r"thread \(9, 0, 0\)"):
        run("setp.eq.u32 %q0, %t, 9; @%q0 trap;")


def test_checks_can_be_disabled():
    run(STORE_OWN + READ_NEXT_WARP, np.zeros(64, np.uint32), shared=WORDS, threads=64, unchecked=CHECKS)
