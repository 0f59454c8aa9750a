"""Attention as torch operators: cupy_flash::attention_forward, differentiable, and cupy_flash::attention_backward.

Both are functional and have fake kernels, from which compile, export, checkpoint and FSDP2 get the shapes of results.
They run as any other call: problem -> plan -> backend. `arguments_of` and `mod_of_options` convert a caller's options
to their arguments.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch.autograd import forward_ad
from torch.nn.attention.bias import CausalBias
from torch.utils.flop_counter import register_flop_formula

from ... import dispatch
from ...mods.derive import floating_reads
from ...mods.trace import Mod, decoded, mod_of
from ...problem.build import pose
from ...problem.features import CHOICE, INTEGER, record
from ...problem.records import ARRAYS, DIFFERENTIATED, FEATURES, FLAGS, NUMBERS, Options, Packed, Saved, Tangents
from .autograd_kernel import register_autograd
from .fp8 import require_roundable, rounded

CAUSAL: dict[str, Any] = {
    "none": False,
    "bottom_right": True,
    "top_left": "top_left",
}  # {the operators' `causal`: the caller's}


# The options in the order of the operators' arguments: tensors, then the others by kind. They are tuples of names
# instead of features, because torch.compile guards every object that it reads.
ARRAY_NAMES = tuple(feature.name for feature in ARRAYS)
NUMBER_NAMES = tuple((feature.name, feature.default is None) for feature in NUMBERS)  # (name, whether None is legal)
CHOICE_NAMES = tuple((feature.name, feature.default is None) for feature in FEATURES if feature.kind == CHOICE)
INTEGER_NAMES = tuple(feature.name for feature in FEATURES if feature.kind == INTEGER)
FLAG_NAMES = tuple(feature.name for feature in FLAGS if not feature.result)
FP8_NAMES = tuple(feature.name for feature in ARRAYS if feature.fp8)

TENSORS = ("q", "k", "v", *ARRAY_NAMES, "cu_seqlens_q", "cu_seqlens_k", "seed")
OTHERS = {
    "max_seqlen_q": "SymInt?",  # None for a padded batch
    "max_seqlen_k": "SymInt?",
    "causal": "str",  # a key of CAUSAL
    "window_left": "int?",
    "window_right": "int?",
    **{name: "float?" if optional else "float" for name, optional in NUMBER_NAMES},
    **dict.fromkeys(INTEGER_NAMES, "SymInt?"),
    **{name: "str?" if optional else "str" for name, optional in CHOICE_NAMES},
    **dict.fromkeys(FLAG_NAMES, "bool"),
    "fp8": "bool",  # the forward rounds q, k and v to fp8 first
}
UNCHANGED = (
    *ARRAY_NAMES,
    "seed",
    *dict(NUMBER_NAMES),
    *INTEGER_NAMES,
    *dict(CHOICE_NAMES),
    *FLAG_NAMES,
)  # arguments that the operators take from the caller unchanged
_unchanged = operator.attrgetter(*UNCHANGED)

_Call: Any = record(*TENSORS, *OTHERS)


class Call(_Call):
    """The arguments that both operators share, in the order of their schemas."""

    __slots__ = ()

    @property
    def is_packed(self) -> bool:
        """Whether the batch is packed: (T, H, D) with cu_seqlens."""
        return self.cu_seqlens_q is not None

    @property
    def columns_of_out(self) -> int:
        """Dv, by which the values may be inside the keys."""
        size: int = self.head_dim_v if self.v is None else self.v.shape[-1]
        return size

    @property
    def lse_shape(self) -> tuple[int, ...]:
        """The shape of lse: (B, Hq, Sq), or (Hq, Tq) of a packed batch."""
        if self.is_packed:
            tokens, heads, _ = self.q.shape
            return (heads, tokens)
        batch, first, second, _ = self.q.shape
        return (batch, second, first) if self.layout == "bshd" else (batch, first, second)

    def pose(self, saved: Saved | None = None, mod: Mod | None = None, tangents: Tangents | None = None) -> Any:
        """Return (problem, operands) of the call; raises one error with every reason if it is invalid."""
        function = "attention_varlen" if self.is_packed else "attention"
        arrays = (self.q, self.k, self.v)
        return pose(function, arrays, self.options(mod), self.packed, saved, tangents=tangents)

    def options(self, mod: Mod | None = None) -> Options:
        """Return the options of the caller."""
        return Options(
            score_mod=mod,
            causal=CAUSAL[self.causal],
            window=(self.window_left, self.window_right),
            **dict(zip(UNCHANGED, _unchanged(self), strict=True)),
        )

    @property
    def packed(self) -> Packed | None:
        """The boundaries of a packed batch; None for a padded one."""
        if not self.is_packed:
            return None
        return Packed(self.cu_seqlens_q, self.cu_seqlens_k, self.max_seqlen_q, self.max_seqlen_k)


SEED, DROPOUT = (Call._fields.index(name) for name in ("seed", "dropout"))
SCHEMA = ", ".join(
    [f"Tensor{'?' * (name not in ('q', 'k'))} {name}" for name in TENSORS]  # without v, values are inside keys
    + [f"{kind} {name}" for name, kind in OTHERS.items()]
)
GRADIENTS = ", ".join(f"Tensor d{name}" for name in DIFFERENTIATED)
library = torch.library.Library("cupy_flash", "DEF")
SAVED = "Tensor dout, Tensor out, Tensor lse, Tensor? dlse, bool bias_gradient"
# Calls with mods have operators of their own, because torch takes a third longer to call one with a list of tensors.
MODS = "Tensor[] captured, str mods"
for schema in (
    f"attention_forward({SCHEMA}) -> (Tensor out, Tensor lse)",
    f"attention_backward({SCHEMA}, {SAVED}) -> ({GRADIENTS})",
    f"modified_attention_forward({SCHEMA}, {MODS}) -> (Tensor out, Tensor lse)",
    f"modified_attention_backward({SCHEMA}, {MODS}, {SAVED}, bool[] captured_gradient)"
    f" -> ({GRADIENTS}, Tensor[] dcaptured)",
):
    library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
attention_forward = torch.ops.cupy_flash.attention_forward.default
attention_backward = torch.ops.cupy_flash.attention_backward.default
modified_attention_forward = torch.ops.cupy_flash.modified_attention_forward.default
modified_attention_backward = torch.ops.cupy_flash.modified_attention_backward.default


def mod_of_options(options: Options) -> Mod | None:
    """Return the mods of a call, or None; TypeError if they capture arrays that are not tensors."""
    mods = [given for given in (options.score_mod, options.mask_mod) if given is not None]
    if not mods:
        return None
    mod = mods[0] if len(mods) == 1 and isinstance(mods[0], Mod) else mod_of(options.score_mod, options.mask_mod)
    for array in mod.arrays:
        require_tensor(array)
    return mod


def arguments_of(arrays: tuple[Any, Any, Any], options: Options, packed: Packed | None, fp8: bool) -> tuple[Any, ...]:
    """Return the operator's arguments (`Call`); TypeError or ValueError for a value that its schema cannot express."""
    bounds = (None, None) if packed is None else (packed.cu_seqlens_q, packed.cu_seqlens_k)
    longest = (None, None) if packed is None else (_length(packed.max_seqlen_q), _length(packed.max_seqlen_k))
    features = [getattr(options, name) for name in ARRAY_NAMES]
    inputs = arrays[:2] if arrays[2] is None and options.head_dim_v is not None else arrays
    required = inputs if packed is None else (*inputs, *bounds)
    for array in (*required, *(feature for feature in features if feature is not None)):
        require_tensor(array)
    flags = {name: getattr(options, name) for name in FLAG_NAMES}
    for name, flag in (*flags.items(), ("return_lse", options.return_lse), ("fp8", fp8)):
        if not isinstance(flag, (bool, np.bool_)):
            raise TypeError(f"{name} must be True or False, not {flag!r}")
    choices = [getattr(options, name) for name, _ in CHOICE_NAMES]
    for (name, optional), choice in zip(CHOICE_NAMES, choices, strict=True):
        if not isinstance(choice, str) and not (optional and choice is None):
            raise TypeError(f"{name} must be a string, not {choice!r}")
    left, right = window_sides(options.window)
    numbers = [as_number(getattr(options, name), optional) for name, optional in NUMBER_NAMES]
    integers = [None if x is None else _length(x) for x in (getattr(options, name) for name in INTEGER_NAMES)]
    q, k, v = _autocast(arrays)
    if fp8 and v is None:
        raise ValueError("fp8=True takes no head_dim_v: it rounds k and v with factors of their own")
    if fp8:
        require_roundable((q, k, v), [getattr(options, name) for name in FP8_NAMES])
    flags["deterministic"] = flags["deterministic"] or torch.are_deterministic_algorithms_enabled()
    return (
        q, k, v, *features, *bounds,
        _seed(options.seed, as_number(options.dropout), q),
        *longest,
        causal_name(options.causal),
        None if left is None else as_index(left),
        None if right is None else as_index(right),
        *numbers,
        *integers,
        *choices,
        *(bool(flag) for flag in flags.values()),
        bool(fp8),
    )  # fmt: skip


def require_tensor(array: Any) -> None:
    """Raise TypeError unless an array is a tensor with contents of its own."""
    if not isinstance(array, torch.Tensor) or array.is_nested or isinstance(array, CausalBias):
        raise TypeError(f"all arrays must be torch tensors with contents of their own, not {type(array)}")


def refuse_tangents(function: str, tensors: Iterable[Any]) -> None:
    """Raise RuntimeError for a tensor with a tangent: an operator that has a backward alone would lose it silently."""
    if forward_ad._current_level >= 0:
        _refuse_tangents(function, tensors)


@torch.compiler.disable(reason="torch.compile traces no tangents of dual tensors")
def _refuse_tangents(function: str, tensors: Iterable[Any]) -> None:
    for x in tensors:
        if isinstance(x, torch.Tensor) and forward_ad.unpack_dual(x).tangent is not None:
            raise RuntimeError(f"cupy_flash has no forward-mode derivative of {function}")


def window_sides(window: Any) -> tuple[Any, Any]:
    """Return the (left, right) of a window, (None, None) without one; TypeError for a value that is not a pair."""
    if window is None:
        return None, None
    try:
        left, right = window
    except Exception as error:  # foreign objects may raise anything
        raise TypeError("window must be None or (left, right)") from error
    return left, right


def causal_name(causal: Any) -> str:
    """Return the operators' `causal`; ValueError for a value that is none of the four."""
    if isinstance(causal, (bool, np.bool_)):
        return "bottom_right" if causal else "none"
    if isinstance(causal, str) and causal in ("bottom_right", "top_left"):
        return causal
    raise ValueError(f'causal must be False, True, "bottom_right" or "top_left", not {causal!r}')


def as_number(value: Any, optional: bool = False) -> float | None:
    """Return an option as a float, or None if `optional`; TypeError for a value that is not a number."""
    if optional and value is None:
        return None
    if isinstance(value, (bool, str, bytes, bytearray, np.bool_, np.complexfloating, np.timedelta64)):
        raise TypeError(f"{value!r} is not a number")
    try:
        return float(value)
    except Exception as error:  # foreign objects may raise anything
        raise TypeError("an option is not a number") from error


def as_index(value: Any) -> int:
    """Return an option as an int; TypeError for a value that is not a whole number, ValueError beyond 64 bits."""
    try:
        index = operator.index(value)
    except Exception as error:  # foreign objects may raise anything
        raise TypeError("an option is not a whole number") from error
    if not -(2**63) <= index < 2**63:
        raise ValueError(f"{index} does not fit into 64 bits")
    return index


def is_zero(softcap: Any) -> bool:
    """Return whether softcap is 0; False for a value that cannot be compared with a number, which `pose` refuses."""
    try:
        return bool(softcap == 0)
    except Exception:  # foreign objects may raise anything
        return False


def as_int32(cu_seqlens: Any) -> Any:
    """Cast int64 cu_seqlens in host memory to int32; values out of range are clamped to ones that `pose` refuses."""
    is_dense = isinstance(cu_seqlens, torch.Tensor) and cu_seqlens.layout == torch.strided
    if is_dense and cu_seqlens.dtype == torch.int64 and cu_seqlens.device.type == "cpu":
        return cu_seqlens.clamp(-(2**31), 2**31 - 1).to(torch.int32)
    return cu_seqlens


def is_dtensor(tensor: Any) -> bool:
    """Return whether a tensor is distributed over ranks."""
    return torch.distributed.is_available() and isinstance(tensor, torch.distributed.tensor.DTensor)


def _length(value: Any) -> Any:
    """Return a length as an int, or unchanged if it is symbolic."""
    return value if isinstance(value, torch.SymInt) else as_index(value)


def _seed(seed: Any, dropout: Any, q: Any) -> Any:
    """Return the seed as a tensor, which CUDA graphs, checkpointing and the backward can read; None without dropout."""
    if seed is None:
        if dropout > 0 and is_dtensor(q):
            raise ValueError("dropout of DTensors needs a seed: each rank would draw another one")
        return torch.randint(0, 2**63 - 1, (1,), dtype=torch.int64, device=q.device) if dropout > 0 else None
    if isinstance(seed, torch.Tensor) and not seed.is_nested:
        return seed
    if isinstance(seed, (bool, np.timedelta64)) or not isinstance(seed, (int, np.integer)) or not 0 <= seed < 2**64:
        raise TypeError(f"seed must be None, an int in [0, 2**64) or an int64 tensor of one element, not {seed!r}")
    # Reinterpret the 64 bits as int64.
    bits = int(seed) - 2**64 if seed >= 2**63 else int(seed)
    return q.new_full((1,), bits, dtype=torch.int64) if dropout > 0 else None  # a DTensor if q is one


def _autocast(arrays: tuple[Any, Any, Any]) -> tuple[Any, ...]:
    """Return q, k and v in the dtype of autocast; float64 is not cast, as in torch's own operators."""
    kind = arrays[0].device.type
    if not torch.amp.is_autocast_available(kind) or not torch.is_autocast_enabled(kind):
        return arrays
    dtype = torch.get_autocast_dtype(kind)
    return tuple(
        x.to(dtype) if x is not None and x.is_floating_point() and x.dtype != torch.float64 else x for x in arrays
    )


def on_device_of(tensor: Any) -> contextlib.AbstractContextManager[Any]:
    """Return a context in which kernels are launched and memory is allocated on the device of a tensor.

    Operators written in Python get no device guard from torch.
    """
    return torch.cuda.device(tensor.device) if tensor.is_cuda else contextlib.nullcontext()


def _forward(*arguments: Any) -> tuple[Any, Any]:
    return _run_forward(Call(*arguments))


def _modified_forward(*arguments: Any) -> tuple[Any, Any]:
    *plain, captured, mods = arguments
    return _run_forward(Call(*plain), decoded(mods, captured))


def _run_forward(call: Call, mod: Mod | None = None) -> tuple[Any, Any]:
    dtype = _dtype_of_out(call)
    with on_device_of(call.q):
        if call.fp8:
            call = rounded(call)
        out, lse = dispatch.forward(*call.pose(mod=mod))
    return out.result().to(dtype), lse.result()


def _dtype_of_out(call: Call) -> Any:
    return torch.bfloat16 if call.q.dtype == torch.float8_e4m3fn else call.q.dtype


def run_backward(*arguments: Any) -> tuple[Any, ...]:
    """Run attention_backward; this is its kernel for all devices."""
    call, saved = split(arguments)
    with on_device_of(call.q):
        gradients = dispatch.backward(*call.pose(saved))
    return returned(call, gradients[: len(DIFFERENTIATED)])


def _modified_backward(*arguments: Any) -> tuple[Any, ...]:
    call, captured, mods, saved = split_modified(arguments)
    with on_device_of(call.q):
        *gradients, dcaptured = dispatch.backward(*call.pose(saved, decoded(mods, captured)))
    return (*returned(call, gradients), list(returned(call, dcaptured or (None,) * len(captured))))


def returned(call: Call, gradients: Any) -> tuple[Any, ...]:
    """Return the gradients as tensors; one that was not requested is a tensor without elements."""
    return tuple(absent(call) if gradient is None else gradient.result() for gradient in gradients)


def split(arguments: tuple[Any, ...]) -> tuple[Call, Saved]:
    """Split the arguments of attention_backward into (call, saved)."""
    count = len(Call._fields)
    return Call(*arguments[:count]), Saved(*arguments[count:])


def split_modified(arguments: tuple[Any, ...]) -> tuple[Call, list[Any], str, Saved]:
    """Split the arguments of modified_attention_backward into (call, captured, mods, saved)."""
    count = len(Call._fields)
    captured, mods, *saved, captured_gradient = arguments[count:]
    return Call(*arguments[:count]), captured, mods, Saved(*saved)._replace(captured_gradient=tuple(captured_gradient))


def absent(call: Call) -> Any:
    """Return an empty tensor for a gradient that was not requested: operators return a fixed number of tensors."""
    return call.q.new_empty((0,))


# The kernels are registered for every device and kind of tensor, so that a call that no engine serves raises the
# reasons of `pose` instead of torch's "no kernel".
library.impl("attention_forward", _forward, "CompositeExplicitAutograd")
library.impl("attention_backward", run_backward, "CompositeExplicitAutograd")
library.impl("modified_attention_forward", _modified_forward, "CompositeExplicitAutograd")
library.impl("modified_attention_backward", _modified_backward, "CompositeExplicitAutograd")


def require_one_device(function: str, arguments: dict[str, Any]) -> None:
    """Raise ValueError for tensors on several devices.

    The fake kernel is the Meta kernel too, which torch runs if any tensor is a meta tensor; with other tensors on
    another device, the result would be uninitialised memory.
    """
    devices = {name: str(x.device) for name, x in arguments.items() if isinstance(x, torch.Tensor)}
    if len(set(devices.values())) > 1:
        given = ", ".join(f"{name} on {device}" for name, device in devices.items())
        raise ValueError(f"{function}: all arrays must be on one device, not {given}")


def require_tensors_on_one_device(call: Call, saved: Saved | None = None, captured: Sequence[Any] = ()) -> None:
    """Raise ValueError if the tensors of a call are on several devices."""
    arguments = call._asdict() | ({} if saved is None else saved._asdict())
    arguments |= {} if saved is None or saved.statistics is None else saved.statistics._asdict()
    arguments |= {f"array{slot}": x for slot, x in enumerate(captured)}
    require_one_device("attention_varlen" if call.is_packed else "attention", arguments)


@torch.library.register_fake("cupy_flash::attention_forward", lib=library)
def _fake_forward(*arguments: Any) -> tuple[Any, Any]:
    call = Call(*arguments)
    require_tensors_on_one_device(call)
    return _fake_results(call)


@torch.library.register_fake("cupy_flash::modified_attention_forward", lib=library)
def _fake_modified_forward(*arguments: Any) -> tuple[Any, Any]:
    *plain, captured, _ = arguments
    call = Call(*plain)
    require_tensors_on_one_device(call, captured=captured)
    return _fake_results(call)


def _fake_results(call: Call) -> tuple[Any, Any]:
    lse_dtype = torch.float64 if call.q.dtype == torch.float64 else torch.float32
    out = call.q.new_empty((*call.q.shape[:-1], call.columns_of_out), dtype=_dtype_of_out(call))
    return out, call.q.new_empty(call.lse_shape, dtype=lse_dtype)


@torch.library.register_fake("cupy_flash::attention_backward", lib=library)
def _fake_backward(*arguments: Any) -> tuple[Any, ...]:
    call, saved = split(arguments)
    require_tensors_on_one_device(call, saved)
    return fake_gradients(call, saved)


@torch.library.register_fake("cupy_flash::modified_attention_backward", lib=library)
def _fake_modified_backward(*arguments: Any) -> tuple[Any, ...]:
    call, captured, mods, saved = split_modified(arguments)
    require_tensors_on_one_device(call, saved, captured)
    return (*fake_gradients(call, saved), fake_captured(call, captured, mods, saved))


def fake_captured(call: Call, captured: Sequence[Any], mods: str, saved: Saved) -> list[Any]:
    """Return fake gradients of the captured arrays."""
    floating = floating_reads(decoded(mods, captured).program)
    wanted = [x if asked and slot in floating else None for slot, (x, asked) in _asked(captured, saved)]
    return [absent(call) if x is None else x.new_empty(x.shape) for x in wanted]


def _asked(captured: Sequence[Any], saved: Saved) -> Iterator[tuple[int, tuple[Any, bool]]]:
    return enumerate(zip(captured, saved.captured_gradient or (), strict=True))


def fake_gradients(call: Call, saved: Saved) -> tuple[Any, ...]:
    """Return fake gradients of the inputs."""
    inputs = call._asdict() | ({} if saved.bias_gradient else {"bias": None})
    wanted = (inputs[name] for name in DIFFERENTIATED)
    return tuple(absent(call) if x is None else x.new_empty(x.shape) for x in wanted)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, Any]) -> None:
    """Save tensors only by save_for_backward: an attribute of ctx exists as long as anything refers to the graph."""
    ctx.set_materialize_grads(False)
    *arguments, captured, ctx.mods = inputs if len(inputs) > len(Call._fields) else (*inputs, [], None)
    if not arguments[DROPOUT]:
        arguments[SEED] = None
    ctx.save_for_backward(*arguments[: len(TENSORS)], *captured, *output)
    ctx.others = tuple(arguments[len(TENSORS) :])


def _differentiate(ctx: Any, dout: Any, dlse: Any) -> tuple[Any, ...]:
    *tensors, out, lse = ctx.saved_tensors
    if dout is None:  # only lse was used
        dout = out.new_zeros(()).expand(out.shape)
    needed = dict(zip(Call._fields, ctx.needs_input_grad, strict=False))
    saved = (dout, out, lse, dlse, needed["bias"])
    if ctx.mods is None:
        gradients = attention_backward(*tensors, *ctx.others, *saved)
    else:
        tensors, captured = tensors[: len(TENSORS)], tensors[len(TENSORS) :]
        *_, of_captured, _ = ctx.needs_input_grad
        *gradients, dcaptured = modified_attention_backward(
            *tensors, *ctx.others, captured, ctx.mods, *saved, list(of_captured)
        )
    by_input = dict(zip(DIFFERENTIATED, gradients, strict=True))
    returned = tuple(by_input.get(name) if needed[name] else None for name in Call._fields)
    if ctx.mods is None:
        return returned
    # An array that only mask_mod reads has no gradient.
    by_slot = zip(dcaptured, captured, of_captured, strict=True)
    return (*returned, [dx if asked and dx.shape == x.shape else None for dx, x, asked in by_slot], None)


attend = register_autograd(library, attention_forward, _forward, _differentiate, _save)
torch.library.register_autograd(
    "cupy_flash::modified_attention_forward", _differentiate, setup_context=_save, lib=library
)


# torch's convention for attention, so that counts are comparable with those of its own operators: two matmuls over all
# (query, key) pairs forward and five backward, masked pairs included.


def _score_products(call: Call) -> int:
    """Return the FLOPs of one pass over all scores per unit of head dimension, 2 per pair."""
    if not call.is_packed:
        heads, kv_axis = (2, 1) if call.layout == "bshd" else (1, 2)
        return 2 * call.q.shape[0] * call.q.shape[heads] * call.q.shape[kv_axis] * call.k.shape[kv_axis]
    lengths = (_lengths(call.cu_seqlens_q, call.max_seqlen_q), _lengths(call.cu_seqlens_k, call.max_seqlen_k))
    return 2 * call.q.shape[1] * sum(q_len * kv_len for q_len, kv_len in zip(*lengths, strict=True))


def _lengths(cu_seqlens: Any, longest: int | None) -> list[Any]:
    """Return the lengths of the sequences, or `longest` for each if the tensor has no contents (traced, meta)."""
    if type(cu_seqlens) is torch.Tensor and not cu_seqlens.is_meta:
        return cu_seqlens.diff().tolist()
    return [longest] * (cu_seqlens.shape[0] - 1)


@register_flop_formula(
    [torch.ops.cupy_flash.attention_forward, torch.ops.cupy_flash.modified_attention_forward], get_raw=True
)
def _forward_flops(*arguments: Any, **_: Any) -> int:
    call = Call(*arguments[: len(Call._fields)])
    return _score_products(call) * (call.q.shape[-1] + call.columns_of_out)


@register_flop_formula(
    [torch.ops.cupy_flash.attention_backward, torch.ops.cupy_flash.modified_attention_backward], get_raw=True
)
def _backward_flops(*arguments: Any, **_: Any) -> int:
    call = Call(*arguments[: len(Call._fields)])
    return _score_products(call) * (3 * call.q.shape[-1] + 2 * call.columns_of_out)
