"""Mistakes of a first use, and what kernels of other authors need: each is refused by name, or gives NumPy's number."""

import numpy as np
import pytest
from micro import run

from cupy_flash.jit import nvrtc
from cupy_flash.simulator import Memory, SimulationError, errors, launch, pack
from cupy_flash.simulator.memory.clocks import Clocks

PUT = """.version 8.3
.target sm_90
.address_size 64
.visible .entry put(.param .u64 out, .param .f32 x, .param .s32 n) {
  .reg .b64 %d<2>; .reg .f32 %f<3>; .reg .b32 %r<2>;
  ld.param.b64 %d0, [out]; ld.param.f32 %f0, [x]; ld.param.b32 %r0, [n];
  cvt.rn.f32.s32 %f1, %r0; add.f32 %f2, %f0, %f1; st.global.f32 [%d0], %f2; ret;
}"""


def put(*values, grid=(1, 1, 1), block=(1, 1, 1), **options):
    out, memory = np.zeros(1, np.float32), Memory()
    parameters = pack(PUT, "put", memory.add(out, "out"), *values)
    launch(PUT, "put", grid, block, parameters, memory=memory, **options)
    return out[0]


def test_a_number_has_the_type_of_its_parameter():
    assert put(2, -1) == 1
    with pytest.raises(
        SimulationError, match=r"parameter 2 of put has 4 bytes, an integer of type \.s32, but 1.0 is a"
    ):
        put(2.0, 1.0)


@pytest.mark.parametrize("value", [np.zeros(2, np.float32), [1], None], ids=["array", "list", "None"])
def test_an_array_is_passed_by_its_address(value):
    with pytest.raises(TypeError, match=r"parameter 0 of put must be an int, .* not \w+; .*Memory.add returns"):
        pack(PUT, "put", value, 0.0, 0)


def test_ptx_is_text():
    for call in (pack, lambda ptx, name: launch(ptx, name, (1, 1, 1), (1, 1, 1), b"", memory=Memory())):
        with pytest.raises(TypeError, match="PTX must be text or a parsed module, not bytes"):
            call(PUT.encode(), "put")


@pytest.mark.parametrize(
    "sizes",
    [{"grid": (0, 1, 1)}, {"grid": (-1, 1, 1)}, {"grid": (1, 65536, 1)}, {"block": (1, 0, 1)}, {"block": (1, 1, 65)},
     {"dynamic_shared": -4}],
    ids=str,
)  # fmt: skip
def test_a_launch_that_every_gpu_refuses(sizes):
    with pytest.raises(errors.LaunchRefused, match=rf"the {'.*'.join(sizes).replace('_', ' ')[:7]}.* of put is "):
        put(0, 0, **sizes)


def test_wrong_options():
    with pytest.raises(TypeError, match=r"grid must be a tuple of three sizes \(x, y, z\), not \(2.0, 1, 1\)"):
        put(0, 0, grid=(2.0, 1, 1))
    with pytest.raises(ValueError, match="order must be one of early, late, random, not 'fast'"):
        put(0, 0, order="fast")


@pytest.mark.parametrize("write", ["st.global.b32 [%p0], 1;", "red.global.add.u32 [%p0], 1;"], ids=["st", "red"])
def test_an_array_that_numpy_does_not_let_write(write):
    array, memory = np.zeros(32, np.uint32), Memory()
    array.flags.writeable = False
    with pytest.raises(errors.ReadOnly, match="write to read-only"):
        run(write, array, threads=32)
    with pytest.raises(ValueError, match="out is a read-only array"):
        memory.add(array, "out", initialised=False)


def test_an_array_of_objects():
    with pytest.raises(TypeError, match="x must be a NumPy array of numbers, not objects"):
        Memory().add(np.array([None]), "x")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("add.u32 %r0, %r1;", "add takes 3 operands, 2 were given: PTX line"),
        ("min.s32 %r0;", "min takes 3 or 4 operands, 1 were given: PTX line"),
        ("shfl.bfly.b32 %r0, %r1, 1, 31;", "shfl without .sync is for GPUs before sm_70: PTX line"),
        ("vote.ballot.b32 %r0, %q0;", "vote without .sync is for GPUs before sm_70: PTX line"),
    ],
)
def test_an_instruction_that_no_gpu_of_the_target_has(text, message):
    with pytest.raises(SimulationError, match=message):
        run(text)


def test_a_variable_with_an_address_as_initial_value():
    text = PUT.replace(".visible", ".global .u64 to[2] = {put, 0};\n.visible")
    with pytest.raises(
        errors.Unsupported, match=r"address of a variable or function .*: PTX line 4: \.global \.u64 to"
    ):
        pack(text, "put", 0, 0, 0)


X = np.array([0.3, 2.0, 1e-300, 1e300, 7.25, 1 / 3, 1e-3, 123.456])


def on_doubles(instruction, *columns):
    loads = "".join(f"mad.wide.u32 %d0, %t, 8, %p{i}; ld.global.f64 %e{i}, [%d0];" for i in range(len(columns)))
    sources = ", ".join(f"%e{i}" for i in range(len(columns)))
    out = np.zeros_like(columns[0])
    store = f"mad.wide.u32 %d0, %t, 8, %p{len(columns)}; st.global.f64 [%d0], %e7;"
    run(f"{loads} {instruction} %e7, {sources}; {store}", *columns, out, threads=len(out))
    return out


def test_rsqrt_of_doubles_is_accurate():
    """PTX ISA, rsqrt: .approx.f64 is emulated; .approx.ftz.f64 is the gross approximation."""
    assert np.abs(on_doubles("rsqrt.approx.f64", X) * np.sqrt(X) - 1).max() < 2.0**-51
    gross = on_doubles("rsqrt.approx.ftz.f64", X).view(np.uint64)
    assert not (gross & np.uint64(0xFFFFFFFF)).any()


TINY, MOST = 2.0**-60, np.finfo(np.float64).max
# (a, b, a + b towards zero, down, up)
SUMS = [
    (1.0, TINY, 1.0, 1.0, 1 + 2.0**-52),
    (1.0, -TINY, 1 - 2.0**-53, 1 - 2.0**-53, 1.0),
    (-1.0, -TINY, -1.0, -1 - 2.0**-52, -1.0),
    (-1.0, TINY, -1 + 2.0**-53, -1.0, -1 + 2.0**-53),
    (MOST, MOST, MOST, MOST, np.inf),
    (-MOST, -MOST, -MOST, -np.inf, -MOST),
    (np.inf, 1.0, np.inf, np.inf, np.inf),
    (1.0, -1.0, 0.0, -0.0, 0.0),
    (1.5, 2.25, 3.75, 3.75, 3.75),
]


def test_directed_sums_of_doubles():
    a, b, *expected = np.array(SUMS).T.copy()
    for mode, values in zip(("rz", "rm", "rp"), expected, strict=True):
        assert on_doubles(f"add.{mode}.f64", a, b).tobytes() == values.tobytes(), mode
        assert on_doubles(f"sub.{mode}.f64", a, -b).tobytes() == values.tobytes(), mode


LOCK = """extern "C" __global__ void count(int* lock, int* counter) {
  if (threadIdx.x) return;
  for (int i = 0; i < 2; ++i) {
    while (atomicCAS(lock, 0, 1) != 0);
    __threadfence();
    *counter += 1;
    __threadfence();
    atomicExch(lock, 0);
  }
}"""


def test_blocks_take_turns_by_a_spin_lock(monkeypatch):
    """Every turn acquires the turns before it; attempts that fail leave nothing to acquire."""
    join, joins = Clocks.acquire_snapshot, []

    def counted(*arguments, **options):
        joins.append(arguments)
        join(*arguments, **options)

    monkeypatch.setattr(Clocks, "acquire_snapshot", counted)
    lock, counter, memory = np.zeros(1, np.int32), np.zeros(1, np.int32), Memory()
    ptx = nvrtc.compile(LOCK, "count", "compute_80").ptx
    parameters = pack(ptx, "count", memory.add(lock, "lock"), memory.add(counter, "counter"))
    launch(ptx, "count", (4, 1, 1), (32, 1, 1), parameters, memory=memory, most_basic_blocks=40_000)
    assert counter[0] == 8
    assert len(joins) <= 8 * 4


# Block 0 writes a word and executes atom.cas on a flag; block 1 waits for a value of the flag, and reads the word.
FAILED = """
    setp.ne.u32 %q1, %t, 0;
    @%q1 exit;
    setp.eq.u32 %q0, %block, 1;
    @%q0 bra READER;
    st.global.b32 [%p0], 7;
    atom.release.gpu.global.cas.b32 %r0, [%p1], {compared}, 1;
    exit;
READER:
    ld.acquire.gpu.global.b32 %r1, [%p1];
    setp.ne.u32 %q2, %r1, {read};
    @%q2 bra READER;
    ld.global.b32 %r2, [%p0];
    st.global.b32 [%p2], %r2;
"""


def after_cas(compared, read):
    out = np.zeros(1, np.uint32)
    body = FAILED.format(compared=compared, read=read)
    run(body, np.zeros(1, np.uint32), np.zeros(1, np.uint32), out, threads=32, blocks=2)
    return out[0]


def test_only_a_successful_cas_releases():
    assert after_cas(compared=0, read=1) == 7
    with pytest.raises(errors.Race, match="without a release and an acquire"):
        after_cas(compared=5, read=0)
