"""Replaces the runtime's functions in CuPy: the capsules that Cython modules use, and the attributes that Python
uses.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.metadata
import inspect
import re
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import raising
from .errors import CudaError
from .streams import interrupts_deferred

if TYPE_CHECKING:
    from . import Machine

_TYPES = {
    "intptr_t": ctypes.c_ssize_t,
    "size_t": ctypes.c_size_t,
    "int": ctypes.c_int,
    "unsigned int": ctypes.c_uint,
    "float": ctypes.c_float,
    "PyObject *": ctypes.py_object,
}
_SKIP_DISPATCH, _OPTIONS = "int __pyx_skip_dispatch", "__pyx_optional_args"
_kept: list[Any] = []  # capsules hold addresses only, so these objects must stay alive

_api = ctypes.pythonapi
_api.PyCapsule_GetName.restype, _api.PyCapsule_GetName.argtypes = ctypes.c_char_p, [ctypes.py_object]
_api.PyCapsule_New.restype = ctypes.py_object
_api.PyCapsule_New.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
_api.Py_IncRef.argtypes = [ctypes.py_object]


class _Options(ctypes.Structure):
    """The optional argument of a Cython function: whether it is given (count), and its value."""

    _fields_ = (("count", ctypes.c_int), ("value", ctypes.c_int))


def install(machine: Machine, versions: tuple[str, ...]) -> None:
    """Replace every function that a part of the machine answers. Raises ImportError for an unknown CuPy."""
    from cupy_backends.cuda.api import runtime

    matching = [
        d for name in ("cupy-cuda13x", "cupy-cuda12x", "cupy") for d in importlib.metadata.distributions(name=name)
    ]
    version = matching[0].version if matching else "unknown"
    if not version.startswith(versions):
        raise ImportError(f"the stand-in is written for CuPy {', '.join(versions)}*, not {version}")
    capsules = {name: x for name, x in runtime.__pyx_capi__.items() if machine.answer(name) is not None}
    if raising.compiler():
        machine.trampolines = raising.Trampolines({name: _signature(x) for name, x in capsules.items()})
    for name, capsule in capsules.items():
        checked = _checked(machine, name, machine.answer(name), runtime.CUDARuntimeError)
        runtime.__pyx_capi__[name] = _capsule(machine, name, capsule, checked)
        setattr(runtime, name, checked)
    runtime.getLastError = machine.devices.getLastError


def _checked(
    machine: Machine, name: str, answer: Callable[..., Any], error_type: type[Exception]
) -> Callable[..., Any]:
    """Wrap an answer: only one thread runs at a time, and CuPy's error is raised if the call fails."""

    @functools.wraps(answer)
    def call(*arguments: Any, **options: Any) -> Any:
        with interrupts_deferred(), machine.lock:  # Ctrl-C does not interrupt the call of a real driver
            try:
                machine.require_no_fault(name)
                return answer(*arguments, **options)
            except CudaError as error:
                machine.refusals.append(str(error))
                raise error_type(error.status) from error

    return call


def _signature(capsule: Any) -> str:
    """Return the C signature of a capsule's function."""
    return _api.PyCapsule_GetName(capsule).decode()


def _caller() -> str:
    """Return the Python function and line that called CuPy."""
    here = Path(__file__).parent
    frame = next(x for x in reversed(traceback.extract_stack()) if Path(x.filename).parent != here)
    return f"{frame.name}, {frame.filename}:{frame.lineno}"


def _capsule(machine: Machine, name: str, capsule: Any, answer: Callable[..., Any]) -> Any:
    """Return a capsule of a C function that calls `answer`, with the signature of the function in `capsule`."""
    signature = _signature(capsule)
    result, text = re.fullmatch(r"(.*?)\s*\((.*)\)", signature).groups()
    arguments = [argument.strip() for argument in text.split(",") if argument.strip() != "void"]
    has_options = any(_OPTIONS in argument for argument in arguments)
    given = [x for x in arguments if x != _SKIP_DISPATCH and _OPTIONS not in x]
    parameters = inspect.signature(answer).parameters.values()
    required = [x for x in parameters if x.default is x.empty]
    if len(given) != len(required) or not all(x in _TYPES or x.endswith("*") for x in given):
        raise ImportError(f"CuPy's {name} is {signature}, and the stand-in's takes {len(required)}")
    returns_object = result not in _TYPES or _TYPES[result] is ctypes.py_object

    def call(*values: Any) -> Any:
        values, options = values[: len(given)], values[-1] if has_options else None
        if options:
            optional = _Options.from_address(options)
            values += (optional.value,) * min(optional.count, len(parameters) - len(required))
        try:
            value = answer(*values)
        except BaseException as error:  # also Ctrl-C, because the caller would get NULL without an error
            value = None if returns_object else 0
            if machine.trampolines is None:
                machine.errors.append(f"{name} in {_caller()}: {error!r}")
            else:
                machine.trampolines.raise_later(error)
                return value
        if returns_object:
            _api.Py_IncRef(value)
            return id(value)
        return value

    kinds = [_TYPES.get(x, ctypes.c_void_p) for x in given]
    kinds += [ctypes.c_int] * (_SKIP_DISPATCH in arguments) + [ctypes.c_void_p] * has_options
    function = ctypes.PYFUNCTYPE(ctypes.c_void_p if returns_object else _TYPES[result], *kinds)(call)
    address = ctypes.cast(function, ctypes.c_void_p).value
    if machine.trampolines is not None:
        address = machine.trampolines.around(name, address)
    text = ctypes.c_char_p(signature.encode())
    replacement = _api.PyCapsule_New(address, text, None)
    _kept.extend((function, text, replacement))
    return replacement
