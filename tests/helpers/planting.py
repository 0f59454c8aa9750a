"""Bugs planted in the kernels that a test compiles."""

from contextlib import contextmanager

from cupy_flash.backends import kernels
from cupy_flash.source import assemble


@contextmanager
def planted(monkeypatch, *changes):
    """The kernels with other text in place of some, each of which stands once in one of them."""
    places = {good: set() for good, _ in changes}

    def assemble_planted(kernel, constants):
        text = assemble(kernel, constants)
        for good, bad in changes:
            places[good].update((kernel, n) for n in range(text.count(good)))
            text = text.replace(good, bad)
        return text

    with monkeypatch.context() as patch:
        patch.setattr(kernels, "assemble", assemble_planted)
        yield
    assert all(len(place) == 1 for place in places.values()), places
