"""One training step on one device: is it transformers' step, and how fast is it.

    python -m benchmarks.device_step parity [--device cuda]
    python -m benchmarks.device_step speed --size 3b --tokens 8192 [--device cuda] [--freeze vision projector]

``parity`` trains two small random models on a mixed batch, in fp32 and bf16, against transformers in fp32 on the CPU
with the same weights (rounded to bf16 beforehand, so that only the arithmetic differs); beside our bf16 errors stand
those of transformers' own bf16.  ``speed`` times whole steps (schedule, gradient clipping, Adam) of the real sizes with
random weights on packed samples of 689 tokens, 315 of them visual, and the same through transformers, each in a process
of its own.  Both print JSON; the exit status is 1 when a tolerance is missed.
"""

import argparse
import dataclasses
import importlib.metadata
import json
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

NUM_WARMUP, NUM_TIMED = 3, 7
SAMPLE = (((1, 30, 42),), 372)
"""A picture of 420 x 588 pixels (1260 patches, 315 visual tokens with two marks) and its text."""
SAMPLE_TOKENS = 315 + 2 + 372

LOSS, NORM, GRADIENT = "loss_error", "grad_norm_error", "gradient_error"
TOLERANCES = {
    # Relative; gradients by the norm of each tensor.  Measured on the CPU (loss, norm, worst gradient): fp32 0, 2e-8,
    # 1.7e-6; bf16 1.0e-4, 3.6e-4, 2.3e-2, where transformers' own bf16 has 1.8e-4, 7.4e-4, 2.6e-2.
    "fp32": {LOSS: 1e-5, NORM: 1e-4, GRADIENT: 1e-4},
    "bf16": {LOSS: 2e-3, NORM: 1e-2, GRADIENT: 5e-2},
}
BF16_MARGIN = 2.0
"""Where transformers' own bf16 misses a gradient by more, ours may miss it by this many times as much."""
SPEED_TOLERANCES = {"fp32": {LOSS: 1e-4, NORM: 1e-3}, "bf16": {LOSS: 1e-2, NORM: 5e-2}}


def parity_models() -> dict[str, "ModelConfig"]:  # noqa: F821
    """Two small models; between them the head dimensions of all published sizes (ViT 80, LLM 128), and 64."""
    from benchmarks.one_device import model_config

    tiny = model_config("tiny")

    def model(vision_head: int, language_head: int, groups: int, tied: bool) -> "ModelConfig":  # noqa: F821
        vision_hidden, language_hidden = 2 * vision_head, 4 * language_head
        vision = dataclasses.replace(
            tiny.vision, num_layers=4, pipeline_num_layers=((4,),), fullatt_block_indexes=(1, 3), num_attention_heads=2,
            hidden_size=vision_hidden, ffn_hidden_size=232,
        )  # fmt: skip
        section = language_head // 8
        language = dataclasses.replace(
            tiny.language, hidden_size=language_hidden, num_attention_heads=4, num_query_groups=groups,
            kv_channels=language_head, mrope_section=(section, section, 2 * section),
            untie_embeddings_and_output_weights=not tied,
        )  # fmt: skip
        projector = dataclasses.replace(
            tiny.projector, input_size=vision_hidden, ffn_hidden_size=4 * vision_hidden, hidden_size=language_hidden
        )
        return dataclasses.replace(tiny, vision=vision, projector=projector, language=language)

    return {"heads 80 and 128": model(80, 128, 2, tied=False), "heads 64, tied": model(64, 64, 1, tied=True)}


def parity(device: "Device", precisions: list[str]) -> tuple[dict, bool]:  # noqa: F821
    """Errors of every model and precision, and whether all are within their tolerances."""
    import torch

    from benchmarks.one_device import Ours, Peer, random_microbatch, random_tensors

    cases, passed = {}, True
    for name, model in parity_models().items():
        tensors = random_tensors(model, torch.device("cpu"), torch.float32)
        batch = [
            random_microbatch(model, [((), 40), (((1, 16, 24),), 61)], seed=1),
            random_microbatch(model, [((), 33), ((), 90)], seed=2),
            random_microbatch(model, [(((1, 20, 12), (1, 4, 6)), 50), (((1, 8, 8),), 21), ((), 17)], seed=3),
        ]
        num_targets = sum(m.num_target_tokens for m in batch)

        def theirs(place, precision, model=model, tensors=tensors, batch=batch, num_targets=num_targets):
            peer = Peer(model, place, precision, tensors)
            loss = float(peer.pass_over(peer.batches(batch), num_targets))
            return loss, fused(model, peer.gradients())

        expected = theirs(torch.device("cpu"), "fp32")
        for precision in precisions:
            ours = Ours(model, device, precision, tensors)
            found = errors((ours.pass_over(batch), ours.gradients()), expected)
            ours.close()
            own = errors(theirs(device.torch_device, precision), expected)
            limits = TOLERANCES[precision]
            worse = {
                tensor: error
                for tensor, error in found["gradients"].items()
                if error > max(limits[GRADIENT], BF16_MARGIN * own["gradients"][tensor] * (precision != "fp32"))
            }
            good = not worse and all(found[key] <= limits[key] for key in (LOSS, NORM))
            passed &= good
            cases[f"{name}, {precision}"] = {
                "passed": good, "ours": summary(found), "transformers": summary(own), "tolerances": limits,
                "gradients over tolerance": worse,
            }  # fmt: skip
    return {"device": device.name, "versions": versions(), "cases": cases}, passed


def fused(model: "ModelConfig", gradients: dict) -> dict:  # noqa: F821
    """Gradients of Hugging Face tensors under our names."""
    from mm.weights.table import fuse, model_weights

    return {w.name: fuse(w, [gradients[name] for name in w.hf_names]) for w in model_weights(model)}


def errors(ours: tuple[float, dict], expected: tuple[float, dict]) -> dict:
    """Relative errors of loss, of the norm of all gradients, and of each gradient by its norm."""
    import torch

    def norm(gradients: dict) -> float:
        return float(torch.stack([g.double().norm() for g in gradients.values()]).norm())

    assert ours[1].keys() == expected[1].keys(), sorted(ours[1].keys() ^ expected[1].keys())
    return {
        LOSS: abs(ours[0] - expected[0]) / expected[0],
        NORM: abs(norm(ours[1]) - norm(expected[1])) / norm(expected[1]),
        "gradients": {
            name: float((ours[1][name].reshape(want.shape) - want).norm() / want.norm())
            for name, want in expected[1].items()
        },
    }


def summary(found: dict) -> dict:
    worst = max(found["gradients"], key=found["gradients"].get)
    return {
        LOSS: found[LOSS], NORM: found[NORM], "gradient_error_median": statistics.median(found["gradients"].values()),
        "gradient_error_max": found["gradients"][worst], "gradient_worst": worst,
    }  # fmt: skip


def time_side(flags: argparse.Namespace, device: "Device") -> dict:  # noqa: F821
    """Build one side, warm up, and time its steps."""
    from benchmarks.one_device import Ours, Peer, model_config, peer_attention, random_microbatch, random_tensors
    from mm.batch import BatchTotals
    from mm.device.device import peak_flops
    from mm.model.flops import training_flops
    from mm.parallel.megatron import DTYPES

    model = model_config(flags.size, flags.freeze, flags.recompute)
    precision = flags.precision or ("fp32" if device.kind == "cpu" else "bf16")
    num_samples = max(1, round(flags.tokens / SAMPLE_TOKENS))
    batch = [random_microbatch(model, [SAMPLE] * num_samples, seed) for seed in range(flags.num_microbatches)]
    totals = BatchTotals.of(batch, model.vision)
    tensors = random_tensors(model, device.torch_device, DTYPES[precision])
    if flags.side == "ours":
        side, attention = Ours(model, device, precision, tensors), device.kernels.attention.__name__
        arguments = (batch,)
    else:
        attention = flags.peer_attention or peer_attention()
        side = Peer(model, device.torch_device, precision, tensors, attention, flags.recompute)
        arguments = (side.batches(batch), totals.num_target_tokens)
    del tensors
    reset_peak_memory(device)
    results, seconds = [], []
    for _ in range(flags.warmup + flags.steps):
        device.synchronize()
        start = time.perf_counter()
        results.append(side.step(*arguments))
        device.synchronize()
        seconds.append(time.perf_counter() - start)
    timed = seconds[flags.warmup :]
    median = statistics.median(timed)
    rate, peak = training_flops(model, totals) / median, peak_flops(device.name)
    return {
        "attention": attention,
        "precision": precision,
        "first_loss": results[0][0],
        "first_grad_norm": results[0][1],
        "last_loss": results[-1][0],
        "tokens_per_second": totals.num_tokens / median,
        "step_seconds": {"median": median, "min": min(timed), "max": max(timed)},
        "warmup_seconds": seconds[: flags.warmup],
        "max_memory_gib": device.max_memory_bytes() / 2**30,
        "model_flops_per_second": rate,
        "mfu": rate / peak if peak else None,
        "tokens": totals.num_tokens,
        "target_tokens": totals.num_target_tokens,
        "patches": totals.num_patches,
        "device": device.name,
    }


def reset_peak_memory(device: "Device") -> None:  # noqa: F821
    """So that the peak reported is that of the steps (on the CPU it is the process's)."""
    import torch

    if device.kind != "cpu":
        getattr(torch, device.kind).reset_peak_memory_stats()


def speed(flags: argparse.Namespace, own_arguments: list[str]) -> tuple[dict, bool]:
    """Both sides, one after the other; a side that ends in an error is reported as such and has no ratio."""
    sides = ["ours"] if flags.no_peer else ["ours", "transformers"]
    found = {}
    with tempfile.TemporaryDirectory() as directory:
        for side in sides:
            output = Path(directory) / f"{side}.json"
            command = [sys.executable, "-m", "benchmarks.device_step", *own_arguments, "--side", side]
            done = subprocess.run([*command, "--output", str(output)], capture_output=True, text=True, check=False)
            if done.returncode:
                sys.stderr.write(done.stderr)
                lines = [line for line in done.stderr.splitlines() if "Error" in line]
                found[side] = {"error": lines[-1] if lines else f"status {done.returncode}"}
            else:
                found[side] = json.loads(output.read_text())
    result = {
        "size": flags.size, "frozen": flags.freeze, "recompute": flags.recompute,
        "num_microbatches": flags.num_microbatches, "versions": versions(), **found,
    }  # fmt: skip
    passed = all("error" not in side for side in found.values())
    if passed and not flags.no_peer:
        ours, theirs, limits = found["ours"], found["transformers"], SPEED_TOLERANCES[found["ours"]["precision"]]
        result["our_speed_over_transformers"] = ours["tokens_per_second"] / theirs["tokens_per_second"]
        result[LOSS] = abs(ours["first_loss"] - theirs["first_loss"]) / theirs["first_loss"]
        result[NORM] = abs(ours["first_grad_norm"] - theirs["first_grad_norm"]) / theirs["first_grad_norm"]
        passed = all(result[key] <= limit for key, limit in limits.items())
    return result, passed


def leave_process_group() -> None:
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


def versions() -> dict[str, str]:
    names = ("torch", "megatron-core", "transformers", "torch_npu", "flash_attn")
    found = {"python": platform.python_version()}
    for name in names:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue  # the last two are optional
    return found


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("mode", choices=("parity", "speed"))
    parser.add_argument("--device", default="auto", choices=("auto", "npu", "cuda", "cpu"))
    parser.add_argument("--output", type=Path, help="JSON file to write beside standard output")
    parser.add_argument("--precision", choices=("fp32", "bf16"), help="default: parity both; speed bf16, on a CPU fp32")
    parser.add_argument("--size", default="3b", choices=("tiny", "3b", "7b", "32b", "72b"))
    parser.add_argument("--tokens", type=int, default=8192, help="tokens of a microbatch, rounded to whole samples")
    parser.add_argument("--num-microbatches", type=int, default=1)
    parser.add_argument("--freeze", nargs="*", default=[], choices=("vision", "projector", "language"))
    parser.add_argument("--recompute", action="store_true", help="keep only layer inputs, on both sides")
    parser.add_argument("--peer-attention", choices=("sdpa", "flash_attention_2"))
    parser.add_argument("--no-peer", action="store_true")
    parser.add_argument("--warmup", type=int, default=NUM_WARMUP)
    parser.add_argument("--steps", type=int, default=NUM_TIMED)
    parser.add_argument("--side", choices=("ours", "transformers"), help="internal: time this side in this process")
    return parser.parse_args(argv)


def main(argv: list[str]) -> int:
    from mm.device.device import Device

    flags = parse(argv)
    if flags.mode == "speed" and flags.side is None:
        result, passed = speed(flags, argv)
    else:
        device = Device.pick(flags.device)
        precisions = [flags.precision] if flags.precision else ["fp32", "bf16"]
        result, passed = parity(device, precisions) if flags.mode == "parity" else (time_side(flags, device), True)
        leave_process_group()
    text = json.dumps(result, indent=2)
    print(text, flush=True)
    if flags.output:
        flags.output.write_text(text + "\n")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
