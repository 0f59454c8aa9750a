"""A SIMT machine in NumPy: executes the PTX of the kernels, and checks and counts every memory access.

memory = Memory()
q = memory.add(array, "q", writable=False)
counters = launch(ptx, "forward", grid, block, pack(ptx, "forward", q), memory=memory)
"""

from .counters import Counters
from .errors import SimulationError
from .machine.launch import launch
from .machine.parameters import pack
from .machine.parser import parse
from .memory.store import Memory
from .named_checks import CHECKS, UNENFORCED

__all__ = ["CHECKS", "UNENFORCED", "Counters", "Memory", "SimulationError", "launch", "pack", "parse"]
