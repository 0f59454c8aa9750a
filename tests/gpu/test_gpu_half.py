"""The tensor-core engines on a real GPU, with every option in bfloat16 (float16 on sm_75): mma, and wgmma on Hopper."""

from __future__ import annotations

from dataclasses import replace

import on_gpu
import pytest
from cases import OPTIONS, PACKED_OPTIONS, Case, check, run
from engines import HALF

from cupy_flash import UnsupportedError, device

ROWS = {name: replace(case, dtype=HALF) for name, case in OPTIONS.items() if not name.startswith("dtype-")}
ROWS |= {
    f"packed-{name}": replace(PACKED_OPTIONS[name], dtype=HALF)
    for name in (
        "causal", "window", "alibi-per-sequence", "dropout", "sink", "grouped-wide-values", "zero-length-in-the-middle",
        "zero-length-all", "no-sequence",
    )
}  # fmt: skip
# Several tiles of queries and of keys. On the simulator the blocks of a deterministic backward run one after the other;
# only on a GPU do they wait for each other before they add to dQ.
LONG = (300, 400) if on_gpu.in_numpy() else (1000, 1300)
ROWS |= {f"long-{dim}": Case(*LONG, 1, 4, 2, dim, dim, HALF, causal=True, sink=True) for dim in (64, 128, 256)}


@pytest.fixture(autouse=True)
def routed(monkeypatch: pytest.MonkeyPatch) -> None:
    on_gpu.route(monkeypatch)


@pytest.mark.parametrize("deterministic", [False, True], ids=["any-order", "deterministic"])
@pytest.mark.parametrize("case", ROWS.values(), ids=ROWS)
def test_mma_on_cuda(case: Case, deterministic: bool) -> None:
    call = case.call()
    call.options.update(engine="mma", deterministic=deterministic)
    check(case, run(case, "cuda", call))


@pytest.mark.parametrize("deterministic", [False, True], ids=["any-order", "deterministic"])
@pytest.mark.parametrize("case", ROWS.values(), ids=ROWS)
def test_wgmma_on_cuda(case: Case, deterministic: bool) -> None:
    """Every option matches the formula, or is refused for a reason other than the architecture."""
    call = case.call()
    call.options.update(engine="wgmma", deterministic=deterministic)
    if device.gpu(0).arch != "sm_90a":
        with pytest.raises(UnsupportedError, match="lacks the instructions of sm_90a"):
            run(case, "cuda", call)
        return
    try:
        result = run(case, "cuda", call)
    except UnsupportedError as refusal:
        reasons = ("16 bytes", "without elements", "larger than 256", "fits registers")
        assert any(reason in str(refusal) for reason in reasons)
        return
    check(case, result)
