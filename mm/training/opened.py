"""Files of a run that a process has already opened.

The check before a run, on one rank, opens most of what the start needs.  It hands that over in an ``Opened``, so that
the start on that rank opens only what is missing.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from mm.config.run import Run
from mm.data.encode.encoder import SampleEncoder
from mm.data.index.dataset import Dataset, datasets
from mm.data.index.gauge import Gauge
from mm.data.index.sample_files import Split
from mm.errors import refuse
from mm.scoring.benchmarks import Items
from mm.training.sources import Sources


@dataclass(frozen=True)
class Samples:
    """The samples of a run, and the gauge with their encoder."""

    gauge: Gauge
    splits: Mapping[Split, Dataset]

    @classmethod
    def open(cls, run: Run, with_validation: bool) -> "Samples":
        """Open the training samples, and with ``with_validation`` the validation samples if there are any.

        An existing index is used even with ``overwrite_cache``, because the rank that checks has just rebuilt it.
        Raises UserError as ``Gauge.from_config`` and ``Dataset`` do.
        """
        data, problems = replace(run.data, overwrite_cache=False), []
        gauge = Gauge.from_config(data, run.model, run.args.seq_length)
        splits = datasets(data, problems, run.args.bad_sample == "skip", gauge, run.args.seed, with_validation)
        refuse(problems)
        return cls(gauge, splits)


@dataclass(frozen=True)
class Questions:
    """The questions that the model answers during training, and their encoder."""

    items: Items
    encoder: SampleEncoder


@dataclass(frozen=True)
class Opened:
    """What this process has opened so far; the start opens the rest."""

    sources: Sources | None = None
    samples: Samples | None = None
    questions: Questions | None = None
