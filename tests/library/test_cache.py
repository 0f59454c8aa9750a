"""Compiled kernels on disk: entries are reused, written atomically, and trusted only if undamaged and safely owned."""

import ctypes
import errno
import itertools
import json
import logging
import multiprocessing
import os
import re
import shutil
import stat
import time
import warnings
from collections.abc import Callable, Iterator
from multiprocessing.synchronize import Barrier
from pathlib import Path

import pytest

from cupy_flash.__main__ import main
from cupy_flash.jit import kernel_cache, nvrtc
from cupy_flash.jit.kernel_cache import Entry

TEXT = '#line 1 "simt/fill.cu"\nextern "C" __global__ void fill(float* x) { x[threadIdx.x] = 1; }\n'
COMPILER = "release 13.5, V13.5.37"
OTHER = TEXT.replace("1; }", "2; }")
BROKEN = TEXT.replace("float*", "flaot*")
NAME, TARGET = "simt/fill", "sm_80"
ENTRY_FILES = ["entry.json", "kernel.cubin", "log.txt", "source.cu"]


@pytest.fixture(autouse=True)
def fresh_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Clear the caches in memory and the record of warnings given, as in a new process."""
    monkeypatch.setattr(kernel_cache, "failures", itertools.count())
    kernel_cache.compiled.cache_clear()
    yield
    kernel_cache.compiled.cache_clear()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "cache"
    monkeypatch.setenv("CUPY_FLASH_CACHE_DIR", str(path))
    return path


@pytest.fixture
def compiles(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list of the names of the kernels that NVRTC compiles, in order."""
    names: list[str] = []
    compile = nvrtc.compile

    def counted(text: str, name: str, target: str) -> nvrtc.Compiled:
        names.append(name)
        return compile(text, name, target)

    nvrtc.identity()  # compiles a kernel, once per process
    monkeypatch.setattr(nvrtc, "compile", counted)
    return names


def forget() -> None:
    """Clear the caches in memory, as in a new process."""
    kernel_cache.compiled.cache_clear()


def store(text: str = TEXT) -> Path:
    """Compile into the cache folder; return the folder of the entry."""
    path = kernel_cache.compiled(text, NAME, TARGET).path
    assert path is not None
    forget()
    return path.parent


def assert_unstored(count: int = 1) -> str:
    """Compile `count` kernels that cannot be stored; return the text of the warning, which is given once."""
    with pytest.warns(RuntimeWarning) as caught:
        for number in range(count):
            compiled = kernel_cache.compiled(TEXT.replace("1; }", f"{7 + number}; }}"), NAME, TARGET)
            assert compiled.code.startswith(b"\x7fELF")
            assert compiled.path is None
    assert len(caught) == 1
    assert "CUPY_FLASH_CACHE_DIR" in str(caught[0].message)
    return str(caught[0].message)


def owned_by(monkeypatch: pytest.MonkeyPatch, path: Path, user: int) -> None:
    """Patch os.lstat so that `path` belongs to `user`, and make this process user 4242."""
    lstat = os.lstat

    def changed(name: os.PathLike[str] | str, **options: int) -> os.stat_result:
        status = lstat(name, **options)
        if Path(name) == path:
            return os.stat_result((*status[:4], user, *status[5:10]))
        return os.stat_result((*status[:4], 4242, *status[5:10]))

    monkeypatch.setattr(os, "lstat", changed)
    monkeypatch.setattr(os, "geteuid", lambda: 4242)


# -- hits ------------------------------------------------------------------------------------------------------------


def test_compiles_once_for_memory_and_disk(folder: Path, compiles: list[str]) -> None:
    first = kernel_cache.compiled(TEXT, NAME, TARGET)
    assert kernel_cache.compiled(TEXT, NAME, TARGET) is first
    forget()
    again = kernel_cache.compiled(TEXT, NAME, TARGET)
    assert again is not first
    assert again == first
    assert again.resources["fill"].registers > 0
    assert compiles == [NAME]


def test_a_compilation_is_logged_and_a_hit_is_not(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="cupy_flash"):
        store()
        kernel_cache.compiled(TEXT, NAME, TARGET)
    (record,) = caplog.records
    assert record.levelno == logging.INFO and record.name == "cupy_flash.cache"
    assert record.getMessage() == (
        f"compiling {NAME} for {TARGET}, which takes seconds; later calls load it from {folder}"
    )


def test_a_hit_on_disk_writes_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store()
    monkeypatch.setattr(Entry, "publish", None)
    assert kernel_cache.compiled(TEXT, NAME, TARGET).path is not None


def test_an_entry_is_a_folder_that_a_person_can_read(folder: Path) -> None:
    compiled = kernel_cache.compiled(TEXT, NAME, TARGET)
    (entry,) = kernel_cache.entries(folder)
    assert re.fullmatch(r"simt\.fill\.[0-9a-f]{32}", entry.name)
    assert sorted(path.name for path in entry.iterdir()) == ENTRY_FILES
    assert compiled.path == entry / "kernel.cubin"
    assert compiled.path.read_bytes() == compiled.code
    assert (entry / "source.cu").read_text() == TEXT
    assert (entry / "log.txt").read_text() == compiled.log
    record = json.loads((entry / "entry.json").read_text())
    assert record["kernel"] == NAME
    assert record["flags"] == list(nvrtc.flags(TARGET))
    assert record["compiler"] == nvrtc.identity()


def test_ptx_is_stored_as_ptx(folder: Path, compiles: list[str]) -> None:
    first = kernel_cache.compiled(TEXT, NAME, "compute_80")
    assert first.path is not None
    assert first.path.name == "kernel.ptx"
    assert first.path.read_text() == first.ptx
    forget()
    assert kernel_cache.compiled(TEXT, NAME, "compute_80") == first
    assert compiles == [NAME]


def test_text_flags_and_compiler_are_the_key(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def path(text: str = TEXT, target: str = TARGET, compiler: str = COMPILER) -> Path:
        return Entry(folder, text, NAME, target, compiler).path

    entries = [path(), path(OTHER), *(path(target=target) for target in ("sm_90", "sm_90a", "compute_80"))]
    entries.append(path(compiler="release 13.5, V13.5.99"))
    flags = nvrtc.flags
    monkeypatch.setattr(nvrtc, "flags", lambda target: (*flags(target), "--new-flag"))
    entries.append(path())
    assert len(set(entries)) == len(entries)
    assert path() == entries[-1]


@pytest.fixture
def library_loads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that gets an entry whenever the compiler's library is loaded."""
    calls: list[str] = []
    library = nvrtc.library

    def loaded() -> ctypes.CDLL:
        calls.append("library")
        return library()

    monkeypatch.setattr(nvrtc, "library", loaded)
    return calls


def test_a_hit_on_disk_does_not_load_the_compiler(folder: Path, library_loads: list[str], compiles: list[str]) -> None:
    store()
    library_loads.clear()
    nvrtc.identity.cache_clear()
    assert kernel_cache.compiled(TEXT, NAME, TARGET).path is not None
    assert library_loads == [] and compiles == [NAME]


def test_another_compiler_compiles_again(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiles: list[str]
) -> None:
    """A new release of the compiler compiles again; the entries of the first one stay valid."""
    first, said = store(), nvrtc.identity()
    libraries = [tmp_path / name for name in ("libnvrtc.so.13", "libnvrtc.so.14")]
    for library in libraries:
        library.write_text("a library")
    monkeypatch.setattr(nvrtc, "path", lambda: libraries[0])
    monkeypatch.setattr(kernel_cache.environment, "libraries", lambda: ("another",))
    assert store() == first and compiles == [NAME]  # the environment differs, but not the library file
    monkeypatch.setattr(nvrtc, "identity", lambda: "release 14.0")
    assert store() == first and compiles == [NAME]  # the file has not changed, so the stored identity is used
    libraries[0].write_text("the next release")
    second = store()
    assert second != first and compiles == [NAME] * 2
    assert json.loads((second / "entry.json").read_text())["compiler"] == "release 14.0"
    monkeypatch.setattr(nvrtc, "identity", lambda: said)
    libraries[0].unlink()
    monkeypatch.setattr(nvrtc, "path", lambda: libraries[1])
    assert store() == first and compiles == [NAME] * 2


@pytest.mark.parametrize("text", ["", "{}", "[]", "[1, 2]", '["/nowhere", 1, 2, "release"]', "\xff"], ids=repr)
def test_an_invalid_note_of_a_compiler_is_replaced(folder: Path, compiles: list[str], text: str) -> None:
    entry = store()
    (note,) = folder.glob("compiler.*.json")
    good = note.read_bytes()
    note.write_text(text, encoding="latin-1")
    assert store() == entry and compiles == [NAME]
    assert note.read_bytes() == good


def test_memory_is_bounded() -> None:
    assert kernel_cache.compiled.cache_parameters()["maxsize"] is not None


# -- the folder ------------------------------------------------------------------------------------------------------


def test_the_users_cache_folder_is_the_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUPY_FLASH_CACHE_DIR", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert store().parent.is_relative_to(tmp_path)


def test_new_folders_and_files_belong_to_the_user_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "new" / "deep" / "cache"
    monkeypatch.setenv("CUPY_FLASH_CACHE_DIR", str(folder))
    umask = os.umask(0)
    try:
        entry = store()
    finally:
        os.umask(umask)
    for path in (folder.parent.parent, folder.parent, folder, entry):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in entry.iterdir()} == {0o600}


def test_entries_are_readable_as_the_folder_is(folder: Path) -> None:
    folder.mkdir()
    folder.chmod(0o755)
    umask = os.umask(0o022)
    try:
        entry = store()
    finally:
        os.umask(umask)
    assert stat.S_IMODE(entry.stat().st_mode) == 0o755
    assert {stat.S_IMODE(path.stat().st_mode) for path in entry.iterdir()} == {0o644}


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o775, 0o757, 0o722], ids=oct)
def test_a_folder_that_others_can_write_is_not_used(folder: Path, compiles: list[str], mode: int) -> None:
    store()
    folder.chmod(mode)
    contents = sorted(folder.iterdir())
    message = assert_unstored(3)
    assert f"{folder} can be written by other users (chmod go-w would close it)" in message
    assert compiles == [NAME] * 4  # the fourth one: the existing entry was not used
    assert sorted(folder.iterdir()) == contents


def test_a_symbolic_link_is_not_followed(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    folder.symlink_to(tmp_path / "elsewhere")
    assert f"{folder} is a symbolic link" in assert_unstored()
    assert not list((tmp_path / "elsewhere").iterdir())


def test_a_file_in_place_of_the_folder_is_reported(folder: Path) -> None:
    folder.write_text("not a folder")
    assert str(folder) in assert_unstored()


def test_a_folder_of_another_user_is_not_used(
    folder: Path, monkeypatch: pytest.MonkeyPatch, compiles: list[str]
) -> None:
    store()
    owned_by(monkeypatch, folder, 4243)
    assert f"{folder} belongs to user 4243" in assert_unstored()
    assert compiles == [NAME] * 2


@pytest.mark.parametrize("owner", [0, 4242], ids=["root", "user"])
def test_a_folder_of_root_or_the_user_serves_hits(
    folder: Path, monkeypatch: pytest.MonkeyPatch, compiles: list[str], owner: int
) -> None:
    store()
    owned_by(monkeypatch, folder, owner)
    assert kernel_cache.compiled(TEXT, NAME, TARGET).path is not None
    assert compiles == [NAME]


def test_a_read_only_folder_serves_hits(folder: Path, compiles: list[str]) -> None:
    store()
    folder.chmod(0o555)
    contents = sorted(folder.rglob("*"))
    assert kernel_cache.compiled(TEXT, NAME, TARGET).path is not None
    assert compiles == [NAME]
    assert f"{folder} is read-only" in assert_unstored(3)
    assert sorted(folder.rglob("*")) == contents
    folder.chmod(0o700)


def no_home(app: str, **options: bool) -> str:
    raise RuntimeError("could not determine the home directory")


@pytest.mark.parametrize(
    ("platformdirs", "reason"),
    [
        pytest.param(no_home, "could not determine the home directory", id="current_platformdirs"),
        pytest.param(lambda app, **options: f"~/.cache/{app}", "~/.cache/cupy_flash is not an absolute", id="older"),
    ],
)
def test_without_a_home_kernels_stay_in_memory(
    platformdirs: Callable[..., str],
    reason: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    compiles: list[str],
) -> None:
    monkeypatch.delenv("CUPY_FLASH_CACHE_DIR", raising=False)
    monkeypatch.setattr("platformdirs.user_cache_dir", platformdirs)
    monkeypatch.chdir(tmp_path)
    assert reason in assert_unstored(3)
    assert len(compiles) == 3
    assert not list(tmp_path.iterdir())


def test_a_relative_folder_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A relative path would be another folder in every working directory.
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUPY_FLASH_CACHE_DIR", "cache")
    assert "cache is not an absolute path" in assert_unstored()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("fails_at", ENTRY_FILES)
def test_a_full_disk_leaves_no_files(folder: Path, monkeypatch: pytest.MonkeyPatch, fails_at: str) -> None:
    write = kernel_cache.write

    def full(path: Path, content: bytes, mode: int) -> None:
        if path.name == fails_at:
            write(path, content[:100], mode)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        write(path, content, mode)

    monkeypatch.setattr(kernel_cache, "write", full)
    assert os.strerror(errno.ENOSPC) in assert_unstored(3)
    assert not list(folder.iterdir())


def test_owners_and_modes_are_not_checked_on_windows(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Windows has no os.geteuid.
    folder.mkdir()
    folder.chmod(0o777)
    monkeypatch.delattr(os, "geteuid")
    assert store().is_dir()


# -- damage ----------------------------------------------------------------------------------------------------------


def flip_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def replace_in_record(entry: Path, old: str, new: str) -> None:
    record = (entry / "entry.json").read_text()
    assert old in record
    (entry / "entry.json").write_text(record.replace(old, new))


def replace_by_file(entry: Path) -> None:
    shutil.rmtree(entry)
    entry.write_text("no folder")


def replace_by_link(entry: Path) -> None:
    entry.rename(entry.parent.parent / "elsewhere")
    entry.symlink_to(entry.parent.parent / "elsewhere")


DAMAGES: dict[str, Callable[[Path], object]] = {
    "bit_of_code": lambda entry: flip_bit(entry / "kernel.cubin"),
    "truncated_code": lambda entry: truncate(entry / "kernel.cubin"),
    "empty_code": lambda entry: (entry / "kernel.cubin").write_bytes(b""),
    "zeros": lambda entry: (entry / "kernel.cubin").write_bytes(bytes((entry / "kernel.cubin").stat().st_size)),
    "bit_of_log": lambda entry: flip_bit(entry / "log.txt"),
    "log_of_no_text": lambda entry: (entry / "log.txt").write_bytes(b"\xff"),
    "bit_of_record": lambda entry: flip_bit(entry / "entry.json"),
    "empty_record": lambda entry: (entry / "entry.json").write_bytes(b""),
    "older_format": lambda entry: replace_in_record(entry, '"format": 1', '"format": 0'),
    "other_flags": lambda entry: replace_in_record(entry, "--std=c++17", "--std=c++14"),
    "missing_code": lambda entry: (entry / "kernel.cubin").unlink(),
    "missing_record": lambda entry: (entry / "entry.json").unlink(),
    "empty_folder": lambda entry: [path.unlink() for path in entry.iterdir()],
    "file": replace_by_file,
    "link": replace_by_link,
    "open_to_others": lambda entry: entry.chmod(0o777),
    "code_open_to_others": lambda entry: (entry / "kernel.cubin").chmod(0o666),
    "link_to_code": lambda entry: (
        (entry / "kernel.cubin").rename(entry.parent / "code"),
        (entry / "kernel.cubin").symlink_to(entry.parent / "code"),
    ),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_entry_is_compiled_again_and_replaced(
    folder: Path, compiles: list[str], damage: Callable[[Path], object]
) -> None:
    good = kernel_cache.compiled(TEXT, NAME, TARGET)
    entry = store()
    damage(entry)
    for _ in range(2):
        again = kernel_cache.compiled(TEXT, NAME, TARGET)
        assert (again.code, again.path) == (good.code, good.path)
        forget()
    assert compiles == [NAME] * 2
    assert list(kernel_cache.entries(folder)) == [entry]
    assert sorted(path.name for path in entry.iterdir()) == ENTRY_FILES


def test_an_entry_of_another_user_is_compiled_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch, compiles: list[str]
) -> None:
    entry = store()
    owned_by(monkeypatch, entry, 4243)
    kernel_cache.compiled(TEXT, NAME, TARGET)
    assert compiles == [NAME] * 2


@pytest.mark.parametrize("file", ["kernel.cubin", "log.txt", "entry.json"])
def test_a_file_of_another_user_is_not_trusted(
    folder: Path, monkeypatch: pytest.MonkeyPatch, compiles: list[str], file: str
) -> None:
    entry = store()
    owned_by(monkeypatch, entry / file, 4243)
    kernel_cache.compiled(TEXT, NAME, TARGET)
    assert compiles == [NAME] * 2


def nested(levels: int) -> str:
    return "[" * levels + "]" * levels


NOTES: dict[str, Callable[[Path], object]] = {
    "100000_levels": lambda note: note.write_text(nested(100_000)),
    "open_to_others": lambda note: note.chmod(0o666),
    "pipe": lambda note: (note.unlink(), os.mkfifo(note)),
    "number": lambda note: note.write_text("9" * 5000),
    "no_text": lambda note: note.write_bytes(b"\xff"),
}


@pytest.mark.parametrize("damage", NOTES.values(), ids=NOTES)
def test_a_damaged_note_of_a_compiler_is_ignored(
    folder: Path, compiles: list[str], damage: Callable[[Path], object]
) -> None:
    store()
    (note,) = folder.glob("compiler.*.json")
    assert kernel_cache.noted_compiler(folder) == nvrtc.identity()
    damage(note)
    assert kernel_cache.noted_compiler(folder) is None
    kernel_cache.compiled(TEXT, NAME, TARGET)
    assert compiles == [NAME]
    assert kernel_cache.noted_compiler(folder) == nvrtc.identity()  # the note has been rewritten


def test_publishing_removes_old_files_of_killed_processes(folder: Path) -> None:
    entry = store()
    day = 24 * 60 * 60
    ages = {"publishing-0ld": day + 60, "publishing-recent": day - 60, "publishing-foreign": 9 * day, "mine": 9 * day}
    for name, age in ages.items():
        shutil.copytree(entry, folder / name / "entry")
        shutil.copytree(entry, folder / name / "damaged0")
        if name == "publishing-foreign":
            (folder / name / "notes.txt").write_text("mine")
        now = time.time()
        os.utime(folder / name, (now - age, now - age))
    store(OTHER)
    left = {path.name for path in folder.iterdir() if path.name in ages}
    assert left == {"publishing-recent", "publishing-foreign", "mine"}
    assert [path.name for path in (folder / "publishing-foreign").iterdir()] == ["notes.txt"]


def test_the_first_process_to_publish_wins(folder: Path) -> None:
    entry = store()
    inode = entry.stat().st_ino
    result = nvrtc.compile(TEXT, NAME, TARGET)
    ours = Entry(folder, TEXT, NAME, TARGET, nvrtc.identity())
    ours.publish({ours.payload: result.code, "log.txt": result.log.encode(), "entry.json": ours.record(result)})
    assert entry.stat().st_ino == inode
    assert list(kernel_cache.entries(folder)) == [entry]


def test_a_damaged_entry_may_be_moved_away_by_another_process(
    folder: Path, monkeypatch: pytest.MonkeyPatch, compiles: list[str]
) -> None:
    entry = store()
    truncate(entry / "kernel.cubin")
    rename = os.rename

    def late(old: Path, new: Path) -> None:
        if old == entry:
            shutil.rmtree(entry)
        rename(old, new)

    monkeypatch.setattr(os, "rename", late)
    assert store() == entry
    assert compiles == [NAME] * 2


def test_the_text_of_a_failed_compilation_is_kept(folder: Path, compiles: list[str]) -> None:
    for _ in range(2):
        with pytest.raises(nvrtc.CompileError, match='identifier "flaot" is undefined') as error:
            kernel_cache.compiled(BROKEN, NAME, TARGET)
        source = error.value.source
        assert source is not None
        assert f"The assembled text is in {source}\n" in str(error.value)
        assert source.read_text() == BROKEN
        assert (source.parent / "log.txt").read_text() == error.value.log
        assert list(kernel_cache.entries(folder)) == [source.parent]
    assert compiles == [NAME] * 2


@pytest.mark.filterwarnings("ignore:compiled kernels cannot be stored")
def test_a_failed_compilation_is_reported_if_nothing_can_be_written(folder: Path) -> None:
    folder.mkdir()
    for mode in (0o555, 0o777):
        folder.chmod(mode)
        with pytest.raises(nvrtc.CompileError, match='identifier "flaot" is undefined') as error:
            kernel_cache.compiled(BROKEN, NAME, TARGET)
        assert error.value.source is None
    folder.chmod(0o700)


# -- many processes --------------------------------------------------------------------------------------------------

PROCESSES, KERNELS = 8, 25
PAYLOAD = 1 << 18  # large enough that writing takes several system calls


def hammer(rank: int, folder: Path, start: Barrier) -> None:
    """Publish and read the same entries as the other processes; every second entry starts damaged."""
    os.environ["CUPY_FLASH_CACHE_DIR"] = str(folder)
    warnings.simplefilter("error")
    try:
        for kernel in range(KERNELS):
            entry = Entry(folder, f"// kernel {kernel}", f"kernel{kernel}", TARGET, COMPILER)
            result = nvrtc.Compiled(entry.name, TARGET, bytes([kernel + 1]) * PAYLOAD, f"process {rank}")
            files = {entry.payload: result.code, "log.txt": result.log.encode(), "entry.json": entry.record(result)}
            damaged = kernel % 2 == 1
            if damaged and rank == kernel % PROCESSES:
                entry.publish(files)
                os.truncate(entry.path / entry.payload, PAYLOAD // 2)
            start.wait()
            assert kernel_cache.usable_folder() == folder
            before = entry.load()
            entry.publish(files)
            after = entry.load()
            assert {None if loaded is None else loaded.code for loaded in (before, after)} <= {None, result.code}
            # A process that has found the entry damaged may be about to replace it, and so removes even a new entry.
            assert after is not None or damaged
    except BaseException:
        start.abort()
        raise


def test_many_processes_on_one_cold_folder(tmp_path: Path) -> None:
    folder = tmp_path / "cold" / "cache"
    context = multiprocessing.get_context("spawn")
    start = context.Barrier(PROCESSES)
    processes = [context.Process(target=hammer, args=(rank, folder, start), daemon=True) for rank in range(PROCESSES)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * PROCESSES
    assert {path.name.split(".")[0] for path in kernel_cache.entries(folder)} == {f"kernel{n}" for n in range(KERNELS)}
    entries = [Entry(folder, f"// kernel {n}", f"kernel{n}", TARGET, COMPILER) for n in range(KERNELS)]
    loaded = [entry.load() for entry in entries]
    assert len(list(kernel_cache.entries(folder))) == KERNELS
    assert [entry and entry.code[:1] for entry in loaded] == [bytes([kernel + 1]) for kernel in range(KERNELS)]


# -- the command line ------------------------------------------------------------------------------------------------


@pytest.fixture
def full_folder(folder: Path) -> Path:
    """Return a cache folder with two entries, files left by a killed process, and foreign files."""
    entry = store()
    store(OTHER)
    shutil.copytree(entry, folder / "publishing-k1lled" / "entry")
    (folder / "notes.txt").write_text("mine")
    (folder / "simt.mine").mkdir()
    (folder / "simt.mine" / "source.cu").write_text("mine")
    (folder / "k.0123456789abcdef0123456789abcdef").symlink_to(folder / "simt.mine")
    return folder


def test_clear_removes_only_our_files(full_folder: Path) -> None:
    kernel_cache.clear(full_folder)
    kept = ["k.0123456789abcdef0123456789abcdef", "notes.txt", "simt.mine"]
    assert sorted(path.name for path in full_folder.iterdir()) == kept
    assert (full_folder / "simt.mine" / "source.cu").read_text() == "mine"
    kernel_cache.clear(full_folder)
    kernel_cache.clear(full_folder / "nothing")


def test_clear_keeps_a_foreign_file_in_an_entry(folder: Path) -> None:
    entry = store()
    (entry / "profile.ncu-rep").write_text("mine")
    kernel_cache.clear(folder)
    assert [path.name for path in entry.iterdir()] == ["profile.ncu-rep"]


def test_size_counts_entries_and_bytes(full_folder: Path) -> None:
    ours = [path for path in full_folder.iterdir() if re.search(r"\.[0-9a-f]{32}$|^publishing-", path.name)]
    files = [file for path in ours if not path.is_symlink() for file in path.rglob("*") if file.is_file()]
    assert kernel_cache.size(full_folder) == (3, sum(len(file.read_bytes()) for file in files))
    assert kernel_cache.size(full_folder / "nothing") == (0, 0)


def test_commands_show_and_clear_the_cache(full_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cache", "size"]) == 0
    assert capsys.readouterr().out == f"{full_folder}, 3 entries, 0.0 MiB\n"
    assert main(["info"]) == 0
    information = re.sub(r"\n +", " ", capsys.readouterr().out)  # without the breaks of lines
    assert re.search(rf"^cache +{re.escape(str(full_folder))}, 3 entries, 0\.0 MiB$", information, re.MULTILINE)
    assert re.search(r"^NVRTC +1\d\.\d+, for sm_.*75, .*90", information, re.MULTILINE)
    assert main(["cache", "clear"]) == 0
    assert capsys.readouterr().out == f"{full_folder}, 0 entries, 0.0 MiB\n"


def test_clear_says_why_a_folder_cannot_be_cleared(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    store()

    def denied(path: Path, *_: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    for method in ("iterdir", "unlink"):  # root can read and write in any folder, so the failure is simulated
        with monkeypatch.context() as patch:
            patch.setattr(Path, method, denied)
            assert main(["cache", "clear"]) == 1
        output = capsys.readouterr()
        assert os.strerror(errno.EACCES) in output.err and output.err.count("\n") == 1 and output.out == ""
    monkeypatch.setenv("CUPY_FLASH_CACHE_DIR", "relative")
    assert main(["cache", "clear"]) == 1
    assert capsys.readouterr().err == "relative is not an absolute path\n"


def test_commands_say_why_a_folder_is_not_used(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder.mkdir()
    folder.chmod(0o777)
    assert main(["cache", "size"]) == 0
    assert capsys.readouterr().out.startswith(f"not used: {folder} can be written by other users")
