"""The named checks: rules that a kernel can break without an error of the GPU.

A launch makes all of these checks, except those that its option `unchecked` names. What a GPU rejects or hangs at (an
address outside memory, a deadlock, a barrier with wrong counts) has no name and is always an error.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple


class Check(NamedTuple):
    """A named check."""

    finds: str
    # False if no GPU's results depend on the rule, so that kernels of other code generators may break it.
    enforced: bool = True


CHECKS = {
    "race": Check(
        "two accesses of a word, one of them a write, that nothing orders; an asynchronous instruction accesses memory "
        "until a wait for it"
    ),
    "uninitialised": Check("a read of shared memory or of an output before its first write"),
    "proxy-fence": Check("a TMA copy or wgmma that uses ordinary writes without a fence.proxy.async after them"),
    "wgmma-fence": Check("a wgmma without a wgmma.fence after the last use of its registers by other instructions"),
    "wgmma-registers": Check("a use of a register of a wgmma in flight before its wgmma.wait_group"),
    "early-exit": Check("a block that may end before the last access to its shared memory by a copy or another block"),
    "float-order": Check(
        "floating-point additions by atomics of blocks that synchronise, in an order that nothing fixes",
        enforced=False,
    ),
    "tcgen05-fence": Check(
        "accesses to tensor memory that a synchronisation orders without tcgen05.fence::before_thread_sync before it "
        "and ::after_thread_sync after it, which hold back the compiler only",
        enforced=False,
    ),
    "setmaxnreg-aligned": Check(
        "a setmaxnreg that the warps of a warpgroup do not execute together; a GPU changes the registers of each warp",
        enforced=False,
    ),
    "mbarrier-init-fence": Check(
        "a bulk copy that signals an mbarrier without fence.mbarrier_init or fence.proxy.async after its mbarrier.init",
        enforced=False,
    ),
    "commit-wait": Check(
        "a block that ends without a wait for the arrival of its last tcgen05.commit to an mbarrier", enforced=False
    ),
    "bulk-read-wait": Check(
        "a block that ends without a cp.async.bulk.wait_group{.read} after its last bulk store", enforced=False
    ),
    "kmajor-lbo": Check(
        "a descriptor of wgmma, tcgen05.mma or .cp of a swizzled K-major matrix whose leading dimension byte offset, "
        "which a GPU ignores, is not the 16 bytes that CUTLASS writes",
        enforced=False,
    ),
}
# For kernels of other code generators: launch(..., unchecked=UNENFORCED).
UNENFORCED = frozenset(name for name, check in CHECKS.items() if not check.enforced)


def names(unchecked: Collection[str]) -> frozenset[str]:
    """Return the names of checks as a set; raises ValueError if one is unknown."""
    unknown = [name for name in unchecked if name not in CHECKS]
    if unknown:
        raise ValueError(f"unchecked={unchecked!r}: {unknown} are not among the named checks {', '.join(CHECKS)}")
    return frozenset(unchecked)
