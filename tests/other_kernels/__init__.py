"""Kernels of other code generators, run in the simulator: Triton and Gluon kernels written here, compiled by Triton."""
