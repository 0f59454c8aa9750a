"""mma.sync, ldmatrix and stmatrix against the layouts of the PTX ISA 9.2, chapter 9.7.14.5, transcribed per lane.

Each layout function is the documentation's formula for element i of lane l; no code of the simulator is used.
"""

import ml_dtypes
import numpy as np
import pytest
from micro import run

from cupy_flash.measure.checks.hopper import BY_NAME
from cupy_flash.measure.checks.instructions import MMA_FORMS, ldmatrix_body, mma_body


def group_of(lane):
    return lane >> 2


def thread_of(lane):
    return lane % 4


def a_m16n8k16(lane, i):
    """Return (row, column) of element i of a lane (PTX ISA 9.7.14.5.8, Figure 79: matrix A, .f16 / .bf16)."""
    row = group_of(lane) if 0 <= i < 2 or 4 <= i < 6 else group_of(lane) + 8
    return row, thread_of(lane) * 2 + (i & 1) + (0 if i < 4 else 8)


def b_m16n8k16(lane, i):
    """Return (row, column) of element i of a lane (PTX ISA 9.7.14.5.8, Multiplicand B, .f16 / .bf16)."""
    return thread_of(lane) * 2 + (i & 1) + (0 if i < 2 else 8), group_of(lane)


def c_m16n8(lane, i):
    """Return (row, column) of element i of a lane (PTX ISA 9.7.14.5.7 and 9.7.14.5.8, Accumulators (C or D), .f32)."""
    return group_of(lane) if i < 2 else group_of(lane) + 8, thread_of(lane) * 2 + (i & 1)


def a_m16n8k8(lane, i):
    """Return (row, column) of element i of a lane (PTX ISA 9.7.14.5.7, Figure 71: matrix A, .f16 / .bf16)."""
    return group_of(lane) if i < 2 else group_of(lane) + 8, thread_of(lane) * 2 + (i & 1)


def b_m16n8k8(lane, i):
    """Return (row, column) of element i of a lane (PTX ISA 9.7.14.5.7, Multiplicand B, .f16 / .bf16)."""
    return thread_of(lane) * 2 + i, group_of(lane)


def a_m16n8k8_tf32(lane, i):
    """Return (row, column) of element i of a lane (PTX ISA 9.7.14.5.7, Figure 72: matrix A, .tf32)."""
    return group_of(lane) if i in (0, 2) else group_of(lane) + 8, thread_of(lane) if i < 2 else thread_of(lane) + 4


def b_m16n8k8_tf32(lane, i):
    """Return (row, column) of element i of a lane (PTX ISA 9.7.14.5.7, Multiplicand B, .tf32)."""
    return thread_of(lane) + 4 * i, group_of(lane)


def a_m16n8k32(lane, i):
    """Return (row, column) of element i of a lane (PTX ISA 9.7.14.5, m16n8k32, Figure 88: matrix A, .e4m3 / .e5m2)."""
    row = group_of(lane) if 0 <= i < 4 or 8 <= i < 12 else group_of(lane) + 8
    return row, thread_of(lane) * 4 + (i & 3) + (0 if i < 8 else 16)


def b_m16n8k32(lane, i):
    """Return (row, column) of element i of a lane (PTX ISA 9.7.14.5, m16n8k32, Multiplicand B, .e4m3 / .e5m2)."""
    return thread_of(lane) * 4 + (i & 3) + (0 if i < 4 else 16), group_of(lane)


def fragments(matrix, layout, words):
    """Return (32, words): the registers of each lane that hold the matrix in this layout."""
    per_lane = words * 4 // matrix.dtype.itemsize
    held = np.array([[matrix[layout(lane, i)] for i in range(per_lane)] for lane in range(32)], matrix.dtype)
    return held.view(np.uint32)


# name -> (dtype, layout of A, layout of B)
LAYOUTS = {
    "m16n8k16-f16": (np.float16, a_m16n8k16, b_m16n8k16),
    "m16n8k16-bf16": (ml_dtypes.bfloat16, a_m16n8k16, b_m16n8k16),
    "m16n8k8-f16": (np.float16, a_m16n8k8, b_m16n8k8),
    "m16n8k8-bf16": (ml_dtypes.bfloat16, a_m16n8k8, b_m16n8k8),
    "m16n8k8-tf32": (np.float32, a_m16n8k8_tf32, b_m16n8k8_tf32),
    "m16n8k32-e4m3": (ml_dtypes.float8_e4m3fn, a_m16n8k32, b_m16n8k32),
    "m16n8k32-e5m2": (ml_dtypes.float8_e5m2, a_m16n8k32, b_m16n8k32),
}


@pytest.mark.parametrize("form", MMA_FORMS)
def test_mma_multiplies_what_the_documented_fragments_hold(form):
    shape, _, a_words, b_words = MMA_FORMS[form]
    dtype, a_layout, b_layout = LAYOUTS[form]
    depth = int(shape.split("k")[1])
    rng = np.random.default_rng(0)
    # Products of small integers are exact in every order of summation.
    a = rng.integers(-3, 4, (16, depth)).astype(dtype)
    b = rng.integers(-3, 4, (depth, 8)).astype(dtype)
    c = rng.integers(-9, 10, (16, 8)).astype(np.float32)
    out = np.zeros((32, 4), np.uint32)
    run(
        mma_body(form),
        fragments(a, a_layout, a_words),
        fragments(b, b_layout, b_words),
        fragments(c, c_m16n8, 4),
        out,
    )
    product = a.astype(np.float64) @ b.astype(np.float64) + c
    assert np.array_equal(out, fragments(product.astype(np.float32), c_m16n8, 4))


def test_mma_drops_the_low_bits_of_tf32():
    a = np.full((16, 8), np.float32(1 + 2.0**-11))
    b = np.ones((8, 8), np.float32)
    out = np.zeros((32, 4), np.float32)
    operands = fragments(a, a_m16n8k8_tf32, 4), fragments(b, b_m16n8k8_tf32, 2), np.zeros((32, 4), np.float32)
    run(mma_body("m16n8k8-tf32"), *operands, out)
    assert np.array_equal(out, np.full((32, 4), 8, np.float32))


def test_mma_rounds_the_sum_once():
    # The terms are 2**11, 2**-2, -(2**11) and 2**-10: partial sums need more bits than fp16 has.
    a = np.zeros((16, 16), np.float16)
    a[:, :4] = [2048, 0.25, -2048, 0.0009765625]
    b = np.ones((16, 8), np.float16)
    out = np.zeros((32, 4), np.float32)
    operands = fragments(a, a_m16n8k16, 4), fragments(b, b_m16n8k16, 2), np.zeros((32, 4), np.float32)
    run(mma_body("m16n8k16-f16"), *operands, out)
    assert np.array_equal(out, np.full((32, 4), 0.2509765625, np.float32))


def ldmatrix_row(lane, count):
    """Return (matrix, row) of the address that a lane holds, or None (PTX ISA 9.7.14.5.15, table of .num).

    Lanes 0-7 hold the row addresses of matrix 0, lanes 8-15 those of matrix 1, and so on.
    """
    return (lane // 8, lane % 8) if lane < 8 * count else None


def ldmatrix_element(lane, i, *, transposed):
    """Return (row, column) of element i of a lane (PTX ISA 9.7.14.5.15, the .m8n8 fragment).

    Four lanes hold a row, two elements each; with .trans they hold a column.
    """
    row, column = lane // 4, 2 * (lane % 4) + i
    return (column, row) if transposed else (row, column)


@pytest.mark.parametrize("transposed", [False, True], ids=["rows", "trans"])
@pytest.mark.parametrize("count", [1, 2, 4], ids=["x1", "x2", "x4"])
def test_ldmatrix_distributes_as_documented(count, transposed):
    matrices = np.arange(count * 64, dtype=np.uint16).reshape(count, 8, 8)
    stride = 48  # bytes between the starts of rows, more than the 16 of a row
    offsets = np.full(32, 1 << 20, np.uint32)  # lanes whose address is unused keep an invalid one
    memory = np.zeros((count * 8, stride // 2), np.uint16)
    for lane in range(32):
        place = ldmatrix_row(lane, count)
        if place:
            slot = (place[0] * 8 + place[1]) * 5 % (count * 8)  # rows in shuffled order
            offsets[lane] = slot * stride
            memory[slot, :8] = matrices[place]
    out = np.zeros((32, count), np.uint32)
    run(
        ldmatrix_body(count, memory.nbytes, transposed=transposed),
        memory,
        offsets,
        out,
        shared=f".shared .align 16 .b8 tile[{memory.nbytes}];",
    )
    expected = np.array(
        [
            [[matrices[m][ldmatrix_element(lane, i, transposed=transposed)] for i in range(2)] for m in range(count)]
            for lane in range(32)
        ],
        np.uint16,
    )
    assert np.array_equal(out.view(np.uint16).reshape(32, count, 2), expected)


@pytest.mark.parametrize("transposed", [False, True], ids=["rows", "trans"])
@pytest.mark.parametrize("count", [1, 2, 4], ids=["x1", "x2", "x4"])
def test_stmatrix_is_the_mirror_image_of_ldmatrix(count, transposed):
    """9.7.14.5.16: stmatrix uses the fragments and row addresses of ldmatrix."""
    values = np.random.default_rng(0).integers(0, 65536, (32, count, 2)).astype(np.uint16)
    out = np.zeros((count, 8, 8), np.uint16)
    registers = ", ".join(f"%r{i}" for i in range(count))
    run(
        f"""
        mov.u32 %r20, tile;
        mad.wide.u32 %d0, %t, {4 * count}, %p0;
        {" ".join(f"ld.global.b32 %r{i}, [%d0+{4 * i}];" for i in range(count))}
        mad.lo.u32 %r24, %t, 16, %r20;
        stmatrix.sync.aligned.m8n8.x{count}{".trans" if transposed else ""}.shared.b16 [%r24], {{{registers}}};
        bar.warp.sync -1;
        setp.ge.u32 %q0, %t, {8 * count};
        @%q0 exit;
        ld.shared.v4.b32 {{%r4, %r5, %r6, %r7}}, [%r24];
        mad.wide.u32 %d0, %t, 16, %p1;
        st.global.v4.b32 [%d0], {{%r4, %r5, %r6, %r7}};
        """,
        values,
        out,
        shared=f".shared .align 16 .b8 tile[{out.nbytes}];",
    )
    expected = np.zeros_like(out)
    for lane in range(32):
        for matrix in range(count):
            for i in range(2):
                expected[matrix][ldmatrix_element(lane, i, transposed=transposed)] = values[lane, matrix, i]
    assert np.array_equal(out, expected)


def test_movmatrix_transposes():
    """movmatrix, Figures 109 and 110: four lanes hold a row before and a column after."""
    matrix = np.arange(64, dtype=np.uint16).reshape(8, 8)
    out = np.zeros(32, np.uint32)
    run(
        """
        mad.wide.u32 %d0, %t, 4, %p0;
        ld.global.b32 %r0, [%d0];
        movmatrix.sync.aligned.m8n8.trans.b16 %r1, %r0;
        mad.wide.u32 %d0, %t, 4, %p1;
        st.global.b32 [%d0], %r1;
        """,
        matrix,
        out,
    )
    assert np.array_equal(out.view(np.uint16).reshape(8, 8), matrix.T)


def chunks_of(image):
    """Return 16-bit numbers (64, 64) from swizzled rows of 128 bytes: chunk c of row r is stored at chunk c ^ r % 8."""
    chunks = image.view(np.uint16).reshape(64, 8, 8)
    return chunks[np.arange(64)[:, None], np.arange(8) ^ np.arange(64)[:, None] % 8].reshape(64, 64)


def matrix_of_fragments(words, *, transposed=False):
    """Return a (64, 64) matrix whose diagonal block w (16 x 16) holds warp w's four 8 x 8 matrices; the rest is -1.

    Word i of a lane holds two elements of row lane / 4 of matrix i, or of that column if transposed.
    """
    elements = np.full((64, 64), -1)
    for thread, four in enumerate(words):
        warp, lane = divmod(thread, 32)
        for i, word in enumerate(four):
            for half in range(2):
                place = lane // 4, lane % 4 * 2 + half
                row, column = place[::-1] if transposed else place
                elements[16 * warp + 8 * (i % 2) + row, 16 * warp + 8 * (i // 2) + column] = (
                    int(word) >> 16 * half & 0xFFFF
                )
    return elements


def launched(name):
    case = BY_NAME[name]
    out = case.out.copy()
    run(case.body, *case.inputs, out, threads=case.threads, **case.options)
    return case, out


@pytest.mark.parametrize("transposed", [False, True], ids=["rows", "columns"])
def test_ldmatrix_of_swizzled_rows(transposed):
    case, out = launched("ldmatrix.trans" if transposed else "ldmatrix")
    elements = matrix_of_fragments(out, transposed=transposed)
    assert (elements >= 0).sum() == 4 * 16 * 16
    assert np.array_equal(elements[elements >= 0], chunks_of(case.inputs[0])[elements >= 0])


def test_stmatrix_into_swizzled_rows():
    case, out = launched("stmatrix")
    written, after = matrix_of_fragments(case.inputs[1]), chunks_of(out)
    assert np.array_equal(after, np.where(written >= 0, written, chunks_of(case.inputs[0])))
