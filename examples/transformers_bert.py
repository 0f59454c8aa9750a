"""Sentence embeddings from a BERT of transformers with cupy_flash attention.

    python -m pip install -e ".[transformers]"
    python examples/transformers_bert.py
    python examples/transformers_bert.py --attention sdpa "A cat sat." "A dog sat."

The sentences are one padded batch; cupy_flash does not attend to the padding. The
output is the cosine similarity of all pairs of sentences: 1 is the same meaning, 0
unrelated. --model is a folder, or a name on the Hugging Face hub, from which the first
run downloads 90 MB.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import torch
from transformers import AutoModel, AutoTokenizer

from cupy_flash.adapters.transformers import register

SENTENCES = (
    "A cat sat on the mat.",
    "A kitten rests on a rug, and after a while it falls asleep.",
    "The central bank raised interest rates again, by more than markets had expected.",
    "Borrowing money became more expensive.",
)


def embed(model: Any, tokenizer: Any, sentences: Sequence[str]) -> torch.Tensor:
    """Return embeddings (sentences, dim): normalized means of last hidden states."""
    batch = tokenizer(
        list(sentences), padding=True, truncation=True, return_tensors="pt"
    ).to(model.device)
    with torch.no_grad():
        states = model(**batch).last_hidden_state  # (B, S, dim)
    is_token = batch["attention_mask"][..., None]
    mean = (states * is_token).sum(1) / is_token.sum(1)
    return torch.nn.functional.normalize(mean, dim=-1)


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="cosine similarity of sentences, from a BERT with cupy_flash"
    )
    parser.add_argument("sentences", nargs="*", default=SENTENCES)
    parser.add_argument(
        "--model",
        default="sentence-transformers/all-MiniLM-L6-v2",
        help="hub name or folder",
    )
    parser.add_argument("--attention", choices=("cupy_fa", "sdpa"), default="cupy_fa")
    parser.add_argument("--device", default="cpu")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse_arguments(arguments)
    register()  # adds attn_implementation="cupy_fa" to transformers
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    model = (
        AutoModel.from_pretrained(options.model, attn_implementation=options.attention)
        .to(options.device)
        .eval()
    )
    embeddings = embed(model, tokenizer, options.sentences)
    for sentence, cosines in zip(
        options.sentences, embeddings @ embeddings.T, strict=True
    ):
        print(*(f"{cosine:5.2f}" for cosine in cosines.tolist()), "", sentence)


if __name__ == "__main__":
    main()
