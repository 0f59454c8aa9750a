"""Compiles Triton and Gluon kernels to PTX without a GPU, once for each version of Triton."""

import hashlib
import json
import os
from pathlib import Path
from typing import NamedTuple

import triton
from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.experimental.gluon._runtime import GluonASTSource


class Compiled(NamedTuple):
    """The PTX and the facts that a launch needs; `tiles` has Triton's description of each tensor map."""

    ptx: str
    name: str
    threads: int
    shared: int
    tiles: list


def compile_kernel(kernel, signature, constants, capability, **options):
    """Return the kernel of these types and constants, from the cache of the session if it was compiled before."""
    # Triton's own launcher also tells the compiler that addresses of arrays are multiples of 16, if they are.
    aligned = {(i,): [["tt.divisibility", 16]] for i, type_ in enumerate(signature.values()) if type_.startswith("*")}
    source = (GluonASTSource if kernel.is_gluon() else ASTSource)(kernel, signature, constants, aligned)
    key = f"{source.hash()}-{capability}-{sorted(options.items())}"
    folder = Path(os.environ["CUPY_FLASH_CACHE_DIR"]) / f"triton-{triton.__version__}"
    path = folder / f"{source.name}-{hashlib.sha256(key.encode()).hexdigest()[:24]}.json"
    if path.exists():
        return Compiled(**json.loads(path.read_text()))
    compiled = _compile(source, GPUTarget("cuda", capability, 32), options)
    folder.mkdir(exist_ok=True)
    mine = path.with_suffix(f".{os.getpid()}")
    mine.write_text(json.dumps(compiled._asdict()))
    mine.replace(path)
    return compiled


def _compile(source, target, options):
    """Compile by the stages of triton.compile up to PTX; the simulator needs no result of the next stage, ptxas."""
    backend = make_backend(target)
    options = backend.parse_options({"enable_fp_fusion": True} | options)
    stages, metadata = {}, {}
    backend.add_stages(stages, options, source.language)
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    functions = backend.get_codegen_implementation(options)
    module = source.make_ir(target, options, functions, backend.get_module_map(), context)
    metadata["num_warps"] = options.num_warps
    for name, stage in stages.items():
        module = stage(module, metadata)
        if name == "ptx":
            break
    assert not metadata["global_scratch_size"]
    return Compiled(
        module, metadata["name"], 32 * metadata["num_warps"], metadata["shared"], metadata["tensordesc_meta"]
    )
