"""Training steps per second on the CPU: this trainer and a plain transformers loop, in turn, in one run.

    python -m benchmarks.cpu_step [--rounds 9] [--micro-batch-size 1] [--num-microbatches 8] [--output FILE.json]

Two parts: one process with one thread for each side (TP1 PP1); then our two-stage pipeline on two processes with one
thread each, against transformers in one process with two threads.  The peer is tuned: fp32, fused AdamW, SDPA, and
transformers' own linear patch embedding instead of its 3-D convolution.  Both sides train the same weights on the
same microbatches; loss and gradient norm are compared before anything is timed.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
from PIL import Image

from benchmarks.ranks import run_ranks

NUM_SAMPLES = 64
NUM_WARMUP = 3
LR = 1e-4
SIZES = {
    "vision_layers": 8,
    "vision_hidden_size": 320,
    "vision_heads": 4,
    "vision_ffn_size": 856,
    "window_size": 112,
    "full_attention_layers": (3, 7),
    "language_layers": 8,
    "language_hidden_size": 512,
    "language_heads": 4,
    "language_key_value_heads": 2,
    "language_ffn_size": 1408,
    "mrope_section": (16, 24, 24),
    "num_merges": 60,
    "vocab_size": 1024,
    "initializer_range": 0.03,
}
QUICK_SIZES = SIZES | {
    "vision_hidden_size": 64,
    "vision_ffn_size": 128,
    "language_hidden_size": 128,
    "language_ffn_size": 256,
    "mrope_section": (4, 6, 6),
}
"""As many layers and far fewer numbers: to see that everything runs, not to measure."""


def write_inputs(directory: Path, num_stages: int, model_sizes: dict) -> None:
    """A checkpoint, a data set of one-image and text-only samples, and the two JSON files."""
    from demo.tiny_checkpoint import Sizes, build

    records, sizes = _write_samples(directory), Sizes(**model_sizes)
    texts = [message["content"] for record in records for message in record["messages"]]
    if not (directory / "hf").exists():
        build(directory / "hf", texts, seed=0, sizes=sizes)
    examples = Path(__file__).parents[1] / "examples" / "qwen2.5vl"
    model = json.loads((examples / "model_tiny.json").read_text())
    vision_layout, language_layout = {1: ([8], [8]), 2: ([8, 0], [0, 8])}[num_stages]
    model["image_encoder"]["vision_encoder"] |= {
        "num_layers": sizes.vision_layers,
        "pipeline_num_layers": vision_layout,
        "hidden_size": sizes.vision_hidden_size,
        "ffn_hidden_size": sizes.vision_ffn_size,
        "num_attention_heads": sizes.vision_heads,
        "window_attn_size": sizes.window_size,
        "fullatt_block_indexes": list(sizes.full_attention_layers),
        "freeze": False,
    }
    model["image_encoder"]["vision_projector"] |= {
        "input_size": sizes.vision_hidden_size,
        "ffn_hidden_size": 4 * sizes.vision_hidden_size,
        "hidden_size": sizes.language_hidden_size,
    }
    model["text_decoder"] |= {
        "num_layers": sizes.language_layers,
        "pipeline_num_layers": language_layout,
        "hidden_size": sizes.language_hidden_size,
        "ffn_hidden_size": sizes.language_ffn_size,
        "num_attention_heads": sizes.language_heads,
        "num_query_groups": sizes.language_key_value_heads,
        "mrope_section": list(sizes.mrope_section),
        "vocab_size": sizes.vocab_size,
        "max_position_embeddings": sizes.max_position_embeddings,
    }
    model |= {
        "img_context_token_id": sizes.token_id("<|image_pad|>"),
        "video_token_id": sizes.token_id("<|video_pad|>"),
        "vision_start_token_id": sizes.token_id("<|vision_start|>"),
    }
    data = json.loads((examples / "data_tiny.json").read_text())
    data["dataset_param"]["preprocess_parameters"]["model_name_or_path"] = str(directory / "hf")
    data["dataset_param"]["basic_parameters"] |= {
        "dataset": str(directory / "data.json"),
        "dataset_dir": str(directory),
        "packing": False,
    }
    data["dataloader_param"]["sampler_type"] = "BaseRandomBatchSampler"
    (directory / f"model_{num_stages}.json").write_text(json.dumps(model))
    (directory / "data_config.json").write_text(json.dumps(data))


def _write_samples(directory: Path) -> list[dict]:
    """Pictures of 384 patches and short texts; every fourth sample has no picture."""
    rng = np.random.default_rng(0)
    words = ["window", "figure", "table", "street", "letter", "number", "colour", "shape", "left", "right"]
    records = []
    for index in range(NUM_SAMPLES):
        height, width = (224, 336) if index % 2 else (336, 224)
        pixels = rng.integers(0, 256, (height // 14, width // 14, 3), dtype=np.uint8)
        Image.fromarray(pixels).resize((width, height)).save(directory / f"{index}.png")
        has_image = index % 4 != 3
        question, answer = " ".join(rng.choice(words, 12)), " ".join(rng.choice(words, 24))
        records.append({
            "messages": [
                {"role": "user", "content": ("<image>" if has_image else "") + question},
                {"role": "assistant", "content": answer},
            ],
            "images": [f"{index}.png"] if has_image else [],
        })  # fmt: skip
    (directory / "data.json").write_text(json.dumps(records))
    return records


class Peer:
    """A plain training loop on transformers' model."""

    def __init__(self, directory: Path, lr: float) -> None:
        import torch
        from safetensors import safe_open
        from transformers import Qwen2_5_VLForConditionalGeneration

        self.model = Qwen2_5_VLForConditionalGeneration.from_pretrained(
            directory, dtype=torch.float32, attn_implementation="sdpa", fusion_config={"patch_embeddings": True}
        )
        # transformers 5.23 builds the linear patch embedding but leaves its weight random: it does not rename the key
        name = "visual.patch_embed.proj.weight"
        with safe_open(directory / "model.safetensors", "pt") as file, torch.no_grad():
            self.model.model.visual.patch_embed.linear_proj.weight.copy_(file.get_tensor(name).flatten(1))
        decayed = [p for p in self.model.parameters() if p.dim() > 1]
        plain = [p for p in self.model.parameters() if p.dim() == 1]
        self.optimizer = torch.optim.AdamW(
            [{"params": decayed, "weight_decay": 0.01}, {"params": plain, "weight_decay": 0.0}], lr=lr, fused=True
        )

    def step(self, batches: list[dict], num_target_tokens: int) -> tuple[float, float]:
        """One optimizer step; returns loss and gradient norm."""
        import torch

        self.optimizer.zero_grad()
        total = 0.0
        for batch in batches:
            loss = self.model(**batch, num_items_in_batch=num_target_tokens).loss
            loss.backward()
            total += float(loss.detach())
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0, foreach=True)
        self.optimizer.step()
        return total, float(norm)


def peer_batches(microbatches: tuple, image_token_id: int) -> list[dict]:
    """Our packed microbatches as transformers takes them: one row a sample, padded on the right to the longest."""
    import torch

    from mm.batch import normalised

    batches = []
    for microbatch in microbatches:
        ids = microbatch.token_ids.split(microbatch.segment_lengths)
        labels = microbatch.labels.split(microbatch.segment_lengths)
        rows, longest = len(ids), max(microbatch.segment_lengths)
        batch = {
            "input_ids": torch.zeros(rows, longest, dtype=torch.int64),
            "attention_mask": torch.zeros(rows, longest, dtype=torch.int64),
            "labels": torch.full((rows, longest), -100),
        }
        for row, (tokens, targets) in enumerate(zip(ids, labels, strict=True)):
            batch["input_ids"][row, : len(tokens)] = tokens
            batch["attention_mask"][row, : len(tokens)] = 1
            batch["labels"][row, 1 : len(tokens)] = targets[:-1]  # transformers shifts labels itself
        batch["mm_token_type_ids"] = (batch["input_ids"] == image_token_id).int()
        if microbatch.image_grids:
            batch["pixel_values"] = normalised(microbatch.pixel_values, microbatch.normalisations[0].constants())
            batch["image_grid_thw"] = torch.tensor(microbatch.image_grids)
        batches.append(batch)
    return batches


def measure(
    directory: Path, num_stages: int, rounds: int, micro_batch_size: int, num_microbatches: int
) -> dict | None:
    """Time both sides in turn on this rank; the result is returned on the first rank only."""
    from mm.device.device import Device

    device = Device.pick("cpu")
    import torch

    from mm.config.run import load_run
    from mm.parallel import mesh as parallel
    from mm.parallel.meeting import Meeting
    from mm.parallel.watchdog import Watchdog
    from mm.training.run import Trainer

    run = load_run([
        "--mm-model", str(directory / f"model_{num_stages}.json"), "--mm-data", str(directory / "data_config.json"),
        "--load", str(directory / "hf"), "--micro-batch-size", str(micro_batch_size),
        "--global-batch-size", str(micro_batch_size * num_microbatches), "--seq-length", "1024",
        "--train-iters", str(rounds + NUM_WARMUP), "--lr", str(LR), "--lr-decay-style", "constant",
        "--weight-decay", "0.01", "--clip-grad", "1.0", "--num-workers", "0", "--log-interval", "1000", "--seed", "1",
        "--log-dir", str(directory / f"logs_{num_stages}"),
    ])  # fmt: skip
    torch.set_num_threads(1)
    mesh = parallel.start(device, run.model, run.tp_size)
    is_first = mesh.rank == 0
    with Watchdog(Meeting.of_launcher(10), step_seconds=0) as watchdog:
        watchdog.place(mesh)
        trainer = Trainer(run, device, mesh, watchdog)
        times = _alternate(trainer, Peer(directory / "hf", LR) if is_first else None, rounds, num_stages)
        trainer.close()
    if not is_first:
        return None
    ratios = [row["theirs"] / row["ours"] for row in times]
    return {
        "processes": num_stages,
        "micro_batch_size": micro_batch_size,
        "num_microbatches": num_microbatches,
        "our_tokens_per_second": statistics.median(row["tokens"] / row["ours"] for row in times),
        "peer_tokens_per_second": statistics.median(row["tokens"] / row["theirs"] for row in times),
        "our_speed_over_peer": statistics.median(ratios),
        "ratio_min": min(ratios),
        "ratio_max": max(ratios),
        "tokens_per_step": statistics.mean(row["tokens"] for row in times),
        "patches_per_step": statistics.mean(row["patches"] for row in times),
        "rounds": len(ratios),
    }


def _alternate(trainer: "Trainer", peer: Peer | None, rounds: int, num_stages: int) -> list[dict]:  # noqa: F821
    """One step of ours, one of the peer on the first rank, and so on; seconds of each round after the warm-up."""
    import torch
    import torch.distributed as dist

    from mm.training.step import step

    times = []
    for number, plan in enumerate(trainer.feed(rounds + NUM_WARMUP).plans):
        dist.barrier()
        start = time.perf_counter()
        result = step(trainer.parts, plan, LR)
        ours = time.perf_counter() - start
        dist.barrier()
        if peer is not None:
            batches = peer_batches(plan.microbatches, trainer.run.model.image_token_id)
            torch.set_num_threads(num_stages)
            start = time.perf_counter()
            peer_loss, peer_norm = peer.step(batches, plan.totals.num_target_tokens)
            theirs = time.perf_counter() - start
            torch.set_num_threads(1)
            loss, norm = result.loss, result.grad_norm
            agree = abs(loss - peer_loss) < 1e-5 * peer_loss and abs(norm - peer_norm) < 1e-4 * peer_norm
            assert number or agree, f"not the same model: loss {loss} {peer_loss}, gradient norm {norm} {peer_norm}"
            if number >= NUM_WARMUP:
                totals = plan.totals
                times.append({"ours": ours, "theirs": theirs, "tokens": totals.num_tokens,
                              "patches": totals.num_patches})  # fmt: skip
        dist.barrier()
    return times


def launch(num_stages: int, directory: Path, flags: argparse.Namespace) -> dict:
    """Run ``measure`` on ``num_stages`` processes and return its result."""
    result = directory / f"result_{num_stages}.json"
    run_ranks(num_stages, "benchmarks.cpu_step", [
        "--worker", str(directory), "--output", str(result), "--rounds", str(flags.rounds),
        "--micro-batch-size", str(flags.micro_batch_size), "--num-microbatches", str(flags.num_microbatches),
    ], num_threads=num_stages)  # fmt: skip
    return json.loads(result.read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--micro-batch-size", type=int, default=1)
    parser.add_argument("--num-microbatches", type=int, default=8, help="microbatches of one optimizer step")
    parser.add_argument("--quick", action="store_true", help="a far smaller model: shows that it runs, not how fast")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--worker", type=Path, help="internal: directory of the inputs")
    flags = parser.parse_args()
    if flags.worker:
        result = measure(
            flags.worker, int(os.environ["WORLD_SIZE"]), flags.rounds, flags.micro_batch_size, flags.num_microbatches
        )
        if result is not None:
            flags.output.write_text(json.dumps(result))
        return
    results = []
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        for num_stages in (1, 2):
            write_inputs(directory, num_stages, QUICK_SIZES if flags.quick else SIZES)
            results.append(launch(num_stages, directory, flags))
            print(json.dumps(results[-1], indent=2), flush=True)
    if flags.output:
        flags.output.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
