"""Short calls, forward and backward, for compute-sanitizer: python -m sanitize simt | mma | wgmma | fp8.

Each array is allocated by the driver, because the tool does not detect out-of-bounds accesses inside a memory pool.
Without an engine all of them run, each in its own process, and their results are compared with the formula.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace

import fp8_cases
import on_gpu
from cases import Case, check, compare, run
from forget import forget_plans

import cupy_flash
from cupy_flash import device
from cupy_flash.engines import wgmma

DTYPES = {"simt": "float32", "mma": "bfloat16", "wgmma": "bfloat16"}
# A few tiles each, the last one partial; together they cover every option, every kernel, and both orders of dQ.
LONG = dict(q_len=150, kv_len=170, batch=1, heads=2, kv_heads=1, head_dim=64, head_dim_v=64)
CASES = {
    "causal-sink": Case(**LONG, causal=True, sink=True),
    "window-softcap-dropout": Case(**LONG, window=(60, 20), softcap=2.0, dropout=0.3, layout="bhsd"),
    "bias-mask-alibi": Case(**LONG, bias="1hqk", mask="b1qk", alibi="h"),
    "lengths": Case(**LONG | dict(batch=2), q_lengths=(150, 37), kv_lengths=(70, 170)),
    "packed": Case(**LONG | dict(batch=3), packed=True, causal=True, q_lengths=(70, 0, 150), kv_lengths=(80, 9, 170)),
    "wide": Case(**LONG | dict(q_len=70, kv_len=90, head_dim=192, head_dim_v=128)),
}
# Properties of wgmma tiles that a plan chooses for larger problems only, if at all.
OTHER_TILES = ("persistent", "takes_turns", "paired", "dq_in_bulk")
FULL = Case(**LONG | dict(q_len=256))
FP8 = ("sink-causal-more-queries", "all", "packed-causal", "narrow")


def engines() -> list[str]:
    """The engines that this GPU supports."""
    return ["simt", "mma", *(["wgmma", "fp8"] if device.gpu(0).arch == "sm_90a" else [])]


def calls(engine: str) -> Iterator[tuple[str, Case, dict]]:
    """Yield (name, case, further options); until the next one, plans choose among the tiles that it tests."""
    for name, case in CASES.items():
        for deterministic in (False, True):
            order = "deterministic" if deterministic else "in any order"
            yield f"{name}, {order}", replace(case, dtype=DTYPES[engine]), dict(deterministic=deterministic)
    every = wgmma.tiles
    for having in OTHER_TILES if engine == "wgmma" else ():
        wgmma.tiles = lambda *of, having=having: [tile for tile in every(*of) if getattr(tile, having, True)]
        forget_plans()
        yield having, replace(FULL, dtype=DTYPES[engine]), {}
    wgmma.tiles = every


def sanitize(engine: str, *, checked: bool) -> None:
    import cupy

    os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"  # torch reads it at its first allocation
    cupy.cuda.set_allocator(None)
    if engine == "fp8":
        return _fp8(checked)
    for name in on_gpu.FUNCTIONS:
        setattr(cupy_flash, name, on_gpu.moving(getattr(cupy_flash, name)))
    for name, case, words in calls(engine):
        call = case.call()
        call.options.update(engine=engine, **words)
        result = run(case, "cuda", call)
        if checked:
            check(case, result)
        print(f"{engine}: {name}", flush=True)


def _fp8(checked: bool) -> None:
    import fp8_on_gpu

    for name in FP8:
        case = Case(**fp8_cases.LONG | fp8_cases.OPTIONS[name])
        call = fp8_cases.quantised(case)
        result = fp8_on_gpu.forward(call)
        if checked:
            compare(case, result, *fp8_cases.references(call), only=("out", "lse"))
        print(f"fp8: {name}", flush=True)


def main(asked: Sequence[str]) -> int:
    if asked:
        sanitize(asked[0], checked="checked" in asked)
        return 0
    command = (sys.executable, "-m", "sanitize")
    started = [subprocess.Popen([*command, engine, "checked"]) for engine in engines()]
    return max(process.wait() for process in started)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
