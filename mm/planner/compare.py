"""``mm-plan compare``, and the timelines that ``mm-plan`` writes: reads measured steps, checks that they belong to
the run that the flags describe, and compares them with its prediction."""

from collections.abc import Iterator
from pathlib import Path

from mm.config.command_line import flag_name
from mm.config.run import Run
from mm.data.lengths import HasLengths
from mm.errors import refuse, writing
from mm.formats.hf_config import differences
from mm.plan.costs import counts_of
from mm.plan.differences import compare
from mm.plan.drawn import predicted_timeline
from mm.plan.predict import Predictor
from mm.plan.refined import refined
from mm.plan.states import on_host
from mm.plan.workload import workload_of
from mm.planner.comparison_report import cause_lines, comparison_report, refinement_lines
from mm.planner.machine import COPIES
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


def compared(predictor: Predictor, folder: Path, output: Path | None, pictures: Path | None) -> str:
    """Compare all measured steps in ``folder``; write the refined calibration and the timelines to the paths given.

    Raises UserError if there are no steps, or if they belong to another run.
    """
    timelines = measured_steps(folder)
    refuse(problem for one in timelines for problem in _problems(folder / f"{one.name}.json", one, predictor.run))
    found = compare(predictor, timelines)
    lines = [comparison_report(found, timelines)]
    if output is not None:
        calibration = refined(predictor, found)
        with writing(output, "--output"):
            calibration.write(output)
        lines.append(refinement_lines(found, compare(Predictor(predictor.run, calibration), timelines), output))
    if pictures is not None:
        lines.append("\n".join(_drawn(predictor, one, pictures) for one in timelines))
    return "\n\n".join(lines)


def _drawn(predictor: Predictor, measured: StepTimeline, pictures: Path) -> str:
    counts = [counts_of(one) for one in measured.microbatches]
    both = [predicted_timeline(predictor, counts, measured.iteration), measured]
    path = write_timeline(pictures, "--timeline", both, cause_lines(compare(predictor, [measured])))
    return f"wrote {path}, .json and .svg"


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
