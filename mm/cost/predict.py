"""The predicted time of a step: the slots' costs through the pipeline's schedule, then the reduction and the update.

Pure arithmetic over a calibration and the counts of microbatches.  Many placements of one run are predicted at once.
"""

import math
from collections.abc import Sequence, Sized
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from statistics import fmean, pstdev

import numpy as np

from mm.batch import encoder_batches
from mm.config.run import Run
from mm.cost.calibration import Calibration, Law
from mm.cost.costs import BlockCosts, Cutting, message_law, reduction_seconds, update_seconds
from mm.cost.layer_memory import WIDTHS
from mm.cost.stage_memory import StageSize, stage_sizes
from mm.cost.workload import COUNTS, Workload, mean_per_rank, message_bytes, one_stage, per_rank
from mm.data.sampler.cost import in_order, pipeline_orders
from mm.errors import UserError
from mm.parallel.pipeline_schedule import even_step_cost, step_costs
from mm.placement import Message, Placement
from mm.weights.table import Place
from mm.weights.trained import GradientPath

_NINE_OF_TEN = 1.645
"""Nine of ten normally distributed values lie within this many standard deviations of their mean."""
NUM_SIMULATED = 4
"""Replicas of each step whose pipeline is simulated: those that have most to do."""


@dataclass(frozen=True)
class StepPrediction:
    """The mean step of a run, in seconds."""

    seconds: float
    spread: float
    """Standard deviation between steps."""
    pipeline: float
    """From the first forward to the last backward of the slowest replica."""
    busy: float
    """Mean work of that replica's stages during it."""
    even: float
    """Seconds of the same work with equal stages and microbatches; a frozen ViT, which runs ahead, can be faster."""
    reduction: float
    update: float
    error: float
    """Relative standard error of the calibration's laws."""

    @property
    def interval(self) -> tuple[float, float]:
        """The interval of nine of ten steps, from the error of the laws and the spread of the data."""
        factor = math.exp(_NINE_OF_TEN * math.hypot(self.spread / self.seconds, self.error))
        return self.seconds / factor, self.seconds * factor

    @property
    def bubble(self) -> float:
        """The share of the pipeline's time in which a stage waits."""
        return 1 - self.busy / self.pipeline


@dataclass(frozen=True)
class Pipelines:
    """The slowest replica's pipeline of each step: float64 [num_steps, num_placements], in the unit of the laws."""

    seconds: np.ndarray
    busy: np.ndarray
    """Mean work of its stages."""
    even: np.ndarray
    """How long the same work takes with equal stages and microbatches."""


class Predictor:
    """Predicts the steps of one run, with its own lists or others."""

    def __init__(self, run: Run, calibration: Calibration) -> None:
        """Raises UserError if the calibration lacks what the run needs."""
        self.run, self.calibration = run, calibration
        sums = run.num_copies > 1 or (run.model.encodes_whole and run.tp_size > 1)
        if (run.num_stages > 1 and calibration.message is None) or (sums and not calibration.all_reduce):
            raise UserError(f"the run has {run.world_size} ranks, but the calibration was measured by one process, "
                            f"without messages and collectives; give mm-plan calibrate --num-processes 2 or more")
        cutting, model = Cutting(run.tp_size, run.args.sequence_parallel), one_stage(run.model)
        self.costs, self._flops = BlockCosts.of(run.model, cutting, calibration), BlockCosts.in_flops(model)
        self._path, self._width = GradientPath.of(model), WIDTHS[run.args.precision]
        self._samples, self._seconds_of_samples = np.zeros((0, len(COUNTS))), 0.0

    def predict(self, workload: Workload, run: Run | None = None) -> StepPrediction:
        """The mean over the steps of ``workload``.  ``run``: with other lists, chunks, or samples per microbatch."""
        run = run or self.run
        placement = run.model.placement()
        found, sizes = self.pipelines(workload, [placement]), stage_sizes(run, placement)
        reduction, update = self.after(sizes, mean_passes(workload.steps))
        pipelines = found.seconds[:, 0].tolist()
        return StepPrediction(
            seconds=fmean(pipelines) + reduction + update, spread=pstdev(pipelines), pipeline=fmean(pipelines),
            busy=float(found.busy.mean()), even=float(found.even.mean()), reduction=reduction, update=update,
            error=self.calibration.error)

    def after(self, sizes: Sequence[StageSize], num_passes: float) -> tuple[float, float]:
        """Seconds of the reduction and of the update, with ``num_passes`` microbatches in each replica."""
        return (reduction_seconds(self.run, self.calibration, sizes, num_passes),
                update_seconds(self.run, self.calibration, sizes))

    def pipelines(self, workload: Workload, placements: Sequence[Placement], is_rough: bool = False) -> Pipelines:
        """The slowest replica's pipeline of each step, among the ``NUM_SIMULATED`` replicas with most work.

        ``is_rough``: all placements get the microbatches in the order of the first one, which is quicker.
        """
        slots, num_stages = self.costs.slots_of(placements), placements[0].num_stages
        rows = []
        for step in workload.steps:
            work = self._work_of_replicas(step)
            likely = work.argsort(kind="stable")[::-1][:NUM_SIMULATED].tolist()
            found = np.stack([self._replica(step[number], placements, slots, is_rough) for number in likely])
            slowest = found[:, 0].argmax(axis=0)
            rows.append(np.take_along_axis(found, slowest[None, None], axis=0)[0])
        seconds, busy, num_microbatches = np.stack(rows, axis=1)
        return Pipelines(seconds, busy, even_step_cost(busy, num_microbatches, num_stages, placements[0].num_chunks))

    def _replica(
        self, counts: np.ndarray, placements: Sequence[Placement], slots: np.ndarray, is_rough: bool
    ) -> np.ndarray:
        """Pipeline, work of the mean stage and number of microbatches: [3, num_placements]."""
        costs, messages = self.ordered(counts, placements, slots, is_rough)
        num_stages = placements[0].num_stages
        seconds = step_costs(costs, num_stages, messages)
        return np.stack([seconds, costs.sum(axis=(0, 1, 2)) / num_stages, np.full_like(seconds, len(counts))])

    def _work_of_replicas(self, step: Sequence[np.ndarray]) -> np.ndarray:
        """The time of all blocks of each replica."""
        work = self.costs.of_all(self.shared(np.concatenate(step)))
        sizes = np.array([len(counts) for counts in step])
        return np.add.reduceat(work, np.cumsum(sizes) - sizes)

    def slowest(self, step: Sequence[np.ndarray]) -> np.ndarray:
        """The microbatches of the replica with most work."""
        return step[int(self._work_of_replicas(step).argmax())]

    def flops(self, workload: Workload) -> float:
        """Mean model FLOPs of a step."""
        return fmean(float(self._flops.of_all(np.concatenate(step)).sum()) for step in workload.steps)

    def estimated(
        self, samples: np.ndarray, num_microbatches: float, least_microbatches: float, num_chunks: int
    ) -> tuple[float, float]:
        """A lower bound of the mean pipeline, and an estimate of it with even lists and microbatches.

        ``samples``: counts of all samples of a step, [num_samples, num_counts].  Each replica has about
        ``num_microbatches``, and on average at least ``least_microbatches``.
        """
        run = self.run
        work = self._work_of_samples(samples) / run.dp_size / run.num_stages
        least, fixed = (one / run.num_stages for one in self.costs.fixed_of_all)
        of_filling = (run.num_stages - 1) / num_chunks / num_microbatches
        return work + least * least_microbatches, (work + fixed * num_microbatches) * (1 + of_filling)

    def _work_of_samples(self, samples: np.ndarray) -> float:
        """The time of all samples, divided evenly over the ranks of a replica, without fixed costs."""
        if self._samples is not samples:
            work = self.costs.of_all(self._evenly_shared(samples), has_fixed=False)
            self._samples, self._seconds_of_samples = samples, float(work.sum())
        return self._seconds_of_samples

    def about(self, workload: Workload, placement: Placement) -> float:
        """A quick estimate of the mean pipeline: the busiest stage, and the costliest microbatch's way through."""
        found = []
        for step, stages in zip(workload.steps, self._work(workload, [placement]), strict=True):
            busiest = int(stages.max(axis=(1, 2)).argmax())
            costliest = float(self.costs.of_all(self.shared(step[busiest])).max())
            filling = costliest * (placement.num_stages - 1) / placement.num_chunks / placement.num_stages
            found.append(float(stages[busiest].max()) + filling)
        return fmean(found)

    def least(self, workload: Workload, placements: Sequence[Placement]) -> np.ndarray:
        """A quick lower bound of each placement's mean pipeline: the work of the busiest stage of any replica."""
        return np.mean([stages.max(axis=(0, 1)) for stages in self._work(workload, placements, is_bound=True)], axis=0)

    def layer_work(self, workload: Workload) -> tuple[np.ndarray, np.ndarray]:
        """The time of each ViT and LLM layer over all steps; the first and the last include the blocks beside them."""
        counts = self.shared(np.concatenate([one for step in workload.steps for one in step]))
        of_blocks = dict(zip(self.costs.places, self.costs.of_blocks(counts).sum(axis=(0, 1)).tolist(), strict=True))
        vision, language = (np.array([seconds for (place, _), seconds in of_blocks.items() if place is wanted])
                            for wanted in (Place.VISION_LAYER, Place.LANGUAGE_LAYER))
        vision[0] += of_blocks[Place.PATCH_EMBEDDING, None]
        vision[-1] += of_blocks[Place.PROJECTOR, None]
        language[0] += of_blocks[Place.EMBEDDING, None]
        language[-1] += of_blocks[Place.HEAD, None]
        return vision, language

    def unevenness(self, workload: Workload, placements: Sequence[Placement]) -> np.ndarray:
        """The sum of squares of the stages' mean work; it is least if all stages work the same."""
        work = np.mean([stages.mean(axis=0) for stages in self._work(workload, placements)], axis=0)
        return np.square(work).sum(axis=0)

    def _work(
        self, workload: Workload, placements: Sequence[Placement], is_bound: bool = False
    ) -> list[np.ndarray]:
        """By step, the work of each stage of each replica: [num_replicas, num_stages, num_placements].

        ``is_bound``: a lower bound: microbatches that share a pass of the ViT pay its fixed costs once, and divide
        their images more evenly.
        """
        slots, num_stages = self.costs.slots_of(placements), placements[0].num_stages
        costs, shared = self.costs, self.shared
        if is_bound and self.run.model.encoder_batch_microbatches > 1:  # without the ViT's fixed costs
            costs, shared = replace(costs, fixed=costs.fixed * ~costs.is_vision), self._evenly_shared

        def of_step(step: Sequence[np.ndarray]) -> np.ndarray:
            sizes = np.array([len(counts) for counts in step])
            found = costs.of_groups(shared(np.concatenate(step)), sizes, slots)
            return found.reshape(len(step), -1, num_stages, len(placements)).sum(axis=1)

        return [of_step(step) for step in workload.steps]


    def ordered(
        self, counts: np.ndarray, placements: Sequence[Placement], slots: np.ndarray | None = None,
        is_rough: bool = False,
    ) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
        """Costs and messages as ``step_costs`` takes them, in the order of the run, which chooses it by FLOPs."""
        slots = self.costs.slots_of(placements) if slots is None else slots
        here, num_stages = self.shared(counts), placements[0].num_stages
        messages = self.messages(here, placements)
        if num_stages == 1:
            order = np.broadcast_to(np.arange(len(counts))[:, None], (len(counts), len(placements)))
        elif is_rough:
            of_first = pipeline_orders(self._flops.of_slots(counts, slots[..., :1]), num_stages)
            order = np.broadcast_to(of_first, (len(counts), len(placements)))
        else:
            order = pipeline_orders(self._flops.of_slots(counts, slots), num_stages)
        if self.run.model.encoder_batch_microbatches > 1:
            costs = [self._of_slots(counts[one], placement, slots[..., number])
                     for number, (placement, one) in enumerate(zip(placements, order.T, strict=True))]
            return np.stack(costs, axis=-1), in_order(messages, order)
        return in_order(self.costs.of_slots(here, slots), order), in_order(messages, order)

    def _of_slots(self, counts: np.ndarray, placement: Placement, slots: np.ndarray) -> np.ndarray:
        """Costs [2, num_microbatches, num_slots] in their order of microbatches that share passes of the ViT.

        One whose work is in another pass takes no time, but still waits for its gradient.
        """
        is_passed = np.tensordot(self.costs.of_blocks(self.shared(counts)), slots, 1) > 0
        found = np.tensordot(self.of_blocks(counts, placement), slots, 1)
        return np.where(is_passed, np.maximum(found, np.finfo(float).tiny), 0.0)

    def of_blocks(self, counts: np.ndarray, placement: Placement) -> np.ndarray:
        """Costs [2, num_microbatches, num_blocks] of microbatches in their order.

        A shared pass of the ViT is in the forward pass of its first microbatch and the backward pass of its last.
        """
        found = self.costs.of_blocks(self.shared(counts))
        size = self.run.model.encoder_batch_microbatches
        if size == 1 or not placement.has_whole_vit:
            return found
        images = counts[:, [COUNTS.index(name) for name in ("num_images", "num_cached_images")]].tolist()
        skip_vision = [num_cached > 0 if num_images else None for num_images, num_cached in images]
        batches = [list(batch) for batch in encoder_batches(skip_vision, size)]
        if batches:
            is_vision = self.costs.is_vision
            of_batches = self.costs.of_blocks(self.shared(np.stack([counts[batch].sum(axis=0) for batch in batches])))
            found[:, [number for batch in batches for number in batch]] *= ~is_vision
            for direction, end in enumerate((0, -1)):
                found[direction, [batch[end] for batch in batches]] += of_batches[direction] * is_vision
        return found

    def shared(self, counts: np.ndarray) -> np.ndarray:
        """What one rank computes of each microbatch: its share of the tokens, and of the images."""
        return per_rank(counts, self.run.cp_size, self.run.num_encoders)

    def _evenly_shared(self, counts: np.ndarray) -> np.ndarray:
        return mean_per_rank(counts, self.run.cp_size, self.run.num_encoders)

    def messages(self, counts: np.ndarray, placements: Sequence[Placement]) -> np.ndarray:
        """Seconds of messages, forward and backward [2, num_microbatches, num_slots - 1, num_placements]."""
        has_images, stride = counts[:, COUNTS.index("num_images")] > 0, self.run.world_size // self.run.num_stages
        num_patches, num_tokens = (counts[:, COUNTS.index(name)] for name in ("num_patches", "num_tokens"))

        @cache
        def seconds(message: Message, law: Law, with_images: bool, without: bool) -> np.ndarray:
            """[2, num_microbatches]; the flags say whether gradients come back."""
            num_bytes = message_bytes(message, num_patches, num_tokens, self.run.model, self._width)
            in_pieces = message is Message.HIDDEN_STATES or not self.run.model.encodes_whole
            num_pieces = self.run.num_pieces if in_pieces else 1
            forward = (law.fixed + law.per_row * num_bytes / num_pieces) * (num_bytes > 0)
            return np.stack([forward, forward * np.where(has_images, with_images, without)])

        found = np.zeros((2, len(counts), len(placements[0].slots) - 1, len(placements)))
        for number, placement in enumerate(placements):
            for slot, (spec, after) in enumerate(pairwise(placement.slots)):
                comes_back = (self._path.comes_back(spec, one) for one in (True, False))
                # the last stage of a chunk sends to the first stage of the next chunk
                law = message_law(self.calibration, spec.stage * stride, after.stage * stride)
                found[:, :, slot, number] = seconds(spec.sends, law, *comes_back)
        return found


def mean_passes(steps: Sequence[Sequence[Sized]]) -> float:
    """The mean over ``steps`` of the most microbatches of any replica."""
    return fmean(max(map(len, replicas)) for replicas in steps)
