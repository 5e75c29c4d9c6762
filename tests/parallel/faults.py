"""What tests/parallel/health/test_watchdog.py lets happen to a run."""

from dataclasses import dataclass

from mm.parallel.activity import Work


@dataclass(frozen=True)
class Fault:
    """What happens on one of two ranks in the second step, or before the first process group is made."""

    name: str
    kind: str
    rank: int = 1
    work: Work = Work.BACKWARD
    flags: tuple[str, ...] = ()
    phase: str = ""
    """The phase in which it happens instead of a step."""
    model: str = "model_2"
    """JSON file of the model: two stages, or ``WHOLE``."""


WHOLE = "model_whole"
"""One stage, with the whole ViT on two tensor-parallel ranks."""
FAULTS = (
    # those that wait for a limit, during which others run
    Fault("sleeps", "sleeps", flags=("--step-timeout", "8")),
    Fault("sleeps over its images", "sleeps", work=Work.VISION_FORWARD, model=WHOLE,
          flags=("--step-timeout", "8", "--tensor-model-parallel-size", "2")),
    Fault("stopped in a step", "stopped", flags=("--step-timeout", "8")),
    *(Fault(f"stopped in {phase}", "stopped", rank, phase=phase, flags=("--phase-timeouts", f"{phase}=6"))
      for phase, rank in (("start", 1), ("load", 1), ("data", 1), ("save", 1), ("between", 1))),
    Fault("killed", "killed"),
    Fault("killed with the store", "killed", rank=0, work=Work.FORWARD),
    Fault("raises", "raises", work=Work.LANGUAGE_FORWARD),
    Fault("user's mistake", "user's mistake"),
    Fault("refused before the start", "refused", rank=0, flags=("--freeze-modules", "no_such_word")),
    Fault("set up otherwise", "set up otherwise", flags=("--lr", "2e-3")),
    Fault("killed before the start", "killed before", rank=0),
    Fault("interrupted", "interrupted", work=Work.DATA),
    Fault("interrupted alone", "interrupted alone", work=Work.LANGUAGE_FORWARD),
)
