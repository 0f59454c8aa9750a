"""The tiles that most tests run kernels in."""

from cupy_flash.engines import mma, simt

# On the simulator most tests plan with these tiles alone: short sequences make several, and their kernels compile
# fastest. test_kernels.py and test_mma.py take the others, and those that a plan chooses.
SMALL_TILE = simt.Tile(block_q=8, block_kv=16, threads=64)
SMALL_FRAGMENTS = mma.Tile(rows=32, step=16, threads=64, column_warps=1, stages=2, q_in_registers=True)


def every_kernel_in(tile):
    """In place of mma.legal_tiles: this one, as far as a kernel knows what it asks for."""

    def legal_tiles(kernel, problem, device, *, add_dq=False):
        of_forward = dict(q_in_registers=tile.q_in_registers and kernel == "forward")
        stages = 1 if kernel == "backward_bias" else tile.stages
        return [tile._replace(stages=stages, add_dq=add_dq, **of_forward)]

    return legal_tiles
