"""The table of `attention`'s options, in the order of its signature.

Other code derives its lists of options from these rows: Options and their checks (checks.py, build.py), the fields of
Problem, Operands and Gradients (records.py), constants and members of the kernels (engines, params.py), operators of
torch, operands of jax, attention over several ranks, and compile() with its command. Only the signature and docstring
of `attention`, the types of options (argument_types.py) and the math of each feature (score.py, score.cuh,
reference.py) are written by hand.
"""

from __future__ import annotations

from collections import namedtuple
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
WHOLE = "whole"  # None, or a whole number

# Legal ranges of numbers, which checks.py checks.
FINITE = "finite"
CAP = "cap"  # positive; a value that is infinite in the accumulation dtype counts as None
PROBABILITY = "probability"  # [0, 1) in steps of 1/65536

SIZES = {"b": "B", "h": "Hq", "g": "Hk", "i": "Sq", "j": "Sk"}  # {axis letter: its name in messages}


class Feature(NamedTuple):
    """One option; the columns that its kind does not use have their defaults."""

    name: str  # the keyword, and for an array the member of Params
    kind: str
    default: Any = None
    definition: bool = True  # changes the function; False: only how it is computed, or which results it returns
    result: bool = False  # only selects results, so that a Problem does not have it

    # Columns of arrays
    axes: tuple[str, ...] = ()  # the legal shapes, in letters of SIZES
    broadcast: bool = False  # every shape that broadcasts to the axes is legal
    dtypes: tuple[str, ...] = ()
    dtype_text: str = ""  # replaces the dtype in the error "must be <dtype>"
    hint: tuple[tuple[str, ...], str] = ((), "")  # (wrong dtypes, advice that the error adds for them)
    longest: str = ""  # every value is in [0, n], where n is this field of Sizes
    not_negative: bool = False  # every value is finite and not negative
    padded: bool = False  # for padded batches only
    fp8: bool = False  # for float8 only
    gradient: bool = False  # the backward returns d<name>, with the shape and dtype of the array
    optional_gradient: bool = False  # the gradient is computed only on request, by a kernel of its own
    ranks: bool = False  # supported over several ranks; each passes the whole array, or the part for its heads
    once: bool = False  # is applied once per row, even if the row's keys are in several shards

    # Columns of numbers
    range: str = ""
    example: float = 0.0  # the value that the command compile uses: kernels serve all values

    # In a Problem and in the kernels
    fact: str = ""  # the field of Problem (default: the name): a number, a shape (broadcast), or whether it is given
    constant: str = ""  # the bool of config.cuh that is true if the option is given
    element: str = ""  # the type of its elements in config.cuh
    member: str = ""  # the member of Params that holds the number
    batch_stride: str = ""  # the member for the stride of a leading batch axis
    changes_score: bool = False  # is applied between q.k and the softmax
    keeps_score: bool = False  # its gradient needs a second value per score

    @property
    def field(self) -> str:
        """The field of Problem."""
        return self.fact or self.name


FEATURES = (
    Feature("causal", CAUSAL, False),
    Feature("window", WINDOW),
    Feature("scale", NUMBER, range=FINITE, member="scale"),
    Feature(
        "softcap", NUMBER, range=CAP, example=1.0, constant="SOFTCAP", member="softcap", changes_score=True,
        keeps_score=True,
    ),
    Feature(
        "alibi_slopes", ARRAY, axes=("h", "bh"), dtypes=("float32",), ranks=True, fact="alibi", constant="ALIBI",
        batch_stride="alibi_batch", changes_score=True,
    ),
    Feature(
        "bias", ARRAY, axes=("bhij",), broadcast=True, dtypes=FLOATING, dtype_text="floating",
        hint=(("bool",), "; a boolean mask is given as mask="), padded=True, gradient=True, optional_gradient=True,
        constant="BIAS", element="bias_element", changes_score=True,
    ),
    Feature(
        "mask", ARRAY, axes=("bhij",), broadcast=True, dtypes=("bool",), dtype_text="bool, True = attend",
        hint=(FLOATING, "; an additive mask is given as bias="), padded=True, fact="dense_mask", constant="DENSE_MASK",
    ),
    Feature(
        "sink", ARRAY, axes=("h",), dtypes=FLOATING, dtype_text="floating", gradient=True, ranks=True, once=True,
        constant="SINK", element="sink_element",
    ),
    Feature("q_lengths", ARRAY, axes=("b",), dtypes=("int32",), longest="q_len", padded=True, constant="Q_LENGTHS"),
    Feature("kv_lengths", ARRAY, axes=("b",), dtypes=("int32",), longest="kv_len", padded=True, constant="KV_LENGTHS"),
    Feature("score_mod", MOD, ranks=True, constant="SCORE_MOD", changes_score=True),
    Feature("mask_mod", MOD, ranks=True, constant="MASK_MOD"),
    Feature("dropout", NUMBER, 0.0, range=PROBABILITY, example=0.5, constant="DROPOUT"),
    Feature("seed", SEED),
    Feature("q_descale", ARRAY, axes=("bg",), dtypes=("float32",), not_negative=True, fp8=True),
    Feature("k_descale", ARRAY, axes=("bg",), dtypes=("float32",), not_negative=True, fp8=True),
    Feature("v_descale", ARRAY, axes=("bg",), dtypes=("float32",), not_negative=True, fp8=True),
    Feature("layout", CHOICE, "bshd"),
    Feature("return_lse", FLAG, False, definition=False, result=True),
    Feature("deterministic", FLAG, False, definition=False),
    Feature("backend", CHOICE, definition=False),
    Feature("engine", CHOICE, definition=False),
)  # fmt: skip

NAMES = tuple(feature.name for feature in FEATURES)
ARRAYS = tuple(feature for feature in FEATURES if feature.kind == ARRAY)
NUMBERS = tuple(feature for feature in FEATURES if feature.kind == NUMBER)
FLAGS = tuple(feature for feature in FEATURES if feature.kind == FLAG)
MODS = tuple(feature for feature in FEATURES if feature.kind == MOD)
WITH_GRADIENT = tuple(feature for feature in FEATURES if feature.gradient)
DIFFERENTIATED = ("q", "k", "v", *(feature.name for feature in WITH_GRADIENT))  # in the order of Gradients

_SHARED = {feature.name: feature for feature in FEATURES}

# The options of `attention_with_kv_cache`, in the order of its signature. Further axes are "p", the columns of a block
# table; "n", the rows of k; "t", the tokens of a packed batch; "r" and "e", the sizes of a rotary table.
CACHE_FEATURES = (
    Feature("k", ARRAY, axes=("bngd",), dtypes=FLOATING),
    Feature("v", ARRAY, axes=("bngd",), dtypes=FLOATING),
    Feature("cache_seqlens", LENGTHS, axes=("b",), dtypes=("int32",)),
    Feature("cache_batch_idx", ARRAY, axes=("b",), dtypes=("int32",)),
    Feature("cache_leftpad", ARRAY, axes=("b",), dtypes=("int32",)),
    Feature("block_table", ARRAY, axes=("bp",), dtypes=("int32",)),
    Feature("slots", ARRAY, axes=("n",), dtypes=("int64",)),
    Feature("positions", ARRAY, axes=("bi", "t"), dtypes=("int32",)),
    Feature("cu_seqlens_q", ARRAY, axes=("c",), dtypes=("int32",)),
    Feature("max_seqlen_q", WHOLE),
    Feature("rotary_cos", ARRAY, axes=("re",), dtypes=FLOATING, dtype_text="floating"),
    Feature("rotary_sin", ARRAY, axes=("re",), dtypes=FLOATING, dtype_text="floating"),
    Feature("rotary_interleaved", FLAG, True),
    Feature("causal", FLAG, True),
    *(_SHARED[name] for name in ("window", "scale", "softcap", "alibi_slopes", "sink")),
    Feature("mask", ARRAY, axes=("bhis",), broadcast=True, dtypes=("bool",), dtype_text="bool, True = attend"),
    *(_SHARED[name] for name in ("score_mod", "mask_mod", "k_descale", "v_descale")),
    Feature("split_size", WHOLE),
    _SHARED["layout"],
    Feature("out", ARRAY, axes=("bihd",), dtypes=FLOATING),
    *(_SHARED[name] for name in ("return_lse", "backend", "engine")),
)


def record(*names: str, optional: int = 0) -> Any:
    """Return a namedtuple class to derive from; the last `optional` fields default to None."""
    return namedtuple("record", names, defaults=[None] * optional)


def is_given(problem: Any, feature: Feature) -> bool:
    """Return whether a Problem has a feature."""
    fact = getattr(problem, feature.field)
    return fact is not None and fact is not False and fact != 0.0
