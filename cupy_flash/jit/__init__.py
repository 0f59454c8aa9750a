"""From CUDA source to a compiled kernel in memory or on disk."""
