"""Which samples a run trains on, as checkpoints record it: finds what has changed at a resume, dataset by dataset.

Compares numbers of records and checksums only; files are not read here.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from mm.checkpoint.manifest import validated
from mm.errors import UserError, counted


@dataclass(frozen=True)
class Contents:
    """The samples of one dataset."""

    dataset: str
    """Its name in the data JSON."""
    file_sha256: str
    num_samples: int
    """Number of samples in use."""
    samples_sha256: str
    """SHA-256 of the samples' int64 numbers in the file, in order of use."""

    @property
    def identity(self) -> tuple[str, str]:
        """What must not change; the name may."""
        return self.file_sha256, self.samples_sha256


@dataclass(frozen=True)
class TrainedOn:
    """The data of a run."""

    datasets: tuple[Contents, ...]
    began_at: int = 0
    """Samples that the run consumed before it switched to these data or this order."""
    order: str | None = None
    """A description of the sample order; None in checkpoints of older versions."""

    @classmethod
    def from_json(cls, content: Mapping[str, Any], folder: Path) -> "TrainedOn":
        """The inverse of ``to_json``, from the manifest in ``folder``; raises UserError for other content."""
        return validated(cls, content, folder, "data")

    def to_json(self) -> dict[str, Any]:
        """For the manifest."""
        return asdict(self)

    def followed_by(
        self, now: Sequence[Contents], order: str, consumed_samples: int, may_differ: bool
    ) -> "TrainedOn":
        """The data of a run that resumes with the datasets ``now`` in this ``order``.

        Changed data or a changed order start at the first sample.  Raises UserError for changes unless they
        ``may_differ``.
        """
        changes = self.changes(now, order)
        if not changes:
            return replace(self, order=order)
        if not may_differ:
            raise UserError(
                f"the data differ from those of the checkpoint: {'; '.join(changes)}.  This changes the order of the "
                f"samples, so it is unknown which were trained on: give the same data and --seed; or add "
                f"--allow-new-data, which continues with the new data from their first sample; or --finetune, which "
                f"starts at step 0.")
        return TrainedOn(tuple(now), consumed_samples, order)

    def changes(self, now: Sequence[Contents], order: str) -> list[str]:
        """How the datasets ``now`` in this ``order`` differ, one sentence per difference."""
        other = [] if self.order in (None, order) else [f"the samples were {self.order}, and are now {order}"]
        return [*changed(self.datasets, now), *other]


def changed(then: Sequence[Contents], now: Sequence[Contents]) -> list[str]:
    """The differences, one sentence per dataset.  Files that were only moved or renamed count as unchanged."""
    before, after = ([one.identity for one in datasets] for datasets in (then, now))
    if before == after:
        return []
    gone = [one for one in then if one.identity not in after]
    found: list[str] = []
    for one in now:
        if one.identity in before:
            continue
        same_file = next((other for other in gone if other.file_sha256 == one.file_sha256), None)
        same_name = next((other for other in gone if other.dataset == one.dataset), None)
        if (other := same_file or same_name) is None:
            found.append(f"{one.dataset} with {counted(one.num_samples, 'sample')} is new")
            continue
        gone.remove(other)
        numbers = f"({other.num_samples} then, {one.num_samples} now)"
        found.append(f"{other.dataset} has changed {numbers}" if same_file is None else
                     f"other samples of {other.dataset} are used {numbers}, because of a rate (%), max_samples, "
                     f"val_rate, --seed, --seq-length, or repaired samples")
    found += [f"{one.dataset} with {counted(one.num_samples, 'sample')} is missing" for one in gone]
    names = (", ".join(one.dataset for one in datasets) for datasets in (then, now))
    return found or ["the datasets were {}, and are now {}".format(*names)]
