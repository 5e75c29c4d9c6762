"""What was requested for certain steps is written, or a note says why not, even if the run ends before its last step.

tests/test_train.py checks what the files hold.
"""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mm.parallel.activity import Journal
from mm.training.recorder import StepObserver


class Profiler:
    def __init__(self) -> None:
        self.called: list[str] = []

    def start(self) -> None:
        self.called.append("start")

    def stop(self) -> None:
        self.called.append("stop")


def observed(folder: Path, num_done: int, profile_pipeline: int | None = None) -> tuple[list[str], list[str]]:
    """What is called on the profiler and what is said, if a run of steps 1 to 9 ends after ``num_done`` of them; steps
    3 to 5 are profiled."""
    profiler, said = Profiler(), list[str]()
    args: Any = SimpleNamespace(
        log_timers=False, profile=True, profile_step_start=3, profile_step_end=6, profile_ranks=[0],
        profile_save_path=str(folder), profile_pipeline=profile_pipeline, log_dir=str(folder))
    stage: Any = SimpleNamespace(device=SimpleNamespace(profiler=lambda *_: profiler), journal=Journal())
    mesh: Any = SimpleNamespace(rank=0, world_size=1)
    observer = StepObserver(args, stage, mesh, 1, 9, said.append)
    with observer.observing():
        for iteration in range(1, num_done + 1):
            observer.begin(iteration)
            observer.write(iteration, None)  # type: ignore[arg-type]
    return profiler.called, said


@pytest.mark.parametrize(("num_done", "last"), [(3, 3), (4, 4), (5, 5), (9, 5)])
def test_a_profile_ends_with_the_run(tmp_path: Path, num_done: int, last: int) -> None:
    assert observed(tmp_path, num_done) == (
        ["start", "stop"], [f"wrote profiles of iterations 3 to {last} to {tmp_path}"])


def test_what_an_early_end_leaves_out_is_noted(tmp_path: Path) -> None:
    assert observed(tmp_path, 2, profile_pipeline=7) == ([], [
        "note: the run ended after iteration 2, before 3, the first that --profile selects: nothing is profiled",
        "note: the run ended after iteration 2, before --profile-pipeline 7: no timeline is written"])
