"""The fields of a card, and how it is read and written."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from datetime import date as calendar_date
from io import StringIO
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, Strict
from pydantic.dataclasses import dataclass
from ruamel.yaml import YAML

from mm.config.read_yaml import read_yaml
from mm.config.schema import STRICT, Count, NotNegative, Number, Positive, read_settings
from mm.device.platforms import PLATFORMS
from mm.errors import nearest
from mm.files import write_whole

FOLDER = Path(__file__).parent
RUNS = "runs/verified"
"""Where the commands of all cards write, from the repository's root; each card has a folder of its own there."""

Size = Literal["tiny", "3b", "7b", "32b", "72b"]
Job = Literal["doctor", "train", "lora", "demo", "convert", "generate", "finetune"]
LOSSES: tuple[Job, ...] = ("train", "lora", "demo", "finetune")
"""Jobs whose result is the loss of each step, in ``logs/metrics.jsonl`` of the card's folder."""
ANSWERS: tuple[Job, ...] = ("generate",)
"""Jobs whose result is answers, in ``answers.jsonl`` of the card's folder.  The commands of the others check
themselves: they end with status 0."""
_RESULTS = ("losses", "answers", "figures", "data_digest", "device_name", "versions", "commit", "date", "by")
"""Fields that only a verified card has.  An error that was measured before, as between machines, stays on any card."""
_COMMIT = re.compile(r"[0-9a-f]{40}(-dirty)?")
_WIDTH = 120


def _as_text(value: Any) -> Any:
    """A date as text: YAML reads one without quotes as a date."""
    return value.isoformat() if isinstance(value, calendar_date) else value


Device = Annotated[str, Field(title=f"one of {', '.join(one.name for one in reversed(PLATFORMS))}")]
Date = Annotated[str, BeforeValidator(_as_text), Field(pattern=r"^\d{4}-\d\d-\d\d$", title="a date like 2026-01-31")]
# Strict(False): a YAML list becomes a tuple.
Commands = Annotated[
    tuple[str, ...], Strict(False),
    Field(title="a list of commands, each beginning with bash or python -m, after variables if any")]
Losses = Annotated[tuple[Number, ...], Strict(False), Field(title="a list of losses, one for each step")]
Answers = Annotated[tuple[str, ...], Strict(False), Field(title="a list of texts")]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Card:
    """A job, and what came out of it."""

    size: Size
    device: Device
    job: Job
    num_nodes: Count = 1
    num_devices: Count = 1
    """On all nodes together."""
    status: Literal["unverified", "verified"]
    note: str | None = None
    commands: Commands
    """Run in this order, from the repository's root."""
    data: str | None = None
    """File or folder whose digest belongs to the result."""
    tolerance: Positive | None = None
    """Largest relative difference of a loss; None for jobs without losses."""
    measured_error: NotNegative | None = None
    """Largest relative difference that was measured and is not a fault; None if it was not measured."""
    measured_between: str | None = None
    """What differed when it was measured."""
    losses: Losses = ()
    answers: Answers = ()
    figures: Annotated[dict[str, float], Field(title="figures by name")] = Field(default_factory=dict)
    """For information, never compared: machines differ."""
    data_digest: str | None = None
    device_name: str | None = None
    versions: Annotated[dict[str, str], Field(title="versions by package")] = Field(default_factory=dict)
    commit: str | None = None
    date: Date | None = Field(None, title="a date like 2026-01-31")
    by: str | None = None

    @property
    def name(self) -> str:
        return f"{self.size}-{self.device}-{self.job}"

    @property
    def is_verified(self) -> bool:
        return self.status == "verified"

    @property
    def path(self) -> Path:
        """Its file in this repository."""
        return path_of(self.name)

    @property
    def fill_command(self) -> str:
        return f"python -m verified.fill verified/{self.name}.yaml --by NAME"


def path_of(name: str) -> Path:
    return FOLDER / f"{name}.yaml"


def cards() -> list[Card]:
    """All cards of this repository, by size, job and device."""
    found = [read_card(path) for path in FOLDER.glob("*.yaml")]
    orders = (Size.__args__, Job.__args__, [one.name for one in reversed(PLATFORMS)])
    return sorted(found, key=lambda one: [tuple(order).index(word) for order, word in
                                          zip(orders, (one.size, one.job, one.device), strict=True)])


def read_card(path: Path) -> Card:
    """Read and check a card; raises UserError with every problem and its line."""
    return read_settings(path, Card, {"": {}}, lambda card: _problems(card, path.stem), read_yaml).value


def write_card(card: Card, path: Path) -> None:
    """Write the fields that are not empty."""
    fields: Mapping[str, Any] = {name: list(value) if isinstance(value, tuple) else value
                                 for name, value in asdict(card).items() if value not in (None, (), {})}
    writer: Any = YAML(pure=True)
    writer.default_flow_style, writer.width = False, 10 * _WIDTH
    text = StringIO()
    if not card.is_verified:
        text.write(f"# Unverified; this command fills it: {card.fill_command}\n")
    writer.dump(fields, text)
    write_whole(path, text.getvalue().encode())


def _problems(card: Card, stem: str) -> Iterator[str]:
    """What contradicts itself."""
    known = [one.name for one in PLATFORMS]
    if card.device not in known:
        yield f"device is {card.device!r}; expected one of {', '.join(known)}{nearest(card.device, known)}"
    if stem != card.name:
        yield f"its size, device and job make the name {card.name}.yaml; rename the file, or change them"
    yield from _command_problems(card)
    yield from _tolerance_problems(card)
    given = [name for name in _RESULTS if getattr(card, name) not in (None, (), {})]
    if not card.is_verified and given:
        yield f"status is unverified, but it has {', '.join(given)}; results come from a run: {card.fill_command}"
    if card.is_verified:
        yield from _result_problems(card)


def _command_problems(card: Card) -> Iterator[str]:
    own = f"{RUNS}/{card.name}"
    if not any(own in command for command in card.commands):
        yield f"no command writes to {own}, where the results of this card are looked for"
    words = " ".join(card.commands)
    if card.job != "convert" and not re.search(rf"(--device |DEVICE=){card.device}\b", words):
        yield f"no command names the device; add --device {card.device} or DEVICE={card.device}"


def _tolerance_problems(card: Card) -> Iterator[str]:
    if (card.job in LOSSES) != (card.tolerance is not None):
        yield (f"tolerance is {'missing' if card.tolerance is None else 'without effect'}; the jobs with losses have "
               f"one: {', '.join(LOSSES)}")
    if (card.measured_error is None) != (card.measured_between is None):
        yield "measured_error and measured_between belong together; give both or neither"
    if card.tolerance is not None and (card.measured_error or 0) > card.tolerance:
        yield (f"measured_error is {card.measured_error:.1e}, above the tolerance of {card.tolerance:.1e}; raise the "
               f"tolerance, or find out why the runs differ")


def _result_problems(card: Card) -> Iterator[str]:
    needed = ["versions", "commit", "date", "by", *(["losses"] if card.job in LOSSES else []),
              *(["answers"] if card.job in ANSWERS else [])]
    if missing := [name for name in needed if not getattr(card, name)]:
        yield f"status is verified, but {', '.join(missing)} is missing; run it again: {card.fill_command}"
    if card.commit is not None and not _COMMIT.fullmatch(card.commit):
        yield f"commit is {card.commit!r}; expected the 40 digits of git rev-parse HEAD"
