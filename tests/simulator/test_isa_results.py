"""Micro-kernels whose results the PTX ISA states: the simulator gives them, and each notices a wrong instruction."""

from dataclasses import replace

import pytest

from cupy_flash.measure.checks import evidence, simulated
from cupy_flash.measure.checks.isa import ISA_CASES
from cupy_flash.measure.checks.micro_kernels import kernels, simulate
from cupy_flash.simulator import SimulationError

STATED = {kernel.name: kernel for kernel in kernels() if kernel.expected is not None}


@pytest.mark.parametrize("name", STATED)
def test_the_simulator_gives_the_stated_results(name):
    kernel = STATED[name]
    assert simulated.wrong(kernel, simulate(kernel)) is None


# name -> (instruction, the instruction that a simulator with a wrong reading of the ISA would execute)
MISREAD = {
    "isa.predicates": ("or.pred %q3", "and.pred %q3"),
    "isa.selections": ("selp.b64 %d3, %d1, %d2", "selp.b64 %d3, %d2, %d1"),
    "isa.min.relu.s32": ("min.relu.s32", "min.s32"),
    "isa.rcp.approx.ftz.f64.special": ("rcp.approx.ftz.f64", "rcp.rn.f64"),
    "isa.rcp.approx.ftz.f64": ("rcp.approx.ftz.f64", "sqrt.rn.f64"),
    "isa.vote.any": ("vote.sync.any.pred", "vote.sync.all.pred"),
    "isa.vectors": ("ld.shared.v2.b64 {%d3, %d4}", "ld.shared.v2.b64 {%d4, %d3}"),
    "isa.quarters": ("{%h0, %h1, %h2, %h3}, [%d0]", "{%h3, %h2, %h1, %h0}, [%d0]"),
    "isa.atomics": ("atom.global.add.u32 %r0", "atom.global.max.u32 %r0"),
    "isa.red.v4.f32": ("red.global.add.v4.f32", "st.global.v4.f32"),
    "isa.message": ("st.release.gpu.global.u32", "st.relaxed.gpu.global.u32"),
}


@pytest.mark.parametrize("name", MISREAD)
def test_a_wrong_reading_is_noticed(name):
    kernel = STATED[name]
    instruction, other = MISREAD[name]
    assert kernel.text.count(instruction) == 1
    try:
        out = simulate(replace(kernel, text=kernel.text.replace(instruction, other)))
    except SimulationError:
        return
    assert "PTX ISA" in simulated.wrong(kernel, out)


def test_every_case_is_misread():
    assert list(MISREAD) == [case.name for case in ISA_CASES]


def test_forms():
    ptx = """
        @%p1 ld.global.nc.L1::no_allocate.v4.f32 {%f1, %f2, %f3, %f4}, [%rd1];  // ld.comment.b32
        $L__BB0: mul.rn.f32 %f1, %f1, %f2; @!%p2 bra.uni $L__BB0;
        ld.global.s8 %r1, [%rd1]; ld.param.v2.u32 {%r1, %r2}, [p]; setp.eq.s16 %p1, %h1, %h2; ret;
        { wgmma.mma_async.sync.aligned.m64n96k16.f32.f16.f16 {%f1}, {%r1}, %rd1, 1, 1, 1, 0; }
        wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%f1}, %rd2, %rd1, 1, 1, 1, 0, 0;
    """
    wgmma = "wgmma.mma_async.sync.aligned.m64nNk16.f32.f16.f16"
    assert evidence.forms(ptx) == {
        "ld.global.v4.b32", "mul.f32", "ld.global.s8", "ld.param.b32", "setp.eq.b16", f"{wgmma} A in registers", wgmma,
    }  # fmt: skip
