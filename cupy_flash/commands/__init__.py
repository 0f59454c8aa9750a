"""The commands of python -m cupy_flash, one module each, with `add` to declare the command and `run` to execute it.

`run` returns the exit status; `__main__.main` prints the exceptions that it raises.
"""
