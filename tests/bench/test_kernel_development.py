"""The commands of users import nothing of bench/kernel_development."""

import ast
import subprocess
import sys

import pytest

from bench.__main__ import KERNEL_DEVELOPMENT, main
from bench.kernel_development import commands
from bench.results import ROOT

# Imports all modules of users, runs a command without other implementations, whose compilation would take a minute, and
# prints the modules of the folder that have been imported.
RUN = """
import importlib.util, pkgutil, sys
import bench
for module in pkgutil.iter_modules(bench.__path__):
    if not module.ispkg:
        importlib.import_module(f"bench.{module.name}")
find_spec = importlib.util.find_spec
importlib.util.find_spec = lambda name: None if name in ("torch", "matplotlib") else find_spec(name)
try:
    bench.__main__.main(sys.argv[1:])
except SystemExit:  # of --help
    pass
print(*(name for name in sys.modules if name.startswith("bench.kernel_development")))
"""


def imported(*arguments: str) -> list[str]:
    """Return the modules of the folder that a command imports in a fresh process."""
    done = subprocess.run([sys.executable, "-c", RUN, *arguments], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()[-1].split()


def test_a_command_of_users_imports_none_of_it(tmp_path):
    sizes = "--heads 1 --head-dim 8 --seqlens 16 --repeats 1 --threads 1"
    assert imported("forward", *sizes.split(), "--out", str(tmp_path)) == []
    assert (tmp_path / "forward.json").is_file()
    assert "bench.kernel_development.costs" in imported("costs", "--help")


def test_the_package_imports_no_bench():
    """`python -m cupy_flash check` and `tune` belong to the package, which must not depend on bench."""
    names = set()
    for path in (ROOT / "cupy_flash").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                names |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                names.add(node.module.partition(".")[0])
    assert "numpy" in names and "bench" not in names


def test_listed_commands_are_those_of_the_folder(capsys):
    for name in KERNEL_DEVELOPMENT:
        with pytest.raises(SystemExit, match="0"):
            main([name, "--help"])
        assert f"usage: python -m bench {name} " in capsys.readouterr().out
    with pytest.raises(SystemExit, match="2"):
        commands.run(["unknown"])
    listed = capsys.readouterr().err.partition("choose from")[2]
    assert set(listed.strip(" )\n").replace("'", "").split(", ")) == set(KERNEL_DEVELOPMENT)
