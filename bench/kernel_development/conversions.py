"""Quantised KV caches: instructions that convert a pair of codes to 16 bits, in SASS, and predicted times of a decode.

A lane has the words of ldmatrix: of K four or eight codes of a key, of V with .trans two or four columns of two keys.
What a thread executes for 16 words less what it executes for 8 leaves out constants and addresses.

Marks: 2 instructions a pair, and at most 1.1 times the ratio of the bytes of a key and its value with their scales to
those of a 16-bit cache. The model of the decode has a launch and a merge, which do not shrink: eight sequences of 32768
keys and 8 heads of 128 hide them, one does not.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from cupy_flash.device import named
from cupy_flash.engines import mma_decode
from cupy_flash.jit import nvrtc
from cupy_flash.jit.source import CONFIG, Text, configure, kernel_folder
from cupy_flash.problem.build import pose_with_cache
from cupy_flash.problem.records import CacheOptions, Problem

from ..report import Table
from . import sass

MARK, TIME_MARK = 2.0, 1.1
WORDS = 8, 16
LEFT_OUT = ("LDG", "STG", "MOV", "IMAD")  # accesses to memory and moves of the counted kernel
KERNEL = """
extern "C" __global__ void convert(const unsigned int* x, unsigned int* y) {
  x += threadIdx.x, y += threadIdx.x;
#pragma unroll
  for (int n = 0; n < WORDS; n += 2) {
    unsigned int x0 = x[32 * n], x1 = x[32 * n + 32], pairs[8];
    BODY
#pragma unroll
    for (int m = 0; m < PAIRS; ++m) y[32 * (PAIRS / 2 * n + m)] = pairs[m];
  }
}
"""
PAIRS = """
    for (int part = 0; part < 2; ++part) {
      unsigned int b[2];
      CONVERT;
      pairs[2 * part] = b[0], pairs[2 * part + 1] = b[1];
    }
"""
BODIES = {
    "K": PAIRS.replace("CONVERT", "cvt_codes_x4(b, part ? x1 : x0, kv_element(), element())"),
    "V": PAIRS.replace("CONVERT", "cvt_column(b, x0, x1, part, kv_element(), element())"),
    "nibbles": "for (int m = 0; m < 8; ++m) pairs[m] = cvt_nibbles(m < 4 ? x0 : x1, m % 4, element());",
}
ARCHS = "sm_80", "sm_89", "sm_90a", "sm_120"
CODES = "int8", "float8_e4m3fn", "float8_e5m2", "uint8"
BATCHES, KEYS, PAGE, HEADS, DIM = (1, 8), 32768, 16, 8, 128


class Case(NamedTuple):
    """A conversion of codes to `element` on an architecture; of K or V if they differ."""

    arch: str
    codes: str  # a type of number.cuh, as `element`
    element: str
    words: str  # a key of BODIES


CASES = tuple(
    Case(arch, codes, element, words)
    for arch in ("sm_80", "sm_90a")  # without and with an instruction for e4m3
    for element in ("half16", "bfloat16")
    for codes in ("int8", "e4m3", "e5m2", "nibbles")
    for words in (("nibbles",) if codes == "nibbles" else ("K", "V"))
)


def count(case: Case) -> dict[str, float]:
    """Return the instructions of each opcode for a pair."""
    counts = [_executed(case, words) for words in WORDS]
    pairs = (WORDS[1] - WORDS[0]) * (4 if case.words == "nibbles" else 2)
    return {
        opcode: (counts[1][opcode] - counts[0][opcode]) / pairs
        for opcode in sorted(counts[1])
        if counts[1][opcode] != counts[0][opcode] and opcode not in LEFT_OUT
    }


def _executed(case: Case, words: int) -> Counter[str]:
    """Return how many instructions of each opcode convert this number of words."""
    folder = kernel_folder()
    constants: dict[str, Any] = {
        "element": case.element, "kv_element": case.codes, "SCALED_KV": True, "CODES_OF_4_BITS": case.codes == "nibbles"
    }  # fmt: skip
    text = Text(folder, *configure((folder / CONFIG).read_text(encoding="utf-8"), constants), {})
    text.inline("mma/cvt_codes.cuh", ())
    pairs = 8 if case.words == "nibbles" else 4
    kernel = KERNEL.replace("BODY", BODIES[case.words]).replace("WORDS", str(words)).replace("PAIRS", str(pairs))
    code, _ = sass.disassemble(nvrtc.compile("\n".join(text.lines) + kernel, "convert", case.arch).code)
    executed = code[: next(n for n, each in enumerate(code) if sass.opcode(each) == "EXIT")]
    return Counter(map(sass.opcode, executed))


def records() -> list[dict[str, Any]]:
    """Return the counts of all cases as rows of a JSON file."""
    return [{**case._asdict(), "instructions": count(case)} for case in CASES]


def predictions() -> list[dict[str, Any]]:
    """Return the predicted times of decodes of float16, and what they are of the ratio of bytes, as rows of JSON."""
    rows: list[dict[str, Any]] = []
    for arch, batch in itertools.product(ARCHS, BATCHES):
        plain = _seconds(arch, batch, "float16")
        for codes in CODES:
            seconds = _seconds(arch, batch, codes)
            of_bytes = seconds / plain * bytes_of_key("float16") / bytes_of_key(codes)
            rows.append(
                dict(arch=arch, batch=batch, codes=codes, ms=round(1e3 * seconds, 4), of_bytes=round(of_bytes, 3))
            )
    return rows


def bytes_of_key(dtype: str) -> float:
    """Return the bytes of a key and its value in one head, with their fp16 scales and zeros."""
    codes = _dtype(dtype).itemsize / (2 if dtype == "uint8" else 1)
    return 2 * (DIM * codes + {"uint8": 4, "float16": 0}.get(dtype, 2))


def _seconds(arch: str, batch: int, codes: str) -> float:
    problem, device = _posed(batch, codes), named(arch, "cuda")
    return min(mma_decode.seconds(problem, 0, device, tile) for tile in mma_decode.tiles(problem, device))


def _posed(batch: int, codes: str) -> Problem:
    """Pose a decode on few pages, and return the problem with all keys: the model reads no array."""
    pools = (2, PAGE, HEADS, DIM // (2 if codes == "uint8" else 1))
    names = {"uint8": ("k_scale", "v_scale", "k_zero", "v_zero"), "float16": ()}.get(codes, ("k_scale", "v_scale"))
    scales: dict[str, Any] = {name: np.ones(pools[:3], np.float16) for name in names}
    problem, _ = pose_with_cache(
        np.zeros((batch, 1, HEADS, DIM), np.float16), np.zeros(pools, _dtype(codes)), np.zeros(pools, _dtype(codes)),
        CacheOptions(
            cache_seqlens=np.ones(batch, np.int32), block_table=np.zeros((batch, 2), np.int32),
            **scales,
        ),
    )  # fmt: skip
    return problem._replace(kv_len=KEYS)


def _dtype(name: str) -> np.dtype:
    return np.dtype(getattr(ml_dtypes, name, name))


def table(rows: Sequence[dict[str, Any]]) -> Table:
    """Return the rows of a JSON file as a table."""
    return Table(
        f"Conversions of codes: SASS instructions a pair (mark {MARK:g})",
        ["GPU", "codes", "to", "words of", "a pair", "of which"],
        [
            [
                row["arch"],
                row["codes"],
                row["element"],
                "K, V" if row["words"] == "nibbles" else row["words"],
                f"{sum(row['instructions'].values()):.2f}",
                ", ".join(f"{opcode} {number:.3g}" for opcode, number in row["instructions"].items()),
            ]
            for row in rows
        ],
    )


def table_of_times(rows: Sequence[dict[str, Any]]) -> Table:
    """Return the predicted times of a JSON file as a table."""
    by_case: dict[tuple[str, int], list[str]] = {}
    for row in rows:
        by_case.setdefault((row["arch"], row["batch"]), []).append(f"{row['ms']:.4f}, {row['of_bytes']:.2f}")
    return Table(
        f"Decodes of one token on {KEYS} keys, {HEADS} heads, D {DIM}, float16: predicted ms, and that time over the "
        f"time of a cache in float16, divided by the ratio of bytes (mark {TIME_MARK} for {BATCHES[-1]} sequences)",
        ["GPU", "sequences", *CODES],
        [[arch, str(batch), *cells] for (arch, batch), cells in by_case.items()],
    )
