"""Everything that a run of the tiny model reads: a checkpoint, samples with pictures, and JSON files."""

import json
from pathlib import Path

import numpy as np
from PIL import Image

from demo.tiny_checkpoint import build
from tests.launch import ROOT

EXAMPLES = ROOT / "examples" / "qwen2.5vl"


def write_inputs(directory: Path) -> Path:
    """A checkpoint, ten samples (text-only, one and two pictures) and JSON files for one and two stages."""
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
    data = json.loads((EXAMPLES / "data_tiny.json").read_text())
    data["dataset_param"]["preprocess_parameters"]["model_name_or_path"] = str(directory / "hf")
    data["dataset_param"]["basic_parameters"] |= {
        "dataset": str(directory / "samples.json"),
        "dataset_dir": str(directory),
        "packing": False,
    }
    data["dataloader_param"]["sampler_type"] = "BaseRandomBatchSampler"
    (directory / "data.json").write_text(json.dumps(data))
    for num_stages, vision, language in ((1, [8], [4]), (2, [5, 3], [0, 4])):
        model = json.loads((EXAMPLES / "model_tiny.json").read_text())
        model["image_encoder"]["vision_encoder"]["pipeline_num_layers"] = vision
        model["text_decoder"]["pipeline_num_layers"] = language
        (directory / f"model_{num_stages}.json").write_text(json.dumps(model))
    return directory
