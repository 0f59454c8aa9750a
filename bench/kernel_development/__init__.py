"""What only developers of the kernels use: counters, models and checks of the compiled kernels; see README.md."""
