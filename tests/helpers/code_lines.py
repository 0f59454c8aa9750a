"""Counts lines of code: lines with a token that is no comment, without docstrings and blank lines.

`python tests/helpers/code_lines.py` prints the numbers that test_line_budget.py and test_function_length.py of
tests/library compare with their limits.
"""

import ast
import functools
import io
import tokenize
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SIMULATOR = "cupy_flash/simulator"
NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}
FUNCTIONS = ast.FunctionDef, ast.AsyncFunctionDef
STATEMENTS = ast.stmt, ast.excepthandler, ast.match_case


@functools.cache
def code_lines(text):
    """Return the numbers of the lines of code of a Python file."""
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    spans = [(token.start[0], token.end[0]) for token in tokens if token.type not in NO_CODE]
    lines = {line for first, last in spans for line in range(first, last + 1)}
    module = parsed(text)
    for _, node in [("", module), *definitions(module)]:
        if ast.get_docstring(node, clean=False) is not None:
            lines -= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    return frozenset(lines)


@functools.cache
def parsed(text):
    return ast.parse(text)


def definitions(node, prefix=""):
    """Yield (qualified name, node) of every class and function inside a node; no expression has one."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, STATEMENTS):
            name = prefix
            if isinstance(child, (ast.ClassDef, *FUNCTIONS)):
                name = f"{prefix}{child.name}"
                yield name, child
            yield from definitions(child, f"{name}." if name != prefix else prefix)


def of_functions(text):
    """Return (qualified name, lines of code) of every function of a Python file, with those inside it."""
    lines = code_lines(text)
    return [
        (name, len(lines & set(range(node.lineno, node.end_lineno + 1))))
        for name, node in definitions(parsed(text))
        if isinstance(node, FUNCTIONS)
    ]


def texts(folder, root=ROOT):
    """Return {path: text} of the Python files of a folder of a checkout."""
    paths = sorted((root / folder).rglob("*.py"))
    return {path.relative_to(root).as_posix(): path.read_text(encoding="utf-8") for path in paths}


def of_files(folder, root=ROOT):
    """Return {path: lines of code} of the Python files of a folder."""
    return {path: len(code_lines(text)) for path, text in texts(folder, root).items()}


def total(folder, root=ROOT):
    """Return lines of code of a folder, without the simulator."""
    return sum(lines for path, lines in of_files(folder, root).items() if not path.startswith(f"{SIMULATOR}/"))


if __name__ == "__main__":
    for folder in ("cupy_flash", "bench"):
        print(f"{folder}: {total(folder)}")
        for path, lines in sorted(of_files(folder).items(), key=lambda item: -item[1])[:12]:
            print(f"  {path}: {lines}")
        long = {f"{path}: {name}": n for path, text in texts(folder).items() for name, n in of_functions(text)}
        for name, lines in sorted(long.items(), key=lambda item: -item[1])[:12]:
            print(f"  {name}(): {lines}")
