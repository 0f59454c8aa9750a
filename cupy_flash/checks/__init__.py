"""The cases of `cupy_flash check`: micro-kernels of instructions, and a covering set of calls of every engine."""
