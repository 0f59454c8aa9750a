"""python -m bench predict: the speed of the Hopper engine in the regimes that have a mark, predicted without a GPU.

A step of the mainloop takes at least the time that each resource of an SM needs for it: the tensor cores, shared
memory, the MUFU, and the warp scheduler. `cycles.py` executes the kernel's own SASS and adds the waits between them.
Two speeds result: that of consumer warpgroups that overlap each other perfectly, and that of warpgroups that do not
overlap at all, each of which runs its step alone. The speeds that FlashAttention-3's authors publish are .61 times what
the model finds for their SASS with overlap, with a standard deviation of .05 over nine kernels; they are .6 to 1.3
times what it finds without. The prediction is therefore `SPEED_OF_OVERLAP` times the speed with overlap, with `ERROR`.
Only a GPU can confirm it (bench/gpu_queue.md).

A work tile costs TILE_OVERHEAD steps more than its mainloop has: the first load and product and the last ones overlap
nothing. Work is spread evenly over the SMs. With these two rules FlashAttention-3's published speeds at D 128 from 512
to 16384 tokens follow from one speed of its step, within 15 % (tests/bench/test_predict.py). Blocks of a deterministic
backward also wait for their turns (`semaphore.py`). The clock under load and the backward's traffic to dQ are not
modelled: `SPEED_OF_OVERLAP` includes their mean effect.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import mean, pstdev
from typing import Any, NamedTuple

from cupy_flash import device
from cupy_flash.engines.launch import Launch
from cupy_flash.jit import nvrtc
from cupy_flash.jit.source import assemble
from cupy_flash.plan.plan import plan
from cupy_flash.problem.records import FP8

from ..gpu import Regime
from ..report import NOTHING, Table
from ..run import Progress
from . import cycles, sass, semaphore
from .costs import problem_of
from .fingerprint import fingerprint
from .marks import MARKS
from .published import FLASH_ATTENTION_3_MAINLOOPS, flash_attention_3_mainloop

# An H200 as it runs torch.matmul: the tensor cores' multiply-adds per SM and clock, its boost clock, and the TFLOP/s of
# a bf16 matmul of 8192^3. Changing one of them changes every prediction: rerun the command in the same commit.
MULTIPLY_ADDS, CLOCK, MATMUL_TFLOPS = 2048, 1.98e9, 790.0
TILE_OVERHEAD = 1.5  # steps
ARCH = "sm_90a"
DTYPES = ("float16", "bfloat16", FP8)
KERNELS = ("forward", "forward_fp8", "backward")
# FlashAttention-3's published speed divided by the speed that the cycle model finds with overlap: mean and standard
# deviation over its kernels.
_RATIOS = [each.published / each.overlapping for each in FLASH_ATTENTION_3_MAINLOOPS.values() if each.published]
SPEED_OF_OVERLAP, ERROR = mean(_RATIOS), pstdev(_RATIOS)


class Step(NamedTuple):
    """One iteration of a mainloop: clocks that each resource of an SM needs, and clocks by the cycle model."""

    resources: dict[str, float]
    overlapping: float  # clocks if all consumer warpgroups run at the same time
    alone: float  # clocks if one consumer warpgroup runs after the other


def step(loop: list[str], warpgroups: int, loaded_bytes: int) -> Step:
    """Model a step: `warpgroups` consumers each execute `loop` while TMA writes loaded_bytes to shared memory."""
    opcodes = list(map(sass.opcode, loop))
    exps = sum(opcode in sass.CLASSES["exp"] for opcode in opcodes)
    resources = {
        "tensor cores": float(warpgroups * cycles.tensor_clocks(loop)),
        "shared memory": (loaded_bytes + warpgroups * sum(map(cycles.shared_bytes, loop))) / cycles.SHARED_BYTES,
        "MUFU": float(warpgroups * exps * cycles.UNITS["MUFU"][1]),
        "issue": float(warpgroups * len(loop)),
    }
    overlapping = cycles.clocks_of_iteration(loop, warpgroups)
    return Step(resources, overlapping, warpgroups * cycles.clocks_of_iteration(loop, 1))


class Prediction(NamedTuple):
    """A regime with a mark, the tile that the plan chooses, and the model's prediction for it."""

    regime: str
    kernel: str
    tile: tuple[int, int, int]
    fingerprint: str
    goal: float | None  # target of R_mm, our TFLOP/s divided by torch.matmul's
    turns: float  # deterministic backward: time without waits for turns / time with them; else 1
    r_mm: tuple[float, float]  # R_mm without and with overlap of warpgroups
    binding: tuple[str, str]  # the slowest resource of a step, without and with overlap
    tensor_clocks: float  # tensor-core clocks of a step
    shared: float  # clocks of shared memory divided by those of the tensor cores
    mufu: float
    waits: list[sass.Wait]
    exps: int
    instructions: tuple[int, int]  # number on the steady path and on the longest one (see sass.Mainloop)


def predict(regimes: Iterable[Regime], progress: Progress) -> list[Prediction]:
    """Compile the kernel of every regime and predict its speed."""
    predictions = []
    for regime in regimes:
        progress(regime.name)
        launch = launch_of(regime)
        assert launch.tile is not None
        block_q, block_kv, threads = launch.tile
        mainloop = sass.mainloop(
            nvrtc.compile(
                assemble(launch.kernel, dict(launch.constants), dict(launch.headers)), launch.kernel, ARCH
            ).code
        )
        dims = regime.head_dim + (regime.head_dim_v or regime.head_dim)
        loaded = (block_q if regime.backward else block_kv) * dims * problem_of(regime, "wgmma").dtype.itemsize
        modelled = step(mainloop.steady, threads // 128 - 1, loaded)
        tensor = modelled.resources["tensor cores"]
        # Resources come first, because in a tie max() must name the resource, not the waits that it causes.
        clocks = modelled.resources | {"waits": modelled.overlapping}
        together = max(clocks, key=clocks.__getitem__)
        without = "one warpgroup's chain" if modelled.alone > clocks[together] else together
        units = device.named(ARCH, "cuda").units
        in_turn = 1.0
        if regime.deterministic:
            in_turn = semaphore.efficiency(regime, block_q, block_kv, clocks[together], TILE_OVERHEAD, units)
        count = steps(regime, block_q, block_kv) / in_turn
        predictions.append(
            Prediction(
                regime.name,
                launch.kernel,
                launch.tile,
                fingerprint(launch),
                MARKS[regime].goal.get("mm") if regime in MARKS else None,
                in_turn,
                (r_mm(regime, count * max(modelled.alone, *clocks.values())), r_mm(regime, count * clocks[together])),
                (without, together),
                tensor,
                modelled.resources["shared memory"] / tensor,
                modelled.resources["MUFU"] / tensor,
                mainloop.waits(),
                mainloop.counts()["exp"],
                (len(mainloop.steady), len(mainloop.longest)),
            )
        )
    return predictions


def launch_of(regime: Regime) -> Launch:
    """Return the kernel with the mainloop that the plan chooses for a regime."""
    launches = plan(problem_of(regime, "wgmma"), device.named(ARCH, "cuda")).launches
    return next(each for each in launches if each.function in KERNELS)


def stale(stored: Sequence[dict[str, Any]], regimes: Sequence[Regime]) -> list[str]:
    """Return a line for each stored row that is outdated or missing, or whose regime is not among these."""
    rows = {each["regime"]: each["fingerprint"] for each in stored}
    today = {regime.name: fingerprint(launch_of(regime)) for regime in regimes}
    return [f"stale: {name}" for name in today | rows if rows.get(name) != today.get(name)]


def steps(regime: Regime, block_q: int, block_kv: int) -> float:
    """Return the number of mainloop steps of all work tiles of a regime, plus TILE_OVERHEAD steps per work tile."""
    fixed, visited = (block_kv, block_q) if regime.backward else (block_q, block_kv)
    per_head = 0.0
    for start in range(0, regime.seqlen, fixed):
        # A query tile sees the keys up to its last query; a key tile is seen by the queries from its first key on.
        positions = regime.seqlen
        if regime.causal:
            positions = regime.seqlen - start // visited * visited if regime.backward else start + fixed
        per_head += -(-min(positions, regime.seqlen) // visited) + TILE_OVERHEAD
    return regime.batch * regime.heads * per_head


def r_mm(regime: Regime, clocks: float) -> float:
    """Return the R_mm (speed / torch.matmul's) of a regime whose work takes `clocks` clocks of one SM in total."""
    seconds = clocks / (device.named(ARCH, "cuda").units * CLOCK)
    return regime.flops / seconds / (MATMUL_TFLOPS * 1e12)


def table(predictions: list[dict[str, Any]]) -> Table:
    """Return the table of predictions, with FlashAttention-3's mainloop for the same regime beside ours."""
    regimes = {regime.name: regime for regime in MARKS}
    rows = []
    for each in predictions:
        alone, overlapping = each["r_mm"]
        other = flash_attention_3_mainloop(regimes[each["regime"]])
        rows.append(
            [
                each["regime"],
                f"{each['tile'][0]}x{each['tile'][1]}",
                f"{SPEED_OF_OVERLAP * overlapping:.2f} ± {ERROR * overlapping:.2f}",
                NOTHING if each["goal"] is None else f"{each['goal']:.2f}",
                f"{alone * MATMUL_TFLOPS:.0f} / {overlapping * MATMUL_TFLOPS:.0f}",
                NOTHING if other is None else f"{other.alone} / {other.overlapping}",
                NOTHING if other is None or other.published is None else str(other.published),
                NOTHING if other is None else "{}x{}".format(*other.tile),
                NOTHING if each["turns"] == 1 else f"{each['turns']:.2f}",
                " / ".join(each["binding"]),
                f"{each['tensor_clocks']:.0f}",
                f"{each['shared']:.0%}",
                f"{each['mufu']:.0%}",
                ", ".join(f"{wait[2]}" for wait in each["waits"] if "WARPGROUP" in wait[0]) + f" of {each['exps']}",
                " to ".join(map(str, each["instructions"])),
            ]
        )
    columns = [
        "regime", "tile", "R_mm", "goal", "alone / overlap", "FA3 alone / overlap", "FA3 published", "FA3 tile",
        "turns", "bound by", "tensor clocks", "shared memory", "MUFU", "exps before waits", "instructions",
    ]  # fmt: skip
    return Table(
        f"Predicted speed over torch.matmul, {SPEED_OF_OVERLAP:.2f} ± {ERROR:.2f} of that with overlap of consumer "
        "warpgroups, and TFLOP/s of the model without and with overlap",
        columns,
        rows,
    )
