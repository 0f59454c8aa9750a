"""examples/triton_race.py: the planted race is found in every schedule, and without it the sum is right."""

import importlib.util
from pathlib import Path

import pytest

from cupy_flash.simulator import errors

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "triton_race.py"


@pytest.fixture(scope="module")
def example(tmp_path_factory):
    spec = importlib.util.spec_from_file_location("triton_race", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
        yield module


@pytest.mark.parametrize("seed", range(3))
def test_the_race_is_found(example, seed):
    lines = EXAMPLE.read_text().splitlines()
    (write,) = (n for n, line in enumerate(lines, 1) if "tl.store(parts + block" in line)
    message = rf"'parts' without a release and an acquire(.|\n)*triton_race.py:{write}\)(.|\n)*triton_race.py:\d+\)"
    with pytest.raises(errors.Race, match=message):
        example.run("relaxed", seed)


def test_without_the_race_the_sum_is_right(example):
    assert example.run("acq_rel") == sum(range(1024))
