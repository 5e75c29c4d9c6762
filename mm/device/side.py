"""A second queue of the device, for small work beside the main one: copies of what the next microbatch needs."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


class SideQueue:
    """A stream beside the one that computes; where there are no streams, as on the CPU, all is done at once.

    What it works on is memory of its own, which is free for it again when the tensors are gone.  The computing stream
    may not yet have read them then: therefore its work begins behind a mark in that stream, set after the tensors' last
    use was queued.
    """

    def __init__(self, kind: str | None) -> None:
        """``kind`` of device, which this process has chosen; None without streams."""
        self._kind = kind
        self._stream = None if kind is None else getattr(torch, kind).Stream()
        self._mark: Any = None

    def mark(self) -> None:
        """From now on, work here waits for what the current stream has been given so far, and for nothing behind."""
        if self._kind is not None:
            self._mark = getattr(torch, self._kind).Event()
            self._mark.record()

    @contextmanager
    def behind_mark(self) -> Iterator[None]:
        """Work of the body is queued here; no tensor of an earlier body may die between the mark and the body."""
        if self._kind is None or self._stream is None:
            yield
            return
        if self._mark is None:
            self.mark()
        with getattr(torch, self._kind).stream(self._stream):
            self._stream.wait_event(self._mark)
            yield

    def join(self) -> None:
        """Let the current stream wait for what was queued here."""
        if self._kind is not None:
            getattr(torch, self._kind).current_stream().wait_stream(self._stream)
