"""Runs jax's own tests of jax.nn.dot_product_attention on cupy_flash.

PYTHONPATH=. python tests/adapters/sweep_jax.py JAX/tests/nn_test.py

JAX is a checkout of the installed version of jax; absl-py and scipy must be installed. A call that names an
implementation goes to cupy_flash.adapters.jax.dot_product_attention; a call that names none goes to jax, because the
tests use it as their reference. With --all, tests that never name an implementation run on cupy_flash too. The exit
status is 1 if a test fails.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import unittest

import jax

from cupy_flash.adapters.jax import dot_product_attention


def main() -> int:
    """Run the tests; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file")
    parser.add_argument("--all", action="store_true")
    arguments = parser.parse_args()
    original, calls = jax.nn.dot_product_attention, []

    def dispatched(*arrays, implementation=None, **options):
        if implementation is None and not arguments.all:
            return original(*arrays, **options)
        calls.append(options)
        return dot_product_attention(*arrays, implementation=implementation, **options)

    jax.nn.dot_product_attention = dispatched
    specification = importlib.util.spec_from_file_location("nn_test", arguments.file)
    module = importlib.util.module_from_spec(specification)
    sys.argv = sys.argv[:1]
    specification.loader.exec_module(module)
    names = [name for name in dir(module.NNFunctionsTest) if name.startswith("testDotProductAttention")]
    suite = unittest.TestSuite(map(module.NNFunctionsTest, names))
    result = unittest.TextTestRunner(verbosity=2).run(suite)
    print(f"{len(calls)} calls of {dot_product_attention.__module__}.dot_product_attention")
    return 0 if result.wasSuccessful() and calls else 1


if __name__ == "__main__":
    sys.exit(main())
