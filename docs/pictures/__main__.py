"""Draw all pictures of the pages: python docs/pictures [FOLDER]."""

from __future__ import annotations

import sys
from pathlib import Path

from place import HERE, ROOT

sys.path.insert(0, str(ROOT))  # bench is not installed

import algorithm
import cache
import call
import derivatives
import heads
import masks
import plots
import ranks
import selection
import simulator
import training
import weights

MODULES = (algorithm, masks, heads, cache, ranks, training, call, simulator, plots, derivatives, weights, selection)

if __name__ == "__main__":
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else HERE
    for module in MODULES:
        for name, picture in module.draw().items():
            (folder / f"{name}.svg").write_text(picture.svg(), encoding="utf-8")
