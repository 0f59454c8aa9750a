"""Keyed plans: a call like an earlier one only allocates results, writes addresses into kept bytes, and launches.

The invariant: **two calls with one key have launches whose arguments differ in addresses alone.** A call is posed,
planned and packed (problem/, plan/, gpu/run_plan.py) if it has no key, or if its key has no entry yet; if it succeeds,
it then leaves an entry. So an entry never decides anything: it repeats what that path would do again.

The key has everything that this path reads, unless the call has no key because of it:

- of every array its presence, shape, strides, dtype, device and address modulo ALIGNMENT, of which 16 bytes decide about
  TMA and vectors, and 64 about vectors of float64. All arrays are of exactly the library's own type.
- of every option its type and its value, because True, 1 and 1.0 are equal and not all legal; max_seqlen likewise.
- the function, the environment's default backend, and the generation of the evidence and of the plans made from it.
- `state`, what the array library adds: for torch, see adapters/torch/keyed_plan.py.

These calls have no key: those with mods, dropout or a seed; with options of other types, which may be mutable; calls
that are recorded (CUPY_FLASH_RECORD). These leave no entry, and so are posed every time: calls on the CPU backend, calls
that read lengths or factors in host memory to check them, and calls that copy an operand. Errors leave none either.

Inputs may alias each other, as nothing depends on it; outputs are new memory. The stream is read when it is launched on.
Entries refer to no arrays. A forked process begins without entries, since its parent's kernels are loaded in a context
that it does not have. Look-ups and insertions are single operations of a dict, which are atomic, and threads that keep
the same key keep equal entries.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from . import dispatch, environment
from .arrays import CACHED, contiguous_strides
from .plan import measurements
from .problem.build import ARRAY_NAMES, PLAIN, TABLE, pose

if TYPE_CHECKING:
    from collections.abc import Hashable

    import numpy as np

    from .gpu.kept_launches import KeptLaunches
    from .problem.features import Options
    from .problem.records import Operands, Packed, Problem

ALIGNMENT = 64  # that of gpu/params.py, which calls on a CPU do not import
CHECKED = ("q_lengths", "kv_lengths", "q_descale", "k_descale", "v_descale", "cu_seqlens_q", "cu_seqlens_k")
NAMES = ("q", "k", "v", *ARRAY_NAMES, "cu_seqlens_q", "cu_seqlens_k")


class Library(Protocol):
    """How the arrays of one library are read and allocated."""

    def facts(self, arrays: Sequence[Any]) -> tuple[list[Hashable], list[int]] | None:
        """Return what the key has of arrays, some of which may be None, and the addresses of those that are not.

        None if one is not exactly of the library's type, or has no memory of its own.
        """

    def dtype(self, dtype: np.dtype) -> Any:
        """Return the library's dtype."""

    def empty(self, outputs: Sequence[Output], like: Any) -> tuple[list[Any], list[int]]:
        """Allocate outputs on the device of an array; return them and their addresses."""


class OfCuPy:
    """CuPy's arrays."""

    def facts(self, arrays: Sequence[Any]) -> tuple[list[Hashable], list[int]] | None:
        ndarray, facts, addresses = sys.modules["cupy"].ndarray, [], []
        for x in arrays:
            if x is None:
                facts.append(None)
                continue
            if type(x) is not ndarray or not (address := x.data.ptr):
                return None
            facts += (x.shape, x.strides, x.dtype, x.data.device_id, address % ALIGNMENT)
            addresses.append(address)
        return facts, addresses

    def dtype(self, dtype: np.dtype) -> np.dtype:
        return dtype

    def empty(self, outputs: Sequence[Output], like: Any) -> tuple[list[Any], list[int]]:
        empty = sys.modules["cupy"].empty
        allocated = [empty(shape, dtype) for shape, _, dtype in outputs]
        return allocated, [x.data.ptr for x in allocated]


class Output(NamedTuple):
    """A result or workspace of a call."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]  # C-contiguous, in elements
    dtype: Any  # the library's


class Entry:
    """The launches and outputs of the calls with one key; `served` counts them, in one thread exactly."""

    __slots__ = ("_backend", "_kept", "_library", "_outputs", "served")

    def __init__(self, library: Library, backend: str, kept: KeptLaunches, outputs: Sequence[Output]) -> None:
        self._library, self._backend, self._kept, self._outputs = library, backend, kept, outputs
        self.served = 0

    def run(self, inputs: list[Any], addresses: list[int]) -> Sequence[Any] | None:
        """Launch on these inputs, and return the outputs, those of the call first.

        None, without a launch, if an allocator returns memory that is not aligned as every known one's.
        """
        self.served += 1
        library, outputs = self._library, self._outputs

        def allocate() -> tuple[list[Any], list[int]] | None:
            allocated = library.empty(outputs, inputs[0])
            return None if any([address % ALIGNMENT for address in allocated[1]]) else allocated

        return dispatch.launcher(self._backend).repeat(self._kept, inputs, addresses, allocate)


class Call(NamedTuple):
    """A call that has a key."""

    library: Library
    key: Hashable
    inputs: list[Any]  # the arrays that are given, in the order of NAMES
    addresses: list[int]

    def entry(self) -> Entry | None:
        """Return the entry of the key."""
        return _entries.get(self.key)

    def run(self) -> Sequence[Any] | None:
        """Run the call from its entry and return (out, lse, *workspaces); None if there is no entry."""
        entry = _entries.get(self.key)
        return None if entry is None else entry.run(self.inputs, self.addresses)

    def keep(self, problem: Problem, operands: Operands) -> None:
        """Leave an entry, from what the call was posed as, if later calls with this key may be served from one."""
        entry = _forward(self.library, problem, operands)
        if entry is not None:
            if len(_entries) >= CACHED:
                _entries.clear()
            _entries[self.key] = entry


_entries: dict[Hashable, Entry] = {}


def forget() -> None:
    """Drop all entries."""
    _entries.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=forget)


def call_of(
    library: Library, function: str, arrays: tuple[Any, Any, Any], options: Options, packed: Packed | None,
    state: Hashable = None,
) -> Call | None:  # fmt: skip
    """Return the call if it has a key, else None; it is right for no function to return None always."""
    window = options.window
    if (
        options.score_mod is not None
        or options.mask_mod is not None
        or options.seed is not None
        or dispatch.is_recording()
    ):
        return None
    plain, sides = TABLE.plain_of(options), window if type(window) is tuple else (window,)
    given = [*arrays, *TABLE.arrays_of(options)]
    longest: tuple[Any, ...] = ()
    if packed is not None:
        given += packed[:2]
        longest = packed[2:]
    types = tuple(map(type, (*plain, *sides, *longest)))
    if not PLAIN.issuperset(types):
        return None
    read = library.facts(given)
    if read is None:
        return None
    facts, addresses = read
    backend = environment.backend() if options.backend is None else None
    key = (function, types, plain, window, longest, backend, measurements.generation, state, *facts)
    return Call(library, key, [x for x in given if x is not None], addresses)


_CUPY = OfCuPy()


def forward(function: str, arrays: tuple[Any, Any, Any], options: Options, packed: Packed | None) -> Any:
    """Return (out, lse) of a call on arrays other than torch's, as arrays of the caller's library."""
    call = None
    if "cupy" in sys.modules and type(arrays[0]) is sys.modules["cupy"].ndarray:
        call = call_of(_CUPY, function, arrays, options, packed)
        results = None if call is None else call.run()
        if results is not None:
            return results[:2]
    problem, operands = pose(function, arrays, options, packed)
    out, lse = dispatch.forward(problem, operands)
    if call is not None:
        call.keep(problem, operands)
    return out.result(), lse.result()


def _forward(library: Library, problem: Problem, operands: Operands) -> Entry | None:
    """Return the entry of a forward, or None if a later one might need more than launches."""
    chosen = dispatch.plan_for(problem)
    backend = chosen.device.backend
    checked = [getattr(operands, name) for name in CHECKED]
    if (
        backend not in dispatch.LAUNCHERS
        or problem.mods
        or problem.dropout
        or any(x is not None and x.device == "cpu" for x in checked)
    ):
        return None
    from .gpu import run_plan
    from .gpu.kept_launches import KeptLaunches, without_memory

    if run_plan.copied(chosen, operands):
        return None
    works: list[run_plan.Work] = []
    run_plan.forward(chosen, operands, works.append, without_memory)
    return _entry(library, backend, KeptLaunches(works[0]), works[0])


def _entry(library: Library, backend: str, kept: KeptLaunches, work: Any) -> Entry:
    outputs = [
        Output(x.shape, contiguous_strides(x.shape), library.dtype(x.dtype)) for x in work.results.values() if x is not None
    ]
    return Entry(library, backend, kept, outputs)
