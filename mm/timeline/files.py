"""The files of a timeline: a picture that any browser shows, and a trace for Perfetto."""

import json
from collections.abc import Sequence
from pathlib import Path

from mm.errors import UserError, writing
from mm.files import write_whole
from mm.timeline.picture import draw
from mm.timeline.spans import StepTimeline
from mm.timeline.trace import read_trace, trace


def write_timeline(
    folder: str | Path, flag: str, timelines: Sequence[StepTimeline], notes: Sequence[str] = ()
) -> Path:
    """Write the .json and .svg of one step, or of a prediction and the measured step; returns the path without suffix.

    ``flag`` gave the folder.  ``notes`` are lines below the picture.  Raises UserError naming a file that cannot
    be written.
    """
    first = timelines[0]
    path = Path(folder) / (first.name if len(timelines) == 1 else f"compared_step_{first.iteration}")
    for name, text in ((f"{path}.json", json.dumps(trace(timelines)) + "\n"),
                       (f"{path}.svg", draw(timelines, f"{path.name}.json", notes))):
        with writing(name, flag):
            write_whole(Path(name), text.encode())
    return path


def measured_steps(folder: Path) -> list[StepTimeline]:
    """All measured steps that --profile-pipeline has written to a --log-dir.  Raises UserError if there are none."""
    paths = sorted(folder.glob("pipeline_step_*.json"), key=lambda path: (len(path.name), path.name))
    if not paths:
        what = "no pipeline_step_*.json" if folder.is_dir() else "no such directory"
        raise UserError(f"{folder}: {what}; expected the --log-dir of a run with --profile-pipeline ITERATION; add "
                        f"that flag to a run, with an iteration past the first few")
    return [read_trace(path) for path in paths]
