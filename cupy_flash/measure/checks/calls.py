"""The calls of a check: which calls cover an engine, and how a worker process compares one with the formula."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from ... import api, device, kv_cache, reference
from ...arrays import Array
from ...device import Device
from ...dispatch import plan_for, run_backward, run_forward
from ...engines import MODULES
from ...gpu import ahead
from ...gpu.run_plan import compile_launch
from ...jit import nvrtc
from ...mods.trace import Mod
from ...plan.plan import Plan, forms
from ...plan.refusals import engine_refusals
from ...problem.build import pose, pose_with_cache
from ...problem.features import NUMBER
from ...problem.recorded_call import CacheTrial, Call, Trial
from ...problem.records import FEATURES, FP8, CacheOptions, Options, Packed, Saved
from ..worker_process import Announce
from . import micro_kernels, simulated
from .references import Results, references
from .tolerance import deviation

REFERENCE_SECONDS, COMPILE_SECONDS = 300.0, 300.0  # time limits of a step in the worker process
ORDERS = 3  # low-precision runs per call
NAMES = ("out", "lse", "dq", "dk", "dv", "dbias", "dsink")

# These calls cover every option on every engine, and each pair of options that shares code in the kernels.
ROWS: tuple[dict[str, Any], ...] = (
    dict(causal=True),
    dict(window=(40, 0), options=("softcap", "sink"), deterministic=True),
    dict(options=("alibi_slopes", "bias"), layout="bhsd"),
    dict(options=("mask", "q_lengths", "kv_lengths")),
    dict(causal="top_left", options=("dropout",)),
    dict(causal=True, packed=True, options=("sink",)),
    dict(causal=True, shared_kv=True, head_dim=64, head_dim_v=40),
)
# Values inside keys with the sizes of multi-head latent attention, for which engines may have kernels of their own.
LATENT = dict(shared_kv=True, head_dim=576, head_dim_v=512)
CACHE_OPTIONS: tuple[dict[str, Any], ...] = (dict(q_len=5), dict(window=(20, 0)), dict(options=("softcap", "sink")))
PAGE = 16  # keys per page
SIZES: dict[str, Any] = dict(
    batch=2, q_len=300, kv_len=400, heads=4, kv_heads=2
)  # several tiles on both axes, the last ones partial
SIMULATED_SIZES: dict[str, Any] = dict(
    batch=1, q_len=40, kv_len=72, heads=2, kv_heads=1
)  # a simulator takes seconds per tile


def trials(engine: str, on: Device, simulated: bool, quick: bool) -> list[Trial]:
    """Return calls that cover an engine's dtypes, head dimensions and options, forward and backward."""
    module = MODULES[engine]
    sizes, dims = SIMULATED_SIZES if simulated else SIZES, module.HEAD_DIMS
    cases = [Trial(**sizes, dtype=module.DTYPES[0], head_dim=dim, head_dim_v=dim_v) for dim, dim_v in dims]
    if module.OPTIONS is None:
        cases = [replace(case, q_len=1, causal=True, backward=False) for case in cases]
    cases = [served for case in cases for served in _served(engine, on, case)]
    if not cases:
        return []
    base = replace(cases[0], head_dim_v=None)
    dtypes = [dtype for dtype in module.DTYPES[1:] if dtype != FP8]
    if module.OPTIONS is None:
        rows = [*CACHE_OPTIONS, LATENT | dict(kv_len=2 * base.kv_len), *(dict(dtype=dtype) for dtype in dtypes)]
    else:
        cases[0] = replace(cases[0], causal=True)
        rows = [*ROWS[1:], LATENT, *(dict(dtype=dtype, causal=True) for dtype in dtypes)]
    if FP8 in module.DTYPES and simulated:  # CuPy has no dtype for fp8
        rows.append(dict(dtype=FP8, head_dim=128, backward=False, options=("q_descale", "v_descale")))
    cases += [served for row in rows for served in _served(engine, on, replace(base, **row))]
    return cases[: 1 if quick else None]


def _served(engine: str, on: Device, trial: Trial) -> list[Trial]:
    """Return [trial] if the engine serves it on a device, [its forward] if it serves only that, else []."""
    values = {feature.name: feature.example if feature.kind == NUMBER else True for feature in FEATURES}
    facts: dict[str, Any] = {name: getattr(trial, name) for name in ("causal", "window", "layout", "deterministic")}
    facts |= {name: values[name] for name in trial.options}
    facts |= {name: getattr(trial, name) for name in ("dtype", "head_dim", "head_dim_v", "shared_kv", "packed")}
    facts |= dict(group=trial.heads // trial.kv_heads, cache=MODULES[engine].OPTIONS is None, engine=engine)
    for each in dict.fromkeys((trial, replace(trial, backward=False))):
        problems = ahead.problems(**facts, backward=each.backward)
        if not any(engine_refusals(engine, problem, on) for problem in problems):
            return [each]
    return []


class Task(NamedTuple):
    """One request to the worker process."""

    kind: str  # a name in KINDS
    backend: str
    engine: str = ""
    trial: Trial | None = None
    number: int = 0  # index of a micro-kernel
    tile: str = ""  # for a tune: the repr of a tile, or the name of a peer
    seconds: float = 20.0  # time limit of a run

    @property
    def name(self) -> str:
        """The name of the case in tables and records."""
        if self.kind == "micro-kernel":
            return f"instruction {micro_kernels.kernels()[self.number].name}"
        return str(self.trial) if self.kind == "call" else f"{self.kind}, {self.trial}"


def work(task: Task, announce: Announce) -> Device | str | None:
    """Run one case in the worker process; return its error or None, and for "device" the device."""
    return KINDS[task.kind](task, announce)


def work_with_tensor_memory_checks(task: Task, announce: Announce) -> Device | str | None:
    """Do `work` with kernels that check their accesses to tensor memory at run time."""
    nvrtc.checks_tensor_memory = True
    return work(task, announce)


def find_device(task: Task, announce: Announce) -> Device:
    """Return the device of a backend, "cuda" or "simulator:ARCH"; RuntimeError without a GPU."""
    announce("the query of the device", COMPILE_SECONDS)
    backend, _, arch = task.backend.partition(":")
    if backend != "cuda":
        return device.named(arch)
    try:
        return ahead.device_for(None)
    except RuntimeError as error:  # its message gives advice for a call of compile()
        raise RuntimeError(f"there is no GPU that CuPy can use ({error.__cause__})") from None


def run_micro_kernel(task: Task, announce: Announce) -> str | None:
    """Compare an instruction's results on the GPU with the simulator's stored ones."""
    kernel = micro_kernels.kernels()[task.number]
    announce(kernel.name, task.seconds)
    out = micro_kernels.run_on_gpu(kernel)
    announce(f"{kernel.name}: the comparison", REFERENCE_SECONDS)
    return simulated.wrong(kernel, out)


def run_call(task: Task, announce: Announce) -> str | None:
    """Compare a forward and its backward with the formula, then each in every other form."""
    trial = _trial(task)
    call, exact, low = _expected(trial, announce)
    _compile(task, call, announce)
    announce(task.name, task.seconds)
    q, k, v, options, dout, dlse, packed = moved = on_backend(task.backend, call)
    out, lse, *gradients = _run(task, moved)
    wrong = _compare(on_host([out, lse, *gradients]), exact, low)
    if wrong is not None:
        return wrong
    posed = Options.of("check", options | _how(task))
    for saved in (None, Saved(dout, out, lse, dlse)) if trial.backward else (None,):
        problem, operands = pose("check", (q, k, v), posed, packed, saved)
        for form, chosen in forms(plan_for(problem)).items():
            announce(f"{task.name}: {form}", COMPILE_SECONDS + task.seconds)
            if saved is None:
                results = [x.result() for x in run_forward(chosen, operands)]
            else:
                results = [out, lse, *run_backward(chosen, operands).map(Array.result)[:5]]
            wrong = _compare(on_host(results), exact, low)
            if wrong is not None:
                return f"{form}, {wrong}"
    return None


def run_on_cache(task: Task, announce: Announce) -> str | None:
    """Compare a decode on a KV cache, contiguous and then in shuffled pages, in every form with the formula."""
    trial = _trial(task)
    announce(f"{task.name}: the formula", REFERENCE_SECONDS)
    rng = np.random.default_rng(0)
    capacity = trial.kv_len // PAGE * PAGE
    lengths = rng.integers(capacity // 2, capacity - trial.q_len, trial.batch, dtype=np.int32)
    formula: Callable[..., tuple[np.ndarray, ...]] = reference.attention_with_kv_cache
    for page in (None, PAGE):
        call = replace(trial, cache=CacheTrial(page=page, appended=trial.q_len)).call()
        options: Any = {name: x for name, x in call.options.items() if x is not None}
        options |= dict(cache_seqlens=lengths, causal=True)
        form_of_cache = "contiguous" if page is None else "paged"
        exact, low = (formula(*call[:3], **options, dtype=dtype)[:2] for dtype in (None, call.q.dtype))
        arrays = [call.q, call.k.copy(), None if call.v is None else call.v.copy()]
        given = options | dict(backend=task.backend, engine=task.engine, return_lse=True)
        # The call also compiles the append and merge kernels, so the limit of a compilation is added.
        announce(f"{task.name}: {form_of_cache}", COMPILE_SECONDS + task.seconds)
        arrays, given = move(task.backend, (arrays, given))
        results = {"": on_host(list(kv_cache.attention_with_kv_cache(*arrays, **given)))}
        problem, operands = pose_with_cache(arrays[0], arrays[1], arrays[2], CacheOptions(**given))
        for form, chosen in forms(plan_for(problem)).items():  # each form appends the same rows again
            announce(f"{task.name}: {form}", COMPILE_SECONDS + task.seconds)
            results[form] = on_host([x.result() for x in run_forward(chosen, operands)])
        for form, result in results.items():
            wrong = _compare(result, list(exact[:2]), list(low[:2]))
            if wrong is not None:
                return f"{form_of_cache} cache, {form}{', ' * bool(form)}{wrong}"
    return None


def run_on_streams(task: Task, announce: Announce) -> str | None:
    """Compare results on a side stream, whose inputs another stream writes just before."""
    import cupy

    call, exact, low = _expected(_trial(task), announce)
    _compile(task, call, announce)
    announce(task.name, task.seconds)
    values = on_backend(task.backend, call)
    late = on_backend(task.backend, call)
    producer, consumer = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
    _assign(late, None)
    cupy.cuda.Device().synchronize()
    with producer:
        _assign(late, values)
    consumer.wait_event(producer.record())
    with consumer:
        results = _run(task, late)
        consumer.synchronize()
        return _compare(on_host(results), exact, low)


def run_in_graph(task: Task, announce: Announce) -> str | None:
    """Compare results of a captured CUDA graph that is replayed with inputs it was not captured with."""
    import cupy

    call, exact, low = _expected(_trial(task), announce)
    _compile(task, call, announce)
    announce(task.name, task.seconds)
    values, captured = on_backend(task.backend, call), on_backend(task.backend, call)
    _assign(captured, None)
    stream, pool = cupy.cuda.Stream(non_blocking=True), cupy.cuda.MemoryPool()
    _run(task, captured)  # this call loads the kernels, which is illegal during a capture
    cupy.cuda.Device().synchronize()
    with stream, cupy.cuda.using_allocator(pool.malloc):
        stream.begin_capture()
        results = _run(task, captured)
        graph = stream.end_capture()
    with stream:
        _assign(captured, values)
        graph.launch()
        stream.synchronize()
    return _compare(on_host(results), exact, low)


KINDS: dict[str, Callable[[Task, Announce], Device | str | None]] = {
    "device": find_device,
    "micro-kernel": run_micro_kernel,
    "call": run_call,
    "KV cache": run_on_cache,
    "side stream": run_on_streams,
    "CUDA graph": run_in_graph,
}


def _trial(task: Task) -> Trial:
    assert task.trial is not None
    return task.trial


@cache
def _references(trial: Trial) -> tuple[Call, Results, Results]:
    call = trial.call()
    exact, low = references(call, call.q.dtype, trial.backward, 1 if trial.dtype == FP8 else ORDERS)
    return call, exact, low


def _expected(trial: Trial, announce: Announce) -> tuple[Call, Results, Results]:
    announce(f"{trial}: the formula", REFERENCE_SECONDS)
    return _references(trial)


def _compile(task: Task, call: Call, announce: Announce) -> None:
    """Compile the kernels of a call under a time limit of its own, which is longer than that of a run."""
    announce(f"{task.name}: compilation", COMPILE_SECONDS)
    for chosen in chosen_plans(task, on_backend(task.backend, call)):
        compile_plan(chosen)


def chosen_plans(task: Task, call: Call) -> list[Plan]:
    """Return the plans of a call and of its backward; UnsupportedError if the engine does not serve one."""
    options = Options.of("check", call.options | _how(task))
    saved = Saved(call.dout, call.dout, call.dlse, call.dlse)  # the plan depends on their shapes only
    return [
        plan_for(pose("check", (call.q, call.k, call.v), options, call.packed, each)[0])
        for each in ((None, saved) if _trial(task).backward else (None,))
    ]


def compile_plan(chosen: Plan) -> None:
    """Compile the kernels of a plan, unless the cache has them."""
    target = chosen.device.arch
    if chosen.device.backend == "simulator":
        target = target.replace("sm_", "compute_")
    for launch in chosen.launches:
        compile_launch(launch, target)


def _how(task: Task) -> dict[str, Any]:
    return dict(backend=task.backend, engine=task.engine, deterministic=_trial(task).deterministic)


def _results(task: Task, call: Call) -> Results:
    return on_host(_run(task, on_backend(task.backend, call)))


def _run(task: Task, call: Call) -> list[Any]:
    """Return out, lse and the gradients, computed by the public functions."""
    q, k, v, options, dout, dlse, packed = call
    options = options | _how(task)
    forward: Any = api.attention if packed is None else api.attention_varlen
    bounds = () if packed is None else tuple(packed)
    out, lse = forward(q, k, v, *bounds, return_lse=True, **options)
    if not _trial(task).backward:
        return [out, lse, *[None] * 5]
    backward: Any = api.attention_backward if packed is None else api.attention_varlen_backward
    return [out, lse, *backward(dout, q, k, v, out, lse, *bounds, dlse=dlse, **options)[:5]]


def on_backend(backend: str, call: Call) -> Call:
    """Return the call with CuPy arrays for "cuda", otherwise the call itself."""
    q, k, v, options, dout, dlse, packed = move(backend, tuple(call))
    return Call(q, k, v, options, dout, dlse, None if packed is None else Packed(*packed))


def move(backend: str, x: Any) -> Any:
    """Return a NumPy array as a CuPy array if the backend is "cuda"; anything else unchanged.

    Arrays inside tuples, lists, dicts and mods are converted too.
    """
    if backend != "cuda":
        return x
    if isinstance(x, (tuple, list)):
        return [move(backend, each) for each in x]
    if isinstance(x, dict):
        return {name: move(backend, each) for name, each in x.items()}
    if isinstance(x, Mod):
        return x.with_arrays(tuple(move(backend, x.arrays)))
    import cupy

    return cupy.asarray(x) if isinstance(x, np.ndarray) else x


def _assign(call: Call, values: Call | None) -> None:
    """Copy the values of another call, or zeros for None, into the arrays of a call on the current stream."""
    for name in ("q", "k", "v", "dout"):
        if getattr(call, name) is not None:
            array = getattr(call, name).view("uint8")
            array[...] = 0 if values is None else getattr(values, name).view("uint8")


def on_host(results: list[Any]) -> Results:
    """Return the results as NumPy arrays, copied on CuPy's current stream."""
    if all(x is None or isinstance(x, np.ndarray) for x in results):
        return results
    import cupy

    return [None if x is None else cupy.asnumpy(x) for x in results]


def _compare(results: Results, exact: Results, low: Results) -> str | None:
    """Describe the first result that differs from the formula; return None if all agree."""
    for name, actual, expected, rounded in zip(
        NAMES, results, exact, low, strict=False
    ):  # a decode has only out and lse
        if actual is None or expected is None:
            if (actual is None) != (expected is None):
                return f"{name} is {'missing' if actual is None else 'not expected'}"
            continue
        assert rounded is not None  # `references` computes the same results in both precisions
        wrong = deviation(actual, expected, rounded, actual.dtype)
        if wrong is not None:
            return f"{name}: {wrong}"
    return None
