"""The package in each form in which it is installed: wheel, sdist, editable install, checkout on the path."""

import os
import re
import shutil
import site
import subprocess
import sys
import tarfile
import venv
import zipfile
from collections.abc import Sequence
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest

import cupy_flash
from cupy_flash.__main__ import main
from cupy_flash.jit import source

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("setup.cfg", "pyproject.toml", "README.md", "LICENSE", "cupy_flash", "kernels_cu")
SDIST_SOURCES = (
    "MANIFEST.in", "CHANGELOG.md", "CONTRIBUTING.md", "mkdocs.yml", "ruff.toml", ".clang-format", ".ci",
    "tests", "bench", "examples", "docs",
)  # fmt: skip
# setuptools and the dependencies come from the environment of the tests, so that nothing is downloaded.
PIP_OPTIONS = ("--no-deps", "--no-build-isolation", "--no-index", "--quiet")


def run(command: Sequence[str | Path], cwd: Path, **variables: str) -> str:
    """Return the output of a command run without PYTHONPATH, which could contain this checkout."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | variables
    result = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def copy_checkout(folder: Path, sources: Sequence[str] = SOURCES) -> Path:
    """Copy the checkout, so that building leaves no build folder in it."""
    checkout = folder / "checkout"
    checkout.mkdir()
    for name in sources:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, checkout / name, ignore=shutil.ignore_patterns("__pycache__", "out"))
        else:
            shutil.copy(ROOT / name, checkout / name)
    return checkout


def make_environment(folder: Path) -> Path:
    """Create a virtual environment with the libraries of this one but without cupy_flash; return its Python."""
    builder = venv.EnvBuilder(symlinks=True)
    builder.create(folder / "environment")
    python = Path(builder.ensure_directories(folder / "environment").env_exe)
    own = run([python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], cwd=folder).strip()
    # Python ignores .pth files in folders added by a .pth file, so editable installs of this environment have no
    # effect.
    Path(own, "libraries.pth").write_text("\n".join(site.getsitepackages()))
    return python


def assert_found(kernels: Path, report: str) -> None:
    report = re.sub(r"\n +", " ", report)  # without the breaks of lines
    assert re.search(rf"^kernels_cu +{re.escape(str(kernels))}, \d+ kernels$", report, re.MULTILINE), report


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    run([sys.executable, "-m", "pip", "wheel", *PIP_OPTIONS, copy_checkout(folder)], cwd=folder)
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sdist")
    build = "import sys; from setuptools.build_meta import build_sdist; build_sdist(sys.argv[1])"
    run([sys.executable, "-c", build, folder], cwd=copy_checkout(folder, SOURCES + SDIST_SOURCES))
    (path,) = folder.glob("*.tar.gz")
    return path


@pytest.fixture(scope="module")
def metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return Parser().parsestr(archive.read(name).decode())


def test_wheel_holds_every_module_and_kernel_and_nothing_else(wheel: Path) -> None:
    modules = [path.relative_to(ROOT).as_posix() for path in (ROOT / "cupy_flash").rglob("*.py")]
    kernels = [
        f"cupy_flash/{path.relative_to(ROOT).as_posix()}"
        for path in (ROOT / "kernels_cu").rglob("*")
        if path.suffix in (".cu", ".cuh", ".md")
    ]
    data = [f"cupy_flash/measure/checks/{name}.json" for name in ("simulated", "other_kernels")]
    with zipfile.ZipFile(wheel) as archive:
        held = [name for name in archive.namelist() if ".dist-info/" not in name]
    assert sorted(held) == sorted([*modules, *kernels, "cupy_flash/py.typed", *data])
    assert "cupy_flash/kernels_cu/README.md" in held


def test_sdist_holds_the_checkout(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        held = {name.partition("/")[2] for name in archive.getnames()}
    files = [ROOT / name for name in SOURCES + SDIST_SOURCES]
    files += [path for folder in files if folder.is_dir() for path in folder.rglob("*")]
    tracked = [path.relative_to(ROOT) for path in files if path.is_file() and path.suffix != ".pyc"]
    assert {path.as_posix() for path in tracked if path.parts[:2] != ("bench", "out")} <= held
    assert not [name for name in held if "__pycache__" in name or name.endswith(".pyc")]


def test_metadata(metadata: Message) -> None:
    assert metadata["Name"] == "cupy-flash"
    assert metadata["Version"] == cupy_flash.__version__
    assert metadata["License-Expression"] == "MIT"
    assert metadata["Requires-Python"] == ">=3.10"
    requirements = metadata.get_all("Requires-Dist", [])
    base = {re.split(r"[^\w-]", requirement)[0] for requirement in requirements if "extra ==" not in requirement}
    assert base == {"numpy", "ml_dtypes", "platformdirs", "threadpoolctl", "cuda-pathfinder"}
    libraries = {"cuda12", "cuda13", "torch", "jax", "transformers", "array-libraries"}
    extras = libraries | {"bench", "test", "lint", "docs", "release"}
    assert set(metadata.get_all("Provides-Extra", [])) == extras


def test_classifiers_name_every_supported_python(metadata: Message) -> None:
    minors = re.findall(r"Python :: 3\.(\d+)$", "\n".join(metadata.get_all("Classifier", [])), re.MULTILINE)
    assert [int(minor) for minor in minors] == list(range(10, 10 + len(minors)))
    assert sys.version_info.minor <= int(minors[-1])


def test_changelog_names_the_version() -> None:
    assert f"## [{cupy_flash.__version__}]" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_ci_pins_what_the_extras_of_development_require(metadata: Message) -> None:
    lines = (ROOT / ".ci" / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = {line.split("==")[0].lower() for line in lines if "==" in line}
    wanted = [
        line
        for line in metadata.get_all("Requires-Dist", [])
        if re.search(r'extra == "(test|lint|bench|docs|release)"', line)
    ]
    assert {re.split(r"[^\w-]", line)[0] for line in wanted} <= pinned


def test_wheel_finds_its_kernels(wheel: Path, tmp_path: Path) -> None:
    python = make_environment(tmp_path)
    run([python, "-m", "pip", "install", *PIP_OPTIONS, "--ignore-installed", wheel], cwd=tmp_path)
    folder = run([python, "-c", "import cupy_flash; print(cupy_flash.__path__[0])"], cwd=tmp_path).strip()
    assert Path(folder).is_relative_to(tmp_path / "environment")
    for command in ([python, "-m", "cupy_flash"], [python.with_name("cupy-flash")]):
        assert_found(Path(folder, "kernels_cu"), run([*command, "info"], cwd=tmp_path))


def test_sdist_installs(sdist: Path, tmp_path: Path) -> None:
    python = make_environment(tmp_path)
    run([python, "-m", "pip", "install", *PIP_OPTIONS, "--ignore-installed", sdist], cwd=tmp_path)
    folder = run([python, "-c", "import cupy_flash; print(cupy_flash.__path__[0])"], cwd=tmp_path).strip()
    assert_found(Path(folder, "kernels_cu"), run([python, "-m", "cupy_flash", "info"], cwd=tmp_path))


def test_editable_install_finds_its_kernels(tmp_path: Path) -> None:
    checkout = copy_checkout(tmp_path)
    python = make_environment(tmp_path)
    run([python, "-m", "pip", "install", *PIP_OPTIONS, "--ignore-installed", "--editable", checkout], cwd=tmp_path)
    for command in ([python, "-m", "cupy_flash"], [python.with_name("cupy-flash")]):
        assert_found(checkout / "kernels_cu", run([*command, "info"], cwd=tmp_path))


def test_bare_checkout_finds_its_kernels(tmp_path: Path) -> None:
    checkout = copy_checkout(tmp_path)
    python = make_environment(tmp_path)
    assert_found(checkout / "kernels_cu", run([python, "-m", "cupy_flash", "info"], cwd=checkout))


def test_missing_kernels_name_both_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path.resolve() / "cupy_flash"
    monkeypatch.setattr(source, "__file__", str(package / "jit" / "source.py"))
    with pytest.raises(FileNotFoundError) as error:
        source.kernel_folder()
    assert str(package / "kernels_cu") in str(error.value)
    assert str(package.parent / "kernels_cu") in str(error.value)


def test_info_shows_the_backends_of_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info"]) == 0
    rows = dict(line.split("  ", 1) for line in capsys.readouterr().out.splitlines())
    rows = {name: value.strip() for name, value in rows.items()}
    assert rows["cupy_flash"] == cupy_flash.__version__
    assert rows["engine cpu"].startswith("serves this machine")
    assert rows["engine simt"].startswith(("serves this machine: cuda (sm_", "no GPU; "))
    assert re.search(r"\d+ threads", rows["BLAS"])
    assert re.fullmatch(r"torch \d+\.\d+\S*", rows["torch"])


def test_info_reports_why_cupy_cannot_be_imported(tmp_path: Path) -> None:
    (tmp_path / "cupy.py").write_text('raise FileNotFoundError("no place for the kernel cache")')
    report = run([sys.executable, "-m", "cupy_flash", "info"], cwd=ROOT, PYTHONPATH=str(tmp_path))
    assert "fails: FileNotFoundError: no place for the kernel cache" in report


def test_command_line_needs_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main([])
    assert "COMMAND" in capsys.readouterr().err
