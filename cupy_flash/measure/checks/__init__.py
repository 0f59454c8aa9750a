"""The cases of `cupy_flash check`: a micro-kernel per instruction, and calls that cover every option of each engine."""
