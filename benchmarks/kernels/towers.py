"""The whole ViT and the whole LLM, forward and backward, ours and transformers' in turn; see benchmarks.kernels.

The LLM's samples are text only; its times include the embedding, the head and the loss.  The host's clock measures the
work and a wait for the device, because both sides also take time on the host: transformers' ViT waits for the device in
the middle, and ours prepares its lengths.
"""

import dataclasses
import time
from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.kernels.bench import Bench, relative_difference
from benchmarks.measure import Timing
from benchmarks.records import OURS, PEER
from benchmarks.sides import Ours, Peer, model_config, random_tensors
from mm.batch import BatchTotals, Microbatch
from mm.config.model import ModelConfig
from mm.device.device import Device
from mm.parallel.megatron import DTYPES
from tests.forward_flops import forward_flops
from tests.microbatches import random_microbatch
from tests.workload import num_tokens

NUM_WARMUP, NUM_TIMED = 3, 9
TINY_WARMUP, TINY_TIMED = 1, 2


def time_towers(bench: Bench) -> None:
    """Time one tower at a time, in a model that has one unused layer of the other."""
    precision = "fp32" if bench.device.platform.name == "cpu" else "bf16"
    whole = model_config(bench.size)
    samples = {"ViT": bench.sample, "LLM": ((), num_tokens(bench.sample))}
    for name, other in (("ViT", "language"), ("LLM", "vision")):
        model = _first_layer_only(whole, other)
        batch = [samples[name]] * bench.num_samples[-1]
        microbatch = random_microbatch(model, batch, seed=0)
        tensors = random_tensors(model, bench.device.torch_device, DTYPES[precision])
        ours = Ours(model, bench.device, precision, tensors)
        peer = Peer(model, bench.device.torch_device, precision, tensors)
        del tensors
        (microbatch,) = ours.batches([microbatch])
        works = _vision(ours, peer, microbatch) if name == "ViT" else _language(ours, peer, microbatch)
        forward = forward_flops(model, BatchTotals.of([microbatch], model.vision))
        flops, rows = (forward.vision + forward.projector, microbatch.num_patches) if name == "ViT" else (
            forward.language, microbatch.num_tokens)  # fmt: skip
        _alternate(bench, name, works, 3 * flops, rows)
        ours.close()
        del ours, peer, works


def _first_layer_only(model: ModelConfig, part: str) -> ModelConfig:
    """The model with only the first layer of the tower ``part``."""
    tower = dataclasses.replace(getattr(model, part), num_layers=1, pipeline_num_layers=((1,),))
    if part == "vision":
        tower = dataclasses.replace(tower, fullatt_block_indexes=(0,))
    return dataclasses.replace(model, **{part: tower})


Work = Callable[[], Tensor]
"""Runs a tower forward and backward, and returns its output."""


def _vision(ours: Ours, peer: Peer, microbatch: Microbatch) -> dict[str, Work]:
    """From pixels to visual tokens, including the projector, and back."""
    (stage,), (ddp,), visual = ours.setup.stage.chunks, ours.setup.models, peer.model.model.visual
    batch = peer.batches([microbatch])[0]

    def our_tower() -> Tensor:
        ddp.zero_grad_buffer()
        vision = stage.prepare(microbatch, None).vision
        assert vision is not None, "the samples have pictures"
        tokens = stage.image_encoder["projector"](stage.image_encoder["encoder"](vision.pixel_values, vision), vision)
        tokens.backward(torch.ones_like(tokens))
        return tokens

    def peer_tower() -> Tensor:
        peer.optimizer.zero_grad()
        tokens = visual(batch["pixel_values"].to(visual.dtype), batch["image_grid_thw"])
        tokens = tokens if isinstance(tokens, Tensor) else tokens.pooler_output
        tokens.backward(torch.ones_like(tokens))
        return tokens

    return {OURS: our_tower, PEER: peer_tower}


def _language(ours: Ours, peer: Peer, microbatch: Microbatch) -> dict[str, Work]:
    """From token ids to the loss and back."""
    batches = peer.batches([microbatch])
    return {
        OURS: lambda: torch.tensor(ours.pass_over([microbatch])),
        PEER: lambda: peer.pass_over(batches, microbatch.num_target_tokens),
    }


def _alternate(bench: Bench, tower: str, works: dict[str, Work], flops: float, rows: int) -> None:
    """Warm up and time both sides in turn, and record each."""
    warmup, timed = (TINY_WARMUP, TINY_TIMED) if bench.is_tiny else (NUM_WARMUP, NUM_TIMED)
    seconds: dict[str, list[float]] = {name: [] for name in works}
    results: dict[str, Tensor] = {}
    for number in range(warmup + timed):
        for name, work in works.items():
            result, taken = _timed(bench.device, work)
            if number >= warmup:
                seconds[name].append(1000 * taken)
            results.setdefault(name, result.detach().cpu())
    difference = relative_difference(results[OURS], results[PEER])
    for name, times in seconds.items():
        timing = Timing.of(times)
        bench.records.write("tower", tower=tower, name=name, rows=rows, difference=difference,
                            tflops=flops / timing.ms / 1e9, **dataclasses.asdict(timing))  # fmt: skip


def _timed(device: Device, work: Work) -> tuple[Tensor, float]:
    device.runtime.synchronize()
    start = time.perf_counter()
    result = work()
    device.runtime.synchronize()
    return result, time.perf_counter() - start
