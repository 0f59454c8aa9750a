"""Kernels in Gluon, a language in which the author states layouts, tensor maps, mbarriers and wgmma."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import blackwell, hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma


@gluon.jit
def store_rows(c, total, M: gl.constexpr, N: gl.constexpr, LAYOUT: gl.constexpr):
    rows = gl.arange(0, M, gl.SliceLayout(1, LAYOUT))
    columns = gl.arange(0, N, gl.SliceLayout(0, LAYOUT))
    gl.store(c + rows[:, None] * N + columns[None, :], total)


@gluon.jit
def wgmma(
    a, b, c, K, BLOCK_K: gl.constexpr, A_TRANSPOSED: gl.constexpr, B_TRANSPOSED: gl.constexpr,
    A_IN_REGISTERS: gl.constexpr, M: gl.constexpr, N: gl.constexpr, LAYOUT: gl.constexpr, A_LAYOUT: gl.constexpr,
):  # fmt: skip
    """C = A B with operands in swizzled shared memory, or A read from there into registers."""
    barrier = mbarrier.allocate_mbarrier()
    mbarrier.init(barrier, count=1)
    left = gl.allocate_shared_memory(a.dtype, a.block_type.shape, a.layout)
    right = gl.allocate_shared_memory(b.dtype, b.block_type.shape, b.layout)
    total = gl.zeros((M, N), gl.float32, LAYOUT)
    phase = 0
    for k in range(0, K, BLOCK_K):
        mbarrier.expect(barrier, a.nbytes_per_cta + b.nbytes_per_cta)
        tma.async_load(a, [k, 0] if A_TRANSPOSED else [0, k], barrier, left)
        tma.async_load(b, [0, k] if B_TRANSPOSED else [k, 0], barrier, right)
        mbarrier.wait(barrier, phase)
        phase ^= 1
        x = left.permute((1, 0)) if A_TRANSPOSED else left
        y = right.permute((1, 0)) if B_TRANSPOSED else right
        if A_IN_REGISTERS:
            total = hopper.warpgroup_mma(x.load(A_LAYOUT), y, total)
        else:
            total = hopper.warpgroup_mma(x, y, total)
        gl.barrier()
    mbarrier.invalidate(barrier)
    store_rows(c, total, M, N, LAYOUT)


@gluon.jit
def wgmma_no_swizzle(
    a, b, c, M: gl.constexpr, N: gl.constexpr, K: gl.constexpr, LAYOUT: gl.constexpr, CORES: gl.constexpr,
    LOADED: gl.constexpr,
):  # fmt: skip
    """C = A B^T with operands that threads write to shared memory."""
    rows = gl.arange(0, M, gl.SliceLayout(1, LOADED))
    columns = gl.arange(0, K, gl.SliceLayout(0, LOADED))
    at = rows[:, None] * K + columns[None, :]
    left = gl.allocate_shared_memory(a.dtype.element_ty, [M, K], CORES, gl.load(a + at))
    right = gl.allocate_shared_memory(b.dtype.element_ty, [N, K], CORES, gl.load(b + at))
    hopper.fence_async_shared()
    gl.barrier()
    total = hopper.warpgroup_mma(left, right.permute((1, 0)), gl.zeros((M, N), gl.float32, LAYOUT))
    store_rows(c, total, M, N, LAYOUT)


@gluon.jit
def copied(a, c, M: gl.constexpr, N: gl.constexpr, SHARED: gl.constexpr, LOADED: gl.constexpr):
    """C = A, which tcgen05.cp copies from shared memory to tensor memory."""
    rows = gl.arange(0, M, gl.SliceLayout(1, LOADED))
    columns = gl.arange(0, N, gl.SliceLayout(0, LOADED))
    at = rows[:, None] * N + columns[None, :]
    barrier = mbarrier.allocate_mbarrier()
    mbarrier.init(barrier, count=1)
    source = gl.allocate_shared_memory(a.dtype.element_ty, [M, N], SHARED, gl.load(a + at))
    hopper.fence_async_shared()
    gl.barrier()
    layout: gl.constexpr = blackwell.TensorMemoryLayout((M, N), col_stride=1)
    target = blackwell.allocate_tensor_memory(a.dtype.element_ty, [M, N], layout)
    blackwell.tcgen05_copy(source, target)
    blackwell.tcgen05_commit(barrier)
    mbarrier.wait(barrier, 0)
    gl.store(c + at, target.load(LOADED))


@gluon.jit
def copied_scales(a, c, SHARED: gl.constexpr, LOADED: gl.constexpr):
    """Copy a tile of scales, (64, 16) bytes, to tensor memory, and C = all of its 128 lanes, 32 bytes each."""
    rows = gl.arange(0, 64, gl.SliceLayout(1, LOADED))
    columns = gl.arange(0, 16, gl.SliceLayout(0, LOADED))
    barrier = mbarrier.allocate_mbarrier()
    mbarrier.init(barrier, count=1)
    loaded = gl.load(a + rows[:, None] * 16 + columns[None, :])
    source = gl.allocate_shared_memory(a.dtype.element_ty, [64, 16], SHARED, loaded)
    hopper.fence_async_shared()
    gl.barrier()
    scales: gl.constexpr = blackwell.TensorMemoryScalesLayout()
    target = blackwell.allocate_tensor_memory(a.dtype.element_ty, [64, 16], scales)
    blackwell.tcgen05_copy(source, target)
    blackwell.tcgen05_commit(barrier)
    mbarrier.wait(barrier, 0)
    layout: gl.constexpr = blackwell.TensorMemoryLayout((128, 32), col_stride=1)
    lanes = gl.arange(0, 128, gl.SliceLayout(1, LOADED))
    places = gl.arange(0, 32, gl.SliceLayout(0, LOADED))
    every = target.reinterpret(a.dtype.element_ty, [128, 32], layout)
    gl.store(c + lanes[:, None] * 32 + places[None, :], every.load(LOADED))


@gluon.jit
def multicast(a, b, c, M: gl.constexpr, N: gl.constexpr, LAYOUT: gl.constexpr):
    """C = A B by a cluster of two blocks: each has half of the rows of A, and one multicast loads B into both."""
    barrier = mbarrier.allocate_mbarrier()
    mbarrier.init(barrier, count=1)
    left = gl.allocate_shared_memory(a.dtype, a.block_type.shape, a.layout)
    right = gl.allocate_shared_memory(b.dtype, b.block_type.shape, b.layout)
    hopper.fence_async_shared(cluster=True)
    hopper.cluster.barrier()
    mbarrier.expect(barrier, a.nbytes_per_cta + b.nbytes_per_cta)
    tma.async_load(a, [0, 0], barrier, left)
    tma.async_load(b, [0, 0], barrier, right, multicast=True)
    mbarrier.wait(barrier, 0)
    total = hopper.warpgroup_mma(left, right, gl.zeros((M, N), gl.float32, LAYOUT), use_acc=False)
    hopper.cluster.barrier()
    store_rows(c, total, M, N, LAYOUT)


@gluon.jit
def consume(left, right, full, empty, c, STEPS: gl.constexpr, STAGES: gl.constexpr, LAYOUT: gl.constexpr):
    M: gl.constexpr = left.shape[1]
    N: gl.constexpr = right.shape[2]
    total = gl.zeros((M, N), gl.float32, LAYOUT)
    for i in range(STEPS):
        stage = i % STAGES
        mbarrier.wait(full.index(stage), (i // STAGES) & 1)
        total = hopper.warpgroup_mma(left.index(stage), right.index(stage), total)
        mbarrier.arrive(empty.index(stage), count=2)
    store_rows(c, total, M, N, LAYOUT)


@gluon.jit
def produce(a, b, left, right, full, empty, BLOCK_K: gl.constexpr, STEPS: gl.constexpr, STAGES: gl.constexpr):
    for i in range(STEPS):
        stage = i % STAGES
        mbarrier.wait(empty.index(stage), ((i // STAGES) & 1) ^ 1)
        mbarrier.expect(full.index(stage), a.nbytes_per_cta + b.nbytes_per_cta)
        tma.async_load(a, [0, i * BLOCK_K], full.index(stage), left.index(stage))
        tma.async_load(b, [i * BLOCK_K, 0], full.index(stage), right.index(stage))


@gluon.jit
def specialised(a, b, c, BLOCK_K: gl.constexpr, STEPS: gl.constexpr, STAGES: gl.constexpr, LAYOUT: gl.constexpr):
    """C = A B with a ring of tiles, which one warp loads and a warpgroup multiplies."""
    left = gl.allocate_shared_memory(a.dtype, [STAGES] + a.block_type.shape, a.layout)
    right = gl.allocate_shared_memory(b.dtype, [STAGES] + b.block_type.shape, b.layout)
    full = mbarrier.allocate_mbarrier(batch=STAGES)
    empty = mbarrier.allocate_mbarrier(batch=STAGES)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    gl.warp_specialize(
        [
            (consume, (left, right, full, empty, c, STEPS, STAGES, LAYOUT)),
            (produce, (a, b, left, right, full, empty, BLOCK_K, STEPS, STAGES)),
        ],
        [1],
        [24],
    )


@gluon.jit
def move_box(source, target, FROM: gl.constexpr, TO: gl.constexpr, ADD: gl.constexpr):
    """Copy or add a box of up to five dimensions; it may lie partly outside the source and the target."""
    box = gl.allocate_shared_memory(source.dtype, source.block_type.shape, source.layout)
    barrier = mbarrier.allocate_mbarrier()
    mbarrier.init(barrier, count=1)
    mbarrier.expect(barrier, source.nbytes_per_cta)
    tma.async_load(source, FROM, barrier, box)
    mbarrier.wait(barrier, 0)
    if ADD:
        tma.async_atomic_add(target, TO, box)
    else:
        tma.async_store(target, TO, box)
    tma.store_wait(0, read_only=False)
