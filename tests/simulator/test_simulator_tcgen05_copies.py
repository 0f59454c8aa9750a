"""tcgen05.cp against the layouts of the PTX ISA, transcribed; and each kind of misuse.

The PTX ISA tells which warps receive a row. The lanes of the shape 4x256b, and that the warps of a pair hold the same
rows, are those of TVM's documentation of tcgen05.cp, whose authors compared every bit on a B200.
"""

import numpy as np
import pytest
from matrix_layouts import matrix
from tcgen05_kernels import case_of, launch

from cupy_flash.measure.checks.blackwell.case import BARRIER, FENCE_AFTER
from cupy_flash.measure.checks.blackwell.copies import COLUMNS, FIRST, FORMS, copy_body, inputs_of, source_of
from cupy_flash.measure.checks.blackwell.products import A_COLUMN, COMMIT
from cupy_flash.measure.checks.hopper.case import wait
from cupy_flash.simulator import errors
from cupy_flash.simulator.asynchrony.tensor_memory import TensorMemory

ORDERS = ["early", "late", "random"]
WAIT = wait()


def lanes_of(form, row):
    """Return the lanes that hold a row of the matrix."""
    if form == "4x256b":  # a row for each of four warps
        return [32 * row]
    if form == "32x128b.warpx4":
        return [row, row + 32, row + 64, row + 96]
    if form == "64x128b.warpx2::02_13":  # rows 0 to 31 in warps 0 and 2, rows 32 to 63 in warps 1 and 3
        return [row, row + 64]
    if form == "64x128b.warpx2::01_23":  # rows 0 to 31 in warps 0 and 1, rows 32 to 63 in warps 2 and 3
        return [row, row + 32] if row < 32 else [row + 32, row + 64]
    return [row]


def run_changed(*changes, form="128x256b", swizzle=128, order="late", **options):
    """Run a kernel with planted bugs, (old, new) pairs; return whether its result is right."""
    body, (image, before) = copy_body(form, swizzle), inputs_of(form, swizzle)
    for old, new in changes:
        assert old in body, old
        body = body.replace(old, new)
    source = source_of(form, swizzle)
    expected = before.copy()
    for row, words in enumerate(matrix(image.view(np.uint8), source).astype(np.float32).view(np.uint32)):
        for lane in lanes_of(form, row):
            expected[lane, FIRST : FIRST + source.depth] = words
    out = np.zeros_like(before)
    launch(body, image, before, out, order=order, **options)
    return np.array_equal(out, expected)


@pytest.mark.parametrize("swizzle", [16, 32, 64, 128])
@pytest.mark.parametrize("form", FORMS)
def test_rows_arrive_in_the_documented_lanes(form, swizzle):
    for order in ORDERS:
        assert run_changed(form=form, swizzle=swizzle, order=order), order


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ([(WAIT, "")], errors.PendingCopy, "without a wait for the tcgen05.commit of the first"),
        ([(COMMIT, ""), (WAIT, "")], errors.PendingCopy, "without a wait for the tcgen05.commit of the first"),
        ([(f"{WAIT}\n    {FENCE_AFTER}", WAIT)], errors.MissingFence, "without a tcgen05.fence::after_thread_sync"),
        ([("fence.proxy.async.shared::cta;", "")], errors.MissingFence, r"without a fence\.proxy\.async"),
        ([("tcgen05.wait::st.sync.aligned;", "")], errors.PendingRegister, "without the tcgen05.wait of the first"),
        ([(f"aligned;\n    {BARRIER}", "aligned;")], errors.Race, "write, then write of tensor memory"),
        (
            [(COMMIT, f"{COMMIT} mov.u32 %r60, smem; @%q6 st.shared.u32 [%r60], 0;")],
            errors.PendingCopy,
            "for the instruction that reads it",
        ),
    ],
    ids=["wait", "commit", "after", "proxy", "wait-st", "barrier", "source"],
)
def test_missing_synchronisation(changes, error, message, order):
    with pytest.raises(error, match=message):
        run_changed(*changes, order=order)


def test_a_commit_covers_the_copies_of_its_own_thread():
    other = COMMIT.replace("@%q6", "@%q2")
    with pytest.raises(errors.PendingCopy, match="without a wait for the tcgen05.commit"):
        run_changed((COMMIT, f"setp.eq.u32 %q2, %t, 32; {other}"))


TARGET = f"[%r51+{FIRST}]"


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ([(TARGET, f"[%r51+{FIRST + 2}]")], errors.Misaligned, "to column 10 of tensor memory, no multiple of 4"),
        (
            [(TARGET, f"[%r51+{COLUMNS - 4}]")],
            errors.OutOfBounds,
            "columns 60 to 67 of tensor memory are not allocated",
        ),
        ([(TARGET, f"[%r51+{FIRST + (1 << 16)}]")], errors.OutOfBounds, "to lane 1 .* beyond lane 127"),
        (
            [("@%q6 tcgen05.cp", "xor.b64 %d2, %d2, 0x8000400000000000; @%q6 tcgen05.cp")],
            errors.BadDescriptor,
            "sm_100",
        ),
        ([("@%q6 tcgen05.cp", "add.u64 %d2, %d2, 8; @%q6 tcgen05.cp")], errors.Misaligned, "its swizzling pattern"),
        ([("@%q6 tcgen05.cp", "add.u64 %d2, %d2, 8192; @%q6 tcgen05.cp")], errors.OutOfBounds, "reaches beyond the"),
        ([("%r61, 16384;", "%r61, 8192;")], errors.Uninitialised, "asynchronous read of shared byte"),
    ],
    ids=["column", "columns", "lane", "hopper", "misaligned", "outside", "uninitialised"],
)
def test_misuse(changes, error, message):
    with pytest.raises(error, match=message):
        run_changed(*changes)


def test_four_rows_reach_one_lane_of_each_warp():
    """They may begin at any of its 32 lanes, and define no other."""
    assert not run_changed((TARGET, f"[%r51+{FIRST + (31 << 16)}]"), form="4x256b", swizzle=32)
    with pytest.raises(errors.OutOfBounds, match="to lane 32"):
        run_changed((TARGET, f"[%r51+{FIRST + (32 << 16)}]"), form="4x256b", swizzle=32)
    with pytest.raises(errors.Uninitialised, match="tcgen05.ld of tensor memory that nothing has written"):
        run_changed(("tcgen05.st", "@!%q4 tcgen05.st"), form="4x256b", swizzle=32)


@pytest.mark.parametrize(
    "form",
    [
        "cta_group::2.128x256b",
        "cta_group::1.128x256b.b8x16.b6x16_p32",
        "cta_group::1.128x256b.b8x16.b4x16_p64",
        "cta_group::1.64x128b",
        "cta_group::1.32x128b.warpx2::02_13",
    ],
)
def test_forms_that_are_not_simulated(form):
    with pytest.raises(errors.Unsupported, match=f"this form of tcgen05 is not simulated.*{form}"):
        run_changed(("cta_group::1.128x256b", form))


def test_without_swizzling_a_base_offset_has_no_meaning():
    """Triton writes one."""
    offset = ("@%q6 tcgen05.cp", "or.b64 %d2, %d2, 0x0008000000000000; @%q6 tcgen05.cp")
    assert run_changed(offset, swizzle=16)
    with pytest.raises(errors.BadDescriptor, match="without a base offset"):
        run_changed(offset, swizzle=32)


def test_the_multicast_may_come_before_the_shape():
    """As in the PTX that Triton generates, which ptxas accepts."""
    assert run_changed(("32x128b.warpx4", "warpx4.32x128b"), form="32x128b.warpx4")


# ---- products of what has been copied


def run_product(*changes, order="late"):
    """Run the kernel that copies every step of A to the same columns, with planted bugs."""
    body, inputs, expected = case_of("ts-copied")
    for old, new in changes:
        assert old in body, old
        body = body.replace(old, new)
    out = np.zeros_like(expected)
    launch(body, *inputs, out, order=order)
    return np.array_equal(out, expected)


def test_copies_and_mma_of_a_thread_run_in_order(monkeypatch):
    assert all(run_product(order=order) for order in ORDERS)
    monkeypatch.setattr(TensorMemory, "IN_ORDER", False)
    with pytest.raises(errors.PendingCopy, match="read, then write of tensor memory"):
        run_product()


@pytest.mark.parametrize("order", ORDERS)
def test_copies_of_another_thread_are_waited_for(order):
    with pytest.raises(
        errors.PendingCopy, match="write, then read of tensor memory without a wait for the tcgen05.com"
    ):
        run_product(("@%q6 tcgen05.cp", "setp.eq.u32 %q2, %t, 32; @%q2 tcgen05.cp"), order=order)


def test_an_mma_that_wrote_a_is_waited_for():
    """Only a copy is ordered before an mma that reads A from tensor memory."""
    copied = f"@%q6 tcgen05.cp.cta_group::1.128x256b [%r51+{A_COLUMN}], %d2;"
    multiplied = f"@%q6 tcgen05.mma.cta_group::1.kind::f16 [%r51+{A_COLUMN}], %d2, %d3, %r55, %q2;"
    assert run_product((copied, f"setp.ne.u32 %q2, %t, %t; {multiplied} {copied}"))
    with pytest.raises(errors.PendingCopy, match="write, then read of tensor memory"):
        run_product((copied, f"setp.ne.u32 %q2, %t, %t; {copied} {multiplied}"))


def test_counters():
    body, (image, before) = copy_body("32x128b.warpx4", 16), inputs_of("32x128b.warpx4", 16)
    counters = launch(body, image, before, np.zeros_like(before))
    assert counters.operand_bytes == 2 * 32 * 16 and counters.mma_clocks == 0
    assert counters.tensor_memory_bytes_written == 128 * COLUMNS * 4 + 2 * 128 * 16
