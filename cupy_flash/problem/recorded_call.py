"""Trial: a call recorded without its arrays, which `check` and `tune` run and CUPY_FLASH_RECORD writes.

`Trial.record` is readable, complete JSON, from which `Trial.of` makes the same call with the same random arrays. The
contents of arrays are not recorded. A call whose work depends on them, or that has no Trial for another reason, is
recorded as a description and that reason (`recorded_line`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from ..arrays import named_dtype
from .build import TABLE
from .checks import Requirements, check_options
from .features import ARRAY, FLOATING, NUMBER
from .records import CACHE_FEATURES, DTYPES, FEATURES, FP8, Cache, Operands, Options, Packed, Problem, is_given
from .shared_kv import FACTORS

if TYPE_CHECKING:
    from ..mods.trace import Mod

# A value that JSON can hold.
Json: TypeAlias = "bool | int | float | str | Sequence[Json] | Mapping[str, Json] | None"
# The options of which a Trial records only that they are given: arrays, and numbers without a field of their own.
OPTIONS = tuple(
    feature.name
    for feature in FEATURES
    if feature.kind in (ARRAY, NUMBER) and not (feature.host or feature.name == "scale")
)
STATED = ("causal", "layout", "deterministic")  # options that are fields of a Trial with the same meaning
NOT_REPLAYED, DESCRIPTION = "not_replayed", "call"  # the fields of the record of a call that has no Trial


Array = np.ndarray
SEED = 20


def check_fields(name: str, kind: type[CacheTrial | Trial], record: object) -> None:
    """Check that a JSON record is a mapping whose keys are fields of a dataclass; errors call the record `name`."""
    if not isinstance(record, Mapping):
        raise TypeError(f"{name} must be a mapping of names to values, not {record!r}")
    names = [field.name for field in fields(kind)]
    unknown = [key for key in record if key not in names]
    if unknown:
        raise ValueError(f"{name} has no field {', '.join(map(repr, unknown))}; the fields are {', '.join(names)}")


@dataclass(frozen=True)
class CacheTrial:
    """The facts of a KV cache, without lengths: the caches are as full as their capacity and their pages permit."""

    page: int | None = None  # keys per page; None for a contiguous cache
    blocks: int | None = None  # pages of the pool; None for as many as full sequences need
    appended: int | None = None  # rows of k per sequence; with packed queries any number means one per query
    slots: bool = False
    rotary: int = 0  # rotated dimensions
    rotary_interleaved: bool = True
    fp8: bool = False  # caches of float8_e4m3fn

    def __post_init__(self) -> None:
        wrong = []
        for name, least in (("page", 1), ("blocks", 1), ("appended", 0), ("rotary", 0)):
            size = getattr(self, name)
            optional = size is None and name != "rotary"
            if not optional and (type(size) is not int or not least <= size < 2**31):
                wrong.append(f"{name} of the cache must be a whole number of at least {least}, not {size!r}")
        for name in ("slots", "rotary_interleaved", "fp8"):
            if not isinstance(getattr(self, name), bool):
                wrong.append(f"{name} of the cache must be True or False, not {getattr(self, name)!r}")
        if not wrong and self.slots and self.appended is None:
            wrong.append("slots of the cache are for appended rows")
        if wrong:
            raise ValueError("; ".join(wrong))

    @classmethod
    def of(cls, record: Any) -> CacheTrial:
        """Make the CacheTrial of a JSON record; ValueError or TypeError for an invalid record."""
        check_fields("cache", cls, record)
        return cls(**record)

    @classmethod
    def of_cache(cls, cache: Cache, packed: bool) -> CacheTrial:
        """Make the CacheTrial of a call's Cache."""
        blocks = None if cache.page is None else cache.blocks
        appended = cache.appended if cache.appended is None or not packed else 1
        rotary, interleaved = cache.rotary or (0, True)
        return cls(cache.page, blocks, appended, cache.slots, rotary, interleaved, cache.dtype.name == FP8)

    def __str__(self) -> str:
        words = ["a contiguous cache" if self.page is None else f"a cache of pages of {self.page}"]
        words += [f"{FP8} keys"] if self.fp8 else []
        words += [] if self.appended is None else ["append by slots" if self.slots else "append"]
        words += [f"rotary of {self.rotary} dimensions"] if self.rotary else []
        return ", ".join(words)


class Call(NamedTuple):
    """The arrays of a call in its layout, the options of the public functions, and the gradients dout and dlse.

    On a KV cache, k and v are the caches, and the boundaries of packed queries are options. For values inside keys, v
    is None.
    """

    q: Array
    k: Array
    v: Array | None
    options: dict[str, object]
    dout: Array
    dlse: Array
    packed: Packed | None = None


@dataclass(frozen=True)
class Trial:
    """A call of attention and, with `backward`, of its gradients, on random arrays that are always the same."""

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
    mods: str = ""  # score_mod and mask_mod, as Mod.encoded; "" without
    captured: tuple[tuple[int, ...], ...] = ()  # shapes of the arrays that the mods read
    cache: CacheTrial | None = None  # for a call of attention_with_kv_cache
    shared_kv: bool = False  # values inside keys: v is None, and a value is the first head_dim_v numbers of its key

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
        names: object = self.options
        if isinstance(names, tuple):
            unknown = [name for name in names if name not in OPTIONS]
            if unknown:
                wrong.append(f"options {', '.join(map(repr, unknown))} are not of {', '.join(OPTIONS)}")
        else:
            wrong.append(f"options must be a list of names, not {names!r}")
        for name in ("packed", "backward", "shared_kv"):
            if not isinstance(getattr(self, name), bool):
                wrong.append(f"{name} must be True or False, not {getattr(self, name)!r}")
        requirements, plain = Requirements("a call"), Options()
        options = {name: getattr(self if name in STATED else plain, name) for name in TABLE.plain}
        options["window"] = self.window
        check_options(requirements, FEATURES, options, None, self.packed is True, np.float32)
        wrong += requirements.unmet
        wrong += self._wrong_mods() + self._wrong_cache() + self._wrong_values()
        if wrong:
            raise ValueError("; ".join(wrong))

    def _wrong_mods(self) -> list[str]:
        """Return the errors in the text of the mods and in the shapes of their arrays."""
        if self.mods == "" and self.captured == ():
            return []
        from ..mods.ir import checked  # imported by the first call that has a mod
        from ..mods.trace import decoded

        try:
            program = checked(self.mods.rpartition("\n")[0])
            decoded(self.mods, ())
        except ValueError as error:
            return [f"mods is {error}"]
        ranks, shapes = [element.rank for element in program.arrays], self.captured
        if [len(shape) for shape in shapes] != ranks or any(type(n) is not int for shape in shapes for n in shape):
            return [f"captured must be {len(ranks)} shapes of {ranks} dimensions, not {shapes!r}"]
        return []

    def _wrong_cache(self) -> list[str]:
        """Return an error for each given field that a call on a KV cache does not accept."""
        if self.cache is None:
            return []
        excluded = dict(backward=self.backward, mods=self.mods, deterministic=self.deterministic)
        return [f"{name} is not for calls on a KV cache" for name, value in excluded.items() if value]

    def _wrong_values(self) -> list[str]:
        """Return the errors in the fields of a call with values inside keys."""
        if self.shared_kv is not True:
            return []
        if self.head_dim_v is None:
            wrong = ["shared_kv needs head_dim_v, the numbers of a key that are its value"]
        elif type(self.head_dim) is type(self.head_dim_v) is int and self.head_dim_v > self.head_dim:
            wrong = [f"with shared_kv, head_dim_v {self.head_dim_v} must be at most head_dim {self.head_dim}"]
        else:
            wrong = []
        given = self.options if isinstance(self.options, tuple) else ()
        wrong += [
            f"{name} is not for shared_kv: values have that of keys" for name in FACTORS.values() if name in given
        ]
        return wrong

    @classmethod
    def of(cls, record: Any) -> Trial:
        """Make the Trial of a JSON record; ValueError or TypeError for an invalid record."""
        check_fields("a call", cls, record)
        pairs = {name: _as_tuples(value) for name, value in record.items()}
        if pairs.get("cache") is not None:
            pairs["cache"] = CacheTrial.of(pairs["cache"])
        if not isinstance(pairs.get("mods", ""), str):
            raise TypeError(f"mods must be a text, not {pairs['mods']!r}")
        shapes = pairs.get("captured", ())
        if not isinstance(shapes, tuple) or not all(isinstance(shape, tuple) for shape in shapes):
            raise TypeError(f"captured must be a list of shapes, not {shapes!r}")
        return cls(**pairs)

    @classmethod
    def of_call(cls, problem: Problem, operands: Operands) -> Trial:
        """Make the Trial of a call that has no `obstacle`."""
        mask = problem.mask
        corner = "top_left" if mask.top_left else "bottom_right"
        layout = problem.layout if problem.cache is None else problem.cache.layout
        layout = "bshd" if layout == "thd" else layout
        features = {feature.name: feature for feature in FEATURES}
        return cls(
            problem.dtype.name, problem.head_dim, problem.head_dim_v, problem.batch, problem.q_len, problem.kv_len,
            problem.heads, problem.kv_heads, layout,
            causal=corner if mask.edges and (mask.right == 0 or mask.top_left) else False,
            window=None if mask.left is None and mask.right in (None, 0) else (mask.left, mask.right),
            options=tuple(
                name
                for name in OPTIONS
                if is_given(problem, features[name]) and not (problem.shared_kv and name in FACTORS.values())
            ),
            packed=problem.layout == "thd", deterministic=problem.deterministic, backward=problem.backward,
            mods="\n".join((problem.mods, " ".join(map(repr, operands.numbers)))) if problem.mods else "",
            captured=tuple(x.shape for x in operands.captured),
            cache=None if problem.cache is None else CacheTrial.of_cache(problem.cache, problem.layout == "thd"),
            shared_kv=problem.shared_kv,
        )  # fmt: skip

    @property
    def record(self) -> dict[str, Json]:
        """The fields that differ from their defaults, as JSON."""
        default = asdict(Trial())
        return {name: value for name, value in asdict(self).items() if value != default[name]}

    def __str__(self) -> str:
        dim = str(self.head_dim) if self.head_dim_v in (None, self.head_dim) else f"{self.head_dim}/{self.head_dim_v}"
        words = [self.dtype, f"D {dim}", f"{self.batch} x {self.heads} heads", f"{self.q_len} x {self.kv_len}"]
        words += [] if self.causal is False else ["causal" if self.causal is True else f"causal {self.causal}"]
        words += [] if self.window is None else [f"window {self.window}"]
        words += [name for name in ("packed", "deterministic") if getattr(self, name)]
        words += ["values inside keys"] if self.shared_kv else []
        words += self.options
        if self.mods:
            from ..mods.ir import parse

            words.append(str(parse(self.mods.rpartition("\n")[0])))
        words += [] if self.cache is None else [str(self.cache)]
        return ", ".join(words)

    def call(self, seed: int = SEED) -> Call:
        """Return the call with random normal NumPy arrays."""
        rng = np.random.default_rng(seed)
        dtype = named_dtype(self.dtype)
        out_dtype = named_dtype("bfloat16") if self.dtype == FP8 else dtype
        real = np.float64 if self.dtype == "float64" else np.float32

        def normal(*shape: int) -> Array:
            return rng.standard_normal(shape, real)

        dim_v = self.head_dim_v or self.head_dim
        blocks, rows = self._blocks
        q = normal(self.batch, self.q_len, self.heads, self.head_dim)
        keys = [normal(blocks, rows, self.kv_heads, dim) for dim in self._dims]
        dout, dlse = normal(self.batch, self.q_len, self.heads, dim_v), normal(self.batch, self.q_len, self.heads)
        # With a cache, a mask covers the last keys (drafted tokens).
        sized = self if self.cache is None else replace(self, kv_len=min(self.q_len, self.kv_len))
        options: dict[str, object] = {name: sized.option(name, rng, out_dtype) for name in self.options}
        options |= {"causal": self.causal, "window": self.window}
        if self.mods:
            options["score_mod"] = self._mod(rng)
        if "dropout" in self.options:
            options["seed"] = SEED
        q_rows = falling(self.q_len, self.batch) if self.packed else np.full(self.batch, self.q_len)
        packed = None
        if self.cache is not None:
            options |= self._on_cache(self.cache, rng, normal, q_rows)
        if self.packed:  # sequences of decreasing lengths
            q, dout, dlse = (pack(x, q_rows) for x in (q, dout, dlse))
            dlse = np.ascontiguousarray(dlse.T)
            bounds = np.cumsum([0, *q_rows], dtype=np.int32)
            if self.cache is None:
                kv_rows = falling(self.kv_len, self.batch)
                keys = [pack(x, kv_rows) for x in keys]
                packed = Packed(bounds, np.cumsum([0, *kv_rows], dtype=np.int32), self.q_len, self.kv_len)
            else:
                options |= {"cu_seqlens_q": bounds, "max_seqlen_q": self.q_len}
        else:
            dlse = np.ascontiguousarray(dlse.swapaxes(1, 2))
            q, dout = (self._in_layout(x) for x in (q, dout))
        if self.cache is not None or not self.packed:
            options["layout"] = self.layout
            keys = [self._in_layout(x) for x in keys]
        if self.shared_kv:
            options["head_dim_v"] = self.head_dim_v
        kv_dtype = named_dtype(FP8) if self.cache is not None and self.cache.fp8 else dtype
        k, v = keys[0].astype(kv_dtype), None if self.shared_kv else keys[1].astype(kv_dtype)
        return Call(q.astype(dtype), k, v, options, dout.astype(out_dtype), dlse, packed)

    @property
    def _dims(self) -> tuple[int, ...]:
        """The head dimensions of k and, unless values are inside keys, of v."""
        return (self.head_dim,) if self.shared_kv else (self.head_dim, self.head_dim_v or self.head_dim)

    @property
    def _blocks(self) -> tuple[int, int]:
        """The number of blocks of keys, and the keys per block; a block is a sequence, or a page."""
        if self.cache is None or self.cache.page is None:
            return self.batch, self.kv_len
        return self.cache.blocks or self.batch * -(-self.kv_len // self.cache.page), self.cache.page

    def _in_layout(self, x: Array) -> Array:
        """Return an array (B, S, H, D) in the layout."""
        return np.ascontiguousarray(x.swapaxes(1, 2)) if self.layout == "bhsd" else x

    def _on_cache(
        self, cache: CacheTrial, rng: np.random.Generator, normal: Callable[..., Array], q_rows: Array
    ) -> dict[str, object]:
        """Return the options of a call on a KV cache that is as full as possible."""
        blocks, page = self._blocks
        columns = -(-self.kv_len // page)
        lengths = np.full(self.batch, min(columns * page, blocks * page // self.batch))
        # The order of pages does not matter; with a small pool, sequences share pages.
        table = rng.permutation(blocks)[np.arange(self.batch * columns) % blocks].reshape(self.batch, columns)
        options: dict[str, object] = {"causal": bool(self.causal)}
        if cache.page is not None:
            options["block_table"] = table.astype(np.int32)
        if cache.appended is not None:
            appended = q_rows if self.packed else np.full(self.batch, cache.appended)
            for name, dim in zip("kv", self._dims, strict=False):
                x = normal(self.batch, int(appended.max()), self.kv_heads, dim).astype(named_dtype(self.dtype))
                options[name] = pack(x, appended) if self.packed else self._in_layout(x)
            if cache.slots:
                places = [np.arange(end - count, end) for end, count in zip(lengths, appended, strict=True)]
                slots = [table[b, j // page] * page + j % page for b, j in enumerate(places)]
                options["slots"] = np.concatenate(slots).astype(np.int64)
            else:
                lengths = lengths - appended
        options["cache_seqlens"] = lengths.astype(np.int32)
        if cache.rotary:
            angles = np.arange(columns * page)[:, None] * np.logspace(0, -4, cache.rotary // 2, dtype=np.float32)
            options |= dict(rotary_cos=np.cos(angles).astype(np.float32), rotary_sin=np.sin(angles).astype(np.float32))
            options["rotary_interleaved"] = cache.rotary_interleaved
        return options

    def option(self, name: str, rng: np.random.Generator, dtype: np.dtype) -> Array | float:
        """Return a value for a member of OPTIONS; `dtype` is used for floating arrays that may have any dtype."""
        feature = next(feature for feature in FEATURES if feature.name == name)
        if feature.kind == NUMBER:
            return feature.example
        sizes = {"b": self.batch, "h": self.heads, "g": self.kv_heads, "i": self.q_len, "j": self.kv_len}
        shape = [sizes[axis] for axis in feature.axes[0]]
        if feature.dtypes == ("bool",):
            return rng.random(shape) < 0.8
        if feature.longest:
            longest = self.q_len if feature.longest == "q_len" else self.kv_len
            return rng.integers(longest // 2, longest, shape, dtype=np.int32, endpoint=True)
        if feature.dtypes == FLOATING:
            return rng.standard_normal(shape, np.float32).astype(dtype)
        return rng.uniform(0.25, 1.0, shape).astype(np.float32)  # slopes and descales

    def _mod(self, rng: np.random.Generator) -> Mod:
        """Return the Mod of the call; floating arrays are normal, integer arrays (indices or flags) small."""
        from ..mods.ir import parse
        from ..mods.trace import decoded

        arrays = [
            rng.standard_normal(shape, np.float32).astype(named_dtype(element.dtype))
            if "float" in element.dtype
            else rng.integers(0, 2, shape).astype(element.dtype)
            for element, shape in zip(parse(self.mods.rpartition("\n")[0]).arrays, self.captured, strict=True)
        ]
        return decoded(self.mods, arrays)


def falling(length: int, batch: int) -> Array:
    """Return the lengths of the sequences of a packed batch, decreasing from `length` to about half of it."""
    lengths: Array = np.maximum(length - np.arange(batch) * (length // (2 * batch)), 1)
    return lengths


def pack(x: Array, lengths: Array) -> Array:
    """Pack padded (B, S, ...) into (T, ...)."""
    return np.concatenate([row[:length] for row, length in zip(x, lengths, strict=True)])


def _as_tuples(value: Any) -> Any:
    """Return a JSON value with tuples instead of lists."""
    return tuple(map(_as_tuples, value)) if isinstance(value, list) else value


NOT_RECORDED = [x for x in CACHE_FEATURES if x.field in {*Cache._fields} - {*dir(CacheTrial), *dir(Trial)}]


def obstacle(problem: Problem) -> str:
    """Return the reason why a call has no Trial; "" if it has one."""
    if problem.derivative:
        return f"tune measures no {problem.derivative}"
    if problem.shard:
        return "it is a shard of a larger call"
    if 0 in (problem.batch, problem.q_len, problem.kv_len):
        return "an array is empty"
    if problem.cache is not None and problem.cache.split_size is not None:
        return "with split_size its tile does not depend on measurements"
    if problem.cache is not None and any(is_given(problem.cache, feature) for feature in NOT_RECORDED):
        return "the record of a call lacks an option of its cache"
    if problem.selected is not None:
        return "its time depends on the selected keys, which are not recorded"
    if problem.statistics:
        return f"the record of a call lacks {' and '.join(problem.statistics)} of rows"
    if problem.backward and problem.bias is not None and not problem.bias_gradient:
        return "a call that is made again computes the gradient of its bias, and this one does not"
    return _obstacle_of_mods(problem) if problem.mods else ""


def _obstacle_of_mods(problem: Problem) -> str:
    """Return the reason in its mods why a call has no Trial; "" if they have none."""
    from ..mods.derive import floating_reads
    from ..mods.ir import order, parse

    program = parse(problem.mods)
    if program.mask is not None and any(node.op == "load" for node in order((program.mask,))):
        return "its mask_mod reads arrays, on whose contents, which are not recorded, its time depends"
    computed = {slot for slot, asked in enumerate(problem.captured_gradient) if asked}
    if problem.backward and computed != floating_reads(program):
        return "a call that is made again computes the gradients of all captured arrays, and this one does not"
    return ""


def recorded_line(problem: Problem, operands: Operands) -> dict[str, Json]:
    """Return the JSON of a call: the record of its Trial, or its description and the reason why it has none."""
    reason = obstacle(problem)
    if not reason:
        try:
            trial = Trial.of_call(problem, operands)
            return trial.record | {"backward": trial.backward}
        except ValueError as error:  # an option that a Trial lacks must not fail the caller's run
            reason = str(error)
    return {NOT_REPLAYED: reason, DESCRIPTION: str(problem)}


def append_line(record: Mapping[str, Json], file: str) -> None:
    """Append a line of JSON in one write, so that processes that record to one file do not mix lines."""
    import json

    # The file may be a FIFO: with O_NONBLOCK, open fails instead of blocking until a process reads it.
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | getattr(os, "O_NONBLOCK", 0)
    descriptor = os.open(file, flags, 0o644)
    try:
        os.write(descriptor, (json.dumps(record) + "\n").encode())
    finally:
        os.close(descriptor)
