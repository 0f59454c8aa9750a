"""Counters, models and checks of the compiled kernels, for developers of the kernels alone; see README.md."""
