"""Breaks each belief of the simulator about the hardware, to find which kernels of other code generators notice."""

import __future__

import contextlib
import functools
import inspect
import sys
import textwrap
from typing import NamedTuple

from cupy_flash.simulator import SimulationError
from cupy_flash.simulator.asynchrony import (
    barriers,
    boxes,
    bulk,
    clusters,
    copies,
    mbarriers,
    registers,
    tcgen05,
    tcgen05_descriptors,
    wgmma,
)
from cupy_flash.simulator.instructions import access, collectives, convert, floating, integer, matrix, moves
from cupy_flash.simulator.memory import grid_order, store

from .cases import CASES
from .launching import ORDERS, compiled_kernel, run


class Mutation(NamedTuple):
    """A belief, what the broken simulator does instead, and (function, old text, new text) of each change."""

    belief: str
    instead: str
    changes: tuple


def one(belief, instead, function, old, new):
    return Mutation(belief, instead, ((function, old, new),))


# {section of docs/simulator_evidence.md: its mutations}
MUTATIONS = {
    "mma, ldmatrix, stmatrix, cp.async": [
        one(
            "fragment A of mma",
            "rows 8 to 15 are in the third register",
            matrix.fragment_a,
            "register = i // per_register",
            "register = (i // per_register * 2) % 4 + i // per_register // 2",
        ),
        one(
            "fragment B of mma",
            "registers alternate",
            matrix.fragment_b,
            "4 * per_register * (i // per_register)",
            "4 * per_register * (1 - i // per_register)",
        ),
        one(
            "accumulators of mma",
            "columns before rows",
            matrix.fragment_c,
            "_GROUP + 8 * (i // 2), _THREAD * 2 + i % 2",
            "_GROUP + 8 * (i % 2), _THREAD * 2 + i // 2",
        ),
        one("ldmatrix.trans", "does not transpose", matrix._load_matrix, "if transposed:", "if False:"),
        one(
            "ldmatrix.x4",
            "registers in reverse order",
            matrix._load_matrix,
            "words[:, i, _ROW, _COLUMN]",
            "words[:, count - 1 - i, _ROW, _COLUMN]",
        ),
        one(
            "stmatrix",
            "registers in reverse order",
            matrix._store_matrix,
            "words[:, i, _ROW, _COLUMN]",
            "words[:, count - 1 - i, _ROW, _COLUMN]",
        ),
        one("stmatrix.trans", "does not transpose", matrix._store_matrix, "if transposed:", "if False:"),
        one("cp.async.wait_group", "waits for one group less", copies.Copies.wait, "- pending", "- pending - 1"),
        one(
            "cp.async with a source of 0 bytes",
            "fills with ones",
            copies.Copies._read,
            "data = np.zeros((int(group.lanes().sum()), width), np.uint8)",
            "data = np.full((int(group.lanes().sum()), width), 63, np.uint8)",
        ),
        one("tf32", "all 23 bits of the mantissa are read", convert.elements, "0xFFFFE000", "0xFFFFFFFF"),
        one(
            "mma of fp8",
            "e5m2 is e4m3",
            convert.elements,
            "return decode(words",
            "type_ = type_.replace('e5m2', 'e4m3'); return decode(words",
        ),
    ],
    "wgmma": [
        one("swizzle of TMA and wgmma alike", "the index of the 256-byte row", store.swizzled, ">> 7", ">> 8"),
        one(
            "swizzle of 64 bytes of TMA and wgmma alike",
            "two bits lower",
            store.swizzled,
            "address >> 7 &",
            "address >> (7 if span != 64 else 9) &",
        ),
        one(
            "swizzle of 32 bytes of TMA and wgmma alike",
            "none",
            store.swizzled,
            "span // 16 - 1",
            "(span // 16 if span != 32 else 1) - 1",
        ),
        one(
            "codes of swizzles in a descriptor",
            "64 and 32 bytes exchanged",
            wgmma.descriptor_layout,
            "_SWIZZLES[descriptor >> 62]",
            "_SWIZZLES[(0, 1, 3, 2)[descriptor >> 62]]",
        ),
        one(
            "stride dimension byte offset, K-major",
            "half of it",
            wgmma.offsets,
            "row // 8 * layout.stride",
            "row // 8 * (layout.stride // 2)",
        ),
        one(
            "leading dimension byte offset, K-major without swizzle",
            "ignored",
            wgmma.offsets,
            "piece * (16 if span > 1 else layout.leading)",
            "piece * 16",
        ),
        one(
            "leading and stride dimension byte offsets, MN-major",
            "exchanged",
            wgmma.offsets,
            "(layout.leading, layout.stride) if span > 1",
            "(layout.stride, layout.leading) if span > 1",
        ),
        one(
            "MN-major operands",
            "read as K-major",
            wgmma.WgmmaQueue._operand,
            "values.reshape(len(values), 16, -1).swapaxes(1, 2)",
            "values.reshape(len(values), -1, 16)",
        ),
        Mutation(
            "accumulators of wgmma",
            "rows and columns of a pair exchanged",
            (
                (
                    wgmma.WgmmaQueue._read,
                    "transpose(3, 4, 1, 5, 0, 6, 2)",
                    "transpose(3, 4, 2, 5, 0, 6, 1)",
                ),
                (wgmma.WgmmaQueue._write, "transpose(4, 2, 6, 0, 1, 3, 5)", "transpose(4, 6, 2, 0, 1, 3, 5)"),
            ),
        ),
        one(
            "A of wgmma in registers",
            "right half before lower rows",
            wgmma.WgmmaQueue._registers_a,
            "transpose(2, 3, 1, 4, 0, 5)",
            "transpose(2, 3, 0, 4, 1, 5)",
        ),
        one("scale-d of wgmma", "always 1", wgmma.WgmmaQueue._compute, "wgmma.scale_d[now][:, None, None]", "True"),
        one(
            "sums of fp8 products with 14 bits",
            "exact",
            wgmma._sum_of_14_bits,
            "    # A product's",
            "    return (total + a @ b.swapaxes(1, 2)).astype(np.float32)\n    # A product's",
        ),
    ],
    "tcgen05": [
        one(
            "instruction descriptor: transposes",
            "A and B exchanged",
            tcgen05_descriptors.shape_of,
            "bool(bits >> 15 & 1), bool(bits >> 16 & 1)",
            "bool(bits >> 16 & 1), bool(bits >> 15 & 1)",
        ),
        one(
            "instruction descriptor: N",
            "a bit higher",
            tcgen05_descriptors.shape_of,
            "bits >> 17 & 63",
            "bits >> 18 & 31",
        ),
        one(
            "instruction descriptor: M",
            "a bit higher",
            tcgen05_descriptors.shape_of,
            "bits >> 24 & 31",
            "bits >> 25 & 15",
        ),
        one(
            "instruction descriptor: types",
            "those of kind::tf32",
            tcgen05_descriptors.shape_of,
            "bits >> 7 & 7, bits >> 10 & 7",
            "bits >> 8 & 7, bits >> 11 & 7",
        ),
        one(
            "matrix descriptor: codes of swizzles",
            "64 and 128 bytes exchanged",
            tcgen05_descriptors._layout,
            "_SWIZZLES[descriptor >> 61]",
            "_SWIZZLES[{2: 4, 4: 2}.get(descriptor >> 61, descriptor >> 61)]",
        ),
        one(
            "accumulators of 64 rows",
            "in the upper 16 of 32 lanes",
            tcgen05.Tcgen05Queue._lanes,
            "address >> 20 & 1",
            "1 - (address >> 20 & 1)",
        ),
        one(
            "A in tensor memory",
            "the smaller k in the upper half of a column",
            tcgen05.Tcgen05Queue._compute,
            "a = elements(words.reshape(len(rows), shape.rows, -1), shape.type)",
            "a = elements(words.reshape(len(rows), shape.rows, -1), shape.type)[:, :, np.arange(16) ^ 1]",
        ),
        one(
            "enable-input-d",
            "ignored",
            tcgen05.Tcgen05Queue._compute,
            "np.where(adds[:, None, None], old + product, product)",
            "product",
        ),
        one(
            "tcgen05.commit",
            "arrives before the mma",
            tcgen05.Tcgen05Queue._complete,
            "for one in self.in_flight:",
            "for one in sorted(self.in_flight, key=lambda one: isinstance(one, _Mma)):",
        ),
        one(
            "lanes of tcgen05.ld and .st, 16x32bx2",
            "threads 16 to 31 in the same columns",
            tcgen05.access_layout,
            "register + thread // 16 * split",
            "register",
        ),
        one(
            "columns of tcgen05.cp",
            "the halves of a row of 32 bytes exchanged",
            tcgen05.Tcgen05Queue._write,
            "copy.lanes[:, :, None], copy.columns\n",
            "copy.lanes[:, :, None], np.roll(copy.columns, 4)\n",
        ),
        one(
            "tcgen05.cp.warpx4",
            "reaches the first warp's lanes only",
            tcgen05.Tcgen05Queue._write,
            "copy.lanes[:, :, None], copy.columns\n",
            "copy.lanes[:1, :, None], copy.columns\n",
        ),
        one(
            "rows of tcgen05.cp",
            "begin 32 lanes further",
            tcgen05.Tcgen05Queue._write,
            "copy.lanes[:, :, None], copy.columns\n",
            "(copy.lanes[:, :, None] + 32) % 128, copy.columns\n",
        ),
        one(
            "the lanes that a warp reaches",
            "by half of its index",
            tcgen05._access,
            "context.warp_of_row[rows] % 4",
            "context.warp_of_row[rows] // 2 % 4",
        ),
    ],
    "TMA": [
        one(
            "elements outside a tensor",
            "read as NaN",
            bulk.BulkCopies._land,
            "np.zeros((*copy.index.shape",
            "~np.zeros((*copy.index.shape",
        ),
        one("negative coordinates of the inner dimension", "inside", boxes.box_pieces, "(start >= 0) & ", ""),
        one(
            "negative coordinates of outer dimensions",
            "inside",
            boxes.box_pieces,
            "(at >= 0) & (at < size)",
            "(at < size)",
        ),
        one("coordinates behind outer dimensions", "inside", boxes.box_pieces, "(at >= 0) & (at < size)", "(at >= 0)"),
        one(
            "order of a box's rows",
            "the last dimension varies fastest",
            boxes.box_pieces,
            "place[:, None, :] + (at * stride)[:, :, None]",
            "place[:, :, None] + (at * stride)[:, None, :]",
        ),
        one(
            "transaction bytes of a box",
            "only those inside the tensor",
            bulk.BulkCopies._land,
            "pieces.bytes",
            "pieces.width * int(pieces.inside[0].sum())",
        ),
        one("reduce-add of a box", "a store", bulk.BulkCopies._write, "if not copy.operation:", "if True:"),
        one("multicast", "writes and signals one block", bulk._load, "first[lane] + rank", "first[lane] + 0 * rank"),
        one(
            "offset of a multicast",
            "the first block has both",
            bulk._load,
            "pieces.shared[lane]",
            "pieces.shared[lane] + 128 * rank[:, None]",
        ),
    ],
    "mbarriers, barriers, clusters, registers": [
        one(
            "parity of try_wait",
            "the other one",
            mbarriers._passed,
            "(phase & 1) != (wanted & 1)",
            "(phase & 1) == (wanted & 1)",
        ),
        one(
            "complete_tx",
            "counts half of the bytes",
            mbarriers.Mbarriers.complete_tx,
            "np.subtract.at(self.tx_count, at, amount)",
            "np.subtract.at(self.tx_count, at, amount // 2)",
        ),
        one("expect_tx", "does not arrive", mbarriers._arrive, "(int(arrives), values)", "(0, values)"),
        one(
            "pending arrivals after a phase",
            "one",
            mbarriers.Mbarriers._complete,
            "self.pending[k, blocks] = self.expected[k, blocks]",
            "self.pending[k, blocks] = 1",
        ),
        one(
            "mapa, remote arrive",
            "the own block",
            clusters._map_address,
            "(r + np.uint32(1))",
            "(0 * r + np.uint32(1))",
        ),
        one(
            "barrier.cluster.wait",
            "does not wait",
            clusters.ClusterBarrier.passed,
            "slowest[context.cluster_of_row[rows]] >=",
            "slowest[context.cluster_of_row[rows]] * 0 + 999 >=",
        ),
        one(
            "thread count of a named barrier",
            "all of the block",
            barriers.Barriers.release,
            "self.expected[barrier] == -1",
            "self.expected[barrier] != 0",
        ),
        one(
            "setmaxnreg.dec",
            "keeps the registers",
            registers.Registers.change,
            "held - count)",
            "np.minimum(held - count, 0))",
        ),
        one("elect.sync", "elects two lanes", collectives._elect, "leader == _LANES", "leader >= _LANES - 1"),
    ],
    "atomics, shuffles, conversions": [
        one(
            "scope .gpu",
            "orders the block alone",
            grid_order.GridOrder._join,
            "includes.get(scope, True)",
            "includes.get('cta' if scope == 'gpu' else scope, True)",
        ),
        one(
            "atom",
            "returns the new value",
            access._serialised,
            "old[lanes] = before",
            "old[lanes] = function(before, *[operand[lanes] for operand in operands])",
        ),
        one(
            "vectors of red and atom",
            "every item is the first",
            access._atomic,
            "mine = [one[i][chosen]",
            "mine = [one[0][chosen]",
        ),
        one(
            "packed halves of red and atom",
            "only the lower one",
            access._half_function,
            "<< half)",
            "<< half) * np.uint32(0)",
        ),
        one("shfl.bfly", "adds the mask", collectives._shuffle, '"bfly": _LANES ^ b', '"bfly": (_LANES + b) % 32'),
        one("shfl.up", "shifts down", collectives._shuffle, "source = _LANES - b", "source = _LANES + b"),
        one(
            "shfl.idx",
            "the next lane",
            collectives._shuffle,
            "first | (b & ~segment)}",
            "first | ((b + 1) % 32 & ~segment)}",
        ),
        one(
            "vote.ballot",
            "the other lanes",
            collectives._vote,
            "group.write(result, true_lanes)",
            "group.write(result, ~true_lanes)",
        ),
        one("match", "the other lanes", collectives._match, "(equal * _WEIGHTS)", "(~equal * _WEIGHTS)"),
        one(
            "redux",
            "the first lane alone",
            collectives._reduce,
            "function.reduce(values, axis=1",
            "function.reduce(values[:, :1], axis=1",
        ),
        one(
            "prmt",
            "selectors in reverse order",
            integer._permute_bytes,
            "np.uint64(4 * i)) & np.uint64(15)",
            "np.uint64(12 - 4 * i)) & np.uint64(15)",
        ),
        one(
            "sign mode of prmt",
            "ignored",
            integer._permute_bytes,
            "np.where(selector & np.uint64(8), sign, byte)",
            "byte",
        ),
        one("lop3", "its table in reverse", integer._lookup, "int(table) >> i & 1", "int(table) >> (7 - i) & 1"),
        one(
            "subnormals of fp8",
            "have an implicit one",
            convert._eight_bit_values,
            "np.where(exponent > 0, ",
            "np.where(exponent >= 0, ",
        ),
        one(
            "bias of fp8",
            "one more",
            convert._eight_bit_values,
            "np.maximum(exponent, 1) - 1",
            "np.maximum(exponent, 1) - 2",
        ),
        one("rounding of cvt to fp8", "towards zero", convert.encode, "round_integer(units, mode)", "np.trunc(units)"),
        one(
            "order of a packed cvt",
            "the first operand is the lower half",
            moves._convert_pair,
            "(upper << bits) | lower",
            "(lower << bits) | upper",
        ),
        one(
            "ex2",
            "exp",
            floating._special_function,
            "_UNARY[instruction.opcode]",
            "(np.exp if instruction.opcode == 'ex2' else _UNARY[instruction.opcode])",
        ),
    ],
}


@contextlib.contextmanager
def broken(mutation):
    """Run with the code objects of the functions replaced: every reference to a function runs the changed code."""
    originals = [(inspect.unwrap(function), old, new) for function, old, new in mutation.changes]
    codes = [function.__code__ for function, _, _ in originals]
    for function, old, new in originals:
        function.__code__ = changed_code(function, old, new)
    forget(mutation)
    try:
        yield
    finally:
        for (function, _, _), code in zip(originals, codes, strict=True):
            function.__code__ = code
        forget(mutation)


def changed_code(function, old, new):
    text = textwrap.dedent(inspect.getsource(function))
    assert text.count(old) == 1, f"{function.__qualname__} has {text.count(old)} times {old!r}"
    flags = function.__code__.co_flags & __future__.annotations.compiler_flag
    module = compile(text.replace(old, new), inspect.getfile(function), "exec", flags, dont_inherit=True)
    (code,) = (c for c in module.co_consts if inspect.iscode(c) and c.co_name == function.__name__)
    return code


def forget(mutation):
    """Empty the caches of the changed functions."""
    for function, _, _ in mutation.changes:
        if isinstance(function, functools._lru_cache_wrapper):
            function.cache_clear()


def functions_called(case):
    """Return the code objects of the functions that a run of a case calls."""
    called = set()

    def record(frame, event, _):
        if event == "call":
            called.add(frame.f_code)

    sys.setprofile(record)
    try:
        run(case)
    finally:
        sys.setprofile(None)
    return called


def notices(case, mutation):
    """Return whether a case, whose result is otherwise right, has a wrong result or raises an error under the mutation.

    In the first run asynchronous instructions take effect as late as possible, which shows a missing wait; in the
    second one they take effect at random times.
    """
    with broken(mutation):
        for order in ("late", "random"):
            try:
                run(case, **ORDERS[order])
            except (AssertionError, SimulationError, IndexError, ValueError):
                return True
    return False


def evidence(names):
    """Return {belief: the names of at most three cases that notice its mutation, those with the shortest kernels}."""
    noticed = {mutation.belief: [] for mutation in ALL}
    for case, name in sorted(((CASES[name](), name) for name in names), key=lambda pair: (length(pair[0]), pair[1])):
        called = functions_called(case)
        for mutation in ALL:
            concerned = {inspect.unwrap(function).__code__ for function, _, _ in mutation.changes} & called
            if concerned and len(noticed[mutation.belief]) < 3 and notices(case, mutation):
                noticed[mutation.belief].append(name)
    return noticed


def length(case):
    return len(compiled_kernel(case).ptx)


def table(noticed):
    """Return the tables of docs/simulator_evidence.md."""
    lines = []
    for row, mutations in MUTATIONS.items():
        lines += [f"### {row}", "", "| belief | broken: | noticed by |", "|---|---|---|"]
        for mutation in mutations:
            names = [f"`{name}`" for name in noticed[mutation.belief]]
            lines.append(f"| {mutation.belief} | {mutation.instead} | {', '.join(names) or '**nobody: unproven**'} |")
        lines.append("")
    return "\n".join(lines)


ALL = [mutation for mutations in MUTATIONS.values() for mutation in mutations]
