"""Which samples a run trains on, as checkpoints record it: finds what has changed at a resume, dataset by dataset.

Compares numbers of records and checksums only; files are not read here.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from mm.errors import UserError
from mm.formats.manifest import validated


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


def changed(then: Sequence[Contents], now: Sequence[Contents]) -> Iterator[str]:
    """The differences, one sentence per dataset.  Files that were only moved or renamed count as unchanged."""
    if [one.identity for one in then] == [one.identity for one in now]:
        return
    if Counter(one.identity for one in then) == Counter(one.identity for one in now):
        before, after = (", ".join(one.dataset for one in datasets) for datasets in (then, now))
        yield f"the datasets were in the order {before}, and are now in the order {after}"
        return
    gone, new = _beside(then, now), _beside(now, then)
    for one in gone:
        same_file = next((other for other in new if other.file_sha256 == one.file_sha256), None)
        same_name = next((other for other in new if other.dataset == one.dataset), None)
        if same_file is not None:
            new.remove(same_file)
            yield (f"other samples of {one.dataset} are used ({one.num_samples} then, {same_file.num_samples} now), "
                   f"because of a rate (%), max_samples, val_rate, --seed, --seq-length, or repaired samples")
        elif same_name is not None:
            new.remove(same_name)
            yield f"{one.dataset} has changed ({one.num_samples} samples then, {same_name.num_samples} now)"
        else:
            yield f"{one.dataset} with {one.num_samples} samples is missing"
    for one in new:
        yield f"{one.dataset} with {one.num_samples} samples is new"


def _beside(some: Sequence[Contents], others: Sequence[Contents]) -> list[Contents]:
    """Those of ``some`` without an equal in ``others``."""
    left, found = Counter(one.identity for one in others), []
    for one in some:
        if left[one.identity]:
            left[one.identity] -= 1
        else:
            found.append(one)
    return found
