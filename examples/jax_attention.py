"""One attention layer in jax learns to look things up: cupy_flash under jax.jit and jax.grad.

    python -m pip install -e ".[jax]"
    python examples/jax_attention.py
    python examples/jax_attention.py --attention jax

Every sequence is a dictionary of random words with a random number each; asked for one of the words, the layer has to
say its number. It learns the projections with which a query finds the key of its word. On a GPU the step runs without
jax.jit: jitted, cupy_flash is a CPU's work.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from cupy_flash.adapters.jax import attention

WORDS, ENTRIES, QUESTIONS, DIM, HEADS = 64, 16, 8, 32, 2
ATTENTIONS = {"cupy_flash": attention, "jax": jax.nn.dot_product_attention}

Parameters = dict[str, jax.Array]


def initial(key: Any) -> Parameters:
    shapes = {"words": (WORDS, DIM), "query": (DIM, DIM), "key": (DIM, DIM), "value": (1, DIM), "say": (DIM, 1)}
    keys = jax.random.split(key, len(shapes))
    return {
        name: jax.random.normal(k, shape) / shape[0] ** 0.5
        for k, (name, shape) in zip(keys, shapes.items(), strict=True)
    }


def sample(key: Any, batch: int) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """words (B, ENTRIES), numbers (B, ENTRIES), the words asked for (B, QUESTIONS), and the answers."""
    words_key, numbers_key, asked_key = jax.random.split(key, 3)
    words = jax.vmap(lambda k: jax.random.permutation(k, WORDS)[:ENTRIES])(jax.random.split(words_key, batch))
    numbers = jax.random.normal(numbers_key, (batch, ENTRIES))
    places = jax.random.randint(asked_key, (batch, QUESTIONS), 0, ENTRIES)
    return words, numbers, jnp.take_along_axis(words, places, 1), jnp.take_along_axis(numbers, places, 1)


def loss(parameters: Parameters, batch: Any, attend: Any) -> jax.Array:
    """The mean square of what is missing to the answers; 1 for always saying 0."""
    words, numbers, asked, answers = batch

    def heads(x: jax.Array) -> jax.Array:
        return x.reshape(*x.shape[:2], HEADS, DIM // HEADS)

    q = heads(parameters["words"][asked] @ parameters["query"])
    k = heads(parameters["words"][words] @ parameters["key"])
    v = heads(numbers[..., None] @ parameters["value"])
    said = attend(q, k, v, scale=1.0).reshape(*asked.shape, DIM) @ parameters["say"]
    return ((said[..., 0] - answers) ** 2).mean()


def train(steps: int, batch: int, learning_rate: float, attend: Any) -> list[float]:
    """The loss of every step."""
    parameters = initial(jax.random.key(0))
    momentum = jax.tree.map(jnp.zeros_like, parameters)

    def step(parameters: Parameters, momentum: Parameters, key: Any) -> tuple[Parameters, Parameters, jax.Array]:
        value, gradients = jax.value_and_grad(loss)(parameters, sample(key, batch), attend)
        momentum = jax.tree.map(lambda m, g: 0.9 * m + g, momentum, gradients)
        return jax.tree.map(lambda p, m: p - learning_rate * m, parameters, momentum), momentum, value

    if jax.default_backend() == "cpu" or attend is not attention:
        step = jax.jit(step)
    losses = []
    for i in range(steps):
        parameters, momentum, value = step(parameters, momentum, jax.random.key(i))
        losses.append(float(value))
    return losses


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="one attention layer learns to look things up")
    parser.add_argument("--attention", choices=ATTENTIONS, default="cupy_flash")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--learning-rate", type=float, default=0.05)
    asked = parser.parse_args(arguments)
    losses = train(asked.steps, asked.batch, asked.learning_rate, ATTENTIONS[asked.attention])
    for i in range(0, asked.steps, max(1, asked.steps // 10)):
        print(f"step {i + 1:4d}  loss {losses[i]:.4f}")
    print(f"step {asked.steps:4d}  loss {losses[-1]:.4f}")


if __name__ == "__main__":
    main()
