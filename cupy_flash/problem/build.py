"""Poses a call: checks it, and makes its Problem and Operands.

Facts (shapes, dtypes, options) are checked once and cached; the contents of arrays are checked at every call.
"""

from __future__ import annotations

import math
import operator
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from .. import environment
from ..arrays import CACHED, Array, dtype_name, has_boxes
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
    read,
)
from .features import ARRAY, ARRAYS, FEATURES, MOD, SEED, WINDOW, Options
from .records import DOUBLE_BACKWARD, JVP, WHOLE, Operands, Packed, Problem, Saved, Shard, Tangents, out_dtype

if TYPE_CHECKING:
    from collections.abc import Callable
    from functools import _lru_cache_wrapper
    from typing import TypeAlias, TypeVar

    from ..arrays import AnyArray
    from ..mods.trace import Mod
    from .argument_types import Window
    from .kv_cache_records import CacheOptions

    T = TypeVar("T")
    Given: TypeAlias = AnyArray | Array  # a caller's array, or inside the package its Array
    PlainOption: TypeAlias = bool | float | str | None


def pose(
    function: str,
    arrays: tuple[Given, Given, Given],
    options: Options,
    packed: Packed | None = None,
    saved: Saved | None = None,
    shard: Shard = WHOLE,
    tangents: Tangents | None = None,
) -> tuple[Problem, Operands]:
    """Return the Problem and Operands of one call of `function`, or raise one error with every unmet requirement.

    With `tangents` the problem is a JVP in their direction; with `saved` as well, a double backward.
    """
    requirements = Requirements(function)
    mod = traced_mod(requirements, options)
    given = _given(arrays, options, packed, saved, shard, mod)
    if tangents is not None:
        given |= _direction(requirements, tangents, mod)
    call = read(requirements, given)
    facts = _facts(call, options, packed, saved, shard, mod, tangents is not None)
    stated = cached_if_plain(_state, facts.types)(facts)
    if stated.unmet:
        requirements.unmet += stated.unmet
        requirements.about_type |= stated.about_type
    # Array contents and the seed are not cached facts: check them on every call.
    seed = check_seed(requirements, call, options.seed, stated.dropout, saved is not None)
    if packed is not None:
        check_boundaries(requirements, call, stated.longest)
    check_values(requirements, call, stated.sizes)
    requirements.raise_if_unmet(call)
    assert stated.problem is not None  # holds because every requirement is met
    if not stated.dropout:
        seed = None
    elif seed is None:
        # Draw from the global generator, because callers of NumPy make a run repeatable with np.random.seed.
        seed = int(np.random.randint(0, 2**63 - 1, dtype=np.int64))  # noqa: NPY002
    named: dict[str, Any] = {name: x for name, x in call.items() if name in OPERANDS}
    names = captured_names(mod)
    captured, tcaptured = tuple(call[name] for name in names), tuple(call.get(f"t{name}") for name in names)
    numbers = mod.numbers if mod else ()
    return stated.problem, Operands(**named, seed=seed, captured=captured, numbers=numbers, tcaptured=tcaptured)


OPERANDS = frozenset(Operands._fields)
ARRAY_NAMES = tuple(feature.name for feature in ARRAYS)
_arrays_of = operator.attrgetter(*ARRAY_NAMES)


def traced_mod(requirements: Requirements, options: Options | CacheOptions) -> Mod | None:
    """Return the traced score_mod and mask_mod; None without them, or, as an unmet requirement, if tracing fails."""
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


def captured_names(mod: Mod | None) -> list[str]:
    """Return the names of a mod's captured arrays among the arrays of a call, by slot."""
    return [] if mod is None else [f"array{slot}" for slot in range(len(mod.arrays))]


def _direction(requirements: Requirements, tangents: Tangents, mod: Mod | None) -> dict[str, object]:
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


def _given(
    arrays: tuple[Given, Given, Given],
    options: Options,
    packed: Packed | None,
    saved: Saved | None,
    shard: Shard,
    mod: Mod | None,
) -> dict[str, object]:
    """Return the arrays of a call by name, as the caller passed them; only a required one may be None."""
    given: dict[str, object] = dict(zip(("q", "k", "v"), arrays, strict=True))
    for name, value in zip(ARRAY_NAMES, _arrays_of(options), strict=True):
        if value is not None:
            given[name] = value
    if packed is not None:
        given |= {"cu_seqlens_q": packed.cu_seqlens_q, "cu_seqlens_k": packed.cu_seqlens_k}
    if saved is not None:
        given |= {"dout": saved.dout, "out": saved.out, "lse": saved.lse}
        if saved.dlse is not None:
            given["dlse"] = saved.dlse
    if shard.starts is not None:
        given["starts"] = shard.starts
    if mod is not None:
        given |= zip(captured_names(mod), mod.arrays, strict=True)
    return given


# The options that are part of the cache key as they are. A window is part of it as two sides and a mod as its text; a
# seed is not, because no fact depends on it.
PLAIN_OPTIONS = tuple(feature.name for feature in FEATURES if feature.kind not in (ARRAY, WINDOW, SEED, MOD))
_plain_of = operator.attrgetter(*PLAIN_OPTIONS)
# Calls with options of other types are not cached: such a value may be mutable, unhashable, or equal to one with
# another meaning.
PLAIN = frozenset((bool, int, float, str, type(None), np.bool_, np.int64, np.float32, np.float64))


class Facts(NamedTuple):
    """Everything on which a Problem and the checks of a call depend, except the seed and the contents of arrays.

    Options are as the caller passed them: one who ignores the types may have passed anything.
    """

    options: tuple[PlainOption, ...]  # in the order of PLAIN_OPTIONS
    window: Window
    backend: str | None  # the option `backend`, by default the environment variable
    longest: tuple[int | None, ...]  # (max_seqlen_q, max_seqlen_k) of a packed batch
    bias_gradient: bool
    mods: str  # the text of the mods, or ""
    captured_gradient: tuple[bool, ...] | None
    shard: tuple[int, int, int | None, int, tuple[int, int] | None]  # the fields of Shard other than its array
    types: tuple[type, ...]  # the options' types, because 1 == True == 1.0 and not all of them are legal
    packed: bool
    backward: bool
    directed: bool  # a JVP, or together with `backward` a double backward
    aligned: bool
    arrays: tuple[tuple[str, tuple[int, ...], np.dtype, str, str], ...]  # (name, *ArrayFacts)


def _facts(
    call: dict[str, Array],
    options: Options,
    packed: Packed | None,
    saved: Saved | None,
    shard: Shard,
    mod: Mod | None,
    directed: bool,
) -> Facts:
    plain = _plain_of(options)
    window, backend = options.window, options.backend
    if backend is None:
        backend = environment.backend()
    longest = () if packed is None else (packed.max_seqlen_q, packed.max_seqlen_k)
    bias_gradient = saved is not None and saved.bias_gradient
    text = "" if mod is None else mod.text
    captured_gradient = None if saved is None else saved.captured_gradient
    sides = window if type(window) is tuple else (window,)
    types = tuple(map(type, (*plain, backend, bias_gradient, *longest, *shard[1:], *sides)))
    arrays = tuple([(name, x.shape, x.dtype, x.device, x.framework) for name, x in call.items()])
    return Facts(
        plain, window, backend, longest, bias_gradient, text, captured_gradient, shard[1:], types,
        packed is not None, saved is not None, directed, _are_aligned(call), arrays,
    )  # fmt: skip


def _are_aligned(call: dict[str, Array]) -> bool:
    """Return whether TMA can load q, k and v; an array that could not be read is ignored."""
    return all(has_boxes(call[name]) for name in ("q", "k", "v") if name in call)


class Stated(NamedTuple):
    """The result of all checks of facts."""

    problem: Problem | None  # None if a requirement is not met
    sizes: Sizes
    dropout: bool
    longest: tuple[int | None, int | None]
    unmet: tuple[str, ...]
    about_type: bool


def cached_if_plain(function: _lru_cache_wrapper[T], types: tuple[type, ...]) -> Callable[..., T]:
    """Return the cached function if every option has a plain type, otherwise the function without the cache."""
    return function if PLAIN.issuperset(types) else function.__wrapped__


@lru_cache(maxsize=CACHED)
def _state(facts: Facts) -> Stated:
    """Check the facts of a call; those of its options have a cache of their own, for calls with growing lengths."""
    requirements = Requirements("")
    arrays = {name: ArrayFacts(shape, dtype, *place) for name, shape, dtype, *place in facts.arrays}
    options: dict[str, Any] = dict(zip(PLAIN_OPTIONS, facts.options, strict=True))
    check_places(requirements, arrays)
    sizes = Sizes()
    if {"q", "k", "v"} <= arrays.keys():
        sizes = check_shapes(requirements, arrays, options["layout"], facts.packed)
    settings, unmet_options, about_type = cached_if_plain(_check_options, facts.types)(
        facts.options, facts.window, facts.backend, facts.types, facts.packed,
        np.float64 if "q" in arrays and arrays["q"].dtype == np.float64 else np.float32,
    )  # fmt: skip
    requirements.unmet += unmet_options
    requirements.about_type |= about_type
    if sizes.known:
        check_features(requirements, arrays, sizes)
        check_saved(requirements, arrays, sizes)
        check_tangents(requirements, arrays)
    longest: tuple[int | None, int | None] = (sizes.q_len, sizes.kv_len)
    if facts.packed:
        longest = check_packed(requirements, arrays, (facts.longest[0], facts.longest[1]))
    mods = _check_mods(requirements, facts, arrays, sizes, longest)
    numbers: dict[str, Any] = dict(settings.numbers)
    if numbers["scale"] is None:
        numbers["scale"] = 1 / math.sqrt(sizes.head_dim)
    unmet = tuple(requirements.unmet)
    problem = None
    if sizes.known and not unmet:
        q_len, kv_len = longest
        assert q_len is not None and kv_len is not None  # check_packed reports wrong ones
        step, first_head, heads, first_batch, _ = facts.shard
        problem = Problem(
            backward=facts.backward,
            derivative=(DOUBLE_BACKWARD if facts.backward else JVP) if facts.directed else "",
            tangents=_moved(arrays),
            dtype=arrays["q"].dtype,
            device=arrays["q"].device,
            framework=arrays["q"].framework,
            layout="thd" if facts.packed else options["layout"],
            batch=sizes.batch,
            q_len=q_len,
            kv_len=kv_len,
            heads=sizes.heads,
            kv_heads=sizes.kv_heads,
            head_dim=sizes.head_dim,
            head_dim_v=sizes.head_dim_v,
            mask=settings.mask,
            dlse="dlse" in arrays,
            aligned=facts.aligned,
            empty=any(0 in arrays[name].shape for name in ("q", "k", "v")),
            shard="starts" in arrays,
            step=step,
            first_head=first_head,
            whole_heads=sizes.heads if heads is None else heads,
            first_batch=first_batch,
            deterministic=bool(options["deterministic"]),
            backend=facts.backend,
            engine=options["engine"],
            cache=None,
            bias_gradient=facts.bias_gradient,
            **mods,
            **numbers,
            **array_facts(arrays),
        )
    return Stated(problem, sizes, bool(numbers["dropout"]), longest, unmet, requirements.about_type)


@lru_cache(maxsize=CACHED)
def _check_options(
    plain: tuple[PlainOption, ...],
    window: Window,
    backend: str | None,
    types: tuple[type, ...],
    packed: bool,
    accumulation: type[np.floating],
) -> tuple[Settings, tuple[str, ...], bool]:
    """Check the options that are not arrays: return them, their unmet requirements, and whether one is about a type."""
    requirements = Requirements("")
    options: dict[str, object] = {**dict(zip(PLAIN_OPTIONS, plain, strict=True)), "window": window}
    settings = check_options(requirements, options, backend, packed, accumulation)
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


def array_facts(arrays: dict[str, ArrayFacts]) -> dict[str, Any]:
    """Return the fields of a Problem for the arrays among the options."""
    facts: dict[str, Any] = {}
    for feature in ARRAYS:
        array = arrays.get(feature.name)
        facts[feature.field] = array is not None
        if feature.broadcast:
            facts[feature.field] = None if array is None else array.shape
        if feature.element:
            dtype = out_dtype(arrays["q"].dtype) if array is None else array.dtype
            facts[f"{feature.field}_dtype"] = dtype_name(dtype)
    return facts
