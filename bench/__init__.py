"""Benchmarks: accuracy, time and peak memory of cupy_flash and of all other installed implementations."""
