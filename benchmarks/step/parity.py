"""Compares a step on this device with transformers' step, for ``python -m benchmarks.step parity``.

Two small random models on a mixed batch, in fp32 and bf16, against transformers in fp32 on the CPU with the same
weights (rounded to bf16 beforehand, so that only the arithmetic differs).  Import it after ``Device.pick``.
"""

import statistics

import torch

from benchmarks.measure import model_config, versions
from benchmarks.records import LOSS, NORM
from benchmarks.sides import Ours, Peer, random_tensors, resized
from mm.config.model import ModelConfig
from mm.device.device import Device
from mm.weights.fuse import fuse
from mm.weights.table import model_weights
from tests.microbatches import random_microbatch

GRADIENT = "gradient_error"
TOLERANCES = {
    # Relative; gradients by the norm of each tensor.  Measured on the CPU (loss, norm, worst gradient): fp32 0, 2e-8,
    # 1.7e-6; bf16 1.0e-4, 3.6e-4, 2.3e-2, where transformers' own bf16 has 1.8e-4, 7.4e-4, 2.6e-2.
    "fp32": {LOSS: 1e-5, NORM: 1e-4, GRADIENT: 1e-4},
    "bf16": {LOSS: 2e-3, NORM: 1e-2, GRADIENT: 5e-2},
}
BF16_MARGIN = 2.0
"""In bf16, a gradient may instead have up to this many times the error of transformers' own bf16 gradient."""


def parity_models() -> dict[str, ModelConfig]:
    """Two small models that cover the head dimensions of all published sizes (ViT 80, LLM 128), and 64."""
    tiny = model_config("tiny")

    def model(head_dims: tuple[int, int], groups: int, tied: bool) -> ModelConfig:
        vision_dim, language_dim = head_dims
        section = language_dim // 8
        vision = {"num_layers": 4, "pipeline_num_layers": ((4,),), "fullatt_block_indexes": (1, 3),
                  "num_attention_heads": 2, "hidden_size": 2 * vision_dim, "ffn_hidden_size": 232}  # fmt: skip
        language = {"hidden_size": 4 * language_dim, "num_attention_heads": 4, "num_query_groups": groups,
                    "kv_channels": language_dim, "mrope_section": (section, section, 2 * section),
                    "untie_embeddings_and_output_weights": not tied}  # fmt: skip
        return resized(tiny, vision, language)

    return {"heads 80 and 128": model((80, 128), 2, tied=False), "heads 64, tied": model((64, 64), 1, tied=True)}


def errors_of(device: Device, precisions: list[str]) -> tuple[dict, bool]:
    """Errors of every model and precision, and whether all are within their tolerances."""
    cases, passed = {}, True
    for name, model in parity_models().items():
        tensors = random_tensors(model, torch.device("cpu"), torch.float32)
        batch = [
            random_microbatch(model, [((), 40), (((1, 16, 24),), 61)], seed=1),
            random_microbatch(model, [((), 33), ((), 90)], seed=2),
            random_microbatch(model, [(((1, 20, 12), (1, 4, 6)), 50), (((1, 8, 8),), 21), ((), 17)], seed=3),
        ]
        num_targets = sum(m.num_target_tokens for m in batch)

        def of_peer(place, precision, model=model, tensors=tensors, batch=batch, num_targets=num_targets):
            peer = Peer(model, place, precision, tensors)
            loss = float(peer.pass_over(peer.batches(batch), num_targets))
            return loss, fused(model, peer.gradients())

        expected = of_peer(torch.device("cpu"), "fp32")
        for precision in precisions:
            ours = Ours(model, device, precision, tensors)
            found = errors((ours.pass_over(batch), ours.gradients()), expected)
            ours.close()
            own = errors(of_peer(device.torch_device, precision), expected)
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


def fused(model: ModelConfig, gradients: dict) -> dict:
    """Gradients of Hugging Face tensors, fused into our weights and under their names."""
    return {w.name: fuse(w, [gradients[name] for name in w.hf_names]) for w in model_weights(model)}


def errors(ours: tuple[float, dict], expected: tuple[float, dict]) -> dict:
    """Relative errors of loss, of the norm of all gradients, and of each gradient by its norm."""
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
