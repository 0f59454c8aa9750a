"""A SIMT machine in NumPy: executes the PTX of the kernels, and checks and counts every memory access.

memory = Memory()
q = memory.add(array, "q", writable=False)
counters = launch(ptx, "forward", grid, block, struct.pack("Q", q), memory=memory)
"""

from .counters import Counters
from .errors import SimulationError
from .machine import launch
from .memory import Memory
from .parser import parse

__all__ = ["Counters", "Memory", "SimulationError", "launch", "parse"]
