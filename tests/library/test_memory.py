"""The memory model: published parameter counts, formulas of papers, measurements, the largest sizes that fit, the
command.
"""

import contextlib
import functools
import io
import json
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformer_blocks import (
    ATTENTION,
    BLOCKS,
    DTYPES,
    SMALL_GPT,
    WITHIN,
    GPTBlock,
    dropout,
    flash_attention,
    measure_block,
)

from cupy_flash import memory
from cupy_flash.__main__ import main
from cupy_flash.adapters import model_config
from cupy_flash.memory import PRESETS, Training, Transformer, coefficients, estimate, measure

ROOT = Path(__file__).resolve().parents[2]


# ------------------------------------------------------------------------------------------------ published numbers


@pytest.mark.parametrize(
    "name, parameters",
    [
        ("gpt2", 124_439_808),
        ("llama2-7b", 6_738_415_616),
        ("llama2-70b", 68_976_648_192),
        ("llama3-8b", 8_030_261_248),
    ],
)
def test_parameters_of_published_models(name, parameters):
    assert PRESETS[name].parameters == parameters


def test_parameters_of_megatron_turing():
    model = PRESETS["mt-530b"]
    # Equation (2) of Narayanan et al. 2021 leaves out the final norm.
    layers, d = model.layers, model.embed_dim
    formula = 12 * layers * d**2 * (1 + 13 / (12 * d) + (model.vocab_size + model.context) / (12 * layers * d))
    assert model.parameters == pytest.approx(530e9, rel=1e-3)
    assert model.parameters == pytest.approx(formula + 2 * d, rel=1e-12)


def paper(training, a, s, h, t):
    """Return the bytes of one layer, divided by s b h, by table 2 of Korthikanti et al. 2022.

    a is the number of heads, s the length, h the hidden size, t the number of tensor-parallel GPUs.
    """
    scores = 0 if training.checkpoint == "selective" else 5 * a * s / (h * t)
    if training.checkpoint == "full":
        return 2 / t if training.sequence_parallel else 2
    return (34 / t if training.sequence_parallel else 10 + 24 / t) + scores


@pytest.mark.parametrize("checkpoint", ["none", "selective", "full"])
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["tensor", "tensor-sequence"])
@pytest.mark.parametrize("t", [1, 8])
@pytest.mark.parametrize("name", ["gpt2", "mt-530b"])
def test_coefficients_equal_those_of_the_paper(name, t, sequence_parallel, checkpoint):
    # 8 GPUs cannot share the 12 heads of gpt2, so it gets 16 smaller heads, for which the formula holds too.
    model = replace(PRESETS[name], heads=16, kv_heads=16, head_dim=48) if name == "gpt2" else PRESETS[name]
    training = Training(4, 2048, "standard", checkpoint, tensor=t, sequence_parallel=sequence_parallel)
    a, s, h = model.heads, training.seqlen, model.embed_dim
    alpha, beta, _ = coefficients(model, training)
    assert alpha + beta * a * s / h == pytest.approx(paper(training, a, s, h, t), rel=1e-12)


def test_embedding_and_head_equal_those_of_the_paper():
    # Section 4.3: 34 s b h L / t + 4 s b h (1 + v / h) / t, plus s b h / t for the dropout after the embedding.
    model, training = PRESETS["mt-530b"], Training(1, 2048, tensor=8, checkpoint="selective")
    sbh = training.seqlen * model.embed_dim
    expected = (34 * model.layers + 1 + 4 * (1 + model.vocab_size / model.embed_dim)) * sbh / 8
    # rel, because the paper ignores statistics and token ids
    assert estimate(model, training).activations == pytest.approx(expected, rel=2e-3)


@pytest.mark.parametrize(
    "precision, parameters, working, gradients, optimizer", [("float32", 4, 0, 4, 8), ("mixed", 4, 2, 4, 8)]
)
def test_states(precision, parameters, working, gradients, optimizer):
    model = PRESETS["llama2-7b"]
    alone = estimate(model, Training(1, 128, precision=precision))
    bytes_each = [
        size / model.parameters for size in (alone.parameters, alone.working, alone.gradients, alone.optimizer)
    ]
    assert bytes_each == [parameters, working, gradients, optimizer]
    shared = estimate(model, Training(1, 128, precision=precision, fsdp=8))
    assert shared.states - shared.working == pytest.approx(16 * model.parameters / 8, rel=1e-8)
    assert shared.activations == alone.activations
    gathered = 2 * (2 * 32000 * 4096 + 4096) + 3 * model.block_parameters
    assert shared.working == gathered * (4 if precision == "float32" else 2)


@pytest.mark.parametrize("name", ["gpt2", "mt-530b"])
@pytest.mark.parametrize("tokens_per_width", [0.5, 4])
def test_ratio_of_activations_to_the_rest(name, tokens_per_width):
    model = PRESETS[name]
    memories = estimate(model, Training(1, int(tokens_per_width * model.embed_dim)))
    blocks = 18 * model.layers * model.block_parameters  # bytes of weights, gradients and optimizer states
    assert round(memories.blocks / blocks / tokens_per_width, 1) == 0.2


def test_float32_doubles_all_but_masks_and_statistics():
    model = PRESETS["gpt2"]
    assert coefficients(model, Training(1, 64, "standard", precision="float32"))[:2] == (2 * 32 + 2, 2 * 4 + 1)
    assert coefficients(PRESETS["llama2-7b"], Training(1, 64, "standard", precision="float32"))[:2] == (75, 4)


def test_statistics():
    """A layer norm has two statistics per row, an RMS norm one, and flash attention one (lse); all are fp32 in every
    precision.
    """
    for precision in memory.ITEMSIZE:
        gammas = [
            coefficients(PRESETS[name], Training(1, 64, precision=precision)).gamma for name in ("gpt2", "llama2-7b")
        ]
        assert gammas == [16 + 4 * 12, 8 + 4 * 32]


def test_grouped_heads_are_shared_until_there_is_one():
    sizes = {
        t: next(
            each.bytes
            for each in memory.saved_by_block(PRESETS["llama2-70b"], Training(1, 64, tensor=t))
            if each.name == "k and v"
        )
        for t in (1, 8, 64)
    }
    assert sizes == {1: 2 * 2 * 64 * 8 * 128, 8: 2 * 2 * 64 * 128, 64: 2 * 2 * 64 * 128}


def test_ring_shares_the_sequence():
    model = PRESETS["llama3-8b"]
    alone, shared = (estimate(model, Training(1, 8192, ring=ring)) for ring in (1, 4))
    assert shared.states == alone.states
    assert 4 * shared.activations == alone.activations


def test_recomputation_takes_the_activations_of_one_block():
    model = PRESETS["gpt2"]
    for attention in memory.ATTENTIONS:
        none, selective, full = (estimate(model, Training(2, 512, attention, checkpoint)) for checkpoint in memory.KEPT)
        block = none.blocks // model.layers
        assert none.recomputed == 0
        assert selective.recomputed == block - selective.blocks // model.layers
        assert selective.recomputed == (5 * 2 * 12 * 512**2 if attention == "standard" else 0)
        assert full.blocks == 12 * 2 * 512 * 768 * 2
        assert full.recomputed == block - full.blocks // model.layers


# ----------------------------------------------------------------------------------------------- measured on the CPU


@pytest.mark.parametrize("precision", DTYPES)
@pytest.mark.parametrize("attention", ATTENTION)
@pytest.mark.parametrize("family", BLOCKS)
def test_block_is_measured_as_modelled(family, attention, precision):
    _, sizes = BLOCKS[family]
    batch, lengths = 2, (32, 64)
    measured = [measure_block(family, attention, precision, batch, seqlen) for seqlen in lengths]
    trainings = [Training(batch, seqlen, attention, precision=precision) for seqlen in lengths]
    modelled = [sum(tensor.bytes for tensor in memory.saved_by_block(sizes, training)) for training in trainings]
    assert measured == pytest.approx(modelled, rel=WITHIN)

    # beta, the coefficient of the squared length, follows from measurements at a length and at twice that length.
    beta = (measured[1] - 2 * measured[0]) / (batch * sizes.heads * 2 * lengths[0] ** 2)
    assert beta == pytest.approx(coefficients(sizes, trainings[0]).beta, rel=WITHIN, abs=0.01)
    assert (abs(beta) < 0.01) == (attention == "flash")


def test_an_additional_tensor_is_noticed():
    """A block that saves b s d / 2 elements more than the model predicts is outside the tolerance."""

    class Wasteful(GPTBlock):
        def forward(self, x):
            return super().forward(x) + F.pad(x[..., : x.shape[-1] // 2].exp(), (0, x.shape[-1] // 2))

    x = torch.randn(2, 64, SMALL_GPT.embed_dim, dtype=torch.bfloat16, requires_grad=True)
    modelled = sum(tensor.bytes for tensor in memory.saved_by_block(SMALL_GPT, Training(2, 64)))
    assert sum(measure(Wasteful(SMALL_GPT, "flash").bfloat16(), x).values()) > (1 + 2 * WITHIN) * modelled


class LanguageModel(nn.Module):
    """The loss of a GPT, with a checkpoint around every block or around none."""

    def __init__(self, sizes, attention, is_checkpointed):
        super().__init__()
        self.run = functools.partial(checkpoint, use_reentrant=False) if is_checkpointed else lambda block, x: block(x)
        self.tokens, self.positions = (nn.Embedding(n, sizes.embed_dim) for n in (sizes.vocab_size, sizes.context))
        self.blocks = nn.ModuleList(GPTBlock(sizes, attention) for _ in range(sizes.layers))
        self.norm = nn.LayerNorm(sizes.embed_dim)

    def forward(self, tokens, targets):
        x = dropout(self.tokens(tokens) + self.positions.weight[: tokens.shape[1]])
        for block in self.blocks:
            x = self.run(block, x)
        logits = F.linear(self.norm(x), self.tokens.weight)
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


@pytest.mark.parametrize("attention", ATTENTION)
@pytest.mark.parametrize("kind", ["none", "full"])
def test_language_model_is_measured_as_modelled(attention, kind):
    batch, seqlen = 2, 64
    model = LanguageModel(SMALL_GPT, attention, kind == "full").bfloat16()
    assert sum(parameter.numel() for parameter in model.parameters()) == SMALL_GPT.parameters
    tokens, targets = torch.randint(SMALL_GPT.vocab_size, (2, batch, seqlen)).unbind()
    measured = measure(model, {"tokens": tokens, "targets": targets.clone()})
    modelled = estimate(SMALL_GPT, Training(batch, seqlen, attention, kind))
    assert sum(measured.values()) == pytest.approx(modelled.blocks + modelled.ends, rel=WITHIN)


def test_measure_names_the_module_that_saves_first():
    block = GPTBlock(SMALL_GPT, "flash")
    x = torch.randn(2, 8, SMALL_GPT.embed_dim)
    measured = measure(block, (x,))
    bsd, statistics, lse, seed = 4 * x.numel(), 2 * 4 * 2 * 8, 4 * 2 * 8 * 4, 8
    assert measured == {
        "norm1": bsd + statistics,
        "qkv": bsd,
        # the block itself saves q, k, v, out, lse and seed, two dropout masks, and the input of gelu
        "": 4 * bsd + lse + seed + 2 * bsd // 4 + 4 * bsd,
        "norm2": bsd + statistics,
        "mlp_in": bsd,
        "mlp_out": 4 * bsd,
    }
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in block.modules())


@pytest.mark.parametrize("attention", ATTENTION)
def test_measure_needs_no_contents(attention):
    """A model too large for this machine can be measured on the meta device."""
    sizes = replace(SMALL_GPT, embed_dim=8192, heads=64, kv_heads=64, head_dim=128, mlp_dim=32768)
    with torch.device("meta"):
        block = GPTBlock(sizes, attention).bfloat16()
        measured = measure(block, torch.empty(8, 8192, 8192, dtype=torch.bfloat16))
    modelled = sum(tensor.bytes for tensor in memory.saved_by_block(sizes, Training(8, 8192, attention)))
    assert sum(measured.values()) == pytest.approx(modelled, rel=WITHIN)


def test_measure_requires_a_module():
    with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module, not <class 'function'>"):
        measure(flash_attention, torch.zeros(1))


# ------------------------------------------------------------------------------------------------ configurations

CONFIGS = {
    "gpt2": dict(
        model_type="gpt2", n_embd=768, n_head=12, n_layer=12, n_positions=1024, vocab_size=50257, n_inner=None,
        activation_function="gelu_new", attn_pdrop=0.1, embd_pdrop=0.1, resid_pdrop=0.1,
    ),
    "llama2-70b": dict(
        model_type="llama", hidden_size=8192, intermediate_size=28672, max_position_embeddings=4096,
        num_attention_heads=64, num_hidden_layers=80, num_key_value_heads=8, vocab_size=32000, hidden_act="silu",
        tie_word_embeddings=False,
    ),
    "llama3-8b": dict(
        model_type="llama", hidden_size=4096, intermediate_size=14336, max_position_embeddings=8192,
        num_attention_heads=32, num_hidden_layers=32, num_key_value_heads=8, vocab_size=128256, hidden_act="silu",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CONFIGS)
def test_config(name, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIGS[name]))
    assert memory.load(str(path)) == memory.load(name) == PRESETS[name]


def test_config_without_dropout_or_with_relu(tmp_path):
    path = tmp_path / "config.json"
    off = dict(attn_pdrop=0, embd_pdrop=0, resid_pdrop=0.0, activation_function="relu")
    path.write_text(json.dumps(CONFIGS["gpt2"] | off))
    model = memory.load(str(path))
    assert not model.dropout
    assert coefficients(model, Training(1, 64, "standard"))[:2] == (34 - 2 - 8, 2)


@pytest.mark.parametrize("name", ["gpt2", "llama3-8b"])
def test_models_that_transformers_builds_have_the_same_tensors(name):
    """The tensors of a model that transformers builds match the preset of that model."""
    model, preset = Transformer(**model_config.dimensions(CONFIGS[name])), PRESETS[name]
    assert model.parameters == preset.parameters and model.block_parameters == preset.block_parameters
    for attention in memory.ATTENTIONS:
        training = Training(2, 128, attention)
        assert memory.saved_by_block(model, training) == memory.saved_by_block(preset, training)


SMALL = dict(
    hidden_size=64, num_attention_heads=4, num_hidden_layers=3, vocab_size=100, max_position_embeddings=50,
)  # fmt: skip
GATED = SMALL | dict(intermediate_size=96, num_key_value_heads=2)


@pytest.mark.parametrize(
    "config, sizes",
    [
        (GATED | dict(model_type="qwen2"), dict(kv_heads=2, mlp_dim=96, activation="swiglu", context=50)),
        (
            GATED | dict(model_type="mixtral", num_local_experts=4, num_experts_per_tok=2),
            dict(kv_heads=2, mlp_dim=2 * 96, activation="swiglu"),
        ),
        (SMALL | dict(model_type="opt", ffn_dim=96), dict(kv_heads=4, mlp_dim=96, activation="relu", layer_norm=True)),
        (SMALL | dict(model_type="bloom"), dict(mlp_dim=256, activation="gelu")),
        (SMALL | dict(model_type="falcon", ffn_hidden_size=200), dict(kv_heads=1, mlp_dim=200, activation="gelu")),
        (dict(model_type="llava", text_config=GATED | dict(model_type="llama")), dict(kv_heads=2, mlp_dim=96)),
    ],
    ids=lambda each: each.get("model_type"),
)
def test_folder_of_any_language_model(config, sizes, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = memory.load(str(tmp_path))
    assert (model.layers, model.embed_dim, model.heads, model.vocab_size) == (3, 64, 4, 100)
    assert {name: getattr(model, name) for name in sizes} == sizes
    head_dim, kv_heads = 16, model.kv_heads
    matrices = 3 if model.activation == "swiglu" else 2
    experts = config.get("num_local_experts", 1)
    width = model.mlp_dim // config.get("num_experts_per_tok", 1)
    # `least` omits norms and biases
    least = 2 * 64 * 64 + 2 * 64 * kv_heads * head_dim + experts * matrices * 64 * width
    assert least < model.block_parameters < 1.1 * least
    assert model.parameters == 3 * model.block_parameters + model.end_parameters


@pytest.mark.parametrize(
    "config, message",
    [
        (dict(model_type="no_such_model"), "knows no model of type 'no_such_model'"),
        (dict(model_type=["gpt2"]), "knows no model of type ['gpt2']"),
        ({}, "knows no model of type None"),
        (dict(model_type="vit"), "builds no causal language model of type 'vit'"),
        (dict(model_type="qwen2", hidden_size="wide"), "builds no causal language model of type 'qwen2'"),
        (dict(model_type="llama"), "has no 'num_hidden_layers'"),
        (dict(model_type="mamba", hidden_size=64, num_hidden_layers=2), "has no 'num_attention_heads'"),
    ],
    ids=str,
)
def test_config_of_another_kind_is_refused(config, message, tmp_path, capsys):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    assert main(["memory", "--model", str(tmp_path)]) == 1
    output = capsys.readouterr()
    assert output.err.startswith(str(path)) and message in output.err and output.err.count("\n") == 1


def test_without_transformers_three_model_types_are_read(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIGS["gpt2"]))
    assert memory.load(str(tmp_path)) == PRESETS["gpt2"]
    path.write_text(json.dumps(GATED | dict(model_type="qwen2")))
    with pytest.raises(ImportError, match=re.escape(f"{path} describes a model of type 'qwen2', which needs transf")):
        memory.load(str(tmp_path))


def test_folder_without_a_config(tmp_path, capsys):
    assert main(["memory", "--model", str(tmp_path)]) == 1
    error = capsys.readouterr().err
    assert str(tmp_path / "config.json") in error and error.count("\n") == 1


@pytest.mark.parametrize(
    "text, message",
    [
        ("[]", "does not contain a JSON object"),
        ("5", "does not contain a JSON object"),
        ("{", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        (json.dumps(CONFIGS["gpt2"] | dict(n_embd=float("inf"))), "embed_dim must be a whole number, not inf"),
        (json.dumps(CONFIGS["gpt2"] | dict(n_embd=float("nan"))), "embed_dim must be a whole number, not nan"),
        (json.dumps(CONFIGS["gpt2"] | dict(n_layer=-3)), "layers must be positive, not -3"),
        (json.dumps(CONFIGS["gpt2"] | dict(n_inner=-3)), "mlp_dim must be positive, not -3"),
        (json.dumps(CONFIGS["gpt2"] | dict(n_head=10**400)), "heads must be less than 2**63"),
        (json.dumps(CONFIGS["gpt2"] | dict(n_head="12")), "heads must be a whole number, not '12'"),
        (json.dumps(CONFIGS["gpt2"] | dict(vocab_size=None)), "vocab_size must be a whole number, not None"),
        (json.dumps(CONFIGS["gpt2"] | dict(embd_pdrop="0")), "not supported between instances"),
        (json.dumps(CONFIGS["llama3-8b"] | dict(head_dim=[1])), "head_dim must be a whole number, not [1]"),
    ],
)
def test_invalid_configs_are_refused_in_one_line(text, message, tmp_path, capsys):
    path = tmp_path / "config.json"
    path.write_text(text)
    assert main(["memory", "--model", str(path)]) == 1
    output = capsys.readouterr()
    assert message in output.err and str(path) in output.err
    assert output.err.count("\n") == 1 and output.out == ""


@pytest.mark.parametrize(
    "wrong, message",
    [
        (
            lambda: Training(0, 8, "flush", tensor=-1),
            "Training: batch must be positive, not 0; tensor must be positive, not -1; "
            "attention must be one of standard, flash, not 'flush'",
        ),
        (lambda: Training(1, 8, "standard", ring=2), "Training: ring 2 needs flash attention"),
        (
            lambda: Transformer(1, 8, 0, 5, 5, activation="tanh"),
            "Transformer: heads must be positive, not 0; kv_heads must be positive, not 0; "
            "activation must be one of gelu, relu, swiglu, not 'tanh'",
        ),
        (lambda: Transformer(1, 8, 4, 5, 5, kv_heads=3), "heads 4 must be a multiple of kv_heads 3"),
        (
            lambda: estimate(PRESETS["gpt2"], Training(1, 8, tensor=5)),
            "estimate: heads 12 must be a multiple of tensor 5; mlp_dim 3072 must be a multiple of tensor 5; "
            "kv_heads 12 must be a multiple or a divisor of tensor 5",
        ),
        (
            lambda: memory.largest_batch(PRESETS["gpt2"], Training(1, 8), float("inf")),
            "memory must be a number of bytes, not inf",
        ),
        (lambda: memory.load("gpt5"), "'gpt5' is neither a model folder, a config.json nor one of gpt2, llama2-7b"),
    ],
)
def test_errors_name_every_reason(wrong, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        wrong()


@pytest.mark.parametrize("checkpoint", memory.KEPT)
@pytest.mark.parametrize("attention", memory.ATTENTIONS)
def test_largest_batch_and_longest_sequence(attention, checkpoint):
    model, training, limit = PRESETS["llama3-8b"], Training(2, 1000, attention, checkpoint, fsdp=16), 80 * memory.GB
    batch = memory.largest_batch(model, training, limit)
    seqlen = memory.longest_sequence(model, training, limit)
    assert batch > 2 and seqlen > 1000
    for most in (replace(training, batch=batch), replace(training, seqlen=seqlen)):
        more = replace(most, batch=batch + 1) if most.batch == batch else replace(most, seqlen=seqlen + 1)
        assert estimate(model, most).total <= limit < estimate(model, more).total


def test_nothing_fits():
    model, training = PRESETS["llama3-8b"], Training(1, 1)
    assert memory.largest_batch(model, training, 80 * memory.GB) == 0
    assert memory.longest_sequence(model, training, 80 * memory.GB) == 0


# -------------------------------------------------------------------------------------------------------- the command


def run(*words):
    """Return the output of the command."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        assert main(["memory", *words]) == 0
    return printed.getvalue()


def test_command_prints_the_estimate():
    lines = run("--model", "gpt2", "--batch", "8", "--checkpoint", "full", "--precision", "float32").splitlines()
    assert lines[0] == "gpt2, 0.124e9 parameters: b = 8, s = 1024, float32, checkpoint full"
    rows = {line[:42].strip(): line[42:].split() for line in lines[1:]}
    columns = [
        estimate(PRESETS["gpt2"], Training(8, 1024, attention, "full", "float32"))
        for attention in rows["GB on one GPU"]
    ]
    assert list(rows["total"]) == [f"{column.total / 1e9:.2f}" for column in columns]
    for part, label in memory.PARTS.items():
        assert rows[label] == [f"{getattr(column, part) / 1e9:.2f}" for column in columns]
    assert (rows["alpha of a block"], rows["beta of a block"]) == (["4", "4"], ["0", "0"])


def test_command_says_what_fits():
    words = ["--model", "llama3-8b", "--fsdp", "8", "--tensor", "2", "--no-sequence-parallel", "--gb", "40"]
    printed = run(*words)
    assert "s = 8192, mixed, fsdp 8, tensor 2, no sequence parallelism, checkpoint none" in printed
    training = Training(1, 8192, checkpoint="full", fsdp=8, tensor=2, sequence_parallel=False)
    longest = memory.longest_sequence(PRESETS["llama3-8b"], training, 40e9)
    assert printed.splitlines()[-1].split()[-1] == str(longest)


def test_command_with_ring_has_flash_alone():
    assert run("--model", "gpt2", "--ring", "4").splitlines()[1].split()[-2:] == ["GPU", "flash"]


@pytest.mark.parametrize("suffix, begins", [("png", b"\x89PNG"), ("svg", b"<?xml")])
def test_command_draws(tmp_path, suffix, begins):
    path = tmp_path / f"memory.{suffix}"
    run("--model", "gpt2", "--gb", "8", "--plot", str(path))
    assert path.read_bytes().startswith(begins)


@pytest.mark.parametrize(
    "words, message",
    [
        (["--model", "gpt5"], "'gpt5' is neither"),
        (["--model", "missing/config.json"], "No such file"),
        (["--model", "gpt2", "--batch", "0"], "batch must be positive, not 0"),
        (["--model", "gpt2", "--gb", "inf"], "memory must be a number of bytes, not inf"),
        (["--model", "gpt2", "--gb", "0"], "--gb must be more than 0, not 0"),
        (["--model", "gpt2", "--gb", "-3"], "--gb must be more than 0, not -3"),
        (["--model", "gpt2", "--gb", "nan"], "memory must be a number of bytes, not nan"),
        (["--model", "gpt2", "--plot", "plot.nothing"], "plot.nothing: Format 'nothing' is not supported"),
    ],
)
def test_command_refuses(words, message, capsys):
    assert main(["memory", *words]) == 1
    output = capsys.readouterr()
    assert message in output.err and output.err.count("\n") == 1


def test_model_needs_numpy_alone():
    code = (
        "import sys; sys.modules['torch'] = None; import cupy_flash; from cupy_flash.__main__ import main; "
        "main(['memory', '--model', 'gpt2']); print(cupy_flash.memory.PRESETS['gpt2'].parameters)"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert result.stdout.endswith("124439808\n")


GUIDE = (ROOT / "docs" / "memory.md").read_text(encoding="utf-8")
PRINTED = re.findall(r"^```console\n\$ python -m cupy_flash memory (.*?)\n(.*?)^```$", GUIDE, re.M | re.S)


def test_guide_has_a_printed_example():
    assert PRINTED
    assert "--plot bench/results/memory-model.png" in GUIDE
    assert (ROOT / "bench" / "results" / "memory-model.png").is_file()


@pytest.mark.parametrize("words, printed", PRINTED)
def test_guide_has_what_the_command_prints(words, printed):
    assert run(*shlex.split(words)) == printed
