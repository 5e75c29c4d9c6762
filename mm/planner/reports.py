"""The texts of ``mm-plan predict`` and ``mm-plan lists``."""

from mm.config.run import Run
from mm.errors import counted
from mm.plan.calibration import Calibration
from mm.plan.judge import JudgedLists, Judgement
from mm.plan.predict import StepPrediction
from mm.plan.workload import Workload


def prediction_report(run: Run, calibration: Calibration, workload: Workload, step: StepPrediction) -> str:
    """Step time with its interval, what it consists of, and what the pipeline waits for."""
    low, high = step.interval
    lines = [
        f"Step      {step.seconds:.4g} s; nine of ten steps take {low:.4g} to {high:.4g} s",
        f"Parts     pipeline {step.pipeline:.4g} s, gradient reduction {step.reduction:.4g} s, update "
        f"{step.update:.4g} s",
        f"Tokens    {workload.num_tokens / step.seconds / run.world_size:,.0f} per second and rank",
    ]
    if run.num_stages > 1:
        lines.append(f"Stages    wait for {step.bubble:.1%} of the pipeline's time; {1 - step.busy / step.even:.1%} "
                     f"with equal stages and microbatches")
    num_processes = counted(calibration.machine.num_processes, "process", "processes")
    lines.append(f"Measured  on {calibration.machine.device}, {num_processes} at a time, {calibration.date}")
    return "\n".join(lines)


def lists_report(run: Run, found: Judgement, has_times: bool) -> str:
    """The present lists, better ones if there are any, and equal stages as a reference."""
    gain = found.present.seconds / found.best.seconds - 1
    lines = [_judged("Present", found.present, has_times)]
    if found.best.lists == found.present.lists:
        lines.append("Best      the search finds no better lists")
    else:
        vision, language = found.best.lists.values()
        lines += [
            _judged("Best", found.best, has_times),
            f"Gain      {gain:.1%} more samples per second from the pipeline; write into {run.args.mm_model}",
            f"          image_encoder.vision_encoder.pipeline_num_layers: {vision}",
            f"          text_decoder.pipeline_num_layers: {language}",
        ]
    lines.append(f"Even      equal stages with as many equal microbatches would be used "
                 f"{found.present.busy / found.even:.1%}; a frozen ViT, whose stage runs ahead, can do better")
    if not has_times:
        lines.append("Unit      every FLOP takes the same time, messages take none; --calibration uses measured times")
    return "\n".join(lines)


def _judged(name: str, one: JudgedLists, has_times: bool) -> str:
    vision, language = one.lists.values()
    seconds = f"pipeline {one.seconds:.4g} s, " if has_times else ""
    return (f"{name.ljust(9)} ViT {vision}, LLM {language}: {seconds}stages used {one.utilisation:.1%}, fullest rank "
            f"{one.peak_bytes / 2**30:.2f} GiB")
