"""The commands of python -m cupy_flash, one module each, with `add` to declare the command and `run` to execute it.

`run` returns the exit status; `__main__.main` prints the exceptions that it raises.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from argparse import ArgumentParser, _SubParsersAction
    from typing import TypeAlias

    Commands: TypeAlias = _SubParsersAction[ArgumentParser]  # the argument of `add`
