"""examples/train_sparse.py: the indexers learn which keys matter, and a quarter of them gives the loss of all."""

import importlib
from pathlib import Path

import pytest
import torch
from tiers import exhaustive

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SIZES = (["--context=64", "--keys=16", "--steps", "40", "30", "2"], "--layers=2", "--embed=32", "--heads=2")


@pytest.fixture
def example(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # on a busy machine two threads that wait for each other take 20 times as long
    yield importlib.import_module("train_sparse")
    torch.set_num_threads(threads)


def worst_keys(select):
    """Return select_keys that chooses the keys with the smallest scores."""
    return lambda q_idx, weights, k_idx, n: select(q_idx, -weights, k_idx, n)


@pytest.mark.parametrize("right", [True, exhaustive(False)])
def test_indexers_choose_keys_that_keep_the_attention(example, right, monkeypatch):
    if not right:
        monkeypatch.setattr(example.cupy_flash, "select_keys", worst_keys(example.cupy_flash.select_keys))
    found = example.main(SIZES[0], *SIZES[1:], "--batch=8")
    assert found["sparse"] <= example.ALLOWED * found["dense"]  # so small a model hardly uses its attention
    assert (found["chosen keys"] > 1.04 * found["last keys"]) == right


@pytest.mark.exhaustive
def test_the_loss_of_the_defaults_is_that_of_dense_attention(example):
    example.main(["--check"])


def test_a_larger_loss_is_an_error(example, monkeypatch):
    found = {"dense": 1.0, "sparse": 1.03, "chosen keys": 0.9, "last keys": 0.8}
    monkeypatch.setattr(example, "run", lambda *arguments: found)
    with pytest.raises(SystemExit, match=r"above 1\.02 times"):
        example.main(["--check"])
    assert example.main([]) == found
