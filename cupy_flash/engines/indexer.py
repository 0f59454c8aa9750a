"""Launches, workspaces and refusals of the kernels of the lightning indexer, of simt and mma."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from ..arrays import dtype_name
from ..device import Device
from ..jit.shared_memory import shared_bytes
from ..problem.indexer import Indexer, IndexerOperands
from ..problem.records import LONGEST, UnsupportedError
from .launch import Constant, Launch, Workspace
from .mma import LARGEST_ON_TURING
from .selected import CHUNKS, ROW_THREADS
from .shared import ELEMENTS, divides, known_constants, nonempty
from .simt import LARGEST

BLOCKS = 2  # for each multiprocessor: each has candidates of its own
MERGING = 128  # threads of a block that merges parts
LEAST_PLACES = 64  # of later candidates behind the n best of a row
WARP, LEAST_ROWS = 32, 16


class Tile(NamedTuple):
    """Rows, keys and threads of a block of an engine."""

    engine: str
    rows: int
    keys: int
    threads: int = 128


# In order of preference: large tiles read the queries of all heads for more keys. The rows of selection_loss are heads.
TILES = {
    "select_keys": (
        *(Tile("mma", 64, 64), Tile("mma", 64, 32), Tile("mma", 16, 64, 32)),
        *(Tile("simt", rows, keys) for rows, keys in ((64, 64), (32, 64), (32, 32), (16, 64), (16, 32), (16, 16))),
    ),
    "selection_loss": tuple(Tile("simt", 16, keys) for keys in (64, 32, 16)),
}


def tile_of(kernel: str, indexer: Indexer, operands: IndexerOperands, device: Device) -> Tile:
    """Return the first tile that an engine serves and whose memory fits; UnsupportedError if there is none."""
    dtype, dim = operands.q.dtype.name, operands.q.shape[-1]
    engines = {"simt"} if dim <= LARGEST else set()
    if dtype == "float16" or (dtype == "bfloat16" and device.arch != "sm_75"):
        engines |= {"mma"} if dim <= (LARGEST_ON_TURING if device.arch == "sm_75" else LARGEST) else set()
    for tile in TILES[kernel]:
        # Few queries get a tile of few rows, whose blocks are cheap enough to divide the keys among many.
        has_rows = kernel == "selection_loss" or tile.rows <= max(2 * indexer.q_len, LEAST_ROWS)
        if tile.engine in engines and has_rows:
            needed = shared_bytes(f"{tile.engine}/{kernel}", constants_of(indexer, operands, tile))
            if needed + _static_bytes(tile) <= device.shared_bytes:
                return tile
    reason = f"no tile of dimension {dim} fits the {device.shared_bytes} bytes of shared memory of {device}"
    raise UnsupportedError(f"{kernel}: {reason if engines else f'dimension {dim} is larger than {LARGEST}'}")


def _static_bytes(tile: Tile) -> int:
    """Return the bytes that locate the pages of the keys of a tile, and the states of its rows."""
    return 2 * 4 * tile.keys + 24 * tile.rows


def constants_of(indexer: Indexer, operands: IndexerOperands, tile: Tile) -> dict[str, Constant]:
    """Return the constants of the kernels; those of select_keys read the keys as those of a KV cache."""
    given = {
        "head_element": operands.weights, "target_element": operands.target, "row_element": operands.row_weights,
    }  # fmt: skip
    chooses = operands.selected is None
    element = ELEMENTS[dtype_name(operands.q.dtype)]
    return {
        "element": element,
        "kv_element": element,
        "real": ELEMENTS[indexer.accumulation.name],
        **{name: ELEMENTS[dtype_name(x.dtype)] for name, x in given.items() if x is not None},
        "HEAD_DIM": operands.q.shape[-1],
        "HEAD_DIM_V": operands.q.shape[-1],
        "THREADS": tile.threads,
        "BLOCK_Q": tile.rows,
        "BLOCK_KV": tile.keys,
        "INDEXER": True,
        "SELECTED": not chooses,
        "KV_CACHE": chooses,
        "PAGED": indexer.page > 0,
        "PAGE_DIVISION": indexer.page > 0 and divides(indexer.page),
        "KEYS_OF_ENTRY": indexer.rule.block,
        "TOP_LEFT": indexer.rule.causal == "top_left",
        "WINDOW_RIGHT": bool(indexer.rule.causal),
    }


def requested(
    function: str, indexer: Indexer, operands: IndexerOperands, device: Device
) -> tuple[tuple[Launch, ...], tuple[Workspace, ...]]:
    """Return the launches of "select", "loss" or "gradients", without those of empty grids, and their workspaces."""
    if function == "select":
        launches, workspaces = _choosing(indexer, operands, device)
        return nonempty(launches), workspaces
    launches, workspaces = _training(indexer, operands, device, gradients=function == "gradients")
    return nonempty(launches), workspaces


def parts_of(indexer: Indexer, operands: IndexerOperands, device: Device) -> tuple[int, int]:
    """Return the parts into which select_keys divides the keys, so that few queries fill the GPU, and their size.

    A part ends between two tiles and two entries, and has more entries than a list, which the merge of lists reads.
    """
    tile, block = tile_of("select_keys", indexer, operands, device), indexer.rule.block
    unit, whole = math.lcm(tile.keys, block), max(indexer.kv_len, 1)
    blocks = max(-(-indexer.q_len // tile.rows) * indexer.batch, 1)
    parts = max(min(BLOCKS * device.units // blocks, whole // (2 * indexer.rule.n * block)), 1)
    keys = min(-(-whole // parts // unit) * unit, LONGEST)
    return -(-whole // keys), keys


def _choosing(
    indexer: Indexer, operands: IndexerOperands, device: Device
) -> tuple[list[Launch], tuple[Workspace, ...]]:
    """Return the launches of select_keys and of the merge of its parts, and the candidates of its blocks."""
    tile = tile_of("select_keys", indexer, operands, device)
    constants = constants_of(indexer, operands, tile)
    kernel, (parts, _) = f"{tile.engine}/select_keys", parts_of(indexer, operands, device)
    # No more blocks than there are query tiles, and no fewer than one of each sequence.
    blocks = min(-(-indexer.q_len // tile.rows), max(BLOCKS * device.units // max(indexer.batch, 1), 1))
    grid, rows = (blocks, parts, indexer.batch), indexer.batch * parts * blocks * tile.rows
    launches = [Launch(kernel, tuple(constants.items()), grid, tile.threads, shared_bytes(kernel, constants))]
    int32, shape = np.dtype(np.int32), (rows, _candidate_places(indexer))
    workspaces = [
        Workspace("candidate_scores", shape, indexer.accumulation, ()),
        Workspace("candidates", shape, int32, ()),
    ]
    if parts > 1:
        merging = tuple((constants | {"THREADS": MERGING}).items())
        launches.append(Launch("indexer/merge_parts", merging, (blocks, 1, indexer.batch), MERGING))
        workspaces.append(Workspace("candidate_counts", (rows,), int32, ()))
    return launches, tuple(workspaces)


def _candidate_places(indexer: Indexer) -> int:
    """Return the places of the candidates of a row: for the n best and later ones, or for all entries."""
    n, entries = indexer.rule.n, -(-indexer.kv_len // indexer.rule.block)
    return min(n + max(n, LEAST_PLACES), entries + WARP)


def _training(
    indexer: Indexer, operands: IndexerOperands, device: Device, *, gradients: bool
) -> tuple[list[Launch], tuple[Workspace, ...]]:
    """Return the launches of selection_loss and of its gradients, and their workspaces.

    Blocks of a key sum its gradient over the entries that name it: lists are sorted by the keys that they name.
    """
    tile = tile_of("selection_loss", indexer, operands, device)
    constants = constants_of(indexer, operands, tile)
    assert operands.selected is not None
    batch, q_len, heads, _ = operands.q.shape
    entries = operands.selected.shape[-1]
    if q_len * entries >= 2**31:
        raise UnsupportedError(f"selection_loss: {q_len} lists of {entries} have more entries than an int32 counts")

    def launch(kernel: str, grid: tuple[int, int, int], threads: int = tile.threads) -> Launch:
        own = {**constants, "THREADS": threads}
        shared = shared_bytes(kernel, own) if kernel.startswith(tile.engine) else 0
        return Launch(kernel, known_constants(kernel, own), grid, threads, shared)

    int32 = np.dtype(np.int32)
    workspaces = [
        Workspace("listed_scores", (batch, q_len, entries), indexer.accumulation, ()),
        Workspace("row_losses", (batch, q_len), np.dtype(np.float64), ()),
    ]
    launches = [
        launch(f"{tile.engine}/selection_loss", (q_len, 1, batch)),
        launch("indexer/loss_sum", (1, 1, 1), ROW_THREADS),
    ]
    if gradients:
        launches += [
            launch(f"{tile.engine}/selection_loss_q", (q_len, -(-heads // tile.rows), batch)),
            launch("selected/count_entries", (CHUNKS, 1, batch), ROW_THREADS),
            launch("selected/scan_counts", (1, 1, batch), ROW_THREADS),
            launch("indexer/loss_fill", (CHUNKS, 1, batch), ROW_THREADS),
            launch("indexer/loss_k", (indexer.kv_len, 1, batch)),
        ]
        workspaces += [
            Workspace("inverse_ends", (batch * indexer.kv_len * CHUNKS,), int32, ()),
            Workspace("inverse_lists", (batch * q_len * entries,), int32, ()),
        ]
    return launches, tuple(workspaces)
