"""Sharded attention: batch and heads stay sharded in the forward and the backward.

XLA would replicate the operands of an opaque call. A custom_partitioning with a sharding rule keeps them sharded: a
key/value head and its group of query heads are on one device. Gradients that are sums over sequences or heads (of sink,
bias and captured arrays) are added over the devices. Dropout and mods get the indices of a shard's first sequence and
head, so that results do not depend on the sharding. A sharded sequence needs communication: see ring_attention.
"""

from __future__ import annotations

import functools
import math
import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding, PartitionSpec

from .static_call import Call, parse

Axes = tuple[str, ...]  # names of mesh axes
SHARDED = ("q", "k_cache", "v_cache", "k", "v")  # operands whose sharding decides the split, in order of precedence


def sharded(bind: Any, *arrays: Any, call: Call) -> Any:
    """Return the results of a call that runs once per shard; `bind` makes the call of one device."""
    return _partitioned(bind, call.text, tuple(x.shape for x in arrays))(*arrays)


@functools.lru_cache(maxsize=256)
def _partitioned(bind: Any, text: str, shapes: tuple[tuple[int, ...], ...]) -> Any:
    call = parse(text)

    def whole(*arrays: Any) -> Any:
        return tuple(bind(*arrays, call=text))

    def partition(mesh: Any, operands: Any, results: Any) -> Any:
        split = _split(call, mesh, operands)
        shardings = split.shardings(call.names, operands)
        missing = tuple(split.missing(name, x.shape) for name, x in zip(call.result_names, results, strict=True))
        shard = functools.partial(_shard, bind, call, split, missing)
        return mesh, shard, split.shardings(call.result_names, results), shardings

    def infer(mesh: Any, operands: Any, results: Any) -> Any:
        return _split(call, mesh, operands).shardings(call.result_names, results)

    function = custom_partitioning(whole)
    function.def_partition(
        partition, infer_sharding_from_operands=infer, **rule(call, dict(zip(call.names, shapes, strict=True)))
    )
    return function


@functools.lru_cache
def example() -> Any:
    """Return a jaxpr with a custom_partitioning, as a parameter for primitives that are lowered to one.

    jax gives the lowering of custom_partitioning its devices only if it finds that primitive in the program or in the
    jaxprs among the parameters of the program's primitives.
    """
    same = custom_partitioning(lambda x: x)
    same.def_partition(lambda *_: None, sharding_rule="i -> i")  # never run
    return jax.make_jaxpr(same)(jax.ShapeDtypeStruct((1,), jnp.float32))


def explicit_mesh(types: Any) -> Any:
    """Return the mesh of the first operand whose type has explicit axes; None without one."""
    return next((x.sharding.mesh for x in types if x.sharding.mesh.explicit_axes), None)


def types_of_results(call: Call, mesh: Any, operands: Any) -> tuple[Any, ...]:
    """Return the shardings of the results, for operands whose types have explicit axes of the mesh."""
    results = call.results(dict(zip(call.names, operands, strict=True)))
    shapes = [jax.ShapeDtypeStruct(*described) for described in results.values()]
    return _split(call, mesh, operands).shardings(call.result_names, shapes)


def rule(call: Call, shapes: dict[str, tuple[int, ...]]) -> dict[str, Any]:
    """Return Shardy's rule for a call, in which dimensions that are sharded alike share a factor.

    The query heads are the factors (g r): r = Hq // Hk heads for each of the g key/value heads. With a factor of their
    own, a device could get query heads and key/value heads of different groups.
    """
    sizes = call.sizes(shapes)
    group = sizes.get("h", sizes["g"]) // sizes["g"]
    whole: list[str] = ["r"] if group > 1 else []  # factors that are not sharded
    if "selected" in call.names:
        whole.append("g")

    def factors(name: str, shape: tuple[int, ...]) -> str:
        written = []
        for letter, size in zip(call.axes(name, len(shape)), shape, strict=True):
            if sizes.get(letter) != size:
                letter = f"w{len(whole)}"  # an axis that q, k and v lack, or one of size 1
            if letter not in "bghij":
                whole.append(letter)
            written.append(("(g r)" if group > 1 else "g") if letter == "h" else letter)
        return " ".join(written)

    operands = ", ".join(factors(name, shape) for name, shape in shapes.items())
    avals = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
    results = ", ".join(
        factors(name, shape) for name, (shape, _) in zip(call.result_names, call.results(avals).values(), strict=True)
    )
    written = f"{operands} -> {results}"
    in_order = dict.fromkeys(re.findall(r"\w+", written))  # Shardy requires them in order of appearance
    sized = {"r": group} if "r" in in_order else {}
    return {"sharding_rule": written, "need_replication_factors": tuple(x for x in in_order if x in whole), **sized}


class _Split(NamedTuple):
    """The mesh axes over which the batch and the key/value heads of a call are sharded."""

    mesh: Any
    call: Any
    sizes: dict[str, int]  # {axis letter: size before sharding}
    batch: Axes
    heads: Axes

    def spec(self, name: str, shape: tuple[int, ...]) -> tuple[Axes | None, ...]:
        """Return the mesh axes of each dimension of an operand or result."""
        axes = {"b": self.batch, "h": self.heads, "g": self.heads}
        letters = self.call.axes(name, len(shape))
        whole = zip(letters, shape, strict=True)
        return tuple((axes.get(x) or None) if self.sizes.get(x) == size else None for x, size in whole)

    def shardings(self, names: tuple[str, ...], arrays: Any) -> tuple[Any, ...]:
        """Return the shardings of operands or results."""
        return tuple(
            NamedSharding(self.mesh, PartitionSpec(*self.spec(name, x.shape)))
            for name, x in zip(names, arrays, strict=True)
        )

    def missing(self, name: str, shape: tuple[int, ...]) -> Axes:
        """Return the mesh axes over which a result must be summed: those that split the call, but not the result."""
        present = {axis for axes in self.spec(name, shape) for axis in axes or ()}
        return tuple(axis for axis in (*self.batch, *self.heads) if axis not in present)

    def first(self) -> Any:
        """Return the indices of a shard's first sequence and first query head, int32 (2,)."""
        places = []
        for letter, axes in (("b", self.batch), ("h", self.heads)):
            index = jax.lax.axis_index(axes) if axes else 0
            places.append(index * self._size_of_shard(letter, axes))
        return jnp.asarray(places, jnp.int32)

    def places(self) -> dict[str, list[int]]:
        """Return {"<process>:<ordinal>": `first` of that device}, which needs no read of GPU memory, unlike `first`."""
        places = {}
        for index, device in np.ndenumerate(self.mesh.devices):
            at = dict(zip(self.mesh.axis_names, index, strict=True))
            place = []
            for letter, axes in (("b", self.batch), ("h", self.heads)):
                number = 0
                for axis in axes:
                    number = number * self.mesh.shape[axis] + at[axis]
                place.append(int(number) * self._size_of_shard(letter, axes))
            places[f"{device.process_index}:{device.local_hardware_id}"] = place
        return places

    def _size_of_shard(self, letter: str, axes: Axes) -> int:
        return self.sizes.get(letter, 0) // math.prod(self.mesh.shape[axis] for axis in axes)


def _split(call: Call, mesh: Any, operands: Any) -> _Split:
    """Return the split that the shardings of q, k and v imply; ValueError if a sequence is sharded."""
    named = dict(zip(call.names, operands, strict=True))
    sizes = call.sizes({name: x.shape for name, x in named.items()})
    given: dict[str, Axes] = {}
    for name in (name for name in SHARDED if name in named):
        for letter, axes in zip(call.axes(name, named[name].ndim), _spec_of(named[name]), strict=False):
            letter = "g" if letter == "h" else letter
            if axes and letter in "ij":
                raise ValueError(
                    f"{call.static.function}: the sequence of {name} is sharded over {', '.join(axes)}: use "
                    "cupy_flash.adapters.jax.ring_attention under jax.shard_map"
                )
            if axes:
                given.setdefault(letter, axes)
    if "selected" in named:  # its lists say of which heads they are by their number alone
        given.pop("g", None)
    batch, heads = (_dividing(given.get(letter, ()), sizes[letter], mesh) if letter in sizes else () for letter in "bg")
    return _Split(mesh, call, sizes, batch, tuple(axis for axis in heads if axis not in batch))


def _spec_of(x: Any) -> tuple[Axes, ...]:
    """Return the mesh axes of each dimension of an operand; () for one that is replicated."""
    spec = getattr(x.sharding, "spec", ())
    return tuple(() if part is None else (part,) if isinstance(part, str) else tuple(part) for part in spec)


def _dividing(axes: Axes, size: int, mesh: Any) -> Axes:
    """Return the longest prefix of the axes whose number of devices divides a size."""
    while axes and size % math.prod(mesh.shape[axis] for axis in axes):
        axes = axes[:-1]
    return axes


def _shard(bind: Any, call: Call, split: _Split, missing: tuple[Axes, ...], *arrays: Any) -> Any:
    """Return the results of one device's call on its shards."""
    if call.reads_place:
        static = call.static._replace(whole_heads=split.sizes["h"])
        if split.mesh.devices.flat[0].platform == "gpu":
            call = call._replace(static=static._replace(places=split.places()))
        else:
            call = call._replace(static=static, names=(*call.names, "first"))
            arrays = (*arrays, split.first())
    results = bind(*arrays, call=call.text)
    return tuple(jax.lax.psum(x, axes) if axes else x for x, axes in zip(results, missing, strict=True))
