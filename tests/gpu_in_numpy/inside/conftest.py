"""Tests that only devices made of NumPy can run: `python -m gpu_in_numpy tests/gpu_in_numpy/inside`."""

import on_gpu

collect_ignore_glob = [] if on_gpu.in_numpy() else ["test_*.py"]
