"""Micro-kernels of Hopper's asynchronous instructions: wgmma, bulk copies, mbarriers, clusters.

Each is the body of a kernel of micro_kernels.py, for the simulator and for a GPU. Their results are exact.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from ..tensor_map import DATA_TYPES, TensorMap

Array = npt.NDArray[Any]
SHARED_BYTES = 40960


@dataclass(frozen=True)
class HopperCase:
    """The body of a kernel and its arrays, of which `out`, the last, holds the output's initial values.

    `maps` holds a pair for each tensor map: the index of its array, and a function from the array's address to the map.
    """

    name: str
    body: str
    inputs: tuple[Array, ...]
    out: Array
    maps: tuple[tuple[int, Callable[[int], TensorMap]], ...] = ()
    threads: int = 128
    blocks: int = 1
    directives: str = ""
    target: str = "sm_90a"
    dynamic: int = 0  # bytes of dynamic shared memory, at `dynamic`; smem and bars are then absent

    @property
    def options(self) -> dict[str, Any]:
        """Keyword arguments for `micro_kernels.source`."""
        static = f".shared .align 1024 .b8 smem[{SHARED_BYTES}]; .shared .align 8 .b8 bars[64];"
        return {
            "shared": "" if self.dynamic else static,
            "variables": ".extern .shared .align 1024 .b8 dynamic[];" if self.dynamic else "",
            "target": self.target,
            "directives": self.directives,
        }


# ---- building blocks


def fill(size: int, threads: int, *, pointer: int = 0) -> str:
    """PTX by which a block copies `size` bytes from a pointer to smem, visible to the async proxy afterwards."""
    return f"""
        mov.u32 %r60, smem;
        shl.b32 %r61, %t, 4;
    FILL:
        setp.ge.u32 %q7, %r61, {size};
        @%q7 bra FILLED;
        cvt.u64.u32 %d30, %r61;
        add.u64 %d30, %d30, %p{pointer};
        ld.global.v4.b32 {{%r56, %r57, %r58, %r59}}, [%d30];
        add.u32 %r62, %r60, %r61;
        st.shared.v4.b32 [%r62], {{%r56, %r57, %r58, %r59}};
        add.u32 %r61, %r61, {16 * threads};
        bra FILL;
    FILLED:
        fence.proxy.async.shared::cta;
        bar.sync 0;
    """


def drain(size: int, threads: int, pointer: int) -> str:
    """PTX by which a block copies `size` bytes from smem to its part of the array at a pointer."""
    return f"""
        mov.u32 %r60, smem;
        shl.b32 %r61, %t, 4;
    DRAIN:
        setp.ge.u32 %q7, %r61, {size};
        @%q7 bra DRAINED;
        add.u32 %r62, %r60, %r61;
        ld.shared.v4.b32 {{%r56, %r57, %r58, %r59}}, [%r62];
        mad.lo.u32 %r62, %block, {size}, %r61;
        cvt.u64.u32 %d30, %r62;
        add.u64 %d30, %d30, %p{pointer};
        st.global.v4.b32 [%d30], {{%r56, %r57, %r58, %r59}};
        add.u32 %r61, %r61, {16 * threads};
        bra DRAIN;
    DRAINED:
    """


def initialise(count: int = 1) -> str:
    """PTX that initialises an mbarrier at %r50; %q6 is true in thread 0."""
    return f"""
        mov.u32 %r50, bars;
        setp.eq.u32 %q6, %t, 0;
        @%q6 mbarrier.init.shared::cta.b64 [%r50], {count};
        @%q6 fence.mbarrier_init.release.cluster;
        bar.sync 0;
    """


def wait(parity: int = 0, label: str = "WAIT") -> str:
    """PTX by which all threads wait for a phase of the mbarrier at %r50."""
    return f"""
    {label}:
        mbarrier.try_wait.parity.shared::cta.b64 %q5, [%r50], {parity}, 0x989680;
        @!%q5 bra {label};
    """


# ---- wgmma

_TYPES = {
    "f16": np.float16,
    "bf16": ml_dtypes.bfloat16,
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
}


@dataclass(frozen=True)
class Operand:
    """A matrix (rows, depth) in shared memory, K-major or MN-major; swizzle 128, 64 or 32 bytes, 16 is none."""

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
        """Number of instructions along K, each of which takes 32 bytes of a row."""
        return max(self.swizzle // 32, 1) if self.k_major or self.swizzle == 128 else 2

    @property
    def depth(self) -> int:
        """Number of elements along K."""
        return self.steps * 32 // self.itemsize

    @property
    def strides(self) -> tuple[int, int]:
        """(leading, stride) byte offsets; tiles of 8 rows of `swizzle` bytes are contiguous."""
        if self.k_major:
            # Without a swizzle, the two halves of the depth follow each other.
            return (8 * 16 * self.rows // 8, 128) if self.swizzle == 16 else (16, 8 * self.swizzle)
        groups = self.depth // 8
        return (128, 128 * groups) if self.swizzle == 16 else (8 * self.swizzle * groups, 8 * self.swizzle)

    @property
    def step_bytes(self) -> int:
        """Byte offset between the matrices of successive instructions."""
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
        """The descriptor without its address."""
        leading, stride = self.strides
        return leading >> 4 << 16 | stride >> 4 << 32 | {16: 0, 128: 1, 64: 2, 32: 3}[self.swizzle] << 62


def descriptor(register: str, offset: int, constant: int, apart: int = 0) -> str:
    """PTX of a descriptor of the matrix at smem + offset, plus `apart` bytes per warpgroup."""
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
    """PTX of one instruction."""
    depth = 16 if "f16" in types else 32
    accumulators = ", ".join(f"%f{i}" for i in range(columns // 2))
    return (
        f"wgmma.mma_async.sync.aligned.m64n{columns}k{depth}.f32.{types} {{{accumulators}}}, {a}, {b}, {adds}, {flags};"
    )


def wgmma_body(a: Operand | None, b: Operand, type_a: str, *, sign: int = 1, adds: bool = True, groups: int = 1) -> str:
    """D += A B over the whole depth.

    %p0: shared-memory image of A and B; %p1: accumulators (128, columns / 2); %p2: words (128, 4 steps) of A if it is
    in registers; last pointer: D. Each of `groups` warpgroups has its own.
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
    """Bytes of random small integers, whose sums are exact in every order."""
    dtype = np.dtype(_TYPES[type_])
    return rng.integers(-3, 4, size // dtype.itemsize).astype(dtype).view(np.uint8)


def wgmma_case(
    name: str, a: Operand | None, b: Operand, type_a: str = "", *, groups: int = 1, **options: Any
) -> HopperCase:
    """D = C + A B on random bytes in shared memory, in the given layouts."""
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


# name -> operands, type of A in registers, options
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
    """Products of all magnitudes, which show how many bits of them and of the old accumulator an fp8 sum keeps."""
    case = wgmma_case("e4m3-sums", Operand(64, "e4m3"), Operand(64, "e4m3"))
    rng = np.random.default_rng(3)
    image, before = case.inputs
    numbers = rng.normal(size=image.size) * 2.0 ** rng.integers(-6, 7, image.size)
    sums = (rng.normal(size=before.shape) * 2.0 ** rng.integers(-8, 9, before.shape)).astype(np.float32)
    return replace(case, inputs=(numbers.astype(_TYPES["e4m3"]).view(np.uint8), sums))


# ---- bulk copies


def tensor(dtype: str, shape: tuple[int, ...], box: tuple[int, ...], swizzle: int = 0) -> Callable[[int], TensorMap]:
    """The tensor map of a dense array of `shape`, innermost dimension first."""
    item = np.dtype({"u8": np.uint8, "bf16": np.uint16, "f16": np.uint16, "f32": np.float32}[dtype]).itemsize
    strides = tuple(int(np.prod(shape[: i + 1])) * item for i in range(len(shape) - 1))
    return partial(_at, DATA_TYPES[dtype], shape, strides, box, swizzle)


def _at(
    data_type: int, shape: tuple[int, ...], strides: tuple[int, ...], box: tuple[int, ...], swizzle: int, address: int
) -> TensorMap:
    return TensorMap(data_type, address, shape, strides, box, swizzle)


# name -> (type, shape, box, swizzle, coordinates); boxes inside the tensor, across each edge, and outside
BOXES: dict[str, tuple[str, tuple[int, ...], tuple[int, ...], int, tuple[int, ...]]] = {
    "1d": ("f32", (100,), (64,), 0, (60,)),
    "2d": ("bf16", (64, 40), (64, 16), 128, (0, 8)),
    "2d-plain": ("bf16", (72, 40), (40, 16), 0, (24, 30)),
    "2d-beyond": ("bf16", (64, 40), (64, 16), 128, (0, 30)),
    "2d-before": ("bf16", (96, 40), (64, 16), 128, (-16, -5)),
    "2d-odd": ("bf16", (40, 40), (32, 8), 64, (19, 3)),
    "2d-outside": ("bf16", (64, 40), (64, 8), 128, (64, 0)),
    "2d-32": ("bf16", (64, 40), (16, 24), 32, (32, 5)),
    "2d-bytes": ("u8", (208, 20), (128, 16), 128, (80, 7)),
    "2d-f32": ("f32", (64, 40), (32, 16), 128, (32, 9)),
    "3d": ("f16", (64, 10, 6), (32, 4, 3), 64, (32, 8, 2)),
    "4d": ("bf16", (128, 20, 3, 2), (64, 16, 1, 1), 128, (64, 10, 2, 1)),
    "4d-small": ("bf16", (40, 5, 2, 2), (64, 16, 1, 1), 128, (0, 0, 1, 1)),
    "4d-tall": ("bf16", (64, 200, 1, 2), (64, 192, 1, 1), 128, (0, 16, 0, 1)),
    "4d-bytes": ("u8", (192, 80, 2, 1), (64, 96, 1, 1), 64, (64, 0, 1, 0)),
    "4d-wide-bytes": ("u8", (96, 70, 2, 1), (128, 64, 1, 1), 128, (0, 20, 1, 0)),
    "5d": ("bf16", (16, 5, 4, 3, 2), (16, 2, 3, 2, 2), 32, (0, 4, 2, 1, 1)),
}
HINT = "0x14F0000000000000"  # evict last


def box_bytes(name: str) -> int:
    """Bytes of a box in shared memory."""
    dtype, _, box, _, _ = BOXES[name]
    return int(np.prod(box)) * {"u8": 1, "f32": 4}.get(dtype, 2)


def box_array(name: str, rng: np.random.Generator) -> npt.NDArray[np.uint8]:
    """The bytes of the tensor."""
    dtype, shape, _, _, _ = BOXES[name]
    return rng.integers(1, 256, int(np.prod(shape)) * {"u8": 1, "f32": 4}.get(dtype, 2), dtype=np.uint8)


def load_case(name: str, hint: bool = False) -> HopperCase:
    """Load a box and output the bytes of shared memory; with `hint`, also prefetch and pass a cache policy."""
    dtype, shape, box, swizzle, at = BOXES[name]
    size, rank = box_bytes(name), len(shape)
    coordinates = ", ".join(f"%r{i}" for i in range(rank))
    prefetch = f"""
        prefetch.tensormap [%m0];
        cp.async.bulk.prefetch.tensor.{rank}d.L2.global.tile [%m0, {{{coordinates}}}];
        cp.async.bulk.prefetch.L2.global [%p0], 64;
    """
    body = f"""
        {initialise()}
        mov.u32 %r60, smem;
        {" ".join(f"mov.b32 %r{i}, {x};" for i, x in enumerate(at))}
        mov.b64 %d0, {HINT};
        {prefetch if hint else ""}
        @%q6 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r50], {size};
        @%q6 cp.async.bulk.tensor.{rank}d.shared::cluster.global.tile.mbarrier::complete_tx::bytes\
{".L2::cache_hint" if hint else ""} [%r60], [%m0, {{{coordinates}}}], [%r50]{", %d0" if hint else ""};
        {wait()}
        {drain(size, 128, 1)}
    """
    array = box_array(name, np.random.default_rng(rank))
    maps = ((0, tensor(dtype, shape, box, swizzle)),)
    return HopperCase(f"load.{name}{'-hint' if hint else ''}", body, (array,), np.zeros(size, np.uint8), maps)


def store_case(name: str, operation: str = "") -> HopperCase:
    """Store the bytes of shared memory to a box of the output, or reduce with `operation`."""
    dtype, shape, box, swizzle, at = BOXES[name]
    size, rank, rng = box_bytes(name), len(shape), np.random.default_rng(len(name))
    coordinates = ", ".join(f"%r{i}" for i in range(rank))
    opcode = "cp.reduce.async.bulk" if operation else "cp.async.bulk"
    body = f"""
        {fill(size, 128)}
        mov.u32 %r60, smem;
        {" ".join(f"mov.b32 %r{i}, {x};" for i, x in enumerate(at))}
        setp.ne.u32 %q0, %t, 0;
        @%q0 exit;
        {opcode}.tensor.{rank}d.global.shared::cta{f".{operation}" if operation else ""}.tile.bulk_group \
[%m0, {{{coordinates}}}], [%r60];
        cp.async.bulk.commit_group;
        cp.async.bulk.wait_group 0;
    """
    if operation:
        kind = {"bf16": ml_dtypes.bfloat16, "f16": np.float16, "f32": np.float32}[dtype]
        source = rng.integers(-9, 10, int(np.prod(box))).astype(kind).view(np.uint8)
        out = rng.integers(-9, 10, int(np.prod(shape))).astype(kind).view(np.uint8)
    else:
        source, out = rng.integers(0, 256, size, dtype=np.uint8), box_array(name, rng)
    maps = ((1, tensor(dtype, shape, box, swizzle)),)
    return HopperCase(f"{operation or 'store'}.{name}", body, (source,), out, maps)


# name -> (shape, strides in bytes, coordinates) of bf16 in boxes of 64 x 16 with 128-byte swizzle: heads closer than
# rows, overlapping rows, a tensor smaller than the box.
STRIDED: dict[str, tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]] = {
    "heads-between-rows": ((64, 20, 3, 2), (384, 128, 7680), (0, 10, 2, 1)),
    "overlapping": ((64, 20, 2, 1), (48, 2048, 4096), (0, 3, 1, 0)),
    "one-of-each": ((40, 5, 1, 1), (80, 80, 80), (0, 0, 0, 0)),
}


def strided_case(name: str) -> HopperCase:
    """A box of a tensor that is not dense."""
    shape, strides, at = STRIDED[name]
    body = f"""
        {initialise()}
        mov.u32 %r60, smem;
        {" ".join(f"mov.b32 %r{i}, {x};" for i, x in enumerate(at))}
        @%q6 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r50], 2048;
        @%q6 cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes \
[%r60], [%m0, {{%r0, %r1, %r2, %r3}}], [%r50];
        {wait()}
        {drain(2048, 128, 1)}
    """
    size = sum((extent - 1) * stride for extent, stride in zip(shape[1:], strides, strict=True)) + 2 * shape[0]
    array = np.random.default_rng(4).integers(1, 256, size, dtype=np.uint8)
    maps = ((0, partial(_at, DATA_TYPES["bf16"], shape, strides, (64, 16, 1, 1), 128)),)
    return HopperCase(f"strided.{name}", body, (array,), np.zeros(2048, np.uint8), maps)


def plain_case(kind: str) -> HopperCase:
    """1024 contiguous bytes: load, store or add."""
    rng = np.random.default_rng(1)
    source, out = (rng.integers(-9, 10, 256).astype(np.float32) for _ in range(2))
    if kind == "load":
        body = f"""
            {initialise()}
            mov.u32 %r60, smem;
            @%q6 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r50], 1024;
            @%q6 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r60], [%p0], 1024, [%r50];
            {wait()}
            {drain(1024, 128, 1)}
        """
    else:
        text = "cp.async.bulk.global.shared::cta.bulk_group"
        if kind == "add":
            text = "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32"
        body = f"""
            {fill(1024, 128)}
            mov.u32 %r60, smem;
            setp.ne.u32 %q0, %t, 0;
            @%q0 exit;
            {text} [%p1], [%r60], 1024;
            cp.async.bulk.commit_group;
            cp.async.bulk.wait_group 0;
        """
    return HopperCase(f"bulk.{kind}", body, (source,), out)


def added_twice_case() -> HopperCase:
    """Two reductions from one shared-memory buffer, which is rewritten after the first has read it."""
    body = f"""
        {fill(512, 32)}
        mov.u32 %r60, smem;
        shl.b32 %r61, %t, 4;
        add.u32 %r61, %r61, %r60;
        setp.eq.u32 %q0, %t, 0;
        @%q0 cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%p1], [%r60], 512;
        @%q0 cp.async.bulk.commit_group;
        @%q0 cp.async.bulk.wait_group.read 0;
        bar.warp.sync -1;
        ld.shared.v4.f32 {{%f0, %f1, %f2, %f3}}, [%r61];
        {" ".join(f"add.f32 %f{i}, %f{i}, 0f40400000;" for i in range(4))}
        st.shared.v4.f32 [%r61], {{%f0, %f1, %f2, %f3}};
        fence.proxy.async.shared::cta;
        bar.warp.sync -1;
        @%q0 cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%p1], [%r60], 512;
        @%q0 cp.async.bulk.commit_group;
        @%q0 cp.async.bulk.wait_group.read 0;
    """
    rng = np.random.default_rng(5)
    source, out = (rng.integers(-9, 10, 128).astype(np.float32) for _ in range(2))
    return HopperCase("bulk.add-twice", body, (source,), out, threads=32)


# ---- fragments and rows


def fragments_case(instruction: str) -> HopperCase:
    """Moves four 8 x 8 matrices of 16-bit numbers between registers and swizzled rows of 128 bytes.

    Warp w has 16 rows, of which it reads or writes the 16-byte chunks 2 w and 2 w + 1.
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
    """cp.async of 16 bytes with src-size 0, 2 .. 14, 16, and of 4 bytes with src-size 0 or 4."""
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


# ---- communication between blocks and warps

# Every block adds to the same four numbers of each lane, in block order, which determines the rounding of the sum.
TURNS_BODY = """
    mov.u32 %r9, %nctaid.x;
    mad.wide.u32 %d0, %t, 16, %p2;
    mad.lo.u32 %r0, %block, 32, %t;
    mad.wide.u32 %d1, %r0, 16, %p0;
    ld.global.v4.f32 {%f0, %f1, %f2, %f3}, [%d1];
    setp.ne.u32 %q0, %t, 0;
    @%q0 bra TURN;
AGAIN:
    ld.acquire.gpu.global.u32 %r1, [%p1];
    setp.ne.u32 %q1, %r1, %block;
    @%q1 bra AGAIN;
TURN:
    bar.warp.sync -1;
    red.global.add.v4.f32 [%d0], {%f0, %f1, %f2, %f3};
    bar.warp.sync -1;
    add.u32 %r2, %block, 1;
    @!%q0 st.release.gpu.global.u32 [%p1], %r2;
"""


def turns_case() -> HopperCase:
    """64 blocks that add random numbers one after the other."""
    numbers = np.random.default_rng(9).normal(size=(64, 128)).astype(np.float32)
    turn, out = np.zeros(1, np.uint32), np.zeros(128, np.float32)
    return HopperCase("turns", TURNS_BODY, (numbers, turn), out, threads=32, blocks=64)


# Ping-pong of two warps on a number in shared memory, with named barriers whose numbers are in registers.
BARRIERS_BODY = """
    mov.u32 %r60, smem;
    shr.u32 %r0, %t, 5;
    setp.eq.u32 %q0, %t, 0;
    @%q0 st.shared.b32 [%r60], 1;
    bar.sync 0;
    add.u32 %r1, %r0, 2;
    xor.b32 %r2, %r0, 1;
    add.u32 %r2, %r2, 2;
    mov.u32 %r3, 64;
    mov.u32 %r4, 0;
    setp.eq.u32 %q1, %r0, 1;
    @%q1 bar.arrive %r2, %r3;
ROUND:
    bar.sync %r1, %r3;
    and.b32 %r5, %t, 31;
    setp.eq.u32 %q2, %r5, 0;
    ld.shared.b32 %r6, [%r60];
    mad.lo.u32 %r6, %r6, 3, %r0;
    bar.warp.sync -1;
    @%q2 st.shared.b32 [%r60], %r6;
    bar.warp.sync -1;
    bar.arrive %r2, %r3;
    add.u32 %r4, %r4, 1;
    setp.lt.u32 %q3, %r4, 8;
    @%q3 bra ROUND;
    mad.wide.u32 %d0, %t, 4, %p0;
    st.global.b32 [%d0], %r6;
"""

# The maximum of dynamic shared memory, without static: its first address and its last word.
DYNAMIC_BYTES = 227 * 1024
DYNAMIC_BODY = f"""
    mov.u32 %r0, dynamic;
    and.b32 %r1, %r0, 1023;
    st.global.b32 [%p0], %r1;
    st.shared.b32 [%r0+{DYNAMIC_BYTES - 4}], 7;
    ld.shared.b32 %r2, [%r0+{DYNAMIC_BYTES - 4}];
    st.global.b32 [%p0+4], %r2;
"""


# Adds the arrays at %p0 and %p1 by red, red.v4, atom, in shared memory, and by a bulk reduction: which of them flush
# subnormal terms and sums to zero?
SUBNORMAL_SUMS_BODY = """
    mad.wide.u32 %d0, %t, 4, %p0;
    ld.global.f32 %f0, [%d0];
    mad.wide.u32 %d1, %t, 4, %p1;
    red.global.add.f32 [%d1], %f0;
    setp.ge.u32 %q0, %t, 8;
    @%q0 bra ATOMIC;
    mad.wide.u32 %d2, %t, 16, %p0;
    ld.global.v4.f32 {%f4, %f5, %f6, %f7}, [%d2];
    mad.wide.u32 %d3, %t, 16, %p1;
    red.global.add.v4.f32 [%d3+128], {%f4, %f5, %f6, %f7};
ATOMIC:
    atom.global.add.f32 %f1, [%d1+256], %f0;
    ld.global.f32 %f2, [%d1+384];
    mov.u32 %r60, smem;
    mad.lo.u32 %r61, %t, 4, %r60;
    st.shared.f32 [%r61], %f2;
    red.shared.add.f32 [%r61], %f0;
    ld.shared.f32 %f3, [%r61];
    st.global.f32 [%d1+384], %f3;
    st.shared.f32 [%r61+128], %f0;
    fence.proxy.async.shared::cta;
    bar.warp.sync -1;
    setp.ne.u32 %q1, %t, 0;
    @%q1 exit;
    add.u32 %r62, %r60, 128;
    add.u64 %d4, %p1, 512;
    cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%d4], [%r62], 128;
    cp.async.bulk.commit_group;
    cp.async.bulk.wait_group 0;
"""


def subnormal_sums_case() -> HopperCase:
    """Normal and subnormal sums of normal and subnormal terms, of either sign; all are exact."""
    old = np.array([0.0, -0.0, 0.25, -0.25, 1.0, -1.5, 2.0**-23, 4.0]) * 2.0**-126
    new = np.array([0.25, -0.5, 1.0, 1.5]) * 2.0**-126
    old, new = np.repeat(old, 4).astype(np.float32), np.tile(new, 8).astype(np.float32)
    return HopperCase("subnormals.add", SUBNORMAL_SUMS_BODY, (new,), np.tile(old, (5, 1)), threads=32)


# Bit mask of the powers of two of a pair that are zero: 1 is the lower, 2 the upper.
SUBNORMAL_POWERS_BODY = """
    mad.wide.u32 %d0, %t, 4, %p0;
    ld.global.b32 %r0, [%d0];
    ex2.approx.ftz.bf16x2 %r0, %r0;
    and.b32 %r1, %r0, 0x7FFF;
    and.b32 %r2, %r0, 0x7FFF0000;
    setp.eq.u32 %q0, %r1, 0;
    setp.eq.u32 %q1, %r2, 0;
    selp.b32 %r3, 1, 0, %q0;
    selp.b32 %r4, 2, 0, %q1;
    or.b32 %r3, %r3, %r4;
    mad.wide.u32 %d1, %t, 4, %p1;
    st.global.b32 [%d1], %r3;
"""


def subnormal_powers_case() -> HopperCase:
    """Exponents from -95 to -157, without the smallest normal power, for which approximations may differ."""
    exponents = -(95 + 2 * np.arange(32)).astype(ml_dtypes.bfloat16)
    pairs = np.stack([exponents, exponents[::-1]], axis=1).view(np.uint32)
    return HopperCase("subnormals.ex2", SUBNORMAL_POWERS_BODY, (pairs,), np.zeros(32, np.uint32), threads=32)


def in_flight_case() -> HopperCase:
    """Two wgmma groups in flight, as QK and PV in the forward mainloop; A of the second is in registers.

    The kernel waits for the first group and stores its result, then for the second.
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


# ---- mbarriers, clusters, warps

PARITY_BODY = f"""
    {initialise(2)}
    @!%q6 exit;
    mov.u32 %r40, 0;
    {
    "".join(
        f'''
    mbarrier.test_wait.parity.shared::cta.b64 %q0, [%r50], {parity};
    selp.b32 %r41, 1, 0, %q0;
    st.global.b32 [%p0+{8 * i + 4 * parity}], %r41;
    {"mbarrier.arrive.shared::cta.b64 %d0, [%r50];" if parity else ""}
    '''
        for i in range(6)
        for parity in (0, 1)
    )
}
"""

STATE_BODY = f"""
    {initialise(1)}
    @!%q6 exit;
    mbarrier.arrive.shared::cta.b64 %d0, [%r50];
    mbarrier.test_wait.shared::cta.b64 %q0, [%r50], %d0;
    selp.b32 %r0, 1, 0, %q0;
    st.global.b32 [%p0], %r0;
    mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%r50], 16;
    mbarrier.arrive.shared::cta.b64 %d0, [%r50];
    mbarrier.test_wait.shared::cta.b64 %q0, [%r50], %d0;
    selp.b32 %r0, 1, 0, %q0;
    st.global.b32 [%p0+4], %r0;
    mov.u32 %r60, smem;
    cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r60], [%p0], 16, [%r50];
    {wait(1)}
    mbarrier.test_wait.shared::cta.b64 %q0, [%r50], %d0;
    selp.b32 %r0, 1, 0, %q0;
    st.global.b32 [%p0+8], %r0;
"""

ELECT_BODY = """
    elect.sync %r0|%q0, 0xffffffff;
    vote.sync.ballot.b32 %r1, %q0, 0xffffffff;
    popc.b32 %r2, %r1;
    mad.wide.u32 %d0, %t, 4, %p0;
    st.global.b32 [%d0], %r2;
"""


def registers_case(name: str, threads: int, few: int, many: int) -> HopperCase:
    """The first warpgroup releases registers, and the others request all of them."""
    body = f"""
        setp.ge.u32 %q0, %t, 128;
        @%q0 bra MORE;
        setmaxnreg.dec.sync.aligned.u32 {few};
        bra DONE;
    MORE:
        setmaxnreg.inc.sync.aligned.u32 {many};
    DONE:
        mad.wide.u32 %d0, %t, 4, %p0;
        st.global.b32 [%d0], %t;
    """
    directives = f".maxntid {threads}, 1, 1 .minnctapersm 1"
    return HopperCase(name, body, (), np.zeros(threads, np.uint32), threads=threads, directives=directives)


REMOTE_BODY = f"""
    {initialise(2)}
    barrier.cluster.arrive.release.aligned;
    barrier.cluster.wait.acquire.aligned;
    mov.u32 %r0, %cluster_ctarank;
    xor.b32 %r1, %r0, 1;
    mapa.shared::cluster.u32 %r2, %r50, %r1;
    @%q6 mbarrier.arrive.shared::cta.b64 _, [%r50];
    @%q6 mbarrier.arrive.shared::cluster.b64 _, [%r2];
    {wait()}
    mov.u32 %r3, %cluster_nctarank;
    mad.lo.u32 %r4, %r3, 16, %r0;
    mad.lo.u32 %r5, %block, 128, %t;
    mad.wide.u32 %d0, %r5, 4, %p0;
    st.global.b32 [%d0], %r4;
    barrier.cluster.arrive.release.aligned;
    barrier.cluster.wait.acquire.aligned;
"""


PAIR: dict[str, Any] = {"blocks": 2, "directives": ".explicitcluster .reqnctapercluster 2, 1, 1"}


def multicast_case() -> HopperCase:
    """Each of two blocks multicasts its half of a tile to both."""
    body = f"""
        {initialise()}
        @%q6 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r50], 4096;
        barrier.cluster.arrive.release;
        barrier.cluster.wait.acquire;
        mov.u32 %r60, smem;
        mov.u32 %r0, %cluster_ctarank;
        mad.lo.u32 %r60, %r0, 2048, %r60;
        mov.u32 %r1, 0;
        mov.u32 %r2, 1;
        shl.b32 %r3, %r0, 4;
        mov.b16 %h0, 3;
        mov.b64 %d0, {HINT};
        @%q6 cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster\
.L2::cache_hint [%r60], [%m0, {{%r1, %r3, %r2, %r1}}], [%r50], %h0, %d0;
        {wait()}
        {drain(4096, 128, 1)}
        barrier.cluster.arrive.release;
        barrier.cluster.wait.acquire;
    """
    array = np.random.default_rng(2).integers(0, 256, 2 * 64 * 32 * 2, dtype=np.uint8)
    maps = ((0, tensor("bf16", (64, 32, 2, 1), (64, 16, 1, 1), 128)),)
    return HopperCase("cluster.multicast", body, (array,), np.zeros(2 * 4096, np.uint8), maps, **PAIR)


CASES = [
    *[wgmma_case(name, a, b, type_a, **options) for name, (a, b, type_a, options) in WGMMA_FORMS.items()],
    fp8_sums_case(),
    *[load_case(name) for name in BOXES],
    load_case("2d", hint=True),
    *[store_case(name) for name in BOXES if name != "2d-outside"],
    *[store_case(name, "add") for name in ("1d", "2d-beyond", "2d-f32", "3d", "4d")],
    store_case("2d-before", "min"),
    store_case("3d", "max"),
    *[plain_case(kind) for kind in ("load", "store", "add")],
    load_case("4d", hint=True),
    *[strided_case(name) for name in STRIDED],
    added_twice_case(),
    fragments_case("stmatrix"),
    fragments_case("ldmatrix.sync.aligned.m8n8.x4"),
    fragments_case("ldmatrix.sync.aligned.m8n8.x4.trans"),
    copies_case(),
    turns_case(),
    HopperCase("barriers", BARRIERS_BODY, (), np.zeros(64, np.uint32), threads=64),
    HopperCase("dynamic", DYNAMIC_BODY, (), np.zeros(2, np.uint32), threads=1, dynamic=DYNAMIC_BYTES),
    in_flight_case(),
    subnormal_sums_case(),
    subnormal_powers_case(),
    HopperCase("mbarrier.parity", PARITY_BODY, (), np.zeros((6, 2), np.uint32), threads=32),
    HopperCase("mbarrier.state", STATE_BODY, (), np.zeros(4, np.uint32), threads=32),
    HopperCase("elect", ELECT_BODY, (), np.zeros(64, np.uint32), threads=64),
    registers_case("setmaxnreg", 384, 24, 240),
    registers_case("setmaxnreg.40-232", 384, 40, 232),
    registers_case("setmaxnreg.32-160", 512, 32, 160),
    HopperCase("cluster.remote", REMOTE_BODY, (), np.zeros(256, np.uint32), **PAIR),
    multicast_case(),
]
BY_NAME = {case.name: case for case in CASES}
