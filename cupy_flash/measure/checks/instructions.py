"""One micro-kernel per PTX instruction, with edge values, on which the simulator and a GPU must agree.

Each kernel has one thread per row of its inputs: it loads %a, %b, %c, executes the instruction and stores %d.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

# PTX type -> (register type, suffix of ld and st, NumPy dtype of the raw values)
TYPES: dict[str, tuple[str, str, npt.DTypeLike]] = {
    "pred": ("b32", "b32", np.uint32),
    **{f"{k}{n}": (f"b{max(n, 16)}", f"b{n}", f"uint{n}") for k in "bu" for n in (8, 16, 32, 64)},
    **{f"s{n}": (f"b{max(n, 16)}", f"b{n}", f"int{n}") for n in (8, 16, 32, 64)},
    "f32": ("f32", "f32", np.float32),
    "f64": ("f64", "f64", np.float64),
    **dict.fromkeys(("f16", "bf16", "e4m3x2", "e5m2x2"), ("b16", "b16", np.uint16)),
    **dict.fromkeys(("f16x2", "bf16x2", "tf32"), ("b32", "b32", np.uint32)),
}
THREADS = 128


@dataclass(frozen=True)
class Case:
    """An instruction, the types of its inputs and its output, and the architecture that it needs.

    `relative` is the error bound of an approximation; None where PTX defines every bit of the result.
    """

    name: str
    text: str
    inputs: tuple[str, ...]
    output: str
    arch: int = 80
    relative: float | None = None

    @property
    def ptx(self) -> str:
        """Return the PTX of the kernel `micro`; its parameters are input pointers, output pointer, number of rows."""
        parameters = [f".param .u64 p{i}" for i in range(len(self.inputs) + 1)] + [".param .u32 count"]
        lines = []
        names = "abc"
        for i, type_ in enumerate(self.inputs):
            register, suffix, dtype = TYPES[type_]
            size = np.dtype(dtype).itemsize
            lines += [
                f".reg .{register} %{names[i]};",
                f"ld.param.u64 %address, [p{i}];",
                f"mad.wide.u32 %address, %row, {size}, %address;",
                f"ld.global.{suffix} %{names[i]}, [%address];",
            ]
        register, suffix, dtype = TYPES[self.output]
        stores = [
            f"ld.param.u64 %address, [p{len(self.inputs)}];",
            f"mad.wide.u32 %address, %row, {np.dtype(dtype).itemsize}, %address;",
            f"st.global.{suffix} [%address], %d;",
        ]
        body = "\n    ".join([*lines, f".reg .{register} %d;", self.text, *stores])
        return f"""
.version 8.4
.target sm_{self.arch}
.address_size 64
.visible .entry micro({", ".join(parameters)})
{{
    .reg .pred %out, %p, %q;
    .reg .b64 %address;
    .reg .b32 %row, %n, %thread, %block, %size;
    mov.u32 %thread, %tid.x;
    mov.u32 %block, %ctaid.x;
    mov.u32 %size, %ntid.x;
    mad.lo.u32 %row, %block, %size, %thread;
    ld.param.u32 %n, [count];
    setp.ge.u32 %out, %row, %n;
    @%out exit;
    {body}
    exit;
}}
"""

    def values(self) -> list[np.ndarray]:
        """Return the inputs: every combination of edge values (fewer for three operands), then random bits."""
        edges = [edge_values(type_, few=len(self.inputs) == 3) for type_ in self.inputs]
        rows = list(zip(*itertools.product(*edges), strict=True))
        rng = np.random.default_rng(len(self.name))
        columns = [
            np.concatenate([np.array(column, dtype=TYPES[type_][2]), random_values(type_, rng, 512)])
            for type_, column in zip(self.inputs, rows, strict=True)
        ]
        return [column[: len(column) // 32 * 32] for column in columns]  # whole warps


_FLOATS = [
    0.0, -0.0, 1.0, -1.0, 1.5, -2.5, 0.5, -0.5, 0.1, 3.0, 2.0**-126, -(2.0**-127), 2.0**-149, -(2.0**-149),
    3.4028234663852886e38, -3.4028234663852886e38, np.inf, -np.inf, np.nan, 1 + 2.0**-23, 1e-30, 1e30, -7.0, 255.5,
    2.0**31, -(2.0**31), 2.0**31 - 128, 2.0**32, 2.0**63, -(2.0**63), 2.0**64, 65504.0, 65519.0, 65520.0, 448.0, 464.0,
    465.0, -480.0, 57344.0, 61439.0, 61440.0, 2.0**-24, 2.0**-25, 1.5 * 2.0**-25, 2.0**-14, 2.0**-9, 2.0**-10,
    3 * 2.0**-11, 2.0**-16, 2.0**-17, 1 + 2.0**-8, 1 + 3 * 2.0**-8, 1 + 2.0**-11, 1 + 3 * 2.0**-11, 2.0**-133,
]  # fmt: skip
_FEW_FLOATS = [0.0, -0.0, 1.0, -1.5, 0.1, 2.0**-126, 2.0**-149, -3.4028234663852886e38, np.inf, -np.inf, np.nan,
               1 + 2.0**-23, -(1 - 2.0**-24), 1e30, 2.0**-80, 16777217.0]  # fmt: skip


def edge_values(type_: str, *, few: bool = False) -> list[Any]:
    """Return the edge values of a type, or only the most important ones for `few`."""
    values: list[Any]
    if type_ in ("f32", "f64"):
        values = _FEW_FLOATS if few else _FLOATS
        if type_ == "f64" and not few:
            values = [*values, 1 + 2.0**-24, 1 + 2.0**-25, 2.0**-150, 1.7976931348623157e308, 5e-324, 2.0**-1022, 1e300]
        return list(values)
    if type_ in ("f16", "bf16"):
        exponent = {"f16": 10, "bf16": 7}[type_]
        top = 0x7C00 if type_ == "f16" else 0x7F80
        one = 0x3C00 if type_ == "f16" else 0x3F80
        values = [0, 1, (1 << exponent) - 1, 1 << exponent, one, one + 1, top - 1, top, top + 1]
        return values if few else values + [value | 0x8000 for value in values]
    if type_ in ("f16x2", "bf16x2"):
        halves = edge_values(type_[:-2], few=True)
        return [low | high << 16 for low, high in zip(halves, reversed(halves), strict=True)]
    if type_ in ("e4m3x2", "e5m2x2"):
        return list(range(0, 65536, 257)) if not few else [0, 0x7E01, 0x80FF]
    if type_ == "pred":
        return [0, 1]
    bits, signed = int(type_[1:]), type_[0] == "s"
    top = 1 << (bits - 1)
    values = [0, 1, 2, 3, 7, 31, 32, 33, 63, 64, 65, 127, top - 1, top, top + 1, 2 * top - 2, 2 * top - 1, 0x5A]
    if few:
        values = [0, 1, 5, 31, 32, 70, top - 1, top, 2 * top - 1]
    values = [value % (2 * top) for value in values]
    return [value - 2 * top if signed and value >= top else value for value in values]


def random_values(type_: str, rng: np.random.Generator, count: int) -> np.ndarray:
    """Return random bits; every second float is normally distributed."""
    dtype = np.dtype(TYPES[type_][2])
    if type_ == "pred":
        return rng.integers(0, 2, count, dtype=np.uint32)
    bits = rng.integers(0, 256, (count, dtype.itemsize), dtype=np.uint8).view(dtype)[:, 0]
    if dtype.kind == "f":
        bits[::2] = rng.standard_normal(len(bits[::2])).astype(dtype)
    return bits


def _same(opcode: str, types: str, operands: int, arch: int = 80) -> list[Case]:
    """Return a case "opcode.type d, a, b, ..." for each type."""
    names = ", ".join("abc"[:operands]).replace("a", "%a").replace("b", "%b").replace("c", "%c")
    return [Case(f"{opcode}.{t}", f"{opcode}.{t} %d, {names};", (t,) * operands, t, arch) for t in types.split()]


def _cvt(form: str, arch: int = 80) -> Case:
    to, origin = form.split(".")[-2:]

    return Case(f"cvt.{form}", f"cvt.{form} %d, %a;", (origin,), to, arch)


def _setp(comparison: str, type_: str) -> Case:
    text = f"setp.{comparison}.{type_} %p, %a, %b; selp.b32 %d, 1, 0, %p;"
    return Case(f"setp.{comparison}.{type_}", text, (type_, type_), "pred")


def _pair(form: str, arch: int = 80) -> Case:
    return Case(f"cvt.{form}", f"cvt.{form} %d, %a, %b;", ("f32", "f32"), form.split(".")[-2], arch)


INTEGERS = "u32 s32 u64 s64"
CASES = [
    *_same("add", f"u16 s16 {INTEGERS}", 2),
    *_same("sub", f"u16 s16 {INTEGERS}", 2),
    *_same("mul.lo", f"u16 s16 {INTEGERS}", 2),
    *_same("mul.hi", f"u16 s16 {INTEGERS}", 2),
    *_same("min", f"u16 s16 {INTEGERS}", 2),
    *_same("max", f"u16 s16 {INTEGERS}", 2),
    *_same("mad.lo", INTEGERS, 3),
    *_same("mad.hi", INTEGERS, 3),
    *_same("sad", INTEGERS, 3),
    *_same("abs", "s16 s32 s64", 1),
    *_same("neg", "s16 s32 s64", 1),
    *_same("and", "b16 b32 b64", 2),
    *_same("or", "b16 b32 b64", 2),
    *_same("xor", "b16 b32 b64", 2),
    *_same("not", "b16 b32 b64", 1),
    *_same("brev", "b32 b64", 1),
    *_same("add", "f32 f64", 2),
    *_same("sub", "f32 f64", 2),
    *_same("mul", "f32 f64", 2),
    *[case for mode in ("rz", "rm", "rp") for op in ("add", "sub", "mul") for case in _same(f"{op}.{mode}", "f32", 2)],
    *_same("add.ftz", "f32", 2),
    *_same("mul.sat", "f32", 2),
    *_same("fma.rn", "f32 f64", 3),
    *[case for mode in ("rz", "rm", "rp") for case in _same(f"fma.{mode}", "f32", 3)],
    *_same("div.rn", "f32 f64", 2),
    *_same("sqrt.rn", "f32 f64", 1),
    *_same("rcp.rn", "f32 f64", 1),
    *_same("min", "f32 f64", 2),
    *_same("max", "f32 f64", 2),
    *_same("min.NaN", "f32", 2),
    *_same("max.NaN", "f32", 2),
    *_same("abs", "f32 f64", 1),
    *_same("neg", "f32 f64", 1),
    *_same("copysign", "f32 f64", 2),
    *_same("add", "f16 f16x2", 2),
    *_same("mul", "f16 f16x2", 2),
    *_same("fma.rn", "f16 f16x2 bf16 bf16x2", 3),
    *_same("max", "f16 f16x2 bf16x2", 2),
    *[
        Case(f"mul.wide.{t}", f"mul.wide.{t} %d, %a, %b;", (t, t), f"{t[0]}{2 * int(t[1:])}")
        for t in ("u16", "s16", "u32", "s32")
    ],
    *[
        Case(f"mad.wide.{t}", f"mad.wide.{t} %d, %a, %b, %c;", (t, t, f"{t[0]}64"), f"{t[0]}64")
        for t in ("u32", "s32")
    ],
    *[
        Case(f"{op}.{t}", f"{op}.{t} %d, %a, %b;", (t, "u32"), t)
        for op, types in (("shl", "b16 b32 b64"), ("shr", "u16 s16 u32 s32 u64 s64"))
        for t in types.split()
    ],
    *[
        Case(f"shf.{d}.{m}.b32", f"shf.{d}.{m}.b32 %d, %a, %b, %c;", ("b32",) * 3, "b32")
        for d in "lr"
        for m in ("wrap", "clamp")
    ],
    *[Case(f"{op}.{t}", f"{op}.{t} %d, %a;", (t,), "u32") for op in ("clz", "popc") for t in ("b32", "b64")],
    *[
        Case(f"bfind{m}.{t}", f"bfind{m}.{t} %d, %a;", (t,), "u32")
        for m in ("", ".shiftamt")
        for t in INTEGERS.split()
    ],
    *[Case(f"bfe.{t}", f"bfe.{t} %d, %a, %b, %c;", (t, "u32", "u32"), t) for t in INTEGERS.split()],
    Case("bfi.b32", "bfi.b32 %d, %a, 0x12345678, %b, %c;", ("b32", "u32", "u32"), "b32"),
    Case("bfi.b64", "bfi.b64 %d, %a, 0x123456789abcdef0, %b, %c;", ("b64", "u32", "u32"), "b64"),
    Case("lop3.b32.0xca", "lop3.b32 %d, %a, %b, %c, 0xca;", ("b32",) * 3, "b32"),
    Case("lop3.b32.0x96", "lop3.b32 %d, %a, %b, %c, 0x96;", ("b32",) * 3, "b32"),
    Case("prmt.b32", "prmt.b32 %d, %a, %b, %c;", ("b32",) * 3, "b32"),
    Case("selp.b32", "setp.ne.u32 %p, %c, 0; selp.b32 %d, %a, %b, %p;", ("b32", "b32", "pred"), "b32"),
    Case("slct.b32.s32", "slct.b32.s32 %d, %a, %b, %c;", ("b32", "b32", "s32"), "b32"),
    Case("madc.u32", "{.reg .b32 %z; mad.lo.cc.u32 %z, %a, %b, %c; madc.hi.u32 %d, %a, %b, 0;}", ("u32",) * 3, "u32"),
    Case("addc.u64", "{.reg .b64 %z; add.cc.u64 %z, %a, %b; addc.u64 %d, 0, 0;}", ("u64", "u64"), "u64"),
    Case("subc.u64", "{.reg .b64 %z; sub.cc.u64 %z, %a, %b; subc.u64 %d, 0, 0;}", ("u64", "u64"), "u64"),
    Case("dp4a.s32.s32", "dp4a.s32.s32 %d, %a, %b, %c;", ("b32", "b32", "s32"), "s32"),
    Case("dp4a.u32.u32", "dp4a.u32.u32 %d, %a, %b, %c;", ("b32", "b32", "u32"), "u32"),
    *[
        # The divisor is made odd, because PTX leaves division by zero undefined.
        Case(f"{op}.{t}", f"or.b{t[1:]} %b, %b, 1; {op}.{t} %d, %a, %b;", (t, t), t)
        for op in ("div", "rem")
        for t in INTEGERS.split()
    ],
    *[_setp(c, t) for t in ("u32", "s32", "u64", "s64") for c in ("eq", "ne", "lt", "le", "gt", "ge")],
    *[
        _setp(c, t)
        for t in ("f32", "f64")
        for c in ["eq", "ne", "lt", "le", "gt", "ge", "equ", "neu", "ltu", "leu", "gtu", "geu", "num", "nan"]
    ],
    Case(
        "setp.lt.and.f32",
        "setp.ne.u32 %q, %c, 0; setp.lt.and.f32 %p, %a, %b, !%q; selp.b32 %d, 1, 0, %p;",
        ("f32", "f32", "pred"),
        "pred",
    ),
    *[
        _cvt(f"{mode}.{to}.{origin}")
        for origin in ("f32", "f64")
        for to in ("s32", "u32", "s64", "u64", "s16", "u8")
        for mode in ("rni", "rzi", "rmi", "rpi")
    ],
    *[_cvt(f"{mode}.f32.{t}") for mode in ("rn", "rz", "rm", "rp") for t in ("s32", "u32", "s64", "u64", "f64")],
    *[_cvt(f"rn.f64.{t}") for t in ("s32", "u32", "s64", "u64")],
    *[_cvt(f"{mode}.f32.f32") for mode in ("rni", "rzi", "rmi", "rpi")],
    *[_cvt(form) for form in ("f64.f32", "f32.f16", "f32.bf16", "sat.f32.f32", "u16.u32", "s32.s16", "s64.s32")],
    *[_cvt(form) for form in ("rn.f16.f32", "rz.f16.f32", "rn.bf16.f32", "rz.bf16.f32", "rn.f16.s32")],
    *[_cvt(form) for form in ("sat.u8.s32", "sat.s16.s32", "rna.tf32.f32", "rn.f16.f64", "rn.relu.bf16.f32")],
    *[_pair(form) for form in ("rn.f16x2.f32", "rn.bf16x2.f32", "rn.relu.f16x2.f32", "rz.bf16x2.f32")],
    *[_pair(f"rn.satfinite.{to}.f32", 89) for to in ("e4m3x2", "e5m2x2")],
    *[_cvt(form, 89) for form in ("rn.f16x2.e4m3x2", "rn.f16x2.e5m2x2", "rn.satfinite.e4m3x2.f16x2")],
    # Approximations with the relative error bounds of the PTX ISA's tables.
    *[
        Case(f"{op}.f32", f"{op}.f32 %d, %a;", ("f32",), "f32", relative=bound)
        for op, bound in (
            ("ex2.approx.ftz", 2.0**-21),
            ("lg2.approx.ftz", 2.0**-21),
            ("rcp.approx.ftz", 2.0**-22),
            ("rsqrt.approx.ftz", 2.0**-21),
            ("sqrt.approx.ftz", 2.0**-21),
            ("tanh.approx", 2.0**-10),
        )
    ],
    Case(
        "ex2.approx.ftz.bf16",
        ".reg .b16 %x; ex2.approx.ftz.bf16 %x, %a; cvt.f32.bf16 %d, %x;",
        ("bf16",),
        "f32",
        90,
        relative=2.0**-7,
    ),
]  # fmt: skip
BY_NAME = {case.name: case for case in CASES}

# Warp-level instructions.
WARP_CASES = [
    *[Case(f"shfl.{mode}.{width}", f"shfl.sync.{mode}.b32 %d, %a, 3, {(32 - width) << 8 | clamp}, -1;", ("b32",), "b32")
      for mode, clamp in (("up", 0), ("down", 31), ("bfly", 31), ("idx", 31)) for width in (32, 8)],
    *[Case(f"redux.{op}", f"redux.sync.{op} %d, %a, -1;", (op.split(".")[1],), op.split(".")[1])
      for op in ("add.u32", "min.s32", "max.s32", "min.u32", "max.u32", "and.b32", "or.b32", "xor.b32")],
    Case("vote.ballot", "setp.ne.u32 %p, %a, 0; vote.sync.ballot.b32 %d, %p, -1;", ("pred",), "b32"),
    Case("match.any", "match.any.sync.b32 %d, %a, -1;", ("pred",), "b32"),
]  # fmt: skip

# name -> (shape, type, registers of A, registers of B)
MMA_FORMS = {
    "m16n8k16-f16": ("m16n8k16", "f16", 4, 2),
    "m16n8k16-bf16": ("m16n8k16", "bf16", 4, 2),
    "m16n8k8-f16": ("m16n8k8", "f16", 2, 1),
    "m16n8k8-bf16": ("m16n8k8", "bf16", 2, 1),
    "m16n8k8-tf32": ("m16n8k8", "tf32", 4, 2),
    "m16n8k32-e4m3": ("m16n8k32", "e4m3", 4, 2),
    "m16n8k32-e5m2": ("m16n8k32", "e5m2", 4, 2),
}


def mma_body(form: str) -> str:
    """Return the body for one warp; A, B, C and D are (32, registers) arrays at %p0 to %p3 (see micro_kernels.py)."""
    shape, type_, a_words, b_words = MMA_FORMS[form]
    lines, registers = [], {}
    for pointer, (name, count, first, suffix) in enumerate(
        (("a", a_words, "r0", "b32"), ("b", b_words, "r8", "b32"), ("c", 4, "f0", "f32"))
    ):
        names = [f"%{first[0]}{int(first[1:]) + i}" for i in range(count)]
        registers[name] = ", ".join(names)
        lines.append(f"mad.wide.u32 %d0, %t, {4 * count}, %p{pointer};")
        lines += [f"ld.global.{suffix} {register}, [%d0+{4 * i}];" for i, register in enumerate(names)]
    a, b, c = registers["a"], registers["b"], registers["c"]
    lines.append(f"mma.sync.aligned.{shape}.row.col.f32.{type_}.{type_}.f32 {{{c}}}, {{{a}}}, {{{b}}}, {{{c}}};")
    lines.append("mad.wide.u32 %d0, %t, 16, %p3;")
    lines += [f"st.global.f32 [%d0+{4 * i}], %f{i};" for i in range(4)]
    return "\n    ".join(lines)


def ldmatrix_body(count: int, size: int, *, transposed: bool) -> str:
    """Return a body for one warp that copies `size` bytes from %p0 to shared `tile` and stores the fragments to %p2.

    %p1 holds the row offset of each lane.
    """
    registers = ", ".join(f"%r{i}" for i in range(count))
    return f"""
        mov.u32 %r20, tile;
        mov.u32 %r21, %t;
    COPY:
        setp.ge.u32 %q0, %r21, {size // 4};
        @%q0 bra DONE;
        mad.wide.u32 %d0, %r21, 4, %p0;
        ld.global.b32 %r22, [%d0];
        mad.lo.u32 %r23, %r21, 4, %r20;
        st.shared.b32 [%r23], %r22;
        add.u32 %r21, %r21, 32;
        bra COPY;
    DONE:
        bar.warp.sync -1;
        mad.wide.u32 %d0, %t, 4, %p1;
        ld.global.b32 %r24, [%d0];
        add.u32 %r24, %r24, %r20;
        ldmatrix.sync.aligned.m8n8.x{count}{".trans" if transposed else ""}.shared.b16 {{{registers}}}, [%r24];
        mad.wide.u32 %d0, %t, {4 * count}, %p2;
        {" ".join(f"st.global.b32 [%d0+{4 * i}], %r{i};" for i in range(count))}
    """
