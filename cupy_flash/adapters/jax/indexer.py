"""select_keys and selection_loss on jax arrays: eager, under jit and vmap, sharded over the batch, with gradients."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ... import dispatch
from ...arrays import Array
from ...problem import features
from ...problem.indexer import Rule, pose_indexer
from . import primitive, static_call
from .ffi_execute import bind
from .op import JaxArray
from .static_call import LOSS, LOSS_BACKWARD, SELECT
from .statistics import of_operand

if TYPE_CHECKING:
    from ...problem.argument_types import Causal

RESULTS = {SELECT: ("selected",), LOSS: ("loss",), LOSS_BACKWARD: ("dq", "dweights", "dk")}
COMPUTED_BY: dict[str, Any] = {
    SELECT: dispatch.select_keys, LOSS: dispatch.selection_loss, LOSS_BACKWARD: dispatch.selection_loss_gradients,
}  # fmt: skip

# `backend` is None: the FFI handler reads it of every call.
IndexerStatic: Any = features.record("function", *Rule._fields, "backend")


class IndexerCall(NamedTuple):
    """A call of the indexer, with the interface of `static_call.Call`."""

    step: str
    static: Any
    names: tuple[str, ...]

    @property
    def result_names(self) -> tuple[str, ...]:
        """The names of the results, in order."""
        return RESULTS[self.step]

    @property
    def aliases(self) -> dict[int, int]:
        """{}: no result reuses the buffer of an operand."""
        return {}

    @property
    def text(self) -> str:
        """The call serialised as the FFI attribute that `static_call.parse` reads."""
        return static_call.text_of(self)

    @property
    def reads_place(self) -> bool:
        """False: the results of a sequence do not depend on its index in the unsharded call."""
        return False

    def axes(self, name: str, rank: int) -> str:
        """Return the axes of an operand or a result as letters of axes.py: the batch is one, and others are whole."""
        paged = "block_table" in self.names and name in ("k", "block_table")
        if rank == 0 or paged:
            return "." * rank
        if name == "row_weights":
            return "b."[2 - rank :]
        return "b" + "." * (rank - 1)

    def sizes(self, shapes: dict[str, tuple[int, ...]]) -> dict[str, int]:
        """Return the size of each axis by its letter; lists serve all heads."""
        return {"b": shapes["q"][0], "g": 1}

    def fold_axis(self, mapped: set[str]) -> None:
        """Return None: vmap runs the instances one by one."""

    def results(self, operands: dict[str, Any]) -> dict[str, tuple[tuple[int, ...], Any]]:
        """Return the shape and dtype of each result by name; operands need only a shape and a dtype."""
        q = operands["q"]
        if self.step == SELECT:
            return {"selected": ((q.shape[0], 1, q.shape[1], self.static.n), np.dtype(np.int32))}
        if self.step == LOSS:
            return {"loss": ((), np.dtype(np.float64 if q.dtype == np.float64 else np.float32))}
        return {name: (tuple(operands[name[1:]].shape), operands[name[1:]].dtype) for name in self.result_names}

    def pose(self, operands: dict[str, Any]) -> Any:
        """Return the facts and the arrays, or raise one error with every requirement that is not met."""
        function, *rule, _ = self.static
        return pose_indexer(function, operands, Rule(*rule) if self.step == SELECT else None)

    def run(self, operands: dict[str, Any], results: list[Array]) -> dict[str, Array]:
        """Compute the results on the operands' device, in buffers that the owner of the operands allocates."""
        return self.named(COMPUTED_BY[self.step](*self.pose(operands)))

    def named(self, results: Any) -> dict[str, Array]:
        """Return the results of a function of the indexer by name; the loss is computed beside the gradients."""
        if self.step == LOSS_BACKWARD:
            return dict(zip(self.result_names, results[1:], strict=True))
        return {self.result_names[0]: results}


static_call.STEPS |= dict.fromkeys(RESULTS, (IndexerCall, IndexerStatic))


def select_keys(
    q_idx: JaxArray,
    weights: JaxArray,
    k_idx: JaxArray,
    n: int,
    *,
    causal: Causal = True,
    block: int = 1,
    local: int = 0,
    kv_lengths: JaxArray | None = None,
    block_table: JaxArray | None = None,
    scale: float = 1.0,
) -> jax.Array:
    """Compute `cupy_flash.select_keys` on jax arrays, under jit and vmap, and sharded over the batch.

    Args:
        q_idx: as in `cupy_flash.select_keys`.
        weights: likewise.
        k_idx: likewise.
        n: an int, not traced, as causal, block, local and scale.
        causal: likewise.
        block: likewise.
        local: likewise.
        kv_lengths: likewise.
        block_table: likewise.
        scale: likewise.

    Returns:
        The lists, int32 (B, 1, Sq, n), without gradients.
    """
    given = dict(q=q_idx, weights=weights, k=k_idx, kv_lengths=kv_lengths, block_table=block_table)
    call, operands = _call(SELECT, "select_keys", given, Rule(n, causal, block, local, scale))
    return bind(call, {name: jax.lax.stop_gradient(x) for name, x in operands.items()})["selected"]


def selection_loss(
    q_idx: JaxArray,
    weights: JaxArray,
    k_idx: JaxArray,
    selected: JaxArray,
    target: JaxArray,
    row_weights: JaxArray | None = None,
) -> jax.Array:
    """Compute `cupy_flash.selection_loss` on jax arrays, differentiable once, in reverse mode.

    Under jit, lists are not checked; entries that name no key there is are hidden.

    Args:
        q_idx: as in `cupy_flash.selection_loss`.
        weights: likewise.
        k_idx: likewise.
        selected: likewise.
        target: likewise, without a gradient.
        row_weights: likewise.

    Returns:
        The loss.
    """
    given = dict(q=q_idx, weights=weights, k=k_idx, selected=selected, target=target, row_weights=row_weights)
    call, operands = _call(LOSS, "selection_loss", given, Rule(0))
    return _loss(call.text, operands)


def _call(step: str, function: str, given: dict[str, Any], rule: Rule) -> tuple[IndexerCall, dict[str, Any]]:
    operands = {name: jnp.asarray(x) for name, x in given.items() if x is not None}
    call = IndexerCall(step, IndexerStatic(function, *rule, None), tuple(operands))
    recorder = primitive.Recorder("traced")  # the call itself checks the contents of arrays
    indexer, _ = call.pose({name: recorder.array(x.shape, x.dtype) for name, x in operands.items()})
    return call._replace(static=IndexerStatic(function, *indexer.rule, None)), operands


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _loss(text: str, operands: dict[str, Any]) -> Any:
    return bind(static_call.parse(text), operands)["loss"]


def _save(text: str, operands: dict[str, Any]) -> tuple[Any, Any]:
    return _loss(text, operands), operands


def _differentiate(text: str, operands: dict[str, Any], dloss: Any) -> tuple[dict[str, Any]]:
    given = operands | {"dloss": dloss}
    call = IndexerCall(LOSS_BACKWARD, static_call.parse(text).static, tuple(given))
    gradients = bind(call, given)
    return ({name: of_operand(gradients.get(f"d{name}"), x) for name, x in operands.items()},)


_loss.defvjp(_save, _differentiate)
