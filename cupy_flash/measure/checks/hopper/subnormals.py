"""Micro-kernels of subnormal numbers: the sums and powers that flush them to zero."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from .case import HopperCase

# Adds the arrays at %p0 and %p1 by red, red.v4, atom, red in shared memory and a bulk reduction, some of which flush
# subnormal terms and sums to zero.
SUBNORMAL_SUMS_BODY = """
    mad.wide.u32 %d0, %t, 4, %p0;
    ld.global.f32 %f0, [%d0];
    mad.wide.u32 %d1, %t, 4, %p1;
    red.global.add.f32 [%d1], %f0;
    setp.ge.u32 %q0, %t, 8;
    @%q0 bra ATOMIC;
    mad.wide.u32 %d2, %t, 16, %p0;
    ld.global.v4.f32 {%f4, %f5, %f6, %f7}, [%d2];
    mad.wide.u32 %d3, %t, 16, %p1;
    red.global.add.v4.f32 [%d3+128], {%f4, %f5, %f6, %f7};
ATOMIC:
    atom.global.add.f32 %f1, [%d1+256], %f0;
    ld.global.f32 %f2, [%d1+384];
    mov.u32 %r60, smem;
    mad.lo.u32 %r61, %t, 4, %r60;
    st.shared.f32 [%r61], %f2;
    red.shared.add.f32 [%r61], %f0;
    ld.shared.f32 %f3, [%r61];
    st.global.f32 [%d1+384], %f3;
    st.shared.f32 [%r61+128], %f0;
    fence.proxy.async.shared::cta;
    bar.warp.sync -1;
    setp.ne.u32 %q1, %t, 0;
    @%q1 exit;
    add.u32 %r62, %r60, 128;
    add.u64 %d4, %p1, 512;
    cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%d4], [%r62], 128;
    cp.async.bulk.commit_group;
    cp.async.bulk.wait_group 0;
"""


def subnormal_sums_case() -> HopperCase:
    """Return a case with normal and subnormal sums of normal and subnormal terms of either sign, all of them exact."""
    old = np.array([0.0, -0.0, 0.25, -0.25, 1.0, -1.5, 2.0**-23, 4.0]) * 2.0**-126
    new = np.array([0.25, -0.5, 1.0, 1.5]) * 2.0**-126
    old, new = np.repeat(old, 4).astype(np.float32), np.tile(new, 8).astype(np.float32)
    return HopperCase("subnormals.add", SUBNORMAL_SUMS_BODY, (new,), np.tile(old, (5, 1)), threads=32)


# Computes 2^x of both halves of a bf16 pair, and outputs which results are zero: bit 0 for the lower half, bit 1 for
# the upper half.
SUBNORMAL_POWERS_BODY = """
    mad.wide.u32 %d0, %t, 4, %p0;
    ld.global.b32 %r0, [%d0];
    ex2.approx.ftz.bf16x2 %r0, %r0;
    and.b32 %r1, %r0, 0x7FFF;
    and.b32 %r2, %r0, 0x7FFF0000;
    setp.eq.u32 %q0, %r1, 0;
    setp.eq.u32 %q1, %r2, 0;
    selp.b32 %r3, 1, 0, %q0;
    selp.b32 %r4, 2, 0, %q1;
    or.b32 %r3, %r3, %r4;
    mad.wide.u32 %d1, %t, 4, %p1;
    st.global.b32 [%d1], %r3;
"""


def subnormal_powers_case() -> HopperCase:
    """Return a case with exponents from -95 to -157, without -126: approximations may differ at the smallest normal."""
    exponents = -(95 + 2 * np.arange(32)).astype(ml_dtypes.bfloat16)
    pairs = np.stack([exponents, exponents[::-1]], axis=1).view(np.uint32)
    return HopperCase("subnormals.ex2", SUBNORMAL_POWERS_BODY, (pairs,), np.zeros(32, np.uint32), threads=32)


CASES = [subnormal_sums_case(), subnormal_powers_case()]
