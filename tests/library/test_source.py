"""assemble: includes, constants, and source texts that it refuses."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from cupy_flash.jit import source

ROOT = Path(__file__).resolve().parents[2]
KERNELS = ROOT / "kernels_cu"
CONFIG = """// Defaults.
#pragma once
constexpr int BLOCK_Q = 64;  // queries
constexpr bool CAUSAL = false;
constexpr float LIMIT = 0.5f;
using element = float;
#define BIAS 0
"""


@pytest.fixture
def kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Return a function that writes a kernel folder from {path: text}; config.cuh is CONFIG unless given."""
    folder = tmp_path / "kernels_cu"
    monkeypatch.setattr(source, "kernel_folder", lambda: folder)

    def make(**files: str) -> Path:
        for path, text in {"config.cuh": CONFIG, **files}.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_bytes(text.encode())
        return folder

    return make


def without_config(text: str) -> str:
    """Return the assembled text without the lines of config.cuh."""
    return text.split("#define BIAS", 1)[1].split("\n", 1)[1]


def test_inlines_every_header_once_where_it_is_first_included(kernels: Callable[..., Path]) -> None:
    kernels(
        **{
            "simt/forward.cu": '// Why.\n#include "../mask.cuh"  // by folder\n#include "tile.cuh"\n\nint kernel;\n',
            "simt/tile.cuh": '#pragma once\n  # include "mask.cuh"\nint tile;\nint tile2;\n',
            "mask.cuh": "#pragma once\n\nint mask;\n",
        }
    )
    assert source.assemble("simt/forward", {}) == (
        '#line 1 "simt/forward.cu"\n// Why.\n'
        '#line 3 "mask.cuh"\nint mask;\n'
        '#line 3 "simt/tile.cuh"\nint tile;\nint tile2;\n'
        '#line 5 "simt/forward.cu"\nint kernel;\n'
    )


def test_a_header_beside_the_file_comes_before_one_of_the_root(kernels: Callable[..., Path]) -> None:
    kernels(**{"simt/forward.cu": '#include "tile.cuh"\n', "simt/tile.cuh": "int near;\n", "tile.cuh": "int far;\n"})
    assert source.assemble("simt/forward", {}) == '#line 1 "simt/tile.cuh"\nint near;\n'


@pytest.mark.parametrize(
    ("name", "value", "line"),
    [
        pytest.param("BLOCK_Q", 128, "constexpr int BLOCK_Q = 128;  // queries", id="int"),
        pytest.param("BLOCK_Q", -(2**31), "constexpr int BLOCK_Q = -2147483648;  // queries", id="negative"),
        pytest.param("CAUSAL", True, "constexpr bool CAUSAL = true;", id="bool"),
        pytest.param("LIMIT", 1e-30, "constexpr float LIMIT = 1e-30f;", id="float"),
        pytest.param("LIMIT", 2, "constexpr float LIMIT = 2.0f;", id="float_from_int"),
        pytest.param("element", "bfloat16", "using element = bfloat16;", id="type"),
        pytest.param("BIAS", True, "#define BIAS 1", id="switch"),
    ],
)
def test_constants_replace_defaults(kernels: Callable[..., Path], name: str, value: object, line: str) -> None:
    kernels(**{"delta.cu": '#include "config.cuh"\n'})
    before = source.assemble("delta", {}).splitlines()
    after = source.assemble("delta", {name: value}).splitlines()
    changed = [(old, new) for old, new in zip(before, after, strict=True) if old != new]
    assert [new for _, new in changed] == [line]
    assert all(old in CONFIG.splitlines() for old, _ in changed)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("BLOCK_Q", "64"),
        ("BLOCK_Q", "64; int evil = 1"),
        ("BLOCK_Q", 64.0),
        ("BLOCK_Q", True),
        ("BLOCK_Q", 2**31),
        ("CAUSAL", 1),
        ("CAUSAL", "true"),
        ("LIMIT", float("nan")),
        ("LIMIT", float("inf")),
        ("LIMIT", False),
        ("LIMIT", "0.5"),
        ("element", "float; int evil"),
        ("element", "float\n"),
        ("element", "1float"),
        ("element", "flöat"),
        ("element", 32),
        ("BIAS", 1),
        ("BIAS", "1"),
    ],
)
def test_a_value_that_its_name_does_not_take_is_refused(kernels: Callable[..., Path], name: str, value: object) -> None:
    kernels(**{"delta.cu": '#include "config.cuh"\n'})
    with pytest.raises(ValueError, match=rf"^{name} of config\.cuh .* cannot be {re.escape(repr(value))}$"):
        source.assemble("delta", {name: value})


def test_an_unknown_constant_is_refused_with_the_known(kernels: Callable[..., Path]) -> None:
    kernels(**{"delta.cu": '#include "config.cuh"\n'})
    with pytest.raises(ValueError, match=r"no constant BLOCK_K, STAGES; it has BLOCK_Q, CAUSAL, LIMIT, element, BIAS$"):
        source.assemble("delta", {"STAGES": 2, "BLOCK_Q": 32, "BLOCK_K": 32})


def test_constants_for_a_kernel_without_config_are_refused(kernels: Callable[..., Path]) -> None:
    kernels(**{"delta.cu": "int kernel;\n"})
    with pytest.raises(ValueError, match=r"delta does not include config\.cuh.*BLOCK_Q"):
        source.assemble("delta", {"BLOCK_Q": 64})


@pytest.mark.parametrize(
    "line",
    [
        "constexpr int WARPS = THREADS / 32;",
        "constexpr unsigned BLOCK = 1;",
        "int x = 1;",
        "#if BIAS",
        "/* comment */",
        "#define WIDE 2",
    ],
)
def test_config_holds_constants_alone(kernels: Callable[..., Path], line: str) -> None:
    kernels(**{"delta.cu": '#include "config.cuh"\n', "config.cuh": f"// Defaults.\n\n{line}\n"})
    with pytest.raises(ValueError, match=rf"^config\.cuh:3: .*{re.escape(line)}"):
        source.assemble("delta", {})


SWITCHED = """#include "config.cuh"
int before;
#if BIAS  // added to the scores
#include "bias.cuh"
#if CAUSAL_MACRO
int compilers;
#endif
int with_bias;
#else
int without_bias;
#endif
#if !BIAS
int not_bias;
#endif
int after;
"""


@pytest.mark.parametrize(
    ("bias", "expected"),
    [
        (
            False,
            '#line 2 "f.cu"\nint before;\n#line 10 "f.cu"\nint without_bias;\n#line 13 "f.cu"\nint not_bias;\n'
            '#line 15 "f.cu"\nint after;\n',
        ),
        (
            True,
            '#line 2 "f.cu"\nint before;\n#line 1 "bias.cuh"\nint bias;\n#line 5 "f.cu"\n#if CAUSAL_MACRO\n'
            'int compilers;\n#endif\nint with_bias;\n#line 15 "f.cu"\nint after;\n',
        ),
    ],
    ids=["off", "on"],
)
def test_code_that_a_switch_disables_is_absent_from_the_text(
    kernels: Callable[..., Path], bias: bool, expected: str
) -> None:
    kernels(**{"f.cu": SWITCHED, "bias.cuh": "int bias;\n"})
    assert without_config(source.assemble("f", {"BIAS": bias})) == expected


def test_a_header_left_out_first_is_inlined_where_it_is_needed(kernels: Callable[..., Path]) -> None:
    text = '#include "config.cuh"\n#if BIAS\n#include "tile.cuh"\n#endif\nint kernel;\n#include "tile.cuh"\n'
    kernels(**{"f.cu": text, "tile.cuh": "int tile;\n"})
    assert "int kernel;\n" + '#line 1 "tile.cuh"\nint tile;\n' in source.assemble("f", {})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        pytest.param("#if BIAS\n#elif X\n#endif\n", r"f\.cu:2: #elif cannot follow", id="elif"),
        pytest.param("\n#endif\n", r"f\.cu:2: #endif without #if", id="stray_endif"),
        pytest.param("#else\n", r"f\.cu:1: #else without #if", id="stray_else"),
        pytest.param("#ifdef X\n", r"f\.cu: #if without #endif", id="open"),
        pytest.param("#ifdef X\n#include <a>\n#endif\n", r"f\.cu:2: an #include can only depend on", id="unsure"),
        pytest.param("#if BIAS && X\n#include <a>\n#endif\n", r"f\.cu:2: an #include can only depend on", id="mixed"),
    ],
)
def test_conditions_that_cannot_be_resolved_are_refused(kernels: Callable[..., Path], text: str, message: str) -> None:
    kernels(**{"f.cu": text})
    with pytest.raises(ValueError, match=message):
        source.assemble("f", {})


def test_missing_headers_name_the_chain(kernels: Callable[..., Path]) -> None:
    kernels(**{"simt/f.cu": '#include "mask.cuh"\n', "mask.cuh": '\n#include "tiles.cuh"\n'})
    with pytest.raises(
        FileNotFoundError, match=r'^simt/f\.cu -> mask\.cuh:2: "tiles\.cuh" is not a file of kernels_cu'
    ):
        source.assemble("simt/f", {})


def test_cycles_name_the_chain(kernels: Callable[..., Path]) -> None:
    kernels(**{"f.cu": '#include "a.cuh"\n', "a.cuh": '#include "b.cuh"\n', "b.cuh": '#include "a.cuh"\n'})
    with pytest.raises(ValueError, match=r"^include cycle: f\.cu -> a\.cuh -> b\.cuh -> a\.cuh$"):
        source.assemble("f", {})


def test_nothing_outside_the_folder_is_read(kernels: Callable[..., Path], tmp_path: Path) -> None:
    outside = tmp_path / "secret.cuh"
    outside.write_text("int secret;\n")
    folder = kernels()
    (folder / "link.cuh").symlink_to(outside)
    (folder / "simt").mkdir()
    for operand in (f'"{outside}"', '"../secret.cuh"', '"../../secret.cuh"', '"link.cuh"', "<secret.cuh>", "SECRET"):
        for kernel in ("f", "simt/f"):
            (folder / f"{kernel}.cu").write_text(f"#include {operand}\n")
            with pytest.raises((ValueError, FileNotFoundError), match=re.escape(f"{kernel}.cu:1: ")):
                source.assemble(kernel, {})


@pytest.mark.parametrize("kernel", ["", "../f", "/etc/f", "simt/", "simt/../f", "f.cu", "simt\\f", "f\n"])
def test_kernel_names_are_paths_of_identifiers(kernels: Callable[..., Path], kernel: str) -> None:
    kernels(**{"f.cu": "int kernel;\n"})
    with pytest.raises(ValueError, match=r"^kernel must be like"):
        source.assemble(kernel, {})


def test_missing_kernels_raise(kernels: Callable[..., Path]) -> None:
    kernels()
    with pytest.raises(FileNotFoundError, match=r"backward\.cu"):
        source.assemble("backward", {})


def test_line_endings_of_a_checkout_do_not_change_the_text(kernels: Callable[..., Path]) -> None:
    files = {"f.cu": '#include "config.cuh"\nint kernel;\n', "config.cuh": CONFIG}
    kernels(**files)
    unix = source.assemble("f", {"BLOCK_Q": 32})
    kernels(**{path: text.replace("\n", "\r\n") for path, text in files.items()})
    assert source.assemble("f", {"BLOCK_Q": 32}) == unix


NAMES = sorted(path.relative_to(KERNELS).as_posix()[:-3] for path in KERNELS.rglob("*.cu"))


@pytest.mark.parametrize("kernel", NAMES)
def test_every_kernel_of_the_package_is_one_text(kernel: str) -> None:
    text = source.assemble(kernel, {})
    assert text == source.assemble(kernel, {})
    assert not re.search(r"^\s*#\s*include", text, re.MULTILINE)
    assert str(ROOT) not in text
    names = set(re.findall(r'^#line \d+ "(.*)"$', text, re.MULTILINE))
    assert f"{kernel}.cu" in names
    assert all((KERNELS / name).is_file() for name in names)


@pytest.mark.parametrize("kernel", NAMES)
def test_no_lambda_of_the_package_has_a_parameter_of_type_auto(kernel: str) -> None:
    """NVRTC 12 treats such a lambda in a __device__ function as a host function, and refuses to call it."""
    assert not re.search(r"\][ \t]*\([^)]*\bauto\b", source.assemble(kernel, {}))


def test_config_of_the_package_is_understood() -> None:
    config = (KERNELS / "config.cuh").read_text(encoding="utf-8")
    assert source.configure(config, {})[0] == config.rstrip("\n")
    replaced, _ = source.configure(config, {"element": "double", "HEAD_DIM": 96})
    assert "using element = double;" in replaced
    assert "constexpr int HEAD_DIM = 96;" in replaced
