"""What one training step of a real size would do on a CUDA device, counted on the meta device in seconds.

    python -m tests.meta.step --size 3b --tokens 8268 [--freeze vision projector] [--recompute full] [--output F]

The real stage, megatron's DDP, the schedule and the optimizer's step run on tensors without values.  It counts kernels,
bytes read and written, FLOPs and host reads by phase and operator, and live memory.  It times nothing: the host must
launch these kernels, and they need at least these bytes and FLOPs.
"""

import argparse
import dataclasses
import json
import math
import sys
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from mm.config.layers import OffloadConfig, RecomputeConfig
from mm.config.lora import LoraConfig
from mm.config.model import ModelConfig, read_model
from tests.files import EXAMPLES
from tests.meta.device import PHASES, Recorder, Tally, meta_device, prepare
from tests.workload import SAMPLE, SAMPLE_TOKENS

if TYPE_CHECKING:
    from mm.batch import Microbatch
    from mm.parallel.mesh import Mesh
    from mm.run.step import Setup

RECOMPUTE = {
    "none": RecomputeConfig(),
    "selective": RecomputeConfig("selective"),
    "full": RecomputeConfig("full", "uniform", 1),
    **{module: RecomputeConfig("selective", modules=(module,)) for module in ("layernorm", "mlp_act", "mlp")},
}


@dataclass(frozen=True)
class Case:
    """One step of one rank."""

    size: str = "3b"
    num_samples: int = 12
    """Number of samples in a microbatch, each of 689 tokens."""
    num_microbatches: int = 1
    freeze: tuple[str, ...] = ()
    freeze_layers: tuple[str, str] = ("", "")
    """Frozen layers of the ViT and the LLM, in the syntax of the model JSON."""
    freeze_modules: tuple[str, ...] = ()
    recompute: str = "none"
    """A key of ``RECOMPUTE``, for both towers."""
    offload: int = 0
    """Layers of each tower and stage, the first ones, whose activations are offloaded."""
    tp_size: int = 1
    layers: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    """Layers of the ViT and of the LLM on each pipeline stage; None: all of the model on one."""
    full_attention: tuple[int, ...] | None = None
    """ViT layers that attend over whole images; None: the model's."""
    stage: int = 0
    """The pipeline stage that is traced."""
    sequence_parallel: bool = False
    dp_size: int = 1
    """Replicas, each with such a batch."""
    cp_size: int = 1
    is_ring: bool = False
    whole_encoder: bool = False
    """Whether every tensor-parallel rank has the whole ViT and projector, and images of its own."""
    encoder_batch: int = 1
    """Microbatches whose images pass the ViT together."""
    lora_rank: int = 0
    """Rank of the adapters on all linear layers of trained parts; 0: no adapters."""
    flags: tuple[str, ...] = ()
    """Further flags of the run."""
    forward_only: bool = False
    """Trace a validation instead of a step."""

    def model(self) -> ModelConfig:
        model = read_model(EXAMPLES / f"model_{self.size}.json").value
        vision, language = self.layers or ((model.vision.num_layers,), (model.language.num_layers,))
        recompute, offload = RECOMPUTE[self.recompute], OffloadConfig(num_layers=self.offload or None)
        full = model.vision.fullatt_block_indexes if self.full_attention is None else self.full_attention
        parts = {
            "vision": dataclasses.replace(
                model.vision, num_layers=sum(vision), pipeline_num_layers=(vision,), recompute=recompute,
                offload=offload, fullatt_block_indexes=tuple(layer for layer in full if layer < sum(vision)),
                freeze="vision" in self.freeze, freeze_layers=self.freeze_layers[0],
            ),
            "language": dataclasses.replace(
                model.language, num_layers=sum(language), pipeline_num_layers=(language,), recompute=recompute,
                offload=offload, freeze="language" in self.freeze, freeze_layers=self.freeze_layers[1],
            ),
            "projector": dataclasses.replace(model.projector, freeze="projector" in self.freeze),
        }  # fmt: skip
        lora = LoraConfig(("all-linear",), r=self.lora_rank) if self.lora_rank else LoraConfig()
        return dataclasses.replace(model, **parts, freeze_modules=self.freeze_modules, lora=lora,
                                   encoder_placement="tensor_ranks" if self.whole_encoder else "cut",
                                   encoder_batch_microbatches=self.encoder_batch)


@dataclass(frozen=True)
class Trace:
    """What a step did."""

    num_tokens: int
    """Number of tokens of one microbatch that this rank holds."""
    num_patches: int
    """Number of patches of one microbatch that this rank holds."""
    num_targets: int
    """Number of target tokens of one microbatch that this rank holds."""
    model_flops: float
    """FLOPs of all microbatches, as ``mm.model.flops`` counts them for MFU."""
    operators: dict[str, dict[str, Tally]]
    """By phase and operator."""
    host_reads: dict[str, int]
    """By phase: how often the host waited for a value."""
    collectives: dict[str, int]
    collective_bytes: dict[str, int]
    """By collective: bytes of its largest tensor, summed."""
    num_copies: int
    """Tensors copied to the device."""
    state_bytes: int
    """Weights, gradients and optimizer state, as they are after the step."""
    in_flight_bytes: int
    """Bytes kept at the first backward pass, by all microbatches that the stage has in flight then."""
    peak_bytes: int
    """Peak memory during the step."""
    built_peak_bytes: int
    """Peak memory before the step, while the model and the optimizer are built."""

    def total(self, *phases: str) -> Tally:
        return sum((tally for phase in phases for tally in self.operators.get(phase, {}).values()), Tally())


@cache
def _prepare_once() -> None:
    prepare()


def trace(case: Case) -> Trace:
    """Run one step of ``case`` on the meta device.  This patches the process permanently."""
    _prepare_once()
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from mm.parallel import mesh as parallel

    model, recorder = case.model(), Recorder()
    stage_size = case.tp_size * case.cp_size * case.dp_size
    world_size = stage_size * model.num_stages
    dist.init_process_group("fake", store=FakeStore(), rank=case.stage * stage_size, world_size=world_size)
    try:
        mesh = parallel.build_mesh(model, case.tp_size, timedelta(minutes=1), case.cp_size, case.is_ring)
        return _step(case, model, mesh, recorder)
    finally:
        parallel.stop()


def _allocate_moments(setup: "Setup") -> None:
    """As only the first step of a run does."""
    setup.optimizer.prepare_grads()
    for chained in setup.optimizer.chained_optimizers:
        if not chained.is_stub_optimizer:
            chained.optimizer.step()


def _step(case: Case, model: ModelConfig, mesh: "Mesh", recorder: Recorder) -> Trace:
    from mm.batch import BatchTotals, StepPlan, image_passes
    from mm.config import args as flags
    from mm.data.loader.broadcast import deal_images
    from mm.model.flops import training_flops
    from mm.model.stage import Chunk, Stage
    from mm.run.step import Setup, forward, step
    from tests.microbatches import own_pixels, random_microbatch

    def record_phase(chunk: Chunk, phase: str) -> None:
        """Make the recorder count what ``chunk`` does in its method ``phase`` as that phase."""
        work = getattr(chunk, phase)

        def recorded(*args: object, **named: object) -> object:
            with recorder.doing(phase):
                return work(*args, **named)

        setattr(chunk, phase, recorded)

    args = flags.parse([
        "--lr", "1e-5", "--train-iters", "1", "--clip-grad", "1.0", "--weight-decay", "0.01", "--seq-length", "1",
        "--micro-batch-size", "1", "--mm-model", "-", "--mm-data", "-", "--use-distributed-optimizer", "--bf16",
        *case.flags,
    ])  # fmt: skip
    num_encoders = mesh.context.num_encoders
    one = random_microbatch(model, [SAMPLE] * case.num_samples, seed=0)
    batch = deal_images([deepcopy(one) for _ in range(case.num_microbatches)], model, num_encoders)
    totals = BatchTotals.of(batch, model.vision)
    with recorder:
        stage = Stage(model, mesh, "bf16", meta_device(recorder), sequence_parallel=case.sequence_parallel,
                      shards_weights=args.shards_weights)
        for chunk in stage.chunks:
            record_phase(chunk, "prepare")
            record_phase(chunk, "forward")
        setup = Setup.build(stage, mesh, args)
        built_peak_bytes = recorder.peak_bytes
        _allocate_moments(setup)
        passes = image_passes(batch, model.encoder_batch_size)
        plan = StepPlan(tuple(own_pixels(one, mesh.context) for one in batch), totals, image_passes=passes)
        recorder.start()
        if case.forward_only:
            forward(setup, plan)
        else:
            step(setup, plan, lr=1e-5)
    return Trace(
        num_tokens=mesh.context.num_tokens(batch[0]),
        num_patches=sum(map(math.prod, mesh.context.image_grids(batch[0]))),
        num_targets=_num_targets(batch[0], mesh),
        model_flops=training_flops(model, totals),
        operators={phase: {name: tally for (at, name), tally in recorder.tallies.items() if at == phase}
                   for phase in PHASES},
        host_reads=dict(recorder.host_reads),
        collectives=dict(recorder.collectives),
        collective_bytes=dict(recorder.collective_bytes),
        num_copies=recorder.num_copies,
        state_bytes=recorder.live_bytes,
        in_flight_bytes=recorder.in_flight_bytes or 0,
        peak_bytes=recorder.peak_bytes,
        built_peak_bytes=built_peak_bytes,
    )


def _num_targets(microbatch: "Microbatch", mesh: "Mesh") -> int:
    from mm.batch import IGNORE_INDEX

    rows = mesh.context.share(microbatch).here
    return int((microbatch.labels[rows] != IGNORE_INDEX).sum())


def report(traced: Trace, num_operators: int = 12) -> str:
    """A summary, and for each phase the operators that move the most bytes."""
    lines = [
        f"{traced.num_tokens} tokens, {traced.num_patches} patches, {traced.num_targets} targets in a microbatch, "
        f"{traced.model_flops / 1e12:.2f} TFLOP of the model in a step",
        f"states {traced.state_bytes / 1e9:.2f} GB, kept for the backward pass {traced.in_flight_bytes / 1e9:.2f} GB, "
        f"peak {traced.peak_bytes / 1e9:.2f} GB",
        f"host reads {sum(traced.host_reads.values())} {traced.host_reads}, copies to the device {traced.num_copies}, "
        f"collectives {sum(traced.collectives.values())} {traced.collectives}, "
        f"{sum(traced.collective_bytes.values()) / 1e9:.2f} GB",
    ]
    for phase, operators in traced.operators.items():
        lines += ["", _row(phase, traced.total(phase))]
        heaviest = sorted(operators.items(), key=lambda item: -item[1].num_bytes)
        lines += [_row(f"  {name}", tally) for name, tally in heaviest[:num_operators]]
    return "\n".join(lines)


def _row(name: str, tally: Tally) -> str:
    return f"{name:34} {tally.kernels:6} kernels {tally.num_bytes / 1e9:9.3f} GB {tally.flops / 1e12:9.3f} TFLOP"


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", default="3b", choices=("tiny", "3b", "7b", "32b", "72b"))
    parser.add_argument("--tokens", type=int, default=8268, help="tokens of a microbatch, rounded to whole samples")
    parser.add_argument("--num-microbatches", type=int, default=1)
    parser.add_argument("--freeze", nargs="*", default=[], choices=("vision", "projector", "language"))
    parser.add_argument("--recompute", default="none", choices=tuple(RECOMPUTE))
    parser.add_argument("--tp-size", type=int, default=1)
    parser.add_argument("--sequence-parallel", action="store_true")
    parser.add_argument("--whole-encoder", action="store_true", help="encoder_placement tensor_ranks")
    parser.add_argument("--vision-layers", nargs="*", type=int, help="layers of the ViT on each pipeline stage")
    parser.add_argument("--language-layers", nargs="*", type=int, help="layers of the LLM on each pipeline stage")
    parser.add_argument("--stage", type=int, default=0, help="the pipeline stage that is traced")
    parser.add_argument("--output", type=Path, help="JSON file to write beside standard output")
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> None:
    flags = parse(argv)
    num_samples = max(1, round(flags.tokens / SAMPLE_TOKENS))
    layers = (tuple(flags.vision_layers), tuple(flags.language_layers)) if flags.vision_layers else None
    case = Case(flags.size, num_samples, flags.num_microbatches, tuple(flags.freeze), recompute=flags.recompute,
                tp_size=flags.tp_size, layers=layers, stage=flags.stage, sequence_parallel=flags.sequence_parallel,
                whole_encoder=flags.whole_encoder)
    traced = trace(case)
    print(report(traced), flush=True)
    if flags.output:
        flags.output.write_text(json.dumps(dataclasses.asdict(traced), indent=2) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
