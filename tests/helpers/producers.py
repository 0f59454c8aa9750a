"""Makes arrays of every framework from NumPy arrays, and stand-ins for unknown libraries with DLPack or the
array API.
"""

from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import torch

from cupy_flash import arrays


class Producer:
    """An array of an unknown library that exports DLPack 1.x; wraps a NumPy array or a torch tensor."""

    def __init__(self, array, device=(1, 0), patch=lambda tensor: None):
        self.array, self.device_, self.patch = array, device, patch
        self.requested = {}

    def __dlpack_device__(self):
        return self.device_

    def __dlpack__(self, *, stream=None, max_version=None):
        self.requested = {"stream": stream, "max_version": max_version}
        capsule = self.array.__dlpack__(max_version=max_version)
        self.patch(arrays._read_capsule(capsule)[0])
        return capsule


class OldProducer(Producer):
    """A producer of DLPack before 1.0: its __dlpack__ has no max_version and returns an unversioned capsule."""

    def __dlpack__(self, *, stream=None):
        return super().__dlpack__(stream=stream)


class NamespaceProducer(Producer):
    """A producer with an array API namespace; its `from_dlpack` imports into torch."""

    device = property(lambda self: self.array.device)

    def __array_namespace__(self):
        return SimpleNamespace(from_dlpack=lambda x: NamespaceProducer(torch.from_dlpack(x)))

    def tolist(self):
        return self.array.tolist()


def to_torch(array):
    """Make a torch tensor of the same values; torch.tensor refuses arrays with dtypes of ml_dtypes."""
    return torch.tensor(array.astype(np.float64)).to(getattr(torch, array.dtype.name))


MAKERS = {
    "numpy": lambda array: array,
    "torch": to_torch,
    "jax": jnp.asarray,
    "dlpack": lambda array: Producer(to_torch(array)),
    "old_dlpack": lambda array: OldProducer(to_torch(array)),
    "namespace": lambda array: NamespaceProducer(to_torch(array)),
}
