"""Micro-kernels whose expected results are literals that follow from the PTX ISA; no code computes them.

They are for forms of instructions that no kernel of another code generator confirms (evidence.py): a run on a GPU
shows whether this package understands them correctly.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

Array = np.ndarray

SHARED = ".shared .align 16 .b8 smem[1024];"  # the shared memory of every case


@dataclass(frozen=True)
class IsaCase:
    """The body of a kernel, its inputs, the initial values of its output, and the values expected after the launch."""

    name: str
    body: str
    inputs: tuple[Array, ...]
    out: Array
    expected: Array
    threads: int = 32
    blocks: int = 1
    target: str = "sm_80"
    relative: float | None = None


def _u32(*values: int) -> Array:
    return np.array(values, np.uint32)


def _u64(*values: int) -> Array:
    return np.array(values, np.uint64)


def _case(
    name: str,
    body: str,
    inputs: tuple[Array, ...],
    expected: Array,
    *,
    threads: int = 32,
    blocks: int = 1,
    target: str = "sm_80",
    relative: float | None = None,
) -> IsaCase:
    """Return a case whose output starts as zeros."""
    zeros = np.zeros_like(expected)
    return IsaCase(f"isa.{name}", body, inputs, zeros, expected, threads, blocks, target, relative)


# PTX ISA, Logic and Shift Instructions: and, or, xor and not of predicates, for the bits p = 1 and q = 2 of a thread.
# A thread stores (p and q) + 2 (p or q) + 4 (p xor q) + 8 (not p).
PREDICATES = """
    and.b32 %r0, %t, 1;
    and.b32 %r1, %t, 2;
    setp.ne.u32 %q0, %r0, 0;
    setp.ne.u32 %q1, %r1, 0;
    and.pred %q2, %q0, %q1;
    or.pred %q3, %q0, %q1;
    xor.pred %q4, %q0, %q1;
    not.pred %q5, %q0;
    selp.b32 %r2, 1, 0, %q2;
    selp.b32 %r3, 2, 0, %q3;
    selp.b32 %r4, 4, 0, %q4;
    selp.b32 %r5, 8, 0, %q5;
    add.u32 %r2, %r2, %r3;
    add.u32 %r2, %r2, %r4;
    add.u32 %r2, %r2, %r5;
    mad.wide.u32 %d0, %t, 4, %p0;
    st.global.b32 [%d0], %r2;
"""

# PTX ISA: selp returns a if the predicate is true, setp compares 16-bit integers, cvt.u32.u16 extends with zeros.
SELECTIONS = """
    mad.wide.u32 %d0, %t, 4, %p0;
    ld.global.u16 %h0, [%d0];
    ld.global.u16 %h1, [%d0+2];
    setp.eq.s16 %q0, %h0, %h1;
    setp.ne.s16 %q1, %h0, 1;
    selp.b16 %h2, %h0, %h1, %q1;
    cvt.u32.u16 %r0, %h2;
    mov.b64 %d1, 0x1122334455667788;
    mov.b64 %d2, 0x99aabbccddeeff00;
    selp.b64 %d3, %d1, %d2, %q0;
    cvt.u64.u32 %d4, %r0;
    mad.wide.u32 %d0, %t, 16, %p1;
    st.global.b64 [%d0], %d3;
    st.global.b64 [%d0+8], %d4;
"""

# PTX ISA, min: .relu clamps a negative result to 0.
MIN_RELU = """
    mad.wide.u32 %d0, %t, 8, %p0;
    ld.global.b32 %r0, [%d0];
    ld.global.b32 %r1, [%d0+4];
    min.relu.s32 %r2, %r0, %r1;
    mad.wide.u32 %d0, %t, 4, %p1;
    st.global.b32 [%d0], %r2;
"""

# PTX ISA, rcp.approx.ftz.f64: the table of special inputs, subnormal ones included; the low 32 bits of a result are 0.
RECIPROCAL = """
    mad.wide.u32 %d0, %t, 8, %p0;
    ld.global.f64 %e0, [%d0];
    rcp.approx.ftz.f64 %e1, %e0;
    mad.wide.u32 %d0, %t, 8, %p1;
    st.global.f64 [%d0], %e1;
"""
SPECIAL = _u64(0xFFF0000000000000, 0x800FFFFFFFFFFFFF, 0x8000000000000000, 0, 0x000FFFFFFFFFFFFF, 0x7FF0000000000000)
RECIPROCALS = _u64(
    0x8000000000000000, 0xFFF0000000000000, 0xFFF0000000000000, 0x7FF0000000000000, 0x7FF0000000000000, 0
)

# PTX ISA, vote: .any is true if the predicate is true for any thread of the warp, here for thread 37 alone.
ANY = """
    setp.eq.u32 %q0, %t, 37;
    vote.sync.any.pred %q1, %q0, 0xffffffff;
    selp.b32 %r0, 1, 0, %q1;
    mad.wide.u32 %d0, %t, 4, %p0;
    st.global.b32 [%d0], %r0;
"""

# PTX ISA, vectors: elements lie at ascending addresses, little-endian. Thread t gets the 16 bytes of thread 31 - t
# through shared memory, in two steps of 64 bits.
VECTORS = """
    mov.u32 %r10, smem;
    mad.wide.u32 %d0, %t, 16, %p0;
    ld.global.v2.b64 {%d1, %d2}, [%d0];
    mad.lo.u32 %r11, %t, 16, %r10;
    st.shared.v2.b64 [%r11], {%d1, %d2};
    bar.warp.sync 0xffffffff;
    sub.u32 %r12, 31, %t;
    mad.lo.u32 %r11, %r12, 16, %r10;
    ld.shared.v2.b64 {%d3, %d4}, [%r11];
    mad.lo.u32 %r11, %t, 8, %r10;
    bar.warp.sync 0xffffffff;
    st.shared.b64 [%r11], %d3;
    st.shared.b64 [%r11+256], %d4;
    ld.shared.b64 %d5, [%r11];
    ld.shared.b64 %d6, [%r11+256];
    mov.b64 {%r0, %r1}, %d5;
    mov.b64 {%r2, %r3}, %d6;
    mad.wide.u32 %d0, %t, 16, %p1;
    st.global.v4.b32 [%d0], {%r0, %r1, %r2, %r3};
"""

QUARTERS = """
    cvta.to.global.u64 %d1, %p0;
    mad.wide.u32 %d0, %t, 8, %d1;
    ld.global.v4.b16 {%h0, %h1, %h2, %h3}, [%d0];
    cvt.u32.u16 %r0, %h0;
    cvt.u32.u16 %r1, %h1;
    cvt.u32.u16 %r2, %h2;
    cvt.u32.u16 %r3, %h3;
    mad.wide.u32 %d0, %t, 16, %p1;
    st.global.v4.b32 [%d0], {%r0, %r1, %r2, %r3};
"""

# PTX ISA, atom and red: 32 threads add their index, 1.0, and the vector 1.0 to 4.0. Thread 0 then adds 5 to 7, and
# stores the old value that atom returns.
ATOMICS = """
    atom.global.add.u32 %r0, [%p0], %t;
    atom.global.add.f32 %f0, [%p0+4], 0f3F800000;
    setp.ne.u32 %q0, %t, 0;
    @%q0 exit;
    atom.global.add.u32 %r1, [%p0+8], 5;
    st.global.b32 [%p0+12], %r1;
"""
VECTOR_ADD = """
    mov.f32 %f0, 0f3F800000;
    mov.f32 %f1, 0f40000000;
    mov.f32 %f2, 0f40400000;
    mov.f32 %f3, 0f40800000;
    red.global.add.v4.f32 [%p0], {%f0, %f1, %f2, %f3};
"""

# PTX ISA, Memory Consistency Model: what block 0 has written before its release is read after the acquire of block 1.
MESSAGE = """
    setp.ne.u32 %q0, %t, 0;
    @%q0 exit;
    setp.ne.u32 %q1, %block, 0;
    @%q1 bra RECEIVE;
    st.global.b32 [%p0], 42;
    st.release.gpu.global.u32 [%p0+4], 1;
    exit;
RECEIVE:
    ld.acquire.gpu.global.u32 %r0, [%p0+4];
    setp.eq.u32 %q2, %r0, 0;
    @%q2 bra RECEIVE;
    ld.global.b32 %r1, [%p0];
    st.global.b32 [%p0+8], %r1;
"""

ISA_CASES = [
    _case("predicates", PREDICATES, (), _u32(8, 6, 14, 3), threads=4),
    _case(
        "selections",
        SELECTIONS,
        (np.array([[7, 7], [1, 65535], [32768, 2]], np.uint16),),
        _u64(0x1122334455667788, 7, 0x99AABBCCDDEEFF00, 65535, 0x99AABBCCDDEEFF00, 32768),
        threads=3,
    ),
    _case(
        "min.relu.s32",
        MIN_RELU,
        (np.array([[-5, 3], [3, -5], [3, 4], [0, 9], [-(2**31), 2**31 - 1], [-1, -1]], np.int32),),
        np.array([0, 0, 3, 0, 0, 0], np.int32),
        threads=6,
        target="sm_90",
    ),
    _case("rcp.approx.ftz.f64.special", RECIPROCAL, (SPECIAL,), RECIPROCALS, threads=6),
    _case(
        "rcp.approx.ftz.f64",
        RECIPROCAL,
        (np.array([1.0, -2.0, 3.0, 10.0, 1e300]),),
        np.array([1.0, -0.5, 0.3333333333333333, 0.1, 1e-300]),
        threads=5,
        relative=2.0**-20,
    ),
    _case("vote.any", ANY, (), np.repeat(_u32(0, 1), 32), threads=64),
    _case(
        "vectors",
        VECTORS,
        (np.arange(128, dtype=np.uint32),),
        _u32(*[4 * row + i for row in range(31, -1, -1) for i in range(4)]),
    ),
    _case("quarters", QUARTERS, (_u64(0x0004000300020001, 0xFFFF800000000007),),
          _u32(1, 2, 3, 4, 7, 0, 0x8000, 0xFFFF), threads=2),
    IsaCase("isa.atomics", ATOMICS, (), _u32(0, 0, 7, 0), _u32(496, 0x42000000, 12, 7)),
    _case("red.v4.f32", VECTOR_ADD, (), np.array([32, 64, 96, 128], np.float32), target="sm_90"),
    _case("message", MESSAGE, (), _u32(42, 1, 42), blocks=2),
]  # fmt: skip
