"""Micro-kernels of Hopper's instructions, for the simulator and for a GPU; all results are exact.

Each case is the body of a kernel of micro_kernels.py. A module holds the cases of one kind of instruction.
"""

from . import bulk, shared_memory, subnormals, synchronisation, wgmma

CASES = [*wgmma.CASES, *bulk.CASES, *shared_memory.CASES, *synchronisation.CASES, *subnormals.CASES]
BY_NAME = {case.name: case for case in CASES}
