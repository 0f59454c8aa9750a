"""Happens-before between blocks in global memory: every form and scope of release and acquire, and races without
them.
"""

import numpy as np
import pytest
from micro import run

from cupy_flash.simulator import errors

# Block 0 writes words and then a flag; block 1 waits for the flag, then each of its lanes reads another lane's word.
WRITE = """
    setp.ne.u32 %q0, %block, 0;
    setp.eq.u32 %q1, %t, 0;
    mad.wide.u32 %d0, %t, 4, %p0;
    @%q0 bra READER;
    {write} [%d0], %t;
    {before_release}
    @%q1 {release}
    exit;
READER:
"""
READ = """
    @!%q1 bra JOIN;
SPIN:
    {acquire}
    setp.eq.u32 %q2, %r1, 0;
    @%q2 bra SPIN;
    {then}
JOIN:
    {after_acquire}
    xor.b32 %r2, %t, 1;
    mad.wide.u32 %d1, %r2, 4, %p0;
    ld.global.b32 %r3, [%d1];
    mad.wide.u32 %d2, %t, 4, %p2;
    st.global.b32 [%d2], %r3;
"""
SYNCWARP = "bar.warp.sync -1;"
PARTS = dict(
    write="st.global.b32", before_release=SYNCWARP, release="st.release.gpu.global.b32 [%p1], 1;",
    acquire="ld.acquire.gpu.global.b32 %r1, [%p1];", then="", after_acquire=SYNCWARP,
)  # fmt: skip


def words_arrive(body=WRITE + READ, *, threads=32, blocks=2, numbers=1, **parts):
    words, out = np.zeros(threads, np.uint32), np.zeros(threads, np.uint32)
    run(body.format(**PARTS | parts), words, np.zeros(numbers, np.uint32), out, threads=threads, blocks=blocks)
    return np.array_equal(out, np.arange(threads) ^ 1)


RELAXED = dict(release="st.relaxed.gpu.global.b32 [%p1], 1;", acquire="ld.relaxed.gpu.global.b32 %r1, [%p1];")
RELEASED_BY_FENCE = dict(release=RELAXED["release"], before_release=SYNCWARP + "fence.acq_rel.gpu;")
ACQUIRED_BY_FENCE = dict(acquire=RELAXED["acquire"], then="fence.acq_rel.gpu;")
ORDERED = {
    "release and acquire": {},
    "system scope": dict(acquire=PARTS["acquire"].replace("gpu", "sys")),
    "released by a fence": RELEASED_BY_FENCE,
    "released by membar": RELEASED_BY_FENCE | dict(before_release=SYNCWARP + "membar.gl;"),
    "acquired by a fence": ACQUIRED_BY_FENCE,
    "both by fences": RELEASED_BY_FENCE | ACQUIRED_BY_FENCE,
    "atomics": dict(
        release="red.release.gpu.global.add.u32 [%p1], 1;", acquire="atom.acquire.gpu.global.add.u32 %r1, [%p1], 0;",
    ),
    "strong words": dict(write="st.relaxed.gpu.global.b32", release=PARTS["release"]),
}  # fmt: skip
ALONE = "without a __syncwarp after the acquire by lane 0 of its warp"
SCOPES = "without a release and an acquire whose scopes include both blocks"
UNORDERED = {
    "released relaxed": (dict(release=RELAXED["release"]), SCOPES),
    "acquired relaxed": (dict(acquire=RELAXED["acquire"]), SCOPES),
    "both relaxed": (RELAXED, SCOPES),
    "released to the block": (dict(release=PARTS["release"].replace("gpu", "cta")), SCOPES),
    "acquired from the block": (dict(acquire=PARTS["acquire"].replace("gpu", "cta")), SCOPES),
    "a fence of the block": (RELEASED_BY_FENCE | dict(before_release=SYNCWARP + "fence.acq_rel.cta;"), SCOPES),
    "a fence before the read": (ACQUIRED_BY_FENCE | dict(acquire="fence.acq_rel.gpu;" + RELAXED["acquire"], then=""),
                                SCOPES),
    "one lane releases": (dict(before_release=""), "release without a __syncwarp after the write of lane 1"),
    "one lane acquires": (
        dict(acquire="@%q1 " + PARTS["acquire"], after_acquire=""), f"{ALONE}|{SCOPES}",
    ),
    "a reduction acquires nothing": (
        dict(acquire="red.acquire.gpu.global.add.u32 [%p1], 0; " + RELAXED["acquire"]), SCOPES,
    ),
}  # fmt: skip


@pytest.mark.parametrize("parts", ORDERED.values(), ids=ORDERED)
def test_release_and_acquire_order(parts):
    assert words_arrive(**parts)


@pytest.mark.parametrize(("parts", "message"), UNORDERED.values(), ids=UNORDERED)
def test_race(parts, message):
    """The missing order is reported although the simulator makes every write visible at once."""
    with pytest.raises(errors.Race, match=message) as caught:
        words_arrive(**parts)
    if message is SCOPES:
        assert "write, then read of byte" in str(caught.value) and "of 'array 0'" in str(caught.value)
        assert "lane 1 of block 0: " in str(caught.value) and "of block (1, 0, 0): " in str(caught.value)


def test_a_barrier_after_the_acquire_of_one_warp_orders_all():
    two = dict(threads=64, after_acquire="bar.sync 0;", before_release="bar.sync 0;")
    assert words_arrive(**two)
    with pytest.raises(errors.Race, match="without a release and an acquire"):
        words_arrive(**two | dict(after_acquire=SYNCWARP))


# Block 1 acquires the flag, and then writes a flag that block 2 waits for.
THIRD = (
    """
    setp.ne.u32 %q3, %block, 1;
    @%q3 bra THIRD;
    @!%q1 exit;
FIRST:
    {acquire}
    setp.eq.u32 %q2, %r1, 0;
    @%q2 bra FIRST;
    {second_flag}
    exit;
THIRD:
"""
    + READ
)


def test_order_is_transitive():
    """Release and acquire are transitive: a write of block 0 is visible to block 2 through block 1.

    Block 1 must release, or continue the release sequence by a relaxed atomic on the same flag; a relaxed store does
    not.
    """
    further = dict(acquire=PARTS["acquire"], blocks=3, numbers=2)
    other = WRITE + THIRD.replace("SPIN:\n    {acquire}", "SPIN:\n    ld.acquire.gpu.global.b32 %r1, [%p1+4];")
    assert words_arrive(other, second_flag="st.release.gpu.global.b32 [%p1+4], 1;", **further)
    with pytest.raises(errors.Race):
        words_arrive(other, second_flag="st.relaxed.gpu.global.b32 [%p1+4], 1;", **further)
    same = WRITE + THIRD.replace(
        "SPIN:\n    {acquire}\n    setp.eq.u32 %q2, %r1, 0;",
        "SPIN:\n    ld.acquire.gpu.global.b32 %r1, [%p1];\n    setp.ne.u32 %q2, %r1, 2;",
    )
    assert words_arrive(same, second_flag="red.relaxed.gpu.global.add.u32 [%p1], 1;", **further)
    with pytest.raises(errors.Race):
        words_arrive(same, second_flag="st.relaxed.gpu.global.b32 [%p1], 2;", **further)


def test_blocks_that_are_not_resident_together():
    """Eight blocks of 1024 threads are resident; the ninth reads what the first one has released."""
    last = (WRITE + READ).replace("READER:", "READER: setp.ne.u32 %q3, %block, 8; @%q3 exit;")
    joined = dict(threads=1024, blocks=9, before_release="bar.sync 0;", after_acquire="bar.sync 0;")
    assert words_arrive(last, **joined)
    with pytest.raises(errors.Race, match=r"lane 1 of block 0: .*\n.* of block \(8, 0, 0\)"):
        words_arrive(last, **joined | dict(release=RELAXED["release"]))


# Each block adds to the same words once the block before it has released the flag.
ADD = """
    setp.eq.u32 %q1, %t, 0;
    mad.wide.u32 %d0, %t, 4, %p0;
    @!%q1 bra JOIN;
SPIN:
    {acquire}
    setp.ne.u32 %q2, %r1, %block;
    @%q2 bra SPIN;
JOIN:
    {after_acquire}
    red.global.add.{type} [%d0], {one};
    bar.warp.sync -1;
    add.u32 %r3, %block, 1;
    @%q1 {release}
"""
TURN = dict(
    acquire=PARTS["acquire"], after_acquire=SYNCWARP, release="st.release.gpu.global.b32 [%p1], %r3;", type="f32",
    one="0f3F800000",
)  # fmt: skip


def sums_are_right(**parts):
    sums = np.zeros(32, np.float32 if parts.get("type", "f32") == "f32" else np.uint32)
    run(ADD.format(**TURN | parts), sums, np.zeros(1, np.uint32), blocks=4)
    return bool((sums == 4).all())


def test_additions_take_turns():
    assert sums_are_right()
    for parts in (
        dict(release="st.relaxed.gpu.global.b32 [%p1], %r3;"),
        dict(acquire=RELAXED["acquire"]),
        dict(acquire=PARTS["acquire"].replace("gpu", "cta")),
        dict(after_acquire=""),
    ):
        with pytest.raises(errors.Race, match="floating-point additions, whose sum depends on their order, of byte"):
            sums_are_right(**parts)
    # the sum of integers does not depend on the order
    assert sums_are_right(release=RELAXED["release"].replace("1;", "%r3;"), type="u32", one="1")


def test_additions_in_any_order():
    """Blocks may add in any order if they do not synchronise at all; otherwise the order of floating-point sums is
    checked.
    """
    alone = "mad.wide.u32 %d0, %t, 4, %p0; red.global.add.f32 [%d0], 0f3F800000;"
    sums = np.zeros(32, np.float32)
    run(alone, sums, blocks=4)
    assert (sums == 4).all()
    flag = np.zeros(1, np.uint32)
    with pytest.raises(errors.Race, match="floating-point additions"):
        run(alone + "ld.acquire.gpu.global.b32 %r1, [%p1];", sums, flag, blocks=2)
    pairs = alone.replace("%t, 4", "%r0, 4").replace("mad", "shr.u32 %r0, %t, 1; mad", 1)
    with pytest.raises(errors.Race, match="two lanes of one instruction .* no synchronisation can fix") as caught:
        run(pairs + "ld.acquire.gpu.global.b32 %r1, [%p1];", sums, flag)
    assert "\n  lane 0 and thread (1, 0, 0) [warp 0, lane 1]" in str(caught.value) and "__" not in str(caught.value)
