"""Tensor maps: an error lists every reason for which the driver would refuse one; both encodings keep all arguments."""

import ctypes
from types import SimpleNamespace

import pytest

from cupy_flash.gpu import tensor_map as module
from cupy_flash.gpu.tensor_map import (
    ALIGNMENT,
    BYTES,
    DATA_TYPES,
    TensorMap,
    decode,
    encode_for_gpu,
    encode_for_simulator,
)

GOOD = {
    "data_type": DATA_TYPES["bf16"],
    "address": 1 << 46,
    "shape": (128, 1000, 8, 2),
    "strides": (8 * 256, 256, 8 * 256 * 1000),
    "box": (64, 128, 1, 1),
    "swizzle": 128,
    "l2_promotion": 128,
}


@pytest.mark.parametrize("rank", range(1, 5))
def test_encoding_keeps_every_argument(rank):
    cut = {"shape": GOOD["shape"][:rank], "strides": GOOD["strides"][: rank - 1], "box": GOOD["box"][:rank]}
    tensor_map = TensorMap(**(GOOD | cut))
    encoded = encode_for_simulator(tensor_map)
    assert len(encoded) == BYTES
    assert decode(encoded) == tensor_map


def test_driver_is_given_every_argument(monkeypatch):
    calls = []

    def encode_tiled(out, *arguments):
        assert out.value % ALIGNMENT == 0
        ctypes.memmove(out, bytes(range(128)), BYTES)
        calls.append([list(x) if isinstance(x, ctypes.Array) else x.value for x in arguments])
        return 0

    monkeypatch.setattr(module, "driver", lambda: SimpleNamespace(cuTensorMapEncodeTiled=encode_tiled))
    assert encode_for_gpu(TensorMap(**GOOD)) == bytes(range(128))
    dimensions = [list(GOOD["shape"]), [*GOOD["strides"], 0], list(GOOD["box"]), [1] * 4]
    # CUtensorMapDataType BFLOAT16, interleave NONE, SWIZZLE_128B, L2_128B, OOB_FILL_NONE
    assert calls == [[9, 4, GOOD["address"], *dimensions, 0, 3, 2, 0]]


def test_drivers_refusal_is_an_error(monkeypatch):
    refusing = SimpleNamespace(cuTensorMapEncodeTiled=lambda *arguments: 1)
    monkeypatch.setattr(module, "driver", lambda: refusing)
    with pytest.raises(RuntimeError, match="refuses TensorMap.*CUDA error 1"):
        encode_for_gpu(TensorMap(**GOOD))


def test_other_bytes_are_not_decoded():
    assert decode(bytes(BYTES)) is None


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"data_type": 13}, "data_type 13 is unknown"),
        ({"shape": ()}, "1 to 5 dimensions"),
        ({"strides": (2048, 256)}, "strides one fewer"),
        ({"address": 8}, "address must be a multiple of 16"),
        ({"shape": (0, 1, 1, 1)}, r"dimensions must be 1 to 2\*\*32"),
        ({"strides": (8, 256, 256)}, "strides must be multiples of 16"),
        ({"box": (64, 257, 1, 1)}, "1 to 256 elements"),
        ({"box": (4, 1, 1, 1)}, "multiples of 16 bytes"),
        ({"box": (128, 1, 1, 1)}, "not be longer than the 128 bytes"),
        ({"swizzle": 48}, "swizzle must be"),
        ({"l2_promotion": 1}, "l2_promotion must be"),
    ],
)
def test_refusals_of_the_driver(changed, reason):
    with pytest.raises(ValueError, match=reason):
        TensorMap(**(GOOD | changed))


def test_every_reason_at_once():
    with pytest.raises(ValueError, match=r"address .*; strides .*; the box's rows"):
        TensorMap(**(GOOD | {"address": 1, "strides": (1, 1, 1), "box": (4, 1, 1, 1)}))
