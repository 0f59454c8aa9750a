"""Train a small GPT on the source of Python's standard library, with cupy_flash attention.

    python examples/train_gpt.py                                       # a minute on two CPU cores
    python examples/train_gpt.py --attention sdpa                      # the same with torch's attention
    python examples/train_gpt.py --steps 2000 --save gpt.pt            # stop it any time; run it again to resume
    python examples/train_gpt.py --checkpoint --context 1024           # less memory: activation checkpointing
    torchrun --nproc-per-node 2 -- examples/train_gpt.py --fsdp        # parameters and batch sharded over 2 processes
    torchrun --nproc-per-node 2 -- examples/train_gpt.py --ring        # every sequence sharded over two processes

A seed determines batches and initial weights. Both attentions then give the same losses up to rounding, except with
dropout, for which they draw different random bits. The file is meant to be read from top to bottom and copied: text,
model, processes, saved state, training loop.
"""

from __future__ import annotations

import argparse
import copy
import datetime
import hashlib
import importlib.util
import io
import json
import math
import os
import sys
import sysconfig
import time
from collections.abc import Callable
from contextlib import nullcontext, redirect_stdout
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from cupy_flash.adapters.torch import attention
from cupy_flash.distributed import positions, ring_attention

VOCABULARY = 256  # a token is a byte
HELD_OUT = 10  # every tenth file is validation data
VALIDATE_EVERY, VALIDATION_BATCHES = 20, 4
SAMPLE_BYTES, TEMPERATURE = 200, 0.8
CHECKSUM_BYTES = 32  # SHA-256


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a small GPT on the source of Python's standard library.")
    parser.add_argument(
        "--attention", choices=ATTENTIONS, default="cupy_flash", help="attention implementation [%(default)s]"
    )
    parser.add_argument("--steps", type=int, default=200, help="total optimizer steps [%(default)s]")
    parser.add_argument("--batch", type=int, default=16, help="sequences per step [%(default)s]")
    parser.add_argument("--context", type=int, default=128, help="bytes per sequence [%(default)s]")
    parser.add_argument("--layers", type=int, default=4, help="blocks [%(default)s]")
    parser.add_argument("--heads", type=int, default=4, help="attention heads per block [%(default)s]")
    parser.add_argument("--embed", type=int, default=128, help="embedding size, a multiple of --heads [%(default)s]")
    parser.add_argument("--dropout", type=float, default=0.0, help="probability [%(default)s]")
    parser.add_argument("--learning-rate", type=float, default=3e-3, help="peak learning rate [%(default)s]")
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of weights, batches, dropout and samples [%(default)s]"
    )
    parser.add_argument("--device", default="cpu", help="torch device that the attention supports [%(default)s]")
    parser.add_argument(
        "--checkpoint", action="store_true", help="activation checkpointing: save only the input of each block"
    )
    shared = parser.add_mutually_exclusive_group()
    shared.add_argument("--fsdp", action="store_true", help="shard parameters and batch over the processes of torchrun")
    shared.add_argument("--ring", action="store_true", help="shard every sequence over the processes of torchrun")
    parser.add_argument("--save", type=Path, help="file to save to, and to resume from if it exists")
    parser.add_argument(
        "--save-every", type=int, default=100, help="steps between saves; also saves at the end [%(default)s]"
    )
    parser.add_argument(
        "--sample-every", type=int, default=100, help="steps between samples; also samples at the end [%(default)s]"
    )
    parser.add_argument("--prompt", default="def ", help="start of every sample [%(default)r]")
    parser.add_argument("--log", type=Path, help="file for one line of JSON per step")
    arguments = parser.parse_args(argv)
    if arguments.embed % arguments.heads:
        parser.error(f"--embed {arguments.embed} is not a multiple of --heads {arguments.heads}")
    if arguments.fsdp and arguments.save:
        parser.error("--save does not work with --fsdp, which shards the parameters")
    if arguments.ring and arguments.attention != "cupy_flash":
        parser.error(
            f"--ring uses cupy_flash's ring attention and does not work with --attention {arguments.attention}"
        )
    if (arguments.fsdp or arguments.ring) and not distributed.is_torchelastic_launched():
        option = "--fsdp" if arguments.fsdp else "--ring"
        parser.error(f"{option} needs torchrun: torchrun --nproc-per-node 2 -- examples/train_gpt.py {option}")
    return arguments


# ---------------------------------------------------------------------------------------------------------- the text


def read_text() -> tuple[Tensor, Tensor]:
    """Return (training, validation) bytes, uint8: the .py files of the standard library, sorted by name."""
    library = Path(sysconfig.get_path("stdlib"))
    # Skip installed packages, and the tests, which some systems do not ship.
    entries = [entry for entry in library.iterdir() if entry.name not in ("site-packages", "dist-packages", "test")]
    files = [file for entry in entries for file in ([entry] if entry.suffix == ".py" else entry.rglob("*.py"))]
    files.sort(key=lambda file: file.relative_to(library).parts)
    if len(files) < HELD_OUT:
        raise SystemExit(f"{library} has too few .py files to train on")
    contents = [file.read_bytes() for file in files]
    validation = contents[HELD_OUT - 1 :: HELD_OUT]
    del contents[HELD_OUT - 1 :: HELD_OUT]
    return tuple(torch.frombuffer(bytearray(b"".join(split)), dtype=torch.uint8) for split in (contents, validation))


def draw_batch(text: Tensor, arguments: argparse.Namespace, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return (tokens, next tokens), each (batch, context), int64, from random windows of the text.

    All processes draw the same windows and take their share: with FSDP of the windows, in a ring of the positions.
    """
    starts = torch.randint(len(text) - arguments.context, (arguments.batch, 1), generator=generator)
    if arguments.fsdp:
        rank, processes = rank_and_processes()
        starts = starts[rank::processes]
    windows = text[starts + torch.arange(arguments.context + 1)].long().to(arguments.device)
    local = local_positions(arguments)
    return windows[:, :-1][:, local], windows[:, 1:][:, local]


# --------------------------------------------------------------------------------------------------------- the model


def cupy_flash_attention(q: Tensor, k: Tensor, v: Tensor, dropout: float) -> Tensor:
    return attention(q, k, v, causal=True, dropout=dropout)


def sdpa_attention(q: Tensor, k: Tensor, v: Tensor, dropout: float) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True).transpose(1, 2)


def attention_in_ring(q: Tensor, k: Tensor, v: Tensor, dropout: float) -> Tensor:
    # The CPU generators of all processes are in the same state, so all draw the same dropout seed.
    seed = int(torch.randint(2**63 - 1, ())) if dropout else None
    return ring_attention(q, k, v, causal=True, dropout=dropout, seed=seed)


# Causal attention; q, k, v and the result are (batch, context, heads, embed // heads).
ATTENTIONS: dict[str, Callable[[Tensor, Tensor, Tensor, float], Tensor]] = {
    "cupy_flash": cupy_flash_attention,
    "sdpa": sdpa_attention,
}


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        super().__init__()
        embed = arguments.embed
        self.heads, self.dropout = arguments.heads, arguments.dropout
        self.attention = attention_in_ring if arguments.ring else ATTENTIONS[arguments.attention]
        self.attention_norm, self.mlp_norm = nn.LayerNorm(embed), nn.LayerNorm(embed)
        self.qkv, self.attention_out = nn.Linear(embed, 3 * embed), nn.Linear(embed, embed)
        self.mlp_in, self.mlp_out = nn.Linear(embed, 4 * embed), nn.Linear(4 * embed, embed)

    def forward(self, x: Tensor) -> Tensor:
        batch, context, embed = x.shape
        dropout = self.dropout if self.training else 0.0
        # q, k, v are views of one projection; neither attention copies them.
        q, k, v = self.qkv(self.attention_norm(x)).view(batch, context, 3, self.heads, -1).unbind(2)
        attended = self.attention(q, k, v, dropout).reshape(batch, context, embed)
        x = x + F.dropout(self.attention_out(attended), dropout)
        return x + F.dropout(self.mlp_out(F.gelu(self.mlp_in(self.mlp_norm(x)))), dropout)


class GPT(nn.Module):
    """Maps tokens (batch, context) to logits (batch, context, 256); embedding and output projection share weights."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        super().__init__()
        self.context, self.dropout, self.checkpoint = arguments.context, arguments.dropout, arguments.checkpoint
        self.local = local_positions(arguments)
        self.tokens = nn.Embedding(VOCABULARY, arguments.embed)
        self.positions = nn.Embedding(arguments.context, arguments.embed)
        self.blocks = nn.ModuleList(Block(arguments) for _ in range(arguments.layers))
        self.norm = nn.LayerNorm(arguments.embed)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                # As in GPT-2: scale down the 2 * layers projections onto the residual stream, so that its variance does
                # not grow with depth.
                is_residual = name.endswith("_out.weight")
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * arguments.layers) if is_residual else 0.02)
            elif "norm" not in name:
                nn.init.zeros_(parameter)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions.weight[self.local][: tokens.shape[1]]
        x = F.dropout(x, self.dropout, self.training)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpoint else block(x)
        return F.linear(self.norm(x), self.tokens.weight)


def loss_of(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


@torch.no_grad()
def validation_loss(model: GPT, text: Tensor, arguments: argparse.Namespace) -> float:
    """Return the mean loss over a fixed set of batches, without dropout."""
    generator = torch.Generator().manual_seed(arguments.seed)
    model.eval()
    losses = [loss_of(model, *draw_batch(text, arguments, generator)) for _ in range(VALIDATION_BATCHES)]
    model.train()
    return sum(map(mean_of_processes, losses)) / len(losses)


@torch.no_grad()
def sample(model: GPT, arguments: argparse.Namespace) -> str:
    """Return the prompt and SAMPLE_BYTES sampled bytes; bytes that are not printable ASCII become "?"."""
    generator = torch.Generator().manual_seed(arguments.seed)
    text = list(arguments.prompt.encode() or b"\n")
    model = without_ring(model) if arguments.ring else model
    model.eval()
    for _ in range(SAMPLE_BYTES):
        logits = model(torch.tensor([text[-model.context :]], device=arguments.device))[0, -1].cpu()
        text.append(int(torch.multinomial(F.softmax(logits / TEMPERATURE, dim=0), 1, generator=generator)))
    model.train()
    return "".join(chr(byte) if 32 <= byte < 127 or byte == ord("\n") else "?" for byte in text)


# ----------------------------------------------------------------------------------------------------- the processes


def rank_and_processes() -> tuple[int, int]:
    """Return (rank, number of processes); (0, 1) without torchrun."""
    return (distributed.get_rank(), distributed.get_world_size()) if distributed.is_initialized() else (0, 1)


def mean_of_processes(loss: Tensor) -> float:
    loss = loss.detach().clone()
    if distributed.is_initialized():
        distributed.all_reduce(loss)
    return loss.item() / rank_and_processes()[1]


def local_positions(arguments: argparse.Namespace) -> slice | Tensor:
    """Return this process's positions of a sequence: all, or its shard in a ring; all shards have the same size."""
    if not arguments.ring:
        return slice(None)
    return torch.from_numpy(positions(arguments.context, *rank_and_processes())).to(arguments.device)


def average_gradients(model: GPT) -> None:
    """Average the gradients over the ranks of a ring, where each loss is the mean of a shard; FSDP does it itself."""
    for parameter in model.parameters():
        distributed.all_reduce(parameter.grad)
        parameter.grad /= rank_and_processes()[1]


def without_ring(model: GPT) -> GPT:
    """Return a copy of the model that attends to unsharded sequences."""
    unsharded = copy.deepcopy(model)
    unsharded.local = slice(None)
    for block in unsharded.blocks:
        block.attention = cupy_flash_attention
    return unsharded


def shard(model: GPT, arguments: argparse.Namespace) -> None:
    """Shard every parameter with FSDP2; a block's parameters are all-gathered while it runs, forward and backward."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    rank, processes = rank_and_processes()
    mesh = init_device_mesh(torch.device(arguments.device).type, (processes,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    torch.manual_seed(arguments.seed + rank)  # the initial weights are equal; dropout must differ per process


# --------------------------------------------------------------------------------------------------- the saved state


def save_state(path: Path, state: dict[str, Any]) -> None:
    """Save atomically: after a crash `path` contains either the old state or the new one.

    A checksum is appended to the file; torch.load ignores it.
    """
    partial = path.with_name(path.name + ".partial")
    content = io.BytesIO()
    torch.save(state, content)
    with partial.open("wb") as file:
        file.write(content.getbuffer())
        file.write(hashlib.sha256(content.getbuffer()).digest())
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)


def load_state(path: Path, expected: dict[str, Any]) -> dict[str, Any]:
    """Return the saved state; SystemExit if it is damaged, or if its model or text differs from `expected`."""
    file = memoryview(path.read_bytes())
    content, checksum = file[:-CHECKSUM_BYTES], file[-CHECKSUM_BYTES:]
    if hashlib.sha256(content).digest() != checksum:
        raise SystemExit(f"{path} is damaged or was saved by another version: its checksum does not match")
    state = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    pairs = [(name, state.get(name), value) for name, value in expected.items()]
    differences = [f"{name} is {saved} there, {value} here" for name, saved, value in pairs if saved != value]
    if differences:
        raise SystemExit(f"{path} was saved by another run: {'; '.join(differences)}")
    return state


# ---------------------------------------------------------------------------------------------------------- the loop


def learning_rate(step: int, arguments: argparse.Namespace) -> float:
    """Return the learning rate of a step >= 1: linear warm-up for a tenth of the steps, cosine decay to 0.1 x peak."""
    warm_up = arguments.steps // 10 + 1
    if step <= warm_up:
        return arguments.learning_rate * step / warm_up
    cosine = math.cos(math.pi * (step - warm_up) / (arguments.steps - warm_up))
    return arguments.learning_rate * (0.55 + 0.45 * cosine)


def progress_bar(step: int, steps: int) -> Any:
    """Return a rich progress bar; None without rich or a terminal, where plain lines are printed instead."""
    if importlib.util.find_spec("rich") is None or not sys.stdout.isatty():
        return None
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    bar = Progress(MofNCompleteColumn(), BarColumn(), TextColumn("{task.fields[status]}", markup=False))
    bar.add_task("training", completed=step, total=steps, status="")
    return bar


def train(arguments: argparse.Namespace) -> None:
    steps, saved = arguments.steps, arguments.save
    is_saver = saved is not None and rank_and_processes()[0] == 0
    training, validation = read_text()
    run = {name: getattr(arguments, name) for name in ("layers", "heads", "embed", "context")}
    run["text"] = hashlib.sha256(training.numpy()).hexdigest()[:16]

    torch.manual_seed(arguments.seed)
    model = GPT(arguments).to(arguments.device)
    if arguments.fsdp:
        shard(model, arguments)
    decayed = [parameter for parameter in model.parameters() if parameter.dim() == 2]
    not_decayed = [parameter for parameter in model.parameters() if parameter.dim() == 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": not_decayed, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95))
    batches = torch.Generator().manual_seed(arguments.seed)
    on_cuda = torch.device(arguments.device).type == "cuda"
    print(f"{sum(parameter.numel() for parameter in model.parameters()):,} parameters, {len(training):,} bytes of text")

    first = 0
    resumed = saved is not None and saved.exists()
    if resumed:
        state = load_state(saved, run)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        batches.set_state(state["batches"])
        torch.set_rng_state(state["rng"])  # for dropout
        if on_cuda and state["cuda_rng"]:
            torch.cuda.set_rng_state_all(state["cuda_rng"])
        first = state["step"]
        print(f"resuming {saved} from step {first}")

    # A resumed run logs the steps after the last save again, with the same numbers.
    log = arguments.log.open("a" if resumed else "w", buffering=1) if arguments.log else None
    bar = progress_bar(first, steps)
    held_out = validation_loss(model, validation, arguments)
    start = time.perf_counter()
    with bar or nullcontext(), log or nullcontext():
        for done in range(first + 1, steps + 1):
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(done, arguments)
            loss = loss_of(model, *draw_batch(training, arguments, batches))
            optimizer.zero_grad()
            loss.backward()
            if arguments.ring:
                average_gradients(model)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()

            line = {"step": done, "loss": mean_of_processes(loss)}
            if done % VALIDATE_EVERY == 0 or done == steps:
                held_out = line["validation_loss"] = validation_loss(model, validation, arguments)
            if log:
                log.write(json.dumps(line) + "\n")
            if is_saver and (done % arguments.save_every == 0 or done == steps):
                state = {"step": done, "model": model.state_dict(), "optimizer": optimizer.state_dict(), **run}
                state |= {"batches": batches.get_state(), "rng": torch.get_rng_state()}
                state["cuda_rng"] = torch.cuda.get_rng_state_all() if on_cuda else []
                save_state(saved, state)

            per_step = (time.perf_counter() - start) / (done - first)
            rate = arguments.batch * arguments.context / per_step
            left = datetime.timedelta(seconds=round(per_step * (steps - done)))
            status = f"loss {line['loss']:.4f}, validation {held_out:.4f}, {rate:,.0f} tokens/s, {left} left"
            if bar:
                bar.update(bar.task_ids[0], completed=done, status=status)
            elif "validation_loss" in line:
                print(f"step {done:>{len(str(steps))}}/{steps}: {status}")
            if done % arguments.sample_every == 0 and done < steps:
                print(f"--- sample after {done} steps\n{sample(model, arguments)}\n---")
    print(f"--- sample after {max(first, steps)} steps\n{sample(model, arguments)}\n---")


def main(argv: list[str] | None = None) -> None:
    arguments = parse_arguments(argv)
    if not (arguments.fsdp or arguments.ring):
        train(arguments)
        return
    if torch.device(arguments.device).type == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    distributed.init_process_group()
    try:
        rank, processes = rank_and_processes()
        if arguments.fsdp and arguments.batch % processes:
            raise SystemExit(f"--batch {arguments.batch} is not a multiple of {processes} processes")
        if arguments.ring and arguments.context % (2 * processes):
            raise SystemExit(
                f"--context {arguments.context} is not a multiple of {2 * processes}: two chunks per process"
            )
        if rank > 0:  # only rank 0 prints and logs
            arguments.log = None
        with redirect_stdout(io.StringIO()) if rank > 0 else nullcontext():
            train(arguments)
    finally:
        distributed.destroy_process_group()


if __name__ == "__main__":
    main()
