"""Replaces time limits by ones that even the slowest machine meets.

A test that waits for an event may use the whole timeout of pytest (setup.cfg), so that its outcome does not depend on
the load of the machine.
"""

import time

from cupy_flash.measure import worker_process

FOREVER = 7200.0  # seconds, longer than pytest's timeout


def hang():
    """Sleep until another process ends this one; FOREVER bounds the sleep if that process is gone."""
    time.sleep(FOREVER)


def give_workers_time(monkeypatch):
    """Remove the time limits on starting and ending processes of cupy_flash.measure.worker_process."""
    monkeypatch.setattr(worker_process, "START_SECONDS", FOREVER)
    monkeypatch.setattr(worker_process, "ENDING_SECONDS", FOREVER)


def patiently(announce):
    """Wrap `announce` so that no step has a time limit."""
    return lambda step, seconds: announce(step, FOREVER)
