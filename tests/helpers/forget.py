"""Clears the caches of plans, so that a test which changes engines or tiles gets no plan made before the change."""

from cupy_flash.plan import plan


def forget_plans():
    """Clear the caches: every later problem is planned anew."""
    plan.forget()
