"""Graphs: a capture records the operations of its streams, and a launch enqueues copies of all of them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from .errors import (
    CAPTURE_IMPLICIT,
    CAPTURE_INVALIDATED,
    CAPTURE_UNJOINED,
    CAPTURE_UNMATCHED,
    CAPTURE_UNSUPPORTED,
    INVALID_HANDLE,
    CudaError,
)
from .streams import NON_BLOCKING, Operation, Stream

if TYPE_CHECKING:
    from . import Machine

GLOBAL, THREAD_LOCAL, RELAXED = 0, 1, 2  # cudaStreamCaptureMode


class Capture:
    """The operations of one stream, and of streams that joined it by an event, in the order of the calls."""

    def __init__(self, origin: Stream, mode: int) -> None:
        self.origin, self.mode, self.thread = origin, mode, threading.get_ident()
        self.is_valid = True
        self.nodes: list[Operation] = []
        self.last: dict[Stream, Operation | None] = {origin: None}

    def record(self, stream: Stream, name: str, run: Callable[[], object], after: Iterable[Operation]) -> Operation:
        previous = self.last[stream]
        node = Operation(stream, name, run, [*after, *([previous] if previous else [])])
        self.nodes.append(node)
        self.last[stream] = node
        return node

    def join(self, stream: Stream) -> None:
        """Add a stream that waits for an event of the capture."""
        if stream.capture is not self:
            stream.capture = self
            self.last[stream] = None


class Graphs:
    """Calls of the runtime on captures and graphs."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self._captures: list[Capture] = []
        self._graphs: dict[int, list[Operation]] = {}
        self._launched: dict[int, Operation] = {}  # the last operation of the latest launch of each executable graph

    def require_safe(self, call: str) -> None:
        """Refuse a call that may synchronise during a capture that is not relaxed; thread-local captures forbid it to
        their thread only.
        """
        for capture in self._captures:
            if capture.mode == GLOBAL or (capture.mode == THREAD_LOCAL and capture.thread == threading.get_ident()):
                capture.is_valid = False
                raise CudaError(CAPTURE_UNSUPPORTED, f"{call} during a capture that is not relaxed")

    def awaited(self, stream: Stream) -> list[Capture]:
        """Return the captures of the streams for which work on this stream would wait if it is the legacy default."""
        if not stream.is_legacy:
            return []
        return [
            capture
            for capture in self._captures
            if any(x.card is stream.card and not x.flags & NON_BLOCKING for x in capture.last)
        ]

    def require_no_implicit_dependency(self, stream: Stream) -> None:
        """Refuse work on the legacy default stream that would wait for a capturing stream."""
        for capture in self.awaited(stream):
            capture.is_valid = False
            raise CudaError(CAPTURE_IMPLICIT, "the legacy default stream would wait for a stream that is capturing")

    def abandon_captures(self) -> None:
        """End all captures without making a graph."""
        for capture in self._captures:
            for stream in capture.last:
                stream.capture = None
        self._captures.clear()

    def streamBeginCapture(self, handle: int, mode: int = RELAXED) -> None:
        stream = self.machine.streams.at(handle)
        if stream.is_legacy or stream.capture is not None:
            raise CudaError(CAPTURE_UNSUPPORTED, "the stream is the legacy default stream or already capturing")
        stream.capture = Capture(stream, mode)
        self._captures.append(stream.capture)

    def streamEndCapture(self, handle: int) -> int:
        stream = self.machine.streams.at(handle)
        capture = stream.capture
        if capture is None or capture.origin is not stream:
            raise CudaError(CAPTURE_UNMATCHED, "the stream began no capture")
        self._captures.remove(capture)
        for joined in capture.last:
            joined.capture = None
        if not capture.is_valid:
            raise CudaError(CAPTURE_INVALIDATED, "a call during the capture has made it invalid")
        followed = {before for node in capture.nodes for before in node.after}
        if any(node not in followed and node.stream is not stream for node in capture.nodes):
            raise CudaError(CAPTURE_UNJOINED, "the stream does not wait for a stream that joined its capture")
        return self._add(capture.nodes)

    def _add(self, nodes: list[Operation]) -> int:
        handle = self.machine.handle()
        self._graphs[handle] = nodes
        return handle

    def _nodes(self, handle: int) -> list[Operation]:
        if handle not in self._graphs:
            raise CudaError(INVALID_HANDLE, f"{handle:#x} is no graph")
        return self._graphs[handle]

    def graphInstantiate(self, graph: int) -> int:
        return self._add(self._nodes(graph))

    def graphUpload(self, graph: int, stream: int) -> None:
        self._nodes(graph)

    def graphLaunch(self, graph: int, stream: int) -> None:
        """Enqueue a copy of every node.

        The next operation of the stream waits for all of them, and so does the next launch of the same executable graph
        on any stream.
        """
        nodes, earlier = self._nodes(graph), self._launched.get(graph)
        self._launched[graph] = self.machine.streams.enqueue_graph(stream, nodes, [earlier] if earlier else [])

    def graphDestroy(self, graph: int) -> None:
        del self._graphs[graph]

    def graphExecDestroy(self, graph: int) -> None:
        del self._graphs[graph]
        self._launched.pop(graph, None)
