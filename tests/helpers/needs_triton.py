"""Finds whether tests/other_kernels can run here: they need the version of Triton that setup.cfg pins."""

import configparser
import importlib.metadata
from pathlib import Path

from packaging.requirements import Requirement

SETUP = Path(__file__).resolve().parents[2] / "setup.cfg"


def reason_to_leave_out():
    """Return the reason why the tests that need Triton are left out; None if they are not."""
    config = configparser.ConfigParser()
    config.read(SETUP, encoding="utf-8")
    lines = config["options.extras_require"]["test"].split("\n")
    pinned = Requirement(next(line for line in lines if line.startswith("triton")))
    if not pinned.marker.evaluate():
        return f"Triton {pinned.specifier} is only for {pinned.marker}"
    try:
        version = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        return f"Triton {pinned.specifier} is not installed"
    return None if version in pinned.specifier else f"Triton {version} is installed, not {pinned.specifier}"
