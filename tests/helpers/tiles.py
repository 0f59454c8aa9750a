"""Small tiles for most tests of kernels: short sequences span several of them, and their kernels compile fastest.

test_kernels.py and test_mma.py run other tiles, among them those that a plan chooses.
"""

from cupy_flash import dispatch
from cupy_flash.engines import mma, simt
from cupy_flash.plan.plan import Plan, plan
from cupy_flash.problem.records import Problem

SMALL_TILE = simt.Tile(block_q=8, block_kv=16, threads=64)
SMALL_FRAGMENTS = mma.Tile(rows=32, step=16, threads=64, column_warps=1, stages=2, q_in_registers=True)


def in_small_tiles(problem: Problem) -> Plan:
    """Return the plan of a problem on its device, with a small tile if the device is the simulator."""
    chosen = dispatch.plan_for(problem)
    if chosen.device.backend != "simulator":
        return chosen
    return plan(problem, chosen.device, small_tile(chosen))


def small_tile(chosen: Plan) -> simt.Tile | mma.Tiles:
    """Return the small tile for a plan's engine, simt or mma."""
    return {"simt": lambda _: SMALL_TILE, "mma": fragments(SMALL_FRAGMENTS)}[chosen.engine](chosen)


def fragments(tile, dq="own"):
    """Return a function from a plan to its mma tiles: `tile` for every kernel, with the fields that the kernel has.

    A pipeline that exceeds the shared memory gets one stage. dq="own" computes dQ in a kernel of its own; dq="added"
    adds dQ atomically in the kernel of dK and dV, dq="shared" in the one whose warps share their scores.
    """

    def tiles(chosen: Plan) -> mma.Tiles:
        def of(kernel, **fields):
            single = kernel == "backward_bias" or (chosen.problem.selected is not None and chosen.problem.backward)
            stages = 1 if single else tile.stages
            in_registers = tile.q_in_registers and kernel == "forward"
            staged = tile._replace(stages=stages, q_in_registers=in_registers, **fields)
            fits = mma._shared_bytes(kernel, chosen.problem, staged) <= chosen.device.shared_bytes
            return staged if fits else staged._replace(stages=1)

        if not chosen.problem.backward:
            return mma.Tiles(tile.rows, tile.step, of("forward"), None, None)
        bias = None if chosen.problem.bias is None else of("backward_bias")
        if dq == "added":
            return mma.Tiles(tile.step, tile.rows, None, of("backward_kv", add_dq=True), bias)
        if dq == "shared":
            shared = of("backward", add_dq=True, shares_scores=True)
            return mma.Tiles(tile.step, tile.rows, None, shared, bias)
        return mma.Tiles(tile.rows, tile.rows, of("backward_q"), of("backward_kv"), bias)

    return tiles
