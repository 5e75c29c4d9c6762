"""``mm-plan compare``, and the timelines that ``mm-plan`` writes: reads measured steps, checks that they belong to
the run that the flags describe, and compares them with its prediction."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean

from mm.config.command_line import flag_name
from mm.config.run import Run
from mm.data.lengths import HasLengths
from mm.errors import refuse
from mm.formats.hf_config import differences
from mm.plan.costs import counts_of
from mm.plan.drawn import predicted_timeline
from mm.plan.measured import step_parts
from mm.plan.predict import Predictor
from mm.plan.states import on_host
from mm.plan.workload import workload_of
from mm.planner.machine import COPIES
from mm.report import Report, Table
from mm.timeline.files import measured_steps, write_timeline
from mm.timeline.spans import StepSettings, StepTimeline

_FLAGS = {"world_size": "--world-size", "tp_size": "--tensor-model-parallel-size", "cp_size": "--context-parallel-size",
          "sequence_parallel": "--sequence-parallel", "precision": "the precision",
          "shards_gradients": "--data-parallel-sharding-strategy optim_grads",
          "shards_weights": "--data-parallel-sharding-strategy optim_grads_params",
          **{name: flag_name(name) for name in (
              "use_distributed_optimizer", "grad_reduce_in_bf16", "overlap_grad_reduce", "overlap_param_gather",
              "context_parallel_algo", "exp_avg_dtype", "exp_avg_sq_dtype")}}  # fmt: skip
"""Field of ``StepSettings`` -> what the user calls it."""
_TIMELESS = ("rates", "init_method_std", "max_position_embeddings")
"""Fields of a model that do not affect the time of a step."""


def write_prediction(folder: Path, predictor: Predictor, lengths: HasLengths) -> Path:
    """Write the predicted timeline of one step; returns the path of its files without their suffixes."""
    iteration = predictor.run.args.profile_pipeline or 1
    (replicas,) = workload_of(predictor.run, lengths, num_steps=1, first=iteration).steps
    ordered = [predictor.entering(counts) for counts in replicas]
    return write_timeline(folder, "--timeline", [predicted_timeline(predictor, ordered, iteration)])


def compared(predictor: Predictor, folder: Path, pictures: Path | None) -> str:
    """Compare all measured steps in ``folder`` with their prediction, and draw both if ``pictures`` is given.

    Raises UserError if there are no steps, or if they belong to another run.
    """
    measured = measured_steps(folder)
    refuse(problem for one in measured for problem in _problems(folder / f"{one.name}.json", one, predictor.run))
    both = [(predicted_timeline(predictor, [counts_of(batch) for batch in one.microbatches], one.iteration), one)
            for one in measured]
    lines = [_report(both)]
    if pictures is not None:
        paths = (write_timeline(pictures, "--timeline", pair) for pair in both)
        lines.append("\n".join(f"wrote {path}, .json and .svg" for path in paths))
    return "\n\n".join(lines)


def _report(steps: Sequence[tuple[StepTimeline, StepTimeline]]) -> str:
    """Seconds of the predicted and the measured steps, and of their parts, averaged over the steps."""
    predicted, measured = ([step_parts(one[side]) for one in steps] for side in range(2))
    ours, theirs = (fmean(one.seconds for one in side) for side in (predicted, measured))
    iterations = ", ".join(str(one.iteration) for _, one in steps)
    rows = tuple((name, *(f"{fmean(asdict(one)[name] for one in side):.4f}" for side in (predicted, measured)))
                 for name in asdict(measured[0]))
    return Report(
        f"The prediction differs from the measured step by {ours / theirs - 1:+.1%}",
        (("Step", f"measured {theirs:.4g} s, predicted {ours:.4g} s"),
         ("Measured", f"iteration{'s' * (len(steps) > 1)} {iterations}")),
        (Table("A step, in seconds", ("", "predicted", "measured"), rows),)).text()


def _problems(path: Path, timeline: StepTimeline, run: Run) -> Iterator[str]:
    """How the settings of a measured step differ from those of ``run``, and what its records lack."""
    expected, found = StepSettings.of(run.args, run.model, run.world_size), timeline.settings
    cure = "give the flags of the measured run"
    for field, flag in _FLAGS.items():
        was, now = getattr(found, field), getattr(expected, field)
        if was != now:
            yield f"{path}: the step was measured with {flag} {was}, but the flags say {now}; {cure}"
    if found.kept_copy != expected.kept_copy:
        yield (f"{path}: the step was measured with {COPIES[found.kept_copy]}, but the flags say "
               f"{COPIES[expected.kept_copy]}; {cure}")
    if found.host_share != expected.host_share:
        yield (f"{path}: the step was measured with {on_host(found.host_share)}, but the flags say "
               f"{on_host(expected.host_share)}; {cure}")
    other = differences(found.model, expected.model, _TIMELESS)
    for one in other:
        yield (f"{path}: the step was measured with {one.json_name} = {one.first!r}, but the flags and the model JSON "
               f"say {one.second!r}; {cure}")
    if not other and found.world_size == expected.world_size and not _is_whole(timeline, run):
        yield (f"{path}: is damaged: ranks, microbatches or chunks are missing or surplus; measure the step again "
               f"with --profile-pipeline")


def _is_whole(timeline: StepTimeline, run: Run) -> bool:
    """Whether every rank has a record, and every span belongs to a pass of the run."""
    places = {(record.pp_rank, record.dp_rank) for record in timeline.records}
    expected = {(stage, replica) for stage in range(run.num_stages) for replica in range(run.dp_size)}
    return places == expected and len(timeline.records) == run.world_size and all(
        record.spans and record.microbatches and all(
            (span.activity.chunk or 0) in range(run.num_chunks)
            and (span.activity.microbatch or 0) in range(len(record.microbatches)) for span in record.spans)
        for record in timeline.records)
