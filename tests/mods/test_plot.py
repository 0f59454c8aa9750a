"""The picture of a mask_mod shows every pair as the mask has it, and every tile with its class."""

import numpy as np
import pytest

from cupy_flash import Mod, noop_mask
from cupy_flash.mods.plot import HIDDEN, SEEN, SKIPPED, UNMASKED, picture, plot


def sliding(b, h, q, kv):
    return (q >= kv) & (q - kv < 12 + h)


def test_a_picture_shows_the_mask():
    i, j = np.arange(40)[:, None], np.arange(36)
    for head in (0, 5):
        pairs = picture(sliding, 40, 36, head=head, block_q=16, block_kv=8)
        np.testing.assert_array_equal((pairs == SEEN) | (pairs == UNMASKED), sliding(0, head, i, j))
        assert set(np.unique(pairs)) >= {SKIPPED, HIDDEN, SEEN}
        for start in range(0, 36, 8):
            tile = pairs[:16, start : start + 8]
            assert {SKIPPED} == set(np.unique(tile)) or not (tile == SKIPPED).any()
    assert (picture(sliding, 16, 32, block_q=16, block_kv=16)[:, 16:] == SKIPPED).all()
    assert (picture(Mod(mask_mod=sliding), 24, 24, head=9, block_q=4, block_kv=4)[12:16, 4:8] == UNMASKED).all()
    assert (picture(noop_mask, 5, 6) == UNMASKED).all()


def test_a_plot_shows_the_picture(tmp_path):
    pytest.importorskip("matplotlib")
    axes = plot(sliding, 40, 36, block_q=16, block_kv=8)
    np.testing.assert_array_equal(axes.images[0].get_array(), picture(sliding, 40, 36, block_q=16, block_kv=8))
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("kv_idx", "q_idx")
    assert plot(sliding, 16, 16, axes=axes) is axes
    axes.figure.savefig(tmp_path / "mask.png")
    assert (tmp_path / "mask.png").stat().st_size > 0
