"""Imports have no cycles, need only NumPy, are fast, and write no files."""

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import resolve_name
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "cupy_flash"

# Modules in the order in which a call passes through them; a module imports only modules above it.
FLOW = (
    "array_libraries",
    "arrays",
    "device",
    "dropout",
    "environment",
    "jit",
    "jit.nvrtc",
    "jit.kernel_cache",
    "jit.source",
    "jit.shared_memory",
    "mods",
    "mods.block_tables",
    "mods.ir",
    "mods.clamps",
    "mods.derive",
    "mods.functions",
    "mods.intervals",
    "mods.masks",
    "mods.numpy_code",
    "mods.tiles",
    "mods.cuda_code",
    "mods.trace_guards",
    "mods.values",
    "mods.traced_objects",
    "mods.trace",
    "mods.explain",
    "mods.plot",
    "mods.vmapped",
    "problem",
    "problem.argument_types",
    "problem.features",
    "problem.mask",
    "problem.gradients",
    "problem.records",
    "problem.kv_cache_contents",
    "problem.checks",
    "problem.merge",
    "problem.mod_checks",
    "problem.selection",
    "problem.indexer",
    "problem.kv_cache",
    "problem.shared_kv",
    "problem.statistics",
    "problem.build",
    "problem.weights",
    "problem.recorded_call",
    "engines.launch",
    "engines.shared",
    "engines.latent",
    "engines.cpu",
    "engines.cpu_decode",
    "engines.aten",
    "engines.fragments",
    "engines.kv_cache",
    "engines.selected",
    "engines.simt",
    "engines.mma",
    "engines.mma_decode",
    "engines.indexer",
    "engines.wgmma.resources",
    "engines.wgmma.backward",
    "engines.wgmma.forward",
    "engines.wgmma.forward_fp8",
    "engines.wgmma",
    "engines.tcgen05",
    "engines",
    "plan",
    "plan.measurements",
    "plan.refusals",
    "plan.plan",
    "cpu",
    "cpu.decode.keys",
    "cpu.decode.append",
    "cpu.statistics",
    "cpu.partials",
    "cpu.score",
    "cpu.decode.sequences",
    "cpu.thread_pool",
    "cpu.blas",
    "cpu.softmax",
    "cpu.visited_tiles",
    "cpu.attention",
    "cpu.selected",
    "cpu.decode.selected",
    "cpu.decode",
    "cpu.aten",
    "cpu.derivatives",
    "cpu.selected_derivatives",
    "cpu.weights",
    "cpu.selected_weights",
    "cpu.indexer",
    "cpu.decode.weights",
    "gpu",
    "gpu.ahead",
    "gpu.captured",
    "gpu.tensor_map",
    "gpu.params",
    "gpu.run_plan",
    "gpu.weights",
    "gpu.indexer",
    "gpu.kept_launches",
    "gpu.cuda",
    "explanation",
    "dispatch",
    "keyed_plan",
    "adapters",
    "adapters.axes",
    "adapters.jax.ffi_structs",
    "adapters.jax.shutdown",
    "adapters.jax.static_call",
    "adapters.jax.ffi_handler",
    "adapters.jax.primitive",
    "adapters.jax.sharding",
    "adapters.jax.vmap",
    "adapters.jax.ffi_execute",
    "adapters.jax.derivatives",
    "adapters.jax.statistics",
    "adapters.jax.op",
    "adapters.jax.kv_cache",
    "adapters.jax.indexer",
    "adapters.jax.nn",
    "adapters.jax.ring",
    "adapters.jax.weights",
    "adapters.jax",
    "adapters.model_config",
    "adapters.torch.autograd_kernel",
    "adapters.torch.keyed_plan",
    "adapters.torch.fp8",
    "adapters.torch.op",
    "adapters.torch.indexer",
    "adapters.torch.keyed_autograd",
    "adapters.torch.keyed_sdpa",
    "adapters.torch.derivatives",
    "adapters.torch.kv_cache",
    "adapters.torch.kv_cache_drop_in",
    "adapters.torch.registry",
    "adapters.torch.retained_memory",
    "adapters.torch.sharding",
    "adapters.torch.statistics",
    "adapters.torch.transforms",
    "adapters.torch.weights",
    "adapters.torch.api",
    "adapters.torch.sdpa_drop_in",
    "adapters.torch.flash_attn_drop_in",
    "adapters.torch.flash_mla_drop_in",
    "adapters.torch.flex_attention_drop_in",
    "adapters.torch.varlen_attn_drop_in",
    "adapters.torch.module",
    "adapters.torch",
    "adapters.transformers",
    "adapters.xformers",
    "adapters.diffusers",
    "adapters.tape_call",
    "adapters.mlx",
    "adapters.tensorflow",
    "api",
    "distributed.channel",
    "distributed.shards",
    "distributed.ring",
    "distributed.ulysses",
    "distributed",
    "indexer",
    "kv_cache",
    "mask_blocks",
    "weights",
    "memory",
    "dual_numbers",
    "reference",
    "simulator.asynchrony",
    "simulator.errors",
    "simulator.instructions",
    "simulator.instructions.convert",
    "simulator.machine",
    "simulator.machine.ptx",
    "simulator.counters",
    "simulator.machine.calls",
    "simulator.machine.parser",
    "simulator.machine.parameters",
    "simulator.machine.program",
    "simulator.memory",
    "simulator.memory.store",
    "simulator.machine.context",
    "simulator.instructions.closures",
    "simulator.asynchrony.boxes",
    "simulator.asynchrony.registers",
    "simulator.instructions.integer",
    "simulator.instructions.floating",
    "simulator.instructions.moves",
    "simulator.instructions.selection",
    "simulator.memory.clocks",
    "simulator.memory.grid_order",
    "simulator.memory.checks",
    "simulator.asynchrony.barriers",
    "simulator.instructions.access",
    "simulator.asynchrony.copies",
    "simulator.asynchrony.wgmma",
    "simulator.instructions.collectives",
    "simulator.instructions.matrix",
    "simulator.memory.shared_addresses",
    "simulator.asynchrony.clusters",
    "simulator.asynchrony.exits",
    "simulator.asynchrony.cluster_loads",
    "simulator.asynchrony.mbarriers",
    "simulator.asynchrony.bulk",
    "simulator.asynchrony.fences",
    "simulator.asynchrony.tensor_memory",
    "simulator.asynchrony.tcgen05_descriptors",
    "simulator.asynchrony.tcgen05",
    "simulator.machine.steps",
    "simulator.machine.scheduler",
    "simulator.named_checks",
    "simulator.machine.launch",
    "simulator",
    "simulator.run",
    "measure",
    "measure.checks",
    "measure.checks.hopper.case",
    "measure.checks.hopper.bulk",
    "measure.checks.hopper.shared_memory",
    "measure.checks.hopper.subnormals",
    "measure.checks.hopper.synchronisation",
    "measure.checks.hopper.wgmma",
    "measure.checks.hopper",
    "measure.checks.blackwell.case",
    "measure.checks.blackwell.products",
    "measure.checks.blackwell.copies",
    "measure.checks.blackwell.tensor_memory",
    "measure.checks.blackwell",
    "measure.checks.instructions",
    "measure.checks.isa",
    "measure.checks.references",
    "measure.checks.tolerance",
    "measure.other_libraries",
    "measure.worker_process",
    "measure.checks.micro_kernels",
    "measure.checks.evidence",
    "measure.checks.simulated",
    "measure.checks.calls",
    "measure.checks.verdicts",
    "measure.tuning",
    "__init__",
    "commands",
    "commands.check",
    "commands.kernel_cache",
    "commands.info",
    "commands.memory",
    "commands.problem_arguments",
    "commands.compile",
    "commands.explain",
    "commands.ptx",
    "commands.report",
    "commands.tune",
    "__main__",
)

OPTIONAL = ("torch", "jax", "mlx", "paddle", "tensorflow", "warp", "cupy", "cupy_backends", "cuda", "transformers")
LAZY = (*OPTIONAL, "ml_dtypes", "threadpoolctl", "platformdirs", "typing_extensions")

ATTENTION = """
import numpy as np
import cupy_flash

rng = np.random.default_rng(0)
q, k, v = (rng.standard_normal((2, 5, 3, 8), dtype=np.float32) for _ in range(3))
out = cupy_flash.attention(q, k, v, causal=True)
S = np.einsum("bihd,bjhd->bhij", q, k) / np.sqrt(8)
S[..., np.triu(np.ones((5, 5), dtype=bool), 1)] = -np.inf
P = np.exp(S - S.max(axis=-1, keepdims=True))
P /= P.sum(axis=-1, keepdims=True)
assert type(out) is np.ndarray and out.dtype == np.float32
np.testing.assert_allclose(out, np.einsum("bhij,bjhd->bihd", P, v), rtol=0, atol=2e-6)
"""

BLOCK = """
import sys


class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {blocked!r}:
            raise ModuleNotFoundError(f"{{name}} is blocked")


sys.meta_path.insert(0, Blocker())
"""

RECORD_WRITES = """
import os
import sys

writes = []


def record(event, arguments):
    if event == "open":
        path, mode, flags = arguments
        if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            writes.append((event, path))
    elif event in ("os.mkdir", "os.rename", "os.link", "os.symlink", "os.remove", "os.truncate"):
        writes.append((event, *arguments))


sys.addaudithook(record)
"""


def python(code: str, **variables: str) -> str:
    """Return the output of `code` in a fresh process that imports this checkout."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | variables
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def module_name(path: Path) -> str:
    """Return the name in FLOW: a folder's __init__ has the folder's name, the package's own is __init__."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if len(parts) > 1 and parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def package_of(module: str) -> str:
    """Return the package to which the relative imports of `module` refer."""
    return ".".join(("cupy_flash", *MODULES[module].parent.relative_to(PACKAGE).parts))


def imports_of(module: str) -> Iterator[tuple[str, bool]]:
    """Yield (module of cupy_flash that `module` imports, whether the import is inside a function)."""
    tree = ast.parse(MODULES[module].read_text(encoding="utf-8"))
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    inside = {id(node) for function in functions for node in ast.walk(function)}
    # Imports under TYPE_CHECKING never run.
    for_types = [
        node for node in ast.walk(tree) if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    ]
    never = {id(node) for block in for_types for node in ast.walk(block)}
    for node in ast.walk(tree):
        if id(node) in never:
            continue
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            source = resolve_name("." * node.level + (node.module or ""), package_of(module))
            names = [f"{source}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            library, *path = name.split(".")
            if library != "cupy_flash":
                continue
            while path and ".".join(path) not in MODULES:  # the last part may name a function or a class
                path.pop()
            yield ".".join(path) or "__init__", id(node) in inside


def test_flow_lists_every_module() -> None:
    assert sorted(FLOW) == sorted(MODULES)


@pytest.mark.parametrize("module", FLOW)
def test_imports_go_one_way(module: str) -> None:
    earlier = FLOW[: FLOW.index(module)]
    for imported, lazy in imports_of(module):
        assert imported in earlier, f"{module} imports {imported}, which is not earlier in the flow"
        # An adapter imports its framework at its top, so other modules may import the adapter only inside functions.
        from_outside = imported.startswith("adapters.") and not module.startswith("adapters.")
        assert lazy or not from_outside, f"{module} imports {imported} at its top"


def test_import_loads_numpy_alone() -> None:
    loaded = python("import sys, cupy_flash; print(*{name.partition('.')[0] for name in sys.modules})").split()
    assert "numpy" in loaded
    assert not set(loaded) & set(LAZY)


def test_submodules_are_imported_at_their_first_use() -> None:
    code = "import sys, cupy_flash as package; print({*package.MODULES} & {*dir(package)}, package.reference.attention)"
    assert python(code).startswith("set() <function attention")


def test_import_needs_numpy_alone() -> None:
    assert python(BLOCK.format(blocked=LAZY) + "import cupy_flash; print(cupy_flash.__version__)")


def test_numpy_attention_needs_no_optional_library() -> None:
    python(BLOCK.format(blocked=OPTIONAL) + ATTENTION)


def test_numpy_attention_works_where_importing_cupy_fails(tmp_path: Path) -> None:
    # CuPy raises FileNotFoundError instead of ImportError if it cannot create its cache folder.
    (tmp_path / "cupy.py").write_text('raise FileNotFoundError("no place for the kernel cache")')
    assert "no place" in python(
        "try:\n    import cupy\nexcept FileNotFoundError as error:\n    print(error)", PYTHONPATH=str(tmp_path)
    )
    python(ATTENTION, PYTHONPATH=str(tmp_path))


def test_import_and_numpy_attention_write_nothing(tmp_path: Path) -> None:
    # Python itself may write bytecode. HOME shows writes that the audit hook does not see.
    home = {"HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"}
    assert python(RECORD_WRITES + ATTENTION + "print(writes)", **home) == "[]"
    assert not list(tmp_path.iterdir())


COUNT_CALLS = """
import sys, numpy
calls = 0


def count(frame, event, argument):
    global calls
    calls += event in ("call", "c_call")


sys.setprofile(count)
import cupy_flash
sys.setprofile(None)
print(calls)
"""


def test_import_is_quick(tmp_path: Path) -> None:
    """Importing makes some 22,000 function calls; their number, unlike their time, is the same on any machine.

    A first process compiles the modules to bytecode, as an installation does.
    """
    compiled = {"PYTHONPYCACHEPREFIX": str(tmp_path), "PYTHONDONTWRITEBYTECODE": ""}
    _, calls = (int(python(COUNT_CALLS, **compiled)) for _ in range(2))
    assert 1000 < calls <= 22_000
