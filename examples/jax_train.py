"""Train a small byte-level GPT in jax, in one jitted step sharded over a mesh.

    python -m pip install -e ".[jax]"
    python examples/jax_train.py
    python examples/jax_train.py --attention jax
    python examples/jax_train.py --data 4 --model 1 --steps 200

Without GPUs the mesh is made of devices of the host. Batches are sharded over its first
axis, heads and the hidden layer of the MLP over its second. The model does not mention
the mesh: parameters and batches are placed on it, and jit keeps attention sharded,
forward and backward. The text is the source of Python's standard library.
"""

from __future__ import annotations

import argparse
import os
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# The flag must be set before jax first uses its devices. It makes four devices of the
# CPU, and does not affect GPUs.
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=4")

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from cupy_flash.adapters.jax import dot_product_attention

ATTENTIONS = {"cupy_flash": dot_product_attention, "jax": jax.nn.dot_product_attention}
LAYERS, HEADS, KV_HEADS, DIM, CONTEXT = 2, 4, 2, 64, 64
HEAD = DIM // HEADS

# The shape of each parameter, and its sharding over the axes "data" and "model".
SHAPES = {
    "bytes": ((256, DIM), (None, None)),
    "positions": ((CONTEXT, DIM), (None, None)),
    "q": ((LAYERS, DIM, HEADS, HEAD), (None, None, "model", None)),
    "kv": ((LAYERS, DIM, 2, KV_HEADS, HEAD), (None, None, None, "model", None)),
    "out": ((LAYERS, HEADS, HEAD, DIM), (None, "model", None, None)),
    "up": ((LAYERS, DIM, 4 * DIM), (None, None, "model")),
    "down": ((LAYERS, 4 * DIM, DIM), (None, "model", None)),
}

Parameters = dict[str, jax.Array]


def text() -> np.ndarray[Any, Any]:
    """Return the bytes of some modules of the standard library."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    names = ("argparse", "dataclasses", "inspect", "statistics", "textwrap", "typing")
    return np.frombuffer(
        b"".join((folder / f"{name}.py").read_bytes() for name in names), np.uint8
    )


def sample(data: np.ndarray[Any, Any], step: int, batch: int) -> np.ndarray[Any, Any]:
    """Return `batch` windows of CONTEXT + 1 bytes."""
    starts = np.random.default_rng(step).integers(0, len(data) - CONTEXT - 1, batch)
    return data[starts[:, None] + np.arange(CONTEXT + 1)].astype(np.int32)


def initial(mesh: Any) -> Parameters:
    """Return random parameters, placed on the mesh."""
    keys = jax.random.split(jax.random.key(0), len(SHAPES))
    return {
        name: jax.device_put(
            0.08 * jax.random.normal(key, shape),
            NamedSharding(mesh, PartitionSpec(*spec)),
        )
        for key, (name, (shape, spec)) in zip(keys, SHAPES.items(), strict=True)
    }


def normalised(x: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt((x**2).mean(-1, keepdims=True) + 1e-6)


def loss_of(parameters: Parameters, windows: jax.Array, attend: Any) -> jax.Array:
    """Return the mean cross entropy of the next byte in nats (uniform: 5.55)."""
    x = parameters["bytes"][windows[:, :-1]] + parameters["positions"]

    def block(x: jax.Array, layer: Parameters) -> tuple[jax.Array, None]:
        h = normalised(x)
        q = jnp.einsum("btd,dhe->bthe", h, layer["q"])
        k, v = jnp.einsum("btd,dchk->cbthk", h, layer["kv"])
        x = x + jnp.einsum(
            "bthe,hed->btd", attend(q, k, v, is_causal=True), layer["out"]
        )
        return x + jax.nn.gelu(normalised(x) @ layer["up"]) @ layer["down"], None

    x, _ = jax.lax.scan(
        block, x, {name: parameters[name] for name in ("q", "kv", "out", "up", "down")}
    )
    logits = normalised(x) @ parameters["bytes"].T * DIM**-0.5 * 8
    picked = jnp.take_along_axis(jax.nn.log_softmax(logits), windows[:, 1:, None], -1)
    return -picked.mean()


def train(
    steps: int, batch: int, learning_rate: float, attend: Any, data: int, model: int
) -> list[float]:
    """Train with Adam on a mesh of data x model devices; return each step's loss."""
    mesh = jax.make_mesh(
        (data, model), ("data", "model"), axis_types=(AxisType.Auto,) * 2
    )
    parameters = initial(mesh)
    moments = [jax.tree.map(jnp.zeros_like, parameters) for _ in range(2)]
    corpus = text()

    @jax.jit
    def step(
        parameters: Parameters, first: Any, second: Any, windows: jax.Array, count: Any
    ) -> Any:
        value, gradients = jax.value_and_grad(loss_of)(parameters, windows, attend)
        first = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, first, gradients)
        second = jax.tree.map(lambda m, g: 0.99 * m + 0.01 * g**2, second, gradients)
        scale = learning_rate * jnp.sqrt(1 - 0.99**count) / (1 - 0.9**count)
        moved = jax.tree.map(
            lambda p, m, s: p - scale * m / (jnp.sqrt(s) + 1e-8),
            parameters,
            first,
            second,
        )
        return moved, first, second, value

    losses = []
    for i in range(steps):
        windows = jax.device_put(
            sample(corpus, i, batch), NamedSharding(mesh, PartitionSpec("data"))
        )
        parameters, *moments, value = step(parameters, *moments, windows, i + 1.0)
        losses.append(float(value))
    return losses


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description="train a small GPT, sharded over devices"
    )
    parser.add_argument("--attention", choices=ATTENTIONS, default="cupy_flash")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--learning-rate", type=float, default=0.003)
    parser.add_argument(
        "--data", type=int, default=2, help="devices over which batches are sharded"
    )
    parser.add_argument(
        "--model", type=int, default=2, help="devices over which heads are sharded"
    )
    options = parser.parse_args(arguments)
    attend = ATTENTIONS[options.attention]
    losses = train(
        options.steps,
        options.batch,
        options.learning_rate,
        attend,
        options.data,
        options.model,
    )
    for i in (
        *range(0, options.steps - 1, max(1, options.steps // 10)),
        options.steps - 1,
    ):
        print(f"step {i + 1:4d}  loss {losses[i]:.4f}")


if __name__ == "__main__":
    main()
