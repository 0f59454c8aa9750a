"""The members of Params for a KV cache, and the arrays of a call by the names of these members."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from ..arrays import Array
from ..problem.records import Operands, Problem

if TYPE_CHECKING:
    from ..engines.launch import Workspace
    from .params import Address, Form

NAMES = {"k": "k_new", "v": "v_new"}  # the members of CacheOperands with another name in Params
ROWS = {"block_table": "table_row", "rotary_cos": "cos_row", "rotary_sin": "sin_row", "positions": "positions_row"}


def cache_arrays(operands: Operands) -> dict[str, Array]:
    """Return the arrays of a call besides those of Operands, by member of Params."""
    given = operands.cache
    if given is None:
        return {}
    named = {NAMES.get(name, name): array for name, array in zip(given._fields, given, strict=True) if name != "out"}
    return {name: array for name, array in named.items() if isinstance(array, Array)}


def with_arrays(operands: Operands, arrays: dict[str, Array]) -> Operands:
    """Return the operands with some arrays replaced; `arrays` has them by member of Params."""
    given = operands.cache
    if given is not None:
        nested = {name: arrays[NAMES.get(name, name)] for name in given._fields if NAMES.get(name, name) in arrays}
        operands = operands._replace(cache=given._replace(**{x: y for x, y in nested.items() if x != "out"}))
    return operands._replace(**{name: array for name, array in arrays.items() if name in Operands._fields})


def cache_members(
    problem: Problem, operands: Operands, workspaces: Iterable[Workspace], address: Address, tensor: Form
) -> dict[str, tuple[float, ...]]:
    """Return the members by name; `tensor` returns the Operand of an array (see params.py)."""
    cache, given = problem.cache, operands.cache
    assert cache is not None and given is not None
    packed = problem.layout == "thd"
    layout = "thd" if packed else cache.layout
    members: dict[str, tuple[float, ...]] = {
        "k": tensor(operands.k, cache.layout, address),
        "v": tensor(operands.v, cache.layout, address),
    }
    for name, array in cache_arrays(operands).items():
        members[name] = tensor(array, layout, address) if name in ("k_new", "v_new") else (address(array),)
        if name in ROWS and len(array.shape) == 2:
            members[ROWS[name]] = (array.strides[0],)
    if cache.rotary is not None and operands.q.shape[-1]:
        members["q_unrotated"] = tensor(operands.q, layout, address)
    rows = operands.k.shape[2 if cache.layout == "bhsd" else 1]
    tokens = operands.q.shape[0] if given.k is None or operands.q.shape[-1] else given.k.shape[0]
    numbers: dict[str, Any] = {
        "q_len": tokens if packed else problem.q_len,
        "kv_len": problem.kv_len,
        "places": next((x.shape[0] for x in workspaces if x.name == "part_lse"), 0),
        "cache_length": given.cache_seqlens if isinstance(given.cache_seqlens, int) else problem.kv_len,
        "cache_capacity": problem.kv_len,
        "cache_blocks": cache.blocks,
        "cache_rows": rows,
        "page_log2": 0 if cache.page is None else cache.page.bit_length() - 1,
        "appended": 0 if packed else cache.appended or 0,
        "rotary_rows": 0 if given.rotary_cos is None else given.rotary_cos.shape[0],
        "mask_keys": 0 if problem.dense_mask is None else problem.dense_mask[-1],
    }
    return members | {name: (number,) for name, number in numbers.items()}
