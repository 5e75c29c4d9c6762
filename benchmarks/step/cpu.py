"""Training steps on the CPU: ours in a pipeline of one or two processes, transformers' in one.

Started by ``python -m benchmarks.step cpu``; import it after ``Device.pick``.  Both sides train the same weights on the
same microbatches in turn; loss and gradient norm of the first step are compared before anything is timed.
"""

import itertools
import os
import statistics
import time
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.measure import median_ratio
from benchmarks.sides import Ours, Peer, model_config, random_tensors, resized
from mm.batch import BatchTotals, Microbatch
from mm.config.model import ModelConfig
from mm.data.sampler.cost import in_pipeline_order
from mm.device.device import Device
from tests.microbatches import random_microbatch
from tests.workload import Sample

NUM_WARMUP, NUM_QUICK_WARMUP = 3, 1
NUM_TEXT_TOKENS = 150
"""Number of text tokens in a sample: a question, an answer of a few sentences, and the template around them."""
NUM_LAYERS, NUM_QUICK_LAYERS = 8, 2
"""Layers of each tower.  With two stages, the ViT is on the first and the LLM on the second."""


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


def batch_of(model: ModelConfig, step: int, num_samples: int, num_microbatches: int) -> list[Microbatch]:
    """Samples with a picture of 384 patches, alternately upright and wide; every fourth sample has none."""
    picture = itertools.cycle([((1, 24, 16),), ((1, 16, 24),), ((1, 24, 16),), ()])
    samples: list[Sample] = [(next(picture), NUM_TEXT_TOKENS) for _ in range(num_samples * num_microbatches)]
    batch = [random_microbatch(model, samples[first : first + num_samples], seed=1000 * step + first)
             for first in range(0, len(samples), num_samples)]  # fmt: skip
    return list(in_pipeline_order(model, batch))


def measure(
    device: Device, rounds: int, num_samples: int, num_microbatches: int, is_quick: bool
) -> dict[str, Any] | None:
    """Time both sides in turn on this rank; the result is returned on the first rank only."""
    num_stages = int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    model = model_of(num_stages, is_quick)
    tensors = random_tensors(model, device.torch_device, torch.float32)
    ours = Ours(model, device, "fp32", tensors)
    peer = Peer(model, device.torch_device, "fp32", tensors) if dist.get_rank() == 0 else None
    times: list[dict[str, float]] = []
    num_warmup = NUM_QUICK_WARMUP if is_quick else NUM_WARMUP
    for number in range(num_warmup + rounds):
        batch = batch_of(model, number, num_samples, num_microbatches)
        totals = BatchTotals.of(batch, model.vision)
        dist.barrier()
        start = time.perf_counter()
        loss, norm = ours.step(batch)
        our_seconds = time.perf_counter() - start
        dist.barrier()
        if peer is not None:
            batches = peer.batches(batch)
            torch.set_num_threads(num_stages)
            start = time.perf_counter()
            peer_loss, peer_norm = peer.step(batches, totals.num_target_tokens)
            peer_seconds = time.perf_counter() - start
            torch.set_num_threads(1)
            agree = abs(loss - peer_loss) < 1e-5 * peer_loss and abs(norm - peer_norm) < 1e-4 * peer_norm
            assert number or agree, f"not the same model: loss {loss} {peer_loss}, gradient norm {norm} {peer_norm}"
            if number >= num_warmup:
                times.append({"ours": our_seconds, "theirs": peer_seconds, "tokens": totals.num_tokens,
                              "patches": totals.num_patches})  # fmt: skip
        dist.barrier()
    ours.close()
    if peer is None:
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
