"""Compiles micro-kernels with NVRTC, so that PTX which ptxas rejects is found without a GPU.

NVRTC takes CUDA and not PTX, so each micro-kernel becomes a CUDA kernel of one asm statement.
"""

from __future__ import annotations

import re

from cupy_flash.measure.checks.micro_kernels import Kernel


def in_cuda(kernel: Kernel, name: str) -> str:
    """Return CUDA source of a kernel with the parameters, directives and body of the PTX text."""
    match = re.search(r"\.entry micro\((.*?)\)([^{]*)\{(.*)\}", kernel.text, re.DOTALL)
    assert match is not None
    parameters, directives, body = match.groups()
    operands, declared = [], []
    body = body.replace("%", "%%")  # in an asm statement % starts an operand
    for i, parameter in enumerate(parameters.split(",")):
        kind, parameter_name = parameter.removesuffix("[128]").split()[-2:]
        if kind == ".b8":
            declared.append(f"const __grid_constant__ Map {parameter_name}")
            operands.append(f'"l"(&{parameter_name})')
            body = re.sub(rf"{parameter_name}; cvta.param.u64 [^;]*;", f"%{i};", body)
        else:
            declared.append(f"unsigned long long {parameter_name}")
            operands.append(f'"l"({parameter_name})')
            body = re.sub(rf"ld\.param\.u64 (%%\w+), \[{parameter_name}\];", rf"mov.b64 \1, %{i};", body)
    text = "\\n".join(line.strip() for line in body.splitlines() if line.strip())
    threads = re.search(r"\.maxntid (\d+)", directives)
    attributes = f"__launch_bounds__({threads[1]}, 1) " if threads else ""
    attributes += "__cluster_dims__(2, 1, 1) " if "reqnctapercluster" in directives else ""
    asks_for_dynamic = "dynamic[0] = 0; " if kernel.dynamic else ""
    statement = f'asm volatile("{{ {text} }}" :: {", ".join(operands)} : "memory");'
    return f'extern "C" __global__ void {attributes}{name}({", ".join(declared)}) {{ {asks_for_dynamic}{statement} }}'


def source(kernels: list[Kernel]) -> str:
    """Return CUDA source with one kernel per micro-kernel."""
    head = (
        "struct alignas(64) Map { unsigned long long opaque[16]; };\n"
        "extern __shared__ __align__(1024) unsigned char dynamic[];\n"
    )
    return head + "\n".join(in_cuda(kernel, f"micro_{i}") for i, kernel in enumerate(kernels))
