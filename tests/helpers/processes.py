"""Processes that end with the test that starts them."""

import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any


@contextmanager
def processes(*commands: list[str], **options: Any) -> Iterator[list[subprocess.Popen]]:
    """Run the commands at once and kill those that still run at the end.

    A failed test leaves no process, and no open pipe, whose ResourceWarning would fail another test.
    """
    with ExitStack() as stack:
        started = []
        for command in commands:
            started.append(stack.enter_context(subprocess.Popen(command, **options)))
            stack.callback(started[-1].kill)
        yield started
