"""The static part of a call in a traced program, which reaches the FFI handler as one string attribute."""

from __future__ import annotations

import functools
import json
import numbers
from typing import Any, NamedTuple

import numpy as np

from ... import dispatch
from ...arrays import Array
from ...mods.derive import floating_reads
from ...mods.trace import Mod, decoded
from ...problem import features, records
from ...problem.build import pose
from ...problem.records import (
    DOUBLE_BACKWARD,
    JVP,
    Operands,
    Options,
    Packed,
    Problem,
    Saved,
    Shard,
    Tangents,
    out_dtype,
)
from ..axes import axes_of, sizes_of

ARRAYS = tuple(feature.name for feature in records.ARRAYS)
NUMBERS = {feature.name: feature.example for feature in records.NUMBERS}  # placeholders for traced values
FORWARD, BACKWARD = "forward", "backward"
APPEND, CACHED = "append", "cached"  # the steps of kv_cache.py
WEIGHTS, WEIGHTS_BACKWARD = "weights", "weights backward"  # those of weights.py
STATISTICS, STATISTICS_BACKWARD = "statistics", "statistics backward"  # those of statistics.py
SELECT, LOSS, LOSS_BACKWARD = "select", "selection loss", "selection loss backward"  # those of indexer.py
OF_INDEXER = {SELECT: "select", LOSS: "loss", LOSS_BACKWARD: "gradients"}  # their functions in cpu/ and gpu/indexer.py
WITH_GRADIENTS = (BACKWARD, DOUBLE_BACKWARD)
SAVED = ("dout", "out", "lse", "dlse")
BOUNDS = ("cu_seqlens_q", "cu_seqlens_k")
PER_SEQUENCE = ("q_lengths", "kv_lengths", "starts", *BOUNDS)  # operands without a head axis

OPTIONS = tuple(feature.name for feature in records.FEATURES if feature.kind != features.ARRAY)
_Static: Any = features.record(
    *OPTIONS,
    *("function", "max_seqlen_q", "max_seqlen_k", "whole_heads", "row_step", "place", "places"),
)


class Static(_Static):
    """The options that are not arrays; a new value of any of them compiles a new program.

    Besides the options of `attention` it holds the function's name for error messages and max_seqlen of a packed batch.
    A shard of a larger call also has `whole_heads`, the query heads of the whole call; `row_step`, the distance in
    positions of neighbouring rows; and `place`, the indices of its first sequence and query head in the whole call.
    `places` holds the `place` of every device, which `Call.on_device` looks up.
    """

    __slots__ = ()

    @property
    def layout_of_arrays(self) -> str:
        """The layout: "bshd", "bhsd", or "thd" of a packed batch."""
        return self.layout if self.max_seqlen_q is None else "thd"


class Call(NamedTuple):
    """A step of attention (forward, backward, JVP or double backward): its static options and its operands' names.

    A tangent is an operand, named after the array that it belongs to: tq is the tangent of q.
    """

    step: str
    static: Static
    names: tuple[str, ...]

    def results(self, operands: dict[str, Any]) -> dict[str, tuple[tuple[int, ...], Any]]:
        """Return the shape and dtype of each result by name; operands need only a shape and a dtype."""
        if self.step in WITH_GRADIENTS:
            return {name: (tuple(operands[name[1:]].shape), operands[name[1:]].dtype) for name in self.result_names}
        q, v, layout = operands["q"], operands.get("v"), self.static.layout_of_arrays
        lse = {"thd": (1, 0), "bshd": (0, 2, 1), "bhsd": (0, 1, 2)}[layout]
        accumulation = np.dtype(np.float64 if q.dtype == np.float64 else np.float32)
        described = {
            "out": ((*q.shape[:-1], self.static.head_dim_v if v is None else v.shape[-1]), out_dtype(q.dtype)),
            "lse": (tuple(q.shape[axis] for axis in lse), accumulation),
        }
        return {name: described[name.removeprefix("t")] for name in self.result_names}

    @property
    def differentiated(self) -> tuple[str, ...]:
        """The operands that a backward differentiates, in the order of its results."""
        captured: tuple[str, ...] = ()
        if self.static.score_mod is not None:
            slots = floating_reads(decoded(self.static.score_mod, ()).program)
            captured = tuple(f"array{slot}" for slot in sorted(slots))
        return tuple(name for name in (*records.DIFFERENTIATED, *captured) if name in self.names)

    @property
    def result_names(self) -> tuple[str, ...]:
        """The names of the results, in order."""
        if self.step not in WITH_GRADIENTS:
            return ("out", "lse") if self.step == FORWARD else ("out", "lse", "tout", "tlse")
        gradients = tuple(f"d{name}" for name in self.differentiated)
        if self.step == BACKWARD:
            return gradients
        return (*gradients, "ddout", *(["ddlse"] if "dlse" in self.names else []))

    @property
    def _slots(self) -> int:
        return sum(name.startswith("array") for name in self.names)

    @property
    def aliases(self) -> dict[int, int]:
        """{}: no result reuses the buffer of an operand."""
        return {}

    @property
    def text(self) -> str:
        """The call serialised as the FFI attribute that `parse` reads."""
        return text_of(self)

    def on_device(self, device: str) -> Call:
        """Return the part of a sharded call that the device "<process>:<ordinal>" runs, with that device's `place`."""
        return self._replace(static=self.static._replace(place=self.static.places[device], places=None))

    def axes(self, name: str, rank: int) -> str:
        """Return the axes of an operand or a result as letters of axes.py."""
        return axes_of(name, rank, self.static.layout_of_arrays)

    def sizes(self, shapes: dict[str, tuple[int, ...]]) -> dict[str, int]:
        """Return the size of each axis of q, k and v, by its letter."""
        return sizes_of(shapes, self.static.layout_of_arrays)

    @property
    def reads_place(self) -> bool:
        """Whether the results depend on the index of a sequence or head in the unsharded call."""
        return bool(self.static.dropout or self.static.score_mod or "dropout" in self.names)

    def fold_axis(self, mapped: set[str]) -> str | None:
        """Return the axis, "b" or "h", into which vmap can fold its own, if it maps these operands; else None."""
        static = self.static
        if "selected" in self.names:
            return None
        if static.dropout or "dropout" in self.names or mapped & set(NUMBERS):
            return None
        if "sink" not in self.names and static.layout_of_arrays != "thd":
            return "b"
        return None if mapped & set(PER_SEQUENCE) else "h"

    def pose(self, operands: dict[str, Any]) -> tuple[Problem, Operands]:
        """Return the problem and its operands, or raise one error with every requirement that is not met."""
        saved = None
        if self.step in WITH_GRADIENTS:
            saved = Saved(operands["dout"], operands["out"], operands["lse"], operands.get("dlse"))
        arrays = (operands["q"], operands["k"], operands.get("v"))
        return pose(
            self.static.function, arrays, self.options(operands), self.packed(operands), saved, self.shard(operands),
            self._tangents(operands),
        )  # fmt: skip

    def options(self, operands: dict[str, Any]) -> Options:
        """Return the options of the caller."""
        static = self.static
        given = {name: getattr(static, name) for name in OPTIONS}
        given |= {name: operands.get(name) for name in ARRAYS}
        given |= {name: _number(operands[name]) for name in NUMBERS if name in operands}
        settings = Options(**given)
        settings.score_mod = self._mod(operands)
        if "seed" in operands:
            settings.seed = _seed(operands["seed"])
        return settings

    def packed(self, operands: dict[str, Any]) -> Packed | None:
        """Return the boundaries of a packed batch; None for a padded one."""
        static = self.static
        if static.max_seqlen_q is None:
            return None
        return Packed(operands["cu_seqlens_q"], operands["cu_seqlens_k"], static.max_seqlen_q, static.max_seqlen_k)

    def shard(self, operands: dict[str, Any]) -> Shard:
        """Return the place of a device's call in the whole one."""
        static = self.static
        first_batch, first_head = _integers(operands["first"]) if "first" in operands else static.place or (0, 0)
        return Shard(operands.get("starts"), static.row_step or 1, first_head, static.whole_heads, first_batch)

    def _tangents(self, operands: dict[str, Any]) -> Tangents | None:
        """Return the tangents of a JVP or a double backward; None for another step."""
        if self.step in (FORWARD, BACKWARD):
            return None
        captured = [operands.get(f"tarray{slot}") for slot in range(self._slots)]
        tangents: dict[str, Any] = {f"t{name}": operands.get(f"t{name}") for name in records.DIFFERENTIATED}
        return Tangents(**tangents, tcaptured=captured or None)

    def _mod(self, operands: dict[str, Any]) -> Mod | None:
        """Return the mods with the operands that they capture, or None without mods."""
        if self.static.score_mod is None:
            return None
        return decoded(self.static.score_mod, [operands[f"array{slot}"] for slot in range(self._slots)])

    def run(self, operands: dict[str, Any], results: list[Array]) -> dict[str, Array]:
        """Compute the results on the operands' device, in buffers that the owner of the operands allocates."""
        problem, posed = self.pose(operands)
        return self.named(getattr(dispatch, COMPUTED_BY[self.step])(problem, posed))

    def named(self, results: Any) -> dict[str, Array]:
        """Return the results of a backend by name, in the order of `result_names`."""
        if self.step not in WITH_GRADIENTS:
            return dict(zip(("out", "lse", "tout", "tlse"), results, strict=False))
        named = dict(zip((f"d{name}" for name in records.DIFFERENTIATED), results, strict=False))
        named |= {f"darray{slot}": gradient for slot, gradient in enumerate(results.dcaptured or ())}
        if self.step == DOUBLE_BACKWARD:
            named |= {"ddout": results.ddout, "ddlse": results.ddlse}
        return {name: named[name] for name in self.result_names}


# The function of `backends` for each step.
COMPUTED_BY = {FORWARD: "forward", BACKWARD: "backward", JVP: "jvp", DOUBLE_BACKWARD: "double_backward"}


def text_of(call: Any) -> str:
    """Serialise a call to JSON."""
    static = {name: value for name, value in call.static._asdict().items() if value is not None}
    return json.dumps({"step": call.step, "static": static, "names": call.names}, default=_plain)


# The classes of a call and of its static options for each step; kv_cache.py and derivatives.py add theirs.
STEPS: dict[str, tuple[Any, Any]] = dict.fromkeys(COMPUTED_BY, (Call, Static))


def _plain(value: Any) -> Any:
    """Return a number of NumPy, jax or fractions as a Python number, and any other value as text."""
    if isinstance(value, numbers.Real):
        return int(value) if isinstance(value, numbers.Integral) else float(value)
    return value.item() if hasattr(value, "item") else str(value)


@functools.lru_cache(maxsize=1024)
def parse(text: str) -> Any:
    """Return the call that `text_of` has serialised."""
    fields = json.loads(text)
    kind, options = STEPS[fields["step"]]
    static = dict.fromkeys(options._fields) | fields["static"]
    if static.get("window") is not None:
        static["window"] = tuple(static["window"])
    if isinstance(static.get("statistics"), list):
        static["statistics"] = tuple(static["statistics"])
    return kind(fields["step"], options(**static), tuple(fields["names"]))


def _host(x: Any) -> np.ndarray[Any, Any]:
    return x.numpy() if isinstance(x, Array) else np.asarray(x)


def _number(x: Any) -> float:
    return float(_host(x).reshape(()))


def _integers(x: Any) -> list[int]:
    return [int(value) for value in _host(x)]


def _seed(words: Any) -> Any:
    """Return the seed of `seed_words`: an int, or on a GPU the array itself, which only the kernels read."""
    if isinstance(words, Array) and words.device != "cpu":
        return Array(words.pointer, (1,), (1,), np.dtype(np.int64), words.device, words.framework, words.owner, True)
    low, high = _integers(words)
    return low | high << 32
