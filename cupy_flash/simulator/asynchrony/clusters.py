"""Thread block clusters: barrier.cluster, and mapa for the addresses of distributed shared memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt

from ..errors import BarrierMisuse
from ..instructions.closures import Compiler, computed, unsupported
from ..machine.context import Context, Group, Mask, Step, Unit
from ..machine.ptx import Instruction
from ..memory.checks import Checks
from ..memory.shared_addresses import RANK_BITS

_WINDOW = np.uint32((1 << RANK_BITS) - 1)


class ClusterBarrier(Unit):
    """barrier.cluster: a warp's wait ends when every live warp of its cluster has arrived as often as it has."""

    def __init__(self, context: Context):
        super().__init__(context)
        self.checks = context.find(Checks)
        self.arrivals = np.zeros(context.warps, np.int64)
        self.waited = np.zeros(context.warps, np.int64)

    def arrive(self, rows: npt.NDArray[np.int64], instruction: Instruction, *, release: bool) -> None:
        """Execute barrier.cluster.arrive; a second arrival without a wait in between is an error."""
        context = self.context
        again = self.arrivals[rows] != self.waited[rows]
        if again.any():
            name = context.thread_name(int(rows[np.flatnonzero(again)[0]]), 0)
            raise BarrierMisuse(f"{name} arrives again at the cluster barrier without a wait: {instruction.where}")
        self.arrivals[rows] += 1
        context.events += 1
        if self.checks is None:
            return
        # Clocks are published at the cluster's first block, in two alternating entries, because a warp may arrive for
        # the next phase before others have left this one.
        clocks = self.checks.clocks
        for phase in np.unique(self.arrivals[rows]):
            mine = rows[self.arrivals[rows] == phase]
            barrier = "cluster", int(phase) % 2
            if release:
                clocks.publish(barrier, mine, context.cluster_of_row[mine] * context.cluster)
                self.checks.converge(mine)
                continue
            # A relaxed arrival publishes only what an earlier release fence has published.
            for warp in np.unique(context.warp_in_cluster[mine]):
                first = context.cluster_of_row[mine[context.warp_in_cluster[mine] == warp]] * context.cluster
                rank, in_block = divmod(int(warp), context.warps_per_block)
                clocks.transfer(("fence", in_block), barrier, first + rank, first)

    def passed(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Return whether the barrier phase for which each warp waits is complete, (n,)."""
        context = self.context
        live = context.live.any(1)
        slowest = np.full(context.blocks // context.cluster, np.iinfo(np.int64).max)
        np.minimum.at(slowest, context.cluster_of_row[live], self.arrivals[live])
        return slowest[context.cluster_of_row[rows]] >= self.arrivals[rows]

    def wait(self, rows: npt.NDArray[np.int64], instruction: Instruction) -> None:
        """Execute barrier.cluster.wait, once `passed`; a wait without an arrival is an error."""
        context = self.context
        never = self.arrivals[rows] == self.waited[rows]
        if never.any():
            name = context.thread_name(int(rows[np.flatnonzero(never)[0]]), 0)
            raise BarrierMisuse(f"{name} waits at the cluster barrier without having arrived: {instruction.where}")
        self.waited[rows] = self.arrivals[rows]
        if self.checks is not None:
            for phase in np.unique(self.arrivals[rows]):
                mine = rows[self.arrivals[rows] == phase]
                blocks = context.cluster_of_row[mine] * context.cluster
                self.checks.clocks.acquire(("cluster", int(phase) % 2), mine, blocks)

    def explain(self, group: Group, instruction: Instruction) -> Iterator[str]:
        """Yield a line per cluster with the waiting warps and the warps that have not arrived."""
        context = self.context
        for cluster in np.unique(context.cluster_of_row[group.rows]):
            here = group.rows[context.cluster_of_row[group.rows] == cluster]
            late = (context.cluster_of_row == cluster) & context.live.any(1) & (self.arrivals < self.arrivals[here[0]])
            names = [context.warp_name(int(cluster), int(w)) for w in context.warp_in_cluster[late]]
            block = int(context.block_ids[context.block_of_row[here[0]]])
            warps = [int(w) for w in context.warp_of_row[here]]
            others = ", ".join(names)
            yield f"block {block}: warps {warps} wait at the cluster barrier for {others}: {instruction.where}"


def ready(instruction: Instruction, context: Context) -> Callable[[Group], Mask]:
    """Return a function from a group to its lanes (rows, 32) whose wait is over."""
    barrier = context.unit(ClusterBarrier)
    return lambda group: group.lanes() & barrier.passed(group.rows)[:, None]


def _barrier(instruction: Instruction, context: Context) -> Step:
    """Compile barrier.cluster.arrive{.release|.relaxed}{.aligned} and barrier.cluster.wait{.acquire}{.aligned}."""
    barrier = context.unit(ClusterBarrier)
    if instruction.modifiers[1] == "wait":
        return lambda group: barrier.wait(group.rows, instruction)
    release = "relaxed" not in instruction.modifiers
    return lambda group: barrier.arrive(group.rows, instruction, release=release)


def _map_address(instruction: Instruction, context: Context) -> Step:
    """Compile mapa.shared::cluster.u32 d, a, rank: the address in block `rank` that corresponds to `a` in this one."""
    if instruction.modifiers != ("shared::cluster", "u32"):
        raise unsupported(instruction)
    result = context.destination(instruction.operands[0], "u32", instruction)
    address, rank = (context.source(operand, "u32", instruction) for operand in instruction.operands[1:])
    return computed(result, lambda a, r: (a & _WINDOW) | ((r + np.uint32(1)) << np.uint32(RANK_BITS)), address, rank)


COMPILERS: dict[str, Compiler] = {"barrier.cluster": _barrier, "mapa": _map_address}
