"""The tiles that most tests run kernels in."""

from cupy_flash.engines import mma, simt

# On the simulator most tests plan with only these tiles: short sequences have several of them, and their kernels
# compile fastest. test_kernels.py and test_mma.py run other tiles, and those that a plan chooses.
SMALL_TILE = simt.Tile(block_q=8, block_kv=16, threads=64)
SMALL_FRAGMENTS = mma.Tile(rows=32, step=16, threads=64, column_warps=1, stages=2, q_in_registers=True)


def every_kernel_in(tile):
    """A replacement of mma.legal_tiles that returns this tile, with the fields that a kernel has, and with one stage
    where its pipeline does not fit the shared memory."""

    def legal_tiles(kernel, problem, device, *, add_dq=False):
        of_forward = dict(q_in_registers=tile.q_in_registers and kernel == "forward")
        stages = 1 if kernel == "backward_bias" else tile.stages
        staged = tile._replace(stages=stages, add_dq=add_dq, **of_forward)
        fits = mma._shared_bytes(kernel, problem, staged) <= device.shared_bytes
        return [staged if fits else staged._replace(stages=1)]

    return legal_tiles
