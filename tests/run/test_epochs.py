"""``--num-train-epochs``: the number of steps, on every rank and after resuming."""

import math
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mm.run.schedule import num_steps_of
from mm.train import main
from tests.launch import run_ranks
from tests.tiny_inputs import flags_of, metrics, run, write_inputs


@given(st.integers(1, 10**6), st.integers(1, 4096), st.integers(1, 1000), st.integers(0, 50))
def test_the_steps_cover_the_epochs_with_less_than_one_extra_step(samples, batch, hundredths, done) -> None:
    epochs = hundredths / 100
    steps = num_steps_of(epochs, samples, batch)
    assert steps == math.ceil(Fraction(hundredths, 100) * samples / batch)
    if done <= steps:
        assert num_steps_of(epochs, samples, batch, done, done * batch) == steps
    assert num_steps_of(epochs, samples, batch, done, done * batch, done * batch) == done + steps


def test_a_number_of_epochs_is_an_exact_decimal() -> None:
    assert (num_steps_of(0.29, 100, 1), num_steps_of(1.0, 1437, 32), num_steps_of(2.0, 10, 4, 8, 28)) == (29, 45, 8)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_inputs(tmp_path_factory.mktemp("epochs"))


def flags(inputs: Path, name: str, *more: str, num_stages: int = 1) -> list[str]:
    """Without --train-iters."""
    words = flags_of(inputs, name, num_stages, "--load", str(inputs / "hf"), "--num-workers", "0", *more)
    at = words.index("--train-iters")
    return words[:at] + words[at + 2 :]


def test_settings_are_checked_against_the_number_of_steps(inputs: Path, capsys) -> None:
    """Ten samples in steps of four."""
    assert main(flags(inputs, "late", "--num-train-epochs", "2", "--profile-pipeline", "6", "--check")) == 2
    assert "--profile-pipeline is 6, but the last iteration is --train-iters = 5" in capsys.readouterr().err
    assert main(flags(inputs, "late", "--num-train-epochs", "2", "--check")) == 0
    assert "--num-train-epochs 2: 2 x 10 training samples in steps of 4 make 5 iterations" in capsys.readouterr().out
    words = flags(inputs, "late", "--num-train-epochs", "1.5", "--dry-run", "--pretrained-checkpoint",
                  str(inputs / "hf"), "--load", str(inputs / "late" / "save"))
    assert main(words) == 0
    assert "1.5 epochs = 4 steps" in capsys.readouterr().out


def test_epochs_train_like_their_number_of_steps_on_every_rank(inputs: Path, capsys) -> None:
    """Two stages; only rank 0 counts the samples.  The schedule ends with the epochs, also after resuming."""
    words = ("--load", str(inputs / "hf"), "--deterministic-mode")
    run(inputs, "steps", 2, *words, "--train-iters", "5")

    first = flags(inputs, "epochs", "--num-train-epochs", "2", "--deterministic-mode", num_stages=2)
    run_ranks(2, "mm.train", *first, "--exit-interval", "3")
    again = [*first, "--load", str(inputs / "epochs" / "save")]
    printed = run_ranks(2, "mm.train", *again)
    assert "| epoch: 2.000 | time left: 0 s |" in printed
    found, whole = metrics(inputs, "epochs"), metrics(inputs, "steps")
    assert [row["epoch"] for row in found] == [0.4, 0.8, 1.2, 1.6, 2.0]
    for key in ("loss", "lr", "grad_norm"):
        assert [row[key] for row in found] == [row[key] for row in whole], key
    longer = [*again, "--check", "--world-size", "2", "--num-train-epochs", "3"]
    assert main(longer) == 2
    assert ("the decay (--lr-decay-iters, or without it --train-iters or --num-train-epochs) ended after 20 samples"
            in capsys.readouterr().err)
