"""The options of `attention`, declared once: a row for each, in the order of its signature.

Everything else that depends on options is derived from these rows: Options and their checks (requirements.py, pose.py),
the facts of a Problem, Operands and Gradients (problem.py), constants and members of the kernels (engines, params.py),
the operators of torch, the operands of jax, attention over several ranks, and compile() with its command. Only the
signature and docstring of `attention`, the types of options (arguments.py) and the math of each feature (score.py,
score.cuh, reference.py) are written by hand.
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
CAUSAL = "causal"  # bool or string: which corner the diagonal starts from
WINDOW = "window"  # None, or a pair of whole numbers or None
SEED = "seed"  # None, an int, or an int64 array of one element
MOD = "mod"  # None, a Python function of a score and its place, or a Mod
LENGTHS = "lengths"  # None, an int for all sequences, or an int32 array
WHOLE = "whole"  # None, or a whole number

# Ranges of numbers, by their check in requirements.py.
FINITE = "finite"
CAP = "cap"  # positive; a value that is infinite in the accumulation dtype counts as None
PROBABILITY = "probability"  # [0, 1) in steps of 1/65536

SIZES = {"b": "B", "h": "Hq", "g": "Hk", "i": "Sq", "j": "Sk"}  # the axes of arrays, as messages write them


class Feature(NamedTuple):
    """One option. The columns that its kind does not use keep their defaults."""

    name: str  # the keyword; the member of Params for an array
    kind: str
    default: Any = None
    definition: bool = True  # part of what attention computes; False: how it runs, or which results it returns
    result: bool = False  # only chooses which results are returned: a Problem does not have it

    # Columns of arrays
    axes: tuple[str, ...] = ()  # the legal shapes, by the letters of SIZES
    broadcast: bool = False  # any shape is legal that broadcasts to the axes
    dtypes: tuple[str, ...] = ()
    dtype_text: str = ""  # "must be <this>"; by default the one dtype
    hint: tuple[tuple[str, ...], str] = ((), "")  # (wrong dtypes, what the error adds for them)
    longest: str = ""  # every value is in [0, n], where n is this field of Sizes
    not_negative: bool = False  # every value is finite and not negative
    padded: bool = False  # for padded batches only
    fp8: bool = False  # for float8 only
    gradient: bool = False  # the backward returns d<name>, of its shape and dtype
    optional_gradient: bool = False  # only on request: it has a kernel of its own
    ranks: bool = False  # served over several ranks: each passes the same array, or the part of its heads
    once: bool = False  # enters a row once, even if the keys of the row come in several shards

    # Columns of numbers
    range: str = ""
    example: float = 0.0  # value with which the command compile plans: kernels are the same for all values

    # In a Problem and in the kernels
    fact: str = ""  # the field of Problem: a number, a shape (broadcast), or whether it is given; default: the name
    constant: str = ""  # the bool of config.cuh that is true if the option is given
    element: str = ""  # the type of its elements in config.cuh
    member: str = ""  # the member of Params that holds the number
    batch_stride: str = ""  # the member for the stride of a leading batch axis
    changes_score: bool = False  # between q.k and the softmax
    keeps_score: bool = False  # its gradient needs a number that the forward computes for every score

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

# The options of `attention_with_kv_cache`, in the order of its signature. In the axes, "p" stands for the columns of a
# block table, "n" for the rows of k, "t" for the tokens of a packed batch, "r" and "e" for the sizes of a rotary table.
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
    """A namedtuple class to derive from; the last so many fields default to None."""
    return namedtuple("record", names, defaults=[None] * optional)


def is_given(problem: Any, feature: Feature) -> bool:
    """Whether a Problem has a feature."""
    fact = getattr(problem, feature.field)
    return fact is not None and fact is not False and fact != 0.0
