"""Calls of `scaled_dot_product_attention` from keyed plans: the results, or errors, of calls that are not kept."""

import contextlib
import functools
import inspect

import kept_plans
import pytest
import torch
import torch.nn.functional as F
from odd_arguments import ODD
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

from cupy_flash import device, keyed_plan
from cupy_flash.adapters import torch as adapter
from cupy_flash.adapters.torch import keyed_sdpa
from cupy_flash.plan import measurements

SERVED = []


@pytest.fixture(autouse=True)
def without_entries(monkeypatch):
    """On a machine with AVX-512 the engine would serve by name only."""

    def run(call, original=keyed_sdpa.run):
        out = original(call)
        SERVED.append(out is not None)
        return out

    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    monkeypatch.setattr(keyed_sdpa, "run", run)
    keyed_plan.forget()
    yield
    keyed_plan.forget()


def tensors(q_len=1, kv_len=70, heads=4, kv_heads=4, dim=16, dtype=torch.float32, heads_first=False):
    """Return query, key and value (B, H, S, E), as views of (B, S, H, E) unless `heads_first`."""
    torch.manual_seed(36)
    drawn = [torch.randn(2, n, h, dim, dtype=dtype) for n, h in ((q_len, heads), *((kv_len, kv_heads),) * 2)]
    return tuple(x.transpose(1, 2).contiguous() if heads_first else x.transpose(1, 2) for x in drawn)


def outcome(inputs, options):
    """Return a result with its layout, or an error, and whether the key of the call served it."""
    SERVED.clear()
    try:
        out = adapter.scaled_dot_product_attention(*inputs, **options)
    except Exception as error:
        return (type(error), str(error)), False
    strides = [stride for stride, extent in zip(out.stride(), out.shape, strict=True) if extent > 1]
    numbers = out.detach().contiguous().view(torch.uint8).numpy().tobytes()
    return (numbers, out.shape, strides, out.dtype, type(out)), any(SERVED)


posed = functools.partial(kept_plans.posed, outcome)


def base(inputs, options=None):
    """Keep a call, and check that it is served in other memory, with other numbers."""
    others = tuple((x + 1).as_strided(x.shape, x.stride()) for x in map(dense, inputs))
    kept_plans.check_kept(outcome, inputs, options or {}, others)


def dense(x):
    """Copy a tensor with its strides."""
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype).copy_(x)


FORMS = {
    "one-query": (tensors(), {}),
    "heads-first": (tensors(q_len=5, heads_first=True), {}),
    "heads-last": (tensors(q_len=5), {}),
    "causal": (tensors(q_len=40), dict(is_causal=True)),
    "groups": (tensors(heads=6, kv_heads=2), dict(enable_gqa=True)),
    "scale": (tensors(q_len=3), dict(scale=0.3)),
    "float64": (tensors(q_len=3, dtype=torch.float64), {}),
    "one-head": (tensors(q_len=40, heads=1, kv_heads=1), {}),
}


@pytest.mark.parametrize("form", FORMS)
def test_an_entry_computes_what_a_posed_call_does(form):
    base(*FORMS[form])
    out = adapter.scaled_dot_product_attention(*FORMS[form][0], **FORMS[form][1])
    assert SERVED[-1] and not out.requires_grad


Q, K, V = tensors()


def moved(x, elements):
    """Copy a tensor with its strides to memory that starts some elements after an aligned address."""
    return torch.zeros(x.numel() + elements, dtype=x.dtype).as_strided(x.shape, x.stride(), elements).copy_(x)


# {component: (arguments of what is kept, arguments of a call that differs from it in that alone)}
PLAIN = (Q, K, V), {}
GROUPS = tensors(heads=6, kv_heads=2)
CHANGES = {
    "shape": (PLAIN, (tensors(q_len=2), {})),
    "shape-of-query": (((Q, K, V), {}), ((tensors(q_len=2)[0], K, V), {})),
    "shape-of-key": (PLAIN, ((Q, K[:, :, :60], V), {})),
    "shape-of-value": (PLAIN, ((Q, K, V[..., :8]), {})),
    "strides-of-query": ((tensors(q_len=5), {}), ((tensors(q_len=5)[0].contiguous(), *tensors(q_len=5)[1:]), {})),
    "strides-of-key": (PLAIN, ((Q, K.mT.contiguous().mT, V), {})),
    "strides-of-value": (PLAIN, ((Q, K, V.mT.contiguous().mT), {})),
    "alignment-of-query": (PLAIN, ((moved(Q, 1), K, V), {})),
    "alignment-of-key": (PLAIN, ((Q, moved(K, 1), V), {})),
    "alignment-of-value": (PLAIN, ((Q, K, moved(V, 1)), {})),
    "alignment-to-64": (PLAIN, ((Q, moved(K, 4), V), {})),
    "dtype": (PLAIN, (tensors(dtype=torch.float64), {})),
    "dtype-of-query": (PLAIN, ((Q.view(torch.int32), K, V), {})),
    "dtype-of-key": (PLAIN, ((Q, K.view(torch.int32), V), {})),
    "dtype-of-value": (PLAIN, ((Q, K, V.view(torch.int32)), {})),
    "device": (PLAIN, ((Q, K.to("meta"), V), {})),
    "is-causal": ((tensors(q_len=70), {}), (tensors(q_len=70), dict(is_causal=True))),
    "is-causal-type": ((tensors(q_len=70), {}), (tensors(q_len=70), dict(is_causal=0))),
    "scale": (PLAIN, ((Q, K, V), dict(scale=0.7))),
    "scale-type": (((Q, K, V), dict(scale=1.0)), ((Q, K, V), dict(scale=True))),
    "enable-gqa": ((GROUPS, dict(enable_gqa=True)), (GROUPS, {})),
    "enable-gqa-type": ((GROUPS, dict(enable_gqa=True)), (GROUPS, dict(enable_gqa=1))),
    "mask": (PLAIN, ((Q, K, V), dict(attn_mask=torch.arange(70) < 9))),
    "bias": (PLAIN, ((Q, K, V), dict(attn_mask=torch.arange(70.0)))),
    "dropout": (PLAIN, ((Q, K, V), dict(dropout_p=1.0))),
    "dropout-type": (PLAIN, ((Q, K, V), dict(dropout_p=False))),
    "rank": (PLAIN, ((Q[0], K[0], V[0]), {})),
    "batch-of-query": (PLAIN, ((Q[:1], K, V), {})),
}
# The same numbers
OF_MEMORY = ("strides-of-key", "strides-of-value", *(component for component in CHANGES if "alignment" in component))


@pytest.mark.parametrize("component", CHANGES)
def test_a_changed_component_is_seen(component):
    (inputs, options), (others, other_options) = CHANGES[component]
    base(inputs, options)
    for n in range(2):  # the second call may have its own entry
        result, was_served = outcome(others, other_options)
        assert result == posed(others, other_options) and not (was_served and n == 0)
    if component not in OF_MEMORY:
        assert result != posed(inputs, options)
    assert outcome(inputs, options) == (posed(inputs, options), True)


@pytest.mark.parametrize("place", range(3))
def test_a_tensor_on_another_device_is_seen(place, monkeypatch):
    """On meta, as if it had memory there."""
    address, inputs = torch.Tensor.data_ptr, [Q, K, V]
    monkeypatch.setattr(torch.Tensor, "data_ptr", lambda x: keyed_plan.ALIGNMENT if x.is_meta else address(x))
    base((Q, K, V))
    inputs[place] = inputs[place].to("meta")
    assert outcome(inputs, {}) == (posed(inputs, {}), False)


class _Functions(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, function, types, arguments=(), options=None):
        return function(*arguments, **(options or {}))


class _Operators(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        return function(*arguments, **(options or {}))


@contextlib.contextmanager
def _deterministic():
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@contextlib.contextmanager
def _rounded_products():
    setting = torch.backends.mkldnn.matmul
    before, setting.fp32_precision = setting.fp32_precision, "bf16"
    try:
        yield
    finally:
        setting.fp32_precision = before


def _set(owner, name, value):
    @contextlib.contextmanager
    def changed():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(owner, name, value)
            yield

    return changed


@contextlib.contextmanager
def _backend():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUPY_FLASH_BACKEND", "cuda")
        yield


# Modes, hooks and settings of torch that change or observe a call.
AROUND = {
    "functions": _Functions,
    "operators": _Operators,
    "dual-level": forward_ad.dual_level,
    "profiler": lambda: torch.autograd.profiler.profile(use_kineto=False),
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "deterministic": _deterministic,
    "backend": _backend,
    "generation": _set(measurements, "generation", measurements.generation + 1),
    "precision": _rounded_products,
    "fork": _set(device, "_forked", True),
    "schema": _set(device, "_changed_schema", lambda: "changed"),
    "activated": _set(torch.nn.attention, "current_flash_attention_impl", lambda: "cupy_flash"),
}


@pytest.mark.parametrize("around", AROUND)
def test_what_changes_or_observes_a_call_is_seen(around):
    base((Q, K, V))
    with AROUND[around]():
        assert outcome((Q, K, V), {}) == (posed((Q, K, V), {}), False)
    assert outcome((Q, K, V), {})[1]


class Wrapped(torch.Tensor):
    """A subclass."""


@pytest.mark.parametrize("place", range(3))
@pytest.mark.parametrize(
    "unusual",
    [
        lambda x: x.as_subclass(Wrapped),
        torch._neg_view,
        lambda x: torch._efficientzerotensor(x.shape, dtype=x.dtype),
        lambda x: x.to_sparse(),
        lambda x: x[:, :, :0],
        lambda x: x.numpy(),
    ],
    ids=["subclass", "negated", "zeros", "sparse", "empty", "no-tensor"],
)
def test_an_unusual_tensor_is_posed(unusual, place):
    inputs = list(tensors(heads_first=True))
    base(tuple(inputs))
    inputs[place] = unusual(inputs[place])
    assert outcome(inputs, {}) == (posed(inputs, {}), False)


def test_transforms_and_traces_are_posed():
    base((Q, K, V))
    call = adapter.scaled_dot_product_attention
    expected = call(Q, K, V)
    SERVED.clear()
    torch.testing.assert_close(torch.func.vmap(call)(Q[None], K[None], V[None])[0], expected)
    gradient = torch.func.grad(lambda q: call(q, K, V).sum())(Q)
    assert gradient.shape == Q.shape and not any(SERVED)
    torch.func.grad(lambda x: (call(Q, K, V), x.sum())[1])(torch.ones(2))
    assert not any(SERVED)


def test_contents_that_the_operator_does_not_serve_are_posed():
    """NaN in a hidden value, scores that overflow, and lse of 0."""
    options = dict(is_causal=True)
    inputs = tensors(q_len=70)
    base(inputs, options)
    for place, value in ((2, float("nan")), (1, float("inf")), (0, -3e38)):
        changed = tuple(dense(x) for x in inputs)
        changed[place][0, :, 40] = value
        if place == 0:
            changed[1][...] = 3e38
        assert outcome(changed, options) == (posed(changed, options), False)


@pytest.mark.parametrize("heads_first", [True, False])
def test_gradients_of_a_served_call(heads_first):
    results = []
    for n in range(3):
        inputs = [x.requires_grad_() for x in tensors(q_len=9, kv_len=9, heads_first=heads_first)]
        with adapter.sdpa():
            out = F.scaled_dot_product_attention(*inputs)
        assert SERVED[-1] == (n > 0)
        results.append((out.detach(), *torch.autograd.grad(out.square().sum(), inputs)))
    assert all(map(torch.equal, results[2], results[0]))


def test_an_entry_that_was_kept_without_gradients_records_none_of_them():
    inputs = tensors(q_len=9, kv_len=9)
    base(inputs)
    differentiable = [x.detach().clone().requires_grad_() for x in inputs]
    for n in range(2):
        out = adapter.scaled_dot_product_attention(*differentiable)
        assert out.requires_grad and SERVED[-1] == (n > 0)
    with torch.inference_mode():
        assert adapter.scaled_dot_product_attention(*inputs).is_inference() and SERVED[-1]


def test_an_argument_of_any_type_is_served_or_refused_as_if_nothing_were_kept(monkeypatch):
    inputs = tensors(q_len=2, kv_len=3, heads=2, kv_heads=2, dim=4)
    base(inputs)
    names = list(inspect.signature(adapter.scaled_dot_product_attention).parameters)
    given = [dict(zip(("query", "key", "value"), inputs, strict=True)) | {name: x} for name in names for x in ODD]
    results = [outcome((), options)[0] for options in given]
    monkeypatch.setattr(keyed_sdpa, "call_of", lambda *_: None)
    for options, result in zip(given, results, strict=True):
        assert result == outcome((), options)[0], options
