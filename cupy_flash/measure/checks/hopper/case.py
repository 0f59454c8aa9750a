"""The form of Hopper's micro-kernels, and PTX that several of them share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ....gpu.tensor_map import TensorMap

Array = np.ndarray
SHARED_BYTES = 40960
# Launch options of a cluster of two blocks.
PAIR: dict[str, Any] = {"blocks": 2, "directives": ".explicitcluster .reqnctapercluster 2, 1, 1"}


@dataclass(frozen=True)
class HopperCase:
    """The body of a kernel and its arrays; `out` holds the initial values of the output.

    `maps` has for each tensor map the index of its array and a function from the array's address to the map. `expected`
    is the output by the PTX ISA, where it can be written out.
    """

    name: str
    body: str
    inputs: tuple[Array, ...]
    out: Array
    maps: tuple[tuple[int, Callable[[int], TensorMap]], ...] = ()
    threads: int = 128
    blocks: int = 1
    directives: str = ""
    target: str = "sm_90a"
    dynamic: int = 0  # bytes of dynamic shared memory at `dynamic`, in place of smem and bars
    expected: Array | None = None

    @property
    def options(self) -> dict[str, str]:
        """Keyword arguments for `micro_kernels.source`."""
        static = f".shared .align 1024 .b8 smem[{SHARED_BYTES}]; .shared .align 8 .b8 bars[64];"
        return {
            "shared": "" if self.dynamic else static,
            "variables": ".extern .shared .align 1024 .b8 dynamic[];" if self.dynamic else "",
            "target": self.target,
            "directives": self.directives,
        }


def fill(size: int, threads: int, *, pointer: int = 0) -> str:
    """Return PTX by which a block copies `size` bytes from a pointer to smem, then fences for the async proxy."""
    return f"""
        mov.u32 %r60, smem;
        shl.b32 %r61, %t, 4;
    FILL:
        setp.ge.u32 %q7, %r61, {size};
        @%q7 bra FILLED;
        cvt.u64.u32 %d30, %r61;
        add.u64 %d30, %d30, %p{pointer};
        ld.global.v4.b32 {{%r56, %r57, %r58, %r59}}, [%d30];
        add.u32 %r62, %r60, %r61;
        st.shared.v4.b32 [%r62], {{%r56, %r57, %r58, %r59}};
        add.u32 %r61, %r61, {16 * threads};
        bra FILL;
    FILLED:
        fence.proxy.async.shared::cta;
        bar.sync 0;
    """


def drain(size: int, threads: int, pointer: int) -> str:
    """Return PTX by which a block copies `size` bytes from smem to its part of the array at a pointer."""
    return f"""
        mov.u32 %r60, smem;
        shl.b32 %r61, %t, 4;
    DRAIN:
        setp.ge.u32 %q7, %r61, {size};
        @%q7 bra DRAINED;
        add.u32 %r62, %r60, %r61;
        ld.shared.v4.b32 {{%r56, %r57, %r58, %r59}}, [%r62];
        mad.lo.u32 %r62, %block, {size}, %r61;
        cvt.u64.u32 %d30, %r62;
        add.u64 %d30, %d30, %p{pointer};
        st.global.v4.b32 [%d30], {{%r56, %r57, %r58, %r59}};
        add.u32 %r61, %r61, {16 * threads};
        bra DRAIN;
    DRAINED:
    """


def initialise(count: int = 1) -> str:
    """Return PTX that initialises an mbarrier at %r50 and sets %q6 in thread 0."""
    return f"""
        mov.u32 %r50, bars;
        setp.eq.u32 %q6, %t, 0;
        @%q6 mbarrier.init.shared::cta.b64 [%r50], {count};
        @%q6 fence.mbarrier_init.release.cluster;
        bar.sync 0;
    """


def wait(parity: int = 0, label: str = "WAIT") -> str:
    """Return PTX by which all threads wait for a phase of the mbarrier at %r50."""
    return f"""
    {label}:
        mbarrier.try_wait.parity.shared::cta.b64 %q5, [%r50], {parity}, 0x989680;
        @!%q5 bra {label};
    """
