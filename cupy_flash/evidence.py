"""Evidence of this machine: verdicts of `cupy_flash check` and measurements of `cupy_flash tune`, which plans consult.

A record is a readable JSON file, `check.<engine>.json` or `tune.<digest>.json`, in a folder per kind of card:

    <kernel cache>/evidence/<card>/         what this user's checks and tunes have found
    $CUPY_FLASH_EVIDENCE_DIR/<card>/        read-only, shared: consulted where the user's own folder has no valid record

A record holds its card, driver, the hash of the kernel texts of each engine that it is about, and a checksum. One of
another card, driver or text, a damaged one, and one that others could have written is ignored, and `ignored` says why.
Each record is a file of its own, published by an atomic rename: processes that tune at once lose nothing.

Plans import this module, so that it imports what only reading and writing a record needs in its functions.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from . import environment
from .device import Device

FORMAT = 1  # version of the records; those of another version are ignored
FOLDER = "evidence"
SECONDS = "s"  # the unit of measurements on a GPU; a simulator's is INSTRUCTIONS
INSTRUCTIONS = "warp instructions"
CHECK_COMMAND, TUNE_COMMAND = "python -m cupy_flash check", "python -m cupy_flash tune"


class Check(NamedTuple):
    """The verdict of a check on one engine."""

    engine: str
    passed: bool
    reason: str  # the first case that did not pass, and why; "" if it has passed
    date: str
    path: Path


class Measured(NamedTuple):
    """The measurement of one tile, in the unit of its Tune."""

    engine: str
    tile: str  # its repr
    amount: float


class Tune(NamedTuple):
    """The measurements of the tiles for one bucket of shapes, the fastest first."""

    key: dict[str, Any]  # the bucket, see plan.tune_key
    unit: str
    measured: tuple[Measured, ...]
    default: tuple[str, str]  # engine and tile that were chosen without measurements
    complete: bool  # every candidate was measured
    date: str
    path: Path


Record = dict[str, Any]
ignored: dict[Path, str] = {}  # the records that this process has read and ignored, with the reason


def has_card(device: Device) -> bool:
    """Whether there may be evidence about a device: a GPU of this machine, or the simulator."""
    return device.card != ""


def check_of(engine: str, device: Device) -> Check | None:
    """The valid verdict on an engine for this kind of card; None without."""
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


def tune_of(key: Mapping[str, Any], device: Device) -> Tune | None:
    """The measurements for a bucket of shapes on this kind of card; None without."""
    if not has_card(device):
        return None
    for path, record in _records(device, tune_name(key)):
        tune = _tune(path, record)
        if tune is not None:
            return tune
    return None


def tunes(device: Device) -> list[Tune]:
    """All valid measurements for this kind of card; of two with one bucket the user's own."""
    found: dict[str, Tune] = {}
    for folder in _folders() if has_card(device) else ():
        names = sorted(path.name for path in (folder / card_name(device)).glob("tune.*.json"))
        for name in names:
            for path, record in _records(device, name):
                tune = _tune(path, record)
                if tune is not None:
                    found.setdefault(name, tune)
    return list(found.values())


def _tune(path: Path, record: Record) -> Tune | None:
    """The Tune of a record, without the measurements of engines of which the texts have changed since."""
    current = [engine for engine, text in record["texts"].items() if text == text_of(engine)]
    measured = sorted((Measured(*each) for each in record["measured"]), key=lambda each: each.amount)
    default = tuple(record["default"])
    # Without its default a record does not show that its fastest tile is faster than the prediction's.
    if len(current) < len(record["texts"]) or not any(each[:2] == default for each in measured):
        _ignore(path, "it is about other kernel texts" if len(current) < len(record["texts"]) else "it has no default")
        return None
    key, unit, complete = record["key"], record["unit"], record["complete"]
    return Tune(key, unit, tuple(measured), default, complete, record["date"], path)


def store_check(device: Device, engine: str, reason: str | None, cases: list[Record]) -> Path:
    """Store a verdict on an engine, with its cases; `reason` is None if all have passed."""
    record = {"passed": reason is None, "reason": reason or "", "texts": {engine: text_of(engine)}, "cases": cases}
    return _store(device, f"check.{engine}.json", record)[0]


def store_tune(
    device: Device,
    key: Mapping[str, Any],
    unit: str,
    measured: Iterable[Measured],
    default: tuple[str, str],
    complete: bool,
) -> Tune:
    """Store the measurements of a bucket of shapes, together with those that another process has stored meanwhile."""
    amounts = {each[:2]: each for each in measured}
    before = tune_of(key, device)
    if before is not None and before.default == default and before.path.parent == own_folder(device):
        amounts = {each[:2]: each for each in before.measured} | amounts
        complete = complete or before.complete
    ordered = sorted(amounts.values(), key=lambda each: each.amount)
    record = {
        "key": dict(key),
        "unit": unit,
        "default": list(default),
        "complete": complete,
        "measured": [list(each) for each in ordered],
        "texts": {engine: text_of(engine) for engine in dict.fromkeys(each.engine for each in ordered)},
    }
    path, date = _store(device, tune_name(key), record)
    return Tune(dict(key), unit, tuple(ordered), default, complete, date, path)


def tune_name(key: Mapping[str, Any]) -> str:
    """The file name of the measurements of a bucket."""
    return f"tune.{_digest(key)[:32]}.json"


def card_name(device: Device) -> str:
    """The folder name of a kind of card."""
    name = f"{device.card}-{device.arch}-{device.units}"
    return "".join(letter if letter.isalnum() or letter in "._-" else "-" for letter in name)


def own_folder(device: Device) -> Path:
    """The folder of this user's records about a kind of card; OSError without a home directory."""
    from . import cache

    return cache.location() / FOLDER / card_name(device)


@lru_cache(maxsize=16)
def text_of(engine: str) -> str:
    """The hash of an engine's kernel texts: the files of its folder, and those that all engines share.

    The kernels of mma_decode are in mma's folder.
    """
    from hashlib import sha256

    from . import source

    folder = source.kernel_folder()
    files = sorted((*folder.glob("*.cu*"), *(folder / engine.partition("_")[0]).glob("*.cu*")))
    text = sha256()
    for file in files:
        content = file.read_bytes()
        text.update(f"{file.relative_to(folder).as_posix()} {len(content)}\n".encode() + content)
    return text.hexdigest()


def files() -> list[Path]:
    """Every record of every card in the folders with evidence, valid or not."""
    return [path for folder in _folders() for path in sorted(folder.glob("*/*.json"))]


def summary() -> list[str]:
    """A line per folder with records: the verdicts of its checks, the number of tuned buckets, and what is ignored.

    Whether a record is about this machine's driver is known to plans alone, which say it in explain().
    """
    folders: dict[Path, list[str]] = {}
    for path in files():
        words = folders.setdefault(path.parent, [])
        try:
            record = _parsed(path.read_bytes())
        except OSError:
            record = None
        if record is None:
            words.append(f"{path.name} is damaged or of another version")
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
        others = [word for word in words if word != "tuned"]
        lines.append(f"{folder}: {', '.join([*others, *([f'{tuned} buckets tuned'] if tuned else [])])}")
    return lines


def forget() -> None:
    """Read the records again at the next plan, as another process would."""
    _check_of.cache_clear()
    ignored.clear()


@lru_cache(maxsize=16)
def suggest(device: Device, engines: tuple[str, ...]) -> None:
    """Log once per process which command proves the engines, if a GPU has no evidence about any of them."""
    if device.backend == "cuda" and not any(check_of(engine, device) for engine in engines):
        _log("no evidence about the engines on %s yet: %s finds out, once", device.card, CHECK_COMMAND)


def _folders() -> Iterator[Path]:
    """The folders with evidence, the user's own first."""
    from . import cache

    with suppress(OSError):  # there is no home directory
        yield cache.location() / FOLDER
    shared = environment.evidence_dir()
    if shared is not None:
        yield Path(shared)


def _records(device: Device, name: str) -> Iterator[tuple[Path, Record]]:
    """The valid records of this name about a device, the user's own first."""
    from . import cache

    for folder in _folders():
        path = folder / card_name(device) / name
        try:
            cache.check_safe(path.parent)
            content = cache.read_safe(path)
        except FileNotFoundError:
            continue
        except OSError as error:
            _ignore(path, str(error))
            continue
        record = _parsed(content)
        if record is None:
            _ignore(path, "it is damaged, or of another version")
        elif record["card"] != _card(device):
            _ignore(path, f"it is about another card or driver: {record['card']}")
        else:
            yield path, record


def _parsed(content: bytes) -> Record | None:
    """The record of a file; None if its checksum is wrong. A right one means that `_store` has written every field."""
    import json

    try:
        record = json.loads(content)
        checksum = record.pop("sha256")
    except (ValueError, AttributeError, TypeError, KeyError, RecursionError):
        return None
    return record if checksum == _digest(record) and record["format"] == FORMAT else None


def _store(device: Device, name: str, record: Record) -> tuple[Path, str]:
    """Publish a record atomically in the user's own folder, and return its path and date.

    Raises OSError if the folder cannot be written or is unsafe.
    """
    import json
    import tempfile

    from . import cache

    record = {"format": FORMAT, "card": _card(device), "date": time.strftime("%Y-%m-%d %H:%M:%S"), **record}
    record["sha256"] = _digest(record)
    cache.usable_folder()
    folder = own_folder(device)
    cache.make(folder)
    cache.check_safe(folder)
    mode = cache.writable_mode(folder)
    with tempfile.TemporaryDirectory(prefix=cache.PUBLISHING, dir=folder) as workplace:
        complete = Path(workplace) / name
        cache.write(complete, json.dumps(record, indent=1).encode(), mode & 0o644)
        os.replace(complete, folder / name)
    return folder / name, record["date"]


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

    logging.getLogger(__name__).info(message, *arguments)
