"""The stored results of the simulator, with which `check` on a GPU compares every instruction."""

from dataclasses import replace

import numpy as np
import pytest
from tiers import in_tiers

from cupy_flash.measure.checks import micro_kernels, simulated

KERNELS = {kernel.name: kernel for kernel in micro_kernels.kernels()}
EXACT, BOUNDED = KERNELS["fma.rn.f32"], KERNELS["mma.m16n8k16-f16"]


@pytest.mark.parametrize("kernels", in_tiers({"some": 40, "all": 1}, default=["some"]))
def test_the_stored_results_are_the_simulators(kernels):
    """`python -m cupy_flash.measure.checks.simulated` regenerates the stored results."""
    compared = {name: kernel for name, kernel in KERNELS.items() if kernel.expected is None}
    some = list(compared.values())[::kernels]
    assert {kernel.name: simulated.entry_of(kernel) for kernel in some} == {
        kernel.name: simulated.stored()[kernel.name] for kernel in some
    }
    assert list(simulated.stored()) == list(compared)


@pytest.fixture
def results(monkeypatch):
    """Return the results of two kernels, and make any further simulation an error."""
    results = {kernel.name: micro_kernels.simulate(kernel) for kernel in (EXACT, BOUNDED)}

    def fail(kernel):
        raise AssertionError(f"{kernel.name} is simulated")

    monkeypatch.setattr(simulated, "simulate", fail)
    return results


def test_right_results_are_compared_without_a_simulation(results):
    assert simulated.wrong(EXACT, results[EXACT.name]) is None
    assert simulated.wrong(BOUNDED, results[BOUNDED.name] * np.float32(1 + 2**-12)) is None
    nans = results[EXACT.name].view(np.uint32).copy()
    nans[np.isnan(results[EXACT.name])] = 0xFFC12345  # a NaN with another payload
    assert np.isnan(results[EXACT.name]).any() and simulated.wrong(EXACT, nans.view(np.float32)) is None


def test_a_wrong_result_is_named(results, monkeypatch):
    assert "1 of 128 differ, the first at (31, 3): " in simulated.wrong(
        BOUNDED, results[BOUNDED.name] + np.float32(np.arange(128).reshape(32, 4) == 127)
    )
    for flipped in (1, 1 << 31):  # flips the last bit, or the sign, of a zero
        out = results[EXACT.name].copy()
        out.view(np.uint32)[np.flatnonzero(out == 0)[-1]] ^= flipped
        with pytest.raises(AssertionError, match="is simulated"):
            simulated.wrong(EXACT, out)
    monkeypatch.setattr(simulated, "simulate", lambda kernel: results[kernel.name])
    assert simulated.wrong(EXACT, out).startswith("1 of ")


def test_other_inputs_are_simulated(results, monkeypatch):
    """Another release of NumPy may draw other random inputs, for which the stored results do not count."""
    kernel = replace(BOUNDED, inputs=(BOUNDED.inputs[0][::-1].copy(), *BOUNDED.inputs[1:]))
    monkeypatch.setattr(simulated, "simulate", micro_kernels.simulate)
    assert simulated.wrong(kernel, micro_kernels.simulate(kernel)) is None
