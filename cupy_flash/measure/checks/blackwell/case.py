"""The form of Blackwell's micro-kernels, and PTX that several of them share."""

from __future__ import annotations

from ..hopper.case import HopperCase

TARGET = "sm_100a"
# {architecture on which the kernels run too: the version of PTX that has it}
ALSO = {"sm_103a": "8.8"}
FENCE_BEFORE, FENCE_AFTER = "tcgen05.fence::before_thread_sync;", "tcgen05.fence::after_thread_sync;"
BARRIER = f"{FENCE_BEFORE} bar.sync 0; {FENCE_AFTER}"
DEALLOC = "@%q4 tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r51, {columns};"


class BlackwellCase(HopperCase):
    """The body of a kernel and its arrays; 128 threads with smem, bars and tmem in shared memory."""

    @property
    def options(self) -> dict[str, str]:
        """Keyword arguments for `micro_kernels.source`."""
        arrays = (".align 1024 .b8 smem[32768]", ".align 8 .b8 bars[64]", ".align 4 .b8 tmem[4]")
        return {"shared": " ".join(f".shared {array};" for array in arrays), "target": TARGET}


def allocate(columns: int) -> str:
    """Return PTX by which warp 0 (%q4) allocates columns; all threads get the address in %r51, their lanes' in %r52."""
    return f"""
        shr.u32 %r52, %t, 5;
        setp.eq.u32 %q4, %r52, 0;
        mov.u32 %r53, tmem;
        @%q4 tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r53], {columns};
        @%q4 tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;
        {BARRIER}
        ld.shared.u32 %r51, [%r53];
        and.b32 %r52, %r52, 3;
        shl.b32 %r52, %r52, 21;
        add.u32 %r52, %r52, %r51;
    """


def registers(count: int) -> str:
    """Return the PTX of a vector of registers."""
    return "{" + ", ".join(f"%r{i}" for i in range(count)) + "}"


def move(
    direction: str, pointer: int, columns: int, *, shape: str = "32x32b", each: int = 1, lanes: int = 0, split: str = ""
) -> str:
    """Return PTX by which each thread moves words of an array (128, columns * each) to tensor memory, or back."""
    lines = [f"mad.wide.u32 %d0, %t, {4 * columns * each}, %p{pointer};"]
    for first in range(0, columns, 32 // each):
        count = min(columns - first, 32 // each)
        words, at = range(count * each), f"[%r52+{(lanes << 16) + first * (1 if each == 1 else 2 * each)}]"
        offset = 4 * first * each
        if direction == "st":
            lines += [f"ld.global.b32 %r{i}, [%d0+{offset + 4 * i}];" for i in words]
            lines.append(f"tcgen05.st.sync.aligned.{shape}.x{count}.b32 {at}{split}, {registers(count * each)};")
        else:
            lines.append(f"tcgen05.ld.sync.aligned.{shape}.x{count}.b32 {registers(count * each)}, {at}{split};")
            lines.append("tcgen05.wait::ld.sync.aligned;")
            lines += [f"st.global.b32 [%d0+{offset + 4 * i}], %r{i};" for i in words]
    return "\n".join([*lines, "" if direction == "ld" else "tcgen05.wait::st.sync.aligned;"])
