"""Bugs planted in the kernels that a test compiles."""

from contextlib import contextmanager

from cupy_flash.backends import kernels
from cupy_flash.source import assemble


@contextmanager
def planted(monkeypatch, *changes):
    """Compile the kernels with replaced texts; each replaced text occurs once in all kernels."""
    places = {good: set() for good, _ in changes}

    def assemble_planted(kernel, constants):
        text = assemble(kernel, constants)
        for good, bad in changes:
            places[good].update((kernel, n) for n in range(text.count(good)))
            text = text.replace(good, bad)
        return text

    with monkeypatch.context() as patch:
        patch.setattr(kernels, "assemble", assemble_planted)
        try:
            yield
        finally:  # if the expected error was not raised, a text that no longer exists is the likely reason
            assert all(len(place) == 1 for place in places.values()), places
