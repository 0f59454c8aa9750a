"""check and tune with the real CuPy, on devices made of NumPy in the worker process, and the plans that follow."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from forget import forget_plans
from patience import give_workers_time

from cupy_flash.gpu import ahead
from cupy_flash.measure.checks import micro_kernels, verdicts
from cupy_flash.measure.checks.verdicts import run_check
from cupy_flash.measure.tuning import run_tune
from cupy_flash.plan import measurements
from cupy_flash.plan.plan import plan
from cupy_flash.problem.recorded_call import Trial
from cupy_flash.problem.records import UnsupportedError

SMALL = Trial("float32", 16, q_len=8, kv_len=8, heads=1, causal=True, backward=True)
HALF = Trial("bfloat16", 16, q_len=8, kv_len=8, heads=1, backward=False)
DECODE = Trial("bfloat16", 16, kv_len=48, heads=1, q_len=1, causal=True, backward=False)
CASES = {"simt": [SMALL], "mma": [HALF], "mma_decode": [DECODE], "wgmma": []}
SOME = ("add.u32", "fma.rn.f32", "mma.m16n8k16-f16", "wgmma.bf16-n8")  # instructions; sm_80 lacks the last one

if importlib.util.find_spec("cupy"):  # CuPy has no wheels for macOS

    @pytest.fixture(autouse=True)
    def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        """Run one small call per engine and a few instructions, with a new evidence folder and the shared kernel
        cache.
        """
        kernels = os.environ["CUPY_FLASH_CACHE_DIR"]
        monkeypatch.setattr(measurements, "FOLDER", os.path.relpath(tmp_path / "evidence", kernels))
        monkeypatch.setattr(verdicts, "trials", lambda engine, *_: CASES[engine])
        runs_on = micro_kernels.Kernel.runs_on
        monkeypatch.setattr(
            micro_kernels.Kernel, "runs_on", lambda kernel, arch: kernel.name in SOME and runs_on(kernel, arch)
        )
        give_workers_time(monkeypatch)
        forget_plans()
        yield
        monkeypatch.undo()
        forget_plans()

    def test_check() -> None:
        from gpu_in_numpy import evidence_worker

        result = run_check("cuda", None, False, print, evidence_worker.check)
        assert result.passed, str(result)
        assert result.device[:3] == ("cuda", "sm_80", 108) and result.device[4:6] == ("GPU in NumPy", "13.2")
        cases = {(row.engine, row.case.split(",")[0]) for row in result.rows}
        assert cases == {
            ("instructions", "instruction add.u32"), ("instructions", "instruction fma.rn.f32"),
            ("mma", "instruction mma.m16n8k16-f16"), ("simt", "float32"), ("mma", "bfloat16"),
            ("mma_decode", "KV cache"),
            *((engine, kind) for engine in ("simt", "mma") for kind in ("side stream", "CUDA graph")),
        }  # fmt: skip
        assert (
            measurements.check_of("simt", result.device).passed and measurements.check_of("mma", result.device).passed
        )

    @pytest.mark.exhaustive
    def test_a_lost_device_disqualifies_the_engine_that_lost_it() -> None:
        from gpu_in_numpy import evidence_worker

        result = run_check("cuda", None, True, print, evidence_worker.lose)
        assert result.engines["mma"] is None and "CUDADriverError" in result.engines["simt"]
        (problem,) = ahead.problems(dtype="float32", head_dim=16, backward=False)
        with pytest.raises(UnsupportedError, match="simt: its check failed on GPU in NumPy"):
            plan(problem, result.device)

    @pytest.mark.exhaustive
    def test_tune() -> None:
        from gpu_in_numpy import evidence_worker

        trial = replace(HALF, head_dim=256)  # few tiles fit
        results = run_tune([trial], "cuda", None, print, evidence_worker.tune)
        (result,) = results.results
        assert results.complete and result.left_out == {} and len(result.tune.measured) > 2
        assert {each.engine for each in result.tune.measured} == {"mma", "simt"}
        (problem,) = ahead.problems(dtype="bfloat16", head_dim=256, backward=False)
        problem = problem._replace(q_len=8, kv_len=8, heads=1, kv_heads=1)
        chosen = plan(problem, results.device)
        assert (chosen.engine, repr(chosen.tile)) == result.tune.measured[0][:2]
        assert f"measured the fastest of {len(result.tune.measured)} tiles" in chosen.explain()
        assert " ms" in chosen.explain().splitlines()[4]
