"""The examples with forward mode and second derivatives: both attentions train alike, and memory is linear."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest
import torch

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
STEPS = 8

# torch's forward mode uses torch.jit.script, which torch itself has deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")


def load(name):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["meanflow", "gradient_penalty"])
def test_both_attentions_train_alike(name, monkeypatch):
    """The losses differ by rounding only: math attention with another order of summation sets the tolerance."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # on a busy machine two threads that wait for each other take 20 times as long
    example = load(name)

    def reordered(q, k, v):
        return example.math_attention(q.flip(-1), k.flip(1, -1), v.flip(1))

    monkeypatch.setitem(example.ATTENTIONS, "reordered", reordered)
    monkeypatch.setitem(example.ATTENTIONS, "wrong", lambda q, k, v: example.math_attention(1.01 * q, k, v))
    runs = {which: np.array(example.train(which, STEPS, 2e-3)) for which in example.ATTENTIONS}
    torch.set_num_threads(threads)
    distance = {which: np.abs(losses - runs["math"]).max() for which, losses in runs.items()}
    band = np.finfo(np.float32).eps * np.abs(runs["math"]).max()
    assert distance["cupy_flash"] <= 8 * (distance["reordered"] + band)
    assert distance["wrong"] > 8 * (distance["reordered"] + band)


@pytest.mark.exhaustive
def test_memory_of_second_derivatives_is_linear(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)  # the measuring processes import the example by name
    example = importlib.import_module("gradient_penalty")
    ours = example.memory("cupy_flash", (4096,))
    math = example.memory("math", (4096,))
    assert math[4096] > 6 * 4 * 4 * 4096**2 / 4  # several matrices of 4 heads
    assert ours[4096] < math[4096] / 4
