"""Bugs planted in the kernels that a test compiles."""

from contextlib import contextmanager

from cupy_flash.backends import kernels
from cupy_flash.source import assemble


@contextmanager
def planted(monkeypatch, *changes):
    """Compile the kernels with replaced texts; each replaced text occurs once in all kernels."""
    places = {good: set() for good, _ in changes}

    def assemble_planted(kernel, constants, headers):
        text = assemble(kernel, constants, headers)
        for good, bad in changes:
            places[good].update((kernel, n) for n in range(text.count(good)))
            text = text.replace(good, bad)
        return text

    with monkeypatch.context() as patch:
        patch.setattr(kernels, "assemble", assemble_planted)
        try:
            yield
        finally:  # also when no error was raised, which a text that is there no more explains
            assert all(len(place) == 1 for place in places.values()), places
