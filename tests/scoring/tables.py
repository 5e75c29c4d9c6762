"""Benchmark files for tests in OpenCompass's format, with real pictures, and the peer's JSON file."""

import base64
import csv
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from tests.files import EXAMPLES


def encoded(seed: int, kind: str = "PNG") -> str:
    """A noise picture as base64, different for each seed."""
    pixels = np.random.default_rng(seed).integers(0, 256, (24, 32, 3), dtype=np.uint8)
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, kind)
    return base64.b64encode(stream.getvalue()).decode()


def write_table(path: Path, rows: Sequence[Mapping[str, str]]) -> str:
    """Write rows like pandas: with all columns, and quotes where needed."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    with path.open("w", encoding="utf-8", newline="") as stream:
        writer = csv.DictWriter(stream, columns, restval="", delimiter="\t", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    return str(path)


def peer_json(questions: str, output: str, directory: str) -> dict[str, Any]:
    """MindSpeed-MM's ``evaluate_*.json`` for the tiny model: the keys and values of the 7B's beside its sizes."""
    tiny = json.loads((EXAMPLES / "inference_qwen2_5_vl_tiny.json").read_text())
    example = json.loads((EXAMPLES / "evaluate_qwen2_5_vl_7b.json").read_text())
    del tiny["pipeline_class"], tiny["prompts"]
    names = ("min_pixels", "max_pixels", "evaluation_dataset", "evaluation_model", "use_custom_prompt")
    tiny |= {name: example[name] for name in names}
    tiny |= {"model_id": "Qwen2VlPipeline", "min_pixels": 784, "max_pixels": 3136, "dataset_path": questions,
             "result_output_path": output}
    tiny["tokenizer"]["from_pretrained"] = directory
    tiny["text_decoder"] |= {"tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 1}
    return tiny
