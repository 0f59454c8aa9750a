"""examples/evict_keys.py: with half of the cache, chosen by importance, a trained model keeps its answers."""

import importlib.util
from pathlib import Path

import torch

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SMALL = dict(NAMES=8, VALUES=4, OTHERS=4, PAIRS=4, QUESTIONS=4, LENGTH=24, DIM=32, LAYERS=1, VOCABULARY=8 * 4 + 4 + 8)


def test_half_of_the_cache_keeps_the_answers(monkeypatch):
    spec = importlib.util.spec_from_file_location("evict_keys", EXAMPLES / "evict_keys.py")
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    for name, value in SMALL.items():
        monkeypatch.setattr(example, name, value)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    found = example.accuracies(example.train(150), 0.5)
    torch.set_num_threads(threads)
    assert found["all keys"] > 0.9
    assert min(found["H2O"], found["SnapKV"]) > found["all keys"] - 0.03
    assert max(found["the last keys"], found["any keys"]) < 0.75
