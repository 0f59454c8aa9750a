"""Runs every micro-kernel on a GPU or on the simulator, and compares the results.

The driver assembles the same PTX text that the simulator executes; NVRTC is not involved.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import ml_dtypes
import numpy as np

from ...gpu.tensor_map import TensorMap, encode_for_gpu, encode_for_simulator
from ...simulator import Memory, launch
from ..worker_process import Announce
from . import blackwell, hopper
from .blackwell.case import ALSO, TARGET, BlackwellCase
from .hopper.case import HopperCase
from .instructions import CASES, MMA_FORMS, THREADS, TYPES, WARP_CASES, Case, mma_body
from .isa import ISA_CASES, SHARED, IsaCase

Array = np.ndarray
SECONDS = 10  # time-out of a kernel; none takes a tenth of it, including the driver's assembler
OF_DENORMALS = "m16n8k16-f16"  # the mma that multiplies codes of 4 bits as they are
VERSIONS = {TARGET: "8.6"}  # of PTX, by target
HEADER = """
.version {version}
.target {target}
.address_size 64
{variables}
.visible .entry micro({parameters}) {directives}
{{
    .reg .pred %q<8>;
    .reg .b16 %h<16>;
    .reg .b32 %t, %block, %r<64>;
    .reg .b64 %p<8>, %m<4>, %d<32>;
    .reg .f32 %f<192>;
    .reg .f64 %e<8>;
    {shared}
    mov.u32 %t, %tid.x;
    mov.u32 %block, %ctaid.x;
    {pointers}
    {body}
    exit;
}}
"""


@dataclass(frozen=True)
class Kernel:
    """The kernel `micro` of a PTX text, its arrays and its launch.

    The arguments of a launch are pointers to the inputs and the output, then the number of rows unless it is None, then
    the tensor maps, each given as the index of its array and a function from the array's address to the map.
    """

    name: str
    text: str
    inputs: tuple[Array, ...]
    out: Array  # initial values of the output
    blocks: int
    threads: int
    rows: int | None = None
    maps: tuple[tuple[int, Callable[[int], TensorMap]], ...] = ()
    dynamic: int = 0  # bytes of dynamic shared memory
    relative: float | None = None  # relative error bound of an approximation
    family: str | None = None  # the name in MICRO_KERNELS of the engines that use it; None: all use it
    expected: Array | None = None  # the output that the PTX ISA states; None: that of the simulator

    @property
    def key(self) -> str:
        """The key of the kernel in a file of arrays."""
        return self.name.replace(".", "_")

    def runs_on(self, capability: int) -> bool:
        """Return whether a GPU of this compute capability (90 for 9.0) supports the kernel."""
        target = self.text.split(".target sm_")[1].split()[0]
        if target == TARGET.removeprefix("sm_") and f"sm_{capability}a" in ALSO:
            return True
        return capability == int(target[:-1]) if target.endswith("a") else capability >= int(target)

    def text_for(self, capability: int) -> str:
        """Return the text for a GPU of this compute capability, on which it runs."""
        version = ALSO.get(arch := f"sm_{capability}a")
        if version is None or f".target {TARGET}" not in self.text:
            return self.text
        return self.text.replace(f".version {VERSIONS[TARGET]}", f".version {version}").replace(TARGET, arch)


def every_kernel() -> Iterator[Kernel]:
    """Yield all kernels, Hopper's and Blackwell's first."""
    yield from map(_of_hopper, hopper.CASES)
    yield from map(_of_hopper, blackwell.CASES)
    for case in (*CASES, *WARP_CASES):
        yield _of_instruction(case)
    for form, (_, type_, *words) in MMA_FORMS.items():
        # PTX leaves the order and the rounding of mma's sums undefined.
        yield _of_mma(f"mma.{form}", form, mma_operands(type_, *words), relative=2.0**-10)
    yield _of_mma(f"mma.{OF_DENORMALS}-denormals", OF_DENORMALS, denormal_operands())
    yield from map(_of_isa, ISA_CASES)


def _of_hopper(case: HopperCase) -> Kernel:
    text = source(case.body, [*case.inputs, case.out], maps=len(case.maps), **case.options)
    return Kernel(
        case.name, text, case.inputs, case.out, case.blocks, case.threads, maps=case.maps, dynamic=case.dynamic,
        family="tcgen05" if isinstance(case, BlackwellCase) else "wgmma", expected=case.expected,
    )  # fmt: skip


def _of_instruction(case: Case) -> Kernel:
    values = tuple(case.values())
    rows = len(values[0])
    out: Array = np.zeros(rows, TYPES[case.output][2])
    return Kernel(case.name, case.ptx, values, out, -(-rows // THREADS), THREADS, rows, relative=case.relative)


def _of_mma(name: str, form: str, operands: tuple[Array, ...], relative: float | None = None) -> Kernel:
    out = np.zeros((32, 4), np.float32)
    target = "sm_90" if MMA_FORMS[form][1].startswith("e") else "sm_80"
    text = source(mma_body(form), [*operands, out], target=target)
    return Kernel(name, text, operands, out, 1, 32, relative=relative, family="mma")


def _of_isa(case: IsaCase) -> Kernel:
    text = source(case.body, [*case.inputs, case.out], shared=SHARED, target=case.target)
    return Kernel(
        case.name, text, case.inputs, case.out, case.blocks, case.threads, relative=case.relative,
        expected=case.expected,
    )  # fmt: skip


def mma_operands(type_: str, a_words: int, b_words: int) -> tuple[Array, Array, Array]:
    """Return random fragments of A, B and C, large enough that sums are rounded, and too small to overflow."""
    dtypes = {"f16": np.float16, "bf16": ml_dtypes.bfloat16, "tf32": np.float32}
    dtypes |= {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}
    dtype = np.dtype(dtypes[type_])
    rng = np.random.default_rng(a_words)
    a, b = (
        rng.standard_normal((32, words * (4 // dtype.itemsize))).astype(dtype).view(np.uint32)
        for words in (a_words, b_words)
    )
    return a, b, rng.standard_normal((32, 4)).astype(np.float32)


def denormal_operands() -> tuple[Array, Array, Array]:
    """Return fragments of integers, of codes of 4 bits as denormals (mma/cvt_codes.cuh), and of zeros.

    Their sums are integers in units of 2^-24, exact in every order.
    """
    rng = np.random.default_rng(0)
    a = rng.integers(-3, 4, (32, 8)).astype(np.float16).view(np.uint32)
    return a, rng.integers(0, 16, (32, 4), np.uint16).view(np.uint32), np.zeros((32, 4), np.float32)


def source(
    body: str,
    arrays: Sequence[Array],
    *,
    shared: str = "",
    variables: str = "",
    maps: int = 0,
    target: str = "sm_90",
    directives: str = "",
) -> str:
    """Return the PTX: %pi points to array i, %mi to tensor map i; %t is the thread index, %block the block index."""
    parameters = [f".param .u64 a{i}" for i in range(len(arrays))]
    parameters += [f".param .align 64 .b8 map{i}[128]" for i in range(maps)]
    pointers = [f"ld.param.u64 %p{i}, [a{i}];" for i in range(len(arrays))]
    pointers += [f"mov.b64 %m{i}, map{i}; cvta.param.u64 %m{i}, %m{i};" for i in range(maps)]
    return HEADER.format(
        version=VERSIONS.get(target, "8.4"),
        target=target,
        directives=directives,
        variables=variables,
        shared=shared,
        parameters=", ".join(parameters),
        pointers=" ".join(pointers),
        body=body,
    )


def simulate(kernel: Kernel) -> Array:
    """Run a micro-kernel on the simulator and return its output."""
    memory, out = Memory(), kernel.out.copy()
    arrays = [*(x.copy() for x in kernel.inputs), out]
    pointers = [memory.add(x, f"array {i}") for i, x in enumerate(arrays)]
    parameters = struct.pack(f"{len(pointers)}Q", *pointers)
    if kernel.rows is not None:
        parameters += struct.pack("I", kernel.rows)
    for i, tensor_map in kernel.maps:
        parameters = parameters.ljust(-(-len(parameters) // 64) * 64, b"\0")
        parameters += encode_for_simulator(tensor_map(pointers[i]))
    grid, block = (kernel.blocks, 1, 1), (kernel.threads, 1, 1)
    launch(kernel.text, "micro", grid, block, parameters, memory=memory, dynamic_shared=kernel.dynamic)
    return out


def difference(actual: Array, expected: Array, relative: float | None = None, source: str = "simulator") -> str | None:
    """Describe how many numbers differ, and the first of them; return None if all agree.

    Numbers agree if they have the same bits or both are NaN; with `relative`, if they differ by at most this fraction
    of the larger one. `source` says in the message where the expected numbers are from.
    """
    same = actual == expected
    if actual.dtype.kind == "f":
        same &= np.signbit(actual) == np.signbit(expected)
        same |= np.isnan(actual) & np.isnan(expected)
        if relative is not None:
            with np.errstate(all="ignore"):
                apart, scale = np.abs(actual - expected), np.maximum(np.abs(actual), np.abs(expected))
            same |= apart <= 2 * relative * np.maximum(scale, 1e-30)
    if same.all():
        return None
    first = tuple(int(i) for i in np.argwhere(~same)[0])
    wrong = int((~same).sum())
    return f"{wrong} of {same.size} differ, the first at {first}: {actual[first]}, {source} {expected[first]}"


def run_on_gpu(kernel: Kernel) -> Array:
    """Run a kernel on the GPU and return its output."""
    import cupy

    module = cupy.cuda.Module()
    module.load(kernel.text_for(int(cupy.cuda.Device().compute_capability)).encode() + b"\0")
    function = module.get_function("micro")
    driver = cupy.cuda.driver
    driver.funcSetAttribute(function.ptr, driver.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, kernel.dynamic)
    arrays = [cupy.asarray(x) for x in (*kernel.inputs, kernel.out)]
    maps = [encode_for_gpu(tensor_map(arrays[i].data.ptr)) for i, tensor_map in kernel.maps]
    # CuPy passes a NumPy array of one element by value.
    by_value = [np.frombuffer(encoded, f"V{len(encoded)}").reshape(()) for encoded in maps]
    rows = [] if kernel.rows is None else [np.uint32(kernel.rows)]
    arguments = (*(np.uint64(x.data.ptr) for x in arrays), *rows, *by_value)
    function((kernel.blocks, 1, 1), (kernel.threads, 1, 1), arguments, shared_mem=kernel.dynamic)
    out: Array = cupy.asnumpy(arrays[-1])
    return out


@cache
def kernels() -> list[Kernel]:
    """Return all kernels, built once per process; their indices name them in requests to a worker process."""
    return list(every_kernel())


def work(number: int | None, announce: Announce) -> int | Array:
    """Return the output of the kernel with this number, or the compute capability for None; for the worker process."""
    import cupy

    if number is None:
        return int(cupy.cuda.Device().compute_capability)
    kernel = kernels()[number]
    announce(kernel.name, SECONDS)
    return run_on_gpu(kernel)
