"""All inputs of a run of the tiny model: a checkpoint, samples with pictures, JSON files and flags."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from demo.tiny_checkpoint import build
from tests.files import EXAMPLES, json_lines
from tests.launch import run_ranks

PLACEMENTS: dict[str, tuple[list, list]] = {  # layers of the ViT and of the LLM: one stage, two, two of two chunks
    "1": ([8], [4]),
    "2": ([5, 3], [0, 4]),
    "chunks": ([[5, 2], [1, 0]], [[0, 0], [1, 3]]),
}


def write_inputs(directory: Path) -> Path:
    """A checkpoint, ten samples (text-only, one and two pictures), ``data.json``, and a model JSON for each placement.

    Without packing, in the order of ``BaseRandomBatchSampler``.
    """
    rng = np.random.default_rng(0)
    records = []
    for index in range(10):
        images = []
        for number in range(index % 3):
            name = f"{index}_{number}.png"
            size = (56 + 28 * number, 84)
            Image.fromarray(rng.integers(0, 256, (*size, 3), dtype=np.uint8)).save(directory / name)
            images.append(name)
        question = "<image>" * len(images) + f"How many pictures are in sample number {index}?"
        records.append({
            "messages": [
                {"role": "user", "content": question},
                {"role": "assistant", "content": f"There are {len(images)} pictures in it."},
            ],
            "images": images,
        })  # fmt: skip
    (directory / "samples.json").write_text(json.dumps(records))
    build(directory / "hf", [json.dumps(record) for record in records], seed=0)
    write_data(directory, directory / "samples.json", packing=False)
    data = json.loads((directory / "data.json").read_text())
    data["dataloader_param"]["sampler_type"] = "BaseRandomBatchSampler"
    (directory / "data.json").write_text(json.dumps(data))
    for name in PLACEMENTS:
        write_model(directory, name)
    return directory


def write_data(directory: Path, dataset: Path, preprocess: dict[str, Any] | None = None, **basic: Any) -> None:
    """Write ``data.json``: the tiny example's, with this file of samples and the tokenizer of ``directory / "hf"``.

    ``preprocess`` and ``basic`` override settings of these two sections.
    """
    data = json.loads((EXAMPLES / "data_tiny.json").read_text())
    del data["dataset_param"]["basic_parameters"]["truncation"]  # which confirms the default for packs
    data["dataset_param"]["preprocess_parameters"] |= {
        "model_name_or_path": str(directory / "hf"), **(preprocess or {}),
    }  # fmt: skip
    data["dataset_param"]["basic_parameters"] |= {
        "dataset": str(dataset), "dataset_dir": str(dataset.parent), **basic,
    }  # fmt: skip
    (directory / "data.json").write_text(json.dumps(data))


def write_model(directory: Path, placement: str) -> None:
    """Write the tiny model's JSON in one of ``PLACEMENTS``."""
    model = json.loads((EXAMPLES / "model_tiny.json").read_text())
    vision, language = PLACEMENTS[placement]
    model["image_encoder"]["vision_encoder"]["pipeline_num_layers"] = vision
    model["text_decoder"]["pipeline_num_layers"] = language
    (directory / f"model_{placement}.json").write_text(json.dumps(model))


def flags_of(inputs: Path, name: str, num_stages: int, *flags: str) -> list[str]:
    """Flags for six steps of mm.train; logs and checkpoints go to ``inputs / name``."""
    return [
        "--device", "cpu", "--mm-model", str(inputs / f"model_{num_stages}.json"),
        "--mm-data", str(inputs / "data.json"), "--micro-batch-size", "2", "--global-batch-size", "4",
        "--seq-length", "512", "--train-iters", "6", "--lr", "1e-3", "--lr-decay-style", "cosine",
        "--lr-warmup-fraction", "0.2", "--seed", "3", "--log-interval", "1", "--log-tps",
        "--save", str(inputs / name / "save"), "--log-dir", str(inputs / name / "logs"), *flags,
    ]  # fmt: skip


def short_flags(inputs: Path, name: str, model: str, data: str, num_steps: int, *flags: str) -> list[str]:
    """Flags for a few steps of mm.train from the checkpoint and these JSON files; logs go to ``inputs / name``.

    ``flags`` must have the learning rate and the global batch, and may override the others.
    """
    return [
        "--device", "cpu", "--mm-model", str(inputs / f"{model}.json"), "--mm-data", str(inputs / f"{data}.json"),
        "--load", str(inputs / "hf"), "--micro-batch-size", "1", "--seq-length", "450", "--seed", "3",
        "--log-interval", "1", "--num-workers", "0", "--log-dir", str(inputs / name), "--train-iters", str(num_steps),
        *flags,
    ]  # fmt: skip


def run(
    inputs: Path, name: str, num_stages: int, *flags: str, num_ranks: int | None = None, num_workers: int = 0
) -> str:
    """Run mm.train with ``flags_of``; returns its standard output, and a failure shows all output.

    Data workers are slow to start: each is a new Python that imports torch and transformers.
    """
    words = flags_of(inputs, name, num_stages, "--num-workers", str(num_workers), *flags)
    return run_ranks(num_ranks or num_stages, "mm.train", *words)


def metrics(inputs: Path, name: str) -> list[dict]:
    """The metrics that a run has written, by step."""
    return json_lines(inputs / name / "logs" / "metrics.jsonl")
