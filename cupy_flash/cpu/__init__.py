"""Attention in NumPy and BLAS, tile by tile."""
