"""How the ranks of a group talk: what they agree on, and what they send. NCCL on GPUs, gloo on CPUs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import distributed
from torch.distributed.device_mesh import DeviceMesh

REFUSED = 0  # in place of a digest, by a rank whose call is wrong


class Arrival(NamedTuple):
    """Tensors on their way here."""

    tensors: list[Any]
    works: list[Any]

    def wait(self) -> list[Any]:
        """The tensors, once what was sent has left and they have come; the group's timeout applies."""
        for work in self.works:
            work.wait()
        self.works.clear()  # a work keeps what it sent
        return self.tensors


class Channel(NamedTuple):
    """A process group and the place of this process in it: ranks here are 0 .. ranks - 1 of the group."""

    group: Any
    rank: int
    ranks: int

    @classmethod
    def of(cls, function: str, group: Any) -> Channel:
        """The channel of a ProcessGroup, a DeviceMesh of one dimension, or None for all processes."""
        if not distributed.is_available() or not distributed.is_initialized():
            raise RuntimeError(f"{function}: torch.distributed.init_process_group has not been called")
        if isinstance(group, DeviceMesh):
            if group.ndim != 1:
                raise ValueError(
                    f"{function}: a DeviceMesh must have one dimension, not {group.ndim}; take a slice of it"
                )
            group = group.get_group()
        group = distributed.group.WORLD if group is None else group
        if group is distributed.GroupMember.NON_GROUP_MEMBER:
            raise ValueError(f"{function}: this process, rank {distributed.get_rank()}, is not in the group")
        return cls(group, distributed.get_rank(group), distributed.get_world_size(group))

    @contextmanager
    def agreement(self, function: str, check_ranks: bool) -> Iterator[dict[str, Any]]:
        """Around a rank's own checks of its call, which fill in the words that all ranks must say alike.

        ValueError, on every rank, where they do not, or where the checks of another rank raise. Before anything else
        is sent: ranks that expect other sizes would wait for each other. Where they agree, one int64 per rank is all
        that is sent; without check_ranks nothing is.
        """
        compares = check_ranks and self.ranks > 1
        words: dict[str, Any] = {}
        try:
            yield words
            digest = self._digest(function, words) if compares else None
        except Exception as error:
            if compares and not self._all_have(torch.tensor([REFUSED], device=self._device)):
                self._everyone({"function": function, "refused": str(error)})
            raise
        if compares and not self._all_have(digest):
            raise ValueError(self._differences(function, words))

    @property
    def _device(self) -> Any:
        """Where the group can gather numbers, best in host memory; for NCCL the current device."""
        kinds = [pair.split(":")[0] for pair in distributed.get_backend_config(self.group).split(",")]
        return torch.device("cpu" if "cpu" in kinds else kinds[0])

    def _digest(self, function: str, words: dict[str, Any]) -> Any:
        """int64 (1,) of the words. A seed is mixed in last: one that lies on a device is not read by the host."""
        text = repr((function, *(item for item in words.items() if item[0] != "seed")))
        bits = int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)
        digest = torch.tensor([bits], device=self._device)
        seed = words["seed"]
        if seed is None:
            return digest
        if not isinstance(seed, torch.Tensor):
            seed = torch.from_numpy(np.asarray(seed).reshape(1).astype(np.uint64).view(np.int64))
        return digest ^ seed.reshape(1).to(self._device)

    def _all_have(self, digest: Any) -> bool:
        """Whether the digests of all ranks are equal. The host waits for them."""
        everyone = digest.new_empty(self.ranks)
        distributed.all_gather(list(everyone.split(1)), digest, group=self.group)
        return len(set(everyone.tolist())) == 1

    def _everyone(self, words: dict[str, Any]) -> list[dict[str, Any]]:
        """The words of all ranks, once it is known that they differ."""
        everyone: list[Any] = [None] * self.ranks
        distributed.all_gather_object(everyone, words, group=self.group)
        return everyone

    def _differences(self, function: str, words: dict[str, Any]) -> str:
        """What the ranks say that differs, or that some of them refused."""
        seed = words["seed"]
        seed = seed.item() % 2**64 if isinstance(seed, torch.Tensor) else seed
        everyone = self._everyone(words | {"function": function, "seed": seed})
        refused = [(rank, other["refused"]) for rank, other in enumerate(everyone) if "refused" in other]
        if refused:
            lines = [f"{function}: of the {self.ranks} ranks of the group some have refused their call"]
            return "\n".join(lines + [f"  - rank {rank}: {reason}" for rank, reason in refused])
        names = [name for name in everyone[0] if any(other.get(name) != everyone[0][name] for other in everyone)]
        lines = [f"{function}: the {self.ranks} ranks of the group must ask for the same, and do not"]
        lines += [
            f"  - {name}: " + ", ".join(f"{other.get(name)} on rank {rank}" for rank, other in enumerate(everyone))
            for name in names
        ]
        return "\n".join(lines)

    def exchange(self, tensors: Sequence[Any], shift: int, shapes: Sequence[tuple[int, ...]]) -> Arrival:
        """Starts to send contiguous tensors `shift` ranks on, and to receive those of these shapes from as far behind.

        Every rank calls it with the same shift, at the same place of its run. What has no elements is not sent.
        """
        arriving = [tensor.new_empty(shape) for tensor, shape in zip(tensors, shapes, strict=True)]
        # torch counts peers over all processes, whoever is in the group.
        to, source = (
            distributed.get_global_rank(self.group, (self.rank + way) % self.ranks) for way in (shift, -shift)
        )
        operations = [
            distributed.P2POp(operation, tensor, peer, self.group)
            for operation, peer, moved in ((distributed.isend, to, tensors), (distributed.irecv, source, arriving))
            for tensor in moved
            if tensor.numel()
        ]
        return Arrival(arriving, distributed.batch_isend_irecv(operations) if operations else [])

    def trade(self, pieces: Sequence[Any], shapes: Sequence[tuple[int, ...]]) -> list[Any]:
        """All to all: piece r goes to rank r; what comes back from rank r has shape r."""
        leaving = torch.cat([piece.reshape(-1) for piece in pieces])
        sizes = [prod(shape) for shape in shapes]
        arriving = leaving.new_empty(sum(sizes))
        distributed.all_to_all_single(arriving, leaving, sizes, [piece.numel() for piece in pieces], group=self.group)
        return [part.view(shape) for part, shape in zip(arriving.split(sizes), shapes, strict=True)]
