"""Small PTX kernels for the simulator's tests, built from a body and its arrays."""

import struct

from cupy_flash.gpu.tensor_map import encode_for_simulator
from cupy_flash.measure.checks.micro_kernels import source
from cupy_flash.simulator import Memory, launch


def run(
    body, *arrays, threads=32, blocks=1, shared="", variables="", dynamic=0, outputs=(), constant=(), maps=(),
    target="sm_90", directives="", **options,
):  # fmt: skip
    """Run a kernel with this body on the simulator.

    outputs: indices of arrays that start uninitialised.
    constant: indices of read-only arrays.
    maps: (index of an array, function from its address to a tensor map) pairs.
    """
    memory = Memory()
    pointers = [
        memory.add(array, f"array {i}", initialised=i not in outputs, writable=i not in constant)
        for i, array in enumerate(arrays)
    ]
    parameters = struct.pack(f"{len(arrays)}Q", *pointers)
    for index, tensor_map in maps:
        parameters = parameters.ljust(-(-len(parameters) // 64) * 64, b"\0")
        parameters += encode_for_simulator(tensor_map(pointers[index]))
    return launch(
        source(body, arrays, shared=shared, variables=variables, maps=len(maps), target=target, directives=directives),
        "micro",
        (blocks, 1, 1),
        threads if isinstance(threads, tuple) else (threads, 1, 1),
        parameters,
        memory=memory,
        dynamic_shared=dynamic,
        **options,
    )
