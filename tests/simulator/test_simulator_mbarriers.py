"""mbarriers: phases, parities, states, the order that a wait establishes, and each kind of misuse."""

import numpy as np
import pytest
from micro import run

from cupy_flash.measure.checks.hopper import BY_NAME
from cupy_flash.measure.checks.hopper.case import initialise, wait
from cupy_flash.simulator import errors

ORDERS = ["early", "late", "random"]
SHARED = ".shared .align 1024 .b8 smem[4096]; .shared .align 8 .b8 bars[64];"


def micro(body, *arrays, threads=64, **options):
    return run(body, *arrays, threads=threads, shared=SHARED, **options)


def result(name, **options):
    case = BY_NAME[name]
    out = case.out.copy()
    run(case.body, out, threads=case.threads, blocks=case.blocks, **(case.options | options))
    return out


@pytest.mark.parametrize("order", ORDERS)
def test_parity_is_that_of_the_last_completed_phase(order):
    """A phase takes two arrivals: before the first phase completes, a wait for parity 1 returns and one for parity 0
    blocks.
    """
    out = result("mbarrier.parity", order=order)
    # Row i is the result after i arrivals; every second arrival completes a phase.
    passed = [[0, 1], [0, 1], [1, 0], [1, 0], [0, 1], [0, 1]]
    assert out.tolist() == passed


@pytest.mark.parametrize("order", ORDERS)
def test_state_names_the_phase_of_an_arrival(order):
    assert result("mbarrier.state", order=order)[:3].tolist() == [1, 0, 1]


def test_one_lane_is_elected():
    for seed in range(4):
        assert (result("elect", order="random", seed=seed) == 1).all()


def test_elected_lane_depends_on_the_seed_alone():
    body = """
        setp.lt.u32 %q1, %t, 7;
        @%q1 exit;
        elect.sync %r0|%q0, 0xffffff80;
        elect.sync %r1|%q0, 0xffffff80;
        mad.wide.u32 %d0, %t, 8, %p0;
        st.global.b32 [%d0], %r0;
        st.global.b32 [%d0+4], %r1;
    """
    elected = []
    for seed in range(4):
        out = np.zeros((32, 2), np.uint32)
        micro(body, out, threads=32, order="random", seed=seed)
        elected.append(out[7, 0])
        assert (out[7:] == elected[-1]).all() and 7 <= elected[-1] < 32
    assert len(set(elected)) > 1
    micro(body, out, threads=32)
    assert (out[7:] == 7).all()


@pytest.mark.parametrize("count", [16, 257, 100], ids=["few", "many", "odd"])
def test_impossible_register_counts(count):
    with pytest.raises(errors.Unsupported):
        micro(f"setmaxnreg.dec.sync.aligned.u32 {count};", threads=128)


# Warp 0 writes and arrives; warp 1 waits and reads.
EXCHANGE = f"""
    {initialise()}
    mov.u32 %r60, smem;
    setp.ge.u32 %q0, %t, 32;
    mad.lo.u32 %r61, %t, 4, %r60;
    @%q0 bra READER;
    st.shared.b32 [%r61], %t;
    bar.warp.sync -1;
    @%q6 mbarrier.arrive.shared::cta.b64 _, [%r50];
    exit;
READER:
    {wait()}
    ld.shared.b32 %r0, [%r61+-128];
    mad.wide.u32 %d0, %t, 4, %p0;
    st.global.b32 [%d0], %r0;
"""


@pytest.mark.parametrize("order", ORDERS)
def test_a_wait_orders_after_accesses_before_the_arrival(order):
    out = np.zeros(64, np.uint32)
    micro(EXCHANGE, out, order=order)
    assert np.array_equal(out[32:], np.arange(32))


def test_read_without_the_wait():
    for seed in range(4):
        with pytest.raises((errors.Race, errors.Uninitialised)):
            micro(EXCHANGE.replace(wait(), ""), np.zeros(64, np.uint32), order="random", seed=seed)


def test_an_arrival_publishes_one_lane_only():
    with pytest.raises(errors.Race):
        micro(EXCHANGE.replace("bar.warp.sync -1;", ""), np.zeros(64, np.uint32))
    every_lane = EXCHANGE.replace("bar.warp.sync -1;", "").replace("@%q6 mbarrier.arrive", "mbarrier.arrive")
    out = np.zeros(64, np.uint32)
    every_lane = every_lane.replace("[%r50], 1;", "[%r50], 32;")
    micro(every_lane, out)
    assert np.array_equal(out[32:], np.arange(32))
    arrival = "mbarrier.arrive.shared::cta.b64 _, [%r50];"
    one_half_first = f"setp.lt.u32 %q2, %t, 16; @%q2 {arrival} @!%q2 {arrival}"
    micro(every_lane.replace(arrival, one_half_first), out)
    assert np.array_equal(out[32:], np.arange(32))


def test_written_after_the_arrival():
    late = EXCHANGE.replace("exit;\nREADER", "st.shared.b32 [%r61], 0; exit;\nREADER")
    with pytest.raises(errors.Race):
        micro(late, np.zeros(64, np.uint32))


def test_relaxed_arrival_orders_nothing():
    body = EXCHANGE.replace("mbarrier.arrive.shared", "mbarrier.arrive.relaxed.cta.shared")
    with pytest.raises(errors.Race):
        micro(body, np.zeros(64, np.uint32))


RING = f"""
    {initialise()}
    @%q6 mbarrier.init.shared::cta.b64 [%r50+8], 32;
    bar.sync 0;
    mov.u32 %r60, smem;
    mov.u32 %r10, 0;
    setp.ge.u32 %q0, %t, 32;
    and.b32 %r20, %t, 31;
    mad.lo.u32 %r61, %r20, 4, %r60;
    @%q0 bra CONSUMER;
PRODUCER:
    and.b32 %r11, %r10, 1;
    xor.b32 %r12, %r11, 1;
EMPTY:
    mbarrier.try_wait.parity.shared::cta.b64 %q1, [%r50+8], %r12;
    @!%q1 bra EMPTY;
    add.u32 %r13, %r10, %t;
    st.shared.b32 [%r61], %r13;
    bar.warp.sync -1;
    @%q6 mbarrier.arrive.shared::cta.b64 _, [%r50];
    add.u32 %r10, %r10, 1;
    setp.lt.u32 %q2, %r10, 5;
    @%q2 bra PRODUCER;
    exit;
CONSUMER:
    and.b32 %r11, %r10, 1;
FULL:
    mbarrier.try_wait.parity.shared::cta.b64 %q1, [%r50], %r11;
    @!%q1 bra FULL;
    ld.shared.b32 %r0, [%r61];
    mad.lo.u32 %r14, %r10, 32, %r20;
    mad.wide.u32 %d0, %r14, 4, %p0;
    st.global.b32 [%d0], %r0;
    mbarrier.arrive.shared::cta.b64 _, [%r50+8];
    add.u32 %r10, %r10, 1;
    setp.lt.u32 %q2, %r10, 5;
    @%q2 bra CONSUMER;
"""


@pytest.mark.parametrize("order", ORDERS)
def test_producer_and_consumer_in_turns(order):
    out = np.zeros((5, 32), np.uint32)
    for seed in range(3):
        micro(RING, out, order=order, seed=seed, blocks=2)
        assert np.array_equal(out, np.arange(5)[:, None] + np.arange(32))


def test_deadlock_names_warps_and_mbarriers():
    swapped = RING.replace("xor.b32 %r12, %r11, 1;", "mov.b32 %r12, %r11;")
    with pytest.raises(errors.Deadlock) as caught:
        micro(swapped, np.zeros((5, 32), np.uint32))
    message = str(caught.value)
    assert "warps [0] wait for parity 0 of the mbarrier at shared byte" in message and "32 of 32 arrivals" in message
    assert "warps [1] wait for parity 0" in message and "1 of 1 arrivals pending" in message
    assert "mbarrier.try_wait.parity.shared::cta.b64 %q1, [%r50+8], %r12;" in message


def test_consumer_that_releases_too_early():
    early = RING.replace("mbarrier.arrive.shared::cta.b64 _, [%r50+8];", "")
    early = early.replace("    ld.shared.b32 %r0", "    mbarrier.arrive.shared::cta.b64 _, [%r50+8]; ld.shared.b32 %r0")
    detected = 0
    for seed in range(8):
        try:
            micro(early, np.zeros((5, 32), np.uint32), order="random", seed=seed)
        except errors.Race:
            detected += 1
    assert detected


def test_a_wait_that_times_out_returns_false():
    """One lane waits before it arrives itself, so its first try_wait must return false."""
    body = f"""
        {initialise()}
        @!%q6 exit;
        mbarrier.try_wait.parity.shared::cta.b64 %q0, [%r50], 0;
        selp.b32 %r0, 1, 0, %q0;
        mbarrier.arrive.shared::cta.b64 _, [%r50];
        {wait()}
        st.global.b32 [%p0], %r0;
    """
    out = np.ones(1, np.uint32)
    micro(body, out)
    assert out[0] == 0


def test_wait_may_time_out():
    """A try_wait that is not in a loop returns false for some seeds; in a loop it waits."""
    once = EXCHANGE.replace("@!%q5 bra WAIT;", "")
    assert once != EXCHANGE
    detected = 0
    for seed in range(24):
        out = np.zeros(64, np.uint32)
        micro(EXCHANGE, out, order="random", seed=seed)
        assert np.array_equal(out[32:], np.arange(32))
        try:
            micro(once, out, order="random", seed=seed)
        except (errors.Race, errors.Uninitialised):
            detected += 1
    assert 0 < detected < 24


def test_lanes_whose_predicate_is_false_do_not_wait():
    body = f"""
        {initialise()}
        mov.b32 %r0, 0;
        setp.lt.u32 %q0, %t, 32;
    LOOK:
        @%q0 mbarrier.try_wait.parity.shared::cta.b64 %q1, [%r50], 0;
        @%q6 mbarrier.arrive.shared::cta.b64 _, [%r50];
        mad.wide.u32 %d0, %t, 4, %p0;
        st.global.b32 [%d0], %t;
    """
    out = np.zeros(64, np.uint32)
    micro(body.replace("@%q6", "@!%q0 setp.eq.u32 %q6, %t, 32; @%q6"), out)
    assert np.array_equal(out, np.arange(64))


def test_more_arrivals_than_a_phase_has():
    with pytest.raises(errors.BarrierMisuse, match="more than the 1 arrivals"):
        micro(EXCHANGE.replace("@%q6 mbarrier.arrive", "mbarrier.arrive"), np.zeros(64, np.uint32))


def test_use_without_a_barrier_after_the_initialisation():
    body = EXCHANGE.replace("bar.sync 0;", "")
    with pytest.raises(errors.SimulationError, match=r"no mbarrier\.init|without a barrier after its mbarrier\.init"):
        micro(body, np.zeros(64, np.uint32))


# The mbarrier of EXCHANGE is invalidated, its bytes serve as ordinary memory, and it is initialised again.
INVAL = "@%q6 mbarrier.inval.shared::cta.b64 [%r50];"
LIVES = f"""
    {initialise()}
    @%q6 mbarrier.arrive.shared::cta.b64 _, [%r50];
    {wait()}
    bar.sync 0;
    {INVAL}
    @%q6 st.shared.b64 [%r50], 77;
    bar.sync 0;
    ld.shared.b64 %d1, [%r50];
    bar.sync 0;
    {initialise(2)}
    setp.eq.u32 %q4, %t, 32;
    @%q6 mbarrier.arrive.shared::cta.b64 _, [%r50];
    @%q4 mbarrier.arrive.shared::cta.b64 _, [%r50];
    {wait(0, "AGAIN")}
    mad.wide.u32 %d0, %t, 8, %p0;
    st.global.b64 [%d0], %d1;
"""


@pytest.mark.parametrize("order", ORDERS)
def test_invalidated_mbarrier_is_ordinary_memory_and_may_be_initialised_again(order):
    out = np.zeros(64, np.uint64)
    micro(LIVES, out, order=order)
    assert (out == 77).all()


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    ("use", "error", "words"),
    [
        ("@%q6 mbarrier.arrive.shared::cta.b64 _, [%r50];", errors.Uninitialised, r"since its mbarrier\.inval"),
        (
            "mbarrier.try_wait.parity.shared::cta.b64 %q5, [%r50], 0;",
            errors.Uninitialised,
            r"since its mbarrier\.inval",
        ),
        (INVAL, errors.Uninitialised, r"since its mbarrier\.inval"),
        ("@%q6 ld.shared.b64 %d1, [%r50];", errors.Uninitialised, "read of shared byte"),
        ("ld.shared.b64 %d1, [%r50];", errors.Race, "write, then read .* without a __syncwarp"),
    ],
    ids=["arrive", "wait", "inval", "read", "race"],
)
def test_use_after_the_mbarrier_is_invalidated(use, error, words, order):
    with pytest.raises(error, match=words):
        micro(initialise() + INVAL + use, order=order, threads=32)


@pytest.mark.parametrize("order", ["early", "late"])
def test_mbarrier_overwritten_while_another_warp_may_use_it(order):
    """All warps wait for the phase, but without the barrier warp 0 does not know that warp 1 has."""
    life = LIVES[: LIVES.index(INVAL)]
    for again in INVAL, "@%q6 mbarrier.init.shared::cta.b64 [%r50], 1;":
        micro(life + again, order=order)
        with pytest.raises(errors.Race, match="overwritten without a barrier after its last use"):
            micro(life[: life.rindex("bar.sync 0;")] + again, order=order)


def test_an_arrival_of_the_first_life_publishes_nothing_in_the_second():
    """Lane 1 arrives only in the mbarrier's first life, so the arrival of lane 0 does not publish its later write."""
    exchange = EXCHANGE.replace("bar.warp.sync -1;", "").replace("st.shared", "@%q3 st.shared")
    body = f"""
        {initialise(2)}
        setp.eq.u32 %q3, %t, 1;
        @%q3 mbarrier.arrive.shared::cta.b64 _, [%r50];
        bar.sync 0;
        {INVAL}
        {exchange.replace("%r61+-128", "%r60+4")}
    """
    with pytest.raises(errors.Race, match="write, then read"):
        micro(body, np.zeros(64, np.uint32))
    micro(body.replace("@%q3 st.shared", "@%q6 st.shared").replace("%r60+4", "%r60"), np.zeros(64, np.uint32))


TWO_COPIES = f"""
    {initialise()}
    mov.u32 %r60, smem;
    @%q6 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r50], 16;
    @%q6 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r60], [%p0], 16, [%r50];
    {{first}}
    bar.sync 0;
    {INVAL}
    {initialise()}
    @%q6 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r50], 16;
    @%q6 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r60+16], [%p0], 16, [%r50];
    {{second}}
    ld.shared.b32 %r0, [%r60+16];
    {wait(0, "LAST")}
"""


@pytest.mark.parametrize("order", ORDERS)
def test_copies_that_signal_both_lives_of_an_mbarrier(order):
    """A wait for the first phase of an mbarrier's first life is no wait for the first phase of its second life."""
    numbers = np.arange(4, dtype=np.uint32)
    both = TWO_COPIES.format(first=wait(0, "ONE"), second=wait(0, "TWO"))
    micro(both, numbers, order=order)
    with pytest.raises(errors.PendingCopy, match="without a wait for the instruction that fills it"):
        micro(TWO_COPIES.format(first=wait(0, "ONE"), second=""), numbers, order=order)
    with pytest.raises(errors.SimulationError, match="or a wait for a bulk copy that signals it|too few bytes"):
        micro(TWO_COPIES.format(first="", second=wait(0, "TWO")), numbers, order=order)


@pytest.mark.parametrize(
    ("text", "error", "words"),
    [
        ("mbarrier.arrive.shared::cta.b64 _, [%r50+8];", errors.Uninitialised, r"no mbarrier\.init of shared byte"),
        ("mbarrier.arrive.shared::cta.b64 _, [%r50+4];", errors.Misaligned, "not aligned to 8 bytes"),
        ("mbarrier.arrive.shared::cta.b64 _, [%r50+65536];", errors.OutOfBounds, "outside the block's shared memory"),
        ("@%q6 mbarrier.init.shared::cta.b64 [%r50+8], 0;", errors.BarrierMisuse, "a count of 0"),
    ],
    ids=["none", "misaligned", "outside", "count"],
)
def test_invalid_mbarrier(text, error, words):
    with pytest.raises(error, match=words):
        micro(initialise() + text)
