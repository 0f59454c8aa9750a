"""A call of attention as a function of all its arrays, as the tapes of mlx and TensorFlow differentiate it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from .. import dispatch, keyed_plan
from ..arrays import Array
from ..problem.build import captured_names, drawn_seed, pose, traced_mod
from ..problem.checks import Requirements
from ..problem.records import Options, Saved, Tangents, UnsupportedError


class TapeCall:
    """The options of a call; `inputs` are those that a tape sees, and every method takes q, k, v and all of these.

    Args:
        function: the name of the call in errors.
        options: the caller's options of `attention`.
        is_input: whether a tape sees a value: an array of its library.
    """

    def __init__(self, function: str, options: dict[str, Any], is_input: Callable[[object], bool]) -> None:
        self._function = function
        self._options = Options.of("attention", options | {"return_lse": True})
        if self._options.head_dim_v is not None:
            raise UnsupportedError(f"{function}: head_dim_v; give v=k[..., :head_dim_v], whose gradient the tape adds")
        if self._options.dropout and self._options.seed is None:  # the backward needs the seed of the forward
            self._options.seed = drawn_seed()
        # The forward reports a mod that cannot be traced, with all else that is wrong.
        self._mod = traced_mod(Requirements(function), self._options)
        captured = dict(enumerate(() if self._mod is None else self._mod.arrays))
        self._captured = {place: x for place, x in captured.items() if is_input(x)}
        self._named = {name: x for name in options if is_input(x := getattr(self._options, name))}

    @property
    def inputs(self) -> dict[str, Any]:
        """The arrays among the options, then those that mods capture, by name."""
        names = captured_names(self._mod)
        return self._named | {names[place]: x for place, x in self._captured.items()}

    def _split(self, given: Sequence[Any]) -> tuple[dict[str, Any], dict[int, Any]]:
        """Return what is given for each of `inputs`, by name and by the place of a captured array."""
        named, captured = given[: len(self._named)], given[len(self._named) :]
        return dict(zip(self._named, named, strict=True)), dict(zip(self._captured, captured, strict=True))

    def _with(self, inputs: Sequence[Any]) -> Options:
        replaced, captured = self._split(inputs)
        if self._mod is not None:
            replaced |= {"score_mod": self._mod.with_array_at(captured), "mask_mod": None}
        return replace(self._options, **replaced)

    def forward(self, q: Any, k: Any, v: Any, *inputs: Any) -> tuple[Any, Any]:
        """Return (out, lse)."""
        return keyed_plan.forward(self._function, (q, k, v), self._with(inputs), None)

    def backward(self, saved: Saved, q: Any, k: Any, v: Any, *inputs: Any) -> list[Any]:
        """Return the gradients of q, k, v and the inputs; None for an input that has none."""
        problem, operands = pose(f"{self._function}_backward", (q, k, v), self._with(inputs), saved=saved)
        found = dispatch.backward(problem, operands).map(Array.result)
        named = [getattr(found, f"d{name}", None) for name in self._named]
        of_captured = found.dcaptured
        captured = [None if of_captured is None else of_captured[place] for place in self._captured]
        return [*found[:3], *named, *captured]

    def jvp(self, tangents: Sequence[Any], q: Any, k: Any, v: Any, *inputs: Any) -> tuple[Any, Any]:
        """Return the tangents of out and lse in the direction of those of q, k, v and the inputs."""
        named, captured = self._split(tangents[3:])
        of_captured = [captured.get(place) for place in range(len(captured_names(self._mod)))]
        tq, tk, tv = tangents[:3]
        direction = Tangents(tq, tk, tv, named.get("bias"), named.get("sink"), of_captured)
        problem, operands = pose(f"{self._function}_jvp", (q, k, v), self._with(inputs), tangents=direction)
        _, _, tout, tlse = (array.result() for array in dispatch.jvp(problem, operands))
        return tout, tlse
