"""The implementations that the CPU benchmark compares, all on the same (B, H, S, D) arrays."""

from __future__ import annotations

import importlib.util
import multiprocessing
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

import cupy_flash
from cupy_flash.device import blas_threads

from .model import Case

Array = npt.NDArray[Any]

OURS = "cupy_flash"
OURS_ON_TORCH = "cupy_flash, torch"
BASELINE = "SDPA flash"  # relative times are divided by the time of this implementation
FLEX_ATTENTION = "FlexAttention"
FLEX_SECONDS = 60  # timeout for compiling FlexAttention


class Inputs(NamedTuple):
    """Random normal arrays: q, dout (B, Hq, S, D), k, v (B, Hk, S, D)."""

    q: Array
    k: Array
    v: Array
    dout: Array


class Implementation(Protocol):
    """An attention implementation, bound to its inputs."""

    def forward(self) -> Any:
        """Return the result and, in training, the values that the backward needs."""

    def backward(self, saved: Any) -> Any:
        """Return the gradients; `saved` is what `forward` returned in training."""

    def arrays(self, result: Any) -> tuple[Array, ...]:
        """Convert what `forward` or `backward` returned to NumPy arrays: (out,) or (dq, dk, dv)."""


class CupyFlash:
    """cupy_flash on NumPy arrays."""

    def __init__(self, case: Case, inputs: Inputs, training: bool) -> None:
        self.inputs, self.training = inputs, training
        self.options: dict[str, Any] = dict(causal=case.causal, layout="bhsd")

    def forward(self) -> Any:
        """Return (out,), or (out, lse) in training."""
        result = cupy_flash.attention(*self.inputs[:3], **self.options, return_lse=self.training)
        return result if self.training else (result,)

    def backward(self, saved: Any) -> Any:
        """Return the Gradients."""
        q, k, v, dout = self.inputs
        return cupy_flash.attention_backward(dout, q, k, v, *saved, **self.options)

    def arrays(self, result: Any) -> tuple[Array, ...]:
        """Return (out,) or (dq, dk, dv), which are NumPy arrays already."""
        return tuple(result[: 3 if isinstance(result, cupy_flash.Gradients) else 1])


class Standard:
    """Standard attention in NumPy, which materializes scores and probabilities."""

    def __init__(self, case: Case, inputs: Inputs, training: bool) -> None:
        self.dtype = inputs.q.dtype
        self.compute = np.dtype(np.float64 if case.dtype == "float64" else np.float32)
        self.q, self.dout = (self._grouped(x, case) for x in (inputs.q, inputs.dout))
        self.k, self.v = (self._grouped(x, case) for x in (inputs.k, inputs.v))
        self.scale = self.compute.type(case.head_dim**-0.5)
        self.masked = np.triu(np.ones((case.seqlen, case.seqlen), bool), 1) if case.causal else None

    def _grouped(self, x: Array, case: Case) -> Array:
        """Reshape to (B, Hk, Hq / Hk or 1, S, D), so that each key/value head broadcasts over its query heads."""
        return x.reshape(case.batch, case.kv_heads, -1, case.seqlen, case.head_dim).astype(self.compute, copy=False)

    def forward(self) -> Any:
        """Return (out, probabilities)."""
        scores = (self.q * self.scale) @ self.k.swapaxes(-1, -2)
        if self.masked is not None:
            np.copyto(scores, -np.inf, where=self.masked)
        scores -= scores.max(axis=-1, keepdims=True)
        probabilities = np.exp(scores, out=scores)
        probabilities /= probabilities.sum(axis=-1, keepdims=True)
        return probabilities @ self.v, probabilities

    def backward(self, saved: Any) -> Any:
        """Return (dq, dk, dv), with dk and dv summed over the query heads of a group."""
        out, probabilities = saved
        dv = probabilities.swapaxes(-1, -2) @ self.dout
        dscores = self.dout @ self.v.swapaxes(-1, -2)
        dscores -= (self.dout * out).sum(axis=-1, keepdims=True)
        dscores *= probabilities
        dq = dscores @ self.k * self.scale
        dk = dscores.swapaxes(-1, -2) @ self.q * self.scale
        return dq, dk.sum(axis=2, keepdims=True), dv.sum(axis=2, keepdims=True)

    def arrays(self, result: Any) -> tuple[Array, ...]:
        """Undo the grouping of heads and round to the dtype of the case."""
        outputs = result if len(result) == 3 else result[:1]
        return tuple(x.reshape(x.shape[0], -1, *x.shape[3:]).astype(self.dtype) for x in outputs)


class Torch(ABC):
    """Base of the torch implementations: as many threads as NumPy's BLAS, no copy of inputs, gradients by autograd."""

    def __init__(self, case: Case, inputs: Inputs, training: bool) -> None:
        import torch

        torch.set_num_threads(blas_threads())
        self.case, self.training = case, training
        self.q, self.k, self.v, self.dout = (_tensor(x) for x in inputs)
        for x in (self.q, self.k, self.v):
            x.requires_grad_(training)
        self.gradients_recorded = partial(torch.set_grad_enabled, training)

    @abstractmethod
    def attend(self) -> Any:
        """Return the output, (B, H, S, Dv)."""

    def forward(self) -> Any:
        """Return (out,), with its graph in training."""
        with self.gradients_recorded():
            return (self.attend(),)

    def backward(self, saved: Any) -> Any:
        """Return (dq, dk, dv) by autograd."""
        import torch

        return torch.autograd.grad(saved[0], (self.q, self.k, self.v), self.dout)

    def arrays(self, result: Any) -> tuple[Array, ...]:
        """Convert tensors to NumPy arrays."""
        return tuple(_array(x) for x in result)


class CupyFlashOnTorch(Torch):
    """cupy_flash on torch tensors."""

    def attend(self) -> Any:
        """Return the output."""
        return cupy_flash.attention(self.q, self.k, self.v, causal=self.case.causal, layout="bhsd")


class ScaledDotProductAttention(Torch):
    """torch's scaled_dot_product_attention, restricted to one backend."""

    def __init__(self, backend: str, case: Case, inputs: Inputs, training: bool) -> None:
        super().__init__(case, inputs, training)
        from torch.nn.attention import SDPBackend, sdpa_kernel
        from torch.nn.functional import scaled_dot_product_attention

        self.select_backend = partial(sdpa_kernel, getattr(SDPBackend, backend))
        self.function = partial(
            scaled_dot_product_attention, is_causal=case.causal, enable_gqa=case.heads != case.kv_heads
        )

    def attend(self) -> Any:
        """Return the output of this backend; torch raises if the backend does not support the case."""
        with self.select_backend():
            return self.function(self.q, self.k, self.v)


class FlexAttention(Torch):
    """torch's FlexAttention, compiled once with dynamic shapes; it has no backward on the CPU."""

    def __init__(self, case: Case, inputs: Inputs, training: bool) -> None:
        super().__init__(case, inputs, training)
        from torch.nn.attention.flex_attention import create_block_mask

        length = case.seqlen
        self.block_mask = create_block_mask(_causal, None, None, length, length, "cpu") if case.causal else None

    def attend(self) -> Any:
        """Return the output of the compiled function."""
        enable_gqa = self.case.heads != self.case.kv_heads
        return _compiled_flex_attention()(self.q, self.k, self.v, block_mask=self.block_mask, enable_gqa=enable_gqa)


# {name in tables: name of the SDPBackend}
SDPA_BACKENDS = {
    "SDPA flash": "FLASH_ATTENTION",
    "SDPA efficient": "EFFICIENT_ATTENTION",
    "SDPA cuDNN": "CUDNN_ATTENTION",
    "SDPA math": "MATH",
}
IMPLEMENTATIONS: dict[str, Callable[[Case, Inputs, bool], Implementation]] = {
    OURS: CupyFlash,
    OURS_ON_TORCH: CupyFlashOnTorch,
    "standard": Standard,
    **{name: partial(ScaledDotProductAttention, backend) for name, backend in SDPA_BACKENDS.items()},
    FLEX_ATTENTION: FlexAttention,
}
COMPARED = (OURS, OURS_ON_TORCH, BASELINE)  # of these the ratios of alternating calls are reported
HOLDS_SCORES = ("standard", "SDPA math")  # these materialize the score matrices


def limit_threads(threads: int) -> AbstractContextManager[Any]:
    """Limit NumPy's BLAS, whose thread count all implementations use, to this many threads."""
    from threadpoolctl import threadpool_limits

    limits: AbstractContextManager[Any] = threadpool_limits(threads, user_api="blas")
    return limits


def random_inputs(case: Case) -> Inputs:
    """Return the inputs of a case, from a fixed seed; head by head, as larger temporaries would raise peak memory."""
    if case.dtype == "bfloat16":
        from ml_dtypes import bfloat16

        dtype = np.dtype(bfloat16)
    else:
        dtype = np.dtype(case.dtype)
    rng = np.random.default_rng(0)

    def normal(shape: tuple[int, ...]) -> Array:
        x = np.empty(shape, dtype)
        for head in x.reshape(-1, *shape[2:]):
            head[...] = rng.standard_normal(head.shape, np.float64 if dtype == np.float64 else np.float32)
        return x

    return Inputs(*(normal(shape) for shape in (case.q_shape, case.kv_shape, case.kv_shape, case.q_shape)))


def present(cases: Sequence[Case], training: bool) -> tuple[list[str], dict[str, str]]:
    """Return the implementations that can run small versions of these cases on this machine, and why others cannot."""
    names, left_out = [OURS, "standard"], {}
    if importlib.util.find_spec("torch") is None:
        return names, dict.fromkeys((OURS_ON_TORCH, *SDPA_BACKENDS, FLEX_ATTENTION), "torch is not installed")
    names.insert(1, OURS_ON_TORCH)
    small = {replace(case, seqlen=128) for case in cases}
    for name in SDPA_BACKENDS:
        try:
            for case in small:
                implementation = IMPLEMENTATIONS[name](case, random_inputs(case), training)
                result = implementation.forward()
                if training:
                    implementation.backward(result)
            names.append(name)
        except RuntimeError as error:
            left_out[name] = str(error).partition(". ")[0]
    if training:
        left_out[FLEX_ATTENTION] = "has no backward on a CPU"
    elif reason := _flex_attention_fails(small):
        left_out[FLEX_ATTENTION] = reason
    else:
        names.append(FLEX_ATTENTION)
    installed = importlib.util.find_spec("flash_attn") is not None
    left_out["flash-attn"] = "takes CUDA tensors only" if installed else "not installed"
    return names, left_out


def _flex_attention_fails(cases: Iterable[Case]) -> str | None:
    """Return why FlexAttention cannot be compiled within FLEX_SECONDS; None if it can.

    A child process compiles it, because a process can be killed at the timeout. This process then loads the result from
    torch's on-disk cache.
    """
    process = multiprocessing.get_context("spawn").Process(target=_compile_flex_attention, args=(cases, blas_threads()))
    process.start()
    process.join(FLEX_SECONDS)
    if process.is_alive():
        process.kill()
        process.join()
        return f"did not compile within {FLEX_SECONDS} s"
    return None if process.exitcode == 0 else "torch.compile failed, see stderr"


def _compile_flex_attention(cases: Iterable[Case], threads: int) -> None:
    with limit_threads(threads):
        for case in cases:
            FlexAttention(case, random_inputs(case), training=False).forward()


@lru_cache(maxsize=1)
def _compiled_flex_attention() -> Any:
    import torch
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=True)


def _causal(b: Any, h: Any, q_index: Any, kv_index: Any) -> Any:
    return q_index >= kv_index


def _tensor(x: Array) -> Any:
    import torch

    # torch does not know ml_dtypes' bfloat16: pass the bits as int16.
    return (
        torch.from_numpy(x.view(np.int16)).view(torch.bfloat16) if x.dtype.name == "bfloat16" else torch.from_numpy(x)
    )


def _array(x: Any) -> Array:
    import torch

    x = x.detach()
    return x.float().numpy() if x.dtype == torch.bfloat16 else x.numpy()
