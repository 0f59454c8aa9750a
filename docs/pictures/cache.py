"""A KV cache in pages: the table of pages, a step that appends a key, and its query."""

from __future__ import annotations

from svg import Picture

PAGE = 4
# sequence: (colour, its pages in the pool, its keys before the step)
SEQUENCES = (("q", (5, 1), 6), ("k", (3,), 2), ("v", (0, 7, 2), 9))
PAGES = 8


def draw() -> dict[str, Picture]:
    picture = Picture(720, 330, "Pages of a KV cache, and a step that appends one key to each sequence")
    picture.text(20, 30, "Pages of a KV cache", "ink", 15, "start", bold=True)
    words = "attention_with_kv_cache writes the new k and v to their page, and reads the keys through the table"
    picture.text(20, 50, words, "muted", 12, "start")
    table(picture)
    pool(picture)
    return {"pages": picture}


def table(picture: Picture) -> None:
    picture.text(20, 84, "cache_seqlens", "muted", 11.5, "start")
    picture.text(128, 84, "block_table", "muted", 11.5, "start")
    for n, (color, pages, keys) in enumerate(SEQUENCES):
        y = 94 + n * 46
        picture.box(20, y, 84, 34, f"{keys} + 1", "panel", size=12.5, stroke=color)
        for at in range(3):
            number = str(pages[at]) if at < len(pages) else ""
            picture.box(128 + at * 40, y, 36, 34, number, color if at < len(pages) else "paper", size=13)
    picture.text(20, 252, "one query of each sequence,", "ink", 12.5, "start")
    picture.text(20, 270, "as in a decode; prompts append", "ink", 12.5, "start")
    picture.text(20, 288, "many rows in the same call", "ink", 12.5, "start")


def pool(picture: Picture) -> None:
    picture.text(300, 84, "the pool: pages of 4 keys and values, in any order", "muted", 11.5, "start")
    owner = {page: (n, at) for n, (_, pages, _) in enumerate(SEQUENCES) for at, page in enumerate(pages)}
    for page in range(PAGES):
        x, y = 300 + page % 4 * 102, 94 + page // 4 * 100
        picture.rect(x, y, 94, 78, "panel", "line")
        picture.text(x + 47, y + 17, f"page {page}", "muted", 11)
        for row in range(PAGE):
            at = (x + 8 + row * 20, y + 26, 17, 42)
            if page not in owner:
                picture.rect(*at, "paper", "line", rx=2)
                continue
            sequence, place = owner[page]
            color, _, keys = SEQUENCES[sequence]
            key = place * PAGE + row
            if key < keys:
                picture.rect(*at, color, rx=2)
            elif key == keys:
                picture.box(*at, "+", "paper", color, 15, stroke=color, bold=True)
            else:
                picture.rect(*at, "paper", "line", rx=2)
    picture.text(300, 316, "+ the appended key and value", "ink", 12.5, "start")
    picture.text(500, 316, "page 4, page 6: free", "muted", 12.5, "start")
