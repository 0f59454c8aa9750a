"""Shared by all tests: hypothesis without randomness or deadlines, the backends that one body runs on, poison."""

import hypothesis
import numpy as np
import pytest

hypothesis.settings.register_profile("deterministic", derandomize=True, deadline=None, database=None)
hypothesis.settings.load_profile("deterministic")


@pytest.fixture(params=["cpu"])
def backend(request):
    """The backend that a behaviour test asks for, by name."""
    return request.param


@pytest.fixture
def poisoned_memory(monkeypatch):
    """Outputs and workspaces come as NaN (raw bytes as 255: NaN in any float), so that what is not written shows."""
    empty = np.empty

    def poisoned(*args, **kwargs):
        array = empty(*args, **kwargs)
        if array.dtype == np.uint8:
            array.fill(255)
        elif array.dtype.kind in "fcV":  # ml_dtypes' are of kind V
            array.fill(np.nan)
        return array

    monkeypatch.setattr(np, "empty", poisoned)
