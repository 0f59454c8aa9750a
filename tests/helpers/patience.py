"""Time limits that no machine reaches, however slow: a test that waits for an event may use the whole timeout of pytest
(setup.cfg), so that its outcome does not depend on how busy the machine is."""

import time

from cupy_flash import isolated

FOREVER = 7200.0  # seconds, longer than a test may take


def hang():
    """Sleep until the waiting process ends this one; FOREVER bounds it if that process is gone."""
    time.sleep(FOREVER)


def give_workers_time(monkeypatch):
    """Remove the time limits on starting and ending processes of cupy_flash.isolated."""
    monkeypatch.setattr(isolated, "START_SECONDS", FOREVER)
    monkeypatch.setattr(isolated, "ENDING_SECONDS", FOREVER)


def patiently(announce):
    """`announce` with the time limit of each step removed."""
    return lambda step, seconds: announce(step, FOREVER)
