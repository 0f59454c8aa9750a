"""The examples of docs/libraries.md run, each where its library is installed; Keras's on each of its backends."""

import importlib.util
import os
import re
import subprocess
import sys

import array_libraries
import numpy as np
import pytest
from pages import LIBRARIES, ROOT, python_blocks, run_block

BLOCKS = {
    re.search(r"^(?:import|from) (array_api_strict|mlx|tensorflow|keras|paddle|warp)\b", code, re.M)[1]: (line, code)
    for line, code in python_blocks(LIBRARIES.read_text(encoding="utf-8"))
}
PACKAGES = [array_libraries.LIBRARIES[name].package for name in array_libraries.INSTALLED]
BACKENDS = [name for name in ("tensorflow", "jax", "torch") if importlib.util.find_spec(name)]


def test_every_library_has_an_example():
    assert BLOCKS.keys() == {library.package for library in array_libraries.LIBRARIES.values()} | {"keras"}


@pytest.mark.parametrize("package", PACKAGES)
def test_examples(package):
    array_libraries.imported("mlx.core" if package == "mlx" else package)
    run_block(LIBRARIES, *BLOCKS[package])


if importlib.util.find_spec("keras"):

    @pytest.mark.parametrize("backend", BACKENDS)
    def test_the_layer_of_keras_trains(backend, tmp_path):
        script = tmp_path / "layer.py"  # TensorFlow reads the source
        script.write_text(f"{BLOCKS['keras'][1]}print(*history.history['loss'])\n", encoding="utf-8")
        ran = subprocess.run(
            [sys.executable, str(script)],
            env=os.environ | {"KERAS_BACKEND": backend, "PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "3"},
            capture_output=True,
            text=True,
        )
        assert ran.returncode == 0, ran.stderr
        first, second = map(float, ran.stdout.split())
        assert np.isfinite(first) and second < first
