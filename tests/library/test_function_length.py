"""No function of the kernels and of the Python code is long."""

import re

import code_lines
import pytest

from cupy_flash.jit.source import kernel_folder

LONGEST = 80  # lines of a function in kernels_cu, from the start of the declaration to the closing brace
# Functions of kernels that are longer because of branches of `#if STATISTICS`, `#if SCALED_KV` or `#if PREFIX_PASS`,
# or because the backward of wgmma issues S of the next tile at one of three places, and that of tcgen05 its products in
# a strict order as well. A number may only fall.
LONGER_KERNELS = {
    ("mma/decode.cu", "attend"): 109,
    ("mma/decode.cu", "store_part"): 84,
    ("mma/forward.cu", "forward"): 141,
    ("mma/selected_forward.cu", "selected_forward"): 90,
    ("simt/forward.cu", "forward"): 92,
    ("wgmma/forward.cu", "compute"): 100,
    ("wgmma/backward.cu", "sum_over_queries"): 100,
    ("tcgen05/forward.cu", "compute_softmax"): 117,
    ("tcgen05/backward.cu", "issue_products"): 91,
}
LONGEST_IN_PYTHON = 60  # lines of code of a Python function, with those of functions inside it
# Python functions that are longer. A number may only fall; a function that no longer exceeds the limit is removed.
LONGER = {
    "cupy_flash/reference.py: attention_with_kv_cache": 100,
    "cupy_flash/kv_cache.py: attention_with_kv_cache": 63,  # 46 lines of its signature
}
# Text whose braces open no block: comments, strings, preprocessor lines with their continuations, and initialisers on
# one line. Attributes are removed too, because they look like function calls.
NO_BLOCK = re.compile(
    r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|^[ \t]*#(?:[^\n]*\\\n)*[^\n]*|\{[^{};\n]*\}|__\w+__(?: *\([^()]*\))?',
    re.MULTILINE | re.DOTALL,
)
FUNCTION = re.compile(r"[^=]*?(?P<name>\w+|operator\W+)\s*\(.*", re.DOTALL)


def functions(text):
    """Yield (name, number of lines) of every function in C++ code, without those inside another function."""
    code = NO_BLOCK.sub(lambda match: "\n" * match[0].count("\n"), text)
    names = []  # a name for each open block of a function, None for each other open block
    start = 0  # start of the current declaration
    for mark in re.finditer(r"[{};]", code):
        if mark[0] == "{":
            if not any(names):
                declaration = code[start : mark.start()]
                first = start + len(declaration) - len(declaration.lstrip())
            head = None if any(names) else FUNCTION.fullmatch(declaration)
            names.append(head and head["name"].strip())
        elif mark[0] == "}" and (name := names.pop()):
            yield name, code.count("\n", first, mark.end()) + 1
        start = mark.end()


def lengths(folder):
    """Return the number of lines by (file, function) for all kernel files and headers of a folder."""
    return {
        (path.relative_to(folder).as_posix(), name): lines
        for path in sorted(folder.rglob("*.cu*"))
        for name, lines in functions(path.read_text(encoding="utf-8"))
    }


def test_no_function_is_long():
    measured = lengths(kernel_folder())
    assert {place: n for place, n in measured.items() if n > LONGER_KERNELS.get(place, LONGEST)} == {}
    assert [place for place in LONGER_KERNELS if measured.get(place, 0) <= LONGEST] == []


def test_every_kernel_is_measured():
    measured = lengths(kernel_folder())
    for path in kernel_folder().rglob("*.cu"):
        assert measured[path.relative_to(kernel_folder()).as_posix(), path.stem] > 1


PLANTED = {
    "a function": ("__device__ void f(int a,\n                  int b) {\n%s}\n", "f", 3),
    "a template": ("template <int N>\n__device__ int f(int (&a)[N]) {\n%s}\n", "f", 3),
    "a kernel": ('extern "C" __global__ void __launch_bounds__(THREADS)\n    f(const Params p) {\n%s}\n', "f", 3),
    "a method": ("struct A {\n  int f() const {\n%s  }\n};\n", "f", 2),
    "a constructor": ("struct A {\n  A(int b)\n      : b(b), c{b} {\n%s  }\n};\n", "A", 3),
    "a loop and a lambda": ("void f() {\n  for (;;) {\n  auto g = [&](int i) {\n%s  };\n  }\n}\n", "f", 6),
    "a comment and a macro": ("#define G(a) \\\n  void g() {\nint n;  // {\nvoid f() {\n%s}\n", "f", 2),
}


@pytest.mark.parametrize("planted", PLANTED)
def test_a_long_function_is_found(planted, tmp_path):
    text, name, around = PLANTED[planted]
    (tmp_path / "mma").mkdir()
    for body in (3, LONGEST):
        (tmp_path / "mma" / "f.cuh").write_text(text % ("  x = f(1);\n" * body))
        assert lengths(tmp_path) == {("mma/f.cuh", name): body + around}


@pytest.mark.parametrize("text", ["struct A {\n  int f();\n};\n", "int a[] = {f(1)};\n", "#if A\nint a;\n#endif\n"])
def test_other_blocks_are_no_functions(text):
    assert list(functions(text)) == []


def python_lengths():
    """Return lines of code by "file: function" for the package and the bench."""
    files = code_lines.texts("cupy_flash") | code_lines.texts("bench")
    return {f"{path}: {name}": lines for path, text in files.items() for name, lines in code_lines.of_functions(text)}


def test_no_python_function_is_long():
    lines = python_lengths()
    assert {name: n for name, n in lines.items() if n > LONGER.get(name, LONGEST_IN_PYTHON)} == {}
    assert [name for name in LONGER if lines.get(name, 0) <= LONGEST_IN_PYTHON] == []
