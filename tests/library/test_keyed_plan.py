"""Keyed plans on torch tensors: a call launches what it would launch if it were posed, whatever was kept before.

Kernels do not run: the functions below replace the simulator's, and record launches and the bytes of their arguments.
CuPy's arrays, devices and streams are tested in tests/gpu_in_numpy/inside/test_keyed_plans.py.
"""

import contextlib
import gc
import inspect
import itertools
import math
import os
import subprocess
import sys
import threading
import weakref
from collections import Counter, namedtuple
from dataclasses import fields

import pytest
import torch
from odd_arguments import ODD
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import cupy_flash
from cupy_flash import dispatch, keyed_plan
from cupy_flash.adapters.torch import keyed_autograd, scaled_dot_product_attention, transforms
from cupy_flash.adapters.torch import keyed_plan as of_torch
from cupy_flash.adapters.torch import kv_cache as of_cache_on_torch
from cupy_flash.engines import simt
from cupy_flash.gpu import run_plan
from cupy_flash.gpu.kept_launches import LINE, KeptLaunches, without_memory
from cupy_flash.gpu.params import ALIGNMENT
from cupy_flash.gpu.tensor_map import encode_for_simulator
from cupy_flash.mods import trace
from cupy_flash.plan import plan
from cupy_flash.problem.build import of_cache, pose
from cupy_flash.problem.records import SCALES, CacheOptions, Operands, Options, Packed, Saved

OUTPUTS, SPACING = 1 << 50, 1 << 30  # the addresses of outputs in what is recorded
Launched = namedtuple("Launched", "kept launches arguments")
LOG = []


def _record(launches, arguments, kept):
    LOG.append(Launched(kept, launches, [[argument.tobytes() for argument in each] for each in arguments]))


def _start(work):
    """Record what a posed call launches, as if its workspaces were allocated as those of an entry are."""
    results = {name: x for name, x in work.results.items() if x is not None and name not in work.written}
    returned = [x for name, x in results.items() if name not in work.workspaces]
    outputs = {id(x): OUTPUTS + SPACING * n for n, x in enumerate(returned)}
    end = OUTPUTS + SPACING * len(returned)
    for name in work.workspaces:
        outputs[id(results[name])] = end
        end += -(-results[name].owner.nbytes // LINE) * LINE

    def address(array):
        return outputs.get(id(array), array.pointer)

    params = work.params(address)
    arguments = [work.arguments(launch, params, address, encode_for_simulator) for launch in work.launches]
    _record(work.launches, arguments, kept=False)


def forward(chosen, operands):
    return run_plan.forward(chosen, operands, _start)


def backward(chosen, operands):
    return run_plan.backward(chosen, operands, _start)


def append(chosen, operands):
    return run_plan.append(chosen, operands, _start)


def repeat(kept, inputs, addresses):
    outputs, _ = kept.allocate(inputs[0])
    starts = [OUTPUTS + SPACING * n for n in range(len(outputs))]
    steps = kept.arguments(addresses + starts, encode_for_simulator)
    _record(tuple(launch for launch, _ in steps), [arguments for _, arguments in steps], kept=True)
    return outputs


@pytest.fixture(autouse=True)
def recorded(monkeypatch):
    monkeypatch.setitem(sys.modules, "recorded_launches", sys.modules[__name__])
    monkeypatch.setitem(dispatch.LAUNCHERS, "simulator", "recorded_launches")
    dispatch._imported.cache_clear()
    keyed_plan.forget()
    LOG.clear()
    yield
    keyed_plan.forget()
    dispatch._imported.cache_clear()


def arrays(*shape, dtype=torch.float16, count=3):
    return tuple(torch.zeros(shape or (2, 40, 4, 64), dtype=dtype) for _ in range(count))


def attention(q, k, v, **options):
    return cupy_flash.attention(q, k, v, **{"backend": "simulator", "engine": "simt"} | options)


def outcome(call):
    """Return what a call launches, or its error, and whether from an entry."""
    LOG.clear()
    try:
        call()
    except (TypeError, ValueError) as error:
        return (type(error), str(error)), False
    (launched,) = LOG
    return launched[1:], launched.kept


def posed(call):
    """Return what a call launches without entries."""
    keyed_plan.forget()
    result, kept = outcome(call)
    assert not kept
    return result


def base(*inputs, function=None, **options):
    """Keep a call; return it."""

    def call():
        return (function or attention)(*inputs, **options)

    posed(call)
    assert outcome(call)[1]
    return call


def misaligned(x, elements):
    """Return zeros like x that start some elements after an address aligned to 64 bytes."""
    memory = torch.zeros(x.numel() + 64, dtype=x.dtype)
    return memory[elements : elements + x.numel()].view(x.shape)


Q, K, V = arrays()
DOUBLES = arrays(dtype=torch.float64)
LONGER = arrays(2, 48, 4, 64)
SHORTER = tuple(x[:, :40] for x in LONGER)
WIDE = tuple(x[..., :64] for x in arrays(2, 40, 4, 72))
SINK = torch.zeros(4, dtype=torch.float32)
SLOPES = torch.zeros(4), torch.zeros(2, 4)
BIAS = torch.zeros(1, 4, 40, 40, dtype=torch.float16)
TABLE = torch.zeros(4, 80)


def scaled(factor):
    """Return a score_mod that captures a number."""
    return lambda score, b, h, i, j: score * factor


def added(table):
    """Return a score_mod that captures an array, which it reads by the distance of query and key."""
    return lambda score, b, h, i, j: score + table[h, i - j]


def far(least):
    """Return a mask_mod that captures a number."""
    return lambda b, h, i, j: i - j >= least


# A number that was another one in an earlier trace is an argument.
NUMBERS = [cupy_flash.Mod(scaled(factor)) for factor in (1.5, 2.5, 3.5)][1:]
assert NUMBERS[0].text == NUMBERS[1].text

# {component: ((inputs, options) of what is kept, (inputs, options) of the call that differs from it in that alone)}
CHANGES = {
    "shape": ((SHORTER, {}), (LONGER, {})),
    "shape-of-keys": (((Q, *SHORTER[1:]), {}), ((Q, *LONGER[1:]), {})),
    "strides": (((Q, K, V), {}), (WIDE, {})),
    "strides-of-keys": (((Q, K, V), {}), ((Q, WIDE[1], V), {})),
    "dtype": (((Q, K, V), {}), (arrays(dtype=torch.bfloat16), {})),
    "alignment-to-16": (((Q, K, V), {}), ((Q, misaligned(K, 4), V), {})),
    "alignment-to-64": ((DOUBLES, {}), ((misaligned(DOUBLES[0], 2), *DOUBLES[1:]), {})),
    "presence": (((Q, K, V), {}), ((Q, K, V), dict(sink=SINK))),
    "which-is-present": (((Q, K, V), dict(sink=SINK)), ((Q, K, V), dict(alibi_slopes=SINK))),
    "shape-of-an-option": (((Q, K, V), dict(alibi_slopes=SLOPES[0])), ((Q, K, V), dict(alibi_slopes=SLOPES[1]))),
    "strides-of-an-option": (((Q, K, V), dict(bias=BIAS)), ((Q, K, V), dict(bias=BIAS.transpose(2, 3)))),
    "dtype-of-an-option": (((Q, K, V), dict(sink=SINK)), ((Q, K, V), dict(sink=SINK.half()))),
    "causal": (((Q, K, V), {}), ((Q, K, V), dict(causal=True))),
    "causal-type": (((Q, K, V), dict(causal=True)), ((Q, K, V), dict(causal=1))),
    "window": (((Q, K, V), dict(window=(1, 2))), ((Q, K, V), dict(window=(1, 3)))),
    "window-type": (((Q, K, V), dict(window=(1, 2))), ((Q, K, V), dict(window=(1, 2.0)))),
    "scale": (((Q, K, V), dict(scale=1.0)), ((Q, K, V), dict(scale=2.0))),
    "scale-type": (((Q, K, V), dict(scale=1.0)), ((Q, K, V), dict(scale=True))),
    "softcap": (((Q, K, V), {}), ((Q, K, V), dict(softcap=2.0))),
    "layout": (((Q, K, V), {}), ((Q, K, V), dict(layout="bhsd"))),
    "return-lse-type": (((Q, K, V), dict(return_lse=True)), ((Q, K, V), dict(return_lse=1))),
    "deterministic-type": (((Q, K, V), dict(deterministic=False)), ((Q, K, V), dict(deterministic=0))),
    "engine": (((Q, K, V), {}), ((Q, K, V), dict(engine="mma"))),
    "backend": (((Q, K, V), dict(engine="mma")), ((Q, K, V), dict(engine="mma", backend="simulator:sm_75"))),
    "dropout-type": (((Q, K, V), {}), ((Q, K, V), dict(dropout=False))),
    "fp8-factor": (((Q, K, V), {}), ((Q, K, V), dict(q_descale=torch.zeros(2, 4)))),
    "score-mod": (((Q, K, V), {}), ((Q, K, V), dict(score_mod=scaled(2.0)))),
    "mask-mod": (((Q, K, V), dict(score_mod=scaled(2.0))), ((Q, K, V), dict(score_mod=scaled(2.0), mask_mod=far(1)))),
    "text-of-a-mod": (
        ((Q, K, V), dict(score_mod=scaled(2.0))),
        ((Q, K, V), dict(score_mod=lambda score, b, h, i, j: score - 2.0)),
    ),
    "number-in-a-mod": (((Q, K, V), dict(score_mod=scaled(2.0))), ((Q, K, V), dict(score_mod=scaled(3.0)))),
    "number-beside-the-text-of-a-mod": (
        ((Q, K, V), dict(score_mod=NUMBERS[0])),
        ((Q, K, V), dict(score_mod=NUMBERS[1])),
    ),
    "number-in-a-mask-mod": (((Q, K, V), dict(mask_mod=far(1))), ((Q, K, V), dict(mask_mod=far(2)))),
    "shape-in-a-mod": (((Q, K, V), dict(score_mod=added(TABLE))), ((Q, K, V), dict(score_mod=added(TABLE[:, :79])))),
    "strides-in-a-mod": (
        ((Q, K, V), dict(score_mod=added(TABLE))),
        ((Q, K, V), dict(score_mod=added(torch.zeros(80, 4).mT))),
    ),
    "dtype-in-a-mod": (
        ((Q, K, V), dict(score_mod=added(TABLE))),
        ((Q, K, V), dict(score_mod=added(TABLE.double()))),
    ),
}


@pytest.mark.parametrize("component", CHANGES)
def test_a_changed_component_is_seen(component):
    check_a_change(attention, *CHANGES[component])


def check_a_change(function, before, after):
    """A call that differs from a kept one is launched, or refused, as if nothing were kept."""
    (inputs, options), (others, other_options) = before, after
    kept = base(*inputs, function=function, **options)
    got, was_kept = outcome(lambda: function(*others, **other_options))
    expected = posed(lambda: function(*others, **other_options))
    assert got == expected and not was_kept
    assert got != posed(kept)  # so a stale entry would be seen


FORMS = {
    "contiguous": lambda: arrays(),
    "float64": lambda: arrays(dtype=torch.float64),
    "strided": lambda: tuple(x[..., :64] for x in arrays(2, 40, 4, 72)),
    "aliased": lambda: arrays(count=1) * 3,
    "misaligned": lambda: (Q.clone(), misaligned(K, 4), V.clone()),
}
ENGINES = {
    "simt": {},
    "mma": dict(engine="mma"),
    "wgmma": dict(engine="wgmma", backend="simulator:sm_90a", causal=True),
    "arrays": dict(bias=BIAS, sink=SINK),
    "mods": dict(engine="mma", score_mod=added(TABLE), mask_mod=far(1), sink=SINK),
    "wgmma with mods": dict(engine="wgmma", backend="simulator:sm_90a", score_mod=added(TABLE), mask_mod=far(1)),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("engine", ENGINES)
def test_an_entry_launches_what_a_posed_call_does(form, engine):
    """On other memory than that with which it was kept. Only wgmma copies an operand that is not aligned."""
    options = ENGINES["simt" if form == "float64" and engine != "arrays" else engine]
    if "score_mod" in options:
        options = options | {"score_mod": added(TABLE.clone())}
    first, *others = (FORMS[form]() for _ in range(3))
    posed(lambda: attention(*first, **options))
    results = [outcome(lambda inputs=inputs: attention(*inputs, **options)) for inputs in others]
    for (got, kept), inputs in zip(results, others, strict=True):
        assert kept == (form != "misaligned" or "wgmma" not in engine)
        assert got == posed(lambda inputs=inputs: attention(*inputs, **options))


def test_kept_launches_have_their_own_lengths():
    """The kernel that sums the gradient of a packed bias takes the sizes of the bias for lengths."""
    bounds = torch.tensor([0, 7, 40], dtype=torch.int32)
    q, k, v = (x[0] for x in (Q, K, V))
    options = Options(bias=torch.zeros(1, 4, 33, 33), backend="simulator")
    saved = Saved(q, q, torch.zeros(4, 40))
    problem, operands = pose("attention_varlen", (q, k, v), options, Packed(bounds, bounds, 33, 33), saved)
    works = []
    run_plan.backward(dispatch.plan_for(problem), operands, works.append, without_memory)
    (work,) = works
    kept = KeptLaunches(work, lambda like: None)
    results = {name: x for name, x in work.results.items() if x is not None}
    inside = [x for name, x in results.items() if name in work.workspaces]
    given = [*work.inputs.values(), *(x for name, x in results.items() if name not in work.workspaces)]
    first = [OUTPUTS + SPACING * n + x.pointer % ALIGNMENT for n, x in enumerate(given)]
    start = OUTPUTS + SPACING * len(given)
    ends = itertools.accumulate(-(-math.prod(x.shape) * x.dtype.itemsize // LINE) * LINE for x in inside)
    addresses = dict(zip(map(id, given + inside), [*first, start, *(start + end for end in ends)], strict=False))
    params = work.params(lambda x: addresses[id(x)])
    expected = [
        work.arguments(launch, params, lambda x: addresses[id(x)], encode_for_simulator) for launch in work.launches
    ]
    kept = kept.arguments([*first, start], encode_for_simulator)
    assert [[x.tobytes() for x in each] for _, each in kept] == [[x.tobytes() for x in each] for each in expected]
    described = zip(work.launches, expected, strict=True)
    lengths = {launch.function: each[0][["q_len", "kv_len"]].item() for launch, each in described}
    assert lengths.pop("backward_bias") == (33, 33) and set(lengths.values()) == {(40, 40)}


def test_the_evidence_of_a_new_generation_is_used(monkeypatch):
    kept = base(Q, K, V)
    monkeypatch.setattr(simt, "tiles", lambda problem, device: [simt.Tile(8, 16, 64)])
    plan.forget()
    got, was_kept = outcome(kept)
    assert not was_kept and dict(got[0][0].constants)["BLOCK_Q"] == 8
    monkeypatch.undo()
    plan.forget()


class Wrapped(torch.Tensor):
    """A subclass."""


class Watch(TorchDispatchMode):
    """A mode that lists operators."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(str(func))
        return func(*args, **kwargs or {})


class WatchFunctions(torch.overrides.TorchFunctionMode):
    """A mode of functions."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **kwargs or {})


@contextlib.contextmanager
def deterministic():
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


OBSERVED = {
    "dispatch-mode": Watch,
    "function-mode": WatchFunctions,
    "dual-level": forward_ad.dual_level,
    "profiler": lambda: torch.autograd.profiler.profile(use_kineto=False),
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "deterministic": deterministic,
}


@pytest.mark.parametrize("observer", OBSERVED)
@pytest.mark.parametrize("gradient", [False, True])
def test_an_observed_call_is_posed(observer, gradient):
    """Also if the same observer was active when the call was kept, because no stack's depth is a key."""
    inputs = [x.clone().requires_grad_(gradient) for x in (Q, K, V)]
    with OBSERVED[observer]():
        for _ in range(2):
            assert not outcome(lambda: attention(*inputs))[1]
    for n in range(2):
        assert outcome(lambda: attention(*inputs))[1] == (n > 0)
    with OBSERVED[observer]() as observed:
        assert not outcome(lambda: attention(*inputs))[1]
        if isinstance(observed, Watch):
            assert any("attention_forward" in name for name in observed.seen)
    assert outcome(lambda: attention(*inputs))[1]


def test_autocast_casts_a_kept_call():
    inputs = arrays(dtype=torch.float32)
    base(*inputs)
    with torch.autocast("cpu", torch.bfloat16):
        assert attention(*inputs).dtype == torch.bfloat16


def test_transforms_pose():
    base(Q, K, V)
    gradient = torch.func.grad(lambda q: attention(q, K, V).float().sum())(Q)
    assert gradient.shape == Q.shape
    torch.func.grad(lambda x: (attention(Q, K, V), x.sum())[1])(torch.ones(2))
    assert not any(launched.kept for launched in LOG[-2:])
    base(Q[:1], K[:1], V[:1])
    assert torch.func.vmap(lambda q: attention(q[None], K[:1], V[:1]))(Q).shape == (2, 1, *Q.shape[1:])


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_trace_poses():
    base(Q, K, V)
    traced = torch.jit.trace(lambda q: attention(q, K, V), (Q,), check_trace=False)
    assert "attention_forward" in str(traced.graph)


UNUSUAL = {
    "subclass": lambda x: x.as_subclass(Wrapped),
    "negated": lambda x: torch._neg_view(x),
    "meta": lambda x: x.to("meta"),
    "zeros": lambda x: torch._efficientzerotensor(x.shape, dtype=x.dtype),
    "sparse": lambda x: x.to_sparse(),
    "nested": lambda x: torch.nested.nested_tensor(list(x)),
    "no-tensor": lambda x: x.numpy(),
    "empty": lambda x: x[:, :0],
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("kind", UNUSUAL)
@pytest.mark.parametrize("place", [0, 1])
def test_an_unusual_tensor_poses(kind, place, monkeypatch):
    base(Q, K, V)
    inputs = [Q, K, V]
    inputs[place] = UNUSUAL[kind](inputs[place])
    results = []
    for attempt in ("with entries", "without"):
        LOG.clear()
        try:
            result = attention(*inputs).shape
        except (TypeError, ValueError, RuntimeError, NotImplementedError) as error:
            result = type(error), str(error)
        results.append(result)
        assert not any(launched.kept for launched in LOG), attempt
        monkeypatch.setattr(transforms, "call_on_tensors", lambda *_: None)
    assert results[0] == results[1]


def test_a_tensor_on_another_device_is_seen(monkeypatch, on_simulator):
    """On meta, as if it had memory there."""
    address = torch.Tensor.data_ptr
    monkeypatch.setattr(torch.Tensor, "data_ptr", lambda x: ALIGNMENT if x.is_meta else address(x))
    heads_first = tuple(x.transpose(1, 2) for x in (Q, K, V))
    for inputs, function in (
        ((Q, K, V), attention),
        (heads_first, scaled_dot_product_attention),
        (CACHED, on_cache),
        (APPENDED, append_last),
    ):
        base(*inputs, function=function)
        for place in range(len(inputs)):
            moved = [x.to("meta") if n == place else x for n, x in enumerate(inputs)]
            got, kept = outcome(lambda moved=moved, function=function: function(*moved))
            assert not kept and "must be on one device" in got[1]


def test_values_in_host_memory_are_checked_every_time():
    lengths = torch.full((2,), 40, dtype=torch.int32)
    for _ in range(2):
        assert not outcome(lambda: attention(Q, K, V, kv_lengths=lengths))[1]
    lengths[0] = 41
    with pytest.raises(ValueError, match="kv_lengths must be in"):
        attention(Q, K, V, kv_lengths=lengths)


ALWAYS_POSED = {
    "dropout": dict(dropout=0.5),
    "seed": dict(seed=3),
    "copied": dict(q=torch.zeros(2, 40, 64, 4, dtype=torch.float16).transpose(2, 3)),
    "foreign-number": dict(scale=torch.tensor(0.5)),
    "window-list": dict(window=[1, 2]),
}


@pytest.mark.parametrize("why", ALWAYS_POSED)
def test_what_needs_more_than_launches_is_posed(why):
    arguments = dict(q=Q, k=K, v=V) | ALWAYS_POSED[why]
    for _ in range(2):
        assert not outcome(lambda: attention(**arguments))[1]


def test_the_functions_of_a_call_are_traced_once(monkeypatch):
    """Posing takes the trace of the key, also if no later call can."""
    traced = []
    monkeypatch.setattr(trace, "_kept", {})
    monkeypatch.setattr(trace, "_keep", lambda *_: None)
    monkeypatch.setattr(trace, "_trace", lambda *arguments, run=trace._trace: traced.append(1) or run(*arguments))
    for n in range(1, 4):
        attention(Q, K, V, score_mod=scaled(2.5), mask_mod=far(7))
        on_cache(*CACHED, score_mod=scaled(2.5))
        assert len(traced) == 2 * n


def test_functions_that_cannot_be_traced_are_refused_as_by_pose():
    for n in range(2):
        if n:
            base(Q, K, V, score_mod=scaled(2.0))
        with pytest.raises(TypeError, match="asks for the value of a traced number"):
            attention(Q, K, V, score_mod=lambda score, b, h, i, j: score if i > j else 0.0)
    with pytest.raises(TypeError, match="all arrays must be of one type"):
        attention(Q, K, V, score_mod=added(TABLE.numpy()))


def test_a_mod_is_served_with_other_memory_and_keeps_no_array():
    for n in range(3):
        table = torch.zeros(4, 80)
        assert outcome(lambda table=table: attention(Q, K, V, score_mod=added(table)))[1] == (n > 0)
        mod = cupy_flash.Mod(added(table))
        assert outcome(lambda mod=mod: attention(Q, K, V, score_mod=mod))[1]
    reference = weakref.ref(table)
    del table, mod
    gc.collect()
    assert reference() is None or all(launched.kept for launched in LOG[-1:])


def test_a_process_that_records_poses(monkeypatch, on_simulator):
    monkeypatch.setattr(dispatch, "_RECORD", "calls.json")
    monkeypatch.setattr(dispatch, "_record", lambda *_: None)
    for _ in range(2):
        assert not outcome(lambda: attention(Q, K, V))[1]
        assert not outcome(lambda: append_last(*APPENDED))[1]


def test_an_unaligned_output_poses(monkeypatch):
    kept = base(Q, K, V)
    (entry,) = keyed_plan._entries.values()
    monkeypatch.setattr(entry, "_repeat", lambda *_: None)
    assert not outcome(kept)[1] and keyed_plan._entries.get(next(iter(keyed_plan._entries))) is entry


def test_an_allocator_refuses_unaligned_memory(monkeypatch):
    allocate = of_torch.allocator([((4,), (1,), Q.numpy().dtype)])
    assert allocate(Q) is not None
    monkeypatch.setattr(of_torch, "_empty_strided_cpu", lambda *_: misaligned(torch.zeros(4), 2))
    assert allocate(Q) is None


def test_explain_says_whether_calls_are_served():
    options = dict(backend="simulator", engine="simt")
    lines = []
    for _ in range(3):
        lines += [x for x in cupy_flash.explain(Q, K, V, **options).splitlines() if x.startswith("host")]
        attention(Q, K, V)
    assert lines == [
        "host       posed at the next call, which keeps its plan",
        "host       served from a kept plan, 0 calls so far",
        "host       served from a kept plan, 1 call so far",
    ]
    on_cache(*CACHED)
    assert "host       served from a kept plan, 0 calls so far" in cupy_flash.explain_with_kv_cache(
        *CACHED, return_lse=True, **options
    )
    lengths = torch.full((2,), 40, dtype=torch.int32)
    attention(Q, K, V, kv_lengths=lengths)
    more = [cupy_flash.explain(Q, K, V, **asked, **options) for asked in (dict(kv_lengths=lengths), dict(dropout=0.5))]
    assert "host       posed at every call, which needs more than its launches" in more[0]
    assert "host       posed at every call, which has no key of a kept plan" in more[1]
    assert "host " not in cupy_flash.explain(Q, K, V)


def test_inference_mode_gives_inference_tensors():
    base(Q, K, V)
    with torch.inference_mode():
        out = attention(Q, K, V)
    assert LOG[-1].kept and out.is_inference() and not attention(Q, K, V).is_inference()


def test_no_array_is_kept():
    inputs = arrays()
    results = [attention(*inputs) for _ in range(2)]
    references = [weakref.ref(x) for x in (*inputs, *results)]
    del inputs, results
    gc.collect()
    assert keyed_plan._entries and not any(reference() is not None for reference in references)


def test_entries_are_bounded(monkeypatch):
    monkeypatch.setattr(keyed_plan, "CACHED", 4)
    for n in range(20):
        attention(Q, K, V, scale=float(n))
        assert len(keyed_plan._entries) <= 4


FORK = """
import os
from cupy_flash import keyed_plan
keyed_plan._entries["key"] = None
child = os.fork()
if child == 0:
    os._exit(len(keyed_plan._entries))
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), len(keyed_plan._entries))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="a system without fork")
def test_a_forked_process_begins_without_entries():
    assert subprocess.run([sys.executable, "-c", FORK], capture_output=True, text=True, check=True).stdout == "0 1\n"


def test_threads_share_entries():
    """Each of four threads launches with its own scale, while this one drops the entries."""

    def work(n):
        for _ in range(20):
            attention(Q, K, V, scale=float(n))

    workers = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for worker in workers:
        worker.start()
    while any(worker.is_alive() for worker in workers):
        keyed_plan.forget()
    counts = Counter(launched[1:][1][0][0] for launched in LOG)
    posed_once = [posed(lambda n=n: attention(Q, K, V, scale=float(n)))[1][0][0] for n in range(4)]
    assert counts == dict.fromkeys(posed_once, 20)


def test_the_order_of_inputs_is_that_of_launches():
    from cupy_flash.problem.build import ARRAY_NAMES

    names = ("q", "k", "v", *ARRAY_NAMES, "cu_seqlens_q", "cu_seqlens_k", "dout", "out", "lse", "dlse")
    assert sorted(names, key=Operands._fields.index) == list(names)


# KV caches


@pytest.fixture
def unread(monkeypatch):
    """Arrays of indices are not read, as those on a GPU."""
    monkeypatch.setattr(keyed_plan, "CHECKED", ())
    monkeypatch.setattr(of_cache(), "indices_of", lambda _: ())
    monkeypatch.setattr(of_cache(), "check_contents", lambda *_: None)


def on_cache(q, k_cache, v_cache, **options):
    forced = {"backend": "simulator", "engine": "simt", "return_lse": True}
    return cupy_flash.attention_with_kv_cache(q, k_cache, v_cache, **forced | options)


def half(*shape):
    return torch.zeros(shape, dtype=torch.float16)


def indices(*shape, dtype=torch.int32):
    return torch.zeros(shape, dtype=dtype)


def new(rows=1):
    """Return rows to append."""
    return dict(k=half(2, rows, 2, 32), v=half(2, rows, 2, 32))


CACHED = half(2, 1, 4, 32), half(2, 64, 2, 32), half(2, 64, 2, 32)
PAGED = half(2, 1, 4, 32), half(8, 16, 2, 32), half(8, 16, 2, 32)
WIDE_CACHE = tuple(x[..., :32] for x in (half(2, 64, 2, 40), half(2, 64, 2, 40)))
NEW, LENGTHS, PAGES = new(), dict(cache_seqlens=indices(2)), dict(block_table=indices(2, 4))
TABLES = dict(rotary_cos=half(64, 8), rotary_sin=half(64, 8))
TOKENS = (half(5, 4, 32), *CACHED[1:])
PACKED = dict(cu_seqlens_q=indices(3), max_seqlen_q=3)
QUERIES = half(2, 2, 4, 32)
SQUARE = tuple(half(2, 4, 4, 32) for _ in range(3))
FP8 = tuple(x.to(torch.float8_e4m3fn) for x in CACHED[1:])
CODES = (CACHED[0], *(torch.ones(2, 64, 2, 32, dtype=torch.int8) for _ in range(2)))


def scales(dtype=torch.float32):
    return {"engine": "mma_decode"} | {name: torch.ones(2, 64, 2, dtype=dtype) for name in ("k_scale", "v_scale")}


# As CHANGES
CACHE_CHANGES = {
    "shape": (((QUERIES[:, :1], *CACHED[1:]), {}), ((QUERIES, *CACHED[1:]), {})),
    "capacity": ((CACHED, {}), ((CACHED[0], *(x[:, :48] for x in CACHED[1:])), {})),
    "strides": ((CACHED, {}), ((CACHED[0], WIDE_CACHE[0], CACHED[2]), {})),
    "dtype": ((CACHED, {}), (tuple(x.bfloat16() for x in CACHED), {})),
    "dtype-of-the-caches": ((CACHED, dict(engine="mma_decode")), ((CACHED[0], *FP8), dict(engine="mma_decode"))),
    "alignment-to-16": ((CACHED, {}), ((CACHED[0], misaligned(CACHED[1], 4), CACHED[2]), {})),
    "appended": ((CACHED, LENGTHS), (CACHED, LENGTHS | NEW)),
    "rows-appended": ((CACHED, LENGTHS | NEW), (CACHED, LENGTHS | new(2))),
    "strides-of-rows": ((CACHED, LENGTHS | NEW), (CACHED, LENGTHS | NEW | dict(v=half(2, 1, 2, 40)[..., :32]))),
    "cache-seqlens": ((CACHED, {}), (CACHED, LENGTHS)),
    "number-of-keys": ((CACHED, {}), (CACHED, dict(cache_seqlens=3))),
    "cache-seqlens-number": ((CACHED, dict(cache_seqlens=3)), (CACHED, {})),
    "cache-seqlens-type": ((CACHED, dict(cache_seqlens=1)), (CACHED, dict(cache_seqlens=True))),
    "cache-batch-idx": ((CACHED, LENGTHS), (CACHED, LENGTHS | dict(cache_batch_idx=indices(2)))),
    "cache-leftpad": ((CACHED, LENGTHS), (CACHED, LENGTHS | dict(cache_leftpad=indices(2)))),
    "which-array-of-indices": (
        (CACHED, LENGTHS | dict(cache_batch_idx=indices(2))), (CACHED, LENGTHS | dict(cache_leftpad=indices(2)))
    ),
    "block-table": ((PAGED, LENGTHS), (PAGED, LENGTHS | PAGES)),
    "columns-of-a-block-table": ((PAGED, PAGES), (PAGED, dict(block_table=indices(2, 8)))),
    "strides-of-a-block-table": ((PAGED, PAGES), (PAGED, dict(block_table=indices(2, 8)[:, :4]))),
    "slots": ((CACHED, LENGTHS | NEW), (CACHED, LENGTHS | NEW | dict(slots=indices(2, dtype=torch.int64)))),
    "positions": ((CACHED, LENGTHS | TABLES), (CACHED, LENGTHS | TABLES | dict(positions=indices(2, 1)))),
    "packed": ((TOKENS, PACKED), (TOKENS, PACKED | dict(cu_seqlens_q=indices(4)))),
    "max-seqlen-q": ((TOKENS, PACKED), (TOKENS, PACKED | dict(max_seqlen_q=100))),
    "max-seqlen-q-type": ((TOKENS, PACKED), (TOKENS, PACKED | dict(max_seqlen_q=3.0))),
    "rotary": ((CACHED, {}), (CACHED, TABLES)),
    "rotary-interleaved": ((CACHED, TABLES), (CACHED, TABLES | dict(rotary_interleaved=False))),
    "rotary-interleaved-type": ((CACHED, TABLES), (CACHED, TABLES | dict(rotary_interleaved=1))),
    "rotary-rows": ((CACHED, TABLES), (CACHED, dict(rotary_cos=half(80, 8), rotary_sin=half(80, 8)))),
    "causal": ((CACHED, {}), (CACHED, dict(causal=False))),
    "causal-type": ((CACHED, {}), (CACHED, dict(causal=1))),
    "window": ((CACHED, dict(window=(1, 2))), (CACHED, dict(window=(2, 2)))),
    "window-type": ((CACHED, dict(window=(1, 2))), (CACHED, dict(window=(1, 2.0)))),
    "scale": ((CACHED, dict(scale=1.0)), (CACHED, dict(scale=2.0))),
    "scale-type": ((CACHED, dict(scale=1.0)), (CACHED, dict(scale=True))),
    "softcap": ((CACHED, {}), (CACHED, dict(softcap=2.0))),
    "alibi": ((CACHED, dict(alibi_slopes=SLOPES[0])), (CACHED, dict(alibi_slopes=SLOPES[1]))),
    "sink": ((CACHED, {}), (CACHED, dict(sink=SINK))),
    "mask": (
        (CACHED, dict(mask=torch.ones(2, 1, 1, 4, dtype=torch.bool))),
        (CACHED, dict(mask=torch.ones(2, 1, 1, 5, dtype=torch.bool))),
    ),
    "descale": (
        ((CACHED[0], *FP8), dict(engine="mma_decode")),
        ((CACHED[0], *FP8), dict(engine="mma_decode", k_descale=torch.ones(2, 2))),
    ),
    "scales": (
        ((CACHED[0], *FP8), dict(engine="mma_decode")), ((CACHED[0], *FP8), scales())
    ),
    "dtype-of-scales": ((CODES, scales()), (CODES, scales(torch.float16))),
    "strides-of-scales": ((CODES, scales()), (CODES, scales() | dict(k_scale=torch.ones(2, 64, 4)[..., ::2]))),
    "split-size": ((CACHED, dict(engine="mma_decode")), (CACHED, dict(engine="mma_decode", split_size=64))),
    "layout": ((SQUARE, {}), (SQUARE, dict(layout="bhsd"))),
    "out": ((CACHED, {}), (CACHED, dict(out=half(2, 1, 4, 32)))),
    "strides-of-out": (
        (CACHED, dict(out=half(2, 1, 4, 32))), (CACHED, dict(out=half(2, 1, 4, 40)[..., :32]))
    ),
    "return-lse-type": ((CACHED, {}), (CACHED, dict(return_lse=1))),
    "engine": ((CACHED, {}), (CACHED, dict(engine="mma_decode"))),
    "backend": (
        (CACHED, dict(engine="mma_decode")), (CACHED, dict(engine="mma_decode", backend="simulator:sm_75"))
    ),
}  # fmt: skip


@pytest.mark.parametrize("component", CACHE_CHANGES)
def test_a_changed_component_of_a_call_on_a_cache_is_seen(component, unread):
    check_a_change(on_cache, *CACHE_CHANGES[component])


CACHE_FORMS = {
    "contiguous": lambda: (CACHED, {}),
    "number": lambda: (CACHED, dict(cache_seqlens=3) | new()),
    "paged": lambda: (PAGED, dict(cache_seqlens=indices(2), block_table=indices(2, 4)) | new()),
    "slots": lambda: (PAGED, dict(cache_seqlens=indices(2), slots=indices(2, dtype=torch.int64), **PAGES) | new()),
    "rotary": lambda: (CACHED, dict(cache_seqlens=indices(2), positions=indices(2, 1), **TABLES) | new()),
    "packed": lambda: (TOKENS, PACKED),
    "out": lambda: (CACHED, dict(out=half(2, 1, 4, 32))),
    "arrays": lambda: (
        CACHED,
        dict(
            alibi_slopes=torch.zeros(4), sink=torch.zeros(4), mask=torch.ones(2, 1, 1, 4, dtype=torch.bool),
            cache_batch_idx=indices(2), cache_leftpad=indices(2), cache_seqlens=indices(2), out=half(2, 1, 4, 32),
        ) | new(),
    ),
}  # fmt: skip
CACHE_ENGINES = {
    "simt": {},
    "mma": dict(engine="mma"),
    "mma_decode": dict(engine="mma_decode"),
    "hopper": dict(engine="mma_decode", backend="simulator:sm_90a", split_size=64),
}


@pytest.mark.parametrize("form", CACHE_FORMS)
@pytest.mark.parametrize("engine", CACHE_ENGINES)
def test_an_entry_of_a_call_on_a_cache_launches_what_a_posed_call_does(form, engine, unread):
    def call():
        inputs, options = CACHE_FORMS[form]()
        inputs = tuple(x.clone() for x in inputs)
        return lambda: on_cache(*inputs, **options | CACHE_ENGINES[engine])

    posed(call())
    second = call()
    got, kept = outcome(second)
    assert kept and got == posed(second)


def test_an_entry_of_a_call_on_a_quantised_cache_appends_and_reads_scales(unread):
    def call():
        inputs, given = tuple(x.clone() for x in CODES), scales() | new() | dict(cache_seqlens=3)
        return lambda: on_cache(*inputs, **given)

    posed(call())
    second = call()
    got, kept = outcome(second)
    assert kept and got == posed(second)


def test_a_length_that_is_a_number_may_change():
    """It is read at every call, and a number for which there is no room is refused as if nothing were kept."""
    for most, options in ((62, new(2)), (64, {}), (48, dict(rotary_cos=half(48, 8), rotary_sin=half(48, 8)))):
        base(*CACHED, function=on_cache, cache_seqlens=3, **options)
        for length in (0, 7, most, most + 1, -1, 2**40):
            got, kept = outcome(lambda n=length, options=options: on_cache(*CACHED, cache_seqlens=n, **options))
            assert kept == (0 <= length <= most)
            expected = posed(lambda n=length, options=options: on_cache(*CACHED, cache_seqlens=n, **options))
            assert got == expected and (kept or got[0] is ValueError)
            outcome(lambda options=options: on_cache(*CACHED, cache_seqlens=3, **options))


SHAPES = {"q": (2, 1, 4, 32), "k": (2, 1, 2, 32), "v": (2, 1, 2, 32), "out": (2, 1, 4, 32)}
SHAPES |= dict.fromkeys(("k_cache", "v_cache"), (2, 64, 2, 32))
SIZES = {name: torch.Size(shape).numel() for name, shape in SHAPES.items()}
APART = {name: 20_480 * n for n, name in enumerate(SHAPES)}  # first elements
OVERLAPS = [("out", name) for name in ("q", "k", "v", "k_cache", "v_cache")]
OVERLAPS += [(name, cache) for name in ("q", "k", "v") for cache in ("k_cache", "v_cache")]


def within(memory, starts):
    """Return a call on arrays that start at these elements of `memory`."""
    x = {name: memory[start : start + SIZES[name]].view(SHAPES[name]) for name, start in starts.items()}
    arrays = [x.pop(name) for name in ("q", "k_cache", "v_cache")]
    return lambda: on_cache(*arrays, **x, **({"cache_seqlens": 3} if "k" in x else {}))


@pytest.mark.parametrize(("name", "other"), OVERLAPS)
def test_an_overlap_with_what_is_written_is_seen(name, other):
    """From the first element to the last: the next one is apart. The key is the same, so the entry would be stale."""
    memory = half(20_480 * 8)
    keyed_plan.forget()
    outcome(within(memory, APART))
    places = {APART[other]: False, APART[other] + SIZES[other] - 32: False, APART[other] + SIZES[other]: True}
    places |= {APART[other] - SIZES[name] + 32: False, APART[other] - SIZES[name]: True}
    for start, is_apart in places.items():
        if start >= 0:
            got, kept = outcome(within(memory, APART | {name: start}))
            assert kept == is_apart and (is_apart or f"{name} overlaps {other}" in got[1])
    assert len(keyed_plan._entries) == 1


def test_caches_that_start_at_one_address_are_seen():
    memory = half(20_480 * 8)
    keyed_plan.forget()
    outcome(within(memory, APART))
    got, kept = outcome(within(memory, APART | {"v_cache": APART["k_cache"]}))
    assert not kept and "start at one address" in got[1]


def test_a_call_that_writes_to_no_argument_may_have_overlaps():
    memory, reads = half(20_480 * 8), {name: APART[name] for name in ("q", "k_cache", "v_cache")}
    outcome(within(memory, reads))
    assert outcome(within(memory, dict.fromkeys(reads, 0)))[1]


def test_what_a_call_writes_has_a_new_version():
    """So that autograd refuses a backward through its old contents."""
    out, append = half(2, 1, 4, 32), dict(cache_seqlens=3) | new()
    for options in ({}, dict(out=out), append, dict(out=out) | append):
        base(*CACHED, function=on_cache, **options)
        before = [x._version for x in (*CACHED, out)]
        on_cache(*CACHED, **options)
        assert LOG[-1].kept
        changed = [x._version > n for x, n in zip((*CACHED, out), before, strict=True)]
        assert changed == [False, "k" in options, "k" in options, "out" in options]


def test_a_served_call_on_a_cache_returns_out_and_lse():
    out = half(2, 1, 4, 32)
    for given in (None, out):
        for return_lse in (False, True):
            for _ in range(2):
                result = on_cache(*CACHED, out=given, return_lse=return_lse)
            first = result[0] if return_lse else result
            assert LOG[-1].kept and first.shape == (2, 1, 4, 32) and (given is None or first is given)
            assert not return_lse or result[1].shape == (2, 4, 1)


@pytest.fixture
def on_simulator(monkeypatch):
    """`append_to_kv_cache` has no option for a backend."""
    monkeypatch.setenv("CUPY_FLASH_BACKEND", "simulator")


def append_rows(k, v, k_cache, v_cache, **options):
    cupy_flash.append_to_kv_cache(k, v, k_cache, v_cache, **options)


def append_last(*arrays):
    append_rows(*arrays, cache_seqlens=3)


def append_arrays(**arrays):
    cupy_flash.append_to_kv_cache(**arrays)


ROWS = half(2, 1, 2, 32), half(2, 1, 2, 32)
APPENDED = (*ROWS, *CACHED[1:])
TO_PAGES, LATENT = (*ROWS, *PAGED[1:]), (ROWS[0], None, CACHED[1], None)
TO_TOKENS = (half(5, 2, 32), half(5, 2, 32), *CACHED[1:])
TO_CODES = (*ROWS, *CODES[1:])
BY_HEADS = tuple(half(2, 2, 2, 32) for _ in range(4))


def with_scales(dtype=torch.float32):
    return LENGTHS | {name: torch.ones(2, 64, 2, dtype=dtype) for name in ("k_scale", "v_scale")}


# As CHANGES
APPEND_CHANGES = {
    "rows": ((APPENDED, LENGTHS), ((half(2, 2, 2, 32), half(2, 2, 2, 32), *CACHED[1:]), LENGTHS)),
    "capacity": ((APPENDED, LENGTHS), ((*ROWS, *(x[:, :48] for x in CACHED[1:])), LENGTHS)),
    "strides-of-rows": ((APPENDED, LENGTHS), ((ROWS[0], half(2, 1, 2, 40)[..., :32], *CACHED[1:]), LENGTHS)),
    "strides-of-a-cache": ((APPENDED, LENGTHS), ((*ROWS, WIDE_CACHE[0], CACHED[2]), LENGTHS)),
    "dtype": ((APPENDED, LENGTHS), (tuple(x.bfloat16() for x in APPENDED), LENGTHS)),
    "dtype-of-the-caches": ((APPENDED, LENGTHS), ((*ROWS, *FP8), LENGTHS)),
    "alignment": ((APPENDED, LENGTHS), ((*ROWS, misaligned(CACHED[1], 4), CACHED[2]), LENGTHS)),
    "values-inside-keys": ((APPENDED, LENGTHS), (LATENT, LENGTHS)),
    "number-of-keys": ((APPENDED, LENGTHS), (APPENDED, dict(cache_seqlens=3))),
    "cache-seqlens-type": ((APPENDED, dict(cache_seqlens=1)), (APPENDED, dict(cache_seqlens=True))),
    "cache-batch-idx": ((APPENDED, LENGTHS), (APPENDED, LENGTHS | dict(cache_batch_idx=indices(2)))),
    "block-table": ((TO_PAGES, LENGTHS | PAGES), (TO_PAGES, LENGTHS | dict(block_table=indices(2, 8)))),
    "slots": ((APPENDED, LENGTHS), (APPENDED, dict(slots=indices(2, dtype=torch.int64)))),
    "packed": (
        (TO_TOKENS, LENGTHS | dict(cu_seqlens=indices(3))), (TO_TOKENS, dict(slots=indices(5, dtype=torch.int64))),
    ),
    "rotary": ((APPENDED, LENGTHS), (APPENDED, LENGTHS | TABLES)),
    "rotary-interleaved": (
        (APPENDED, LENGTHS | TABLES), (APPENDED, LENGTHS | TABLES | dict(rotary_interleaved=False)),
    ),
    "rotary-interleaved-type": (
        (APPENDED, LENGTHS | TABLES), (APPENDED, LENGTHS | TABLES | dict(rotary_interleaved=1.0)),
    ),
    "positions": ((APPENDED, LENGTHS | TABLES), (APPENDED, LENGTHS | TABLES | dict(positions=indices(2, 1)))),
    "descale": (
        ((*ROWS, *FP8), LENGTHS),
        ((*ROWS, *FP8), LENGTHS | dict(k_descale=torch.ones(2, 2), v_descale=torch.ones(2, 2))),
    ),
    "dtype-of-scales": ((TO_CODES, with_scales()), (TO_CODES, with_scales(torch.float16))),
    "strides-of-scales": (
        (TO_CODES, with_scales()), (TO_CODES, with_scales() | dict(k_scale=torch.ones(2, 64, 4)[..., ::2])),
    ),
    "which-descale": (
        ((*ROWS, *FP8), LENGTHS | dict(k_descale=torch.ones(2, 2))),
        ((*ROWS, *FP8), LENGTHS | dict(v_descale=torch.ones(2, 2))),
    ),
    "layout": ((BY_HEADS, LENGTHS), (BY_HEADS, LENGTHS | dict(layout="bhsd"))),
}  # fmt: skip


@pytest.mark.parametrize("component", APPEND_CHANGES)
def test_a_changed_component_of_an_append_is_seen(component, unread, on_simulator):
    check_a_change(append_rows, *APPEND_CHANGES[component])


APPEND_FORMS = {
    "contiguous": lambda: (APPENDED, dict(cache_seqlens=indices(2))),
    "number": lambda: (APPENDED, dict(cache_seqlens=3)),
    "paged": lambda: (TO_PAGES, dict(cache_seqlens=indices(2), block_table=indices(2, 4))),
    "slots": lambda: (APPENDED, dict(slots=indices(2, dtype=torch.int64))),
    "rotary": lambda: (APPENDED, dict(cache_seqlens=indices(2), positions=indices(2, 1), **TABLES)),
    "packed": lambda: (TO_TOKENS, dict(cache_seqlens=indices(2), cu_seqlens=indices(3))),
    "values-inside-keys": lambda: (LATENT, dict(cache_seqlens=3)),
    "codes": lambda: (TO_CODES, with_scales()),
}


@pytest.mark.parametrize("form", APPEND_FORMS)
def test_an_entry_of_an_append_launches_what_a_posed_one_does(form, unread, on_simulator):
    def call():
        inputs, options = APPEND_FORMS[form]()
        inputs = tuple(None if x is None else x.clone() for x in inputs)
        return lambda: append_rows(*inputs, **options)

    posed(call())
    second = call()
    got, kept = outcome(second)
    assert kept and got == posed(second)


FOUR_BITS = (*ROWS, *(indices(2, 64, 2, 16, dtype=torch.uint8) for _ in range(2)))
WITH_OPTIONAL = {
    "paged": (TO_PAGES, LENGTHS | PAGES | TABLES | dict(positions=indices(2, 1))),
    "contiguous": (APPENDED, LENGTHS | dict(cache_batch_idx=indices(2))),
    "slots": (APPENDED, dict(slots=indices(2, dtype=torch.int64))),
    "packed": (TO_TOKENS, LENGTHS | dict(cu_seqlens=indices(3))),
    "fp8": ((*ROWS, *FP8), LENGTHS | dict(k_descale=torch.ones(2, 2), v_descale=torch.ones(2, 2))),
    "four-bits": (FOUR_BITS, LENGTHS | {name: torch.ones(2, 64, 2) for name in SCALES}),
}


@pytest.mark.parametrize("form", WITH_OPTIONAL)
def test_an_array_that_an_append_lacks_is_seen(form, unread, on_simulator):
    """Each of them, also those without which the call is refused."""
    inputs, options = WITH_OPTIONAL[form]
    given = dict(zip(("k", "v", "k_cache", "v_cache"), inputs, strict=True)) | options
    for name in ("v", "v_cache", *options):
        check_a_change(append_arrays, ((), given), ((), given | {name: None}))


def test_an_append_is_no_call_whose_queries_are_its_rows(unread, on_simulator):
    """Without the word in its key, one of them would be served from the entry of the other."""
    base(*APPENDED, function=append_rows, cache_seqlens=3)
    options = dict(k=ROWS[0], v=ROWS[1], cache_seqlens=3)
    assert not outcome(lambda: cupy_flash.attention_with_kv_cache(ROWS[0], *CACHED[1:], **options))[1]
    assert outcome(lambda: append_rows(*APPENDED, cache_seqlens=3))[1]


def test_the_number_of_keys_before_an_append_may_change(on_simulator):
    base(*APPENDED, function=append_rows, cache_seqlens=3)
    for length in (0, 7, 63, 64, -1, 2**40):
        got, kept = outcome(lambda n=length: append_rows(*APPENDED, cache_seqlens=n))
        assert kept == (0 <= length <= 63)
        assert got == posed(lambda n=length: append_rows(*APPENDED, cache_seqlens=n))
        outcome(lambda: append_rows(*APPENDED, cache_seqlens=3))


def test_an_overlap_of_rows_and_caches_of_an_append_is_seen(on_simulator):
    memory, sizes = half(20_480 * 4), [x.numel() for x in APPENDED]

    def call(*starts):
        views = [
            memory[start : start + size].view(x.shape) for x, start, size in zip(APPENDED, starts, sizes, strict=True)
        ]
        return lambda: append_rows(*views, cache_seqlens=3)

    apart = [20_480 * n for n in range(4)]
    outcome(call(*apart))
    assert outcome(call(*apart))[1]
    for rows, cache in itertools.product((0, 1), (2, 3)):
        moved = apart.copy()
        moved[rows] = apart[cache] + 32
        got, kept = outcome(call(*moved))
        assert not kept and "overlaps" in got[1]
    got, kept = outcome(call(*apart[:3], apart[2]))
    assert not kept and "start at one address" in got[1]


def test_an_overlap_of_scales_of_an_append_is_seen(on_simulator):
    names, size = ("k", "v", "k_cache", "v_cache", "k_scale", "v_scale"), 1 << 14
    given = dict(zip(names, (*ROWS, *CODES[1:], *(torch.ones(2, 64, 2) for _ in range(2))), strict=True))
    memory, apart = torch.zeros(6 * size, dtype=torch.uint8), {name: size * n for n, name in enumerate(names)}

    def call(starts):
        views = {name: memory[n : n + given[name].nbytes].view(given[name].dtype) for name, n in starts.items()}
        return lambda: append_arrays(**{name: x.view(given[name].shape) for name, x in views.items()}, cache_seqlens=3)

    outcome(call(apart))
    assert outcome(call(apart))[1]
    for name, others in (("k_scale", names[2:4]), ("v_scale", names[2:5]), ("k", names[4:]), ("v", names[4:])):
        for other in others:
            got, kept = outcome(call(apart | {name: apart[other] + 64}))
            assert not kept and "overlaps" in got[1]


def test_an_append_writes_a_new_version(on_simulator, unread):
    inputs = tuple(x.clone() for x in TO_CODES)
    scales_of = with_scales()
    base(*inputs, function=append_rows, **scales_of)
    written = (*inputs[2:], scales_of["k_scale"], scales_of["v_scale"])
    before = [x._version for x in (*inputs[:2], *written)]
    append_rows(*inputs, **scales_of)
    changed = [x._version > n for x, n in zip((*inputs[:2], *written), before, strict=True)]
    assert LOG[-1].kept and changed == [False] * 2 + [True] * 4


@pytest.mark.parametrize("kind", ["subclass", "negated", "meta", "zeros", "sparse", "no-tensor"])
@pytest.mark.parametrize("place", range(4))
def test_an_append_with_an_unusual_tensor_poses(kind, place, on_simulator):
    base(*APPENDED, function=append_rows, cache_seqlens=3)
    inputs = list(APPENDED)
    inputs[place] = UNUSUAL[kind](inputs[place])
    LOG.clear()
    # Most of these calls are refused, some by torch itself; the test asks only that no kept plan serves them.
    with contextlib.suppress(TypeError, ValueError, RuntimeError, NotImplementedError):
        append_rows(*inputs, cache_seqlens=3)
    assert not any(launched.kept for launched in LOG)


def test_the_evidence_of_a_new_generation_poses_an_append(on_simulator):
    kept = base(*APPENDED, function=append_rows, cache_seqlens=3)
    plan.forget()
    assert [outcome(kept)[1] for _ in range(2)] == [False, True]


# On a GPU no entry of sdpa asks for the state of torch, as those on a CPU do.
ON_SIMULATOR = {
    "append": lambda: append_last(*APPENDED),
    "sdpa": lambda: scaled_dot_product_attention(*(x.transpose(1, 2) for x in (Q, K, V))),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("function", ON_SIMULATOR)
def test_an_append_or_sdpa_under_a_transform_or_a_trace_is_posed(function, on_simulator):
    kept = base(function=ON_SIMULATOR[function])

    def double(x):
        kept()
        return (2 * x).sum()

    for around in (torch.func.grad(double), lambda x: torch.jit.trace(double, (x,), check_trace=False)):
        LOG.clear()
        around(torch.ones(2))
        assert LOG and not any(launched.kept for launched in LOG)


@pytest.mark.parametrize("function", ON_SIMULATOR)
@pytest.mark.parametrize("observer", OBSERVED)
def test_an_observed_append_or_sdpa_is_posed(observer, function, on_simulator):
    kept = base(function=ON_SIMULATOR[function])
    with OBSERVED[observer]():
        assert not outcome(kept)[1]


def test_what_an_append_cannot_be_served_with(on_simulator, monkeypatch):
    """Gradients, a subclass, lengths in host memory, and another backend."""
    base(*APPENDED, function=append_rows, cache_seqlens=3)
    got, kept = outcome(lambda: append_rows(ROWS[0].clone().requires_grad_(), *APPENDED[1:], cache_seqlens=3))
    assert not kept and "require grad" in got[1]
    for _ in range(2):
        assert not outcome(lambda: append_rows(*APPENDED, cache_seqlens=indices(2)))[1]
        assert not outcome(lambda: append_rows(ROWS[0].as_subclass(Wrapped), *APPENDED[1:], cache_seqlens=3))[1]
    assert outcome(lambda: append_rows(*APPENDED, cache_seqlens=3))[1]
    monkeypatch.setenv("CUPY_FLASH_BACKEND", "cpu")
    append_rows(*APPENDED, cache_seqlens=3)
    assert LOG[-1].kept and len(LOG) == 1  # that before: nothing was launched


def test_gradients_through_a_cache_are_refused():
    q = CACHED[0].clone()
    base(q, *CACHED[1:], function=on_cache)
    q.requires_grad_()
    with pytest.raises(ValueError, match="q require grad"):
        on_cache(q, *CACHED[1:])
    with torch.no_grad():
        on_cache(q, *CACHED[1:])
    assert LOG[-1].kept


@pytest.mark.parametrize("observer", OBSERVED)
def test_an_observed_call_on_a_cache_is_posed(observer):
    kept = base(*CACHED, function=on_cache)
    with OBSERVED[observer]():
        assert not outcome(kept)[1]


@pytest.mark.parametrize("engine", ["simt", "mma_decode"])
def test_a_mod_on_a_cache_is_served(engine):
    for n in range(3):
        options = dict(score_mod=added(TABLE.clone()), mask_mod=far(-9), engine=engine) | new()

        def call(options=options):
            return on_cache(*CACHED, cache_seqlens=3, **options)

        got, kept = outcome(call)
        assert kept == (n > 0)
    assert got == posed(call)


def test_indices_in_host_memory_are_checked_every_time():
    lengths = indices(2)
    for _ in range(2):
        assert not outcome(lambda: on_cache(*CACHED, cache_seqlens=lengths))[1]
    lengths[0] = 65
    with pytest.raises(ValueError, match="cache_seqlens"):
        on_cache(*CACHED, cache_seqlens=lengths)


# Autograd


def differentiable(*shape, dtype=torch.float16):
    return tuple(x.requires_grad_() for x in arrays(*shape, dtype=dtype))


def test_a_call_with_gradients_is_served_with_its_backward():
    inputs = differentiable()
    for n in range(3):
        LOG.clear()
        out = attention(*inputs, causal=True)
        gradients = torch.autograd.grad(out, inputs, torch.ones_like(out))
        assert [launched.kept for launched in LOG] == [n > 0, n > 1]
        assert out.grad_fn.name() == "cupy_flash_attention_forwardBackward"
        assert [x.shape for x in gradients] == [x.shape for x in inputs]


def test_gradients_and_none_share_an_entry():
    inputs = differentiable()
    attention(*inputs)
    for context in (torch.no_grad, contextlib.nullcontext):
        with context():
            out = attention(*inputs)
        assert LOG[-1].kept and out.requires_grad == (context is not torch.no_grad)
    detached = [x.detach() for x in inputs]
    assert not attention(*detached).requires_grad and LOG[-1].kept
    assert attention(detached[0], detached[1], inputs[2]).requires_grad and LOG[-1].kept


def test_an_entry_without_gradients_lacks_what_a_backward_needs():
    inputs = differentiable()
    with torch.no_grad():
        attention(*inputs)
    for kept in (False, True):
        out = attention(*inputs)
        assert LOG[-1].kept == kept
        torch.autograd.grad(out, inputs, DOUT)


def gradients_of(inputs, dout, dlse=None, **options):
    out, lse = attention(*inputs, return_lse=True, **options)
    LOG.clear()
    if dlse is None:
        return torch.autograd.grad(out, inputs, dout)
    return torch.autograd.grad((out, lse), inputs, (dout, dlse))


DOUT, DLSE = torch.ones_like(Q), torch.ones(2, 4, 40)
BACKWARDS = {
    "strides-of-dout": ((DOUT,), (torch.zeros(2, 40, 4, 72, dtype=torch.float16)[..., :64],)),
    "alignment-of-dout": ((DOUT,), (misaligned(DOUT, 4),)),
    "presence-of-dlse": ((DOUT,), (DOUT, DLSE)),
    "strides-of-dlse": ((DOUT, DLSE), (DOUT, DLSE.transpose(1, 2).contiguous().transpose(1, 2))),
}


@pytest.mark.parametrize("component", BACKWARDS)
def test_a_changed_gradient_is_seen(component):
    inputs = differentiable()
    before, after = BACKWARDS[component]
    for n in range(3):
        gradients_of(inputs, *before)
        assert LOG[-1].kept == (n > 1)
    kept = LOG[-1]
    gradients_of(inputs, *after)
    got = LOG[-1]
    keyed_plan.forget()
    gradients_of(inputs, *after)
    assert not got.kept and got[1:] != kept[1:] and len(got.launches) == len(LOG[-1].launches)
    assert [x.constants for x in got.launches] == [x.constants for x in LOG[-1].launches]


def test_a_kept_backward_launches_what_a_posed_one_does():
    """With the same out and lse, which the graph keeps."""
    inputs = differentiable()
    for engine in ("simt", "mma"):
        for _ in range(2):
            out = attention(*inputs, engine=engine)
        assert LOG[-1].kept
        launched = []
        for _ in range(2):
            torch.autograd.grad(out, inputs, DOUT, retain_graph=True)
            launched.append(LOG[-1])
        assert [x.kept for x in launched] == [False, True] and launched[0][1:] == launched[1][1:]


def required(x):
    return x.clone().requires_grad_()


MASK = torch.ones(2, 1, 40, 40, dtype=torch.bool)
WITH_ARRAYS = {
    "bias": lambda: dict(bias=required(BIAS)),
    "bias-without-gradient": lambda: dict(bias=BIAS),
    "sink": lambda: dict(sink=required(SINK)),
    "alibi": lambda: dict(alibi_slopes=SLOPES[1]),
    "mask-and-lengths": lambda: dict(mask=MASK, q_lengths=indices(2), kv_lengths=indices(2)),
    "all": lambda: dict(bias=required(BIAS), sink=required(SINK), alibi_slopes=SLOPES[0], mask=MASK),
    "packed": lambda: dict(cu_seqlens=indices(3)),
    "packed-with-sink": lambda: dict(cu_seqlens=indices(3), sink=required(SINK), alibi_slopes=SLOPES[1]),
}


def attention_of(inputs, cu_seqlens=None, longest=(40, 40), **options):
    """Return out and lse of a padded batch, or with cu_seqlens of a packed one."""
    options = {"backend": "simulator", "engine": "simt", "return_lse": True} | options
    if cu_seqlens is None:
        return cupy_flash.attention(*inputs, **options)
    tokens = (x.flatten(0, 1) for x in inputs)
    return cupy_flash.attention_varlen(*tokens, cu_seqlens, cu_seqlens, *longest, **options)


@pytest.mark.parametrize("form", WITH_ARRAYS)
@pytest.mark.parametrize("engine", ["simt", "mma"])
def test_a_call_with_other_arrays_is_served_with_its_backward(form, engine, unread):
    """It launches what a posed one does, and each gradient has the shape of its input."""
    for n in range(3):
        inputs, options = differentiable(), WITH_ARRAYS[form]()
        wanted = [*inputs, *(x for x in options.values() if x.requires_grad)]
        LOG.clear()
        out, _ = attention_of(inputs, engine=engine, **options)
        dout = torch.ones_like(out)
        gradients = torch.autograd.grad(out, wanted, dout, retain_graph=True)
        assert [launched.kept for launched in LOG] == [n > 0, n > 1]
        assert [x.shape for x in gradients] == [x.shape for x in wanted]
    keyed_plan._entries[next(iter(keyed_plan._entries))].backwards.clear()
    torch.autograd.grad(out, wanted, dout)
    _, served, posed_again = LOG
    assert not posed_again.kept and posed_again[1:] == served[1:]


# {component: (options of what is kept, options of the call whose forward or backward must be another)}
CHANGED_WITH_GRADIENTS = {
    "bias-gradient": (dict(bias=required(BIAS)), dict(bias=BIAS)),
    "shape-of-bias": (dict(bias=required(BIAS)), dict(bias=required(BIAS[:, :1]))),
    "strides-of-bias": (dict(bias=required(BIAS)), dict(bias=BIAS.transpose(2, 3).requires_grad_())),
    "dtype-of-bias": (dict(bias=required(BIAS)), dict(bias=required(BIAS.float()))),
    "dtype-of-sink": (dict(sink=required(SINK)), dict(sink=required(SINK.half()))),
    "which-is-present": (dict(sink=required(SINK)), dict(alibi_slopes=SLOPES[0])),
    "shape-of-alibi": (dict(alibi_slopes=SLOPES[0]), dict(alibi_slopes=SLOPES[1])),
    "packed": ({}, dict(cu_seqlens=indices(3))),
    "sequences": (dict(cu_seqlens=indices(3)), dict(cu_seqlens=indices(4))),
    "max-seqlen": (dict(cu_seqlens=indices(3)), dict(cu_seqlens=indices(3), longest=(80, 80))),
}


@pytest.mark.parametrize("component", CHANGED_WITH_GRADIENTS)
def test_a_changed_component_is_seen_with_gradients(component, unread):
    inputs = differentiable()

    def launches(options):
        LOG.clear()
        out, _ = attention_of(inputs, **options)
        torch.autograd.grad(out, inputs, torch.ones_like(out))
        return [[[launch.text_key, launch.grid] for launch in each.launches] + [each.arguments] for each in LOG]

    before, after = CHANGED_WITH_GRADIENTS[component]
    for _ in range(3):
        kept = launches(before)
    assert all(launched.kept for launched in LOG)
    got = launches(after)
    assert not LOG[1].kept
    keyed_plan.forget()
    expected = launches(after)
    assert [x[:-1] for x in got] == [x[:-1] for x in expected] and got[0] == expected[0] and got != kept


@pytest.mark.parametrize("asked", [(True, True), (True, False), (False, True), (False, False)])
@pytest.mark.parametrize("engine", ["simt", "mma"])
def test_a_call_with_mods_is_served_with_its_backward(engine, asked):
    """Only floating arrays have gradients that a score_mod reads; offsets and the limit of the mask_mod have none."""
    offsets, limit = torch.zeros(4, dtype=torch.int32), torch.zeros(4)

    def modified(first, second):
        return dict(
            score_mod=lambda score, b, h, i, j: score * second[h] + first[h, i - j + offsets[h]],
            mask_mod=lambda b, h, i, j: i >= j + limit[h],
        )

    for n in range(3):
        inputs = differentiable()
        captured = [x.requires_grad_(want) for x, want in zip((torch.zeros(4, 80), torch.ones(4)), asked, strict=True)]
        wanted = [*inputs, *(x for x in captured if x.requires_grad)]
        LOG.clear()
        out = attention(*inputs, engine=engine, **modified(*captured))
        assert "cupy_flash_modified_attention_forward" in out.grad_fn.name()
        gradients = torch.autograd.grad(out, wanted, DOUT, retain_graph=True)
        assert [launched.kept for launched in LOG] == [n > 0, n > 1]
        assert [x.shape for x in gradients] == [x.shape for x in wanted]
    keyed_plan._entries[next(iter(keyed_plan._entries))].backwards.clear()
    torch.autograd.grad(out, wanted, DOUT)
    _, served, posed_again = LOG
    assert not posed_again.kept and posed_again[1:] == served[1:]


def test_which_captured_arrays_have_a_gradient_is_seen():
    inputs = differentiable()
    launched = {}
    for asked in ((True, False), (False, True), (True, True), (False, False)):
        kept = []
        for _ in range(3):
            first, second = (torch.zeros(4, 80, requires_grad=want) for want in asked)
            LOG.clear()
            out = attention(
                *inputs, score_mod=lambda score, b, h, i, j, f=first, s=second: score + f[h, i - j] * s[h, i]
            )
            wanted = [x for x in (first, second) if x.requires_grad]
            gradients = torch.autograd.grad(out, [*inputs, *wanted], DOUT)
            assert [x.shape for x in gradients[3:]] == [x.shape for x in wanted]
            kept.append([x.kept for x in LOG])
            launched[asked] = tuple(launch.text_key for launch in LOG[-1].launches)
        assert kept == [[bool(launched) and len(launched) > 1, False], [True, len(launched) > 1], [True, True]]
    assert len(set(launched.values())) == 4


def test_the_options_of_a_forward_are_those_of_its_backward():
    inputs = differentiable()
    for scale in (1.0, 2.0) * 3:
        gradients_of(inputs, DOUT, scale=scale)
        got = LOG[-1]
    keyed_plan.forget()
    gradients_of(inputs, DOUT, scale=1.0)
    assert got.kept and [x[0] for x in got.arguments] != [x[0] for x in LOG[-1].arguments]


def test_a_saved_tensor_whose_memory_was_replaced_is_seen():
    """`x.data = y` changes strides without a new version of x."""
    inputs = differentiable()
    for _ in range(3):
        gradients_of(inputs, DOUT)
    assert LOG[-1].kept
    out, _ = attention(*inputs, return_lse=True)
    with torch.no_grad():
        inputs[1].data = WIDE[1]
    torch.autograd.grad(out, inputs, DOUT)
    assert not LOG[-1].kept


def test_second_derivatives_are_recorded():
    inputs = differentiable(dtype=torch.float32)
    for _ in range(3):
        out = attention(*inputs)
        torch.autograd.grad(out, inputs, torch.ones_like(out), retain_graph=True)
    assert LOG[-1].kept
    dq, *_ = torch.autograd.grad(out, inputs, torch.ones_like(out), create_graph=True)
    assert dq.requires_grad and not LOG[-1].kept


def test_hooks_of_saved_tensors_pose():
    inputs = differentiable()
    packed = []
    for _ in range(2):
        attention(*inputs)
    assert LOG[-1].kept
    with torch.autograd.graph.saved_tensors_hooks(lambda x: packed.append(x) or x, lambda x: x):
        attention(*inputs)
    assert not LOG[-1].kept and len(packed) == 5
    checkpoint(lambda q: attention(q, *inputs[1:]), inputs[0], use_reentrant=False).sum().backward()
    assert inputs[0].grad is not None


# A function mode is inactive inside of the function that it sees, here autograd.grad.
@pytest.mark.parametrize("observer", ["dispatch-mode", "profiler", "autocast", "deterministic"])
def test_an_observed_backward_is_posed(observer):
    inputs = differentiable()
    for _ in range(3):
        gradients_of(inputs, DOUT)
    assert LOG[-1].kept
    out, _ = attention(*inputs, return_lse=True)
    with OBSERVED[observer]():
        torch.autograd.grad(out, inputs, DOUT)
    assert not LOG[-1].kept


def test_backwards_are_bounded_and_follow_the_evidence(monkeypatch):
    monkeypatch.setattr(keyed_autograd, "BACKWARDS", 2)
    inputs = differentiable()
    attention(*inputs)
    for n in range(1, 8):
        out = attention(*inputs)
        torch.autograd.grad(out, inputs, misaligned(DOUT, n))
        (entry,) = keyed_plan._entries.values()
        assert len(entry.backwards) <= 2
    for _ in range(2):
        torch.autograd.grad(attention(*inputs), inputs, DOUT)
    out = attention(*inputs)
    plan.forget()
    torch.autograd.grad(out, inputs, DOUT)
    assert not LOG[-1].kept


def test_a_gradient_that_is_not_needed_is_none():
    q, k, v = differentiable()
    for _ in range(2):
        out = attention(q.detach(), k, v)
    assert LOG[-1].kept
    for _ in range(2):
        out.backward(DOUT, retain_graph=True)
    assert q.grad is None and k.grad is not None


def test_only_lse_may_be_used():
    inputs = differentiable()
    for _ in range(2):
        _, lse = attention(*inputs, return_lse=True)
    gradients = torch.autograd.grad(lse, inputs, DLSE)
    assert [x.shape for x in gradients] == [x.shape for x in inputs]


# Arguments of any type


@pytest.mark.parametrize("function", ["attention", "attention_varlen", "attention_with_kv_cache"])
def test_an_argument_of_any_type_is_served_or_refused_as_if_nothing_were_kept(function, unread, monkeypatch):
    rows = tuple(x[0] for x in (Q, K, V))
    bounds = dict(cu_seqlens_q=indices(3), cu_seqlens_k=indices(3), max_seqlen_q=40, max_seqlen_k=40)
    inputs, options, given = {
        "attention": ((Q, K, V), Options, {}),
        "attention_varlen": (rows, Options, bounds),
        "attention_with_kv_cache": (CACHED, CacheOptions, {"return_lse": True}),
    }[function]
    names = {field.name for field in fields(options)} | (bounds.keys() & given.keys())
    if function == "attention_varlen":
        names -= {"mask", "q_lengths", "kv_lengths", "layout"}

    def called(**more):
        arguments = {"backend": "simulator", "engine": "simt"} | given | more
        try:
            return outcome(lambda: getattr(cupy_flash, function)(*inputs, **arguments))
        except Exception as error:
            return repr(error), False

    called()
    odd = [{name: value} for name in sorted(names) for value in ODD]
    results = [called(**more)[0] for more in odd]
    for module in (transforms, of_cache_on_torch):
        monkeypatch.setattr(module, "call_on_tensors", lambda *_: None)
    for more, result in zip(odd, results, strict=True):
        assert result == called(**more)[0], more


def test_an_argument_of_an_append_of_any_type_is_served_or_refused_as_if_nothing_were_kept(on_simulator, monkeypatch):
    given = dict(zip(("k", "v", "k_cache", "v_cache"), APPENDED, strict=True)) | {"cache_seqlens": 3}

    def called(more):
        try:
            return outcome(lambda: cupy_flash.append_to_kv_cache(**given | more))
        except Exception as error:
            return repr(error), False

    called({})
    odd = [{name: x} for name in inspect.signature(cupy_flash.append_to_kv_cache).parameters for x in ODD]
    results = [called(more)[0] for more in odd]
    monkeypatch.setattr(of_cache_on_torch, "call_on_tensors", lambda *_: None)
    for more, result in zip(odd, results, strict=True):
        assert result == called(more)[0], more
