"""Measures how long each kind of block takes on this device, in the engine's own chunks.

A probe is a model of the user's widths with few layers, laid out so that neighbouring slots differ by one block: the
difference of their times is the time of that block.  Forward and backward run as in training: through megatron's DDP,
into its gradient buffers, and on a CPU with as many processes at a time as will train.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from itertools import islice
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from torch import Tensor

from mm.batch import BatchTotals, Microbatch
from mm.config.flags import Arguments
from mm.config.model import ModelConfig
from mm.device.device import Device
from mm.model.flops import BlockPlace, blocks
from mm.model.stage import Chunk
from mm.parallel import reduction
from mm.parallel.activity import Journal
from mm.parallel.megatron import ddp_config, parallel_config
from mm.parallel.mesh import Mesh
from mm.parallel.pipeline import message_shape, piece_shape
from mm.plan.calibration import BlockKey, BlockLaws, MeasuredBlock
from mm.plan.costs import Cutting, block_keys
from mm.planner.slots import (
    DIFFERENCES,
    DIRECTIONS,
    FULL_LAYER,
    LANGUAGE,
    VISION,
    Difference,
    Round,
    SlotTimes,
    block_seconds,
    law_and_error,
    pass_seconds,
    slots_of,
    usual_pass,
)
from mm.planner.timing import mean_of_ranks
from mm.progress import Progress
from mm.weights.trained import GradientPath

SECONDS_EACH = 0.1
"""A measurement is repeated for about this long in a round: short ones vary more, and cost less."""


def probe_model(model: ModelConfig) -> ModelConfig:
    """A model of the widths of ``model`` whose slots differ by single blocks, with the same parts frozen."""
    vision = replace(model.vision, num_layers=sum(VISION), pipeline_num_layers=(VISION,),
                     fullatt_block_indexes=(FULL_LAYER,), freeze_layers="")
    language = replace(model.language, num_layers=sum(LANGUAGE), pipeline_num_layers=(LANGUAGE,), freeze_layers="")
    return replace(model, vision=vision, language=language)


@dataclass(frozen=True)
class Effort:
    """How often a calibration measures each slot."""

    num_rounds: int = 3
    """It measures its slots in turn this often: a machine's speed changes within seconds, so what is compared must be
    measured close together, and one disturbed round must not count."""
    num_repeats: tuple[int, int] = (2, 5)
    """Fewest and most repeats of a measurement in a round, besides the first, which warms up."""


USUAL_EFFORT = Effort()
QUICK_EFFORT = Effort(num_rounds=1, num_repeats=(1, 1))
"""Shows that a calibration runs; its times are worth nothing."""


@dataclass(frozen=True)
class _Probe:
    """A model whose slots are measured, and the kinds of blocks that follow from them."""

    model: ModelConfig
    blocks: Mapping[BlockKey, Difference]


class Prober:
    """Measures the slots of probes on this rank; every rank of the job measures the same at the same time."""

    def __init__(
        self, device: Device, mesh: Mesh, args: Arguments, microbatches: Sequence[Microbatch], effort: Effort
    ) -> None:
        self._device, self._mesh, self._args = device, mesh, args
        self._microbatches, self._effort = microbatches, effort
        self.passes: list[float] = []
        """The host's seconds for a pass of a chunk, as measured so far; see ``pass_seconds``."""

    def blocks(self, models: Iterable[ModelConfig], known: Set[BlockKey]) -> tuple[MeasuredBlock, ...]:
        """Measure the kinds of blocks of ``models``, which are probes, that are not ``known``; each kind once."""
        probes = self._probes(models, known)
        num_rounds = self._effort.num_rounds
        rounds: list[list[Round]] = [[] for _ in range(num_rounds)]
        shown = Progress("measuring layers", num_rounds * len(probes), "models", is_shown=self._mesh.rank == 0)
        for number, one in shown.each((number, one) for number in range(num_rounds) for one in probes):
            rounds[number].append({slot: self._slot(one.model, slot) for slot in slots_of(one.blocks.values())})
        of_probes = list(zip(probes, zip(*rounds, strict=True), strict=True))
        self.passes += [seconds for probe, own in of_probes for seconds in pass_seconds(own, probe.blocks.values())]
        chunk_pass = usual_pass(self.passes)
        return tuple(MeasuredBlock(key, *self._laws(probe.model, one, own, chunk_pass))
                     for probe, own in of_probes for key, one in probe.blocks.items())

    def _probes(self, models: Iterable[ModelConfig], known: Set[BlockKey]) -> list[_Probe]:
        cutting = Cutting(self._mesh.tp_size, self._args.sequence_parallel)
        found, taken = list[_Probe](), set(known)
        for model in models:
            keys = block_keys(model, cutting, has_images=True)
            new = {keys[one.place]: one for one in DIFFERENCES if keys[one.place] not in taken}
            taken |= new.keys()
            found.append(_Probe(model, new))
        return found

    def _laws(
        self, model: ModelConfig, one: Difference, rounds: Sequence[Round], chunk_pass: float
    ) -> tuple[BlockLaws, float]:
        """The laws of a block, and the larger of their relative errors."""
        seconds = {direction: block_seconds(rounds, one, direction, chunk_pass) for direction in DIRECTIONS}
        sizes = {number: self._rows(model, one.place, number) for number in seconds["forward"]}
        (forward, of_forward), (backward, of_backward) = (law_and_error(seconds[direction], sizes)
                                                          for direction in DIRECTIONS)
        return BlockLaws(forward, backward), max(of_forward, of_backward)

    def _rows(self, model: ModelConfig, place: BlockPlace, number: int) -> tuple[int, int]:
        totals = BatchTotals.of([self._microbatches[number]], model.vision)
        block = next(one for one in blocks(model, totals) if (one.place, one.layer) == place)
        return block.rows, block.pairs

    def _slot(self, model: ModelConfig, slot: int) -> SlotTimes:
        """Build one slot, measure it with every microbatch, and free it."""
        mesh = replace(self._mesh, pp_rank=slot, pp_size=len(VISION))
        settings = parallel_config(model, self._mesh, self._args.precision, self._args.sequence_parallel)
        chunk = Chunk(model, 0, mesh, settings, self._device, "token", Journal(), self._device.runtime.side_queue())
        generator = torch.Generator(self._device.torch_device).manual_seed(slot)
        with torch.no_grad():
            for parameter in chunk.parameters():
                parameter.normal_(0.0, 0.02, generator=generator)
        wrapped = DistributedDataParallel(settings, ddp_config(self._args), chunk)
        forward, backward = {}, {}
        for number, microbatch in enumerate(self._microbatches):
            if chunk.spec.vision_layers and not microbatch.image_grids:
                continue
            times = self._times(model, chunk, wrapped, microbatch)
            warm_up = mean_of_ranks(sum(next(times)), self._mesh)
            fewest, most = self._effort.num_repeats
            num_repeats = min(most, max(fewest, math.ceil(SECONDS_EACH / warm_up)))
            found = list(islice(times, num_repeats))
            forward[number], backward[number] = (self._agreed([one[side] for one in found]) for side in (0, 1))
        return SlotTimes(forward, backward)

    def _times(
        self, model: ModelConfig, chunk: Chunk, wrapped: DistributedDataParallel, microbatch: Microbatch
    ) -> Iterator[tuple[float, float]]:
        """Seconds of forward and backward, again and again; the first warms up."""
        device, totals = self._device, BatchTotals.of([microbatch], model.vision)
        received = self._received(model, chunk, microbatch)
        reduction.begin([wrapped], device.kernels.overwrites)
        while True:
            dist.barrier()
            device.runtime.synchronize()
            marks = [device.runtime.mark()]
            inputs = chunk.prepare(microbatch, totals)
            x = None if received is None else received.detach().requires_grad_(received.requires_grad)
            output: Any = wrapped(inputs, x)
            marks.append(device.runtime.mark())
            if output.requires_grad:
                torch.autograd.backward(output, None if chunk.spec.has_head else torch.ones_like(output))
            marks.append(device.runtime.mark())
            device.runtime.synchronize()
            began, middle, ended = device.runtime.seconds_of(marks)
            yield middle - began, ended - middle

    def _received(self, model: ModelConfig, chunk: Chunk, microbatch: Microbatch) -> Tensor | None:
        shape = message_shape(chunk.spec.receives, microbatch, model, self._mesh.context)
        if self._args.sequence_parallel:
            shape = piece_shape(chunk.spec.receives, shape, model, self._mesh.tp_rank, self._mesh.tp_size)
        if shape is None:
            return None
        received = torch.randn(shape, dtype=chunk.config.params_dtype, device=self._device.torch_device)
        return received.requires_grad_(GradientPath.of(model).leaves(chunk.spec, bool(microbatch.image_grids)))

    def _agreed(self, seconds: Sequence[float]) -> float:
        """The median of the repeats, averaged over the ranks."""
        return mean_of_ranks(median(seconds), self._mesh)
