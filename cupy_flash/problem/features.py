"""The rows of the table of options: a kind, and the columns that each kind has.

`records.Options` has the rows of `attention`, `records.CacheOptions` those of calls on a KV cache.
"""

# No `from __future__ import annotations`, as in records.py.
from collections import namedtuple
from collections.abc import Mapping
from dataclasses import field, fields
from functools import partial
from typing import Any, NamedTuple

FLOATING = ("float16", "bfloat16", "float32", "float64")

# Kinds of options.
ARRAY = "array"
NUMBER = "number"
FLAG = "flag"
CHOICE = "choice"  # a string, or None for the default
CAUSAL = "causal"  # a bool, or the corner to which the diagonal is aligned
WINDOW = "window"  # None, or a pair of whole numbers or None
SEED = "seed"  # None, an int, or an int64 array of one element
MOD = "mod"  # None, a Python function of a score and its indices, or a Mod
LENGTHS = "lengths"  # None, an int for all sequences, or an int32 array
INTEGER = "integer"  # a whole number, or None if that is the default
STATISTICS = "statistics"  # None, or names of the fields of records.Statistics

# Legal ranges of numbers, which checks.py checks.
FINITE = "finite"
CAP = "cap"  # positive; a value that is infinite in the accumulation dtype counts as None
PROBABILITY = "probability"  # [0, 1) in steps of 1/65536

# {axis letter: its name in messages}; "n" is the rows of k that are appended, "t" the tokens of a packed batch, "d" and
# "e" are the head dimensions.
SIZES = {"b": "B", "h": "Hq", "g": "Hk", "i": "Sq", "j": "Sk", "n": "S", "t": "T", "d": "D", "e": "D"}
# Axes of `selected`: sequences or 1, heads, lists of a sequence and of a packed batch, entries.
SIZES |= {"B": "B or 1", "x": "Hs", "l": "ceil(Sq / selected_rows)", "u": "Tq // selected_rows + B", "w": "n"}
# The names of options' axes in a packed batch, whose positions are those inside a sequence.
PACKED_SIZES = SIZES | {"i": "max_seqlen_q", "j": "max_seqlen_k"}


class Conflict(NamedTuple):
    """Another option with which an option cannot be combined, and the reason."""

    other: str
    reason: str
    supported: bool = True  # False: legal, but not supported by this version
    append: bool = False  # only in append_to_kv_cache


class Feature(NamedTuple):
    """One option; the columns that its kind does not use have their defaults."""

    name: str  # the keyword, and for an array the member of Params
    kind: str
    default: object = None
    definition: bool = True  # changes what is computed; False: only how, or which results are returned
    result: bool = False  # only selects results; engines need not know of it, except of statistics
    common: bool = False  # all engines implement it; if only some do, each names it in OPTIONS or CACHE_OPTIONS
    host: bool = (
        False  # only engines of the CPU implement it, kernels under a switch of Params, or the checks of a call
    )

    # Columns of arrays
    axes: tuple[str, ...] = ()  # the legal shapes, in letters of SIZES
    broadcast: bool = False  # every shape that broadcasts to the axes is legal
    rows: bool = False  # the axes are (sequence, row, head, dimension), and the layout permutes them
    per_key: bool = False  # one number per key and head of a KV cache: axes (block, row, head) in the caches' layout
    shape_text: str = "must be {axes} = {shape}, not {given}"  # the error about a shape, after the name
    dtypes: tuple[str, ...] = ()
    dtype_text: str = ""  # replaces the dtype in the error "must be <dtype>"
    hint: tuple[tuple[str, ...], str] = ((), "")  # (wrong dtypes, advice that the error adds for them)
    longest: str = ""  # every value is in [0, n], where n is this field of Sizes
    not_negative: bool = False  # every value is finite and not negative
    padded: bool = False  # for padded batches only
    fp8: bool = False  # for float8 only
    gradient: bool = False  # the backward returns d<name>, with the shape and dtype of the array
    optional_gradient: bool = False  # the gradient is computed only on request, by a kernel of its own
    ranks: bool = False  # supported over several ranks; each passes the whole array, or the part of its heads
    once: bool = False  # is applied once per row even if the row's keys are in several shards, as a sink is
    addresses: str = ""  # gives the blocks of a KV cache that a call accesses for "keys", or only for appended "rows"

    # Columns of a KV cache
    appends: bool = False  # an option of append_to_kv_cache too
    conflicts: tuple[Conflict, ...] = ()

    # Columns of numbers
    range: str = ""
    example: float = 0.0  # the value that compile, check and tune use: kernels serve all values
    multiple: int = 0  # a whole number must be a positive multiple of this, or the default

    # In a Problem and in the kernels
    # The field of Problem or Cache (default: the name): a number, a shape (broadcast), or whether it is given.
    fact: str = ""
    constant: str = ""  # the bool of config.cuh that is true if the option is given
    element: str = ""  # the type of its elements in config.cuh
    member: str = ""  # the member of Params that holds the number, or the array if it has another name there
    leading_stride: str = ""  # the member for the stride of the first axis, if the array has all axes
    changes_score: bool = False  # is applied between q.k and the softmax
    keeps_score: bool = False  # its gradient needs a second value per score

    @property
    def field(self) -> str:
        """The field of Problem, or of Cache."""
        return self.fact or self.name


def option(kind: str, default: Any = None, **columns: Any) -> Any:
    """Return a field of Options that holds its row of the table as metadata."""
    return field(default=default, metadata={"kind": kind, **columns})


common = partial(option, common=True)  # the field of an option that all engines implement


def known(function: str, options: Mapping[str, Any], table: tuple[Feature, ...]) -> Mapping[str, Any]:
    """Return keyword arguments that are options of a table; TypeError for an unknown name."""
    names = [feature.name for feature in table]
    unknown = [name for name in options if name not in names]
    if unknown:
        raise TypeError(
            f"{function}: unknown option {', '.join(map(repr, unknown))}; the options are {', '.join(names)}"
        )
    return options


def table_of(options: type) -> tuple[Feature, ...]:
    """Return the table of a class of options, read from its fields."""
    return tuple(Feature(row.name, default=row.default, **row.metadata) for row in fields(options))


def in_layout(axes: str, layout: str) -> str:
    """Return the axes (sequence, row, head, dimension) in the order of a layout; those of a packed batch are "thd".

    Axes without a dimension are legal too.
    """
    orders = {"bshd": axes, "bhsd": axes[0] + axes[2] + axes[1] + axes[3:], "thd": "t" + axes[2:]}
    return orders[layout]


def record(*names: str) -> Any:
    """Return a namedtuple class to derive from, for an adapter whose calls have a field for each option."""
    return namedtuple("record", names)


# Columns that rows of CacheOptions share.
INT32, INT64 = ("int32",), ("int64",)
OF_SEQUENCES = "must be {shape}, not {given}"
ROTARY_TABLE: dict[str, object] = dict(
    axes=("rf",), dtypes=FLOATING, dtype_text="floating", appends=True,
    shape_text="must be (R, rd / 2) with rd up to D = {d}, not {given}",
)  # fmt: skip
PER_KEY: dict[str, object] = dict(
    axes=("PRg",), per_key=True, dtypes=("float16", "float32"), dtype_text="float16 or float32", appends=True,
    shape_text="must be {shape}, one number per key and head of the caches, not {given}",
)  # fmt: skip
PREFIX: dict[str, object] = dict(dtypes=INT32, shape_text=OF_SEQUENCES)
BESIDE_SCALES = tuple(
    Conflict(f"{x}_descale", f"{x}_descale is per sequence and {x}_scale per key: give one of them") for x in "kv"
)
