"""The number of steps for ``--num-train-epochs``, known once the training samples are counted.

Neither megatron nor a device is needed.
"""

import math
from dataclasses import replace
from fractions import Fraction

from mm.config.run import Run
from mm.data.index.contents import TrainedOn
from mm.data.index.dataset import Dataset
from mm.data.order.sampler import order_description
from mm.errors import collected
from mm.formats.source import Source
from mm.training.opened import Opened
from mm.training.sources import consumed_by


def with_steps(run: Run, opened: Opened, notes: list[str]) -> Run:
    """``run`` with the number of steps that its epochs take, and a note on it; ``run`` itself without epochs.

    The number stays 0 if samples or checkpoint could not be opened, which is reported separately.
    """
    epochs = run.args.num_train_epochs
    if epochs is None or opened.samples is None or (opened.sources is None and not run.args.finetune):
        return run
    with collected([]):
        dataset = opened.samples.splits["training"]
        source = None if opened.sources is None or run.args.finetune else opened.sources.trained(run)
        iteration, consumed, began_at = _progress(run, source, dataset)
        num_steps = num_steps_of(epochs, len(dataset), run.global_batch_size, iteration, consumed, began_at)
        notes.append(f"--num-train-epochs {epochs:g}: {epochs:g} x {len(dataset)} training samples in steps of "
                     f"{run.global_batch_size} make {num_steps} iterations")
        return replace(run, args=replace(run.args, train_iters=num_steps))
    return run


def num_steps_of(
    epochs: float, num_samples: int, global_batch_size: int, iteration: int = 0, consumed: int = 0, began_at: int = 0
) -> int:
    """The iteration after which a run has seen ``num_samples`` samples ``epochs`` times.

    No sample is dropped, so an epoch ends within a step if the batch size does not divide it, and only the last step is
    rounded up, like an accumulated step in Hugging Face's trainer.  ``iteration`` and ``consumed`` are the run's
    progress, and ``began_at`` is the number of samples consumed before it began with this data.
    """
    last = began_at + num_samples * Fraction(repr(epochs))  # exact decimal value: 0.29 x 100 is 29
    return iteration + max(0, math.ceil((last - consumed) / global_batch_size))


def _progress(run: Run, source: Source | None, dataset: Dataset) -> tuple[int, int, int]:
    """Iteration and consumed samples at the start of the run, and samples consumed before it began with this data."""
    if source is None or source.iteration is None:
        return 0, 0, 0
    consumed = consumed_by(source, run)
    data = source.manifest and source.manifest.data
    if data is None:
        return source.iteration, consumed, 0
    then = TrainedOn.from_json(data, source.path)
    now = then.followed_by(dataset.contents(), order_description(run), consumed, run.args.allow_new_data)
    return source.iteration, consumed, now.began_at
