"""CPU measurements: each function returns one section of a result as plain dicts for JSON."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from cupy_flash import reference

from .implementations import (
    BASELINE,
    COMPARED,
    HOLDS_SCORES,
    IMPLEMENTATIONS,
    OURS,
    Implementation,
    Inputs,
    present,
    random_inputs,
)
from .memory import measure
from .model import (
    Case,
    Ceilings,
    backward_bytes,
    backward_flops,
    forward_bytes,
    forward_flops,
    roofline_seconds,
    scores_bytes,
)
from .timing import interleave, timed

Record = dict[str, Any]
Progress = Callable[[str], None]  # called with the name of each step as it begins

EXACT_UP_TO = 1024  # longest S for the fp64 reference, which materializes the scores
# Implementations that materialize the scores are skipped from this many bytes on, in measurements of time and memory.
TIME_LIMIT, MEMORY_LIMIT = 2**29, 2 * 2**30
LOW_PRECISION = "low precision"  # standard attention in the dtype of the inputs


def time_cases(cases: Sequence[Case], training: bool, repeats: int, ceilings: Ceilings, progress: Progress) -> Record:
    """Return errors and times of every case: of the forward, and in training also of the backward."""
    progress("find implementations")
    names, left_out = present(cases, training)
    records = []
    for case in cases:
        progress(f"S {case.seqlen}{', causal' if case.causal else ''}")
        fitting, too_large = _that_fit(names, case, training, TIME_LIMIT)
        inputs = random_inputs(case)
        implementations = {name: IMPLEMENTATIONS[name](case, inputs, training) for name in fitting}
        calls = {name: timed(each, training) for name, each in implementations.items()}
        samples = interleave(calls, repeats, beside=calls.keys() - set(COMPARED))
        flops, bytes_moved = forward_flops(case), forward_bytes(case)
        if training:
            flops, bytes_moved = flops + backward_flops(case), bytes_moved + backward_bytes(case)
        record = asdict(case) | {
            "flops": flops,
            "bytes": bytes_moved,
            "roofline_seconds": roofline_seconds(flops, bytes_moved, ceilings),
            "left_out": too_large,
            "seconds": {
                name: {"forward": [forward for forward, _ in pairs], "backward": [backward for _, backward in pairs]}
                if training
                else {"forward": [forward for forward, _ in pairs]}
                for name, pairs in samples.items()
            },
        }
        if case.seqlen <= EXACT_UP_TO:
            record["errors"] = _errors(case, inputs, implementations, training)
        records.append(record)
    return {"left_out": left_out, "cases": records}


def memory_cases(cases: Sequence[Case], threads: int, progress: Progress) -> Record:
    """Return peak memory of forward and forward + backward over S: ours, standard attention and BASELINE."""
    available, left_out = present(cases, training=True)
    names = [name for name in (OURS, "standard", BASELINE) if name in available]
    records = []
    for case in cases:
        fitting, too_large = _that_fit(names, case, True, MEMORY_LIMIT)
        peaks = {}
        for name in fitting:
            progress(f"S {case.seqlen}, {name}")
            forward, both = measure(name, case, threads)
            peaks[name] = {
                "forward": asdict(forward) | {"bytes": forward.bytes},
                "forward + backward": asdict(both) | {"bytes": both.bytes},
            }
        records.append(asdict(case) | {"left_out": too_large, "peaks": peaks})
    return {"left_out": {name: left_out[name] for name in (BASELINE,) if name in left_out}, "cases": records}


def _that_fit(names: Sequence[str], case: Case, training: bool, limit: int) -> tuple[list[str], dict[str, str]]:
    """Return the implementations whose score matrices fit into `limit` bytes, and why others are skipped."""
    needed = scores_bytes(case) * (2 if training else 1)  # the forward stores P, the backward also dS
    if needed < limit:
        return list(names), {}
    reason = f"would hold {needed / 2**30:.3g} GiB of scores"
    too_large = {name: reason for name in names if name in HOLDS_SCORES}
    return [name for name in names if name not in too_large], too_large


def _errors(case: Case, inputs: Inputs, implementations: dict[str, Implementation], training: bool) -> Record:
    """Return the largest absolute error against the fp64 reference, {quantity: {name: error}}; see LOW_PRECISION."""
    options: dict[str, Any] = dict(causal=case.causal, layout="bhsd")

    def run(dtype: np.dtype[Any] | None) -> tuple[Any, ...]:
        if training:
            return reference.attention_backward(inputs.dout, *inputs[:3], dtype=dtype, **options)[:3]
        return reference.attention(*inputs[:3], dtype=dtype, **options)[:1]

    results = {LOW_PRECISION: run(inputs.q.dtype)}
    for name, implementation in implementations.items():
        saved = implementation.forward()
        results[name] = implementation.arrays(implementation.backward(saved) if training else saved)
    quantities = ("dq", "dk", "dv") if training else ("out",)
    return {
        quantity: {name: _largest_error(arrays[index], exact) for name, arrays in results.items()}
        for index, (quantity, exact) in enumerate(zip(quantities, run(None), strict=True))
    }


def _largest_error(actual: Any, exact: Any) -> float:
    return float(np.abs(actual.astype(exact.dtype) - exact).max())
