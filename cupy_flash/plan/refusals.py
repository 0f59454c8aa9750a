"""Why an engine does not serve a problem: it lacks an option of the problem, refuses it, or has not passed a check.

The attributes of `engines.Engine` say what an engine serves; this module turns what is missing into reasons.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..device import Device
from ..engines import MODULES, Engine, Tile
from ..problem.features import Feature
from ..problem.records import BACKWARD, CACHE_FEATURES, FEATURES, FORWARD, FP8, Cache, Problem, is_given
from . import measurements
from .measurements import Tune

# {option that an engine does not serve: the reason}, where "it takes no <option>" is not enough
REASONS = {
    **dict.fromkeys(("score_mod", "mask_mod"), "it takes no score_mod or mask_mod"),
    "split_size": "it does not compute the keys in pieces of split_size",
}


def refusals(engine: str, problem: Problem, device: Device, tune: Tune | None = None) -> tuple[str, ...]:
    """Return the reasons why an engine does not serve a problem; `tune` has the measurements for its bucket."""
    reasons = []
    if problem.engine not in (None, engine):
        reasons.append(f'engine="{problem.engine}" was asked for')
    if problem.backend is not None and problem.backend.partition(":")[0] != device.backend:
        reasons.append(f'backend="{problem.backend}" was asked for')
    if ((problem.backend or device.backend) == "cuda") != problem.device.startswith("cuda"):
        reasons.append(f"the arrays are on {problem.device}, and arrays never change device")
    return (*reasons, *engine_refusals(engine, problem, device), *unproved(engine, problem, device, tune))


def engine_refusals(engine: str, problem: Problem, device: Device) -> list[str]:
    """Return the reasons in the engine itself, which depend neither on what a call requests nor on a check."""
    module = MODULES[engine]
    reasons = [*dict.fromkeys(_missing(module, problem))]
    if device.backend not in module.BACKENDS:
        reasons.append(f"the call goes to backend {device.backend}")
    elif module.ARCHES is not None and device.arch not in module.ARCHES:
        reasons.append(f"{device.arch} lacks the instructions of {', '.join(module.ARCHES)}")
    if problem.cache is None and module.OPTIONS is None:
        return reasons  # the engine's own `refusals` would read problem.cache
    return reasons + module.refusals(problem, device)


def _missing(module: Engine[Tile], problem: Problem) -> Iterator[str]:
    """Yield a reason for each option, derivative and result of a problem that an engine does not serve."""
    cache = problem.cache
    served, dtypes = (module.OPTIONS, module.DTYPES) if cache is None else (module.CACHE_OPTIONS, module.CACHE_DTYPES)
    if served is None:
        yield "it serves attention on a KV cache alone" if cache is None else "it reads no KV cache in this version"
    else:
        # An engine without fp8 already refuses the dtype, so the options of fp8 are not listed as further reasons.
        options = (x for x in _given(problem) if FP8 in dtypes or not x.fp8)
        lacking = (x.name for x in options if x.name not in served)
        yield from (REASONS.get(name, f"it takes no {name}") for name in lacking)
        if cache is not None and cache.dtype.name not in (problem.dtype.name, *dtypes):
            yield f"it reads no caches of {cache.dtype.name}{_others(module, cache.dtype.name)}"
    if problem.derivative and problem.derivative not in module.DERIVATIVES:
        yield f"it computes no {problem.derivative} in this version"
    if problem.statistics and (BACKWARD if problem.backward else FORWARD) not in module.STATISTICS:
        what = "takes no gradients of" if problem.backward else "returns no"
        yield f"it {what} {' and '.join(problem.statistics)} of rows in this version"
    if problem.weights and module.WEIGHTS is None:
        yield f"it computes no {problem.weights} in this version"


def _given(problem: Problem) -> Iterator[Feature]:
    """Yield the given options that change what a call computes, as far as `Problem` and `Cache` record them."""
    yield from (x for x in FEATURES if x.definition and x.field in Problem._fields and is_given(problem, x))
    if problem.cache is not None:
        yield from (x for x in CACHE_FEATURES if x.field in Cache._fields and is_given(problem.cache, x))


def _others(module: Engine[Tile], dtype: str) -> str:
    """Return which engine of the same backend reads caches of a dtype, as a part of a sentence."""
    readers = [name for name, each in MODULES.items() if dtype in each.CACHE_DTYPES]
    readers = [name for name in readers if set(MODULES[name].BACKENDS) & set(module.BACKENDS)]
    # An engine of caches alone reads all that others read.
    readers.sort(key=lambda name: MODULES[name].OPTIONS is not None)
    return f", as {readers[0]} does" if readers else ""


def unproved(engine: str, problem: Problem, device: Device, tune: Tune | None = None) -> list[str]:
    """Return the reasons that evidence gives against an engine; none if the call requests an engine by name."""
    if problem.engine is not None or device.backend == "cpu":
        return []
    check = measurements.check_of(engine, device)
    request = f'so it runs only on request: engine="{engine}"'
    if check is not None and not check.passed:
        return [f"its check failed on {device.card} ({check.reason}), {request}"]
    if not is_on_request(engine, problem):
        return []
    if check is None:
        return [f"no check has passed on this card yet ({measurements.CHECK_COMMAND}), {request}"]
    if tune is None or all(measured.engine != engine for measured in tune.measured):
        return [f"checked, but not measured in this bucket of shapes ({measurements.TUNE_COMMAND}), {request}"]
    return []


def is_on_request(engine: str, problem: Problem) -> bool:
    """Return whether an engine is chosen only by name or by a measurement; other engines need neither."""
    others = (module for module in MODULES.values() if not module.ON_REQUEST)
    has_others = any(problem.dtype.name in module.DTYPES for module in others)
    return MODULES[engine].ON_REQUEST and engine != problem.engine and has_others
