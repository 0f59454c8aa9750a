"""Follows a recipe of CONTRIBUTING.md in a copy of the package, in the files that it names."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text("utf-8")


def section_of(heading):
    """The text of a recipe."""
    section = CONTRIBUTING.partition(f"## {heading}\n")[2].partition("\n## ")[0]
    assert section, f"CONTRIBUTING.md has no recipe {heading}"
    return section


def files_of(heading):
    """The files in the table of a recipe."""
    rows = re.findall(r"^\| (`.*?) \|", section_of(heading), re.MULTILINE)
    return [file for row in rows for file in re.findall(r"`([^`]+)`", row)]


class Copy:
    """A copy of the package and its kernels, of which only files may be edited that a recipe names."""

    def __init__(self, folder, recipe):
        self.folder, self.recipe = folder, section_of(recipe)
        for name in ("cupy_flash", "kernels_cu"):
            shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))

    def edit(self, edits):
        """Replace texts, each of which its file has once; `edits` has tuples (file, text, what replaces it)."""
        for file, old, new in edits:
            named = (f"`{file}`", f"`{file.rpartition('/')[0]}/<name>.py`")
            assert any(name in self.recipe for name in named), f"CONTRIBUTING.md does not name {file}"
            path = self.folder / file
            text = path.read_text("utf-8")
            assert text.count(old) == 1, f"{old!r} in {file}"
            path.write_text(text.replace(old, new), "utf-8")

    def run(self, code):
        """Run Python code that imports the copy."""
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        code = f"import cupy_flash, os\nassert cupy_flash.__file__.startswith(os.getcwd())\n{code}"
        command = [sys.executable, "-c", code]
        result = subprocess.run(command, cwd=self.folder, env=environment, capture_output=True, text=True)
        assert result.returncode == 0, result.stderr
