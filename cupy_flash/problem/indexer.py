"""Poses the calls of the lightning indexer: select_keys, which chooses the keys of each row, and selection_loss."""

from __future__ import annotations

import operator
from typing import NamedTuple, TypeAlias

import numpy as np

from .. import environment
from ..arrays import AnyArray, Array, dtype_name
from .checks import (
    KINDS,
    RANGES,
    ArrayFacts,
    Requirements,
    broadcasts,
    check_places,
    is_float,
    read,
)
from .features import CAUSAL, FINITE
from .records import BACKENDS, DTYPES, FEATURES, LONGEST
from .selection import first_wrong

ARRAYS = {"q": "q_idx", "k": "k_idx"}  # {field of IndexerOperands: the caller's name}, where they differ
OPTIONAL = ("kv_lengths", "block_table", "row_weights")
Sizes: TypeAlias = tuple[int, ...]  # the legal sizes of an axis; () are all
OF_CAUSAL = next(feature for feature in FEATURES if feature.kind == CAUSAL)


class Rule(NamedTuple):
    """The options of select_keys, not checked yet."""

    n: int
    causal: bool | str = True
    block: int = 1
    local: int = 0
    scale: float = 1.0


class Indexer(NamedTuple):
    """The facts of a call: its sizes, and the rule by which keys are chosen."""

    batch: int
    q_len: int
    kv_len: int  # of pages, the capacity of a sequence
    rule: Rule
    page: int  # keys of a page, 0 without block_table
    accumulation: np.dtype
    device: str
    backend: str  # the requested one, or the device


class IndexerOperands(NamedTuple):
    """The arrays of a call, None where the call has none."""

    q: Array
    weights: Array
    k: Array
    kv_lengths: Array | None = None
    block_table: Array | None = None
    selected: Array | None = None
    target: Array | None = None
    row_weights: Array | None = None
    dloss: Array | None = None  # the gradient of the loss, 1 if there is none


def pose_indexer(
    function: str, given: dict[str, AnyArray | None], rule: Rule | None = None
) -> tuple[Indexer, IndexerOperands]:
    """Return the facts and the arrays of a call, or raise one error with every unmet requirement.

    `given` are the arrays by the fields of IndexerOperands; `rule` is None for a loss.
    """
    requirements = Requirements(function)
    given = {name: x for name, x in given.items() if x is not None or name not in OPTIONAL}
    named = {ARRAYS.get(name, name): x for name, x in given.items()}
    arrays = read(requirements, named)
    check_places(
        requirements, {name: ArrayFacts(x.shape, x.dtype, x.device, x.framework) for name, x in arrays.items()}
    )
    q, posed = arrays.get("q_idx"), None
    limits = np.finfo(np.float64 if q is not None and q.dtype == np.float64 else np.float32)
    checked = Rule(0) if rule is None else _checked(requirements, rule, limits)
    if len(arrays) == len(named):
        posed = _posed(requirements, arrays, checked)
    requirements.unsupported += _refusals(arrays)
    requirements.raise_if_unmet(arrays)
    assert posed is not None
    fields = {name: arrays[ARRAYS.get(name, name)] for name in given}
    return posed, IndexerOperands(**fields)


def _refusals(arrays: dict[str, Array]) -> list[str]:
    """Return the reasons against the backend of the environment, which does not run on the device of the arrays."""
    devices, backend = {x.device for x in arrays.values()} - {"traced"}, environment.backend()
    on_host = backend is not None and not backend.startswith("cuda")
    return [
        f"CUPY_FLASH_BACKEND is {backend}, and the arrays are on {device}, and arrays never change device"
        for device in sorted(devices)
        if backend is not None and on_host == device.startswith("cuda")
    ]


def _posed(requirements: Requirements, arrays: dict[str, Array], rule: Rule) -> Indexer | None:
    require, require_type = requirements.require, requirements.require_type
    q, k = arrays["q_idx"], arrays["k_idx"]
    for name in ("q_idx", "weights", "k_idx", "target", "row_weights"):
        if name in arrays:
            dtype = arrays[name].dtype
            require_type(is_float(dtype), f"{name} must be {', '.join(DTYPES)}, not {dtype_name(dtype)}")
    require_type(q.dtype == k.dtype, "q_idx and k_idx must have one dtype")
    paged = "block_table" in arrays
    ranked = [
        require(len(q.shape) == 4, "q_idx must have 4 dimensions (B, Sq, Hi, Di)"),
        require(
            len(k.shape) == 3, f"k_idx must have 3 dimensions {'(pages, keys of a page, Di)' * paged or '(B, Sk, Di)'}"
        ),
    ]
    if not all(ranked):
        return None
    (batch, q_len, heads, dim), (rows, kv_len, k_dim) = q.shape, k.shape
    require(min(heads, dim) > 0, "q_idx must have at least one head and one dimension")
    require(dim == k_dim, f"q_idx and k_idx must have one dimension Di, not {dim} and {k_dim}")
    page = 0
    if paged:
        page, table = kv_len, arrays["block_table"]
        require(kv_len > 0, "a page of k_idx must have at least one key")
        kv_len *= table.shape[-1] if table.shape else 0
    else:
        require(batch == rows, f"q_idx and k_idx must have one batch size, not {batch} and {rows}")
    require(
        max(q_len, kv_len) <= LONGEST, f"q_idx and k_idx must have at most {LONGEST} rows, not {q_len} and {kv_len}"
    )
    shapes: dict[str, tuple[Sizes, ...]] = {
        "weights": ((batch,), (q_len,), (heads,)),
        "kv_lengths": ((batch,),),
        "block_table": ((batch,), ()),
        "selected": ((1, batch), (1,), (q_len,), ()),
        "dloss": (),
    }
    if "selected" in arrays and len(arrays["selected"].shape) == 4:
        shapes["target"] = ((batch,), (q_len,), arrays["selected"].shape[-1:])
    for name, shape in shapes.items():
        if name in arrays:
            _check_shape(requirements, name, arrays[name].shape, shape)
    if "row_weights" in arrays:
        given = arrays["row_weights"].shape
        require(broadcasts(given, (batch, q_len)), f"row_weights must broadcast to {(batch, q_len)}, not be {given}")
    for name in ("kv_lengths", "block_table", "selected"):
        if name in arrays:
            dtype = arrays[name].dtype
            require_type(dtype == np.int32, f"{name} must be int32, not {dtype_name(dtype)}")
    accumulation = np.dtype(np.float64 if q.dtype == np.float64 else np.float32)
    backend = environment.backend()
    known = backend is None or backend.partition(":")[0] in BACKENDS
    require(known, f"CUPY_FLASH_BACKEND must be one of {', '.join(BACKENDS)}, not {backend!r}")
    posed = Indexer(batch, q_len, kv_len, rule, page, accumulation, q.device, backend or q.device)
    if not requirements.unmet:
        _check_contents(requirements, posed, arrays, rows)
    return posed


def _check_shape(requirements: Requirements, name: str, shape: tuple[int, ...], axes: tuple[Sizes, ...]) -> None:
    fits = len(shape) == len(axes) and all(not legal or n in legal for n, legal in zip(shape, axes, strict=True))
    text = ", ".join(" or ".join(map(str, dict.fromkeys(legal))) or "n" for legal in axes)
    requirements.require(fits, f"{name} must be ({text}{',' * (len(axes) == 1)}), not {shape}")


def _check_contents(requirements: Requirements, posed: Indexer, arrays: dict[str, Array], pages: int) -> None:
    """Check lengths, pages and lists in host memory; lists in a program of jax are not checked, nor in a backward."""
    require, lengths = requirements.require, np.full(posed.batch, posed.kv_len)
    given = arrays.get("kv_lengths")
    if given is not None and given.device == "cpu" and posed.batch:
        lengths = given.numpy()
        low, high = lengths.min(), lengths.max()
        require(
            bool(low >= 0 and high <= posed.kv_len), f"kv_lengths must be in [0, {posed.kv_len}], not {low} to {high}"
        )
    table = arrays.get("block_table")
    if table is not None and table.device == "cpu":
        numbers = table.numpy()
        used = np.arange(numbers.shape[1]) * posed.page < lengths[:, None]
        for b, column in np.argwhere(used & ((numbers < 0) | (numbers >= pages)))[:1].tolist():
            require(False, f"block_table[{b}, {column}] is {numbers[b, column]}, and k_idx has {pages} pages")
    selected = arrays.get("selected")
    if selected is None or selected.device != "cpu" or selected.framework == "xla" or "dloss" in arrays:
        return
    for b, lists in enumerate(selected.numpy()[:, 0]):
        wrong = first_wrong(lists, posed.kv_len)
        if wrong is not None:
            row, entry = wrong
            reason = f"names key {entry} twice" if entry < posed.kv_len else f"names key {entry} of {posed.kv_len}"
            require(False, f"selected[{b}, 0, {row}] {reason}")
            return


def _checked(requirements: Requirements, rule: Rule, limits: np.finfo[np.floating]) -> Rule:
    """Return the rule with checked options; a wrong one has a neutral value until the error is raised."""
    n = _whole(requirements, "n", rule.n, 1)
    block = _whole(requirements, "block", rule.block, 1)
    local = _whole(requirements, "local", rule.local, 0)
    requirements.require(local <= n, f"local must be at most n, which is {n}, not {local}")
    causal: bool | str = KINDS[CAUSAL](requirements, OF_CAUSAL, rule.causal, limits)
    requirements.require_type(rule.scale is not None, "scale must be a number, not None")
    return Rule(n, causal, block, local, RANGES[FINITE](requirements, "scale", rule.scale, limits) or 0.0)


def _whole(requirements: Requirements, name: str, given: int, least: int) -> int:
    number = None
    try:
        number = None if isinstance(given, (bool, np.bool_)) else operator.index(given)
    except Exception:  # a foreign object may raise anything
        number = None
    if number is None:
        requirements.require_type(False, f"{name} must be a whole number, not {given!r}")
        return least
    legal = least <= number <= LONGEST
    return number if requirements.require(legal, f"{name} must be in [{least}, {LONGEST}], not {given!r}") else least
