"""File names in comments, docstrings and pages belong to files that exist."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# Comments of tests are not read, because they invent file names.
READ = (
    "cupy_flash",
    "kernels_cu",
    "bench",
    "docs",
    "examples",
    "README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "setup.cfg",
)
SUFFIXES = {".py", ".cu", ".cuh", ".md", ".sh", ".cfg"}
NAME = re.compile(r"(?<![\w./{}<>*-])((?:[\w-]+/)*[\w-]+\.(?:py|cuh?|sh|md))\b(?![\w(])")
# Files that exist only at run time: source.cu is written by the cache, captured.cuh and traced.cuh are headers made by
# mods/cuda_code.py, and reverse.cu is the name of a text in an example of docs/simulator.md.
WRITTEN = {"source.cu", "captured.cuh", "traced.cuh", "reverse.cu"}


def missing_names(root):
    """Return (file, name) of every file name in a checkout that is not the end of an existing path."""
    paths = [
        path
        for folder in READ
        for path in ((root / folder).rglob("*") if (root / folder).is_dir() else [root / folder])
    ]
    files = [path.relative_to(root).as_posix() for path in (*paths, *(root / "tests").rglob("*")) if path.is_file()]
    endings = {file[start:] for file in files for start in (0, *(m.end() for m in re.finditer("/", file)))}
    return {
        (path.relative_to(root).as_posix(), name)
        for path in paths
        if path.is_file() and path.suffix in SUFFIXES
        for name in NAME.findall(path.read_text(encoding="utf-8"))
        if name not in endings | WRITTEN
    }


def test_named_files_exist():
    assert missing_names(ROOT) == set()


def test_a_stale_name_is_found(tmp_path):
    (tmp_path / "docs").mkdir()
    for name in READ[5:]:
        (tmp_path / name).touch()
    (tmp_path / "docs" / "page.md").write_text("See `docs/page.md`, `page.md` and engines/gone.py.")
    assert missing_names(tmp_path) == {("docs/page.md", "engines/gone.py")}
