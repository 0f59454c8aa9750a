"""Large calls of the engine cpu on torch tensors compute in torch, on any number of the threads of its pool."""

import itertools
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from cases import OPTIONS, SCORES, Case, assert_bitwise_equal, check, run_planned
from threadpoolctl import threadpool_limits

import cupy_flash
from cupy_flash.cpu import attention as cpu
from cupy_flash.cpu import blas, thread_pool
from cupy_flash.cpu.blas import Products, TorchProducts

ROOT = Path(__file__).resolve().parents[2]
attention, explain = (partial(function, engine="cpu") for function in (cupy_flash.attention, cupy_flash.explain))
BY_NUMPY = ("softcap", "alibi", "bias", "mask", "dropout")  # options that NumPy computes, one head at a time
CASES = {
    name: case
    for name, case in OPTIONS.items()
    if all(getattr(case, option) in (None, 0) for option in BY_NUMPY) and "scores" not in name and "dim" not in name
}
CASES |= {name: OPTIONS[name] for name in OPTIONS if name in {f"scores-{kind}-causal-sink" for kind in SCORES}}
CASES |= {
    "five-heads": Case(q_len=70, kv_len=61, heads=5, kv_heads=5, sink=True, causal=True),
    "group-of-three": Case(q_len=70, kv_len=61, heads=9, kv_heads=3, sink=True),
    "bounded-or-not-by-tile": Case(q_len=70, kv_len=61, batch=1, scale=1.0, causal=True),
    "float64": Case(dtype="float64", causal=True),
    "float16": Case(dtype="float16", causal=True),
    "bfloat16": Case(dtype="bfloat16", causal=True),
}


def in_torch(monkeypatch, heads_at_once):
    """Compute the next calls in torch, in tiles of 16 x 32 and 32 x 16."""
    monkeypatch.setattr(blas, "TORCH_TILES", ((16, 32), (32, 16)))
    region = blas._region()
    assert region is not None
    monkeypatch.setattr(cpu, "products_of", lambda *arguments: TorchProducts(region, heads_at_once))


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_results(case, monkeypatch):
    in_torch(monkeypatch, heads_at_once=3)
    check(case, run_planned(case, threads=2))


@pytest.mark.parametrize("heads_at_once", [1, 4])
def test_bits_from_run_to_run(heads_at_once, monkeypatch):
    in_torch(monkeypatch, heads_at_once)
    case = Case(q_len=70, kv_len=90, causal=True, heads=8, kv_heads=4, sink=True)
    first = run_planned(case, threads=3)
    check(case, first)
    for _ in range(5):
        assert_bitwise_equal(run_planned(case, threads=3), first, case)


def test_explain_tells_who_computes():
    q = torch.zeros(1, 600, 8, 16)
    text = explain(q, q, q, causal=True)
    assert "tiles      256 queries x 512 keys, " in text
    assert "products   of torch, on its own threads, in tasks of up to " in text
    for given in (q.numpy(), q[:, :500]):
        assert "products" not in explain(given, given, given, causal=True)


def test_infinities_and_nan_reach_the_rows_that_see_them(monkeypatch):
    """The last key is hidden from all queries but the last, in NumPy and in torch."""
    case = Case(q_len=40, kv_len=40, causal=True, heads=2, kv_heads=2, dlse=False)
    call = case.call()
    call.k[:, -1, 0], call.v[:, -1] = np.inf, np.nan
    in_numpy = run_planned(case, call, threads=2)
    in_torch(monkeypatch, heads_at_once=2)
    for name in ("out", "lse", "dq"):
        x, y = getattr(in_numpy, name), getattr(run_planned(case, call, threads=2), name)
        assert np.isnan(x).any(), name
        np.testing.assert_allclose(y, x, rtol=1e-4, atol=1e-5, err_msg=name)


LENGTH = 512  # its square is blas.TORCH_SCORES, the fewest scores per head that torch computes
TENSORS = [torch.randn(1, LENGTH, 2, 16, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]


def test_large_calls_on_tensors_are_recorded_by_autograd_as_usual():
    used = []
    leaves, expected = ([x.clone().requires_grad_() for x in TENSORS] for _ in range(2))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            TorchProducts, "planned", lambda self, plan, of=TorchProducts.planned: used.append(1) or of(self, plan)
        )
        out = attention(*leaves, causal=True)
        gradients = torch.autograd.grad(out.square().sum(), leaves)
        with torch.inference_mode():
            assert torch.equal(attention(*TENSORS, causal=True), out)
    assert used == [1, 1, 1]
    heads_first = (x.transpose(1, 2) for x in expected)
    exact = torch.nn.functional.scaled_dot_product_attention(*heads_first, is_causal=True).transpose(1, 2)
    torch.testing.assert_close(out, exact, rtol=0, atol=1e-5)
    for x, y in zip(gradients, torch.autograd.grad(exact.square().sum(), expected), strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=1e-4)


@pytest.fixture
def chosen(monkeypatch):
    """Return a list to which each later call adds the Products object that it chose."""
    calls = []
    monkeypatch.setattr(cpu, "products_of", lambda *arguments: calls.append(blas.products_of(*arguments)) or calls[-1])
    return calls


NUMPYS = {
    "small": lambda: attention(*(x[:, :-1] for x in TENSORS)),
    "few-queries": lambda: attention(TENSORS[0][:, :16], *(x.repeat(1, 32, 1, 1) for x in TENSORS[1:])),
    "few-keys": lambda: attention(TENSORS[0].repeat(1, 32, 1, 1), *(x[:, :16] for x in TENSORS[1:])),
    "numpy": lambda: attention(*(x.numpy() for x in TENSORS)),
    "dropout": lambda: attention(*TENSORS, dropout=0.1, seed=1),
    "softcap": lambda: attention(*TENSORS, softcap=1.0),
    "alibi": lambda: attention(*TENSORS, alibi_slopes=torch.ones(2)),
    "bias": lambda: attention(*TENSORS, bias=torch.zeros(LENGTH)),
    "mask": lambda: attention(*TENSORS, mask=torch.ones(LENGTH, dtype=torch.bool)),
    "window": lambda: attention(*TENSORS, window=(64, 0)),
    "mask_mod": lambda: attention(*TENSORS, mask_mod=lambda b, h, q, kv: q >= kv),
    "score_mod": lambda: attention(*TENSORS, score_mod=lambda s, b, h, q, kv: s * 2),
}


@pytest.mark.parametrize("call", NUMPYS.values(), ids=NUMPYS)
def test_calls_that_numpy_computes(call, chosen):
    call()
    assert [type(one) for one in chosen] == [Products]


ROUNDING = {  # (module of torch's setting fp32_precision, its value, the class that computes the products)
    "one-backend": (torch.backends.mkldnn.matmul, "bf16", Products),
    "all-of-one-backend": (torch.backends.mkldnn, "bf16", Products),
    "all-backends": (torch.backends, "tf32", Products),
    "another-backend": (torch.backends.cuda.matmul, "tf32", TorchProducts),
}


@pytest.mark.parametrize(("setting", "rounded", "expected"), ROUNDING.values(), ids=ROUNDING)
def test_rounded_products_of_torch_are_not_used(setting, rounded, expected, chosen):
    before = setting.fp32_precision
    try:
        setting.fp32_precision = rounded
        attention(*TENSORS)
    finally:
        setting.fp32_precision = before
    assert [type(one) for one in chosen] == [expected]


def test_rounded_products_by_the_older_setting_are_not_used(chosen):
    before = torch.get_float32_matmul_precision()
    attention(*TENSORS)
    try:
        torch.set_float32_matmul_precision("high")
        attention(*TENSORS)
    finally:
        torch.set_float32_matmul_precision(before)
    assert [type(one) for one in chosen] == [TorchProducts, Products]


def test_few_threads_are_obeyed(monkeypatch):
    """A call computes on the smaller of torch's and BLAS's numbers of threads, although a region has at least two."""
    threads, poll = set(), thread_pool.Stop.poll
    monkeypatch.setattr(thread_pool.Stop, "poll", lambda stop: (threads.add(threading.get_ident()), poll(stop)))
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        with threadpool_limits(1, user_api="blas"):
            attention(*TENSORS)
        torch.set_num_threads(1)
        with threadpool_limits(3, user_api="blas"):
            attention(*TENSORS)
    finally:
        torch.set_num_threads(before)
    assert threads == {threading.get_ident()}


def test_bits_beside_another_call():
    """A concurrent call limits BLAS to one thread: the heads that a task computes at once do not depend on it."""
    q, k, v = torch.randn(3, 1, LENGTH, 4, 16, generator=torch.Generator().manual_seed(0))
    q *= torch.tensor([0.1, 0.1, 9, 9])[:, None]  # the scores of two heads are too large for a softmax without row max
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        results = []
        for limit in (1, 2):
            with threadpool_limits(limit, user_api="blas"):
                results.append(attention(q, k, v))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*results)


def test_without_a_region_numpy_computes(chosen, monkeypatch):
    monkeypatch.setattr(blas, "_region", lambda: None)
    attention(*TENSORS)
    assert [type(one) for one in chosen] == [Products]


# This program runs in a separate process; an alarm ends a child that hangs.
FORK = """
import os, signal
import torch
import cupy_flash

q, k, v = torch.randn(3, 1, 512, 2, 16)
expected = cupy_flash.attention(q, k, v, engine="cpu")  # starts the threads of torch's pool
child = os.fork()
if child == 0:
    signal.alarm(20)
    os._exit(0 if (cupy_flash.attention(q, k, v, engine="cpu") - expected).abs().max() < 1e-5 else 1)
print("child:", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_forked_child_does_not_wait_for_threads_that_it_lacks():
    result = subprocess.run([sys.executable, "-c", FORK], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    assert result.stdout == "child: 0\n"


@pytest.mark.parametrize("failing", [0, 1])
def test_an_error_in_a_region_reaches_the_caller(failing):
    region, ran = blas._region(), []

    def fail():
        raise MemoryError("no more")

    tasks = [lambda: ran.append(1), lambda: ran.append(1)]
    tasks[failing] = fail
    with pytest.raises(MemoryError, match="no more"):
        thread_pool.run_tasks(2, tasks, region=region)
    assert not thread_pool._single_threaded_blas._users


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupt_at_any_moment_of_a_region_reaches_the_caller():
    """ctypes would drop an exception that is raised in a callback before the callback's try block; the interrupt must
    reach the caller all the same.
    """
    region, errors = blas._region(), np.geterr()
    thread_pool.run_tasks(2, [lambda: None], region=region)  # the first call looks for the libraries of BLAS
    for moment in itertools.count():
        moments = itertools.count()

        def profiler(frame, event, argument, moment=moment, moments=moments):
            if event in ("call", "c_return") and next(moments) == moment:
                raise KeyboardInterrupt

        interrupted = False
        try:
            sys.setprofile(profiler)
            thread_pool.run_tasks(2, [lambda: None] * 2, region=region)
        except KeyboardInterrupt:
            interrupted = True
        finally:
            sys.setprofile(None)
        assert not thread_pool._single_threaded_blas._users, moment
        assert np.geterr() == errors, moment
        if next(moments) <= moment:
            break
        assert interrupted, moment
    assert moment > 30
