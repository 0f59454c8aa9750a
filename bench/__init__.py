"""The bench script: exactness, time and peak memory of cupy_flash beside every peer present."""
