"""wgmma against the layouts of the PTX ISA 9.2, transcribed; and each kind of misuse.

The layout functions are the documentation's tables, in elements; no code of the simulator is used.
"""

import re

import numpy as np
import pytest
from matrix_layouts import DTYPES, matrix
from micro import run

from cupy_flash.measure.checks.hopper import BY_NAME
from cupy_flash.measure.checks.hopper.wgmma import WGMMA_FORMS, Operand, wgmma_case
from cupy_flash.simulator import errors

ORDERS = ["early", "late", "random"]


def accumulator(thread, i):
    """Return (row, column) of element i of a thread in matrix D (PTX ISA, register fragments of wgmma)."""
    warp, lane = thread // 32, thread % 32
    return warp * 16 + lane // 4 + 8 * (i // 2 % 2), i // 4 * 8 + lane % 4 * 2 + i % 2


def a_16_bit(thread, i):
    """Return (row, column) of element i of a thread in matrix A of .f16 or .bf16 (PTX ISA, as above)."""
    warp, lane = thread // 32, thread % 32
    return warp * 16 + lane // 4 + 8 * (i // 2 % 2), lane % 4 * 2 + i % 2 + 8 * (i // 4)


def a_8_bit(thread, i):
    """Return (row, column) of element i of a thread in matrix A of .e4m3 or .e5m2 (PTX ISA, as above)."""
    warp, lane = thread // 32, thread % 32
    return warp * 16 + lane // 4 + 8 * (i // 4 % 2), lane % 4 * 4 + i % 4 + 16 * (i // 8)


def a_32_bit(thread, i):
    """Return (row, column) of element i of a thread in matrix A of .tf32 (PTX ISA, as above)."""
    warp, lane = thread // 32, thread % 32
    return warp * 16 + lane // 4 + 8 * (i % 2), lane % 4 + 4 * (i // 2)


def a_from_registers(words, type_):
    """Return matrix A (64, depth), read from the registers of all threads, (128, 4 words per k step)."""
    layout = {1: a_8_bit, 2: a_16_bit, 4: a_32_bit}[np.dtype(DTYPES[type_]).itemsize]
    per_step = 32 // np.dtype(DTYPES[type_]).itemsize
    elements = words.view(np.uint8).view(DTYPES[type_])
    steps = words.shape[1] // 4
    values = np.zeros((64, steps * per_step))
    for thread in range(128):
        for step in range(steps):
            for i in range(per_step // 2):
                row, k = layout(thread, i)
                values[row, step * per_step + k] = elements[thread, step * per_step // 2 + i]
    return values


def result(case, **options):
    out = case.out.copy()
    run(case.body, *case.inputs, out, threads=case.threads, blocks=case.blocks, **(case.options | options))
    return out


# Forms that no kernel of this package uses: the tensor cores multiply tf32 from K-major matrices only.
TF32_FORMS = {
    **{
        f"tf32-{swizzle}": (Operand(64, "tf32", True, swizzle), Operand(24, "tf32", True, swizzle), "", {})
        for swizzle in (16, 32, 64, 128)
    },
    "rs-tf32": (None, Operand(64, "tf32"), "tf32", {}),
    "tf32-minus": (Operand(64, "tf32"), Operand(256, "tf32"), "", {"sign": -1, "adds": False}),
}


@pytest.mark.parametrize("form", WGMMA_FORMS | TF32_FORMS)
def test_wgmma_multiplies_what_the_documented_layouts_hold(form):
    a, b, type_a, options = (WGMMA_FORMS | TF32_FORMS)[form]
    case = BY_NAME[f"wgmma.{form}"] if form in WGMMA_FORMS else wgmma_case(form, a, b, type_a, **options)
    image, before, *registers = case.inputs
    b_at = 0 if a is None else -(-a.bytes // 1024) * 1024
    apart = -(-(b_at + b.bytes) // 1024) * 1024
    expected = np.zeros_like(before)
    for first in range(0, case.threads, 128):
        operands_image = image[first // 128 * apart :]
        left = matrix(operands_image, a) if a else a_from_registers(registers[0], type_a)
        product = options.get("sign", 1) * left @ matrix(operands_image[b_at:], b).T
        for thread in range(128):
            for i in range(before.shape[1]):
                expected[first + thread, i] = product[accumulator(thread, i)]
    expected += options.get("adds", True) * before
    for order in ORDERS:
        assert np.array_equal(result(case, order=order), expected)


@pytest.mark.parametrize("form", ["tf32-128", "rs-tf32"])
def test_the_low_bits_of_tf32_are_ignored(form):
    a, b, type_a, options = TF32_FORMS[form]
    case = wgmma_case(form, a, b, type_a, **options)
    image, before, *registers = case.inputs
    noise = np.random.default_rng(0).integers(0, 1 << 13, image.size // 4, np.uint32)
    noisy = [(x.view(np.uint32) | noise[: x.nbytes // 4].reshape(x.view(np.uint32).shape)) for x in (image, *registers)]
    out = case.out.copy()
    run(case.body, noisy[0].view(np.uint8), before, *noisy[1:], out, threads=128, **case.options)
    assert np.array_equal(out, result(case)) and out.any()


@pytest.mark.parametrize(
    "planted",
    [
        ("m64n24k8", "m64n24k16"),
        ("tf32.tf32", "tf32.bf16"),
        ("%d3, %q4, 1, 1;", "%d3, %q4, 1, 1, 0, 0;"),
        ("n24k8", "n20k8"),
    ],
    ids=["depth", "types", "transposed", "columns"],
)
def test_forms_of_tf32_that_do_not_exist(planted):
    a, b, type_a, options = TF32_FORMS["tf32-128"]
    with pytest.raises(errors.Unsupported, match="wgmma"):
        run_changed(*planted, wgmma_case("tf32", a, b, type_a, **options))


@pytest.mark.parametrize("order", ORDERS)
def test_two_groups_in_flight(order):
    case = BY_NAME["wgmma.in-flight"]
    image, words = case.inputs
    operands = Operand(64, "bf16"), Operand(64, "bf16"), Operand(64, "bf16", False)
    q, k, v = (matrix(image[8192 * n :], operand) for n, operand in enumerate(operands))
    products = q[:, :16] @ k[:, :16].T, 1 + a_from_registers(words, "bf16") @ v[:, :16].T
    expected = [[product[accumulator(t, i)] for product in products for i in range(32)] for t in range(128)]
    assert np.array_equal(result(case, order=order), np.array(expected, np.float32))


def sums_of_fp8(before, one, others):
    """Return `before` + A B by four wgmmas; each row of A holds `one` once and `others` 127 times, B is all ones."""
    case = BY_NAME["wgmma.rs-e4m3-k"]
    a = np.full((128, 64), others, DTYPES["e4m3"])
    a[::4, :8:4] = one  # k = 0 of rows r and r + 8
    image = np.ones(len(case.inputs[0]), DTYPES["e4m3"]).view(np.uint8)
    before = np.broadcast_to(np.float32(before), case.inputs[1].shape).copy()
    out = case.out.copy()
    run(case.body, image, before, a.view(np.uint32), out, threads=128, **case.options)
    return out


def test_sums_of_fp8_keep_14_bits():
    """Two published experiments on the precision of the fp8 accumulator.

    SageAttention2: with zero products the accumulator itself is truncated to 13 fraction bits. DeepSeek-V3: products
    are truncated relative to the largest one.
    """
    rng = np.random.default_rng(0)
    before = rng.normal(size=BY_NAME["wgmma.rs-e4m3-k"].inputs[1].shape).astype(np.float32)
    assert np.array_equal(sums_of_fp8(before, 0, 0).view(np.uint32), before.view(np.uint32) & 0xFFFFFC00)
    assert np.all(sums_of_fp8(0, 256, 2**-5) == 256 + 127 * 2**-5)
    assert np.all(sums_of_fp8(0, 256, 2**-6) == 256)
    assert np.all(sums_of_fp8(256, 2**-6, 2**-6) == 256)
    assert np.all(sums_of_fp8(-256, -(2**-6), 2**-6) == -256)  # sums are truncated towards 0
    assert np.all(sums_of_fp8(0, 2**-6, 2**-6) == 2)


# ---- misuse

CASE = BY_NAME["wgmma.f16-minus"]


def run_changed(old, new, case=CASE, remove=""):
    """Run the kernel of a case with a planted bug."""
    assert old in case.body and remove in case.body
    body = case.body.replace(old, new, 1).replace(remove, "", 1)
    out = case.out.copy()
    run(body, *case.inputs, out, threads=128, **case.options)


WAIT = "wgmma.wait_group.sync.aligned 0;"


@pytest.mark.parametrize("order", ORDERS)
def test_accumulator_read_before_the_wait(order):
    with pytest.raises(errors.PendingRegister, match="used before its wgmma.wait_group") as caught:
        run(CASE.body.replace(WAIT, ""), *CASE.inputs, CASE.out.copy(), threads=128, order=order, **CASE.options)
    assert "wgmma.mma_async" in str(caught.value) and "st.global.f32" in str(caught.value)


def test_accumulator_written_in_flight():
    with pytest.raises(errors.PendingRegister, match="used before its wgmma.wait_group"):
        run_changed(WAIT, f"mov.f32 %f3, 0f00000000; {WAIT}")


def test_wait_for_too_few_groups():
    with pytest.raises(errors.PendingRegister):
        run_changed(WAIT, "wgmma.wait_group.sync.aligned 1;")


def test_wgmma_that_is_not_committed():
    with pytest.raises(errors.PendingRegister):
        run_changed("wgmma.commit_group.sync.aligned;", "")


def test_exit_without_a_wait():
    body = CASE.body[: CASE.body.index(WAIT)]
    with pytest.raises(errors.PendingRegister, match="no wgmma.wait_group before the kernel ends"):
        run(body, *CASE.inputs, CASE.out.copy(), threads=128, **CASE.options)


def test_missing_wgmma_fence():
    with pytest.raises(errors.MissingFence, match=r"no wgmma\.fence"):
        run_changed("wgmma.fence.sync.aligned;", "")


def test_fence_before_the_last_use_of_a_register():
    with pytest.raises(errors.MissingFence, match=r"use: +PTX line \d+: .*add\.f32 %f0, %f0, %f0;"):
        run_changed("wgmma.fence.sync.aligned;", "wgmma.fence.sync.aligned; add.f32 %f0, %f0, %f0;")


def test_first_wgmma_needs_a_fence_too():
    with pytest.raises(errors.MissingFence, match=r"no wgmma\.fence"):
        run_changed("wgmma.fence.sync.aligned;", "", BY_NAME["wgmma.f16-overwrites"])


def test_registers_of_a_in_flight():
    case = BY_NAME["wgmma.rs-f16-k"]
    with pytest.raises(errors.PendingRegister):
        run_changed(WAIT, f"mov.b32 %r1, 0; {WAIT}", case)
    run_changed(WAIT, f"{WAIT} mov.b32 %r1, 0;", case)


def test_accumulators_of_another_wgmma_in_flight():
    registers = re.search(r"\{(%f0, .*?)\}", CASE.body)[1]
    turned = ", ".join(reversed(registers.split(", ")))
    second = CASE.body.rindex(f"{{{registers}}}")
    body = CASE.body[:second] + f"{{{turned}}}" + CASE.body[second + len(registers) + 2 :]
    with pytest.raises(errors.PendingRegister, match="another one in flight"):
        run(body, *CASE.inputs, CASE.out.copy(), threads=128, **CASE.options)


def test_matrices_written_without_a_proxy_fence():
    with pytest.raises(errors.MissingFence, match=r"without a fence\.proxy\.async") as caught:
        run_changed("fence.proxy.async.shared::cta;", "")
    assert "st.shared.v4.b32" in str(caught.value) and "wgmma.mma_async" in str(caught.value)


def test_proxy_fence_before_the_writes():
    with pytest.raises(errors.MissingFence, match=r"without a fence\.proxy\.async"):
        run_changed(
            "mov.u32 %r60, smem;", "fence.proxy.async; mov.u32 %r60, smem;", remove="fence.proxy.async.shared::cta;"
        )


def test_proxy_fence_after_the_barrier():
    run_changed("fence.proxy.async.shared::cta;\n        bar.sync 0;", "bar.sync 0; fence.proxy.async.shared::cta;")


def test_matrices_written_by_others_without_a_barrier():
    with pytest.raises(errors.Race, match="write, then asynchronous read"):
        run_changed("fence.proxy.async.shared::cta;\n        bar.sync 0;", "fence.proxy.async.shared::cta;")


def test_matrices_that_a_copy_still_fills():
    fence = "fence.proxy.async.shared::cta;\n        bar.sync 0;"
    copy = "bar.sync 0; setp.eq.u32 %q0, %t, 0; @%q0 cp.async.cg.shared.global [%r60], [%p0], 16; {}" + fence
    run_changed(fence, copy.format("cp.async.wait_all;"))
    with pytest.raises(errors.PendingCopy, match="before the wait for the cp.async that fills it"):
        run_changed(fence, copy.format(""))


OVERWRITE = "mov.u32 %r30, smem; mad.lo.u32 %r30, %t, 4, %r30; st.shared.b32 [%r30], 0;"


@pytest.mark.parametrize("order", ORDERS)
def test_matrices_overwritten_in_flight(order):
    body = CASE.body.replace(WAIT, f"{OVERWRITE} {WAIT}")
    with pytest.raises(errors.PendingCopy, match="without a wait for the instruction that multiplies it"):
        run(body, *CASE.inputs, CASE.out.copy(), threads=128, order=order, **CASE.options)
    run_changed(WAIT, f"{WAIT} {OVERWRITE}")


def test_uninitialised_matrices():
    with pytest.raises(errors.Uninitialised, match="asynchronous read"):
        run_changed(f"setp.ge.u32 %q7, %r61, {len(CASE.inputs[0])};", "setp.ge.u32 %q7, %r61, 512;")


def test_matrix_outside_shared_memory():
    with pytest.raises(errors.OutOfBounds, match="wgmma reaches beyond"):
        run_changed("add.u32 %r60, %r60, 0;", "add.u32 %r60, %r60, 39936;")


def test_matrix_that_is_not_aligned_to_its_swizzle():
    with pytest.raises(errors.Misaligned, match="128-byte swizzling"):
        run_changed("add.u32 %r60, %r60, 0;", "add.u32 %r60, %r60, 128;")


def test_descriptors_differ_in_a_warpgroup():
    with pytest.raises(errors.BarrierMisuse, match="descriptor of A differs"):
        run_changed("bfe.u32 %r60, %r60, 4, 14;", "bfe.u32 %r60, %r60, 4, 14; add.u32 %r60, %r60, %t;")


def test_part_of_a_warpgroup():
    with pytest.raises(errors.Deadlock, match="wait for the other warps of its warpgroup"):
        run_changed("wgmma.fence", "setp.ge.u32 %q0, %t, 96; @%q0 exit; wgmma.fence")


def test_block_without_a_whole_warpgroup():
    with pytest.raises(errors.Deadlock):
        run(CASE.body, *CASE.inputs, CASE.out.copy(), threads=96, **CASE.options)
