"""Control flow, collectives, memory and atomics of the simulator, each against a few lines of NumPy."""

import gc
import struct
import weakref

import numpy as np
import pytest
from micro import run, source

from cupy_flash.gpu.tensor_map import encode_for_simulator
from cupy_flash.measure.checks.hopper import BY_NAME
from cupy_flash.measure.checks.hopper.bulk import tensor
from cupy_flash.measure.checks.hopper.shared_memory import DYNAMIC_BYTES
from cupy_flash.simulator import Memory, SimulationError, errors, launch, parse
from cupy_flash.simulator.machine.context import Context

LANES = np.arange(32)
STORE = "mad.wide.u32 %d0, %t, 4, %p0; st.global.b32 [%d0], {};"


def result(body, threads=32, register="%r1", **options):
    """Return the final value of %r1 of each thread."""
    out = np.zeros(threads, np.uint32)
    run(body + STORE.format(register), out, threads=threads, **options)
    return out


# ---- control flow


def test_divergent_branches_reconverge():
    body = """
        mov.u32 %r1, 0;
        and.b32 %r2, %t, 3;
        setp.lt.u32 %q0, %r2, 2;
        @%q0 bra SMALL;
        setp.eq.u32 %q1, %r2, 2;
        @!%q1 bra THREE;
        add.u32 %r1, %r1, 20;
        bra MEET;
    THREE:
        add.u32 %r1, %r1, 30;
        bra MEET;
    SMALL:
        add.u32 %r1, %r1, %r2;
    MEET:
        activemask.b32 %r3;
        setp.ne.u32 %q2, %r3, -1;
        @%q2 trap;
        add.u32 %r1, %r1, 100;
    """
    assert np.array_equal(result(body, 96), 100 + np.array([0, 1, 20, 30] * 24))


def test_loop_with_a_trip_count_per_lane():
    body = """
        mov.u32 %r1, 0;
        mov.u32 %r2, 0;
    LOOP:
        setp.ge.u32 %q0, %r2, %t;
        @%q0 bra DONE;
        add.u32 %r2, %r2, 1;
        add.u32 %r1, %r1, %r2;
        bra LOOP;
    DONE:
    """
    n = np.arange(64)
    assert np.array_equal(result(body, 64), n * (n + 1) // 2)


def test_registers_stay_live_through_a_loop():
    # %r2 is read only at the top of the loop; registers that are written below must not reuse its storage.
    body = """
        mul.lo.u32 %r2, %t, 10;
        mov.u32 %r1, 0;
        mov.u32 %r3, 0;
    LOOP:
        add.u32 %r1, %r1, %r2;
        add.u32 %r4, %r3, 7;
        add.u32 %r5, %r4, 7;
        xor.b32 %r6, %r4, %r5;
        add.u32 %r3, %r3, 1;
        setp.lt.u32 %q0, %r3, 3;
        @%q0 bra LOOP;
    """
    assert np.array_equal(result(body), 30 * LANES)


def test_a_branch_of_some_lanes_of_every_other_warp():
    body = """
        mov.u32 %r1, 1;
        and.b32 %r2, %t, 35;
        setp.ne.u32 %q0, %r2, 1;
        @%q0 bra SKIP;
        add.u32 %r1, %r1, %t;
    SKIP:
    """
    n = np.arange(160)
    assert np.array_equal(result(body, 160), np.where(n & 35 == 1, 1 + n, 1))


def test_exited_lanes_do_not_affect_others():
    body = "mov.u32 %r1, 5; and.b32 %r2, %t, 1; setp.eq.u32 %q0, %r2, 1; @%q0 exit; vote.sync.ballot.b32 %r1, 1, -1;"
    assert np.array_equal(result(body, 64), np.where(np.arange(64) % 2, 0, 0x55555555))


def test_a_collective_completes_when_the_missing_lanes_exit():
    body = """
        mov.u32 %r1, 0;
        setp.ge.u32 %q0, %t, 16;
        @%q0 bra LEAVE;
        vote.sync.ballot.b32 %r1, 1, -1;
        bra DONE;
    LEAVE:
        exit;
    DONE:
    """
    assert np.array_equal(result(body), np.where(LANES < 16, 0xFFFF, 0))


def test_a_collective_does_not_wait_for_other_warps():
    # Warp 1 arrives as a whole; half of warp 0 arrives later.
    body = """
        setp.lt.u32 %q0, %t, 16;
        @%q0 bra BEHIND;
    MEET:
        vote.sync.ballot.b32 %r1, 1, -1;
        bra DONE;
    BEHIND:
        bra MEET;
    DONE:
    """
    assert np.array_equal(result(body, 64), np.full(64, 0xFFFFFFFF))


def test_block_with_a_partial_warp():
    body = "vote.sync.ballot.b32 %r1, 1, -1;"
    assert np.array_equal(result(body, 40), np.where(np.arange(40) < 32, 0xFFFFFFFF, 0xFF))


def test_guarded_instructions():
    body = "mov.u32 %r1, 1; setp.gt.u32 %q0, %t, 9; @%q0 mov.u32 %r1, 2; @!%q0 add.u32 %r1, %r1, 4;"
    assert np.array_equal(result(body), np.where(LANES > 9, 2, 5))


def test_indexed_branch():
    body = """
        and.b32 %r2, %t, 3;
    TABLE: .branchtargets ZERO, ONE, ZERO, THREE;
        brx.idx %r2, TABLE;
    ZERO: mov.u32 %r1, 10; bra DONE;
    ONE: mov.u32 %r1, 11; bra DONE;
    THREE: mov.u32 %r1, 13;
    DONE:
    """
    assert np.array_equal(result(body), np.array([10, 11, 10, 13] * 8))


def test_braces_have_registers_and_labels_of_their_own():
    inner = """{ .reg .pred %x; .reg .b32 %r2;
        setp.lt.u32 %x, %t, {n}; @%x bra D; mov.u32 %r2, 1; add.u32 %r1, %r1, %r2; D: }"""
    body = "mov.u32 %r1, 0; mov.u32 %r2, 100;" + inner.replace("{n}", "16") + inner.replace("{n}", "8")
    expected = 100 + (LANES >= 8).astype(int) + (LANES >= 16)
    assert np.array_equal(result(body + "add.u32 %r1, %r1, %r2;"), expected)


FUNCTION = """
.func (.param .b32 out) sum_to(.param .b32 n)
{
    .reg .b32 %i, %s, %n;
    .reg .pred %p;
    .local .align 4 .b8 depot[8];
    .reg .b64 %l;
    ld.param.u32 %n, [n];
    mov.u32 %s, 0;
    mov.u32 %i, 0;
LOOP:
    setp.gt.u32 %p, %i, %n;
    @%p bra END;
    add.u32 %s, %s, %i;
    add.u32 %i, %i, 1;
    bra LOOP;
END:
    mov.u64 %l, depot;
    st.local.u32 [%l+4], %s;
    ld.local.u32 %s, [%l+4];
    st.param.b32 [out], %s;
    ret;
}
"""
CALL = """
    {{ .param .b32 x; .param .b32 y; st.param.b32 [x], {};
    call.uni (y), sum_to, (x);
    ld.param.b32 {}, [y]; }}
"""


def test_calls_are_inlined():
    body = CALL.format("%t", "%r2") + CALL.format("3", "%r3") + "add.u32 %r1, %r2, %r3;"
    assert np.array_equal(result(body, variables=FUNCTION), LANES * (LANES + 1) // 2 + 6)


def test_recursion_is_refused():
    recursive = FUNCTION.replace("LOOP:", "{ .param .b32 x; .param .b32 y; call (y), sum_to, (x); } LOOP:")
    with pytest.raises(errors.Unsupported, match="recursion is not simulated: micro -> sum_to -> sum_to"):
        result(CALL.format("%t", "%r1"), variables=recursive)


def test_block_and_thread_indices():
    threads, blocks = (5, 4, 3), 7
    out = np.zeros((blocks, 60, 3), np.uint32)
    body = """
        mov.u32 %r1, %tid.x; mov.u32 %r2, %tid.y; mov.u32 %r3, %tid.z;
        mov.u32 %r4, %ntid.x; mov.u32 %r5, %ntid.y; mov.u32 %r9, %nctaid.x;
        mad.lo.u32 %r6, %r3, %r5, %r2;
        mad.lo.u32 %r6, %r6, %r4, %r1;
        mad.lo.u32 %r6, %block, 60, %r6;
        mad.wide.u32 %d0, %r6, 12, %p0;
        st.global.b32 [%d0], %r1;
        st.global.b32 [%d0+4], %r3;
        st.global.b32 [%d0+8], %r9;
    """
    run(body, out, threads=threads, blocks=blocks)
    index = np.arange(60)
    assert (out[:, :, 0] == index % 5).all() and (out[:, :, 1] == index // 20).all() and (out[:, :, 2] == blocks).all()


def test_grid_larger_than_the_resident_set():
    out = np.zeros(1000 * 64, np.uint32)
    body = "mad.lo.u32 %r1, %block, 64, %t; mad.wide.u32 %d0, %r1, 4, %p0; st.global.b32 [%d0], %r1;"
    run(body, out, threads=64, blocks=1000)
    assert np.array_equal(out, np.arange(64000))


@pytest.mark.parametrize("order", ["late", "random"])
def test_a_spinning_warp_does_not_block_the_warp_it_waits_for(order):
    body = """
        setp.ge.u32 %q0, %t, 32;
        @%q0 bra WRITER;
    SPIN:
        ld.volatile.global.u32 %r2, [%p1];
        setp.eq.u32 %q1, %r2, 0;
        @%q1 bra SPIN;
        bra DONE;
    WRITER:
        st.volatile.global.u32 [%p1], 1;
    DONE:
        mad.wide.u32 %d0, %t, 4, %p0;
        st.global.b32 [%d0], 9;
    """
    out = np.zeros(64, np.uint32)
    run(body, out, np.zeros(1, np.uint32), threads=64, order=order)
    assert (out == 9).all()


def test_a_spinning_lane_does_not_block_its_own_warp():
    # Each lane takes a lock in turn, which needs independent thread scheduling.
    body = """
    AGAIN:
        atom.global.cas.b32 %r2, [%p1], 0, 1;
        setp.ne.u32 %q0, %r2, 0;
        @%q0 bra AGAIN;
        ld.volatile.global.u32 %r3, [%p0];
        add.u32 %r3, %r3, 1;
        st.volatile.global.u32 [%p0], %r3;
        atom.global.exch.b32 %r2, [%p1], 0;
    """
    count = np.zeros(1, np.uint32)
    run(body, count, np.zeros(1, np.uint32), threads=48)
    assert count[0] == 48


# ---- collectives


def shuffled(mode, lane, b, c):
    """Return (source lane, predicate) of shfl.sync, by the pseudo code of the PTX ISA."""
    segment, clamp = c >> 8 & 31, c & 31
    most, least = lane & segment | clamp & ~segment, lane & segment
    if mode == "up":
        j = lane - b
        inside = j >= most
    else:
        j = {"down": lane + b, "bfly": lane ^ b, "idx": least | b & ~segment}[mode]
        inside = j <= most
    return (j if inside else lane), inside


@pytest.mark.parametrize("width", [32, 16, 8])
@pytest.mark.parametrize("mode", ["up", "down", "bfly", "idx"])
def test_shuffle(mode, width):
    c = (32 - width) << 8 | (0 if mode == "up" else 31)
    for b in (0, 1, 3, width // 2, width - 1):
        body = f"""
            mul.lo.u32 %r2, %t, 10;
            shfl.sync.{mode}.b32 %r1|%q0, %r2, {b}, {c}, -1;
            @%q0 add.u32 %r1, %r1, 1000;
        """
        expected = [10 * j + 1000 * inside for j, inside in (shuffled(mode, lane, b, c) for lane in range(32))]
        assert result(body).tolist() == expected


def test_votes():
    body = "setp.lt.u32 %q0, %t, {}; vote.sync.{}.pred %q1, %q0, -1; selp.u32 %r1, 1, 0, %q1;"
    for count in (0, 7, 32):
        flags = np.arange(32) < count
        expected = {"any": flags.any(), "all": flags.all(), "uni": flags.all() or not flags.any()}
        for mode, value in expected.items():
            assert (result(body.format(count, mode)) == value).all()
    ballot = "setp.lt.u32 %q0, %t, 7; vote.sync.ballot.b32 %r1, !%q0, -1;"
    assert (result(ballot) == 0xFFFFFF80).all()


def test_halves_of_a_warp_vote_apart():
    body = """
        setp.lt.u32 %q0, %t, 16;
        selp.b32 %r2, 0xffff, 0xffff0000, %q0;
        and.b32 %r3, %t, 1;
        setp.eq.u32 %q1, %r3, 1;
        vote.sync.ballot.b32 %r1, %q1, %r2;
    """
    assert np.array_equal(result(body), np.where(LANES < 16, 0xAAAA, 0xAAAA0000))


def test_matches():
    values = LANES % 5
    body = "rem.u32 %r2, %t, 5; match.any.sync.b32 %r1, %r2, -1;"
    expected = [sum(1 << j for j in range(32) if values[j] == values[i]) for i in range(32)]
    assert result(body).tolist() == expected
    body = "mov.u32 %r2, {}; match.all.sync.b32 %r1|%q0, %r2, -1; @%q0 add.u32 %r1, %r1, 2;"
    assert (result(body.format(7)) == 1).all() and (result(body.format("%t")) == 0).all()


@pytest.mark.parametrize(
    "operation", ["add.u32", "min.s32", "max.s32", "min.u32", "max.u32", "and.b32", "or.b32", "xor.b32"]
)
def test_reductions(operation):
    body = f"mul.lo.s32 %r2, %t, -7; add.s32 %r2, %r2, 50; redux.sync.{operation} %r1, %r2, -1;"
    values = (50 - 7 * LANES).astype(np.int32)
    name, type_ = operation.split(".")
    typed = values if type_ == "s32" else values.view(np.uint32)
    functions = {"add": np.add, "min": np.minimum, "max": np.maximum}
    functions |= {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}
    assert (result(body) == functions[name].reduce(typed, dtype=typed.dtype).view(np.uint32)).all()


def test_elect_chooses_one_lane():
    body = "mov.u32 %r1, 0; elect.sync %r2|%q0, -1; @%q0 mov.u32 %r1, 1;"
    assert result(body).sum() == 1


@pytest.mark.parametrize("kind", ["popc", "and", "or"])
def test_barrier_with_a_vote(kind):
    text = "setp.lt.u32 %q0, %t, {};" + (
        "bar.red.popc.u32 %r1, 0, %q0;"
        if kind == "popc"
        else f"bar.red.{kind}.pred %q1, 0, %q0; selp.u32 %r1, 1, 0, %q1;"
    )
    for count in (0, 50, 96):
        expected = {"popc": count, "and": count == 96, "or": count > 0}[kind]
        assert (result(text.format(count), 96) == expected).all()


@pytest.mark.parametrize("seed", range(8))
def test_lanes_that_arrive_at_a_barrier_separately(seed):
    """Such lanes wait for the rest of their warp, and do not execute earlier instructions again."""
    body = """
        mov.u32 %r1, 0;
        and.b32 %r2, %t, 3;
        setp.eq.u32 %q0, %r2, 0;
        @%q0 bra MEET;
        setp.eq.u32 %q1, %r2, 1;
        @%q1 bra MEET;
        add.u32 %r1, %r1, 10;
    MEET:
        add.u32 %r1, %r1, 1;
        bar.sync 0;
    """
    expected = np.where(np.arange(64) & 3 < 2, 1, 11)
    np.testing.assert_array_equal(result(body, threads=64, order="random", seed=seed), expected)


def test_barrier_numbers_may_come_from_registers():
    # Warps 0 and 1 use barrier 1, warps 2 and 3 use barrier 2.
    body = """
        mov.u32 %r0, words;
        mad.lo.u32 %r1, %t, 4, %r0;
        st.shared.b32 [%r1], %t;
        shr.u32 %r2, %t, 6;
        add.u32 %r2, %r2, 1;
        bar.sync %r2, 64;
        xor.b32 %r3, %t, 32;
        mad.lo.u32 %r3, %r3, 4, %r0;
        ld.shared.b32 %r1, [%r3];
    """
    expected = np.arange(128) ^ 32
    assert np.array_equal(result(body, 128, shared=".shared .align 4 .b8 words[512];"), expected)


# ---- memory


def test_narrow_loads_extend_by_their_type():
    given = np.arange(-64, 64, 4, dtype=np.int8)
    out = np.zeros((32, 2), np.int32)
    body = """
        cvt.u64.u32 %d0, %t;
        add.u64 %d0, %p0, %d0;
        ld.global.s8 %r1, [%d0];
        ld.global.u8 %r2, [%d0];
        mad.wide.u32 %d1, %t, 8, %p1;
        st.global.v2.b32 [%d1], {%r1, %r2};
    """
    run(body, given, out)
    assert np.array_equal(out[:, 0], given) and np.array_equal(out[:, 1], given.view(np.uint8))


def test_narrow_stores_truncate():
    out = np.zeros(32, np.uint8)
    run("mad.lo.u32 %r1, %t, 300, 0; cvt.u64.u32 %d0, %t; add.u64 %d0, %p0, %d0; st.global.u8 [%d0], %r1;", out)
    assert np.array_equal(out, (LANES * 300).astype(np.uint8))


@pytest.mark.parametrize("form", ["v2.b16", "v4.b16", "v2.b32", "v4.b32", "v2.b64", "v4.b8"])
def test_vector_loads_and_stores(form):
    count, bits = int(form[1]), int(form.split("b")[1])
    registers = ", ".join({8: "%h{}", 16: "%h{}", 32: "%r1{}", 64: "%d1{}"}[bits].format(i) for i in range(count))
    given = np.random.default_rng(0).integers(0, 256, (32, count * bits // 8)).astype(np.uint8)
    out = np.zeros_like(given)
    body = f"""
        mad.wide.u32 %d0, %t, {given.shape[1]}, %p0;
        mad.wide.u32 %d1, %t, {given.shape[1]}, %p1;
        ld.global.{form} {{{registers}}}, [%d0];
        st.global.{form} [%d1], {{{registers}}};
    """
    run(body, given, out)
    assert np.array_equal(out, given)


def test_strided_arrays_are_used_in_place():
    base = np.arange(400, dtype=np.float32).reshape(20, 20)
    view = base[3:13:2, ::-4]
    run("mov.f32 %f0, 0f00000000; st.global.f32 [%p0], %f0; st.global.f32 [%p0+-16], %f0;", view, threads=1)
    assert base[3, 19] == 0 and base[3, 15] == 0 and (base == 0).sum() == 3  # base[0, 0] was 0 before


def test_generic_addresses_reach_every_space():
    out = np.zeros(32, np.uint32)
    body = """
        .local .align 4 .b8 mine[4];
        mov.u64 %d1, words;
        cvta.shared.u64 %d2, %d1;
        mad.wide.u32 %d2, %t, 4, %d2;
        mov.u64 %d3, mine;
        cvta.local.u64 %d4, %d3;
        mad.wide.u32 %d5, %t, 4, %p1;
        and.b32 %r2, %t, 3;
        setp.eq.u32 %q0, %r2, 0;
        setp.eq.u32 %q1, %r2, 1;
        selp.b64 %d6, %d2, %d4, %q0;
        selp.b64 %d6, %d5, %d6, %q1;
        st.u32 [%d6], %t;
        ld.u32 %r1, [%d6];
        isspacep.shared %q2, %d6;
        @%q2 add.u32 %r1, %r1, 100;
        cvta.to.shared.u64 %d7, %d2;
        setp.ne.u64 %q3, %d7, 0;
    """
    other = np.full(32, 77, np.uint32)
    run(body + STORE.format("%r1"), out, other, shared=".shared .align 4 .b8 words[128];")
    assert np.array_equal(out, LANES + 100 * (LANES % 4 == 0))
    assert np.array_equal(other, np.where(LANES % 4 == 1, LANES, 77))


def test_module_variables_and_their_initial_values():
    variables = """
        .const .align 4 .b8 table[16] = {0, 0, 128, 63, 0, 0, 0, 64, 0, 0, 64, 64, 0, 0, 128, 64};
        .global .align 4 .u32 base = 100;
        .global .align 4 .f32 numbers[2] = {0f3F800000, 0f40000000};
    """
    body = """
        and.b32 %r2, %t, 3;
        mov.u64 %d1, table;
        mad.wide.u32 %d1, %r2, 4, %d1;
        ld.const.f32 %f0, [%d1];
        ld.global.f32 %f1, [numbers+4];
        add.f32 %f0, %f0, %f1;
        cvt.rzi.u32.f32 %r1, %f0;
        ld.global.u32 %r3, [base];
        add.u32 %r1, %r1, %r3;
    """
    assert np.array_equal(result(body, variables=variables), 103 + LANES % 4)


def test_modules_have_variables_of_their_own():
    """A variable keeps its value between launches of its module; modules do not share variables of the same name."""
    counting = """
.version 8.0
.target sm_80
.address_size 64
.global .align 4 .u32 count{size} = {first};
.visible .entry k(.param .u64 out)
{{
    .reg .b32 %a; .reg .b64 %d;
    ld.param.u64 %d, [out];
    ld.global.u32 %a, [count+{offset}];
    add.u32 %a, %a, 1;
    st.global.u32 [count+{offset}], %a;
    st.global.u32 [%d], %a;
    ret;
}}
"""
    memory, out, counts = Memory(), np.zeros(1, np.uint32), []
    parameters = struct.pack("Q", memory.add(out, "out"))
    small = counting.format(size="", first="10", offset=0)
    large = counting.format(size="[2]", first="{20, 30}", offset=4)
    for text in (small, large, small, large):
        launch(text, "k", (1, 1, 1), (1, 1, 1), parameters, memory=memory)
        counts.append(int(out[0]))
    assert counts == [11, 31, 12, 32]


def test_parameters_by_value_at_any_address():
    text = """
.version 8.0
.target sm_80
.address_size 64
.visible .entry k(.param .u64 out, .param .align 8 .b8 record[24])
{
    .reg .b32 %t, %a, %b; .reg .b64 %d<4>;
    mov.u32 %t, %tid.x;
    ld.param.u32 %a, [record+4];
    mov.b64 %d0, record;
    mad.wide.u32 %d0, %t, 4, %d0;
    ld.param.u32 %b, [%d0+8];
    add.u32 %a, %a, %b;
    ld.param.u64 %d1, [out];
    mad.wide.u32 %d1, %t, 4, %d1;
    st.global.u32 [%d1], %a;
    ret;
}
"""
    memory, out = Memory(), np.zeros(4, np.uint32)
    parameters = struct.pack("Q6I", memory.add(out, "out"), 0, 50, 1, 2, 3, 4)
    launch(text, "k", (1, 1, 1), (4, 1, 1), parameters, memory=memory)
    assert out.tolist() == [51, 52, 53, 54]
    with pytest.raises(SimulationError, match="32 bytes of parameters, 31 were given"):
        launch(text, "k", (1, 1, 1), (4, 1, 1), parameters[:-1], memory=memory)


def test_unwritten_registers_are_nan():
    assert np.isnan(result("", register="%f9").view(np.float32)).all()


# ---- atomics

ATOMICS = {
    "add.u32": (7, lambda old, x: old + x),
    "min.s32": (-5, min),
    "max.s32": (12, max),
    "and.b32": (0xFFFF, lambda old, x: old & x),
    "or.b32": (0, lambda old, x: old | x),
    "xor.b32": (3, lambda old, x: old ^ x),
    "exch.b32": (1, lambda old, x: x),
    "inc.u32": (30, lambda old, x: 0 if old >= x else old + 1),
    "dec.u32": (2, lambda old, x: x if old == 0 or old > x else old - 1),
}


@pytest.mark.parametrize("space", ["global", "shared"])
@pytest.mark.parametrize("operation", ATOMICS)
def test_atomics_of_a_warp_run_in_lane_order(operation, space):
    start, function = ATOMICS[operation]
    place, out = np.array([start], np.int32), np.zeros(32, np.int32)
    body = f"""
        mov.u32 %r0, word;
        ld.global.b32 %r3, [%p1];
        st.shared.b32 [%r0], %r3;
        bar.warp.sync -1;
        cvt.u64.u32 %d3, %r0;
        atom.{space}.{operation} %r1, [{"%p1" if space == "global" else "%r0"}], %t;
        bar.warp.sync -1;
        ld.shared.b32 %r3, [%r0];
        {"st.global.b32 [%p1], %r3;" if space == "shared" else ""}
    """
    run(body + STORE.format("%r1"), out, place, shared=".shared .align 4 .b8 word[4];")
    value, returned = start, []
    for lane in range(32):
        returned.append(value)
        value = function(value, lane)
    assert out.tolist() == returned and place[0] == value


def test_compare_and_swap():
    place = np.zeros(1, np.uint32)
    body = "add.u32 %r2, %t, 1; atom.global.cas.b32 %r1, [%p1], %t, %r2;"
    out = np.zeros(32, np.uint32)
    run(body + STORE.format("%r1"), out, place)
    assert np.array_equal(out, LANES) and place[0] == 32


@pytest.mark.parametrize("type_, dtype", [("f32", np.float32), ("f64", np.float64)], ids=["f32", "f64"])
def test_float_sums(type_, dtype):
    total = np.zeros(3, dtype)
    size = np.dtype(dtype).itemsize
    value = "%f0" if type_ == "f32" else "%e0"
    body = f"rem.u32 %r1, %t, 3; cvt.rn.{type_}.u32 {value}, %t; mad.wide.u32 %d0, %r1, {size}, %p0;"
    run(body + f"red.global.add.{type_} [%d0], {value};", total, threads=96)
    assert np.array_equal(total, np.arange(96).reshape(32, 3).sum(0))


@pytest.mark.parametrize("count", [2, 4])
def test_vector_sums(count):
    total = np.zeros((2, count), np.float32)
    registers = ", ".join(f"%f{i}" for i in range(count))
    body = "cvt.rn.f32.u32 %f0, %t; and.b32 %r1, %t, 1;"
    body += " ".join(f"add.f32 %f{i}, %f{i - 1}, 0f3F800000;" for i in range(1, count))
    body += f"mad.wide.u32 %d0, %r1, {4 * count}, %p0; red.global.add.v{count}.f32 [%d0], {{{registers}}};"
    run(body, total)
    expected = [[sum(lane + i for lane in range(odd, 32, 2)) for i in range(count)] for odd in (0, 1)]
    assert total.tolist() == expected


def test_random_order_is_repeatable_and_shuffles_atomics():
    def sequence(seed):
        out = np.zeros(64, np.uint32)
        body = "atom.global.add.u32 %r1, [%p1], 1;" + STORE.format("%r1")
        run(body, out, np.zeros(1, np.uint32), threads=64, order="random", seed=seed)
        assert sorted(out) == list(range(64))
        return out.tolist()

    assert sequence(1) == sequence(1) != sequence(2)


# ---- unsupported PTX


def test_unknown_opcode_names_the_line():
    with pytest.raises(
        errors.Unsupported, match=r"unknown opcode 'frobnicate': PTX line \d+: frobnicate.b32 %r0, %r1;"
    ):
        run("frobnicate.b32 %r0, %r1;")


@pytest.mark.parametrize(
    "text",
    ["add.u32 %r0, %nosuch, 1;", "mma.sync.aligned.m16n8k99.row.col.f32.f16.f16.f32 {%f0}, {%r0}, {%r1}, {%f0};",
     "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%r0], [%r1], 16, [%r2];",
     "fence.proxy.alias;", "mul.rz.f64 %e0, %e0, %e0;", "mov.u32 %r0, nowhere;",
     "bra NOWHERE;"],
    ids=["register", "shape", "bulk", "proxy", "rounding", "symbol", "label"],
)  # fmt: skip
def test_unknown_forms_are_refused_with_their_line(text):
    with pytest.raises((errors.Unsupported, errors.PtxError), match="PTX line"):
        run(text)


@pytest.mark.parametrize("text", ["mov.u32 %r0 %r1;", "mov.u32 %r0, `;", ".nonsense 3;"], ids=["comma", "sign", "word"])
def test_text_that_is_not_ptx(text):
    with pytest.raises(errors.SimulationError, match="PTX line"):
        run(text)


def test_unknown_kernel():
    with pytest.raises(SimulationError, match="no kernel 'other' in the PTX, which has"):
        launch(source("", []), "other", (1, 1, 1), (32, 1, 1), b"", memory=Memory())


def test_a_text_is_parsed_once():
    text = source("mov.u32 %r0, 1;", [])
    assert parse(text) is parse(text)


# ---- communication between blocks of attention kernels


def launched(name, *, body=None, **options):
    case = BY_NAME[name]
    out = case.out.copy()
    arrays = [x.copy() for x in case.inputs]
    run(
        body or case.body, *arrays, out, threads=case.threads, blocks=case.blocks, dynamic=case.dynamic,
        **(case.options | options),
    )  # fmt: skip
    return case, out


@pytest.mark.parametrize("order", ["early", "late", "random"])
def test_blocks_that_take_turns_add_in_their_order(order):
    case, out = launched("turns", order=order)
    total = np.zeros(128, np.float32)
    for numbers in case.inputs[0]:
        total += numbers
    assert np.array_equal(out, total) and not np.array_equal(out, case.inputs[0][::-1].cumsum(0)[-1])


def test_blocks_start_in_any_order():
    """order="random" shuffles the start of clusters by the seed.

    Each block starts once, and records the number that it draws from a counter; only one cluster is resident at a time.
    """
    body = """
        atom.global.add.u32 %r0, [%p0], 1;
        mad.wide.u32 %d0, %block, 4, %p1;
        st.global.b32 [%d0], %r0;
    """
    starts = []
    for options in (dict(order="late"), *(dict(order="random", seed=seed) for seed in (0, 1, 1))):
        drawn = np.zeros(16, np.uint32)
        options |= dict(threads=1, blocks=16, directives=".reqnctapercluster 2", resident_lanes=64)
        run(body, np.zeros(1, np.uint32), drawn, **options)
        starts.append((drawn // 2).reshape(8, 2))
        assert (starts[-1][:, 0] == starts[-1][:, 1]).all() and set(starts[-1][:, 0]) == set(range(8))
    assert np.array_equal(starts[0][:, 0], np.arange(8)) and np.array_equal(starts[2], starts[3])
    assert not np.array_equal(starts[0], starts[1]) and not np.array_equal(starts[1], starts[2])


def test_turns_require_blocks_to_start_in_order():
    """If block n waits for block n - 1, blocks must start in the order of their index unless all are resident."""
    case, out = launched("turns", resident_lanes=32 * 32)
    assert np.array_equal(out, case.inputs[0].cumsum(0)[-1])
    with pytest.raises(errors.Deadlock, match="no end after 2000 basic blocks"):
        launched("turns", order="random", resident_lanes=32 * 32, most_basic_blocks=2000)


SPIN = """
    setp.ne.u32 %q0, %block, 0;
    @%q0 bra WRITER;
SPIN:
    bar.sync 0;
    ld.relaxed.gpu.global.b32 %r0, [%p0];
    setp.eq.u32 %q1, %r0, 0;
    @%q1 bra SPIN;
    exit;
WRITER:
    {}
"""


@pytest.mark.parametrize("order", ["late", "random"])
def test_a_loop_with_a_barrier_does_not_starve_a_later_block(order):
    """The spinning group is at the lowest instruction, and each of its turns ends at the barrier."""
    writer = "mov.u32 %r1, 1; bar.sync 0; st.relaxed.gpu.global.b32 [%p0], %r1;"
    run(SPIN.format(writer), np.zeros(1, np.uint32), threads=64, blocks=2, order=order, most_basic_blocks=5000)
    with pytest.raises(errors.Deadlock, match="no end after 300 basic blocks"):
        run(SPIN.format(""), np.zeros(1, np.uint32), threads=64, blocks=2, order=order, most_basic_blocks=300)


def test_a_turn_released_before_all_lanes_have_added():
    body = BY_NAME["turns"].body
    before, after = body.rsplit("bar.warp.sync -1;", 1)
    with pytest.raises(errors.Race, match="release without a __syncwarp after the write of lane 1"):
        launched("turns", body=before + after)


@pytest.mark.parametrize("order", ["early", "late", "random"])
def test_warps_that_take_turns(order):
    _, out = launched("barriers", order=order)
    x, expected = 1, np.zeros(64, np.uint32)
    for turn in range(16):
        x = 3 * x + turn % 2
        expected[32 * (turn % 2) :] = x
    expected[:32] = (x - 1) // 3
    assert np.array_equal(out, expected)


@pytest.mark.parametrize("order", ["early", "late", "random"])
def test_sums_in_global_memory_flush_subnormals(order):
    """PTX ISA, atom, red and cp.reduce.async.bulk: sums in global memory flush subnormals, sums in shared memory do
    not.
    """
    case, out = launched("subnormals.add", order=order)
    old, new = case.out[0], case.inputs[0]

    def flushed(x):
        return np.where(np.abs(x) < 2.0**-126, np.copysign(np.float32(0), x), x)

    in_global, in_shared = flushed(flushed(old) + flushed(new)), old + new
    assert (in_global != in_shared).sum() > 8 and np.signbit(in_global[in_global == 0]).any()
    expected = np.stack([in_global, in_global, in_global, in_shared, in_global])
    assert np.array_equal(out.view(np.uint32), expected.view(np.uint32))


def test_every_sum_flushes_subnormals():
    """Lanes add to one word: partial sums are flushed too, whereas without flushing the result would not be 0."""
    numbers = np.tile(np.array([1.5, -1.0, 1.0, -1.0], np.float32) * np.float32(2.0**-126), 8)
    body = "mad.wide.u32 %d0, %t, 4, %p0; ld.global.f32 %f0, [%d0]; red.global.add.f32 [%p1], %f0;"
    out = np.zeros(1, np.float32)
    run(body, numbers, out)
    # The first two of every four addends have a subnormal sum, which is flushed to zero; the others sum to zero.
    assert out[0] == 0 and np.cumsum(numbers)[-1] == 4 * np.float32(2.0**-126)


def test_powers_of_two_flush_subnormals():
    case, out = launched("subnormals.ex2")
    lower = -(95 + 2 * np.arange(32))
    assert np.array_equal(out, (lower < -126) + 2 * (lower[::-1] < -126))


def test_the_largest_dynamic_shared_memory():
    assert launched("dynamic")[1].tolist() == [0, 7] and DYNAMIC_BYTES == 232448


@pytest.mark.parametrize(
    ("target", "limit"), [("sm_75", 64), ("sm_80", 163), ("sm_89", 99), ("sm_90a", 227), ("sm_120a", 99)]
)
def test_shared_memory_beyond_the_limit_of_a_block(target, limit):
    static = ".shared .align 16 .b8 words[1024];"
    most = (limit - 1) * 1024
    run("", shared=static, dynamic=most, target=target)
    with pytest.raises(errors.LaunchRefused, match=f"needs {limit * 1024 + 16} bytes of shared memory"):
        run("", shared=static, dynamic=most + 16, target=target)


def test_unknown_target():
    with pytest.raises(errors.Unsupported, match="target 'sm_60' are not known, only those of sm_75, "):
        run("", target="sm_60")


@pytest.mark.parametrize(
    ("threads", "directives", "words"),
    [
        (1056, "", r"1056 threads \(a block has at most 1024\)"),
        (160, ".maxntid 128, 1, 1", r"160 threads \(\.maxntid is 128\)"),
        (384, ".maxnreg 240", r"92160 registers \(an SM has 65536\)"),
    ],
    ids=["threads", "bounds", "registers"],
)
def test_launches_beyond_the_limits_of_a_block(threads, directives, words):
    with pytest.raises(errors.LaunchRefused, match=words):
        run("", threads=threads, directives=directives)


@pytest.mark.parametrize("count", [1, 2, 4])
def test_vector_of_a_parameter(count):
    """The compiler copies a struct parameter that is not __grid_constant__ with such loads."""
    registers = ", ".join(f"%r{i}" for i in range(count))
    vector, operand = (f".v{count}", f"{{{registers}}}") if count > 1 else ("", registers)
    stores = " ".join(f"st.global.b32 [%p0+{4 * i}], %r{i};" for i in range(count))
    out, map_ = np.zeros(count, np.uint32), tensor("u8", (64, 5, 3), (64, 1, 1))
    run(f"ld.param{vector}.b32 {operand}, [map0+64]; {stores}", out, maps=((0, map_),))
    assert np.array_equal(out, np.frombuffer(encode_for_simulator(map_(0)), np.uint32)[16 : 16 + count])
    assert out.any()


# ---- the memory of the simulator itself


def test_a_launch_leaves_no_cycles_of_references(monkeypatch):
    contexts = []

    class Watched(Context):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            contexts.append(weakref.ref(self))

    monkeypatch.setattr("cupy_flash.simulator.machine.launch.Context", Watched)
    gc.disable()
    try:
        result("mov.u32 %r1, %t; bar.sync 0;", 64)
        assert [context() for context in contexts] == [None]
    finally:
        gc.enable()
