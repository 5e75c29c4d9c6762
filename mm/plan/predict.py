"""The predicted time of a step: the slots' costs through the pipeline's schedule, then the reduction and the update.

Pure arithmetic over a calibration and the counts of microbatches; ``mm.plan.costs`` adds up the laws.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, pstdev

import numpy as np

from mm.config.run import Run
from mm.data.order.sequence import pipeline_order
from mm.errors import UserError
from mm.parallel.simulation import MessageCost, SlotCost, TimedStep, simulate, step_cost
from mm.plan.calibration import Calibration
from mm.plan.costs import COUNTS, Cutting, SlotLaws, slot_laws
from mm.plan.laws import Law
from mm.plan.memory import WIDTHS, MicrobatchSizes, message_bytes
from mm.plan.stages import StageSize, stage_sizes
from mm.plan.workload import Workload
from mm.weights.trained import GradientPath

_NINE_OF_TEN = 1.645
"""Standard deviations on both sides of the mean between which nine of ten normally distributed values lie."""
NUM_SIMULATED = 4
"""Replicas of each step whose pipeline is simulated: those whose stages have most to do."""


@dataclass(frozen=True)
class StepPrediction:
    """The mean step of a run, in seconds."""

    seconds: float
    spread: float
    """Standard deviation between steps."""
    pipeline: float
    """From the first forward to the last backward of the slowest replica."""
    busy: float
    """What the mean stage of that replica works meanwhile."""
    bound: float
    """Least time of that pipeline, whatever the lists and the order: its work spread evenly over the stages."""
    reduction: float
    update: float
    error: float
    """Relative standard error of the calibration's laws."""

    @property
    def interval(self) -> tuple[float, float]:
        """Where nine of ten steps lie: the errors of the laws, and the spread of the data."""
        reach = _NINE_OF_TEN * math.hypot(self.spread, self.error * self.seconds)
        return self.seconds - reach, self.seconds + reach

    @property
    def bubble(self) -> float:
        """The share of the pipeline's time in which a stage waits."""
        return 1 - self.busy / self.pipeline


class Predictor:
    """Predicts the steps of one run."""

    def __init__(self, run: Run, calibration: Calibration) -> None:
        """Raises UserError if the calibration lacks what the run needs."""
        self._run, self._calibration = run, calibration
        num_copies = run.dp_size * run.cp_size
        if (run.num_stages > 1 and calibration.message is None) or (num_copies > 1 and not calibration.all_reduce):
            raise UserError(f"the run has {run.world_size} ranks, but the calibration was measured by one process, "
                            f"without messages and collectives; give mm-plan calibrate --num-processes 2 or more")
        self._message = calibration.message or Law(0.0, 0.0)
        self._laws: SlotLaws = slot_laws(run.model, Cutting(run.tp_size, run.args.sequence_parallel), calibration)
        self._sizes: list[StageSize] = stage_sizes(run, run.model.placement())

    def predict(self, workload: Workload) -> StepPrediction:
        """The mean over the steps of ``workload``."""
        pipelines, busy, bounds = zip(*map(self._pipeline, workload.steps), strict=True)
        reduction, update = self._reduction(), self._update()
        return StepPrediction(
            seconds=fmean(pipelines) + reduction + update, spread=pstdev(pipelines), pipeline=fmean(pipelines),
            busy=fmean(busy), bound=fmean(bounds), reduction=reduction, update=update,
            error=self._calibration.error)

    def timeline(self, counts: np.ndarray) -> list[list[TimedStep]]:
        """What each stage of a replica with these microbatches does, and when."""
        costs, messages = self._ordered(counts)
        return simulate(costs, self._run.num_stages, messages)

    def _pipeline(self, step: Sequence[np.ndarray]) -> tuple[float, float, float]:
        """Seconds of the slowest replica, the mean work of its stages, and the bound."""
        num_stages = self._run.num_stages
        work = [self._laws.of(self._shared(counts)).sum(axis=(0, 1)) for counts in step]
        of_stage = [one.reshape(-1, num_stages).sum(axis=0) for one in work]
        likely = sorted(range(len(step)), key=lambda number: -of_stage[number].max())[:NUM_SIMULATED]
        times = {number: step_cost(*self._arguments(step[number])) for number in likely}
        slowest = max(times, key=lambda number: times[number])
        mean = float(of_stage[slowest].mean())
        count = len(step[slowest])
        return times[slowest], mean, mean * (count + num_stages - 1) / count if num_stages > 1 else mean

    def _arguments(
        self, counts: np.ndarray
    ) -> tuple[Sequence[Sequence[SlotCost]], int, Sequence[Sequence[MessageCost]]]:
        costs, messages = self._ordered(counts)
        return costs, self._run.num_stages, messages

    def _ordered(self, counts: np.ndarray) -> tuple[list[list[SlotCost]], list[list[MessageCost]]]:
        """Costs and messages of the microbatches in the order in which they enter the pipeline."""
        here = self._shared(counts)
        costs, messages = self._laws.costs(here), self._messages(here)
        if self._run.num_stages == 1:
            return costs, messages
        order = pipeline_order(costs, self._run.num_stages)
        return [costs[one] for one in order], [messages[one] for one in order]

    def _shared(self, counts: np.ndarray) -> np.ndarray:
        """What one context-parallel rank computes of each microbatch: an even share, though images are dealt whole."""
        return counts if self._run.cp_size == 1 else _divided(counts, self._run.cp_size)

    def _messages(self, counts: np.ndarray) -> list[list[MessageCost]]:
        run, law = self._run, self._message
        path, slots = GradientPath.of(run.model), run.model.placement().slots
        columns = [COUNTS.index(name) for name in ("num_tokens", "num_patches", "num_target_tokens")]
        found = []
        for row in counts:
            sizes, has_images = MicrobatchSizes(*row[columns].astype(int).tolist()), row[COUNTS.index("num_images")] > 0
            of_slots = []
            for spec in slots[:-1]:
                num_bytes = message_bytes(spec.sends, sizes, run.model, WIDTHS[run.args.precision]) // run.num_pieces
                seconds = law.seconds(num_bytes)
                of_slots.append(MessageCost(seconds, seconds if path.comes_back(spec, has_images) else 0.0))
            found.append(of_slots)
        return found

    def _reduction(self) -> float:
        """Seconds to sum the gradients over the ranks with the same weights."""
        ranks = self._run.dp_size * self._run.cp_size
        return max(self._all_reduce(ranks, size.gradient_bytes) for size in self._sizes)

    def _all_reduce(self, num_ranks: int, num_bytes: float) -> float:
        if num_ranks == 1 or not num_bytes:
            return 0.0
        return all_reduce_law(self._calibration, num_ranks).seconds(num_bytes)

    def _update(self) -> float:
        run = self._run
        num_shards = run.dp_size * run.cp_size if run.args.use_distributed_optimizer else 1
        most = max(size.num_trainable_params for size in self._sizes)
        return self._calibration.step.fixed + self._calibration.step.per_row * most / num_shards


def all_reduce_law(calibration: Calibration, num_ranks: int) -> Law:
    """The law for a group of ``num_ranks``; if none was measured, that of the next size, by the bytes of a ring."""
    sizes = sorted(calibration.all_reduce)
    nearest = min(sizes, key=lambda size: (abs(size - num_ranks), size))
    law = calibration.all_reduce[nearest]
    if nearest == num_ranks:
        return law
    traffic = ((num_ranks - 1) / num_ranks) / ((nearest - 1) / nearest)
    return Law(law.fixed * (num_ranks - 1) / (nearest - 1), law.per_row * traffic)


def _divided(counts: np.ndarray, num_ranks: int) -> np.ndarray:
    """The costliest share of each microbatch: tokens are divided evenly, images of about the same size dealt whole."""
    images = counts[:, COUNTS.index("num_images")]
    share = np.ceil(images / num_ranks) / np.maximum(images, 1)
    found = counts / num_ranks
    for name in ("num_patches", "num_image_pairs", "num_window_pairs"):
        found[:, COUNTS.index(name)] = counts[:, COUNTS.index(name)] * share
    return found
