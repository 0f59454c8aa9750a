"""Attention as torch operators: cupy_flash::attention_forward, differentiable, and cupy_flash::attention_backward.

torch sees two functional operators with shapes it can compute without running them (compile, export, checkpoint,
FSDP2), and runs them as everything else: problem -> plan -> backend. `forward` leads to them from a caller's words.
"""

from __future__ import annotations

import contextlib
import operator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.autograd import forward_ad
from torch.nn.attention.bias import CausalBias
from torch.utils.flop_counter import register_flop_formula

from ... import backends
from ...problem import Options, Packed, Saved, pose
from .fp8 import require_roundable, rounded

CAUSAL = {"none": False, "bottom_right": True, "top_left": "top_left"}  # the operators' word: the caller's


class Call(NamedTuple):
    """The arguments that both operators share, in the order of their schemas."""

    q: Any
    k: Any
    v: Any
    alibi_slopes: Any
    bias: Any
    mask: Any
    sink: Any
    q_lengths: Any
    kv_lengths: Any
    cu_seqlens_q: Any
    cu_seqlens_k: Any
    q_descale: Any
    k_descale: Any
    v_descale: Any
    seed: Any
    max_seqlen_q: int | None  # None: padded sequences, not packed ones
    max_seqlen_k: int | None
    causal: str
    window_left: int | None
    window_right: int | None
    scale: float | None
    softcap: float | None
    dropout: float
    layout: str
    deterministic: bool
    backend: str | None
    engine: str | None
    fp8: bool  # of a forward: q, k and v are rounded to fp8 first

    @property
    def is_packed(self) -> bool:
        return self.cu_seqlens_q is not None

    @property
    def lse_shape(self) -> tuple[int, ...]:
        if self.is_packed:
            tokens, heads, _ = self.q.shape
            return (heads, tokens)
        batch, first, second, _ = self.q.shape
        return (batch, second, first) if self.layout == "bshd" else (batch, first, second)

    def pose(self, saved: Saved | None = None) -> Any:
        """(problem, operands), or the one error with every reason."""
        options = Options(
            CAUSAL[self.causal], (self.window_left, self.window_right), self.scale, self.softcap, self.alibi_slopes,
            self.bias, self.mask, self.sink, self.q_lengths, self.kv_lengths, self.dropout, self.seed, self.q_descale,
            self.k_descale, self.v_descale, self.layout, deterministic=self.deterministic, backend=self.backend,
            engine=self.engine,
        )  # fmt: skip
        if not self.is_packed:
            return pose("attention", (self.q, self.k, self.v), options, saved=saved)
        packed = Packed(self.cu_seqlens_q, self.cu_seqlens_k, self.max_seqlen_q, self.max_seqlen_k)
        return pose("attention_varlen", (self.q, self.k, self.v), options, packed, saved)


TENSORS = slice(0, Call._fields.index("max_seqlen_q"))
WORDS = slice(TENSORS.stop, len(Call._fields))
BIAS, SINK = Call._fields.index("bias"), Call._fields.index("sink")

SCHEMA = (
    "Tensor q, Tensor k, Tensor v, Tensor? alibi_slopes, Tensor? bias, Tensor? mask, Tensor? sink, "
    "Tensor? q_lengths, Tensor? kv_lengths, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, "
    "Tensor? q_descale, Tensor? k_descale, Tensor? v_descale, Tensor? seed, "
    "SymInt? max_seqlen_q, SymInt? max_seqlen_k, str causal, int? window_left, int? window_right, "
    "float? scale, float? softcap, float dropout, str layout, bool deterministic, str? backend, str? engine, "
    "bool fp8"
)
library = torch.library.Library("cupy_flash", "DEF")
for schema in (
    f"attention_forward({SCHEMA}) -> (Tensor out, Tensor lse)",
    f"attention_backward({SCHEMA}, Tensor dout, Tensor out, Tensor lse, Tensor? dlse, bool bias_gradient)"
    " -> (Tensor dq, Tensor dk, Tensor dv, Tensor dbias, Tensor dsink)",
):
    library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
attention_forward = torch.ops.cupy_flash.attention_forward.default
attention_backward = torch.ops.cupy_flash.attention_backward.default


def forward(
    function: str, arrays: tuple[Any, Any, Any], options: Options, packed: Packed | None = None, fp8: bool = False
) -> Any:
    """What `cupy_flash.<function>` returns, recorded for autograd.

    What is wrong with the call is found by `pose`, in the operator; here only what the operator's schema cannot carry.
    """
    try:
        call = _call(arrays, options, packed, fp8)
    except (TypeError, ValueError):
        if not torch.compiler.is_compiling():  # torch.compile cannot trace what pose does with memory
            pose(function, arrays, options, packed)  # the same complaint, among all others
        raise
    out, lse = attention_forward(*call)
    return (out, lse) if options.return_lse else out


def _call(arrays: tuple[Any, Any, Any], options: Options, packed: Packed | None, fp8: bool) -> Call:
    """A caller's words in the operator's types; TypeError or ValueError for a word that has no such form."""
    required = arrays if packed is None else (*arrays, packed.cu_seqlens_q, packed.cu_seqlens_k)
    features = (
        options.alibi_slopes, options.bias, options.mask, options.sink, options.q_lengths, options.kv_lengths
    )  # fmt: skip
    descales = (options.q_descale, options.k_descale, options.v_descale)
    for array in (*required, *(feature for feature in (*features, *descales) if feature is not None)):
        if not isinstance(array, torch.Tensor) or array.is_nested or isinstance(array, CausalBias):
            raise TypeError(f"all arrays must be torch tensors with contents of their own, not {type(array)}")
        # Below the operator a tangent is lost without a word: torch.func.jvp would give zeros.
        if forward_ad.unpack_dual(array).tangent is not None:
            raise RuntimeError("cupy_flash has no forward-mode derivative of attention (torch.func.jvp, dual tensors)")
    for flag in (options.return_lse, options.deterministic, fp8):
        if not isinstance(flag, (bool, np.bool_)):
            raise TypeError(f"return_lse, deterministic and fp8 must be True or False, not {flag!r}")
    for word in (options.layout, *(word for word in (options.backend, options.engine) if word is not None)):
        if not isinstance(word, str):
            raise TypeError(f"layout, backend and engine must be strings, not {word!r}")
    left, right = _sides(options.window)
    dropout = _number(options.dropout)
    q, k, v = _autocast(arrays)
    if fp8:
        require_roundable((q, k, v), descales)
    return Call(
        q, k, v, *features,
        cu_seqlens_q=None if packed is None else packed.cu_seqlens_q,
        cu_seqlens_k=None if packed is None else packed.cu_seqlens_k,
        q_descale=options.q_descale,
        k_descale=options.k_descale,
        v_descale=options.v_descale,
        seed=_seed(options.seed, dropout, q.device),
        max_seqlen_q=None if packed is None else _length(packed.max_seqlen_q),
        max_seqlen_k=None if packed is None else _length(packed.max_seqlen_k),
        causal=_causal(options.causal),
        window_left=None if left is None else _index(left),
        window_right=None if right is None else _index(right),
        scale=None if options.scale is None else _number(options.scale),
        softcap=None if options.softcap is None else _number(options.softcap),
        dropout=dropout,
        layout=options.layout,
        deterministic=bool(options.deterministic) or torch.are_deterministic_algorithms_enabled(),
        backend=options.backend,
        engine=options.engine,
        fp8=bool(fp8),
    )  # fmt: skip


def _sides(window: Any) -> tuple[Any, Any]:
    if window is None:
        return None, None
    try:
        left, right = window
    except Exception as error:  # objects of others raise what they like
        raise TypeError("window must be None or (left, right)") from error
    return left, right


def _causal(causal: Any) -> str:
    if isinstance(causal, (bool, np.bool_)):
        return "bottom_right" if causal else "none"
    if isinstance(causal, str) and causal in ("bottom_right", "top_left"):
        return causal
    raise ValueError(f'causal must be False, True, "bottom_right" or "top_left", not {causal!r}')


def _number(value: Any) -> float:
    if isinstance(value, (bool, str, bytes, bytearray, np.bool_)):
        raise TypeError(f"{value!r} is not a number")
    try:
        return float(value)
    except Exception as error:  # objects of others raise what they like
        raise TypeError("an option is not a number") from error


def _index(value: Any) -> int:
    try:
        index = operator.index(value)
    except Exception as error:  # objects of others raise what they like
        raise TypeError("an option is not a whole number") from error
    if not -(2**63) <= index < 2**63:
        raise ValueError(f"{index} does not fit into 64 bits")
    return index


def _length(value: Any) -> Any:
    """A whole number; one that tracing leaves open stays so."""
    return value if isinstance(value, torch.SymInt) else _index(value)


def _seed(seed: Any, dropout: float, device: Any) -> Any:
    """A seed as the operator takes it: a tensor that CUDA graphs, checkpointing and the backward see."""
    if seed is None:
        return torch.randint(0, 2**63 - 1, (1,), dtype=torch.int64, device=device) if dropout > 0 else None
    if isinstance(seed, torch.Tensor) and not seed.is_nested:
        return seed
    if isinstance(seed, (bool, np.timedelta64)) or not isinstance(seed, (int, np.integer)) or not 0 <= seed < 2**64:
        raise TypeError(f"seed must be None, an int in [0, 2**64) or an int64 tensor of one element, not {seed!r}")
    # The same 64 bits as int64.
    bits = int(seed) - 2**64 if seed >= 2**63 else int(seed)
    return torch.full((1,), bits, dtype=torch.int64, device=device) if dropout > 0 else None


def _autocast(arrays: tuple[Any, Any, Any]) -> tuple[Any, ...]:
    """q, k and v as autocast wants them; like torch's own operators it leaves float64 alone."""
    kind = arrays[0].device.type
    if not torch.amp.is_autocast_available(kind) or not torch.is_autocast_enabled(kind):
        return arrays
    dtype = torch.get_autocast_dtype(kind)
    return tuple(x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x for x in arrays)


def _on_device_of(tensor: Any) -> contextlib.AbstractContextManager[Any]:
    """torch gives a Python operator no device guard; what it launches and allocates belongs on its arrays' device."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else contextlib.nullcontext()


def _forward(*arguments: Any) -> tuple[Any, Any]:
    call = Call(*arguments)
    dtype = _dtype_of_out(call)
    with _on_device_of(call.q):
        if call.fp8:
            call = rounded(call)
        out, lse = backends.forward(*call.pose())
    return out.result().to(dtype), lse.result()


def _dtype_of_out(call: Call) -> Any:
    return torch.bfloat16 if call.q.dtype == torch.float8_e4m3fn else call.q.dtype


def _backward(*arguments: Any) -> tuple[Any, ...]:
    call, saved = _split(arguments)
    with _on_device_of(call.q):
        gradients = backends.backward(*call.pose(saved))
    return tuple(_absent(call) if gradient is None else gradient.result() for gradient in gradients)


def _split(arguments: tuple[Any, ...]) -> tuple[Call, Saved]:
    return Call(*arguments[: WORDS.stop]), Saved(*arguments[WORDS.stop :])


def _absent(call: Call) -> Any:
    """An operator returns tensors, always as many; one without elements is a gradient that was not asked for."""
    return call.q.new_empty((0,))


# For every device and kind of tensor: what no engine serves gets the reasons from `pose`, not torch's "no kernel".
library.impl("attention_forward", _forward, "CompositeExplicitAutograd")
library.impl("attention_backward", _backward, "CompositeExplicitAutograd")


def _require_one_device(call: Call, saved: Saved | None = None) -> None:
    """ValueError for tensors on several devices.

    The fake kernel is the Meta kernel too, which torch runs where any tensor is a meta tensor: beside tensors of
    another device the result would be memory that nothing has written.
    """
    arguments = call._asdict() | ({} if saved is None else saved._asdict())
    devices = {name: str(x.device) for name, x in arguments.items() if isinstance(x, torch.Tensor)}
    if len(set(devices.values())) > 1:
        function = "attention_varlen" if call.is_packed else "attention"
        given = ", ".join(f"{name} on {device}" for name, device in devices.items())
        raise ValueError(f"{function}: all arrays must be on one device, not {given}")


@torch.library.register_fake("cupy_flash::attention_forward", lib=library)
def _fake_forward(*arguments: Any) -> tuple[Any, Any]:
    call = Call(*arguments)
    _require_one_device(call)
    lse_dtype = torch.float64 if call.q.dtype == torch.float64 else torch.float32
    out = call.q.new_empty((*call.q.shape[:-1], call.v.shape[-1]), dtype=_dtype_of_out(call))
    return out, call.q.new_empty(call.lse_shape, dtype=lse_dtype)


@torch.library.register_fake("cupy_flash::attention_backward", lib=library)
def _fake_backward(*arguments: Any) -> tuple[Any, ...]:
    call, saved = _split(arguments)
    _require_one_device(call, saved)
    wanted = (call.q, call.k, call.v, call.bias if saved.bias_gradient else None, call.sink)
    return tuple(_absent(call) if x is None else x.new_empty(x.shape) for x in wanted)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, Any]) -> None:
    """Tensors go through save_for_backward alone: one that hangs on ctx lives as long as anything holds the graph."""
    ctx.set_materialize_grads(False)
    call = Call(*inputs)
    tensors = tuple(call._replace(seed=call.seed if call.dropout else None))[TENSORS]
    ctx.save_for_backward(*tensors, *output)
    ctx.words = tuple(call)[WORDS]


def _differentiate(ctx: Any, dout: Any, dlse: Any) -> tuple[Any, ...]:
    *tensors, out, lse = ctx.saved_tensors
    if dout is None:  # only lse was used
        dout = out.new_zeros(()).expand(out.shape)
    bias_gradient = ctx.needs_input_grad[BIAS]
    dq, dk, dv, dbias, dsink = attention_backward(*tensors, *ctx.words, dout, out, lse, dlse, bias_gradient)
    gradients: list[Any] = [dq, dk, dv, *[None] * (len(Call._fields) - 3)]
    gradients[BIAS] = dbias if bias_gradient else None
    gradients[SINK] = dsink if ctx.needs_input_grad[SINK] else None
    return tuple(gradients)


def _refuse_second_gradient(ctx: Any, *gradients: Any) -> None:
    raise RuntimeError(
        "cupy_flash has no second derivative of attention: the gradient of a loss through it cannot be differentiated "
        "again (create_graph=True)"
    )


torch.library.register_autograd("cupy_flash::attention_forward", _differentiate, setup_context=_save, lib=library)
torch.library.register_autograd("cupy_flash::attention_backward", _refuse_second_gradient, lib=library)


# torch's convention for attention, so that counts compare with those of its own operators: two products of every query
# with every key forward, five backward, whatever a mask hides.


def _score_products(call: Call) -> int:
    """Multiply-adds of one pass over all scores, per unit of head dimension, times 2."""
    if not call.is_packed:
        heads, kv_axis = (2, 1) if call.layout == "bshd" else (1, 2)
        return 2 * call.q.shape[0] * call.q.shape[heads] * call.q.shape[kv_axis] * call.k.shape[kv_axis]
    lengths = (_lengths(call.cu_seqlens_q, call.max_seqlen_q), _lengths(call.cu_seqlens_k, call.max_seqlen_k))
    return 2 * call.q.shape[1] * sum(q_len * kv_len for q_len, kv_len in zip(*lengths, strict=True))


def _lengths(cu_seqlens: Any, longest: int | None) -> list[Any]:
    """The sequences' lengths; the longest for each where tensors have no contents (traced, meta)."""
    if type(cu_seqlens) is torch.Tensor and not cu_seqlens.is_meta:
        return cu_seqlens.diff().tolist()
    return [longest] * (cu_seqlens.shape[0] - 1)


@register_flop_formula(torch.ops.cupy_flash.attention_forward, get_raw=True)
def _forward_flops(*arguments: Any, **_: Any) -> int:
    call = Call(*arguments)
    return _score_products(call) * (call.q.shape[-1] + call.v.shape[-1])


@register_flop_formula(torch.ops.cupy_flash.attention_backward, get_raw=True)
def _backward_flops(*arguments: Any, **_: Any) -> int:
    call, _saved = _split(arguments)
    return _score_products(call) * (3 * call.q.shape[-1] + 2 * call.v.shape[-1])
