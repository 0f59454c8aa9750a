"""examples/train_gpt.py: both attentions train alike, a resumed run equals an uninterrupted one, samples, errors."""

import functools
import importlib.util
import io
import json
import math
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from cupy_flash import memory

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
STEPS = 30
# With this learning rate the model learns to attend in 30 steps, and training does not yet amplify rounding much. Over
# 20 seeds the difference of sdpa and cupy_flash stays within a quarter of the limit of
# test_both_attentions_train_alike, and a scale that is wrong by 1 % exceeds it by a factor of 1.8 or more.
TINY = shlex.split("--steps 30 --batch 4 --context 128 --layers 2 --heads 4 --embed 32 --learning-rate 5e-3")


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("train_gpt", EXAMPLES / "train_gpt.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.read_text = functools.cache(module.read_text)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # on a busy machine two threads that wait for each other take 20 times as long
    yield module
    torch.set_num_threads(threads)


def train(example, log, *options):
    """Return the lines that a tiny run logs."""
    example.main([*TINY, "--log", str(log), *map(str, options)])
    return [json.loads(line) for line in log.read_text().splitlines()]


def losses_of(lines):
    return np.array([line["loss"] for line in lines])


def formula(q, k, v, dropout, error=1.0):
    """Return textbook attention with the scores multiplied by `error`."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    scores = q @ k.transpose(-1, -2) * (error / math.sqrt(q.shape[-1]))
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    return (scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v).transpose(1, 2)


def test_both_attentions_train_alike(example, tmp_path, monkeypatch):
    # How far two correct runs differ by rounding depends on the text and the machine, so a third attention measures it.
    # cupy_flash may differ from sdpa by 4 times the difference of the formula, plus the rounding of the loss.
    monkeypatch.setitem(example.ATTENTIONS, "formula", formula)
    monkeypatch.setitem(example.ATTENTIONS, "one percent off", functools.partial(formula, error=1.01))
    curves = {name: losses_of(train(example, tmp_path / "log", "--attention", name)) for name in example.ATTENTIONS}
    apart = {name: np.abs(curve - curves["sdpa"]).max() for name, curve in curves.items()}
    allowed = 4 * (apart["formula"] + np.finfo(np.float32).eps * curves["sdpa"].max())
    assert all(len(curve) == STEPS for curve in curves.values())
    assert apart["cupy_flash"] <= allowed, (apart, allowed)
    assert apart["one percent off"] > allowed, ("the limit would not notice an error of 1 %", apart, allowed)


def test_loss_falls(example, tmp_path):
    lines = train(example, tmp_path / "log")
    losses = losses_of(lines)
    assert losses[0] == pytest.approx(math.log(256), abs=0.2)  # the loss of an untrained model
    assert losses[-5:].mean() < losses[:5].mean() - 1
    validated = [line["step"] for line in lines if "validation_loss" in line]
    assert validated == [20, 30]
    assert lines[-1]["validation_loss"] < math.log(256) - 1


@pytest.mark.parametrize("attention", ["cupy_flash", "sdpa"])
def test_a_resumed_run_is_bitwise_an_uninterrupted_one(example, tmp_path, monkeypatch, attention):
    options = ("--attention", attention, "--dropout", 0.1, "--save-every", 15)
    # Sampling does not draw from the generator of training.
    whole = train(example, tmp_path / "whole.log", *options, "--save", tmp_path / "whole.pt", "--sample-every", 8)

    with monkeypatch.context() as patch:
        patch.setattr(example, "learning_rate", functools.partial(stop_at, 20, example.learning_rate))
        with pytest.raises(KeyboardInterrupt):
            train(example, tmp_path / "resumed.log", *options, "--save", tmp_path / "resumed.pt")
    torch.manual_seed(12345)
    resumed = train(example, tmp_path / "resumed.log", *options, "--save", tmp_path / "resumed.pt")

    assert [line["step"] for line in resumed] == [*range(1, 20), *range(16, STEPS + 1)]
    assert resumed == [*whole[:19], *whole[15:]]
    assert_same(*(torch.load(tmp_path / name, weights_only=True) for name in ("whole.pt", "resumed.pt")))


def stop_at(last, learning_rate, step, arguments):
    if step == last:
        raise KeyboardInterrupt
    return learning_rate(step, arguments)


def assert_same(a, b, where="state"):
    """Assert that nested dicts and lists are equal, tensors bitwise."""
    assert type(a) is type(b), where
    if isinstance(a, dict):
        assert a.keys() == b.keys(), where
        for key in a:
            assert_same(a[key], b[key], f"{where}[{key!r}]")
    elif isinstance(a, list):
        assert len(a) == len(b), where
        for i, pair in enumerate(zip(a, b, strict=True)):
            assert_same(*pair, f"{where}[{i}]")
    else:
        assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b, where


def test_finished_run_only_samples(example, tmp_path, capsys):
    options = [*TINY, "--steps", "2", "--save", str(tmp_path / "gpt.pt")]
    example.main(options)
    first = capsys.readouterr().out.splitlines()
    saved = (tmp_path / "gpt.pt").read_bytes()
    example.main([*options, "--log", str(tmp_path / "log")])
    again = capsys.readouterr().out.splitlines()
    sample_start = first.index("--- sample after 2 steps")
    assert again[-len(first[sample_start:]) :] == first[sample_start:]
    assert (tmp_path / "log").read_text() == ""
    assert (tmp_path / "gpt.pt").read_bytes() == saved


def test_broken_save_keeps_the_old_state(example, tmp_path, monkeypatch):
    path = tmp_path / "gpt.pt"
    example.save_state(path, {"step": 15})

    def disk_full(state, file):
        file.write(b"half a state")
        raise OSError("no space left")

    with monkeypatch.context() as patch, pytest.raises(OSError, match="no space left"):
        patch.setattr(torch, "save", disk_full)
        example.save_state(path, {"step": 30})
    assert example.load_state(path, {"step": 15}) == {"step": 15}
    example.save_state(path, {"step": 30})
    assert example.load_state(path, {"step": 30}) == {"step": 30}


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(lambda content: content[: len(content) // 2], id="truncated"),
        pytest.param(lambda content: content[:-1], id="one-byte-short"),
        pytest.param(lambda content: content[:10], id="shorter-than-the-checksum"),
        pytest.param(lambda content: b"", id="empty"),
        pytest.param(lambda content: content + b"\0", id="longer"),
        *(
            pytest.param(
                lambda content, part=part: bytes(b ^ (i == len(content) * part // 8) for i, b in enumerate(content)),
                id=f"bit-at-{part}-of-8",
            )
            for part in range(8)
        ),
    ],
)
def test_damaged_state_is_refused(example, tmp_path, damage):
    path = tmp_path / "gpt.pt"
    example.save_state(path, {"step": 15, "model": torch.arange(1000.0)})
    assert torch.load(path, weights_only=True)["step"] == 15
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(SystemExit, match=r"gpt\.pt is damaged"):
        example.load_state(path, {"step": 15})


def test_state_of_another_run_is_refused(example, tmp_path, monkeypatch):
    path = tmp_path / "gpt.pt"
    options = [*TINY, "--steps", "1", "--save", str(path)]
    example.main(options)
    with pytest.raises(
        SystemExit, match=r"gpt\.pt was saved by another run: layers is 2 there, 3 here; embed is 32 there, 48 "
    ):
        example.main([*options, "--layers", "3", "--embed", "48"])
    training, validation = example.read_text()
    monkeypatch.setattr(example, "read_text", lambda: (training[1:], validation))
    with pytest.raises(SystemExit, match=r"another run: text is \w+ there, \w+ here$"):
        example.main(options)


def test_heads_must_divide_embed(example, capsys):
    with pytest.raises(SystemExit):
        example.main([*TINY, "--heads", "5"])
    assert "--embed 32 is not a multiple of --heads 5" in capsys.readouterr().err


def test_samples_are_printable(example, capsys):
    # An untrained model samples any byte, also control characters and incomplete UTF-8.
    prompt = "\x1b[31m[/é]\ndef "
    example.main([*TINY, "--steps", "2", "--sample-every", "1", "--prompt", prompt])
    samples = capsys.readouterr().out.split("--- sample after ")[1:]
    assert len(samples) == 2
    for steps, sample in enumerate(samples, start=1):
        text = sample.removeprefix(f"{steps} steps\n").rpartition("\n---\n")[0]
        assert text.startswith("?[31m[/??]\ndef ")
        assert len(text) == len(prompt.encode()) + example.SAMPLE_BYTES
        assert all(32 <= ord(character) < 127 or character == "\n" for character in text)


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize("watched, rich_installed", [(True, True), (True, False), (False, True)])
def test_progress(example, monkeypatch, watched, rich_installed):
    stdout = Terminal() if watched else io.StringIO()
    monkeypatch.setattr("sys.stdout", stdout)
    monkeypatch.setenv("COLUMNS", "120")
    if not rich_installed:
        monkeypatch.setitem(sys.modules, "rich", None)
    example.main([*TINY, "--steps", "3", "--sample-every", "2", "--prompt", "[/b]def "])
    said = stdout.getvalue()
    drawn = "\x1b[" in said and "━" in said
    assert drawn == (watched and rich_installed)
    assert ("step 3/3: loss " in said) != drawn
    assert all(word in said for word in ("3/3", "loss", "validation", "tokens/s, 0:00:00 left"))
    assert all(f"sample after {steps} steps\n[/b]def " in said for steps in (2, 3))


def test_text_is_the_same_each_time_and_split_by_file(example):
    training, validation = example.read_text()
    again = example.read_text.__wrapped__()
    assert torch.equal(training, again[0]) and torch.equal(validation, again[1])
    assert 0.02 < len(validation) / len(training) < 0.5
    training, validation = (text.numpy().tobytes() for text in (training, validation))
    assert Path(json.__file__).read_bytes() in training + validation
    assert validation[:2000] not in training


def test_checkpointed_run_is_bitwise_the_same(example, tmp_path):
    options = ("--steps", 6, "--dropout", 0.1)
    plain, checkpointed = (train(example, tmp_path / "log", *options, *more) for more in ((), ("--checkpoint",)))
    assert checkpointed == plain


def test_checkpoint_keeps_the_input_of_every_block(example):
    kept = {}
    for more in ((), ("--checkpoint",)):
        arguments = example.parse_arguments([*TINY, *more])
        tokens = torch.zeros(arguments.batch, arguments.context, dtype=torch.int64)
        measured = memory.measure(example.GPT(arguments), tokens)
        inside = [name for name in measured if re.match(r"blocks\.\d+\.", name)]
        kept[more] = sum(measured.values())
        assert bool(inside) == (not more)
    sizes = memory.Transformer(2, 32, 4, 256, 128, dropout=False)
    for more, checkpoint in (((), "none"), (("--checkpoint",), "full")):
        training = memory.Training(4, 128, checkpoint=checkpoint, precision="float32")
        logarithms = 4 * 4 * 128 * 256 + 8 * 4 * 128  # softmax and targets of the loss, which is not measured
        modelled = memory.estimate(sizes, training)
        assert kept[more] == pytest.approx(modelled.blocks + modelled.ends - logarithms, rel=0.02)


def assert_two_processes_train_alike(example, tmp_path, monkeypatch, *sharing):
    """Assert that two processes of torchrun log the losses of a single process, up to rounding."""
    monkeypatch.setitem(example.ATTENTIONS, "formula", formula)
    options = ["--steps", "8", "--sample-every", "4"]
    alone, other = (
        train(example, tmp_path / "log", *options, "--attention", choice) for choice in ("cupy_flash", "formula")
    )
    log = tmp_path / "shared.log"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--"]
    command += [EXAMPLES / "train_gpt.py", *TINY, *options, *sharing, "--log", log]
    paths = os.pathsep.join([str(EXAMPLES.parent), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("--- sample after 8 steps\ndef ") == 1  # only one process logs

    shared = [json.loads(line) for line in log.read_text().splitlines()]
    assert [line["step"] for line in shared] == [*range(1, 9)]
    rounding = np.abs(losses_of(other) - losses_of(alone)).max() + np.finfo(np.float32).eps * losses_of(alone).max()
    assert np.abs(losses_of(shared) - losses_of(alone)).max() <= 4 * rounding
    assert shared[-1]["validation_loss"] == pytest.approx(alone[-1]["validation_loss"], abs=4 * rounding)


@pytest.mark.exhaustive
def test_fsdp_trains_alike(example, tmp_path, monkeypatch):
    """Each rank computes half of every batch; blocks are checkpointed."""
    assert_two_processes_train_alike(example, tmp_path, monkeypatch, "--fsdp", "--checkpoint")


@pytest.mark.exhaustive
def test_ring_trains_alike(example, tmp_path, monkeypatch):
    """Each rank holds half of every sequence; a single process resumes from the saved state."""
    saved = tmp_path / "ring.pt"
    assert_two_processes_train_alike(example, tmp_path, monkeypatch, "--ring", "--save", saved)
    lines = train(example, tmp_path / "later.log", "--steps", 10, "--save", saved)
    assert [line["step"] for line in lines] == [9, 10]


@pytest.mark.parametrize(
    "options, message",
    [
        (["--fsdp"], "--fsdp needs torchrun: torchrun --nproc-per-node 2"),
        (["--ring"], "--ring needs torchrun: torchrun --nproc-per-node 2"),
        (["--fsdp", "--save", "gpt.pt"], "--save does not work with --fsdp"),
        (
            ["--ring", "--attention", "sdpa"],
            "--ring uses cupy_flash's ring attention and does not work with --attention sdpa",
        ),
        (["--ring", "--fsdp"], "argument --fsdp: not allowed with argument --ring"),
    ],
    ids=["fsdp alone", "ring alone", "fsdp saving", "ring of sdpa", "fsdp in ring"],
)
def test_arguments_that_contradict_each_other_are_refused(example, capsys, options, message):
    with pytest.raises(SystemExit):
        example.main([*TINY, *options])
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "option, message",
    [
        ("--fsdp", "--batch 4 is not a multiple of 3 processes"),
        ("--ring", "--context 128 is not a multiple of 6: two chunks per process"),
    ],
    ids=["batch", "context"],
)
def test_processes_get_equal_shares(example, monkeypatch, option, message):
    for name in ("init_process_group", "destroy_process_group"):
        monkeypatch.setattr(example.distributed, name, lambda: None)
    monkeypatch.setattr(example.distributed, "is_torchelastic_launched", lambda: True)
    monkeypatch.setattr(example, "rank_and_processes", lambda: (0, 3))
    with pytest.raises(SystemExit, match=message):
        example.main([*TINY, option])


@pytest.mark.parametrize("document", ["README.md", "train_gpt.py"])
def test_documented_commands_are_valid(example, document, monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_torchelastic_launched", lambda: True)
    lines = (EXAMPLES / document).read_text(encoding="utf-8").splitlines()
    commands = [
        shlex.split(line, comments=True)
        for line in lines
        if line.startswith(("    python examples/train_gpt.py", "    torchrun "))
    ]
    assert len(commands) >= 3
    for command in commands:
        script = command.index("examples/train_gpt.py")
        assert command[:script] in (["python"], ["torchrun", "--nproc-per-node", "2", "--"])
        example.parse_arguments(command[script + 1 :])
