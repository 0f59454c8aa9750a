"""Serve a small GPT: requests share a paged KV cache, a step is a packed batch.

    python examples/serve.py  # trains gpt.pt first, some minutes on two CPU cores
    # a file that train_gpt.py --save has written
    python examples/serve.py --model gpt.pt --requests 32
    # too few pages for all: requests are preempted
    python examples/serve.py --pages 24
    # tokens that do not depend on the other requests
    python examples/serve.py --split-size 64
    # codes of 8 or 4 bits with a scale for each key and head, or one row for all heads
    python examples/serve.py --cache int8
    python examples/serve.py --cache latent

Each step processes one token of every running request that generates, and a part of the
prompts of new ones, in one call of `attention_with_kv_cache` per layer, which also
appends the new keys and values. A request owns whole pages and returns them when it
ends. At the end each request is generated again alone, by the model's own attention on
the whole text, and the tokens are compared.

A latent cache has the input of a layer's keys and values instead of both, as multi-head
latent attention has. Queries are multiplied by the weights of the keys before, and
results by those of the values after; `head_dim_v` says that a row is key and value.
"""

from __future__ import annotations

import argparse
import time
from collections import deque
from dataclasses import dataclass, field
from os.path import commonprefix
from pathlib import Path

import torch
import train_gpt
from torch import Tensor
from torch.nn import functional as F

from cupy_flash import attention_with_kv_cache

CODES = {"int8": torch.int8, "float8": torch.float8_e4m3fn, "int4": torch.uint8}
PROMPTS = (
    "def ",
    "class ",
    "import ",
    "    return ",
    "for i in range(",
    "if __name__ == ",
    "# The ",
    "raise ",
)


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Serve a small GPT from one paged KV cache."
    )
    parser.add_argument(
        "--model",
        type=Path,
        default=Path("gpt.pt"),
        help="trained if it is absent [%(default)s]",
    )
    parser.add_argument(
        "--requests", type=int, default=16, help="requests to serve [%(default)s]"
    )
    parser.add_argument(
        "--tokens",
        type=int,
        default=60,
        help="tokens to generate for the longest [%(default)s]",
    )
    parser.add_argument(
        "--running",
        type=int,
        default=8,
        help="requests in a step at most [%(default)s]",
    )
    parser.add_argument(
        "--budget",
        type=int,
        default=32,
        help="tokens in a step at most, of all requests [%(default)s]",
    )
    parser.add_argument(
        "--pages", type=int, default=64, help="pages of the cache [%(default)s]"
    )
    parser.add_argument(
        "--page",
        type=int,
        default=8,
        help="keys in a page, a power of two [%(default)s]",
    )
    parser.add_argument(
        "--cache",
        choices=["float32", *CODES, "latent"],
        default="float32",
        help="what the cache has of a key [%(default)s]",
    )
    parser.add_argument("--split-size", type=int, help="see attention_with_kv_cache")
    arguments = parser.parse_args(argv)
    if arguments.running > arguments.budget:
        parser.error(
            f"--budget {arguments.budget} is less than a token for each of --running "
            f"{arguments.running}"
        )
    return arguments


@dataclass
class Request:
    """A prompt and its generated tokens; `pages` has keys of the first `cached`."""

    tokens: list[int]
    length: int  # tokens of prompt and result
    cached: int = 0
    pages: list[int] = field(default_factory=list)


def load_model(path: Path) -> train_gpt.GPT:
    """Return the model that train_gpt.py saved in a file; train it if missing."""
    if not path.exists():
        train_gpt.main(["--save", str(path)])
    state = torch.load(path, weights_only=True)
    sizes = [
        f"--{name}={state[name]}" for name in ("layers", "heads", "embed", "context")
    ]
    model = train_gpt.GPT(train_gpt.parse_arguments(sizes))
    model.load_state_dict(state["model"])
    return model.eval()


class LayerCache:
    """The pages of a layer; `scales` are those of codes, `values` None if latent."""

    def __init__(self, kind: str, pages: int, page: int, heads: int, dim: int) -> None:
        self.latent, self.scales = kind == "latent", {}
        if self.latent:
            heads, dim = 1, heads * dim
        if kind == "int4":  # two numbers in a byte
            dim //= 2
        dtype = CODES.get(kind, torch.float32)
        self.keys = torch.zeros(pages, page, heads, dim, dtype=dtype)
        self.values = None if self.latent else torch.zeros_like(self.keys)
        names = ("k_scale", "v_scale", "k_zero", "v_zero")
        for name in names[: 4 if kind == "int4" else 2 if kind in CODES else 0]:
            self.scales[name] = torch.zeros(pages, page, heads, dtype=torch.float16)

    @property
    def nbytes(self) -> int:
        arrays = [self.keys, self.values, *self.scales.values()]
        return sum(x.nbytes for x in arrays if x is not None)

    def attend(self, block: train_gpt.Block, x: Tensor, options: dict) -> Tensor:
        """Append the keys of the layer's input x (T, embed); return (T, embed)."""
        q, k, v = block.qkv(x).view(len(x), 3, block.heads, -1).unbind(1)  # (T, H, D)
        if not self.latent:
            out = attention_with_kv_cache(
                q, self.keys, self.values, k=k, v=v, **self.scales, **options
            )
            return out.flatten(1)
        of_keys, of_values = block.qkv.weight.view(3, *q.shape[1:], -1)[1:]  # (H, D, E)
        out = attention_with_kv_cache(
            torch.einsum("thd,hde->the", q, of_keys),
            self.keys,
            None,
            k=x[:, None],
            head_dim_v=x.shape[1],
            scale=q.shape[2] ** -0.5,
            **options,
        )
        # A bias of the keys adds the same to all scores, which changes nothing.
        bias = 0 if block.qkv.bias is None else block.qkv.bias.view(3, -1)[2]
        return torch.einsum("the,hde->thd", out, of_values).flatten(1) + bias


class Server:
    """The model, its cache, and the waiting and running requests."""

    def __init__(self, model: train_gpt.GPT, arguments: argparse.Namespace) -> None:
        self.model, self.arguments = model, arguments
        heads, dim = (
            model.blocks[0].heads,
            model.tokens.embedding_dim // model.blocks[0].heads,
        )
        sizes = arguments.pages, arguments.page, heads, dim
        self.caches = [LayerCache(arguments.cache, *sizes) for _ in model.blocks]
        self.free = list(range(arguments.pages))
        self.columns = -(
            -model.context // arguments.page
        )  # columns of a block table, enough for the whole context
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.preemptions = self.most_pages = 0

    def add(self, request: Request) -> None:
        """Queue a request; SystemExit if it can never be served."""
        needed = -(-request.length // self.arguments.page)
        if request.length > self.model.context or needed > self.arguments.pages:
            raise SystemExit(
                f"{request.length} tokens: the context is {self.model.context}, and "
                f"they need {needed} pages"
            )
        self.waiting.append(request)

    def step(self) -> list[Request]:
        """Run the model on all requests' next tokens; return those that ended."""
        while (
            self.waiting
            and len(self.running) < self.arguments.running
            and self.has_room(self.waiting[0])
        ):
            self.running.append(self.waiting.popleft())
        batch = self.schedule()
        logits = self.forward(batch)
        for (request, count), token in zip(
            batch, logits.argmax(-1).tolist(), strict=True
        ):
            request.cached += count
            if request.cached == len(
                request.tokens
            ):  # the whole prompt is cached: the logits are of a new token
                request.tokens.append(token)
        ended = [
            request for request in self.running if len(request.tokens) == request.length
        ]
        for request in ended:
            self.release(request)
        return ended

    def has_room(self, request: Request) -> bool:
        """Return whether there are pages for a waiting request, besides all others'."""
        promised = sum(
            self.missing_pages(other, len(other.tokens)) for other in self.running
        )
        return promised + self.missing_pages(request, len(request.tokens)) <= len(
            self.free
        )

    def missing_pages(self, request: Request, tokens: int) -> int:
        return max(-(-tokens // self.arguments.page) - len(request.pages), 0)

    def schedule(self) -> list[tuple[Request, int]]:
        """Choose (request, number of next tokens), oldest first, and allocate pages."""
        batch, budget = [], self.arguments.budget
        for place, request in enumerate(list(self.running)):
            later = (
                len(self.running) - place - 1
            )  # each later request is left at least one token of the budget
            count = min(len(request.tokens) - request.cached, budget - later)
            while request in self.running and not self.reserve(
                request, request.cached + count
            ):
                self.preempt(self.running[-1])
            if request in self.running:
                batch.append((request, count))
                budget -= count
        self.most_pages = max(self.most_pages, self.arguments.pages - len(self.free))
        return batch

    def reserve(self, request: Request, tokens: int) -> bool:
        """Allocate pages for `tokens` tokens; return False if there are too few."""
        missing = self.missing_pages(request, tokens)
        if missing > len(self.free):
            return False
        request.pages += [self.free.pop() for _ in range(missing)]
        return True

    def preempt(self, request: Request) -> None:
        """Free the pages of a request, which restarts later with the tokens it has."""
        self.release(request)
        request.cached = 0
        self.waiting.appendleft(request)
        self.preemptions += 1

    def release(self, request: Request) -> None:
        self.running.remove(request)
        self.free += request.pages
        request.pages = []

    @torch.no_grad()
    def forward(self, batch: list[tuple[Request, int]]) -> Tensor:
        """Return the last tokens' logits, (requests, 256); append keys and values."""
        counts = torch.tensor([count for _, count in batch])
        ends = counts.cumsum(0)
        ids = [
            token
            for request, count in batch
            for token in request.tokens[request.cached : request.cached + count]
        ]
        places = torch.cat(
            [
                torch.arange(request.cached, request.cached + count)
                for request, count in batch
            ]
        )
        rows = [
            request.pages + [-1] * (self.columns - len(request.pages))
            for request, _ in batch
        ]
        options = {
            "cache_seqlens": torch.tensor(
                [request.cached for request, _ in batch], dtype=torch.int32
            ),
            "block_table": torch.tensor(rows, dtype=torch.int32),
            "cu_seqlens_q": F.pad(ends, (1, 0)).int(),
            "max_seqlen_q": int(counts.max()),
            "split_size": self.arguments.split_size,
        }
        x = (
            self.model.tokens.weight[ids] + self.model.positions.weight[places]
        )  # (T, embed)
        for block, cache in zip(self.model.blocks, self.caches, strict=True):
            attended = cache.attend(block, block.attention_norm(x), options)
            x = x + block.attention_out(attended)
            x = x + block.mlp_out(F.gelu(block.mlp_in(block.mlp_norm(x))))
        return F.linear(self.model.norm(x[ends - 1]), self.model.tokens.weight)


@torch.no_grad()
def generate_alone(model: train_gpt.GPT, tokens: list[int], length: int) -> list[int]:
    """Return the tokens of one request, by attention without a cache."""
    tokens = list(tokens)
    while len(tokens) < length:
        tokens.append(int(model(torch.tensor([tokens]))[0, -1].argmax()))
    return tokens


def main(argv: list[str] | None = None) -> None:
    arguments = parse_arguments(argv)
    model = load_model(arguments.model)
    server = Server(model, arguments)
    prompts = [
        list(PROMPTS[i % len(PROMPTS)].encode()) for i in range(arguments.requests)
    ]
    requests = [
        Request(list(x), len(x) + 1 + i * 7 % arguments.tokens)
        for i, x in enumerate(prompts)
    ]
    for request in requests:
        server.add(request)

    start, steps, ended = time.perf_counter(), 0, 0
    while ended < len(requests):
        ended += len(server.step())
        steps += 1
    seconds = time.perf_counter() - start
    generated = sum(
        len(x.tokens) - len(prompt) for x, prompt in zip(requests, prompts, strict=True)
    )
    print(
        f"{len(requests)} requests, {generated} tokens in {steps} steps, "
        f"{generated / seconds:,.0f} tokens/s"
    )
    bytes_of_page = sum(cache.nbytes for cache in server.caches) // arguments.pages
    contiguous = arguments.running * server.columns
    print(
        f"{arguments.cache} KV cache, {bytes_of_page // arguments.page} bytes a token: "
        f"at most {server.most_pages} of {arguments.pages} pages in use, "
        f"{server.most_pages * bytes_of_page / 2**20:.2f} MiB; one row of the whole "
        "context for each of "
        f"{arguments.running} requests would take "
        f"{contiguous * bytes_of_page / 2**20:.2f} MiB; "
        f"{server.preemptions} preemptions"
    )
    alone = [
        generate_alone(model, x, r.length)
        for x, r in zip(prompts, requests, strict=True)
    ]
    equal = sum(x == r.tokens for x, r in zip(alone, requests, strict=True))
    # Tokens after the first difference belong to another text.
    agreeing = sum(
        len(commonprefix([x, r.tokens])) - len(prompt)
        for x, r, prompt in zip(alone, requests, prompts, strict=True)
    )
    print(
        f"{equal} of {len(requests)} requests have the tokens of attention without a "
        f"cache; {agreeing} of {generated} tokens come before a difference"
    )
    print(bytes(requests[-1].tokens).decode(errors="replace"))


if __name__ == "__main__":
    main()
