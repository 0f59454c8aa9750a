"""Exact attention by torch's flash operators for CPUs, with the semantics of `attention`.

The operators differ from `attention` where

- NaN or an infinity that no query sees reaches every row, because 0 * NaN is NaN in a matrix product. A result that is
  not finite is therefore computed again by the engine cpu;
- a row that sees no key, or whose scores all overflow to -inf, has lse 0 and out 0, which are also legal results. Rows
  without a key are known from the mask and the lengths; another row with these numbers is computed again, too;
- lse of -inf makes every gradient NaN: a row without a key enters the backward with +inf, so that its P is 0;
- rows of q, k, v and out must be contiguous: others are copied, since the results would be finite and wrong;
- their BLAS rounds in another order in arrays that are not aligned: these are copied, too. So it does in the scratch
  memory of a thread if that has the wrong size: few queries are padded;
- with AVX-512 the exponential of NaN is a number, so that scores of NaN show in lse alone: it is checked like out;
- an empty array ends the process: sequences without queries or keys never reach an operator.

All passes around the operators run on the caller's thread: on a busy machine an operation that torch divides among
threads waits milliseconds for one that has been displaced.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Iterator
from functools import cache
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch.nn.functional import pad

from ..arrays import AnyArray, Array, as_array, empty
from ..device import state_of_torch
from ..engines.aten import KEYS, ROWS, hides_later_keys, packs_groups
from ..plan.plan import Plan, plan
from ..problem.records import Gradients, Operands, Problem
from . import attention as engine_cpu
from .score import four_dimensional

if TYPE_CHECKING:
    from .attention import Sequence

operator = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
# By its Python binding if torch has one: a call in torch.ops reads the schema, for 9 of 44 us of a single row.
flash = getattr(torch, "_scaled_dot_product_flash_attention_for_cpu", operator)
flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
WHOLE = slice(None)
# NumPy aligns its arrays to 16 bytes. In 1,100 calls with such addresses the bits of the operators, whose BLAS is MKL,
# did not depend on them, but those of three in four calls with float64 arrays at odd multiples of 8 bytes differed.
ALIGNMENT = 16
# Elements of K with which a single row is computed on one thread, where it needs no padding: with 512 keys, 8 heads and
# D 64 it takes as long as padded on two threads. The BLAS would divide the products of more rows among threads.
SERIAL = 2**18
# Results whose check by a dot product with ones and Python's numbers is faster than NumPy's sums; BLAS libraries divide
# dot products of 10,000 numbers among threads.
FEW_NUMBERS, FEW_ROWS = 2**13, 64
Rows = TypeVar("Rows", torch.Tensor, np.ndarray)


class Part(NamedTuple):
    """The indices of one call of an operator in arrays (B, H, S): a sequence, or the whole batch."""

    batch: slice
    queries: slice
    keys: slice


def forward(plan: Plan, operands: Operands) -> tuple[Array, ...]:
    """Compute attention: out, of q's shape, and lse (B, Hq, Sq), or (Hq, Tq) if packed, the natural logarithm."""
    problem = plan.problem
    call = Call(problem, operands)
    if not call.is_served:
        return engine_cpu.forward(_of_cpu(plan), operands)
    out, lse = Result(problem, operands.q), empty(problem.lse_shape(operands.q), problem.accumulation, operands.q)
    lse_rows = call.rows_of(lse)
    if problem.has_lengths:  # no operator writes the rows outside the sequences
        lse_rows[...] = -np.inf
    with np.errstate(all="ignore"):  # infinities are regular values here
        for part in call.parts():
            rows = lse_rows[part.batch, :, part.queries]
            if not _is_empty(call.k[part.batch, :, part.keys]):
                O, L = call.form.attend(*call.operands_of(part), call.mask)
                rows[...] = L.numpy()
                if call.hidden is not None:
                    np.copyto(rows, -np.inf, where=call.hidden)
                O_rows, dead = O.numpy(), rows == 0
                if not _is_finite(L.numpy()) or (dead.any() and not O_rows[dead].any(axis=-1).all()):
                    return engine_cpu.forward(_of_cpu(plan), operands)
                if call.sink is not None:
                    total = np.logaddexp(rows, call.sink)
                    O_rows *= np.where(rows == -np.inf, 0, np.exp(rows - total))[..., None]
                    rows[...] = total
                out.store(O, part.batch, part.queries)
            elif call.sink is not None:
                rows[...] = call.sink
        if not out.is_finite():
            return engine_cpu.forward(_of_cpu(plan), operands)
    return out.array(), lse


def backward(plan: Plan, operands: Operands) -> Gradients:
    """Compute dq, dk, dv, and dsink if there is a sink, from the forward's (out, lse) and from dout."""
    problem = plan.problem
    call = Call(problem, operands)
    assert operands.dout is not None and operands.out is not None and operands.lse is not None
    if not call.is_served:
        return engine_cpu.backward(_of_cpu(plan), operands)
    dout, out = (call.rows(x) for x in (operands.dout, operands.out))
    lse_rows = call.rows_of(operands.lse)
    lse_rows = np.where(lse_rows == -np.inf, np.inf, lse_rows)
    results = [Result(problem, x) for x in (operands.q, operands.k, operands.v)]
    dsink = None if call.sink is None else np.zeros((problem.heads, 1), problem.accumulation)
    with np.errstate(all="ignore"):
        for part in call.parts():
            Q, K, V = call.operands_of(part)
            if _is_empty(K):
                continue
            dO, O = (x[part.batch, :, part.queries] for x in (dout, out))
            L = np.ascontiguousarray(lse_rows[part.batch, :, part.queries])
            computed = flash_backward(
                dO, Q, K, V, O, torch.from_numpy(L), 0.0, call.is_causal, attn_mask=call.mask, scale=problem.scale
            )
            for result, gradient, rows in zip(results, computed, (part.queries, part.keys, part.keys), strict=True):
                result.store(gradient, part.batch, rows)
            if dsink is not None:
                delta = np.vecdot(dO.numpy(), O.numpy())
                dsink -= np.vecdot(np.exp(call.sink - L), delta).sum(axis=0)[:, None]
        if not all(result.is_finite() for result in results) or (dsink is not None and not np.isfinite(dsink).all()):
            return _backward_again(plan, operands)
    dq, dk, dv = (result.array() for result in results)
    if operands.sink is None:
        return Gradients(dq, dk, dv)
    return Gradients(dq, dk, dv, dsink=engine_cpu.rounded(dsink, operands.sink, operands.q))


def _backward_again(plan: Plan, operands: Operands) -> Gradients:
    """Compute the gradients by the engine cpu from its own out and lse.

    If scores exceed 2^24, those of two products differ by more than the exponential of a float32 can span: with torch's
    lse, probabilities of the engine cpu might be infinite.
    """
    of_forward = _of_cpu(plan._replace(problem=plan.problem._replace(backward=False)))
    out, lse = engine_cpu.forward(of_forward, operands)
    return engine_cpu.backward(_of_cpu(plan), operands._replace(out=out, lse=lse))


def lines(problem: Problem) -> str:
    """Return the lines of `explain` about what decides besides the problem: contents, and the import of torch."""
    text = "\ncontents   decide too: cpu computes again what is not finite, and rows of zeros with lse 0"
    if problem.has_lengths and problem.mask.right is not None:
        text += ", and causal sequences of unequal lengths"
    if problem.framework != "torch":
        text += (
            '\nbits       are others than before the import of torch, when cpu computes the call: engine="cpu" pins it'
        )
    return text


class Call:
    """The operands of one call as tensors (B, H, S, D); for a packed batch, (1, H, T, D)."""

    def __init__(self, problem: Problem, operands: Operands) -> None:
        self.problem = problem
        self.q, self.k, self.v = (self.rows(array) for array in (operands.q, operands.k, operands.v))
        self.form = Form.of(problem)
        self.is_causal = self.form.is_causal
        self.sequences: list[Sequence] = engine_cpu.sequences_of(problem, operands) if problem.has_lengths else []
        sink = operands.sink
        self.sink = None if sink is None else sink.numpy().astype(problem.accumulation)[:, None]
        self.mask: torch.Tensor | None = None
        self.hidden: np.ndarray | None = None  # rows without a key, which broadcasts to lse
        if operands.mask is not None or operands.bias is not None:
            numbers = _additive(operands, problem.dtype)
            self.hidden = _hidden_rows(numbers, self.is_causal, problem.q_len, problem.kv_len)
            self.mask = torch.from_numpy(numbers)

    @property
    def is_served(self) -> bool:
        """Whether no sink is NaN or +inf, and the operators align the causal mask of every sequence as the problem."""
        if self.sink is not None and not (self.sink < np.inf).all():
            return False
        if not self.is_causal or self.problem.mask.top_left:
            return True
        return all(sequence.q_len == sequence.kv_len for sequence in self.sequences)

    def parts(self) -> Iterator[Part]:
        """Yield the calls of an operator: one, or with lengths one for each sequence that has queries."""
        if not self.problem.has_lengths:
            yield Part(WHOLE, WHOLE, WHOLE)
        for x in self.sequences:
            if x.q_len:
                yield Part(slice(x.row, x.row + 1), x.queries, x.keys)

    def operands_of(self, part: Part) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the tensors of a part of q, k and v."""
        rows = (part.queries, part.keys, part.keys)
        q, k, v = (x[part.batch, :, each] for x, each in zip((self.q, self.k, self.v), rows, strict=True))
        return q, k, v

    def rows(self, array: Array) -> torch.Tensor:
        """Return an array of the call's layout as (B, H, S, D), copied unless its rows are contiguous."""
        return _heads_first(_tensor(array, -2 if self.problem.layout == "bhsd" else -3), self.problem.layout)

    def rows_of(self, array: Array) -> np.ndarray:
        """View an lse-like array as (B, H, S)."""
        return array.numpy()[None] if self.problem.layout == "thd" else array.numpy()


class Form(NamedTuple):
    """The arguments of the forward operator other than its tensors, and the layout of these."""

    is_causal: bool
    packs_groups: bool
    scale: float
    layout: str

    @classmethod
    def of(cls, problem: Problem) -> Form:
        """Return the form of a problem."""
        return cls(hides_later_keys(problem), packs_groups(problem), problem.scale, problem.layout)

    def attend(
        self, Q: torch.Tensor, K: torch.Tensor, V: torch.Tensor, mask: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return O and lse of tensors (B, H, S, D); the heads of a packed group are rows of one head."""
        shape = Q.shape
        if self.packs_groups:
            Q = Q.reshape(shape[0], K.shape[1], -1, shape[3])
        rows = Q.shape[2]
        if self.is_serial(Q.shape, K.shape, Q.itemsize):
            O, L = self.on_one_thread(Q, K, V, mask)
        elif more := rows_of_equal_bits(rows, K.shape[2], shape[3], Q.itemsize) - rows:
            if mask is not None and mask.shape[2] > 1:
                mask = pad(mask, (0, 0, 0, more))
            O, L = self._flash(pad(Q, (0, 0, 0, more)), K, V, mask)
            O, L = O.narrow_copy(2, 0, rows), L.narrow_copy(2, 0, rows)
        else:
            O, L = self._flash(Q, K, V, mask)
        return (O.reshape(shape), L.reshape(shape[:3])) if self.packs_groups else (O, L)

    @staticmethod
    def is_serial(of_queries: tuple[int, ...], of_keys: tuple[int, ...], itemsize: int) -> bool:
        """Return whether arrays of shapes (B, H, S, D) are computed on one thread, as they need no padding there."""
        rows, keys, dim = of_queries[2], *of_keys[2:]
        is_small = rows == 1 and math.prod(of_keys) <= SERIAL
        return is_small and rows_of_equal_bits(1, keys, dim, itemsize) > 1 and _set_threads() is not None

    def on_one_thread(
        self, Q: torch.Tensor, K: torch.Tensor, V: torch.Tensor, mask: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what the operator does, on the caller's thread alone."""
        threads, set_threads = torch.get_num_threads(), _set_threads()
        if threads == 1 or set_threads is None:
            return self._flash(Q, K, V, mask)
        try:
            try:
                set_threads(1)
                return self._flash(Q, K, V, mask)
            finally:
                set_threads(threads)
        finally:  # repeated, as Ctrl-C may have cut off the first
            set_threads(threads)

    def _flash(
        self, Q: torch.Tensor, K: torch.Tensor, V: torch.Tensor, mask: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        results: tuple[torch.Tensor, torch.Tensor] = flash(
            Q, K, V, 0.0, self.is_causal, attn_mask=mask, scale=self.scale
        )
        return results


@cache
def _set_threads() -> Callable[[int], None] | None:
    """Return the function that sets torch's threads for calls of this thread alone; None without OpenMP's."""
    try:
        function = ctypes.PyDLL(torch._C.__file__).omp_set_num_threads  # also finds symbols of torch's dependencies
    except AttributeError:
        return None
    function.argtypes, function.restype = (ctypes.c_int,), None
    threads = torch.get_num_threads()
    function(threads + 1)
    has_effect = torch.get_num_threads() == threads + 1
    function(threads)
    return function if has_effect else None


class Kept(NamedTuple):
    """A kept call (keyed_plan.py): it has no arrays but q, k and v, and the operator takes their memory as it is."""

    attend: Callable[..., tuple[torch.Tensor, torch.Tensor]]  # a method of Form
    swaps: bool  # whether arrays are (B, S, H, D)
    is_serial: bool  # then the operator's results are contiguous
    of_torch: bool
    ones: np.ndarray | None  # as many as `out` has numbers, if its check is a dot product with them
    outputs: tuple[str, ...] = ("out", "lse")


def kept(plan: Plan, operands: Operands) -> Kept | None:
    """Return what `repeat` needs of a call, or None if it needs more than q, k and v, or a copy of one of them."""
    problem = plan.problem
    if problem.backward or problem.layout == "thd" or operands.arrays().keys() != {"q", "k", "v"}:
        return None
    rows = -2 if problem.layout == "bhsd" else -3
    if any(_is_copied(x, rows) for x in (operands.q, operands.k, operands.v)):
        return None
    form, swaps = Form.of(problem), problem.layout == "bshd"
    of_queries, of_keys = (
        x.shape if not swaps else (x.shape[0], x.shape[2], x.shape[1], x.shape[3]) for x in (operands.q, operands.k)
    )
    is_serial = form.is_serial(of_queries, of_keys, problem.dtype.itemsize)
    attend = form.on_one_thread if is_serial else form.attend
    are_few = math.prod(of_queries) <= FEW_NUMBERS and math.prod(of_queries[:3]) <= FEW_ROWS
    ones = _ones(problem.dtype)[: math.prod(of_queries)] if are_few else None
    return Kept(attend, swaps, is_serial, problem.framework == "torch", ones)


@cache
def _ones(dtype: np.dtype) -> np.ndarray:
    return np.ones(FEW_NUMBERS, dtype)


def repeat(kept: Kept, arrays: list[Any], addresses: list[int]) -> list[AnyArray] | None:
    """Return (out, lse) of a kept call on other arrays; None if the process or the contents need more than that.

    The operator evicts the code of what follows from the nearest caches, so each statement costs three times its time.
    """
    if state_of_torch():
        return None
    attend, swaps, is_serial, of_torch, ones, _ = kept
    if not of_torch:
        arrays = [torch.from_numpy(_writable(x)) for x in arrays]
    elif torch._C._any_requires_grad(*arrays):
        arrays = [x.detach() for x in arrays]
    O, L = attend(*[x.transpose(1, 2) for x in arrays]) if swaps else attend(*arrays)
    if not _is_regular(O, L, ones):
        return None
    if is_serial:  # a single row, whose heads lie one after another
        results = [O.resize_(arrays[0].shape) if swaps else O, L]
    else:
        if swaps:
            O.transpose_(1, 2)  # in place
        results = [O.contiguous(), L.contiguous()]
        if of_torch:
            results = [_base(x) if x._is_view() else x for x in results]
    return results if of_torch else [x.numpy() for x in results]


def _is_regular(O: torch.Tensor, L: torch.Tensor, ones: np.ndarray | None) -> bool:
    """Return whether all results of an operator are finite, and no lse is 0; False too if a sum overflows.

    For few numbers NumPy's floating-point state alone, which a dot product leaves alone, takes longer than the sums.
    """
    lse = L.numpy()
    if ones is not None:
        rows = lse.ravel().tolist()
        return math.isfinite(float(np.vdot(O.numpy(), ones)) + sum(rows)) and all(rows)
    with np.errstate(over="ignore", invalid="ignore"):  # as in _is_finite, entered once
        total = np.add.reduce(lse, axis=None) + np.add.reduce(O.numpy(), axis=None)
    return math.isfinite(total) and bool(lse.all())


def rows_of_equal_bits(rows: int, keys: int, dim: int, itemsize: int) -> int:
    """Return the number of queries, at least `rows`, with which bits do not depend on the number of threads.

    A thread's scratch memory, which has scores, two numbers and D sums for each row of a tile, lies behind that of the
    thread before it: unless its size is a multiple of ALIGNMENT, threads round in different orders.
    """
    if rows >= ROWS or rows * (min(keys, KEYS) + 2 + dim) * itemsize % ALIGNMENT == 0:
        return rows
    step = ALIGNMENT // itemsize
    return -(-rows // step) * step


class Result:
    """An output with the shape of an operand: the operator's own if that is contiguous, else a copy of its parts."""

    def __init__(self, problem: Problem, like: Array) -> None:
        self.layout, self.like, self.is_whole = problem.layout, like, not problem.has_lengths
        self.stored: Array | None = None if self.is_whole else self._allocated(zeros=True)

    def _allocated(self, zeros: bool = False) -> Array:
        array = empty(self.like.shape, self.like.dtype, self.like)
        if zeros:
            array.numpy()[...] = 0
        return array

    def store(self, tensor: torch.Tensor, batch: slice, rows: slice) -> None:
        """Take the operator's result (B, H, S, D) of a part."""
        as_laid_out = _heads_first(tensor, self.layout)  # swaps the same axes
        if self.is_whole and as_laid_out.is_contiguous():
            own = _base(as_laid_out) if self.like.framework == "torch" else as_laid_out.numpy()
            self.stored = as_array(own, "output")
            return
        if self.stored is None:
            self.stored = self._allocated()
        _heads_first(self.stored.numpy(), self.layout)[batch, :, rows] = tensor.numpy()

    def is_finite(self) -> bool:
        """Return whether all numbers are finite; False too if their sum overflows."""
        return _is_finite(self.array().numpy())

    def array(self) -> Array:
        """Return the output."""
        assert self.stored is not None
        return self.stored


def _base(view: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the same memory that is no view: torch refuses to write a gradient's history into a view."""
    return view.new_empty(0).set_(view.untyped_storage(), view.storage_offset(), view.shape, view.stride())


def _is_finite(numbers: np.ndarray) -> bool:
    with np.errstate(over="ignore", invalid="ignore"):  # a sum that overflows counts as infinite
        return math.isfinite(np.add.reduce(numbers, axis=None))


def _of_cpu(chosen: Plan) -> Plan:
    """Return the plan of the engine cpu for the same problem."""
    return plan(chosen.problem._replace(engine="cpu"), chosen.device)


def _tensor(array: Array, rows: int) -> torch.Tensor:
    """Return an array as a tensor of the same memory, or of a copy if rows are not contiguous, overlap or not aligned.

    `rows` is the axis of rows. BLAS takes no rows that overlap, and torch no negative strides.
    """
    if _is_copied(array, rows):
        return torch.from_numpy(np.array(array.numpy(), order="C"))
    if array.framework == "torch" and type(array.owner) in (torch.Tensor, torch.nn.Parameter):
        return array.owner.detach()
    return torch.from_numpy(_writable(array.numpy()))


def _is_copied(array: Array, rows: int) -> bool:
    is_dense = array.strides[-1] == 1 and array.strides[rows] >= array.shape[-1] and min(array.strides) >= 0
    return not is_dense or array.pointer % ALIGNMENT != 0


def _writable(x: np.ndarray) -> np.ndarray:
    """View an array as writable, since torch has no read-only tensors and warns of one; the operators only read it."""
    if x.flags.writeable:
        return x
    interface = x.__array_interface__ | {"data": (x.__array_interface__["data"][0], False)}
    return np.asarray(SimpleNamespace(array=x, __array_interface__=interface))


def _heads_first(rows: Rows, layout: str) -> Rows:
    """View a tensor or array of a layout as (B, H, S, D)."""
    if layout == "thd":
        return rows.swapaxes(0, 1)[None]
    return rows.swapaxes(1, 2) if layout == "bshd" else rows


def _is_empty(tensor: torch.Tensor) -> bool:
    return tensor.numel() == 0


def _additive(operands: Operands, dtype: np.dtype) -> np.ndarray:
    """Return mask and bias as one array of numbers to add, which broadcasts to (B, Hq, Sq, Sk)."""
    bias = np.zeros((), dtype) if operands.bias is None else operands.bias.numpy().astype(dtype)
    if operands.mask is None:
        return np.ascontiguousarray(four_dimensional(bias))
    return four_dimensional(np.where(operands.mask.numpy(), bias, dtype.type(-np.inf)))


def _hidden_rows(numbers: np.ndarray, is_causal: bool, q_len: int, kv_len: int) -> np.ndarray:
    """Return the rows without a key under an additive mask, which broadcasts to (B, Hq, Sq)."""
    seen = numbers != -np.inf
    if not is_causal or seen.shape[-1] == 1:
        return ~seen.any(axis=-1)
    upto = np.logical_or.accumulate(seen, axis=-1)
    queries = np.arange(q_len)
    hidden: np.ndarray = ~upto[..., queries if seen.shape[-2] > 1 else 0, np.minimum(queries, kv_len - 1)]
    return hidden
