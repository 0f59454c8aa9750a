"""Micro-kernels of bulk copies: TMA loads, stores, reductions and multicast of boxes, and contiguous copies."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import ml_dtypes
import numpy as np
import numpy.typing as npt

from ....gpu.tensor_map import DATA_TYPES, TensorMap
from .case import PAIR, HopperCase, drain, fill, initialise, wait


def tensor(dtype: str, shape: tuple[int, ...], box: tuple[int, ...], swizzle: int = 0) -> Callable[[int], TensorMap]:
    """Return a function from an address to the tensor map of a dense array there, innermost dimension first."""
    item = np.dtype({"u8": np.uint8, "bf16": np.uint16, "f16": np.uint16, "f32": np.float32}[dtype]).itemsize
    strides = tuple(int(np.prod(shape[: i + 1])) * item for i in range(len(shape) - 1))
    return partial(_at, DATA_TYPES[dtype], shape, strides, box, swizzle)


def _at(
    data_type: int, shape: tuple[int, ...], strides: tuple[int, ...], box: tuple[int, ...], swizzle: int, address: int
) -> TensorMap:
    return TensorMap(data_type, address, shape, strides, box, swizzle)


# name -> (type, shape, box, swizzle, coordinates): boxes inside the tensor, across each edge, and outside
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
# A box of two rows in each of two planes. It starts at the last row of the planes, so the second row of the box lies
# outside the tensor and is filled with zeros.
ROWS = "4d-rows"
ROWS_EXPECTED = np.concatenate([np.arange(80, 96), np.zeros(16), np.arange(112, 128), np.zeros(16)]).astype(np.uint8)
BOXES[ROWS] = ("u8", (16, 2, 2, 2), (16, 2, 2, 1), 0, (0, 1, 0, 1))
HINT = "0x14F0000000000000"  # L2::evict_last


def box_bytes(name: str) -> int:
    """Return the bytes of a box in shared memory."""
    dtype, _, box, _, _ = BOXES[name]
    return int(np.prod(box)) * {"u8": 1, "f32": 4}.get(dtype, 2)


def box_array(name: str, rng: np.random.Generator) -> npt.NDArray[np.uint8]:
    """Return random bytes of a tensor."""
    dtype, shape, _, _, _ = BOXES[name]
    return rng.integers(1, 256, int(np.prod(shape)) * {"u8": 1, "f32": 4}.get(dtype, 2), dtype=np.uint8)


def load_case(name: str, hint: bool = False) -> HopperCase:
    """Return a case that loads a box and outputs its bytes; with `hint` it also prefetches and sets a cache policy."""
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
    """Return a case that stores shared memory to a box of the output, or reduces it there with `operation`."""
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


# name -> (shape, strides in bytes, coordinates) of bf16 tensors, for boxes of 64 x 16 with 128-byte swizzle: strides of
# heads below those of rows, overlapping rows, and a tensor smaller than the box.
STRIDED: dict[str, tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]] = {
    "heads-between-rows": ((64, 20, 3, 2), (384, 128, 7680), (0, 10, 2, 1)),
    "overlapping": ((64, 20, 2, 1), (48, 2048, 4096), (0, 3, 1, 0)),
    "one-of-each": ((40, 5, 1, 1), (80, 80, 80), (0, 0, 0, 0)),
}


def strided_case(name: str) -> HopperCase:
    """Return a case that loads a box of a tensor that is not dense."""
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
    """Return a case that loads, stores or adds ("load", "store", "add") 1024 contiguous bytes."""
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
    expected = source + out if kind == "add" else source
    return HopperCase(f"bulk.{kind}", body, (source,), out, expected=expected)


def added_twice_case() -> HopperCase:
    """Return a case with two reductions from one shared-memory buffer, rewritten once the first has read it."""
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
    return HopperCase("bulk.add-twice", body, (source,), out, threads=32, expected=out + source + (source + 3))


def multicast_case() -> HopperCase:
    """Return a case in which each of two blocks multicasts its half of a tile to both."""
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
    *[load_case(name) for name in BOXES if name != ROWS],
    replace(load_case(ROWS), inputs=(np.arange(128, dtype=np.uint8),), expected=ROWS_EXPECTED),
    load_case("2d", hint=True),
    *[store_case(name) for name in BOXES if name not in ("2d-outside", ROWS)],
    *[store_case(name, "add") for name in ("1d", "2d-beyond", "2d-f32", "3d", "4d")],
    store_case("2d-before", "min"),
    store_case("3d", "max"),
    *[plain_case(kind) for kind in ("load", "store", "add")],
    load_case("4d", hint=True),
    *[strided_case(name) for name in STRIDED],
    added_twice_case(),
    multicast_case(),
]
