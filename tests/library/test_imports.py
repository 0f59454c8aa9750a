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
    "environment",
    "isolated",
    "arrays",
    "arguments",
    "mask",
    "features",
    "mods",
    "mods.ir",
    "mods.functions",
    "mods.sources",
    "mods.values",
    "mods.objects",
    "mods.block_tables",
    "mods.trace",
    "mods.instances",
    "mods.derive",
    "mods.numpy_code",
    "mods.intervals",
    "mods.tiles",
    "mods.clamps",
    "mods.cuda_code",
    "mods.masks",
    "score",
    "mods.visits",
    "dropout",
    "reference",
    "cache_records",
    "problem",
    "cache_params",
    "mods.captured",
    "device",
    "source",
    "nvrtc",
    "cache",
    "evidence",
    "tensor_map",
    "params",
    "launch",
    "engines",
    "engines.shared",
    "engines.cached",
    "engines.fragments",
    "engines.cpu",
    "engines.cpu_decode",
    "engines.simt",
    "engines.mma",
    "engines.mma_decode",
    "engines.wgmma.hopper",
    "engines.wgmma.backward",
    "engines.wgmma.forward",
    "engines.wgmma.forward_fp8",
    "engines.wgmma",
    "plan",
    "requirements",
    "mods.facts",
    "mods.explain",
    "mods.plot",
    "pose",
    "spans",
    "pose_cache",
    "cache_trial",
    "trial",
    "peers",
    "ahead",
    "partials",
    "backends.workers",
    "backends.products",
    "backends.cpu",
    "backends.cpu_derivatives",
    "backends.decode.append",
    "backends.decode.keys",
    "backends.decode.sequences",
    "backends.decode.mods",
    "backends.decode",
    "backends.kernels",
    "backends.cuda",
    "backends.simulator.errors",
    "backends.simulator.named_checks",
    "backends.simulator.machine",
    "backends.simulator.machine.ptx",
    "backends.simulator.machine.calls",
    "backends.simulator.machine.parser",
    "backends.simulator.machine.program",
    "backends.simulator.counters",
    "backends.simulator.memory",
    "backends.simulator.memory.store",
    "backends.simulator.machine.context",
    "backends.simulator.memory.shared_addresses",
    "backends.simulator.memory.clocks",
    "backends.simulator.memory.grid_order",
    "backends.simulator.memory.checks",
    "backends.simulator.instructions",
    "backends.simulator.instructions.convert",
    "backends.simulator.instructions.closures",
    "backends.simulator.instructions.selection",
    "backends.simulator.instructions.integer",
    "backends.simulator.instructions.floating",
    "backends.simulator.instructions.moves",
    "backends.simulator.instructions.access",
    "backends.simulator.instructions.collectives",
    "backends.simulator.instructions.matrix",
    "backends.simulator.asynchrony",
    "backends.simulator.asynchrony.barriers",
    "backends.simulator.asynchrony.clusters",
    "backends.simulator.asynchrony.exits",
    "backends.simulator.asynchrony.cluster_loads",
    "backends.simulator.asynchrony.mbarriers",
    "backends.simulator.asynchrony.fences",
    "backends.simulator.asynchrony.registers",
    "backends.simulator.asynchrony.copies",
    "backends.simulator.asynchrony.boxes",
    "backends.simulator.asynchrony.bulk",
    "backends.simulator.asynchrony.wgmma",
    "backends.simulator.machine.scheduler",
    "backends.simulator.machine.launch",
    "backends.simulator",
    "backends.simulator.run",
    "backends",
    "mods.blocks",
    "adapters",
    "adapters.axes",
    "adapters.torch.fp8",
    "adapters.torch.autograd_kernel",
    "adapters.torch.op",
    "adapters.torch.derivatives",
    "adapters.torch.transforms",
    "adapters.torch.cache",
    "adapters.torch.cache_drop_in",
    "adapters.torch.drop_in",
    "adapters.torch.module",
    "adapters.torch.saved",
    "adapters.torch.registry",
    "adapters.torch.sharding",
    "adapters.torch",
    "adapters.transformers",
    "adapters.jax.frame",
    "adapters.jax.calls",
    "adapters.jax.folding",
    "adapters.jax.sharding",
    "adapters.jax.shutdown",
    "adapters.jax.handler",
    "adapters.jax.primitive",
    "adapters.jax.step",
    "adapters.jax.derivatives",
    "adapters.jax.op",
    "adapters.jax.nn",
    "adapters.jax.cache",
    "adapters.jax.ring",
    "adapters.jax",
    "adapters.model_config",
    "memory",
    "api",
    "kv_cache",
    "distributed.shards",
    "distributed.channel",
    "distributed.ring",
    "distributed.ulysses",
    "distributed",
    "checks",
    "checks.instructions",
    "checks.hopper.case",
    "checks.hopper.wgmma",
    "checks.hopper.bulk",
    "checks.hopper.shared_memory",
    "checks.hopper.subnormals",
    "checks.hopper.synchronisation",
    "checks.hopper",
    "checks.micro_kernels",
    "checks.simulated",
    "checks.tolerance",
    "checks.references",
    "checks.calls",
    "checks.verdicts",
    "tuning",
    "__init__",
    "commands",
    "commands.problem_arguments",
    "commands.cache",
    "commands.info",
    "commands.check",
    "commands.compile",
    "commands.tune",
    "commands.report",
    "commands.explain",
    "commands.ptx",
    "commands.memory",
    "__main__",
)

OPTIONAL = ("torch", "jax", "cupy", "cupy_backends", "cuda", "transformers")
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
    """The output of `code` in a fresh process that imports this checkout."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | variables
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def module_name(path: Path) -> str:
    """The name in FLOW: a folder's __init__ has the folder's name, the package's own is __init__."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if len(parts) > 1 and parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def package_of(module: str) -> str:
    """The package to which the relative imports of `module` refer."""
    return ".".join(("cupy_flash", *MODULES[module].parent.relative_to(PACKAGE).parts))


def imports_of(module: str) -> Iterator[tuple[str, bool]]:
    """The modules of cupy_flash that `module` imports; True if the import is inside a function."""
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
    # CuPy raises this instead of ImportError if it cannot create its cache folder.
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
    """Importing makes some 13,000 function calls, which take 44 ms; the number is the same on any machine.

    A first process compiles the modules to bytecode, as an installation does.
    """
    compiled = {"PYTHONPYCACHEPREFIX": str(tmp_path), "PYTHONDONTWRITEBYTECODE": ""}
    _, calls = (int(python(COUNT_CALLS, **compiled)) for _ in range(2))
    assert 1000 < calls <= 20_000
