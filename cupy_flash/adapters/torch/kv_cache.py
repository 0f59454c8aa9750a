"""A KV cache of torch tensors: the operators that read one and append to it.

They are cupy_flash::attention_with_kv_cache, ::append_then_attend and ::append_to_kv_cache. All declare that they write
to the caches in place, so that torch.compile neither reorders nor copies them, and record no gradients. `attend`,
`append_then_attend` and `append` convert a caller's arguments to the operators' and call them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch.autograd import forward_ad

from ... import dispatch, keyed_plan
from ...problem.build import pose_append, pose_with_cache
from ...problem.features import ARRAY, CHOICE, FLAG, INTEGER, LENGTHS, NUMBER
from ...problem.records import CACHE_FEATURES, CACHES, SCALES, CacheOptions, UnsupportedError
from ...problem.statistics import selected
from .autograd_kernel import are_plain
from .keyed_plan import allocator, call_on_tensors
from .op import as_index, as_number, on_device_of, require_one_device, window_sides

ARRAY_NAMES = tuple(feature.name for feature in CACHE_FEATURES if feature.kind in (ARRAY, LENGTHS))
# {kind of option: schema type of the operators' arguments that are not tensors}
TYPES = {FLAG: "bool", NUMBER: "float?", INTEGER: "SymInt?", CHOICE: "str"}
OTHERS = {x.name: TYPES[x.kind] for x in CACHE_FEATURES if x.kind in TYPES}
OTHERS |= {"backend": "str?", "engine": "str?", "window_left": "int?", "window_right": "int?", "length": "SymInt?"}
WRITTEN = {name: f"({chr(ord('a') + n)}!)" for n, name in enumerate((*CACHES, "out", *SCALES))}
INPUTS = ("q", "k_cache", "v_cache")
REQUIRED = ("q", "k_cache")  # without v_cache, values are inside keys

library = torch.library.Library("cupy_flash", "FRAGMENT")


def _schema(tensors: tuple[str, ...], required: tuple[str, ...]) -> str:
    return ", ".join(
        [f"Tensor{WRITTEN.get(name, '')}{'?' * (name not in required)} {name}" for name in tensors]
        + [f"{kind} {name}" for name, kind in OTHERS.items()]
    )


ATTEND = (*INPUTS, *ARRAY_NAMES)
APPEND = ("k", "v", "k_cache", "v_cache", "cu_seqlens", *(x for x in ARRAY_NAMES if x not in ("k", "v", "out")))
for schema in (
    f"attention_with_kv_cache({_schema(ATTEND, REQUIRED)}) -> (Tensor result, Tensor lse)",
    f"append_then_attend({_schema(ATTEND, REQUIRED)}, bool advance) -> (Tensor result, Tensor lse)",
    f"append_to_kv_cache({_schema(APPEND, ('k', 'k_cache'))}) -> ()",
):
    library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
attention_with_kv_cache = torch.ops.cupy_flash.attention_with_kv_cache.default
append_then_attend_kv_cache = torch.ops.cupy_flash.append_then_attend.default
append_to_kv_cache = torch.ops.cupy_flash.append_to_kv_cache.default


def attend(q: Any, k_cache: Any, v_cache: Any, options: CacheOptions) -> Any:
    """Return the result of `cupy_flash.attention_with_kv_cache` on tensors, which is `out` if that is given."""
    is_compiling = torch.compiler.is_compiling()
    call = None if is_compiling else call_on_tensors((q, k_cache, v_cache), options)
    if call is not None and not (torch.is_grad_enabled() and torch._C._any_requires_grad(*call[1])):
        outputs = keyed_plan.run(call)
        if outputs is not None:
            _bump(options.out, *((k_cache, v_cache, *_scales(options)) if options.k is not None else ()))
            return keyed_plan.result_on_cache(outputs, options)
    given = {"q": q, "k_cache": k_cache, "v_cache": v_cache, **_tensors(options)}
    if is_compiling:
        if options.score_mod is not None or options.mask_mod is not None:
            raise UnsupportedError("attention_with_kv_cache: score_mod and mask_mod under torch.compile")
        if options.statistics is not None:
            raise UnsupportedError("attention_with_kv_cache: statistics under torch.compile")
    elif (
        options.score_mod is not None
        or options.mask_mod is not None
        or options.statistics is not None
        or are_plain([x for x in given.values() if x is not None])
    ):
        return _attend_directly(q, k_cache, v_cache, options, given, call)
    return _operate(attention_with_kv_cache, given, options)


def append_then_attend(q: Any, k_cache: Any, v_cache: Any, options: CacheOptions, advance: bool) -> Any:
    """Return the result of `attend` for queries at position n_b, or with `advance` at n_b + their index.

    n_b is the length of sequence b before the append. One operator computes both steps and checks them before it
    writes, so that a call that is refused leaves the caches unchanged, under torch.compile too.
    """
    given = {"q": q, "k_cache": k_cache, "v_cache": v_cache, **_tensors(options)}
    return _operate(append_then_attend_kv_cache, given, options, advance)


def _operate(operator: Any, given: dict[str, Any], options: CacheOptions, *others: Any) -> Any:
    """Return the result of an operator that attends; `others` are its arguments that are not options."""
    reasons = _recorded(given)
    try:
        arguments = _arguments(ATTEND, given, options, reasons)
    except (TypeError, ValueError):
        if not torch.compiler.is_compiling():  # torch.compile cannot trace what pose does with memory
            # This raises an error with the same reason and all others.
            pose_with_cache(given["q"], given["k_cache"], given["v_cache"], options, reasons)
        raise
    result, lse = operator(*arguments, *others)
    if options.out is not None:
        result = options.out
    return (result, lse) if options.return_lse else result


def _attend_directly(
    q: Any, k_cache: Any, v_cache: Any, options: CacheOptions, given: dict[str, Any], call: keyed_plan.Call | None
) -> Any:
    """Compute `attend` without its operator: for mods and statistics, or if torch need not see it."""
    reasons = _recorded(given | _captured(options))
    with on_device_of(q):
        problem, operands = pose_with_cache(q, k_cache, v_cache, options, reasons)
        result, *others = dispatch.forward(problem, operands)
    if call is not None:
        keyed_plan.keep(call, problem, operands, allocator, keyed_plan.unwanted(options))
    _bump(options.out, *((k_cache, v_cache, *_scales(options)) if options.k is not None else ()))
    out = result.result() if options.out is None else options.out
    return selected((out, *(x.result() for x in others)), options)


def recorded(given: dict[str, Any], options: CacheOptions) -> tuple[str, ...]:
    """Return the reason for an error if autograd had to record a call that only reads a cache, else ()."""
    return _recorded(given | _tensors(options) | _captured(options))


def _captured(options: CacheOptions) -> dict[str, Any]:
    """Return the arrays that the mods capture, by their names in errors; {} if tracing fails: pose reports that."""
    if options.score_mod is None and options.mask_mod is None:
        return {}
    from ...mods.ir import Untraceable
    from ...mods.trace import mod_of

    try:
        arrays = mod_of(options.score_mod, options.mask_mod).arrays
    except Untraceable:
        return {}
    return {f"array{slot}": array for slot, array in enumerate(arrays)}


def append(k: Any, v: Any, k_cache: Any, v_cache: Any, cu_seqlens: Any, options: CacheOptions) -> None:
    """Run `cupy_flash.append_to_kv_cache` on tensors."""
    call, arrays = None, (k, v, k_cache, v_cache, cu_seqlens)
    if not torch.compiler.is_compiling():
        call = keyed_plan.append_on(arrays, options, call_on_tensors)
        if call is not None and torch.is_grad_enabled() and torch._C._any_requires_grad(*call[1]):
            call = None
        if keyed_plan.run(call) is not None:
            _bump(k_cache, v_cache, *_scales(options))
            return
    given = {**_tensors(options), "k": k, "v": v, "k_cache": k_cache, "v_cache": v_cache, "cu_seqlens": cu_seqlens}
    reasons = _recorded(given)
    try:
        arguments = _arguments(APPEND, given, options, reasons)
    except (TypeError, ValueError):
        if not torch.compiler.is_compiling():
            pose_append(*arrays, options, reasons)
        raise
    append_to_kv_cache(*arguments)
    if call is not None and not keyed_plan.is_known(call):
        with on_device_of(k):
            keyed_plan.keep(call, *pose_append(*arrays, options), allocator, appends=True)


def _tensors(options: CacheOptions) -> dict[str, Any]:
    """Return the options that may be tensors, by name; None for a cache_seqlens that is a number."""
    tensors = {name: getattr(options, name) for name in ARRAY_NAMES}
    if _is_whole(tensors["cache_seqlens"]):
        tensors["cache_seqlens"] = None
    return tensors


def _is_whole(value: Any) -> bool:
    return isinstance(value, (int, np.integer, torch.SymInt)) and not isinstance(value, (bool, np.timedelta64))


def _recorded(given: dict[str, Any]) -> tuple[str, ...]:
    """Return the reason for an error if autograd had to record the call; a silent detach would lose gradients."""
    tensors = {name: x for name, x in given.items() if x is not None and isinstance(x, torch.Tensor)}
    is_dual = forward_ad._current_level >= 0
    tangents = [name for name, x in tensors.items() if is_dual and forward_ad.unpack_dual(x).tangent is not None]
    if tangents:
        return (f"{', '.join(tangents)}: a KV cache has no forward-mode derivative",)
    if not torch.is_grad_enabled():
        return ()
    names = [name for name, x in tensors.items() if x.requires_grad]
    if not names:
        return ()
    return (f"{', '.join(names)} require grad, and a KV cache records no gradients: call it under torch.no_grad()",)


def _arguments(
    names: tuple[str, ...], given: dict[str, Any], options: CacheOptions, reasons: tuple[str, ...]
) -> tuple[Any, ...]:
    """Return the operator's arguments; TypeError or ValueError for a value that its schema cannot express."""
    if reasons:
        raise ValueError(reasons[0])
    tensors = [given[name] for name in names]
    for tensor in tensors:
        if tensor is not None and (not isinstance(tensor, torch.Tensor) or tensor.is_nested):
            raise TypeError(f"all arrays must be torch tensors with contents of their own, not {type(tensor)}")
    # A write to a lazily negated tensor would fail in torch's dispatcher with an internal error. torch.compile cannot
    # trace is_neg, so it skips this check.
    if not torch.compiler.is_compiling():
        for name in WRITTEN:
            if given.get(name) is not None and given[name].is_neg():
                raise ValueError(f"{name} is lazily negated, and an operator cannot write to it: call resolve_neg()")
    left, right = window_sides(options.window)
    others = {name: getattr(options, name, None) for name in OTHERS}
    others["length"] = options.cache_seqlens if _is_whole(options.cache_seqlens) else None
    others |= {"window_left": left, "window_right": right}
    for name, kind in OTHERS.items():
        value = others[name]
        if value is None and kind.endswith("?"):
            continue
        if kind == "bool":
            if not isinstance(value, (bool, np.bool_)):
                raise TypeError(f"{name} must be True or False, not {value!r}")
            others[name] = bool(value)
        elif kind == "float?":
            others[name] = as_number(value)
        elif kind in ("int?", "SymInt?"):
            others[name] = value if isinstance(value, torch.SymInt) else as_index(value)
        elif not isinstance(value, str):
            raise TypeError(f"{name} must be a string, not {value!r}")
    return (*tensors, *others.values())


def _options(names: tuple[str, ...], arguments: tuple[Any, ...]) -> tuple[dict[str, Any], CacheOptions]:
    """Return the tensors by name, and the options, from an operator's arguments."""
    given = dict(zip((*names, *OTHERS), arguments, strict=True))
    options: dict[str, Any] = {
        feature.name: given.get(feature.name) for feature in CACHE_FEATURES if feature.name != "window"
    }
    if given["length"] is not None:
        options["cache_seqlens"] = given["length"]
    return given, CacheOptions(window=(given["window_left"], given["window_right"]), **options)


def _attend(*arguments: Any) -> tuple[Any, Any]:
    given, options = _options(ATTEND, arguments)
    with on_device_of(given["q"]):
        results = dispatch.forward(*pose_with_cache(given["q"], given["k_cache"], given["v_cache"], options))
    return _returned(given, results)


def _append_then_attend(*arguments: Any) -> tuple[Any, Any]:
    *shared, advance = arguments
    given, options = _options(ATTEND, tuple(shared))
    arrays = q, k_cache, v_cache = given["q"], given["k_cache"], given["v_cache"]
    with on_device_of(q):
        pose_with_cache(*arrays, options)  # checks q, k and v together
        k, v, before = given["k"], given["v"], options.cache_seqlens
        appended = CacheOptions(**{x.name: getattr(options, x.name) for x in CACHE_FEATURES if x.appends})
        rows = pose_append(k, v, k_cache, v_cache, None, appended)
        positions = _positions(q, before, advance)
        attended = replace(options, k=None, v=None, cache_seqlens=before + k.shape[1], positions=positions)
        call = pose_with_cache(*arrays, attended)
        dispatch.plan_for(call[0])
        dispatch.append(*rows)
        results = dispatch.forward(*call)
    return _returned(given, results)


def _positions(q: Any, lengths: Any, advance: bool) -> Any:
    """Return positions, int32 (B, Sq): lengths[b] for every query of sequence b, plus its index with `advance`."""
    steps = torch.arange(q.shape[1], dtype=torch.int32, device=q.device) * advance
    before = torch.as_tensor(lengths, dtype=torch.int32, device=q.device).expand(q.shape[0])
    return (before[:, None] + steps).to(torch.int32)


def _returned(given: dict[str, Any], results: Any) -> tuple[Any, Any]:
    """Return an operator's results, and tell autograd which arguments it has written."""
    result, lse = results
    _bump(*(given[name] for name in ("out", *((*CACHES, *SCALES) if given["k"] is not None else ()))))
    # An operator must not return a tensor to which it writes, so `attend` returns `out` itself.
    return (result.result() if given["out"] is None else given["q"].new_empty((0,))), lse.result()


def _append(*arguments: Any) -> None:
    given, options = _options(APPEND, arguments)
    options.k = options.v = None
    k, v, k_cache, v_cache, cu_seqlens = (given[name] for name in APPEND[:5])
    with on_device_of(k):
        dispatch.append(*pose_append(k, v, k_cache, v_cache, cu_seqlens, options))
    _bump(*(given[name] for name in (*CACHES, *SCALES)))


def _scales(options: CacheOptions) -> tuple[object, ...]:
    """Return the scales and zeros of a call, which an append writes beside the caches."""
    return tuple([getattr(options, name) for name in SCALES])


def _bump(*written: Any) -> None:
    """Increment the version of these tensors, as torch's in-place operations do; those of inference have none."""
    torch.autograd.graph.increment_version([x for x in written if x is not None])


library.impl("attention_with_kv_cache", _attend, "CompositeExplicitAutograd")
library.impl("append_then_attend", _append_then_attend, "CompositeExplicitAutograd")
library.impl("append_to_kv_cache", _append, "CompositeExplicitAutograd")


@torch.library.register_fake("cupy_flash::append_then_attend", lib=library)
def _fake_append_then_attend(*arguments: Any) -> tuple[Any, Any]:
    return _fake_attend(*arguments[:-1])


@torch.library.register_fake("cupy_flash::attention_with_kv_cache", lib=library)
def _fake_attend(*arguments: Any) -> tuple[Any, Any]:
    given, options = _options(ATTEND, arguments)
    require_one_device("attention_with_kv_cache", given)
    q = given["q"]
    lse_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    if options.cu_seqlens_q is not None:
        lse_shape: tuple[Any, ...] = (q.shape[1], q.shape[0])
    else:
        heads, rows = (1, 2) if options.layout == "bhsd" else (2, 1)
        lse_shape = (q.shape[0], q.shape[heads], q.shape[rows])
    v_cache, columns = given["v_cache"], options.head_dim_v
    if v_cache is not None:
        columns = v_cache.shape[-1] * (1 + (v_cache.dtype == torch.uint8))
    result = q.new_empty((0,) if options.out is not None else (*q.shape[:-1], columns))
    return result, q.new_empty(lse_shape, dtype=lse_dtype)


@torch.library.register_fake("cupy_flash::append_to_kv_cache", lib=library)
def _fake_append(*arguments: Any) -> None:
    given, _ = _options(APPEND, arguments)
    require_one_device("append_to_kv_cache", given)
