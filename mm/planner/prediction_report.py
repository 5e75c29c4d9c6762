"""The text of ``mm-plan predict``."""

from mm.config.run import Run
from mm.plan.calibration import Calibration
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
        lines.append(f"Stages    wait for {step.bubble:.1%} of the pipeline's time; {1 - step.busy / step.bound:.1%} "
                     f"with even stages and microbatches")
    lines.append(f"Measured  on {calibration.machine.device}, {calibration.machine.num_processes} processes at a time, "
                 f"{calibration.date}")
    return "\n".join(lines)
