"""Bulk copies of tensor boxes and contiguous ranges: all boxes in all orders of completion, and each kind of misuse."""

import itertools

import ml_dtypes
import numpy as np
import pytest
from micro import run

from cupy_flash.measure.checks.hopper import BY_NAME, CASES
from cupy_flash.measure.checks.hopper.bulk import BOXES, STRIDED, tensor
from cupy_flash.measure.checks.hopper.case import drain, fill, initialise, wait
from cupy_flash.simulator import CHECKS, errors

ORDERS = ["early", "late", "random"]
DTYPES = {"u8": np.uint8, "bf16": ml_dtypes.bfloat16, "f16": np.float16, "f32": np.float32}


def result(case, body=None, **options):
    out = case.out.copy()
    counters = run(
        body or case.body, *case.inputs, out, threads=case.threads, blocks=case.blocks, maps=case.maps,
        **(case.options | options),
    )  # fmt: skip
    return out, counters


def swizzle(byte, span):
    """Return the address of a byte after swizzling (PTX ISA 9.2, swizzling modes).

    In a span of 32, 64 or 128 bytes, the index of a 16-byte chunk in its span is XORed with the index of its 128-byte
    row modulo 2, 4 or 8.
    """
    row, piece, rest = byte // 128, byte // 16, byte % 16
    return (piece ^ row % (span // 16)) * 16 + rest if span else byte


def places(name):
    """Yield (byte in shared memory, element of the tensor or None if out of bounds) for each element of a box."""
    dtype, shape, box, span, at = BOXES[name]
    for i, index in enumerate(itertools.product(*map(range, reversed(box)))):
        element = [x + y for x, y in zip(reversed(at), index, strict=True)]
        inside = all(0 <= x < size for x, size in zip(element, reversed(shape), strict=True))
        where = int(np.ravel_multi_index(element, tuple(reversed(shape)))) if inside else None
        yield swizzle(i * np.dtype(DTYPES[dtype]).itemsize, span), where


COMBINED = {"store": lambda old, new: new, "add": np.add, "min": np.minimum, "max": np.maximum}
LOADS = [case.name for case in CASES if case.name.startswith("load.")]
STORES = [case.name for case in CASES if case.name.split(".")[0] in COMBINED]


@pytest.mark.parametrize("name", LOADS)
def test_box_lies_in_shared_memory_as_documented(name):
    case, box = BY_NAME[name], name.removeprefix("load.").removesuffix("-hint")
    item = np.dtype(DTYPES[BOXES[box][0]]).itemsize
    elements = case.inputs[0].reshape(-1, item)
    expected = np.zeros_like(case.out)
    moved = 0
    for byte, element in places(box):
        if element is not None:
            expected[byte : byte + item] = elements[element]
            moved += item
    for order in ORDERS:
        out, counters = result(case, order=order)
        assert np.array_equal(out, expected)
        assert counters.global_bytes_read == moved


@pytest.mark.parametrize("name", STORES)
def test_box_is_stored_or_combined(name):
    kind, box = name.split(".")
    case, dtype = BY_NAME[name], DTYPES[BOXES[box][0]]
    source, expected = case.inputs[0].view(dtype), case.out.copy().view(dtype)
    for byte, element in places(box):
        if element is not None:
            expected[element] = COMBINED[kind](expected[element], source[byte // source.itemsize])
    for order in ORDERS:
        assert np.array_equal(result(case, order=order)[0], expected.view(np.uint8))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("kind", ["load", "store", "add"])
def test_plain_ranges(kind, order):
    case = BY_NAME[f"bulk.{kind}"]
    expected = case.inputs[0] + (case.out if kind == "add" else 0)
    out, counters = result(case, order=order)
    assert np.array_equal(out, expected)
    moved = counters.global_bytes_read if kind == "load" else counters.global_bytes_written
    assert moved == 1024


@pytest.mark.parametrize("name", STRIDED)
def test_box_of_a_tensor_with_any_strides(name):
    case, (shape, strides, at) = BY_NAME[f"strided.{name}"], STRIDED[name]
    tensor = np.ndarray(shape[::-1], np.uint16, case.inputs[0], strides=(*strides[::-1], 2))
    rows = np.zeros((16, 64), np.uint16)
    inside = tensor[at[3], at[2], at[1] : at[1] + 16, at[0] : at[0] + 64]
    rows[: inside.shape[0], : inside.shape[1]] = inside
    expected = np.zeros_like(case.out)
    for byte in range(2048):
        expected[swizzle(byte, 128)] = rows.view(np.uint8).reshape(-1)[byte]
    for order in ORDERS:
        assert np.array_equal(result(case, order=order)[0], expected)


@pytest.mark.parametrize("order", ORDERS)
def test_two_reductions_from_one_buffer(order):
    case = BY_NAME["bulk.add-twice"]
    assert np.array_equal(result(case, order=order)[0], case.out + 2 * case.inputs[0] + 3)
    for missing in (
        "@%q0 cp.async.bulk.wait_group.read 0;\n        bar.warp",
        "fence.proxy.async.shared::cta;\n        bar.warp",
    ):
        body = case.body.replace(missing, "bar.warp")
        assert body != case.body
        with pytest.raises((errors.PendingCopy, errors.MissingFence)):
            result(case, body, order=order)


def test_blocks_have_copies_of_their_own():
    body = f"""
        {initialise()}
        mov.u32 %r60, smem;
        mov.u32 %r0, 0;
        shl.b32 %r1, %block, 4;
        @%q6 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r50], 2048;
        @%q6 cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes \
[%r60], [%m0, {{%r0, %r1}}], [%r50];
        {wait()}
        {drain(2048, 128, 1)}
    """
    array = np.random.default_rng(0).integers(0, 256, 64 * 48 * 2, dtype=np.uint8)
    maps = ((0, tensor("bf16", (64, 48), (64, 16))),)
    for order in ORDERS:
        out = np.zeros_like(array)
        run(body, array, out, threads=128, blocks=3, maps=maps, order=order, **LOAD.options)
        assert np.array_equal(out, array)


# ---- misuse

LOAD, STORE, ADD = BY_NAME["load.2d"], BY_NAME["store.2d"], BY_NAME["add.2d-f32"]
# The body lacks the wait before the first use, but waits before the block exits.
NO_WAIT = LOAD.body.replace(wait(), "")


@pytest.mark.parametrize("order", ORDERS)
def test_use_before_the_wait(order):
    with pytest.raises(errors.PendingCopy, match="without a wait for the instruction that fills it") as caught:
        result(LOAD, NO_WAIT, order=order)
    assert "cp.async.bulk.tensor" in str(caught.value) and "ld.shared.v4.b32" in str(caught.value)


@pytest.mark.parametrize("order", ORDERS)
def test_wait_for_another_phase(order):
    """A wait for parity 1 of a new mbarrier returns at once, because the phase before the first counts as complete."""
    with pytest.raises((errors.PendingCopy, errors.Deadlock)):
        result(LOAD, LOAD.body.replace(wait(), wait(1)), order=order)


def test_wait_by_one_warp_does_not_order_the_others():
    alone = "@!%q6 bra PAST;" + wait() + "PAST:"
    result(LOAD, LOAD.body.replace(wait(), alone + "bar.sync 0;"))
    with pytest.raises(errors.PendingCopy):
        result(LOAD, LOAD.body.replace(wait(), alone))


def test_wait_by_one_lane_does_not_order_its_warp():
    alone = "setp.ge.u32 %q7, %t, 32; @%q7 exit; @!%q6 bra PAST;" + wait() + "PAST:"
    result(LOAD, LOAD.body.replace(wait(), alone + "bar.warp.sync -1;"))
    with pytest.raises(errors.PendingCopy, match="without a (wait|__syncwarp after the wait of lane 0 .*) for"):
        result(LOAD, LOAD.body.replace(wait(), alone))


def test_exit_before_the_copy_completes():
    body = LOAD.body[: LOAD.body.index(wait())]
    with pytest.raises(errors.PendingCopy, match="ends before its bulk copy completes"):
        result(LOAD, body)


@pytest.mark.parametrize("announced", [1024, 4096], ids=["fewer", "more"])
def test_wrong_byte_count_is_a_deadlock_that_names_it(announced):
    body = LOAD.body.replace("_, [%r50], 2048;", f"_, [%r50], {announced};")
    how = "1024 bytes too many" if announced < 2048 else "2048 bytes pending"
    with pytest.raises(errors.Deadlock, match=f"for parity 0 of the mbarrier at .*0 of 1 arrivals pending, {how}"):
        result(LOAD, body)


def test_expect_tx_for_one_of_two_copies():
    again = "@%q6 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r60+4096], [%p0], 2048, [%r50];"
    body = LOAD.body.replace(wait(), again + wait())
    result(LOAD, body.replace("_, [%r50], 2048;", "_, [%r50], 4096;"))
    with pytest.raises(errors.BarrierMisuse, match="completes before all of its bulk copies"):
        result(LOAD, body)


@pytest.mark.parametrize("order", ORDERS)
def test_copy_over_bytes_still_being_read(order):
    again = """
        mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r50], 2048;
        cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r60], [%p0], 2048, [%r50];
    """
    rest = "{} @!%q6 bra LAST;" + again + "LAST:" + wait(1, "AGAIN")
    result(LOAD, LOAD.body + rest.format("bar.sync 0;"), order=order)
    with pytest.raises(errors.Race, match="read, then asynchronous write"):
        result(LOAD, LOAD.body + rest.format(""), order=order)


def test_copy_over_written_bytes_without_a_proxy_fence():
    write = "st.shared.b32 [%r60], 0;"
    body = LOAD.body.replace("@%q6 mbarrier.arrive", f"@%q6 {write} {{}} @%q6 mbarrier.arrive")
    result(LOAD, body.replace("{}", "fence.proxy.async;", 1))
    with pytest.raises(errors.MissingFence, match="write, then asynchronous write"):
        result(LOAD, body.replace("{}", "", 1))


def test_mbarrier_without_its_fence():
    with pytest.raises(errors.MissingFence, match=r"no fence\.mbarrier_init"):
        result(LOAD, LOAD.body.replace("@%q6 fence.mbarrier_init.release.cluster;", ""))
    result(LOAD, LOAD.body.replace("fence.mbarrier_init.release.cluster", "fence.proxy.async"))


def test_map_larger_than_its_array():
    maps = ((0, tensor("bf16", (64, 80), (64, 16), 128)),)
    body = LOAD.body.replace("mov.b32 %r1, 8;", "mov.b32 %r1, 32;")
    with pytest.raises(errors.OutOfBounds, match="past the end of 'array 0'"):
        run(body, LOAD.inputs[0], LOAD.out.copy(), threads=128, maps=maps, **LOAD.options)


def test_box_of_another_rank():
    maps = ((0, tensor("bf16", (64, 8, 5), (64, 4, 1))),)
    with pytest.raises(errors.SimulationError, match="a tensor map of 3 dimensions"):
        run(LOAD.body, LOAD.inputs[0], LOAD.out.copy(), threads=128, maps=maps, **LOAD.options)


def test_address_without_a_tensor_map():
    with pytest.raises(errors.SimulationError, match="no tensor map at"):
        result(LOAD, LOAD.body.replace("[%m0,", "[%p0,"))


@pytest.mark.parametrize(
    ("case", "old", "new"),
    [
        (LOAD, "mov.u32 %r60, smem;\n        mov.b32", "mov.u32 %r60, smem; add.u32 %r60, %r60, 64; mov.b32"),
        (BY_NAME["bulk.load"], "[%p0], 1024, [", "[%p0+4], 1024, ["),
        (BY_NAME["bulk.load"], "[%p0], 1024, [", "[%p0], 1020, ["),
        (BY_NAME["bulk.load"], "[%r60], [%p0]", "[%r60+8], [%p0]"),
    ],
    ids=["box", "source", "size", "target"],
)
def test_misaligned(case, old, new):
    assert old in case.body
    with pytest.raises(errors.Misaligned):
        result(case, case.body.replace(old, new))


def test_beyond_shared_memory():
    with pytest.raises(errors.OutOfBounds, match="beyond"):
        result(LOAD, LOAD.body.replace("[%r60], [%m0", "[%r60+39936], [%m0"))


def test_uninitialised_source():
    with pytest.raises(errors.Uninitialised, match="'array 0', which is uninitialised"):
        result(LOAD, outputs=(0,))


def test_store_to_read_only_memory():
    with pytest.raises(errors.ReadOnly, match="'array 1'"):
        result(STORE, constant=(1,))


def test_reduction_onto_uninitialised_memory():
    with pytest.raises(errors.Uninitialised, match="'array 1'"):
        result(ADD, outputs=(1,))
    result(STORE, outputs=(1,))


@pytest.mark.parametrize("case", [STORE, ADD], ids=["store", "add"])
def test_store_without_a_proxy_fence(case):
    with pytest.raises(errors.MissingFence, match=r"without a fence\.proxy\.async"):
        result(case, case.body.replace("fence.proxy.async.shared::cta;", ""))


def test_store_before_other_warps_have_written():
    with pytest.raises(errors.Race, match="write, then asynchronous read"):
        result(STORE, STORE.body.replace("bar.sync 0;", ""))


# 32 lanes write 16 bytes each, and lane 0 stores them all with one bulk copy.
WARP_STORE = """
    mov.u32 %r60, smem;
    setp.eq.u32 %q6, %t, 0;
    shl.b32 %r61, %t, 4;
    add.u32 %r62, %r60, %r61;
    st.shared.v4.b32 [%r62], {{%t, %t, %t, %t}};
    {}
    @!%q6 bra STORED;
    cp.async.bulk.global.shared::cta.bulk_group [%p0], [%r60], 512;
    cp.async.bulk.commit_group;
    cp.async.bulk.wait_group.read 0;
STORED:
"""
SMEM = ".shared .align 128 .b8 smem[1024];"
FENCE, FENCE_ALONE, SYNCWARP = (
    "fence.proxy.async.shared::cta;",
    "@%q6 fence.proxy.async.shared::cta;",
    "bar.warp.sync -1;",
)


def warp_store(*between, after=""):
    out = np.zeros(128, np.uint32)
    run(WARP_STORE.format(" ".join(between)) + after, out, shared=SMEM)
    return out


def test_the_threads_that_may_fence():
    """Either every lane fences after its own writes, or one thread after a barrier that follows all writes."""
    for between in (FENCE, SYNCWARP), (SYNCWARP, FENCE_ALONE), (FENCE_ALONE, "@!%q6 " + FENCE, SYNCWARP):
        assert np.array_equal(warp_store(*between), np.repeat(np.arange(32), 4))
    with pytest.raises(
        errors.MissingFence, match=r"by the writing thread or by one that the write happens before"
    ) as e:
        warp_store(FENCE_ALONE, SYNCWARP)
    assert "[warp 0, lane 1]" in str(e.value) and "[warp 0, lane 0]" in str(e.value)
    # Only one thread executes the fence: before the barrier (wrong), or after it.
    alone = STORE.body.replace(FENCE, "setp.eq.u32 %q7, %t, 0; @%q7 " + FENCE)
    with pytest.raises(errors.MissingFence):
        result(STORE, alone)
    fence, barrier = alone.index("@%q7 " + FENCE), "bar.sync 0;"
    result(STORE, alone[:fence] + barrier + alone[fence:])


def test_fence_by_each_writer_while_one_writes_elsewhere():
    """Fences are tracked per lane and address: lane 1 may then write elsewhere, which no copy reads."""
    more = "setp.eq.u32 %q7, %t, 1; @%q7 st.shared.b32 [%r60+512], 0;"
    out = np.zeros(128, np.uint32)
    run(WARP_STORE.format(FENCE + more + SYNCWARP), out, shared=SMEM)
    assert np.array_equal(out, np.repeat(np.arange(32), 4))


def test_store_before_other_lanes_have_written():
    """A proxy fence does not order the accesses of different lanes."""
    with pytest.raises(errors.Race, match="write, then asynchronous read of .* without a __syncwarp"):
        warp_store(FENCE)
    with pytest.raises(errors.Race, match="write, then read of .* without a __syncwarp"):
        warp_store(FENCE, "xor.b32 %r62, %r62, 16; ld.shared.b32 %r0, [%r62];", SYNCWARP)


def test_one_lane_waits_for_its_store_alone():
    again = "st.shared.b32 [%r62], 0;"
    warp_store(FENCE, SYNCWARP, after=SYNCWARP + again)
    with pytest.raises(errors.PendingCopy, match="without a __syncwarp after the wait of lane 0 of its warp"):
        warp_store(FENCE, SYNCWARP, after=again)


WAIT_GROUP = "cp.async.bulk.wait_group 0;"


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("missing", ["commit", "wait", "one"])
def test_source_overwritten_before_the_wait(missing, order):
    body = STORE.body + "st.shared.b32 [%r60], 0;"
    result(STORE, body.replace(WAIT_GROUP, "cp.async.bulk.wait_group.read 0;"), order=order)
    body = {
        "commit": body.replace("cp.async.bulk.commit_group;", ""),
        "wait": body.replace(WAIT_GROUP, ""),
        "one": body.replace(WAIT_GROUP, "cp.async.bulk.wait_group.read 1;"),
    }[missing]
    with pytest.raises(errors.PendingCopy, match="without a wait for the instruction that copies it"):
        result(STORE, body, order=order)


@pytest.mark.parametrize("order", ORDERS)
def test_end_before_the_source_is_read(order):
    for too_weak in "", "cp.async.bulk.wait_group.read 1;":
        with pytest.raises(errors.PendingCopy, match=r"no cp\.async\.bulk\.wait_group\.read before the block ends"):
            result(STORE, STORE.body.replace(WAIT_GROUP, too_weak), order=order)


def test_the_order_decides_when_a_store_reads():
    """Without the checks, which would refuse this kernel, the two orders give different results."""
    body = STORE.body.replace(WAIT_GROUP, f"st.shared.b64 [%r60], 0; {WAIT_GROUP}")
    good = result(STORE)[0]
    assert np.array_equal(result(STORE, body, order="early", unchecked=CHECKS)[0], good)
    assert not np.array_equal(result(STORE, body, order="late", unchecked=CHECKS)[0], good)
    # wait_group 1 leaves one group pending, so it does not wait for the only group.
    body = STORE.body.replace(WAIT_GROUP, f"cp.async.bulk.wait_group 1; st.shared.b64 [%r60], 0; {WAIT_GROUP}")
    assert not np.array_equal(result(STORE, body, order="late", unchecked=CHECKS)[0], good)


def test_stores_in_a_long_loop_that_wait_for_their_reads_only():
    """100 additions of 1 to each of 4 words; wait_group.read waits for the reads of the source only."""
    body = f"""
        {fill(16, 128)}
        mov.u32 %r60, smem;
        mov.u32 %r0, 0;
        setp.ne.u32 %q0, %t, 0;
        @%q0 exit;
    LOOP:
        cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%p1], [%r60], 16;
        cp.async.bulk.commit_group;
        cp.async.bulk.wait_group.read 0;
        add.u32 %r0, %r0, 1;
        setp.lt.u32 %q0, %r0, 100;
        @%q0 bra LOOP;
    """
    for order in ORDERS:
        out = np.zeros(4, np.float32)
        run(body, np.ones(4, np.float32), out, threads=128, order=order, **LOAD.options)
        assert (out == 100).all()


def test_late_loads_complete_in_reverse():
    """A wait for the second copy says nothing about the first copy, although that was issued earlier."""
    body = f"""
        {initialise()}
        @%q6 mbarrier.init.shared::cta.b64 [%r50+8], 1;
        {fill(64, 128, pointer=1)}
        mov.u32 %r60, smem;
        @!%q6 exit;
        mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r50], 32;
        mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r50+8], 32;
        cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r60], [%p0], 32, [%r50];
        cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r60+32], [%p0], 32, [%r50+8];
        add.u32 %r50, %r50, 8;
        {wait()}
        ld.shared.b32 %r0, [%r60];
        st.global.b32 [%p1], %r0;
        sub.u32 %r50, %r50, 8;
        {wait(0, "SECOND")}
    """
    source = np.full(16, 7, np.uint32)
    seen = {}
    for order in ("early", "late"):
        out = np.zeros(16, np.uint32)
        run(body, source, out, threads=128, order=order, unchecked=CHECKS, **LOAD.options)
        seen[order] = int(out[0])
    assert seen == {"early": 7, "late": 0}
    with pytest.raises(errors.PendingCopy):
        run(body, source, np.zeros(16, np.uint32), threads=128, **LOAD.options)


def test_lanes_with_other_sizes_and_maps():
    """One instruction of two blocks copies different numbers of bytes with different tensor maps."""
    body = f"""
        {initialise()}
        mov.u32 %r60, smem;
        mov.u32 %r0, 0;
        setp.eq.u32 %q0, %block, 0;
        selp.b32 %r1, 1024, 512, %q0;
        selp.b64 %d0, %m0, %m1, %q0;
        add.u32 %r2, %r1, 1024;
        @%q6 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r50], %r2;
        @%q6 cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes \
[%r60], [%d0, {{%r0, %r0}}], [%r50];
        @%q6 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r60+1024], [%p0], %r1, [%r50];
        {wait()}
        {drain(1536, 128, 2)}
    """
    first, second = np.random.default_rng(0).integers(0, 256, (2, 1024), dtype=np.uint8)
    map_ = tensor("bf16", (64, 8), (64, 8))
    out = np.zeros((2, 1536), np.uint8)
    run(body, first, second, out, threads=128, blocks=2, maps=((0, map_), (1, map_)), **LOAD.options)
    assert np.array_equal(out[0], [*first, *first[:512]]) and np.array_equal(out[1], [*second, *first[:512]])


def test_many_mbarriers_and_many_issuers():
    """Each of 64 threads loads with an mbarrier of its own, and stores the loaded bytes."""
    body = """
        mov.u32 %r60, smem;
        mad.lo.u32 %r50, %t, 8, %r60;
        mad.lo.u32 %r51, %t, 16, %r60;
        mbarrier.init.shared::cta.b64 [%r50], 1;
        fence.mbarrier_init.release.cluster;
        mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r50], 16;
        mad.wide.u32 %d0, %t, 16, %p0;
        mad.wide.u32 %d1, %t, 16, %p1;
        cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r51+1024], [%d0], 16, [%r50];
    WAIT:
        mbarrier.try_wait.parity.shared::cta.b64 %q5, [%r50], 0;
        @!%q5 bra WAIT;
        cp.async.bulk.global.shared::cta.bulk_group [%d1], [%r51+1024], 16;
        cp.async.bulk.commit_group;
        cp.async.bulk.wait_group 0;
    """
    source = np.arange(256, dtype=np.uint32)
    for order in ORDERS:
        out = np.zeros_like(source)
        run(body, source, out, threads=64, order=order, **LOAD.options)
        assert np.array_equal(out, source)


@pytest.mark.parametrize(("order", "barrier"), [*((order, "") for order in ORDERS), ("late", "bar.sync 1, 32;")])
def test_a_load_completes_while_another_block_spins(order, barrier):
    """Block 1 polls a flag in global memory, which block 0 sets once its copy is complete."""
    body = f"""
        {initialise()}
        mov.u32 %r60, smem;
        setp.eq.u32 %q0, %block, 1;
        @%q0 bra SPIN;
        @%q6 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r50], 32;
        @%q6 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r60], [%p0], 32, [%r50];
        {wait()}
        ld.shared.b32 %r0, [%r60];
        @%q6 st.release.gpu.global.b32 [%p1], %r0;
        exit;
    SPIN:
        @!%q6 exit;
    AGAIN:
        {barrier}
        ld.acquire.gpu.global.b32 %r1, [%p1];
        setp.ne.u32 %q1, %r1, 7;
        @%q1 bra AGAIN;
        st.global.b32 [%p1+4], %r1;
    """
    out = np.zeros(2, np.uint32)
    options = {"threads": 128, "blocks": 2, "most_basic_blocks": 20_000, **LOAD.options}
    run(body, np.full(16, 7, np.uint32), out, order=order, **options)
    assert out.tolist() == [7, 7]
