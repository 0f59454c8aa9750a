"""Trampolines in C, which raise the error of a failed call inside CuPy's Cython code; a ctypes callback cannot.

A trampoline calls the callback. If the callback has stored an exception with `raise_later`, the trampoline raises it
and returns the value by which CuPy's function reports an error. Trampolines exist only if there is a C compiler.
"""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

# Python's headers may be missing, so the declarations are here. Pending exceptions are per thread, because another
# thread may run before one is raised.
HEAD = """
typedef __INTPTR_TYPE__ intptr_t;
typedef __SIZE_TYPE__ size_t;
typedef struct _object PyObject;
void Py_IncRef(PyObject *);
void Py_DecRef(PyObject *);
void PyErr_SetObject(PyObject *, PyObject *);
static __thread PyObject *kind, *error;

void raise_later(PyObject *its_kind, PyObject *its_error) {
    Py_IncRef(kind = its_kind);
    Py_IncRef(error = its_error);
}

static int raises(void) {
    if (!error) return 0;
    PyErr_SetObject(kind, error);
    Py_DecRef(kind);
    Py_DecRef(error);
    kind = error = 0;
    return 1;
}
"""
TRAMPOLINE = """
{result} (*answer_{name})({types});
{result} raising_{name}({parameters}) {{
    {result} value = answer_{name}({values});
    return raises() ? ({result}){failed} : value;
}}
"""
FAILED = {"int": -1, "float": -1}  # other results (handles, addresses and objects) are 0


def compiler() -> str | None:
    """Return the path of a C compiler; None if there is none."""
    return shutil.which("cc")


class Trampolines:
    """Compiled trampolines for functions with these C signatures."""

    def __init__(self, signatures: dict[str, str]) -> None:
        text = HEAD + "".join(_trampoline(name, signature) for name, signature in signatures.items())
        with tempfile.TemporaryDirectory() as folder:
            source, library = Path(folder, "raising.c"), Path(folder, "raising.so")
            source.write_text(text)
            subprocess.run([str(compiler()), "-shared", "-fPIC", "-o", library, source], check=True)
            self._library = ctypes.PyDLL(str(library))
        self._library.raise_later.argtypes = [ctypes.py_object, ctypes.py_object]
        self._library.raise_later.restype = None

    def raise_later(self, error: BaseException) -> None:
        """Raise an exception when the callback that runs in this thread has returned."""
        self._library.raise_later(type(error), error)

    def around(self, name: str, callback: int) -> int:
        """Return the address of the trampoline that calls a callback."""
        ctypes.c_void_p.in_dll(self._library, f"answer_{name}").value = callback
        address = ctypes.cast(getattr(self._library, f"raising_{name}"), ctypes.c_void_p).value
        assert address is not None
        return address


def _trampoline(name: str, signature: str) -> str:
    result, text = _plain(signature).rstrip(")").split("(")
    types = [each.strip() for each in text.split(",")]
    if types == ["void"]:
        types = []
    values = [f"a{i}" for i in range(len(types))]
    return TRAMPOLINE.format(
        name=name,
        result=result.strip(),
        types=", ".join(types) or "void",
        parameters=", ".join(f"{kind} {value}" for kind, value in zip(types, values, strict=True)) or "void",
        values=", ".join(values),
        failed=FAILED.get(result.strip(), 0),
    )


def _plain(signature: str) -> str:
    """Return a C signature with pointers instead of CuPy's structs, and without parameter names."""
    return re.sub(r"struct \w+ \*\w*", "void *", signature).replace("int __pyx_skip_dispatch", "int")
