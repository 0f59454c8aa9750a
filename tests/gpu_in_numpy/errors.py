"""Status codes that the driver and the runtime share, and the exception that carries one."""

from __future__ import annotations

INVALID_VALUE = 1
OUT_OF_MEMORY = 2
INVALID_DEVICE = 101
INVALID_CONTEXT = 201
NO_BINARY_FOR_GPU = 209
INVALID_PTX = 218
FILE_NOT_FOUND = 301
INVALID_HANDLE = 400
NOT_FOUND = 500
NOT_READY = 600
ILLEGAL_ADDRESS = 700
LAUNCH_OUT_OF_RESOURCES = 701
LAUNCH_FAILED = 719
NOT_SUPPORTED = 801
CAPTURE_UNSUPPORTED = 900
CAPTURE_INVALIDATED = 901
CAPTURE_UNMATCHED = 903
CAPTURE_UNJOINED = 904
CAPTURE_ISOLATION = 905
CAPTURE_IMPLICIT = 906
CAPTURED_EVENT = 907
INVALID_CLUSTER_SIZE = 912

NAMES = {code: name for name, code in list(globals().items()) if isinstance(code, int)}


class CudaError(Exception):
    """A call failed with this status; `why` gives the reason, which a real driver would not."""

    def __init__(self, status: int, why: str) -> None:
        super().__init__(f"CUDA_ERROR_{NAMES[status]} ({status}): {why}")
        self.status = status
