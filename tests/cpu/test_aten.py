"""The engine aten: torch's flash operators for CPUs, with the semantics of `attention` where theirs differ."""

import importlib.util
import logging
import subprocess
import sys
import threading
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from cases import OPTIONS, Case, Result, assert_bitwise_equal, check, posed
from torch._subclasses.fake_tensor import FakeTensorMode

import cupy_flash
from cupy_flash import device, dispatch
from cupy_flash.arrays import Array
from cupy_flash.cpu import aten
from cupy_flash.cpu import attention as cpu
from cupy_flash.device import Device
from cupy_flash.plan.plan import plan
from cupy_flash.plan.refusals import engine_refusals
from cupy_flash.problem.build import pose
from cupy_flash.problem.records import Options, Saved, UnsupportedError

ROOT = Path(__file__).resolve().parents[2]
DEVICE = Device("cpu", "x86_64", 2, torch_flash="")


@pytest.fixture(autouse=True)
def capability(monkeypatch):
    """A function that changes the instruction set that torch names: AVX2, for which the engine may be chosen."""

    def names(name):
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: name)

    names("AVX2")
    return names


def planned(case, call, saved=None, name="aten"):
    chosen, operands = posed(case, saved, call)
    return plan(chosen.problem._replace(engine=name), chosen.device), operands


def run(case, call=None, name="aten"):
    """Results of an engine, without the gradient of a bias."""
    call, module = call or case.call(), aten if name == "aten" else cpu
    out, lse = (array.numpy() for array in module.forward(*planned(case, call, name=name)))
    saved = Saved(call.dout, out, lse, bias_gradient=False)
    gradients = module.backward(*planned(case, call, saved, name))
    return Result(out, lse, *gradients.map(Array.numpy))


def served(cases):
    """The cases whose forward and backward the engine computes, without a gradient of lse."""
    for name, case in cases.items():
        case = replace(case, dlse=False)
        if not engine_refusals("aten", posed(case)[0].problem._replace(backward=True), DEVICE):
            yield name, case


CASES = {
    "heads-first": Case(layout="bhsd"),
    "heads-first-one-head": Case(layout="bhsd", heads=1, kv_heads=1, batch=2, sink=True),
    "float64": Case(dtype="float64", sink=True),
    "group-of-three": Case(heads=9, kv_heads=3, causal="top_left"),
    "several-tiles": Case(
        q_len=200, kv_len=530, batch=1, heads=2, kv_heads=2, head_dim=4, head_dim_v=4, causal="top_left"
    ),
    "mask-causal": Case(mask="11qk", causal="top_left", sink=True),
    "mask-per-key-causal": Case(mask="b11k", causal="top_left"),
    "mask-per-head-causal": Case(mask="hq1", causal="top_left", q_len=29),
    "mask-float64-bias": Case(mask="qk", bias="b1qk", bias_hides=True, dtype="float64"),
    "packed": Case(packed=True, q_lengths=(19, 0, 7), kv_lengths=(3, 5, 0), batch=3, sink=True),
    "packed-causal": Case(packed=True, q_lengths=(11, 19), kv_lengths=(11, 19), q_len=19, kv_len=19, causal=True),
    "packed-unequal": Case(packed=True, q_lengths=(11, 19), kv_lengths=(9, 19), q_len=19, kv_len=19, causal=True),
    "sink-of-minus-infinity": Case(sink=(-np.inf, 1.0, 2.0, -np.inf), mask="qk"),
    "sink-of-infinity": Case(sink=(np.inf, 1.0, 2.0, 3.0)),
}
LARGE = ("head-dim-128", "head-dim-192", "head-dim-320")  # whose references take seconds
SERVED = {name: case for name, case in (*served(OPTIONS), *served(CASES)) if name not in LARGE}


@pytest.mark.parametrize("case", SERVED.values(), ids=SERVED)
def test_every_option(case):
    check(case, run(case), only=("out", "lse", "dq", "dk", "dv", "dsink"))


def test_the_engine_serves_what_it_names():
    assert set(CASES) <= SERVED.keys()
    assert {
        "plain",
        "causal-square",
        "top-left",
        "mask",
        "mask-per-key",
        "sink",
        "lengths-zero",
        "bias-hides",
    } <= SERVED.keys()


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        (Case(causal=True), "align a causal mask top-left"),
        (Case(causal=True, q_len=18, kv_len=17), "align a causal mask top-left"),  # of one bucket of lengths
        (Case(causal=True, q_len=23, q_lengths=(3, 4)), "align a causal mask top-left"),
        (Case(causal="top_left", scale=-1.0), "must then be positive"),
        (Case(window=(3, 2)), "it takes no window but causal"),
        (Case(window=(3, None)), "it takes no window but causal"),
        (Case(head_dim_v=8), "Dv 8 is not D 16"),
        (Case(dtype="int32"), "int32"),
        (Case(dtype="bfloat16"), "the operators round P to bfloat16, with 1.1 to 1.4 times the errors of cpu"),
        (Case(q_len=0), "no elements"),
        (Case(kv_len=0), "no elements"),
        (Case(batch=0), "no elements"),
        (Case(dropout=0.5), "it takes no dropout"),
        (Case(softcap=1.0), "it takes no softcap"),
        (Case(alibi="h"), "it takes no alibi_slopes"),
        (Case(score_mod="alibi"), "it takes no score_mod or mask_mod"),
        (Case(mask="qk", kv_lengths=(3, 4)), "it takes lengths or a mask, not both"),
    ],
)
def test_refusals(case, reason):
    if case.dtype == "int32":
        problem = posed(Case())[0].problem._replace(dtype=np.dtype("int32"))
    else:
        problem = posed(case)[0].problem
    assert any(reason in each for each in engine_refusals("aten", problem, DEVICE)), problem


def test_refusals_of_a_backward():
    """A gradient of lse or of a bias, and a mask that takes too much memory."""
    case = Case(bias="qk")
    call = case.call()
    saved = Saved(call.dout, call.dout, call.dlse, call.dlse)
    problem = posed(case, saved, call)[0].problem
    reasons = engine_refusals("aten", problem, DEVICE)
    assert reasons == ["the operators take no gradient of lse", "the operators compute no gradient of a bias"]
    assert engine_refusals("aten", problem._replace(dlse=False, bias_gradient=False), DEVICE) == []
    without_scale = problem._replace(dlse=False, bias_gradient=False, scale=0.0)
    assert engine_refusals("aten", without_scale, DEVICE) == [
        "the operators read no factor of a product with a scale of 0, so that NaN reaches no gradient"
    ]
    assert engine_refusals("aten", without_scale._replace(backward=False), DEVICE) == []
    large = problem._replace(backward=False, dlse=False, q_len=4096, kv_len=4097, bias=(4096, 4097))
    assert engine_refusals("aten", large, DEVICE) == ["a mask in float32 takes more than 64 MiB"]
    assert engine_refusals("aten", large._replace(bias=(1, 4097)), DEVICE) == []


def test_random_calls():
    rng = np.random.default_rng(36)

    def pick(*choices):
        return choices[rng.integers(len(choices))]

    for seed in range(16):
        kv_heads, q_len, dim = pick(1, 2), pick(1, 2, 31, 33, 65), pick(1, 5, 8, 24)
        sizes = dict(q_len=q_len, kv_len=pick(q_len, 1, 7, 40), head_dim=dim, head_dim_v=dim)
        sizes["batch"] = max(pick(1, 2), 3 - kv_heads)  # a single head is refused
        case = Case(
            **sizes, kv_heads=kv_heads, heads=kv_heads * pick(1, 3), layout=pick("bshd", "bhsd"), seed=seed,
            causal=pick(False, "top_left"), scale=pick(None, 0.7), sink=pick(False, True), dlse=False,
            mask=pick(None, None, "b11k", "qk", "h1k"), dtype=pick("float32", "float32", "float64"),
            scores=pick("normal", "normal", "signs", "tiny"),
        )  # fmt: skip
        check(case, run(case), only=("out", "lse", "dq", "dk", "dv", "dsink"))


# Strides and memory


def strided(x):
    """Copies of an array of four dimensions with other strides, by name."""
    yield "every-second-element", np.repeat(x, 2, axis=-1)[..., ::2]
    yield "rows-apart", np.concatenate((x, x), axis=-1)[..., : x.shape[-1]]
    for axis in range(4):
        order = [*range(axis), *range(axis + 1, 4), axis]
        yield f"axis-{axis}-innermost", np.ascontiguousarray(x.transpose(order)).transpose(np.argsort(order))
        yield f"axis-{axis}-negative", np.flip(np.ascontiguousarray(np.flip(x, axis)), axis)
    read_only = x.copy()
    read_only.flags.writeable = False
    yield "read-only", read_only


@pytest.mark.parametrize("name", ["q", "k", "v", "dout"])
def test_bits_do_not_depend_on_strides(name):
    """With strides that are not 1 in the last axis the operators return finite numbers that are wrong by 1."""
    case = Case(causal="top_left", dlse=False)
    call = case.call()
    expected = run(case, call)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch warns of read-only arrays
        for what, x in strided(getattr(call, name)):
            assert_bitwise_equal(run(case, call._replace(**{name: x})), expected, what)


def test_bits_do_not_depend_on_the_strides_of_out_and_lse():
    case = Case(dlse=False)
    call = case.call()
    expected = run(case, call)
    for out in dict(strided(expected.out)).values():
        for lse in (expected.lse, np.asfortranarray(expected.lse), np.repeat(expected.lse, 2, axis=-1)[..., ::2]):
            saved = Saved(call.dout, out, lse)
            gradients = aten.backward(*planned(case, call, saved)).map(Array.numpy)
            assert_bitwise_equal(Result(expected.out, expected.lse, *gradients), expected, out.strides)


@pytest.mark.parametrize("case", [Case(dtype="float64", dlse=False), Case(q_len=33, kv_len=65, head_dim=5, dlse=False)])
def test_bits_do_not_depend_on_addresses(case):
    """MKL rounds in another order in arrays at odd multiples of 8 bytes."""
    case = replace(case, head_dim_v=case.head_dim, heads=2, kv_heads=2)
    call = case.call()
    expected = run(case, call)
    for name in ("q", "k", "v", "dout"):
        x = getattr(call, name)
        for offset in (1, 4, 8, 12, 16, 48):
            moved = call._replace(**{name: at_address(x, offset)})
            assert_bitwise_equal(run(case, moved), expected, f"{name} at {offset}")


def at_address(x, offset):
    """A copy whose address is `offset` beyond a multiple of 64 bytes."""
    memory = np.empty(x.nbytes + 128, np.uint8)
    start = -memory.ctypes.data % 64 + offset
    copy = memory[start : start + x.nbytes].view(x.dtype).reshape(x.shape)
    copy[...] = x
    return copy


def test_rows_that_repeat():
    """Rows, heads and a gradient with stride 0, as those of expand() and of sum().backward()."""
    case = Case(dlse=False)
    call = case.call()
    for name, index in (
        ("q", np.s_[:, :1]),
        ("k", np.s_[:, :1]),
        ("v", np.s_[:, :, :1]),
        ("dout", np.s_[:1, :1, :1, :1]),
    ):
        whole = np.broadcast_to(getattr(call, name)[index], getattr(call, name).shape)
        results = [run(case, call._replace(**{name: x})) for x in (whole, whole.copy())]
        assert_bitwise_equal(*results, name)


# Contents


def reaches(monkeypatch, function):
    """A list that grows with each call of an operator's replacement by the engine cpu."""
    calls, original = [], getattr(cpu, function)
    monkeypatch.setattr(cpu, function, lambda *arguments: calls.append(function) or original(*arguments))
    return calls


@pytest.mark.parametrize("value", [np.nan, np.inf], ids=["nan", "infinity"])
@pytest.mark.parametrize("name", ["q", "k", "v", "dout"])
@pytest.mark.parametrize("hider", [dict(causal="top_left"), dict(mask="qk", sink=True)], ids=["causal", "mask"])
def test_special_values_reach_only_rows_that_see_them(hider, name, value):
    """The operators would spread them to every row; the engine cpu computes the call again, and so has its bits."""
    case = Case(q_len=19, kv_len=19, dlse=False, **hider)
    call = case.call()
    getattr(call, name)[1, 10, 0, 3] = value
    computed, expected = run(case, call), run(case, call, "cpu")
    assert not np.isfinite(computed.dq[1]).all() and np.isfinite(computed.dq[0]).all()
    if name == "dout":  # the forward has no dout, and out and lse only the rounding of either engine
        computed, expected = (x._replace(out=computed.out, lse=computed.lse) for x in (computed, expected))
        assert np.isfinite(computed.out).all()
    for field in ("out", "dq", "dk", "dv"):
        x, y = getattr(computed, field), getattr(expected, field)
        np.testing.assert_array_equal(np.isnan(x), np.isnan(y), err_msg=field)
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-4, err_msg=field)


def test_rows_without_a_key(monkeypatch):
    """They are known from the mask: nothing is computed again. dout of such a row may be NaN."""
    again = reaches(monkeypatch, "forward"), reaches(monkeypatch, "backward")
    case = Case(mask="11qk", dlse=False)
    call = case.call()
    result = run(case, call)
    assert (result.out[:, :2] == 0).all() and (result.lse[..., :2] == -np.inf).all()
    assert np.isfinite(result.lse[..., 2:]).all() and all(np.isfinite(x).all() for x in result[2:5])
    assert again == ([], [])
    call.dout[:, 0] = np.nan
    assert all(np.isfinite(x).all() for x in run(case, call)[2:5])
    assert again == (["forward"], ["backward"])  # a backward that is computed again has its own out and lse


@pytest.mark.parametrize("name", ["mask-causal", "mask-per-key-causal", "sink-of-minus-infinity"])
def test_known_rows_are_not_computed_again(name, monkeypatch):
    """Under a causal mask a row has no key if the mask hides all keys up to it; its lse is -inf also beside a sink."""
    again = reaches(monkeypatch, "forward"), reaches(monkeypatch, "backward")
    call = SERVED[name].call()
    call.options["mask"][..., :5] = False
    result = run(SERVED[name], call)
    assert again == ([], []) and (name.startswith("sink") or (result.out[:, :5] == 0).all())


def test_rows_whose_scores_overflow(monkeypatch):
    """Scores that are all -inf leave lse 0 and out 0 in the operator, which are legal for other rows."""
    again = reaches(monkeypatch, "forward")
    case = Case(dlse=False)
    call = case.call()
    call.q[0, 3], call.k[0] = 1e30, -1e30
    call.v[1], call.q[1] = 0, 0  # out 0, and lse log(Sk)
    result = run(case, call)
    assert again == ["forward"]
    expected = run(case, call, "cpu")
    assert (result.lse[0, :, 3] == -np.inf).all() and (result.out[0, 3] == 0).all()
    assert_bitwise_equal(result._replace(dq=None, dk=None, dv=None), expected._replace(dq=None, dk=None, dv=None), case)


@pytest.mark.parametrize("large", [1e18, 1e19])
def test_gradients_whose_probabilities_overflow(large, monkeypatch):
    """Scores of 1e18 are rounded to multiples of 1e11, in torch's backward to others than in its forward."""
    again = reaches(monkeypatch, "backward")
    random = np.random.default_rng(0)
    case = Case(q_len=17, kv_len=17, batch=1, heads=2, kv_heads=2, head_dim=40, head_dim_v=40, dlse=False)
    overflowed = 0
    for _ in range(6):
        call = case.call()
        call.q[...], call.k[...] = (random.normal(size=x.shape) for x in (call.q, call.k))
        call.k[0, 0, 0, 3] = large
        result = run(case, call)
        if again:
            expected = run(case, call, "cpu")
            assert_bitwise_equal(result._replace(out=None, lse=None), expected._replace(out=None, lse=None), case)
        overflowed += bool(again)
        again.clear()
    assert overflowed > 0


def test_scores_of_nan_that_only_lse_shows(monkeypatch):
    """With AVX-512 the exponential of NaN is the largest number, and out can be finite where a score is NaN."""

    def as_with_avx512(*arguments, of=aten.flash, **options):
        out, lse = of(*arguments, **options)
        return torch.nan_to_num(out), lse

    monkeypatch.setattr(aten, "flash", as_with_avx512)
    case = Case(dlse=False)
    call = case.call()
    call.q[0, 3, 0, 0] = np.nan
    out, lse = (array.numpy() for array in aten.forward(*planned(case, call)))
    assert np.isnan(out[0, 3, 0]).all() and np.isnan(lse[0, 0, 3])


def test_lse_of_zero_is_legal():
    """A single key with the score 0 and the value 0."""
    q = np.zeros((1, 3, 2, 8), np.float32)
    out, lse = cupy_flash.attention(q, q[:, :1], q[:, :1], return_lse=True, engine="aten")
    assert (out == 0).all() and (lse == 0).all()


def test_empty_sequences_reach_no_operator(monkeypatch):
    """An empty array would end the process."""
    sizes = []
    for name in ("flash", "flash_backward"):
        operator = getattr(aten, name)

        def watched(*arguments, operator=operator, **options):
            sizes.extend(x.numel() for x in arguments if isinstance(x, torch.Tensor))
            return operator(*arguments, **options)

        monkeypatch.setattr(aten, name, watched)
    for name in ("lengths-zero", "packed"):
        run(SERVED[name])
    assert len(sizes) > 10 and min(sizes) > 0


# Choice


MARKS = [(length, causal) for length in (512, 1024, 2048, 4096) for causal in (False, True)]


@pytest.mark.parametrize("framework", ["numpy", "torch"])
@pytest.mark.parametrize("name", ["DEFAULT", "AVX2", "AVX512"])
def test_the_engine_is_chosen_for_the_shapes_of_the_marks(framework, name, capability):
    """It fails where this version of torch has other operators, instead of losing the engine in silence.

    With AVX-512 it serves by name only, and the plan says why.
    """
    assert device.torch_flash() == ""
    capability(name)
    make = zeros if framework == "numpy" else lambda *shape: torch.zeros(1).expand(shape)
    for length, causal in MARKS:
        q, lse = make(1, length, 8, 64), make(1, 8, length)
        for saved in (None, Saved(q, q, lse)):
            problem, _ = pose("attention", (q, q, q), Options(causal=causal), saved=saved)
            chosen = dispatch.plan_for(problem)
            assert chosen.engine == ("cpu" if name == "AVX512" else "aten"), problem
            if name == "AVX512":
                assert "not aten   with AVX-512 the operators' exponentials err by up to 20 units" in chosen.explain()
                assert dispatch.plan_for(problem._replace(engine="aten")).engine == "aten"


def test_the_instruction_set_of_this_machine_has_its_engine(monkeypatch):
    """The capability that torch names, without the fixture's replacement, is one that the choice knows."""
    monkeypatch.undo()
    name, q = torch.backends.cpu.get_cpu_capability(), zeros(1, 512, 8, 64)
    assert f"engine     {'cpu' if name == 'AVX512' else 'aten'} on" in cupy_flash.explain(q, q, q)


def zeros(*shape):
    """An array of one number, whose strides are 0."""
    return np.broadcast_to(np.zeros(1, np.float32), shape)


def test_explain_tells_what_decides():
    q = np.ones((1, 600, 2, 16), np.float32)
    text = cupy_flash.explain(q, q, q)
    assert "engine     aten on cpu" in text and "cpu computes again what is not finite" in text
    assert 'before the import of torch, when cpu computes the call: engine="cpu" pins it' in text
    assert "not cpu    its smallest predicted time is" in text
    assert "before the import" not in cupy_flash.explain(*(torch.from_numpy(q),) * 3)
    assert "not aten   the operators align" in cupy_flash.explain(q, q[:, :500], q[:, :500], causal=True)


PROCESS = """
import os, signal
import numpy as np, cupy_flash
x = np.random.default_rng(0).normal(size=(4, 1, 600, 2, 16)).astype(np.float32)
q, k, v, dout = x
assert "not aten   torch is not imported: once it is, this engine may compute" in cupy_flash.explain(q, k, v)
out, vjp = cupy_flash.attention_vjp(q, k, v)
pinned, pinned_vjp = cupy_flash.attention_vjp(q, k, v, engine="cpu")
import torch
torch.backends.cpu.get_cpu_capability = lambda: "AVX2"
assert "engine     aten" in cupy_flash.explain(q, k, v)
after, after_vjp = cupy_flash.attention_vjp(q, k, v)  # starts the threads of torch's pool
same = [x.tobytes() == y.tobytes() for x, y in zip((out, *vjp(dout)[:3]), (pinned, *pinned_vjp(dout)[:3]))]
other = [x.tobytes() == y.tobytes() for x, y in zip((after, *after_vjp(dout)[:3]), (pinned, *pinned_vjp(dout)[:3]))]
print(same, other, flush=True)
child = os.fork()
if child == 0:
    signal.alarm(100)
    reason = "not aten   a forked child lacks the threads" in cupy_flash.explain(q, k, v)
    os._exit(0 if reason and cupy_flash.attention(q, k, v).tobytes() == pinned.tobytes() else 1)
print("child:", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.fixture(scope="module")
def lines_of_a_process():
    """The output of a process that imports torch between a forward and its backward, and then forks."""
    result = subprocess.run([sys.executable, "-c", PROCESS], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines()


def test_an_import_of_torch_between_forward_and_backward_changes_no_engine(lines_of_a_process):
    assert lines_of_a_process[0] == f"{[True] * 4} {[False] * 4}"


def test_a_forked_child_computes_by_another_engine(lines_of_a_process):
    assert lines_of_a_process[1] == "child: 0"


@pytest.mark.parametrize("setting", [torch.backends, torch.backends.mkldnn, torch.backends.mkldnn.matmul])
def test_rounded_products_are_refused(setting):
    before = setting.fp32_precision
    q = torch.zeros(1, 64, 2, 16)
    try:
        setting.fp32_precision = "bf16"
        with pytest.raises(UnsupportedError, match="torch may round the factors of float32 products to bf16"):
            cupy_flash.attention(q, q, q, engine="aten")
        assert "engine     cpu on" in cupy_flash.explain(q, q, q)
    finally:
        setting.fp32_precision = before
    assert device.torch_flash() == ""


def test_arrays_under_a_mode_of_fake_tensors():
    """Its operators compute no numbers, which a call on NumPy arrays must not notice."""
    q = np.random.default_rng(0).normal(size=(1, 300, 2, 16)).astype(np.float32)
    expected = cupy_flash.attention(q, q, q, engine="cpu")
    with FakeTensorMode():
        assert "not aten   a mode of torch that sees every operator is active" in cupy_flash.explain(q, q, q)
        np.testing.assert_array_equal(cupy_flash.attention(q, q, q), expected)


@pytest.mark.parametrize("found", ["other", "missing"])
def test_a_changed_operator_is_not_called(found, monkeypatch, caplog):
    """The engine cpu computes, and one line of the log says so."""
    first, *others = device.FLASH_OPERATORS.items()
    changed = {first[0] if found == "other" else "_no_such_operator": "(Tensor query) -> Tensor"} | dict(others)
    monkeypatch.setattr(device, "FLASH_OPERATORS", changed)
    device._changed_schema.cache_clear()
    q = torch.zeros(1, 64, 2, 16)
    try:
        with caplog.at_level(logging.INFO, "cupy_flash.device"):
            for _ in range(3):
                assert "not aten   torch 2" in cupy_flash.explain(q, q, q)
                cupy_flash.attention(q, q, q)
    finally:
        device._changed_schema.cache_clear()
    (record,) = caplog.records
    assert record.levelname == "INFO" and "changed a private operator" in record.getMessage()


def test_a_torch_without_the_binding_of_the_operator(monkeypatch):
    """The schema says nothing of the binding: without it the operator itself is called, with the same results."""
    monkeypatch.delattr(torch, "_scaled_dot_product_flash_attention_for_cpu")
    spec = importlib.util.spec_from_file_location("cupy_flash.cpu.aten_without_binding", aten.__file__)
    without = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(without)
    q = torch.randn(1, 2, 5, 16, generator=torch.Generator().manual_seed(0))
    for causal in (False, True):
        got, expected = (module.Form(causal, False, 0.3, "bhsd").attend(q, q, q) for module in (without, aten))
        assert all(map(torch.equal, got, expected))


# In torch


FEW = dict(head_dim=40, head_dim_v=40, kv_len=31, dlse=False)
THREADED = {
    "tiles": Case(q_len=200, kv_len=200, batch=1, heads=6, kv_heads=2, causal=True, sink=True, dlse=False),
    "one-query": Case(**FEW, q_len=1, batch=1, heads=5, kv_heads=5),
    "one-query-of-groups": Case(**FEW, q_len=1, batch=1, heads=9, kv_heads=3),
    "few-queries": Case(**FEW, q_len=5, batch=1, heads=5, kv_heads=5, mask="qk"),
    "few-queries-float64": Case(**FEW, q_len=3, batch=1, heads=5, kv_heads=5, dtype="float64"),
    "one-head-of-a-batch": Case(**FEW, q_len=5, batch=3, heads=3, kv_heads=1, causal="top_left"),
}


@pytest.mark.parametrize("serial", [aten.SERIAL, 0], ids=["", "padded"])
@pytest.mark.parametrize("name", THREADED)
def test_bits_do_not_depend_on_threads(name, serial, monkeypatch):
    """A thread's scratch memory may be misaligned, and a BLAS splits the products of a call of one task."""
    monkeypatch.setattr(aten, "SERIAL", serial)
    call, before, results = THREADED[name].call(), torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3, 4, 5, 7):
            torch.set_num_threads(threads)
            results.append(run(THREADED[name], call))
            assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
    for result in results[1:]:
        assert_bitwise_equal(result, results[0], name)


def test_calls_of_one_task_are_refused():
    """The operators leave such a task to their BLAS, which then uses all threads."""
    one = Case(batch=1, heads=1, kv_heads=1)
    refused = [
        (one, False), (replace(one, q_len=1, heads=3), False), (replace(one, heads=3), True),
        (replace(one, q_len=80), True), (replace(one, batch=2, kv_lengths=(3, 4)), False),
    ]  # fmt: skip
    served_ones = [
        (replace(one, q_len=1), False), (replace(one, q_len=80), False), (replace(one, batch=2), True),
        (replace(one, q_len=40, heads=3), False), (replace(one, heads=2, kv_heads=2), True),
    ]  # fmt: skip
    for cases, expected in ((refused, True), (served_ones, False)):
        for case, is_backward in cases:
            problem = posed(case)[0].problem._replace(backward=is_backward)
            reasons = engine_refusals("aten", problem, DEVICE)
            assert any("leave a single head to their BLAS" in reason for reason in reasons) == expected, problem


def test_heads_of_a_group_are_rows_of_few_queries(monkeypatch):
    """So that every key is read once; a bottom-right causal mask hides nothing from a single query."""
    seen = []
    monkeypatch.setattr(
        aten, "flash", lambda *a, of=aten.flash, **o: seen.append((*a[0].shape[1:3], a[4])) or of(*a, **o)
    )
    grouped = Case(heads=6, kv_heads=2, dlse=False)
    for case in (
        grouped, replace(grouped, layout="bhsd", q_len=4), replace(grouped, q_len=1, causal=True, sink=True),
        replace(grouped, q_len=1, causal=True, q_lengths=(1, 0), kv_lengths=(3, 0)),
        replace(grouped, causal="top_left"), replace(grouped, mask="qk"),
    ):  # fmt: skip
        check(case, run(case), only=("out", "lse", "dq", "dk", "dv", "dsink"))
    q_len, rows = grouped.q_len, [heads * q for heads, q, _ in seen]
    assert [(heads, is_causal) for heads, _, is_causal in seen] == [(2, False)] * 4 + [(6, True), (6, False)], (
        rows,
        q_len,
    )


def test_concurrent_calls():
    case = Case(q_len=64, kv_len=64, dlse=False)
    call, results = case.call(), []
    threads = [threading.Thread(target=lambda: results.append(run(case, call))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result in results:
        assert_bitwise_equal(result, run(case, call), case)


def on_tensors(**options):
    """out and gradients of a call of autograd, with sum().backward(), whose dout has the stride 0."""
    q, k, v, sink = (torch.from_numpy(x).requires_grad_() for x in leaves())
    out = cupy_flash.attention(q, k, v, sink=sink, causal=True, **options)
    return out, *torch.autograd.grad(out.sum(), (q, k, v, sink))


def leaves():
    rng = np.random.default_rng(0)
    return (
        rng.normal(size=shape).astype(np.float32) for shape in ((2, 40, 4, 16), (2, 40, 2, 16), (2, 40, 2, 16), (4,))
    )


def test_autograd_and_compile(monkeypatch):
    again = reaches(monkeypatch, "forward"), reaches(monkeypatch, "backward")
    results = on_tensors()
    assert again == ([], [])
    for x, y in zip(results, on_tensors(engine="cpu"), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)
    q, k, v, _ = map(torch.from_numpy, leaves())
    compiled = torch.compile(lambda q, k, v: cupy_flash.attention(q, k, v) * 1, backend="aot_eager", fullgraph=True)
    for layout_of in (lambda x: x, lambda x: x.mT.contiguous().mT):
        given = [layout_of(x) for x in (q, k, v)]
        assert torch.equal(compiled(*given), cupy_flash.attention(q, k, v))


def test_results_are_no_views():
    """A view that was made without recording may not be changed in place with a gradient."""
    q, k, v, _ = map(torch.from_numpy, leaves())
    for layout in ("bshd", "bhsd"):
        out = cupy_flash.attention(q, k.repeat(1, 1, 2, 1), v.repeat(1, 1, 2, 1), layout=layout, engine="aten")
        assert not out._is_view() and out.is_contiguous()
        factor = torch.ones((), requires_grad=True)
        out.mul_(factor).sum().backward()
        assert factor.grad is not None


def test_modes_of_torch():
    """Autocast around attention_vjp, which casts nothing, inference mode, and tensors that require a gradient."""
    q, k, v, _ = map(torch.from_numpy, leaves())
    expected = cupy_flash.attention(q, k, v, engine="aten")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, vjp = cupy_flash.attention_vjp(q.requires_grad_(), k, v, engine="aten")
        assert torch.equal(out, expected) and not out.requires_grad and vjp(expected).dq.dtype == torch.float32
    with torch.inference_mode():
        assert torch.equal(cupy_flash.attention(q, k, v, engine="aten"), expected)
    assert torch.equal(cupy_flash.attention(torch.nn.Parameter(q.detach()), k, v, engine="aten").detach(), expected)
