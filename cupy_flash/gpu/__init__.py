"""Kernels of a plan with their arguments, launched on a GPU."""
