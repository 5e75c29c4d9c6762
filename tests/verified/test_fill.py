"""Cards are filled and checked by real runs of the tiny model on this machine."""

import math
import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from mm.device.platforms import PLATFORMS
from mm.errors import UserError
from tests.files import ROOT
from tests.launch import warm_python
from verified.card import path_of, read_card, write_card
from verified.check import compare
from verified.fill import commit_of, with_outcomes
from verified.outcome import Outcome, read_outcome

CARD = read_card(path_of("tiny-cpu-train"))


def command(module: str, directory: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run ``module`` from ``directory``, which has links to what the commands of cards need."""
    for name in ("examples", "verified"):
        if not (directory / name).exists():
            (directory / name).symlink_to(ROOT / name)
    python = str(warm_python())
    return subprocess.run([python, "-m", module, *words], cwd=directory, env=os.environ | {"PYTHON": python},
                          capture_output=True, text=True, timeout=500, check=False)


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A card like the committed one of the tiny training, filled here."""
    directory = tmp_path_factory.mktemp("filled")
    path = directory / f"{CARD.name}.yaml"
    write_card(replace(CARD, status="unverified", losses=(), answers=(), figures={}, data_digest=None,
                       device_name=None, versions={}, commit=None, date=None, by=None), path)
    done = command("verified.fill", directory, str(path), "--by", "a test", "--once", "--allow-dirty")
    assert done.returncode == 0, done.stdout + done.stderr
    return path


def test_a_filled_card_has_what_came_out(filled: Path):
    card = read_card(filled)
    assert card.is_verified and card.by == "a test" and card.device_name == "cpu"
    assert card.versions.keys() >= {"python", "torch", "megatron-core", "transformers"}
    assert card.commit is not None and card.commit.startswith(commit_of(ROOT, allow_dirty=True)[:40])
    assert card.figures["tokens_per_second_per_device"] > 0
    assert (card.tolerance, card.measured_error) == (CARD.tolerance, CARD.measured_error)


def test_the_committed_card_is_true(filled: Path):
    """The same run, compared with the card of this repository."""
    assert "4 losses differ by at most" in compare(CARD, read_outcome(CARD, filled.parent))


@pytest.mark.parametrize("job", ["generate", "convert"])
def test_other_cards_are_true(tmp_path: Path, job: str):
    done = command("verified.check", tmp_path, f"verified/tiny-cpu-{job}.yaml")
    assert done.returncode == 0, done.stdout + done.stderr
    assert {"generate": "3 answers are the same", "convert": "the commands succeeded"}[job] in done.stdout


def test_check_finds_a_changed_loss_and_a_changed_answer(filled: Path):
    card = read_card(filled)
    same = command("verified.check", filled.parent, str(filled), "--ran")
    assert same.returncode == 0 and "4 losses differ by at most 0.0e+00" in same.stdout, same.stderr
    changed = filled.parent / "changed" / filled.name
    write_card(replace(card, losses=(*card.losses[:2], card.losses[2] * 1.001, card.losses[3])), changed)
    done = command("verified.check", filled.parent, str(changed), "--ran")
    assert done.returncode == 2
    assert f"{card.name}: step 3 has loss {card.losses[2]!r}; the card has" in done.stderr
    assert "relative difference of 1.0e-03 where at most 1e-05 is allowed" in done.stderr
    assert "python -m verified.fill" in done.stderr
    asked = read_card(path_of("tiny-cpu-generate"))
    outcome = Outcome(answers=("something else", *asked.answers[1:]), data_digest=asked.data_digest)
    with pytest.raises(UserError, match="answer 1 is 'something else'; the card has"):
        compare(asked, outcome)


def test_other_data_are_not_compared(filled: Path):
    card = read_card(filled)
    with pytest.raises(UserError, match="so the data differ"):
        compare(card, Outcome(losses=card.losses, data_digest="0"))
    with pytest.raises(UserError, match="the run has 3 steps, the card 4"):
        compare(card, Outcome(losses=card.losses[:3], data_digest=card.data_digest))


@pytest.mark.parametrize("module", ["verified.fill", "verified.check"])
def test_another_device_is_refused(tmp_path: Path, module: str):
    other = next(one.name for one in PLATFORMS if one.fault() is not None)
    path = tmp_path / f"tiny-{other}-train.yaml"
    committed = read_card(path_of(f"tiny-{other}-train"))
    status = "unverified" if module == "verified.fill" else "verified"
    results = {} if module == "verified.fill" else {
        "losses": CARD.losses, "versions": CARD.versions, "commit": CARD.commit, "date": CARD.date, "by": "a test"}
    write_card(replace(committed, status=status, **results), path)
    flags = ["--by", "a test", "--allow-dirty"] if module == "verified.fill" else []
    done = command(module, tmp_path, str(path), *flags)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert f"is a card for {other}, which cannot be used here" in done.stderr
    assert "or fill a card of this one: verified/*-" in done.stderr
    assert not (tmp_path / "runs").exists()


def test_an_unverified_card_cannot_be_checked(tmp_path: Path):
    done = command("verified.check", tmp_path, "verified/7b-npu-finetune.yaml")
    assert done.returncode == 2
    assert "is unverified, so there is nothing to compare with; python -m verified.fill" in done.stderr


def test_a_failed_command_is_shown_and_the_card_stays(tmp_path: Path):
    path = tmp_path / "tiny-cpu-doctor.yaml"
    card = replace(read_card(path_of("tiny-npu-doctor")), device="cpu",
                   commands=("python -m mm.doctor.cli --devise cpu runs/verified/tiny-cpu-doctor DEVICE=cpu",))
    write_card(card, path)
    before = path.read_bytes()
    done = command("verified.fill", tmp_path, str(path), "--by", "a test", "--allow-dirty")
    assert done.returncode == 2 and path.read_bytes() == before
    assert "ended with status 2. The end of its output" in done.stderr and "--devise" in done.stderr


@pytest.mark.parametrize(("losses", "shown"), [((1.0, math.nan), r"\[1.0, nan\]"), ((), r"\[\]")])
def test_losses_that_are_no_numbers_do_not_fill_a_card(losses: tuple[float, ...], shown: str):
    with pytest.raises(UserError, match=f"the losses of the run are {shown}; expected a finite number"):
        with_outcomes(CARD, [Outcome(losses=losses)])


def test_two_runs_measure_the_error():
    card = replace(CARD, measured_error=None, measured_between=None)
    runs = [Outcome(losses=(2.0, 1.0)), Outcome(losses=(2.0, 1.0 + 2e-6))]
    found = with_outcomes(card, runs)
    assert found.measured_error == pytest.approx(2e-6) and found.measured_between == "two runs"
    earlier = with_outcomes(replace(card, measured_error=5e-6, measured_between="two machines"), runs)
    assert (earlier.measured_error, earlier.measured_between) == (5e-6, "two machines")
    for last in (1.1, math.nan):
        with pytest.raises(UserError, match="two runs of the same commands differ by"):
            with_outcomes(card, [runs[0], Outcome(losses=(2.0, last))])


def test_a_card_names_a_commit_that_has_all_changes(tmp_path: Path):
    def git(*words: str) -> None:
        subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b", *words], cwd=tmp_path, check=True,
                       capture_output=True)

    (tmp_path / "verified").mkdir()
    for name in ("code.py", "verified/card.yaml"):
        (tmp_path / name).write_text("1")
    git("init")
    git("add", ".")
    git("commit", "-m", "first")
    (tmp_path / "verified/card.yaml").write_text("2")  # cards are filled one after the other
    commit = commit_of(tmp_path, allow_dirty=False)
    (tmp_path / "code.py").write_text("2")
    with pytest.raises(UserError, match=r"(?s)differ from the commit .*code.py"):
        commit_of(tmp_path, allow_dirty=False)
    assert commit_of(tmp_path, allow_dirty=True) == f"{commit}-dirty"
