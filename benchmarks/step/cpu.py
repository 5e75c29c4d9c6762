"""Training steps on CPU processes; import it after ``Device.pick``.

``against_peer``: ours in a pipeline of one or two processes, transformers' in one, in turn on the same weights and
microbatches; loss and gradient norm of the first step are compared before anything is timed.

``encoders``: two tensor-parallel ranks, in turn with a ViT cut over both, with a whole ViT on each, and with whole ViTs
that encode the images of all microbatches together.  ``mm-plan``'s ratio stands beside the measured one, after a
calibration of this machine.

``strategies``: two data-parallel ranks, in turn with each sharding strategy.
"""

import itertools
import os
import statistics
import time
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.measure import median_ratio, model_config, step_arguments
from benchmarks.sides import Ours, Peer, random_tensors, resized
from mm.batch import BatchTotals, Microbatch
from mm.config.data import DataConfig
from mm.config.model import ModelConfig
from mm.config.run import Run
from mm.cost.predict import Predictor
from mm.cost.workload import Workload, counts_of
from mm.data.sampler.cost import in_pipeline_order
from mm.device.device import Device
from mm.plan.measure import NUM_ROUNDS, measure
from tests.microbatches import random_microbatch
from tests.workload import Sample

NUM_PEER_WARMUP, NUM_WARMUP, NUM_STEPS = 3, 1, 3
NUM_MICROBATCHES = 2
NUM_TEXT_TOKENS = 150
"""Number of text tokens in a sample: a question, an answer of a few sentences, and the template around them."""
NUM_LAYERS, NUM_QUICK_LAYERS = 8, 2
"""Layers of each tower.  With two stages, the ViT is on the first and the LLM on the second."""
NUM_FEW_TOKENS = 40
BATCHES: dict[str, list[Sample]] = {
    "even": [(((1, 24, 16), (1, 16, 24)), NUM_FEW_TOKENS)] * 3,
    "mixed": [(((1, 12, 16), (1, 24, 24)), NUM_FEW_TOKENS), (((1, 16, 20),), NUM_FEW_TOKENS),
              (((1, 20, 28), (1, 8, 12), (1, 16, 16)), NUM_FEW_TOKENS)],
    "one": [(((1, 40, 56),), 3 * NUM_FEW_TOKENS)],
}  # fmt: skip
"""Samples of a microbatch with little text, whose images two ranks can divide evenly, about evenly, or not at all."""
QUICK_BATCHES: dict[str, list[Sample]] = {
    "even": [(((1, 8, 4), (1, 4, 8)), 8)],
    "mixed": [(((1, 4, 8), (1, 8, 8)), 8), (((1, 8, 6),), 8)],
    "one": [(((1, 12, 16),), 16)],
}
CUT, WHOLE, TOGETHER = "cut", "whole", "together"
ENCODERS: dict[str, dict[str, Any]] = {
    CUT: {}, WHOLE: {"encoder_placement": "tensor_ranks"},
    TOGETHER: {"encoder_placement": "tensor_ranks", "encoder_batch_microbatches": NUM_MICROBATCHES},
}
"""Settings of the model JSON."""
STRATEGIES = {
    "no_shard": (),
    "optim": ("--use-distributed-optimizer",),
    "optim_grads": ("--data-parallel-sharding-strategy", "optim_grads"),
    "optim_grads, overlapped": ("--data-parallel-sharding-strategy", "optim_grads", "--overlap-grad-reduce"),
    "optim_grads_params": ("--data-parallel-sharding-strategy", "optim_grads_params"),
    "optim_grads_params, overlapped": ("--data-parallel-sharding-strategy", "optim_grads_params",
                                       "--overlap-grad-reduce", "--overlap-param-gather"),
}


def model_of(num_stages: int, is_quick: bool) -> ModelConfig:
    """A model of 34 M weights; ``is_quick``: one with fewer and narrower layers, which only shows that all runs."""
    widths: tuple[dict[str, Any], dict[str, Any]] = (
        {"hidden_size": 320, "ffn_hidden_size": 856, "window_attn_size": 112},
        {"hidden_size": 512, "ffn_hidden_size": 1408, "mrope_section": (16, 24, 24), "vocab_size": 1024},
    )
    if is_quick:
        widths = {"hidden_size": 64, "ffn_hidden_size": 128}, {"hidden_size": 128, "ffn_hidden_size": 256}
    count = NUM_QUICK_LAYERS if is_quick else NUM_LAYERS
    empty = (0,) * (num_stages - 1)
    full_attention = (count // 2 - 1, count - 1)
    return resized(
        model_config("tiny"),
        {**widths[0], "num_layers": count, "pipeline_num_layers": ((count, *empty),),
         "fullatt_block_indexes": full_attention},
        {**widths[1], "num_layers": count, "pipeline_num_layers": ((*empty, count),)},
    )  # fmt: skip


def trained_model(is_quick: bool) -> ModelConfig:
    """The model on one stage, with all of its weights trained."""
    model = model_of(1, is_quick)
    return replace(model, vision=replace(model.vision, freeze=False))


def batch_of(model: ModelConfig, step: int, num_samples: int, num_microbatches: int) -> list[Microbatch]:
    """Samples with an image of 384 patches, alternately upright and wide; every fourth sample has none."""
    image = itertools.cycle([((1, 24, 16),), ((1, 16, 24),), ((1, 24, 16),), ()])
    samples: list[Sample] = [(next(image), NUM_TEXT_TOKENS) for _ in range(num_samples * num_microbatches)]
    batch = [random_microbatch(model, samples[first : first + num_samples], seed=1000 * step + first)
             for first in range(0, len(samples), num_samples)]  # fmt: skip
    return list(in_pipeline_order(model, batch))


def against_peer(
    device: Device, rounds: int, num_samples: int, num_microbatches: int, is_quick: bool
) -> dict[str, Any] | None:
    """Time both sides in turn on this rank; the result is returned on the first rank only."""
    num_stages = int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    model = model_of(num_stages, is_quick)
    tensors = random_tensors(model, device.torch_device, torch.float32)
    ours = Ours(model, device, "fp32", tensors)
    theirs = Peer(model, device.torch_device, "fp32", tensors) if dist.get_rank() == 0 else None
    times: list[dict[str, float]] = []
    num_warmup = NUM_WARMUP if is_quick else NUM_PEER_WARMUP
    for number in range(num_warmup + rounds):
        batch = batch_of(model, number, num_samples, num_microbatches)
        totals = BatchTotals.of(batch, model.vision)
        dist.barrier()
        start = time.perf_counter()
        loss, norm = ours.step(batch)
        our_seconds = time.perf_counter() - start
        dist.barrier()
        if theirs is not None:
            batches = theirs.batches(batch)
            torch.set_num_threads(num_stages)
            start = time.perf_counter()
            peer_loss, peer_norm = theirs.step(batches, totals.num_target_tokens)
            peer_seconds = time.perf_counter() - start
            torch.set_num_threads(1)
            agree = abs(loss - peer_loss) < 1e-5 * peer_loss and abs(norm - peer_norm) < 1e-4 * peer_norm
            assert number or agree, f"not the same model: loss {loss} {peer_loss}, gradient norm {norm} {peer_norm}"
            if number >= num_warmup:
                times.append({"ours": our_seconds, "theirs": peer_seconds, "tokens": totals.num_tokens,
                              "patches": totals.num_patches})  # fmt: skip
        dist.barrier()
    ours.close()
    if theirs is None:
        return None
    our_times, their_times = ([row[side] for row in times] for side in ("ours", "theirs"))
    return {
        "processes": num_stages,
        "micro_batch_size": num_samples,
        "num_microbatches": num_microbatches,
        "our_tokens_per_second": statistics.median(row["tokens"] / row["ours"] for row in times),
        "peer_tokens_per_second": statistics.median(row["tokens"] / row["theirs"] for row in times),
        "our_speed_over_peer": median_ratio(their_times, our_times),
        "tokens_per_step": statistics.mean(row["tokens"] for row in times),
        "patches_per_step": statistics.mean(row["patches"] for row in times),
        "rounds": len(times),
    }


def times_of(ours: Ours, batch: list[Microbatch], num_steps: int) -> tuple[list[float], tuple[float, float]]:
    """On every rank: seconds of ``num_steps`` timed steps, and loss and gradient norm of the first warm-up step."""
    own, times, first = ours.batches(batch), list[float](), (0.0, 0.0)
    for number in range(NUM_WARMUP + num_steps):
        dist.barrier()
        start = time.perf_counter()
        result = ours.step(own)
        dist.barrier()
        first = result if number == 0 else first
        times += [time.perf_counter() - start] if number >= NUM_WARMUP else []
    return times, first


def check_same(firsts: list[tuple[float, float]]) -> None:
    """Assert that all first steps have the same loss and gradient norm."""
    for values in zip(*firsts, strict=True):
        assert max(values) - min(values) < 1e-5 * max(values), f"not the same training: {firsts}"


def encoders(device: Device, rounds: int, is_quick: bool, sequence_parallel: bool) -> list[dict[str, Any]] | None:
    """For each of ``BATCHES`` or ``QUICK_BATCHES``, the time of a step with each of ``ENCODERS``.

    Ratios are cut / whole and cut / together.  Only the first rank returns a result.
    """
    torch.set_num_threads(1)
    model = trained_model(is_quick)
    samples_of = QUICK_BATCHES if is_quick else BATCHES
    batches = {name: [random_microbatch(model, samples, seed) for seed in range(NUM_MICROBATCHES)]
               for name, samples in samples_of.items()}  # fmt: skip
    predicted = predicted_ratios(device, model, batches, sequence_parallel, 1 if is_quick else NUM_ROUNDS)
    tensors = random_tensors(model, device.torch_device, torch.float32)
    seconds = {name: {encoder: list[float]() for encoder in ENCODERS} for name in batches}
    firsts: list[tuple[float, float]] = []
    for _ in range(rounds):
        for encoder, fields in ENCODERS.items():
            ours = Ours(replace(model, **fields), device, "fp32", tensors, 2, sequence_parallel)
            for name, batch in batches.items():
                times, first = times_of(ours, batch, 1 if is_quick else NUM_STEPS)
                seconds[name][encoder] += times
                firsts += [first] if name == next(iter(batches)) else []  # later ones start from other roundings
            ours.close()
    check_same(firsts)
    if dist.get_rank():
        return None
    totals = {name: BatchTotals.of(batch, model.vision) for name, batch in batches.items()}
    return [
        {"batch": name, "sequence_parallel": sequence_parallel, "tokens": totals[name].num_tokens,
         "patches": totals[name].num_patches, "images": totals[name].num_images,
         "seconds": {encoder: statistics.median(times) for encoder, times in of.items()},
         "time_ratio": {encoder: median_ratio(of[CUT], of[encoder]) for encoder in (WHOLE, TOGETHER)},
         "predicted_ratio": predicted[name]}
        for name, of in seconds.items()
    ]  # fmt: skip


def predicted_ratios(
    device: Device, model: ModelConfig, batches: dict[str, list[Microbatch]], sequence_parallel: bool, num_rounds: int
) -> dict[str, dict[str, float]]:
    """The predicted time of a step, cut / whole and cut / together, for each of ``batches``."""
    args = step_arguments("--use-distributed-optimizer", "--tensor-model-parallel-size", "2",
                          *(["--sequence-parallel"] if sequence_parallel else []))
    totals = {name: [BatchTotals.of([one], model.vision) for one in batch] for name, batch in batches.items()}
    num_tokens, num_patches = (max(getattr(one, name) for batch in totals.values() for one in batch)
                               for name in ("num_tokens", "num_patches"))
    calibration = measure(device, args, model, [1, 2], num_tokens, num_patches, num_rounds)
    found: dict[str, dict[str, float]] = {}
    for name, batch in totals.items():
        seconds = {
            encoder: Predictor(Run(args, replace(model, **fields), DataConfig("hf", ("data.json",)), 2),
                               calibration).predict(Workload(((counts_of(batch),),))).seconds
            for encoder, fields in ENCODERS.items()}
        found[name] = {encoder: seconds[CUT] / seconds[encoder] for encoder in (WHOLE, TOGETHER)}
    return found


def strategies(device: Device, rounds: int, num_microbatches: int, is_quick: bool) -> dict[str, Any] | None:
    """For each of ``STRATEGIES``, the time of a step and its ratio to that of ``no_shard``.

    Only the first rank returns a result.
    """
    torch.set_num_threads(1)
    model = trained_model(is_quick)
    tensors = random_tensors(model, device.torch_device, torch.float32)
    batch = batch_of(model, 0, 2, num_microbatches)
    seconds = {name: list[float]() for name in STRATEGIES}
    firsts: list[tuple[float, float]] = []
    for _ in range(rounds):
        for name, flags in STRATEGIES.items():
            ours = Ours(model, device, "fp32", tensors, flags=flags)
            times, first = times_of(ours, batch, 1 if is_quick else NUM_STEPS)
            seconds[name] += times
            firsts.append(first)
            ours.close()
    check_same(firsts)
    if dist.get_rank():
        return None
    return {
        "microbatches": num_microbatches,
        "seconds": {name: statistics.median(times) for name, times in seconds.items()},
        "ratio": {name: median_ratio(times, seconds["no_shard"]) for name, times in seconds.items()
                  if name != "no_shard"},
    }
