"""Compiled kernels, kept in memory and in a folder that a person can read.

One entry is one folder `<kernel>.<digest>`: source.cu, kernel.ptx or kernel.cubin, log.txt, and entry.json with how
they were made and their checksums. The digest is that of text, flags and compiler, so an entry is never stale; which
compiler that is, a note says beside the entries, for as long as the compiler's file stays what it is. An entry is
published by one rename and needs no lock: processes that compile the same kernel at once waste time, nothing else. What
fails its checksum is compiled again. As a cubin is code that will run, the folder must be its user's or root's, and
closed to the writing of others; where that is not so, or nothing can be written, kernels live in memory.
"""

from __future__ import annotations

import errno
import hashlib
import itertools
import json
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

from . import environment, nvrtc
from .nvrtc import Compiled, CompileError

FORMAT = 1  # of an entry; one of another format is replaced
FILES = ("source.cu", "kernel.ptx", "kernel.cubin", "log.txt", "entry.json")
PUBLISHING = "publishing-"  # how the folder of an entry that is not complete begins
ABANDONED = 24 * 60 * 60  # seconds after which its publisher is taken for dead
OURS = re.compile(rf"[A-Za-z_][\w.]*\.[0-9a-f]{{32}}|{PUBLISHING}\w+")

failures = itertools.count()  # to use the folder, in this process


@lru_cache(maxsize=256)
def compiled(text: str, name: str, target: str) -> Compiled:
    """`nvrtc.compile(text, name, target)`, from memory or the cache folder where it was compiled before.

    The text of a failed compilation is saved in the folder too, and named by the CompileError.
    """
    try:
        folder = usable_folder()
    except OSError as error:
        warn_once(error)
        return nvrtc.compile(text, name, target)
    said = noted_compiler(folder)
    if said is not None and (found := Entry(folder, text, name, target, said).load()) is not None:
        return found
    entry = Entry(folder, text, name, target, nvrtc.identity())
    if said != entry.compiler and (found := entry.load()) is not None:
        note_compiler(folder)
        return found
    try:
        result = nvrtc.compile(text, name, target)
    except CompileError as error:
        saved = store(entry, {"log.txt": error.log.encode()})
        raise CompileError(name, target, error.log, entry.path / "source.cu" if saved else None) from None
    files = {entry.payload: result.code, "log.txt": result.log.encode(), "entry.json": entry.record(result)}
    if not store(entry, files):
        return result
    if said != entry.compiler:
        note_compiler(folder)
    return replace(result, path=entry.path / entry.payload)


@dataclass(frozen=True)
class Entry:
    """The place of one compiled text in a cache folder."""

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
        object.__setattr__(self, "path", path)  # as a frozen dataclass sets its own

    @property
    def payload(self) -> str:
        """The name of the file that holds the code."""
        return "kernel.cubin" if self.target.startswith("sm_") else "kernel.ptx"

    def record(self, result: Compiled) -> bytes:
        """What entry.json holds when code and log are those of `result`."""
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
        """What was stored; None where there is nothing, or nothing that can be trusted."""
        path = self.path
        try:
            check_safe(path)
            code, log, record = (read_safe(path / file) for file in (self.payload, "log.txt", "entry.json"))
            found = Compiled(self.name, self.target, code, log.decode(), path / self.payload)
        except (OSError, UnicodeDecodeError):
            return None
        return found if record == self.record(found) else None

    def publish(self, files: Mapping[str, bytes]) -> None:
        """Makes the entry of source.cu and `files`, unless another process was quicker.

        Whoever reads the entry sees all of it or nothing. Raises OSError where the folder takes no entry.
        """
        mode = writable_mode(self.folder)
        remove_abandoned(self.folder)
        workplace = Path(tempfile.mkdtemp(prefix=PUBLISHING, dir=self.folder))
        try:
            complete = workplace / "entry"
            complete.mkdir(mode & 0o755)  # who may read the folder may read the entry
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
                # What is there is damaged. Another process may be first to move it away.
                with suppress(FileNotFoundError):
                    os.rename(self.path, workplace / f"damaged{attempt}")
        finally:
            shutil.rmtree(workplace)


def write(path: Path, content: bytes, mode: int) -> None:
    """A new file whose content is on the disk before the rename that publishes it can be."""
    with open(path, "xb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def noted_compiler(folder: Path) -> str | None:
    """What the compiler of this environment said of itself (nvrtc.identity) when its file was what it is now; None
    where that is not known. To find, load and ask it takes longer than all else that a kernel from the folder needs."""
    try:
        library, *state, said = json.loads(read_safe(_note(folder)))
        return str(said) if state == _state(Path(library)) else None
    except (OSError, ValueError, TypeError, RecursionError):  # no note, no library, or another's text
        return None


def note_compiler(folder: Path) -> None:
    """Notes it for the next process, if the folder takes a note."""
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
    """Publishes the entry if it can; else says why it cannot."""
    try:
        entry.publish(files)
    except OSError as error:
        warn_once(error)
        return False
    return True


def warn_once(error: OSError) -> None:
    """The first of these warnings in a process; the next kernel's would tell nothing new."""
    if next(failures) == 0:
        warnings.warn(
            f"compiled kernels cannot be kept on disk, so every process compiles them anew: {error}. Set "
            "CUPY_FLASH_CACHE_DIR to a folder on a disk with space that you own and that others cannot write to.",
            RuntimeWarning,
            stacklevel=2,
        )


def location() -> Path:
    """The cache folder: CUPY_FLASH_CACHE_DIR, else the user's. It need not exist. OSError where there is no home."""
    folder = Path(environment.cache_dir() or _users())
    if not folder.is_absolute():  # older platformdirs leave the ~ of a home that does not exist
        raise FileNotFoundError(f"{folder} is not an absolute path")
    return folder


def _users() -> str:
    """The user's cache folder, where this system keeps such folders."""
    from platformdirs import user_cache_dir

    try:
        return str(user_cache_dir("cupy_flash", appauthor=False))
    except RuntimeError as error:  # platformdirs found no home
        raise FileNotFoundError(str(error)) from error


def usable_folder() -> Path:
    """The cache folder, made if need be. OSError says why it cannot be used."""
    folder = location()
    make(folder)
    check_safe(folder)
    return folder


def make(folder: Path) -> None:
    """Makes a folder and those above it, each for its user alone."""
    if not folder.parent.is_dir():
        make(folder.parent)
    folder.mkdir(mode=0o700, exist_ok=True)


def check_safe(folder: Path) -> None:
    """Raises OSError where somebody else could have put code into the folder, or could yet."""
    status = os.lstat(folder)
    if not stat.S_ISDIR(status.st_mode):
        raise NotADirectoryError(f"{folder} is {'a symbolic link' if stat.S_ISLNK(status.st_mode) else 'no folder'}")
    _check_owner(folder, status)


def read_safe(file: Path) -> bytes:
    """What is in a file; OSError where it is none, or somebody else could have written it or could yet."""
    status = os.lstat(file)
    if not stat.S_ISREG(status.st_mode):
        raise OSError(f"{file} is no regular file")
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
    """The mode of a folder that its user may write to; else PermissionError, where root could write all the same."""
    mode = os.lstat(folder).st_mode
    if has_owners() and not mode & stat.S_IWUSR:
        raise PermissionError(f"{folder} is read-only")
    return mode


def has_owners() -> bool:
    """Whether files have POSIX owners and modes. On Windows they have not, and a user's cache folder is private."""
    return hasattr(os, "geteuid")


def entries(folder: Path) -> Iterator[Path]:
    """The folders in a cache folder that this module made, those of interrupted processes too."""
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if OURS.fullmatch(path.name) and stat.S_ISDIR(os.lstat(path).st_mode):
            yield path


def size(folder: Path) -> tuple[int, int]:
    """(entries, bytes) of a cache folder."""
    found = list(entries(folder))
    return len(found), sum(file.lstat().st_size for path in found for file in path.rglob("*") if file.is_file())


def clear(folder: Path) -> None:
    """Removes the entries of a cache folder, and the notes. A file that is not of an entry stays, and its folder with
    it."""
    for path in entries(folder):
        remove(path)
    for note in folder.glob("compiler.*.json"):
        note.unlink()


def remove_abandoned(folder: Path) -> None:
    """Removes what publishers have left that were killed: no publisher takes a day."""
    for path in folder.glob(f"{PUBLISHING}*"):
        with suppress(OSError):  # another process may remove it, or not let us
            status = os.lstat(path)
            if OURS.fullmatch(path.name) and stat.S_ISDIR(status.st_mode) and time.time() - status.st_mtime > ABANDONED:
                remove(path)


def remove(entry: Path) -> None:
    """Removes what this module writes into a folder, then the folder if nothing else is in it."""
    for path in entry.iterdir():
        if stat.S_ISDIR(os.lstat(path).st_mode) and entry.name.startswith(PUBLISHING):
            remove(path)
        elif path.name in FILES:
            path.unlink()
    if not any(entry.iterdir()):
        entry.rmdir()
