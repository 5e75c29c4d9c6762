"""Reports a run's steps, validations and scores on the last rank, as Megatron does."""

from datetime import datetime
from typing import Any

from mm.batch import StepPlan, samples_text
from mm.config.run import Run, resolved
from mm.cost.stage_memory import stage_peaks, stage_sizes
from mm.device.device import device_facts, sdpa_backend
from mm.errors import counted
from mm.model import flops
from mm.parallel.agreement import all_of
from mm.run.optim.update import clips_in_adam
from mm.run.progress import Say, StepResult
from mm.run.schedule import Schedule
from mm.run.step import Setup
from mm.run.watch.metrics import MetricsWriter, ScoreMetrics, SpikeMetrics, StepMetrics, ValidationMetrics
from mm.run.watch.watcher import Step
from mm.weights.trained import group_facts


class Reporter:
    """Writes the run's file, metrics and log lines on the last rank; on the others, nothing."""

    def __init__(self, run: Run, setup: Setup, schedule: Schedule, first_iteration: int, say: Say) -> None:
        """``first_iteration``: the iteration that the run continues from; rows of later ones are dropped."""
        self._run, self._setup, self._say = run, setup, say
        self._writer = None
        mesh = setup.mesh
        if mesh.rank == mesh.world_size - 1:
            facts = {**resolved(run), "schedule": schedule.to_json(), "ran_on": _ran_on(run, setup),
                     "optimizer_groups": group_facts(run.args, run.model), "started_at": _now(),
                     "predicted_peak_bytes": _predicted_peaks(run)}
            self._writer = MetricsWriter(run.args, facts, first_iteration, say)

    def report_step(self, step: Step) -> None:
        """Report a step as the watchers have measured it."""
        progress, result, seconds = step.progress, step.result, step.seconds
        run, totals, mesh, device = self._run, step.plan.totals, self._setup.mesh, self._setup.stage.device
        if totals.num_target_tokens == 0:
            self._say(f"note: iteration {progress.iteration} has no target token: its loss is 0. Check the roles of "
                      f"the samples, and whether --seq-length {run.args.seq_length} cuts answers off")
        if totals.num_omitted_images:
            self._say(f"note: iteration {progress.iteration}: {counted(totals.num_omitted_images, 'image')} omitted, "
                      f"because --seq-length {run.args.seq_length} would have cut them")
        if self._writer is None:
            return
        peak = device.peak_flops
        rate = flops.training_flops(run.model, totals) / seconds / mesh.world_size
        self._writer.write(StepMetrics(
            iteration=progress.iteration,
            consumed_samples=progress.consumed_samples,
            epoch=step.epoch,
            step_seconds=seconds,
            global_batch_size=run.global_batch_size,
            num_tokens=totals.num_tokens,
            num_target_tokens=totals.num_target_tokens,
            num_patches=totals.num_patches,
            num_images=totals.num_images,
            num_omitted_images=totals.num_omitted_images,
            tokens_per_second_per_device=totals.num_tokens / seconds / mesh.world_size,
            model_flops_per_second_per_device=rate,
            mfu=rate / peak if peak else None,
            max_memory_bytes=device.runtime.max_memory_bytes(),
            num_cached_images=totals.num_cached_images if run.args.vision_feature_cache else None,
            loss=result.loss,
            lr=result.lr,
            grad_norm=result.grad_norm,
            loss_scale=result.loss_scale,
            updated=result.updated,
            **step.measured,
        ))
        for line in step.lines:
            self._say(line)

    def report_spike(self, iteration: int, plan: StepPlan, result: StepResult, why: str) -> None:
        """Report a step that is bad or a spike, with the samples of all replicas; nothing if ``why`` is empty."""
        if not why:
            return
        mesh, own = self._setup.mesh, tuple(number for one in plan.microbatches for number in one.samples)
        found = dict(all_of(((mesh.dp_rank, own),), mesh.control_group))
        samples = tuple(number for rank in sorted(found) for number in found[rank])
        does = "is skipped" if result.fault else "is a spike"
        self._say(f"note: iteration {iteration} {does}: {why}{samples_text(samples)}")
        if self._writer is not None:
            self._writer.write_spike(
                SpikeMetrics(iteration, why, not result.updated, result.loss, result.grad_norm, samples))

    def report_validation(self, found: ValidationMetrics) -> None:
        """Report a validation."""
        if found.validation_loss is None:
            self._say(f"note: the validation after iteration {found.iteration} has no loss: " + (
                "it is not finite" if found.num_target_tokens else "no sample can be used"))
        if self._writer is not None:
            self._writer.write_validation(found)

    def report_score(self, found: ScoreMetrics, benchmark: str) -> None:
        """Report the score of the model's answers to ``benchmark``."""
        if self._writer is not None:
            self._writer.write_score(found, benchmark)

    def close(self, iteration: int, how: str) -> None:
        """Close the files; ``how`` the run ends goes to the run's file."""
        if self._writer is not None:
            self._writer.close({"at": _now(), "iteration": iteration, "how": how})


def _predicted_peaks(run: Run) -> list[dict[str, int]]:
    placement = run.model.placement()
    return stage_peaks(run, placement, stage_sizes(run, placement))


def _now() -> str:
    return f"{datetime.now():%Y-%m-%d %H:%M:%S}"


def _ran_on(run: Run, setup: Setup) -> dict[str, Any]:
    """Device, versions and kernels of this rank, for the run's file."""
    vision, language, tp_size = run.model.vision, run.model.language, run.tp_size
    towers = {"vision": (vision.num_attention_heads, vision.num_attention_heads, vision.head_dim, False),
              "language": (language.num_attention_heads, language.num_query_groups, language.kv_channels, True)}
    device, dtype = setup.stage.device, setup.stage.config.params_dtype
    sdpa = {name: sdpa_backend(device, dtype, heads // tp_size, kv_heads // tp_size, head_dim, causal)
            for name, (heads, kv_heads, head_dim, causal) in towers.items()}
    adam = next((one.optimizer for one in setup.optimizer.chained_optimizers), None)
    return {**device_facts(device, adam), "sdpa": sdpa, "clips_in_adam": clips_in_adam(setup.optimizer, device)}
