"""Delays calls of the jax adapter's handler in a script until the script exits.

It is a module of its own because XLA keeps the handler, and so the globals of functions that replace it: those of a
script hold arrays, which would keep XLA's client from being deleted.
"""

import sys
import threading
import time

from cupy_flash.adapters.jax import ffi_handler

ended = []
served, handle = ffi_handler._served, ffi_handler.handle


def in_flight(function):
    """Delay `function` until the main thread has ended, so that on any machine the program is in flight at exit."""

    def delayed(*arguments):
        threading.main_thread().join()
        time.sleep(0.2)  # meanwhile an interpreter that does not wait for this call finalizes
        result = function(*arguments)
        ended.append(None)
        return result

    return delayed


def hold_programs():
    """Delay all calls, before they are recorded as running."""
    ffi_handler._served = in_flight(served)


def hold_programs_of_a_thread():
    """Delay the first call while it is running, and the second one until the interpreter finalizes, for 3 seconds."""

    def late(*arguments):
        if ended:
            time.sleep(1)
        return served(*arguments)

    ffi_handler.handle, ffi_handler._served = in_flight(handle), late
    sys.modules["slow"] = _Slow()


def release():
    """Call the handler without delay."""
    ffi_handler.handle, ffi_handler._served = handle, served


class _Slow:
    """An object whose destructor takes 3 seconds. It runs before XLA's client is deleted."""

    def __del__(self, sleep=time.sleep):
        sleep(3)
