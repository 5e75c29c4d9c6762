"""What a process has opened of the files that its run reads.

The check before a run, which one rank makes, opens most of what the start needs.  It hands that over in an ``Opened``,
and the start opens only what is missing there: on the rank that checked, nothing is opened twice.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from mm.config.run import Run
from mm.data.encode.encoder import SampleEncoder
from mm.data.index.dataset import Dataset, validation_dataset
from mm.data.index.gauge import Gauge
from mm.data.index.sample_files import Part
from mm.scoring.benchmarks import Items
from mm.training.sources import Sources


@dataclass(frozen=True)
class Samples:
    """The samples of a run, and what measures and encodes them."""

    gauge: Gauge
    parts: Mapping[Part, Dataset]

    @classmethod
    def open(cls, run: Run, with_validation: bool) -> "Samples":
        """Open the samples for training, and those for validation where they are wanted and there are any.

        Their index must be there: a rank that does not check leaves ``overwrite_cache`` to the one that does.  Raises
        UserError as ``Dataset`` does.
        """
        data, skips_bad, seed = replace(run.data, overwrite_cache=False), run.args.bad_sample == "skip", run.args.seed
        gauge = Gauge.from_config(data, run.model, run.args.seq_length)
        parts: dict[Part, Dataset] = {"training": Dataset(data, skips_bad, gauge, seed)}
        validation = validation_dataset(data, skips_bad, gauge, seed, parts["training"]) if with_validation else None
        return cls(gauge, parts if validation is None else {**parts, "validation": validation})


@dataclass(frozen=True)
class Questions:
    """The questions that the model in training answers, and what encodes them."""

    items: Items
    encoder: SampleEncoder


@dataclass(frozen=True)
class Opened:
    """What this process has opened so far; the start opens what it needs beside that."""

    sources: Sources | None = None
    samples: Samples | None = None
    questions: Questions | None = None
