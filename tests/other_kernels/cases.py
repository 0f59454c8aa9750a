"""Launches of the kernels: small, one to four blocks each."""

import itertools
from functools import partial

import ml_dtypes
import numpy as np
from triton.experimental.gluon import language as gl

from . import gluon_kernels, triton_kernels
from .launching import Case, Expected
from .products import exactly, farthest, matrix, product

E4M3, E5M2, BF16 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, ml_dtypes.bfloat16
DTYPES = {"f16": np.float16, "bf16": BF16, "e4m3": E4M3, "e5m2": E5M2, "tf32": np.float32}
CLUSTER = [[1, 0]]  # layout of a tile in a cluster of two blocks, each of which has half of the rows
BOTH = [[0, 0]]  # layout of a tile in a cluster of two blocks, both of which have all rows


def bits_of_sums(capability, dtype):
    """Return the bits that tensor cores keep of a sum: Hopper's wgmma keeps 14 if the operands are fp8."""
    return 14 if capability == 90 and np.dtype(dtype).itemsize == 1 else 24


def matmul(capability, dtype, transposes="nn", result=np.float32):
    """Return a matrix product that loads through pointers; the last block of K is partial.

    transposes: "t" for a column-major operand, "n" for a row-major one.
    """
    rng = np.random.default_rng(0)
    m, n, k = 128, 64, 80
    a, b = matrix(rng, (m, k), dtype), matrix(rng, (k, n), dtype)
    a_stored, b_stored = (np.ascontiguousarray(x.T) if t == "t" else x for x, t in zip((a, b), transposes, strict=True))
    a_strides = (1, m) if transposes[0] == "t" else (k, 1)
    b_strides = (1, k) if transposes[1] == "t" else (n, 1)
    return Case(
        triton_kernels.matmul,
        capability,
        (2, 1, 1),
        dict(
            a=a_stored, b=b_stored, K=k, N=n, a_row=a_strides[0], a_column=a_strides[1], b_row=b_strides[0],
            b_column=b_strides[1], BLOCK_M=64, BLOCK_N=64, BLOCK_K=32,
        ),
        {"c": product(a, b, result, bits=bits_of_sums(capability, dtype))},
    )  # fmt: skip


def matmul_tiles(
    capability,
    dtype,
    transposes="nn",
    block=(64, 64, 64),
    shape=(128, 64, 192),
    c_transposed=False,
    specialised=False,
    **options,
):
    """Return a matrix product that loads through tensor maps.

    If the shape is no multiple of the blocks, the last blocks reach beyond the arrays.
    """
    rng = np.random.default_rng(0)
    m, n, k = shape
    a, b = matrix(rng, (m, k), dtype), matrix(rng, (k, n), dtype)
    a_stored, b_stored = (np.ascontiguousarray(x.T) if t == "t" else x for x, t in zip((a, b), transposes, strict=True))
    block_m, block_n, block_k = block
    return Case(
        triton_kernels.matmul_tiles,
        capability,
        (-(-m // block_m), -(-n // block_n), 1),
        dict(
            a=a_stored, b=b_stored, K=k, BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k,
            A_TRANSPOSED=transposes[0] == "t", B_TRANSPOSED=transposes[1] == "t", C_TRANSPOSED=c_transposed,
            SPECIALISED=specialised,
        ),
        {"c": product(*((b.T, a.T) if c_transposed else (a, b)), dtype, bits=bits_of_sums(capability, dtype))},
        {
            "a": (block_k, block_m) if transposes[0] == "t" else (block_m, block_k),
            "b": (block_n, block_k) if transposes[1] == "t" else (block_k, block_n),
            "c": (block_n, block_m) if c_transposed else (block_m, block_n),
        },
        options,
    )  # fmt: skip


def accumulator(n, dtype, **layout):
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, n, 32 // np.dtype(dtype).itemsize], **layout)


def shared(dtype, swizzle, **layout):
    return gl.NVMMASharedLayout(swizzle, 8 * np.dtype(dtype).itemsize, **layout)


def wgmma(dtype, majors="kk", swizzles=(128, 128), n=64, block_k=64, registers=False):
    """Return a product by wgmma. `majors` has "k" for each operand that is K-major, "m" if it is M- or N-major."""
    rng = np.random.default_rng(0)
    m, k = 64, 2 * block_k
    a, b = matrix(rng, (m, k), dtype), matrix(rng, (k, n), dtype)
    a_transposed, b_transposed = majors[0] == "m", majors[1] == "k"
    layout = accumulator(n, dtype)
    return Case(
        gluon_kernels.wgmma,
        90,
        (1, 1, 1),
        dict(
            a=np.ascontiguousarray(a.T) if a_transposed else a, b=np.ascontiguousarray(b.T) if b_transposed else b,
            K=k, BLOCK_K=block_k, A_TRANSPOSED=a_transposed, B_TRANSPOSED=b_transposed, A_IN_REGISTERS=registers,
            M=m, N=n, LAYOUT=layout, A_LAYOUT=gl.DotOperandLayout(0, layout, 4 // np.dtype(dtype).itemsize),
        ),
        {"c": product(a, b, np.float32, bits=bits_of_sums(90, dtype))},
        {
            "a": ((block_k, m) if a_transposed else (m, block_k), shared(dtype, swizzles[0])),
            "b": ((n, block_k) if b_transposed else (block_k, n), shared(dtype, swizzles[1])),
        },
    )  # fmt: skip


def wgmma_no_swizzle():
    """Return a product by wgmma of operands without swizzle.

    Their core matrices of 8 rows of 16 bytes lie one after the other along M or N, then along K.
    """
    rng = np.random.default_rng(0)
    m, n, k = 64, 64, 64
    a, b = matrix(rng, (m, k), BF16), matrix(rng, (k, n), BF16)
    inside = [[0, 1], [0, 2], [0, 4], [1, 0], [2, 0], [4, 0]]
    cores = gl.SharedLinearLayout([*inside, [8, 0], [16, 0], [32, 0], [0, 8], [0, 16], [0, 32]])
    return Case(
        gluon_kernels.wgmma_no_swizzle,
        90,
        (1, 1, 1),
        dict(
            a=a, b=np.ascontiguousarray(b.T), M=m, N=n, K=k, LAYOUT=accumulator(n, BF16), CORES=cores,
            LOADED=gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]),
        ),
        {"c": product(a, b, np.float32)},
    )  # fmt: skip


def copied(layout, n):
    """Return a copy of 128 rows of n numbers through tensor memory."""
    a = np.arange(128 * n, dtype=np.float32).reshape(128, n)
    return Case(
        gluon_kernels.copied,
        100,
        (1, 1, 1),
        dict(a=a, M=128, N=n, SHARED=layout, LOADED=gl.BlockedLayout([1, n], [32, 1], [4, 1], [1, 0])),
        {"c": exactly(a)},
    )  # fmt: skip


def copied_scales():
    """Return a copy of a tile of scales, each of which all four warps receive, by the layout of Triton's tests."""
    a = np.random.default_rng(0).integers(0, 256, (64, 16)).astype(np.uint8)
    tile = [[0, 1], [0, 2], [32, 0], [0, 4], [1, 0], [2, 0], [4, 0], [8, 0], [16, 0], [0, 8]]
    lane, byte = np.mgrid[:128, :32]
    held = a[lane % 32 + 32 * (byte >> 2 & 1), (byte & 3) + 4 * (byte >> 3 & 1) + 8 * (byte >> 4)]
    return Case(
        gluon_kernels.copied_scales,
        100,
        (1, 1, 1),
        dict(a=a, SHARED=gl.SharedLinearLayout(tile), LOADED=gl.BlockedLayout([1, 4], [32, 1], [4, 1], [1, 0])),
        {"c": exactly(held)},
    )  # fmt: skip


def multicast():
    rng = np.random.default_rng(0)
    m, n, k = 128, 64, 64
    a, b = matrix(rng, (m, k), np.float16), matrix(rng, (k, n), np.float16)
    return Case(
        gluon_kernels.multicast,
        90,
        (1, 1, 1),
        dict(a=a, b=b, M=m, N=n, LAYOUT=accumulator(n, np.float16, cga_layout=CLUSTER)),
        {"c": product(a, b, np.float32)},
        {
            "a": ((m, k), shared(np.float16, 128, cga_layout=CLUSTER)),
            "b": ((k, n), shared(np.float16, 128, cga_layout=BOTH)),
        },
        {"num_ctas": 2},
    )


def specialised():
    rng = np.random.default_rng(0)
    m, n, k, block_k = 64, 64, 320, 64
    a, b = matrix(rng, (m, k), np.float16), matrix(rng, (k, n), np.float16)
    return Case(
        gluon_kernels.specialised,
        90,
        (1, 1, 1),
        dict(a=a, b=b, BLOCK_K=block_k, STEPS=k // block_k, STAGES=2, LAYOUT=accumulator(n, np.float16)),
        {"c": product(a, b, np.float32)},
        {"a": ((m, block_k), shared(np.float16, 128)), "b": ((block_k, n), shared(np.float16, 128))},
    )


def box_moved(source, start, box, target, to):
    """Return a copy of `target` into which the box of `source` at `start` is written at `to`.

    Elements outside the source are 0, and places outside the target are skipped.
    """
    result = target.copy()
    for offset in itertools.product(*map(range, box)):
        here, there = (tuple(x + o for x, o in zip(point, offset, strict=True)) for point in (start, to))
        inside, written_to = (
            all(0 <= x < size for x, size in zip(point, array.shape, strict=True))
            for point, array in ((here, source), (there, target))
        )
        if written_to:
            result[there] = source[here] if inside else 0
    return result


def move_box(dtype, shape, box, start, to, swizzle=0, add=False):
    rng = np.random.default_rng(0)
    source = rng.integers(-8, 8, shape).astype(dtype)
    target = rng.integers(-8, 8, shape).astype(dtype)
    result = box_moved(source, start, box, target, to)
    if add:
        result = target + box_moved(source, start, box, np.zeros_like(target), to)
    tile = (box, shared(dtype, swizzle, rank=len(box)))
    return Case(
        gluon_kernels.move_box,
        90,
        (1, 1, 1),
        dict(source=source, FROM=gl.tuple(start), TO=gl.tuple(to), ADD=add),
        {"target": exactly(result, target)},
        {"source": tile, "target": tile},
    )


def add_tiles(capability, dtype):
    rng = np.random.default_rng(0)
    a = rng.integers(-8, 8, (96, 32)).astype(dtype)
    initial = rng.integers(-8, 8, (32, 32)).astype(dtype)
    return Case(
        triton_kernels.add_tiles,
        capability,
        (3, 1, 1),
        dict(a=a, ROWS=32),
        {"c": exactly((initial + a.reshape(3, 32, 32).sum(0)).astype(dtype), initial)},
        {"a": (32, 32), "c": (32, 32)},
    )


def split_k(capability, dtype, order):
    rng = np.random.default_rng(0)
    m, n, k = 16, 16, 128
    a, b = matrix(rng, (m, k), np.float16), matrix(rng, (k, n), np.float16)
    exact = a.astype(np.float64) @ b.astype(np.float64)
    runs = []
    for blocks in itertools.permutations(range(0, k, 32)):
        total = np.zeros((m, n), dtype)
        for start in blocks:
            part = a[:, start : start + 32].astype(np.float32) @ b[start : start + 32].astype(np.float32)
            total = (total + part.astype(dtype)).astype(dtype)
        runs.append(total)
    return Case(
        triton_kernels.split_k,
        capability,
        (k // 32, 1, 1),
        dict(a=a, b=b, K=k, N=n, BLOCK_M=m, BLOCK_N=n, BLOCK_K=32, ORDER=order),
        {"c": Expected(exact, farthest(exact, runs, dtype), dtype, 0)},
    )


def last_block_sums(capability):
    x = np.random.default_rng(0).integers(-8, 8, (4, 256)).astype(np.float32)
    return Case(
        triton_kernels.last_block_sums,
        capability,
        (4, 1, 1),
        dict(x=x, SIZE=256, BLOCKS=4),
        {
            "parts": exactly(2 * x),
            "count": exactly(np.array([4], np.int32), 0),
            "out": exactly(2 * x.sum(0)),
        },
    )


def take_tickets(capability):
    results = {"count": exactly(np.array([4], np.int32), 0), "out": exactly(np.arange(10, 14, dtype=np.int32))}
    return Case(triton_kernels.take_tickets, capability, (4, 1, 1), {}, results)


def on_rows(kernel, capability, x, result, options=(), **arguments):
    """Return the case of one block that reads rows of x and writes `out`."""
    rows, columns = x.shape
    return Case(
        kernel, capability, (1, 1, 1), dict(x=x, ROWS=rows, COLUMNS=columns, **arguments), {"out": result}, {},
        dict(options),
    )  # fmt: skip


def softmax(capability, rows=8, **options):
    x = np.random.default_rng(0).standard_normal((rows, 256)).astype(np.float32) * np.float32(4)
    exact = np.exp(x.astype(np.float64))
    exact /= exact.sum(1, keepdims=True)
    runs = []
    for shift in (x.max(1, keepdims=True), x.mean(1, keepdims=True), np.zeros((rows, 1), np.float32)):
        weights = np.exp2((x - shift) * np.float32(np.log2(np.e)))
        runs += [weights / weights.sum(1, keepdims=True), weights / np.add.accumulate(weights, 1)[:, -1:]]
    result = Expected(exact, farthest(exact, runs, np.float32), np.float32)
    return on_rows(triton_kernels.softmax, capability, x, result, options)


def integers(shape):
    return np.random.default_rng(0).integers(-(2**31), 2**31, shape).astype(np.int32)


def sort_rows(capability):
    x = integers((4, 128))
    return on_rows(triton_kernels.sort_rows, capability, x, exactly(np.sort(x, 1)))


def scan_rows(capability):
    x = integers((4, 256))
    return on_rows(triton_kernels.scan_rows, capability, x, exactly(np.add.accumulate(x, 1, np.int32)))


def largest_of_rows(capability):
    x = integers((8, 128))
    return on_rows(triton_kernels.largest_of_rows, capability, x, exactly(x.max(1)))


def gather_rows(capability):
    x, index = integers((16, 32)), np.random.default_rng(1).integers(0, 32, (16, 32)).astype(np.int32)
    return on_rows(
        triton_kernels.gather_rows, capability, x, exactly(np.take_along_axis(x, index.astype(int), 1)), index=index
    )


def transpose(capability, dtype, **options):
    x = np.arange(32 * 64, dtype=np.uint32).astype(np.uint8).reshape(32, 64).view(dtype)
    return on_rows(triton_kernels.transpose, capability, x, exactly(np.ascontiguousarray(x.T)), options)


def histogram(capability):
    x = np.random.default_rng(0).integers(0, 64, 512).astype(np.int32)
    return Case(
        triton_kernels.histogram, capability, (1, 1, 1), dict(x=x, SIZE=512, BINS=64),
        {"out": exactly(np.bincount(x, minlength=64).astype(np.int32))},
    )  # fmt: skip


def decode(capability, dtype, result):
    """Return all finite numbers of an 8-bit format."""
    x = np.arange(256, dtype=np.uint8).view(dtype)
    x = np.where(np.isfinite(x.astype(np.float32)), x, dtype(0)).astype(dtype)
    return Case(
        triton_kernels.convert, capability, (1, 1, 1), dict(x=x, SIZE=256), {"out": exactly(x.astype(result))}
    )  # fmt: skip


def encode(capability, dtype):
    """Return numbers of all magnitudes up to the largest of the format, because Triton saturates larger ones."""
    largest = float(ml_dtypes.finfo(dtype).max)
    rng = np.random.default_rng(0)
    x = np.ldexp(rng.uniform(-1, 1, 1024), rng.integers(-20, 16, 1024)).astype(np.float32)
    x = np.clip(x, -largest, largest)
    return Case(
        triton_kernels.convert, capability, (1, 1, 1), dict(x=x, SIZE=1024), {"out": exactly(x.astype(dtype))}
    )  # fmt: skip


def dependent():
    x = np.random.default_rng(0).integers(-8, 8, 128).astype(np.float32)
    return Case(
        triton_kernels.dependent, 90, (1, 1, 1), dict(x=x, SIZE=128), {"out": exactly(x + 1)}, {}, {"launch_pdl": True}
    )


def attention(capability, dtype, causal=False):
    rng = np.random.default_rng(0)
    length, d = 128, 64
    q, k, v = (matrix(rng, (length, d), dtype) for _ in range(3))
    scale = d**-0.5

    def run(type_, p_dtype, tile=length):
        """Return attention computed in `type_` over tiles of keys, with P rounded to `p_dtype`."""
        q_, k_, v_ = (x.astype(type_) for x in (q, k, v))
        s = (q_ @ k_.T) * type_(scale)
        if causal:
            s = np.where(np.tri(length, dtype=bool), s, -np.inf).astype(type_)
        p = np.exp(s - s.max(1, keepdims=True))
        total = sum(p[:, i : i + tile].astype(p_dtype).astype(type_) @ v_[i : i + tile] for i in range(0, length, tile))
        return total / p.sum(1, keepdims=True), s.max(1) + np.log(p.sum(1))

    exact, low = run(np.float64, np.float64), [run(np.float32, dtype, tile) for tile in (16, 64, length)]
    return Case(
        triton_kernels.attention, capability, (length // 64, 1, 1),
        dict(q=q, k=k, v=v, LENGTH=length, scale=scale, M=64, N=64, D=d, CAUSAL=causal),
        {
            name: Expected(exact[i], farthest(exact[i], [x[i] for x in low], type_), type_)
            for i, (name, type_) in enumerate((("out", dtype), ("lse", np.float32)))
        },
    )  # fmt: skip


def attention_backward(capability, dtype):
    rng = np.random.default_rng(0)
    length, d = 128, 64
    q, k, v, do = (matrix(rng, (length, d), dtype) for _ in range(4))
    scale = d**-0.5
    wide = q.astype(float) @ k.astype(float).T * scale
    lse = np.log(np.exp(wide).sum(1)).astype(np.float32)
    p = np.exp(wide - lse.astype(float)[:, None])
    delta = (p * (do.astype(float) @ v.astype(float).T)).sum(1).astype(np.float32)

    def run(type_, p_dtype, tile=length):
        q_, k_, v_, do_ = (x.astype(type_) for x in (q, k, v, do))
        p = np.exp(q_ @ k_.T * type_(scale) - lse.astype(type_)[:, None])
        ds = p * (do_ @ v_.T - delta.astype(type_)[:, None]) * type_(scale)
        p, ds = p.astype(p_dtype).astype(type_), ds.astype(p_dtype).astype(type_)
        parts = [slice(i, i + tile) for i in range(0, length, tile)]
        return (
            sum(ds[:, part] @ k_[part] for part in parts),
            sum(ds[part].T @ q_[part] for part in parts),
            sum(p[part].T @ do_[part] for part in parts),
        )

    exact, low = run(np.float64, np.float64), [run(np.float32, dtype, tile) for tile in (16, 64, length)]
    return Case(
        triton_kernels.attention_backward, capability, (length // 64, 1, 1),
        dict(q=q, k=k, v=v, do=do, lse=lse, delta=delta, LENGTH=length, scale=scale, M=64, N=64, D=d),
        {
            name: Expected(exact[i], farthest(exact[i], [x[i] for x in low], np.float32), np.float32, initial)
            for i, (name, initial) in enumerate((("dq", 0), ("dk", None), ("dv", None)))
        },
    )  # fmt: skip


def rank(n):
    """Return a box of n dimensions that begins before the first element of the source, and ends beyond the target."""
    shape, box = (3, 5, 6, 7, 32)[5 - n :], (2, 2, 4, 4, 16)[5 - n :]
    behind = [size - part + 1 for size, part in zip(shape, box, strict=True)]
    return move_box(np.float16, shape, box, (*[-1] * (n - 1), -8), (*behind[:-1], 24))


TRANSPOSES = ("nn", "nt", "tn", "tt")
SWIZZLES = (32, 64, 128)
FP8 = ("e4m3", "e5m2")


def cases():
    """Yield (name, function, arguments) of every case."""
    for (name, dtype), transposes in itertools.product(DTYPES.items(), TRANSPOSES):
        for capability in (80, 89, 90, 100, 120):
            # The simulator has tcgen05.mma of 16-bit numbers only.
            if (capability > 80 or name not in FP8) and (capability != 100 or name in ("f16", "bf16")):
                yield f"matmul-sm_{capability}-{name}-{transposes}", matmul, (capability, dtype, transposes)
        for capability in (90, 120):
            # The simulator has no ldmatrix.m16n16, with which Triton transposes bytes on sm_120.
            if name != "tf32" and not (capability == 120 and name in FP8 and transposes[0] == "t"):
                yield f"tiles-sm_{capability}-{name}-{transposes}", matmul_tiles, (capability, dtype, transposes)
    for capability in (90, 100, 120):
        for swizzle in SWIZZLES:
            blocks = (64, 64, swizzle // 2)
            yield f"tiles-sm_{capability}-swizzle-{swizzle}", matmul_tiles, (capability, BF16, "nt", blocks)
        outside = (64, 64, 64), (100, 56, 88)
        yield f"tiles-sm_{capability}-outside", matmul_tiles, (capability, np.float16, "nn", *outside)
    for name, transposes in itertools.product(("f16", "bf16"), TRANSPOSES):
        whole = (128, 128, 64), (128, 128, 128)
        yield f"tiles-sm_100-{name}-{transposes}", matmul_tiles, (100, DTYPES[name], transposes, *whole)
    yield "tiles-sm_100-n256", matmul_tiles, (100, BF16, "nn", (128, 256, 64), (128, 256, 128))
    yield "tiles-sm_100-specialised", partial(matmul_tiles, specialised=True), (100, np.float16)
    yield "tiles-sm_90-specialised", partial(matmul_tiles, specialised=True), (90, np.float16)
    yield "tiles-sm_90-cluster", partial(matmul_tiles, num_ctas=2), (90, np.float16, "nn", (128, 64, 64))
    # Triton refuses wgmma on shared memory without a swizzle.
    for swizzle in SWIZZLES:
        for name, dtype in DTYPES.items():
            depth = 128 if name in FP8 else 64
            yield f"wgmma-{name}-kk-{swizzle}", wgmma, (dtype, "kk", (swizzle, swizzle), 64, depth)
            yield f"wgmma-{name}-registers-{swizzle}", wgmma, (dtype, "kk", (swizzle, 128), 64, depth, True)
        for majors in ("mk", "km", "mm"):
            yield f"wgmma-bf16-{majors}-{swizzle}", wgmma, (BF16, majors, (swizzle, swizzle))
    for n in (8, 16, 128, 256):
        yield f"wgmma-f16-n{n}", wgmma, (np.float16, "kk", (128, 128), n)
    yield "wgmma-no-swizzle", wgmma_no_swizzle, ()
    for swizzle in SWIZZLES:
        yield f"copied-swizzle-{swizzle}", copied, (shared(np.float32, swizzle), 32)
    rows_of_16_bytes = gl.SharedLinearLayout([[0, 1], [0, 2], *([1 << bit, 0] for bit in range(7))])
    yield "copied-no-swizzle", copied, (rows_of_16_bytes, 4)
    yield "copied-scales", copied_scales, ()
    yield "multicast", multicast, ()
    yield "specialised", specialised, ()
    for n in range(1, 6):
        yield f"box-{n}d", rank, (n,)
    for swizzle in SWIZZLES:
        yield f"box-swizzle-{swizzle}", move_box, (np.float16, (40, 128), (16, 64), (-4, 72), (32, -8), swizzle)
    for dtype in (np.float32, np.float16, BF16, np.int32):
        name = np.dtype(dtype).name
        yield f"box-add-{name}", move_box, (dtype, (40, 64), (16, 32), (-4, 40), (32, -8), 0, True)
        if dtype != BF16:
            yield f"add-tiles-{name}", add_tiles, (90, dtype)
    for capability, dtype, order in itertools.product((80, 90), (np.float32, np.float16), ("relaxed", "acq_rel")):
        yield f"split-k-sm_{capability}-{np.dtype(dtype).name}-{order}", split_k, (capability, dtype, order)
    for capability in (80, 90, 120):
        for function in (
            last_block_sums,
            take_tickets,
            softmax,
            sort_rows,
            scan_rows,
            largest_of_rows,
            gather_rows,
            histogram,
        ):
            yield f"{function.__name__.replace('_', '-')}-sm_{capability}", function, (capability,)
        yield f"transpose-sm_{capability}", transpose, (capability, np.uint8)
    yield "softmax-cluster", partial(softmax, num_ctas=2), (90, 1)
    yield "transpose-cluster", partial(transpose, num_ctas=2), (90, np.uint8)
    yield "tiles-sm_90-c-transposed", partial(matmul_tiles, c_transposed=True), (90, np.float16)
    yield "decode-sm_80-e5m2", decode, (80, E5M2, np.float16)
    for capability, name in itertools.product((89, 90, 120), DTYPES):
        if name in FP8:
            for result in (np.float16, np.float32):
                made = capability, DTYPES[name], result
                yield f"decode-sm_{capability}-{name}-{np.dtype(result).name}", decode, made
        if name != "tf32":
            yield f"encode-sm_{capability}-{name}", encode, (capability, DTYPES[name])
    yield "dependent", dependent, ()
    for capability, name in itertools.product((80, 89, 90, 100, 120), ("f16", "bf16")):
        for causal in (False, True):
            end = "-causal" if causal else ""
            yield f"attention-sm_{capability}-{name}{end}", attention, (capability, DTYPES[name], causal)
        yield f"attention-backward-sm_{capability}-{name}", attention_backward, (capability, DTYPES[name])


CASES = {name: partial(function, *arguments) for name, function, arguments in cases()}
# The cases of the default tests; docs/simulator_evidence.md names only these.
DEFAULT = {
    "matmul-sm_80-f16-nn",
    "matmul-sm_80-bf16-tt",
    "matmul-sm_80-tf32-nn",
    "matmul-sm_89-e4m3-nt",
    "matmul-sm_120-e5m2-nn",
    "tiles-sm_90-bf16-tn",
    "tiles-sm_90-c-transposed",
    "tiles-sm_90-outside",
    "tiles-sm_90-specialised",
    "tiles-sm_90-cluster",
    "tiles-sm_100-f16-tn",
    "tiles-sm_100-swizzle-64",
    "tiles-sm_100-specialised",
    "tiles-sm_120-swizzle-64",
    "wgmma-bf16-kk-64",
    "wgmma-bf16-mm-128",
    "wgmma-bf16-mm-32",
    "wgmma-bf16-registers-32",
    "wgmma-bf16-registers-128",
    "wgmma-tf32-registers-64",
    "wgmma-e4m3-kk-128",
    "wgmma-f16-n8",
    "wgmma-no-swizzle",
    "copied-swizzle-64",
    "copied-no-swizzle",
    "copied-scales",
    "multicast",
    "specialised",
    "box-1d",
    "box-2d",
    "box-3d",
    "box-4d",
    "box-5d",
    "box-swizzle-32",
    "box-add-float16",
    "add-tiles-float32",
    "split-k-sm_80-float16-relaxed",
    "split-k-sm_90-float32-acq_rel",
    "last-block-sums-sm_80",
    "take-tickets-sm_80",
    "softmax-sm_80",
    "softmax-cluster",
    "sort-rows-sm_80",
    "scan-rows-sm_80",
    "largest-of-rows-sm_90",
    "gather-rows-sm_90",
    "histogram-sm_80",
    "transpose-sm_80",
    "decode-sm_89-e4m3-float16",
    "decode-sm_90-e5m2-float32",
    "encode-sm_89-e4m3",
    "dependent",
    "attention-sm_80-bf16-causal",
    "attention-sm_100-bf16",
    "attention-backward-sm_90-f16",
}
