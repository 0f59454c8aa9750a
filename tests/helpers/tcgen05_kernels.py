"""PTX kernels that multiply by tcgen05, and their results by the layouts of the PTX ISA."""

import numpy as np
from matrix_layouts import DTYPES, matrix
from micro import run

from cupy_flash.measure.checks.blackwell import products
from cupy_flash.measure.checks.blackwell.products import inputs_of, product_body
from cupy_flash.measure.checks.hopper.wgmma import Operand

SHARED = ".shared .align 1024 .b8 smem[65536]; .shared .align 8 .b8 bars[64]; .shared .align 4 .b8 tmem[4];"
OPTIONS = {"shared": SHARED, "target": "sm_100a"}
FORMS = products.FORMS | {"f16-n256": (128, Operand(128, "f16"), Operand(256, "f16"), {})}


def launch(body, *arrays, **options):
    """Run a body on the simulator."""
    return run(body, *arrays, threads=128, **OPTIONS, **options)


def lane_of_row(row, rows, lane):
    """Return the lane of a row of an accumulator: layouts D (128 rows) and F (64 rows) of the PTX ISA."""
    return row if rows == 128 else lane + row // 16 * 32 + row % 16


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


def case_of(form):
    """Return (body, inputs, expected result) of one of FORMS."""
    rows, a, b, options = FORMS[form]
    inputs = inputs_of(a, b)
    of_values = {name: value for name, value in options.items() if name != "copied"}
    return product_body(a, b, rows, **options), inputs, expected_of(a, b, rows, inputs, **of_values)
