"""The checks of the simulator, drawn at warps, shared memory and global memory."""

from __future__ import annotations

from svg import Picture


def draw() -> dict[str, Picture]:
    picture = Picture(720, 372, "What the simulator checks")
    picture.text(20, 30, "What the simulator checks", "ink", 15, "start", bold=True)
    picture.text(20, 50, "PTX, instruction by instruction, for all threads in NumPy", "muted", 12, "start")
    picture.rect(20, 66, 420, 196, "panel", "line", rx=6)
    picture.text(32, 84, "thread block", "muted", 11.5, "start")
    for warp in range(4):
        x = 32 + warp * 100
        picture.box(x, 94, 88, 58, f"warp {warp}\nregisters", "q", size=12.5)
        picture.arrow([(x + 44, 152), (x + 44, 190)])
    picture.box(32, 190, 388, 56, "shared memory, mbarriers, barriers", "k", size=13)
    picture.box(20, 292, 420, 60, "global memory: arrays that the caller registered", "v", size=13)
    picture.arrow([(130, 292), (130, 246)], "s", 2)
    picture.text(140, 275, "cp.async, TMA: may land at any time", "s", 12, "start")
    checks = (
        (94, "q", ("registers of a wgmma in flight", "reads of what was never written")),
        (142, "q", ("deadlocks; a barrier that only", "some threads reach")),
        (190, "k", ("races: no barrier between accesses", "missing fences; misaligned reads")),
        (246, "s", ("early, late and random order must", "give the same result")),
        (302, "v", ("out of bounds, read-only arrays", "races between blocks")),
    )
    for y, color, lines in checks:
        picture.dot(462, y + 10, 5, color)
        for n, line in enumerate(lines):
            picture.text(476, y + 14 + n * 17, line, "ink", 12.5, "start")
    return {"simulator": picture}
