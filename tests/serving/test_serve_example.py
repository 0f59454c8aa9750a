"""examples/serve.py: tokens equal those without a cache, with preemption and in every batch; all pages are returned."""

import importlib
import sys
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SIZES = {"layers": 2, "heads": 2, "embed": 32, "context": 64}


@pytest.fixture(scope="module")
def example():
    sys.path.insert(0, str(EXAMPLES))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # on a busy machine two threads that wait for each other take 20 times as long
    try:
        yield importlib.import_module("serve")
    finally:
        sys.path.remove(str(EXAMPLES))
        torch.set_num_threads(threads)


@pytest.fixture
def saved(example, tmp_path):
    """Return a file with a random model, large enough that its tokens depend on the tokens that it attends to."""
    generator = torch.Generator().manual_seed(3)
    model = example.train_gpt.GPT(example.train_gpt.parse_arguments([f"--{n}={x}" for n, x in SIZES.items()]))
    weights = {name: torch.randn(x.shape, generator=generator) * 0.5 for name, x in model.state_dict().items()}
    torch.save({"model": weights, **SIZES}, tmp_path / "model.pt")
    return tmp_path / "model.pt"


def serve(example, saved, *options):
    """Return the tokens of every request, the expected tokens, and the server at the end."""
    arguments = example.parse_arguments(["--model", str(saved), *options])
    model = example.load_model(saved)
    server = example.Server(model, arguments)
    prompts = [list(prompt.encode()) for prompt in example.PROMPTS[:6]]
    requests = [example.Request(list(prompt), len(prompt) + 2 + 5 * i) for i, prompt in enumerate(prompts)]
    for request in requests:
        server.add(request)
    ended = []
    while len(ended) < len(requests):
        ended += server.step()
    expected = [example.generate_alone(model, *x) for x in zip(prompts, [r.length for r in requests], strict=True)]
    return [request.tokens for request in requests], expected, server


@pytest.mark.parametrize(
    "options, preempts",
    [((), False), (("--pages=8", "--page=8"), True), (("--budget=3", "--running=3", "--page=2"), False)],
    ids=["all-at-once", "few-pages", "prompts-in-parts"],
)
def test_tokens_are_those_without_a_cache(example, saved, options, preempts):
    tokens, expected, server = serve(example, saved, *options)
    assert tokens == expected
    # A model that repeats a single token would hide errors.
    assert all(len(set(sequence[-12:])) > 1 for sequence in tokens[3:])
    assert bool(server.preemptions) == preempts
    assert sorted(server.free) == list(range(server.arguments.pages))
    assert server.most_pages <= server.arguments.pages


def test_whole_run(example, saved, capsys):
    example.main(["--model", str(saved), "--requests", "3", "--tokens", "8", "--split-size", "64"])
    printed = capsys.readouterr().out
    assert "3 of 3 requests have the tokens of attention without a cache; 16 of 16 tokens" in printed
    assert "float32 KV cache, 512 bytes a token" in printed and "pages in use" in printed


@pytest.mark.parametrize(("cache", "size"), [("latent", 256), ("int8", 144), ("int4", 96)])
def test_other_caches(example, saved, cache, size):
    """Tokens of a latent cache are exact; codes change some scores a little, and with them perhaps a token."""
    tokens, expected, server = serve(example, saved, "--cache", cache, "--pages=8")
    assert sum(x.nbytes for x in server.caches) == 8 * 8 * size
    if cache == "latent":
        assert tokens == expected
    assert all(x[:2] == y[:2] for x, y in zip(tokens, expected, strict=True))


def test_request_that_never_fits(example, saved):
    server = example.Server(
        example.load_model(saved), example.parse_arguments(["--model", str(saved), "--pages", "2", "--page", "4"])
    )
    with pytest.raises(SystemExit, match="need 3 pages"):
        server.add(example.Request([1, 2, 3], 9))


def test_stale_pages_are_noticed(example, saved, monkeypatch):
    """A preempted request that keeps its number of cached tokens reads stale pages, which changes its tokens."""
    preempt = example.Server.preempt

    def keeps_its_count(self, request):
        cached = request.cached
        preempt(self, request)
        request.cached = cached

    monkeypatch.setattr(example.Server, "preempt", keeps_its_count)
    tokens, expected, _ = serve(example, saved, "--pages=8", "--page=8")
    assert tokens != expected
