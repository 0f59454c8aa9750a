"""Checks and timings of the engines on this machine."""
