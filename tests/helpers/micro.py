"""Small PTX kernels for the simulator's tests, made of a body and its arrays."""

import struct

from cupy_flash.backends.simulator import Memory, launch
from cupy_flash.tensor_map import encode_for_simulator

HEADER = """
.version 8.4
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


def source(body, arrays, *, shared="", variables="", maps=0, target="sm_90", directives=""):
    """The PTX: %pi points to array i, %mi to tensor map i; %t is the thread index, %block the block index."""
    parameters = [f".param .u64 a{i}" for i in range(len(arrays))]
    parameters += [f".param .align 64 .b8 map{i}[128]" for i in range(maps)]
    pointers = [f"ld.param.u64 %p{i}, [a{i}];" for i in range(len(arrays))]
    pointers += [f"mov.b64 %m{i}, map{i}; cvta.param.u64 %m{i}, %m{i};" for i in range(maps)]
    return HEADER.format(
        target=target,
        directives=directives,
        variables=variables,
        shared=shared,
        parameters=", ".join(parameters),
        pointers=" ".join(pointers),
        body=body,
    )


def run(
    body, *arrays, threads=32, blocks=1, shared="", variables="", dynamic=0, outputs=(), constant=(), maps=(),
    target="sm_90", directives="", **options,
):  # fmt: skip
    """Run a body. `outputs`: indices of arrays that start uninitialised; `constant`: of read-only ones; `maps`:
    (index of an array, function from its address to a tensor map) pairs."""
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
