"""Micro-kernels of shared memory: ldmatrix, stmatrix, cp.async and dynamic shared memory."""

from __future__ import annotations

import numpy as np

from .case import HopperCase, drain, fill


def fragments_case(instruction: str) -> HopperCase:
    """Return a case that moves four 8 x 8 matrices of 16-bit numbers between registers and swizzled 128-byte rows.

    Warp w reads or writes the 16-byte chunks 2 w and 2 w + 1 of its 16 rows.
    """
    registers = "{%r0, %r1, %r2, %r3}"
    rows = np.random.default_rng(6).integers(0, 256, 64 * 128, dtype=np.uint8)
    words = np.random.default_rng(7).integers(0, 2**32, (128, 4), dtype=np.uint32)
    body = f"""
        {fill(8192, 128)}
        shr.u32 %r10, %t, 5;
        and.b32 %r11, %t, 15;
        mad.lo.u32 %r12, %r10, 16, %r11;
        bfe.u32 %r13, %t, 4, 1;
        mad.lo.u32 %r13, %r10, 2, %r13;
        and.b32 %r14, %r12, 7;
        xor.b32 %r13, %r13, %r14;
        shl.b32 %r13, %r13, 4;
        mad.lo.u32 %r13, %r12, 128, %r13;
        mov.u32 %r60, smem;
        add.u32 %r13, %r13, %r60;
        mad.wide.u32 %d0, %t, 16, %p1;
    """
    if instruction == "stmatrix":
        body += f"""
            ld.global.v4.b32 {registers}, [%d0];
            stmatrix.sync.aligned.m8n8.x4.shared.b16 [%r13], {registers};
            bar.sync 0;
            {drain(8192, 128, 2)}
        """
        return HopperCase(instruction, body, (rows, words), np.zeros(8192, np.uint8))
    body += f"""
        {instruction}.shared.b16 {registers}, [%r13];
        st.global.v4.b32 [%d0], {registers};
    """
    name = "ldmatrix.trans" if "trans" in instruction else "ldmatrix"
    body = body.replace("fence.proxy.async.shared::cta;", "")
    return HopperCase(name, body, (rows,), np.zeros((128, 4), np.uint32), target="sm_80")


def copies_case() -> HopperCase:
    """Return a case of cp.async: 16 bytes with src-size 0, 2, ..., 16, and 4 bytes with src-size 0 or 4."""
    body = """
        mov.u32 %r60, smem;
        shl.b32 %r0, %t, 4;
        add.u32 %r1, %r0, %r60;
        cvt.u64.u32 %d0, %r0;
        add.u64 %d1, %p0, %d0;
        add.u64 %d2, %p1, %d0;
        rem.u32 %r2, %t, 9;
        shl.b32 %r2, %r2, 1;
        cp.async.cg.shared.global.L2::128B [%r1], [%d1], 16, %r2;
        cp.async.commit_group;
        and.b32 %r3, %t, 1;
        shl.b32 %r3, %r3, 2;
        cp.async.ca.shared.global [%r1+512], [%d1], 4, %r3;
        cp.async.commit_group;
        cp.async.wait_group 1;
        ld.shared.v4.b32 {%r4, %r5, %r6, %r7}, [%r1];
        st.global.v4.b32 [%d2], {%r4, %r5, %r6, %r7};
        cp.async.wait_group 0;
        ld.shared.b32 %r8, [%r1+512];
        st.global.b32 [%d2+512], %r8;
    """
    source = np.random.default_rng(8).integers(1, 2**32, 128, dtype=np.uint32)
    return HopperCase("cp.async", body, (source,), np.zeros(256, np.uint32), threads=32, target="sm_80")


# The kernel has the largest dynamic shared memory. It outputs the alignment of its address, and its last word.
DYNAMIC_BYTES = 227 * 1024
DYNAMIC_BODY = f"""
    mov.u32 %r0, dynamic;
    and.b32 %r1, %r0, 1023;
    st.global.b32 [%p0], %r1;
    st.shared.b32 [%r0+{DYNAMIC_BYTES - 4}], 7;
    ld.shared.b32 %r2, [%r0+{DYNAMIC_BYTES - 4}];
    st.global.b32 [%p0+4], %r2;
"""


CASES = [
    fragments_case("stmatrix"),
    fragments_case("ldmatrix.sync.aligned.m8n8.x4"),
    fragments_case("ldmatrix.sync.aligned.m8n8.x4.trans"),
    copies_case(),
    HopperCase("dynamic", DYNAMIC_BODY, (), np.zeros(2, np.uint32), threads=1, dynamic=DYNAMIC_BYTES),
]
