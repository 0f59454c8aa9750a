"""Clusters of two blocks: cluster barrier, remote mbarrier arrivals, multicast copies; and each kind of misuse."""

import numpy as np
import pytest
from micro import run

from cupy_flash.measure.checks.hopper import BY_NAME
from cupy_flash.measure.checks.hopper.case import PAIR, initialise, wait
from cupy_flash.simulator import SimulationError, errors

ORDERS = ["early", "late", "random"]
MULTICAST, REMOTE, LOAD = (BY_NAME[f"cluster.{name}"] for name in ("multicast", "remote", "load"))


def result(case, body=None, *, blocks=2, **options):
    out = np.zeros(len(case.out) * blocks // 2, case.out.dtype)
    run(body or case.body, *case.inputs, out, threads=128, blocks=blocks, maps=case.maps, **(case.options | options))
    return out


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("clusters", [1, 3])
def test_arrival_at_the_other_blocks_mbarrier(clusters, order):
    out = result(REMOTE, blocks=2 * clusters, order=order).reshape(clusters, 2, 128)
    assert (out[:, 0] == 2 * 16).all() and (out[:, 1] == 2 * 16 + 1).all()


@pytest.mark.parametrize("order", ORDERS)
def test_multicast_reaches_both_blocks(order):
    case = BY_NAME["cluster.multicast"]
    rows = case.inputs[0].reshape(2, 32, 8, 16)[1]
    # The 16-byte chunks of the box's 128-byte rows are swizzled by the row index.
    expected = np.stack([rows[i, np.arange(8) ^ i % 8] for i in range(32)]).reshape(-1)
    out = result(case, order=order).reshape(2, -1)
    assert np.array_equal(out[0], expected) and np.array_equal(out[1], expected)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("clusters", [1, 3])
def test_loads_from_the_other_block(clusters, order):
    out = result(LOAD, blocks=2 * clusters, order=order).reshape(clusters, 2, 128)
    assert np.array_equal(out, np.arange(256 * clusters).reshape(clusters, 2, 128)[:, ::-1, ::-1])


BARRIER = """barrier.cluster.arrive.release.aligned;
    barrier.cluster.wait.acquire.aligned;"""


def test_copy_to_a_block_whose_mbarrier_is_not_ready():
    first = MULTICAST.body.index("barrier.cluster.arrive")
    last = MULTICAST.body.index("barrier.cluster.wait.acquire;") + len("barrier.cluster.wait.acquire;")
    with pytest.raises(errors.SimulationError, match=r"without a barrier after its mbarrier\.init|no mbarrier\.init"):
        result(MULTICAST, MULTICAST.body[:first] + MULTICAST.body[last:])


RELAXED = """barrier.cluster.arrive.relaxed.aligned;
    barrier.cluster.wait.acquire.aligned;"""
INIT = "@%q6 mbarrier.init.shared::cta.b64"
FENCE = "@%q6 fence.mbarrier_init.release.cluster;"


def with_first_barrier(case, barrier):
    """Return the kernel with other instructions in place of its first cluster barrier."""
    first, last = case.body.index("barrier.cluster.arrive"), case.body.index("barrier.cluster.wait")
    return case.body[:first] + barrier + case.body[case.body.index(";", last) + 1 :]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("case", [REMOTE, MULTICAST], ids=["remote", "multicast"])
def test_a_relaxed_barrier_after_the_fence_of_the_initialisation(case, order):
    """CUTLASS: fence_barrier_init, cluster_arrive_relaxed, cluster_wait."""
    body = with_first_barrier(case, RELAXED)
    assert np.array_equal(result(case, body, order=order), result(case))
    init = body[body.index(INIT) : body.index(";", body.index(INIT)) + 1]
    assert body.count(FENCE) == 1
    for planted in (
        body.replace(FENCE, ""),
        body.replace(FENCE, FENCE.replace("@%q6", "@!%q6")),  # a thread other than the initialising one executes it
        body.replace(FENCE, "").replace(init, init.replace("%r50", "%r50+8") + FENCE + init),
        body.replace(FENCE, "").replace(RELAXED, RELAXED + FENCE),
        body.replace(FENCE, "@%q6 fence.proxy.async;"),  # orders copies only, and releases nothing
    ):
        with pytest.raises(errors.Race, match=r"without a barrier after its mbarrier\.init"):
            result(case, planted, order=order)


@pytest.mark.parametrize(
    ("fence", "publishes"),
    [
        *((fence, True) for fence in ("fence.acq_rel.cluster;", "fence.release.gpu;", "fence.sc.sys;", "membar.gl;")),
        *((fence, False) for fence in ("fence.acq_rel.cta;", "fence.acquire.cluster;", "membar.cta;", initialise())),
        ("setp.eq.u32 %q0, %t, 0; @%q0 fence.acq_rel.cluster;", False),
    ],
)
def test_a_relaxed_barrier_publishes_what_a_release_fence_has(fence, publishes):
    """A fence of wide enough scope publishes the accesses before it, fence.mbarrier_init only the initialisations."""
    body = with_first_barrier(LOAD, fence + RELAXED)
    if publishes:
        assert np.array_equal(result(LOAD, body), result(LOAD))
        store = "st.shared.b32 [%r3], %r4;"
        body = body.replace(store, "").replace(RELAXED, store + RELAXED)
    with pytest.raises(errors.Race, match="write, then read"):
        result(LOAD, body)


def test_expect_tx_of_one_block_is_too_small():
    amount = "setp.eq.u32 %q0, %block, 0; selp.b32 %r40, 4096, 2048, %q0; @%q6 mbarrier.arrive.expect_tx"
    body = MULTICAST.body.replace("@%q6 mbarrier.arrive.expect_tx", amount).replace("[%r50], 4096;", "[%r50], %r40;")
    with pytest.raises(errors.Deadlock, match=r"block 1: warps \[0, 1, 2, 3\] wait for .* 2048 bytes too many"):
        result(MULTICAST, body)


def test_copy_over_bytes_that_the_other_block_still_reads():
    again = """
        @%q6 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r50], 4096;
        MEET
        mov.u32 %r60, smem;
        mad.lo.u32 %r60, %r0, 2048, %r60;
        @%q6 cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster \
[%r60], [%m0, {%r1, %r3, %r2, %r1}], [%r50], %h0;
    """
    end = MULTICAST.body.rindex("barrier.cluster.arrive")
    body = MULTICAST.body[:end] + again + wait(1, "AGAIN") + MULTICAST.body[end:]
    result(MULTICAST, body.replace("MEET", BARRIER))
    with pytest.raises((errors.Race, errors.PendingCopy), match="then asynchronous write"):
        result(MULTICAST, body.replace("MEET", "bar.sync 0;"))


def without_the_last_barrier(case):
    """Return the kernel without the barrier that keeps a block alive while the other one uses its shared memory."""
    return case.body[: case.body.rindex("barrier.cluster.arrive")]


@pytest.mark.parametrize("order", ORDERS)
def test_exit_before_the_other_block_has_arrived(order):
    """Each block waits for both arrivals at its own mbarrier, so that the last cluster barrier is unnecessary."""
    body = without_the_last_barrier(REMOTE)
    assert np.array_equal(result(REMOTE, body, order=order), result(REMOTE))
    with pytest.raises(errors.EarlyExit, match="exit"):
        result(REMOTE, body.replace(wait(), ""), order=order)
    # A cluster barrier without .release orders no accesses, but it does follow the arrivals.
    barrier = "barrier.cluster.arrive.relaxed.aligned; barrier.cluster.wait.aligned;"
    result(REMOTE, body.replace(wait(), barrier), order=order)


@pytest.mark.parametrize("order", ORDERS)
def test_exit_after_the_wait_of_one_lane(order):
    """One lane's wait for both arrivals suffices to keep its block alive; the other lanes skip the wait."""
    body = without_the_last_barrier(REMOTE)
    body = body.replace(wait(), f"@!%q6 bra DONE; {wait()} DONE:")
    assert np.array_equal(result(REMOTE, body, order=order), result(REMOTE))


@pytest.mark.parametrize("order", ORDERS)
def test_load_that_no_barrier_orders_after_the_store(order):
    """A barrier of each block orders nothing between blocks, nor does a relaxed cluster barrier order memory."""
    first, load = LOAD.body.index("barrier.cluster.arrive"), LOAD.body.index("sub.u32 %r5")
    last = LOAD.body.rindex("barrier.cluster.arrive")
    again = "mad.lo.u32 %r3, %t, 4, %r2; setp.eq.u32 %q1, %r0, 0; @%q1 st.shared.b32 [%r3], %r4;"
    relaxed = "barrier.cluster.arrive.relaxed; barrier.cluster.wait; bar.sync 0;"
    for barrier, before, after in (
        ("bar.sync 0;", "write, then read|is uninitialised|read, then write", "read, then write|write, then read"),
        (relaxed, "write, then read", "read, then write"),
    ):
        with pytest.raises(errors.SimulationError, match=before):
            result(LOAD, LOAD.body[:first] + barrier + LOAD.body[load:], order=order)
        with pytest.raises(errors.Race, match=after):
            result(LOAD, LOAD.body[:last] + barrier + again + LOAD.body[last:], order=order)
    assert np.array_equal(result(LOAD, LOAD.body + again, order=order), result(LOAD))


@pytest.mark.parametrize("order", ORDERS)
def test_exit_before_the_other_block_has_loaded(order):
    with pytest.raises(errors.EarlyExit, match="reads its shared memory|has exited"):
        result(LOAD, without_the_last_barrier(LOAD), order=order)


@pytest.mark.parametrize("order", ORDERS)
def test_exit_before_the_copy_of_the_other_block_has_landed(order):
    body = without_the_last_barrier(MULTICAST)
    assert np.array_equal(result(MULTICAST, body, order=order), result(MULTICAST))
    assert MULTICAST.body.count(wait()) == 1
    with pytest.raises(errors.SimulationError, match="ends before its bulk copy completes|has exited"):
        result(MULTICAST, body[: body.index(wait())], order=order)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("what", ["arrives", "copies"])
def test_use_of_a_block_that_has_exited(what, order):
    """The second block arrives or copies after the first one has exited."""
    case = REMOTE if what == "arrives" else MULTICAST
    first = case.body.index("barrier.cluster.wait") + len("barrier.cluster.wait.acquire")
    first = case.body.index(";", first) + 1
    leaves = "mov.u32 %r30, %cluster_ctarank; setp.eq.u32 %q3, %r30, 0; @%q3 exit;"
    with pytest.raises(errors.EarlyExit, match="block 0 has exited, and its shared memory is accessed"):
        result(case, case.body[:first] + leaves + BARRIER + case.body[first:], order=order)


def test_deadlock_at_the_cluster_barrier_names_the_missing_warps():
    body = f"setp.eq.u32 %q0, %block, 0; @%q0 bra MEET; bar.sync 1, 256; MEET: {BARRIER}"
    with pytest.raises(errors.Deadlock, match=r"wait at the cluster barrier for warp 0 of block 1, warp 1 of block 1"):
        run(body, threads=64, **PAIR)


def test_the_cluster_barrier_does_not_wait_for_exited_blocks():
    run(f"setp.eq.u32 %q0, %block, 0; @%q0 exit; {BARRIER}", threads=64, **PAIR)


@pytest.mark.parametrize(
    "text", ["barrier.cluster.arrive.aligned; barrier.cluster.arrive.aligned;", "barrier.cluster.wait.aligned;"],
    ids=["twice", "never"],
)  # fmt: skip
def test_arrivals_and_waits_must_alternate(text):
    with pytest.raises(errors.BarrierMisuse, match="cluster barrier"):
        run(text, threads=64, **PAIR)


def test_rank_outside_the_cluster():
    for case in REMOTE, LOAD:
        body = case.body.replace("xor.b32 %r1, %r0, 1;", "mov.b32 %r1, 2;")
        with pytest.raises(errors.OutOfBounds, match="no block of the cluster"):
            result(case, body)


def test_store_to_the_other_block_is_not_simulated():
    with pytest.raises(errors.Unsupported, match="this form of st is not simulated"):
        result(LOAD, LOAD.body.replace("ld.shared::cluster.f32 %f0, [%r3]", "st.shared::cluster.f32 [%r3], %f0"))


def test_multicast_to_a_block_outside_the_cluster():
    with pytest.raises(errors.OutOfBounds, match="multicast"):
        result(MULTICAST, MULTICAST.body.replace("mov.b16 %h0, 3;", "mov.b16 %h0, 5;"))


def test_grid_that_clusters_do_not_fill():
    with pytest.raises(SimulationError, match="do not fill a grid"):
        run(BARRIER, threads=32, blocks=3, directives=".reqnctapercluster 2")
