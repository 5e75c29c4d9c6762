"""A second stream of the device, for copies beside the work of the main stream: inputs, states, activations."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


class SideQueue:
    """A stream next to the computing one; on a device without streams, such as the CPU, all work runs immediately.

    ::

        computing stream   step 1 | join | mark | step 2                  | join | mark | step 3
        side stream                               copy inputs of step 3 (after the mark)

    The allocator reuses the side stream's memory as soon as its tensors die, when the computing stream may not have
    read them yet.  So new copies wait for a mark in that stream, set after the dead tensors' last use was queued.
    """

    def __init__(self, kind: str | None) -> None:
        """``kind``: the type of the current device, such as "cuda"; None if it has no streams."""
        self._kind = kind
        self._stream = None if kind is None else getattr(torch, kind).Stream()
        self._mark: Any = None

    def mark(self) -> None:
        """Mark the current stream: later side work waits for everything queued there so far, and nothing after."""
        if self._kind is not None:
            self._mark = getattr(torch, self._kind).Event()
            self._mark.record()

    @contextmanager
    def behind_mark(self) -> Iterator[None]:
        """Queue the body's work on the side stream; no tensor of an earlier body may die between mark and body."""
        if self._kind is None or self._stream is None:
            yield
            return
        if self._mark is None:
            self.mark()
        with getattr(torch, self._kind).stream(self._stream):
            self._stream.wait_event(self._mark)
            yield

    def join(self) -> None:
        """Make the current stream wait for everything queued on the side stream."""
        if self._kind is not None:
            getattr(torch, self._kind).current_stream().wait_stream(self._stream)
