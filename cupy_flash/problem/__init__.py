"""What a call computes: its options, the checks of its arrays, and the records that describe it."""
