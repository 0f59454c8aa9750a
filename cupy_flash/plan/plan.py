"""Chooses the engine and tile of a problem: the measured fastest on this card, or the smallest predicted time.

Planning needs no GPU. A plan depends on the problem, the device and the evidence about the device, which a process
reads once.
"""

# No `from __future__ import annotations`, as in records.py.
from collections.abc import Collection, Iterable, Sequence
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ..device import Device
from ..engines import MODULES, Tile
from ..engines.launch import Launch, Workspace, require_grids
from ..problem.records import ARRAYS, FEATURES, Problem, UnsupportedError, is_given
from . import measurements
from .measurements import Measured, Tune
from .refusals import is_on_request, refusals

if TYPE_CHECKING:
    from ..problem.recorded_call import Json

Refused = tuple[tuple[str, tuple[str, ...]], ...]  # (engine, reasons) pairs

SIZES = ("queries", "keys", "rows")  # fields of tune_key on which kernels do not depend

# Buckets of lengths per octave. By the cost models, the best tile for a bucket's last length takes 0 to 2 % longer than
# the best tile for the exact length (mean per engine of random decodes, prefills and chunked prefills on sm_80, sm_90a
# and a CPU); with one bucket 0 to 6 %, with eight 0 to 1 %. A decode that grows to 131072 keys plans 64 times.
BUCKETS = 4


class Plan(NamedTuple):
    """How a problem runs: engine, tiles, threads and launches; `print(plan)` shows one line."""

    problem: Problem
    device: Device
    engine: str
    block_q: int
    block_kv: int
    threads: int  # threads on a CPU, threads per block on a GPU
    launches: tuple[Launch, ...]  # () on the CPU
    tile: Tile  # a record of the engine's own type
    # Predicted seconds for the bucket's last lengths, scaled by the card's measurements; core seconds on a CPU.
    cost: float
    refused: Refused  # the engines that were not chosen, with reasons
    measured: str = ""  # the measurement that decided, or "" if the prediction did

    @property
    def tiles(self) -> str:
        """The tiles in words: queries, keys and threads."""
        each = "" if self.device.backend == "cpu" else " a block"
        return f"{self.block_q} queries x {self.block_kv} keys, {self.threads} thread{'s' * (self.threads != 1)}{each}"

    def workspaces(self, q_rows: int, kv_rows: int) -> tuple[Workspace, ...]:
        """Return the workspaces of the kernels; q_rows and kv_rows count one sequence, or a whole packed batch."""
        return MODULES[self.engine].workspaces(self.problem, self.tile, q_rows, kv_rows)

    def __str__(self) -> str:
        return f"{self.problem} -> {self.engine} on {self.device}: tiles of {self.tiles}"

    def explain(self) -> str:
        """Return text with the problem, the plan and its reason, and the reasons against the other engines."""
        of = " of core time" if self.device.backend == "cpu" else ""
        queries, keys = (
            f"{first} to {last}" if first < last else f"{last}"
            for first, last in map(bucket_of, (self.problem.q_len, self.problem.kv_len))
        )
        lines = [
            f"problem    {self.problem}",
            f"engine     {self.engine} on {self.device}",
            f"tiles      {self.tiles}",
            f"bucket     {queries} queries x {keys} keys have this engine and these tiles",
            f"why        {self.measured}"
            if self.measured
            else f"why        the smallest predicted time of all legal tiles, for the bucket's last lengths: "
            f"{self.cost * 1e3:.3g} ms{of}",
        ]
        cache = self.problem.cache
        if cache is not None and cache.split_size is not None:
            without = plan(self.problem._replace(cache=cache._replace(split_size=None)), self.device)
            lines.append(
                f"bits       of a sequence, the same in every batch, by split_size; {without.cost * 1e3:.3g} ms without"
            )
        if MODULES[self.engine].MEASURED is None and not self.measured:
            lines.append("measured   not yet: the prediction alone, of this engine and of others, has chosen")
        lines += _refit_lines(self) + _evidence_lines(self)
        for launch in self.launches:
            grid = " x ".join(map(str, launch.grid))
            boxes = f", TMA boxes of {', '.join(box.operand for box in launch.boxes)}" if launch.boxes else ""
            cluster = dict(launch.constants).get("CLUSTER", 1)
            grid += f" in clusters of {cluster} blocks" if cluster != 1 else ""
            lines.append(
                f"launch     {launch.kernel}: grid {grid}, {launch.shared_bytes / 1024:.1f} KiB of shared memory{boxes}"
            )
        tune = _tune(self.problem, self.device)
        for engine, reasons in self.refused:
            # Reasons quote lengths, so they are computed for this problem instead of the bucket's.
            own = refusals(engine, self.problem, self.device, tune) or reasons
            lines += [f"not {engine:<6} {reason}" for reason in own]
        return "\n".join(lines)


class Choice(NamedTuple):
    """The engine and the tile that all problems of a bucket share."""

    engine: str
    tile: Tile
    cost: float
    refused: Refused
    measured: str = ""


@lru_cache(maxsize=1024)
def plan(problem: Problem, device: Device, tile: Tile | None = None) -> Plan:
    """Return the plan of a problem on a device; UnsupportedError with every engine's reasons if none serves it.

    Engine, tile and threads are chosen for the problem's bucket, launches and workspaces for its exact lengths. `tile`
    is used, if given, instead of the best tile of the chosen engine.
    """
    last = last_of_bucket(problem)
    choice = _choice(last, device)
    if choice is None:
        lines = [f"no engine of this version serves this problem: {problem}"]
        lines += [f"  - {engine}: {reason}" for engine in MODULES for reason in refusals(engine, problem, device)]
        raise UnsupportedError("\n".join(lines))
    if tile is not None:
        cost = MODULES[choice.engine].seconds(last, _pairs(last), device, tile)
        choice = choice._replace(tile=tile, cost=cost, measured="")
    return _planned(problem, device, choice)


def candidates(chosen: Plan, engine: str) -> list[tuple[Tile, Plan]]:
    """Return the tiles that a tune may choose for the problem of a plan, and the plan with each, cheapest first."""
    problem, device = chosen.problem, chosen.device
    return [
        (tile, _planned(problem, device, Choice(engine, tile, cost, chosen.refused)))
        for cost, tile in _ranked(engine, last_of_bucket(problem), device, MODULES[engine].choices(problem, device))
    ]


def forms(chosen: Plan) -> dict[str, Plan]:
    """Return {name: plan} for the forms of this plan's kernel (producer warp, clusters) that only a tune chooses."""
    tiles = MODULES[chosen.engine].forms(chosen.problem, chosen.device, chosen.tile)
    plans = dict(candidates(chosen, chosen.engine))
    return {form: min((plans[tile] for tile in of_form), key=lambda x: x.cost) for form, of_form in tiles.items()}


def bucket_of(length: int) -> tuple[int, int]:
    """Return the first and the last length of the bucket of `length`; an octave has BUCKETS buckets of equal size."""
    size = max((1 << max(length - 1, 0).bit_length()) // (2 * BUCKETS), 1)
    last = -(-length // size) * size
    return last - size + 1, last


def last_of_bucket(problem: Problem) -> Problem:
    """Return the problem with the last lengths of its bucket, for which engine and tile are chosen.

    A KV cache grows by one key per decode step. Planning for each length would take longer than the step, and reusing
    the plan of an earlier length would make a result depend on previous calls.
    """

    def last(length: int) -> int:
        return bucket_of(length)[1]

    fields: dict[str, Any] = {"q_len": last(problem.q_len), "kv_len": last(problem.kv_len)}
    for feature in ARRAYS:
        shape = getattr(problem, feature.field)
        if feature.broadcast and shape is not None:  # a shape that broadcasts to (B, Hq, Sq, Sk)
            fields[feature.field] = (*shape[:-2], *map(last, shape[-2:]))
    return problem._replace(**fields)


def tune_key(problem: Problem) -> "dict[str, Json]":
    """Return the bucket of shapes and options to which a measurement applies, as a JSON record.

    Lengths, B * Hq and windows enter by their buckets; numbers and arrays among the options by whether they are given.
    """
    mask = problem.mask
    given = [feature.field for feature in FEATURES if feature.constant and is_given(problem, feature)]
    facts = [name for name in ("deterministic", "shard", "shared_kv", "statistics") if getattr(problem, name)]
    facts += ["bias_gradient"] * (problem.backward and "bias" in problem.differentiated)
    return {
        "queries": bucket_of(problem.q_len)[1],
        "keys": bucket_of(problem.kv_len)[1],
        "rows": bucket_of(problem.batch * problem.heads)[1],
        "step": _step(problem),
        "dtype": problem.dtype.name,
        "head_dim": problem.head_dim,
        "head_dim_v": problem.head_dim_v,
        "group": problem.group,
        "packed": problem.layout == "thd",
        "mask": [None if side is None else bucket_of(side)[1] if side > 0 else side for side in mask[:2]],
        "top_left": mask.top_left and mask.edges > 0,
        "options": sorted(given + facts),
        "mods": problem.mods,
        "cache": "" if problem.cache is None else str(problem.cache._replace(split_size=None, blocks=0)),
    }


def _step(problem: Problem) -> str:
    """Return the step that a problem computes; each step has kernels, and so measurements, of its own."""
    return problem.weights or problem.derivative or ("backward" if problem.backward else "forward")


def launches_at_any_length(problem: Problem, device: Device) -> tuple[Launch, ...]:
    """Return a launch of every kernel that plans of this problem may have, for any batch, heads and lengths.

    The cost ranking of tiles with the same `Engine.alike` does not depend on the length, so one tile per key suffices.
    """
    plan(problem, device)  # raises if no engine serves the problem
    launches: list[Launch] = []
    for engine in _defaults(problem, [engine for engine in MODULES if not refusals(engine, problem, device)]):
        module = MODULES[engine]
        best: dict[object, Tile] = {}
        for _, tile in _by_cost(engine, problem, device):
            best.setdefault(module.alike(tile), tile)
        for tile in best.values():
            launches += module.launches(problem, device, tile)
    key = tune_key(problem)
    for tune in measurements.tunes(device):
        if {**tune.key, **dict.fromkeys(SIZES)} == {**key, **dict.fromkeys(SIZES)}:
            serving = [engine for engine in MODULES if not refusals(engine, problem, device, tune)]
            fastest = _fastest(problem, device, tune, serving)
            if fastest is not None:
                launches += MODULES[fastest[0].engine].launches(problem, device, fastest[1])
    return tuple(launches)


@lru_cache(maxsize=1024)
def _choice(problem: Problem, device: Device, measure: bool = True) -> Choice | None:
    """Return the engine and tile that were measured to be fastest; without a measurement, those of smallest cost.

    Return None if no engine serves it. Without `measure`, ignore measurements.
    """
    measurements.suggest(device, tuple(engine for engine in MODULES if "cuda" in MODULES[engine].BACKENDS))
    tune = _tune(problem, device) if measure else None
    refused = {engine: reasons for engine in MODULES if (reasons := refusals(engine, problem, device, tune))}
    best = {engine: _by_cost(engine, problem, device)[0] for engine in MODULES if engine not in refused}
    if not best:
        return None
    scales = scales_of(problem, device, best) if measure else {}
    best = {engine: (cost * scales.get(engine, 1.0), tile) for engine, (cost, tile) in best.items()}
    fastest = None if tune is None else _fastest(problem, device, tune, best)
    if tune is None or fastest is None:
        chosen = min(_defaults(problem, best), key=lambda engine: best[engine][0])
        (cost, tile), words = best[chosen], ""
    else:
        measured, tile = fastest
        chosen, words = measured.engine, _comparison(measured, tune, best)
        cost = MODULES[chosen].seconds(problem, _pairs(problem), device, tile) * scales.get(chosen, 1.0)
    advantage = MODULES[chosen].advantage(problem)
    but = f", but {advantage}" if advantage else ""
    for engine, (seconds, _) in best.items():
        if engine != chosen:
            refused[engine] = (f"its smallest predicted time is {seconds * 1e3:.3g} ms{but}",)
    return Choice(chosen, tile, cost, tuple(refused.items()), words)


def _defaults(problem: Problem, engines: Collection[str]) -> list[str]:
    """Return the engines among which predictions choose: those with an advantage, else all but those on request."""
    ahead = [engine for engine in engines if MODULES[engine].advantage(problem)]
    return ahead or [engine for engine in engines if not is_on_request(engine, problem)] or list(engines)


def forget() -> None:
    """Drop cached plans and evidence, so that later problems are planned with the evidence stored by then."""
    measurements.forget()
    plan.cache_clear()
    _choice.cache_clear()


def predicted(problem: Problem, device: Device) -> Plan:
    """Return the plan with the smallest predicted time of the default engines, ignoring measurements."""
    choice = _choice(last_of_bucket(problem), device, measure=False)
    if choice is None:
        return plan(problem, device)  # raises with every engine's reasons
    return _planned(problem, device, choice)


def _tune(problem: Problem, device: Device) -> Tune | None:
    """Return the measurements for a problem; None with split_size, whose tile must not depend on the machine."""
    return None if _is_split(problem) else measurements.tune_of(tune_key(problem), device)


def scales_of(problem: Problem, device: Device, engines: Iterable[str]) -> dict[str, float]:
    """Return {engine: factor that scales its predictions to this card}; {} without measurements on the card.

    An engine without measurements gets the geometric mean of the others, as an estimate of the card's speed. Calls with
    split_size have no factors, because their bits must not depend on measurements.
    """
    fits = {} if _is_split(problem) else measurements.fits(device, _step(problem))
    if not fits:
        return {}
    mean = prod(fit.scale ** (1 / len(fits)) for fit in fits.values())
    return {engine: fits[engine].scale if engine in fits else mean for engine in engines}


def _is_split(problem: Problem) -> bool:
    return problem.cache is not None and problem.cache.split_size is not None


def _fastest(problem: Problem, device: Device, tune: Tune, engines: Collection[str]) -> tuple[Measured, Tile] | None:
    """Return the fastest measurement of a tile that is legal for the problem, and the tile."""
    tiles: dict[str, dict[str, Tile]] = {}
    for measured in tune.measured:
        if measured.engine not in engines:
            continue
        if measured.engine not in tiles:
            legal = MODULES[measured.engine].choices(problem, device)
            tiles[measured.engine] = {repr(tile): tile for tile in legal}
        tile = tiles[measured.engine].get(measured.tile)
        if tile is not None:
            return measured, tile
    return None


def _comparison(measured: Measured, tune: Tune, engines: Collection[str]) -> str:
    """Return explain()'s reason for a measured tile."""
    amounts = {each[:2]: each.amount for each in tune.measured}
    count = sum(each.engine in engines for each in tune.measured)
    default = amounts[tune.default]
    beaten = "" if measured[:2] == tune.default else f", the predicted best {amount_text(default, tune.unit)}"
    return (
        f"measured the fastest of {count} tile{'s' * (count != 1)} in this bucket, "
        f"{amount_text(measured.amount, tune.unit)}{beaten} ({tune.path}, {tune.date})"
    )


def amount_text(amount: float, unit: str) -> str:
    """Return a measurement with its unit, seconds as milliseconds."""
    return f"{amount * 1e3:.4g} ms" if unit == measurements.SECONDS else f"{amount:.4g} {unit}"


def _refit_lines(chosen: Plan) -> list[str]:
    """Return explain()'s line about the factors that scale its predicted times."""
    serving = [chosen.engine, *(engine for engine, _ in chosen.refused if engine in MODULES)]
    fits = measurements.fits(chosen.device, _step(chosen.problem))
    scales = scales_of(chosen.problem, chosen.device, serving)
    texts = [
        f"{engine} x {fits[engine].scale:.3g} ({fits[engine].buckets} bucket{'s' * (fits[engine].buckets != 1)})"
        for engine in serving
        if scales and engine in fits
    ]
    return [f"refitted   to measurements on {chosen.device.card}: {', '.join(texts)}"] if texts else []


def _evidence_lines(chosen: Plan) -> list[str]:
    """Return explain()'s lines about checks and about records that were ignored."""
    if not measurements.has_card(chosen.device):
        return []
    check, where = measurements.check_of(chosen.engine, chosen.device), f"{chosen.device.card} ({chosen.device.arch})"
    if check is None:
        lines = [f"checked    {chosen.engine} not yet on {where}: {measurements.CHECK_COMMAND}"]
    else:
        verdict = "passed" if check.passed else f"failed, {check.reason},"
        lines = [f"checked    {chosen.engine} {verdict} on {where} at {check.date}: {check.path}"]
    return lines + _ignored_lines()


def _ignored_lines() -> list[str]:
    """Return explain()'s lines about ignored records, one per folder and reason."""
    paths: dict[tuple[Path, str], list[Path]] = {}
    for path, why in sorted(measurements.ignored.items()):
        paths.setdefault((path.parent, why), []).append(path)
    return [
        f"ignored    {alike[0] if len(alike) == 1 else f'{len(alike)} records in {folder}'}: {why}"
        for (folder, why), alike in paths.items()
    ]


def _planned(problem: Problem, device: Device, choice: Choice) -> Plan:
    engine, tile, cost, refused, measured = choice
    module = MODULES[engine]
    return Plan(
        problem,
        device,
        engine,
        tile.block_q,
        tile.block_kv,
        module.threads(device, tile, cost),
        require_grids(module.launches(problem, device, tile)),
        tile,
        cost,
        refused,
        measured,
    )


def _pairs(problem: Problem) -> int:
    """Return the number of visible (query, key) pairs of one sequence and head."""
    return problem.mask.band(problem.q_len, problem.kv_len).pairs


def _by_cost(engine: str, problem: Problem, device: Device) -> list[tuple[float, Tile]]:
    """Return the (cost, tile) pairs that a prediction compares, cheapest first."""
    return _ranked(engine, problem, device, MODULES[engine].tiles(problem, device))


def _ranked(engine: str, problem: Problem, device: Device, tiles: Sequence[Tile]) -> list[tuple[float, Tile]]:
    """Return (cost, tile) pairs of an engine's tiles, cheapest first."""
    pairs = _pairs(problem)
    costs = [(MODULES[engine].seconds(problem, pairs, device, tile), tile) for tile in tiles]
    # Sort by (cost, block_q, block_kv) only: other fields may be None, which does not compare. Ties keep their order.
    return sorted(costs, key=lambda pair: (pair[0], pair[1].block_q, pair[1].block_kv))
