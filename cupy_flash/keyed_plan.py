"""Keyed plans: a call like an earlier one only allocates results, writes addresses into kept bytes, and launches.

The invariant: **the launches of two calls with one key differ in addresses alone**, and in cache_seqlens if that is a
number. A call is posed, planned and packed (problem/, plan/, gpu/run_plan.py) if it has no key, or its key no entry; if
it succeeds, it then leaves an entry. So an entry decides nothing: it repeats what that path would do again.

The key has everything that this path reads, unless the call has no key because of it:

- of every array its presence, shape, strides, dtype, device and address modulo ALIGNMENT: 16 bytes decide about TMA,
  and 64 about vectors of float64. All arrays are of exactly their library's own type.
- of every option its type and its value, because True, 1 and 1.0 are equal and not all legal; max_seqlen likewise.
- of mods their text and the values of the numbers that they captured. Functions are traced, or an earlier trace's
  conditions tested, before there is a key, so a changed closure is another key.
- the environment's default backend, and the generation of the evidence and of the plans made from it.

The types of all arguments come first: they tell which arguments are arrays (`_Form`), and a call whose types nobody
expects has no key. A call has none with statistics, dropout, a seed, or options of other types, which may be mutable,
either; on torch tensors
also if anything of torch observes it (adapters/torch/keyed_plan.py); on NumPy arrays before torch is imported. Calls
that copy an operand, those that read lengths, tables or factors in host memory to check them, those of a process that
records its calls, and on the CPU all but plain forwards of torch's operators (cpu/aten.py) and of few queries
(cpu/decode), are posed every time; the entry of their key is None. On the CPU an entry tests the state of torch and the
contents of results, or the properties of the device and the lengths and pages of a cache, at every call.

Two facts of a call on a KV cache are no part of its key, and an entry leaves calls to posing by them: where the arrays
lie to which it writes, because they must not overlap others, and the number cache_seqlens, which grows at every step.

Other inputs may alias each other, as nothing depends on it; outputs are new memory. The stream is read at the launch.
Entries refer to no array. A forked process begins without entries, since its parent's kernels are loaded in a context
that it does not have. Look-ups and insertions are single operations of a dict, which are atomic; threads that insert
under one key insert equal entries.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Hashable, Sequence
from functools import lru_cache
from operator import attrgetter, itemgetter
from types import NoneType
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from . import dispatch, environment
from .arrays import CACHED, AnyArray, Array, ArrayT
from .plan import measurements
from .problem.build import LENGTH, PLAIN, TABLE, of_cache, pose, pose_append, pose_with_cache, traced_mod
from .problem.checks import Requirements
from .problem.features import MOD, SEED, STATISTICS
from .problem.records import SCALES, Options
from .problem.shared_kv import views_of
from .problem.statistics import selected

if TYPE_CHECKING:
    from .gpu.kept_launches import Allocate, KeptLaunches, Outputs
    from .gpu.run_plan import Work
    from .mods.trace import Mod
    from .plan.plan import Plan
    from .problem.build import Table
    from .problem.records import CacheOptions, Operands, Packed, Problem

    # k, v, k_cache, v_cache and cu_seqlens
    Appended: TypeAlias = tuple[AnyArray, AnyArray | None, AnyArray, AnyArray | None, AnyArray | None]

ALIGNMENT = 64  # that of gpu/params.py, which calls on a CPU do not import
NUMPY_ALIGNMENT = 16  # that of NumPy's arrays, on which calls on a CPU depend
# {array to which a call on a KV cache may write, or beside which it may: its name in a Work}
MEMBERS = {"q": "q", "k_cache": "k", "v_cache": "v", "k": "k_new", "v": "v_new", "out": "out"}
MEMBERS |= {name: name for name in SCALES}
CHECKED = ("q_lengths", "kv_lengths", "q_descale", "k_descale", "v_descale", "cu_seqlens_q", "cu_seqlens_k")

Call: TypeAlias = tuple[Hashable, Sequence[AnyArray], list[int]]  # key, arrays, their addresses and a cache_seqlens
Repeat: TypeAlias = Callable[["KeptLaunches", Sequence[AnyArray], list[int]], "list[AnyArray] | None"]
Inputs: TypeAlias = tuple[AnyArray, AnyArray, AnyArray | None]  # q, and k and v or their caches
# (index, index of another array, low, high): they overlap if low < address of the other - address of the first < high
Distances: TypeAlias = tuple[tuple[int, int, int, int], ...]


class Library:
    """The arrays of a library that a key may have, by their exact types.

    `read` returns what the key has of arrays, and their addresses; None if one has no memory of its own.
    """

    __slots__ = ("read", "types")

    def __init__(
        self, types: frozenset[type], read: Callable[[Sequence[Any]], tuple[list[Hashable], list[int]] | None]
    ) -> None:
        self.types, self.read = types, read


class Entry:
    """The launches that all calls with one key share. `served` counts the calls; with several threads it may miss some.

    `others`, `mods`, `places` and `backwards` are those of torch's autograd: the operator's arguments that are not
    tensors, the text of its mods, the indices among its tensors of the arrays of a call, for a backward of its outputs,
    and the entries of backwards by their keys.
    """

    __slots__ = (
        "_distances", "_kept", "_longest", "_repeat", "backwards", "layout", "mods", "others", "places", "served",
    )  # fmt: skip

    def __init__(self, chosen: Plan, kept: KeptLaunches, distances: Distances = (), longest: int | None = None) -> None:
        self._repeat: Repeat = dispatch.repeater(chosen).repeat
        self._kept, self._distances, self._longest = kept, distances, longest
        self.layout = chosen.problem.layout
        self.served = 0
        self.others: tuple[object, ...] | None = None
        self.mods = ""
        self.places: tuple[int, ...] = ()
        self.backwards: dict[Hashable, Entry | None] = {}

    @property
    def outputs(self) -> tuple[str, ...]:
        """The names of what `run` returns."""
        return self._kept.outputs

    def run(self, call: Call) -> list[AnyArray] | None:
        """Launch, and return the outputs that the caller has not given, followed by the workspaces.

        Nothing is launched if arrays that must not overlap may do so, if cache_seqlens is a number for which there is
        no room, or if an output is not aligned to ALIGNMENT, as those of every known allocator are: None.
        """
        _, arrays, addresses = call
        for first, second, low, high in self._distances:
            if low < addresses[second] - addresses[first] < high:
                return None
        if self._longest is not None and not 0 <= addresses[-1] <= self._longest:
            return None
        outputs = self._repeat(self._kept, arrays, addresses)
        self.served += outputs is not None
        return outputs


_entries: dict[Hashable, Entry | None] = {}


def forget() -> None:
    """Drop all entries."""
    _entries.clear()
    _forms.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=forget)


class _Form:
    """The signature of calls by the types of their arguments: which are arrays, and which enter the key by value.

    A call without a form has no key. So an argument of an unexpected type, which may do anything if it is compared,
    hashed or tested for truth, is only asked for its type.
    """

    __slots__ = ("arrays", "dropout", "has_mods", "length", "reads_lists", "values")

    def __init__(
        self,
        arrays: list[int],
        values: list[int],
        dropout: int | None,
        reads_lists: int,
        length: int | None,
        has_mods: bool,
    ) -> None:
        self.arrays, self.values = itemgetter(*arrays), itemgetter(*values)
        self.dropout, self.reads_lists, self.length, self.has_mods = dropout, reads_lists, length, has_mods


_forms: dict[tuple[type | bool, ...], _Form] = {}
OPTIONS = 4  # the place of the first option among the arguments, behind the Options, q, k and v


def _order_of(table: Table) -> tuple[str, ...]:
    """Return the names of all options of a class, beginning with those that may be arrays."""
    return *table.names, *(feature.name for feature in table.features if feature.name not in table.names)


@lru_cache(maxsize=2)
def _values_of(table: Table) -> Callable[[object], tuple[Any, ...]]:
    return attrgetter(*_order_of(table))


def call_of(arrays: Inputs, options: Options | CacheOptions, packed: Packed | None, library: Library) -> Call | None:
    """Return the call if it has a key, else None. Functions among the options become the Mod that is traced of them."""
    table = TABLE if type(options) is Options else of_cache()
    given: tuple[Any, ...] = (options, *arrays, *_values_of(table)(options))
    window: Any = options.window
    if type(window) is tuple:
        if len(window) != 2:
            return None
        given += window
    if packed is not None:
        given += packed
    types = tuple(map(type, given))
    try:
        form = _forms.get(types)
    except TypeError:  # a class that is not hashable
        return None
    if form is None:
        form = _form_of(types, table, packed is not None, library.types)
        if form is None:
            return None
    if (form.dropout is not None and given[form.dropout]) or given[form.reads_lists]:
        return None
    inputs, encoded = form.arrays(given), ""
    if form.has_mods:
        mod = _traced(options)
        if mod is None or not library.types.issuperset(map(type, mod.arrays)):
            return None
        inputs, encoded = inputs + mod.arrays, mod.encoded
    described = library.read(inputs)
    if described is None:
        return None
    facts, addresses = described
    if form.length is not None:
        addresses.append(given[form.length])
    of_process = environment.backend() if options.backend is None else "", measurements.generation
    return (form, *form.values(given), encoded, *of_process, *facts), inputs, addresses


def _form_of(types: tuple[type, ...], table: Table, is_packed: bool, readable: frozenset[type]) -> _Form | None:
    """Return the form of calls with arguments of these types, and keep it; None if they have no key."""
    place = {name: OPTIONS + n for n, name in enumerate(_order_of(table))}
    rest = range(OPTIONS + len(place), len(types))  # the sides of a window, then boundaries and max_seqlen
    arrays = [1, 2, 3, *(place[name] for name in table.names)]
    if types[3] is NoneType:  # values inside keys are at the addresses of the keys
        arrays[2] = arrays[1]
        for of, view in views_of(table.names):
            arrays[3 + view] = arrays[3 + of]
    values = [*(place[name] for name in (*table.plain, "window")), *rest]
    if is_packed:
        arrays += rest[-4:-2]
        del values[-4:-2]
    dropout, length = place.get("dropout"), place.get(LENGTH)
    if length is not None:
        if types[length] is int:
            arrays.remove(length)
        else:
            length = None
    arrays = [n for n in arrays if n < 3 or types[n] is not NoneType]
    of_values = [types[n] for n in values if n != place["window"] or types[n] is not tuple]
    absent = [types[place[feature.name]] for feature in table.features if feature.kind in (SEED, STATISTICS)]
    if (
        not readable.issuperset([types[n] for n in arrays])
        or not PLAIN.issuperset(of_values)
        or not {NoneType}.issuperset(absent)
        or (dropout is not None and types[dropout] is not float)
    ):
        return None
    mods = [place[feature.name] for feature in table.features if feature.kind == MOD]
    has_mods = any(types[n] is not NoneType for n in mods)
    # Functions and a Mod of the same text are the same mods.
    without = tuple([has_mods if n in mods else x for n, x in enumerate(types)])
    if len(_forms) >= CACHED:
        _forms.clear()
    form = _forms.setdefault(without, _Form(arrays, values, dropout, place["check_selected"], length, has_mods))
    return _forms.setdefault(types, form)


def _traced(options: Options | CacheOptions) -> Mod | None:
    """Return the Mod of a call, which replaces its functions; None if they cannot be traced, which `pose` refuses."""
    mod = traced_mod(Requirements("a keyed plan"), options)
    if mod is not None:
        options.score_mod, options.mask_mod = mod, None
    return mod


def facts_of_process(backend: str | None) -> tuple[str | None, int]:
    """Return what the key of a call with the option `backend` has of the process rather than of the call."""
    return environment.backend() if backend is None else "", measurements.generation


def is_known(call: Call) -> bool:
    """Return whether the key of a call has an entry, or None in place of one."""
    return call[0] in _entries


def entry_of(call: Call) -> Entry | None:
    """Return the entry of a call's key."""
    return _entries.get(call[0])


def run(call: Call | None) -> list[AnyArray] | None:
    """Run a call from its entry, and return its outputs, followed by workspaces; None if it has none."""
    entry = None if call is None else _entries.get(call[0])
    return None if entry is None or call is None else entry.run(call)


def keep(
    call: Call,
    problem: Problem,
    operands: Operands,
    allocator: Callable[[Outputs], Allocate],
    unwanted: tuple[str, ...] = (),
    *,
    appends: bool = False,
) -> None:
    """Leave the entry of a call that has been posed, if there is none; calls from it return no `unwanted` results.

    With `appends` the call only appends to a KV cache.
    """
    if call[0] in _entries:
        return
    entry = _entry(problem, operands, allocator, unwanted, appends)
    if len(_entries) >= CACHED:
        _entries.clear()
    _entries[call[0]] = entry


def share(call: Call, other: Call) -> None:
    """Leave the entry of another call, or None in place of one, under the key of a call that it serves as well."""
    if is_known(other):
        entry = entry_of(other)
        if len(_entries) >= CACHED:
            _entries.clear()
        _entries[call[0]] = entry


def backward_entry(problem: Problem, operands: Operands, allocator: Callable[[Outputs], Allocate]) -> Entry | None:
    """Return the entry of a backward, or None if a later one may need more than launches."""
    return _entry(problem, operands, allocator)


def _entry(
    problem: Problem,
    operands: Operands,
    allocator: Callable[[Outputs], Allocate],
    unwanted: tuple[str, ...] = (),
    appends: bool = False,
) -> Entry | None:
    """Return the entry of calls that are posed like this one, or None if they may need more than launches."""
    chosen, cache = dispatch.plan_for(problem), operands.cache
    if dispatch.is_recording():
        return None
    longest = None if cache is None else of_cache().longest_length(problem, operands)
    if chosen.device.backend not in dispatch.LAUNCHERS:
        on_cpu = dispatch.repeated_on_cpu(chosen, operands)
        return None if on_cpu is None else Entry(chosen, on_cpu, longest=longest)
    checked = [getattr(operands, name) for name in CHECKED]
    if cache is not None:
        checked += of_cache().indices_of(cache)
    if any(isinstance(x, Array) and x.device == "cpu" for x in checked):
        return None
    from .gpu import run_plan
    from .gpu.kept_launches import KeptLaunches, without_memory

    if run_plan.copied(chosen, operands):
        return None
    works: list[Work] = []
    if problem.backward:
        run_plan.backward(chosen, operands, works.append, without_memory)
    elif appends:
        run_plan.append(chosen, operands, works.append)
    else:
        run_plan.forward(chosen, operands, works.append, without_memory)
    work = works[0]._replace(workspaces=(*works[0].workspaces, *unwanted))
    kept = KeptLaunches(work, allocator, has_length=longest is not None)
    return Entry(chosen, kept, _distances(problem, operands, kept.inputs), longest)


def _distances(problem: Problem, operands: Operands, names: tuple[str, ...]) -> Distances:
    """Return the distances at which arrays overlap that must not; `names` are those of a call's arrays in order."""
    if operands.cache is None:
        return ()
    arrays = operands.arrays() | {"out": operands.cache.out}
    call = {name: x for name, member in MEMBERS.items() if (x := arrays.get(member)) is not None}
    if problem.shared_kv:
        call = {name: x for name, x in call.items() if name not in ("v_cache", "v_scale", "v_zero")}
    place = {name: names.index(MEMBERS[name]) for name in call}
    return tuple([(place[name], place[other], low, high) for name, other, low, high in of_cache().distances(call)])


def forward(
    function: str, arrays: tuple[ArrayT, ArrayT, ArrayT | None], options: Options, packed: Packed | None
) -> tuple[ArrayT, ...]:
    """Return (out, lse) of a call on arrays other than torch's, followed by the statistics that it asks for."""
    call_on = call_on_numpy if type(arrays[0]) is np.ndarray else call_on_cupy
    call = call_on(arrays, options, packed)
    outputs: Any = run(call)
    if outputs is not None:
        return outputs[0], outputs[1]
    problem, operands = pose(function, arrays, options, packed)
    results = dispatch.forward(problem, operands)
    if call is not None:
        keep(call, problem, operands, _cupy_allocator)
    return tuple([array.result() for array in results])


def attend(arrays: Inputs, options: CacheOptions) -> Any:
    """Return the result of a call on a KV cache with arrays other than torch's."""
    call = call_on_cupy(arrays, options)
    outputs = run(call)
    if outputs is not None:
        return result_on_cache(outputs, options)
    problem, operands = pose_with_cache(*arrays, options)
    results = dispatch.forward(problem, operands)
    if call is not None:
        keep(call, problem, operands, _cupy_allocator, unwanted(options))
    return selected([array.result() for array in results], options)


def append(arrays: Appended, options: CacheOptions) -> None:
    """Append to a KV cache rows of arrays other than torch's."""
    call = append_on(arrays, options, call_on_cupy)
    if run(call) is None:
        problem, operands = pose_append(*arrays, options)
        dispatch.append(problem, operands)
        if call is not None:
            keep(call, problem, operands, _cupy_allocator, appends=True)


def append_on(
    arrays: Appended, options: CacheOptions, call_on: Callable[[Inputs, CacheOptions], Call | None]
) -> Call | None:
    """Return a call of `append_to_kv_cache` if it has a key, which is that of a call whose queries are k, and a word.

    Its launches have an array of queries without elements, at address 0.
    """
    k, v, k_cache, v_cache, cu_seqlens = arrays
    options.k, options.v, options.cu_seqlens_q = k, v, cu_seqlens
    call = call_on((k, k_cache, v_cache), options)
    options.k = options.v = options.cu_seqlens_q = None  # as `pose_append` expects them
    return None if call is None else (("append", call[0]), call[1], [0, *call[2][1:]])


def unwanted(options: CacheOptions) -> tuple[str, ...]:
    """Return the results that a call on a KV cache does not return."""
    return () if options.return_lse else ("lse",)


def result_on_cache(outputs: list[AnyArray], options: CacheOptions) -> Any:
    """Return the result of a call on a KV cache that was run from its entry."""
    allocated = options.out is None
    out = outputs[0] if allocated else options.out
    return (out, outputs[allocated]) if options.return_lse else out


def call_on_cupy(arrays: Inputs, options: Options | CacheOptions, packed: Packed | None = None) -> Call | None:
    """Return the call if it is on CuPy's arrays and has a key, else None."""
    cupy = sys.modules.get("cupy")
    if cupy is None or type(arrays[0]) is not cupy.ndarray:
        return None
    return call_of(arrays, options, packed, _cupy())


def call_on_numpy(arrays: Inputs, options: Options, packed: Packed | None = None) -> Call | None:
    """Return the call on NumPy's arrays if it is on the CPU, torch is imported and it has a key, else None."""
    backend = environment.backend() if options.backend is None else options.backend
    # A backend of a wrong type, which may be an array, has no key: the full pose refuses it.
    on_cpu = backend is None or (isinstance(backend, str) and backend == "cpu")
    return call_of(arrays, options, packed, NUMPY) if on_cpu and "torch" in sys.modules else None


def _read_numpy(arrays: Sequence[Any]) -> tuple[list[Hashable], list[int]]:
    facts: list[Hashable] = []
    addresses: list[int] = []
    for x in arrays:
        address = x.__array_interface__["data"][0]
        facts += x.shape, x.strides, x.dtype, address % NUMPY_ALIGNMENT
        addresses.append(address)
    return facts, addresses


def _read_cupy(arrays: Sequence[Any]) -> tuple[list[Hashable], list[int]] | None:
    facts: list[Hashable] = []
    addresses: list[int] = []
    for x in arrays:
        address = x.data.ptr
        if not address:
            return None
        facts += x.shape, x.strides, x.dtype, x.data.device_id, address % ALIGNMENT
        addresses.append(address)
    return facts, addresses


NUMPY = Library(frozenset((np.ndarray,)), _read_numpy)


@lru_cache(maxsize=1)
def _cupy() -> Library:
    return Library(frozenset((sys.modules["cupy"].ndarray,)), _read_cupy)


def _cupy_allocator(outputs: Outputs) -> Allocate:
    empty = sys.modules["cupy"].empty

    def allocate(like: AnyArray) -> tuple[list[AnyArray], list[int]] | None:
        arrays = [empty(shape, dtype) for shape, _, dtype in outputs]
        addresses = [x.data.ptr for x in arrays]
        misaligned = [address for address in addresses if address % ALIGNMENT]
        return None if misaligned else (arrays, addresses)

    return allocate


def described(call: Call | None) -> str:
    """Return the line of `explain` about the entry of a call."""
    if call is None:
        return "host       posed at every call, which has no key of a kept plan"
    if not is_known(call):
        return "host       posed at the next call, which keeps its plan"
    entry = entry_of(call)
    if entry is None:
        return "host       posed at every call, which needs more than its launches"
    return f"host       served from a kept plan, {entry.served} call{'s' * (entry.served != 1)} so far"
