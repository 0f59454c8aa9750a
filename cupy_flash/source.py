"""Where the CUDA source text lives."""

from pathlib import Path


def kernel_folder() -> Path:
    """The folder of the .cu and .cuh files: in a wheel inside the package, else (editable, checkout) beside it.

    Raises FileNotFoundError, naming both places, when neither has it: the installation is broken.
    """
    package = Path(__file__).resolve().parent
    candidates = (package / "kernels_cu", package.parent / "kernels_cu")
    # importlib.resources would not do: it cannot find the folder in an editable install or a checkout.
    for folder in candidates:
        if (folder / "README.md").is_file():
            return folder
    raise FileNotFoundError(f"kernels_cu not found; looked in {candidates[0]} and {candidates[1]}")
