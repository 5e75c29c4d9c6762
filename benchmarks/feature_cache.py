"""How much of a step is saved where what a frozen ViT makes is kept: epochs of one run, the first against the others.

    python -m benchmarks.feature_cache [--side PIXELS] [--epochs NUMBER]

Prints the median seconds of a step of the first epoch, which computes, of the later ones, which read, and their ratio;
and the ratio of their FLOPs.  The model is the demo's, which is small; the shares of a real one are by its FLOPs.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

import numpy as np
from PIL import Image

from demo.tiny_checkpoint import build

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples" / "qwen2.5vl"
NUM_SAMPLES, BATCH = 32, 4


def write_inputs(directory: Path, side: int) -> None:
    """Samples with one square picture each, and the demo's model with a frozen ViT on one stage."""
    random, records = np.random.default_rng(0), []
    for number in range(NUM_SAMPLES):
        coarse = Image.fromarray(random.integers(0, 256, (8, 8, 3), dtype=np.uint8))
        coarse.resize((side, side), Image.Resampling.BICUBIC).save(directory / f"{number}.jpg")
        records.append({"messages": [{"role": "user", "content": f"<image>What is number {number}?"},
                                     {"role": "assistant", "content": "A picture."}], "images": [f"{number}.jpg"]})
    (directory / "samples.json").write_text(json.dumps(records))
    build(directory / "hf", [json.dumps(record) for record in records], seed=0)
    data = json.loads((EXAMPLES / "data_tiny.json").read_text())
    data["dataset_param"]["preprocess_parameters"] |= {
        "model_name_or_path": str(directory / "hf"), "image_max_pixels": side * side, "image_resize": "transformers"}
    data["dataset_param"]["basic_parameters"] |= {
        "dataset": str(directory / "samples.json"), "dataset_dir": str(directory)}
    (directory / "data.json").write_text(json.dumps(data))
    model = json.loads((EXAMPLES / "model_tiny.json").read_text())
    model["image_encoder"]["vision_encoder"] |= {"pipeline_num_layers": [8], "freeze": True}
    model["text_decoder"]["pipeline_num_layers"] = [4]
    (directory / "model.json").write_text(json.dumps(model))


def measure(directory: Path, side: int, num_epochs: int) -> list[dict]:
    """The metrics of each step."""
    write_inputs(directory, side)
    steps = num_epochs * NUM_SAMPLES // BATCH
    paths = {"--mm-model": "model.json", "--mm-data": "data.json", "--load": "hf", "--log-dir": "logs",
             "--vision-feature-cache": "kept"}
    command = [
        sys.executable, "-W", "ignore", "-m", "mm.train", "--device", "cpu", "--micro-batch-size", str(BATCH),
        "--seq-length", "2048", "--train-iters", str(steps), "--lr", "1e-4", "--num-workers", "0",
        *(word for flag, name in paths.items() for word in (flag, str(directory / name))),
    ]  # fmt: skip
    subprocess.run(command, cwd=ROOT, check=True)
    rows = map(json.loads, (directory / "logs" / "metrics.jsonl").read_text().splitlines())
    return [row for row in rows if row["kind"] == "step"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--side", type=int, default=448, help="of each picture, in pixels")
    parser.add_argument("--epochs", type=int, default=4)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        rows = measure(Path(directory), given.side, given.epochs)
    computed = [row for row in rows[1:] if row["num_cached_images"] == 0]  # the first step warms up
    kept = [row for row in rows if row["num_cached_images"] == row["num_images"]]
    seconds = [median(row["step_seconds"] for row in some) for some in (computed, kept)]
    flops = [median(row["model_flops_per_second_per_device"] * row["step_seconds"] for row in some)
             for some in (computed, kept)]
    print(f"{len(computed)} steps computed, {len(kept)} read; median seconds {seconds[0]:.3f} and {seconds[1]:.3f}: "
          f"ratio {seconds[1] / seconds[0]:.2f}, of FLOPs {flops[1] / flops[0]:.2f}")


if __name__ == "__main__":
    main()
