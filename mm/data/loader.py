"""Optimizer steps' worth of microbatches, prepared ahead by worker processes.

Workers are started through a fork server, a fresh process without threads: forking the trainer itself would copy locks
that its threads (communication, prefetch) may hold at that moment, open sockets, and the state of the accelerator.
The price is that a script which trains needs its ``if __name__ == "__main__"`` guard.
"""

import itertools
import multiprocessing
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils.data import DataLoader

from mm.batch import Microbatch
from mm.data.dataset import Dataset
from mm.data.encode import SampleEncoder
from mm.data.order import Order
from mm.errors import UserError


class StepLoader(Iterator[list[Microbatch]]):
    """Endless iterator over optimizer steps: each item is the list of this data-parallel rank's microbatches.

    What it yields depends on its arguments only, not on ``num_workers`` or timing.  Workers begin at once.
    """

    def __init__(
        self, dataset: Dataset, encoder: SampleEncoder, order: Order, num_workers: int = 2, prefetch_factor: int = 2
    ) -> None:
        """Each worker prepares ``prefetch_factor`` microbatches ahead.  Without workers the calling thread encodes."""
        self._num_microbatches = order.num_microbatches
        # Imported once in the fork server; workers then start in milliseconds.  No effect once a server runs.
        multiprocessing.get_context("forkserver").set_forkserver_preload(["mm.data.loader"])
        self._microbatches: Any = iter(
            DataLoader(
                _MicrobatchSource(dataset, encoder, order),
                sampler=itertools.count(),
                batch_size=None,
                num_workers=num_workers,  # torch keeps each to one CPU thread
                prefetch_factor=prefetch_factor if num_workers else None,
                multiprocessing_context="forkserver" if num_workers else None,
                worker_init_fn=_end_with_trainer,
                generator=torch.Generator(),  # else torch draws a seed from the trainer's own random numbers
            )
        )

    def __next__(self) -> list[Microbatch]:
        """The next step.  Raises UserError for a sample that cannot be used, naming it."""
        step = []
        for _ in range(self._num_microbatches):
            item = next(self._microbatches)
            if isinstance(item, UserError):
                raise item
            step.append(item)
        return step

    def close(self) -> None:
        """End the workers.  The loader yields nothing more."""
        if hasattr(self._microbatches, "_shutdown_workers"):
            # torch has no public name for this: it counts on the iterator being released, but the traceback of an
            # error holds it.
            self._microbatches._shutdown_workers()
        self._microbatches = iter(())


@dataclass(frozen=True)
class _MicrobatchSource(torch.utils.data.Dataset):
    """Microbatch ``number`` of this rank, counted over all steps from ``consumed_samples`` on.

    A UserError is returned: raised in a worker, its sentences would be buried in a traceback.
    """

    dataset: Dataset
    encoder: SampleEncoder
    order: Order

    def __getitem__(self, number: int) -> Microbatch | UserError:
        indices = self.order.indices(*divmod(number, self.order.num_microbatches))
        try:
            return Microbatch.join(self._encode(index) for index in indices)
        except UserError as error:
            return error

    def _encode(self, index: int) -> Microbatch:
        sample = self.dataset[index]
        try:
            return replace(self.encoder.encode(sample), samples=(index,))
        except Exception as error:
            error.add_note(f"while encoding sample {sample.source}")
            raise


def _end_with_trainer(worker: int) -> None:
    """In a worker: exit when the trainer dies, however it does.

    torch's own watch looks at the parent's process id, which is the fork server's here, and that lives on.
    """
    trainer = multiprocessing.parent_process()
    assert trainer is not None, "a worker has a parent"

    def watch() -> None:
        trainer.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
