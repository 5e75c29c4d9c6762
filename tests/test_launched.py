"""What a launcher's environment variables may say, and that no command shows a traceback for any other text."""

import os
from collections.abc import Callable

import pytest

from mm import evaluate, generate, train
from mm.doctor import trial
from mm.environment import Launched, launcher_problems
from mm.plan import rank as planner_rank
from tests.files import EXAMPLES

RIGHT = {"WORLD_SIZE": "4", "RANK": "3", "LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "localhost",
         "MASTER_PORT": "29500"}  # fmt: skip
HUGE = "9" * 5000
"""Python refuses to parse as many digits."""


def test_a_torchrun_environment_is_read() -> None:
    assert not list(launcher_problems(RIGHT, meets=True)) and not list(launcher_problems({}))
    assert Launched.here(RIGHT) == Launched(3, 4, 1, 2)
    assert Launched.here({"LOCAL_RANK": "2"}) == Launched(local_rank=2)  # chooses the device of a process alone
    assert not list(launcher_problems({"LOCAL_RANK": "2"}))


@pytest.mark.parametrize(("name", "text", "expected"), [
    ("RANK", "4", "this rank's number, 0 to 3"), ("LOCAL_RANK", "2", "on its machine, 0 to 1"),
    ("LOCAL_WORLD_SIZE", "5", "on this machine, 1 to 4"), ("MASTER_PORT", "65536", "0 to 65535"),
    *((name, text, "") for name in RIGHT if name != "MASTER_ADDR" for text in ("x", "-1", "1.5", "", "²", HUGE)),
])  # fmt: skip
def test_a_variable_that_is_wrong_is_named(name: str, text: str, expected: str) -> None:
    (problem,) = launcher_problems({**RIGHT, name: text}, meets=True)
    assert problem.startswith(f"The environment variable {name} is '{text[:9]}") and expected in problem
    assert len(problem) < 200


TRAINING = [*(f"--mm-{kind}={EXAMPLES / f'{kind}_tiny.json'}" for kind in ("model", "data")), "--micro-batch-size=1",
            "--seq-length=8", "--train-iters=1", "--lr=1"]  # fmt: skip


@pytest.mark.parametrize(("main", "words"), [
    (train.main, [*TRAINING, "--check"]),
    (generate.main, ["--load", "mm", "--prompt", "What?"]),
    (evaluate.main, ["--load", "mm", "--benchmark", "mmmu"]),
    (trial.main, [os.devnull, "cpu"]),
    (planner_rank.main, ["x", "1", "1", *TRAINING]),
], ids=["train", "generate", "evaluate", "doctor", "plan"])  # fmt: skip
def test_each_command_refuses_a_wrong_variable(
    main: Callable[[list[str]], int], words: list[str], monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, text in {**RIGHT, "RANK": "x", "LOCAL_RANK": "y", "WORLD_SIZE": HUGE}.items():
        monkeypatch.setenv(name, text)
    assert main(words) == 2
    said = capsys.readouterr().err
    assert "error: The environment variable RANK is 'x'; expected" in said and "Traceback" not in said
