"""What a rank is doing now: which work, for which chunk and microbatch.

The engine records it in a journal as it goes; the watchdog's report reads the journal, the timeline listens to it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import Enum
from typing import Protocol


class Work(str, Enum):
    """Kinds of work of a rank."""

    __str__ = str.__str__

    DATA = "waits for data"
    INPUTS = "inputs"
    """A microbatch's inputs for a chunk, copied to the device."""
    FORWARD = "forward"
    VISION_FORWARD = "ViT forward"
    LANGUAGE_FORWARD = "LLM forward"
    BACKWARD = "backward"
    EXCHANGE = "messages"
    VISUAL_EXCHANGE = "visual tokens"
    """From the ranks that encoded a microbatch's images to those that need them."""
    GATHER = "gathers weights"
    """Those of a bucket, of which each rank keeps only a shard between uses."""
    REDUCTION = "gradient reduction"
    UPDATE = "update"
    UPDATE_WAIT = "waits in update"
    """For the gradient norm, which is summed over all ranks, and for weights that other ranks updated."""
    SAVE = "saves"


@dataclass(frozen=True)
class Activity:
    """One piece of work; chunk and microbatch are None if it concerns none or all of them."""

    work: Work
    chunk: int | None = None
    microbatch: int | None = None


class Listener(Protocol):
    """Called when an activity begins and ends; activities of one rank may be nested."""

    def begin(self, activity: Activity) -> None: ...

    def end(self, activity: Activity) -> None: ...


class Journal:
    """The activity of this rank.  Without listeners, each activity costs two assignments."""

    def __init__(self) -> None:
        self.now: Activity | None = None
        self.failed: Activity | None = None
        """The innermost activity in which an error was raised; it stays after the error has left it."""
        self.listeners: list[Listener] = []

    @contextmanager
    def during(self, work: Work, chunk: int | None = None, microbatch: int | None = None) -> Iterator[None]:
        """Record ``work`` while the body runs.  Chunk and microbatch default to the enclosing activity's."""
        around = self.now
        activity = Activity(work, chunk, microbatch)
        if around is not None and chunk is None and microbatch is None:
            activity = replace(around, work=work)
        self._begin(activity)
        try:
            yield
        except Exception:
            self.failed = self.failed or self.now
            raise
        finally:
            self._end(activity, around)

    def _begin(self, activity: Activity) -> None:
        self.now = activity
        for listener in self.listeners:
            listener.begin(activity)

    def _end(self, activity: Activity, around: Activity | None) -> None:
        for listener in self.listeners:
            listener.end(activity)
        self.now = around
