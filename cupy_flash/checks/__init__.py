"""What `cupy_flash check` runs: micro-kernels of instructions, and a covering set of calls of every engine."""
