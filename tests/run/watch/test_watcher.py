"""What was requested for certain steps is written, or a note says why not, even if the run ends before its last step.

tests/test_train.py checks what the files hold.
"""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mm.parallel.activity import Journal
from mm.run.progress import TrainingProgress
from mm.run.watch.watcher import Profile, Timers, Watch


class Profiler:
    def __init__(self) -> None:
        self.called: list[str] = []

    def start(self) -> None:
        self.called.append("start")

    def stop(self) -> None:
        self.called.append("stop")


@pytest.mark.parametrize(("num_done", "said"), [
    (2, ["note: the run ended after iteration 2, before --profile-pipeline 12: no timeline is written",
         "note: the run ended after iteration 2, before the steps that --profile selects: nothing is profiled"]),
    (4, ["note: the run ended after iteration 4, before --profile-pipeline 12: no timeline is written",
         "wrote profiles of iterations 3 to 4 to FOLDER"]),
    (9, ["wrote profiles of iterations 3 to 5 to FOLDER",
         "note: the run ended after iteration 9, before --profile-pipeline 12: no timeline is written"]),
])  # fmt: skip
def test_a_profile_ends_with_the_run(tmp_path: Path, num_done: int, said: list[str]) -> None:
    """Steps 3 to 5 of a launch of steps 1 to 9 are profiled."""
    profiler, found = Profiler(), list[str]()
    args: Any = SimpleNamespace(
        log_timers=False, profile_step_start=3, profile_step_end=6, profile_ranks=[0],
        profile_save_path=str(tmp_path), profile_pipeline=12, log_dir=str(tmp_path))
    device: Any = SimpleNamespace(platform=SimpleNamespace(profiler=lambda *_: profiler))
    stage: Any = SimpleNamespace(device=device, journal=Journal())
    watch = Watch([Timers(args, stage, None, found.append),  # type: ignore[arg-type]
                   Profile(args, device, 0, 1, 9, found.append)], stage.journal, [])
    with watch.watching():
        for iteration in range(1, num_done + 1):
            watch.before(iteration)
            watch.after(TrainingProgress(iteration, 0), None, None, 0.0, 0.0)  # type: ignore[arg-type]
    watch.close(num_done)
    assert found == [one.replace("FOLDER", str(tmp_path)) for one in said]
    assert profiler.called == (["start", "stop"] if num_done > 2 else [])
