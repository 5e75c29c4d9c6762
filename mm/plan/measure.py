"""What ``mm-plan calibrate`` measures on each rank: whole layers, the update, messages, sums and copies from the host.

Layers run in chunks of the trainer, forward and backward, through megatron's DDP and into its gradient buffers.  A
probe is a model of the run's widths on seven stages: three have layers alone, and the others one more kind of block
each, whose time is what remains beside the layer.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from itertools import islice, pairwise
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from torch import Tensor

from mm.batch import IGNORE_INDEX, BatchTotals, Grid, Microbatch, Normalisation
from mm.config.args import Arguments
from mm.config.model import ModelConfig
from mm.console import Progress
from mm.cost.calibration import (
    BlockKey,
    BlockLaws,
    Calibration,
    Law,
    Machine,
    MeasuredBlock,
    Timed,
    fitted,
    settings_of,
)
from mm.cost.costs import Cutting, block_keys
from mm.cost.workload import one_stage
from mm.device.device import Device
from mm.model.arithmetic import VideoTimes
from mm.model.families import arithmetic_of
from mm.model.flops import BlockPlace, blocks
from mm.model.stage import Chunk, Stage
from mm.parallel import mesh as parallel
from mm.parallel.activity import Journal
from mm.parallel.megatron import ddp_config, optimizer_config, parallel_config
from mm.parallel.mesh import Mesh
from mm.parallel.pipeline.p2p import message_shape, shard_shape
from mm.parallel.zero import reduction
from mm.run.optim.optimizer import build_optimizer, kept_states
from mm.run.optim.update import update
from mm.weights.table import Place
from mm.weights.trained import GradientPath, group_of, is_frozen

_NUM_LINK_REPEATS = 9
_BYTES = (4 << 10, 256 << 10, 2 << 20, 16 << 20)
_COPIED_BYTES = 64 << 20


def seconds_of(
    device: Device, mesh: Mesh, work: Callable[[], object] | None, num_repeats: int = _NUM_LINK_REPEATS
) -> float:
    """The median of ``num_repeats`` calls of ``work`` after a warm-up, averaged over the ranks that have any."""
    seconds = [_elapsed(device, [work or (lambda: None)])[0] for _ in range(num_repeats + 1)]
    return mean_of_ranks(None if work is None else median(seconds[1:]), mesh)


def _elapsed(device: Device, parts: Sequence[Callable[[], object]]) -> list[float]:
    """Seconds of each of ``parts``, which all ranks begin together."""
    dist.barrier()
    device.runtime.synchronize()
    events = [device.runtime.record_event()]
    for part in parts:
        part()
        events.append(device.runtime.record_event())
    device.runtime.synchronize()
    return [after - before for before, after in pairwise(device.runtime.seconds_of(events))]


def mean_of_ranks(seconds: float | None, mesh: Mesh) -> float:
    """The mean of what the ranks have measured; a rank that has measured nothing gives None."""
    totals = torch.tensor([0.0, 0.0] if seconds is None else [seconds, 1.0], dtype=torch.float64)
    dist.all_reduce(totals, group=mesh.control_group)
    total, num_ranks = totals.tolist()
    return total / num_ranks


def message_law(device: Device, mesh: Mesh) -> Law | None:
    """One message from a rank to the next, by bytes; None with one rank."""
    if mesh.world_size == 1:
        return None
    other = mesh.rank ^ 1

    def there_and_back(tensor: torch.Tensor) -> None:
        for is_sender in (mesh.rank % 2 == 0, mesh.rank % 2 == 1):
            (dist.send if is_sender else dist.recv)(tensor, other)

    return _law_by_bytes(device, mesh, there_and_back if other < mesh.world_size else None) * 0.5


def all_reduce_laws(device: Device, mesh: Mesh) -> dict[int, Law]:
    """The sum over a group, by bytes, for every group size that is a power of two, and for the whole world."""
    found = {}
    for size in sorted({mesh.world_size, *(1 << power for power in range(1, mesh.world_size.bit_length()))} - {1}):
        groups = [list(range(first, first + size)) for first in range(0, mesh.world_size - size + 1, size)]
        group, _ = dist.new_subgroups_by_enumeration(groups, timedelta(minutes=5))
        assert not isinstance(group, int), "torch gives a number only to ranks outside of a group"
        found[size] = _law_by_bytes(device, mesh, None if group is None else partial(dist.all_reduce, group=group))
        if group is not None:
            dist.destroy_process_group(group)
    return found


def host_bytes_per_second(device: Device, mesh: Mesh) -> float:
    """Bytes per second copied from pinned memory of the host while all ranks copy."""
    target = torch.empty(_COPIED_BYTES, dtype=torch.uint8, device=device.torch_device)
    source = device.runtime.pin(torch.ones(_COPIED_BYTES, dtype=torch.uint8))
    return _COPIED_BYTES / seconds_of(device, mesh, lambda: target.copy_(source, non_blocking=True))


def _law_by_bytes(device: Device, mesh: Mesh, work: Callable[[torch.Tensor], object] | None) -> Law:
    """The law of ``work``, which is None on the ranks that have no part in it, on tensors of several sizes."""
    times = []
    for num_bytes in _BYTES:
        tensor = torch.zeros(num_bytes // 4, device=device.torch_device)
        times.append(Timed(num_bytes, 0.0, seconds_of(device, mesh, None if work is None else partial(work, tensor))))
    return fitted(times)


_NORMALISATION = Normalisation(255.0, (0.5, 0.5, 0.5), (0.25, 0.25, 0.25))
_FIRST_IDS = 16
"""Text has ids below this: every vocabulary has them, and no control token is among them."""


def random_microbatch(model: ModelConfig, samples: Sequence[tuple[Sequence[Grid], int]]) -> Microbatch:
    """Pack ``samples``: the grids of each one's images, and the number of text tokens, all targets, that follow."""
    generator = torch.Generator().manual_seed(len(samples))
    merge_size, start = model.vision.spatial_merge_size, model.vision_start_token_id
    token_ids, labels, positions = [], [], []
    for grids, num_text_tokens in samples:
        images = [torch.tensor([start, *[model.image_token_id] * (math.prod(grid) // merge_size**2)])
                  for grid in grids]
        text = torch.randint(0, _FIRST_IDS, (num_text_tokens,), generator=generator)
        ids = torch.cat([*images, text])
        num_image_tokens = len(ids) - num_text_tokens
        token_ids.append(ids)
        labels.append(torch.cat([torch.full((num_image_tokens,), IGNORE_INDEX), text.roll(-1)]))
        positions.append(arithmetic_of(model).positions(
            ids, tuple(grids), model.image_token_id, start, merge_size,
            VideoTimes(model.video_token_id, model.vision.tokens_per_second, (None,) * len(grids))))
    all_grids = tuple(grid for grids, _ in samples for grid in grids)
    shape = sum(map(math.prod, all_grids)), model.vision.patch_elements
    return Microbatch(
        token_ids=torch.cat(token_ids), labels=torch.cat(labels), positions=torch.cat(positions, dim=1),
        segment_lengths=tuple(map(len, token_ids)), image_grids=all_grids,
        pixel_values=torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8) if all_grids else None,
        normalisations=(_NORMALISATION,) * len(all_grids),
    )


NUM_ROUNDS = 3
"""Slots are measured in turn this often, and the median counts: a machine's speed changes within seconds."""
_NUM_REPEATS = 2
_UPDATED_LAYERS = (1, 4)
"""Numbers of LLM layers whose update is timed."""
_VISION, _LANGUAGE = (1, 3, 1, 1, 0, 0, 0), (0, 0, 0, 0, 1, 3, 1)
"""Layers of each slot of a probe."""


@dataclass(frozen=True)
class _Measured:
    """A kind of block, and the slot that has it."""

    place: BlockPlace
    slot: int
    count: int = 1
    """How many of them the slot has."""
    beside: "_Measured | None" = None
    """A layer that the slot has too."""


_WINDOW = _Measured((Place.VISION_LAYER, 1), 1, 3)
_FULL = _Measured((Place.VISION_LAYER, 4), 2)
_LLM = _Measured((Place.LANGUAGE_LAYER, 1), 5, 3)
_BLOCKS = (
    _WINDOW, _FULL, _LLM, _Measured((Place.PATCH_EMBEDDING, None), 0, beside=_WINDOW),
    _Measured((Place.PROJECTOR, None), 3, beside=_WINDOW), _Measured((Place.EMBEDDING, None), 4, beside=_LLM),
    _Measured((Place.HEAD, None), 6, beside=_LLM),
)  # fmt: skip

_SlotTimes = Mapping[int, tuple[float, float]]
"""Seconds of a slot forward and backward, by the number of the microbatch."""


def measure(
    device: Device, args: Arguments, model: ModelConfig, tp_sizes: Sequence[int], num_tokens: int, num_patches: int,
    num_rounds: int = NUM_ROUNDS,
) -> Calibration:  # fmt: skip
    """Measure everything up to a microbatch of this size; every rank of the job calls it and gets the same result."""
    model = replace(model, encoder_placement="cut")  # whole encoders have the laws of one tensor-parallel rank
    microbatches = [random_microbatch(model, samples) for samples in _samples(model, num_tokens, num_patches)]
    mesh = parallel.start(device, one_stage(model), tp_sizes[0])
    step, message, sums = _step_law(device, mesh, args, model), message_law(device, mesh), all_reduce_laws(device, mesh)
    host_bytes, found = host_bytes_per_second(device, mesh), dict[BlockKey, MeasuredBlock]()
    for tp_size in tp_sizes:
        if tp_size != mesh.tp_size:
            parallel.stop_mesh()
            mesh = parallel.start(device, one_stage(model), tp_size)
        own = replace(args, sequence_parallel=args.sequence_parallel and tp_size > 1)
        found |= _Prober(device, mesh, own, microbatches, num_rounds).blocks(list(variants(model)), found)
    parallel.stop_mesh()
    machine = Machine(device.name, args.precision, mesh.world_size, settings_of(args))
    return Calibration(machine, time.strftime("%Y-%m-%d"), tuple(found.values()), step, message, sums, host_bytes)


def variants(model: ModelConfig) -> Iterator[ModelConfig]:
    """Probes of ``model``: as it is, with everything trained, and with layers that gradients only pass through."""
    vision = replace(model.vision, num_layers=sum(_VISION), pipeline_num_layers=(_VISION,),
                     fullatt_block_indexes=(4,), freeze_layers="")
    language = replace(model.language, num_layers=sum(_LANGUAGE), pipeline_num_layers=(_LANGUAGE,), freeze_layers="")
    own = replace(model, vision=vision, language=language)
    trained = own.unfrozen.base
    passed = replace(trained, **{name: replace(tower, freeze_layers=f"0-{tower.num_layers - 1}")
                                 for name, tower in (("vision", trained.vision), ("language", trained.language))})
    yield from dict.fromkeys((own, trained, passed))


def _samples(model: ModelConfig, tokens: int, patches: int) -> list[list[tuple[Sequence[Grid], int]]]:
    """Microbatches from small to large, in one sample and in several, with many patches and with none."""
    merge = model.vision.spatial_merge_size

    def sample(share: int) -> tuple[Sequence[Grid], int]:
        """With one image, a little wider than high."""
        height = max(1, round((patches // share / 1.3) ** 0.5 / merge)) * merge
        width = max(1, round(patches // share / height / merge)) * merge
        return [(1, height, width)], max(16, tokens // share // 2)

    return [[sample(8)], [sample(3)], [sample(1)], [sample(4)] * 4, [([], max(32, tokens // 2))]]


def law_and_error(rounds: Sequence[Mapping[int, float]], sizes: Mapping[int, tuple[int, int]]) -> tuple[Law, float]:
    """The law of a block in one direction, and its relative error.

    ``rounds``: seconds by microbatch; ``sizes``: the block's rows and pairs by microbatch.  The error is the root of
    two squares: the law's largest misfit, and half the range of the rounds (the median of the microbatches).
    """
    seconds = {number: [one[number] for one in rounds] for number in rounds[0]}
    usual = {number: middle for number, several in seconds.items() if (middle := median(several)) > 0}
    times = [Timed(*sizes[number], middle) for number, middle in usual.items()]
    if len(times) < 2:  # a block that is lost in noise
        return Law(0.0, 0.0), 0.0
    law = fitted(times)
    spread = median((max(seconds[number]) - min(seconds[number])) / 2 / middle for number, middle in usual.items())
    misfit = max(abs(law.seconds(one.rows, one.pairs) / one.seconds - 1) for one in times)
    return law, math.hypot(misfit, spread)


@dataclass(frozen=True)
class _Prober:
    """Measures the slots of probes on this rank; every rank of the job measures the same at the same time."""

    device: Device
    mesh: Mesh
    args: Arguments
    microbatches: Sequence[Microbatch]
    num_rounds: int

    def blocks(self, models: Sequence[ModelConfig], known: Mapping[BlockKey, object]) -> dict[BlockKey, MeasuredBlock]:
        """Measure the kinds of blocks of ``models``, which are probes, that are not ``known``; each kind once."""
        found, cutting = dict[BlockKey, MeasuredBlock](), Cutting(self.mesh.tp_size, self.args.sequence_parallel)
        progress = Progress("measuring layers", len(models), "models", is_shown=self.mesh.rank == 0)
        for model in progress.each(models):
            keys = block_keys(model, cutting, has_images=True)
            new = [one for one in _BLOCKS if keys[one.place] not in known and keys[one.place] not in found]
            needed = sorted({one.slot for block in new for one in (block, block.beside) if one is not None})
            rounds = [{slot: self._slot(model, slot) for slot in needed} for _ in range(self.num_rounds)]
            found |= {keys[one.place]: self._measured(model, keys[one.place], one, rounds) for one in new}
        return found

    def _measured(
        self, model: ModelConfig, key: BlockKey, one: _Measured, rounds: Sequence[Mapping[int, _SlotTimes]]
    ) -> MeasuredBlock:
        def of(slots: Mapping[int, _SlotTimes], number: int, direction: int) -> float:
            other = one.beside
            layer = 0.0 if other is None else slots[other.slot][number][direction] / other.count
            return (slots[one.slot][number][direction] - layer) / one.count

        sizes = {number: self._rows(model, one.place, number) for number in rounds[0][one.slot]}
        (forward, error), (backward, other_error) = (law_and_error(
            [{number: of(slots, number, direction) for number in sizes} for slots in rounds], sizes)
            for direction in (0, 1))
        return MeasuredBlock(key, BlockLaws(forward, backward), max(error, other_error))

    def _rows(self, model: ModelConfig, place: BlockPlace, number: int) -> tuple[int, int]:
        totals = BatchTotals.of([self.microbatches[number]], model.vision)
        block = next(one for one in blocks(model, totals) if (one.place, one.layer) == place)
        return block.rows, block.pairs

    def _slot(self, model: ModelConfig, slot: int) -> _SlotTimes:
        """Build one slot, measure it with every microbatch, and free it."""
        mesh = replace(self.mesh, pp_rank=slot, pp_size=len(_VISION))
        settings = parallel_config(model, self.mesh, self.args.precision, self.args.sequence_parallel)
        chunk = Chunk(model, 0, mesh, settings, self.device, "token", Journal(), self.device.runtime.side_stream())
        generator = torch.Generator(self.device.torch_device).manual_seed(slot)
        with torch.no_grad():
            for parameter in chunk.parameters():
                parameter.normal_(0.0, 0.02, generator=generator)
        wrapped = DistributedDataParallel(settings, ddp_config(self.args), chunk)
        found = {}
        for number, microbatch in enumerate(self.microbatches):
            if microbatch.image_grids or not chunk.spec.vision_layers:
                times = list(islice(self._times(model, chunk, wrapped, microbatch), 1, 1 + _NUM_REPEATS))
                forward, backward = (mean_of_ranks(median(one), self.mesh) for one in zip(*times, strict=True))
                found[number] = forward, backward
        return found

    def _times(
        self, model: ModelConfig, chunk: Chunk, wrapped: DistributedDataParallel, microbatch: Microbatch
    ) -> Iterator[tuple[float, float]]:
        """Seconds of forward and backward, again and again; the first warms up."""
        totals, received = BatchTotals.of([microbatch], model.vision), self._received(model, chunk, microbatch)
        outputs: list[Any] = []
        reduction.begin([wrapped], self.device.kernels.overwrites)

        def forward() -> None:
            inputs = chunk.prepare(microbatch, totals)
            x = None if received is None else received.detach().requires_grad_(received.requires_grad)
            outputs.append(wrapped(inputs, x))

        def backward() -> None:
            output = outputs.pop()
            if output.requires_grad:
                torch.autograd.backward(output, None if chunk.spec.has_head else torch.ones_like(output))

        while True:
            forward_seconds, backward_seconds = _elapsed(self.device, (forward, backward))
            yield forward_seconds, backward_seconds

    def _received(self, model: ModelConfig, chunk: Chunk, microbatch: Microbatch) -> Tensor | None:
        shape = message_shape(chunk.spec.receives, microbatch, model, self.mesh.context)
        if self.args.sequence_parallel:
            shape = shard_shape(chunk.spec.receives, shape, model, self.mesh.tp_rank, self.mesh.tp_size)
        if shape is None:
            return None
        received = torch.randn(shape, dtype=chunk.config.params_dtype, device=self.device.torch_device)
        return received.requires_grad_(GradientPath.of(model).leaves(chunk.spec, bool(microbatch.image_grids)))


def _step_law(device: Device, mesh: Mesh, args: Arguments, model: ModelConfig) -> Law:
    """Seconds of a step besides its passes, by trained parameters of a rank: clearing gradients, norm and update."""
    times = []
    for count in _UPDATED_LAYERS:
        vision = replace(model.vision, num_layers=1, pipeline_num_layers=((1,),), fullatt_block_indexes=())
        language = replace(model.language, num_layers=count, pipeline_num_layers=((count,),))
        times.append(_timed_update(device, mesh, args, replace(model, vision=vision, language=language).unfrozen.base))
    return fitted(times)


def _timed_update(device: Device, mesh: Mesh, args: Arguments, model: ModelConfig) -> Timed:
    stage = Stage(model, mesh, args.precision, device, sequence_parallel=args.sequence_parallel)
    with torch.no_grad():
        for _, parameter in stage.named_parameters():
            parameter.zero_()
    models = [DistributedDataParallel(stage.config, ddp_config(args), chunk) for chunk in stage.chunks]
    groups = {weight.name: group_of(weight, args, model) for weight in stage.weights if not is_frozen(weight, model)}
    optimizer = build_optimizer(optimizer_config(args, stage.config), models, groups, kept_states(args), device)
    loss = torch.zeros((), device=device.torch_device)

    def work() -> None:
        reduction.begin(models, device.kernels.overwrites)
        optimizer.zero_grad()
        reduction.end(models)
        update(optimizer, loss, args.lr, mesh, device, journal=stage.journal)

    seconds = seconds_of(device, mesh, work, num_repeats=5)  # the first call, which does not count, allocates
    num_trained = sum(parameter.numel() for _, parameter in stage.named_parameters() if parameter.requires_grad)
    return Timed(num_trained, 0.0, seconds)
