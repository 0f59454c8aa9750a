"""Stored evidence that plans consult: verdicts of `cupy_flash check` and measurements of `cupy_flash tune`.

A record is a readable JSON file, `check.<engine>.json` or `tune.<digest>.json`, in a folder per kind of card:

    <kernel cache>/evidence/<card>/         records of this user's checks and tunes
    $CUPY_FLASH_EVIDENCE_DIR/<card>/        shared, read-only: consulted if the user's own folder has no valid record

A record holds its card, its driver, the hash of the kernel texts of its engines, and a checksum. A record is ignored if
the card, driver or texts differ, if it is damaged, or if other users could have written it; `ignored` has the reason.
Failed verdicts of format 2 are ignored too, because a missing dependency or an interrupt could be their reason.
Each record is a file of its own, published by an atomic rename. A lock covers the merge of a tune's measurements with
the stored ones, so that processes and threads that tune at the same time lose nothing.

Plans import this module, so modules that only reading or writing needs are imported inside functions.
"""

# No `from __future__ import annotations`, as in records.py.
import os
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from .. import environment
from ..device import Device
from ..engines import MODULES

if TYPE_CHECKING:
    from ..problem.recorded_call import Json

FORMAT = 3  # version of the records
OLDER = (2,)  # versions whose records are valid, except failed verdicts; records of other versions are ignored
RECORD_BYTES = 1 << 16  # more than any record has; writing them first finds a full disk before the work
FOLDER = "evidence"
SECONDS = "s"  # the unit of measurements on a GPU; on a simulator it is INSTRUCTIONS
INSTRUCTIONS = "warp instructions"
CHECK_COMMAND, TUNE_COMMAND = "python -m cupy_flash check", "python -m cupy_flash tune"


class Check(NamedTuple):
    """The verdict of a check on one engine."""

    engine: str
    passed: bool
    reason: str  # the first case that did not pass, with its reason; "" if all passed
    date: str
    path: Path


class Measured(NamedTuple):
    """The measurement of one tile, in the unit of its Tune."""

    engine: str
    tile: str  # the repr of the tile
    amount: float


class Tune(NamedTuple):
    """The measurements of the tiles for one bucket of shapes, the fastest first."""

    key: "dict[str, Json]"  # the bucket, see plan.tune_key
    unit: str
    measured: tuple[Measured, ...]
    default: tuple[str, str]  # the engine and tile that would be chosen without measurements
    complete: bool  # every candidate was measured
    predicted: dict[str, float]  # {engine: smallest predicted seconds}; {} if they are from another cost model
    date: str
    path: Path


class Fit(NamedTuple):
    """The ratio of an engine's measured to its predicted times on this kind of card."""

    scale: float  # median over buckets of fastest measurement / smallest prediction
    buckets: int


Record: TypeAlias = dict[str, Any]  # a JSON record, whose fields `_wrong_fields` checks
LOCK = "lock"  # the file in a card's folder that a process locks while it merges and stores
ignored: dict[Path, str] = {}  # {record that this process has ignored: reason}
generation = 0  # how often `forget` was called: what was decided by evidence of an older generation is out of date


_storing = threading.Lock()  # flock excludes other processes, this lock other threads


def _renew_lock() -> None:
    """Replace the lock in a forked child, where the thread that may have held it does not exist."""
    global _storing
    _storing = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_lock)


def has_card(device: Device) -> bool:
    """Return whether a device can have evidence: it is a GPU of this machine, or the simulator."""
    return device.card != ""


def check_of(engine: str, device: Device) -> Check | None:
    """Return the valid verdict on an engine for this kind of card, or None."""
    return _check_of(engine, device) if has_card(device) else None


@lru_cache(maxsize=64)
def _check_of(engine: str, device: Device) -> Check | None:
    for path, record in _records(device, f"check.{engine}.json"):
        texts = record["texts"]
        if texts.get(engine) != text_of(engine):
            _ignore(path, "it is about other kernel texts")
            continue
        return Check(engine, record["passed"], record["reason"], record["date"], path)
    return None


def tune_of(key: "Mapping[str, Json]", device: Device) -> Tune | None:
    """Return the measurements for a bucket of shapes on this kind of card, or None."""
    if not has_card(device):
        return None
    for path, record in _records(device, tune_name(key)):
        tune = _tune(path, record)
        if tune is not None:
            return tune
    return None


def tunes(device: Device) -> list[Tune]:
    """Return all valid measurements for this kind of card; the user's own take precedence over shared ones."""
    found: dict[str, Tune] = {}
    for *_, root in _folders() if has_card(device) else ():
        names = sorted(path.name for path in (root / card_name(device)).glob("tune.*.json"))
        for name in names:
            for path, record in _records(device, name):
                tune = _tune(path, record)
                if tune is not None:
                    found.setdefault(name, tune)
    return list(found.values())


def _tune(path: Path, record: Record) -> Tune | None:
    """Return the Tune of a record; None, with the reason in `ignored`, if kernels differ or its default is missing."""
    current = [engine for engine, text in record["texts"].items() if text == text_of(engine)]
    measured = sorted((Measured(*each) for each in record["measured"]), key=lambda each: each.amount)
    default = tuple(record["default"])
    # A record without the default tile does not show whether its fastest tile is faster than the default.
    if len(current) < len(record["texts"]) or not any(each[:2] == default for each in measured):
        _ignore(path, "it is about other kernel texts" if len(current) < len(record["texts"]) else "it has no default")
        return None
    predicted = record["predicted"] if record["costs"] == costs_text() else {}
    key, unit, complete = record["key"], record["unit"], record["complete"]
    return Tune(key, unit, tuple(measured), default, complete, predicted, record["date"], path)


def fits(device: Device, step: str) -> dict[str, Fit]:
    """Return {engine: Fit} from the complete measurements, in seconds, of a step such as "forward"."""
    return dict(_fits(device, step)) if has_card(device) else {}


@lru_cache(maxsize=64)
def _fits(device: Device, step: str) -> tuple[tuple[str, Fit], ...]:
    from statistics import median

    ratios: dict[str, list[float]] = {}
    for tune in tunes(device):
        if tune.unit != SECONDS or not tune.complete or tune.key.get("step") != step:
            continue
        if not tune.predicted:
            _ignore(tune.path, "its predictions alone: they are of another cost model")
        fastest = {each.engine: each.amount for each in reversed(tune.measured)}
        for engine in fastest.keys() & tune.predicted.keys():
            ratios.setdefault(engine, []).append(fastest[engine] / tune.predicted[engine])
    return tuple((engine, Fit(median(ratios[engine]), len(ratios[engine]))) for engine in sorted(ratios))


def store_checks(device: Device, verdicts: Mapping[str, tuple[str | None, list[Record]]]) -> dict[str, Path]:
    """Store verdicts, {engine: (reason, cases)}, and return the paths; the reason is None if all cases have passed.

    Raises OSError, and stores none, if one cannot be written.
    """
    records = {
        f"check.{engine}.json": {
            "passed": reason is None, "reason": reason or "", "texts": {engine: text_of(engine)}, "cases": cases
        }
        for engine, (reason, cases) in verdicts.items()
    }  # fmt: skip
    folder, _ = _store(device, records)
    return {engine: folder / name for engine, name in zip(verdicts, records, strict=True)}


def store_tune(
    device: Device,
    key: "Mapping[str, Json]",
    unit: str,
    measured: Iterable[Measured],
    default: tuple[str, str],
    predicted: Mapping[str, float],
    complete: bool,
) -> Tune:
    """Store the measurements of a bucket of shapes, merged with those that another process has stored meanwhile.

    `predicted` holds the smallest predicted seconds of each engine, with which `fits` compares the measurements.
    """
    folder, name = _prepared(device), tune_name(key)
    amounts = {each[:2]: each for each in measured}
    with _locked(folder):
        before = tune_of(key, device)
        if before is not None and before.default == default and before.path.parent == folder:
            amounts = {each[:2]: each for each in before.measured} | amounts
            complete = complete or before.complete
        ordered = sorted(amounts.values(), key=lambda each: each.amount)
        record = {
            "key": dict(key),
            "unit": unit,
            "default": list(default),
            "predicted": dict(predicted),
            "costs": costs_text(),
            "complete": complete,
            "measured": [list(each) for each in ordered],
            "texts": {engine: text_of(engine) for engine in dict.fromkeys(each.engine for each in ordered)},
        }
        _, date = _store(device, {name: record})
    return Tune(dict(key), unit, tuple(ordered), default, complete, dict(predicted), date, folder / name)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the lock that excludes other threads and processes from storing in this folder."""
    with _storing, open(folder / LOCK, "ab") as file:
        with suppress(ImportError, OSError):  # Windows has no fcntl, and some file systems have no locks
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def tune_name(key: "Mapping[str, Json]") -> str:
    """Return the file name of the measurements of a bucket."""
    return f"tune.{_digest(key)[:32]}.json"


def card_name(device: Device) -> str:
    """Return the folder name of a kind of card."""
    name = f"{device.card}-{device.arch}-{device.units}"
    return "".join(letter if letter.isalnum() or letter in "._-" else "-" for letter in name)


def own_folder(device: Device) -> Path:
    """Return the folder of this user's records about a kind of card; OSError without a home directory."""
    from ..jit import kernel_cache

    return kernel_cache.location() / FOLDER / card_name(device)


@lru_cache(maxsize=16)
def text_of(engine: str) -> str:
    """Return the hash of an engine's kernel texts: all files but those in the folders of other engines.

    It is "" for an engine that only another version has.
    """
    if engine not in MODULES:
        return ""
    from hashlib import sha256

    from ..jit import source

    folder = source.kernel_folder()
    of_others = {module.KERNELS for module in MODULES.values()} - {MODULES[engine].KERNELS}
    files = sorted(file for file in folder.rglob("*.cu*") if file.parent.name not in of_others)
    text = sha256()
    for file in files:
        content = file.read_bytes()
        text.update(f"{file.relative_to(folder).as_posix()} {len(content)}\n".encode() + content)
    return text.hexdigest()


@lru_cache(maxsize=1)
def costs_text() -> str:
    """Return the hash of the engines' modules, which hold the cost models."""
    from hashlib import sha256

    files = sorted((Path(__file__).parents[1] / "engines").rglob("*.py"))
    return sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def stored() -> Iterator[tuple[Path, Record | str]]:
    """Yield every file with evidence, of all cards, and its record or the reason why it is ignored.

    This does not check whether a record has this machine's driver and kernel texts; explain() reports that.
    """
    for folders in _folders():
        for path in sorted(folders[-1].glob("*/*.json")):
            try:
                yield path, _read(folders, path)
            except (OSError, ValueError) as error:
                yield path, str(error)


def summary() -> list[str]:
    """Return a line per folder with records: verdicts of checks, number of tuned buckets, and ignored records."""
    folders: dict[Path, list[str]] = {}
    for path, record in stored():
        words = folders.setdefault(path.parent, [])
        if isinstance(record, str):
            words.append(f"{path.name} is ignored: {record}")
        elif any(text != text_of(engine) for engine, text in record["texts"].items()):
            words.append(f"{path.name} is about other kernel texts")
        elif "passed" in record:
            (engine,) = record["texts"]
            words.append(f"{engine} {'passed' if record['passed'] else 'failed'} {record['date']}")
        else:
            words.append("tuned")
    lines = []
    for folder, words in folders.items():
        tuned = words.count("tuned")
        facts = [word for word in words if word != "tuned"]
        facts += [f"{tuned} bucket{'s' * (tuned != 1)} tuned"] if tuned else []
        lines.append(f"{folder}: {', '.join(facts)}")
    return lines


def forget() -> None:
    """Drop the records that are cached in this process, so that the next plan reads the files again."""
    global generation
    generation += 1
    _check_of.cache_clear()
    _fits.cache_clear()
    ignored.clear()


@lru_cache(maxsize=16)
def suggest(device: Device, engines: tuple[str, ...]) -> None:
    """Log once per process which command checks the engines, if a GPU has no evidence about any of them."""
    if device.backend == "cuda" and not any(check_of(engine, device) for engine in engines):
        _log("no evidence about the engines on %s yet: %s finds out, once", device.card, CHECK_COMMAND)


def _folders() -> Iterator[tuple[Path, ...]]:
    """Yield tuples (..., evidence folder), whose folders must not be writable by other users.

    The user's own evidence folder comes first, then the shared one.
    """
    from ..jit import kernel_cache

    with suppress(OSError):  # without a home directory
        yield kernel_cache.location(), kernel_cache.location() / FOLDER
    shared = environment.evidence_dir()
    if shared is not None:
        yield (Path(os.path.realpath(shared)),)


def _records(device: Device, name: str) -> Iterator[tuple[Path, Record]]:
    """Yield the valid records of this name about a device, the user's own first."""
    for folders in _folders():
        path = folders[-1] / card_name(device) / name
        if not os.path.lexists(path):
            continue
        try:
            record = _read(folders, path)
        except FileNotFoundError:  # another process has removed the file
            continue
        except (OSError, ValueError) as error:
            _ignore(path, str(error))
            continue
        if record["card"] != _card(device):
            _ignore(path, f"it is about another card or driver: {record['card']}")
        else:
            yield path, record


def _read(folders: Iterable[Path], path: Path) -> Record:
    """Return the record in a file of a card's folder.

    Raises OSError if it is not a regular file or other users could have written it, ValueError if it is not a record.
    """
    import json

    from ..jit import kernel_cache

    for folder in (*folders, path.parent):
        kernel_cache.check_safe(folder)
    content = kernel_cache.read_safe(path)
    try:
        record = json.loads(content)
        is_whole = record.pop("sha256") == _digest(record) and record["format"] in (FORMAT, *OLDER)
    except (ValueError, AttributeError, TypeError, KeyError, RecursionError):
        is_whole = False
    if not is_whole:
        raise ValueError("it is damaged, or of another version")
    wrong = _wrong_fields(path.name, record)
    if wrong:
        raise ValueError(f"its fields {', '.join(wrong)} are missing or wrong")
    if record["format"] in OLDER and not record.get("passed", True):
        raise ValueError("it is a failed verdict of an older version, whose reason may not be the kernels")
    return dict(record)


def _wrong_fields(name: str, record: Record) -> list[str]:
    """Return the fields that are missing or have a type or value that `_store` never writes in a file of this name."""
    texts: Any = record.get("texts")
    kind = name.partition(".")[0]
    engines = set(texts) if isinstance(texts, dict) else set()
    valid = {
        "card": isinstance(record.get("card"), dict),
        "date": isinstance(record.get("date"), str),
        "texts": bool(engines) and all(each.isidentifier() and isinstance(texts[each], str) for each in engines),
    }
    if kind == "check":
        cases = record.get("cases")
        valid["texts"] = valid["texts"] and name == f"check.{''.join(engines)}.json" and len(engines) == 1
        valid["passed"] = isinstance(record.get("passed"), bool)
        valid["reason"] = isinstance(record.get("reason"), str)
        valid["cases"] = isinstance(cases, list) and all(isinstance(case, dict) for case in cases)
    else:
        measured, default, key = (record.get(field) for field in ("measured", "default", "key"))
        predicted: object = record.get("predicted")
        valid["key"] = isinstance(key, dict) and tune_name(key) == name
        valid["predicted"] = isinstance(predicted, dict) and all(map(_is_amount, predicted.values()))
        valid["costs"] = isinstance(record.get("costs"), str)
        valid["unit"] = record.get("unit") in (SECONDS, INSTRUCTIONS)
        valid["default"] = _are_texts(default)
        valid["complete"] = isinstance(record.get("complete"), bool)
        valid["measured"] = isinstance(measured, list) and all(_is_measured(each, engines) for each in measured)
    return [field for field, is_valid in valid.items() if not is_valid]


def _is_measured(value: "Json", engines: set[str]) -> bool:
    """Return whether a JSON value is [engine, tile, amount] with one of the engines and a finite amount above 0."""
    if not isinstance(value, list) or len(value) != 3 or not _are_texts(value[:2]) or value[0] not in engines:
        return False
    return _is_amount(value[2])


def _is_amount(value: Any) -> bool:
    return type(value) in (int, float) and 0 < value < sys.float_info.max


def _are_texts(value: "Json") -> bool:
    return isinstance(value, list) and len(value) == 2 and all(isinstance(each, str) for each in value)


def require_storable(device: Device) -> None:
    """Raise OSError with advice if records about a device cannot be stored; call it before minutes of measuring."""
    from ..jit import kernel_cache

    with _workplace(device) as (_, workplace):
        kernel_cache.write(workplace / "space", bytes(RECORD_BYTES), 0o600)


def _prepared(device: Device) -> Path:
    """Return this user's folder for a kind of card, created if missing; OSError if it is unsafe or not writable."""
    from ..jit import kernel_cache

    kernel_cache.usable_folder()
    folder = own_folder(device)
    kernel_cache.make(folder)
    for each in (folder.parent, folder):
        kernel_cache.check_safe(each)
    kernel_cache.writable_mode(folder)
    return folder


def _store(device: Device, records: Mapping[str, Record]) -> tuple[Path, str]:
    """Publish records, {name: record}, in the user's own folder, and return the folder and their date.

    A record is published atomically, and only after all of them are written. Raises OSError with advice if the folder
    cannot be written or is unsafe.
    """
    import json

    from ..jit import kernel_cache

    date = time.strftime("%Y-%m-%d %H:%M:%S")
    with _workplace(device) as (folder, workplace):
        mode = kernel_cache.writable_mode(folder)
        for name, fields in records.items():
            record = {"format": FORMAT, "card": _card(device), "date": date, **fields}
            record["sha256"] = _digest(record)
            kernel_cache.write(workplace / name, json.dumps(record, indent=1).encode(), mode & 0o644)
        for name in records:
            os.replace(workplace / name, folder / name)
    return folder, date


@contextmanager
def _workplace(device: Device) -> Iterator[tuple[Path, Path]]:
    """Yield this user's folder for a kind of card and a temporary folder in it; add advice to an OSError."""
    import tempfile

    from ..jit import kernel_cache

    try:
        folder = _prepared(device)
        with tempfile.TemporaryDirectory(prefix=kernel_cache.PUBLISHING, dir=folder) as workplace:
            yield folder, Path(workplace)
    except OSError as error:
        raise OSError(
            f"the results cannot be stored: {error}. Set CUPY_FLASH_CACHE_DIR to a folder on a disk with space that "
            "you own and that others cannot write to"
        ) from error


def _card(device: Device) -> Record:
    return {"name": device.card, "arch": device.arch, "multiprocessors": device.units, "driver": device.driver}


def _digest(record: Mapping[str, Any]) -> str:
    import json
    from hashlib import sha256

    return sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()


def _ignore(path: Path, why: str) -> None:
    if ignored.get(path) != why:
        ignored[path] = why
        _log("ignored %s: %s", path, why)


def _log(message: str, *arguments: object) -> None:
    import logging

    logging.getLogger("cupy_flash.evidence").info(message, *arguments)
