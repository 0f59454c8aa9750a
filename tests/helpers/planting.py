"""Plants bugs in the kernels that a test compiles, by replacing text in the assembled source or in one file."""

import shutil
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from cupy_flash.gpu import run_plan
from cupy_flash.jit import source
from cupy_flash.jit.source import assemble, kernel_folder


@contextmanager
def planted(monkeypatch, *changes, in_header=False):
    """Compile the kernels with changes (original text, planted text).

    Each original text must occur once in all kernels; with in_header, once in each kernel that contains it.
    """
    places = {good: set() for good, _ in changes}

    def assemble_planted(kernel, constants, headers):
        text = assemble(kernel, constants, headers)
        for good, bad in changes:
            places[good].update((kernel, n) for n in range(text.count(good)))
            text = text.replace(good, bad)
        return text

    with monkeypatch.context() as patch:
        patch.setattr(run_plan, "assemble", assemble_planted)
        try:
            yield
        finally:  # if the expected error is missing, the likely reason is a text that no longer exists
            for occurrences in places.values():
                assert occurrences and len(occurrences) == (
                    len({kernel for kernel, _ in occurrences}) if in_header else 1
                ), places


@contextmanager
def planted_in(monkeypatch, file, good, bad):
    """Compile the kernels with a text of one file replaced; the text must occur there exactly once."""
    with TemporaryDirectory() as place, monkeypatch.context() as patch:
        folder = Path(place) / "kernels_cu"
        shutil.copytree(kernel_folder(), folder)
        text = (folder / file).read_text()
        assert text.count(good) == 1, good
        (folder / file).write_text(text.replace(good, bad))
        patch.setattr(source, "kernel_folder", lambda: folder)
        yield
