"""Train a small GPT whose queries choose their keys, as DeepSeek-V3.2 does.

    python examples/train_sparse.py  # five minutes on two CPU cores
    # an error if the loss is more than 2 % above that of dense attention
    python examples/train_sparse.py --keys 16 --check

The model and the text are those of train_gpt.py. Training has three stages:

1. Dense attention, as in train_gpt.py.
2. Warm-up of the indexers. The model is frozen; the lightning indexer of each layer
   learns the probabilities of its dense attention, the mean over the heads.
3. Sparse attention. Each query attends to the keys that the indexer scores highest. The
   model learns from the text, and the indexers go on learning from the probabilities of
   the listed keys. No gradient of one reaches the other.

For comparison a copy of the model has dense attention in stage 3, on the same batches.
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Iterable

import torch
import train_gpt
from torch import Tensor, nn
from torch.nn import functional as F

import cupy_flash

INDEX_HEADS, INDEX_DIM = 4, 16
WARM_UP_RATE, SPARSE_RATE = 1e-2, 1e-3  # learning rates of stages 2 and 3
ALLOWED = 1.02  # the loss with lists, as a multiple of that of dense attention


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--keys", type=int, default=32, help="of each query [%(default)s]"
    )
    parser.add_argument(
        "--context", type=int, default=128, help="bytes per sequence [%(default)s]"
    )
    parser.add_argument(
        "--steps",
        type=int,
        nargs=3,
        default=(200, 60, 60),
        help="of the three stages [%(default)s]",
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help=f"fail if the loss is above {ALLOWED} times that of dense attention",
    )
    return parser.parse_args(argv)


class Indexer(nn.Module):
    """Scores the keys of all heads of a layer: sum_h w_h relu(q_h . k)."""

    def __init__(self, embed: int) -> None:
        super().__init__()
        self.q = nn.Linear(embed, INDEX_HEADS * INDEX_DIM, bias=False)
        self.k = nn.Linear(embed, INDEX_DIM, bias=False)
        self.weights = nn.Linear(embed, INDEX_HEADS, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return q_idx (B, S, Hi, Di), weights (B, S, Hi) and k_idx (B, S, Di)."""
        q_idx = self.q(x).unflatten(-1, (INDEX_HEADS, INDEX_DIM))
        return q_idx, self.weights(x) * INDEX_DIM**-0.5, self.k(x)


class SparseBlock(nn.Module):
    """A block of train_gpt.py, with an indexer that chooses the keys of each query."""

    def __init__(self, block: train_gpt.Block, embed: int) -> None:
        super().__init__()
        self.block, self.indexer = block, Indexer(embed)
        self.keys: int | None = None  # of each query; None is dense attention
        self.indexer_loss = torch.zeros(())  # of the last forward

    def heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return q, k and v (B, S, H, D)."""
        q, k, v = self.block.qkv(x).unflatten(-1, (3, self.block.heads, -1)).unbind(2)
        return q, k, v

    def forward(self, x: Tensor) -> Tensor:
        block = self.block
        normed = block.attention_norm(x)
        q, k, v = self.heads(normed)
        q_idx, weights, k_idx = self.indexer(normed.detach())
        # The lists of the warm-up have all keys, which dense attention visits anyway.
        lists = cupy_flash.select_keys(q_idx, weights, k_idx, self.keys or x.shape[1])
        selected = dict(selected=lists) if self.keys else {}
        out, lse = cupy_flash.attention(
            q, k, v, causal=True, return_lse=True, **selected
        )
        if self.training:
            with torch.no_grad():
                target = cupy_flash.attention_weights(
                    q, k, lse, heads="mean", causal=True, selected=lists
                )
            divergence = cupy_flash.selection_loss(q_idx, weights, k_idx, lists, target)
            self.indexer_loss = divergence / target.shape[:2].numel()
        x = x + block.attention_out(out.flatten(-2))
        return x + block.mlp_out(F.gelu(block.mlp_in(block.mlp_norm(x))))

    def covered(self, x: Tensor, lists: Tensor) -> float:
        """Return the part of the dense attention that keys in lists have."""
        q, k, v = self.heads(self.block.attention_norm(x))
        _, lse = cupy_flash.attention(q, k, v, causal=True, return_lse=True)
        p = cupy_flash.attention_weights(
            q, k, lse, heads="mean", causal=True, selected=lists
        )
        return p.sum(-1).mean().item()


def learn(
    model: train_gpt.GPT,
    parameters: Iterable[nn.Parameter],
    rate: float,
    steps: int,
    text: Tensor,
    arguments: argparse.Namespace,
    seed: int,
) -> None:
    """Train some parameters of the model; a seed determines the batches."""
    batches = torch.Generator().manual_seed(seed)
    learned = list(parameters)
    optimizer = torch.optim.AdamW(learned, betas=(0.9, 0.95), weight_decay=0.01)
    schedule = copy.copy(arguments)
    schedule.steps, schedule.learning_rate = steps, rate
    start = time.perf_counter()
    for step in range(1, steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = train_gpt.learning_rate(step, schedule)
        loss = train_gpt.loss_of(model, *train_gpt.draw_batch(text, arguments, batches))
        indexers = [x.indexer_loss for x in model.blocks if isinstance(x, SparseBlock)]
        optimizer.zero_grad()
        (loss + sum(indexers)).backward()
        nn.utils.clip_grad_norm_(learned, 1.0)
        optimizer.step()
        if step % 20 == 0 or step == steps:
            words = f"step {step:3}  loss {loss.item():.3f}"
            if indexers:
                words += f"  KL of a layer {sum(indexers).item() / len(indexers):.3f}"
            seconds = (time.perf_counter() - start) / step
            print(f"{words}  {seconds:.2f} s a step", flush=True)


def with_indexers(model: train_gpt.GPT, embed: int) -> train_gpt.GPT:
    """Return a copy of a model whose blocks have indexers."""
    model = copy.deepcopy(model)
    model.blocks = nn.ModuleList(SparseBlock(block, embed) for block in model.blocks)
    return model


@torch.no_grad()
def coverage(model: train_gpt.GPT, tokens: Tensor, n: int) -> tuple[float, float]:
    """Return the part of the dense attention that n keys of each query have, a mean.

    The keys are first those that the indexers choose, then the last ones.
    """
    ahead = torch.arange(tokens.shape[1])[:, None] - torch.arange(n)
    last = ahead.clamp(min=-1).int().expand(len(tokens), 1, -1, -1)
    parts = []
    x = model.tokens(tokens) + model.positions.weight[: tokens.shape[1]]
    for block in model.blocks:
        indices = block.indexer(block.block.attention_norm(x))
        chosen = cupy_flash.select_keys(*indices, n)
        parts.append([block.covered(x, chosen), block.covered(x, last)])
        x = block(x)
    chosen_part, last_part = torch.tensor(parts).mean(dim=0).tolist()
    return chosen_part, last_part


def run(
    arguments: argparse.Namespace, of_model: argparse.Namespace
) -> dict[str, float]:
    """Train in three stages; return the losses and the parts of the attention."""
    training, validation = train_gpt.read_text()
    torch.manual_seed(of_model.seed)
    dense = train_gpt.GPT(of_model)
    dense_steps, warm_up_steps, sparse_steps = arguments.steps

    def train(
        model: train_gpt.GPT, parts: nn.Module, rate: float, steps: int, stage: int
    ) -> None:
        learn(model, parts.parameters(), rate, steps, training, of_model, seed=stage)

    print("stage 1: dense attention")
    train(dense, dense, of_model.learning_rate, dense_steps, 1)
    sparse = with_indexers(dense, of_model.embed)
    indexers = nn.ModuleList(block.indexer for block in sparse.blocks)
    print("stage 2: the indexers learn the dense attention")
    train(sparse, indexers, WARM_UP_RATE, warm_up_steps, 2)
    generator = torch.Generator().manual_seed(of_model.seed)
    tokens, _ = train_gpt.draw_batch(validation, of_model, generator)
    chosen, last = coverage(sparse.eval(), tokens, arguments.keys)
    for block in sparse.train().blocks:
        block.keys = arguments.keys
    print(f"stage 3: attention to {arguments.keys} keys")
    train(sparse, sparse, SPARSE_RATE, sparse_steps, 3)
    print("stage 3 with dense attention")
    train(dense, dense, SPARSE_RATE, sparse_steps, 3)
    return {
        "dense": train_gpt.validation_loss(dense, validation, of_model),
        "sparse": train_gpt.validation_loss(sparse, validation, of_model),
        "chosen keys": chosen,
        "last keys": last,
    }


def main(argv: list[str] | None = None, *of_model: str) -> dict[str, float]:
    arguments = parse_arguments(argv)
    model = train_gpt.parse_arguments([f"--context={arguments.context}", *of_model])
    found = run(arguments, model)
    print(
        f"\n{arguments.keys} of {arguments.context} keys have "
        f"{found['chosen keys']:.1%} of the dense attention, "
        f"the last ones {found['last keys']:.1%}"
    )
    ratio = found["sparse"] / found["dense"]
    print(
        f"validation loss: dense {found['dense']:.4f}, sparse {found['sparse']:.4f}, "
        f"{ratio - 1:+.2%}"
    )
    if arguments.check and ratio > ALLOWED:
        raise SystemExit(f"the loss is above {ALLOWED} times that of dense attention")
    return found


if __name__ == "__main__":
    main()
