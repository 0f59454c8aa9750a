"""Records of parsed PTX: operands, instructions, variables, functions, modules."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field

TYPE_BYTES = {
    **{f"{kind}{bits}": bits // 8 for kind in "bus" for bits in (8, 16, 32, 64)},
    **{"f16": 2, "bf16": 2, "f32": 4, "f64": 8, "f16x2": 4, "bf16x2": 4, "b128": 16, "tf32": 4, "f32x2": 8},
    **{"e4m3": 1, "e5m2": 1, "e4m3x2": 2, "e5m2x2": 2, "pred": 1},
}


@dataclass(frozen=True, slots=True)
class Register:
    """A virtual register; `type` is its declared type, without the dot."""

    name: str
    type: str


@dataclass(frozen=True, slots=True)
class Special:
    """A special register such as %tid.x."""

    name: str


@dataclass(frozen=True, slots=True)
class Immediate:
    """A constant: `bits` holds the raw bits; `kind` is 'int', 'f32' (0f...) or 'f64' (0d... and decimals)."""

    bits: int
    kind: str


@dataclass(frozen=True, slots=True)
class Symbol:
    """A variable, label or function by its resolved name, plus a byte offset."""

    name: str
    offset: int = 0


@dataclass(frozen=True, slots=True)
class Address:
    """The operand [base + offset]."""

    base: Register | Symbol | Immediate
    offset: int


@dataclass(frozen=True, slots=True)
class TensorAddress:
    """[map, {x, y, ...}]: the address of a tensor map, and the coordinates of a box."""

    map: Address
    coordinates: Vector


@dataclass(frozen=True, slots=True)
class Vector:
    """{a, b, ...}; None stands for the sink `_`."""

    items: tuple[Operand, ...]


@dataclass(frozen=True, slots=True)
class Pair:
    """d|p: two destinations."""

    first: Operand
    second: Operand


@dataclass(frozen=True, slots=True)
class Not:
    """The operand !p."""

    register: Register


Operand = Register | Special | Immediate | Symbol | Address | TensorAddress | Vector | Pair | Not | None


@dataclass(frozen=True, slots=True)
class Instruction:
    """One PTX instruction: opcode `ld`, modifiers ('global', 'v4', 'f32'), operands, guard @p or @!p."""

    opcode: str
    modifiers: tuple[str, ...]
    operands: tuple[Operand, ...]
    guard: Register | Not | None
    line: int
    text: str
    source: tuple[str, int] | None

    @property
    def where(self) -> str:
        """PTX line, text and, if known, source line, for error messages."""
        source = f" ({self.source[0]}:{self.source[1]})" if self.source else ""
        return f"PTX line {self.line}: {self.text}{source}"


@dataclass(frozen=True, slots=True)
class Variable:
    """A variable of a state space, or an array of them: `type` is that of an element, `data` the initial value.

    `size` 0 means an extern array (dynamic shared).
    """

    name: str
    space: str
    align: int
    size: int
    type: str
    data: bytes | None = None


@dataclass(slots=True)
class Function:
    """A kernel, or a device function before it is inlined. `labels` point into `instructions`."""

    name: str
    is_entry: bool
    parameters: list[Variable]
    results: list[Variable]
    variables: dict[str, Variable] = field(default_factory=dict)
    body: list[Instruction | str] = field(default_factory=list)
    tables: dict[str, tuple[str, ...]] = field(default_factory=dict)
    instructions: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)
    # Directives: .reqnctapercluster, .minnctapersm, .maxntid or .reqntid, .maxnreg (0: not given).
    cluster: tuple[int, int, int] = (1, 1, 1)
    min_blocks: int = 1
    max_threads: int = 0
    max_registers: int = 0

    def parameter_layout(self) -> tuple[dict[str, int], int]:
        """Return (byte offset of each parameter, total bytes), as the driver packs them."""
        offsets, end = {}, 0
        for parameter in self.parameters:
            offsets[parameter.name] = end = -(-end // parameter.align) * parameter.align
            end += parameter.size
        return offsets, end


@dataclass(frozen=True, eq=False)
class Module:
    """A parsed PTX text."""

    target: str
    variables: dict[str, Variable]
    kernels: dict[str, Function]


def constant_bits(immediate: Immediate, type_: str) -> int:
    """Return the bits of a constant as an operand of this type."""
    if immediate.kind == "int":
        if type_ in ("f32", "f64"):
            return int.from_bytes(struct.pack("<f" if type_ == "f32" else "<d", float(immediate.bits)), "little")
        return immediate.bits % (1 << 8 * TYPE_BYTES[type_])
    if immediate.kind == "f64" and TYPE_BYTES[type_] == 4:
        (value,) = struct.unpack("<d", immediate.bits.to_bytes(8, "little"))
        return int.from_bytes(struct.pack("<f", value), "little")
    if immediate.kind == "f32" and TYPE_BYTES[type_] == 8:
        (value,) = struct.unpack("<f", immediate.bits.to_bytes(4, "little"))
        return int.from_bytes(struct.pack("<d", value), "little")
    return immediate.bits
