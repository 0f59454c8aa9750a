"""What a GPU executes of a kernel: the instructions of its steady loop, from NVIDIA's disassembler."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from pathlib import Path

# Every opcode of the loop is one of these classes; the rest are addresses, conditions and branches.
CLASSES = {
    "products": ("HMMA", "HGMMA"),
    "ldmatrix": ("LDSM",),
    "copies": ("LDGSTS", "UTMALDG"),
    "exp": ("MUFU",),
    "float": ("FADD", "FMUL", "FFMA", "FMNMX", "FMNMX3", "FSEL", "FSETP"),
    "convert": ("F2FP", "F2F", "HADD2"),
    "shared": ("LDS",),
}


def disassembler() -> str:
    """The path of nvdisasm; FileNotFoundError with what to install where there is none."""
    from cuda.pathfinder import find_nvidia_binary_utility

    path = find_nvidia_binary_utility("nvdisasm")
    if path is None:
        raise FileNotFoundError('nvdisasm was not found: python -m pip install "nvidia-cuda-nvdisasm>=13,<14"')
    return path


def disassemble(cubin: bytes) -> tuple[list[str], dict[str, int]]:
    """The instructions of a cubin of one kernel, and which of them each label stands before."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.cubin"
        file.write_bytes(cubin)
        text = subprocess.run([disassembler(), "-c", str(file)], capture_output=True, text=True, check=True).stdout
    return parse(text)


def steady_loop(cubin: bytes) -> dict[str, int]:
    """How many instructions of each class (`CLASSES`, "rest") one round of the inner loop with most products executes.

    Of the ways round, the one with most products, then most copies, then fewest instructions: a tile that no mask cuts
    through, none of whose maxima outgrows its reference, while the next tile is copied.
    """
    instructions, labels = disassemble(cubin)
    multiply = [
        loop
        for loop in loops(instructions, labels)
        if _products(instructions, *loop) and shortest_round(instructions, labels, *loop)
    ]
    # A loop over tiles of queries holds that over tiles of keys, and may hold products of its own.
    inner = [loop for loop in multiply if not any(loop[0] < head and back <= loop[1] for head, back in multiply)]
    head, back = max(inner, key=lambda loop: (_products(instructions, *loop), loop[0] - loop[1]))
    executed = Counter(map(opcode, shortest_round(instructions, labels, head, back)))
    found = {name: sum(executed.pop(each, 0) for each in opcodes) for name, opcodes in CLASSES.items()}
    return found | {"rest": executed.total()}


def parse(text: str) -> tuple[list[str], dict[str, int]]:
    """The instructions of a disassembly, and which of them each label stands before."""
    instructions: list[str] = []
    labels: dict[str, int] = {}
    for line in text.splitlines():
        if label := re.match(r"\s*(\.L_\w+):", line):
            labels[label[1]] = len(instructions)
        elif instruction := re.match(r"\s*/\*[0-9a-f]{4,}\*/\s+(.*?);", line):
            instructions.append(instruction[1].strip())
    return instructions, labels


def opcode(instruction: str) -> str:
    return re.sub(r"^@!?U?P\w+\s+", "", instruction).split()[0].split(".")[0]


def target(instruction: str, labels: dict[str, int]) -> int | None:
    """Where a branch goes; None for anything else."""
    found = re.search(r"\bBRA\b.*`\((\.L_\w+)\)", instruction)
    return labels.get(found[1]) if found else None


def loops(instructions: list[str], labels: dict[str, int]) -> list[tuple[int, int]]:
    """(first instruction, branch back) of every loop."""
    found = []
    for n, instruction in enumerate(instructions):
        head = target(instruction, labels)
        if head is not None and head <= n:
            found.append((head, n))
    return found


def _products(instructions: list[str], head: int, back: int) -> int:
    return sum(opcode(instruction) in CLASSES["products"] for instruction in instructions[head : back + 1])


def shortest_round(instructions: list[str], labels: dict[str, int], head: int, back: int) -> list[str]:
    """The instructions of the way from `head` to the branch `back` that `steady_loop` means; inner loops run once. None
    where no way leads there: what waits again from the end of the text goes back, but is no loop."""
    best: dict[int, tuple[int, int, int]] = {head: (0, 0, 0)}
    came_from: dict[int, int] = {}
    for n in range(head, back):
        if n not in best:
            continue
        instruction = instructions[n]
        products, copies, length = best[n]
        name = opcode(instruction)
        value = (products + (name in CLASSES["products"]), copies + (name in CLASSES["copies"]), length - 1)
        goes_to = target(instruction, labels)
        branches_always = name == "BRA" and not re.match(r"@|BRA\S* !?U?P", instruction)
        following = [] if branches_always or name in ("EXIT", "RET") and "@" not in instruction else [n + 1]
        if goes_to is not None and n < goes_to <= back:
            following.append(goes_to)
        for successor in following:
            if value > best.get(successor, (-1, -1, 0)):
                best[successor], came_from[successor] = value, n
    if back not in best:
        return []
    way = [back]
    while way[-1] != head:
        way.append(came_from[way[-1]])
    return [instructions[n] for n in reversed(way)]
