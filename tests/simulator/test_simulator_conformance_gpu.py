"""The simulator against stored results of GPUs, in tests/conformance/gpu: one file per GPU with all micro-kernels.

conformance/on_gpu.py writes the files; as long as there is none, the comparison is empty.
"""

import os
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from conformance import on_gpu
from conformance.agreement import disagreements
from conformance.assembled import source
from conformance.on_gpu import main
from patience import FOREVER, give_workers_time, hang
from tiers import in_tiers

from cupy_flash import device
from cupy_flash.engines import mma_decode
from cupy_flash.gpu import ahead
from cupy_flash.jit import nvrtc
from cupy_flash.jit.source import assemble
from cupy_flash.measure.checks import hopper
from cupy_flash.measure.checks.evidence import evidence_for
from cupy_flash.measure.checks.instructions import BY_NAME, WARP_CASES
from cupy_flash.measure.checks.micro_kernels import Kernel, difference, every_kernel, kernels, simulate

STORED = sorted((Path(__file__).parents[1] / "conformance" / "gpu").glob("*.npz"))
KERNELS = {kernel.name: kernel for kernel in every_kernel()}


def test_simulator_agrees_with_stored_results_of_gpus():
    assert {path.stem: disagreements(path) for path in STORED} == {path.stem: [] for path in STORED}


def test_a_single_wrong_bit_is_reported(tmp_path):
    some = "wgmma.bf16-n8", "add.u32", "add.f32", "ex2.approx.ftz.f32", "mma.m16n8k16-f16"
    results = {KERNELS[name].key: simulate(KERNELS[name]) for name in some}
    np.savez(tmp_path / "same.npz", **results)
    assert disagreements(tmp_path / "same.npz") == []
    for wrong in results.values():
        wrong.view(np.uint32).flat[-1] ^= 1
    np.savez(tmp_path / "other.npz", **results)
    # One bit of an approximate result is within its error bound.
    assert sorted(disagreements(tmp_path / "other.npz")) == ["add.f32", "add.u32", "wgmma.bf16-n8"]
    assert "1 of 512 differ, the first at (127, 3): " in difference(
        results["wgmma_bf16-n8"], simulate(KERNELS[some[0]])
    )


def test_names_of_kernels_are_unique():
    assert set(BY_NAME) | {case.name for case in (*WARP_CASES, *hopper.CASES)} <= set(KERNELS)
    assert len({kernel.key for kernel in KERNELS.values()}) == len(list(every_kernel()))


WATCHED = (
    "wgmma|cp|mbarrier|fence|barrier|bar|setmaxnreg|stmatrix|ldmatrix|mma|red|elect|mapa|ld.acquire|st.release|ex2|lg2"
    "|ld.shared::cluster"
)


def forms(ptx):
    """Return the forms of instructions that only a GPU can verify.

    A form is a name and, for wgmma, the location of A and the transposed operands. bf16 counts as f16.
    """
    names = set()
    for name, operands in re.findall(rf"(?<![\w.%])((?:{WATCHED})\.[\w.:]+)([^;]*)", ptx.replace("bf16", "f16")):
        if name.startswith("wgmma.mma_async"):
            registers = "{" in operands.split("}", 1)[1]
            majors = operands.replace(" ", "").split(",")[-2 + registers :] if "f16.f16" in name else []
            name += f" A in {'registers' if registers else 'shared memory'}, {majors}"
        names.add(name)
    return names


USED = [
    ("sm_90a", "wgmma/forward", dict(head_dim=128)),
    ("sm_90a", "wgmma/backward", dict(head_dim=64, causal=True)),
    ("sm_90a", "wgmma/backward", dict(head_dim=192, head_dim_v=128, deterministic=True)),
    ("sm_90a", "wgmma/forward_fp8", dict(head_dim=96, dtype="float8_e4m3fn", engine=None, backward=False)),
    ("sm_80", "mma/forward", dict(head_dim=64, engine="mma")),
    ("sm_90", "mma/backward_kv", dict(head_dim=64, engine="mma")),
    ("sm_80", "mma/backward", dict(head_dim=128, engine="mma", backward=True)),
]


def compiled(launch, arch):
    name = launch.kernel
    return nvrtc.compile(assemble(name, dict(launch.constants)), name, arch.replace("sm", "compute")).ptx


def confirmed_by_nobody(ptx):
    """Return forms of instructions that neither another code generator's kernel nor the PTX ISA confirms."""
    return [row.form for row in evidence_for([ptx]) if row.other_kernel is None and row.micro_kernel is None]


@pytest.mark.usefixtures("flags_of_users")
def test_kernels_use_only_forms_that_a_micro_kernel_verifies():
    verified = set().union(*(forms(kernel.text) for kernel in KERNELS.values()))
    for arch, name, words in USED:
        launches = ahead.launches(device.named(arch, "cuda"), **dict(dtype="float16", engine="wgmma") | words)
        launches = [launch for launch in launches if launch.kernel == name]
        for launch in launches[0], launches[-1]:
            ptx = compiled(launch, arch)
            used = forms(ptx)
            assert len(used) > 3 and used <= verified, (name, sorted(used - verified))
            assert confirmed_by_nobody(ptx) == []


def test_every_form_of_a_decode_uses_only_forms_that_a_micro_kernel_verifies():
    verified = set().union(*(forms(kernel.text) for kernel in KERNELS.values()))
    on_hopper = device.named("sm_90a", "cuda")
    problem = ahead.problems(dtype="float16", head_dim=64, backward=False, cache=True, engine="mma_decode")[0]
    used = {}
    for tile in {tile.form: tile for tile in mma_decode.choices(problem, on_hopper)}.values():
        (launch,) = (x for x in mma_decode.launches(problem, on_hopper, tile) if x.function == "decode")
        ptx = compiled(launch, "sm_90a")
        used[tile.form] = forms(ptx)
        assert confirmed_by_nobody(ptx) == []
    assert {"ld.shared::cluster.f32", "mapa.shared::cluster.u32"} <= used["clusters of 8"]
    for name, instructions in used.items():
        assert instructions <= verified, (name, sorted(instructions - verified))


CALLS = {
    "simt-f64": ("sm_80", dict(dtype="float64", head_dim=16)),
    "simt-f32": ("sm_80", dict(dtype="float32", head_dim=32, dropout=0.1)),
    "simt-bf16": (
        "sm_80",
        dict(dtype="bfloat16", head_dim=64, engine="simt", causal=True, alibi_slopes=True, bias=True),
    ),
    "mma-f16": ("sm_80", dict(dtype="float16", head_dim=64)),
    "mma-options": ("sm_80", dict(dtype="bfloat16", head_dim=64, window=(64, 0), softcap=20.0, dropout=0.1, sink=True)),
    "wgmma-f16": ("sm_90a", dict(dtype="float16", head_dim=64, engine="wgmma", causal=True)),
    "wgmma-bf16": ("sm_90a", dict(dtype="bfloat16", head_dim=128, engine="wgmma", deterministic=True)),
    "wgmma-fp8": ("sm_90a", dict(dtype="float8_e4m3fn", head_dim=96, backward=False)),
    "packed": ("sm_90a", dict(dtype="bfloat16", head_dim=64, engine="wgmma", packed=True, softcap=20.0)),
    "cache": ("sm_90a", dict(dtype="float16", head_dim=64, backward=False, cache=True)),
    "cache-fp8": ("sm_90a", dict(dtype="float16", head_dim=64, backward=False, cache=True, kv_dtype="float8_e4m3fn")),
    "cache-rotary": (
        "sm_80",
        dict(dtype="float16", head_dim=64, backward=False, cache=True, rotary=True, rotary_dim=32),
    ),
    "blackwell": ("sm_120", dict(dtype="bfloat16", head_dim=64)),
}


@pytest.mark.usefixtures("flags_of_users")
@pytest.mark.parametrize("call", in_tiers(CALLS, ["simt-f64"]))
def test_every_instruction_of_the_kernels_is_confirmed(call):
    """Each form of an instruction is confirmed by a kernel of Triton or Gluon, or by a result from the PTX ISA."""
    arch, words = call
    kernels = {launch.kernel: launch for launch in ahead.launches(device.named(arch, "cuda"), **words)}
    assert {name: confirmed_by_nobody(compiled(launch, arch)) for name, launch in kernels.items()} == dict.fromkeys(
        kernels, []
    )


def test_an_instruction_that_nobody_confirms_is_named():
    assert confirmed_by_nobody("add.f32 %f1, %f1, %f1; add.round.f32 %f1, %f1, %f1;") == ["add.round.f32"]


def test_ptxas_assembles_every_micro_kernel_of_several_threads():
    """A kernel with setmaxnreg must start with the number of registers that it assumes, or it would wait forever."""
    every = [kernel for kernel in KERNELS.values() if kernel.rows is None]
    kernels = [kernel for kernel in every if kernel.family != "tcgen05"]
    compiled = nvrtc.compile(source(kernels), "micro", "sm_90a")
    assert compiled.warnings == () and len(compiled.resources) == len(kernels) > 100
    of_blackwell = [kernel for kernel in every if kernel.family == "tcgen05"]
    of_tcgen05 = nvrtc.compile(source(of_blackwell), "micro", "sm_100a")
    assert of_tcgen05.warnings == () and len(of_tcgen05.resources) == len(of_blackwell) > 40
    registers = {
        kernel.name: compiled.resources[f"micro_{i}"].registers
        for i, kernel in enumerate(kernels)
        if kernel.name.startswith("setmaxnreg")
    }
    assert registers == {"setmaxnreg": 168, "setmaxnreg.40-232": 168, "setmaxnreg.32-160": 128}
    turns = KERNELS["turns"]
    with pytest.raises(nvrtc.CompileError, match="acquire"):
        wrong = replace(turns, text=turns.text.replace("ld.acquire.gpu.global.u32", "ld.acquire.all.global.u32"))
        nvrtc.compile(source([wrong]), "micro", "sm_90a")


# ---- the runner, without a GPU

SOME = ("wgmma.bf16-n8", "load.1d", "bulk.add", "turns", "dynamic", "add.u32", "fma.rn.f32")
HANGS, DIES, FAILS, DIFFERS = "load.1d", "bulk.add", "turns", "add.u32"


class CUDADriverError(Exception):
    """Stands for CuPy's exception of the same name."""


def stand_in(number, announce):
    """Stand in for micro_kernels.work: run a kernel on the simulator, or fail in the way that its name selects."""
    if number is None:
        return 90
    name = (kernel := kernels()[number]).name
    announce(name, 0 if name == HANGS else FOREVER)
    if name == HANGS:
        hang()
    if name == DIES:
        os._exit(3)
    if name == FAILS:
        raise CUDADriverError("an illegal address")
    out = simulate(kernel)
    return out + 1 if name == DIFFERS else out


@pytest.fixture
def few(monkeypatch):
    """Limit the runner to a few kernels, without time limits."""
    give_workers_time(monkeypatch)
    monkeypatch.setattr(Kernel, "runs_on", lambda kernel, capability: kernel.name in SOME)


@pytest.mark.usefixtures("few")
def test_a_kernel_that_hangs_dies_or_fails_does_not_affect_others(tmp_path, capsys):
    assert main(tmp_path, stand_in) == 1
    wrong = dict(line.split(": ", 1) for line in capsys.readouterr().out.splitlines()[:-1])
    assert wrong[HANGS] == "timed out after 0 s" and wrong[DIES] == "process exited with status 3"
    assert wrong[FAILS] == "CUDADriverError: an illegal address" and "simulator" in wrong[DIFFERS]
    assert len(wrong) == 4
    with np.load(tmp_path / "sm_90.npz") as stored:
        assert set(stored) == {KERNELS[name].key for name in SOME} - {"load_1d", "bulk_add", "turns"}
    assert disagreements(tmp_path / "sm_90.npz") == [DIFFERS]


@pytest.mark.usefixtures("few")
def test_an_interrupted_run_stores_its_results_so_far(tmp_path, monkeypatch):
    seen = []

    def ended_at_the_second(kernel):
        if seen:
            raise SystemExit
        seen.append(kernel.key)
        return simulate(kernel)

    monkeypatch.setattr(on_gpu, "simulate", ended_at_the_second)
    with pytest.raises(SystemExit):
        main(tmp_path, stand_in)
    with np.load(tmp_path / "sm_90.npz") as stored:
        assert list(stored) == seen


@pytest.mark.parametrize(
    ("name", "capabilities"),
    [("wgmma.bf16-n8", [90]), ("add.u32", [80, 89, 90, 120]), ("mma.m16n8k32-e4m3", [90, 120]), ("stmatrix", [90])],
)
def test_architectures_of_the_micro_kernels(name, capabilities):
    assert [each for each in (75, 80, 89, 90, 120) if KERNELS[name].runs_on(each)] == capabilities
