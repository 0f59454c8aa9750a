"""Constants, grids, workspaces and refusals that several engines share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

from ..arrays import dtype_name
from ..device import Device
from ..problem.records import CACHE_FEATURES, DIFFERENTIATED, DTYPES, FEATURES, FP8, Cache, Problem, is_given
from .launch import GRID_LIMITS, Constant, Launch, Workspace

if TYPE_CHECKING:
    from ..mods.derive import Read

# Options of attention() that score.cuh, mask.cuh and sequence.cuh implement for every kernel, and cpu/ in NumPy.
ATTENTION_OPTIONS = frozenset({feature.name for feature in FEATURES if feature.common})
KV_CACHE_OPTIONS = frozenset({feature.name for feature in CACHE_FEATURES if feature.common})
SELECTION = frozenset({"selected", "selected_block", "selected_rows"})
# Facts of a KV cache that have a constant, such as PAGED
CACHE_FACTS = tuple(feature for feature in CACHE_FEATURES if feature.constant and feature.field in Cache._fields)
ELEMENTS = {"float16": "half16", "bfloat16": "bfloat16", "float32": "float", "float64": "double", FP8: "e4m3"}
ELEMENTS |= {"int8": "int8", "float8_e5m2": "e5m2", "uint8": "nibbles"}  # of quantised caches alone
Grid = tuple[int, int, int]
T = TypeVar("T")


def divides(page: int | None) -> bool:
    """Return whether kernels divide by the keys of a page, which are no power of two."""
    return page is not None and page & (page - 1) != 0


def has_prefixes(problem: Problem) -> bool:
    """Return whether the call has shared prefixes."""
    return problem.cache is not None and problem.cache.prefix_table is not None


def prefix_refusals(problem: Problem) -> list[str]:
    """Return the reasons why kernels do not serve options beside shared prefixes."""
    if not has_prefixes(problem):
        return []
    beside = [name for name in ("k_descale", "v_descale") if getattr(problem, name)]
    return [f"it takes no {' and no '.join(beside)} beside shared prefixes"] if beside else []


@lru_cache(maxsize=64)
def shared_constants(problem: Problem) -> MappingProxyType[str, Constant]:
    """Return the constants of every tile kernel; an engine adds THREADS, BLOCK_Q, BLOCK_KV and its own."""
    constants: dict[str, Constant] = {
        "element": ELEMENTS[dtype_name(problem.out_dtype)],
        "kv_element": ELEMENTS[dtype_name(problem.dtype if problem.cache is None else problem.cache.dtype)],
        "real": ELEMENTS[dtype_name(problem.accumulation)],
        "HEAD_DIM": problem.head_dim,
        "HEAD_DIM_V": problem.head_dim_v,
        "PACKED": problem.layout == "thd",
        "TOP_LEFT": problem.mask.top_left,
        "WINDOW_LEFT": problem.mask.left is not None,
        "WINDOW_RIGHT": problem.mask.right is not None,
        "SHARD": problem.shard,
        "DLSE": problem.dlse,
        "MODS": problem.mods != "",
        "KV_CACHE": problem.cache is not None,
        "PAGE_DIVISION": problem.cache is not None and divides(problem.cache.page),
        "PREFIXES": has_prefixes(problem),
        "SCALED_KV": problem.cache is not None and problem.cache.scale_dtype is not None,
        "SCALES_OF_16_BITS": problem.cache is not None and problem.cache.scale_dtype == "float16",
        "CODES_OF_4_BITS": problem.cache is not None and problem.cache.codes == 2,
        "CAPTURED_GRADIENT": False,
        "SHARED_KV": problem.shared_kv and (problem.backward or problem.cache is not None),
        "DIRECTION": problem.derivative != "",
        "STATISTICS": bool(problem.statistics),
        "FIND_MAX": bool({"max", "argmax"} & {*problem.statistics}),
        "FIND_ARGMAX": "argmax" in problem.statistics,
        "ENTROPY": "entropy" in problem.statistics,
        "DSTATISTICS": problem.backward and bool(problem.statistics),
        "DMAX": problem.backward and "max" in problem.statistics,
        "DENTROPY": problem.backward and "entropy" in problem.statistics,
        "WEIGHTS": problem.weights != "",
        "SELECTED": problem.selected is not None,
        "INDEXER": False,
        "GRADIENT_OF": {"top_weights": 1, "key_importance": 2}.get(problem.weights, 0),
        "TCAPTURED": any(name.startswith("array") for name in problem.tangents),
    }
    constants |= {f"T{name.upper()}": name in problem.tangents for name in DIFFERENTIATED}
    constants |= {x.constant: is_given(problem, x) for x in FEATURES if x.constant}
    if problem.selected is not None:
        constants |= {"KEYS_OF_ENTRY": problem.selected.block, "HEADS_OF_LIST": heads_of_list(problem)}
    constants |= {x.constant: problem.cache is not None and is_given(problem.cache, x) for x in CACHE_FACTS}
    constants |= {x.element: ELEMENTS[getattr(problem, f"{x.field}_dtype")] for x in FEATURES if x.element}
    return MappingProxyType(constants)


# Switches of config.cuh on which the members of Params depend, beside MODS
PARAMS_SWITCHES = (
    *("DIRECTION", "KV_CACHE", "PREFIXES", "SCALED_KV", "SELECTED", "STATISTICS", "DSTATISTICS", "WEIGHTS", "INDEXER"),
)
# Row kernels (delta, dq, dsink, vt) get only these constants, so that plans with different tiles share one cubin.
SEQUENCE_CONSTANTS = (
    *("element", "real", "THREADS", "PACKED", "Q_LENGTHS", "KV_LENGTHS", "TOP_LEFT", "SHARD"),
    *PARAMS_SWITCHES,
)
CACHE_CONSTANTS = ("PAGE_DIVISION", *(feature.constant for feature in CACHE_FACTS), "HEAD_DIM", "HEAD_DIM_V")
LIST_CONSTANTS = (*SEQUENCE_CONSTANTS, "KEYS_OF_ENTRY", "HEADS_OF_LIST")
ROW_CONSTANTS = {
    "delta": (*SEQUENCE_CONSTANTS, "HEAD_DIM", "HEAD_DIM_V", "DLSE", "LSE2", "ADD_DQ", "DQ_IN_ORDER", "DENTROPY"),
    "dq": (*SEQUENCE_CONSTANTS, "HEAD_DIM", "HEAD_DIM_V"),
    "dsink": (*SEQUENCE_CONSTANTS, "sink_element", "TSINK", "DENTROPY"),
    "rotary_append": (
        *SEQUENCE_CONSTANTS,
        *CACHE_CONSTANTS,
        "SHARED_KV",
        "SCALES_OF_16_BITS",
        "CODES_OF_4_BITS",
        "kv_element",
        "ROTARY_DIM",
        "ROTARY_INTERLEAVED",
        "cos_element",
        "sin_element",
    ),
    "merge": (
        *(*SEQUENCE_CONSTANTS, *CACHE_CONSTANTS, "BLOCK_Q", "BLOCK_KV", "SPLIT_SIZE", "WINDOW_LEFT", "WINDOW_RIGHT"),
        *("SINK", "sink_element", "LARGEST_LOG2", "RESCALE_ABOVE", "PREFIX_BLOCK_Q"),
    ),
    "prefix_rows": (*SEQUENCE_CONSTANTS, *CACHE_CONSTANTS, "BLOCK_Q", "BLOCK_KV", "SPLIT_SIZE", "PREFIX_BLOCK_Q"),
    "drow_weights": (*SEQUENCE_CONSTANTS, "weight_element"),
    **dict.fromkeys(("selected/count_entries", "selected/scan_counts", "selected/fill_lists"), LIST_CONSTANTS),
    "selected/clear_sums": (*LIST_CONSTANTS, "HEAD_DIM", "HEAD_DIM_V"),
    "selected/round_sums": (*LIST_CONSTANTS, "HEAD_DIM", "HEAD_DIM_V", "SHARED_KV"),
    "wgmma/vt": (*SEQUENCE_CONSTANTS, "HEAD_DIM_V", "BLOCK_KV"),
}


def known_constants(kernel: str, constants: Mapping[str, Constant]) -> tuple[tuple[str, Constant], ...]:
    """Return those of a plan's constants that a kernel reads."""
    known = ROW_CONSTANTS.get(kernel)
    # Only delta.cu reads the gradient of lse, so tile kernels with and without it share one cubin.
    return tuple((name, x) for name, x in constants.items() if (name != "DLSE" if known is None else name in known))


def has_options(problem: Problem) -> bool:
    """Return whether scores are modified or masked in a pass of their own, which needs registers."""
    return problem.is_modified or problem.dense_mask is not None or problem.mask_mod


def heads_of_list(problem: Problem) -> int:
    """Return the query heads of a key/value head that share its lists of selected keys."""
    assert problem.selected is not None
    return 1 if problem.selected.heads == problem.heads else problem.group


def sequences(problem: Problem) -> int:
    """Return the sequences of a grid; a packed batch has one more, for the rows after its last sequence."""
    return problem.batch + (problem.layout == "thd")


def nonempty(launches: list[Launch]) -> tuple[Launch, ...]:
    """Return the launches without those of an empty grid, for example of an empty batch, which CUDA refuses."""
    return tuple(launch for launch in launches if 0 not in launch.grid)


def row_workspaces(problem: Problem, q_rows: int, *names: str) -> tuple[Workspace, ...]:
    """Return workspaces with one number per query and head, with the shape of lse."""
    shape, strides = rows_of_heads(problem, q_rows)
    return tuple(Workspace(name, shape, problem.accumulation, (*strides, 1)) for name in names)


def rows_of_heads(problem: Problem, rows: int, columns: int = 1) -> tuple[tuple[int, ...], tuple[int, int, int]]:
    """Return shape and strides of an array with `columns` numbers per row and head.

    The shape is (B, Hq, rows), or (Hq, rows) for a packed batch; the strides are (batch, head, row) in elements.
    """
    packed = problem.layout == "thd"
    shape = (problem.heads, rows) if packed else (problem.batch, problem.heads, rows)
    return shape, (0 if packed else problem.heads * rows * columns, rows * columns, columns)


def weights_grid(problem: Problem, block_q: int, block_kv: int) -> Grid:
    """Return the grid of a kernel of probabilities; that of attention_weights is of all rows of each head.

    gpu/weights.py replaces it by that of the rows and heads that a call asks for.
    """
    from ..problem.weights import IMPORTANCE, TOP  # imported by the first call that returns probabilities

    q_tiles = max(-(-problem.q_len // block_q), 1)
    kv_tiles = max(-(-problem.kv_len // block_kv), 1)
    grids = {TOP: (q_tiles, sequences(problem)), IMPORTANCE: (kv_tiles, problem.batch)}
    tiles, batch = grids.get(problem.weights, (q_tiles * kv_tiles, sequences(problem)))
    return tiles, problem.heads, batch


def dtype_refusals(problem: Problem) -> list[str]:
    """Return the reason why an engine without fp8 does not serve a problem's dtype; [] if it does."""
    if problem.dtype.name in DTYPES:
        return []
    return [f"{problem.dtype.name} is not one of {', '.join(DTYPES)}"]


def forms(problem: Problem, device: Device, tile: T) -> dict[str, Sequence[T]]:
    """Return {}: an engine whose kernels have one form."""
    return {}


def advantage(problem: Problem) -> str:
    """Return "": predictions compare the engine with the others for every problem."""
    return ""


CAPTURED_BLOCKS = 128  # blocks of the kernels that loop over captured arrays


def with_mods(problem: Problem, launches: list[Launch]) -> list[Launch]:
    """Return the launches with the headers generated from the mods, between captured_start and captured_end."""
    if not problem.mods:
        return launches
    from ..mods import cuda_code  # imported by the first call that has a mod
    from ..mods.ir import parse

    wanted, headers = problem.captured_gradient, _mod_headers(problem)
    launches = [x._replace(headers=headers) if "MODS" in dict(x.constants) and not x.headers else x for x in launches]
    names = ("real", *PARAMS_SWITCHES)
    constants = (("THREADS", 128), ("MODS", True), *((name, shared_constants(problem)[name]) for name in names))
    start, end = (
        Launch(f"captured_{name}", constants, (CAPTURED_BLOCKS, 1, 1), 128, headers=headers)
        for name in ("start", "end")
    )
    if any(wanted) or cuda_code.chunked(parse(problem.mods)):
        launches.insert(0, start)
    if any(wanted):
        launches.append(end)
    return launches


def captured_reads(problem: Problem) -> tuple[Read, ...]:
    """Return the reads by score_mod whose gradients a backward computes.

    If the indices of a read are b, h, q_idx and kv_idx themselves, one block sums each element of the gradient
    (`owned_launches`), which is deterministic. Otherwise any score may add to any element (`added_launches`,
    `simt.captured_launches`).
    """
    if not any(problem.captured_gradient):
        return ()
    from ..mods.derive import gradient_reads  # imported by the first call that has a mod

    return gradient_reads(problem.mods, problem.captured_gradient, is_part(problem))


def fixed_slots(problem: Problem) -> tuple[int, ...]:
    """Return the slots of the captured arrays whose gradients a deterministic call sums in fixed point.

    They are those to whose gradients any score may add.
    """
    if not problem.deterministic or not any(problem.captured_gradient):
        return ()
    from ..mods.derive import added_slots

    return added_slots(captured_reads(problem))


def is_part(problem: Problem) -> bool:
    """Return whether a call is a part (rows, heads or sequences) of a larger one, whose captured arrays it reads."""
    return problem.shard or problem.whole_heads != problem.heads or problem.first_batch > 0


def loads_by_key(problem: Problem) -> bool:
    """Return whether mods load elements of captured arrays per key or score, rather than once per row."""
    return any(inputs & {"kv", "score"} for inputs in _loaded_by(problem))


def loads_by_score(problem: Problem) -> bool:
    """Return whether mods load elements of captured arrays for every score, not once per row or key."""
    return any("score" in inputs or ("kv" in inputs and inputs & {"q", "h"}) for inputs in _loaded_by(problem))


def _loaded_by(problem: Problem) -> Iterator[frozenset[str]]:
    """Yield, for each load of a captured array, the inputs of the mod on which it depends."""
    if problem.mods:
        from ..mods.ir import order, parse

        yield from (node.inputs for node in order(parse(problem.mods).roots) if node.op == "load")


def owned_launches(problem: Problem, tile: tuple[int, int], launch: Callable[[Grid], Launch]) -> list[Launch]:
    """Return the launches of backward_bias, one for each read of a captured array whose gradient blocks own.

    `tile` is (queries, keys) of a block; `launch` makes the launch for a grid.
    """
    launches = []
    for n, read in enumerate(captured_reads(problem)):
        if (inputs := read.axes) is None:
            continue
        q_tiles = -(-problem.q_len // tile[0]) if "q" in inputs else 1
        kv_tiles = -(-problem.kv_len // tile[1]) if "kv" in inputs else 1
        grid = (
            max(q_tiles * kv_tiles, 1), problem.heads if "h" in inputs else 1, problem.batch if "b" in inputs else 1
        )  # fmt: skip
        one = launch(grid)
        constants = tuple((name, True if name == "CAPTURED_GRADIENT" else x) for name, x in one.constants)
        launches.append(one._replace(constants=constants, headers=_mod_headers(problem, read=n)))
    return launches


def of_bias(problem: Problem, launch: Launch) -> Launch:
    """Return the launch that sums the gradient of the bias; its blocks own tiles of the bias.

    In a packed batch the kernel takes the sizes of the bias for its lengths, which there are otherwise the rows of all
    sequences.
    """
    return launch._replace(lengths=(problem.q_len, problem.kv_len)) if problem.layout == "thd" else launch


def added_launches(problem: Problem, one: Launch) -> list[Launch]:
    """Return the launches of backward_captured; before `one`, a deterministic call finds the scale of its sums."""
    if all(read.is_owned for read in captured_reads(problem)):
        return []
    return [one._replace(headers=_mod_headers(problem, measure=True)), one] if problem.deterministic else [one]


def reads_at_scores(problem: Problem) -> bool:
    """Return whether a score_mod reads elements of captured arrays that differ from score to score."""
    if not problem.mods:
        return False
    from ..mods import cuda_code

    return cuda_code.reads_at_scores(problem.mods)


def key_bytes(problem: Problem) -> int:
    """Return the bytes per key of the values that a wgmma forward stages: those that mods compute from a key alone."""
    if not problem.mods:
        return 0
    from ..mods import cuda_code

    return cuda_code.staged_bytes(problem.mods, _longest(problem), is_part(problem))


def _longest(problem: Problem) -> int:
    """Return an upper bound of the positions, heads and sequences with which the code of mods is called."""
    from ..mods import cuda_code

    if is_part(problem):
        return cuda_code.LARGE
    return max(problem.batch, problem.heads, problem.q_len, problem.kv_len)


def _mod_headers(problem: Problem, **part: Any) -> tuple[tuple[str, str], ...]:
    from ..mods import cuda_code

    moved = None
    if problem.derivative:
        moved = tuple(f"array{slot}" in problem.tangents for slot in range(len(problem.captured_gradient)))
    return cuda_code.headers(
        problem.mods, problem.backward, _longest(problem), is_part(problem), problem.captured_gradient,
        fixed_slots(problem), moved=moved, **part
    )  # fmt: skip


def grid_refusals(problem: Problem) -> list[str]:
    """Return the reasons why a problem exceeds a grid of (tiles, heads, sequences)."""
    return [
        f"{count} {name} are more than the {limit} blocks of a grid's second and third dimension"
        for name, count, limit in zip(
            ("heads", "sequences"), (problem.heads, sequences(problem)), GRID_LIMITS[1:], strict=True
        )
        if count > limit
    ]
