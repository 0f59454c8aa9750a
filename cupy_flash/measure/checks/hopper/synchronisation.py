"""Micro-kernels of synchronisation: ordered blocks, named barriers, mbarriers, clusters, elect and setmaxnreg."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from .case import PAIR, HopperCase, initialise, wait

# The blocks add to the same four numbers of each lane in block order, because the order decides how sums round.
TURNS_BODY = """
    mov.u32 %r9, %nctaid.x;
    mad.wide.u32 %d0, %t, 16, %p2;
    mad.lo.u32 %r0, %block, 32, %t;
    mad.wide.u32 %d1, %r0, 16, %p0;
    ld.global.v4.f32 {%f0, %f1, %f2, %f3}, [%d1];
    setp.ne.u32 %q0, %t, 0;
    @%q0 bra TURN;
AGAIN:
    ld.acquire.gpu.global.u32 %r1, [%p1];
    setp.ne.u32 %q1, %r1, %block;
    @%q1 bra AGAIN;
TURN:
    bar.warp.sync -1;
    red.global.add.v4.f32 [%d0], {%f0, %f1, %f2, %f3};
    bar.warp.sync -1;
    add.u32 %r2, %block, 1;
    @!%q0 st.release.gpu.global.u32 [%p1], %r2;
"""


def turns_case() -> HopperCase:
    """Return a case of 64 blocks that add random numbers in block order."""
    numbers = np.random.default_rng(9).normal(size=(64, 128)).astype(np.float32)
    turn, out = np.zeros(1, np.uint32), np.zeros(128, np.float32)
    return HopperCase("turns", TURNS_BODY, (numbers, turn), out, threads=32, blocks=64)


# Two warps update a number in shared memory in turn (ping-pong), by named barriers with their numbers in registers.
BARRIERS_BODY = """
    mov.u32 %r60, smem;
    shr.u32 %r0, %t, 5;
    setp.eq.u32 %q0, %t, 0;
    @%q0 st.shared.b32 [%r60], 1;
    bar.sync 0;
    add.u32 %r1, %r0, 2;
    xor.b32 %r2, %r0, 1;
    add.u32 %r2, %r2, 2;
    mov.u32 %r3, 64;
    mov.u32 %r4, 0;
    setp.eq.u32 %q1, %r0, 1;
    @%q1 bar.arrive %r2, %r3;
ROUND:
    bar.sync %r1, %r3;
    and.b32 %r5, %t, 31;
    setp.eq.u32 %q2, %r5, 0;
    ld.shared.b32 %r6, [%r60];
    mad.lo.u32 %r6, %r6, 3, %r0;
    bar.warp.sync -1;
    @%q2 st.shared.b32 [%r60], %r6;
    bar.warp.sync -1;
    bar.arrive %r2, %r3;
    add.u32 %r4, %r4, 1;
    setp.lt.u32 %q3, %r4, 8;
    @%q3 bra ROUND;
    mad.wide.u32 %d0, %t, 4, %p0;
    st.global.b32 [%d0], %r6;
"""


PARITY_BODY = f"""
    {initialise(2)}
    @!%q6 exit;
    mov.u32 %r40, 0;
    {
    "".join(
        f'''
    mbarrier.test_wait.parity.shared::cta.b64 %q0, [%r50], {parity};
    selp.b32 %r41, 1, 0, %q0;
    st.global.b32 [%p0+{8 * i + 4 * parity}], %r41;
    {"mbarrier.arrive.shared::cta.b64 %d0, [%r50];" if parity else ""}
    '''
        for i in range(6)
        for parity in (0, 1)
    )
}
"""

STATE_BODY = f"""
    {initialise(1)}
    @!%q6 exit;
    mbarrier.arrive.shared::cta.b64 %d0, [%r50];
    mbarrier.test_wait.shared::cta.b64 %q0, [%r50], %d0;
    selp.b32 %r0, 1, 0, %q0;
    st.global.b32 [%p0], %r0;
    mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%r50], 16;
    mbarrier.arrive.shared::cta.b64 %d0, [%r50];
    mbarrier.test_wait.shared::cta.b64 %q0, [%r50], %d0;
    selp.b32 %r0, 1, 0, %q0;
    st.global.b32 [%p0+4], %r0;
    mov.u32 %r60, smem;
    cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r60], [%p0], 16, [%r50];
    {wait(1)}
    mbarrier.test_wait.shared::cta.b64 %q0, [%r50], %d0;
    selp.b32 %r0, 1, 0, %q0;
    st.global.b32 [%p0+8], %r0;
"""

ELECT_BODY = """
    elect.sync %r0|%q0, 0xffffffff;
    vote.sync.ballot.b32 %r1, %q0, 0xffffffff;
    popc.b32 %r2, %r1;
    mad.wide.u32 %d0, %t, 4, %p0;
    st.global.b32 [%d0], %r2;
"""


def registers_case(name: str, threads: int, few: int, many: int) -> HopperCase:
    """Return a case in which warpgroup 0 lowers its register count to `few` and the others raise theirs to `many`."""
    body = f"""
        setp.ge.u32 %q0, %t, 128;
        @%q0 bra MORE;
        setmaxnreg.dec.sync.aligned.u32 {few};
        bra DONE;
    MORE:
        setmaxnreg.inc.sync.aligned.u32 {many};
    DONE:
        mad.wide.u32 %d0, %t, 4, %p0;
        st.global.b32 [%d0], %t;
    """
    directives = f".maxntid {threads}, 1, 1 .minnctapersm 1"
    out, expected = np.zeros(threads, np.uint32), np.arange(threads, dtype=np.uint32)
    return HopperCase(name, body, (), out, threads=threads, directives=directives, expected=expected)


REMOTE_BODY = f"""
    {initialise(2)}
    barrier.cluster.arrive.release.aligned;
    barrier.cluster.wait.acquire.aligned;
    mov.u32 %r0, %cluster_ctarank;
    xor.b32 %r1, %r0, 1;
    mapa.shared::cluster.u32 %r2, %r50, %r1;
    @%q6 mbarrier.arrive.shared::cta.b64 _, [%r50];
    @%q6 mbarrier.arrive.shared::cluster.b64 _, [%r2];
    {wait()}
    mov.u32 %r3, %cluster_nctarank;
    mad.lo.u32 %r4, %r3, 16, %r0;
    mad.lo.u32 %r5, %block, 128, %t;
    mad.wide.u32 %d0, %r5, 4, %p0;
    st.global.b32 [%d0], %r4;
    barrier.cluster.arrive.release.aligned;
    barrier.cluster.wait.acquire.aligned;
"""

# Thread t of a block stores block * 128 + t, and reads what thread 127 - t of the other block has stored.
LOAD_BODY = """
    mov.u32 %r0, %cluster_ctarank;
    xor.b32 %r1, %r0, 1;
    mov.u32 %r2, smem;
    mad.lo.u32 %r3, %t, 4, %r2;
    mad.lo.u32 %r4, %block, 128, %t;
    st.shared.b32 [%r3], %r4;
    barrier.cluster.arrive.release;
    barrier.cluster.wait.acquire;
    sub.u32 %r5, 127, %t;
    mad.lo.u32 %r3, %r5, 4, %r2;
    mapa.shared::cluster.u32 %r3, %r3, %r1;
    ld.shared::cluster.f32 %f0, [%r3];
    mad.wide.u32 %d0, %r4, 4, %p0;
    st.global.f32 [%d0], %f0;
    barrier.cluster.arrive.release;
    barrier.cluster.wait.acquire;
"""


def _case(name: str, body: str, expected: list[int] | list[list[int]], threads: int) -> HopperCase:
    """Return a case without inputs; `expected` is the output that follows from the PTX ISA."""
    literals = np.array(expected, np.uint32)
    return HopperCase(name, body, (), np.zeros_like(literals), threads=threads, expected=literals)


def _pair_case(name: str, body: str, expected: list[int]) -> HopperCase:
    """Return a case without inputs for a cluster of two blocks of 128 threads."""
    return replace(_case(name, body, expected, threads=128), **PAIR)


CASES = [
    turns_case(),
    # Eight times, warp 0 triples the number, and then warp 1 triples it and adds 1.
    _case("barriers", BARRIERS_BODY, 32 * [16142520] + 32 * [48427561], threads=64),
    # Two arrivals complete a phase. The phase of parity 1 before the first one counts as completed.
    _case("mbarrier.parity", PARITY_BODY, [[0, 1], [0, 1], [1, 0], [1, 0], [0, 1], [0, 1]], threads=32),
    _case("mbarrier.state", STATE_BODY, [1, 0, 1, 0], threads=32),
    _case("elect", ELECT_BODY, 64 * [1], threads=64),
    registers_case("setmaxnreg", 384, 24, 240),
    registers_case("setmaxnreg.40-232", 384, 40, 232),
    registers_case("setmaxnreg.32-160", 512, 32, 160),
    _pair_case("cluster.remote", REMOTE_BODY, 128 * [32] + 128 * [33]),
    _pair_case("cluster.load", LOAD_BODY, list(range(255, -1, -1))),
]
