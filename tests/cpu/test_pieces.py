"""A backward with few key/value heads splits their key tiles into pieces and adds the parts of dQ in a fixed order."""

import itertools
import threading

import numpy as np
import pytest

import cupy_flash
from cupy_flash import dispatch
from cupy_flash.cpu import attention as cpu
from cupy_flash.cpu.blas import Products
from cupy_flash.cpu.thread_pool import OrderedSum
from cupy_flash.engines import cpu as engine
from cupy_flash.engines.cpu import Tile
from cupy_flash.problem.build import pose
from cupy_flash.problem.records import Options, Saved

LENGTH, HEADS, HEAD_DIM, BLOCK = 140, 3, 8, 16
CALLS = {
    "full": {},
    "causal": dict(causal=True),
    "window-sink": dict(window=(9, 3), sink=np.linspace(-1, 1, HEADS).astype(np.float32)),
    "lengths": dict(causal=True, kv_lengths=np.array([20], np.int32), q_lengths=np.array([33], np.int32)),
    "no-keys": dict(kv_lengths=np.array([0], np.int32)),
    "dropout": dict(dropout=0.3, seed=5),
}


def planned(options):
    """Return (plan, operands) of a backward of one key/value head in tiles of 16 x 16."""
    q, dout, k, v = (
        np.random.default_rng(n).normal(size=(1, LENGTH, heads, HEAD_DIM)).astype(np.float32)
        for n, heads in enumerate((HEADS, HEADS, 1, 1))
    )
    out, lse = cupy_flash.attention(q, k, v, return_lse=True, **options)
    problem, operands = pose("attention_backward", (q, k, v), Options(**options), saved=Saved(dout, out, lse))
    return dispatch.plan_for(problem)._replace(block_q=BLOCK, block_kv=BLOCK, tile=Tile(BLOCK, BLOCK)), operands


def gradients(plan, operands, threads):
    return [x.numpy().copy() for x in cpu.backward(plan._replace(threads=threads), operands) if x is not None]


@pytest.mark.parametrize("options", CALLS.values(), ids=CALLS)
def test_pieces_are_the_unsplit_backward_on_any_number_of_threads(options, monkeypatch):
    plan, operands = planned(options)
    assert engine.pieces(plan.problem, BLOCK) == 4  # four pieces of two or three key tiles each
    split = gradients(plan, operands, 1)
    for threads in (2, 7):
        for x, y in zip(split, gradients(plan, operands, threads), strict=True):
            np.testing.assert_array_equal(x, y)
    monkeypatch.setattr(engine, "pieces", lambda problem, block_kv: 1)
    (dq, *others), (whole_dq, *whole) = split, gradients(plan, operands, 1)
    np.testing.assert_allclose(dq, whole_dq, rtol=0, atol=1e-5)  # dQ is summed in another order
    for x, y in zip(others, whole, strict=True):
        np.testing.assert_array_equal(x, y)


def test_one_head_occupies_every_thread(monkeypatch):
    plan, operands = planned({})
    together, arrived, matmul = threading.Barrier(4, timeout=30), threading.local(), Products.matmul

    def meet(*arguments, out):
        if not hasattr(arrived, "once"):
            arrived.once = together.wait()
        return matmul(*arguments, out=out)

    monkeypatch.setattr(Products, "matmul", meet)
    cpu.backward(plan._replace(threads=4), operands)


@pytest.mark.parametrize("heads", [1, 3, 16, 40])
def test_heads_are_split_where_they_are_fewer_than_threads(heads):
    x = np.zeros((1, 512, heads, 8), np.float32)
    lse = np.zeros((1, heads, 512), np.float32)
    problem, _ = pose("attention_backward", (x, x, x), Options(), saved=Saved(x, x, lse))
    assert engine.pieces(problem, 128) == {1: 2, 3: 2, 16: 1, 40: 1}[heads]
    assert engine.pieces(problem._replace(bias=(1, 1, 1, 1)), 128) == 1  # all heads add to one bias gradient


def test_an_ordered_sum_is_that_of_the_order():
    terms = [np.array([x], np.float32) for x in (1e8, 1.0, -1e8, 3.0)]
    expected = ((terms[0] + terms[1]) + terms[2]) + terms[3]
    for order in itertools.permutations(range(4)):
        total = OrderedSum(4)
        *early, last = [total.add(place, terms[place].copy()) for place in order]
        assert early == [None] * 3
        np.testing.assert_array_equal(last, expected)
