"""Measures how long each kind of block takes on this device, in the engine's own chunks.

A probe is a model of the user's widths with few layers, laid out so that neighbouring slots differ by one block: the
difference of their times is the time of that block.  Forward and backward run as in training: through megatron's DDP,
into its gradient buffers, and on a CPU with as many processes at a time as will train.
"""

import math
from collections.abc import Iterator, Mapping, Sequence, Set
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
from mm.parallel import gradients
from mm.parallel.activity import Journal
from mm.parallel.megatron import ddp_config, parallel_config
from mm.parallel.mesh import Mesh
from mm.parallel.pipeline import message_shape, piece_shape
from mm.plan.calibration import BlockKey, BlockLaws, MeasuredBlock
from mm.plan.costs import Cutting, block_keys
from mm.plan.laws import Law, Timed, fitted, relative_errors
from mm.planner.links import mean_of_ranks
from mm.weights.table import Place
from mm.weights.trained import GradientPath

NUM_REPEATS = 3, 9
"""Fewest and most repeats of a measurement, besides the first, which warms up."""
SECONDS_EACH = 0.3
"""A measurement is repeated for about this long: short ones vary more, and cost less."""
_VISION = (1, 1, 3, 1, 1, 0, 0, 0, 0)
_LANGUAGE = (0, 0, 0, 0, 0, 1, 1, 3, 1)
_FULL_SLOT, _FULL_LAYER = 3, 5
"""The ViT layer with full attention, alone in its slot."""


@dataclass(frozen=True)
class _Difference:
    """A block is what the slot ``more`` has beyond the slot ``less``, divided by ``count``."""

    place: BlockPlace
    more: int
    less: int | None
    """None: beyond the host's work for a pass."""
    count: int = 1


_LAYERS = (_Difference((Place.VISION_LAYER, 1), 2, 1, 2), _Difference((Place.LANGUAGE_LAYER, 1), 7, 6, 2))
_OTHERS = (
    _Difference((Place.PATCH_EMBEDDING, None), 0, 1), _Difference((Place.VISION_LAYER, _FULL_LAYER), _FULL_SLOT, None),
    _Difference((Place.PROJECTOR, None), 4, 1), _Difference((Place.EMBEDDING, None), 5, 6),
    _Difference((Place.HEAD, None), 8, 6),
)  # fmt: skip


def probe_model(model: ModelConfig) -> ModelConfig:
    """A model of the widths of ``model`` whose slots differ by single blocks, with the same parts frozen."""
    vision = replace(model.vision, num_layers=sum(_VISION), pipeline_num_layers=(_VISION,),
                     fullatt_block_indexes=(_FULL_LAYER,), freeze_layers="")
    language = replace(model.language, num_layers=sum(_LANGUAGE), pipeline_num_layers=(_LANGUAGE,), freeze_layers="")
    return replace(model, vision=vision, language=language)


@dataclass(frozen=True)
class SlotTimes:
    """Seconds of one slot for each microbatch that was measured: forward and backward."""

    forward: Mapping[int, float]
    """By the number of the microbatch."""
    backward: Mapping[int, float]


class Prober:
    """Measures the slots of probes on this rank; every rank of the job measures the same at the same time."""

    def __init__(self, device: Device, mesh: Mesh, args: Arguments, microbatches: Sequence[Microbatch]) -> None:
        self._device, self._mesh, self._args = device, mesh, args
        self._microbatches = microbatches
        self.passes: list[float] = []
        """The host's seconds for passes of a chunk that were measured so far."""

    def blocks(self, model: ModelConfig, known: Set[BlockKey]) -> tuple[MeasuredBlock, ...]:
        """Measure the kinds of blocks of ``model``, a probe, that are not ``known``."""
        keys = block_keys(model, Cutting(self._mesh.tp_size, self._args.sequence_parallel), has_images=True)
        layers, others = ([one for one in some if keys[one.place] not in known] for some in (_LAYERS, _OTHERS))
        wanted = sorted({slot for one in (*layers, *others) for slot in (one.more, one.less) if slot is not None})
        slots = {slot: self._slot(model, slot) for slot in wanted}
        measured = []
        for one in layers:
            own = {direction: self._difference(slots, one, direction) for direction in ("forward", "backward")}
            measured.append(self._block(model, one.place, own))
            for direction, times in own.items():
                alone = getattr(slots[one.less or 0], direction)
                self.passes += [alone[number] - times[number] for number in times if times[number] > 0]
        usual = max(0.0, median(self.passes)) if self.passes else 0.0
        for one in others:
            own = {direction: self._difference(slots, one, direction, usual) for direction in ("forward", "backward")}
            measured.append(self._block(model, one.place, own))
        return tuple(measured)

    def _difference(
        self, slots: Mapping[int, SlotTimes], one: _Difference, direction: str, chunk_pass: float = 0.0
    ) -> dict[int, float]:
        """Seconds of a block in one direction, by microbatch."""
        more: Mapping[int, float] = getattr(slots[one.more], direction)
        less: Mapping[int, float] = {} if one.less is None else getattr(slots[one.less], direction)
        return {number: (seconds - less.get(number, chunk_pass if one.less is None else 0.0)) / one.count
                for number, seconds in more.items()}

    def _block(
        self, model: ModelConfig, place: BlockPlace, seconds: Mapping[str, Mapping[int, float]]
    ) -> MeasuredBlock:
        cutting = Cutting(self._mesh.tp_size, self._args.sequence_parallel)
        key = block_keys(model, cutting, has_images=True)[place]
        laws, errors = {}, [0.0]
        for direction, by_microbatch in seconds.items():
            times = [Timed(*self._rows(model, place, number), one) for number, one in by_microbatch.items() if one > 0]
            laws[direction] = law = fitted(times) if len(times) > 1 else Law(0.0, 0.0)
            errors += map(abs, relative_errors(law, times))
        return MeasuredBlock(key, BlockLaws(**laws), max(errors))

    def _rows(self, model: ModelConfig, place: BlockPlace, number: int) -> tuple[int, int]:
        totals = BatchTotals.of([self._microbatches[number]], model.vision)
        block = next(one for one in blocks(model, totals) if (one.place, one.layer) == place)
        return block.rows, block.pairs

    def _slot(self, model: ModelConfig, slot: int) -> SlotTimes:
        """Build one slot, measure it with every microbatch, and free it."""
        mesh = replace(self._mesh, pp_rank=slot, pp_size=len(_VISION))
        settings = parallel_config(model, self._mesh, self._args.precision, self._args.sequence_parallel)
        chunk = Chunk(model, 0, mesh, settings, self._device, "token", Journal(), self._device.side_queue())
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
            fewest, most = NUM_REPEATS
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
        gradients.begin([wrapped], device.kernels.overwrites)
        while True:
            dist.barrier()
            device.synchronize()
            marks = [device.mark()]
            inputs = chunk.prepare(microbatch, totals)
            x = None if received is None else received.detach().requires_grad_(received.requires_grad)
            output: Any = wrapped(inputs, x)
            marks.append(device.mark())
            if output.requires_grad:
                torch.autograd.backward(output, None if chunk.spec.has_head else torch.ones_like(output))
            marks.append(device.mark())
            device.synchronize()
            began, middle, ended = device.seconds_of(marks)
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
