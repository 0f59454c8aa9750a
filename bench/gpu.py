"""On a GPU: torch.matmul, every peer, and ours where it serves: python -m bench.gpu peers|simt.

Interleaved, L2 flushed before each sample, random normal data, CUDA events, medians; SM clock and power beside every
case. A file that exists is continued: its finished cases are kept, so that a run which was cut off can go on.
"""

from __future__ import annotations

import argparse
import importlib
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from .results import describe, write

Call = Callable[[], Any]


class Regime(NamedTuple):
    """Self-attention: B * S tokens of H heads; the FlashAttention papers' sizes have 16384 tokens and H * D = 2048."""

    dtype: str
    head_dim: int
    seqlen: int
    causal: bool
    backward: bool = False
    head_dim_v: int | None = None
    tokens: int = 16384

    @property
    def name(self) -> str:
        dim = f"D {self.head_dim}" + (f", Dv {self.head_dim_v}" if self.head_dim_v else "")
        mask = "causal" if self.causal else "full"
        return f"{'backward' if self.backward else 'forward'} {self.dtype}, {dim}, {mask}, {self.seqlen}"

    @property
    def batch(self) -> int:
        return max(self.tokens // self.seqlen, 1)

    @property
    def heads(self) -> int:
        return max(2048 // self.head_dim, 1)

    @property
    def flops(self) -> float:
        """Two products forward, five backward, half when causal."""
        dims = self.head_dim + (self.head_dim_v or self.head_dim)
        forward = 2 * self.batch * self.heads * self.seqlen**2 * dims * (0.5 if self.causal else 1)
        return forward * (2.5 if self.backward else 1)


BF16 = partial(Regime, "bfloat16")
REGIMES = {
    "peers": [
        BF16(128, 8192, False), BF16(128, 16384, False), BF16(128, 16384, True), BF16(128, 4096, True),
        BF16(128, 1024, True), BF16(64, 16384, False), BF16(64, 16384, True), BF16(256, 16384, False),
        BF16(256, 16384, True), BF16(192, 8192, True, head_dim_v=128), BF16(64, 512, False), BF16(128, 512, False),
        BF16(256, 512, False), BF16(128, 16384, False, True), BF16(128, 16384, True, True),
        BF16(64, 16384, False, True), BF16(256, 16384, False, True),
    ],
    "simt": [
        Regime(dtype, dim, seqlen, causal, backward, tokens=4096)
        for dtype, dim in (("float32", 64), ("float32", 128), ("float64", 64))
        for seqlen in (1024, 4096)
        for causal in (False, True)
        for backward in (False, True)
    ],
}  # fmt: skip
SAMPLES, WARM_UP = 15, 3
SECONDS_OF_ONE = 2.0  # a peer that has been measured for this long in one regime sits out the rest of its samples


def peers(regime: Regime, ours: bool) -> dict[str, Call]:
    """What to time of every implementation: a call on tensors (B, H, S, D) made for it. Each may yet refuse."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    dtype = getattr(torch, regime.dtype)
    torch.manual_seed(0)

    def tensor(dim: int) -> Any:
        shape = (regime.batch, regime.heads, regime.seqlen, dim)
        return torch.randn(shape, device="cuda", dtype=dtype, requires_grad=regime.backward)

    q, k = tensor(regime.head_dim), tensor(regime.head_dim)
    v = tensor(regime.head_dim_v or regime.head_dim)
    dout = torch.randn(*q.shape[:-1], v.shape[-1], device="cuda", dtype=dtype)

    def timed(forward: Call) -> Call:
        """The forward, or the backward alone of one forward."""
        if not regime.backward:
            return forward
        kept: list[Any] = []

        def backward() -> Any:
            if not kept:
                kept.append(forward())
            return torch.autograd.grad(kept[0], (q, k, v), dout, retain_graph=True)

        return backward

    def sdpa(backend: Any) -> Any:
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(q, k, v, is_causal=regime.causal)

    def flex() -> Any:
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        torch.compiler.reset()  # it compiles for few lengths, and would go on without compiling
        mask = None
        if regime.causal:
            mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, regime.seqlen, regime.seqlen, "cuda")
        compiled = torch.compile(flex_attention, dynamic=False)
        flex_calls.append(lambda: compiled(q, k, v, block_mask=mask))
        return flex_calls[0]()

    flex_calls: list[Call] = []
    found = {
        "SDPA flash": timed(lambda: sdpa(SDPBackend.FLASH_ATTENTION)),
        "SDPA cuDNN": timed(lambda: sdpa(SDPBackend.CUDNN_ATTENTION)),
        "SDPA efficient": timed(lambda: sdpa(SDPBackend.EFFICIENT_ATTENTION)),
        "SDPA math": timed(lambda: sdpa(SDPBackend.MATH)),
        "FlexAttention": timed(lambda: flex_calls[0]() if flex_calls else flex()),
        "flash-attn": timed(partial(_flash_attn, q, k, v, regime.causal)),
    }
    if ours:
        import cupy_flash

        found["cupy_flash"] = timed(lambda: cupy_flash.attention(q, k, v, causal=regime.causal, layout="bhsd"))
    return found


def _flash_attn(q: Any, k: Any, v: Any, causal: bool) -> Any:
    flash_attn = importlib.import_module("flash_attn")
    return flash_attn.flash_attn_func(*(x.transpose(1, 2) for x in (q, k, v)), causal=causal).transpose(1, 2)


def measure(regime: Regime, calls: dict[str, Call]) -> dict[str, Any]:
    """The record of a regime: milliseconds of every sample by implementation, and why the others have none."""
    import torch

    serving, left_out = {}, {}
    for name, call in calls.items():
        try:
            for _ in range(WARM_UP):
                call()
            torch.cuda.synchronize()
            serving[name] = call
        except Exception as error:  # a peer refuses with any exception; the reason is part of the result
            left_out[name] = f"{type(error).__name__}: {error}".splitlines()[0][:300]
    with sampled_gpu() as states:
        samples = time_interleaved(serving)
    torch.cuda.empty_cache()
    tflops = {name: regime.flops / median(times) / 1e9 for name, times in samples.items()}
    return {
        "regime": regime.name, **regime._asdict(), "batch": regime.batch, "heads": regime.heads, "flops": regime.flops,
        "milliseconds": samples, "tflops": tflops, "left_out": left_out, "gpu": summary(states),
    }  # fmt: skip


def time_interleaved(calls: dict[str, Call]) -> dict[str, list[float]]:
    """Milliseconds of every call in turn, each after L2 was overwritten."""
    import torch

    flush = torch.empty(256 * 2**20, dtype=torch.int8, device="cuda")
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(SAMPLES):
        for name, call in calls.items():
            if sum(samples[name]) > 1e3 * SECONDS_OF_ONE and len(samples[name]) >= 3:
                continue
            flush.zero_()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            call()
            end.record()
            end.synchronize()
            samples[name].append(begin.elapsed_time(end))
    return samples


def matmul() -> dict[str, Any]:
    """torch.matmul of bf16 at 8192^3: what R_mm divides by."""
    import torch

    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    for _ in range(WARM_UP):
        a @ b
    with sampled_gpu() as states:
        samples = time_interleaved({"matmul": lambda: a @ b})["matmul"]
    return {"milliseconds": samples, "tflops": 2 * 8192**3 / median(samples) / 1e9, "gpu": summary(states)}


@contextmanager
def sampled_gpu() -> Iterator[list[str]]:
    """Lines of nvidia-smi while the context lasts: SM clock in MHz, power in W; none where it is not there."""
    query = ["nvidia-smi", "--query-gpu=clocks.sm,power.draw", "--format=csv,noheader,nounits", "-lms", "100"]
    lines: list[str] = []
    try:
        process = subprocess.Popen(query, stdout=subprocess.PIPE, text=True)
    except FileNotFoundError:
        yield lines
        return
    assert process.stdout is not None
    reader = threading.Thread(target=lambda stream=process.stdout: lines.extend(stream), daemon=True)
    reader.start()
    try:
        yield lines
    finally:
        process.terminate()
        process.wait()
        reader.join()


def summary(lines: Sequence[str]) -> dict[str, Any]:
    """Median and extremes of clock and power."""
    rows = [line.split(",") for line in lines]
    numbers = [tuple(map(float, row)) for row in rows if len(row) == 2 and "[" not in "".join(row)]
    found: dict[str, Any] = {"samples": len(numbers)}
    for name, column in zip(("sm_clock_mhz", "power_w"), zip(*numbers, strict=True), strict=False):
        found[name] = {"median": median(column), "least": min(column), "most": max(column)}
    return found


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu", description="ours and every peer on this GPU")
    parser.add_argument("what", choices=list(REGIMES))
    parser.add_argument("--ours", action="store_true", help="cupy_flash among the peers")
    parser.add_argument("--seconds", type=float, default=400, help="begin no regime that would end later")
    parser.add_argument("--out", type=Path, required=True, help="the JSON; continued where it exists")
    arguments = list(sys.argv[1:] if argv is None else argv)
    asked = parser.parse_args(arguments)
    command = ["python -m bench.gpu", *arguments]
    return run(REGIMES[asked.what], partial(measure_peers, ours=asked.ours), asked.seconds, asked.out, command)


def measure_peers(regime: Regime, ours: bool) -> dict[str, Any]:
    return measure(regime, peers(regime, ours))


def run(
    regimes: Sequence[Regime],
    measure_one: Callable[[Regime], dict[str, Any]],
    seconds: float,
    out: Path,
    command: Sequence[str],
) -> int:
    """Measures what the file `out` does not have yet; the exit status, 3 where time was over before."""
    import torch

    if not torch.cuda.is_available():
        print("bench: torch finds no GPU here", file=sys.stderr)
        return 2
    torch.backends.cuda.matmul.allow_tf32 = False
    result = describe(list(command[1:]), torch.get_num_threads())
    result["command"] = " ".join(command)
    result["versions"]["cuda"], result["versions"]["cudnn"] = torch.version.cuda, torch.backends.cudnn.version()
    before = json.loads(out.read_text(encoding="utf-8")) if out.is_file() else {}
    result["cases"] = before.get("cases", [])
    done = {case["regime"] for case in result["cases"]}
    waiting = [regime for regime in regimes if regime.name not in done]
    begin = time.monotonic()
    result["matmul"] = matmul()
    longest = 0.0
    for measured, regime in enumerate(waiting):
        started = time.monotonic()
        if started - begin + longest > seconds:
            print(f"out of time: {len(waiting) - measured} regimes are left, run again to go on", file=sys.stderr)
            return 3
        case = measure_one(regime) | {"matmul_tflops": result["matmul"]["tflops"]}
        result["cases"].append(case)
        write(result, out)
        now = time.monotonic()
        longest = max(longest, now - started)
        left = len(waiting) - measured - 1
        print("\n".join(told(case)))
        print(f"  {left} regimes are left, about {(now - begin) / (measured + 1) * left:.0f} s", flush=True)
    write(result, out)
    return 0


def told(case: dict[str, Any]) -> list[str]:
    """A record in lines, the fastest first."""
    lines = [case["regime"]]
    for name, tflops in sorted(case["tflops"].items(), key=lambda item: -item[1]):
        lines.append(f"  {tflops:6.1f} TFLOP/s, {median(case['milliseconds'][name]):.3f} ms: {name}")
    return lines + [f"  left out {name}: {reason}" for name, reason in case["left_out"].items()]


if __name__ == "__main__":
    sys.exit(main())
