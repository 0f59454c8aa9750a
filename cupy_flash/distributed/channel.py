"""How the ranks of a group talk: what they agree on, and what they send. NCCL on GPUs, gloo on CPUs."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import distributed
from torch.distributed.device_mesh import DeviceMesh

REMEMBERED = 4096  # agreements per group; all ranks forget at the same call

_agreed: WeakKeyDictionary[Any, set[Any]] = WeakKeyDictionary()


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

    def agree(self, function: str, said: dict[str, Any]) -> None:
        """ValueError, on every rank, where ranks do not say the same; asked once for what the group has agreed on.

        Before anything is sent: ranks that expect other sizes would wait for each other.
        """
        agreed = _agreed.setdefault(self.group, set())
        words = (function, *said.items())
        if words in agreed:
            return
        everyone: list[Any] = [None] * self.ranks
        distributed.all_gather_object(everyone, said | {"function": function}, group=self.group)
        names = [name for name in everyone[0] if any(other.get(name) != everyone[0][name] for other in everyone)]
        if names:
            lines = [f"{function}: the {self.ranks} ranks of the group must ask for the same, and do not"]
            lines += [
                f"  - {name}: " + ", ".join(f"{other.get(name)} on rank {rank}" for rank, other in enumerate(everyone))
                for name in names
            ]
            raise ValueError("\n".join(lines))
        if len(agreed) == REMEMBERED:
            agreed.clear()
        agreed.add(words)

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
