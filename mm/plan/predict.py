"""The predicted time of a step: the slots' costs through the pipeline's schedule, then the reduction and the update.

Pure arithmetic over a calibration and the counts of microbatches; ``mm.plan.costs`` adds up the laws.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean, pstdev

import numpy as np

from mm.config.run import Run
from mm.data.order.sequence import pipeline_order
from mm.errors import UserError
from mm.model.flops import slots_of
from mm.parallel.simulation import MessageCost, SlotCost, TimedStep, simulate, step_cost
from mm.placement import Message, Placement
from mm.plan.calibration import Calibration
from mm.plan.costs import COUNTS, BlockArrays, Cutting, SlotLaws
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
    even: float
    """How long the same work takes with equal stages and equal microbatches.  A frozen ViT, whose stage runs ahead, can
    make the pipeline shorter."""
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
    """Predicts the steps of one run, with its own lists or others."""

    def __init__(self, run: Run, calibration: Calibration) -> None:
        """Raises UserError if the calibration lacks what the run needs."""
        self._run, self._calibration = run, calibration
        num_copies = run.dp_size * run.cp_size
        if (run.num_stages > 1 and calibration.message is None) or (num_copies > 1 and not calibration.all_reduce):
            raise UserError(f"the run has {run.world_size} ranks, but the calibration was measured by one process, "
                            f"without messages and collectives; give mm-plan calibrate --num-processes 2 or more")
        cutting = Cutting(run.tp_size, run.args.sequence_parallel)
        self._blocks, self._path = BlockArrays.of(run.model, cutting, calibration), GradientPath.of(run.model)

    def predict(self, workload: Workload) -> StepPrediction:
        """The mean over the steps of ``workload``."""
        placement = self._run.model.placement()
        pipelines, busy, evens = zip(*self.pipelines(workload, placement), strict=True)
        sizes = stage_sizes(self._run, placement)
        reduction, update = self._reduction(sizes), self._update(sizes)
        return StepPrediction(
            seconds=fmean(pipelines) + reduction + update, spread=pstdev(pipelines), pipeline=fmean(pipelines),
            busy=fmean(busy), even=fmean(evens), reduction=reduction, update=update,
            error=self._calibration.error)

    def pipelines(self, workload: Workload, placement: Placement) -> Iterator[tuple[float, float, float]]:
        """For each step: seconds of the slowest replica's pipeline, the mean work of its stages, and the time of the
        same work with equal stages and microbatches."""
        laws, num_stages = self._laws(placement), placement.num_stages
        for step, of_stages in zip(workload.steps, self._work(workload, laws, num_stages), strict=True):
            likely = sorted(range(len(step)), key=lambda number: -of_stages[number].max())[:NUM_SIMULATED]
            times = {number: step_cost(*self._ordered(step[number], placement, laws)) for number in likely}
            slowest = max(likely, key=times.__getitem__)
            mean, count = float(of_stages[slowest].mean()), len(step[slowest])
            yield times[slowest], mean, mean * (count + num_stages - 1) / count

    def least(self, workload: Workload, placement: Placement) -> float:
        """A quick lower bound of the mean pipeline: what the busiest stage of any replica works."""
        found = self._work(workload, self._laws(placement), placement.num_stages)
        return fmean(max(float(stages.max()) for stages in step) for step in found)

    def unevenness(self, workload: Workload, placement: Placement) -> float:
        """The sum of squares of what the stages work on average: least if all work the same."""
        work = self._work(workload, self._laws(placement), placement.num_stages)
        mean = np.mean([stages for step in work for stages in step], axis=0)
        return float(np.square(mean).sum())

    def timeline(self, counts: np.ndarray) -> list[list[TimedStep]]:
        """What each stage of a replica with these microbatches does, and when."""
        placement = self._run.model.placement()
        return simulate(*self._ordered(counts, placement, self._laws(placement)))

    def _laws(self, placement: Placement) -> SlotLaws:
        return self._blocks.in_slots(slots_of(self._run.model, placement), len(placement.slots))

    def _work(self, workload: Workload, laws: SlotLaws, num_stages: int) -> list[list[np.ndarray]]:
        """By step and replica, the seconds that each stage works."""
        return [[laws.of(self._shared(counts)).sum(axis=(0, 1)).reshape(-1, num_stages).sum(axis=0) for counts in step]
                for step in workload.steps]  # fmt: skip

    def _ordered(
        self, counts: np.ndarray, placement: Placement, laws: SlotLaws
    ) -> tuple[list[list[SlotCost]], int, list[list[MessageCost]]]:
        """The arguments of the simulation, with microbatches in the order in which they enter the pipeline."""
        here = self._shared(counts)
        costs, messages, num_stages = laws.costs(here), self._messages(here, placement), placement.num_stages
        order = pipeline_order(costs, num_stages) if num_stages > 1 else range(len(costs))
        return [costs[one] for one in order], num_stages, [messages[one] for one in order]

    def _shared(self, counts: np.ndarray) -> np.ndarray:
        """What one rank computes of each microbatch: its share of the tokens, and of the images."""
        return _divided(counts, self._run.cp_size, self._run.num_encoders)

    def _messages(self, counts: np.ndarray, placement: Placement) -> list[list[MessageCost]]:
        run, law = self._run, self._calibration.message or Law(0.0, 0.0)
        columns = [COUNTS.index(name) for name in ("num_tokens", "num_patches", "num_target_tokens")]
        found = []
        for row in counts:
            sizes, has_images = MicrobatchSizes(*row[columns].astype(int).tolist()), row[COUNTS.index("num_images")] > 0
            of_slots = []
            for spec in placement.slots[:-1]:
                in_pieces = spec.sends is Message.HIDDEN_STATES or not run.model.encodes_whole
                num_bytes = message_bytes(spec.sends, sizes, run.model, WIDTHS[run.args.precision])
                num_bytes //= run.num_pieces if in_pieces else 1
                seconds = law.seconds(num_bytes)
                of_slots.append(MessageCost(seconds, seconds if self._path.comes_back(spec, has_images) else 0.0))
            found.append(of_slots)
        return found

    def _reduction(self, sizes: Sequence[StageSize]) -> float:
        """Seconds to sum the gradients over the ranks with the same weights."""
        num_copies, most = self._run.dp_size * self._run.cp_size, max(size.gradient_bytes for size in sizes)
        return all_reduce_law(self._calibration, num_copies).seconds(most) if num_copies > 1 and most else 0.0

    def _update(self, sizes: Sequence[StageSize]) -> float:
        run, law = self._run, self._calibration.step
        num_shards = run.dp_size * run.cp_size if run.args.use_distributed_optimizer else 1
        return law.fixed + law.per_row * max(size.num_trainable_params for size in sizes) / num_shards


def all_reduce_law(calibration: Calibration, num_ranks: int) -> Law:
    """The law for a group of ``num_ranks``; if none was measured, that of the next size, by the bytes of a ring."""
    sizes = sorted(calibration.all_reduce)
    nearest = min(sizes, key=lambda size: (abs(size - num_ranks), size))
    law = calibration.all_reduce[nearest]
    if nearest == num_ranks:
        return law
    traffic = ((num_ranks - 1) / num_ranks) / ((nearest - 1) / nearest)
    return Law(law.fixed * (num_ranks - 1) / (nearest - 1), law.per_row * traffic)


def _divided(counts: np.ndarray, num_ranks: int, num_encoders: int) -> np.ndarray:
    """The costliest share of each microbatch: tokens are divided evenly over ``num_ranks``, and whole images of about
    the same size over ``num_encoders``."""
    if num_encoders == 1:
        return counts
    images = counts[:, COUNTS.index("num_images")]
    share = np.ceil(images / num_encoders) / np.maximum(images, 1)
    found = counts / num_ranks
    for name in ("num_patches", "num_image_pairs", "num_window_pairs"):
        found[:, COUNTS.index(name)] = counts[:, COUNTS.index(name)] * share
    return found
