"""Shared by all tests: hypothesis without randomness or deadlines, and the backends that one body runs on."""

import hypothesis
import pytest

hypothesis.settings.register_profile("deterministic", derandomize=True, deadline=None, database=None)
hypothesis.settings.load_profile("deterministic")


@pytest.fixture(params=["cpu"])
def backend(request):
    """The backend that a behaviour test asks for, by name."""
    return request.param
