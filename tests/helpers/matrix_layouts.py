"""The layouts of matrices in shared memory, transcribed from the PTX ISA: canonical layouts and swizzling, in elements.

wgmma and tcgen05.mma read the same layouts. No code of the simulator is used.
"""

import ml_dtypes
import numpy as np

DTYPES = {
    "f16": np.float16,
    "bf16": ml_dtypes.bfloat16,
    "tf32": np.float32,
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
}


def by_shape_and_stride(coordinate, shape, stride):
    """Return the offset of a coordinate in one mode of a CuTe layout, decomposed over the shape with the first part
    fastest.
    """
    place = 0
    for size, step in zip(shape, stride, strict=True):
        place += coordinate % size * step
        coordinate //= size
    return place


def canonical(row, k, operand):
    """Return the offset of an element of a matrix without swizzling, by the table of canonical layouts.

    T elements are 16 bytes. The last part of a shape, m or k of the table, is unbounded.
    """
    T = 16 // operand.itemsize
    leading, stride = (offset // operand.itemsize for offset in operand.strides)
    last = 1 << 20
    if operand.k_major:
        rows = {
            16: ((8, last), (1 * T, stride)),
            32: ((8, last), (2 * T, stride)),
            64: ((8, last), (4 * T, stride)),
            128: ((8, last), (8 * T, stride)),
        }[operand.swizzle]
        columns = ((T, last), (1, leading if operand.swizzle == 16 else T))
    else:
        rows, columns = {
            16: (((T, 1, last), (1, T, stride)), ((8, last), (1 * T, leading))),
            32: (((T, 2, last), (1, T, leading)), ((8, last), (2 * T, stride))),
            64: (((T, 4, last), (1, T, leading)), ((8, last), (4 * T, stride))),
            128: (((T, 8, last), (1, T, leading)), ((8, last), (8 * T, stride))),
        }[operand.swizzle]
    return by_shape_and_stride(row, *rows) + by_shape_and_stride(k, *columns)


def swizzle(byte, operand):
    """Apply CuTe's Swizzle<B, 4, 3>, which XORs B bits from bit 4 on with the B bits three positions above."""
    bits = {16: 0, 32: 1, 64: 2, 128: 3}[operand.swizzle]
    mask = ((1 << bits) - 1) << 7
    return byte ^ (byte & mask) >> 3


def matrix(image, operand):
    """Return an operand (rows, depth), read from the bytes of shared memory at its start, a multiple of 1024."""
    values = np.zeros((operand.rows, operand.depth))
    per_step = 32 // operand.itemsize
    for row in range(operand.rows):
        for k in range(operand.depth):
            byte = k // per_step * operand.step_bytes + canonical(row, k % per_step, operand) * operand.itemsize
            place = swizzle(byte, operand)
            values[row, k] = image[place : place + operand.itemsize].view(DTYPES[operand.type])[0]
    return values
