"""The commands of python -m cupy_flash, a module each: `add` declares the command, `run` executes it.

`run` returns the exit status; `__main__.main` prints the exceptions that it raises.
"""
