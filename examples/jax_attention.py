"""Train one attention layer on a lookup task, under jax.jit and jax.grad.

    python -m pip install -e ".[jax]"
    python examples/jax_attention.py
    python examples/jax_attention.py --attention jax

Every sequence is a dictionary that maps random words to random numbers; given one of
the words, the layer has to return its number. It learns projections that make a query
match the key of its word.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from cupy_flash.adapters.jax import attention

VOCABULARY, ENTRIES, QUESTIONS, DIM, HEADS = 64, 16, 8, 32, 2
ATTENTIONS = {"cupy_flash": attention, "jax": jax.nn.dot_product_attention}

Parameters = dict[str, jax.Array]


def initial(key: Any) -> Parameters:
    shapes = {
        "words": (VOCABULARY, DIM),
        "query": (DIM, DIM),
        "key": (DIM, DIM),
        "value": (1, DIM),
        "output": (DIM, 1),
    }
    keys = jax.random.split(key, len(shapes))
    return {
        name: jax.random.normal(k, shape) / shape[0] ** 0.5
        for k, (name, shape) in zip(keys, shapes.items(), strict=True)
    }


def sample(key: Any, batch: int) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Return words, their numbers (B, ENTRIES); questions, answers (B, QUESTIONS)."""
    words_key, numbers_key, questions_key = jax.random.split(key, 3)
    words = jax.vmap(lambda k: jax.random.permutation(k, VOCABULARY)[:ENTRIES])(
        jax.random.split(words_key, batch)
    )
    numbers = jax.random.normal(numbers_key, (batch, ENTRIES))
    indices = jax.random.randint(questions_key, (batch, QUESTIONS), 0, ENTRIES)
    return (
        words,
        numbers,
        jnp.take_along_axis(words, indices, 1),
        jnp.take_along_axis(numbers, indices, 1),
    )


def loss(parameters: Parameters, batch: Any, attend: Any) -> jax.Array:
    """Return the mean squared error; about 1 for a constant answer of 0."""
    words, numbers, questions, answers = batch

    def heads(x: jax.Array) -> jax.Array:
        return x.reshape(*x.shape[:2], HEADS, DIM // HEADS)

    q = heads(parameters["words"][questions] @ parameters["query"])
    k = heads(parameters["words"][words] @ parameters["key"])
    v = heads(numbers[..., None] @ parameters["value"])
    predictions = (
        attend(q, k, v, scale=1.0).reshape(*questions.shape, DIM) @ parameters["output"]
    )
    return ((predictions[..., 0] - answers) ** 2).mean()


def train(steps: int, batch: int, learning_rate: float, attend: Any) -> list[float]:
    """Train with momentum SGD; return the loss of every step."""
    parameters = initial(jax.random.key(0))
    momentum = jax.tree.map(jnp.zeros_like, parameters)

    @jax.jit
    def step(
        parameters: Parameters, momentum: Parameters, key: Any
    ) -> tuple[Parameters, Parameters, jax.Array]:
        value, gradients = jax.value_and_grad(loss)(
            parameters, sample(key, batch), attend
        )
        momentum = jax.tree.map(lambda m, g: 0.9 * m + g, momentum, gradients)
        return (
            jax.tree.map(lambda p, m: p - learning_rate * m, parameters, momentum),
            momentum,
            value,
        )

    losses = []
    for i in range(steps):
        parameters, momentum, value = step(parameters, momentum, jax.random.key(i))
        losses.append(float(value))
    return losses


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description="train one attention layer on a lookup task"
    )
    parser.add_argument("--attention", choices=ATTENTIONS, default="cupy_flash")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--learning-rate", type=float, default=0.05)
    options = parser.parse_args(arguments)
    losses = train(
        options.steps,
        options.batch,
        options.learning_rate,
        ATTENTIONS[options.attention],
    )
    for i in range(0, options.steps, max(1, options.steps // 10)):
        print(f"step {i + 1:4d}  loss {losses[i]:.4f}")
    print(f"step {options.steps:4d}  loss {losses[-1]:.4f}")


if __name__ == "__main__":
    main()
