"""Helpers for tests of keyed plans (cupy_flash/keyed_plan.py): a call served by a kept plan equals one planned anew.

`outcome` is a test file's function that makes a call. It returns the result, or an error, and whether a plan served it.
"""

from cupy_flash import keyed_plan


def posed(outcome, *call):
    """Return the result of a call while no plan is kept."""
    kept, keyed_plan._entries = keyed_plan._entries, {}
    result, was_served = outcome(*call)
    keyed_plan._entries = kept
    assert not was_served
    return result


def check_kept(outcome, inputs, options, others):
    """Keep the plan of a call, and check that it serves the call on `others`."""
    assert outcome(inputs, options) == (posed(outcome, inputs, options), False)
    assert outcome(others, options) == (posed(outcome, others, options), True)
