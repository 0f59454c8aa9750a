"""GPU benchmark: time torch.matmul, every other implementation and cupy_flash.

Samples are interleaved, L2 is flushed before each, inputs are random normal, times are CUDA-event medians, and SM clock
and power are recorded with every case. Measurements run in a worker process: an implementation that crashes or hangs it
is left out, with the reason, and the others are measured again without it. An existing output file is resumed: its
finished cases are kept.
"""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from cupy_flash.measure.worker_process import Announce, Lost, OutOfTime, Worker, ended_by_signal, one_line
from cupy_flash.problem.records import FP8

from .implementations import FLEX_ATTENTION, OURS
from .results import describe, write

Call = Callable[[], Any]


class Regime(NamedTuple):
    """One self-attention problem with B * S = tokens and H * D = 2048; the FlashAttention papers use 16384 tokens."""

    dtype: str
    head_dim: int
    seqlen: int
    causal: bool
    backward: bool = False
    head_dim_v: int | None = None
    tokens: int = 16384
    deterministic: bool = False

    @classmethod
    def of(cls, case: Mapping[str, Any]) -> Regime:
        """Return the regime of a stored record."""
        return cls(**{name: case[name] for name in cls._fields})

    @property
    def record(self) -> dict[str, Any]:
        """The fields that describe this regime in a stored record."""
        return {
            "regime": self.name, **self._asdict(), "batch": self.batch, "heads": self.heads, "flops": self.flops,
        }  # fmt: skip

    @property
    def name(self) -> str:
        """A readable name, unique among the regimes."""
        dim = f"D {self.head_dim}" + (f", Dv {self.head_dim_v}" if self.head_dim_v else "")
        mask = "causal" if self.causal else "full"
        order = ", deterministic" if self.deterministic else ""
        return f"{'backward' if self.backward else 'forward'} {self.dtype}, {dim}, {mask}, {self.seqlen}{order}"

    @property
    def batch(self) -> int:
        """The number of sequences, so that the batch has `tokens` tokens; at least one."""
        return max(self.tokens // self.seqlen, 1)

    @property
    def heads(self) -> int:
        """The number of heads, so that the hidden size is 2048."""
        return max(2048 // self.head_dim, 1)

    @property
    def flops(self) -> float:
        """FLOPs of two matmuls forward or five backward, halved when causal."""
        dims = self.head_dim + (self.head_dim_v or self.head_dim)
        forward = 2 * self.batch * self.heads * self.seqlen**2 * dims * (0.5 if self.causal else 1)
        return forward * (2.5 if self.backward else 1)


DEVICE = "cuda"
SAMPLES, WARM_UP = 15, 3
SECONDS_OF_ONE = 2.0  # time budget per implementation and regime: sampling stops once it is spent
FLUSHES = 8  # L2 flushes before a sample: one clears L2, eight keep the GPU busy until the host has launched the call
# Timeouts in seconds: one call or sample; creating inputs; compiling.
SECONDS_OF_STEP, SECONDS_OF_INPUTS, SECONDS_OF_COMPILING = 20.0, 60.0, 150.0
OVERTIME = 40.0  # seconds that the last regime may exceed the time budget of the run
KIND_LOSSES = 2  # a kind of tile that has killed the worker in this many regimes is not tried again


Inputs = tuple[Any, Any, Any, Any]


def inputs(regime: Regime) -> Inputs:
    """Random normal q, k, v and dout on the GPU, (B, H, S, D)."""
    import torch

    torch.manual_seed(0)

    def tensor(dim: int) -> Any:
        x = torch.randn((regime.batch, regime.heads, regime.seqlen, dim), device=DEVICE)
        return x.to(getattr(torch, regime.dtype)).requires_grad_(regime.backward)

    dim_v = regime.head_dim_v or regime.head_dim
    return tensor(regime.head_dim), tensor(regime.head_dim), tensor(dim_v), tensor(dim_v).detach()


def others(regime: Regime, tensors: Inputs) -> dict[str, Call]:
    """Return a call per other implementation; a call raises if it does not support the regime.

    For fp8 and for deterministic gradients no other implementation is called.
    """
    if regime.dtype == FP8 or regime.deterministic:
        return {}
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    q, k, v, dout = tensors

    def sdpa(backend: Any) -> Any:
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(q, k, v, is_causal=regime.causal)

    if regime.dtype in ("float16", "bfloat16"):
        forwards: dict[str, Call] = {
            "SDPA flash": partial(sdpa, SDPBackend.FLASH_ATTENTION),
            "SDPA cuDNN": partial(sdpa, SDPBackend.CUDNN_ATTENTION),
            "flash-attn": partial(_flash_attn, q, k, v, regime.causal),
        }
    else:  # flash, cuDNN and flash-attn support 16-bit dtypes only
        forwards = {
            "SDPA efficient": partial(sdpa, SDPBackend.EFFICIENT_ATTENTION),
            "SDPA math": partial(sdpa, SDPBackend.MATH),
        }
    forwards[FLEX_ATTENTION] = _flex_attention(q, k, v, regime.causal)
    return {name: _timed(forward, (q, k, v), dout, regime.backward) for name, forward in forwards.items()}


def ours(regime: Regime, tensors: Inputs) -> dict[str, Call]:
    """Return the call of cupy_flash.attention."""
    import cupy_flash

    q, k, v, dout = tensors
    call = partial(
        cupy_flash.attention, q, k, v, causal=regime.causal, layout="bhsd", deterministic=regime.deterministic
    )
    return {OURS: _timed(call, (q, k, v), dout, regime.backward)}


def _timed(forward: Call, operands: tuple[Any, ...], dout: Any, backward: bool) -> Call:
    """Return a call of the forward, or of the backward alone, which reuses the autograd graph of one forward."""
    if not backward:
        return forward
    outputs: list[Any] = []

    def gradients() -> Any:
        import torch

        if not outputs:
            outputs.append(forward())
        return torch.autograd.grad(outputs[0], operands, dout, retain_graph=True)

    return gradients


def _flex_attention(q: Any, k: Any, v: Any, causal: bool) -> Call:
    """Return a call of FlexAttention, which compiles for these sizes at the first call."""
    compiled: list[Call] = []

    def call() -> Any:
        if not compiled:
            compiled.append(_compiled_flex_attention(q, k, v, causal))
        return compiled[0]()

    return call


def _compiled_flex_attention(q: Any, k: Any, v: Any, causal: bool) -> Call:
    import torch
    import torch._functorch.config
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    torch.compiler.reset()  # above dynamo's recompile limit, FlexAttention would silently run uncompiled
    # A backward with donated buffers overwrites saved tensors and cannot run twice.
    torch._functorch.config.donated_buffer = False
    length = q.shape[-2]
    mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, length, length, q.device) if causal else None
    return partial(torch.compile(flex_attention, dynamic=False), q, k, v, block_mask=mask)


def _flash_attn(q: Any, k: Any, v: Any, causal: bool) -> Any:
    flash_attn = importlib.import_module("flash_attn")
    return flash_attn.flash_attn_func(*(x.transpose(1, 2) for x in (q, k, v)), causal=causal).transpose(1, 2)


def kind(name: str) -> str:
    """Return a tile's name without sizes: if one tile crashes or hangs, others of its kind probably do, too."""
    return re.sub(r"\d+", "", name)


def measure(regime: Regime, calls: Mapping[str, Call], lost: Mapping[str, str], announce: Announce) -> dict[str, Any]:
    """Return the record of a regime: milliseconds of all samples by implementation, and why some were left out.

    `lost` maps the kinds of tiles that have killed the worker to the reason; they are not called.
    """
    import torch

    working, left_out = {}, {}
    states = gpu_states()
    for name, call in calls.items():
        if kind(name) in lost:
            left_out[name] = lost[kind(name)]
            continue
        announce(name, SECONDS_OF_COMPILING if name == FLEX_ATTENTION else SECONDS_OF_STEP)
        try:
            for _ in range(WARM_UP):
                call()
            torch.cuda.synchronize()
            working[name] = call
        except Exception as error:  # other libraries may raise anything; the reason is part of the result
            left_out[name] = one_line(error)
            torch.cuda.synchronize()  # raises again after a sticky CUDA error: other measurements need a new process
    first_state = len(states)
    samples = time_interleaved(working, announce)
    state = summary(states[first_state:])
    torch.cuda.empty_cache()
    tflops = {name: regime.flops / median(times) / 1e9 for name, times in samples.items()}
    return regime.record | {"milliseconds": samples, "tflops": tflops, "left_out": left_out, "gpu": state}


def time_interleaved(calls: Mapping[str, Call], announce: Announce) -> dict[str, list[float]]:
    """Return milliseconds per call, sampled round-robin, with L2 flushed before each sample."""
    import torch

    flush = torch.empty(256 * 2**20, dtype=torch.int8, device="cuda")
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(SAMPLES):
        for name, call in calls.items():
            if sum(samples[name]) > 1e3 * SECONDS_OF_ONE and len(samples[name]) >= 3:
                continue
            announce(name, SECONDS_OF_STEP)
            for _ in range(FLUSHES):
                flush.zero_()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            call()
            end.record()
            end.synchronize()
            samples[name].append(round(begin.elapsed_time(end), 5))
    return samples


@lru_cache(maxsize=1)
def matmul() -> dict[str, Any]:
    """Time torch.matmul bf16 at 8192^3, once per process: the speed to which the sweep's column R_mm compares ours."""
    import torch

    states = gpu_states()
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    for _ in range(WARM_UP):
        a @ b
    first_state = len(states)
    samples = time_interleaved({"matmul": lambda: a @ b}, lambda step, seconds: None)["matmul"]
    return {
        "milliseconds": samples,
        "tflops": 2 * 8192**3 / median(samples) / 1e9,
        "gpu": summary(states[first_state:]),
    }


@lru_cache(maxsize=1)
def gpu_states() -> list[str]:
    """Return a list to which nvidia-smi appends "SM clock in MHz, power in W" every 100 ms; empty if not installed."""
    query = ["nvidia-smi", "--query-gpu=clocks.sm,power.draw", "--format=csv,noheader,nounits", "-lms", "100"]
    lines: list[str] = []
    try:
        process = subprocess.Popen(query, stdout=subprocess.PIPE, text=True)
    except FileNotFoundError:
        return lines

    def read() -> None:
        for line in process.stdout or ():
            lines.append(line)

    threading.Thread(target=read, daemon=True).start()
    return lines


def summary(lines: Sequence[str]) -> dict[str, Any]:
    """Return median, minimum and maximum of SM clock and power."""
    rows = [re.fullmatch(r"\s*([\d.]+)\s*,\s*([\d.]+)\s*", line) for line in lines]
    numbers = [tuple(map(float, row.groups())) for row in rows if row]
    state: dict[str, Any] = {"samples": len(numbers)}
    for name, column in zip(("sm_clock_mhz", "power_w"), zip(*numbers, strict=True), strict=False):
        state[name] = {"median": median(column), "least": min(column), "most": max(column)}
    return state


Measure = Callable[[Regime, Mapping[str, str], Announce], dict[str, Any]]


def measure_others(regime: Regime, lost: Mapping[str, str], announce: Announce) -> dict[str, Any]:
    """Measure the tile that the plan chooses and every other implementation."""
    announce("inputs", SECONDS_OF_INPUTS)
    tensors = inputs(regime)
    return measure(regime, others(regime, tensors) | ours(regime, tensors), lost, announce)


def measure_with_matmul(
    measure_one: Measure, regime: Regime, lost: Mapping[str, str], announce: Announce
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the record of a regime, and the record of torch.matmul in the same process."""
    import torch

    announce("torch.matmul", SECONDS_OF_INPUTS)
    torch.backends.cuda.matmul.allow_tf32 = False
    ceiling = matmul()
    return measure_one(regime, lost, announce) | {"matmul_tflops": ceiling["tflops"]}, ceiling


def run(regimes: Sequence[Regime], measure_one: Measure, seconds: float, out: Path, command: Sequence[str]) -> int:
    """Measure the regimes that the file `out` does not contain; return the exit status, 3 if time ran out."""
    import torch

    if not torch.cuda.is_available():
        print("bench: torch finds no GPU here", file=sys.stderr)
        return 2
    result = describe(list(command[1:]), torch.get_num_threads())
    result["command"] = " ".join(command)
    result["device"]["multiprocessors"] = torch.cuda.get_device_properties(0).multi_processor_count
    result["versions"]["cuda"], result["versions"]["cudnn"] = torch.version.cuda, torch.backends.cudnn.version()
    previous = json.loads(out.read_text(encoding="utf-8")) if out.is_file() else {}
    result["cases"], result["losses"] = previous.get("cases", []), previous.get("losses", [])
    done = {case["regime"] for case in result["cases"]}
    pending = [regime for regime in regimes if regime.name not in done]
    begin = time.monotonic()
    durations: list[float] = []
    with ended_by_signal(), Worker(partial(measure_with_matmul, measure_one)) as worker:
        for measured, regime in enumerate(pending):
            started = time.monotonic()
            try:
                if started - begin + median(durations or [0]) > seconds:
                    raise OutOfTime
                case, ceiling = _measure_isolated(worker, regime, result["losses"], begin + seconds + OVERTIME)
            except OutOfTime:
                print(f"out of time: {len(pending) - measured} regimes are left, run again to resume", file=sys.stderr)
                write(result, out)
                return 3
            result["cases"].append(case)
            result["matmul"] = ceiling or result.get("matmul")
            write(result, out)
            now = time.monotonic()
            durations.append(now - started)
            remaining = len(pending) - measured - 1
            print("\n".join(lines_of(case)))
            seconds_left = (now - begin) / (measured + 1) * remaining
            print(f"  {remaining} regimes are left, about {seconds_left:.0f} s", flush=True)
    write(result, out)
    return 0


def _measure_isolated(
    worker: Worker, regime: Regime, losses: list[dict[str, str]], until: float
) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Measure a regime in the worker. If a tile kills it, add the tile to `losses` and repeat without its kind."""
    while True:
        kind_losses = Counter(kind(loss["name"]) for loss in losses)
        lost = {
            kind(loss["name"]): f"{loss['name']} {loss['reason']} ({loss['regime']})"
            for loss in losses
            if loss["regime"] == regime.name or kind_losses[kind(loss["name"])] >= KIND_LOSSES
        }
        try:
            case, ceiling = worker(regime, lost, until=until)
            return case, ceiling
        except Lost as loss:
            print(f"  {regime.name}: worker lost: {loss}", flush=True)
            if kind(loss.step) in lost:  # an excluded step has killed the worker again: give up this regime
                left_out = lost | {loss.step: loss.reason}
                empty = {"milliseconds": {}, "tflops": {}, "tiles": [], "left_out": left_out, "gpu": summary([])}
                return regime.record | empty, None
            losses.append({"regime": regime.name, "name": loss.step, "reason": loss.reason})


def lines_of(case: dict[str, Any]) -> list[str]:
    """Return a record as lines of text, the fastest implementation first."""
    lines = [case["regime"]]
    for name, tflops in sorted(case["tflops"].items(), key=lambda item: -item[1]):
        lines.append(f"  {tflops:6.1f} TFLOP/s, {median(case['milliseconds'][name]):.3f} ms: {name}")
    return lines + [f"  left out {name}: {reason}" for name, reason in case["left_out"].items()]


def our_tflops(case: dict[str, Any]) -> dict[str, float]:
    """Return TFLOP/s of our tiles, or of cupy_flash.attention."""
    names = {tile["name"] for tile in case.get("tiles", ())} | {OURS}
    return {name: speed for name, speed in case["tflops"].items() if name in names}


def tflops_of_others(case: dict[str, Any]) -> dict[str, float]:
    """Return TFLOP/s of the other implementations."""
    own = our_tflops(case)
    return {name: speed for name, speed in case["tflops"].items() if name not in own}


def fastest(case: dict[str, Any]) -> str | None:
    """Return the name of our fastest tile; None if none was measured."""
    tflops = our_tflops(case)
    return max(tflops, key=tflops.__getitem__, default=None)
