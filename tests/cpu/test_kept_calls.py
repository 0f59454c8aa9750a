"""Calls of torch's operators from keyed plans (cupy_flash/keyed_plan.py): the results, or errors, of posed calls."""

import functools
import gc
import warnings
import weakref
from contextlib import nullcontext
from dataclasses import fields

import kept_plans
import numpy as np
import pytest
import torch
from odd_arguments import ODD
from torch.utils._python_dispatch import TorchDispatchMode

import cupy_flash
from cupy_flash import device, dispatch, keyed_plan
from cupy_flash.cpu import aten
from cupy_flash.plan import plan
from cupy_flash.problem.records import Options

RANDOM = np.random.default_rng(36)


@pytest.fixture(autouse=True)
def without_entries(monkeypatch):
    """On a machine with AVX-512 the engine would serve by name only."""
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    keyed_plan.forget()
    yield
    keyed_plan.forget()


def arrays(q_len=1, kv_len=70, heads=4, kv_heads=4, dim=16, dtype=np.float32, batch=2):
    shapes = (batch, q_len, heads, dim), *((batch, kv_len, kv_heads, dim),) * 2
    return tuple(RANDOM.normal(size=shape).astype(dtype) for shape in shapes)


def on_torch(inputs):
    return tuple(torch.from_numpy(x).clone() for x in inputs)


def served():
    return sum(entry.served for entry in keyed_plan._entries.values() if entry is not None)


def outcome(inputs, options):
    """Return the bytes of results, or an error, and whether an entry served the call."""
    before = served()
    try:
        results = cupy_flash.attention(*inputs, return_lse=True, **options)
    except (TypeError, ValueError) as error:
        return (type(error), str(error)), False
    return tuple((np.asarray(x).tobytes(), tuple(x.shape), str(x.dtype), type(x)) for x in results), served() > before


posed = functools.partial(kept_plans.posed, outcome)


def base(inputs, options=None):
    """Keep a call, and check that it is served in other memory, with other numbers."""
    others = tuple(x + 1 for x in inputs)
    kept_plans.check_kept(outcome, inputs, options or {}, others)


FORMS = {
    "one-query": (arrays(), {}),
    "one-query-causal": (arrays(), dict(causal=True)),
    "heads-first": (tuple(x.swapaxes(1, 2).copy() for x in arrays()), dict(layout="bhsd")),
    "padded": (arrays(kv_len=71, q_len=3), {}),
    "float64": (arrays(kv_len=71, dtype=np.float64), dict(scale=0.3)),
    "groups": (arrays(heads=6, kv_heads=2), {}),
    "groups-of-few-queries": (arrays(q_len=5, heads=6, kv_heads=2), {}),
    "square": (arrays(q_len=70, heads=6, kv_heads=2), dict(causal=True)),
    "top-left": (arrays(q_len=40), dict(causal="top_left")),
}


@pytest.mark.parametrize("convert", [tuple, on_torch], ids=["numpy", "torch"])
@pytest.mark.parametrize("form", FORMS)
def test_an_entry_computes_what_a_posed_call_does(form, convert):
    inputs, options = FORMS[form]
    base(convert(inputs), dict(engine="aten") | options)
    out, lse = cupy_flash.attention(*convert(inputs), return_lse=True, engine="aten", **options)
    assert served() == 2
    for x in (out, lse):
        contiguous = x.is_contiguous() and not x._is_view() if convert is on_torch else x.flags.c_contiguous
        assert contiguous and not (convert is on_torch and x.requires_grad)


Q, K, V = arrays()
WIDE = np.concatenate((K, K), axis=-1)[..., :16]
# {component: (inputs, options) of a call that differs from that of Q, K and V without options in that alone}
CHANGES = {
    "shape": (arrays(batch=1), {}),
    "shape-of-keys": ((Q, *arrays(kv_len=66)[1:]), {}),
    "strides": ((Q, WIDE, V), {}),
    "innermost-stride": ((Q, np.asfortranarray(K), V), {}),
    "negative-stride": ((Q, K[:, ::-1], V), {}),
    "alignment": ((Q, np.concatenate(([0], K.ravel())).astype(np.float32)[1:].reshape(K.shape), V), {}),
    "dtype": (arrays(dtype=np.float64), {}),
    "dtype-of-keys": ((Q, K.view(np.int32), V), {}),
    "framework": (on_torch((Q, K, V)), {}),
    "class": ((Q, np.ma.masked_array(K), V), {}),
    "values-inside-keys": ((Q, K, None), dict(head_dim_v=16)),
    "scale": ((Q, K, V), dict(scale=0.7)),
    "scale-type": ((Q, K, V), dict(scale=True)),
    "causal": ((Q, K, V), dict(causal="top_left")),
    "window": ((Q, K, V), dict(window=(3, 3))),
    "softcap": ((Q, K, V), dict(softcap=1.0)),
    "layout": ((Q, K.swapaxes(1, 2).copy(), V.swapaxes(1, 2).copy()), dict(layout="bhsd")),
    "deterministic": ((Q, K, V), dict(deterministic=True)),
    "dropout": ((Q, K, V), dict(dropout=1.0)),
    "engine": ((Q, K, V), dict(engine="cpu")),
    "sink": ((Q, K, V), dict(sink=np.ones(4, np.float32))),
    "bias": ((Q, K, V), dict(bias=RANDOM.normal(size=(1, 4, 1, 70)).astype(np.float32))),
    "mask": ((Q, K, V), dict(mask=np.arange(70) < 9)),
    "alibi": ((Q, K, V), dict(alibi_slopes=np.ones(4, np.float32))),
    "q-lengths": ((Q, K, V), dict(q_lengths=np.array([0, 1], np.int32))),
    "kv-lengths": ((Q, K, V), dict(kv_lengths=np.array([3, 70], np.int32))),
    "selected": ((Q, K, V), dict(selected=np.arange(3, dtype=np.int32).reshape(1, 1, 1, 3))),
}
SAME_NUMBERS = ("strides", "innermost-stride", "alignment", "deterministic")


@pytest.mark.parametrize("component", CHANGES)
@pytest.mark.parametrize("engine", [None, "cpu_decode"])
def test_a_changed_component_is_seen(component, engine):
    given = {} if engine is None else dict(engine=engine)
    inputs, options = CHANGES[component]
    options = given | options
    base((Q, K, V), given)
    for n in range(2):  # the second call has its own entry, or None in place of one
        result, was_served = outcome(inputs, options)
        assert result == posed(inputs, options) and not (was_served and n == 0)
    if component not in SAME_NUMBERS:
        assert posed(inputs, options) != posed((Q, K, V), given)
    assert outcome((Q, K, V), given) == (posed((Q, K, V), given), True)


# {what: (options of what is kept, options that differ from them in a value or in a type alone)}
VALUES = {
    "window": (dict(window=(3, 3)), dict(window=(3, 2))),
    "window-type": (dict(window=(3, 3)), dict(window=(3, 3.0))),
    "scale": (dict(scale=0.3), dict(scale=0.7)),
    "scale-type": (dict(scale=1.0), dict(scale=True)),
    "softcap": (dict(softcap=1.0), dict(softcap=2.0)),
    "softcap-type": (dict(softcap=1.0), dict(softcap=True)),
    "causal": (dict(causal=False), dict(causal=True)),
    "causal-type": (dict(causal=True), dict(causal=1)),
    "deterministic": (dict(deterministic=False), dict(deterministic=True)),
    "deterministic-type": (dict(deterministic=False), dict(deterministic=0)),
    "layout": (dict(layout="bshd"), dict(layout="bhsd")),
}


@pytest.mark.parametrize("what", VALUES)
def test_a_changed_value_or_type_of_an_option_of_few_queries_is_seen(what):
    before, after = (options | dict(engine="cpu_decode") for options in VALUES[what])
    base((Q, K, V), before)
    assert outcome((Q, K, V), after) == (posed((Q, K, V), after), False)


@pytest.mark.parametrize("engine", ["aten", "cpu_decode"])
def test_a_tensor_on_another_device_is_seen(engine, monkeypatch):
    """On meta, as if it had memory there."""
    address, inputs = torch.Tensor.data_ptr, on_torch((Q, K, V))
    monkeypatch.setattr(torch.Tensor, "data_ptr", lambda x: keyed_plan.ALIGNMENT if x.is_meta else address(x))
    base(inputs, dict(engine=engine))
    for place in range(3):
        others = [x.to("meta") if n == place else x for n, x in enumerate(inputs)]
        assert outcome(others, dict(engine=engine)) == (posed(others, dict(engine=engine)), False)


# As CHANGES, of tensors
OF_TENSORS = {
    "shape": lambda q, k, v: (q, k[:, :66], v[:, :66]),
    "strides": lambda q, k, v: (q, k.mT.contiguous().mT, v),
    "dtype": lambda q, k, v: (q.double(), k.double(), v.double()),
    "alignment": lambda q, k, v: (q, torch.cat((k.new_zeros(1), k.ravel()))[1:].view(k.shape), v),
}


@pytest.mark.parametrize("component", OF_TENSORS)
@pytest.mark.parametrize("engine", ["aten", "cpu_decode"])
def test_a_changed_component_of_tensors_is_seen(component, engine):
    inputs, options = on_torch((Q, K, V)), dict(engine=engine)
    base(inputs, options)
    others = OF_TENSORS[component](*inputs)
    assert outcome(others, options) == (posed(others, options), False)


@pytest.mark.parametrize("engine", ["aten", "cpu_decode"])
def test_the_evidence_and_the_backend_of_a_call_are_seen(engine, monkeypatch):
    inputs, options = on_torch((Q, K, V)), dict(engine=engine)
    base(inputs, options)
    plan.forget()
    assert [outcome(inputs, options)[1] for _ in range(2)] == [False, True]
    monkeypatch.setenv("CUPY_FLASH_BACKEND", "cuda")
    assert outcome(inputs, options) == (posed(inputs, options), False)


def test_contents_that_the_operator_does_not_serve_are_posed():
    """NaN in a hidden value, rows whose scores all overflow, and lse of 0."""
    options = dict(causal="top_left", engine="aten")
    inputs = arrays(q_len=4, kv_len=5)
    base(inputs, options)
    for place, value in ((2, np.nan), (0, -3e38), (1, np.inf)):
        changed = tuple(x.copy() for x in inputs)
        changed[place][0, 3] = value
        if place == 0:
            changed[1][...] = 3e38
        assert outcome(changed, options) == (posed(changed, options), False)
    q, k, v = inputs
    zeros = (q[:, :1] * 0, k[:, :1] * 0, v[:, :1])  # one key with a score of 0
    for _ in range(3):
        assert outcome(zeros, dict(engine="aten")) == (posed(zeros, dict(engine="aten")), False)
    out, lse = cupy_flash.attention(*zeros, return_lse=True, engine="aten")
    np.testing.assert_array_equal(out, zeros[2])
    assert (lse == 0).all()


class _Mode(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        return function(*arguments, **(options or {}))


def _rounded_products(_):
    torch.backends.mkldnn.matmul.fp32_precision = "bf16"


STATES = {
    "precision": _rounded_products,
    "fork": lambda monkeypatch: monkeypatch.setattr(device, "_forked", True),
    "schema": lambda monkeypatch: monkeypatch.setattr(device, "_changed_schema", lambda: "changed"),
    "activated": lambda monkeypatch: monkeypatch.setattr(
        torch.nn.attention, "current_flash_attention_impl", lambda: "cupy_flash"
    ),
    "recording": lambda monkeypatch: [
        monkeypatch.setattr(dispatch, name, value) for name, value in (("_RECORD", "x"), ("_record", lambda *_: None))
    ],
}


@pytest.mark.parametrize("state", STATES)
def test_the_state_of_the_process_is_seen(state, monkeypatch):
    """Also by an entry that was kept before."""
    if state != "recording":
        base((Q, K, V))
    before = torch.backends.mkldnn.matmul.fp32_precision
    try:
        STATES[state](monkeypatch)
        for _ in range(2):
            assert outcome((Q, K, V), {}) == (posed((Q, K, V), {}), False)
    finally:
        monkeypatch.undo()
        torch.backends.mkldnn.matmul.fp32_precision = before


@pytest.mark.parametrize("observer", [_Mode, torch.autograd.profiler.profile, nullcontext])
def test_an_observed_call_on_tensors_is_posed(observer):
    inputs = on_torch((Q, K, V))
    base(inputs)
    with observer():
        assert outcome(inputs, {})[1] == (observer is nullcontext)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert cupy_flash.attention(*inputs).dtype == torch.bfloat16


def test_a_call_under_a_mode_is_posed_on_arrays_too():
    base((Q, K, V))
    with _Mode():
        assert not outcome((Q, K, V), {})[1]


def test_read_only_arrays_give_no_warning():
    inputs = arrays()
    for x in inputs:
        x.flags.writeable = False
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for n in range(2):
            assert outcome(inputs, {})[1] == (n > 0)


def test_gradients_of_a_served_call():
    """A node saves what a posed one does, and a backward is posed."""
    results = []
    for n in range(3):
        inputs = [x.clone().requires_grad_() for x in on_torch(arrays_of_one_seed())]
        before = served()
        out = cupy_flash.attention(*inputs)
        assert served() - before == (n > 0)
        results.append((out.detach(), *torch.autograd.grad(out.square().sum(), inputs)))
        if n == 0:
            cupy_flash.attention(*(x.detach() for x in inputs))
    for result in results[1:]:
        assert all(map(torch.equal, result, results[0]))


def arrays_of_one_seed():
    random = np.random.default_rng(0)
    return tuple(random.normal(size=(2, 9, 3, 16)).astype(np.float32) for _ in "qkv")


def test_no_array_is_kept():
    inputs = on_torch(arrays())
    results = [cupy_flash.attention(*inputs) for _ in range(3)]
    assert served() == 2
    references = [weakref.ref(x) for x in (*inputs, *results)]
    del inputs, results
    gc.collect()
    assert not any(reference() is not None for reference in references)


def test_a_call_of_the_engine_cpu_is_posed():
    base((Q, K, V))
    for _ in range(2):
        assert not outcome((Q, K, V), dict(engine="cpu"))[1]


@pytest.mark.parametrize("convert", [tuple, on_torch], ids=["numpy", "torch"])
@pytest.mark.parametrize("form", ["one-query", "one-query-causal", "heads-first", "float64", "groups"])
def test_a_call_of_few_queries_is_served(form, convert):
    """Also with values of other rows than the keys', which torch's operators do not serve."""
    (q, k, v), options = FORMS[form]
    for values in (v, v[..., :8].copy()):
        base(convert((q, k, values)), options | dict(engine="cpu_decode"))


def test_a_call_of_few_queries_on_a_changed_device_is_posed(monkeypatch):
    options = dict(engine="cpu_decode")
    base((Q, K, V), options)
    monkeypatch.setattr(device, "blas_threads", lambda: 1 + Q.shape[0] * 3)
    assert outcome((Q, K, V), options) == (posed((Q, K, V), options), False)


@pytest.mark.parametrize("state", ["mode", "instructions"])
def test_a_call_that_another_engine_served_in_another_state_is_posed(state, monkeypatch):
    """The engine of few queries serves it while torch's operators cannot be called, or only on request."""
    with monkeypatch.context() as patch, _Mode() if state == "mode" else nullcontext():
        if state == "instructions":
            patch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
        base((Q, K, V))
    assert outcome((Q, K, V), {}) == (posed((Q, K, V), {}), False)


@pytest.mark.parametrize("by_product", [True, False], ids=["by-a-product", "by-numpy"])
@pytest.mark.parametrize("is_transposed", [False, True])
def test_results_that_no_entry_returns(by_product, is_transposed):
    ones = np.ones(24, np.float32) if by_product else None
    for place, value in ((None, 1), (0, np.nan), (0, np.inf), (0, -np.inf), (1, np.nan), (1, -np.inf), (1, 0)):
        results = torch.ones(1, 2, 3, 4), torch.ones(1, 2, 3)
        if is_transposed:
            results = torch.ones(1, 3, 2, 4).transpose(1, 2), torch.ones(1, 3, 2).transpose(1, 2)
        if place is not None:
            results[place][0, 1, 2] = value
        assert aten._is_regular(*results, ones) == (place is None)


@pytest.mark.parametrize("by_product", [True, False], ids=["by-a-product", "by-numpy"])
def test_sums_that_overflow_are_no_results_and_give_no_warning(by_product):
    largest = float(np.finfo(np.float32).max)
    results = torch.full((1, 2, 3, 4), largest), torch.ones(1, 2, 3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not aten._is_regular(*results, np.ones(24, np.float32) if by_product else None)


MORE = {
    "values-inside-keys": ((Q, K, None), dict(head_dim_v=8)),
    "sink": ((Q, K, V), dict(sink=np.ones(4, np.float32))),
    "mask": ((Q, K, V), dict(mask=np.arange(70) < 9)),
    "lengths": ((Q, K, V), dict(kv_lengths=np.array([3, 70], np.int32))),
    "softcap": ((Q, K, V), dict(softcap=1.0)),
    "window": ((Q, K, V), dict(window=(3, 3))),
}


@pytest.mark.parametrize("what", MORE)
def test_a_call_of_few_queries_with_more_than_arrays_of_q_k_and_v(what):
    inputs, options = MORE[what]
    base((Q, K, V), dict(engine="cpu_decode"))
    for _ in range(3):
        result, was_served = outcome(inputs, options | dict(engine="cpu_decode"))
        assert result == posed(inputs, options | dict(engine="cpu_decode"))
    assert was_served == (what in ("softcap", "window"))


@pytest.mark.parametrize("by_option", [True, False], ids=["option", "environment"])
def test_arrays_on_the_simulator_are_posed(by_option, monkeypatch):
    x = np.ones((1, 2, 1, 16), np.float32)
    if not by_option:
        monkeypatch.setenv("CUPY_FLASH_BACKEND", "simulator")
    options = {"backend": "simulator"} if by_option else {}
    for _ in range(2):
        np.testing.assert_array_equal(cupy_flash.attention(x, x, x, **options), x)


def test_an_argument_of_any_type_is_served_or_refused_as_if_nothing_were_kept(monkeypatch):
    inputs = arrays(q_len=2, kv_len=3, heads=2, kv_heads=2, dim=4, batch=1)
    cupy_flash.attention(*inputs)

    def called(option):
        try:
            return repr(cupy_flash.attention(*inputs, **option))
        except Exception as error:
            return repr(error)

    odd = [{field.name: value} for field in fields(Options) if field.name != "seed" for value in ODD]
    results = [called(option) for option in odd]
    monkeypatch.setattr(keyed_plan, "call_on_numpy", lambda *_: None)
    for option, result in zip(odd, results, strict=True):
        assert result == called(option), option


def test_a_window_that_is_too_long_is_no_window_of_a_packed_batch():
    """The types of its elements may be those of a window's sides, boundaries and max_seqlen."""
    x, bounds = np.ones((3, 2, 4), np.float32), np.array([0, 3], np.int32)
    cupy_flash.attention_varlen(x, x, x, bounds, bounds, 3, 3, window=(1, 1))
    with pytest.raises(TypeError, match="window"):
        cupy_flash.attention(x[None], x[None], x[None], window=(1, 1, bounds, bounds, 3, 3))
