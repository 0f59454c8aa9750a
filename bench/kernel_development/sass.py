"""The SASS instructions of a kernel's mainloop, disassembled by nvdisasm."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable
from operator import add
from pathlib import Path
from typing import NamedTuple

# Instruction classes; all other opcodes ("rest") are address arithmetic, predicates, branches, and accesses to tensor
# memory.
CLASSES = {
    "products": ("HMMA", "HGMMA", "QGMMA", "UTCHMMA"),
    "ldmatrix": ("LDSM",),
    "copies": ("LDGSTS", "UTMALDG"),
    "reductions": ("RED", "REDG", "UBLKRED", "UTMAREDG"),
    "exp": ("MUFU",),
    "float": ("FADD", "FMUL", "FFMA", "FMNMX", "FMNMX3", "FSEL", "FSETP", "FADD2", "FMUL2", "FFMA2"),
    "convert": ("F2FP", "F2F", "HADD2"),
    "shared": ("LDS",),
}


def disassembler() -> str:
    """Return the path of nvdisasm; if it is not found, the FileNotFoundError says what to install."""
    from cuda.pathfinder import find_nvidia_binary_utility

    path = find_nvidia_binary_utility("nvdisasm")
    if path is None:
        raise FileNotFoundError('nvdisasm was not found: python -m pip install "nvidia-cuda-nvdisasm>=13,<14"')
    return path


def disassemble(cubin: bytes) -> tuple[list[str], dict[str, int]]:
    """Return the instructions of a one-kernel cubin and, for each label, the index of the instruction after it."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.cubin"
        file.write_bytes(cubin)
        text = subprocess.run([disassembler(), "-c", str(file)], capture_output=True, text=True, check=True).stdout
    return parse(text)


class Wait(NamedTuple):
    """A wait of the mainloop, and how much work is issued before it."""

    instruction: str
    products: int  # matrix instructions issued before the wait in this iteration
    exps: int  # exponentials issued before the wait


class Mainloop(NamedTuple):
    """The instructions that one iteration of a mainloop executes.

    Of the paths through its body, the steady one has the most matrix instructions, then the most copies and
    reductions, then the fewest instructions: an unmasked tile whose row maxima need no rescaling, while the next tile
    is being loaded. The longest one has the most instructions: a masked tile that rescales.
    """

    steady: list[str]
    longest: list[str]

    def counts(self) -> dict[str, int]:
        """Return the number of instructions of the steady path by class (`CLASSES`, "rest")."""
        executed = Counter(map(opcode, self.steady))
        counts = {name: sum(executed.pop(each, 0) for each in opcodes) for name, opcodes in CLASSES.items()}
        return counts | {"rest": executed.total()}

    def waits(self) -> list[Wait]:
        """Return the waits of the steady path for copies, wgmma and mbarriers, in order."""
        waits, products, exps = [], 0, 0
        for instruction in self.steady:
            products += opcode(instruction) in CLASSES["products"]
            exps += opcode(instruction) in CLASSES["exp"]
            if "DEPBAR.LE" in instruction or "TRYWAIT" in instruction or instruction.startswith("BAR.SYNC"):
                waits.append(Wait(instruction, products, exps))
        return waits


def has_mainloop(cubin: bytes) -> bool:
    """Return whether a cubin has a loop with matrix instructions."""
    return bool(_matmul_loops(*disassemble(cubin)))


def _matmul_loops(instructions: list[str], labels: dict[str, int]) -> list[tuple[int, int]]:
    return [
        loop
        for loop in loops(instructions, labels)
        if _products(instructions, *loop) and shortest_round(instructions, labels, *loop)
    ]


def mainloop(cubin: bytes) -> Mainloop:
    """Return the mainloop of a one-kernel cubin: the innermost loop with the most matrix instructions."""
    instructions, labels = disassemble(cubin)
    matmul_loops = _matmul_loops(instructions, labels)
    # A persistent block's loop over work tiles encloses the mainloop and may contain matrix instructions itself.
    inner = [
        loop for loop in matmul_loops if not any(loop[0] < head and back <= loop[1] for head, back in matmul_loops)
    ]
    head, back = max(inner, key=lambda loop: (_products(instructions, *loop), loop[0] - loop[1]))
    return Mainloop(shortest_round(instructions, labels, head, back), longest_round(instructions, labels, head, back))


def row_loop(cubin: bytes, columns: int) -> Mainloop:
    """Return the loop of a role that loads `columns` of a row in each thread: the innermost one that waits.

    Loops over parts of the row, inside it, are repeated until they have loaded all columns from tensor memory.
    """
    instructions, labels = disassemble(cubin)
    row = _waiting_loop(instructions, labels, ("EX2",), 16)
    found = loops(instructions, labels)
    parts = {
        back: head
        for head, back in found
        if row[0] < head and back < row[1] and _has(("LDTM",), instructions, head, back)
    }

    def whole(worth: Worth) -> list[str]:
        path: list[int] = []
        for n in _best_path(instructions, labels, *row, worth):
            path.append(n)
            if n in parts:
                part = path[path.index(parts[n]) :]
                loaded = sum(int(re.findall(r"LDTM\.x(\d+)", instructions[each] + "LDTM.x0")[0]) for each in part)
                path += part * (columns // loaded - 1)
        return [instructions[n] for n in path]

    return Mainloop(whole(_steadiest), whole(_most))


def reduction_loop(cubin: bytes) -> Mainloop:
    """Return the loop of the role that adds to global memory, in bulk or not: the innermost one that waits."""
    instructions, labels = disassemble(cubin)
    loop = _waiting_loop(instructions, labels, ("UBLKRED", "REDG", "RED."), 1)
    return Mainloop(shortest_round(instructions, labels, *loop), longest_round(instructions, labels, *loop))


def _waiting_loop(
    instructions: list[str], labels: dict[str, int], names: tuple[str, ...], least: int
) -> tuple[int, int]:
    """Return the shortest loop that waits for an mbarrier and has at least so many instructions of these names."""
    waiting = [
        loop
        for loop in loops(instructions, labels)
        if _has(names, instructions, *loop) >= least
        and _has(("TRYWAIT",), instructions, *loop)
        and shortest_round(instructions, labels, *loop)
    ]
    return min(waiting, key=lambda loop: loop[1] - loop[0])


def _has(names: tuple[str, ...], instructions: list[str], head: int, back: int) -> int:
    return sum(any(name in each for name in names) for each in instructions[head : back + 1])


def parse(text: str) -> tuple[list[str], dict[str, int]]:
    """Return the instructions of a disassembly and, for each label, the index of the instruction after it."""
    instructions: list[str] = []
    labels: dict[str, int] = {}
    for line in text.splitlines():
        if label := re.match(r"\s*(\.L_\w+):", line):
            labels[label[1]] = len(instructions)
        elif instruction := re.match(r"\s*/\*[0-9a-f]{4,}\*/\s+(.*?);", line):
            instructions.append(instruction[1].strip())
    return instructions, labels


def opcode(instruction: str) -> str:
    """Return the opcode of an instruction without its predicate and modifiers."""
    return re.sub(r"^@!?U?P\w+\s+", "", instruction).split()[0].split(".")[0]


def target(instruction: str, labels: dict[str, int]) -> int | None:
    """Return the index of the instruction that a branch jumps to; None for other instructions."""
    branch = re.search(r"\bBRA\b.*`\((\.L_\w+)\)", instruction)
    return labels.get(branch[1]) if branch else None


def loops(instructions: list[str], labels: dict[str, int]) -> list[tuple[int, int]]:
    """Return the indices (first instruction, backward branch) of every loop."""
    bounds = []
    for n, instruction in enumerate(instructions):
        head = target(instruction, labels)
        if head is not None and head <= n:
            bounds.append((head, n))
    return bounds


def _products(instructions: list[str], head: int, back: int) -> int:
    return sum(opcode(instruction) in CLASSES["products"] for instruction in instructions[head : back + 1])


def shortest_round(instructions: list[str], labels: dict[str, int], head: int, back: int) -> list[str]:
    """Return the instructions on the steady path (see `Mainloop`) from `head` to the branch `back`.

    Inner loops count once. Empty if `back` is unreachable: a retry block at the end of the text branches back but is no
    loop.
    """
    return [instructions[n] for n in _best_path(instructions, labels, head, back, _steadiest)]


def longest_round(instructions: list[str], labels: dict[str, int], head: int, back: int) -> list[str]:
    """Return the instructions on the path from `head` to the branch `back` with the most instructions."""
    return [instructions[n] for n in _best_path(instructions, labels, head, back, _most)]


Worth = Callable[[str], tuple[int, int, int]]
MOVES = (*CLASSES["copies"], *CLASSES["reductions"])


def _steadiest(name: str) -> tuple[int, int, int]:
    return name in CLASSES["products"], name in MOVES, -1


def _most(name: str) -> tuple[int, int, int]:
    return 1, 0, 0


def _best_path(instructions: list[str], labels: dict[str, int], head: int, back: int, worth: Worth) -> list[int]:
    """Return the indices of the path from `head` to `back` whose summed `worth` of opcodes is the greatest.

    Sums are compared in lexicographic order.
    """
    best: dict[int, tuple[int, ...]] = {head: (0, 0, 0)}
    predecessor: dict[int, int] = {}
    for n in range(head, back):
        if n not in best:
            continue
        instruction = instructions[n]
        name = opcode(instruction)
        value = tuple(map(add, best[n], worth(name)))
        diverges = instruction.startswith("BRA.DIV")  # taken only by diverged lanes, so not on the steady path
        branch_target = None if diverges else target(instruction, labels)
        branches_always = name == "BRA" and not diverges and not re.match(r"@|BRA\S* !?U?P", instruction)
        successors = [] if branches_always or name in ("EXIT", "RET") and "@" not in instruction else [n + 1]
        if branch_target is not None and n < branch_target <= back:
            successors.append(branch_target)
        for successor in successors:
            if successor not in best or value > best[successor]:
                best[successor], predecessor[successor] = value, n
    if back not in best:
        return []
    path = [back]
    while path[-1] != head:
        path.append(predecessor[path[-1]])
    return path[::-1]
