"""Micro-kernels of Blackwell's tensor memory and tcgen05, for the simulator and for a GPU; all results are exact.

They settle what the tcgen05 engine believes: layouts in tensor memory, descriptors, the order of mma and cp, what a
commit covers, and allocation by several blocks of an SM.
"""

from . import copies, products, tensor_memory

CASES = [*products.CASES, *copies.CASES, *tensor_memory.CASES]
