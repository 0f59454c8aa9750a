"""Small PTX kernels for the simulator's tests: a body and its arrays."""

import struct

from cupy_flash.backends.simulator import Memory, launch

HEADER = """
.version 8.1
.target sm_90
.address_size 64
{variables}
.visible .entry micro({parameters})
{{
    .reg .pred %q<8>;
    .reg .b16 %h<16>;
    .reg .b32 %t, %block, %r<64>;
    .reg .b64 %p<8>, %d<32>;
    .reg .f32 %f<64>;
    .reg .f64 %e<8>;
    {shared}
    mov.u32 %t, %tid.x;
    mov.u32 %block, %ctaid.x;
    {pointers}
    {body}
    exit;
}}
"""


def source(body, arrays, *, shared="", variables=""):
    """The text: array i is at %pi, the thread index in %t, the block index in %block."""
    return HEADER.format(
        variables=variables,
        shared=shared,
        parameters=", ".join(f".param .u64 a{i}" for i in range(len(arrays))),
        pointers=" ".join(f"ld.param.u64 %p{i}, [a{i}];" for i in range(len(arrays))),
        body=body,
    )


def run(body, *arrays, threads=32, blocks=1, shared="", variables="", dynamic=0, outputs=(), constant=(), **options):
    """Run a body; `outputs` and `constant` are indices of arrays that start uninitialised, that are read-only."""
    memory = Memory()
    pointers = [
        memory.add(array, f"array {i}", initialised=i not in outputs, writable=i not in constant)
        for i, array in enumerate(arrays)
    ]
    return launch(
        source(body, arrays, shared=shared, variables=variables),
        "micro",
        (blocks, 1, 1),
        threads if isinstance(threads, tuple) else (threads, 1, 1),
        struct.pack(f"{len(arrays)}Q", *pointers),
        memory=memory,
        dynamic_shared=dynamic,
        **options,
    )
