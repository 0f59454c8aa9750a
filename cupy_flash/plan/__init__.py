"""How a call runs: the engine, its tile and its launches, by measurement or by predicted cost."""
