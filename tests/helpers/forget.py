"""Clears the caches of plans: a test that changes engines or tiles must not get a plan made before."""

from cupy_flash import plan


def forget_plans():
    """Plan every later problem anew."""
    plan.forget()
