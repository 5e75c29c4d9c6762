"""A card that is wrong is refused with file, line and cure; the committed ones are right."""

import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from mm.config.flags import parse
from mm.errors import UserError
from tests.test_examples import run_script, train_flags
from verified.card import Card, cards, path_of, read_card, write_card

VERIFIED = Card(
    size="tiny", device="cpu", job="train", status="verified", tolerance=1e-5, losses=(2.0, 1.5),
    commands=("python -m mm.train --device cpu --log-dir runs/verified/tiny-cpu-train/logs",),
    measured_error=1e-7, measured_between="two runs", versions={"torch": "2.13.0"}, commit="0" * 40,
    date="2026-11-28", by="somebody", figures={"step_seconds": 0.5})  # fmt: skip
PUBLISHED = ("3b", "7b", "32b", "72b")


def written(tmp_path: Path, *changes: tuple[str, str]) -> Path:
    """The card ``VERIFIED`` with words of its text replaced."""
    path = tmp_path / "tiny-cpu-train.yaml"
    write_card(VERIFIED, path)
    text = path.read_text(encoding="utf-8")
    for old, new in changes:
        assert old in text
        text = text.replace(old, new, 1)
    path.write_text(text, encoding="utf-8")
    return path


def test_what_is_written_is_read(tmp_path: Path):
    assert read_card(written(tmp_path)) == VERIFIED
    assert read_card(written(tmp_path, ("'2026-11-28'", "2026-11-28"))) == VERIFIED


@pytest.mark.parametrize(("old", "new", "message"), [
    ("tolerance:", "tolerence:", r"train.yaml:\d+: tolerence is not a known key \(did you mean 'tolerance'\?\)"),
    ("job: train", "job: trian", r"yaml:3: job is \"trian\"; supported: .*did you mean 'train'"),
    ("device: cpu", "device: gpu", r"device is 'gpu'; expected one of npu, cuda, cpu"),
    ("size: tiny", "size: 7b", r"make the name 7b-cpu-train.yaml; rename the file"),
    ("num_nodes: 1", "num_nodes: 0", r"yaml:4: num_nodes is 0; expected an integer of at least 1"),
    ("- 1.5", "- high", r"losses is \[2.0, \"high\"\]; expected a list of losses"),
    ("2026-11-28", "yesterday", r"date is \"yesterday\"; expected a date like 2026-01-31"),
    ("by: somebody\n", "", r"status is verified, but by is missing; run it again: python -m verified.fill"),
    ("'" + "0" * 40 + "'", "main", r"commit is 'main'; expected the 40 digits"),
    ("status: verified", "status: unverified", r"status is unverified, but it has losses, .*python -m verified.fill"),
    ("measured_error: 1e-07", "measured_error: 0.1", r"above the tolerance of 1.0e-05"),
    ("measured_between: two runs\n", "", r"belong together"),
    ("tolerance: 1e-05\n", "", r"tolerance is missing"),
    ("runs/verified/tiny-cpu-train/logs", "logs", r"no command writes to runs/verified/tiny-cpu-train"),
    ("--device cpu", "", r"add --device cpu or DEVICE=cpu"),
    ("size: tiny", "size: [", r"tiny-cpu-train.yaml:\d+: "),
])  # fmt: skip
def test_mistakes_are_explained(tmp_path: Path, old: str, new: str, message: str):
    path = written(tmp_path, (old, new))
    with pytest.raises(UserError, match=message) as error:
        read_card(path)
    assert str(path) in str(error.value)


def test_an_unverified_card_invites(tmp_path: Path):
    path = path_of("tiny-npu-train")
    assert read_card(path).status == "unverified"
    assert path.read_text().startswith(
        "# Unverified; this command fills it: python -m verified.fill verified/tiny-npu-train.yaml --by NAME\n")


def test_every_card_can_be_read_and_the_devices_have_the_same():
    found = {card.name: card for card in cards()}
    assert len(found) > 20
    for card in found.values():
        if card.device == "cuda":
            other = found[f"{card.size}-npu-{card.job}"]
            assert [one.replace("cuda", "npu") for one in card.commands] == list(other.commands)
            if card.size == "tiny":
                cpu = found[f"tiny-cpu-{card.job}"]
                assert [re.sub("cuda", "cpu", one) for one in card.commands] == list(cpu.commands)


@pytest.mark.parametrize("size", PUBLISHED)
def test_commands_of_the_published_sizes_are_accepted(tmp_path: Path, size: str):
    card = read_card(path_of(f"{size}-npu-finetune"))
    (command,) = card.commands
    words = shlex.split(command)
    variables = dict(word.split("=", 1) for word in words[: words.index("bash")])
    outcome, argv = run_script(tmp_path, size, *words[words.index("bash") + 2 :], MASTER_ADDR="10.0.0.1", **variables)
    assert outcome.returncode == 0, outcome.stderr
    args = parse(train_flags(argv))
    assert (args.train_iters, args.device, args.log_dir) == (20, "npu", f"runs/verified/{card.name}/logs")
    nodes, devices = (int(argv[argv.index(flag) + 1]) for flag in ("--nnodes", "--nproc_per_node"))
    assert (nodes, nodes * devices) == (card.num_nodes, card.num_devices)


def test_a_card_of_a_job_without_losses_needs_none(tmp_path: Path):
    card = replace(VERIFIED, job="doctor", losses=(), tolerance=None, measured_error=None, measured_between=None,
                   commands=("python -m mm.doctor.cli --device cpu --report runs/verified/tiny-cpu-doctor/report",))
    write_card(card, tmp_path / "tiny-cpu-doctor.yaml")
    assert read_card(tmp_path / "tiny-cpu-doctor.yaml") == card
