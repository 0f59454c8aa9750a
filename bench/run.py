"""The measurements: each gives the records, plain dicts for JSON, of its section of a result."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from cupy_flash import reference

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
from .peers import BASELINE, HOLDS_SCORES, OURS, PEERS, Inputs, Peer, present, random_inputs
from .timing import interleave, timed

Record = dict[str, Any]
Progress = Callable[[str], None]  # told what comes next

EXACT_UP_TO = 1024  # the fp64 reference holds whole matrices of scores
# Bytes of scores from which on those who hold them are left out: of the times, so that they stay short, and of memory.
TIME_LIMIT, MEMORY_LIMIT = 2**30, 2 * 2**30
LOW_PRECISION = "low precision"  # an independent run of standard attention in the dtype of the inputs


def time_cases(cases: Sequence[Case], training: bool, repeats: int, ceilings: Ceilings, progress: Progress) -> Record:
    """Errors and times of every case: of the forward, or in training of forward and backward."""
    progress("which peers are here")
    names, left_out = present(cases, training)
    records = []
    for case in cases:
        progress(f"S {case.seqlen}{', causal' if case.causal else ''}")
        here, too_large = _that_fit(names, case, training, TIME_LIMIT)
        inputs = random_inputs(case)
        peers = {name: PEERS[name](case, inputs, training) for name in here}
        samples = interleave({name: timed(peer, training) for name, peer in peers.items()}, repeats)
        flops, moved = forward_flops(case), forward_bytes(case)
        if training:
            flops, moved = flops + backward_flops(case), moved + backward_bytes(case)
        record = asdict(case) | {
            "flops": flops,
            "bytes": moved,
            "roofline_seconds": roofline_seconds(flops, moved, ceilings),
            "left_out": too_large,
            "seconds": {
                name: {"forward": [first for first, _ in taken], "backward": [second for _, second in taken]}
                if training
                else {"forward": [first for first, _ in taken]}
                for name, taken in samples.items()
            },
        }
        if case.seqlen <= EXACT_UP_TO:
            record["errors"] = _errors(case, inputs, peers, training)
        records.append(record)
    return {"left_out": left_out, "cases": records}


def memory_cases(cases: Sequence[Case], threads: int, progress: Progress) -> Record:
    """Peak memory of forward and backward as S grows: ours, what holds the scores, and the best of torch."""
    available, left_out = present(cases, training=True)
    names = [name for name in (OURS, "standard", BASELINE) if name in available]
    records = []
    for case in cases:
        here, too_large = _that_fit(names, case, True, MEMORY_LIMIT)
        peaks = {}
        for name in here:
            progress(f"S {case.seqlen}, {name}")
            forward, both = measure(name, case, threads)
            peaks[name] = {
                "forward": asdict(forward) | {"bytes": forward.bytes},
                "forward + backward": asdict(both) | {"bytes": both.bytes},
            }
        records.append(asdict(case) | {"left_out": too_large, "peaks": peaks})
    return {"left_out": {name: left_out[name] for name in (BASELINE,) if name in left_out}, "cases": records}


def _that_fit(names: Sequence[str], case: Case, training: bool, limit: int) -> tuple[list[str], dict[str, str]]:
    """Who takes part in a case, and why the others do not."""
    held = scores_bytes(case) * (2 if training else 1)  # the probabilities, and in the backward their gradient
    if held < limit:
        return list(names), {}
    reason = f"would hold {held / 2**30:.3g} GiB of scores"
    too_large = {name: reason for name in names if name in HOLDS_SCORES}
    return [name for name in names if name not in too_large], too_large


def _errors(case: Case, inputs: Inputs, peers: dict[str, Peer], training: bool) -> Record:
    """The largest absolute error of every quantity against the fp64 reference, of every peer and of `LOW_PRECISION`."""
    options: dict[str, Any] = dict(causal=case.causal, layout="bhsd")

    def run(dtype: np.dtype[Any] | None) -> tuple[Any, ...]:
        if training:
            return reference.attention_backward(inputs.dout, *inputs[:3], dtype=dtype, **options)[:3]
        return reference.attention(*inputs[:3], dtype=dtype, **options)[:1]

    results = {LOW_PRECISION: run(inputs.q.dtype)}
    for name, peer in peers.items():
        saved = peer.forward()
        results[name] = peer.arrays(peer.backward(saved) if training else saved)
    quantities = ("dq", "dk", "dv") if training else ("out",)
    return {
        quantity: {name: _largest_error(arrays[index], exact) for name, arrays in results.items()}
        for index, (quantity, exact) in enumerate(zip(quantities, run(None), strict=True))
    }


def _largest_error(actual: Any, exact: Any) -> float:
    return float(np.abs(actual.astype(exact.dtype) - exact).max())
