"""Packs the argument of every kernel: derives its NumPy dtype from params.cuh, and fills in the values of a call.

Kernels that use TMA take tensor maps as a second argument.
"""

from __future__ import annotations

import operator
import re
import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from .. import dropout
from ..arrays import Array, dtype_name
from ..engines.launch import Box, Constant, Workspace
from ..engines.shared import PARAMS_SWITCHES, divides, shared_constants
from ..jit.source import chosen_lines, kernel_folder
from ..problem.records import ARRAYS, CACHE_FEATURES, FP8, NUMBERS, SCALES, Cache, Operands, Problem, Statistics
from .tensor_map import DATA_TYPES, TensorMap

if TYPE_CHECKING:
    import numpy.typing as npt

    from ..problem.indexer import Indexer
    from .captured import Captured

SCALARS = {
    "int": np.int32,
    "unsigned int": np.uint32,
    "long long": np.int64,
    "unsigned long long": np.uint64,
    "double": np.float64,
}

# Format characters of struct.Struct, which adds no padding in its "=" mode.
CODES = {
    np.dtype(np.int32): "i",
    np.dtype(np.uint32): "I",
    np.dtype(np.int64): "q",
    np.dtype(np.uint64): "Q",
    np.dtype(np.float64): "d",
}

Address = Callable[[Array], int]  # returns an array's address in the kernel's address space
Encode = Callable[[TensorMap], bytes]
Form = Callable[[Array, str, Address], tuple[int, ...]]  # (array, layout, address) -> the numbers of its member

BOX_TYPES = {"float16": DATA_TYPES["f16"], "bfloat16": DATA_TYPES["bf16"]}
BOX_TYPES |= dict.fromkeys((FP8, "uint8"), DATA_TYPES["u8"])


@lru_cache(maxsize=64)
def dtypes(captured: str = "", switches: tuple[str, ...] = ()) -> dict[str, np.dtype]:
    """Return every struct of params.cuh as a NumPy dtype with the compiler's layout.

    Args:
        captured: the text of captured.cuh, which declares the arrays and numbers of mods; "" without mods.
        switches: those of PARAMS_SWITCHES that are on.
    """
    text = (kernel_folder() / "params.cuh").read_text()
    values = {"MODS": captured != ""} | {name: name in switches for name in PARAMS_SWITCHES}
    lines = [line for _, line, _ in chosen_lines(text, values, "params.cuh")]
    text = re.sub(r"//.*|#.*", "", "\n".join([captured, *lines]))
    structs: dict[str, np.dtype] = {}
    for name, body in re.findall(r"struct (\w+) \{(.*?)\};", text, re.DOTALL):
        members: list[tuple[str, npt.DTypeLike]] = []
        for declaration in filter(None, map(str.strip, body.split(";"))):
            kind, member = declaration.rsplit(maxsplit=1)
            if kind.endswith("*"):
                members.append((member, np.uint64))
            else:
                members.append((member, structs[kind] if kind in structs else SCALARS[kind]))
        structs[name] = np.dtype(members, align=True)
    return structs


def switches_of(constants: Mapping[str, Constant]) -> tuple[str, ...]:
    """Return those of PARAMS_SWITCHES that the constants of a kernel switch on."""
    return tuple(name for name in PARAMS_SWITCHES if constants.get(name))


def pack(
    problem: Problem,
    operands: Operands,
    results: dict[str, Array | None],
    workspaces: Iterable[Workspace],
    address: Address,
    captured: Captured | None = None,
    numbers_beside: tuple[tuple[str, int], ...] = (),
) -> np.ndarray:
    """Return the `Params` of a call, an array without dimensions; `results` has outputs and workspaces by member.

    `numbers_beside` are members that neither the problem nor an array determines.

    All members are cached but those for addresses, the seed, captured arrays, and the length of a KV cache if that is
    one number: the others are equal in calls with the same shapes and strides.
    """
    arrays, cache = operands.arrays(), operands.cache
    if problem.cache is not None and problem.cache.rotary is not None and operands.q.shape[-1]:
        arrays["q_unrotated"] = operands.q  # the member `q` is a workspace, for the rotated rows
    arrays |= {
        name: array
        for name, array in results.items()
        if array is not None and not (captured is not None and name in captured.workspaces)
    }
    addresses = [address(array) for array in arrays.values()]
    described = [
        (name, start % ALIGNMENT, array.shape, array.strides, array.dtype)
        for (name, array), start in zip(arrays.items(), addresses, strict=True)
    ]
    layout, constant, places = _constant(
        problem, _rows_of_arrays(problem, operands), tuple(described), tuple(workspaces),
        captured.text if captured else "", numbers_beside,
    )  # fmt: skip
    numbers = constant.copy()
    for place, start in zip(places, addresses, strict=True):
        numbers[place] = start
    changing: dict[str, tuple[float, ...]] = {}
    if not isinstance(operands.seed, Array):
        changing["seed"] = (operands.seed or 0,)
    if cache is not None and isinstance(cache.cache_seqlens, int):
        changing["cache_length"] = (cache.cache_seqlens,)
    if captured is not None:
        changing["captured"] = captured.members(address)
    for member, values in changing.items():
        numbers[layout.places[member]] = values
    return layout.packed(numbers)


def with_lengths(params: np.ndarray, lengths: tuple[int, int]) -> np.ndarray:
    """Return a copy of a Params whose q_len and kv_len are these; every form of Params has them at one place."""
    fields = dtypes()["Params"].fields
    assert fields is not None  # it is a struct
    copy = bytearray(params.tobytes())
    for name, length in zip(("q_len", "kv_len"), lengths, strict=True):
        struct.pack_into("=i", copy, fields[name][1], length)
    return np.ndarray((), params.dtype, copy)


def _rows_of_arrays(problem: Problem, operands: Operands) -> tuple[int, int]:
    """Return the numbers of rows of queries and of keys, of one sequence or of a whole packed batch."""
    if problem.layout != "thd":
        return problem.q_len, problem.kv_len
    if operands.cache is None:
        return operands.q.shape[0], operands.k.shape[0]
    new = operands.cache.k_new
    rows = operands.q if new is None or operands.q.shape[-1] else new  # an append has no queries
    return rows.shape[0], problem.kv_len


ALIGNMENT = 64  # the largest alignment, in bytes, that the kernels distinguish: eight elements of fp64


class Described(NamedTuple):
    """The properties of an array on which its member of Params depends, other than its address."""

    pointer: int  # address modulo ALIGNMENT
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: np.dtype


@lru_cache(maxsize=1024)
def _constant(
    problem: Problem,
    rows: tuple[int, int],
    arrays: tuple[tuple[str, int, tuple[int, ...], tuple[int, ...], np.dtype], ...],
    workspaces: tuple[Workspace, ...],
    captured: str,
    numbers_beside: tuple[tuple[str, int], ...],
) -> tuple[_Struct, list[float], tuple[int, ...]]:
    """Return the struct of a call, its cached numbers, and for each array the index of its address among them.

    `rows` are those of queries and keys in the arrays; `arrays` are tuples (name, *Described).
    """
    by_name: dict[str, Any] = {
        name: Described(start, shape, strides, dtype) for name, start, shape, strides, dtype in arrays
    }
    forms, layout = _forms(), problem.layout
    members: dict[str, tuple[float, ...]] = {}
    strides = {workspace.name: workspace.strides for workspace in workspaces}
    start = operator.attrgetter("pointer")
    of_keys = layout if problem.cache is None else problem.cache.layout
    for name, array in by_name.items():
        own_layout = of_keys if name in ("k", "v", *SCALES) else layout
        members[name] = (0, *strides[name]) if name in strides else forms[name](array, own_layout, start)
    for feature in (*ARRAYS, *CACHE_FEATURES):
        array = by_name.get(feature.name)
        if feature.leading_stride and array is not None and len(array.shape) == max(map(len, feature.axes)):
            members[feature.leading_stride] = (array.strides[0],)
    if "seed" in members:
        members["seed_array"] = members.pop("seed")
    for feature in SCALARS_OF_FEATURES:
        members[feature.member] = (getattr(problem, feature.field) or 0,)
    left, right = problem.mask.left, problem.mask.right
    members |= {
        "keep_scale": (dropout.keep_scale(problem.dropout),),
        "drop_below": (dropout.threshold(problem.dropout),),
        "step": (problem.step,),
        "first_head": (problem.first_batch * problem.whole_heads + problem.first_head,),
        "whole_heads": (problem.whole_heads,),
        "batch": (problem.batch,),
        "heads": (problem.heads,),
        "group": (problem.group,),
        "q_len": (rows[0],),
        "kv_len": (rows[1],),
        "window_left": (-1 if left is None else min(left, 2**31 - 1),),
        "window_right": (-1 if right is None else min(right, 2**31 - 1),),
    }
    if problem.cache is not None:
        members |= _members_of_cache(problem, problem.cache, by_name)
    if problem.selected is not None:
        heads, entries, _, queries = problem.selected
        members |= {"selected_heads": (heads,), "selected_entries": (entries,), "selected_rows": (queries,)}
    members |= {name: (number,) for name, number in numbers_beside}
    struct = _struct("Params", captured, switches_of(shared_constants(problem)))
    places = tuple(struct.places["seed_array" if name == "seed" else name].start for name in by_name)
    return struct, struct.numbers(members), places


def _members_of_cache(problem: Problem, cache: Cache, arrays: dict[str, Described]) -> dict[str, tuple[float, ...]]:
    """Return the sizes of a KV cache; `arrays` are those of the call and its workspaces."""
    sizes = {
        "partial_results": arrays["part_lse"].shape[0] if "part_lse" in arrays else 0,
        "cache_length": problem.kv_len - cache.prefix,
        "cache_capacity": problem.kv_len - cache.prefix,
        "cache_blocks": cache.blocks,
        "cache_rows": _unpacked(arrays["k"].shape, cache.layout, 1)[1],
        "page_log2": _page_number(cache.page),
        "appended": 0 if problem.layout == "thd" else cache.appended or 0,
        "rotary_rows": arrays["rotary_cos"].shape[0] if "rotary_cos" in arrays else 0,
        "mask_keys": 0 if problem.dense_mask is None else problem.dense_mask[-1],
    }
    if cache.prefix_table is not None:
        sizes |= {
            "prefix_groups": cache.prefix_table[0],
            "prefix_capacity": cache.prefix,
            "prefix_results": arrays["prefix_lse"].shape[0] if "prefix_lse" in arrays else 0,
        }
    return {name: (size,) for name, size in sizes.items()}


IN_PARAMS = tuple(feature for feature in ARRAYS if not feature.host)


def _page_number(page: int | None) -> int:
    """Return log2 of the keys of a page; if they are no power of two, the int32 with the bits of their reciprocal."""
    if page is None or not divides(page):
        return 0 if page is None else page.bit_length() - 1
    return (1 << 31 + (page - 1).bit_length()) // page + 1 - 2**32


SCALARS_OF_FEATURES = tuple(feature for feature in NUMBERS if feature.member)


def has_strides(name: str) -> bool:
    """Return whether the member of an array among the options holds the strides of all its axes."""
    return dtypes()["Params"][name].names is not None


@lru_cache(maxsize=1)
def _forms() -> dict[str, Form]:
    """Return {array name: the function that packs it}; a gradient and a tangent are packed like their array."""
    forms: dict[str, Form] = dict.fromkeys(("q", "k", "v", "out", "dout", "dq", "dk", "dv"), _tensor)
    forms |= dict.fromkeys(("tq", "tk", "tv", "tout", "k_new", "v_new", "q_unrotated"), _tensor)
    forms |= dict.fromkeys(("lse", "dlse", "tlse", *Statistics._fields, "dmax", "dentropy"), _rows)
    forms |= dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k", "starts", "seed"), _pointer)
    forms["selected"] = _dense
    for feature in CACHE_FEATURES:
        forms.setdefault(feature.name, _per_key if feature.per_key else _pointer)
    for feature in IN_PARAMS:
        form = _pointer
        if has_strides(feature.name):
            form = _dense if feature.broadcast else _per_head
        forms[feature.name] = forms[f"d{feature.name}"] = forms[f"t{feature.name}"] = form
    return forms


def pack_partials(arrays: dict[str, Array], layout: str, address: Address, key_offset_b: int = 0) -> np.ndarray:
    """Return the `Partials` of out_a, lse_a, out_b, lse_b, out and lse; out_b and lse_b may be stacks of results.

    The arrays may have statistics of both parts, such as max_a and max_b, and of the result.
    """
    batch, heads, rows = (1, *arrays["lse"].shape)[-3:]
    members: dict[str, tuple[float, ...]] = {"stacked": (1,), "batch": (batch,), "heads": (heads,), "rows": (rows,)}
    for name, array in arrays.items():
        form = _tensor if name.startswith("out") else _rows
        if len(array.shape) > len(arrays[name.replace("_b", "_a")].shape):
            members |= {"stacked": (array.shape[0],), f"{name}_next": (array.strides[0],)}
            first = replace(array, shape=array.shape[1:], strides=array.strides[1:])
            members[name] = (address(array), *form(first, layout, lambda x: x.pointer)[1:])
        else:
            members[name] = form(array, layout, address)
    statistics = not arrays.keys().isdisjoint(Statistics._fields)
    members |= {"key_offset_b": (key_offset_b,)} if statistics else {}
    partials = _struct("Partials", switches=("STATISTICS",) * statistics)
    return partials.packed(partials.numbers(members))


def pack_indexer(
    indexer: Indexer,
    arrays: dict[str, Array],
    constants: Mapping[str, Constant],
    parts: tuple[int, int],
    address: Address,
) -> np.ndarray:
    """Return the `Params` of a call of the lightning indexer; `arrays` have the names of its members.

    `parts` are the number of parts into which select_keys divides the keys, and the keys of a part.
    """
    q, k, rule = arrays["q"], arrays["k"], indexer.rule
    forms: dict[str, Form] = {"q": _tensor, "dq": _tensor, "k": _keys, "dk": _keys, "selected": _dense}
    forms |= dict.fromkeys(("head_weights", "dhead_weights"), _weights_of_heads)
    forms |= {"target": _of_entries, "loss_weights": _of_queries}
    members: dict[str, tuple[float, ...]] = {
        name: forms.get(name, _pointer)(x, "bshd", address) for name, x in arrays.items()
    }
    numbers = {
        "scale": rule.scale, "batch": indexer.batch, "heads": q.shape[2], "group": q.shape[2], "step": 1,
        "q_len": indexer.q_len, "kv_len": indexer.kv_len, "window_left": -1,
    }  # fmt: skip
    if "lists" in arrays:
        numbers |= {
            "list_entries": rule.n, "local_entries": rule.local, "candidate_places": arrays["candidates"].shape[-1],
            "parts": parts[0], "part_keys": parts[1],
            "cache_length": indexer.kv_len, "cache_capacity": indexer.kv_len, "cache_blocks": k.shape[0],
            "cache_rows": k.shape[1], "page_log2": _page_number(indexer.page or None),
        }  # fmt: skip
    if "selected" in arrays:
        numbers |= {"selected_entries": arrays["selected"].shape[-1], "selected_rows": 1, "selected_heads": 1}
    if "block_table" in arrays:
        numbers["table_row"] = arrays["block_table"].strides[0]
    members |= {name: (number,) for name, number in numbers.items()}
    layout = _struct("Params", switches=switches_of(constants))
    return layout.packed(layout.numbers(members))


def pack_maps(
    boxes: tuple[Box, ...], arrays: dict[str, Array], layout: str, address: Address, encode: Encode
) -> np.ndarray:
    """Return the tensor maps of these boxes, in order, as a read-only array without dimensions."""
    boxed = [arrays[box.operand] for box in boxes]
    return _maps(boxes, tuple([(address(x), x.shape, x.strides, x.dtype) for x in boxed]), layout, encode)


@lru_cache(maxsize=1024)
def _maps(
    boxes: tuple[Box, ...],
    arrays: tuple[tuple[int, tuple[int, ...], tuple[int, ...], np.dtype], ...],
    layout: str,
    encode: Encode,
) -> np.ndarray:
    """Return `pack_maps`, cached by everything that maps hold, so that a reused address cannot match a stale map."""
    encoded = b"".join(
        [encoded_map(box, array, box.layout or layout, encode) for box, array in zip(boxes, arrays, strict=True)]
    )
    return np.ndarray((), f"V{len(encoded)}", encoded)


def encoded_map(
    box: Box, described: tuple[int, tuple[int, ...], tuple[int, ...], np.dtype], layout: str, encode: Encode
) -> bytes:
    """Return the map of a box of an array, which is given by its address, shape, strides and dtype."""
    array: Any = Described(*described)
    pointer, *strides, _ = _tensor(array, layout, operator.attrgetter("pointer"))
    batch, length, heads, dim = _unpacked(array.shape, layout, 1)
    return _encoded(
        encode, BOX_TYPES[dtype_name(array.dtype)], array.dtype.itemsize, pointer, (dim, length, heads, batch),
        tuple(strides[::-1]), (box.columns, box.rows),
    )  # fmt: skip


@lru_cache(maxsize=1024)
def _encoded(
    encode: Encode,
    kind: int,
    itemsize: int,
    start: int,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    box: tuple[int, int],
) -> bytes:
    """Encode a map of (column, row, head, batch) in boxes of (columns, rows), with the swizzle of a box's row bytes.

    `strides` are those of row, head and batch, in elements. The stride of a dimension of size 1 is replaced, because it
    may be illegal for a tensor map.
    """
    row_bytes = -(-itemsize * shape[0] // 16) * 16
    in_bytes = tuple(
        itemsize * stride if size > 1 else row_bytes for size, stride in zip(shape[1:], strides, strict=True)
    )
    return encode(TensorMap(kind, start, shape, in_bytes, (*box, 1, 1), swizzle=itemsize * box[0]))


class _Struct(NamedTuple):
    """The layout of a struct: the format of its numbers, and the index of each member's first number."""

    dtype: np.dtype
    packer: struct.Struct
    zeros: list[float]  # one for each number of the struct
    places: dict[str, slice]

    def numbers(self, members: dict[str, tuple[float, ...]]) -> list[float]:
        """Return the numbers of a struct with these members, and 0 in the others."""
        numbers = self.zeros.copy()
        for member, values in members.items():
            numbers[self.places[member]] = values
        return numbers

    def packed(self, numbers: list[float]) -> np.ndarray:
        """Return a struct with these numbers, packed by one call because NumPy's assignments to fields are slow."""
        return np.ndarray((), self.dtype, bytearray(self.packer.pack(*numbers)))


@lru_cache
def _struct(name: str, captured: str = "", switches: tuple[str, ...] = ()) -> _Struct:
    dtype = dtypes(captured, switches)[name]
    codes: list[str] = []
    places: dict[str, slice] = {}
    begin = end = 0  # numbers and bytes so far
    for member, (kind, offset, *_) in dict(dtype.fields or {}).items():
        inside = dict(kind.fields or {member: (kind, 0)})
        for number, within, *_ in inside.values():
            codes.append(f"{offset + within - end}x{CODES[number]}")  # the compiler's padding, then the number
            end = offset + within + number.itemsize
        places[member] = slice(begin, begin + len(inside))
        begin += len(inside)
    return _Struct(dtype, struct.Struct(f"={''.join(codes)}{dtype.itemsize - end}x"), [0] * begin, places)


def _unpacked(sizes: tuple[int, ...], layout: str, of_batch: int) -> tuple[int, ...]:
    """Return those of a shape or of strides for (batch, row, head, column); `of_batch` is that of a packed batch."""
    if layout == "thd":
        return (of_batch, *sizes)
    if layout == "bshd":
        return sizes
    batch, head, row, column = sizes
    return batch, row, head, column


def _tensor(array: Array, layout: str, address: Address) -> tuple[int, ...]:
    """Return the Operand of an array (B, S, H, D) in a layout: pointer, batch, head and row strides, alignment."""
    start, (batch, row, head, _) = address(array), _unpacked(array.strides, layout, 0)
    elements, rest = divmod(start, array.dtype.itemsize)
    bits = elements | batch | head | row  # all are multiples of 2**n if the lowest n bits are 0
    aligned = 1 if rest or bits % 4 else 4 if bits % 8 else 8
    if array.dtype.itemsize == 1 and bits % 16 == 0:
        aligned = 16
    return (start, batch, head, row, aligned)


def _rows(array: Array, layout: str, address: Address) -> tuple[int, ...]:
    """Return the Operand of an array with one number per row: (B, H, S), or (H, T) of a packed batch."""
    return (address(array), *(0, *array.strides)[-3:], 1)


def _per_head(array: Array, layout: str, address: Address) -> tuple[int, ...]:
    """Return the Operand of an array with one number per sequence and head: (B, H)."""
    return (address(array), *array.strides, 0, 1)


def _per_key(array: Array, layout: str, address: Address) -> tuple[int, ...]:
    """Return the Operand of an array with one number per key and head of a KV cache, in the cache's layout."""
    batch, row, head, _ = _unpacked((*array.strides, 1), layout, 0)
    return (address(array), batch, head, row, 1)


def _dense(array: Array, layout: str, address: Address) -> tuple[int, ...]:
    """Return the Dense of an array that broadcasts to (B, Hq, Sq, Sk); missing dimensions and size 1 have stride 0."""
    strides = [0 if size == 1 else stride for size, stride in zip(array.shape, array.strides, strict=True)]
    return (address(array), *[0] * (4 - len(strides)), *strides)


def _keys(array: Array, layout: str, address: Address) -> tuple[int, ...]:
    """Return the Operand of the keys of an indexer, (B, Sk, Di), or (pages, keys of a page, Di)."""
    start, (batch, row, column) = address(array), array.strides
    one_head = replace(array, shape=(*array.shape[:2], 1, array.shape[2]), strides=(batch, row, 0, column))
    return _tensor(one_head, layout, lambda _: start)


def _weights_of_heads(array: Array, layout: str, address: Address) -> tuple[int, ...]:
    """Return the Operand of an array with one number per query and head: (B, Sq, H)."""
    batch, row, head = array.strides
    return (address(array), batch, head, row, 1)


def _of_entries(array: Array, layout: str, address: Address) -> tuple[int, ...]:
    """Return the Dense of an array with one number per query and entry of its list: (B, Sq, n)."""
    batch, row, column = array.strides
    return (address(array), batch, 0, row, column)


def _of_queries(array: Array, layout: str, address: Address) -> tuple[int, ...]:
    """Return the Dense of an array that broadcasts to (B, Sq)."""
    strides = [0 if size == 1 else stride for size, stride in zip(array.shape, array.strides, strict=True)]
    batch, row = [*[0] * (2 - len(strides)), *strides]
    return (address(array), batch, 0, row, 0)


def _pointer(array: Array, layout: str, address: Address) -> tuple[int, ...]:
    return (address(array),)
