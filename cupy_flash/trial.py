"""One call as a record without arrays: what `check` and `tune` run, and what CUPY_FLASH_RECORD writes.

Its JSON, `Trial.record`, is readable and complete: `Trial.of` makes the same call again, with the same random arrays.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, NamedTuple

import numpy as np

from .arrays import named_dtype
from .features import ARRAY, FEATURES, NUMBER, is_given
from .pose import PLAIN_OPTIONS
from .problem import DTYPES, FP8, Options, Packed, Problem
from .requirements import Requirements, check_options

# The options that a Trial names by their presence: numbers without a field of their own, and arrays.
OPTIONS = tuple(feature.name for feature in FEATURES if feature.kind in (ARRAY, NUMBER) and feature.name != "scale")
STATED = ("causal", "layout", "deterministic")  # options that are fields of a Trial with the same meaning
NUMBERS = {"softcap": 15.0, "dropout": 0.25}
SEED = 20


class Call(NamedTuple):
    """The arrays of a call in its layout, the options of the public functions, and the gradients dout and dlse."""

    q: Any
    k: Any
    v: Any
    options: dict[str, Any]
    dout: Any
    dlse: Any
    packed: Packed | None = None


@dataclass(frozen=True)
class Trial:
    """A call of attention and, with `backward`, of its gradients. Arrays are random, always the same."""

    dtype: str = "bfloat16"
    head_dim: int = 64
    head_dim_v: int | None = None  # None: head_dim
    batch: int = 1
    q_len: int = 128
    kv_len: int = 128
    heads: int = 2
    kv_heads: int = 1
    layout: str = "bshd"
    causal: bool | str = False
    window: tuple[int | None, int | None] | None = None
    options: tuple[str, ...] = ()  # names in OPTIONS
    packed: bool = False
    deterministic: bool = False
    backward: bool = True

    def __post_init__(self) -> None:
        wrong = (
            [] if self.dtype in (*DTYPES, FP8) else [f"dtype {self.dtype!r} is not one of {', '.join(DTYPES)}, {FP8}"]
        )
        sizes = ("head_dim", "head_dim_v", "batch", "q_len", "kv_len", "heads", "kv_heads")
        for name in sizes if self.head_dim_v is not None else (sizes[0], *sizes[2:]):
            size = getattr(self, name)
            if type(size) is not int or not 1 <= size < 2**31:
                wrong.append(f"{name} must be a whole number of at least 1 and less than 2**31, not {size!r}")
        if not wrong and self.heads % self.kv_heads:
            wrong.append(f"heads {self.heads} must be a multiple of kv_heads {self.kv_heads}")
        names: Any = self.options
        if isinstance(names, tuple):
            unknown = [name for name in names if name not in OPTIONS]
            if unknown:
                wrong.append(f"options {', '.join(map(repr, unknown))} are not of {', '.join(OPTIONS)}")
        else:
            wrong.append(f"options must be a list of names, not {names!r}")
        for name in ("packed", "backward"):
            if not isinstance(getattr(self, name), bool):
                wrong.append(f"{name} must be True or False, not {getattr(self, name)!r}")
        requirements, plain = Requirements("a call"), Options()
        options = {name: getattr(self if name in STATED else plain, name) for name in PLAIN_OPTIONS}
        options["window"] = self.window
        check_options(requirements, options, None, self.packed is True, np.float32)
        wrong += requirements.unmet
        if wrong:
            raise ValueError("; ".join(wrong))

    @classmethod
    def of(cls, record: Any) -> Trial:
        """The Trial of a JSON record; ValueError or TypeError for another record."""
        if not isinstance(record, Mapping):
            raise TypeError(f"a call is a mapping of names to values, not {record!r}")
        names = [field.name for field in fields(cls)]
        unknown = [name for name in record if name not in names]
        if unknown:
            raise ValueError(f"{', '.join(map(repr, unknown))} are not of {', '.join(names)}")
        pairs: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in record.items()
        }
        return cls(**pairs)

    @classmethod
    def of_problem(cls, problem: Problem) -> Trial | None:
        """The Trial of a call's Problem; None for what a Trial cannot state: mods, KV caches, shards, empty arrays."""
        if problem.mods or problem.cache is not None or problem.shard:
            return None
        if 0 in (problem.batch, problem.q_len, problem.kv_len):
            return None
        mask = problem.mask
        corner = "top_left" if mask.top_left else "bottom_right"
        features = {feature.name: feature for feature in FEATURES}
        return cls(
            problem.dtype.name, problem.head_dim, problem.head_dim_v, problem.batch, problem.q_len, problem.kv_len,
            problem.heads, problem.kv_heads, "bshd" if problem.layout == "thd" else problem.layout,
            causal=corner if mask.edges and (mask.right == 0 or mask.top_left) else False,
            window=None if mask.left is None and mask.right in (None, 0) else (mask.left, mask.right),
            options=tuple(name for name in OPTIONS if is_given(problem, features[name])),
            packed=problem.layout == "thd", deterministic=problem.deterministic, backward=problem.backward,
        )  # fmt: skip

    @property
    def record(self) -> dict[str, Any]:
        """The fields that are not the default's, as JSON."""
        default = asdict(Trial())
        return {name: value for name, value in asdict(self).items() if value != default[name]}

    def append_to(self, file: str) -> None:
        """Append the record as a line of JSON, in one write: processes that record to one file do not mix lines."""
        import json

        line = json.dumps(self.record | {"backward": self.backward}) + "\n"
        # The file may be a FIFO: with O_NONBLOCK, open fails instead of blocking until a process reads it.
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | getattr(os, "O_NONBLOCK", 0)
        descriptor = os.open(file, flags, 0o644)
        try:
            os.write(descriptor, line.encode())
        finally:
            os.close(descriptor)

    def __str__(self) -> str:
        dim = str(self.head_dim) if self.head_dim_v in (None, self.head_dim) else f"{self.head_dim}/{self.head_dim_v}"
        words = [self.dtype, f"D {dim}", f"{self.batch} x {self.heads} heads", f"{self.q_len} x {self.kv_len}"]
        words += [] if self.causal is False else ["causal" if self.causal is True else f"causal {self.causal}"]
        words += [] if self.window is None else [f"window {self.window}"]
        words += [name for name in ("packed", "deterministic") if getattr(self, name)]
        return ", ".join((*words, *self.options))

    def call(self, seed: int = SEED) -> Call:
        """The call with random normal arrays of NumPy."""
        rng = np.random.default_rng(seed)
        dtype = named_dtype(self.dtype)
        out_dtype = named_dtype("bfloat16") if self.dtype == FP8 else dtype
        real = np.float64 if self.dtype == "float64" else np.float32

        def normal(*shape: int) -> np.ndarray[Any, Any]:
            return rng.standard_normal(shape, real)

        dim_v = self.head_dim_v or self.head_dim
        q = normal(self.batch, self.q_len, self.heads, self.head_dim)
        k = normal(self.batch, self.kv_len, self.kv_heads, self.head_dim)
        v = normal(self.batch, self.kv_len, self.kv_heads, dim_v)
        dout, dlse = normal(self.batch, self.q_len, self.heads, dim_v), normal(self.batch, self.q_len, self.heads)
        options = {name: self._option(name, rng, out_dtype) for name in self.options}
        options |= {"causal": self.causal, "window": self.window}
        if "dropout" in self.options:
            options["seed"] = SEED
        if self.packed:  # sequences of falling lengths
            q_rows, kv_rows = (
                np.maximum(length - np.arange(self.batch) * (length // (2 * self.batch)), 1)
                for length in (self.q_len, self.kv_len)
            )
            q, dout, dlse = (_pack(x, q_rows) for x in (q, dout, dlse))
            k, v = _pack(k, kv_rows), _pack(v, kv_rows)
            q_bounds, kv_bounds = (np.cumsum([0, *rows], dtype=np.int32) for rows in (q_rows, kv_rows))
            packed = Packed(q_bounds, kv_bounds, self.q_len, self.kv_len)
            dlse = np.ascontiguousarray(dlse.T)
        else:
            packed = None
            dlse = np.ascontiguousarray(dlse.swapaxes(1, 2))
            options["layout"] = self.layout
            if self.layout == "bhsd":
                q, k, v, dout = (np.ascontiguousarray(x.swapaxes(1, 2)) for x in (q, k, v, dout))
        q, k, v = (x.astype(dtype) for x in (q, k, v))
        return Call(q, k, v, options, dout.astype(out_dtype), dlse, packed)

    def _option(self, name: str, rng: np.random.Generator, dtype: np.dtype[Any]) -> Any:
        if name in NUMBERS:
            return NUMBERS[name]
        sizes = {"b": self.batch, "h": self.heads, "g": self.kv_heads, "i": self.q_len, "j": self.kv_len}
        feature = next(feature for feature in FEATURES if feature.name == name)
        shape = [sizes[axis] for axis in feature.axes[0]]
        if name == "mask":
            return rng.random(shape) < 0.8
        if feature.longest:
            longest = self.q_len if feature.longest == "q_len" else self.kv_len
            return rng.integers(longest // 2, longest, shape, dtype=np.int32, endpoint=True)
        if name in ("bias", "sink"):
            return rng.standard_normal(shape, np.float32).astype(dtype)
        return rng.uniform(0.25, 1.0, shape).astype(np.float32)  # slopes and descales


def _pack(x: np.ndarray[Any, Any], lengths: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Padded (B, S, ...) -> (T, ...)."""
    return np.concatenate([row[:length] for row, length in zip(x, lengths, strict=True)])
