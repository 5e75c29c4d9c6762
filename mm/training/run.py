"""One rank's training run: builds its parts in order, then steps, logs, saves and exports.

This is the only place where all parts meet; each of them knows nothing of the others.
"""

import math
import time
from pathlib import Path

import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from torch import Tensor

from checkpoint import convert
from checkpoint.formats.source import Kind, open_to_train
from checkpoint.formats.training import remove
from mm.batch import StepPlan
from mm.config.run import RunConfig, resolved
from mm.data.dataset import Dataset
from mm.data.encode import SampleEncoder
from mm.data.loader import StepLoader
from mm.data.owner import DataOwner
from mm.device.device import Device
from mm.errors import AgreedError
from mm.model import flops, load
from mm.model.stage import build_stage
from mm.parallel import mesh as parallel
from mm.parallel.agreement import on_first, together
from mm.parallel.megatron import ddp_config, optimizer_config, parallel_config
from mm.parallel.pipeline import MessageShapes, PipelineCommunicator, bind_schedule, run_schedule
from mm.training import checkpoint as state
from mm.training.metrics import MetricsWriter, StepMetrics
from mm.training.optimizer import LearningRate, StepResult, build_optimizer, optimizer_step
from mm.weights.table import stage_weights


class Trainer:
    """Everything that one rank holds during a run."""

    def __init__(self, run: RunConfig, device: Device) -> None:
        args, self.run, self.device = run.args, run, device
        self.placement = run.model.placement()
        self.mesh = parallel.start(
            device,
            self.placement,
            run.model.language.tied,
            args.tensor_model_parallel_size,
            args.distributed_timeout_minutes,
        )
        spec = self.placement[self.mesh.pp_rank]
        self.weights = stage_weights(run.model, spec, self.placement)
        settings = parallel_config(self.mesh, run.precision)
        stage = build_stage(
            run.model, self.placement, self.mesh.pp_rank, settings, device, run.loss == "per_sample"
        )
        source = None if args.load is None else together(
            self.mesh, lambda: open_to_train(args.load, run.model, args.finetune))
        is_resumed = source is not None and source.kind is Kind.TRAINING
        if source is None:
            load.initialize(stage, self.weights, self.mesh, args.seed, run.model.language.init_method_std)
        elif not is_resumed:
            load.fill(stage, self.weights, source, self.mesh)
        self.model = DistributedDataParallel(settings, ddp_config(args), stage)
        self.optimizer = build_optimizer(optimizer_config(args, run.precision), self.model, self.mesh)
        self.progress = state.Progress(0, 0)
        self.checkpoint: Path | None = None
        """The training checkpoint that holds the weights as they are now."""
        if is_resumed:
            self.checkpoint = source.path
            self.progress = state.load(
                args.load,
                self.model,
                self.optimizer,
                self.weights,
                self.mesh,
                load_optim=not args.no_load_optim,
                load_rng=not args.no_load_rng,
                finetune=args.finetune,
            )
        if source is not None:
            named = {Kind.HUGGING_FACE: "Hugging Face", Kind.MINDSPEED: "converted", Kind.TRAINING: "training"}
            self._say(f"loaded a {named[source.kind]} checkpoint from {args.load}, iteration {self.progress.iteration}")
        for note in self.progress.notes:
            self._say(f"note: {note}")
        bind_schedule(self.model, self.mesh)
        self.communicator = PipelineCommunicator(
            self.mesh, self.placement, MessageShapes.of(run.model), settings, device.torch_device
        )
        self.learning_rate = _learning_rate(run)
        self.metrics = MetricsWriter(args, resolved(run), self.progress.iteration) if self._reports() else None
        self.peak_flops = flops.peak_flops(device.name)
        self.num_skipped = 0

    def run_steps(self) -> None:
        """Train until ``--train-iters`` or ``--exit-interval``, saving on the way and at the end."""
        args, first = self.run.args, self.progress.iteration
        last = args.train_iters
        if args.exit_interval is not None:
            last = min(last, (first // args.exit_interval + 1) * args.exit_interval)
        if first >= last:
            self._say(f"the checkpoint is at iteration {first} of {args.train_iters}: nothing to train")
            return
        data = self.data(last - first)
        for _ in range(last - first):
            started = time.perf_counter()
            self.step(next(data), started)
            iteration = self.progress.iteration
            if args.save and (iteration == last or iteration % (args.save_interval or last) == 0):
                self._save()
        data.close()

    def export(self) -> None:
        """Write the model in Hugging Face format when the run has come to its end and that is asked for."""
        args = self.run.args
        if args.export_hf is None:
            return
        if self.progress.iteration < args.train_iters:
            self._say(f"note: nothing was exported to {args.export_hf}: the run stands at iteration "
                      f"{self.progress.iteration} of {args.train_iters}; resume it with the same --export-hf")
            return
        target = Path(args.export_hf)
        passing = f"{target}.checkpoint" if self.checkpoint is None else None
        if passing is not None:
            self._save(passing)
        self._say(f"exporting {self.checkpoint} to {target}")

        def write() -> None:
            convert.mm_to_hf(self.checkpoint, self.run.data.model_name_or_path, target).run(convert.Options())
            if passing is not None:
                remove(passing)

        on_first(self.mesh, write)

    def close(self) -> None:
        """Close files and leave the process group, after success only: it waits for all ranks."""
        if self.metrics is not None:
            self.metrics.close()
        parallel.stop()

    def step(self, plan: StepPlan, started: float | None = None) -> tuple[float, float]:
        """One optimizer step; returns the loss of the global batch and the gradient norm.

        ``started``: when the step began, by time.perf_counter, if that was before its data was there.
        """
        started = time.perf_counter() if started is None else started
        self.checkpoint = None
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        loss = self._global(
            run_schedule(self.model, plan, self.communicator, self.mesh, self.device.torch_device)
        )
        if not math.isfinite(loss):
            raise AgreedError(
                f"the loss of iteration {self.progress.iteration + 1} is {loss}, so no weight was changed by it; look "
                f"at the samples of this step, the learning rate and the precision, and resume from the last checkpoint"
            )
        if plan.totals.num_target_tokens == 0:
            self._say(f"note: iteration {self.progress.iteration + 1} has no token to learn: its loss is 0. Look at "
                      f"the roles of the samples, and whether --seq-length {self.run.args.seq_length} cuts answers off")
        lr = self.learning_rate.at(self.progress.consumed_samples)
        result = optimizer_step(self.optimizer, lr)
        self.device.synchronize()
        self.progress = state.Progress(
            self.progress.iteration + 1, self.progress.consumed_samples + self.run.global_batch_size
        )
        self.num_skipped += not result.updated
        if self.metrics is not None:
            self.metrics.write(self._measured(plan, loss, lr, result, time.perf_counter() - started))
        if self.progress.iteration % self.run.args.log_interval == 0:
            self.num_skipped = 0
        return loss, result.grad_norm

    def _global(self, loss: Tensor) -> float:
        """Sum over replicas and stages, so that every rank sees the same number and decides alike."""
        dist.all_reduce(loss, group=self.mesh.groups.dp)
        dist.all_reduce(loss, group=self.mesh.groups.pp)
        return float(loss)

    def _measured(self, plan: StepPlan, loss: float, lr: float, result: StepResult, seconds: float) -> StepMetrics:
        totals, num_devices = plan.totals, self.mesh.world_size
        rate = flops.training_flops(self.run.model, totals) / seconds / num_devices
        return StepMetrics(
            iteration=self.progress.iteration,
            consumed_samples=self.progress.consumed_samples,
            loss=loss,
            lr=lr,
            grad_norm=result.grad_norm,
            loss_scale=result.loss_scale,
            step_seconds=seconds,
            global_batch_size=self.run.global_batch_size,
            num_tokens=totals.num_tokens,
            num_target_tokens=totals.num_target_tokens,
            num_patches=totals.num_patches,
            num_images=totals.num_images,
            tokens_per_second_per_device=totals.num_tokens / seconds / num_devices,
            model_flops_per_second_per_device=rate,
            mfu=rate / self.peak_flops if self.peak_flops else None,
            max_memory_bytes=self.device.max_memory_bytes(),
            updated=result.updated,
            num_skipped=self.num_skipped,
        )

    def data(self, num_steps: int) -> DataOwner:
        """The next ``num_steps`` steps' data, read on the owning rank and shared within the replica."""
        run, mesh = self.run, self.mesh

        def open_loader() -> StepLoader | None:
            if not mesh.owns_data:
                return None
            return StepLoader(
                Dataset(run.data),
                SampleEncoder.from_config(run.data, run.model, run.args.seq_length),
                micro_batch_size=run.args.micro_batch_size,
                global_batch_size=run.global_batch_size,
                dp_rank=mesh.dp_rank,
                dp_size=mesh.dp_size,
                seed=run.args.seed,
                shuffle=run.data.shuffle,
                consumed_samples=self.progress.consumed_samples,
                num_workers=run.args.num_workers,
                prefetch_factor=run.data.prefetch_factor,
            )
        holds_patches = self.placement[mesh.pp_rank].has_patch_embedding
        return DataOwner(together(mesh, open_loader), mesh, num_steps, holds_patches, run.model.vision)

    def _save(self, directory: str | None = None) -> None:
        args = self.run.args
        path = state.save(
            directory or args.save,
            self.progress,
            self.model,
            self.optimizer,
            self.weights,
            self.mesh,
            resolved(self.run),
            save_optim=not args.no_save_optim and directory is None,
            save_rng=not args.no_save_rng and directory is None,
            keep_last=args.keep_last_checkpoints if directory is None else None,
        )
        self.checkpoint = path
        self._say(f"saved {path}")

    def _reports(self) -> bool:
        """Whether this rank writes logs: the last one, as in Megatron."""
        return self.mesh.rank == self.mesh.world_size - 1

    def _say(self, text: str) -> None:
        if self._reports():
            print(text, flush=True)


def _learning_rate(run: RunConfig) -> LearningRate:
    args = run.args
    return LearningRate(
        max_lr=args.lr,
        min_lr=args.min_lr,
        warmup_init=args.lr_warmup_init,
        warmup_samples=run.lr_warmup_iters * run.global_batch_size,
        decay_samples=run.lr_decay_iters * run.global_batch_size,
        decay_style=args.lr_decay_style,
    )
