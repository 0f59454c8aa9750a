"""Communication of a rank with its process group: agreement on the call, ring exchange, all-to-all."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import distributed
from torch.distributed.device_mesh import DeviceMesh

if TYPE_CHECKING:
    from ..problem.argument_types import Group

Request: TypeAlias = dict[str, Any]  # the arguments of a call that ranks must agree on, by name
REFUSED = 0  # sent instead of a digest by a rank whose own checks failed


class Arrival(NamedTuple):
    """Tensors that are being received, and torch's Work objects of the pending exchange."""

    tensors: list[torch.Tensor]
    works: list[distributed.Work]

    def wait(self) -> list[torch.Tensor]:
        """Wait for the sends and receives, within the group's timeout; returns the received tensors."""
        for work in self.works:
            work.wait()
        self.works.clear()  # a work holds a reference to the tensor that it sent
        return self.tensors


class Channel(NamedTuple):
    """A process group and this process's rank in it, 0 .. ranks - 1 (not the global rank)."""

    group: distributed.ProcessGroup
    rank: int
    ranks: int

    @classmethod
    def of(cls, function: str, group: Group) -> Channel:
        """Return the channel of a ProcessGroup, a DeviceMesh of one dimension, or None for all processes.

        Raises RuntimeError before init_process_group, ValueError for another mesh or a group without this process.
        """
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
    def agreement(self, function: str, check_ranks: bool) -> Iterator[Request]:
        """Context in which a rank checks its call and fills in the request, the arguments on which ranks must agree.

        On exit it raises ValueError on every rank if requests differ or another rank's checks raised. This precedes all
        other communication, in which ranks that expect different sizes would deadlock. If requests agree, it sends
        one int64 per rank; without check_ranks it sends nothing. Raises TypeError if check_ranks is not a bool.
        """
        is_flag = isinstance(check_ranks, (bool, np.bool_))
        compares = self.ranks > 1 and (not is_flag or bool(check_ranks))
        request: Request = {}
        try:
            if not is_flag:
                raise TypeError(f"{function}: check_ranks must be True or False, not {check_ranks!r}")
            yield request
            digest = self._digest(function, request) if compares else None
        except Exception as error:
            if compares and not self._all_equal(torch.tensor([REFUSED], device=self._device)):
                self._gather_requests({"function": function, "refused": str(error)})
            raise
        if compares and not self._all_equal(digest):
            raise ValueError(self._differences(function, request))

    @property
    def _device(self) -> torch.device:
        """Return a device on which the group can gather: the CPU if a backend supports it, else the current device."""
        kinds = [pair.split(":")[0] for pair in distributed.get_backend_config(self.group).split(",")]
        return torch.device("cpu" if "cpu" in kinds else kinds[0])

    def _digest(self, function: str, request: Request) -> torch.Tensor:
        """Return the hash of a request, int64 (1,); the seed is XORed on its device, so the host does not read it."""
        text = repr((function, *(item for item in request.items() if item[0] != "seed")))
        bits = int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)
        digest = torch.tensor([bits], device=self._device)
        seed = request["seed"]
        if seed is None:
            return digest
        if not isinstance(seed, torch.Tensor):
            seed = torch.from_numpy(np.asarray(seed).reshape(1).astype(np.uint64).view(np.int64))
        return digest ^ seed.reshape(1).to(self._device)

    def _all_equal(self, digest: torch.Tensor) -> bool:
        """Return whether the digests of all ranks are equal. Synchronises the host."""
        digests = digest.new_empty(self.ranks)
        distributed.all_gather(list(digests.split(1)), digest, group=self.group)
        return len(set(digests.tolist())) == 1

    def _gather_requests(self, request: Request) -> list[Request]:
        """Return the requests of all ranks by a slow collective, for the error message only."""
        requests: list[Any] = [None] * self.ranks
        distributed.all_gather_object(requests, request, group=self.group)
        return requests

    def _differences(self, function: str, request: Request) -> str:
        """Return an error message with the entries that differ, or with the errors of ranks that refused their call."""
        seed = request["seed"]
        seed = seed.item() % 2**64 if isinstance(seed, torch.Tensor) else seed
        requests = self._gather_requests(request | {"function": function, "seed": seed})
        refused = [(rank, other["refused"]) for rank, other in enumerate(requests) if "refused" in other]
        if refused:
            lines = [f"{function}: some of the {self.ranks} ranks of the group refused their call"]
            return "\n".join(lines + [f"  - rank {rank}: {reason}" for rank, reason in refused])
        names = [name for name in requests[0] if any(other.get(name) != requests[0][name] for other in requests)]
        lines = [f"{function}: the {self.ranks} ranks of the group must make the same call, but differ"]
        lines += [
            f"  - {name}: " + ", ".join(f"{other.get(name)} on rank {rank}" for rank, other in enumerate(requests))
            for name in names
        ]
        return "\n".join(lines)

    def exchange(self, tensors: Sequence[torch.Tensor], shift: int, shapes: Sequence[tuple[int, ...]]) -> Arrival:
        """Start sending contiguous tensors to rank + shift and receiving tensors of these shapes from rank - shift.

        A collective: every rank calls it with the same shift, in the same order. Empty tensors are not sent.
        """
        received = [tensor.new_empty(shape) for tensor, shape in zip(tensors, shapes, strict=True)]
        # P2POp takes global ranks.
        target, source = (
            distributed.get_global_rank(self.group, (self.rank + offset) % self.ranks) for offset in (shift, -shift)
        )
        operations = [
            distributed.P2POp(operation, tensor, peer, self.group)
            for operation, peer, moved in ((distributed.isend, target, tensors), (distributed.irecv, source, received))
            for tensor in moved
            if tensor.numel()
        ]
        return Arrival(received, distributed.batch_isend_irecv(operations) if operations else [])

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """Sum x over the ranks in place, and return it."""
        distributed.all_reduce(x, group=self.group)
        return x

    def all_to_all(self, pieces: Sequence[torch.Tensor], shapes: Sequence[tuple[int, ...]]) -> list[torch.Tensor]:
        """All-to-all: sends pieces[r] to rank r and returns the tensors of shapes[r] received from each rank r."""
        sent = torch.cat([piece.reshape(-1) for piece in pieces])
        sizes = [prod(shape) for shape in shapes]
        received = sent.new_empty(sum(sizes))
        distributed.all_to_all_single(received, sent, sizes, [piece.numel() for piece in pieces], group=self.group)
        return [part.view(shape) for part, shape in zip(received.split(sizes), shapes, strict=True)]
