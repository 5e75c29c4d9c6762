"""Which samples a run trains on, as a checkpoint keeps it: what has changed when a run goes on, dataset by dataset.

Numbers of records and checksums only; files are not looked at here.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from mm.errors import UserError


@dataclass(frozen=True)
class Contents:
    """One dataset."""

    dataset: str
    """As the data JSON names it."""
    file_sha256: str
    num_samples: int
    """That are taken of it."""
    samples_sha256: str
    """Of their numbers in the file, int64, in the order in which they are taken."""

    @property
    def identity(self) -> tuple[str, str]:
        """What must be the same; the name need not be."""
        return self.file_sha256, self.samples_sha256


@dataclass(frozen=True)
class TrainedOn:
    """The data of a run."""

    datasets: tuple[Contents, ...]
    began_at: int = 0
    """Samples that the run had trained on before, of other data or in another order."""
    order: str | None = None
    """In which the samples come; None where an older version did not say."""

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> "TrainedOn":
        """The inverse of ``to_json``."""
        return cls(tuple(Contents(**one) for one in content["datasets"]), content["began_at"], content.get("order"))

    def to_json(self) -> dict[str, Any]:
        """As a manifest keeps it."""
        return asdict(self)

    def followed_by(
        self, now: Sequence[Contents], order: str, consumed_samples: int, may_differ: bool
    ) -> "TrainedOn":
        """What the run trains on when it goes on with the datasets ``now`` in this ``order``.

        Other ones, and another order, begin at their first sample.  Raises UserError for these unless they
        ``may_differ``.
        """
        changes = self.changes(now, order)
        if not changes:
            return replace(self, order=order)
        if not may_differ:
            raise UserError(
                f"the data are not those of the checkpoint: {'; '.join(changes)}.  So the order of the samples is "
                f"another one, and which were trained on cannot be told: give the same data and --seed; or add "
                f"--allow-new-data, which goes on with these from their first sample; or --finetune, which starts at "
                f"step 0.")
        return TrainedOn(tuple(now), consumed_samples, order)

    def changes(self, now: Sequence[Contents], order: str) -> list[str]:
        """How the datasets ``now`` in this ``order`` differ, one sentence each."""
        other = [] if self.order in (None, order) else [f"the samples were {self.order}, and are {order} now"]
        return [*changed(self.datasets, now), *other]


def changed(then: Sequence[Contents], now: Sequence[Contents]) -> Iterator[str]:
    """What is otherwise now, one sentence for each dataset; files that were only moved or renamed are the same."""
    if [one.identity for one in then] == [one.identity for one in now]:
        return
    if Counter(one.identity for one in then) == Counter(one.identity for one in now):
        before, after = (", ".join(one.dataset for one in datasets) for datasets in (then, now))
        yield f"the datasets stood in the order {before}, and now in {after}"
        return
    gone, new = _beside(then, now), _beside(now, then)
    for one in gone:
        same_file = next((other for other in new if other.file_sha256 == one.file_sha256), None)
        same_name = next((other for other in new if other.dataset == one.dataset), None)
        if same_file is not None:
            new.remove(same_file)
            yield (f"other samples of {one.dataset} are taken ({one.num_samples} then, {same_file.num_samples} now), "
                   f"by a rate (%), max_samples, val_rate, --seed or --seq-length, or because samples were mended")
        elif same_name is not None:
            new.remove(same_name)
            yield f"{one.dataset} holds something else ({one.num_samples} samples then, {same_name.num_samples} now)"
        else:
            yield f"{one.dataset} with {one.num_samples} samples is missing"
    for one in new:
        yield f"{one.dataset} with {one.num_samples} samples is new"


def _beside(some: Sequence[Contents], others: Sequence[Contents]) -> list[Contents]:
    """Those of ``some`` that have no equal among ``others``."""
    left, found = Counter(one.identity for one in others), []
    for one in some:
        if left[one.identity]:
            left[one.identity] -= 1
        else:
            found.append(one)
    return found
