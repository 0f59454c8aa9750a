"""Errors of the simulator, one class per kind of mistake in a kernel."""

from __future__ import annotations


class SimulationError(Exception):
    """A kernel broke a rule of the PTX ISA or is not simulated. The message names the thread and the source line."""


class PtxError(SimulationError):
    """The text is not PTX, or uses syntax that the parser does not know."""


class Unsupported(SimulationError):
    """An instruction, or a form of one, that the simulator does not execute."""


class LaunchRefused(SimulationError):
    """The launch exceeds a limit of a block (threads, registers, shared memory): the driver would refuse it."""


class MemoryFault(SimulationError):
    """An access outside every allocation, misaligned, or a write to read-only memory."""


class OutOfBounds(MemoryFault):
    """An access outside every allocation, or outside the block's shared memory."""


class Misaligned(MemoryFault):
    """An address that is not aligned as the access needs."""


class ReadOnly(MemoryFault):
    """A write to read-only memory."""


class NoTensorMap(SimulationError):
    """The address given to a tensor copy holds no tensor map, or lies in a space that TMA cannot read."""


class Uninitialised(SimulationError):
    """A read of uninitialised memory, or the use of an uninitialised mbarrier."""


class Race(SimulationError):
    """Two threads access the same word, at least one writes, and nothing orders them (happens-before)."""


class PendingCopy(SimulationError):
    """An access to memory that an asynchronous instruction may still read or write."""


class PendingRegister(SimulationError):
    """An access to a register that a wgmma in flight may still read or write."""


class MissingFence(SimulationError):
    """An asynchronous instruction uses data that ordinary instructions have written, without the fence it needs."""


class BadDescriptor(SimulationError):
    """A matrix descriptor of wgmma with a field that differs from what CUTLASS writes."""


class BarrierMisuse(SimulationError):
    """A barrier reached by part of a warp, or used with wrong counts."""


class EarlyExit(SimulationError):
    """A block may exit while another block of its cluster still accesses its shared memory."""


class Deadlock(SimulationError):
    """No warp can make progress: the message lists which warps wait, and at which instruction."""


class Trap(SimulationError):
    """The kernel executed trap."""
