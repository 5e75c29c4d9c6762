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
from dataclasses import dataclass

import torch
from torch.utils.data import DataLoader

from mm.batch import Microbatch
from mm.data.dataset import Dataset
from mm.data.encode import EncodedSample, SampleEncoder, pack
from mm.data.order import microbatch_indices
from mm.errors import UserError


class StepLoader:
    """Endless iterator over optimizer steps: each item is the list of this data-parallel rank's microbatches.

    What it yields depends on its arguments only, not on ``num_workers`` or timing.  Workers begin at once.
    """

    def __init__(
        self,
        dataset: Dataset,
        encoder: SampleEncoder,
        *,
        micro_batch_size: int,
        global_batch_size: int,
        dp_rank: int,
        dp_size: int,
        seed: int,
        shuffle: bool,
        consumed_samples: int = 0,
        num_workers: int = 2,
        prefetch_factor: int = 2,
    ) -> None:
        """``consumed_samples``: how many samples all ranks together have trained on before; where to go on.

        ``num_workers``: processes; 0 encodes in the calling thread.  ``prefetch_factor``: microbatches that each
        worker prepares ahead.
        """
        self._num_microbatches, rest = divmod(global_batch_size, micro_batch_size * dp_size)
        if rest:
            raise UserError(
                f"global batch size {global_batch_size} is not divisible by micro batch size {micro_batch_size} x "
                f"data-parallel size {dp_size}."
            )
        source = _MicrobatchSource(
            dataset=dataset,
            encoder=encoder,
            num_microbatches=self._num_microbatches,
            micro_batch_size=micro_batch_size,
            global_batch_size=global_batch_size,
            dp_rank=dp_rank,
            dp_size=dp_size,
            seed=seed,
            shuffle=shuffle,
            consumed_samples=consumed_samples,
        )
        self._workers = _start_workers(source, num_workers, prefetch_factor) if num_workers else None
        in_process = map(source.__getitem__, itertools.count())
        self._microbatches = in_process if self._workers is None else self._workers

    def __iter__(self) -> Iterator[list[Microbatch]]:
        return self

    def __next__(self) -> list[Microbatch]:
        """The next step.  Raises UserError for a sample that cannot be used, naming it."""
        step = []
        for _ in range(self._num_microbatches):
            item = next(self._microbatches)
            if isinstance(item, _Refusal):
                raise UserError(item.problems)
            step.append(item)
        return step

    def close(self) -> None:
        """End the workers.  The loader yields nothing more."""
        if self._workers is not None:
            # torch has no public name for this: it counts on the iterator being released, but the traceback of an
            # error holds it.
            self._workers._shutdown_workers()
        self._workers, self._microbatches = None, iter(())


@dataclass(frozen=True)
class _Refusal:
    """A UserError on its way out of a worker, where raising it would bury its sentences in a traceback."""

    problems: tuple[str, ...]


@dataclass(frozen=True)
class _MicrobatchSource(torch.utils.data.Dataset):
    """Microbatch ``number`` of this rank, counted over all steps from ``consumed_samples`` on."""

    dataset: Dataset
    encoder: SampleEncoder
    num_microbatches: int
    micro_batch_size: int
    global_batch_size: int
    dp_rank: int
    dp_size: int
    seed: int
    shuffle: bool
    consumed_samples: int

    def __getitem__(self, number: int) -> Microbatch | _Refusal:
        step, microbatch = divmod(number, self.num_microbatches)
        indices = microbatch_indices(
            step,
            microbatch,
            num_samples=len(self.dataset),
            seed=self.seed,
            shuffle=self.shuffle,
            global_batch_size=self.global_batch_size,
            micro_batch_size=self.micro_batch_size,
            dp_rank=self.dp_rank,
            dp_size=self.dp_size,
            consumed_samples=self.consumed_samples,
        )
        try:
            return pack([self._encode(index) for index in indices])
        except UserError as error:
            return _Refusal(error.problems)

    def _encode(self, index: int) -> EncodedSample:
        sample = self.dataset[index]
        try:
            return self.encoder.encode(sample)
        except Exception as error:
            error.add_note(f"while encoding sample {sample.source}")
            raise


def _as_it_is(item: Microbatch | _Refusal) -> Microbatch | _Refusal:
    return item


def _end_with_trainer(worker: int) -> None:
    """In a worker: exit when the trainer dies, however it does.

    torch's own watch looks at the parent's process id, which is the fork server's here, and that lives on.
    """
    trainer = multiprocessing.parent_process()

    def watch() -> None:
        trainer.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _start_workers(
    source: _MicrobatchSource, num_workers: int, prefetch_factor: int
) -> Iterator[Microbatch | _Refusal]:
    """Iterate over ``source`` without end, in order, in worker processes."""
    # Imported once in the fork server; workers then start in milliseconds.  No effect once a server runs.
    multiprocessing.get_context("forkserver").set_forkserver_preload(["mm.data.loader"])
    return iter(
        DataLoader(
            source,
            sampler=itertools.count(),
            batch_size=None,
            collate_fn=_as_it_is,
            num_workers=num_workers,
            prefetch_factor=prefetch_factor,
            multiprocessing_context="forkserver",  # torch keeps one CPU thread in each worker
            worker_init_fn=_end_with_trainer,
            generator=torch.Generator(),  # else torch draws a seed from the trainer's own random numbers
        )
    )
