"""python -m bench ring: memory per rank decreases with the number of ranks, and matches the formula."""

import json
import shlex
from dataclasses import replace

import pytest

from bench import ring
from bench.__main__ import main
from bench.kernel_development.tables import block
from bench.model import Case

# A large batch of short sequences takes much memory and little computation. The ring shards positions.
ARGUMENTS = shlex.split(
    "--batch 16 --heads 4 --kv-heads 2 --head-dim 64 --seqlens 1024 --ranks 2,4 --repeats 1 --threads 1"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    out = tmp_path_factory.mktemp("ring")
    assert main(["ring", *ARGUMENTS, "--out", str(out)]) == 0
    return out


@pytest.mark.exhaustive
def test_memory_per_rank(folder):
    two, four = json.loads((folder / "ring.json").read_text())["ring"]["cases"]
    assert (two["ranks"], four["ranks"]) == (2, 4)
    assert four["held"] == two["held"] / 2
    assert 0.4 < four["peak"] / two["peak"] < 0.65
    for record in (two, four):
        # `held` is an estimate: its parts need not reach their maxima at the same time, and it omits workspaces.
        assert 0.75 < record["peak"] / record["held"] < 1.35
        assert len(record["seconds"]) == 1 and record["seconds"][0] > 0


@pytest.mark.exhaustive
def test_tables(folder):
    text = block("ring", folder)
    assert "--ranks 2,4 --repeats 1" in text
    record = json.loads((folder / "ring.json").read_text())["ring"]["cases"][0]
    assert f"| 1024 | {record['peak'] / 2**20:.0f} ({record['held'] / 2**20:.0f}) |" in text
    assert "1,048,576 tokens" in text


def test_bytes_held_equal_a_count_by_hand():
    case = Case(batch=2, heads=6, kv_heads=2, head_dim=16, seqlen=64, dtype="bfloat16", causal=True)
    q, kv, lse = 2 * 6 * 16 * 16, 2 * 2 * 2 * 16 * 16, 2 * 6 * 16
    assert ring.held(case, 4) == {
        "kept": 2 * (q + kv + q) + 4 * lse,
        "dout": 2 * q,
        "dq": 4 * q,
        "keys": 2 * 2 * kv,
        "gradients": 3 * 4 * kv,
        "parts": q + kv,
    }
    alone = ring.held(replace(case, seqlen=16), 1)
    assert (alone["keys"], alone["gradients"]) == (0, 4 * kv)


def test_a_length_that_zigzag_cannot_divide_is_refused(tmp_path):
    with pytest.raises(SystemExit, match="1023 is not a multiple of 4"):
        main(["ring", "--seqlens", "1023", "--ranks", "2", "--out", str(tmp_path)])
