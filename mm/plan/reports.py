"""The texts of ``mm-plan predict``, ``compare`` and ``lists``, and the timelines that they write."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean

from mm.checkpoint.hf_config import differences
from mm.config.run import Run
from mm.cost.calibration import Calibration
from mm.cost.predict import Predictor, StepPrediction
from mm.cost.workload import Workload, counts_of
from mm.errors import counted, refuse
from mm.plan.lists import RatedLists
from mm.plan.predicted_timeline import predicted_timeline, step_parts
from mm.report import Report, Table
from mm.timeline.files import measured_steps, write_timeline
from mm.timeline.spans import StepSettings, StepTimeline

_TIMELESS = ("rates", "init_method_std", "max_position_embeddings")
"""Fields of a model that do not affect the time of a step."""


def prediction_report(run: Run, calibration: Calibration, workload: Workload, step: StepPrediction) -> str:
    """Step time with its interval, what it consists of, and what the pipeline waits for."""
    low, high = step.interval
    lines = [
        f"Step      {step.seconds:.4g} s; nine of ten steps take {low:.4g} to {high:.4g} s",
        f"Parts     pipeline {step.pipeline:.4g} s, gradient reduction {step.reduction:.4g} s, update "
        f"{step.update:.4g} s",
        f"Tokens    {workload.mean('num_tokens') / step.seconds / run.world_size:,.0f} per second and rank",
    ]
    if run.num_stages > 1:
        lines.append(f"Stages    wait for {step.bubble:.1%} of the pipeline's time; {1 - step.busy / step.even:.1%} "
                     f"with equal stages and microbatches")
    num_processes = counted(calibration.machine.num_processes, "process", "processes")
    lines.append(f"Measured  on {calibration.machine.device}, {num_processes} at a time, {calibration.date}")
    return "\n".join(lines)


def compared(predictor: Predictor, folder: Path, pictures: Path | None) -> str:
    """Compare all measured steps in ``folder`` with their prediction, and draw both if ``pictures`` is given.

    Raises UserError if there are no steps, or if they belong to another run.
    """
    measured = measured_steps(folder)
    refuse(problem for one in measured for problem in _problems(folder / f"{one.name}.json", one, predictor.run))
    both = [(predicted_timeline(predictor, [counts_of(batch) for batch in one.microbatches], one.iteration), one)
            for one in measured]
    paths = [] if pictures is None else [write_timeline(pictures, "--timeline", pair) for pair in both]
    return "\n\n".join([_comparison(both), *(f"wrote {path}, .json and .svg" for path in paths)])


def _comparison(steps: Sequence[tuple[StepTimeline, StepTimeline]]) -> str:
    """Seconds of the predicted and the measured steps, and of their parts, averaged over the steps."""
    predicted, measured = ([step_parts(one[side]) for one in steps] for side in range(2))
    ours, theirs = (fmean(one.seconds for one in side) for side in (predicted, measured))
    rows = tuple((name, *(f"{fmean(asdict(one)[name] for one in side):.4f}" for side in (predicted, measured)))
                 for name in asdict(measured[0]))
    return Report(
        f"The prediction differs from the measured step by {ours / theirs - 1:+.1%}",
        (("Step", f"measured {theirs:.4g} s, predicted {ours:.4g} s"),
         ("Measured", f"iteration{'s' * (len(steps) > 1)} {', '.join(str(one.iteration) for _, one in steps)}")),
        (Table("A step, in seconds", ("", "predicted", "measured"), rows),)).text()


def _problems(path: Path, timeline: StepTimeline, run: Run) -> Iterator[str]:
    """How the settings of a measured step differ from those of ``run``."""
    expected, found = StepSettings.of(run.args, run.model, run.world_size), timeline.settings
    pairs = [(name, was, getattr(expected, name)) for name, was in vars(found).items()
             if name != "model" and was != getattr(expected, name)]
    pairs += [(one.json_name, one.first, one.second) for one in differences(found.model, expected.model, _TIMELESS)]
    for name, was, now in pairs:
        yield (f"{path}: was measured with {name} = {was!r}, but the flags and the model JSON say {now!r}; give those "
               f"of the measured run")


def lists_report(run: Run, present: RatedLists, best: RatedLists, even: float, has_times: bool) -> str:
    """The present lists, better ones if there are any, and equal stages as a reference."""
    lines = [_rated("Present", present, has_times)]
    if best.lists == present.lists:
        lines.append("Best      the search finds no better lists")
    else:
        vision, language = best.lists.values()
        lines += [
            _rated("Best", best, has_times),
            f"Gain      {present.seconds / best.seconds - 1:.1%} more samples per second from the pipeline; write into "
            f"{run.args.mm_model}",
            f"          image_encoder.vision_encoder.pipeline_num_layers: {vision}",
            f"          text_decoder.pipeline_num_layers: {language}",
        ]
    lines.append(f"Even      equal stages with as many equal microbatches would be used {present.busy / even:.1%}; a "
                 f"frozen ViT, whose stage runs ahead, can do better")
    if not has_times:
        lines.append("Unit      every FLOP takes the same time, messages take none; --calibration uses measured times")
    return "\n".join(lines)


def _rated(name: str, one: RatedLists, has_times: bool) -> str:
    vision, language = one.lists.values()
    seconds = f"pipeline {one.seconds:.4g} s, " if has_times else ""
    return (f"{name.ljust(9)} ViT {vision}, LLM {language}: {seconds}stages used {one.utilisation:.1%}, fullest rank "
            f"{one.peak_bytes / 2**30:.2f} GiB")
