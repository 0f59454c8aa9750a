"""Cache of compiled kernels, in memory and in a human-readable folder.

An entry is a folder `<kernel>.<digest>` with source.cu, kernel.ptx or kernel.cubin, log.txt, and entry.json with flags,
compiler and checksums. The digest covers text, flags and compiler identity, so entries never go stale. A note beside
the entries records the compiler's identity; it is valid as long as the file of the library is unchanged. Entries are
published by an atomic rename, without locks: processes that compile the same kernel concurrently only duplicate work.
An entry that fails its checksum is recompiled. A cubin is executable code, so the folder must belong to the user or
root and must not be writable by others; otherwise, or if it cannot be written, kernels are kept in memory only.
"""

from __future__ import annotations

import errno
import hashlib
import itertools
import json
import logging
import os
import re
import shutil
import stat
import tempfile
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path

from .. import environment
from . import nvrtc
from .nvrtc import Compiled, CompileError

FORMAT = 1  # version of the entry format; entries of another version are replaced
FILES = ("source.cu", "kernel.ptx", "kernel.cubin", "log.txt", "entry.json")
PUBLISHING = "publishing-"  # name prefix of folders of incomplete entries
ABANDONED = 24 * 60 * 60  # age in seconds after which an incomplete entry is removed
OURS = re.compile(rf"[A-Za-z_][\w.]*\.[0-9a-f]{{32}}|{PUBLISHING}\w+")

logger = logging.getLogger("cupy_flash.cache")
failures = itertools.count()  # failed uses of the folder in this process


@lru_cache(maxsize=256)
def compiled(text: str, name: str, target: str) -> Compiled:
    """Return `nvrtc.compile(text, name, target)`; a text that was compiled before comes from the cache.

    The text of a failed compilation is stored too; the CompileError names the file.
    """
    try:
        folder = usable_folder()
    except OSError as error:
        warn_once(error)
        _log(name, target, "the memory of this process")
        return nvrtc.compile(text, name, target)
    noted = noted_compiler(folder)
    if noted is not None and (hit := Entry(folder, text, name, target, noted).load()) is not None:
        return hit
    entry = Entry(folder, text, name, target, nvrtc.identity())
    if noted != entry.compiler and (hit := entry.load()) is not None:
        note_compiler(folder)
        return hit
    _log(name, target, folder)
    try:
        result = nvrtc.compile(text, name, target)
    except CompileError as error:
        saved = store(entry, {"log.txt": error.log.encode()})
        raise type(error)(name, target, error.log, entry.path / "source.cu" if saved else None) from None
    files = {entry.payload: result.code, "log.txt": result.log.encode(), "entry.json": entry.record(result)}
    if not store(entry, files):
        return result
    if noted != entry.compiler:
        note_compiler(folder)
    return replace(result, path=entry.path / entry.payload)


def _log(name: str, target: str, place: Path | str) -> None:
    """Log why the first call with a kernel takes seconds."""
    logger.info("compiling %s for %s, which takes seconds; later calls load it from %s", name, target, place)


@dataclass(frozen=True)
class Entry:
    """Cache key of one compiled text, and its path in a cache folder."""

    folder: Path
    text: str
    name: str
    target: str
    compiler: str  # nvrtc.identity()
    path: Path = field(init=False)

    def __post_init__(self) -> None:
        key = "\0".join((self.compiler, *nvrtc.flags(self.target), self.text))
        kernel = re.sub(r"\W", ".", self.name)
        path = self.folder / f"{kernel}.{hashlib.sha256(key.encode()).hexdigest()[:32]}"
        object.__setattr__(self, "path", path)  # the dataclass is frozen

    @property
    def payload(self) -> str:
        """The name of the file that holds the code."""
        return "kernel.cubin" if self.target.startswith("sm_") else "kernel.ptx"

    def record(self, result: Compiled) -> bytes:
        """Return the contents of entry.json for `result`."""
        checksums = {self.payload: result.code, "log.txt": result.log.encode()}
        record = {
            "format": FORMAT,
            "kernel": self.name,
            "compiler": self.compiler,
            "flags": nvrtc.flags(self.target),
            "sha256": {file: hashlib.sha256(content).hexdigest() for file, content in checksums.items()},
        }
        return json.dumps(record, indent=4).encode()

    def load(self) -> Compiled | None:
        """Return the stored result; None if it is missing, damaged or unsafe."""
        path = self.path
        try:
            check_safe(path)
            code, log, record = (read_safe(path / file) for file in (self.payload, "log.txt", "entry.json"))
            stored = Compiled(self.name, self.target, code, log.decode(), path / self.payload)
        except (OSError, UnicodeDecodeError):
            return None
        return stored if record == self.record(stored) else None

    def publish(self, files: Mapping[str, bytes]) -> None:
        """Atomically create the entry from source.cu and `files`, unless another process already has.

        Raises OSError if the folder cannot be written.
        """
        mode = writable_mode(self.folder)
        remove_abandoned(self.folder)
        workplace = Path(tempfile.mkdtemp(prefix=PUBLISHING, dir=self.folder))
        try:
            complete = workplace / "entry"
            complete.mkdir(mode & 0o755)  # readable by those who can read the folder
            for name, content in {"source.cu": self.text.encode(), **files}.items():
                write(complete / name, content, mode & 0o644)
            for attempt in itertools.count():
                try:
                    return os.rename(complete, self.path)
                except OSError as error:
                    if error.errno not in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
                        raise
                if self.load() is not None:
                    return None
                # The existing entry is damaged: move it away, unless another process does so first.
                with suppress(FileNotFoundError):
                    os.rename(self.path, workplace / f"damaged{attempt}")
        finally:
            shutil.rmtree(workplace)


def write(path: Path, content: bytes, mode: int) -> None:
    """Create a file and flush it to disk, so that a later rename cannot publish it without its contents."""
    with open(path, "xb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def noted_compiler(folder: Path) -> str | None:
    """Return nvrtc.identity() as noted in the folder; None if there is no note, or if libnvrtc has changed since.

    Finding, loading and querying NVRTC would take longer than the rest of loading a cached kernel.
    """
    try:
        library, *state, identity = json.loads(read_safe(_note(folder)))
        return str(identity) if state == _state(Path(library)) else None
    except (OSError, ValueError, TypeError, RecursionError):  # no note, no library, or not our JSON
        return None


def note_compiler(folder: Path) -> None:
    """Write the compiler's identity to the note for later processes, if the folder is writable."""
    with suppress(OSError):
        mode, library = writable_mode(folder), nvrtc.path()
        note = json.dumps([str(library), *_state(library), nvrtc.identity()])
        with tempfile.TemporaryDirectory(prefix=PUBLISHING, dir=folder) as workplace:
            complete = Path(workplace) / "entry.json"
            write(complete, note.encode(), mode & 0o644)
            os.replace(complete, _note(folder))


def _note(folder: Path) -> Path:
    return folder / f"compiler.{hashlib.sha256(repr(environment.libraries()).encode()).hexdigest()[:32]}.json"


def _state(file: Path) -> list[int]:
    status = file.stat()
    return [status.st_size, status.st_mtime_ns]


def store(entry: Entry, files: Mapping[str, bytes]) -> bool:
    """Publish the entry; returns False, after a warning, if that fails."""
    try:
        entry.publish(files)
    except OSError as error:
        warn_once(error)
        return False
    return True


def warn_once(error: OSError) -> None:
    """Warn that kernels cannot be stored, once per process."""
    if next(failures) == 0:
        warnings.warn(
            f"compiled kernels cannot be stored on disk, so every process recompiles them: {error}. Set "
            "CUPY_FLASH_CACHE_DIR to a folder on a disk with space that you own and that others cannot write to.",
            RuntimeWarning,
            stacklevel=2,
        )


def location() -> Path:
    """Return the path of the cache folder, CUPY_FLASH_CACHE_DIR or the user's; OSError without a home directory."""
    folder = Path(environment.cache_dir() or _user_folder())
    if not folder.is_absolute():  # older platformdirs do not expand ~ without a home directory
        raise FileNotFoundError(f"{folder} is not an absolute path")
    return folder


def _user_folder() -> str:
    """Return the platform's per-user cache folder."""
    from platformdirs import user_cache_dir

    try:
        return str(user_cache_dir("cupy_flash", appauthor=False))
    except RuntimeError as error:  # platformdirs found no home
        raise FileNotFoundError(str(error)) from error


def usable_folder() -> Path:
    """Return the cache folder, created if missing. Raises OSError if it cannot be used."""
    folder = location()
    make(folder)
    check_safe(folder)
    return folder


def make(folder: Path) -> None:
    """Create a folder and its parents with mode 0700."""
    if not folder.parent.is_dir():
        make(folder.parent)
    folder.mkdir(mode=0o700, exist_ok=True)


def check_safe(folder: Path) -> None:
    """Raise OSError unless `folder` is a directory that no other user except root can write to."""
    status = os.lstat(folder)
    if not stat.S_ISDIR(status.st_mode):
        raise NotADirectoryError(f"{folder} is {'a symbolic link' if stat.S_ISLNK(status.st_mode) else 'not a folder'}")
    _check_owner(folder, status)


def read_safe(file: Path) -> bytes:
    """Read a file; OSError unless it is a regular file that no other user except root can write to."""
    status = os.lstat(file)
    if not stat.S_ISREG(status.st_mode):
        raise OSError(f"{file} is not a regular file")
    _check_owner(file, status)
    return file.read_bytes()


def _check_owner(path: Path, status: os.stat_result) -> None:
    if not has_owners():
        return
    if status.st_uid not in (os.geteuid(), 0):
        raise PermissionError(f"{path} belongs to user {status.st_uid}, who could put code into it")
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError(f"{path} can be written by other users (chmod go-w would close it)")


def writable_mode(folder: Path) -> int:
    """Return the mode of a folder; PermissionError if it is read-only, which would not stop root from writing."""
    mode = os.lstat(folder).st_mode
    if has_owners() and not mode & stat.S_IWUSR:
        raise PermissionError(f"{folder} is read-only")
    return mode


def has_owners() -> bool:
    """Return whether files have POSIX owners and modes. On Windows they do not, but a user's folder is private."""
    return hasattr(os, "geteuid")


def entries(folder: Path) -> Iterator[Path]:
    """Return the entry folders in a cache folder, including incomplete ones of interrupted processes."""
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if OURS.fullmatch(path.name) and stat.S_ISDIR(os.lstat(path).st_mode):
            yield path


def size(folder: Path) -> tuple[int, int]:
    """Return (number of entries, total bytes) of a cache folder."""
    paths = list(entries(folder))
    return len(paths), sum(file.lstat().st_size for path in paths for file in path.rglob("*") if file.is_file())


def clear(folder: Path) -> None:
    """Remove the entries and notes of a cache folder. Foreign files stay, and so do the folders that contain them."""
    for path in entries(folder):
        remove(path)
    for note in folder.glob("compiler.*.json"):
        note.unlink()


def remove_abandoned(folder: Path) -> None:
    """Remove incomplete entries older than ABANDONED, left by killed processes."""
    for path in folder.glob(f"{PUBLISHING}*"):
        with suppress(OSError):  # another process may remove it first, or it may not be ours
            status = os.lstat(path)
            if OURS.fullmatch(path.name) and stat.S_ISDIR(status.st_mode) and time.time() - status.st_mtime > ABANDONED:
                remove(path)


def remove(entry: Path) -> None:
    """Remove the files that this module writes into an entry, then the folder if it is empty."""
    for path in entry.iterdir():
        if stat.S_ISDIR(os.lstat(path).st_mode) and entry.name.startswith(PUBLISHING):
            remove(path)
        elif path.name in FILES:
            path.unlink()
    if not any(entry.iterdir()):
        entry.rmdir()
