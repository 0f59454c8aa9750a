"""Generates the CUDA text of a Program: `struct Captured` with its arrays and numbers, and `struct Mod`.

    Mod mod(p, sequence);                      once per sequence
    Mod::Query q = mod.query(head, i);         once per query and head
    Mod::Key k = mod.key(j);                   once per key; its values (`KeyValues`) may be staged in shared memory
    s = mod.score(s, q, k, slope);             once per score; slope is d(result)/ds
    s = mod.moved(s, ts, q, k, tangent, slope, curve);    the same in a JVP; ts is the tangent of s, curve d(tangent)/ds
    seen = mod.sees(q, k);                     once per score of a cut tile
    Truth seen = mod.tile(heads, queries, keys); once per tile: whether a pair may be seen, and whether one may be
    hidden

A value is computed in the earliest of these stages in which its inputs are known. The caller clamps positions to
the last one of the sequence, so that captured arrays are read without a branch.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from .clamps import folded
from .derive import Derivative, Read, derivative, gradient_reads, may_be_infinite, tangent
from .intervals import Abstraction
from .ir import ARGUMENTS, BOOL, INT, LONG, REAL, Node, Program, order, parse
from .tiles import CHUNK, FUNCTIONS, Interval, TileDomain, Truth

TYPES = {BOOL: "bool", INT: "int", LONG: "long long", REAL: "real"}
NUMPY_TYPES = {BOOL: np.bool_, INT: np.int32, LONG: np.int64, REAL: np.float32}
NUMBER_TYPES = {INT: "int", LONG: "long long", REAL: "double"}
STORED = {
    "bool": "unsigned char", "int8": "signed char", "uint8": "unsigned char", "int16": "short",
    "uint16": "unsigned short", "int32": "int", "uint32": "unsigned int", "int64": "long long", "float16": "half16",
    "bfloat16": "bfloat16", "float32": "float", "float64": "double",
}  # fmt: skip

# The text for SMALL assumes that positions, heads and sequences are below it; larger calls get the text for LARGE,
# with more 64-bit arithmetic. fp32 holds every integer up to MOST_EXACT, so also the distance of positions below SMALL.
MOST_EXACT = 2**24
SMALL, LARGE = MOST_EXACT - 2**10, 2**31

INFIX = {
    "lt": "<", "le": "<=", "eq": "==", "ne": "!=", "and": "&", "or": "|", "xor": "^",
}  # fmt: skip
ARITHMETIC = {"add": "+", "sub": "-", "mul": "*"}
CALLS = {
    "expm1": "expm1", "log": "log", "log2": "log2", "log1p": "log1p", "sqrt": "sqrt", "sin": "sin", "cos": "cos",
    "erf": "erf", "floor": "floor", "ceil": "ceil", "trunc": "trunc", "round": "rint", "pow": "pow",
    # functions of mod.cuh
    "exp": "mod_exp", "exp2": "mod_exp2", "tanh": "mod_tanh", "div": "mod_divide", "min": "mod_min", "max": "mod_max",
    "sign": "mod_sign", "floordiv": "mod_floor_divide", "mod": "mod_remainder",
    "shl": "mod_shl", "shr": "mod_shr",
}  # fmt: skip

# Operators of this module alone:
DISTANCE = "distance"  # q - kv or kv - q as a real
LAST = "last"  # last index of an array's dimension; the node's value is (slot, axis)

BATCH, QUERY, KEY, SCORE = STAGES = ("batch", "query", "key", "score")


def stage(node: Node) -> str:
    """Return the earliest stage in which the inputs of a node are known."""
    of_query, of_key = bool(node.inputs & {"h", "q"}), "kv" in node.inputs
    if node.inputs & {"score", "tscore"} or (of_query and of_key):
        return SCORE
    return QUERY if of_query else KEY if of_key else BATCH


@lru_cache(maxsize=256)
def captured_struct(program: Program, wanted: tuple[bool, ...] = (), fixed: tuple[int, ...] = ()) -> str:
    """Return `struct Captured`, a member of Params: pointers, sizes and strides (in elements) of arrays, and numbers.

    The member `chunks` is the table of extremes of an array in `chunked`. For an array whose gradient is `wanted`,
    `gradient` points to the gradient and `sums` to its sums (of `sum_type`), both contiguous. `fixed` are the slots
    whose sums are in fixed point, with a unit that follows from the number in `largest`.
    """
    tables, lines = chunked(program), []
    for slot, element in enumerate(program.arrays):
        lines.append(f"  void* array{slot};")
        if slot in tables:
            lines.append(f"  void* chunks{slot};")
        if any(wanted) and wanted[slot]:
            lines += [f"  void* sums{slot};", f"  void* gradient{slot};"]
        if slot in fixed:
            lines.append(f"  void* largest{slot};")
        lines += [f"  int size{slot}_{axis};" for axis in range(element.rank)]
        lines += [f"  int stride{slot}_{axis};" for axis in range(element.rank)]
    lines += [f"  {NUMBER_TYPES[kind]} number{index};" for index, kind in enumerate(program.numbers)]
    # An empty struct has size 1 in C++ but 0 in NumPy.
    return "\n".join(["struct Captured {", *(lines or ["  int nothing;"]), "};", ""])


def captured_numbers(
    program: Program,
    arrays: Sequence[tuple[int, tuple[int, ...], tuple[int, ...]]],
    workspaces: Mapping[str, int],
    numbers: Sequence[int | float],
) -> tuple[int | float, ...]:
    """Return the values of the members of `struct Captured`, in order.

    `arrays` has the address, shape and strides (in elements) of each array; `workspaces` has the addresses of tables,
    sums, gradients and largest contributions, by member name.
    """
    members: list[int | float] = []
    for slot, (address, shape, strides) in enumerate(arrays):
        names = [f"{name}{slot}" for name in ("chunks", "sums", "gradient", "largest") if f"{name}{slot}" in workspaces]
        members += [address, *(workspaces[name] for name in names), *shape, *strides]
    return (*members, *numbers) or (0,)


@lru_cache(maxsize=256)
def computed_axes(program: Program) -> frozenset[tuple[int, int]]:
    """Return (slot, axis) of the dimensions that a mod indexes with a value that depends on both query and key.

    Kernels index these by bytes, and all others by elements.
    """
    loads = [node for node in order(program.roots) if node.op == "load"]
    return frozenset(
        (load.value, axis) for load in loads for axis, index in enumerate(load.args) if stage(index) == SCORE
    )


@lru_cache(maxsize=256)
def chunked(program: Program) -> tuple[int, ...]:
    """Return the slots of the arrays that need a table of least and greatest elements per chunk, to classify tiles.

    The mask indexes the last axis of these arrays by positions or heads.
    """
    if program.mask is None:
        return ()
    loads = (node for node in order((program.mask,)) if node.op == "load" and node.kind != REAL and node.args)
    return tuple(sorted({load.value for load in loads if load.args[-1].inputs & {"h", "q", "kv"}}))


def sum_type(program: Program, slot: int, fixed: tuple[int, ...]) -> str:
    """Return the type of the sums of an array's gradient.

    It is real if only the scores of one query and key read an element; otherwise double, or for `fixed` slots long
    long, whose sums do not depend on the order.
    """
    if slot in fixed:
        return "long long"
    loads = (node for node in order(program.roots) if node.op == "load" and node.value == slot)
    return "real" if all({"q", "kv"} <= {index.op for index in load.args} for load in loads) else "double"


def table_of(program: Program, slot: int, shape: tuple[int, ...]) -> tuple[tuple[int, int, int], np.dtype]:
    """Return (shape, dtype) of the table of a chunked array; the shape is (rows, chunks, 2), least and greatest."""
    kind = _Value("", _limits(program.arrays[slot].dtype)).type
    dtype = np.dtype(np.int32 if kind == "int" else np.int64)
    return (math.prod(shape[:-1]), -(-shape[-1] // CHUNK), 2), dtype


def with_tangents(program: Program) -> Program:
    """Return the program with the arrays followed by their tangents, which `derive.tangent` reads."""
    return program._replace(arrays=program.arrays * 2)


def headers(
    mods: str,
    backward: bool,
    longest: int,
    part: bool,
    wanted: tuple[bool, ...],
    fixed: tuple[int, ...] = (),
    read: int | None = None,
    measure: bool = False,
    moved: tuple[bool, ...] | None = None,
) -> tuple[tuple[str, str], ...]:
    """Generate the headers of a kernel from the text of a Program, as (name, text) pairs.

    Args:
        mods: the text of the Program.
        backward: whether the kernel computes gradients.
        longest: an upper bound of the numbers of sequences, heads, queries and keys.
        part: whether the call is a part of a larger one.
        wanted: for each slot whether the captured array gets a gradient.
        read: an index into `gradient_reads`; the slope is then the derivative with respect to that read, and
            `Mod::gradient` describes where its sums are stored.
        fixed: the slots whose sums are in fixed point.
        measure: find the largest contributions per row, for the unit of fixed point, instead of adding gradients.
        moved: in a JVP, for each slot whether the captured array has a tangent.
    """
    return _headers(mods, backward, SMALL if longest <= SMALL else LARGE, part, wanted, fixed, read, measure, moved)


@lru_cache(maxsize=256)
def _headers(
    mods: str,
    backward: bool,
    largest: int,
    part: bool,
    wanted: tuple[bool, ...],
    fixed: tuple[int, ...],
    read: int | None,
    measure: bool,
    moved: tuple[bool, ...] | None,
) -> tuple[tuple[str, str], ...]:
    program, reads = parse(mods), gradient_reads(mods, wanted, part)
    by = derivative(program.score) if backward and program.score is not None else None
    if moved is not None:
        program, wanted = with_tangents(program), (*wanted, *(False for _ in moved))
    if read is None:
        text = mod_struct(program, by, largest, wanted, reads, fixed=fixed, measure=measure, part=part, moved=moved)
    else:
        by, target = Derivative(reads[read].factor, ()), reads[read]
        text = mod_struct(program, by, largest, wanted, target=target, fixed=fixed, part=part, moved=moved)
    return ("captured.cuh", captured_struct(program, wanted, fixed)), ("traced.cuh", text)


@lru_cache(maxsize=256)
def staged_bytes(mods: str, longest: int, part: bool) -> int:
    """Return the bytes per key that a forward in float32 stages in shared memory; 0 if staging is not worth it."""
    writer = _Writer(parse(mods), None, SMALL if longest <= SMALL else LARGE, (), (), None, (), False, part, None)
    return writer.staged_bytes


@lru_cache(maxsize=256)
def reads_at_scores(mods: str) -> bool:
    """Return whether the score_mod reads elements that differ from score to score."""
    score = parse(mods).score
    return score is not None and any(node.op == "load" and stage(node) == SCORE for node in order((score,)))


def mod_struct(
    program: Program,
    by: Derivative | None = None,
    largest: int = SMALL,
    wanted: tuple[bool, ...] = (),
    reads: tuple[Read, ...] = (),
    target: Read | None = None,
    fixed: tuple[int, ...] = (),
    measure: bool = False,
    part: bool = False,
    moved: tuple[bool, ...] | None = None,
) -> str:
    """Return `struct Mod`; `by` is the derivative of program.score, and `largest` exceeds all positions.

    `reads` are those of the `wanted` arrays; `target` is the read with respect to which `by` is the derivative, if it
    is not the score. `fixed`, `measure`, `part` and `moved` are as in `headers`; in a JVP the program has the tangents.
    """
    writer = _Writer(program, by, largest, wanted, reads, target, fixed, measure, part, moved)
    return "\n".join([*writer.struct(), ""])


POSITION = "    int position = SHARD ? {first} + at * p.step : (int)at;"
OFFSET = "SHARD ? 0 : at.offset"
ADD_GRADIENTS = "  __device__ void add_gradients({scores}, const Query& q, const Key& k, RowSums& sums) const {{"
ADD_ROW = (
    "  template <typename Total>",
    "  __device__ void add_row(const RowSums& sums, const Query& q, bool leader, Total total) const {",
)


class _Moving(NamedTuple):
    """The tangent of a score, and derivatives of the score and of its tangent."""

    tangent: Node
    slope: Node  # the derivative of the score with respect to the old score or to `target`
    curve: Node  # the derivative of the tangent with respect to the same
    by_load: dict[Node, Node]  # {element that the tangent reads: derivative with respect to it}

    @staticmethod
    def of(score: Node, moved: tuple[bool, ...], target: Read | None) -> _Moving:
        moving = tangent(score, moved)
        of_tangent = derivative(moving)
        by_load, zero = dict(of_tangent.loads), score.graph.const(0.0)
        if target is None:
            return _Moving(moving, derivative(score).slope, of_tangent.slope, by_load)
        return _Moving(moving, target.factor, by_load.get(target.element, zero), by_load)

    def map(self, function: Callable[[Node], Node]) -> _Moving:
        """Return a copy with every derivative replaced by function(derivative)."""
        by_load = {load: function(factor) for load, factor in self.by_load.items()}
        return _Moving(function(self.tangent), function(self.slope), function(self.curve), by_load)

    @property
    def roots(self) -> list[Node]:
        return [self.tangent, self.slope, self.curve]

    def by(self, read: Read) -> Node:
        """Return the derivative of the tangent with respect to an element that the score reads."""
        return self.by_load.get(read.element, self.tangent.graph.const(0.0))


class _Writer:
    """Writes the struct of one program."""

    def __init__(
        self,
        program: Program,
        by: Derivative | None,
        largest: int,
        wanted: tuple[bool, ...],
        reads: tuple[Read, ...],
        target: Read | None,
        fixed: tuple[int, ...],
        measure: bool,
        part: bool,
        moved: tuple[bool, ...] | None,
    ) -> None:
        self.bounds = Abstraction(_Bounds(program, largest))
        self.inside: set[Node] = set()  # indices that are within their dimension
        self.score = None if program.score is None else self._prepared(program.score)
        self.program, self.largest, self.wanted, self.target = program, largest, wanted, target
        self.fixed, self.measure, self.part = fixed, measure, part
        self.slope = None if by is None else self._prepared(by.slope)
        self.directed, self.moving = moved is not None, None
        if moved is not None and program.score is not None:
            self.moving = _Moving.of(program.score, moved, target).map(self._prepared)
        # for each read to whose gradient more than one block may add: (element, derivatives with respect to it, of the
        # score and of its tangent)
        self.reads = []
        for read in (read for read in reads if not read.is_owned):
            of_tangent = () if self.moving is None else (self.moving.by(read),)
            self.reads.append((self._prepared(read.element), (self._prepared(read.factor), *of_tangent)))
        self.roots = [root for root in (self.score, self.slope, program.mask) if root is not None]
        self.roots += self.moving.roots if self.moving is not None else []
        for load, factors in self.reads:
            self.roots += [*factors, *load.args]
        inline = ("const", "score", "tscore", "b", "h", "q", "kv")
        self.nodes = [node for node in order(self.roots) if node.op not in inline]
        self.number = {node: number for number, node in enumerate(self.nodes)}
        self.at = BATCH

    def struct(self) -> list[str]:
        slopes = [] if self.moving is None else [self.moving.slope, self.moving.curve]
        infinite = any(may_be_infinite(slope) for slope in (self.slope, *slopes) if slope is not None)
        lines = [
            "struct Mod {",
            f"  static constexpr bool SLOPE_MAY_BE_INFINITE = {'true' if infinite else 'false'};",
            "  const Params& p;",
            "  int batch;",
            "  int q_first = 0, kv_first = 0;  // positions of the first rows, or of the first key after a prefix",
            "  QueryPositions positions;",
        ]
        lines += [f"  {member};" for member in self._members(BATCH)]
        of_query, of_key = ("".join(f" {member};" for member in self._members(name)) for name in (QUERY, KEY))
        lines += [
            f"  struct Query {{ int head; int position; int offset;{of_query} }};",
            f"  struct KeyValues {{{of_key} }};",
            "  struct Key { int position; int offset; KeyValues x; };",
            "  const KeyValues* staged_keys;  // KEY_BYTES: values of the keys of a tile, in shared memory",
        ]
        lines.append("  __device__ Mod(const Params& params, const Sequence& sequence)")
        lines.append("      : p(params), batch(sequence.batch), positions(params, sequence) {")
        # Rows after the last sequence of a packed batch see no key, and captured arrays have no elements for them.
        lines.append("    if (batch >= p.batch) return;")
        lines.append("    if constexpr (SHARD) q_first = p.starts[3 * batch], kv_first = p.starts[3 * batch + 1];")
        lines += ["#if PREFIXES", "    kv_first = sequence.keys_before;", "#endif"]
        if self.part and self._reads("b"):  # the index of the sequence in the whole call
            lines.append("    batch += p.first_head / p.whole_heads;")
        lines += self._body(BATCH, self.roots, declare=False)
        lines.append("  }")
        return [
            *lines,
            *self._query(),
            *self._key(),
            *self._score(),
            *self._moved(),
            *self._sees(),
            *self._tile(),
            *self._fill_tables(),
            *self._gradients(),
            "};",
        ]

    def _query(self) -> list[str]:
        lines = [
            "  __device__ Query query(int head, Position at) const {",
            POSITION.format(first="q_first"),
            "    if constexpr (KV_CACHE) position = positions(position);",
        ]
        if self.part and self._reads("h"):
            lines.append("    head += p.first_head % p.whole_heads;")
        lines += self._body(QUERY, self.roots)
        values = "".join(f", v{self.number[node]}" for node in self._kept(QUERY))
        return [*lines, f"    return {{head, position, KV_CACHE || {OFFSET}{values}}};", "  }"]

    def _key(self) -> list[str]:
        """Return the device functions that compute a key's values, and that add the key's position to them."""
        position = [POSITION.format(first="kv_first"), "#if PREFIXES", "    position += kv_first;", "#endif"]
        values = self._kept(KEY)
        return [
            "  __device__ KeyValues key_values(Position at) const {",
            *(position if values else []),
            *self._body(KEY, self.roots),
            f"    return {{{', '.join(f'v{self.number[node]}' for node in values)}}};",
            "  }",
            "  __device__ Key key(Position at) const {",
            *position,
            f"    return {{position, {OFFSET}, KEY_BYTES > 0 ? staged_keys[at.column] : key_values(at)}};",
            "  }",
        ]

    def _score(self) -> list[str]:
        lines = ["  __device__ real score(real s, const Query& q, const Key& k, real& slope) const {"]
        if self.score is None:
            return [*lines, "    slope = 1;", "    return s;", "  }"]
        targets = [root for root in (self.score, self.slope) if root is not None]
        lines += self._body(SCORE, targets)
        if self.slope is not None:
            lines.append(f"    slope = {self._name(self.slope)};")
        return [*lines, f"    return {self._name(self.score)};", "  }"]

    def _moved(self) -> list[str]:
        if not self.directed:
            return []
        head = "real s, real ts, const Query& q, const Key& k, real& tangent, real& slope, real& curve"
        lines = [f"  __device__ real moved({head}) const {{"]
        if self.moving is None:
            return [*lines, "    tangent = ts, slope = 1, curve = 0;", "    return s;", "  }"]
        assert self.score is not None
        values = {"tangent": self.moving.tangent, "slope": self.moving.slope, "curve": self.moving.curve}
        lines += self._body(SCORE, [self.score, *values.values()])
        lines += [f"    {name} = {self._name(value)};" for name, value in values.items()]
        return [*lines, f"    return {self._name(self.score)};", "  }"]

    def _sees(self) -> list[str]:
        lines = ["  __device__ bool sees(const Query& q, const Key& k) const {"]
        if self.program.mask is None:
            return [*lines, "    return true;", "  }"]
        return [*lines, *self._body(SCORE, [self.program.mask]), f"    return {self._name(self.program.mask)};", "  }"]

    def _tile(self) -> list[str]:
        head = "  __device__ Truth tile(Interval<int> heads, Interval<int> queries, Interval<int> keys) const {"
        if self.program.mask is None:
            return [head, "    return always();", "  }"]
        lines = [head]
        if self.part and self._reads("h"):
            lines.append("    int first_head = p.first_head % p.whole_heads;")
            lines.append("    heads = {heads.lo + first_head, heads.hi + first_head};")
        lines.append("    if constexpr (SHARD) {")
        for axis, first in (("queries", "q_first"), ("keys", "kv_first")):
            lines.append(f"      {axis} = {{{first} + {axis}.lo * p.step, {first} + {axis}.hi * p.step}};")
        lines += ["    }", "    if constexpr (KV_CACHE) queries = positions(queries);"]
        lines += ["#if PREFIXES", "    keys = {keys.lo + kv_first, keys.hi + kv_first};", "#endif"]
        text = _TileText(self.program, self.largest)
        result = Abstraction(text).mask(self.program.mask)
        return [*lines, *text.body(result), "  }"]

    def _reads(self, name: str) -> bool:
        return any(name in root.inputs for root in self.roots)

    def _fill_tables(self) -> list[str]:
        lines = ["  static __device__ void fill_tables(const Params& p, int warp, int warps) {"]
        for slot in chunked(self.program):
            data, table, sizes, strides = _array_text(self.program, slot)
            lines.append(f"    fill_chunks({table}, {data}, {sizes}, {strides}, warp, warps);")
        return [*lines, "  }"]

    def _gradients(self) -> list[str]:
        """Return the device functions of captured gradients: per score, per row, and to clear and to round the sums."""
        lines = self._measurements() if self.measure else self._additions()
        lines.append("  static __device__ void clear_sums(const Params& p, int thread, int threads) {")
        slots = [slot for slot, is_wanted in enumerate(self.wanted) if is_wanted]
        lines += [f"    clear({self._sums(slot)}, {self._count(slot)}, thread, threads);" for slot in slots]
        lines += [f"    clear((double*)p.captured.largest{slot}, 1, thread, threads);" for slot in self.fixed]
        lines += ["  }", "  static __device__ void round_sums(const Params& p, int thread, int threads) {"]
        for slot in slots:
            gradient = f"({STORED[self.program.arrays[slot].dtype]}*)p.captured.gradient{slot}"
            function, scale = ("round_fixed", f", {self._scale(slot)}") if slot in self.fixed else ("round_to", "")
            lines.append(
                f"    {function}({gradient}, {self._sums(slot)}, {self._count(slot)}{scale}, thread, threads);"
            )
        return [*lines, "  }", *self._gradient()]

    def _scale(self, slot: int) -> str:
        return f"FixedPoint(p, p.captured.largest{slot})"

    def _measurements(self) -> list[str]:
        """Return code that finds each slot's largest sum of |contribution| over a row, which scales its fixed point."""
        lines = [f"  struct RowSums {{{''.join(f' real x{slot};' for slot in self.fixed)} }};"]
        lines.append(self._add_gradients())
        lines += self._body(SCORE, [factor for _, factors in self.reads for factor in factors])
        lines += [f"    sums.x{load.value} += abs({self._contribution(factors)});" for load, factors in self.reads]
        lines += ["  }", *ADD_ROW]
        for slot in self.fixed:
            lines.append(f"    real x{slot} = total(sums.x{slot});")
            lines.append(f"    if (leader) raise_to((double*)p.captured.largest{slot}, x{slot});")
        return [*lines, "  }"]

    def _additions(self) -> list[str]:
        """Return code that adds to captured gradients for each score, or per row for elements not indexed by kv."""
        by_row = [n for n, (load, _) in enumerate(self.reads) if "kv" not in load.inputs and "score" not in load.inputs]
        places = [node for load, _ in self.reads for node in load.args]
        lines = [f"  struct RowSums {{{''.join(f' real x{n};' for n in by_row)} }};"]
        lines.append(self._add_gradients())
        lines += self._body(SCORE, [*(factor for _, factors in self.reads for factor in factors), *places])
        for n, (load, factors) in enumerate(self.reads):
            product = self._contribution(factors)
            lines.append(f"    sums.x{n} += {product};" if n in by_row else f"    {self._addition(load, product)}")
        lines += ["  }", *ADD_ROW]
        for n in by_row:
            lines.append(f"    real x{n} = total(sums.x{n});")
            lines.append(f"    if (leader && x{n} != 0) {self._addition(self.reads[n][0], f'x{n}')}")
        return [*lines, "  }"]

    def _add_gradients(self) -> str:
        scores = ("ds", "s") if self.moving is None else ("ds", "dts", "s", "ts")
        return ADD_GRADIENTS.format(scores=", ".join(f"real {score}" for score in scores))

    def _contribution(self, factors: tuple[Node, ...]) -> str:
        """Return an expression for the term that one score adds to the gradient of an element that it reads."""
        return " + ".join(f"{ds} * {self._name(d)}" for ds, d in zip(("ds", "dts"), factors, strict=False))

    def _gradient(self) -> list[str]:
        """Return `gradient()`, which presents `target`'s sums as a bias gradient with stride 0 along unused inputs."""
        function = "  static __device__ DenseGradient gradient(const Params& p) {"
        if self.target is None:
            return ["  using Sum = real;", function, "    return {};", "  }"]
        slot, axes = self.target.slot, self.target.axes
        assert axes is not None  # a target is an owned read, which has axes
        sizes = [f"p.captured.size{slot}_{axis}" for axis in range(self.program.arrays[slot].rank)]
        strides = [
            " * ".join(["1ll", *sizes[axes.index(name) + 1 :]]) if name in axes else "0"
            for name in ("b", "h", "q", "kv")
        ]
        rows, columns = (sizes[axes.index(name)] if name in axes else "1" for name in ("q", "kv"))
        return [
            f"  using Sum = {sum_type(self.program, slot, self.fixed)};",
            function,
            f"    Dense sums = {{p.captured.sums{slot}, {', '.join(strides)}}};",
            f"    return {{sums, min(p.q_len, {rows}), min(p.kv_len, {columns})}};",
            "  }",
        ]

    def _count(self, slot: int) -> str:
        sizes = [f"p.captured.size{slot}_{axis}" for axis in range(self.program.arrays[slot].rank)]
        return " * ".join(["1ll", *sizes])

    def _addition(self, load: Node, product: str) -> str:
        """Return the statement that adds a product to the sums of the element that a load reads."""
        place = "0"
        for axis, index in enumerate(load.args):
            inside = self._clamped(load, axis, index)
            place = inside if axis == 0 else f"({place}) * p.captured.size{load.value}_{axis} + {inside}"
            place = f"(long long){place}" if axis == 0 else place
        if load.value in self.fixed:
            return f"{self._scale(load.value)}.add_to({self._sums(load.value)}, {place}, {product});"
        return f"add_to({self._sums(load.value)}, {place}, {product});"

    def _sums(self, slot: int) -> str:
        return f"({sum_type(self.program, slot, self.fixed)}*)p.captured.sums{slot}"

    # ---- values

    def _prepared(self, root: Node) -> Node:
        """Return a real expression with sums of ints done in reals, and with one clamp per index.

        A term of such a sum is converted once per query or key.
        """
        renamed: dict[Node, Node] = {}
        for node in order((root,)):
            if node.op == REAL:
                renamed[node] = self._real_sum(node.args[0])
            else:
                args = tuple(renamed[arg] for arg in node.args)
                if node.op == "load":
                    args = tuple(
                        self._clamped_once(node, axis, index) or args[axis] for axis, index in enumerate(node.args)
                    )
                renamed[node] = node.graph.node(node.op, node.kind, args, node.value)
        return renamed[root]

    def _clamped_once(self, load: Node, axis: int, index: Node) -> Node | None:
        """Return the index clamped to its dimension, by one clamp that replaces those of the index itself, or None."""
        graph = load.graph
        last = graph.node(LAST, INT, value=(load.value, axis))
        fold = folded(index, last, lambda node: stage(node) == BATCH, self._may_wrap) if stage(index) == SCORE else None
        if fold is None:
            return None
        x, low, high = fold
        is_low_enough = low.op == "const" and self._lowest(x) >= low.value
        inside = graph.make("min", x if is_low_enough else graph.make("max", x, low), high)
        self.inside.add(inside)
        return inside

    def _real_sum(self, x: Node) -> Node:
        """Return an int or bool as a real. If all terms of a sum are exact as reals, they are converted and added."""
        is_sum = stage(x) == SCORE and x.op in ("abs", "neg", "add", "sub", "mul")
        if not is_sum or not all(self._is_exact(term) for term in (x, *x.args)):
            return x.graph.cast(x, REAL)
        if x.op == "sub" and {arg.op for arg in x.args} == {"q", "kv"}:
            return x.graph.node(DISTANCE, REAL, x.args)
        return x.graph.node(x.op, REAL, tuple(self._real_sum(arg) for arg in x.args))

    def _is_exact(self, x: Node) -> bool:
        """Return whether reals hold every value of an int."""
        lo, hi = self.bounds.interval(x)
        return bool(lo >= -MOST_EXACT and hi <= MOST_EXACT)

    def _kept(self, name: str) -> list[Node]:
        """Return the values of a stage that later stages read."""
        later = set(self.roots)
        for node in self.nodes:
            later |= {arg for arg in node.args if stage(arg) != stage(node)}
        return [node for node in self.nodes if stage(node) == name and node in later]

    @property
    def staged_bytes(self) -> int:
        """sizeof(KeyValues); 0 if its values take only cheap arithmetic, which is not worth staging."""
        kept = self._kept(KEY)
        if not any(node.op in ("load", "floordiv", "mod") for node in order(kept)):
            return 0
        members = [(f"v{n}", NUMPY_TYPES[node.kind]) for n, node in enumerate(kept)]
        return np.dtype(members, align=True).itemsize

    def _members(self, name: str) -> list[str]:
        return [f"{TYPES[node.kind]} v{self.number[node]}" for node in self._kept(name)]

    def _body(self, name: str, targets: Sequence[Node], declare: bool = True) -> list[str]:
        """Return code for the values of a stage that `targets` need; declare=False only assigns the members of Mod."""
        self.at = name
        kept = set() if declare else set(self._kept(name))
        lines = []
        for node in order(targets):
            if node in self.number and stage(node) == name:
                declared = "" if node in kept else f"{TYPES[node.kind]} "
                lines.append(f"    {declared}v{self.number[node]} = {self._expression(node)};")
        return lines

    def _name(self, node: Node) -> str:
        """Return the name of a value in the current stage."""
        own, here = stage(node), self.at
        prefix = "" if own in (here, BATCH) else f"{'q' if own == QUERY else 'k'}."
        if node.op == "const":
            return _literal(node)
        if node.op in ("score", "tscore"):
            return "s" if node.op == "score" else "ts"
        if node.op == "b":
            return "batch"
        if node.op == "h":
            return f"{prefix}head"
        if node.op in ("q", "kv"):
            return f"{prefix}position"
        return f"{prefix}{'x.' * (prefix == 'k.')}v{self.number[node]}"

    def _expression(self, node: Node) -> str:
        op, kind = node.op, node.kind
        if op == LAST:
            slot, axis = node.value
            return f"p.captured.size{slot}_{axis} - 1"
        if op == "argument":
            return f"({TYPES[kind]})p.captured.number{node.value}"
        if op == "load":
            return self._load(node)
        if op == DISTANCE:
            a, b = ("q" if arg.op == "q" else "k" for arg in node.args)
            # This part of the distance is the same for all columns of a tile.
            of_rows = f"({a}.position - {a}.offset) - ({b}.position - {b}.offset)"
            return f"(real)({of_rows}) - (real)({b}.offset - {a}.offset)"
        x = [self._name(arg) for arg in node.args]
        if op in ARITHMETIC:
            if kind == REAL or not self._may_wrap(node):
                return f"{x[0]} {ARITHMETIC[op]} {x[1]}"
            return f"wrapping_{op}({x[0]}, {x[1]})"
        if op == "neg":
            return f"wrapping_sub(({TYPES[kind]})0, {x[0]})" if kind != REAL and self._may_wrap(node) else f"-{x[0]}"
        if op in INFIX:
            return f"{x[0]} {INFIX[op]} {x[1]}"
        if op == "not":
            return f"!{x[0]}" if kind == BOOL else f"~{x[0]}"
        if op == "abs":
            return f"fabs({x[0]})" if kind == REAL else f"abs({x[0]})"
        if op == "where":
            return f"{x[0]} ? {x[1]} : {x[2]}"
        if op in TYPES:
            return f"({TYPES[op]}){x[0]}"
        if op == "stop":
            return x[0]
        if op in ("floordiv", "mod") and kind != REAL and self._is_natural(*node.args):
            unsigned = "unsigned int" if kind == INT else "unsigned long long"
            sign = "/" if op == "floordiv" else "%"
            return f"({TYPES[kind]})(({unsigned}){x[0]} {sign} ({unsigned}){x[1]})"
        if op in ("min", "max") and kind != REAL:
            return f"{op}({x[0]}, {x[1]})"
        return f"{CALLS[op]}({', '.join(x)})"

    def _load(self, node: Node) -> str:
        kind = STORED[self.program.arrays[node.value].dtype]
        array, row, places = f"(const {kind}*)p.captured.array{node.value}", [], []
        for axis, index in enumerate(node.args):
            text, stride = self._clamped(node, axis, index), f"p.captured.stride{node.value}_{axis}"
            if stage(index) == SCORE:
                places.append(f"(long long){text} * ({stride} * (int)sizeof({kind}))")
            else:
                row.append(f"(long long){text} * {stride}")
        if places:
            element = f"element_of({' + '.join([array, *row])}, {' + '.join(places)})"
        else:
            element = f"({array})[{' + '.join(row) or '0'}]"
        if node.kind == BOOL:
            return f"{element} != 0"
        return f"(real)to_real({element})" if node.kind == REAL else element

    def _clamped(self, load: Node, axis: int, index: Node) -> str:
        """Return an index clamped to its axis; an input needs no clamp, as the host has checked it against the axis."""
        if index.op in ("b", "h", "q", "kv") or index in self.inside:
            return self._name(index)
        clamp = "below" if self._lowest(index) >= 0 else "clamped"
        return f"{clamp}({self._name(index)}, p.captured.size{load.value}_{axis})"

    def _lowest(self, node: Node) -> int:
        return int(self.bounds.interval(node).lo)

    def _is_natural(self, x: Node, y: Node) -> bool:
        """Return whether x is never negative and y is positive."""
        return self._lowest(x) >= 0 and self._lowest(y) > 0

    def _may_wrap(self, node: Node) -> bool:
        """Return whether an integer operation may overflow its kind, which is undefined in C++."""
        operands = [self.bounds.interval(arg) for arg in node.args]
        if not all(self.bounds.domain.fits(operand, node.kind) for operand in operands):
            return True
        if node.op == "mul":
            result = FUNCTIONS["multiply"](*operands)
        elif node.op == "neg":
            result = FUNCTIONS["scale"](operands[0], -1)
        else:
            result = FUNCTIONS["add"](
                operands[0], operands[1] if node.op == "add" else FUNCTIONS["scale"](operands[1], -1)
            )
        return not self.bounds.domain.fits(result, node.kind)


def _literal(node: Node) -> str:
    value = node.value
    if node.kind == BOOL:
        return "true" if value else "false"
    if node.kind == REAL:
        if math.isnan(value):
            return "(infinity() - infinity())"
        if math.isinf(value):
            return "infinity()" if value > 0 else "(-infinity())"
        return f"(real){value!r}" if value >= 0 else f"((real){value!r})"
    return _integer(value, TYPES[node.kind])


def _integer(value: int, kind: str) -> str:
    """Return a literal of type int or long long; in C++ the least value of each needs an expression."""
    suffix, least = ("", -(2**31)) if kind == "int" else ("ll", -(2**63))
    if value == least:
        return f"({value + 1}{suffix} - 1)"
    return f"({value}{suffix})" if value < 0 else f"{value}{suffix}"


# -------------------------------------------------------------------------------------------------- classes of tiles


class _Bounds(TileDomain):
    """The domain of bounds that hold in every call: positions are below `largest`, and elements may have any value."""

    def __init__(self, program: Program, largest: int) -> None:
        whole = Interval(np.int64(0), np.int64(largest - 1))
        last = Interval(np.int64(-1), np.int64(2**31 - 2))
        super().__init__({**dict.fromkeys(("b", "h", "q", "kv"), whole), LAST: last}, (), {})
        self.program = program

    def argument(self, node: Node) -> Interval:
        if node.kind == INT:
            return Interval(np.int64(ARGUMENTS[0]), np.int64(ARGUMENTS[-1]))
        return self.call("any_long")

    def load(self, node: Node, indices: Sequence[Interval]) -> Interval:
        return _limits(self.program.arrays[node.value].dtype)

    def call(self, function: str, *operands: Any) -> Any:
        with np.errstate(all="ignore"):
            return FUNCTIONS[function](*operands)


def _limits(dtype: str) -> Interval:
    """Return the interval of all values of a bool or integer dtype."""
    if dtype == "bool":
        return Interval(np.int64(0), np.int64(1))
    limits = np.iinfo(dtype)
    return Interval(np.int64(limits.min), np.int64(limits.max))


class _Value:
    """A variable of Mod::tile, and its bounds in any call."""

    def __init__(self, text: str, known: Any) -> None:
        self.text, self.known = text, known

    @property
    def type(self) -> str:
        """The C++ type of the variable's bounds."""
        return "int" if all(-(2**31) <= int(bound) < 2**31 for bound in self.known) else "long long"


class _TileText:
    """The domain of intervals.py that writes the body of Mod::tile."""

    def __init__(self, program: Program, largest: int) -> None:
        self.program, self.bounds = program, _Bounds(program, largest)
        self.variables: list[tuple[str, str]] = []  # (name, definition)

    def body(self, result: _Value) -> list[str]:
        """Return the lines that the result needs, and the return statement."""
        needed, lines = _variables(result.text), [f"    return {result.text};"]
        for name, definition in self.variables[::-1]:
            if name in needed:
                needed |= _variables(definition)
                lines.append(f"    {definition}")
        return lines[::-1]

    def constant(self, value: int) -> _Value:
        known = self.bounds.constant(value)
        kind = _Value("", known).type
        return _Value(f"point({_integer(value, kind)})", known)

    def input(self, name: str) -> _Value:
        text = {"b": "point(batch)", "h": "heads", "q": "queries", "kv": "keys"}[name]
        return _Value(text, self.bounds.input(name))

    def argument(self, node: Node) -> _Value:
        return _Value(f"point(p.captured.number{node.value})", self.bounds.argument(node))

    def load(self, node: Node, indices: Sequence[_Value]) -> _Value:
        slot = node.value
        known = self.bounds.load(node, [])
        kind = _Value("", known).type
        data, table, sizes, strides = _array_text(self.program, slot)
        if not indices:
            return self._variable(f"Interval<{kind}>", f"point<{kind}>(*({data}))", known)
        table = table if slot in chunked(self.program) else "nullptr"
        # A long index is clamped before it becomes an int.
        box = _list(index.text if index.type == "int" else f"narrowed({index.text})" for index in indices)
        limits = _list(_integer(int(bound), kind) for bound in known)
        arguments = ", ".join((data, table, sizes, strides, box, limits))
        return self._variable(f"Interval<{kind}>", f"elements<{kind}>({arguments})", known)

    def call(self, function: str, *operands: _Value | int) -> _Value:
        values = [operand for operand in operands if isinstance(operand, _Value)]
        known = self.bounds.call(function, *(o.known if isinstance(o, _Value) else o for o in operands))
        numbers = [value for value in values if not isinstance(value.known, Truth)]
        result = _Value("", known)
        truth = isinstance(known, Truth)
        # int only if neither operands nor the result need more.
        kinds = {value.type for value in numbers} | (set() if truth else {result.type})
        kind = "long long" if "long long" in kinds else "int"
        arguments = ", ".join(o.text if isinstance(o, _Value) else _integer(o, kind) for o in operands)
        template = f"<{kind}>" if numbers else ""
        declared = "Truth" if truth else f"{type(known).__name__}<{result.type}>"
        return self._variable(declared, f"{function}{template}({arguments})", known)

    def fits(self, value: _Value, kind: str) -> bool:
        return self.bounds.fits(value.known, kind)

    def _variable(self, declared: str, expression: str, known: Any) -> _Value:
        name = f"x{len(self.variables)}"
        self.variables.append((name, f"{declared} {name} = {expression};"))
        return _Value(name, known)


def _array_text(program: Program, slot: int) -> tuple[str, str, str, str]:
    """Return expressions for a captured array of bools or integers: data, table, sizes and strides."""
    dtype, rank = program.arrays[slot]
    kind = _Value("", _limits(dtype)).type
    sizes, strides = (_list(f"p.captured.{name}{slot}_{axis}" for axis in range(rank)) for name in ("size", "stride"))
    return (
        f"(const {STORED[dtype]}*)p.captured.array{slot}",
        f"(Interval<{kind}>*)p.captured.chunks{slot}",
        sizes,
        strides,
    )


def _list(texts: Iterable[str]) -> str:
    return f"{{{', '.join(texts)}}}"


def _variables(text: str) -> set[str]:
    """Return the names of variables in a line."""
    return set(re.findall(r"\bx\d+\b", text))
