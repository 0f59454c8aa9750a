"""Builds the Problem and Operands of a call, with or without a KV cache, after checking it.

Facts (shapes, dtypes, options) are checked once and cached; the contents of arrays are checked at every call. The
modules for KV caches are imported by the first call on one.
"""

# No `from __future__ import annotations`: NamedTuple compiles annotations that are strings, which would take a tenth of
# the time of importing this package.
import math
import operator
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from .. import environment
from ..arrays import CACHED, Array, dtype_name, empty, has_boxes
from .checks import (
    ArrayFacts,
    Requirements,
    Settings,
    Sizes,
    check_boundaries,
    check_features,
    check_options,
    check_packed,
    check_places,
    check_saved,
    check_seed,
    check_shapes,
    check_tangents,
    check_values,
    is_one_of,
    read,
)
from .features import ARRAY, LENGTHS, MOD, PACKED_SIZES, SEED, SIZES, STATISTICS, WINDOW, Feature
from .mask import Mask
from .records import (
    ARRAYS,
    CACHE_FEATURES,
    CACHES,
    DOUBLE_BACKWARD,
    FEATURES,
    FIELDS,
    JVP,
    LAYOUTS,
    LONGEST,
    WHOLE,
    Cache,
    CacheOperands,
    CacheOptions,
    Operands,
    Options,
    Packed,
    Problem,
    Saved,
    SavedWeights,
    Shard,
    Tangents,
    out_dtype,
)
from .selection import axes_of_lists, check_entries, check_units, most_keys, selection_of
from .shared_kv import VALUES, share
from .statistics import check_asked, check_statistics, differentiated_statistics, gradients_of_statistics

if TYPE_CHECKING:
    from collections.abc import Callable
    from functools import _lru_cache_wrapper
    from typing import Protocol, TypeAlias, TypeVar

    from ..arrays import AnyArray
    from ..mods.trace import Mod
    from .argument_types import Names, Window
    from .checks import Length

    class Beside(Protocol):
        """The arrays of a call beside q, k and its options, and the checks of what it wants."""

        arrays: dict[str, object]

        def check(self, requirements: Requirements, call: dict[str, Array], sizes: Sizes, width: int | None) -> None:
            """Check what the call wants."""

    T = TypeVar("T")
    Given: TypeAlias = AnyArray | Array  # a caller's array, or inside the package its Array

# (name, *ArrayFacts)
NamedFacts = (
    tuple[str, tuple[int, ...], np.dtype, str, str]
    | tuple[str, tuple[int, ...], np.dtype, str, str, bool, str, bool, bool]
)


def pose(
    function: str,
    arrays: "tuple[Given, Given, Given | None]",
    options: Options,
    packed: Packed | None = None,
    saved: "Saved | SavedWeights | None" = None,
    shard: Shard = WHOLE,
    tangents: Tangents | None = None,
    reasons: tuple[str, ...] = (),
    beside: "Beside | None" = None,
) -> tuple[Problem, Operands]:
    """Return the Problem and Operands of one call of `function`, or raise one error with every unmet requirement.

    With `tangents` the problem is a JVP in their direction; with `saved` as well, a double backward. `reasons` are
    requirements that an adapter has found unmet. `beside` is that of a call without v (weights.py), for which no seed
    is drawn; k takes the place of v.
    """
    requirements = Requirements(function)
    requirements.unmet += reasons
    check_asked(requirements, options, beside is None and saved is None, tangents is not None)
    mod = traced_mod(requirements, options)
    given = _given(("q", "k", "v"), arrays, options, TABLE)
    if packed is not None:
        given |= {"cu_seqlens_q": packed.cu_seqlens_q, "cu_seqlens_k": packed.cu_seqlens_k}
    if beside is not None:
        given |= beside.arrays
    elif isinstance(saved, Saved):
        given |= {"dout": saved.dout, "out": saved.out, "lse": saved.lse}
        if saved.dlse is not None:
            given["dlse"] = saved.dlse
        given |= gradients_of_statistics(requirements, saved)
    if shard.starts is not None:
        given["starts"] = shard.starts
    if mod is not None:
        given |= zip(captured_names(mod), mod.arrays, strict=True)
    if tangents is not None:
        given |= _direction(requirements, tangents, mod)
    call = read(requirements, given)
    share(requirements, given if beside is None else VALUES, call, options, {"k": "v", "tk": "tv"})
    facts = _facts(
        options, mod,
        tuple([(name, x.shape, x.dtype, x.device, x.framework) for name, x in call.items()]),
        _are_aligned(call, ("q", "k", "v")), () if packed is None else (packed.max_seqlen_q, packed.max_seqlen_k),
        saved, shard, tangents is not None,
    )  # fmt: skip
    checked = _checked(requirements, facts)
    drops = checked.dropout and beside is None
    # Array contents and the seed are not cached facts: check them on every call.
    seed = check_seed(requirements, call, options.seed, drops, saved is not None)
    if packed is not None:
        check_boundaries(requirements, call, checked.longest)
    check_values(requirements, call, checked.sizes)
    if beside is not None:
        beside.check(requirements, call, checked.sizes, most_keys(checked.problem, checked.longest[1]))
    check_entries(requirements, checked.problem, call, options.check_selected)
    requirements.raise_if_unmet(call)
    assert checked.problem is not None  # holds because every requirement is met
    seed = None if not drops else drawn_seed() if seed is None else seed
    named: dict[str, Any] = {name: x for name, x in call.items() if name in OPERANDS}
    named.setdefault("v", call["k"])
    if mod is not None:
        names = captured_names(mod)
        named |= {"captured": tuple([call[name] for name in names]), "numbers": mod.numbers}
        named["tcaptured"] = tuple([call.get(f"t{name}") for name in names])
    return checked.problem, Operands(**named, seed=seed)


def drawn_seed() -> int:
    """Return a seed of dropout from NumPy's global generator, which callers make repeatable with np.random.seed."""
    return int(np.random.randint(0, 2**63 - 1, dtype=np.int64))  # noqa: NPY002


def pose_with_cache(
    q: "Given",
    k_cache: "Given",
    v_cache: "Given | None",
    options: CacheOptions,
    reasons: tuple[str, ...] = (),
    function: str = "attention_with_kv_cache",
    beside: "Beside | None" = None,
) -> tuple[Problem, Operands]:
    """Return `pose` of `attention_with_kv_cache`, or of a function of weights, which has `beside` and no v_cache."""
    given = _given(("q", *CACHES), (q, k_cache, v_cache), options, of_cache())
    if beside is not None:
        given |= beside.arrays
    return _pose_on_cache(function, given, options, "cu_seqlens_q", reasons, beside)


def pose_append(
    k: "Given",
    v: "Given | None",
    k_cache: "Given",
    v_cache: "Given | None",
    cu_seqlens: "Given | None",
    options: CacheOptions,
    reasons: tuple[str, ...] = (),
) -> tuple[Problem, Operands]:
    """Return `pose` of `append_to_kv_cache`, a problem without queries; the operands have an empty q."""
    given = _given(("k", "v", *CACHES), (k, v, k_cache, v_cache), options, of_cache())
    if cu_seqlens is not None:
        given["cu_seqlens"] = cu_seqlens
    return _pose_on_cache("append_to_kv_cache", given, options, "cu_seqlens", reasons)


def _pose_on_cache(
    function: str,
    given: dict[str, object],
    options: CacheOptions,
    bounds: str,
    reasons: tuple[str, ...],
    beside: "Beside | None" = None,
) -> tuple[Problem, Operands]:
    requirements, table = Requirements(function), of_cache()
    requirements.unmet += reasons
    length = _whole_length(requirements, options.cache_seqlens)
    if length is None and options.cache_seqlens is not None:
        given["cache_seqlens"] = options.cache_seqlens
    mod = traced_mod(requirements, options)
    if mod is not None:
        given |= zip(captured_names(mod), mod.arrays, strict=True)
    attends = "q" in given
    call = read(requirements, given)
    table.check_overlap(requirements, call)
    options = share(requirements, given if beside is None else VALUES, call, options, {"k_cache": "v_cache", "k": "v"})
    facts = _facts(
        options, mod,
        tuple([
            (name, x.shape, x.dtype, x.device, x.framework, x.readonly, x.immutable, *_strides(x.shape, x.strides))
            for name, x in call.items()
        ]),
        _are_aligned(call, CACHES), on_cache=(attends, length is not None),
    )  # fmt: skip
    checked = _checked(requirements, facts)
    fields = table.fields
    nested: dict[str, Any] = {fields[name]: x for name, x in call.items() if name in fields}
    if length is not None:
        nested["cache_seqlens"] = length
    rows = call.get("q")
    if rows is None and "k" in call:
        rows = empty((0,) * len(call["k"].shape), call["k"].dtype, call["k"])
    named: dict[str, Any] = {"q": rows, "k": call.get("k_cache"), "v": call.get("v_cache", call.get("k_cache"))}
    named |= {name: x for name, x in call.items() if name in table.others}
    named["cu_seqlens_q"] = call.get(bounds)
    if mod is not None:
        named |= {"captured": tuple(call[x] for x in captured_names(mod) if x in call), "numbers": mod.numbers}
    operands = Operands(**named, cache=table.operands(**nested))
    if checked.readable:
        assert checked.problem is not None  # holds because the sizes are known
        check_values(requirements, call, checked.sizes)
        table.check_contents(requirements, checked.problem, operands, bounds)
    check_entries(requirements, checked.problem, call, options.check_selected)
    if beside is not None:
        beside.check(requirements, call, checked.sizes, checked.sizes.kv_len)
    requirements.raise_if_unmet(call)
    assert checked.problem is not None
    return checked.problem, operands


def _whole_length(requirements: Requirements, given: object) -> int | None:
    """Return cache_seqlens if it is one number for all sequences, else None; 0 for a number beyond int32."""
    if given is None or isinstance(given, np.ndarray) or hasattr(given, "__dlpack__"):
        return None
    if not isinstance(given, (int, np.integer)) or isinstance(given, (bool, np.timedelta64)):
        return None
    length = int(given)
    return length if requirements.require(abs(length) <= LONGEST, f"cache_seqlens must be int32, not {length}") else 0


OPERANDS = frozenset(Operands._fields)


def traced_mod(requirements: Requirements, options: Options | CacheOptions) -> "Mod | None":
    """Return the traced score_mod and mask_mod; None without them, or if tracing fails, which is recorded."""
    if options.score_mod is None and options.mask_mod is None:
        return None
    from ..mods.ir import Untraceable  # imported by the first call that has a mod
    from ..mods.trace import mod_of

    try:
        return mod_of(options.score_mod, options.mask_mod)
    except Untraceable as error:
        report = requirements.require if isinstance(error, ValueError) else requirements.require_type
        report(False, str(error))
        return None


def captured_names(mod: "Mod | None") -> list[str]:
    """Return the names, by slot, that a mod's captured arrays have among the arrays of a call."""
    return [] if mod is None else [f"array{slot}" for slot in range(len(mod.arrays))]


def _direction(requirements: Requirements, tangents: Tangents, mod: "Mod | None") -> dict[str, object]:
    """Return the tangents by name; those of captured arrays are tarray0, tarray1, ..."""
    given = zip(Tangents._fields[:-1], tangents, strict=False)
    direction: dict[str, object] = {name: x for name, x in given if x is not None}
    if tangents.tcaptured is None:
        return direction
    count = 0 if mod is None else len(mod.arrays)
    is_sequence = isinstance(tangents.tcaptured, (tuple, list))
    if requirements.require_type(
        is_sequence and len(tangents.tcaptured) == count,
        f"tcaptured must be a sequence with a tangent or None for each of the {count} captured arrays",
    ):
        captured = zip(captured_names(mod), tangents.tcaptured, strict=True)
        direction |= {f"t{name}": x for name, x in captured if x is not None}
    return direction


# Kinds of options that do not enter the cache key as they are: an array enters it by its facts, a window by its sides,
# a mod by its text, statistics as a tuple; a seed and lengths do not enter it, because no fact depends on them.
NOT_PLAIN = (ARRAY, LENGTHS, WINDOW, SEED, MOD, STATISTICS)


class Table:
    """The names of the options of a class, by kind."""

    def __init__(self, features: tuple[Feature, ...]) -> None:
        self.features = features
        self.arrays = tuple(feature.name for feature in features if feature.kind == ARRAY)
        self.plain = tuple(feature.name for feature in features if feature.kind not in NOT_PLAIN)
        self.arrays_of, self.plain_of = operator.attrgetter(*self.arrays), operator.attrgetter(*self.plain)
        self.names = self.arrays  # all that may be arrays, in the order of Operands


TABLE = Table(FEATURES)
ARRAY_NAMES = TABLE.arrays
LENGTH = "cache_seqlens"  # an option that may be an array or a number


class _OfCache(Table):
    """The options of a call on a KV cache, and functions of modules that only such calls import."""

    def __init__(self) -> None:
        from .kv_cache_contents import check_contents, check_overlap, distances, indices_of, longest_length

        super().__init__(CACHE_FEATURES)
        names = [name for name in Operands._fields if name in self.arrays and name not in FIELDS]
        names += sorted(FIELDS, key=lambda name: CacheOperands._fields.index(FIELDS[name] or ""))
        self.names = tuple(names)
        self.fields, self.operands = FIELDS, CacheOperands
        self.others = OPERANDS - FIELDS.keys() - {"q", "k", "v", "cu_seqlens_q"}
        self.check_contents, self.check_overlap = check_contents, check_overlap
        self.distances, self.indices_of, self.longest_length = distances, indices_of, longest_length


# Made once: an import in a function takes microseconds even if the module has been imported.
of_cache = lru_cache(maxsize=1)(_OfCache)


def _given(
    names: tuple[str, ...], arrays: "tuple[Given | None, ...]", options: Options | CacheOptions, table: Table
) -> dict[str, object]:
    """Return the arrays of a call by name, as the caller passed them, without v and options that are None."""
    given: dict[str, object] = {n: x for n, x in zip(names, arrays, strict=True) if x is not None or n not in VALUES}
    for name, value in zip(table.arrays, table.arrays_of(options), strict=True):
        if value is not None:
            given[name] = value
    return given


# Calls with options of other types are not cached: such a value may be mutable, unhashable, or equal to one with
# another meaning.
PLAIN = frozenset((bool, int, float, str, type(None), np.bool_, np.int64, np.float32, np.float64))


class Facts(NamedTuple):
    """Everything on which a Problem and the checks of a call depend, except the seed and the contents of arrays.

    Options are as the caller passed them; without a type checker that may be anything.
    """

    options: tuple[bool | float | str | None, ...]  # those whose kind is not in NOT_PLAIN
    window: tuple[int | None, int | None] | None
    statistics: "Names"
    backend: str | None  # the option `backend`, by default the environment variable
    mods: str  # the text of the mods, or ""
    arrays: tuple[NamedFacts, ...]
    aligned: bool
    longest: tuple[int | None, ...]  # (max_seqlen_q, max_seqlen_k) of a packed batch without a cache
    backward: bool
    bias_gradient: bool
    captured_gradient: tuple[bool, ...] | None
    shard: tuple[int, int, int | None, int, tuple[int, int] | None]  # the fields of Shard other than its array
    directed: bool  # a JVP, or together with `backward` a double backward
    types: tuple[type, ...]  # the options' types, because 1 == True == 1.0 and not all of them are legal
    on_cache: tuple[bool, bool] | None  # whether it attends, and whether all sequences have one length; None: no cache


def _facts(
    options: Options | CacheOptions,
    mod: "Mod | None",
    arrays: tuple[NamedFacts, ...],
    aligned: bool,
    longest: tuple[int | None, ...] = (),
    saved: "Saved | SavedWeights | None" = None,
    shard: Shard = WHOLE,
    directed: bool = False,
    on_cache: tuple[bool, bool] | None = None,
) -> Facts:
    plain = (TABLE if on_cache is None else of_cache()).plain_of(options)
    window, backend = options.window, options.backend
    if backend is None:
        backend = environment.backend()
    bias_gradient = saved is not None and saved.bias_gradient
    captured_gradient = None if saved is None else saved.captured_gradient
    sides = window if type(window) is tuple else (window,)
    statistics = options.statistics
    names = statistics if type(statistics) is tuple else (statistics,)
    types = tuple(map(type, (*plain, backend, bias_gradient, *longest, *shard[1:], *sides, *names)))
    return Facts(
        plain, window, statistics, backend, "" if mod is None else mod.text, arrays, aligned, longest,
        saved is not None, bias_gradient, captured_gradient, shard[1:], directed, types, on_cache,
    )  # fmt: skip


def _are_aligned(call: dict[str, Array], names: tuple[str, ...]) -> bool:
    """Return whether TMA can load these arrays; one that could not be read is ignored."""
    return all(has_boxes(call[name]) for name in names if name in call)


@lru_cache(maxsize=CACHED)
def _strides(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[bool, bool]:
    """Return the fields has_rows and repeats of ArrayFacts."""
    has_rows = 0 in shape or shape[-1:] == (1,) or strides[-1:] == (1,)
    overlaps = any(stride == 0 and size > 1 for stride, size in zip(strides, shape, strict=True))
    return has_rows, overlaps and 0 not in shape


class CheckedFacts(NamedTuple):
    """The result of all checks of facts."""

    problem: Problem | None  # None if the arrays do not agree on the sizes
    sizes: Sizes
    dropout: bool
    longest: tuple[int | None, int | None]
    readable: bool  # the arrays of indices of a KV cache have the right shapes and dtypes
    unmet: tuple[str, ...]
    about_type: bool
    unsupported: tuple[str, ...]


def _checked(requirements: Requirements, facts: Facts) -> CheckedFacts:
    """Return the checked facts, and record what is not met."""
    checked = cached_if_plain(_check_facts, facts.types)(facts)
    if checked.unmet:
        requirements.unmet += checked.unmet
        requirements.about_type |= checked.about_type
    requirements.unsupported += checked.unsupported
    return checked


def cached_if_plain(function: "_lru_cache_wrapper[T]", types: tuple[type, ...]) -> "Callable[..., T]":
    """Return the cached function if every option has a plain type, otherwise the function without the cache."""
    return function if PLAIN.issuperset(types) else function.__wrapped__


@lru_cache(maxsize=CACHED)
def _check_facts(facts: Facts) -> CheckedFacts:
    """Check the facts of a call; _check_options has a cache of its own, which serves calls of growing lengths too."""
    requirements, table = Requirements(""), TABLE if facts.on_cache is None else of_cache()
    arrays = {described[0]: ArrayFacts(*described[1:]) for described in facts.arrays}
    options: dict[str, Any] = dict(zip(table.plain, facts.options, strict=True))
    packed, layout, sizes, cache, readable = facts.longest != (), options["layout"], Sizes(), None, False
    check_places(requirements, arrays)
    if facts.on_cache is not None:
        from . import kv_cache

        layout = layout if is_one_of(layout, LAYOUTS) else "bshd"
        sizes = kv_cache.check_sizes(requirements, arrays, options, layout, facts.on_cache)
        packed, readable = sizes.packed, sizes.known and not requirements.unmet
    elif {"q", "k"} <= arrays.keys():
        sizes = check_shapes(requirements, arrays, layout, packed)
    like = arrays.get("q", arrays.get("k"))
    settings, unmet_options, about_type = cached_if_plain(_check_options, facts.types)(
        facts.on_cache is not None, facts.options, facts.window, facts.backend, facts.types, facts.longest != (),
        np.float64 if like is not None and like.dtype == np.float64 else np.float32,
    )  # fmt: skip
    requirements.unmet += unmet_options
    requirements.about_type |= about_type
    longest: tuple[int | None, int | None] = (sizes.q_len, sizes.kv_len)
    lengths, names = sizes.lengths | axes_of_lists(settings, sizes, facts.longest != ()), SIZES
    if facts.longest:
        longest = check_packed(requirements, arrays, (facts.longest[0], facts.longest[1]))
        lengths, names = lengths | _positions(longest), PACKED_SIZES
    if sizes.known and facts.on_cache is not None:
        on_cpu = facts.backend in (None, "cpu") and arrays["k_cache"].device == "cpu"
        readable &= kv_cache.check_arrays(requirements, arrays, settings, layout, sizes, on_cpu)
        cache = kv_cache.facts_of_cache(arrays, settings, layout, sizes)
    elif sizes.known:
        check_features(requirements, FEATURES, arrays, lengths, names=names)
        check_saved(requirements, arrays, sizes)
        check_tangents(requirements, arrays)
    check_units(requirements, "selected" in arrays, settings)
    mods = _check_mods(requirements, facts, arrays, sizes, longest)
    statistics = check_statistics(requirements, facts.statistics, options.get("return_lse"))
    if facts.backward:
        statistics = differentiated_statistics(arrays)
    numbers = dict(settings.numbers)
    if numbers["scale"] is None:
        numbers["scale"] = 1 / math.sqrt(sizes.head_dim)
    problem = None
    if sizes.known and None not in longest:
        others = {
            **mods,
            **numbers,
            "selected": selection_of(arrays.get("selected"), settings),
            "statistics": statistics,
            "engine": options["engine"],
            "shared_kv": options["head_dim_v"] is not None,
            "deterministic": bool(options.get("deterministic")),
        }
        problem = _problem(facts, arrays, sizes, "thd" if packed else layout, longest, settings.mask, cache, others)
    return CheckedFacts(
        problem, sizes, bool(numbers["dropout"]), longest, readable,
        tuple(requirements.unmet), requirements.about_type, tuple(requirements.unsupported),
    )  # fmt: skip


def _positions(longest: tuple[int | None, int | None]) -> "dict[str, Length]":
    """Return the sizes of the axes of queries and keys in a packed batch; any, for a max_seqlen that is wrong."""
    return dict(zip("ij", (range(LONGEST + 1) if length is None else length for length in longest), strict=True))


def _problem(
    facts: Facts,
    arrays: dict[str, ArrayFacts],
    sizes: Sizes,
    layout: str,
    longest: tuple[int | None, int | None],
    mask: Mask,
    cache: Cache | None,
    others: dict[str, Any],
) -> Problem:
    """Return the Problem; `others` has its fields for mods, numbers, statistics, `engine` and `deterministic`."""
    like, (q_len, kv_len) = arrays["q" if "q" in arrays else "k"], longest
    assert q_len is not None and kv_len is not None  # check_packed reports wrong ones
    step, first_head, heads, first_batch, _ = facts.shard
    return Problem(
        backward=facts.backward,
        derivative=(DOUBLE_BACKWARD if facts.backward else JVP) if facts.directed else "",
        weights="",
        tangents=_moved(arrays),
        dtype=like.dtype,
        device=like.device,
        framework=like.framework,
        layout=layout,
        batch=sizes.batch,
        q_len=q_len,
        kv_len=kv_len,
        heads=sizes.heads,
        kv_heads=sizes.kv_heads,
        head_dim=sizes.head_dim,
        head_dim_v=sizes.head_dim_v,
        mask=mask,
        dlse="dlse" in arrays,
        aligned=facts.aligned,
        empty=any(0 in arrays[name].shape for name in ("q", "k", "v") if name in arrays),
        equal_lengths=q_len == kv_len and ("q_lengths" in arrays) == ("kv_lengths" in arrays),
        shard="starts" in arrays,
        step=step,
        first_head=first_head,
        whole_heads=sizes.heads if heads is None else heads,
        first_batch=first_batch,
        backend=facts.backend,
        cache=cache,
        bias_gradient=facts.bias_gradient,
        **{**array_facts(arrays, like.dtype), **others},
    )


@lru_cache(maxsize=CACHED)
def _check_options(
    on_cache: bool,
    plain: tuple[bool | float | str | None, ...],
    window: "Window",
    backend: str | None,
    types: tuple[type, ...],
    packed: bool,
    accumulation: type[np.floating],
) -> tuple[Settings, tuple[str, ...], bool]:
    """Check the options that are not arrays; return (Settings, unmet requirements, whether one is about a type)."""
    requirements, table = Requirements(""), of_cache() if on_cache else TABLE
    options: dict[str, object] = {**dict(zip(table.plain, plain, strict=True)), "window": window}
    settings = check_options(requirements, table.features, options, backend, packed, accumulation)
    return settings, tuple(requirements.unmet), requirements.about_type


def _check_mods(
    requirements: Requirements,
    facts: Facts,
    arrays: dict[str, ArrayFacts],
    sizes: Sizes,
    longest: tuple[int | None, int | None],
) -> dict[str, Any]:
    """Check the captured arrays of mods, and return the fields of a Problem for the mods."""
    if not facts.mods:
        return dict(mods="", score_mod=False, mask_mod=False, captured_gradient=())
    from ..mods.derive import floating_reads
    from ..mods.ir import parse
    from .mod_checks import check_captured

    program = parse(facts.mods)
    _, _, heads, first_batch, lengths = facts.shard
    q_len, kv_len = lengths or longest
    if facts.on_cache is not None:  # q_idx may be any position below the capacity
        q_len = kv_len
    if sizes.known and q_len is not None and kv_len is not None:
        check_captured(requirements, arrays, program, (first_batch + sizes.batch, heads or sizes.heads, q_len, kv_len))
    slots = range(len(program.arrays))
    asked = (True,) * len(slots) if facts.captured_gradient is None else facts.captured_gradient
    differentiated = floating_reads(program) if facts.backward else set()
    return dict(
        mods=facts.mods,
        score_mod=program.score is not None,
        mask_mod=program.mask is not None,
        captured_gradient=tuple(asked[slot] and slot in differentiated for slot in slots),
    )


def _moved(arrays: dict[str, ArrayFacts]) -> tuple[str, ...]:
    """Return the inputs that have a tangent among the arrays of a call."""
    return tuple(name for name in arrays if f"t{name}" in arrays)


def array_facts(arrays: dict[str, ArrayFacts], dtype: np.dtype) -> dict[str, Any]:
    """Return the fields of a Problem for the arrays among the options; `dtype` is that of q."""
    facts: dict[str, Any] = {}
    for feature in ARRAYS:
        array = arrays.get(feature.name)
        facts[feature.field] = array is not None
        if feature.broadcast:
            facts[feature.field] = None if array is None else array.shape
        if feature.element:
            facts[f"{feature.field}_dtype"] = dtype_name(out_dtype(dtype) if array is None else array.dtype)
    return facts
