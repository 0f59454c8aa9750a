"""Micro-kernels of tcgen05.cp: the lanes that every shape writes, from matrices with and without swizzling."""

from __future__ import annotations

import numpy as np

from ..hopper.case import Array, fill, initialise, wait
from ..hopper.wgmma import Operand
from .case import BARRIER, DEALLOC, FENCE_AFTER, BlackwellCase, allocate, move
from .products import COMMIT, copy, descriptor

# {shape and multicast: (rows, bytes of a row)}
FORMS = {
    "128x256b": (128, 32), "4x256b": (4, 32), "128x128b": (128, 16), "64x128b.warpx2::02_13": (64, 16),
    "64x128b.warpx2::01_23": (64, 16), "32x128b.warpx4": (32, 16),
}  # fmt: skip
COLUMNS = 64
FIRST = 8  # the first column that is written


def source_of(form: str, swizzle: int) -> Operand:
    """Return the matrix that a kernel copies, with rows of 32 bytes, or of the swizzle's if it is wider."""
    return Operand(FORMS[form][0], "tf32", swizzle=swizzle)


def copy_body(form: str, swizzle: int) -> str:
    """Return the body of a kernel that copies a whole matrix to columns FIRST and further, between others of %p1.

    %p0 is the image of shared memory, %p2 the result of all lanes and columns.
    """
    matrix, width = source_of(form, swizzle), FORMS[form][1]
    lines = [initialise(), allocate(COLUMNS), fill(-(-matrix.bytes // 16) * 16, 128), move("st", 1, COLUMNS), BARRIER]
    for at in range(0, 4 * matrix.depth, width):
        lines.append(descriptor("%d2", at if swizzle > 16 else at // 16 * matrix.strides[0], matrix))
        lines.append(copy(form, f"%r51+{FIRST + at // 4}", "%d2"))
    lines += [COMMIT, wait(), FENCE_AFTER, move("ld", 2, COLUMNS), BARRIER, DEALLOC.format(columns=COLUMNS)]
    return "\n    ".join(lines)


def inputs_of(form: str, swizzle: int) -> tuple[Array, Array]:
    """Return inputs of `copy_body`, all of whose numbers differ."""
    image = np.arange(source_of(form, swizzle).bytes // 4, dtype=np.float32)
    return image, np.arange(128 * COLUMNS, dtype=np.uint32).reshape(128, COLUMNS)


CASES = [
    BlackwellCase(
        f"tcgen05.cp.{form.replace('::', '-')}-{swizzle}", copy_body(form, swizzle), inputs_of(form, swizzle),
        np.zeros((128, COLUMNS), np.uint32),
    )
    for form in FORMS
    for swizzle in (16, 128)
]  # fmt: skip
