"""Tests that only run on devices made of NumPy: `python -m gpu_in_numpy tests/gpu_in_numpy/inside`."""

import gpu_in_numpy
import on_gpu

collect_ignore_glob = [] if on_gpu.in_numpy() else ["test_*.py"]
if on_gpu.in_numpy():
    archs = [card.arch for card in gpu_in_numpy.machine().devices.cards]
    collect_ignore_glob += [] if "sm_90a" in archs else ["test_clusters.py", "test_tensor_maps.py"]
    collect_ignore_glob += [] if gpu_in_numpy.machine().trampolines else ["test_runtime_faults.py"]
    collect_ignore_glob += [] if len(archs) > 1 else ["test_devices.py"]
