"""Micro-kernels of tcgen05.mma and .commit: layouts of both operands, order of mma, and what a commit waits for."""

from __future__ import annotations

from typing import TypedDict

import numpy as np

from ..hopper.case import Array, fill, initialise, wait
from ..hopper.wgmma import Operand, random_bytes
from .case import BARRIER, DEALLOC, FENCE_AFTER, BlackwellCase, allocate, move

COMMIT = "@%q6 tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r50];"
SWIZZLE_CODES = {16: 0, 128: 2, 64: 4, 32: 6}
A_COLUMN = 256  # the first column of A in tensor memory


class Options(TypedDict, total=False):
    """Options of product_body."""

    adds: bool
    negated: bool
    lane: int
    repeats: int
    arrivals: int
    then: str
    copied: bool


# name -> (M, A in shared memory or None, B, options)
FORMS: dict[str, tuple[int, Operand | None, Operand, Options]] = {
    **{
        f"bf16-{'k' if a else 'mn'}-{'k' if b else 'mn'}-{swizzle}": (
            128, Operand(128, "bf16", a, swizzle), Operand(64, "bf16", b, swizzle), {}
        )
        for a, b, swizzles in (
            (True, True, (16, 32, 64, 128)), (False, False, (16, 32, 64, 128)), (True, False, (64, 128)),
        )
        for swizzle in swizzles
    },
    **{f"f16-n{n}": (128, Operand(128, "f16"), Operand(n, "f16"), {}) for n in (16, 48, 128)},
    **{f"m64-n{n}": (64, Operand(64, "bf16"), Operand(n, "bf16", n > 8), {}) for n in (8, 64, 136)},
    "m64-upper-lanes": (64, Operand(64, "bf16"), Operand(32, "bf16"), {"lane": 16}),
    "minus": (128, Operand(128, "f16"), Operand(32, "f16"), {"negated": True}),
    "overwrites": (128, Operand(128, "bf16"), Operand(32, "bf16"), {"adds": False}),
    "ts-bf16-k": (128, None, Operand(64, "bf16"), {}),
    "ts-f16-mn": (128, None, Operand(128, "f16", False), {}),
    "ts-m64": (64, None, Operand(64, "bf16", False), {}),
    "ts-copied": (128, Operand(128, "bf16"), Operand(64, "bf16"), {"copied": True}),
}  # fmt: skip


def shape_bits(
    rows: int, columns: int, type_: str, *, transposed: tuple[bool, bool] = (False, False), negated: bool = False
) -> int:
    """Return the instruction descriptor of kind::f16 with fp32 accumulators."""
    bits = 1 << 4 | (type_ == "bf16") * (1 << 7 | 1 << 10) | negated << 13
    return bits | transposed[0] << 15 | transposed[1] << 16 | columns // 8 << 17 | rows // 16 << 24


def descriptor(register: str, offset: int, operand: Operand) -> str:
    """Return PTX that computes the sm_100 descriptor of a matrix at smem + offset."""
    leading, stride = operand.strides
    constant = leading >> 4 << 16 | stride >> 4 << 32 | 1 << 46 | SWIZZLE_CODES[operand.swizzle] << 61
    return f"""
        mov.u32 %r60, smem;
        add.u32 %r60, %r60, {offset};
        bfe.u32 %r60, %r60, 4, 14;
        cvt.u64.u32 {register}, %r60;
        or.b64 {register}, {register}, {constant};
    """


def mma(d: str, a: str, b: str, bits: str, adds: bool) -> str:
    """Return PTX by which one thread issues an mma."""
    left = f"setp.ne.u32 %q3, {int(adds)}, 0;\n"
    return f"{left}@%q6 tcgen05.mma.cta_group::1.kind::f16 [{d}], {a}, {b}, {bits}, %q3;"


def copy(form: str, target: str, matrix: str) -> str:
    """Return PTX by which one thread issues a tcgen05.cp to an address of tensor memory."""
    return f"@%q6 tcgen05.cp.cta_group::1.{form} [{target}], {matrix};"


def product_body(
    a: Operand | None,
    b: Operand,
    rows: int,
    *,
    adds: bool = True,
    negated: bool = False,
    lane: int = 0,
    repeats: int = 1,
    arrivals: int = 1,
    then: str = f"{COMMIT}\n{wait()}",
    copied: bool = False,
) -> str:
    """Return the body of a kernel that computes D = C + A B, or C + repeats A B; `then` follows the mma.

    If `copied`, each step of A is copied to the same columns of tensor memory before its mma.

    %p0 is the image of A and B in shared memory, %p1 and the last pointer are C and D, (128 lanes, N), and %p2 is A as
    words (128, 8 steps), if it is in tensor memory.
    """
    columns, b_at = b.rows, 0 if a is None else -(-a.bytes // 1024) * 1024
    transposed = (a is not None and not a.k_major, not b.k_major)
    bits = shape_bits(rows, columns, b.type, transposed=transposed, negated=negated)
    size = b_at + -(-b.bytes // 1024) * 1024
    lines = [initialise(arrivals), allocate(512), fill(size, 128), move("st", 1, columns)]
    if a is None:
        at_a = f"%r52, %r52, {A_COLUMN};"
        lines += [f"add.u32 {at_a}", move("st", 2, 8 * b.steps), f"sub.u32 {at_a}"]
    lines += [BARRIER, f"add.u32 %r54, %r51, {lane << 16}; mov.u32 %r55, {bits};"]
    for n in range(repeats * b.steps):
        step = n % b.steps
        if a is not None:
            lines.append(descriptor("%d2", step * a.step_bytes, a))
        lines.append(descriptor("%d3", b_at + step * b.step_bytes, b))
        left = f"[%r51+{A_COLUMN + 8 * step}]" if a is None else "%d2"
        if copied:
            left = f"[%r51+{A_COLUMN}]"
            lines.append(copy("128x256b", f"%r51+{A_COLUMN}", "%d2"))
        lines.append(mma("%r54", left, "%d3", "%r55", adds or n > 0))
    lines += [then, FENCE_AFTER, move("ld", 2 if a else 3, columns), BARRIER, DEALLOC.format(columns=512)]
    return "\n    ".join(lines)


def inputs_of(a: Operand | None, b: Operand) -> tuple[Array, ...]:
    """Return random inputs of `product_body`."""
    rng = np.random.default_rng(b.rows)
    image = np.concatenate(
        [np.pad(random_bytes(one.type, one.bytes, rng), (0, -one.bytes % 1024)) for one in (a, b) if one]
    )
    before = rng.integers(-9, 10, (128, b.rows)).astype(np.float32)
    words = [] if a else [random_bytes(b.type, 128 * 32 * b.steps, rng).view(np.uint32).reshape(128, -1)]
    return image, before, *words


def _case(name: str, rows: int, a: Operand | None, b: Operand, options: Options) -> BlackwellCase:
    out = np.zeros((128, b.rows), np.float32)
    return BlackwellCase(f"tcgen05.{name}", product_body(a, b, rows, **options), inputs_of(a, b), out)


# Behind products whose A is in tensor memory an mma overwrites A, as S of the next keys overwrites P: nothing waits.
P, V = None, Operand(128, "f16", False)
OVERWRITE = mma(f"%r51+{A_COLUMN}", "%d3", "%d3", str(shape_bits(128, 64, "f16", transposed=(True, True))), False)
TWICE = "\n".join([COMMIT, wait(), COMMIT, wait(1, "WAIT_AGAIN")])
A, B = Operand(128, "bf16"), Operand(64, "bf16")
CASES = [
    *(_case(f"mma.{form}", *of_form) for form, of_form in FORMS.items()),
    _case("mma.order", 128, P, V, dict(repeats=16, then="\n".join([OVERWRITE, COMMIT, wait()]))),
    _case("commit.many", 128, A, B, dict(repeats=64)),
    _case("commit.two-arrivals", 128, A, B, dict(repeats=2, arrivals=2, then="\n".join([COMMIT, COMMIT, wait()]))),
    _case("commit.nothing", 128, A, B, dict(then=TWICE)),
]
