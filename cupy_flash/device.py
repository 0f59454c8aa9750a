"""The devices on which a call can run, with the properties that planning needs."""

# No `from __future__ import annotations`, as in records.py.
import os
import platform
import sys
from functools import cache, lru_cache
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from threadpoolctl import ThreadpoolController


NO_TORCH = (
    'torch is not imported: once it is, this engine may compute the call, with other bits (engine="cpu" pins cpu)'
)


class Device(NamedTuple):
    """The properties of a processor on which planning depends."""

    backend: str  # "cpu", "cuda", "simulator"
    arch: str  # "x86_64", "arm64"; "sm_80"
    units: int  # SMs; on a CPU the threads that BLAS may use (OMP_NUM_THREADS, threadpoolctl)
    shared_bytes: int = 0  # largest shared memory of a block
    card: str = ""  # model name of this machine's GPU; "simulator"; "" if only the architecture is known
    driver: str = ""  # the CUDA version that the GPU's driver supports
    torch_flash: str = NO_TORCH  # why torch's flash operators for CPUs cannot be called in this process; "" if they can
    torch_flash_on_request: str = ""  # why they are called only by name; "" if predictions may choose them

    def __str__(self) -> str:
        unit = "thread" if self.backend == "cpu" else "multiprocessor"
        return f"{self.backend} ({self.arch}, {self.units} {unit}{'s' * (self.units != 1)})"


# {architecture: (largest shared memory of a block in KiB, number of SMs of a common GPU)}. The former is from the CUDA
# C++ Programming Guide, "Technical Specifications per Compute Capability".
GPUS = {
    "sm_75": (64, 40),
    "sm_80": (163, 108),
    "sm_86": (99, 84),
    "sm_87": (163, 16),
    "sm_89": (99, 128),
    "sm_90": (227, 132),
    "sm_90a": (227, 132),
    "sm_100": (227, 148),
    "sm_100a": (227, 148),
    "sm_103a": (227, 160),
    "sm_120": (99, 170),
    "sm_121": (99, 48),
}
SIMULATED = "sm_80"  # architecture of backend="simulator"; backend="simulator:sm_90a" selects another architecture


def named(arch: str, backend: str = "simulator") -> Device:
    """Return a GPU by its architecture, to plan, compile or simulate for it without one; ValueError if unknown."""
    if not isinstance(arch, str) or arch not in GPUS:
        raise ValueError(f"unknown GPU architecture {arch!r}; known are {', '.join(GPUS)}")
    shared_kib, units = GPUS[arch]
    return Device(backend, arch, units, shared_kib * 1024, "simulator" if backend == "simulator" else "")


def cpu() -> Device:
    """Return this machine's CPU, with the number of threads that NumPy's BLAS may currently use."""
    missing = torch_flash()
    on_request = "" if missing else less_exact_torch()
    return Device("cpu", platform.machine(), blas_threads(), torch_flash=missing, torch_flash_on_request=on_request)


@lru_cache
def gpu(index: int) -> Device:
    """Return a GPU of this machine by its CUDA index, queried through CuPy."""
    import cupy

    card = cupy.cuda.Device(index)
    # wgmma, tcgen05 and setmaxnreg need the targets with an "a".
    arch = f"sm_{card.compute_capability}"
    arch += "a" * (f"{arch}a" in GPUS)
    attributes = card.attributes
    model = cupy.cuda.runtime.getDeviceProperties(index)["name"].decode()
    version = cupy.cuda.runtime.driverGetVersion()
    return Device(
        "cuda",
        arch,
        attributes["MultiProcessorCount"],
        attributes["MaxSharedMemoryPerBlockOptin"],
        model,
        f"{version // 1000}.{version % 1000 // 10}",
    )


@lru_cache(maxsize=1)
def blas_controller() -> "ThreadpoolController":
    """Return the threadpoolctl controller of NumPy's BLAS, cached because finding the libraries takes milliseconds."""
    from threadpoolctl import ThreadpoolController

    return ThreadpoolController().select(user_api="blas")


def blas() -> str:
    """Return the BLAS libraries that NumPy has loaded and their threads, as threadpoolctl reports them."""
    try:
        from threadpoolctl import threadpool_info
    except ImportError as error:
        return f"unknown: {error}"
    libraries = [library for library in threadpool_info() if library["user_api"] == "blas"]
    if not libraries:
        return "none that threadpoolctl knows"
    return ", ".join(
        f"{library['internal_api']} {library['version']}, {library['num_threads']} threads" for library in libraries
    )


def blas_threads() -> int:
    """Return the number of threads that BLAS may currently use; 1 for a BLAS that threadpoolctl does not know."""
    return max((library.num_threads for library in blas_controller().lib_controllers), default=1)


# The operators by which torch's SDPA computes on a CPU. They are private, so a release may change them.
FLASH_OPERATORS = {
    "_scaled_dot_product_flash_attention_for_cpu": (
        "(Tensor query, Tensor key, Tensor value, float dropout_p=0., bool is_causal=False, *, Tensor? attn_mask=None, "
        "float? scale=None) -> (Tensor output, Tensor logsumexp)"
    ),
    "_scaled_dot_product_flash_attention_for_cpu_backward": (
        "(Tensor grad_out, Tensor query, Tensor key, Tensor value, Tensor out, Tensor logsumexp, float dropout_p, "
        "bool is_causal, *, Tensor? attn_mask=None, float? scale=None) "
        "-> (Tensor grad_query, Tensor grad_key, Tensor grad_value)"
    ),
}


def torch_flash() -> str:
    """Return why torch's flash operators for CPUs cannot be called; "" if they can. It never imports torch."""
    torch = sys.modules.get("torch")
    if torch is None or getattr(torch.__spec__, "_initializing", False):
        return NO_TORCH
    return state_of_torch()


def state_of_torch() -> str:
    """Return why the operators cannot be called if torch has been imported; "" if they can."""
    torch = sys.modules["torch"]
    if torch.nn.attention.current_flash_attention_impl() == "cupy_flash":
        return "activate_flash_attention_impl has replaced the operators by cupy_flash"
    if _forked:
        return "a forked child lacks the threads of torch's pool, for which an operator would wait forever"
    if torch._C._len_torch_dispatch_stack():
        return "a mode of torch that sees every operator is active: its tensors may hold no numbers"
    if (changed := _changed_schema()) != "":
        return changed
    # torch.get_float32_matmul_precision() raises an error if only one of torch's backends rounds, and the attribute
    # torch.backends.mkldnn.matmul.fp32_precision takes ten times as long.
    precision = torch._C._get_fp32_precision_getter("mkldnn", "matmul")
    if precision not in ("none", "ieee"):
        return f"torch may round the factors of float32 products to {precision}: torch.set_float32_matmul_precision"
    return ""


def less_exact_torch() -> str:
    """Return why torch's flash operators are called only on request: their exponentials with AVX-512; else "".

    The function exp_u20 promises 20 units in the last place there, and is the usual exponential on other machines.
    """
    import torch

    if torch.backends.cpu.get_cpu_capability() != "AVX512":
        return ""
    return (
        "with AVX-512 the operators' exponentials err by up to 20 units in the last place, which no test has seen yet, "
        'so it runs only on request: engine="aten"'
    )


@cache
def _changed_schema() -> str:
    """Return which flash operator this version of torch lacks or has with other arguments, logged once; else ""."""
    import logging

    import torch

    for name, arguments in FLASH_OPERATORS.items():
        operator = getattr(torch.ops.aten, name, None)
        found = "no such operator" if operator is None else str(operator.default._schema)
        if found != f"aten::{name}{arguments}":
            reason = f"torch {torch.__version__} changed a private operator that this version of cupy_flash calls"
            logging.getLogger("cupy_flash.device").info("%s: %s, %s", reason, name, found)
            return reason
    return ""


_forked = False


def _note_fork() -> None:
    global _forked
    _forked = True


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_note_fork)


def is_forked() -> bool:
    """Return whether this process is a forked child, which lacks the threads that its parent had started."""
    return _forked
