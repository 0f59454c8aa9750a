"""Puts the driver's functions where ctypes.CDLL finds libcuda."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

from .errors import NOT_SUPPORTED, CudaError

if TYPE_CHECKING:
    from . import Machine

_POINTER, _INT, _UNSIGNED, _TEXT = ctypes.c_void_p, ctypes.c_int, ctypes.c_uint, ctypes.c_char_p
_POINTERS, _INTS = ctypes.POINTER(_POINTER), ctypes.POINTER(_INT)
_WORDS, _HALVES = ctypes.POINTER(ctypes.c_uint64), ctypes.POINTER(ctypes.c_uint32)

SIGNATURES = {
    "cuCtxGetCurrent": (_POINTERS,),
    "cuCtxGetDevice": (_INTS,),
    "cuModuleLoad": (_POINTERS, _TEXT),
    "cuModuleLoadData": (_POINTERS, _POINTER),
    "cuModuleUnload": (_POINTER,),
    "cuModuleGetFunction": (_POINTERS, _POINTER, _TEXT),
    "cuModuleGetGlobal": (_POINTERS, ctypes.POINTER(ctypes.c_size_t), _POINTER, _TEXT),
    "cuFuncGetAttribute": (_INTS, _INT, _POINTER),
    "cuFuncSetAttribute": (_POINTER, _INT, _INT),
    "cuLaunchKernel": (_POINTER, *[_UNSIGNED] * 7, _POINTER, _POINTERS, _POINTERS),
    "cuTensorMapEncodeTiled": (
        _POINTER, _INT, ctypes.c_uint32, _POINTER, _WORDS, _WORDS, _HALVES, _HALVES, *[_INT] * 4,
    ),
    "cuGetErrorName": (_INT, ctypes.POINTER(_TEXT)),
    "cuGetErrorString": (_INT, ctypes.POINTER(_TEXT)),
}  # fmt: skip


class Library:
    """Replaces the result of ctypes.CDLL("libcuda.so.1"): it has an attribute for each function, also with suffix
    _v2.
    """

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._functions: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("cu"):
            raise AttributeError(name)
        if name not in self._functions:
            self._functions[name] = _function(self._machine, name.removesuffix("_v2"))
        return self._functions[name]


def _function(machine: Machine, name: str) -> Any:
    answer = machine.answer(name)

    def call(*arguments: Any) -> int:
        with machine.lock:
            if answer is None:
                machine.errors.append(f"the stand-in has no {name}")
                return NOT_SUPPORTED
            try:
                machine.require_no_fault(name)
                answer(*arguments)
            except CudaError as error:
                machine.refusals.append(str(error))
                return error.status
            except Exception as error:
                machine.errors.append(f"{name}: {error!r}")
                return NOT_SUPPORTED
            return 0

    return ctypes.CFUNCTYPE(_INT, *SIGNATURES.get(name, ()))(call)


def install(machine: Machine) -> None:
    """Answer ctypes.CDLL of libcuda with the machine's functions."""
    library, load = Library(machine), ctypes.CDLL

    def find(name: Any, *arguments: Any, **options: Any) -> Any:
        return library if name and "libcuda.so" in str(name) else load(name, *arguments, **options)

    ctypes.CDLL = find  # type: ignore[assignment,misc]
