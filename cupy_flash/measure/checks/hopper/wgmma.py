"""Micro-kernels of wgmma: layouts in shared memory, A in registers, dtypes, column counts and two groups in flight."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from .case import HopperCase, fill

_TYPES = {
    "f16": np.float16,
    "bf16": ml_dtypes.bfloat16,
    "tf32": np.float32,
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
}


@dataclass(frozen=True)
class Operand:
    """A matrix (rows, depth) in shared memory, K-major or MN-major; swizzle is 128, 64, 32, or 16 for none."""

    rows: int
    type: str
    k_major: bool = True
    swizzle: int = 128

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return np.dtype(_TYPES[self.type]).itemsize

    @property
    def steps(self) -> int:
        """Number of instructions along K, each of which reads 32 bytes of a row."""
        return max(self.swizzle // 32, 1) if self.k_major or self.swizzle == 128 else 2

    @property
    def depth(self) -> int:
        """Number of elements along K."""
        return self.steps * 32 // self.itemsize

    @property
    def strides(self) -> tuple[int, int]:
        """The (leading, stride) byte offsets of the descriptor; tiles of 8 rows x `swizzle` bytes are contiguous."""
        if self.k_major:
            # Without a swizzle the two halves of the depth are stored one after the other.
            return (8 * 16 * self.rows // 8, 128) if self.swizzle == 16 else (16, 8 * self.swizzle)
        groups = self.depth // 8
        return (128, 128 * groups) if self.swizzle == 16 else (8 * self.swizzle * groups, 8 * self.swizzle)

    @property
    def step_bytes(self) -> int:
        """Byte offset from the matrix of one instruction to that of the next."""
        if self.k_major:
            return 32
        leading, stride = self.strides
        return 2 * (leading if self.swizzle == 16 else stride)

    @property
    def bytes(self) -> int:
        """Size in bytes, rounded up to whole tiles."""
        width = self.swizzle // self.itemsize
        rows = self.rows if self.k_major else -(-self.rows // width) * width
        return rows * self.depth * self.itemsize

    @property
    def constant(self) -> int:
        """The bits of the descriptor other than its address."""
        leading, stride = self.strides
        return leading >> 4 << 16 | stride >> 4 << 32 | {16: 0, 128: 1, 64: 2, 32: 3}[self.swizzle] << 62


def descriptor(register: str, offset: int, constant: int, apart: int = 0) -> str:
    """Return PTX that computes the descriptor of a warpgroup's matrix, at smem + offset + warpgroup index * apart."""
    return f"""
        mov.u32 %r60, smem;
        shr.u32 %r61, %t, 7;
        mad.lo.u32 %r60, %r61, {apart}, %r60;
        add.u32 %r60, %r60, {offset};
        bfe.u32 %r60, %r60, 4, 14;
        cvt.u64.u32 {register}, %r60;
        or.b64 {register}, {register}, {constant};
    """


def wgmma_text(types: str, columns: int, a: str, b: str, *, flags: str, adds: str = "%q4") -> str:
    """Return the PTX of one wgmma instruction."""
    depth = 32 // np.dtype(_TYPES[types.split(".")[1]]).itemsize
    accumulators = ", ".join(f"%f{i}" for i in range(columns // 2))
    return (
        f"wgmma.mma_async.sync.aligned.m64n{columns}k{depth}.f32.{types} {{{accumulators}}}, {a}, {b}, {adds}, {flags};"
    )


def wgmma_body(a: Operand | None, b: Operand, type_a: str, *, sign: int = 1, adds: bool = True, groups: int = 1) -> str:
    """Return the body of a kernel that computes D = C + A B over the whole depth.

    %p0 is the image of A and B in shared memory; %p1 is C, (128, columns / 2); %p2 is A in registers as words
    (128, 4 steps), if A is None; the last pointer is D. Each of `groups` warpgroups has matrices of its own.
    """
    columns, b_at = b.rows, 0 if a is None else -(-a.bytes // 1024) * 1024
    apart = -(-(b_at + b.bytes) // 1024) * 1024
    lines = [fill(groups * apart, groups * 128), f"mad.wide.u32 %d0, %t, {2 * columns}, %p1;"]
    if adds:
        lines += [f"ld.global.f32 %f{i}, [%d0+{4 * i}];" for i in range(columns // 2)]
    if a is None:
        lines.append(f"mad.wide.u32 %d1, %t, {16 * b.steps}, %p2;")
        lines += [f"ld.global.b32 %r{i}, [%d1+{4 * i}];" for i in range(4 * b.steps)]
    lines.append("wgmma.fence.sync.aligned;")
    for step in range(b.steps):
        lines.append(f"setp.eq.u32 %q4, {1 if adds or step else 0}, 1;")
        flags = f"{sign}, 1"
        if a is not None:
            lines.append(descriptor("%d2", step * a.step_bytes, a.constant, apart))
            flags += f", {int(not a.k_major)}" if a.itemsize == 2 else ""
        flags += f", {int(not b.k_major)}" if b.itemsize == 2 else ""
        lines.append(descriptor("%d3", b_at + step * b.step_bytes, b.constant, apart))
        left = "%d2" if a else "{" + ", ".join(f"%r{4 * step + i}" for i in range(4)) + "}"
        lines.append(wgmma_text(f"{type_a}.{b.type}", columns, left, "%d3", flags=flags))
    lines += ["wgmma.commit_group.sync.aligned;", "wgmma.wait_group.sync.aligned 0;"]
    lines.append(f"mad.wide.u32 %d0, %t, {2 * columns}, %p{2 if a else 3};")
    lines += [f"st.global.f32 [%d0+{4 * i}], %f{i};" for i in range(columns // 2)]
    return "\n    ".join(lines)


def random_bytes(type_: str, size: int, rng: np.random.Generator) -> npt.NDArray[np.uint8]:
    """Return `size` bytes of random small integers, whose sums are exact in any order."""
    dtype = np.dtype(_TYPES[type_])
    return rng.integers(-3, 4, size // dtype.itemsize).astype(dtype).view(np.uint8)


def wgmma_case(
    name: str, a: Operand | None, b: Operand, type_a: str = "", *, groups: int = 1, **options: Any
) -> HopperCase:
    """Return the case D = C + A B for random matrices in the given layouts."""
    rng = np.random.default_rng(b.rows)
    type_a, threads = a.type if a else type_a, 128 * groups
    matrices = [random_bytes(operand.type, operand.bytes, rng) for operand in (a, b) * groups if operand]
    image = np.concatenate([np.pad(matrix, (0, -len(matrix) % 1024)) for matrix in matrices])
    inputs = [image, rng.integers(-9, 10, (threads, b.rows // 2)).astype(np.float32)]
    if a is None:
        inputs.append(random_bytes(type_a, threads * 16 * b.steps, rng).view(np.uint32).reshape(threads, -1))
    out = np.zeros((threads, b.rows // 2), np.float32)
    body = wgmma_body(a, b, type_a, groups=groups, **options)
    return HopperCase(f"wgmma.{name}", body, tuple(inputs), out, threads=threads)


# name -> (A or None, B, type of A in registers, options of wgmma_body)
WGMMA_FORMS: dict[str, tuple[Operand | None, Operand, str, dict[str, Any]]] = {
    **{
        f"bf16-{'k' if a else 'mn'}-{'k' if b else 'mn'}-{swizzle}": (
            Operand(64, "bf16", a, swizzle),
            Operand(64, "bf16", b, swizzle),
            "",
            {},
        )
        for a, b in ((True, True), (False, False))
        for swizzle in (16, 32, 64, 128)
    },
    # The column counts (N) of the kernels, the smallest, and an odd multiple of 8.
    **{
        f"bf16-n{n}": (Operand(64, "bf16"), Operand(n, "bf16"), "", {}) for n in (8, 24, 32, 80, 96, 112, 128, 144, 176)
    },
    **{
        f"bf16-{'k' if a else 'mn'}-mn-n{n}": (Operand(64, "bf16", a), Operand(n, "bf16", False), "", {})
        for a, widths in ((False, (96, 128, 192, 256)), (True, (64, 128)))
        for n in widths
    },
    "f16-k-k-128": (Operand(64, "f16"), Operand(64, "f16"), "", {}),
    "f16-minus": (Operand(64, "f16"), Operand(16, "f16"), "", {"sign": -1}),
    "bf16-two-warpgroups": (Operand(64, "bf16"), Operand(24, "bf16"), "", {"groups": 2}),
    "f16-overwrites": (Operand(64, "f16"), Operand(16, "f16"), "", {"adds": False}),
    **{
        f"{a}-{b}-{swizzle}": (Operand(64, a, True, swizzle), Operand(64, b, True, swizzle), "", {})
        for a, b, swizzle in (("e4m3", "e4m3", 128), ("e4m3", "e4m3", 16), ("e5m2", "e4m3", 64), ("e5m2", "e5m2", 32))
    },
    **{f"e4m3-n{n}": (Operand(64, "e4m3"), Operand(n, "e4m3"), "", {}) for n in (128, 192)},
    **{f"rs-{t}-k": (None, Operand(64, t), t, {}) for t in ("f16", "bf16", "e4m3", "e5m2")},
    **{f"rs-bf16-mn-{swizzle}": (None, Operand(64, "bf16", False, swizzle), "bf16", {}) for swizzle in (32, 64, 128)},
    **{
        f"rs-{t}-mn-n{n}": (None, Operand(n, t, False), t, {})
        for t, n in (("bf16", 96), ("f16", 128), ("bf16", 192), ("bf16", 256))
    },
    **{f"rs-e4m3-k-64-n{n}": (None, Operand(n, "e4m3", True, 64), "e4m3", {}) for n in (64, 96, 128, 192)},
}


def fp8_sums_case() -> HopperCase:
    """Return a case with products of many magnitudes, whose sums show how many bits fp8 accumulation keeps."""
    case = wgmma_case("e4m3-sums", Operand(64, "e4m3"), Operand(64, "e4m3"))
    rng = np.random.default_rng(3)
    image, before = case.inputs
    numbers = rng.normal(size=image.size) * 2.0 ** rng.integers(-6, 7, image.size)
    sums = (rng.normal(size=before.shape) * 2.0 ** rng.integers(-8, 9, before.shape)).astype(np.float32)
    return replace(case, inputs=(numbers.astype(_TYPES["e4m3"]).view(np.uint8), sums))


def in_flight_case() -> HopperCase:
    """Return a case with two wgmma groups in flight, as QK and PV in the forward mainloop; A of PV is in registers.

    The kernel waits for the first group, stores its result, and then waits for the second.
    """
    a, b = Operand(64, "bf16"), Operand(64, "bf16", False)
    rng = np.random.default_rng(10)
    image = np.concatenate([random_bytes("bf16", operand.bytes, rng) for operand in (a, a, b)])
    words = random_bytes("bf16", 128 * 16, rng).view(np.uint32).reshape(128, 4)
    out = np.zeros((128, 64), np.float32)
    scores, sums = (", ".join(f"%f{i}" for i in range(first, first + 32)) for first in (0, 32))
    types = "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16"
    lines = [
        fill(len(image), 128),
        "mad.wide.u32 %d0, %t, 16, %p1;",
        "ld.global.v4.b32 {%r0, %r1, %r2, %r3}, [%d0];",
        *(f"mov.f32 %f{i}, 0f3F800000;" for i in range(32, 64)),
        "setp.ne.u32 %q4, %t, %t;",
        descriptor("%d2", 0, a.constant),
        descriptor("%d3", a.bytes, a.constant),
        descriptor("%d4", 2 * a.bytes, b.constant),
        "wgmma.fence.sync.aligned;",
        f"{types} {{{scores}}}, %d2, %d3, %q4, 1, 1, 0, 0;",
        "wgmma.commit_group.sync.aligned;",
        f"{types} {{{sums}}}, {{%r0, %r1, %r2, %r3}}, %d4, 1, 1, 1, 1;",
        "wgmma.commit_group.sync.aligned;",
        "mad.wide.u32 %d0, %t, 256, %p2;",
        "wgmma.wait_group.sync.aligned 1;",
        *(f"st.global.f32 [%d0+{4 * i}], %f{i};" for i in range(32)),
        "wgmma.wait_group.sync.aligned 0;",
        *(f"st.global.f32 [%d0+{4 * i}], %f{i};" for i in range(32, 64)),
    ]
    return HopperCase("wgmma.in-flight", "\n    ".join(lines), (image, words), out)


CASES = [
    *[wgmma_case(name, a, b, type_a, **options) for name, (a, b, type_a, options) in WGMMA_FORMS.items()],
    fp8_sums_case(),
    in_flight_case(),
]
