"""Runs the commands of a card, and reads what came out."""

import hashlib
import math
import os
import platform as python_platform
import re
import shlex
import shutil
import statistics
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

from mm.device.platforms import usable_platform
from mm.errors import UserError, reading
from mm.files import json_object, sha256
from mm.ports import free_port
from mm.requirements import installed
from mm.training.metrics import run_facts, step_rows
from mm.version import DECISIVE
from verified.card import ANSWERS, LOSSES, RUNS, Card

INPUTS = f"{RUNS}/inputs"
"""Inputs that several cards need, in one folder; the commands of each card create them again."""
_VARIABLE = re.compile(r"([A-Z_][A-Z0-9_]*)=(.*)", re.DOTALL)
_NUM_TAIL_LINES = 30


@dataclass(frozen=True)
class Outcome:
    """What the commands of a card gave."""

    losses: tuple[float, ...] = ()
    answers: tuple[str, ...] = ()
    figures: dict[str, float] = field(default_factory=dict)
    device_name: str | None = None
    versions: dict[str, str] = field(default_factory=dict)
    data_digest: str | None = None


def refuse_other_device(card: Card) -> None:
    """Raise UserError unless the card's device is here, and enough of them."""
    try:
        platform = usable_platform(card.device)
    except UserError as error:
        here = usable_platform("auto").name
        raise UserError(f"{card.name} is a card for {card.device}, which cannot be used here ({error}). Run it on a "
                        f"machine with such devices, or fill a card of this one: verified/*-{here}-*.yaml") from error
    found, needed = platform.num_devices(), -(-card.num_devices // card.num_nodes)
    if found is not None and found < needed:
        raise UserError(f"{card.name} needs {needed} {card.device} devices on a node; {found} found. Run it on a "
                        f"larger machine, or fill another card")


def run_commands(card: Card, directory: Path) -> None:
    """Run the commands from ``directory``, in empty folders.

    Raises UserError with the end of the output of the first that fails.
    """
    if card.num_nodes > 1:
        raise UserError(f"{card.name} needs {card.num_nodes} nodes. Run its commands on each of them (MASTER_ADDR and "
                        f"NODE_RANK set), with {RUNS} on a disk that all share, and give --ran here")
    for folder in (INPUTS, f"{RUNS}/{card.name}"):
        shutil.rmtree(directory / folder, ignore_errors=True)
    for command in card.commands:
        print(f"$ {command}", flush=True)
        _run(command, directory)


def read_outcome(card: Card, directory: Path) -> Outcome:
    """Read the files that the commands left below ``directory``."""
    folder = directory / RUNS / card.name
    rows, facts = ([], {})
    with reading():
        if card.job in LOSSES:
            rows, facts = step_rows(folder / "logs"), run_facts(folder / "logs")["ran_on"]
        lines = (folder / "answers.jsonl").read_bytes().splitlines() if card.job in ANSWERS else []
        digest = None if card.data is None else _digest(directory / card.data)
    return Outcome(
        losses=tuple(math.nan if row["loss"] is None else row["loss"] for row in rows),
        answers=tuple(json_object(line)["answer"] for line in lines),
        figures=_figures(rows), device_name=facts.get("device"),
        versions=_versions(card) | facts.get("versions", {}), data_digest=digest)


def _run(command: str, directory: Path) -> None:
    words, variables = shlex.split(command), dict[str, str]()
    while words and (match := _VARIABLE.fullmatch(words[0])):
        variables[match[1]] = match[2]
        words = words[1:]
    environment = {"PYTHON": sys.executable, "MASTER_PORT": str(free_port()), **os.environ, **variables}
    if words[:2] == ["python", "-m"]:
        words[0] = environment["PYTHON"]
    elif words[:1] != ["bash"]:
        raise UserError(f"the command {command!r} does not begin with bash or python -m; write it so")
    done = subprocess.run(words, cwd=directory, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, text=True, errors="replace", check=False)
    if done.returncode:
        tail = "\n".join(done.stdout.splitlines()[-_NUM_TAIL_LINES:])
        raise UserError(f"the command {command!r} ended with status {done.returncode}. The end of its output:\n{tail}")


def _figures(rows: list[dict]) -> dict[str, float]:
    """Medians over the second half of the steps: the first compile and warm up."""
    late = rows[len(rows) // 2 :]
    if not late:
        return {}
    speed = statistics.median(row["tokens_per_second_per_device"] for row in late)
    seconds = statistics.median(row["step_seconds"] for row in late)
    memory = max(row["max_memory_bytes"] for row in rows)
    return {"tokens_per_second_per_device": float(f"{speed:.4g}"), "step_seconds": float(f"{seconds:.4g}"),
            "max_memory_gib": round(memory / 2**30, 2)}


def _versions(card: Card) -> dict[str, str]:
    found = {name: version for name in DECISIVE if (version := installed(name)) is not None}
    return {"python": python_platform.python_version(), **found, **usable_platform(card.device).versions()}


def _digest(path: Path) -> str:
    """SHA-256 of a file, or of the names and digests of all files in a folder.

    Hidden ones are left out: a run keeps its index of the data in such a folder.
    """
    if path.is_dir():
        names = sorted(one for one in path.rglob("*")
                       if one.is_file() and not any(name.startswith(".") for name in one.relative_to(path).parts))
        listed = "".join(f"{one.relative_to(path).as_posix()} {_digest(one)}\n" for one in names)
        return hashlib.sha256(listed.encode()).hexdigest()
    with path.open("rb") as stream:
        return sha256(stream)
