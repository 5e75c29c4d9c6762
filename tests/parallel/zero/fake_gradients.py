"""Stands in for the gradients of a bucket, where ranks are simulated without processes."""

from collections.abc import Hashable
from types import SimpleNamespace
from typing import Any


class FakeGradients:
    """As ``mm.parallel.zero.gradient_shards.GradientBucket``; notes what happens to it."""

    def __init__(self, spec: Any, name: Hashable, is_overlapped: bool, log: list[Any]) -> None:
        """``name``: what ``log`` gets at each reduction."""
        self.spec, self.name, self.log, self.is_overlapped = spec, name, log, is_overlapped
        self.group = SimpleNamespace(grad_reduce_handle=None)
        self.is_open = False

    def begin_step(self) -> None:
        assert not self.is_open

    end_step = begin_step

    def open(self, _: bool) -> None:
        assert self.group.grad_reduce_handle is None, "its buffer is being reduced"
        self.is_open = True

    def start_reducing(self) -> None:
        assert self.is_open
        self.log.append(self.name)
        self.group.grad_reduce_handle = "a handle" if self.is_overlapped else None

    def finish_reducing(self) -> None:
        self.group.grad_reduce_handle, self.is_open = None, False
