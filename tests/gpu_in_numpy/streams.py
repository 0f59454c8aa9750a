"""Streams and events: work is queued, and executed in any order that the rules of CUDA allow.

An operation runs after the previous one of its stream, after the events that its stream waits for, and by the rules of
the legacy default stream. A seed determines which of the ready operations runs next, and how many run before the host
waits.
"""

from __future__ import annotations

import random
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from cupy_flash.simulator import SimulationError
from cupy_flash.simulator.errors import MemoryFault

from .errors import (
    CAPTURE_IMPLICIT,
    CAPTURE_ISOLATION,
    CAPTURE_UNSUPPORTED,
    CAPTURED_EVENT,
    ILLEGAL_ADDRESS,
    INVALID_HANDLE,
    LAUNCH_FAILED,
    NOT_READY,
    NOT_SUPPORTED,
    CudaError,
)

if TYPE_CHECKING:
    from . import Machine
    from .devices import Card
    from .graphs import Capture

NULL, LEGACY, PER_THREAD = 0, 1, 2  # handles of the default streams
NON_BLOCKING = 1  # cudaStreamNonBlocking
DISABLE_TIMING = 2  # cudaEventDisableTiming
INTERRUPTS = (signal.SIGINT, signal.SIGALRM)


@contextmanager
def interrupts_deferred() -> Iterator[None]:
    """Raise KeyboardInterrupt after the block instead of inside it, because a kernel of a real card continues after
    Ctrl-C.

    A second interrupt is raised at once.
    """
    arrived: list[int] = []

    def note(number: int, frame: object) -> None:
        arrived.append(number)
        if len(arrived) > 1:
            raise KeyboardInterrupt

    is_main = threading.current_thread() is threading.main_thread()  # signal handlers run in the main thread only
    numbers = [x for x in INTERRUPTS if is_main and signal.getsignal(x) is signal.default_int_handler]
    for number in numbers:
        signal.signal(number, note)
    try:
        yield
    finally:
        for number in numbers:
            signal.signal(number, signal.default_int_handler)
    if arrived:
        raise KeyboardInterrupt


class Operation:
    """Queued work, which runs after the operations `after`."""

    def __init__(self, stream: Stream, name: str, run: Callable[[], object], after: Iterable[Operation]) -> None:
        self.stream, self.name, self.run = stream, name, run
        self.after = [operation for operation in after if not operation.done]
        self.done = False

    def is_ready(self) -> bool:
        return all(operation.done for operation in self.after)


class Stream:
    """A stream; `last` is its latest operation, and `capture` records its operations instead of queueing them."""

    def __init__(self, handle: int, card: Card, flags: int) -> None:
        self.handle, self.card, self.flags = handle, card, flags
        self.last: Operation | None = None
        self.capture: Capture | None = None

    @property
    def is_legacy(self) -> bool:
        return self.handle == LEGACY


class Event:
    """An event; `operation` is the one recorded last, or a node of `capture` if it was recorded during one."""

    def __init__(self, card: Card, flags: int) -> None:
        self.card, self.flags = card, flags
        self.operation: Operation | None = None
        self.capture: Capture | None = None


class Streams:
    """Calls of the runtime on streams and events."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.pending: list[Operation] = []
        self.executed: list[tuple[int, str]] = []  # (stream, name) in the order of execution
        self._streams: dict[object, Stream] = {}
        self._destroyed: list[Stream] = []  # streams whose work may still be pending
        self._events: dict[int, Event] = {}
        self.reseed(0)

    def reseed(self, seed: int) -> None:
        """Choose another order of execution from here on."""
        self.random = random.Random(seed)
        # probability that an operation runs before the host continues
        self._eagerness = self.random.choice((0.0, 0.5, 0.9))
        self._speeds: dict[Stream, float] = {}

    # Queues

    def at(self, handle: int) -> Stream:
        """Return the stream of a handle; default streams are those of the current device."""
        key: object = handle
        if handle in (NULL, LEGACY, PER_THREAD):
            card = self.machine.devices.current
            handle = handle or LEGACY
            key = (handle, card.index, threading.get_ident() if handle == PER_THREAD else 0)
            if key not in self._streams:
                self._streams[key] = Stream(handle, card, 0)
        if key not in self._streams:
            raise CudaError(INVALID_HANDLE, f"{handle:#x} is no stream")
        return self._streams[key]

    def has(self, handle: int) -> bool:
        """Return whether the handle belongs to a stream that has not been destroyed."""
        return handle in (NULL, LEGACY, PER_THREAD) or handle in self._streams

    def enqueue(
        self,
        handle: int,
        name: str,
        run: Callable[[], object],
        after: Iterable[Operation] = (),
        waits_for_others: bool = True,
    ) -> Operation:
        """Enqueue work on a stream, or record it if the stream is capturing."""
        stream = self.at(handle)
        if stream.card.lost is not None:
            raise CudaError(stream.card.lost, f"a kernel on device {stream.card.index} has failed before")
        if stream.capture is not None:
            return stream.capture.record(stream, name, run, after)
        self.machine.graphs.require_no_implicit_dependency(stream)
        before = self._before(stream) if waits_for_others else [stream.last] if stream.last else []
        operation = Operation(stream, name, run, [*after, *before])
        stream.last = operation
        self.pending.append(operation)
        while self.pending and self.random.random() < self._eagerness:
            self.step()
        return operation

    def enqueue_graph(self, handle: int, nodes: list[Operation], after: list[Operation]) -> Operation:
        """Enqueue a copy of each node of a graph after the work `after`.

        Returns an operation that runs after all of them, and for which the next operation of the stream waits.
        """
        stream = self.at(handle)
        if stream.capture is not None:
            raise CudaError(NOT_SUPPORTED, "a graph launch during a capture is not in this stand-in")
        before, copies = [*after, *self._before(stream)], {}
        for node in nodes:
            copies[node] = Operation(stream, node.name, node.run, [copies[x] for x in node.after] or before)
            self.pending.append(copies[node])
        return self.enqueue(handle, "graph", lambda: None, [*after, *copies.values()])

    def _before(self, stream: Stream) -> list[Operation]:
        """Return the operations after which the next one of a stream runs.

        The legacy default stream and the blocking streams of its device wait for each other.
        """
        others: list[Stream] = [stream]
        if stream.is_legacy:
            self._destroyed = [x for x in self._destroyed if x.last is not None and not x.last.done]
            every = (*self._streams.values(), *self._destroyed)
            others += [x for x in every if x.card is stream.card and not x.flags & NON_BLOCKING]
        elif not stream.flags & NON_BLOCKING:
            others += [x for x in self._streams.values() if x.card is stream.card and x.is_legacy]
        return [x.last for x in others if x.last is not None]

    def step(self) -> None:
        """Execute one of the ready operations; those of a slow stream are chosen rarely."""
        ready = [operation for operation in self.pending if operation.is_ready()]
        for operation in ready:
            self._speeds.setdefault(operation.stream, 10 ** self.random.uniform(-2, 2))
        (chosen,) = self.random.choices(ready, [self._speeds[operation.stream] for operation in ready])
        with interrupts_deferred():
            self._execute(chosen)

    def _execute(self, chosen: Operation) -> None:
        self.pending.remove(chosen)
        chosen.done = True
        self.executed.append((chosen.stream.handle, chosen.name))
        try:
            chosen.run()
        except Exception as error:  # the next call that waits for the device reports the error, as on a real card
            status = ILLEGAL_ADDRESS if isinstance(error, (MemoryFault, CudaError)) else LAUNCH_FAILED
            self._lose(chosen, status, error)
        except BaseException as error:  # a second Ctrl-C leaves the operation half done
            self._lose(chosen, LAUNCH_FAILED, error)
            raise

    def _lose(self, failed: Operation, status: int, error: BaseException) -> None:
        card = failed.stream.card
        card.lost = status
        kind = type(error).__name__ if isinstance(error, SimulationError) else repr(error)
        self.machine.errors.append(f"{failed.name} on device {card.index}: {kind}: {error}")
        for operation in [x for x in self.pending if x.stream.card is card]:
            operation.done = True
            self.pending.remove(operation)

    def finish_operation(self, operation: Operation | None) -> None:
        """Execute until this operation is done; raise the error of its device."""
        if operation is None:
            return
        while not operation.done:
            self.step()
        if operation.stream.card.lost is not None:
            raise CudaError(operation.stream.card.lost, f"{self.machine.errors[-1:]}")

    def finish(self, card: Card | None = None) -> None:
        """Execute everything queued on a device, or on all devices."""
        while any(card in (None, operation.stream.card) for operation in self.pending):
            self.step()

    # Runtime: streams

    def _create(self, flags: int) -> int:
        handle = self.machine.handle()
        self._streams[handle] = Stream(handle, self.machine.devices.use(), flags)
        return handle

    def streamCreate(self) -> int:
        return self._create(0)

    def streamCreateWithFlags(self, flags: int) -> int:
        return self._create(flags)

    def streamCreateWithPriority(self, flags: int, priority: int) -> int:
        return self._create(flags)

    def streamGetFlags(self, handle: int) -> int:
        return self.at(handle).flags

    def streamGetPriority(self, handle: int) -> int:
        return 0

    def streamDestroy(self, handle: int) -> None:
        """Destroy a stream; its queued work still runs, in its order."""
        self._destroyed.append(self.at(handle))
        del self._streams[handle]

    def streamSynchronize(self, handle: int) -> None:
        stream = self.at(handle)
        self._require_no_capture(stream, "cudaStreamSynchronize")
        for operation in self._before(stream) if stream.is_legacy else [stream.last]:
            self.finish_operation(operation)

    def streamQuery(self, handle: int) -> int:
        stream = self.at(handle)
        self._require_no_capture(stream, "cudaStreamQuery")
        return self._progress(stream.last)

    def streamWaitEvent(self, handle: int, event: int, flags: int = 0) -> None:
        stream, awaited = self.at(handle), self._event(event)
        if awaited.capture is not None and stream.is_legacy:
            awaited.capture.is_valid = False
            raise CudaError(CAPTURE_IMPLICIT, "the legacy default stream cannot take part in a capture")
        if awaited.capture is not None:
            awaited.capture.join(stream)
        elif stream.capture is not None and awaited.operation is not None:
            stream.capture.is_valid = False
            raise CudaError(CAPTURE_ISOLATION, "a captured stream waits for an event recorded outside of the capture")
        self.enqueue(handle, "wait", lambda: None, [awaited.operation] if awaited.operation else [])

    def streamIsCapturing(self, handle: int) -> int:
        return int(self.at(handle).capture is not None)

    def deviceSynchronize(self) -> None:
        card = self.machine.devices.use()
        if any(x.capture is not None and x.card is card for x in self._streams.values()):
            raise CudaError(CAPTURE_UNSUPPORTED, "cudaDeviceSynchronize during a capture")
        self.finish(card)
        self.machine.devices.use()

    def launchHostFunc(self, handle: int, function: Any, argument: int) -> None:
        self.enqueue(handle, "host function", lambda: function(argument))

    # Runtime: events

    def _event(self, handle: int) -> Event:
        if handle not in self._events:
            raise CudaError(INVALID_HANDLE, f"{handle:#x} is no event")
        return self._events[handle]

    def eventCreate(self) -> int:
        return self.eventCreateWithFlags(0)

    def eventCreateWithFlags(self, flags: int) -> int:
        handle = self.machine.handle()
        self._events[handle] = Event(self.machine.devices.use(), flags)
        return handle

    def eventDestroy(self, handle: int) -> None:
        self._event(handle)
        del self._events[handle]

    def eventRecord(self, handle: int, stream: int) -> None:
        event, card = self._event(handle), self.at(stream).card
        if event.card is not card:
            raise CudaError(INVALID_HANDLE, f"an event of device {event.card.index} on a stream of {card.index}")
        event.capture = self.at(stream).capture
        event.operation = self.enqueue(stream, "event", lambda: None)

    def eventQuery(self, handle: int) -> int:
        event = self._event(handle)
        self._require_not_captured(event, "cudaEventQuery")
        return self._progress(event.operation)

    def eventSynchronize(self, handle: int) -> None:
        event = self._event(handle)
        self._require_not_captured(event, "cudaEventSynchronize")
        self.finish_operation(event.operation)

    def eventElapsedTime(self, start: int, end: int) -> float:
        """Return 0, because no time passes here, after the checks of a driver."""
        for event in (self._event(start), self._event(end)):
            if event.operation is None or event.capture is not None or event.flags & DISABLE_TIMING:
                raise CudaError(INVALID_HANDLE, "the time of an event that is not recorded or takes no time")
            if not event.operation.done:
                raise CudaError(NOT_READY, "the time of an event whose work is pending")
        return 0.0

    def _progress(self, operation: Operation | None) -> int:
        """Return the status of a query; some work runs meanwhile, so that a loop of queries ends."""
        if operation is None or operation.done:
            return 0
        self.step()
        return 0 if operation.done else NOT_READY

    def _require_not_captured(self, event: Event, call: str) -> None:
        if event.capture is not None:
            event.capture.is_valid = False
            raise CudaError(CAPTURED_EVENT, f"{call} of an event recorded in a capture")

    def _require_no_capture(self, stream: Stream, call: str) -> None:
        if stream.capture is not None:
            stream.capture.is_valid = False
            raise CudaError(CAPTURE_UNSUPPORTED, f"{call} of a stream that is capturing")
