"""PTX kernels that multiply by tcgen05, and their results by the layouts of the PTX ISA."""

import numpy as np
from matrix_layouts import DTYPES, matrix
from micro import run

from cupy_flash.measure.checks.hopper.case import HopperCase, fill, initialise, wait
from cupy_flash.measure.checks.hopper.wgmma import Operand, random_bytes

SHARED = ".shared .align 1024 .b8 smem[65536]; .shared .align 8 .b8 bars[64]; .shared .align 4 .b8 tmem[4];"
OPTIONS = {"shared": SHARED, "target": "sm_100a"}
FENCE_BEFORE, FENCE_AFTER = "tcgen05.fence::before_thread_sync;", "tcgen05.fence::after_thread_sync;"
BARRIER = f"{FENCE_BEFORE} bar.sync 0; {FENCE_AFTER}"
COMMIT = "@%q6 tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r50];"
DEALLOC = "@%q4 tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r51, {columns};"
SWIZZLE_CODES = {16: 0, 128: 2, 64: 4, 32: 6}


class Tcgen05Case(HopperCase):
    """A kernel of this module as a case: (name, body, inputs, output)."""

    @property
    def options(self):
        return OPTIONS


def shape_bits(rows, columns, type_, *, transposed=(False, False), negated=False):
    """Return the instruction descriptor of kind::f16 with fp32 accumulators."""
    bits = 1 << 4 | (type_ == "bf16") * (1 << 7 | 1 << 10) | negated << 13
    return bits | transposed[0] << 15 | transposed[1] << 16 | columns // 8 << 17 | rows // 16 << 24


def descriptor(register, offset, operand):
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


def allocate(columns):
    """Return PTX by which warp 0 (%q4) allocates columns; all threads get the address in %r51, their lanes' in %r52."""
    return f"""
        shr.u32 %r52, %t, 5;
        setp.eq.u32 %q4, %r52, 0;
        mov.u32 %r53, tmem;
        @%q4 tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r53], {columns};
        @%q4 tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;
        {BARRIER}
        ld.shared.u32 %r51, [%r53];
        and.b32 %r52, %r52, 3;
        shl.b32 %r52, %r52, 21;
        add.u32 %r52, %r52, %r51;
    """


def registers(count):
    return "{" + ", ".join(f"%r{i}" for i in range(count)) + "}"


def move(direction, pointer, columns, *, shape="32x32b", each=1, lanes=0, split=""):
    """Return PTX by which each thread moves words of an array (128, columns * each) to tensor memory, or back."""
    lines = [f"mad.wide.u32 %d0, %t, {4 * columns * each}, %p{pointer};"]
    for first in range(0, columns, 32 // each):
        count = min(columns - first, 32 // each)
        words, at = range(count * each), f"[%r52+{(lanes << 16) + first * (1 if each == 1 else 2 * each)}]"
        offset = 4 * first * each
        if direction == "st":
            lines += [f"ld.global.b32 %r{i}, [%d0+{offset + 4 * i}];" for i in words]
            lines.append(f"tcgen05.st.sync.aligned.{shape}.x{count}.b32 {at}{split}, {registers(count * each)};")
        else:
            lines.append(f"tcgen05.ld.sync.aligned.{shape}.x{count}.b32 {registers(count * each)}, {at}{split};")
            lines += [f"st.global.b32 [%d0+{offset + 4 * i}], %r{i};" for i in words]
    return "\n".join([*lines, f"tcgen05.wait::{direction}.sync.aligned;"])


def product_body(a, b, rows, columns, bits, *, adds=True, lane=0, steps=None):
    """Return the body of a kernel that computes D = C + A B; A of None is in tensor memory, 256 columns further.

    %p0 is the image of A and B in shared memory, %p1 and the last pointer are C and D, (128 lanes, columns), and %p2 is
    A as words (128, 8 steps), if it is in tensor memory.
    """
    b_at = 0 if a is None else -(-a.bytes // 1024) * 1024
    size = b_at + -(-b.bytes // 1024) * 1024
    lines = [initialise(), allocate(512), fill(size, 128), move("st", 1, columns)]
    if a is None:
        lines += ["add.u32 %r52, %r52, 256;", move("st", 2, 8 * b.steps), "sub.u32 %r52, %r52, 256;"]
    lines += [BARRIER, f"add.u32 %r54, %r51, {lane << 16}; mov.u32 %r55, {bits};"]
    for step in range(b.steps if steps is None else steps):
        if a is not None:
            lines.append(descriptor("%d2", step * a.step_bytes, a))
        lines += [descriptor("%d3", b_at + step * b.step_bytes, b), f"setp.ne.u32 %q3, {int(adds or step > 0)}, 0;"]
        left = f"[%r51+{256 + 8 * step}]" if a is None else "%d2"
        lines.append(f"@%q6 tcgen05.mma.cta_group::1.kind::f16 [%r54], {left}, %d3, %r55, %q3;")
    lines += [COMMIT, wait(), FENCE_AFTER, move("ld", 2 if a else 3, columns), BARRIER, DEALLOC.format(columns=512)]
    return "\n    ".join(lines)


def launch(body, *arrays, **options):
    """Run a body on the simulator."""
    return run(body, *arrays, threads=128, **OPTIONS, **options)


def lane_of_row(row, rows, lane):
    """Return the lane of a row of an accumulator: layouts D (128 rows) and F (64 rows) of the PTX ISA."""
    return row if rows == 128 else lane + row // 16 * 32 + row % 16


def inputs_of(a, b, rows, columns):
    rng = np.random.default_rng(columns)
    image = np.concatenate(
        [np.pad(random_bytes(one.type, one.bytes, rng), (0, -one.bytes % 1024)) for one in (a, b) if one]
    )
    before = rng.integers(-9, 10, (128, columns)).astype(np.float32)
    words = [] if a else [random_bytes(b.type, 128 * 32 * b.steps, rng).view(np.uint32).reshape(128, -1)]
    return image, before, *words


def expected_of(a, b, rows, inputs, *, adds=True, negated=False, lane=0):
    image, before, *words = inputs
    right = matrix(image if a is None else image[-(-a.bytes // 1024) * 1024 :], b)
    if a is None:  # two 16-bit numbers in each column, the one of the smaller k in the lower half
        left = words[0].view(DTYPES[b.type]).astype(np.float64)[[lane_of_row(r, rows, lane) for r in range(rows)]]
    else:
        left = matrix(image, a)
    product = (-1 if negated else 1) * left @ right.T
    result = before.copy()
    for row in range(rows):
        at = lane_of_row(row, rows, lane)
        result[at] = product[row] + adds * before[at]
    return result


# name -> (M, A or None, B, options)
FORMS = {
    **{
        f"bf16-{'k' if a else 'mn'}-{'k' if b else 'mn'}-{swizzle}": (
            128, Operand(128, "bf16", a, swizzle), Operand(64, "bf16", b, swizzle), {}
        )
        for a, b, swizzles in (
            (True, True, (16, 32, 64, 128)), (False, False, (16, 32, 64, 128)), (True, False, (64, 128)),
        )
        for swizzle in swizzles
    },
    **{f"f16-n{n}": (128, Operand(128, "f16"), Operand(n, "f16"), {}) for n in (16, 48, 128, 256)},
    **{f"m64-n{n}": (64, Operand(64, "bf16"), Operand(n, "bf16", n > 8), {}) for n in (8, 64, 136)},
    "m64-upper-lanes": (64, Operand(64, "bf16"), Operand(32, "bf16"), {"lane": 16}),
    "minus": (128, Operand(128, "f16"), Operand(32, "f16"), {"negated": True}),
    "overwrites": (128, Operand(128, "bf16"), Operand(32, "bf16"), {"adds": False}),
    "ts-bf16-k": (128, None, Operand(64, "bf16"), {}),
    "ts-f16-mn": (128, None, Operand(128, "f16", False), {}),
    "ts-m64": (64, None, Operand(64, "bf16", False), {}),
}  # fmt: skip


def case_of(form):
    """Return (body, inputs, expected result) of one of FORMS."""
    rows, a, b, options = FORMS[form]
    transposed = (a is not None and not a.k_major, not b.k_major)
    bits = shape_bits(rows, b.rows, b.type, transposed=transposed, negated=options.get("negated", False))
    others = {name: value for name, value in options.items() if name != "negated"}
    inputs = inputs_of(a, b, rows, b.rows)
    return product_body(a, b, rows, b.rows, bits, **others), inputs, expected_of(a, b, rows, inputs, **options)
