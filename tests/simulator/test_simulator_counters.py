"""Counters of the simulator against counts by hand."""

import numpy as np
import pytest
from micro import run

from cupy_flash.simulator.counters import shared_wavefronts

TILE = ".shared .align 16 .b8 tile[16384];"
LANES = np.arange(32)


def count_by_hand(words, width):
    """Return the wavefronts of one warp: the sum over its parts of the most distinct words in one bank.

    A part is a quarter of the warp for 16-byte accesses, half for 8 bytes, and the whole warp for 4 bytes.
    """
    parts, per_lane = {4: (1, 1), 8: (2, 2), 16: (4, 4)}[width]
    total = 0
    for lanes in np.split(np.asarray(words), parts):
        touched = {int(word) + i for word in lanes for i in range(per_lane)}
        total += max(sum(1 for word in touched if word % 32 == bank) for bank in range(32))
    return total


PATTERNS = {
    "consecutive": LANES,
    "broadcast": 0 * LANES,
    "stride 2": 2 * LANES,
    "stride 32": 32 * LANES,
    "stride 33": 33 * LANES,
    "two rows": 40 * (LANES % 2),
    "random": np.random.default_rng(0).integers(0, 4000, 32),
}


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("width", [4, 8, 16])
def test_wavefronts_equal_counts_by_hand(width, pattern):
    words = PATTERNS[pattern] * (width // 4)
    parts = {4: 1, 8: 2, 16: 4}[width]
    assert shared_wavefronts(words[None], None, width) == (count_by_hand(words, width), parts)


def test_inactive_lanes_are_not_counted():
    mask = LANES < 3
    assert shared_wavefronts(32 * LANES[None], mask[None], 4) == (3, 1)


def test_bank_conflicts_name_the_instruction():
    out = np.zeros(64, np.uint32)
    body = """
        mov.u32 %r0, tile;
        mad.lo.u32 %r1, %t, {}, %r0;
        st.shared.b32 [%r1], %t;
        mad.wide.u32 %d0, %t, 4, %p0;
        st.global.b32 [%d0], %t;
    """
    assert run(body.format(4), out, shared=TILE, threads=64, blocks=3).bank_conflicts == 0
    counters = run(body.format(256), out, shared=TILE, threads=64, blocks=3)
    ((instruction, access),) = counters.conflicting()
    assert instruction.text == "st.shared.b32 [%r1], %t;"
    assert (access.requests, access.wavefronts, access.ideal) == (6, 6 * 32, 6)
    assert counters.bank_conflicts == 6 * 31


def test_blocks_with_different_addresses_are_counted_separately():
    body = """
        mov.u32 %r0, tile;
        add.u32 %r2, %block, 1;
        mul.lo.u32 %r2, %r2, 4;
        mad.lo.u32 %r1, %t, %r2, %r0;
        st.shared.b32 [%r1], %t;
    """
    counters = run(body, shared=TILE, blocks=2)
    assert sum(access.wavefronts for access in counters.shared.values()) == 1 + 2


def test_global_bytes_and_sectors():
    given, out = np.zeros(4096, np.float32), np.zeros(64, np.float32)
    body = """
        mad.wide.u32 %d0, %t, {}, %p0;
        ld.global.f32 %f0, [%d0];
        mad.wide.u32 %d1, %t, 4, %p1;
        setp.ge.u32 %q0, %t, 40;
        @%q0 exit;
        st.global.f32 [%d1], %f0;
    """
    counters = run(body.format(4), given, out, threads=64)
    assert (counters.global_bytes_read, counters.global_bytes_written) == (64 * 4, 40 * 4)
    # 32 lanes x 4 bytes are 4 sectors; 8 lanes of the second warp store 1 sector.
    assert list(counters.sectors_per_request().values()) == [4.0, 2.5]
    assert list(run(body.format(128), given, out, threads=64).sectors_per_request().values()) == [32.0, 2.5]


def test_vectors_count_their_bytes():
    given = np.zeros(512, np.float32)
    body = "mad.wide.u32 %d0, %t, 16, %p0; ld.global.v4.f32 {%f0, %f1, %f2, %f3}, [%d0];"
    counters = run(body, given, threads=128)
    assert counters.global_bytes_read == 2048 and list(counters.sectors_per_request().values()) == [16.0]


def test_instructions_by_class_and_source_line():
    body = """
        .loc 1 5 1
        mov.u32 %r0, 0;
    LOOP:
        .loc 1 6 1
        fma.rn.f32 %f0, %f0, %f0, %f0;
        ex2.approx.ftz.f32 %f1, %f0;
        .loc 1 7 1
        add.u32 %r0, %r0, 1;
        setp.lt.u32 %q0, %r0, 10;
        @%q0 bra LOOP;
        .loc 1 8 1
        bar.sync 0;
    """
    counters = run(body, threads=96, blocks=2, variables='.file 1 "loop.cu"')
    classes = counters.by_class()
    warps = 6
    assert classes["fma"] == classes["mufu"] == 10 * warps and classes["sync"] == warps
    assert classes["alu"] == 20 * warps and classes["control"] == 10 * warps + warps
    lines = counters.by_source_line()
    assert lines["loop.cu", 6] == {"fma": 10 * warps, "mufu": 10 * warps}
    assert lines["loop.cu", 7] == {"alu": 20 * warps, "control": 10 * warps}


def test_threads_are_counted_where_they_diverge():
    body = "setp.lt.u32 %q0, %t, 5; @%q0 bra SKIP; add.u32 %r0, %r0, 1; SKIP:"
    counters = run(body, threads=32)
    code = counters.function.instructions
    (add,) = (i for i, instruction in enumerate(code) if instruction.opcode == "add")
    assert counters.warp_instructions[add] == 1 and counters.thread_instructions[add] == 27
