"""Where the bytes of a training step go, by the planner."""

from __future__ import annotations

from cupy_flash.memory import ATTENTIONS, GB, KEPT, PARTS, Training, estimate, load
from svg import Picture

MODEL, BATCH, LENGTH, FSDP, CARD = "llama2-7b", 1, 4096, 8, 80
COLORS = {
    "parameters": "q",
    "working": "line",
    "gradients": "v",
    "optimizer": "s",
    "blocks": "k",
    "recomputed": "alarm",
    "ends": "o",
}


def draw() -> dict[str, Picture]:
    picture = Picture(720, 330, "Where the bytes of a training step go")
    words = f"{MODEL}, {BATCH} sequence of {LENGTH} tokens, {FSDP} GPUs (FSDP), mixed precision"
    picture.text(20, 30, "Where the bytes of a training step go", "ink", 15, "start", bold=True)
    picture.text(20, 50, words, "muted", 12, "start")
    x, right = 212, 620
    scale = (right - x) / CARD
    setups = [
        (attention, checkpoint)
        for attention in ATTENTIONS
        for checkpoint in KEPT
        if (attention, checkpoint) != ("flash", "selective")  # flash attention stores no scores
    ]
    for n, (attention, checkpoint) in enumerate(setups):
        y = 70 + n * 36
        training = Training(BATCH, LENGTH, attention, checkpoint, fsdp=FSDP)
        memory = estimate(load(MODEL), training)
        picture.text(20, y + 17, f"{attention}, checkpoint {checkpoint}", "ink", 12, "start")
        at = float(x)
        for part in PARTS:
            width = getattr(memory, part) / GB * scale
            if width > 0.5:
                picture.rect(at, y, width - 1, 25, COLORS[part], rx=1)
            at += width
        picture.text(700, y + 17, f"{memory.total / GB:.1f} GB", "ink", 12, "end", bold=attention == "flash")
    picture.path([(right, 62), (right, 250)], "ink", 1.2, dashed=True)
    picture.text(right, 56, f"{CARD} GB", "muted", 11)
    parts = list(PARTS.items())
    for row in (parts[:3], parts[3:5], parts[5:]):
        y = 276 + 20 * (row != parts[:3]) + 20 * (row == parts[5:])
        picture.legend(20, y, {words: COLORS[part] for part, words in row})
    return {"training": picture}
