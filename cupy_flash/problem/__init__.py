"""What a call asks: options, the checks of its arrays, and the records that describe it."""
