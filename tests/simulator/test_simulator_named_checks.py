"""The named checks: each finds its planted bug in every order, and is switched off by its name alone."""

import numpy as np
import pytest
import tcgen05_kernels
from micro import run

from cupy_flash.measure.checks.blackwell.case import DEALLOC, FENCE_BEFORE, BlackwellCase
from cupy_flash.measure.checks.blackwell.products import COMMIT
from cupy_flash.measure.checks.hopper import BY_NAME
from cupy_flash.measure.checks.hopper.case import HopperCase, wait
from cupy_flash.measure.checks.hopper.wgmma import Operand
from cupy_flash.simulator import CHECKS, UNENFORCED, errors

LOAD, STORE, WGMMA = BY_NAME["load.2d"], BY_NAME["store.2d"], BY_NAME["wgmma.f16-minus"]
REGISTERS = BY_NAME["setmaxnreg"]
SUMS = HopperCase(
    "sums", "mad.wide.u32 %d0, %t, 4, %p1; red.global.add.f32 [%d0], 0f3F800000;", (np.zeros(1, np.uint32),),
    np.zeros(32, np.float32), threads=32, blocks=4,
)  # fmt: skip
TCGEN05 = BlackwellCase("tcgen05", *tcgen05_kernels.case_of("overwrites"))
DECREASE = "setmaxnreg.dec.sync.aligned.u32 24;"
FENCE = "@%q6 fence.mbarrier_init.release.cluster;"
WORDS = "mov.u32 %r60, smem; mad.lo.u32 %r61, %t, 4, %r60; {} xor.b32 %r62, %r61, 128; ld.shared.b32 %r0, [%r62]; {}"
WRITE = "st.shared.b32 [%r61], %t;"
TWO_WARPS = {"threads": 64, **WGMMA.options}


def without(case, *removed):
    """Return the kernel of a case without some of its instructions."""
    body = case.body
    for text in removed:
        assert text in body
        body = body.replace(text, "")
    return case, body


def changed(case, old, new):
    """Return the kernel of a case with another text in its body."""
    assert old in case.body
    return case, case.body.replace(old, new)


def with_leading_offset(case, operand, leading):
    """Return the kernel of a case with another leading dimension byte offset in the descriptors of an operand."""
    changed = operand.constant & ~(0x3FFF << 16) | leading >> 4 << 16
    assert str(operand.constant) in case.body
    return case, case.body.replace(str(operand.constant), str(changed))


# name of a check -> (case whose arrays and options are used, the body with the bug)
PLANTED = {
    "race": (None, WORDS.format(WRITE + "bar.sync 0;", WRITE)),
    "uninitialised": (None, WORDS.format("", "")),
    "proxy-fence": without(WGMMA, "fence.proxy.async.shared::cta;"),
    "wgmma-fence": without(WGMMA, "wgmma.fence.sync.aligned;"),
    "wgmma-registers": without(WGMMA, "wgmma.wait_group.sync.aligned 0;"),
    "early-exit": (LOAD, LOAD.body[: LOAD.body.index(wait().strip())]),
    # Only blocks that synchronise are checked, because they are meant to fix the order of their sums.
    "float-order": (SUMS, SUMS.body + "ld.acquire.gpu.global.b32 %r0, [%p0];"),
    "setmaxnreg-aligned": changed(
        REGISTERS, DECREASE, f"setp.lt.u32 %q1, %t, 32; @%q1 bra APART; {DECREASE} bra DONE; APART: {DECREASE}"
    ),
    "mbarrier-init-fence": without(LOAD, FENCE),
    "bulk-read-wait": without(STORE, "cp.async.bulk.wait_group 0;"),
    "tcgen05-fence": without(TCGEN05, FENCE_BEFORE),
    "commit-wait": (
        TCGEN05,
        TCGEN05.body.replace(DEALLOC.format(columns=512), f"{DEALLOC.format(columns=512)} {COMMIT}"),
    ),
    "kmajor-lbo": with_leading_offset(WGMMA, Operand(16, "f16"), 1024),
}


def result(case, body, **options):
    if case is None:
        return run(body, **TWO_WARPS, **options)
    out = case.out.copy()
    options = case.options | options
    run(body, *case.inputs, out, threads=case.threads, blocks=case.blocks, maps=case.maps, **options)
    return out


def test_every_named_check_has_a_planted_bug():
    assert PLANTED.keys() == CHECKS.keys()


@pytest.mark.parametrize("order", ["early", "late", "random"])
@pytest.mark.parametrize("name", PLANTED)
def test_a_check_is_switched_off_by_its_name_alone(name, order):
    case, body = PLANTED[name]
    for unchecked in (), CHECKS.keys() - {name}:
        with pytest.raises(errors.SimulationError, match=f"\n  check: {name}$"):
            result(case, body, order=order, unchecked=unchecked)
    for unchecked in {name}, CHECKS:
        out = result(case, body, order=order, unchecked=unchecked)
    if name in UNENFORCED:
        assert np.array_equal(out, result(case, case.body))


def test_the_checks_that_other_code_generators_do_not_need():
    hopper = {"float-order", "setmaxnreg-aligned", "mbarrier-init-fence", "bulk-read-wait", "kmajor-lbo"}
    assert hopper | {"tcgen05-fence", "commit-wait"} == UNENFORCED


@pytest.mark.parametrize("unchecked", [["race", "lbo"], "race", [False]], ids=["one", "string", "type"])
def test_unknown_check(unchecked):
    with pytest.raises(ValueError, match="not among the named checks race, uninitialised, .*, kmajor-lbo$"):
        run("", unchecked=unchecked)


@pytest.mark.parametrize("swizzle", [128, 64, 32])
def test_a_leading_offset_is_reported_only_where_a_gpu_ignores_it(swizzle):
    """Only K-major operands without swizzle, and MN-major ones, need the leading offset."""
    case = BY_NAME[f"wgmma.bf16-k-k-{swizzle}"]
    for leading in 0, 8 * swizzle:
        planted = with_leading_offset(case, Operand(64, "bf16", True, swizzle), leading)
        with pytest.raises(
            errors.BadDescriptor, match=f"with {swizzle}-byte swizzle has .* offset of {leading}, not 16"
        ):
            result(*planted)
        assert np.array_equal(result(*planted, unchecked=UNENFORCED), result(case, case.body))
    for name in "wgmma.bf16-k-k-16", f"wgmma.bf16-mn-mn-{swizzle}":
        operand = Operand(64, "bf16", "mn" not in name, 16 if "16" in name[-2:] else swizzle)
        assert operand.strides[0] != 16
        result(BY_NAME[name], BY_NAME[name].body)


def test_only_the_initialising_thread_may_fence():
    """PTX ISA, fence: .mbarrier_init applies to the mbarriers that the same thread has initialised."""
    body = LOAD.body.replace(FENCE, FENCE.replace("@%q6", "@!%q6"))
    with pytest.raises(errors.MissingFence, match=r"no fence\.mbarrier_init"):
        result(LOAD, body)
