"""What the simulator can say is wrong, one class per kind of mistake."""

from __future__ import annotations


class SimulationError(Exception):
    """A kernel did what a GPU forbids, or what the simulator does not know. The message says where and who."""


class PtxError(SimulationError):
    """The text is not PTX as this parser knows it."""


class Unsupported(SimulationError):
    """An instruction or a form of it that the simulator does not execute."""


class LaunchRefused(SimulationError):
    """A launch that asks for more than a block may have: the driver does not start it."""


class MemoryFault(SimulationError):
    """An access outside every allocation, misaligned, or a write to read-only memory."""


class OutOfBounds(MemoryFault):
    """An access outside every allocation or outside the block's shared memory."""


class Misaligned(MemoryFault):
    """An address that is no multiple of the access size."""


class ReadOnly(MemoryFault):
    """A write to memory that the kernel may only read."""


class NoTensorMap(SimulationError):
    """A bulk copy names a tensor map where there is none, or where its unit cannot read one."""


class Uninitialised(SimulationError):
    """A read of memory that nobody wrote."""


class Race(SimulationError):
    """Two threads touch the same word, at least one writes, and no barrier, release or acquire orders them."""


class PendingCopy(SimulationError):
    """Memory used while an asynchronous copy still reads or writes it."""


class PendingRegister(SimulationError):
    """A register touched while an asynchronous matrix instruction may still read or write it."""


class MissingFence(SimulationError):
    """An asynchronous instruction follows ordinary accesses to its operands without the fence between that it needs."""


class BarrierMisuse(SimulationError):
    """A barrier reached by part of a warp, or with counts that do not fit."""


class EarlyExit(SimulationError):
    """A block exits, or may, while another block of its cluster still uses its shared memory."""


class Deadlock(SimulationError):
    """Nothing can run: the message lists who waits where."""


class Trap(SimulationError):
    """The kernel executed trap."""
