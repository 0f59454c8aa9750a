"""tcgen05 against the layouts of the PTX ISA 9.2, transcribed; and each kind of misuse.

The layouts are the documentation's tables; no code of the simulator is used.
"""

import numpy as np
import pytest
from tcgen05_kernels import FORMS, case_of, expected_of, launch

from cupy_flash.measure.checks import micro_kernels
from cupy_flash.measure.checks.blackwell import products
from cupy_flash.measure.checks.blackwell.case import BARRIER, DEALLOC, FENCE_AFTER, FENCE_BEFORE
from cupy_flash.measure.checks.blackwell.products import COMMIT, shape_bits
from cupy_flash.measure.checks.hopper import BY_NAME
from cupy_flash.measure.checks.hopper.case import wait
from cupy_flash.simulator import errors
from cupy_flash.simulator.asynchrony.tensor_memory import TensorMemory

ORDERS = ["early", "late", "random"]


@pytest.mark.parametrize("form", FORMS)
def test_mma_multiplies_what_the_documented_layouts_hold(form):
    body, inputs, expected = case_of(form)
    for order in ORDERS:
        out = np.zeros_like(expected)
        launch(body, *inputs, out, order=order)
        assert np.array_equal(out, expected), order


def test_blocks_have_a_tensor_memory_each():
    body, (image, before), expected = case_of("bf16-k-mn-128")
    out = np.zeros_like(expected)
    launch(body.replace("%p2;", "%p2; mad.wide.u32 %d0, %block, 32768, %d0;"), image, before, out, blocks=1)
    three = np.zeros((3, *expected.shape), np.float32)
    launch(body.replace("%p2;", "%p2; mad.wide.u32 %d0, %block, 32768, %d0;"), image, before, three, blocks=3)
    assert np.array_equal(three, [expected] * 3) and np.array_equal(out, expected)


# The instruction and matrix descriptors in the PTX that Triton 3.9 generates for sm_100, and what its kernels multiply.
DESCRIPTORS_OF_TRITON = [
    (0x08200490, (128, 128, "bf16", False, False)),
    (0x08210490, (128, 128, "bf16", False, True)),
    (0x08410490, (128, 256, "bf16", False, True)),
    (0x08100490, (128, 64, "bf16", False, False)),
    (0x08218010, (128, 128, "f16", True, True)),
    (0x08098490, (128, 32, "bf16", True, True)),
]


@pytest.mark.parametrize(("bits", "fields"), DESCRIPTORS_OF_TRITON)
def test_instruction_descriptors_are_those_of_triton(bits, fields):
    rows, columns, type_, a, b = fields
    assert shape_bits(rows, columns, type_, transposed=(a, b)) == bits


# ---- tcgen05.ld and .st


def place(shape, register, thread, split=0):
    """Return (lane, column) of a register of a thread (PTX ISA, shapes of tcgen05.ld and .st)."""
    row, pair = thread // 4, thread % 4
    if shape == "32x32b":
        return thread, register
    if shape == "16x32bx2":
        return thread % 16, register + (split if thread >= 16 else 0)
    if shape == "16x64b":  # a row of 64 bits in 2 threads; threads of odd pairs of a row have rows 8 to 15
        return row + 8 * (thread % 2), 2 * register + thread // 2 % 2
    if shape == "16x128b":  # 128 bits in 4 threads, rows 8 to 15 in the second register
        return row + 8 * (register % 2), 4 * (register // 2) + pair
    return row + 8 * (register // 2 % 2), 8 * (register // 4) + 2 * pair + register % 2


OF_CHECK = {kernel.name: kernel for kernel in micro_kernels.kernels() if kernel.family == "tcgen05"}


@pytest.mark.parametrize("name", [name for name in OF_CHECK if name.startswith(("tcgen05.ld", "tcgen05.st"))])
def test_loads_and_stores_reach_the_documented_places(name):
    kernel = OF_CHECK[name]
    shape, _, upper = name.split(".")[2].partition("-")
    words, new = kernel.inputs[0], kernel.inputs[-1]
    expected = words.copy() if name.startswith("tcgen05.st") else kernel.out.copy()
    registers = expected.shape[1] if name.startswith("tcgen05.ld") else new.shape[1]
    for thread in range(128):
        for register in range(registers):
            lane, column = place(shape, register, thread % 32, 40)
            at = thread // 32 * 32 + (16 if upper else 0) + lane, column
            if name.startswith("tcgen05.ld"):
                expected[thread, register] = words[at]
            else:
                expected[at] = new[thread, register]
    assert np.array_equal(micro_kernels.simulate(kernel), expected)


# ---- what check asks a GPU


def test_mma_of_a_thread_run_in_order(monkeypatch):
    """An mma that overwrites A behind the products which read it, without a wait, as in the forward."""
    kernel = OF_CHECK["tcgen05.mma.order"]
    before = kernel.inputs[1]
    once = expected_of(products.P, products.V, 128, kernel.inputs)
    assert np.array_equal(micro_kernels.simulate(kernel), before + 16 * (once - before))
    monkeypatch.setattr(TensorMemory, "IN_ORDER", False)
    with pytest.raises(errors.PendingCopy, match="read, then write of tensor memory"):
        micro_kernels.simulate(kernel)


@pytest.mark.parametrize(("name", "repeats"), [("many", 64), ("two-arrivals", 2), ("nothing", 1)])
def test_a_commit_covers_all_mma_before_it(name, repeats):
    kernel = OF_CHECK[f"tcgen05.commit.{name}"]
    before = kernel.inputs[1]
    once = expected_of(products.A, products.B, 128, kernel.inputs)
    assert np.array_equal(micro_kernels.simulate(kernel), before + repeats * (once - before))


def test_blocks_take_turns_with_all_columns():
    kernel = OF_CHECK["tcgen05.alloc.turns"]
    assert np.array_equal(micro_kernels.simulate(kernel), kernel.expected)


def test_a_gpu_of_the_same_family_gets_its_own_target():
    kernel = OF_CHECK["tcgen05.alloc.turns"]
    assert [kernel.runs_on(capability) for capability in (90, 100, 103, 120)] == [False, True, True, False]
    assert ".version 8.6\n.target sm_100a\n" in kernel.text_for(100) == kernel.text
    assert ".version 8.8\n.target sm_103a\n" in kernel.text_for(103)


# ---- misuse

FORM = "overwrites"
WAIT = wait()


def run_changed(*changes, form=FORM, order="late", **options):
    """Run the kernel of a form with planted bugs, (old, new) pairs."""
    body, inputs, expected = case_of(form)
    for old, new in changes:
        assert old in body, old
        body = body.replace(old, new)
    out = np.zeros_like(expected)
    launch(body, *inputs, out, order=order, **options)
    return np.array_equal(out, expected)


def test_the_kernel_of_these_tests_is_right():
    assert run_changed()


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ([(WAIT, "")], errors.PendingCopy, "without a wait for the tcgen05.commit of the first"),
        ([(f"{WAIT}\n    {FENCE_AFTER}", WAIT)], errors.MissingFence, "without a tcgen05.fence::after_thread_sync"),
        ([("tcgen05.wait::st.sync.aligned;", "")], errors.PendingRegister, "without the tcgen05.wait of the first"),
        ([("tcgen05.wait::ld.sync.aligned;", "")], errors.PendingRegister, "without the tcgen05.wait of the first"),
        (
            [(f"tcgen05.wait::st.sync.aligned;\n    {FENCE_BEFORE}", "tcgen05.wait::st.sync.aligned;\n")],
            errors.MissingFence,
            "without a tcgen05.fence::before_thread_sync",
        ),
        (
            [(f"tcgen05.wait::st.sync.aligned;\n    {BARRIER}", f"tcgen05.wait::st.sync.aligned;\n{FENCE_BEFORE}")],
            errors.Race,
            "write, then write of tensor memory without anything that orders them",
        ),
        ([("fence.proxy.async.shared::cta;", "")], errors.MissingFence, r"without a fence\.proxy\.async"),
        ([(DEALLOC.format(columns=512), "")], errors.BarrierMisuse, "block 0 ends without tcgen05.dealloc"),
        ([(BARRIER + "\n    " + DEALLOC.format(columns=512), DEALLOC.format(columns=512))], errors.Race, "read, then"),
    ],
    ids=["commit", "after", "wait-st", "wait-ld", "before", "barrier", "proxy", "dealloc", "early-dealloc"],
)
def test_missing_synchronisation(changes, error, message, order):
    with pytest.raises(error, match=message):
        run_changed(*changes, order=order)


def test_fences_of_tcgen05_can_be_left_to_the_compiler():
    without = [(FENCE_BEFORE, ""), (FENCE_AFTER, "")]
    assert run_changed(*without, unchecked=("tcgen05-fence",))
    with pytest.raises(errors.PendingCopy, match="without a wait for the tcgen05.commit"):
        run_changed(*without, (WAIT, ""), unchecked=("tcgen05-fence",))


@pytest.mark.parametrize("order", ORDERS)
def test_a_block_waits_for_its_commits(order):
    """A commit that is in flight when its block ends would arrive in the shared memory of another block."""
    last = f"{BARRIER}\n    {DEALLOC.format(columns=512)}"
    with pytest.raises(errors.PendingCopy, match="ends before its tcgen05.commit arrives"):
        run_changed((last, f"{COMMIT} {last}"), order=order)
    assert run_changed((last, f"{COMMIT} {last}"), order=order, unchecked=("commit-wait",))
    assert run_changed((last, f"{COMMIT} {wait(1, 'LAST')} {last}"), order=order)


def test_a_commit_covers_the_mma_of_its_own_thread():
    other = COMMIT.replace("@%q6", "@%q2")
    with pytest.raises(errors.PendingCopy, match="without a wait for the tcgen05.commit"):
        run_changed((COMMIT, f"setp.eq.u32 %q2, %t, 32; {other}"))


ALLOC = "tcgen05.alloc.cta_group::1.sync.aligned.b32 [%r53], 32;"
MISUSES = {
    "384-columns": ("b32 [%r53], 512;", "b32 [%r53], 384;", errors.OutOfBounds, "not a power of two of 32 to 512"),
    "dealloc": ("b32 [%r53], 512;", "b32 [%r53], 256;", errors.OutOfBounds, "tcgen05.dealloc of 512 columns"),
    "no-columns-left": ("@%q4 tcgen05.r", f"@%q4 {ALLOC} @%q4 tcgen05.r", errors.Deadlock, "waits for 32 columns"),
    "relinquished": (BARRIER, f"@%q4 {ALLOC} {BARRIER}", errors.BarrierMisuse, "relinquish_alloc_permit"),
    "lanes": ("r52, 21;", "r52, 20;", errors.OutOfBounds, "where the warp reaches lanes"),
    "address": ("and.b32 %r52, %r52, 3;", "and.b32 %r52, %t, 3;", errors.BarrierMisuse, "differs inside the warp"),
    "partial-warp": ("r52, 0;", "r52, 0; setp.eq.u32 %q4, %t, 0;", errors.BarrierMisuse, "only part of the warp"),
    "columns": ("%r54, %r51, 0;", "%r54, %r51, 500;", errors.OutOfBounds, "not allocated"),
    "lane": ("%r54, %r51, 0;", "%r54, %r51, 1048576;", errors.OutOfBounds, "starts at lane 16"),
    "adds": ("%q3, 0, 0;", "%q3, 1, 0; add.u32 %r54, %r54, 64;", errors.Uninitialised, "adds to"),
    "load": ("[%r52+0];", "[%r52+64];", errors.Uninitialised, "tcgen05.ld of tensor memory that nothing has written"),
}


@pytest.mark.parametrize("misuse", MISUSES)
def test_misuse_of_tensor_memory(misuse):
    old, new, error, message = MISUSES[misuse]
    with pytest.raises(error, match=message):
        run_changed((old, new))


BITS = shape_bits(128, 32, "bf16")


@pytest.mark.parametrize(
    ("bits", "message"),
    [
        (BITS | 1 << 6, "no instruction descriptor"),
        (BITS | 1 << 23, "no instruction descriptor"),
        (BITS | 1 << 29, "no instruction descriptor"),
        (BITS | 1 << 2, "no instruction descriptor"),
        (BITS & ~(1 << 7), "no instruction descriptor"),  # A fp16, B bf16
        (BITS ^ 3 << 4, "no instruction descriptor"),  # int32 accumulators
        (shape_bits(128, 24, "bf16"), "no shape of 128 x 24 x 16"),
        (shape_bits(32, 32, "bf16"), "no shape of 32 x 32 x 16"),
    ],
)
def test_instruction_descriptors_that_no_mma_has(bits, message):
    with pytest.raises(errors.BadDescriptor, match=message):
        run_changed((f"%r55, {BITS};", f"%r55, {bits};"))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ("xor.b64 %d3, %d3, 0x8000400000000000;", errors.BadDescriptor, "no matrix descriptor of sm_100"),  # Hopper's
        ("or.b64 %d3, %d3, 0x2000000000000000;", errors.BadDescriptor, "no matrix descriptor"),  # code 3
        ("or.b64 %d3, %d3, 0x0002000000000000;", errors.BadDescriptor, "without a base offset"),
        (
            "or.b64 %d3, %d3, 0x0010000000000000;",
            errors.BadDescriptor,
            "no matrix descriptor",
        ),  # absolute leading offset
        ("add.u64 %d3, %d3, 8;", errors.Misaligned, "a repetition of its swizzling pattern"),
        ("add.u64 %d3, %d3, 8192;", errors.OutOfBounds, "beyond the"),
        ("add.u64 %d3, %d3, 65536;", errors.BadDescriptor, "leading dimension byte offset of 32, not 16"),
    ],
    ids=["hopper", "code", "base-offset", "absolute", "misaligned", "outside", "leading-offset"],
)
def test_matrix_descriptors(change, error, message):
    with pytest.raises(error, match=message):
        run_changed(("@%q6 tcgen05.mma", f"{change} @%q6 tcgen05.mma"))


def test_a_in_tensor_memory_is_k_major():
    with pytest.raises(errors.BadDescriptor, match="cannot be MN-major"):
        bits = shape_bits(128, 64, "bf16")
        run_changed((f"mov.u32 %r55, {bits};", f"mov.u32 %r55, {bits | 1 << 15};"), form="ts-bf16-k")


@pytest.mark.parametrize(
    "change",
    [
        ("kind::f16", "kind::tf32"),
        ("mma.cta_group::1", "mma.cta_group::2"),
        ("arrive::one.shared", "arrive::one.multicast::cluster.shared"),
        ("32x32b.x32", "32x32b.pack::16b.x32"),
        (", %q3;", ", {%r1, %r2, %r3, %r4}, %q3;"),
    ],
    ids=["tf32", "pairs", "multicast", "pack", "masks"],
)
def test_forms_that_are_not_simulated(change):
    with pytest.raises(errors.Unsupported, match="tcgen05"):
        run_changed(change)


SMEM = "mov.u32 %r60, smem;"
LOAD = BY_NAME["bulk.load"]


def load_over_the_address(before="", between="bar.sync 0;"):
    """Run a kernel whose bulk load fills the bytes that held the address of tensor memory."""
    allocation = f"""
        setp.lt.u32 %q4, %t, 32; {before}
        @%q4 tcgen05.alloc.cta_group::1.sync.aligned.b32 [%r60], 32;
        bar.sync 0; ld.shared.u32 %r51, [%r60]; {between}
    """
    body = LOAD.body.replace(SMEM, SMEM + allocation, 1)
    out = LOAD.out.copy()
    launch(body + DEALLOC.format(columns=32), *LOAD.inputs, out)
    assert np.array_equal(out, LOAD.expected)


def test_the_address_of_an_allocation_may_be_overwritten_after_a_barrier():
    """A proxy fence is not needed: Triton's kernels have none, as long as the thread has written nothing else."""
    load_over_the_address()
    with pytest.raises(errors.Race, match="read, then asynchronous write"):
        load_over_the_address(between="")
    with pytest.raises(errors.MissingFence, match=r"without a fence\.proxy\.async"):
        load_over_the_address(before="st.shared.u32 [%r60+256], 0;")


def test_counters():
    body, inputs, expected = case_of("bf16-k-mn-128")
    counters = launch(body, *inputs, np.zeros_like(expected))
    assert counters.mma_clocks == 4 * 32  # four steps of 64 columns at 2 columns a clock
    assert counters.operand_bytes == 4 * 2 * 16 * (128 + 64)
    assert counters.tensor_memory_bytes_read == counters.tensor_memory_bytes_written == 128 * 64 * 4
    assert counters.by_class()["mma"] == 4 * 4  # each of four warps issues an instruction that one thread executes
    assert "tensor memory: 32768 bytes read, 32768 written; 128 clocks of mma" in str(counters)
