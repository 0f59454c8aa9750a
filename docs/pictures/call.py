"""The way of a call through the package."""

from __future__ import annotations

from svg import Picture

STEPS = (
    ("arrays", "pointer, shape,\nstrides, dtype", "q"),
    ("problem", "options, checks,\nerrors", "q"),
    ("plan", "engine, tile,\nlaunches", "k"),
    ("dispatch", "one of three\nbackends", "k"),
)
BACKENDS = (
    ("GPU", ("CUDA source", "NVRTC", "cubin", "CuPy launch"), "v"),
    ("simulator", ("CUDA source", "NVRTC", "PTX", "threads in NumPy"), "s"),
    ("CPU", ("tiles of Q, K, V", "NumPy", "BLAS"), "o"),
)


def draw() -> dict[str, Picture]:
    picture = Picture(720, 372, "The way of a call through the package")
    libraries = ("NumPy", "CuPy", "PyTorch", "JAX", "transformers")
    for n, name in enumerate(libraries):
        x = 20 + n * 138
        picture.box(x, 20, 128, 32, name, "panel", size=13)
        picture.arrow([(x + 64, 52), (x + 64, 72)])
    picture.box(
        20, 72, 680, 32, "attention(q, k, v, ...)  |  attention_varlen  |  attention_with_kv_cache", "q", size=13.5
    )
    for n, (name, words, color) in enumerate(STEPS):
        x = 20 + n * 174
        picture.box(x, 126, 158, 66, "", "panel", stroke=color)
        picture.text(x + 79, 146, name, color, 14, bold=True)
        for line, text in enumerate(words.split("\n")):
            picture.text(x + 79, 164 + line * 16, text, "muted", 11.5)
        if n:
            picture.arrow([(x - 16, 159), (x, 159)])
    picture.arrow([(99, 104), (99, 126)])
    picture.path([(621, 192), (621, 204), (10, 204), (10, 330)], "muted")
    for n, (name, steps, color) in enumerate(BACKENDS):
        y = 216 + n * 50
        picture.arrow([(10, y + 18), (20, y + 18)])
        picture.box(20, y, 110, 36, name, color, size=13.5, bold=True)
        for m, step in enumerate(steps):
            x = 154 + m * 139
            picture.arrow([(x - (24 if m == 0 else 16), y + 18), (x, y + 18)])
            picture.box(x, y, 123, 36, step, "paper", stroke=color, size=12.5)
    return {"call": picture}
