"""One rank of ``mm-plan calibrate``: measures blocks, updates, messages and collectives, and rank 0 writes the file."""

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from mm.batch import Grid
from mm.config.flags import Arguments
from mm.config.layers import layers_in
from mm.config.model import ModelConfig
from mm.device.device import Device
from mm.environment import software
from mm.parallel import mesh as parallel
from mm.parallel.megatron import DTYPES
from mm.plan.calibration import BlockKey, Calibration, Machine, MeasuredBlock
from mm.plan.lists import one_stage
from mm.planner.links import all_reduce_laws, message_law
from mm.planner.pipelines import seconds_between_passes
from mm.planner.probes import USUAL_EFFORT, Effort, Prober, probe_model
from mm.planner.samples import random_microbatch
from mm.planner.slots import usual_pass
from mm.planner.speeds import measured_speeds
from mm.planner.updates import step_law

_SAMPLE = tuple[Sequence[Grid], int]


@dataclass(frozen=True)
class ProbeSizes:
    """The microbatches of the run that will be predicted."""

    num_tokens: int
    """Tokens of the largest microbatch."""
    num_patches: int


def measure(
    device: Device, args: Arguments, model: ModelConfig, tp_sizes: Sequence[int], sizes: ProbeSizes,
    effort: Effort = USUAL_EFFORT,
) -> Calibration:  # fmt: skip
    """Measure everything; every rank of the job calls it and gets the same result.

    Whole encoders have the laws of one tensor-parallel rank.
    """
    model = replace(model, encoder_placement="cut")
    microbatches = [random_microbatch(model, samples) for samples in _samples(model, sizes)]
    blocks: dict[BlockKey, MeasuredBlock] = {}
    passes: list[float] = []
    found = None
    for tp_size in tp_sizes:
        mesh = parallel.start(device, one_stage(model), tp_size)
        if found is None:
            found = (step_law(device, mesh, args, model), message_law(device, mesh), all_reduce_laws(device, mesh),
                     measured_speeds(device, mesh, model, DTYPES[args.precision], sizes.num_tokens), mesh.world_size)
        own = replace(args, sequence_parallel=args.sequence_parallel and tp_size > 1)
        prober = Prober(device, mesh, own, microbatches, effort)
        blocks |= {one.key: one for one in prober.blocks(variants(model), blocks.keys())}
        passes += prober.passes
        parallel.stop_mesh()
    assert found is not None, "there is at least one size"
    step, message, all_reduce, speeds, world_size = found
    machine = Machine(device.name, args.precision, world_size, software(), args.exp_avg_dtype, args.exp_avg_sq_dtype,
                      args.kept_copy, args.host_share)
    calibration = Calibration(machine, time.strftime("%Y-%m-%d"), tuple(blocks.values()), usual_pass(passes),
                              None, step, message, all_reduce, speeds)
    if world_size % 2:
        return calibration
    smallest = min(microbatches, key=lambda one: one.num_tokens if one.image_grids else math.inf)
    between = seconds_between_passes(device, args, model, smallest)
    return replace(calibration, pipeline_pass=calibration.chunk_pass + between)


def variants(model: ModelConfig) -> Iterator[ModelConfig]:
    """Probes of ``model``: as it is, with everything trained, and with layers that gradients only pass through."""
    own = probe_model(model)
    trained = own.unfrozen.base
    every = {name: f"0-{tower.num_layers - 1}" for name, tower in (("vision", own.vision), ("language", own.language))}
    passed = replace(trained, vision=replace(trained.vision, freeze_layers=every["vision"]),
                     language=replace(trained.language, freeze_layers=every["language"]))
    assert layers_in(every["vision"]), "a probe has layers"
    found: dict[ModelConfig, None] = dict.fromkeys((own, trained, passed))
    yield from found


def _samples(model: ModelConfig, sizes: ProbeSizes) -> list[list[_SAMPLE]]:
    """Microbatches from small to large, in one sample and in several, with much text and with many patches."""
    tokens, patches = sizes.num_tokens, sizes.num_patches
    found: list[list[_SAMPLE]] = []
    for share in (8, 3, 1):
        grid = _grid(patches // share, model)
        found.append([([grid], max(16, tokens // share // 2))])
    pieces = _grid(patches // 4, model)
    found.append([([pieces], max(16, tokens // 8))] * 4)
    found.append([([], max(32, tokens // 2))])
    return found


def _grid(num_patches: int, model: ModelConfig) -> Grid:
    """An image of about ``num_patches`` patches, a little wider than high."""
    merge = model.vision.spatial_merge_size
    height = max(1, round((num_patches / 1.3) ** 0.5 / merge)) * merge
    width = max(1, round(num_patches / height / merge)) * merge
    return 1, height, width
