"""Ring attention for jax: under shard_map, ppermute circulates the K and V shards of a sequence.

At step s a device has the K and V shards of device - s, attends to them with its own queries and merges the partial
result. In the backward dK and dV circulate with K and V, in float32 (float64 for float64). Source: Liu, Zaharia and
Abbeel, Ring Attention with Blockwise Transformers (2023).
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ...problem import records
from ...problem.mask import Mask
from ...problem.records import Options
from .ffi_execute import run, typed_like
from .op import JaxArray, seed_words
from .static_call import BACKWARD, FORWARD, Static

if TYPE_CHECKING:
    import numpy.typing as npt
    from typing_extensions import Unpack

    from ...problem.argument_types import RanksOptions, Sharding

SHARDINGS = ("contiguous", "zigzag", "striped")
SERVED = tuple(feature.name for feature in records.ARRAYS if feature.ranks)
ONCE = tuple(
    feature.name for feature in records.ARRAYS if feature.once
)  # operands that must count once per query (a sink), so only the call with the query's own keys gets them
UNSERVED = (
    *(feature.name for feature in (*records.ARRAYS, *records.MODS) if not feature.ranks),
    "statistics",
    "head_dim_v",
)


def ring_positions(length: int, devices: int, sharding: Sharding = "zigzag") -> npt.NDArray[np.int64]:
    """Return the position of each row of the sharded sequence, int64 (length,).

    Pass `x[:, ring_positions(...)]`, sharded evenly along the sequence, to `ring_attention`; indexing the result with
    `np.argsort` of the positions restores the order.

    Args:
        length: length of the whole sequence, a multiple of `devices`, or of 2 * devices for zigzag.
        devices: number of shards.
        sharding: "zigzag", "contiguous" or "striped": on 4 devices, 16 positions belong to the devices
            0011 2233 3322 1100, 0000 1111 2222 3333, or 0123 0123 0123 0123.
    """
    _require_even("ring_positions", length, devices, sharding)
    size = length // devices
    shards = (
        start + step * np.arange(size // pieces)
        for device in range(devices)
        for starts, step, pieces in [_starts(sharding, device, devices, size)]
        for start in starts
    )
    return np.concatenate(list(shards)).astype(np.int64)


def ring_attention(
    q: JaxArray, k: JaxArray, v: JaxArray, *, axis_name: str | tuple[str, ...], sharding: Sharding = "zigzag",
    **options: Unpack[RanksOptions[JaxArray]],
) -> jax.Array | tuple[jax.Array, jax.Array]:  # fmt: skip
    """Compute `cupy_flash.adapters.jax.attention` of a sequence that is sharded over an axis of a shard_map.

    Differentiable once, in reverse mode. All shards have the same length: see `ring_positions`.

    Args:
        q: (B, Sq / devices, Hq, D), the device's rows.
        k: (B, Sk / devices, Hk, D), likewise.
        v: (B, Sk / devices, Hk, Dv), likewise.
        axis_name: the axis of the mesh over which the sequence is sharded.
        sharding: "zigzag", which balances the work under a causal mask, "contiguous" or "striped".
        **options: those of `attention` except bias, mask, q_lengths, kv_lengths, score_mod, mask_mod, statistics and
            the descales, and without traced numbers. Positions and dropout refer to the whole sequence, batch and heads
            to those of the device.

    Returns:
        out (B, Sq / devices, Hq, Dv), or (out, lse) with lse (B, Hq, Sq / devices).

    Raises:
        TypeError: as `attention`.
        ValueError: as `attention`; for shards that are not even, or an option that is not served.
    """
    function = "ring_attention"
    settings = Options.of(function, options)
    refused = [f"{name} is not served over several devices" for name in UNSERVED if getattr(settings, name) is not None]
    if settings.dropout and settings.seed is None:
        refused.append("dropout needs a seed here, the same on every device")
    if refused:
        raise ValueError("\n  - ".join([f"{function}: a requirement is not met", *refused]))
    operands = {"q": q, "k": k, "v": v}
    operands |= {name: getattr(settings, name) for name in SERVED if getattr(settings, name) is not None}
    if isinstance(settings.seed, (jax.Array, np.ndarray)):
        operands["seed"], settings.seed = seed_words(function, settings.seed), None
    given = {name: getattr(settings, name, None) for name in Static._fields}
    static = Static(**given | {"function": function})
    devices = jax.lax.axis_size(axis_name)
    axis = 2 if settings.layout == "bhsd" else 1
    for x in (q, k):
        _require_even(function, x.shape[axis] * devices, devices, sharding)
    ring = _Ring(axis_name, devices, sharding, axis, static._replace(row_step=devices if sharding == "striped" else 1))
    out, lse = _attend(ring, {name: jnp.asarray(x) for name, x in operands.items()})
    return (out, lse) if settings.return_lse else out


def _require_even(function: str, length: int, devices: int, sharding: str) -> None:
    if sharding not in SHARDINGS:
        raise ValueError(f"{function}: sharding must be one of {', '.join(SHARDINGS)}, not {sharding!r}")
    pieces = devices * (2 if sharding == "zigzag" else 1)
    if length % pieces:
        raise ValueError(
            f"{function}: {sharding} shards of {devices} devices need a multiple of {pieces}, not {length}"
        )


def _starts(sharding: str, device: Any, devices: int, size: int) -> tuple[list[Any], int, int]:
    """Return (first position of each piece of a device's shard, step between rows, number of pieces)."""
    if sharding == "striped":
        return [device], devices, 1
    if sharding == "contiguous":
        return [device * size], 1, 1
    half = size // 2
    return [device * half, (2 * devices - 1 - device) * half], 1, 2


class _Pair(NamedTuple):
    """The piece of queries and the piece of keys of one call; on at least one device a query sees one of the keys."""

    q_piece: int
    kv_piece: int
    own: bool  # the keys have the queries' positions, as in one call per piece of queries


class _Ring(NamedTuple):
    """The static part of a call of ring attention."""

    axis_name: Any
    devices: int
    sharding: str
    axis: int  # the sequence axis of q, k and v
    static: Static

    def pieces(self, x: Any) -> list[Any]:
        """Return the pieces of a shard of q, k, v or out."""
        return jnp.split(x, 2 if self.sharding == "zigzag" else 1, self.axis)

    def schedule(self, q_rows: int, kv_rows: int) -> list[list[_Pair]]:
        """Return the calls of each step, the same on all devices; a window may need fewer steps than devices."""
        steps = [self._pairs(step, q_rows, kv_rows) for step in range(self.devices)]
        while len(steps) > 1 and not steps[-1]:
            steps.pop()
        return steps

    def _pairs(self, step: int, q_rows: int, kv_rows: int) -> list[_Pair]:
        pairs = []
        for q_piece in range(len(_starts(self.sharding, 0, self.devices, q_rows)[0])):
            for kv_piece in range(len(_starts(self.sharding, 0, self.devices, kv_rows)[0])):
                own = step == 0 and q_piece == kv_piece
                if own or any(self._sees(d, step, q_piece, kv_piece, q_rows, kv_rows) for d in range(self.devices)):
                    pairs.append(_Pair(q_piece, kv_piece, own))
        return pairs

    def _sees(self, device: int, step: int, q_piece: int, kv_piece: int, q_rows: int, kv_rows: int) -> bool:
        """Return whether a query of a device sees a key of a piece."""
        q_starts, stride, pieces = _starts(self.sharding, device, self.devices, q_rows)
        kv_starts, _, _ = _starts(self.sharding, (device - step) % self.devices, self.devices, kv_rows)
        offset = self._offset(q_rows, kv_rows) + q_starts[q_piece] - kv_starts[kv_piece]
        band = self._mask.band(q_rows // pieces, kv_rows // pieces, offset, stride)
        first, last = band.kv_range(0, q_rows // pieces)
        return bool(first < last and band.low <= band.high)

    @property
    def _mask(self) -> Mask:
        static = self.static
        left, right = (None if side in (None, -1) else int(side) for side in static.window or (None, None))
        return Mask(left, 0 if static.causal else right, top_left=static.causal == "top_left")

    def _offset(self, q_rows: int, kv_rows: int) -> int:
        return int(self._mask.offset(q_rows * self.devices, kv_rows * self.devices))

    def call(self, step: str, pair: _Pair, at: int, operands: dict[str, Any], saved: dict[str, Any]) -> dict[str, Any]:
        """Return the results of `step` on a pair of pieces at ring step `at`; `operands` has that step's k and v."""
        q_rows, kv_rows = (operands[name].shape[self.axis] for name in "qk")
        device = jax.lax.axis_index(self.axis_name)
        q_start = _starts(self.sharding, device, self.devices, q_rows)[0][pair.q_piece]
        holder = (device - at) % self.devices
        kv_start = _starts(self.sharding, holder, self.devices, kv_rows)[0][pair.kv_piece]
        starts = jnp.stack([q_start, kv_start, q_start + self._offset(q_rows, kv_rows) - kv_start]).astype(jnp.int32)
        batch = operands["q"].shape[0]
        given = {name: x for name, x in operands.items() if pair.own or name not in ONCE}
        given["q"] = self.pieces(operands["q"])[pair.q_piece]
        given |= {name: self.pieces(operands[name])[pair.kv_piece] for name in "kv"}
        given |= {name: self.rows(name, x, pair.q_piece) for name, x in saved.items()}
        given["starts"] = jnp.broadcast_to(starts, (batch, 3))
        return run(step, self.static, given)

    def rows(self, name: str, x: Any, piece: int) -> Any:
        """Return the rows of a piece of an array that the forward saved."""
        pieces = 2 if self.sharding == "zigzag" else 1
        return jnp.split(x, pieces, -1 if name in ("lse", "dlse") else self.axis)[piece]

    def pass_on(self, arrays: Any, shift: int) -> Any:
        """Send each device's arrays to the device `shift` places further along the ring."""
        moves = [(device, (device + shift) % self.devices) for device in range(self.devices)]
        return [jax.lax.ppermute(x, self.axis_name, moves) for x in arrays]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(ring: _Ring, operands: dict[str, Any]) -> tuple[Any, Any]:
    """Return (out, lse) of a shard of the queries."""
    q, keys = operands["q"], [operands["k"], operands["v"]]
    schedule = ring.schedule(q.shape[ring.axis], keys[0].shape[ring.axis])
    parts: dict[int, tuple[Any, Any]] = {}
    for step, pairs in enumerate(schedule):
        present = operands | dict(zip("kv", keys, strict=True))
        if step + 1 < len(schedule):
            keys = ring.pass_on(keys, 1)
        for pair in pairs:
            results = ring.call(FORWARD, pair, step, present, {})
            part = results["out"].astype(results["lse"].dtype), results["lse"]
            merged = _merge(ring, parts[pair.q_piece], part) if pair.q_piece in parts else part
            parts[pair.q_piece] = merged
    outs, lses = zip(*(parts[piece] for piece in sorted(parts)), strict=True)
    return jnp.concatenate(outs, ring.axis).astype(q.dtype), jnp.concatenate(lses, -1)


def _merge(ring: _Ring, one: tuple[Any, Any], other: tuple[Any, Any]) -> tuple[Any, Any]:
    """Merge two partial results of the same queries, as `cupy_flash.merge` does, in the dtype of lse."""
    lse = jnp.logaddexp(one[1], other[1])
    finite = jnp.where(jnp.isneginf(lse), 0, lse)  # a row that has seen no key yet
    weights = [jnp.exp(part[1] - finite)[..., None] for part in (one, other)]
    if ring.axis == 1:
        weights = [weight.swapaxes(1, 2) for weight in weights]
    return one[0] * weights[0] + other[0] * weights[1], lse


def _save(ring: _Ring, operands: dict[str, Any]) -> tuple[Any, Any]:
    out, lse = _attend(ring, operands)
    return (out, lse), (operands, out, lse)


def _differentiate(ring: _Ring, saved: Any, cotangents: tuple[Any, Any]) -> tuple[dict[str, Any]]:
    operands, out, lse = saved
    of_forward = {"dout": cotangents[0], "out": out, "lse": lse, "dlse": cotangents[1]}
    keys = [operands["k"], operands["v"]]
    schedule = ring.schedule(out.shape[ring.axis], keys[0].shape[ring.axis])
    totals = {name: jnp.zeros_like(operands[name], lse.dtype) for name in records.DIFFERENTIATED if name in operands}
    dkeys = [totals.pop("k"), totals.pop("v")]
    for step, pairs in enumerate(schedule):
        present = operands | dict(zip("kv", keys, strict=True))
        for pair in pairs:
            gradients = ring.call(BACKWARD, pair, step, present, of_forward)
            totals["q"] = _add(ring, totals["q"], gradients["dq"], pair.q_piece)
            dkeys = [
                _add(ring, total, gradients[name], pair.kv_piece)
                for total, name in zip(dkeys, ("dk", "dv"), strict=True)
            ]
            for name in ONCE:
                if f"d{name}" in gradients:
                    totals[name] = totals[name] + gradients[f"d{name}"].astype(lse.dtype)
        if step + 1 < len(schedule):
            *keys, dk, dv = ring.pass_on([*keys, *dkeys], 1)
            dkeys = [dk, dv]
    totals |= dict(zip("kv", ring.pass_on(dkeys, 1 - len(schedule)), strict=True))
    named = {name: typed_like(x.astype(operands[name].dtype), operands[name]) for name, x in totals.items()}
    return (dict.fromkeys(operands) | named,)


def _add(ring: _Ring, total: Any, part: Any, piece: int) -> Any:
    """Return `total` with `part` added to the rows of a piece."""
    rows = part.shape[ring.axis]
    index = [slice(None)] * total.ndim
    index[ring.axis] = slice(piece * rows, (piece + 1) * rows)
    return total.at[tuple(index)].add(part.astype(total.dtype))


_attend.defvjp(_save, _differentiate)
