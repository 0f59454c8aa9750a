"""ctypes definitions of the structs of XLA's FFI that a handler reads, from xla/ffi/api/c_api.h, which jaxlib ships.

Members have the header's names and order, up to the last one that is read. Another major version of the interface may
have other offsets, so `unserved` compares the header's version before a handler is registered.
"""

from __future__ import annotations

import ctypes
import functools
import re
from ctypes import POINTER, c_char_p, c_int, c_int32, c_int64, c_size_t, c_uint32, c_void_p
from pathlib import Path
from typing import Any, ClassVar

import jax

from ...arrays import named_dtype

MAJOR = 0  # XLA_FFI_API_MAJOR; minor versions of the interface only add members
HEADER = "xla/ffi/api/c_api.h"

METADATA = 1  # XLA_FFI_Extension_Metadata
COMMAND_BUFFER_COMPATIBLE = 1  # XLA_FFI_HANDLER_TRAITS_COMMAND_BUFFER_COMPATIBLE
INITIALIZE, EXECUTE = 2, 3  # XLA_FFI_ExecutionStage
INVALID_ARGUMENT, UNIMPLEMENTED, INTERNAL = 3, 12, 13  # XLA_FFI_Error_Code

# XLA_FFI_DataType of the dtypes that attention takes, and of indices and seeds
DATA_TYPES = {
    1: "bool", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 6: "uint8", 7: "uint16", 8: "uint32", 9: "uint64",
    10: "float16", 11: "float32", 12: "float64", 16: "bfloat16", 19: "float8_e5m2", 20: "float8_e4m3fn",
}  # fmt: skip


@functools.lru_cache
def dtype_of(code: int) -> Any:
    """Return the NumPy dtype of an XLA_FFI_DataType; TypeError for one that no operand may have."""
    if code not in DATA_TYPES:
        raise TypeError(f"XLA's data type {code} is not supported")
    return named_dtype(DATA_TYPES[code])


class _Struct(ctypes.Structure):
    """A struct of the header; `NAME` is its name in C."""

    NAME: ClassVar[str]


class Extension(_Struct):
    """XLA_FFI_Extension_Base: an entry in the linked list of a call frame's extensions."""

    NAME = "XLA_FFI_Extension_Base"
    _fields_ = (("struct_size", c_size_t), ("type", c_int), ("next", c_void_p))


class Version(_Struct):
    """XLA_FFI_Api_Version: the version of the interface."""

    NAME = "XLA_FFI_Api_Version"
    _fields_ = (
        ("struct_size", c_size_t),
        ("extension_start", c_void_p),
        ("major_version", c_int),
        ("minor_version", c_int),
    )


class Metadata(_Struct):
    """XLA_FFI_Metadata: properties that a handler fills in when it is registered."""

    NAME = "XLA_FFI_Metadata"
    _fields_ = (("struct_size", c_size_t), ("api_version", Version), ("traits", c_uint32))


class MetadataExtension(_Struct):
    """XLA_FFI_Metadata_Extension: marks the call in which XLA asks for the metadata."""

    NAME = "XLA_FFI_Metadata_Extension"
    _fields_ = (("extension_base", Extension), ("metadata", POINTER(Metadata)))


class Buffer(_Struct):
    """XLA_FFI_Buffer: an operand or a result."""

    NAME = "XLA_FFI_Buffer"
    _fields_ = (
        ("struct_size", c_size_t),
        ("extension_start", c_void_p),
        ("dtype", c_int),
        ("data", c_void_p),
        ("rank", c_int64),
        ("dims", POINTER(c_int64)),
    )


class Args(_Struct):
    """XLA_FFI_Args: the operands of a call."""

    NAME = "XLA_FFI_Args"
    _fields_ = (
        ("struct_size", c_size_t),
        ("extension_start", c_void_p),
        ("size", c_int64),
        ("types", c_void_p),
        ("args", POINTER(c_void_p)),
    )


class Rets(_Struct):
    """XLA_FFI_Rets: the results of a call."""

    NAME = "XLA_FFI_Rets"
    _fields_ = (
        ("struct_size", c_size_t),
        ("extension_start", c_void_p),
        ("size", c_int64),
        ("types", c_void_p),
        ("rets", POINTER(c_void_p)),
    )


class ByteSpan(_Struct):
    """XLA_FFI_ByteSpan: a string without a terminator."""

    NAME = "XLA_FFI_ByteSpan"
    _fields_ = (("ptr", c_void_p), ("len", c_size_t))


class Attrs(_Struct):
    """XLA_FFI_Attrs: the attributes of a call, sorted by name."""

    NAME = "XLA_FFI_Attrs"
    _fields_ = (
        ("struct_size", c_size_t),
        ("extension_start", c_void_p),
        ("size", c_int64),
        ("types", c_void_p),
        ("names", POINTER(POINTER(ByteSpan))),
        ("attrs", POINTER(c_void_p)),
    )


class Api(_Struct):
    """XLA_FFI_Api: addresses of the functions that a handler may call."""

    NAME = "XLA_FFI_Api"
    _fields_ = (
        ("struct_size", c_size_t),
        ("extension_start", c_void_p),
        ("api_version", Version),
        ("internal_api", c_void_p),
        *((f"XLA_FFI_{name}", c_void_p) for name in (
            "Error_Create", "Error_GetMessage", "Error_Destroy", "Handler_Register", "Stream_Get", "Type_Register",
            "ExecutionContext_Get", "State_Set", "State_Get", "DeviceMemory_Allocate", "DeviceMemory_Free",
            "ThreadPool_Schedule", "ThreadPool_NumThreads", "Future_Create", "Future_SetAvailable", "Future_SetError",
            "RunId_Get", "DeviceOrdinal_Get",
        )),
    )  # fmt: skip


class CallFrame(_Struct):
    """XLA_FFI_CallFrame: the argument of a handler."""

    NAME = "XLA_FFI_CallFrame"
    _fields_ = (
        ("struct_size", c_size_t),
        ("extension_start", c_void_p),
        ("api", POINTER(Api)),
        ("ctx", c_void_p),
        ("stage", c_int),
        ("args", Args),
        ("rets", Rets),
        ("attrs", Attrs),
    )


class ErrorCreateArgs(_Struct):
    """The argument of Error_Create."""

    NAME = "XLA_FFI_Error_Create_Args"
    _fields_ = (
        ("struct_size", c_size_t),
        ("extension_start", c_void_p),
        ("message", c_char_p),
        ("errc", c_int),
    )


class StreamGetArgs(_Struct):
    """The argument of Stream_Get."""

    NAME = "XLA_FFI_Stream_Get_Args"
    _fields_ = (
        ("struct_size", c_size_t),
        ("extension_start", c_void_p),
        ("ctx", c_void_p),
        ("stream", c_void_p),
    )


class DeviceOrdinalGetArgs(_Struct):
    """The argument of DeviceOrdinal_Get."""

    NAME = "XLA_FFI_DeviceOrdinal_Get_Args"
    _fields_ = (
        ("struct_size", c_size_t),
        ("extension_start", c_void_p),
        ("ctx", c_void_p),
        ("device_ordinal", c_int32),
    )


STRUCTS = (
    Extension, Version, Metadata, MetadataExtension, Buffer, Args, Rets, ByteSpan, Attrs, Api, CallFrame,
    ErrorCreateArgs, StreamGetArgs, DeviceOrdinalGetArgs,
)  # fmt: skip
Function = ctypes.CFUNCTYPE(c_void_p, c_void_p)  # the C type of a handler, and of the functions of Api


@functools.cache
def header() -> str:
    """Return the text of the header that jaxlib ships; "" if it ships none."""
    path = Path(jax.ffi.include_dir()) / HEADER
    return path.read_text() if path.is_file() else ""


@functools.cache
def unserved() -> str | None:
    """Return the reason why handlers cannot use this jaxlib's interface, or None if they can."""
    version = re.search(r"#define\s+XLA_FFI_API_MAJOR\s+(\d+)", header())
    if version is None:
        return f"jaxlib ships no {HEADER} that states the version of XLA's FFI"
    if int(version[1]) != MAJOR:
        return f"jaxlib has major version {version[1]} of XLA's FFI, and this package speaks {MAJOR}"
    return None


def described() -> str:
    """Return how a jitted call runs, as explain() prints it."""
    reason = unserved()
    return f"XLA's FFI, major version {MAJOR}" if reason is None else f"jax.pure_callback, on a CPU alone: {reason}"


def call_api(api: Api, name: str, argument: _Struct) -> int | None:
    """Call a function of Api; return the address of its error, or None."""
    argument.struct_size = ctypes.sizeof(argument)
    result: int | None = Function(getattr(api, f"XLA_FFI_{name}"))(ctypes.addressof(argument))
    return result
