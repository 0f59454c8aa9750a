"""setmaxnreg: the warpgroups of a block share the registers allocated at entry, at most 65536."""

import numpy as np
import pytest
from micro import run

from cupy_flash.measure.checks.hopper import BY_NAME
from cupy_flash.simulator import errors

CASE = BY_NAME["setmaxnreg"]


def result(*changes, **options):
    out, body = CASE.out.copy(), CASE.body
    for old, new in changes:
        assert old in body
        body = body.replace(old, new)
    run(body, out, threads=CASE.threads, **CASE.options | options)
    return out


def test_registers_move_between_warpgroups():
    # 3 x 168 registers at entry become 24 + 2 x 240.
    assert np.array_equal(result(), np.arange(384))


@pytest.mark.parametrize("name", ["setmaxnreg.40-232", "setmaxnreg.32-160"])
def test_register_counts_of_the_wgmma_kernels(name):
    case = BY_NAME[name]
    out = case.out.copy()
    run(case.body, out, threads=case.threads, **case.options)
    assert np.array_equal(out, np.arange(case.threads))


def test_increase_waits_for_the_decrease_of_others():
    """The first warpgroup requests registers before the others release theirs, because those run a loop first."""
    loop = "mov.u32 %r0, 0; LOOP: add.u32 %r0, %r0, 1; setp.lt.u32 %q1, %r0, 99; @%q1 bra LOOP; setmaxnreg.dec"
    assert np.array_equal(result(("setp.ge", "setp.lt"), ("setmaxnreg.dec", loop)), np.arange(384))


def test_more_registers_than_the_pool_has_is_a_deadlock():
    with pytest.raises(errors.Deadlock, match=r"warps \[8, 9, 10, 11\] wait for registers, 8192 are free"):
        result(("u32 24;", "u32 32;"))


def test_a_larger_maxntid_leaves_fewer_registers():
    """ptxas divides the registers by the .maxntid threads, even if the launch has only 3 x 128."""
    with pytest.raises(errors.Deadlock, match=r"warps \[4, 5, .*\] wait for registers, 13312 are free"):
        result(directives=".maxntid 512, 1, 1 .minnctapersm 1")
    assert np.array_equal(result(("u32 240;", "u32 176;"), directives=".maxntid 512, 1, 1"), np.arange(384))


def test_registers_at_entry_are_at_most_the_largest_increase():
    """If the largest setmaxnreg.inc is 232, two warpgroups start with 232 registers each, although 256 would fit."""
    case = BY_NAME["setmaxnreg.40-232"]
    out = np.zeros(256, np.uint32)
    run(case.body, out, threads=256, **case.options | {"directives": ".maxntid 256, 1, 1 .minnctapersm 1"})
    assert np.array_equal(out, np.arange(256))
    body = case.body.replace("setmaxnreg.dec.sync.aligned.u32 40", "setmaxnreg.dec.sync.aligned.u32 240")
    with pytest.raises(errors.BarrierMisuse, match="has 232 registers"):
        run(body, out, threads=256, **case.options | {"directives": ".maxntid 256, 1, 1 .minnctapersm 1"})


@pytest.mark.parametrize(
    ("directives", "registers"),
    [(".minnctapersm 2", 80), (".maxnreg 96", 96), (".maxntid 512, 1, 1", 128), ("", 168)],
    ids=["minnctapersm", "maxnreg", "maxntid", "default"],
)
def test_registers_at_entry(directives, registers):
    body = "setmaxnreg.dec.sync.aligned.u32 {};"
    options = CASE.options | {"directives": directives}
    run(body.format(registers), threads=384, **options)
    with pytest.raises(errors.BarrierMisuse, match=f"has {registers} registers"):
        run(body.format(registers + 8), threads=384, **options)


def test_increase_below_the_current_count():
    with pytest.raises(errors.BarrierMisuse, match="has 168 registers"):
        result(("u32 240;", "u32 160;"), directives=".maxnreg 168")


def test_decrease_above_the_current_count():
    with pytest.raises(errors.BarrierMisuse, match="has 168 registers"):
        result(("u32 24;", "u32 176;"))


@pytest.mark.parametrize("count", [16, 264, 100], ids=["few", "many", "odd"])
def test_impossible_counts(count):
    with pytest.raises(errors.Unsupported):
        result(("u32 24;", f"u32 {count};"))


def test_part_of_a_warpgroup():
    with pytest.raises(errors.Deadlock, match="the other warps of its warpgroup"):
        result(("setmaxnreg.inc", "setp.ge.u32 %q1, %t, 352; @%q1 exit; setmaxnreg.inc"))
