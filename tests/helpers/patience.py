"""Limits that no machine reaches, however slow: a test that waits for an event has all of the time that pytest gives it
(setup.cfg), so that its verdict never says how busy the machine was."""

import time

from bench import isolated

FOREVER = 7200.0  # seconds, longer than a test may take


def hang():
    """What never comes back is ended by who waits for it; if that is gone, it ends by itself."""
    time.sleep(FOREVER)


def give_workers_time(monkeypatch):
    """Processes of bench.isolated start and end as slowly as they have to."""
    monkeypatch.setattr(isolated, "START_SECONDS", FOREVER)
    monkeypatch.setattr(isolated, "ENDING_SECONDS", FOREVER)


def patiently(announce):
    """Each step that is announced may take for ever."""
    return lambda step, seconds: announce(step, FOREVER)
